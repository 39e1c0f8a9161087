"""Statistics of the features that nodes give, one analyser for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.streaming.extremes import MinMax, TopK
from bendtrace.analysis.streaming.histogram import Histogram, even_edges
from bendtrace.analysis.streaming.moments import Covariance, Moments, Tally
from bendtrace.analysis.streaming.quantile import Quantiles
from bendtrace.analysis.values import Keep, check_keep, rows_of
from bendtrace.errors import InputError

__all__ = [
    "FeatureStatistics",
    "RunningCovariance",
    "RunningHistogram",
    "RunningMean",
    "RunningMinMax",
    "RunningQuantile",
    "RunningTopK",
    "RunningVariance",
    "UnitAnalyser",
]


class UnitAnalyser(Analyser):
    """An analyser of units: of what lies along some dimensions of a value.

    Args:
        keep: the dimension whose entries are units with results of their own: 1 for the channels
            of a convolution or the features of a linear layer, -1 for the last one, as in
            transformers; several, `(1, 3)`; `"units"` for all but the first; `()` for none, one
            result for the whole value. All other dimensions are taken together. A value of no or
            one dimension has none to keep.
        per_pass: see `Analyser`.

    Raises:
        InputError: `keep` is none of these.

    Example:
        >>> import torch, bendtrace as bt
        >>> x = torch.tensor([[1.0, -1.0], [3.0, 4.0]])
        >>> for keep in (1, ()):
        ...     mean = bt.analysis.RunningMean(keep=keep)
        ...     mean.update("relu", x)
        ...     print(mean.to_dict()["relu"]["mean"])
        [2.0, 1.5]
        1.75
        >>> isinstance(mean, bt.analysis.UnitAnalyser)
        True
    """

    def __init__(self, *, keep: Keep = 1, per_pass: bool = False) -> None:
        super().__init__(per_pass=per_pass)
        self.keep = check_keep(keep)


class FeatureStatistics(UnitAnalyser):
    """Mean, variance, smallest and largest value, and sparsity of each unit.

    The results are `count` (rows that were taken together), `mean`, `var`, `std`, `min`, `max`,
    `sparsity` (the part of values that are 0), `nonfinite` (how many are nan or infinite) and, if
    wanted, `skew` and `kurtosis`. They are those of all values at once, in float64 up to rounding;
    `min` and `max` are exact, in the dtype of the values. A nan makes those of its unit nan.

    Args:
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        higher: whether skewness and (excess) kurtosis are wanted, as `scipy.stats` defines them.
        correction: what is taken from the count for the variance: 1 as in `torch.var`, 0 as in
            `numpy.var`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x))
        >>> statistics = bt.analysis.FeatureStatistics()
        >>> with bended.interject("relu", statistics, allow_none=True):
        ...     for x in torch.tensor([[[1.0, -1.0]], [[3.0, 4.0]], [[5.0, -1.0]]]):
        ...         _ = bended(x)
        >>> statistics.results["relu"]["mean"]
        tensor([3.0000, 1.3333], dtype=torch.float64)
        >>> statistics.to_dict()["relu"]["sparsity"]
        [0.0, 0.6666666666666666]
    """

    def __init__(
        self,
        *,
        keep: Keep = 1,
        higher: bool = False,
        correction: int = 1,
        per_pass: bool = False,
    ) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        self.higher = higher
        self.correction = _checked_correction(correction)

    def start(self, key: str) -> Any:
        """Return the statistics of a node."""
        return {
            "moments": Moments(4 if self.higher else 2),
            "extremes": MinMax(),
            "zero": Tally(),
            "nonfinite": Tally(),
        }

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        rows = rows_of(value, self.keep)
        state["moments"].update(rows)
        state["extremes"].update(rows)
        state["zero"].update(rows == 0)
        state["nonfinite"].update(~rows.isfinite())

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the statistics by name."""
        moments = state["moments"]
        variance = moments.variance(self.correction)
        found = {
            "count": moments.count,
            "mean": moments.mean,
            "var": variance,
            "std": variance.sqrt(),
            **state["extremes"].result(),
            "sparsity": state["zero"].result().double() / moments.count,
            "nonfinite": state["nonfinite"].result(),
        }
        if self.higher:
            found |= {"skew": moments.skewness, "kurtosis": moments.kurtosis}
        return found


class RunningMean(UnitAnalyser):
    """The mean of each unit: `count`, `mean`.

    Args:
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> mean = bt.analysis.RunningMean()
        >>> for x in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 8.0]])):
        ...     mean.update("fc", x)
        >>> mean.to_dict()
        {'fc': {'count': 2, 'mean': [2.0, 5.0]}}
    """

    def start(self, key: str) -> Any:
        """Return the mean of a node."""
        return Moments(1)

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count` and `mean`."""
        return {"count": state.count, "mean": state.mean}


class RunningVariance(UnitAnalyser):
    """Mean and variance of each unit: `count`, `mean`, `var`.

    Args:
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        correction: see `FeatureStatistics`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> variance = bt.analysis.RunningVariance(correction=0)
        >>> variance.update("fc", torch.tensor([[1.0], [3.0]]))
        >>> variance.to_dict()
        {'fc': {'count': 2, 'mean': [2.0], 'var': [1.0]}}
    """

    def __init__(self, *, keep: Keep = 1, correction: int = 1, per_pass: bool = False) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        self.correction = _checked_correction(correction)

    def start(self, key: str) -> Any:
        """Return the moments of a node."""
        return Moments(2)

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count`, `mean` and `var`."""
        return {"count": state.count, "mean": state.mean, "var": state.variance(self.correction)}


class RunningCovariance(UnitAnalyser):
    """Mean and covariance matrix of the units: `count`, `mean`, `covariance`.

    Units of several dimensions are taken as flat. Memory grows with the square of their number.

    Args:
        keep: which dimensions are units: see `UnitAnalyser`.
        correction: see `FeatureStatistics`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> covariance = bt.analysis.RunningCovariance()
        >>> covariance.update("fc", torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        >>> covariance.to_dict()["fc"]["covariance"]
        [[2.0, 4.0], [4.0, 8.0]]
    """

    def __init__(self, *, keep: Keep = 1, correction: int = 1, per_pass: bool = False) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        self.correction = _checked_correction(correction)

    def start(self, key: str) -> Any:
        """Return the covariance of a node."""
        return Covariance(self.correction)

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count`, `mean` (units,) and `covariance` (units, units)."""
        return {"count": state.count, "mean": state.mean, "covariance": state.result()}


class RunningMinMax(UnitAnalyser):
    """The smallest and largest value of each unit, in the values' own dtype: `count`, `min`, `max`.

    Args:
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> extremes = bt.analysis.RunningMinMax(keep=())
        >>> extremes.update("embedding.input", torch.tensor([[5, 9], [2, 7]]))
        >>> extremes.to_dict()
        {'embedding.input': {'count': 4, 'min': 2, 'max': 9}}
    """

    def start(self, key: str) -> Any:
        """Return the extremes of a node."""
        return MinMax()

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count`, `min` and `max`."""
        return {"count": state.count, **state.result()}


class RunningQuantile(UnitAnalyser):
    """Quantiles of each unit: `count`, `quantiles` (len(ranks), units), `rank_error`.

    Exact while there are fewer than `2 * size` rows, then within `rank_error`, a bound that is
    never exceeded: see `Quantiles`.

    Args:
        ranks: which quantiles, from 0 to 1.
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        size: how many values are kept at each level; more is more precise.
        per_pass: see `Analyser`.

    Raises:
        InputError: a rank or the size makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> quantile = bt.analysis.RunningQuantile([0.5], keep=())
        >>> quantile.update("fc", torch.tensor([[1.0, 2.0], [9.0, 3.0]]))
        >>> quantile.to_dict()
        {'fc': {'count': 4, 'quantiles': [2.5], 'rank_error': 0.0}}
    """

    def __init__(
        self,
        ranks: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
        *,
        keep: Keep = 1,
        size: int = 1024,
        per_pass: bool = False,
    ) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        Quantiles(size).at(ranks)  # which says what is wrong with them
        self.ranks = tuple(map(float, ranks))
        self.size = size

    def start(self, key: str) -> Any:
        """Return the quantiles of a node."""
        return Quantiles(self.size)

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count`, `quantiles` and `rank_error`."""
        return {
            "count": state.count,
            "quantiles": state.at(self.ranks),
            "rank_error": state.rank_error,
        }


class RunningHistogram(UnitAnalyser):
    """How many values of each unit are in each bin: `count`, `counts`, `below`, `above`, `nan`.

    Whole numbers, as `numpy.histogram` counts them: see `Histogram`.

    Args:
        edges: (bins + 1,), ascending; or how many bins of equal width.
        low: where the lowest of so many bins begins.
        high: where the highest of them ends.
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Raises:
        InputError: there is no such histogram.

    Example:
        >>> import torch, bendtrace as bt
        >>> histogram = bt.analysis.RunningHistogram(2, 0.0, 1.0, keep=())
        >>> histogram.update("sigmoid", torch.tensor([[0.1, 0.5, 0.7]]))
        >>> histogram.to_dict()["sigmoid"]["counts"]
        [1, 2]
    """

    def __init__(
        self,
        edges: int | Sequence[float] | Tensor,
        low: float | None = None,
        high: float | None = None,
        *,
        keep: Keep = 1,
        per_pass: bool = False,
    ) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        if isinstance(edges, int):
            if low is None or high is None:
                raise InputError("a number of bins needs low= and high= as well, or give the edges")
            edges = even_edges(edges, low, high)
        elif low is not None or high is not None:
            raise InputError("edges say where the bins begin and end: leave out low= and high=")
        self.edges = Histogram(edges).edges

    def start(self, key: str) -> Any:
        """Return the histogram of a node."""
        return Histogram(self.edges)

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the counts."""
        return {"count": state.count, **state.result()}


class RunningTopK(UnitAnalyser):
    """The k largest values of each unit, and the samples that they came from.

    The results are `count`, `values`, `samples` and `positions`, (k, units) each; `positions` say
    where in its sample a value is, counted along the dimensions that are not kept. Of equal values
    those of the smaller sample number come first, then those of the smaller position.

    Which samples of the data set are in a batch is what `samples` was set to; if to None, they are
    counted as they come by at the node. At a node that some batches do not come by, and for
    merging the results of several workers, set it.

    Args:
        k: how many.
        keep: which dimensions have results of their own: see `UnitAnalyser`.
        largest: whether the largest, or the smallest.
        once: whether each sample counts once, with its best value, or at all positions.
        per_pass: see `Analyser`.

    Raises:
        InputError: k is no positive whole number.

    Example:
        >>> import torch, bendtrace as bt
        >>> top = bt.analysis.RunningTopK(2)
        >>> top.update("fc", torch.tensor([[1.0], [7.0]]), samples=[10, 11])
        >>> top.update("fc", torch.tensor([[3.0], [2.0]]), samples=[12, 13])
        >>> top.to_dict()["fc"]["values"], top.to_dict()["fc"]["samples"]
        ([[7.0], [3.0]], [[11], [12]])
    """

    def __init__(
        self,
        k: int = 10,
        *,
        keep: Keep = 1,
        largest: bool = True,
        once: bool = True,
        per_pass: bool = False,
    ) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        TopK(k)  # which says what is wrong with it
        self.k = k
        self.largest = largest
        self.once = once

    def start(self, key: str) -> Any:
        """Return the largest values of a node, and how many samples there were."""
        return {"top": TopK(self.k, largest=self.largest), "seen": Tally()}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Take a value in."""
        value = value.reshape(1) if value.dim() == 0 else value
        many = value.shape[0]
        samples = batch.samples
        if samples is None:
            samples = torch.arange(many) + state["seen"].count
        elif samples.shape[0] != many:
            raise InputError(
                f"{samples.shape[0]} numbers of samples are set, but the value has the shape "
                f"{tuple(value.shape)}, whose first dimension should count the same samples"
            )
        rows = rows_of(value, self.keep)
        each = rows.shape[0] // many if many else 1
        if self.once and many:
            split = rows.reshape(many, each, *rows.shape[1:])
            best, positions = self._best(split)
            state["top"].update(best, samples, positions)
        else:
            positions = torch.arange(each).repeat(many)
            state["top"].update(rows, samples.repeat_interleave(each), positions)
        state["seen"].update(torch.ones(many, dtype=torch.bool))

    def _best(self, split: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best value of each sample, and the first position of it.

        Args:
            split: (samples, positions, *units), with at least one position.
        """
        if split.shape[1] == 0:
            raise InputError(f"the samples of a value of shape {tuple(split.shape)} are empty")
        values = split.to(torch.uint8) if split.dtype == torch.bool else split
        least = -torch.inf if self.largest else torch.inf
        filled = values
        if values.is_floating_point():
            filled = torch.where(values.isnan(), least, values)
        best = filled.amax(1) if self.largest else filled.amin(1)
        hit = filled == best.unsqueeze(1)
        if values.is_floating_point():  # where all are nan, so is the best one
            hit &= ~values.isnan() | values.isnan().all(1, keepdim=True)
            best = torch.where(values.isnan().all(1), torch.nan, best)
        return best, hit.to(torch.uint8).argmax(1)  # the first of several

    def result(self, state: Any) -> dict[Any, Any]:
        """Return `count`, `values`, `samples` and `positions`."""
        return {"count": state["seen"].count, **state["top"].result()}


def _checked_correction(correction: Any) -> int:
    if type(correction) is not int or correction < 0:
        raise InputError(f"correction={correction!r}: a whole number from 0 on")
    return correction
