"""How far the entries of a log are from the inputs and outputs of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from bendtrace.history.entries import LayerEntry

Distance: TypeAlias = tuple[int | None, int | None]


def depths(entries: Sequence[LayerEntry]) -> list[tuple[Distance, Distance]]:
    """Count the entries on the ways between each entry and the inputs and outputs.

    Args:
        entries: the entries, in their order.

    Returns:
        For each entry the length of the shortest and of the longest way from an input, and those to
        an output; None where no way leads.
    """
    above = _distances(entries, "input", lambda entry: entry.parents)
    below = _distances(entries[::-1], "output", lambda entry: entry.children)
    none = (None, None)
    return [(above.get(one.label, none), below.get(one.label, none)) for one in entries]


def _distances(
    entries: Iterable[LayerEntry], ends: str, before: Callable[[LayerEntry], list[str]]
) -> dict[str, tuple[int, int]]:
    """Return how far entries are from the ends, at least and at most, in the order of the ways."""
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        near = [found[label] for label in before(entry) if label in found]
        if entry.kind == ends:
            found[entry.label] = 0, 0
        elif near:
            found[entry.label] = (
                1 + min(low for low, _ in near), 1 + max(high for _, high in near)
            )  # fmt: skip
    return found
