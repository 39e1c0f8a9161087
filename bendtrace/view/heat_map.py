"""Grids of numbers as text, and as HTML with a colour for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from bendtrace.view.drawing.overlay import color, ink

__all__ = ["heat_map", "shortened", "text_table"]

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
    """Return an HTML table whose cells are coloured by their numbers, from dark to light.

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
    finite = [value for row in values for value in row if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    lines = [f"<table><caption>{escape(title)}</caption>"]
    if any(columns):
        lines.append("<tr><th></th>" + "".join(f"<th>{escape(c)}</th>" for c in columns) + "</tr>")
    for number, (name, row) in enumerate(zip(names, values, strict=True)):
        cells = [f'<th style="text-align: left">{escape(name)}</th>']
        for place, value in enumerate(row):
            text = shortened(value) if texts is None else str(texts[number][place])
            fill = color((value - low) / span) if math.isfinite(value) else "#ffffff"
            style = f"background: {fill}; color: {ink(fill)}"
            cells.append(f'<td style="{style}" title="{value:.6g}">{escape(text)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])
