"""Ops that write into tensors, and ops that read the written values.

The tape names a tensor by the op that returned it. An op that works in place on a view of it, or
assigns to an index, changes the value under that name: this module records the writers, and the
later readers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.tape.captured import PLAIN_TENSORS, is_inference
from bendtrace.tape.tape import Op, Ref, refs_in
from bendtrace.watch.functions import (
    SHARING,
    OpOverload,
    OpOverloadPacket,
    is_named_in_place,
    table_name,
)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor, or another view of its memory, was written to; 0 if unknown."""
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return 0
    try:
        return tensor._version
    except RuntimeError:  # of inference mode
        return 0


def storage_of(tensor: Tensor) -> int:
    """Return a value equal for tensors in the same memory; 0 for those without a storage."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return 0


class Writes:
    """Watches the tensors that an op receives."""

    latest_unseen: int  # the last op that wrote without changing a version; -1 if none did

    def __init__(self) -> None:
        # The arguments of the current op that were written to since they were named.
        self.stale: list[tuple[Ref, Tensor]] = []
        self._given: list[tuple[Ref, Tensor, int]] = []
        self._memory: list[int] = []  # of what the current op received, if that is watched
        self._writers: dict[int, int] = {}
        self._differentiable: set[int] = set()  # memory that ops wrote to in grad mode
        # Written to without a new version: by which op last.
        self._unseen: dict[int, int] = {}
        self.latest_unseen = -1
        # Memory that is known by tensors which do not share a version: through `.data`, for one.
        self._apart: set[int] = set()
        self._existing: set[int] = set()
        self._replaced: set[int] = set()  # ops that gave a tensor whose `.data` was set

    def note_existing(self, tensor: Tensor) -> None:
        """Record a tensor that existed before the run, and may share memory with another one."""
        storage = storage_of(tensor)
        if storage in self._existing:
            self._apart.add(storage)
        elif storage:
            self._existing.add(storage)

    def begin(self) -> None:
        """Forget the arguments of the previous op."""
        self._given.clear()
        self._memory.clear()
        self.stale.clear()

    def receive(self, ref: Ref, tensor: Tensor, named_at: int) -> None:
        """Record that an op receives a tensor, which had version `named_at` when it was named."""
        version = version_of(tensor)
        self._given.append((ref, tensor, version))
        if (
            version != named_at
            or (self._unseen and self._unseen.get(storage_of(tensor), -1) > ref.index)
            or ref.index in self._replaced
        ):
            self.stale.append((ref, tensor))

    def watch_memory(self) -> None:
        """Notice if the current op puts its input into other memory, by `x.data = y`."""
        self._memory = [storage_of(tensor) for _, tensor, _ in self._given]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the current op received."""
        return [tensor for _, tensor, _ in self._given]

    def note_reads(self, op: Op) -> None:
        """Record on an op, before it runs, whose writes it reads."""
        if self.stale and not op.reads:
            op.reads = self.writers()

    def wrote_to(self, tensor: Tensor) -> bool:
        """Return whether an op wrote to the memory of a tensor."""
        return storage_of(tensor) in self._writers

    def writers(self) -> dict[int, int]:
        """Return, for each argument written to since it was named, the last op that wrote."""
        found = {ref.index: self._writers.get(storage_of(tensor)) for ref, tensor in self.stale}
        return {index: writer for index, writer in found.items() if writer is not None}

    def note_writes(self, op: Op) -> None:
        """Record on an op, after it ran, the tensors that it has written to."""
        if not self._given:
            return
        self._note_sharing(op)
        for (ref, tensor, _), before in zip(self._given, self._memory, strict=False):
            if storage_of(tensor) != before:
                self._replaces(op, ref, tensor)
        uncounted = _silent_writes(op)
        for ref, tensor, version in self._given:
            now = version_of(tensor)
            unseen = ref.index in uncounted or (
                now == 0 and is_inference(tensor) and ref.index in _writes_by_name(op)
            )
            if unseen or now != version:
                op.writes = (*op.writes, ref.index)
                storage = self._note_writer(op, tensor)
                if unseen or storage in self._apart:
                    self._unseen[storage] = self.latest_unseen = op.index

    def _note_sharing(self, op: Op) -> None:
        """Note which memory has two versions from now on, and what has other memory."""
        name = getattr(op.target, "__name__", "")
        if name == "__set__" and op.target == _REQUIRES_GRAD:
            self._differentiable.add(storage_of(self._given[0][1]))
        if name not in _SHARING or op.target != _SHARING[name]:
            return
        self._apart.update(filter(None, (storage_of(tensor) for _, tensor, _ in self._given)))
        if name == "__set__":
            ref, tensor, _ = self._given[0]
            self._replaces(op, ref, tensor)

    def _replaces(self, op: Op, ref: Ref, tensor: Tensor) -> None:
        """Note that an op has put other memory into a tensor."""
        op.writes = (*op.writes, ref.index)
        self._replaced.add(ref.index)
        self._writers[storage_of(tensor)] = self.latest_unseen = op.index

    def repeat(self, op: Op) -> None:
        """Record the writes of an op that is not run again."""
        writes = op.writes
        self._note_sharing(op)
        op.writes = writes
        for ref, tensor, _ in self._given:
            if ref.index in op.writes:
                self._note_writer(op, tensor)

    def _note_writer(self, op: Op, tensor: Tensor) -> int:
        """Note that an op has written to the memory of a tensor, and return that memory."""
        storage = storage_of(tensor)
        self._writers[storage] = op.index
        if op.context.grad:
            self._differentiable.add(storage)
        return storage

    def may_differentiate(self, tensor: Tensor) -> bool:
        """Return whether ops may have made a tensor require grad that did not when it was made."""
        return (storage := storage_of(tensor)) != 0 and storage in self._differentiable

    def stale_names(self, named: list[tuple[Ref, Tensor]]) -> list[Tensor]:
        """Return those of some tensors that an op wrote to after they were named."""
        return [
            tensor for ref, tensor in named if self._writers.get(storage_of(tensor), -1) > ref.index
        ]


# After these, two tensors are in one memory and each has its own version.
_SHARING = {
    "__get__": Tensor.data.__get__,  # type: ignore[attr-defined]
    "__set__": Tensor.data.__set__,  # type: ignore[attr-defined]
    "set_": Tensor.set_,
}
_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_NONE: frozenset[int] = frozenset()
# Kernels whose schemas do not say that they write to running statistics, or not when they do.
_WITH_STATISTICS = frozenset(
    {
        "batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
        "_batch_norm_impl_index", "_native_batch_norm_legit",
    }
)  # fmt: skip
_OF_SEVERAL = {
    "batch_norm_update_stats": 1, "batch_norm_gather_stats": 3,
    "batch_norm_gather_stats_with_counts": 3,
}  # fmt: skip
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "use_input_stats")
_POSITION = 5  # of the flag, among the arguments of all of them


def _silent_writes(op: Op) -> Set[int]:
    """Return the tensors of uncounted writes of an op, such as statistics of batches.

    Seen in torch 2.13 to 2.15; tests/test_validate.py would notice a change.
    """
    name = table_name(op.target)
    if name in _RECEIVING:
        return _collective_writes(op, _RECEIVING[name])
    if name in _OF_SEVERAL:
        first = _OF_SEVERAL[name]
        return _refs_at(op, zip(range(first, first + 2), _STATISTICS, strict=True))
    if name not in _WITH_STATISTICS:
        declared = _declared_writes(op.target)
        return _refs_at(op, declared) if declared else _NONE
    flags = [op.kwargs[flag] for flag in _TRAINING if flag in op.kwargs]
    if not any(flags or op.args[_POSITION : _POSITION + 1]):
        return _NONE
    # torch.batch_norm takes them after weight and bias, the function of torch.nn before.
    first = 1 if getattr(op.target, "__module__", "") == "torch.nn.functional" else 3
    return _refs_at(op, zip(range(first, first + 2), _STATISTICS, strict=True))


def _refs_at(op: Op, places: Iterable[tuple[int, str]]) -> set[int]:
    """Return the values that an op is given at some positions, or by name."""
    given = [
        value
        for position, name in places
        for value in (*op.args[position : position + 1], op.kwargs.get(name))
    ]
    return {ref.index for ref in refs_in(given)}


@functools.lru_cache(maxsize=4096)
def _declared_writes(target: Any) -> tuple[tuple[int, str], ...]:
    """Return which arguments an operator writes to, as its schema has it, whatever its name.

    Those of torch's that are named in place are counted.
    """
    lists = isinstance(target, (OpOverload, OpOverloadPacket))
    if isinstance(target, OpOverload):
        schemas = [target._schema]
    elif lists:
        schemas = [getattr(target, name)._schema for name in target.overloads()]
    elif isinstance(target, types.BuiltinFunctionType) and target.__name__ not in _MARKING:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{target.__name__}")
    else:
        return ()
    found = {
        (position, argument.name): None
        for schema in schemas
        if not (schema.name.startswith("aten::") and is_named_in_place(schema.name[6:]))
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        # `torch.sort` has a namesake that sorts a list of tensors.
        and (lists or str(argument.type) in ("Tensor", "Optional[Tensor]"))
    }
    return tuple(found)


# Methods of tensors that declare a write, and change no numbers.
_MARKING = frozenset({"retain_grad", "record_stream", "set_data"})


# Functions of torch.distributed that write what they receive into an argument: which one.
_RECEIVING = {
    **dict.fromkeys(
        (
            "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single",
            "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast",
            "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
        ),
        0,
    ),
    "gather": 1,
}  # fmt: skip
_BY_NAME = (
    "tensor", "tensors", "tensor_list", "output", "output_tensor", "output_tensor_list",
    "output_tensor_lists", "gather_list",
)  # fmt: skip


def _collective_writes(op: Op, position: int) -> Set[int]:
    """Return the tensors that an op writes to, if it is a collective."""
    if getattr(op.target, "__module__", "") != "torch.distributed.distributed_c10d":
        return _NONE
    named = [op.kwargs[name] for name in _BY_NAME if name in op.kwargs]
    return {ref.index for ref in refs_in([*op.args[position : position + 1], *named])}


def _writes_by_name(op: Op) -> set[int]:
    """Return the tensors that an op writes to by its name, as inference tensors have no version."""
    found: set[int] = set()
    if works_in_place(op) or getattr(op.target, "__name__", "") == "__setitem__":
        found.update(ref.index for ref in refs_in(op.args[:1]))
    found.update(ref.index for ref in refs_in(op.kwargs.get("out")))
    return found


def works_in_place(op: Op) -> bool:
    """Return whether an op, judging by its name, returns its argument, changed."""
    if "out" in op.kwargs:
        return True
    name = getattr(op.target, "__name__", "")
    if isinstance(op.target, (OpOverload, OpOverloadPacket)):
        name = table_name(op.target)
        if "::" in name:
            return False  # others may mean something else by their names
    return is_named_in_place(name)


def may_share(function: Any) -> bool:
    """Return whether a torch function, or class, may return a tensor in the memory of an array."""
    return function in SHARING or isinstance(function, type)


def overlap(tensors: Iterable[Tensor], arrays: Iterable[Any]) -> set[tuple[int, int]]:
    """Return the positions of some tensors and of arrays that have memory in common, in pairs."""
    taken = [(number, *memory_extent(array)) for number, array in enumerate(arrays) if array.nbytes]
    found: set[tuple[int, int]] = set()
    with torch._C.DisableTorchFunction():
        for position, tensor in enumerate(tensors):
            if storage_of(tensor) and tensor.is_cpu:
                storage = tensor.untyped_storage()
                try:
                    first = storage.data_ptr()
                except RuntimeError:  # there is none, as in transforms
                    continue
                last = first + storage.nbytes()
                for number, begin, end in taken:
                    if first < end and begin < last:
                        found.add((position, number))
    return found


def memory_extent(array: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and that after its last one."""
    begin = array.__array_interface__["data"][0]
    end = begin + array.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            begin += (size - 1) * stride
        else:
            end += (size - 1) * stride
    return begin, end
