"""The files of tensors of a harvest in the format of safetensors."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import zlib
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import LoadError
from bendtrace.storage.tensors import BINARY, code_of, crc32, layout_of, stored_shape, write_all

__all__ = ["MappedFile", "SafetensorsForm", "checksum"]

_ALIGNMENT = 64
_BLOCK = 1 << 16


class SafetensorsForm:
    """Files of safetensors.

    Written straight from the memory in which the values were collected, which is this process's
    own; what `bendtrace.storage` writes belongs to the model, and is copied piece by piece.
    """

    ending = "safetensors"

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a file, and bring it to the disk; return what to know of it."""
        rows: dict[str, Any] = {"__metadata__": {"format": "pt", "written_by": "bendtrace"}}
        pieces = []
        extents: dict[str, list[int]] = {}
        stop = 0
        for key, tensor in tensors.items():
            layout = layout_of(tensor)
            bits = _bits(tensor)
            start, stop = stop, stop + bits.numel()
            rows[key] = {
                "dtype": code_of(layout.dtype),
                "shape": list(stored_shape(layout)),
                "data_offsets": [start, stop],
            }
            pieces.append(bits)
            extents[key] = [start, bits.numel(), checksum(bits)]
        header = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
        header = header.ljust(-(-(len(header) + 8) // _ALIGNMENT) * _ALIGNMENT - 8)
        raw = len(header).to_bytes(8, "little") + header
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
        """Open one to read it."""
        return MappedFile(path, about)


class MappedFile:
    """A file whose tensors lie in memory as far as they are looked at.

    Args:
        path: the file.
        about: what is known of it.

    Raises:
        LoadError: it is not there, or not the one that was written.
    """

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
            raise LoadError(path, "the file is damaged: its header is not what was written")

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a tensor, as one dimension, in the memory of the file."""
        start, nbytes, _ = self._extents[key]
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        stored = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)
        return stored.view(dtype)

    def verify(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            LoadError: it is not what was written.
        """
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
    """Return a checksum of bytes: the sums of the words of each 64 KiB, and a CRC-32 of these.

    At ten times the speed of a CRC-32 of everything, it notices whatever changes within one word,
    and what comes to lie elsewhere.

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
