"""Ways to call a model: its own, ours and those of others.

A way makes of a model and its arguments something without arguments that gives what the model
gives. One that cannot says why, by raising.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import FinishedReplay
from bendtrace.record.recorded_call import Signature, record
from tests.promise import bits
from tools.benchmarks.flat import flat_of

__all__ = [
    "WAYS", "Call", "Refused", "Way", "WrongOutput", "assert_right", "hooked", "reason_of",
    "sharing_parameters",
]  # fmt: skip

Call = Callable[[], Any]
Prepare = Callable[[nn.Module, tuple[Tensor, ...]], Call]

# What compiled code may differ by: it is allowed to fuse and to reorder sums.
_RTOL, _ATOL = 1e-3, 1e-4


class Refused(Exception):
    """A way cannot do a model; says why."""


class WrongOutput(AssertionError):
    """A way gave something else than the model."""


@dataclass(frozen=True)
class Way:
    """A way to call a model.

    Attributes:
        name: what stands in the tables.
        prepare: makes the call.
        exact: whether it has to give the same bits; else compile's tolerance.
        package: what has to be installed for it.
        alone: whether it needs a process of its own, since it changes how torch works.
        settling: calls after which it is as fast as it gets.
        checked: whether what it gives is what the model gives, and is compared with that.
        ours: whether it is made by bendtrace: then a wrong output is an error, not a cell.
    """

    name: str
    prepare: Prepare
    exact: bool = True
    package: str | None = None
    alone: bool = False
    settling: int = 2
    checked: bool = True
    ours: bool = False

    def is_installed(self) -> bool:
        """Whether there is what it needs."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def assert_right(way: str, given: Any, wanted: Any, *, exact: bool) -> None:
    """Compare what a way gave with what the model gives.

    Raises:
        WrongOutput: if they are not the same bit by bit, or not close where that is enough.
    """
    if exact:
        if bits(given) != bits(wanted):
            raise WrongOutput(f"{way} gives other bits than the model")
        return
    try:
        torch.testing.assert_close(given, wanted, rtol=_RTOL, atol=_ATOL)
    except AssertionError as error:
        raise WrongOutput(f"{way} gives something else than the model: {error}") from None


_REASONS = (
    ("proxy object cannot be iterated", "a loop over a tensor"),
    ("slice indices must be integers", "a slice by a size"),
    ("could not guard on data-dependent", "a branch on values"),
    ("data-dependent", "a branch on values"),
    ("control flow", "a branch on values"),
    ("argument of type: .*Proxy", "a function that takes no proxy"),
    ("get value out of a tracing tensor", "a branch on values"),
    ("symbolically traced variables", "a branch on values"),
    ("'range' object|'proxy' object cannot be interpreted", "a loop over a size"),
    ("dynamic output shape|dynamic shape operator|nonzero", "a size that depends on values"),
    ("backend", "no such backend"),
    ("_local_scalar_dense|\\.item\\(\\)", "a value read into Python"),
)


def reason_of(error: BaseException) -> str:
    """Say in a few words why a way cannot do a model."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, WrongOutput):
        return "wrong output"
    text = " ".join(str(error).split())
    for pattern, reason in _REASONS:
        if re.search(pattern, text, flags=re.IGNORECASE):
            return f"refuses: {reason}"
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{type(error).__name__}: {short}"


def sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the very same parameters and buffers.

    Each way has one of its own: some put hooks or attributes into the model they are given.
    """
    own = [*model.parameters(), *model.buffers()]
    made: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
    return made


def hooked(model: nn.Module, hook: Callable[..., Any], only: str | None = None) -> nn.Module:
    """Put a forward hook on each module of a model, or on one; return the model."""
    modules = model.modules() if only is None else [model.get_submodule(only)]
    for module in list(modules):
        module.register_forward_hook(hook)
    return model


def _eager(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    return lambda: model(*args)


def _native_hooks(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    with_hooks = hooked(model, lambda module, inputs, output: None)
    return lambda: with_hooks(*args)


def _flat(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    try:
        flat = flat_of(record(model, args, {}, Signature(model)))
    except ValueError as error:
        raise Refused(f"not one list: {error}") from None
    return lambda: flat(*args)


def _replay(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    program = Program(record(model, args, {}, Signature(model)), GlobalState.current())

    def call() -> Any:
        result = program.run(args)
        assert isinstance(result, FinishedReplay)
        return result.output

    return call


def _bended(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    bended = bt.BendedModule(model)
    return lambda: bended(*args)


def _bended_compiled(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    if "backend" not in inspect.signature(bt.BendedModule.__init__).parameters:
        raise Refused("not there")
    bended = bt.BendedModule(model, backend="inductor")
    return lambda: bended(*args)


def _fx(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    traced = torch.fx.symbolic_trace(model)
    return lambda: traced(*args)


def _export(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    exported = torch.export.export(model, args).module()
    return lambda: exported(*args)


def _make_fx(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(model)(*args)
    return lambda: made(*args)


def _compile(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    compiled = torch.compile(model)
    return lambda: compiled(*args)


def _compile_fullgraph(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    compiled = torch.compile(model, fullgraph=True)
    return lambda: compiled(*args)


def _nnsight(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    from nnsight import NNsight

    wrapped: Any = NNsight(model)

    def call() -> Any:
        with wrapped.trace(*args):
            output = wrapped.output.save()
        return output

    return call


def _torchlens(model: nn.Module, args: tuple[Tensor, ...]) -> Call:
    import torchlens

    def call() -> Any:
        return torchlens.trace(model, list(args)).layers[-1].out

    return call


WAYS = (
    Way("eager", _eager),
    Way("native hooks", _native_hooks),
    Way("flat list", _flat),
    Way("replay", _replay, ours=True),
    Way("bended", _bended, settling=3, ours=True),
    Way("bended, inductor", _bended_compiled, exact=False, settling=30, ours=True),
    Way("torch.fx", _fx),
    Way("torch.export", _export, exact=False),
    Way("make_fx", _make_fx, exact=False),
    # First: where it refuses it says why only if the other has not given the model up before.
    Way("torch.compile, fullgraph", _compile_fullgraph, exact=False),
    Way("torch.compile", _compile, exact=False),
    Way("nnsight", _nnsight, package="nnsight", alone=True),
    Way("torchlens", _torchlens, package="torchlens", alone=True),
)
