"""The patches that zero, add to, replace, record or compute values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError, PatchError
from bendtrace.interject.effects import Effect, as_number, depends_on, effect_of_value
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.patches.base import Patch, copied_in, described
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
from bendtrace.interject.tensors import version_of
from bendtrace.tape.tape import TensorMeta

__all__ = [
    "AddPatch",
    "CustomPatch",
    "ProbePatch",
    "RecordPatch",
    "ReplacePatch",
    "ZeroPatch",
]

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

    @depends_on("slice")
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

    @depends_on("value", "slice")
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

    @depends_on("value", "slice")
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


@dataclass(kw_only=True, eq=False, repr=False)
class CustomPatch(Patch[Any]):
    """Replaces a value by the result of a function.

    The function is called in each run, with that run's value. It receives a copy, which it may
    change in place; if it returns None, the value stays.

    Args:
        custom_op: the function: `custom_op(value)` returns the new value.
        slice: the part of the value to replace, as for `ZeroPatch`.
        requires_clone: whether to pass a copy, and to copy the result; False saves that for
            functions that only read or compute new tensors.

    Example:
        >>> import torch, bendtrace as bt
        >>> patch = bt.patches.CustomPatch(custom_op=lambda x: x.flip(0), slice=slice(1, None))
        >>> patch.op(torch.arange(4))
        tensor([0, 3, 2, 1])
    """

    custom_op: Callable[[Any], Any] = field(kw_only=False)
    slice: Index = None
    requires_clone: bool = True

    def __post_init__(self) -> None:
        if not callable(self.custom_op):
            raise InputError(
                f"custom_op has to be a function of the value, not {described(self.custom_op)}"
            )
        check_index(self.slice)

    def op(self, original_output: Any) -> Any:
        """Return the result of the function."""
        if self.slice is None:
            return self.custom_op(original_output)
        return edited(original_output, self.slice, self._part)

    def _part(self, part: Tensor) -> Tensor:
        """Return the result of the function for a part, which it may have changed in place."""
        given = part.clone()
        version = version_of(given)
        made = self.custom_op(given)
        if made is None:
            if version_of(given) != version:
                raise PatchError("op changed its part of the value in place and returned nothing")
            return part
        if not isinstance(made, (Tensor, bool, int, float, complex)):
            raise PatchError(
                f"op returned {described(made)} ({type(made).__name__}) for a part of a tensor",
                expected=described(part), got=described(made),
            )  # fmt: skip
        result: Tensor = replaced(part, None, made)
        return result


@dataclass(kw_only=True, eq=False, repr=False)
class ProbePatch(Patch[Any]):
    """Keeps the latest value of a node.

    Args:
        detach: whether to detach it from the autograd graph. If not, a loss on the activation
            supports backward, and the run's memory is kept as long as the activation.

    Attributes:
        activation: a copy of the latest value; None before the first.

    Example:
        >>> import torch, bendtrace as bt
        >>> probe = bt.patches.ProbePatch()
        >>> _ = probe.op(torch.ones(2))
        >>> probe.activation
        tensor([1., 1.])
    """

    activation: Any = field(default=None, init=False)
    detach: bool = True

    requires_clone = False
    observes = True
    self_contained = True

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Whether it can look after the run: unless gradients can be asked for of what it keeps."""
        return self.detach

    def op(self, original_output: Any) -> Any:
        """Keep a copy of the value."""
        self.activation = _snapshot(original_output, self.detach)
        return original_output


@dataclass(kw_only=True, eq=False, repr=False)
class RecordPatch(Patch[Any]):
    """Keeps all values of a node, over its passes and over calls of the model.

    Args:
        activations: an existing list to append to.
        detach: whether to detach them from the autograd graph.

    Attributes:
        activations: copies of the values, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> record = bt.patches.RecordPatch()
        >>> for value in (1.0, 2.0):
        ...     _ = record.op(torch.tensor(value))
        >>> record
        RecordPatch(activations=[tensor(1.), tensor(2.)])
    """

    activations: list[Any] = field(default_factory=list)
    detach: bool = True

    requires_clone = False
    observes = True
    self_contained = True

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Whether it can look after the run: unless gradients can be asked for of what it keeps."""
        return self.detach

    def op(self, original_output: Any) -> Any:
        """Keep a copy of the value."""
        self.activations.append(_snapshot(original_output, self.detach))
        return original_output


def _snapshot(value: Any, detach: bool) -> Any:
    return copied_in(value, _detached_copy if detach else Tensor.clone)


def _detached_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
