"""Statistics of the outputs of nodes, one class for each kind of statistic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.insert.interjection import Interjection, NodePass
from bendtrace.python.checks import required_int
from bendtrace.research.analyser import Analyser, Batch
from bendtrace.research.streaming import (
    Covariance,
    Histogram,
    Keep,
    MinMax,
    Moments,
    Quantiles,
    Tally,
    TopK,
    accumulator,
    check_keep,
    even_edges,
    rows_of,
)


class UnitAnalyser(Analyser):
    """An analyser of units: the entries along some dimensions of a value.

    Args:
        keep: the dimension whose entries are units with separate results: 1 for the channels of a
            convolution or the features of a linear layer, -1 for the last one, as in transformers;
            several, `(1, 3)`; `"units"` for all but the first; `()` for none, one result for the
            whole value. All other dimensions are reduced. A value with fewer than two dimensions
            has none to keep.
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

    def start(self, key: str) -> Any:
        """Return the statistic of a node."""
        return self._new()

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add a value."""
        state.update(rows_of(value, self.keep))

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the number of rows, and the results of the statistic, by name."""
        return {"count": state.count, **self._results(state)}

    def _new(self) -> Any:
        raise NotImplementedError

    def _results(self, state: Any) -> Any:
        return state.result()


class _Corrected(UnitAnalyser):
    def __init__(self, *, keep: Keep = 1, correction: int = 1, per_pass: bool = False) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        self.correction: int = required_int("correction", correction, 0)


class FeatureStatistics(_Corrected):
    """Mean, variance, smallest and largest value, and sparsity of each unit.

    The results are `count` (the number of rows), `mean`, `var`, `std`, `min`, `max`, `sparsity`
    (the fraction of values that are 0), `nonfinite` (the number of nan or infinite values) and, if
    requested, `skew` and `kurtosis`. They describe all values together, in float64 up to
    rounding; `min` and `max` are exact, in the dtype of the values. A nan makes the results of its
    unit nan.

    Args:
        keep: the dimensions with separate results: see `UnitAnalyser`.
        higher: whether to compute skewness and (excess) kurtosis, as `scipy.stats` defines them.
        correction: subtracted from the count in the divisor of the variance: 1 as in `torch.var`, 0
            as in `numpy.var`.
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
        self, *, keep: Keep = 1, higher: bool = False, correction: int = 1, per_pass: bool = False
    ) -> None:
        super().__init__(keep=keep, correction=correction, per_pass=per_pass)
        self.higher = higher

    def _new(self) -> Any:
        order = 4 if self.higher else 2
        return {
            "moments": Moments(order, self.correction), "extremes": MinMax(), "zero": Tally(),
            "nonfinite": Tally(),
        }  # fmt: skip

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add a value."""
        rows = rows_of(value, self.keep)
        state["moments"].update(rows)
        state["extremes"].update(rows)
        state["zero"].update(rows == 0)
        state["nonfinite"].update(~rows.isfinite())

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the statistics by name."""
        found = state["moments"].result()
        higher = {name: found.pop(name) for name in ("skew", "kurtosis") if name in found}
        zeros, nonfinite = state["zero"].result().double(), state["nonfinite"].result()
        return {
            **found, "std": found["var"].sqrt(), **state["extremes"].result(),
            "sparsity": zeros / found["count"], "nonfinite": nonfinite, **higher,
        }  # fmt: skip


class RunningMean(UnitAnalyser):
    """The mean of each unit: `count`, `mean`.

    Args:
        keep: the dimensions with separate results: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> mean = bt.analysis.RunningMean()
        >>> for x in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 8.0]])):
        ...     mean.update("fc", x)
        >>> mean.to_dict()
        {'fc': {'count': 2, 'mean': [2.0, 5.0]}}
    """

    def _new(self) -> Any:
        return Moments(1)


class RunningVariance(_Corrected):
    """Mean and variance of each unit: `count`, `mean`, `var`.

    Args:
        keep: the dimensions with separate results: see `UnitAnalyser`.
        correction: see `FeatureStatistics`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> variance = bt.analysis.RunningVariance(correction=0)
        >>> variance.update("fc", torch.tensor([[1.0], [3.0]]))
        >>> variance.to_dict()
        {'fc': {'count': 2, 'mean': [2.0], 'var': [1.0]}}
    """

    def _new(self) -> Any:
        return Moments(2, self.correction)


class RunningCovariance(_Corrected):
    """Mean and covariance matrix of the units: `count`, `mean`, `covariance`.

    Units of several dimensions are flattened. Memory grows with the square of their number.

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

    def _new(self) -> Any:
        return Covariance(self.correction)

    def _results(self, state: Any) -> dict[str, Any]:
        return {"mean": state.mean, "covariance": state.result()}


class RunningMinMax(UnitAnalyser):
    """The smallest and largest value of each unit, in the values' own dtype: `count`, `min`, `max`.

    Args:
        keep: the dimensions with separate results: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> extremes = bt.analysis.RunningMinMax(keep=())
        >>> extremes.update("embedding.input", torch.tensor([[5, 9], [2, 7]]))
        >>> extremes.to_dict()
        {'embedding.input': {'count': 4, 'min': 2, 'max': 9}}
    """

    def _new(self) -> Any:
        return MinMax()


class RunningQuantile(UnitAnalyser):
    """Quantiles of each unit: `count`, `quantiles` (len(ranks), units), `rank_error`.

    Exact while there are fewer than `2 * size` rows, then within `rank_error`, a bound that is
    never exceeded: see `Quantiles`.

    Args:
        ranks: which quantiles, from 0 to 1.
        keep: the dimensions with separate results: see `UnitAnalyser`.
        size: how many values are kept at each level; more is more precise.
        per_pass: see `Analyser`.

    Raises:
        InputError: a rank or the size is invalid.

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
        Quantiles(size).at(ranks)  # raises if they are wrong
        self.ranks: tuple[float, ...] = tuple(map(float, ranks))
        self.size = size

    def _new(self) -> Any:
        return Quantiles(self.size)

    def _results(self, state: Any) -> dict[str, Any]:
        return {"quantiles": state.at(self.ranks), "rank_error": state.rank_error}


class RunningHistogram(UnitAnalyser):
    """The number of values of each unit in each bin: `count`, `counts`, `below`, `above`, `nan`.

    The counts are integers, as in `numpy.histogram`: see `Histogram`.

    Args:
        edges: (bins + 1,), ascending; or the number of bins of equal width.
        low: the lower edge of the lowest bin, for a number of bins.
        high: the upper edge of the highest one.
        keep: the dimensions with separate results: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Raises:
        InputError: the edges are invalid.

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
                raise InputError("a number of bins also needs low= and high=; or pass the edges")
            edges = even_edges(edges, low, high)
        elif low is not None or high is not None:
            raise InputError("edges already define the bins: do not pass low= and high=")
        self.edges: Tensor = Histogram(edges).edges

    def _new(self) -> Any:
        return Histogram(self.edges)


class RunningTopK(UnitAnalyser):
    """The k largest values of each unit, and the samples that they came from.

    The results are `count`, `values`, `samples` and `positions`, (k, units) each; `positions` are
    the indices of the values within their samples, counted along the dimensions that are not kept.
    Equal values are ordered by sample number, then by position.

    `samples` of the analyser numbers the samples of a batch; if it is None, they are counted at the
    node. Set it for nodes that some batches do not reach, and to merge the results of several
    workers.

    Args:
        k: the number of values.
        keep: the dimensions with separate results: see `UnitAnalyser`.
        largest: whether to keep the largest or the smallest values.
        once: whether each sample counts once, with its best value, or with all positions.
        per_pass: see `Analyser`.

    Raises:
        InputError: k is not a positive integer.

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
        TopK(k)  # raises if it is wrong
        self.k = k
        self.largest = largest
        self.once = once

    def _new(self) -> Any:
        return {"top": TopK(self.k, largest=self.largest), "seen": Tally()}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add a value."""
        value = value.reshape(1) if value.dim() == 0 else value
        many = value.shape[0]
        samples = batch.samples
        if samples is None:
            samples = torch.arange(many) + state["seen"].count
        elif samples.shape[0] != many:
            raise InputError(
                f"there are {samples.shape[0]} sample numbers, but the value has shape "
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
        """Return the best value of each of (samples, positions, *units), and its position."""
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


class DeadReLU(UnitAnalyser):
    """Finds units that are never active in all the data, after a ReLU or another activation.

    A unit is active if its value is above the threshold; a nan counts as active, since such a unit
    is broken, not silent. The results are `count` (rows), `active` (for how many of them each unit
    was active, int64), `dead` (whether it never was), `dead_count` and `dead_share`. A unit without
    data is not dead.

    Args:
        threshold: 0 for a ReLU; a little above 0 for GELU and the like.
        keep: which dimensions are units: see `UnitAnalyser`. With 1, a channel of a convolution is
            dead if it is dead at all positions; with `"units"` each position is a separate unit.
        per_pass: see `Analyser`.

    Raises:
        InputError: the threshold is not a number.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.ReLU())
        >>> dead = bt.analysis.DeadReLU()
        >>> with bended.interject("relu", dead):
        ...     for x in (torch.tensor([[1.0, -1.0]]), torch.tensor([[-2.0, -3.0]])):
        ...         _ = bended(x)
        >>> dead.to_dict()["relu"]["active"], dead.to_dict()["relu"]["dead"]
        ([1, 0], [False, True])
    """

    def __init__(self, *, threshold: float = 0.0, keep: Keep = 1, per_pass: bool = False) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        if not isinstance(threshold, (int, float)) or math.isnan(threshold):
            raise InputError(
                f"threshold={threshold!r} has to be a number; values above it are active"
            )
        self.threshold = threshold

    def _new(self) -> Any:
        return Tally()

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add a value."""
        state.update(~(rows_of(value, self.keep) <= self.threshold))

    def _results(self, state: Any) -> dict[str, Any]:
        active = state.result()
        dead = (active == 0) & (state.count > 0)
        count = int(dead.sum())
        share = count / dead.numel() if dead.numel() else 0.0
        return {"active": active, "dead": dead, "dead_count": count, "dead_share": share}


# Statistics of the gradients that pass through nodes.


def see_gradients(
    self: Analyser, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
) -> None:
    """Process the gradients selected by `of`: the `backward` method of gradient analysers."""
    if not self.enabled:
        return
    path, grads = at.path or "output", grad_output
    if gradients_of(self) == "input":
        path, grads = f"{path}.input", grad_input
    self.update(path, grads[0] if len(grads) == 1 else grads, number=at.number)


def gradients_of(analyser: Any) -> str:
    """Return the gradients that an analyser uses: those of `"output"` or `"input"`."""
    while not hasattr(analyser, "of"):  # a wrapper, or a list of those that look at the same
        analyser = analyser.analyser if hasattr(analyser, "analyser") else analyser[0]
    return str(analyser.of)


class GradientAnalyser(UnitAnalyser):
    """An analyser of the gradients that pass through nodes, instead of their outputs.

    If a node has several outputs (or inputs) with a gradient, each has separate results:
    `lstm|sub_0` for the first tensor among them. A call whose backward pass does not reach the
    node, or that ran without gradients, is ignored; an unused output has no gradient.

    Args:
        of: `"output"`, the gradients of outputs; or `"input"`, of inputs, under `fc.input`. These
            are the gradients through this execution of the node alone.
        keep: the dimensions with separate results: see `UnitAnalyser`.
        per_pass: see `Analyser`.

    Raises:
        InputError: `of` is neither.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Largest(bt.analysis.GradientAnalyser):
        ...     def start(self, key):
        ...         return bt.analysis.MinMax()
        ...     def update_state(self, state, value, batch):
        ...         state.update(value.abs())
        ...     def result(self, state):
        ...         return {"largest": state.result()["max"]}
        >>> bended, largest = bt.BendedModule(lambda x: (torch.exp(x) * 3).sum()), Largest()
        >>> with bended.interject("exp", largest):
        ...     bended(torch.zeros(2, 1, requires_grad=True)).backward()
        >>> largest.to_dict()
        {'exp': {'largest': [3.0]}}
    """

    after = Interjection.after  # so that it is not called there

    def __init__(
        self, *, of: Literal["output", "input"] = "output", keep: Keep = 1, per_pass: bool = False
    ) -> None:
        super().__init__(keep=keep, per_pass=per_pass)
        if of not in ("output", "input"):
            raise InputError(f'of={of!r} has to be "output" or "input"')
        self.of = of

    backward = see_gradients


class GradientAccumulation(GradientAnalyser):
    """The sum of the gradients at each node, and the norms of the gradients of each sample.

    The results are `count` (samples), `sum` and `mean_abs` of each unit (over all samples and
    positions), and `norm_mean`, `norm_std`, `norm_min`, `norm_max`: of the Euclidean norm of the
    gradient of each sample, over all dimensions but the first. All are summed in float64.

    The gradients of a loss that is a mean over the batch are divided by the size of the batch.
    Insert it like any analyser; see `GradientAnalyser` for the gradients that it uses.

    Args:
        of: see `GradientAnalyser`.
        keep: which dimensions have separate sums: see `UnitAnalyser`; `"units"` sums over samples
            alone.
        per_pass: see `Analyser`.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: (torch.exp(x) * torch.tensor([1.0, 3.0])).sum())
        >>> gradients = bt.analysis.GradientAccumulation()
        >>> with bended.interject("exp", gradients, allow_none=True):
        ...     for _ in range(2):
        ...         bended(torch.zeros(1, 2, requires_grad=True)).backward()
        >>> gradients.to_dict()["exp"]["sum"], gradients.to_dict()["exp"]["norm_mean"]
        ([2.0, 6.0], 3.1622776601683795)
    """

    def _new(self) -> Any:
        return {
            "units": Moments(1), "absolute": Moments(1), "norms": Moments(2), "extremes": MinMax(),
        }  # fmt: skip

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Add the gradient of a value."""
        rows = accumulator(rows_of(value, self.keep))
        state["units"].update(rows)
        state["absolute"].update(rows.abs())
        each = accumulator(value.reshape(1) if value.dim() == 0 else value)
        norms = each.reshape(each.shape[0], math.prod(each.shape[1:])).norm(dim=1)
        state["norms"].update(norms)
        state["extremes"].update(norms)

    def result(self, state: Any) -> dict[Any, Any]:
        """Return sums and norms by name."""
        norms, extremes = state["norms"], state["extremes"].result()
        return {
            "count": norms.count,
            "sum": state["units"].total,
            "mean_abs": state["absolute"].mean,
            "norm_mean": norms.mean,
            "norm_std": norms.variance().sqrt(),
            "norm_min": extremes["min"],
            "norm_max": extremes["max"],
        }
