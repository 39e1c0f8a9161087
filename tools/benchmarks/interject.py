"""What insertions cost: `python -m tools.benchmarks.interject`.

All rows of a model are measured in turn, round by round, in one process and with one thread, after
checking that they give the same bits as the model with native hooks. Printed are medians over the
rounds, in microseconds and relative to the model itself.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import bendtrace as bt
from tests.hf_models import MODELS
from tests.promise import bits
from tools.benchmarks.timing import interleaved


class Nothing(bt.Interjection):
    """Looks, and keeps every value."""

    observes = True

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        pass


def half_again(value: Any) -> Any:
    """Scale a value."""
    return value * 1.5


def measure(model: nn.Module, inputs: dict[str, Any], path: str, rounds: int) -> list[list[str]]:
    """Return a row for each way to call a model."""
    hooked = copy.deepcopy(model)
    hooked.get_submodule(path).register_forward_hook(lambda m, i, output: half_again(output))
    plain, one, all_of_it, patched = (bt.BendedModule(model) for _ in range(4))
    one.interject(model.get_submodule(path), half_again)
    all_of_it.interject(lambda node: True, Nothing())

    def patch_anew() -> Any:
        with patched.interject(model.get_submodule(path), half_again):
            return patched(**inputs)

    ways: dict[str, Callable[[], Any]] = {
        "the model": lambda: model(**inputs),
        "the model, a native hook": lambda: hooked(**inputs),
        "replay": lambda: plain(**inputs),
        "replay, one interjection": lambda: one(**inputs),
        "replay, all nodes observed": lambda: all_of_it(**inputs),
        "replay, inserted and removed": patch_anew,
    }
    wanted = bits(ways["the model, a native hook"]())
    for name in ("replay, one interjection", "replay, inserted and removed"):
        assert bits(ways[name]()) == bits(ways[name]()) == wanted, name
    for name in ("replay", "replay, all nodes observed"):
        assert bits(ways[name]()) == bits(ways[name]()) == bits(model(**inputs)), name
    medians = {name: took.median for name, took in interleaved(ways, rounds).items()}
    nodes = len(all_of_it.insertions[0].report().rows)
    return [
        [
            f"{name} ({nodes})" if "all nodes" in name else name, f"{median * 1e6:.0f}",
            f"{median / medians['the model']:.2f}",
        ]
        for name, median in medians.items()
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    paths = {"gpt2": "transformer.h.1.mlp", "llama": "model.layers.1.mlp"}
    with torch.no_grad():
        for case in MODELS:
            if case.name in paths:
                torch.manual_seed(0)
                rows = measure(case.make().eval(), case.inputs(), paths[case.name], rounds)
                print(tabulate(rows, headers=[case.name, "us", "relative"]), end="\n\n")


if __name__ == "__main__":
    main()
