"""Compares two runs that were written otherwise, by the values that both have.

Ops are usually aligned by what they are and where they stand. A port of a model computes the same
by other ops: one product for three, a table that is laid out otherwise. What it has in common with
the original are values. An op is *sound* if another op of the other run gives the same value, or
if such an op depends on it. The first that is not sound, though all that it reads is, is where the
runs part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace.bisecting.again import Unable
from bendtrace.bisecting.sides import Side
from bendtrace.history.entries import LayerEntry
from bendtrace.history.run_log import RunLog

__all__ = ["partings", "share_in_common"]


def share_in_common(a: RunLog, b: RunLog, pairs: dict[str, str]) -> float:
    """Return which share of the ops of the longer run is aligned with one of the other run."""
    counts = [sum(entry.kind == "op" for entry in log.entries) for log in (a, b)]
    aligned = sum(entry.kind == "op" and entry.label in pairs for entry in a.entries)
    return aligned / max(*counts, 1)


def partings(
    a: Side, b: Side, is_same: Callable[[Tensor, Tensor], bool]
) -> tuple[LayerEntry | None, LayerEntry | None]:
    """Return the first entry of each run that is not sound, though all that it reads is.

    Args:
        a: the first run.
        b: the second run.
        is_same: whether two values of one shape are the same.
    """
    ones, others = _values(a), _values(b)
    found_a: set[str] = set()
    found_b: set[str] = set()
    for shape in ones.keys() & others.keys():
        for (one, x), (other, y) in itertools.product(ones[shape], others[shape]):
            is_known = one.label in found_a and other.label in found_b
            if not is_known and is_same(x, y):
                found_a.add(one.label)
                found_b.add(other.label)
    (first_a, states_a), (first_b, states_b) = _first(a, found_a), _first(b, found_b)
    for one, other in itertools.product(states_a, states_b):
        if one.shape == other.shape:
            return one, other
    return first_a, first_b


def _values(side: Side) -> dict[Any, list[tuple[LayerEntry, Tensor]]]:
    """Return the entries with their values, by shape, without dimensions of one element."""
    found: dict[Any, list[tuple[LayerEntry, Tensor]]] = {}
    for entry in side.log.entries:
        value = _value(side, entry)
        if value is not None:
            value = value.detach().squeeze()
            found.setdefault((value.shape, value.is_floating_point()), []).append((entry, value))
    return found


def _value(side: Side, entry: LayerEntry) -> Tensor | None:
    """Return a value that can be told from others; None if there is none."""
    if entry.kind not in ("op", "state", "input"):
        return None
    value: Any = entry.tensor_contents
    if entry.kind == "state":
        value = side.again.state(entry)
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return value if is_plain and value.numel() > 1 else None


def _first(side: Side, found: set[str]) -> tuple[LayerEntry | None, list[LayerEntry]]:
    """Return the first op that is not sound, and what it reads of the state that is not."""
    entries = side.log.entries
    # What an op gives may be several entries, and other ops read one of them.
    op_of = {entry.label: entry.label if entry.index is None else entry.index for entry in entries}
    reads = {
        entry.label: {op_of[x] for x in _read_by(side, entry) if x in op_of} for entry in entries
    }
    sound = {op_of[label] for label in found}
    used = {op_of[entry.label] for entry in entries if entry.kind == "output"}  # by the result
    for entry in reversed(entries):
        for reached in (sound, used):
            if op_of[entry.label] in reached:
                reached |= reads[entry.label]
    other = used - sound
    states = {op_of[entry.label]: entry for entry in entries if entry.kind == "state"}
    for entry in entries:
        is_unsound = op_of[entry.label] in other and _value(side, entry) is not None
        if (
            entry.kind == "op"
            and is_unsound
            and other.isdisjoint(reads[entry.label] - states.keys())
        ):
            return entry, [states[x] for x in reads[entry.label] & states.keys() & other]
    return None, []


def _read_by(side: Side, entry: LayerEntry) -> list[str]:
    """Return the labels of what an entry was computed from, state included."""
    if entry.kind != "op":
        return entry.parents
    try:
        return [*entry.parents, *side.again.producers(entry)]
    except Unable:
        return entry.parents
