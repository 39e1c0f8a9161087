"""The choice of the paths to compile, and of the path to try a call on first."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bendtrace.engine.codegen import SegmentWriter
from bendtrace.engine.compile_attempts import (
    AttemptFailure,
    CompiledFunction,
    CompiledResult,
    CompileState,
    QuietCompilation,
    now,
)
from bendtrace.engine.compile_probing import why_not_op, why_not_under
from bendtrace.engine.compile_settings import CompileSettings
from bendtrace.engine.compiled_path import (
    FAILED,
    CompiledPath,
    Expressions,
    PathKey,
    SplicedCall,
    UncheckedResult,
)
from bendtrace.engine.program import Program
from bendtrace.engine.schedule import Schedule, Unlinked, is_freed
from bendtrace.engine.source import gives_nothing
from bendtrace.engine.stretches import Exit, FinishedReplay
from bendtrace.errors import CompileWarning
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import users_level
from bendtrace.record.recorder import Recording
from bendtrace.tape.contexts import dispatch_modes
from bendtrace.tape.tape import Op, OpKind, TensorMeta
from bendtrace.watch.functions import METADATA, SHAPES, is_sized_by_values, name_of
from bendtrace.watch.writes import works_in_place

if TYPE_CHECKING:
    from bendtrace.insert.compiling import PlannedInsertions, SplicedTurns

# What tells calls apart that other paths may lead for: names of the arguments, and what is
# inserted where.
_Calls = Hashable

_WINDOW = 16  # calls that are looked back at
_ENOUGH_FAILURES = 8
_EVERY = 16  # calls, until segments are looked at again
_MOST = 64  # paths, with those that were refused


@dataclass(slots=True, eq=False)
class SpeculationResult:
    """The result of trying a call on a compiled path."""

    path: CompiledPath | None = None  # with a new graph, or a speed, to compare with a replay
    recording: Recording | None = None  # that was repeated; None if the path did not serve
    output: Any = None
    unchecked: UncheckedResult | None = None  # the result of a newly compiled graph
    began: float = 0.0  # the start time of the call, if its replay has to be timed
    may_compile: bool = False  # whether a replay may use compiled segments
    inserted: PlannedInsertions | None = None  # the insertions of the call; None without any


_WATCHED = SpeculationResult()
_NONE = SpeculationResult(may_compile=True)


class Speculation:
    """The compiled paths of one model.

    For each set of input guards there is at most one *leading* path, which calls try first. A path
    is compiled, and leads, once two calls and at least half of the latest calls have taken it. It
    is *demoted* if, among its latest calls, at least eight failed, and more than half as many as
    succeeded. It leads again if three quarters of the latest calls have taken it.
    """

    def __init__(self, settings: CompileSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._warned = False
        self._paths: dict[PathKey, CompiledPath] = {}
        # Exchanged, never changed, so that threads can read them without the lock.
        self._leaders: dict[_Calls, tuple[CompiledPath, ...]] = {}
        # Programs come and go with the paths that the trace tree keeps.
        self._windows: WeakKeyDictionary[Program, deque[PathKey]] = WeakKeyDictionary()
        self._segments = CompiledSegments(settings)
        self._calls = 0  # that were no path

    def guess(
        self,
        names: tuple[str, ...],
        arguments: tuple[Any, ...],
        inserted: PlannedInsertions | None = None,
    ) -> SpeculationResult:
        """Try a call on the leading compiled path for its input guards, if there is one."""
        if _is_watched():
            return _WATCHED
        calls = names if inserted is None else (names, inserted.places)
        leaders = self._leaders.get(calls)
        if not leaders:
            return _NONE if inserted is None else SpeculationResult(inserted=inserted)
        began = 0.0
        spliced: SplicedTurns | None = None
        for path in leaders:
            timed = path.state is CompileState.MEASURED
            if timed:
                began = now(arguments)
            if inserted is not None:
                along = inserted.along(path.recording)
                if isinstance(along, str) or along.key != path.key:
                    continue
                if path.silent and not path.silent <= along.changing(1):
                    path.lacking += path.lacked_by is not along
                    path.lacked_by = along
                    continue
                path.key = along.key  # which is equal, and compared faster the next time
                spliced = along
            if path.admits(arguments):
                break
        else:
            return _NONE if inserted is None else SpeculationResult(inserted=inserted)
        guess = SpeculationResult(path, inserted=inserted)
        if timed and len(path.replayed) < len(path.served):
            guess.began = began
            return guess
        output = path.attempt(arguments, spliced)
        if output is FAILED:
            guess.path, guess.may_compile = None, inserted is None
            self._look_at(calls, path)
        elif type(output) is UncheckedResult:
            guess.unchecked = output
        else:
            guess.recording, guess.output = path.recording, output
            path.stretch.hits += 1
            path.window.append((path.stretch, path.key))
            if type(output) is SplicedCall and inserted is not None and spliced is not None:
                guess.output = output.output
                spliced.served(
                    output.kept, output.changed, path.unchanged, path.silent, output.alone
                )  # fmt: skip
            if timed:
                path.was_served(now(arguments) - began)
        return guess

    def replayed(
        self,
        guess: SpeculationResult,
        names: tuple[str, ...],
        program: Program,
        finished: FinishedReplay,
        arguments: tuple[Any, ...],
    ) -> None:
        """Learn from a call that was replayed, after it was tried on a compiled path."""
        stretch, inserted = program.path_end(finished), guess.inserted
        calls = names if inserted is None else (names, inserted.places)
        window = self._window(program)
        path = guess.path
        spliced: SplicedTurns | str | None = None
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
        share = times / sum(other == key for _, other in window)
        if stretch is None or share < 0.5 or self._is_refused(took):
            self._look_at_segments(program, guess)
        if stretch is None:  # segments in a combination that no run has gone, which is no path
            return
        other = self._paths.get(took)
        lacks = other is not None and other.lacking > 1
        if lacks:  # others of the same kind keep coming, of which more has to be known
            del self._paths[took]
            self._leaders[calls] = tuple(p for p in self._led(calls) if p is not other)
            other = None
        often = stretch.hits if inserted is None else times + (stretch.hits == times + 1)
        led = (p for p in self._led(calls) if p.home is program and p.key == key)
        if often < 2 or _is_watched() or any(led):
            return
        if other is None and share >= 0.5:
            self._compile(calls, program, took, spliced, finished, arguments, not lacks)
        elif other is not None and other.state is CompileState.DEMOTED and share >= 0.75:
            other.recent.clear()
            other.state = CompileState.USED
            self._lead(calls, other)

    def report(self) -> CompiledReport:
        """Return the report on the paths."""
        artefacts = self.settings.artefacts
        return CompiledReport(
            self.settings.name, tuple(self._paths.values()), self._segments.bodies,
            () if artefacts is None else tuple(artefacts.notes), self._segments.reason,
        )  # fmt: skip

    def _is_refused(self, took: PathKey) -> bool:
        compiled = self._paths.get(took)
        return compiled is not None and compiled.state is CompileState.REFUSED

    def _look_at_segments(self, program: Program, guess: SpeculationResult) -> None:
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

    def _window(self, program: Program) -> deque[PathKey]:
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
        took: PathKey,
        spliced: SplicedTurns | str | None,
        finished: FinishedReplay,
        arguments: tuple[Any, ...],
        may_be_silent: bool,
    ) -> None:
        stretch = took[0]
        assert stretch is not None
        if not self._lock.acquire(blocking=False):
            return  # another thread compiles
        try:
            usable = [p for p in self._paths.values() if p.state is not CompileState.REFUSED]
            # Paths with insertions count apart from the others.
            alike = sum((path.key is None) == (spliced is None) for path in usable)
            if took in self._paths or alike >= self.settings.max_paths:
                return
            if isinstance(spliced, str):
                path = CompiledPath(program, stretch, self.settings)
                path.key, path.reason = spliced, spliced
            else:
                path = CompiledPath(program, stretch, self.settings, spliced)
                path.make(arguments, finished.output, spliced, may_be_silent)
            while len(self._paths) >= _MOST:
                del self._paths[next(p for p in self._paths if self._paths[p] not in usable)]
            path.window = self._window(program)
            self._paths[took] = path
            if path.state is not CompileState.REFUSED:
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
            path.state = CompileState.DEMOTED
        if path.state in (CompileState.REFUSED, CompileState.DEMOTED, CompileState.SLOWER):
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
        without: why no segments were compiled; "" if some were.
    """

    def __init__(
        self,
        backend: str | None,
        paths: tuple[CompiledPath, ...] = (),
        bodies: tuple[CompiledBody, ...] = (),
        kept: tuple[str, ...] = (),
        without: str = "",
    ) -> None:
        self.kept = kept
        self.backend = backend
        self._paths = paths
        self.hits: int = sum(path.hits for path in paths)
        self.failures: int = sum(path.failures for path in paths)
        self.seconds: float | int = sum(path.seconds for path in paths) + sum(
            body.seconds for body in bodies
        )
        self.without: str = "" if bodies else without
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
        found = [path.reason for path in self._paths if path.state is CompileState.REFUSED]
        return tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        if self.backend is None:
            return "no backend: calls are replayed, bit for bit as the model itself"
        segments = f"\n\nno segments: {self.without}" if self.without else ""
        if self.segments:
            segments = f"\n\n{_rows_text(self.segments, *_OF_SEGMENTS)}"
        if not self._paths:
            return f"{self.backend}: no path was taken often enough so far{segments}"
        kept = "".join(f"\n{line}" for line in self.kept)
        paths = self.to_list()
        reasons = dict.fromkeys(row["reason"] for row in [*paths, *self.segments])
        cut = "".join(f"\n\n{why}" for why in reasons if why and why != _FORMATS["reason"](why))
        return f"{self.backend}\n{_rows_text(paths, *_OF_PATHS)}{segments}{cut}{kept}"


def _rows_text(rows: list[dict[str, Any]], *columns: str) -> str:
    """Return some columns of rows as a table."""
    cells = [
        [_FORMATS[name](row[name]) if name in _FORMATS else row[name] for name in columns]
        for row in rows
    ]
    headers = [_HEADERS.get(name, name) for name in columns]
    return str(tabulate.tabulate(cells, headers, disable_numparse=True))


def _shorten(functions: tuple[str, ...]) -> str:
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
    "functions": _shorten,
    "reason": lambda reason: shorten(reason, 70, placeholder=" ..."),
    "warm_up": lambda seconds: f"{seconds:.1f} s",
    "speed": lambda speed: "" if speed is None else f"{speed:.1f}x",
}


# Segments that call compiled code, for calls that combine segments in new ways.
#
# A whole path is worth compiling if many calls take it. If each call combines the segments
# differently, only the code between two questions can be compiled: its ops become one function of
# tensors, a *body*, which the segment calls in their place. Nothing is speculated: each question
# is answered from the results of the body before it. Equal bodies are compiled once, so the
# layers of a model, and the iterations of a loop, share them.

_serials = itertools.count()
_FEWEST = 2  # ops of a body
_MOST_FAILURES = 4  # of a body, in a row
_LONGEST = 1024
_MOST_BODIES = 1024  # those that are of no use included
_PASSES = 8  # of a segment before it is compiled


class CompiledBody(CompiledFunction):
    """Consecutive ops, compiled.

    The code of segments calls it with the operands of the ops, and receives their results; or None,
    in which case it runs the ops one by one, and passes their results to `seen`. The text, with
    names for values, is the source of a function of tensors and sizes, with a line for each op.
    """

    def __init__(
        self, text: str, names: dict[str, Any], settings: CompileSettings, ops: Sequence[Op]
    ) -> None:
        super().__init__(settings)
        self.text = text
        # The names of the functions that it calls.
        self.functions: tuple[str, ...] = tuple(name_of(op.target) for op in ops)
        self._ops = ops
        self._names = names
        exec(compile(text, f"<bendtrace body {next(_serials)}>", "exec"), names)
        self._compilers: deque[Callable[..., Any]] = deque()
        self._pending = threading.local()
        self._compiling = threading.Lock()

    def op_at(self, line: int) -> Op | None:
        """Return the op in a line; the first line has the parameters."""
        return self._ops[line - 2] if 2 <= line < len(self._ops) + 2 else None

    def __call__(self, *given: Any) -> Sequence[Tensor] | None:
        """Run the ops; return None if they have to run one by one."""
        pending = self._pending.__dict__
        pending.clear()
        is_measured = self.state is CompileState.MEASURED
        if not self.is_used:
            return None
        begun = now(given) if is_measured else 0.0
        if is_measured and len(self.replayed) < len(self.served):
            pending["begun"] = begun, given
            return None
        try:
            result = self._run(given)
        except Exception as error:
            self.note(error)
            self.failures += 1
            if self.failures >= _MOST_FAILURES:
                self.state = CompileState.REFUSED
            return None
        if result is None:
            return None
        if result.graph not in self._confirmed:
            pending["result"] = result, given
            return None
        made = self.in_order(result)
        self.hits += 1
        self.failures: int = 0
        if is_measured:
            self.was_served(now(given) - begun)
        return made

    def seen(self, *results: Tensor) -> None:
        """Learn from the results of the ops after they ran one by one."""
        pending = self._pending.__dict__
        if "result" in pending:
            result, given = pending.pop("result")
            tensors = [value for value in given if isinstance(value, Tensor)]
            self.compare(list(result.made), list(results), result, tensors)
        elif "begun" in pending:
            begun, given = pending.pop("begun")
            self.was_replayed(now(given) - begun)

    def _run(self, given: Sequence[Any]) -> CompiledResult | None:
        if self._confirmed:
            return self._called(given)
        if not self._compiling.acquire(blocking=False):
            return None  # another thread compiles
        begun = time.perf_counter()
        try:
            metas = [(v.dtype, v.shape) if isinstance(v, Tensor) else v for v in given]
            with (
                warnings.catch_warnings(),
                QuietCompilation(),
                self.settings.keeping(f"{self.text}{metas}"),
            ):
                warnings.simplefilter("ignore")
                if self._function is None:
                    on_cpu = all(v.device.type == "cpu" for v in given if isinstance(v, Tensor))
                    self._compilers.extend(self.settings.compilers(on_cpu))
                    self.compile(self._names["body"], self._compilers.popleft())
                while True:
                    try:
                        return self._called(given)
                    except Exception as error:
                        if not (AttemptFailure(error).is_final and self._compilers):
                            raise
                    # With what compiles where the first cannot.
                    self.compile(self._names["body"], self._compilers.popleft())
        finally:
            self.seconds += time.perf_counter() - begun
            self._compiling.release()
            self.settings.warn()

    def _called(self, given: Sequence[Any]) -> CompiledResult:
        result = self.call(given, self.find(given))
        assert result is not None
        return result


class CompiledSegments:
    """The bodies of one model."""

    def __init__(self, settings: CompileSettings) -> None:
        self._settings = settings
        # Why there were no segments to compile, when they were last looked at.
        self.reason: str = (
            "they are looked at every 16 calls, where whole paths do not serve the calls"
        )
        if not settings.max_segments:
            self.reason = "max_segments=0"
        # Programs come and go with the paths that the trace tree keeps.
        self._programs: WeakKeyDictionary[Program, _CompiledProgram] = WeakKeyDictionary()

    @property
    def bodies(self) -> tuple[CompiledBody, ...]:
        """All bodies, whatever their state."""
        programs = list(self._programs.values())
        return tuple(body for compiled in programs for body in compiled.bodies.values())

    def look_at(self, program: Program) -> None:
        """Compile the bodies that run often enough, and drop those that did not pay."""
        graph = program.graph
        if graph is None or graph.is_broken:
            self.reason = "paths do not join, since their states cannot be read (see bended.graph)"
            return
        reason = why_not_under(program.global_state)
        tape = program.recording.tape
        if reason is not None or tape.is_joint or tape.blocks:
            self.reason = reason or (
                "ranks act together in it" if tape.is_joint else "it has checkpointed blocks"
            )
            return
        self.reason = (
            f"no segment of two ops or more, which torch.compile could take, ran {_PASSES} times"
        )
        compiled = self._programs.setdefault(program, _CompiledProgram())
        for exit in list(graph.exits()):
            if exit.written is None:
                continue
            used = compiled.used.get(exit) if exit.compiled is not None else None
            is_due = exit.passes >= _PASSES if used is None else not all(b.is_used for b in used)
            if is_due:
                self._rewrite(compiled, exit)

    def _rewrite(self, compiled: _CompiledProgram, exit: Exit) -> None:
        used: list[CompiledBody] = []
        find = functools.partial(self._find, compiled, used)
        try:
            code = exit.write_with(functools.partial(CompiledWriter, find=find))
        except Unlinked:
            return
        compiled.used[exit] = tuple(used)
        exit.compiled = code if used else exit.written

    def _find(
        self,
        compiled: _CompiledProgram,
        used: list[CompiledBody],
        text: str,
        names: dict[str, Any],
        ops: list[Op],
    ) -> CompiledBody | None:
        """Return the body with some source; None if it is not used, or there are too many."""
        constants = tuple(id(value) for name, value in names.items() if name[0] == "c")
        key = text, constants, ops[0].context
        body = compiled.bodies.get(key)
        if body is None:
            bodies = self.bodies
            most = self._settings.max_segments
            if sum(body.is_used for body in bodies) >= most or len(bodies) >= _MOST_BODIES:
                return None
            body = CompiledBody(text, names, self._settings, ops)
            compiled.bodies[key] = body
        if not body.is_used:
            return None
        used.append(body)
        return body


class _CompiledProgram:
    """The compiled parts of one program."""

    def __init__(self) -> None:
        # The bodies, by their source, the values of its names, and the context of the ops.
        self.bodies: dict[Any, CompiledBody] = {}
        self.used: dict[Exit, tuple[CompiledBody, ...]] = {}  # those that segments call


class CompiledWriter(SegmentWriter):
    """Writes a segment that calls bodies; `find` gives one for a text, names in it, and its ops."""

    def __init__(
        self,
        schedule: Schedule,
        direct: bool,
        find: Callable[[str, dict[str, Any], list[Op]], CompiledBody | None],
    ) -> None:
        super().__init__(schedule, direct)
        self._find = find
        self._plain_until = 0  # the first op that may be in a body

    def _write_ops(self, position: int) -> int:
        plan = self._plan(position) if position >= self._plain_until else None
        body = None if plan is None else self._find(plan.text, plan.names, plan.ops)
        if body is None or plan is None:
            if plan is not None:  # what is of no use as a whole is not tried in parts
                self._plain_until = plan.ops[-1].index + 1
            return super()._write_ops(position)
        source, last = self.source, plan.ops[-1].index
        self._take_out([(op.args, op.kwargs) for op in plan.ops])
        self._switch_for(plan.ops[0])
        name = source.bound(body)
        results = "".join(f"v{index}, " for index in plan.outputs)
        source.line(f"made = {name}({', '.join(f'v{index}' for index in plan.inputs)})")
        source.line("if made is None:")
        source.indent += 1
        for op in plan.ops:
            self._carry_out(op)
        source.line(f"{name}.seen({results})")
        left = {*plan.outputs, *plan.same}
        inner = [op for op in plan.ops if op.index not in left and is_freed(op)]
        if inner:
            source.line("del " + ", ".join(f"v{op.index}" for op in inner))
        source.indent -= 1
        source.line("else:")
        source.line(f"    {results}= made" if results else "    pass")
        for index, root in plan.same.items():
            source.line(f"    v{index} = v{root}")
        source.line("made = None")
        source.emitted.update((*plan.outputs, *plan.same))
        for op in plan.again:
            self._carry_out(op)
            source.emitted.add(op.index)
        for moment in range(2 * position + 1, 2 * last + 2):
            self._forget(moment)
        return last + 1

    def _plan(self, position: int) -> _BodyPlan | None:
        """Return what can be one body, from a position on."""
        ops = self._ops_from(position)
        while True:
            while ops and not _gives_tensors(ops[-1]):
                ops.pop()
            if not ops or not _gives_tensors(ops[0]):
                return None
            again = self._later_sizes(ops)
            later = {op.index for op in ops if self._is_used_after(op.index, ops)}
            later.update(index for op in again for index in op.operands)
            # Several tensors in a tuple are taken apart within a body, or made outside.
            torn = [op for op in ops if op.index in later and _gives_several(op)]
            if torn:
                ops = ops[: ops.index(torn[0])]
                continue
            if not _FEWEST <= sum(op.kind is OpKind.CALL and _gives_tensors(op) for op in ops):
                return None
            same: dict[int, int] = {}  # what gives a tensor back as it is, as dropout may
            for op in ops:
                call = self._direct.get(op.index)
                if call is not None and call.gives_back is not None:
                    root = call.gives_back.index
                    same[op.index] = same.get(root, root)
            return _BodyPlan(ops, again, later, same)

    def _ops_from(self, position: int) -> list[Op]:
        """Return the ops from a position on that a body can have in it."""
        tape, found = self.tape, []
        available: set[int] = set()
        first = tape.ops[position]
        for index in range(position, min(self.schedule.end, position + _LONGEST)):
            op = self.schedule.op_at(index)
            if index > position and index in self.schedule.guards:
                break
            if op is None:
                continue
            if op.context != first.context or not self._is_compilable(op, available):
                break
            found.append(op)
            available.add(index)
        return found

    def _is_compilable(self, op: Op, available: set[int]) -> bool:
        if why_not_op(op, op.context) is not None or not op.context.is_usual:
            return False
        ops = self.tape.ops
        if op.writes or works_in_place(op) or gives_nothing(op) or is_sized_by_values(op, ops):
            return False
        if not (_gives_tensors(op) or _is_of_sizes(op, ops)):
            return False
        for index in op.operands:
            given = ops[index]
            is_number = type(given.meta) in (int, bool) and _is_of_sizes(given, ops)
            if not (index in available or isinstance(given.meta, TensorMeta) or is_number):
                return False
        return True

    def _is_used_after(self, index: int, ops: list[Op]) -> bool:
        return self.schedule.last_use.get(index, -1) > 2 * ops[-1].index + 1

    def _later_sizes(self, ops: list[Op]) -> list[Op]:
        """Return the reads of sizes that are used both in a body and after it."""
        found: list[Op] = []
        wanted: set[int] = set()
        for op in reversed(ops):
            if not _gives_tensors(op) and (
                op.index in wanted or self._is_used_after(op.index, ops)
            ):
                found.insert(0, op)
                wanted.update(op.operands)
        return found


class _BodyPlan(Expressions):
    """A body that has not been compiled yet.

    The ops `again` run once more after it; the values of `later` are used after it. `same` has, for
    ops that return a tensor unchanged, the op that returned it first.
    """

    def __init__(
        self, ops: list[Op], again: list[Op], later: set[int], same: dict[int, int]
    ) -> None:
        super().__init__()
        self._own: dict[int, str] = {}
        needed = {op.index for op in ops if _gives_tensors(op)}
        for op in reversed(ops):
            if op.index in needed:
                needed.update(op.operands)
        self.ops = [op for op in ops if op.index in needed]  # the ops that it runs
        self.again = again
        self.inputs: list[int] = []  # the ops whose values it receives
        inside = {op.index for op in self.ops}
        lines: list[str] = []
        for op in self.ops:
            for index in op.operands:
                if index not in inside and index not in self._own:
                    self._own[index] = f"a{len(self.inputs)}"
                    self.inputs.append(index)
            call = self.call(op)
            self._own[op.index] = f"t{len(lines)}"
            lines.append(f"    t{len(lines)} = {call}\n")
        # As given, for ops whose values are used after it.
        self.same = {index: root for index, root in same.items() if index in later}
        leaving = (later - same.keys()) | set(self.same.values())
        # Those whose values it returns.
        self.outputs = [
            op.index for op in self.ops if isinstance(op.meta, TensorMeta) and op.index in leaving
        ]
        given = ", ".join(f"a{slot}" for slot in range(len(self.inputs)))
        results = "".join(f"{self.name(index)}, " for index in self.outputs)
        # The source.
        self.text = f"def body({given}):\n{''.join(lines)}    return None, ({results})\n"

    def name(self, index: int) -> str:
        return self._own[index]


def _gives_several(op: Op) -> bool:
    return type(op.meta) is tuple and _gives_tensors(op)


def _gives_tensors(op: Op) -> bool:
    """Return whether an op returns a tensor, or a tuple of tensors."""
    if op.kind is OpKind.SCALAR and op.target is not operator.getitem:
        return False
    metas = op.meta if type(op.meta) is tuple and op.meta else (op.meta,)
    return all(isinstance(meta, TensorMeta) for meta in metas)


def _is_of_sizes(op: Op, ops: list[Op]) -> bool:
    """Return whether the result of an op depends only on metadata."""
    if op.kind is OpKind.INPUT:
        return not isinstance(op.meta, TensorMeta)
    if op.kind is OpKind.CALL:
        return op.target in SHAPES or op.target in METADATA or op.target is Tensor.__len__
    if op.kind is not OpKind.SCALAR or _gives_tensors(op):
        return False
    return all(_is_of_sizes(ops[index], ops) for index in op.operands)
