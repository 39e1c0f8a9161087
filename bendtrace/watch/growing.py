"""Lists and deques that a run only adds to, so that what is in them does not matter."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import pickle
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.python.usage import ADDS, names_used, only_adds
from bendtrace.tape.captured import Access, Captured, CaptureKind, module_name_of
from bendtrace.watch.code_facts import codes_in, other_names_in
from bendtrace.watch.executed import key_of
from bendtrace.watch.findings import ScanResult
from bendtrace.watch.provenance import is_finished, is_installed_module, is_torchs, is_users_class


def growing_in(found: ScanResult) -> dict[int, Any]:
    """Return the lists and deques, by identity, that code only adds to, or does not name at all.

    Whether it reads them is judged by the names in all code that the model can reach; where some
    may read one, by what earlier runs did (`note_added`). Each must have one name only, in an
    object whose code is the user's.

    Args:
        found: what a scan has found.
    """
    if found.computes or not found.names.isdisjoint(READING):
        return {}
    candidates = [part for part in found.parts if _can_grow(part)]
    if found.names.isdisjoint(ADDS):
        candidates = [part for part in candidates if access_name(part) not in found.names]
    if not candidates:
        return {}
    otherwise = {name for one in found.functions for name in other_names_in(one)}
    if not otherwise.isdisjoint(READING) or any(id(one.value) in _READERS for one in found.parts):
        return {}
    codes = [code for one in found.functions for code in codes_in(one.__code__)]
    known = _known_methods(found.function)
    tied = {part.value.index for part in found.parts if part.kind is CaptureKind.ALIAS}
    owners = owners_in(found)
    for part in found.parts:
        if part.index in tied:  # what holds it is known by another name, too
            tied.update(_ancestors(part))
    growing = {
        part.index: part.value
        for part in candidates
        if part.index not in tied
        and (known[access_name(part)] >= _OFTEN or not is_read(part, codes, otherwise))
        and is_known_to_user_only(part, owners, found)
    }
    # Nobody looks into these, so the lists in them are no parts of their own.
    inside = {part.index for part in candidates if not growing.keys().isdisjoint(_ancestors(part))}
    return {id(value): value for index, value in growing.items() if index not in inside}


def is_read(
    part: Captured, codes: Iterable[types.CodeType], otherwise: Container[str] = ()
) -> bool:
    """Return whether code does more with a list or deque than to add to it.

    Args:
        part: the list or deque.
        codes: the code.
        otherwise: names that are used otherwise than by instructions.
    """
    name = access_name(part)
    reading = [code for code in codes if name in names_used(code)]
    if name in otherwise:
        return True
    return bool(reading) and not all(only_adds(code, name, _keys_of(part)) for code in reading)


def _keys_of(part: Captured) -> list[Any]:
    """Return the keys by which code gets from what it names to a part, the outermost first.

    A class of one's own may look its keys up in another way.
    """
    root, keys = _root_of(part), []
    while part is not root and part.parent is not None:
        keys.append(part.key if part.parent.type in _LOOKING_UP_EXACTLY else None)
        part = part.parent
    return keys[::-1]


def owners_in(found: ScanResult) -> dict[int, type]:
    """Return the types of modules and other objects, by the identity of their dicts."""
    return {
        id(vars(part.value)): part.type
        for part in found.parts
        if part.kind is CaptureKind.MODULE
        or (part.kind is CaptureKind.IDENTITY and _has_attributes(part.value))
    }


def note_added(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Note that a run of a model has added to what has some names, and read nothing of it."""
    with suppress(TypeError):
        _known.setdefault(key_of(function), Counter()).update(names)


def _known_methods(function: Callable[..., Any]) -> Counter[str]:
    try:
        return _known.get(key_of(function), Counter())
    except TypeError:  # not hashable, or there can be no weak references to it
        return Counter()


_known: MutableMapping[Any, Counter[str]] = WeakIdKeyDictionary()
_OFTEN = 2


def additions_to(before: list[Any], now: Any) -> list[Any] | None:
    """Return what was added to a list or deque; None if that is not certain.

    Args:
        before: its items then.
        now: the list or deque; a full deque may have let go of items.
    """
    items = list(now)
    if len(items) < len(before) or is_full(now):
        return None
    if any(map(operator.is_not, before, items)):
        return None
    return items[len(before) :]


def is_full(value: Any) -> bool:
    """Return whether adding something to a list or deque removes another item."""
    return type(value) is collections.deque and len(value) == value.maxlen


def _has_attributes(value: Any) -> bool:
    """Return whether an object has a dict; asking a partial function for its own would make one."""
    return bool(type(value).__dictoffset__) and not isinstance(value, functools.partial)


def _can_grow(part: Captured) -> bool:
    if part.is_argument or part.access is Access.FIXED:
        return False
    is_list = part.type in (list, collections.deque) and part.kind in _LISTS
    return is_list and not is_full(part.value)


_LOOKING_UP_EXACTLY = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = (CaptureKind.LIST, CaptureKind.LARGE, CaptureKind.GROWING)


def _ancestors(part: Captured) -> Iterator[int]:
    while part.parent is not None:
        part = part.parent
        yield part.index


def _root_of(part: Captured) -> Captured:
    """Return what code names to reach a part: what has items in which the part is."""
    while (
        part.access is Access.ITEM
        and part.parent is not None
        and part.parent.access is not Access.FIXED
    ):
        part = part.parent
    return part


def nesting_level(part: Captured) -> int:
    """Return how many items of items lie between what code names and a part."""
    root, level = _root_of(part), 0
    while part is not root and part.parent is not None:
        part, level = part.parent, level + 1
    return level


def access_name(part: Captured) -> str:
    """Return the name by which code reaches a part, or what has items in which the part is."""
    root = _root_of(part)
    return root.label if root.access is Access.CELL else str(root.key)


def is_known_to_user_only(part: Captured, owners: dict[int, type], found: ScanResult) -> bool:
    """Return whether only code of the user's knows the name of a part."""
    root = _root_of(part)
    holder = root.parent
    if holder is None:
        return False
    if root.access is Access.CELL:
        having = [f for f in found.functions if holder.value in (f.__closure__ or ())]
        return bool(having) and not any(map(is_finished, having))
    if holder.access is not Access.FIXED:
        return holder.kind is CaptureKind.OBJECT and _is_users_kind(holder.type)
    if holder.kind is CaptureKind.DICT:
        owner = owners.get(id(holder.value))
        return owner is not None and _is_users_kind(owner)
    is_space = type(holder.value) is dict
    return is_space and not is_installed_module(holder.value.get("__name__"))


def _is_users_kind(kind: type) -> bool:
    bases = (base for base in kind.__mro__ if base not in (object, types.SimpleNamespace))
    return all(is_users_class(base) or is_torchs(module_name_of(base)) for base in bases)


# What may read a container that it does not name.
READING = frozenset(
    {
        "copy", "deepcopy", "__copy__", "__deepcopy__", "pickle", "dumps", "asdict", "astuple",
        "vars", "locals", "dir", "eval", "exec", "__dict__", "__getstate__", "__reduce__",
        "__reduce_ex__", "__self__", "__match_args__", "getmembers", "get_referents",
        "get_referrers", "get_objects",
    }
)  # fmt: skip
_READERS = frozenset(
    map(id, (copy.copy, copy.deepcopy, dataclasses.asdict, dataclasses.astuple, pickle.dumps, vars))
)
