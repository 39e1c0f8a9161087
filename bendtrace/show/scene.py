"""Nodes and edges: the content of a picture of a run, before anything has a position."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from bendtrace.errors import InputError
from bendtrace.flow import FlowStep, IndexFlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.log.entries import LayerEntry, ModuleEntry, Source, counted, number_text
from bendtrace.python.checks import did_you_mean, listed, required_int
from bendtrace.python.sites import place_text
from bendtrace.show.canvas import cut, printable

if TYPE_CHECKING:
    from bendtrace.log.run_log import RunLog


# The items of a drawing in nested boxes, with repetitions merged and boxes closed.

Numbers = Literal["deciding", "all", "none"]

# Numbers about a tensor's metadata, not its content.
_METADATA = {"dim", "len", "ndim", "nelement", "numel", "shape", "size", "stride"}
_CONVERSIONS = {"__bool__", "bool"}


@dataclass(eq=False)
class SceneLeaf:
    """A node: the results of an op, or a decision."""

    kind: str  # "input", "op", "number" or "output", or "decision" for flow steps
    # The values that it represents; for several passes, in the order of the run.
    entries: list[LayerEntry] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # numbers of the flow steps that it represents
    times: int = 1  # the number of passes that it represents
    box: Box | None = None  # the innermost box that contains only this node and is not drawn for it

    def leaves(self) -> Iterator[SceneLeaf]:
        """Yield itself."""
        yield self

    def take(self, other: SceneLeaf) -> None:
        """Represent another leaf as well."""
        self.entries += other.entries
        self.steps += other.steps
        self.times += other.times


@dataclass(eq=False)
class Box:
    """Items that belong together."""

    # "root", "module" for calls of a module, "repeat" for a repetition, and "part" for neighbours
    # with nothing else in common.
    kind: str
    # The calls of modules that it represents.
    calls: list[ModuleEntry] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)  # its items, in the order of the run
    # How often it was repeated: several numbers if it represents several boxes with different
    # repetition counts.
    times: list[int] = field(default_factory=lambda: [1])
    is_folded: bool = False  # whether it is drawn closed

    @property
    def name(self) -> str:
        """Qualified name of the module that was called first."""
        return self.calls[0].name if self.calls else ""

    @property
    def names(self) -> list[str]:
        """Qualified names of the modules that were called, without duplicates."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def leaves(self) -> Iterator[SceneLeaf]:
        """Yield all leaves in it, in the order of the run."""
        for item in self.items:
            yield from item.leaves()


Item: TypeAlias = SceneLeaf | Box


def nest(
    history: RunLog,
    entries: Sequence[LayerEntry],
    *,
    flow: bool = True,
    numbers: Numbers = "deciding",
    inside: Sequence[str] = (),
) -> Box:
    """Sort values into the calls of modules in which they were computed."""
    positions = {entry.label: float(i) for i, entry in enumerate(entries)}
    steps = _decisions(history, entries, positions, inside) if flow else []
    shown = _node_labels(history, entries, [number for _, _, number in steps], numbers)
    placed: list[tuple[float, tuple[str, ...], SceneLeaf]] = [
        (position, scopes, SceneLeaf("decision", steps=[number]))
        for position, scopes, number in steps
    ]
    ops: dict[int, SceneLeaf] = {}
    for position, entry in enumerate(entries):
        if entry.label not in shown:
            continue
        if entry.element and entry.index is not None and entry.index in ops:
            ops[entry.index].entries.append(entry)
            continue
        leaf = SceneLeaf(entry.kind, [entry])
        if entry.element and entry.index is not None:
            ops[entry.index] = leaf
        placed.append((float(position), entry.scopes, leaf))
    placed.sort(key=lambda found: found[0])
    calls = {call.label: call for call in history.modules}
    root = Box("root")
    boxes: dict[tuple[str, ...], Box] = {(): root}
    for _, scopes, leaf in placed:
        scopes = scopes[len(inside) :] if scopes[: len(inside)] == tuple(inside) else ()
        for depth in range(1, len(scopes) + 1):
            if scopes[:depth] not in boxes:
                box = boxes[scopes[:depth]] = Box("module", [calls[scopes[depth - 1]]])
                boxes[scopes[: depth - 1]].items.append(box)
        boxes[scopes].items.append(leaf)
    return root


def _decisions(
    history: RunLog,
    entries: Sequence[LayerEntry],
    positions: Mapping[str, float],
    inside: Sequence[str],
) -> list[tuple[float, tuple[str, ...], int]]:
    """Return (position, labels of the calls around it, number) of each flow step to draw."""
    first_under: dict[int, float] = {}
    begins: dict[str, float] = {}
    for index, entry in enumerate(entries):
        for number in entry.flow:
            first_under.setdefault(number, float(index))
        for scope in entry.scopes:
            begins.setdefault(scope, float(index))
    by_name: dict[str, list[ModuleEntry]] = {}
    for call in history.modules:
        if call.label in begins:
            by_name.setdefault(call.name, []).append(call)
    chains = {call.label: call for call in history.modules}
    found: list[tuple[float, tuple[str, ...], int]] = []
    latest = -1.0
    for number, step in enumerate(history.flow_steps):
        label = history.step_labels[number]
        if number in first_under:
            position = first_under[number] - 0.25
        elif label in positions:
            position = max(positions[label] + 0.5, latest)
        else:
            continue  # it is about values that are not in the picture
        latest = max(latest, position)
        if not isinstance(step, (LogicalFlowStep, LoopFlowStep, IndexFlowStep)):
            continue
        if isinstance(step, LoopFlowStep) and step.kind == "while":
            continue  # its tests say as much
        found.append((position, _calls_around(step, position, by_name, begins, chains), number))
    return [(p, s, n) for p, s, n in found if s[: len(inside)] == tuple(inside)]


def _calls_around(
    step: FlowStep,
    position: float,
    by_name: Mapping[str, Sequence[ModuleEntry]],
    begins: Mapping[str, float],
    calls: Mapping[str, ModuleEntry],
) -> tuple[str, ...]:
    """Return the labels of the module calls around a flow step, outermost first."""
    candidates = by_name.get(step.module_path, ())
    begun = [call for call in candidates if begins[call.label] <= position + 1]
    return _chain([*candidates[:1], *begun][-1].label if candidates else "", calls)


def _chain(label: str, calls: Mapping[str, ModuleEntry]) -> tuple[str, ...]:
    """Return the label of a module call after those of the calls around it, outermost first."""
    return (*_chain(calls[label].parent, calls), label) if label else ()


def _node_labels(
    history: RunLog, entries: Sequence[LayerEntry], steps: Iterable[int], numbers: Numbers
) -> set[str]:
    """Return the labels of the values that get nodes."""
    shown = {e.label for e in entries if e.kind in ("input", "op", "output")}
    by_label = {entry.label: entry for entry in entries if entry.kind == "number"}
    if numbers == "all":
        shown |= by_label.keys()
    if numbers == "deciding":
        stack = [history.step_labels[number] for number in steps]
        seen: set[str] = set()
        while stack:
            label = stack.pop()
            if label in by_label and label not in seen:
                seen.add(label)
                stack += by_label[label].parents
                if by_label[label].function not in _CONVERSIONS:
                    shown.add(label)
    return shown


def origins(
    label: str, by_label: Mapping[str, LayerEntry], shown: Mapping[str, object], *, sizes: bool
) -> Iterator[str]:
    """Yield the origins of a value: itself if it is shown, otherwise those of its inputs.

    With `sizes`, they are looked for behind sizes and other metadata of tensors as well.
    """
    stack, seen = [label], {label}
    while stack:
        label = stack.pop()
        if label in shown:
            yield label
            continue
        entry = by_label.get(label)
        if entry is None or (not sizes and entry.layer_type in _METADATA):
            continue
        for parent in reversed(entry.parents):
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)


def roll(box: Box, key_of_step: Mapping[int, object]) -> None:
    """Merge the passes of each op, and the calls of each module."""
    first_of: dict[object, Item] = {}
    kept: list[Item] = []
    for item in box.items:
        key = _roll_key(item, key_of_step)
        first = first_of.setdefault(key, item)
        if first is item:
            kept.append(item)
        elif isinstance(first, SceneLeaf) and isinstance(item, SceneLeaf):
            first.take(item)
        elif isinstance(first, Box) and isinstance(item, Box):
            first.calls += item.calls
            first.items += item.items
            first.times = sorted({*first.times, *item.times})
    box.items = kept
    for item in kept:
        if isinstance(item, Box):
            roll(item, key_of_step)


def _roll_key(item: Item, key_of_step: Mapping[int, object]) -> object:
    if isinstance(item, Box):
        return (item.kind, item.name) if item.name else (
            item.kind, *(_roll_key(inner, key_of_step) for inner in item.items)
        )  # fmt: skip
    if item.kind == "decision":
        return ("decision", key_of_step[item.steps[0]])
    return (item.kind, item.entries[0].name)


_LEAST = 3  # fewer repetitions are easier to read in full
_CANDIDATES = 8  # periods to try at one place

_NUMBER = re.compile(r"\d+")

Token = int
Units = dict[str, tuple[tuple[Box, int], ...]]


def step_name(number: int) -> str:
    """Return the name of a flow step in `Units`."""
    return f"step {number}"


class _Tokens:
    """Numbers for items, equal for those that may be repetitions of each other."""

    def __init__(self, step_key: Callable[[int, bool], object]) -> None:
        self._numbers: dict[object, Token] = {}
        self._tokens: dict[tuple[Item, bool], Token] = {}
        self._step_key = step_key

    def _number(self, key: object) -> Token:
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, item: Item, by_name: bool) -> Token:
        """Return the token of an item.

        By name, equal means the same sites of the same modules, as in the passes of a loop;
        otherwise it means alike in class, functions and shapes.
        """
        if (item, by_name) not in self._tokens:
            self._tokens[item, by_name] = self._number((by_name, *self._key(item, by_name)))
        return self._tokens[item, by_name]

    def forget(self, item: Item) -> None:
        for by_name in (True, False):
            self._tokens.pop((item, by_name), None)

    def _key(self, item: Item, by_name: bool) -> tuple[object, ...]:
        if isinstance(item, Box):
            inner = tuple(self.of(child, by_name) for child in item.items)
            title = item.name if by_name else (item.calls[0].class_name if item.calls else "")
            number = "" if by_name else _NUMBER.sub("#", item.name)
            return (item.kind, title, number, max(item.times) > 1, inner)
        if item.kind == "decision":
            return ("decision", self._step_key(item.steps[0], by_name))
        entry = item.entries[0]
        if by_name:
            return (item.kind, entry.name)
        shapes = tuple((entry.shape, str(entry.dtype)) for entry in item.entries)
        state = tuple((use.name.rpartition(".")[2], use.shape) for use in entry.state)
        return (item.kind, entry.layer_type, entry.function, shapes, state)


def collapse(root: Box, step_key: Callable[[int, bool], object]) -> Units:
    """Merge repetitions, so that one represents all.

    At least three neighbours, or series of neighbours, are merged if they are passes of a loop -
    the same sites of the same modules again - or calls of modules that have the same classes,
    functions, shapes and connections, and whose names differ by a number: `h.0` and `h.1`, but not
    `query` and `key`. By `step_key`, decisions with equal keys are alike, as passes of a loop or
    not. Merged values and flow steps have the boxes around them that represent repetitions, each
    with the number of its repetition.
    """
    units: Units = {}
    tokens = _Tokens(step_key)
    _collapse(root, tokens, units)
    _bundle(root)
    return units


def _collapse(box: Box, tokens: _Tokens, units: Units) -> None:
    for item in box.items:
        if isinstance(item, Box):
            _collapse(item, tokens, units)
    for by_name in (True, False):
        # Inner loops first: once they are one item, what is around them may repeat as well.
        while _pass(box, tokens, by_name, units):
            pass


def _bundle(root: Box) -> None:
    """Merge inputs and outputs with the same nodes as targets or sources."""
    leaf_of = {entry.label: leaf for leaf in root.leaves() for entry in leaf.entries}
    groups: dict[object, list[SceneLeaf]] = {}
    for item in root.items:
        if isinstance(item, SceneLeaf) and item.kind in ("input", "output"):
            entry = item.entries[0]
            ends = entry.children if item.kind == "input" else entry.parents
            found = tuple(dict.fromkeys(leaf_of[label] for label in ends if label in leaf_of))
            if found:
                key = (item.kind, entry.shape, str(entry.dtype), found)
                groups.setdefault(key, []).append(item)
    gone: set[Item] = set()
    for leaves in groups.values():
        if len(leaves) >= _LEAST:
            for other in leaves[1:]:
                leaves[0].take(other)
            gone.update(leaves[1:])
    root.items = [item for item in root.items if item not in gone]


def _pass(box: Box, tokens: _Tokens, by_name: bool, units: Units) -> bool:
    items = box.items
    # Between blocks, only passes of the same ops are alike: those of one loop.
    keys = [tokens.of(item, by_name or isinstance(item, SceneLeaf)) for item in items]
    places: dict[Token, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    rank = {place: i for found in places.values() for i, place in enumerate(found)}
    kept: list[Item] = []
    place, changed = 0, False
    while place < len(items):
        period, count = 0, 0
        following = places[keys[place]]
        for other in islice(following, rank[place] + 1, rank[place] + 1 + _CANDIDATES):
            period = other - place
            count = _count_repeats(keys, place, period)
            has_box = any(isinstance(item, Box) for item in items[place:other])
            if count >= _LEAST and (by_name or has_box):
                count = _count_connected_alike(items, place, period, count)
                if count >= _LEAST:
                    break
            count = 0
        if not count:
            kept.append(items[place])
            place += 1
            continue
        kept.append(_together(items[place : place + period * count], period, units))
        tokens.forget(kept[-1])
        place += period * count
        changed = True
    box.items = kept
    return changed


def _count_repeats(keys: Sequence[Token], place: int, period: int) -> int:
    """Return how often a series of items repeats from a position on."""
    unit = keys[place : place + period]
    count = 1
    while keys[place + count * period : place + (count + 1) * period] == unit:
        count += 1
    return count


def _count_connected_alike(items: Sequence[Item], place: int, period: int, count: int) -> int:
    """Return how many repetitions have the same connections."""
    first = _wiring(items[place : place + period])
    for number in range(1, count):
        start = place + number * period
        if _wiring(items[start : start + period]) != first:
            return number
    return count


def _wiring(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """Return for each value the earlier values, in the same items, that it came from."""
    numbers: dict[str, int] = {}
    wiring: list[tuple[int, ...]] = []
    for number, leaf in enumerate(chain(*(item.leaves() for item in items))):
        parents = leaf.entries[0].parents if leaf.entries else ()
        wiring.append(tuple(sorted(numbers[parent] for parent in parents if parent in numbers)))
        numbers.update((entry.label, number) for entry in leaf.entries)
    return wiring


def _together(items: Sequence[Item], period: int, units: Units) -> Item:
    """Merge repetitions into the first of them."""
    count = len(items) // period
    first = list(items[:period])
    if period == 1 and isinstance(first[0], SceneLeaf):
        frame: Box | None = None
    elif period == 1 and isinstance(first[0], Box) and first[0].times == [1]:
        frame = first[0]
    else:
        frame = Box("repeat", items=first)
    if frame is not None:
        for number in range(count):
            unit = items[number * period : (number + 1) * period]
            for leaf in chain(*(item.leaves() for item in unit)):
                names = [entry.label for entry in leaf.entries]
                for name in names + [step_name(step) for step in leaf.steps]:
                    units[name] = ((frame, number), *units.get(name, ()))
    for number in range(1, count):
        for one, other in zip(first, items[number * period :], strict=False):
            _merge(one, other)
    if frame is None:
        return first[0]
    frame.times = [count]
    return frame


def _merge(one: Item, other: Item) -> None:
    if isinstance(one, SceneLeaf) and isinstance(other, SceneLeaf):
        one.take(other)
    elif isinstance(one, Box) and isinstance(other, Box):
        one.calls += other.calls
        if one.times != other.times:
            one.times = sorted({*one.times, *other.times})
        for inner, its in zip(one.items, other.items, strict=True):
            _merge(inner, its)


_PARTS = 40  # into so many parts at most, where no modules give any


def visible(item: Item) -> int:
    """Return the number of nodes in an item."""
    if isinstance(item, SceneLeaf) or item.is_folded:
        return 1
    return sum(visible(child) for child in item.items)


def absorb(box: Box) -> None:
    """Draw modules that run a single op as that op, without a box around it."""
    for place, item in enumerate(box.items):
        if isinstance(item, SceneLeaf):
            continue
        absorb(item)
        only = item.items[0] if len(item.items) == 1 else None
        if isinstance(only, SceneLeaf) and only.kind == "op" and item.kind == "module":
            only.box = only.box or item
            only.times = max(only.times, *item.times)
            box.items[place] = only


def fold(root: Box, depth: int | None, most: int) -> bool:
    """Close boxes until at most a given number of nodes is left.

    The deepest boxes are closed first, all of a class together, starting with the class that has
    the most nodes. If that is not enough, neighbours are merged, in the order of the run.
    """
    levels: list[list[Box]] = []

    def walk(box: Box, level: int) -> None:
        for item in box.items:
            if isinstance(item, Box):
                if depth is not None and level >= depth:
                    item.is_folded = True
                    continue
                if level == len(levels):
                    levels.append([])
                levels[level].append(item)
                walk(item, level + 1)

    walk(root, 0)
    total = visible(root)
    if total <= most:
        return False
    for boxes in reversed(levels):
        alike: dict[str, list[Box]] = {}
        for box in boxes:
            alike.setdefault(box.calls[0].class_name if box.calls else "", []).append(box)
        for group in sorted(alike.values(), key=lambda g: sum(map(visible, g)), reverse=True):
            if total <= most:
                return True
            for box in group:
                total -= visible(box) - 1
                box.is_folded = True
    if total > most:
        # Group neighbours, except the model's inputs and outputs.
        inner = [i for i in root.items if isinstance(i, Box) or i.kind not in ("input", "output")]
        size = -(-len(inner) // max(min(most, _PARTS), 1))
        parts: dict[Item, Box] = {}
        for start in range(0, len(inner), size):
            part = Box("part", items=inner[start : start + size], is_folded=True)
            parts[part.items[0]] = part
        inside = set(inner)
        root.items = [parts.get(i, i) for i in root.items if i in parts or i not in inside]
    return True


_NAMED = 30  # nodes of a description


@dataclass(eq=False)
class SceneNode:
    """A node of a picture, or a box that contains nodes."""

    key: str  # its name in the picture
    # "input", "op", "number", "output", "decision", "module", "repeat", "part" or "root"; in a
    # chart of programs also "live" and "raise" for the ends of runs.
    kind: str
    title: str  # its first line
    lines: list[str] = field(default_factory=list)  # the lines below it
    tooltip: str = ""  # further text: paths and places in the source
    entries: list[LayerEntry] = field(default_factory=list)
    # Labels of the module calls that it represents.
    modules: list[str] = field(default_factory=list)
    times: str = ""  # how often it was repeated, as text: "3", "3-5"; "" if it was not
    has_parameters: bool = False  # whether it computes with parameters or buffers
    is_folded: bool = False  # whether it is a closed box
    children: list[SceneNode] | None = None  # the content of an open box; None otherwise
    value: float | None = None  # its number in an overlay

    @property
    def labels(self) -> list[str]:
        """Labels of the entries that it represents itself."""
        return [entry.label for entry in self.entries]

    def walk(self) -> Iterator[SceneNode]:
        """Yield it and all nodes in it."""
        yield self
        for child in self.children or ():
            yield from child.walk()


@dataclass(eq=False)
class Arrow:
    """A value, or several similar ones, that goes from one node to another."""

    source: SceneNode  # the node at which it starts
    target: SceneNode  # the node at which it ends
    labels: list[str]  # labels of the entries that it carries
    text: str = ""  # the text beside it: the shape, or the side of a decision
    # "data"; "number" if there are hidden numbers in between; "control" from a decision to nodes
    # that ran under it; "repeat" from one repetition to the next.
    kind: str = "data"
    # For edges from one repetition to the next, labels of the entries of the first repetition.
    instead: list[str] = field(default_factory=list)
    # Which of the source's values it carries: edges with the same port start together.
    port: str = ""


@dataclass(eq=False)
class Scene:
    """The content of a picture."""

    root: SceneNode  # the box around everything
    edges: list[Arrow]  # the edges between nodes
    title: str  # the first line of the picture
    note: str  # lines that say how to see more, if not everything is shown; "" otherwise
    node_of: dict[str, SceneNode]  # the node that represents each entry, by label
    # The node that represents each flow step, by number.
    step_nodes: dict[int, SceneNode] = field(default_factory=dict)

    def nodes(self) -> list[SceneNode]:
        """Return all nodes that are not open boxes."""
        return [node for node in self.root.walk() if node.children is None]

    @property
    def description(self) -> str:
        """A description for people who do not see the picture."""
        nodes = self.nodes()
        counts = f"{counted(len(nodes), 'node')} and {counted(len(self.edges), 'edge')}"
        return f"{counts}: {listed([node.title for node in nodes], _NAMED)}"

    def boxes(self) -> list[SceneNode]:
        """Return all open boxes, outer ones first, except the one around everything."""
        return [n for n in self.root.walk() if n.children is not None and n is not self.root]


_Ends: TypeAlias = tuple[SceneNode, SceneNode, str, str]


class Emitter:
    """Turns items into nodes, and finds their edges."""

    count: int

    def __init__(
        self, history: RunLog, entries: Sequence[LayerEntry], units: Units, shown: set[str]
    ) -> None:
        self.history = history
        self.entries = entries
        self.units = units
        self.shown = shown
        self.node_of: dict[str, SceneNode] = {}
        self.step_nodes: dict[int, SceneNode] = {}
        self.count = 0

    def emit(self, root: Box, all_nodes: int, capped: bool, within: str | None) -> Scene:
        """Return the scene."""
        node = SceneNode("root", "root", "")
        node.children = [self.node(item, within or "") for item in root.items]
        outside = self._outside(node) if within is not None else {}
        edges = self.edges(outside)
        title = within if within is not None else self.history.name
        drawn = sum(1 for n in node.walk() if n.children is None)
        note = ""
        if capped:
            note = (
                f"{drawn} of {all_nodes} nodes are drawn: boxes were closed.\n"
                f"draw(max_nodes={all_nodes}) opens all, draw(within=...) one of them"
            )
        return Scene(node, edges, title or "", note, self.node_of, self.step_nodes)

    def _key(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def node(self, item: Item, parent: str, around: int = 1, named: bool = False) -> SceneNode:
        """Return the node for an item, including the nodes in it."""
        steps = self.history.flow_steps
        if isinstance(item, SceneLeaf):
            if item.kind == "decision":
                its = [steps[number] for number in item.steps]
                node = SceneNode(self._key(), "decision", its[0].text or its[0].kind)
                agree = len({str(step.value) for step in its}) == 1
                node.lines = decision_lines(its[:1] if around > 1 and agree else its)
                node.tooltip = tooltip([], [], its)
                self._represent(node, [item])
                return node
            calls = item.box.calls if item.box else []
            node = SceneNode(self._key(), item.kind, cut(leaf_title(item), _MOST))
            node.lines = leaf_lines(item, parent, named)
            node.times = str(item.times) if item.times > around else ""
            node.tooltip = tooltip(item.entries, calls, [])
            self._represent(node, [item])
        else:
            calls = item.calls
            node = SceneNode(self._key(), item.kind, cut(box_title(item, parent, named), _MOST))
            node.lines = box_lines(item)
            node.tooltip = tooltip([], calls, [])
            if max(item.times) > 1:
                ends = sorted({min(item.times), max(item.times)})
                node.times = "\N{EN DASH}".join(map(str, ends))
            node.is_folded = item.is_folded
            if item.is_folded:
                self._represent(node, item.leaves())
            else:
                around *= max(item.times)
                named = named or len(item.names) > 1
                name = item.name or parent
                node.children = [self.node(inner, name, around, named) for inner in item.items]
        node.modules = [call.label for call in calls]
        node.lines = [cut(line, _MOST) for line in node.lines]
        return node

    def _represent(self, node: SceneNode, leaves: Iterable[SceneLeaf]) -> None:
        """Note which node represents the values and flow steps of some leaves."""
        for leaf in leaves:
            node.entries += leaf.entries
            self.node_of.update((entry.label, node) for entry in leaf.entries)
            self.step_nodes.update((number, node) for number in leaf.steps)
        node.has_parameters = any(entry.state for entry in node.entries)

    def _outside(self, root: SceneNode) -> dict[str, SceneNode]:
        """Add nodes for values that come from outside, or leave."""
        inside = {entry.label for entry in self.entries}
        by_label = {entry.label: entry for entry in self.history.entries}
        outside: dict[str, SceneNode] = {}
        first: list[SceneNode] = []
        for entry in self.entries:
            for label in entry.parents:
                origin = by_label.get(label)
                if label in inside or label in outside or origin is None:
                    continue
                if origin.kind in ("input", "op"):
                    node = outside[label] = SceneNode(self._key(), "input", origin.label)
                    node.tooltip = tooltip([origin], [], [])
                    first.append(node)
        last: list[SceneNode] = []
        for entry in self.entries:
            if entry.label in self.shown and any(c not in inside for c in entry.children):
                node = SceneNode(self._key(), "output", "to " + ", ".join(entry.children[:2]))
                last.append(node)
                outside[">" + entry.label] = node
        root.children = [*first, *(root.children or []), *last]
        return outside

    def edges(self, outside: Mapping[str, SceneNode]) -> list[Arrow]:
        """Find the edges between the nodes."""
        found: dict[_Ends, Arrow] = {}
        by_label = {entry.label: entry for entry in self.history.entries}
        nodes: dict[str, SceneNode] = {**outside, **self.node_of}
        for entry in self.entries:
            target = self.node_of.get(entry.label)
            if target is None:
                continue
            for place, parent in enumerate(entry.parents):
                for label in origins(parent, by_label, nodes, sizes=False):
                    kind = "data" if label == parent else "number"
                    self._join(found, nodes[label], target, by_label[label], kind, entry, place)
            if ">" + entry.label in outside:
                self._join(found, target, outside[">" + entry.label], entry, "data")
        for number, label in enumerate(self.history.step_labels):
            node = self.step_nodes.get(number)
            if node is None or not label:
                continue
            for origin in origins(label, by_label, nodes, sizes=True):
                self._join(found, nodes[origin], node, by_label[origin], "data", step=number)
        self._control(found)
        direct = {(edge.source, edge.target) for edge in found.values() if edge.kind == "data"}
        return [
            edge
            for edge in found.values()
            if edge.kind != "number" or (edge.source, edge.target) not in direct
        ]

    def _control(self, found: dict[_Ends, Arrow]) -> None:
        done: set[int] = set()
        for entry in self.entries:
            target = self.node_of.get(entry.label)
            for number in entry.flow:
                source = self.step_nodes.get(number)
                if number in done or source is None or target is None:
                    continue
                done.add(number)
                if source is target:
                    continue
                step = self.history.flow_steps[number]
                text = "" if isinstance(step, (LoopFlowStep, IndexFlowStep)) else str(step.value)
                edge = found.setdefault(
                    (source, target, "control", ""), Arrow(source, target, [], text, "control")
                )
                if edge.text != text:
                    edge.text = ""

    def _join(
        self,
        found: dict[_Ends, Arrow],
        source: SceneNode,
        target: SceneNode,
        entry: LayerEntry,
        kind: str,
        user: LayerEntry | None = None,
        place: int = 0,
        step: int | None = None,
    ) -> None:
        """Add a value that goes from one node to another."""
        name = user.label if user is not None else step_name(step) if step is not None else ""
        if name and (source is target or self._repeats(entry.label, name)):
            kind = "repeat"
        if source is target and (source.is_folded or len(source.entries) == 1):
            return
        # Passes and repetitions of an op give the same value, as far as the picture goes.
        element = "" if source.is_folded else str(entry.element)
        port = entry.label if source.is_folded else element
        edge = found.setdefault(
            (source, target, kind, element), Arrow(source, target, [], "", kind, port=port)
        )
        if entry.label not in edge.labels:
            edge.labels.append(entry.label)
        if kind == "repeat" and user is not None and not edge.instead:
            first = next(e for e in target.entries if e.element == user.element)
            if len(first.parents) == len(user.parents) and first is not user:
                edge.instead.append(first.parents[place])
        if kind == "repeat" and step is not None and not edge.instead:
            first_step = next(n for n, node in self.step_nodes.items() if node is target)
            edge.instead.append(self.history.step_labels[first_step])
        text = shape_label(entry)
        if not edge.text and len(edge.labels) == 1:
            edge.text = text
        elif edge.text != text:
            edge.text = ""

    def _repeats(self, source: str, target: str) -> bool:
        """Return whether a value goes from one repetition to another."""
        before, after = self.units.get(source, ()), self.units.get(target, ())
        for (frame, number), (other, its) in zip(before, after, strict=False):
            if frame is not other:
                return False
            if number != its:
                return True
        return False


def scene(
    history: RunLog,
    *,
    rolled: bool = False,
    collapsed: bool = True,
    depth: int | None = None,
    max_nodes: int = 50,
    within: str | None = None,
    flow: bool = True,
    numbers: Numbers = "deciding",
) -> Scene:
    """Choose the nodes and edges of a picture of a run, by the options of `draw`."""
    required_int("max_nodes", max_nodes, 1)
    required_int("depth", depth, 0, or_none=True)
    if numbers not in ("deciding", "all", "none"):
        raise InputError(f'numbers= has to be "deciding", "all" or "none", not {numbers!r}')
    entries, inside = _entries_within(history, within)
    steps = history.flow_steps

    def roll_all(root: Box) -> None:
        roll(root, {i: _step_key(step, True) for i, step in enumerate(steps)})

    def collapse_all(root: Box) -> Units:
        return collapse(root, lambda i, by_name: _step_key(steps[i], by_name))

    def emitted(*merges: Callable[[Box], Units | None]) -> tuple[int, Scene]:
        root = nest(history, entries, flow=flow, numbers=numbers, inside=inside)
        emitter = Emitter(
            history, entries, {}, {entry.label for leaf in root.leaves() for entry in leaf.entries}
        )
        for merge in merges:
            emitter.units |= merge(root) or {}
        absorb(root)
        all_nodes = visible(root)
        capped = fold(root, depth, max_nodes)
        return visible(root), emitter.emit(root, all_nodes, capped, within)

    ways = [[roll_all] * rolled + [collapse_all] * collapsed]
    if rolled and collapsed:
        # Blocks that share code, but no layers, are no longer alike once that code is rolled.
        ways.append([collapse_all, roll_all])
    return min((emitted(*way) for way in ways), key=itemgetter(0))[1]


def _step_key(step: FlowStep, by_name: bool) -> object:
    """Return the key that repetitions of one decision share.

    The last test of a loop has another outcome than those before it.
    """
    if by_name:
        return (step.place.file, step.place.span, step.text)
    return (step.text, step.kind, "" if isinstance(step, LoopFlowStep) else str(step.value))


def _entries_within(
    history: RunLog, within: str | None
) -> tuple[list[LayerEntry], tuple[str, ...]]:
    """Return the entries to show, and the labels of the calls around them."""
    entries = [entry for entry in history.entries if entry.kind != "state"]
    if within is None:
        return entries, ()
    calls = {call.label: call for call in history.modules}
    found = calls.get(within) or next((c for c in history.modules if c.name == within), None)
    if found is None:
        names = list(dict.fromkeys([c.name for c in history.modules] + list(calls)))
        called = listed(list(dict.fromkeys(call.name for call in history.modules)))
        hint = did_you_mean(within, names, otherwise=f"; it called {called}", quotes=False)
        raise InputError(f"no module {within!r} was called in this run{hint}")
    inside = _chain(found.label, calls)
    return [entry for entry in entries if entry.scopes[: len(inside)] == inside], inside


# The texts in a picture, and in its tooltips.

_ITEM = re.compile(r"\[\d+\](?=:|$)")
_TIMES = "\N{MULTIPLICATION SIGN}"
_DOT = " \N{MIDDLE DOT} "
_MOST = 44  # letters of a line
_STATE = 2  # so many parameters have their shapes written


def shape_label(entry: LayerEntry) -> str:
    """Return the shape of a value, and its dtype if that is not the usual one.

    Example:
        >>> import torch
        >>> from bendtrace.log.entries import LayerEntry
        >>> shape_label(LayerEntry("op", "add", "add_1_1", "add_1", shape=(2, 3))).split(_TIMES)
        ['2', '3']
    """
    if entry.shape is None:
        return ""
    text = shape(entry.shape)
    if entry.dtype is not None and entry.dtype is not torch.float32:
        text += " " + str(entry.dtype).removeprefix("torch.")
    return text


def shape(sizes: Sequence[int]) -> str:
    """Return sizes as text."""
    return _TIMES.join(map(str, sizes)) if sizes else "scalar"


def count(number: float) -> str:
    """Return a large number in short form: 85.1M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def plural(number: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def leaf_title(leaf: SceneLeaf) -> str:
    """Return the first line of a node: the name that finds it in the log."""
    entry = leaf.entries[0]
    if entry.kind == "number":
        return f"{entry.label} = {number_text(entry.value)}"
    if leaf.times > 1:
        return entry.layer_type
    # (The gradients that one node of a backward pass returns differ only by their numbers.)
    labels = list(dict.fromkeys(_ITEM.sub("", one.label) for one in leaf.entries))
    if len(labels) > 2:  # several values of one op
        return f"{labels[0]} \N{HORIZONTAL ELLIPSIS} {labels[-1]}"
    return ", ".join(labels)


def leaf_lines(leaf: SceneLeaf, parent: str, first: bool) -> list[str]:
    """Return the lines below: the module, and its parameters.

    Of several modules it names only the first if the box around it names the others.
    """
    lines = []
    if leaf.box is not None:
        name = _module_names(leaf.box.names[:1] if first else leaf.box.names, parent)
        lines.append(f"{name}{_DOT}{_classes(leaf.box)}")
    uses = leaf.entries[0].state
    if uses:
        uses = sorted(uses, key=lambda use: (not use.is_parameter, "weight" not in use.name))
        shown = [f"{use.name.rpartition('.')[2]} {shape(use.shape)}" for use in uses[:_STATE]]
        more = len(uses) - _STATE
        lines.append(", ".join(shown) + (f", {more} more" if more > 0 else ""))
    return lines


def box_title(box: Box, parent: str, first: bool) -> str:
    """Return the name of a box."""
    if box.kind == "module":
        return _module_names(box.names[:1] if first else box.names, parent)
    if box.kind == "part":
        named = [leaf.entries[0].name for leaf in box.leaves() if leaf.entries]
        return f"{named[0]} \N{HORIZONTAL ELLIPSIS} {named[-1]}" if named else "part"
    return "repeated"


def box_lines(box: Box) -> list[str]:
    """Return the other lines of a box: classes, and the content if it is closed."""
    lines = [_classes(box)] if box.kind == "module" else []
    if not box.is_folded:
        return lines
    leaves = list(box.leaves())
    ops = sum(leaf.kind == "op" for leaf in leaves)
    facts = [plural(ops, "op")]
    own = {
        use.name: use.numel
        for leaf in leaves
        for entry in leaf.entries
        for use in entry.state
        if use.is_parameter
    }
    if own:
        facts.append(f"{count(sum(own.values()))} parameters")
    decisions = sum(leaf.kind == "decision" for leaf in leaves)
    if decisions:
        facts.append(plural(decisions, "decision"))
    return [*lines, _DOT.join(facts)]


def _classes(box: Box) -> str:
    return ", ".join(dict.fromkeys(call.class_name for call in box.calls))


def _module_names(names: Sequence[str], parent: str) -> str:
    """Return names of modules as one text, without the part that the box around them has."""
    short = [
        name.removeprefix(parent + ".") if parent and name.startswith(parent + ".") else name
        for name in names
    ]
    if len(short) == 1:
        return short[0]
    return f"{short[0]} \N{HORIZONTAL ELLIPSIS} {short[-1]}"


def decision_lines(steps: Sequence[FlowStep]) -> list[str]:
    """Return the condition of a decision, and its outcome."""
    first = steps[0]
    if isinstance(first, LoopFlowStep):
        its = sorted({step.iterations or 0 for step in steps if isinstance(step, LoopFlowStep)})
        if first.iterations is None:
            return [f"{first.kind}: {first.how_often}"]
        often = "\N{EN DASH}".join(map(str, sorted({its[0], its[-1]})))
        noun = "iteration" if its == [1] else "iterations"
        return [f"{first.kind}: {often} {noun}"]
    sides = Counter(str(step.value) for step in steps).items()
    taken = ", ".join(side if len(steps) == 1 else f"{side} {_TIMES}{n}" for side, n in sides)
    return [cut(f"{first.kind} \N{RIGHTWARDS ARROW} {taken}", _MOST)]


def tooltip(
    entries: Sequence[LayerEntry], calls: Sequence[ModuleEntry], steps: Sequence[FlowStep]
) -> str:
    """Return the tooltip of a node."""
    lines: list[str] = []
    for entry in entries[:1]:
        lines.append(entry.label)
        if entry.node_path:
            lines.append(f"path: {entry.node_path}")
        if entry.function:
            lines.append(f"function: {entry.target or entry.function}")
        if entry.shape is not None:
            dtype = str(entry.dtype).removeprefix("torch.") if entry.dtype else ""
            lines.append(f"value: {shape(entry.shape)} {dtype} {entry.device or ''}".rstrip())
        lines += [f"{use.name}: {shape(use.shape)}" for use in entry.state[:8]]
        lines += _source_lines(entry.source)
    if len(entries) > 1:
        lines.append(f"and {len(entries) - 1:,} more: \N{HORIZONTAL ELLIPSIS} {entries[-1].label}")
    for call in calls[:1]:
        lines.append(f"module: {call.name} ({call.class_name})")
        if not entries:
            lines += _source_lines(call.source)
    if len(calls) > 1:
        lines.append(f"and {plural(len(calls) - 1, 'more call')}: to {calls[-1].label}")
    for step in steps[:1]:
        lines += [step.text, f"{step.kind} at {place_text(step.file, step.line)}"]
    return "\n".join(cut(printable(line), 160) for line in lines if line)


def _source_lines(source: Source | None) -> list[str]:
    if source is None:
        return []
    return [f"at {place_text(source.file, source.line)}", source.statement or source.text]
