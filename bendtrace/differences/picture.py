"""The picture of a difference: both runs in one, with colours for what is not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from bendtrace.differences.union import StepText, Union, union_of
from bendtrace.drawing.canvas import Canvas, Group, Mark, Polygon, Rectangle, Text
from bendtrace.drawing.measure import cut
from bendtrace.drawing.paint import figure, paint
from bendtrace.drawing.picture import Picture
from bendtrace.drawing.scene import Edge, Node, Scene, scene
from bendtrace.flow import FlowStep
from bendtrace.history.entries import LayerEntry

if TYPE_CHECKING:
    from bendtrace.differences.difference import Difference
    from bendtrace.history.run_log import RunLog

__all__ = ["difference_picture"]

# For each tone what is written in the legend, and the colours inside and around.
_TONES = {
    "removed": ("only in a", "#ffebe9", "#cf222e"),
    "added": ("only in b", "#dafbe1", "#1a7f37"),
    "changed": ("not the same", "#ffe59e", "#9a6700"),
    "value": ("of another value", "#fffbe0", "#d4a72c"),
}
_FIRST, _THICK = "#0969da", 2.5
_WIDEST = 44
_SMALL, _INK = 9.0, "#1f2328"
_MARGIN, _SQUARE = 16.0, 10.0


def difference_picture(difference: Difference, **options: Any) -> Picture:
    """Draw both runs of a difference.

    Args:
        difference: what to draw.
        **options: of `bendtrace.drawing.scene.scene`.
    """
    union = union_of(difference)
    # A scene takes no more of a log than a union has.
    made = scene(cast("RunLog", union), **options)
    tones = {node: _tone(node, union) for node in made.root.walk()}
    for node in made.nodes():
        node.lines = _lines(node, union, tones[node])
    _tell_sides(made, union)
    canvas = paint(figure(made))
    first = _first_node(made, union, difference)
    _color(canvas, made, tones, first)
    _add_legend(canvas, [tone for tone in _TONES if tone in tones.values()], first is not None)
    return Picture(canvas, made)


def _tone(node: Node, union: Union) -> str:
    if node.kind == "root":
        return ""
    number = _step_of(node)
    if number is not None:
        change = union.step_changes.get(number)
        if change is None:
            return ""
        return change.kind if change.kind in ("added", "removed") else "changed"
    entries = [entry for inner in node.walk() for entry in inner.entries]
    tones = {union.tones.get(entry.label, "") for entry in entries}
    if len(tones) == 1:
        return tones.pop()
    if node.children is not None:  # what is in it is to be seen
        return ""
    return "changed" if tones - {"", "value"} else "value"


def _lines(node: Node, union: Union, tone: str) -> list[str]:
    """Return what is written on a node: with what a picture of one run has, what differs."""
    number = _step_of(node)
    if number is not None:
        change = union.step_changes.get(number)
        if change is None or change.kind in ("side", "index", "value"):
            return node.lines
        if change.kind == "iterations":
            return [f"{change.value_in(change.a)} in a", f"{change.value_in(change.b)} in b"]
        return [*node.lines, _TONES[change.kind][0]]
    if tone in ("added", "removed"):
        told = [_TONES[tone][0]] if node.times or node.is_folded else []
    else:
        notes = {union.notes.get(entry.label, "") for entry in node.entries}
        told = [*notes] if len(notes) == 1 else _counts(node.entries, union)
    return [*node.lines, *(cut(line, _WIDEST) for line in told if line)]


def _counts(entries: Iterable[LayerEntry], union: Union) -> list[str]:
    often = Counter(union.tones.get(entry.label, "") for entry in entries)
    told = [f"{often[tone]} {words}" for tone, (words, _, _) in _TONES.items() if often[tone]]
    return [", ".join(told)] if told else []


def _step_of(node: Node) -> int | None:
    return node.title.number if isinstance(node.title, StepText) else None


def _tell_sides(made: Scene, union: Union) -> None:
    """Lead both sides of a condition from it, with what it came to there."""
    nodes = {_step_of(node): node for node in made.nodes() if node.kind == "decision"}
    for number, found in union.under.items():
        decision = nodes.get(number)
        if decision is None:
            continue
        sides: dict[str, Node] = {}
        for label, side in found:
            if label in made.node_of:
                sides.setdefault(side, made.node_of[label])
        made.edges = [
            edge for edge in made.edges if edge.kind != "control" or edge.source is not decision
        ]
        made.edges += [
            Edge(decision, node, [], side, "control", port=side)
            for side, node in sides.items()
            if node is not decision
        ]


def _first_node(made: Scene, union: Union, difference: Difference) -> Node | None:
    """Return the node where the runs first part."""
    first = difference.first
    if first is None:
        return None
    step = next((side for side in (first.a, first.b) if isinstance(side, FlowStep)), None)
    if step is not None:
        told = [
            (number, node)
            for node in made.nodes()
            if (number := _step_of(node)) is not None and number in union.step_changes
        ]
        exact = [n for number, n in told if union.step_changes[number].a is first.a]
        # A `while` as a whole is not drawn: the test that came out otherwise is.
        tests = [n for number, n in told if union.step_changes[number].kind == "side"]
        # Of decisions that were put together, only the first is known by its number.
        alike = [n for n in made.nodes() if _step_of(n) is not None and n.title == step.text]
        return next(iter([*exact, *tests, *alike]), None)
    labels = [side.label for side in (first.a, first.b) if isinstance(side, LayerEntry)]
    names = [*(f"{_name(label, run)}" for label in labels for run in "ab"), *labels]
    return next((made.node_of[name] for name in names if name in made.node_of), None)


def _name(label: str, run: str) -> str:
    name, colon, number = label.partition(":")
    return f"{name} in {run}{colon}{number}"


def _color(canvas: Canvas, made: Scene, tones: dict[Node, str], first: Node | None) -> None:
    """Colour the nodes of a painted scene; they are painted as groups, boxes first."""
    nodes = iter([*made.boxes(), *made.nodes()])
    for place, mark in enumerate(canvas.marks):
        if isinstance(mark, Group):
            node = next(nodes)
            canvas.marks[place] = _colored(mark, node, tones[node], node is first)


def _colored(group: Group, node: Node, tone: str, is_first: bool) -> Group:
    marks: list[Mark] = list(group.marks)
    shapes = [place for place, mark in enumerate(marks) if isinstance(mark, (Rectangle, Polygon))]
    if not shapes:
        return group
    shape = marks[shapes[-1]]
    assert isinstance(shape, (Rectangle, Polygon))
    _, fill, stroke = _TONES[tone] if tone else ("", "#ffffff", "#8c959f")
    if node.children is None:
        for place in shapes:  # what stands behind it, too
            behind = marks[place]
            assert isinstance(behind, (Rectangle, Polygon))
            marks[place] = replace(behind, stroke=stroke)
        marks[shapes[-1]] = replace(shape, fill=fill, stroke=stroke)
    elif tone:
        marks[shapes[-1]] = replace(shape, stroke=stroke, thick=2.0)
    if is_first:
        marks.append(_around(shape))
    return replace(group, marks=tuple(marks))


def _around(shape: Rectangle | Polygon) -> Rectangle:
    if isinstance(shape, Rectangle):
        left, top, wide, high = shape.x, shape.y, shape.width, shape.height
    else:
        across, down = zip(*shape.points, strict=True)
        left, top = min(across), min(down)
        wide, high = max(across) - left, max(down) - top
    return Rectangle(left - 4, top - 4, wide + 8, high + 8, "none", _FIRST, 8, _THICK)


def _add_legend(canvas: Canvas, tones: list[str], has_first: bool) -> None:
    """Write below the picture what its colours mean."""
    x, y = _MARGIN, canvas.height
    squares = [(words, fill, stroke, 1.0) for words, fill, stroke in map(_TONES.__getitem__, tones)]
    if has_first:
        squares.append(("where they first part", "none", _FIRST, _THICK))
    for words, fill, stroke, thick in squares:
        canvas.marks.append(Rectangle(x, y, _SQUARE, _SQUARE, fill, stroke, 2, thick))
        text = Text(x + _SQUARE + 5, y + _SQUARE - 1.5, words, _SMALL, _INK)
        canvas.marks.append(text)
        x = text.x + text.width + 14
    if squares:
        canvas.width = max(canvas.width, x)
        canvas.height = y + _SQUARE + _MARGIN
