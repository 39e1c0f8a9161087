"""Sorts values into kinds, which decide how a value is guarded, or why it cannot be."""

from __future__ import annotations

import argparse
import collections
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from bendtrace.python.sites import full_place_text
from bendtrace.tape.captured import PLAIN_TYPES, CaptureKind, is_scalar, module_name_of, slot_names
from bendtrace.tape.plain_numbers import function_needs_plain
from bendtrace.tape.structure import can_build
from bendtrace.watch.owners import module_tree
from bendtrace.watch.rank_sync import is_wiring
from bendtrace.watch.reachability import reachable_from

_DEEP = 8  # plain objects nested deeper than this are guarded by identity


def underlying_code(function: Any) -> types.CodeType | None:
    """The code of a function, a method, a partial function or an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__func__", function)
    if not hasattr(found, "__code__"):
        found = inspect.getattr_static(type(found), "__call__", None)
    return getattr(found, "__code__", None)


def definitions(functions: Iterable[Any]) -> str:
    """Say where functions are defined, as far as they are Python's."""
    codes = map(underlying_code, functions)
    places = [
        full_place_text(code.co_filename, code.co_firstlineno) for code in codes if code is not None
    ]
    return f" (see {', '.join(places)})" if places else ""


def container_kind(kind: type) -> CaptureKind:
    """Return the kind of part for containers of some type."""
    if issubclass(kind, list) or kind is collections.deque:
        return CaptureKind.LIST
    if issubclass(kind, tuple):
        return CaptureKind.TUPLE
    return CaptureKind.DICT if issubclass(kind, dict) else CaptureKind.OBJECT


def is_plain_object(kind: type, depth: int) -> bool:
    """Return whether the attributes of an instance are worth guarding one by one."""
    if depth > _DEEP or issubclass(kind, (type, types.ModuleType, set, frozenset)):
        return False  # (what a set has besides attributes is no part)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    if kind in (collections.UserDict, collections.UserList, collections.ChainMap):
        return True
    package = module_name_of(kind).split(".")[0]
    if package in sys.stdlib_module_names or package in ("torch", "numpy") or not can_build(kind):
        return False
    return bool(kind.__dictoffset__) or any("__slots__" in vars(cls) for cls in kind.__mro__[:-1])


def package_of(value: Any) -> str:
    """Return the package that a module, class, function or object belongs to."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__
    else:
        name = getattr(value if callable(value) else type(value), "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def packages_of(space: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the packages of the objects behind some names in the globals of a function."""
    return {package_of(space[name]) for name in names if name in space}


def hides_attributes(value: Any, kind: type) -> bool:
    """Return whether an object hides the dict of its attributes."""
    if not isinstance(kind.__getattribute__, types.FunctionType) or not kind.__dictoffset__:
        return False
    return getattr(value, "__dict__", None) is not object.__getattribute__(value, "__dict__")


def is_settings(value: Any) -> bool:
    """Return whether an object holds plain values and containers of plain values only."""
    if isinstance(value, (list, tuple, dict)):
        return False
    if not type(value).__dictoffset__ or not value.__dict__:
        return False
    if any(slot_names(type(value))):
        return False
    items = [
        nested
        for item in vars(value).values()
        for nested in (
            dict.values(item) if isinstance(item, dict)
            else item if isinstance(item, (list, tuple, set))
            else (item,)
        )
    ]  # fmt: skip
    return all(type(item) in PLAIN_TYPES or isinstance(item, (Enum, str)) for item in items)


def is_constant(value: Any, kind: type) -> bool:
    """Return whether a value means the same for ever: a slice of plain values, a number of numpy's.

    The placement of a tensor over ranks counts as well.
    """
    if kind is slice:
        return all(type(part) in PLAIN_TYPES for part in (value.start, value.stop, value.step))
    if is_wiring(value):
        return True
    return is_scalar(kind) and kind.__name__ != "void"  # which can be written to


def is_value(value: Any) -> bool:
    """Return whether nothing can change what a value is: plain ones, and tuples of them."""
    if type(value) in (tuple, frozenset):
        return all(map(is_value, value))
    return type(value) in PLAIN_TYPES or isinstance(value, Enum) or is_constant(value, type(value))


def is_watched(value: Any) -> bool:
    """Return whether a global that code deep down names is worth scanning."""
    if isinstance(value, _WATCHED) or _is_plain_data(value):
        return True
    kind = type(value)
    return is_plain_object(kind, 0) and not callable(value) and is_settings(value)


def judge_of(value: Any) -> Callable[[Any], bool] | None:
    """Return what, besides the type of a value, decides whether it is worth scanning."""
    if isinstance(value, _WATCHED) or type(value) in PLAIN_TYPES:
        return None
    if isinstance(value, (list, tuple, set, dict)):
        return is_watched
    return is_settings if is_plain_object(type(value), 0) and not callable(value) else None


_WATCHED = (
    types.FunctionType, nn.Module, contextvars.ContextVar, functools._lru_cache_wrapper,
)  # fmt: skip


def _is_plain_data(value: Any, depth: int = 0) -> bool:
    """Return whether a value is plain or a tensor, or a container of such."""
    if isinstance(value, (list, tuple, set)):
        return depth < 4 and all(_is_plain_data(item, depth + 1) for item in value)
    if type(value) is dict:
        return depth < 4 and all(_is_plain_data(item, depth + 1) for item in value.values())
    return type(value) in PLAIN_TYPES or isinstance(value, torch.Tensor)


def tells_numbers_apart(function: Callable[..., Any]) -> bool:
    """Return whether the code of a model asks for the exact type of a number."""
    if isinstance(function, nn.Module):
        classes: set[Any] = {type(module) for module in module_tree(function)}
        return any(reachable_from(cls).tells_numbers for cls in classes)
    called = getattr(function, "__func__", function)
    return isinstance(called, types.FunctionType) and reachable_from(called).tells_numbers


def asks_for_plain(function: Callable[..., Any]) -> bool:
    """Return whether the forward of a model has to be given plain numbers for its own sake."""
    called = function.forward if isinstance(function, nn.Module) else function
    called = getattr(called, "__func__", called)
    return isinstance(called, types.FunctionType) and function_needs_plain(called)
