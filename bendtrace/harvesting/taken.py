"""Samples that took a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Taken"]

_SHOWN = 6


@dataclass(frozen=True)
class Taken:
    """The samples of all batches that took a path, or came out so at a branch.

    A branch on a batch is a property of the batch: whether it says something of each sample
    by itself, `per_sample` tells.

    Attributes:
        ids: the samples' ids.
        positions: where they are in the harvest: int64 of shape (samples,).
        batches: which batches these are, counted from 0: int64 of shape (batches,).
        per_sample: whether all these batches are of one sample.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def model(x):
        ...     return x.exp() if x.sum() > 0 else x
        >>> data = [torch.tensor([4.0]), torch.tensor([-0.5]), torch.tensor([2.0])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(model, data, where="exp", out=directory, progress=False)
        ...     taken = found.took("x.sum() > 0", True)
        ...     taken, taken.positions, taken.per_sample
        ...     found["exp"][taken].shape
        (<2 samples of 2 batches: 0, 2>, tensor([0, 2]), True)
        torch.Size([2])
    """

    ids: list[Any]
    positions: Tensor = field(repr=False, compare=False)
    batches: Tensor = field(repr=False, compare=False)
    per_sample: bool

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)

    def __contains__(self, sample: object) -> bool:
        return sample in self.ids

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.ids[:_SHOWN])) + ", ..." * (len(self.ids) > _SHOWN)
        many = len(self.batches)
        batches = f"{many} batch{'es' * (many != 1)}"
        return f"<{len(self.ids)} sample{'s' * (len(self.ids) != 1)} of {batches}: {shown}>"
