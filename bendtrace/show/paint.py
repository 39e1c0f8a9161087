"""A scene as a picture: positions, shapes, colours and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bendtrace.errors import InputError
from bendtrace.log.entries import LayerEntry
from bendtrace.python.checks import did_you_mean
from bendtrace.python.lazy import required
from bendtrace.show.canvas import (
    Canvas,
    Caption,
    Mark,
    Marks,
    Polygon,
    Rectangle,
    Stroke,
    cut,
    width,
)
from bendtrace.show.layout import Net, Tile, Wire, place
from bendtrace.show.scene import Arrow, Scene, SceneNode

if TYPE_CHECKING:
    from matplotlib.figure import Figure as PlotFigure

    from bendtrace.log.run_log import RunLog


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
    """A scene with positions."""

    scene: Scene
    shapes: dict[SceneNode, Tile]  # the position of each node and box
    wires: list[Wire]  # the lines
    edges: dict[Net, list[Arrow]]  # the edges that run along each net


def figure(scene: Scene) -> Figure:
    """Compute the position of each item of a scene."""
    shapes: dict[SceneNode, Tile] = {}
    # The edges that carry the same value of the same node, from which they start together.
    nets: dict[tuple[SceneNode, str, str], list[Arrow]] = {}
    for edge in scene.edges:
        nets.setdefault((edge.source, edge.port, edge.kind), []).append(edge)
    texts: dict[SceneNode, str] = {}
    ports: dict[SceneNode, set[str]] = {}
    for (source, port, _), edges in nets.items():
        texts[source] = max(texts.get(source, ""), net_text(edges), key=len)
        ports.setdefault(source, set()).add(port)

    def shape(node: SceneNode) -> Tile:
        if node.children is not None:
            made = Tile(node.key)
            if node is not scene.root:
                made.title, made.head = title_width(node), _TITLE
            made.children = [shape(child) for child in node.children]
        else:
            wide, high = _size_of_node(node)
            text = texts.get(node, "")
            label = width(text, SMALL)
            several = len(ports.get(node, ()))
            is_wide = several <= 4 or node.kind == "decision"  # each line has room for its text
            if several > 1:
                wide = max(wide, 2.0 * ceil(several * (label + 14 if is_wide else 12) / 2))
            if several > 1 and node.kind == "decision":  # the rightmost text reaches out
                label += (several - 1) / 2 * wide / several
            made = Tile(node.key, wide, high, _LABEL if text else 0.0, label)
        shapes[node] = made
        return made

    root = shape(scene.root)
    made: dict[Net, list[Arrow]] = {}
    for (source, port, kind), edges in nets.items():
        targets = list(dict.fromkeys(shapes[edge.target] for edge in edges))
        made[Net(shapes[source], targets, port, kind)] = edges
    _join_repetition(scene, shapes, made)
    wires = place(root, list(made))
    return Figure(scene, shapes, wires, made)


def _join_repetition(
    scene: Scene, shapes: dict[SceneNode, Tile], made: dict[Net, list[Arrow]]
) -> None:
    """Lead a value that a repetition hands on to the place where it came in at first."""
    around: dict[Tile, list[Tile]] = {}  # the repeated boxes around each shape

    def walk(node: SceneNode, frames: list[Tile]) -> None:
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


def net_text(edges: list[Arrow]) -> str:
    """Return the text beside the edges of a net."""
    texts = {edge.text for edge in edges}
    return cut(texts.pop(), 28) if len(texts) == 1 else ""


def _size_of_node(node: SceneNode) -> tuple[float, float]:
    is_code = node.kind == "decision"
    title = headline(node)
    wide = width(title, SMALL + 1 if is_code else BIG, mono=is_code, bold=not is_code)
    wide = max([wide, *(width(line, SMALL) for line in node.lines)])
    high = 2 * PAD_Y + LINE * (1 + len(node.lines))
    wide += 2 * _PAD_X + (2 * TIP if is_code else 0)
    return max(_LEAST, 2.0 * ceil(wide / 2)), high


def headline(node: SceneNode) -> str:
    """Return the first line of a node, or the title of a box."""
    text = f"{node.title} \N{MULTIPLICATION SIGN}{node.times}" if node.times else node.title
    return cut(text, _WIDEST)


def title_width(node: SceneNode) -> float:
    """Return the width of an open box's title."""
    wide = width(headline(node), BIG, bold=True)
    return wide + (8 + width(node.lines[0], SMALL) if node.lines else 0)


_MARGIN = 16.0
_STACK = 3.0  # how far repeated boxes stand behind each other
_STEPS, _STEP = 16, 6.0  # of the legend

INK, FAINT, WIRE, BACK = "#1f2328", "#57606a", "#6e7781", "#0969da"
# Also those of the viewer.
FILLS = {
    "input": "#ddf4ff", "output": "#dafbe1", "op": "#ffffff", "state": "#fff1d6",
    "number": "#f3effc", "decision": "#fff8c5", "module": "#e6ebf1", "repeat": "#e6ebf1",
    "part": "#e6ebf1", "live": "#fff1e5", "raise": "#ffebe9",
}  # fmt: skip
STROKES = {
    "input": "#54a3d8", "output": "#4aa564", "op": "#8c959f", "state": "#bf8700",
    "number": "#8250df", "decision": "#9a6700", "module": "#57606a", "repeat": "#57606a",
    "part": "#57606a", "live": "#bc4c00", "raise": "#cf222e",
}  # fmt: skip
_ROUND = ("input", "output", "live", "raise")
_BOXES = ("#f6f8fa", "#eff2f6")  # of open boxes, by turns from the outside in


def paint(drawn: Figure, scale: Legend | None = None) -> Canvas:
    """Paint a scene that has positions."""
    scene = drawn.scene
    root = drawn.shapes[scene.root]
    head = _paint_legend(scene, scale)
    top = 14 + max(mark.y + (mark.height if isinstance(mark, Rectangle) else 4) for mark in head)
    wide = max([root.width, *(mark.x + mark.width - _MARGIN for mark in head)])
    canvas = Canvas(wide + 2 * _MARGIN, top + root.height + _MARGIN)
    canvas.title, canvas.description = scene.title, scene.description
    canvas.marks += head
    depth = {scene.root: 0}
    for node in scene.root.walk():
        for child in node.children or ():
            depth[child] = depth[node] + 1
    inner: list[Mark] = [
        _box(node, drawn.shapes[node], depth[node], scale) for node in scene.boxes()
    ]
    inner += [
        Stroke(tuple(wire.points), _wire_color(wire), 1.2, _DASHES.get(wire.net.kind, ()))
        for wire in drawn.wires
    ]
    ends = [wire for wire in drawn.wires if wire.target and wire.target.children is None]
    inner += map(_arrow, [*ends, *(wire for wire in drawn.wires if wire.joins)])
    inner += [_paint_node(node, drawn.shapes[node], scale) for node in scene.nodes()]
    inner += _edge_labels(drawn)
    left = _MARGIN + (wide - root.width) / 2
    canvas.marks += [_move_mark(mark, left, top) for mark in inner]
    return canvas


def _paint_legend(scene: Scene, scale: Legend | None) -> list[Rectangle | Caption]:
    """Write a legend: the content of the picture, omissions, and the meaning of colours."""
    y = _MARGIN + 10
    marks: list[Rectangle | Caption] = [
        Caption(_MARGIN, y, cut(scene.title, 80), 13, INK, bold=True)
    ]
    for line in scene.note.splitlines():
        y += 14
        marks.append(Caption(_MARGIN, y, line, SMALL, FAINT))
    if scale is not None:
        y += 10
        x = _MARGIN
        for text, after in ((f"{scale.title}:", 8), (scale.text(scale.least), 6)):
            mark = Caption(x, y + 9, text, SMALL, FAINT)
            marks.append(mark)
            x += mark.width + after
        for step in range(_STEPS):
            marks.append(Rectangle(x, y, _STEP, 11, color((step + 0.5) / _STEPS)))
            x += _STEP
        marks.append(Caption(x + 6, y + 9, scale.text(scale.most), SMALL, FAINT))
    return marks


def _box(node: SceneNode, shape: Tile, depth: int, scale: Legend | None) -> Mark:
    marks: list[Mark] = []
    if node.times:
        for step in (2, 1):
            off = step * _STACK
            marks.append(Rectangle(shape.x + off, shape.y + off, shape.width, shape.height,
                                   "#ffffff", "#afb8c1", 6))  # fmt: skip
    dash = (5.0, 3.0) if node.kind == "repeat" else ()
    marks.append(Rectangle(shape.x, shape.y, shape.width, shape.height,
                           _BOXES[depth % 2], "#8c959f", 6, 1, dash))  # fmt: skip
    x, y = shape.x + shape.title_x, shape.y + 14
    name = headline(node)
    fill, text, faint, tooltip = _shade(node, "", scale)
    if fill:
        marks.append(Rectangle(x - 4, shape.y + 3, title_width(node) + 8, 15, fill, radius=3))
    marks.append(Caption(x, y, name, BIG, text, bold=True))
    if node.lines:
        x += width(name, BIG, bold=True) + 8
        marks.append(Caption(x, y, node.lines[0], SMALL, faint))
    return Marks(tuple(marks), tooltip, node.title)


def _shade(node: SceneNode, fill: str, scale: Legend | None) -> tuple[str, str, str, str]:
    """Return the fill, the colours of texts and the tooltip, with the value of an overlay."""
    if scale is None or node.value is None:
        return fill, INK, FAINT, node.tooltip
    fill = color(scale.at(node.value))
    return fill, ink(fill), ink(fill), f"{scale.title}: {scale.text(node.value)}\n{node.tooltip}"


def _paint_node(node: SceneNode, shape: Tile, scale: Legend | None) -> Mark:
    kind = "state" if node.kind == "op" and node.has_parameters else node.kind
    fill, stroke = FILLS[kind], STROKES[kind]
    if scale is not None and node.kind != "decision":
        fill, stroke = FILLS["op"], STROKES["op"]
    fill, text, faint, tooltip = _shade(node, fill, scale)
    x, y, wide, high = shape.x, shape.y, shape.width, shape.height
    marks: list[Mark] = []
    if node.kind == "decision":
        left, right, low, half = x + TIP, x + wide - TIP, y + high, y + high / 2
        points = ((x, half), (left, y), (right, y), (x + wide, half), (right, low), (left, low))
        marks.append(Polygon(points, fill, stroke))
    else:
        radius = high / 2 if node.kind in _ROUND else 8 if kind == "number" else 4
        if node.times:
            off = _STACK
            marks.append(Rectangle(x + off, y + off, wide, high, "#ffffff", stroke, radius))
        thick = 1.8 if node.is_folded else 1.0
        marks.append(Rectangle(x, y, wide, high, fill, stroke, min(radius, 14), thick))
    middle = x + wide / 2
    is_code = node.kind == "decision"
    at = y + PAD_Y + 9.5
    title = headline(node)
    size = SMALL + 1 if is_code else BIG
    marks.append(Caption(middle, at, title, size, text, not is_code, is_code, True))
    for line in node.lines:
        at += LINE
        marks.append(Caption(middle, at, line, SMALL, faint, centred=True))
    return Marks(tuple(marks), tooltip, node.labels[0] if node.entries else node.title)


def _edge_labels(drawn: Figure) -> list[Mark]:
    marks: list[Mark] = []
    done: set[tuple[float, float]] = set()
    for wire in drawn.wires:
        x, y = wire.points[0]
        shape = wire.net.source
        if y != shape.y + shape.height or (x, y) in done or not shape.below:
            continue
        done.add((x, y))
        text = net_text(drawn.edges[wire.net])
        marks.append(Caption(x + 4, y + 9, text, SMALL, FAINT))
    return marks


_DASHES = {"number": (2.0, 2.0), "control": (4.0, 3.0), "repeat": (4.0, 3.0)}


def _wire_color(wire: Wire) -> str:
    if wire.net.kind == "repeat" or wire.is_back:
        return BACK
    return STROKES["decision"] if wire.net.kind == "control" else WIRE


def _arrow(wire: Wire) -> Mark:
    x, y = wire.points[-1]
    back = 6.5 if wire.points[-2][0] > x else -6.5
    sides = ((back, -3.2), (back, 3.2)) if wire.joins else ((-3.2, -6.5), (3.2, -6.5))
    return Polygon(((x, y), *((x + dx, y + dy) for dx, dy in sides)), _wire_color(wire))


def _move_mark(mark: Mark, x: float, y: float) -> Mark:
    if isinstance(mark, Marks):
        return Marks(tuple(_move_mark(m, x, y) for m in mark.marks), mark.title, mark.name)
    if isinstance(mark, (Polygon, Stroke)):
        return replace(mark, points=tuple((px + x, py + y) for px, py in mark.points))
    return replace(mark, x=mark.x + x, y=mark.y + y)


# Overlays: a number for each node, shown as its colour.

Overlay: TypeAlias = (
    Literal["time", "memory", "flops"] | Mapping[str, float] | Callable[[LayerEntry], float | None]
)

# The cividis scale, at equal steps: dark blue to yellow, and even for eyes that tell few colours.
_CIVIDIS = ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcaf6f",
            "#dfcb5d", "#fee838")  # fmt: skip
_AROUND_ZERO = ("#2166ac", "#f7f7f7", "#b2182b")


@dataclass(frozen=True)
class Legend:
    """The meaning of the colours in a picture."""

    title: str  # the name of the quantity
    unit: str  # its unit, such as "s"; "" for plain numbers
    least: float  # the number of the first colour
    most: float  # the number of the last colour

    def text(self, value: float) -> str:
        """Return a number with its unit.

        Example:
            >>> Legend("time", "s", 0.0, 1.0).text(0.00125)
            '1.25 ms'
        """
        for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if self.unit and abs(value) >= limit:
                return f"{value / limit:.3g} {prefix}{self.unit}"
        if self.unit == "s" and 0 < abs(value) < 1e-3:
            return f"{value * 1e6:.3g} \N{MICRO SIGN}s"
        if self.unit == "s" and 0 < abs(value) < 1:
            return f"{value * 1e3:.3g} ms"
        return f"{value:.3g} {self.unit}".rstrip()

    def at(self, value: float) -> float:
        """Return the position of a number between the least and the most, from 0 to 1."""
        return (value - self.least) / (self.most - self.least) if self.most > self.least else 0.5


def lay_over(scene: Scene, overlay: Overlay, history: RunLog) -> Legend:
    """Give the nodes of a scene their numbers, by the `overlay` of `draw`.

    A node that represents several values gets the sum of their numbers for "time", "memory" and
    "flops"; otherwise the largest of their numbers, so that folding hides no peak.
    """
    if isinstance(overlay, str):
        if overlay not in _MEASURES:
            raise InputError(
                'overlay= has to be "time", "memory", "flops", a mapping or a function, not '
                f"{overlay!r}"
            )
        title, unit, name = _MEASURES[overlay]
        _paint_scene(scene, lambda one: getattr(one, name) if one.kind == "op" else None, sum)
    elif isinstance(overlay, Mapping):
        title, unit = "overlay", ""
        _fill_from(scene, overlay, history)
    elif callable(overlay):
        title, unit = getattr(overlay, "__name__", "overlay"), ""
        title = "overlay" if title == "<lambda>" else title
        _paint_scene(scene, overlay, max)
    else:
        raise InputError(
            f"overlay= has to be a name, a mapping or a function, not {type(overlay).__name__}"
        )
    values = [node.value for node in scene.root.walk() if node.value is not None]
    if not values:
        hint = ": the run was not timed, as log_forward_pass does" if overlay == "time" else ""
        raise InputError(f"no node of the picture has a number for the overlay {title!r}{hint}")
    return Legend(title, unit, min(values), max(values))


# For each named overlay its title, its unit, and the attribute of the results of ops.
_MEASURES = {
    "time": ("time", "s", "time"),
    "memory": ("memory", "B", "nbytes"),
    "flops": ("operations", "FLOP", "flops"),
}


def _paint_scene(
    scene: Scene,
    measure: Callable[[LayerEntry], float | None],
    together: Callable[[Iterable[float]], float],
) -> None:
    for node in scene.nodes():
        found = [_svg_number(measure(entry), entry.label) for entry in node.entries]
        numbers = [number for number in found if number is not None]
        node.value = together(numbers) if numbers else None


def _fill_from(scene: Scene, numbers: Mapping[str, float], history: RunLog) -> None:
    """Give nodes and boxes the numbers given for their names."""
    entries: dict[str, list[str]] = {}
    for entry in history.entries:
        for key in {entry.label, entry.name, entry.short_name, entry.node_path, entry.node} - {""}:
            entries.setdefault(key, []).append(entry.label)
    modules: dict[str, set[str]] = {}
    for call in history.modules:
        modules.setdefault(call.name, set()).add(call.label)
        modules.setdefault(call.label, set()).add(call.label)
    unknown = [key for key in numbers if key not in entries and key not in modules]
    if unknown:
        hint = did_you_mean(unknown[0], [*entries, *modules], quotes=False)
        more = f" (and {len(unknown) - 1} more keys)" if len(unknown) > 1 else ""
        raise InputError(
            f"the overlay names {unknown[0]!r}{more}, but this run has no such value, node "
            f"path or module{hint}"
        )
    for key, value in numbers.items():
        number = _svg_number(value, key)
        if number is None:
            continue
        for label in entries.get(key, ()):
            if label in scene.node_of:
                _raise(scene.node_of[label], number)
        for node in scene.root.walk():
            if not modules.get(key, set()).isdisjoint(node.modules):
                _raise(node, number)


def _raise(node: SceneNode, number: float) -> None:
    node.value = number if node.value is None else max(node.value, number)


def _svg_number(value: object, name: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever is one
    except (TypeError, ValueError):
        raise InputError(f"the overlay has {value!r} for {name!r}, which is not a number") from None
    return number if math.isfinite(number) else None


def color(part: float) -> str:
    """Return the colour at a position of the scale, from 0 to 1.

    Example:
        >>> color(0.0), color(1.0)
        ('#00224e', '#fee838')
    """
    return _mix(_CIVIDIS, part)


def color_around_zero(part: float) -> str:
    """Return the colour of a number with a sign, from -1 (blue) over 0 (white) to 1 (red).

    Example:
        >>> color_around_zero(-1.0), color_around_zero(0.0), color_around_zero(1.0)
        ('#2166ac', '#f7f7f7', '#b2182b')
    """
    return _mix(_AROUND_ZERO, (part + 1) / 2)


def _mix(stops: Sequence[str], part: float) -> str:
    at = min(max(part, 0.0), 1.0) * (len(stops) - 1)
    place = min(int(at), len(stops) - 2)
    mixed = (
        round(a + (b - a) * (at - place))
        for a, b in zip(_channels(stops[place]), _channels(stops[place + 1]), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink(fill: str) -> str:
    """Return black or white, whichever is more readable on a colour.

    Example:
        >>> ink("#00224e"), ink("#fee838")
        ('#ffffff', '#000000')
    """
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, fill))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21, as the web guidelines (WCAG 2) define it.

    Example:
        >>> contrast("#000000", "#ffffff")
        21.0
    """
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(text: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(text))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


# Grids of numbers as text, and as HTML with a colour for each number.

_MOST_ROWS, _MOST_COLUMNS = 40, 12


def short_number(value: float) -> str:
    """Return a number with three decimals, and `-` for nan.

    Example:
        >>> short_number(-0.0001), short_number(float("nan"))
        ('0.000', '-')
    """
    text = f"{value:.3f}"
    return "-" if math.isnan(value) else "0.000" if text == "-0.000" else text


def text_table(
    title: str, columns: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]
) -> str:
    """Return numbers as text: a title, a line with the columns, and a line for each name.

    Example:
        >>> print(text_table("effect", ["0", "1"], ["relu"], [[1.0, 0.5]]))
        effect
                    0      1
          relu  1.000  0.500
    """
    heads = list(columns[:_MOST_COLUMNS])
    cells = [[short_number(value) for value in row[:_MOST_COLUMNS]] for row in values[:_MOST_ROWS]]
    widths = [max(map(len, column), default=0) for column in zip(heads, *cells, strict=True)]
    shown = [("", heads)] * any(heads) + list(zip(names, cells, strict=False))
    first = max(map(len, names[:_MOST_ROWS]), default=0)
    more = " ..." if len(columns) > _MOST_COLUMNS else ""
    lines = [title]
    for name, row in shown:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {name:{first}}  {numbers}{more}")
    if len(values) > _MOST_ROWS:
        lines.append(f"  ... and {len(values) - _MOST_ROWS} more")
    return "\n".join(line.rstrip() for line in lines)


def heat_map(
    title: str,
    columns: Sequence[str],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    texts: Sequence[Sequence[Any]] | None = None,
) -> str:
    """Return an HTML table whose cells are coloured by their numbers, and may have other texts.

    The scale goes from dark to light; with numbers below and above zero, from blue to red.

    Example:
        >>> heat_map("effect", ["0"], ["relu"], [[1.0]]).count("<td")
        1
    """
    low, high = _limits(values)
    span = high - low or 1.0
    lines = [f"<table><caption>{escape(title)}</caption>"]
    if any(columns):
        lines.append("<tr><th></th>" + "".join(f"<th>{escape(c)}</th>" for c in columns) + "</tr>")
    for number, (name, row) in enumerate(zip(names, values, strict=True)):
        cells = [f'<th style="text-align: left">{escape(name)}</th>']
        for column, value in enumerate(row):
            text = short_number(value) if texts is None else str(texts[number][column])
            fill = "#ffffff"
            if math.isfinite(value):
                fill = (
                    color_around_zero(value / high)
                    if low < 0 < high
                    else color((value - low) / span)
                )
            style = f"background: {fill}; color: {ink(fill)}"
            style += "; text-align: right" if texts is None else ""
            cells.append(f'<td style="{style}" title="{value:.6g}">{escape(text)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def plot_numbers(
    title: str, columns: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]
) -> PlotFigure:
    """Return numbers as a figure of matplotlib, in the colours of `heat_map`."""
    figures = required("matplotlib.figure", "a plot", error=InputError)
    figure: PlotFigure = figures.Figure(
        (2 + 0.5 * max(len(columns), 4), 1 + 0.3 * len(names)), layout="constrained"
    )
    axes = figure.subplots()
    low, high = _limits(values)
    shades = "RdBu_r" if low < 0 < high else "cividis"
    image = axes.imshow(values, cmap=shades, vmin=low, vmax=high, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90 if len(columns) > 6 else 0)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize="small")
    figure.colorbar(image)
    return figure


def _limits(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of the scale, which is even around zero for numbers of both signs."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return (-max(-low, high), max(-low, high)) if low < 0 < high else (low, high)
