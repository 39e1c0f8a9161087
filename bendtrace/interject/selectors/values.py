"""Selectors that go by what a node gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch

from bendtrace.errors import InputError
from bendtrace.interject.selectors.algebra import Selector
from bendtrace.paths.candidates import Candidate

__all__ = ["with_dtype", "with_shape"]

Size = int | EllipsisType | None


def with_shape(*sizes: Size | tuple[Size, ...] | Callable[[tuple[int, ...]], Any]) -> Selector:
    """Mean nodes by the shape of the first tensor that they give, in their first pass.

    Args:
        *sizes: its sizes, with None for one of any size and `...` for any number of them; or a
            predicate of the shape.

    Raises:
        InputError: these are no sizes, or `...` is there twice.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().T.sum(), torch.ones(2, 3))
        >>> bt.node_selector.find(bt.node_selector.with_shape(None, 3), trace)
        [<node relu: relu>]
        >>> bt.node_selector.find(bt.node_selector.with_shape(..., 2), trace)
        [<node T: T>]
        >>> bt.node_selector.find(bt.node_selector.with_shape(lambda shape: not shape), trace)
        [<node sum: sum>]
    """
    given = sizes
    if len(given) == 1:
        only = given[0]
        if isinstance(only, (tuple, list)):
            given = tuple(only)
        elif callable(only):
            return Shape(only)
    for size in given:
        if size is not None and size is not ... and (type(size) is not int or size < 0):
            raise InputError(
                f"with_shape() takes sizes, None and `...`, or one predicate of the shape; not "
                f"{size!r}"
            )
    if given.count(...) > 1:
        raise InputError("with_shape() takes `...` once: otherwise it would not say what is where")
    return Shape(given)


def with_dtype(*dtypes: torch.dtype | Callable[[torch.dtype], Any]) -> Selector:
    """Mean nodes by the dtype of the first tensor that they give, in their first pass.

    Args:
        *dtypes: one or several dtypes, or a predicate of the dtype.

    Raises:
        InputError: one of them is neither, or there are none.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: (x * 2).half().relu().argmax(), torch.ones(2))
        >>> with_dtype = bt.node_selector.with_dtype
        >>> bt.node_selector.find(with_dtype(torch.float16), trace)
        [<node half: half>, <node relu: relu>]
        >>> bt.node_selector.find(with_dtype(lambda dtype: dtype.is_floating_point), trace)
        [<node mul: mul>, <node half: half>, <node relu: relu>]
    """
    if len(dtypes) == 1 and callable(dtypes[0]):
        return Dtype(dtypes[0])
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"with_dtype() takes dtypes, or one predicate of them; not {dtype!r}")
    if not dtypes:
        raise InputError("with_dtype() takes one dtype or several")
    return Dtype(dtypes)


@dataclass(frozen=True, repr=False)
class Shape(Selector):
    """Nodes that give a tensor of a certain shape. The model as a whole is not among them."""

    sizes: tuple[Any, ...] | Callable[[tuple[int, ...]], Any]
    needs_output = True

    def matches(self, node: Candidate) -> bool:
        """Whether a node is meant, going by the node alone."""
        if node.shape is None or node.path == "":
            return False
        if not isinstance(self.sizes, tuple):
            return bool(self.sizes(tuple(node.shape)))
        return _fits(self.sizes, tuple(node.shape))

    def __repr__(self) -> str:
        return f"with_shape({_shown(self.sizes)})"


@dataclass(frozen=True, repr=False)
class Dtype(Selector):
    """Nodes that give a tensor of a certain dtype. The model as a whole is not among them."""

    dtypes: tuple[Any, ...] | Callable[[torch.dtype], Any]
    needs_output = True

    def matches(self, node: Candidate) -> bool:
        """Whether a node is meant, going by the node alone."""
        if node.dtype is None or node.path == "":
            return False
        if not isinstance(self.dtypes, tuple):
            return bool(self.dtypes(node.dtype))
        return node.dtype in self.dtypes

    def __repr__(self) -> str:
        return f"with_dtype({_shown(self.dtypes)})"


def _fits(sizes: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    if ... in sizes:
        before = sizes.index(...)
        after = len(sizes) - before - 1
        if len(shape) < before + after:
            return False
        sizes = (*sizes[:before], *[None] * (len(shape) - before - after), *sizes[before + 1 :])
    return len(sizes) == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(sizes, shape, strict=True)
    )


def _shown(what: Any) -> str:
    if isinstance(what, tuple):
        return ", ".join("..." if item is ... else repr(item) for item in what)
    return getattr(what, "__name__", repr(what))
