"""Control dependence: which ops ran because of which flow step."""

from __future__ import annotations

from collections.abc import Iterator

from bendtrace.flow import FlowStep, FlowSteps, LogicalFlowStep, LoopFlowStep
from bendtrace.recording.sites import Place, Site
from bendtrace.recording.statements import governed
from bendtrace.recording.tape import ModuleCall, Tape

__all__ = ["controlling"]


def controlling(tape: Tape, names: list[str], steps: FlowSteps) -> Iterator[tuple[str, str, int]]:
    """Yield (node, condition's node, number of the step) for each op that ran under a step.

    Each op gets the innermost step that it ran under; that step's own condition, being an op,
    leads to the next one out.
    """
    by_function: dict[tuple[str, str], list[tuple[int, int, FlowStep]]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, (LogicalFlowStep, LoopFlowStep)) and governed(step.place, _side(step)):
            position = _position(tape, step)
            key = (step.file, step.place.function)
            by_function.setdefault(key, []).append((position, number, step))
    for op in tape.ops:
        if op.site is None:
            continue
        for place in _outward(op.scope, op.site):
            candidates = by_function.get((place.file, place.function), ())
            found = None
            for position, number, step in candidates:
                if position > op.index:
                    break
                if any(span.holds(place.span) for span in governed(step.place, _side(step))):
                    found = number, step
            if found is not None:
                number, step = found
                if step.name != names[op.index]:
                    yield names[op.index], step.name, number
                break


def _side(step: FlowStep) -> bool:
    return True if isinstance(step, LoopFlowStep) else bool(step.value)


def _position(tape: Tape, step: FlowStep) -> int:
    if step.guard is not None:
        return tape.guards[step.guard].position
    return 0


def _outward(scope: ModuleCall, site: Site) -> Iterator[Place]:
    """Yield the user's places that led to a site, innermost first."""
    owner: ModuleCall | None = scope
    found: Site | None = site
    while found is not None:
        for place in found.places:
            if not place.in_torch:
                yield place
        if owner is None:
            return
        found, owner = owner.site, owner.parent
