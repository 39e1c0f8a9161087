"""Feeding a model a stream of inputs: what each hundred calls take, and what is recorded."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import bendtrace as bt
from tests.promise import seed_everything
from tools.benchmarks.streams import Stream, stream_of
from tools.benchmarks.ways import WrongOutput, assert_right, reason_of, sharing_parameters

__all__ = ["Call", "Fed", "after_first", "compiled", "fed", "feed", "known", "relative"]

# What a stream gave, as plain data: `calls`, the `size` of a part, and the `seconds` that eager
# and others took for each part.
Fed = dict[str, Any]
Call = Callable[..., Any]

_WARMING = 3  # calls of eager before the stream, for what torch does only once


def feed(
    stream: Stream,
    model: Call,
    other: Call,
    calls: int,
    size: int,
    compare: Callable[[int, Any, Any], object],
    until: float = math.inf,
    warm: Call | None = None,
) -> Fed:
    """Feed a stream to a model and to another way to call it, in turn.

    Args:
        stream: what is fed.
        model: the model itself.
        other: the other way.
        calls: how many.
        size: how many calls are one part.
        compare: is given the number of each call, what the model gave and what the other gave.
        until: no call is begun after this time (of `time.perf_counter`).
        warm: what is called before the stream, if the model itself would notice.

    Raises:
        WrongOutput: if the other draws other random numbers than the model.
    """
    for number in range(_WARMING):
        (warm or model)(*stream.inputs(-1 - number))
    seconds: dict[str, list[float]] = {"eager": [], "other": []}
    done = 0
    for number in range(calls):
        if time.perf_counter() > until:
            break
        wanted, after, eager = _timed(model, stream.inputs(number), number)
        given, also_after, took = _timed(other, stream.inputs(number), number)
        compare(number, wanted, given)
        if not torch.equal(after, also_after):
            raise WrongOutput(f"call {number} of {stream.name!r} draws other random numbers")
        if number % size == 0:
            for parts in seconds.values():
                parts.append(0.0)
        seconds["eager"][-1] += eager
        seconds["other"][-1] += took
        done += 1
    return {"calls": done, "size": size, "seconds": seconds}


def _timed(call: Call, args: tuple[Any, ...], seed: int) -> tuple[Any, torch.Tensor, float]:
    """Return what a call gives, the state of the generator after it, and how long it took."""
    seed_everything(seed)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        begun = time.perf_counter()
        output = call(*args)
        took = time.perf_counter() - begun
    finally:
        if was_enabled:
            gc.enable()
    return output, torch.get_rng_state(), took


def fed(name: str, calls: int, size: int, bend: Callable[[Any], Any] = bt.BendedModule) -> Fed:
    """Feed a stream to a model and to its `BendedModule`.

    Args:
        name: of the stream.
        calls: how many.
        size: how many calls are one part.
        bend: makes the `BendedModule`.

    Returns:
        What `feed` returns, how many outputs were `compared` bit by bit, the counts of `stats`,
        and the `states` and `pairs` of a state and an answer that are known; None where
        paths do not join.

    Raises:
        WrongOutput: if a call gives other bits than the model.
    """
    stream = stream_of(name)
    compared: list[int] = []

    def compare(number: int, wanted: Any, given: Any) -> None:
        assert_right(f"bended, in call {number} of {name!r},", given, wanted, exact=True)
        compared.append(number)

    with torch.no_grad():
        model = stream.model()
        bended = bend(sharing_parameters(model))
        found = feed(stream, model, bended, calls, size, compare)
    return found | {"compared": len(compared)} | known(bended)


def known(bended: bt.BendedModule) -> dict[str, int | None]:
    """Return the counts of `stats`, and how many states and pairs of state and answer are known."""
    programs = bended._trees.latest.programs()
    exits = [len(node.exits) for one in programs if one.graph for node in one.graph.nodes()]
    return asdict(bended.stats) | {"states": len(exits) or None, "pairs": sum(exits) or None}


def compiled(name: str, calls: int, size: int, seconds: float) -> Fed:
    """Feed a stream to a model and to what torch.compile makes of it.

    Args:
        name: of the stream.
        calls: how many.
        size: how many calls are one part.
        seconds: after so long no further call is begun.

    Returns:
        What `feed` returns, how many `graphs` were compiled, how often a graph `breaks`, by
        reason, and how many outputs `differ` by more than compile's tolerance; also
        a `reason` if not all calls were made.
    """
    from torch._dynamo.utils import counters  # which takes long to import

    stream = stream_of(name)
    differing: list[int] = []

    def compare(number: int, wanted: Any, given: Any) -> None:
        try:
            assert_right("torch.compile", given, wanted, exact=False)
        except WrongOutput:
            differing.append(number)

    torch._dynamo.reset()
    counters.clear()
    try:
        with torch.no_grad():
            model = stream.model()
            call = torch.compile(sharing_parameters(model), backend="inductor")
            begun = time.perf_counter()
            found = feed(stream, model, call, calls, size, compare, begun + seconds)
            found["graphs"] = counters["stats"]["unique_graphs"]
            found["breaks"] = _by_reason(counters["unimplemented"])
    except Exception as error:
        return {"reason": reason_of(error)}
    finally:
        torch._dynamo.reset()
    if found["calls"] < calls:
        found["reason"] = f"{found['calls']} calls in {seconds:.0f} s"
    return found | {"differ": len(differing)}


def _by_reason(counted: Counter[str]) -> dict[str, int]:
    """Return how often graphs break, by the first line of what is said of each."""
    found: Counter[str] = Counter()
    for text, number in counted.items():
        found[text.splitlines()[0]] += number
    return dict(found)


def relative(found: Fed) -> list[float]:
    """Return what each part of a stream took, of eager's time."""
    seconds = found["seconds"]
    return [took / eager for eager, took in zip(seconds["eager"], seconds["other"], strict=True)]


def after_first(parts: Sequence[float]) -> float:
    """Return the median of the parts after the first.

    Example:
        >>> after_first([40.0, 0.9, 0.7, 0.8])
        0.8
    """
    return statistics.median(parts[1:] or parts)
