"""A harvest on disk, readable as far as it is complete."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bendtrace._lazy import required_pandas
from bendtrace.errors import InputError, LoadError, NodePathError
from bendtrace.harvesting.column import Column, Piece, Taken
from bendtrace.harvesting.formats import Held, form_of
from bendtrace.harvesting.paths import Path
from bendtrace.harvesting.shards import INDEX, SETTINGS, Shard, read, shards_in

__all__ = ["Harvest"]

_KEPT = "kept/"
_SHOWN = 8


class _Batch(NamedTuple):
    """A batch of the harvest: its number, where it is, and where its samples begin."""

    number: int
    shard: Shard
    place: int
    size: int
    position: int


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
        self.directory: str = os.path.abspath(os.fspath(directory))
        if not os.path.isdir(self.directory):
            raise LoadError(self.directory, "there is no such directory")
        path = os.path.join(self.directory, SETTINGS)
        if not os.path.exists(path):
            raise LoadError(self.directory, f"it is not a harvest: there is no {SETTINGS}")
        about = read(path)
        self.settings: dict[str, Any] = about["settings"]
        self.is_complete: bool = os.path.exists(os.path.join(self.directory, INDEX))
        self.shards: tuple[Shard, ...] = tuple(shards_in(self.directory))
        self._form = form_of(self.settings["format"])
        self._held: dict[str, Held] = {}
        if self.is_complete:
            told = read(os.path.join(self.directory, INDEX))
            if told["shards"] != self.index()["shards"]:
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
        """Whether all batches have one sample, so that paths are those of samples."""
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
            found = self._columns.get(self._asked.get(name.removesuffix(":1"), name))
        if found is None:
            names = list(self._columns)
            near = get_close_matches(str(name), names, n=3) or names[:_SHOWN]
            listed = ", ".join(map(repr, near)) or "nothing"
            raise NodePathError(
                f"there is no {name!r} in this harvest: {listed}", str(name), tuple(near)
            )
        return found

    @cached_property
    def _asked(self) -> dict[str, str]:
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
        return name in self._columns or name in self._asked

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._columns)

    @cached_property
    def _columns(self) -> dict[str, Column]:
        columns: dict[str, list[Piece]] = {}
        facts: dict[str, tuple[torch.dtype, bool]] = {}
        there: dict[tuple[str, int], list[tuple[str, int, torch.Size]]] = {}
        for shard in self.shards:
            for key, kept in shard.columns.items():
                fact = kept.dtype, kept.per_sample
                if facts.setdefault(key, fact) != fact:
                    raise LoadError(
                        shard.file, f"{key!r} is {kept.dtype} here, but {facts[key][0]} elsewhere"
                    )
                for place, start, shape in kept.pieces(shard.sizes):
                    there.setdefault((shard.file, place), []).append((key, start, shape))
        for at, batch in enumerate(self._batches):
            for key, start, shape in there.get((batch.shard.file, batch.place), ()):
                own = columns.setdefault(key, [])
                first = own[-1].first + own[-1].rows if own else 0
                position = batch.position if facts[key][1] else at
                own.append(Piece(batch.shard, start, shape, first, position))
        return {key: Column(key, *facts[key], own, self._open) for key, own in columns.items()}

    def _open(self, shard: Shard) -> Held:
        held = self._held.get(shard.file)
        if held is None:
            held = self._held[shard.file] = self._form.open(shard.file, shard.about)
        return held

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
            name = batch.shard.taken[batch.place]
            found.setdefault(name, batch.shard.paths[name])
        return tuple(found.values())

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of samples that took each path, by the path's name."""
        found = {path.name: 0 for path in self.paths}
        for batch in self._batches:
            found[batch.shard.taken[batch.place]] += batch.size
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
        return self._taken({name})

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
            path.name: [c for c in path.conditions if _is_meant(c.text, c.file, c.line, branch)]
            for path in self.paths
        }
        if not any(found.values()):
            known = {c.text: None for path in self.paths for c in path.conditions}
            near = get_close_matches(str(branch), known, n=3) or list(known)[:_SHOWN]
            listed = ", ".join(map(repr, near)) or "none"
            raise InputError(f"no batch reached a branch {branch!r}; known branches: {listed}")
        outcomes = dict.fromkeys((type(c.outcome), c.outcome) for cs in found.values() for c in cs)
        if not any(kind is type(outcome) for kind, _ in outcomes):
            listed = ", ".join(repr(known) for _, known in list(outcomes)[:_SHOWN])
            raise InputError(
                f"the outcomes of {branch!r} are {listed}; none has the type of {outcome!r}"
            )
        wanted = {
            name
            for name, conditions in found.items()
            if any(type(c.outcome) is type(outcome) and c.outcome == outcome for c in conditions)
        }
        return self._taken(wanted)

    def _taken(self, names: set[str]) -> Taken:
        met = [
            (at, batch)
            for at, batch in enumerate(self._batches)
            if batch.shard.taken[batch.place] in names
        ]
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

    def dataset(self, *names: str) -> Rows:
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
        return Rows(self, names)

    def to_pandas(self) -> Any:
        """Return the index: a row for each sample.

        Columns: `id`, `path` (its name), `batch` (counted from 0), `batch_size`, `process` and
        `shard` (the number of the file), and for each node whether it has a value.
        """
        rows: dict[str, list[Any]] = {"id": self.ids, "path": [], "batch": [], "batch_size": []}
        rows |= {"process": [], "shard": []}
        for batch in self._batches:
            told = {
                "path": batch.shard.taken[batch.place], "batch": batch.number,
                "batch_size": batch.size, "process": batch.shard.rank,
                "shard": batch.shard.number,
            }  # fmt: skip
            for key, value in told.items():
                rows[key] += [value] * batch.size
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
                told = path.told_apart(self.paths)
                lines.append(f"    {path.name} {self.counts[path.name]:,}: {told}")
            if len(self.paths) > _SHOWN:
                lines.append(f"    and {len(self.paths) - _SHOWN} more")
        return "\n".join(lines)


class Rows(Dataset[Any]):
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
        self._rows = {n: _row_of(c, len(harvest)) for n, c in self._columns.items()}
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


def _row_of(column: Column, samples: int) -> Tensor:
    rows = torch.full((samples,), -1)
    rows[column.positions] = torch.arange(len(column))
    return rows


def _is_meant(text: str, file: str, line: int, branch: str | int) -> bool:
    if isinstance(branch, str):
        return branch in (f"{file}:{line}",) or " ".join(branch.split()) == text
    return line == branch
