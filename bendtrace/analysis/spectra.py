"""Eigenvalues of the covariance of features, and how they decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.matrices import (
    Products,
    as_matrix,
    check_features,
    check_positive,
    chosen_features,
)
from bendtrace.analysis.singular_values import check_tolerances, spectrum_of_products
from bendtrace.analysis.values import Keep, check_keep
from bendtrace.errors import InputError

__all__ = ["CovarianceSpectrum", "PowerLaw", "power_law"]


class CovarianceSpectrum(Analyser):
    """Eigenvalues of the covariance matrix of the features at nodes, over all samples that came by.

    The covariance is added up in float64, in memory that does not grow with the samples.
    Results are

    - `eigenvalues`: (d,) float64, in descending order; those that rounding has put below zero are
      zero. NaN where a feature was, or where there are not more samples than `correction`.
    - `explained`: (d,), which part of the total variance each of them is.
    - `total_variance`: their sum.
    - `rank`, `effective_rank`, `participation_ratio`: see `Spectrum`; here the centred matrix of
      samples by features is meant.
    - `samples`, `features`: how many there were.
    - with `fit`: `exponent` and `r_squared` of a `power_law` through the eigenvalues that do not
      count as zero.

    Args:
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1
            for the last, or several; each position in the others is a sample of its own.
        correction: what is taken from the number of samples to divide by: 1 as in `numpy.cov`, 0.
        fit: whether to fit a power law: True for all eigenvalues, or the first and the last one to
            use, counted from 1, such as `(11, 500)`.
        rtol: singular values of the centred matrix up to this part of the largest count as zero,
            see `Rank`.
        atol: singular values of it up to this count as zero.
        max_features: how many features there may be; memory is the square of it.
        subset: look at so many of the features only, if there are more; which ones `seed` says.
        seed: seed of their choice. The global random numbers are not touched.
        per_pass: whether each pass of a node has results of its own.

    Raises:
        InputError: one of these makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> spectrum = bt.analysis.CovarianceSpectrum()
        >>> spectrum.update("x", torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
        >>> spectrum.update("x", torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
        >>> spectrum.results["x"]["eigenvalues"]  # 18 / 3 and 2 / 3
        tensor([6.0000, 0.6667], dtype=torch.float64)
    """

    def __init__(
        self,
        *,
        keep: Keep = "units",
        correction: int = 1,
        fit: bool | tuple[int, int] = False,
        rtol: float | None = None,
        atol: float = 0.0,
        max_features: int = 16384,
        subset: int | None = None,
        seed: int = 0,
        per_pass: bool = False,
    ) -> None:
        super().__init__(per_pass=per_pass)
        check_tolerances(rtol, atol)
        check_positive("max_features", max_features)
        check_positive("subset", subset, or_none=True)
        if type(correction) is not int or correction < 0:
            raise InputError(f"correction has to be a whole number from 0 on, not {correction!r}")
        if not isinstance(fit, bool):
            fit = _checked_range(fit)
        self.keep = check_keep(keep)
        self.correction = correction
        self.fit = fit
        self.rtol = rtol
        self.atol = atol
        self.max_features = max_features
        self.subset = subset
        self.seed = seed

    def start(self, key: str) -> Products:
        """Return sums of products."""
        return Products()

    def update_state(self, state: Products, value: Tensor, batch: Batch) -> None:
        """Take in features."""
        rows = chosen_features(as_matrix(value, self.keep), self.subset, self.seed)
        check_features(rows.shape[1], self.max_features, "or subset=")
        state.update(rows)

    def result(self, state: Products) -> dict[Any, Any]:
        """Return the eigenvalues, and what follows from them."""
        divisor = state.count - self.correction
        features = state.width or 0
        products = state.centred
        if divisor > 0 and bool(products.isfinite().all()):
            squares = torch.linalg.eigvalsh(products.cpu()).flip(0).clamp(min=0)
            eigenvalues = squares / divisor
        else:
            eigenvalues = torch.full((features,), math.nan, dtype=torch.float64)
        total = eigenvalues.sum()
        found = spectrum_of_products(state, centred=True, rtol=self.rtol, atol=self.atol)
        result = {
            "eigenvalues": eigenvalues,
            # Of no variance each direction has none.
            "explained": eigenvalues / total if total != 0 else eigenvalues,
            "total_variance": float(total),
            "rank": found.rank,
            "effective_rank": found.effective_rank,
            "participation_ratio": found.participation_ratio,
            "samples": state.count,
            "features": features,
        }
        if self.fit:
            first, last = self.fit if isinstance(self.fit, tuple) else (1, None)
            zero = found.tolerance**2 / divisor if divisor > 0 else 0.0
            line = power_law(eigenvalues, first, last, above=zero)
            result |= {"exponent": line.exponent, "r_squared": line.r_squared}
        return result


def _checked_range(fit: Any) -> tuple[int, int]:
    if (
        isinstance(fit, (tuple, list))
        and len(fit) == 2
        and all(type(end) is int for end in fit)
        and 1 <= fit[0] < fit[1]
    ):
        return (fit[0], fit[1])
    raise InputError(
        f"fit= is True, or the first and the last eigenvalue to use, counted from 1, not {fit!r}"
    )


@dataclass(frozen=True)
class PowerLaw:
    """A fit of eigenvalues by `scale * i ** -exponent`, where the largest is the first.

    Attributes:
        exponent: how fast they fall; 0 is a flat spectrum.
        scale: the fitted first eigenvalue.
        r_squared: which part of the variance of their logarithms the line explains; NaN if all are
            equal.
        first: the first eigenvalue used, counted from 1.
        last: the last one used.

    Example:
        >>> import torch, bendtrace as bt
        >>> fit = bt.analysis.power_law(4.0 / torch.arange(1, 6, dtype=torch.float64))
        >>> round(fit.exponent, 6), round(fit.scale, 6), fit.first, fit.last
        (1.0, 4.0, 1, 5)
    """

    exponent: float
    scale: float
    r_squared: float
    first: int
    last: int


def power_law(
    eigenvalues: Tensor, first: int = 1, last: int | None = None, *, above: float = 0.0
) -> PowerLaw:
    """Fit a power law to eigenvalues: a line through their logarithms over those of their numbers.

    This is the exponent of the eigenspectrum as in Stringer et al., "High-dimensional geometry of
    population responses in visual cortex" (2019), by ordinary least squares with equal weights, and
    not the exponent of the tail of the density of eigenvalues.

    Args:
        eigenvalues: in descending order.
        first: the first eigenvalue to use, counted from 1.
        last: the last one to use; None for all.
        above: eigenvalues up to this one are left out.

    Returns:
        The fit; one of NaN if there are less than two eigenvalues to fit, or some are not finite.

    Raises:
        InputError: `first` and `last` make no range.

    Example:
        >>> import torch, bendtrace as bt
        >>> fit = bt.analysis.power_law(5.0 * torch.arange(1, 9, dtype=torch.float64) ** -1.5)
        >>> round(fit.exponent, 6), round(fit.scale, 6), round(fit.r_squared, 6)
        (1.5, 5.0, 1.0)
    """
    if first < 1 or (last is not None and last <= first):
        raise InputError(
            f"the eigenvalues {first} to {last} make no range: they are counted from 1, and a line "
            "needs two"
        )
    values = eigenvalues.detach().to("cpu", torch.float64)
    end = len(values) if last is None else min(last, len(values))
    usable = int((values[:end] > above).sum())
    end = min(end, usable)
    if end <= first or not bool(values[:end].isfinite().all()):
        return PowerLaw(math.nan, math.nan, math.nan, first, max(end, first))
    x = torch.arange(first, end + 1, dtype=torch.float64).log()
    y = values[first - 1 : end].log()
    x_centred, y_centred = x - x.mean(), y - y.mean()
    slope = float((x_centred * y_centred).sum() / x_centred.square().sum())
    total = float(y_centred.square().sum())
    rest = float((y_centred - slope * x_centred).square().sum())
    scale = math.exp(float(y.mean()) - slope * float(x.mean()))
    return PowerLaw(-slope, scale, 1 - rest / total if total else math.nan, first, end)
