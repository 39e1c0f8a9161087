"""Patches that zero, add to or replace values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bendtrace.interject.effects import Effect, as_number, effect_of_value
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.patches.base import Patch
from bendtrace.interject.patches.regions import (
    Index,
    Number,
    added,
    check_index,
    check_value,
    edited,
    is_constant_index,
    replaced,
)
from bendtrace.tape.tape import TensorMeta

__all__ = ["AddPatch", "ReplacePatch", "ZeroPatch"]

Patchable = Tensor | Number


@dataclass(kw_only=True, eq=False, repr=False)
class ZeroPatch(Patch[Patchable]):
    """Sets a value, or a part of it, to zero.

    Earlier nodes get zero gradients through this node.

    Args:
        slice: the part: the index that one would write in brackets after the tensor, with `slice(2,
            4)` for `2:4`; the whole value if None.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.patches.ZeroPatch(slice=(slice(None), 0)).op(torch.ones(2, 3))
        tensor([[0., 1., 1.],
                [0., 1., 1.]])
    """

    slice: Index = None

    requires_clone = False
    self_contained = True

    def __post_init__(self) -> None:
        check_index(self.slice)

    def op(self, original_output: Patchable) -> Patchable:
        """Return a copy with zeros."""
        made: Patchable = replaced(original_output, self.slice, 0)
        return made

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _effect(replaced, self.slice, 0, like)


@dataclass(kw_only=True, eq=False, repr=False)
class AddPatch(Patch[Patchable]):
    """Adds to a value, or to a part of it.

    Args:
        value: the summand: a number, or a tensor that broadcasts to the shape of the part, moved to
            its device and rounded to its dtype. It receives its gradient, if it requires one.
        slice: the part, as for `ZeroPatch`.

    Example:
        >>> import torch, bendtrace as bt
        >>> patch = bt.patches.AddPatch(value=torch.tensor([1., 2.]), slice=(0, slice(1, None)))
        >>> patch.op(torch.ones(2, 3))
        tensor([[1., 2., 3.],
                [1., 1., 1.]])
    """

    value: Patchable = field(kw_only=False)
    slice: Index = None

    requires_clone = False
    self_contained = True

    def __post_init__(self) -> None:
        check_value(self.value)
        check_index(self.slice)

    def op(self, original_output: Patchable) -> Patchable:
        """Return the sum."""
        made: Patchable = added(original_output, self.slice, self.value)
        return made

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _effect(added, self.slice, self.value, like)


@dataclass(kw_only=True, eq=False, repr=False)
class ReplacePatch(Patch[Patchable]):
    """Replaces a value, or a part of it.

    Earlier nodes get zero gradients through the replaced part.

    Args:
        value: a number, or a tensor that broadcasts to the shape of the part, moved to its device
            and rounded to its dtype. It receives its gradient, if it requires one. It is copied, so
            that the model cannot change it.
        slice: the part, as for `ZeroPatch`.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.patches.ReplacePatch(value=3, slice=0).op(torch.ones(2, 3))
        tensor([[3., 3., 3.],
                [1., 1., 1.]])
    """

    value: Patchable = field(kw_only=False)
    slice: Index = None

    requires_clone = False
    self_contained = True

    def __post_init__(self) -> None:
        check_value(self.value)
        check_index(self.slice)

    def op(self, original_output: Patchable) -> Patchable:
        """Return a copy with the value."""
        made: Patchable = replaced(original_output, self.slice, self.value)
        return made

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _effect(replaced, self.slice, self.value, like)


def _effect(
    edit: Callable[[Any, Any, Any], Any], index: Index, value: Any, like: TensorMeta
) -> Effect | str:
    if not is_constant_index(index):
        return "its slice has tensors in it"
    if type(value) is float:
        return effect_of_value(
            lambda tensor, value: _with_number(edit, tensor, index, value),
            value, like, edit, repr(index),
        )  # fmt: skip
    return effect_of_value(
        lambda tensor, value: edit(tensor, index, value), value, like, edit, repr(index)
    )


def _with_number(edit: Any, tensor: Tensor, index: Index, value: Any) -> Any:
    if edit is not added:
        return edit(tensor, index, value)
    if index is None:
        return added(tensor, None, as_number(value, tensor))
    return edited(tensor, index, lambda part: added(part, None, as_number(value, part)))
