"""Comparing ways to do the same to a model: checked first, then timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tools.benchmarks.models import Case, inputs_of
from tools.benchmarks.timing import Times, interleaved, summary
from tools.benchmarks.ways import (
    Refused,
    Way,
    WrongOutput,
    assert_right,
    reason_of,
    sharing_parameters,
)  # fmt: skip

__all__ = ["Cell", "Cells", "compared", "compared_alone", "merged"]

# Times as plain data: `median`, `low`, `high` and `least` in seconds, `relative` (the same three
# of the rounds divided by eager's), `first`: the seconds until the first result and
# until it was settled; or `reason`: why there are none.
Cell = dict[str, Any]
Cells = dict[str, Cell]


def compared(
    case: Case, ways: Iterable[Way], rounds: int, seconds: float, *, grad: bool = False
) -> Cells:
    """Compare ways in this process.

    Args:
        case: the model and its inputs.
        ways: `eager` first, which the others are compared with.
        rounds: how many rounds there are.
        seconds: how long each way may take in all, about.
        grad: whether gradients are recorded.

    Raises:
        WrongOutput: if one of ours gives something else than the model.
    """
    with torch.set_grad_enabled(grad):
        model, args = case.model(), inputs_of(case)
        cells: Cells = {}
        calls: dict[str, Callable[[], Any]] = {}
        wanted = None
        for way in ways:
            if wanted is None:
                wanted = way.prepare(model, args)()
            call, cells[way.name] = _prepared(way, model, args, wanted)
            if call is not None:
                calls[way.name] = call
        _timed(cells, interleaved(calls, rounds, seconds=seconds))
    return cells


def compared_alone(
    pairs: Sequence[tuple[Case, Way, Way]], rounds: int, seconds: float, *, grad: bool = False
) -> dict[str, Cells]:
    """Compare a way that changes how torch works with eager.

    Args:
        pairs: cases with the way and with eager. All of eager is timed before the way is there.
        rounds: how many rounds there are.
        seconds: how long each may take in all, about.
        grad: whether gradients are recorded.
    """
    found: dict[str, Cells] = {}
    begun: list[tuple[Way, Way, nn.Module, tuple[torch.Tensor, ...], Any, dict[str, Times]]] = []
    with torch.set_grad_enabled(grad):
        for case, way, eager in pairs:
            model, args = case.model(), inputs_of(case)
            found[case.name] = {eager.name: {}, way.name: {}}
            try:
                call = eager.prepare(model, args)
                wanted = call()
            except Refused as error:
                reason = reason_of(error)
                found[case.name] = {name: {"reason": reason} for name in (eager.name, way.name)}
                continue
            times = interleaved({eager.name: call}, rounds, seconds=seconds)
            begun.append((way, eager, model, args, wanted, times))
        timed = [case for case, way, _ in pairs if "reason" not in found[case.name][way.name]]
        for case, (way, _, model, args, wanted, times) in zip(timed, begun, strict=True):
            prepared, found[case.name][way.name] = _prepared(way, model, args, wanted)
            if prepared is not None:
                times |= interleaved({way.name: prepared}, rounds, seconds=seconds)
            _timed(found[case.name], times, in_turn=False)
    return found


def merged(cells: Sequence[Cell]) -> Cell:
    """Put together what several processes found for one way."""
    timed = [cell for cell in cells if "median" in cell]
    if not timed:
        return cells[0]
    made = {**timed[0], **_pooled(timed), "relative": _pooled([c["relative"] for c in timed])}
    made["rounds"] = sum(cell["rounds"] for cell in timed)
    return made


def _pooled(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    median = sum(cell["median"] for cell in cells) / len(cells)
    low, high = min(cell["low"] for cell in cells), max(cell["high"] for cell in cells)
    return {"median": median, "low": low, "high": high}


def _prepared(
    way: Way, model: Any, args: tuple[torch.Tensor, ...], wanted: Any
) -> tuple[Callable[[], Any] | None, Cell]:
    if not way.is_installed():
        return None, {"reason": "not installed"}
    begun = time.perf_counter()
    try:
        call = way.prepare(sharing_parameters(model), args)
        given = call()
        first = time.perf_counter() - begun
        if way.checked:
            assert_right(way.name, given, wanted, exact=way.exact)
        for _ in range(way.settling):
            given = call()
        settled = time.perf_counter() - begun
        if way.checked:
            assert_right(way.name, given, wanted, exact=way.exact)
    except WrongOutput as error:
        if way.ours:
            raise
        return None, {"reason": reason_of(error)}
    except (Exception, Refused) as error:
        if way.ours and not isinstance(error, Refused):
            raise
        return None, {"reason": reason_of(error)}
    return call, {"first": first, "settled": settled}


def _timed(cells: Cells, times: Mapping[str, Times], *, in_turn: bool = True) -> None:
    eager = next(iter(times.values()))
    if not in_turn:  # then no round of one belongs to one of the other
        eager = summary([eager.median])
    for name, found in times.items():
        share = found.relative_to(eager)
        relative = {"median": share.median, "low": share.low, "high": share.high}
        cells[name] |= found.json() | {"relative": relative}
