"""Units that are never active."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from bendtrace.analysis.analyser import Batch
from bendtrace.analysis.features import UnitAnalyser
from bendtrace.analysis.streaming.moments import Tally
from bendtrace.analysis.values import Keep, rows_of
from bendtrace.errors import InputError

__all__ = ["DeadReLU"]


class DeadReLU(UnitAnalyser):
    """Which units are never active over all the data: those of a ReLU, or any other activation.

    A unit is active where its value is above the threshold; a nan counts as active, since such a
    unit is not silent but broken. The results are `count` (rows), `active` (for how many of them
    each unit was, int64), `dead` (whether it never was), `dead_count` and `dead_share`. What was
    never seen is not dead.

    Args:
        threshold: 0 for a ReLU; a little above 0 for GELU and the like.
        keep: which dimensions are units: see `UnitAnalyser`. With 1 a channel of a convolution is
            dead if it is so at all positions, with `"units"` each position counts for itself.
        per_pass: see `Analyser`.

    Raises:
        InputError: the threshold is no number.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.ReLU())
        >>> dead = bt.analysis.DeadReLU()
        >>> with bended.interject("relu", dead):
        ...     for x in (torch.tensor([[1.0, -1.0]]), torch.tensor([[-2.0, -3.0]])):
        ...         _ = bended(x)
        >>> dead.to_dict()["relu"]["active"], dead.to_dict()["relu"]["dead"]
        ([1, 0], [False, True])
    """

    def __init__(self, *, threshold: float = 0.0, keep: Keep = 1, per_pass: bool = False) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        if not isinstance(threshold, (int, float)) or math.isnan(threshold):
            raise InputError(f"threshold={threshold!r}: a number that active values are above")
        self.threshold = threshold

    def start(self, key: str) -> Any:
        """Return how often each unit was active."""
        return Tally()

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(~(rows_of(value, self.keep) <= self.threshold))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return how often each unit was active, and which never were."""
        active = state.result()
        dead = (active == 0) & (state.count > 0)
        count = int(dead.sum())
        return {
            "count": state.count,
            "active": active,
            "dead": dead,
            "dead_count": count,
            "dead_share": count / dead.numel() if dead.numel() else 0.0,
        }
