"""The items of a drawing in nested boxes, with repetitions merged and boxes closed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from bendtrace.flow import FlowStep, IndexFlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

Numbers = Literal["deciding", "all", "none"]

# Numbers about a tensor's metadata, not its content.
_METADATA = {"dim", "len", "ndim", "nelement", "numel", "shape", "size", "stride"}
_CONVERSIONS = {"__bool__", "bool"}


@dataclass(eq=False)
class Leaf:
    """A node: the results of an op, or a decision.

    Attributes:
        kind: "input", "op", "number" or "output", or "decision" for flow steps.
        entries: the values that it represents; for several passes, in the order of the run.
        steps: numbers of the flow steps that it represents.
        times: the number of passes that it represents.
        box: the innermost box that contains only this node and is not drawn for it.
    """

    kind: str
    entries: list[LayerEntry] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    times: int = 1
    box: Box | None = None

    def leaves(self) -> Iterator[Leaf]:
        """Yield itself."""
        yield self

    def take(self, other: Leaf) -> None:
        """Represent another leaf as well."""
        self.entries += other.entries
        self.steps += other.steps
        self.times += other.times


@dataclass(eq=False)
class Box:
    """Items that belong together.

    Attributes:
        kind: "root", "module" for calls of a module, "repeat" for a repetition, and "part" for
            neighbours with nothing else in common.
        calls: the calls of modules that it represents.
        items: its items, in the order of the run.
        times: how often it was repeated: several numbers if it represents several boxes with
            different repetition counts.
        is_folded: whether it is drawn closed.
    """

    kind: str
    calls: list[ModuleEntry] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    times: list[int] = field(default_factory=lambda: [1])
    is_folded: bool = False

    @property
    def name(self) -> str:
        """Qualified name of the module that was called first."""
        return self.calls[0].name if self.calls else ""

    @property
    def names(self) -> list[str]:
        """Qualified names of the modules that were called, without duplicates."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def leaves(self) -> Iterator[Leaf]:
        """Yield all leaves in it, in the order of the run."""
        for item in self.items:
            yield from item.leaves()


Item: TypeAlias = Leaf | Box


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
    placed: list[tuple[float, tuple[str, ...], Leaf]] = [
        (position, scopes, Leaf("decision", steps=[number])) for position, scopes, number in steps
    ]
    ops: dict[int, Leaf] = {}
    for position, entry in enumerate(entries):
        if entry.label not in shown:
            continue
        if entry.element and entry.index is not None and entry.index in ops:
            ops[entry.index].entries.append(entry)
            continue
        leaf = Leaf(entry.kind, [entry])
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
        found.append((position, _around(step, position, by_name, begins, chains), number))
    return [(p, s, n) for p, s, n in found if s[: len(inside)] == tuple(inside)]


def _around(
    step: FlowStep,
    position: float,
    by_name: Mapping[str, Sequence[ModuleEntry]],
    begins: Mapping[str, float],
    calls: Mapping[str, ModuleEntry],
) -> tuple[str, ...]:
    """Return the labels of the module calls around a flow step, outermost first."""
    candidates = by_name.get(step.module_path, ())
    begun = [call for call in candidates if begins[call.label] <= position + 1]
    label = begun[-1].label if begun else candidates[0].label if candidates else ""
    chain: list[str] = []
    while label:
        chain.append(label)
        label = calls[label].parent
    return tuple(reversed(chain))


def _node_labels(
    history: RunLog, entries: Sequence[LayerEntry], steps: Iterable[int], numbers: Numbers
) -> set[str]:
    """Return the labels of the values that get nodes."""
    shown = {e.label for e in entries if e.kind in ("input", "op", "output")}
    known = {entry.label: entry for entry in entries if entry.kind == "number"}
    if numbers == "all":
        shown |= known.keys()
    if numbers == "deciding":
        stack = [history.step_labels[number] for number in steps]
        seen: set[str] = set()
        while stack:
            label = stack.pop()
            if label in known and label not in seen:
                seen.add(label)
                stack += known[label].parents
                if known[label].function not in _CONVERSIONS:
                    shown.add(label)
    return shown


def origins(
    label: str, by_label: Mapping[str, LayerEntry], shown: Mapping[str, object], *, sizes: bool
) -> Iterator[str]:
    """Yield the origins of a value: itself if it is shown, otherwise those of its inputs.

    Args:
        label: the label of the value.
        by_label: all values.
        shown: those in the picture.
        sizes: whether to go back through sizes and other metadata of tensors.
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
    known: dict[object, Item] = {}
    kept: list[Item] = []
    for item in box.items:
        key = _rolled_key(item, key_of_step)
        first = known.setdefault(key, item)
        if first is item:
            kept.append(item)
        elif isinstance(first, Leaf) and isinstance(item, Leaf):
            first.take(item)
        elif isinstance(first, Box) and isinstance(item, Box):
            first.calls += item.calls
            first.items += item.items
            first.times = sorted({*first.times, *item.times})
    box.items = kept
    for item in kept:
        if isinstance(item, Box):
            roll(item, key_of_step)


def _rolled_key(item: Item, key_of_step: Mapping[int, object]) -> object:
    if isinstance(item, Box):
        return (item.kind, item.name) if item.name else (
            item.kind, *(_rolled_key(inner, key_of_step) for inner in item.items)
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
        self._known: dict[tuple[Item, bool], Token] = {}
        self._step_key = step_key

    def _number(self, key: object) -> Token:
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, item: Item, by_name: bool) -> Token:
        """Return the token of an item.

        Args:
            item: an item.
            by_name: whether equal means the same sites of the same modules, as in the passes of
                a loop. Otherwise it means alike in class, functions and shapes.
        """
        if (item, by_name) not in self._known:
            self._known[item, by_name] = self._number((by_name, *self._key(item, by_name)))
        return self._known[item, by_name]

    def forget(self, item: Item) -> None:
        for by_name in (True, False):
            self._known.pop((item, by_name), None)

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
    `query` and `key`.

    Args:
        root: the outermost box.
        step_key: returns equal keys for decisions that may be repetitions of each other, from their
            number and whether they are treated as passes of a loop.

    Returns:
        For each merged value, by label, and flow step, the boxes around it that represent
        repetitions, each with the number of its repetition.
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
    groups: dict[object, list[Leaf]] = {}
    for item in root.items:
        if isinstance(item, Leaf) and item.kind in ("input", "output"):
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
    keys = [tokens.of(item, by_name or isinstance(item, Leaf)) for item in items]
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
            count = _count(keys, place, period)
            if count >= _LEAST and (by_name or _has_box(items[place:other])):
                count = _alike(items, place, period, count, by_name, tokens)
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


def _has_box(items: Sequence[Item]) -> bool:
    return any(isinstance(item, Box) for item in items)


def _count(keys: Sequence[Token], place: int, period: int) -> int:
    """Return how often a series of items repeats from a position on."""
    unit = keys[place : place + period]
    count = 1
    while keys[place + count * period : place + (count + 1) * period] == unit:
        count += 1
    return count


def _alike(
    items: Sequence[Item], place: int, period: int, count: int, by_name: bool, tokens: _Tokens
) -> int:
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
    if period == 1 and isinstance(first[0], Leaf):
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
            _merge(one, other, units)
    if frame is None:
        return first[0]
    frame.times = [count]
    return frame


def _merge(one: Item, other: Item, units: Units) -> None:
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        one.take(other)
    elif isinstance(one, Box) and isinstance(other, Box):
        one.calls += other.calls
        if one.times != other.times:
            one.times = sorted({*one.times, *other.times})
        for inner, its in zip(one.items, other.items, strict=True):
            _merge(inner, its, units)


_PARTS = 40  # into so many parts at most, where no modules give any


def visible(item: Item) -> int:
    """Return the number of nodes in an item."""
    if isinstance(item, Leaf) or item.is_folded:
        return 1
    return sum(visible(child) for child in item.items)


def absorb(box: Box) -> None:
    """Draw modules that run a single op as that op, without a box around it."""
    for place, item in enumerate(box.items):
        if isinstance(item, Leaf):
            continue
        absorb(item)
        only = item.items[0] if len(item.items) == 1 else None
        if isinstance(only, Leaf) and only.kind == "op" and item.kind == "module":
            only.box = only.box or item
            only.times = max(only.times, *item.times)
            box.items[place] = only


def fold(root: Box, depth: int | None, most: int) -> bool:
    """Close boxes until at most a given number of nodes is left.

    The deepest boxes are closed first, all of a class at once, starting with the class that has the
    most nodes. If that is not enough, neighbours are merged, in the order of the run.
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
