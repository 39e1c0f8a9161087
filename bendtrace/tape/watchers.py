"""The recorder that follows the calling thread, if there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder


class _CurrentWatcher(threading.local):
    watcher: Recorder | None = None
    around: Recorder | None = None  # of the function that is carried out as one op


_local = _CurrentWatcher()


def current_watcher() -> Recorder | None:
    """Return the recorder of the calling thread, if it is recording."""
    return _local.watcher


def set_watcher(watcher: Recorder | None) -> Recorder | None:
    """Report the calling thread's actions to `watcher` from now on; return the previous watcher."""
    before, _local.watcher = _local.watcher, watcher
    return before


def call_silently(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function without reporting its inner calls: it is an op itself."""
    outer, _local.watcher = _local.watcher, None
    try:
        return function(*args, **kwargs)
    finally:
        _local.watcher = outer


def set_around(watcher: Recorder | None) -> Recorder | None:
    """Tell `watcher` of modules called while nothing is watched; return the previous one."""
    before, _local.around = _local.around, watcher
    return before


def note_call(module: nn.Module) -> None:
    """Report that a module is called unwatched."""
    if _local.around is not None:
        _local.around.called_inside(module)


class StopRun(BaseException):
    """Ends a run early; only observers raise it.

    Not an `Exception`, so that the model's own handlers do not catch it.
    """
