"""The choice of the paths to compile, and of the path to try a call on first."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import forward_ad

from bendtrace._lazy import tabulate
from bendtrace.compiled.attempts import State, now
from bendtrace.compiled.path import FAILED, CompiledPath, Served, Taken, Unchecked
from bendtrace.compiled.segments import Body, CompiledSegments
from bendtrace.compiled.settings import Settings
from bendtrace.compiled.splices import Inserted, Spliced
from bendtrace.errors import CompileWarning
from bendtrace.recording.recorder import Recording
from bendtrace.replay.program import Program
from bendtrace.replay.stretches import Finished
from bendtrace.source.sites import users_level
from bendtrace.tape.contexts import dispatch_modes

__all__ = ["CompiledReport", "Guess", "Speculation"]


# What tells calls apart that other paths may lead for: names of the arguments, and what is
# inserted where.
_Calls = Hashable

_WINDOW = 16  # calls that are looked back at
_ENOUGH_FAILURES = 8
_EVERY = 16  # calls, until segments are looked at again
_MOST = 64  # paths, with those that were refused


@dataclass(slots=True, eq=False)
class Guess:
    """The result of trying a call on a compiled path.

    Attributes:
        recording: the run that was repeated; None if the path did not serve the call.
        output: the output.
        path: the path whose newly compiled graph, or speed, has to be compared with a replay.
        unchecked: the result of a newly compiled graph.
        began: the start time of the call, if its replay has to be timed.
        may_compile: whether a replay may use compiled segments.
        inserted: the insertions of the call; None without any.
    """

    path: CompiledPath | None = None
    recording: Recording | None = None
    output: Any = None
    unchecked: Unchecked | None = None
    began: float = 0.0
    may_compile: bool = False
    inserted: Inserted | None = None


_WATCHED = Guess()
_NONE = Guess(may_compile=True)


class Speculation:
    """The compiled paths of one model.

    For each set of input guards there is at most one *leading* path, which calls try first. A path
    is compiled, and leads, once two calls and at least half of the latest calls have taken it. It
    is *demoted* if, among its latest calls, at least eight failed, and more than half as many as
    succeeded. It leads again if three quarters of the latest calls have taken it.

    Args:
        settings: how to compile.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._warned = False
        self._paths: dict[Taken, CompiledPath] = {}
        # Exchanged, never changed, so that threads can read them without the lock.
        self._leaders: dict[_Calls, tuple[CompiledPath, ...]] = {}
        # Programs come and go with the paths that the trace tree keeps.
        self._windows: WeakKeyDictionary[Program, deque[Taken]] = WeakKeyDictionary()
        self._segments = CompiledSegments(settings)
        self._calls = 0  # that were no path

    def guess(
        self,
        names: tuple[str, ...],
        arguments: tuple[Any, ...],
        inserted: Inserted | None = None,
    ) -> Guess:
        """Try a call on the leading compiled path for its input guards, if there is one.

        Args:
            names: names of the arguments.
            arguments: the arguments.
            inserted: the insertions of the call; None without any.
        """
        if _is_watched():
            return _WATCHED
        calls = names if inserted is None else (names, inserted.places)
        leaders = self._leaders.get(calls)
        nothing = _NONE if inserted is None else Guess(inserted=inserted)
        if not leaders:
            return nothing
        began = 0.0
        spliced: Spliced | None = None
        for path in leaders:
            timed = path.state is State.MEASURED
            if timed:
                began = now(arguments)
            if inserted is not None:
                along = inserted.along(path.recording)
                if isinstance(along, str) or along.key != path.key:
                    continue
                path.key = along.key  # which is equal, and compared faster the next time
                spliced = along
            if path.admits(arguments):
                break
        else:
            return nothing
        guess = Guess(path, inserted=inserted)
        if timed and len(path.replayed) < len(path.served):
            guess.began = began
            return guess
        output = path.attempt(arguments, spliced)
        if output is FAILED:
            guess.path, guess.may_compile = None, inserted is None
            self._look_at(calls, path)
        elif type(output) is Unchecked:
            guess.unchecked = output
        else:
            guess.recording, guess.output = path.recording, output
            path.stretch.hits += 1
            path.window.append((path.stretch, path.key))
            if type(output) is Served and inserted is not None and spliced is not None:
                guess.output = output.output
                inserted.ran(path.recording)
                spliced.served(output.kept, output.changed, path.unchanged)
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
            guess: the result of trying it on a compiled path before.
            names: names of the arguments.
            program: the program that it was replayed with.
            finished: how it ended.
            arguments: the arguments.
        """
        stretch, inserted = program.taken(finished), guess.inserted
        calls = names if inserted is None else (names, inserted.places)
        window = self._window(program)
        path = guess.path
        spliced: Spliced | str | None = None
        if inserted is not None and stretch is not None:
            # After the run, which may have been the first to reach a node.
            spliced = inserted.along(stretch.recording)
        key = spliced if spliced is None or isinstance(spliced, str) else spliced.key
        took = stretch, key
        window.append(took)
        if path is not None and (path.stretch, path.key) == took:
            if guess.unchecked is not None:
                path.confirm(guess.unchecked, finished.output)
                self._look_at(calls, path)
            elif guess.began:
                path.was_replayed(now(arguments) - guess.began)
                self._look_at(calls, path)
        times = window.count(took)
        # The insertions do not predict the path of a call; its inputs do.
        share = times / sum(known == key for _, known in window)
        if stretch is None or share < 0.5 or self._is_refused(took):
            self._look_at_segments(program, guess)
        if stretch is None:  # segments in a combination that no run has gone, which is no path
            return
        often = stretch.hits if inserted is None else times + (stretch.hits == times + 1)
        led = (p for p in self._led(calls) if p.home is program and p.key == key)
        if often < 2 or _is_watched() or any(led):
            return
        known = self._paths.get(took)
        if known is None and share >= 0.5:
            self._compile(calls, program, took, spliced, finished, arguments)
        elif known is not None and known.state is State.DEMOTED and share >= 0.75:
            known.recent.clear()
            known.state = State.USED
            self._lead(calls, known)

    def report(self) -> CompiledReport:
        """Return the report on the paths."""
        artefacts = self.settings.artefacts
        return CompiledReport(
            self.settings.name, tuple(self._paths.values()), self._segments.bodies,
            () if artefacts is None else tuple(artefacts.notes),
        )  # fmt: skip

    def _is_refused(self, took: Taken) -> bool:
        known = self._paths.get(took)
        return known is not None and known.state is State.REFUSED

    def _look_at_segments(self, program: Program, guess: Guess) -> None:
        """Compile segments, if the calls keep combining them in new ways."""
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

    def _window(self, program: Program) -> deque[Taken]:
        window = self._windows.get(program)
        if window is None:
            window = self._windows.setdefault(program, deque(maxlen=_WINDOW))
        return window

    def _led(self, calls: _Calls) -> tuple[CompiledPath, ...]:
        return self._leaders.get(calls, ())

    def _compile(
        self,
        calls: _Calls,
        program: Program,
        took: Taken,
        spliced: Spliced | str | None,
        finished: Finished,
        arguments: tuple[Any, ...],
    ) -> None:
        stretch = took[0]
        assert stretch is not None
        if not self._lock.acquire(blocking=False):
            return  # another thread compiles
        try:
            usable = [p for p in self._paths.values() if p.state is not State.REFUSED]
            # Paths with insertions count apart from the others.
            alike = sum((path.key is None) == (spliced is None) for path in usable)
            if took in self._paths or alike >= self.settings.max_paths:
                return
            if isinstance(spliced, str):
                path = CompiledPath(program, stretch, self.settings)
                path.key, path.reason = spliced, spliced
            else:
                path = CompiledPath(program, stretch, self.settings, spliced)
                path.make(arguments, finished.output, spliced)
            while len(self._paths) >= _MOST:
                del self._paths[next(p for p in self._paths if self._paths[p] not in usable)]
            path.window = self._window(program)
            self._paths[took] = path
            if path.state is not State.REFUSED:
                self._leaders[calls] = (path, *self._led(calls))
        finally:
            self._lock.release()
        if path.is_unusable:
            self._warn(path.reason)

    def _warn(self, reason: str) -> None:
        """Warn once that the backend does not work."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                CompileWarning(
                    f"the backend {self.settings.name} failed, so calls are replayed as they would "
                    f"be without one: {reason}"
                ),
                stacklevel=users_level(),
            )

    def _lead(self, calls: _Calls, path: CompiledPath) -> None:
        with self._lock:
            if path not in self._led(calls):
                self._leaders[calls] = (path, *self._led(calls))

    def _look_at(self, calls: _Calls, path: CompiledPath) -> None:
        """Demote a path that cannot be used, or fails too often."""
        failures = sum(not served for served in path.recent)
        if failures >= _ENOUGH_FAILURES and failures > (len(path.recent) - failures) / 2:
            path.state = State.DEMOTED
        if path.state in (State.REFUSED, State.DEMOTED, State.SLOWER):
            with self._lock:
                self._leaders[calls] = tuple(p for p in self._led(calls) if p is not path)


def _is_watched() -> bool:
    """Return whether something watches the ops of a call, or differentiates them forward."""
    # Seen in torch 2.13 to 2.15; tests/test_compiled.py would notice a change.
    return bool(
        dispatch_modes()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or forward_ad._current_level >= 0
    )


# The report on the compiled paths of a model.


class CompiledReport:
    """The paths that were compiled, or why they were not; prints as a table.

    Attributes:
        backend: the backend.
        segments: a row for each piece of a segment that was compiled, as plain values.
        hits: calls that compiled paths have served.
        failures: calls that a compiled path was tried on and that went another way.
        seconds: how long compiling took.
        kept: with a `cache_dir`, the result for each path, one line each.
    """

    def __init__(
        self,
        backend: str | None,
        paths: tuple[CompiledPath, ...] = (),
        bodies: tuple[Body, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> None:
        self.kept = kept
        self.backend = backend
        self._paths = paths
        self.hits: int = sum(path.hits for path in paths)
        self.failures: int = sum(path.failures for path in paths)
        self.seconds: float | int = sum(path.seconds for path in paths) + sum(
            body.seconds for body in bodies
        )
        self.segments: list[dict[str, Any]] = [
            {"functions": body.functions, "ops": len(body.functions), **body.row()}
            for body in bodies
        ]

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_list())

    def to_list(self) -> list[dict[str, Any]]:
        """Return a row for each path, as plain values, ready for JSON."""
        return [
            {
                "path": number,
                "ops": len(path.recording.tape.ops),
                **path.row(),
                "failures": path.failures,
            }
            for number, path in enumerate(self._paths)
        ]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why paths are not compiled; empty if all are."""
        found = [path.reason for path in self._paths if path.state is State.REFUSED]
        return tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        if self.backend is None:
            return "no backend: calls are replayed, bit for bit as the model itself"
        segments = f"\n\n{_table(self.segments, *_OF_SEGMENTS)}" if self.segments else ""
        if not self._paths:
            return f"{self.backend}: no path was taken often enough so far{segments}"
        kept = "".join(f"\n{line}" for line in self.kept)
        return f"{self.backend}\n{_table(self.to_list(), *_OF_PATHS)}{segments}{kept}"


def _table(rows: list[dict[str, Any]], *columns: str) -> str:
    """Return some columns of rows as a table."""
    cells = [
        [_FORMATS[name](row[name]) if name in _FORMATS else row[name] for name in columns]
        for row in rows
    ]
    headers = [_HEADERS.get(name, name) for name in columns]
    return str(tabulate.tabulate(cells, headers, disable_numparse=True))


def _shortened(functions: tuple[str, ...]) -> str:
    if len(functions) > _FUNCTIONS:
        functions = (*functions[: _FUNCTIONS - 2], "...", functions[-1])
    return ", ".join(functions)


_FUNCTIONS = 6  # that are shown of a segment
_OF_PATHS = (
    "path", "ops", "state", "warm_up", "graphs", "hits", "failures", "speed", "reason",
)  # fmt: skip
_OF_SEGMENTS = (
    "functions", "ops", "state", "warm_up", "graphs", "hits", "speed", "reason",
)  # fmt: skip
_HEADERS = {"functions": "segment", "warm_up": "warm-up", "speed": "over replay"}
_FORMATS: dict[str, Callable[[Any], Any]] = {
    "functions": _shortened,
    "warm_up": lambda seconds: f"{seconds:.1f} s",
    "speed": lambda speed: "" if speed is None else f"{speed:.1f}x",
}
