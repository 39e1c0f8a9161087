"""Ranks and spectra of the features at nodes, over a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace._checks import required_int
from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.matrices import (
    Products,
    Rows,
    Spectrum,
    as_matrix,
    centring_error,
    check_features,
    check_squares,
    check_tolerances,
    chosen_features,
    in_double,
    spectrum,
    spectrum_of_gram,
    spectrum_of_products,
)
from bendtrace.analysis.values import Keep, check_keep
from bendtrace.errors import InputError

__all__ = ["CovarianceSpectrum", "PowerLaw", "Rank", "power_law"]

_MODES = ("aTa", "aaT", "a")


class _Spectral(Analyser):
    """Looks at features as the rows of one matrix."""

    def __init__(
        self,
        *,
        keep: Keep,
        rtol: float | None,
        atol: float,
        max_features: int,
        subset: int | None,
        seed: int,
        per_pass: bool,
    ) -> None:
        super().__init__(per_pass=per_pass)
        check_tolerances(rtol, atol)
        required_int("max_features", max_features, 1)
        required_int("subset", subset, 1, or_none=True)
        self.keep = check_keep(keep)
        self.rtol = rtol
        self.atol = atol
        self.max_features = max_features
        self.subset = subset
        self.seed = seed

    def _rows(self, value: Tensor, instead: str | None) -> Tensor:
        rows = chosen_features(as_matrix(value, self.keep), self.subset, self.seed)
        if instead is not None:
            check_features(rows.shape[1], self.max_features, instead)
        return rows


class Rank(_Spectral):
    """The numerical rank of the features at nodes, over all samples.

    Let A be the matrix of all samples by features. `mode` selects how to compute its rank:

    - `"aTa"`: from the features x features matrix of the inner products of its columns, a sum in
      float64. Memory does not grow with the number of samples.
    - `"aaT"`: from the samples x samples matrix of the inner products of its rows. All samples are
      kept.
    - `"a"`: from its singular values. All samples are kept.

    All modes return the same rank: a singular value of A counts as zero up to a tolerance that is
    the same for all modes, `rtol` times the largest one. The default of `rtol` is the number of
    features times the machine epsilon of their dtype, and at least the resolution of a Gram matrix
    in float64, which is about 1e-6 for 10,000 samples. Only `"a"` resolves smaller ones.

    Besides `rank`, results contain its fraction of the largest possible rank, the effective rank
    (Roy and Vetterli 2007), the stable rank (Rudelson and Vershynin 2007), the participation ratio
    (Gao et al. 2017), and the numbers of samples and features; see `Spectrum`. They are NaN if a
    feature was NaN.

    Args:
        mode: see above.
        centred: whether to subtract the mean of each feature first, as in the covariance matrix.
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1 for
            the last, or several; each position in the others is a separate sample.
        rtol: singular values of A up to this fraction of the largest count as zero.
        atol: singular values of A up to this count as zero; without an `rtol`, `atol` alone
            decides.
        max_samples: the maximum number of samples in the modes that keep them.
        max_features: the maximum number of features in the mode `"aTa"`; memory grows with its
            square.
        subset: the number of features to use, if there are more; `seed` chooses them.
        seed: seed of that choice. The global random numbers are not touched.
        per_pass: whether to keep separate results for each pass of a node.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 6))
        >>> bended, rank = bt.BendedModule(model), bt.analysis.Rank()
        >>> with bended.interject("1", rank):
        ...     for _ in range(4):
        ...         _ = bended(torch.randn(16, 8))
        >>> rank.results["sub_1"]["rank"]  # of the bias and three directions
        4
    """

    def __init__(
        self,
        mode: str = "aTa",
        *,
        centred: bool = False,
        keep: Keep = "units",
        rtol: float | None = None,
        atol: float = 0.0,
        max_samples: int = 8192,
        max_features: int = 16384,
        subset: int | None = None,
        seed: int = 0,
        per_pass: bool = False,
    ) -> None:
        super().__init__(
            keep=keep, rtol=rtol, atol=atol, max_features=max_features, subset=subset, seed=seed,
            per_pass=per_pass,
        )  # fmt: skip
        if mode not in _MODES:
            raise InputError(f"mode has to be one of {', '.join(map(repr, _MODES))}, not {mode!r}")
        required_int("max_samples", max_samples, 1)
        self.mode = mode
        self.centred = centred
        self.max_samples = max_samples

    def start(self, key: str) -> Products | Rows:
        """Return sums of products, or a store of rows."""
        return Products() if self.mode == "aTa" else Rows(self.max_samples)

    def update_state(self, state: Products | Rows, value: Tensor, batch: Batch) -> None:
        """Add features."""
        rows = self._rows(value, "subset=, or mode='aaT'" if self.mode == "aTa" else None)
        if self.mode == "aaT":
            check_squares(rows)
        state.update(rows)

    def result(self, state: Products | Rows) -> dict[Any, Any]:
        """Return the ranks by name."""
        found = self._spectrum(state)
        return {**found.measures(), "samples": found.samples, "features": found.features}

    @property
    def spectra(self) -> dict[str, Spectrum]:
        """The singular values, by node path."""
        return {path: self._spectrum(state) for path, state in self._states.items()}

    def _spectrum(self, state: Products | Rows) -> Spectrum:
        if isinstance(state, Products):
            return spectrum_of_products(state, centred=self.centred, rtol=self.rtol, atol=self.atol)
        rows = in_double(state.result())
        if self.mode == "a":
            return spectrum(
                rows, centred=self.centred, rtol=self.rtol, atol=self.atol, eps=state.eps
            )
        least = 0.0
        if self.centred and len(rows):
            mean = rows.mean(0)
            least = centring_error(rows.shape[0], rows.shape[1], mean)
            rows = rows - mean
        return spectrum_of_gram(
            rows @ rows.T,
            samples=rows.shape[0], features=rows.shape[1], eps=state.eps,
            rtol=self.rtol, atol=self.atol, least=least,
        )  # fmt: skip


class CovarianceSpectrum(_Spectral):
    """Eigenvalues of the covariance matrix of the features at nodes, over all samples.

    The covariance is summed in float64, in memory that does not grow with the number of samples.
    Results are

    - `eigenvalues`: (d,) float64, in descending order; those that rounding has put below zero are
      zero. NaN if a feature was NaN, or if there are not more samples than `correction`.
    - `explained`: (d,), the fraction of the total variance of each of them.
    - `total_variance`: their sum.
    - `rank`, `effective_rank`, `participation_ratio`: see `Spectrum`; here of the centred
      matrix of samples by features.
    - `samples`, `features`: their numbers.
    - with `fit`: `exponent` and `r_squared` of a `power_law` through the eigenvalues that do not
      count as zero.

    Args:
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1 for
            the last, or several; each position in the others is a separate sample.
        correction: subtracted from the number of samples in the divisor: 1 as in `numpy.cov`, or 0.
        fit: whether to fit a power law: True for all eigenvalues, or the first and the last one to
            use, counted from 1, such as `(11, 500)`.
        rtol: singular values of the centred matrix up to this fraction of the largest count as
            zero, see `Rank`.
        atol: singular values of it up to this count as zero.
        max_features: the maximum number of features; memory grows with its square.
        subset: the number of features to use, if there are more; `seed` chooses them.
        seed: seed of that choice. The global random numbers are not touched.
        per_pass: whether to keep separate results for each pass of a node.

    Raises:
        InputError: an argument is invalid.

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
        super().__init__(
            keep=keep, rtol=rtol, atol=atol, max_features=max_features, subset=subset, seed=seed,
            per_pass=per_pass,
        )  # fmt: skip
        self.correction: Any = required_int("correction", correction, 0)
        self.fit: bool | tuple[int, int] = fit if isinstance(fit, bool) else _checked_range(fit)

    def start(self, key: str) -> Products:
        """Return sums of products."""
        return Products()

    def update_state(self, state: Products, value: Tensor, batch: Batch) -> None:
        """Add features."""
        state.update(self._rows(value, "or subset="))

    def result(self, state: Products) -> dict[Any, Any]:
        """Return the eigenvalues and their measures, by name."""
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
        "fit= has to be True, or the first and the last eigenvalue to use, counted from 1, "
        f"not {fit!r}"
    )


@dataclass(frozen=True)
class PowerLaw:
    """A fit of eigenvalues by `scale * i ** -exponent`, where the largest is the first.

    Attributes:
        exponent: how fast the eigenvalues decrease; 0 for a flat spectrum.
        scale: the fitted first eigenvalue.
        r_squared: the fraction of the variance of their logarithms that the line explains; NaN if
            all are equal.
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
    """Fit a power law to eigenvalues: a line through their logarithms over those of their indices.

    This is the exponent of the eigenspectrum as in Stringer et al., "High-dimensional geometry of
    population responses in visual cortex" (2019), by ordinary least squares with equal weights, and
    not the exponent of the tail of the density of eigenvalues.

    Args:
        eigenvalues: in descending order.
        first: the first eigenvalue to use, counted from 1.
        last: the last one to use; None for all.
        above: eigenvalues up to this one are left out.

    Returns:
        The fit; it is NaN if there are fewer than two eigenvalues to fit, or if some are not
        finite.

    Raises:
        InputError: `first` and `last` are not a valid range.

    Example:
        >>> import torch, bendtrace as bt
        >>> fit = bt.analysis.power_law(5.0 * torch.arange(1, 9, dtype=torch.float64) ** -1.5)
        >>> round(fit.exponent, 6), round(fit.scale, 6), round(fit.r_squared, 6)
        (1.5, 5.0, 1.0)
    """
    if first < 1 or (last is not None and last <= first):
        raise InputError(
            f"the eigenvalues {first} to {last} are not a valid range: they are counted from "
            "1, and a line needs two"
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
