"""How far a run is from another answer to one of its questions, with gradients.

A part of a recorded run is done again on other inputs, with gradients, and with integers and truths
as numbers. What comes out only guides the search: the model itself decides what is a find.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from bendtrace.tape.captured import Captured
from bendtrace.tape.structure import Existing, Instance, build
from bendtrace.tape.tape import Op, OpKind, Ref, Tape, TensorMeta
from bendtrace.torch_rules.functions import name_of

__all__ = ["Asked", "Course", "Margin"]

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
        return _through(self.hard.to(soft.dtype), soft)

    def each(self, function: Callable[[Tensor], Tensor]) -> Margin:
        """Return the truths that a function, such as an index, picks."""
        return Margin(function(self.true), function(self.false))


class Index:
    """Which of several scores is the greatest, and the scores, along their last dimension."""

    def __init__(self, hard: Tensor, scores: Tensor) -> None:
        self.hard = hard
        self.scores = scores

    def number(self) -> Tensor:
        """Return the numbers, with the gradient of a softmax."""
        places = torch.arange(self.scores.shape[-1], dtype=self.scores.dtype)
        soft = (torch.softmax(self.scores, -1) * places).sum(-1)
        return _through(self.hard.to(soft.dtype), soft)

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


def _through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return one value with the gradient of another."""
    return soft + (hard - soft).detach()


def _margin(hard: Tensor, margin: Tensor, unit: Any) -> Margin:
    zero = torch.zeros_like(margin)
    return Margin(
        torch.where(hard, zero, (-margin).clamp(min=0) + unit),
        torch.where(hard, margin.clamp(min=0) + unit, zero),
    )


def _compared(name: str, a: Any, b: Any, is_whole: bool) -> Margin:
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


def _rounded(x: Tensor, digits: int = 0) -> Tensor:
    return _through(torch.round(x, decimals=digits), x)


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


class Asked(Protocol):
    """A truth, in terms of what was recorded."""

    @property
    def roots(self) -> tuple[int, ...]:
        """The ops whose values it needs."""

    @property
    def truth(self) -> Callable[[Course], Margin]:
        """Returns the distance, given a course that has come to it."""


class Course:
    """The part of a recorded run that leads to some of its questions, to be done again.

    Args:
        tape: of the run.
        wanted: truths, with the answer that each is to have.
    """

    def __init__(self, tape: Tape, wanted: Iterable[tuple[Asked, bool]]) -> None:
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
        """Whether it depends on nothing but the arguments, and changes nothing."""
        return not any(op.kind is OpKind.STATE or op.writes for op in self._order)

    @property
    def reads_sizes(self) -> bool:
        """Whether sizes are asked for on the way."""
        return any(name_of(op.target) in ("shape", "size") for op in self._order if op.is_work)

    def distance(self, arguments: tuple[Any, ...]) -> Tensor:
        """Return how far some arguments are from the answers that are wanted; 0 if they give them.

        Args:
            arguments: those of the model, bound, with floating point tensors for whatever is to
                have gradients.

        Raises:
            Exception: whatever an op raises.
        """
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
        """Return what an op gave."""
        return self._values[index]

    def applied(self, function: Callable[..., Any], operands: list[Any], is_whole: bool) -> Any:
        """Return what a function of Python's gives, with gradients as far as possible.

        Args:
            function: an operator, a builtin function of numbers, or one of `math`.
            operands: what it is given.
            is_whole: whether its operands are integers.
        """
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
            return self._compare(name, operands[0], operands[1], is_whole)
        first, *more = map_numbers(operands)
        if name == "int":
            return _through(first.trunc(), first)
        if name == "round":
            return _rounded(first, *more)
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
                args, kwargs = self._given(op.args, False), self._given(op.kwargs, False)
                known = self._known(op, name_of(op.target).strip("_"), args, kwargs)
                if known is not NotImplemented:
                    return known
                args, kwargs = map_numbers(args), map_numbers(kwargs)
                if op.kind is OpKind.SCALAR and getattr(op.target, "__module__", "") == "math":
                    return self.applied(op.target, list(args), False)
                return op.target(*args, **kwargs)
            except Exception:
                self._strict.add(op.index)
        return op.target(*self._given(op.args, True), **self._given(op.kwargs, True))

    def _given(self, value: Any, strict: bool) -> Any:
        kind = type(value)
        if kind is Ref:
            return self._hard(value.index) if strict else self._values[value.index]
        if kind in (tuple, list):
            return kind(self._given(item, strict) for item in value)
        if kind is dict:
            return {key: self._given(item, strict) for key, item in value.items()}
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return slice(*(self._given(part, strict) for part in parts))
        if kind is Instance:
            items = [self._given(item, strict) for item in value.items]
            return build(value.cls, items, {})
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
        """Return the distance of what Python takes for true or false."""
        if isinstance(value, Margin):
            return value
        if isinstance(value, (bool, torch.Tensor)) and torch.as_tensor(value).dtype is torch.bool:
            return _of_truth(torch.as_tensor(value))
        return self._compare("ne", value, 0, False)

    def _compare(self, name: str, a: Any, b: Any, is_whole: bool) -> Margin:
        if isinstance(a, Index) and not isinstance(b, (Index, Margin)):
            return a.compared(name, b)
        a, b = map_numbers(a), map_numbers(b)
        return _compared(name, a, b, is_whole)

    def _is_whole(self, op: Op) -> bool:
        for value in op.args[:2]:
            meta = self._ops[value.index].meta if type(value) is Ref else value
            if isinstance(meta, TensorMeta):
                meta = 0.5 if meta.dtype.is_floating_point else 0
            if type(meta) is not int:
                return False
        return True

    def _known(self, op: Op, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what an op gives that has no useful gradient of its own."""
        first = args[0] if args else None
        name = _COMPARED.get(name, name)
        if name in ("gt", "ge", "lt", "le", "eq", "ne") and len(args) == 2:
            if all(map(_is_number, args)):
                return self._compare(name, *args, self._is_whole(op))
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
            return self._compare("ne", first, 0, False)
        if name == "count_nonzero":
            return self._compare("ne", first, 0, False).number().sum(*args[1:], **kwargs)
        whole = op.meta.dtype if isinstance(op.meta, TensorMeta) else type(op.meta)
        if name in _WHOLE and (whole is int or (whole in _INTEGERS)):
            return _through(first.trunc(), first)
        if name in _STEPS:
            if name == "round":
                digits = args[1] if args[1:] else kwargs.get("decimals", 0)
                return _rounded(first, digits)
            return _through(getattr(torch, name)(first), first)
        if name == "sign":
            return _through(first.sign(), first / (1 + first.abs()))
        if name in ("floordiv", "floor_divide"):
            return _through(first // map_numbers(args[1]), first / map_numbers(args[1]))
        if name == "tolist":
            return _listed(first)
        if name in ("embedding", "one_hot"):
            return self._looked_up(op, name, args)
        return self._greatest(op, name, first, args, kwargs)

    def _alike(self, name: str, a: Any, b: Any, *more: Any, **kwargs: Any) -> Margin:
        a, b = map_numbers(a), map_numbers(b)
        if name == "equal":
            if a.shape != b.shape:
                return Margin(torch.tensor(_FAR), torch.tensor(0.0))
            return self._of_all("all", _compared("eq", a, b, False))
        given = dict(zip(("rtol", "atol"), more, strict=False)) | kwargs
        limit = given.get("atol", 1e-8) + given.get("rtol", 1e-5) * b.abs()
        near = _compared("le", (a - b).abs(), limit, False)
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, Margin, Index)) or type(value) in (bool, int, float)


def _is_soft(value: Any) -> bool:
    return isinstance(value, (Margin, Index)) or (isinstance(value, Tensor) and value.requires_grad)


def _listed(value: Tensor) -> Any:
    return value if value.dim() == 0 else [_listed(row) for row in value.unbind()]


def map_numbers(value: Any) -> Any:
    """Replace truths and indices, wherever they are, by numbers with gradients."""
    if isinstance(value, (Margin, Index)):
        return value.number()
    if type(value) in (tuple, list):
        return type(value)(map(map_numbers, value))
    if type(value) is dict:
        return {key: map_numbers(item) for key, item in value.items()}
    return value


_LOGIC = frozenset({"and", "or", "xor", "not", "invert", "iand", "ior", "ixor", "rand", "ror"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
