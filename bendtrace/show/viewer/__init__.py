"""The viewer's HTML: everything is in one file, and it loads nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import re
from collections.abc import Hashable, Iterable
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.log.entries import LayerEntry, ModuleEntry, ParameterUse, Source, number_text
from bendtrace.log.run_log import RunLog
from bendtrace.python.sites import path_text
from bendtrace.show.paint import FILLS, STROKES

if TYPE_CHECKING:
    from bendtrace.debug.stepping import SteppedRun

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
    return step_html(history, None, flops=flops)


def step_html(history: RunLog, stepped: dict[str, Any] | None, *, flops: bool = True) -> str:
    """Return a run as one HTML file, with the visible state at events of a stepped run."""
    if flops and any(entry.flop_count is None for entry in history.entries):
        history._count_flops()
    kinds = ("input", "output", "state", "number", "decision", "module")
    colours = (f"--{kind}: {FILLS[kind]}; --{kind}-border: {STROKES[kind]};" for kind in kinds)
    style, script = f":root {{ {' '.join(colours)} }}\n" + _file_text("style.css"), _script()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    fields = {
        "title": escape(history.name),
        "policy": f"{policy}; base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": _json(viewer_data(history, stepped)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], _file_text("page.html"))


def viewer_frame(
    history: RunLog | SteppedRun, *, height: int = 600, most: int = 3_000_000
) -> str | None:
    """Return the viewer as a frame for a notebook's output.

    Floating point operations are shown if they have been counted already. The variables of a
    stepped run take at most a tenth of the characters. None for a run that needs more than `most`,
    as notebooks store them in their file.
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
def _file_text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    parts = "\n".join(_file_text(name) for name in _SCRIPTS)
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


# The data of the viewer, as plain values ready for JSON.

_FIRST = 8  # values that are shown as they are
_BINS = 24


def activation_data(contents: Any) -> dict[str, Any] | None:
    """Describe a saved activation: range, mean, spread, first values and a histogram.

    Other values than dense tensors of numbers are described by their printed form. Statistics are
    of the finite values, and are texts, so that nan and infinities can be represented.

    Example:
        >>> import torch
        >>> found = activation_data(torch.tensor([1.0, 2.0, 3.0, float("nan")]))
        >>> found["mean"], found["nan"], found["first"]
        ('2', 1, ['1', '2', '3', 'nan'])
    """
    if contents is None:
        return None
    if not isinstance(contents, Tensor):
        return {"text": _cut(repr(contents), 400), "type": type(contents).__name__}
    data = {"shape": tuple(contents.shape), "dtype": str(contents.dtype).removeprefix("torch.")}
    if contents.layout is not torch.strided or contents.is_quantized or contents.is_nested:
        return {**data, "text": _cut(repr(contents), 400)}
    if contents.is_meta or not contents.numel():
        return data
    with torch.no_grad():
        flat = contents.detach().reshape(-1)
        first = [_json_number(value) for value in flat[:_FIRST].tolist()]
        return {**data, "first": first, **_statistics(flat)}


def _statistics(flat: Tensor) -> dict[str, Any]:
    if flat.is_complex():
        flat = flat.abs()
    # Wide enough for a sum of any dtype; what is double stays double.
    values = flat if flat.dtype is torch.float64 else flat.float()
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    counts: dict[str, Any] = {"zeros": int((values == 0).sum()), "nan": nan, "inf": inf}
    # An index by a mask starts all threads, also for ten numbers, and so does `histc`.
    finite = values[values.isfinite()] if nan or inf else values
    if not finite.numel():
        return counts
    low, high = finite.aminmax()
    found = {"min": low, "max": high, "mean": finite.mean(), "std": finite.std(correction=0)}
    counts |= {name: _json_number(value.item()) for name, value in found.items()}
    if bool(low < high):  # how many are in each bin, as `torch.histc` counts (`test_viewer.py`)
        places = finite.sub(low).mul_(_BINS).div_(high - low).long().clamp_(0, _BINS - 1)
        counts["bins"] = places.bincount(minlength=_BINS).tolist()
    return counts


def _json_number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)


_AROUND = 4  # lines of source shown before and after the one that something happened in
_LONGEST = 1000  # letters of a text

_Row = TypeVar("_Row", bound=Hashable)


def viewer_data(history: RunLog, stepped: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all data that the viewer shows of a run.

    Entries, modules, states, sources and files refer to each other by their positions in the lists;
    empty fields are left out.
    """
    shared = _SharedParts(history)
    entries = [shared.entry(entry) for entry in history.entries]
    modules = [shared.module(call) for call in history.modules]
    steps = [
        shared.step(step, label)
        for step, label in zip(history.flow_steps, history.step_labels, strict=True)
    ]
    seen = {} if stepped is None else {"stepped": shared.stepped(stepped)}
    files = _Table[str]()
    sources = [_source_data(source, files) for source in shared.sources.rows]
    wanted = [
        (source["file"], source["line"], source.get("statement") or source.get("text", ""))
        for source in sources
    ]
    return {
        "name": history.name,
        # As text: the numbers of JavaScript have 53 bits.
        "seed": "" if history.seed is None else str(history.seed),
        "time": history.time,
        "entries": entries,
        "modules": modules,
        "steps": steps,
        "states": [_state_data(use) for use in shared.states.rows],
        "sources": sources,
        "files": _lines_around(files.rows, wanted),
        **seen,
    }


class _Table(Generic[_Row]):
    """Rows that several things share, each kept once."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._numbers: dict[_Row, int] = {}

    def number(self, row: _Row) -> int:
        """Return the position of a row, which is added if it is new."""
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


class _SharedParts:
    """Serialises entries, calls and steps, with shared parts stored once."""

    def __init__(self, history: RunLog) -> None:
        self._entries = {entry.label: number for number, entry in enumerate(history.entries)}
        self._calls = {call.label: number for number, call in enumerate(history.modules)}
        self.states = _Table[ParameterUse]()
        self.sources = _Table[Source]()

    def entry(self, entry: LayerEntry) -> dict[str, Any]:
        is_number = entry.shape is None
        return _without_empty(
            label=entry.label,
            name=entry.name,
            short=entry.short_name,
            kind=entry.kind,
            type=entry.layer_type,
            number=entry.pass_number if entry.passes > 1 else None,
            passes=entry.passes if entry.passes > 1 else None,
            ordinal=entry.ordinal,
            op=entry.index,
            node=entry.node,
            path=entry.node_path,
            element=".".join(map(str, entry.element)),
            shape=entry.shape,
            dtype=None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            device=None if entry.device is None else str(entry.device),
            bytes=entry.nbytes or None,
            value=_cut(number_text(entry.value)) if is_number else None,
            parents=self._numbers(self._entries, entry.parents),
            states=[self.states.number(use) for use in entry.state],
            function=entry.function,
            target=entry.target,
            arguments=_cut(entry.arguments),
            grad=entry.grad_fn,
            inplace=entry.inplace,
            module=entry.module,
            call=self._calls.get(entry.scopes[-1]) if entry.scopes else None,
            gives=self._numbers(self._calls, entry.output_of),
            source=self._source(entry.source),
            flow=list(entry.flow),
            time=entry.time,
            flops=entry.flop_count,
            saved=activation_data(entry.tensor_contents),
            unsaved=entry.unsaved,
            gradient=activation_data(entry.grad_contents),
        )

    def module(self, call: ModuleEntry) -> dict[str, Any]:
        return _without_empty(
            label=call.label,
            name=call.name,
            number=call.pass_number if call.passes > 1 else None,
            passes=call.passes if call.passes > 1 else None,
            type=call.class_name,
            parent=self._calls.get(call.parent),
            parameters=call.parameters or None,
            training=call.training,
            inputs=self._numbers(self._entries, call.inputs),
            outputs=self._numbers(self._entries, call.outputs),
            source=self._source(call.source),
            flow=list(call.flow),
        )

    def step(self, step: FlowStep, label: str) -> dict[str, Any]:
        loop = step if isinstance(step, LoopFlowStep) else None
        file, line, function = step.file, step.line, step.place.function
        text = _cut(step.text)
        return _without_empty(
            step=type(step).__name__.removesuffix("FlowStep").lower(),
            kind=step.kind,
            text=text,
            value=_cut(number_text(step.value), 80),
            entry=self._entries.get(label),
            module=step.module_path,
            iteration=list(step.iteration),
            bound=None if loop is None else loop.bound,
            iterations=None if loop is None else loop.iterations,
            source=self._source(Source(file, line, function, text, "")),
        )

    def stepped(self, stepped: dict[str, Any]) -> dict[str, Any]:
        """Return the visible states of a run, with positions in place of sources."""

        def numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                _without_empty(**{**row, "source": self._source(row.get("source"))}) for row in rows
            ]

        sides = [{**side, "events": numbered(side["events"])} for side in stepped["sides"]]
        return {
            **stepped,
            "events": numbered(stepped["events"]),
            "frames": numbered(stepped["frames"]),
            "sides": sides,
        }

    def _source(self, source: Source | None) -> int | None:
        return None if source is None else self.sources.number(source)

    @staticmethod
    def _numbers(places: dict[str, int], labels: Iterable[str]) -> list[int]:
        return [places[label] for label in labels if label in places]


def _without_empty(**values: Any) -> dict[str, Any]:
    """Leave out None, False and empty values, but not zero and the shape of a scalar."""
    return {key: value for key, value in values.items() if value or type(value) in (int, tuple)}


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _state_data(use: ParameterUse) -> dict[str, Any]:
    return _without_empty(
        name=use.name,
        shape=use.shape,
        count=use.numel,
        bytes=use.nbytes,
        parameter=use.is_parameter,
        trainable=use.trainable,
    )


def _source_data(source: Source, files: _Table[str]) -> dict[str, Any]:
    return _without_empty(
        file=files.number(source.file),
        line=source.line,
        function=source.function,
        text=_cut(source.text),
        statement=_cut(source.statement),
    )


def _lines_around(paths: list[str], wanted: Iterable[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Read the lines around some places, each once.

    A file may have changed since the run, or be another one on this machine: if the line itself
    differs from the recorded one, the lines around it are not shown.
    """
    lines: list[dict[int, str]] = [{} for _ in paths]
    for number, line, code in wanted:
        read = linecache.getlines(paths[number])
        if not 1 <= line <= len(read) or not _may_be_source(read[line - 1], code):
            continue
        for near in range(max(1, line - _AROUND), min(len(read), line + _AROUND) + 1):
            lines[number][near] = _cut(read[near - 1].rstrip(), 300)
    return [
        {"path": path_text(path), "lines": found} for path, found in zip(paths, lines, strict=True)
    ]


def _may_be_source(line: str, code: str) -> bool:
    """Return whether a line of a file can be the one that a text came from."""
    line, code = (" ".join(text.split()) for text in (line, code))
    return bool(line and code) and (code in line or line in code or code.split()[0] in line)
