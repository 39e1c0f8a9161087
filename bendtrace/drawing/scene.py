"""Scene: deciding what a picture of a run shows."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from bendtrace.drawing.emitter import Emitter
from bendtrace.drawing.folding import absorb, fold, visible
from bendtrace.drawing.nesting import Numbers, nest, roll
from bendtrace.drawing.nodes import Edge, Node, Scene
from bendtrace.drawing.repeats import Units, collapse
from bendtrace.errors import InputError
from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

__all__ = ["Edge", "Node", "Scene", "scene"]


def scene(
    history: RunLog,
    *,
    rolled: bool = False,
    collapsed: bool = True,
    depth: int | None = None,
    max_nodes: int = 150,
    within: str | None = None,
    flow: bool = True,
    numbers: Numbers = "deciding",
) -> Scene:
    """Decide what a picture of a run shows.

    Args:
        history: the log of the run.
        rolled: whether the passes of an op are one node. Otherwise each is its own.
        collapsed: whether of repeated blocks and passes of loops one is shown for all.
        depth: how many boxes deep to show; None for all.
        max_nodes: how many nodes to show at most; boxes are closed until that holds.
        within: a module, or one of its calls (`h.3`, `h.3:1`): only what happened in it is shown.
        flow: whether flow steps are shown, as decisions.
        numbers: which numbers out of tensors are shown: those that "deciding" flow steps come
            from, "all" or "none".

    Raises:
        InputError: for a module that was not called, or numbers that make no sense.
    """
    if max_nodes < 1 or (depth is not None and depth < 0):
        raise InputError(
            f"a picture takes max_nodes of at least 1 and depth of at least 0, "
            f"not max_nodes={max_nodes} and depth={depth}"
        )
    if numbers not in ("deciding", "all", "none"):
        raise InputError(f'numbers is "deciding", "all" or "none", not {numbers!r}')
    entries, inside = _part(history, within)
    root = nest(history, entries, flow=flow, numbers=numbers, inside=inside)
    shown = {entry.label for leaf in root.leaves() for entry in leaf.entries}
    steps = history.flow_steps
    if rolled:
        roll(root, {i: _step_key(step, True) for i, step in enumerate(steps)})
    units: Units = {}
    if collapsed:
        units = collapse(root, lambda i, by_name: _step_key(steps[i], by_name))
    absorb(root)
    all_nodes = visible(root)
    capped = fold(root, depth, max_nodes)
    return Emitter(history, entries, units, shown).emit(root, all_nodes, capped, within)


def _step_key(step: FlowStep, by_name: bool) -> object:
    """Return what decisions have in common that are repetitions of each other.

    The last test of a loop has another outcome than those before it.
    """
    if by_name:
        return (step.place.file, step.place.span, step.text)
    return (step.text, step.kind, "" if isinstance(step, LoopFlowStep) else str(step.value))


def _part(history: RunLog, within: str | None) -> tuple[list[LayerEntry], tuple[str, ...]]:
    """Return the entries to show, and the labels of the calls around them."""
    entries = [entry for entry in history.entries if entry.kind != "state"]
    if within is None:
        return entries, ()
    calls = {call.label: call for call in history.modules}
    found = calls.get(within) or next((c for c in history.modules if c.name == within), None)
    if found is None:
        names = list(dict.fromkeys([c.name for c in history.modules] + list(calls)))
        near = get_close_matches(within, names, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise InputError(f"no module {within!r} was called in this run{hint}")
    chain = [found.label]
    while calls[chain[0]].parent:
        chain.insert(0, calls[chain[0]].parent)
    inside = tuple(chain)
    return [entry for entry in entries if entry.scopes[: len(inside)] == inside], inside
