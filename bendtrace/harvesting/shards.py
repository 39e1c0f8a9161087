"""Shards on disk: each has a file of tensors and an index; without its index it does not count.

Both are written under another name, flushed to disk, and renamed; the index last. So at each moment
there are complete shards, and leftovers that are ignored.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from bendtrace.errors import LoadError
from bendtrace.harvesting.filling import Filling, Record
from bendtrace.harvesting.formats import Form
from bendtrace.harvesting.paths import Condition, Path
from bendtrace.storage.sealed import LOCK, read_sealed, replace_sealed, writing
from bendtrace.storage.tensors import sync_directory

__all__ = [
    "HARVEST",
    "INDEX",
    "SETTINGS",
    "Kept",
    "Shard",
    "ShardFiles",
    "is_ours",
    "read",
    "replace",
    "shards_in",
]

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
class Kept:
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
    columns: dict[str, Kept] = field(default_factory=dict)
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
        """Write a shard, completely or not at all.

        Raises:
            SaveError: it cannot be written.
        """
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
    """Return the complete shards of one process, or of all, in the order of their numbers.

    Raises:
        LoadError: one in between is missing, or the index of one is damaged.
    """
    found: dict[tuple[int, int, bool], str] = {}
    for name in os.listdir(directory):
        told = _NAME.fullmatch(name)
        if told is not None and told[4] == "json" and not told[5] and rank in (None, int(told[1])):
            found[int(told[1]), int(told[2]), bool(told[3])] = name
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
        columns[key] = Kept(
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
