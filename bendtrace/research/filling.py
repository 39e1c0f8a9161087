"""The current shard: buffers for the values of nodes, and the index of its samples."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from bendtrace.debug.calls import Call
from bendtrace.errors import InputError
from bendtrace.flow import (
    EscapeFlowStep,
    FlowStep,
    IndexFlowStep,
    LogicalFlowStep,
    LoopFlowStep,
    steps_of,
)
from bendtrace.log.saved_tensors import crc32
from bendtrace.python.sites import file_text
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import OpKind, TensorMeta
from bendtrace.watch.functions import is_inserted


class ColumnBuffer:
    """The rows of one node, for several batches, in a buffer that is reused."""

    def __init__(self, asked: str, dtype: torch.dtype, per_sample: bool, room: int) -> None:
        self.asked = asked
        self.dtype = dtype
        self.per_sample = per_sample
        self.shapes: list[torch.Size] = []  # the shape of the rows of each batch that has rows
        self.batches: list[int] = []  # the numbers of these batches in the shard
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
        """Copy the rows of a batch that may be dropped; return the copy."""
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
        """True if there are rows that are not kept yet."""
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
    """The part of a shard's index that is the same in memory and on disk."""

    number: int = 1  # number of the shard, counted from 1
    # The numbers of its batches, among all batches of the loader.
    batches: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # the number of samples of each
    taken: list[str] = field(default_factory=list)  # the name of the path of each batch
    paths: dict[str, Path] = field(default_factory=dict)  # the paths by name
    places: dict[str, str] = field(default_factory=dict)  # the source locations of nodes, by path
    order: int = 0  # a checksum of the order of the data set up to the last batch
    mark: int = 0  # a checksum of the last batch; 0 if it was written to
    # The parts of the model that changed while it ran.
    changed: list[str] = field(default_factory=list)
    draws: bool = False  # whether the model drew random numbers


class Filling(Record):
    """A shard that is being filled: with `rows` samples, or `room` bytes, it is complete."""

    samples: int  # the number of samples
    nbytes: int  # the size of all rows

    def __init__(self, rows: int, room: int) -> None:
        self.columns: dict[str, ColumnBuffer] = {}  # the rows, by key
        self.rows = rows
        self.room = room
        self._begin(1)

    def _begin(self, number: int) -> None:
        super().__init__(number)
        self.ids: list[Ids] = []  # the ids of each batch's samples
        self.samples = self.nbytes = 0

    def add(
        self, key: str, asked: str, value: Tensor, per_sample: bool, dtype: torch.dtype
    ) -> None:
        """Copy rows of the current batch."""
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = ColumnBuffer(asked, dtype, per_sample, self.room)
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

    def _used(self) -> list[tuple[str, ColumnBuffer]]:
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
                self.columns[key] = ColumnBuffer(
                    column.asked, column.dtype, column.per_sample, self.room
                )
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
                found[f"{key}#shapes"], found[f"{key}#offsets"] = _row_shapes(rest)
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


def require_place(key: str, earlier: str, place: str) -> None:
    """Raise if two nodes at different source locations have the same name."""
    if earlier != place:
        raise InputError(
            f"{key!r} was the node at {earlier.partition(' < ')[0] or '?'} in an earlier harvest "
            f"or in another process, and is the one at {place.partition(' < ')[0] or '?'} "
            "here: of several nodes, the one that a process runs first gets the plain name. "
            "Pass a BendedModule that was first called with the same inputs, so that all "
            "nodes have names"
        )


def _is_smaller(dtype: torch.dtype, given: torch.dtype) -> bool:
    both = dtype.is_floating_point and given.is_floating_point
    return both and torch.finfo(dtype).max < torch.finfo(given).max


def _row_shapes(rest: list[torch.Size]) -> tuple[Tensor, Tensor]:
    """Return the shapes of rows as a table, and where each row begins among all elements.

    They are int64 of shape (rows, most dimensions), filled up with -1, and (rows + 1,).
    """
    most = max(map(len, rest), default=0)
    table = torch.tensor([[*s, *[-1] * (most - len(s))] for s in rest], dtype=torch.int64)
    sizes = torch.tensor([0, *map(math.prod, rest)], dtype=torch.int64)
    return table.reshape(len(rest), most), sizes.cumsum(0)


# The batches of a loader, and the samples in them.

Ids = Sequence[int] | Sequence[str]


class LoaderBatch(NamedTuple):
    """One batch of the loader."""

    number: int  # the number of batches of the loader before it
    is_loaded: bool  # whether it was loaded, not skipped
    content: Any  # the batch itself
    indices: int  # a checksum of the indices of its items; 0 if the loader does not expose them
    size: int | None  # the number of its items; None if the loader does not expose it


def batches_of(loader: Iterable[Any], wanted: Callable[[int], bool]) -> Iterator[LoaderBatch]:
    """Yield the batches of a loader.

    A `DataLoader` of items with indices skips loading batches that are not wanted. Other loaders
    load all batches.
    """
    if not _is_picking(loader):
        for number, content in enumerate(loader):
            yield LoaderBatch(number, True, content, 0, None)
        return
    assert isinstance(loader, DataLoader)
    picked = _Picked(loader.batch_sampler, wanted)
    loaded = iter(_loader_like(loader, picked))
    number = 0
    while True:
        content = next(loaded, picked)
        while picked.seen and not picked.seen[0][0]:
            _, indices, size = picked.seen.popleft()
            yield LoaderBatch(number, False, None, indices, size)
            number += 1
        if content is picked:
            return
        _, indices, size = picked.seen.popleft()
        yield LoaderBatch(number, True, content, indices, size)
        number += 1


def _is_picking(loader: Any) -> bool:
    # What others have made of DataLoader may do more than this class, and is only iterated.
    return (
        type(loader) is DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)
    )


def _loader_like(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    more: dict[str, Any] = {}
    dataset, collate = loader.dataset, loader.collate_fn
    if type(dataset) is TensorDataset and collate is default_collate and not loader.num_workers:
        if all(type(t) is Tensor and t.layout is torch.strided for t in dataset.tensors):
            dataset, collate = _AtOnce(dataset.tensors), _as_it_is
    if loader.num_workers:
        more = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=loader.num_workers,
        collate_fn=collate, pin_memory=loader.pin_memory, timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn, generator=loader.generator, **more,
    )  # fmt: skip


class _AtOnce(Dataset[Any]):
    """A `TensorDataset` that gives the same batches without taking them together item by item."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def __getitems__(self, indices: list[Any]) -> list[Tensor]:
        rows = torch.tensor(indices)
        if rows.dtype is not torch.int64 or (len(rows) and int(rows.min()) < 0):
            items = [tuple(tensor[index] for tensor in self._tensors) for index in indices]
            return [torch.stack(parts) for parts in zip(*items, strict=True)]
        return [tensor.index_select(0, rows).contiguous() for tensor in self._tensors]


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass(eq=False)
class _Picked:
    """The batches of a sampler that are wanted; notes also the others."""

    sampler: Any
    wanted: Callable[[int], bool]

    def __post_init__(self) -> None:
        self.seen: deque[tuple[bool, int, int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self.sampler):
            wanted = self.wanted(number)
            numbers = indices if type(indices) is list else list(indices)
            self.seen.append((wanted, _checksum(numbers), len(numbers)))
            if wanted:
                yield indices


def _checksum(indices: list[Any]) -> int:
    try:
        return zlib.crc32(array("q", indices).tobytes())
    except (TypeError, OverflowError):  # a data set can have keys of any kind
        return zlib.crc32(repr(indices).encode())


def size_of(batch: Any, axis: int = 0) -> int | None:
    """Return the number of samples of a batch, by an axis of its first tensor; None without one."""
    for tensor in _tensors(batch):
        if -tensor.dim() <= axis < tensor.dim():
            return int(tensor.shape[axis])
    return None


def ids_of(batch: Any, source: Any, start: int, size: int | None) -> Ids:
    """Return the ids of the samples of a batch.

    They are consecutive numbers from `start`, or a key or a function of the batch gives them.
    """
    if source is None:
        if size is None:
            raise InputError(
                "the number of samples of a batch is read from its first tensor, but this "
                f"{type(batch).__name__} has no tensor: pass ids=, a key of the batch or a "
                "function of it that returns one id for each sample"
            )
        return range(start, start + size)
    found = source(batch) if callable(source) else part_of(batch, source, "ids")
    if isinstance(found, Tensor):
        found = found.tolist()
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise InputError(
            f"ids= has to return one id for each sample, not {type(found).__name__} {found!r:.60}"
        )
    ids = [_python_number(item) for item in found]
    if len({type(item) for item in ids}) > 1 or any(type(i) not in (int, str) for i in ids):
        raise InputError(f"ids have to be all ints or all strings, not {ids[:4]!r}")
    if any(type(i) is int and not -(2**63) <= i < 2**63 for i in ids):
        raise InputError("int ids have to fit in 64 bits; use strings instead")
    return ids


def _python_number(item: Any) -> Any:
    return item.item() if hasattr(item, "item") and not isinstance(item, (int, str)) else item


def part_of(batch: Any, key: Any, option: str) -> Any:
    """Return the part of a batch that an option names."""
    if isinstance(batch, Call):
        batch = batch.kwargs if isinstance(key, str) else batch.args
    try:
        return batch[key]
    except (LookupError, TypeError):
        keys = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise InputError(
            f"{option}= names {key!r}, which is not in the batch, a {type(batch).__name__}{keys}"
        ) from None


def mark_of(batch: Any) -> int:
    """Return a checksum of all tensors of a batch, to recognise it."""
    found = 0
    for tensor in _tensors(batch):
        if tensor.layout is torch.strided and not tensor.is_quantized:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            text = f"{tuple(tensor.shape)} {crc32(plain.view(torch.uint8))}"
            found = zlib.crc32(text.encode(), found)
    return found


def versions_of(batch: Any) -> tuple[int, ...]:
    """Return how often the tensors of a batch were written to."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in _tensors(batch))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Call):
        yield from _tensors((value.args, value.kwargs))
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_tensors, value))


# The path of a call in words: conditions as source text, and their outcomes.

_MOST_KNOWN = 256  # recordings whose path is remembered; runs that are live have one each
_SHOWN = 8
_TEXTS = frozenset({"format", "repr", "str"})


@dataclass(frozen=True)
class Condition:
    """A place where values decided what the model's Python did next, and the outcome.

    Attributes:
        kind: the construct: "if", "while", "for", "index", ...
        text: source of the deciding expression.
        outcome: True or False for a branch; the number of iterations for a loop as a whole; the
            number for an index, or for a value that became a plain int.
        file: name of the source file, without directories.
        line: line in it, counted from 1.
        module: qualified name of the module whose forward was running.
        iteration: the iteration of each loop around it, counted from 0, outermost first.
        is_loop: whether it is a loop as a whole.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def halved(x):
        ...     return x / 2 if x.norm() > 1 else x
        >>> data = [torch.tensor([4.0]), torch.tensor([0.5])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(halved, data, where=(), out=directory, progress=False)
        ...     [(c.text, c.outcome) for path in found.paths for c in path.conditions]
        [('x.norm() > 1', True), ('x.norm() > 1', False)]
    """

    kind: str
    text: str
    outcome: bool | int
    file: str
    line: int
    module: str = ""
    iteration: tuple[int, ...] = ()
    is_loop: bool = False

    def row(self) -> list[Any]:
        """Return it as plain values, ready for JSON."""
        return list(vars(self).values())

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Condition:
        """Return the condition of a `row`."""
        kind, text, outcome, file, line, module, iteration, is_loop = row
        return cls(kind, text, outcome, file, line, module, tuple(iteration), is_loop)

    def __str__(self) -> str:
        if self.is_loop:
            many = "iteration" if self.outcome == 1 else "iterations"
            return f"{self.kind} {self.text}: {self.outcome} {many}"
        at = f" [{', '.join(str(number + 1) for number in self.iteration)}]" * bool(self.iteration)
        return f"{self.text}{at}: {self.outcome}"


@dataclass(frozen=True)
class Path:
    """A path through the model.

    Two batches are on the same path if all conditions have the same outcomes, and the same
    operations ran in the same order.

    Attributes:
        name: 12 hexadecimal digits, the same in each process and harvest of the same source.
        conditions: the conditions on the path, in order.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def halved(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> data = [torch.tensor([4.0]), torch.tensor([0.5])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(halved, data, where=(), out=directory, progress=False)
        ...     [(str(path), found.counts[path.name]) for path in found.paths]
        [('while x.norm() > 1: 2 iterations', 1), ('while x.norm() > 1: 0 iterations', 1)]
    """

    name: str
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return _condition_text(self.conditions)

    def told_apart(self, others: Iterable[Path]) -> str:
        """Return the conditions whose outcomes differ among some other paths.

        Args:
            others: the other paths; they may include this one.
        """
        conditions = [set(path.conditions) for path in others]
        if not conditions:
            return str(self)
        own = [c for c in self.conditions if not all(c in other for other in conditions)]
        return _condition_text(own)


def _condition_text(conditions: Sequence[Condition]) -> str:
    if not conditions:
        return "no condition"
    # The number of iterations stands for the tests of a loop.
    loops = {(c.file, c.line, c.text) for c in conditions if c.is_loop}
    rest = [c for c in conditions if c.is_loop or (c.file, c.line, c.text) not in loops]
    shown = "; ".join(map(str, rest[:_SHOWN]))
    more = len(rest) - _SHOWN
    return shown if more <= 0 else f"{shown}; and {more} more"


class PathNames:
    """Finds the paths of runs, and caches the latest: by the runs themselves, which it holds."""

    def __init__(self) -> None:
        self._path = lru_cache(_MOST_KNOWN)(_path_of)
        self._joined = lru_cache(_MOST_KNOWN)(self._join)

    def of(self, runs: Sequence[Recording]) -> Path:
        """Return the path of the consecutive runs of one batch."""
        return self._path(runs[0]) if len(runs) == 1 else self._joined(*runs)

    def _join(self, *runs: Recording) -> Path:
        paths = [self._path(run) for run in runs]
        conditions = tuple(c for path in paths for c in path.conditions)
        return Path(_digest([[path.name for path in paths]]), conditions)


def _path_of(run: Recording) -> Path:
    conditions = tuple(c for step in steps_of(run) if (c := _condition_of_step(step)) is not None)
    # Branches on other objects (an argument that is None) show in the ops that ran.
    carried_out = [
        [op.scope.path, getattr(op.target, "__name__", str(op.target))]
        for op in run.tape.ops
        if op.kind is OpKind.CALL and isinstance(op.meta, TensorMeta) and not is_inserted(op)
    ]
    return Path(_digest([[c.row() for c in conditions], carried_out]), conditions)


def _condition_of_step(step: FlowStep) -> Condition | None:
    outcome: Any = step.value
    is_loop = isinstance(step, LoopFlowStep)
    if isinstance(step, LoopFlowStep):
        outcome = step.iterations
    elif isinstance(step, LogicalFlowStep):
        outcome = outcome if type(outcome) in (bool, int) else bool(outcome)
    elif not isinstance(step, (IndexFlowStep, EscapeFlowStep)) or step.kind in _TEXTS:
        return None
    if type(outcome) not in (bool, int):
        return None
    return Condition(
        step.kind, " ".join(step.text.split()), outcome, file_text(step.file), step.line,
        step.module_path, step.iteration, is_loop,
    )  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
