"""Ways to look at and to change what is in a model while it is called."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

import bendtrace as bt
from tools.benchmarks.models import Case
from tools.benchmarks.ways import WAYS, Call, Refused, Way, hooked

__all__ = ["PLACES", "gradient_inserters", "inserters"]

# The module of each model where one thing is inserted.
PLACES = {
    "tiny transformer": "blocks.0.first", "GPT-2 small": "blocks.5.first",
    "ResNet-18": "stages.1.0", "loop RNN, 100 steps": "wh", "MoE": "routers.1",
    "MoE, masked": "routers.1", "20 gated layers": "layers.9", "solver": "step",
    "greedy decoding": "model.blocks.0.first",
    "tiny BERT": "model.encoder.layer.0.intermediate",
    "tiny Llama": "model.model.layers.0.mlp",
}  # fmt: skip


class _Looking(bt.Interjection):
    """Looks at every value, and does nothing."""

    observes = True

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        pass


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    pass


def _same(value: Any) -> Any:
    """Put something equal in a value's place, so that all ways give what the model gives."""
    return value * 1.0


def _native_one(place: str, model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    hooked(model, lambda module, inputs, output: _same(output), only=place)
    return lambda: model(*args)


def _native_all(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    hooked(model, _nothing)
    return lambda: model(*args)


def _one(place: str, model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    bended.interject(model.get_submodule(place), _same)
    return lambda: bended(*args)


def _all(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    bended.interject(lambda node: True, _Looking())
    return lambda: bended(*args)


def _none(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    return lambda: bended(*args)


def _nnsight_one(place: str, model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    from nnsight import NNsight

    wrapped: Any = NNsight(model)
    envoy = functools.reduce(
        lambda at, name: at[int(name)] if name.isdigit() else getattr(at, name),
        place.split("."), wrapped,
    )  # fmt: skip

    def call() -> Any:
        with wrapped.trace(*args):
            envoy.output = envoy.output * 1.0
            output = wrapped.output.save()
        return output

    return call


def inserters(case: Case) -> tuple[Way, ...]:
    """Return the ways to insert one thing, or something everywhere."""
    place = PLACES[case.name]
    return (
        WAYS[0],
        Way("a native hook", functools.partial(_native_one, place)),
        Way("one interjection", functools.partial(_one, place), settling=3, ours=True),
        Way("native hooks on all modules", _native_all),
        Way("all nodes observed", _all, settling=3, ours=True),
        Way("nothing inserted", _none, settling=3, ours=True),
        Way(
            "nnsight, one module", functools.partial(_nnsight_one, place),
            package="nnsight", alone=True,
        ),
    )  # fmt: skip


# Gradients: each call goes forward and backward, and has the gradient at the outputs of modules.


def _backward(output: Tensor) -> Tensor:
    if not output.requires_grad:
        raise Refused("gives tokens, which have no gradient")
    output.sum().backward()
    return output.detach()


def _without(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: _backward(model(*args))


def _native_gradients(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(found.append)

    for module in model.modules():
        module.register_forward_hook(keep)

    def call() -> Any:
        found.clear()
        return _backward(model(*args))

    return call


class _Gradients(bt.Interjection):
    """Looks at the gradients of every node."""

    observes = True

    def backward(
        self, at: bt.NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> None:
        pass


def _all_gradients(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    bended.interject(lambda node: True, _Gradients())
    return lambda: _backward(bended(*args))


def _replayed(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    return lambda: _backward(bended(*args))


def _logged(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    def call() -> Any:
        trace = bt.trace(model, *args, save="all", save_gradients=True)
        return _backward(trace.output)

    return call


def _torchlens(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    import torchlens

    options = torchlens.options.CaptureOptions(save_grads="all")

    def call() -> Any:
        trace = torchlens.trace(model, list(args), capture=options)
        output = trace.layers[-1].out
        trace.log_backward(output.sum())
        return output.detach()

    return call


def gradient_inserters(case: Case) -> tuple[Way, ...]:
    """Return the ways to get gradients at nodes."""
    return (
        Way("eager", _without),
        Way("native hooks, gradients", _native_gradients),
        Way("bended, no gradients looked at", _replayed, settling=3, ours=True),
        Way("all gradients observed", _all_gradients, settling=3, ours=True),
        Way("log with gradients", _logged, ours=True),
        Way("torchlens, gradients", _torchlens, package="torchlens", alone=True),
    )
