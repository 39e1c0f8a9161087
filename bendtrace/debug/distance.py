"""The distance of a run from another answer to one of its questions, with gradients.

A part of a recorded run is done again on other inputs, with gradients, and with integers and truths
as numbers. The results only guide the search: the model itself decides what is a find.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bendtrace.python.sites import InstructionPlace, Span
from bendtrace.python.statements import source_file, span_of
from bendtrace.record.iterations import user_code
from bendtrace.record.recorder import Recording
from bendtrace.show.walks import Choice
from bendtrace.tape.captured import Captured
from bendtrace.tape.structure import Existing, Instance, build_instance
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, Tape, TensorMeta, map_leaves
from bendtrace.watch.functions import name_of

_FAR = 1e6  # where no distance is known


class Margin:
    """Truths, each with its distance from being true and from being false; one of the two is 0."""

    def __init__(self, true: Tensor, false: Tensor) -> None:
        self.true = true
        self.false = false

    @property
    def hard(self) -> Tensor:
        """The truths themselves."""
        return self.true == 0

    def number(self) -> Tensor:
        """Return 0 and 1, with the gradient of a sigmoid."""
        margin = self.false - self.true
        soft = torch.sigmoid(margin / (margin.detach().abs().mean() + 1e-6))
        return _straight_through(self.hard.to(soft.dtype), soft)

    def each(self, function: Callable[[Tensor], Tensor]) -> Margin:
        """Return the truths that a function, such as an index, picks."""
        return Margin(function(self.true), function(self.false))


class Index:
    """The index of the greatest of several scores, and the scores, along their last dimension."""

    def __init__(self, hard: Tensor, scores: Tensor) -> None:
        self.hard = hard
        self.scores = scores

    def number(self) -> Tensor:
        """Return the numbers, with the gradient of a softmax."""
        places = torch.arange(self.scores.shape[-1], dtype=self.scores.dtype)
        soft = (torch.softmax(self.scores, -1) * places).sum(-1)
        return _straight_through(self.hard.to(soft.dtype), soft)

    def compared(self, name: str, other: Any) -> Margin:
        """Return the distance of a comparison with fixed numbers, by the scores."""
        scores = self.scores
        places = torch.arange(scores.shape[-1])
        other = torch.as_tensor(other).detach()
        chosen = getattr(operator, name)(places, other.unsqueeze(-1)).expand(scores.shape)
        least = torch.full_like(scores, -_FAR)
        inside = torch.where(chosen, scores, least).amax(-1)
        outside = torch.where(chosen, least, scores).amax(-1)
        hard = getattr(operator, name)(self.hard, other)
        return _margin(hard, inside - outside, 1e-5 * (1 + scores.detach().abs().amax(-1)))


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return one value with the gradient of another."""
    return soft + (hard - soft).detach()


def _margin(hard: Tensor, margin: Tensor, unit: Any) -> Margin:
    zero = torch.zeros_like(margin)
    return Margin(
        torch.where(hard, zero, (-margin).clamp(min=0) + unit),
        torch.where(hard, margin.clamp(min=0) + unit, zero),
    )


def _comparison(name: str, a: Any, b: Any, is_whole: bool) -> Margin:
    if isinstance(a, Index) and not isinstance(b, (Index, Margin)):
        return a.compared(name, b)
    a, b = map_numbers([a, b])
    a, b = (v if isinstance(v, Tensor) else torch.tensor(float(v)) for v in (a, b))
    hard = getattr(operator, name)(a.detach(), b.detach())
    a, b = (v if v.is_floating_point() else v.float() for v in (a, b))
    if name in ("eq", "ne"):
        gap = (a - b).abs()
        # Of numbers that are equal, no direction leads away from that faster than another.
        equal = Margin(torch.where(hard == (name == "eq"), 0, gap), (gap == 0).to(gap.dtype))
        return equal if name == "eq" else Margin(equal.false, equal.true)
    unit = 1.0 if is_whole else 1e-6 * (1 + b.detach().abs())
    return _margin(hard, a - b if name in ("gt", "ge") else b - a, unit)


def _round(x: Tensor, digits: int = 0) -> Tensor:
    return _straight_through(torch.round(x, decimals=digits), x)


def _of_truth(hard: Tensor) -> Margin:
    true = hard.to(torch.get_default_dtype())
    return Margin(1 - true, true)


_COMPARED = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
             "not_equal": "ne"}  # fmt: skip
_SAME = frozenset({"bool", "item", "float", "detach", "clone", "contiguous", "cpu", "data",
                   "positive", "double"})  # fmt: skip
_PICKING = frozenset({"getitem", "view", "reshape", "squeeze", "unsqueeze", "flatten", "permute",
                      "transpose", "expand", "select", "narrow", "t"})  # fmt: skip
_STEPS = frozenset({"floor", "ceil", "round", "trunc"})
_WHOLE = frozenset({"int", "long", "to", "type", "short", "index"})


class Truth(Protocol):
    """A truth, in terms of recorded values."""

    @property
    def roots(self) -> tuple[int, ...]:
        """The ops whose values it needs."""

    @property
    def truth(self) -> Callable[[Course], Margin]:
        """Returns the distance, given a course that has come to it."""


class Course:
    """The part of a recorded run that leads to some of its questions, to be done again."""

    def __init__(self, tape: Tape, wanted: Iterable[tuple[Truth, bool]]) -> None:
        self._ops = tape.ops
        self._wanted = list(wanted)
        self._strict: set[int] = set()  # ops that take no numbers in place of integers and truths
        needed: set[int] = set()
        waiting = [root for asked, _ in self._wanted for root in asked.roots]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                op = self._ops[index]
                waiting += [*op.operands, *op.reads.values()]
        self._order = [self._ops[index] for index in sorted(needed)]
        self._values: dict[int, Any] = {}
        self.tokens: dict[str, tuple[Tensor, int]] = {}

    @property
    def is_repeatable(self) -> bool:
        """True if it depends on nothing but the arguments, and changes nothing."""
        return not any(op.kind is OpKind.STATE or op.writes for op in self._order)

    @property
    def reads_sizes(self) -> bool:
        """True if sizes are asked for on the way."""
        return any(name_of(op.target) in ("shape", "size") for op in self._order if op.is_work)

    def distance(self, arguments: tuple[Any, ...]) -> Tensor:
        """Return how far arguments are from giving the answers that are wanted; 0 if they do."""
        values = self._values = {}
        self.tokens = {}
        with torch.enable_grad():
            for op in self._order:
                values[op.index] = self._result(op, arguments)
            total = torch.zeros(())
            for asked, answer in self._wanted:
                margin = asked.truth(self)
                total = total + (margin.true if answer else margin.false).sum()
        self._values = {}
        return torch.nan_to_num(total, nan=_FAR, posinf=_FAR)

    def value(self, index: int) -> Any:
        """Return the result of an op."""
        return self._values[index]

    def applied(self, function: Callable[..., Any], operands: list[Any], is_whole: bool) -> Any:
        """Return the result of a Python function, with gradients as far as possible."""
        name = function.__name__.strip("_")
        if not any(isinstance(value, (Tensor, Margin, Index)) for value in operands):
            return function(*operands)
        if name in ("and", "or"):
            return functools.reduce(
                lambda a, b: self._logical(name, a, b), map(self.truth, operands)
            )
        if name in ("not", "bool"):
            truth = self.truth(operands[0])
            return truth if name == "bool" else Margin(truth.false, truth.true)
        if name in ("gt", "ge", "lt", "le", "eq", "ne"):
            return _comparison(name, operands[0], operands[1], is_whole)
        first, *more = map_numbers(operands)
        if name == "int":
            return _straight_through(first.trunc(), first)
        if name == "round":
            return _round(first, *more)
        if name == "float":
            return first.double()
        if function.__module__ == "math":
            return getattr(torch, name)(*map(torch.as_tensor, (first, *more)))
        return function(first, *more)

    def _result(self, op: Op, arguments: tuple[Any, ...]) -> Any:
        if op.is_given:
            value = op.target.read(arguments)
            if isinstance(value, Tensor):
                return value.clone() if op.kind is OpKind.INPUT else value.detach().clone()
            return value
        if op.raised is not None:
            return None
        if op.index not in self._strict:
            try:
                args, kwargs = self._values_for(op.args, False), self._values_for(op.kwargs, False)
                constant = self._constant_result(op, name_of(op.target).strip("_"), args, kwargs)
                if constant is not NotImplemented:
                    return constant
                args, kwargs = map_numbers(args), map_numbers(kwargs)
                if op.kind is OpKind.SCALAR and getattr(op.target, "__module__", "") == "math":
                    return self.applied(op.target, list(args), False)
                return op.target(*args, **kwargs)
            except Exception:
                self._strict.add(op.index)
        return op.target(*self._values_for(op.args, True), **self._values_for(op.kwargs, True))

    def _values_for(self, value: Any, strict: bool) -> Any:
        kind = type(value)
        if kind is Ref:
            return self._hard(value.index) if strict else self._values[value.index]
        if kind in (tuple, list):
            return kind(self._values_for(item, strict) for item in value)
        if kind is dict:
            return {key: self._values_for(item, strict) for key, item in value.items()}
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return slice(*(self._values_for(part, strict) for part in parts))
        if kind is Instance:
            items = [self._values_for(item, strict) for item in value.items]
            return build_instance(value.cls, items, {})
        if kind is Existing:
            return value.part.read(()) if isinstance(value.part, Captured) else None
        return value

    def _hard(self, index: int) -> Any:
        """Return a value in the type that it had in the run."""
        value, meta = self._values[index], self._ops[index].meta
        if isinstance(value, (Margin, Index)):
            value = value.hard
        if not isinstance(value, Tensor):
            return value
        if not isinstance(meta, TensorMeta):
            return type(meta)(value.item()) if type(meta) in (bool, int, float) else value
        return value if meta.dtype.is_floating_point else value.detach().to(meta.dtype)

    def truth(self, value: Any) -> Margin:
        """Return the distance of a value that Python takes for true or false."""
        if isinstance(value, Margin):
            return value
        if isinstance(value, (bool, torch.Tensor)) and torch.as_tensor(value).dtype is torch.bool:
            return _of_truth(torch.as_tensor(value))
        return _comparison("ne", value, 0, False)

    def _is_whole(self, op: Op) -> bool:
        for value in op.args[:2]:
            meta = self._ops[value.index].meta if type(value) is Ref else value
            if isinstance(meta, TensorMeta):
                meta = 0.5 if meta.dtype.is_floating_point else 0
            if type(meta) is not int:
                return False
        return True

    def _constant_result(self, op: Op, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of an op that has no useful gradient."""
        first = args[0] if args else None
        name = _COMPARED.get(name, name)
        if name in ("gt", "ge", "lt", "le", "eq", "ne") and len(args) == 2:
            if all(map(_is_numeric, args)):
                return _comparison(name, *args, self._is_whole(op))
        if not isinstance(first, (Tensor, Margin, Index)):
            return NotImplemented
        to_bool = isinstance(op.meta, TensorMeta) and op.meta.dtype is torch.bool
        if name == "equal" or name == "allclose" or name == "isclose":
            return self._alike(name, first, *args[1:], **kwargs)
        if name == "isin" or not (isinstance(first, (Margin, Index)) or first.is_floating_point()):
            first_is_truth = isinstance(first, Tensor) and first.dtype is torch.bool
            if not (first_is_truth and name in ("all", "any")):
                return NotImplemented
        if name in _SAME or (name == "to" and isinstance(first, Margin) and to_bool):
            if type(op.meta) is float and isinstance(first, Tensor):
                return first.double()  # as Python's own numbers are
            return self.truth(first) if to_bool and name == "bool" else first
        if name in ("all", "any"):
            return self._of_all(name, self.truth(first), *args[1:], **kwargs)
        if name.startswith(("logical_", "bitwise_")) or name in _LOGIC:
            if to_bool or isinstance(op.meta, bool):
                return self._logical(name.rpartition("_")[2], *map(self.truth, args[:2]))
            return NotImplemented
        if name in ("isnan", "isinf", "isfinite"):
            return _of_truth(op.target(map_numbers(first)))
        if isinstance(first, (Margin, Index)):
            if name in _PICKING and not any(_is_soft(value) for value in args[1:]):
                if isinstance(first, Margin):
                    return first.each(lambda part: op.target(part, *args[1:], **kwargs))
                if name == "getitem" and type(args[1]) is int:
                    return Index(first.hard[args[1]], first.scores[args[1]])
                return NotImplemented
            if isinstance(first, Index) and name in ("int", "index", "long"):
                return first
            first = first.number()
        if name == "to" and to_bool:
            return _comparison("ne", first, 0, False)
        if name == "count_nonzero":
            return _comparison("ne", first, 0, False).number().sum(*args[1:], **kwargs)
        whole = op.meta.dtype if isinstance(op.meta, TensorMeta) else type(op.meta)
        if name in _WHOLE and (whole is int or (whole in _INTEGERS)):
            return _straight_through(first.trunc(), first)
        if name in _STEPS:
            if name == "round":
                digits = args[1] if args[1:] else kwargs.get("decimals", 0)
                return _round(first, digits)
            return _straight_through(getattr(torch, name)(first), first)
        if name == "sign":
            return _straight_through(first.sign(), first / (1 + first.abs()))
        if name in ("floordiv", "floor_divide"):
            return _straight_through(first // map_numbers(args[1]), first / map_numbers(args[1]))
        if name == "tolist":
            return _nested_rows(first)
        if name in ("embedding", "one_hot"):
            return self._looked_up(op, name, args)
        return self._greatest(op, name, first, args, kwargs)

    def _alike(self, name: str, a: Any, b: Any, *more: Any, **kwargs: Any) -> Margin:
        a, b = map_numbers(a), map_numbers(b)
        if name == "equal":
            if a.shape != b.shape:
                return Margin(torch.tensor(_FAR), torch.tensor(0.0))
            return self._of_all("all", _comparison("eq", a, b, False))
        given = dict(zip(("rtol", "atol"), more, strict=False)) | kwargs
        limit = given.get("atol", 1e-8) + given.get("rtol", 1e-5) * b.abs()
        near = _comparison("le", (a - b).abs(), limit, False)
        return near if name == "isclose" else self._of_all("all", near)

    def _of_all(self, name: str, of: Margin, dim: Any = None, keepdim: bool = False) -> Margin:
        if of.true.numel() == 0:
            raise ValueError("nothing to reduce")
        far, near = (of.true, of.false) if name == "all" else (of.false, of.true)
        if dim is None:
            far, near = far.sum(), near.min()
        else:
            far, near = far.sum(dim, keepdim), near.amin(dim, keepdim)
        return Margin(far, near) if name == "all" else Margin(near, far)

    def _logical(self, name: str, a: Margin, b: Margin | None = None) -> Margin:
        if b is None or name in ("not", "invert"):
            return Margin(a.false, a.true)
        if name in ("and", "iand", "rand"):
            return Margin(a.true + b.true, torch.minimum(a.false, b.false))
        if name in ("or", "ior", "ror"):
            return Margin(torch.minimum(a.true, b.true), a.false + b.false)
        return Margin(
            torch.minimum(a.true + b.false, a.false + b.true),
            torch.minimum(a.true + b.true, a.false + b.false),
        )

    def _greatest(self, op: Op, name: str, x: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what picks by size: `argmax`, `max` along a dimension, `topk`, `sort`."""
        if name not in ("argmax", "argmin", "max", "min", "topk", "sort", "argsort"):
            return NotImplemented
        gave_pair = isinstance(op.meta, tuple)
        if name in ("max", "min") and not gave_pair:
            return NotImplemented
        out = op.target(x, *map_numbers(args[1:]), **kwargs)
        numbers = out[1] if gave_pair else out
        at = 2 if name == "topk" else 1
        dim = args[at] if len(args) > at else kwargs.get("dim", None if name[:3] == "arg" else -1)
        dim = -1 if dim is None and name == "argsort" else dim
        scores = x.flatten() if dim is None else x.movedim(dim, -1)
        if name in ("argmin", "min") or (
            name in ("sort", "argsort") and not (kwargs.get("descending") or args[2:3] == (True,))
        ) or (name == "topk" and kwargs.get("largest") is False):  # fmt: skip
            scores = -scores
        if numbers.dim() == x.dim() and dim is not None:  # one or several places along `dim`
            scores = scores.unsqueeze(dim if dim >= 0 else dim - 1)
            scores = scores.expand(*numbers.shape, scores.shape[-1])
        index = Index(numbers, scores)
        return (out[0], index) if gave_pair else index

    def _looked_up(self, op: Op, name: str, args: tuple[Any, ...]) -> Any:
        """Return rows of a table, with gradients for each row that might have been taken."""
        places = [i for i, value in enumerate(op.args[:2]) if type(value) is Ref]
        for place in places:
            given = self._ops[op.args[place].index]
            if given.kind is OpKind.INPUT and not given.meta.dtype.is_floating_point:
                ids = self._hard(given.index)
                many = args[1 - place].shape[0] if name == "embedding" else op.meta.shape[-1]
                hot = torch.nn.functional.one_hot(ids, many).float().requires_grad_()
                self.tokens[given.target.label] = hot, many
                return hot @ args[1 - place].to(hot.dtype) if name == "embedding" else hot
        return NotImplemented


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (Tensor, Margin, Index)) or type(value) in (bool, int, float)


def _is_soft(value: Any) -> bool:
    return isinstance(value, (Margin, Index)) or (isinstance(value, Tensor) and value.requires_grad)


def _nested_rows(value: Tensor) -> Any:
    return value if value.dim() == 0 else [_nested_rows(row) for row in value.unbind()]


def map_numbers(value: Any) -> Any:
    """Replace truths and indices, wherever they are, by numbers with gradients."""
    return map_leaves(value, lambda one: one.number() if isinstance(one, (Margin, Index)) else one)


_LOGIC = frozenset({"and", "or", "xor", "not", "invert", "iand", "ior", "ixor", "rand", "ror"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


# Questions that no guard was put for: a tensor's value became a number of Python's own before.
#
# `float(x.sum()) * 2 > 7` leaves a record of `float(x.sum())` alone. The rest is read from the
# source to guide the search; whether a side was taken is known from the operations under it.


class _NotRead(Exception):
    """Raised for an expression in the source that cannot be read."""


class Value(NamedTuple):
    """An op, its place, the key of the running function, and the module call."""

    op: Op
    place: InstructionPlace
    running: object
    scope: ModuleCall


Recorded = dict[str, dict[Span, Value]]


@dataclass(frozen=True, eq=False)
class Formula:
    """The condition of a branch, in terms of recorded values."""

    roots: tuple[int, ...]  # the ops whose values it uses
    # Returns the distance of the condition, given a course with values.
    truth: Callable[[Course], Margin]
    # The place of the condition, with the key of the running function.
    around: tuple[tuple[InstructionPlace, object], ...]
    path: str  # the module whose forward asks
    is_exact: bool  # whether it is the whole condition, and each name in it has one meaning


def latest_ops(recording: Recording) -> Recorded:
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
    reader = _ConditionReader(function, values, recording)
    try:
        read = reader.read(node, node.lineno)
    except (_NotRead, RecursionError):
        return None
    if reader.last is None:
        return None
    last = reader.last
    around = ((InstructionPlace(choice.file, last.place.function, choice.span, -1), last.running),)
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


class _ConditionReader:
    """Turns expressions of the source into functions of a course."""

    def __init__(
        self, function: ast.AST, values: Mapping[Span, Value], recording: Recording
    ) -> None:  # fmt: skip
        self._function, self._values, self._recording = function, values, recording
        self.roots: list[int] = []
        self.last: Value | None = None
        self.is_exact = True

    def read(self, node: ast.AST | None, line: int) -> _Read:
        """Return a function for the value of an expression; names have their meaning at a line."""
        earlier = self._values.get(span_of(node)) if isinstance(node, ast.expr) else None
        if earlier is not None:
            index = earlier.op.index
            self.roots.append(index)
            self.last = earlier
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
        raise _NotRead

    def _is_read(self, operand: ast.expr) -> bool:
        """Return whether an operand of `and` or `or` can be read: the run may have skipped it."""
        trial = _ConditionReader(self._function, self._values, self._recording)
        try:
            trial.read(operand, operand.lineno)
        except _NotRead:
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
        raise _NotRead

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
        raise _NotRead
