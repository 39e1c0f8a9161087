"""What a log costs beyond a trace: `python -m tools.benchmarks.log`.

All rows of a model are measured in turn, round by round, in one process, after checking that the
logged run gives the same bits. Printed are medians of processor time over the rounds, the garbage
collector held back while one is measured. Where torchlens is installed, its time for the same log
stands beside ours.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import bendtrace as bt
from tests.hf_models import MODELS
from tests.promise import bits
from tools.benchmarks.memory import peak_of
from tools.benchmarks.models import LoopRNN


class Pointwise(nn.Module):
    """As many small ops as one wants, each given the one before.

    Args:
        ops: how many.
        inplace: whether each works in place.
    """

    def __init__(self, ops: int, *, inplace: bool = False) -> None:
        super().__init__()
        self.ops, self.inplace = ops, inplace

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for _ in range((self.ops - 1) // 2):
            x = x.add_(0.5).mul_(0.5) if self.inplace else (x + 0.5) * 0.5
        return x


def cases() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return the models to measure and their keyword arguments."""
    gpt2 = next(model for model in MODELS if model.name == "gpt2")
    return {
        "gpt2": (gpt2.make(), gpt2.inputs()),
        "loop RNN, 100 steps": (LoopRNN(), {"xs": torch.randn(100, 4, 64)}),
        "10,000 ops": (Pointwise(10_001), {"x": torch.randn(4, 64)}),
        "10,000 ops in place": (Pointwise(10_001, inplace=True), {"x": torch.randn(4, 64)}),
    }


def one_of(model: nn.Module, inputs: dict[str, Any]) -> str:
    """Return the name of a layer in the middle of a run."""
    layers = [entry for entry in bt.trace(model, **inputs).layers if entry.kind == "op"]
    return layers[len(layers) // 2].name


def measure(model: nn.Module, inputs: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way to log a model."""
    wanted = bits(model(**inputs))
    full = bt.trace(model, save="all", **inputs)
    assert bits(full.output) == wanted
    name = one_of(model, inputs)

    def text() -> str:
        return str(bt.trace(model, save="all", **inputs))

    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(**inputs),
        "trace": lambda: bt.trace(model, **inputs),
        "none": lambda: bt.trace(model, save="none", **inputs),
        "all": lambda: bt.trace(model, save="all", **inputs),
        "one": lambda: bt.trace(model, save=name, **inputs),
        "function": lambda: bt.trace(model, save=lambda entry: False, **inputs),
        "gradients": lambda: bt.trace(model, save="all", save_gradients=True, **inputs),
        "print": text,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            gc.collect()
            gc.disable()
            begun = time.process_time()
            made = run()
            times[way].append(time.process_time() - begun)
            gc.enable()
            del made  # what it has to free is no time of the next
    medians = {way: statistics.median(listed) for way, listed in times.items()}
    begun = time.process_time()
    assert full.validate()
    medians["validate"] = time.process_time() - begun
    medians["ops"] = len(full.ops)
    return medians


def torchlens_seconds(model: nn.Module, inputs: dict[str, Any]) -> float | None:
    """Return the seconds that torchlens takes to log a run; None if it is not there."""
    if importlib.util.find_spec("torchlens") is None:
        return None
    torchlens = importlib.import_module("torchlens")
    single = next(iter(inputs.values())) if len(inputs) == 1 else None
    named = None if len(inputs) == 1 else dict(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchlens.trace(model, single, named)  # imports what it needs when first called
        begun = time.process_time()
        torchlens.trace(model, single, named)
        return time.process_time() - begun


def peaks() -> list[list[str]]:
    """Return rows with the most bytes alive at once in eager and in a plain trace, and those kept.

    Values that are kept in one memory are counted once.
    """
    return [
        _peaks("100 ops", Pointwise(101)),
        _peaks("100 ops in place", Pointwise(101, inplace=True)),
        _peaks("100 views", Views()),
    ]


class Views(nn.Module):
    """A hundred views of one result."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for _ in range(50):
            x = x.view(-1).view(64, 64)
        return x


def _peaks(title: str, model: nn.Module) -> list[str]:
    x = torch.ones(64, 64)
    with torch.no_grad():
        eager, traced = peak_of(lambda: model(x))[0], peak_of(lambda: bt.trace(model, x))[0]
        log = bt.trace(model, x, save="all")
    memory = {}
    for entry in log.layers:
        tensor = entry.tensor_contents
        memory[torch._C._data_address(tensor)] = tensor.untyped_storage().nbytes()
    return [title, *(f"{size / 1024:.0f} KiB" for size in (eager, traced, sum(memory.values())))]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grad", action="store_true", help="with gradients; else under no_grad")
    parser.add_argument("--json", metavar="FILE", help="also write the medians, in seconds")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    rows = []
    with torch.set_grad_enabled(options.grad):
        for name, (model, inputs) in cases().items():
            large = name.startswith("10,000")
            seconds = measure(
                model, inputs, max(3, options.rounds // 5) if large else options.rounds
            )
            results[name] = seconds
        memory = peaks()
        # It leaves torch's functions wrapped for good, which would count for whoever comes after.
        for name, (model, inputs) in cases().items():
            other = None if name.startswith("10,000") else torchlens_seconds(model, inputs)
            rows.append(_row(name, results[name], other))
            if other is not None:
                results[name]["torchlens"] = other
    headers = ["model", "ops", "eager", "trace", "save none", "save all", "of one", "by function",
               "gradients", "log and print", "validate", "torchlens"]  # fmt: skip
    print(f"medians of {options.rounds} rounds, {options.threads} thread(s), grad {options.grad}")
    print("eager and trace as they are; what is saved as microseconds an op beyond the trace")
    print(tabulate(rows, headers, disable_numparse=True))
    print("\nmemory")
    headers = ["model", "eager's peak", "trace's peak", "kept by save all"]
    print(tabulate(memory, headers, disable_numparse=True))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


def _row(name: str, seconds: dict[str, float], torchlens: float | None) -> list[str]:
    ops, trace = seconds["ops"], seconds["trace"]

    def beyond(way: str) -> str:
        return f"{(seconds[way] - trace) / ops * 1e6:.2f} us"

    return [
        name,
        f"{ops:.0f}",
        f"{seconds['eager'] * 1e3:.2f} ms",
        f"{trace / seconds['eager']:.2f}x",
        *map(beyond, ("none", "all", "one", "function", "gradients")),
        f"{(seconds['print'] - seconds['all']) * 1e3:.1f} ms",
        f"{seconds['validate'] * 1e3:.0f} ms",
        "" if torchlens is None else f"{torchlens / seconds['eager']:.0f}x eager",
    ]


if __name__ == "__main__":
    main()
