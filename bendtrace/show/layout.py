"""Layout of nested drawings: nested boxes, in ranks from the top down.

Each box is laid out on its own and is then one shape in the enclosing box; lines cross its border
at ports. So by construction nothing overlaps, and no line runs through a shape.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Literal

_CLOSE = 6.0  # lines nearer to each other than this are taken for one
_ROUNDS = 40


@dataclass(eq=False)
class Crossing:
    """A net between two ranks."""

    tops: list[float] = field(default_factory=list)  # its points on the upper rank
    bottoms: list[float] = field(default_factory=list)  # its points on the lower rank
    joins: bool = False  # whether it ends at the line of another net, which has to exist already
    track: int = -1  # the height at which it runs across, from 0 at the top; -1 if it does not

    @property
    def start(self) -> float:
        """Its leftmost point."""
        return min(*self.tops, *self.bottoms, float("inf"))

    @property
    def stop(self) -> float:
        """Its rightmost point."""
        return max(*self.tops, *self.bottoms, float("-inf"))


def heights(runs: Sequence[Crossing]) -> int:
    """Choose tracks for the nets, so that few lines cross and none overlap; return their number."""
    across = [run for run in runs if run.stop > run.start]
    ordered = _order_nets(sorted(across, key=lambda run: (run.start, run.stop)))
    count = 0
    for place, run in enumerate(ordered):
        above = (r for r in ordered[:place] if _spans_meet(r, run))
        run.track = 1 + max((r.track for r in above), default=-1)
        count = max(count, run.track + 1)
    return count


def _spans_meet(one: Crossing, other: Crossing) -> bool:
    return one.start < other.stop + _CLOSE and other.start < one.stop + _CLOSE


def _order_nets(runs: list[Crossing]) -> list[Crossing]:
    """Put nets in order from the top down, by exchanging neighbours."""
    if len(runs) < 2:
        return runs
    costs: dict[tuple[Crossing, Crossing], int] = {}

    def gain(upper: Crossing, lower: Crossing) -> int:
        """Return how much better it is the other way round."""
        key = (upper, lower)
        if key not in costs:
            costs[key] = (
                _crossing_cost(upper, lower) - _crossing_cost(lower, upper)
                if _spans_meet(upper, lower)
                else 0
            )
        return costs[key]

    for _ in range(_ROUNDS):
        changed = False
        for place in range(1, len(runs)):
            # Carry it up past all that it gains from, or is indifferent to.
            total, best, target = 0, 0, place
            for above in range(place - 1, -1, -1):
                total += gain(runs[above], runs[place])
                if total > best:
                    best, target = total, above
            if target != place:
                runs.insert(target, runs.pop(place))
                changed = True
        if not changed:
            break
    return runs


def _crossing_cost(upper: Crossing, lower: Crossing) -> int:
    """Count crossings, and places where lines would lie upon each other, which are worse."""
    cost = sum(upper.start < x < upper.stop for x in lower.tops)
    for x in upper.bottoms:
        cost += lower.start < x < lower.stop
        cost += 100 * any(abs(x - top) < _CLOSE for top in lower.tops)
    if lower.joins:
        cost += 100 * any(x in upper.tops and x not in upper.bottoms for x in lower.tops)
    return cost


_TRACK = 8.0  # between lines that run across
_CLEAR = 8.0  # from a rank to the lines below it
_ARROW = 12.0  # from the lines above a rank to it
_BORDER = 8.0  # from the last rank to the border of the box

Point = tuple[float, float]


@dataclass(eq=False)
class Wire:
    """A part of a net, as a line through some points, each directly above or beside the next."""

    net: Net
    points: list[tuple[float, float]]  # from its start to its end
    # The shape at which it ends; None if it ends at a border or where others continue.
    target: Tile | None = None
    is_back: bool = False  # whether it runs back up
    joins: bool = False  # whether it ends at the line of another net


class _RankHeights:
    """The heights of the ranks of a level, and the lines between them.

    Attributes:
        height: the height of the level, including the title.
    """

    def __init__(self, level: Level, title: float) -> None:
        self._level = level
        self._runs: list[dict[tuple[LocalNet, bool], Crossing]] = [
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

    def _run(self, gap: int, net: LocalNet, back: bool) -> Crossing:
        return self._runs[gap].setdefault((net, back), Crossing())

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
        """Draw the lines. Vertices may have been moved sideways together since."""
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


_PAD = 12.0  # from the border of a box to what is in it
_GAP = 18.0  # between shapes of a rank
_LINE = 11.0  # from a line that runs past to what is beside it
_TITLE_GAP = 7.0  # from a title to what is beside it
_PORT_GAP = 16.0  # between ports of a border


@dataclass(eq=False)
class _Placed:
    """A box that is laid out, from its own upper left corner on."""

    level: Level
    ports_in: dict[Net, float]
    ports_out: dict[Net, float]
    wires: list[Wire]


def place(root: Tile, nets: Sequence[Net]) -> list[Wire]:
    """Lay out a drawing."""
    locals_ = _by_level(root, nets)
    hints: dict[Tile, dict[Net, float]] = {}
    done: dict[Tile, _Placed] = {}
    _place_box(root, locals_, hints, done)
    if _look_up(root, done, hints):
        _place_box(root, locals_, hints, done)
    wires: list[Wire] = []
    _put_box(root, done, 0.0, 0.0, wires)
    return wires


def _by_level(root: Tile, nets: Sequence[Net]) -> dict[Tile, list[LocalNet]]:
    """Cut the nets at the borders that they cross."""
    paths: dict[Tile, tuple[Tile, ...]] = {}

    def walk(shape: Tile, above: tuple[Tile, ...]) -> None:
        paths[shape] = path = (*above, shape)
        for child in shape.children or ():
            walk(child, path)

    walk(root, ())
    parts: dict[Tile, dict[tuple[Net, Tile | None], LocalNet]] = {s: {} for s in paths}

    def part(box: Tile, net: Net, source: Tile | None) -> LocalNet:
        return parts[box].setdefault((net, source), LocalNet(net, source))

    for net in nets:
        start = paths[net.source]
        if net.joins is not None and net.frame is not None:
            level = start.index(net.frame)
            for depth in range(len(start) - 2, level, -1):
                part(start[depth], net, start[depth + 1]).leaves = True
            joined = part(net.frame, net.joins, None)
            part(net.frame, net, start[level + 1]).joins = joined
            continue
        for target in net.targets:
            end = paths[target]
            common = 0
            while common < min(len(start), len(end)) - 1 and start[common] is end[common]:
                common += 1
            for depth in range(len(start) - 2, common - 1, -1):
                part(start[depth], net, start[depth + 1]).leaves = True
            part(start[common - 1], net, start[common]).targets[end[common]] = None
            for depth in range(common, len(end) - 1):
                part(end[depth], net, None).targets[end[depth + 1]] = None
    return {shape: list(found.values()) for shape, found in parts.items()}


def _place_box(
    box: Tile,
    nets: dict[Tile, list[LocalNet]],
    hints: dict[Tile, dict[Net, float]],
    done: dict[Tile, _Placed],
) -> None:
    for child in box.children or ():
        if child.children is not None:
            _place_box(child, nets, hints, done)
    level = Level(box.children or [], nets[box])
    assign_ranks(level)
    level.fill()
    _measure(level, done)
    hint = hints.get(box, {})

    def desired_position(vertex: Vertex) -> float | None:
        return hint.get(vertex.net.net) if vertex.role == "in" and vertex.net else None

    order(level, desired_position)
    _fan_out(level)
    place_vertices(level, _gap)
    done[box] = _draw_lines(box, level)


def _measure(level: Level, done: dict[Tile, _Placed]) -> None:
    for shape, vertex in level.vertex.items():
        vertex.left = vertex.right = shape.width / 2
        vertex.height = shape.height + shape.below
        if shape.children is None:
            vertex.right = max(vertex.right, 6 + shape.label)
            continue
        vertex.height = shape.height
        placed = done[shape]
        for link in vertex.ups:
            link.lower_at = placed.ports_in[link.net.net] - shape.width / 2
        for link in vertex.downs:
            link.upper_at = placed.ports_out[link.net.net] - shape.width / 2
    for net in level.nets:
        if net.source is not None and net.source.children is not None:
            level.out_at[net] = done[net.source].ports_out[net.net] - net.source.width / 2
        for target in level.back.get(net, ()):
            if target.shape is not None and target.shape.children is not None:
                at = done[target.shape].ports_in[net.net] - target.shape.width / 2
                level.back_at[net, target] = at


def _fan_out(level: Level) -> None:
    """Place the ends of links on the lower sides of shapes that give several values."""
    ports: dict[Vertex, dict[str, float]] = {}
    for net in level.nets:
        source = level.source(net)
        if source.shape is not None and source.shape.children is None:
            first = min((d.lower.order for d in source.downs if d.net is net), default=10**6)
            found = ports.setdefault(source, {})
            found[net.net.port] = min(first, found.get(net.net.port, first))
    at: dict[tuple[Vertex, str], float] = {}
    for vertex, found in ports.items():
        step = (vertex.left + min(vertex.right, vertex.left)) / len(found)
        for i, port in enumerate(sorted(found, key=lambda port: found[port])):
            at[vertex, port] = float(round((i - (len(found) - 1) / 2) * step))
    for net in level.nets:
        source = level.source(net)
        level.out_at[net] = at.get((source, net.net.port), level.out_at.get(net, 0.0))
        for link in source.downs:
            if link.net is net:
                link.upper_at = level.out_at[net]


def _gap(left: Vertex, right: Vertex) -> float:
    if left.role == right.role == "shape":
        return _GAP
    if left.role in ("in", "out"):
        return _PORT_GAP
    return _LINE


def _draw_lines(box: Tile, level: Level) -> _Placed:
    """Give everything its y, and draw the lines."""
    plan = _RankHeights(level, box.head)
    left = min((v.x - v.left for v in level.vertices()), default=0.0) - _PAD
    right = max((v.x + v.right for v in level.vertices()), default=0.0) + _PAD
    for vertex in level.vertices():
        vertex.x -= left
    wires = plan.wires()
    ports_in = {net.net: port.x for net, port in level.ports_in.items()}
    ports_out = {net.net: port.x for net, port in level.ports_out.items()}
    box.title_x, width = _title(box.title, right - left, sorted(ports_in.values()))
    for shape, vertex in level.vertex.items():
        shape.x, shape.y = vertex.x - shape.width / 2, vertex.y
    # Even, so that its middle is a whole number like all else.
    box.width, box.height = 2.0 * ceil(width / 2), plan.height
    return _Placed(level, ports_in, ports_out, wires)


def _title(wide: float, width: float, ports: Sequence[float]) -> tuple[float, float]:
    """Return where a title starts such that no line runs through it, and how wide its box is."""
    starts = [_TITLE_GAP, *(port + _TITLE_GAP for port in ports)]
    stops = [*(port - _TITLE_GAP for port in ports), width - _TITLE_GAP]
    for start, stop in zip(starts, stops, strict=True):
        if stop - start >= wide:
            return start, width
    return starts[-1], max(width, starts[-1] + wide + _TITLE_GAP)


def _look_up(box: Tile, done: dict[Tile, _Placed], hints: dict[Tile, dict[Net, float]]) -> bool:
    """Say for each box from how far its nets come; return whether they enter in another order."""
    crossed = False
    for shape, vertex in done[box].level.vertex.items():
        if shape.children is None:
            continue
        mine = hints.get(box, {})
        is_here = all(link.upper.role == "in" and link.net.net in mine for link in vertex.ups)
        hints[shape] = from_ = {
            link.net.net: mine[link.net.net] if is_here else link.upper.x + link.upper_at
            for link in vertex.ups
        }
        ports = done[shape].ports_in
        entering = sorted(from_, key=lambda net: ports[net])
        crossed |= entering != sorted(entering, key=lambda net: from_[net])
        crossed |= _look_up(shape, done, hints)
    return crossed


def _put_box(box: Tile, done: dict[Tile, _Placed], x: float, y: float, wires: list[Wire]) -> None:
    """Move a box, and all in it, to its place."""
    box.x, box.y = x, y
    for wire in done[box].wires:
        wire.points = [(px + x, py + y) for px, py in wire.points]
        wires.append(wire)
    for child in box.children or ():
        if child.children is not None:
            _put_box(child, done, x + child.x, y + child.y, wires)
        else:
            child.x, child.y = x + child.x, y + child.y


# Horizontal positions: straight lines first, everything else as close as possible.

_SWEEPS = 48
_PORT = 13.0  # between lines that end at the same shape
_EDGE = 9.0  # from the corner of a shape to the nearest line


@dataclass(eq=False, slots=True)
class _Column:
    """Vertices of neighbouring ranks that keep their positions relative to each other."""

    # Each with the distance of its middle from the middle of the column.
    vertices: dict[Vertex, float] = field(default_factory=dict)
    x: float = 0.0  # the middle of its first vertex
    # (strength, other column, offset from that column's x).
    pulls: list[tuple[float, _Column, float]] = field(default_factory=list)
    # Columns to its right, with the minimum distance to each.
    rights: dict[_Column, float] = field(default_factory=dict)
    lefts: dict[_Column, float] = field(default_factory=dict)  # the same to its left

    @property
    def least(self) -> float:
        """The smallest x that its neighbours to the left leave to it."""
        return max((left.x + distance for left, distance in self.lefts.items()), default=0.0)

    @property
    def is_line(self) -> bool:
        """True if it consists only of a line that runs past."""
        return all(vertex.role == "bend" for vertex in self.vertices)

    @property
    def is_lane(self) -> bool:
        """True if it is a line that runs back up; these are outside everything else."""
        return next(iter(self.vertices)).role == "lane"


def place_vertices(level: Level, gap: Callable[[Vertex, Vertex], float]) -> None:
    """Set the x of each vertex, and the ends of each link."""
    _straighten(level)
    _spread_ends(level)
    columns = _columns_in_order(_columns_of_level(level, gap))
    for column in columns:
        column.x = column.least
    inner = [column for column in columns if not column.is_lane]
    _settle(inner)
    _gather(inner)
    for column in columns:
        if column.is_lane:
            column.x = column.least
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
    for row in level.ranks if up else reversed(level.ranks):
        for vertex in row:
            links = vertex.ups if up else vertex.downs
            ends = [link.upper if up else link.lower for link in links]
            own = 1.0 if vertex.role == "shape" else 0.0
            heights[vertex] = own + max((heights[end] for end in ends), default=0.0)
    return heights


def _spread_ends(level: Level) -> None:
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


def _columns_of_level(level: Level, gap: Callable[[Vertex, Vertex], float]) -> list[_Column]:
    of: dict[Vertex, _Column] = {}
    columns: list[_Column] = []
    for row in level.ranks:
        for vertex in row:
            straight = next((link for link in vertex.ups if link.is_straight), None)
            if straight is not None:
                column = of[straight.upper]
                offset = column.vertices[straight.upper] + straight.upper_at - straight.lower_at
            else:
                column, offset = _Column(), 0.0
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


def _tie(of: dict[Vertex, _Column], link: Link) -> None:
    upper, lower = of[link.upper], of[link.lower]
    start = upper.vertices[link.upper] + link.upper_at
    end = lower.vertices[link.lower] + link.lower_at
    roles = {link.upper.role, link.lower.role}
    weight = 1.0 if roles == {"shape"} else 0.6
    upper.pulls.append((weight, lower, end - start))
    lower.pulls.append((weight, upper, start - end))


def _columns_in_order(columns: Sequence[_Column]) -> list[_Column]:
    """Return the columns such that each comes after those to its left."""
    missing = {column: len(column.lefts) for column in columns}
    ready = [column for column in columns if not column.lefts]
    for column in ready:
        for right in column.rights:
            missing[right] -= 1
            if not missing[right]:
                ready.append(right)
    return ready


def _settle(columns: Sequence[_Column]) -> None:
    """Move columns towards their targets, as far as their neighbours let them."""
    inside = set(columns)
    lefts = {c: [(o, d) for o, d in c.lefts.items() if o in inside] for c in columns}
    rights = {c: [(o, d) for o, d in c.rights.items() if o in inside] for c in columns}
    for _ in range(_SWEEPS):
        wanted = {c: 0.5 * (c.x + _pull(c)) for c in columns}
        pushed: dict[_Column, float] = {}
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
            wanted_x = _pull(c)
            if c.is_line:
                # One corner less: straight above where it goes, or below where it comes from.
                ends = (other.x + delta for _, other, delta in c.pulls)
                fitting = [x for x in ends if least <= x <= most]
                away = {x: abs(x - c.x) for x in fitting}
                wanted_x = min(away, key=away.__getitem__, default=wanted_x)
            c.x = min(max(wanted_x, least), most)


def _gather(columns: Sequence[_Column]) -> None:
    """Move shapes without edges to the rest next to it."""
    group: dict[_Column, int] = {}
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


def _pull(column: _Column) -> float:
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


# One level of a nested drawing: the content of one box, its ranks, and their order.


@dataclass(eq=False)
class Tile:
    """A shape to place: a node, or a box that contains shapes."""

    key: str  # its name
    width: float = 0.0  # its width; computed for a box
    height: float = 0.0  # its height; computed for a box
    below: float = 0.0  # free space below it, for the text at its outgoing line
    label: float = 0.0  # the width of that text, which is to the right of the line
    children: list[Tile] | None = None  # its content, in the order of the run; None for a node
    title: float = 0.0  # the width of a box's title
    head: float = 0.0  # the height of a box's title
    x: float = 0.0  # its left edge
    y: float = 0.0  # its upper edge
    title_x: float = 0.0  # the start of a box's title, from its left edge


@dataclass(eq=False)
class Net:
    """One value, and its targets: lines that share their way as far as possible."""

    source: Tile  # the shape at which it starts
    targets: list[Tile]  # the shapes at which it ends
    # Which of the source's values it carries: nets with the same port start together.
    port: str = ""
    kind: str = "data"  # its kind, which the layout ignores
    # A net from outside `frame`: this net runs back up to it instead of to its own targets, since
    # both have the same targets.
    joins: Net | None = None
    frame: Tile | None = None  # the box in which this happens


@dataclass(eq=False)
class LocalNet:
    """The part of a net on one level."""

    net: Net  # the whole net
    source: Tile | None  # the child at which it starts; None if it enters through the border
    targets: dict[Tile, None] = field(default_factory=dict)  # the children at which it ends
    leaves: bool = False  # whether it leaves through the border
    joins: LocalNet | None = None  # the net entering here to which it runs back up


Role = Literal["shape", "in", "out", "bend", "lane"]


@dataclass(eq=False, slots=True)
class Vertex:
    """An item with a position in a rank: a shape, a port of the border, or a line running past."""

    role: Role  # its kind; a "lane" is a line that runs back up
    shape: Tile | None
    net: LocalNet | None  # the net of the port or the line
    index: int  # position among the shapes
    rank: int = 0  # its rank, from 0 at the top
    order: int = 0  # its position in the rank
    left: float = 0.0  # its extent to the left of its middle
    right: float = 0.0  # the same to the right
    x: float = 0.0  # its middle
    height: float = 0.0  # its height, including the space below
    y: float = 0.0  # its upper edge
    ups: list[Link] = field(default_factory=list)  # links that come from above
    downs: list[Link] = field(default_factory=list)  # links that go down


@dataclass(eq=False, slots=True)
class Link:
    """A part of a net between neighbouring ranks."""

    upper: Vertex  # its upper vertex
    lower: Vertex  # its lower vertex
    net: LocalNet
    upper_at: float = 0.0  # its start on `upper`, from the middle
    lower_at: float = 0.0  # its end on `lower`, from the middle
    is_straight: bool = False  # whether both ends have the same x

    @property
    def is_inner(self) -> bool:
        """True if it connects two parts of a line."""
        return self.upper.role == self.lower.role == "bend"


class Level:
    """The content of one box."""

    def __init__(self, children: list[Tile], nets: list[LocalNet]) -> None:
        self.nets = nets  # the nets of this level
        # The vertex of each shape.
        self.vertex: dict[Tile, Vertex] = {
            shape: Vertex("shape", shape, None, i) for i, shape in enumerate(children)
        }
        # The port through which a net enters.
        self.ports_in: dict[LocalNet, Vertex] = {
            n: Vertex("in", None, n, -1) for n in nets if n.source is None
        }
        # The port through which a net leaves.
        self.ports_out: dict[LocalNet, Vertex] = {
            n: Vertex("out", None, n, len(children)) for n in nets if n.leaves
        }
        self.ranks: list[list[Vertex]] = []  # the vertices of each rank, from left to right
        # For each net that runs back, its vertices from the top down.
        self.lanes: dict[LocalNet, list[Vertex]] = {}
        # For each net that runs back, the vertices it leads to.
        self.back: dict[LocalNet, list[Vertex]] = {}
        # The start of each net on its source, from the middle.
        self.out_at: dict[LocalNet, float] = {}
        # The end of a net that runs back on a vertex, from the middle.
        self.back_at: dict[tuple[LocalNet, Vertex], float] = {}
        # For each net, the vertices further down that it leads to.
        self.forward: dict[LocalNet, list[Vertex]] = {}
        for net in nets:
            self._sort_targets(net)

    def source(self, net: LocalNet) -> Vertex:
        """Return the source of a net."""
        return self.ports_in[net] if net.source is None else self.vertex[net.source]

    def vertices(self) -> Iterator[Vertex]:
        """Yield all vertices that have a rank."""
        for rank in self.ranks:
            yield from rank

    def _sort_targets(self, net: LocalNet) -> None:
        source = self.source(net)
        targets = [self.vertex[shape] for shape in net.targets]
        self.forward[net] = [v for v in targets if v.index > source.index]
        back = [v for v in targets if v.index <= source.index]
        if net.joins is not None:
            back.append(self.ports_in[net.joins])
        if back:
            self.back[net] = back
        if net.leaves:
            self.forward[net].append(self.ports_out[net])

    def fill(self) -> None:
        """Create the ranks, with the lines that run past, once each vertex has its rank."""
        inner = [*self.ports_in.values(), *self.vertex.values(), *self.ports_out.values()]
        depth = 1 + max((v.rank for v in inner), default=0)
        self.ranks = [[] for _ in range(depth)]
        for vertex in inner:
            self.ranks[vertex.rank].append(vertex)
        for net in self.nets:
            source = self.source(net)
            below = [v for v in self.back.get(net, ()) if v.rank > source.rank]
            if below:  # what happened earlier may stand further down: no need to run back
                self.forward[net] += below
                self.back[net] = [v for v in self.back[net] if v not in below]
                if not self.back[net]:
                    del self.back[net]
            self._run_down(net)
        for net, targets in self.back.items():
            lane = self.lanes[net] = []
            top = min(max(v.rank, 1) if v.role == "in" else v.rank for v in targets)
            for rank in range(top, self.source(net).rank + 1):
                lane.append(self._added(Vertex("lane", None, net, -1), rank))
        _number_vertices(self.ranks)

    def _run_down(self, net: LocalNet) -> None:
        """Let a net run down: one line, from which others branch off."""
        targets = self.forward[net]
        upper = self.source(net)
        last = max((v.rank for v in targets), default=0)
        for rank in range(upper.rank + 1, last + 1):
            for target in targets:
                if target.rank == rank:
                    self._link(upper, target, net)
            if rank < last:
                bend = self._added(Vertex("bend", None, net, -1), rank)
                self._link(upper, bend, net)
                upper = bend

    def _added(self, vertex: Vertex, rank: int) -> Vertex:
        vertex.rank = rank
        self.ranks[rank].append(vertex)
        return vertex

    @staticmethod
    def _link(upper: Vertex, lower: Vertex, net: LocalNet) -> None:
        link = Link(upper, lower, net)
        upper.downs.append(link)
        lower.ups.append(link)


_MOVES = 4
_ENDS = 8  # shapes without a successor beside each other


def assign_ranks(level: Level) -> None:
    """Give each vertex of a level its rank: below all its sources, and near its neighbours.

    Shapes are in the order of the run, in which values run back only along lanes: so a single walk
    in that order finds the ranks, and no search for cycles is needed.
    """
    shapes = list(level.vertex.values())
    into: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    out: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    for net in level.nets:
        targets = level.forward[net]
        for target in targets:
            if target in into:
                into[target].append(net)
        source = level.source(net)
        if targets and source in out:
            out[source].append(net)
    first = 1 if level.ports_in else 0

    def alone(vertex: Vertex) -> bool:
        """Return whether it is a box that nothing leads to or from: such boxes are stacked."""
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
    for _ in range(_MOVES):
        moved = False
        for vertex in reversed(shapes):
            if not out[vertex]:
                continue
            latest = min(t.rank for n in out[vertex] for t in level.forward[n]) - 1
            if latest <= vertex.rank:
                continue
            # How many lines would get longer: one that runs past anyway costs nothing.
            longer = sum(
                max((v.rank for v in level.forward[net] if v is not vertex), default=0) < latest
                for net in into[vertex]
            )
            shares = any(len(level.forward[net]) > 1 for net in into[vertex])
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
        ranks = -(-len(row) // _ENDS)
        for place, vertex in enumerate(row):
            vertex.rank += place % ranks


_ORDER_SWEEPS = 12
_EXCHANGES = 4
_WIDEST = 80  # in wider ranks, exchanging neighbours takes longer than it is worth


def order(level: Level, wanted: Callable[[Vertex], float | None]) -> None:
    """Order the vertices in each rank; `wanted` are the positions of ports, as far as known."""
    ranks = level.ranks
    for rank in ranks:
        anchored = [v for v in rank if wanted(v) is not None]
        if len(anchored) == len(rank) > 0:
            rank.sort(key=lambda v: wanted(v) or 0.0)
    _number_vertices(ranks)
    best, fewest = _orders(ranks), _crossings(ranks)
    for sweep in range(_ORDER_SWEEPS):
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
    _number_vertices(ranks)


def _number_vertices(ranks: Sequence[list[Vertex]]) -> None:
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
    _number_vertices([rank])


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
                now = _count_crossings(left.ups, right.ups, _upper)
                now += _count_crossings(left.downs, right.downs, _lower)
                then = _count_crossings(right.ups, left.ups, _upper)
                then += _count_crossings(right.downs, left.downs, _lower)
                if then < now:
                    rank[place], rank[place + 1] = right, left
                    left.order, right.order = place + 1, place
                    changed = True
        if not changed:
            break


def _count_crossings(left: list[Link], right: list[Link], end: Callable[[Link], float]) -> int:
    """Count the crossings of the edges to two neighbours."""
    rights = sorted(map(end, right))
    return sum(bisect_left(rights, end(link)) for link in left)
