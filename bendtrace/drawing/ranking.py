"""Which rank each vertex stands in."""

from __future__ import annotations

from bendtrace.drawing.level import Level, LocalNet, Vertex

__all__ = ["rank"]

_ROUNDS = 4
_WIDEST = 8  # shapes without a successor beside each other


def rank(level: Level) -> None:
    """Give each vertex of a level its rank: below all it comes from, and near what it is tied to.

    Shapes come in the order of the run, in which values never run back but along lanes: so one
    walk along that order finds the ranks, as no other algorithm needs to look for cycles.
    """
    shapes = list(level.vertex.values())
    into: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    out: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    for net in level.nets:
        targets = level.forward(net)
        for target in targets:
            if target in into:
                into[target].append(net)
        source = level.source(net)
        if targets and source in out:
            out[source].append(net)
    first = 1 if level.ports_in else 0

    def alone(vertex: Vertex) -> bool:
        """Whether it is a box that nothing leads to or from: such stand below each other."""
        is_box = vertex.shape is not None and vertex.shape.children is not None
        return is_box and not into[vertex] and not out[vertex]

    for vertex in shapes:
        vertex.rank = max((level.source(n).rank + 1 for n in into[vertex]), default=first)
        vertex.rank = max(vertex.rank, first)
    _stack([vertex for vertex in shapes if not out[vertex] and not alone(vertex)])
    apart = [vertex for vertex in shapes if alone(vertex)]
    for place, vertex in enumerate(apart):
        vertex.rank += place
    last = max((v.rank for v in shapes), default=first - 1) + 1
    for port in level.ports_out.values():
        port.rank = last
    for _ in range(_ROUNDS):
        moved = False
        for vertex in reversed(shapes):
            if not out[vertex]:
                continue
            latest = min(t.rank for n in out[vertex] for t in level.forward(n)) - 1
            if latest <= vertex.rank:
                continue
            longer = _longer(level, vertex, into[vertex], latest)
            shares = any(len(level.forward(net)) > 1 for net in into[vertex])
            # With as many lines longer as shorter, lines that are shared already may get longer.
            if longer < len(out[vertex]) or (longer == len(out[vertex]) and shares):
                vertex.rank = latest
                moved = True
        if not moved:
            break


def _stack(ends: list[Vertex]) -> None:
    """Put many shapes that nothing comes after, such as outputs, into several ranks by turns."""
    rows: dict[int, list[Vertex]] = {}
    for vertex in ends:
        rows.setdefault(vertex.rank, []).append(vertex)
    for row in rows.values():
        ranks = -(-len(row) // _WIDEST)
        for place, vertex in enumerate(row):
            vertex.rank += place % ranks


def _longer(level: Level, vertex: Vertex, into: list[LocalNet], latest: int) -> int:
    """Return how many lines would get longer if a vertex went down."""
    longer = 0
    for net in into:
        others = max((v.rank for v in level.forward(net) if v is not vertex), default=0)
        # A line that runs past anyway costs nothing.
        longer += others < latest
    return longer
