"""Nodes of the graph of states, and the pieces of recorded runs that lead from node to node.

A node is a state: a question, and everything that Python holds when it is asked. An exit of a node
is an answer, with the code that follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from bendtrace.recording.effects import Effects
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.codegen import SegmentWriter
from bendtrace.replay.growing import Growth, growths_of
from bendtrace.replay.schedule import Schedule
from bendtrace.replay.source import Code
from bendtrace.replay.splices import Splice
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import Stop


class Piece:
    """A part of a recorded run that nothing else covers.

    Attributes:
        recording: the run.
        after: the guard whose answer leads into it; -1 for the first piece.
        stop: the guard at which it reaches a state of another piece; None for the end.
        nodes: the states in it, by the guards of the run.
        trips: how many calls ran it from one guard (-1 for its beginning) to another, or to an
            op that raised (None where they ended).
        analysis: the analysis of the run.
        casts: whether some of the run is under autocast.
        growths: caches that the run extends and may replace before its end, by the ops that
            make the longer tensors.
        owner: the object that counts the calls that take it.
    """

    def __init__(self, recording: Recording, after: int, analysis: Analysis | None = None) -> None:
        self.recording = recording
        self.after = after
        self.stop: int | None = None
        self.nodes: dict[int, Node] = {}
        self.trips: dict[tuple[int, Stop | None], int] = {}
        self.analysis: Analysis = Analysis(recording.tape) if analysis is None else analysis
        self.casts: bool = any(op.context.autocast for op in recording.tape.ops)
        self.owner: Any = None

    @functools.cached_property
    def growths(self) -> dict[int, Growth]:
        """What the run may replace before its end, by the ops that make the longer tensors."""
        return growths_of(self.recording)

    @functools.cached_property
    def first_effect(self) -> int:
        """The first op of the run that must not be carried out twice."""
        effects = Effects(self.recording.tape)
        effects.have_begun()
        if self.recording.draws:  # by a function of which that is not known
            return 0
        return len(self.recording.tape.ops) if effects.first is None else effects.first

    def has_acted(self, left: Stop) -> bool:
        """Whether such an op may come before the run is left at some guard, or behind some op."""
        return self.first_effect < self.recording.tape.position_of(left)

    def count(self, entered: int, left: Stop | None) -> None:
        """Count a call that ran it from one guard to another."""
        try:
            self.trips[entered, left] += 1
        except KeyError:
            self.trips[entered, left] = 1


@dataclass(slots=True, eq=False)
class Exit:
    """How runs continue after an answer.

    Attributes:
        answer: the answer.
        piece: the piece that contains what follows.
        number: the guard of its run that had this answer.
        written: the generated code, if it was requested already.
        compiled: the same code with compiled ops in it, if there is any.
        rewrites: how often the code was to be generated again.
    """

    answer: Any
    piece: Piece
    number: int
    _write: Callable[..., Code]
    written: Code | None = None
    compiled: Code | None = None
    rewrites: int = 0

    @property
    def code(self) -> Code:
        """The code that follows, generated on first use.

        Raises:
            Unlinked: the code needs a value that the state does not hold.
        """
        if self.written is None:
            self.written = self._write(self.piece, self.number)
        return self.written

    def write_with(self, writer: Callable[[Schedule, bool], SegmentWriter]) -> Code:
        """Return the code as another writer generates it."""
        return self._write(self.piece, self.number, writer)

    def write_spliced(self, splices: Iterable[Splice]) -> Code:
        """Return the code with values passed through something.

        Raises:
            Unlinked: the code needs a value that the state does not hold.
        """
        return self._write(self.piece, self.number, splices=splices)

    @property
    def passes(self) -> int:
        """How many calls have taken this exit."""
        trips = list(self.piece.trips.items())
        return sum(count for (entered, _), count in trips if entered == self.number)

    def rewrite(self) -> None:
        """Drop the generated code, so that it is generated again on its next use."""
        self.written = self.compiled = None
        self.rewrites += 1


class Node:
    """A state.

    Attributes:
        piece: the piece that first reached it.
        number: its guard in that piece.
        exits: the known answers.
        yes: the exit for True; None if it is not known.
        no: the exit for False; None if it is not known.
    """

    __slots__ = ("_by_answer", "exits", "no", "number", "piece", "yes")

    def __init__(self, piece: Piece, number: int) -> None:
        self.piece: Piece = piece
        self.number: int = number
        self.exits: tuple[Exit, ...] = ()
        self.yes: Exit | None = None
        self.no: Exit | None = None
        self._by_answer: dict[Any, Exit] = {}

    def after(self, answer: Any) -> Exit | None:
        """Return the exit for an answer, if it is known."""
        if answer is True:
            return self.yes
        if answer is False:
            return self.no
        kind = type(answer)
        if kind is int or kind is str:
            return self._by_answer.get((kind, answer))
        return next((exit for exit in self.exits if identical(exit.answer, answer)), None)

    def add(self, exit: Exit) -> None:
        """Add an exit."""
        self.exits = (*self.exits, exit)
        self._sort()

    def drop(self, piece: Piece, since: int = -1) -> None:
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
            (type(exit.answer), exit.answer): exit
            for exit in exits
            if type(exit.answer) in (int, str)
        }


# A piece, the guard from which a call ran it (-1 for its beginning), and the guard where the call
# left it, or the op that raised: None where the call ended.
Trip: TypeAlias = tuple[Piece, int, Stop | None]
