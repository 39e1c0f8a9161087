"""What code does with containers: whether it only adds to them, judging by its instructions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from bendtrace.source.bytecode import CONSTANTS, Step, single_steps

__all__ = ["ADDS", "read_names"]

# Methods that add to a list or deque, and say nothing of what is in it.
ADDS = frozenset({"append", "extend"})

_found: dict[int, tuple[CodeType, frozenset[str]]] = {}


def read_names(code: CodeType) -> frozenset[str]:
    """Return the names under which code uses something in another way than to add to it.

    These are names of attributes, globals and variables of functions around it. In
    `self.seen["x"].append(y)`, nothing but an item of what `seen` stands for is added to. Texts
    in the code count as names: code may look them up.

    Args:
        code: the code, without the functions in it.
    """
    known = _found.get(id(code))
    if known is None:
        steps = list(single_steps(code))
        names = {step.value for at, step in enumerate(steps) if _is_read(steps, at)}
        names.update(_texts_in(code.co_consts))
        known = _found[id(code)] = (code, frozenset(names))
    return known[1]


def _is_read(steps: list[Step], at: int) -> bool:
    """Whether an instruction uses a name, and what it stands for is not only added to."""
    name = steps[at].name
    if name.endswith("_FAST") or not isinstance(steps[at].value, str):
        return False
    if name.startswith(("STORE_", "DELETE_")) or name not in _LOADS:
        return name.startswith(("STORE_", "DELETE_", "LOAD_", "IMPORT_")) and name not in _IDLE
    at += 1
    while at + 1 < len(steps) and steps[at].name in _KEYS and _is_item(steps[at + 1]):
        at += 2
    return not (_is_call(steps[at]) and steps[at].value in ADDS)


def _is_call(step: Step) -> bool:
    """Whether an instruction loads a method to call it, so that nothing can keep it."""
    if step.name == "LOAD_ATTR":  # since Python 3.12
        return sys.version_info >= (3, 12) and bool((step.argument or 0) & 1)
    return step.name == "LOAD_METHOD"


def _is_item(step: Step) -> bool:
    return step.name == "BINARY_SUBSCR" or (step.name == "BINARY_OP" and step.shown == "[]")


def _texts_in(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (tuple, frozenset)):
            yield from _texts_in(tuple(value))


_LOADS = frozenset(
    {
        "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_SUPER_ATTR",
    }
)  # fmt: skip
_KEYS = CONSTANTS | {"LOAD_FAST"}
_IDLE = CONSTANTS | {"LOAD_CLOSURE"}  # (a function in the code has its own look at the variable)
