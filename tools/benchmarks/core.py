"""Trace, guard check and replay against eager: `python -m tools.benchmarks.core`.

All rows of a model are measured in turn, round by round, in one process, after checking that the
replay gives the same bits. Printed are medians over the rounds and the ratio to eager's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import bendtrace as bt
from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import FinishedReplay
from bendtrace.record.recorded_call import Signature, record
from tests.hf_models import MODELS
from tests.promise import bits
from tools.benchmarks.models import Gated, LoopRNN
from tools.benchmarks.timing import interleaved

HUGGING_FACE = ("gpt2", "llama", "bert")


def cases() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Return the models to measure and their keyword arguments."""
    found: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        model.name: (model.make(), model.inputs()) for model in MODELS if model.name in HUGGING_FACE
    }
    found["loop RNN, 100 steps"] = (LoopRNN(), {"xs": torch.randn(100, 4, 64)})
    found["20 gated layers"] = (Gated(), {"x": torch.randn(4, 64)})
    return found


def measure(model: nn.Module, inputs: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way to run a model."""
    signature = Signature(model)
    recording = record(model, (), inputs, signature)
    program = Program(recording, GlobalState.current())
    bended = bt.BendedModule(model)
    arguments = tuple(signature.bind((), inputs).values())
    wanted = bits(model(**inputs))
    bended(**inputs)
    assert bits(bended(**inputs)) == wanted
    result = program.run(arguments)
    assert isinstance(result, FinishedReplay)
    assert bits(result.output) == wanted

    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(**inputs),
        "trace": lambda: record(model, (), inputs, signature),
        "generate": lambda: Program(recording, GlobalState.current()),
        "check": lambda: program.admits(arguments),
        "replay": lambda: program.run(arguments),
        "call": lambda: bended(**inputs),
    }
    medians = {way: took.median for way, took in interleaved(ways, rounds).items()}
    medians["ops"] = len(recording.tape.ops)
    return medians


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the medians, in seconds")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    with torch.no_grad():
        for name, (model, inputs) in cases().items():
            results[name] = measure(model, inputs, options.rounds)
    rows = []
    for name, seconds in results.items():
        eager, ops = seconds["eager"], seconds["ops"]
        rows.append(
            [
                name,
                f"{ops:.0f}",
                f"{eager * 1e6:.0f} us",
                f"{seconds['trace'] / eager:.2f}x",
                f"{(seconds['trace'] - eager) / ops * 1e6:.1f} us",
                f"{seconds['generate'] * 1e3:.1f} ms",
                f"{seconds['check'] * 1e6:.1f} us",
                f"{seconds['replay'] / eager:.2f}x",
                f"{seconds['call'] / eager:.2f}x",
            ]
        )
    headers = ["model", "ops", "eager", "trace", "trace/op over eager", "generate", "check",
               "replay", "whole call"]  # fmt: skip
    print(f"medians of {options.rounds} rounds, {options.threads} thread(s), no_grad")
    print(tabulate(rows, headers, disable_numparse=True))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
