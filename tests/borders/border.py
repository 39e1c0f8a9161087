"""Models at a border, each with what is expected of it beyond the promise."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bendtrace as bt
from tests.promise import Inputs, assert_promise, randn_inputs
from tests.registry.program import Program, add, calling

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
        self.check_served(bended)

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


class Border:
    """Registers models of a file.

    Args:
        ignores: patterns of warnings that they cause.
    """

    def __init__(self, *ignores: str) -> None:
        self._ignores = ignores

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

    def _add(self, subject: Any, given: dict[str, Any]) -> Any:
        options = dict(given)
        make = subject
        if not isinstance(subject, type) and inspect.signature(subject).parameters:

            def make() -> Any:
                return subject

        name = re.sub(r"(?<!^)(?=[A-Z])", "_", subject.__name__).lower()
        file = subject.__module__.rpartition(".")[2].removeprefix("test_")
        cannot = options.pop("cannot", {})
        case = Case(make, subject, **options)
        prepared = [lambda model, inputs=inputs: inputs() for inputs in case.inputs]
        tags = {"border", file, *(["gradients"] if case.gradients else [])}
        add(
            Program(
                f"{file}.{name}",
                calling(make, prepared, around=case.modes),
                frozenset(tags),
                cannot,
                ignores=self._ignores,
                served=None if case.graph else case.check_served,
                served_with_gradients=case.check_served if case.graph else None,
            )
        )
        return subject


class Stateful(nn.Module):
    """A linear layer to build on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
