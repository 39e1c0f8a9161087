"""Ranks and spectra of the features at nodes, over a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.python.checks import required_int, required_number
from bendtrace.research.analyser import Analyser, Batch
from bendtrace.research.streaming import Covariance, Keep, Statistic, check_keep, rows_of

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
        rows = choose_features(as_matrix(value, self.keep), self.subset, self.seed)
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
        rows, least = _centre(rows, self.centred)
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
        self.fit: bool | tuple[int, int] = fit if isinstance(fit, bool) else _check_range(fit)

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


def _check_range(fit: Any) -> tuple[int, int]:
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


# Features as matrices of samples by features: products, ranks, and linear maps.

_EPS = torch.finfo(torch.float64).eps
# From which part of the total variance on a penalty makes the equations well-conditioned enough for
# the quick way, which otherwise gives one of many solutions where features depend on each other.
_SAFE = 1e-8


def as_matrix(value: Tensor, keep: Keep) -> Tensor:
    """Return a value as a matrix, samples by features.

    Args:
        value: (batch, ...); a number is one sample with one feature.
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1 for
            the last, or several. Positions in the others are separate samples.

    Example:
        >>> import torch
        >>> [tuple(as_matrix(torch.zeros(2, 3, 4, 5), keep).shape) for keep in ("units", 1, -1)]
        [(2, 60), (40, 3), (24, 5)]
    """
    rows = rows_of(value, keep)
    # Not flatten(1), which cannot tell the size of tensors without samples.
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def epsilon(dtype: torch.dtype) -> float:
    """Return the precision of features of a dtype: its machine epsilon, at most the one of float32.

    Half precision counts as float32, and non-floating dtypes as float64.
    """
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    return single if dtype.is_floating_point and dtype != torch.float64 else double


def in_double(rows: Tensor) -> Tensor:
    """Return rows as float64, on the CPU if their device has none."""
    return rows.detach().to("cpu" if rows.device.type == "mps" else rows.device, torch.float64)


def check_squares(rows: Tensor) -> None:
    """Raise for rows whose squares overflow float64: a rank computed from them would be wrong."""
    if rows.dtype != torch.float64 or not rows.numel():
        return  # all finite values of other types have squares in float64
    largest = float(rows.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
    if largest and not _LEAST < largest < _GREATEST:
        raise InputError(
            f"the squares of values up to {largest:.3g} overflow float64: scale the values, or "
            "use mode='a' of Rank, which needs no squares"
        )


_LEAST, _GREATEST = 1e-140, 1e140


class Products(Covariance):
    """Number, mean and sum of products of rows, in float64, and the precision of the rows.

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
        self.eps: float = 0.0  # the precision of the rows: see `epsilon`

    @property
    def width(self) -> int | None:
        """The number of features of the rows; None before the first rows."""
        return None if self._shift is None else len(self._shift)

    def update(self, rows: Tensor) -> None:
        """Add rows, (n, d)."""
        check_width(self.width, rows.shape[1])
        check_squares(rows)
        # Not added up in float32 on devices without float64: ranks need that precision.
        super().update(in_double(rows))
        self.eps = max(self.eps, epsilon(rows.dtype))

    def merge(self, other: Self) -> None:
        """Add the rows of another one."""
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
    """All rows, up to a maximum number."""

    count: int

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.kept: list[Tensor] = []
        self.width: int | None = None
        self.eps: float = 0.0

    def update(self, rows: Tensor) -> None:
        """Add rows, (n, d), which are copied."""
        self._add(rows.detach(), epsilon(rows.dtype))

    def merge(self, other: Self) -> None:
        """Add the rows of another one."""
        if other.width is not None:
            self._add(other.result(), other.eps)

    def result(self) -> Tensor:
        """Return all of them, (n, d), in order."""
        if not self.kept:
            return torch.zeros(0, 0, dtype=torch.float64)
        # On the first one's device, and exact for all of them if their types differ.
        dtypes = {rows.dtype for rows in self.kept}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        return torch.cat([rows.to(self.kept[0].device, dtype) for rows in self.kept])

    def _add(self, rows: Tensor, eps: float) -> None:
        check_width(self.width, rows.shape[1])
        total = self.count + len(rows)
        if total > self.limit:
            raise InputError(
                f"there are {total} samples so far, and all of them have to be kept, but "
                f"max_samples={self.limit}: raise it, use fewer samples, or use mode='aTa', "
                "whose memory does not grow with them"
            )
        self.kept.append(rows.clone())
        self.count, self.width, self.eps = total, rows.shape[1], max(self.eps, eps)


def check_width(expected: int | None, features: int) -> None:
    """Raise an `InputError` if the number of features has changed."""
    if expected is not None and expected != features:
        raise InputError(
            f"{features} features, but {expected} before: for values whose size changes, pass the "
            "dimensions of the features as keep=, such as 1 for channels, or -1 for the last"
        )


def choose_features(rows: Tensor, subset: int | None, seed: int) -> Tensor:
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
            f"{features} features need a matrix of {gigabytes:.1f} GB, but "
            f"max_features={limit}: raise it, or pass keep= (1 for channels, -1 for the last "
            f"dimension), {instead}"
        )


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of a matrix of samples by features, and several kinds of ranks.

    All measures leave out the singular values that count as zero.

    Attributes:
        singular_values: float64, on the CPU, in descending order; as many as the smaller side of
            the matrix.
        samples: number of rows.
        features: number of columns.
        tolerance: singular values up to it count as zero.

    Example:
        >>> import torch, bendtrace as bt
        >>> found = bt.analysis.spectrum(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))
        >>> found
        Spectrum(3 samples x 2 features, rank=2, largest=4, smallest=3)
        >>> found.stable_rank  # (9 + 16) / 16
        1.5625
    """

    singular_values: Tensor
    samples: int
    features: int
    tolerance: float

    @property
    def is_finite(self) -> bool:
        """True if the matrix was free of NaN and infinity; otherwise all measures are NaN."""
        return bool(self.singular_values.isfinite().all())

    @property
    def rank(self) -> float:
        """The number of singular values above the tolerance: an integer, or NaN."""
        return len(self._nonzero_values) if self.is_finite else math.nan

    @property
    def normalized_rank(self) -> float:
        """The rank as a fraction of the largest possible rank of a matrix of this shape."""
        largest = min(self.samples, self.features)
        return self.rank / largest if largest else math.nan

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the singular values, scaled to sum to 1.

        Roy and Vetterli, "The effective rank: a measure of effective dimensionality" (2007).
        Between 1 and the rank; 0 for a matrix of zeros.
        """
        if not len(self._nonzero_values):
            return self.rank
        parts = self._nonzero_values / self._nonzero_values.sum()
        return math.exp(-float((parts * parts.log()).sum()))

    @property
    def stable_rank(self) -> float:
        """Squared Frobenius norm over the squared spectral norm.

        Rudelson and Vershynin, "Sampling from large matrices" (2007). Between 1 and the rank; 0 for
        a matrix of zeros.
        """
        if not len(self._nonzero_values):
            return self.rank
        return float((self._nonzero_values / self._nonzero_values[0]).square().sum())

    @property
    def participation_ratio(self) -> float:
        """Squared sum of the eigenvalues of the covariance over the sum of their squares.

        The eigenvalues are the squared singular values, up to a factor that cancels. Gao et al., "A
        theory of multineuronal dimensionality, dynamics and measurement" (2017). Between 1 and the
        rank; 0 for a matrix of zeros.
        """
        if not len(self._nonzero_values):
            return self.rank
        squared = (self._nonzero_values / self._nonzero_values[0]).square()
        return float(squared.sum().square() / squared.square().sum())

    def measures(self) -> dict[str, float]:
        """Return the measures by name; each is an attribute as well."""
        names = (
            "rank", "normalized_rank", "effective_rank", "stable_rank", "participation_ratio",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def _nonzero_values(self) -> Tensor:
        if not self.is_finite:
            return self.singular_values[:0]
        return self.singular_values[self.singular_values > self.tolerance]

    def __repr__(self) -> str:
        size = f"{self.samples} samples x {self.features} features"
        if not len(self.singular_values):
            return f"Spectrum({size})"
        first, last = self.singular_values[0], self.singular_values[-1]
        return f"Spectrum({size}, rank={self.rank}, largest={first:.4g}, smallest={last:.4g})"


def resolution(samples: int, features: int) -> float:
    """Return the fraction of the largest singular value that a float64 Gram matrix resolves.

    A Gram matrix contains the squares, with an error of about `max(samples, features)` times the
    machine epsilon, relative to the largest of them.
    """
    return math.sqrt(max(samples, features, 1) * _EPS)


def centring_error(samples: int, features: int, mean: Tensor) -> float:
    """Return the largest singular value that rounding can cause when the mean is subtracted.

    A matrix whose rows all equal the mean has the singular value `sqrt(samples) * |mean|`;
    subtracting the mean may leave that times the machine epsilon of float64 and the larger side.
    """
    return max(samples, features) * _EPS * math.sqrt(samples) * float(mean.norm())


def default_rtol(samples: int, features: int, eps: float) -> float:
    """Return the default tolerance as a fraction of the largest singular value.

    The number of features times `eps`, the machine epsilon of their dtype (of float32 for half
    precision), and at least the resolution of a float64 Gram matrix, so that the rank does not
    depend on the matrix that it is computed from. `numpy.linalg.matrix_rank` uses the larger side
    of the matrix instead of the number of features: for a stream of samples that would grow without
    end, and with it the tolerance.
    """
    return max(features * eps, resolution(samples, features))


def spectrum(
    matrix: Tensor,
    *,
    centred: bool = False,
    rtol: float | None = None,
    atol: float = 0.0,
    eps: float | None = None,
) -> Spectrum:
    """Return the singular values of a matrix, computed in float64.

    Args:
        matrix: samples by features.
        centred: whether to subtract the mean of each feature first. Singular values within the
            rounding errors of that count as zero (see `centring_error`).
        rtol: singular values up to this fraction of the largest count as zero. None: see
            `default_rtol`; 0 if there is an `atol`.
        atol: singular values up to this count as zero, in the units of the features.
        eps: the precision of the matrix; None for the machine epsilon of its dtype.

    Raises:
        InputError: it is not a matrix of real numbers, or a tolerance is negative.

    Example:
        >>> import torch, bendtrace as bt
        >>> matrix = torch.ones(5, 3)
        >>> bt.analysis.spectrum(matrix).rank, bt.analysis.spectrum(matrix, centred=True).rank
        (1, 0)
    """
    if matrix.dim() != 2 or matrix.is_complex():
        raise InputError(
            f"a real matrix is needed, not {matrix.dtype} of shape {tuple(matrix.shape)}"
        )
    check_tolerances(rtol, atol)
    rows = matrix.detach().to("cpu", torch.float64)
    samples, features = rows.shape
    eps = epsilon(matrix.dtype) if eps is None else eps
    rows, least = _centre(rows, centred)
    finite = bool(rows.isfinite().all())
    values = torch.linalg.svdvals(rows) if finite else _unknown(min(samples, features))
    return _spectrum(values, samples, features, rtol, atol, eps, least)


def _centre(rows: Tensor, centred: bool) -> tuple[Tensor, float]:
    """Return rows, from which the mean may be subtracted, and what rounding can make of that."""
    if not centred or not len(rows):
        return rows, 0.0
    mean = rows.mean(0)
    return rows - mean, centring_error(rows.shape[0], rows.shape[1], mean)


def spectrum_of_gram(
    gram: Tensor,
    *,
    samples: int,
    features: int,
    eps: float,
    rtol: float | None = None,
    atol: float = 0.0,
    least: float = 0.0,
) -> Spectrum:
    """Return the singular values of a matrix from a matrix of the inner products of its columns.

    The Gram matrix is float64, of the columns (features x features) or the rows (samples x samples)
    of a matrix whose dtype has the machine epsilon `eps`. Singular values up to `least` always
    count as zero; a tolerance below the resolution of the Gram matrix is refused.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
        >>> spectrum_of_gram(x.T @ x, samples=3, features=2, eps=2.2e-16).singular_values
        tensor([4., 3.], dtype=torch.float64)
    """
    check_tolerances(rtol, atol)
    smaller = min(samples, features)
    if not bool(gram.isfinite().all()):
        return _spectrum(_unknown(smaller), samples, features, rtol, atol, eps, least)
    # Rounding puts eigenvalues that are zero a little above or below it.
    squares = torch.linalg.eigvalsh(gram.to("cpu", torch.float64)).flip(0).clamp(min=0)
    found = _spectrum(squares[:smaller].sqrt(), samples, features, rtol, atol, eps, least)
    largest = float(squares[0].sqrt()) if len(squares) else 0.0
    finest = resolution(samples, features) * largest
    if found.tolerance < finest:
        raise InputError(
            f"singular values up to {found.tolerance:.2g} are to count as zero, but a Gram "
            f"matrix of {samples} samples and {features} features, with {largest:.4g} as the "
            f"largest singular value, cannot distinguish values up to {finest:.2g} from zero: "
            "raise rtol or atol, or use mode='a'"
        )
    return found


def spectrum_of_products(
    products: Products, *, centred: bool, rtol: float | None = None, atol: float = 0.0
) -> Spectrum:
    """Return the singular values of the matrix whose rows were summed as products."""
    size = (products.count, products.width or 0)
    return spectrum_of_gram(
        products.centred if centred else products.uncentred,
        samples=size[0], features=size[1], eps=products.eps, rtol=rtol, atol=atol,
        least=centring_error(*size, products.mean) if centred and products.count else 0.0,
    )  # fmt: skip


def check_tolerances(rtol: float | None, atol: float) -> None:
    """Raise if a tolerance is negative or not a number."""
    required_number("rtol", rtol, or_none=True)
    required_number("atol", atol)


def _spectrum(
    values: Tensor,
    samples: int,
    features: int,
    rtol: float | None,
    atol: float,
    eps: float,
    least: float,
) -> Spectrum:
    if rtol is None:
        rtol = 0.0 if atol else default_rtol(samples, features, eps)
    largest = float(values[0]) if len(values) else 0.0
    tolerance = max(atol, rtol * largest, least)
    return Spectrum(values, samples, features, tolerance)


def _unknown(number: int) -> Tensor:
    return torch.full((number,), math.nan, dtype=torch.float64)


def ridge(
    sums: Products, outputs: int, alpha: float = 1.0, *, bias: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the linear map with the least squared error plus `alpha` times its squared weights.

    The bias is not penalised, as in scikit-learn's `Ridge`. With `alpha=0` it is the least-squares
    solution; if there are several, the one with the smallest weights, as in `numpy.linalg.lstsq`.

    It is solved by the normal equations in float64, whose condition number is the squared condition
    number of the features: with `alpha=0`, directions of features with singular values below about
    1e-6 of the largest are treated as absent.

    The rows of the sums contain the features followed by the targets, as many as `outputs`. The
    weight is (outputs, features), and the bias (outputs,), which is 0 without one; float64.

    Example:
        >>> sums = Products()
        >>> sums.update(torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]]))
        >>> ridge(sums, 1, alpha=0)
        (tensor([[2.]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    required_number("alpha", alpha, finite=True)
    if not sums.count or sums.width is None:
        raise InputError("there is no data: run batches with targets in training mode first")
    products = sums.centred if bias else sums.uncentred
    if not bool(products.isfinite().all()):
        raise InputError("features or targets were not finite, so there is no solution")
    features = sums.width - outputs
    inner, mixed = products[:features, :features], products[:features, features:]
    weight = _solve(inner, mixed, float(alpha), max(sums.count, features)).T.contiguous()
    mean = sums.mean
    shift = (
        mean[features:] - weight @ mean[:features] if bias else torch.zeros_like(mean[features:])
    )
    return weight, shift


def _solve(inner: Tensor, mixed: Tensor, alpha: float, size: int) -> Tensor:
    if alpha > _SAFE * float(inner.trace()):
        shifted = inner + alpha * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        factor = torch.linalg.cholesky(shifted)
        found: Tensor = torch.cholesky_solve(mixed, factor)
        return found
    values, vectors = torch.linalg.eigh(inner)
    # The same as for ranks: below the resolution of a Gram matrix.
    zero = size * torch.finfo(torch.float64).eps * values[-1:].clamp(min=0)
    kept = values > zero
    scale = torch.where(kept, 1 / torch.where(kept, values + alpha, 1.0), 0.0)
    solution: Tensor = vectors @ (scale[:, None] * (vectors.T @ mixed))
    return solution
