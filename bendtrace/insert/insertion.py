"""An insertion: the interjection, its location, and its handle."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeAlias

from torch import Tensor, nn

from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.insert.interjection import Effect, Inputs, Interjection, NodePass, Passes, depends_on
from bendtrace.insert.plan import StateTensor
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.where import Target, Where
from bendtrace.log.nodes import NodePath
from bendtrace.python.checks import refuse_without_arguments, shown
from bendtrace.python.lazy import LazyModule
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import TensorMeta

if TYPE_CHECKING:
    from bendtrace.insert import purity
    from bendtrace.insert.registry import InsertionRegistry
else:
    purity = LazyModule("bendtrace.insert.purity")

# All that `BendedModule.interject` inserts: a function takes the value, or also the pass.
What: TypeAlias = Interjection | Callable[[Any], Any] | Callable[[Any, NodePass], Any]


class Function(Interjection):
    """A plain function or module as an interjection on the output of a node.

    It is called with the value; if it takes two arguments, also with the `NodePass`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        needed = [] if isinstance(function, nn.Module) else _needed_parameters(function)
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
    def _code(self) -> Any:
        return self.function

    @property
    def label(self) -> str:
        """The name of the function."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "function" if name == "<lambda>" else str(name)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the function."""
        return self.function(output, at) if self._takes_pass else self.function(output)

    @depends_on("function")
    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return the function's effect, if a check finds that it has no other."""
        if self._takes_pass:
            return "it is given the pass as well"
        return purity.effect_of_function(self.function)


def _needed_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a call has to pass; none if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.kind not in several and p.default is p.empty]


def as_interjection(what: What) -> Interjection:
    """Return the interjection for an object. Raise `InputError` if `what` cannot be inserted."""
    if isinstance(what, Interjection):
        if not any(type(what)._overrides(form) for form in _FORMS):
            raise InputError(
                f"{what.label} overrides none of {', '.join(_FORMS)}, so it does nothing"
            )
        return what
    if isinstance(what, type) or not callable(what):
        _refuse_object(what)
    return Function(what)


def _refuse_object(what: Any) -> NoReturn:
    """Raise for an object that cannot be inserted, with a suggestion."""
    hint = ""
    if isinstance(what, Tensor):
        hint = "; bended.patch({where: bt.patches.ReplacePatch(value)}) puts a tensor there"
    elif isinstance(what, str):
        hint = "; the location comes first: interject(where, what)"
    elif isinstance(what, type):
        hint = f"; pass an object of it, as in {what.__name__}(...)"
    raise InputError(
        "only an interjection, a function of the value or a module can be inserted, not "
        f"{shown(what)}{hint}"
    )


@contextmanager
def blaming(insertion: Insertion, number: int) -> Iterator[None]:
    """Say on an error about a name how to take away the insertion that has it."""
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
        owner: InsertionRegistry,
        where: Where | StateTensor,
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
        self._tally = CallTally()
        self._has_failed = False

    @property
    def active(self) -> bool:
        """Return whether it is active."""
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        """Note what records calls that are not recorded so far (see `CallTally.wait_for`)."""
        self._tally.wait_for(settle)

    def fired_backward(self, at: NodePass) -> None:
        """Record that it received gradients."""
        self._tally.count_gradients(at)

    def ran(self, recording: Recording) -> None:
        """Record that a call took a path while it was active."""
        self._tally.limit()
        if len(self.runs) < _MOST_RUNS and recording not in self.runs:
            self.runs.append(recording)

    def failed(self) -> None:
        """Record that an error was raised where it is called."""
        self._has_failed = True

    def is_known_to_change(self, path: str, calls: int = 1) -> bool:
        """Return whether it has changed a value at a node, in some calls or more."""
        if calls == 1 or path not in self._tally.changes:
            return path in self._tally.changes
        return self._tally.times_changed(path) >= calls


# Reports of insertions: where they were called, how often, and whether they changed anything.


@dataclass
class Row:
    """The record of one node.

    Attributes:
        path: the node.
        passes: how often it was called in each pass.
        changed: the number of calls that changed the value, as far as this was checked: once it has
            changed a value in place, later new values count as changed.
        backward: how often it received gradients.
    """

    path: str
    passes: dict[int, int] = field(default_factory=dict)
    changed: int = 0
    backward: int = 0

    @property
    def fired(self) -> int:
        """The number of its calls."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class Report:
    """The calls of an insertion so far.

    Attributes:
        label: the name of the insertion.
        where: its location.
        rows: the nodes at which it was called.
        notes: why it was not called elsewhere, one line each.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + x.exp())
        >>> handle = bended.interject(["relu", "exp"], lambda value: value.clamp(max=5))
        >>> for value in (1.0, 2.0):
        ...     _ = bended(torch.tensor([value]))
        >>> report = handle.report()
        >>> report
        function at 'relu', 'exp': called 4 times at 2 nodes
          relu: 2 times, no change
          exp: 2 times, changed the value once
        >>> report.fired, report.changed, report.paths
        (4, True, ('relu', 'exp'))
    """

    label: str
    where: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def fired(self) -> int:
        """The number of its calls at all nodes."""
        return sum(row.fired for row in self.rows)

    @property
    def changed(self) -> bool:
        """Return whether it ever changed a value."""
        return any(row.changed for row in self.rows)

    @property
    def paths(self) -> tuple[str, ...]:
        """The nodes at which it was called."""
        return tuple(NodePath(row.path) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        return {
            "label": self.label,
            "where": self.where,
            "fired": self.fired,
            "nodes": [
                {
                    "path": row.path, "passes": {str(k): v for k, v in row.passes.items()},
                    "changed": row.changed, "backward": row.backward,
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        head = f"{self.label} at {self.where}: "
        if not self.rows:
            lines = [head + "never called"]
        else:
            nodes = "1 node" if len(self.rows) == 1 else f"{len(self.rows)} nodes"
            lines = [head + f"called {_times(self.fired)} at {nodes}"]
        for row in self.rows:
            passes = _passes_text(row.passes)
            parts = [_times(row.fired) + passes]
            parts.append(f"changed the value {_times(row.changed)}" if row.changed else "no change")
            if row.backward:
                parts.append(f"gradients {_times(row.backward)}")
            lines.append(f"  {row.path or '<root>'}: {', '.join(parts)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


_MOST_NOTED = 512  # calls, before they are counted


class CallTally:
    """Counts calls; thread-safe, since backward passes may run in several threads."""

    latest_reset: ClassVar[object] = object()  # another one after each reset of counts

    def __init__(self) -> None:
        # Calls that are not counted yet: the pass, whether it changed the value, how often.
        self.noted: deque[tuple[NodePass, bool, int]] = deque()
        self.changes: set[str] = set()  # the nodes at which a value was changed
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._waiting: set[Callable[[], None]] = set()

    def wait_for(self, settle: Callable[[], None]) -> None:
        """Note a function that counts calls which were not counted so far.

        It is called, perhaps in vain, before anybody reads the counts.
        """
        self._waiting.add(settle)

    def _settle(self) -> None:
        with self._settling:
            while self._waiting:
                self._waiting.pop()()

    def rows(self) -> tuple[Row, ...]:
        """Return the counts so far."""
        self._settle()
        self._count()
        with self._lock:
            return tuple(
                Row(row.path, dict(row.passes), row.changed, row.backward)
                for row in self._rows.values()
            )

    def called(self, at: NodePass, changed: bool, times: int = 1) -> None:
        """Note a call, or several, to be counted later."""
        self.noted.append((at, changed, times))
        if changed:
            self.changes.add(at.path)
        if len(self.noted) > _MOST_NOTED:
            self._count()

    def limit(self) -> None:
        """Count the noted calls, if there are many."""
        if len(self.noted) > _MOST_NOTED:
            self._count()

    def _count(self) -> None:
        with self._lock:
            while self.noted:
                at, changed, times = self.noted.popleft()
                row = self._row(at.path)
                row.passes[at.number] = row.passes.get(at.number, 0) + times
                row.changed += changed * times

    def count_gradients(self, at: NodePass) -> None:
        """Count gradients that were received."""
        with self._lock:
            row = self._row(at.path)
            row.backward += 1

    def times_changed(self, path: str) -> int:
        """Return how often a value was changed at a node."""
        self._count()
        return self._rows[path].changed if path in self._rows else 0

    def clear(self) -> None:
        """Reset the counts."""
        self._settle()
        with self._lock:
            CallTally.latest_reset = object()
            self.noted.clear()
            self.changes.clear()
            self._rows.clear()

    def _row(self, path: str) -> Row:
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = Row(path)
        return row


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _passes_text(passes: dict[int, int]) -> str:
    numbers = sorted(passes)
    if numbers in ([], [0]):
        return ""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f" in passes {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers))
    return f" in pass {shown}" if len(numbers) == 1 else f" in passes {shown}"
