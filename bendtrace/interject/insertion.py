"""An insertion: what is inserted, where, and its handle."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from torch import nn

from bendtrace._checks import refuse_without_arguments
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.interject.effects import Effect
from bendtrace.interject.interjection import Inputs, Interjection, NodePass, Passes
from bendtrace.interject.plan import State
from bendtrace.interject.purity import effect_of_function
from bendtrace.interject.report import Report, Tally
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.where import Target, Where
from bendtrace.recording.recorder import Recording
from bendtrace.tape.tape import TensorMeta

__all__ = ["Function", "Insertion", "What", "as_interjection", "blaming"]

# All that `BendedModule.interject` inserts: a function takes the value, or also the pass.
What: TypeAlias = Interjection | Callable[[Any], Any] | Callable[[Any, NodePass], Any]


class Owner(Protocol):
    """The store of a model's insertions."""

    def remove(self, insertion: Insertion) -> None:
        """Remove an insertion."""

    def holds(self, insertion: Insertion) -> bool:
        """Return whether an insertion is active."""

    def notes_on(self, insertion: Insertion) -> tuple[str, ...]:
        """Return notes on why an insertion was not called."""


class Function(Interjection):
    """A plain function or module as an interjection on the output of a node.

    Args:
        function: called with the value; if it takes two arguments, also with the `NodePass`.

    Attributes:
        function: as given.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        needed = [] if isinstance(function, nn.Module) else _needed_by(function)
        keyword_only = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
        if len(needed) > 2 or keyword_only:
            listed = ", ".join(f"{p.name}=" if p.kind is p.KEYWORD_ONLY else p.name for p in needed)
            raise InputError(
                f"{self.label} cannot be inserted: a function is called with the value of a node, "
                f"or with the value and a NodePass, but {self.label} needs {listed}. Hooks with "
                "torch's arguments (module, inputs, output) go into bended.hooks"
            )
        if not needed and not isinstance(function, nn.Module):
            refuse_without_arguments(function)
        self._takes_pass = len(needed) == 2

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


def _needed_by(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a call has to pass; none if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.kind not in several and p.default is p.empty]


def as_interjection(what: What) -> Interjection:
    """Return the interjection for an object.

    Raises:
        InputError: `what` cannot be inserted.
    """
    if isinstance(what, Interjection):
        if not any(type(what)._overrides(form) for form in _FORMS):
            raise InputError(
                f"{what.label} overrides none of {', '.join(_FORMS)}, so it does nothing"
            )
        return what
    if isinstance(what, type) or not callable(what):
        raise InputError(
            "only an interjection, a function of the value or a module can be inserted, not "
            f"{what!r}"
        )
    return Function(what)


@contextmanager
def blaming(insertion: Insertion, number: int) -> Iterator[None]:
    """Say on an error about a name how to take away the insertion that has it.

    Args:
        insertion: the insertion.
        number: its number among those of the model.
    """
    try:
        yield
    except NodePathError as error:
        error.add_note(
            f"{insertion!r} was accepted before a run could show its name, and calls raise until "
            f"it is removed: bended.insertions[{number}].remove()"
        )
        raise


_MOST_RUNS = 16  # kept to explain why it was not called
_FORMS = ("before", "instead", "after", "backward")


class Insertion:
    """Something inserted in a model, until it is removed.

    It is also a context manager that removes the insertion at its end. A `NeverFiredWarning` is
    issued if no run reached a node that it applies to.

    Attributes:
        what: the interjection.
        where: the nodes, as given.
        passes: the passes of the nodes at which it is called.
        runs: the first paths that calls took while it was active.

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
        where: Where | State,
        targets: tuple[Target, ...],
        what: Interjection,
        passes: Passes,
        allow_none: bool,
    ) -> None:
        self.what = what
        self.where = where
        self.passes = passes
        self.targets = targets
        self.allow_none = allow_none
        self.is_checked = True  # whether there are selected nodes
        self.runs: list[Recording] = []
        self._owner = owner
        self._tally = Tally()
        self._has_failed = False

    @property
    def active(self) -> bool:
        """Whether it is active."""
        return self._owner.holds(self)

    def remove(self) -> None:
        """Remove it from the model; other insertions stay. Further calls have no effect."""
        self._owner.remove(self)

    def report(self) -> Report:
        """Return at which nodes and passes it was called, and whether it changed anything."""
        notes = () if self._tally.rows() else self._owner.notes_on(self)
        return Report(self.what.label, describe_where(self.where), self._tally.rows(), notes)

    def clear_report(self) -> None:
        """Reset the report's counts."""
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
        """Warn if calls were made, but none of them reached a selected node.

        Args:
            stacklevel: as for `warnings.warn`: 1 for this method, 2 for its caller.
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
        state = "active" if self.active else "removed"
        return f"<insertion of {self.what.label} at {describe_where(self.where)}, {state}>"

    # What the gates note

    def fired(self, at: NodePass, changed: bool, times: int = 1) -> None:
        """Record that it was called."""
        self._tally.called(at, changed, times)

    def fires_later(self, settle: Callable[[], None]) -> None:
        """Note what records calls that are not recorded so far (see `Tally.wait_for`)."""
        self._tally.wait_for(settle)

    def fired_backward(self, at: NodePass) -> None:
        """Record that it received gradients."""
        self._tally.told(at)

    def ran(self, recording: Recording) -> None:
        """Record that a call took a path while it was active."""
        if self.runs and self.runs[-1] is recording:
            return
        if len(self.runs) < _MOST_RUNS and all(run is not recording for run in self.runs):
            self.runs.append(recording)

    def failed(self) -> None:
        """Record that an error was raised where it is called."""
        self._has_failed = True

    def is_known_to_change(self, path: str) -> bool:
        """Whether it has changed a value at a node."""
        return self._tally.has_changed(path)
