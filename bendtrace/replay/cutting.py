"""Where on a tape given values count, in place of those that ops give."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from bendtrace.recording.parts import Access, Part, PartKind
from bendtrace.recording.tape import ModuleCall, Op

__all__ = ["Cut", "Cuts", "Lack", "argument_of"]


@dataclass(frozen=True)
class Cut:
    """From where on a given value counts, in place of the one that an op gives.

    Attributes:
        index: the op.
        start: the first position on the tape at which it counts.
        slot: number of the given value.
        call: the call of a module that gives it; None if it is the op itself.
    """

    index: int
    start: int
    slot: int
    call: ModuleCall | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Lack:
    """An argument that is needed, and that is not there.

    Attributes:
        part: the part of it that is needed.
        chain: the ops from there to what needs it in the end.
    """

    part: Part
    chain: tuple[int, ...]


class Cuts:
    """All the cuts of a tape.

    Args:
        cuts: the cuts.
    """

    def __init__(self, cuts: Collection[Cut]) -> None:
        self._of: dict[int, list[Cut]] = {}
        for cut in sorted(cuts, key=_when):
            self._of.setdefault(cut.index, []).append(cut)

    def __iter__(self) -> Iterator[Cut]:
        return (cut for cuts in self._of.values() for cut in cuts)

    @property
    def indices(self) -> Collection[int]:
        """The ops in place of whose values others are given."""
        return self._of.keys()

    def at(self, index: int, position: int, scope: ModuleCall | None = None) -> Cut | None:
        """Return the cut that counts for the value of an op at a position, if one does.

        Args:
            index: the op.
            position: where the value is used.
            scope: for a guard, the call that it was put in.
        """
        found = None
        for cut in self._of.get(index, ()):
            if cut.start > position:
                break
            # What a call asks at its very end is still about its own value.
            if cut.start < position or cut.call is None or not _is_in(scope, cut.call):
                found = cut
        return found

    def replaces(self, op: Op) -> bool:
        """Whether nobody sees the value that an op itself gives."""
        return any(cut.start == op.index + 1 for cut in self._of.get(op.index, ()))

    def has_begun(self, index: int, position: int) -> bool:
        """Whether a given value counts for an op at a position."""
        return any(cut.start <= position for cut in self._of.get(index, ()))


def _when(cut: Cut) -> tuple[int, bool, int]:
    """Say which cuts count later: of calls that end together the outer one's value does."""
    depth, call = 0, cut.call
    while call is not None:
        depth, call = depth + 1, call.parent
    return cut.start, cut.call is not None, -depth


def argument_of(part: Part) -> int | None:
    """Return the position of the argument that a part is in; None if it is in none."""
    inner = part
    while inner.kind is PartKind.ALIAS:
        inner = inner.value
    while inner.parent is not None:
        inner = inner.parent
    return int(inner.key) if inner.access is Access.ROOT else None


def _is_in(scope: ModuleCall | None, call: ModuleCall) -> bool:
    while scope is not None and scope is not call:
        scope = scope.parent
    return scope is call
