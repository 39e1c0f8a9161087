"""The environment of a run: everything that it can read before it begins.

They are scanned once and listed as flat parts, each reachable from its parent. From the list
follow which tensors are inputs or state, what has to be guarded, and - comparing it with
what is there after the run - what the run changed.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.python.bytecode import code_compares_identity
from bendtrace.python.lazy import LazyModule
from bendtrace.python.versions import Depends
from bendtrace.tape.captured import (
    COPIED,
    Access,
    Added,
    AttributeKey,
    Captured,
    CaptureKind,
    EnvironmentChange,
    compares_by_identity,
    container_content,
    holds_number,
    identical,
    is_as_copied,
    is_cache,
    is_exchangeable,
    is_ndarray,
    is_number,
    store_item,
)
from bendtrace.tape.structure import cached_results, entries_of, key_parts
from bendtrace.watch.code_facts import codes_in, other_names_in
from bendtrace.watch.draws import is_drawn_from, is_module_of_draws, stand_in_for
from bendtrace.watch.findings import LookupPlaces, ScanResult
from bendtrace.watch.kinds import asks_for_plain, tells_numbers_apart
from bendtrace.watch.provenance import is_finished, is_installed_file
from bendtrace.watch.scan import Scan
from bendtrace.watch.scan_cache import CachedScan, latest_walk, remember

if TYPE_CHECKING:
    from bendtrace.watch import containers, growing, open_arrays
else:
    containers = LazyModule("bendtrace.watch.containers")
    growing = LazyModule("bendtrace.watch.growing")
    open_arrays = LazyModule("bendtrace.watch.open_arrays")


class _Blocked(Exception):
    """The run has changed something that cannot be followed."""


class Environment(ScanResult):
    """The parts that a run can read, found by scanning from its arguments and its callable.

    Args:
        function: the module or function to be run.
        arguments: the bound arguments by name.
        inserted: what else it runs, by name.
        inputs: the labels of what is an input in the state: numbers (see `lift`), and containers
            whose operations are ops.
        goes_on: whether the run goes on for another one, which had these inputs.

    Attributes:
        is_repeated: whether all but the arguments was taken over from an earlier scan.
        shared_memory: which tensor shares its memory with which array, after the run.
        leaves_watched_objects: whether the run changed what is watched by content alone.
        read_caches: what tensors the run took from which `functools.lru_cache`.
        computed: how often the tracer itself had a cache filled, or took a fill off the tape.
        fills: the caches whose fills were taken off the tape (see `record/cache_fills.py`).
        displaced: the labels of those that do not hold any more what the run has taken from them.
        inputs: as given.
        filled_caches: the keys and results of caches after a run that added some.
        lifted: the labels in the state that are inputs of the run.
        lost_arrays: open arrays that code which cannot be watched may have used.
    """

    places: LookupPlaces
    content_of: dict[int, dict[Any, Any]]
    alone: list[Captured]
    bare: list[Captured]

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        inserted: Mapping[str, Any] = types.MappingProxyType({}),
        inputs: frozenset[str] = frozenset(),
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on
        self.function: Callable[..., Any] = function
        self.inserted: Mapping[str, Any] = inserted
        self.is_repeated: bool = False
        self.leaves_watched_objects: bool = False
        self.shared_memory: set[tuple[Captured, Captured]] = set()
        self.read_caches: list[tuple[functools._lru_cache_wrapper[Any], torch.Tensor]] = []
        self.computed: dict[functools._lru_cache_wrapper[Any], int] = {}
        self.fills: set[functools._lru_cache_wrapper[Any]] = set()
        self.displaced: set[str] = set()
        self.inputs: frozenset[str] = inputs
        self.filled_caches: dict[functools._lru_cache_wrapper[Any], list[tuple[Any, Any]]] = {}
        self.lifted: frozenset[str] = frozenset()
        self.lost_arrays: list[Captured] = []
        self._is_in_progress = False
        self._placed: list[tuple[Captured, Any]] = []
        self._containers_placed: list[tuple[Captured, containers.Watching]] = []
        self._holders: set[int] = set()  # containers that may have containers in them
        self._stand_ins: dict[int, tuple[Any, Captured]] = {}
        self._items: dict[int, list[Any]] = {}
        # Neither a run around this one nor the class of a tensor may see what is asked here: it is
        # not always the same that is asked.
        with torch._C.DisableTorchFunction():
            self._find(arguments, inputs)

    def _find(self, arguments: dict[str, Any], inputs: frozenset[str]) -> None:
        """List the parts, taken over from an earlier scan if there is one that is as good."""
        earlier = None if self.inserted else latest_walk(self.function)
        if earlier is not None:
            scan = self._begin(arguments, earlier.plain_numbers)
            if scan.is_untouched and earlier.repeat(self):
                self.is_repeated = True
                self._keep(earlier)
        if not self.is_repeated:
            self._scan(arguments, self._is_for_plain())
        # Where the calls of caches are ops, numbers may be traced, and dicts be watched as well.
        for _ in range(2):
            watched = self._containers(inputs)
            if watched.keys() <= self.watched_containers.keys():
                break
            self.is_repeated = False
            vars(self).pop("_kept", None)  # whose parts would keep what they stand for
            self._scan(arguments, self._is_for_plain(), None, self.watched_containers | watched)
        for part in self.parts:
            if part.kind is CaptureKind.ALIAS:
                continue
            if part.kind is CaptureKind.IDENTITY and id(part.value) in self.watched_containers:
                stand_in: Any = containers.watched_container(part.value)
                stand_in.may_hold = id(part.value) in self._holders
                self._containers_placed.append((part, stand_in))
            elif is_drawn_from(part.value):
                stand_in = stand_in_for(part.value)
            else:
                continue
            self._stand_ins[id(stand_in)] = stand_in, part
        for part in self.parts:
            if part.kind is CaptureKind.GROWING:
                self._items[part.index] = list(part.value)

    def _is_for_plain(self) -> bool:
        return asks_for_plain(self.function) or tells_numbers_apart(self.function)

    def _containers(self, labels: frozenset[str]) -> dict[int, Any]:
        """Return the containers with some labels whose operations can be ops, by identity.

        Code that asks for exact types would see what takes their place, and so might code that does
        not name them. Code that tests identities might find a tensor in two places.
        """
        found = [
            part for part in self.parts if part.label in labels and containers.can_be_watched(part)
        ]
        has_arrays = any(part.kind in _OF_NUMPY for part in found)
        arrays = open_arrays.untied_arrays(found, self) if has_arrays else {}
        if not found or self._compares_tensors():
            return arrays
        others = [part for part in self.parts if part.kind is CaptureKind.ALIAS]
        named = {id(part.value.value) for part in others}
        stay = {id(part.value.value) for part in others if not is_exchangeable(part)}
        caches = {
            id(one.value): one.value for one in found if is_cache(one) and id(one.value) not in stay
        }
        caches |= arrays
        if self.plain_numbers or self.tells_numbers or self.computes:
            return caches
        if not self.names.isdisjoint(growing.READING):
            return caches
        owners = growing.owners_in(self)
        read = {name for one in self.functions for name in other_names_in(one)}
        codes = [code for one in self.functions for code in codes_in(one.__code__)]
        chosen = {
            id(part.value): part
            for part in found
            if part.kind not in _OF_NUMPY
            and not is_cache(part)
            and id(part.value) not in named
            and growing.access_name(part) not in read
            # Others may have put something else in it meanwhile.
            and (self._goes_on or containers.is_watchable(part.value, named))
            and growing.is_known_to_user_only(part, owners, self)
            and not self._is_handed_over(part, codes)
        }
        self._holders |= {
            key
            for key, part in chosen.items()
            if part.type in containers.HOLDING and not self._is_handed_over(part, codes, True)
        }
        return caches | {
            key: part.value
            for key, part in chosen.items()
            if self._goes_on or key in self._holders or containers.holds_values(part.value)
        }

    @property
    def open_arrays(self) -> list[Captured]:
        """The arrays whose content is an input."""
        return [part for part in self.parts if part.kind is CaptureKind.OPEN_ARRAY]

    @property
    def operated_containers(self) -> list[Captured]:
        """The containers whose operations are ops of the run, but for caches."""
        return [part for part, _ in self._containers_placed if not is_cache(part)]

    def _is_handed_over(
        self, part: Captured, codes: Iterable[types.CodeType], holds: bool = False
    ) -> bool:
        name, keys = growing.access_name(part), growing.keys_of(part)
        spaces = {id(one.__globals__): one.__globals__ for one in self.functions}.values()
        functions = {one for one in containers.WHOLE if not any(one in space for space in spaces)}
        return any(
            growing.hands_over(code, name, len(keys), functions | {"len"}, holds, keys)
            for code in codes
            if (code.co_filename, code.co_name) not in _OF_DATACLASSES
        )

    def look_at_containers(self, codes: Iterable[types.CodeType]) -> None:
        """Note which containers code has handed over that the search for uses did not find."""
        for part, one in self._containers_placed:
            if is_cache(part) or one.is_misused:
                continue
            if self._is_handed_over(part, codes, bool(one.held)):
                one.is_misused = True
                label = part.label
                self.block(f"the run does more with {label} than operations on it", label)

    def _compares_tensors(self) -> bool:
        """Return whether code tests whether two objects, not two classes, are one."""
        if not self.compares_identity or self.tells_identity:
            return self.compares_identity
        codes = (one.__code__ for one in self.functions if not is_finished(one))
        return any(
            code_compares_identity(code)
            for code in codes
            # What `dataclass` makes compares classes, and arguments with a mark of its own. With a
            # container it only does what the container's methods see.
            if (code.co_filename, code.co_name) not in _OF_DATACLASSES
        )

    @property
    def watches_caches(self) -> bool:
        """True if calls of caches are ops of the run."""
        placed = self._containers_placed
        return bool(placed) and any(is_cache(part) for part, _ in placed)

    def misused_containers(self) -> frozenset[str]:
        """Return the labels of containers that the run has used in a way that is no op."""
        parts = [part for part, one in self._containers_placed if one.is_misused]
        return frozenset(part.label for part in (*parts, *self.lost_arrays))

    def _scan(
        self,
        arguments: dict[str, Any],
        plain_numbers: bool,
        lists: dict[int, Any] | None = None,
        watched: dict[int, Any] | None = None,
    ) -> None:
        scan = self._begin(arguments, plain_numbers)
        self.growing: dict[int, Any] = lists or {}
        self.watched_containers: dict[int, Any] = watched or {}
        is_repeatable = scan.is_untouched and not watched
        first, helpers = len(self.parts), tuple(self.helpers)
        scan.scan_model()
        if self.tells_numbers and not plain_numbers:  # which names alone did not show
            caches = {
                key: one
                for key, one in self.watched_containers.items()
                if type(one) is functools._lru_cache_wrapper
                or is_ndarray(one)
                or is_number(type(one))
            }
            self._scan(arguments, True, None, caches)  # where no other operation is an op
            return
        found = self._growing() if lists is None else lists
        if lists is None and found:
            self._scan(arguments, plain_numbers, found, watched)
            return
        if lists and self._growing().keys() != lists.keys():
            self._scan(arguments, plain_numbers, {}, watched)
            return
        self.places = LookupPlaces(self.parts, self.content_of)
        self.contents = self.places.read()
        self.bare, self.alone = [], []
        self._sort_out(self.parts)
        if is_repeatable and scan.notes.is_steady:
            scanned = CachedScan(self, scan.notes, first, helpers)
            if scanned.is_usable and not self.inserted:
                self._keep(scanned)
                remember(self.function, scanned)

    def _growing(self) -> dict[int, Any]:
        """Return the lists and deques, by identity, that code only adds to."""
        has_lists = any(part.type is list or part.type is deque for part in self.parts)
        return growing.growing_in(self) if has_lists else {}

    def _begin(self, arguments: dict[str, Any], plain_numbers: bool) -> Scan:
        """List the arguments, and nothing else."""
        super().__init__(self.function, plain_numbers)
        scan = Scan(self)
        scan.scan_arguments(arguments)
        self.arguments: list[Captured] = [part for part in self.parts if part.is_argument]
        self._sort_out(self.parts)
        return scan

    def _keep(self, scanned: CachedScan) -> None:
        """Keep a scan, which lives as long as somebody has it."""
        # In a function: it is nothing to be copied, or looked through, with a run.
        self._kept = lambda: scanned

    @functools.cached_property
    def compares_identity(self) -> bool:
        """Return whether code of the user's tests whether two objects are one."""
        return self.tells_identity or any(
            code_compares_identity(one.__code__)
            for one in self.functions
            if not is_installed_file(one.__code__.co_filename)
        )

    @functools.cached_property
    def ownership_test(self) -> OwnershipTest:
        """Tells whether the model holds a tensor; to be asked for before `release`."""
        return OwnershipTest(self.parts)

    @functools.cached_property
    def nested_codes(self) -> frozenset[types.CodeType]:
        """The code of functions that code of the model may make."""
        made = (
            inner
            for one in self.functions
            for inner in codes_in(one.__code__)
            if inner is not one.__code__
        )
        return frozenset(made)

    def find_cached(self, tensor: torch.Tensor) -> Captured | None:
        """Return a new part for a tensor that comes from a `functools.lru_cache`, if it does."""
        for label, cache, *_ in self.caches:
            if any(kept is tensor for kept in cached_results(cache)):
                count = len(self.parts)
                Scan(self).scan_late(tensor, f"{label}(...)")
                self._sort_out(self.parts[count:])
                self.read_caches.append((cache, tensor))
                return self.by_id[id(tensor)]
        return None

    def sees_more_than(self, other: Environment) -> bool:
        """Return whether this run could read more than an earlier run of its program.

        The program checks what its first run could read. It tolerates new results in a cache, and
        says nothing about them; those that its own runs have put there are what these computed.
        It says nothing, either, about what a function reads that only later runs have shown.

        Args:
            other: the environment of the program's first run.
        """
        known = {id(tensor) for _, tensor in other.read_caches}
        if any(id(tensor) not in known for _, tensor in self.read_caches):
            return True
        if self.cached is other.cached:  # of one scan
            return False
        codes = {one.__code__ for one in other.functions}
        if not all(one.__code__ in codes for one in self.functions):
            return True
        for cache, entries in self.cached.items():
            seen_entries = dict(other.filled_caches.get(cache, ()))
            seen_entries.update(other.cached.get(cache, ()))
            if not all(
                key in seen_entries and identical(seen_entries[key], one) for key, one in entries
            ):
                return True
        return False

    def ties_more_than(self, other: Environment) -> bool:
        """Return whether something is one and the same object here that was two in an earlier run.

        Operations do not tell the difference, but a run that goes on from there might take one
        for the other.
        """
        return not self._ties().issubset(other._ties())

    def _ties(self) -> set[tuple[str, str]]:
        return {
            (part.label, part.value.label) for part in self.parts if part.kind is CaptureKind.ALIAS
        }

    def find(self, thing: Any) -> Captured | None:
        """Return the part that `thing` is, or stands for; None if the run did not begin with it."""
        part = super().find(thing)
        if part is None and id(thing) in self._stand_ins:
            part = self._stand_ins[id(thing)][1]
        return part

    def label_of(self, thing: Any) -> str:
        """Return the label of the part that `thing` is; "" if the run did not begin with it."""
        part = self.find(thing)
        return "" if part is None else part.label

    def things(self) -> dict[int, Any]:
        """Return the objects that the run could read, by identity."""
        found = {key: part.value for key, part in self.by_id.items()}
        found.update((key, part.value) for key, (_, part) in self._stand_ins.items())
        return found

    def arguments_by_identity(self) -> dict[int, Captured]:
        """Return the arguments, and parts of them, that Python compares by their identity."""
        return {
            id(part.value): part
            for part in self.parts
            if part.is_argument
            and part.kind is CaptureKind.OBJECT
            and compares_by_identity(part.type)
        }

    def results_in_state(self) -> Iterator[str]:
        """Yield a reason for each tensor that the model holds, and may have taken from a cache."""
        for label, cache, info, _ in self.caches:
            for kept in cached_results(cache) if cache.cache_info() != info else ():
                part = self.by_id.get(id(kept)) if isinstance(kept, torch.Tensor) else None
                if part is not None and not part.label.startswith(f"{label}("):
                    yield f"the cache of {label} returns what is {part.label} as well"

    def identity_lookups(self) -> Iterator[str]:
        """Yield a reason for each argument that the model finds by its identity."""
        given = self.arguments_by_identity()
        found = [one for one in self.members if id(one) in given] if given else []
        for _, cache, info, _ in self.caches:
            if given and cache.cache_info() != info:
                found += [
                    one
                    for key, _ in entries_of(cache)
                    for one in key_parts(key)
                    if id(one) in given
                ]
        for one in found:
            label = given[id(one)].label
            yield f"{label} is found in a dict, a set or a cache by its identity"

    def misses(self) -> Iterator[tuple[str, functools._lru_cache_wrapper[Any], bool]]:
        """Yield each `functools.lru_cache` that the run put something into.

        With it come the reason not to replay the run, and whether the cache had no entries before.
        """
        for label, cache, info, was_empty in self.caches:
            if cache.cache_info().misses != info.misses + self.computed.get(cache, 0):
                yield self.reason_to_fill(label), cache, was_empty

    def reason_to_fill(self, label: str) -> str:
        """Return the reason not to replay a run that has put something into a cache."""
        return f"the run fills the cache of {label} (see {self.place_of(label)})"

    def note_computed(self, cache: functools._lru_cache_wrapper[Any], count: int) -> None:
        """Note that a cache was filled some times in a way that is no act of the run."""
        self.computed[cache] = self.computed.get(cache, 0) + count

    def _sort_out(self, parts: list[Captured]) -> None:
        """Separate values that may change by themselves from tensors without own attributes."""
        content_of, taken = self.content_of, self.places.taken
        for part in parts:
            if part.index in content_of and part.index not in taken:
                is_bare = part.type in _TENSORS and not content_of[part.index]
                (self.bare if is_bare else self.alone).append(part)
            elif part.kind in COPIED:
                self.alone.append(part)

    def changes(self, is_over: bool = True) -> Iterator[EnvironmentChange]:
        """Yield the differences since the parts were listed.

        Args:
            is_over: whether the run is over, so that what a replay could not do blocks it.
        """
        for hooks, (holder, table, items) in zip(self.hook_dicts, self.hook_tables, strict=True):
            if (hooks or items) and tuple(hooks.items()) != items:
                name = table[1:]
                kind = name.replace("_", " ")
                self.block(
                    f"the run puts {kind} on {holder}, or removes some", f"register_{name[:-1]}"
                )
        for space, names in self.missing.values():
            if not space.keys().isdisjoint(names):
                self._block_new_names(space, names)
        for owner, names_before in self.namespaces.values():
            made = set(owner) - set(names_before)
            if len(owner) != len(names_before) and not (
                # An empty one is made by whoever asks a class for it, `inspect` for example.
                made == {"__annotations__"} and owner["__annotations__"] == {}
            ):
                self._block_new_names(owner, made)
        before = self.content_of
        now = self.places.read()
        if now is not None and self.contents is not None and now.same_as(self.contents):
            parts = self.alone
            if any(map(_own_attributes, (part.value for part in self.bare))):
                parts = sorted((*parts, *self.bare), key=lambda part: part.index)
        else:
            parts = self.parts
            if self.contents is not None:
                before = before | self.places.before(self.contents)
        for part in parts:
            yield from self._changes_of(part, before.get(part.index), is_over)
        for index, listed in self._items.items():
            part = self.parts[index]
            added = growing.additions_to(listed, part.value)
            if added is None:
                # A deque gets full once, and is compared with what it held from then on.
                self.leaves_watched_objects |= growing.is_full(part.value)
                self.block(f"the run does more with {part.label} than add to it", "")
            elif added:
                yield EnvironmentChange(part, Added.ITEMS, added)
        if not self.watched_objects.same():
            self.leaves_watched_objects = True
            for label in dict.fromkeys(self.watched_objects.changed_labels()):
                self.block(f"the run changes {label}, which a replay could not", label)

    def _block_new_names(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note that the run made a global, or an attribute of a class, which the next one finds."""
        self.leaves_watched_objects = True
        for name in sorted(name for name in names if name in space):
            self.block(f"the run makes {name}, which was not there", name)

    def changes_so_far(self) -> list[EnvironmentChange] | None:
        """Return the changes of a run in progress; None if they cannot be followed."""
        left, self._is_in_progress = self.leaves_watched_objects, True
        try:
            found = list(self.changes(is_over=False))
            return found if self.leaves_watched_objects == left else None
        except _Blocked:
            return None
        finally:
            self.leaves_watched_objects, self._is_in_progress = left, False

    def block(self, reason: str, label: str) -> None:
        """Note what a replay could not do, with where the code mentions what has that label."""
        if self._is_in_progress:
            raise _Blocked  # nobody reads the reason, and finding its place takes long
        super().block(reason, label)

    def _changes_of(
        self, part: Captured, before: dict[Any, Any] | None, is_over: bool
    ) -> Iterator[EnvironmentChange]:
        if part.kind in COPIED and not is_as_copied(part, part.value):
            self.block(f"the run changes {_WORDS[part.kind].format(part.label)}", part.label)
        if before is None:
            return
        now = container_content(part, before)
        if part.kind is CaptureKind.IDENTITY and not isinstance(part.value, dict):
            for key, value in before.items():
                is_cell = isinstance(part.value, types.CellType)
                if now.get(key) is not value and (is_cell or not is_over):
                    yield EnvironmentChange(
                        part, key, now.get(key)
                    )  # the run may well change it back
                elif now.get(key) is not value:
                    if isinstance(part.value, types.MappingProxyType):
                        self.leaves_watched_objects = True  # perhaps only the first run does
                    self.block(f"the run changes {key} of {part.label}", key)
            return
        if part.kind is not CaptureKind.IDENTITY and not _in_one_order(before, now):
            written = [key for key in before if key in now]
            written += [key for key in now if key not in before]
            if not _in_one_order(written, now):  # as a replay would leave them
                self.block(f"the run changes the order of {part.label}", part.label)
        if part.kind is CaptureKind.LIST and len(before) != len(now):
            yield EnvironmentChange(part, None, list(part.value))
            return
        for key, value in now.items():
            if key not in before or before[key] is not value:
                yield EnvironmentChange(part, key, value)
        for key in before:
            if key not in now:
                yield EnvironmentChange(part, key, None, deleted=True)

    def lift(self, labels: frozenset[str]) -> list[Captured]:
        """Return the parts that are numbers with some labels, which the run takes as inputs.

        Code that asks for the exact type of a number takes none. Nor can a number be an input that
        only a descriptor or an object of C holds, or a tuple that has two places.
        """
        found: list[Captured] = []
        if labels and not (self.plain_numbers or self.tells_numbers):
            named = {id(part.value) for part in self.parts if part.kind is CaptureKind.ALIAS}
            for part in self.parts:
                if part.label not in labels or not holds_number(part):
                    continue
                if named.isdisjoint(map(id, _tuples_around(part))):
                    found.append(replace(part, kind=CaptureKind.NUMBER))
        for part in found:  # others may have the part itself
            self.parts[part.index] = part
        self.lifted = frozenset(part.label for part in found)
        self.lifted |= {part.label for part, _ in self._containers_placed}
        self.lifted |= {part.label for part in self.open_arrays}
        return found

    def stand_in(self, thing: Any) -> Any:
        """Return what a run receives in place of something that is watched, or the thing itself."""
        return next((one for one, part in self._stand_ins.values() if part.value is thing), thing)

    def place_watched(self) -> None:
        """Replace generators of numpy, and containers, by objects that are watched."""
        holders: list[tuple[Captured, Any]] = []
        for part in self.parts if self._stand_ins else ():
            stand_in = self.stand_in(_thing_of(part))
            if stand_in is _thing_of(part) or not is_exchangeable(part):
                continue
            # The functions of these modules are exchanged by intercepts, for all threads.
            if part.parent is not None and not is_module_of_draws(part.parent.value):
                holders.append((part, stand_in))
        self.place(holders)

    def place(self, stand_ins: list[tuple[Captured, Any]]) -> None:
        """Replace numbers by traced ones while the run goes on."""
        tuples: dict[int, tuple[Any, ...]] = {}
        for part, stand_in in stand_ins:
            assert part.parent is not None
            while (holder := part.parent) is not None and holder.type is tuple:
                items = [*tuples.get(holder.index, holder.value)]
                items[part.key] = stand_in
                part, stand_in = holder, tuple(items)
                tuples[holder.index] = stand_in
            assert part.parent is not None
            self._placed.append((part, stand_in))
            store_item(part.parent.value, part.key, stand_in)
            if part.parent.index not in self.places.taken:
                content = self.content_of[part.parent.index]
                self.content_of[part.parent.index] = {**content, part.key: stand_in}
        if stand_ins:
            self.contents = self.places.read()

    def put_back(self) -> None:
        """Put numbers back that the run has not replaced."""
        for part, stand_in in self._placed:
            assert part.parent is not None
            with suppress(LookupError, AttributeError):
                if part.read_from(part.parent.value) is stand_in:
                    store_item(part.parent.value, part.key, _thing_of(part))
        self._placed.clear()

    def release(self) -> None:
        """Let go of tensors and contents once the run is over."""
        if self.compares_identity:
            _ = self.ownership_test
        self.content_of, self.contents, self.places = {}, None, LookupPlaces((), {})
        self._items.clear()
        self.growing = {}
        for part in self.open_arrays:
            self.watched_containers.pop(id(part.value), None)
        self.depends: Depends = Depends()
        for part in self.own:
            if part.kind in _LET_GO and part.access is not Access.FIXED:
                part.value = None
        self.by_id.clear()


def _tuples_around(part: Captured) -> Iterator[Captured]:
    while part.parent is not None and part.parent.type is tuple:
        part = part.parent
        yield part


def _thing_of(part: Captured) -> Any:
    """Return the object that a part, or one that another name of it stands for, is."""
    return part.value.value if part.kind is CaptureKind.ALIAS else part.value


def _in_one_order(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Return whether the keys of a dict are those that they were, in that order.

    Names of attributes stand apart from keys, and in the same order.
    """
    keys = [*before], [*now]
    return _are_one(*keys) or all(map(_are_one, *map(_items_and_attributes, keys)))


def _items_and_attributes(keys: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = [], []
    for key in keys:
        found[isinstance(key, AttributeKey)].append(key)
    return found


def _are_one(before: list[Any], now: list[Any]) -> bool:
    try:
        return before == now
    except RuntimeError:  # tensors, which are compared item by item
        return [*map(id, before)] == [*map(id, now)]


_OF_DATACLASSES = {("<string>", name) for name in ("__eq__", "__init__", "__repr__")}
_OF_NUMPY = (CaptureKind.ARRAY, CaptureKind.PLAIN)
_WORDS = {
    CaptureKind.SET: "the set {}",
    CaptureKind.LARGE: "{}, which is too large to watch",
    CaptureKind.ARRAY: "the array {}",
    CaptureKind.OPEN_ARRAY: "the array {}",
}
_TENSORS = (torch.Tensor, nn.Parameter)
_LET_GO = (
    CaptureKind.GROWING, CaptureKind.ARRAY, CaptureKind.OPEN_ARRAY, CaptureKind.TENSOR,
    CaptureKind.LIST, CaptureKind.TUPLE, CaptureKind.DICT, CaptureKind.OBJECT,
)  # fmt: skip
_own_attributes = attrgetter("__dict__")


# Telling whether a tensor is one that a model holds.


class OwnershipTest:
    """Tells whether a tensor is one that the code of a model may compare others to.

    A guard on what an insertion returns: the code sees whether it is a tensor that the model
    holds, and Python reports no such test.

    Args:
        parts: what the model can read.
    """

    __name__ = "owned"

    def __init__(self, parts: Iterable[Captured]) -> None:
        # By their types: a proxy is no object that a weak reference can be made to.
        values: list[Any] = [part.value for part in parts if not part.is_argument]
        self._tensors = [weakref.ref(one) for one in values if issubclass(type(one), Tensor)]
        self._modules = [weakref.ref(one) for one in values if issubclass(type(one), nn.Module)]

    def __call__(self, tensor: Tensor, *others: Tensor) -> bool:
        """Return whether the model holds a tensor, or it is one of others."""
        return (
            any(one is tensor for one in others)
            or any(ref() is tensor for ref in self._tensors)
            or any(
                one is tensor
                for ref in self._modules
                if (module := ref()) is not None
                for table in (module._parameters, module._buffers, vars(module))
                for one in table.values()
            )
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnershipTest)

    def __hash__(self) -> int:
        return hash(OwnershipTest)
