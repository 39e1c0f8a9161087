"""Host I/O: a model's use of the clock, the environment and files.

Each replay reads the clock again, environment variables are guarded by value, and reads and writes
of files cannot be tracked, nor how busy a GPU is. Each replay repeats the output to the screen.
Only requests by the user's code or by packages count: torch and the standard library read such
things for their own purposes, and so does an import.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.tape.watchers import current_watcher

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder

# Whoever puts something of their own here wants that to be asked: it is what `__wrapped__` of
# those that are exchanged is set to.
OFTEN_PATCHED = (time, builtins, io, random, random.Random)

_CLOCKS = tuple(
    name + unit
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
)
# What torch.cuda tells of memory and load, which other programs change as well; and its seeds from
# the system.
MEASURES = frozenset(
    {
        "clock_rate", "device_memory_used", "host_memory_stats", "host_memory_stats_as_nested_dict",
        "list_gpu_processes", "max_memory_allocated", "max_memory_cached", "max_memory_reserved",
        "mem_get_info", "memory_allocated", "memory_cached", "memory_reserved", "memory_snapshot",
        "memory_stats", "memory_stats_as_nested_dict", "memory_summary", "memory_usage",
        "power_draw", "seed", "seed_all", "temperature", "utilization",
    }
)  # fmt: skip
# How far the device is.
_PROGRESS = (
    (torch.cuda.Event, "elapsed_time"), (torch.cuda.Event, "query"), (torch.cuda.Stream, "query"),
)  # fmt: skip
# Packages that only hand on what they are asked.
_HANDING_ON = frozenset(
    {"os", "_collections_abc", "collections", "posixpath", "ntpath", "pathlib", "codecs"}
)
# Modules of Python's own that open files for others, and not for what they show of code.
_ON_BEHALF = sys.stdlib_module_names - {
    "__main__", "importlib", "inspect", "linecache", "logging", "traceback", "warnings",
}  # fmt: skip
# The modules that call code of the model while it is recorded.
_RECORDERS = tuple(
    f"bendtrace.record.{name}" for name in ("recorder", "scopes", "numbers", "texts")
)
_Environment = type(os.environ)
_variable_of = _Environment.__getitem__


def entries_of_outside() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    for name in _CLOCKS:
        yield time, name, _clock(name)
    yield _Environment, "__getitem__", _reads_variable
    for name in ("__setitem__", "__delitem__", "__iter__", "__len__"):
        yield _Environment, name, _reporting_wrapper("os.environ", vars(_Environment)[name])
    for owner in (builtins, io):
        yield owner, "open", _reporting_wrapper("open", open, _ON_BEHALF)
    yield builtins, "print", _prints
    yield torch.Tensor, "__hash__", _hashes
    for name in sorted(MEASURES):
        for owner in (torch.cuda, torch.cuda.memory):
            if name in vars(owner):
                yield owner, name, _reporting_wrapper(f"torch.cuda.{name}", vars(owner)[name])
    for kind, name in _PROGRESS:
        yield kind, name, _reporting_wrapper(f"torch.cuda.{kind.__name__}.{name}", vars(kind)[name])


def environ(name: str) -> str | None:
    """Return an environment variable, or None: replays call this."""
    try:
        return _variable_of(os.environ, name)
    except KeyError:
        return None


def _reads_variable(variables: Any, name: Any) -> Any:
    watcher, frame = _watcher_and_frame(sys._getframe(1))
    if watcher is not None and variables is not os.environ:
        watcher.unseen("os.environb")
    if watcher is None or variables is not os.environ:
        return _variable_of(variables, name)
    value = watcher.opaque_call(environ, (name,), {}, frame)
    if value is None:
        raise KeyError(name)
    return value


def _clock(name: str) -> Callable[[], Any]:
    """Return a clock that each replay reads again: it looks the function up by its name."""
    function: Callable[[], Any] = vars(time)[name]

    def read() -> Any:
        return vars(time)[name]()

    @functools.wraps(function)
    def call() -> Any:
        watcher, frame = _watcher_and_frame(sys._getframe(1))
        if watcher is None:
            return call.__wrapped__()
        if name not in frame.f_code.co_names:  # something in C asks, such as `date.today`
            watcher.unseen(f"time.{name}, called by other code,")
            return call.__wrapped__()
        return watcher.opaque_call(read, (), {}, frame)

    read.__name__ = read.__qualname__ = name
    return call


def _reporting_wrapper(
    what: str, function: Callable[..., Any], on_behalf: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Return a function that calls another and notes why a run that did cannot be repeated.

    It notes nothing for calls by the modules `on_behalf`, of Python's own, that call it for others.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher, _ = _watcher_and_frame(sys._getframe(1), on_behalf)
        if watcher is not None:
            watcher.unseen(what)
        return call.__wrapped__(*args, **kwargs)

    return call


@functools.wraps(print)
def _prints(*args: Any, **kwargs: Any) -> Any:
    watcher, frame = _watcher_and_frame(sys._getframe(1))
    function = _prints.__wrapped__
    if watcher is None or not isinstance(function, BuiltinFunctionType):
        return function(*args, **kwargs)
    return watcher.texts.printed(function, args, kwargs, frame)


def _hashes(tensor: torch.Tensor) -> int:
    """The hash of a tensor is its identity, by which dicts, sets and caches find it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) in sys.stdlib_module_names - {"__main__"}:
        frame = frame.f_back
    watcher = None if frame is None else _watcher_and_frame(frame)[0]
    if watcher is not None:
        watcher.identified(tensor)
    return id(tensor)


def _watcher_and_frame(
    frame: FrameType, on_behalf: frozenset[str] = frozenset()
) -> tuple[Recorder | None, FrameType]:
    """Return who records it if the model asks for something, and in which code it does."""
    watcher = current_watcher()
    if watcher is None:
        return None, frame
    while (
        (package := _package_of(frame)) in _HANDING_ON or package in on_behalf
    ) and frame.f_back is not None:
        frame = frame.f_back
    is_standard = package in sys.stdlib_module_names and package != "__main__"
    if is_standard or package in ("torch", "bendtrace") or _is_import(frame):
        return None, frame
    return watcher, frame


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_import(frame: FrameType | None) -> bool:
    """Return whether code of a run runs because a module is imported."""
    while frame is not None and frame.f_globals.get("__name__") not in _RECORDERS:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
