"""Following a run along the graph, so that it need not read the states that it comes to."""

from __future__ import annotations

from collections.abc import Callable

from bendtrace.replay.graph import Names
from bendtrace.replay.stretches import Exit, Node
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import State, Tape, counts


class Following:
    """Knows the states of a run from the first one on that is in the graph.

    From a known state, a known answer leads a run to the known next state. To
    read it would take far longer, if it lies below many frames. The run is still compared with the
    graph when it is added.

    Args:
        node_of: gives the node of a key; None if there is none.
    """

    def __init__(self, node_of: Callable[[bytes], Node | None]) -> None:
        self._node_of = node_of
        self._exit: Exit | None = None  # what is known to follow
        self._number = -1  # the question of the run that the exit answers

    def state(self, tape: Tape) -> State | None:
        """Return the state of the latest question; None if it has to be read.

        Args:
            tape: what the run has recorded so far.
        """
        exit, number = self._exit, len(tape.guards) - 1
        if exit is None:
            return None
        piece, known = exit.piece, exit.piece.recording.tape
        ahead = exit.number + number - self._number
        is_beyond = piece.stop is not None and ahead > piece.stop
        if is_beyond or ahead not in piece.nodes or not self._agree(tape, known, exit, ahead):
            self._exit = None
            return None
        most = _work_between(tape, self._number, number)
        ours, theirs = Names(tape, self._number, most), Names(known, exit.number, most)
        indices, found = ours.indices(), known.states[ahead]
        holes = tuple(indices.get(theirs.name(hole), -1) for hole in found.holes)
        is_same = most == _work_between(known, exit.number, ahead) and (
            ours.name(tape.guards[number].index) == theirs.name(known.guards[ahead].index)
        )
        if -1 in holes or not is_same:
            self._exit = None
            return None
        return State(found.key, holes, found.kept)

    def _agree(self, tape: Tape, known: Tape, exit: Exit, ahead: int) -> bool:
        """Return whether the same was asked since the last state, with the same answers."""
        mine, its = tape.guards[self._number + 1 :], known.guards[exit.number + 1 : ahead + 1]
        return len(mine) == len(its) and all(
            one.asks_like(other) and (place == len(mine) or identical(one.answer, other.answer))
            for place, (one, other) in enumerate(zip(mine, its, strict=True), 1)
        )

    def passes(self, tape: Tape, state: State) -> None:
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
