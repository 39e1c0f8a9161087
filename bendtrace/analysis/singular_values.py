"""Singular values of features, and what follows from them: ranks of several kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bendtrace.analysis.matrices import Products, epsilon
from bendtrace.errors import InputError

__all__ = [
    "Spectrum",
    "centring_error",
    "check_tolerances",
    "default_rtol",
    "resolution",
    "spectrum",
    "spectrum_of_gram",
    "spectrum_of_products",
]

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of a matrix of samples by features, and what follows from them.

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
        """Whether the matrix had neither NaN nor infinity in it; all measures are NaN otherwise."""
        return bool(self.singular_values.isfinite().all())

    @property
    def rank(self) -> float:
        """How many singular values are above the tolerance: a whole number, or NaN."""
        return len(self._kept) if self.is_finite else math.nan

    @property
    def normalized_rank(self) -> float:
        """The rank, as a part of the largest that a matrix of this shape can have."""
        largest = min(self.samples, self.features)
        return self.rank / largest if largest else math.nan

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the singular values, which are scaled to a sum of 1.

        Roy and Vetterli, "The effective rank: a measure of effective dimensionality" (2007).
        Between 1 and the rank; 0 for a matrix of zeros.
        """
        if not len(self._kept):
            return self.rank
        parts = self._kept / self._kept.sum()
        return math.exp(-float((parts * parts.log()).sum()))

    @property
    def stable_rank(self) -> float:
        """Squared Frobenius norm over the squared spectral norm.

        Rudelson and Vershynin, "Sampling from large matrices" (2007). Between 1 and the rank; 0 for
        a matrix of zeros.
        """
        if not len(self._kept):
            return self.rank
        return float((self._kept / self._kept[0]).square().sum())

    @property
    def participation_ratio(self) -> float:
        """Squared sum of the eigenvalues of the covariance over the sum of their squares.

        The eigenvalues are the squared singular values, up to a factor that cancels. Gao et al., "A
        theory of multineuronal dimensionality, dynamics and measurement" (2017). Between 1 and the
        rank; 0 for a matrix of zeros.
        """
        if not len(self._kept):
            return self.rank
        squared = (self._kept / self._kept[0]).square()
        return float(squared.sum().square() / squared.square().sum())

    @property
    def _kept(self) -> Tensor:
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
    """Return up to which part of the largest a singular value is lost in a float64 Gram matrix.

    A Gram matrix holds the squares, with an error of about `max(samples, features)` times the
    machine epsilon, relative to the largest of them.
    """
    return math.sqrt(max(samples, features, 1) * _EPS)


def centring_error(samples: int, features: int, mean: Tensor) -> float:
    """Return up to where singular values can come of rounding as the mean was taken away.

    A matrix all of whose rows are the mean has the singular value `sqrt(samples) * |mean|`; of that
    the machine epsilon of float64, times the larger side, may be left.
    """
    return max(samples, features) * _EPS * math.sqrt(samples) * float(mean.norm())


def default_rtol(samples: int, features: int, eps: float) -> float:
    """Return which part of the largest singular value the tolerance is.

    The number of features times `eps`, the machine epsilon of their dtype (that of float32 for half
    precision), and at least what a float64 Gram matrix resolves, so that it makes no difference
    from which matrix the rank is found. `numpy.linalg.matrix_rank` takes the larger side of the
    matrix in place of the number of features: for a stream of samples that would grow without
    end, and with it what counts as zero.
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
        centred: whether the mean of each feature is taken away first. What that leaves of rounding
            counts as zero (see `centring_error`).
        rtol: singular values up to this part of the largest count as zero. None: see
            `default_rtol`; 0 if there is an `atol`.
        atol: singular values up to this count as zero, in the units of the features.
        eps: how exact the matrix is; None for the machine epsilon of its dtype.

    Raises:
        InputError: it is no matrix of real numbers, or a tolerance is negative.

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
    least = 0.0
    if centred and len(rows):
        mean = rows.mean(0)
        rows = rows - mean
        least = centring_error(samples, features, mean)
    finite = bool(rows.isfinite().all())
    values = torch.linalg.svdvals(rows) if finite else _unknown(min(samples, features))
    return _spectrum(values, samples, features, rtol, atol, eps, least)


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

    Args:
        gram: float64, symmetric: of the columns (features x features) or the rows (samples x
            samples) of the matrix.
        samples: how many rows the matrix had.
        features: how many columns.
        eps: machine epsilon of the dtype that the matrix had.
        rtol: as for `spectrum`.
        atol: as for `spectrum`.
        least: singular values up to this count as zero, whatever the tolerances are.

    Raises:
        InputError: a tolerance is below what the Gram matrix resolves (see `resolution`).

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
            f"singular values up to {found.tolerance:.2g} are to count as zero, but a Gram matrix "
            f"of {samples} samples and {features} features, the largest of whose singular values "
            f"is {largest:.4g}, does not tell those up to {finest:.2g} from zero: raise rtol or "
            "atol, or use mode='a'"
        )
    return found


def spectrum_of_products(
    products: Products, *, centred: bool, rtol: float | None = None, atol: float = 0.0
) -> Spectrum:
    """Return the singular values of the matrix whose rows went into sums of products."""
    size = (products.count, products.width or 0)
    return spectrum_of_gram(
        products.centred if centred else products.uncentred,
        samples=size[0], features=size[1], eps=products.eps, rtol=rtol, atol=atol,
        least=centring_error(*size, products.mean) if centred and products.count else 0.0,
    )  # fmt: skip


def check_tolerances(rtol: float | None, atol: float) -> None:
    """Raise an `InputError` for tolerances that are negative, or no numbers."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None and name == "rtol":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise InputError(f"{name} has to be a number from 0 on, not {value!r}")


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
