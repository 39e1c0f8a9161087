"""Python numbers as traced scalars: counters of `while` loops, and numbers in the model's state.

A Python int that counts rounds makes each round a state of its own. Before a question inside of the
loop is asked, the variable gets a traced scalar with the same number instead, as if the model had
taken it out of a tensor. The state no longer has the number in it then (see `states.py`).

A number in an attribute or a container that differs from call to call would make each call a path
of its own. While the run goes on, the attribute holds a traced scalar, so that the number is an
input of the run, and what the model assigns in its place is computed from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bendtrace.recording.values import TRACED_AS, Values
from bendtrace.recording.varying import Place
from bendtrace.recording.writer import Writer
from bendtrace.source.bytecode import assign, counters_at, local_in
from bendtrace.source.sites import PACKAGE
from bendtrace.source.usage import compares_identity
from bendtrace.tape.guards import TruthGuard, ValueGuard
from bendtrace.tape.plain_numbers import needs_plain_numbers
from bendtrace.tape.scalars import TracedInt
from bendtrace.tape.tape import Guard, Op, OpKind, Ref, Tape

Counter: TypeAlias = tuple[CodeType, str]


class Lifting:
    """Lifts counters and numbers of one run.

    Args:
        excluded: the variables that stay as they are; None for all.
        as_tensors: whether a number is taken out of a tensor, for programs that have no numbers.
        numbers: the labels of numbers in the state that are inputs of the run.
        places: where numbers differ from run to run, so that they stay traced (`varying.py`).

    Attributes:
        counts: whether counters of loops are lifted.
        lifted: the variables that were lifted, by the op that gives the number of each.
        places: as given.
    """

    def __init__(
        self,
        excluded: frozenset[Counter] | None = frozenset(),
        as_tensors: bool = False,
        numbers: frozenset[str] = frozenset(),
        places: frozenset[Place] = frozenset(),
    ) -> None:
        self._excluded = excluded
        self._as_tensors = as_tensors
        self._numbers = numbers
        self.counts: bool = excluded is not None
        self.lifted: dict[int, Counter] = {}
        self.places: frozenset[Place] = places

    def begin(
        self, writer: Writer, values: Values, call: Callable[..., Any], outermost: CodeType
    ) -> None:
        """Take part in a run.

        Args:
            writer: says when something is asked.
            values: makes traced scalars.
            call: records a call of a torch function: function, arguments, options, frame.
            outermost: the code that called the model.
        """
        self._writer, self._values = writer, values
        self._call, self._outermost = call, outermost
        if self._excluded is not None:
            writer.before_question = self._lift

    def place(self) -> None:
        """Put traced scalars in the place of the numbers in the state."""
        environment, scalars = self._values.environment, []
        for part in environment.lift(self._numbers):
            op = self._writer.emit(OpKind.STATE, part, (), {}, None)
            op.meta = part.value
            self._writer.tape.counters.add(op.index)
            kind = TRACED_AS[part.type]
            scalars.append((part, self._values.scalar(kind, part.value, Ref(op.index))))
        environment.place(scalars)

    def _lift(self, frame: FrameType) -> None:
        """Lift what counts the rounds of the loops around a question."""
        if self._values.environment.tells_numbers:
            return
        found: FrameType | None = frame
        while found is not None and found.f_code is not self._outermost:
            code = found.f_code
            names = () if code.co_filename.startswith(PACKAGE) else counters_at(code, found.f_lasti)
            if names and not (
                needs_plain_numbers(code, found.f_globals) or compares_identity(code)
            ):
                for name in sorted(names):
                    self._lift_one(found, name)
            found = found.f_back

    def _lift_one(self, frame: FrameType, name: str) -> None:
        value, counter = local_in(frame, name), (frame.f_code, name)
        if type(value) is not int or abs(value) >= _LARGE or counter in (self._excluded or ()):
            return
        if self._as_tensors:
            tensor = self._call(torch.full, ((), value), {"dtype": torch.int64}, frame)
            scalar = self._call(Tensor.item, (tensor,), {}, frame)
        else:
            op = self._writer.emit(OpKind.SCALAR, operator.pos, (value,), {}, frame)
            op.meta = value
            self._writer.tape.counters.add(op.index)
            scalar = self._values.scalar(TracedInt, value, Ref(op.index))
        if type(scalar) is TracedInt:
            self.lifted[scalar._source.index] = counter
            assign(frame, name, scalar)

    def needed(self, tape: Tape) -> frozenset[Counter]:
        """Return the counters that Python needed the number of, for an index, say."""
        sources = {index: frozenset({counter}) for index, counter in self.lifted.items()}
        for op in tape.ops:
            if op.kind is OpKind.SCALAR and op.index not in sources:
                sources[op.index] = frozenset().union(
                    *(sources.get(index, frozenset()) for index in op.operands)
                )
        return frozenset().union(
            *(
                sources.get(guard.index, frozenset())
                for guard in tape.guards
                if not isinstance(guard, TruthGuard)
            )
        )


def required_numbers(tape: Tape, guards: Iterable[Guard]) -> frozenset[str]:
    """Return the labels of numbers in the state of which Python needed the very number.

    It needed that of `step` for `table[step + 1]`, and not for `table[step % 3]`.

    Args:
        tape: a run.
        guards: those of its guards that count.
    """
    found = set()
    for guard in guards:
        op: Op | None = tape.ops[guard.index] if isinstance(guard, ValueGuard) else None
        while op is not None and op.index in tape.counters:
            if op.kind is OpKind.STATE:
                found.add(op.target.label)
            one_to_one = op.target in _ONE_TO_ONE and len(op.operands) == 1
            op = tape.ops[op.operands[0]] if one_to_one else None
    return frozenset(found)


_ONE_TO_ONE = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos,
)  # fmt: skip
_LARGE = 1 << 31
