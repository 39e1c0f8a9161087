"""Writing shards while the model goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from bendtrace.harvesting.filling import Filling
from bendtrace.harvesting.shards import ShardFiles

__all__ = ["Writer"]


class Writer:
    """Writes one shard while the next one is filled.

    There are two sets of buffers, which take turns: that is all the memory a harvest holds.

    Args:
        files: where to.
        spare: a shard to fill while another is written.
    """

    def __init__(self, files: ShardFiles, spare: Filling) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, "bendtrace-harvest")
        self._spare = spare
        self._written: Future[None] | None = None

    def exchange(self, full: Filling) -> Filling:
        """Have a shard written, and return another to fill.

        Raises:
            SaveError: the one before could not be written.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True)
