"""Saved values: their tensors in files of safetensors, everything around them as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bendtrace._plain import Codec
from bendtrace.storage.directory import Draft
from bendtrace.storage.files import DataFile, Header, TensorFile, free_key, header_size
from bendtrace.storage.handles import NotSaved, StoredTensor, row_of, stored_of, undisturbed
from bendtrace.storage.tensors import Layout, layout_of, why_not

__all__ = ["StoredValue", "read_values", "write_values"]

_SHARD_BYTES = 1 << 32


class _Slot:
    """Stands in a value for tensor number `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_CODEC = Codec((), {"tensor": (_Slot, lambda slot: slot.number, _Slot)})


def write_values(draft: Draft, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write values by name: tensors, handles of such, or containers with some inside.

    Args:
        draft: the save.
        kind: what they are, which names the files: "activations".
        values: the values.

    Returns:
        What is where, ready for JSON.
    """
    found: list[tuple[str, Tensor | StoredTensor]] = []
    rows: list[dict[str, Any]] = []
    written = []
    for name, value in values.items():
        slots: list[tuple[str, Tensor | StoredTensor | NotSaved]] = []
        plain = _take_out(value, name, slots, len(rows), ())
        for inner, tensor in slots:
            reason = _reason(tensor)
            rows.append({} if reason is None else {"not_saved": reason, **_about(tensor)})
            if reason is None and not isinstance(tensor, NotSaved):
                found.append((inner, tensor))
        written.append([_CODEC.encode(name), _CODEC.encode(plain)])
    stored = _write(draft, kind, found)
    for row in rows:
        if not row:
            row.update(next(stored))
    return {"tensors": rows, "values": written}


def _take_out(value: Any, name: str, slots: list[Any], first: int, around: tuple[int, ...]) -> Any:
    """Replace each tensor of a value by a slot. What contains itself is left to the codec."""
    if isinstance(value, StoredValue):
        value = value.value
    if isinstance(value, (Tensor, StoredTensor, NotSaved)):
        slots.append((name, value))
        return _Slot(first + len(slots) - 1)
    if type(value) not in (tuple, list, dict) or id(value) in around or len(around) > 50:
        return value
    around = (*around, id(value))
    if type(value) is dict:
        return {
            key: _take_out(item, f"{name}[{key!r}]", slots, first, around)
            for key, item in value.items()
        }
    return type(value)(
        _take_out(item, f"{name}[{position}]", slots, first, around)
        for position, item in enumerate(value)
    )


def _reason(tensor: Tensor | StoredTensor | NotSaved) -> str | None:
    if isinstance(tensor, NotSaved):
        return tensor.reason
    return None if isinstance(tensor, StoredTensor) else why_not(tensor)


def _about(tensor: Tensor | StoredTensor | NotSaved) -> dict[str, Any]:
    if isinstance(tensor, NotSaved):
        return {}
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}


def _write(
    draft: Draft, kind: str, tensors: list[tuple[str, Tensor | StoredTensor]]
) -> Iterator[dict[str, Any]]:
    """Write tensors to as many files as it takes; yield a row for each."""
    with undisturbed():
        shards: list[list[tuple[str, Layout, Tensor | StoredTensor]]] = []
        size = _SHARD_BYTES
        taken: set[str] = set()
        for name, tensor in tensors:
            layout = tensor.layout if isinstance(tensor, StoredTensor) else layout_of(tensor)
            if not shards or size + layout.nbytes > _SHARD_BYTES:
                shards.append([])
                size = 0
                taken = set()
            key = free_key(name, taken)
            taken.add(key)
            size += layout.nbytes
            shards[-1].append((key, layout, tensor))
        rows = []
        for number, shard in enumerate(shards, 1):
            file_name = f"{kind}-{number:05d}.safetensors"
            path = draft.path(file_name)
            file = TensorFile(path, header_size([(key, layout) for key, layout, _ in shard]))
            for key, layout, tensor in shard:
                content = tensor.read() if isinstance(tensor, StoredTensor) else tensor
                extent = file.add(key, layout, content)
                rows.append(row_of(path, extent, layout, tensor.device))
            draft.add_tensors(file_name, file.close())
    return iter(rows)


def read_values(
    index: Mapping[str, Any],
    files: Mapping[str, tuple[DataFile, Header]],
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Return what `write_values` wrote, by name.

    Args:
        index: what it returned.
        files: the files that it wrote.
        device: where tensors are to be read to; None for the CPU.

    Returns:
        For each name a `StoredTensor`, a `NotSaved`, a `StoredValue`, or a plain value.

    Raises:
        LookupError: if something is missing.
        ValueError: if it makes no sense.
        TypeError: if a value is of the wrong type.
    """
    values = {}
    rows = index["tensors"]
    for name, data in index["values"]:
        name, value = _CODEC.decode(name), _CODEC.decode(data)
        handles: list[Any] = []
        value = _exchange(value, partial(_handle, name, rows, files, device, handles))
        if not handles or value is handles[0]:
            values[name] = value
        else:
            values[name] = StoredValue(value)
    return values


def _handle(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    files: Mapping[str, tuple[DataFile, Header]],
    device: torch.device | None,
    handles: list[Any],
    slot: _Slot,
) -> StoredTensor | NotSaved:
    handle = stored_of(name, rows[slot.number], files, device)
    handles.append(handle)
    return handle


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A container with tensors on disk.

    Attributes:
        value: the container, with handles in place of the tensors.
    """

    value: Any

    def read(self) -> Any:
        """Read it: each call gives new tensors.

        Raises:
            LoadError: if a file was damaged since.
        """
        return _realised(self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredValue:
        return self


def _realised(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    if type(value) is dict:
        return {key: _realised(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_realised, value))
    return value


def _exchange(value: Any, handle: Callable[[_Slot], Any]) -> Any:
    if isinstance(value, _Slot):
        return handle(value)
    if type(value) is dict:
        return {key: _exchange(item, handle) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_exchange(item, handle) for item in value)
    return value
