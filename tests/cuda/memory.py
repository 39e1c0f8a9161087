"""Memory: the peak of a replay, of that of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import bendtrace as bt
from tests.cuda.moving import moved, tensors_in
from tests.cuda.rows import RIGHT, WRONG, Options, Row
from tools.benchmarks.memory import cases, peak_of
from tools.benchmarks.table import amount

__all__ = ["NO_ALLOCATOR", "check", "names"]

NO_ALLOCATOR = "skipped: needs a GPU"
# Elsewhere a data guard keeps what was computed before it, in case the call has to go on from it.
_WITHOUT_DATA_GUARDS = "no data guard"
_MOST = 1.1
_MODES = ("no_grad", "grad", "grad and backward")


def names(options: Options) -> list[str]:
    """Return the names of the cases."""
    return [f"{name}, {mode}" for name in cases() for mode in _MODES]


def check(name: str, options: Options) -> Row:
    """Compare the peaks of a replay and of the model, in bytes of tensors and of the allocator."""
    title, mode = name.rsplit(", ", 1)
    torch.manual_seed(0)
    model, inputs = cases()[title]
    model, inputs = moved(model, options.device), moved(inputs, options.device)
    bended = bt.BendedModule(model)

    def calling(call: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.set_grad_enabled(mode != "no_grad"):
                out = call(**inputs)
                if mode == "grad and backward":
                    floats = [leaf for leaf in tensors_in(out) if leaf.requires_grad]
                    torch.stack([leaf.sum() for leaf in floats]).sum().backward()
                    model.zero_grad()
                return out

        return run

    eager, replay = calling(model), calling(bended)
    for _ in range(2):  # the trace, and what libraries keep for themselves after a first call
        eager(), replay()
    replays = bended.stats.replays
    alive = peak_of(eager)[0], peak_of(replay)[0]
    numbers = {
        "tensors, eager": amount(alive[0]), "tensors, replay": amount(alive[1]),
        "ratio": f"{alive[1] / alive[0]:.2f}x", "allocator": NO_ALLOCATOR,
    }  # fmt: skip
    worst = alive[1] / alive[0]
    if options.on_cuda:
        allocated = _allocated(eager, options), _allocated(replay, options)
        share = allocated[1] / max(allocated[0], 1)
        numbers["allocator"] = f"{amount(allocated[0])}, {amount(allocated[1])}, {share:.2f}x"
        worst = max(worst, share)
    if bended.stats.replays <= replays:
        return Row(name, WRONG, "was not replayed", numbers)
    if title == _WITHOUT_DATA_GUARDS and worst > _MOST:
        return Row(name, WRONG, f"more than {_MOST} of the model's peak, without guards", numbers)
    return Row(name, RIGHT, numbers=numbers)


def _allocated(call: Callable[[], Any], options: Options) -> int:
    """Return the peak of a call above what was allocated before it, in bytes."""
    gc.collect()
    options.synchronize()
    torch.cuda.reset_peak_memory_stats(options.device)
    before = torch.cuda.memory_allocated(options.device)
    out = call()
    options.synchronize()
    del out
    return torch.cuda.max_memory_allocated(options.device) - before
