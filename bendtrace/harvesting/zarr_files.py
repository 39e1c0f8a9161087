"""The files of tensors of a harvest as groups of zarr, which is an extra."""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError, LoadError
from bendtrace.storage.tensors import sync_directory

__all__ = ["ZarrForm"]

_CHUNK = 1 << 22  # bytes, about


class ZarrForm:
    """Folders, each a group of zarr with an array for each tensor.

    Types that numpy does not have, such as bfloat16, are stored as the integers of their bits;
    complex numbers as what zarr makes of them.

    Raises:
        InputError: zarr is not installed.
    """

    ending = "zarr"

    def __init__(self) -> None:
        try:
            import zarr
        except ImportError:
            raise InputError(
                "format='zarr' needs the package zarr: pip install 'bendtrace[zarr]'"
            ) from None
        self._zarr: Any = zarr

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a folder, and bring it to the disk; return what to know of it."""
        group = self._zarr.open_group(path, mode="w")
        checksums = {}
        for key, tensor in tensors.items():
            plain = _as_numpy(tensor)
            rows = max(1, min(len(plain), _CHUNK // max(1, plain.nbytes // max(1, len(plain)))))
            array = group.create_array(
                key, shape=plain.shape, dtype=plain.dtype,
                chunks=(rows, *(max(1, size) for size in plain.shape[1:])),
            )  # fmt: skip
            if plain.size:
                array[...] = plain
            array.attrs["torch_dtype"] = str(tensor.dtype).removeprefix("torch.")
            checksums[key] = zlib.crc32(plain.tobytes())
        for folder, _, names in os.walk(path):
            for name in names:
                _sync(os.path.join(folder, name))
            sync_directory(folder)
        return {"crc32": checksums}

    def open(self, path: str, about: dict[str, Any]) -> _Group:
        """Open one to read it."""
        try:
            group = self._zarr.open_group(path, mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise LoadError(path, f"the group cannot be opened: {error}") from None
        return _Group(path, group, about["crc32"])


class _Group:
    """A group that is read array by array."""

    def __init__(self, path: str, group: Any, checksums: dict[str, int]) -> None:
        self._path = path
        self._group = group
        self._checksums = checksums

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Read an array, and return its elements as one dimension."""
        return torch.from_numpy(self._group[key][...].reshape(-1)).view(dtype)

    def verify(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            LoadError: it is not what was written.
        """
        for key, checksum in self._checksums.items():
            try:
                found = zlib.crc32(self._group[key][...].tobytes())
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise LoadError(self._path, f"{key!r} cannot be read: {error}") from None
            if found != checksum:
                raise LoadError(self._path, f"the content of {key!r} has changed")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_numpy(tensor: Tensor) -> Any:
    plain = tensor.detach().contiguous()
    try:
        return plain.numpy()
    except TypeError:  # a type that numpy does not have
        return plain.view(_BITS[plain.element_size()]).numpy()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
