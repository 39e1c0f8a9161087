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

A dict or list may have containers in it: `self.losses[name].append(x)`. What `self.losses[name]`
gives is such an object as well, which has the key by which its operations find the container again.
So nothing may be put in its place as long as code has it.

The objects are of no subclass of `dict` or `set`: C would read their empty memory unseen, where
`set(seen)` or `json` do not ask a subclass for its items.
"""

from __future__ import annotations

import builtins
import collections
import functools
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.python import results
from bendtrace.python.sites import PACKAGE, TRACER
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    Captured,
    CaptureKind,
    Keys,
    Length,
    identical,
    is_as_copied,
    is_cache,
    is_exchangeable,
    is_ndarray,
    is_number,
    same_keys,
)
from bendtrace.tape.scalars import TRACED, TracedFloat, plain
from bendtrace.tape.structure import entries_of
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch import growing

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder

_KINDS = (CaptureKind.DICT, CaptureKind.LIST, CaptureKind.SET, CaptureKind.LARGE)
_OF_LISTS = frozenset(
    {
        "__contains__", "__getitem__", "__setitem__", "__delitem__", "__len__", "append", "clear",
        "count", "extend", "index", "insert", "pop", "remove", "reverse",
    }
)  # fmt: skip
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
    list: _OF_LISTS,
    collections.deque: _OF_LISTS | {"appendleft", "popleft", "rotate"},
    _CACHE: frozenset({"__call__"}),
}
# Functions that go through all of a container before they return, and keep nothing of it. Of some,
# the result is one value, so that how many members there are is no question.
_GIVING_ONE: frozenset[Any] = frozenset({sum, max, min, any, all})
_TAKING_ALL: frozenset[Any] = frozenset({sorted, list, tuple, *_GIVING_ONE})
WHOLE = frozenset(function.__name__ for function in _TAKING_ALL)
_OF_VIEWS = ("__len__",)  # which functions that make a list ask for
_STORING = frozenset({"__setitem__", "setdefault", "add", "append", "appendleft", "insert"})
_STORING_SEVERAL = frozenset({"extend", "update"})
_SEQUENCES: tuple[type, ...] = (list, collections.deque)
# Operations after which a key may lead to something else, or to nothing.
_MOVING = frozenset(
    {
        "__setitem__", "__delitem__", "pop", "popitem", "clear", "insert", "remove", "reverse",
        "appendleft", "popleft", "rotate", "append", "extend", "update",
    }
)  # fmt: skip
_GIVING_ITEMS = frozenset({"__getitem__", "get", "setdefault"})
_FACTORIES = (
    None, int, float, bool, list, dict, set, collections.deque, collections.Counter,
)  # fmt: skip
# What an operation gives in place of a container that is in the container, in front of its class.
_INSIDE = "\ue0b8"
_FREE = frozenset({"__class__", "__doc__", "__hash__", "__new__", "__init__", "__dir__",
    "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getattribute__",
    "__setattr__", "__delattr__", "__module__", "__dict__", "__weakref__"})  # fmt: skip


def can_be_watched(part: Captured) -> bool:
    """Return whether a part is a container, or an array, whose operations can be ops.

    A number of numpy's is one, too: another one can take its place.
    """
    if part.kind is CaptureKind.PLAIN:
        return is_number(part.type) and is_exchangeable(part)
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
    if part.kind is CaptureKind.PLAIN:
        return identical(part.value, now)
    items: Any = now
    if part.kind is CaptureKind.LIST:
        return isinstance(part.size, Length | Keys) and part.size.number == len(items)
    if part.kind is not CaptureKind.DICT:
        return is_as_copied(part, now)
    return isinstance(part.size, Keys) and same_keys(items, part.size.items)


def is_watchable(container: Any, others: Container[int] = ()) -> bool:
    """Return whether a container holds nothing that would run the user's code, or be changed.

    It may hold containers that nothing else does: none of which has one of some identities.
    """
    if getattr(container, "__dict__", None):
        return False
    if not makes_container(getattr(container, "default_factory", None)):
        return False
    is_dict = isinstance(container, dict)
    items = (*container.keys(), *container.values()) if is_dict else (*container,)
    inside = [item for item in items if not _is_value(item)]
    if not inside:
        return True
    identities = {*map(id, inside)}
    return (
        type(container) in HOLDING
        and len(identities) == len(inside)
        and not any(identity in others for identity in identities)
        and all(type(one) in _INNER and is_watchable(one) and holds_values(one) for one in inside)
    )


def makes_container(factory: Any) -> bool:
    """Return whether the factory of a dict runs no code that reads something, or does more."""
    if type(factory) is functools.partial:
        given = *factory.args, *factory.keywords.values()
        return factory.func in _FACTORIES and all(map(_is_value, given))
    if type(factory) is not FunctionType:
        return factory in _FACTORIES
    code, known = factory.__code__, {**vars(collections), **vars(builtins), **factory.__globals__}
    used = [known.get(name) for name in code.co_names]
    return (
        not (factory.__closure__ or factory.__defaults__ or factory.__kwdefaults__)
        and all(isinstance(one, type) and one in _FACTORIES for one in used)
        and all(_is_value(one) for one in code.co_consts)
    )


def holds_values(container: Any) -> bool:
    """Return whether a container holds no containers."""
    items = container.values() if isinstance(container, dict) else container
    return all(map(_is_value, items))


HOLDING: tuple[type, ...] = (dict, collections.defaultdict, collections.OrderedDict, list)
_INNER: tuple[Any, ...] = (
    list,
    dict,
    set,
    collections.deque,
    collections.Counter,
    collections.defaultdict,
)


class Watching:
    """Takes the place of a container of the state while a run is recorded.

    Attributes:
        original: the container.
        is_misused: whether code has used it in a way that is no op.
        view: the method that has given it, if it is a view of a dict.
        holder: what stands for this dict, or for what the container is in; the object itself where
            it is neither.
        path: the keys by which the container is found in the holder.
        held: what stands for containers in it, as long as code has it.
        may_hold: whether containers may be in it.
    """

    __slots__ = (
        "__weakref__", "held", "holder", "is_misused", "may_hold", "original", "path", "view",
    )  # fmt: skip

    def __init__(
        self, original: Any, view: str = "", holder: Watching | None = None,
        path: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.original: Any = original
        self.view: str = view
        self.holder: Watching = self if holder is None else holder
        self.path: tuple[Any, ...] = path
        self.held: list[weakref.ref[Watching]] = []
        self.may_hold: bool = False
        self.is_misused: bool = False

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which this is."""
        return self.view, self.holder, self.path


def watched_container(container: Any, *args: Any, **options: Any) -> Watching:
    """Return what takes the place of a container, a view or a container in it (see `Watching`)."""
    kind: Any = type(container)
    found: Watching = _container_class(kind)(container, *args, **options)
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
        if kind in _SEQUENCES:
            space["__iadd__"] = _lengthen
        if kind is collections.deque:
            space["maxlen"] = property(_most)
    space["__class__"] = property(_class_of_original)
    return type(kind.__name__, (Watching,), space)


def _class_of_original(container: Watching) -> type:
    """Show the model the class of the container; this library takes no such object apart."""
    is_ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
    return type(container) if is_ours else type(container.original)


@functools.cache
def _replay_function(name: str, depth: int, gives_list: bool) -> Callable[..., Any]:
    """Return the function that replays call: with the container, keys of items, and arguments.

    Where it gives something else than a value, its class shows that to a guard.
    """

    def operate(container: Any, *args: Any, **kwargs: Any) -> Any:
        for key in args[:depth]:
            container = container[key]
        found = getattr(container, name)(*args[depth:], **kwargs)
        if _is_value((*found,) if gives_list and type(found) is list else found):
            return found
        if type(found) in _INNER and name in _GIVING_ITEMS and not depth and not gives_list:
            return f"{_INSIDE}{type(found).__name__}"
        return NotFollowed(found)

    return _named(operate, name)


class NotFollowed:
    """Something in a container whose operations are ops that is none of the values it may hold."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value


@functools.cache
def _whole_function(function: Callable[[Any], Any], view: str, depth: int) -> Callable[..., Any]:
    """Return the function that has a function of Python's go through a container, or a view.

    It gives one value; what is computed with tensors is no op of its own.
    """

    def operate(container: Any, *keys: Any) -> Any:
        for key in keys[:depth]:
            container = container[key]
        whole = getattr(container, view)() if view else container
        if type(next(iter(whole), None)) not in PLAIN_TYPES:
            return _INSIDE
        found = function(whole)
        return found if type(found) in PLAIN_TYPES else NotFollowed(found)

    return _named(operate, function.__name__)


@functools.cache
def _members_by(view: str, depth: int) -> Callable[..., Any]:
    """Return the function that goes through a container, or through a view of it."""

    def operate(container: Any, *keys: Any) -> Any:
        for key in keys[:depth]:
            container = container[key]
        return [*(getattr(container, view)() if view else container)]

    return _named(operate, view or "members")


@functools.cache
def _truth_function(depth: int) -> Callable[..., Any]:
    def operate(container: Any, *keys: Any) -> Any:
        for key in keys[:depth]:
            container = container[key]
        return bool(container)

    return _named(operate, "is_filled")


def _named(function: Any, name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name.strip("_")
    function.works_on_containers = True
    return function  # type: ignore[no-any-return]


def _truth(container: Watching) -> bool:
    frame = sys._getframe(1)
    watcher = _watcher_of(frame)
    if watcher is None or not watcher.holds(container.holder):
        return bool(_report_unseen(container, "__len__", (), {}, frame))
    function = _truth_function(len(container.path))
    given = container.holder, *container.path
    return bool(watcher.opaque_call(function, given, {}, frame))


def _lengthen(self: Watching, items: Any) -> Watching:
    _operate(self, "extend", (items,), {}, sys._getframe(1))
    return self


def _most(self: Watching) -> int | None:
    most: int | None = self.original.maxlen
    return most


def _view_method(name: str) -> Callable[..., Any]:
    def call(self: Watching) -> Any:
        frame = sys._getframe(1)
        watcher, found = _watcher_of(frame), getattr(self.original, name)()
        if watcher is None:
            return found
        if not watcher.holds(self.holder):
            return _report_unseen(self, name, (), {}, frame)
        return watched_container(found, name, self.holder, self.path)

    return call


def _members(self: Watching) -> Iterator[Any]:
    """Give all members to one of some functions, which goes through them before it returns."""
    frame = sys._getframe(1)
    watcher = _watcher_of(frame)
    if watcher is None:
        return iter(getattr(self.original, "__iter__")())  # noqa: B009
    called: Any = results.c_function_called_by(frame)
    is_taken = any(called is one for one in _TAKING_ALL)
    if not is_taken or not watcher.holds(self.holder):
        return iter(_report_unseen(self, "__iter__", (), {}, frame))
    given = self.holder, *self.path
    if any(called is one for one in _GIVING_ONE) and results.can_exchange():
        function = _whole_function(called, self.view, len(self.path))
        result = watcher.opaque_call(function, given, {}, frame)
        if type(result) is NotFollowed:
            _report(self, called.__name__, frame)
            return iter(self.original)
        if result != _INSIDE and results.exchange(frame, result, lambda gave: None):
            return iter(self.original)
    found = watcher.opaque_call(_members_by(self.view, len(self.path)), given, {}, frame)
    if not _is_value((*found,)):
        _report(self, "__iter__", frame)
        return iter(self.original)
    if not _may_be_given(self, found, watcher):
        _report(self, "__iter__", frame)
    return iter(found)


def _may_be_given(
    container: Watching, found: Sequence[Any], watcher: Recorder, key: Any = None
) -> bool:
    """Return whether code may have several items of a container, among them tensors.

    Of a set or dict, which of the tensors the run has put there differs. Each number of items is a
    path, of which a list that gets longer has no end.

    Args:
        container: what stands for it.
        found: the items.
        watcher: the recorder.
        key: the slice that gives them, if there is one.
    """
    if type(container.original) not in _SEQUENCES:
        return not _tensors_of_result((*found,))
    is_end = type(key) is slice and type(key.start) is int and key.start < 0
    is_full = getattr(container.original, "maxlen", None) == len(container.original)
    if len(found) > (_MANY if is_end or is_full else _SEVERAL):
        return False
    return not any(map(watcher.holds, _tensors_of_result((*found,))))


_SEVERAL, _MANY = 32, 1024


def _replay_operation(name: str) -> Callable[..., Any]:
    def call(self: Watching, *args: Any, **kwargs: Any) -> Any:
        count = sys.getrefcount(args[-1]) if args else 0
        return _operate(self, name, args, kwargs, sys._getframe(1), count)

    return call


def _operate(
    self: Watching, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType,
    count: int = 0,
) -> Any:  # fmt: skip
    watcher = _watcher_of(frame)
    if watcher is None:
        return getattr(self.original, name)(*args, **kwargs)
    given = (*args, *kwargs.values())
    # Another run, inside of the one that watches the container, does not know it.
    is_held = watcher.holds(self.holder)
    if not is_held or not _can_be_replayed(self, name, given, count):
        return _report_unseen(self, name, args, kwargs, frame)
    gives_list = name == "most_common" or any(type(one) is slice for one in args[:1])
    function = _replay_function(name, len(self.path), gives_list)
    result = watcher.opaque_call(function, (self.holder, *self.path, *args), kwargs, frame)
    if type(result) is NotFollowed:
        _report(self, name, frame)
        return result.value
    if type(result) is str and result.startswith(_INSIDE):
        return _inside(self, args[0], result[1:], frame)
    is_tensor = isinstance(result, torch.Tensor) and watcher.holds(result)
    if is_tensor or (type(result) is list and not _may_be_given(self, result, watcher, *args[:1])):
        _report(self, name, frame)
    return result


def _inside(holder: Watching, key: Any, name: str, frame: FrameType) -> Any:
    """Return what stands for a container that is in a container."""
    kind = next(one for one in _INNER if one.__name__ == name)
    found: Any = kind()  # of a script, which may have removed it since
    plain_key = _plain_argument(key)
    if isinstance(holder.original, dict):
        found = dict.get(holder.original, plain_key, found)
    elif -len(holder.original) <= plain_key < len(holder.original):
        found = holder.original[plain_key]
    if not holder.may_hold:
        _report(holder, "__getitem__", frame)
        return found
    made = watched_container(found, "", holder, (key,))
    holder.held.append(weakref.ref(made))
    return made


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


def _can_be_replayed(container: Watching, name: str, args: tuple[Any, ...], count: int) -> bool:
    kind = type(container.original)
    if name in _MOVING and any(ref() is not None for ref in container.held):
        return False
    if name in _STORING_SEVERAL:  # the members of a list
        allowed = _is_value if kind in _SEQUENCES else _is_key
        is_list = len(args) == 1 and type(args[0]) in (list, tuple)
        return is_list and all(allowed(one) and type(one) is not torch.Size for one in args[0])
    if kind in _SEQUENCES:
        keys, rest = args[:0], args
        if name in _BY_POSITION:
            keys, rest = args[:1], args[1:]
        if not all(_is_value(one) or _is_slice(one) for one in keys):
            return False
    else:
        keys, rest = args[:1], args[1:]
        if not all(map(_is_key, keys)):
            return False
    if not all(map(_is_value, rest)):
        may_store = container.may_hold and not container.path and name in _STORING
        if not (may_store and all(map(_is_value, args[:-1])) and _is_new(args[-1], name, count)):
            return False
    # A replay would store an equal tuple in place of a size.
    return name not in _STORING or not any(type(one) is torch.Size for one in args)


def _is_slice(value: Any) -> bool:
    return type(value) is slice and all(map(_is_value, (value.start, value.stop, value.step)))


_BY_POSITION = frozenset({"__getitem__", "__setitem__", "__delitem__", "insert", "pop", "rotate"})


def _is_new(value: Any, name: str, count: int) -> bool:
    """Return whether an argument is a container of values that nothing else holds."""
    kind = type(value)
    if kind not in _INNER or not is_watchable(value) or not holds_values(value):
        return False
    if isinstance(value, dict) and not all(map(_is_key, value)):
        return False
    return count == _counts_of_new()[name == "__setitem__"]


@functools.cache
def _counts_of_new() -> tuple[int, int]:
    """Return how many references there are to an argument that nothing else holds.

    In a call of a method, and in an assignment of an item. -1 if a variable makes no difference.
    """
    found: list[int] = []

    class Probe:
        def call(self, *args: Any, **kwargs: Any) -> None:
            found.append(sys.getrefcount(args[-1]) if args else 0)

        __setitem__ = call

    probe, variable, other = Probe(), list[int](), list[int]()
    probe.call(0, [])
    probe[0] = []
    probe.call(0, variable)
    probe[0] = other
    method, assignment = (
        one if one < more else -1 for one, more in zip(found[:2], found[2:], strict=True)
    )
    return method, assignment


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
