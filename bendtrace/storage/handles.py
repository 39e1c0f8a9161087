"""Handles of tensors on disk, and what is written down of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import LoadError
from bendtrace.storage.files import DataFile, Extent, Header
from bendtrace.storage.tensors import Layout, code_of, stored_shape

__all__ = ["NotSaved", "StoredTensor", "open_files", "row_of", "stored_of", "undisturbed"]


@dataclass(frozen=True)
class NotSaved:
    """Stands for a value that could not be stored.

    Attributes:
        reason: why.
    """

    reason: str

    def __str__(self) -> str:
        return f"not saved: {self.reason}"


@dataclass(frozen=True, eq=False, repr=False)
class StoredTensor:
    """A tensor on disk.

    Attributes:
        name: what it is called.
        layout: its dtype, shape and strides.
        device: where it was when it was stored.
        file: the file that it is in.
        extent: where in the file.
        to: the device that it is read to; None for the CPU.
    """

    name: str
    layout: Layout
    device: torch.device
    file: DataFile
    extent: Extent
    to: torch.device | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes on disk."""
        return self.layout.nbytes

    def read(self, device: torch.device | str | None = None) -> Tensor:
        """Read it: each call gives a new tensor, which needs no gradient.

        Args:
            device: where to; None for `to`.

        Raises:
            LoadError: if the file was damaged since.
        """
        with undisturbed():
            tensor = self.file.tensor(self.extent, self.layout)
            device = self.to if device is None else device
            return tensor if device is None else tensor.to(device)

    def __repr__(self) -> str:
        about = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"<StoredTensor {self.name!r}: {about} in {os.path.basename(self.file.path)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self  # nothing about it can change


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep modes of torch, such as a recording run, from taking part in what is done here."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def row_of(path: str, extent: Extent, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return what is written down of a stored tensor, ready for JSON."""
    return {
        "file": os.path.basename(path),
        "key": extent.key,
        "crc32": extent.checksum,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "shape": list(layout.shape),
        "strides": list(layout.strides),
        "device": str(device),
    }


def open_files(directory: str, checksums: Mapping[str, str]) -> dict[str, tuple[DataFile, Header]]:
    """Open files of tensors and examine their headers.

    Args:
        directory: where they are.
        checksums: for the name of each file, the checksum of its header.

    Raises:
        LoadError: if one is missing, or is not the file that was written.
    """
    files = {}
    for name, checksum in checksums.items():
        if os.path.basename(name) != name:
            raise LoadError(directory, f"it names a file outside: {name!r}")
        file = DataFile(os.path.join(directory, name))
        header = file.header()
        if header.sha256 != checksum:
            raise LoadError(file.path, "the file is damaged: its header has changed")
        files[name] = file, header
    return files


def stored_of(
    name: str,
    row: Mapping[str, Any],
    files: Mapping[str, tuple[DataFile, Header]],
    to: torch.device | None = None,
) -> StoredTensor | NotSaved:
    """Return the handle that a row of `row_of` describes.

    Raises:
        LookupError: if something is missing.
        ValueError: if the row and the file do not go together.
        TypeError: if a value is of the wrong type.
    """
    if "not_saved" in row:
        return NotSaved(row["not_saved"])
    dtype = getattr(torch, row["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        return NotSaved(f"it is of type {row['dtype']}, which this torch does not have")
    layout = Layout(dtype, tuple(row["shape"]), tuple(row["strides"]))
    numbers = (*layout.shape, *layout.strides)
    if len(layout.shape) != len(layout.strides) or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise ValueError(f"{name!r} has the shape {row['shape']} and strides {row['strides']}")
    file, header = files[row["file"]]
    code, shape, start, stop = header.extents[row["key"]]
    found = code, shape, stop - start
    if found != (code_of(dtype), stored_shape(layout), layout.nbytes):
        raise ValueError(f"what is said of {name!r} is not what the file holds")
    extent = Extent(row["key"], start, layout.nbytes, row["crc32"])
    return StoredTensor(name, layout, _device(row["device"]), file, extent, to)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:  # of a kind that this torch does not have
        return torch.device("cpu")
