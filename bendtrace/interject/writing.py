"""Nodes that work in place, and their targets: insertions there have to update that tensor."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.paths.candidates import Candidate
from bendtrace.torch_rules.functions import is_named_in_place
from bendtrace.torch_rules.owners import is_leaf_module
from bendtrace.torch_rules.writes import storage_of

__all__ = ["may_write", "overlaps", "written_by"]


def overlaps(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether another argument shares memory with a tensor, which torch may refuse."""
    with torch._C.DisableTorchFunction():
        place = storage_of(tensor)
        return any(
            isinstance(arg, Tensor) and arg is not tensor and storage_of(arg) == place
            for arg in args
        )


def may_write(
    module: nn.Module | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether a call may write to its arguments: torch's own modules say so by a flag."""
    if module is None:
        return _works_in_place(function, args, kwargs) or "out" in kwargs
    return not is_leaf_module(module) or bool(getattr(module, "inplace", False))


def written_by(node: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a node works on in place; None if it does not."""
    if node.module is not None:
        of_torch = type(node.module).__module__.startswith("torch.nn.")
        if not of_torch or not getattr(node.module, "inplace", False):
            return None
    elif not _works_in_place(node.function, args, kwargs):
        return None
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, Tensor):
        return None
    with torch._C.DisableTorchFunction():
        base = given if given._base is None else given._base
        is_leaf = torch.is_grad_enabled() and base.is_leaf and base.requires_grad
        if is_leaf and getattr(node.function, "__name__", "") not in _TAKES_LEAVES:
            return None  # which torch refuses, and so it shall
    return given


# Whether a leaf is one is another thing after these: a run that goes on from there sees it so.
_TAKES_LEAVES = frozenset({"detach_", "requires_grad_"})


def _works_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function, judging by its name and flags, returns its argument, changed."""
    if is_named_in_place(getattr(function, "__name__", "")):
        return True
    position = _flag_position(function)
    if position is None:
        return False
    flag = args[position] if position < len(args) else kwargs.get("inplace", False)
    return flag is True


@functools.cache
def _flag_position(function: Any) -> int | None:
    """Return the position of the flag `inplace` among the arguments of a torch function."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None
