"""Objects that a run can read and no captured value describes, watched by their content.

Parts are what a replay can take from its place and write back to it. Other objects - counters,
registries, what a class of another package holds - are only compared: as long as each of them
holds the very things that it held, a run would read the same. What has content that cannot be
read, such as an iterator, is handed to whoever asks, for the run to be live.
"""

from __future__ import annotations

import abc
import array
import builtins
import collections
import ctypes
import datetime
import decimal
import fractions
import functools
import gc
import inspect
import logging
import numbers
import operator
import pathlib
import random
import re
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Protocol

import torch

from bendtrace.environment.provenance import is_users_class
from bendtrace.environment.settings import SETTINGS
from bendtrace.source.memory_words import Words
from bendtrace.source.versions import version_of
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    identical,
    is_array,
    is_scalar,
    module_of,
    slot_of,
    slots_of,
)
from bendtrace.tape.structure import entries_of

__all__ = ["PYTHONS", "Finder", "WatchedContent", "content_reader", "is_opaque", "table_of"]


class Finder(Protocol):
    """Receives what watched objects hold that is not watched by content."""

    def met(self, value: Any, label: str) -> bool:
        """Take a tensor, module, function or class; return False for any other thing."""

    def met_object(self, kind: type) -> None:
        """Note that there is an object of a class."""

    def met_opaque(self, value: Any, label: str) -> None:
        """Note something whose content cannot be read."""


MOST = 10_000  # objects that are watched, and names that are scanned


class TooMany(Exception):
    """Code can reach more than can be watched."""


class WatchedContent:
    """Objects that are watched by content.

    Args:
        finder: is told of what else is met.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder: Finder | None = finder
        self._seen: dict[int, Any] = {}
        self._tables: list[_Content] = []
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[Any] = []
        self._owners: list[Any] = []
        self._own: list[Any] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._whole: list[_Content] = []
        self._others: list[_Content] = []
        self._readers: list[Callable[[Any], Any]] = []
        self._values: list[Any] = []
        self._items: list[Any] = []
        self._classes: list[type] = []
        self._bases: list[Any] = []

    def __bool__(self) -> bool:
        return bool(
            self._dicts or self._objects or self._others or self._whole or self._classes
            or self._owners
        )  # fmt: skip

    def add(self, value: Any, label: str) -> None:
        """Watch a thing, and all that it holds.

        Raises:
            TooMany: it holds more than can be watched.
        """
        waiting = [(value, label)]
        while waiting:
            value, label = waiting.pop()
            if id(value) not in self._seen:
                if len(self._seen) >= MOST:
                    raise TooMany
                waiting += self._meet(value, label)

    def add_class(self, cls: type) -> None:
        """Watch what a class of installed code has, without what that holds."""
        if id(cls) not in self._seen:
            self._seen[id(cls)] = cls
            self._watch(table_of(cls), _members, cls.__qualname__)

    def add_settings(self, names: set[str]) -> None:
        """Watch settings that decide what code does that uses some names, or some packages."""
        for asking, value, read, label in SETTINGS:
            if not asking.isdisjoint(names):
                self._add_content(value, read, label)
        if not _ASKING.isdisjoint(names):
            self._watch(table_of(torch.Tensor), _put_on_tensors, "the attributes of torch.Tensor")

    def add_builtins(self, names: Collection[str]) -> None:
        """Watch what the names of Python's builtins stand for."""
        asked = (*sorted({*names} - {"print", "open"}),)  # which a run replaces itself
        self._watch(vars(builtins), functools.partial(_found, asked), "builtins")

    def add_registered(self) -> None:
        """Watch what counts as a subclass of an abstract class."""
        self._add_content(abc, lambda module: [module.get_cache_token()], "abc")

    def add_bases(self, classes: Iterable[type]) -> None:
        """Watch what classes inherit from."""
        self._classes += classes
        self._bases += map(_mro, self._classes)

    def add_names(self, things: Iterable[Any]) -> None:
        """Watch the names and texts that Python keeps of functions and classes."""
        for thing in things:
            self._add_content(thing, _named, getattr(thing, "__qualname__", ""))

    def add_attribute(self, thing: Any, name: str) -> None:
        """Watch one attribute of a function or class, and all that it holds."""
        label = f"{thing.__qualname__}.{name}"
        content = self._add_content(thing, functools.partial(_slots, (name,)), label)
        for held in content.held():
            self.add(held, label)

    def add_slots(self, thing: Any, label: str) -> None:
        """Watch what a thing keeps in slots, and all that this holds."""
        if names := tuple(slots_of(type(thing))):
            content = self._add_content(thing, functools.partial(_slots, names), label)
            for name, held in zip(names, content.held(), strict=True):
                self.add(held, f"{label}.{name}")

    def add_owner(self, thing: Any) -> None:
        """Watch that a thing keeps its attributes in the same dict, whose content is no matter."""
        self._owners.append(thing)
        self._own.append(vars(thing))

    def add_cache(self, cache: functools._lru_cache_wrapper[Any], label: str) -> None:
        """Watch that a cache still gives what it gave."""
        self._whole.append(_Kept(cache, entries_of, label))

    def same(self) -> bool:
        """Whether everything holds what it held."""
        now = [*map(version_of, self._dicts)]
        if now != self._versions:
            if not all(table.same() for table in self._tables):
                return False
            self._versions = now
        # Usually only a few classes are watched: empty lists cost no call.
        return (
            (not self._objects or [*map(type, self._objects)] == self._kinds)
            and (not self._classes or self._same_bases())
            and (not self._owners or all(map(is_, map(_attributes, self._owners), self._own)))
            and self.holds_same()
        )

    def holds_same(self) -> bool:
        """Whether all holds what it held of which no words tell."""
        return (not self._others or self._same_items()) and (
            not self._whole or all(content.same() for content in self._whole)
        )

    @property
    def holds_more(self) -> bool:
        """Whether there is more than words tell: what `holds_same` looks at."""
        return bool(self._others or self._whole)

    def add_to(self, words: Words) -> None:
        """Add the words that tell that all is the same, but for what `holds_same` looks at.

        Raises:
            Unreadable: something has no such words.
        """
        for table in self._dicts:
            words.add_version(table)
        for thing, kind in zip(self._objects, self._kinds, strict=True):
            words.add_class(thing, kind)
        for owner, own in zip(self._owners, self._own, strict=True):
            words.add_attributes(owner, own)
        for cls, bases in zip(self._classes, self._bases, strict=True):
            words.add_bases(cls, bases)

    def _same_bases(self) -> bool:
        """Whether classes inherit from what they did, also where that was put back."""
        now = [*map(_mro, self._classes)]
        if all(map(is_, now, self._bases)):
            return True
        same = [*map(len, now)] == [*map(len, self._bases)] and all(
            map(is_, chain.from_iterable(now), chain.from_iterable(self._bases))
        )
        if same:
            self._bases = now
        return same

    def _same_items(self) -> bool:
        """Whether what is compared item by item is the same, which is mostly found out in C."""
        now = [*chain.from_iterable(map(operator.call, self._readers, self._values))]
        if len(now) == len(self._items) and all(map(is_, now, self._items)):
            return True
        return all(content.same() for content in self._others)

    def changed(self) -> Iterator[str]:
        """Yield the labels of what does not hold what it held."""
        for content in (*self._tables, *self._others, *self._whole):
            if not content.same():
                yield content.label
        for thing, kind in zip(self._objects, self._kinds, strict=True):
            if type(thing) is not kind:
                yield f"the class of a {kind.__qualname__}"
        for owner, own in zip(self._owners, self._own, strict=True):
            if _attributes(owner) is not own:
                yield f"the attributes of a {type(owner).__qualname__}"

    def close(self) -> None:
        """End the search: nothing is added from now on."""
        self._finder = None
        self._seen = {}

    def _meet(self, value: Any, label: str) -> list[tuple[Any, str]]:
        kind = type(value)
        if kind in PLAIN_TYPES or (
            kind in (tuple, frozenset) and PLAIN_TYPES.issuperset(map(type, value))
        ):
            return []
        assert self._finder is not None
        self._seen[id(value)] = value
        if kind in weakref.ProxyTypes:  # which passes for what it stands for
            self._finder.met_opaque(value, label)
            return []
        if is_array(value) and isinstance(value.base, ctypes.Array):  # memory that may be gone
            self._finder.met_opaque(value, label)
            return []
        if self._finder.met(value, label):
            return []
        if module_of(kind).startswith(_OF_TORCH) and callable(value) and not is_users_class(kind):
            return []  # an operator, or a function that was compiled
        if module_of(kind) in _SWITCHES and not is_users_class(kind):
            self._add_content(value, _switched, label)
            return []
        if kind is tuple or kind is frozenset:  # which hold the same for ever
            return [(item, f"{label}[...]") for item in value]
        self._finder.met_object(kind)
        if isinstance(value, logging.Logger):  # it keeps answers, which come and go
            self._add_content(value, _logger, label)
            return []
        found: list[tuple[Any, str]] = []
        reader = content_reader(value)
        if reader is not None:
            self._note(value)
            if reader is _items and kind is dict:
                found += self._add_table(value, label)
            else:
                content = self._add_content(value, reader, label)
                found += [(item, f"{label}[...]") for item in content.held()]
        elif is_opaque(value):
            self._finder.met_opaque(value, label)
        # What code of the user's does not name, it does not look at; other code may.
        form = "{}.{}" if is_users_class(kind) else "{}[{}]"
        own = value.__dict__ if kind.__dictoffset__ else None
        if type(own) is dict:
            self._note(value)
            self._owners.append(value)
            self._own.append(own)
            self._add_table(own, label)
            found += [(item, form.format(label, name)) for name, item in own.items()]
        if names := tuple(slots_of(kind)):
            self._note(value)
            content = self._add_content(value, functools.partial(_slots, names), label)
            named = zip(names, content.held(), strict=True)
            found += [(item, form.format(label, name)) for name, item in named]
        return found

    def _add_content(self, value: Any, read: Callable[[Any], Any], label: str) -> _Content:
        content = _Content(value, read, label)
        if content.is_whole:
            self._whole.append(content)
        else:
            self._others.append(content)
            self._readers.append(read)
            self._values.append(value)
            self._items += content.held()
        return content

    def _watch(self, table: dict[Any, Any], read: Callable[[Any], Any], label: str) -> None:
        """Watch what a reader finds in a dict, which it is asked for if the dict was written to."""
        self._tables.append(_Content(table, read, label))
        self._dicts.append(table)
        self._versions.append(version_of(table))

    def _note(self, value: Any) -> None:
        if not self._objects or self._objects[-1] is not value:
            self._objects.append(value)
            self._kinds.append(type(value))

    def _add_table(self, table: dict[Any, Any], label: str) -> list[tuple[Any, str]]:
        self._watch(table, _items, label)
        keys = [(key, f"a key of {label}") for key in table if type(key) not in PLAIN_TYPES]
        return keys + [(item, f"{label}[{key!r:.40}]") for key, item in table.items()]


class _Content:
    """What one thing held, as one of the readers below reads it."""

    __slots__ = ("_read", "_was", "label", "value")

    def __init__(self, value: Any, read: Callable[[Any], Any], label: str) -> None:
        self.value = value
        self.label = label
        self._read = read
        self._was = read(value)

    def same(self) -> bool:
        now = self._read(self.value)
        if type(now) is not tuple:
            return bool(now == self._was)
        return len(now) == len(self._was) and all(map(_alike, now, self._was))

    @property
    def is_whole(self) -> bool:
        """Whether it is not compared item by item."""
        return type(self._was) is not tuple

    def held(self) -> tuple[Any, ...]:
        return self._was if type(self._was) is tuple else ()


class _Kept(_Content):
    """The entries of a cache, to which others may come."""

    __slots__ = ()

    def same(self) -> bool:
        now = {id(key): result for key, result in self._read(self.value)}
        return all(now.get(id(key), now) is result for key, result in self._was)


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) in PLAIN_TYPES and identical(a, b))


# What things hold. A tuple is compared by the identity of its items, anything else as a whole.


def _items(value: Any) -> tuple[Any, ...]:
    return (*dict.keys(value), *dict.values(value))


def _members(table: dict[str, Any]) -> tuple[Any, ...]:
    """What a class of torch's has, but for what torch.compile and this package exchange in it."""
    return tuple(
        part
        for name, member in table.items()
        if (name[:2] != "__" or name in _ASKED) and name != "_compiled_call_impl"
        for part in (name, member)
    )


_ASKED = frozenset({"__call__", "__getattr__", "__setattr__", "__getitem__", "__iter__", "__len__"})


def _ordered(value: Any) -> tuple[Any, ...]:
    ordered = collections.OrderedDict
    return (*ordered.keys(value), *ordered.values(value))


def _factory(value: Any) -> tuple[Any, ...]:
    return (value.default_factory, *_items(value))


def _slots(names: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    return tuple(slot_of(value, name) for name in names)


# Modes that are switched by objects, which keep what to switch back to.
_SWITCHES = ("torch.amp.autocast_mode", "torch.autograd.grad_mode")


def _switched(value: Any) -> Any:
    return [(n, item) for n, item in vars(value).items() if not n.startswith(("prev", "_infer"))]


# Objects of torch's that can be called, and have nothing that a forward would ask for.
_OF_TORCH = ("torch._", "torch.jit", "torch.fx", "torch.export", "torch.ops")


def _found(names: tuple[str, ...], table: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(map(table.get, names))


# Where code names these, it may ask for attributes that tensors do not have. A run puts some there
# itself: torch's own, and things of this package.
_ASKING = frozenset({"hasattr", "getattr", "AttributeError", "dir"})
_OF_TENSORS = frozenset(dir(torch.Tensor))


def _put_on_tensors(table: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in table.items()
        if name not in _OF_TENSORS and not module_of(type(value)).startswith("bendtrace.")
    ]


def _array_of(value: Any) -> Any:
    plain = value.view(sys.modules["numpy"].ndarray)
    if plain.dtype.hasobject:
        return (plain.dtype, plain.shape, *plain.ravel().tolist())
    return [plain.dtype, plain.shape, plain.strides, plain.flags.writeable, plain.tobytes()]


def _state_of(value: Any) -> Any:
    generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    return [_flat(generator.state)]


def _flat(state: Any) -> Any:
    if isinstance(state, dict):
        return [(key, _flat(item)) for key, item in state.items()]
    return state.tobytes() if is_array(state) else state


def _logger(value: Any) -> Any:
    found: list[Any] = [value.manager.disable]
    while value is not None:
        found += (value.level, value.disabled, value.propagate, list(value.handlers))
        value = value.parent
    return found


def _named(value: Any) -> Any:
    return [getattr(value, name, None) for name in PYTHONS]


# What Python itself keeps of functions and classes.
PYTHONS = ("__name__", "__qualname__", "__doc__", "__module__")


def _own_bytes(value: Any) -> Any:
    return [bytes(value)]


def _iterated(base: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(base.__iter__(value))


_BUILTIN_READERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (collections.OrderedDict, _ordered),
    (collections.defaultdict, _factory),
    (dict, _items),
    (list, _iterated(list)),
    (tuple, _iterated(tuple)),
    (set, _iterated(set)),
    (frozenset, _iterated(frozenset)),
    (collections.deque, _iterated(collections.deque)),
    (bytearray, _own_bytes),
    (array.array, lambda value: [value.typecode, value.tobytes()]),
    (types.MappingProxyType, lambda value: (*value.keys(), *value.values())),
    (functools.partial, attrgetter("func", "args", "keywords")),
    (functools.partialmethod, attrgetter("func", "args", "keywords")),
    (types.MethodType, attrgetter("__func__", "__self__")),
    (types.MethodWrapperType, lambda value: (value.__self__,)),
    (types.CellType, lambda value: tuple(_of_cell(value))),
    (slice, attrgetter("start", "stop", "step")),
    (type(threading.Lock()), lambda value: [value.locked()]),
    (BaseException, lambda value: (value.args,)),
    (random.SystemRandom, lambda value: [object()]),
    (random.Random, lambda value: [random.Random.getstate(value)]),
    (staticmethod, lambda value: (value.__func__,)),
    (classmethod, lambda value: (value.__func__,)),
    (property, attrgetter("fget", "fset", "fdel")),
    (functools.singledispatchmethod, lambda value: _items({**value.dispatcher.registry})),
    (functools.cached_property, lambda value: (value.func,)),
    (type({}.keys()), lambda value: tuple(value)),
    (type({}.values()), lambda value: tuple(value)),
    (inspect.Signature, lambda value: tuple(p.default for p in value.parameters.values())),
)


def _of_cell(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:
        return


def content_reader(value: Any) -> Callable[[Any], Any] | None:
    """Return what reads the content of a thing, as far as it is not in attributes."""
    for kind, reader in _BUILTIN_READERS:
        if isinstance(value, kind):
            return reader
    if is_array(value):
        return _array_of
    if is_scalar(type(value)) and type(value).__name__ == "void":
        return lambda value: [value.dtype, value.tobytes()]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        if isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator)):
            return _state_of
    if type(value) is types.BuiltinMethodType:
        free = isinstance(value.__self__, (types.ModuleType, type, types.NoneType))
        return None if free or value.__module__ is not None else _bound_to
    if callable(value) and hasattr(value, "__self__") and hasattr(value, "__func__"):
        return _bound_to  # a method that is written in Cython
    return None


def _bound_to(value: Any) -> tuple[Any, ...]:
    return (value.__self__,)


# What has no content that changes, or none that a forward would ask for.
_STEADY_KINDS = (
    numbers.Number, str, bytes, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    pathlib.PurePath, re.Pattern, uuid.UUID, decimal.Decimal, fractions.Fraction,
    type(threading.Lock()), type(threading.RLock()), types.ModuleType, type, Enum,
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, types.CodeType, operator.itemgetter, operator.attrgetter,
    operator.methodcaller, functools._lru_cache_wrapper, types.GenericAlias, types.UnionType,
    torch.Tensor, torch.Generator, torch.finfo, torch.iinfo, logging.Logger,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by newer C code
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinMethodType)


def is_opaque(value: Any) -> bool:
    """Whether a thing has content, besides its attributes, that cannot be read."""
    kind = type(value)
    if isinstance(value, _STEADY_KINDS) or kind is object:
        return False
    if isinstance(value, (weakref.ref, weakref.finalize)):
        return True
    if hasattr(kind, "__get__") and not kind.__flags__ & _HEAP_TYPE:
        return False  # what a class has instead of an attribute
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.dtype, numpy.ufunc)):
        return False
    if module_of(kind).partition(".")[0] == "torch" and module_of(kind) != "torch.classes":
        return not callable(value) and not all(map(_is_pythons, kind.__mro__))
    return not all(map(_is_pythons, kind.__mro__))


def _is_pythons(base: type) -> bool:
    """Whether all that a class adds to its objects is in their attributes."""
    return (
        base is object
        or base in _TRANSPARENT
        or bool(
            base.__flags__ & _HEAP_TYPE
            and not any(type(member) in _OF_C for member in vars(base).values())
        )
    )


_TRANSPARENT = frozenset({types.SimpleNamespace, BaseException, Exception, property})


def table_of(cls: type) -> dict[Any, Any]:
    """Return the dict that a class keeps its attributes in, past the proxy that it shows."""
    table = gc.get_referents(vars(cls))[0]
    assert type(table) is dict
    return table


_attributes = attrgetter("__dict__")
_mro = attrgetter("__mro__")
