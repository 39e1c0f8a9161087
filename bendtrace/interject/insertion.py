"""An insertion: what is inserted, where, and the handle on it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn

from bendtrace.errors import InputError, NeverFiredWarning
from bendtrace.interject.effects import Effect
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.passes import Passes
from bendtrace.interject.purity import effect_of_function
from bendtrace.interject.report import Report, Tally
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.where import Want
from bendtrace.recording.recorder import Recording
from bendtrace.tape.tape import TensorMeta

__all__ = ["Function", "Insertion", "as_interjection"]


class Owner(Protocol):
    """What keeps the insertions of a model."""

    def remove(self, insertion: Insertion) -> None:
        """Take an insertion away."""

    def holds(self, insertion: Insertion) -> bool:
        """Whether an insertion is there."""

    def notes_on(self, insertion: Insertion) -> tuple[str, ...]:
        """Say why an insertion was not called."""


class Function(Interjection):
    """A plain function, or a module, as an interjection on what a node gives.

    Args:
        function: called with the value, and if it takes two arguments with the `NodePass` as well.

    Attributes:
        function: as given.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._takes_pass = not isinstance(function, nn.Module) and _takes_two(function)

    @property
    def label(self) -> str:
        """The name of the function."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "function" if name == "<lambda>" else str(name)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the function."""
        return self.function(output, at) if self._takes_pass else self.function(output)

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what the function does, if a check finds that it does nothing else."""
        if self._takes_pass:
            return "it is given the pass as well"
        return effect_of_function(self.function)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) == 2


def as_interjection(what: Any) -> Interjection:
    """Return what an insertion calls.

    Raises:
        InputError: `what` is nothing that can be inserted.
    """
    if isinstance(what, Interjection):
        if not any(type(what)._overrides(form) for form in _FORMS):
            raise InputError(f"{what.label} overrides none of {', '.join(_FORMS)}: it does nothing")
        return what
    if isinstance(what, type) or not callable(what):
        raise InputError(
            "what is inserted has to be an interjection, a function of the value, or a module; "
            f"{what!r} is none"
        )
    return Function(what)


_MOST_RUNS = 16  # that are remembered, to tell why it was not called
_FORMS = ("before", "instead", "after", "backward")


class Insertion:
    """Something that is inserted in a model, until it is removed.

    Also a context manager, at whose end it is removed; a `NeverFiredWarning` says so if no run
    came by a node that it is for.

    Attributes:
        what: the interjection.
        where: the nodes, as given.
        passes: in which passes of them it is called.
        runs: paths that calls took while it was there, the first ones.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> handle = bended.interject("relu", torch.zeros_like)
        >>> bended(torch.ones(2)), handle.active
        (tensor([1., 1.]), True)
        >>> handle.remove()
        >>> bended(torch.ones(2)), handle
        (tensor([2., 2.]), <insertion of zeros_like at 'relu', removed>)
    """

    def __init__(
        self,
        owner: Owner,
        where: Any,
        wants: tuple[Want, ...],
        what: Interjection,
        passes: Passes,
        allow_none: bool,
    ) -> None:
        self.what = what
        self.where = where
        self.passes = passes
        self.wants = wants
        self.allow_none = allow_none
        self.is_checked = True  # whether there are nodes that are meant
        self.runs: list[Recording] = []
        self._owner = owner
        self._tally = Tally()
        self._has_failed = False

    @property
    def active(self) -> bool:
        """Whether it is in the model."""
        return self._owner.holds(self)

    def remove(self) -> None:
        """Take it out of the model; the others stay. Doing so twice is no error."""
        self._owner.remove(self)

    def report(self) -> Report:
        """Say at which nodes and passes it was called, and whether it changed anything."""
        notes = () if self._tally.rows() else self._owner.notes_on(self)
        return Report(self.what.label, describe_where(self.where), self._tally.rows(), notes)

    def clear_report(self) -> None:
        """Begin counting anew."""
        self._tally.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.warn_if_never_fired(3)
        self.remove()

    def warn_if_never_fired(self, stacklevel: int = 2) -> None:
        """Warn if calls were made, and none of them came by a node that is meant.

        Args:
            stacklevel: as for `warnings.warn`: 1 for this method, 2 for who calls it.
        """
        if not self.runs or self.allow_none or self._has_failed or self._tally.rows():
            return
        report = self.report()
        why = "; ".join(report.notes)
        warnings.warn(
            NeverFiredWarning(f"{report.label} at {report.where} was never called: {why}"),
            stacklevel=stacklevel,
        )

    def __repr__(self) -> str:
        state = "" if self.active else ", removed"
        return f"<insertion of {self.what.label} at {describe_where(self.where)}{state}>"

    # What the gates note

    def fired(self, at: NodePass, changed: bool) -> None:
        """Note that it was called."""
        self._tally.called(at, changed)

    def fired_backward(self, at: NodePass) -> None:
        """Note that it was told of gradients."""
        self._tally.told(at)

    def ran(self, recording: Recording) -> None:
        """Note that a call took a path while it was in the model."""
        if len(self.runs) < _MOST_RUNS and all(run is not recording for run in self.runs):
            self.runs.append(recording)

    def failed(self) -> None:
        """Note that something has raised where it is called."""
        self._has_failed = True

    def is_known_to_change(self, path: str) -> bool:
        """Whether it has changed a value at a node."""
        return self._tally.has_changed(path)
