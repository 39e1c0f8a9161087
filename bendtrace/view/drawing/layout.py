"""Layout of nested drawings: nested boxes, in ranks from the top down.

Each box is laid out on its own and is then one shape in the enclosing box; lines cross its border
at ports. So by construction nothing overlaps, and no line runs through a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from bendtrace.view.drawing.aligning import align
from bendtrace.view.drawing.level import Level, Link, LocalNet, Net, Shape, Vertex, order, rank

__all__ = ["Crossing", "Net", "Plan", "Shape", "Wire", "heights", "place"]


_CLOSE = 6.0  # lines nearer to each other than this are taken for one
_ROUNDS = 40


@dataclass(eq=False)
class Crossing:
    """A net between two ranks.

    Attributes:
        tops: its points on the upper rank.
        bottoms: its points on the lower rank.
        joins: whether it ends at the line of another net, which has to exist already.
        track: the height at which it runs across, from 0 at the top; -1 if it does not.
    """

    tops: list[float] = field(default_factory=list)
    bottoms: list[float] = field(default_factory=list)
    joins: bool = False
    track: int = -1

    @property
    def start(self) -> float:
        """Its leftmost point."""
        return min(*self.tops, *self.bottoms, float("inf"))

    @property
    def stop(self) -> float:
        """Its rightmost point."""
        return max(*self.tops, *self.bottoms, float("-inf"))


def heights(runs: Sequence[Crossing]) -> int:
    """Choose the track of each net, so that few lines cross and no lines overlap.

    Returns:
        The number of tracks.
    """
    across = [run for run in runs if run.stop > run.start]
    ordered = _ordered(sorted(across, key=lambda run: (run.start, run.stop)))
    count = 0
    for place, run in enumerate(ordered):
        above = (r for r in ordered[:place] if _meet(r, run))
        run.track = 1 + max((r.track for r in above), default=-1)
        count = max(count, run.track + 1)
    return count


def _meet(one: Crossing, other: Crossing) -> bool:
    return one.start < other.stop + _CLOSE and other.start < one.stop + _CLOSE


def _ordered(runs: list[Crossing]) -> list[Crossing]:
    """Put nets in order from the top down, by exchanging neighbours."""
    if len(runs) < 2:
        return runs
    costs: dict[tuple[Crossing, Crossing], int] = {}

    def gain(upper: Crossing, lower: Crossing) -> int:
        """Return how much better it is the other way round."""
        key = (upper, lower)
        if key not in costs:
            costs[key] = _cost(upper, lower) - _cost(lower, upper) if _meet(upper, lower) else 0
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


def _cost(upper: Crossing, lower: Crossing) -> int:
    """Count crossings, and places where lines would lie upon each other, which are worse."""
    cost = 0
    for x in lower.tops:
        cost += upper.start < x < upper.stop
    for x in upper.bottoms:
        cost += lower.start < x < lower.stop
    for x in upper.bottoms:
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
    """A part of a net, as a line through some points, each directly above or beside the next.

    Attributes:
        net: the net.
        points: from its start to its end.
        target: the shape at which it ends; None if it ends at a border or where others continue.
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
_EDGE = 7.0  # from a title to what is beside it
_PORT = 16.0  # between ports of a border


@dataclass(eq=False)
class _Placed:
    """A box that is laid out, from its own upper left corner on."""

    level: Level
    ports_in: dict[Net, float]
    ports_out: dict[Net, float]
    wires: list[Wire]


def place(root: Shape, nets: Sequence[Net]) -> list[Wire]:
    """Lay out a drawing.

    Args:
        root: the outermost box. All shapes in it get their positions and sizes.
        nets: the nets between its plain shapes.

    Returns:
        The lines to draw.
    """
    locals_ = _by_level(root, nets)
    hints: dict[Shape, dict[Net, float]] = {}
    done: dict[Shape, _Placed] = {}
    _place(root, locals_, hints, done)
    if _look_up(root, done, hints):
        _place(root, locals_, hints, done)
    wires: list[Wire] = []
    _put(root, done, 0.0, 0.0, wires)
    return wires


def _by_level(root: Shape, nets: Sequence[Net]) -> dict[Shape, list[LocalNet]]:
    """Cut the nets at the borders that they cross."""
    paths: dict[Shape, tuple[Shape, ...]] = {}

    def walk(shape: Shape, above: tuple[Shape, ...]) -> None:
        paths[shape] = path = (*above, shape)
        for child in shape.children or ():
            walk(child, path)

    walk(root, ())
    parts: dict[Shape, dict[tuple[Net, Shape | None], LocalNet]] = {s: {} for s in paths}

    def part(box: Shape, net: Net, source: Shape | None) -> LocalNet:
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


def _place(
    box: Shape,
    nets: dict[Shape, list[LocalNet]],
    hints: dict[Shape, dict[Net, float]],
    done: dict[Shape, _Placed],
) -> None:
    for child in box.children or ():
        if child.children is not None:
            _place(child, nets, hints, done)
    level = Level(box.children or [], nets[box])
    rank(level)
    level.fill()
    _measure(level, done)
    hint = hints.get(box, {})

    def wanted(vertex: Vertex) -> float | None:
        return hint.get(vertex.net.net) if vertex.role == "in" and vertex.net else None

    order(level, wanted)
    _fan_out(level)
    align(level, _gap)
    done[box] = _finish(box, level)


def _measure(level: Level, done: dict[Shape, _Placed]) -> None:
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
        return _PORT
    return _LINE


def _finish(box: Shape, level: Level) -> _Placed:
    """Give everything its y, and draw the lines."""
    plan = Plan(level, box.head)
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
    starts = [_EDGE, *(port + _EDGE for port in ports)]
    stops = [*(port - _EDGE for port in ports), width - _EDGE]
    for start, stop in zip(starts, stops, strict=True):
        if stop - start >= wide:
            return start, width
    return starts[-1], max(width, starts[-1] + wide + _EDGE)


def _look_up(box: Shape, done: dict[Shape, _Placed], hints: dict[Shape, dict[Net, float]]) -> bool:
    """Say for each box from how far left or right its nets come.

    Returns:
        Whether that is not the order in which they enter.
    """
    crossed = False
    for shape, vertex in done[box].level.vertex.items():
        if shape.children is None:
            continue
        mine = hints.get(box, {})
        known = all(link.upper.role == "in" and link.net.net in mine for link in vertex.ups)
        hints[shape] = from_ = {
            link.net.net: mine[link.net.net] if known else link.upper.x + link.upper_at
            for link in vertex.ups
        }
        ports = done[shape].ports_in
        entering = sorted(from_, key=lambda net: ports[net])
        crossed |= entering != sorted(entering, key=lambda net: from_[net])
        crossed |= _look_up(shape, done, hints)
    return crossed


def _put(box: Shape, done: dict[Shape, _Placed], x: float, y: float, wires: list[Wire]) -> None:
    """Move a box, and all in it, to its place."""
    box.x, box.y = x, y
    for wire in done[box].wires:
        wire.points = [(px + x, py + y) for px, py in wire.points]
        wires.append(wire)
    for child in box.children or ():
        if child.children is not None:
            _put(child, done, x + child.x, y + child.y, wires)
        else:
            child.x, child.y = x + child.x, y + child.y
