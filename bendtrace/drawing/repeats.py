"""Repetitions: runs of blocks that are alike, and passes of loops, of which one is drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice

from bendtrace.drawing.nesting import Box, Item, Leaf

__all__ = ["Units", "collapse", "step_name"]

_LEAST = 3  # fewer repetitions are easier to read in full
_CANDIDATES = 8  # periods to try at one place

_NUMBER = re.compile(r"\d+")

Token = int
Units = dict[str, tuple[tuple[Box, int], ...]]


def step_name(number: int) -> str:
    """Return what a flow step is called in `Units`."""
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
        """Forget the tokens of an item that has changed."""
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
    """Put repetitions together, so that one stands for all.

    Collapsed are at least three neighbours, or series of neighbours, that are passes of a loop -
    the same sites of the same modules again - or calls of modules that are alike in class,
    functions, shapes and how their values are connected, and differ in name by a number: `h.0`
    and `h.1`, but not `query` and `key`.

    Args:
        root: the outermost box.
        step_key: equal for decisions that may be repetitions of each other, from their number and
            whether they are looked at as passes of a loop.

    Returns:
        For each collapsed value, by label, and flow step, the boxes around it that stand for
        repetitions, each with the number of the repetition that it was in.
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
    """Put inputs and outputs together that go to, or come from, the same nodes."""
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
                leaves[0].entries += other.entries
                leaves[0].times += other.times
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
    """Count how often a series of items comes, from a place on."""
    unit = keys[place : place + period]
    count = 1
    while keys[place + count * period : place + (count + 1) * period] == unit:
        count += 1
    return count


def _alike(
    items: Sequence[Item], place: int, period: int, count: int, by_name: bool, tokens: _Tokens
) -> int:
    """Count how many repetitions are also connected alike."""
    first = _wiring(items[place : place + period])
    for number in range(1, count):
        start = place + number * period
        if _wiring(items[start : start + period]) != first:
            return number
    return count


def _wiring(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """Return for each value which of the values before it, in the same items, it came from."""
    numbers: dict[str, int] = {}
    wiring: list[tuple[int, ...]] = []
    for number, leaf in enumerate(_leaves(items)):
        parents = leaf.entries[0].parents if leaf.entries else ()
        wiring.append(tuple(sorted(numbers[parent] for parent in parents if parent in numbers)))
        numbers.update((entry.label, number) for entry in leaf.entries)
    return wiring


def _leaves(items: Sequence[Item]) -> list[Leaf]:
    found: list[Leaf] = []
    for item in items:
        found += [item] if isinstance(item, Leaf) else item.leaves()
    return found


def _together(items: Sequence[Item], period: int, units: Units) -> Item:
    """Put repetitions into the first of them."""
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
            for leaf in _leaves(items[number * period : (number + 1) * period]):
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
        one.entries += other.entries
        one.steps += other.steps
        one.times += other.times
    elif isinstance(one, Box) and isinstance(other, Box):
        one.calls += other.calls
        if one.times != other.times:
            one.times = sorted({*one.times, *other.times})
        for inner, its in zip(one.items, other.items, strict=True):
            _merge(inner, its, units)
