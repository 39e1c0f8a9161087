"""The union of two runs, as one log: what both did, and in between what only one of them did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bendtrace.differences.changes import FlowChange, LayerChange
from bendtrace.differences.matching import Matching
from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry

if TYPE_CHECKING:
    from bendtrace.differences.difference import Difference

__all__ = ["StepText", "Union", "union_of"]


@dataclass
class Union:
    """Two runs in one log. What only one of them has is told by its name.

    Attributes:
        name: of the model, or of both.
        entries: all values, in the order of the first run; those that only the second has come
            after what they come after there.
        modules: all calls of modules.
        flow_steps: all flow steps, with what they came to in both runs as their value.
        step_labels: for each of them the label of the entry whose value was consumed.
        tones: "added", "removed", "changed" or "value" for entries, by label.
        notes: what changed, for entries, by label.
        step_changes: how flow steps differ, by number.
        under: entries that only one run has and that ran under a flow step of both, by the
            number of the step: their labels, and what it came to in that run.
    """

    name: str
    entries: list[LayerEntry] = field(default_factory=list)
    modules: list[ModuleEntry] = field(default_factory=list)
    flow_steps: FlowSteps = field(default_factory=lambda: FlowSteps([]))
    step_labels: list[str] = field(default_factory=list)
    tones: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    step_changes: dict[int, FlowChange] = field(default_factory=dict)
    under: dict[int, list[tuple[str, str]]] = field(default_factory=dict)

    @property
    def layers(self) -> list[LayerEntry]:
        """The entries that count as layers."""
        return [entry for entry in self.entries if entry.is_layer]


def union_of(difference: Difference) -> Union:
    """Return the union of the two runs of a difference."""
    return _Builder(difference).build()


class _Builder:
    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        self.matching: Matching = difference._matching
        self.a, self.b = self.matching.a, self.matching.b
        names = dict.fromkeys((difference.a.name, difference.b.name))
        self.union = Union(" and ".join(names))
        self.back = {j: i for i, j in self.matching.entries.items()}
        self.labels_a: dict[str, str] = {}
        self.labels_b: dict[str, str] = {}
        self.scopes: dict[str, str] = {}  # of b, by what they are called in the union

    def build(self) -> Union:
        steps_a, steps_b = self._steps()
        self._name_entries()
        self._modules(steps_b)
        self._entries(steps_a, steps_b)
        self._consumed(steps_a, steps_b)
        self._order_modules()
        return self.union

    def _name_entries(self) -> None:
        for position, entry in enumerate(self.a.entries):
            only = position not in self.matching.entries
            self.labels_a[entry.label] = _labelled(entry, "a") if only else entry.label
        for position, entry in enumerate(self.b.entries):
            partner = self.back.get(position)
            self.labels_b[entry.label] = (
                _labelled(entry, "b") if partner is None else self.a.entries[partner].label
            )

    def _steps(self) -> tuple[dict[int, int], dict[int, int]]:
        """Put the flow steps of both runs in one order; return their new numbers."""
        back = {j: i for i, j in self.matching.steps.items()}
        following: dict[int, list[int]] = {}
        last = -1
        for number in range(len(self.b.steps)):
            if number in back:
                last = back[number]
            else:
                following.setdefault(last, []).append(number)
        changes = {id(change.a): change for change in self.difference._flow if change.a is not None}
        only_b = {id(change.b): change for change in self.difference._flow if change.a is None}
        numbers_a: dict[int, int] = {}
        numbers_b: dict[int, int] = {}
        steps: list[FlowStep] = []
        for i in range(-1, len(self.a.steps)):
            if i >= 0:
                step = self.a.steps[i]
                change = changes.get(id(step))
                numbers_a[i] = len(steps)
                if i in self.matching.steps:
                    numbers_b[self.matching.steps[i]] = len(steps)
                if change is not None:
                    self.union.step_changes[len(steps)] = change
                steps.append(step if change is None else _told(step, change))
            for j in following.get(i, ()):
                numbers_b[j] = len(steps)
                if id(self.b.steps[j]) in only_b:
                    self.union.step_changes[len(steps)] = only_b[id(self.b.steps[j])]
                steps.append(self.b.steps[j])
        self.union.flow_steps = FlowSteps(
            [replace(step, text=StepText.of(step.text, n)) for n, step in enumerate(steps)]
        )
        return numbers_a, numbers_b

    def _modules(self, numbers_b: dict[int, int]) -> None:
        self.union.modules += self.a.history.modules
        # What ran in both tells which calls are the same.
        for i, j in self.matching.entries.items():
            mine, theirs = self.a.entries[i].scopes, self.b.entries[j].scopes
            if len(mine) == len(theirs):
                for one, other in zip(mine, theirs, strict=True):
                    self.scopes.setdefault(other, one)
        names = {other: name for name, other in self.matching.modules.items()}
        taken = set(self.a.calls)
        taken_as = set(self.scopes.values())
        for call in self.b.history.modules:
            if call.label in self.scopes:
                continue
            name = names.get(call.name, call.name)
            number = call.pass_number
            same = f"{name}:{number}"
            if same in taken and same not in taken_as and call.name in names:
                self.scopes[call.label] = same  # nothing in it is in both, but it is the same call
                taken_as.add(same)
                continue
            while f"{name}:{number}" in taken:
                number += 1
            taken.add(f"{name}:{number}")
            self.scopes[call.label] = f"{name}:{number}"
            flow = tuple(numbers_b[step] for step in call.flow)
            copy = replace(call, name=name, pass_number=number, flow=flow,
                           parent=self.scopes.get(call.parent, ""))  # fmt: skip
            self.union.modules.append(copy)

    def _entries(self, numbers_a: dict[int, int], numbers_b: dict[int, int]) -> None:
        union, timeline = self.union, self.difference._timeline
        changes = {change.a.label: change for change in self.difference.changed}
        placed = []
        for position, entry in enumerate(self.a.entries):
            only = position not in self.matching.entries
            flow = tuple(numbers_a[number] for number in entry.flow)
            parents = [self.labels_a[label] for label in entry.parents if label in self.labels_a]
            if not only:
                partner = self.b.entries[self.matching.entries[position]]
                parents += [self.labels_b[p] for p in partner.parents if p in self.labels_b]
            tone = "removed" if only else ""
            if entry.label in changes and not only:
                change = changes[entry.label]
                tone = "changed" if change.aspects else "value"
                union.notes[entry.label] = _note(change)
            copy = _copied(entry, tone, "a" if only else "", parents, entry.scopes, flow)
            placed.append((timeline.of_a(position), copy, tone))
        for position, entry in enumerate(self.b.entries):
            if position in self.back:
                continue
            flow = tuple(numbers_b[number] for number in entry.flow)
            parents = [self.labels_b[label] for label in entry.parents if label in self.labels_b]
            scopes = tuple(self.scopes.get(scope, scope) for scope in entry.scopes)
            copy = _copied(entry, "added", "b", parents, scopes, flow)
            placed.append((timeline.of_b(position), copy, "added"))
        placed.sort(key=lambda found: found[0])
        by_label: dict[str, LayerEntry] = {}
        for _, entry, tone in placed:
            by_label[entry.label] = entry
            union.entries.append(entry)
            if tone:
                union.tones[entry.label] = tone
            for number in entry.flow:
                self._note_side(number, entry, tone)
        for entry in union.entries:
            entry.parents = [label for label in entry.parents if label in by_label]
            for label in entry.parents:
                by_label[label].children.append(entry.label)

    def _note_side(self, number: int, entry: LayerEntry, tone: str) -> None:
        change = self.union.step_changes.get(number)
        if change is not None and change.kind == "side" and tone in ("added", "removed"):
            side = change.value_in(change.a if tone == "removed" else change.b)
            self.union.under.setdefault(number, []).append((entry.label, side))

    def _consumed(self, numbers_a: dict[int, int], numbers_b: dict[int, int]) -> None:
        labels = [""] * len(self.union.flow_steps)
        for numbers, run, known in (
            (numbers_b, self.b, self.labels_b),
            (numbers_a, self.a, self.labels_a),
        ):
            for number, label in enumerate(run.history.step_labels):
                labels[numbers[number]] = known.get(label, "")
        self.union.step_labels = labels

    def _order_modules(self) -> None:
        """Order the calls by when they began, those in which nothing was kept last."""
        first: dict[str, int] = {}
        for position, entry in enumerate(self.union.entries):
            for scope in entry.scopes:
                first.setdefault(scope, position)
        last = len(self.union.entries)
        self.union.modules.sort(
            key=lambda call: (first.get(call.label, last), call.label.count("."))
        )


def _note(change: LayerChange) -> str:
    value = change.value
    told = "" if value is None else str(value)
    if value is not None and value.elements > 1 and value.max_abs:
        told = f"max abs {value.max_abs:.3g}"
    told = told or ("gradient" if change.gradient is not None else "")
    plain = replace(change, value=None, gradient=None)
    return "; ".join(text for text in (str(plain), told) if text)


def _labelled(entry: LayerEntry, run: str) -> str:
    name = f"{entry.name} in {run}"
    return name if entry.passes == 1 else f"{name}:{entry.pass_number}"


def _copied(
    entry: LayerEntry, tone: str, only: str, parents: Iterable[str], scopes: tuple[str, ...],
    flow: tuple[int, ...],
) -> LayerEntry:  # fmt: skip
    copy = replace(
        entry, parents=list(dict.fromkeys(parents)), children=[], scopes=scopes, flow=flow
    )
    if only:
        copy.name = f"{entry.name} in {only}"
    if tone and entry.kind == "op":
        # What differs in another way is not drawn as a repetition.
        copy.function = f"{entry.function} ({tone})"
    return copy


def _told(step: FlowStep, change: FlowChange) -> FlowStep:
    """Return a flow step that says what it came to in both runs."""
    if change.b is None:
        return step
    if change.kind == "iterations" and isinstance(step, LoopFlowStep):
        return step  # its number of iterations is told beside it
    return replace(step, value=_Both(change))


class StepText(str):
    """The text of a flow step that knows the step's number, also where only the text is kept."""

    number: int

    @classmethod
    def of(cls, text: str, number: int) -> StepText:
        """Return a text with a number."""
        made = cls(text)
        made.number = number
        return made


class _Both:
    """What a flow step came to, in both runs."""

    def __init__(self, change: FlowChange) -> None:
        self._text = f"{change.value_in(change.a)} in a, {change.value_in(change.b)} in b"

    def __repr__(self) -> str:
        return self._text
