"""Values of a run that later visits need not compute again, within a budget of memory."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor

from bendtrace.history.copies import lazily_copied

__all__ = ["Kept"]


class Kept:
    """Values by op. Where there are too many, those go that are the quickest to compute again.

    Args:
        budget: how many bytes they may take.

    Attributes:
        nbytes: how many bytes they take.
    """

    nbytes: int

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._values: dict[int, Any] = {}
        self._views: set[int] = set()  # those that torch takes for views, as a linear layer's
        self._ranks: list[tuple[float, int]] = []  # a heap: the time that a byte saves, and the op

    def __contains__(self, index: object) -> bool:
        return index in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, index: int) -> Any:
        """Return a copy of a value that nobody else writes to."""
        value = self._values[index]
        if not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunction():
            copy = lazily_copied(value)
            return copy.view_as(copy) if index in self._views else copy

    def add(self, index: int, value: Any, nanoseconds: int) -> None:
        """Keep a value as it is now, if it is worth its memory."""
        size = _size(value)
        if index in self._values or size > self.budget:
            return
        with torch._C.DisableTorchFunction():
            if isinstance(value, Tensor):
                if value._base is not None:
                    self._views.add(index)
                value = lazily_copied(value)
        self._values[index] = value
        self.nbytes += size
        heapq.heappush(self._ranks, (nanoseconds / max(size, 1), index))
        while self.nbytes > self.budget:
            _, last = heapq.heappop(self._ranks)
            self.nbytes -= _size(self._values.pop(last))
            self._views.discard(last)

    def forget(self, index: int) -> None:
        """Forget the values of an op and all later ones."""
        for later in [each for each in self._values if each >= index]:
            self.nbytes -= _size(self._values.pop(later))
        self._views.intersection_update(self._values)
        self._ranks = [rank for rank in self._ranks if rank[1] in self._values]
        heapq.heapify(self._ranks)


class Handed(dict[int, Any]):
    """The kept values as a recorder takes them: each is copied when it is asked for."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __contains__(self, index: object) -> bool:
        return index in self._kept

    def __getitem__(self, index: int) -> Any:
        return self._kept.get(index)


def _size(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
