"""Shards on disk: a file of tensors each, and an index, without which it does not count.

Both are written under another name, brought to the disk, and renamed; the index last. So at each
moment there are some shards that are complete, and leftovers that nobody looks at.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bendtrace.errors import LoadError, SaveError
from bendtrace.harvesting.filling import Filling, contents
from bendtrace.harvesting.paths import Condition, Path
from bendtrace.storage.sealed import read_sealed, replace_sealed
from bendtrace.storage.tensors import sync_directory

__all__ = [
    "INDEX",
    "SETTINGS",
    "Form",
    "Held",
    "Kept",
    "Shard",
    "ShardFiles",
    "is_ours",
    "shards_in",
    "writing",
]

SETTINGS = "harvest.json"
INDEX = "index.json"
VERSION = 1
_SHARD = "bendtrace harvest shard"
_NAME = re.compile(r"shard-(\d{4})-(\d{6})(\.partial)?\.(json|safetensors|zarr)(\.tmp)?")


class Form(Protocol):
    """A format of the files of tensors."""

    ending: str

    def write(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write a file, or folder, and bring it to the disk; return what to know of it."""

    def open(self, path: str, about: dict[str, Any]) -> Held:
        """Open one to read it."""


class Held(Protocol):
    """The tensors of a shard that is being read."""

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the elements of a tensor, as one dimension, if it can be without reading them."""

    def verify(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            LoadError: it is not what was written.
        """


@dataclass(frozen=True)
class Kept:
    """What the index of a shard says about what was collected under one key.

    Attributes:
        dtype: of the elements.
        per_sample: whether there is a row for each sample, or one for each batch.
        batches: which batches of the shard it has; None for all.
        rest: shape of each row, if all are the same; else a list, of the rows of each batch.
        asked: what the node was asked for by, if that is text.
    """

    dtype: torch.dtype
    per_sample: bool
    batches: tuple[int, ...] | None
    rest: tuple[int, ...] | list[tuple[int, ...]]
    asked: str


@dataclass(frozen=True)
class Shard:
    """What the index of a shard says.

    Attributes:
        file: path of the file of tensors.
        rank: which process wrote it.
        number: counted from 1.
        is_partial: whether it was written where a harvest stopped, and is not full yet.
        about: what is to be known of the file.
        columns: what was collected, by key.
        batches: numbers of the batches.
        sizes: how many samples each has.
        ids: the ids, if they are text.
        taken: for each batch the name of its path.
        paths: the paths by name.
        places: where in the source nodes are, by path.
        order: a checksum of the order of the data set.
        mark: a checksum of the last batch; 0 if it was written to.
        changed: what of the model has changed while it ran.
        draws: whether the model has drawn random numbers.
    """

    file: str
    rank: int
    number: int
    is_partial: bool
    about: dict[str, Any]
    columns: dict[str, Kept]
    batches: tuple[int, ...]
    sizes: tuple[int, ...]
    ids: tuple[str, ...] | None
    taken: tuple[str, ...]
    paths: dict[str, Path]
    places: dict[str, str]
    order: int
    mark: int
    changed: tuple[str, ...]
    draws: bool

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return sum(self.sizes)


class ShardFiles:
    """The shards that one process writes.

    Args:
        directory: where to.
        rank: which process it is.
        form: the format.
    """

    def __init__(self, directory: str, rank: int, form: Form) -> None:
        self.directory = directory
        self.rank = rank
        self.form = form

    def write(self, filling: Filling, is_partial: bool = False) -> None:
        """Write a shard: it is there as a whole, or not at all.

        Raises:
            SaveError: it cannot be written.
        """
        name = _name(self.rank, filling.number, is_partial)
        path = os.path.join(self.directory, f"{name}.{self.form.ending}")
        with writing(self.directory):
            draft = f"{path}.tmp"
            _delete(draft)
            about = self.form.write(draft, contents(filling))
            _delete(path)  # of a run that did not come to write the index
            os.replace(draft, path)
            sync_directory(self.directory)
            index = os.path.join(self.directory, f"{name}.json")
            _delete(f"{index}.tmp")
            replace_sealed(index, _row(filling, os.path.basename(path), about), f"{index}.tmp")
            if not is_partial:
                self._delete_shard(_name(self.rank, filling.number, True))

    def clean(self) -> None:
        """Delete what was left over by a run that was interrupted."""
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
    else:
        try:
            os.remove(path)
        except FileNotFoundError:
            pass


@contextmanager
def writing(directory: str) -> Iterator[None]:
    """Within it, what the system refuses becomes a `SaveError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(directory, error.strerror or str(error)) from error


def is_ours(name: str) -> bool:
    """Whether a file in a directory is one that a harvest writes."""
    known = (SETTINGS, INDEX, f"{SETTINGS}.tmp", f"{INDEX}.tmp")
    return name in known or _NAME.fullmatch(name) is not None


def _row(filling: Filling, file: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the index of a shard as plain values."""
    columns = {}
    for key, column in filling.used():
        shape = column.shape
        everywhere = len(column.batches) == len(filling.batches)
        columns[key] = {
            "dtype": str(column.dtype).removeprefix("torch."),
            "asked": column.asked,
            "per": "sample" if column.per_sample else "batch",
            "batches": None if everywhere else column.batches,
            "row": None if shape is None else list(shape[1:]),
            "rows": [list(s[1:]) for s in column.shapes] if shape is None else None,
        }
    listed = [item for ids in filling.ids for item in ids]
    return {
        "format": _SHARD,
        "version": VERSION,
        "file": file,
        "about": about,
        "columns": columns,
        "batches": filling.batches,
        "sizes": filling.sizes,
        "ids": None if all(type(item) is int for item in listed) else listed,
        "taken": filling.taken,
        "paths": {name: [c.row() for c in path.conditions] for name, path in filling.paths.items()},
        "places": filling.places,
        "order": filling.order,
        "mark": filling.mark,
        "changed": filling.changed,
        "draws": filling.draws,
    }


def shards_in(directory: str, rank: int | None = None) -> list[Shard]:
    """Return the shards that are complete, in the order of processes and numbers.

    Args:
        directory: where they are.
        rank: those of one process; None for all.

    Raises:
        LoadError: one is missing in between, or the index of one is damaged.
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
                path, f"shard {last.get(of, 0) + 1} of process {of}, before it, is gone"
            )
        last[of] = number
        shards.append(_shard(path, of, number, is_partial))
    return shards


def _shard(path: str, rank: int, number: int, is_partial: bool) -> Shard:
    row = read_sealed(path, _SHARD, VERSION)
    columns = {}
    for key, kept in row["columns"].items():
        rest = kept["row"]
        columns[key] = Kept(
            getattr(torch, kept["dtype"]),
            kept["per"] == "sample",
            None if kept["batches"] is None else tuple(kept["batches"]),
            tuple(rest) if rest is not None else [tuple(shape) for shape in kept["rows"]],
            kept["asked"],
        )
    paths = {
        name: Path(name, tuple(map(Condition.of_row, rows))) for name, rows in row["paths"].items()
    }
    return Shard(
        os.path.join(os.path.dirname(path), row["file"]), rank, number, is_partial, row["about"],
        columns, tuple(row["batches"]), tuple(row["sizes"]),
        None if row["ids"] is None else tuple(row["ids"]), tuple(row["taken"]), paths,
        row["places"], row["order"], row["mark"], tuple(row["changed"]), row["draws"],
    )  # fmt: skip
