"""Traced scalars that a run has left outside of what it is known to change.

In attributes of classes, items of counters, variables of closures: whoever looks there next must
find the numbers that eager would have left.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

from bendtrace.recording.encoding import make_keys_plain
from bendtrace.recording.parts import slots_of
from bendtrace.recording.scalars import TracedScalar

__all__ = ["holds", "make_plain"]


def holds(scalars: list[TracedScalar]) -> list[int]:
    """Return how many hold each of some scalars, and then what that is for one in lists only."""
    every = [*scalars, object()]
    counts = [sys.getrefcount(scalar) for scalar in every]
    return [*counts[:-1], counts[-1] + 1]


def make_plain(scalars: list[TracedScalar], before: list[int]) -> None:
    """Exchange, wherever they are held, the scalars that code has kept.

    Those in tuples, and in the variables of what still runs, stay.

    Args:
        scalars: all of a run.
        before: what `holds` said of those of the arguments, before it.
    """
    now = holds(scalars)
    before = [*before[:-1], *[now[-1]] * (len(now) - len(before))]
    left = [
        scalar for scalar, count, known in zip(scalars, now, before, strict=False) if count > known
    ]
    if not left:
        return
    numbers = {id(scalar): scalar._value for scalar in left}
    for holder in gc.get_referrers(*left):
        if holder is not left and holder is not scalars:
            _exchange(holder, numbers)


def _exchange(holder: Any, numbers: dict[int, Any]) -> None:
    if isinstance(holder, dict):
        for key, value in _found(holder.items(), numbers):
            _put(holder, key, value)
        if any(id(key) in numbers for key in holder):
            make_keys_plain(holder)
    elif isinstance(holder, (list, collections.deque)):
        for position, value in _found(enumerate(holder), numbers):
            holder[position] = value
    elif isinstance(holder, set):
        for member in [member for member in holder if id(member) in numbers]:
            holder.discard(member)
            holder.add(numbers[id(member)])
    elif isinstance(holder, types.CellType):
        holder.cell_contents = numbers[id(holder.cell_contents)]
    elif not isinstance(holder, types.FrameType):
        own = getattr(holder, "__dict__", None)
        if type(own) is dict:
            _exchange(own, numbers)
        named = ((name, getattr(holder, name, None)) for name in slots_of(type(holder)))
        for name, value in _found(named, numbers):
            object.__setattr__(holder, name, value)


def _found(pairs: Iterable[tuple[Any, Any]], numbers: dict[int, Any]) -> list[tuple[Any, Any]]:
    return [(key, numbers[id(value)]) for key, value in pairs if id(value) in numbers]


def _put(holder: dict[Any, Any], key: Any, value: Any) -> None:
    if "__module__" in holder:  # as the attributes of a class have it, which have caches
        for owner in gc.get_referrers(holder):
            if isinstance(owner, type) and vars(owner).get(key) is holder[key]:
                type.__setattr__(owner, key, value)
                return
    dict.__setitem__(holder, key, value)
