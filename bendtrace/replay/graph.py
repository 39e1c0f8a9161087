"""The graph of states: what is known of how runs go on, from each question on.

A node is a state: a question, and all that Python holds when it is asked. An exit of it is an
answer, with the segment that follows. Branches join and loops close because two runs
that come to the same state go on from there by the same code; so what is recorded grows with
the program, and not with the paths through it.

A run becomes part of the graph by what it has seen for the first time: pieces of it, from an
answer that was not known to the next state that was. The first run is one piece, with its
questions in line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeAlias

from bendtrace.errors import NondeterminismError
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis, GuardKind
from bendtrace.replay.codegen import SegmentWriter
from bendtrace.replay.growing import Growth, growths_of
from bendtrace.replay.repeatable import may_draw, may_run_again
from bendtrace.replay.schedule import Schedule, Unlinked, same_as_given
from bendtrace.replay.source import Code
from bendtrace.tape.captured import identical
from bendtrace.tape.contexts import Context
from bendtrace.tape.tape import (
    Op,
    OpKind,
    Ref,
    State,
    Tape,
    map_refs,
)
from bendtrace.torch_rules.functions import name_of

__all__ = ["Exit", "Graph", "Node", "Piece", "Trip"]


class Piece:
    """A part of a recorded run that nothing else covers.

    Attributes:
        recording: the run.
        after: the guard whose answer leads into it; -1 for the first piece.
        stop: the guard at which it comes to a state of another piece; None for the end.
        nodes: the states in it, by the guards of the run.
        trips: how many calls went along it from one guard (-1 for its beginning) to another: to
            None where they ended, to -1 - i where op i raised.
    """

    def __init__(self, recording: Recording, after: int, analysis: Analysis | None = None) -> None:
        self.recording = recording
        self.after = after
        self.stop: int | None = None
        self.nodes: dict[int, Node] = {}
        self.trips: dict[tuple[int, int | None], int] = {}
        self.analysis = Analysis(recording.tape) if analysis is None else analysis
        self.owner: Any = None  # what counts the calls that take it

    @functools.cached_property
    def growths(self) -> dict[int, Growth]:
        """What of the environment may be exchanged before the end, by the ops that make it."""
        return growths_of(self.recording)

    def count(self, entered: int, left: int | None) -> None:
        """Count a call that went along it from one guard to another."""
        try:
            self.trips[entered, left] += 1
        except KeyError:
            self.trips[entered, left] = 1


@dataclass(slots=True, eq=False)
class Exit:
    """How runs go on after an answer.

    Attributes:
        answer: the answer.
        piece: the piece that has what follows.
        number: the guard of its run that was answered so.
        written: what is carried out, if it was asked for already.
        compiled: the same with compiled ops in it, if there is such code.
    """

    answer: Any
    piece: Piece
    number: int
    _write: Callable[..., Code]
    written: Code | None = None
    compiled: Code | None = None

    @property
    def code(self) -> Code:
        """What is carried out, written when it is first asked for.

        Raises:
            Unlinked: it needs a value that the state does not hold.
        """
        if self.written is None:
            self.written = self._write(self.piece, self.number)
        return self.written

    def write_with(self, writer: Callable[[Schedule, bool], SegmentWriter]) -> Code:
        """Return the same code as another writer writes it."""
        return self._write(self.piece, self.number, writer)

    @property
    def passes(self) -> int:
        """How many times calls have gone this way."""
        trips = list(self.piece.trips.items())
        return sum(count for (entered, _), count in trips if entered == self.number)

    def rewrite(self) -> None:
        """Have the code written anew when it is asked for next."""
        self.written = self.compiled = None


class Node:
    """A state.

    Attributes:
        piece: the piece that first came to it.
        number: the guard there.
        exits: the answers that are known.
        yes: what follows True; None if that is not known.
        no: what follows False; None if that is not known.
    """

    __slots__ = ("_by_answer", "exits", "no", "number", "piece", "yes")

    def __init__(self, piece: Piece, number: int) -> None:
        self.piece = piece
        self.number = number
        self.exits: tuple[Exit, ...] = ()
        self.yes: Exit | None = None
        self.no: Exit | None = None
        self._by_answer: dict[Any, Exit] = {}

    def after(self, answer: Any) -> Exit | None:
        """Return how runs go on after an answer, if that is known."""
        if answer is True:
            return self.yes
        if answer is False:
            return self.no
        kind = type(answer)
        if kind is int or kind is str:
            return self._by_answer.get((kind, answer))
        return next((exit for exit in self.exits if identical(exit.answer, answer)), None)

    def add(self, exit: Exit) -> None:
        """Note how runs go on after an answer."""
        self.exits = (*self.exits, exit)
        self._sort()

    def drop(self, piece: Piece) -> None:
        """Forget the exits that lead into a piece."""
        self.exits = tuple(exit for exit in self.exits if exit.piece is not piece)
        self._sort()

    def _sort(self) -> None:
        exits = self.exits
        self.yes = next((exit for exit in exits if exit.answer is True), None)
        self.no = next((exit for exit in exits if exit.answer is False), None)
        self._by_answer = {
            (type(exit.answer), exit.answer): exit
            for exit in exits
            if type(exit.answer) in (int, str)
        }


# A piece, the guard from which on it was gone along (-1 for its beginning), and that to which: None
# where the call ended, -1 - i where op i raised.
Trip: TypeAlias = tuple[Piece, int, int | None]


class Graph:
    """The states that runs of one program have been in.

    Args:
        recording: the first run.
        entry: grad mode and so on when a run begins.
        direct: whether torch functions may be called by what they come down to.
        analysis: of the first run.

    Attributes:
        first: the piece that the first run is.
        draws: whether some run may draw random numbers.
        may_grow: whether caches may be exchanged before the end of a call (see `growing.py`).
        is_broken: whether it turned out to be of no use.
        has_begun_anew: whether all that was known first has been given up.
        beginning: what a call begins with.
        retired: pieces that others have taken the place of, which tell of calls before that.
    """

    def __init__(
        self, recording: Recording, entry: Context, direct: bool, analysis: Analysis
    ) -> None:
        self._entry = entry
        self._direct = direct
        self._nodes: dict[bytes, Node] = {}
        self.draws = may_draw(recording)
        self.is_broken = self.has_begun_anew = False
        self.may_grow = direct  # a mode would see that
        self.retired: list[Piece] = []
        self._ways: dict[tuple[Trip, ...], Piece] = {}
        self.first = Piece(recording, -1, analysis)
        self.first.count(-1, None)
        self.beginning = Exit(None, self.first, -1, self._write)
        for number in sorted(recording.tape.states):
            self._pass(self.first, number)

    def exits(self) -> Iterator[Exit]:
        """Yield the beginning, and the exits of all states."""
        yield self.beginning
        for node in list(self._nodes.values()):
            yield from node.exits

    def nodes(self) -> Iterator[Node]:
        """Yield the states."""
        yield from self._nodes.values()

    def pieces(self) -> list[Piece]:
        """Return what runs have seen for the first time, the first run first."""
        found = {id(self.first): self.first}
        for node in self._nodes.values():
            found.update((id(exit.piece), exit.piece) for exit in node.exits)
        return list(found.values())

    def add(self, recording: Recording, hits: int = 1) -> list[tuple[Node, Piece]] | None:
        """Add what a run has seen for the first time.

        Args:
            recording: the run.
            hits: how many calls have gone its way.

        Returns:
            The pieces of it that are new, with the states that they begin at; None if the run
            is not one of these, or does not fit in: the graph is of no use from then on.

        Raises:
            NondeterminismError: from one state, the run did something else than one before.
        """
        if not may_run_again(recording):
            return None
        tape = recording.tape
        made: list[tuple[Node, Piece]] = []
        piece: Piece | None = None  # what is being added; None where all is known
        known: tuple[Exit, int] | None = self.beginning, -1
        analysis, has_learnt = Analysis(tape), False
        trips: list[Trip] = []
        for number in sorted(tape.states):
            state = tape.states[number]
            node = self._nodes.get(state.key)
            if piece is not None and (node is None or _is_repeated(tape, number)):
                self._pass(piece, number)
                continue
            if piece is not None and node is not None:
                if node.piece is piece and not _does_something(tape, node.number, number):
                    return None
                piece.stop = number
                piece.nodes[number] = node
                trips.append((piece, piece.after, number))
                piece = None
            elif known is not None:
                if not _agree(recording, known[1], number, known[0]):
                    return None
                ahead = known[0].number + number - known[1]
                trips.append((known[0].piece, known[0].number, ahead))
                if known[0].piece is self.first and ahead not in self.first.recording.tape.states:
                    if not self._learn(recording, known[1], number, known[0]):
                        return self._begin_anew(recording)
                    has_learnt, node = True, self._nodes[state.key]
            if node is None:
                if analysis.kinds[number] is GuardKind.DATA:
                    return None  # what is known leads elsewhere
                continue
            if _is_repeated(tape, number):
                continue
            answer = tape.guards[number].answer
            exit = node.after(answer)
            if exit is None and number == self.first.stop and self._is_led_by_first(recording):
                self._renew(recording)
                return made
            if exit is None:
                piece = Piece(recording, number, analysis)
                piece.owner = self.first.owner  # until it has one of its own
                node.add(Exit(answer, piece, number, self._write))
                made.append((node, piece))
            else:
                known = exit, number
        if piece is not None:
            trips.append((piece, piece.after, None))
        elif known is not None:
            trips.append((known[0].piece, known[0].number, None))
        if piece is None and known is not None and not _agree(recording, known[1], None, known[0]):
            return None
        if self.first.stop is None:
            self._cut_first(has_learnt)
        try:
            for node, piece in made:
                exit = node.after(tape.guards[piece.after].answer)
                assert exit is not None
                assert exit.code
        except Unlinked:
            return None
        self.draws = self.draws or may_draw(recording)
        for along, entered, left in trips * hits:
            along.count(entered, left)
        if made:
            self._ways[tuple(_joined(trips))] = made[-1][1]
        return made

    def run_along(self, way: tuple[Trip, ...]) -> Piece | None:
        """Return the last piece of the run that has gone a way to its end, if one has."""
        return self.first if way == ((self.first, -1, None),) else self._ways.get(way)

    def forget(self, owner: Any) -> None:
        """Drop what is known by a piece alone, which is named by its owner."""
        self._ways = {w: last for w, last in self._ways.items() if last.owner is not owner}
        for piece in self.pieces():
            if piece.owner is owner:
                for node in self._nodes.values():
                    node.drop(piece)

    def _cut_first(self, has_learnt: bool) -> None:
        """End the first piece where nobody knows the states that follow."""
        tape, first = self.first.recording.tape, self.first
        last = max(tape.states)
        if GuardKind.DATA in first.analysis.kinds[last + 1 :]:
            first.stop = last
            self._nodes[tape.states[last].key].drop(first)
            has_learnt = True
        if has_learnt:
            self._rewrite_first()

    def _rewrite_first(self) -> None:
        """Have code written that hands over what the states hold that are known by now."""
        self.beginning = Exit(None, self.first, -1, self._write)
        for node in self._nodes.values():
            for exit in node.exits:
                if exit.piece is self.first:
                    exit.rewrite()

    def _is_led_by_first(self, recording: Recording) -> bool:
        """Whether a run has gone the way of the first run up to where that was cut."""
        first, tape, stop = self.first.recording.tape, recording.tape, self.first.stop
        assert stop is not None
        return len(tape.guards) > stop and all(
            number in tape.states
            and number in first.states
            and tape.states[number].key == first.states[number].key
            and identical(tape.guards[number].answer, first.guards[number].answer)
            for number in range(stop + 1)
        )

    def _begin_anew(self, recording: Recording) -> list[tuple[Node, Piece]] | None:
        """Begin with a run whose states are known, where the first one tells too little."""
        if self.has_begun_anew:
            return None
        self.has_begun_anew = True
        self.retired += [piece for piece in self.pieces() if piece is not self.first]
        self._nodes.clear()
        self._renew(recording)
        return []

    def _renew(self, recording: Recording) -> None:
        """Put a run whose states are known in the place of the first one, which went its way."""
        old = self.first
        self.retired.append(old)
        self.first = Piece(recording, -1)
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
        """Take over from a run in which state the first run was at a guard.

        The first run is recorded without its states: most calls go its way, and never need them.
        A run that has done the same from some state on was in the same ones.
        """
        first, tape = self.first.recording.tape, recording.tape
        ahead = exit.number + number - after
        if ahead >= len(first.guards) or first.guards[ahead].test is not tape.guards[number].test:
            return False
        state, named = tape.states[number], _Names(first, exit.number).indices()
        names = _Names(tape, after)
        holes = tuple(named.get(names.name(hole), -1) for hole in state.holes)
        if -1 in holes:
            return False
        first.states[ahead] = State(state.key, holes, state.kept)
        self._pass(self.first, ahead)
        return True

    def _pass(self, piece: Piece, number: int) -> None:
        """Note a state that a piece goes through, and what follows in line."""
        tape = piece.recording.tape
        key, answer = tape.states[number].key, tape.guards[number].answer
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(piece, number)
        piece.nodes[number] = node
        if _is_repeated(tape, number):
            return
        if node.after(answer) is None:
            node.add(Exit(answer, piece, number, self._write))

    def _write(
        self,
        piece: Piece,
        number: int,
        writer: Callable[[Schedule, bool], SegmentWriter] = SegmentWriter,
    ) -> Code:
        schedule = Schedule.of_segment(
            piece.recording, piece.analysis, self._entry, number, piece.stop, piece.growths
        )
        return writer(schedule, self._direct).write()


def _joined(trips: Iterable[Trip]) -> Iterator[Trip]:
    """Yield what follows each other in one piece as one."""
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


def _is_repeated(tape: Tape, number: int) -> bool:
    """Whether a guard asks the very question of the one before."""
    before, state = tape.states.get(number - 1), tape.states[number]
    return before is not None and (before.key, before.holes) == (state.key, state.holes)


def _does_something(tape: Tape, one: int, other: int) -> bool:
    """Whether the model has done something between two guards."""
    between = tape.ops[tape.guards[one].position : tape.guards[other].position]
    return any(map(_counts, between))


def _agree(recording: Recording, after: int, until: int | None, exit: Exit) -> bool:
    """Compare what a run has done with what is known to follow an answer.

    What leads on from a state is known by another run that was in it. The two are compared from
    there to a guard, or the end, as far as both have been seen.

    Returns:
        Whether they are alike, as far as what they were given can be compared.

    Raises:
        NondeterminismError: they did different operations.
    """
    one, other = recording.tape, exit.piece.recording.tape
    start = one.guards[after].position if after >= 0 else 0
    end = len(one.ops) if until is None else one.guards[until].position
    most = None if until is None else sum(_counts(op) for op in one.ops[start:end])
    ours, theirs = _Names(one, after, most), _Names(other, exit.number, most)
    mine, its = ours.ops, theirs.ops
    if exit.piece.stop is not None:  # it ends where other pieces go on
        stop = other.guards[exit.piece.stop].position
        its = [op for op in its if op.index < stop]
        if until is not None:
            mine = mine[: len(its)]
    for op, known in zip(mine, its, strict=False):
        if op.target == known.target and op.context == known.context:
            if _are_alike(op.args, known.args, ours, theirs) and _are_alike(
                op.kwargs, known.kwargs, ours, theirs
            ):
                continue
            now, before = ours.of(op), theirs.of(known)
            if now == before:
                continue
            if " at 0x" in now:  # an object that each run makes anew
                return False
        if not _asked_alike(one, after, until, other, exit.number):
            return False
        raise NondeterminismError(
            f"the resumed run did {op} where it did {known} before, with all guards equal"
            + (f" (at {op.site.place})" if op.site is not None else "")
        )
    if len(its) != len(mine):
        if not _asked_alike(one, after, until, other, exit.number):
            return False
        what = "ended before the point where it diverged"
        if len(its) < len(mine):
            what = f"did {mine[len(its)]} where it ended before, with all guards equal"
        raise NondeterminismError(f"the resumed run {what}")
    return True


def _are_alike(one: Any, other: Any, ours: _Names, theirs: _Names) -> bool:
    """Whether arguments of two runs have the same names at once; False where that takes longer."""
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
        return repr(one) == repr(other)  # which tells zeros apart
    return one is None or (kind in (bool, int, str) and one == other)


def _asked_alike(one: Tape, after: int, until: int | None, other: Tape, number: int) -> bool:
    """Whether two runs had the same answers, from a guard of each on, as far as both were asked.

    They can differ in whether an op gave a copy, which is asked only where it did not.
    """
    last = len(one.guards) if until is None else until
    pairs = zip(one.guards[after + 1 : last + 1], other.guards[number + 1 :], strict=False)
    return all(
        mine.test is its.test and (place == last or identical(mine.answer, its.answer))
        for place, (mine, its) in enumerate(pairs, after + 1)
    )


def _counts(op: Op) -> bool:
    """Whether an op is one that the model does, not one that names an element or a state."""
    return op.kind is OpKind.CALL or (op.kind is OpKind.SCALAR and op.target is not getitem)


class _Names:
    """Names the values of a run by what they are from a state on.

    Args:
        tape: the run.
        after: the guard of the state; -1 for the beginning.
        most: how many ops are named; None for all.

    Attributes:
        ops: these.
    """

    def __init__(self, tape: Tape, after: int, most: int | None = None) -> None:
        self._ops = tape.ops
        holes = tape.states[after].holes if after >= 0 else ()
        start = tape.guards[after].position if after >= 0 else 0
        self._names: dict[int, Any] = {
            index: ("part", tape.ops[given].target.place)
            for index, given in same_as_given(tape, after).items()
        }
        self._names.update((hole, ("hole", k)) for k, hole in enumerate(holes))
        following = (tape.ops[index] for index in range(start, len(tape.ops)))
        self.ops = list(itertools.islice(filter(_counts, following), most))
        self._names.update((op.index, ("op", k)) for k, op in enumerate(self.ops))

    def indices(self) -> dict[Any, int]:
        """Return the ops of what is handed on, and of what is done after it, by name."""
        return {name: index for index, name in self._names.items()}

    def of(self, op: Op) -> str:
        """Return what an op is given, in these names."""
        return repr(map_refs((op.args, op.kwargs), lambda ref: self.name(ref.index)))

    def known(self, index: int) -> Any:
        """Return the name of a value where it is a short one; None for others."""
        name = self._names.get(index)
        if name is None and (op := self._ops[index]).is_given:
            return "part", op.target.place
        return name

    def name(self, index: int) -> Any:
        """Return the name of a value."""
        if index in self._names:
            return self._names[index]
        op = self._ops[index]
        if op.kind is OpKind.SCALAR and op.target is getitem:
            return "element", self.name(op.args[0].index), op.args[1]
        if op.is_given:
            return "part", op.target.place
        return "late", name_of(op.target), self.of(op)
