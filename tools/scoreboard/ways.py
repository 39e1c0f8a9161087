"""Ways to run a program: eager, us and others."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tools.scoreboard.case import Refused, Wrap

__all__ = ["OURS", "WAYS", "Way"]

OURS = "bendtrace"


@dataclass(frozen=True)
class Way:
    """A way.

    Attributes:
        name: what the tables call it.
        wrap: makes of a model what is called in its place.
        package: what has to be installed for it.
        note: what the page says of it.
    """

    name: str
    wrap: Wrap
    package: str = "torch"
    note: str = ""

    def is_installed(self) -> bool:
        """Whether there is what it needs, and what that needs in turn."""
        try:
            module = importlib.import_module(self.package)
            return self.package == "torch" or hasattr(module, "trace")
        except ImportError:
            return False


def _ours(model: Any) -> Any:
    import bendtrace as bt

    return bt.BendedModule(model)


def _compile(backend: str, fullgraph: bool) -> Wrap:
    def wrap(model: Any) -> Any:
        return torch.compile(model, backend=backend, fullgraph=fullgraph)

    return wrap


def _lazily(capture: Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[..., Any]]) -> Wrap:
    """Return a way that captures a model at its first call, on copies, and then calls what it got.

    The copies are not what the program holds: what Python code does while it is captured is lost
    with them, as if it had never run.
    """

    def wrap(model: Any) -> Any:
        captured: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not captured:
                captured.append(capture(model, *_copies(args, kwargs)))
            return captured[0](*args, **kwargs)

        return call

    return wrap


def _copies(*values: Any) -> Any:
    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        with contextlib.suppress(Exception):
            return copy.deepcopy(value)
        return value

    return tree_map(copied, values)


class _Function(nn.Module):
    """A function as a module, for those that take modules only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _module(model: Any) -> nn.Module:
    return model if isinstance(model, nn.Module) else _Function(model)


def _export(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    program = torch.export.export(_module(model), args, kwargs, strict=False)
    return program.module()


def _fx(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    traced: Callable[..., Any] = torch.fx.symbolic_trace(model)
    return traced


def _make_fx(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(kwargs)

    def positional(*values: Any) -> Any:
        count = len(values) - len(names)
        return model(*values[:count], **dict(zip(names, values[count:], strict=True)))

    graph = make_fx(positional, tracing_mode="symbolic")(*args, *kwargs.values())
    # A graph takes only what it was traced with, in that order; what is left out has its default.

    def call(*given: Any, **named: Any) -> Any:
        if list(named) != names:
            raise Refused("other keyword arguments than those that were traced")
        return graph(*given, *named.values())

    return call


def _torchlens(model: Any) -> Any:
    import torchlens.options

    module = _module(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        # It seeds each run itself: with what the program seeded last.
        options = torchlens.options.CaptureOptions(random_seed=torch.initial_seed() % 2**32)
        return _output(torchlens.trace(module, list(args), kwargs, capture=options))

    return call


def _output(log: Any) -> Any:
    """Return what a log of TorchLens says the model returned: its output layers, in order."""
    found = []
    for label in log.output_layers:
        layer = log[label]
        value = layer.out
        if value is None:
            raise Refused("the log has no value for the output")
        found.append(value)
    return found[0] if len(found) == 1 else tuple(found)


def ways(backend: str = "aot_eager") -> tuple[Way, ...]:
    """Return the ways, ours first.

    Args:
        backend: of torch.compile.
    """
    made = "" if backend == "inductor" else "nothing is generated, so that no kernel can be wrong"
    return (
        Way(OURS, _ours, note="`BendedModule(model)`"),
        Way("torch.compile", _compile(backend, False), note=f'backend="{backend}": {made}'),
        Way("torch.compile, fullgraph", _compile(backend, True), note=f'backend="{backend}"'),
        Way("torch.export", _lazily(_export), note="of the first call, `strict=False`"),
        Way("torch.fx", _lazily(_fx), note="`symbolic_trace(model)`"),
        Way("make_fx", _lazily(_make_fx), note='of the first call, `tracing_mode="symbolic"`'),
        Way("TorchLens", _torchlens, "torchlens",
            "a log of each call, under the program's seed. The tensors of its output layers are "
            "compared. It runs a model on copies of its arguments: what a program writes to these "
            "never reaches the caller, and counts as wrong"),
    )  # fmt: skip


WAYS = ways()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave out what libraries say while they work."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
