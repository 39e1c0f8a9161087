"""The values in generated code: tensors, numbers as tensors, and values known during tracing.

`torch.cond` and `torch.while_loop` pass on tensors and sizes only. So a number that comes out of a
tensor stays a tensor without dimensions, of dtype int64, float64 or bool, as Python computes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributions import Distribution

from bendtrace.tape.tape import Op, OpKind, Tape, TensorMeta, refs_in
from bendtrace.torch_rules.functions import METADATA, SHAPES, VALUES, name_of

DTYPES: dict[type, torch.dtype] = {
    int: torch.int64, float: torch.float64, bool: torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """A tensor.

    Attributes:
        name: its variable.
        memory: numbers; tensors that may share memory have a number in common.
        is_torn: whether it shared memory when it was made, and no longer does.
    """

    name: str
    memory: frozenset[int]
    is_torn: bool = False


@dataclass(frozen=True)
class Number:
    """A number out of a tensor, as a tensor without dimensions.

    Attributes:
        name: its variable.
        type: the type that Python would have.
    """

    name: str
    type: type


@dataclass(frozen=True)
class Static:
    """A size, or a number computed from sizes: known while the code is traced.

    Attributes:
        text: an expression.
        type: its type in Python.
        varies: whether it depends on values after all, such as the number of selected elements.
    """

    text: str
    type: type
    varies: bool = False


@dataclass(frozen=True)
class Constant:
    """A value that is the same in all runs.

    Attributes:
        value: the value.
    """

    value: Any


@dataclass(frozen=True)
class Outdated:
    """A copy of a part of a tensor that was written to since, where the model has a view."""


@dataclass(frozen=True)
class Several:
    """A tuple, a list or a dict of values.

    Attributes:
        items: the values.
        keys: for a dict, its keys.
        kind: its type, or the class of the distribution that a dict of its parameters stands for.
    """

    items: tuple[Value, ...]
    keys: tuple[Any, ...] = ()
    kind: type = tuple


Value: TypeAlias = "Tensors | Number | Static | Constant | Outdated | Several"


def parameters_in(kind: type, attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Return those attributes of a distribution that it can be made from; none of other classes."""
    names: Any = kind.arg_constraints if issubclass(kind, Distribution) else None
    if not isinstance(names, dict):  # some classes have a property
        return {}
    if inspect.signature(kind).parameters.keys() - names - {"validate_args"}:
        return {}
    return {name: attributes[name] for name in names if name in attributes}


def leaves(value: Value) -> Iterator[Value]:
    """Yield the leaves of a value."""
    if isinstance(value, Several):
        for item in value.items:
            yield from leaves(item)
    else:
        yield value


def rebuilt(value: Value, change: Callable[[Value], Value]) -> Value:
    """Return a value with other leaves, in the order of `leaves`."""
    if isinstance(value, Several):
        return replace(value, items=tuple(rebuilt(item, change) for item in value.items))
    return change(value)


# The origins of the numbers of a run: sizes of inputs, and sizes and numbers from values.


class Kind(Enum):
    """The origin of a number."""

    STATIC = 0  # from sizes and arguments
    SIZE = 1  # from a size that depends on values
    VALUE = 2  # out of a tensor


class Numbers:
    """Sorts the numbers of a tape.

    Args:
        tape: the tape.

    Attributes:
        kinds: the ops that return a number, or several, with their origins.
        varying: the ops that return tensors whose sizes depend on values.
    """

    def __init__(self, tape: Tape) -> None:
        self.kinds: dict[int, Kind] = {}
        self.varying: set[int] = set()
        self._ops = tape.ops
        for op in tape.ops:
            self._sort(op)

    def has_varying_length(self, index: int) -> bool:
        """Return whether the number of results of an op depends on values."""
        op = self._ops[index]
        if index in self.kinds:  # `tolist`, shapes
            return any(operand in self.varying for operand in op.operands) and (
                op.target is Tensor.tolist or op.target is Tensor.__len__
            )
        return name_of(op.target) in _TAKING_APART and index in self.varying

    def _sort(self, op: Op) -> None:
        refs = op.operands
        varies = any(index in self.varying for index in refs)
        if op.kind is OpKind.INPUT and not isinstance(op.meta, TensorMeta):
            self.kinds[op.index] = Kind.STATIC
        elif op.kind is OpKind.CALL and (op.target in SHAPES or op.target is Tensor.__len__):
            self.kinds[op.index] = Kind.SIZE if varies else Kind.STATIC
        elif op.kind is OpKind.CALL and op.target in METADATA:
            self.kinds[op.index] = Kind.STATIC
        elif op.kind is OpKind.CALL and (op.target in VALUES or op.target is Tensor.tolist):
            self.kinds[op.index] = Kind.VALUE
        elif op.kind is OpKind.CALL and type(op.meta) in (bool, int, float):
            self.kinds[op.index] = Kind.VALUE  # `item`, `equal`, ...
        elif op.kind is OpKind.SCALAR and not gives_tensors(op):
            kinds = [self.kinds[index] for index in refs if index in self.kinds]
            if len(kinds) == len(refs):
                self.kinds[op.index] = max(kinds, key=lambda kind: kind.value, default=Kind.STATIC)
        elif op.is_work and (varies or _is_sized_by_values(op, self._ops, self.kinds)):
            self.varying.add(op.index)


def gives_tensors(op: Op) -> bool:
    """Return whether an op returns a tensor, or several."""
    if op.kind is OpKind.SCALAR and op.target is not operator.getitem:
        return False
    return isinstance(op.meta, TensorMeta) or (
        isinstance(op.meta, tuple) and any(isinstance(item, TensorMeta) for item in op.meta)
    )


def gives_rows(op: Op) -> bool:
    """Return whether an op gives the rows of a tensor one by one, as a `for` over it does."""
    dims = (*op.args[1:], *op.kwargs.values())
    return name_of(op.target) == "unbind" and dims in ((), (0,))


def _is_sized_by_values(op: Op, ops: list[Op], kinds: dict[int, Kind]) -> bool:
    """Return whether the size of the result depends on the values of tensors."""
    name = name_of(op.target)
    if name == "where":
        return len(op.args) + len(op.kwargs) == 1
    if name == "__getitem__":
        keys = [ops[ref.index].meta for ref in refs_in(op.args[1:])]
        if any(getattr(key, "dtype", None) is not None and _is_mask(key) for key in keys):
            return True
        bounds = [ref for key in _slices(op.args[1]) for ref in refs_in(key)]
        return any(kinds.get(ref.index, Kind.STATIC) is not Kind.STATIC for ref in bounds)
    if name in _SIZED_BY_VALUES:
        return True
    numbers = [kinds[index] for index in op.operands if index in kinds]
    return name in _SIZED_BY_NUMBERS and any(kind is not Kind.STATIC for kind in numbers)


def _is_mask(meta: TensorMeta) -> bool:
    return str(meta.dtype) in ("torch.bool", "torch.uint8")


def _slices(key: object) -> list[slice]:
    keys = key if isinstance(key, tuple) else (key,)
    return [one for one in keys if isinstance(one, slice)]


_SIZED_BY_VALUES = frozenset(
    {
        "argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "tensor_split",
        "unique", "unique_consecutive", "vander",
    }
)  # fmt: skip
_TAKING_APART = frozenset({"unbind", "split", "chunk", "tensor_split", "split_with_sizes"})
_SIZED_BY_NUMBERS = frozenset(
    {
        "arange", "zeros", "ones", "full", "empty", "rand", "randn", "eye", "linspace", "narrow",
        "expand", "repeat", "view", "reshape", "new_zeros", "new_ones", "new_full", "new_empty",
        "pad", "tile", "unfold",
    }
)  # fmt: skip
