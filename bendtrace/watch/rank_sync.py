"""Synchronised ranks: before each collective, all ranks have to be about to do the same.

A rank whose data lead it to another branch than the others would wait for them forever, or take
part in the wrong collective. So before each collective, and at the end of a call, ranks exchange
what they are about to do; if they disagree, all of them raise. What they exchange does not depend
on whether a rank traces, replays, resumes or runs live.

Each call asks the questions in this file, also where there is one process. Their answers for
several processes are in `collectives.py`, which is loaded once a process group is initialised.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.python.lazy import LazyModule
from bendtrace.tape.tape import Tape

if TYPE_CHECKING:
    from bendtrace.watch import collectives
else:
    collectives = LazyModule("bendtrace.watch.collectives")

_distributed = torch.distributed.is_available()
# The search for the caller of a collective stops at this code.
ENDS: set[CodeType] = set()
# Ops that read of a module what only they and the backward pass change.
JOINT: set[Any] = set()


@dataclass
class RankSyncSettings:
    """The settings that say whether ranks agree, and how many seconds they wait."""

    enabled: bool = True
    timeout: float = 1800.0


settings = RankSyncSettings()

# Known groups in which models communicate, however a call is served.
known_groups: MutableMapping[Any, tuple[collectives.RankGroup, ...]] = WeakIdKeyDictionary()
asked_groups: MutableMapping[Any, list[collectives.RankGroup]] = WeakIdKeyDictionary()
_has_entries = False  # whether these ever had an entry


def ask(model: Any, group: collectives.RankGroup) -> Callable[[], None]:
    """Make the ranks of a group agree at the end of each call; the returned function ends that."""
    global _has_entries
    _has_entries = True
    asked = asked_groups.setdefault(model, [])
    asked.append(group)

    def undo() -> None:
        if group in asked:
            asked.remove(group)
        if not asked:
            asked_groups.pop(model, None)

    return undo


def has_other_ranks() -> bool:
    """Return whether other processes take part, which repeated work here may leave waiting."""
    if not _distributed or torch.distributed.distributed_c10d._world.default_pg is None:
        return False  # by far less code than the next question, which calls would notice
    return is_running() and torch.distributed.get_world_size() > 1


def is_running() -> bool:
    """Return whether the process belongs to a process group."""
    # Checked first, so that torch.compile, which passes here, follows no further.
    if torch.compiler.is_compiling():
        return False
    return _distributed and torch.distributed.is_initialized()


def note_groups(model: Any, groups: Iterable[collectives.RankGroup]) -> None:
    """Record that a model communicates, and in which groups."""
    global _has_entries
    if is_attachable(model):
        _has_entries = True
        known_groups[model] = tuple(dict.fromkeys((*known_groups.get(model, ()), *groups)))


def is_attachable(model: Any) -> bool:
    """Return whether data can be attached to a model for its lifetime."""
    return isinstance(model, (nn.Module, types.FunctionType))


def is_joint(model: Any) -> bool:
    """Return whether ranks communicate in calls of a model, so that they have to agree."""
    if not (_has_entries and is_running()):  # asked at each call
        return False
    return is_attachable(model) and (model in known_groups or model in asked_groups)


def needs_agreement(model: Any, tape: Tape) -> bool:
    """Return whether ranks have to agree in a replay."""
    if not tape.is_joint and not (
        _has_entries and is_attachable(model) and model in asked_groups  # asked at each call
    ):
        return False
    return settings.enabled and is_running()


def joint_call(
    model: Any, goes_on: bool = False
) -> AbstractContextManager[collectives.JointCall | None]:
    """Return a context in which the ranks agree on the collectives of a call.

    With `goes_on`, this may be the rest of a suspended call. The context gives the `JointCall`, or
    None if agreement is not needed.
    """
    return collectives.call_context(model, goes_on) if is_running() else nullcontext()


def joint_recording(
    model: Any, names: frozenset[str], tape: Tape, goes_on: bool
) -> AbstractContextManager[collectives.JointCall | None]:
    """Return a context in which the ranks agree on a run that is being recorded.

    The model's code uses the names. With `goes_on`, this may be the rest of a suspended call.
    """
    if not is_running():
        return nullcontext()
    return collectives.recording_context(model, names, tape, goes_on)


# Questions about the things of torch.distributed that a model has


def is_wiring(value: Any) -> bool:
    """Return whether an object defines who communicates, and never changes: a group, a mesh.

    Such objects are constants of a run: they are created once, on all ranks, and never change.
    """
    module = type(value).__module__
    if not module.startswith(("torch._C._distributed_c10d", "torch.distributed")):
        return False
    return collectives.is_group_or_mesh(value)


# All else that a DDP module has is read only in what is one op here.
_OF_COMPOSABLE = "__composable_api_"  # what `fully_shard` and `replicate` keep in a module
_READ_BY_FORWARD = frozenset({"training", "_delay_all_reduce_all_params", "_use_python_reducer"})


def hidden_of(module: nn.Module) -> frozenset[str]:
    """Return the attributes of a module that its forward does not depend on."""
    if isinstance(module, DistributedDataParallel):
        return frozenset(vars(module)) - _READ_BY_FORWARD
    if "torch.distributed._composable.contract" not in sys.modules:
        return frozenset()
    return frozenset(name for name in vars(module) if name.startswith(_OF_COMPOSABLE))


def fsdp_states() -> Any:
    """Return the module with FSDP's states of modules; None if nobody has used FSDP."""
    return sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")


def is_joint_hook(hook: Any) -> bool:
    """Return whether a forward hook on a module is FSDP's."""
    return fsdp_states() is not None and collectives.is_fsdp_hook(hook)


def gather_locations(module: nn.Module) -> Iterable[list[tuple[nn.Module, str]]]:
    """Return the locations of each parameter that FSDP gathers when a module is called.

    These are modules and names; between calls they hold shards.
    """
    return () if fsdp_states() is None else collectives.fsdp_locations(module)


def has_joint_hooks(module: nn.Module) -> bool:
    """Return whether FSDP may act around the forward of a module."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    return bool(hooked) and fsdp_states() is not None
