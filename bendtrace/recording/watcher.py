"""Who is told what the calling thread comes by: its recorder, while it is recording."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

__all__ = [
    "Watcher",
    "current_watcher",
    "note_call",
    "set_around",
    "set_watcher",
    "unwatched",
]


class Watcher(Protocol):
    """What the boundaries report to."""

    def module_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call as a scope."""

    def opaque_call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None = None
    ) -> Any:
        """Run `function(*args, **kwargs)` as one op, called in `frame` if that is given."""

    def printed(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType
    ) -> Any:
        """Print values to the screen, which a replay does anew."""

    def told(self, text: str) -> str:
        """Return a text that somebody looks at after all, and guard the values in it."""

    def read(self, function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Ask something of a tensor that is not its values, and guard the answer."""

    def unseen(self, what: str) -> None:
        """Note that the run comes by something that a replay could not repeat."""

    def recomputed(self, entering: bool) -> None:
        """Note that a block begins or ends that the backward pass runs again."""

    def forgot_casts(self) -> None:
        """Note that autocast forgets the weights that it has cast."""

    def wants_inside(self) -> bool:
        """Whether the module that runs must not be carried out by one fused op."""

    def called_inside(self, module: nn.Module) -> None:
        """Note that a module is called by a function that is recorded as one op."""

    def forget(self, *tensors: torch.Tensor) -> None:
        """Keep nothing that refers to these tensors."""


class _Local(threading.local):
    watcher: Watcher | None = None
    around: Watcher | None = None  # of the function that is carried out as one op


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


def set_around(watcher: Watcher | None) -> Watcher | None:
    """Tell `watcher` of modules that are called while nobody watches; return the one before."""
    before, _local.around = _local.around, watcher
    return before


def note_call(module: nn.Module) -> None:
    """Tell who wants to know that a module is called unwatched."""
    if _local.around is not None:
        _local.around.called_inside(module)
