"""Horizontal positions: straight lines first, everything else as close as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from bendtrace.view.drawing.level import Level, Link, Vertex

__all__ = ["align"]

_SWEEPS = 48
_PORT = 13.0  # between lines that end at the same shape
_EDGE = 9.0  # from the corner of a shape to the nearest line


class Column:
    """Vertices of neighbouring ranks that keep their positions relative to each other.

    Attributes:
        vertices: with the distance of each one's middle from that of the column.
        x: the middle of its first vertex.
        pulls: (strength, other column, offset from that column's x).
        rights: columns to its right, with the minimum distance to each.
        lefts: the same to its left.
    """

    __slots__ = ("lefts", "pulls", "rights", "vertices", "x")

    def __init__(self) -> None:
        self.vertices: dict[Vertex, float] = {}
        self.x: float = 0.0
        self.pulls: list[tuple[float, Column, float]] = []
        self.rights: dict[Column, float] = {}
        self.lefts: dict[Column, float] = {}

    @property
    def is_line(self) -> bool:
        """Whether it consists only of a line that runs past."""
        return all(vertex.role == "bend" for vertex in self.vertices)

    @property
    def is_lane(self) -> bool:
        """Whether it is a line that runs back up; these are outside everything else."""
        return next(iter(self.vertices)).role == "lane"


def align(level: Level, gap: Callable[[Vertex, Vertex], float]) -> None:
    """Set the x of each vertex, and the ends of each link.

    Args:
        level: the level, with its ranks in order.
        gap: the minimum distance between two neighbours.
    """
    _straighten(level)
    _spread(level)
    columns = _columns(level, gap)
    columns = _in_order(columns)
    for column in columns:
        column.x = max((left.x + d for left, d in column.lefts.items()), default=0.0)
    _settle([column for column in columns if not column.is_lane])
    _gather([column for column in columns if not column.is_lane])
    for column in columns:
        if column.is_lane:
            column.x = max((c.x + d for c, d in column.lefts.items()), default=0.0)
    for column in columns:
        column.x = round(column.x)
        for vertex, offset in column.vertices.items():
            vertex.x = column.x + offset
    _aim(level)


def _straighten(level: Level) -> None:
    """Choose the links that run straight down: for each vertex at most one up and one down.

    Chosen links do not cross each other, so that columns are side by side.
    """
    links = [link for vertex in level.vertices() for link in vertex.downs]
    above = _heights(level, up=True)
    below = _heights(level, up=False)

    def merit(link: Link) -> tuple[int, float, float, int]:
        if link.is_inner:
            return (0, 0, 0, 0)
        upper, lower = link.upper, link.lower
        direct = "bend" not in (upper.role, lower.role)
        siblings = [other.lower.order for other in upper.downs]
        middle = abs(lower.order - median(siblings))
        rivals = [other.upper.order for other in lower.ups]
        middle += abs(upper.order - median(rivals))
        return (1 if direct else 2, -(above[upper] + below[lower]), middle, upper.order)

    taken: dict[int, tuple[list[int], list[int]]] = {}
    has_down: set[Vertex] = set()
    has_up: set[Vertex] = set()
    for link in sorted(links, key=merit):
        upper, lower = link.upper, link.lower
        if upper in has_down or lower in has_up:
            continue
        uppers, lowers = taken.setdefault(upper.rank, ([], []))
        at = bisect_left(uppers, upper.order)
        if (at and lowers[at - 1] >= lower.order) or (
            at < len(lowers) and lowers[at] <= lower.order
        ):
            continue
        uppers.insert(at, upper.order)
        lowers.insert(at, lower.order)
        link.is_straight = True
        has_down.add(upper)
        has_up.add(lower)


def _heights(level: Level, *, up: bool) -> dict[Vertex, float]:
    """Return for each vertex the height above it, or below it, on the longest path."""
    heights: dict[Vertex, float] = {}
    for rank in level.ranks if up else reversed(level.ranks):
        for vertex in rank:
            links = vertex.ups if up else vertex.downs
            ends = [link.upper if up else link.lower for link in links]
            own = 1.0 if vertex.role == "shape" else 0.0
            heights[vertex] = own + max((heights[end] for end in ends), default=0.0)
    return heights


def _spread(level: Level) -> None:
    """Place the ends of links on the upper sides of plain shapes.

    A straight link ends as far from the middle as it starts, so that a shape stands right below
    the one before: otherwise a chain of decisions, each left at one side, would be a staircase.
    """
    for vertex in level.vertex.values():
        if vertex.shape is None or vertex.shape.children is not None:
            continue
        links = sorted(vertex.ups, key=lambda link: (link.upper.order, link.upper_at))
        back = [net for net, targets in level.back.items() if vertex in targets]
        middle = (len(links) - 1) / 2
        straight = next((float(i) for i, link in enumerate(links) if link.is_straight), middle)
        most = max(straight, len(links) + len(back) - 1 - straight)
        step = min(_PORT, (vertex.shape.width / 2 - _EDGE) / most) if most else 0.0
        reach, right = vertex.shape.width / 2 - _EDGE, len(links) + len(back) - 1 - straight
        start = next((link.upper_at for link in links if link.is_straight), 0.0)
        start = min(max(start, straight * step - reach), reach - right * step)
        for place, link in enumerate(links):
            link.lower_at = float(round(start + (place - straight) * step))
        for place, net in enumerate(back, len(links)):
            level.back_at[net, vertex] = float(round(start + (place - straight) * step))


def _columns(level: Level, gap: Callable[[Vertex, Vertex], float]) -> list[Column]:
    of: dict[Vertex, Column] = {}
    columns: list[Column] = []
    for rank in level.ranks:
        for vertex in rank:
            straight = next((link for link in vertex.ups if link.is_straight), None)
            if straight is not None:
                column = of[straight.upper]
                offset = column.vertices[straight.upper] + straight.upper_at - straight.lower_at
            else:
                column, offset = Column(), 0.0
                columns.append(column)
            of[vertex] = column
            column.vertices[vertex] = offset
    for lane in level.lanes.values():
        for vertex in lane[1:]:
            columns.remove(of[vertex])
            of[vertex] = of[lane[0]]
            of[vertex].vertices[vertex] = 0.0
    for rank in level.ranks:
        for left, right in pairwise(rank):
            a, b = of[left], of[right]
            room = left.right + gap(left, right) + right.left
            distance = a.vertices[left] + room - b.vertices[right]
            a.rights[b] = b.lefts[a] = max(distance, a.rights.get(b, distance))
        for vertex in rank:
            for link in vertex.downs:
                if of[vertex] is not of[link.lower]:
                    _tie(of, link)
    return columns


def _tie(of: dict[Vertex, Column], link: Link) -> None:
    upper, lower = of[link.upper], of[link.lower]
    start = upper.vertices[link.upper] + link.upper_at
    end = lower.vertices[link.lower] + link.lower_at
    roles = {link.upper.role, link.lower.role}
    weight = 1.0 if roles == {"shape"} else 0.6
    upper.pulls.append((weight, lower, end - start))
    lower.pulls.append((weight, upper, start - end))


def _in_order(columns: Sequence[Column]) -> list[Column]:
    """Return the columns such that each comes after those to its left."""
    missing = {column: len(column.lefts) for column in columns}
    ready = [column for column in columns if not column.lefts]
    for column in ready:
        for right in column.rights:
            missing[right] -= 1
            if not missing[right]:
                ready.append(right)
    return ready


def _settle(columns: Sequence[Column]) -> None:
    """Move columns towards their targets, as far as their neighbours let them."""
    inside = set(columns)
    lefts = {c: [(o, d) for o, d in c.lefts.items() if o in inside] for c in columns}
    rights = {c: [(o, d) for o, d in c.rights.items() if o in inside] for c in columns}
    for _ in range(_SWEEPS):
        wanted = {c: 0.5 * (c.x + _pulled(c)) for c in columns}
        pushed: dict[Column, float] = {}
        for c in columns:
            pushed[c] = max([wanted[c], *(pushed[o] + d for o, d in lefts[c])])
        for c in reversed(columns):
            wanted[c] = min([wanted[c], *(wanted[o] - d for o, d in rights[c])])
        # Both keep all distances, so their average does, too.
        for c in columns:
            c.x = 0.5 * (wanted[c] + pushed[c])
    for sweep in range(6):
        for c in reversed(columns) if sweep % 2 else columns:
            least = max((o.x + d for o, d in lefts[c]), default=float("-inf"))
            most = min((o.x - d for o, d in rights[c]), default=float("inf"))
            wanted_x = _pulled(c)
            if c.is_line:
                # One corner less: straight above where it goes, or below where it comes from.
                ends = (other.x + delta for _, other, delta in c.pulls)
                fitting = [x for x in ends if least <= x <= most]
                away = {x: abs(x - c.x) for x in fitting}
                wanted_x = min(away, key=away.__getitem__, default=wanted_x)
            c.x = min(max(wanted_x, least), most)


def _gather(columns: Sequence[Column]) -> None:
    """Move what is not tied to the rest next to it."""
    group: dict[Column, int] = {}
    for number, first in enumerate(columns):
        stack = [first] if first not in group else []
        while stack:
            column = stack.pop()
            if column not in group:
                group[column] = number
                stack += [other for _, other, _ in column.pulls]
    for number in dict.fromkeys(group.values()):
        members = [column for column in columns if group[column] == number]
        room = [
            column.x - left.x - distance
            for column in members
            for left, distance in column.lefts.items()
            if group[left] != number
        ]
        for column in members:
            column.x -= min(room, default=0.0)


def _pulled(column: Column) -> float:
    total = sum(weight for weight, _, _ in column.pulls)
    if not total:
        return column.x
    return sum(weight * (other.x + delta) for weight, other, delta in column.pulls) / total


def _aim(level: Level) -> None:
    """Let lines end straight below where they come from, where the shape is wide enough."""
    for vertex in level.vertex.values():
        if vertex.shape is None or vertex.shape.children is not None:
            continue
        reach = vertex.shape.width / 2 - _EDGE
        for link in vertex.ups:
            if link.is_straight:
                continue
            at = link.upper.x + link.upper_at - vertex.x
            others = [other.lower_at for other in vertex.ups if other is not link]
            others += [at for (_, target), at in level.back_at.items() if target is vertex]
            if abs(at) <= reach and all(abs(at - other) >= _PORT - 3 for other in others):
                link.lower_at = at
