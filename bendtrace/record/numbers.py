"""The uses of the traced scalars of a run: code tests them, computes with them, formats them.

Traced scalars report this to the recorder (`scalars.Origin`), which calls the methods in this file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from threading import enumerate as enumerate_threads
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.python import stacks
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import outside_scalars
from bendtrace.record.effects import HARMLESS
from bendtrace.record.encoding import Encoder, ListOperand, scalars_in
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.record.values import TRACED_AS, RunValues
from bendtrace.tape.guards import TruthGuard, ValueGuard
from bendtrace.tape.scalars import TRACED, TracedFloat, TracedScalar, plain, plain_for_numpy
from bendtrace.tape.tape import FunctionUse, Guard, Op, OpKind, Raised, Ref, Use, refs_in, use_by
from bendtrace.tape.watchers import current_watcher

if TYPE_CHECKING:
    from bendtrace.record import texts
    from bendtrace.tape.protocols import Inserter
else:
    texts = LazyModule("bendtrace.record.texts")


class NumberRecorder:
    """Records what is asked of the traced scalars of a run, and what is computed with them.

    The inserter is called before arithmetic is recorded.
    """

    def __init__(
        self, writer: TapeWriter, values: RunValues, encoder: Encoder, inserter: Inserter | None
    ) -> None:
        self._writer = writer
        self._values = values
        self._recorder: Any = values.origin  # which is the watcher of the run as well
        self._encoder = encoder
        self._inserter = inserter
        # Returns the answer to a question, given its guard and the value; None where the value is
        # the answer.
        self.answers: Callable[[Guard, Any], Any] | None = None
        self._thread = get_ident()
        places = stacks.frame_layout()
        # True if the interpreter leaves the operands of a comparison on the stack while it asks for
        # the truth of its result.
        self.compares: bool = places is not None and places.leaves
        self.compared: frozenset[int] = frozenset()  # identities of those compared last

    def consume(self, scalar: TracedScalar, use: Use | FunctionUse) -> Any:
        """Guard the value of a traced scalar that Python needs (see `scalars.Origin`)."""
        if get_ident() != self._thread:
            return self._elsewhere(scalar._value)
        varying = self._recorder.varying_asked(use)
        if varying is not None and varying.answers(use, scalar):
            # While a run follows a script, a number need not be among those that it is found in.
            return True if varying.searches else scalar._value
        index, value = self._values.scalar_ref(scalar).index, scalar._value
        if use is Use.BOOL:
            self._writer.guard(TruthGuard, index, bool(value), use, outside_scalars())
        else:
            self._writer.guard(ValueGuard, index, value, use, outside_scalars())
        return self.answer(value)

    def _elsewhere(self, value: Any) -> Any:
        """Return the value that a thread other than the run's own asks for.

        Attributes of the model hold traced scalars while it runs. A thread of Python's is nothing
        to the run, which would be live if it had started it; one of torch's works for it, unseen.
        """
        found = (one for one in enumerate_threads() if one.ident == get_ident())
        if all(type(one).__name__ == "_DummyThread" for one in found):
            self._values.environment.leaves_watched_objects = True
            self._writer.tape.block("a thread of torch's has used a number of the run")
        return value

    def answer(self, value: Any) -> Any:
        """Return the answer to the latest question."""
        return value if self.answers is None else self.answers(self._writer.tape.guards[-1], value)

    def arithmetic(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Record Python arithmetic on traced scalars (see `scalars.Origin`)."""
        if get_ident() != self._thread:
            return self._elsewhere(function(*map(plain, operands)))
        if self.compares:
            self.compared = frozenset(map(id, operands))
        traced, is_asked, has_raised = None, False, True
        # Else it is within an op, which a replay does as a whole.
        is_seen = current_watcher() is self._recorder and not self._is_answered()
        if is_seen and function in (pow, operator.pow):
            self._guard_power(*operands[:2])
        if is_seen and function not in HARMLESS:
            is_asked = self._ask_error(function, operands)
        try:
            result = self._compute(function, operands, is_seen)
            has_raised = False
            if is_seen:
                traced = TRACED_AS.get(type(result))
        finally:
            if traced is None:  # it raised, or returned a value that cannot be traced
                script = self._writer.script
                # In a script it raises what the replay has raised, and asks nothing.
                is_followed = script is not None and script.is_active
                is_asked = is_asked or (has_raised and is_followed)
                if not is_asked:
                    self._consume_all(function, operands)
        if traced is None:
            return result
        frame = outside_scalars()
        op = self._emit(function, operands, frame)
        op.meta = result
        return self._values.trace_number(traced, result, Ref(op.index), frame)

    def _is_answered(self) -> bool:
        """Return whether a call computes with its numbers, whose result is traced already."""
        varying = self._recorder.varying
        return varying is not None and varying.is_answered(outside_scalars())

    def _consume_all(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        """Guard the numbers in operands."""
        for scalar in scalars_in(operands):
            self.consume(scalar, use_by(getattr(function, "__name__", "arithmetic")))
        for operand in operands:
            if type(operand) is ListOperand:
                frame, numbers = outside_scalars(), [*operand.numbers]
                self._writer.guard(ValueGuard, operand.ref.index, numbers, Use.LIST, frame)

    def _compute(
        self, function: Callable[..., Any], operands: tuple[Any, ...], is_seen: bool
    ) -> Any:
        script = self._writer.script
        if is_seen and script is not None and script.is_active:
            encoded, _ = self._encoder.arguments(operands)
            found = script.result_of(function, [ref.index for ref in refs_in(encoded)])
            if found is not None:
                return found[0]
        return function(*map(_usable, operands))

    def list_op(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> ListOperand:
        """Record a computation that gives a list of numbers, each of which is an element of it.

        Its operands are numbers, lists of numbers, and `ListOperand`s.
        """
        script, numbers = self._writer.script, None
        is_asked = self._ask_error(function, operands)
        if script is None or not script.is_active:
            try:
                numbers = function(*map(_usable, operands))
            except Exception:
                if not is_asked:
                    self._consume_all(function, operands)
                raise
        op = self._emit(function, operands, outside_scalars())
        if op.index in self._writer.errors:
            raise self._writer.errors[op.index]
        if numbers is None:
            numbers = self._writer.handed.get(op.index)
        if numbers is None:  # in a script that carries out again what it has no values of
            numbers = function(*map(_usable, operands))
        op.meta, self._writer.tape.outlines[op.index] = tuple(numbers), [*numbers]
        return ListOperand([*numbers], Ref(op.index))

    def _emit(self, function: Callable[..., Any], operands: tuple[Any, ...], frame: Any) -> Op:
        encoded, _ = self._encoder.arguments(operands)
        counters = self._writer.tape.counters
        is_counter = counters.issuperset(ref.index for ref in refs_in(encoded)) and counters
        if self._inserter is not None and not is_counter:  # which is no node
            self._inserter.scalar(function, frame)
        return self._writer.emit(OpKind.SCALAR, function, encoded, {}, frame)

    def _ask_error(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> bool:
        """Guard what arithmetic raises, where the model might go on then; say whether it raises."""
        frame, script = outside_scalars(), self._writer.script
        if not self._writer.is_caught(self._writer.scope, self._writer.site(frame)):
            return False
        encoded, _ = self._encoder.arguments(operands)
        found = None
        if script is not None and script.is_active:
            found = script.result_of(error_of, [ref.index for ref in refs_in(encoded)])
        raised = error_of(function, *map(_usable, operands)) if found is None else found[0]
        op = self._writer.emit(OpKind.SCALAR, error_of, (function, *encoded), {}, frame)
        op.meta = raised
        self._writer.guard(ValueGuard, op.index, raised, Use.RESULT, frame)
        if found is not None and raised is not None:
            raise raised.type(*() if raised.text is None else (raised.text,))
        return raised is not None

    def _guard_power(self, base: Any, exponent: Any) -> None:
        """Guard what decides whether a power is an int, a float or complex."""
        for operand in (base, exponent):
            if type(operand) in TRACED:
                bool(operand >= 0)
        low, power = plain(base), plain(exponent)
        if isinstance(low, complex) or low >= 0 or not isinstance(power, float):
            return
        if type(exponent) is TracedFloat:
            bool(exponent % 1 == 0)
        # A negative number to the power of a float is complex, unless the float is whole, or one of
        # the two is not finite.
        if not power.is_integer():
            for operand in (base, exponent):
                if type(operand) in TRACED:
                    self.consume(operand, FunctionUse("pow"))

    def numpy(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of numpy on traced scalars (see `scalars.Origin`)."""
        frame = outside_scalars()
        is_seen = get_ident() == self._thread and current_watcher() is self._recorder
        if is_seen and (varying := self._recorder.varying) is not None:
            arrays = self._recorder.contents
            if arrays.takes(function, args, kwargs, frame):
                found = varying.computes(frame, lambda: arrays.call(function, args, kwargs, frame))
                if found is not None:
                    return found[0]
        return function(*plain_for_numpy(args), **plain_for_numpy(kwargs))

    def text(self, scalar: TracedScalar, function: Callable[..., str], *args: str) -> str:
        """Return the text of a traced scalar (see `scalars.Origin`)."""
        if get_ident() != self._thread:
            return str(self._elsewhere(function(scalar._value, *args)))
        frame = outside_scalars()
        run: texts.Texts = self._recorder.texts
        if current_watcher() is not self._recorder or not (
            run.printing or texts.goes_to_screen(frame)
        ):
            return function(self.consume(scalar, Use.FORMAT), *args)
        ref, text = self._values.scalar_ref(scalar), function(scalar._value, *args)
        op = self._writer.emit(OpKind.SCALAR, function, (ref, *args), {}, frame)
        op.meta = text
        return run.mark(op.index, text)


def _usable(operand: Any) -> Any:
    """Return an operand with plain numbers in it, without guards."""
    kind = type(operand)
    if kind is ListOperand:
        return operand.numbers
    if kind is list or kind is tuple:
        return kind(map(_usable, operand))
    if kind is dict:
        return {key: _usable(item) for key, item in operand.items()}
    return plain(operand)


def error_of(function: Callable[..., Any], *operands: Any) -> Raised | None:
    """Return what a function raises; None if it raises nothing."""
    try:
        function(*operands)
    except Exception as error:
        return Raised(type(error), str(error))
    return None


def plain_in(value: Any) -> Any:
    """Return arguments with the traced scalars in them made plain, and guard these."""
    kind = type(value)
    if kind in TRACED:
        origin = value._origin
        return origin.consume(value, FunctionUse("torch")) if origin.active else value._value
    if kind in (tuple, list, torch.Size):
        return kind([plain_in(item) for item in value])
    return {key: plain_in(item) for key, item in value.items()} if kind is dict else value
