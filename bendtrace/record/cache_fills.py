"""Fills of caches, which later runs do not repeat: what a cached function did leaves the tape again.

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
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.python.lazy import LazyModule
from bendtrace.record.effects import Effects
from bendtrace.tape.captured import PLAIN_TYPES, EnvironmentChange
from bendtrace.tape.scalars import TRACED, retire
from bendtrace.tape.structure import entries_of
from bendtrace.tape.tape import Tape
from bendtrace.watch.kinds import underlying_code

if TYPE_CHECKING:
    import functools

    from bendtrace.record.tape_writer import TapeWriter
    from bendtrace.record.values import RunValues
    from bendtrace.watch import containers
    from bendtrace.watch.environment import Environment

    Cache = functools._lru_cache_wrapper[Any]
else:
    containers = LazyModule("bendtrace.watch.containers")


class CacheFills:
    """Takes what fills caches off the tape of a run.

    Args:
        environment: what the run can read.
        writer: writes the tape.
        values: the values of the run.
        parts: returns the objects that note something of the run.
        settings: returns the modes and settings of torch, and how many counters are lifted.
        can_begin: whether the run is one from which something may be taken off now.
    """

    def __init__(
        self,
        environment: Environment,
        writer: TapeWriter,
        values: RunValues,
        parts: Callable[[], Iterable[Any]],
        settings: Callable[[], Any],
        can_begin: Callable[[], bool],
    ) -> None:
        self._environment = environment
        self._writer, self._values = writer, values
        self._parts, self._settings, self._can_begin = parts, settings, can_begin
        self._misses: dict[Cache, int] = {}
        self._caches: dict[types.CodeType, list[Cache]] = {}
        for label, cache, info, _ in environment.caches:
            code = underlying_code(cache.__wrapped__)
            self._misses[cache] = info.misses
            if code is None or code.co_flags & _ENDS_LATER:
                continue
            if label in environment.inputs and info.currsize == info.maxsize:
                continue  # each fill displaces what programs take from it
            # Which entry a full one drops depends on the latest calls, of which replays make none.
            part = environment.find(cache)
            is_soon_op = part is not None and containers.can_be_watched(part)
            room = _ROOM if is_soon_op else 1
            if info.maxsize in (None, 1) or info.maxsize - info.currsize >= room:
                self._caches.setdefault(code, []).append(cache)
        self._fill: _Fill | None = None

    @property
    def codes(self) -> frozenset[int]:
        """The identities of the code that caches call."""
        return frozenset(map(id, self._caches))

    def begins(self, frame: FrameType) -> bool:
        """Look whether a cache has called code that begins, and return whether to wait for its end.

        Args:
            frame: the code.
        """
        if self._fill is not None and _is_called_by(frame, self._fill.frame):
            return False
        before, self._fill = self._misses, None
        self._misses = {cache: cache.cache_info().misses for cache in before}
        if all(before[cache] == self._misses[cache] for cache in self._caches[frame.f_code]):
            return False  # something else has called it
        if not all(map(self._can_be_repeated, _arguments(frame))):
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
    """What a recorder had noted when a cache called its function.

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
        self._parts = [(part, _attributes_of(part)) for part in parts]
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
            container.extend(content) if isinstance(container, _LISTS) else container.update(content)
        for tracked, ref, version, graphless in self._names:
            tracked.ref, tracked.version, tracked.graphless = ref, version, graphless


def noted_on(tape: Tape) -> tuple[int, ...]:
    """Return how much a tape notes that is never taken off."""
    return len(tape.blockers), len(tape.forgets), len(tape.blocks), len(tape.joint)


def _attributes_of(part: Any) -> dict[str, Any]:
    names = getattr(type(part), "__slots__", None) or vars(part)
    return {name: getattr(part, name) for name in names}


def _arguments(frame: FrameType) -> Iterator[Any]:
    """Yield what a function has received that has just begun."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[count:]
    for name in code.co_varnames[:count]:
        yield frame.f_locals[name]
    if code.co_flags & inspect.CO_VARARGS:
        yield frame.f_locals[names[0]]
        names = names[1:]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        yield from frame.f_locals[names[0]].values()


def _is_called_by(frame: FrameType | None, caller: FrameType) -> bool:
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


_ROOM = 3  # after so many fills, calls of a cache that can be watched are ops (`TraceTree`)
# Code that has not ended when its call returns.
_ENDS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LISTS = (list, deque)
_CONTAINERS = (*_LISTS, dict, set)
