"""What of a model an insertion might read or change, judged by the names in its code."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.environment.code_facts import names_in
from bendtrace.environment.provenance import is_installed_file
from bendtrace.interject.insertion import Function
from bendtrace.interject.interjection import Interjection
from bendtrace.interject.plan import Plan
from bendtrace.recording.recorder import Recording
from bendtrace.tape.captured import CaptureKind

__all__ = ["is_contained", "read_and_changed"]

# With these, code can read an attribute without writing out its name.
_ANY = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec", "globals"}
)


def read_and_changed(plan: Plan, recording: Recording) -> frozenset[str]:
    """Return the attributes that a run changes and an insertion might read: `self.count`.

    A replay changes attributes at its end, the model's own Python when it reaches the assignment.
    The reverse as well: what the run reads and an insertion might change.
    """
    whats = {id(entry.what): entry.what for entry in plan.entries}.values()
    own = recording.environment.module_paths
    found = _changed_by(plan, whats, recording)
    changed = {change.label for change in recording.changes}
    if changed and not all(what.self_contained or _is_contained(what, own) for what in whats):
        found |= changed
    return frozenset(found)


class _Stores(NamedTuple):
    """What the code of some insertions might change.

    Attributes:
        names: the attributes and globals that it assigns.
        used: the names of code that changes items of something.
        any: whether it might assign attributes whose names are not written out.
    """

    names: set[str]
    used: set[str]
    any: bool


def _changed_by(plan: Plan, whats: Iterable[Interjection], recording: Recording) -> set[str]:
    """Return what a run read, and an insertion might change: a replay read it at its start."""
    if plan.stores is None:
        codes: dict[types.CodeType, bool] = {}
        seen = set(recording.environment.module_paths)  # the model's own modules do what they do
        for what in whats:
            if not what.self_contained or getattr(what, "handle", None) is not None:
                _add_codes(what, codes, seen, _DEPTH)
        plan.stores = _stores_of(codes)
    stores = plan.stores
    assert isinstance(stores, _Stores)
    if not (stores.names or stores.used or stores.any):
        return set()
    found = set()
    parts = recording.environment.parts
    modules = {part.label for part in parts if part.kind is CaptureKind.MODULE}
    for part in parts:
        if part.is_argument:
            continue
        attribute = _LAST_NAME.search(part.label)
        name = "" if attribute is None else attribute[1]
        holds = part.kind in _CONTAINERS and part.label not in modules
        if name in stores.names or (holds and name in stores.used):
            found.add(part.label)
        elif stores.any and "." in part.label:
            found.add(part.label)
    return found


def _add_codes(
    thing: Any,
    codes: dict[types.CodeType, bool],
    seen: set[int],
    depth: int,
    is_helper: bool = False,
) -> None:
    """Add the code of users that may run when something is called, and whether other code calls it.

    The first argument of a helper may be anything; that of the others is the insertion, or a value.
    """
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, types.MethodType):
        _add_codes(thing.__func__, codes, seen, depth)
        _add_codes(thing.__self__, codes, seen, depth - 1)
    elif isinstance(thing, functools.partial):
        for item in (thing.func, *thing.args, *thing.keywords.values()):
            _add_codes(item, codes, seen, depth - 1)
    elif isinstance(thing, types.FunctionType):
        if is_installed_file(thing.__code__.co_filename) or not _is_users(thing):
            return
        codes[thing.__code__] = is_helper
        space = thing.__globals__
        for name in names_in(thing.__code__):
            if callable(held := space.get(name)):
                _add_codes(held, codes, seen, depth - 1, True)
        for cell in thing.__closure__ or ():
            with suppress(ValueError):
                if callable(cell.cell_contents):
                    _add_codes(cell.cell_contents, codes, seen, depth - 1, True)
    elif isinstance(thing, type):
        for base in thing.__mro__:
            if _is_users(base):
                for name, member in vars(base).items():
                    member = getattr(member, "__func__", member)
                    if name in _UNCALLED:
                        continue
                    if isinstance(member, property):
                        _add_codes(member.fget, codes, seen, depth)
                    elif isinstance(member, types.FunctionType):
                        _add_codes(member, codes, seen, depth)
    elif not isinstance(thing, (Tensor, types.ModuleType)):
        _add_codes(type(thing), codes, seen, depth)
        hook = getattr(getattr(thing, "handle", None), "hook_fn", None)
        if hook is not None:
            _add_codes(hook.function, codes, seen, depth)
        for value in list(getattr(thing, "__dict__", {}).values()):
            for item in value if type(value) in (list, tuple) else (value,):
                if callable(item):
                    _add_codes(item, codes, seen, depth - 1)


def _is_users(thing: Any) -> bool:
    package = str(getattr(thing, "__module__", "")).split(".")[0]
    ours = package == __name__.partition(".")[0]
    return not ours and package not in _KNOWN and package not in sys.stdlib_module_names


def _stores_of(codes: Mapping[types.CodeType, bool]) -> _Stores:
    names: set[str] = set()
    used: set[str] = set()
    is_any = False
    for code, is_helper in codes.items():
        mine = names_in(code)
        assigned, changes = _assigned_in(code, is_helper)
        names |= assigned
        if mine & {"train", "eval"}:
            names.add("training")
        if changes or mine & _CHANGING:
            used |= mine
        is_any = is_any or bool(mine & _ASSIGNING)
    return _Stores(names, used, is_any)


@functools.lru_cache(1024)
def _assigned_in(code: types.CodeType, is_helper: bool) -> tuple[frozenset[str], bool]:
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
            inner, also = _assigned_in(value, is_helper)
            found |= inner
            items = items or also
    return frozenset(found), items


def _is_contained(what: Interjection, own: Container[int]) -> bool:
    return isinstance(what, Function) and is_contained(what.function, own)


def is_contained(function: Any, own: Container[int] | None = None) -> bool:
    """Return whether a function, or a module, can read nothing of the model but its arguments.

    Args:
        function: the function.
        own: identities of the model's own modules; None if unknown.
    """
    return _is_plain(function, _Search(own))


class _Search:
    """What has been scanned already, and the model's own modules."""

    def __init__(self, own: Container[int] | None) -> None:
        self.seen: set[int] = set()
        self.own = own


def _is_plain(thing: Any, search: _Search) -> bool:
    """Return whether an object leads only to tensors, numbers and torch's own functions."""
    if id(thing) in search.seen:
        return True
    search.seen.add(id(thing))
    if isinstance(thing, (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if isinstance(thing, types.ModuleType):
        return thing.__name__.split(".")[0] in _KNOWN
    if isinstance(thing, type):
        return thing.__module__.split(".")[0] in _KNOWN
    if isinstance(thing, nn.Module):
        return all(_is_plain_module(inner, search) for inner in thing.modules())
    if isinstance(thing, types.MethodType):
        return _is_plain(thing.__func__, search) and _is_plain(thing.__self__, search)
    if isinstance(thing, functools.partial):
        return all(
            _is_plain(t, search) for t in (thing.func, *thing.args, *thing.keywords.values())
        )
    if isinstance(thing, (tuple, list)):
        return all(_is_plain(item, search) for item in thing)
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").split(".")[0] in _KNOWN:
            return True
        names = names_in(thing.__code__)
        if names & _ANY:
            return False
        space = thing.__globals__
        found = [space[name] for name in names if name in space]
        try:
            found += [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # a name that is assigned only later
            return False
        found += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return all(_is_plain(item, search) for item in found)
    return isinstance(thing, (types.BuiltinFunctionType, torch._ops.OpOverload))


def _is_plain_module(module: nn.Module, search: _Search) -> bool:
    """Return the same for a module itself: its methods, and attributes other than its parts."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module).__module__.startswith("torch.nn."):
        return True
    if search.own is None or id(module) in search.own:
        return False
    held = [value for name, value in vars(module).items() if name not in _TABLES]
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") or cls is object:
            continue
        for name, member in vars(cls).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            elif isinstance(member, property):
                held += [member.fget, member.fset]
                continue
            if name not in _UNCALLED:
                held.append(member)
    return all(_is_plain(value, search) for value in held)


_DEPTH = 3
_LAST_NAME = re.compile(r"([A-Za-z_]\w*)(?:\[[^.]*\])*$")
_CONTAINERS = (
    CaptureKind.LIST, CaptureKind.DICT, CaptureKind.SET, CaptureKind.LARGE, CaptureKind.ARRAY,
    CaptureKind.OBJECT,
)  # fmt: skip
_CHANGING = frozenset(
    {
        "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
        "reverse", "setdefault", "sort", "update",
    }
)  # fmt: skip
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_TABLES = frozenset(vars(nn.Module()))
# Attributes that are not called by calling a module, and those of every class.
_UNCALLED = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__static_attributes__", "__weakref__", "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip
_KNOWN = frozenset({"torch", "math", "builtins", "operator"})
