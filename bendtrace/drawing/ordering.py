"""From left to right: an order for each rank in which few lines cross."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

from bendtrace.drawing.level import Level, Link, Vertex

__all__ = ["order"]

_SWEEPS = 12
_EXCHANGES = 4
_WIDEST = 80  # in wider ranks, exchanging neighbours takes longer than it is worth


def order(level: Level, wanted: Callable[[Vertex], float | None]) -> None:
    """Put the vertices of each rank in order.

    Args:
        level: with its ranks filled.
        wanted: for ports of the border, where they would best be; None if that is not known.
    """
    ranks = level.ranks
    for rank in ranks:
        known = [v for v in rank if wanted(v) is not None]
        if len(known) == len(rank) > 0:
            rank.sort(key=lambda v: wanted(v) or 0.0)
    _number(ranks)
    best, fewest = _orders(ranks), _crossings(ranks)
    for sweep in range(_SWEEPS):
        if fewest == 0 and sweep > 1:
            break
        down = sweep % 2 == 0
        for rank in ranks if down else reversed(ranks):
            fixed = rank is ranks[0] and wanted(rank[0]) is not None if rank else True
            if not fixed:
                _sort(rank, ranks, down)
        if sweep > 1:
            _exchange(ranks, wanted)
        crossings = _crossings(ranks)
        if crossings < fewest or sweep == 0:
            best, fewest = _orders(ranks), crossings
    for vertex, place in best:
        vertex.order = place
    for rank in ranks:
        # Lanes stand outside of everything else: nothing tells them where to be.
        rank.sort(key=lambda v: (v.role == "lane", v.order))
    _number(ranks)


def _number(ranks: Sequence[list[Vertex]]) -> None:
    for rank in ranks:
        for place, vertex in enumerate(rank):
            vertex.order = place


def _orders(ranks: Sequence[list[Vertex]]) -> list[tuple[Vertex, int]]:
    return [(vertex, vertex.order) for rank in ranks for vertex in rank]


def _upper(link: Link) -> float:
    return link.upper.order + _fraction(link.upper, link.upper_at)


def _lower(link: Link) -> float:
    return link.lower.order + _fraction(link.lower, link.lower_at)


def _fraction(vertex: Vertex, at: float) -> float:
    """Return where on a vertex a link ends: between -0.5 and 0.5."""
    wide = vertex.left + vertex.right
    return at / wide if wide else 0.0


def _sort(rank: list[Vertex], ranks: Sequence[list[Vertex]], down: bool) -> None:
    keys: dict[Vertex, float] = {}
    for vertex in rank:
        links = vertex.ups if down else vertex.downs
        if links:
            other = ranks[vertex.rank + (-1 if down else 1)]
            at = sum(_upper(link) if down else _lower(link) for link in links) / len(links)
            keys[vertex] = (at + 0.5) / len(other)
        else:
            keys[vertex] = (vertex.order + 0.5) / len(rank)
    rank.sort(key=lambda v: (keys[v], v.order))
    for place, vertex in enumerate(rank):
        vertex.order = place


def _crossings(ranks: Sequence[list[Vertex]]) -> int:
    total = 0
    for rank in ranks[:-1]:
        links = [(_upper(link), _lower(link)) for vertex in rank for link in vertex.downs]
        links.sort()
        seen: list[float] = []
        for _, lower in links:
            total += len(seen) - bisect_right(seen, lower)
            insort(seen, lower)
    return total


def _exchange(ranks: Sequence[list[Vertex]], wanted: Callable[[Vertex], float | None]) -> None:
    """Exchange neighbours as long as that takes crossings away."""
    for _ in range(_EXCHANGES):
        changed = False
        for rank in ranks:
            if not 1 < len(rank) <= _WIDEST or (rank is ranks[0] and wanted(rank[0]) is not None):
                continue
            for place in range(len(rank) - 1):
                left, right = rank[place], rank[place + 1]
                now = _between(left.ups, right.ups, _upper)
                now += _between(left.downs, right.downs, _lower)
                then = _between(right.ups, left.ups, _upper)
                then += _between(right.downs, left.downs, _lower)
                if then < now:
                    rank[place], rank[place + 1] = right, left
                    left.order, right.order = place + 1, place
                    changed = True
        if not changed:
            break


def _between(left: list[Link], right: list[Link], end: Callable[[Link], float]) -> int:
    """Count the crossings of what is tied to two neighbours."""
    if not left or not right:
        return 0
    rights = sorted(end(link) for link in right)
    total = 0
    for link in left:
        at = end(link)
        total += sum(1 for other in rights if other < at)
    return total
