"""Questions that no guard was put for: a tensor's value became a number of Python's own before.

`float(x.sum()) * 2 > 7` leaves a record of `float(x.sum())` alone. The rest is read from the source
to guide the search; whether a side was taken is known from the operations under it.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bendtrace.exploring.distance import Course, Margin
from bendtrace.recording.iterations import user_code
from bendtrace.recording.recorder import Recording
from bendtrace.source.sites import Place, Span
from bendtrace.source.syntax import source_file, span_of
from bendtrace.tape.tape import ModuleCall, Op, OpKind
from bendtrace.view.outline.source import Choice

__all__ = ["Formula", "Recorded", "formula_of", "recorded_in"]


class _Unknown(Exception):
    """Something in the source is not read."""


class Value(NamedTuple):
    """An op, its place, the key of the running function, and the module call."""

    op: Op
    place: Place
    running: object
    scope: ModuleCall


Recorded = dict[str, dict[Span, Value]]


@dataclass(frozen=True, eq=False)
class Formula:
    """The condition of a branch, in terms of what was recorded.

    Attributes:
        roots: the ops whose values it uses.
        truth: returns the distance of the condition, given a course with values.
        around: the place of the condition, with the key of the running function.
        path: the module whose forward asks.
        is_exact: whether it is the whole condition, and each name in it has one meaning.
    """

    roots: tuple[int, ...]
    truth: Callable[[Course], Margin]
    around: tuple[tuple[Place, object], ...]
    path: str
    is_exact: bool


def recorded_in(recording: Recording) -> Recorded:
    """Return the latest op at each place of each file."""
    found: Recorded = {}
    for op in recording.tape.ops:
        if op.site is not None and op.is_work and op.raised is None:
            place, running, scope = user_code(op.scope, op.site)
            found.setdefault(place.file, {})[place.span] = Value(op, place, running, scope)
    return found


def formula_of(
    choice: Choice, function: ast.AST, recording: Recording, recorded: Recorded
) -> Formula | None:
    """Read the condition of a branch; None if it uses nothing recorded, or what is not read."""
    node = source_file(choice.file).expressions.get(choice.span)
    values = recorded.get(choice.file)
    if node is None or values is None:
        return None
    reader = _Reader(function, values, recording)
    try:
        read = reader.read(node, node.lineno)
    except (_Unknown, RecursionError):
        return None
    if reader.last is None:
        return None
    last = reader.last
    around = ((Place(choice.file, last.place.function, choice.span, -1), last.running),)
    return Formula(
        tuple(reader.roots), lambda course: course.truth(read(course)), around, last.scope.path,
        reader.is_exact,
    )  # fmt: skip


_Read = Callable[[Course], Any]
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_FUNCTIONS = ("float", "int", "bool", "abs", "round")


class _Reader:
    """Turns expressions of the source into functions of a course."""

    def __init__(
        self, function: ast.AST, values: Mapping[Span, Value], recording: Recording
    ) -> None:  # fmt: skip
        self._function, self._values, self._recording = function, values, recording
        self.roots: list[int] = []
        self.last: Value | None = None
        self.is_exact = True

    def read(self, node: ast.AST | None, line: int) -> _Read:
        """Return what gives the value of an expression; names mean what they do at a line."""
        known = self._values.get(span_of(node)) if isinstance(node, ast.expr) else None
        if known is not None:
            index = known.op.index
            self.roots.append(index)
            self.last = known
            return lambda course: course.value(index)
        if isinstance(node, ast.Constant):
            constant = node.value
            return lambda course: constant
        if isinstance(node, ast.Name):
            return self._read_name(node.id, line)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._applied(_OPERATORS[type(node.op)], line, node.left, node.right)
        if isinstance(node, ast.UnaryOp):
            return self._applied(_OPERATORS.get(type(node.op), operator.not_), line, node.operand)
        if isinstance(node, ast.Compare):
            return self._read_comparison(node, line)
        if isinstance(node, ast.BoolOp):
            self.is_exact = False
            joined = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return self._applied(joined, line, *filter(self._is_read, node.values))
        if isinstance(node, ast.Call) and not node.keywords:
            name = ast.unparse(node.func)
            if name in _FUNCTIONS:
                return self._applied(getattr(builtins, name), line, *node.args)
            if name.startswith("math.") and hasattr(math, name[5:]):
                return self._applied(getattr(math, name[5:]), line, *node.args)
        raise _Unknown

    def _is_read(self, operand: ast.expr) -> bool:
        """Whether an operand of `and` or `or` can be read: the run may not have come to it."""
        trial = _Reader(self._function, self._values, self._recording)
        try:
            trial.read(operand, operand.lineno)
        except _Unknown:
            return False
        return bool(trial.roots)

    def _read_comparison(self, node: ast.Compare, line: int) -> _Read:
        function = _COMPARISONS.get(type(node.ops[0]))
        if len(node.ops) == 1 and function is not None:
            return self._applied(function, line, node.left, node.comparators[0])
        found = node.comparators[0]
        if isinstance(node.ops[0], ast.In) and isinstance(found, (ast.Tuple, ast.List)):
            equal = [ast.Compare(node.left, [ast.Eq()], [item]) for item in found.elts]
            return self._applied(operator.or_, line, *equal)
        if len(node.ops) > 1:
            operands = [node.left, *node.comparators]
            parts = [
                ast.Compare(left, [op], [right])
                for left, op, right in zip(operands, node.ops, operands[1:], strict=False)
            ]
            return self._applied(operator.and_, line, *parts)
        raise _Unknown

    def _applied(self, function: Callable[..., Any], line: int, *operands: ast.AST) -> _Read:
        reads = [self.read(operand, line) for operand in operands]
        is_whole = all(isinstance(n, ast.Constant) and type(n.value) is int for n in operands[1:])
        return lambda course: course.applied(function, [read(course) for read in reads], is_whole)

    def _read_name(self, name: str, line: int) -> _Read:
        """Read the latest assignment to a name before a line."""
        bound = [
            node for node in ast.walk(self._function)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]  # fmt: skip
        self.is_exact = self.is_exact and len(bound) == 1
        found = [
            node
            for node in ast.walk(self._function)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.lineno < line
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id == name
        ]
        best = max(found, key=lambda node: node.lineno, default=None)
        if isinstance(best, ast.AugAssign):
            if type(best.op) in _OPERATORS:
                return self._applied(
                    _OPERATORS[type(best.op)], best.lineno, best.target, best.value
                )
        elif best is not None:
            return self.read(best.value, best.lineno)
        for op in self._recording.tape.ops:
            if op.kind is OpKind.INPUT and op.target.label == name:
                self.roots.append(op.index)
                index = op.index
                return lambda course: course.value(index)
        raise _Unknown
