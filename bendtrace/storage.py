"""Logs on disk: saving, loading without the model, and activations streamed to disk."""

from __future__ import annotations

from bendtrace.errors import LoadError, SaveError
from bendtrace.log.saved_logs import NotSaved, ShardWriter, StoredTensor, load, read_stream, save

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
