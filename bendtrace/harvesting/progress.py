"""The progress bar: how far, how fast, how much memory."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from types import TracebackType
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without its widgets, it would say that there are none.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["Progress", "peak_memory"]


def peak_memory() -> int | None:
    """Return the most memory that the process has held so far, in bytes; None if unknown."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Progress:
    """A bar of samples, with the rate, and the most memory held so far.

    Args:
        shown: whether there is one.
        total: how many samples there will be; None if that is not known.
        done: how many were done before.
    """

    def __init__(self, shown: bool, total: int | None, done: int) -> None:
        self._bar: Any = None
        if shown:
            self._bar = tqdm(
                total=total, initial=done, unit=" samples", desc="harvest", smoothing=0.1
            )
        self._said = 0.0

    def advance(self, samples: int) -> None:
        """Note that some more are done."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._say_memory(True)
            self._bar.close()
