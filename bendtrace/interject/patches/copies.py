"""Copies of values, and short descriptions of values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["copied_in", "described", "version_of"]


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


def version_of(value: Any) -> int | None:
    """Return a number that changes with each write to a tensor; None if it has no such number."""
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


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
