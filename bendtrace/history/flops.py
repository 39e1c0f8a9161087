"""Floating point operations, by torch's own formulas, from shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from bendtrace.recording.functions import is_torchs_function, name_of
from bendtrace.recording.structure import Existing
from bendtrace.recording.tape import Op, OpKind, Ref, TensorMeta, map_refs, refs_in

__all__ = ["flops_of"]


def flops_of(ops: list[Op]) -> dict[int, int | None]:
    """Return the floating point operations of each op of a tape; None where nobody can tell."""
    # Imports a good part of torch's compiler, which warns where there is no numpy.
    from torch.utils.flop_counter import FlopCounterMode

    found: dict[int, int | None] = {}
    known: dict[str, int | None] = {}  # loops repeat themselves
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        for op in ops:
            if op.kind is not OpKind.CALL or not any(refs_in((op.args, op.kwargs))):
                continue
            if not is_torchs_function(op.target):
                found[op.index] = None
                continue
            given = map_refs((op.args, op.kwargs), lambda ref: ops[ref.index].meta)
            key = f"{name_of(op.target)} {id(op.target)} {given!r}"
            if key not in known:
                before = counter.get_total_flops()
                done = _carry_out(op, ops)
                known[key] = counter.get_total_flops() - before if done else None
            found[op.index] = known[key]
    return found


def _carry_out(op: Op, ops: list[Op]) -> bool:
    """Run an op on tensors without values; say whether that was possible."""

    def stand_in(ref: Ref) -> Any:
        meta: Any = ops[ref.index].meta
        if isinstance(meta, TensorMeta):
            return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        return meta

    try:
        args, kwargs = map_refs((op.args, op.kwargs), stand_in)
        if any(isinstance(value, Existing) for value in (*args, *kwargs.values())):
            return False
        args = tuple("meta" if isinstance(value, torch.device) else value for value in args)
        op.target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    except Exception:  # it asks for values, or knows no tensors without them
        return False
    return True
