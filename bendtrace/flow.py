"""Flow steps: where a model's Python consumed traced values, or walked a tensor."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, overload

from tabulate import tabulate

from bendtrace.recording.functions import SHAPES
from bendtrace.recording.iterations import Iterations, Mark, marks_of
from bendtrace.recording.sites import Place
from bendtrace.recording.statements import Loop
from bendtrace.recording.tape import Guard, Op, OpKind, Tape, Test

__all__ = [
    "AssertFlowStep",
    "EscapeFlowStep",
    "FlowStep",
    "FlowSteps",
    "IndexFlowStep",
    "LogicalFlowStep",
    "LoopFlowStep",
    "ShapeFlowStep",
    "flow_steps",
]

_JSON = (bool, int, float, str, type(None))


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
            outermost first, counted from 0.
    """

    name: str
    value: Any
    kind: str
    place: Place
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
            "value": self.value if type(self.value) in _JSON else repr(self.value),
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
        where = f"{self.file}:{self.place.function}.{self.line}"
        return f"{type(self).__name__}(name={self.name}, value={self.value!r}, file={where})"


class LogicalFlowStep(FlowStep):
    """A branch: `if`, `while`, a conditional expression, `and`, `or`, `not`, a filter, `match`."""


class AssertFlowStep(LogicalFlowStep):
    """An `assert`."""


class ShapeFlowStep(FlowStep):
    """A read of a size."""


class IndexFlowStep(FlowStep):
    """A traced integer that chose an item, or a part, of a Python container."""


class EscapeFlowStep(FlowStep):
    """A traced value that became a plain one: `int()`, `float()`, formatting, hashing, numpy."""


@dataclass(frozen=True, eq=False, repr=False)
class LoopFlowStep(FlowStep):
    """A loop that was entered: `for`, `while` or a comprehension.

    Attributes:
        bound: for loops over a range, the traced bound; over a tensor, its length; None for
            `while`.
        iterations: how often the body was begun.
    """

    bound: int | None = None
    iterations: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain values, ready for JSON."""
        return {**super().to_dict(), "bound": self.bound, "iterations": self.iterations}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, iterations={self.iterations})"


class FlowSteps(Sequence[FlowStep]):
    """The flow steps of a trace: a list that prints as a table."""

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

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
            >>> [step.value for step in trace.flow_steps.of(bt.LogicalFlowStep)]
            [True]
        """
        return FlowSteps([step for step in self._steps if isinstance(step, kinds)])

    def to_list(self) -> list[dict[str, Any]]:
        """Return the steps as plain values, ready for JSON."""
        return [step.to_dict() for step in self._steps]

    def table(self) -> str:
        """Return the steps as text, one line each."""
        rows = []
        for step in self._steps:
            value = repr(step.value)
            if isinstance(step, LoopFlowStep):
                value = f"{step.iterations} iterations"
                if step.bound is not None:
                    value += f" of {step.bound}"
            where = f"{os.path.basename(step.file)}:{step.line}"
            iteration = ".".join(map(str, step.iteration))
            text = shorten(step.text, 60, placeholder=" ...")
            rows.append((step.name, step.kind, value, text, where, step.module_path, iteration))
        headers = ("node", "kind", "value", "source", "at", "module", "iteration")
        return tabulate(rows, headers, disable_numparse=True)

    def __repr__(self) -> str:
        return repr(self._steps)

    def __str__(self) -> str:
        return self.table() if self._steps else "no flow steps"


def flow_steps(tape: Tape, names: list[str]) -> FlowSteps:
    """Derive the flow steps of a tape.

    Args:
        tape: a finished tape.
        names: name of each op's node.
    """
    marks = list(marks_of(tape))
    iterations = Iterations(marks)
    steps: list[FlowStep] = []
    header: list[Any] = []  # what the header of a loop over a range consumed so far
    for previous, mark in zip([None, *marks], marks, strict=False):
        chosen = _class_of(mark, tape)
        if chosen is None:
            continue
        cls, kind = chosen
        record, loop = mark.record, mark.role.heads
        index = record.index
        number = mark.order[1] - 1
        step = _Draft(
            name=names[index],
            value=record.expected if isinstance(record, Guard) else record.meta,
            kind=kind,
            place=mark.place,
            text=mark.role.text,
            module_path=mark.scope.path,
            guard=number if isinstance(record, Guard) else None,
            iteration=iterations.at(mark.order),
        )
        if cls is not LoopFlowStep:
            if loop is not None and iterations.begins_while(mark.order):
                count = iterations.count(mark.order, loop, [])
                steps.append(step.loop(loop, None, count))
            steps.append(step.finish(cls))
            continue
        if not _same_header(previous, mark):
            header = []
        header.append(step.value)
        bound = step.value if type(step.value) is int else None
        if loop is None:
            steps.append(step.loop(None, bound, bound or 0))
            continue
        count = iterations.count(mark.order, loop, header)
        if len(header) > 1:  # range(start, stop): one loop, of which each bound is a step
            steps[-1] = replace(steps[-1], iterations=count)  # type: ignore[call-arg]
        steps.append(step.loop(loop, bound, count))
    return FlowSteps(steps)


@dataclass
class _Draft:
    """The fields that all flow steps share."""

    name: str
    value: Any
    kind: str
    place: Place
    text: str
    module_path: str
    guard: int | None
    iteration: tuple[int, ...]

    def finish(self, cls: type[FlowStep]) -> FlowStep:
        return cls(**vars(self))

    def loop(self, loop: Loop | None, bound: int | None, iterations: int) -> LoopFlowStep:
        fields = dict(vars(self))
        if loop is not None and loop.kind == "while":
            # The loop as a whole; its tests are steps, and have guards, of their own.
            fields.update(kind="while", text=loop.text, guard=None)
        return LoopFlowStep(**fields, bound=bound, iterations=iterations)


def _class_of(mark: Mark, tape: Tape) -> tuple[type[FlowStep], str] | None:
    """Return what kind of step a mark is, or None if it is none."""
    record, role = mark.record, mark.role
    if isinstance(record, Op):
        return (ShapeFlowStep, "shape") if _is_used_size(record, tape) else None
    if record.how in ("", "metadata", "type"):
        return None
    walks = role.kind in ("for", "comprehension")
    if record.test is Test.TRUTH or record.how == "in":
        if role.kind == "assert":
            return AssertFlowStep, "assert"
        return LogicalFlowStep, role.kind or record.how
    if record.test is Test.LENGTH:
        # Otherwise: the several results of an op, taken apart by hand.
        return (LoopFlowStep, role.kind or "iteration") if walks or record.how == "iter" else None
    if record.how == "index" and walks:
        return LoopFlowStep, role.kind
    if record.how == "index" and role.kind in ("index", "range"):
        return IndexFlowStep, "index"
    return EscapeFlowStep, record.how


def _is_used_size(op: Op, tape: Tape) -> bool:
    """Whether an op reads one size. A shape that nothing looked at has no such op."""
    if op.kind is OpKind.CALL:
        return op.target in SHAPES and type(op.meta) is int
    if op.kind is OpKind.SCALAR and op.target is operator.getitem:
        source = tape.ops[op.args[0].index]
        return source.kind is OpKind.CALL and source.target in SHAPES
    return False


def _same_header(previous: Mark | None, mark: Mark) -> bool:
    return (
        previous is not None
        and isinstance(previous.record, Guard)
        and previous.record.how == "index"
        and previous.place == mark.place
    )
