"""Which things of torch.distributed say who communicates and how."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed

__all__ = ["is_wiring"]


def is_wiring(value: Any) -> bool:
    """Whether a thing says who communicates and how, and stays what it is: a group, a mesh.

    Such things are constants of a run: they are made once, on all ranks, and never change.
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
