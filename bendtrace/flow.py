"""Flow steps: where a model's Python consumed traced scalars, or walked a tensor.

>>> import torch, bendtrace as bt
>>> def total(x):
...     return sum(row.sum() for row in x) if x.shape[0] > 1 else x.sum()
>>> for step in bt.trace(total, torch.ones(2, 3)).flow_steps:
...     print(type(step).__name__, step.text, step.value)
ShapeFlowStep x.shape[0] 2
LogicalFlowStep x.shape[0] > 1 True
LoopFlowStep x 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Literal, NamedTuple, overload

from bendtrace.errors import InputError
from bendtrace.python.checks import required_choice
from bendtrace.python.internals import is_off
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import InstructionPlace, Site, Span, is_installed, path_text, place_text
from bendtrace.python.statements import SourceLoop, dependent_source, subscript_text
from bendtrace.record.finish import Recording
from bendtrace.record.iterations import (
    Iterations,
    RecordMark,
    is_inside_comparison,
    marks_of,
    running_code,
    user_code,
)
from bendtrace.record.self_test import look_at_flow_once
from bendtrace.tape.guards import LengthGuard, TruthGuard
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind, Ref, Tape, Use
from bendtrace.watch.functions import SHAPES, is_gate

__all__ = [
    "AssertFlowStep",
    "EscapeFlowStep",
    "FlowStep",
    "FlowSteps",
    "IndexFlowStep",
    "LogicalFlowStep",
    "LoopFlowStep",
    "ShapeFlowStep",
]
__dir__ = __all__.copy


def _plain_json(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return repr(value)  # JSON has no nan and no infinities
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)


@dataclass(frozen=True, eq=False, repr=False)
class FlowStep:
    """A place where Python consumed a traced scalar or walked a tensor.

    Attributes:
        name: name of the node whose value was consumed.
        value: the value, as recorded.
        kind: the construct that consumed it: "if", "while", "and", "for", "index", ...
        place: where, as a source position.
        text: source of the expression that decided.
        module_path: qualified name of the module whose forward was running.
        guard: number of the guard that it put on `Trace.guards`; None for a read of a shape
            that nothing depends on yet.
        iteration: for each loop around it that the trace knows, the iteration it was in,
            outermost first, counted from 0. Empty as well where this Python's instructions do not
            tell (see `errors.IncompatibleVersionWarning`).

    Example:
        >>> import torch, bendtrace as bt
        >>> def first_above(x, limit=1.0):
        ...     for row in x:
        ...         if row.sum() > limit:
        ...             return row
        ...     return x[0]
        >>> trace = bt.trace(first_above, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> step = trace.flow_steps[-1]
        >>> step.kind, step.text, step.value, step.iteration
        ('if', 'row.sum() > limit', True, (1,))
    """

    name: str
    value: Any
    kind: str
    place: InstructionPlace
    text: str
    module_path: str
    guard: int | None
    iteration: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        """File of the source position."""
        return self.place.file

    @property
    def line(self) -> int:
        """Line of the source position, counted from 1."""
        return self.place.line

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain values, ready for JSON."""
        return {
            "step": type(self).__name__,
            "name": self.name,
            "kind": self.kind,
            "value": _plain_json(self.value),
            "file": self.file,
            "line": self.line,
            "column": self.place.span.column,
            "end_line": self.place.span.end_line,
            "end_column": self.place.span.end_column,
            "function": self.place.function,
            "text": self.text,
            "module_path": self.module_path,
            "guard": self.guard,
            "iteration": list(self.iteration),
        }

    def __repr__(self) -> str:
        where = f"{path_text(self.file)}:{self.place.function}.{self.line}"
        return f"{type(self).__name__}(name={self.name}, value={self.value!r}, file={where})"


class LogicalFlowStep(FlowStep):
    """A branch: `if`, `while`, a conditional expression, `and`, `or`, `not`, a filter, `match`.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: -x if x.shape[0] > 1 and x.max() > 1 else x, torch.ones(3))
        >>> [(step.kind, step.text, step.value) for step in trace.flow_steps]
        [('shape', 'x.shape[0]', 3), ('and', 'x.shape[0] > 1', True), ('conditional expression',
         'x.max() > 1', False)]
    """


class AssertFlowStep(LogicalFlowStep):
    """An `assert`.

    Example:
        >>> import torch, bendtrace as bt
        >>> def root(x):
        ...     assert x.min() >= 0, "no root of negative numbers"
        ...     return x.sqrt()
        >>> trace = bt.trace(root, torch.ones(3))
        >>> [(step.text, step.value) for step in trace.flow_steps.of(bt.flow.AssertFlowStep)]
        [('x.min() >= 0', True)]
    """


class ShapeFlowStep(FlowStep):
    """A read of a size.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.reshape(x.shape[0] * 2, -1), torch.ones(3, 4))
        >>> [(step.text, step.value, step.guard) for step in trace.flow_steps]
        [('x.shape[0]', 3, None)]
    """


class IndexFlowStep(FlowStep):
    """A traced integer that chose an item, or a part, of a Python container.

    Example:
        >>> import torch, bendtrace as bt
        >>> scales = [1.0, 10.0, 100.0]
        >>> trace = bt.trace(lambda x: x * scales[x.argmax()], torch.tensor([0.0, 5.0]))
        >>> [(step.kind, step.text, step.value) for step in trace.flow_steps]
        [('index', 'scales[x.argmax()]', 1)]
    """


class EscapeFlowStep(FlowStep):
    """A traced value that became a plain one: `int()`, `float()`, formatting, hashing, numpy.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x * round(float(x.max())), torch.tensor([0.5, 2.0]))
        >>> [(step.kind, step.text, step.value) for step in trace.flow_steps]
        [('float', 'float(x.max())', 2.0)]
    """


@dataclass(frozen=True, eq=False, repr=False)
class LoopFlowStep(FlowStep):
    """A loop that was entered: `for`, `while` or a comprehension.

    Attributes:
        bound: how many iterations the header provides for; None for `while`, and where that
            depends on more than traced values.
        iterations: how often the body was begun. For a loop that was left early: of how many
            iterations anything was recorded. None where that is not known, as with `iteration`.

    Example:
        >>> import torch, bendtrace as bt
        >>> def running(x):
        ...     for i in range(x.shape[0]):
        ...         if x[i] < 0:
        ...             break
        ...         x = x * 2
        ...     return x
        >>> trace = bt.trace(running, torch.tensor([1.0, -1.0, 1.0]))
        >>> loop = trace.flow_steps.of(bt.flow.LoopFlowStep)[0]
        >>> loop.kind, loop.bound, loop.iterations
        ('for', 3, 2)
    """

    bound: int | None = None
    iterations: int | None = 0

    @property
    def how_often(self) -> str:
        """The number of times that the body was begun, in words: "2 iterations"."""
        if self.iterations is None:
            return "an unknown number of iterations"
        return f"{self.iterations} iteration{'s' * (self.iterations != 1)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain values, ready for JSON."""
        return {**super().to_dict(), "bound": self.bound, "iterations": self.iterations}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, iterations={self.iterations})"


class FlowSteps(Sequence[FlowStep]):
    """The flow steps of a trace: a list that prints as a table.

    Example:
        >>> import torch, bendtrace as bt
        >>> def shrink(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> steps = bt.trace(shrink, torch.ones(4)).flow_steps
        >>> len(steps), [step.value for step in steps[1:]]
        (3, [True, False])
        >>> steps.of(bt.flow.LoopFlowStep)[0].iterations
        1
    """

    def __init__(self, steps: Sequence[FlowStep]) -> None:
        self._steps = list(steps)

    @overload
    def __getitem__(self, index: int) -> FlowStep: ...
    @overload
    def __getitem__(self, index: slice) -> FlowSteps: ...
    def __getitem__(self, index: int | slice) -> FlowStep | FlowSteps:
        if isinstance(index, slice):
            return FlowSteps(self._steps[index])
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def of(self, *kinds: type[FlowStep]) -> FlowSteps:
        """Return the steps of some classes.

        Raises:
            InputError: one of them is not a class of flow steps.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
            >>> [step.value for step in trace.flow_steps.of(bt.flow.LogicalFlowStep)]
            [True]
        """
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, FlowStep)):
                raise InputError(
                    f"of() takes classes of flow steps, such as bt.flow.LoopFlowStep, not {kind!r}"
                )
        return FlowSteps([step for step in self._steps if isinstance(step, kinds)])

    def to_list(self) -> list[dict[str, Any]]:
        """Return the steps as plain values, ready for JSON."""
        return [step.to_dict() for step in self._steps]

    def table(
        self, form: str = "simple", *, shapes: bool = True, only: Literal["all", "mine"] = "all"
    ) -> str:
        """Return the steps as a table, one line each.

        Args:
            form: how it is laid out, as in the tabulate package: "simple", "html", "github".
            shapes: whether to list reads of sizes, too.
            only: "mine" leaves out code of installed packages and of Python.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x.view(x.shape[0]) if x.sum() > 0 else x, torch.ones(2))
            >>> str(trace.flow_steps).splitlines()[-1]
            '1 read of sizes is not listed: flow_steps.table() has all'
        """
        required_choice("only", only, "all", "mine")
        rows = []
        for step in self._steps:
            if (not shapes and isinstance(step, ShapeFlowStep)) or (
                only == "mine" and is_installed(step.file)
            ):
                continue
            value = repr(step.value)
            if isinstance(step, LoopFlowStep):
                value = _iterations(step)
            where = place_text(step.file, step.line)
            iteration = ".".join(map(str, step.iteration))
            text = shorten(step.text, 60, placeholder=" ...")
            rows.append((step.name, step.kind, value, text, where, step.module_path, iteration))
        headers = ("node", "kind", "value", "source", "at", "module", "iteration")
        return str(tabulate.tabulate(rows, headers, tablefmt=form, disable_numparse=True))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.table("html", shapes=False)}

    def __repr__(self) -> str:
        return repr(self._steps)

    def __str__(self) -> str:
        reads = len(self.of(ShapeFlowStep))
        lines = (
            [self.table(shapes=False)] if len(self) > reads else [] if reads else ["no flow steps"]
        )
        if reads:
            are = "read of sizes is" if reads == 1 else "reads of sizes are"
            lines.append(f"{reads} {are} not listed: flow_steps.table() has all")
        return "\n".join(lines)


def _iterations(step: LoopFlowStep) -> str:
    number, bound = step.iterations, step.bound
    if bound is not None and number is not None and bound != number:
        return f"{number} of {bound} iterations"
    return step.how_often


def steps_of(recording: Recording) -> FlowSteps:
    """Return the flow steps of a recorded run, derived once.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
        >>> bt.flow.steps_of(trace._recording) is trace.flow_steps
        True
    """
    return recording.view(_derive_steps)


def _derive_steps(recording: Recording) -> FlowSteps:
    return flow_steps(recording.tape, recording.names)


def flow_steps(tape: Tape, names: list[str]) -> FlowSteps:
    """Derive the flow steps of a tape.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
        >>> steps = bt.flow.flow_steps(trace._recording.tape, trace.names)
        >>> [step.text for step in steps]
        ['x.sum() > 0']
    """
    look_at_flow_once()
    marks = list(marks_of(tape))
    iterations = Iterations(marks)
    steps: list[FlowStep] = []
    header: _Header | None = None
    for mark in marks:
        if mark.beside:  # nothing that the model's Python has asked for
            continue
        if header is not None and mark.element_of is None and not header.holds(mark):
            header = None
        chosen = _step_class(mark, tape)
        if chosen is None or _is_asked_by_gate(mark.record, tape):
            continue
        cls, kind = chosen
        record = mark.record
        step = cls(
            name=names[record.index],
            value=record.answer if isinstance(record, Guard) else record.meta,
            kind=kind,
            place=mark.place,
            text=mark.role.text if cls is not ShapeFlowStep else subscript_text(mark.place),
            module_path=mark.scope.path,
            guard=mark.order[1] - 1 if isinstance(record, Guard) else None,
            iteration=iterations.at(mark.order),
        )
        loop = mark.role.heads
        if isinstance(step, LoopFlowStep):
            if loop is None:  # a tensor walked by code that is not a loop of the source
                steps.append(replace(step, bound=step.value, iterations=step.value))
                continue
            if header is None or header.is_complete:
                header = _Header(loop, mark, len(steps))
            steps.append(step)
            header.take(mark, step.value, steps, iterations)
            continue
        if iterations.begins_while(mark.order) and (tests := mark.role.tests) is not None:
            steps.append(_whole_while(step, tests, iterations.count(mark.order)))
        steps.append(step)
    if is_off("iterations"):
        steps = [_without_iterations(step) for step in steps]
    return FlowSteps(steps)


def _without_iterations(step: FlowStep) -> FlowStep:
    if isinstance(step, LoopFlowStep):
        return replace(step, iteration=(), iterations=None)
    return replace(step, iteration=())


def _is_asked_by_gate(record: Op | Guard, tape: Tape) -> bool:
    """Return whether a guard is on containers at a gate, which no code of the model asks for."""
    op = tape.ops[record.index]
    if not isinstance(record, Guard) or op.kind is not OpKind.SCALAR or len(op.args) != 2:
        return False
    source, key = op.args
    if type(source) is not Ref or not is_gate(tape.ops[source.index]):
        return False
    gate = tape.ops[source.index].target
    return bool(getattr(gate, "tells_in_place", False) and key == len(gate.exchanged))


class _Header:
    """The header of one `for`, entered once: several of its parts can be flow steps."""

    def __init__(self, loop: SourceLoop, mark: RecordMark, first: int) -> None:
        self.loop = loop
        self.last = mark
        self.position = first
        self.taken: dict[Span, list[int]] = {}

    def holds(self, mark: RecordMark) -> bool:
        """Return whether a mark belongs to the same evaluation of the header."""
        return (
            mark.activation == self.last.activation
            and mark.place.offset >= self.last.place.offset
            and self.loop.header.holds(mark.place.span)
        )

    @property
    def is_complete(self) -> bool:
        """True if the header has consumed everything that it can."""
        return self.loop.length(self.taken) is not None

    def take(
        self, mark: RecordMark, value: Any, steps: list[FlowStep], iterations: Iterations
    ) -> None:
        """Add a consumed value, and bring the steps of the header up to date."""
        self.last = mark
        self.taken.setdefault(mark.place.span, []).append(int(value))
        bound = self.loop.length(self.taken)
        count = iterations.count(mark.order)
        if bound is not None:
            count = min(count, bound) if self.loop.leaves_early else bound
        for position in range(self.position, len(steps)):
            step = steps[position]
            if isinstance(step, LoopFlowStep):
                steps[position] = replace(step, bound=bound, iterations=count)


def _whole_while(test: FlowStep, loop: SourceLoop, iterations: int) -> LoopFlowStep:
    """Return a `while` as a whole; its tests are other steps, with their own guards."""
    return LoopFlowStep(
        test.name, test.value, "while", test.place, loop.text, test.module_path, None,
        test.iteration[:-1], None, iterations,
    )  # fmt: skip


def _step_class(mark: RecordMark, tape: Tape) -> tuple[type[FlowStep], str] | None:
    """Return what kind of step a mark is, or None if it is none."""
    record, role = mark.record, mark.role
    if isinstance(record, Op):
        return (ShapeFlowStep, "shape") if _is_used_size(record, tape) else None
    if record.use in (Use.RESULT, Use.METADATA, Use.TYPE):
        return None
    walks = role.kind in ("for", "comprehension")
    is_truth = isinstance(record, TruthGuard)
    if is_truth and is_inside_comparison(record, tape):
        return EscapeFlowStep, "compare"
    if is_truth or record.use is Use.IN:
        if role.kind == "assert":
            return AssertFlowStep, "assert"
        # Looking for a key compares it with those that are there.
        return LogicalFlowStep, "key" if role.kind == "index" else role.kind or "bool"
    if isinstance(record, LengthGuard):
        # Otherwise: the several results of an op, taken apart by hand.
        is_loop = walks or record.use is not Use.LENGTH
        return (LoopFlowStep, role.kind or "iteration") if is_loop else None
    if record.use in (Use.INDEX, Use.INT, Use.LEN) and walks and not role.is_subscript:
        # list(x) asks for the length as well as for the items.
        is_hint = record.use is Use.LEN and not mark.place.text.startswith("len(")
        return None if is_hint else (LoopFlowStep, role.kind)
    if record.use is Use.INDEX and (role.is_subscript or role.kind == "index"):
        return IndexFlowStep, "index"
    return EscapeFlowStep, "range" if role.kind == "range" else record.use.value


def _is_used_size(op: Op, tape: Tape) -> bool:
    """Return whether an op reads one size. A shape that nothing looked at has no such op."""
    if op.kind is OpKind.CALL:
        return op.target in SHAPES and type(op.meta) is int
    if op.is_element:
        source = tape.ops[op.args[0].index]
        return source.kind is OpKind.CALL and source.target in SHAPES
    return False


# Control dependence: which ops ran because of which flow steps.


class Control(NamedTuple):
    """The flow steps that parts of a run depend on, by number, outermost first."""

    ops: list[tuple[int, ...]]  # the steps that led to each op
    calls: list[tuple[int, ...]]  # the steps that led to each call of a module


def control_of(recording: Recording) -> Control:
    """Return the flow steps that the ops and calls of a run depend on; computed once."""
    return recording.view(_control)


def _control(recording: Recording) -> Control:
    tape = recording.tape
    governing = _Governing(tape, steps_of(recording))
    found = Control([], [])
    calls = iter([*tape.calls, None])
    coming = next(calls)
    for position in range(len(tape.ops) + 1):
        is_over = position == len(tape.ops)
        while coming is not None and (is_over or coming.start <= position):
            owner = coming.parent
            found.calls.append(
                () if owner is None else governing.at(coming.start, owner, coming.site)
            )
            coming = next(calls)
        if not is_over:
            op = tape.ops[position]
            found.ops.append(governing.at(position, op.scope, op.site))
    return found


class _Governing:
    """Tells under which flow steps things of a run happened.

    Has to be asked in the order in which they did.
    """

    def __init__(self, tape: Tape, steps: FlowSteps) -> None:
        # Latest first, so that the next one to come into force is at the end.
        self._coming = list(_deciding_steps(tape, steps))[::-1]
        self._coming.sort(key=lambda entry: entry[0], reverse=True)
        # For each running function: the steps in force, by where they are.
        # A `while` is tested by other instructions before the first iteration than after it.
        self._in_force: dict[object, dict[tuple[str, Span], tuple[int, tuple[Span, ...]]]] = {}

    def at(self, position: int, scope: ModuleCall, site: Site | None) -> tuple[int, ...]:
        """Return the numbers of the steps that led to an op or call, outermost first."""
        while self._coming and self._coming[-1][0] <= position:
            _, number, step, activation, spans = self._coming.pop()
            at = (step.file, step.place.span)
            self._in_force.setdefault(activation, {})[at] = (number, spans)
        if not self._in_force or site is None:
            return ()
        found: set[int] = set()
        for place, activation in running_code(scope, site):
            for (file, _), (number, spans) in self._in_force.get(activation, {}).items():
                if file == place.file and any(span.holds(place.span) for span in spans):
                    found.add(number)
        return tuple(sorted(found))


def _deciding_steps(
    tape: Tape, steps: FlowSteps
) -> Iterator[tuple[int, int, FlowStep, object, tuple[Span, ...]]]:
    """Yield the steps that something can run under: when, which, in which function, what."""
    for number, step in enumerate(steps):
        # The tests of a `while` are separate steps: the loop as a whole has no guard.
        if step.guard is None or not isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            continue
        spans = dependent_source(step.place, isinstance(step, LoopFlowStep) or bool(step.value))
        guard = tape.guards[step.guard]
        if guard.site is not None:
            _, activation, _ = user_code(guard.scope, guard.site)
            yield guard.position, number, step, activation, spans
