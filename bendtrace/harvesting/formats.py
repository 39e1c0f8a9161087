"""The formats of the files of tensors: safetensors, and groups of zarr (an extra)."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import zlib
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from bendtrace._lazy import required
from bendtrace.errors import InputError, LoadError
from bendtrace.storage.tensors import (
    BINARY,
    crc32,
    layout_of,
    packed_header,
    sync_directory,
    tensor_row,
    write_all,
)

__all__ = ["Form", "Held", "checksum", "form_of"]

_BLOCK = 1 << 16
_ZARR = "3.0.8"  # earlier ones can delete data
_CHUNK = 1 << 22  # bytes, about


class Form(Protocol):
    """A format of the files of tensors."""

    ending: str

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a file, or folder, to the disk; return the facts needed to read it."""

    def open(self, path: str, about: dict[str, Any]) -> Held:
        """Open a file to read it."""


class Held(Protocol):
    """The tensors of a shard that is being read."""

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a tensor, as one dimension, without reading them if possible."""

    def verify(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            LoadError: the content has changed.
        """


def form_of(name: str) -> Form:
    """Return the format of a name.

    Raises:
        InputError: the format does not exist, or needs a package that is not installed.
    """
    if name not in ("safetensors", "zarr"):
        raise InputError(f"format= has to be 'safetensors' or 'zarr', not {name!r}")
    return SafetensorsForm() if name == "safetensors" else ZarrForm()


class SafetensorsForm:
    """Files of safetensors.

    Written directly from the memory in which the values were collected, which belongs to this
    process; the tensors that `bendtrace.storage` writes belong to the model, and are copied piece
    by piece.
    """

    ending = "safetensors"

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a file to the disk; return the facts needed to read it."""
        rows, pieces, extents = {}, [], {}
        stop = 0
        for key, tensor in tensors.items():
            bits = _bits(tensor)
            start, stop = stop, stop + bits.numel()
            rows[key] = tensor_row(layout_of(tensor), start, stop)
            pieces.append(bits)
            extents[key] = start, bits.numel(), checksum(bits)
        raw = packed_header(rows)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | BINARY, 0o666)
        try:
            write_all(fd, memoryview(raw))
            for bits in pieces:
                if bits.numel():
                    memory = (ctypes.c_char * bits.numel()).from_address(bits.data_ptr())
                    write_all(fd, memoryview(memory).cast("B"))
            os.fsync(fd)
        finally:
            os.close(fd)
        return {
            "header_sha256": hashlib.sha256(raw).hexdigest(),
            "size": len(raw) + stop,
            "tensors": {
                key: [len(raw) + start, nbytes, told]
                for key, (start, nbytes, told) in extents.items()
            },
        }

    def open(self, path: str, about: dict[str, Any]) -> MappedFile:
        """Open a file to read it."""
        return MappedFile(path, about)


class MappedFile:
    """A memory-mapped file of tensors, read as needed."""

    def __init__(self, path: str, about: dict[str, Any]) -> None:
        self._path = path
        self._extents: dict[str, list[int]] = about["tensors"]
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != about["size"]:
                    raise LoadError(
                        path, f"the file is damaged ({size} bytes instead of {about['size']})"
                    )
                # What is written to a tensor of it stays in this process.
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise LoadError(path, f"the file cannot be opened: {error.strerror}") from None
        length = 8 + int.from_bytes(self._memory[:8], "little")
        if hashlib.sha256(self._memory[:length]).hexdigest() != about["header_sha256"]:
            raise LoadError(path, "the file is damaged: its header has changed")

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a tensor, as one dimension, in the mapped memory of the file."""
        start, nbytes, _ = self._extents[key]
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        stored = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)
        return stored.view(dtype)

    def verify(self) -> None:
        """Read everything, and compare it with the checksums."""
        for key, (start, nbytes, told) in self._extents.items():
            if not nbytes:
                continue
            bits = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)
            if checksum(bits) != told:
                raise LoadError(
                    self._path, f"the file is damaged: the content of {key!r} has changed"
                )


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, row-major, in its own memory if it lies there so."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    # Not reshape: a single element can keep a stride of its own, which bars it from being viewed.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def checksum(bits: Tensor) -> int:
    """Return a checksum of bytes: a CRC-32 of the sums of the words of each 64 KiB.

    It is ten times as fast as a CRC-32 of everything, and detects every change within one word, and
    every block that has moved.

    Args:
        bits: uint8 of one dimension.
    """
    whole = bits.numel() // _BLOCK * _BLOCK
    told = b""
    if whole:
        words = bits[:whole].view(torch.int64).view(-1, _BLOCK // 8)
        told = repr(words.sum(1).tolist()).encode()
    rest = bits[whole:]
    return zlib.crc32(told, crc32(rest))


class ZarrForm:
    """Folders, each a group of zarr with an array for each tensor.

    Types that numpy does not have, such as bfloat16, are stored as integers with the same bits;
    complex numbers are stored in zarr's own way.

    Raises:
        InputError: zarr is not installed.
    """

    ending = "zarr"

    def __init__(self) -> None:
        package = f"'zarr>={_ZARR}'"
        self._zarr = required("zarr", "format='zarr'", package, InputError)
        if TorchVersion(self._zarr.__version__) < _ZARR:
            raise InputError(
                f"zarr {self._zarr.__version__} can delete data: pip install {package}"
            )

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a folder to the disk; return the facts needed to read it."""
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
            for name in (*names, ""):
                sync_directory(os.path.join(folder, name))
        return {"crc32": checksums}

    def open(self, path: str, about: dict[str, Any]) -> _Group:
        """Open a folder to read it."""
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
