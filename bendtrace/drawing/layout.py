"""Layout of nested drawings: boxes in boxes, in ranks from the top down.

Each box is laid out on its own and then is one shape in the box around it; lines cross its border
at ports. So nothing overlaps, and no line runs through a shape, by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bendtrace.drawing.aligning import align
from bendtrace.drawing.level import Level, LocalNet, Net, Shape, Vertex
from bendtrace.drawing.ordering import order
from bendtrace.drawing.ranking import rank
from bendtrace.drawing.routing import Plan, Wire

__all__ = ["Net", "Shape", "Wire", "place"]

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
        root: the outermost box. It and all in it get their places and sizes.
        nets: what connects the plain shapes in it.

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
    """Lay out a box, after the boxes in it."""
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
