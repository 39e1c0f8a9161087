"""Logs on disk: saving, loading without the model, and activations streamed to disk."""

from __future__ import annotations

from bendtrace.errors import LoadError, SaveError
from bendtrace.storage.log import load, save
from bendtrace.storage.streams import NotSaved, ShardWriter, StoredTensor, read_stream

__all__ = [
    "LoadError",
    "NotSaved",
    "SaveError",
    "ShardWriter",
    "StoredTensor",
    "load",
    "read_stream",
    "save",
]
