"""The report of a difference: many entries in few lines, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING

from bendtrace._lazy import tabulate
from bendtrace._places import place_text
from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, counted, listed, number_text
from bendtrace.view.diff.changes import FlowChange, LayerChange, ModuleChange, loop_text
from bendtrace.view.diff.matching import RunIndex

if TYPE_CHECKING:
    from bendtrace.view.diff.difference import Difference


@dataclass
class Row:
    """Entries that share a line.

    Attributes:
        what: the label of one entry, the passes of several, or a module.
        shape: the shape of their values, if it is the same for all.
        module: the module they were computed in.
        place: the place in the source, with the loop if there is one.
        entries: the entries.
    """

    what: str
    shape: str
    module: str
    place: str
    entries: list[LayerEntry] = field(default_factory=list)


def roll(entries: Sequence[LayerEntry], run: RunIndex, known_modules: Iterable[str]) -> list[Row]:
    """Group the entries that only one run has, ordered by the first of each group.

    Args:
        entries: the entries, in the order of the run.
        run: the run that has them.
        known_modules: names of the modules that the other run has as well.
    """
    known = set(known_modules)
    parts: dict[tuple[str, ...], list[LayerEntry]] = {}
    for entry in entries:
        module = _whole_module(entry, run, known)
        if module is not None:
            key: tuple[str, ...] = ("module", module)
        elif entry.passes > 1:
            key = ("passes", entry.name, str(entry.element))
        else:
            key = ("entry", entry.label)
        parts.setdefault(key, []).append(entry)
    sites: dict[tuple[str, ...], list[list[LayerEntry]]] = {}
    for key, same in parts.items():
        if key[0] == "passes":  # entries with equal counts in one loop share a line
            loop = _loop_around(same[0], run)
            place = _loop_place(loop) if loop is not None else same[0].module
            key = ("passes", numbers_text(entry.pass_number for entry in same), place)
        sites.setdefault(key, []).append(same)
    return _alike([_group(key[0], key[1], same, run) for key, same in sites.items()])


def _group(kind: str, name: str, sites: list[list[LayerEntry]], run: RunIndex) -> Row:
    """Return one line for entries.

    Args:
        kind: "entry" for one, "passes" for those of several sites, or "module" for all in one.
        name: the label, the numbers of the passes, or the module.
        sites: the entries of each site.
        run: the run that has them.
    """
    entries = [entry for site in sites for entry in site]
    first = entries[0]
    if kind == "entry":
        return Row(name, _shape(first), first.module, _place(first), entries)
    if kind == "module":
        source = next((call.source for call in run.modules.get(name, ()) if call.source), None)
        what = f"module {name} ({run.classes.get(name, '')}): {counted_entries(entries)}"
        place = "" if source is None else place_text(source.file, source.line)
        return Row(what, _shape(entries[-1]), name, place, entries)
    several = "es" * (len(sites[0]) != 1)
    what = f"pass{several} {name} of {listed([site[0].name for site in sites], _NAMED)}"
    loop = _loop_around(first, run)
    place = _loop_place(loop) if loop is not None else _place(first)
    return Row(what, _common(map(_shape, entries)), _common(e.module for e in entries), place,
                 entries)  # fmt: skip


_NAMED = 3


def _common(texts: Iterable[str]) -> str:
    """Return the common value of all texts, or ""."""
    found = set(texts)
    return found.pop() if len(found) == 1 else ""


def _alike(groups: list[Row]) -> list[Row]:
    """Merge lines that are equal in modules whose names differ only in numbers."""
    first: dict[tuple[object, ...], Row] = {}
    often: Counter[tuple[object, ...]] = Counter()
    for group in groups:
        entry = group.entries[0]
        name = unnumbered(entry.name) if entry.kind == "state" else entry.layer_type
        key: tuple[object, ...] = (
            entry.kind, name, len(group.entries), group.shape, unnumbered(group.module), group.place
        )  # fmt: skip
        if not group.module and entry.kind != "state":
            key = (id(group),)
        often[key] += 1
        if first.setdefault(key, group) is not group:
            first[key].entries += group.entries
    for key, group in first.items():
        if often[key] > 1:
            group.what += f" and {often[key] - 1} alike"
            group.module = unnumbered(group.module)
    return list(first.values())


def unnumbered(name: str) -> str:
    """Replace the numbers in the name of a module: `h.*.attn`."""
    return re.sub(r"\d+", "*", name)


def roll_flow(changes: Sequence[FlowChange]) -> list[tuple[str, ...]]:
    """Report changes of the flow: kind, source, place, module, iteration, how often, a and b.

    Equal changes in several iterations, or in modules whose names differ only in numbers, share a
    line.
    """
    rows: dict[tuple[str, ...], list[FlowChange]] = {}
    # Steps of only one run follow from the others.
    for change in sorted(changes, key=lambda change: change.kind in ("removed", "added")):
        step = change.step
        values = [change.value_in(side) for side in (change.a, change.b)]
        if change.kind in ("removed", "added"):
            values = ["" if side is None else "only" for side in (change.a, change.b)]
        place = place_text(step.file, step.line)
        key = (change.kind, loop_text(step), place, unnumbered(step.module_path), *values)
        rows.setdefault(key, []).append(change)
    told: list[tuple[str, ...]] = []
    for (kind, text, place, module, a, b), same in rows.items():
        step = same[0].step
        alone = len(same) == 1
        told.append((
            kind if kind not in ("removed", "added") else "", text, place,
            step.module_path if alone else module,
            ".".join(map(str, step.iteration)) if alone else "",
            "" if alone else str(len(same)), a, b,
        ))  # fmt: skip
    return told


def roll_changes(changes: Sequence[LayerChange]) -> list[tuple[str, str, str]]:
    """Report changes as (label in a, label in b, differences), with the passes of a place merged.

    Passes with the same differences share a line, that of the first of them; so do modules with the
    same differences whose names differ only in numbers.
    """
    rows: dict[tuple[object, ...], list[LayerChange]] = {}
    for change in changes:
        shapes = tuple(sorted((key, str(pair)) for key, pair in change.aspects.items()
                              if key not in ("parents", "arguments")))  # fmt: skip
        key = (change.a.name, change.a.element, change.b.name, change.what, shapes)
        rows.setdefault(key, []).append(change)
    told: dict[tuple[object, ...], list[str]] = {}
    often: Counter[tuple[object, ...]] = Counter()
    for same in rows.values():
        first, text = same[0], str(same[0])
        labels = [first.a.label, first.b.label]
        if len(same) > 1:
            text += f" (pass {first.a.pass_number})"
            labels = [
                f"{first.a.name}:{numbers_text(change.a.pass_number for change in same)}",
                f"{first.b.name}:{numbers_text(change.b.pass_number for change in same)}",
            ]
        entry = first.a
        name = unnumbered(entry.name) if entry.kind == "state" else entry.layer_type
        # What is in no module has nothing to be repeated by.
        alone = labels[0] if not entry.module and entry.kind != "state" else ""
        alike = (entry.kind, name, unnumbered(entry.module), str(entry.source), text, alone)
        often[alike] += 1
        told.setdefault(alike, [*labels, text])
    return [(a + (f" and {often[key] - 1} alike" if often[key] > 1 else ""), b, text)
            for key, (a, b, text) in told.items()]  # fmt: skip


def roll_modules(changes: Sequence[ModuleChange]) -> list[str]:
    """Report changes of modules; one that applies to a module and all inside it takes one line."""
    told: list[str] = []
    inside = Counter[int]()
    alike = Counter[int]()
    heads: dict[tuple[str, str], int] = {}
    for change in changes:
        head = _head(change, heads)
        if head is not None:
            inside[head] += 1
            continue
        if change.kind in ("training", "class"):
            same = (change.kind, f"{change.before} {change.after}")
            if same in heads:
                alike[heads[same]] += 1
                continue
            heads[same] = len(told)
        heads[change.kind, change.name] = len(told)
        if change.kind == "renamed":
            heads["renamed", f"{change.before} {change.after}"] = len(told)
        told.append(str(change))
    for n, text in enumerate(told):
        if inside[n]:
            told[n] = f"{text}, with {counted(inside[n], 'module')} inside"
        if alike[n]:
            told[n] = f"{text}, and so in {counted(alike[n], 'more module')}"
    return told


def _head(change: ModuleChange, heads: dict[tuple[str, str], int]) -> int | None:
    """Return the line that already reports a change."""
    if change.kind in ("added", "removed"):
        parts = change.name.split(".")[:-1]
        above = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return next((heads[change.kind, name] for name in above
                     if (change.kind, name) in heads), None)  # fmt: skip
    if change.kind == "renamed":
        before, after = change.before.split("."), change.after.split(".")
        while before and after and before[-1] == after[-1]:
            before, after = before[:-1], after[:-1]
            pair = f"{'.'.join(before)} {'.'.join(after)}"
            if ("renamed", pair) in heads:
                return heads["renamed", pair]
    return None


def counted_entries(entries: Iterable[LayerEntry]) -> str:
    """Count entries by kind: "3 layers, 1 number"."""
    nouns = {"state": "parameter", "number": "number"}
    often = Counter(nouns.get(entry.kind, "layer") for entry in entries)
    parts = [counted(often[noun], noun) for noun in ("layer", "number", "parameter") if often[noun]]
    return ", ".join(parts) or "nothing"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers as ranges.

    Example:
        >>> numbers_text([1, 4, 5, 6])
        '1, 4-6'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _whole_module(entry: LayerEntry, run: RunIndex, known: set[str]) -> str | None:
    """Return the outermost module around an entry that the other run does not have."""
    for scope in entry.scopes:
        name = run.calls[scope].name if scope in run.calls else scope.rpartition(":")[0]
        if name not in known:
            return name
    if entry.kind == "state":
        parts = entry.name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name in run.modules and name not in known:
                return name
    return None


def _place(entry: LayerEntry) -> str:
    return "" if entry.source is None else place_text(entry.source.file, entry.source.line)


def _loop_around(entry: LayerEntry, run: RunIndex) -> FlowStep | None:
    for number in reversed(entry.flow):
        step = run.steps[number]
        if isinstance(step, LoopFlowStep) or step.kind == "while":
            return step
    return None


def _loop_place(loop: FlowStep) -> str:
    return f"{place_text(loop.file, loop.line)}: `{loop_text(loop)}`"


def _shape(entry: LayerEntry) -> str:
    if entry.shape is None:
        return "" if entry.value is None else number_text(entry.value)
    return str(tuple(entry.shape))


_WIDEST = 60
_WIDEST_CHANGE = 100


def difference_text(difference: Difference, limit: int | None) -> str:
    """Return the report of a difference.

    Args:
        difference: the difference to report.
        limit: the maximum number of rows of a table; None for all.
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
        sections.append(f"First difference {_first(difference)}")
    for name, headers, rows in _tables(difference):
        sections.append(f"{name}:\n{_table(headers, rows, limit)}")
    return "\n\n".join(sections)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _summary(difference: Difference) -> Iterator[str]:
    matching = difference._matching
    yield f"in both: {counted_entries(matching.a.entries[i] for i in matching.entries)}"
    for run, found in (("a", difference.removed), ("b", difference.added)):
        if found:
            yield f"only in {run}: {counted_entries(found)}"
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
        runs = " and ".join(missing)
        left.append(f"{coverage.unsaved} not saved in {runs} (save='all' saves them)")
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


def _only(groups: list[Row]) -> _Rows:
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
        lines.append(f"    ... {counted(left, 'more row')}: text(limit=None) shows all")
    return "\n".join(lines)
