"""C code that is in progress while a question is asked, and what it may hold out of sight.

The frames show what Python holds, but not the variables of the C code that an instruction has
called: how far `sum` has come in a list, for example. A state can be read only if there are no such
variables, or they do not matter for what follows.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from bendtrace.source import stacks
from bendtrace.tape.scalars import RETIRED, TRACED
from bendtrace.tape.structure import can_build, is_heap_type
from bendtrace.torch_rules.functions import is_torchs_function


def may_hide(stack: stacks.Stack, callee: FrameType | None, is_asking: bool) -> bool:
    """Return whether C, called by an instruction, may hold something that cannot be read.

    Args:
        stack: the frame at the instruction, with the operands of the instruction.
        callee: the frame that was called from there; None for the innermost frame.
        is_asking: whether the question is asked by this instruction itself.
    """
    operands = [value for value in stack.operands or () if value is not stacks.EMPTY]
    name = stack.name
    asks_here = is_asking or name not in _CALLS or _is_single_call(operands)
    if asks_here and _are_repeated(operands):
        hides = True  # it is not known which of them asks
    elif name in _CALLS:
        hides = not operands or _call_hides(operands[0], operands[1:], callee)
        hides = hides or (is_asking and _numbers_in(operands) > 1)
        # Python may still be making a tuple of what `f(*x)` is given.
        hides = hides or (name == "CALL_FUNCTION_EX" and type(operands[1]) not in (tuple, list))
    elif name in _TEXTS:
        hides = not all(map(_shows_itself, operands))
    elif name in _TRANSPARENT or name.startswith("POP_JUMP"):
        hides = False
    elif name in _ON_VALUES:
        hides = not all(map(_is_single, operands)) or _numbers_in(operands) > 2
    elif name in _ON_ITEMS:
        container = operands[1] if name == "STORE_SUBSCR" and len(operands) > 1 else operands[0]
        hides = isinstance(container, (dict, set)) or _numbers_in(operands, objects=True) > 1
    elif name == "FOR_ITER":
        iterator = stack.below[-1] if stack.below else None
        hides = type(iterator) is not types.GeneratorType and not _is_of_python(iterator)
    elif name in ("UNPACK_SEQUENCE", "GET_ITER"):
        hides = not operands or not isinstance(operands[0], Tensor)
    else:
        hides = True
    return hides


def _call_hides(called: Any, given: list[Any], callee: FrameType | None) -> bool:
    kind = type(called)
    if kind is functools.partial:
        given = [*called.args, *called.keywords.values(), *given]
        return _call_hides(called.func, given, callee)
    if kind is types.MethodType:
        return _call_hides(called.__func__, [called.__self__, *given], callee)
    if kind is types.FunctionType:
        return False
    if isinstance(called, type):
        if called in _SINGLE:
            return _keeps_parts(called, given)
        return callee is None or callee.f_code.co_name != "__init__" or not _is_class(called)
    # C code of torch may ask an object among its arguments for its number, more than once.
    is_reported = callee is None or callee.f_code.co_name == "__torch_function__"
    if kind in _METHODS:
        return not (is_torchs_function(called) and is_reported)
    if is_torchs_function(called) and kind is not types.BuiltinFunctionType:
        return False
    if kind is types.BuiltinFunctionType:
        if called in _SINGLE:
            return _keeps_parts(called, given)
        module = called.__module__ or ""
        owner = called.__self__
        is_torchs = (
            module.split(".")[0] in ("torch", "_VariableFunctions")
            or isinstance(owner, Tensor)
            or getattr(owner, "__module__", "") in ("torch", "torch._C")
        )
        return not (is_torchs and is_reported)
    found = next((vars(cls)["__call__"] for cls in kind.__mro__ if "__call__" in vars(cls)), None)
    return not isinstance(found, types.FunctionType)


def _keeps_parts(called: Any, given: list[Any]) -> bool:
    """Return whether a C function that asks one question for each thing has several things."""
    if called in _SHOWING:
        return len(given) > 1 + (called is format) or not all(map(_shows_itself, given))
    if called is range:
        return _numbers_in(given, objects=True) > 1
    return any(map(_joins_iterators, given))


def _joins_iterators(value: Any) -> bool:
    """Return whether an iterator keeps what one has given, while it asks another."""
    kind = type(value)
    if kind not in (zip, map, enumerate, filter):
        return False
    iterators = value.__reduce__()[1][kind in (map, filter) :]
    walked = iterators[:1] if kind is enumerate else iterators
    return len(walked) > 1 or any(map(_joins_iterators, walked))


def _shows_itself(value: Any) -> bool:
    """Return whether making a text of a value runs no C code that makes texts of other values."""
    kind = type(value)
    if kind is str or kind in _NUMBERS or kind in TRACED or kind in RETIRED:
        return True
    if isinstance(value, Tensor):
        return True
    ways = (getattr(kind, name) for name in ("__repr__", "__str__", "__format__"))
    return all(isinstance(way, types.FunctionType) or way in _OF_OBJECT for way in ways)


def _numbers_in(values: Iterable[Any], objects: bool = False) -> int:
    """Count the traced scalars among the arguments of a call.

    Args:
        values: the arguments.
        objects: whether to count also objects of Python, which may stand for numbers.
    """
    count = 0
    for value in values:
        if type(value) in TRACED or (objects and _is_of_python(value)):
            count += 1
        elif isinstance(value, slice):
            count += _numbers_in((value.start, value.stop, value.step), objects)
        elif isinstance(value, (tuple, list)):
            count += _numbers_in(value, objects)
    return count


def _is_single_call(operands: list[Any]) -> bool:
    called = operands[0] if operands else None
    return isinstance(called, (type, types.BuiltinFunctionType)) and called in _SINGLE


def _are_repeated(values: Iterable[Any]) -> bool:
    """Return whether something that can ask is passed to a call more than once."""
    found: list[int] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor) or _is_of_python(value):
            found.append(id(value))
        elif isinstance(value, slice):
            waiting += value.start, value.stop, value.step
        elif type(value) in (tuple, list):
            waiting += value
    return len(set(found)) < len(found)


def _is_of_python(value: Any) -> bool:
    """Return whether an object has a class defined in Python, and is no container."""
    return _is_class(type(value)) and not isinstance(value, _CONTAINERS)


def _is_class(kind: type) -> bool:
    return is_heap_type(kind) and can_build(kind)


def _is_single(value: Any) -> bool:
    """Return whether an operator on a value asks at most one question at a time."""
    kind = type(value)
    return (
        kind in TRACED or kind in RETIRED or isinstance(value, Tensor)
        or kind in _NUMBERS or _is_of_python(value)
    )  # fmt: skip


_NUMBERS = frozenset({int, float, bool, complex, type(None)})
_CONTAINERS = (tuple, list, dict, set, frozenset, str, bytes)
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
# C functions that ask one question, and keep nothing that they need after it.
_SINGLE: frozenset[Any] = frozenset(
    {
        any, all, next, iter, len, isinstance, issubclass, hasattr, getattr, setattr, abs, bool,
        int, float, range, super, callable, id, repr, str, format, print,
    }
)  # fmt: skip
_SHOWING: frozenset[Any] = frozenset({repr, str, format, print})
_METHODS = frozenset({types.MethodDescriptorType, types.WrapperDescriptorType})
_OF_OBJECT = (object.__repr__, object.__str__, object.__format__)
# Instructions during which C holds nothing that is needed afterwards.
_TRANSPARENT = frozenset(
    {
        "TO_BOOL", "UNARY_NOT", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "LOAD_ATTR",
        "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "BEFORE_WITH",
        "LOAD_SPECIAL", "SEND", "UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT",
    }
)  # fmt: skip
_TEXTS = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE"})
_ON_VALUES = frozenset({"BINARY_OP", "COMPARE_OP", "IS_OP"})
_ON_ITEMS = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "BINARY_SLICE"})
