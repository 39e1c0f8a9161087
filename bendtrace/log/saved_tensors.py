"""Tensors as bytes, and files of tensors in the format of safetensors, piece by piece.

The bits of a tensor are stored, never converted: the payload of a NaN, the sign of a zero and
types that torch can hardly compute with come back as they were.

The format is: the length of the header (8 bytes, little endian), the header (JSON: for each key
the type, the shape and where its bytes begin and end), the bytes, row-major and without gaps. It
is written here, not by the safetensors package, because that takes all tensors of a file together,
and writes through pointers that turn copy-on-write tensors into copies.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from bendtrace.errors import LoadError, SaveError

# The types that every version of the safetensors package knows. Complex numbers are stored as
# pairs of what they consist of, all others as bytes.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # bytes copied to the CPU at a time


@dataclass(frozen=True)
class Strided:
    """The layout of a tensor in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # Its strides, in elements. Gaps between elements are closed when it is stored; the order of the
    # dimensions, and those it was expanded along (stride 0), are kept, as are the strides of
    # dimensions of size 1.
    strides: tuple[int, ...]

    @property
    def expanded(self) -> tuple[int, ...]:
        """The dimensions along which all elements are the same ones in memory."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(d for d, (size, stride) in enumerate(pairs) if stride == 0 and size > 1)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape before it was expanded."""
        expanded = self.expanded
        return tuple(1 if d in expanded else size for d, size in enumerate(self.shape))

    @property
    def nbytes(self) -> int:
        """The number of bytes that are stored."""
        count = self.dtype.itemsize
        for size in self.stored_shape:
            count *= size
        return count


def why_not(tensor: Tensor) -> str | None:
    """Say why a tensor cannot be stored; None if it can be."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it belongs to a transform of functorch"
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"it is a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return f"it is quantised ({tensor.dtype})"
    if tensor.is_meta:
        return "it is on the meta device and has no content"
    if tensor.dtype.itemsize not in (*_INTEGERS, 16):
        return f"its elements have {tensor.dtype.itemsize} bytes ({tensor.dtype})"
    return None


def layout_of(tensor: Tensor) -> Strided:
    """Return the layout that a tensor comes back with."""
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    expanded = Strided(tensor.dtype, shape, strides).expanded
    kept = tuple(1 if d in expanded else size for d, size in enumerate(shape))
    like = torch.empty_strided(kept, strides, dtype=torch.uint8, device="meta")
    dense = torch.empty_like(like).stride()
    restored = tuple(
        strides[d] if d in expanded or shape[d] == 1 else stride for d, stride in enumerate(dense)
    )
    return Strided(tensor.dtype, shape, restored)


def code_of(dtype: torch.dtype) -> str:
    """Return the name in files for the type of a stored tensor."""
    return _CODES.get(dtype.to_real() if dtype.is_complex else dtype, "U8")


def shape_in_file(layout: Strided) -> tuple[int, ...]:
    """Return the shape in the file: complex numbers are pairs, unknown types single bytes."""
    kept = layout.stored_shape
    if layout.dtype.is_complex:
        return (*kept, 2)
    return kept if layout.dtype in _CODES else (*kept, layout.dtype.itemsize)


def bits_of(tensor: Tensor, layout: Strided) -> Iterator[memoryview]:
    """Yield the content of a tensor in row-major order, piece by piece.

    Copy-on-write tensors stay so: they are only ever read by torch, into a buffer of ours. Each
    piece is valid until the next one is asked for.
    """
    if layout.nbytes == 0:
        return
    plain = tensor.detach().resolve_conj().resolve_neg()
    for dimension in layout.expanded:
        plain = plain.narrow(dimension, 0, 1)
    if plain._is_zerotensor():
        plain = plain.clone()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    dense = plain.view(_INTEGERS[plain.dtype.itemsize]).contiguous()
    # Not reshape: a single element can keep a stride of its own, which bars it from being viewed.
    bits = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    buffer = torch.empty(min(bits.numel(), _CHUNK), dtype=torch.uint8, device="cpu")
    raw = (ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())  # as in `bytes_of`
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK]
        buffer[: piece.numel()].copy_(piece)
        yield memoryview(raw).cast("B")[: piece.numel()]


def tensor_of(layout: Strided, stored: Tensor) -> Tensor:
    """Return the tensor that stored bytes (uint8 of one dimension) are the content of."""
    kept = layout.stored_shape
    plain = stored.view(layout.dtype).reshape(kept)
    strides = tuple(
        plain.stride(d) if d in layout.expanded else stride
        for d, stride in enumerate(layout.strides)
    )
    if strides != plain.stride():
        integer = _INTEGERS.get(layout.dtype.itemsize, torch.complex128)
        strided = torch.empty_strided(kept, strides, dtype=integer, device="cpu")
        plain = strided.copy_(plain.view(integer)).view(layout.dtype)
    return plain.expand(layout.shape)


_METADATA = {"__metadata__": {"format": "pt", "written_by": "bendtrace"}}
_ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000  # what the safetensors package accepts
_LARGEST_READ = 1 << 30
BINARY: int = getattr(os, "O_BINARY", 0)  # Windows would write line ends its own way


class Extent(NamedTuple):
    """Where the bytes of one tensor are."""

    key: str  # its name in the file
    start: int  # where its bytes begin, counted from the beginning of the file
    nbytes: int  # how many there are
    checksum: int  # their CRC-32


class FileIndex(NamedTuple):
    """The description in the header of a file."""

    sha256: str  # checksum of the file up to the first tensor, in hexadecimal
    # For each key its type, its shape, and where its bytes begin and end in the file.
    extents: dict[str, tuple[str, tuple[int, ...], int, int]]
    size: int  # the size that the file has by this


class DataFile:
    """A file that stays open for reading, so that nobody can exchange its content."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise LoadError(path, f"the file cannot be opened: {error.strerror}") from None
        weakref.finalize(self, self._file.close)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, start: int, nbytes: int) -> Tensor:
        """Return some bytes as a tensor of uint8 with its own memory."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if not nbytes:
            return buffer
        # Reads into the tensor's memory: `torch.frombuffer` of bytes would warn, or copy once more.
        raw = memoryview((ctypes.c_char * nbytes).from_address(buffer.data_ptr())).cast("B")
        done = 0
        while done < nbytes:
            piece = raw[done : done + _LARGEST_READ]
            try:
                count = _read_at(self._file.fileno(), piece, start + done)
            except OSError as error:
                raise LoadError(self.path, f"the file cannot be read: {error.strerror}") from None
            if not count:
                raise LoadError(self.path, "the file is truncated")
            done += count
        return buffer

    def tensor(self, extent: Extent, layout: Strided) -> Tensor:
        """Return a tensor, after a look at its checksum."""
        stored = self.read(extent.start, extent.nbytes)
        if crc32(stored) != extent.checksum:
            raise LoadError(
                self.path, f"the file is damaged: the content of {extent.key!r} has changed"
            )
        return tensor_of(layout, stored)

    def header(self) -> FileIndex:
        """Read and examine the header."""
        size = self.size
        if size < 8:
            raise LoadError(self.path, "the file is truncated")
        length = int.from_bytes(bytes_of(self.read(0, 8)), "little")
        if length == 0:
            raise LoadError(self.path, "it was not finished: writing was interrupted")
        if length > _LARGEST_HEADER:
            raise LoadError(self.path, "it is not a safetensors file")
        if size < 8 + length:
            raise LoadError(self.path, "the file is truncated")
        raw = bytes_of(self.read(0, 8 + length))
        try:
            extents = dict(_extents(json.loads(raw[8:]), 8 + length))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise LoadError(self.path, "the file is damaged: its header makes no sense") from None
        stop = max((stop for *_, stop in extents.values()), default=8 + length)
        if size != stop:
            how = "truncated" if size < stop else "damaged: something was added"
            raise LoadError(self.path, f"the file is {how} ({size} bytes instead of {stop})")
        return FileIndex(hashlib.sha256(raw).hexdigest(), extents, stop)

    def __repr__(self) -> str:
        return f"DataFile({self.path!r})"


if hasattr(os, "preadv"):

    def _read_at(fd: int, piece: memoryview, start: int) -> int:
        # Processes that were forked share the position in a file: none is used.
        return os.preadv(fd, [piece], start)

else:  # Windows, where nothing is forked
    _reading = threading.Lock()

    def _read_at(fd: int, piece: memoryview, start: int) -> int:
        with _reading:
            os.lseek(fd, start, os.SEEK_SET)
            content = os.read(fd, len(piece))
        piece[: len(content)] = content
        return len(content)


def _extents(header: dict[str, Any], base: int) -> list[tuple[str, Any]]:
    found = []
    for key, row in header.items():
        if key != "__metadata__":
            start, stop = row["data_offsets"]
            shape = tuple(row["shape"])
            if not all(type(number) is int for number in (start, stop, *shape)) or start > stop:
                raise ValueError(key)
            found.append((key, (row["dtype"], shape, base + start, base + stop)))
    return found


class TensorFile:
    """A file that tensors are written to, one after the other."""

    size: int

    def __init__(self, path: str, reserve: int) -> None:
        self.path = path
        self.size = self._base = reserve
        self._reserve = reserve
        self._rows: dict[str, Any] = {}
        self._used = len(_dump(_METADATA)) + 8
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | BINARY, 0o666)
        self._close = weakref.finalize(self, os.close, self._fd)
        os.lseek(self._fd, reserve, os.SEEK_SET)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def takes(self, key: str, layout: Strided) -> bool:
        """Return whether there is room for one more in the header."""
        return self._used + row_size(key, layout) <= self._reserve

    def add(self, key: str, layout: Strided, tensor: Tensor) -> Extent:
        """Write a tensor."""
        start = self.size
        checksum = 0
        try:
            for piece in bits_of(tensor, layout):
                checksum = zlib.crc32(piece, checksum)
                write_all(self._fd, piece)
        except BaseException:
            os.lseek(self._fd, start, os.SEEK_SET)
            os.ftruncate(self._fd, start)
            raise
        self.size = start + layout.nbytes
        row = tensor_row(layout, start - self._base, self.size - self._base)
        self._rows[key] = row
        self._used += row_size(key, layout)
        return Extent(key, start, layout.nbytes, checksum)

    def close(self) -> str:
        """Write the header and bring everything to the disk."""
        raw = header_bytes(self._rows, self._reserve)
        os.fsync(self._fd)  # only a file whose bytes are all there has a header
        os.lseek(self._fd, 0, os.SEEK_SET)
        write_all(self._fd, memoryview(raw))
        os.fsync(self._fd)
        self._close()
        return hashlib.sha256(raw).hexdigest()


def write_all(fd: int, content: memoryview) -> None:
    """Write bytes to an open file, however many the system takes at a time."""
    done = 0
    while done < len(content):
        done += os.write(fd, content[done : done + _LARGEST_READ])


def row_size(key: str, layout: Strided) -> int:
    """Return an upper bound of what one tensor takes in a header, in bytes."""
    return len(_dump({key: tensor_row(layout, 10**18, 10**18)})) + 1


def header_size(rows: list[tuple[str, Strided]]) -> int:
    """Return how much to reserve for a file whose tensors are known."""
    size = 8 + len(_dump(_METADATA)) + sum(row_size(key, layout) for key, layout in rows)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def header_bytes(rows: dict[str, Any], size: int = 0) -> bytes:
    """Return a header with its length, padded to a reserved size if there is one."""
    header = _dump({**_METADATA, **rows})
    size = size or -(-(len(header) + 8) // _ALIGNMENT) * _ALIGNMENT
    header = header.ljust(size - 8)
    return len(header).to_bytes(8, "little") + header


def tensor_row(layout: Strided, start: int, stop: int) -> dict[str, Any]:
    """Return the entry of a tensor in a header."""
    shape = list(shape_in_file(layout))
    return {"dtype": code_of(layout.dtype), "shape": shape, "data_offsets": [start, stop]}


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def free_key(name: str, taken: TensorFile | set[str]) -> str:
    """Return a key for a name: the name itself, if JSON readers of every kind can take it."""
    plain = r"[^\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]"
    key = re.sub(plain, lambda match: f"\\u{ord(match[0]):04x}", name) or "_"
    base, number = key, 1
    while key in taken or key == "__metadata__":
        number += 1
        key = f"{base}#{number}"
    return key


def bytes_of(tensor: Tensor) -> bytes:
    """Return the content of a tensor of uint8."""
    if not tensor.numel():
        return b""
    # By the address: `tensor.numpy()` needs numpy, which is optional, and `bytes(tensor)` makes a
    # tensor of each element.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor of uint8."""
    if not tensor.numel():
        return 0
    raw = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())  # as in `bytes_of`
    return zlib.crc32(memoryview(raw).cast("B"))


def sync_directory(path: str) -> None:
    """Bring the names in a directory, or a file, to the disk, where the system can do that."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no directories
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# JSON files that notice when they were changed, and directories that only one writer holds.

LOCK = ".lock"  # in a directory, as long as a writer holds it; a process that is killed leaves it


class DirectoryLock:
    """A lock on a directory. The system takes it back when the process dies."""

    def __init__(self, directory: str) -> None:
        # A writer may be closed by another thread than the one that opened it.
        self._lock = FileLock(os.path.join(directory, LOCK), timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise SaveError(directory, "something else is being saved there right now") from None

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._lock.is_locked:
            # filelock notices if it has locked a file that was removed in the meantime. On Windows,
            # only filelock itself can remove it.
            with suppress(OSError):
                os.remove(self._lock.lock_file)
            self._lock.release()


def write_file(path: str, content: bytes) -> None:
    """Write a new file and bring it to the disk."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | BINARY, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> tuple[int, str]:
    """Write a new file of JSON; return its size in bytes and its SHA-256."""
    # The C encoder recurses; what is written here is never nested deeply.
    content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    write_file(path, content)
    return len(content), hashlib.sha256(content).hexdigest()


def read_json(path: str, size: int, sha256: str) -> Any:
    """Read a file of `write_json`."""
    content = _read_tensors(path)
    if len(content) < size:
        raise LoadError(path, f"the file is truncated ({len(content)} bytes instead of {size})")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise LoadError(path, "the file is damaged: its checksum differs from the saved one")
    return json.loads(content)


def replace_sealed(path: str, value: dict[str, Any], draft: str) -> None:
    """Write JSON with its own checksum in place of an earlier file: all of it, or nothing."""
    text = json.dumps({**value, "sha256": _seal(value)}, indent=1, allow_nan=False)
    write_file(draft, text.encode("ascii") + b"\n")
    os.replace(draft, path)
    sync_directory(os.path.dirname(path))


def read_sealed(path: str, form: str, version: int) -> dict[str, Any]:
    """Read a file of `replace_sealed`."""
    from_here = "it is not one of bendtrace's, or is damaged"
    try:
        value = json.loads(_read_tensors(path))
    except (ValueError, RecursionError):
        raise LoadError(path, f"{from_here}: it is not complete JSON") from None
    if not isinstance(value, dict) or value.get("format") != form:
        raise LoadError(path, f"{from_here}: it does not say that it is a {form}")
    found = value.get("version")
    if type(found) is int and found > version:
        raise LoadError(
            path,
            f"it was written by bendtrace {value.get('bendtrace', '')} in version {found} of the"
            f" format, and this one reads up to version {version}: upgrade bendtrace",
            is_newer=True,
        )
    seal = value.pop("sha256", None)
    if seal != _seal(value) or type(found) is not int or found < 1:
        raise LoadError(path, "the file is damaged: its checksum differs from the saved one")
    return value


def _seal(value: dict[str, Any]) -> str:
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode("ascii")).hexdigest()


def _read_tensors(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = "the file is missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise LoadError(path, f"{reason}") from None


@contextmanager
def writing(directory: str) -> Iterator[None]:
    """Tell of files that cannot be written as of a save that fails."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(directory, error.strerror or str(error)) from error
