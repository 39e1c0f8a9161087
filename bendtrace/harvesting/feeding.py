"""Harvested activations in the forms that trainers of sparse autoencoders read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace._checks import required_int
from bendtrace._lazy import required
from bendtrace.errors import InputError
from bendtrace.harvesting.column import Column

__all__ = ["ActivationBuffer", "save_for_sae_lens"]


class ActivationBuffer:
    """An iterator over batches of single vectors, as dictionary_learning's `trainSAE` reads them.

    All axes of a row but the last are flattened. In each epoch, every vector comes once: rows are
    read in random order, `rows` at a time, and the vectors of these are shuffled.

    Args:
        column: the rows of a node, with shape (..., size) each; their shapes may differ otherwise.
        batch_size: how many vectors a batch has. The last batch may have fewer.
        mask: a column with a row of the same leading shape for each sample, such as an attention
            mask that was kept; vectors where it is 0 are left out.
        rows: how many rows to read at a time.
        epochs: how often to go over the column; None for endlessly.
        seed: of the order.
        dtype: the dtype to convert the vectors to; None to leave it.
        device: where to put them.

    Raises:
        InputError: an argument is invalid. Later, if a row has no vectors of floating point
            numbers, or the mask has another shape.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> data = torch.arange(12.0).reshape(1, 2, 3, 2).unbind()  # 2 samples, 3 positions
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(torch.exp, data, where="exp", out=directory, progress=False)
        ...     buffer = bt.harvesting.ActivationBuffer(found["exp"], 4, epochs=1)
        ...     [tuple(batch.shape) for batch in buffer]
        [(4, 2), (2, 2)]
    """

    def __init__(
        self,
        column: Column,
        batch_size: int,
        *,
        mask: Column | None = None,
        rows: int = 1024,
        epochs: int | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        for name, number in (("batch_size", batch_size), ("rows", rows)):
            required_int(name, number, 1)
        if epochs is not None:
            required_int("epochs", epochs, 1)
        if not isinstance(column, Column) or not len(column):
            raise InputError(f"a column of a harvest with rows is needed, not {column!r}")
        if mask is not None:
            _check_samples(mask, column)
        self.batch_size = batch_size
        self._column = column
        self._mask = mask
        self._rows = rows
        self._epochs = epochs
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._running = self._batches()

    @property
    def config(self) -> dict[str, Any]:
        """Where the vectors come from, as plain values, for the trainer's config.json."""
        return {
            "node": self._column.name, "out_batch_size": self.batch_size, "seed": self._seed,
            "mask": None if self._mask is None else self._mask.name, "epochs": self._epochs,
        }  # fmt: skip

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        return next(self._running)

    def _batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        rest: list[Tensor] = []
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            epoch += 1
            order = torch.randperm(len(self._column), generator=generator)
            some = False
            for numbers in order.split(self._rows):
                read = torch.cat(rest + [self._vectors(int(number)) for number in numbers])
                some = some or len(read) > sum(map(len, rest))
                read = read[torch.randperm(len(read), generator=generator)]
                whole = len(read) - len(read) % self.batch_size
                for batch in read[:whole].split(self.batch_size) if whole else ():
                    yield batch.to(self._device, self._dtype)
                rest = [read[whole:]]
            if not some:
                raise InputError(f"the mask {self._mask!r} leaves no vectors")
        if rest and len(rest[0]):
            yield rest[0].to(self._device, self._dtype)

    def _vectors(self, number: int) -> Tensor:
        row: Tensor = self._column[number]
        if row.dim() == 0 or not row.is_floating_point():
            raise InputError(
                f"the rows of {self._column.name!r} are no vectors of floating point numbers, but "
                f"{row.dtype} of shape {tuple(row.shape)}"
            )
        if self._mask is None:
            return row.reshape(-1, row.shape[-1])
        kept = _row_at(self._mask, self._column.positions[number]) != 0
        if kept.shape != row.shape[:-1]:
            raise InputError(
                f"the mask {self._mask.name!r} has shape {tuple(kept.shape)} where "
                f"{self._column.name!r} has {tuple(row.shape)}"
            )
        return row[kept]


def save_for_sae_lens(
    column: Column,
    out: str | os.PathLike[str],
    *,
    hook_name: str,
    tokens: Column | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a column as the data set that SAE-Lens reads as cached activations.

    This is a data set of the library datasets, on the disk: a column called `hook_name` with an
    array of (context, size) for each sample, and `token_ids`. SAE-Lens reads it with
    `use_cached_activations=True`, `cached_activations_path=out`, and the same `hook_name`.

    Args:
        column: the rows of a node, with shape (context, size) each, or (size,), which is a context
            of length 1.
        out: the folder to write, which does not exist or is empty.
        hook_name: the `hook_name` of SAE-Lens's settings.
        tokens: the token ids of each sample, with shape (context,), such as a column that was kept.
        dtype: the dtype to convert the rows to; None to leave it. bfloat16 is not supported.

    Raises:
        InputError: the rows have other shapes or dtypes, or the folder holds something.
        ImportError: datasets is not installed.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> data = torch.zeros(1, 2, 3, 4).unbind()  # 2 samples, 3 positions
        >>> with tempfile.TemporaryDirectory() as directory:  # doctest: +SKIP
        ...     found = bt.harvest(torch.exp, data, where="exp", out=directory, progress=False)
        ...     bt.harvesting.save_for_sae_lens(found["exp"], "cached", hook_name="blocks.0.hook")
    """
    datasets = required("datasets", "a data set of SAE-Lens")
    shape = column.shape
    kind = str(dtype or column.dtype).removeprefix("torch.")
    if shape is None or len(shape) not in (2, 3):
        raise InputError(
            f"the rows of {column.name!r} have shape {None if shape is None else shape[1:]}: one "
            "shape (context, size) is needed"
        )
    if kind not in ("float16", "float32", "float64"):
        raise InputError(f"{kind} cannot be written: pass dtype=torch.float32")
    context = shape[1] if len(shape) == 3 else 1
    features: dict[str, Any] = {hook_name: datasets.Array2D((context, shape[-1]), kind)}
    if tokens is not None:
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context)
        if tokens.shape is None or tokens.shape[1:] != shape[1:-1]:
            raise InputError(
                f"the rows of {tokens.name!r} need the shape ({context},) of a context, not "
                f"{None if tokens.shape is None else tuple(tokens.shape[1:])}"
            )
        _check_samples(tokens, column)
    if os.path.isdir(out) and os.listdir(out):
        raise InputError(f"{os.fspath(out)!r} is not empty: pass a new folder")

    def samples() -> Iterator[dict[str, Any]]:
        for position, row in zip(column.positions, column, strict=True):
            given = {hook_name: row.to(dtype).reshape(context, -1).numpy()}
            if tokens is not None:
                given["token_ids"] = _row_at(tokens, position).reshape(context).numpy()
            yield given

    # The library writes it twice: once as it comes, and once where it is wanted.
    with tempfile.TemporaryDirectory() as cache:
        made = datasets.Dataset.from_generator(
            samples, features=datasets.Features(features), cache_dir=cache
        )
        made.save_to_disk(os.fspath(out))


def _check_samples(other: Column, column: Column) -> None:
    if other.per_sample != column.per_sample or not (
        torch.isin(column.positions, other.positions).all()
    ):
        raise InputError(f"{other.name!r} has no row for some samples of {column.name!r}")


def _row_at(column: Column, position: Tensor) -> Tensor:
    """Return the row of a sample."""
    row: Tensor = column[int(torch.searchsorted(column.positions, position))]
    return row
