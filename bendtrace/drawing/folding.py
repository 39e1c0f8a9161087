"""Fewer nodes: boxes that are drawn closed, and boxes that need not be drawn."""

from __future__ import annotations

from bendtrace.drawing.nesting import Box, Item, Leaf

__all__ = ["absorb", "fold", "visible"]

_PARTS = 40  # into so many parts at most, where no modules give any


def visible(item: Item) -> int:
    """Count the nodes that an item takes."""
    if isinstance(item, Leaf) or item.is_folded:
        return 1
    return sum(visible(child) for child in item.items)


def absorb(box: Box) -> None:
    """Draw modules in which a single op runs as that op, without a box around it."""
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
    """Close boxes until no more than so many nodes are left.

    The deepest boxes are closed first, all of a class at once, and of these the class that takes
    most nodes. Where that is not enough, neighbours are put together, in the order of the run.

    Args:
        root: the outermost box.
        depth: how many boxes deep to draw; None for all.
        most: how many nodes to draw.

    Returns:
        Whether anything was closed because of `most`.
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
        _cut(root, most)
    return True


def _cut(root: Box, most: int) -> None:
    """Put neighbours together, but for what goes into the model and what comes out of it."""
    inner = [i for i in root.items if isinstance(i, Box) or i.kind not in ("input", "output")]
    size = -(-len(inner) // max(min(most, _PARTS), 1))
    parts: dict[Item, Box] = {}
    for start in range(0, len(inner), size):
        part = Box("part", items=inner[start : start + size], is_folded=True)
        parts[part.items[0]] = part
    inside = set(inner)
    root.items = [parts.get(i, i) for i in root.items if i in parts or i not in inside]
