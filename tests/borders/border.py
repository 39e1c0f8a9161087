"""Models at a border, each with what is expected of it beyond the promise."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import bendtrace as bt
from tests.promise import Inputs, assert_promise, bits, footprint, randn_inputs, state

Maker = Callable[[], Inputs]
Mode = Callable[[], AbstractContextManager[Any]]


def given(*values: Any) -> Maker:
    """Return a maker of the same arguments each time, the tensors among them copied."""
    return lambda: (tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values), {})


# Two inputs of one size, a third of another: every one of them is met again later.
_A, _B, _C = randn_inputs(3, 4), randn_inputs(3, 4, seed=1), randn_inputs(5, 4, seed=2)
DEFAULT: tuple[Maker, ...] = (_A, _B, _C, _A, _C, _B)


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and how its calls are expected to be served.

    Attributes:
        make: builds the model.
        live: a pattern that a reason to run live has to match; None if replays are expected.
        surely: whether calls have to be live; otherwise they may be replayed, too.
        at: text of the source line that the reason has to name; "" for any line of the model,
            None where the cause is not in the model's own source.
        inputs: makers of the arguments of each call, the last one like an earlier one.
        modes: the contexts to call in.
        gradients: whether to compare gradients, and gradients of gradients.
        graph: whether what is expected holds for calls with inputs that require a gradient.
    """

    make: Callable[[], Callable[..., Any]]
    source: Any
    live: str | None = None
    surely: bool = True
    at: str | None = ""
    inputs: Sequence[Maker] = DEFAULT
    modes: Sequence[Mode] = (nullcontext, torch.no_grad)
    gradients: bool = True
    graph: bool = False

    def check(self) -> None:
        """Assert the promise, and that calls are served as expected."""
        bended, *_ = [assert_promise(self.make, self.inputs, mode=mode) for mode in self.modes]
        if self.gradients:
            differentiated = self._check_gradients()
        self.check_served(differentiated if self.graph else bended)

    def check_served(self, bended: bt.BendedModule) -> None:
        """Assert that calls were replayed, or that the reason why not says where."""
        if self.live is None or not (self.surely or bended.why_live):
            assert bended.why_live == (), bended.why_live
            assert bended.stats.replays >= 2, bended.stats
            return
        assert bended.stats.live >= (2 if self.surely else 1), bended.stats
        reasons = [reason for reason in bended.why_live if re.search(self.live, reason)]
        assert reasons, bended.why_live
        if self.at is not None:
            assert any(map(self._names_the_line, reasons)), f"no line in {reasons}"

    def _names_the_line(self, reason: str) -> bool:
        file = str(inspect.getsourcefile(self.source))
        text, first = inspect.getsourcelines(self.source)
        lines = [int(line) for line in re.findall(rf"{re.escape(file)}:(\d+)", reason)]
        if self.at:
            return any(self.at in linecache.getline(file, line) for line in lines)
        return any(first <= line < first + len(text) for line in lines)

    def _check_gradients(self) -> bt.BendedModule:
        eager, bended = self._made(), self._made()
        wrapped = bt.BendedModule(bended)
        for number, inputs in enumerate(self.inputs):
            wanted = _gradients(eager, inputs(), number)
            before = footprint()
            assert _gradients(wrapped, inputs(), number) == wanted, f"gradients of call {number}"
            assert footprint() == before
            assert state(bended) == state(eager), f"gradients of the state after call {number}"
        return wrapped

    def _made(self) -> Callable[..., Any]:
        torch.manual_seed(0)
        return self.make()


def _gradients(call: Callable[..., Any], inputs: Inputs, seed: int) -> Any:
    """Return the bits of the inputs' gradients and of their gradients, or the error."""
    args, kwargs = inputs
    leaves = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and _can_require(t)]
    for leaf in leaves:
        leaf.requires_grad_()
    torch.manual_seed(seed)
    try:
        total = _total(call(*args, **kwargs))
        if total is None or not total.requires_grad:
            return "no graph"
        total.backward(retain_graph=True)
        first = [leaf.grad for leaf in leaves]
        twice = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        again = _total([g for g in twice if g is not None])
        second = None
        if again is not None and again.requires_grad:
            second = torch.autograd.grad(again, leaves, allow_unused=True)
        return bits([first, [g.detach() if g is not None else g for g in twice], second])
    except Exception as error:
        return type(error).__name__, str(error)


def _can_require(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.is_leaf


def _total(value: Any) -> torch.Tensor | None:
    """Return one number that depends on everything in an output that has a graph."""
    parts = [
        (t.abs() if t.is_complex() else t).sin().sum()
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    return torch.stack([part.double() for part in parts]).sum() if parts else None


class Border:
    """Collects cases; `each` makes a test of them."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def replays(self, subject: Any = None, **options: Any) -> Any:
        """Decorate a model (a function, a module's class, or a maker) that is replayed."""
        if subject is None:
            return lambda subject: self._add(subject, options)
        return self._add(subject, options)

    def live(self, reason: str, **options: Any) -> Callable[[Any], Any]:
        """Decorate a model that runs live, for a reason that matches."""
        return lambda subject: self._add(subject, {**options, "live": reason})

    def either(self, reason: str, **options: Any) -> Callable[[Any], Any]:
        """Decorate a model that may be replayed, or run live for a reason that matches."""
        return self.live(reason, **options, surely=False)

    def _add(self, subject: Any, options: dict[str, Any]) -> Any:
        make = subject
        if not isinstance(subject, type) and inspect.signature(subject).parameters:

            def make() -> Any:
                return subject

        name = re.sub(r"(?<!^)(?=[A-Z])", "_", subject.__name__).lower()
        assert name not in self._cases, name
        self._cases[name] = Case(make, subject, **options)
        return subject

    @property
    def each(self) -> pytest.MarkDecorator:
        """A mark that hands a test each case."""
        return pytest.mark.parametrize("case", self._cases.values(), ids=self._cases)


class Stateful(nn.Module):
    """A linear layer to build on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
