"""Linear maps in closed form, from sums over a stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bendtrace.analysis.matrices import Products
from bendtrace.errors import InputError

__all__ = ["ridge"]

# From which part of the total variance on a penalty makes the equations well-conditioned enough for
# the quick way, which otherwise gives one of many solutions where features depend on each other.
_SAFE = 1e-8


def ridge(
    sums: Products, outputs: int, alpha: float = 1.0, *, bias: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the linear map with the least squared error, plus `alpha` times its squared weights.

    The bias is not penalised, as in scikit-learn's `Ridge`. With `alpha=0` it is that of least
    squares; of several the one with the smallest weights, as `numpy.linalg.lstsq` has it.

    It is solved by the normal equations in float64, whose condition number is the square of that of
    the features: with `alpha=0`, directions of features whose singular values are less than about
    1e-6 of the largest count as having none.

    Args:
        sums: of rows that are features and, after them, targets.
        outputs: how many of the columns are targets.
        alpha: weight of the penalty.
        bias: whether the map has a bias.

    Returns:
        The weight, (outputs, features), and the bias, (outputs,), which is 0 without one; float64.

    Raises:
        InputError: there are no rows, or features or targets that are not finite; or `alpha` is
            negative.

    Example:
        >>> sums = Products()
        >>> sums.update(torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]]))
        >>> ridge(sums, 1, alpha=0)
        (tensor([[2.]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    check_alpha(alpha)
    if not sums.count or sums.width is None:
        raise InputError("nothing was taken in: show batches, with targets, in training mode")
    products = sums.centred if bias else sums.uncentred
    if not bool(products.isfinite().all()):
        raise InputError("features or targets were not finite, so there is no solution")
    features = sums.width - outputs
    inner, mixed = products[:features, :features], products[:features, features:]
    weight = _solved(inner, mixed, float(alpha), max(sums.count, features)).T.contiguous()
    mean = sums.mean
    shift = (
        mean[features:] - weight @ mean[:features] if bias else torch.zeros_like(mean[features:])
    )
    return weight, shift


def check_alpha(alpha: Any) -> None:
    """Raise an `InputError` if something is no weight of a penalty."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < math.inf:
        raise InputError(f"alpha has to be a number from 0 on, not {alpha!r}")


def _solved(inner: Tensor, mixed: Tensor, alpha: float, size: int) -> Tensor:
    if alpha > _SAFE * float(inner.trace()):
        shifted = inner + alpha * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        factor = torch.linalg.cholesky(shifted)
        found: Tensor = torch.cholesky_solve(mixed, factor)
        return found
    values, vectors = torch.linalg.eigh(inner)
    # The same as for ranks: what a Gram matrix does not tell from zero.
    zero = size * torch.finfo(torch.float64).eps * values[-1:].clamp(min=0)
    kept = values > zero
    scale = torch.where(kept, 1 / torch.where(kept, values + alpha, 1.0), 0.0)
    solution: Tensor = vectors @ (scale[:, None] * (vectors.T @ mixed))
    return solution
