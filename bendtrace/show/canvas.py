"""The marks that pictures consist of, the width of text, and output as SVG."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import TypeAlias

SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Advance widths of Helvetica, in thousandths of the font size, from the space (32) on. The fonts
# that stand in for it elsewhere (Arial, Liberation Sans) have the same.
_HELVETICA = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 "
    "556 556 556 556 556 556 556 556 556 556 278 278 584 584 584 556 "
    "1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 "
    "667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 "
    "333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 "
    "556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_WIDTHS = {chr(32 + i): int(w) / 1000 for i, w in enumerate(_HELVETICA.split())}
_WIDTHS |= {"\N{MULTIPLICATION SIGN}": 0.584, "\N{MIDDLE DOT}": 0.333}
_MONO = 0.602
_BOLD = 1.06
_OTHER = 0.75  # letters that the table does not know; full-width ones take 1.05


def width(text: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """Return the width of a line of text.

    Example:
        >>> width("conv2d", 10)
        32.24
    """
    return round(_ems(text, mono) * size * (_BOLD if bold and not mono else 1.0), 2)


@lru_cache(maxsize=20_000)
def _ems(text: str, mono: bool) -> float:
    total = 0.0
    for letter in text:
        if unicodedata.combining(letter):
            continue
        if unicodedata.east_asian_width(letter) in "WF":
            total += 2 * _MONO if mono else 1.05
        else:
            total += _MONO if mono else _WIDTHS.get(letter, _OTHER)
    return total


def printable(text: str) -> str:
    """Return a text on one line: with collapsed white space and replaced control characters."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def cut(text: str, most: int) -> str:
    """Return a text on one line, shortened in its middle to a maximum length.

    Names differ at their ends, and expressions at both ends: so the middle is cut.

    Example:
        >>> cut("encoder.layers.0.attention", 16)
        'encoder.…tention'
    """
    text = printable(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - tail :]}"


Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Rectangle:
    """A rectangle with rounded corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    radius: float = 0.0
    thick: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Polygon:
    """A closed shape through some points."""

    points: tuple[Point, ...]
    fill: str
    stroke: str = "none"
    thick: float = 1.0


@dataclass(frozen=True)
class Stroke:
    """A line through some points, with rounded corners."""

    points: tuple[Point, ...]
    stroke: str
    thick: float = 1.2
    dash: tuple[float, ...] = ()
    radius: float = 6.0


@dataclass(frozen=True)
class Caption:
    """One line of text."""

    x: float  # its start, or its middle if it is centred
    y: float  # its baseline
    text: str
    size: float  # font size in pixels
    fill: str  # its colour
    bold: bool = False  # whether it is bold
    mono: bool = False  # whether it is in a monospace font
    centred: bool = False  # whether `x` is its middle

    @property
    def width(self) -> float:
        """Its width."""
        return width(self.text, self.size, mono=self.mono, bold=self.bold)


@dataclass(frozen=True)
class Marks:
    """Marks that belong together."""

    marks: tuple[Mark, ...]
    title: str = ""  # the tooltip
    name: str = ""  # the object that they represent, for readers of the file


Mark: TypeAlias = Rectangle | Polygon | Stroke | Caption | Marks


@dataclass
class Canvas:
    """A picture."""

    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)
    title: str = ""
    description: str = ""


def svg(canvas: Canvas) -> str:
    """Return a picture as SVG."""
    wide, high = _n(canvas.width), _n(canvas.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="{SANS}" stroke-linejoin="round" role="img">',
        f"<title>{_escape_xml(canvas.title)}</title>",
        f"<desc>{_escape_xml(canvas.description)}</desc>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
    ]
    lines += [_mark(mark) for mark in canvas.marks]
    return "\n".join([*lines, "</svg>\n"])


def round_corners(points: Sequence[Point], radius: float) -> list[tuple[Point, Point, Point]]:
    """Round the corners of a line."""
    found = []
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        first = abs(here[0] - before[0]) + abs(here[1] - before[1])
        second = abs(after[0] - here[0]) + abs(after[1] - here[1])
        cut = min(radius, first / 2, second / 2)
        found.append((_toward(here, before, cut, first), here, _toward(here, after, cut, second)))
    return found


def _toward(start: Point, stop: Point, far: float, whole: float) -> Point:
    part = far / whole if whole else 0.0
    return (start[0] + (stop[0] - start[0]) * part, start[1] + (stop[1] - start[1]) * part)


def _mark(mark: Mark) -> str:
    if isinstance(mark, Marks):
        name = f' data-name="{_escape_xml(mark.name)}"' if mark.name else ""
        title = f"<title>{_escape_xml(mark.title, lines=True)}</title>" if mark.title else ""
        return f"<g{name}>{title}" + "".join(map(_mark, mark.marks)) + "</g>"
    if isinstance(mark, Rectangle):
        radius = f' rx="{_n(mark.radius)}"' if mark.radius else ""
        return (
            f'<rect x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" '
            f'height="{_n(mark.height)}"{radius} fill="{mark.fill}"{_stroke(mark)}/>'
        )
    if isinstance(mark, Polygon):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
        return f'<polygon points="{points}" fill="{mark.fill}"{_stroke(mark)}/>'
    if isinstance(mark, Stroke):
        return f'<path d="{_svg_path(mark)}" fill="none"{_stroke(mark)}/>'
    return _svg_text(mark)


def _stroke(mark: Rectangle | Polygon | Stroke) -> str:
    if mark.stroke == "none":
        return ""
    thick = f' stroke-width="{_n(mark.thick)}"' if mark.thick != 1 else ""
    dash = () if isinstance(mark, Polygon) else mark.dash
    dashes = f' stroke-dasharray="{" ".join(map(_n, dash))}"' if dash else ""
    return f' stroke="{mark.stroke}"{thick}{dashes}'


def _svg_path(line: Stroke) -> str:
    (x, y), (end_x, end_y) = line.points[0], line.points[-1]
    parts = [f"M{_n(x)} {_n(y)}"]
    for start, corner, stop in round_corners(line.points, line.radius):
        parts.append(f"L{_n(start[0])} {_n(start[1])}")
        parts.append(f"Q{_n(corner[0])} {_n(corner[1])} {_n(stop[0])} {_n(stop[1])}")
    return "".join([*parts, f"L{_n(end_x)} {_n(end_y)}"])


def _svg_text(text: Caption) -> str:
    if not text.text:
        return ""
    options = ' text-anchor="middle"' if text.centred else ""
    options += ' font-weight="bold"' if text.bold else ""
    options += f' font-family="{MONO}"' if text.mono else ""
    # Fonts differ: the length makes the text as wide as the room that was left for it.
    return (
        f'<text x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}" '
        f'fill="{text.fill}"{options} textLength="{_n(text.width)}" '
        f'lengthAdjust="spacingAndGlyphs">{_escape_xml(text.text)}</text>'
    )


def _escape_xml(text: str, *, lines: bool = False) -> str:
    if lines:
        return "&#10;".join(_escape_xml(line) for line in text.splitlines())
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _n(number: float) -> str:
    """Return a number with at most one decimal."""
    text = f"{number:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")
