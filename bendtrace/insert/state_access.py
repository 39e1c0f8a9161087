"""Finds the state of a model that an insertion might use, by the names in its code."""

from __future__ import annotations

import collections
import dis
import functools
import re
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.insert.insertion import Function
from bendtrace.insert.interjection import Interjection
from bendtrace.insert.plan import InsertionPlan
from bendtrace.record.effects import assigned_in
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import PLAIN_TYPES, Access, Captured, CaptureKind, EnvironmentChange
from bendtrace.watch.code_facts import cells_of, codes_in, functions_of, names_in
from bendtrace.watch.functions import OpOverload
from bendtrace.watch.owners import module_tree
from bendtrace.watch.provenance import is_installed_file, is_installed_module


def read_and_changed(plan: InsertionPlan, recording: Recording) -> frozenset[str]:
    """Return the attributes that a run changes and an insertion might read: `self.count`.

    A replay changes attributes at its end, the model's own Python when it reaches the assignment;
    and what it assigns and puts back, a replay does not change at all. The reverse as well: what
    the run reads and an insertion might change.
    """
    if plan.reaches is None:
        whats = {id(entry.what): entry.what for entry in plan.entries}.values()
        plan.reaches = [
            reach_of_insertion(what, recording.environment.module_paths)
            for what in whats
            if not what.self_contained or getattr(what, "handle", None) is not None
        ]
    assert isinstance(plan.reaches, list)
    if not plan.reaches:
        return frozenset()
    run = _ModelStateAccess(recording)
    found = {label for reach in plan.reaches for label in run.shared_with(reach)}
    paths = {label.rpartition(".")[2] for label in found if "." in label}
    return frozenset(found - paths)  # a name alone says less than the path that ends in it


class _ModelStateAccess:
    """The state of the model that a run reads and changes."""

    def __init__(self, recording: Recording) -> None:
        environment = recording.environment
        self._changes = recording.changes
        self._functions = environment.functions
        parts = environment.parts
        self._labels = {part.label for part in parts if part.kind is CaptureKind.MODULE}
        self._parts = [part for part in parts if not part.is_argument]
        kinds = [
            type(part.value) if part.kind is CaptureKind.MODULE else part.type
            for part in self._parts
            if part.kind in (CaptureKind.MODULE, CaptureKind.OBJECT)
        ]
        self._members = _methods_of_kinds(kinds)

    def shared_with(self, reach: ReachedObjects) -> set[str]:
        """Return what the run changes and an insertion might read, and the reverse."""
        models = {code for several in self._members.values() for code in several}
        codes = {code: helps or code in models for code, helps in reach.codes.items()}
        waiting = list(codes)
        while waiting:
            for name in names_in(waiting.pop()):
                for code in self._members.get(name, ()):
                    if code not in codes:
                        waiting.append(code)
                    codes[code] = True
        aliases = {  # of what it holds under names of its own
            _part_name(part)
            for part in self._parts
            if self._is_container(part) and id(_now(part)) in reach.objects
        }
        found = self._changed_by(codes, aliases)
        if not reach.what.self_contained:
            found |= self._read_by(reach, codes, aliases)
        return found

    def _is_container(self, part: Captured) -> bool:
        """Return whether something is a container or object, not the attributes of a module."""
        return part.kind in _CONTAINERS and part.label not in self._labels

    def _is_itemized(self, part: Captured) -> bool:
        return part.kind is not CaptureKind.OBJECT and self._is_container(part)

    def _changed_by(self, codes: Mapping[types.CodeType, bool], aliases: set[str]) -> set[str]:
        """Return what the run read, and an insertion might change: a replay read it at its start.

        An insertion may assign attributes, globals and variables of functions around it, change
        items of what its code names or holds, or assign attributes whose names are not written out.
        """
        names: set[str] = set()
        cells: set[str] = set()
        used: set[str] = set()
        any_name = False
        for code, is_helper in codes.items():
            mine = names_in(code)
            assigned, changes = stores_in(code, is_helper)
            names |= assigned
            if mine & {"train", "eval"}:
                names.add("training")
            if changes or mine & _CHANGING:
                used |= mine | aliases
            any_name = any_name or bool(mine & _ASSIGNING)
            for inner in codes_in(code):
                cells |= _facts_of(inner)[0] & set(code.co_freevars)
        if not (names or cells or used or any_name):
            return set()
        found = set()
        for part in self._parts:
            name = _part_name(part)
            if name in names or (name in used and self._is_container(part)):
                found.add(part.label)
            elif part.access is Access.CELL and name in cells:
                found.add(part.label)
            elif any_name and "." in part.label:
                found.add(part.label)
        return found

    def _read_by(
        self, reach: ReachedObjects, codes: Iterable[types.CodeType], aliases: set[str]
    ) -> set[str]:
        """Return what the run changes, or changes for a while, and an insertion might read."""
        found: set[str] = set()
        if self._changes and not (reach.is_plain and not self._changes_reached(reach)):
            found = {change.label for change in self._changes}
        read = aliases | reach.numbers
        assigned, changed = self._assigned
        if not (assigned or changed):
            return found
        named = frozenset().union(*map(names_in, codes))
        if not reach.is_contained:
            read |= named | {"training"}
        for part in self._parts:
            module = part.value
            if part.kind is not CaptureKind.MODULE:
                continue
            is_reached = id(module) in reach.objects
            if is_reached and type(module).__module__.startswith("torch.nn."):
                read |= vars(module).keys()
            elif not reach.is_contained and (is_reached or _part_name(part) in named):
                read.update(_names_in_forward(type(module)))
        is_any = not (reach.is_contained or named.isdisjoint(ANY))
        for part in self._parts:
            name = _part_name(part)
            if (name in assigned or (name in changed and self._is_itemized(part))) and (
                name in read or is_any
            ):
                found.add(part.label)
        return found | (read & assigned)

    def _changes_reached(self, reach: ReachedObjects) -> bool:
        """Return whether the run changes something that an insertion holds itself."""
        reached = {
            *reach.objects,
            *(id(vars(t)) for t in reach.objects.values() if hasattr(t, "__dict__")),
        }
        return any(
            id(_now(change.part)) in reached
            or (change.part.label == "globals" and change.key in reach.numbers)
            or (change.part.is_argument and self._is_reached_argument(change, reach))
            for change in self._changes
        )

    @staticmethod
    def _is_reached_argument(change: EnvironmentChange, reach: ReachedObjects) -> bool:
        return any(type(thing) is change.part.type for thing in reach.objects.values())

    @functools.cached_property
    def _assigned(self) -> tuple[set[str], set[str]]:
        """The names that users' code of the run assigns, and those whose items it may change."""
        assigned: set[str] = set()
        changed: set[str] = set()
        for function in self._functions:
            if function.__name__ in _MAKING or is_installed_file(function.__code__.co_filename):
                continue
            for code in codes_in(function.__code__):
                stored, changes = _facts_of(code)
                assigned |= stored
                if not {"train", "eval"}.isdisjoint(code.co_names):
                    assigned.add("training")
                if changes:
                    changed.update(code.co_names, code.co_freevars)
        return assigned, changed


_facts_of = functools.lru_cache(4096)(assigned_in)


def _methods_of_kinds(kinds: Iterable[type]) -> dict[str, list[types.CodeType]]:
    """Return the users' code of the methods of some classes, by name."""
    found: dict[str, list[types.CodeType]] = {}
    bases = dict.fromkeys(base for kind in dict.fromkeys(kinds) for base in kind.__mro__)
    for cls in bases:
        if not has_users_code(cls) or is_installed_module(cls.__module__):
            continue
        for name, member in vars(cls).items():
            for function in functions_of(member):
                if not is_installed_file(function.__code__.co_filename):
                    found.setdefault(name, []).append(function.__code__)
    return found


def _names_in_forward(cls: type) -> Iterator[str]:
    for base in filter(has_users_code, cls.__mro__):
        for function in functions_of(vars(base).get("forward")):
            if not is_installed_file(function.__code__.co_filename):
                yield from names_in(function.__code__)


def _part_name(part: Captured) -> str:
    return _last_name(part.label)


@functools.lru_cache(1 << 14)
def _last_name(label: str) -> str:
    last = label.rpartition(".")[2]
    if last.isidentifier():
        return last
    found = _LAST_NAME.search(label)
    return "" if found is None else found[1]


def _now(part: Captured) -> Any:
    """Return the current value of something; None if there is none, or it is of a call."""
    try:
        return None if part.is_argument else part.read(())
    except (LookupError, AttributeError, TypeError):
        return None


_LAST_NAME = re.compile(r"([A-Za-z_]\w*)(?:\[[^.]*\])*$")
_CONTAINERS = (
    CaptureKind.LIST, CaptureKind.DICT, CaptureKind.SET, CaptureKind.LARGE, CaptureKind.ARRAY,
    CaptureKind.OPEN_ARRAY, CaptureKind.OBJECT, CaptureKind.GROWING,
)  # fmt: skip
_CHANGING = frozenset(
    {
        "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
        "reverse", "setdefault", "sort", "update",
    }
)  # fmt: skip
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})  # assign to new objects


# What the code of an insertion names, and what it holds under names of its own.


class ReachedObjects(NamedTuple):
    """The objects that the code of one insertion reaches."""

    what: Interjection
    codes: Mapping[types.CodeType, bool]  # its code, and whether other code calls it (`stores_in`)
    objects: Mapping[int, Any]  # containers, objects, modules and tensors it holds, by identity
    numbers: frozenset[str]  # the globals with plain values that it names
    # True if it can read nothing of the model but its arguments, unless the model has some of what
    # it holds, too.
    is_contained: bool
    is_plain: bool  # whether it could not by what it holds at present, which may change


def reach_of_insertion(what: Interjection, own: Container[int]) -> ReachedObjects:
    """Return what an insertion reaches.

    The identities of the model's own modules are given, which do what they do.
    """
    codes: dict[types.CodeType, bool] = {}
    _add_codes(what, codes, set(), own, _DEPTH)
    holding = _Holding(own)
    holding.add(what, _DEPTH + 1)
    code = what.function if isinstance(what, Function) else what
    search = _PlainScan(own)
    is_plain = not type(code).__module__.startswith(_OURS) and _holds_only_plain(code, search)
    contained = is_plain and not search.may_change
    return ReachedObjects(
        what, codes, holding.found, frozenset(holding.numbers), contained, is_plain
    )


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
            if is_installed_file(thing.__code__.co_filename) or not has_users_code(thing):
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
            for base in filter(has_users_code, type(thing).__mro__):
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

    The first argument of a helper may be anything; other functions get the insertion or a value.
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
        if is_installed_file(thing.__code__.co_filename) or not has_users_code(thing):
            return
        codes[thing.__code__] = is_helper
        space = thing.__globals__
        for name in names_in(thing.__code__):
            if callable(global_value := space.get(name)):
                _add_codes(global_value, codes, seen, own, depth - 1, True)
        for cell in thing.__closure__ or ():
            with suppress(ValueError):
                if callable(cell.cell_contents):
                    _add_codes(cell.cell_contents, codes, seen, own, depth - 1, True)
    elif isinstance(thing, type):
        for base in thing.__mro__:
            if has_users_code(base):
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


def has_users_code(thing: Any) -> bool:
    """Return whether no package that is known to keep to its arguments has a function or class."""
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


# Whether what is inserted can read anything of a model but its arguments.

# With these, code can read an attribute without writing out its name.
ANY = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec", "globals"}
)
# `at.module` is a part of the model.
_LEADS_TO_THE_MODEL = ANY | {"module"}


def is_contained(function: Any, own: Container[int] | None = None) -> bool:
    """Return whether code, or a called object, can read nothing of the model but its arguments.

    The identities of the model's own modules may be unknown.
    """
    return _holds_only_plain(function, _PlainScan(own))


class _PlainScan:
    """The objects that a search has scanned, and the model's own modules."""

    def __init__(self, own: Container[int] | None) -> None:
        self.seen: set[int] = set()
        self.own = own
        self.may_change: bool = False  # whether something can come to hold other objects


def _holds_only_plain(thing: Any, search: _PlainScan) -> bool:
    """Return whether an object leads only to tensors, numbers and torch's own functions."""
    if id(thing) in search.seen:
        return True
    search.seen.add(id(thing))
    if isinstance(thing, (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if isinstance(thing, types.ModuleType):
        return thing.__name__.split(".")[0] in KNOWN
    if isinstance(thing, type):
        return thing.__module__.split(".")[0] in KNOWN
    if isinstance(thing, nn.Module):
        return all(_is_plain_module(inner, search) for inner in module_tree(thing))
    if isinstance(thing, Interjection):
        search.may_change = True
        search.seen.update(map(id, type(thing).__mro__))  # their methods are searched here
        values = [*vars(thing).values(), *_members_of(type(thing), _OURS)]
        return all(_holds_only_plain(value, search) for value in values)
    if isinstance(thing, types.MethodType):
        return _holds_only_plain(thing.__func__, search) and _holds_only_plain(
            thing.__self__, search
        )
    if isinstance(thing, functools.partial):
        return all(
            _holds_only_plain(t, search)
            for t in (thing.func, *thing.args, *thing.keywords.values())
        )
    if isinstance(thing, (tuple, list)) or type(thing) in (dict, set, frozenset, collections.deque):
        search.may_change |= not isinstance(thing, (tuple, frozenset))
        items = chain(thing, thing.values()) if isinstance(thing, dict) else thing
        return all(_holds_only_plain(item, search) for item in items)
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").split(".")[0] in KNOWN:
            return True
        names = names_in(thing.__code__)
        if names & _LEADS_TO_THE_MODEL:
            return False
        space = thing.__globals__
        found = [space[name] for name in names if name in space]
        try:
            found += [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # a name that is assigned only later
            return False
        search.may_change |= any(value is None for value in found)
        found += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return all(_holds_only_plain(item, search) for item in found)
    return isinstance(thing, (types.BuiltinFunctionType, OpOverload))


def _is_plain_module(module: nn.Module, search: _PlainScan) -> bool:
    """Return the same for a module itself: its methods, and attributes other than its parts."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module).__module__.startswith("torch.nn."):
        return True
    if search.own is None or id(module) in search.own:
        return False
    values = [value for name, value in vars(module).items() if name not in _TABLES]
    values += _members_of(type(module), "torch.nn.")
    return all(_holds_only_plain(value, search) for value in values)


def _members_of(kind: type, package: str) -> Iterator[Any]:
    """Yield the functions and values of a class, but for its bases in some package."""
    for cls in kind.__mro__:
        if cls.__module__.startswith(package) or cls is object:
            continue
        for name, member in vars(cls).items():
            if isinstance(member, property):
                yield from (member.fget, member.fset)
            elif name not in UNCALLED:
                yield getattr(member, "__func__", member)


_TABLES = frozenset(vars(nn.Module()))
# Attributes that are not called by calling a module, and those of every class.
UNCALLED = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__static_attributes__", "__weakref__", "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip
KNOWN = frozenset(
    {
        "builtins", "collections", "functools", "itertools", "json", "math", "numpy", "operator",
        "random", "re", "statistics", "time", "torch",
    }
)  # fmt: skip
