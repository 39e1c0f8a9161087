"""Tells whether two functions decide the same: those of one expression that runs again and again.

A predicate that is written in a loop is a new function each time. Traces are kept for the nodes
that it selects, so it should be recognised. Two functions decide the same if they have the same
code, and everything that this can read is equal, by its content.
"""

from __future__ import annotations

import builtins
import re
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from bendtrace.environment.code_facts import codes_in
from bendtrace.environment.provenance import is_finished, is_installed_space, is_users_class
from bendtrace.tape.captured import PLAIN_TYPES

__all__ = ["meaning_of"]

_MOST = 1000  # items of a container


class _Unknown(Exception):
    """What a function reads may change, or is not known."""


def meaning_of(function: Any) -> Hashable:
    """Return a value that is equal for functions that decide the same.

    It is the function itself if that is not known.
    """
    itself: Hashable = function
    try:
        return _function(function, ()) if type(function) is types.FunctionType else itself
    except _Unknown:
        return itself


def _function(function: types.FunctionType, around: tuple[Any, ...]) -> Hashable:
    is_constant = bool(around) and not function.__closure__ and is_finished(function)
    if is_constant or any(function is other for other in around):
        return function
    around = (*around, function)
    if vars(function):
        raise _Unknown
    read = dict(_globals(function))
    return (
        function.__code__,
        tuple(_value(cell, around) for cell in _contents(function)),
        _value(function.__defaults__, around),
        _value(function.__kwdefaults__, around),
        tuple((name, _value(value, around)) for name, value in sorted(read.items())),
    )


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            raise _Unknown from None


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    space = function.__globals__
    for code in codes_in(function.__code__):
        for name in code.co_names:
            if name in space:
                yield name, space[name]
            elif name in ("eval", "exec", "globals", "next", "open", "input"):
                raise _Unknown


def _value(value: Any, around: tuple[Any, ...]) -> Hashable:
    kind = type(value)
    if kind in PLAIN_TYPES:
        return kind, value
    if kind is types.FunctionType:
        return _function(value, around)
    if kind in (tuple, list, set, frozenset, dict) and len(value) <= _MOST:
        items = [*value.items()] if kind is dict else value
        held = [_value(item, around) for item in items]
        return kind, frozenset(held) if kind in (set, frozenset) else tuple(held)
    if kind is types.ModuleType and is_installed_space(vars(value)):
        return str(value.__name__)
    if isinstance(value, type) and not is_users_class(value):
        return value
    if kind in _CONSTANT or (kind is types.BuiltinFunctionType and _is_of_python(value)):
        constant: Hashable = value
        return constant
    raise _Unknown


def _is_of_python(function: Any) -> bool:
    return vars(builtins).get(function.__name__) is function


_CONSTANT = (re.Pattern, torch.dtype, torch.device, torch.layout)
