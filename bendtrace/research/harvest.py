"""Stream activations of a data set to files."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import TqdmWarning

from bendtrace.debug.calls import Call
from bendtrace.errors import BendtraceError, HarvestError, InputError, SaveError
from bendtrace.insert.interjection import PassNumbers
from bendtrace.insert.resolver import flat
from bendtrace.insert.where import Where
from bendtrace.log.saved_tensors import LOCK, DirectoryLock, sync_directory, writing
from bendtrace.module import BendedModule, bended_of
from bendtrace.python.checks import required_path, several, shown
from bendtrace.research.collecting import (
    Collector,
    HarvestSettings,
    describe_insertion,
    description_of,
    fingerprint,
    state_of,
    sum_of,
)
from bendtrace.research.filling import (
    Filling,
    Ids,
    LoaderBatch,
    batches_of,
    ids_of,
    mark_of,
    part_of,
    require_place,
    size_of,
    versions_of,
)
from bendtrace.research.reading import (
    HARVEST,
    INDEX,
    SETTINGS,
    Harvest,
    Shard,
    ShardFiles,
    format_named,
    is_ours,
    read_plain,
    shards_in,
    write_values_whole,
)
from bendtrace.watch.draws import RandomStates, seed_all


def harvest(
    model: nn.Module | BendedModule | Callable[..., Any],
    loader: Iterable[Any],
    *,
    where: Where,
    out: str | os.PathLike[str],
    reduce: Any = None,
    feature_axis: int | None = None,
    passes: PassNumbers = None,
    batch_axis: Any = 0,
    dtype: torch.dtype | None = None,
    call: Callable[[BendedModule, Any], Any] | None = None,
    ids: Any = None,
    keep: Any = None,
    allow_none: bool = False,
    seed: int | None = None,
    shard_samples: int = 4096,
    shard_bytes: int = 1 << 27,
    format: str = "safetensors",
    sharded: bool = False,
    check_weights: bool = True,
    resume: bool = True,
    progress: bool = True,
) -> Harvest:
    r"""Stream the outputs of nodes for all batches of a data set to files.

    The same call resumes an interrupted harvest; the files are then bit for bit those of an
    uninterrupted one. Runs under `torch.no_grad()`, in the current mode of the model.

    Args:
        model: a module or function, or a `BendedModule`, whose insertions stay active.
        loader: an iterable of batches. A batch is the inputs of a call: a tensor, a tuple or list
            of positional arguments, a mapping of keyword arguments, or a `Call`; see `call` for
            others.
        where: the nodes: anything that `BendedModule.interject` accepts, or a list. The empty `()`
            stores only the path of each batch.
        out: the directory, which has to be empty, or contain the beginning of this very harvest.
        reduce: how to reduce values: `"mean"`, `"max"` or `"last"` over all axes other than those
            of samples and features; a function of the value, or of the value and the batch; or a
            dict of these, by the items of `where`.
        feature_axis: the axis that `"mean"`, `"max"` and `"last"` keep: -1, or 1 if channels come
            first. None for the last one, of values with at most three dimensions.
        passes: the passes of a node that runs several times per batch: numbers from 0, or from the
            end if negative, or a function of the number; a single number keeps the name of the
            node. None for all, which are named `relu`, `relu:2`, `relu:3`. `"stack"` puts them
            along a new axis after the axis of the samples.
        batch_axis: the axis of a value that counts the samples; None for values without such an
            axis, which are stored once for each batch; or a dict of these, by the items of `where`.
        dtype: the dtype to store floating point numbers as; None keeps theirs.
        call: a function that calls the model: `call(bended, batch)`.
        ids: the ids of samples: a key of the batch, or a function of the batch that returns as many
            ints or strings; None for consecutive numbers from 0.
        keep: further parts of the batch to store: its keys, or a dict of names and keys or
            functions of the batch.
        allow_none: whether to accept that no batch reaches some of `where`.
        seed: each batch starts with random numbers that depend on the seed and the batch's number;
            torch's generators are restored afterwards. None leaves the generators alone.
        shard_samples: the number of samples that completes a shard, at the end of a batch.
        shard_bytes: the number of bytes that completes a shard. The harvest holds memory for about
            two such shards.
        format: `"safetensors"`, or `"zarr"`, which needs the extra `zarr`.
        sharded: with several processes, whether the loader of each has a separate part of the data,
            with samples identified by `ids=`. If not, all loaders have the same batches, and the
            processes take turns.
        check_weights: whether to compare the weights with those of the resumed harvest. The
            structure of the model and its training modes are always compared.
        resume: whether to resume an existing harvest. If not, an existing harvest is an error.
        progress: whether to show a progress bar.

    Returns:
        The `Harvest`, which reads the files.

    Raises:
        InputError: an argument is invalid, or belongs to another harvest than the existing one;
            nothing has changed.
        SaveError: `out` is not a harvest, or cannot be written to.
        NodePathError: an item of `where` matches no node.
        HarvestError: a batch failed; it names the samples. The batches before it are kept.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def halved(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return torch.relu(x)
        >>> data = [torch.tensor([[4.0, -3.0]]), torch.tensor([[0.5, 0.0]])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(halved, data, where="relu", out=directory, progress=False)
        ...     found["relu"].tensor()
        ...     found.took("x.norm() > 1", True).ids
        tensor([[0.5000, 0.0000],
                [0.5000, 0.0000]])
        [0]
    """
    if isinstance(where, list) and not where:
        raise InputError("where= is an empty list: pass the nodes to store, or () for paths alone")
    settings = HarvestSettings(
        tuple(flat(where)), reduce, feature_axis, passes, batch_axis, dtype, ids, _name_keys(keep),
        allow_none, seed, shard_samples, shard_bytes, format, bool(sharded),
    )  # fmt: skip
    form = format_named(format)
    if call is not None and not callable(call):
        raise InputError(
            f"call= is called with the model and a batch, but {call!r} is not callable"
        )
    if isinstance(loader, (Tensor, Mapping)):
        raise InputError(f"a loader yields batches, and {shown(loader)} is one batch: pass [batch]")
    if not isinstance(loader, Iterable):
        raise InputError(f"a loader has to be iterable, and {loader!r} is not")
    bended = bended_of(model)
    workers = Workers()
    directory = os.path.abspath(required_path("out=", out))
    refuse_repeats(loader, workers, settings)
    inserted = [describe_insertion(i) for i in bended.insertions if not i.what.observes]
    with torch.inference_mode(False), torch.no_grad():
        about = {
            "settings": {
                **settings.to_dict(),
                "call": description_of(call, whole=False),
                "inserted": inserted,
            },
            "processes": workers.world,
            "model": fingerprint(bended.model),
        }
        checked = workers.together(lambda: _check_places(bended, settings, about))
        if len(set(checked)) > 1:
            raise InputError(
                "the processes received different settings, or models with different weights"
            )
        place = _HarvestDirectory(directory, about, check_weights, resume)
        with place.opened(workers) as is_complete:
            files = ShardFiles(directory, workers.rank, form)

            def gather() -> None:
                spare = Filling(settings.shard_samples, settings.shard_bytes)
                collector = Collector(bended, settings, several=call is not None)
                if not is_complete:
                    files.clean()
                with collector, ShardThread(files, spare) as writer:
                    run = HarvestRun(
                        bended, loader, settings, call, files, writer, collector, workers
                    )
                    if is_complete:  # compare the loader, as far as that needs no run
                        with torch.random.fork_rng():
                            run.compare()
                        return
                    shown = progress and workers.rank == 0
                    total = total_of(loader, workers, settings)
                    with progress_bar(shown, total, run.done) as advance:
                        run.go(advance)

            workers.together(gather)
            if not is_complete:
                workers.first(place.complete)
    return Harvest.open(directory)


def _check_places(bended: BendedModule, settings: HarvestSettings, about: dict[str, Any]) -> str:
    """Check `where` before anything is touched; return a description of the harvest."""
    Collector(bended, settings)
    return json.dumps(about, sort_keys=True)


def _name_keys(keep: Any) -> Mapping[str, Any]:
    if keep is None:
        return {}
    if isinstance(keep, Mapping):
        return dict(keep)
    keys = several(keep)
    wrong = [key for key in keys if type(key) not in (str, int)]
    if wrong:
        raise InputError(
            "keep= takes keys of the batch, or a dict of names and keys or functions of it, "
            f"not {wrong[0]!r}"
        )
    return {str(key): key for key in keys}


@dataclass(eq=False)
class _HarvestDirectory:
    """The directory of a harvest, and the settings that it is compared with."""

    directory: str
    about: dict[str, Any]
    check_weights: bool
    resume: bool
    _lock: DirectoryLock | None = None

    @contextmanager
    def opened(self, workers: Workers) -> Iterator[bool]:
        """Make the directory ready; yield whether the harvest there is complete already."""
        try:
            workers.first(self._open)
            yield os.path.exists(os.path.join(self.directory, INDEX))
        finally:
            if self._lock is not None:
                self._lock.release()

    def _open(self) -> None:
        path = os.path.join(self.directory, SETTINGS)
        with writing(self.directory):
            if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
                raise SaveError(self.directory, "it is a file; a harvest is a directory")
            os.makedirs(self.directory, exist_ok=True)
            names = os.listdir(self.directory)
            if INDEX not in names:  # a complete harvest is only read
                self._lock = DirectoryLock(self.directory)
                names = os.listdir(self.directory)
            others = sorted(name for name in names if not is_ours(name))
            # One that failed before it kept a batch does not bind the next to its settings.
            is_begun = SETTINGS in names and not {*names} <= {SETTINGS, LOCK}
            if is_begun:
                self._compare(read_plain(path))
            elif others or any(name.endswith(".json") and name != SETTINGS for name in names):
                shown = ", ".join((others or names)[:3])
                raise SaveError(
                    self.directory,
                    f"it is not a harvest and contains other files ({shown}); choose another "
                    "directory",
                )
            if not is_begun:
                write_values_whole(path, HARVEST, self.about)
                sync_directory(os.path.dirname(self.directory))
            elif INDEX not in names:  # find out now whether it can be written to
                with open(f"{path}.tmp", "wb"):
                    pass
                os.remove(f"{path}.tmp")

    def _compare(self, stored: dict[str, Any]) -> None:
        if not self.resume:
            raise InputError(
                f"{self.directory!r} contains a harvest, and resume=False does not allow "
                "resuming it: choose another directory"
            )
        differences = list(_differences(stored, self.about, self.check_weights))
        if differences:
            raise InputError(
                f"{self.directory!r} contains another harvest: {'; '.join(differences)}. "
                "Choose another directory, or the same settings"
            )

    def complete(self) -> None:
        """Write the index of all shards, which says that nothing is missing."""
        made = Harvest.open(self.directory)
        places: dict[str, str] = {}
        for shard in shards_in(self.directory):
            for path, place in shard.places.items():
                require_place(path, places.setdefault(path, place), place)
        if self.about["settings"]["sharded"] and self.about["processes"] > 1:
            twice = list((Counter(made.ids) - Counter(set(made.ids))).elements())
            if twice:
                raise InputError(
                    f"{len(twice)} ids occur more than once, such as {twice[:3]}: with "
                    "sharded=True each sample has to be in the part of one process only"
                )
        with writing(self.directory):
            write_values_whole(os.path.join(self.directory, INDEX), HARVEST, made.index())


def _differences(
    stored: dict[str, Any], current: dict[str, Any], check_weights: bool
) -> Iterator[str]:
    for key in sorted(stored["settings"].keys() | current["settings"].keys()):
        old, new = stored["settings"].get(key), current["settings"].get(key)
        if old != new:
            yield f"{key}= was {old!r} there, and is {new!r}"
    if stored["processes"] != current["processes"]:
        old, new = stored["processes"], current["processes"]
        yield f"{old} processes wrote there, but now there are {new}"
    old, new = stored["model"], current["model"]
    if old["class"] != new["class"]:
        yield f"the model was a {old['class']}, and is a {new['class']}"
    elif old["structure"] != new["structure"]:
        yield "the model's modules, parameters or training modes differ from those there"
    elif check_weights and old["weights"] != new["weights"]:
        yield "the weights of the model have changed since then (check_weights=False allows that)"


# The loop of a harvest: batch by batch, from where an earlier call stopped.

_SHOWN = 8
_ORDERS = (1 << 61) - 1


@dataclass(eq=False)
class HarvestRun:
    """The harvest of one process."""

    bended: BendedModule
    loader: Iterable[Any]
    settings: HarvestSettings
    call: Callable[[BendedModule, Any], Any] | None
    files: ShardFiles
    writer: ShardThread
    collector: Collector
    workers: Workers

    def __post_init__(self) -> None:
        self._before = shards_in(self.files.directory, self.files.rank)
        self.done: int = sum(shard.samples for shard in self._before)
        # The batches that were harvested before: their shards, and their places there.
        self._past = [(s, place) for s in self._before for place in range(len(s.batches))]
        self._opened: tuple[Shard, list[Any]] | None = None  # a shard, and its ids
        self.collector.filling.number = len(self._before) + 1
        for shard in self._before:
            self.collector.places |= shard.places
        if self._before and self._before[-1].is_partial:
            self._refill(self._before[-1])
        self._order = self._order_done = 0  # up to the batch at hand, and the last that is done
        self._last: Any = None  # the content of the last batch that was harvested
        self._versions: tuple[int, ...] = ()  # of its tensors, before the model was called
        self._size_of_last = 0
        self._has_new = False  # whether there is more than before
        self._state = self._state_now()
        kinds = [int if shard.ids is None else str for shard in self._before if shard.samples]
        self._kind: type | None = kinds[0] if kinds else None

    def _refuse_unsteady(self) -> None:
        for shard in self._before:
            if shard.changed:
                raise InputError(
                    f"this harvest cannot be resumed: the model changes {shard.changed[0]!r} "
                    "while it runs, so the rest would differ from an uninterrupted "
                    "harvest. Put it in eval mode, and start again in another directory"
                )
            if shard.draws and self.settings.seed is None:
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
            if self.collector.filling.batches:
                self._close_shard()
            elif not (self._has_new or self._before) and self.workers.world == 1:
                raise InputError("the loader yielded no batch: there is nothing to harvest")
            self.writer.wait()
        except (Exception, KeyboardInterrupt) as error:
            self._rescue(error)
            raise
        if not self._before:
            self.collector.warn_of_unmet()

    def compare(self) -> None:
        """Compare the loader with a harvest that is complete."""
        for number, _, _ in self._own():
            raise InputError(
                f"the loader yields a batch {number}, but there were only {len(self._past)} "
                "when this was harvested: it is not the same data set. Choose another "
                "directory"
            )

    def _own(self) -> Iterator[tuple[int, LoaderBatch, int]]:
        """Yield this process's batches that are not done: number, batch, first running number."""
        dealt = self.workers.world > 1 and not self.settings.is_dealt
        past = self._past
        numbers = self.settings.ids is None
        start = 0

        def place(number: int) -> int | None:
            """Return how many of this process's own batches come before; None for others'."""
            if not dealt:
                return number
            return (
                number // self.workers.world
                if number % self.workers.world == self.workers.rank
                else None
            )

        def is_wanted(number: int) -> bool:
            own = place(number)
            return own is not None and own >= len(past) - 1

        seen = 0
        for batch in batches_of(self.loader, is_wanted):
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
                number = number * self.workers.world + self.workers.rank
            if own < len(past):
                start += self._compare_batch(own, number, batch, start)
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

    def _compare_batch(self, own: int, number: int, batch: LoaderBatch, start: int) -> int:
        """Compare a batch with the one that was harvested in its place; return its size."""
        shard, place = self._past[own]
        size = shard.sizes[place]
        is_last = place == len(shard.batches) - 1
        same = shard.batches[place] == number and (not is_last or self._order == shard.order)
        if same and batch.is_loaded:
            begin = sum(shard.sizes[:place])
            ids = self._ids_of(shard)[begin : begin + size]
            same = list(self._ids_again(batch.content, start)) == ids
            if same and is_last:
                same = shard.mark in (0, mark_of(batch.content))
        if not same:
            raise InputError(
                f"batch {number} of the loader differs from the one that was harvested before: "
                "the data set or its order has changed. Shuffle with a generator that has a "
                "fixed seed, or not at all"
            )
        return size

    def _ids_of(self, shard: Shard) -> list[Any]:
        if self._opened is None or self._opened[0] is not shard:
            self._opened = shard, shard.all_ids(self.files.form)
        return self._opened[1]

    def _refill(self, shard: Shard) -> None:
        """Put the rows of the last shard, which is not full, into the one that is being filled."""
        filling = self.collector.filling
        filling.number = shard.number
        shard_file = self.files.form.open(shard.file, shard.about)
        shard_file.verify()
        ids = iter(self._ids_of(shard))
        columns: dict[int, list[tuple[str, Tensor]]] = {}
        for key, kept in shard.columns.items():
            elements = shard_file.elements(key, kept.dtype)
            for place, start, shape in kept.pieces(shard.sizes):
                rows = elements[start : start + shape.numel()].view(shape)
                columns.setdefault(place, []).append((key, rows))
        for place, size in enumerate(shard.sizes):
            for key, rows in columns.get(place, ()):
                kept = shard.columns[key]
                filling.add(key, kept.asked, rows, kept.per_sample, kept.dtype)
            path = shard.paths[shard.taken[place]]
            filling.end_batch(shard.batches[place], list(itertools.islice(ids, size)), path)
        filling.draws = shard.draws

    def _size(self, content: Any) -> int | None:
        axis = self.settings.batch_axis
        return size_of(content, axis if type(axis) is int else 0)

    def _ids_again(self, content: Any, start: int) -> Ids:
        return ids_of(content, self.settings.ids, start, self._size(content))

    def _harvested(self, number: int, batch: LoaderBatch, start: int) -> int:
        """Harvest a batch; return how many samples it has."""
        collector, content = self.collector, batch.content
        versions = versions_of(content)
        ids: Ids = ()
        try:
            ids = self._ids_again(content, start)
            self._examine(ids, batch)
            collector.begin(content, len(ids))
            for name, what in self.settings.keep.items():
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
                f"harvesting {where} failed: {type(error).__name__}: {error}. "
                + "A batch holds the arguments of a call; call= says how to call the model with "
                "one that holds more, such as labels. "
                * isinstance(error, TypeError)
                + "The batches before it are kept, and the same call resumes there",
                number,
                tuple(ids),
            ) from error
        collector.filling.end_batch(number, ids, path)
        self._last, self._versions = content, versions
        self._size_of_last, self._has_new = len(ids), True
        self._order_done = self._order
        return len(ids)

    def _examine(self, ids: Ids, batch: LoaderBatch) -> None:
        if self.settings.ids is None:
            if self.workers.world > 1 and batch.size not in (None, len(ids)):
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
        self.collector.filling.add(f"kept/{name}", "", value.detach(), True, value.dtype)

    def _run(self, number: int, content: Any) -> None:
        filling, seed = self.collector.filling, self.settings.seed
        if seed is not None:
            with RandomStates():
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
        if self.call is None:
            Call.of(content).to(self.bended)
        else:
            self.call(self.bended, content)

    # Shards

    def _is_full(self) -> bool:
        filling, settings = self.collector.filling, self.settings
        return filling.samples >= settings.shard_samples or filling.nbytes >= settings.shard_bytes

    def _finish(self) -> Filling:
        filling = self.collector.filling
        filling.order = self._order_done
        filling.places = dict(sorted(self.collector.places.items()))
        # The model, or a loader that uses its memory again, may have written into the batch.
        is_as_given = versions_of(self._last) == self._versions
        filling.mark = mark_of(self._last) if is_as_given else 0
        now = self._state_now()
        filling.changed = [name for name, value in now.items() if self._state.get(name) != value]
        return filling

    def _close_shard(self) -> None:
        self.collector.filling = self.writer.exchange(self._finish())

    def _rescue(self, error: BaseException) -> None:
        """Write the part of a shard, so that only the batch that failed is lost."""
        self.collector.drop()
        if isinstance(error, SaveError):
            return
        try:
            self.writer.wait()
            if self.collector.filling.batches and self._has_new:
                self.files.write(self._finish(), is_partial=True)
        except SaveError as other:
            error.add_note(f"the samples since the last shard could not be saved: {other}")

    def _state_now(self) -> dict[str, int]:
        """Return marks of the parameters and buffers, which change with them."""
        model = self.bended.model
        buffers = {id(b) for b in model.buffers()} if isinstance(model, torch.nn.Module) else set()
        # A batch norm writes its statistics without counting a version (torch 2.13).
        return {
            name: sum_of(tensor) if id(tensor) in buffers else tensor._version
            for name, tensor in state_of(model)
            if not tensor.is_inference()
        }


def refuse_repeats(loader: Any, workers: Workers, settings: HarvestSettings) -> None:
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


def total_of(loader: Any, workers: Workers, settings: HarvestSettings) -> int | None:
    """Return the approximate number of samples that this process will harvest; None if unknown."""
    sampler = getattr(loader, "sampler", None)
    try:
        total = len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return total if settings.is_dealt else -(-total // workers.world)


# The helpers of a harvest: its processes, its writer thread, and the progress bar.

with warnings.catch_warnings():
    # In a notebook without its widgets, it would say that there are none.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class Workers:
    """The processes that harvest together. An error in one raises in all."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if several else 0
        self.world: int = dist.get_world_size() if several else 1

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run a step in each process, and return the results of all of them."""
        if self.world == 1:
            return [step()]
        reports: list[Any] = [None] * self.world
        try:
            given = step()
        except Exception as error:
            dist.all_gather_object(reports, (f"{type(error).__name__}: {error}", None))
            raise
        dist.all_gather_object(reports, (None, given))
        failed = {rank: failure for rank, (failure, _) in enumerate(reports) if failure is not None}
        if failed:
            listed = "; ".join(f"process {rank}: {failure}" for rank, failure in failed.items())
            raise BendtraceError(f"another process of the harvest has failed: {listed}")
        return [given for _, given in reports]

    def first(self, step: Callable[[], Any]) -> None:
        """Run a step in the first process while the others wait."""
        self.together(step if self.rank == 0 else lambda: None)


class ShardThread:
    """Writes one shard while the next one is filled.

    There are two sets of buffers, which take turns: they are all the memory that a harvest holds.
    """

    def __init__(self, files: ShardFiles, spare: Filling) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, "bendtrace-harvest")
        self._spare = spare
        self._written: Future[None] | None = None

    def exchange(self, full: Filling) -> Filling:
        """Start writing a shard, and return another one to fill."""
        self.wait()
        spare, self._spare = self._spare, full
        spare.clear(full)
        self._written = self._thread.submit(self._files.write, full)
        return spare

    def wait(self) -> None:
        """Wait until all is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def __enter__(self) -> ShardThread:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True)


def peak_memory() -> int | None:
    """Return the peak memory of the process so far, in bytes; None if unknown."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def progress_bar(shown: bool, total: int | None, done: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of samples, with the rate and the peak memory; yield what advances it."""
    bar = tqdm(
        total=total, initial=done, unit=" samples", desc="harvest", smoothing=0.1, disable=not shown
    )

    def advance(samples: int) -> None:
        bar.update(samples)
        if shown and (most := peak_memory()) is not None:
            bar.set_postfix_str(f"{most / 2**20:.0f} MiB", refresh=False)

    try:
        yield advance
    finally:
        advance(0)
        bar.close()
