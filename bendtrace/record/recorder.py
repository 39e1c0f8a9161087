"""The recorder: runs a model on real inputs under a function mode and fills a tape.

It handles the calls that torch reports. Traced scalars are the concern of `numbers.py`, printed
text of `texts.py`, and calls of modules of `scopes.py`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from bendtrace.python import lazy
from bendtrace.python.bytecode import argument_names, assign, only_tests
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import BEHIND, PACKAGE, Site, definition, user_place, users_frame
from bendtrace.record.effects import ReachableContainers
from bendtrace.record.encoding import (
    Encoder,
    holds,
    index_with_numbers,
    make_plain,
    scalars_in,
    with_items_of,
    without_traced,
)
from bendtrace.record.fast_path import NOT_TAKEN, FastPath, fast_path_for, hooks_around
from bendtrace.record.finish import Finish, Recording, failing_op
from bendtrace.record.numbers import NumberRecorder, plain_in
from bendtrace.record.scopes import Scopes
from bendtrace.record.states import StateReader
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.record.values import TRACED_AS, RunValues
from bendtrace.tape.captured import Captured, CaptureKind
from bendtrace.tape.guards import TruthGuard, ValueGuard
from bendtrace.tape.plain_numbers import is_higher_order, needs_plain_numbers
from bendtrace.tape.tape import (
    FunctionUse,
    Guard,
    ModuleCall,
    Op,
    OpKind,
    Ref,
    RunState,
    Tape,
    Use,
    describe_raised,
    meta_of,
)
from bendtrace.tape.watchers import StopRun, call_silently, current_watcher, set_around
from bendtrace.watch import draws
from bendtrace.watch.environment import Environment
from bendtrace.watch.executed import CodeMonitor, new_code_monitor
from bendtrace.watch.functions import (
    CALLS_PYTHON,
    CONTEXT,
    DESCEND,
    ESCAPES,
    FLEETING,
    GIVES_BACK,
    GRAD_FN,
    LEGACY,
    METADATA,
    SHARING,
    SPECIAL,
    VALUES,
    calls_node,
    inner_twin,
    is_gate,
    name_of,
)
from bendtrace.watch.intercepts import INTERCEPT_CODES, reporting_to
from bendtrace.watch.mode_queries import RecordingMode, is_active, run_under_modes
from bendtrace.watch.monkeypatches import may_be_patched, original_of
from bendtrace.watch.rank_sync import has_other_ranks
from bendtrace.watch.transforms import REGISTERS, HandleOfRun, registers
from bendtrace.watch.writes import may_share

if TYPE_CHECKING:
    from bendtrace.insert.inserter import Inserter
    from bendtrace.log.capture import ValueCapture
    from bendtrace.record import (
        array_functions,
        arrays,
        cache_fills,
        checkpoints,
        texts,
        varying,
    )  # fmt: skip
    from bendtrace.record.array_functions import SharedArrays
    from bendtrace.record.arrays import Arrays
    from bendtrace.record.checkpoints import Checkpoints
    from bendtrace.record.script import Script
    from bendtrace.record.texts import Texts
    from bendtrace.record.varying import Lifting, Varying
    from bendtrace.tape.guards import Place
else:
    array_functions = LazyModule("bendtrace.record.array_functions")
    arrays = LazyModule("bendtrace.record.arrays")
    cache_fills = LazyModule("bendtrace.record.cache_fills")
    checkpoints = LazyModule("bendtrace.record.checkpoints")
    texts = LazyModule("bendtrace.record.texts")
    varying = LazyModule("bendtrace.record.varying")

__all__ = ["Recorder", "Recording"]


# Longer results of `tolist` are guarded as a whole, not turned into traced scalars.
_LONG_LIST = 256


class Recorder(RecordingMode):
    """Records one run.

    Args:
        function: what is going to be run.
        environment: what the run can read.
        script: for a resumed run, what was done before.
        observer: is shown the values of the run.
        inserter: puts its own ops into the run.
        reads_states: whether it reads all states in which the run asks for values (`states.py`).
        keeps_errors: whether a run that raises is recorded up to there.
        lifting: lifts counters of loops, and numbers in the state (`varying.py`).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        environment: Environment,
        script: Script | None = None,
        observer: ValueCapture | None = None,
        inserter: Inserter | None = None,
        reads_states: bool = False,
        keeps_errors: bool = False,
        lifting: Lifting | None = None,
    ) -> None:
        super().__init__()
        self._keeps_errors = keeps_errors and not has_other_ranks()
        self._error: Exception | None = None
        self._observer = observer
        self._inserter = inserter
        self.active: bool = False
        self.turns: int = 0
        self.environment = environment
        self._function = function
        self._start = definition(function)
        self._writer = TapeWriter(
            environment, script, INTERCEPT_CODES | {Recorder._outcome.__code__}
        )
        self.tape: Tape = self._writer.tape
        self._values = RunValues(self._writer, environment, self, self._start, observer)
        self._encoder = Encoder(self._values)
        self._code_monitor = new_code_monitor(self._wants_inside)
        self._within = False  # in one op, during which the mode stays switched on
        outermost = Recorder._outcome.__code__
        reads_states = reads_states or has_other_ranks()  # which cannot begin again by itself
        self._states = StateReader(self._values, outermost, reads_states, inserter)
        self._writer.read_state = self._read_state
        self._writer.goes_on_from = self._goes_on_from
        self._numbers = NumberRecorder(self._values, self._encoder, inserter)
        self.varying: Varying | None = None
        if lifting is not None:
            if lifting.places:
                self._keep_varying(lifting.places)
            lifting.begin(self._values, self._call_paused, outermost)
        self._lifting = lifting
        own = (self, self._values, self._values.scalars, self.tape, environment)
        self._number_converter = NumberConverter(self._code_monitor, self._values, own, outermost)
        self._compares = self._numbers.compares
        self._scopes = Scopes(self._values, self._encoder, self._code_monitor, inserter)
        # These are called directly, without a call in between.
        self.consume: Callable[..., Any] = self._numbers.consume
        self.arithmetic: Callable[..., Any] = self._numbers.arithmetic
        self.text: Callable[..., str] = self._numbers.text
        self.numpy: Callable[..., Any] = self._numbers.numpy
        self.module_call: Callable[..., Any] = self._scopes.call
        self._checkpoints: Checkpoints | None = None
        self._fast_path: FastPath | None = None
        self._aside: FastPath | None = None  # the fast path, while there are shared arrays
        self._arrays: SharedArrays | None = None  # that share memory with tensors of the run
        self._contents: Arrays | None = None
        # As they are before the run, which may change them: the streams, and how numpy handles
        # errors.
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        numpy: Any = sys.modules.get("numpy")
        self._numpys_errors: dict[str, Any] = {} if numpy is None else numpy.geterr()
        if inserter is not None:
            inserter.begins(self)

    # The run

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Call the function on the (traced) arguments and return what was recorded.

        The steps stand in this order:

        - `Finish` is made first: it notes the random states, seeds and modes before the run.
        - Arrays get their content back (`Arrays.end`) before `Finish` looks for changes.
        - The observer is asked about the writes that the output shows before `close` forgets them.
        - The recorder is inactive from then on: what cleaning up reads is not the model's reading.
        - `clean` makes the known changes plain, and then `make_plain` all other traced scalars. It
          finds them by their number of holders, so `output` and `changes` are deleted before.
        - The scalars retire last: `clean` knows them by the class that they then lose.

        Raises:
            Exception: whatever the function raises, unchanged.
        """
        finish = Finish(self._values, self._encoder, self._start, self._function)
        self._draws = finish.draws
        if any(getattr(_module, f"_global_{name}") for name in _GLOBAL_HOOKS):
            finish.block("hooks are registered for all modules")
        own = (self, self._writer, self._values, self._values.scalars)
        scalar_holds = holds(self._values.scalars)
        self.active = True
        if self._inserter is None and not hooks_around() and not self.around:
            self._fast_path = fast_path_for(self._values, self._encoder, self._show)
        if self.environment.caches and self._observer is None and self._inserter is None:
            self._follow_fills(finish)
        try:
            if self._lifting is not None:
                self._lifting.place()
            self.environment.place_watched()
            with reporting_to(self), self:
                self._code_monitor.begin()
                if any(type(part.value) is LEGACY for part in self.environment.parts):
                    self.contents.follow_classes(None)
                if self.environment.open_arrays:
                    self.contents.follow_open(self.environment.open_arrays)
                try:
                    output = self._outcome(args, kwargs)
                finally:
                    self._code_monitor.end()
            if self._contents is not None:
                self._contents.end()
            if self._arrays is not None:
                self._arrays.finish()
            recording, changes = finish.recording(output, self._code_monitor)
            recording.error, self._error = self._error, None
            recording.follows_lists = self._values.accumulation is not None
            if self.varying is not None:
                self.varying.finish()
                recording.places = self.varying.places
                recording.useless = frozenset(self.varying.useless(self._lifting))
                recording.guarded = frozenset(self.varying.guarded_places())
                recording.keyed = frozenset(self.varying.keyed)
            if self._observer is not None:
                for ref, tensor in self._writer.writes.stale:
                    self._observer.reads(len(self.tape.ops), ref.index, tensor)
            self.active = False
            recording.result = without_traced(output, finish.clean(changes, *own))
            del output, changes
            make_plain(self._values.scalars, scalar_holds)
            return recording
        except BaseException:
            self.active = False
            finish.clean(list(self.environment.changes()), *own)
            make_plain(self._values.scalars, scalar_holds)
            raise
        finally:
            self.active = False
            self._values.retire()
            if self._contents is not None:
                self._contents.close()
            self._fast_path = self._aside = None
            # A cycle of recorder and encoder must not keep the caller's objects alive.
            self._writer.close()

    def _follow_fills(self, finish: Finish) -> None:
        """Have what fills a cache taken off the tape."""
        parts = (
            self.tape, self._writer, self._writer.writes, self._values, self._encoder,
            self._numbers, self._states, self._states.effects, self._scopes,
        )  # fmt: skip
        self._code_monitor.fills = cache_fills.CacheFills(
            self._values,
            lambda: (*parts, *filter(None, (self.varying, self._values.accumulation))),
            lambda: (finish.modes(), self._lifting and len(self._lifting.lifted)),
            lambda: self._arrays or self._contents or self._checkpoints or "texts" in vars(self),
        )  # fmt: skip

    def _outcome(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = None
        try:
            if self._inserter is not None:
                with self._code_monitor.pause():
                    args, kwargs = self._inserter.starts(args, kwargs, sys._getframe())
            output = self._function(*args, **kwargs)
            if self._inserter is not None:
                with self._code_monitor.pause():
                    output = self._inserter.ends(output, sys._getframe())
        except StopRun:
            pass
        except Exception as error:
            if not self._keeps_errors:
                raise
            self._keep(error)
            return None
        finally:
            if self._inserter is not None:
                self._inserter.ended()
        if self._observer is not None and self._observer.ended:
            self.tape.block(f"the run was ended early, {self._observer.ended}")
            return None
        return output

    def _keep(self, error: Exception) -> None:
        """Keep the error of a run that is kept up to there."""
        # Not in `_outcome`: insertions pass plain numbers to code that asks for types.
        self._error = error
        self.tape.block(f"the run raised {type(error).__name__}{failing_op(self.tape.ops)}")

    def argument(self, part: Captured, value: Any) -> Any:
        """Record an argument and return the value that the model receives for it."""
        op = self._writer.emit(OpKind.INPUT, part, (), {}, None)
        if part.kind is CaptureKind.NUMBER:
            op.meta = value
            return self._values.scalar(TRACED_AS[type(value)], value, Ref(op.index))
        self._values.bind_tensor(value, op)
        self._writer.writes.note_existing(value)
        if self._observer is not None:
            self._observer.argument(op, value)
        return value

    def _read_state(self, guard: Guard) -> RunState | None:
        self.active = False  # what is read here is not the model's reading
        try:
            with self._code_monitor.pause():
                return self._states.read(guard, self.turns, self._numbers.compared)
        finally:
            self.active = True

    def _goes_on_from(self, state: RunState, answer: Any) -> None:
        self._states.go_on_from(state, answer, self.turns)

    def _call_paused(self, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType) -> Any:
        with self._code_monitor.pause(), torch._C.DisableTorchFunction():
            return self._call(func, args, kwargs, frame)

    # Calls that torch reports

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._code_monitor.leave()
        if not self._within:
            self.turns += 1
        try:
            return self._handle(func, types, args, kwargs or {}, sys._getframe(1))
        finally:
            self._code_monitor.enter()

    def _handle(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType
    ) -> Any:
        if self._within:
            if may_be_patched(func):
                func = original_of(func, frame)
            return func(*plain_in(args), **plain_in(kwargs))
        if self._compares and len(args) == 2:
            self.note_compared(args)
        if func in _ITEMS and type(args[1]) in (slice, tuple):
            args = (args[0], index_with_numbers(args[1], self._number_of), *args[2:])
        if func is Tensor.__deepcopy__:
            args = args[0], self._encoder.memo(*args)
        # It takes no function that may be somebody's replacement; those are resolved below.
        if self._fast_path is not None and (not types or _PLAIN_CLASSES.issuperset(types)):
            out = self._fast_path(func, args, kwargs, frame)
            if out is not NOT_TAKEN:
                return out
        if may_be_patched(func):
            func = original_of(func, frame)
        if self._inserter is not None and func not in DESCEND:
            return self._inserter.op(func, args, kwargs, frame, self._handle_report)
        return self._handle_report(func, args, kwargs, frame)

    def _number_of(self, thing: Any) -> Any:
        """Return the number that an object of Python stands for, whose code is the model's."""
        with self, self._code_monitor.resume():
            return type(thing).__index__(thing)

    def _handle_report(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        if func in SPECIAL:
            return self._call_special(func, args, kwargs, frame)
        return self._call(func, args, kwargs, frame)

    def _call_special(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        if func in CONTEXT:
            return run_under_modes(self.around, func, args, kwargs)
        if func in METADATA:
            return self._metadata(func, args, kwargs, frame)
        if func in VALUES:
            use = VALUES[func]
            op, value = self._record(func, args, kwargs, frame)
            op.meta = value
            if self.varying is not None and self.varying.answers_of(op, value, use, frame):
                return value
            if use is Use.FORMAT and (
                self.texts.printing or texts.goes_to_screen(users_frame(frame))
            ):
                return self.texts.mark(op.index, value)
            self._writer.guard(
                TruthGuard if use is Use.BOOL else ValueGuard, op.index, value, use, frame
            )
            return self._numbers.answer(value)
        if func in DESCEND:
            with self, self._code_monitor.resume():
                return inner_twin(func)(*args, **kwargs)
        if func in SHARING:
            return self._call(func, args, kwargs, frame)
        if func == GRAD_FN:
            op, value = self._record(func, args, kwargs, frame)
            op.meta = None if value is None else type(value).__name__
            self._values.guard_presence(op, value is not None, frame)
            if value is None or only_tests(frame):
                return value
        if func in ESCAPES:
            if func is Tensor.numpy and self.contents.begins_at(args[0], frame):
                return self.contents.numpy(args[0], args[1:], kwargs, frame)
            if self._observer is not None:
                self._observer.escaped(args)
            self.tape.block(
                f"{name_of(func)} at {user_place(frame)} passes the content of a tensor to "
                "code that cannot be watched"
            )
            self._values.facts.clear()  # it may now be shared with other processes, or pinned
            return run_under_modes(self.around, func, args, kwargs)
        if func in CALLS_PYTHON:
            return self._opaque(func, args, kwargs, frame)
        if func in REGISTERS:
            return HandleOfRun(self._opaque(registers(func), args, kwargs, frame))
        assert func is Tensor.tolist
        return self._tolist(func, args, kwargs, frame)

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        op, out = self._record(func, args, kwargs, frame)
        if func in SHARING:
            self._watch_shared_arrays(op, func, args, kwargs, out, frame)
        bound = self._values.bind(out, op, frame)
        if self._observer is not None:
            self._show(op, args, out)
        return bound

    def _watch_shared_arrays(
        self, op: Op, func: Any, args: Any, kwargs: dict[str, Any], out: Any, frame: FrameType
    ) -> None:
        """Watch the arrays in the arguments of an op, if its result shares their memory."""
        again = None
        if op.index in self._writer.handed:
            again = functools.partial(call_silently, func, args, kwargs)
        if self._arrays is None:
            self._arrays = array_functions.SharedArrays(self.tape, self.environment.find)
        self._arrays.note_result((*args, *kwargs.values()), out, again, frame)
        if self._arrays and self._fast_path is not None:
            self._fast_path, self._aside = None, self._fast_path

    def _show(self, op: Op, args: tuple[Any, ...], out: Any) -> None:
        assert self._observer is not None
        self._observer.gave(op, out)
        if out is None and op.writes and args:
            written = next((arg for arg in args if isinstance(arg, Tensor)), None)
            if written is not None:
                self._observer.wrote(op, written)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Op, Any]:
        op, args, kwargs = self._write(func, args, kwargs, frame)
        return op, self._carry_out(op, func, args, kwargs)

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Op, Any, dict[str, Any]]:
        """Record a call on the tape; return it and the arguments to call the function with."""
        self._writer.begin()
        self._encoder.called = func
        encoded, args = self._encoder.arguments(args)
        named: dict[str, Any] = {}
        if kwargs:
            values, usable = self._encoder.arguments(tuple(kwargs.values()))
            named = dict(zip(kwargs, values, strict=True))
            kwargs = dict(zip(kwargs, usable, strict=True))
        self._encoder.called = None
        if self._arrays:
            self._arrays.check_arguments(self._writer.writes.tensors())
            if not self._arrays:
                self._fast_path, self._aside = self._aside, None
        op = self._writer.emit(OpKind.CALL, func, encoded, named, frame)
        self._writer.writes.note_reads(op)
        if op.reads and self._observer is not None:
            for ref, tensor in self._writer.writes.stale:
                self._observer.reads(op.index, ref.index, tensor)
        return op, args, kwargs

    def _carry_out(self, op: Op, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op (or, resumed, take its earlier result)."""
        handed, error = self._writer.handed, None
        if op.index in handed:
            if op.writes:
                self._values.facts.clear()
            out = handed[op.index]
            handed.pop(op.index, None)  # the run alone holds it from here on
            self._writer.ask_implied(inside=True)
        else:
            out, error = self._try_op(op, func, args, kwargs)
        if not is_gate(op) or calls_node(op):  # the error of another gate is the call's
            self._writer.ask_error(op)
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback has this frame
        return out

    def _try_op(
        self, op: Op, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Exception | None]:
        """Run an op; return its result, and what it raised."""
        errors = self._writer.errors
        self._code_monitor.leave(self._within)  # code inside one op is not the run's own
        outer, self._writer.is_inside = self._writer.is_inside, True
        try:
            if op.index in errors:
                raise errors[op.index]
            if self._observer is None:
                out = self._call_under_modes(func, args, kwargs)
            else:
                out = self._call_observed(op, func, args, kwargs)
            self._writer.writes.note_writes(op)  # sets `op.writes`, which is asked below
            if op.writes:
                self._values.facts.clear()
            if self._arrays:
                self._arrays.check_writes(op, self._writer.writes.tensors())
            return out, None
        except Exception as error:
            op.raised = describe_raised(op, error)
            return None, error
        finally:
            self._writer.is_inside = outer
            self._code_monitor.enter()

    def _call_under_modes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the function of an op, which the modes around the run see."""
        if not self.around:
            return call_silently(func, args, kwargs)
        return run_under_modes(self.around, call_silently, (func, args, kwargs), {})

    def _call_observed(self, op: Op, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        assert self._observer is not None
        self._observer.begins(op, args, kwargs)
        started = perf_counter_ns()
        out = self._call_under_modes(func, args, kwargs)
        self._observer.times[op.index] = perf_counter_ns() - started
        return out

    def _metadata(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        fact = None
        is_lasting = name_of(func) not in FLEETING
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and is_lasting:
            fact = (self._values.ref(args[0]).index, func)
            if fact in self._values.facts:  # of a resumed run, the tensor has changed since
                return self._values.facts[fact]
        op, value = self._record(func, args, kwargs, frame)
        op.meta = value
        self._writer.guard(ValueGuard, op.index, value, Use.METADATA, frame)
        if fact is not None:
            self._values.facts[fact] = value
        return value

    def _tolist(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        op, out = self._record(func, args, kwargs, frame)
        op.meta = out
        if math.prod(meta_of(args[0]).shape) > _LONG_LIST:
            # The model may change the list that it receives; the guarded one must not change.
            op.meta = copy.deepcopy(out)
            self._writer.guard(ValueGuard, op.index, op.meta, Use.LIST, frame)
            return out
        return self._values.trace_list(out, Ref(op.index), frame)

    # Calls that intercepts report

    def opaque_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None = None,
    ) -> Any:
        """Run a function as one op."""
        frame = frame or sys._getframe(2)
        if self._inserter is not None:
            with self._code_monitor.pause():
                return self._inserter.op(function, args, kwargs, frame, self._opaque)
        return self._opaque(function, args, kwargs, frame)

    def draw(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """Draw random numbers of Python or numpy as one op."""
        if draws.numpys_generator(function, args) is not None and self.contents.draws_array(
            function, args, kwargs, frame
        ):
            return self.contents.call(function, args, kwargs, frame)
        return self.opaque_call(function, args, kwargs, frame)

    def holds(self, thing: Any) -> bool:
        """Return whether the model holds an object, or is given it."""
        return self.environment.find(thing) is not None

    def _opaque(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        own = (*args, *kwargs.values())
        with torch._C.DisableTorchFunction():  # what is read here is not the model's reading
            op, args, kwargs = self._write(function, args, kwargs, frame)
            self._writer.writes.watch_memory()
            if self._values.holds_values(function, set()):
                self.tape.block(
                    f"{name_of(function)} at {user_place(frame)} closes over values of the "
                    "run, which a replay could not replace"
                )
            if self._observer is not None:
                self._observer.escaped((args, kwargs))
        outer = set_around(self)
        given = ReachableContainers(function, args, kwargs, self.environment)
        self._writer.given += given.containers
        try:
            return self._as_one(op, function, args, kwargs, frame)
        finally:
            set_around(outer)
            if given.may_have_changed():
                for one, other in zip(own, (*args, *kwargs.values()), strict=True):
                    with_items_of(one, other)
                self.tape.block(
                    f"{name_of(function)} at {user_place(frame)} is called as one op, and may "
                    "change a container that it is given"
                )

    def read(self, function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Query something of a tensor other than its values, and guard the answer."""
        with torch._C.DisableTorchFunction():
            return self._metadata(function, (tensor,), {}, sys._getframe(2))

    def _as_one(
        self, op: Op, function: Any, args: Any, kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        outer, self._within = self._within, True
        self._draws.begin()
        try:
            out = self._carry_out(op, function, args, kwargs)
        finally:
            self._within = outer
            self._draws.end()
        with torch._C.DisableTorchFunction():
            if may_share(function):
                self._watch_shared_arrays(op, function, args, kwargs, out, frame)
            bound = self._values.bind(out, op, frame)
            if self._observer is not None:
                self._observer.escaped(out)
                self._show(op, args, out)
            return bound

    # Numbers that differ between runs (see `varying.py`)

    def varying_asked(self, use: Use | FunctionUse) -> Varying | None:
        """Return what may answer where a number is asked for; None where it is guarded.

        In a run that keeps no number traced, caches and numpy alone do not get the number itself.
        """
        if self.varying is None and (use is Use.HASH or use is Use.NUMPY):
            with self.unwatched():  # it tries once what this Python can do
                self._keep_varying(frozenset())
        return self.varying

    def _keep_varying(self, places: frozenset[Place]) -> None:
        self.varying = varying.Varying(places, self._values, self._numbers, self._inserter)

    # Texts, and blocks that the backward pass runs again: most runs have none

    @functools.cached_property
    def texts(self) -> Texts:
        """The texts of values that the run formats."""
        return texts.Texts(self._writer, self._as_one, self._streams)

    def checkpointed(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Any:
        """Return a generator that follows a block that the backward pass runs again, or None."""
        if self._checkpoints is None:
            inserter = self._inserter
            self._checkpoints = checkpoints.Checkpoints(
                self._writer,
                self.environment.changes_so_far,
                lambda: inserter is not None and inserter.exchanges_state,
            )
        return self._checkpoints.block(function, *settings, **kwargs)

    # What is done with arrays (see `arrays.py`)

    @property
    def contents(self) -> Arrays:
        """The arrays of the run whose content comes from tensors; most runs have none."""
        if self._contents is None:
            self._contents = arrays.Arrays(self._values, self._numpys_errors)
            self._values.tensor_of_array = self._contents.tensor_of
        return self._contents

    @property
    def has_lost_arrays(self) -> bool:
        """Return whether code that cannot be followed has received an array of these."""
        return self._contents is not None and self._contents.has_lost

    def array_op(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """Record an op that works on arrays, and return its result."""
        if self._inserter is not None:
            return self._inserter.op(function, args, kwargs, frame, self._array_op)
        return self._array_op(function, args, kwargs, frame)

    def _array_op(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        op, args, kwargs = self._write(function, args, kwargs, frame)
        self._writer.writes.watch_memory()
        if self._observer is not None:
            self._observer.escaped((args, kwargs))
        return self._as_one(op, function, args, kwargs, frame)

    def asks(self, function: Callable[..., Any], tensor: Tensor, frame: FrameType) -> Any:
        """Call a function of torch on a tensor as the code of a frame would."""
        return self._handle(function, (), (tensor,), {}, frame)

    def note_compared(self, values: tuple[Any, ...]) -> None:
        """Note which values an instruction compares (see `stacks.read_frame`)."""
        self._numbers.compared = frozenset(map(id, values))

    def pause(self) -> None:
        """Note nothing of the code that runs, in whose place `arrays.py` does an instruction."""
        self._code_monitor.leave()
        self.turns += 1
        self._states.instruction = self.turns, len(self.tape.ops)

    def go_on(self) -> None:
        """Note again what runs."""
        self._states.instruction = None
        self._code_monitor.enter()

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is noted of the code that runs: it is the tracer's."""
        return self._code_monitor.pause()

    # What an inserter can do

    @property
    def scope(self) -> ModuleCall:
        """The module call that the run is in."""
        return self._writer.scope

    def site(self, frame: FrameType) -> Site | None:
        """Return the site of `frame` (see `Stage`)."""
        return self._writer.site(frame)

    def gate(self, function: Callable[..., Any], args: tuple[Any, ...], frame: FrameType) -> Any:
        """Record a call on the tape that is not the model's own (see `Stage`)."""
        if self._checkpoints is not None:
            self._checkpoints.note_gate()
        with torch._C.DisableTorchFunction():
            op, args, _ = self._write(function, args, {}, frame)
            self._writer.writes.watch_memory()
            if self._observer is not None:
                self._observer.escaped(args)
        return self._as_one(op, function, args, {}, frame)

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run code of an inserter, and record it like the model's own."""
        # Within a call that torch reports, this mode is off the stack.
        with nullcontext() if is_active(self) else self, self._code_monitor.resume():
            return function(*args)

    @property
    def is_in_block(self) -> bool:
        """Return whether the run is in a block that is run again (see `Stage`)."""
        return self._checkpoints is not None and self._checkpoints.current is not None

    @property
    def follows_script(self) -> bool:
        """Return whether the run follows a script (see `Stage`)."""
        script = self._writer.script
        return script is not None and script.is_active

    def pass_through(
        self, function: Callable[[Any], Any], value: Tensor, scope: ModuleCall | None
    ) -> Any:
        """Let a function replace a result of a node (see `Stage`)."""
        outer, self._within = self._within, True
        try:
            with torch._C.DisableTorchFunction():
                ref = self._values.existing_ref(value)
            is_sole = ref is not None and (
                ref.index not in self.tape.aliases
                if scope is None
                else scope.is_sole and ref.index >= scope.start
            )
            if ref is None or not is_sole:
                return None
            if self._checkpoints is not None:
                self._checkpoints.passes(ref.index, value)
            self._code_monitor.leave(answers=True)
            try:
                given = call_silently(function, (value,), {})
            finally:
                self._code_monitor.enter()
        finally:
            self._within = outer
        with torch._C.DisableTorchFunction():
            return given if self._values.exchange(value, given, ref) else None

    def note_replacement(self, gate: Callable[[Any], Any]) -> None:
        """Note the gate that has let a function replace a result (see `Stage`)."""
        if self._checkpoints is not None:
            self._checkpoints.note_replacement(gate)

    def guard_ownership(self, tensor: Tensor, frame: FrameType) -> None:
        """Guard that the model holds no tensor like this (see `Stage`)."""
        with torch._C.DisableTorchFunction():
            self._values.guard_ownership(tensor, frame)

    def block(self, reason: str) -> None:
        """Have the recording never be replayed (see `Stage`)."""
        self.tape.block(reason)

    def expect(self, truth: Any, frame: FrameType) -> bool:
        """Guard a truth value that a gate has returned (see `Stage`)."""
        if type(truth) is bool:  # a plain one has been guarded already
            return truth
        self._writer.guard(
            TruthGuard, self._values.scalar_ref(truth).index, bool(truth._value), Use.RESULT, frame
        )
        return bool(truth._value)

    def answer_with(self, answers: Callable[[Guard, Any], Any]) -> None:
        """Let a function give the answers to questions: it receives each guard and the value."""
        self._numbers.answers = answers

    def hand_over(self, values: dict[int, Any]) -> None:
        """Take values that an earlier run has computed, by op, instead of computing them again."""
        self._writer.handed = values

    def state(self, tensor: Tensor) -> Captured | None:
        """Return the captured value for a tensor (see `Stage`)."""
        part = self.environment.find(tensor)
        return None if part is None or part.is_argument else part

    def forgot_casts(self) -> None:
        """Record that autocast clears its cache."""
        self._writer.forgot_casts()

    def forget(self, *tensors: Tensor) -> None:
        """Release tensors altogether, including weak references."""
        for tensor in tensors:
            self._writer.tracked.pop(id(tensor), None)

    def _wants_inside(self) -> bool:
        """Return whether the running module must not be executed by one fused op."""
        if self._within:
            return False
        self.tape.is_closed = True
        return self._inserter is not None and self._inserter.wants_inside(self._writer.scope)

    def called_inside(self, module: nn.Module) -> None:
        """Tell the inserter of a module that a function called as one op has called."""
        self.tape.is_closed = True
        if self._inserter is not None:
            with self._code_monitor.pause():
                self._inserter.inside(module, self.environment.module_paths.get(id(module), ""))

    def recomputed(self, entering: bool) -> None:
        """Tell the inserter that a block begins or ends that the backward pass runs again."""
        if self._inserter is not None:
            self._inserter.recomputed(entering)

    def identified(self, tensor: Tensor) -> None:
        """Record that code tells a tensor by its identity."""
        index = self._values.producer_of(tensor)
        if index is None or self.tape.ops[index].target in GIVES_BACK:
            self.unseen("a lookup of a tensor by its identity, in a dict, a set or a cache,")

    def unseen(self, what: str) -> None:
        """Record something that a replay could not repeat."""
        self._fast_path = self._aside = None  # from now on, ops may call other code
        # The run is live in any case; unwatched code may compile.
        self._code_monitor.leave(answers=True)
        self._number_converter.end(sys._getframe(1))
        self.tape.block(f"{what} {self._values.here()} cannot be watched")


def _around_import() -> AbstractContextManager[None]:
    watcher = current_watcher()
    return nullcontext() if watcher is None else watcher.unwatched()


lazy.around = _around_import
BEHIND.update({Recorder.run.__code__, Recorder._outcome.__code__})
_PLAIN_CLASSES = frozenset({Tensor, nn.Parameter, nn.Buffer})
_ITEMS = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")
_GLOBAL_HOOKS = (
    "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks",
)  # fmt: skip


# Plain numbers for code that a run enters and that is not known to ask traced ones.
#
# Installed code is known if it belongs to torch or to a package that uses torch
# (`tape/plain_numbers.py`). The arguments of any other are made plain where it begins, and so are
# the numbers that code of the model makes while it is called from there.


class NumberConverter:
    """Makes numbers plain where code begins.

    Args:
        code_monitor: says which code begins.
        values: makes the numbers of the run.
        own: objects of the recorder, which are no values of the run.
        outermost: the code that called the model.
    """

    def __init__(
        self,
        code_monitor: CodeMonitor,
        values: RunValues,
        own: tuple[object, ...],
        outermost: CodeType,
    ):
        self._code_monitor, self._values = code_monitor, values
        self._own, self._outermost = own, outermost
        code_monitor.enters_foreign = self._enters_foreign
        code_monitor.enters_model = self._enters_model

    def end(self, frame: FrameType | None) -> None:
        """Leave no traced scalar to a run that goes on unwatched.

        Args:
            frame: the code that runs.
        """
        self._values.gives_plain = True
        while frame is not None and frame.f_code is not self._outermost:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                self._make_plain(frame)
            frame = frame.f_back

    def _enters_model(self, frame: FrameType) -> None:
        """Code begins that the estimate of what the model reaches may not contain."""
        if not self._values.gives_plain and needs_plain_numbers(frame.f_code, frame.f_globals):
            self._pass_plain(frame)
            self.end(frame.f_back)
            if is_higher_order(frame.f_code):
                self._make_state_plain()

    def _make_state_plain(self) -> None:
        """Leave no traced scalar in the state: torch's compiler will read it."""
        scalars = self._values.scalars
        *counts, least = holds(scalars)
        for scalar, count in zip(scalars, counts, strict=True):
            if count > least:
                scalar._consume(Use.TYPE)
        make_plain(scalars, [])

    def _enters_foreign(self, frame: FrameType) -> None:
        self._values.is_called_by_foreign = self._is_called_by_foreign
        self._pass_plain(frame)

    def _is_called_by_foreign(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not self._outermost:
            if self._code_monitor.is_foreign(frame):
                return True
            frame = frame.f_back
        return False

    def _pass_plain(self, frame: FrameType) -> None:
        """Make the arguments of a function plain that has just begun."""
        variables = frame.f_locals
        for name in argument_names(frame.f_code):
            value = variables.get(name)
            plain = self._plain(value)
            if plain is not value:
                variables[name] = plain
        # A profiler's caller writes them back in 3.11; since 3.13, they are the variables.
        if sys.version_info[:2] == (3, 12):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def _make_plain(self, frame: FrameType) -> None:
        for name, value in [*frame.f_locals.items()]:
            if any(map(self._values.is_dead, scalars_in(value))):
                continue  # the state from which a resumed run goes on does not reach it: unread
            plain = self._plain(value)
            if plain is not value:
                assign(frame, name, plain)

    def _plain(self, value: Any) -> Any:
        """Return a value with plain numbers, which are guarded, also behind functions in it."""
        scalars = list(scalars_in(value))
        for scalar in scalars:
            scalar._consume(Use.TYPE)
        for inner in _behind(value):
            if isinstance(inner, types.CellType):
                inner.cell_contents = self._plain(inner.cell_contents)
            elif isinstance(inner, FrameType):
                self._make_plain(inner)
            else:
                self._plain(inner)
        memo = {id(thing): thing for thing in self._own}
        return without_traced(value, memo) if scalars else value


def _behind(value: Any) -> Iterator[Any]:
    """Yield what functions, generators and iterators among arguments hold out of sight."""
    for item in (value, *value) if type(value) in (tuple, list) else (value,):
        function = item.__func__ if type(item) is types.MethodType else item
        if type(function) is types.FunctionType:
            for cell in function.__closure__ or ():
                if next(scalars_in(_cell_content(cell)), None) is not None:
                    yield cell
        elif type(item) is types.GeneratorType:
            if item.gi_frame is not None and not item.gi_running:
                yield item.gi_frame
        elif type(item).__name__.endswith("iterator") or type(item) in _ITERATORS:
            yield from gc.get_referents(item)


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


_ITERATORS = (map, zip, filter, enumerate, reversed)
