"""Quantiles of a stream, with a bound on the error that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.moments import check_same, check_shape
from bendtrace.analysis.streaming.statistic import Statistic
from bendtrace.analysis.values import accumulator
from bendtrace.errors import InputError

__all__ = ["Quantiles"]


class Quantiles(Statistic):
    """Quantiles of each unit: exact while there are fewer than `2 * size` rows, bounded after.

    Values wait in a buffer. When there are `2 * size`, they are sorted, and of each two neighbours
    one goes on to the next buffer, where it counts for both; there likewise. Whether it is the
    first or the second alternates. Taking one of two neighbours of weight w moves the rank of any
    value by at most w, and these are added up: `rank_error` is a bound that is never exceeded, not
    one that holds with some probability (Manku, Rajagopalan and Lindsay, Approximate medians and
    other quantiles in one pass and with limited memory, 1998; Agarwal et al., Mergeable summaries,
    2012). It is at most `levels / (2 * size)` of the rows, with `levels = log2(rows / size)`: 0.5%
    for a million rows and 1024, and less for large batches. At most `2 * size * levels` values are
    kept for each unit.

    The same rows in the same batches always give the same. The largest and smallest value are
    exact. A unit with a nan has nan, as with `numpy.quantile`.

    Args:
        size: how many values are kept at each level; more is more precise.

    Attributes:
        count: how many rows there were.

    Raises:
        InputError: the size is no whole number from 2 on.

    Example:
        >>> import torch, bendtrace as bt
        >>> quantiles = bt.analysis.Quantiles(size=64)
        >>> for rows in torch.arange(10000.0).reshape(100, 100):
        ...     quantiles.update(rows)
        >>> low, high = quantiles.at([0.5])[0].item() + 10000 * torch.tensor([-1, 1]) * (
        ...     quantiles.rank_error)
        >>> bool(low <= 4999.5 <= high), quantiles.at([0.0, 1.0]).tolist()
        (True, [0.0, 9999.0])
    """

    def __init__(self, size: int = 1024) -> None:
        if type(size) is not int or size < 2:
            raise InputError(f"size={size!r}: it is how many values are kept, at least 2")
        self.size = size
        self.count = 0
        self._shape: tuple[int, ...] | None = None
        self._levels: list[Tensor] = []  # `(m, *shape)`; each value counts 2**level times
        self._takes_second: list[bool] = []
        self._error = 0
        self._ends: list[Tensor] = []  # smallest, largest, whether there is a nan

    @property
    def rank_error(self) -> float:
        """By how much the rank of what is returned may be off, as a part of the rows; 0 if exact.

        At rank q there is a value whose true rank is between `q - rank_error` and `q + rank_error`.
        """
        return self._error / self.count if self.count else 0.0

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`.

        Raises:
            InputError: they are of another shape than the ones before.
        """
        check_shape(rows, self._shape)
        self._shape = tuple(rows.shape[1:])
        if rows.shape[0] == 0:
            return
        rows = accumulator(rows)
        if self._ends:
            rows = rows.to(self._ends[0].device)
        isnan = rows.isnan()
        rows = torch.where(isnan, torch.inf, rows)
        self._widen([rows.amin(0), rows.amax(0), isnan.any(0)])
        self._put(0, rows)
        self.count += rows.shape[0]
        self._compact()

    def _widen(self, ends: list[Tensor]) -> None:
        if self._ends:
            low, high, isnan = self._ends
            ends = [torch.minimum(low, ends[0]), torch.maximum(high, ends[1]), isnan | ends[2]]
        self._ends = ends

    def _put(self, level: int, values: Tensor) -> None:
        while len(self._levels) <= level:
            self._levels.append(values[:0].clone())
            self._takes_second.append(False)
        self._levels[level] = torch.cat([self._levels[level], values])

    def _compact(self) -> None:
        level = 0
        while level < len(self._levels):
            values = self._levels[level]
            if len(values) >= 2 * self.size:
                ordered = values.sort(dim=0).values
                even = len(ordered) // 2 * 2
                second = self._takes_second[level]
                self._takes_second[level] = not second
                self._levels[level] = ordered[even:].clone()
                self._put(level + 1, ordered[int(second) : even : 2])
                self._error += 2**level
            level += 1

    def merge(self, other: Self) -> None:
        """Add the rows of another one; the bounds on their errors add up, too.

        Raises:
            InputError: it is of another size, or its rows are of another shape.
        """
        check_same("size", self.size, other.size)
        if self._shape is not None and other._shape is not None:
            check_same("the shape of the units", self._shape, other._shape)
        if self._shape is None:
            self._shape = other._shape
        if not other.count:
            return
        device = (self._ends or other._ends)[0].device
        self._widen([item.to(device, copy=True) for item in other._ends])
        for level, values in enumerate(list(other._levels)):
            self._put(level, values.to(device))
        self.count += other.count
        self._error += other._error
        self._compact()

    def at(self, ranks: Sequence[float] | Tensor) -> Tensor:
        """Return the values at some ranks, `(len(ranks), *shape)`, float64; nan without rows.

        Between two values it is interpolated linearly, as `numpy.quantile` does.

        Args:
            ranks: from 0 for the smallest to 1 for the largest.

        Raises:
            InputError: a rank is outside of that.
        """
        wanted = torch.as_tensor(ranks, dtype=torch.float64).cpu()
        if wanted.dim() != 1 or not bool(((wanted >= 0) & (wanted <= 1)).all()):
            raise InputError(f"ranks are a list of numbers from 0 to 1, not {ranks!r}")
        if self.count == 0:
            return torch.full((len(wanted), *(self._shape or ())), torch.nan, dtype=torch.float64)
        values = torch.cat(self._levels)
        weights = torch.cat(
            [torch.full((len(items),), 2**level) for level, items in enumerate(self._levels)]
        )
        ordered, order = values.sort(dim=0)
        upto = weights.to(order.device)[order].cumsum(0)  # int64: exact
        place = wanted * (self.count - 1)
        part = place - place.floor()
        made = [
            _between(
                self._item(ordered, upto, int(where.floor())),
                self._item(ordered, upto, int(where.ceil())),
                float(fraction),
            )
            for where, fraction in zip(place, part, strict=True)
        ]
        found = torch.stack(made) if made else ordered[:0]
        return torch.where(self._ends[2], torch.nan, found)

    def _item(self, ordered: Tensor, upto: Tensor, number: int) -> Tensor:
        """Return the value of each unit that is the `number`-th of the sorted ones, from 0."""
        if number <= 0 or number >= self.count - 1:
            return self._ends[0 if number <= 0 else 1]
        position = (upto <= number).sum(0, keepdim=True)
        return ordered.gather(0, position)[0]

    def result(self) -> dict[str, Any]:
        """Return the quartiles, `(5, *shape)`, with smallest and largest, and the bound."""
        ranks = [0.0, 0.25, 0.5, 0.75, 1.0]
        return {"quantiles": self.at(ranks), "rank_error": self.rank_error}


def _between(low: Tensor, high: Tensor, part: float) -> Tensor:
    # Bit by bit what numpy's `quantile` gives, and no nan between two infinities.
    apart = torch.where(low == high, 0.0, high - low)
    return low + apart * part if part < 0.5 else high - apart * (1 - part)
