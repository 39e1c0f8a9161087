"""What a caller can ask to be kept of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.history.capture import Capture, Store
from bendtrace.history.selection import Selection

__all__ = ["SaveOptions"]


@dataclass(frozen=True)
class SaveOptions:
    """What to keep of a run, and how.

    Attributes:
        save: "all", "none", or what `Selection` takes.
        gradients: whether to keep gradients as well.
        stop_after: after what to end the run; what `Selection` takes.
        device: where to keep values; None for where they are.
        dtype: of kept floating point values; None for their own.
        keep_graph: whether kept values stay part of the autograd graph.
        directory: where to stream kept values to; None to keep them in memory.

    Raises:
        InputError: one of them cannot be meant.
    """

    save: Any = "all"
    gradients: bool = False
    stop_after: Any = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    keep_graph: bool = False
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise InputError(f"saved values are kept in a floating point dtype, not {self.dtype!r}")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
                raise InputError(f"{self.device!r} is no device to save on: {error}") from error
        if self.keep_graph and self.directory is not None:
            raise InputError("what is streamed to a directory cannot keep its graph")
        if self.gradients and self.selection() is None:
            raise InputError(
                "gradients are kept of the values that are saved: none are, with save='none'"
            )
        if self.stop_after is not None and Selection(self.stop_after).last:
            raise InputError(
                "stop_after cannot be counted from the end, which is not known before the run is "
                f"over: {self.stop_after!r}"
            )

    def selection(self) -> Selection | bool | None:
        """Return which values to keep: True for all, None for none."""
        if self.save is None or (isinstance(self.save, str) and self.save == "none"):
            return None
        if isinstance(self.save, str) and self.save == "all":
            return True
        if isinstance(self.save, bool):
            return self.save or None
        return Selection(self.save)

    def capture(self, store: Store | None) -> Capture:
        """Return an observer that keeps what was asked for."""
        return Capture(
            self.selection(),
            stop=None if self.stop_after is None else Selection(self.stop_after),
            convert=None if self.device is None and self.dtype is None else self._convert,
            detach=not self.keep_graph,
            gradients=self.gradients,
            store=store,
        )

    def _convert(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.to(device=self.device, dtype=dtype)
