"""Activations on disk while a run is going on, and handles that read them back."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError, LoadError, SaveError
from bendtrace.storage.files import DataFile, TensorFile, free_key, row_size, writing
from bendtrace.storage.handles import NotSaved, StoredTensor, row_of, undisturbed
from bendtrace.storage.locks import DirectoryLock
from bendtrace.storage.sealed import read_sealed, replace_sealed
from bendtrace.storage.tensors import Layout, layout_of, why_not

__all__ = [
    "STREAM",
    "STREAM_FORMAT",
    "STREAM_VERSION",
    "ShardWriter",
    "is_streamed",
    "is_unfinished",
]

STREAM = "stream.json"
STREAM_FORMAT = "bendtrace stream"
STREAM_VERSION = 1
_HEADER = 1 << 18  # room for about 2000 tensors; a shard is closed when it is used up


class ShardWriter:
    """Writes tensors to disk as they come, and keeps none of them in memory.

    The directory then holds `shard-00001.safetensors` and so on, and `stream.json`, which tells
    what is where. As long as the writer is not closed, it says that the stream is unfinished.

    Args:
        directory: where to. It is made if there is none, and must be empty, or hold nothing but
            what is left of a stream that was interrupted.
        max_bytes: a shard is closed, and the next one begun, before it grows beyond this.

    Raises:
        SaveError: if the directory holds something else, or cannot be written to.

    Example:
        >>> import tempfile, torch
        >>> from bendtrace.storage import ShardWriter
        >>> with tempfile.TemporaryDirectory() as directory, ShardWriter(directory) as writer:
        ...     stored = writer.add("relu_1", torch.ones(2, 3).relu())
        ...     stored.read().sum()
        tensor(6.)
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = 1 << 32) -> None:
        if type(max_bytes) is not int or max_bytes < 1:
            raise InputError(f"max_bytes has to be a positive number of bytes, not {max_bytes!r}")
        self.directory = os.path.abspath(os.fspath(directory))
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._file: TensorFile | None = None
        self._reader: DataFile | None = None
        self._headers: dict[str, str] = {}
        self._rows: dict[str, Any] = {}
        self._closed = False
        with writing(self.directory):
            os.makedirs(self.directory, exist_ok=True)
            self._held = DirectoryLock(self.directory)
            try:
                _make_room(self.directory)
                self._mark("open")
            except BaseException:
                self._held.release()
                raise

    def add(self, name: str, tensor: Tensor) -> StoredTensor | NotSaved:
        """Write a tensor.

        Args:
            name: what to call it: a name that was not used yet.
            tensor: what to write. It is not changed, nor kept.

        Returns:
            A handle that reads it back, also before the writer is closed; or why it cannot be
            stored: it is sparse, quantised, nested, on the meta device, or of a subclass.

        Raises:
            InputError: if the name was used before, or the writer is closed.
            SaveError: if the file cannot be written, such as on a full disk.
        """
        with self._lock, undisturbed():
            if self._closed:
                raise InputError(f"the stream to {self.directory!r} is closed")
            if name in self._rows:
                raise InputError(f"{name!r} was already written to {self.directory!r}")
            reason = why_not(tensor)
            if reason is not None:
                self._rows[name] = {"not_saved": reason}
                return NotSaved(reason)
            layout = layout_of(tensor)
            with writing(self.directory):
                file, reader = self._room_for(name, layout)
                extent = file.add(free_key(name, file), layout, tensor)
            self._rows[name] = row_of(reader.path, extent, layout, tensor.device)
            return StoredTensor(name, layout, tensor.device, reader, extent)

    def close(self) -> None:
        """Finish the files; a second call does nothing.

        Raises:
            SaveError: if they cannot be written. The directory then says that it is unfinished.
        """
        with self._lock:
            if not self._closed:
                with writing(self.directory):
                    self._close_shard()
                    self._mark("closed", files=self._headers, tensors=self._rows)
                self._closed = True
                self._held.release()

    def _room_for(self, name: str, layout: Layout) -> tuple[TensorFile, DataFile]:
        file = self._file
        # Room for a name that has to be made unique is left in any case.
        key = f"{name}#{len(self._rows)}".encode("unicode_escape").decode()
        if file is not None and len(file):
            full = file.size + layout.nbytes > self._max_bytes or not file.takes(key, layout)
            if full:
                self._close_shard()
                file = None
        if file is None or self._reader is None:
            path = os.path.join(self.directory, f"shard-{len(self._headers) + 1:05d}.safetensors")
            file = self._file = TensorFile(path, max(_HEADER, 2 * row_size(key, layout)))
            self._reader = DataFile(path)
        return file, self._reader

    def _close_shard(self) -> None:
        if self._file is not None:
            self._headers[os.path.basename(self._file.path)] = self._file.close()
            self._file = self._reader = None

    def _mark(self, state: str, **content: Any) -> None:
        marker = {"format": STREAM_FORMAT, "version": STREAM_VERSION, "state": state, **content}
        path = os.path.join(self.directory, STREAM)
        replace_sealed(path, marker, f"{path}.new")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the directory goes on saying that it is unfinished
            self._held.release()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ShardWriter to {self.directory!r}: {len(self._rows)} tensors, {state}>"


def _make_room(directory: str) -> None:
    names = os.listdir(directory)
    if not names:
        return
    if not is_unfinished(directory) or not all(map(is_streamed, names)):
        what = "a finished stream" if STREAM in names else "other files"
        raise SaveError(directory, f"it is not empty but holds {what}; choose another directory")
    for name in names:
        os.remove(os.path.join(directory, name))


def is_streamed(name: str) -> bool:
    """Whether a file in a directory is one that a `ShardWriter` writes."""
    is_shard = name.startswith("shard-") and name.endswith(".safetensors")
    return is_shard or name in (STREAM, f"{STREAM}.new")


def is_unfinished(directory: str) -> bool:
    """Whether a directory holds a stream that was interrupted, or is still being written."""
    try:
        marker = read_sealed(os.path.join(directory, STREAM), STREAM_FORMAT, STREAM_VERSION)
    except LoadError:
        return False
    return marker.get("state") == "open"
