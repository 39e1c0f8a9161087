"""Logs on disk: saving, loading without the model, and activations streamed to disk."""

from __future__ import annotations

from bendtrace.errors import LoadError, SaveError
from bendtrace.storage.handles import NotSaved, StoredTensor
from bendtrace.storage.loading import load
from bendtrace.storage.saving import save
from bendtrace.storage.shards import ShardWriter
from bendtrace.storage.streams import read_stream

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
