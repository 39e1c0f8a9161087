"""Calls of exported programs, beside eager, bended and torch.compile.

Models with branches and loops on values are called with inputs that they were not exported from,
which take different paths. All ways are checked before they are timed, round by round in turn, by
the time of the thread.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bendtrace as bt
from bendtrace.export.exporting import difference
from tests.export_models import MODELS
from tools.benchmarks.comparing import Cells
from tools.benchmarks.table import Table, duration, ratio
from tools.benchmarks.timing import interleaved

__all__ = ["EXPORTED", "compared_exported", "table_of_exported"]

EXPORTED = (
    "gated", "solver", "early exit", "top-1 experts", "greedy decoding", "suppression",
)  # fmt: skip
_KNOWN, _CALLED = 50, 8  # inputs that a model is exported from, and inputs that are timed


def compared_exported(name: str, rounds: int, seconds: float, compiles: bool) -> Cells:
    """Compare calls of an exported model with those of the model.

    Args:
        name: the model, one of `tests.export_models`.
        rounds: how many rounds there are.
        seconds: how long each way may take in all, about.
        compiles: whether to compile as well: a package by AOTInductor, and torch.compile.
    """
    example = MODELS[name]
    model = example.model()
    known = list(itertools.islice(example.stream(1), _KNOWN))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.aoti.pt2"
        exported = bt.BendedModule(model).export(*known, to=path if compiles else None)
        inputs = _called(exported, example.stream(2))
        bended = bt.BendedModule(model)
        for args in known:
            bended(*args)
        ways: dict[str, Callable[..., Any]] = {
            "eager": model, "bended": bended, "exported program": exported.program.module(),
        }  # fmt: skip
        if compiles:
            ways["AOTInductor package"] = torch._inductor.aoti_load_package(str(path))
            ways["torch.compile"] = torch.compile(model)
        for way, function in ways.items():
            tolerance = None if way in ("bended", "exported program") else 1e-5
            for args in inputs * 3:  # for as long as it may still compile
                different = difference(function(*args), model(*args), tolerance)
                if different is not None:
                    raise ValueError(f"{name}: {way} gives something else: {different}")
        calls = {way: _each(function, inputs) for way, function in ways.items()}
        times = interleaved(calls, rounds, seconds=seconds, clock=time.thread_time)
    cells: Cells = {}
    for way, found in times.items():
        share = found.relative_to(times["eager"])
        cells[way] = {
            "median": found.median / len(inputs),
            "relative": {"median": share.median, "low": share.low, "high": share.high},
        }
    return cells


def _called(exported: Callable[..., Any], stream: Any) -> list[Any]:
    """Return inputs that go to no side that is unseen."""
    found: list[Any] = []
    while len(found) < _CALLED:
        args = next(stream)
        try:
            exported(*args)
        except RuntimeError:
            continue
        found.append(args)
    return found


def _each(function: Callable[..., Any], inputs: list[Any]) -> Callable[[], None]:
    def call() -> None:
        for args in inputs:
            function(*args)

    return call


def table_of_exported(data: dict[str, Cells]) -> Table:
    """Make the table of what was found."""
    names = list(dict.fromkeys(way for cells in data.values() for way in cells))
    rows = [
        [name, duration(cells["eager"]["median"]), *(ratio(cells.get(way)) for way in names[1:])]
        for name, cells in data.items()
    ]
    return Table(
        "exported", "A call of an exported model, of eager's time", ["model", "eager", *names[1:]],
        rows, "python -m tools.benchmarks export",
        f"The models of tests/export_models.py, exported from {_KNOWN} inputs and called with "
        f"{_CALLED} others. Times of the thread.",
    )  # fmt: skip
