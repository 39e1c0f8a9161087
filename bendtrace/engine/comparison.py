"""Comparing a run with the graph of states, from a state that both have reached.

Two runs that continue from one state must do the same until a question has different answers.
One value has different numbers on their two tapes, so values are compared by names, which say
what each is, seen from the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from bendtrace.engine.schedule import returned_inputs
from bendtrace.engine.stretches import Exit, StateNode
from bendtrace.python.lazy import errors
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import Op, Ref, RunState, Tape, counts, map_refs
from bendtrace.watch.environment import OwnershipTest
from bendtrace.watch.functions import name_of


def repeats_path(recording: Recording, after: int, until: int | None, exit: Exit) -> bool:
    """Compare the work of a run after an answer with the known continuation, the exit.

    Another run that was in the same state shows what follows. The two runs are compared from guard
    `after` (-1 for the beginning) to guard `until` (None for the end), as far as both are known.
    Return whether they did the same, as far as the arguments of ops can be compared. Raise
    `NondeterminismError` if they did different operations.
    """
    one, other = recording.tape, exit.piece.recording.tape
    start = one.guards[after].position if after >= 0 else 0
    end = len(one.ops) if until is None else one.guards[until].position
    most = None if until is None else sum(counts(op) for op in one.ops[start:end])
    ours, theirs = ValueNames(one, after, most), ValueNames(other, exit.number, most)
    mine, its = ours.ops, theirs.ops
    if exit.piece.stop is not None:  # it ends where other pieces continue
        stop = other.guards[exit.piece.stop].position
        its = [op for op in its if op.index < stop]
        if until is not None:
            mine = mine[: len(its)]
    for op, its_op in zip(mine, its, strict=False):
        if op.target == its_op.target and op.context.modes == its_op.context.modes:
            # A test of ownership gets all tensors that are alive, which nothing may read any more.
            count = 1 if type(op.target) is OwnershipTest else None
            args, its_args = op.args[:count], its_op.args[:count]
            if count == 1 and _same_arguments(args, its_args, ours, theirs):
                continue
            if _same_arguments(args, its_args, ours, theirs) and _same_arguments(
                op.kwargs, its_op.kwargs, ours, theirs
            ):
                continue
            now, before = ours.of(op), theirs.of(its_op)
            if now == before:
                continue
            if " at 0x" in now:  # an object that each run creates
                return False
        if not _ask_alike(one, after, until, other, exit.number):
            return False
        raise errors.NondeterminismError(
            f"the resumed run did {op} where it did {its_op} before, with all guards equal"
            + (f" (at {op.site.place})" if op.site is not None else "")
        )
    if len(its) != len(mine):
        if not _ask_alike(one, after, until, other, exit.number):
            return False
        what = "ended before the point where it diverged"
        if len(its) < len(mine):
            what = f"did {mine[len(its)]} where it ended before, with all guards equal"
        raise errors.NondeterminismError(f"the resumed run {what}")
    return True


def _same_arguments(one: Any, other: Any, ours: ValueNames, theirs: ValueNames) -> bool:
    """Return whether the arguments of two ops are clearly equal; False if that is not certain."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is Ref:
        name = ours.short_name_of(one.index)
        return name is not None and name == theirs.short_name_of(other.index)
    if kind is tuple or kind is list:
        return len(one) == len(other) and all(
            _same_arguments(mine, its, ours, theirs) for mine, its in zip(one, other, strict=True)
        )
    if kind is dict:
        return one.keys() == other.keys() and all(
            _same_arguments(mine, other[key], ours, theirs) for key, mine in one.items()
        )
    if kind is float:
        return repr(one) == repr(other)  # 0.0 and -0.0 differ in it
    return one is None or (kind in (bool, int, str) and one == other)


def _ask_alike(one: Tape, after: int, until: int | None, other: Tape, number: int) -> bool:
    """Return whether two runs asked and answered the same questions, from a guard of each on.

    They can differ in whether an op returned a copy, because that is asked only if it did not.
    """
    last = len(one.guards) if until is None else until
    pairs = zip(one.guards[after + 1 : last + 1], other.guards[number + 1 :], strict=False)
    return all(
        type(mine) is type(its) and (place == last or identical(mine.answer, its.answer))
        for place, (mine, its) in enumerate(pairs, after + 1)
    )


def does_something(tape: Tape, one: int, other: int) -> bool:
    """Return whether the model has done an op between two guards."""
    between = tape.ops[tape.guards[one].position : tape.guards[other].position]
    return any(map(counts, between))


class ValueNames:
    """The values of a run, named by what they are for the state of a guard, -1 for the beginning.

    At most `most` ops after it have names; None for all.
    """

    def __init__(self, tape: Tape, after: int, most: int | None = None) -> None:
        self._ops = tape.ops
        holes = tape.states[after].holes if after >= 0 else ()
        start = tape.guards[after].position if after >= 0 else 0
        # A tensor from before the run that was written to is a hole. Of the ops that have returned
        # it, a state that a script leads to names another one than a state that was read.
        written = {
            root: ("hole", k)
            for k, hole in enumerate(holes)
            if tape.ops[root := tape.aliases.get(hole, hole)].is_given
        }
        self._names: dict[int, Any] = {
            index: written.get(given) or tape.ops[given].target.named
            for index, given in returned_inputs(tape, after).items()
            if index not in holes
        }
        self._names.update(written)
        for k, hole in enumerate(holes):
            self._names.pop(hole, None)  # the last op of a name is found by it (see `indices`)
            self._names[hole] = "hole", k
        following = (tape.ops[index] for index in range(start, len(tape.ops)))
        # The ops that have names.
        self.ops: list[Op] = list(itertools.islice(filter(counts, following), most))
        self._names.update((op.index, ("op", k)) for k, op in enumerate(self.ops))

    def indices(self) -> dict[Any, int]:
        """Return the ops of the values in the state, and the ops after it, by name."""
        return {name: index for index, name in self._names.items()}

    def of(self, op: Op) -> str:
        """Return the arguments of an op, in these names, as text."""
        return repr(map_refs((op.args, op.kwargs), lambda ref: self.name(ref.index)))

    def short_name_of(self, index: int) -> Any:
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
        if op.is_element:
            return "element", self.name(op.args[0].index), op.args[1]
        if op.is_given:
            return op.target.named
        return "late", name_of(op.target), self.of(op)


# Following a run along the graph, so that it need not read the states that it comes to.


class Following:
    """Knows the states of a run from the first one on that is in the graph.

    From a known state, a known answer leads a run to the known next state. To
    read it would take far longer, if it lies below many frames. The run is still compared with the
    graph when it is added.
    """

    def __init__(self, node_of: Callable[[bytes], StateNode | None]) -> None:
        self._node_of = node_of
        self._exit: Exit | None = None  # what is known to follow
        self._number = -1  # the question of the run that the exit answers

    def state(self, tape: Tape) -> RunState | None:
        """Return the state of the latest question; None if it has to be read."""
        exit, number = self._exit, len(tape.guards) - 1
        if exit is None:
            return None
        piece, followed = exit.piece, exit.piece.recording.tape
        ahead = exit.number + number - self._number
        is_beyond = piece.stop is not None and ahead > piece.stop
        if is_beyond or ahead not in piece.nodes or not self._agree(tape, followed, exit, ahead):
            self._exit = None
            return None
        most = _work_between(tape, self._number, number)
        ours, theirs = ValueNames(tape, self._number, most), ValueNames(followed, exit.number, most)
        indices, found = ours.indices(), followed.states[ahead]
        holes = tuple(indices.get(theirs.name(hole), -1) for hole in found.holes)
        is_same = most == _work_between(followed, exit.number, ahead) and (
            ours.name(tape.guards[number].index) == theirs.name(followed.guards[ahead].index)
        )
        if -1 in holes or not is_same:
            self._exit = None
            return None
        return RunState(found.key, holes, found.kept)

    def _agree(self, tape: Tape, followed: Tape, exit: Exit, ahead: int) -> bool:
        """Return whether the same was asked since the last state, with the same answers."""
        mine, its = tape.guards[self._number + 1 :], followed.guards[exit.number + 1 : ahead + 1]
        return len(mine) == len(its) and all(
            one.asks_like(other) and (place == len(mine) or identical(one.answer, other.answer))
            for place, (one, other) in enumerate(zip(mine, its, strict=True), 1)
        )

    def passes(self, tape: Tape, state: RunState) -> None:
        """Take the state of the latest question, which has been answered by now."""
        number = len(tape.guards) - 1
        before = tape.states.get(number - 1)
        if before is not None and (before.key, before.holes) == (state.key, state.holes):
            return  # the same question again
        node = self._node_of(state.key)
        self._exit = None if node is None else node.after(tape.guards[-1].answer)
        self._number = number


def _work_between(tape: Tape, one: int, other: int) -> int:
    """Return how many ops lie between two guards."""
    return sum(map(counts, tape.ops[tape.guards[one].position : tape.guards[other].position]))
