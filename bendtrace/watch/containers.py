"""Dicts, sets and caches in a model's state whose operations are ops: their content is not guarded.

A dict that forward fills and looks numbers up in, such as a cache by length, has another key after
each new number, and its keys are guarded. Where that happens again and again (`TraceTree`), a
`Watching` object takes the place of the container while a run goes on. Each of its operations
(`n in cache`, `cache[n] = table`, `seen.add(n)`) is recorded as one op, which each replay carries
out on the container itself. Code may do nothing else with it (`hands_over`): who receives such an
object may ask for its type. A method that is no such operation makes the run live, and the next
ones guard the content again. Some functions of Python may go through all of it, or through a view
of a dict: they are done with it before any other code runs, and what they go through is one op.

A `functools.lru_cache` of a function that computes tensors is one, too, and its calls are the only
operation. So each call of a replay finds in the cache what it finds in eager, and leaves there what
it leaves in eager. What the function does is a part of the op.

The objects are of no subclass of `dict` or `set`: C would read their empty memory unseen, where
`set(seen)` or `json` do not ask a subclass for its items.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.python import results
from bendtrace.python.sites import PACKAGE, TRACER
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    Captured,
    CaptureKind,
    Keys,
    is_as_copied,
    is_cache,
    is_exchangeable,
    is_ndarray,
    same_keys,
)
from bendtrace.tape.scalars import TRACED, TracedFloat, plain
from bendtrace.tape.structure import entries_of
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch import growing

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder

_KINDS = (CaptureKind.DICT, CaptureKind.SET, CaptureKind.LARGE)
_OF_DICTS = frozenset(
    {
        "__contains__", "__getitem__", "__setitem__", "__delitem__", "__len__", "get", "pop",
        "setdefault", "clear",
    }
)  # fmt: skip
_CACHE = functools._lru_cache_wrapper
# What is recorded, by the type of the container.
_OPERATIONS: dict[type, frozenset[str]] = {
    dict: _OF_DICTS,
    collections.OrderedDict: _OF_DICTS | {"move_to_end", "popitem"},
    collections.defaultdict: _OF_DICTS,
    collections.Counter: _OF_DICTS | {"update", "most_common", "total"},
    set: frozenset({"__contains__", "__len__", "add", "discard", "remove", "clear", "update"}),
    _CACHE: frozenset({"__call__"}),
}
# Functions that go through all of a container before they return, and keep nothing of it.
_TAKING_ALL: frozenset[Any] = frozenset({sorted, sum, max, min, list, tuple})
WHOLE = frozenset(function.__name__ for function in _TAKING_ALL)
_OF_VIEWS = ("__len__",)  # which functions that make a list ask for
_STORING = frozenset({"__setitem__", "setdefault", "add"})
_FACTORIES = (None, int, float, bool)
_FREE = frozenset({"__class__", "__doc__", "__hash__", "__new__", "__init__", "__dir__",
    "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getattribute__",
    "__setattr__", "__delattr__", "__module__", "__dict__", "__weakref__"})  # fmt: skip


def can_be_watched(part: Captured) -> bool:
    """Return whether a part is a container, or an array, whose operations can be ops."""
    if part.kind is CaptureKind.ARRAY:
        array: Any = part.size and part.size[0]
        return is_ndarray(array.value) and array.is_writeable and not part.is_argument
    is_known = part.kind in _KINDS or is_cache(part)
    return is_known and part.type in _OPERATIONS and is_exchangeable(part)


def caches_tensors(cache: Any) -> bool:
    """Return whether the results in a cache are tensors, also several, and plain values."""
    results = [result for _, result in entries_of(cache)]
    return all(map(_is_value, results)) and any(map(_tensors_of_result, results))


def has_content(part: Captured, now: Any) -> bool:
    """Return whether a container has the content, or the keys, that such a part had."""
    if type(now) is not part.type:
        return False
    if part.kind is not CaptureKind.DICT:
        return is_as_copied(part, now)
    keys: Any = now
    return isinstance(part.size, Keys) and same_keys(keys, part.size.items)


def is_watchable(container: Any) -> bool:
    """Return whether a container holds nothing that would run the user's code, or be changed."""
    if getattr(container, "__dict__", None):
        return False
    if getattr(container, "default_factory", None) not in _FACTORIES:
        return False
    is_dict = isinstance(container, dict)
    items = (*container.keys(), *container.values()) if is_dict else (*container,)
    return all(map(_is_value, items))


class Watching:
    """Takes the place of a container of the state while a run is recorded.

    Attributes:
        original: the container.
        is_misused: whether code has used it in a way that is no op.
        view: the method that has given it, if it is a view of a dict.
        holder: what stands for this dict; the object itself where it is no view.
    """

    __slots__ = ("holder", "is_misused", "original", "view")

    def __init__(self, original: Any, view: str = "", holder: Watching | None = None) -> None:
        self.original: Any = original
        self.view: str = view
        self.holder: Watching = self if holder is None else holder
        self.is_misused: bool = False


def watched_container(container: Any, *view: Any) -> Watching:
    """Return what takes the place of a container, or of a view (see `Watching`)."""
    kind: Any = type(container)
    found: Watching = _container_class(kind)(container, *view)
    return found


@functools.cache
def _container_class(kind: Any) -> Any:
    space: dict[str, Any] = {"__slots__": (), "__hash__": None}
    for name in {*dir(kind)} - _FREE:
        if name in _OPERATIONS.get(kind, _OF_VIEWS):
            space[name] = _replay_operation(name)
        elif name in growing.VIEWS:
            space[name] = _view_method(name)
        else:
            space[name] = (
                _unwatched_method(name)
                if callable(getattr(kind, name))
                else _container_attribute(name)
            )
    if kind is _CACHE:
        space.update(__call__=_call_cache, __getattr__=_attribute_of_cache)
    else:
        space.update(__bool__=_truth, __iter__=_members)
    space["__class__"] = property(_class_of_original)
    return type(kind.__name__, (Watching,), space)


def _class_of_original(container: Watching) -> type:
    """Show the model the class of the container; this library takes no such object apart."""
    is_ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
    return type(container) if is_ours else type(container.original)


@functools.cache
def _replay_function(name: str) -> Callable[..., Any]:
    """Return the function that replays call, with the container and what it is given."""

    def operate(container: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(container, name)(*args, **kwargs)

    operate.__name__ = operate.__qualname__ = name.strip("_")
    operate.works_on_containers = True  # type: ignore[attr-defined]
    return operate


def _is_filled(container: Any) -> bool:
    return bool(container)


_is_filled.works_on_containers = True  # type: ignore[attr-defined]


def _truth(container: Watching) -> bool:
    frame = sys._getframe(1)
    watcher = _watcher_of(frame)
    if watcher is None or not watcher.holds(container):
        return bool(_report_unseen(container, "__len__", (), {}, frame))
    return bool(watcher.opaque_call(_is_filled, (container,), {}, frame))


@functools.cache
def _members_by(view: str) -> Callable[[Any], list[Any]]:
    """Return the function that goes through a container, or through a view of it."""

    def members(container: Any) -> list[Any]:
        return [*(getattr(container, view)() if view else container)]

    members.__name__ = members.__qualname__ = view or "members"
    members.works_on_containers = True  # type: ignore[attr-defined]
    return members


def _view_method(name: str) -> Callable[..., Any]:
    def call(self: Watching) -> Any:
        frame = sys._getframe(1)
        watcher, found = _watcher_of(frame), getattr(self.original, name)()
        if watcher is None:
            return found
        if not watcher.holds(self):
            return _report_unseen(self, name, (), {}, frame)
        return watched_container(found, name, self)

    return call


def _members(self: Watching) -> Iterator[Any]:
    """Give all members to one of some functions, which goes through them before it returns."""
    frame = sys._getframe(1)
    watcher = _watcher_of(frame)
    called: Any = None if watcher is None else results.c_function_called_by(frame)
    is_taken = watcher is not None and any(called is one for one in _TAKING_ALL)
    if watcher is None or not is_taken or not watcher.holds(self.holder):
        return iter(_report_unseen(self, "__iter__", (), {}, frame))
    found = watcher.opaque_call(_members_by(self.view), (self.holder,), {}, frame)
    if not _is_value((*found,)) or _tensors_of_result((*found,)):
        _report(self, "__iter__", frame)  # which of them the run has put there differs
    return iter(found)


def _replay_operation(name: str) -> Callable[..., Any]:
    function = _replay_function(name)

    def call(self: Watching, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        watcher = _watcher_of(frame)
        if watcher is None:
            return getattr(self.original, name)(*args, **kwargs)
        # Another run, inside of the one that watches the container, does not know it.
        is_held = watcher.holds(self.holder)
        if not is_held or not _can_be_replayed(name, (*args, *kwargs.values())):
            return _report_unseen(self, name, args, kwargs, frame)
        result = watcher.opaque_call(function, (self.holder, *args), kwargs, frame)
        given = (*result,) if type(result) is list else result
        if type(result) is list and _tensors_of_result(given):
            _report(self, name, frame)
        if not _is_value(given) or (isinstance(result, torch.Tensor) and watcher.holds(result)):
            _report(self, name, frame)
        return result

    return call


def _call_cache(self: Watching, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(1)
    watcher = _watcher_of(frame)
    if watcher is None:
        return self.original(*args, **kwargs)
    if not watcher.holds(self) or not all(map(_is_part_of_key, (*args, *kwargs.values()))):
        return _report_unseen(self, "__call__", args, kwargs, frame)
    result = watcher.opaque_call(self.original, args, kwargs, frame)
    if not _is_value(result) or any(map(watcher.holds, _tensors_of_result(result))):
        _report(self, "__call__", frame)
    return result


def _attribute_of_cache(self: Watching, name: str) -> Any:
    if name not in functools.WRAPPER_ASSIGNMENTS:
        _report(self, name, sys._getframe(1))
    return getattr(self.original, name)


def _unwatched_method(name: str) -> Callable[..., Any]:
    def call(self: Watching, *args: Any, **kwargs: Any) -> Any:
        return _report_unseen(self, name, args, kwargs, sys._getframe(1))

    return call


def _container_attribute(name: str) -> property:
    def get(self: Watching) -> Any:
        _report(self, name, sys._getframe(1))
        return getattr(self.original, name)

    return property(get)


def _watcher_of(frame: FrameType) -> Recorder | None:
    """Return who records what some code does; None for the recorder's own code."""
    return None if frame.f_code.co_filename.startswith(TRACER) else current_watcher()


def _report_unseen(
    container: Watching, name: str, args: Any, kwargs: dict[str, Any], frame: FrameType
) -> Any:
    _report(container, name, frame)
    return getattr(container.original, name)(*map(_plain_argument, args), **_plain_argument(kwargs))


def _plain_argument(value: Any) -> Any:
    """Return what the container itself receives: no traced scalars, and no such objects."""
    kind = type(value)
    if issubclass(kind, Watching):
        return value.original
    if kind is tuple:
        return tuple(map(_plain_argument, value))
    if kind is list:
        value[:] = map(_plain_argument, value)
    elif kind is dict:
        value.update({key: _plain_argument(item) for key, item in value.items()})
    return plain(value)


def _report(container: Watching, name: str, frame: FrameType) -> None:
    watcher = _watcher_of(frame)
    if watcher is not None:
        container.holder.is_misused = True
        kind, name = type(container.holder.original).__name__, container.view or name
        watcher.unseen(f"{kind}.{name} of a {kind} that changes from call to call")


def _can_be_replayed(name: str, args: tuple[Any, ...]) -> bool:
    if name == "update":  # by the members of a list
        return len(args) == 1 and type(args[0]) in (list, tuple) and all(map(_is_key, args[0]))
    keys, rest = args[:1], args[1:]
    if not all(map(_is_key, keys)) or not all(map(_is_value, rest)):
        return False
    # A replay would store an equal tuple in place of a size.
    return name not in _STORING or not any(type(one) is torch.Size for one in args)


def _is_key(value: Any) -> bool:
    """Return whether a value is found in a dict by what it is, and is the same in each replay."""
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return all(map(_is_key, value))
    return kind is not float and kind is not TracedFloat and (kind in PLAIN_TYPES or kind in TRACED)


def _is_part_of_key(value: Any) -> bool:
    """Return whether a cache finds a value by what it is, or is a module of the model."""
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return all(map(_is_part_of_key, value))
    return kind in PLAIN_TYPES or kind in TRACED or isinstance(value, torch.nn.Module)


def _tensors_of_result(result: Any) -> list[torch.Tensor]:
    if type(result) is tuple:
        return [tensor for one in result for tensor in _tensors_of_result(one)]
    return [result] if isinstance(result, torch.Tensor) else []


def _is_value(value: Any) -> bool:
    kind = type(value)
    if kind is torch.Tensor:
        return not value.__dict__
    if kind is tuple:
        return all(map(_is_value, value))
    return kind in PLAIN_TYPES or kind in TRACED
