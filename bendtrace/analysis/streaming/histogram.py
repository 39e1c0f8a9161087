"""How many values of a stream fall between given edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.moments import check_same, check_shape
from bendtrace.analysis.streaming.statistic import Statistic
from bendtrace.errors import InputError

__all__ = ["Histogram", "even_edges"]


def even_edges(bins: int, low: float, high: float) -> Tensor:
    """Return the edges of bins of equal width, (bins + 1,), as `numpy.linspace` gives them.

    Raises:
        InputError: there is no bin, or no width.

    Example:
        >>> even_edges(2, 0.0, 1.0)
        tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    if type(bins) is not int or bins < 1 or not low < high or not _is_finite(low, high):
        raise InputError(f"{bins!r} bins from {low!r} to {high!r}: at least one, of some width")
    edges = torch.arange(bins + 1, dtype=torch.float64) * ((high - low) / bins) + low
    edges[-1] = high
    return edges


class Histogram(Statistic):
    """How many values of each unit are in each bin, as whole numbers, as `numpy.histogram` counts.

    A bin includes its lower edge and not its upper one, but the last one includes both. What lies
    outside is counted as `below` and `above` (infinities there, too), and nan as `nan`.

    Args:
        edges: (bins + 1,), ascending.

    Attributes:
        count: how many rows there were.

    Raises:
        InputError: the edges are not ascending, or not finite.

    Example:
        >>> import torch, bendtrace as bt
        >>> histogram = bt.analysis.Histogram([0.0, 1.0, 2.0])
        >>> histogram.update(torch.tensor([0.0, 1.0, 2.0, -3.0, float("nan")]))
        >>> histogram.result()["counts"], histogram.result()["below"]
        (tensor([1, 2]), tensor(1))
    """

    def __init__(self, edges: Tensor | Sequence[float]) -> None:
        found = torch.as_tensor(edges, dtype=torch.float64).detach().cpu().clone()
        if found.dim() != 1 or len(found) < 2 or not found.isfinite().all():
            raise InputError(f"edges= are at least two finite numbers, not {edges!r}")
        if not bool((found.diff() > 0).all()):
            raise InputError(f"edges= ascend, each larger than the one before: {edges!r}")
        self.edges = found
        self.count = 0
        self._shape: tuple[int, ...] | None = None
        self._counts: Tensor | None = None  # (units, bins + 3): below, bins, above, nan

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`.

        Raises:
            InputError: they are of another shape than the ones before.
        """
        check_shape(rows, self._shape)
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
        self._shape = tuple(rows.shape[1:])
        self._add(found.reshape(units, bins + 3), count)

    def _add(self, counts: Tensor, count: int) -> None:
        known = self._counts
        self._counts = counts if known is None else known + counts.to(known.device)
        self.count += count

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: it has other edges, or its rows are of another shape.
        """
        check_same("the list of edges", self.edges.tolist(), other.edges.tolist())
        if self._shape is not None and other._shape is not None:
            check_same("the shape of the units", self._shape, other._shape)
        if other._counts is not None:
            self._shape = other._shape
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


def _is_finite(*values: float) -> bool:
    return all(-float("inf") < value < float("inf") for value in values)
