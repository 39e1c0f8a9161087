"""numpy arrays that share their memory with a tensor of the run.

`torch.from_numpy(array)` copies nothing: writes to the array by Python appear in the tensor, and
writes to the tensor by torch appear in the array. A replay creates the tensor from its own array,
with the content of the recorded one. So no such write may occur as long as anything but the tensor
can reach the array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import NondeterminismError
from bendtrace.source.sites import user_place
from bendtrace.tape.captured import Array, is_array
from bendtrace.tape.tape import Op, Tape
from bendtrace.torch_rules.functions import SHARING
from bendtrace.torch_rules.writes import storage_of


def may_share(function: Any) -> bool:
    """Return whether a torch function, or class, may return a tensor in the memory of an array."""
    return function in SHARING or isinstance(function, type)


def overlap(tensors: Iterable[Tensor], arrays: Iterable[Any]) -> set[tuple[int, int]]:
    """Return which of some tensors have memory that which of some arrays have, too.

    Returns:
        The positions of a tensor and an array, for each pair.
    """
    taken = [(number, *_extent(array)) for number, array in enumerate(arrays) if array.nbytes]
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


def _extent(array: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and that after its last one."""
    begin = array.__array_interface__["data"][0]
    end = begin + array.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            begin += (size - 1) * stride
        else:
            end += (size - 1) * stride
    return begin, end


@dataclass(slots=True)
class _Shared:
    """An array, and the tensors in its memory.

    Attributes:
        array: the array.
        content: what was in it.
        was_there: whether it was there before the run: then a replay takes it, and no copy.
        is_resumed: whether the tensors are those of the replay that the run resumes, which are in
            the memory of another array.
        place: where that was.
    """

    array: Any
    content: Array
    was_there: bool
    is_resumed: bool
    place: str


class SharedArrays:
    """Watches the arrays that tensors of a run share their memory with.

    Args:
        tape: receives a reason if a replay would behave differently.
        find: finds an array that existed before the run.
    """

    def __init__(self, tape: Tape, find: Callable[[Any], object]) -> None:
        self._tape = tape
        self._find = find
        self._shared: dict[int, _Shared] = {}  # by the storage of the tensors

    def __bool__(self) -> bool:
        return bool(self._shared)

    def gave(
        self,
        op: Op,
        args: Iterable[Any],
        out: Any,
        again: Callable[[], Any] | None,
        frame: FrameType,
    ) -> None:
        """Record the result of an op that may be in the memory of its arguments.

        Args:
            op: the op.
            args: its arguments.
            out: its result.
            again: if the result comes from a replay, runs the op.
            frame: the frame of the run.
        """
        arrays = [array for array in args if is_array(array) and array.nbytes]
        if not arrays or not isinstance(out, Tensor):
            return
        made = out if again is None else again()
        for array in arrays:
            first = array.__array_interface__["data"][0]
            if first <= made.data_ptr() < first + array.nbytes:
                was_there = self._find(array) is not None
                self._shared[storage_of(out)] = _Shared(
                    array, Array(array), was_there, again is not None and not was_there,
                    user_place(frame),
                )  # fmt: skip

    def begins(self, given: Iterable[Tensor]) -> None:
        """Check the arrays before an op with tensor arguments."""
        for storage in self._storages_of(given):
            self._compare(self._shared[storage])
        for storage, shared in list(self._shared.items()):
            if not shared.was_there and _is_free(shared):
                self._compare(shared)
                self._shared.pop(storage, None)

    def ended(self, op: Op, given: Iterable[Tensor]) -> None:
        """Check what an op has written to."""
        for storage in self._storages_of(given) if op.writes else ():
            shared = self._shared[storage]
            if shared.was_there or not _is_free(shared):
                self._block(shared, "is written to through the tensor")

    def finish(self) -> None:
        """Check the arrays that still exist at the end of the run."""
        self.begins(())
        for shared in list(self._shared.values()):
            self._compare(shared)
            if not shared.was_there:
                self._block(shared, "still exists after the run")
        self._shared.clear()

    def _storages_of(self, given: Iterable[Tensor]) -> set[int]:
        return {storage_of(tensor) for tensor in given} & self._shared.keys()

    def _compare(self, shared: _Shared) -> None:
        if shared.content != shared.array:
            self._block(shared, "is written to afterwards")

    def _block(self, shared: _Shared, what: str) -> None:
        reason = f"the array whose memory a tensor shares since {shared.place} {what}"
        if shared.is_resumed:
            raise NondeterminismError(
                f"{reason}, along a path that a replay has begun with an array of its own: "
                "name the function around it with bendtrace.opaque, or copy the array with "
                "torch.tensor"
            )
        self._tape.block(reason)
        # Once is enough.
        self._shared = {key: other for key, other in self._shared.items() if other is not shared}


def _is_free(shared: _Shared) -> bool:
    """Whether nobody but the tensor can reach an array."""
    held = sys.getrefcount(shared.array) - 2  # by `shared`, and by the call
    if held > (0 if shared.is_resumed else 1):
        return False
    if shared.array.base is None:
        return bool(shared.array.flags.owndata)
    if not is_array(shared.array.base) or not shared.array.base.flags.owndata:
        return False
    return sys.getrefcount(shared.array.base) <= 2  # the view, and the call
