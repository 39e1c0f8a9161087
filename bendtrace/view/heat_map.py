"""Grids of numbers as text, and as HTML with a colour for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from bendtrace._lazy import required
from bendtrace.errors import InputError
from bendtrace.view.drawing.overlay import color, color_around_zero, ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS, _MOST_COLUMNS = 40, 12


def shortened(value: float) -> str:
    """Return a number with three decimals, and `-` for nan.

    Example:
        >>> shortened(-0.0001), shortened(float("nan"))
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
    cells = [[shortened(value) for value in row[:_MOST_COLUMNS]] for row in values[:_MOST_ROWS]]
    widths = [max(map(len, column), default=0) for column in zip(heads, *cells, strict=True)]
    shown = [("", heads)] * any(heads) + list(zip(names, cells, strict=False))
    first = max(map(len, names[:_MOST_ROWS]), default=0)
    more = " ..." if len(columns) > _MOST_COLUMNS else ""
    lines = [title]
    for name, row in shown:
        told = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {name:{first}}  {told}{more}")
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
    """Return an HTML table whose cells are coloured by their numbers.

    The scale goes from dark to light; with numbers below and above zero, from blue to red.

    Args:
        title: the caption.
        columns: a name for each column.
        names: a name for each row.
        values: the numbers; nan has no colour.
        texts: the texts in the cells, in place of the numbers.

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
        for place, value in enumerate(row):
            text = shortened(value) if texts is None else str(texts[number][place])
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


def plotted(
    title: str, columns: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]
) -> Figure:
    """Return numbers as a figure of matplotlib, in the colours of `heat_map`.

    Raises:
        InputError: matplotlib is not installed.
    """
    figures = required("matplotlib.figure", "a plot", error=InputError)
    figure: Figure = figures.Figure(
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
