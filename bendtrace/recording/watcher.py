"""Who is told what the calling thread comes by: its recorder, while it is recording."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Watcher", "current_watcher", "set_watcher", "unwatched"]


class Watcher(Protocol):
    """What the boundaries report to."""

    def module_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call as a scope."""

    def opaque_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` as one op."""

    def hooks(self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        """Run what hooks do with tensors as one op that is not the model's own."""

    def unseen(self, what: str) -> None:
        """Note that the run comes by something that a replay could not repeat."""

    def recomputed(self, entering: bool) -> None:
        """Note that a block begins or ends that the backward pass runs again."""

    def forgot_casts(self) -> None:
        """Note that autocast forgets the weights that it has cast."""

    def forget(self, *tensors: torch.Tensor) -> None:
        """Keep nothing that refers to these tensors."""


class _Local(threading.local):
    watcher: Watcher | None = None


_local = _Local()


def current_watcher() -> Watcher | None:
    """Return the recorder of the calling thread, if it is recording."""
    return _local.watcher


def set_watcher(watcher: Watcher | None) -> Watcher | None:
    """Report what the calling thread does to `watcher` from now on; return the one before."""
    before, _local.watcher = _local.watcher, watcher
    return before


def unwatched(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function without reporting what it calls in turn: it is an op itself."""
    outer, _local.watcher = _local.watcher, None
    try:
        return function(*args, **kwargs)
    finally:
        _local.watcher = outer
