"""What of a model an insertion might read or change, judged by the names in its code."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bendtrace.environment.code_facts import codes_in, functions_of, names_in
from bendtrace.environment.provenance import is_installed, is_installed_file
from bendtrace.interject.contained import ANY
from bendtrace.interject.plan import Plan
from bendtrace.interject.reached import Reached, is_users, reached_by, stores_in
from bendtrace.recording.one_op import assigned_in
from bendtrace.recording.recorder import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind, Change

__all__ = ["read_and_changed"]


def read_and_changed(plan: Plan, recording: Recording) -> frozenset[str]:
    """Return the attributes that a run changes and an insertion might read: `self.count`.

    A replay changes attributes at its end, the model's own Python when it reaches the assignment;
    and what it assigns and puts back, a replay does not change at all. The reverse as well: what
    the run reads and an insertion might change.
    """
    if plan.reaches is None:
        whats = {id(entry.what): entry.what for entry in plan.entries}.values()
        plan.reaches = [
            reached_by(what, recording.environment.module_paths)
            for what in whats
            if not what.self_contained or getattr(what, "handle", None) is not None
        ]
    assert isinstance(plan.reaches, list)
    if not plan.reaches:
        return frozenset()
    run = _Run(recording)
    found = {label for reach in plan.reaches for label in run.shared_with(reach)}
    paths = {label.rpartition(".")[2] for label in found if "." in label}
    return frozenset(found - paths)  # a name alone says less than the path that ends in it


class _Run:
    """What a run reads and changes of the model.

    Args:
        recording: the run.
    """

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
        self._members = _members_of(kinds)

    def shared_with(self, reach: Reached) -> set[str]:
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
            _name_of(part)
            for part in self._parts
            if self._is_container(part) and id(_now(part)) in reach.held
        }
        found = self._changed_by(codes, aliases)
        if not reach.what.self_contained:
            found |= self._read_by(reach, codes, aliases)
        return found

    def _is_container(self, part: Captured) -> bool:
        """Whether something is a container or object, not the attributes of a module."""
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
            name = _name_of(part)
            if name in names or (name in used and self._is_container(part)):
                found.add(part.label)
            elif part.access is Access.CELL and name in cells:
                found.add(part.label)
            elif any_name and "." in part.label:
                found.add(part.label)
        return found

    def _read_by(
        self, reach: Reached, codes: Iterable[types.CodeType], aliases: set[str]
    ) -> set[str]:
        """Return what the run changes, or changes for a while, and an insertion might read."""
        found: set[str] = set()
        if self._changes and not (reach.is_contained and not self._changes_held(reach)):
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
            is_held = id(module) in reach.held
            if is_held and type(module).__module__.startswith("torch.nn."):
                read |= vars(module).keys()
            elif not reach.is_contained and (is_held or _name_of(part) in named):
                read.update(_names_in_forward(type(module)))
        is_any = not (reach.is_contained or named.isdisjoint(ANY))
        for part in self._parts:
            name = _name_of(part)
            if (name in assigned or (name in changed and self._is_itemized(part))) and (
                name in read or is_any
            ):
                found.add(part.label)
        return found | (read & assigned)

    def _changes_held(self, reach: Reached) -> bool:
        """Whether the run changes something that an insertion holds itself."""
        held = {*reach.held, *(id(vars(t)) for t in reach.held.values() if hasattr(t, "__dict__"))}
        return any(
            id(_now(change.part)) in held
            or (change.part.label == "globals" and change.key in reach.numbers)
            or (change.part.is_argument and self._is_held_argument(change, reach))
            for change in self._changes
        )

    @staticmethod
    def _is_held_argument(change: Change, reach: Reached) -> bool:
        return any(type(thing) is change.part.type for thing in reach.held.values())

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


def _members_of(kinds: Iterable[type]) -> dict[str, list[types.CodeType]]:
    """Return the users' code of the methods of some classes, by name."""
    found: dict[str, list[types.CodeType]] = {}
    bases = dict.fromkeys(base for kind in dict.fromkeys(kinds) for base in kind.__mro__)
    for cls in bases:
        if not is_users(cls) or is_installed(cls.__module__):
            continue
        for name, member in vars(cls).items():
            for function in functions_of(member):
                if not is_installed_file(function.__code__.co_filename):
                    found.setdefault(name, []).append(function.__code__)
    return found


def _names_in_forward(cls: type) -> Iterator[str]:
    for base in filter(is_users, cls.__mro__):
        for function in functions_of(vars(base).get("forward")):
            if not is_installed_file(function.__code__.co_filename):
                yield from names_in(function.__code__)


def _name_of(part: Captured) -> str:
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
    CaptureKind.OBJECT, CaptureKind.GROWING,
)  # fmt: skip
_CHANGING = frozenset(
    {
        "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
        "reverse", "setdefault", "sort", "update",
    }
)  # fmt: skip
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})  # assign to new objects
