"""The values in generated code: tensors, numbers as tensors, and values known during tracing.

`torch.cond` and `torch.while_loop` pass on tensors and sizes only. So a number that comes out of a
tensor stays a tensor without dimensions, of dtype int64, float64 or bool, as Python computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

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
        kind: its type.
    """

    items: tuple[Value, ...]
    keys: tuple[Any, ...] = ()
    kind: type = tuple


Value: TypeAlias = "Tensors | Number | Static | Constant | Outdated | Several"


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
