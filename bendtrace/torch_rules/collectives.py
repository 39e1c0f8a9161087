"""Communication of ranks: the objects of torch.distributed, and the ops that communicate."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
from torch import Tensor, nn

from bendtrace.torch_rules.distributed_forward import gathered_by, tensors_in
from bendtrace.torch_rules.owners import parts_of
from bendtrace.torch_rules.ranks import Group

__all__ = [
    "Collective",
    "collective_of",
    "group_of",
    "groups_of",
    "is_wiring",
    "joint_functions",
    "layout_properties",
    "names_collectives",
    "parameters_reached",
    "world",
]


# Which things of torch.distributed say who communicates and how.


def is_wiring(value: Any) -> bool:
    """Return whether an object defines who communicates, and never changes: a group, a mesh.

    Such objects are constants of a run: they are created once, on all ranks, and never change.
    """
    module = type(value).__module__
    if not module.startswith(("torch._C._distributed_c10d", "torch.distributed")):
        return False
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

    group: Group
    text: str

    def __str__(self) -> str:
        return self.text


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """Return the collective for an op, if it is one.

    Args:
        func: an op of torch's dispatcher that belongs to torch.distributed.
        args: its arguments.
    """
    name = func._schema.name.partition("::")[2]
    if name in _NOT_JOINT or not (groups := [g for g in map(_group_in, args) if g is not None]):
        return None
    counted: Any = () if name in _UNEVEN else args
    if name in _COUNTED:
        counted = args[_COUNTED[name]]
    given = [*_described(counted)]
    if name == "broadcast_":
        given.append(f"from rank {args[2]}")
    elif name == "reduce_":
        given.append(f"to rank {args[3]}")
    elif func.namespace != "c10d":
        given += [str(value) for value in args[:-1] if isinstance(value, (str, int))]
    kind = _KINDS.get(name, name.rstrip("_"))
    return Collective(groups[0], f"{kind}({', '.join(given)}) in group {groups[0].name}")


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        sizes = "x".join(map(str, value.shape)) or "scalar"
        yield f"{sizes} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _described(item)


def _group_in(value: Any) -> Group | None:
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


def group_of(group: Any) -> Group:
    """Return the properties of a process group that are the same on all ranks."""
    return Group(group.group_name, tuple(dist.get_process_group_ranks(group)))


def world() -> Group:
    """Return the default process group."""
    return group_of(dist.group.WORLD)


# Which models do


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups over which a model's parameters and buffers are distributed."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return []
    meshes: dict[int, Any] = {}
    for module in parts_of(model):
        found = [*module._parameters.values(), *module._buffers.values()]
        found += [parameter.sharded_param for parameter in gathered_by(module)]
        for value in found:
            if isinstance(value, tensor.DTensor):
                meshes[id(value.device_mesh)] = value.device_mesh
    groups = [group_of(group) for mesh in meshes.values() for group in mesh.get_all_groups()]
    return list(dict.fromkeys(groups))


def parameters_reached(model: Any, output: Any) -> str | None:
    """Return which of the parameters that FSDP gathers will get gradients in a backward pass.

    FSDP scatters the gradients that exist, so they have to be the same ones on all ranks.

    Returns:
        Their number and a digest of their names; None for a model without such parameters.
    """
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        for module in parts_of(model):
            for parameter in gathered_by(module):
                held = getattr(parameter, "_unsharded_param", None)
                names[id(held)] = f"{len(names)}"
    if not names:
        return None
    reached: set[str] = set()
    nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if id(variable) in names:
            reached.add(names[id(variable)])
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                nodes.append(inner)
    digest = hashlib.sha256(",".join(sorted(reached)).encode()).hexdigest()[:8]
    return f"{len(reached)} parameters ({digest})"
