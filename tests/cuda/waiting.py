"""Waits: how often a call needs a value that the device has, before it can go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

import bendtrace as bt
from tests.cuda.compiling import inputs_of, make, options_of, reasons
from tests.cuda.rows import RIGHT, WRONG, Options, Row

__all__ = ["NO_DEVICE", "check", "names", "values_read", "waits"]

NO_DEVICE = "skipped: needs a GPU"
_SAID = "called a synchronizing CUDA operation"
# What gives Python a value, and what has to know values to know its size.
_READS, _SIZES = "aten::_local_scalar_dense", "aten::nonzero"

Call = Callable[[], Any]


def names(options: Options) -> list[str]:
    """Return the names of the cases."""
    return [
        "Gated", "Experts", "MaskedExperts", "Assigned", "Layered", "gpt2", "bert", "mixtral",
        "longformer",
    ]  # fmt: skip


def check(name: str, options: Options) -> Row:
    """Count for the model, a replay, and a compiled call."""
    model, inputs = make(name, options), inputs_of(name, options)
    backend = "inductor with CUDA graphs" if options.on_cuda else "aot_eager"
    bended = bt.BendedModule(model)
    served = bt.BendedModule(model, **options_of(backend))
    calls: dict[str, Call] = {
        "eager": lambda: model(**inputs), "replay": lambda: bended(**inputs),
        "compiled": lambda: served(**inputs),
    }  # fmt: skip
    with torch.no_grad():
        for call in calls.values():
            for _ in range(6):
                call()
        replays, hits = bended.stats.replays, served.compiled.hits
        read = {way: values_read(call) for way, call in calls.items()}
        waited = {way: waits(call) for way, call in calls.items()} if options.on_cuda else {}
    was_compiled = served.compiled.hits >= hits + (2 if options.on_cuda else 1)
    numbers: dict[str, Any] = {
        way: f"{values} read, {sizes} sizes" for way, (values, sizes) in read.items()
    }
    numbers |= {f"waits, {way}": count for way, count in waited.items()} or {"waits": NO_DEVICE}
    if not was_compiled:
        said = f"not compiled: {reasons(served)}"
        numbers |= dict.fromkeys(numbers.keys() & {"compiled", "waits, compiled"}, said)
    faults = []
    if bended.stats.replays <= replays:
        faults.append("was not replayed")
    if sum(read["replay"]) > sum(read["eager"]):
        faults.append("a replay reads more than the model")
    if options.on_cuda and waited["replay"] > waited["eager"]:
        faults.append("a replay waits more often than the model")
    if was_compiled:
        values, sizes = read["compiled"]
        if values > 1 or sizes > read["eager"][1]:
            faults.append("a compiled call reads more than its one look at the guards")
        if options.on_cuda and waited["compiled"] > 1 + sizes:
            faults.append("a compiled call waits more often than for its one look at the guards")
    return Row(name, WRONG if faults else RIGHT, "; ".join(faults), numbers)


def values_read(call: Call) -> tuple[int, int]:
    """Return how many values a call reads, and how many sizes that depend on values.

    The profiler counts, since under a dispatch mode no path is served compiled.
    """
    with profile() as seen:
        call()
    counts = {event.key: event.count for event in seen.key_averages()}
    return counts.get(_READS, 0), counts.get(_SIZES, 0)


def waits(call: Call) -> int:
    """Return how often a call waits for the GPU, as CUDA's own debug mode counts."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(_SAID in str(warning.message) for warning in heard)
