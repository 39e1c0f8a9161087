"""Stream activations of a data set to files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bendtrace.calls import bended_of
from bendtrace.errors import InputError
from bendtrace.harvesting.collecting import Collector
from bendtrace.harvesting.filling import Filling
from bendtrace.harvesting.formats import form_of
from bendtrace.harvesting.progress import Progress
from bendtrace.harvesting.reading import Harvest
from bendtrace.harvesting.running import Run, refuse_repeats, total_of
from bendtrace.harvesting.settings import Settings, flat
from bendtrace.harvesting.shards import ShardFiles
from bendtrace.harvesting.site import Site
from bendtrace.harvesting.telling import fingerprint, told, told_insertion
from bendtrace.harvesting.workers import Workers
from bendtrace.harvesting.writer import Writer
from bendtrace.module import BendedModule

__all__ = ["harvest"]


def harvest(
    model: nn.Module | BendedModule | Callable[..., Any],
    loader: Iterable[Any],
    *,
    where: Any,
    out: str | os.PathLike[str],
    reduce: Any = None,
    feature_axis: int = -1,
    passes: Any = None,
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
    r"""Stream what nodes give for all batches of a data set to files.

    A harvest that was interrupted is gone on with by the same call, and then is the same, bit by
    bit, as one that was not. Runs under `torch.no_grad()`, in the mode that the model is in.

    Args:
        model: a module or function, or a `BendedModule`, whose insertions are called as always.
        loader: gives the batches. A batch is what the model is called with: a tensor, a tuple or
            list of positional arguments, a mapping of keyword arguments, or a `Call`. Otherwise
            say so with `call=`.
        where: which nodes: all that `BendedModule.interject` takes, or a list of these. Nothing,
            `()`, stores only which path each batch took.
        out: the directory. There must be nothing there, or the beginning of this very harvest.
        reduce: what is made of a value: `"mean"`, `"max"` or `"last"` over all axes besides those
            of samples and features; a function of the value, or of the value and the batch;
            or a dict of these, by what `where` says.
        feature_axis: which axis `"mean"`, `"max"` and `"last"` keep: -1, or 1 where
            channels come first.
        passes: which passes of a node that is executed several times in a batch: numbers from 0,
            or from the end where negative, or a function of the number; one number keeps the
            name of the node. None for all, which are called `relu`, `relu:2`, `relu:3`.
            `"stack"` puts them along a new axis after that of the samples.
        batch_axis: which axis of a value counts the samples; None for values that have none, which
            are stored once for each batch; or a dict of these, by what `where` says.
        dtype: what floating point numbers are stored as; None for what they are.
        call: called as `call(bended, batch)` in place of the model, to call it.
        ids: where the ids of samples are from: a key of the batch, or a function of the batch that
            gives as many ints, or strings; None for running numbers from 0.
        keep: parts of the batch to store besides: its keys, or a dict of names and keys or
            functions of the batch.
        allow_none: whether it is right that some of `where` is never met.
        seed: each batch begins with random numbers that depend on this and its number, and leaves
            torch's generators as they were. None leaves them to the model.
        shard_samples: how many samples close a shard, at the end of a batch.
        shard_bytes: how many bytes of values close one. Memory for about two such shards is held.
        format: `"safetensors"`, or `"zarr"`, which needs the extra `zarr`.
        sharded: with several processes, whether the loader gives each of them its own part, and
            `ids=` tells samples apart. If not, each process is given the same batches by its
            loader, and takes every how-manieth.
        check_weights: whether to compare the weights with those of the harvest that is gone on
            with. The structure of the model and its training modes always are.
        resume: whether to go on with a harvest that is there. If not, that is an error.
        progress: whether to show a progress bar.

    Returns:
        The `Harvest`, which reads the files.

    Raises:
        InputError: something given makes no sense, or belongs to another harvest than the one that
            is there; nothing has changed.
        SaveError: `out` is something else, or cannot be written to.
        NodePathError: nothing is meant by `where`.
        HarvestError: a batch has failed; names its samples. What was done before is kept.

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
    settings = Settings(
        tuple(flat(where)), reduce, feature_axis, passes, batch_axis, dtype, ids, _named(keep),
        allow_none, seed, shard_samples, shard_bytes, format, bool(sharded),
    )  # fmt: skip
    form = form_of(format)
    if call is not None and not callable(call):
        raise InputError(f"call= is called with the model and a batch, and {call!r} cannot be")
    if not isinstance(loader, Iterable):
        raise InputError(f"a loader gives batches one after the other; {loader!r} does not")
    bended = bended_of(model)
    workers = Workers()
    directory = os.path.abspath(os.fspath(out))
    refuse_repeats(loader, workers, settings)
    inserted = [told_insertion(i) for i in bended._board.insertions if not i.what.observes]
    with torch.inference_mode(False), torch.no_grad():
        about = {
            "settings": {**settings.told(), "call": told(call, whole=False), "inserted": inserted},
            "processes": workers.world,
            "model": fingerprint(bended.model),
        }
        checked = workers.together(lambda: _checked(bended, settings, about))
        if len(set(checked)) > 1:
            raise InputError(
                "the processes were given different settings, or models with different weights"
            )
        site = Site(directory, about, check_weights, resume)
        with site.opened(workers) as is_complete:
            files = ShardFiles(directory, workers.rank, form)
            if is_complete:
                workers.together(lambda: _compared(bended, loader, settings, call, files, workers))
            else:
                workers.together(
                    lambda: _gathered(bended, loader, settings, call, files, workers, progress)
                )
                workers.first(site.complete)
    return Harvest.open(directory)


def _checked(bended: BendedModule, settings: Settings, about: dict[str, Any]) -> str:
    """Say what is wrong with `where` before anything is touched; return what is to be done."""
    Collector(bended, settings)
    return json.dumps(about, sort_keys=True)


def _compared(
    bended: BendedModule,
    loader: Iterable[Any],
    settings: Settings,
    call: Callable[[BendedModule, Any], Any] | None,
    files: ShardFiles,
    workers: Workers,
) -> None:
    """Compare the loader with a harvest that is complete, as far as that needs no run."""
    spare = Filling(settings.shard_samples, settings.shard_bytes)
    collector = Collector(bended, settings, several=call is not None)
    with torch.random.fork_rng(), collector, Writer(files, spare) as writer:
        Run(bended, loader, settings, call, files, writer, collector, workers).compare()


def _gathered(
    bended: BendedModule,
    loader: Iterable[Any],
    settings: Settings,
    call: Callable[[BendedModule, Any], Any] | None,
    files: ShardFiles,
    workers: Workers,
    progress: bool,
) -> None:
    """Harvest what is this process's own and not done yet."""
    files.clean()
    spare = Filling(settings.shard_samples, settings.shard_bytes)
    collector = Collector(bended, settings, several=call is not None)
    with collector, Writer(files, spare) as writer:
        run = Run(bended, loader, settings, call, files, writer, collector, workers)
        shown = progress and workers.rank == 0
        with Progress(shown, total_of(loader, workers, settings), run.done) as bar:
            run.go(bar.advance)


def _named(keep: Any) -> Mapping[str, Any]:
    if keep is None:
        return {}
    if isinstance(keep, Mapping):
        return dict(keep)
    keys = list(keep) if isinstance(keep, (list, tuple, set, frozenset)) else [keep]
    wrong = [key for key in keys if type(key) not in (str, int)]
    if wrong:
        raise InputError(
            "keep= takes keys of the batch, or a dict of names and keys or functions of it, not "
            f"{wrong[0]!r}"
        )
    return {str(key): key for key in keys}
