"""The picture of a difference: both runs as one log, with colours for differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.view.diff.changes import FlowChange, LayerChange
from bendtrace.view.diff.matching import Matching
from bendtrace.view.drawing.canvas import Canvas, Group, Mark, Polygon, Rectangle, Text, cut
from bendtrace.view.drawing.paint import figure, paint
from bendtrace.view.drawing.picture import Picture
from bendtrace.view.drawing.scene import Edge, Node, Scene, scene

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog
    from bendtrace.view.diff.difference import Difference


@dataclass
class Union:
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
            partner = self.matching.back.get(position)
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
        # Entries that ran in both runs show which calls are the same.
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
        union, timeline = self.union, self.difference.timeline
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
            if position in self.matching.back:
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
        """Order the calls by their beginning, those without kept entries last."""
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
        # Blocks that differ in other ways are not drawn as repetitions.
        copy.function = f"{entry.function} ({tone})"
    return copy


def _told(step: FlowStep, change: FlowChange) -> FlowStep:
    """Return a flow step with its outcomes in both runs."""
    if change.b is None:
        return step
    if change.kind == "iterations" and isinstance(step, LoopFlowStep):
        return step  # its number of iterations stands beside it
    return replace(step, value=_Both(change))


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
    """Draw both runs of a difference.

    Args:
        difference: the difference to draw.
        **options: options of `bendtrace.view.drawing.scene.scene`.
    """
    union = union_of(difference)
    # A scene takes no more of a log than a union has.
    made = scene(cast("RunLog", union), **options)
    tones = {node: _tone(node, union) for node in made.root.walk()}
    for node in made.nodes():
        node.lines = _lines(node, union, tones[node])
    _tell_sides(made, union)
    canvas = paint(figure(made))
    first = _first_node(made, union, difference)
    _color(canvas, made, tones, first)
    _add_legend(canvas, [tone for tone in _TONES if tone in tones.values()], first is not None)
    return Picture(canvas, made)


def _tone(node: Node, union: Union) -> str:
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


def _lines(node: Node, union: Union, tone: str) -> list[str]:
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
        told = [_TONES[tone][0]] if node.times or node.is_folded else []
    else:
        notes = {union.notes.get(entry.label, "") for entry in node.entries}
        told = [*notes] if len(notes) == 1 else _counts(node.entries, union)
    return [*node.lines, *(cut(line, _WIDEST) for line in told if line)]


def _counts(entries: Iterable[LayerEntry], union: Union) -> list[str]:
    often = Counter(union.tones.get(entry.label, "") for entry in entries)
    told = [f"{often[tone]} {words}" for tone, (words, _, _) in _TONES.items() if often[tone]]
    return [", ".join(told)] if told else []


def _step_of(node: Node) -> int | None:
    return node.title.number if isinstance(node.title, StepText) else None


def _tell_sides(made: Scene, union: Union) -> None:
    """Draw both sides of a condition, with its outcome on each."""
    nodes = {_step_of(node): node for node in made.nodes() if node.kind == "decision"}
    for number, found in union.under.items():
        decision = nodes.get(number)
        if decision is None:
            continue
        sides: dict[str, Node] = {}
        for label, side in found:
            if label in made.node_of:
                sides.setdefault(side, made.node_of[label])
        made.edges = [
            edge for edge in made.edges if edge.kind != "control" or edge.source is not decision
        ]
        made.edges += [
            Edge(decision, node, [], side, "control", port=side)
            for side, node in sides.items()
            if node is not decision
        ]


def _first_node(made: Scene, union: Union, difference: Difference) -> Node | None:
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
    labels = [side.label for side in (first.a, first.b) if isinstance(side, LayerEntry)]
    names = [*(f"{_name(label, run)}" for label in labels for run in "ab"), *labels]
    return next((made.node_of[name] for name in names if name in made.node_of), None)


def _name(label: str, run: str) -> str:
    name, colon, number = label.partition(":")
    return f"{name} in {run}{colon}{number}"


def _color(canvas: Canvas, made: Scene, tones: dict[Node, str], first: Node | None) -> None:
    """Colour the nodes of a painted scene; they are painted as groups, boxes first."""
    nodes = iter([*made.boxes(), *made.nodes()])
    for place, mark in enumerate(canvas.marks):
        if isinstance(mark, Group):
            node = next(nodes)
            canvas.marks[place] = _colored(mark, node, tones[node], node is first)


def _colored(group: Group, node: Node, tone: str, is_first: bool) -> Group:
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
        marks.append(_around(shape))
    return replace(group, marks=tuple(marks))


def _around(shape: Rectangle | Polygon) -> Rectangle:
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
        text = Text(x + _SQUARE + 5, y + _SQUARE - 1.5, words, _SMALL, _INK)
        canvas.marks.append(text)
        x = text.x + text.width + 14
    if squares:
        canvas.width = max(canvas.width, x)
        canvas.height = y + _SQUARE + _MARGIN
