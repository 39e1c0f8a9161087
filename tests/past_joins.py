"""Runs that are recorded where a replay would do, and compared with what is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

from bendtrace.engine.dispatcher import Floor
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import Divergence, StateNode
from bendtrace.record.states import StateReader
from bendtrace.tape.contexts import Hold
from bendtrace.tape.tape import Guard, RunState

__all__ = ["followed", "past_joins", "resumed_anywhere"]

_run, _read = Program.run, StateReader.read
# The states that were known to follow and read, to the same effect.
followed: list[bytes] = []


@contextmanager
def past_joins() -> Iterator[None]:
    """Have each call that a graph of states would serve recorded from its start to its end.

    From each state that it comes to, what it does is compared, op by op, with what the graph says
    that any call would do; if they differ, that is a `NondeterminismError`.
    """
    with (
        mock.patch.object(Program, "run", _led_back),
        mock.patch.object(Floor, "take_call", return_value=False),
    ):
        yield


def _led_back(
    program: Program, arguments: tuple[Any, ...], first: bool = False, compiled: bool = False,
    splicer: Any = None,
) -> Any:  # fmt: skip
    graph = program.graph
    is_apart = graph is None or graph.is_broken or splicer is not None
    if is_apart or first or not program.recording.tape.states:
        return _run(program, arguments, first, compiled, splicer)
    number = min(program.recording.tape.states)
    return Divergence(program.root, program.recording, number, None, Hold())


@contextmanager
def resumed_anywhere(seed: int, most: int = 2) -> Iterator[None]:
    """Have calls replayed up to a question at random, and resumed by script from there.

    The answer may be known: then what the resumed run does is compared with it, as in `past_joins`.
    Questions are those where a call leaves the run that it follows: code asks no others.

    Args:
        seed: of the random numbers.
        most: how many questions are passed, at most.
    """
    random = Random(seed)

    def run(
        program: Program, arguments: tuple[Any, ...], first: bool = False, compiled: bool = False,
        splicer: Any = None,
    ) -> Any:  # fmt: skip
        graph = program.graph
        if graph is None or graph.is_broken or first:
            return _run(program, arguments, first, compiled, splicer)
        passed = iter(range(random.randrange(most + 1)))
        pieces = [(piece, piece.nodes) for piece in graph.pieces()]
        for piece, nodes in pieces:
            piece.nodes = _Passing(nodes, passed)
        try:
            return _run(program, arguments, splicer=splicer)
        finally:
            for piece, nodes in pieces:
                piece.nodes = nodes

    with (
        mock.patch.object(Program, "run", run),
        mock.patch.object(StateReader, "read", _read_and_followed),
        mock.patch.object(Floor, "take_call", return_value=False),
    ):
        yield


def _read_and_followed(
    states: StateReader, guard: Guard, turn: int, compared: frozenset[int]
) -> RunState | None:
    """Read a state also where it is known to follow, and compare the two."""
    follower, tape = states._follower, states._writer.tape
    known = None if follower is None else follower.state(tape)
    states._follower = None
    state = _read(states, guard, turn, compared)
    states._follower = follower
    if follower is not None and state is not None:
        if known is not None:
            assert (known.key, known.holes) == (state.key, state.holes)
            followed.append(known.key)
        follower.passes(tape, state)
    return state


class _Passing(dict[int, StateNode]):
    """The nodes of a piece, of which so many are passed; no answer of the next one is known."""

    def __init__(self, nodes: dict[int, StateNode], passed: Iterator[int]) -> None:
        super().__init__(nodes)
        self._passed = passed

    def get(self, number: int, default: Any = None) -> Any:
        node = super().get(number)
        if node is None or next(self._passed, None) is not None:
            return node
        return StateNode(node.piece, node.number)
