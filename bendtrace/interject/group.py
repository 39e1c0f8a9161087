"""Insertions of one model that are added and removed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from bendtrace.interject.insertion import Insertion, What
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.registry import InsertionRegistry
from bendtrace.interject.where import Where
from bendtrace.paths.candidates import Candidate
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature

__all__ = ["Bended", "InsertionGroup", "InsertionHandle", "is_root"]


class Bended(Protocol):
    """A model that accepts insertions: a `BendedModule`, as this package uses it."""

    _board: InsertionRegistry
    _known: Knowledge
    _signature: Signature
    _trees: Any

    @property
    def _model(self) -> Callable[..., Any]:
        """The model that it has."""

    @property
    def stats(self) -> Any:
        """How its calls were served."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""


class InsertionGroup:
    """Insertions of one model that are added and removed together; a context manager.

    Workflows and harvests, which need several insertions at once, reach the model only through this
    class. All insertions are checked before the first one is inserted.

    Args:
        model: a `BendedModule`.

    Attributes:
        insertions: the insertions, in the order in which they were made.
    """

    def __init__(self, model: Bended) -> None:
        self.insertions: list[Insertion] = []
        self._board = model._board
        self._known = model._known

    def known_runs(self) -> list[Recording]:
        """Return the known runs of the model, including those with insertions."""
        return list(self._known.recordings())

    def make(
        self,
        where: Where,
        what: What,
        *,
        allow_none: bool = False,
        kind: type[Insertion] = Insertion,
    ) -> Insertion:
        """Create and check an insertion of the group, without activating it.

        Args:
            where: the nodes, as `BendedModule.interject` takes them.
            what: what to insert.
            allow_none: whether `where` may match no node.
            kind: the class of the insertion.

        Raises:
            NodePathError: `where` matches no node.
        """
        made = self._board.make(where, what, allow_none=allow_none)
        if kind is not Insertion:
            checked = made.is_checked
            made = kind(self._board, made.where, made.targets, made.what, made.passes, allow_none)
            made.is_checked = checked
        self.insertions.append(made)
        return made

    def put_in(self, *order: Insertion) -> None:
        """Insert all at once, in the order `order` if given."""
        self._board.add(*(order or self.insertions))

    def put_around(self, first: list[Insertion], last: list[Insertion]) -> None:
        """Insert some before, and others after, all existing insertions."""
        others = self._board.insertions
        self._board.remove(*others)
        self._board.add(*first, *others, *last)

    def replace(self, number: int, where: Where) -> None:
        """Move an active insertion to other nodes."""
        old = self.insertions[number]
        old.remove()
        self.insertions[number] = self._board.insert(where, old.what, allow_none=True)

    def remove(self) -> None:
        """Remove all of them. Further calls have no effect."""
        self._board.remove(*self.insertions)

    def forget_plans(self) -> None:
        """Have the model examine all insertions again, after one of them has changed."""
        self._board.add()

    def __enter__(self) -> Self:
        self.put_in()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class InsertionHandle:
    """A handle on a group of insertions: calls the model, and removes them at the end."""

    def __init__(self, model: Any, group: InsertionGroup) -> None:
        self.model = model
        self._group = group
        group.put_in()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def remove(self) -> None:
        """Remove the insertions. Further calls have no effect."""
        self._group.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                for insertion in self._group.insertions:
                    insertion.warn_if_never_fired(3)
        finally:
            self._group.remove()


def is_root(node: Candidate) -> bool:
    """Whether a node is the call of the model itself."""
    return node.path == ""
