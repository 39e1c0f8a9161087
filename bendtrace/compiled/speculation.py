"""Which paths are compiled, and which one a call is tried on first."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from bendtrace.compiled.attempts import State, now
from bendtrace.compiled.path import FAILED, CompiledPath, Unchecked
from bendtrace.compiled.report import CompiledReport
from bendtrace.compiled.segments import CompiledSegments
from bendtrace.compiled.settings import Settings
from bendtrace.errors import CompileWarning
from bendtrace.recording.recorder import Recording
from bendtrace.replay.program import Program
from bendtrace.replay.stretches import Finished, Stretch
from bendtrace.source.sites import users_level

__all__ = ["Guess", "Speculation"]

_WINDOW = 16  # calls that are looked back at
_ENOUGH_FAILURES = 8
_EVERY = 16  # calls, until segments are looked at again
_MOST = 64  # paths of which something is known


@dataclass(slots=True, eq=False)
class Guess:
    """What came of trying a call on a compiled path.

    Attributes:
        recording: the run that was repeated; None if the call has to be served otherwise.
        output: what it gave.
        path: the path whose newly compiled graph, or whose speed, is to be compared with a replay.
        unchecked: for a newly compiled graph, what it gave.
        began: when the call began, if its replay is to be timed.
        may_compile: whether a replay may use compiled segments.
    """

    path: CompiledPath | None = None
    recording: Recording | None = None
    output: Any = None
    unchecked: Unchecked | None = None
    began: float = 0.0
    may_compile: bool = False


_WATCHED = Guess()
_NONE = Guess(may_compile=True)


class Speculation:
    """The compiled paths of one model.

    For each set of input guards one path leads: calls are tried on it before anything else. A
    path is compiled, and leads, when the model has come along it twice and in at least half of
    the latest calls. It leads no more, is *demoted*, when among its latest calls at least eight
    failed, and more than half as many as did not; it leads again when three quarters of the
    latest calls took it.

    Args:
        settings: how to compile.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._warned = False
        self._paths: dict[Stretch, CompiledPath] = {}
        # Exchanged, never changed, so that threads can read them without the lock.
        self._leaders: dict[tuple[str, ...], tuple[CompiledPath, ...]] = {}
        # Programs come and go with the paths that the trace tree keeps.
        self._windows: WeakKeyDictionary[Program, deque[Stretch | None]] = WeakKeyDictionary()
        self._segments = CompiledSegments(settings)
        self._calls = 0  # that were no path

    def guess(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> Guess:
        """Try a call on the compiled path that leads, if there is one for its input guards.

        Args:
            names: names of the arguments.
            arguments: the arguments.
        """
        if _is_watched():
            return _WATCHED
        leaders = self._leaders.get(names)
        if not leaders:
            return _NONE
        began = 0.0
        for path in leaders:
            timed = path.state is State.MEASURED
            if timed:
                began = now(arguments)
            if path.admits(arguments):
                break
        else:
            return _NONE
        guess = Guess(path)
        if timed and len(path.replayed) < len(path.served):
            guess.began = began
            return guess
        output = path.attempt(arguments)
        if output is FAILED:
            guess.path, guess.may_compile = None, True
            self._look_at(names, path)
        elif type(output) is Unchecked:
            guess.unchecked = output
        else:
            guess.recording, guess.output = path.recording, output
            path.stretch.hits += 1
            path.window.append(path.stretch)
            if timed:
                path.was_served(now(arguments) - began)
        return guess

    def replayed(
        self,
        guess: Guess,
        names: tuple[str, ...],
        program: Program,
        finished: Finished,
        arguments: tuple[Any, ...],
    ) -> None:
        """Learn from a call that was replayed.

        Args:
            guess: what came of trying it on a compiled path before.
            names: names of the arguments.
            program: the program that it was replayed with.
            finished: how it ended.
            arguments: the arguments.
        """
        took = program.taken(finished)
        window = self._window(program)
        window.append(took)
        path = guess.path
        if path is not None and path.stretch is took:
            if guess.unchecked is not None:
                path.confirm(guess.unchecked, finished.output)
                self._look_at(names, path)
            elif guess.began:
                path.was_replayed(now(arguments) - guess.began)
                self._look_at(names, path)
        share = sum(stretch is took for stretch in window) / len(window)
        if took is None or share < 0.5 or self._is_refused(took):
            self._look_at_segments(program, guess)
        if took is None:  # segments in a combination that no run has gone, which is no path
            return
        if took.hits < 2 or _is_watched() or any(p.home is program for p in self._led(names)):
            return
        known = self._paths.get(took)
        if known is None and share >= 0.5:
            self._compile(names, program, took, finished, arguments)
        elif known is not None and known.state is State.DEMOTED and share >= 0.75:
            known.recent.clear()
            known.state = State.USED
            self._lead(names, known)

    def report(self) -> CompiledReport:
        """Return what became of the paths."""
        return CompiledReport(
            self.settings.name, tuple(self._paths.values()), self._segments.bodies
        )

    def _is_refused(self, took: Stretch) -> bool:
        known = self._paths.get(took)
        return known is not None and known.state is State.REFUSED

    def _look_at_segments(self, program: Program, guess: Guess) -> None:
        """Compile segments, where what calls go along is put together anew again and again."""
        self._calls += 1
        if self._calls % _EVERY == 0 and guess is not _WATCHED and self.settings.max_segments:
            if self._lock.acquire(blocking=False):
                try:
                    self._segments.look_at(program)
                finally:
                    self._lock.release()
                bodies = self._segments.bodies
                if not any(body.hits for body in bodies):
                    for body in filter(lambda body: body.is_unusable, bodies):
                        self._warn(body.reason)

    def _window(self, program: Program) -> deque[Stretch | None]:
        window = self._windows.get(program)
        if window is None:
            window = self._windows.setdefault(program, deque(maxlen=_WINDOW))
        return window

    def _led(self, names: tuple[str, ...]) -> tuple[CompiledPath, ...]:
        return self._leaders.get(names, ())

    def _compile(
        self,
        names: tuple[str, ...],
        program: Program,
        took: Stretch,
        finished: Finished,
        arguments: tuple[Any, ...],
    ) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread compiles
        try:
            usable = [p for p in self._paths.values() if p.state is not State.REFUSED]
            if took in self._paths or len(usable) >= self.settings.max_paths:
                return
            path = CompiledPath(program, took, self.settings)
            path.make(arguments, finished.output)
            while len(self._paths) >= _MOST:
                del self._paths[next(p for p in self._paths if self._paths[p] not in usable)]
            path.window = self._window(program)
            self._paths[took] = path
            if path.state is not State.REFUSED:
                self._leaders[names] = (path, *self._led(names))
        finally:
            self._lock.release()
        if path.is_unusable:
            self._warn(path.reason)

    def _warn(self, reason: str) -> None:
        """Say once that the backend is of no use."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                CompileWarning(
                    f"the backend {self.settings.name} failed, so calls are replayed as they would "
                    f"be without one: {reason}"
                ),
                stacklevel=users_level(),
            )

    def _lead(self, names: tuple[str, ...], path: CompiledPath) -> None:
        with self._lock:
            if path not in self._led(names):
                self._leaders[names] = (path, *self._led(names))

    def _look_at(self, names: tuple[str, ...], path: CompiledPath) -> None:
        """Let a path lead no more that cannot be used, or that fails too often."""
        failures = sum(not served for served in path.recent)
        if failures >= _ENOUGH_FAILURES and failures > (len(path.recent) - failures) / 2:
            path.state = State.DEMOTED
        if path.state in (State.REFUSED, State.DEMOTED, State.SLOWER):
            with self._lock:
                self._leaders[names] = tuple(p for p in self._led(names) if p is not path)


def _is_watched() -> bool:
    """Whether somebody wants to see each op of a call."""
    # Seen in torch 2.13 to 2.15; tests/test_compiled.py would notice a change.
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
