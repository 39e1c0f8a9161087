"""The formats of the files of tensors: safetensors, and groups of zarr (an extra)."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from bendtrace.errors import InputError, LoadError
from bendtrace.log.saved_tensors import (
    BINARY,
    LOCK,
    crc32,
    header_bytes,
    layout_of,
    read_sealed,
    replace_sealed,
    sync_directory,
    tensor_row,
    write_all,
    writing,
)
from bendtrace.python.lazy import required
from bendtrace.research.filling import Condition, Filling, Path, Record

_BLOCK = 1 << 16
_ZARR = "3.0.8"  # earlier ones can delete data
_CHUNK = 1 << 22  # bytes, about


class Form(Protocol):
    """A format of the files of tensors."""

    ending: str

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a file, or folder, to the disk; return the facts needed to read it."""

    def open(self, path: str, about: dict[str, Any]) -> OpenShard:
        """Open a file to read it."""


class OpenShard(Protocol):
    """The tensors of a shard that is being read."""

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a tensor, as one dimension, without reading them if possible."""

    def verify(self) -> None:
        """Read everything, and compare it with the checksums."""


def form_of(name: str) -> Form:
    """Return the format of a name."""
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
        raw = header_bytes(rows)
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
                key: [len(raw) + start, nbytes, crc]
                for key, (start, nbytes, crc) in extents.items()
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
        for key, (start, nbytes, crc) in self._extents.items():
            if not nbytes:
                continue
            bits = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)
            if checksum(bits) != crc:
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
    """
    whole = bits.numel() // _BLOCK * _BLOCK
    sums = b""
    if whole:
        words = bits[:whole].view(torch.int64).view(-1, _BLOCK // 8)
        sums = repr(words.sum(1).tolist()).encode()
    rest = bits[whole:]
    return zlib.crc32(sums, crc32(rest))


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


# Shards on disk: each has a file of tensors and an index; without its index it does not count.
#
# Both are written under another name, flushed to disk, and renamed; the index last. So at each
# moment there are complete shards, and leftovers that are ignored.

SETTINGS = "harvest.json"
INDEX = "index.json"
HARVEST = "bendtrace harvest"
SHARD = "bendtrace harvest shard"
_VERSION = 1
_NAME = re.compile(r"shard-(\d{4})-(\d{6})(\.partial)?\.(json|safetensors|zarr)(\.tmp)?")


def replace(path: str, kind: str, content: dict[str, Any]) -> None:
    """Write a file of plain values, completely or not at all."""
    draft = f"{path}.tmp"
    _delete(draft)
    replace_sealed(path, {"format": kind, "version": _VERSION, **content}, draft)


def read(path: str, kind: str = HARVEST) -> dict[str, Any]:
    """Read a file that `replace` wrote."""
    return read_sealed(path, kind, _VERSION)


@dataclass(frozen=True)
class ShardColumn:
    """The rows of a shard under one key.

    Attributes:
        dtype: dtype of the elements.
        per_sample: whether there is a row for each sample, or one for each batch.
        batches: the batches of the shard that have rows; None for all.
        rest: the shape of each row, if all are the same; else a list of the row shapes of each
            batch.
        asked: the text that the node was requested by, if it was text.
    """

    dtype: torch.dtype
    per_sample: bool
    batches: list[int] | None
    rest: tuple[int, ...] | list[tuple[int, ...]]
    asked: str

    def pieces(self, sizes: list[int]) -> Iterator[tuple[int, int, torch.Size]]:
        """Yield the number of each batch with rows, their first element, and their shape."""
        start = 0
        places = range(len(sizes)) if self.batches is None else self.batches
        for ordinal, place in enumerate(places):
            rest = self.rest[ordinal] if isinstance(self.rest, list) else self.rest
            shape = torch.Size((sizes[place] if self.per_sample else 1, *rest))
            yield place, start, shape
            start += shape.numel()


@dataclass
class Shard(Record):
    """The index of a shard.

    Attributes:
        file: path of the file of tensors.
        rank: the process that wrote it.
        is_partial: whether a harvest stopped while writing it, so that it is not full yet.
        about: the facts needed to read the file.
        columns: the rows, by key.
        ids: the ids, if they are strings.
    """

    file: str = ""
    rank: int = 0
    is_partial: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, ShardColumn] = field(default_factory=dict)
    ids: list[str] | None = None

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(self.sizes)

    def all_ids(self, form: Form) -> list[Any]:
        """Return the ids of all samples."""
        if self.ids is not None:
            return self.ids
        return form.open(self.file, self.about).elements("index/id", torch.int64).tolist()


class ShardFiles:
    """The shards that the process of a rank writes to a directory, in one format."""

    def __init__(self, directory: str, rank: int, form: Form) -> None:
        self.directory = directory
        self.rank = rank
        self.form = form

    def write(self, filling: Filling, is_partial: bool = False) -> None:
        """Write a shard, completely or not at all."""
        name = _name(self.rank, filling.number, is_partial)
        path = os.path.join(self.directory, f"{name}.{self.form.ending}")
        with writing(self.directory):
            draft = f"{path}.tmp"
            _delete(draft)
            about = self.form.write(draft, filling.tensors())
            _delete(path)  # of a run that ended before it wrote the index
            os.replace(draft, path)
            sync_directory(self.directory)
            row = {"file": os.path.basename(path), "about": about, **filling.row()}
            replace(os.path.join(self.directory, f"{name}.json"), SHARD, row)
            if not is_partial:
                self._delete_shard(_name(self.rank, filling.number, True))

    def clean(self) -> None:
        """Delete the leftovers of a run that was interrupted."""
        names = set(os.listdir(self.directory))
        for name in sorted(names):
            found = _NAME.fullmatch(name)
            if found is None or int(found[1]) != self.rank:
                continue
            base = _name(self.rank, int(found[2]), bool(found[3]))
            full = _name(self.rank, int(found[2]), False)
            replaced = bool(found[3]) and f"{full}.json" in names
            if found[5] or f"{base}.json" not in names:
                _delete(os.path.join(self.directory, name))
            elif replaced:
                self._delete_shard(base)

    def _delete_shard(self, base: str) -> None:
        for ending in ("json", self.form.ending):  # the index first, so that none is without file
            _delete(os.path.join(self.directory, f"{base}.{ending}"))


def _name(rank: int, number: int, is_partial: bool) -> str:
    return f"shard-{rank:04d}-{number:06d}{'.partial' * is_partial}"


def _delete(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def is_ours(name: str) -> bool:
    """Return whether a file in a directory is one that a harvest writes."""
    known = (SETTINGS, INDEX, f"{SETTINGS}.tmp", f"{INDEX}.tmp", LOCK)
    return name in known or _NAME.fullmatch(name) is not None


def shards_in(directory: str, rank: int | None = None) -> list[Shard]:
    """Return the complete shards of one process, or of all, in the order of their numbers."""
    found: dict[tuple[int, int, bool], str] = {}
    for name in os.listdir(directory):
        part = _NAME.fullmatch(name)
        if part is not None and part[4] == "json" and not part[5] and rank in (None, int(part[1])):
            found[int(part[1]), int(part[2]), bool(part[3])] = name
    shards = []
    last: dict[int, int] = {}
    for (of, number, is_partial), name in sorted(found.items()):
        if is_partial and (of, number, False) in found:
            continue
        path = os.path.join(directory, name)
        if number != last.get(of, 0) + 1:
            raise LoadError(
                path, f"shard {last.get(of, 0) + 1} of process {of}, before it, is missing"
            )
        last[of] = number
        shards.append(_shard(path, of, number, is_partial))
    return shards


def _shard(path: str, rank: int, number: int, is_partial: bool) -> Shard:
    row = read(path, SHARD)
    columns = {}
    for key, kept in row["columns"].items():
        rest = kept["row"]
        columns[key] = ShardColumn(
            getattr(torch, kept["dtype"]),
            kept["per"] == "sample",
            kept["batches"],
            tuple(rest) if rest is not None else [tuple(shape) for shape in kept["rows"]],
            kept["asked"],
        )
    paths = {
        name: Path(name, tuple(map(Condition.of_row, rows))) for name, rows in row["paths"].items()
    }
    row |= {"paths": paths, "number": number}
    shared = {item.name: row[item.name] for item in fields(Record)}
    return Shard(
        **shared, file=os.path.join(os.path.dirname(path), row["file"]), rank=rank,
        is_partial=is_partial, about=row["about"], columns=columns, ids=row["ids"],
    )  # fmt: skip
