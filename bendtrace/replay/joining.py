"""The states of a recorded run that were not read, and what a run may write to."""

from __future__ import annotations

import hashlib

from torch import Tensor

from bendtrace.recording.effects import Effects, makes_anew, sets_nothing
from bendtrace.recording.rank_sync import is_one_of_several
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis, GuardKind
from bendtrace.tape.tape import Op, OpKind, State, Tape, refs_in
from bendtrace.torch_rules.functions import known_as
from bendtrace.torch_rules.writes import works_in_place


def know_states(recording: Recording, analysis: Analysis, joins: bool = True) -> None:
    """Give questions whose states were not read states that are equal only to themselves.

    From a question without a state, the model has to begin again. That may be where nothing was
    done before that cannot be done twice.

    Args:
        recording: the run.
        analysis: its guards, sorted.
        joins: whether a run may be in the states of others; else no question keeps its own.
    """
    tape = recording.tape
    if not joins:
        tape.states = {}
        unread = list(range(len(tape.guards)))
    else:
        unread = unread_in(recording, analysis)
        effects = Effects(tape)
        if not (recording.draws or is_one_of_several()):
            first = effects.first if effects.have_begun() else len(tape.ops)
            assert first is not None
            unread = [number for number in unread if tape.guards[number].position > first]
    for number in unread:
        tape.states[number] = _state_after(tape, number)


def _state_after(tape: Tape, number: int) -> State:
    """Return a state that is known by the path to it: it holds all that was computed."""
    before = number - 1
    while before >= 0 and before not in tape.states:
        before -= 1
    position = tape.guards[before].position if before >= 0 else 0
    computed = tuple(
        op.index for op in tape.ops[position : tape.guards[number].position] if _gives_value(op)
    )
    known = tape.states.get(before, _START)
    between = [
        (guard.name, type(guard.answer).__name__, str(guard.answer))
        for guard in tape.guards[max(before, 0) : number]
    ]
    said = repr((known.key, between, tape.guards[number].name)).encode("utf-8", "replace")
    key = hashlib.blake2b(said, digest_size=20).digest()
    return State(key, known.holes + computed, known.kept)


def _gives_value(op: Op) -> bool:
    return op.kind is OpKind.SCALAR or (
        op.kind is OpKind.CALL and op.target is not Tensor.__setitem__
    )


_START = State(b"", (), ())


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
