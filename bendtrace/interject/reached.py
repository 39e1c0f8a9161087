"""What the code of an insertion names, and what it holds under names of its own."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Container, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from bendtrace.environment.code_facts import cells_of, names_in
from bendtrace.environment.provenance import is_installed_file
from bendtrace.interject.contained import KNOWN, UNCALLED, is_contained
from bendtrace.interject.insertion import Function
from bendtrace.interject.interjection import Interjection
from bendtrace.tape.captured import PLAIN_TYPES

__all__ = ["Reached", "is_users", "reached_by", "stores_in"]


class Reached(NamedTuple):
    """What the code of one insertion reaches.

    Attributes:
        what: the insertion.
        codes: its code, and whether other code calls it: see `stores_in`.
        held: the containers, objects, modules and tensors that it holds, by identity.
        numbers: the globals with plain values that it names.
        is_contained: whether it can read nothing of the model but its arguments, unless the model
            has some of what it holds, too.
    """

    what: Interjection
    codes: Mapping[types.CodeType, bool]
    held: Mapping[int, Any]
    numbers: frozenset[str]
    is_contained: bool


def reached_by(what: Interjection, own: Container[int]) -> Reached:
    """Return what an insertion reaches.

    Args:
        what: the insertion.
        own: identities of the model's own modules, which do what they do.
    """
    codes: dict[types.CodeType, bool] = {}
    _add_codes(what, codes, set(), own, _DEPTH)
    holding = _Holding(own)
    holding.add(what, _DEPTH + 1)
    contained = isinstance(what, Function) and is_contained(what.function, own)
    return Reached(what, codes, holding.found, frozenset(holding.numbers), contained)


class _Holding:
    def __init__(self, own: Container[int]) -> None:
        self.found: dict[int, Any] = {}
        self.numbers: set[str] = set()
        self._own = own

    def add(self, thing: Any, depth: int) -> None:
        """Add what an insertion holds, and what can be reached from there."""
        if id(thing) in self.found or depth < 0 or isinstance(thing, _NOTHING_IN):
            return
        self.found[id(thing)] = thing
        if isinstance(thing, Tensor) or id(thing) in self._own:
            return
        inner: list[Any]
        if isinstance(thing, types.FunctionType):
            if is_installed_file(thing.__code__.co_filename) or not is_users(thing):
                return
            space, names = thing.__globals__, names_in(thing.__code__) & thing.__globals__.keys()
            self.numbers.update(name for name in names if type(space[name]) in PLAIN_TYPES)
            defaults = (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
            inner = [*map(space.get, names), *cells_of(thing), *defaults]
        elif isinstance(thing, types.MethodType):
            inner = [thing.__func__, thing.__self__]
        elif isinstance(thing, functools.partial):
            inner = [thing.func, thing.args, thing.keywords]
        elif isinstance(thing, (tuple, list, set, frozenset)):
            inner = list(islice(thing, _MOST))
        elif isinstance(thing, dict):
            inner = list(islice(thing.values(), _MOST))
        elif type(thing).__module__.startswith(_OURS) and not isinstance(thing, Interjection):
            return
        else:
            hook = getattr(getattr(thing, "handle", None), "hook_fn", None)
            inner = list(getattr(thing, "__dict__", {}).values())
            inner += [] if hook is None else [hook.function]
            for base in filter(is_users, type(thing).__mro__):
                inner += [v for name, v in vars(base).items() if name not in UNCALLED]
        for item in inner:
            self.add(item, depth - 1)


_NOTHING_IN = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType,
    types.BuiltinFunctionType,
)  # fmt: skip
_OURS = __name__.partition(".")[0] + "."
_MOST = 256  # items of a container


def _add_codes(
    thing: Any,
    codes: dict[types.CodeType, bool],
    seen: set[int],
    own: Container[int],
    depth: int,
    is_helper: bool = False,
) -> None:
    """Add the code of users that may run when something is called, and whether other code calls it.

    The first argument of a helper may be anything; that of the others is the insertion, or a value.
    """
    if id(thing) in seen or id(thing) in own or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, types.MethodType):
        _add_codes(thing.__func__, codes, seen, own, depth)
        _add_codes(thing.__self__, codes, seen, own, depth - 1)
    elif isinstance(thing, functools.partial):
        for item in (thing.func, *thing.args, *thing.keywords.values()):
            _add_codes(item, codes, seen, own, depth - 1)
    elif isinstance(thing, types.FunctionType):
        if is_installed_file(thing.__code__.co_filename) or not is_users(thing):
            return
        codes[thing.__code__] = is_helper
        space = thing.__globals__
        for name in names_in(thing.__code__):
            if callable(held := space.get(name)):
                _add_codes(held, codes, seen, own, depth - 1, True)
        for cell in thing.__closure__ or ():
            with suppress(ValueError):
                if callable(cell.cell_contents):
                    _add_codes(cell.cell_contents, codes, seen, own, depth - 1, True)
    elif isinstance(thing, type):
        for base in thing.__mro__:
            if is_users(base):
                for name, member in vars(base).items():
                    member = getattr(member, "__func__", member)
                    if name in UNCALLED:
                        continue
                    if isinstance(member, property):
                        _add_codes(member.fget, codes, seen, own, depth)
                    elif isinstance(member, types.FunctionType):
                        _add_codes(member, codes, seen, own, depth)
    elif not isinstance(thing, (Tensor, types.ModuleType)):
        _add_codes(type(thing), codes, seen, own, depth)
        hook = getattr(getattr(thing, "handle", None), "hook_fn", None)
        if hook is not None:
            _add_codes(hook.function, codes, seen, own, depth)
        for value in list(getattr(thing, "__dict__", {}).values()):
            for item in value if type(value) in (list, tuple) else (value,):
                if callable(item):
                    _add_codes(item, codes, seen, own, depth - 1)


def is_users(thing: Any) -> bool:
    """Whether a function or class is of no package that is known to keep to its arguments."""
    package = str(getattr(thing, "__module__", "")).split(".")[0]
    ours = package == __name__.partition(".")[0]
    return not ours and package not in KNOWN and package not in sys.stdlib_module_names


@functools.lru_cache(1024)
def stores_in(code: types.CodeType, is_helper: bool) -> tuple[frozenset[str], bool]:
    """Return the attributes and globals that code assigns, and whether it assigns items.

    Those of the first argument do not count, except in helpers.
    """
    found: set[str] = set()
    items, owner = False, None
    first = code.co_varnames[0] if code.co_argcount and not is_helper else ""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and owner != first:
            found.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found.add(step.argval)
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            items = True
        value = step.argval if step.opname.startswith("LOAD_FAST") else None
        owner = value[-1] if isinstance(value, tuple) else value
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            inner, also = stores_in(value, is_helper)
            found |= inner
            items = items or also
    return frozenset(found), items


_DEPTH = 3
