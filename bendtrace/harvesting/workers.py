"""The helpers of a harvest: its processes, its writer thread, and the progress bar."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from tqdm import TqdmWarning

from bendtrace.errors import BendtraceError
from bendtrace.harvesting.filling import Filling
from bendtrace.harvesting.formats import ShardFiles

with warnings.catch_warnings():
    # In a notebook without its widgets, it would say that there are none.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class Workers:
    """The processes that harvest together. An error in one raises in all.

    Attributes:
        rank: number of this process.
        world: the number of processes.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if several else 0
        self.world: int = dist.get_world_size() if several else 1

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run a step in each process, and return the results of all of them.

        Raises:
            BendtraceError: the step raised in another process; an error in this process is raised
                unchanged.
        """
        if self.world == 1:
            return [step()]
        error: Exception | None = None
        given: Any = None
        try:
            given = step()
        except Exception as raised:
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        all_told: list[Any] = [None] * self.world
        dist.all_gather_object(all_told, (told, given if error is None else None))
        if error is not None:
            raise error
        failed = {rank: told for rank, (told, _) in enumerate(all_told) if told is not None}
        if failed:
            listed = "; ".join(f"process {rank}: {told}" for rank, told in failed.items())
            raise BendtraceError(f"another process of the harvest has failed: {listed}")
        return [given for _, given in all_told]

    def first(self, step: Callable[[], Any]) -> None:
        """Run a step in the first process while the others wait."""
        self.together(step if self.rank == 0 else lambda: None)


class Writer:
    """Writes one shard while the next one is filled.

    There are two sets of buffers, which take turns: they are all the memory that a harvest holds.
    """

    def __init__(self, files: ShardFiles, spare: Filling) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, "bendtrace-harvest")
        self._spare = spare
        self._written: Future[None] | None = None

    def exchange(self, full: Filling) -> Filling:
        """Start writing a shard, and return another one to fill.

        Raises:
            SaveError: the earlier shard could not be written.
        """
        self.wait()
        spare, self._spare = self._spare, full
        spare.clear(full)
        self._written = self._thread.submit(self._files.write, full)
        return spare

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            SaveError: it could not be written.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def __enter__(self) -> Writer:
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


class Progress:
    """A progress bar of samples, with the rate and the peak memory so far.

    Args:
        shown: whether there is one.
        total: the number of samples; None if unknown.
        done: the number of samples done before.
    """

    def __init__(self, shown: bool, total: int | None, done: int) -> None:
        self._bar: Any = None
        if shown:
            self._bar = tqdm(
                total=total, initial=done, unit=" samples", desc="harvest", smoothing=0.1
            )
        self._said = 0.0

    def advance(self, samples: int) -> None:
        """Advance by some samples."""
        bar = self._bar
        if bar is None:
            return
        bar.update(samples)
        now = time.monotonic()
        if now - self._said > 0.5:
            self._said = now
            self._say_memory(False)

    def _say_memory(self, refresh: bool) -> None:
        most = peak_memory()
        if most is not None:
            self._bar.set_postfix_str(f"{most / 2**20:.0f} MiB", refresh=refresh)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._say_memory(True)
            self._bar.close()
