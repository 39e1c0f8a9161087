"""The output of the command line."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from textwrap import dedent, indent, shorten, wrap
from typing import Any

from torch import nn

from bendtrace._lazy import tabulate
from bendtrace._places import place_text
from bendtrace._trace import Trace
from bendtrace.cli.runs import Call, CommandRun
from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep
from bendtrace.history.sizes import counted, number_text

__all__ = ["as_json", "as_text"]

_INDENT = "  "
_LINES = 40  # of a section, unless all are asked for
_NARROWEST = 40


def as_json(run: CommandRun) -> str:
    """Return a run as one JSON object. Numbers that JSON cannot represent become strings."""
    return json.dumps(_finite(run.to_dict()), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def as_text(run: CommandRun, *, source: bool = False, full: bool = False, width: int = 0) -> str:
    """Return a run as text for a terminal.

    Args:
        run: the run to report.
        source: whether to start with the source of the model's forward.
        full: whether to print the graph, and every line of long sections.
        width: columns of the terminal; 0 detects it.
    """
    width = max(width or shutil.get_terminal_size((100, 24)).columns, _NARROWEST) - len(_INDENT)
    trace, steps = run.trace, run.trace.flow_steps
    flow = ["no branch, loop or index depends on the inputs"]
    if steps:
        flow = _cut(_steps(steps, width), full)
    sections = {
        "Result": [*_wrapped(_verdict(run), width), *_wrapped(repr(run.stats), width)],
        f"Flow: {counted(len(steps), 'step')}": flow,
        "Calls": list(_calls(run, width)),
        "torch.fx": _wrapped(run.fx_error or "also traces it, and is right on these inputs", width),
    }
    graph = f"Graph: {counted(len(trace.graph), 'node')}"
    if full:
        sections[graph] = list(_graph(trace, width))
    elif not source:
        sections[graph] = ["--full prints them"]
    if source:
        sections = {"Model": _source(trace.function), **sections}
    texts = [f"{head}\n{indent(chr(10).join(body), _INDENT)}" for head, body in sections.items()]
    return "\n\n".join([_headline(run), *texts])


def _headline(run: CommandRun) -> str:
    inputs = ", ".join(f"{name}: {text}" for name, text in run.calls[0].inputs.items())
    return f"{run.target}, traced on {inputs or 'no inputs'}"


def _source(function: Any) -> list[str]:
    called = type(function).forward if isinstance(function, nn.Module) else function
    return dedent(inspect.getsource(called)).rstrip().splitlines()


def _graph(trace: Trace, width: int) -> Iterator[str]:
    for line in (line.strip() for line in str(trace.graph).splitlines()[1:]):
        shorter = line.replace(", kwargs = {})", ")")
        head, args, rest = shorter.partition("(args = ")
        if len(shorter) <= width or not args:
            yield from _wrapped(shorter, width)
        else:
            yield from [*_wrapped(head + "(", width), *_indented(args[1:] + rest, width)]


def _steps(steps: FlowSteps, width: int) -> list[str]:
    rows = [
        (place_text(step.file, step.line), step.kind, step.text, _value(step),
         ".".join(map(str, step.iteration)), step.name)
        for step in steps
    ]  # fmt: skip
    headers = ("at", "kind", "source", "value", "iteration", "node")
    return _table(rows, headers, width, flexible=2, least=4)


def _value(step: FlowStep) -> str:
    if not isinstance(step, LoopFlowStep):
        return shorten(number_text(step.value), 20, placeholder="...")
    if step.iterations is None:
        return "unknown"
    bound = f" of {step.bound}" if step.bound is not None else ""
    return f"{counted(step.iterations, 'time')}{bound}"


def _calls(run: CommandRun, width: int) -> Iterator[str]:
    rows = [
        (str(number), call.given, _shapes(call), call.how, "equal" if call.equal else "DIFFERENT")
        for number, call in enumerate(run.calls, 1)
    ]
    headers = ("", "inputs", "that is", "how", "to eager")
    lines = _table(rows, headers, width, flexible=1, least=5)
    yield from lines[: len(lines) - len(rows)]
    for line, call in zip(lines[len(lines) - len(rows) :], run.calls, strict=True):
        yield line
        reason = call.mismatch
        if reason is None and call.how == "live" and run.why_live:
            reason = run.why_live[0]
        if reason is not None:
            yield from _indented(reason, width)


def _shapes(call: Call) -> str:
    return ", ".join(call.inputs.values())


def _verdict(run: CommandRun) -> str:
    same = sum(call.equal for call in run.calls)
    return f"{same} of {counted(len(run.calls), 'call')} equal to eager, bit for bit"


def _table(
    rows: Sequence[tuple[str, ...]],
    headers: tuple[str, ...],
    width: int,
    *,
    flexible: int,
    least: int,
) -> list[str]:
    """Return a table that fits.

    Args:
        rows: its cells.
        headers: names of the columns.
        width: what it has to fit into.
        flexible: the column that is cut short; it may fill what the others leave.
        least: number of columns to keep; those after them go if the flexible one needs room.
    """
    # tabulate keeps two columns between columns, and makes each two wider than its header.
    columns = zip(headers, zip(*rows, strict=True), strict=True)
    widths = [max(len(head) + 2, *map(len, cells)) + 2 for head, cells in columns]
    while len(widths) > least and sum(widths) > width + 2:
        widths.pop()
    room = max(width - sum(widths) + widths[flexible], 12)
    shown = [
        tuple(_fit(cell, room) if i == flexible else cell for i, cell in enumerate(row))
        for row in (row[: len(widths)] for row in rows)
    ]
    return tabulate.tabulate(shown, headers[: len(widths)], disable_numparse=True).splitlines()


def _fit(text: str, room: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= room else text[: room - 3] + "..."


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _indented(text: str, width: int) -> list[str]:
    return [" " * 4 + line for line in _wrapped(text, width - 4)]


def _cut(lines: list[str], full: bool) -> list[str]:
    if full or len(lines) <= _LINES:
        return lines
    return [*lines[:_LINES], f"... and {len(lines) - _LINES} more: --full shows them"]
