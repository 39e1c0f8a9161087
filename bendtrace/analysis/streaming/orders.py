"""Extremes, histograms and quantiles of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace._checks import required_int
from bendtrace.analysis.streaming.statistic import UnitStatistic
from bendtrace.analysis.values import accumulator
from bendtrace.errors import InputError

__all__ = ["Histogram", "MinMax", "Quantiles", "TopK", "even_edges"]


class MinMax(UnitStatistic):
    """The smallest and the largest value of each unit, exactly, in the dtype of the values.

    A unit with a nan has nan, as in `numpy.min`.

    Attributes:
        count: the number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> extremes = bt.analysis.MinMax()
        >>> extremes.update(torch.tensor([[1, 5], [2, 3]]))
        >>> extremes.result()
        {'min': tensor([1, 3]), 'max': tensor([2, 5])}
    """

    count: int

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[Tensor] = []

    def _take(self, rows: Tensor) -> None:
        if rows.shape[0]:
            self._add([rows.amin(0), rows.amax(0)], rows.shape[0])

    def _add(self, ends: list[Tensor], count: int) -> None:
        if self._ends:
            low, high = self._ends
            ends = [
                torch.minimum(low, ends[0].to(low.device)),
                torch.maximum(high, ends[1].to(high.device)),
            ]
        self._ends, self.count = ends, self.count + count

    def _join(self, other: Self) -> None:
        self._add([item.clone() for item in other._ends], other.count)

    def result(self) -> dict[str, Tensor]:
        """Return `min` and `max`, with the shape of the units; nan without rows."""
        nothing = torch.full(self._shape or (), torch.nan)
        low, high = self._ends or (nothing, nothing)
        return {"min": low.clone(), "max": high.clone()}


class TopK(UnitStatistic):
    """The k largest values of each unit, exactly, with the samples that they came from.

    Equal values are ordered by sample number, then by position within the sample; so the kept
    values depend neither on batches nor on the order of merging, as long as sample numbers identify
    the rows. Nan is left out.

    Args:
        k: the number of values.
        largest: whether to keep the largest or the smallest values.

    Attributes:
        count: the number of rows.

    Raises:
        InputError: k is not a positive integer.

    Example:
        >>> import torch, bendtrace as bt
        >>> top = bt.analysis.TopK(2)
        >>> top.update(torch.tensor([[1.0], [5.0], [2.0]]))
        >>> top.update(torch.tensor([[5.0], [3.0]]))
        >>> top.result()["values"].T, top.result()["samples"].T
        (tensor([[5., 5.]]), tensor([[1, 3]]))
    """

    _settings = ("k", "largest")

    def __init__(self, k: int, *, largest: bool = True) -> None:
        super().__init__()
        self.k: Any = required_int("k", k, 1)
        self.largest = largest
        self._kept: list[Tensor] = []  # values, samples (-1 for none), positions; (<=k, units)

    def update(
        self, rows: Tensor, samples: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Add rows.

        Args:
            rows: `(n, *shape)`.
            samples: (n,) the sample of each row, from 0; None continues the count.
            positions: (n,) or `(n, *shape)`, the position of each within its sample; None for 0.

        Raises:
            InputError: the shapes do not fit, or a sample number is negative.
        """
        rows, count = self._checked(rows), rows.shape[0]
        if samples is None:
            samples = torch.arange(self.count, self.count + count)
        if samples.shape != (count,) or (count and int(samples.min()) < 0):
            raise InputError(
                f"there are {count} rows, so samples= has to be {count} numbers from 0; got "
                f"shape {tuple(samples.shape)}, the smallest {_least_of(samples)}"
            )
        if rows.dtype == torch.bool:
            rows = rows.to(torch.uint8)
        samples = samples.to(rows.device, torch.int64)
        if positions is None:
            positions = torch.zeros(count, dtype=torch.int64)
        positions = positions.to(rows.device, torch.int64)
        ordered = bool((samples.diff() > 0).all())
        if positions.dim() == 1:
            same = samples.diff() == 0
            ordered |= bool(((samples.diff() > 0) | same & (positions.diff() >= 0)).all())
            positions = _spread(positions, rows)
        given = [rows, _spread(samples, rows), positions]
        if rows.is_floating_point():
            isnan = rows.isnan()
            given[0] = torch.where(isnan, -torch.inf if self.largest else torch.inf, rows)
            given[1] = torch.where(isnan, -1, given[1])
        self._shape = tuple(rows.shape[1:])
        units = math.prod(self._shape)
        self._enter([item.reshape(count, units) for item in given], ordered)
        self.count += count

    def _enter(self, given: list[Tensor], ordered: bool) -> None:
        """Add rows, looking at those units alone where one of them may be among the first k.

        Args:
            given: values, samples and positions, (n, units).
            ordered: see `_best`.
        """
        values = given[0]
        kept = self._kept
        if not kept or len(kept[0]) < self.k or kept[0].dtype != values.dtype or not len(values):
            self._add(self._best(given, ordered))
            return
        last = kept[0][-1].to(values.device)
        first = values.amax(0) if self.largest else values.amin(0)
        may = first > last if self.largest else first < last
        if not bool(given[1].min() > kept[1].max()):  # an equal value of an earlier sample may
            may |= first == last
        units = (may | (kept[1][-1] < 0).to(values.device)).nonzero().flatten()
        if not len(units):
            return
        best = self._best([item[:, units] for item in given], ordered)
        units = units.to(kept[0].device)
        both = [torch.cat([a[:, units], b.to(a.device)]) for a, b in zip(kept, best, strict=True)]
        made = self._best(both, ordered=False)
        self._kept = [a.index_copy(1, units, b) for a, b in zip(kept, made, strict=True)]

    def _best(self, given: list[Tensor], ordered: bool) -> list[Tensor]:
        """Return the first k in the order that is kept.

        Args:
            given: values, samples and positions, (n, units).
            ordered: whether they are in the order of samples and positions already.
        """
        values, samples, positions = given
        # The last key counts most, since equal ones keep the order that they have in a stable sort.
        keys = [(values, self.largest), ((samples < 0).to(torch.uint8), False)]
        if not ordered:
            keys = [(positions, False), (samples, False), *keys]
        order: Tensor | None = None
        for key, descending in keys:
            key = key if order is None else key.gather(0, order)
            step = key.sort(dim=0, descending=descending, stable=True).indices
            order = step if order is None else order.gather(0, step)
        chosen = order[: self.k] if order is not None else samples
        return [item.gather(0, chosen) for item in given]

    def _add(self, best: list[Tensor]) -> None:
        if self._kept:
            device = self._kept[0].device
            dtype = torch.promote_types(self._kept[0].dtype, best[0].dtype)
            pairs = zip(self._kept, best, strict=True)
            both = [torch.cat([mine, theirs.to(device)]) for mine, theirs in pairs]
            best = self._best([both[0].to(dtype), *both[1:]], ordered=False)
        self._kept = best

    def _join(self, other: Self) -> None:
        self._add([item.clone() for item in other._kept])
        self.count += other.count

    def result(self) -> dict[str, Any]:
        """Return `values`, `samples` and `positions`, `(k, *shape)`, in order.

        There are fewer than k if there were fewer rows. If nan leaves too few, the missing values
        are nan, with the sample number -1.
        """
        if not self._kept:
            shape = (0, *(self._shape or ()))
            empty = torch.zeros(shape, dtype=torch.int64)
            return {"values": torch.zeros(shape), "samples": empty, "positions": empty.clone()}
        values, samples, positions = (
            item.reshape(len(item), *(self._shape or ())) for item in self._kept
        )
        if values.is_floating_point():
            values = torch.where(samples < 0, torch.nan, values)
        return {
            "values": values.clone(),
            "samples": samples.clone(),
            "positions": torch.where(samples < 0, -1, positions),
        }


def even_edges(bins: int, low: float, high: float) -> Tensor:
    """Return the edges of bins of equal width, (bins + 1,), as `numpy.linspace` does.

    Raises:
        InputError: there are no bins, or they have no width.

    Example:
        >>> even_edges(2, 0.0, 1.0)
        tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    if type(bins) is not int or bins < 1 or not low < high or not math.isfinite(high - low):
        raise InputError(
            f"{bins!r} bins from {low!r} to {high!r}: at least one bin with a positive width is "
            "needed"
        )
    edges = torch.arange(bins + 1, dtype=torch.float64) * ((high - low) / bins) + low
    edges[-1] = high
    return edges


class Histogram(UnitStatistic):
    """The number of values of each unit in each bin, as integers, as in `numpy.histogram`.

    A bin includes its lower edge but not its upper one; only the last one includes both. Values
    outside are counted as `below` and `above` (including infinities), and nan as `nan`.

    Args:
        edges: (bins + 1,), ascending.

    Attributes:
        count: the number of rows.

    Raises:
        InputError: the edges are not ascending, or not finite.

    Example:
        >>> import torch, bendtrace as bt
        >>> histogram = bt.analysis.Histogram([0.0, 1.0, 2.0])
        >>> histogram.update(torch.tensor([0.0, 1.0, 2.0, -3.0, float("nan")]))
        >>> histogram.result()["counts"], histogram.result()["below"]
        (tensor([1, 2]), tensor(1))
    """

    _settings = ("edges",)

    def __init__(self, edges: Tensor | Sequence[float]) -> None:
        super().__init__()
        found = torch.as_tensor(edges, dtype=torch.float64).detach().cpu().clone()
        if found.dim() != 1 or len(found) < 2 or not found.isfinite().all():
            raise InputError(f"edges= has to be at least two finite numbers, not {edges!r}")
        if not bool((found.diff() > 0).all()):
            raise InputError(f"edges= have to be ascending: {edges!r}")
        self.edges = found
        self._counts: Tensor | None = None  # (units, bins + 3): below, bins, above, nan

    def _take(self, rows: Tensor) -> None:
        bins, count = len(self.edges) - 1, rows.shape[0]
        units = rows.new_empty(rows.shape[1:]).numel()
        device = torch.device("cpu") if rows.device.type == "mps" else rows.device
        values = rows.to(device, torch.float64).reshape(count, units).contiguous()
        edges = self.edges.to(device)
        places = torch.searchsorted(edges, values, right=True)
        places = torch.where(values == edges[-1], bins, places)
        places = torch.where(values.isnan(), bins + 2, places)
        places += torch.arange(units, device=device) * (bins + 3)
        found = torch.bincount(places.flatten(), minlength=units * (bins + 3))
        self._add(found.reshape(units, bins + 3), count)

    def _add(self, counts: Tensor, count: int) -> None:
        known = self._counts
        self._counts = counts if known is None else known + counts.to(known.device)
        self.count += count

    def _join(self, other: Self) -> None:
        if other._counts is not None:
            self._add(other._counts.clone(), other.count)

    def result(self) -> dict[str, Any]:
        """Return `counts`, `(bins, *shape)`, `below`, `above` and `nan`, `(*shape)`, all int64."""
        shape, bins = self._shape or (), len(self.edges) - 1
        if self._counts is None:
            found = torch.zeros((bins + 3,), dtype=torch.int64)
        else:
            found = self._counts.T.reshape(bins + 3, *shape)
        return {
            "counts": found[1 : bins + 1].clone(),
            "below": found[0].clone(),
            "above": found[bins + 1].clone(),
            "nan": found[bins + 2].clone(),
        }


class Quantiles(UnitStatistic):
    """Quantiles of each unit: exact below `2 * size` rows, with a bounded error after.

    Values are collected in a buffer. When there are `2 * size`, they are sorted, and one of every
    two neighbours moves to the next buffer, where it counts for both, and so on. Whether it is the
    first or the second alternates. Taking one of two neighbours of weight w moves the rank of any
    value by at most w, and these errors are summed: `rank_error` is a bound that is never exceeded,
    not one that holds with some probability (Manku, Rajagopalan and Lindsay, Approximate medians
    and other quantiles in one pass and with limited memory, 1998; Agarwal et al., Mergeable
    summaries, 2012). It is at most `levels / (2 * size)` of the rows, with `levels = log2(rows /
    size)`: 0.5% for a million rows and 1024, and less for large batches. At most `2 * size *
    levels` values are kept for each unit.

    The same rows in the same batches always have the same results. The largest and smallest value
    are exact. A unit with a nan has nan, as in `numpy.quantile`.

    Args:
        size: how many values are kept at each level; more is more precise.

    Attributes:
        count: the number of rows.

    Raises:
        InputError: the size is not an integer of at least 2.

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

    _settings = ("size",)

    def __init__(self, size: int = 1024) -> None:
        super().__init__()
        self.size: Any = required_int("size", size, 2)
        self._levels: list[Tensor] = []  # `(m, *shape)`; each value counts 2**level times
        self._takes_second: list[bool] = []
        self._error = 0
        self._ends: list[Tensor] = []  # smallest, largest, whether there is a nan

    @property
    def rank_error(self) -> float:
        """The bound on the error of the rank of a result, as a fraction of the rows; 0 if exact.

        The value returned for rank q has a true rank between `q - rank_error` and `q + rank_error`.
        """
        return self._error / self.count if self.count else 0.0

    def _take(self, rows: Tensor) -> None:
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

    def _join(self, other: Self) -> None:
        device = (self._ends or other._ends)[0].device
        self._widen([item.to(device, copy=True) for item in other._ends])
        for level, values in enumerate(list(other._levels)):
            self._put(level, values.to(device))
        self.count += other.count
        self._error += other._error
        self._compact()

    def at(self, ranks: Sequence[float] | Tensor) -> Tensor:
        """Return the values at some ranks, `(len(ranks), *shape)`, float64; nan without rows.

        Values between two others are interpolated linearly, as in `numpy.quantile`.

        Args:
            ranks: from 0 for the smallest to 1 for the largest.

        Raises:
            InputError: a rank is outside 0 to 1.
        """
        wanted = torch.as_tensor(ranks, dtype=torch.float64).cpu()
        if wanted.dim() != 1 or not bool(((wanted >= 0) & (wanted <= 1)).all()):
            raise InputError(f"ranks have to be a list of numbers from 0 to 1, not {ranks!r}")
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
        """Return the quartiles, `(5, *shape)`, including smallest and largest, and the bound."""
        ranks = [0.0, 0.25, 0.5, 0.75, 1.0]
        return {"quantiles": self.at(ranks), "rank_error": self.rank_error}


def _between(low: Tensor, high: Tensor, part: float) -> Tensor:
    # Bit by bit what numpy's `quantile` gives, and no nan between two infinities.
    apart = torch.where(low == high, 0.0, high - low)
    return low + apart * part if part < 0.5 else high - apart * (1 - part)


def _spread(numbers: Tensor, rows: Tensor) -> Tensor:
    return numbers.reshape(-1, *(1 for _ in rows.shape[1:])).expand(rows.shape)


def _least_of(numbers: Tensor) -> int | None:
    return int(numbers.min()) if numbers.numel() else None
