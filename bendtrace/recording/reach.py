"""What the code of a module's forward, or of a function, can read besides its arguments.

A static estimate, judging by the names that code uses, so that the globals, class attributes and
functions that a run could have read can be guarded without watching every read.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Reach", "is_torchs", "names_in", "place_naming", "reach_of"]

Named = tuple[Mapping[str, Any], str]


class Reach(NamedTuple):
    """What code can reach.

    Attributes:
        functions: methods, properties and plain functions, its own and others.
        globals: (namespace, name) of the globals that these name, also in other modules.
        members: (class namespace, name) of the class attributes and methods that they name.
        names: all names of globals and attributes in it.
        tells_numbers: whether some of it asks for the exact type of a number.
    """

    functions: tuple[types.FunctionType, ...]
    globals: tuple[Named, ...]
    members: tuple[Named, ...]
    names: frozenset[str]
    tells_numbers: bool


@functools.lru_cache(maxsize=1024)  # bounded: a function keeps what it closes over alive
def reach_of(subject: type | types.FunctionType) -> Reach:
    """Find what a module's class, through its forward, or a function can reach."""
    bases = subject.__mro__ if isinstance(subject, type) else ()
    owners = [_namespace(b) for b in bases if b is not object and not is_torchs(b.__module__)]
    functions: dict[int, types.FunctionType] = {}
    members: dict[tuple[int, str], Named] = {}
    globals_: dict[tuple[int, str], Named] = {}
    waiting: list[types.FunctionType] = []
    if isinstance(subject, types.FunctionType):
        waiting.append(subject)
    for owner in owners:
        for name in {"forward", "__call__"} & owner.keys():
            members[id(owner), name] = (owner, name)
            waiting += _function(owner[name])
    while waiting:
        function = waiting.pop()
        if id(function) in functions or is_torchs(function.__module__):
            continue
        functions[id(function)] = function
        waiting += [cell for cell in _cells(function) if isinstance(cell, types.FunctionType)]
        names = frozenset(names_in(function.__code__))
        spaces: list[Mapping[str, Any]] = [function.__globals__]
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and _is_users(value):
                spaces.append(vars(value))
        for space in spaces:
            for name in names & space.keys():
                if not isinstance(space[name], (type, types.ModuleType)):
                    globals_[id(space), name] = (space, name)
                    waiting += _function(space[name])
        for owner in owners:
            for name in names & owner.keys():
                if not isinstance(owner[name], (property, type, classmethod, staticmethod)):
                    members[id(owner), name] = (owner, name)
                waiting += _function(owner[name])
    codes = [function.__code__ for function in functions.values()]
    return Reach(
        tuple(functions.values()),
        tuple(globals_.values()),
        tuple(members.values()),
        frozenset(name for code in codes for name in names_in(code)),
        any(_tells_numbers(code) for code in codes),
    )


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the global and attribute names that code uses, nested functions included."""
    for inner in codes_in(code):
        yield from inner.co_names


def place_naming(name: str, functions: Iterable[types.FunctionType]) -> str:
    """Say where functions store to a name or, failing that, mention it; "" if they do not."""
    mention = ""
    for function in functions:
        line = 0
        for code in codes_in(function.__code__):
            for step in dis.get_instructions(code):
                line = step.starts_line or line
                if step.argval == name and isinstance(step.argval, str):
                    place = f"{code.co_filename}:{line}"
                    if step.opname.startswith(("STORE", "DELETE")):
                        return place
                    mention = mention or place
    return mention


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_torchs(module: str | None) -> bool:
    """Whether a module, by its name, belongs to torch."""
    return (module or "").split(".")[0] == "torch"


@functools.cache
def _namespace(cls: type) -> Mapping[str, Any]:
    return vars(cls)  # every access makes another view; this one stands for the class


def _is_users(module: types.ModuleType) -> bool:
    package = module.__name__.split(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names


def _function(member: Any) -> list[types.FunctionType]:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return [member] if isinstance(member, types.FunctionType) else []


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty: the name is assigned later
            continue


_NUMBERS = frozenset({"int", "float", "bool"})
_COMPARES = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP"})


def _tells_numbers(code: types.CodeType) -> bool:
    """Whether code compares `type(x)` with the type of a number."""
    if "type" in code.co_names and not _NUMBERS.isdisjoint(code.co_names):
        steps = list(dis.get_instructions(code))
        for position, step in enumerate(steps):
            if step.opname == "LOAD_GLOBAL" and step.argval == "type":
                # type(x) is int, type(x) in (int, float), int == type(x)
                near = steps[max(position - 3, 0) : position + 12]
                if any(s.opname in _COMPARES for s in near) and any(
                    s.opname == "LOAD_GLOBAL" and s.argval in _NUMBERS for s in near
                ):
                    return True
    return any(
        isinstance(constant, types.CodeType) and _tells_numbers(constant)
        for constant in code.co_consts
    )
