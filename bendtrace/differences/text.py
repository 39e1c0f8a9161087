"""The report of a difference, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from bendtrace._later import tabulate
from bendtrace.differences.changes import FlowChange
from bendtrace.differences.rolling import (
    Group,
    counted,
    roll,
    roll_changes,
    roll_flow,
    roll_modules,
)

if TYPE_CHECKING:
    from bendtrace.differences.difference import Difference

__all__ = ["difference_text"]

_WIDEST = 60
_WIDEST_CHANGE = 100


def difference_text(difference: Difference, limit: int | None) -> str:
    """Return the report of a difference.

    Args:
        difference: what to tell.
        limit: how many rows a table has at most; None for all of them.
    """
    names = [difference.a.name, difference.b.name]
    title = names[0] if names[0] == names[1] else f"a: {names[0]}, b: {names[1]}"
    if not difference:
        return "\n".join([f"{title}: the two runs are the same", *_indented(_values(difference))])
    found = "the two runs differ"
    if difference.first is None and all(m.kind == "renamed" for m in difference.modules):
        found = "the two runs do the same, in modules of other names"
    sections = ["\n".join([f"{title}: {found}", *_indented(_summary(difference))])]
    if difference.first is not None:
        sections.append(f"First part {_first(difference)}")
    for name, headers, rows in _tables(difference):
        sections.append(f"{name}:\n{_table(headers, rows, limit)}")
    return "\n\n".join(sections)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _summary(difference: Difference) -> Iterator[str]:
    matching = difference._matching
    yield f"in both: {counted(matching.a.entries[i] for i in matching.entries)}"
    for run, found in (("a", difference.removed), ("b", difference.added)):
        if found:
            yield f"only in {run}: {counted(found)}"
    if difference.changed:
        often = Counter(name for change in difference.changed for name in change.what)
        parts = ", ".join(f"{count} in {name}" for name, count in often.items())
        yield f"changed: {len(difference.changed)} ({parts})"
    if difference.flow:
        yield f"flow: {', '.join(_flow_counts(difference.flow))}"
    if difference.modules:
        kinds = Counter(change.kind for change in difference.modules)
        words = {"class": "of another class", "calls": "called more or less often",
                 "training": "in another mode", "parameters": "with other parameters"}  # fmt: skip
        yield f"modules: {', '.join(f'{n} {words.get(kind, kind)}' for kind, n in kinds.items())}"
    yield from _values(difference)


def _flow_counts(flow: Sequence[FlowChange]) -> Iterator[str]:
    often = Counter[str](change.kind for change in flow)
    words = {
        "side": ("condition went the other way", "conditions went the other way"),
        "iterations": ("loop ran more or less often", "loops ran more or less often"),
        "index": ("other item chosen", "other items chosen"),
        "value": ("other number read", "other numbers read"),
        "removed": ("step only in a", "steps only in a"),
        "added": ("step only in b", "steps only in b"),
    }
    for kind, (one, several) in words.items():
        if often[kind]:
            yield f"{often[kind]} {one if often[kind] == 1 else several}"


def _values(difference: Difference) -> Iterator[str]:
    coverage = difference.coverage
    bits = "bit for bit" if not (difference.rtol or difference.atol) else (
        f"within rtol={difference.rtol:g}, atol={difference.atol:g}")  # fmt: skip
    if coverage.compared:
        yield f"activations: {coverage.compared} compared {bits}"
    left = []
    if coverage.unsaved:
        missing = [run for run, often in (("a", coverage.unsaved_a), ("b", coverage.unsaved_b))
                   if often]  # fmt: skip
        left.append(f"{coverage.unsaved} not saved in {' and '.join(missing)} (save='all' does)")
    if coverage.reshaped:
        left.append(f"{coverage.reshaped} of another shape")
    if left:
        yield f"activations not compared: {', '.join(left)}"


def _first(difference: Difference) -> str:
    first = difference.first
    assert first is not None
    if first.kind == "layers":
        return first.text
    return f"at {first.text}"


_Rows = list[tuple[str, ...]]


def _tables(difference: Difference) -> Iterator[tuple[str, tuple[str, ...], _Rows]]:
    modules: _Rows = [(text,) for text in roll_modules(difference.modules)]
    if modules:
        yield "Modules", (), modules
    flow: _Rows = [(kind, shorten(text, _WIDEST, placeholder=" ..."), *more)
                   for kind, text, *more in roll_flow(difference.flow)]  # fmt: skip
    if flow:
        yield "Flow", ("", "source", "at", "module", "iteration", "times", "a", "b"), flow
    matching = difference._matching
    names = matching.modules
    for name, entries, run, known in (
        ("Only in a", difference.removed, matching.a, names.keys()),
        ("Only in b", difference.added, matching.b, names.values()),
    ):
        if entries:
            yield name, ("", "shape", "module", "at"), _only(roll(entries, run, known))
    if difference.changed:
        told = roll_changes(difference.changed)
        renamed = any(change.a.label != change.b.label for change in difference.changed)
        rows: _Rows = []
        for a, b, what in told:
            what = shorten(what, _WIDEST_CHANGE, placeholder=" ...")
            rows.append((a, b, what) if renamed else (a, what))
        yield "Changed", ("a", "b", "change") if renamed else ("", "change"), rows


def _only(groups: list[Group]) -> _Rows:
    return [(group.what, group.shape, group.module,
             shorten(group.place, _WIDEST, placeholder=" ...")) for group in groups]  # fmt: skip


def _table(headers: tuple[str, ...], rows: _Rows, limit: int | None) -> str:
    shown = rows if limit is None else rows[:limit]
    if headers:
        used = [i for i in range(len(headers)) if i == 0 or any(row[i] for row in rows)]
        shown = [tuple(row[i] for i in used) for row in shown]
        headers = tuple(headers[i] for i in used)
        text = tabulate.tabulate(shown, headers, disable_numparse=True)
    else:
        text = "\n".join(" ".join(row) for row in shown)
    lines = [f"    {line}".rstrip() for line in text.splitlines()]
    left = len(rows) - len(shown)
    if left:
        lines.append(f"    ... {left} more row{'s' * (left != 1)}: text(limit=None) has them all")
    return "\n".join(lines)
