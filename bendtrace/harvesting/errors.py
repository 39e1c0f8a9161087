"""What can go wrong while a data set is harvested."""

from __future__ import annotations

from typing import Any

from bendtrace.errors import BendtraceError

__all__ = ["HarvestError"]


class HarvestError(BendtraceError, RuntimeError):
    """A batch could not be harvested. What was done before is safe, and is gone on from.

    The error that the model, or a function that was given, has raised is its `__cause__`.

    Attributes:
        batch: number of the batch, counted from 0.
        ids: its samples; empty where the ids themselves could not be told.
    """

    def __init__(self, message: str, batch: int, ids: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.batch = batch
        self.ids = ids
