"""Recorded runs, where others branch off them, and how a replay ends."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from bendtrace.engine.codegen import SegmentWriter
from bendtrace.engine.guard_kinds import Analysis
from bendtrace.engine.schedule import Schedule, may_be_caught
from bendtrace.engine.source import Code, ValueSplice
from bendtrace.python.lazy import LazyModule
from bendtrace.record.effects import Effects
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import bits_of, identical, store_item
from bendtrace.tape.contexts import Hold
from bendtrace.tape.tape import AfterOp, Guard, Stop
from bendtrace.watch.rank_sync import has_other_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from bendtrace.engine import cache_growth
    from bendtrace.engine.cache_growth import GrownTensor, Growth
    from bendtrace.engine.comparison import Following
    from bendtrace.record import script as scripts
    from bendtrace.record.script import Script
else:
    cache_growth = LazyModule("bendtrace.engine.cache_growth")
    scripts = LazyModule("bendtrace.record.script")

# The name of an exception's type, and the file and line where the model raised it.
Failure = tuple[str, str, int]


@dataclass(eq=False)
class RecordedPath:
    """A recorded run, and how often a call went the same way."""

    recording: Recording
    # Counted without a lock. CPython 3.11 and later switches threads at calls and jumps, and so
    # not within `path.hits += 1`; a build without the GIL may lose a count, and nothing else.
    hits: int = 0  # calls that came to the end of the path, the recorded one included
    worth: int = 0  # what the calls before the latest eviction count for now (see `TraceTree`)
    weighed: int = 0  # how many of the hits `worth` accounts for

    @property
    def uses(self) -> int:
        """The weight of its recent use."""
        return self.worth + self.hits - self.weighed

    def age(self) -> None:
        """Let earlier use count for half."""
        self.worth, self.weighed = self.uses // 2, self.hits


@dataclass(eq=False)
class GuardSide:
    """The continuation after a guard had another outcome than in the run that put it."""

    outcome: Any  # what the test gave; the `Raised` of an op that raised, None if it did not
    target: Stretch | None = None  # what follows, if that is known
    live: RecordedPath | None = None  # the run that showed that it can only be run live
    # Exceptions that the model raised before such a run came to its end.
    failures: Counter[Failure] = field(default_factory=Counter)


@dataclass(eq=False)
class Stretch(RecordedPath):
    """The rest of a recorded run, from where it left those before it."""

    parent: Stretch | None = field(default=None, repr=False)  # the one that it branches off
    # Where runs go on whose guard, or op that raised (or did not although it had when recorded),
    # had another outcome. Read without a lock: the tuples are exchanged, not changed.
    sides: dict[Stop, tuple[GuardSide, ...]] = field(default_factory=dict)
    # Names of exceptions that its ops raised and the model has no handler for.
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)
    # Made where there are many sides, and again where one is gone.
    _by_outcome: dict[Stop, dict[tuple[type, Any], GuardSide]] = field(
        default_factory=dict, repr=False
    )

    def side(self, number: Stop, outcome: Any) -> GuardSide | None:
        """Return the known side for an outcome of a guard."""
        sides = self.sides.get(number, ())
        if len(sides) > _FEW and type(outcome) in (bool, int, str):
            return self._looked_up(number, sides).get((type(outcome), outcome))
        for side in sides:
            if identical(side.outcome, outcome):
                return side
        return None

    def _looked_up(
        self, number: Stop, sides: tuple[GuardSide, ...]
    ) -> dict[tuple[type, Any], GuardSide]:
        """Return the sides of a guard by their outcomes, as far as these are plain."""
        cached = self._by_outcome.get(number)
        if cached is None or len(cached) != len(sides):
            plain = (side for side in sides if type(side.outcome) in (bool, int, str))
            cached = {(type(side.outcome), side.outcome): side for side in plain}
            self._by_outcome[number] = cached
        return cached

    def make_side(self, number: Stop, outcome: Any) -> GuardSide:
        """Return the side for an outcome of a guard, which is added if it is new."""
        side = self.side(number, outcome)
        if side is None:
            side = GuardSide(outcome)
            if (cached := self._by_outcome.get(number)) is not None:
                cached[type(outcome), outcome if type(outcome) in (bool, int, str) else side] = side
            self.sides[number] = (*self.sides.get(number, ()), side)
        return side


@dataclass(slots=True, eq=False)
class FinishedReplay:
    """A replay that reached its end, with what it returned."""

    output: Any  # what it returned
    stretch: Stretch  # the one that it ended in
    way: list[Trip]  # the parts of the graph that it went along

    @property
    def recording(self) -> Recording:
        """The run that was repeated."""
        return self.stretch.recording


@dataclass(eq=False)
class Divergence:
    """A replay that came to a guard whose other side is not known."""

    stretch: Stretch  # what was being repeated
    # The run that was being replayed. (That of `stretch` may be another by now: threads grow the
    # graph.)
    recording: Recording
    # The guard on the tape of `recording`; or the op that raised, or did not raise although it had
    # when recorded.
    number: Stop
    outcome: Any  # what the test gave
    hold: Hold  # on autocast's cache; released by who goes on
    trips: list[Trip] = field(default_factory=list)  # parts of the graph that the call went along
    # The values of the state that it came to, by the ops of the last part; None if no state was
    # read, and the model can do everything again.
    computed: dict[int, Any] | None = None
    error: Exception | None = None  # what an op raised, if it was not a guard that led away
    follower: Following | None = None  # knows states that a resumed run may come to
    asked: int = 0  # questions of the last part that were asked, if no guard led away (`Section`)

    @property
    def guard(self) -> Guard | None:
        """The guard that does not hold; None where an op raised or did not."""
        number = self.number
        return None if isinstance(number, AfterOp) else self.recording.tape.guards[number]

    @property
    def is_raised(self) -> bool:
        """Return whether an op raised an error that the model has no handler for."""
        if self.error is None or not isinstance(self.number, AfterOp):
            return False
        return not may_be_caught(self.recording.tape.ops[self.number.index], self.recording)

    @property
    def exit(self) -> Exit | None:
        """The way on from the state that it came to; None if that is not known."""
        piece, _, number = self.trips[-1]
        node = piece.nodes.get(number) if isinstance(number, int) else None
        return None if node is None else node.after(self.outcome)

    @property
    def continues_live(self) -> bool:
        """Return whether the continuation is known to run live only."""
        side = self.stretch.side(self.number, self.outcome)
        return side is not None and side.target is None and side.live is not None

    @property
    def has_acted(self) -> bool:
        """Return whether the call may have done something that must not be done twice."""
        return has_other_ranks() or any(
            piece.has_acted(left) for piece, _, left in self.trips if left is not None
        )

    def drop(self) -> None:
        """Let go of the values, of which nothing will be used."""
        self.hold.release()
        self.computed = None

    def script(self) -> Script | None:
        """Return the part that a resumed run does not have to repeat; None if that is nothing."""
        if self.computed is None:
            self.hold.release()
            return None
        sections = [
            scripts.Section(piece.recording.tape, entered, left, self.asked)
            for piece, entered, left in self.trips
            if left is not None
        ]
        computed, self.computed = self.computed, {}  # the run alone holds the values
        error, self.error = self.error, None
        return scripts.Script(sections, self.outcome, computed, error, self.hold, self.follower)

    def release(self, script: Script | None) -> None:
        """Let go of the values, once a run has been resumed with them."""
        if script is None:
            return
        # Whoever else still holds the script, as the recorder does until the garbage collector
        # comes by, would keep them alive.
        self.hold.release()  # if the run did not even begin
        script.release()
        self.computed = None


_FEW = 8  # sides that are looked at one by one


class Holes(list[Any]):
    """The values that segments hand to each other in a call, and what has grown in it."""

    # The tensors that were exchanged for longer ones (see `cache_growth.py`). It has these three
    # itself only in a call in which something grows.
    grown: tuple[GrownTensor, ...] = ()
    places: frozenset[Any] = frozenset()  # where they are
    memory: frozenset[int] = frozenset()  # their memory

    def __init__(self, may_grow: bool, hold: Hold) -> None:
        self.may_grow: bool = may_grow
        self.hold: Hold = hold

    def grows(self, growth: Growth, holder: Any, old: Tensor, new: Tensor) -> bool:
        """Say whether a tensor may be exchanged now, and remember it."""
        return cache_growth.grow(self, growth, holder, old, new)

    def may_enter(self, growths: Collection[Growth], taken: frozenset[Any]) -> bool:
        """Return whether code that expects the tensors as they were can continue.

        Its run makes `growths` longer, and it reads tensors in the places `taken`.
        """
        return self.places.isdisjoint(taken) and self.places <= {g.place for g in growths}

    def put_back(self) -> None:
        """Stop exchanging, and put back the tensors exchanged so far."""
        self.may_grow = False
        for grown in reversed(self.grown):
            store_item(grown.holder, grown.growth.change.key, grown.cut_out())
        self.grown, self.places, self.memory = (), frozenset(), frozenset()


# Nodes of the graph of states, and the pieces of recorded runs that lead from node to node.
#
# A node is a state: a question, and everything that Python holds when it is asked. An exit of a
# node is an answer, with the code that follows it.


class RunPiece:
    """A part of a recorded run that nothing else covers."""

    def __init__(self, recording: Recording, after: int, analysis: Analysis | None = None) -> None:
        self.recording = recording
        self.after = after  # the guard whose answer leads into it; -1 for the first piece
        self.stop: int | None = None  # the guard where it reaches another piece; None for the end
        self.nodes: dict[int, StateNode] = {}  # the states in it, by the guards of the run
        # How many calls ran it from one guard (-1 for its beginning) to another, or to an op that
        # raised (None where they ended).
        self.trips: dict[tuple[int, Stop | None], int] = {}
        # The analysis of the run.
        self.analysis: Analysis = Analysis(recording.tape) if analysis is None else analysis
        # True if some of the run is under autocast.
        self.casts: bool = any(op.context.autocast for op in recording.tape.ops)
        self.owner: Any = None  # the object that counts the calls that take it

    @functools.cached_property
    def growths(self) -> dict[int, Growth]:
        """The tensors that the run may replace at its end, by the ops that make the longer ones."""
        return cache_growth.growths_of(self.recording) if self.recording.changes else {}

    @functools.cached_property
    def first_effect(self) -> int:
        """The first op of the run that must not be carried out twice."""
        effects = Effects(self.recording.tape)
        effects.have_begun()
        if self.recording.draws:  # by a function of which that is not known
            return 0
        return len(self.recording.tape.ops) if effects.first is None else effects.first

    def has_acted(self, left: Stop) -> bool:
        """Return whether such an op may precede the point where a guard or op leaves the run."""
        return self.first_effect < self.recording.tape.position_of(left)

    def count(self, entered: int, left: Stop | None) -> None:
        """Count a call that ran it from one guard to another."""
        try:
            self.trips[entered, left] += 1
        except KeyError:
            self.trips[entered, left] = 1


@dataclass(slots=True, eq=False)
class Exit:
    """The continuation of runs after an answer."""

    answer: Any
    piece: RunPiece  # the piece that contains what follows
    number: int  # the guard of its run that had this answer
    _write: Callable[..., Code]
    written: Code | None = None  # the generated code, if it was requested already
    compiled: Code | None = None  # the same code with compiled ops in it, if there is any
    rewrites: int = 0  # how often the code was to be generated again

    @property
    def code(self) -> Code:
        """The code that follows, generated on first use.

        Raise `Unlinked` if the code needs a value that the state does not hold.
        """
        if self.written is None:
            self.written = self._write(self.piece, self.number)
        return self.written

    def write_with(self, writer: Callable[[Schedule, bool], SegmentWriter]) -> Code:
        """Return the code as another writer generates it."""
        return self._write(self.piece, self.number, writer)

    def write_spliced(self, splices: Iterable[ValueSplice]) -> Code:
        """Return the code with values passed through something.

        Raise `Unlinked` if the code needs a value that the state does not hold.
        """
        return self._write(self.piece, self.number, splices=splices)

    @property
    def passes(self) -> int:
        """The number of calls that have taken this exit."""
        trips = list(self.piece.trips.items())
        return sum(count for (entered, _), count in trips if entered == self.number)

    def rewrite(self) -> None:
        """Drop the generated code, so that it is generated again on its next use."""
        self.written = self.compiled = None
        self.rewrites += 1


class StateNode:
    """A state."""

    __slots__ = ("_by_answer", "exits", "no", "number", "piece", "yes")

    def __init__(self, piece: RunPiece, number: int) -> None:
        self.piece: RunPiece = piece  # the piece that first reached it
        self.number: int = number  # its guard in that piece
        self.exits: tuple[Exit, ...] = ()  # the known answers
        self.yes: Exit | None = None  # the exit for True; None if it is not known
        self.no: Exit | None = None  # the exit for False; None if it is not known
        self._by_answer: dict[Any, Exit] = {}

    def after(self, answer: Any) -> Exit | None:
        """Return the exit for an answer, if it is known."""
        if answer is True:
            return self.yes
        if answer is False:
            return self.no
        kind = type(answer)
        if kind in _LOOKED_UP:
            return self._by_answer.get((kind, bits_of(answer) if kind is float else answer))
        return next((exit for exit in self.exits if identical(exit.answer, answer)), None)

    def add(self, exit: Exit) -> None:
        """Add an exit."""
        self.exits = (*self.exits, exit)
        self._sort()

    def drop(self, piece: RunPiece, since: int = -1) -> None:
        """Remove the exits that lead into a piece, at some guard of it or later ones."""
        self.exits = tuple(
            exit for exit in self.exits if exit.piece is not piece or exit.number < since
        )
        self._sort()

    def _sort(self) -> None:
        exits = self.exits
        self.yes = next((exit for exit in exits if exit.answer is True), None)
        self.no = next((exit for exit in exits if exit.answer is False), None)
        self._by_answer = {
            (kind, bits_of(exit.answer) if kind is float else exit.answer): exit
            for exit in exits
            if (kind := type(exit.answer)) in _LOOKED_UP
        }


_LOOKED_UP = frozenset({int, str, float})


# A piece, the guard from which a call ran it (-1 for its beginning), and the guard where the call
# left it, or the op that raised: None where the call ended.
Trip: TypeAlias = tuple[RunPiece, int, Stop | None]
