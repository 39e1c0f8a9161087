"""The figure of the page, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["figure"]

_COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#00798c", "#8f5db7", "#7a7a7a", "#3f7d20", "#c06c2b")
_FONT = 'font-family="sans-serif" font-size="11"'
_WIDTH, _LEFT, _ROW = 860, 150, 22
_PANEL = _WIDTH - _LEFT - 30

# Which ways are shown of which section, in which order.
_CALLS = ("replay", "bended", "bended, inductor", "torch.compile", "make_fx", "nnsight")
_TRACING = (
    "trace, nothing saved", "trace, all saved", "torchlens", "torch.fx", "make_fx", "torch.export",
)  # fmt: skip
_LINES = (
    ("ops in a loop", "trace"), ("ops in a loop", "replay"), ("ops in a chain", "trace"),
    ("traces by inputs", "recording all"), ("traces by values", "recording all"),
    ("traces by inputs", "calling all"), ("data guards", "trace"), ("input guards", "guard check"),
)  # fmt: skip

Data = Mapping[str, Any]


def figure(sections: Mapping[str, Any]) -> str:
    """Return a picture of calls, tracing and growth, as far as they were measured."""
    panels: list[Callable[[float], tuple[str, float]]] = []
    if "calls" in sections:
        cells = sections["calls"].get("1") or next(iter(sections["calls"].values()))
        panels.append(
            lambda top: _dots(
                "A call, relative to eager (left is faster)", cells, _CALLS, (0.125, 8.0), 2.0, top
            )
        )
    if "tracing" in sections:
        times = sections["tracing"]["times"]
        panels.append(
            lambda top: _dots(
                "Getting a graph or a log, relative to eager", times, _TRACING, (0.1, 5000.0),
                10.0, top,
            )
        )  # fmt: skip
    if "growth" in sections:
        panels.append(lambda top: _curves("Growth: seconds", sections["growth"], top))
    parts, height = [], 10.0
    for panel in panels:
        part, below = panel(height)
        parts.append(part)
        height = below + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH} {height:.0f}" {_FONT}>'
    )
    back = f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


class _Scale:
    """Where values stand on a logarithmic axis."""

    def __init__(self, low: float, high: float, start: float, length: float) -> None:
        self.low, self.high = low, high
        self._start, self._length = start, length

    def at(self, value: float) -> float:
        """Return the place of a value; beyond the ends, that of the end."""
        kept = min(max(value, self.low), self.high)
        share = math.log(kept / self.low) / math.log(self.high / self.low)
        return self._start + share * self._length


def _dots(
    title: str, cells: Data, ways: Sequence[str], ends: tuple[float, float], base: float, top: float
) -> tuple[str, float]:
    shown = [way for way in ways if any("median" in one.get(way, {}) for one in cells.values())]
    colours = dict(zip(shown, _COLOURS, strict=False))
    parts, top = _head(title, colours, top)
    scale = _Scale(*ends, _LEFT, _PANEL)
    bottom = top + _ROW * len(cells)
    parts += _axis(scale, base, top, bottom, lambda value: f"{value:g}x")
    one = scale.at(1.0)
    parts.append(_line(one, top, one, bottom, "#333", 1.5))
    for row, (name, found) in enumerate(cells.items()):
        middle = top + _ROW * (row + 0.5)
        parts.append(_text(_LEFT - 8, middle + 4, name, "end"))
        for number, way in enumerate(shown):
            relative = found.get(way, {}).get("relative")
            if relative is None:
                continue
            y = middle + (number - (len(shown) - 1) / 2) * (_ROW - 8) / max(1, len(shown))
            low, high = scale.at(relative["low"]), scale.at(relative["high"])
            parts.append(_line(low, y, high, y, colours[way], 1.2))
            said = escape(f"{name}, {way}: {relative['median']:.2f}x")
            parts.append(
                f'<circle cx="{scale.at(relative["median"]):.1f}" cy="{y:.1f}" r="3.2" '
                f'fill="{colours[way]}"><title>{said}</title></circle>'
            )
    return "\n".join(parts), bottom + 16


def _curves(title: str, growth: Data, top: float) -> tuple[str, float]:
    lines = {
        f"{what}, {kind} ({growth[kind]['exponents'][what]:.2f})":
            (growth[kind]["sizes"], growth[kind]["series"][what])
        for kind, what in _LINES if kind in growth and what in growth[kind]["series"]
    }  # fmt: skip
    colours = dict(zip(lines, _COLOURS, strict=False))
    parts, top = _head(f"{title} (and the fitted exponent)", colours, top)
    sizes = [size for found, _ in lines.values() for size in found]
    values = [max(value, 1e-7) for _, found in lines.values() for value in found]
    bottom = top + 260
    across = _Scale(min(sizes), max(sizes), _LEFT, _PANEL)
    up = _Scale(
        10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))),
        bottom, top - bottom,
    )  # fmt: skip
    parts += _axis(across, 10.0, top, bottom, lambda value: f"{value:,.0f}")
    for value in _ticks(up, 10.0):
        y = up.at(value)
        parts.append(_line(_LEFT, y, _LEFT + _PANEL, y, "#ddd", 1))
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g} s", "end"))
    for name, (xs, ys) in lines.items():
        points = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.8">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return "\n".join(parts), bottom + 16


def _head(title: str, colours: Mapping[str, str], top: float) -> tuple[list[str], float]:
    parts = [f'<text x="10" y="{top + 12:.0f}" font-weight="bold">{escape(title)}</text>']
    x, y = float(_LEFT), top + 30
    for name, colour in colours.items():
        width = 22 + 6.2 * len(name)
        if x + width > _WIDTH:
            x, y = float(_LEFT), y + 16
        parts.append(f'<circle cx="{x + 5:.1f}" cy="{y - 4:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 13, y, name, "start"))
        x += width
    return parts, y + 12


def _axis(
    scale: _Scale, base: float, top: float, bottom: float, said: Callable[[float], str]
) -> list[str]:
    parts = []
    for value in _ticks(scale, base):
        x = scale.at(value)
        parts.append(_line(x, top, x, bottom, "#ddd", 1))
        parts.append(_text(x, bottom + 13, said(value), "middle"))
    return parts


def _ticks(scale: _Scale, base: float) -> list[float]:
    first = math.ceil(math.log(scale.low, base) - 1e-9)
    last = math.floor(math.log(scale.high, base) + 1e-9)
    return [base**step for step in range(first, last + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
