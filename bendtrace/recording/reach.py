"""Which names the code of a module's forward can reach, judging by the names it uses.

A static estimate from above, so that the globals, class attributes and functions that a run could
have read can be guarded without watching every read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Reach", "is_torchs", "names_in", "reach_of"]


class Reach(NamedTuple):
    """What a forward can reach.

    Attributes:
        functions: methods, properties and plain functions, its own and others.
        globals: (namespace, name) of the globals that these name.
        members: (class namespace, name) of the class attributes and methods that they name.
    """

    functions: tuple[types.FunctionType, ...]
    globals: tuple[tuple[dict[str, Any], str], ...]
    members: tuple[tuple[Mapping[str, Any], str], ...]


@functools.cache
def reach_of(cls: type) -> Reach:
    """Find what the forward of a module's class can reach."""
    bases = [base for base in cls.__mro__ if base is not object]
    owners = [_namespace(base) for base in bases if not is_torchs(base.__module__)]
    functions: dict[int, types.FunctionType] = {}
    members: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    globals_: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    waiting = [function for name in ("forward", "__call__") for function in _members(owners, name)]
    for owner in owners:
        if "forward" in owner:
            members[id(owner), "forward"] = (owner, "forward")
    while waiting:
        function = waiting.pop()
        if id(function) in functions or is_torchs(function.__module__):
            continue
        functions[id(function)] = function
        namespace = function.__globals__
        for name in names_in(function.__code__):
            if name in namespace and not isinstance(namespace[name], (type, types.ModuleType)):
                globals_[id(namespace), name] = (namespace, name)
                if isinstance(namespace[name], types.FunctionType):
                    waiting.append(namespace[name])
            for owner in owners:
                if name in owner:
                    if not isinstance(owner[name], (property, type, classmethod, staticmethod)):
                        members[id(owner), name] = (owner, name)
                    waiting += _members([owner], name)
        waiting += [c for c in _cells(function) if isinstance(c, types.FunctionType)]
    return Reach(tuple(functions.values()), tuple(globals_.values()), tuple(members.values()))


@functools.cache
def _namespace(cls: type) -> Mapping[str, Any]:
    return vars(cls)  # every access makes another view; this one stands for the class


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the global and attribute names that code uses, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def is_torchs(module: str | None) -> bool:
    """Whether a module, by its name, belongs to torch."""
    return (module or "").split(".")[0] == "torch"


def _members(owners: list[Mapping[str, Any]], name: str) -> Iterator[types.FunctionType]:
    for owner in owners:
        member = owner.get(name)
        member = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(member, types.FunctionType):
            yield member


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty: the name is assigned later
            continue
