"""Counts, means, variances, higher moments and covariances of a stream."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.statistic import Statistic
from bendtrace.analysis.values import accumulator
from bendtrace.errors import InputError

__all__ = ["Covariance", "Mean", "Moments", "Tally", "Variance", "check_shape"]


def check_shape(rows: Tensor, shape: tuple[int, ...] | None) -> None:
    """Refuse rows that are not like those before.

    Raises:
        InputError: they are of another shape.
    """
    if rows.dim() == 0:
        raise InputError("rows have a dimension that counts them: give (n, *shape)")
    if shape is not None and tuple(rows.shape[1:]) != shape:
        raise InputError(
            f"so far there was a statistic for each of {shape}, now there are values for each of "
            f"{tuple(rows.shape[1:])}: keep only dimensions that stay the same, keep=-1 or keep=()"
        )


def check_same(name: str, mine: Any, theirs: Any) -> None:
    """Refuse to merge what was made otherwise.

    Raises:
        InputError: the two differ.
    """
    if mine != theirs:
        raise InputError(f"{name} is {mine} here and {theirs} there: these cannot be merged")


class Moments(Statistic):
    """Mean, variance, and for `order=4` skewness and kurtosis, of each unit of a stream.

    Deviations from a fixed value near the data (the mean of the first rows) are added up in
    float64, and sums of their powers are joined by the formulae of Chan, Golub and LeVeque
    (Updating formulae and a pairwise algorithm for computing sample variances, 1979) and of Pébay
    (Formulas for robust, one-pass parallel computation of covariances and arbitrary-order
    statistical moments, 2008). So results are those of two passes over all rows, up to rounding,
    however the rows come in batches, and also where the mean is large and the variance small.

    A nan or an infinity in a unit gives what numpy gives: a nan, or an infinite mean.

    Args:
        order: 1 for the mean alone, 2, or 4.

    Attributes:
        count: how many rows there were.

    Raises:
        InputError: another order.

    Example:
        >>> import torch, bendtrace as bt
        >>> moments = bt.analysis.Moments()
        >>> for rows in torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]]):
        ...     moments.update(rows)
        >>> moments.mean, moments.variance()
        (tensor([3.], dtype=torch.float64), tensor([4.6667], dtype=torch.float64))
    """

    def __init__(self, order: int = 2) -> None:
        if order not in (1, 2, 4):
            raise InputError(f"order={order!r}: moments are kept up to order 1, 2 or 4")
        self.order = order
        self.count = 0
        self._shift: Tensor | None = None  # what deviations are from
        self._sums: list[Tensor] = []  # of deviations; of powers 2 to `order` of them from the mean

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the units; None before the first rows."""
        return None if self._shift is None else tuple(self._shift.shape)

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`.

        Raises:
            InputError: they are of another shape than the ones before.
        """
        check_shape(rows, self.shape)
        count = rows.shape[0]
        rows = accumulator(rows)
        shift = self._shift
        if shift is None or self.count == 0:
            shift = _finite(rows.mean(0)) if count else rows.new_zeros(rows.shape[1:])
            self._shift, self._sums = shift, [torch.zeros_like(shift) for _ in range(self.order)]
        if count:
            self._add(count, self._sums_of(rows.to(shift.device) - shift))

    def _sums_of(self, away: Tensor) -> list[Tensor]:
        sums = [away.sum(0)]
        if self.order > 1:
            away -= sums[0] / away.shape[0]
            power = away * away
            sums.append(power.sum(0))
            for _ in range(2, self.order):
                power = power * away
                sums.append(power.sum(0))
        return sums

    def _add(self, count: int, sums: list[Tensor]) -> None:
        """Add the sums of rows whose deviations are from the same value."""
        if self.count == 0:
            self.count, self._sums = count, sums
            return
        na, nb, n = float(self.count), float(count), float(self.count + count)
        a, b = self._sums, sums
        made = [a[0] + b[0]]
        if self.order > 1:
            delta = b[0] / nb - a[0] / na
            made.append(a[1] + b[1] + delta**2 * (na * nb / n))
        if self.order == 4:
            made.append(
                a[2] + b[2]
                + delta**3 * (na * nb * (na - nb) / n**2)
                + 3 * delta * (na * b[1] - nb * a[1]) / n
            )  # fmt: skip
            made.append(
                a[3] + b[3]
                + delta**4 * (na * nb * (na * na - na * nb + nb * nb) / n**3)
                + 6 * delta**2 * (na * na * b[1] + nb * nb * a[1]) / n**2
                + 4 * delta * (na * b[2] - nb * a[2]) / n
            )  # fmt: skip
        self.count, self._sums = self.count + count, made

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: it is of another order, or its rows are of another shape.
        """
        check_same("order", self.order, other.order)
        if other._shift is None:
            return
        if self._shift is not None:
            check_same("the shape of the units", self.shape, other.shape)
        if self.count == 0:
            self.load_state_dict(other.state_dict())
            return
        assert self._shift is not None  # for the type checker
        if other.count:
            sums = [item.to(self._shift.device) for item in other._sums]
            apart = other._shift.to(self._shift.device) - self._shift
            self._add(other.count, [sums[0] + other.count * apart, *sums[1:]])

    def result(self) -> dict[str, Any]:
        """Return the count and the moments by name, as float64 of the shape of the units."""
        found: dict[str, Any] = {"count": self.count, "mean": self.mean}
        if self.order > 1:
            found["var"] = self.variance()
        if self.order == 4:
            found |= {"skew": self.skewness, "kurtosis": self.kurtosis}
        return found

    @property
    def mean(self) -> Tensor:
        """The mean; nan where there was nothing."""
        shift = self._known()
        if self.count == 0:
            return torch.full_like(shift, torch.nan)
        return shift + self._sums[0] / self.count

    @property
    def total(self) -> Tensor:
        """The sum; 0 where there was nothing."""
        shift = self._known()
        return torch.zeros_like(shift) if self.count == 0 else shift * self.count + self._sums[0]

    def variance(self, correction: int = 1) -> Tensor:
        """Return the variance; nan where there are not more rows than `correction`.

        Args:
            correction: what is taken from the count before dividing by it: 1 for the estimate
                without bias, as `torch.var`; 0 as `numpy.var`.
        """
        self._require(2)
        shift = self._known()
        if self.count <= correction:
            return torch.full_like(shift, torch.nan)
        return self._sums[1].clamp(min=0) / (self.count - correction)

    @property
    def skewness(self) -> Tensor:
        """The third standardised moment, as `scipy.stats.skew`; nan where all is one value."""
        self._require(4)
        second = self.variance(correction=0)
        return self._sums[2] / self.count / second**1.5 if self.count else second

    @property
    def kurtosis(self) -> Tensor:
        """The fourth standardised moment less 3, as `scipy.stats.kurtosis`; nan likewise."""
        self._require(4)
        second = self.variance(correction=0)
        return self._sums[3] / self.count / second**2 - 3 if self.count else second

    def _require(self, order: int) -> None:
        if self.order < order:
            raise InputError(f"this needs moments of order {order}, kept are {self.order}")

    def _known(self) -> Tensor:
        if self._shift is None:
            return torch.full((), torch.nan, dtype=torch.float64)
        return self._shift


class Mean(Moments):
    """The mean of each unit.

    Example:
        >>> import torch, bendtrace as bt
        >>> mean = bt.analysis.Mean()
        >>> mean.update(torch.tensor([[1, 4], [3, 4]]))
        >>> mean.result()
        tensor([2., 4.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        super().__init__(order=1)

    def result(self) -> Any:
        """Return the mean."""
        return self.mean


class Variance(Moments):
    """The variance of each unit.

    Args:
        correction: see `Moments.variance`.

    Example:
        >>> import torch, bendtrace as bt
        >>> variance = bt.analysis.Variance()
        >>> variance.update(torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64))
        >>> variance.result()
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, correction: int = 1) -> None:
        super().__init__(order=2)
        self.correction = correction

    def result(self) -> Any:
        """Return the variance."""
        return self.variance(self.correction)


class Covariance(Statistic):
    """The covariance matrix of the units of a stream, as `numpy.cov` of all of it.

    Rows of several dimensions are taken as flat. Sums are kept as by `Moments`; memory grows with
    the square of the number of units.

    Args:
        correction: what is taken from the count before dividing by it.

    Attributes:
        count: how many rows there were.

    Example:
        >>> import torch, bendtrace as bt
        >>> covariance = bt.analysis.Covariance()
        >>> covariance.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        >>> covariance.result()
        tensor([[2., 4.],
                [4., 8.]], dtype=torch.float64)
    """

    def __init__(self, correction: int = 1) -> None:
        self.correction = correction
        self.count = 0
        self._shift: Tensor | None = None
        self._sum = self._products = torch.zeros(())

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`.

        Raises:
            InputError: they have another number of units than the ones before.
        """
        if rows.dim() == 0:
            raise InputError("rows have a dimension that counts them: give (n, *shape)")
        count = rows.shape[0]
        units = rows.new_empty(rows.shape[1:]).numel()
        shift = self._shift
        if shift is not None and units != shift.shape[0]:
            raise InputError(f"so far there were {shift.shape[0]} units, now there are {units}")
        rows = accumulator(rows).reshape(count, units)
        if shift is None or self.count == 0:
            shift = _finite(rows.mean(0)) if count else rows.new_zeros(units)
            self._shift, self._sum = shift, torch.zeros_like(shift)
            self._products = rows.new_zeros(units, units)
        if count:
            away = rows.to(shift.device) - shift
            total = away.sum(0)
            away -= total / count
            self._add(count, total, away.T @ away)

    def _add(self, count: int, total: Tensor, products: Tensor) -> None:
        if self.count:
            delta = total / count - self._sum / self.count
            weight = float(self.count) * count / (self.count + count)
            products = self._products + products + torch.outer(delta, delta) * weight
        self._sum, self._products, self.count = self._sum + total, products, self.count + count

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: it has another number of units, or another correction.
        """
        check_same("correction", self.correction, other.correction)
        if other._shift is None:
            return
        if self._shift is not None:
            check_same("the number of units", self._shift.shape[0], other._shift.shape[0])
        if self.count == 0:
            self.load_state_dict(other.state_dict())
        elif other.count and self._shift is not None:
            device = self._shift.device
            apart = other._shift.to(device) - self._shift
            total = other._sum.to(device) + other.count * apart
            self._add(other.count, total, other._products.to(device))

    @property
    def mean(self) -> Tensor:
        """The mean of the units, (units,); nan where there was nothing."""
        if self._shift is None or self.count == 0:
            return torch.full_like(self._sum, torch.nan)
        return self._shift + self._sum / self.count

    @property
    def comoment(self) -> Tensor:
        """The sum of products of deviations from the mean, (units, units)."""
        return self._products.clone()

    def result(self) -> Tensor:
        """Return the matrix, (units, units); nan where there are too few rows."""
        if self.count <= self.correction:
            return torch.full_like(self._products, torch.nan)
        return self._products / (self.count - self.correction)


class Tally(Statistic):
    """For how many rows something is true, for each unit, as whole numbers.

    Attributes:
        count: how many rows there were.

    Example:
        >>> import torch, bendtrace as bt
        >>> tally = bt.analysis.Tally()
        >>> tally.update(torch.tensor([[True, False], [True, True]]))
        >>> tally.result()
        tensor([2, 1])
    """

    def __init__(self) -> None:
        self.count = 0
        self._true: Tensor | None = None

    def update(self, rows: Tensor) -> None:
        """Take in rows of truth values, `(n, *shape)`.

        Raises:
            InputError: they are of another shape than the ones before.
        """
        check_shape(rows, None if self._true is None else tuple(self._true.shape))
        found = rows.to(torch.bool).sum(0)  # int64
        self._true = found if self._true is None else self._true + found.to(self._true.device)
        self.count += rows.shape[0]

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: its rows are of another shape.
        """
        if other._true is None:
            return
        if self._true is not None:
            check_same("the shape of the units", tuple(self._true.shape), tuple(other._true.shape))
            self._true = self._true + other._true.to(self._true.device)
        else:
            self._true = other._true.clone()
        self.count += other.count

    def result(self) -> Tensor:
        """Return for how many rows it was true, int64 of the shape of the units."""
        return torch.zeros((), dtype=torch.int64) if self._true is None else self._true.clone()


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)
