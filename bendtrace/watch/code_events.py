"""Noting the code of a run by `sys.monitoring`, from Python 3.12 on."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from bendtrace.python.stacks import monitoring_tool
from bendtrace.watch.executed import NOWHERE, CodeMonitor, never
from bendtrace.watch.mode_queries import QUESTIONS


class EventCodeMonitor(CodeMonitor):
    """The same by `sys.monitoring`, which has room for several tools."""

    def begin(self) -> None:
        """Note the code that the calling thread runs from now on."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._thread = threading.get_ident()
        self._with_ends: set[types.CodeType] = set()
        self._away = 0
        self._tool = monitoring_tool()
        if self._tool is None:
            self.called["sys", "monitoring"] = NOWHERE
            return
        events = monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._py_start)
        monitoring.register_callback(self._tool, events.CALL, self._call)
        monitoring.set_events(self._tool, events.PY_START | events.CALL)
        monitoring.restart_events()

    def leave(self, answers: bool = False) -> None:
        """Note nothing until `enter` (see `CodeMonitor.leave`)."""
        self._away += 1
        if answers:
            self._asking.append(self._away)

    def enter(self) -> None:
        """Go on noting, once for each time that it was left."""
        if self._only_answers:
            self._asking.pop()
        self._away -= 1

    def _asks(self, frame: types.FrameType, question: Any) -> None:
        super()._asks(frame, question)
        if self._hidden is not None:
            self._listen_to_returns(self._handle_return)

    def _handle_return(
        self, code: types.CodeType, offset: int, function: Any, first: object
    ) -> Any:
        if threading.get_ident() == self._thread:
            self._listen_to_returns(None)
            self._restore_recorder()
        return None

    def _listen_to_returns(self, callback: Any) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        # These two come along with CALL, which is on; they cannot be set for themselves. So they
        # have a callback only while a question is being answered.
        for event in (monitoring.events.C_RETURN, monitoring.events.C_RAISE):
            monitoring.register_callback(self._tool, event, callback)

    def _wait_for_end(self, frame: types.FrameType) -> None:
        super()._wait_for_end(frame)
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.register_callback(self._tool, monitoring.events.PY_RETURN, self._py_return)
        monitoring.set_local_events(self._tool, frame.f_code, monitoring.events.PY_RETURN)
        self._with_ends.add(frame.f_code)

    def _py_return(self, code: types.CodeType, offset: int, result: Any) -> Any:
        frame = sys._getframe(1)
        if frame is self._ending and not self._away and threading.get_ident() == self._thread:
            self._away += 1
            try:
                self._ending = None
                self.fills.ends(frame, result)
            finally:
                self._away -= 1
        return None

    def end(self) -> None:
        """Note nothing any more."""
        self._away, self._wants_inside, self.fills, self._ending = 1, never, None, None
        if self._tool is not None:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
            monitoring.set_events(self._tool, 0)
            for code in self._with_ends:
                monitoring.set_local_events(self._tool, code, 0)
            monitoring.free_tool_id(self._tool)

    def _py_start(self, code: types.CodeType, offset: int) -> Any:
        # `sys.monitoring` reports what all threads do; `sys.setprofile` is for one.
        if not self._away and threading.get_ident() == self._thread:
            self._away += 1  # what is done here is not the model's
            try:
                self._handle_start(sys._getframe(1))
            finally:
                self._away -= 1
        return None

    def _call(self, code: types.CodeType, offset: int, function: Any, first: object) -> Any:
        if threading.get_ident() != self._thread:
            return None
        if type(function) is types.MethodDescriptorType and not self._away:
            try:
                # As a profile function receives it. Without the type, CPython 3.12 crashes for
                # methods that ask for the class that defines them.
                function = function.__get__(first, type(first))
            except TypeError:  # the call fails, too
                return None
        if type(function) in _NATIVE:
            if not self._away:
                self._calls(sys._getframe(1), function)
            elif self._only_answers and function in QUESTIONS:
                self._asks(sys._getframe(1), function)
        return None


_NATIVE = (types.BuiltinFunctionType,)
