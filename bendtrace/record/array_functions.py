"""Arrays of numpy in a run: functions on them as ops, and the memory that tensors share with them.

A tape has tensors and numbers. So an array of numpy is on it as a tensor with the same content,
which carries the array: `x.numpy()` gives the tensor of its array, `numpy.sort(a)` is an op from
one such tensor to another, and `torch.from_numpy(a)` gives a tensor of the user's again. Where
torch can express it, the tensor is in the memory of the array, and tensors of arrays that share
memory share a storage.
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
from bendtrace.python.sites import user_place
from bendtrace.tape.captured import PLAIN_TYPES, Array, is_array, is_ndarray
from bendtrace.tape.structure import build_instance
from bendtrace.tape.tape import ARRAY, Op, Tape
from bendtrace.watch.writes import storage_of

_BOX = "box (bendtrace)"  # of one that stands for a number: an array in its memory
_SHARED = "shared (bendtrace)"  # of those in the memory of a tensor of the model's; see `ARRAY`


def array_of(tensor: Tensor) -> Any:
    """Return the array, or number of numpy's, that a tensor stands for."""
    own = vars(tensor)
    array = own.get(ARRAY)
    if array is None or not (is_ndarray(array) or _BOX in own):
        # Something inserted has given another tensor, or no content.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().numpy()
        return plain if array is None else plain[()]
    return array if is_ndarray(array) else own[_BOX][()]


def make_stand_for_number(tensor: Tensor) -> None:
    """Have a tensor without content stand for a number of numpy's."""
    vars(tensor)[ARRAY] = "number"


def is_content(value: Any) -> bool:
    """Return whether a value is an array of numpy's own class, or one of its numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


class ArrayFunction:
    """A function that receives arrays, as an op that receives the tensors that stand for them.

    If `written`, it writes to its first argument. With `given_tensors`, the tensors that it
    receives, but for those that stand for arrays, are tensors to it as well. `errors` is numpy's
    handling of errors in which it is called; None for the one around the run.
    """

    works_on_arrays = True  # that it does (see `functions.works_on_arrays`)

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        written: bool,
        given_tensors: bool,
        errors: tuple[tuple[str, Any], ...] | None,
    ) -> None:
        self.function: Callable[..., Any] = function
        self.is_written: bool = written  # whether it writes to its first argument, or to `out`
        # As given; with the ending of torch's where it writes to its first argument.
        self.__name__: str = name
        self.__module__ = str(getattr(function, "__module__", None) or "numpy")
        self._given_tensors = given_tensors
        self._errors = errors

    @property
    def is_plain(self) -> bool:
        """True if it only calls the function, where it is given arrays and numbers alone."""
        return self._errors is None and not self._given_tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on arrays, and return the tensors that stand for what it returns.

        Arrays may be given themselves (see `on_arrays`), but for one that is written to.
        """
        given: list[tuple[Tensor | None, Any]] = []
        result = self._call(args, kwargs, given)
        if not self.is_written:
            if type(result) in PLAIN_TYPES:
                return result
            return _arrays_to_tensors(result, [*filter(None, map(_with_tensor, given))])
        written = kwargs.get("out", args[0])
        if not isinstance(written, Tensor):
            return None  # an array of the model's
        # Whether a call gives a view or a copy can depend on the layout of what it is given. Eager
        # counts no write to the memory of a tensor of the model's.
        if not written.is_inference() and _SHARED not in vars(written):
            torch.autograd.graph.increment_version(written)
        return written

    def on_arrays(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as `__call__` does, and return the array itself.

        No tensor has to stand for an array that only such functions receive.
        """
        return self._call(args, kwargs, [])

    def _call(
        self, args: Any, kwargs: dict[str, Any], given: list[tuple[Tensor | None, Any]]
    ) -> Any:
        arrays = [self._open(arg, given) for arg in args]
        named = {name: self._open(arg, given) for name, arg in kwargs.items()} if kwargs else kwargs
        if self._errors is None:
            return self.function(*arrays, **named)
        with sys.modules["numpy"].errstate(**dict(self._errors)):
            return self.function(*arrays, **named)

    def _open(self, value: Any, given: list[tuple[Tensor | None, Any]]) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES:
            return value
        if isinstance(value, Tensor):
            if self._given_tensors and ARRAY not in vars(value):
                return value
            array = array_of(value)
            given.append((value, array))
            return array
        if kind is tuple or kind is list:
            return kind(self._open(item, given) for item in value)
        if kind is dict:
            return {key: self._open(item, given) for key, item in value.items()}
        if kind is slice:
            return slice(*(self._open(v, given) for v in (value.start, value.stop, value.step)))
        if is_ndarray(value):
            given.append((None, value))
        return value

    def __eq__(self, other: object) -> bool:
        """Return whether another op does the same."""
        return isinstance(other, ArrayFunction) and self._key() == other._key()

    def __hash__(self) -> int:
        """Return a hash that goes with equality."""
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.function, self.__name__, self.is_written, self._given_tensors, self._errors

    def __repr__(self) -> str:
        return f"<{self.__name__} of arrays>"


def content_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the tensor that stands for the array of `tensor.numpy()`."""
    array: Any = Tensor.numpy(tensor, *args, **kwargs)
    plain = tensor.detach()
    is_forced = bool(args or kwargs)  # it shares the tensor's memory if not
    if is_forced and (plain.data_ptr() != address(array) or plain.device.type != "cpu"):
        return _arrays_to_tensors(array, [])
    vars(plain).update({ARRAY: array, _SHARED: True})
    return plain


content_of.__name__ = "numpy"
content_of.works_on_arrays = True  # type: ignore[attr-defined]


def _with_tensor(pair: tuple[Tensor | None, Any]) -> tuple[Tensor, Any] | None:
    """Return an array with a tensor that stands for it; None if no tensor is in its memory."""
    tensor, array = pair
    if tensor is not None:
        return tensor, array
    base = array.base
    if not isinstance(base, Tensor):
        owner = array if base is None else base
        is_own = is_ndarray(owner) and owner.flags.owndata
        return None if is_own else (_standing_for(array, []), array)
    whole = base.detach()  # of the model's, of which the array has the content
    vars(whole)[_SHARED] = True
    made = _view(array, [(whole, None)])
    vars(made)[ARRAY] = array
    return made, array


def _arrays_to_tensors(result: Any, given: list[tuple[Tensor, Any]]) -> Any:
    """Return a result with tensors instead of arrays."""
    kind = type(result)
    if isinstance(result, Tensor):
        return _in_memory_of(given, result)
    if is_content(result):
        return _standing_for(result, given)
    if isinstance(result, (tuple, list)):
        items = [_arrays_to_tensors(item, given) for item in result]
        return kind(items) if kind in (tuple, list) else build_instance(kind, items, {})
    return result


def _standing_for(array: Any, given: list[tuple[Tensor, Any]]) -> Any:
    if array.dtype not in _dtypes():
        return array  # which is followed no further
    if not is_ndarray(array):
        box = sys.modules["numpy"].asarray(array)
        tensor = torch.from_numpy(box)
        vars(tensor)[_BOX] = box
    else:
        for other, before in given:
            if before is array:
                return other
        flags = array.flags
        is_new = array.base is None and flags.c_contiguous and flags.writeable
        tensor = torch.from_numpy(array) if is_new else _view(array, given)
    vars(tensor)[ARRAY] = array
    return tensor


def _view(array: Any, given: list[tuple[Tensor, Any]]) -> Tensor:
    """Return a tensor in the memory of an array, or a copy where torch has no such tensors."""
    size = array.itemsize
    can_be = all(step >= 0 and step % size == 0 for step in array.strides)
    if can_be and array.nbytes:
        steps = [step // size for step in array.strides]
        for other, _ in given:
            first = other.data_ptr() - other.storage_offset() * size
            end = first + other.untyped_storage().nbytes()
            away = address(array) - first
            if (
                first <= address(array) < end
                and str(other.dtype) == f"torch.{array.dtype.name}"
                and (is_in_memory(other) and away % size == 0)
            ):
                try:
                    made = other.detach().as_strided(array.shape, steps, away // size)
                except RuntimeError:
                    continue  # it begins in one array and ends in another
                if _SHARED in vars(other):
                    vars(made)[_SHARED] = True
                return made
    if can_be and array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(array.copy())


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor that stands for an array is in the memory of the array."""
    array = array_of(tensor)
    return is_ndarray(array) and (not array.nbytes or tensor.data_ptr() == address(array))


def _in_memory_of(given: list[tuple[Tensor, Any]], tensor: Tensor) -> Tensor:
    """Return a tensor that shares the storage of the array's that it is in the memory of."""
    for other, _ in given:
        same = tensor.dtype == other.dtype and tensor.shape == other.shape
        if same and tensor.device == other.device and tensor.numel():
            if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride():
                return other.detach()
    return tensor


def shares_unseen(tensor: Tensor, given: list[Tensor]) -> bool:
    """Return whether a tensor is in the memory of an array, and the array's tensor is not."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    storage = tensor.untyped_storage()
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return any(
        is_ndarray(array := array_of(other))
        and first <= address(array) < end
        and other.untyped_storage().data_ptr() != first
        for other in given
    )


def address(array: Any) -> int:
    """Return the address of the first element of an array."""
    return int(array.__array_interface__["data"][0])


def _dtypes() -> frozenset[Any]:
    """Return the types of numpy that torch has as well."""
    if not _torch_dtypes:
        numpy = sys.modules["numpy"]
        _torch_dtypes.append(frozenset(map(numpy.dtype, ARRAYS)))
    return _torch_dtypes[0]


_torch_dtypes: list[frozenset[Any]] = []
ARRAYS = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
    "float32", "float64", "complex64", "complex128",
)  # fmt: skip


# numpy arrays that share their memory with a tensor of the run.
#
# `torch.from_numpy(array)` copies nothing: writes to the array by Python appear in the tensor,
# and writes to the tensor by torch appear in the array. A replay creates the tensor from its own
# array, with the content of the recorded one. So no such write may occur as long as anything but
# the tensor can reach the array.


@dataclass(slots=True)
class _SharedArray:
    """An array, and the tensors in its memory."""

    array: Any
    content: Array  # what was in it
    predates_run: bool  # whether it was there before the run: then a replay takes it, and no copy
    # True if the tensors are those of the replay that the run resumes, which are in the memory of
    # another array.
    is_resumed: bool
    place: str  # where that was


class SharedArrays:
    """Watches the arrays that tensors of a run share their memory with.

    The tape receives a reason if a replay would behave differently. `find` finds an array that
    existed before the run.
    """

    def __init__(self, tape: Tape, find: Callable[[Any], object]) -> None:
        self._tape = tape
        self._find = find
        self._shared: dict[int, _SharedArray] = {}  # by the storage of the tensors

    def __bool__(self) -> bool:
        return bool(self._shared)

    def note_result(
        self, args: Iterable[Any], out: Any, again: Callable[[], Any] | None, frame: FrameType
    ) -> None:
        """Record the result of an op that may be in the memory of its arguments.

        If the result comes from a replay, `again` runs the op.
        """
        arrays = [array for array in args if is_array(array) and array.nbytes]
        if not arrays or not isinstance(out, Tensor):
            return
        made = out if again is None else again()
        for array in arrays:
            first = array.__array_interface__["data"][0]
            if first <= made.data_ptr() < first + array.nbytes:
                predates_run = self._find(array) is not None
                self._shared[storage_of(out)] = _SharedArray(
                    array, Array(array), predates_run, again is not None and not predates_run,
                    user_place(frame),
                )  # fmt: skip

    def check_arguments(self, given: Iterable[Tensor]) -> None:
        """Check the arrays before an op with tensor arguments."""
        for storage in self._storages_of(given):
            self._compare(self._shared[storage])
        for storage, shared in list(self._shared.items()):
            if not shared.predates_run and _is_free(shared):
                self._compare(shared)
                self._shared.pop(storage, None)

    def check_writes(self, op: Op, given: Iterable[Tensor]) -> None:
        """Check the tensors that an op has written to."""
        for storage in self._storages_of(given) if op.writes else ():
            shared = self._shared[storage]
            if shared.predates_run or not _is_free(shared):
                self._block(shared, "is written to through the tensor")

    def finish(self) -> None:
        """Check the arrays that still exist at the end of the run."""
        self.check_arguments(())
        for shared in list(self._shared.values()):
            self._compare(shared)
            if not shared.predates_run:
                self._block(shared, "still exists after the run")
        self._shared.clear()

    def _storages_of(self, given: Iterable[Tensor]) -> set[int]:
        return {storage_of(tensor) for tensor in given} & self._shared.keys()

    def _compare(self, shared: _SharedArray) -> None:
        if shared.content != shared.array:
            self._block(shared, "is written to afterwards")

    def _block(self, shared: _SharedArray, what: str) -> None:
        reason = f"the array whose memory a tensor shares since {shared.place} {what}"
        if shared.is_resumed:
            raise NondeterminismError(
                f"{reason}, along a path that a replay has begun with another array: "
                "name the function around it with bendtrace.opaque, or copy the array with "
                "torch.tensor"
            )
        self._tape.block(reason)
        # Once is enough.
        self._shared = {key: other for key, other in self._shared.items() if other is not shared}


def _is_free(shared: _SharedArray) -> bool:
    """Return whether nobody but the tensor can reach an array."""
    references = sys.getrefcount(shared.array) - 2  # by `shared`, and by the call
    if references > (0 if shared.is_resumed else 1):
        return False
    if shared.array.base is None:
        return bool(shared.array.flags.owndata)
    if not is_array(shared.array.base) or not shared.array.base.flags.owndata:
        return False
    return sys.getrefcount(shared.array.base) <= 2  # the view, and the call
