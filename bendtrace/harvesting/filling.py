"""The current shard: buffers for the values of nodes, and the index of its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.harvesting.batches import Ids
from bendtrace.harvesting.paths import Path

__all__ = ["Filling", "Record", "Rows", "require_place"]


class Rows:
    """The rows of one node, for several batches, in a buffer that is reused.

    Args:
        asked: the text that the node was requested by, if it was text.
        dtype: dtype of the elements.
        per_sample: whether there is a row for each sample, or one for each batch.
        room: the approximate size of the buffer, in bytes.

    Attributes:
        shapes: the shape of the rows of each batch that has rows.
        batches: the numbers of these batches in the shard.
    """

    def __init__(self, asked: str, dtype: torch.dtype, per_sample: bool, room: int) -> None:
        self.asked = asked
        self.dtype = dtype
        self.per_sample = per_sample
        self.shapes: list[torch.Size] = []
        self.batches: list[int] = []
        self._room = room
        self._buffer = torch.empty(0, dtype=dtype)
        self._rest: torch.Size | None = None  # the shape of the rows in the buffer
        self._used = 0
        self._others: dict[int, Tensor] = {}  # rows of another shape, by the number of `shapes`
        self._pending: Tensor | None = None
        self._room_for = 0  # rows in the buffer
        # Of the batch before, if its rows are in the buffer.
        self._shape: torch.Size | None = None
        self._rows = -1
        self._bytes = 0

    def put_alike(self, value: Tensor, rows: int) -> bool:
        """Copy the rows of a batch if they match those of the batch before; return whether.

        This is the fast path for nearly all batches; `put` handles the others.
        """
        start = self._used
        stop = start + rows
        if (
            rows != self._rows
            or value.shape != self._shape
            or value.dtype is not self.dtype
            or stop > self._room_for
            or self._pending is not None
            or value.requires_grad
        ):
            return False
        self._pending = self._buffer.narrow(0, start, rows).copy_(value)
        return True

    def put(self, value: Tensor, rows: int) -> Tensor:
        """Copy the rows of a batch that may be dropped; return the copy.

        Args:
            value: the rows.
            rows: the approximate number of rows of the whole shard.
        """
        stop = self._used + value.shape[0]
        self._shape = None
        if stop > self._room_for or self._rest != value.shape[1:]:
            if self._used and self._rest != value.shape[1:]:
                self._pending = value.to("cpu", self.dtype, copy=True)
                return self._pending
            self._make_room(value.shape[1:], stop, rows)
        self._pending = self._buffer[self._used : stop]
        return self._pending.copy_(value)

    def _make_room(self, rest: torch.Size, stop: int, rows: int) -> None:
        each = max(1, rest.numel() * self.dtype.itemsize)
        most = max(stop, min(rows, self._room // each), 2 * stop if self._used else 0)
        # Memory that is never written to costs nothing.
        grown = torch.empty((most, *rest), dtype=self.dtype)
        if self._used:
            grown[: self._used] = self._buffer[: self._used]
        self._buffer, self._rest, self._room_for = grown, rest, most

    def keep(self, batch: int) -> int:
        """Keep the latest rows; return their size in bytes."""
        pending = self._pending
        if pending is None:
            return 0
        self._pending = None
        shape = self._shape
        if shape is None:
            shape, self._bytes = pending.shape, pending.nbytes
            if self._rest == shape[1:]:
                self._shape, self._rows = shape, shape[0]
            else:
                self._others[len(self.shapes)] = pending
                self._rows = -1
        if self._rows >= 0:
            self._used += self._rows
        self.shapes.append(shape)
        self.batches.append(batch)
        return self._bytes

    @property
    def is_pending(self) -> bool:
        """Whether there are rows that are not kept yet."""
        return self._pending is not None

    def drop(self) -> None:
        """Drop the latest rows."""
        self._pending = self._shape = None

    def clear(self) -> None:
        """Drop all rows, but not the memory."""
        self.shapes, self.batches, self._others = [], [], {}
        self._used = 0
        self._pending = self._shape = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of all rows together; None if they have different shapes."""
        if self._others:
            return None
        return (self._used, *self._buffer.shape[1:])

    def joined(self) -> Tensor:
        """Return all rows as one tensor, or their elements if they have different shapes."""
        if not self._others:
            return self._buffer[: self._used]
        parts = []
        start = 0
        for number, shape in enumerate(self.shapes):
            part = self._others.get(number)
            if part is None:
                part = self._buffer[start : start + shape[0]]
                start += shape[0]
            parts.append(part.reshape(-1))
        return torch.cat(parts)

    def row(self, batches: int) -> dict[str, Any]:
        """Return the entry for the index of a shard with some number of batches."""
        shape = self.shape
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "asked": self.asked,
            "per": "sample" if self.per_sample else "batch",
            "batches": None if len(self.batches) == batches else self.batches,
            "row": None if shape is None else list(shape[1:]),
            "rows": [list(s[1:]) for s in self.shapes] if shape is None else None,
        }


@dataclass
class Record:
    """The part of a shard's index that is the same in memory and on disk.

    Attributes:
        number: number of the shard, counted from 1.
        batches: the numbers of its batches, among all batches of the loader.
        sizes: the number of samples of each.
        taken: the name of the path of each batch.
        paths: the paths by name.
        places: the source locations of nodes, by path.
        order: a checksum of the order of the data set up to the last batch.
        mark: a checksum of the last batch; 0 if it was written to.
        changed: the parts of the model that changed while it ran.
        draws: whether the model drew random numbers.
    """

    number: int = 1
    batches: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    order: int = 0
    mark: int = 0
    changed: list[str] = field(default_factory=list)
    draws: bool = False


class Filling(Record):
    """A shard that is being filled.

    Args:
        rows: the number of samples that completes it.
        room: the number of bytes that completes it.

    Attributes:
        columns: the rows, by key.
        ids: the ids of each batch's samples.
        samples: the number of samples.
        nbytes: the size of all rows.
    """

    samples: int
    nbytes: int

    def __init__(self, rows: int, room: int) -> None:
        self.columns: dict[str, Rows] = {}
        self.rows = rows
        self.room = room
        self._begin(1)

    def _begin(self, number: int) -> None:
        super().__init__(number)
        self.ids: list[Ids] = []
        self.samples = self.nbytes = 0

    def add(
        self, key: str, asked: str, value: Tensor, per_sample: bool, dtype: torch.dtype
    ) -> None:
        """Copy rows of the current batch.

        Args:
            key: their name.
            asked: the text that they were requested by, if it was text.
            value: the rows, along the first dimension.
            per_sample: whether there is one for each sample, or one for the batch.
            dtype: the type to store them as.

        Raises:
            InputError: they do not fit the rows of earlier batches, or the dtype.
        """
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = Rows(asked, dtype, per_sample, self.room)
        elif column.dtype != dtype:
            raise InputError(
                f"{key!r} returned {column.dtype} before, and {dtype} now: pass the dtype to "
                "store as dtype="
            )
        if column.is_pending:
            raise InputError(f"two harvested values have the same name {key!r}")
        kept = column.put(value, self.rows + len(value))
        if dtype != value.dtype and _is_smaller(dtype, value.dtype):
            lost = ~kept.isfinite() & value.to("cpu").isfinite()
            if lost.any():
                raise InputError(
                    f"{key!r} returned {value.abs().max().item():g}, which does not fit in "
                    f"{dtype}: choose another dtype=, such as torch.bfloat16"
                )

    def end_batch(self, number: int, ids: Ids, path: Path) -> None:
        """Keep the current batch."""
        place, size = len(self.batches), len(ids)
        for column in self.columns.values():
            self.nbytes += column.keep(place)
        self.batches.append(number)
        self.sizes.append(size)
        self.samples += size
        self.ids.append(ids)
        self.taken.append(path.name)
        self.paths[path.name] = path

    def _used(self) -> list[tuple[str, Rows]]:
        """Return the columns with rows, in the order of their names."""
        return sorted((key, column) for key, column in self.columns.items() if column.batches)

    def drop_batch(self) -> None:
        """Drop the current batch."""
        for column in self.columns.values():
            column.drop()

    def clear(self, before: Filling) -> None:
        """Begin the shard after another one, in the same memory."""
        for key, column in before.columns.items():
            if key not in self.columns:  # the values of a node are of one kind in all shards
                self.columns[key] = Rows(column.asked, column.dtype, column.per_sample, self.room)
        for column in self.columns.values():
            column.clear()
        self._begin(before.number + 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their keys in the file, largest elements first."""
        found: dict[str, Tensor] = {}
        sizes = self.sizes
        for key, column in self._used():
            shape = column.shape
            if shape is None:
                rest = [shape[1:] for shape in column.shapes for _ in range(shape[0])]
                found[f"{key}#shapes"], found[f"{key}#offsets"] = _shaped(rest)
            found[key] = column.joined()
            if len(column.batches) < len(sizes):
                if column.per_sample:
                    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
                    rows = [n for b in column.batches for n in range(ends[b], ends[b + 1])]
                else:
                    rows = column.batches
                found[f"{key}#rows"] = torch.tensor(rows, dtype=torch.int64)
        listed = [item for ids in self.ids for item in ids]
        if all(type(item) is int for item in listed):
            found["index/id"] = torch.tensor(listed, dtype=torch.int64)
        repeats = torch.tensor(sizes)
        found["index/batch"] = torch.tensor(self.batches).repeat_interleave(repeats)
        names = list(self.paths)
        taken = torch.tensor([names.index(name) for name in self.taken])
        found["index/path"] = taken.repeat_interleave(repeats)
        return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))

    def row(self) -> dict[str, Any]:
        """Return the index as plain values."""
        listed = [item for ids in self.ids for item in ids]
        paths = {name: [c.row() for c in path.conditions] for name, path in self.paths.items()}
        shared = {item.name: getattr(self, item.name) for item in fields(Record)}
        return {
            **shared,
            "paths": paths,
            "columns": {key: column.row(len(self.batches)) for key, column in self._used()},
            "ids": None if all(type(item) is int for item in listed) else listed,
        }


def require_place(key: str, known: str, place: str) -> None:
    """Raise if two nodes at different source locations have the same name."""
    if known != place:
        raise InputError(
            f"{key!r} was the node at {known.partition(' < ')[0] or '?'} in an earlier harvest "
            f"or in another process, and is the one at {place.partition(' < ')[0] or '?'} "
            "here: of several nodes, the one that a process runs first gets the plain name. "
            "Pass a BendedModule that was first called with the same inputs, so that all "
            "nodes have names"
        )


def _is_smaller(dtype: torch.dtype, given: torch.dtype) -> bool:
    if not dtype.is_floating_point or not given.is_floating_point:
        return False
    return torch.finfo(dtype).max < torch.finfo(given).max


def _shaped(rest: list[torch.Size]) -> tuple[Tensor, Tensor]:
    """Return the shapes of rows as a table, and where each row begins among all elements.

    Returns:
        int64 of shape (rows, most dimensions), filled up with -1, and int64 of shape (rows + 1,).
    """
    most = max(map(len, rest), default=0)
    table = torch.tensor([[*s, *[-1] * (most - len(s))] for s in rest], dtype=torch.int64)
    sizes = torch.tensor([0, *map(math.prod, rest)], dtype=torch.int64)
    return table.reshape(len(rest), most), sizes.cumsum(0)
