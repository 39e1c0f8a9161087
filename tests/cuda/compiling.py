"""Compiled paths, with CUDA graphs where there is a GPU: within tolerance what the model gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bendtrace as bt
from tests.compiled import models
from tests.cuda.moving import moved, tensors_in
from tests.cuda.rows import RIGHT, SKIPPED, WRONG, Options, Row, line_of, without_cuda
from tests.hf_models import MODELS
from tests.promise import bits
from tools.benchmarks.timing import interleaved
from tools.benchmarks.ways import WrongOutput, assert_right

__all__ = ["check", "inputs_of", "make", "names", "options_of", "reasons"]

GRAPHS = "inductor with CUDA graphs"
_BACKENDS = ("eager", "aot_eager", "inductor", GRAPHS)
_FIRST = ("Gated", "Experts", "gpt2")  # compiling takes its time, which may not be enough for all
_ALL = (*_FIRST, "MaskedExperts", "Assigned", "Layered", "bert")
_WITH_GRADIENTS = ("Gated",)
_SEEDS = (0, 0, 0, 0, 1, 2, 0, 0)


def names(options: Options) -> list[str]:
    """Return the names of the cases, in the order of what one wants to know first."""
    pairs = [(name, GRAPHS) for name in _FIRST]
    pairs += [(name, backend) for backend in ("eager", "aot_eager") for name in _ALL]
    pairs += [(name, "inductor") for name in _ALL]
    pairs += [(name, GRAPHS) for name in _ALL[len(_FIRST) :]]
    found = [f"{name}, {backend}" for name, backend in pairs]
    return found + [
        f"{name}, {backend}, with gradients" for backend in _BACKENDS for name in _WITH_GRADIENTS
    ]


def make(name: str, options: Options) -> nn.Module:
    """Return a model on the device, with the same weights each time."""
    torch.manual_seed(0)
    for model in MODELS:
        if model.name == name:
            return moved(model.make(), options.device)
    return moved(getattr(models, name)(), options.device)


def inputs_of(name: str, options: Options, seed: int = 0) -> dict[str, Any]:
    """Return the keyword arguments to call a model with."""
    for model in MODELS:
        if model.name == name:
            return moved(model.inputs(seed=seed), options.device)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": moved(x, options.device)}


def options_of(backend: str) -> dict[str, Any]:
    """Return how a `BendedModule` is made for a backend; nothing is dropped for being slow."""
    given: dict[str, Any] = {"drop_slower": False}
    if backend == GRAPHS:
        return {"backend": "inductor", "backend_options": {**given, "cuda_graphs": True}}
    return {"backend": backend, "backend_options": given}


def reasons(bended: bt.BendedModule) -> str:
    """Return why paths are not compiled, in one line."""
    return line_of("; ".join(dict.fromkeys(map(str, bended.compiled.reasons)))) or "no path leads"


def check(name: str, options: Options) -> Row:
    """Compare a compiled model with the model itself."""
    title, backend, *grad = name.split(", ")
    if backend == GRAPHS and not options.on_cuda:
        return without_cuda(name, "CUDA graphs are its own")
    if backend == "inductor" and not options.on_cuda:
        if not options.inductor:
            return Row(name, SKIPPED, "on the CPU only with --inductor: it compiles for minutes")
        if shutil.which("g++") is None and shutil.which("c++") is None:
            return Row(name, SKIPPED, "there is no C++ compiler")
    torch._dynamo.reset()
    graphs_before = _passed_over()
    compare = _with_gradients if grad else _without_gradients
    bended, fault = compare(title, backend, options)
    numbers: dict[str, Any] = {
        "hits": bended.compiled.hits, "seconds to compile": f"{bended.compiled.seconds:.1f}",
    }  # fmt: skip
    if backend == GRAPHS:
        numbers["graphs passed over"] = _passed_over() - graphs_before
    if fault:
        return Row(name, WRONG, fault, numbers)
    if not bended.compiled.hits:
        return Row(name, WRONG, f"no call was served compiled: {reasons(bended)}", numbers)
    if not grad:
        numbers |= _ratios(title, backend, bended, options)
    return Row(name, RIGHT, numbers=numbers)


def _passed_over() -> int:
    """How often torch.compile did without CUDA graphs; torch._dynamo counts it (torch 2.13)."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def _without_gradients(
    title: str, backend: str, options: Options
) -> tuple[bt.BendedModule, str]:  # fmt: skip
    model = make(title, options)
    bended = bt.BendedModule(model, **options_of(backend))
    with torch.no_grad():
        inputs = [inputs_of(title, options, seed) for seed in _SEEDS]
        wanted = [model(**each) for each in inputs]
        # All are kept until the end: the memory of a CUDA graph is written to by the next call.
        given = [bended(**each) for each in inputs]
    for number, (one, other) in enumerate(zip(given, wanted, strict=True)):
        if fault := _difference(one, other, exact=backend == "eager"):
            return bended, f"call {number}: {fault}"
    return bended, ""


def _with_gradients(title: str, backend: str, options: Options) -> tuple[bt.BendedModule, str]:
    model, twin = make(title, options), make(title, options)
    bended = bt.BendedModule(model, **options_of(backend))
    for number, seed in enumerate(_SEEDS):
        outputs = []
        for call in (bended, twin):
            call.zero_grad()
            out = call(**inputs_of(title, options, seed))
            out.square().mean().backward()
            outputs.append(out.detach())
        mine = [parameter.grad for parameter in model.parameters()]
        others = [parameter.grad for parameter in twin.parameters()]
        if fault := _difference([outputs[0], mine], [outputs[1], others], exact=backend == "eager"):
            return bended, f"step {number}: {fault}"
    return bended, ""


def _difference(given: Any, wanted: Any, *, exact: bool) -> str:
    try:
        assert_right("it", tensors_in(given), tensors_in(wanted), exact=exact)
    except WrongOutput as error:
        return line_of(str(error))
    return ""


def _ratios(title: str, backend: str, bended: bt.BendedModule, options: Options) -> dict[str, Any]:
    """Return what a compiled call and a replay take, of what the model takes."""
    model, inputs = make(title, options), inputs_of(title, options)
    plain = bt.BendedModule(model)

    def timed(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            call(**inputs)
            options.synchronize()

        return run

    ways = {"eager": timed(model), "replay": timed(plain), "compiled": timed(bended)}
    with torch.no_grad():
        first, hits = bits(tensors_in(model(**inputs))), bended.compiled.hits
        found = interleaved(ways, 10, seconds=0.5)
        assert bits(tensors_in(plain(**inputs))) == first, "a replay gives other bits"
    share = {way: found[way].relative_to(found["eager"]).median for way in ("replay", "compiled")}
    return {
        "replay, of eager": f"{share['replay']:.2f}x",
        "compiled, of eager": f"{share['compiled']:.2f}x"
        if bended.compiled.hits > hits else "was not served",
    }  # fmt: skip
