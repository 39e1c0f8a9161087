"""The batches of a loader, and the samples in them."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from bendtrace.calls import Call
from bendtrace.errors import InputError
from bendtrace.storage.tensors import crc32

__all__ = ["Batch", "Ids", "batches_of", "ids_of", "mark_of", "part_of", "size_of", "versions_of"]

Ids = Sequence[int] | Sequence[str]


class Batch(NamedTuple):
    """One batch of the loader.

    Attributes:
        number: the number of batches of the loader before it.
        is_loaded: whether it was loaded, not skipped.
        content: the batch itself.
        indices: a checksum of the indices of its items; 0 if the loader does not expose them.
        size: the number of its items; None if the loader does not expose it.
    """

    number: int
    is_loaded: bool
    content: Any
    indices: int
    size: int | None


def batches_of(loader: Iterable[Any], wanted: Callable[[int], bool]) -> Iterator[Batch]:
    """Yield the batches of a loader.

    A `DataLoader` of items with indices skips loading batches that are not wanted. Other loaders
    load all batches.

    Args:
        loader: an iterable of batches.
        wanted: whether the batch with a number is wanted; called once for each, in order.
    """
    if not _is_picking(loader):
        for number, content in enumerate(loader):
            yield Batch(number, True, content, 0, None)
        return
    assert isinstance(loader, DataLoader)
    picked = _Picked(loader.batch_sampler, wanted)
    loaded = iter(_like(loader, picked))
    number = 0
    while True:
        content = next(loaded, picked)
        while picked.seen and not picked.seen[0][0]:
            _, indices, size = picked.seen.popleft()
            yield Batch(number, False, None, indices, size)
            number += 1
        if content is picked:
            return
        _, indices, size = picked.seen.popleft()
        yield Batch(number, True, content, indices, size)
        number += 1


def _is_picking(loader: Any) -> bool:
    # What others have made of DataLoader may do more than this class, and is only iterated.
    return (
        type(loader) is DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)
    )


def _like(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
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


class _Picked:
    """The batches of a sampler that are wanted; notes also the others."""

    def __init__(self, sampler: Any, wanted: Callable[[int], bool]) -> None:
        self.seen: deque[tuple[bool, int, int]] = deque()
        self._sampler = sampler
        self._wanted = wanted

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._sampler):
            wanted = self._wanted(number)
            told = indices if type(indices) is list else list(indices)
            self.seen.append((wanted, _checksum(told), len(told)))
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


def ids_of(batch: Any, said: Any, start: int, size: int | None) -> Ids:
    """Return the ids of the samples of a batch.

    Args:
        batch: the batch.
        said: None for consecutive numbers; a key of the batch, or a function of it.
        start: the first of the consecutive numbers.
        size: the number of samples.
    """
    if said is None:
        if size is None:
            raise InputError(
                "the number of samples of a batch is that of its first tensor, but this "
                f"{type(batch).__name__} has no tensor: pass ids=, a key of the batch or a "
                "function of it that returns one id for each sample"
            )
        return range(start, start + size)
    found = said(batch) if callable(said) else part_of(batch, said, "ids")
    if isinstance(found, Tensor):
        found = found.tolist()
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise InputError(
            f"ids= has to return one id for each sample, not {type(found).__name__} {found!r:.60}"
        )
    ids = [_plain(item) for item in found]
    if len({type(item) for item in ids}) > 1 or any(type(i) not in (int, str) for i in ids):
        raise InputError(f"ids have to be all ints or all strings, not {ids[:4]!r}")
    if any(type(i) is int and not -(2**63) <= i < 2**63 for i in ids):
        raise InputError("int ids have to fit in 64 bits; use strings instead")
    return ids


def _plain(item: Any) -> Any:
    return item.item() if hasattr(item, "item") and not isinstance(item, (int, str)) else item


def part_of(batch: Any, key: Any, option: str) -> Any:
    """Return the part of a batch that an option names."""
    if isinstance(batch, Call):
        batch = batch.kwargs if isinstance(key, str) else batch.args
    try:
        return batch[key]
    except (LookupError, TypeError):
        held = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise InputError(
            f"{option}= names {key!r}, which is not in the batch, a {type(batch).__name__}{held}"
        ) from None


def mark_of(batch: Any) -> int:
    """Return a checksum of all tensors of a batch, to recognise it."""
    found = 0
    for tensor in _tensors(batch):
        if tensor.layout is torch.strided and not tensor.is_quantized:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            told = f"{tuple(tensor.shape)} {crc32(plain.view(torch.uint8))}"
            found = zlib.crc32(told.encode(), found)
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
