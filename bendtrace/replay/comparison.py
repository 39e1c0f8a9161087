"""Comparing a run with the graph of states, from a state that both have reached.

Two runs that continue from one state must do the same until a question has different answers. One
value has different numbers on their two tapes, so values are compared by names, which say what each
is, seen from the state.
"""

from __future__ import annotations

import itertools
from operator import getitem
from typing import Any

from bendtrace.errors import NondeterminismError
from bendtrace.recording.recorder import Recording
from bendtrace.recording.script import counts
from bendtrace.replay.nodes import Exit
from bendtrace.replay.schedule import same_as_given
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import Op, OpKind, Ref, Tape, map_refs
from bendtrace.torch_rules.functions import name_of


def agree(recording: Recording, after: int, until: int | None, exit: Exit) -> bool:
    """Compare what a run did after an answer with what is known to follow it.

    What follows is known from another run that was in the same state. The two runs are compared
    from that state to a guard, or to the end, as far as both are known.

    Args:
        recording: the run.
        after: the guard of the run that had the answer; -1 for the beginning.
        until: the guard of the run at which the comparison ends; None for the end of the run.
        exit: the known exit for the answer.

    Returns:
        Whether they did the same, as far as the arguments of ops can be compared.

    Raises:
        NondeterminismError: they did different operations.
    """
    one, other = recording.tape, exit.piece.recording.tape
    start = one.guards[after].position if after >= 0 else 0
    end = len(one.ops) if until is None else one.guards[until].position
    most = None if until is None else sum(counts(op) for op in one.ops[start:end])
    ours, theirs = Names(one, after, most), Names(other, exit.number, most)
    mine, its = ours.ops, theirs.ops
    if exit.piece.stop is not None:  # it ends where other pieces continue
        stop = other.guards[exit.piece.stop].position
        its = [op for op in its if op.index < stop]
        if until is not None:
            mine = mine[: len(its)]
    for op, known in zip(mine, its, strict=False):
        if op.target == known.target and op.context.modes == known.context.modes:
            if _are_alike(op.args, known.args, ours, theirs) and _are_alike(
                op.kwargs, known.kwargs, ours, theirs
            ):
                continue
            now, before = ours.of(op), theirs.of(known)
            if now == before:
                continue
            if " at 0x" in now:  # an object that each run creates anew
                return False
        if not _ask_alike(one, after, until, other, exit.number):
            return False
        raise NondeterminismError(
            f"the resumed run did {op} where it did {known} before, with all guards equal"
            + (f" (at {op.site.place})" if op.site is not None else "")
        )
    if len(its) != len(mine):
        if not _ask_alike(one, after, until, other, exit.number):
            return False
        what = "ended before the point where it diverged"
        if len(its) < len(mine):
            what = f"did {mine[len(its)]} where it ended before, with all guards equal"
        raise NondeterminismError(f"the resumed run {what}")
    return True


def _are_alike(one: Any, other: Any, ours: Names, theirs: Names) -> bool:
    """Whether the arguments of two ops are equal at first sight; False if that is not certain."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is Ref:
        name = ours.known(one.index)
        return name is not None and name == theirs.known(other.index)
    if kind is tuple or kind is list:
        return len(one) == len(other) and all(
            _are_alike(mine, its, ours, theirs) for mine, its in zip(one, other, strict=True)
        )
    if kind is dict:
        return one.keys() == other.keys() and all(
            _are_alike(mine, other[key], ours, theirs) for key, mine in one.items()
        )
    if kind is float:
        return repr(one) == repr(other)  # 0.0 and -0.0 differ in it
    return one is None or (kind in (bool, int, str) and one == other)


def _ask_alike(one: Tape, after: int, until: int | None, other: Tape, number: int) -> bool:
    """Whether two runs asked the same questions and had the same answers, from a guard of each on.

    They can differ in whether an op returned a copy, because that is asked only if it did not.
    """
    last = len(one.guards) if until is None else until
    pairs = zip(one.guards[after + 1 : last + 1], other.guards[number + 1 :], strict=False)
    return all(
        type(mine) is type(its) and (place == last or identical(mine.answer, its.answer))
        for place, (mine, its) in enumerate(pairs, after + 1)
    )


def does_something(tape: Tape, one: int, other: int) -> bool:
    """Whether the model has done something between two guards."""
    between = tape.ops[tape.guards[one].position : tape.guards[other].position]
    return any(map(counts, between))


class Names:
    """The values of a run, named by what they are for a state.

    Args:
        tape: the run.
        after: the guard of the state; -1 for the beginning.
        most: how many ops after the state have names; None for all.

    Attributes:
        ops: the ops that have names.
    """

    def __init__(self, tape: Tape, after: int, most: int | None = None) -> None:
        self._ops = tape.ops
        holes = tape.states[after].holes if after >= 0 else ()
        start = tape.guards[after].position if after >= 0 else 0
        self._names: dict[int, Any] = {
            index: tape.ops[given].target.named
            for index, given in same_as_given(tape, after).items()
        }
        self._names.update((hole, ("hole", k)) for k, hole in enumerate(holes))
        following = (tape.ops[index] for index in range(start, len(tape.ops)))
        self.ops: list[Op] = list(itertools.islice(filter(counts, following), most))
        self._names.update((op.index, ("op", k)) for k, op in enumerate(self.ops))

    def indices(self) -> dict[Any, int]:
        """Return the ops of the values in the state, and the ops after it, by name."""
        return {name: index for index, name in self._names.items()}

    def of(self, op: Op) -> str:
        """Return the arguments of an op, in these names, as text."""
        return repr(map_refs((op.args, op.kwargs), lambda ref: self.name(ref.index)))

    def known(self, index: int) -> Any:
        """Return the name of a value if it is a short one; None for others."""
        name = self._names.get(index)
        if name is None and (op := self._ops[index]).is_given:
            return op.target.named
        return name

    def name(self, index: int) -> Any:
        """Return the name of a value."""
        if index in self._names:
            return self._names[index]
        op = self._ops[index]
        if op.kind is OpKind.SCALAR and op.target is getitem:
            return "element", self.name(op.args[0].index), op.args[1]
        if op.is_given:
            return op.target.named
        return "late", name_of(op.target), self.of(op)
