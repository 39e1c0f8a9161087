"""Means, variances, higher moments and covariances of a stream."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.statistic import UnitStatistic
from bendtrace.analysis.values import accumulator
from bendtrace.errors import InputError

__all__ = ["Covariance", "Mean", "Moments", "Variance"]


class _Shifted(UnitStatistic):
    """Sums of deviations from a fixed value near the data: the mean of the first rows."""

    def __init__(self) -> None:
        super().__init__()
        self._shift: Tensor | None = None  # the fixed value
        self._sums: list[Tensor] = []  # of deviations from it; of products of those from the mean

    def _take(self, rows: Tensor) -> None:
        rows = accumulator(rows)
        count, shift = rows.shape[0], self._shift
        if shift is None or self.count == 0:
            mean = rows.mean(0) if count else rows.new_zeros(rows.shape[1:])
            self._shift = shift = torch.where(mean.isfinite(), mean, 0.0)
            self._sums = [torch.zeros_like(item) for item in self._sums_of(shift[None])]
        if count:
            self._add(count, self._sums_of(rows.to(shift.device) - shift))

    def _add(self, count: int, sums: list[Tensor]) -> None:
        """Add the sums of rows whose deviations are from the same value."""
        if self.count:
            sums = [
                self._sums[0] + sums[0], *self._joined(float(self.count), float(count), sums)
            ]  # fmt: skip
        self.count, self._sums = self.count + count, sums

    def _join(self, other: Self) -> None:
        if self.count == 0 or self._shift is None or other._shift is None:
            self._take_over(other)
            return
        first, *rest = (item.to(self._shift.device) for item in other._sums)
        apart = other._shift.to(self._shift.device) - self._shift
        self._add(other.count, [first + other.count * apart, *rest])

    def _sums_of(self, away: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _joined(self, na: float, nb: float, sums: list[Tensor]) -> list[Tensor]:
        """Return the sums after the first one, for the rows so far and for more."""
        raise NotImplementedError

    @property
    def mean(self) -> Tensor:
        """The mean of each unit; nan where there was nothing."""
        shift = self._known()
        return (
            shift + self._sums[0] / self.count if self.count else torch.full_like(shift, torch.nan)
        )

    def _known(self) -> Tensor:
        if self._shift is None:
            return torch.full((), torch.nan, dtype=torch.float64)
        return self._shift


class Moments(_Shifted):
    """Mean, variance, and for `order=4` skewness and kurtosis, of each unit of a stream.

    Deviations from a fixed value near the data (the mean of the first rows) are summed in float64,
    and sums of their powers are combined by the formulae of Chan, Golub and LeVeque (Updating
    formulae and a pairwise algorithm for computing sample variances, 1979) and of Pébay (Formulas
    for robust, one-pass parallel computation of covariances and arbitrary-order statistical
    moments, 2008). So results equal those of two passes over all rows, up to rounding, however the
    rows are split into batches, and also if the mean is large and the variance small.

    A nan or an infinity in a unit has the same result as in numpy: a nan, or an infinite mean.

    Args:
        order: 1 for the mean alone, 2, or 4.
        correction: subtracted from the count in the divisor of the variance: 1 for the unbiased
            estimate, as in `torch.var`; 0 as in `numpy.var`.

    Attributes:
        count: the number of rows.

    Raises:
        InputError: the order is not one of these.

    Example:
        >>> import torch, bendtrace as bt
        >>> moments = bt.analysis.Moments()
        >>> for rows in torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]]):
        ...     moments.update(rows)
        >>> moments.mean, moments.variance()
        (tensor([3.], dtype=torch.float64), tensor([4.6667], dtype=torch.float64))
    """

    _settings = ("order",)
    _choices = ("correction",)

    def __init__(self, order: int = 2, correction: int = 1) -> None:
        super().__init__()
        if order not in (1, 2, 4):
            raise InputError(f"order={order!r}: moments are supported up to order 1, 2 or 4")
        self.order = order
        self.correction = correction

    def _sums_of(self, away: Tensor) -> list[Tensor]:
        sums = [away.sum(0)]
        if self.order > 1:
            away = away - sums[0] / away.shape[0]
            power = away * away
            sums.append(power.sum(0))
            for _ in range(2, self.order):
                power = power * away
                sums.append(power.sum(0))
        return sums

    def _joined(self, na: float, nb: float, sums: list[Tensor]) -> list[Tensor]:
        n, a, b = na + nb, self._sums, sums
        made = []
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
        return made

    def result(self) -> Any:
        """Return the count and the moments by name, as float64 with the shape of the units."""
        found: dict[str, Any] = {"count": self.count, "mean": self.mean}
        if self.order > 1:
            found["var"] = self.variance()
        if self.order == 4:
            found |= {"skew": self.skewness, "kurtosis": self.kurtosis}
        return found

    @property
    def total(self) -> Tensor:
        """The sum; 0 without rows."""
        shift = self._known()
        return torch.zeros_like(shift) if self.count == 0 else shift * self.count + self._sums[0]

    def variance(self, correction: int | None = None) -> Tensor:
        """Return the variance; nan if there are not more rows than `correction`.

        Args:
            correction: as for the constructor; None for the constructor's value.
        """
        self._require(2)
        shift, correction = self._known(), self.correction if correction is None else correction
        if self.count <= correction:
            return torch.full_like(shift, torch.nan)
        return self._sums[1].clamp(min=0) / (self.count - correction)

    @property
    def skewness(self) -> Tensor:
        """The third standardised moment, as in `scipy.stats.skew`; nan if all values are equal."""
        self._require(4)
        second = self.variance(0)
        return self._sums[2] / self.count / second**1.5 if self.count else second

    @property
    def kurtosis(self) -> Tensor:
        """The fourth standardised moment minus 3, as in `scipy.stats.kurtosis`; nan likewise."""
        self._require(4)
        second = self.variance(0)
        return self._sums[3] / self.count / second**2 - 3 if self.count else second

    def _require(self, order: int) -> None:
        if self.order < order:
            raise InputError(
                f"this needs moments of order {order}, but only order {self.order} is kept"
            )


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
        super().__init__(2, correction)

    def result(self) -> Any:
        """Return the variance."""
        return self.variance()


class Covariance(_Shifted):
    """The covariance matrix of the units of a stream, as `numpy.cov` returns for all rows.

    Rows with several dimensions are flattened. Sums are kept as in `Moments`; memory grows with the
    square of the number of units.

    Args:
        correction: subtracted from the count in the divisor.

    Attributes:
        count: the number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> covariance = bt.analysis.Covariance()
        >>> covariance.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        >>> covariance.result()
        tensor([[2., 4.],
                [4., 8.]], dtype=torch.float64)
    """

    _settings = ("correction",)

    def __init__(self, correction: int = 1) -> None:
        super().__init__()
        self.correction = correction

    def _checked(self, rows: Tensor) -> Tensor:
        units = rows.new_empty(rows.shape[1:]).numel()
        if rows.dim() and self._shape not in (None, (units,)):
            raise InputError(f"there were {self._shape[0]} units so far, but now there are {units}")
        return super()._checked(rows.reshape(rows.shape[0], units) if rows.dim() else rows)

    def _sums_of(self, away: Tensor) -> list[Tensor]:
        total = away.sum(0)
        away = away - total / away.shape[0]
        return [total, away.T @ away]

    def _joined(self, na: float, nb: float, sums: list[Tensor]) -> list[Tensor]:
        delta = sums[0] / nb - self._sums[0] / na
        return [self._sums[1] + sums[1] + torch.outer(delta, delta) * (na * nb / (na + nb))]

    @property
    def comoment(self) -> Tensor:
        """The sum of products of deviations from the mean, (units, units)."""
        return self._sums[1].clone() if self._sums else torch.zeros(())

    def result(self) -> Tensor:
        """Return the matrix, (units, units); nan if there are too few rows."""
        if self.count <= self.correction:
            return torch.full_like(self.comoment, torch.nan)
        return self.comoment / (self.count - self.correction)


class CrossCovariance:
    """The covariance between two series of vectors, accumulated in float64.

    Example:
        >>> import torch, bendtrace as bt
        >>> cross = bt.compat.torchwatcher.CrossCovariance()
        >>> cross.add(torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
        >>> cross.covariance()
        tensor([[1., 0.]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.count = 0
        self._means: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._products = torch.zeros(0)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add pairs of vectors.

        Args:
            a: (n, units), or (n, units, ...), where each position is a sample.
            b: the same with other units.

        Raises:
            InputError: they do not have the same number of samples.
        """
        one, other = _rows(a), _rows(b)
        if len(one) != len(other):
            raise InputError(f"{len(one)} samples of one and {len(other)} of the other")
        if not len(one):
            return
        means = [one.mean(0), other.mean(0)]
        centred = [one - means[0], other - means[1]]
        squares = [rows.square().sum(0) for rows in centred]
        products = centred[0].T @ centred[1]
        if not self.count:
            self.count, self._means = len(one), means
            self._squares, self._products = squares, products
            return
        total = self.count + len(one)
        apart = [new - old for new, old in zip(means, self._means, strict=True)]
        weight = self.count * len(one) / total
        self._products = self._products + products + weight * torch.outer(*apart)
        self._squares = [
            old + new + weight * far.square()
            for old, new, far in zip(self._squares, squares, apart, strict=True)
        ]
        self._means = [
            old + far * (len(one) / total) for old, far in zip(self._means, apart, strict=True)
        ]
        self.count = total

    def mean(self) -> list[Tensor]:
        """Return the means of both."""
        return list(self._means)

    def variance(self, unbiased: bool = True) -> list[Tensor]:
        """Return the variances of both."""
        return [squares / (self.count - unbiased) for squares in self._squares]

    def stdev(self, unbiased: bool = True) -> list[Tensor]:
        """Return the standard deviations of both."""
        return [variance.sqrt() for variance in self.variance(unbiased)]

    def covariance(self, unbiased: bool = True) -> Tensor:
        """Return the covariances: (units of a, units of b)."""
        return self._products / (self.count - unbiased)

    def correlation(self) -> Tensor:
        """Return the correlations: (units of a, units of b)."""
        one, other = self.stdev()
        return self.covariance() / one[:, None] / other


def _rows(values: Tensor) -> Tensor:
    rows = values.detach().double()
    if rows.dim() == 1:
        rows = rows[None]
    return rows.movedim(1, -1).reshape(-1, rows.shape[1])
