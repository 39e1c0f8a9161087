"""Readers of the content of objects that a scan has met and no captured value describes.

Most models hold no such objects; `findings.py` watches them.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import inspect
import itertools
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
from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter
from typing import Any

import torch

from bendtrace.tape.captured import Access, is_array, is_scalar, module_name_of
from bendtrace.tape.structure import has_state_of_c, is_heap_type, read_partial
from bendtrace.watch.draws import comparable_state
from bendtrace.watch.findings import ScanResult, read_items


def _dict_order(value: Any) -> tuple[Any, ...]:
    ordered = collections.OrderedDict
    return (*ordered.keys(value), *ordered.values(value))


def _array_of(value: Any) -> Any:
    plain = value.view(sys.modules["numpy"].ndarray)
    if plain.dtype.hasobject:
        return (plain.dtype, plain.shape, *plain.ravel().tolist())
    return [plain.dtype, plain.shape, plain.strides, plain.flags.writeable, plain.tobytes()]


def _state_of(value: Any) -> Any:
    generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    return [comparable_state(generator.state)]


def _iterate(base: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(base.__iter__(value))


_BUILTIN_READERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (collections.OrderedDict, _dict_order),
    (collections.defaultdict, lambda value: (value.default_factory, *read_items(value))),
    (dict, read_items),
    (list, _iterate(list)),
    (tuple, _iterate(tuple)),
    (set, _iterate(set)),
    (frozenset, _iterate(frozenset)),
    (collections.deque, _iterate(collections.deque)),
    (bytearray, lambda value: [bytes(value)]),
    (array.array, lambda value: [value.typecode, value.tobytes()]),
    (types.MappingProxyType, lambda value: (*value.keys(), *value.values())),
    (functools.partial, read_partial),
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
    (functools.singledispatchmethod, lambda value: read_items({**value.dispatcher.registry})),
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
    """Return a reader of the content of an object that is not in attributes."""
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
    type(vars(collections.namedtuple("Pair", "first"))["first"]),  # of named tuples
)  # fmt: skip


def is_opaque(value: Any) -> bool:
    """Return whether a thing has content, besides its attributes, that cannot be read."""
    kind = type(value)
    if isinstance(value, _STEADY_KINDS) or kind is object:
        return False
    if isinstance(value, (weakref.ref, weakref.finalize)):
        return True
    if hasattr(kind, "__get__") and not is_heap_type(kind):
        return False  # what a class has instead of an attribute
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.dtype, numpy.ufunc)):
        return False
    if (
        module_name_of(kind).partition(".")[0] == "torch"
        and module_name_of(kind) != "torch.classes"
    ):
        return not callable(value) and not all(map(_is_pythons, kind.__mro__))
    return not all(map(_is_pythons, kind.__mro__))


def reference_reader(value: Any, found: ScanResult) -> Callable[[Any], Any] | None:
    """Return a reader of a weak reference, which does not keep alive what that refers to.

    None if a lasting dict that the run can read does not hold what is referred to, which could then
    change, or go, unseen.
    """
    if value() is None:
        return lambda value: [value() is None]
    known = found.find(value())
    for part in found.parts if known is not None else ():
        holder = part.parent
        if (part is known or part.value is known) and holder is not None:
            if holder.access is Access.FIXED and type(table := holder.value) is dict:
                return lambda value, key=part.key: [table.get(key) is value()]  # type: ignore[misc]
    return None


# Iterators that Python's own code makes, of which can be read how far they have come.
_EMPTY: tuple[Any, ...] = (
    [], (), "", b"", bytearray(), range(0), range(1 << 70), collections.deque(),
)  # fmt: skip
_KEYED: tuple[Any, ...] = ({}, {}.values(), {}.items(), set())
_OF_KEYED = frozenset(type(iter(one)) for one in _KEYED)  # whose `__reduce__` copies what is left
_ITERATORS = _OF_KEYED | {
    types.GeneratorType, itertools.count, enumerate, filter, map, reversed, zip,
    type(reversed([])), *(type(iter(one)) for one in _EMPTY),
}  # fmt: skip
_ASKING_A_FUNCTION = type(iter(int, None))  # which has a position of its own
# Later versions of Python deprecate and remove what tells their positions.
_OF_ITERTOOLS = frozenset(
    kind for name, kind in vars(itertools).items() if name[0] != "_" and isinstance(kind, type)
)


def position_reader(value: Any) -> Callable[[Any], Any] | None:
    """Return a reader of an iterator's position; None for iterators other than Python's own.

    It returns something new each time where that cannot be read.
    """
    if type(value) is _ASKING_A_FUNCTION:
        return lambda value: [object()]
    if type(value) in _OF_ITERTOOLS and type(value) is not itertools.count:
        return _position if sys.version_info < (3, 12) else lambda value: [object()]
    return _position if type(value) in _ITERATORS else None


def _position(iterator: Any) -> Any:
    """Return what tells a position; its items are held, so that no other object takes their id."""
    kind: Any = type(iterator)
    if kind is itertools.count:
        return [repr(iterator)]
    if kind is types.GeneratorType:
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti, *frame.f_locals.values())
    if kind in _OF_KEYED:
        return [operator.length_hint(iterator)]
    return tuple(_marks(iterator.__reduce__()))


def _marks(value: Any) -> Iterator[Any]:
    """Yield what tells two positions apart."""
    if type(value) is tuple:
        for part in value:
            yield from _marks(part)
    elif (reader := position_reader(value)) is not None:
        yield from reader(value)
    elif hasattr(type(value), "__next__"):  # whose position is not known
        yield object()
    elif type(value) is list and not value:  # an iterator that is done holds a new one
        yield 0
    else:
        yield value


def _is_pythons(base: type) -> bool:
    """Return whether all that a class adds to its objects is in their attributes."""
    return base is object or base in _TRANSPARENT or not has_state_of_c(base)


_TRANSPARENT = frozenset({types.SimpleNamespace, BaseException, Exception, property})
