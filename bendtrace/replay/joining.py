"""Whether the paths of a recorded run can join others, and what a run may write to."""

from __future__ import annotations

from bendtrace.recording.effects import Effects, makes_anew, sets_nothing
from bendtrace.recording.rank_sync import is_one_of_several
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis, GuardKind
from bendtrace.tape.tape import OpKind, Tape, refs_in
from bendtrace.torch_rules.functions import known_as
from bendtrace.torch_rules.writes import works_in_place

__all__ = ["may_join", "may_write_to", "unread_in"]


def may_join(recording: Recording, analysis: Analysis) -> bool:
    """Whether the model can go on from any question of a run with another answer.

    It goes on from a state, or starts again where no state was read, and nothing was done by then
    that cannot be done twice.
    """
    tape = recording.tape
    if tape.is_joint or tape.blockers or is_one_of_several():
        return False
    effects, unread = Effects(tape), unread_in(recording, analysis)
    if not unread:
        return True
    if not effects.have_begun():
        return not recording.draws  # else something draws that is not known to
    assert effects.first is not None
    return tape.guards[unread[-1]].position <= effects.first


def unread_in(recording: Recording, analysis: Analysis) -> list[int]:
    """Return the questions of a run that need values, and whose states were not read."""
    tape = recording.tape
    return [
        number
        for number, kind in enumerate(analysis.kinds)
        if kind is GuardKind.DATA and number not in tape.states
    ]


def may_write_to(tape: Tape, values: set[int]) -> bool:
    """Whether a replay may write to the memory of some values, under whatever name.

    Args:
        tape: what is replayed.
        values: the ops that give them.
    """
    names = set(values)
    for op in tape.ops:
        if op.kind is OpKind.CALL and not sets_nothing(op):
            written = set(op.writes)
            if works_in_place(op) or known_as(op.target) == "__setitem__":
                written.update(ref.index for ref in refs_in((op.args[:1], op.kwargs.get("out"))))
            if not names.isdisjoint(written):
                return True
            if makes_anew(op.target):
                continue
        if op.is_work and not names.isdisjoint(op.operands):
            names.add(op.index)
    return False
