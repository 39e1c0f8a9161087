"""Caches that a run makes longer: the old tensor is let go as soon as the new one is there.

A replay changes objects at its end, since the model may have to be run from its start instead.
A cache of keys and values would then be there twice. Where a tensor is exchanged for
`torch.cat([tensor, ...])`, the old one is the beginning of the new one: it can be cut out of that
if the run is given up. Nobody can tell it from the one that was there, because nobody has that one
any more; whoever has it, or a view of it, keeps it alive, and then that very tensor is put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from bendtrace.record.effects import makes_anew, sets_nothing, written_by
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind, EnvironmentChange, TensorFacts
from bendtrace.tape.structure import existing_in
from bendtrace.tape.tape import Op, OpKind, Ref, Tape

if TYPE_CHECKING:
    from bendtrace.engine.stretches import Holes

_CAT = frozenset({torch.cat, torch.concat, torch.concatenate})

# How a thing is reached from an argument or a fixed object: the same in all runs of a program.
_Place = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Growth:
    """A tensor outside that a run exchanges for a longer one."""

    old: int  # the op that names the tensor which was there
    new: int  # the op that makes the longer one
    dim: int  # along which it is longer
    change: EnvironmentChange
    part: Captured  # the tensor which was there
    place: _Place  # where it is


def growths_of(recording: Recording) -> dict[int, Growth]:
    """Return the tensors that a run makes longer, by the ops that make them."""
    tape, parts = recording.tape, recording.environment.parts
    tensors = {
        (part.parent.index, part.key): part
        for part in parts
        if part.kind is CaptureKind.TENSOR and part.parent is not None and _is_ordinary_tensor(part)
    }
    op_of: dict[int, int] = {}  # the only op for each part
    times = Counter(op.target.index for op in tape.ops if op.is_given and _is_part(op))
    for op in tape.ops:
        if op.is_given and _is_part(op) and times[op.target.index] == 1:
            op_of[op.target.index] = op.index
    # What is reached by way of a tensor, or is the same as it, would be looked for in it.
    used = {part.parent.index for part in parts if part.parent is not None}
    used.update(part.value.index for part in parts if part.kind is CaptureKind.ALIAS)
    given = [(op.args, op.kwargs) for op in tape.ops]
    outputs = [recording.root.output, *(change.value for change in recording.changes)]
    used.update(existing.part.index for existing in existing_in([given, outputs]))
    found: dict[int, Growth] = {}
    for change in recording.changes:
        if type(change.value) is not Ref or change.deleted or change.key is None:
            continue
        part = tensors.get((change.part.index, change.key))
        if part is None or part.index not in op_of or part.index in used:
            continue
        old, op = op_of[part.index], tape.ops[change.value.index]
        dim = _dim_of(op, old)
        if dim is not None and op.index not in found and not may_write_to(tape, {op.index}):
            found[op.index] = Growth(old, op.index, dim, change, part, _tensor_place(part))
    return found


def _is_ordinary_tensor(part: Captured) -> bool:
    """Return whether a part is a tensor like most, in something that can be written to.

    The rest is asked of the tensor that is there when it grows (`grow`).
    """
    facts = part.size
    return (
        part.type is Tensor
        and type(facts) is TensorFacts
        and part.access in (Access.ITEM, Access.DICT, Access.ATTRIBUTE)
        and not facts.attributes
        and facts.dtype.is_floating_point
    )


def _is_part(op: Op) -> bool:
    return isinstance(op.target, Captured)


def _dim_of(op: Op, old: int) -> int | None:
    """Return along which dimension an op makes a tensor longer; None if it does not."""
    if op.kind is not OpKind.CALL or op.target not in _CAT or op.raised is not None:
        return None
    tensors = op.args[0] if op.args else None
    if type(tensors) not in (tuple, list) or not tensors or tensors[0] != Ref(old):
        return None
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    return dim if type(dim) is int and not op.kwargs.keys() - {"dim"} else None


def _tensor_place(part: Captured) -> _Place:
    steps: list[Any] = []
    step: Captured | None = part
    while step is not None:
        steps.append((step.access, id(step.value) if step.access is Access.FIXED else step.key))
        step = None if step.access is Access.FIXED else step.parent
    return tuple(steps)


def tensor_places(parts: Iterable[Captured]) -> frozenset[_Place]:
    """Return where the tensors among some parts are."""
    return frozenset(_tensor_place(part) for part in parts if part.kind is CaptureKind.TENSOR)


class GrownTensor(NamedTuple):
    """A tensor that was exchanged, with everything needed to put it back."""

    growth: Growth  # what was exchanged for what
    holder: Any  # what holds it
    new: Tensor  # the longer tensor
    old: ref[Tensor]  # the one that was there, as long as somebody has it
    storage: ref[torch.UntypedStorage]  # its memory, as long as somebody has that
    shape: torch.Size  # its sizes
    strides: tuple[int, ...]
    in_inference: bool  # whether it was made in inference mode

    def cut_out(self) -> Tensor:
        """Return the tensor that was there, or one that is like it in all."""
        old, storage, new = self.old(), self.storage(), self.new
        if old is not None:
            return old
        with torch._C.DisableTorchFunction(), torch.inference_mode(self.in_inference):
            if storage is not None:
                empty = torch.empty(0, dtype=new.dtype, device=new.device)
                return empty.set_(storage, 0, self.shape, self.strides)
            made = torch.empty_strided(self.shape, self.strides, dtype=new.dtype, device=new.device)
            begin = new.detach().narrow(self.growth.dim, 0, self.shape[self.growth.dim])
            return made.copy_(begin)


def grow(holes: Holes, growth: Growth, holder: Any, old: Tensor, new: Tensor) -> bool:
    """Say whether a tensor may be exchanged now, and remember it in the holes of the call."""
    if not holes.may_grow or growth.place in holes.places:
        return False
    try:
        if (
            old.requires_grad
            or old.dtype is not new.dtype
            or not old.numel()
            or old.dim() != new.dim()
            or old.is_nested
            or not old.is_contiguous()
            or old.is_neg()
            or old.storage_offset()
        ):
            return False
        storage = old.untyped_storage()
        memory = storage._cdata
        # Two that share memory could not be put back so.
        if storage.nbytes() != old.nbytes or memory in holes.memory:
            return False
        grown = GrownTensor(
            growth, holder, new, ref(old), ref(storage), old.shape, old.stride(),
            old.is_inference(),
        )  # fmt: skip
    except RuntimeError:  # a tensor without memory, or that shares it
        return False
    holes.grown += (grown,)
    holes.places |= {growth.place}
    holes.memory |= {memory}
    return True


def may_write_to(tape: Tape, values: set[int]) -> bool:
    """Return whether a replay may write to the memory of the values of some ops, under any name."""
    names = set(values)
    for op in tape.ops:
        if op.kind is OpKind.CALL and not sets_nothing(op):
            if not names.isdisjoint(written_by(op)):
                return True
            if makes_anew(op.target):
                continue
        if op.is_work and not names.isdisjoint(op.operands):
            names.add(op.index)
    return False
