"""The rows of one node for the samples of a harvest, read from disk as needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.harvesting.formats import Held
from bendtrace.harvesting.shards import Shard

__all__ = ["Column", "Piece", "Taken"]

_SHOWN = 6


class Piece(NamedTuple):
    """The rows of one batch.

    Attributes:
        shard: the shard.
        start: the index of their first element in the shard.
        shape: the shape of all rows together.
        first: the number of rows of the column before them.
        position: the number of samples before the batch; for a row per batch, the number of
            batches.
    """

    shard: Shard
    start: int
    shape: torch.Size
    first: int
    position: int

    @property
    def rest(self) -> torch.Size:
        """The shape of each row."""
        return self.shape[1:]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.shape[0]


@dataclass(frozen=True)
class Taken:
    """The samples of all batches that took a path, or had some outcome of a branch.

    A branch on a batch is a property of the batch; if `per_sample` is True, it is a property of
    each sample.

    Attributes:
        ids: the samples' ids.
        positions: their positions in the harvest: int64 of shape (samples,).
        batches: the numbers of the batches, counted from 0: int64 of shape (batches,).
        per_sample: whether all these batches have one sample.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def model(x):
        ...     return x.exp() if x.sum() > 0 else x
        >>> data = [torch.tensor([4.0]), torch.tensor([-0.5]), torch.tensor([2.0])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(model, data, where="exp", out=directory, progress=False)
        ...     taken = found.took("x.sum() > 0", True)
        ...     taken, taken.positions, taken.per_sample
        ...     found["exp"][taken].shape
        (<2 samples of 2 batches: 0, 2>, tensor([0, 2]), True)
        torch.Size([2])
    """

    ids: list[Any]
    positions: Tensor = field(repr=False, compare=False)
    batches: Tensor = field(repr=False, compare=False)
    per_sample: bool

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)

    def __contains__(self, sample: object) -> bool:
        return sample in self.ids

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.ids[:_SHOWN])) + ", ..." * (len(self.ids) > _SHOWN)
        many = len(self.batches)
        batches = f"{many} batch{'es' * (many != 1)}"
        return f"<{len(self.ids)} sample{'s' * (len(self.ids) != 1)} of {batches}: {shown}>"


class Column:
    """The rows of one node, as a sequence.

    `column[3]` and `column[2:5]` read only these rows; `tensor()` reads all.

    Attributes:
        name: the name of the node in the files.
        dtype: dtype of the elements.
        per_sample: whether there is a row for each sample, or one for each batch.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> data = torch.arange(6.0).reshape(3, 2, 1).unbind()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(torch.neg, data, where="neg", out=directory, progress=False)
        ...     column = found["neg"]
        ...     column, len(column), column[2:4].flatten()
        (<neg: float32[6, 1]>, 6, tensor([-2., -3.]))
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        per_sample: bool,
        pieces: Sequence[Piece],
        opened: Callable[[Shard], Held],
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.per_sample = per_sample
        self._pieces = pieces
        self._opened = opened
        self._firsts = [piece.first for piece in pieces]
        self._elements: tuple[Shard, Tensor] | None = None

    def __len__(self) -> int:
        last = self._pieces[-1]
        return last.first + last.rows

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of all rows together: (rows, ...); None if the rows have different shapes."""
        rest = {piece.rest for piece in self._pieces if piece.rows}
        if len(rest) > 1:
            return None
        return (len(self), *(rest.pop() if rest else self._pieces[0].rest))

    @cached_property
    def positions(self) -> Tensor:
        """The sample of each row, counted from 0; for rows per batch, the batch.

        An int64 tensor of shape (rows,). Some numbers are missing if not all batches reached the
        node.
        """
        parts = [torch.arange(p.position, p.position + p.rows) for p in self._pieces]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor | Taken) -> Any:
        """Return one row, or several: as one tensor, or as a list if they have different shapes.

        The result is a copy that the caller may write to.

        Args:
            which: number of a row, a slice, numbers, a mask with an entry for each row, or samples
                that took a path; samples without a row are skipped.

        Raises:
            IndexError: the row does not exist, or a mask has another length.
            InputError: `which` has an unsupported type.
        """
        if isinstance(which, Taken):
            which = self._rows_of(which)
        if isinstance(which, slice):
            return self._several(range(len(self))[which])
        if isinstance(which, (str, bytes, tuple)):
            raise InputError(
                f"{self.name!r} is indexed by rows: pass a number, a slice, numbers or a mask, "
                f"not {which!r}"
            )
        try:
            rows = torch.as_tensor(which)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{which!r} are not row numbers: {error}") from error
        if rows.dtype is torch.bool:
            if rows.shape != (len(self),):
                raise IndexError(
                    f"a mask for {self.name!r} needs an entry for each of its {len(self)} "
                    f"rows, but has shape {tuple(rows.shape)} (`positions` lists the samples "
                    "that have a row)"
                )
            rows = rows.nonzero().flatten()
        elif rows.dim() > 1 or (rows.numel() and (rows.is_floating_point() or rows.is_complex())):
            raise InputError(
                f"rows of {self.name!r} are selected by one number, or a list of numbers, not "
                f"by {rows.dtype} of shape {tuple(rows.shape)}"
            )
        return self._one(int(rows)) if rows.dim() == 0 else self._several(rows.tolist())

    def _rows_of(self, taken: Taken) -> Tensor:
        wanted = taken.positions if self.per_sample else taken.batches
        return torch.isin(self.positions, wanted).nonzero().flatten()

    def _one(self, row: int) -> Tensor:
        number = row + len(self) if row < 0 else row
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name!r} has {len(self)} rows, and no row {row}")
        piece = self._pieces[bisect_right(self._firsts, number) - 1]
        return self._of(piece)[number - piece.first].clone()

    def _several(self, rows: Sequence[int]) -> Any:
        if self.shape is None:
            return [self._one(row) for row in rows]
        if isinstance(rows, range) and rows.step == 1:
            return self._range(rows)
        made = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for number, row in enumerate(rows):
            made[number] = self._one(row)
        return made

    def _range(self, rows: range) -> Tensor:
        assert self.shape is not None
        first = max(0, bisect_right(self._firsts, rows.start) - 1)
        made = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for piece in self._pieces[first:]:
            begin, end = max(piece.first, rows.start), min(piece.first + piece.rows, rows.stop)
            if piece.first >= rows.stop:
                break
            if begin < end:
                found = self._of(piece)[begin - piece.first : end - piece.first]
                made[begin - rows.start : end - rows.start] = found
        return made

    def _of(self, piece: Piece) -> Tensor:
        """Return the rows of one batch, in the memory of the file, which must not be written to."""
        if self._elements is None or self._elements[0] is not piece.shard:
            elements = self._opened(piece.shard).elements(self.name, self.dtype)
            self._elements = piece.shard, elements
        stop = piece.start + piece.shape.numel()
        return self._elements[1][piece.start : stop].view(piece.shape)

    def tensor(self) -> Tensor:
        """Read all rows, as one tensor of shape (rows, ...).

        Raises:
            InputError: they have different shapes.
        """
        if self.shape is None:
            shapes = sorted({piece.rest for piece in self._pieces})
            raise InputError(
                f"the rows of {self.name!r} have different shapes ({str(shapes)[1:-1]:.80}), "
                "and do not form a tensor: read them one by one, or by batch with batches()"
            )
        return self._range(range(len(self)))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each batch the positions of its samples, and their rows.

        Rows of one batch have the same shape: int64 of shape (rows,), and (rows, ...).
        """
        for piece in self._pieces:
            positions = torch.arange(piece.position, piece.position + piece.rows)
            yield positions, self._of(piece).clone()

    def __iter__(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            yield from self._of(piece).clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_elements": None}

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        each = "" if self.per_sample else ", one for each batch"
        if self.shape is None:
            return f"<{self.name}: {len(self)} rows of {dtype}, with several shapes{each}>"
        return f"<{self.name}: {dtype}{list(self.shape)}{each}>"
