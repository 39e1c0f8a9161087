"""Ways to get a graph or a log of a model, as ways to call it that cost more."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.record.recorded_call import Signature, record
from tools.benchmarks.memory import peak_of
from tools.benchmarks.models import Case, inputs_of
from tools.benchmarks.timing import interleaved
from tools.benchmarks.ways import WAYS, Call, Way

__all__ = ["TRACERS", "memory_of_torchlens", "memory_of_traces", "per_op"]


def _trace(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: bt.trace(model, *args).output


def _trace_all(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: bt.trace(model, *args, save="all").output


def _fx(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: torch.fx.symbolic_trace(model)


def _make_fx(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    from torch.fx.experimental.proxy_tensor import make_fx

    return lambda: make_fx(model)(*args)


def _export(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: torch.export.export(model, args)


_EAGER = WAYS[0]
_TORCHLENS = next(way for way in WAYS if way.name == "torchlens")

TRACERS = (
    _EAGER,
    Way("trace, nothing saved", _trace, ours=True),
    Way("trace, all saved", _trace_all, ours=True),
    Way("torch.fx", _fx, settling=0, checked=False),
    Way("make_fx", _make_fx, settling=0, checked=False),
    Way("torch.export", _export, settling=0, checked=False),
    _TORCHLENS,
)


def memory_of_traces(case: Case) -> dict[str, int]:
    """Return bytes: of tensors alive at the peak of a call, and in a log that saved all.

    What is saved in one memory is counted once. `python` is what a trace keeps besides tensors,
    for each op.
    """
    import tracemalloc

    model, args = case.model(), inputs_of(case)
    with torch.no_grad():
        found = {
            "eager's peak": peak_of(lambda: model(*args))[0],
            "trace's peak": peak_of(lambda: bt.trace(model, *args))[0],
        }
        log = bt.trace(model, *args, save="all")
        kept: dict[int, int] = {}
        tensors = [entry.tensor_contents for entry in log.layers if entry.kind == "op"]
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                kept[torch._C._data_address(tensor)] = tensor.untyped_storage().nbytes()
        found["kept by all saved"] = sum(kept.values())
        found["saved one by one"] = sum(
            tensor.numel() * tensor.element_size()
            for tensor in tensors
            if isinstance(tensor, Tensor)
        )
        del log, tensors
        gc.collect()
        tracemalloc.start()
        recording = record(model, args, {}, Signature(model))
        found["python"] = tracemalloc.get_traced_memory()[0] // max(1, len(recording.tape.ops))
        tracemalloc.stop()
        found["ops"] = len(recording.tape.ops)
    return found


def memory_of_torchlens(case: Case) -> int:
    """Return the bytes that torchlens says its log of a model keeps."""
    torchlens = importlib.import_module("torchlens")
    with torch.no_grad():
        log = torchlens.trace(case.model(), list(inputs_of(case)))
    return int(log.saved_activation_memory)


class _Small(nn.Module):
    """Small ops, each given the one before, in a loop."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.ops // 2):
            x = (x + 0.5) * 0.5
        return x


def per_op(rounds: int, seconds: float, ops: int = 500) -> dict[str, dict[str, float]]:
    """Return what tracing adds to an op of 4 by 4 numbers, in seconds.

    Of the thread's own time, so that what else runs does not count; `least` and `median`.
    """
    model, x = _Small(ops), torch.ones(4, 4)
    signature = Signature(model)
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(x),
        "recorded": lambda: record(model, (x,), {}, signature),
        "trace, nothing saved": lambda: bt.trace(model, x),
        "trace, all saved": lambda: bt.trace(model, x, save="all"),
    }
    with torch.no_grad():
        times = interleaved(ways, rounds, seconds=seconds, clock=time.thread_time)
    least, median = times["eager"].least, times["eager"].median
    found = {
        name: {"least": (took.least - least) / ops, "median": (took.median - median) / ops}
        for name, took in times.items()
    }
    return found | {"eager": {"least": least / ops, "median": median / ops}}
