"""Reading what was streamed to disk."""

from __future__ import annotations

import os

from bendtrace.errors import LoadError
from bendtrace.storage.handles import NotSaved, StoredTensor, open_files, stored_of
from bendtrace.storage.sealed import read_sealed
from bendtrace.storage.shards import STREAM, STREAM_FORMAT, STREAM_VERSION

__all__ = ["read_stream"]


def read_stream(directory: str | os.PathLike[str]) -> dict[str, StoredTensor | NotSaved]:
    """Return what a `ShardWriter` wrote, by name.

    Args:
        directory: where it wrote to.

    Raises:
        LoadError: if there is no stream, or it was interrupted, or is damaged.

    Example:
        >>> import tempfile, torch
        >>> from bendtrace.storage import ShardWriter, read_stream
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with ShardWriter(directory) as writer:
        ...         _ = writer.add("relu_1", torch.ones(2, 3).relu())
        ...     read_stream(directory)["relu_1"].read()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    directory = os.path.abspath(os.fspath(directory))
    path = os.path.join(directory, STREAM)
    marker = read_sealed(path, STREAM_FORMAT, STREAM_VERSION)
    if marker.get("state") != "closed":
        raise LoadError(directory, "a run was writing its activations there and did not finish")
    try:
        files = open_files(directory, marker["files"])
        return {name: stored_of(name, row, files) for name, row in marker["tensors"].items()}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(path, f"the file is damaged: {error}") from None
