"""Synchronised ranks: before each collective, all ranks have to be about to do the same.

A rank whose data lead it to another branch than the others would wait for them forever, or take
part in the wrong collective. So before each collective, and at the end of a call, ranks exchange
what they are about to do; if they disagree, all of them raise. What they exchange does not depend
on whether a rank traces, replays, resumes or runs live.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.errors import InputError, RankDivergenceError
from bendtrace.python.internals import TorchDispatchMode, internal
from bendtrace.python.places import place_text
from bendtrace.python.sites import BEHIND, is_users_file
from bendtrace.tape.tape import Op, Tape, Use
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch.collectives import (
    Collective,
    RankGroup,
    Ranks,
    collective_of,
    groups_of,
    names_collectives,
    parameters_reached,
    ranks,
    world,
)
from bendtrace.watch.functions import is_gate

_distributed = torch.distributed.is_available()


@dataclass
class RankSyncSettings:
    """The settings that say whether ranks agree, and how many seconds they wait."""

    enabled: bool = True
    timeout: float = 1800.0


_settings = RankSyncSettings()


def settings() -> RankSyncSettings:
    """Return the settings of the process."""
    return _settings


# Known groups in which models communicate, however a call is served.
_groups: MutableMapping[Any, tuple[RankGroup, ...]] = WeakIdKeyDictionary()
_asked: MutableMapping[Any, list[RankGroup]] = WeakIdKeyDictionary()
_has_entries = False  # whether these ever had an entry
_calls: MutableMapping[Any, tuple[str, int]] = WeakIdKeyDictionary()
_named: Counter[str] = Counter()


def _next_call(model: Any) -> tuple[str, int]:
    """Return a name for a model that is likely to be the same on all ranks, and count its calls."""
    cached = _calls.get(model)
    if cached is None:
        name = model.__qualname__ if hasattr(model, "__qualname__") else type(model).__qualname__
        _named[name] += 1
        cached = f"{name} {_named[name]}", 0
    found = _calls[model] = cached[0], cached[1] + 1
    return found


def ask(model: Any, group: RankGroup) -> Callable[[], None]:
    """Make the ranks of a group agree at the end of each call of a model.

    Returns:
        A function that ends this.
    """
    global _has_entries
    _has_entries = True
    asked = _asked.setdefault(model, [])
    asked.append(group)

    def undo() -> None:
        if group in asked:
            asked.remove(group)
        if not asked:
            _asked.pop(model, None)

    return undo


def has_other_ranks() -> bool:
    """Return whether other processes take part, which repeated work here may leave waiting."""
    if not _distributed or torch.distributed.distributed_c10d._world.default_pg is None:
        return False  # by far less code than the next question, which calls would notice
    return _is_running() and torch.distributed.get_world_size() > 1


def _is_running() -> bool:
    # Checked first, so that torch.compile, which passes here, follows no further.
    if torch.compiler.is_compiling():
        return False
    return _distributed and torch.distributed.is_initialized()


def _look_at(model: Any, names: frozenset[str]) -> None:
    """Record, when a run of a model begins, the groups in which it communicates."""
    found = groups_of(model) if isinstance(model, nn.Module) else []
    communicates = names_collectives(names)
    if communicates and len(torch.distributed.distributed_c10d._world.pg_map) == 1:
        found.append(world())
    if found or communicates:
        _note_groups(model, found)


def _note_groups(model: Any, groups: Iterable[RankGroup]) -> None:
    """Record that a model communicates, and in which groups."""
    global _has_entries
    if is_attachable(model):
        _has_entries = True
        _groups[model] = tuple(dict.fromkeys((*_groups.get(model, ()), *groups)))


def is_attachable(model: Any) -> bool:
    """Return whether data can be attached to a model for its lifetime."""
    return isinstance(model, (nn.Module, types.FunctionType))


def is_joint(model: Any) -> bool:
    """Return whether ranks communicate in calls of a model, so that they have to agree."""
    if not (_has_entries and _is_running()):  # asked at each call
        return False
    return is_attachable(model) and (model in _groups or model in _asked)


def needs_agreement(model: Any, tape: Tape) -> bool:
    """Return whether ranks have to agree in a replay.

    Args:
        model: the called model.
        tape: the replayed tape.
    """
    if not tape.is_joint and not (_asked and is_attachable(model) and model in _asked):
        return False
    return _settings.enabled and _is_running()


def _groups_of_model(model: Any) -> tuple[RankGroup, ...]:
    if not is_attachable(model):
        return ()
    size = torch.distributed.get_world_size()  # the current one: it may have been initialised again
    found = (*_groups.get(model, ()), *_asked.get(model, ()))
    return tuple(group for group in found if max(group.ranks) < size)


# Calls


class _CurrentJointCall(threading.local):
    call: JointCall | None = None
    forbidden: str = ""


_local = _CurrentJointCall()


class JointCall:
    """A call of a model whose collectives the ranks agree on.

    Attributes:
        model: the called model.
        groups: the groups that communicate, as far as known.
        counts: the number of collectives so far, by group.
        tape: the tape of the run that is being recorded or replayed; None for a live one.
        error: the error raised because ranks did not agree.
        is_left: whether the call is suspended, to be continued by another run.
    """

    def __init__(self, model: Any, groups: Iterable[RankGroup]) -> None:
        self.model = model
        self.groups: list[RankGroup] = list(dict.fromkeys(groups))
        self.counts: dict[RankGroup, int] = {}
        self.tape: Tape | None = None
        self.replays: bool = False
        self.error: RankDivergenceError | None = None
        self.is_left: bool = False

    def follows(self, tape: Tape) -> None:
        """Record the tape that is replayed from now on."""
        self.tape, self.replays = tape, True

    def agree_on(self, collective: Collective, frame: FrameType) -> None:
        """Agree on a collective that is about to begin.

        Raises:
            RankDivergenceError: the ranks are about to do different things.
        """
        group = collective.group
        place, op = self._place(frame)
        if place is None or not _settings.enabled or len(group.ranks) < 2:
            return
        number = self.counts[group] = self.counts.get(group, 0) + 1
        if group not in self.groups:
            self.groups.append(group)
        what = f"collective {number} in this call, {collective}" + (f" at {place}" if place else "")
        self._meet(group, what, op)

    def leaves(self, divergence: object) -> None:
        """Suspend the call: a replay has diverged, and will be resumed or given up."""
        self.is_left = True
        weakref.finalize(divergence, _abandon, self).atexit = False

    def ends(self, output: Any) -> None:
        """Agree that the call is at its end.

        Raises:
            RankDivergenceError: it is not at its end on all ranks.
        """
        if self.error is not None:
            raise self.error  # the model has caught it
        if not _settings.enabled:
            return
        if not self.groups:  # others may wait for this rank, which will not come
            if not is_joint(self.model):
                return
            ranks_of_process().withdraw("ended its call without a collective" + self._guards(None))
            return
        reached = parameters_reached(self.model, output)
        for group in sorted(self.groups, key=lambda group: group.name):
            if len(group.ranks) > 1:
                count = self.counts.get(group, 0)
                what = f"the end of the call, after {count} collectives"
                if reached is not None:
                    what += f", and gradients of {reached}"
                self._meet(group, what, None)

    def fails(self, error: BaseException) -> None:
        """Tell the others that the call has ended with an error on this rank."""
        if not _settings.enabled or not (self.groups or is_joint(self.model)):
            return
        met = error.group if isinstance(error, RankDivergenceError) else None
        others = [g for g in self.groups if g.name != met and len(g.ranks) > 1]
        text = f"raised {type(error).__name__}: {str(error)[:400]}"
        try:
            ranks_of_process().leave(others, text + self._guards(None))
        except RuntimeError:  # the store is gone: so are the others
            pass

    def _meet(self, group: RankGroup, what: str, op: Op | None) -> None:
        try:
            ranks_of_process().meet(group, what, what + self._guards(op))
        except RankDivergenceError as error:
            self.error = error
            raise

    def _place(self, frame: FrameType | None) -> tuple[str | None, Op | None]:
        """Return the place of the model; None for the place if other code communicates."""
        found: str | None = None
        op: Op | None = None
        while frame is not None:
            code = frame.f_code
            if code in _OF_DDP:
                return None, None
            if found is None:
                tape: Tape | None = None
                if code.co_filename == "<bendtrace run>":
                    tape = frame.f_globals.get("__tape__")
                if tape is not None:
                    op = tape.ops[frame.f_globals["__op_of_line__"][frame.f_lineno]]
                    found = _op_place_text(op, tape)
                elif code in BEHIND or code in ENDS:
                    found = ""
                elif is_users_file(code.co_filename):
                    found = place_text(code.co_filename, frame.f_lineno)
            if code in ENDS:
                break
            frame = frame.f_back
        if self.tape is not None and not self.replays and self.tape.ops:
            op = self.tape.ops[-1]
            self.tape.joint.setdefault(op.index, found or "")
        return found or "", op

    def _guards(self, op: Op | None) -> str:
        """Return the branches that led the run here, as far as they depend on values."""
        tape = self.tape
        if tape is None:
            return " (it runs live)"
        until = len(tape.ops) if op is None else op.index
        taken = [
            f"`{guard.site.place.text}` was {guard.answer!r}"
            for guard in tape.guards
            if guard.position <= until and guard.site is not None and guard.use not in _NO_FLOW
        ]
        return f" (by {'; '.join(taken[-3:])})" if taken else " (by no branch)"


_NO_FLOW = (Use.RESULT, Use.METADATA, Use.LENGTH, Use.ITER)
_OF_DDP = frozenset(
    {
        internal("torch.nn.parallel.DistributedDataParallel._pre_forward.__code__", None),
        internal("torch.nn.parallel.DistributedDataParallel._post_forward.__code__", None),
    }
)


def _op_place_text(op: Op, tape: Tape) -> str:
    """Return the place of an op in a replay, as recorded."""
    joint = tape.joint.get(op.index)
    if joint is not None:
        return joint
    site, scope = op.site, op.scope
    while site is None and scope.parent is not None:
        site, scope = scope.site, scope.parent
    return "" if site is None else place_text(site.place.file, site.place.line)


def ranks_of_process() -> Ranks:
    """Return the object through which this process communicates with the others."""
    return ranks(_settings.timeout)


class _CollectiveListener(TorchDispatchMode):
    """Sees collectives before they begin, and nothing else."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(map(_is_dtensor, types)):
            return NotImplemented  # what it does with its parts reaches here
        if func.namespace in _NAMESPACES:
            collective = collective_of(func, args)
            if collective is not None:
                _handle_collective(collective, sys._getframe(1))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=64)
def _is_dtensor(kind: type) -> bool:
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed")
        for base in kind.__mro__
    )


_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor", "c10d_functional"})


def _handle_collective(collective: Collective, frame: FrameType) -> None:
    if _local.forbidden:
        raise InputError(
            f"{_local.forbidden} reached {collective}, which all ranks have to take part in: "
            "call the model once first, or use node paths, modules, or selectors that do not "
            "look ahead"
        )
    watcher = current_watcher()
    if watcher is not None:  # outside of all ops
        watcher.unseen(f"{collective}, called without the tracer,")
    if _local.call is not None:
        _local.call.agree_on(collective, frame)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Refuse collectives within the context: its code must not involve other ranks.

    Args:
        what: a description of its code, for messages.

    Raises:
        InputError: the code reaches a collective.
    """
    outer, _local.forbidden = _local.forbidden, what
    call, _local.call = _local.call, None
    try:
        yield
    finally:
        _local.forbidden = outer
        _local.call = call


@contextmanager
def joint_call(model: Any, goes_on: bool = False) -> Iterator[JointCall | None]:
    """Make the ranks agree on the collectives of a call, within the context.

    Args:
        model: the called model.
        goes_on: whether this may be the rest of a suspended call.

    Yields:
        The `JointCall`, or None if agreement is not needed.
    """
    call = _local.call
    if not _is_running():
        yield None
        return
    if call is not None and call.is_left:
        if not goes_on:
            _abandon(call)
            call = None
    elif call is not None:  # a call in a call
        before = call.tape, call.replays
        try:
            yield None
        finally:
            call.tape, call.replays = before
        return
    if call is None:
        call = JointCall(model, _groups_of_model(model))
        if is_joint(model):
            ranks_of_process().call = _next_call(model)
    call.is_left, call.tape, call.replays = False, None, False
    _local.call = call
    try:
        with _CollectiveListener():
            yield call
    except BaseException as error:
        call.fails(error)
        raise
    finally:
        if not call.is_left:
            _local.call = None


def _abandon(call: JointCall) -> None:
    """A call was suspended, and nothing continued it."""
    if call.is_left:
        if _local.call is call:
            _local.call = None
        call.is_left = False
        call.fails(RuntimeError("the run was not continued"))


@contextmanager
def joint_recording(
    model: Any, names: frozenset[str], tape: Tape, goes_on: bool
) -> Iterator[JointCall | None]:
    """Make the ranks agree on a run that is being recorded.

    Args:
        model: the model that is run.
        names: the names that its code uses.
        tape: the tape that is written.
        goes_on: whether this may be the rest of a suspended call.
    """
    if _is_running():
        _look_at(model, names)
    with joint_call(model, goes_on) as call:
        if call is not None:
            call.tape = tape
        yield call
        # Insertions may communicate in one run, and not in another.
        if call is not None and (call.counts or any(map(is_gate, tape.ops))):
            _note_groups(model, call.counts)
        if call is not None and is_attachable(model) and model in _groups:
            tape.is_joint = True


# The search for the caller of a collective stops at this code.
ENDS: set[CodeType] = set()
