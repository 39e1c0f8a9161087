"""A folded trace tree as flow charts."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten

from bendtrace.drawing import canvas
from bendtrace.drawing.canvas import Canvas, Rectangle, Text
from bendtrace.drawing.picture import Format, Picture
from bendtrace.outline.structure import Branch, End, Flow, ProgramOutline, Taken
from bendtrace.outline.text import count, end_text, summary, title, value_text

__all__ = ["Box", "Drawing", "draw", "drawn", "picture"]

# In pixels. Monospace characters are 0.6 of the font size wide, and up to 0.62 in some fonts.
_SIZE = 12
_LETTER = 0.62 * _SIZE
_LINE = 16
_PAD = 8
_GAP = 22
_MARGIN = 16
_WIDEST = 56  # letters


@dataclass(frozen=True)
class Box:
    """A rectangle: that of a node, or of a text.

    Attributes:
        x: its left edge.
        y: its upper edge.
        width: how wide it is.
        height: how high it is.
        role: "branch", "return", "live", "raise", "frame", or "text" for the room a text takes.
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
        boxes: what is drawn as, or takes the room of, a rectangle.
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
    made = Picture(_canvas(draw(headline, programs), headline))
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
    inner = _texts(lines, _WIDEST)
    width, height = inner.width + 2 * _PAD, inner.height + _PAD
    node = Drawing(width, height, width / 2, [Box(0, 0, width, height, role)])
    node.put(inner, _PAD, _PAD / 2)
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
    if branch.is_loop or branch.kind == "while":
        body = branch.flow(True if branch.is_condition else None)
        looped = _frame(told, body) if body else _node(told, "branch")
        after = branch.flow(False) if branch.is_condition else Flow()
        return _stacked([looped, _flow(after)]) if after else looped
    node = _node(told, "branch")
    if not any(taken.flow for taken in branch.taken.values()):
        return node
    if not branch.is_condition:
        return _split(node, [_side(taken) for taken in branch.sides()])
    sides = {bool(taken.value): taken for taken in branch.sides()}
    columns = [_side(sides.get(value) or Taken(value, Flow(branch))) for value in (True, False)]
    return _split(node, columns)


def _side(taken: Taken) -> tuple[Drawing, bool]:
    """Lay out one side of a branch; the flag says whether it was ever taken."""
    often = f"{taken.hits}x" if taken.hits else "never"
    label = _texts([(f"{value_text(taken.value)} {often}", "plain" if taken.hits else "faint")])
    flow = _flow(taken.flow)
    parts = _stacked([label, flow]) if flow.boxes else label
    ended = sum(end.hits for end in taken.flow.walk() if isinstance(end, End))
    return replace(parts, is_open=taken.hits > ended), bool(taken.hits)


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


def _frame(told: Iterable[tuple[str, str]], body: Flow) -> Drawing:
    """Lay out a loop: a frame around what it repeats."""
    head, inner = _texts(told, _WIDEST), _flow(body)
    width = max(head.width, inner.width) + 2 * _GAP
    spine = max(_GAP + inner.spine, width / 2) if inner.width < head.width else _GAP + inner.spine
    top = _PAD + head.height + _GAP / 2
    height = top + inner.height + _GAP / 2
    frame = Drawing(width, height, spine, [Box(0, 0, width, height, "frame")])
    frame.put(head, _PAD, _PAD / 2)
    frame.put(inner, spine - inner.spine, top)
    return frame


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


_FILLS = {"branch": "#eef3fb", "return": "#e8f5e9", "live": "#fff8e1", "raise": "#fdecea"}
_TONES = {"plain": "#222222", "faint": "#6a6a6a", "strong": "#222222"}
_BORDER = "#8899bb"


def _canvas(drawing: Drawing, title: str) -> Canvas:
    made = Canvas(round(drawing.width), round(drawing.height), title=title)
    # Frames first, from the outside in: what stands in them is drawn over them.
    made.marks += [_rectangle(box) for box in drawing.boxes if box.role == "frame"]
    for line in drawing.lines:
        made.marks += _marks(line)
    made.marks += [_rectangle(box) for box in drawing.boxes if box.role in _FILLS]
    made.marks += [_text(box) for box in drawing.boxes if box.role == "text"]
    return made


def _rectangle(box: Box) -> Rectangle:
    place = (box.x, box.y, box.width, box.height)
    if box.role == "frame":
        return Rectangle(*place, "none", _BORDER, 6, dash=(5.0, 3.0))
    return Rectangle(*place, _FILLS[box.role], _BORDER, 3 if box.role == "branch" else 12)


def _marks(line: Line) -> list[canvas.Line]:
    color = "#aaaaaa" if line.faint else "#666666"
    marks = [canvas.Line(line.points, color, 1.2, (3.0, 3.0) if line.faint else ())]
    if line.arrow:
        x, y = line.points[-1]
        head = ((x - 4, y - 6), (x, y), (x + 4, y - 6))
        marks.append(canvas.Line(head, color, radius=0))
    return marks


def _text(box: Box) -> Text:
    bold = box.tone == "strong"
    return Text(box.x, box.y + _SIZE, box.text, _SIZE, _TONES[box.tone], bold, mono=True)
