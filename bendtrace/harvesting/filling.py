"""A shard that is being filled: buffers for what nodes gave, and the index of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.harvesting.batches import Ids
from bendtrace.harvesting.paths import Path

__all__ = ["Filling", "Rows", "contents", "require_place"]


class Rows:
    """What one node gave, for several batches, in a buffer that is used again and again.

    Args:
        asked: what the node was asked for by, if that is text.
        dtype: of the elements.
        per_sample: whether there is a row for each sample, or one for each batch.
        room: for about how many bytes there is to be room.

    Attributes:
        shapes: for each batch that has rows, the shape of all of them.
        batches: which batches of the shard these are.
        nbytes: the bytes of all rows.
    """

    def __init__(self, asked: str, dtype: torch.dtype, per_sample: bool, room: int) -> None:
        self.asked = asked
        self.dtype = dtype
        self.per_sample = per_sample
        self.shapes: list[torch.Size] = []
        self.batches: list[int] = []
        self.nbytes = 0
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
        """Copy the rows of a batch if they are like those of the batch before; say whether.

        For what is the case with nearly all batches; `put` is for all.

        Args:
            value: the rows.
            rows: how many there have to be.
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
        """Copy the rows of a batch, which is not sure to stay; return the copy.

        Args:
            value: the rows.
            rows: how many rows there will be in all, about.
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
        # Memory that nobody writes to is none.
        grown = torch.empty((most, *rest), dtype=self.dtype)
        if self._used:
            grown[: self._used] = self._buffer[: self._used]
        self._buffer, self._rest, self._room_for = grown, rest, most

    def keep(self, batch: int) -> int:
        """Have what was put last be sure to stay; return how many bytes it is."""
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
        self.nbytes += self._bytes
        return self._bytes

    @property
    def is_pending(self) -> bool:
        """Whether something was put that is not sure to stay."""
        return self._pending is not None

    def drop(self) -> None:
        """Forget what was put last."""
        self._pending = self._shape = None

    def clear(self) -> None:
        """Forget all of it, but for the memory."""
        self.shapes, self.batches, self._others = [], [], {}
        self.nbytes = self._used = 0
        self._pending = self._shape = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of all rows together; None if they differ in shape."""
        if self._others:
            return None
        return (self._used, *self._buffer.shape[1:])

    def joined(self) -> Tensor:
        """Return all rows as one tensor, or their elements if they differ in shape."""
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


@dataclass
class Filling:
    """A shard that is being filled.

    Attributes:
        rows: how many samples close it.
        room: how many bytes close it.
        number: of the shard, counted from 1.
        columns: what was collected, by its key.
        batches: numbers of the batches, of all that the loader gives.
        sizes: how many samples each has.
        ids: the ids of each batch's samples.
        taken: for each batch the name of its path.
        paths: the paths.
        places: where in the source the nodes are that were ever collected, by path.
        order: a checksum of the order of the data set up to the last batch.
        mark: a checksum of the last batch.
        changed: what of the model has changed while it ran.
        draws: whether the model has drawn random numbers.
        samples: how many samples it has.
        nbytes: the bytes of what was collected.
    """

    rows: int
    room: int
    number: int = 1
    columns: dict[str, Rows] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    order: int = 0
    mark: int = 0
    changed: list[str] = field(default_factory=list)
    draws: bool = False
    samples: int = 0
    nbytes: int = 0

    def add(
        self, key: str, asked: str, value: Tensor, per_sample: bool, dtype: torch.dtype
    ) -> None:
        """Copy what was collected of the batch that is under way.

        Args:
            key: what it is called.
            asked: what it was asked for by, if that is text.
            value: the rows, along the first dimension.
            per_sample: whether these are the samples, or one for the batch.
            dtype: what to store it as.

        Raises:
            InputError: it does not fit in with what was there before, or in the dtype.
        """
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = Rows(asked, dtype, per_sample, self.room)
        elif column.dtype != dtype:
            raise InputError(
                f"{key!r} gave {column.dtype} before, and {dtype} now: say with dtype= what to "
                "store it as"
            )
        if column.is_pending:
            raise InputError(f"two things that are harvested are both called {key!r}")
        kept = column.put(value, self.rows + len(value))
        if dtype != value.dtype and _is_smaller(dtype, value.dtype):
            lost = ~kept.isfinite() & value.to("cpu").isfinite()
            if lost.any():
                raise InputError(
                    f"{key!r} gave {value.abs().max().item():g}, which does not fit in {dtype}: "
                    "choose another dtype=, such as torch.bfloat16"
                )

    def end_batch(self, number: int, ids: Ids, path: Path) -> None:
        """Have the batch that is under way be a part of the shard."""
        place, size = len(self.batches), len(ids)
        for column in self.columns.values():
            self.nbytes += column.keep(place)
        self.batches.append(number)
        self.sizes.append(size)
        self.samples += size
        self.ids.append(ids)
        self.taken.append(path.name)
        self.paths[path.name] = path

    def used(self) -> list[tuple[str, Rows]]:
        """Return what was collected, in an order that depends on nothing but the names."""
        return sorted((key, column) for key, column in self.columns.items() if column.batches)

    def drop_batch(self) -> None:
        """Forget the batch that is under way."""
        for column in self.columns.values():
            column.drop()

    def clear(self, before: Filling) -> None:
        """Begin the shard after another one, in the same memory."""
        for key, column in before.columns.items():
            if key not in self.columns:  # what a node gives is to be of one kind in all shards
                self.columns[key] = Rows(column.asked, column.dtype, column.per_sample, self.room)
        for column in self.columns.values():
            column.clear()
        self.batches, self.sizes, self.ids, self.taken, self.paths = [], [], [], [], {}
        self.number, self.order, self.mark = before.number + 1, 0, 0
        self.changed, self.draws, self.samples, self.nbytes = [], False, 0, 0


def require_place(key: str, known: str, place: str) -> None:
    """Refuse two nodes of one name: names go by what a process comes by first.

    Raises:
        InputError: they are at different places in the source.
    """
    if known != place:
        raise InputError(
            f"{key!r} was the node at {known.partition(' < ')[0] or '?'} in what was harvested "
            f"before or by another process, and is the one at {place.partition(' < ')[0] or '?'} "
            "here: of several nodes the one that a process comes by first has the plain name. Give "
            "a BendedModule that was called with the same inputs first, so that all have names"
        )


def _is_smaller(dtype: torch.dtype, given: torch.dtype) -> bool:
    if not dtype.is_floating_point or not given.is_floating_point:
        return False
    return torch.finfo(dtype).max < torch.finfo(given).max


def shaped(rest: Iterable[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the shapes of rows as a table, and where each row begins in all their elements.

    Args:
        rest: the shapes.

    Returns:
        int64 of shape (rows, most dimensions), filled up with -1, and int64 of shape (rows + 1,).
    """
    listed = list(rest)
    most = max(map(len, listed), default=0)
    table = torch.tensor([[*s, *[-1] * (most - len(s))] for s in listed], dtype=torch.int64)
    sizes = torch.tensor([0, *map(math.prod, listed)], dtype=torch.int64)
    return table.reshape(len(listed), most), sizes.cumsum(0)


def contents(filling: Filling) -> dict[str, Any]:
    """Return all tensors of a shard by their keys in the file, those of larger elements first."""
    found: dict[str, Tensor] = {}
    sizes = filling.sizes
    for key, column in filling.used():
        shape = column.shape
        if shape is None:
            rest = [shape[1:] for shape in column.shapes for _ in range(shape[0])]
            found[f"{key}#shapes"], found[f"{key}#offsets"] = shaped(rest)
        found[key] = column.joined()
        if len(column.batches) < len(sizes):
            if column.per_sample:
                ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
                rows = [n for b in column.batches for n in range(ends[b], ends[b + 1])]
            else:
                rows = column.batches
            found[f"{key}#rows"] = torch.tensor(rows, dtype=torch.int64)
    listed = [item for ids in filling.ids for item in ids]
    if all(type(item) is int for item in listed):
        found["index/id"] = torch.tensor(listed, dtype=torch.int64)
    repeats = torch.tensor(sizes)
    found["index/batch"] = torch.tensor(filling.batches).repeat_interleave(repeats)
    names = list(filling.paths)
    taken = torch.tensor([names.index(name) for name in filling.taken])
    found["index/path"] = taken.repeat_interleave(repeats)
    return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))
