"""Fills of caches, which later runs do not repeat: what the function did leaves the tape again.

A `functools.lru_cache` calls its function once for each key. The run in which that happens should
record what the next run will do, which finds the result in the cache. So the recorder goes back to
what it had noted before the function began, and takes the result for a tensor that was there before
the run:

    x * table(3)        a miss: `begins`   arange, cos on the tape   `ends`: off it again
    x * <table(...)>    the result is read as state, as in each run that finds it in the cache

The function may do nothing but compute: it changes nothing that was there, draws nothing, calls no
code as one op. Its arguments are values that each run can give again, its result consists of new
tensors and plain values. Otherwise all stays on the tape, and the run is live.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.python.bytecode import argument_names
from bendtrace.python.computations import is_computation
from bendtrace.python.lazy import LazyModule
from bendtrace.record.effects import Effects
from bendtrace.tape.captured import PLAIN_TYPES, EnvironmentChange
from bendtrace.tape.scalars import TRACED, retire
from bendtrace.tape.structure import are_cached, cached_results, entries_of
from bendtrace.tape.tape import OpKind, Tape, refs_in
from bendtrace.watch.kinds import is_value, underlying_code
from bendtrace.watch.provenance import is_finished_function
from bendtrace.watch.rank_sync import has_other_ranks

if TYPE_CHECKING:
    import functools

    from bendtrace.record.finish import Recording
    from bendtrace.record.tape_writer import TapeWriter
    from bendtrace.record.values import RunValues
    from bendtrace.watch import containers

    Cache = functools._lru_cache_wrapper[Any]
else:
    containers = LazyModule("bendtrace.watch.containers")


class CacheFills:
    """Takes what fills caches off the tape of a run.

    Args:
        values: the values of the run.
        parts: returns the objects that note something of the run.
        settings: returns the modes and settings of torch, and how many counters are lifted.
        notes_more: whether other objects note something of the run by now.

    Attributes:
        codes: the identities of the code that caches call.
    """

    def __init__(
        self,
        values: RunValues,
        parts: Callable[[], Iterable[Any]],
        settings: Callable[[], Any],
        notes_more: Callable[[], Any],
    ) -> None:
        self._environment = environment = values.environment
        self._writer, self._values = values.writer, values
        self._parts, self._settings, self._notes_more = parts, settings, notes_more
        self._misses: dict[Cache, int] = {}
        self._caches: dict[types.CodeType, list[Cache]] = {}
        for label, cache, info, _ in environment.caches:
            code = underlying_code(cache.__wrapped__)
            self._misses[cache] = info.misses
            is_full = info.currsize == info.maxsize
            if code is None or (label in environment.inputs and is_full):
                continue  # each fill displaces what programs take from it
            # Which entry a full one drops depends on the latest calls, of which replays make none.
            part = environment.find(cache)
            is_soon_op = part is not None and containers.can_be_watched(part)
            room = _ROOM if is_soon_op else 1
            if info.maxsize in (None, 1) or info.maxsize - info.currsize >= room:
                self._caches.setdefault(code, []).append(cache)
        self.codes: frozenset[int] = frozenset(map(id, self._caches))
        self._fill: _Fill | None = None

    def begins(self, frame: FrameType) -> bool:
        """Look whether a cache has called code that begins, and return whether to wait for its end.

        Args:
            frame: the code.
        """
        if self._fill is not None and _runs_within(frame, self._fill.frame):
            return False
        before, self._fill = self._misses, None
        self._misses = {cache: cache.cache_info().misses for cache in before}
        if all(before[cache] == self._misses[cache] for cache in self._caches[frame.f_code]):
            return False  # something else has called it
        given = [frame.f_locals[name] for name in argument_names(frame.f_code)]
        if frame.f_code.co_flags & inspect.CO_VARKEYWORDS:
            given[-1:] = given[-1].values()
        if not all(map(self._can_be_repeated, given)):
            return False
        if len(given) == 1 and type(given[0]) in TRACED:  # another key than the number
            return False
        with torch._C.DisableTorchFunction():
            self._writer.begin()  # a resumed run may just have come to the end of its script
            if not self._can_begin():
                return False
            changes = self._environment.changes_so_far()
            if changes is None:
                return False
            self._fill = _Fill(
                frame, before, changes, self._settings(), self._writer, self._parts()
            )
        return True

    def ends(self, frame: FrameType, result: Any) -> None:
        """Take off the tape what a cache has called, if that did nothing but compute.

        Args:
            frame: the code.
            result: what it returns; None if it raises.
        """
        fill = self._fill
        if fill is None or frame is not fill.frame:
            return
        self._fill = None
        before, self._misses = fill.misses, {c: c.cache_info().misses for c in self._misses}
        filled = [cache for cache in before if before[cache] != self._misses[cache]]
        with torch._C.DisableTorchFunction():
            if result is None or not (self._is_new(result, fill) and self._only_computed(fill)):
                return
            inner = (one for c in filled for _, one in entries_of(c) if id(one) not in fill.known)
            if not all(self._is_new(one, fill) for one in inner):
                return
            made = self._values.scalars[:]
            fill.undo()
            for scalar in made[len(self._values.scalars) :]:
                retire(scalar)
        for cache in filled:
            self._environment.note_computed(cache, self._misses[cache] - before[cache])
        self._environment.fills.update(filled)

    def _can_begin(self) -> bool:
        """Return whether what the run notes from here on can be taken off the tape again."""
        writer, script = self._writer, self._writer.script
        follows = writer.is_behind or (script is not None and script.is_active)
        is_joint = writer.tape.is_joint or has_other_ranks()
        return not (follows or is_joint or writer.is_inside or self._notes_more())

    def _only_computed(self, fill: _Fill) -> bool:
        changes = self._environment.changes_so_far()
        if changes is None or not self._can_begin() or self._settings() != fill.settings:
            return False
        same = len(changes) == len(fill.changes) and all(
            one.part is other.part and one.key == other.key and one.value is other.value
            for one, other in zip(changes, fill.changes, strict=True)
        )
        return (
            same
            and noted_on(self._writer.tape) == fill.noted
            and not Effects(self._writer.tape, fill.position).have_begun()
        )

    def _can_be_repeated(self, argument: Any) -> bool:
        """Return whether the next run can give a cache the same argument."""
        kind = type(argument)
        if kind is tuple or kind is torch.Size:
            return all(map(self._can_be_repeated, argument))
        if kind in PLAIN_TYPES or kind in TRACED:
            return True
        part = self._environment.find(argument) if isinstance(argument, nn.Module) else None
        return part is not None and not part.is_argument

    def _is_new(self, result: Any, fill: _Fill) -> bool:
        kind = type(result)
        if kind is tuple:
            return all(self._is_new(one, fill) for one in result)
        if kind is Tensor:
            known = self._environment.find(result) is not None or fill.has(result)
            return not known and not result.__dict__
        return kind in PLAIN_TYPES


class _Fill:
    """Holds what a recorder had noted when a cache called its function.

    Args:
        frame: the function.
        misses: how often the caches had missed before.
        changes: the changes of the environment so far.
        settings: the modes and settings of torch.
        writer: writes the tape.
        parts: the objects that note something of the run.

    Attributes:
        position: how many ops there were.
        known: the identities of what the caches held.
        noted: how much the tape notes that is never taken off.
    """

    def __init__(
        self,
        frame: FrameType,
        misses: dict[Cache, int],
        changes: list[EnvironmentChange],
        settings: Any,
        writer: TapeWriter,
        parts: Iterable[Any],
    ) -> None:
        self.frame = frame
        self.misses = misses
        self.changes = changes
        self.settings = settings
        self.position: int = len(writer.tape.ops)
        self.known: set[int] = {id(one) for cache in misses for _, one in entries_of(cache)}
        self.noted: tuple[int, ...] = noted_on(writer.tape)
        self._tracked = dict(writer.tracked)
        self._names = [
            (tracked, tracked.ref, tracked.version, tracked.graphless)
            for tracked in writer.tracked.values()
        ]
        self._parts = [(part, _noted_in(part)) for part in parts]
        self._contents = [
            (value, copy.copy(value))
            for _, attributes in self._parts
            for value in attributes.values()
            if isinstance(value, _CONTAINERS)
        ]

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor was on the tape."""
        tracked = self._tracked.get(id(tensor))
        return tracked is not None and tracked() is tensor

    def undo(self) -> None:
        """Let everything be noted again that was, and nothing else."""
        for part, attributes in self._parts:
            for name, value in attributes.items():
                setattr(part, name, value)
        for container, content in self._contents:  # which others have, too
            container.clear()
            add = container.extend if isinstance(container, _LISTS) else container.update
            add(content)
        for tracked, ref, version, graphless in self._names:
            tracked.ref, tracked.version, tracked.graphless = ref, version, graphless


def noted_on(tape: Tape) -> tuple[int, ...]:
    """Return how much a tape notes that is never taken off."""
    return len(tape.blockers), len(tape.forgets), len(tape.blocks), len(tape.joint)


def _noted_in(part: Any) -> dict[str, Any]:
    names = getattr(type(part), "__slots__", None) or vars(part)
    return {name: getattr(part, name) for name in names}


def _runs_within(frame: FrameType | None, caller: FrameType) -> bool:
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


_ROOM = 3  # after so many fills, calls of a cache that can be watched are ops (`TraceTree`)
_LISTS = (list, deque)
_CONTAINERS = (*_LISTS, dict, set)


# What a run has put into caches, once it is over.


def look_at_caches(
    recording: Recording, values: RunValues, block: Callable[..., None], cleared: list[Any]
) -> None:
    """Record what a run put into each `functools.lru_cache`.

    Args:
        recording: the run.
        values: the values of the run.
        block: notes why it must not be replayed, and where.
        cleared: the caches that it has cleared.
    """
    tape, environment = recording.tape, recording.environment
    kept = [recording.root.output, *((c.key, c.value) for c in recording.changes)]
    outlive = {ref.index for ref in refs_in(kept)}
    for label, cache, *_ in environment.caches:
        if any(one is cache for one in cleared):
            block(f"the run clears the cache of {label}", label)
        if cache not in environment.fills:
            continue
        if not are_cached(environment.read_caches):  # a later entry has displaced one
            tape.block(environment.reason_to_fill(label))
            environment.displaced.add(label)
        if not is_finished_function(cache.__wrapped__):
            environment.filled_caches[cache] = entries_of(cache)
    for reason, cache, was_empty in environment.misses():
        entries = entries_of(cache)
        lasting = [entry for entry in entries if not _ends_with_run(entry[0], outlive, values)]
        # A result computed by a function in pure Python is the same when it comes from the
        # cache. Where no call can find an entry again, the cache is as good as empty.
        if (lasting or not was_empty) and (
            _has_ops_of(cache.__wrapped__, tape) or not all(map(is_value, cached_results(cache)))
        ):
            tape.block(reason)
            recording.is_transient = True
        # No one may see a traced scalar after the run.
        if any(type(value) in TRACED for value in cached_results(cache)):
            cache.cache_clear()
        inner = cache.__wrapped__
        if is_computation(inner) and all(map(is_value, cached_results(cache))):
            continue  # which returns the same, whether it is kept or not
        if not lasting or not is_finished_function(inner):
            environment.filled_caches[cache] = lasting


def _ends_with_run(key: Any, outlive: set[int], values: RunValues) -> bool:
    """Return whether a key contains a tensor that the run has made, and does not leave."""
    if type(key) is not tuple:
        return False
    found = (values.producer_of(item) for item in key if type(item) is Tensor)
    return any(index is not None and index not in outlive for index in found)


def _has_ops_of(function: Any, tape: Tape) -> bool:
    """Return whether torch functions were called from within a function of the model."""
    code = getattr(function, "__code__", None)
    for op in tape.ops:
        site, scope = op.site, op.scope
        while op.kind is OpKind.CALL and site is not None:
            if any(running is code for running, _ in site.chain):
                return True
            if scope.parent is None:
                break
            site, scope = scope.site, scope.parent
    return False
