"""Exchanging the result of a call, or an operator, that C code in progress will give to a frame.

While C asks an object for its number, as `int(n)` does, the instruction that called it has no
result yet. So the interpreter's trace function is set until the frame comes to its next
instruction: then the result is on top of the frame's stack, and another object takes its place.

A trace function of ctypes, unlike one of `sys.settrace`, leaves `f_locals` alone. That all of this
works as expected is tried once (`can_exchange`), in CPython 3.11; tests/test_varying.py would
notice a change.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bendtrace.python.bytecode import single_steps
from bendtrace.python.stacks import address_of_result, frame_layout, word_at

_LINE_OF_C = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)
_RAISES, _STEPS = 1, 7  # PyTrace_EXCEPTION, PyTrace_OPCODE
_MARKS = 3


class _PendingExchange(NamedTuple):
    """A result that is going to be exchanged.

    Attributes:
        frame: the frame that receives it.
        offset: the instruction that gives it.
        address: where it will be; 0 if nothing takes its place.
        value: what takes its place.
        ended: is called then, with whether the instruction gave a result.
    """

    frame: FrameType
    offset: int
    address: int
    value: Any
    ended: Callable[[bool], object]


_awaited: list[_PendingExchange] = []


class _Thread(threading.local):
    """Keeps the watch of each thread."""

    watch: Callable[[int, int], object] | None = None


_own = _Thread()


def exchange(frame: FrameType, value: Any, ended: Callable[[bool], object]) -> bool:
    """Have a frame receive another result of the instruction that it is at.

    Args:
        frame: a frame whose instruction has called the code that is running.
        value: what it receives.
        ended: is called when the instruction has ended, with whether it gave a result.

    Returns:
        Whether it will: not if somebody else traces the thread, or awaits another result.
    """
    places = frame_layout()
    if places is None or sys.gettrace() is not None or _awaited:
        return False
    address = address_of_result(frame, places)
    if address is None:
        return False
    _awaited.append(_PendingExchange(frame, frame.f_lasti, address, value, ended))
    frame.f_trace_opcodes = True
    _set_trace(_callback, None)
    return True


def call_after(frame: FrameType, ended: Callable[[bool], object]) -> bool:
    """Have a function called when the instruction of a frame has ended, as `exchange` does."""
    if sys.gettrace() is not None or _awaited:
        return False
    _awaited.append(_PendingExchange(frame, frame.f_lasti, 0, None, ended))
    frame.f_trace_opcodes = True
    _set_trace(_callback, None)
    return True


def watch(each: Callable[[int, int], object]) -> bool:
    """Have a function called for the events of the thread's frames, until `watch_no_more`.

    Args:
        each: receives the address of a frame, and the kind of event. Frames whose
            `f_trace_opcodes` is set report each instruction.

    Returns:
        Whether it is called: not if something else traces the thread.
    """
    if sys.gettrace() is not None or _own.watch is not None or _awaited:
        return False
    _own.watch = each
    _set_trace(_callback, None)
    return True


def pause_watch() -> None:
    """Report nothing until `resume_watch`."""
    if not _awaited:
        _set_trace(None, None)


def resume_watch() -> None:
    """Go on reporting."""
    if _own.watch is not None:
        _set_trace(_callback, None)


def watch_no_more() -> None:
    """End what `watch` has begun."""
    _own.watch = None
    pause_watch()


def is_awaited(frame: FrameType) -> bool:
    """Return whether the result of the instruction that a frame is at will be exchanged."""
    return any(one.frame is frame and one.offset == frame.f_lasti for one in _awaited)


def _on_instruction(_: object, frame: int, what: int, __: object) -> int:
    if _awaited and frame == id(_awaited[0].frame) and what in (_RAISES, _STEPS):
        _put_result(what)
    if _own.watch is not None:  # it looks at what the next instruction really receives
        _own.watch(frame, what)
    return 0


def _put_result(what: int) -> None:
    one = _awaited.pop()
    if _own.watch is None:
        one.frame.f_trace_opcodes = False
        _set_trace(None, None)
    if what == _STEPS and one.address:
        # The old result is released last: that may run a `__del__`, which has to find a whole
        # stack. Where tags (of 3.14) say that it is not counted, nothing is released.
        before = word_at(one.address)
        _api.Py_IncRef(ctypes.py_object(one.value))
        ctypes.c_size_t.from_address(one.address).value = id(one.value)
        if not before & _MARKS:
            _api.Py_DecRef(ctypes.cast(before, ctypes.py_object))
    one.ended(what == _STEPS)


_api: Any = ctypes.pythonapi
# `PYFUNCTYPE` keeps the GIL during the call, which `PyEval_SetTrace` needs; `CFUNCTYPE` drops it.
_set_trace: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyEval_SetTrace", _api)
)
_kept = _LINE_OF_C(_on_instruction)  # as long as C may call it
_callback = ctypes.cast(_kept, ctypes.c_void_p)


class _ProbeNumber:
    """Has its number exchanged."""

    def __init__(self, other: object) -> None:
        self.other = other
        self.ended: list[bool] = []

    def __int__(self) -> int:
        exchange(sys._getframe(1), self.other, self.ended.append)
        return 12345

    __index__ = __int__


@functools.lru_cache(maxsize=1)
def can_exchange() -> bool:
    """Return whether results can be exchanged in this Python."""
    if sys.version_info[:2] != (3, 11) or frame_layout() is None:
        return False
    if sys.gettrace() is not None:
        return False
    other = object()
    number: Any = _ProbeNumber(other)
    count = sys.getrefcount(other)
    found = [int(number), *[int(number)], 1]
    try:
        int(number) + 1  # fails if the object is there before the addition
    except TypeError:
        found.append(len(number.ended))
    fits = found[0] is other and found[1] is other and found[2:] == [1, 3]
    found.clear()
    return fits and sys.getrefcount(other) == count and number.ended == [True] * 3


# Functions that only compute: what they return follows from what they receive.

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


def item_among(key: Any, in_list: bool, *items: Any) -> Any:
    """Return an item of a list or tuple that has some items."""
    return ([*items] if in_list else items)[key]


def set_item(container: Any, key: Any, value: Any) -> None:
    """Assign an item of a list."""
    container[key] = value


def stored(value: Any, before: Any, key: int, position: int, count: int) -> Any:
    """Return an item of a list of some length behind an assignment to one of its items."""
    return value if key % count == position else before


def in_order(position: int, *numbers: Any) -> Any:
    """Return the number at some position among numbers that are put in order."""
    return sorted(numbers)[position]


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
