"""Features as matrices of samples by features, and sums of their products."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.moments import Covariance
from bendtrace.analysis.streaming.statistic import Statistic
from bendtrace.analysis.values import Keep, rows_of
from bendtrace.errors import InputError

__all__ = [
    "Products",
    "Rows",
    "as_matrix",
    "check_features",
    "check_positive",
    "check_squares",
    "chosen_features",
    "epsilon",
    "in_double",
]


def as_matrix(value: Tensor, keep: Keep) -> Tensor:
    """Return what a node gave as a matrix, samples by features.

    Args:
        value: (batch, ...); a number is one sample with one feature.
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1
            for the last, or several. Positions in the others are samples of their own.

    Example:
        >>> import torch
        >>> [tuple(as_matrix(torch.zeros(2, 3, 4, 5), keep).shape) for keep in ("units", 1, -1)]
        [(2, 60), (40, 3), (24, 5)]
    """
    rows = rows_of(value, keep)
    # Not flatten(1), which cannot tell the size of tensors without samples.
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def epsilon(dtype: torch.dtype) -> float:
    """Return how exact features of a dtype are: its machine epsilon, at most that of float32.

    Half precision counts as float32, and numbers that are not floating as float64.
    """
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    return single if dtype.is_floating_point and dtype != torch.float64 else double


def in_double(rows: Tensor) -> Tensor:
    """Return rows as float64, on the CPU if their device has none."""
    return rows.detach().to("cpu" if rows.device.type == "mps" else rows.device, torch.float64)


def check_squares(rows: Tensor) -> None:
    """Refuse rows whose squares float64 cannot hold: a rank of them would be wrong.

    Raises:
        InputError: the largest value is too large, or too small.
    """
    if rows.dtype != torch.float64 or not rows.numel():
        return  # all finite values of other types have squares in float64
    largest = float(rows.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
    if largest and not _LEAST < largest < _GREATEST:
        raise InputError(
            f"values up to {largest:.3g} have squares that float64 cannot hold: scale them, or "
            "take mode='a' of Rank, which needs no squares"
        )


_LEAST, _GREATEST = 1e-140, 1e140


class Products(Covariance):
    """Number, mean and sum of products of rows, in float64, and how exact the rows were.

    Attributes:
        eps: how exact the rows were: see `epsilon`.

    Example:
        >>> products = Products()
        >>> for row in ([1.0, 2.0], [3.0, 2.0]):
        ...     products.update(torch.tensor([row]))
        >>> products.uncentred
        tensor([[10.,  8.],
                [ 8.,  8.]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        super().__init__(correction=0)
        self.eps = 0.0

    @property
    def width(self) -> int | None:
        """How many features the rows have; None before the first ones."""
        return None if self._shift is None else len(self._shift)

    def update(self, rows: Tensor) -> None:
        """Take in rows, (n, d).

        Raises:
            InputError: there is another number of features than before.
        """
        check_width(self.width, rows.shape[1])
        check_squares(rows)
        # Not added up in float32 on devices without float64: ranks need what it leaves out.
        super().update(in_double(rows))
        self.eps = max(self.eps, epsilon(rows.dtype))

    def merge(self, other: Self) -> None:
        """Add what others have taken in."""
        super().merge(other)
        self.eps = max(self.eps, other.eps)

    @property
    def centred(self) -> Tensor:
        """The sum over rows of products of deviations from the mean, (d, d)."""
        return torch.zeros(0, 0, dtype=torch.float64) if self.width is None else self.comoment

    @property
    def uncentred(self) -> Tensor:
        """The sum over rows of products of the features themselves, (d, d)."""
        if not self.count:
            return self.centred
        return self.centred + torch.outer(self.mean, self.mean) * self.count


class Rows(Statistic):
    """All rows, up to a number of them.

    Args:
        limit: how many there may be.

    Attributes:
        count: how many there are.
        kept: the rows, in pieces.
        width: how many features they have; None while nothing came.
        eps: how exact they are: see `epsilon`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.kept: list[Tensor] = []
        self.width: int | None = None
        self.eps = 0.0

    def update(self, rows: Tensor) -> None:
        """Take in rows, (n, d), which are copied.

        Raises:
            InputError: there are too many, or they have another number of features than before.
        """
        self._check(rows)
        self._add(rows.detach().clone(), epsilon(rows.dtype))

    def merge(self, other: Self) -> None:
        """Add the rows of others.

        Raises:
            InputError: there are too many, or they have another number of features.
        """
        if other.width is not None:
            rows = other.result()
            self._check(rows)
            self._add(rows, other.eps)

    def result(self) -> Tensor:
        """Return all of them, (n, d), in the order in which they came."""
        if not self.kept:
            return torch.zeros(0, 0, dtype=torch.float64)
        # On the first one's device, and exact for all of them if their types differ.
        dtypes = {rows.dtype for rows in self.kept}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        return torch.cat([rows.to(self.kept[0].device, dtype) for rows in self.kept])

    def _add(self, rows: Tensor, eps: float) -> None:
        self.kept.append(rows)
        self.count += len(rows)
        self.width = rows.shape[1]
        self.eps = max(self.eps, eps)

    def _check(self, rows: Tensor) -> None:
        check_width(self.width, rows.shape[1])
        total = self.count + len(rows)
        if total > self.limit:
            raise InputError(
                f"{total} samples by now, and all of them have to be kept, but max_samples="
                f"{self.limit}: raise it, show fewer samples, or use mode='aTa', whose memory "
                "does not grow with them"
            )


def check_width(known: int | None, features: int) -> None:
    """Raise an `InputError` if there is another number of features than before."""
    if known is not None and known != features:
        raise InputError(
            f"{features} features, but {known} before: for values whose size changes say with "
            "keep= which dimensions are features, such as 1 for channels, or -1 for the last"
        )


def chosen_features(rows: Tensor, subset: int | None, seed: int) -> Tensor:
    """Return some of the columns of a matrix, in order: the same ones for the same seed."""
    features = rows.shape[1]
    if subset is None or features <= subset:
        return rows
    order = torch.randperm(features, generator=torch.Generator().manual_seed(seed))
    return rows[:, order[:subset].sort().values.to(rows.device)]


def check_features(features: int, limit: int, instead: str) -> None:
    """Raise an `InputError` if there are too many features for their square to be kept."""
    if features > limit:
        gigabytes = features**2 * 8 / 1e9
        raise InputError(
            f"{features} features need a matrix of {gigabytes:.1f} GB, and max_features={limit}: "
            f"raise it, or give keep= (1 for channels, -1 for the last dimension), {instead}"
        )


def check_positive(name: str, number: Any, *, or_none: bool = False) -> None:
    """Raise an `InputError` if something is no whole number from 1 on."""
    if or_none and number is None:
        return
    if type(number) is not int or number < 1:
        raise InputError(f"{name} has to be a whole number from 1 on, not {number!r}")
