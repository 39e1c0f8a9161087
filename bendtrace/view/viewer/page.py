"""The viewer's HTML: everything is in one file, and it loads nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Protocol

from bendtrace.history.run_log import RunLog
from bendtrace.view.drawing.paint import FILLS, STROKES
from bendtrace.view.viewer.data import viewer_data

__all__ = ["stepped_html", "viewer_frame", "viewer_html"]

# In the order in which they build on each other.
_SCRIPTS = (
    "run.js",
    "tree.js",
    "layout.js",
    "canvas.js",
    "view.js",
    "panel.js",
    "events.js",
    "search.js",
    "stepping.js",
    "controls.js",
    "main.js",
)


def viewer_html(history: RunLog, *, flops: bool = True) -> str:
    """Return a run as one HTML file for a browser.

    It shows the modules as nested boxes that open and close, the properties of each value, the
    source that computed it and the decisions of the model's Python, and steps through the run in
    order. It needs neither a server nor a network: script, style and data are in the file, and its
    content security policy forbids everything else. `#path=` and a name, as in
    `run.html#path=features.6`, opens it at a node.

    Args:
        history: a run, traced or loaded. Saved activations are shown as statistics.
        flops: whether to count floating point operations first, which takes about a millisecond for
            each op; otherwise they are shown only if they have been counted already.

    Returns:
        The text of the file, to be written as UTF-8.

    Example:
        >>> import torch, bendtrace as bt
        >>> page = bt.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).to_html()
        >>> page.startswith("<!DOCTYPE html>")
        True
    """
    return stepped_html(history, None, flops=flops)


def stepped_html(history: RunLog, stepped: dict[str, Any] | None, *, flops: bool = True) -> str:
    """Return a run as one HTML file; if it was stepped through, with what was seen at its events.

    Args:
        history: the run.
        stepped: the events, as `SteppedRun.to_html` describes them; None if there are none.
        flops: whether to count floating point operations first.
    """
    if flops and any(entry.flop_count is None for entry in history.entries):
        history._count_flops()
    style, script = _palette() + _part("style.css"), _script()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    fields = {
        "title": escape(history.name),
        "policy": f"{policy}; base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": _json(viewer_data(history, stepped)),
    }
    page = _part("page.html")
    pieces = []
    for piece in page.split("{{"):
        name, closed, rest = piece.partition("}}")
        pieces.append(fields[name] + rest if closed else piece)
    return "".join(pieces)


class Stepped(Protocol):
    """A run that was stepped through (`SteppedRun`)."""

    @property
    def name(self) -> str:
        """The name of the model."""

    def to_html(self, *, budget: int, flops: bool) -> str:
        """Return its page."""


def viewer_frame(
    history: RunLog | Stepped, *, height: int = 600, most: int = 3_000_000
) -> str | None:
    """Return the viewer as a frame for a notebook's output.

    Floating point operations are shown if they have been counted already.

    Args:
        history: a run, traced, loaded or stepped through. The variables of a stepped run take at
            most a tenth of the characters.
        height: height of the frame, in pixels.
        most: the maximum number of characters; notebooks store them in their file.

    Returns:
        An `<iframe>` that contains the whole viewer and may only run its script; None for a run
        that needs more than `most` characters.
    """
    if isinstance(history, RunLog):
        page = escape(viewer_html(history, flops=False))
    else:
        page = escape(history.to_html(budget=most // 10, flops=False))
    if len(page) > most:
        return None
    look = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"
    title = escape(f"Run of {history.name}")
    # In a `div`: IPython warns of what begins with a frame.
    return (
        f'<div><iframe title="{title}" sandbox="allow-scripts" style="{look}" srcdoc="{page}">'
        "</iframe></div>"
    )


@cache
def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _palette() -> str:
    """Return the colours of pictures as variables; the style has others for dark pages."""
    kinds = ("input", "output", "state", "number", "decision", "module")
    colours = (f"--{kind}: {FILLS[kind]}; --{kind}-border: {STROKES[kind]};" for kind in kinds)
    return f":root {{ {' '.join(colours)} }}\n"


@cache
def _script() -> str:
    parts = "\n".join(_part(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _json(value: object) -> str:
    """Return JSON that can stand in a script element: no `<`, `>`, `&` and nothing but ASCII."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
