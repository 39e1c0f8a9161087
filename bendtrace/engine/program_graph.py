"""The graph of states: how runs are known to continue after each question.

`stretches.py` defines the nodes (states) and their exits (answers, with the code that follows).
Branches join and loops close because two runs that reach the same state continue with the same
code. So the recorded code grows with the program, and not with the number of paths through it.

A run adds to the graph what it was the first to do: pieces of it, each from an unknown answer to
the next known state. The first run is one piece that goes through all of its states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bendtrace.engine.codegen import SegmentWriter
from bendtrace.engine.guard_kinds import Analysis, GuardKind
from bendtrace.engine.schedule import Schedule, Unlinked
from bendtrace.engine.source import Code, ValueSplice
from bendtrace.engine.stretches import Exit, RunPiece, StateNode, Trip
from bendtrace.python.lazy import LazyModule
from bendtrace.record.effects import Effects
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.contexts import Context
from bendtrace.tape.tape import RunState, Tape
from bendtrace.watch.rank_sync import has_other_ranks
from bendtrace.watch.writes import works_in_place

if TYPE_CHECKING:
    from bendtrace.engine import comparison
else:
    comparison = LazyModule("bendtrace.engine.comparison")


class ProgramGraph:
    """The states that runs of one program have been in, beginning with those of the first run.

    With `direct`, generated code may call what torch functions end up calling. Without `joins`,
    each state belongs to one path.
    """

    has_begun_anew: bool  # whether the graph has been started again from a later run

    def __init__(
        self,
        recording: Recording,
        entry: Context,
        direct: bool,
        analysis: Analysis,
        joins: bool = True,
    ) -> None:
        _know_states(recording, analysis, joins)
        self.joins: bool = joins  # whether paths may join
        self._entry = entry
        self._direct = direct
        self._nodes: dict[bytes, StateNode] = {}
        self.is_broken: bool = False  # whether the graph has turned out to be unusable
        self.has_begun_anew = False
        # True if caches may be replaced before the end of a call (see `cache_growth.py`).
        self.may_grow: bool = direct  # a mode would notice the replacement
        self.retired: list[RunPiece] = []  # replaced; they hold the counts of calls before that
        self._ways: dict[tuple[Trip, ...], RunPiece] = {}
        self.first: RunPiece = RunPiece(recording, -1, analysis)  # the first run, as a piece
        self.first.count(-1, None)
        self.beginning: Exit = Exit(None, self.first, -1, self._write)  # where a call begins
        for number in sorted(recording.tape.states):
            self._pass(self.first, number)
        # True if calls may come to answers at which no state is known.
        self.has_unread: bool = bool(_unread_in(recording, analysis))
        self.writes: bool = _writes_in_place(recording.tape)  # whether a run writes in place

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
        """Add the work that a run was the first to do, whose path `hits` calls have taken.

        Return the new pieces, with the states at which they begin; None if the run does not fit in:
        the graph is unusable from then on.

        Raises:
            NondeterminismError: from one state, the run did something different from an earlier
                run.
        """
        tape, analysis, has_learnt = recording.tape, Analysis(recording.tape), False
        _know_states(recording, analysis, self.joins)
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
                if node.piece is piece and not comparison.does_something(tape, node.number, number):
                    return None
                piece.stop = number
                piece.nodes[number] = node
                trips.append((piece, piece.after, number))
                piece = None
            elif latest is not None:
                if not comparison.repeats_path(recording, latest[1], number, latest[0]):
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
            and not comparison.repeats_path(recording, latest[1], None, latest[0])
        ):
            return None
        if self.first.stop is None:
            self._cut_first(has_learnt)
        unread = _unread_in(self.first.recording, self.first.analysis)
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
        unread = _unread_in(first.recording, first.analysis)
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
        """Copy from a run the state in which the first run was at a guard; return whether it could.

        The first run is recorded without its states: most calls take its path, and never need them.
        A run that did the same from some state on was in the same states.
        """
        first, tape = self.first.recording.tape, recording.tape
        ahead = exit.number + number - after
        if ahead >= len(first.guards) or type(first.guards[ahead]) is not type(tape.guards[number]):
            return False
        state, named = tape.states[number], comparison.ValueNames(first, exit.number).indices()
        names = comparison.ValueNames(tape, after)
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


# The states of a recorded run that were not read


def _know_states(recording: Recording, analysis: Analysis, joins: bool = True) -> None:
    """Give questions whose states were not read states that are equal only to themselves.

    From a question without a state, the model has to begin again. That may be where nothing was
    done before that cannot be done twice. Without `joins`, no question keeps its own.
    """
    tape = recording.tape
    if not joins:
        tape.states = {}
        unread = list(range(len(tape.guards)))
    else:
        unread = _unread_in(recording, analysis)
        effects = Effects(tape)
        if not (recording.draws or has_other_ranks()):
            first = effects.first if effects.have_begun() else len(tape.ops)
            assert first is not None
            unread = [number for number in unread if tape.guards[number].position > first]
    for number in unread:
        tape.states[number] = _state_after(tape, number)


def _state_after(tape: Tape, number: int) -> RunState:
    """Return a state that is known by the path to it: it holds all computed values."""
    before = number - 1
    while before >= 0 and before not in tape.states:
        before -= 1
    position = tape.guards[before].position if before >= 0 else 0
    computed = tuple(
        op.index for op in tape.ops[position : tape.guards[number].position] if op.gives_value
    )
    state = tape.states.get(before, _START)
    between = [
        (guard.name, type(guard.answer).__name__, str(guard.answer))
        for guard in tape.guards[max(before, 0) : number]
    ]
    content = repr((state.key, between, tape.guards[number].name)).encode("utf-8", "replace")
    key = hashlib.blake2b(content, digest_size=20).digest()
    return RunState(key, state.holes + computed, state.kept)


_START = RunState(b"", (), ())


def _unread_in(recording: Recording, analysis: Analysis) -> list[int]:
    """Return the questions of a run that need values, and whose states were not read."""
    tape = recording.tape
    return [
        number
        for number, kind in enumerate(analysis.kinds)
        if kind is GuardKind.DATA and number not in tape.states
    ]
