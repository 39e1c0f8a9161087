"""Gradients that are not there, which compiled code would give as zeros.

For a compiled graph, autograd has one node. If gradients come for some of its results only, the
others count as zeros, and inputs that only those depend on get zeros as well. The model leaves
these inputs without gradients, and an optimizer leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = ["Missing", "missing"]

# A node of an autograd graph, and which of its results.
_Edge = tuple[Any, int]


class Missing(NamedTuple):
    """What takes zeros away from the gradients of one graph.

    Attributes:
        slot: a result that leads to the node of the graph.
        steps: the way there.
        hook: is registered with the node.
    """

    slot: int
    steps: tuple[int, ...]
    hook: Callable[..., Any]

    def register(self, made: Sequence[Tensor]) -> None:
        """Take zeros away from the gradients of some results."""
        node: Any = made[self.slot].grad_fn
        for step in self.steps:
            node = node.next_functions[step][0]
        node.register_hook(self.hook)


def missing(
    pairs: Iterable[tuple[int, Tensor, Tensor]], known: Iterable[Tensor]
) -> Missing | str | None:
    """Return what takes zeros away; None if there are none, or why that is impossible.

    Args:
        pairs: results that require gradients: their slots, what a graph returned, and the same
            of a replay.
        known: the tensors that existed before the call.
    """
    pairs = list(pairs)
    if len(pairs) < 2:
        return None
    edges = [_edge(tensor) for tensor in known if tensor.requires_grad]
    theirs = [_reached(_edge(tensor), edges) for _, _, tensor in pairs]
    anywhere = set().union(*theirs)
    if all(found == anywhere for found in theirs):
        return None
    ours = [_reached(_edge(tensor), edges) & anywhere for _, tensor, _ in pairs]
    if ours == theirs:
        return None
    nodes: list[Any] = []
    ways: list[tuple[tuple[int, ...], int] | None] = []
    for _, tensor, _ in pairs:
        found = _to_graph(_edge(tensor))
        ways.append(None if found is None else (found[0], found[1][1]))
        if found is not None and found[1][0] not in nodes:
            nodes.append(found[1][0])
    if len(nodes) != 1 or None in ways:
        return "inputs would get gradients of zero, and not none"
    numbers = {edge: number for number, edge in enumerate(edges)}
    inputs = [numbers.get(edge) for edge in nodes[0].next_functions]
    needed: dict[int, set[int]] = {}
    for way, reached in zip(ways, theirs, strict=True):
        assert way is not None
        needed.setdefault(way[1], set()).update(
            slot for slot, number in enumerate(inputs) if number in reached
        )
    assert ways[0] is not None
    return Missing(pairs[0][0], ways[0][0], _hook(needed))


def _hook(needed: dict[int, set[int]]) -> Callable[..., Any]:
    def without_zeros(gradients: Sequence[Any], given: Sequence[Any]) -> Any:
        if not any(given[number] is None for number in needed):
            return None
        there: set[int] = set()
        for number, slots in needed.items():
            if given[number] is not None:
                there |= slots
        return tuple(gradient if slot in there else None for slot, gradient in enumerate(gradients))

    return without_zeros


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _reached(begin: _Edge, edges: Sequence[_Edge]) -> set[int]:
    """Return the numbers of the edges that gradients reach from one."""
    numbers: dict[_Edge, set[int]] = {}
    for number, edge in enumerate(edges):  # one tensor may be there more than once
        numbers.setdefault(edge, set()).add(number)
    found: set[int] = set()
    seen: set[_Edge] = set()
    waiting = [begin]
    while waiting:
        edge = waiting.pop()
        if edge in numbers:
            found |= numbers[edge]
        elif edge not in seen and edge[0] is not None:
            seen.add(edge)
            waiting += edge[0].next_functions
    return found


def _to_graph(edge: _Edge) -> tuple[tuple[int, ...], _Edge] | None:
    """Return the way to the node of a compiled graph, and which of its results comes there."""
    steps: list[int] = []
    while edge[0] is not None:
        if type(edge[0]).__name__ == "CompiledFunctionBackward":
            return tuple(steps), edge
        if len(edge[0].next_functions) != 1:
            return None
        steps.append(0)
        edge = edge[0].next_functions[0]
    return None
