"""What harvesting costs: `python -m tools.benchmarks.harvest`.

Each way goes over the whole data set, round by round in turn, in one process and with one thread:
the bare model under `torch.no_grad()` with the same loader, harvests of it, and the usual script
with native hooks, or with nnsight if that is installed, a list and one file. Printed are medians
over the rounds: samples per second, and those relative to the bare model. `--json` prints them as
JSON. With `--compiled` there is a harvest on compiled paths, too.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bendtrace as bt

Loader = Iterable[Any]


class Branching(nn.Module):
    """A perceptron with a branch on the batch, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.mean() > 0.285:
            hidden = hidden * 2
        while hidden.norm() > 40:
            hidden = hidden / 2
        return self.second(hidden)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# name, model, shape of a sample, nodes, what is made of them, share of the samples
CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], Any, Any, float]] = [
    ("perceptron", perceptron, (32,), ["1", "3"], None, 1.0),
    ("branching", Branching, (32,), ["first", "relu"], None, 1.0),
    ("convolutions", convolutions, (1, 14, 14), ["5", "6"], None, 1.0),
    ("transformer", encoder, (8, 32), ["layers.0", "layers.1"], "mean", 0.2),
]


class Items(Dataset[Any]):
    """A data set that gives one item after the other."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.data[index],)


def over(loader: Loader, call: Callable[[Tensor], Any]) -> None:
    """Go over a data set."""
    with torch.no_grad():
        for (x,) in loader:
            call(x)


def by_hand(model: nn.Module, loader: Loader, nodes: list[str], reduce: Any) -> None:
    """The usual script: native hooks, lists in memory, one file at the end."""
    found: dict[str, list[Tensor]] = {}

    def noting(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found.setdefault(name, []).append(output if reduce is None else output.mean(1))

        return hook

    names = _modules_among(model, nodes)
    handles = [model.get_submodule(name).register_forward_hook(noting(name)) for name in names]
    try:
        over(loader, model)
    finally:
        for handle in handles:
            handle.remove()
    _write(found)


def by_nnsight(model: Any, names: list[str], loader: Loader, reduce: Any) -> None:
    """The same with nnsight, which saves what the nodes return."""
    import nnsight  # type: ignore[import-not-found]

    found: dict[str, list[Tensor]] = {name: [] for name in names}
    nodes = [model.get(name) for name in names]

    def call(x: Tensor) -> None:
        with model.trace(x):
            outputs = nnsight.save([node.output for node in nodes])
        for name, output in zip(names, outputs, strict=True):
            found[name].append(output if reduce is None else output.mean(1))

    over(loader, call)
    _write(found)


def _modules_among(model: nn.Module, nodes: list[str]) -> list[str]:
    return [name for name in nodes if name in dict(model.named_modules())]


def _write(found: dict[str, list[Tensor]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        joined = {name: torch.cat(parts) for name, parts in found.items()}
        save_file(joined, str(Path(directory) / "all.safetensors"))


def measure(
    case: Any, samples: int, batch: int, rounds: int, folder: str | None, compiled: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each way; files are written below `folder`."""
    name, make, shape, nodes, reduce, share = case
    torch.manual_seed(0)
    model = make().eval()
    count = int(samples * share)
    data = torch.randn(count, *shape)
    # Of a TensorDataset harvest takes a batch at once; items of other data sets come one by one.
    tensors: Loader = DataLoader(TensorDataset(data), batch_size=batch)
    items: Loader = DataLoader(Items(data), batch_size=batch)
    bended = bt.BendedModule(model)

    def harvested(loader: Loader, bended: bt.BendedModule = bended) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            bt.harvest(bended, loader, where=nodes, reduce=reduce, out=directory, progress=False)

    ways: dict[str, Callable[[], None]] = {
        "TensorDataset, the bare model": lambda: over(tensors, model),
        "TensorDataset, harvest": lambda: harvested(tensors),
        "items, the bare model": lambda: over(items, model),
        "items, replay": lambda: over(items, bended),
        "items, harvest": lambda: harvested(items),
        "items, native hooks and a list": lambda: by_hand(model, items, nodes, reduce),
    }
    if compiled:
        fast = bt.BendedModule(model, backend="inductor")
        ways["items, harvest, compiled"] = lambda: harvested(items, fast)
    if importlib.util.find_spec("nnsight") is not None:
        import nnsight

        seen = nnsight.NNsight(copy.deepcopy(model))  # it changes the modules that it is given
        names = _modules_among(model, nodes)
        ways["items, nnsight and a list"] = lambda: by_nnsight(seen, names, items, reduce)
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for number, (way, run) in itertools.product(range(rounds + 1), ways.items()):
        began = time.perf_counter()
        run()
        if number:  # the first round warms up, and records the paths
            spent[way].append(time.perf_counter() - began)
    medians = {way: statistics.median(times) for way, times in spent.items()}
    bare = {way.split(",")[0]: median for way, median in medians.items() if "bare" in way}
    return [
        {
            "model": name, "samples": count, "batch": batch, "way": way,
            "samples/s": round(count / median),
            "relative": round(bare[way.split(",")[0]] / median, 3),
        }
        for way, median in medians.items()
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--models", nargs="+", default=[case[0] for case in CASES])
    parser.add_argument("--folder", help="where to write; the system's temporary one if left out")
    parser.add_argument("--compiled", action="store_true", help="a harvest by inductor, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for batch in options.batches
        for case in CASES
        if case[0] in options.models
        for row in measure(
            case, options.samples, batch, options.rounds, options.folder, options.compiled
        )
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(tabulate(rows, headers="keys", intfmt=","))


if __name__ == "__main__":
    main()
