"""Where in a tree the flow steps of a run happened."""

from __future__ import annotations

from bendtrace.flow import FlowStep, LoopFlowStep, steps_of
from bendtrace.paths.build import Builder
from bendtrace.paths.nodes import Step, TreeNode
from bendtrace.recording.tape import ModuleCall

__all__ = ["StepSource"]

_Counts = dict[tuple[int, str], int]


class StepSource:
    """Finds, once somebody asks, the place of each flow step in a tree.

    Args:
        builder: what built the tree.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def place(self) -> None:
        """Put the steps into the nodes of the graphs that they happened in."""
        builder, recording = self._builder, self._builder.events.recording
        index_of = {name: index for index, name in enumerate(recording.names)}
        found: dict[tuple[object, ...], tuple[TreeNode, str, int, FlowStep, _Counts]] = {}
        for number, step in enumerate(steps_of(recording)):
            position, call = self._position(step, index_of)
            place = builder.where.get(id(call))
            if place is None:
                continue
            node, made = place
            key = id(node), step.file, step.place.span, step.kind, step.text, type(step)
            if key not in found:
                found[key] = node, self._after(call, position), number, step, {}
            counts = found[key][4]
            outcome = made, _outcome(step)
            counts[outcome] = counts.get(outcome, 0) + 1
        for node, after, number, step, counts in found.values():
            outcomes = tuple((made, text, count) for (made, text), count in counts.items())
            node.steps.append(
                Step(number, after, step.kind, step.text, outcomes, step.file, step.line)
            )

    def _position(self, step: FlowStep, index_of: dict[str, int]) -> tuple[int, ModuleCall]:
        """Return up to where the tape had come, and the call whose code decided."""
        tape = self._builder.events.recording.tape
        if step.guard is not None:
            guard = tape.guards[step.guard]
            position, call = guard.position, guard.scope
        else:
            op = tape.ops[index_of[step.name]]
            position, call = op.index + (not isinstance(step, LoopFlowStep)), op.scope
        while call.path != step.module_path and call.parent is not None:
            call = call.parent
        return position, call

    def _after(self, call: ModuleCall, position: int) -> str:
        before = [name for at, name in self._builder.marks[id(call)] if at < position]
        return before[-1] if before else ""


def _outcome(step: FlowStep) -> str:
    if isinstance(step, LoopFlowStep):
        return step.how_often
    return repr(step.value)
