"""Communication of ranks: the objects of torch.distributed, and the ops that communicate."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.errors import InputError, RankDivergenceError
from bendtrace.python.internals import TorchDispatchMode, internal, pytree
from bendtrace.python.sites import BEHIND, is_users_file, place_text
from bendtrace.tape.tape import Op, Tape, Use
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch.functions import is_gate
from bendtrace.watch.owners import module_tree
from bendtrace.watch.rank_sync import (
    ENDS,
    JOINT,
    asked_groups,
    fsdp_states,
    is_attachable,
    is_joint,
    known_groups,
    note_groups,
    settings,
)

# Which things of torch.distributed say who communicates and how.


def is_group_or_mesh(value: Any) -> bool:
    """Return whether an object of torch.distributed defines who communicates (see `rank_sync`)."""
    return isinstance(value, _wirings(len(sys.modules)))


@functools.lru_cache(maxsize=1)
def _wirings(_: int) -> tuple[type, ...]:
    # Anew whenever something was imported: torch.distributed.tensor is when it is first used.
    named = (
        ("torch.distributed", "ProcessGroup"),
        ("torch.distributed", "ReduceOp"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed.tensor.placement_types", "Placement"),
    )
    found = [getattr(sys.modules.get(module), name, None) for module, name in named]
    kinds = [kind for kind in found if isinstance(kind, type)]
    reduce_op = getattr(torch.distributed, "ReduceOp", None)
    kinds += [kind for kind in (getattr(reduce_op, "RedOpType", None),) if kind is not None]
    return tuple(kinds)


# What ranks do together: which things belong to torch.distributed, and which ops communicate.


def joint_functions() -> Iterator[tuple[Any, str]]:
    """Yield, as owner and name, Python functions that are recorded as one op.

    Those of torch.distributed use process groups past the function mode; the methods of DTensors
    are Python code that handles their local parts.
    """
    if not dist.is_available():
        return
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        for name in ("from_local", "to_local", "redistribute", "full_tensor"):
            yield tensor.DTensor, name
        yield tensor, "distribute_tensor"
    nn_functional = sys.modules.get("torch.distributed.nn.functional")
    outer = sys.modules.get("torch.distributed.nn")
    for name in _AUTOGRAD:
        for owner in (nn_functional, outer):
            if owner is not None and name in vars(owner):
                yield owner, name
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None:
        for name in _FUNCTIONAL:
            if name in vars(functional):
                yield functional, name
    for name in _IN_PLACE:
        if name in vars(dist):
            yield dist, name


def layout_properties() -> Iterator[tuple[Any, str]]:
    """Yield the properties that describe how a tensor is laid out over ranks, as owner and name."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        yield tensor.DTensor, "placements"
        yield tensor.DTensor, "device_mesh"


_AUTOGRAD = (
    "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce",
    "reduce_scatter", "scatter", "_all_gather_base",
)  # fmt: skip
_FUNCTIONAL = (
    "all_gather_single", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_to_all_single", "all_to_all_single_autograd", "broadcast", "permute_tensor",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "reduce_scatter_single",
    "wait_tensor",
)  # fmt: skip
_IN_PLACE = (
    "all_gather_single", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced",
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip


# Which code may communicate

_TELLING = frozenset({*_IN_PLACE, *_FUNCTIONAL, "redistribute", "full_tensor"})
# Of these names, those that others have functions of as well.
_COMMON = frozenset({"barrier", "broadcast", "gather", "reduce", "scatter"})


def names_collectives(names: frozenset[str]) -> bool:
    """Return whether code that uses some names may communicate."""
    if not _TELLING.isdisjoint(names - _COMMON):
        return True
    return not _COMMON.isdisjoint(names) and not names.isdisjoint({"dist", "distributed"})


# Which ops do

_KINDS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast", "reduce_": "reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single", "gather_": "gather", "scatter_": "scatter",
    "monitored_barrier_": "barrier",
}  # fmt: skip
_NOT_JOINT = frozenset(
    {
        "send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops", "wait_tensor",
        "_wrap_tensor_autograd",
    }
)  # fmt: skip
# Where ranks may give, or get, tensors of other shapes than others do.
_UNEVEN = frozenset(
    {"alltoall_", "alltoall_base_", "all_to_all_single", "gather_", "scatter_", "barrier",
     "monitored_barrier_", "shard_dim_alltoall"}
)  # fmt: skip
# Where that is so for one of two arguments.
_COUNTED = {"allgather_": 0, "reduce_scatter_": 1}


@dataclass(frozen=True)
class Collective:
    """One op in which all ranks of a group take part."""

    group: RankGroup
    text: str

    def __str__(self) -> str:
        return self.text


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """Return the collective for an op of the dispatcher that is torch.distributed's, if any."""
    name = func._schema.name.partition("::")[2]
    if name in _NOT_JOINT or not (groups := [g for g in map(_group_in, args) if g is not None]):
        return None
    counted: Any = () if name in _UNEVEN else args
    if name in _COUNTED:
        counted = args[_COUNTED[name]]
    given = [*_describe(counted)]
    if name == "broadcast_":
        given.append(f"from rank {args[2]}")
    elif name == "reduce_":
        given.append(f"to rank {args[3]}")
    elif func.namespace != "c10d":
        given += [str(value) for value in args[:-1] if isinstance(value, (str, int))]
    kind = _KINDS.get(name, name.rstrip("_"))
    return Collective(groups[0], f"{kind}({', '.join(given)}) in group {groups[0].name}")


def _describe(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        sizes = "x".join(map(str, value.shape)) or "scalar"
        yield f"{sizes} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _describe(item)


def _group_in(value: Any) -> RankGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return group_of(dist.ProcessGroup.unbox(value))
        except (RuntimeError, TypeError):  # another kind of object: what to reduce by
            return None
    if isinstance(value, str):
        try:
            named: Any = value
            return group_of(torch._C._distributed_c10d._resolve_process_group(named))
        except (RuntimeError, ValueError, LookupError):
            return None
    return None


def group_of(group: Any) -> RankGroup:
    """Return the properties of a process group that are the same on all ranks."""
    return RankGroup(group.group_name, tuple(dist.get_process_group_ranks(group)))


def world() -> RankGroup:
    """Return the default process group."""
    return group_of(dist.group.WORLD)


# Which models do


def groups_of(model: nn.Module) -> list[RankGroup]:
    """Return the groups over which a model's parameters and buffers are distributed."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return []
    meshes: dict[int, Any] = {}
    for module in module_tree(model):
        found = [*module._parameters.values(), *module._buffers.values()]
        found += [parameter.sharded_param for parameter in gather_records(module)]
        for value in found:
            if isinstance(value, tensor.DTensor):
                meshes[id(value.device_mesh)] = value.device_mesh
    groups = [group_of(group) for mesh in meshes.values() for group in mesh.get_all_groups()]
    return list(dict.fromkeys(groups))


def parameters_reached(model: Any, output: Any) -> str | None:
    """Return which of the parameters that FSDP gathers will get gradients in a backward pass.

    FSDP scatters the gradients that exist, so they have to be the same ones on all ranks. They are
    given by number and a digest of names; None for a model without such parameters.
    """
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        for module in module_tree(model):
            for parameter in gather_records(module):
                full = getattr(parameter, "_unsharded_param", None)
                names[id(full)] = f"{len(names)}"
    if not names:
        return None
    reached: set[str] = set()
    nodes = [
        tensor.grad_fn for tensor in _take_tensors_out(output)[0] if tensor.grad_fn is not None
    ]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)  # of a node that accumulates gradients
        if id(variable) in names:
            reached.add(names[id(variable)])
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                nodes.append(inner)
    digest = hashlib.sha256(",".join(sorted(reached)).encode()).hexdigest()[:8]
    return f"{len(reached)} parameters ({digest})"


# The work of DDP and FSDP around the forward of a module, as ops of a run.
#
# Both leave the forward itself unchanged. What they do before and after it - synchronise buffers,
# gather and release parameters, prepare for the backward pass - each replay does as well, as an
# op that receives the module and its input or output tensors.

# DDP

# Without them, runs are reported not to be repeatable.
_before: Any = internal("torch.nn.parallel.DistributedDataParallel._pre_forward", None)
_after: Any = internal("torch.nn.parallel.DistributedDataParallel._post_forward", None)
_forward: Any = DistributedDataParallel.forward


def entries_of_ddp() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if _before is None or _after is None:
        yield DistributedDataParallel, "forward", _reporting_forward
        return
    yield DistributedDataParallel, "_pre_forward", _before_ddp
    yield DistributedDataParallel, "_post_forward", _after_ddp


def _reporting_forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    watcher = current_watcher()
    if watcher is not None:
        watcher.unseen("DistributedDataParallel")
    return _forward(module, *inputs, **kwargs)


def prepare_forward(module: Any, *tensors: Tensor) -> Any:
    """Do DDP's work before the forward; return the tensors on the right device."""
    args, _ = _before(module, *tensors)
    return tuple(args) if tensors else None


def prepare_backward(module: Any, *tensors: Tensor) -> Any:
    """Do DDP's work after the forward; return the output tensors."""
    out = _after(module, tuple(tensors))
    return tuple(out) if tensors else None


def _before_ddp(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Replaces `DistributedDataParallel._pre_forward`."""
    watcher = current_watcher()
    if watcher is None:
        return _before(module, *inputs, **kwargs)
    if not module.device_ids and module.mixed_precision is None:
        watcher.opaque_call(prepare_forward, (module,), {})
        return inputs, kwargs
    tensors, rebuild = _take_tensors_out((inputs, kwargs))
    return rebuild(watcher.opaque_call(prepare_forward, (module, *tensors), {}))


def _after_ddp(module: Any, output: Any) -> Any:
    """Replaces `DistributedDataParallel._post_forward`."""
    watcher = current_watcher()
    if watcher is None:
        return _after(module, output)
    if not (module.find_unused_parameters or module.static_graph):
        watcher.opaque_call(prepare_backward, (module,), {})
        return output
    tensors, rebuild = _take_tensors_out(output)
    return rebuild(watcher.opaque_call(prepare_backward, (module, *tensors), {}))


# FSDP2


def _hook_of_fsdp(hooks: Mapping[int, Any], name: str) -> tuple[int, Any] | None:
    """Return the hook of FSDP's in a table, with its number."""
    states = fsdp_states()
    if states is None:
        return None
    for number, hook in hooks.items():
        inner = hook.hook if isinstance(hook, _JointHook) else hook
        method = inner
        while not hasattr(method, "__self__") and hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        owner = getattr(method, "__self__", None)
        if isinstance(owner, states.FSDPState) and getattr(method, "__name__", "") == name:
            return number, inner
    return None


_BEFORE, _AFTER = "_pre_forward", "_post_forward"


def is_fsdp_hook(hook: Any) -> bool:
    """Return whether a forward hook on a module is FSDP's."""
    return any(_hook_of_fsdp({0: hook}, name) is not None for name in (_BEFORE, _AFTER))


def fsdp_locations(module: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yield the locations of each parameter that FSDP gathers when a module is called.

    These are modules and names; between calls they hold shards.
    """
    for parameter in gather_records(module):
        info = parameter._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        yield [(info.module, info.param_name), *shared]


def gather_records(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP's record of each parameter that it gathers when a module is called."""
    states = fsdp_states()
    if states is None or type(module).__hash__ is None:  # FSDP finds modules by their hash
        return
    for group in _groups_of_state(states._get_module_fsdp_state(module)):
        yield from group.fsdp_params


def _groups_of_state(state: Any) -> list[Any]:
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.10 there was one at most
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def gather_parameters(module: nn.Module, *tensors: Tensor) -> Any:
    """Do FSDP's work before the forward; return the tensors for it, and the parameters."""
    found = _hook_of_fsdp(module._forward_pre_hooks, _BEFORE)
    assert found is not None
    args, _ = found[1](module, tensors, {})
    return (*args, *(places[0][0]._parameters[places[0][1]] for places in fsdp_locations(module)))


def release_parameters(module: nn.Module, *tensors: Tensor) -> Any:
    """Do FSDP's work after the forward; return the output tensors."""
    found = _hook_of_fsdp(module._forward_hooks, _AFTER)
    assert found is not None
    return tuple(found[1](module, (), tensors))


class _JointHook:
    """Stands in for a hook of FSDP's while a module is called in a run."""

    def __init__(self, hook: Callable[..., Any], shards: list[_Shard]) -> None:
        self.hook = hook
        self.shards = shards


# A shard, and where it was found.
_Shard = tuple[dict[str, Any], str, Any]


class _JointPreHook(_JointHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return self.hook(module, args, kwargs)
        tensors, rebuild = _take_tensors_out((args, kwargs))
        given = watcher.opaque_call(gather_parameters, (module, *tensors), {})
        for places, parameter in zip(fsdp_locations(module), given[len(tensors) :], strict=True):
            for holder, name in places:
                table = holder._parameters
                # A resumed run reaches what was done before: FSDP has the shards back in place.
                if table[name] is not parameter:
                    self.shards.append((table, name, table[name]))
                    table[name] = parameter
        return rebuild(given[: len(tensors)])


class _JointPostHook(_JointHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return self.hook(module, args, output)
        tensors, rebuild = _take_tensors_out(output)
        given = watcher.opaque_call(release_parameters, (module, *tensors), {})
        _restore_shards(self.shards)
        return rebuild(given)


def _restore_shards(shards: list[_Shard]) -> None:
    for table, name, shard in shards:
        table[name] = shard
    shards.clear()


@contextmanager
def with_joint_hooks(module: nn.Module) -> Iterator[None]:
    """Record FSDP's work around the forward of a module, within the context."""
    exchanged: list[tuple[Any, int, Any]] = []
    shards: list[_Shard] = []
    for hooks, name, kind in (
        (module._forward_pre_hooks, _BEFORE, _JointPreHook),
        (module._forward_hooks, _AFTER, _JointPostHook),
    ):
        found = _hook_of_fsdp(hooks, name)
        if found is not None and not isinstance(hooks[found[0]], _JointHook):
            exchanged.append((hooks, *found))
            hooks[found[0]] = kind(found[1], shards)
    try:
        yield
    finally:
        _restore_shards(shards)
        for hooks, number, hook in exchanged:
            if number in hooks:
                hooks[number] = hook


# Whatever of torch.distributed does something with all tensors of a value uses it.
_apply_to_tensors: Any = internal(
    "torch.distributed.utils._apply_to_tensors",
    lambda function, value: pytree.tree_map_only(Tensor, function, value),
)


def _take_tensors_out(value: Any) -> tuple[list[Tensor], Callable[[Any], Any]]:
    """Return the tensors in a value, and a function that puts others in their places.

    In the kinds of containers that FSDP and DDP look for tensors in.
    """
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _apply_to_tensors(collect, value)

    def rebuild(others: Any) -> Any:
        given = tuple(others or ())
        if all(new is old for new, old in zip(given, tensors, strict=True)):
            return value
        rest = iter(given)
        return _apply_to_tensors(lambda _: next(rest), value)

    return tensors, rebuild


JOINT.update((prepare_forward, prepare_backward, gather_parameters, release_parameters))


# How ranks exchange what they are about to do: through the store of the process group.
#
# Nothing here is a collective, so it cannot be confused with a collective of the model, and a
# rank that never comes can be distinguished from a late one.


@dataclass(frozen=True)
class RankGroup:
    """A process group: its name, which is the same on all ranks, and its (global) ranks."""

    name: str
    ranks: tuple[int, ...]


# How long a rank waits for the others before it looks where they are, in seconds.
_PATIENCE = 0.2
_LOOKS = 1.0  # and then again and again
_REPORT_SECONDS = 5.0  # how long others have to say what they did, once it is over
_GO, _STOP = b"go", b"stop"


@dataclass
class Ranks:
    """The other ranks of the process, reachable through a store."""

    store: Any  # the store of the default process group
    rank: int  # this process
    size: int  # the number of ranks
    timeout: float  # the number of seconds to wait for others
    events: dict[str, int] = field(default_factory=dict)  # the number of meetings, by group
    messages: int = 0  # the number of requests to the store
    call: tuple[str, int] = ("", 0)  # the latest in which ranks communicate: its model and number
    _has_withdrawn: bool = False
    _latest: dict[str, int] = field(default_factory=dict)  # at which all came to agree

    def meet(self, group: RankGroup, what: str, description: str) -> None:
        """Wait until all ranks of a group are about to do the same.

        They say what in the same words; the description is for messages if another rank does not.
        Raise `RankDivergenceError` if the ranks are about to do different things.
        """
        self._come_back()
        number = self._next(group)
        key = f"{group.name}/{number}"
        first = self._exchange(f"{key}/what", what)
        if first != what.encode():
            self._stop(key)
        arrived = self._add(f"{key}/count")
        if arrived == len(group.ranks):
            answer = self._exchange(f"{key}/answer", _GO.decode())
        else:
            # All have come to the meeting before, and so have left the one before that.
            if arrived == 1 and self._latest.get(group.name) == number - 1:
                self._forget(group, number - 2)
            answer = self._answer(group, key)
        if answer != _GO:
            raise self._divergence(group, key, description)
        self._latest[group.name] = number

    def leave(self, groups: Iterable[RankGroup], reason: str) -> None:
        """Stop others from waiting for this rank at the groups' next meeting, with a reason."""
        for group in groups:
            key = f"{group.name}/{self._next(group)}"
            self._set(f"{key}/description/{self.rank}", reason)
            self._stop(key)
        self.withdraw(reason)

    def withdraw(self, reason: str) -> None:
        """Announce that this rank will not meet others in its latest call again."""
        self._has_withdrawn = True
        self._set(f"at/{self.rank}", json.dumps({"gone": reason, "call": self.call}))

    def _come_back(self) -> None:
        if self._has_withdrawn:
            self._has_withdrawn = False
            self._set(f"at/{self.rank}", "{}")

    # Waiting

    def _answer(self, group: RankGroup, key: str) -> bytes:
        """Wait for the last rank to come, or for somebody to find out that it will not."""
        started, patience = time.monotonic(), _PATIENCE
        before: Any = None
        while not self._wait_for(f"{key}/answer", patience):
            patience = _LOOKS
            mine = {"at": key, "ranks": list(group.ranks), "group": group.name}
            self._set(f"at/{self.rank}", json.dumps(mine))
            places = self._places()
            why = self._hopeless(group, key, places)
            if why and places == before:  # and not just about to change
                self._publish(key, why)
                self._stop(key)
            before = places if why else None
            if time.monotonic() - started > self.timeout:
                late = sorted(set(group.ranks) - self._at(key, places))
                text = f"did not come within {self.timeout:g} s"
                self._publish(key, dict.fromkeys(late, text))
                self._stop(key)
        return self._get(f"{key}/answer")

    def _places(self) -> dict[int, dict[str, Any]]:
        """Return where ranks wait, or that they have gone, as far as they said so."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self.size):
            if self._has(f"at/{rank}"):
                found[rank] = json.loads(self._get(f"at/{rank}"))
        return found

    @staticmethod
    def _at(key: str, places: Mapping[int, Mapping[str, Any]]) -> set[int]:
        return {rank for rank, place in places.items() if place.get("at") == key}

    def _hopeless(
        self, group: RankGroup, key: str, places: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, str]:
        """Return why one of those who are missing will never come; empty if they all may."""
        late = sorted(set(group.ranks) - self._at(key, places))
        waiting: list[tuple[int, tuple[int, ...]]] = [(rank, (rank,)) for rank in late]
        seen: set[int] = set()
        while waiting:
            rank, chain = waiting.pop()
            place = places.get(rank, {})
            if rank in seen:
                continue
            seen.add(rank)
            # If it has gone from an earlier call, or from one of another model, it is late.
            if place.get("gone") and self._is_reached_by(place["call"]):
                return {chain[0]: _waiting_reason(chain, places, str(place["gone"]))}
            if place.get("at") and not self._has(f"{place['at']}/answer"):
                if self.rank in place["ranks"]:  # it waits for this one, if only in the end
                    return {chain[0]: _waiting_reason(chain, places, f"waits for rank {self.rank}")}
                missing = set(place["ranks"]) - self._at(place["at"], places)
                waiting += [(other, (*chain, other)) for other in sorted(missing)]
        return {}

    def _is_reached_by(self, call: Sequence[Any]) -> bool:
        return bool(call[0] == self.call[0] and call[1] >= self.call[1])

    # Descriptions of the end of a meeting

    def _stop(self, key: str) -> None:
        self._exchange(f"{key}/answer", _STOP.decode())

    def _publish(self, key: str, descriptions: Mapping[int, str]) -> None:
        for rank, text in descriptions.items():
            self._exchange(f"{key}/description/{rank}", text)

    def _divergence(self, group: RankGroup, key: str, description: str) -> RankDivergenceError:
        self._exchange(
            f"{key}/description/{self.rank}", description
        )  # unless it was given up before
        found: dict[int, str] = {}
        until = time.monotonic() + _REPORT_SECONDS
        for rank in group.ranks:
            left = max(until - time.monotonic(), 0.01)
            if self._wait_for(f"{key}/description/{rank}", left):
                found[rank] = self._get(f"{key}/description/{rank}").decode()
            else:
                found[rank] = "does something else"
        return RankDivergenceError(group.name, found)

    # The store

    def _next(self, group: RankGroup) -> int:
        number = self.events.get(group.name, 0)
        self.events[group.name] = number + 1
        return number

    def _forget(self, group: RankGroup, number: int) -> None:
        """Remove the messages of a meeting that all have left."""
        if number >= 0:
            for name in ("what", "count", "answer"):
                self.messages += 1
                self.store.delete_key(f"{group.name}/{number}/{name}")

    def _exchange(self, key: str, value: str) -> bytes:
        """Set a key unless it is set, and return its value."""
        self.messages += 1
        return bytes(self.store.compare_set(key, "", value))

    def _add(self, key: str) -> int:
        self.messages += 1
        return int(self.store.add(key, 1))

    def _set(self, key: str, value: str) -> None:
        self.messages += 1
        self.store.set(key, value)

    def _get(self, key: str) -> bytes:
        self.messages += 1
        return bytes(self.store.get(key))

    def _has(self, key: str) -> bool:
        self.messages += 1
        return bool(self.store.check([key]))

    def _wait_for(self, key: str, seconds: float) -> bool:
        """Return whether a key is set within some time."""
        # Not by `store.wait`: torch warns of each time that it takes longer.
        until, pause = time.monotonic() + seconds, 1e-4
        while not self._has(key):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True


def _waiting_reason(
    chain: Sequence[int], places: Mapping[int, Mapping[str, Any]], last: str
) -> str:
    """Say why the first of some ranks, each of which waits for the next, will never come."""
    links = [f"waits in group {places[rank]['group']} for rank {then}, which "
             for rank, then in itertools.pairwise(chain)]  # fmt: skip
    return "".join([*links, last])


_lock = threading.Lock()
_ranks: dict[str, Any] = {}
_events: dict[str, int] = {}  # go on counting if the process group is made again


def ranks_of_process() -> Ranks:
    """Return the object through which this process communicates with the others."""
    timeout = settings.timeout
    default = dist.group.WORLD
    with _lock:
        cached: Ranks | None = _ranks.get("ranks")
        if cached is None or _ranks["group"] is not default:
            store: Any = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):
                store = store.clone()  # whose connection nobody else has to wait for
            store = dist.distributed_c10d.PrefixStore("bendtrace", store)
            cached = Ranks(store, dist.get_rank(), dist.get_world_size(), timeout, _events)
            _ranks.update(ranks=cached, group=default)
        cached.timeout = timeout
    return cached


# Calls of models, on which ranks agree

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


def _look_at(model: Any, names: frozenset[str]) -> None:
    """Record, when a run of a model begins, the groups in which it communicates."""
    found = groups_of(model) if isinstance(model, nn.Module) else []
    communicates = names_collectives(names)
    if communicates and len(torch.distributed.distributed_c10d._world.pg_map) == 1:
        found.append(world())
    if found or communicates:
        note_groups(model, found)


def _groups_of_model(model: Any) -> tuple[RankGroup, ...]:
    if not is_attachable(model):
        return ()
    size = torch.distributed.get_world_size()  # the current one: it may have been initialised again
    found = (*known_groups.get(model, ()), *asked_groups.get(model, ()))
    return tuple(group for group in found if max(group.ranks) < size)


class _CurrentJointCall(threading.local):
    call: JointCall | None = None
    forbidden: str = ""


_local = _CurrentJointCall()


class JointCall:
    """A call of a model whose collectives the ranks agree on."""

    def __init__(self, model: Any, groups: Iterable[RankGroup]) -> None:
        self.model = model
        # The groups that communicate, as far as known.
        self.groups: list[RankGroup] = list(dict.fromkeys(groups))
        self.counts: dict[RankGroup, int] = {}  # the number of collectives so far, by group
        # The tape of the run that is being recorded or replayed; None for a live one.
        self.tape: Tape | None = None
        self.replays: bool = False
        self.error: RankDivergenceError | None = None  # raised because ranks did not agree
        self.is_left: bool = False  # whether the call is suspended, to be continued by another run

    def follows(self, tape: Tape) -> None:
        """Record the tape that is replayed from now on."""
        self.tape, self.replays = tape, True

    def agree_on(self, collective: Collective, frame: FrameType) -> None:
        """Agree on a collective that is about to begin.

        Raise `RankDivergenceError` if the ranks are about to do different things.
        """
        group = collective.group
        place, op = self._place(frame)
        if place is None or not settings.enabled or len(group.ranks) < 2:
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

        Raise `RankDivergenceError` if it is not at its end on all ranks.
        """
        if self.error is not None:
            raise self.error  # the model has caught it
        if not settings.enabled:
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
        if not settings.enabled or not (self.groups or is_joint(self.model)):
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


_NO_FLOW = (Use.RESULT, Use.METADATA, Use.LENGTH, Use.ITER, Use.ROWS)
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
    """Refuse collectives within the context, whose code must not involve other ranks.

    Raise `InputError` if the code reaches a collective.
    """
    outer, _local.forbidden = _local.forbidden, what
    call, _local.call = _local.call, None
    try:
        yield
    finally:
        _local.forbidden = outer
        _local.call = call


@contextmanager
def call_context(model: Any, goes_on: bool = False) -> Iterator[JointCall | None]:
    """Make the ranks agree on the collectives of a call (see `rank_sync.joint_call`)."""
    call = _local.call
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
        call.fails(call.error or RuntimeError("the run was not continued"))


@contextmanager
def recording_context(
    model: Any, names: frozenset[str], tape: Tape, goes_on: bool
) -> Iterator[JointCall | None]:
    """Make the ranks agree on a run that is recorded (see `rank_sync.joint_recording`)."""
    _look_at(model, names)
    with call_context(model, goes_on) as call:
        if call is not None:
            call.tape = tape
        yield call
        # Insertions may communicate in one run, and not in another.
        if call is not None and (call.counts or any(map(is_gate, tape.ops))):
            note_groups(model, call.counts)
        if call is not None and is_attachable(model) and model in known_groups:
            tape.is_joint = True
