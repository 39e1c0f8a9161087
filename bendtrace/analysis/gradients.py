"""Statistics of the gradients that pass through nodes."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.features import UnitAnalyser
from bendtrace.analysis.streaming.moments import Moments
from bendtrace.analysis.streaming.orders import MinMax
from bendtrace.analysis.values import Keep, accumulator, rows_of
from bendtrace.errors import InputError
from bendtrace.interject.interjection import Interjection, NodePass

__all__ = ["GradientAccumulation", "GradientAnalyser", "gradients_of", "see_gradients"]


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
        self,
        *,
        of: Literal["output", "input"] = "output",
        keep: Keep = 1,
        per_pass: bool = False,
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
