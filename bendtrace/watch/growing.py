"""Lists and deques that a run only adds to, so that what is in them does not matter.

Also judges by the instructions of code what it does with containers.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import pickle
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.python.bytecode import (
    CONSTANTS,
    InstructionStep,
    cache_by_code,
    constant_of,
    loads_method,
    single_steps,
)
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
        and (known[name_and_keys(part)] >= _OFTEN or not is_read(part, codes, otherwise))
        and is_known_to_user_only(part, owners, found)
    }
    # Nobody looks into these, so the lists in them are no parts of their own.
    inside = {part.index for part in candidates if not growing.keys().isdisjoint(_ancestors(part))}
    return {id(value): value for index, value in growing.items() if index not in inside}


def is_read(part: Captured, codes: Iterable[CodeType], otherwise: Container[str] = ()) -> bool:
    """Return whether code does more with a list or deque than to add to it.

    Args:
        part: the list or deque.
        codes: the code.
        otherwise: names that are used otherwise than by instructions.
    """
    name, keys = access_name(part), keys_of(part)
    if name in otherwise:
        return True
    # Also where code only adds to what the name leads to: that may be in the part, or around it.
    naming = (
        code
        for code in codes
        if name in code.co_names or name in names_used(code)
        or name in code.co_freevars + code.co_cellvars
    )  # fmt: skip
    return not all(only_adds(code, name, keys) for code in naming)


def keys_of(part: Captured) -> list[Any]:
    """Return the keys by which code gets from what it names to a part, the outermost first.

    A class of the user's may look its keys up in another way.
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


def name_and_keys(part: Captured) -> tuple[str, tuple[Any, ...]]:
    """Return the name by which code reaches a part, with the keys that lead from there to it."""
    return access_name(part), tuple(keys_of(part))


def note_added(function: Callable[..., Any], parts: Iterable[Captured]) -> None:
    """Note that a run of a model has added to some parts, and read nothing of them."""
    with suppress(TypeError):
        _known.setdefault(key_of(function), Counter()).update(map(name_and_keys, parts))


def _known_methods(function: Callable[..., Any]) -> Counter[Any]:
    try:
        return _known.get(key_of(function), Counter())
    except TypeError:  # not hashable, or there can be no weak references to it
        return Counter()


_known: MutableMapping[Any, Counter[Any]] = WeakIdKeyDictionary()
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


# What code does with containers: whether it only adds to them, judging by its instructions.

# Methods that add to a list or deque, and say nothing of what is in it.
ADDS = frozenset({"append", "extend"})


@cache_by_code
def names_used(code: CodeType) -> set[str]:
    """Return the names under which code uses something in another way than to add to it.

    These are names of attributes, globals and variables of functions around it. In
    `self.seen["x"].append(y)`, nothing but an item of what `seen` stands for is added to. Texts
    in the code count as names: code may look them up.

    Args:
        code: the code, without the functions in it.
    """
    steps = single_steps(code)
    names = {step.value for at, step in enumerate(steps) if _is_read(steps, at)}
    return names.union(_texts_in(code.co_consts))


def hands_over(
    code: CodeType, name: str, level: int, functions: Container[str] = ("len",),
    holds: bool = False, keys: Sequence[Any] = (),
) -> bool:  # fmt: skip
    """Return whether code does more with a container than to operate on it.

    Its methods and operators may be called, and some functions. It may not be passed to anything
    else, kept or returned: code that asks for its type, or reads its memory, might receive it.
    With `holds`, the same is true of an item, which code has by its key.

    Args:
        code: the code, without the functions in it.
        name: the attribute, global or variable of a function around it that leads to the container.
        level: how many items of items lie between.
        functions: the names of builtins that may receive it.
        holds: whether it may have containers in it.
        keys: the keys of the items that lie between, the outermost first, if they are known; None
            for one that code may write in another way.
    """
    if name in _texts_in(code.co_consts):
        return True
    if name not in code.co_names and name not in code.co_freevars + code.co_cellvars:
        return False
    return _Operating(code, name, keys, functions, holds).hands_over(name, level)


def only_adds(code: CodeType, name: str, keys: Sequence[Any]) -> bool:
    """Return whether code does nothing with a list or deque but add to it.

    Code may look up what the list is in, and other things there: `m = self.metrics["train"]`,
    then `m["losses"].append(x)` and `m["calls"] += 1`.

    Args:
        code: the code, without the functions in it.
        name: the attribute, global or variable of a function around it that leads to the list.
        keys: the keys of the items that lie between, the outermost first; None for one that code
            may write in another way.
    """
    if name in _texts_in(code.co_consts):
        return False
    return not _Adding(code, name, keys).hands_over(name, len(keys))


class _Operating:
    """Follows a container on the stack, from where code loads it (see `hands_over`)."""

    def __init__(
        self, code: CodeType, name: str, keys: Sequence[Any], functions: Container[str] = ("len",),
        holds: bool = False,
    ) -> None:  # fmt: skip
        self._code, self._name, self._keys = code, name, keys
        self._functions, self._holds = functions, holds
        self._steps = single_steps(code)
        self._variables: set[tuple[str, int]] = set()

    def hands_over(self, name: str, level: int) -> bool:
        self._level = level
        for at, step in enumerate(self._steps):
            if step.value != name or step.name.endswith("_FAST") or step.name in _IDLE:
                continue
            if step.name.startswith("STORE_"):
                continue  # another container, which the next run finds
            if step.name not in _LOADS or self._is_lost(at, level):
                return True
        return False

    def _is_lost(self, at: int, level: int) -> bool:
        """Return whether the container that an instruction loads gets where it is not followed."""
        # What is on the stack: the levels of containers, None for others, and names of functions.
        stack: list[Any] = [*self._function_before(at), level]
        for step in self._steps[at + 1 :]:
            if not any(map(_leads_on, stack)):
                return False
            name = "BINARY_SUBSCR" if _is_subscript(step) else step.name
            count = step.argument or 0
            if name == "KW_NAMES":
                continue
            if name == "STORE_FAST":
                kept = stack.pop()
                if (type(kept) is _StackMethod and _leads_on(kept)) or kept == _VIEW:
                    return True
                if type(kept) is int and self._is_variable_lost(step.value, kept):
                    return True
            elif name in CONSTANTS:
                stack.append(_StackConstant(constant_of(self._code, step.name, count)))
            elif name in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF"):
                stack.append(step.value if step.value in self._functions else None)
            elif name == "COPY" and count <= len(stack):
                stack.append(stack[-count])
            elif name == "STORE_ATTR" and stack[-2:-1] == [0] and self._stays(step):
                del stack[-2:]
            elif name == "SWAP":
                stack[:0] = [None] * (count - len(stack))
                stack[-1], stack[-count] = stack[-count], stack[-1]
            elif name in _TAKING or name in _BUILDING:
                takes = _TAKING.get(name, count * (1 + (name == "BUILD_MAP")) + (name == "CALL"))
                taken = [*[None] * (takes - len(stack)), *stack[max(len(stack) - takes, 0) :]]
                del stack[max(len(stack) - takes, 0) :]
                # What is operated on is the last, or the last but one in front of a key.
                place = -1 if takes == 1 or name == "CONTAINS_OP" else -2
                place -= name in _SLICING
                own = taken.pop(place) if takes and name in _TAKING else None
                if name == "CALL" and type(taken[0]) is str and takes == 2:
                    if self._may_ask(taken[1]) and (taken[0] == "len" or taken[1] in _AT_THE_END):
                        taken.pop()
                if name == "CALL" and type(taken[0]) is _StackMethod:
                    own = taken.pop(0)
                if any(map(_leads_on, taken)):
                    return True
                if type(own) in (int, _StackMethod) and not self._may(step, name, own):
                    return True
                if name not in _GIVING_NOTHING:
                    stack.append(self._result(step, name, own, taken))
            elif _is_test_instruction(name):
                if not (self._may_ask(stack.pop()) or name == "POP_TOP"):
                    return True
                if any(type(one) is int for one in stack):
                    return True
            else:
                return True
        return True

    def _may_ask(self, one: Any) -> bool:
        """Return whether code may ask for the length, or the truth, of what is on the stack."""
        return True

    def _stays(self, step: InstructionStep) -> bool:
        """Return whether code assigns a container to where it has it from."""
        return self._level == 0 and bool(step.value == self._name)

    def _may(self, step: InstructionStep, name: str, own: Any) -> bool:
        """Return whether code may do an instruction to a container of some level."""
        if type(own) is int and own > 0:  # what it is in: to have its items, or its keys
            return name in _OF_HOLDERS or (loads_method(step) and step.value in _LOOKING_UP)
        return own != 0 or loads_method(step) or step.value not in VIEWS

    def _result(self, step: InstructionStep, name: str, own: Any, taken: Sequence[Any]) -> Any:
        """Return what an instruction leaves on the stack: a level, or None."""
        if own in (0, _ITEM) and _extends(step):
            return own
        if own in (0, _ITEM) and loads_method(step) and step.value in VIEWS:
            return _StackMethod(step.value, own)
        if self._holds and own == 0:
            if loads_method(step) and step.value in _LOOKING_UP:
                return _StackMethod(step.value, own)
            if name == "BINARY_SUBSCR":
                return _ITEM
        if type(own) is _StackMethod and own.level <= 0:
            return _VIEW if own.name in VIEWS else _ITEM
        if type(own) is int and own > 0 and loads_method(step):
            return _StackMethod(step.value, own)
        level = own.level if type(own) is _StackMethod else own
        if type(level) is not int or level <= 0:
            return None
        if name != "BINARY_SUBSCR" and type(own) is not _StackMethod:
            return None
        return self._level_of_item(level, taken)

    def _level_of_item(self, level: int, taken: Sequence[Any]) -> int | None:
        """Return the level of what a key leads to; None for an item beside those that count."""
        own_key = self._keys[len(self._keys) - level] if self._keys else None
        # Texts alone: an item of a list has two numbers, `parts[1]` and `parts[-1]`.
        if taken and type(taken[0]) is _StackConstant:
            if type(taken[0].value) is type(own_key) is str and taken[0].value != own_key:
                return None
        return level - 1

    def _function_before(self, at: int) -> list[str]:
        """Return the function that is called with what an instruction loads, or an item of it."""
        first = at
        while first > 0 and self._steps[first].name in ("LOAD_ATTR", "LOAD_METHOD"):
            first -= 1
        before = self._steps[first - 1] if first else None
        if before is None or before.name != "LOAD_GLOBAL" or before.value not in self._functions:
            return []
        return [before.value]

    def _is_variable_lost(self, variable: str, level: int) -> bool:
        if (variable, level) in self._variables:
            return False
        self._variables.add((variable, level))
        return any(
            self._is_lost(at, level)
            for at, step in enumerate(self._steps)
            if step.name == "LOAD_FAST" and step.value == variable
        )


class _StackConstant(NamedTuple):
    """A constant on the stack."""

    value: Any


class _StackMethod(NamedTuple):
    """A method on the stack, of a container at some level."""

    name: str
    level: int


class _Adding(_Operating):
    """Follows a list that is to be added to, and what it is in."""

    def _may(self, step: InstructionStep, name: str, own: Any) -> bool:
        if own != 0:
            return super()._may(step, name, own)
        return _extends(step) or (loads_method(step) and step.value in ADDS)

    def _may_ask(self, one: Any) -> bool:
        return one is None or one != 0

    def _result(self, step: InstructionStep, name: str, own: Any, taken: Sequence[Any]) -> Any:
        if own == 0 and loads_method(step):
            return _StackMethod(step.value, own)
        return super()._result(step, name, own, taken)


def _leads_on(one: Any) -> bool:
    """Return whether what is on the stack is a container, or gives one."""
    if type(one) is _StackMethod:
        return one.level > 0 or one.name in VIEWS or one.name in _LOOKING_UP
    return type(one) is int


# Methods that give a view of a dict, and what stands for a view on the stack.
VIEWS = ("keys", "values", "items")
_VIEW = -1
_ITEM = -2  # stands for a container that is in the container
_AT_THE_END = (0, _VIEW, _ITEM)


def _extends(step: InstructionStep) -> bool:
    return step.name == "BINARY_OP" and step.shown == "+="


_OF_HOLDERS = frozenset({"BINARY_SUBSCR", "CONTAINS_OP", "STORE_SUBSCR"})
_LOOKING_UP = frozenset({"get", "setdefault"})


def _is_test_instruction(name: str) -> bool:
    return name.startswith("POP_JUMP") or name == "POP_TOP"


# Instructions that operate on what they take from the stack, and how much that is.
_TAKING = {
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "GET_ITER": 1, "TO_BOOL": 1, "UNARY_NOT": 1,
    "UNARY_NEGATIVE": 1,
    "BINARY_SUBSCR": 2, "CONTAINS_OP": 2, "COMPARE_OP": 2, "BINARY_OP": 2, "DELETE_SUBSCR": 2,
    "STORE_SUBSCR": 3, "BINARY_SLICE": 3, "STORE_SLICE": 4,
}  # fmt: skip
_BUILDING = frozenset({"CALL", "BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_SLICE"})
_SLICING = frozenset({"BINARY_SLICE", "STORE_SLICE"})
_GIVING_NOTHING = frozenset({"DELETE_SUBSCR", "STORE_SUBSCR", "STORE_SLICE"})


def _is_read(steps: Sequence[InstructionStep], at: int) -> bool:
    """Return whether an instruction uses a name, and what it stands for is not only added to."""
    name = steps[at].name
    if name.endswith("_FAST") or not isinstance(steps[at].value, str):
        return False
    if name.startswith(("STORE_", "DELETE_")) or name not in _LOADS:
        return name.startswith(("STORE_", "DELETE_", "LOAD_", "IMPORT_")) and name not in _IDLE
    at += 1
    while at + 1 < len(steps) and steps[at].name in _KEYS and _is_subscript(steps[at + 1]):
        at += 2
    return not (loads_method(steps[at]) and steps[at].value in ADDS)


def _is_subscript(step: InstructionStep) -> bool:
    return step.name == "BINARY_SUBSCR" or (step.name == "BINARY_OP" and step.shown == "[]")


def _texts_in(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (tuple, frozenset)):
            yield from _texts_in(tuple(value))


_LOADS = frozenset(
    {
        "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_SUPER_ATTR",
    }
)  # fmt: skip
_KEYS = CONSTANTS | {"LOAD_FAST"}
_IDLE = CONSTANTS | {"LOAD_CLOSURE"}  # (a function in the code has its own look at the variable)
