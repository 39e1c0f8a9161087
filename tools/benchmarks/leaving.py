"""What it costs when inputs go another way than those before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tools.benchmarks.comparing import Cells
from tools.benchmarks.models import Case, inputs_of
from tools.benchmarks.timing import once, summary
from tools.benchmarks.ways import assert_right

__all__ = ["diverging", "recompiling"]


def diverging(case: Case, rounds: int) -> Cells:
    """Time the call that leaves what is known, and its neighbours.

    `eager` is the model with that input, `traced anew` a first call with it, `resumed` a call
    with it where another input has been traced, `replayed` one more such call.
    """
    assert case.elsewhere is not None
    with torch.no_grad():
        model, args = case.model(), inputs_of(case)
        others = (case.elsewhere(*args),)
        wanted = model(*others)
        samples: dict[str, list[float]] = {
            "eager": [], "traced anew": [], "resumed": [], "replayed": []
        }  # fmt: skip
        for number in range(rounds + 1):
            fresh, knowing = bt.BendedModule(model), bt.BendedModule(model)
            knowing(*args)
            took = {
                "eager": once(lambda: model(*others)),
                "traced anew": once(_called(fresh, others)),
                "resumed": once(_called(knowing, others)),
                "replayed": once(_called(knowing, others)),
            }
            for bended in (fresh, knowing):
                assert_right("a resumed call", bended(*others), wanted, exact=True)
            assert knowing.stats.retraces == 1, knowing.stats
            if number:  # the first round looks at code that no round looks at again
                for name, seconds in took.items():
                    samples[name].append(seconds)
        cells: Cells = {}
        eager = summary(samples["eager"]).median
        for name, listed in samples.items():
            times = summary(listed)
            relative = {
                key: value / eager
                for key, value in times.json().items() if key in ("median", "low", "high")
            }  # fmt: skip
            cells[name] = times.json() | {"relative": relative}
        return cells


def recompiling(case: Case, compiled: Callable[[nn.Module], Callable[..., Any]]) -> float:
    """Return how much longer the first call with other inputs takes than the second, in seconds."""
    assert case.elsewhere is not None
    with torch.no_grad():
        model, args = case.model(), inputs_of(case)
        others = (case.elsewhere(*args),)
        call = compiled(model)
        call(*args)
        first = once(lambda: call(*others))
        return first - once(lambda: call(*others))


def _called(bended: bt.BendedModule, args: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: bended(*args)
