"""Exchanging the result of a call, or an operator, that C code in progress will give to a frame.

While C asks an object for its number, as `int(n)` does, the instruction that called it has no
result yet. So the interpreter's trace function is set until the frame comes to its next
instruction: then the result is on top of the frame's stack, and another object takes its place.

A trace function of ctypes, unlike one of `sys.settrace`, leaves `f_locals` alone. That all of this
works as expected is tried once (`can_exchange`), in CPython 3.11; tests/test_varying.py would
notice a change.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from bendtrace.source.stacks import address_of_result, layout, word_at

__all__ = ["can_exchange", "exchange", "is_awaited"]

_LINE_OF_C = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)
_RAISES, _STEPS = 1, 7  # PyTrace_EXCEPTION, PyTrace_OPCODE
_MARKS = 3


class _Awaited(NamedTuple):
    """A result that is going to be exchanged.

    Attributes:
        frame: the frame that receives it.
        offset: the instruction that gives it.
        address: where it will be.
        value: what takes its place.
        ended: is called then, with whether the instruction gave a result.
    """

    frame: FrameType
    offset: int
    address: int
    value: Any
    ended: Callable[[bool], object]


_awaited: list[_Awaited] = []


def exchange(frame: FrameType, value: Any, ended: Callable[[bool], object]) -> bool:
    """Have a frame receive another result of the instruction that it is at.

    Args:
        frame: a frame whose instruction has called the code that is running.
        value: what it receives.
        ended: is called when the instruction has ended, with whether it gave a result.

    Returns:
        Whether it will: not if somebody else traces the thread, or awaits another result.
    """
    places = layout()
    if places is None or sys.gettrace() is not None or _awaited:
        return False
    address = address_of_result(frame, places)
    if address is None:
        return False
    _awaited.append(_Awaited(frame, frame.f_lasti, address, value, ended))
    frame.f_trace_opcodes = True
    _set_trace(_callback, None)
    return True


def is_awaited(frame: FrameType) -> bool:
    """Return whether the result of the instruction that a frame is at will be exchanged."""
    return any(one.frame is frame and one.offset == frame.f_lasti for one in _awaited)


def _step(_: object, frame: int, what: int, __: object) -> int:
    if not _awaited or frame != id(_awaited[0].frame) or what not in (_RAISES, _STEPS):
        return 0
    one = _awaited.pop()
    one.frame.f_trace_opcodes = False
    _set_trace(None, None)
    if what == _STEPS:
        before = word_at(one.address)
        _api.Py_IncRef(ctypes.py_object(one.value))
        ctypes.c_size_t.from_address(one.address).value = id(one.value)
        if not before & _MARKS:
            _api.Py_DecRef(ctypes.cast(before, ctypes.py_object))
    one.ended(what == _STEPS)
    return 0


_api: Any = ctypes.pythonapi
_set_trace: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyEval_SetTrace", _api)
)
_kept = _LINE_OF_C(_step)  # as long as C may call it
_callback = ctypes.cast(_kept, ctypes.c_void_p)


class _Number:
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
    if sys.version_info[:2] != (3, 11) or layout() is None:
        return False
    if sys.gettrace() is not None:
        return False
    other = object()
    number: Any = _Number(other)
    count = sys.getrefcount(other)
    found = [int(number), *[int(number)], 1]
    try:
        int(number) + 1
    except TypeError:
        found.append(len(number.ended))
    fits = found[0] is other and found[1] is other and found[2:] == [1, 3]
    found.clear()
    return fits and sys.getrefcount(other) == count and number.ended == [True] * 3
