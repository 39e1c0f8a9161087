"""What code a run comes by, noted while it runs.

What a run can read is estimated from the names in its code. Whether the estimate was right is
seen here: each function of the user's that runs, and each that this code calls of Python's own.
Up to Python 3.11 that is a profile function, which is taken off while the tracer itself works, or
what is inserted; since 3.12 it is `sys.monitoring`, which is not listened to meanwhile.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bendtrace.recording.reach import is_finished_code

__all__ = ["Ran", "ran"]

Called = tuple[str, str]  # the module that something is of, or its type, and its name
Place = tuple[types.CodeType, int]


class Ran:
    """The code that ran between `begin` and `end`, but not between `leave` and `enter`.

    Attributes:
        codes: the user's, with the globals that it ran with.
        called: what it called of Python's own, and where.
        entropy: where randomness was asked for that nothing can seed.
    """

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        self.called: dict[Called, Place] = {}
        self.entropy: dict[str, Place] = {}
        self._outer: Any = None
        self._away = 1  # how often it was left, and not entered again
        self._finished: dict[types.CodeType, bool] = {}

    def _is_finished(self, code: types.CodeType, space: dict[str, Any]) -> bool:
        known = self._finished.get(code)
        if known is None:
            known = self._finished[code] = is_finished_code(code, space)
            if not known:
                self.codes[code] = space
        return known

    def _started(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not self._is_finished(code, frame.f_globals):
            return
        caller = frame.f_back
        if caller is None or self._is_finished(caller.f_code, caller.f_globals):
            return
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in sys.stdlib_module_names:
            key = module, code.co_name
            if key not in self.called:
                self.called[key] = caller.f_code, caller.f_lineno

    def _calls(self, frame: types.FrameType, function: Any) -> None:
        name = function.__name__
        if name in _ENTROPY and isinstance(function.__self__, (types.ModuleType, random.Random)):
            place = _users_place(frame, self._is_finished)
            if place is not None:
                self.entropy.setdefault(name, place)
        if self._is_finished(frame.f_code, frame.f_globals):
            return
        key = function.__module__ or type(function.__self__).__name__, name
        if key not in self.called:
            self.called[key] = frame.f_code, frame.f_lineno

    def begin(self) -> None:
        """Note what the calling thread runs from now on."""
        self._outer = sys.getprofile()
        self._away = 0
        sys.setprofile(self._profile)

    def leave(self) -> None:
        """Note nothing until `enter`, as what runs is not the model's."""
        sys.setprofile(None)
        self._away += 1

    def enter(self) -> None:
        """Go on noting, once for each time that it was left."""
        self._away -= 1
        if not self._away:
            sys.setprofile(self._profile)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Note nothing meanwhile."""
        self.leave()
        try:
            yield
        finally:
            self.enter()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Note what runs meanwhile, however often it was left."""
        away, self._away = self._away, 1
        self.enter()
        try:
            yield
        finally:
            self.leave()
            self._away = away

    def end(self) -> None:
        """Note nothing any more, and give whoever profiled before its place back."""
        outer, self._outer = self._outer, None
        self._away = 1
        sys.setprofile(None)
        if hasattr(outer, "enable"):  # of cProfile
            outer.enable()
        elif outer is not None:
            sys.setprofile(outer)

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._started(frame)
        elif event == "c_call":
            self._calls(frame, function)


class _Monitored(Ran):
    """The same by `sys.monitoring`."""

    def begin(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._thread = threading.get_ident()
        self._away = 0
        self._tool = next((n for n in range(5, -1, -1) if monitoring.get_tool(n) is None), None)
        if self._tool is None:
            self.called["sys", "monitoring"] = _NOWHERE
            return
        events = monitoring.events
        monitoring.use_tool_id(self._tool, "bendtrace")
        monitoring.register_callback(self._tool, events.PY_START, self._py_start)
        monitoring.register_callback(self._tool, events.CALL, self._call)
        monitoring.set_events(self._tool, events.PY_START | events.CALL)
        monitoring.restart_events()

    def leave(self) -> None:
        self._away += 1

    def enter(self) -> None:
        self._away -= 1

    def end(self) -> None:
        self._away = 1
        if self._tool is not None:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
            monitoring.set_events(self._tool, 0)
            monitoring.free_tool_id(self._tool)

    def _py_start(self, code: types.CodeType, offset: int) -> Any:
        if not self._away and threading.get_ident() == self._thread:
            self._started(sys._getframe(1))
        return None

    def _call(self, code: types.CodeType, offset: int, function: Any, first: object) -> Any:
        if not self._away and type(function) in _NATIVE and threading.get_ident() == self._thread:
            self._calls(sys._getframe(1), function)
        return None


_NATIVE = (types.BuiltinFunctionType,)
_NOWHERE: Place = ((lambda: None).__code__, 0)
# Where the modules of Python's own take randomness from.
_ENTROPY = frozenset({"urandom", "getrandom", "seed", "uuid_generate_time_safe"})


def _users_place(
    frame: types.FrameType, finished: Callable[[types.CodeType, dict[str, Any]], bool]
) -> Place | None:
    """Return where the user's code is that called what runs; None if that is an import's doing."""
    found: types.FrameType | None = frame
    while found is not None:
        if found.f_code.co_filename.startswith("<frozen importlib"):
            return None
        if not finished(found.f_code, found.f_globals):
            return found.f_code, found.f_lineno
        found = found.f_back
    return None


def ran() -> Ran:
    """Return what notes the code of a run."""
    return _Monitored() if sys.version_info >= (3, 12) else Ran()
