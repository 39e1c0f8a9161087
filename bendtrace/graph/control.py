"""Control dependence: which ops ran because of which flow step."""

from __future__ import annotations

from collections.abc import Iterator

from bendtrace.flow import FlowStep, FlowSteps, LogicalFlowStep, LoopFlowStep
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.recording.sites import Span
from bendtrace.recording.statements import governed
from bendtrace.recording.tape import Tape

__all__ = ["controlling"]


def controlling(tape: Tape, names: list[str], steps: FlowSteps) -> Iterator[tuple[str, str, int]]:
    """Yield (node, condition's node, number of the step) for each op that ran under a step.

    Each op gets the innermost step that it ran under; that step's own condition, being an op,
    leads to the next one out.
    """
    deciding: dict[object, list[tuple[int, int, FlowStep, tuple[Span, ...]]]] = {}
    for number, step in enumerate(steps):
        # The tests of a `while` are steps of their own: the loop as a whole has no guard.
        if step.guard is None or not isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            continue
        spans = governed(step.place, isinstance(step, LoopFlowStep) or bool(step.value))
        guard = tape.guards[step.guard]
        if spans and guard.site is not None:
            _, activation, _ = user_code(guard.scope, guard.site)
            entry = (guard.position, number, step, spans)
            deciding.setdefault(activation, []).append(entry)
    if not deciding:
        return
    for op in tape.ops:
        if op.site is None:
            continue
        for place, activation in running_code(op.scope, op.site):
            under = [
                (number, step)
                for position, number, step, spans in deciding.get(activation, ())
                if position <= op.index
                and step.file == place.file
                and any(span.holds(place.span) for span in spans)
            ]
            if under:
                number, step = under[-1]
                yield names[op.index], step.name, number
                break
