"""The graph of states: how runs are known to continue after each question.

`stretches.py` defines the nodes (states) and their exits (answers, with the code that follows).
Branches join and loops close because two runs that reach the same state continue with the same
code. So the recorded code grows with the program, and not with the number of paths through it.

A run adds to the graph what it was the first to do: pieces of it, each from an unknown answer to
the next known state. The first run is one piece that goes through all of its states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from typing import TYPE_CHECKING, Any

from bendtrace.engine.cache_growth import know_states, unread_in
from bendtrace.engine.codegen import SegmentWriter
from bendtrace.engine.guard_kinds import Analysis, GuardKind
from bendtrace.engine.schedule import Schedule, Unlinked, returned_inputs
from bendtrace.engine.source import Code, ValueSplice
from bendtrace.engine.stretches import Exit, RunPiece, StateNode, Trip
from bendtrace.python.lazy import LazyModule
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.contexts import Context
from bendtrace.tape.tape import Op, OpKind, Ref, RunState, Tape, counts, map_refs
from bendtrace.watch.functions import name_of
from bendtrace.watch.writes import works_in_place

if TYPE_CHECKING:
    from bendtrace import errors
else:
    errors = LazyModule("bendtrace.errors")


class ProgramGraph:
    """The states that runs of one program have been in.

    Args:
        recording: the first run.
        entry: grad mode, autocast and similar settings when a run begins.
        direct: whether generated code may call what torch functions end up calling.
        analysis: the analysis of the first run.
        joins: whether paths may join: if not, each state belongs to one path.

    Attributes:
        joins: whether paths may join.
        first: the first run, as a piece.
        may_grow: whether caches may be replaced before the end of a call (see `cache_growth.py`).
        is_broken: whether the graph has turned out to be unusable.
        has_begun_anew: whether the graph has been started again from a later run.
        beginning: the exit that a call begins with.
        has_unread: whether calls may come to answers at which no state is known.
        writes: whether a run writes to tensors in place.
        retired: pieces that others have replaced; they hold the counts of calls before that.
    """

    has_begun_anew: bool

    def __init__(
        self,
        recording: Recording,
        entry: Context,
        direct: bool,
        analysis: Analysis,
        joins: bool = True,
    ) -> None:
        know_states(recording, analysis, joins)
        self.joins: bool = joins
        self._entry = entry
        self._direct = direct
        self._nodes: dict[bytes, StateNode] = {}
        self.is_broken: bool = False
        self.has_begun_anew = False
        self.may_grow: bool = direct  # a mode would notice the replacement
        self.retired: list[RunPiece] = []
        self._ways: dict[tuple[Trip, ...], RunPiece] = {}
        self.first: RunPiece = RunPiece(recording, -1, analysis)
        self.first.count(-1, None)
        self.beginning: Exit = Exit(None, self.first, -1, self._write)
        for number in sorted(recording.tape.states):
            self._pass(self.first, number)
        self.has_unread: bool = bool(unread_in(recording, analysis))
        self.writes: bool = _writes_in_place(recording.tape)

    def exits(self) -> Iterator[Exit]:
        """Yield the beginning, and the exits of all states."""
        yield self.beginning
        for node in list(self._nodes.values()):
            yield from node.exits

    def nodes(self) -> Iterator[StateNode]:
        """Yield the states."""
        yield from self._nodes.values()

    def node(self, key: bytes) -> StateNode | None:
        """Return the state with a key, if it is known."""
        return self._nodes.get(key)

    def pieces(self) -> list[RunPiece]:
        """Return all pieces, the first run first."""
        found = {id(self.first): self.first}
        for node in self._nodes.values():
            found.update((id(exit.piece), exit.piece) for exit in node.exits)
        return list(found.values())

    def add(self, recording: Recording, hits: int = 1) -> list[tuple[StateNode, RunPiece]] | None:
        """Add the work that a run was the first to do.

        Args:
            recording: the run.
            hits: how many calls have taken its path.

        Returns:
            The new pieces, with the states at which they begin; None if the run does not fit in:
            the graph is unusable from then on.

        Raises:
            NondeterminismError: from one state, the run did something different from an earlier
                run.
        """
        tape, analysis, has_learnt = recording.tape, Analysis(recording.tape), False
        know_states(recording, analysis, self.joins)
        self.writes = self.writes or _writes_in_place(tape)
        made: list[tuple[StateNode, RunPiece]] = []
        piece: RunPiece | None = None  # the piece being added; None where everything is known
        latest: tuple[Exit, int] | None = self.beginning, -1
        trips: list[Trip] = []
        for number in sorted(tape.states):
            node = self._nodes.get(tape.states[number].key)
            if piece is not None and (node is None or _is_repeated(tape, number)):
                self._pass(piece, number)
                continue
            if piece is not None and node is not None:
                if node.piece is piece and not does_something(tape, node.number, number):
                    return None
                piece.stop = number
                piece.nodes[number] = node
                trips.append((piece, piece.after, number))
                piece = None
            elif latest is not None:
                if not repeats_path(recording, latest[1], number, latest[0]):
                    return None
                ahead = latest[0].number + number - latest[1]
                trips.append((latest[0].piece, latest[0].number, ahead))
                if latest[0].piece is self.first and ahead not in self.first.recording.tape.states:
                    if not self._learn(recording, latest[1], number, latest[0]):
                        return self._begin_anew(recording)
                    has_learnt, node = True, self._nodes.get(tape.states[number].key)
            if node is None:
                if analysis.kinds[number] is GuardKind.DATA:
                    return None  # the known runs led to another question
                continue
            if _is_repeated(tape, number):
                continue
            answer = tape.guards[number].answer
            exit = node.after(answer)
            if exit is None and number == self.first.stop and self._is_led_by_first(recording):
                self._renew(recording)
                return made
            if exit is None:
                piece = RunPiece(recording, number, analysis)
                piece.owner = self.first.owner  # until the caller sets its own
                node.add(Exit(answer, piece, number, self._write))
                made.append((node, piece))
            else:
                latest = exit, number
        if piece is not None:
            trips.append((piece, piece.after, None))
        elif latest is not None:
            trips.append((latest[0].piece, latest[0].number, None))
        if (
            piece is None
            and latest is not None
            and not repeats_path(recording, latest[1], None, latest[0])
        ):
            return None
        if self.first.stop is None:
            self._cut_first(has_learnt)
        unread = unread_in(self.first.recording, self.first.analysis)
        self.has_unread = any(self.first.stop is None or n < self.first.stop for n in unread)
        try:
            for node, piece in made:
                exit = node.after(tape.guards[piece.after].answer)
                assert exit is not None
                assert exit.code
        except Unlinked:
            return None
        for along, entered, left in trips * hits:
            along.count(entered, left)
        if made:
            self._ways[tuple(_join_trips(trips))] = made[-1][1]
        return made

    def run_along(self, way: tuple[Trip, ...]) -> RunPiece | None:
        """Return the last piece of the run that went exactly along these trips, if one did."""
        return self.first if way == ((self.first, -1, None),) else self._ways.get(way)

    def forget(self, owner: Any) -> None:
        """Drop the pieces of an owner, and everything that only they show."""
        self._ways = {w: last for w, last in self._ways.items() if last.owner is not owner}
        for piece in self.pieces():
            if piece.owner is owner:
                for node in self._nodes.values():
                    node.drop(piece)

    def _cut_first(self, has_learnt: bool) -> None:
        """End the first piece where the states that follow are unknown."""
        tape, first = self.first.recording.tape, self.first
        unread = unread_in(first.recording, first.analysis)
        numbers = [number for number in tape.states if not unread or number < unread[0]]
        if unread and numbers:
            first.stop = max(numbers)
            for node in self._nodes.values():
                node.drop(first, first.stop)
            has_learnt = True
        if has_learnt:
            self._rewrite_first()

    def _rewrite_first(self) -> None:
        """Generate the code again, so that it hands over the values of the states known by now."""
        self.beginning = Exit(None, self.first, -1, self._write)
        for node in self._nodes.values():
            for exit in node.exits:
                if exit.piece is self.first:
                    exit.rewrite()

    def _is_led_by_first(self, recording: Recording) -> bool:
        """Return whether a run took the path of the first run, up to where that was cut."""
        first, tape, stop = self.first.recording.tape, recording.tape, self.first.stop
        assert stop is not None
        return len(tape.guards) > stop and all(
            number in tape.states
            and number in first.states
            and tape.states[number].key == first.states[number].key
            and identical(tape.guards[number].answer, first.guards[number].answer)
            for number in range(stop + 1)
        )

    def _begin_anew(self, recording: Recording) -> list[tuple[StateNode, RunPiece]] | None:
        """Begin again with a run whose states are known, where those of the first are not."""
        if self.has_begun_anew:
            return None
        self.has_begun_anew = True
        self.retired += [piece for piece in self.pieces() if piece is not self.first]
        self._nodes.clear()
        self._renew(recording)
        return []

    def _renew(self, recording: Recording) -> None:
        """Replace the first run by one that took the same path, and whose states are known."""
        old = self.first
        self.retired.append(old)
        self.first = RunPiece(recording, -1)
        self.first.count(-1, None)
        self.first.owner = old.owner
        for node in self._nodes.values():
            if node.piece is old:
                node.piece = self.first
            node.drop(old)
        for number in sorted(recording.tape.states):
            self._pass(self.first, number)
        self._rewrite_first()

    def _learn(self, recording: Recording, after: int, number: int, exit: Exit) -> bool:
        """Copy from a run the state in which the first run was at a guard.

        The first run is recorded without its states: most calls take its path, and never need them.
        A run that did the same from some state on was in the same states.

        Returns:
            Whether the state could be copied.
        """
        first, tape = self.first.recording.tape, recording.tape
        ahead = exit.number + number - after
        if ahead >= len(first.guards) or type(first.guards[ahead]) is not type(tape.guards[number]):
            return False
        state, named = tape.states[number], ValueNames(first, exit.number).indices()
        names = ValueNames(tape, after)
        holes = tuple(named.get(names.name(hole), -1) for hole in state.holes)
        if -1 in holes:
            return False
        first.states[ahead] = RunState(state.key, holes, state.kept)
        self._pass(self.first, ahead)
        return True

    def _pass(self, piece: RunPiece, number: int) -> None:
        """Add a state that a piece goes through, and the exit that the piece takes from it."""
        tape = piece.recording.tape
        key, answer = tape.states[number].key, tape.guards[number].answer
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = StateNode(piece, number)
        piece.nodes[number] = node
        if _is_repeated(tape, number):
            return
        if node.after(answer) is None:
            node.add(Exit(answer, piece, number, self._write))

    def _write(
        self,
        piece: RunPiece,
        number: int,
        writer: Callable[[Schedule, bool], SegmentWriter] = SegmentWriter,
        splices: Iterable[ValueSplice] = (),
    ) -> Code:
        schedule = Schedule.of_segment(
            piece.recording, piece.analysis, self._entry, number, piece.stop, piece.growths, splices
        )  # fmt: skip
        return writer(schedule, self._direct).write()


def _join_trips(trips: Iterable[Trip]) -> Iterator[Trip]:
    """Yield trips, with those that continue each other in one piece joined into one."""
    before: Trip | None = None
    for piece, entered, left in trips:
        if before is not None and before[0] is piece and before[2] == entered:
            before = piece, before[1], left
            continue
        if before is not None:
            yield before
        before = piece, entered, left
    if before is not None:
        yield before


def _writes_in_place(tape: Tape) -> bool:
    return any(op.writes or works_in_place(op) for op in tape.ops)


def _is_repeated(tape: Tape, number: int) -> bool:
    """Return whether a guard repeats the question of the guard before it."""
    before, state = tape.states.get(number - 1), tape.states[number]
    return before is not None and (before.key, before.holes) == (state.key, state.holes)


# Comparing a run with the graph of states, from a state that both have reached.
#
# Two runs that continue from one state must do the same until a question has different answers.
# One value has different numbers on their two tapes, so values are compared by names, which say
# what each is, seen from the state.


def repeats_path(recording: Recording, after: int, until: int | None, exit: Exit) -> bool:
    """Compare the work of a run after an answer with the known continuation.

    Another run that was in the same state shows what follows. The two runs are compared
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
    ours, theirs = ValueNames(one, after, most), ValueNames(other, exit.number, most)
    mine, its = ours.ops, theirs.ops
    if exit.piece.stop is not None:  # it ends where other pieces continue
        stop = other.guards[exit.piece.stop].position
        its = [op for op in its if op.index < stop]
        if until is not None:
            mine = mine[: len(its)]
    for op, its_op in zip(mine, its, strict=False):
        if op.target == its_op.target and op.context.modes == its_op.context.modes:
            if _same_arguments(op.args, its_op.args, ours, theirs) and _same_arguments(
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
            for index, given in returned_inputs(tape, after).items()
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
        if op.kind is OpKind.SCALAR and op.target is getitem:
            return "element", self.name(op.args[0].index), op.args[1]
        if op.is_given:
            return op.target.named
        return "late", name_of(op.target), self.of(op)
