"""Streams: of random inputs, to models whose path depends on them, and those of CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.cuda.moving import moved
from tests.cuda.rows import RIGHT, WRONG, Options, Row, without_cuda
from tests.hf_models import MODELS
from tests.promise import bits
from tools.benchmarks.models import CASES, inputs_of

__all__ = ["check", "names"]

CALLS = 100
SECONDS = 12.0  # for one stream
_ROUTED = ("MoE", "MoE, masked", "20 gated layers", "solver", "greedy decoding")

Call = Callable[[Tensor], Any]


def names(options: Options) -> list[str]:
    """Return the names of the cases."""
    return [f"random inputs: {name}" for name in _ROUTED] + list(_ON_STREAMS)


def check(name: str, options: Options) -> Row:
    """Call a model in a stream, and compare each output with the model's."""
    if name in _ON_STREAMS:
        if not options.on_cuda:
            return without_cuda(name, "the CPU has no streams")
        with torch.no_grad():
            fault = _ON_STREAMS[name](options)
        return Row(name, WRONG if fault else RIGHT, fault)
    return _random_inputs(name, options)


# Random inputs


def _random_inputs(name: str, options: Options) -> Row:
    case = next(case for case in CASES if case.name == name.partition(": ")[2])
    model = moved(case.model(), options.device)
    bended = bt.BendedModule(model)
    ratios: list[float] = []
    spent = {"eager": 0.0, "bended": 0.0}
    late = dict(spent)
    begun = time.monotonic()
    with torch.no_grad():
        model(*moved(inputs_of(case), options.device))  # what CUDA does only once
        for number in range(CALLS):
            if number > 9 and time.monotonic() - begun > SECONDS:
                break
            (x,) = moved(inputs_of(case, number), options.device)
            ways: list[tuple[str, Any]] = [("eager", model), ("bended", bended)]
            took: dict[str, float] = {}
            given: dict[str, Any] = {}
            for way, call in ways if number % 2 else reversed(ways):
                options.synchronize()
                start = time.perf_counter()
                given[way] = call(x)
                options.synchronize()
                took[way] = time.perf_counter() - start
            if bits(given["eager"]) != bits(given["bended"]):
                return Row(name, WRONG, f"call {number} gives other bits than the model")
            ratios.append(took["bended"] / took["eager"])
            for way, seconds in took.items():
                spent[way] += seconds
                late[way] += seconds if number >= CALLS // 2 else 0.0
    stats = bended.stats
    numbers = {
        "calls": len(ratios),
        "whole stream": f"{spent['bended'] / spent['eager']:.2f}x",
        "last half": f"{late['bended'] / late['eager']:.2f}x" if late["eager"] else "not reached",
        "median call": f"{statistics.median(ratios):.2f}x",
        "traces": stats.traces, "replays": stats.replays, "live": stats.live,
    }  # fmt: skip
    return Row(name, RIGHT, numbers=numbers)


# Streams of CUDA


class OwnStream(nn.Module):
    """A model that does a part of its work on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            y = self.one(x).relu()
        torch.cuda.current_stream(x.device).wait_stream(stream)
        y.record_stream(torch.cuda.current_stream(x.device))
        return self.other(y) if y.sum() > 0 else y


def _models(options: Options) -> dict[str, tuple[Any, Any]]:
    """Return models, each with what makes an input of a seed."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("20 gated layers", "MoE"):
        case = next(case for case in CASES if case.name == name)
        found[name] = (
            moved(case.model(), options.device),
            lambda seed, case=case: {"x": moved(inputs_of(case, seed)[0], options.device)},
        )
    gpt2 = next(model for model in MODELS if model.name == "gpt2")
    found["gpt2"] = (
        moved(gpt2.make(), options.device),
        lambda seed: moved(gpt2.inputs(seed=seed), options.device),
    )
    return found


def _on(stream: torch.cuda.Stream, call: Callable[[], Any]) -> Any:
    """Call on a stream, after what was begun on the current one, which waits for it."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        made = call()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return made


def _recorded_here_replayed_there(options: Options) -> str:
    return _across(options, record_on_stream=False)


def _recorded_there_replayed_here(options: Options) -> str:
    return _across(options, record_on_stream=True)


def _across(options: Options, *, record_on_stream: bool) -> str:
    stream = torch.cuda.Stream(options.device)
    for name, (model, inputs) in _models(options).items():
        bended = bt.BendedModule(model)
        for call in range(6):
            given = inputs(call % 2)
            wanted = bits(model(**given))
            there = (call < 2) is record_on_stream
            run = lambda given=given, bended=bended: bended(**given)  # noqa: E731
            if bits(_on(stream, run) if there else run()) != wanted:
                return f"{name}, call {call} gives other bits than the model"
        if not bended.stats.replays:
            return f"{name} was never replayed"
    return ""


def _two_streams_in_turn(options: Options) -> str:
    streams = [torch.cuda.Stream(options.device) for _ in range(2)]
    for name, (model, inputs) in _models(options).items():
        bended = bt.BendedModule(model)
        given = [inputs(number % 4) for number in range(12)]
        wanted = [bits(model(**each)) for each in given]
        options.synchronize()
        made = []
        for number, each in enumerate(given):  # nobody waits for the call before
            with torch.cuda.stream(streams[number % 2]):
                made.append(bended(**each))
        options.synchronize()
        for number, each in enumerate(made):
            if bits(each) != wanted[number]:
                return f"{name}, call {number} gives other bits than the model"
    return ""


def _a_model_with_a_stream_of_its_own(options: Options) -> str:
    torch.manual_seed(0)
    model = moved(OwnStream(), options.device)
    bended = bt.BendedModule(model)
    for call in range(8):
        x = moved(torch.randn(256, 64, generator=torch.Generator().manual_seed(call % 3)),
                  options.device)  # fmt: skip
        if bits(bended(x)) != bits(model(x)):
            return f"call {call} gives other bits than the model"
    return ""


_ON_STREAMS: dict[str, Callable[[Options], str]] = {
    "CUDA streams: recorded on the default one, replayed on another": _recorded_here_replayed_there,
    "CUDA streams: recorded on another one, replayed on the default": _recorded_there_replayed_here,
    "CUDA streams: two in turn, without waiting": _two_streams_in_turn,
    "CUDA streams: a model with one of its own": _a_model_with_a_stream_of_its_own,
}
