"""Counters of `while` loops: variables that each round adds a constant to."""

from __future__ import annotations

import ctypes
import sys
from types import CodeType, FrameType
from typing import Any

from bendtrace.source.bytecode import LOOKS_AT_VARIABLES, constant_of, single_steps

__all__ = ["assign", "counters_at", "local_in"]

_found: dict[int, tuple[CodeType, list[tuple[int, int, frozenset[str]]]]] = {}


def counters_at(code: CodeType, offset: int) -> frozenset[str]:
    """Return the local variables that count the rounds of a `while` loop around an instruction.

    Args:
        code: the code.
        offset: the instruction.
    """
    known = _found.get(id(code))
    if known is None:
        known = _found[id(code)] = (code, _loops(code))
    return frozenset().union(*(names for begin, end, names in known[1] if begin <= offset <= end))


def _loops(code: CodeType) -> list[tuple[int, int, frozenset[str]]]:
    """Return the loops of code, with their first and last instruction and their counters."""
    if not LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return []  # it could see that `assign` was there
    steps = list(single_steps(code))
    names = {step.offset: step.name for step in steps}
    counted: list[tuple[int, str]] = []
    for first, second, third, last in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        constant = constant_of(code, second.name, second.argument or 0)
        if (
            (first.name, third.name, last.name) == ("LOAD_FAST", "BINARY_OP", "STORE_FAST")
            and third.shown in ("+", "-", "+=", "-=")
            and type(constant) is int
            and first.value == last.value
        ):
            counted.append((last.offset, first.value))
    loops = []
    for step in steps:
        if "JUMP_BACKWARD" in step.name and names.get(step.value) != "FOR_ITER":
            inside = frozenset(
                name for offset, name in counted if step.value <= offset <= step.offset
            )
            loops.append((step.value, step.offset, inside))
    return loops


def local_in(frame: FrameType, name: str) -> Any:
    """Return what a local variable of a running frame holds; None if it holds nothing."""
    variables = frame.f_locals
    value = variables.get(name)
    if _COPIES:
        variables.clear()
    return value


def assign(frame: FrameType, name: str, value: Any) -> None:
    """Give a local variable of a running frame another value.

    Args:
        frame: the frame, of a function.
        name: the variable, which is neither free nor a cell.
        value: what it is to hold.
    """
    variables = frame.f_locals
    variables[name] = value
    if _COPIES:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()


# Before Python 3.13, `f_locals` is a copy, which would keep the values alive.
_COPIES = sys.version_info < (3, 13)
