"""The report of a difference: many entries in few lines, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep
from bendtrace.log.entries import LayerEntry, ModuleEntry, counted, number_text
from bendtrace.python.checks import listed
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import place_text
from bendtrace.show.canvas import Canvas, Caption, Mark, Marks, Polygon, Rectangle, cut
from bendtrace.show.matching import FlowChange, LayerChange, ModuleChange, RunIndex, loop_text
from bendtrace.show.paint import figure, paint
from bendtrace.show.picture import Picture
from bendtrace.show.scene import Arrow, Scene, SceneNode, scene

if TYPE_CHECKING:
    from bendtrace.log.run_log import RunLog
    from bendtrace.show.difference import Difference

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


@dataclass
class SharedLine:
    """Entries that share a line."""

    what: str  # the label of one entry, the passes of several, or a module
    shape: str  # the shape of their values, if it is the same for all
    module: str  # the module they were computed in
    place: str  # the place in the source, with the loop if there is one
    entries: list[LayerEntry] = field(default_factory=list)


def group_entries(
    entries: Sequence[LayerEntry], run: RunIndex, other_modules: Iterable[str]
) -> list[SharedLine]:
    """Group the entries that only one run has, ordered by the first of each group."""
    modules = set(other_modules)

    def part_of(entry: LayerEntry) -> tuple[str, ...]:
        module = _whole_module(entry, run, modules)
        if module is not None:
            return "module", module
        if entry.passes > 1:
            return "passes", entry.name, str(entry.element)
        return "entry", entry.label

    def line_of(part: tuple[tuple[str, ...], list[LayerEntry]]) -> tuple[str, ...]:
        key, same = part
        if key[0] != "passes":
            return key
        # Entries with equal counts in one loop share a line.
        place = _loop_place(same[0], run) or same[0].module
        return "passes", numbers_text(entry.pass_number for entry in same), place

    lines = _grouped(_grouped(entries, part_of).items(), line_of)
    return _merge_numbered([
        _group(key[0], key[1], [same for _, same in parts], run) for key, parts in lines.items()
    ])  # fmt: skip


def _grouped(items: Iterable[_Item], key_of: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return items by a key, ordered by the first of each group."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key_of(item), []).append(item)
    return found


def _group(kind: str, name: str, sites: list[list[LayerEntry]], run: RunIndex) -> SharedLine:
    """Return one line for entries."""
    entries = [entry for site in sites for entry in site]
    first = entries[0]
    if kind == "entry":
        return SharedLine(name, _shape_of_entry(first), first.module, _source_place(first), entries)
    if kind == "module":
        source = next((call.source for call in run.modules.get(name, ()) if call.source), None)
        what = f"module {name} ({run.classes.get(name, '')}): {count_entries(entries)}"
        place = "" if source is None else place_text(source.file, source.line)
        return SharedLine(what, _shape_of_entry(entries[-1]), name, place, entries)
    several = "es" * (len(sites[0]) != 1)
    what = f"pass{several} {name} of {listed([site[0].name for site in sites], _NAMED)}"
    place = _loop_place(first, run) or _source_place(first)
    shape, module = (
        _common(map(_shape_of_entry, entries)),
        _common(entry.module for entry in entries),
    )
    return SharedLine(what, shape, module, place, entries)


_NAMED = 3


def _common(texts: Iterable[str]) -> str:
    """Return the common value of all texts, or ""."""
    found = set(texts)
    return found.pop() if len(found) == 1 else ""


def _merge_numbered(groups: list[SharedLine]) -> list[SharedLine]:
    """Merge lines that are equal in modules whose names differ only in numbers."""

    def key_of(row: SharedLine) -> tuple[object, ...]:
        kind = _repeated_entry(row.entries[0], row.module)
        return (*kind, len(row.entries), row.shape, row.place) if kind else (id(row),)

    found = []
    for row, *more in _grouped(groups, key_of).values():
        if more:
            row.what += f" and {len(more)} alike"
            row.module = without_numbers(row.module)
            row.entries = [entry for one in (row, *more) for entry in one.entries]
        found.append(row)
    return found


def _repeated_entry(entry: LayerEntry, module: str) -> tuple[str, ...]:
    """Return what modules repeat of an entry; () for what is in no module, which none repeats."""
    if entry.kind == "state":
        return "state", without_numbers(entry.name), without_numbers(module)
    return (entry.kind, entry.layer_type, without_numbers(module)) if module else ()


def without_numbers(name: str) -> str:
    """Replace the numbers in the name of a module: `h.*.attn`."""
    return re.sub(r"\d+", "*", name)


def roll_flow(changes: Sequence[FlowChange]) -> list[tuple[str, ...]]:
    """Report changes of the flow: kind, source, place, module, iteration, how often, a and b.

    Equal changes in several iterations, or in modules whose names differ only in numbers, share a
    line.
    """

    def key_of(change: FlowChange) -> tuple[str, ...]:
        step, sides = change.step, (change.a, change.b)
        if change.kind in ("removed", "added"):
            kind, values = "", ["" if side is None else "only" for side in sides]
        else:
            kind, values = change.kind, [change.value_in(side) for side in sides]
        place = place_text(step.file, step.line)
        return kind, loop_text(step), place, without_numbers(step.module_path), *values

    # Steps of only one run follow from the others.
    ordered = sorted(changes, key=lambda change: change.kind in ("removed", "added"))
    found: list[tuple[str, ...]] = []
    for (kind, text, place, module, a, b), same in _grouped(ordered, key_of).items():
        step = same[0].step
        alone = len(same) == 1
        found.append((
            kind, text, place, step.module_path if alone else module,
            ".".join(map(str, step.iteration)) if alone else "",
            "" if alone else str(len(same)), a, b,
        ))  # fmt: skip
    return found


def roll_changes(changes: Sequence[LayerChange]) -> list[tuple[str, str, str]]:
    """Report changes as (label in a, label in b, differences), with the passes of a place merged.

    Passes with the same differences share the line of the first of them; so do modules with the
    same differences whose names differ only in numbers.
    """

    def key_of(change: LayerChange) -> tuple[object, ...]:
        shapes = tuple(sorted((key, str(pair)) for key, pair in change.aspects.items()
                              if key not in ("parents", "arguments")))  # fmt: skip
        return change.a.name, change.a.element, change.b.name, change.what, shapes

    rows = []
    for same in _grouped(changes, key_of).values():
        first, text = same[0], str(same[0])
        a, b = first.a.label, first.b.label
        if len(same) > 1:
            text += f" (pass {first.a.pass_number})"
            a = f"{first.a.name}:{numbers_text(change.a.pass_number for change in same)}"
            b = f"{first.b.name}:{numbers_text(change.b.pass_number for change in same)}"
        kind = _repeated_entry(first.a, first.a.module)
        rows.append(((kind or a, str(first.a.source), text), a, b, text))
    return [(a + (f" and {len(more)} alike" if more else ""), b, text)
            for (_, a, b, text), *more in _grouped(rows, itemgetter(0)).values()]  # fmt: skip


def roll_modules(changes: Sequence[ModuleChange]) -> list[str]:
    """Report changes of modules; one that applies to a module and all inside it takes one line."""
    lines: list[str] = []
    inside = Counter[int]()
    alike = Counter[int]()
    heads: dict[tuple[str, str], int] = {}
    for change in changes:
        head = _reported_line(change, heads)
        if head is not None:
            inside[head] += 1
            continue
        if change.kind in ("training", "class"):
            same = (change.kind, f"{change.before} {change.after}")
            if same in heads:
                alike[heads[same]] += 1
                continue
            heads[same] = len(lines)
        heads[change.kind, change.name] = len(lines)
        if change.kind == "renamed":
            heads["renamed", f"{change.before} {change.after}"] = len(lines)
        lines.append(str(change))
    for n, text in enumerate(lines):
        if inside[n]:
            lines[n] = f"{text}, with {counted(inside[n], 'module')} inside"
        if alike[n]:
            lines[n] = f"{text}, and so in {counted(alike[n], 'more module')}"
    return lines


def _reported_line(change: ModuleChange, heads: dict[tuple[str, str], int]) -> int | None:
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


def count_entries(entries: Iterable[LayerEntry]) -> str:
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


def _whole_module(entry: LayerEntry, run: RunIndex, modules: set[str]) -> str | None:
    """Return the outermost module around an entry that the other run does not have."""
    for scope in entry.scopes:
        name = run.calls[scope].name if scope in run.calls else scope.rpartition(":")[0]
        if name not in modules:
            return name
    if entry.kind == "state":
        parts = entry.name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name in run.modules and name not in modules:
                return name
    return None


def _source_place(entry: LayerEntry) -> str:
    return "" if entry.source is None else place_text(entry.source.file, entry.source.line)


def _loop_place(entry: LayerEntry, run: RunIndex) -> str:
    """Return the place of the innermost loop around an entry; "" if there is none."""
    for number in reversed(entry.flow):
        loop = run.steps[number]
        if isinstance(loop, LoopFlowStep) or loop.kind == "while":
            return f"{place_text(loop.file, loop.line)}: `{loop_text(loop)}`"
    return ""


def _shape_of_entry(entry: LayerEntry) -> str:
    if entry.shape is None:
        return "" if entry.value is None else number_text(entry.value)
    return str(tuple(entry.shape))


def alike(difference: Difference) -> str:
    """Return how far two runs without a difference are the same."""
    if difference.coverage.unsaved and not difference.coverage.compared:
        return "the same, but no activations were compared"
    return "the same"


_WIDE = 60
_WIDE_CHANGE = 100


def difference_text(difference: Difference, limit: int | None) -> str:
    """Return the report of a difference."""
    names = [difference.a.name, difference.b.name]
    title = names[0] if names[0] == names[1] else f"a: {names[0]}, b: {names[1]}"
    if not difference:
        return "\n".join(
            [f"{title}: the two runs are {alike(difference)}", *_indent(_value_rows(difference))]
        )
    found = "the two runs differ"
    if difference.first is None and all(m.kind == "renamed" for m in difference.modules):
        found = "the two runs do the same, in modules of other names"
    sections = ["\n".join([f"{title}: {found}", *_indent(_summary(difference))])]
    if difference.first is not None:
        at = "" if difference.first.kind == "layers" else "at "
        sections.append(f"First difference {at}{difference.first.text}")
    for name, headers, rows in _tables(difference):
        sections.append(f"{name}:\n{_html_table(headers, rows, limit)}")
    return "\n\n".join(sections)


def _indent(lines: Iterator[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _summary(difference: Difference) -> Iterator[str]:
    matching = difference._matching
    yield f"in both: {count_entries(matching.a.entries[i] for i in matching.entries)}"
    for run, found in (("a", difference.removed), ("b", difference.added)):
        if found:
            yield f"only in {run}: {count_entries(found)}"
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
    yield from _value_rows(difference)


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


def _value_rows(difference: Difference) -> Iterator[str]:
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


_Rows = list[tuple[str, ...]]


def _tables(difference: Difference) -> Iterator[tuple[str, tuple[str, ...], _Rows]]:
    modules: _Rows = [(text,) for text in roll_modules(difference.modules)]
    if modules:
        yield "Modules", (), modules
    flow: _Rows = [(kind, shorten(text, _WIDE, placeholder=" ..."), *more)
                   for kind, text, *more in roll_flow(difference.flow)]  # fmt: skip
    if flow:
        yield "Flow", ("", "source", "at", "module", "iteration", "times", "a", "b"), flow
    matching = difference._matching
    names = matching.modules
    for name, entries, run, seen_modules in (
        ("Only in a", difference.removed, matching.a, names.keys()),
        ("Only in b", difference.added, matching.b, names.values()),
    ):
        if entries:
            cells: _Rows = [
                (row.what, row.shape, row.module, shorten(row.place, _WIDE, placeholder=" ..."))
                for row in group_entries(entries, run, seen_modules)
            ]
            yield name, ("", "shape", "module", "at"), cells
    if difference.changed:
        changes = roll_changes(difference.changed)
        renamed = any(change.a.label != change.b.label for change in difference.changed)
        rows: _Rows = []
        for a, b, what in changes:
            what = shorten(what, _WIDE_CHANGE, placeholder=" ...")
            rows.append((a, b, what) if renamed else (a, what))
        yield "Changed", ("a", "b", "change") if renamed else ("", "change"), rows


def _html_table(headers: tuple[str, ...], rows: _Rows, limit: int | None) -> str:
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


# The picture of a difference: both runs as one log, with colours for differences.


class _Union:
    """Two runs in one log. Entries that only one of them has are named accordingly.

    Attributes:
        name: name of the model, or of both models.
        entries: all values, in the order of the first run; a value that only the second run has
            follows its predecessor there.
        modules: all calls of modules.
        flow_steps: all flow steps, with their outcomes in both runs as the value.
        step_labels: for each of them, the label of the entry with the value that it used.
        tones: "added", "removed", "changed" or "value" for entries, by label.
        notes: what changed, for entries, by label.
        step_changes: how flow steps differ, by number.
        under: entries that only one run has and that ran under a flow step of both, by the number
            of the step: their labels, and the outcome in that run.
    """

    def __init__(self, difference: Difference) -> None:
        matching = self._matching = difference._matching
        self._difference = difference
        self._a, self._b = matching.a, matching.b
        self.name = " and ".join(dict.fromkeys((difference.a.name, difference.b.name)))
        self.entries: list[LayerEntry] = []
        self.modules: list[ModuleEntry] = [*self._a.history.modules]
        self.tones: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.step_changes: dict[int, FlowChange] = {}
        self.under: dict[int, list[tuple[str, str]]] = {}
        steps_a, steps_b = self._merge_steps()
        self._labels_a = {
            entry.label: entry.label if position in matching.entries else _label_in_run(entry, "a")
            for position, entry in enumerate(self._a.entries)
        }
        self._labels_b = {
            entry.label: self._a.entries[matching.back[position]].label
            if position in matching.back
            else _label_in_run(entry, "b")
            for position, entry in enumerate(self._b.entries)
        }
        self._scopes: dict[str, str] = {}  # of b, by what they are called in the union
        self._merge_modules(steps_b)
        self._merge_entries(steps_a, steps_b)
        self.step_labels = [""] * len(self.flow_steps)
        for numbers, run, labels in (
            (steps_b, self._b, self._labels_b),
            (steps_a, self._a, self._labels_a),
        ):
            for number, label in enumerate(run.history.step_labels):
                self.step_labels[numbers[number]] = labels.get(label, "")
        self._order_modules()

    def _merge_steps(self) -> tuple[dict[int, int], dict[int, int]]:
        """Put the flow steps of both runs in one order; return their new numbers."""
        back = {j: i for i, j in self._matching.steps.items()}
        following: dict[int, list[int]] = {}
        last = -1
        for number in range(len(self._b.steps)):
            if number in back:
                last = back[number]
            else:
                following.setdefault(last, []).append(number)
        changes = {
            id(change.a): change for change in self._difference._flow if change.a is not None
        }
        only_b = {id(change.b): change for change in self._difference._flow if change.a is None}
        numbers_a: dict[int, int] = {}
        numbers_b: dict[int, int] = {}
        steps: list[FlowStep] = []
        for i in range(-1, len(self._a.steps)):
            if i >= 0:
                step = self._a.steps[i]
                change = changes.get(id(step))
                numbers_a[i] = len(steps)
                if i in self._matching.steps:
                    numbers_b[self._matching.steps[i]] = len(steps)
                if change is not None:
                    self.step_changes[len(steps)] = change
                # The number of iterations of a loop stands beside it.
                if change is not None and change.b is not None and change.kind != "iterations":
                    step = replace(step, value=_Both(change))
                steps.append(step)
            for j in following.get(i, ()):
                numbers_b[j] = len(steps)
                if id(self._b.steps[j]) in only_b:
                    self.step_changes[len(steps)] = only_b[id(self._b.steps[j])]
                steps.append(self._b.steps[j])
        self.flow_steps = FlowSteps(
            [replace(step, text=StepText.of(step.text, n)) for n, step in enumerate(steps)]
        )
        return numbers_a, numbers_b

    def _merge_modules(self, numbers_b: dict[int, int]) -> None:
        # Entries that ran in both runs show which calls are the same.
        for i, j in self._matching.entries.items():
            mine, theirs = self._a.entries[i].scopes, self._b.entries[j].scopes
            if len(mine) == len(theirs):
                for one, other in zip(mine, theirs, strict=True):
                    self._scopes.setdefault(other, one)
        names = {other: name for name, other in self._matching.modules.items()}
        taken = set(self._a.calls)
        taken_as = set(self._scopes.values())
        for call in self._b.history.modules:
            if call.label in self._scopes:
                continue
            name = names.get(call.name, call.name)
            number = call.pass_number
            same = f"{name}:{number}"
            if same in taken and same not in taken_as and call.name in names:
                self._scopes[call.label] = same  # nothing in it is in both, but it is the same call
                taken_as.add(same)
                continue
            while f"{name}:{number}" in taken:
                number += 1
            taken.add(f"{name}:{number}")
            self._scopes[call.label] = f"{name}:{number}"
            flow = tuple(numbers_b[step] for step in call.flow)
            copy = replace(call, name=name, pass_number=number, flow=flow,
                           parent=self._scopes.get(call.parent, ""))  # fmt: skip
            self.modules.append(copy)

    def _merge_entries(self, numbers_a: dict[int, int], numbers_b: dict[int, int]) -> None:
        timeline = self._difference.timeline
        changes = {change.a.label: change for change in self._difference.changed}
        placed = []
        for position, entry in enumerate(self._a.entries):
            only = position not in self._matching.entries
            flow = tuple(numbers_a[number] for number in entry.flow)
            parents = [self._labels_a[label] for label in entry.parents if label in self._labels_a]
            if not only:
                partner = self._b.entries[self._matching.entries[position]]
                parents += [self._labels_b[p] for p in partner.parents if p in self._labels_b]
            tone = "removed" if only else ""
            if entry.label in changes and not only:
                change = changes[entry.label]
                tone = "changed" if change.aspects else "value"
                self.notes[entry.label] = _note(change)
            copy = _copy_entry(entry, tone, "a" if only else "", parents, entry.scopes, flow)
            placed.append((timeline.of_a(position), copy, tone))
        for position, entry in enumerate(self._b.entries):
            if position in self._matching.back:
                continue
            flow = tuple(numbers_b[number] for number in entry.flow)
            parents = [self._labels_b[label] for label in entry.parents if label in self._labels_b]
            scopes = tuple(self._scopes.get(scope, scope) for scope in entry.scopes)
            copy = _copy_entry(entry, "added", "b", parents, scopes, flow)
            placed.append((timeline.of_b(position), copy, "added"))
        placed.sort(key=lambda found: found[0])
        by_label: dict[str, LayerEntry] = {}
        for _, entry, tone in placed:
            by_label[entry.label] = entry
            self.entries.append(entry)
            if tone:
                self.tones[entry.label] = tone
            for number in entry.flow:
                self._note_side(number, entry, tone)
        for entry in self.entries:
            entry.parents = [label for label in entry.parents if label in by_label]
            for label in entry.parents:
                by_label[label].children.append(entry.label)

    def _note_side(self, number: int, entry: LayerEntry, tone: str) -> None:
        change = self.step_changes.get(number)
        if change is not None and change.kind == "side" and tone in ("added", "removed"):
            side = change.value_in(change.a if tone == "removed" else change.b)
            self.under.setdefault(number, []).append((entry.label, side))

    def _order_modules(self) -> None:
        """Order the calls by their beginning, those without kept entries last."""
        first: dict[str, int] = {}
        for position, entry in enumerate(self.entries):
            for scope in entry.scopes:
                first.setdefault(scope, position)
        last = len(self.entries)
        self.modules.sort(key=lambda call: (first.get(call.label, last), call.label.count(".")))


def _note(change: LayerChange) -> str:
    value = change.value
    detail = "" if value is None else str(value)
    if value is not None and value.elements > 1 and value.max_abs:
        detail = f"max abs {value.max_abs:.3g}"
    detail = detail or ("gradient" if change.gradient is not None else "")
    plain = replace(change, value=None, gradient=None)
    return "; ".join(text for text in (str(plain), detail) if text)


def _label_in_run(entry: LayerEntry, run: str) -> str:
    name = f"{entry.name} in {run}"
    return name if entry.passes == 1 else f"{name}:{entry.pass_number}"


def _copy_entry(
    entry: LayerEntry, tone: str, only: str, parents: Iterable[str], scopes: tuple[str, ...],
    flow: tuple[int, ...],
) -> LayerEntry:  # fmt: skip
    copy = replace(
        entry, parents=list(dict.fromkeys(parents)), children=[], scopes=scopes, flow=flow
    )
    if only:
        copy.name = f"{entry.name} in {only}"
    if tone and entry.kind == "op":
        # Blocks that differ in other ways are not drawn as repetitions.
        copy.function = f"{entry.function} ({tone})"
    return copy


class StepText(str):
    """The text of a flow step that knows the step's number, even if only the text is kept."""

    number: int

    @classmethod
    def of(cls, text: str, number: int) -> StepText:
        """Return a text with a number."""
        made = cls(text)
        made.number = number
        return made


class _Both:
    """The outcomes of a flow step in both runs."""

    def __init__(self, change: FlowChange) -> None:
        self._text = f"{change.value_in(change.a)} in a, {change.value_in(change.b)} in b"

    def __repr__(self) -> str:
        return self._text


# For each tone its text in the legend, and the fill and border colours.
_TONES = {
    "removed": ("only in a", "#ffebe9", "#cf222e"),
    "added": ("only in b", "#dafbe1", "#1a7f37"),
    "changed": ("not the same", "#ffe59e", "#9a6700"),
    "value": ("of another value", "#fffbe0", "#d4a72c"),
}
_FIRST, _THICK = "#0969da", 2.5
_WIDEST = 44
_SMALL, _INK = 9.0, "#1f2328"
_MARGIN, _SQUARE = 16.0, 10.0


def difference_picture(difference: Difference, **options: Any) -> Picture:
    """Draw both runs of a difference."""
    union = _Union(difference)
    # A scene takes no more of a log than a union has.
    made = scene(cast("RunLog", union), **options)
    tones = {node: _tone(node, union) for node in made.root.walk()}
    for node in made.nodes():
        node.lines = _lines_of_node(node, union, tones[node])
    _tell_sides(made, union)
    canvas = paint(figure(made))
    first = _first_node(made, union, difference)
    _color(canvas, made, tones, first)
    _add_legend(canvas, [tone for tone in _TONES if tone in tones.values()], first is not None)
    return Picture(canvas, made)


def _tone(node: SceneNode, union: _Union) -> str:
    if node.kind == "root":
        return ""
    number = _step_of(node)
    if number is not None:
        change = union.step_changes.get(number)
        if change is None:
            return ""
        return change.kind if change.kind in ("added", "removed") else "changed"
    entries = [entry for inner in node.walk() for entry in inner.entries]
    tones = {union.tones.get(entry.label, "") for entry in entries}
    if len(tones) == 1:
        return tones.pop()
    if node.children is not None:  # show its content
        return ""
    return "changed" if tones - {"", "value"} else "value"


def _lines_of_node(node: SceneNode, union: _Union, tone: str) -> list[str]:
    """Return the lines of a node: those of a picture of one run, and the differences."""
    number = _step_of(node)
    if number is not None:
        change = union.step_changes.get(number)
        if change is None or change.kind in ("side", "index", "value"):
            return node.lines
        if change.kind == "iterations":
            return [f"{change.value_in(change.a)} in a", f"{change.value_in(change.b)} in b"]
        return [*node.lines, _TONES[change.kind][0]]
    if tone in ("added", "removed"):
        lines = [_TONES[tone][0]] if node.times or node.is_folded else []
    else:
        notes = {union.notes.get(entry.label, "") for entry in node.entries}
        lines = [*notes] if len(notes) == 1 else _counts(node.entries, union)
    return [*node.lines, *(cut(line, _WIDEST) for line in lines if line)]


def _counts(entries: Iterable[LayerEntry], union: _Union) -> list[str]:
    often = Counter(union.tones.get(entry.label, "") for entry in entries)
    parts = [f"{often[tone]} {words}" for tone, (words, _, _) in _TONES.items() if often[tone]]
    return [", ".join(parts)] if parts else []


def _step_of(node: SceneNode) -> int | None:
    return node.title.number if isinstance(node.title, StepText) else None


def _tell_sides(made: Scene, union: _Union) -> None:
    """Draw both sides of a condition, with its outcome on each."""
    nodes = {_step_of(node): node for node in made.nodes() if node.kind == "decision"}
    for number, found in union.under.items():
        decision = nodes.get(number)
        if decision is None:
            continue
        sides: dict[str, SceneNode] = {}
        for label, side in found:
            if label in made.node_of:
                sides.setdefault(side, made.node_of[label])
        made.edges = [
            edge for edge in made.edges if edge.kind != "control" or edge.source is not decision
        ]
        made.edges += [
            Arrow(decision, node, [], side, "control", port=side)
            for side, node in sides.items()
            if node is not decision
        ]


def _first_node(made: Scene, union: _Union, difference: Difference) -> SceneNode | None:
    """Return the node where the runs first diverge."""
    first = difference.first
    if first is None:
        return None
    if first.kind == "flow":
        changes = sorted(union.step_changes.items())
        exact = next((n for n, c in changes if c.a is first.a and c.b is first.b), 0)
        # A whole `while` is not drawn: the test with the other outcome, which follows it, is.
        tests = [n for n, change in changes if change.kind == "side" and n > exact]
        numbers = (n for n in (exact, *tests) if n in made.step_nodes)
        return next((made.step_nodes[n] for n in numbers), None)
    sides = [side for side in (first.a, first.b) if isinstance(side, LayerEntry)]
    names = [_label_in_run(side, run) for side in sides for run in "ab"] + [
        side.label for side in sides
    ]
    return next((made.node_of[name] for name in names if name in made.node_of), None)


def _color(
    canvas: Canvas, made: Scene, tones: dict[SceneNode, str], first: SceneNode | None
) -> None:
    """Colour the nodes of a painted scene; they are painted as groups, boxes first."""
    nodes = iter([*made.boxes(), *made.nodes()])
    for place, mark in enumerate(canvas.marks):
        if isinstance(mark, Marks):
            node = next(nodes)
            canvas.marks[place] = _colored(mark, node, tones[node], node is first)


def _colored(group: Marks, node: SceneNode, tone: str, is_first: bool) -> Marks:
    marks: list[Mark] = list(group.marks)
    shapes = [place for place, mark in enumerate(marks) if isinstance(mark, (Rectangle, Polygon))]
    if not shapes:
        return group
    shape = marks[shapes[-1]]
    assert isinstance(shape, (Rectangle, Polygon))
    _, fill, stroke = _TONES[tone] if tone else ("", "#ffffff", "#8c959f")
    if node.children is None:
        for place in shapes:  # what stands behind it, too
            behind = marks[place]
            assert isinstance(behind, (Rectangle, Polygon))
            marks[place] = replace(behind, stroke=stroke)
        marks[shapes[-1]] = replace(shape, fill=fill, stroke=stroke)
    elif tone:
        marks[shapes[-1]] = replace(shape, stroke=stroke, thick=2.0)
    if is_first:
        marks.append(_outline_points(shape))
    return replace(group, marks=tuple(marks))


def _outline_points(shape: Rectangle | Polygon) -> Rectangle:
    if isinstance(shape, Rectangle):
        left, top, wide, high = shape.x, shape.y, shape.width, shape.height
    else:
        across, down = zip(*shape.points, strict=True)
        left, top = min(across), min(down)
        wide, high = max(across) - left, max(down) - top
    return Rectangle(left - 4, top - 4, wide + 8, high + 8, "none", _FIRST, 8, _THICK)


def _add_legend(canvas: Canvas, tones: list[str], has_first: bool) -> None:
    x, y = _MARGIN, canvas.height
    squares = [(words, fill, stroke, 1.0) for words, fill, stroke in map(_TONES.__getitem__, tones)]
    if has_first:
        squares.append(("where they first part", "none", _FIRST, _THICK))
    for words, fill, stroke, thick in squares:
        canvas.marks.append(Rectangle(x, y, _SQUARE, _SQUARE, fill, stroke, 2, thick))
        text = Caption(x + _SQUARE + 5, y + _SQUARE - 1.5, words, _SMALL, _INK)
        canvas.marks.append(text)
        x = text.x + text.width + 14
    if squares:
        canvas.width = max(canvas.width, x)
        canvas.height = y + _SQUARE + _MARGIN
