"""Runs that are recorded past the states where paths join, and compared with what is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bendtrace.dispatcher import Floor
from bendtrace.replay.program import Program
from bendtrace.replay.stretches import Divergence, random_states
from bendtrace.tape.contexts import AutocastHold

__all__ = ["past_joins"]

_run = Program.run


@contextmanager
def past_joins() -> Iterator[None]:
    """Have each call that a graph of states would serve recorded from its start to its end.

    From each state that it comes to, what it does is compared, op by op, with what the graph says
    that any call would do; if they differ, that is a `NondeterminismError`.
    """
    with (
        mock.patch.object(Program, "run", _led_back),
        mock.patch.object(Floor, "takes", return_value=False),
    ):
        yield


def _led_back(
    program: Program, arguments: tuple[Any, ...], first: bool = False, compiled: bool = False
) -> Any:
    graph = program.graph
    if graph is None or graph.is_broken or first or not program.recording.tape.states:
        return _run(program, arguments, first, compiled)
    number = min(program.recording.tape.states)
    hold = AutocastHold()
    recording = program.recording
    return Divergence(program.root, recording, number, None, {}, hold, True, random_states())
