"""A scene with places: how large everything is, and where."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from bendtrace.drawing.layout import Net, Shape, Wire, place
from bendtrace.drawing.measure import cut, width
from bendtrace.drawing.nodes import Edge, Node, Scene

__all__ = ["BIG", "LINE", "PAD_Y", "SMALL", "TIP", "Figure", "figure", "headline", "net_text",
           "title_width"]  # fmt: skip

BIG, SMALL = 11.0, 9.0  # font sizes
LINE = 12.0  # from one line of text to the next
TIP = 10.0  # how far the ends of a decision reach out
PAD_Y = 4.0
_PAD_X = 8.0
_LABEL = 11.0  # how high the text beside a line is
_TITLE = 20.0  # how high the title of a box is
_LEAST = 46.0  # how wide a node is at least: lines end at it side by side
_WIDEST = 44  # letters of a title


@dataclass
class Figure:
    """A scene with places.

    Attributes:
        scene: the scene.
        shapes: the place of each node and box.
        wires: the lines.
        edges: the edges that run along each net.
    """

    scene: Scene
    shapes: dict[Node, Shape]
    wires: list[Wire]
    edges: dict[Net, list[Edge]]


def figure(scene: Scene) -> Figure:
    """Give everything in a scene its place."""
    shapes: dict[Node, Shape] = {}
    nets = _nets(scene)
    texts: dict[Node, str] = {}
    for (source, _, _), edges in nets.items():
        text = net_text(edges)
        if len(text) > len(texts.get(source, "")):
            texts[source] = text
    ports: dict[Node, dict[str, None]] = {}
    for source, port, _ in nets:
        ports.setdefault(source, {})[port] = None

    def shape(node: Node) -> Shape:
        if node.children is not None:
            made = Shape(node.key)
            if node is not scene.root:
                made.title, made.head = title_width(node), _TITLE
            made.children = [shape(child) for child in node.children]
        else:
            wide, high = _size(node)
            text = texts.get(node, "")
            label = width(text, SMALL)
            several = len(ports.get(node, ()))
            if several > 1:
                wide = max(wide, 2.0 * ceil(several * (label + 14 if several <= 4 else 12) / 2))
            made = Shape(node.key, wide, high, _LABEL if text else 0.0, label)
        shapes[node] = made
        return made

    root = shape(scene.root)
    made: dict[Net, list[Edge]] = {}
    for (source, port, kind), edges in nets.items():
        targets = list(dict.fromkeys(shapes[edge.target] for edge in edges))
        made[Net(shapes[source], targets, port, kind)] = edges
    _join(scene, shapes, made)
    wires = place(root, list(made))
    return Figure(scene, shapes, wires, made)


def _join(scene: Scene, shapes: dict[Node, Shape], made: dict[Net, list[Edge]]) -> None:
    """Let what a repetition hands to the next run to where that value came in at first."""
    around: dict[Shape, list[Shape]] = {}  # the repeated boxes around each shape

    def walk(node: Node, frames: list[Shape]) -> None:
        around[shapes[node]] = frames
        for child in node.children or ():
            walk(child, [*frames, shapes[node]] if node.times else frames)

    walk(scene.root, [])
    for net, edges in made.items():
        if net.kind != "repeat":
            continue
        at_first = {label for edge in edges for label in edge.instead}
        frames = [f for f in around[net.source] if all(f in around[t] for t in net.targets)]
        for other, its in made.items():
            if other.kind == "repeat" or not frames or frames[-1] in around[other.source]:
                continue
            carried = {label for edge in its for label in edge.labels}
            if at_first <= carried and at_first and set(net.targets) <= set(other.targets):
                net.joins, net.frame = other, frames[-1]
                break


def _nets(scene: Scene) -> dict[tuple[Node, str, str], list[Edge]]:
    """Put edges together that carry the same value of the same node."""
    nets: dict[tuple[Node, str, str], list[Edge]] = {}
    for edge in scene.edges:
        nets.setdefault((edge.source, edge.port, edge.kind), []).append(edge)
    return nets


def net_text(edges: list[Edge]) -> str:
    """Return what is written beside the edges of a net."""
    texts = {edge.text for edge in edges}
    return cut(texts.pop(), 28) if len(texts) == 1 else ""


def _size(node: Node) -> tuple[float, float]:
    is_code = node.kind == "decision"
    title = headline(node)
    wide = width(title, SMALL + 1 if is_code else BIG, mono=is_code, bold=not is_code)
    wide = max([wide, *(width(line, SMALL) for line in node.lines)])
    high = 2 * PAD_Y + LINE * (1 + len(node.lines))
    wide += 2 * _PAD_X + (2 * TIP if is_code else 0)
    return max(_LEAST, 2.0 * ceil(wide / 2)), high


def headline(node: Node) -> str:
    """Return the first line of a node, or the title of a box."""
    text = f"{node.title} \N{MULTIPLICATION SIGN}{node.times}" if node.times else node.title
    return cut(text, _WIDEST)


def title_width(node: Node) -> float:
    """Return how wide the title of an open box is."""
    wide = width(headline(node), BIG, bold=True)
    return wide + (8 + width(node.lines[0], SMALL) if node.lines else 0)
