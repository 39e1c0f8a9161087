"""A folded trace tree as flow charts."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten

from bendtrace.drawing import canvas
from bendtrace.drawing.canvas import Canvas, Polygon, Rectangle, Text
from bendtrace.drawing.figure import TIP
from bendtrace.drawing.picture import Format, Picture
from bendtrace.outline.structure import Branch, End, Flow, ProgramOutline, Taken
from bendtrace.outline.text import count, end_text, summary, title, value_text

__all__ = [
    "Box",
    "Drawing",
    "Edge",
    "draw",
    "drawn",
    "in_a_column",
    "picture",
    "saved",
]

# In pixels. Monospace characters are 0.6 of the font size wide, and up to 0.62 in some fonts.
_SIZE = 12
_LETTER = 0.62 * _SIZE
_LINE = 16
_PAD = 8
_GAP = 22
_MARGIN = 16
_WIDEST = 64  # letters


@dataclass(frozen=True)
class Box:
    """The room that a node takes, or a text.

    Attributes:
        x: its left edge.
        y: its upper edge.
        width: how wide it is.
        height: how high it is.
        role: "branch" for a diamond, "start", "return", "live", "raise", or "text" for the room
            that a text takes.
        text: what is written in it, if it is a text.
        tone: how prominent a text is: "plain", "faint" or "strong".
    """

    x: float
    y: float
    width: float
    height: float
    role: str
    text: str = ""
    tone: str = "plain"


@dataclass(frozen=True)
class Line:
    """A line along some points; `faint` where no run went, `arrow` if it ends in one."""

    points: tuple[tuple[float, float], ...]
    arrow: bool = False
    faint: bool = False


@dataclass
class Drawing:
    """A part of the picture, placed from its own upper left corner on.

    Attributes:
        width: how wide it is.
        height: how high it is.
        spine: where, from its left edge, lines come in above and go out below.
        boxes: what is drawn, but for lines.
        lines: what connects them.
        is_open: whether runs go on below.
    """

    width: float
    height: float
    spine: float
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    is_open: bool = True

    def put(self, other: Drawing, x: float, y: float) -> None:
        """Put another drawing into this one."""
        self.boxes += [replace(box, x=box.x + x, y=box.y + y) for box in other.boxes]
        for line in other.lines:
            points = tuple((px + x, py + y) for px, py in line.points)
            self.lines.append(replace(line, points=points))


def picture(headline: str, programs: Sequence[ProgramOutline]) -> str:
    """Return flow charts of some programs as SVG."""
    return drawn(headline, programs).svg


def drawn(
    headline: str,
    programs: Sequence[ProgramOutline],
    path: str | os.PathLike[str] | None = None,
    format: Format | None = None,
) -> Picture:
    """Draw flow charts of some programs.

    Args:
        headline: what is written above all.
        programs: the programs.
        path: where to save the picture; the ending says as what: .svg, .png, .pdf or .html.
        format: as what to save it, if the ending does not say.

    Raises:
        InputError: as for `Picture.save`. Nothing is written then.
    """
    return saved(draw(headline, programs), headline, path, format)


def saved(
    drawing: Drawing, title: str, path: str | os.PathLike[str] | None, format: Format | None
) -> Picture:
    """Make a picture of a drawing, and save it if it is said where."""
    made = Picture(_canvas(drawing, title))
    if path is not None:
        made.save(path, format)
    return made


def draw(headline: str, programs: Sequence[ProgramOutline]) -> Drawing:
    """Lay out flow charts of some programs, one below the other."""
    parts = [_texts([(headline, "strong")])]
    for program in programs:
        told = [(title(program), "strong")]
        told += [(f"for {fact}", "faint") for fact in program.selected_by[:4]]
        told.append((f"{count(program.traces, 'trace')}, {count(program.runs, 'run')}", "faint"))
        parts += [_texts(told), _flow(program.flow)]
    width = max(part.width for part in parts)
    whole = Drawing(width + 2 * _MARGIN, _MARGIN, 0)
    for part in parts:
        whole.put(part, _MARGIN, whole.height)
        whole.height += part.height + _GAP
    return whole


def _texts(lines: Iterable[tuple[str, str]], most: int = 2 * _WIDEST) -> Drawing:
    """Lay out lines of text, left-aligned."""
    boxes: list[Box] = []
    for text, tone in lines:
        text = _cut(text, most)
        boxes.append(Box(0, len(boxes) * _LINE, _width(text), _LINE, "text", text, tone))
    width = max((box.width for box in boxes), default=0.0)
    return Drawing(width, len(boxes) * _LINE, width / 2, boxes)


def _node(lines: Iterable[tuple[str, str]], role: str) -> Drawing:
    inner, beside = _texts(lines, _WIDEST), _PAD + (TIP if role == "branch" else 0)
    width, height = inner.width + 2 * beside, inner.height + _PAD
    node = Drawing(width, height, width / 2, [Box(0, 0, width, height, role)])
    node.put(inner, beside, _PAD / 2)
    return node


def _flow(flow: Flow) -> Drawing:
    parts = [_branch(item) if isinstance(item, Branch) else _end(item) for item in flow]
    ends = [part for part, item in zip(parts, flow, strict=True) if isinstance(item, End)]
    parts = parts[: len(parts) - len(ends)]
    if ends:
        parts.append(_beside(ends))
    return _stacked(parts)


def _end(end: End) -> Drawing:
    told = [(end_text(end), "plain"), (_joined(count(end.hits, "run"), end.where), "faint")]
    return replace(_node(told, end.kind), is_open=False)


def _beside(parts: Sequence[Drawing]) -> Drawing:
    """Lay out ends of runs side by side, with a line to each."""
    if len(parts) == 1:
        return parts[0]
    width = sum(part.width for part in parts) + _GAP * (len(parts) - 1)
    row = Drawing(width, _GAP + max(part.height for part in parts), width / 2, is_open=False)
    x = 0.0
    for part in parts:
        row.put(part, x, _GAP)
        row.lines.append(_bent(row.spine, 0, x + part.spine, _GAP, arrow=True))
        x += part.width + _GAP
    return row


def _stacked(parts: Sequence[Drawing]) -> Drawing:
    """Lay out parts one below the other, along one spine."""
    spine = max((part.spine for part in parts), default=0.0)
    right = max((part.width - part.spine for part in parts), default=0.0)
    stack = Drawing(spine + right, 0, spine)
    for part in parts:
        if stack.boxes:
            if stack.is_open:
                y = stack.height
                stack.lines.append(Line(((spine, y), (spine, y + _GAP)), arrow=True))
            stack.height += _GAP
        stack.put(part, spine - part.spine, stack.height)
        stack.height += part.height
        stack.is_open = part.is_open
    return stack


def _branch(branch: Branch) -> Drawing:
    told = [(branch.text, "plain"), (_joined(summary(branch), branch.where), "faint")]
    node = _node(told, "branch")
    if branch.is_loop or branch.kind == "while":
        after = branch.flow(False) if branch.is_condition else Flow()
        looped = _loop(node, branch)
        return _stacked([looped, _flow(after)]) if after else looped
    sides = {bool(taken.value): taken for taken in branch.sides()}
    if not any(taken.flow for taken in branch.taken.values()):
        if not branch.is_condition or len(branch.never) == 1:
            return node  # which says it all
    if not branch.is_condition:
        return _split(node, [_side(taken) for taken in branch.sides()])
    columns = [_side(sides.get(value) or Taken(value, Flow(branch))) for value in (True, False)]
    return _split(node, columns)


def _side(taken: Taken) -> tuple[Drawing, bool]:
    """Lay out one side of a branch; the flag says whether it was ever taken."""
    label, flow = _texts([_often(taken)]), _flow(taken.flow)
    parts = _stacked([label, flow]) if flow.boxes else label
    ended = sum(end.hits for end in taken.flow.walk() if isinstance(end, End))
    return replace(parts, is_open=taken.hits > ended), bool(taken.hits)


def _often(taken: Taken) -> tuple[str, str]:
    """Say how often a side was taken, and how prominently."""
    often = f"{taken.hits}x" if taken.hits else "never"
    return f"{value_text(taken.value)} {often}", "plain" if taken.hits else "faint"


def _split(node: Drawing, columns: Sequence[tuple[Drawing, bool]]) -> Drawing:
    """Lay out the sides of a branch below it, side by side."""
    below = sum(column.width for column, _ in columns) + 2 * _GAP * (len(columns) - 1)
    first, last = columns[0][0], columns[-1][0]
    # The spine runs through the node, which stands above the middle of its sides.
    middle = (first.spine + below - last.width + last.spine) / 2
    left = max(node.spine, middle)
    right = max(node.width - node.spine, below - middle)
    split = Drawing(left + right, node.height, left)
    split.put(node, left - node.spine, 0)
    top = node.height + _GAP
    x, height = left - middle, max(column.height for column, _ in columns)
    bottom = top + height + _GAP / 2
    for column, was_taken in columns:
        split.put(column, x, top)
        at = x + column.spine
        split.lines.append(_bent(left, node.height, at, top, arrow=was_taken, faint=not was_taken))
        if column.is_open:
            points = ((at, top + column.height), (at, bottom), (left, bottom))
            split.lines.append(Line(points))
        x += column.width + 2 * _GAP
    split.is_open = any(column.is_open for column, _ in columns)
    split.height = bottom
    return split


def _loop(node: Drawing, branch: Branch) -> Drawing:
    """Lay out a loop: its body below it, a line back to it, and one past the body."""
    if branch.is_condition:
        taken = {bool(taken.value): taken for taken in branch.sides()}
        again, done = (taken.get(value) or Taken(value, Flow(branch)) for value in (True, False))
        body, is_begun = _side(again)
        leaving, is_left = _texts([_often(done)]), bool(done.hits)
    else:
        body, is_begun = _flow(branch.flow(None)), bool(branch.rounds)
        leaving, is_left = _texts([]), True
    spine = max(node.spine, body.spine) + _GAP
    right = max(node.width - node.spine + leaving.width, body.width - body.spine) + _GAP
    top = node.height + _GAP
    bottom = top + body.height
    loop = Drawing(spine + right, bottom + 2 * _GAP, spine, is_open=is_left)
    loop.put(node, spine - node.spine, 0)
    loop.put(body, spine - body.spine, top)
    side, middle = spine - node.spine + node.width, node.height / 2
    loop.put(leaving, side + 4, middle - _LINE - 2)
    loop.lines.append(Line(((spine, node.height), (spine, top)), is_begun, not is_begun))
    if body.is_open and is_begun:
        low, start = bottom + _GAP / 2, (spine - node.spine, middle)
        back = ((spine, bottom), (spine, low), (0, low), (0, middle), start)
        loop.lines.append(Line(back, arrow=True))
    out = ((side, middle), (spine + right, middle), (spine + right, loop.height))
    loop.lines.append(Line((*out, (spine, loop.height)), faint=not is_left))
    return loop


@dataclass(frozen=True)
class Edge:
    """A line from one node to another, by their positions, and what is written at it."""

    source: int
    target: int
    text: str


def in_a_column(
    nodes: Sequence[tuple[str, Sequence[tuple[str, str]]]], edges: Sequence[Edge]
) -> Drawing:
    """Lay out a graph: its nodes in a column, lines to others than the next on both sides.

    Args:
        nodes: their roles, and their lines of text with how prominent each is.
        edges: what connects them. Those that lead down are on the right, others on the left.
    """
    beside = [edge for edge in edges if edge.target != edge.source + 1]
    leaving = [[edge for edge in beside if edge.source == i] for i in range(len(nodes))]
    made = []
    for (role, told), out in zip(nodes, leaving, strict=True):
        node = _node(told, role)
        ways = max(sum(e.target > e.source for e in out), sum(e.target <= e.source for e in out))
        more = max(0, (ways + 1) * (_LINE + 2) - node.height) / 2  # room for the lines
        boxes = [replace(box, y=box.y + more * (box.role == "text")) for box in node.boxes]
        boxes[0] = replace(boxes[0], height=node.height + 2 * more)
        made.append(replace(node, height=node.height + 2 * more, boxes=boxes))
    room = max((_width(edge.text) for edge in beside), default=0.0) + _PAD
    lanes = {
        down: _lanes([edge for edge in beside if (edge.target > edge.source) is down])
        for down in (False, True)
    }
    reach = {side: (max(lanes[side].values(), default=-1) + 1) * _PAD for side in lanes}
    widest = max(node.width for node in made)
    spine = reach[False] + (room if lanes[False] else 0) + widest / 2
    right = widest / 2 + (room if lanes[True] else 0) + reach[True]
    column, tops = Drawing(spine + right, 0, spine, is_open=False), []
    for i, node in enumerate(made):
        tops.append(column.height)
        column.put(node, spine - node.spine, column.height)
        column.height += node.height
        onward = ", ".join(edge.text for edge in edges if edge.source == i and edge.target == i + 1)
        if any(edge.source == i and edge.target == i + 1 for edge in edges):
            label = _texts([(onward, "plain")] if onward else [])
            low = column.height + 2 * _GAP + label.height
            column.lines.append(Line(((spine, column.height), (spine, low)), arrow=True))
            column.put(label, spine + _PAD, column.height + _GAP)
            column.width = max(column.width, spine + _PAD + label.width)
        column.height += 2 * _GAP + (_LINE if onward else 0)
    column.height -= 2 * _GAP
    for edge in beside:
        down = edge.target > edge.source
        own = [other for other in leaving[edge.source] if (other.target > other.source) is down]
        source, target = made[edge.source], made[edge.target]
        share = (own.index(edge) + 1) / (len(own) + 1)
        leaves_here = any((other.target > other.source) is down for other in leaving[edge.target])
        low = 0.8 if leaves_here else 0.5  # below what leaves on the same side
        y, to_y = tops[edge.source] + share * source.height, tops[edge.target] + low * target.height
        sign = 1 if down else -1
        lane = spine + sign * (widest / 2 + room + lanes[down][edge] * _PAD)
        # Away from the middle, a diamond is less wide.
        x = spine + sign * (source.width / 2 - TIP * abs(share - 0.5) * 2)
        to_x = spine + sign * (target.width / 2 - TIP * (low - 0.5) * 2)
        column.lines.append(Line(((x, y), (lane, y), (lane, to_y), (to_x, to_y)), arrow=True))
        text = _texts([(edge.text, "plain")])
        column.put(text, x + 4 if down else x - 4 - text.width, y - _LINE - 1)
    whole = Drawing(column.width + 2 * _MARGIN, column.height + 2 * _MARGIN, spine + _MARGIN)
    whole.put(column, _MARGIN, _MARGIN)
    return whole


def _lanes(edges: Sequence[Edge]) -> dict[Edge, int]:
    """Give each edge a lane in which no other is in its way, short ones further inside."""
    found: dict[Edge, int] = {}
    for edge in sorted(edges, key=lambda edge: abs(edge.target - edge.source)):
        low, high = sorted((edge.source, edge.target))
        taken = {
            lane
            for other, lane in found.items()
            if min(other.source, other.target) <= high and max(other.source, other.target) >= low
        }
        found[edge] = next(lane for lane in range(len(edges)) if lane not in taken)
    return found


def _bent(
    x: float, y: float, to_x: float, to_y: float, *, arrow: bool = False, faint: bool = False
) -> Line:
    half = (y + to_y) / 2
    points = ((x, y), (x, half), (to_x, half), (to_x, to_y))
    return Line(points if x != to_x else ((x, y), (to_x, to_y)), arrow, faint)


def _joined(*texts: str) -> str:
    return " \N{MIDDLE DOT} ".join(text for text in texts if text)


def _cut(text: str, most: int) -> str:
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shorten(text, most, placeholder=" ...") if " " in text else text[:most]


def _width(text: str) -> float:
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return (len(text) + wide) * _LETTER


_FILLS = {
    "start": "#f4f4f4",
    "branch": "#eef3fb",
    "return": "#e8f5e9",
    "live": "#fff8e1",
    "raise": "#fdecea",
}
_TONES = {"plain": "#222222", "faint": "#6a6a6a", "strong": "#222222"}
_BORDER = "#8899bb"


def _canvas(drawing: Drawing, title: str) -> Canvas:
    made = Canvas(round(drawing.width), round(drawing.height), title=title)
    for line in drawing.lines:
        made.marks += _marks(line)
    made.marks += [_shape(box) for box in drawing.boxes if box.role in _FILLS]
    made.marks += [_text(box) for box in drawing.boxes if box.role == "text"]
    return made


def _shape(box: Box) -> Polygon | Rectangle:
    fill = _FILLS[box.role]
    if box.role != "branch":
        return Rectangle(box.x, box.y, box.width, box.height, fill, _BORDER, 12)
    right, low, half = box.x + box.width, box.y + box.height, box.y + box.height / 2
    above = ((box.x, half), (box.x + TIP, box.y), (right - TIP, box.y))
    return Polygon((*above, (right, half), (right - TIP, low), (box.x + TIP, low)), fill, _BORDER)


def _marks(line: Line) -> list[canvas.Line]:
    color = "#aaaaaa" if line.faint else "#666666"
    marks = [canvas.Line(line.points, color, 1.2, (3.0, 3.0) if line.faint else ())]
    if line.arrow:
        x, y = line.points[-1]
        head = ((x - 4, y - 6), (x, y), (x + 4, y - 6))
        if line.points[-2][1] == y:  # it comes from a side
            back = x - 6 if line.points[-2][0] < x else x + 6
            head = ((back, y - 4), (x, y), (back, y + 4))
        marks.append(canvas.Line(head, color, radius=0))
    return marks


def _text(box: Box) -> Text:
    bold = box.tone == "strong"
    return Text(box.x, box.y + _SIZE, box.text, _SIZE, _TONES[box.tone], bold, mono=True)
