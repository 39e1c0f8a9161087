"""Overlays: a number for each node, shown as its colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bendtrace._checks import did_you_mean
from bendtrace._lazy import required
from bendtrace.errors import InputError
from bendtrace.history.entries import LayerEntry
from bendtrace.view.scene import Node, Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bendtrace.history.run_log import RunLog


Overlay: TypeAlias = (
    Literal["time", "memory", "flops"] | Mapping[str, float] | Callable[[LayerEntry], float | None]
)

# The cividis scale, at equal steps: dark blue to yellow, and even for eyes that tell few colours.
_CIVIDIS = ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcaf6f",
            "#dfcb5d", "#fee838")  # fmt: skip
_AROUND_ZERO = ("#2166ac", "#f7f7f7", "#b2182b")


@dataclass(frozen=True)
class Scale:
    """The meaning of the colours in a picture.

    Attributes:
        title: the name of the quantity.
        unit: its unit, such as "s"; "" for plain numbers.
        least: the number of the first colour.
        most: the number of the last colour.
    """

    title: str
    unit: str
    least: float
    most: float

    def text(self, value: float) -> str:
        """Return a number with its unit.

        Example:
            >>> Scale("time", "s", 0.0, 1.0).text(0.00125)
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


def lay_over(scene: Scene, overlay: Overlay, history: RunLog) -> Scale:
    """Give the nodes of a scene their numbers.

    A node that represents several values gets the sum of their numbers for "time", "memory" and
    "flops"; otherwise the largest of their numbers, so that folding hides no peak.

    Args:
        scene: the scene.
        overlay: "time" (seconds), "memory" (bytes of the values), "flops", a mapping from labels,
            node paths or modules to numbers, or a function of the entry.
        history: the log of the run.

    Raises:
        InputError: the name is unknown, a key matches nothing, or no node has a number.
    """
    if isinstance(overlay, str):
        if overlay not in _MEASURES:
            raise InputError(
                'overlay= has to be "time", "memory", "flops", a mapping or a function, not '
                f"{overlay!r}"
            )
        title, unit, measure = _MEASURES[overlay]
        _fill(scene, measure, sum)
    elif isinstance(overlay, Mapping):
        title, unit = "overlay", ""
        _fill_from(scene, overlay, history)
    elif callable(overlay):
        title, unit = getattr(overlay, "__name__", "overlay"), ""
        title = "overlay" if title == "<lambda>" else title
        _fill(scene, overlay, max)
    else:
        raise InputError(
            f"overlay= has to be a name, a mapping or a function, not {type(overlay).__name__}"
        )
    values = [node.value for node in scene.root.walk() if node.value is not None]
    if not values:
        hint = ": the run was not timed, as log_forward_pass does" if overlay == "time" else ""
        raise InputError(f"no node of the picture has a number for the overlay {title!r}{hint}")
    return Scale(title, unit, min(values), max(values))


def _time(entry: LayerEntry) -> float | None:
    return entry.time if entry.kind == "op" else None


def _memory(entry: LayerEntry) -> float | None:
    return float(entry.nbytes) if entry.kind == "op" else None


def _flops(entry: LayerEntry) -> float | None:
    return entry.flops if entry.kind == "op" else None


_MEASURES: dict[str, tuple[str, str, Callable[[LayerEntry], float | None]]] = {
    "time": ("time", "s", _time),
    "memory": ("memory", "B", _memory),
    "flops": ("operations", "FLOP", _flops),
}


def _fill(
    scene: Scene,
    measure: Callable[[LayerEntry], float | None],
    together: Callable[[Iterable[float]], float],
) -> None:
    for node in scene.nodes():
        found = [_number(measure(entry), entry.label) for entry in node.entries]
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
    for key, told in numbers.items():
        number = _number(told, key)
        if number is None:
            continue
        for label in entries.get(key, ()):
            if label in scene.node_of:
                _raise(scene.node_of[label], number)
        for node in scene.root.walk():
            if not modules.get(key, set()).isdisjoint(node.modules):
                _raise(node, number)


def _raise(node: Node, number: float) -> None:
    node.value = number if node.value is None else max(node.value, number)


def _number(value: object, name: str) -> float | None:
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
    return _mixed(_CIVIDIS, part)


def color_around_zero(part: float) -> str:
    """Return the colour of a number with a sign, from -1 (blue) over 0 (white) to 1 (red).

    Example:
        >>> color_around_zero(-1.0), color_around_zero(0.0), color_around_zero(1.0)
        ('#2166ac', '#f7f7f7', '#b2182b')
    """
    return _mixed(_AROUND_ZERO, (part + 1) / 2)


def _mixed(stops: Sequence[str], part: float) -> str:
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
