"""How time and memory grow with the numbers of ops, traces and guards."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import FinishedReplay
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recording
from tools.benchmarks.timing import once

__all__ = ["GROWTHS", "exponent", "growth"]

Series = dict[str, list[float]]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit `values = c * sizes ** exponent` and return the exponent.

    Over the larger half of the sizes, in orders of magnitude: in the smaller ones, what a call
    costs apart from them hides growth.

    Example:
        >>> round(exponent([1, 10, 100, 1000], [5, 14, 1e4, 1e6]), 3)
        2.0
    """
    middle = math.sqrt(min(sizes) * max(sizes))
    points = [
        (math.log(size), math.log(max(value, 1e-12)))
        for size, value in zip(sizes, values, strict=True)
        if size >= middle * 0.9  # sizes are rounded
    ]
    x = sum(point[0] for point in points) / len(points)
    y = sum(point[1] for point in points) / len(points)
    slope = sum((point[0] - x) * (point[1] - y) for point in points)
    return slope / sum((point[0] - x) ** 2 for point in points)


def growth(kind: str, largest: int) -> dict[str, Any]:
    """Measure one kind of growth.

    Returns:
        `sizes`, `series`: seconds (or bytes) of each size by what was measured, and `exponents`.
    """
    measure, smallest = GROWTHS[kind]
    sizes = [
        round(smallest * 10 ** (step / 2))
        for step in range(round(2 * math.log10(largest / smallest)) + 1)
    ]
    series: Series = {}
    with torch.no_grad():
        for size in sizes:
            for name, value in measure(size).items():
                series.setdefault(name, []).append(value)
    exponents = {name: exponent(sizes, values) for name, values in series.items()}
    return {"sizes": sizes, "series": series, "exponents": exponents}


def _least(call: Callable[[], Any], times: int = 3) -> float:
    return min(once(call, time.thread_time) for _ in range(times))


def _taken(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return what one call takes and gives."""
    found: list[Any] = []
    return once(lambda: found.append(call()), time.thread_time), found[0]


def _program(recording: Recording) -> Program:
    return Program(recording, GlobalState.current())


def _of_ops(model: Callable[[Tensor], Tensor]) -> dict[str, float]:
    x = torch.ones(4, 4)
    signature = Signature(model)
    times = 3
    trace = _least(lambda: record(model, (x,), {}, signature), times)
    generate, program = _taken(lambda: _program(record(model, (x,), {}, signature)))
    result = program.run((x,))
    assert isinstance(result, FinishedReplay)
    assert torch.equal(result.output, model(x))
    replay = _least(lambda: program.run((x,)), times)
    log = _least(lambda: bt.trace(model, x, save="all"), 2)
    gc.collect()
    return {
        "eager": _least(lambda: model(x), times), "trace": trace, "trace, all saved": log,
        "trace and generated code": generate, "replay": replay,
        "blocks of memory of the trace": _blocks(lambda: record(model, (x,), {}, signature)),
    }  # fmt: skip


def _blocks(call: Callable[[], Any]) -> float:
    """Return how many blocks of memory Python's allocator keeps for what a call gives.

    Not in bytes: `tracemalloc` asks for the line at each of them, and CPython 3.11 counts it from
    the first of the function, so that with one of 100,000 lines it is the square that is measured.

    Garbage is collected until there is none: what finalizers release of earlier measurements is
    found by the next collection only, and would be counted against the call.
    """
    while gc.collect():
        pass
    before = sys.getallocatedblocks()
    kept = call()
    gc.collect()
    found = sys.getallocatedblocks() - before
    del kept
    return float(found)


def _loop(ops: int) -> dict[str, float]:
    def model(x: Tensor) -> Tensor:
        for _ in range(ops):
            x = x + 1.0
        return x

    return _of_ops(model)


def _chain(ops: int) -> dict[str, float]:
    """One line of source for each op."""
    made: dict[str, Any] = {}
    source = ["def model(x):", *["    x = x + 1.0"] * ops, "    return x"]
    exec(compile("\n".join(source), f"<chain of {ops}>", "exec"), made)
    return _of_ops(made["model"])


def _by_inputs(traces: int) -> dict[str, float]:
    """As many programs as there are sizes of the input."""

    def model(x: Tensor) -> Tensor:
        return x + len([0] * x.shape[0])

    return _of_traces(model, [torch.ones(size + 1) for size in range(traces)])


def _by_values(traces: int) -> dict[str, float]:
    """As many sides of one data guard."""

    def model(x: Tensor) -> Tensor:
        return x + int(x[0])

    return _of_traces(model, [torch.full((4,), float(size)) for size in range(traces)])


def _by_iterations(traces: int) -> dict[str, float]:
    """As many paths, each of which branches off the one before."""

    def model(x: Tensor) -> Tensor:
        marks = ""  # a number would be lifted, and the loop would close
        while x[0] > len(marks):
            marks += "|"
        return x + len(marks)

    found = _of_traces(model, [torch.full((4,), float(size)) for size in range(traces)])
    # Of a run of so many iterations: what each of them costs.
    return {name: value / traces for name, value in found.items()}


def _of_traces(model: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> dict[str, float]:
    bended = bt.BendedModule(model, max_traces=None)
    record_all, _ = _taken(lambda: [bended(x) for x in inputs])
    assert bended.stats.traces == len(inputs)
    assert all(torch.equal(bended(x), model(x)) for x in inputs)
    return {
        "recording all": record_all,
        "calling all": _least(lambda: [bended(x) for x in inputs], 2),
        "blocks of memory": _blocks(
            lambda: _called(bt.BendedModule(model, max_traces=None), inputs)
        ),
    }


def _called(bended: bt.BendedModule, inputs: list[Tensor]) -> bt.BendedModule:
    for x in inputs:
        bended(x)
    return bended


def _data_guards(guards: int) -> dict[str, float]:
    def model(x: Tensor) -> Tensor:
        for _ in range(guards):
            x = x + 1.0 if x.sum() > -1e9 else x
        return x

    return _of_guards(model, (torch.ones(4),))


def _input_guards(guards: int) -> dict[str, float]:
    def model(*xs: Tensor) -> Tensor:
        found = 0
        for x in xs:
            if x.shape[0] > 2:
                found = found + 1
        return xs[0] + found

    return _of_guards(model, tuple(torch.ones(4) for _ in range(guards)))


def _of_guards(model: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, float]:
    signature = Signature(model)
    trace, recording = _taken(lambda: record(model, args, {}, signature))
    generate, program = _taken(lambda: _program(recording))
    bound = tuple(signature.bind(args, {}).values())
    assert program.admits(bound)
    return {
        "trace": trace, "generating the code": generate,
        "guard check": _least(lambda: program.admits(bound)),
        "replay": _least(lambda: program.run(bound)),
    }  # fmt: skip


# What grows, and the smallest number of it.
GROWTHS: dict[str, tuple[Callable[[int], dict[str, float]], int]] = {
    "ops in a loop": (_loop, 100),
    "ops in a chain": (_chain, 100),
    "traces by inputs": (_by_inputs, 1),
    "traces by values": (_by_values, 1),
    "traces by iterations": (_by_iterations, 1),
    "data guards": (_data_guards, 1),
    "input guards": (_input_guards, 1),
}
