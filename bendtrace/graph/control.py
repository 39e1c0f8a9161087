"""Control dependence: which ops ran because of which flow steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bendtrace.flow import FlowStep, FlowSteps, LogicalFlowStep, LoopFlowStep, steps_of
from bendtrace.recording.finish import Recording
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.source.sites import Site, Span
from bendtrace.source.statements import governed
from bendtrace.tape.tape import ModuleCall, Tape

__all__ = ["control_of"]


class Control(NamedTuple):
    """The flow steps that parts of a run depend on, by number, outermost first.

    Attributes:
        ops: the steps that led to each op.
        calls: the steps that led to each call of a module.
    """

    ops: list[tuple[int, ...]]
    calls: list[tuple[int, ...]]


def control_of(recording: Recording) -> Control:
    """Return the flow steps that the ops and calls of a run depend on; computed once."""
    return recording.view(_control)


def _control(recording: Recording) -> Control:
    tape = recording.tape
    governing = _Governing(tape, steps_of(recording))
    found = Control([], [])
    calls = iter([*tape.calls, None])
    coming = next(calls)
    for position in range(len(tape.ops) + 1):
        is_over = position == len(tape.ops)
        while coming is not None and (is_over or coming.start <= position):
            owner = coming.parent
            found.calls.append(
                () if owner is None else governing.at(coming.start, owner, coming.site)
            )
            coming = next(calls)
        if not is_over:
            op = tape.ops[position]
            found.ops.append(governing.at(position, op.scope, op.site))
    return found


class _Governing:
    """Tells under which flow steps things of a run happened.

    Has to be asked in the order in which they did.

    Args:
        tape: the run.
        steps: its flow steps.
    """

    def __init__(self, tape: Tape, steps: FlowSteps) -> None:
        # Latest first, so that the next one to come into force is at the end.
        self._coming = list(_deciding(tape, steps))[::-1]
        self._coming.sort(key=lambda entry: entry[0], reverse=True)
        # For each running function: the steps in force, by where they are.
        # A `while` is tested by other instructions before the first iteration than after it.
        self._in_force: dict[object, dict[tuple[str, Span], tuple[int, tuple[Span, ...]]]] = {}

    def at(self, position: int, scope: ModuleCall, site: Site | None) -> tuple[int, ...]:
        """Return the numbers of the steps that led to something, outermost first.

        Args:
            position: length of the tape when it happened; not less than at the last question.
            scope: the module call it happened in.
            site: where.
        """
        while self._coming and self._coming[-1][0] <= position:
            _, number, step, activation, spans = self._coming.pop()
            at = (step.file, step.place.span)
            self._in_force.setdefault(activation, {})[at] = (number, spans)
        if not self._in_force or site is None:
            return ()
        found: set[int] = set()
        for place, activation in running_code(scope, site):
            for (file, _), (number, spans) in self._in_force.get(activation, {}).items():
                if file == place.file and any(span.holds(place.span) for span in spans):
                    found.add(number)
        return tuple(sorted(found))


def _deciding(
    tape: Tape, steps: FlowSteps
) -> Iterator[tuple[int, int, FlowStep, object, tuple[Span, ...]]]:
    """Yield the steps that something can run under: when, which, in which function, what."""
    for number, step in enumerate(steps):
        # The tests of a `while` are steps of their own: the loop as a whole has no guard.
        if step.guard is None or not isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            continue
        spans = governed(step.place, isinstance(step, LoopFlowStep) or bool(step.value))
        guard = tape.guards[step.guard]
        if guard.site is not None:
            _, activation, _ = user_code(guard.scope, guard.site)
            yield guard.position, number, step, activation, spans
