"""Exchanging the result of a call, or an operator, that C code in progress will give to a frame.

While C asks an object for its number, as `int(n)` does, the instruction that called it has no
result yet. So the frame reports its next instruction: then the result is on top of the frame's
stack, and another object takes its place.

CPython 3.11 reports instructions to the interpreter's trace function. One of ctypes, unlike one of
`sys.settrace`, leaves `f_locals` alone. From 3.12 on, `sys.monitoring` reports those of single code
objects. That all of this works as expected is tried once (`can_exchange`).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bendtrace.python.stacks import (
    address_of_result,
    end_of_instruction,
    frame_layout,
    monitoring_tool,
    object_at,
    put_on_stack,
)


class _PendingExchange(NamedTuple):
    """A result that is going to be exchanged.

    Attributes:
        frame: the frame that receives it.
        offset: the instruction that gives it.
        after: the instruction behind that.
        address: where it will be; 0 if nothing takes its place.
        value: what takes its place.
        ended: is called then, with whether the instruction gave a result.
    """

    frame: FrameType
    offset: int
    after: int
    address: int
    value: Any
    ended: Callable[[bool], object]


class _FrameWatch(NamedTuple):
    """The functions that are called for the frames of a thread (see `watch`)."""

    starts: Callable[[FrameType], object]
    steps: Callable[[FrameType], object]
    fails: Callable[[], object]


def exchange(frame: FrameType, value: Any, ended: Callable[[bool], object]) -> bool:
    """Have a frame receive another result of the instruction that it is at.

    Args:
        frame: a frame whose instruction has called the code that is running.
        value: what it receives.
        ended: is called when the instruction has ended, with whether it gave a result.

    Returns:
        Whether it will: not if the thread awaits another result, or something else traces it.
    """
    places = frame_layout()
    address = None if places is None else address_of_result(frame, places)
    return address is not None and _await(frame, address, value, ended)


def call_after(frame: FrameType, ended: Callable[[bool], object]) -> bool:
    """Have a function called when the instruction of a frame has ended, as `exchange` does."""
    return _await(frame, 0, None, ended)


def _await(frame: FrameType, address: int, value: Any, ended: Callable[[bool], object]) -> bool:
    end_exchange()
    if _own.pending is not None or not _own.reporter.begin():
        return False
    after = end_of_instruction(frame.f_code, frame.f_lasti)
    _own.pending = _PendingExchange(frame, frame.f_lasti, after, address, value, ended)
    _own.reporter.report(frame)
    return True


def watch(
    starts: Callable[[FrameType], object],
    steps: Callable[[FrameType], object],
    fails: Callable[[], object],
) -> bool:
    """Have functions called for the frames of this thread, until `watch_no_more`.

    Args:
        starts: receives each frame that begins.
        steps: receives a frame before each of its instructions, if `report_steps` was called for
            it.
        fails: is called if one of the two has raised an error, as where a signal interrupts it. The
            error is raised in the code that is reported.

    Returns:
        Whether they are: not if something else traces the thread.
    """
    end_exchange()
    if _own.watch is not None or _own.pending is not None or not _own.reporter.begin():
        return False
    _own.watch = _FrameWatch(starts, steps, fails)
    _own.reporter.watch()
    return True


def report_steps(frame: FrameType) -> None:
    """Report the instructions of a frame to the watch."""
    _own.reporter.report(frame)


def pause_watch() -> None:
    """Report nothing until `resume_watch`."""
    if _own.pending is None:
        _own.reporter.pause()


def resume_watch() -> None:
    """Go on reporting."""
    if _own.watch is not None:
        _own.reporter.resume()


def watch_no_more() -> None:
    """End what `watch` has begun."""
    _own.watch = None
    _own.reporter.end()
    if _own.pending is not None and _own.reporter.begin():
        _own.reporter.report(_own.pending.frame)


def is_awaited(frame: FrameType) -> bool:
    """Return whether the result of the instruction that a frame is at will be exchanged."""
    one = _own.pending
    return one is not None and one.frame is frame and one.offset == frame.f_lasti


def end_exchange() -> None:
    """Give up the result that is awaited, if its instruction has raised an error."""
    one = _own.pending
    if one is None:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not one.frame:
        frame = frame.f_back
    if frame is None or not is_awaited(frame):
        _finish(one, False)


def _finish(one: _PendingExchange, gave: bool) -> None:
    _own.pending = None
    if _own.watch is None:
        _own.reporter.end(one.frame)
    if gave and one.address:
        put_on_stack(one.address, one.value)
    one.ended(gave)


def _come_to_instruction(frame: FrameType, gave: bool) -> None:
    """Exchange the result of a frame's last instruction, and let the watch look at the next one.

    Args:
        frame: the frame.
        gave: whether the last one gave a result.
    """
    one = _own.pending
    if one is not None and frame is one.frame:
        _finish(one, gave)
    if _own.watch is not None:  # it sees what the next instruction really receives
        _own.watch.steps(frame)


def _give_up() -> None:
    """End what is watched and awaited, because of an error."""
    pending, watch = _own.pending, _own.watch
    watch_no_more()
    if pending is not None:
        _finish(pending, False)
    if watch is not None:
        watch.fails()


class _TraceFunction:
    """Reports what a thread executes, by the interpreter's trace function (CPython 3.11)."""

    _STARTS, _RAISES, _STEPS = 0, 1, 7  # PyTrace_CALL, PyTrace_EXCEPTION, PyTrace_OPCODE

    def __init__(self) -> None:
        api: Any = ctypes.pythonapi
        # `PYFUNCTYPE` keeps the GIL during the call, which these need; `CFUNCTYPE` drops it.
        self._set: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            ("PyEval_SetTrace", api)
        )
        self._set_error: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
            ("PyThreadState_SetAsyncExc", api)
        )
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        )
        self._kept = kind(self._handle)  # as long as C may call it
        self._callback = ctypes.cast(self._kept, ctypes.c_void_p)

    def begin(self) -> bool:
        return _own.watch is not None or sys.gettrace() is None

    def report(self, frame: FrameType) -> None:
        frame.f_trace_opcodes = True
        if _own.pending is not None:
            self.resume()

    def watch(self) -> None:
        self.resume()

    def pause(self) -> None:
        self._set(None, None)

    def resume(self) -> None:
        self._set(self._callback, None)

    def end(self, frame: FrameType | None = None) -> None:
        """Report no frame any more; or none but those of a watch, of which this is none."""
        self.pause()
        if frame is not None:
            frame.f_trace_opcodes = False
            return
        frame = sys._getframe(1)
        while frame is not None:
            frame.f_trace_opcodes = False
            frame = frame.f_back

    def _handle(self, _: object, address: int, what: int, __: object) -> int:
        try:
            if what == self._STEPS:
                frame = object_at(address)
                if frame.f_trace_opcodes:
                    _come_to_instruction(frame, True)
            elif what == self._STARTS:
                if _own.watch is not None:
                    _own.watch.starts(object_at(address))
            elif what == self._RAISES:
                if _own.pending is not None and address == id(_own.pending.frame):
                    _finish(_own.pending, False)
        except BaseException as error:
            _give_up()
            # Of Ctrl-C, or of the handler of an alarm. ctypes would print it and go on, so it is
            # set as an asynchronous one of the thread; such a one is a class, and is raised at the
            # thread's next call or jump. That must not be here: so what sets it is no call, but the
            # look-up of an item that is missing.
            raised = error
            members = {"__new__": lambda kind, *given: raised}
            kind = type(type(error).__name__, (type(error),), members)
            setting: defaultdict[int, int] = defaultdict(
                functools.partial(self._set_error, threading.get_ident(), kind)
            )
            setting[0]
        return 0


class _Monitor:
    """Reports what a thread executes, by `sys.monitoring` (CPython 3.12 and newer)."""

    def __init__(self) -> None:
        self._tool: int | None = None
        self._thread = threading.get_ident()
        self._codes: dict[int, CodeType] = {}  # by identity: equal code is reported apart
        self._is_paused = False

    def begin(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        if self._tool is None:
            self._tool = monitoring_tool()
            if self._tool is not None:
                events = monitoring.events
                monitoring.register_callback(self._tool, events.INSTRUCTION, self._step)
                for event in (events.PY_START, events.PY_RESUME):
                    monitoring.register_callback(self._tool, event, self._start)
        return self._tool is not None

    def report(self, frame: FrameType) -> None:
        code = frame.f_code
        if id(code) not in self._codes:
            self._codes[id(code)] = code
            self._set_local(code, sys.monitoring.events.INSTRUCTION)  # type: ignore[attr-defined]

    def _set_local(self, code: CodeType, events: int) -> None:
        sys.monitoring.set_local_events(self._tool, code, events)  # type: ignore[attr-defined]

    def watch(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._is_paused = False
        events = monitoring.events
        monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def end(self, frame: FrameType | None = None) -> None:
        if self._tool is None:
            return
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        for code in self._codes.values():
            self._set_local(code, 0)
        self._codes.clear()
        if frame is None:
            monitoring.set_events(self._tool, 0)
        monitoring.free_tool_id(self._tool)
        self._tool = None

    def _start(self, code: CodeType, offset: int) -> None:
        if _own.watch is not None and self._reports():
            try:
                _own.watch.starts(sys._getframe(1))
            except BaseException:
                _give_up()
                raise

    def _step(self, code: CodeType, offset: int) -> None:
        if self._reports():
            one = _own.pending
            gave = one is not None and offset == one.after
            try:
                _come_to_instruction(sys._getframe(1), gave)
            except BaseException:
                _give_up()
                raise

    def _reports(self) -> bool:
        # `sys.monitoring` reports what all threads do.
        return threading.get_ident() == self._thread and (
            not self._is_paused or _own.pending is not None
        )


class _Thread(threading.local):
    """The watch of a thread, and the result that it is going to exchange."""

    def __init__(self) -> None:
        self.watch: _FrameWatch | None = None
        self.pending: _PendingExchange | None = None
        self.reporter = _Monitor() if sys.version_info >= (3, 12) else _TraceFunction()


_own = _Thread()


class _ProbeNumber:
    """Has its number exchanged."""

    def __init__(self, other: object) -> None:
        self.other = other
        self.ended: list[bool] = []

    def __int__(self) -> int:
        exchange(sys._getframe(1), self.other, self.ended.append)
        return 12345

    def __float__(self) -> float:
        exchange(sys._getframe(1), self.other, self.ended.append)
        raise ValueError

    __index__ = __int__


@functools.lru_cache(maxsize=1)
def can_exchange() -> bool:
    """Return whether results can be exchanged in this Python."""
    if frame_layout() is None or not _own.reporter.begin():
        return False
    try:
        return _exchanges()
    finally:
        if _own.watch is None:
            _own.reporter.end()


def _exchanges() -> bool:
    other = object()
    number: Any = _ProbeNumber(other)
    count = sys.getrefcount(other)
    found = [int(number), *[int(number)], 1]
    try:
        int(number) + 1  # fails if the object is there before the addition
    except TypeError:
        found.append(len(number.ended))
    try:
        float(number)
    except ValueError:
        found.append(len(number.ended))
    fits = found[0] is other and found[1] is other and found[2:] == [1, 3, 4]
    found.clear()
    ended = [True] * 3 + [False]
    return fits and sys.getrefcount(other) == count and number.ended == ended
