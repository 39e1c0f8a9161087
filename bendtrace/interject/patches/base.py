"""The base of all patches, which copies what it hands them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from bendtrace.errors import PatchError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.structure import version_of

__all__ = ["Patch", "copied_in", "described"]

Target = TypeVar("Target")


class Patch(Interjection, Generic[Target]):
    """Changes the value at a node. Subclasses override `op`.

    Dataclasses make good patches, and need not know where they are used: one patch works at several
    nodes, and at several parts of one.

    Attributes:
        requires_clone: whether `op` receives a copy, which it may change in place, and whether a
            tensor that `op` returns from elsewhere is copied, since the model may change it in
            place. Patches that only read, or only compute new tensors, can set it to False.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Doubled(bt.patches.Patch):
        ...     def op(self, original_output):
        ...         return original_output * 2
        >>> Doubled().op(torch.ones(2))
        tensor([2., 2.])
    """

    requires_clone: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that overrides `op` does not inherit the promise of its parent.
        if "op" in vars(cls):
            for promise in ("requires_clone", "observes", "self_contained", "deferrable", "effect"):
                if promise not in vars(cls):
                    setattr(cls, promise, getattr(Patch, promise))

    def op(self, original_output: Target) -> Target | None:
        """Return the new value, of the same type; None keeps the present one."""
        return original_output

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Replace the value of a node by the result of `op`."""
        value = copied_in(output, Tensor.clone) if self.requires_clone else output
        version = version_of(value)
        try:
            made: Any = self.op(value)
            if version_of(value) != version and (made is None or value is output):
                self._refuse_write(value is output)
        except PatchError as error:
            if error.path:
                raise
            raise PatchError(
                f"{self.label} at {_named(at)}: {error}",
                path=at.path, expected=error.expected, got=error.got,
            ) from error.__cause__  # fmt: skip
        if self.requires_clone and made is not value:
            made = copied_in(made, Tensor.clone)
        return made

    def _refuse_write(self, is_original: bool) -> None:
        if is_original:
            raise PatchError(
                "op changed the model's own value in place: keep requires_clone=True, and op "
                "receives a copy"
            )
        raise PatchError(
            "op changed its copy of the value in place and returned nothing: return the copy"
        )

    def __repr__(self) -> str:
        shown: list[str] = []
        fields: dict[str, dataclasses.Field[Any]] = getattr(self, "__dataclass_fields__", {})
        for field in fields.values():
            value = getattr(self, field.name, None)
            if field.repr and value is not field.default:
                shown.append(f"{field.name}={described(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _named(at: NodePass) -> str:
    """Return the path of a node as users write it, with the pass from the second one on."""
    if not at.number:
        return repr(at.path)
    node, bar, part = at.path.partition("|")
    return repr(f"{node}:{at.number + 1}{bar}{part}")


def copied_in(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with all tensors in it copied, and the containers that hold them.

    Objects of other kinds, such as the caches of language models, are not copied.

    Args:
        value: a tensor, or tuples, lists and dicts of tensors.
        copied: copies a tensor.
    """
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, dict):
        # Some dicts have attributes besides, or keep their items there: Hugging Face's outputs.
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = copied_in(item, copied)
        return made
    if type(value) in (tuple, list):
        return type(value)(copied_in(item, copied) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(copied_in(item, copied) for item in value)
    return value


def described(value: Any) -> str:
    """Return a short description of a value.

    Example:
        >>> import torch
        >>> [described(value) for value in (torch.ones(2, 3), 3, [torch.ones(1)], torch.tensor(1))]
        ['Tensor(2, 3)', '3', '[Tensor(1)]', 'tensor(1)']
    """
    if isinstance(value, Tensor):
        if value.dim() == 0 and not value.requires_grad and not value.is_meta:
            return repr(value)
        return f"{type(value).__name__}({', '.join(map(str, value.shape))})"
    if type(value) in (list, tuple):
        inside = ", ".join(map(described, value[:4])) + (", ..." if len(value) > 4 else "")
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return getattr(value, "__qualname__", None) or repr(value)
