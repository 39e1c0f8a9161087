"""Statistics of a stream: they add rows, merge, save, and have a result."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.log.nodes import identifier
from bendtrace.python.checks import required_int
from bendtrace.python.lazy import required_pandas
from bendtrace.tape.scalars import TRACED, plain

if TYPE_CHECKING:
    import pandas


class Statistic:
    """A statistic of a stream of rows, in memory that does not grow with the stream.

    Subclasses keep their state in attributes that are tensors, numbers, strings, None, or lists,
    tuples and dicts of these, and override `update`, `merge` and `result`. They check their
    arguments before they change anything.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Largest(bt.analysis.Statistic):
        ...     def __init__(self):
        ...         self.value = float("-inf")
        ...     def update(self, rows):
        ...         self.value = max([self.value, *rows.flatten().tolist()])
        ...     def merge(self, other):
        ...         self.value = max(self.value, other.value)
        ...     def result(self):
        ...         return self.value
        >>> largest = Largest()
        >>> largest.update(torch.tensor([1.0, 3.0]))
        >>> largest.update(torch.tensor([2.0]))
        >>> largest.result()
        3.0
    """

    _kinds: ClassVar[dict[str, type[Statistic]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Statistic._kinds[f"{cls.__module__}.{cls.__qualname__}"] = cls

    def update(self, rows: Tensor) -> None:
        """Add rows.

        Args:
            rows: `(n, *shape)`; one row for each sample; n may be 0.
        """
        raise NotImplementedError

    def merge(self, other: Self) -> None:
        """Add the rows of another statistic of the same kind and settings.

        Raises:
            InputError: it cannot be merged.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """Return the statistic."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, None, and containers of these."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.result()!r})"


class UnitStatistic(Statistic):
    """A statistic of each unit, for rows of one shape.

    Subclasses name their settings in `_settings`, those that only the result depends on in
    `_choices`, add rows of the right shape in `_take`, and merge another non-empty statistic in
    `_join`.
    """

    _settings: ClassVar[tuple[str, ...]] = ()
    _choices: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.count: int = 0
        self._shape: tuple[int, ...] | None = None

    def update(self, rows: Tensor) -> None:
        """Add rows, `(n, *shape)`.

        Raises:
            InputError: their shape differs from the shape of earlier rows.
        """
        rows = self._checked(rows)
        self._shape = tuple(rows.shape[1:])
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        raise NotImplementedError

    def _checked(self, rows: Tensor) -> Tensor:
        if rows.dim() == 0:
            raise InputError("rows need a dimension that counts them: pass (n, *shape)")
        shape = tuple(rows.shape[1:])
        if self._shape is not None and shape != self._shape:
            raise InputError(
                f"the statistic has units of shape {self._shape} so far, but these values have "
                f"{shape}: keep only dimensions whose sizes stay the same, such as keep=-1 or "
                "keep=()"
            )
        return rows.detach()

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: it has other settings, or its rows have another shape.
        """
        for name in self._settings:
            self._require_same(name, getattr(self, name), getattr(other, name))
        if self._shape is not None and other._shape is not None:
            self._require_same("the shape of the units", self._shape, other._shape)
        if other._shape is not None:
            if self._shape is None:
                self._take_over(other)
            elif other.count:
                self._join(other)

    def _take_over(self, other: Self) -> None:
        """Take the rows of another one in place of none."""
        own = {name: getattr(self, name) for name in self._choices}
        self.load_state_dict(other.state_dict())
        vars(self).update(own)

    def _require_same(self, name: str, mine: Any, theirs: Any) -> None:
        if isinstance(mine, Tensor):
            mine, theirs = mine.tolist(), theirs.tolist()
        if mine != theirs:
            raise InputError(f"{name} is {mine} here and {theirs} there: the two cannot be merged")

    def _join(self, other: Self) -> None:
        raise NotImplementedError


class Count(Statistic):
    """The number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> count = bt.analysis.Count()
        >>> count.update(torch.zeros(3, 2))
        >>> count.result()
        3
    """

    count: int

    def __init__(self) -> None:
        self.count: int = 0

    def update(self, rows: Tensor) -> None:
        """Add rows, `(n, *shape)`."""
        self.count += rows.shape[0]

    def merge(self, other: Self) -> None:
        """Add another count."""
        self.count += other.count

    def result(self) -> int:
        """Return the number of rows."""
        return self.count


class Tally(UnitStatistic):
    """The number of true rows of each unit, as integers.

    Attributes:
        count: the number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> tally = bt.analysis.Tally()
        >>> tally.update(torch.tensor([[True, False], [True, True]]))
        >>> tally.result()
        tensor([2, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self._true: Tensor | None = None

    def _take(self, rows: Tensor) -> None:
        self._add(rows.to(torch.bool).sum(0), rows.shape[0])  # int64

    def _add(self, found: Tensor, count: int) -> None:
        total = self._true
        self._true = found if total is None else total + found.to(total.device)
        self.count += count

    def _join(self, other: Self) -> None:
        if other._true is not None:
            self._add(other._true, other.count)

    def result(self) -> Tensor:
        """Return the number of true rows, int64 with the shape of the units."""
        return torch.zeros((), dtype=torch.int64) if self._true is None else self._true.clone()


def merge_states(state: Any, other: Any) -> None:
    """Merge a state into another one: a statistic, or a dict or list of such states."""
    if type(state) is not type(other):
        raise InputError(
            f"a {type(other).__name__} cannot be added to a {type(state).__name__}: states "
            "need the same type"
        )
    if isinstance(state, Statistic):
        state.merge(other)
    elif isinstance(state, dict):
        for key, item in other.items():
            if key in state:
                merge_states(state[key], item)
            else:
                state[key] = copy.deepcopy(item)
    elif isinstance(state, (list, tuple)) and len(state) == len(other):
        for one, another in zip(state, other, strict=True):
            merge_states(one, another)
    else:
        raise InputError(
            f"cannot merge a {type(state).__name__}: keep a `Statistic` in the state, or "
            "override `merge_state`"
        )


def encode_state(state: Any) -> Any:
    """Return a state as plain containers of tensors and numbers, which `torch.load` accepts.

    Example:
        >>> encode_state({"seen": Count()})
        {'items': [('seen', {'statistic': 'bendtrace.research.streaming.Count',
        'values': {'count': 0}})]}
    """
    if isinstance(state, Statistic):
        cls = type(state)
        name = f"{cls.__module__}.{cls.__qualname__}"
        return {"statistic": name, "values": state.state_dict()}
    if isinstance(state, dict):
        return {"items": [(key, encode_state(item)) for key, item in state.items()]}
    if isinstance(state, (list, tuple)):
        return {"list": [encode_state(item) for item in state]}
    return {"value": state.clone() if isinstance(state, Tensor) else state}


def decode_state(plain: Any) -> Any:
    """Return the state that `encode_state` received; tuples come back as lists.

    Example:
        >>> decode_state(encode_state([Count()]))
        [Count(0)]
    """
    if "statistic" in plain:
        kind = Statistic._kinds.get(plain["statistic"])
        if kind is None:
            raise InputError(
                f"unknown kind of statistic, {plain['statistic']}: import the module that "
                "defines it"
            )
        made = kind.__new__(kind)
        made.load_state_dict(plain["values"])
        return made
    if "items" in plain:
        return {key: decode_state(item) for key, item in plain["items"]}
    if "list" in plain:
        return [decode_state(item) for item in plain["list"]]
    value = plain["value"]
    return value.clone() if isinstance(value, torch.Tensor) else value


# Means, variances, higher moments and covariances of a stream.


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
        shift = self._shift_or_nan()
        return (
            shift + self._sums[0] / self.count if self.count else torch.full_like(shift, torch.nan)
        )

    def _shift_or_nan(self) -> Tensor:
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
        shift = self._shift_or_nan()
        return torch.zeros_like(shift) if self.count == 0 else shift * self.count + self._sums[0]

    def variance(self, correction: int | None = None) -> Tensor:
        """Return the variance; nan if there are not more rows than `correction`.

        Args:
            correction: as for the constructor; None for the constructor's value.
        """
        self._require(2)
        shift = self._shift_or_nan()
        correction = self.correction if correction is None else correction
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
        self.count: int = 0
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
        one, other = _matrix_of(a), _matrix_of(b)
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


def _matrix_of(values: Tensor) -> Tensor:
    rows = values.detach().double()
    if rows.dim() == 1:
        rows = rows[None]
    return rows.movedim(1, -1).reshape(-1, rows.shape[1])


# Extremes, histograms and quantiles of a stream.


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
            least = int(samples.min()) if samples.numel() else None
            raise InputError(
                f"there are {count} rows, so samples= has to be {count} numbers from 0; got "
                f"shape {tuple(samples.shape)}, the smallest {least}"
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
            positions = _expand_to(positions, rows)
        given = [rows, _expand_to(samples, rows), positions]
        if rows.is_floating_point():
            isnan = rows.isnan()
            given[0] = torch.where(isnan, -torch.inf if self.largest else torch.inf, rows)
            given[1] = torch.where(isnan, -1, given[1])
        self._shape = tuple(rows.shape[1:])
        units = math.prod(self._shape)
        self._enter([item.reshape(count, units) for item in given], ordered)
        self.count += count

    def _enter(self, given: list[Tensor], ordered: bool) -> None:
        """Add (n, units) each, looking at those units alone where one may be among the first k."""
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
        """Return the first k; `ordered` says that samples and positions are in order already."""
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
        total = self._counts
        self._counts = counts if total is None else total + counts.to(total.device)
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
    two neighbours moves to the next buffer, where it counts for both, and so on: the first and the
    second by turns. Taking one of two neighbours of weight w moves the rank of any
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
            _interpolate(
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


def _interpolate(low: Tensor, high: Tensor, part: float) -> Tensor:
    # Bit by bit what numpy's `quantile` gives, and no nan between two infinities.
    apart = torch.where(low == high, 0.0, high - low)
    return low + apart * part if part < 0.5 else high - apart * (1 - part)


def _expand_to(numbers: Tensor, rows: Tensor) -> Tensor:
    return numbers.reshape(-1, *(1 for _ in rows.shape[1:])).expand(rows.shape)


# The values of nodes as rows of samples, and results as plain numbers and tables.

Keep = int | tuple[int, ...] | Literal["units"]


def parts_of(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Split a value into tensors, with their paths.

    A number is one sample without dimensions. Parts of nested tuples, lists, mappings and
    dataclasses have the paths that insertions use for them: `max|values`,
    `lstm.output|sub_1.sub_0`. None, strings and other objects in them are left out.

    Example:
        >>> import torch
        >>> [path for path, _ in parts_of("lstm", (torch.ones(2), {"h": torch.ones(1)}, None))]
        ['lstm|sub_0', 'lstm|sub_1.h']
    """
    found = list(_parts(path, value))
    if not found and not _is_empty(value):
        raise InputError(
            f"an analyser needs tensors or numbers; {path!r} returned a "
            f"{type(value).__qualname__} without any"
        )
    if len({part for part, _ in found}) < len(found):
        counts = Counter(part for part, _ in found)
        twice = next(part for part, count in counts.items() if count > 1)
        raise InputError(
            f"two parts of the {type(value).__qualname__} that {path!r} returned have the same "
            f"path, {twice!r}: analyse the nodes that return them"
        )
    yield from found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if type(value) in TRACED:
        value = plain(value)
    if isinstance(value, Tensor):
        yield path, _readable(path, value)
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    else:
        for name, item in _result_items(value):
            yield from _parts(f"{path}{'.' if '|' in path else '|'}{name}", item)


def _result_items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield identifier(str(key)), item
    elif isinstance(value, (tuple, list)):
        # Those of named tuples, and of what torch returns, such as `torch.return_types.max`.
        names = getattr(type(value), "_fields", getattr(type(value), "__match_args__", ()))
        for number, item in enumerate(value):
            yield (names[number] if number < len(names) else f"sub_{number}"), item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


def _is_empty(value: Any) -> bool:
    if value is None:
        return True
    is_container = isinstance(value, (Mapping, tuple, list)) or dataclasses.is_dataclass(value)
    return is_container and all(_is_empty(item) for _, item in _result_items(value))


def _readable(path: str, value: Tensor) -> Tensor:
    value = value.detach()
    whole = getattr(value, "full_tensor", None)
    if callable(whole):  # a DTensor, which each process has a part of
        value = whole()
    if value.is_complex():
        raise InputError(
            f"{path!r} returned complex numbers, which have no order and several variances: "
            "analyse `torch.view_as_real` or the absolute value of it, at a node after it"
        )
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise InputError(
            f"{path!r} returned a tensor of layout {value.layout}, nested or quantized; an "
            "analyser needs dense tensors"
        )
    if value.dtype == torch.uint64:
        raise InputError(
            f"{path!r} returned uint64, which few operations support: convert it to int64"
        )
    # Those that torch has hardly any operations for (2.13), as what holds all their values.
    value = value.to(_WIDER.get(value.dtype, value.dtype))
    # Of an inference tensor nothing could be kept, not even a view.
    return value.clone() if value.is_inference() else value


_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64} | {
    dtype: torch.float32
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
}


def check_keep(keep: Any) -> Keep:
    """Return the dimensions with separate statistics, as an int, a tuple or `"units"`."""
    if keep == "units" or (type(keep) is int and keep != 0):
        return keep  # type: ignore[no-any-return]
    if isinstance(keep, Sequence) and not isinstance(keep, str):
        dims = tuple(keep)
        if all(type(dim) is int and dim != 0 for dim in dims) and len(set(dims)) == len(dims):
            return dims
    raise InputError(
        f"keep={keep!r}: pass a dimension with separate statistics (1 for channels, -1 for the "
        'last), several, () for none, or "units" for all but the first; dimension 0 counts '
        "the samples"
    )


def rows_of(value: Tensor, keep: Keep) -> Tensor:
    """Return a value as rows: one for each sample and each position that is not kept.

    A tensor without dimensions is one sample. The dimensions to keep come in that order; `"units"`
    are all but the first. Samples stay in order, and so do the positions of a sample.

    Example:
        >>> import torch
        >>> image = torch.zeros(8, 3, 5, 5)
        >>> [tuple(rows_of(image, keep).shape) for keep in (1, -1, "units", ())]
        [(200, 3), (120, 5), (8, 3, 5, 5), (600,)]
    """
    if value.dim() == 0:
        return value.reshape(1)
    if value.dim() == 1:
        return value
    if keep == "units":
        return value
    dims = (keep,) if isinstance(keep, int) else tuple(keep)
    found = [dim + value.dim() if dim < 0 else dim for dim in dims]
    if any(not 0 < dim < value.dim() for dim in found) or len(set(found)) != len(found):
        raise InputError(
            f"keep={keep!r} does not fit a value of shape {tuple(value.shape)}, whose first "
            "dimension counts the samples"
        )
    others = [dim for dim in range(value.dim()) if dim not in found]
    shape = [value.shape[dim] for dim in found]
    moved = value.permute(*others, *found)
    count = 1
    for dim in others:
        count *= value.shape[dim]
    return moved.reshape(count, *shape)


def accumulator(rows: Tensor) -> Tensor:
    """Return rows in the precision for sums: float64, or float32 if the device has no float64.

    Integers are exact up to 2**53, and bools count as 0 and 1.
    """
    return rows.detach().to(torch.float32 if rows.device.type == "mps" else torch.float64)


def plain_results(value: Any) -> Any:
    """Return results as numbers and lists instead of tensors.

    Example:
        >>> import torch
        >>> plain_results({"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)})
        {'mean': [1.0, 2.0], 'count': 3}
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_results(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_results(item) for item in value]
    return value


def data_frame(
    results: Mapping[Any, Any], levels: tuple[str, ...], *, per_unit: bool = False
) -> pandas.DataFrame:
    """Return a table of results, with a row for each innermost dict.

    The keys of the outer dicts are of the kinds `levels`. With `per_unit`, there is a row for each
    element of the tensors, which need equal shapes within a node; else tensors with more than one
    element are arrays in the cells.

    Example:
        >>> import torch
        >>> data_frame({"relu": {"count": 4, "mean": torch.tensor([1.0, 2.0])}}, ("node",),
        ...            per_unit=True)
                   count  mean
        node unit
        relu 0         4   1.0
             1         4   2.0
    """
    frames = required_pandas()
    keys: list[tuple[Any, ...]] = []
    rows: list[dict[Any, Any]] = []
    for key, found in _innermost(results, len(levels)):
        for unit, row in (
            _units(key, found)
            if per_unit
            else [((), {name: _cell(value) for name, value in found.items()})]
        ):
            keys.append((*key, *unit))
            rows.append(row)
    names = (*levels, "unit") if per_unit else levels
    index = (
        frames.MultiIndex.from_tuples(keys, names=names)
        if len(names) > 1 and keys
        else frames.Index([key[0] for key in keys], name=names[0])
    )
    columns = frames.Index(list(dict.fromkeys(name for row in rows for name in row)), dtype=object)
    return frames.DataFrame(rows, index=index, columns=columns)  # type: ignore[no-any-return]


def _innermost(
    results: Mapping[Any, Any], depth: int, key: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Mapping[Any, Any]]]:
    if depth == 0:
        yield key, results
        return
    for name, inner in results.items():
        yield from _innermost(inner, depth - 1, (*key, name))


def _cell(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.dim() == 0 else value.cpu().numpy()


def _units(
    key: tuple[Any, ...], found: Mapping[Any, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any]]]:
    tensors = {name: v for name, v in found.items() if isinstance(v, Tensor) and v.dim() > 0}
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if len(shapes) > 1:
        listed = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            f"results of {key[0]!r} have different shapes, so there is no row for each unit: "
            f"{listed}"
        )
    shape = shapes.pop() if shapes else ()
    flat = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    others = {name: _cell(value) for name, value in found.items() if name not in tensors}
    for number, unit in enumerate(product(*map(range, shape))):
        own = {name: values[number] for name, values in flat.items()}
        row = {name: own.get(name, others.get(name)) for name in found}
        yield ((unit[0] if len(unit) == 1 else unit or 0),), row
