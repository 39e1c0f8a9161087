"""Stream activations of a data set to files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace._checks import shown
from bendtrace.calls import bended_of
from bendtrace.errors import InputError, SaveError
from bendtrace.harvesting.collecting import Collector
from bendtrace.harvesting.filling import Filling, require_place
from bendtrace.harvesting.formats import form_of
from bendtrace.harvesting.reading import Harvest
from bendtrace.harvesting.running import HarvestRun, refuse_repeats, total_of
from bendtrace.harvesting.settings import Settings, fingerprint, told, told_insertion
from bendtrace.harvesting.shards import (
    HARVEST,
    INDEX,
    SETTINGS,
    ShardFiles,
    is_ours,
    read,
    replace,
    shards_in,
)
from bendtrace.harvesting.workers import Progress, Workers, Writer
from bendtrace.interject.passes import PassNumbers
from bendtrace.interject.resolver import flat
from bendtrace.interject.where import Where
from bendtrace.module import BendedModule
from bendtrace.storage.sealed import DirectoryLock, writing
from bendtrace.storage.tensors import sync_directory

__all__ = ["harvest"]


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
            along a new axis after that of the samples.
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
    settings = Settings(
        tuple(flat(where)), reduce, feature_axis, passes, batch_axis, dtype, ids, _named(keep),
        allow_none, seed, shard_samples, shard_bytes, format, bool(sharded),
    )  # fmt: skip
    form = form_of(format)
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
    directory = os.path.abspath(os.fspath(out))
    refuse_repeats(loader, workers, settings)
    inserted = [told_insertion(i) for i in bended.insertions if not i.what.observes]
    with torch.inference_mode(False), torch.no_grad():
        about = {
            "settings": {**settings.told(), "call": told(call, whole=False), "inserted": inserted},
            "processes": workers.world,
            "model": fingerprint(bended.model),
        }
        checked = workers.together(lambda: _checked(bended, settings, about))
        if len(set(checked)) > 1:
            raise InputError(
                "the processes received different settings, or models with different weights"
            )
        site = _Site(directory, about, check_weights, resume)
        with site.opened(workers) as is_complete:
            files = ShardFiles(directory, workers.rank, form)

            def gather() -> None:
                spare = Filling(settings.shard_samples, settings.shard_bytes)
                collector = Collector(bended, settings, several=call is not None)
                if not is_complete:
                    files.clean()
                with collector, Writer(files, spare) as writer:
                    run = HarvestRun(
                        bended, loader, settings, call, files, writer, collector, workers
                    )
                    if is_complete:  # compare the loader, as far as that needs no run
                        with torch.random.fork_rng():
                            run.compare()
                        return
                    shown = progress and workers.rank == 0
                    with Progress(shown, total_of(loader, workers, settings), run.done) as bar:
                        run.go(bar.advance)

            workers.together(gather)
            if not is_complete:
                workers.first(site.complete)
    return Harvest.open(directory)


def _checked(bended: BendedModule, settings: Settings, about: dict[str, Any]) -> str:
    """Check `where` before anything is touched; return a description of the harvest."""
    Collector(bended, settings)
    return json.dumps(about, sort_keys=True)


def _named(keep: Any) -> Mapping[str, Any]:
    if keep is None:
        return {}
    if isinstance(keep, Mapping):
        return dict(keep)
    keys = list(keep) if isinstance(keep, (list, tuple, set, frozenset)) else [keep]
    wrong = [key for key in keys if type(key) not in (str, int)]
    if wrong:
        raise InputError(
            "keep= takes keys of the batch, or a dict of names and keys or functions of it, "
            f"not {wrong[0]!r}"
        )
    return {str(key): key for key in keys}


class _Site:
    """The directory of a harvest.

    Args:
        directory: its directory.
        about: the description of the harvest: its settings, the model, the number of processes.
        check_weights: whether the weights have to be those of the beginning.
        resume: whether a harvest that is there may be resumed.
    """

    def __init__(
        self, directory: str, about: dict[str, Any], check_weights: bool, resume: bool
    ) -> None:
        self.directory = directory
        self._about = about
        self._check_weights = check_weights
        self._resume = resume
        self._lock: DirectoryLock | None = None

    @contextmanager
    def opened(self, workers: Workers) -> Iterator[bool]:
        """Make the directory ready; yield whether the harvest there is complete already.

        Raises:
            SaveError: it holds something else, is being written to, or cannot be.
            InputError: it holds another harvest.
        """
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
            if SETTINGS in names:
                self._compare(read(path))
            elif others or any(name.endswith(".json") for name in names):
                shown = ", ".join((others or names)[:3])
                raise SaveError(
                    self.directory,
                    f"it is not a harvest and contains other files ({shown}); choose another "
                    "directory",
                )
            if SETTINGS not in names:
                replace(path, HARVEST, self._about)
                sync_directory(os.path.dirname(self.directory))
            elif INDEX not in names:  # find out now whether it can be written to
                with open(f"{path}.tmp", "wb"):
                    pass
                os.remove(f"{path}.tmp")

    def _compare(self, there: dict[str, Any]) -> None:
        if not self._resume:
            raise InputError(
                f"{self.directory!r} contains a harvest, and resume=False does not allow "
                "resuming it: choose another directory"
            )
        differences = list(_differences(there, self._about, self._check_weights))
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
        if self._about["settings"]["sharded"] and self._about["processes"] > 1:
            twice = list((Counter(made.ids) - Counter(set(made.ids))).elements())
            if twice:
                raise InputError(
                    f"{len(twice)} ids occur more than once, such as {twice[:3]}: with "
                    "sharded=True each sample has to be in the part of one process only"
                )
        with writing(self.directory):
            replace(os.path.join(self.directory, INDEX), HARVEST, made.index())


def _differences(there: dict[str, Any], here: dict[str, Any], check_weights: bool) -> Iterator[str]:
    for key in sorted(there["settings"].keys() | here["settings"].keys()):
        old, new = there["settings"].get(key), here["settings"].get(key)
        if old != new:
            yield f"{key}= was {old!r} there, and is {new!r}"
    if there["processes"] != here["processes"]:
        yield f"{there['processes']} processes wrote there, but now there are {here['processes']}"
    old, new = there["model"], here["model"]
    if old["class"] != new["class"]:
        yield f"the model was a {old['class']}, and is a {new['class']}"
    elif old["structure"] != new["structure"]:
        yield "the model's modules, parameters or training modes differ from those there"
    elif check_weights and old["weights"] != new["weights"]:
        yield "the weights of the model have changed since then (check_weights=False allows that)"
