"""A finished scan, which serves the next run of the same model without scanning.

Where a scan leads follows from the objects it meets, from what containers hold, and from the
code. All of that is noted, and compared before a scan is taken over. If an object has been
replaced, or has other content, another class or other code, everything is scanned again. So taking
a scan over is never an assumption, only a faster way to the same parts.

The notes keep the same objects alive as the parts of a recorded run, but neither tensors nor
containers. Another one of these can get the address of an old one; so besides its identity its
type is compared, and all that it holds, or the facts that are guarded of a tensor. Then it does not
matter which of the two it is.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.python.internals import names_off
from bendtrace.python.lazy import LazyModule
from bendtrace.python.versions import CodeVersion, all_same
from bendtrace.tape.captured import (
    COPIED,
    Access,
    AttributeKey,
    Captured,
    CaptureKind,
    TensorFacts,
    attributes_of,
    container_content,
    is_as_copied,
    requires_grad,
)
from bendtrace.watch.executed import functions_of_runs
from bendtrace.watch.findings import Contents, ScanResult
from bendtrace.watch.monkeypatches import monkeypatches
from bendtrace.watch.provenance import is_users_class
from bendtrace.watch.reachability import namespace_of

if TYPE_CHECKING:
    from bendtrace.watch import growing
else:
    growing = LazyModule("bendtrace.watch.growing")

_values = methodcaller("values")
_about = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_facts = attrgetter("dtype", "device", "ndim", "requires_grad", "layout")
_own_attributes = attrgetter("__dict__")
_IN_RUN = (
    CaptureKind.ARRAY, CaptureKind.TENSOR, CaptureKind.LIST, CaptureKind.TUPLE, CaptureKind.DICT,
    CaptureKind.OBJECT, CaptureKind.GROWING,
)  # fmt: skip


_SHARED = (
    "names", "shared_modules", "stores", "functions", "tells_numbers", "tells_identity",
    "computes", "computes_outside", "asks_tags", "namespaces", "missing", "sized", "hook_tables",
    "watched_objects", "cached", "members",
)  # fmt: skip
_Judged = tuple[Mapping[str, Any], str, Any, Callable[[Any], bool] | None, bool]


@dataclass(slots=True, eq=False)
class Notes:
    """Facts that a scan depended on, besides its parts and their content."""

    is_steady: bool = True  # whether it met nothing that only another scan can tell to be the same
    # Objects, and the dict of each that was scanned.
    owned: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    # Names in namespaces, each with what it stood for, and - where what that held decided whether
    # it was worth scanning - what was asked of it, and the answer.
    judged: dict[tuple[int, str], _Judged] = field(default_factory=dict)
    # Names that code uses, and that are not in the namespace.
    absent: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    empty: list[types.CellType] = field(default_factory=list)  # cells without content

    def hold(self) -> bool:
        """Return whether all facts that decided the scan are unchanged."""
        if not all(vars(owner) is own for owner, own in self.owned):
            return False
        for namespace, name, value, judge, answer in self.judged.values():
            if namespace.get(name, _MISSING) is not value:
                return False
            if judge is not None and judge(value) is not answer:
                return False
        return not any(name in namespace for namespace, name in self.absent) and not any(
            map(_is_filled_cell, self.empty)
        )


_MISSING = object()


def _is_filled_cell(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


def tensor_facts(tensor: torch.Tensor, attributes: Mapping[Any, Any]) -> TensorFacts:
    """Return the facts of a tensor that are guarded, with the number of its attributes."""
    own = sum(key.access is Access.DICT for key in attributes)
    with torch._C.DisableTorchFunction():  # a class may count what it is asked
        return TensorFacts(
            tensor.dtype, tensor.device, tensor.dim(), requires_grad(tensor), tensor.layout, own
        )


class CachedScan:
    """The parts of a model that a scan found, with everything that the scan depended on.

    They are found for a run that has not begun yet. The `first` part is not of the arguments, which
    have helper objects of the classes in `helpers`.
    """

    def __init__(
        self, found: ScanResult, notes: Notes, first: int, helpers: tuple[type, ...]
    ) -> None:
        self._function = found.function
        # True if numbers among the arguments must not be traced.
        self.plain_numbers: bool = found.plain_numbers
        self._notes = notes
        self._first = first
        self._helpers = helpers
        self._parts = found.parts[first:]
        self._places = found.places  # none of them is of the arguments
        self._shared = {name: getattr(found, name) for name in _SHARED}
        self._watched_objects = found.watched_objects
        self._monkeypatches = monkeypatches()
        self._names_off = {**names_off()}
        self._learned = functions_of_runs(found.function)
        self._blockers = tuple(found.blockers)
        self._module_paths = dict(found.module_paths)
        self._hook_dicts = list(found.hook_dicts)
        self._caches = found.caches
        self._by_id = {key: part for key, part in found.by_id.items() if part.index >= first}
        self._note_code(found)
        self._note_parts(found)
        # True if another scan can be told to be the same.
        self.is_usable: bool = self._is_apart() and self._note_contents(found.contents)

    def _is_apart(self) -> bool:
        """Return whether no part of the model is, or is reached by way of, one of the arguments."""
        return not any(
            (part.kind is CaptureKind.ALIAS and part.value.index < self._first)
            or (part.parent is not None and part.parent.index < self._first)
            for part in self._parts
        )

    def _note_code(self, found: ScanResult) -> None:
        self._functions = [*{id(function): function for function in found.functions}.values()]
        self._code = [*chain.from_iterable(map(_about, self._functions))]
        self._keywords = [f.__kwdefaults__ for f in self._functions if f.__kwdefaults__]
        self._defaults = [*chain.from_iterable(map(_values, self._keywords))]
        self._tags = [*map(tuple, map(vars, self._functions))]
        for helper in found.helpers:
            bases = filter(is_users_class, helper.__mro__)
            found.depends.sized |= {id(namespace_of(base)): namespace_of(base) for base in bases}
        self._stamp = CodeVersion(found.depends)

    def _note_parts(self, found: ScanResult) -> None:
        """Tell the parts that each run has its own of from those that all runs share."""
        anew: set[int] = set()
        looked: list[Captured] = []
        self._content: dict[int, tuple[list[Any], list[int]]] = {}
        self._bare: list[Captured] = []
        content_of, taken = found.content_of, self._places.taken
        bare = {part.index for part in found.bare}
        for part in self._parts:
            parent = part.parent
            if (
                (part.kind in _IN_RUN and part.access is not Access.FIXED)
                or (parent is not None and parent.index in anew)
                or (part.kind is CaptureKind.ALIAS and part.value.index in anew)
            ):
                anew.add(part.index)
            if part.index in bare:
                self._bare.append(part)
            elif part.index in content_of and part.index not in taken:
                content = content_of[part.index]
                self._content[part.index] = [*content], [*map(id, content.values())]
            elif part.kind is CaptureKind.TUPLE:
                content = container_content(part)
                self._content[part.index] = [*content], [*map(id, content.values())]
            if part.index in anew or part.index in self._content or part.kind in COPIED:
                looked.append(part)
        self._anew, self._looked = frozenset(anew), looked
        self._bare_facts = [
            part.size[:5] for part in self._bare if isinstance(part.size, TensorFacts)
        ]
        self._watched = [i for i in self._content if i in content_of]
        nothing: dict[Any, Any] = {}  # nobody puts anything into it
        self._bare_contents = dict.fromkeys((part.index for part in self._bare), nothing)
        self._keys_anew = [key for key, part in self._by_id.items() if part.index in anew]
        self._alone = [part for part in found.alone if part.index >= self._first]
        # Parts that a run has its own of are asked for their type when they are made.
        alike = (CaptureKind.MODULE, CaptureKind.IDENTITY)
        self._typed = [part.value for part in self._parts if part.kind in alike]
        self._types = [*map(type, self._typed)]

    def _note_contents(self, contents: Contents | None) -> bool:
        if contents is None:
            return False
        self._dict_sizes, self._dict_keys = contents.sizes, contents.keys
        self._ids = _identities(contents)
        return True

    # Taking it over

    def repeat(self, now: ScanResult) -> bool:
        """Give environment the parts of this scan, if it would lead to the same.

        So far, it has the parts of its arguments only.
        """
        if now.function is not self._function or functions_of_runs(now.function) != self._learned:
            return False
        if monkeypatches() != self._monkeypatches or names_off() != self._names_off:
            return False
        if len(now.parts) != self._first or (*now.helpers,) != self._helpers:
            return False
        if not now.by_id.keys().isdisjoint(self._by_id) or not self._has_same_code():
            return False
        contents = self._places.read()
        if (
            contents is None
            or contents.sizes != self._dict_sizes
            or not all_same(contents.keys, self._dict_keys)
            or _identities(contents) != self._ids
            or [*map(type, self._typed)] != self._types
            or any(self._hook_dicts)
            or any(cache.cache_info()[1:] != before[1:] for _, cache, before, _ in self._caches)
        ):
            return False
        content_of: dict[int, dict[Any, Any]] = {}
        try:
            made = self._remake_parts(content_of)
        except _GONE:
            return False
        if made is None or not self._notes.hold() or not self._watched_objects.same():
            return False
        self._hand_over(now, made, content_of)
        now.contents = contents
        return True

    def _has_same_code(self) -> bool:
        return (
            all_same([*chain.from_iterable(map(_about, self._functions))], self._code)
            and all_same([*chain.from_iterable(map(_values, self._keywords))], self._defaults)
            and [*map(tuple, map(vars, self._functions))] == self._tags
            and self._stamp.holds()
        )

    def _remake_parts(self, content_of: dict[int, dict[Any, Any]]) -> dict[int, Captured] | None:
        """Return the parts that each run makes again, by index; None if one has been replaced."""
        made: dict[int, Captured] = {}
        for old in self._looked:
            part = old
            if old.index in self._anew:
                part = made[old.index] = self._remake_part(old, made, content_of)
            if part.kind is not CaptureKind.ALIAS and type(part.value) is not old.type:
                return None
            if part.kind in COPIED and not is_as_copied(part, part.value):
                return None
            if part.kind is CaptureKind.GROWING and growing.is_full(part.value):
                return None
            noted = self._content.get(old.index)
            if noted is None:
                continue
            if part.kind is CaptureKind.TENSOR:
                content: dict[Any, Any] = attributes_of(part.value)
                if tensor_facts(part.value, content) != part.size:
                    return None
            else:
                content = container_content(part, noted[0])
            if not _same_keys([*content], noted[0]):
                return None
            if [*map(id, content.values())] != noted[1]:
                return None
            content_of[old.index] = content
        bare = [made.get(part.index, part).value for part in self._bare]
        if any(map(_own_attributes, bare)) or [*map(_facts, bare)] != self._bare_facts:
            return None
        return made

    def _remake_part(
        self, old: Captured, made: dict[int, Captured], content_of: dict[int, dict[Any, Any]]
    ) -> Captured:
        parent = old.parent
        value = old.value
        if old.kind is CaptureKind.ALIAS:
            value = made.get(value.index, value)
        if parent is not None:
            above = made.get(parent.index, parent)
            if old.kind in _IN_RUN:
                value = _current_value(above, old, content_of)
            parent = above
        return Captured(
            old.index, parent, old.access, old.key, old.kind, value, old.type,
            old.label, False, old.size, old.hidden,
        )  # fmt: skip

    def _hand_over(
        self, now: ScanResult, made: dict[int, Captured], content_of: dict[int, dict[Any, Any]]
    ) -> None:
        now.own = [*now.parts, *made.values()]  # shared parts are let go of by nobody
        now.parts += self._parts
        for index, part in made.items():
            now.parts[index] = part
        now.by_id |= self._by_id
        for key in self._keys_anew:
            now.by_id[key] = made[self._by_id[key].index]
        now.content_of |= self._bare_contents
        now.content_of |= {index: content_of[index] for index in self._watched}
        vars(now).update(self._shared)
        now.blockers = [*self._blockers]
        now.module_paths = dict(self._module_paths)
        now.hook_dicts = self._hook_dicts
        now.caches = self._caches
        now.places = self._places
        now.alone += [made.get(part.index, part) for part in self._alone]
        now.bare += [made.get(part.index, part) for part in self._bare]


_GONE = (LookupError, AttributeError, TypeError, ValueError, RuntimeError)


def _current_value(parent: Captured, part: Captured, content_of: dict[int, dict[Any, Any]]) -> Any:
    """Return the value that is now at the place of a part."""
    content = content_of.get(parent.index)
    if content is not None:
        return content[part.key]
    if part.access is Access.CELL:
        return parent.value.cell_contents
    return parent.value[part.key]


def _same_keys(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(
        a is b or (type(a) is type(b) is AttributeKey and a == b and a.access is b.access)
        for a, b in zip(now, then, strict=True)
    )


def _identities(contents: Contents) -> list[int]:
    return [*map(id, chain(contents.values, contents.named, contents.cell_values))]


_latest: MutableMapping[Any, weakref.ref[CachedScan]] = WeakIdKeyDictionary()


def latest_walk(function: Callable[..., Any]) -> CachedScan | None:
    """Return the latest scan over a model's environment, as long as a run with it is kept."""
    try:
        latest = _latest.get(function)
    except TypeError:  # not hashable, or there can be no weak references to it
        return None
    return None if latest is None else latest()


def remember(function: Callable[..., Any], scanned: CachedScan) -> None:
    """Keep a scan for the next run of a model, for as long as somebody has it."""
    if isinstance(function, (torch.nn.Module, types.FunctionType)):
        _latest[function] = weakref.ref(scanned)
