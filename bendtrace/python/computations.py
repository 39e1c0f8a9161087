"""Functions that only compute: what they return follows from what they receive."""

from __future__ import annotations

import builtins
import math
import operator
import types
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from bendtrace.python.bytecode import single_steps

# Functions of C that make one number of numbers, and do nothing else.
COMPUTING: frozenset[Any] = frozenset(
    {
        int, float, operator.index, math.acos, math.asin, math.atan, math.atan2, math.cbrt,
        math.ceil, math.comb, math.copysign, math.cos, math.cosh, math.degrees, math.erf, math.exp,
        math.exp2, math.expm1, math.fabs, math.factorial, math.floor, math.fmod, math.gcd,
        math.hypot, math.isqrt, math.lcm, math.log, math.log10, math.log1p, math.log2, math.pow,
        math.radians, math.remainder, math.sin, math.sinh, math.sqrt, math.tan, math.tanh,
        math.trunc,
    }
)  # fmt: skip


def item_of(container: Any, key: Any) -> Any:
    """Return an item of a list, tuple or dict of numbers."""
    return container[key]


def item_among(key: Any, *items: Any) -> Any:
    """Return an item of a tuple that has some items."""
    return items[key]


def contains_not(container: Any, item: Any) -> bool:
    """Return whether an item is not in a list."""
    return item not in container


def set_item(container: Any, key: Any, value: Any) -> None:
    """Assign an item of a list."""
    container[key] = value


# Functions that make a list of numbers, and leave what they receive as it is.


def list_of(*items: Any) -> list[Any]:
    """Return a list of some items."""
    return [*items]


def with_item(items: list[Any], key: Any, value: Any) -> list[Any]:
    """Return a list behind an assignment to one of its items."""
    changed = [*items]
    changed[key] = value
    return changed


def without_item(items: list[Any], item: Any) -> list[Any]:
    """Return a list without the first of its items that is equal to another one."""
    changed = [*items]
    changed.remove(item)
    return changed


def with_changes(
    items: list[Any], count: int, positions: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """Return a list of some length that has other items at some positions."""
    changed = items[:count]
    changed += [None] * (count - len(changed))
    for position, value in zip(positions, values, strict=True):
        changed[position] = value
    return changed


def in_order(items: list[Any], reverse: bool) -> list[Any]:
    """Return numbers that are put in order."""
    return sorted(items, reverse=reverse)


def items_at(items: list[Any], positions: list[int]) -> list[Any]:
    """Return the items at some positions."""
    return [items[position] for position in positions]


def accumulate(before: list[Any] | None, items: Sequence[Any]) -> list[Any]:
    """Return a list that a loop has appended to (see `record/accumulation.py`)."""
    return [*before, *items] if before else [*items]


def repeat(items: list[Any], count: int) -> list[Any]:
    """Return the items of a list again and again (see `record/accumulation.py`)."""
    return items * count


def row_at(rows: Sequence[Any], number: int) -> Any:
    """Return one of the rows that a loop goes through (see `record/rows.py`)."""
    return rows[number]


NEVER_RAISING = frozenset({accumulate, in_order, items_at, list_of, repeat, row_at, with_changes})
GIVING_LISTS: frozenset[Any] = frozenset(
    {in_order, items_at, list_of, repeat, with_changes, with_item, without_item}
)


# Builtins that keep nothing and read nothing but what they receive.
_HARMLESS: frozenset[Any] = frozenset(
    {
        abs, all, any, bool, dict, divmod, enumerate, filter, float, frozenset, int, isinstance,
        len, list, map, max, min, range, repr, reversed, round, set, sorted, str, sum, tuple, zip,
    }
)  # fmt: skip
_STORING = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT", "YIELD")
_PLAIN = (bool, int, float, str)
_DEEPEST = 4


def is_computation(function: Any) -> bool:
    """Return whether a function of Python only computes: it calls no code but other such ones.

    It may still change what it receives.
    """
    return isinstance(function, types.FunctionType) and _function_only_computes(function, 0)


def _function_only_computes(function: types.FunctionType, depth: int) -> bool:
    if function.__closure__ or function.__kwdefaults__:
        return False
    if not all(value is None or type(value) in _PLAIN for value in function.__defaults__ or ()):
        return False
    return _code_only_computes(function.__code__, function.__globals__, depth)


def _code_only_computes(code: CodeType, space: Mapping[str, Any], depth: int) -> bool:
    if depth > _DEEPEST:
        return False
    for step in single_steps(code):
        if step.name.startswith(_STORING):
            return False
        if step.name in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = space.get(step.value, getattr(builtins, str(step.value), None))
            if not _may_be_used(value, depth):
                return False
    return all(
        _code_only_computes(inner, space, depth + 1)
        for inner in code.co_consts
        if isinstance(inner, CodeType)
    )


def _may_be_used(value: Any, depth: int) -> bool:
    if isinstance(value, types.FunctionType):
        return _function_only_computes(value, depth + 1)
    if isinstance(value, type) and issubclass(value, Exception):
        return True
    if value is None or type(value) in _PLAIN or value is math:
        return True
    try:
        return value in _HARMLESS or value in COMPUTING
    except TypeError:
        return type(value).__module__ == "typing"
