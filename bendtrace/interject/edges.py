"""Insertions on the edge from one node to another."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from bendtrace.errors import NeverFiredWarning
from bendtrace.interject.gates import of_this_run
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.registry import InsertionRegistry
from bendtrace.interject.report import Report
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.interject.tensors import version_of

__all__ = ["Between", "Edge", "Sent"]

# A weak reference to a tensor, and how often it was written to.
_Known = tuple["weakref.ref[Tensor]", int]


# A tensor that an edge has made, and the original.
_Made = tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]
_NOTHING: _Made = (lambda: None, lambda: None)


class Sent(Interjection):
    """Records which tensors a node outputs, after all other insertions there."""

    observes = True
    late = True
    self_contained = True

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Record the tensors."""
        known = self._known()
        for tensor in _tensors(output):
            known[id(tensor)] = weakref.ref(tensor), version_of(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether the node has output this tensor in this call of the model, unchanged since."""
        known = self._known().get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == version_of(tensor)

    def _known(self) -> dict[int, _Known]:
        known: dict[int, _Known] = of_this_run().setdefault(self, {})
        return known


class Edge(Interjection):
    """Replaces those inputs of a node that come from another node.

    Args:
        sent: the record of the other node's outputs.
        what: returns the new values.

    Attributes:
        applied: the number of values passed to `what`.
    """

    late = True

    def __init__(self, sent: Sent, what: Interjection) -> None:
        self.applied: int = 0
        self.self_contained = what.self_contained
        self._sent = sent
        self._what = what

    @property
    def label(self) -> str:
        """The label of `what`."""
        return self._what.label

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Replace the inputs that come from the node."""
        shape, found = take_apart((tuple(inputs), inputs.kwargs))
        # The tensors made by other edges to this node in this pass, with their originals.
        former: dict[int, _Made] = of_this_run().setdefault((Edge, at.path, at.number), {})
        made: dict[int, Any] = {}
        for number, value in enumerate(found):
            if not isinstance(value, Tensor):
                continue
            new, original = former.get(id(value), _NOTHING)
            sent = original() if new() is value else value
            if sent is None or not self._sent.has(sent):
                continue
            if id(value) not in made:
                self.applied += 1
                result = self._what.after(at, Inputs(()), value)
                made[id(value)] = value if result is None else result
                if isinstance(result, Tensor):
                    former[id(result)] = weakref.ref(result), weakref.ref(sent)
            found[number] = made[id(value)]
        return Inputs(*assemble(shape, found)) if made else None

    def warn_if_never_applied(self, stacklevel: int, end: Insertion, beginning: Insertion) -> None:
        """Warn if a run reached both nodes, but no value went from one to the other."""
        if not self.applied and end.report().fired and beginning.report().fired:
            warnings.warn(
                NeverFiredWarning(
                    f"{self.label} was never applied: no output of "
                    f"{describe_where(beginning.where)} reached {describe_where(end.where)} "
                    "unchanged"
                ),
                stacklevel=stacklevel + 1,
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    for found in take_apart(value)[1]:
        if isinstance(found, Tensor):
            yield found


class Between:
    """An insertion on an edge, until it is removed. Also a context manager.

    Attributes:
        insertions: its insertions in the model, at the end of the edge and at its beginning.
    """

    def __init__(
        self, board: InsertionRegistry, edge: Edge, end: Insertion, beginning: Insertion
    ) -> None:
        self._board = board
        self._edge = edge
        self.insertions: tuple[Insertion, Insertion] = end, beginning

    @property
    def active(self) -> bool:
        """Whether it is active."""
        return self.insertions[0].active

    @property
    def applied(self) -> int:
        """The number of values to which it was applied so far."""
        return self._edge.applied

    def remove(self) -> None:
        """Remove it. Further calls have no effect."""
        self._board.remove(*self.insertions)

    def report(self) -> Report:
        """Return how often a run reached the node at the end, and whether a value was changed."""
        return self.insertions[0].report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for insertion in self.insertions:
                    insertion.warn_if_never_fired(3)
                self._edge.warn_if_never_applied(3, *self.insertions)
        finally:
            self.remove()

    def __repr__(self) -> str:
        end, beginning = self.insertions
        state = "" if self.active else ", removed"
        return (
            f"<{end.what.label} between {describe_where(beginning.where)} and "
            f"{describe_where(end.where)}{state}>"
        )
