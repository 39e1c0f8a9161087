"""Which ops of a recorded run write to memory that others see, going by their names."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from bendtrace.recording.functions import is_gate, name_of
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Op, Test, refs_in
from bendtrace.recording.writes import works_in_place
from bendtrace.replay.cutting import Cut

__all__ = ["Memory"]

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
        while op.is_work and (works_in_place(op) or name_of(op.target) in _VIEWS):
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
            guard.index: guard.expected
            for guard in self._recording.tape.guards
            if guard.test is Test.SAME
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
