"""The lines of one level, and how high its ranks stand."""

from __future__ import annotations

from dataclasses import dataclass

from bendtrace.drawing.channels import Run, heights
from bendtrace.drawing.level import Level, Link, LocalNet, Net, Shape, Vertex

__all__ = ["Plan", "Wire"]

_TRACK = 8.0  # between lines that run across
_CLEAR = 8.0  # from a rank to the lines below it
_ARROW = 12.0  # from the lines above a rank to it
_BORDER = 8.0  # from the last rank to the border of the box

Point = tuple[float, float]


@dataclass(eq=False)
class Wire:
    """A piece of a net, as a line along some points, each straight above or beside the next.

    Attributes:
        net: the net.
        points: from where it comes to where it goes.
        target: the shape in which it ends; None if it ends at a border or where others go on.
        is_back: whether it runs back up.
        joins: whether it ends at the line of another net.
    """

    net: Net
    points: list[tuple[float, float]]
    target: Shape | None = None
    is_back: bool = False
    joins: bool = False


class Plan:
    """The heights of the ranks of a level, and the lines between them.

    Attributes:
        height: how high the level is, with the title above.
    """

    def __init__(self, level: Level, title: float) -> None:
        self._level = level
        self._runs: list[dict[tuple[LocalNet, bool], Run]] = [
            {} for _ in range(len(level.ranks) + 1)
        ]
        self._tops: list[float] = []
        self._gaps: list[float] = []
        for vertex in level.vertices():
            for link in vertex.downs:
                run = self._run(link.lower.rank, link.net, False)
                run.tops.append(link.upper.x + link.upper_at)
                run.bottoms.append(link.lower.x + link.lower_at)
        for net, targets in level.back.items():
            lane = level.lanes[net]
            source = level.source(net)
            run = self._run(source.rank + 1, net, True)
            run.tops += [source.x + level.out_at[net], lane[0].x]
            for target in targets:
                joins = target.role == "in"
                run = self._run(target.rank + joins, net, True)
                run.joins = joins
                (run.tops if joins else run.bottoms).append(self._back_at(net, target))
                run.bottoms.append(lane[0].x)
        self._rise(title)

    def _run(self, gap: int, net: LocalNet, back: bool) -> Run:
        return self._runs[gap].setdefault((net, back), Run())

    def _back_at(self, net: LocalNet, target: Vertex) -> float:
        return target.x + self._level.back_at.get((net, target), 0.0)

    def _rise(self, title: float) -> None:
        level = self._level
        ports_in, ports_out = bool(level.ports_in), bool(level.ports_out)
        y = 0.0 if ports_in else title
        last = len(level.ranks)
        for gap, runs in enumerate(self._runs):
            tracks = heights(list(runs.values()))
            self._gaps.append(y + _CLEAR)
            if gap == 1 and ports_in:
                y += title
                self._gaps[-1] = y
            if gap == 0 and ports_in:
                self._tops.append(y)
                continue
            if gap == last:
                if not ports_out:
                    y += _CLEAR + tracks * _TRACK if tracks else _BORDER
                break
            if gap or tracks:
                y += _CLEAR + max(tracks - 1, 0) * _TRACK
                y += _BORDER if ports_out and gap == last - 1 else _ARROW
            elif title:
                y += _BORDER
            self._tops.append(y)
            high = max((v.height for v in level.ranks[gap]), default=0.0)
            for vertex in level.ranks[gap]:
                vertex.y = y + (high - vertex.height) / 2
            y += high
        self.height = y

    def wires(self) -> list[Wire]:
        """Draw the lines. Vertices may have been moved sideways, all alike, since."""
        found: list[Wire] = []
        for net in self._level.nets:
            self._down(net, found)
            if net in self._level.back:
                self._up(net, found)
        return found

    def _down(self, net: LocalNet, found: list[Wire]) -> None:
        upper = self._level.source(net)
        start = self._bottom(upper, net)
        main: list[Point] | None = [start]
        while True:
            links = [link for link in upper.downs if link.net is net]
            on = next((link for link in links if link.lower.role == "bend"), None)
            for link in links:
                if link is on:
                    continue
                points = main if on is None and main is not None else [start]
                self._step(points, link)
                if points is main:
                    main = None
                target = link.lower.shape
                found.append(Wire(net.net, _tidy(points), target))
            if on is None:
                break
            if main is not None:
                self._step(main, on)
            upper = on.lower
            start = (upper.x, self._tops[upper.rank])
        if main is not None and len(main) > 1:
            found.append(Wire(net.net, _tidy(main)))

    def _bottom(self, vertex: Vertex, net: LocalNet) -> Point:
        high = vertex.shape.height if vertex.shape is not None else 0.0
        return (vertex.x + self._level.out_at[net], vertex.y + high)

    def _step(self, points: list[Point], link: Link) -> None:
        start, stop = link.upper.x + link.upper_at, link.lower.x + link.lower_at
        y = self._across(link.lower.rank, link.net, False)
        if start != stop:
            points += [(start, y), (stop, y)]
        lower = link.lower
        points.append((stop, self._tops[lower.rank] if lower.role == "bend" else lower.y))

    def _across(self, gap: int, net: LocalNet, back: bool) -> float:
        return self._gaps[gap] + max(self._runs[gap][net, back].track, 0) * _TRACK

    def _up(self, net: LocalNet, found: list[Wire]) -> None:
        level = self._level
        source, lane = level.source(net), level.lanes[net][0].x
        x, y = self._bottom(source, net)
        turn = self._across(source.rank + 1, net, True)
        targets = sorted(level.back[net], key=lambda v: v.rank)
        for place, target in enumerate(targets):
            at = self._back_at(net, target)
            joins = target.role == "in"
            across = self._across(target.rank + joins, net, True)
            points = [(lane, across), (at, across)]
            if not joins:
                points.append((at, target.y))
            if place == 0:
                points = [(x, y), (x, turn), (lane, turn), *points]
            else:
                points = [(lane, self._tops[target.rank]), *points]
            found.append(Wire(net.net, _tidy(points), target.shape, True, joins))


def _tidy(points: list[Point]) -> list[Point]:
    """Leave out points that lie on the straight line between their neighbours."""
    kept = points[:1]
    for here, after in zip(points[1:], [*points[2:], None], strict=True):
        before = kept[-1]
        if after is not None and (
            (before[0] == here[0] == after[0]) or (before[1] == here[1] == after[1])
        ):
            continue
        if here != before:
            kept.append(here)
    return kept
