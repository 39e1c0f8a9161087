"""What generated code holds: tensors, numbers as tensors, and what is known while it is traced.

`torch.cond` and `torch.while_loop` hand tensors on, and sizes. So a number that comes out of a
tensor stays one, of no dimensions: int64, float64 or bool, which are what Python computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

__all__ = [
    "DTYPES",
    "Constant",
    "Number",
    "Several",
    "Static",
    "Tensors",
    "Value",
    "leaves",
    "rebuilt",
]

DTYPES: dict[type, torch.dtype] = {
    int: torch.int64, float: torch.float64, bool: torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """A tensor.

    Attributes:
        name: its variable.
        memory: what it may share memory with: numbers, the same for tensors that may.
        is_torn: whether it shared memory where it was made, and does so no longer.
    """

    name: str
    memory: frozenset[int]
    is_torn: bool = False


@dataclass(frozen=True)
class Number:
    """A number out of a tensor, as a tensor without dimensions.

    Attributes:
        name: its variable.
        type: what Python would have.
    """

    name: str
    type: type


@dataclass(frozen=True)
class Static:
    """A size, or what is computed from sizes: known while the code is traced.

    Attributes:
        text: an expression.
        type: what Python has.
        varies: whether it depends on values after all, as the size of what is picked does.
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


Value: TypeAlias = "Tensors | Number | Static | Constant | Several"


def leaves(value: Value) -> Iterator[Value]:
    """Yield what a value consists of."""
    if isinstance(value, Several):
        for item in value.items:
            yield from leaves(item)
    else:
        yield value


def rebuilt(value: Value, change: Callable[[Value], Value]) -> Value:
    """Return a value with others in the place of what it consists of, in the order of `leaves`."""
    if isinstance(value, Several):
        return replace(value, items=tuple(rebuilt(item, change) for item in value.items))
    return change(value)
