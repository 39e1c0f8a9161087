"""Pictures as PNG and PDF, drawn by matplotlib with its own fonts."""

from __future__ import annotations

import io
import warnings
from typing import Any, Literal

from bendtrace._lazy import required
from bendtrace.errors import InputError
from bendtrace.view.canvas import (
    Canvas,
    Group,
    Line,
    Mark,
    Polygon,
    Rectangle,
    Text,
    rounded,
)

_POINTS = 0.75  # a pixel of CSS, in points
_LARGEST = 30_000  # pixels that a side of a PNG can have
# Letters of the fonts that come with matplotlib are wider than those the layout reckons with.
_SANS, _MONO = 0.86, 0.98


def rasterize(canvas: Canvas, form: Literal["png", "pdf"], scale: float = 2.0) -> bytes:
    """Return a picture as PNG or PDF."""
    use = f"a picture as {form.upper()}, not as SVG, HTML or DOT,"
    required("matplotlib", use, error=InputError)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure

    scale = min(scale, _LARGEST / max(canvas.width, canvas.height, 1.0))
    figure = Figure(figsize=(canvas.width / 96, canvas.height / 96), dpi=96 * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, canvas.width)
    axes.set_ylim(canvas.height, 0)
    axes.axis("off")
    for order, mark in enumerate(_flat(canvas.marks)):
        _draw(axes, mark, order)
    written = io.BytesIO()
    with warnings.catch_warnings():
        # Letters that its fonts lack are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        if form == "png":
            FigureCanvasAgg(figure).print_png(written, metadata={"Software": None})
        else:
            # Without the time of writing, the same picture gives the same bytes.
            facts = {"Title": canvas.title} | dict.fromkeys(("CreationDate", "Producer", "Creator"))
            FigureCanvasPdf(figure).print_pdf(written, metadata=facts)
    return written.getvalue()


def _flat(marks: Any) -> list[Mark]:
    found: list[Mark] = []
    for mark in marks:
        found += _flat(mark.marks) if isinstance(mark, Group) else [mark]
    return found


def _draw(axes: Any, mark: Mark, order: int) -> None:
    if isinstance(mark, Text):
        axes.text(
            mark.x,
            mark.y,
            mark.text,
            parse_math=False,  # a dollar sign would begin a formula
            fontsize=mark.size * _POINTS * (_MONO if mark.mono else _SANS),
            color=mark.fill,
            family="DejaVu Sans Mono" if mark.mono else "DejaVu Sans",
            weight="bold" if mark.bold else "normal",
            ha="center" if mark.centred else "left",
            va="baseline",
            zorder=order,
        )
        return
    if isinstance(mark, Group):
        return
    from matplotlib.patches import PathPatch

    dash = () if isinstance(mark, Polygon) else mark.dash
    style: Any = (0, tuple(part * _POINTS / mark.thick / 0.75 for part in dash)) if dash else "-"
    axes.add_patch(
        PathPatch(
            _path(mark),
            facecolor="none" if isinstance(mark, Line) else mark.fill,
            edgecolor=mark.stroke,
            linewidth=mark.thick * _POINTS if mark.stroke != "none" else 0,
            linestyle=style,
            zorder=order,
            capstyle="butt",
            joinstyle="round",
        )
    )


def _path(mark: Rectangle | Polygon | Line) -> Any:
    from matplotlib.path import Path

    if isinstance(mark, Line):
        points: list[tuple[float, float]] = [mark.points[0]]
        codes = [Path.MOVETO]
        for start, corner, stop in rounded(mark.points, mark.radius):
            points += [start, corner, stop]
            codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
        return Path([*points, mark.points[-1]], [*codes, Path.LINETO])
    if isinstance(mark, Polygon):
        return Path([*mark.points, mark.points[0]], closed=True)
    x, y, right, low = mark.x, mark.y, mark.x + mark.width, mark.y + mark.height
    if not mark.radius:
        return Path([(x, y), (right, y), (right, low), (x, low), (x, y)], closed=True)
    middle = x + mark.width / 2
    ring = [(middle, y), (right, y), (right, low), (x, low), (x, y), (middle, y)]
    points, codes = [ring[0]], [Path.MOVETO]
    for start, corner, stop in rounded(ring, mark.radius):
        points += [start, corner, stop]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return Path([*points, ring[0]], [*codes, Path.CLOSEPOLY])
