"""The smallest and largest values of a stream, and where they came from."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.moments import check_same, check_shape
from bendtrace.analysis.streaming.statistic import Statistic
from bendtrace.errors import InputError

__all__ = ["MinMax", "TopK"]


class MinMax(Statistic):
    """The smallest and the largest value of each unit, exactly, in the dtype of the values.

    A unit with a nan has nan, as `numpy.min` gives.

    Attributes:
        count: how many rows there were.

    Example:
        >>> import torch, bendtrace as bt
        >>> extremes = bt.analysis.MinMax()
        >>> extremes.update(torch.tensor([[1, 5], [2, 3]]))
        >>> extremes.result()
        {'min': tensor([1, 3]), 'max': tensor([2, 5])}
    """

    def __init__(self) -> None:
        self.count = 0
        self._shape: tuple[int, ...] | None = None
        self._min: Tensor | None = None
        self._max: Tensor | None = None

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`.

        Raises:
            InputError: they are of another shape than the ones before.
        """
        check_shape(rows, self._shape)
        rows = rows.detach()
        self._shape = tuple(rows.shape[1:])
        if rows.shape[0]:
            self._add(rows.amin(0), rows.amax(0), rows.shape[0])

    def _add(self, low: Tensor, high: Tensor, count: int) -> None:
        if self._min is not None and self._max is not None:
            low = torch.minimum(self._min, low.to(self._min.device))
            high = torch.maximum(self._max, high.to(self._max.device))
        self._min, self._max, self.count = low, high, self.count + count

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: its rows are of another shape.
        """
        if self._shape is not None and other._shape is not None:
            check_same("the shape of the units", self._shape, other._shape)
        if self._shape is None:
            self._shape = other._shape
        if other._min is not None and other._max is not None:
            self._add(other._min.clone(), other._max.clone(), other.count)

    def result(self) -> dict[str, Tensor]:
        """Return `min` and `max`, of the shape of the units; nan where there was nothing."""
        if self._min is None or self._max is None:
            nothing = torch.full(self._shape or (), torch.nan)
            return {"min": nothing, "max": nothing.clone()}
        return {"min": self._min.clone(), "max": self._max.clone()}


class TopK(Statistic):
    """The k largest values of each unit, exactly, with the samples that they came from.

    Of equal values those of the smaller sample number come first, then those of the smaller
    position within a sample; so what is kept depends neither on batches nor on the order of
    merging, as long as sample numbers tell the rows apart. A nan is no value here, and left out.

    Args:
        k: how many.
        largest: whether the largest, or the smallest.

    Attributes:
        count: how many rows there were.

    Raises:
        InputError: k is no positive whole number.

    Example:
        >>> import torch, bendtrace as bt
        >>> top = bt.analysis.TopK(2)
        >>> top.update(torch.tensor([[1.0], [5.0], [2.0]]))
        >>> top.update(torch.tensor([[5.0], [3.0]]))
        >>> top.result()["values"].T, top.result()["samples"].T
        (tensor([[5., 5.]]), tensor([[1, 3]]))
    """

    def __init__(self, k: int, *, largest: bool = True) -> None:
        if type(k) is not int or k < 1:
            raise InputError(f"k={k!r}: it is how many values are kept, at least 1")
        self.k = k
        self.largest = largest
        self.count = 0
        self._shape: tuple[int, ...] | None = None
        self._kept: list[Tensor] = []  # values, samples (-1 for none), positions; (<=k, units)

    def update(
        self, rows: Tensor, samples: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Take in rows.

        Args:
            rows: `(n, *shape)`.
            samples: (n,) which sample each is of, from 0 on; None for those that count on.
            positions: (n,) or `(n, *shape)`, where in its sample each is; None for 0.

        Raises:
            InputError: the shapes do not fit, or a number of a sample is negative.
        """
        check_shape(rows, self._shape)
        rows, count = rows.detach(), rows.shape[0]
        if samples is None:
            samples = torch.arange(self.count, self.count + count)
        if samples.shape != (count,) or (count and int(samples.min()) < 0):
            raise InputError(
                f"there are {count} rows, so samples= are {count} numbers from 0 on; got the shape "
                f"{tuple(samples.shape)}, the smallest {_least_of(samples)}"
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
            ordered: whether they come by samples and positions already.
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

    def merge(self, other: Self) -> None:
        """Add the rows of another one; numbers of samples mean the same in both.

        Raises:
            InputError: it keeps others, or its rows are of another shape.
        """
        check_same("k", self.k, other.k)
        check_same("largest", self.largest, other.largest)
        if self._shape is not None and other._shape is not None:
            check_same("the shape of the units", self._shape, other._shape)
        if self._shape is None:
            self._shape = other._shape
        if other._kept:
            self._add([item.clone() for item in other._kept])
        self.count += other.count

    def result(self) -> dict[str, Any]:
        """Return `values`, `samples` and `positions`, `(k, *shape)`, in order.

        There are fewer than k where there were fewer rows. Where nan left too few, values are nan,
        and the number of the sample is -1.
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


def _spread(numbers: Tensor, rows: Tensor) -> Tensor:
    return numbers.reshape(-1, *(1 for _ in rows.shape[1:])).expand(rows.shape)


def _least_of(numbers: Tensor) -> int | None:
    return int(numbers.min()) if numbers.numel() else None
