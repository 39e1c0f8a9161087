"""From a recorded run to its tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bendtrace.flow import FlowSteps, flow_steps
from bendtrace.graph.names import node_names
from bendtrace.paths.build import Builder
from bendtrace.paths.events import Events
from bendtrace.paths.naming import Registry
from bendtrace.paths.steps import StepSource
from bendtrace.paths.view import Tree
from bendtrace.paths.visit import Visit
from bendtrace.recording.recorder import Recording

__all__ = ["tree_of"]


def tree_of(
    recording: Recording, function: Callable[..., Any], registry: Registry | None = None
) -> Tree:
    """Return the tree of paths of a recorded run.

    Args:
        recording: the run.
        function: what was run.
        registry: gives the names; one that several runs share gives the nodes that they have in
            common the same names.
    """
    events = Events(recording, function)
    registry = Registry() if registry is None else registry
    builder = Builder(events, registry)
    with registry.lock:
        Visit(builder, events.root, builder.root).run()
    builder.finish()

    def names() -> list[str]:
        return node_names(recording.tape.ops)

    def steps() -> FlowSteps:
        return flow_steps(recording.tape, names())

    return Tree(builder.root, events.origins, StepSource(builder, steps, names))
