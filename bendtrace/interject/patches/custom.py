"""A patch made from a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError, PatchError
from bendtrace.interject.patches.base import Patch
from bendtrace.interject.patches.copies import described, version_of
from bendtrace.interject.patches.regions import Index, check_index, edited, replaced

__all__ = ["CustomPatch"]


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
