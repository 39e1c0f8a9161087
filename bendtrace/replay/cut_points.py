"""What the values given for some ops of a run replace: where they count, and what they touch.

`Cuts` says where on a tape given values count, in place of those that ops give; `Memory` which ops
write to memory that others see, going by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from bendtrace.recording.recorder import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.tape.guards import SameGuard
from bendtrace.tape.tape import ModuleCall, Op, refs_in
from bendtrace.torch_rules.functions import is_gate, known_as
from bendtrace.torch_rules.writes import works_in_place


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

    part: Captured
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


def argument_of(part: Captured) -> int | None:
    """Return the position of the argument that a part is in; None if it is in none."""
    inner = part
    while inner.kind is CaptureKind.ALIAS:
        inner = inner.value
    while inner.parent is not None:
        inner = inner.parent
    return int(inner.key) if inner.access is Access.ROOT else None


def _is_in(scope: ModuleCall | None, call: ModuleCall) -> bool:
    while scope is not None and scope is not call:
        scope = scope.parent
    return scope is call


# What gives a view of what it is given, or can: where it is written to, so is what it came from.
_VIEWS = frozenset(
    {
        "T", "H", "mT", "mH", "as_strided", "chunk", "contiguous", "data", "detach", "diagonal",
        "expand", "expand_as", "flatten", "getitem", "__getitem__", "imag", "movedim", "moveaxis",
        "narrow", "permute", "ravel", "real", "reshape", "reshape_as", "select", "split", "squeeze",
        "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind",
        "unflatten", "unfold", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip


class Memory:
    """The tensors of a run, and what is known of their memory.

    Args:
        recording: the run.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ops = recording.tape.ops

    def owner(self, index: int) -> int:
        """Return the op that gave the memory which a value is in, as far as names tell."""
        op = self._ops[index]
        while op.is_work and (works_in_place(op) or known_as(op.target) in _VIEWS):
            given = next(iter(refs_in(op.args)), None)
            if given is None:
                break
            op = self._ops[given.index]
        return op.index

    def written_by(self, done: Collection[int]) -> dict[int, int]:
        """Return the owners of the memory that some ops write to, each with the last to do so."""
        written: dict[int, int] = {}
        for index in done:
            for name in self._ops[index].writes:
                owner = self.owner(name)
                written[owner] = max(index, written.get(owner, -1))
        return written

    def sees(self, op: Op, written: dict[int, int]) -> bool:
        """Whether an op, carried out late, would see what others have written meanwhile."""
        return any(written.get(self.owner(index), -1) > op.index for index in op.operands)

    def has_effects(self, done: Collection[int]) -> bool:
        """Whether some ops change something besides what they give, or may do so."""
        outside = any(self._ops[owner].is_given for owner in self.written_by(done))
        return outside or any(is_gate(self._ops[index]) for index in done)

    def unclear(self, cut: Cut) -> str:
        """Say why it cannot be told where the value of a node goes; "" if it can."""
        op, call = self._ops[cut.index], cut.call
        if is_gate(op):
            if op.index not in self._again:
                return ""  # what is inserted made a tensor that nobody else has
            op = self._ops[self._again[op.index]]
        if works_in_place(op) and self._ops[self.owner(op.index)].is_given:
            return "it writes to what was there before the run"
        first = self._first_name(op.index)
        if call is None:
            hands_on = op.index in self._again
        else:
            hands_on = not call.start <= first < call.stop or op.is_given
            if sum(self._first_name(ref.index) == first for ref in refs_in(call.output)) > 1:
                return "the tensor is more than once in what it gives"
        if hands_on and self._uses(cut, first) > 1:
            return (
                "it hands on a tensor that it was given, and the run does not tell whether those "
                "that use it afterwards mean the one or the other"
            )
        return ""

    @cached_property
    def _again(self) -> dict[int, int]:
        """For ops that gave a tensor which had another name already: that name."""
        return {
            guard.index: guard.other
            for guard in self._recording.tape.guards
            if isinstance(guard, SameGuard)
        }

    def _first_name(self, index: int) -> int:
        """Return the first op that gave a tensor, as far as the tape tells."""
        while True:
            op = self._ops[index]
            if index in self._again:
                index = self._again[index]
            elif works_in_place(op) and (given := next(iter(refs_in(op.args)), None)) is not None:
                index = given.index
            else:
                return index

    def _uses(self, cut: Cut, first: int) -> int:
        """Count what uses the tensor of a cut from there on, by any name."""
        names = {
            op.index
            for op in self._ops[cut.index :]
            if (op.index in self._again or works_in_place(op) or op.index == cut.index)
            and self._first_name(op.index) == first
        }
        uses = sum(
            index in names
            for op in self._ops[cut.start :]
            if op.index not in names
            for index in op.operands
        )
        recording = self._recording
        given = [recording.root.output, *(change.value for change in recording.changes)]
        return uses + sum(ref.index in names for ref in refs_in(given))
