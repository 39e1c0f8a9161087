"""The loop of a harvest: batch by batch, from where an earlier call stopped."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from bendtrace.calls import Call
from bendtrace.errors import BendtraceError, HarvestError, InputError, SaveError
from bendtrace.harvesting.batches import (
    Batch,
    Ids,
    batches_of,
    ids_of,
    mark_of,
    part_of,
    size_of,
    versions_of,
)
from bendtrace.harvesting.collecting import Collector
from bendtrace.harvesting.filling import Filling
from bendtrace.harvesting.settings import Settings, state_of, sum_of
from bendtrace.harvesting.shards import Shard, ShardFiles, shards_in
from bendtrace.harvesting.workers import Workers, Writer
from bendtrace.module import BendedModule
from bendtrace.preserved_state import PreservedState, no_model
from bendtrace.torch_rules.draws import RandomStates, seed_all

__all__ = ["HarvestRun", "refuse_repeats", "total_of"]

_SHOWN = 8
_ORDERS = (1 << 61) - 1


class HarvestRun:
    """The harvest of one process.

    Attributes:
        done: the number of samples harvested before.
    """

    def __init__(
        self,
        bended: BendedModule,
        loader: Iterable[Any],
        settings: Settings,
        call: Callable[[BendedModule, Any], Any] | None,
        files: ShardFiles,
        writer: Writer,
        collector: Collector,
        workers: Workers,
    ) -> None:
        self._bended = bended
        self._loader = loader
        self._settings = settings
        self._call = call
        self._files = files
        self._writer = writer
        self._collector = collector
        self._rank, self._world = workers.rank, workers.world
        self._before = shards_in(files.directory, files.rank)
        self.done: int = sum(shard.samples for shard in self._before)
        self._past = _Past(self._before, files)
        collector.filling.number = len(self._before) + 1
        for shard in self._before:
            collector.places |= shard.places
        if self._before and self._before[-1].is_partial:
            self._past.fill(collector.filling)
        self._order = self._order_done = 0  # up to the batch at hand, and the last that is done
        self._last: Any = None  # the content of the last batch that was harvested
        self._versions: tuple[int, ...] = ()  # of its tensors, before the model was called
        self._size_of_last = 0
        self._has_new = False  # whether there is more than before
        self._state = self._state_now()
        self._kind: type | None = self._past.kind

    def _refuse_unsteady(self) -> None:
        for shard in self._before:
            if shard.changed:
                raise InputError(
                    f"this harvest cannot be resumed: the model changes {shard.changed[0]!r} "
                    "while it runs, so the rest would differ from that of an uninterrupted "
                    "harvest. Put it in eval mode, and start again in another directory"
                )
            if shard.draws and self._settings.seed is None:
                raise InputError(
                    "this harvest cannot be resumed: the model draws random numbers, which "
                    "would differ from those of an uninterrupted harvest. Pass seed=, or put "
                    "it in eval mode, and start again in another directory"
                )

    # The loop

    def go(self, advance: Callable[[int], None]) -> None:
        """Harvest the rest; call `advance` with the number of samples of each batch."""
        self._refuse_unsteady()
        try:
            for number, batch, start in self._own():
                advance(self._harvested(number, batch, start))
                if self._is_full():
                    self._close_shard()
            if self._collector.filling.batches:
                self._close_shard()
            elif not (self._has_new or self._before) and self._world == 1:
                raise InputError("the loader yielded no batch: there is nothing to harvest")
            self._writer.wait()
        except (Exception, KeyboardInterrupt) as error:
            self._rescue(error)
            raise
        if not self._before:
            self._collector.warn_of_unmet()

    def compare(self) -> None:
        """Compare the loader with a harvest that is complete."""
        for number, _, _ in self._own():
            raise InputError(
                f"the loader yields a batch {number}, but there were only {len(self._past)} "
                "when this was harvested: it is not the same data set. Choose another "
                "directory"
            )

    def _own(self) -> Iterator[tuple[int, Batch, int]]:
        """Yield this process's batches that are not done: number, batch, first running number."""
        dealt = self._world > 1 and not self._settings.is_dealt
        past = self._past
        numbers = self._settings.ids is None
        start = 0

        def place(number: int) -> int | None:
            """Return how many of this process's own batches come before; None for others'."""
            if not dealt:
                return number
            return number // self._world if number % self._world == self._rank else None

        def is_wanted(number: int) -> bool:
            own = place(number)
            return own is not None and own >= len(past) - 1

        seen = 0
        for batch in batches_of(self._loader, is_wanted):
            own = place(batch.number)
            size = batch.size
            if own is None:
                if numbers:
                    if size is None:
                        size = len(ids_of(batch.content, None, 0, self._size(batch.content)))
                    start += size
                continue
            seen += 1
            self._order = (self._order * 31 + batch.indices) % _ORDERS
            number = batch.number
            if not dealt:
                number = number * self._world + self._rank
            if own < len(past):
                start += past.check(own, number, batch, self._order, self._ids_again, start)
                if own == len(past) - 1:
                    self._last, self._versions = batch.content, versions_of(batch.content)
                continue
            yield number, batch, start
            start += self._size_of_last
        if seen < len(past):
            raise InputError(
                f"the loader yielded {seen} batches, but {len(past)} were harvested before: it "
                "is not the same data set"
            )

    def _size(self, content: Any) -> int | None:
        axis = self._settings.batch_axis
        return size_of(content, axis if type(axis) is int else 0)

    def _ids_again(self, content: Any, start: int) -> Ids:
        return ids_of(content, self._settings.ids, start, self._size(content))

    def _harvested(self, number: int, batch: Batch, start: int) -> int:
        """Harvest a batch; return how many samples it has."""
        collector, content = self._collector, batch.content
        versions = versions_of(content)
        ids: Ids = ()
        try:
            ids = self._ids_again(content, start)
            self._examine(ids, batch)
            collector.begin(content, len(ids))
            for name, what in self._settings.keep.items():
                self._keep(name, what, content, len(ids))
            self._run(number, content)
            path = collector.end()
        except Exception as error:
            shown = ", ".join(map(repr, ids[:_SHOWN])) + ", ..." * (len(ids) > _SHOWN)
            where = f"batch {number}, samples {shown}" if ids else f"batch {number}"
            if isinstance(error, BendtraceError):
                error.add_note(f"while harvesting {where}")
                raise
            raise HarvestError(
                f"harvesting {where} failed: {type(error).__name__}: {error}. The batches "
                "before it are kept, and the same call resumes there",
                number,
                tuple(ids),
            ) from error
        collector.filling.end_batch(number, ids, path)
        self._last, self._versions = content, versions
        self._size_of_last, self._has_new = len(ids), True
        self._order_done = self._order
        return len(ids)

    def _examine(self, ids: Ids, batch: Batch) -> None:
        if self._settings.ids is None:
            if self._world > 1 and batch.size not in (None, len(ids)):
                raise InputError(
                    f"a batch of {batch.size} items has {len(ids)} samples, so samples cannot "
                    "be numbered across processes: pass ids="
                )
        elif len(ids):
            kind = type(ids[0])
            if self._kind not in (None, kind):
                raise InputError(
                    f"ids have to be of one type; {ids[0]!r} differs from those before"
                )
            self._kind = kind

    def _keep(self, name: str, what: Any, content: Any, size: int) -> None:
        value = what(content) if callable(what) else part_of(content, what, "keep")
        if not isinstance(value, Tensor):
            try:
                value = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(
                    f"keep= stores tensors, but {name!r} is a {type(value).__name__}: pass a "
                    "function of the batch that returns a tensor"
                ) from None
        if not value.dim() or value.shape[0] != size:
            raise InputError(
                f"keep= stores a row for each of the {size} samples of a batch, but {name!r} "
                f"has shape {tuple(value.shape)}"
            )
        self._collector.filling.add(f"kept/{name}", "", value.detach(), True, value.dtype)

    def _run(self, number: int, content: Any) -> None:
        filling, seed = self._collector.filling, self._settings.seed
        if seed is not None:
            with PreservedState(no_model):
                digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
                seed_all(int.from_bytes(digest[:8], "little") >> 1)
                self._called(content)
        elif filling.draws:
            self._called(content)
        else:
            before = RandomStates()
            self._called(content)
            filling.draws = before.differ()

    def _called(self, content: Any) -> None:
        if self._call is None:
            Call.of(content).to(self._bended)
        else:
            self._call(self._bended, content)

    # Shards

    def _is_full(self) -> bool:
        filling, settings = self._collector.filling, self._settings
        return filling.samples >= settings.shard_samples or filling.nbytes >= settings.shard_bytes

    def _finish(self) -> Filling:
        filling = self._collector.filling
        filling.order = self._order_done
        filling.places = dict(sorted(self._collector.places.items()))
        # The model, or a loader that uses its memory again, may have written into the batch.
        is_as_given = versions_of(self._last) == self._versions
        filling.mark = mark_of(self._last) if is_as_given else 0
        now = self._state_now()
        filling.changed = [name for name, value in now.items() if self._state.get(name) != value]
        return filling

    def _close_shard(self) -> None:
        self._collector.filling = self._writer.exchange(self._finish())

    def _rescue(self, error: BaseException) -> None:
        """Write the part of a shard, so that only the batch that failed is lost."""
        self._collector.drop()
        if isinstance(error, SaveError):
            return
        try:
            self._writer.wait()
            if self._collector.filling.batches and self._has_new:
                self._files.write(self._finish(), is_partial=True)
        except SaveError as other:
            error.add_note(f"the samples since the last shard could not be saved: {other}")

    def _state_now(self) -> dict[str, int]:
        """Return marks of the parameters and buffers, which change with them."""
        model = self._bended.model
        buffers = {id(b) for b in model.buffers()} if isinstance(model, torch.nn.Module) else set()
        # A batch norm writes its statistics without counting a version (torch 2.13).
        return {
            name: sum_of(tensor) if id(tensor) in buffers else tensor._version
            for name, tensor in state_of(model)
            if not tensor.is_inference()
        }


class _Past:
    """The batches that were harvested before, to compare the batches of the loader with."""

    def __init__(self, shards: list[Shard], files: ShardFiles) -> None:
        self._shards = shards
        self._files = files
        self._at = [(shard, place) for shard in shards for place in range(len(shard.batches))]
        self._opened: tuple[Shard, list[Any]] | None = None
        listed = [shard for shard in shards if shard.samples]
        self.kind: type | None = None
        if listed:
            self.kind = int if listed[0].ids is None else str

    def __len__(self) -> int:
        return len(self._at)

    def check(
        self,
        own: int,
        number: int,
        batch: Batch,
        order: int,
        again: Callable[[Any, int], Ids],
        start: int,
    ) -> int:
        """Compare a batch with the one that was harvested in its place; return its size."""
        shard, place = self._at[own]
        size = shard.sizes[place]
        is_last = place == len(shard.batches) - 1
        same = shard.batches[place] == number
        if is_last and order != shard.order:
            same = False
        if same and batch.is_loaded:
            ids = self._ids(shard)
            begin = sum(shard.sizes[:place])
            same = list(again(batch.content, start)) == ids[begin : begin + size]
            if same and is_last:
                same = shard.mark in (0, mark_of(batch.content))
        if not same:
            raise InputError(
                f"batch {number} of the loader differs from the one that was harvested before: "
                "the data set or its order has changed. Shuffle with a generator that has a "
                "fixed seed, or not at all"
            )
        return size

    def _ids(self, shard: Shard) -> list[Any]:
        if self._opened is None or self._opened[0] is not shard:
            ids = shard.all_ids(self._files.form)
            self._opened = shard, ids
        return self._opened[1]

    def fill(self, filling: Filling) -> None:
        """Put the rows of the last shard, which is not full, into one that is being filled."""
        shard = self._shards[-1]
        filling.number = shard.number
        held = self._files.form.open(shard.file, shard.about)
        held.verify()
        ids = iter(self._ids(shard))
        there: dict[int, list[tuple[str, Tensor]]] = {}
        for key, kept in shard.columns.items():
            elements = held.elements(key, kept.dtype)
            for place, start, shape in kept.pieces(shard.sizes):
                rows = elements[start : start + shape.numel()].view(shape)
                there.setdefault(place, []).append((key, rows))
        for place, size in enumerate(shard.sizes):
            for key, rows in there.get(place, ()):
                kept = shard.columns[key]
                filling.add(key, kept.asked, rows, kept.per_sample, kept.dtype)
            path = shard.paths[shard.taken[place]]
            filling.end_batch(shard.batches[place], list(itertools.islice(ids, size)), path)
        filling.draws = shard.draws


def refuse_repeats(loader: Any, workers: Workers, settings: Settings) -> None:
    """Raise for loaders that yield samples in several processes, or several times."""
    if settings.is_dealt and workers.world > 1 and settings.ids is None:
        raise InputError("sharded=True needs ids= to identify the samples of the processes")
    if not isinstance(loader, DataLoader):
        return
    for owner in (loader, loader.batch_sampler):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            if not settings.is_dealt:
                raise InputError(
                    "the loader has a DistributedSampler, so each process gets a different "
                    "part: pass sharded=True and ids=. Or pass a loader of the whole data "
                    "set, whose batches are distributed"
                )
            items: Any = sampler.dataset
            if sampler.total_size > len(items):
                raise InputError(
                    f"a DistributedSampler of {len(items)} items for {sampler.num_replicas} "
                    f"processes yields {sampler.total_size - len(items)} of them twice: pass a "
                    "loader of the whole data set, whose batches are distributed"
                )


def total_of(loader: Any, workers: Workers, settings: Settings) -> int | None:
    """Return the approximate number of samples that this process will harvest; None if unknown."""
    sampler = getattr(loader, "sampler", None)
    try:
        total = len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return total if settings.is_dealt else -(-total // workers.world)
