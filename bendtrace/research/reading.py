"""A harvest on disk, readable as far as it is complete, and the files that it consists of."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import os
import re
import shutil
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.data import Dataset

from bendtrace.errors import InputError, LoadError, NodePathError
from bendtrace.insert.where import near_misses
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
from bendtrace.python.checks import required_int, required_path, similar
from bendtrace.python.lazy import required, required_pandas
from bendtrace.research.filling import Condition, Filling, Path, Record

_KEPT = "kept/"
_SHOWN = 8


class _Batch(NamedTuple):
    """A batch of the harvest: its number, where it is, and where its samples begin."""

    number: int
    shard: Shard
    place: int
    size: int
    position: int

    @property
    def path(self) -> str:
        """The name of the path that it took."""
        return self.shard.taken[self.place]


class Harvest:
    """The files of a harvest: a column for each node, and an index of samples and their paths.

    Samples are in the order of the loader, even with several processes. An incomplete harvest can
    be read as far as it goes.

    Args:
        directory: its directory.

    Attributes:
        directory: its directory.
        settings: the options of `harvest`, as plain values.
        is_complete: whether it covers the whole data set.

    Raises:
        LoadError: there is no harvest, or it is damaged.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> data = torch.arange(4.0).reshape(2, 2, 1).unbind()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = bt.harvest(torch.exp, data, where="exp", out=directory, progress=False)
        ...     found = bt.harvesting.Harvest.open(directory)
        ...     len(found), found["exp"].shape, found.ids
        (4, (4, 1), [0, 1, 2, 3])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory: str = os.path.abspath(required_path("directory", directory))
        if not os.path.isdir(self.directory):
            raise LoadError(self.directory, "there is no such directory")
        path = os.path.join(self.directory, SETTINGS)
        if not os.path.exists(path):
            raise LoadError(self.directory, f"it is not a harvest: there is no {SETTINGS}")
        about = read_plain(path)
        self.settings: dict[str, Any] = about["settings"]
        self.is_complete: bool = os.path.exists(os.path.join(self.directory, INDEX))
        self.shards: tuple[Shard, ...] = tuple(shards_in(self.directory))
        self._form = format_named(self.settings["format"])
        self._open_shards: dict[str, OpenShard] = {}
        if self.is_complete:
            index = read_plain(os.path.join(self.directory, INDEX))
            if index["shards"] != self.index()["shards"]:
                raise LoadError(self.directory, f"its shards are not those in {INDEX}")

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Harvest:
        """Open a harvest; the same as the constructor.

        Args:
            directory: its directory.

        Raises:
            LoadError: there is no harvest, or it is damaged.
        """
        return cls(directory)

    def index(self) -> dict[str, Any]:
        """Return the index of all shards, as plain values."""
        return {
            "samples": len(self),
            "shards": [
                {
                    "file": os.path.basename(shard.file), "samples": shard.samples,
                    "batches": len(shard.batches),
                }
                for shard in self.shards
            ],
            "columns": list(self._columns),
            "paths": {path.name: self.counts[path.name] for path in self.paths},
        }  # fmt: skip

    # Samples

    @cached_property
    def _batches(self) -> list[_Batch]:
        rows = sorted(
            (number, at, place)
            for at, shard in enumerate(self.shards)
            for place, number in enumerate(shard.batches)
        )
        found = []
        position = 0
        for number, at, place in rows:
            shard = self.shards[at]
            found.append(_Batch(number, shard, place, shard.sizes[place], position))
            position += shard.sizes[place]
        return found

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def ids(self) -> list[Any]:
        """The ids of the samples, in order."""
        by_batch: dict[tuple[str, int], list[Any]] = {}
        for shard in self.shards:
            ids = iter(shard.all_ids(self._form))
            for place, size in enumerate(shard.sizes):
                by_batch[shard.file, place] = list(itertools.islice(ids, size))
        return [item for b in self._batches for item in by_batch[b.shard.file, b.place]]

    @property
    def is_per_sample(self) -> bool:
        """True if all batches have one sample, so that paths are those of samples."""
        return all(batch.size == 1 for batch in self._batches)

    # Values

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes in the files."""
        return tuple(key for key in self._columns if not key.startswith(_KEPT))

    @property
    def kept(self) -> dict[str, Column]:
        """The stored parts of the batches, by name."""
        return {
            key.removeprefix(_KEPT): self._columns[key]
            for key in self._columns
            if key.startswith(_KEPT)
        }

    def __getitem__(self, name: str) -> Column:
        """Return the rows of a node.

        Args:
            name: the name of the node in the files, or the text that it was requested by.

        Raises:
            NodePathError: no node has this name.
        """
        found = self._columns.get(name)
        if found is None and isinstance(name, str):
            found = self._columns.get(self._names_by_request.get(name.removesuffix(":1"), name))
        if found is None:
            names = list(self._columns)
            near = similar(name, names) or names[:_SHOWN]
            hint = near_misses(str(name), names)
            raise NodePathError(
                f"there is no {name!r} in this harvest; {hint}", str(name), tuple(near)
            )
        return found

    @cached_property
    def _names_by_request(self) -> dict[str, str]:
        """The names of nodes in the files, by the texts that they were requested by."""
        found: dict[str, list[str]] = {}
        for shard in self.shards:
            for key, kept in shard.columns.items():
                _, _, number = key.partition(":")
                for asked in dict.fromkeys(
                    (key, f"{kept.asked}:{number}" if number else kept.asked)
                ):
                    names = found.setdefault(asked, [])
                    if key not in names:
                        names.append(key)
        return {asked: names[0] for asked, names in found.items() if len(names) == 1}

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._names_by_request

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._columns)

    @cached_property
    def _columns(self) -> dict[str, Column]:
        columns: dict[str, list[BatchRows]] = {}
        facts: dict[str, tuple[torch.dtype, bool]] = {}
        starts: dict[tuple[str, int], list[tuple[str, int, torch.Size]]] = {}
        for shard in self.shards:
            for key, kept in shard.columns.items():
                fact = kept.dtype, kept.per_sample
                if facts.setdefault(key, fact) != fact:
                    raise LoadError(
                        shard.file, f"{key!r} is {kept.dtype} here, but {facts[key][0]} elsewhere"
                    )
                for place, start, shape in kept.pieces(shard.sizes):
                    starts.setdefault((shard.file, place), []).append((key, start, shape))
        for at, batch in enumerate(self._batches):
            for key, start, shape in starts.get((batch.shard.file, batch.place), ()):
                own = columns.setdefault(key, [])
                first = own[-1].first + own[-1].rows if own else 0
                position = batch.position if facts[key][1] else at
                own.append(BatchRows(batch.shard, start, shape, first, position))
        return {key: Column(key, *facts[key], own, self._open) for key, own in columns.items()}

    def _open(self, shard: Shard) -> OpenShard:
        opened = self._open_shards.get(shard.file)
        if opened is None:
            opened = self._open_shards[shard.file] = self._form.open(shard.file, shard.about)
        return opened

    def verify(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            LoadError: the content of a file has changed.
        """
        for shard in self.shards:
            self._open(shard).verify()

    # Paths

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The paths that batches took, in the order of the batches."""
        found: dict[str, Path] = {}
        for batch in self._batches:
            found.setdefault(batch.path, batch.shard.paths[batch.path])
        return tuple(found.values())

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of samples that took each path, by the path's name."""
        found = {path.name: 0 for path in self.paths}
        for batch in self._batches:
            found[batch.path] += batch.size
        return found

    def samples(self, path: Path | str) -> Taken:
        """Return the samples of the batches that took a path.

        Args:
            path: one of `paths`, or its name.

        Raises:
            InputError: no batch took it.
        """
        name = path.name if isinstance(path, Path) else path
        if name not in self.counts:
            listed = ", ".join(map(repr, self.counts))
            raise InputError(f"no batch took the path {name!r}; the paths are {listed}")
        return self._select({name})

    def took(self, branch: str | int, outcome: bool | int = True) -> Taken:
        """Return the samples of the batches with some outcome of a branch.

        A branch that a batch reached several times matches if one of its outcomes does.

        Args:
            branch: its condition in source text, `x.sum() > 0`; or its line, `12`, or
                `"model.py:12"`.
            outcome: True or False; for a whole loop the number of iterations; for an index its
                value.

        Raises:
            InputError: no batch reached such a branch, or its outcomes have another type.
        """
        found = {
            path.name: [c for c in path.conditions if _is_branch(c.text, c.file, c.line, branch)]
            for path in self.paths
        }
        if not any(found.values()):
            texts = {c.text: None for path in self.paths for c in path.conditions}
            near = similar(branch, texts) or list(texts)[:_SHOWN]
            listed = ", ".join(map(repr, near)) or "none"
            raise InputError(f"no batch reached a branch {branch!r}; known branches: {listed}")
        outcomes = dict.fromkeys((type(c.outcome), c.outcome) for cs in found.values() for c in cs)
        if not any(kind is type(outcome) for kind, _ in outcomes):
            listed = ", ".join(repr(outcome) for _, outcome in list(outcomes)[:_SHOWN])
            raise InputError(
                f"the outcomes of {branch!r} are {listed}; none has the type of {outcome!r}"
            )
        wanted = {
            name
            for name, conditions in found.items()
            if any(type(c.outcome) is type(outcome) and c.outcome == outcome for c in conditions)
        }
        return self._select(wanted)

    def _select(self, names: set[str]) -> Taken:
        met = [(at, batch) for at, batch in enumerate(self._batches) if batch.path in names]
        parts = [torch.arange(b.position, b.position + b.size) for _, b in met]
        positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        ids = self.ids
        return Taken(
            [ids[position] for position in positions.tolist()],
            positions,
            torch.tensor([at for at, _ in met], dtype=torch.int64),
            all(batch.size == 1 for _, batch in met),
        )

    # Tables

    def dataset(self, *names: str) -> SampleRows:
        """Return the samples as a torch data set, for example to train a probe.

        Args:
            *names: nodes, and `kept/...`; each item is a tuple of their rows. Without names
                an item is a dict of all rows of the sample, and its `id`.

        Returns:
            The data set of those samples that have all of these.

        Raises:
            NodePathError: a name does not exist.
            InputError: a name has rows per batch, not per sample.
        """
        return SampleRows(self, names)

    def to_pandas(self) -> Any:
        """Return the index: a row for each sample.

        Columns: `id`, `path` (its name), `batch` (counted from 0), `batch_size`, `process` and
        `shard` (the number of the file), and for each node whether it has a value.
        """
        names = ("path", "batch", "batch_size", "process", "shard")
        table = [
            (b.path, b.number, b.size, b.shard.rank, b.shard.number)
            for b in self._batches
            for _ in range(b.size)
        ]
        rows: dict[str, list[Any]] = {"id": self.ids}
        rows |= {name: [row[number] for row in table] for number, name in enumerate(names)}
        for name, column in self._columns.items():
            has = torch.zeros(len(self), dtype=torch.bool)
            if column.per_sample:
                has[column.positions] = True
            else:
                for at in column.positions.tolist():
                    batch = self._batches[at]
                    has[batch.position : batch.position + batch.size] = True
            rows[name] = has.tolist()
        return required_pandas().DataFrame(rows)

    def __reduce__(self) -> Any:
        return Harvest, (self.directory,)

    def __repr__(self) -> str:
        state = "" if self.is_complete else ", not complete"
        count = len(self.shards)
        lines = [f"Harvest of {len(self):,} samples in {count} shard{'s' * (count != 1)}{state}"]
        lines += [f"  {column!r}" for column in self._columns.values()]
        if len(self.paths) > 1:
            of_what = "samples" if self.is_per_sample else "samples, in batches"
            lines.append(f"  {len(self.paths)} paths ({of_what}):")
            for path in sorted(self.paths, key=lambda path: -self.counts[path.name])[:_SHOWN]:
                conditions = path.told_apart(self.paths)
                lines.append(f"    {path.name} {self.counts[path.name]:,}: {conditions}")
            if len(self.paths) > _SHOWN:
                lines.append(f"    and {len(self.paths) - _SHOWN} more")
        return "\n".join(lines)


class SampleRows(Dataset[Any]):
    """Samples of a harvest as a torch data set (see `Harvest.dataset`)."""

    def __init__(self, harvest: Harvest, names: tuple[str, ...]) -> None:
        self._harvest = harvest
        self._names = names
        every = [*harvest.nodes, *(f"{_KEPT}{name}" for name in harvest.kept)]
        self._columns = {name: harvest[name] for name in names or every}
        if names:
            of_batches = [name for name, column in self._columns.items() if not column.per_sample]
            if of_batches:
                raise InputError(f"{of_batches[0]!r} has a row for each batch, not for each sample")
        self._columns = {n: c for n, c in self._columns.items() if c.per_sample}
        self._rows = {n: _rows_of_samples(c, len(harvest)) for n, c in self._columns.items()}
        has = torch.ones(len(harvest), dtype=torch.bool)
        for rows in self._rows.values() if names else ():
            has &= rows >= 0
        self.positions: Tensor = has.nonzero().flatten()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, and no sample {index}")
        position = int(self.positions[index])
        rows = {name: int(rows[position]) for name, rows in self._rows.items()}
        if self._names:
            return tuple(self._columns[name][rows[name]] for name in self._names)
        found = {name: self._columns[name][row] for name, row in rows.items() if row >= 0}
        return {"id": self._harvest.ids[position], **found}


def _rows_of_samples(column: Column, samples: int) -> Tensor:
    rows = torch.full((samples,), -1)
    rows[column.positions] = torch.arange(len(column))
    return rows


def _is_branch(text: str, file: str, line: int, branch: str | int) -> bool:
    if isinstance(branch, str):
        return branch in (f"{file}:{line}",) or " ".join(branch.split()) == text
    return line == branch


# The rows of one node for the samples of a harvest, read from disk as needed.

_SHOWN_IDS = 6


class BatchRows(NamedTuple):
    """The rows of one batch."""

    shard: Shard
    start: int  # the index of their first element in the shard
    shape: torch.Size  # the shape of all rows together
    first: int  # the number of rows of the column before them
    # The number of samples before the batch; for a row per batch, the number of batches.
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
        shown = ", ".join(map(repr, self.ids[:_SHOWN_IDS])) + ", ..." * (len(self.ids) > _SHOWN_IDS)
        many = len(self.batches)
        batches = f"{many} batch{'es' * (many != 1)}"
        return f"<{len(self.ids)} sample{'s' * (len(self.ids) != 1)} of {batches}: {shown}>"


@dataclass(eq=False, repr=False)
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

    name: str
    dtype: torch.dtype
    per_sample: bool
    _pieces: Sequence[BatchRows]
    _opened: Callable[[Shard], OpenShard]

    def __post_init__(self) -> None:
        self._firsts = [piece.first for piece in self._pieces]
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
            wanted = which.positions if self.per_sample else which.batches
            which = torch.isin(self.positions, wanted).nonzero().flatten()
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

    def _of(self, piece: BatchRows) -> Tensor:
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

        SampleRows of one batch have the same shape: int64 of shape (rows,), and (rows, ...).
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


# Harvested activations in the forms that trainers of sparse autoencoders read.


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
        required_int("batch_size", batch_size, 1)
        required_int("rows", rows, 1)
        required_int("epochs", epochs, 1, or_none=True)
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
                f"the rows of {self._column.name!r} are not vectors of floating point numbers, but "
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


# The formats of the files of tensors: safetensors, and groups of zarr (an extra).

_BLOCK = 1 << 16
_ZARR = "3.0.8"  # earlier ones can delete data
_CHUNK = 1 << 22  # bytes, about


def format_named(name: str) -> ShardForm:
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

    def open(self, path: str, about: dict[str, Any]) -> _ZarrGroup:
        """Open a folder to read it."""
        try:
            group = self._zarr.open_group(path, mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise LoadError(path, f"the group cannot be opened: {error}") from None
        return _ZarrGroup(path, group, about["crc32"])


@dataclass(eq=False)
class _ZarrGroup:
    """A group that is read array by array."""

    path: str
    group: Any
    checksums: dict[str, int]

    def elements(self, key: str, dtype: torch.dtype) -> Tensor:
        """Read an array, and return its elements as one dimension."""
        return torch.from_numpy(self.group[key][...].reshape(-1)).view(dtype)

    def verify(self) -> None:
        for key, checksum in self.checksums.items():
            try:
                found = zlib.crc32(self.group[key][...].tobytes())
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise LoadError(self.path, f"{key!r} cannot be read: {error}") from None
            if found != checksum:
                raise LoadError(self.path, f"the content of {key!r} has changed")


ShardForm = SafetensorsForm | ZarrForm
OpenShard = MappedFile | _ZarrGroup

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


def write_values_whole(path: str, kind: str, content: dict[str, Any]) -> None:
    """Write a file of plain values, completely or not at all."""
    draft = f"{path}.tmp"
    _delete(draft)
    replace_sealed(path, {"format": kind, "version": _VERSION, **content}, draft)


def read_plain(path: str, kind: str = HARVEST) -> dict[str, Any]:
    """Read a file that `write_values_whole` wrote."""
    return read_sealed(path, kind, _VERSION)


@dataclass(frozen=True)
class ShardColumn:
    """The rows of a shard under one key."""

    dtype: torch.dtype  # dtype of the elements
    per_sample: bool  # whether there is a row for each sample, or one for each batch
    batches: list[int] | None  # the batches of the shard that have rows; None for all
    # The shape of each row, if all are the same; else a list of the row shapes of each batch.
    rest: tuple[int, ...] | list[tuple[int, ...]]
    asked: str  # the text that the node was requested by, if it was text

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
    """The index of a shard."""

    file: str = ""  # path of the file of tensors
    rank: int = 0  # the process that wrote it
    # True if a harvest stopped while writing it, so that it is not full yet.
    is_partial: bool = False
    about: dict[str, Any] = field(default_factory=dict)  # the facts needed to read the file
    columns: dict[str, ShardColumn] = field(default_factory=dict)  # the rows, by key
    ids: list[str] | None = None  # the ids, if they are strings

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(self.sizes)

    def all_ids(self, form: ShardForm) -> list[Any]:
        """Return the ids of all samples."""
        if self.ids is not None:
            return self.ids
        return form.open(self.file, self.about).elements("index/id", torch.int64).tolist()


@dataclass(eq=False)
class ShardFiles:
    """The shards that the process of a rank writes to a directory, in one format."""

    directory: str
    rank: int
    form: ShardForm

    def write(self, filling: Filling, is_partial: bool = False) -> None:
        """Write a shard, completely or not at all."""
        name = _shard_name(self.rank, filling.number, is_partial)
        path = os.path.join(self.directory, f"{name}.{self.form.ending}")
        with writing(self.directory):
            draft = f"{path}.tmp"
            _delete(draft)
            about = self.form.write(draft, filling.tensors())
            _delete(path)  # of a run that ended before it wrote the index
            os.replace(draft, path)
            sync_directory(self.directory)
            row = {"file": os.path.basename(path), "about": about, **filling.row()}
            write_values_whole(os.path.join(self.directory, f"{name}.json"), SHARD, row)
            if not is_partial:
                self._delete_shard(_shard_name(self.rank, filling.number, True))

    def clean(self) -> None:
        """Delete the leftovers of a run that was interrupted."""
        names = set(os.listdir(self.directory))
        for name in sorted(names):
            found = _NAME.fullmatch(name)
            if found is None or int(found[1]) != self.rank:
                continue
            base = _shard_name(self.rank, int(found[2]), bool(found[3]))
            full = _shard_name(self.rank, int(found[2]), False)
            replaced = bool(found[3]) and f"{full}.json" in names
            if found[5] or f"{base}.json" not in names:
                _delete(os.path.join(self.directory, name))
            elif replaced:
                self._delete_shard(base)

    def _delete_shard(self, base: str) -> None:
        for ending in ("json", self.form.ending):  # the index first, so that none is without file
            _delete(os.path.join(self.directory, f"{base}.{ending}"))


def _shard_name(rank: int, number: int, is_partial: bool) -> str:
    return f"shard-{rank:04d}-{number:06d}{'.partial' * is_partial}"


def _delete(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def is_ours(name: str) -> bool:
    """Return whether a file in a directory is one that a harvest writes."""
    own = (SETTINGS, INDEX, f"{SETTINGS}.tmp", f"{INDEX}.tmp", LOCK)
    return name in own or _NAME.fullmatch(name) is not None


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
    row = read_plain(path, SHARD)
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
