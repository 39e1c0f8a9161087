"""One linear probe: its map, its optimizer, its pending batches, and its scores."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace.analysis.matrices import Products, check_width
from bendtrace.analysis.streaming.moments import Moments
from bendtrace.analysis.streaming.statistic import Statistic, decoded, encoded
from bendtrace.errors import InputError

__all__ = ["ClassScores", "Probe", "ValueScores"]


class ClassScores(Statistic):
    """Loss, accuracy, top-k accuracy, and accuracy for each class.

    Args:
        classes: the number of classes.
        top_k: the numbers k for the top-k accuracies.

    Example:
        >>> scores = ClassScores(2)
        >>> predicted, targets = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> scores.add(predicted, targets, loss=1.4)
        >>> scores.result()["accuracy"], scores.result()["class_accuracy"]
        (0.5, tensor([1., 0.], dtype=torch.float64))
    """

    correct: Tensor
    seen: Tensor
    loss: float
    count: int

    def __init__(self, classes: int, top_k: tuple[int, ...] = ()) -> None:
        self.top_k: tuple[int, ...] = tuple(top_k)
        self.count = 0
        self.loss = 0.0
        self.among: list[int] = [0] * len(self.top_k)
        self.seen = torch.zeros(classes, dtype=torch.int64)
        self.correct = torch.zeros(classes, dtype=torch.int64)

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Add predictions.

        Args:
            predictions: (n, classes), the largest of which is the predicted class.
            targets: (n,), numbers of classes.
            loss: summed over the samples.
        """
        classes = len(self.seen)
        is_right = predictions.argmax(1) == targets
        self.seen += torch.bincount(targets, minlength=classes).cpu()
        self.correct += torch.bincount(targets[is_right], minlength=classes).cpu()
        if self.top_k:
            best = predictions.topk(max(self.top_k), dim=1).indices == targets[:, None]
            for i, k in enumerate(self.top_k):
                self.among[i] += int(best[:, :k].sum())
        self.loss += loss
        self.count += len(targets)

    def merge(self, other: Self) -> None:
        """Add the scores of others."""
        self.count += other.count
        self.loss += other.loss
        self.among = [mine + theirs for mine, theirs in zip(self.among, other.among, strict=True)]
        self.seen += other.seen
        self.correct += other.correct

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN without samples."""
        return {
            "samples": self.count,
            "loss": _part(self.loss, self.count),
            "accuracy": _part(int(self.correct.sum()), self.count),
            **{
                f"top_{k}_accuracy": _part(among, self.count)
                for k, among in zip(self.top_k, self.among, strict=True)
            },
            "class_accuracy": self.correct.double() / self.seen,  # 0 / 0 is NaN
            "class_samples": self.seen.clone(),
        }


class ValueScores(Statistic):
    """Loss, mean squared error, and the coefficient of determination of each output.

    R2 is 1 minus the ratio of the sum of squared errors to that of the targets' deviations from
    their mean, averaged over the outputs, as in scikit-learn's `r2_score`: for constant targets it
    is 1 without errors, else 0, and NaN for fewer than two samples.

    Example:
        >>> scores = ValueScores(1)
        >>> scores.add(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]), loss=2.0)
        >>> scores.result()["mse"], scores.result()["r2"]
        (1.0, 0.75)
    """

    loss: float
    squares: Tensor

    def __init__(self, outputs: int) -> None:
        self.loss = 0.0
        self.squares = torch.zeros(outputs, dtype=torch.float64)
        self.targets: Moments = Moments()

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Add predictions and targets, (n, outputs) each, and the loss summed over them."""
        truth = targets.to("cpu", torch.float64)
        self.squares += (predictions.to("cpu", torch.float64) - truth).square().sum(0)
        self.targets.update(truth)
        self.loss += loss

    def merge(self, other: Self) -> None:
        """Add the scores of others."""
        self.targets.merge(other.targets)
        self.squares += other.squares
        self.loss += other.loss

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN without samples."""
        count = self.targets.count
        r2 = self._determination(count)
        return {
            "samples": count,
            "loss": _part(self.loss, count),
            "mse": _part(float(self.squares.mean()), count),
            "r2": float(r2.mean()),
            "output_mse": self.squares / count,
            "output_r2": r2,
        }

    def _determination(self, count: int) -> Tensor:
        if count < 2:
            return torch.full_like(self.squares, math.nan)
        spread = self.targets.variance(correction=0) * count
        is_constant = spread == 0
        found = 1 - self.squares / torch.where(is_constant, 1.0, spread)
        return torch.where(is_constant, (self.squares == 0).double(), found)


def _part(total: float, count: int) -> float:
    return total / count if count else math.nan


class Probe(Statistic):
    """The state of one node's probe.

    Attributes:
        linear: the map; None before features were seen, or before it is solved.
        optimizer: None until it is needed.
        optimizer_state: the initial state of the optimizer.
        waiting: features and targets for the next step.
        steps: the number of steps so far.
        loss: the loss of the last step.
        sums: of products of features and targets, for the closed form.
        outputs: the number of outputs; 1 while unknown.
        scores: None if the map has changed since.
    """

    outputs: int
    steps: int

    def __init__(self) -> None:
        self.linear: nn.Linear | None = None
        self.optimizer: Optimizer | None = None
        self.optimizer_state: dict[str, Any] | None = None
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.steps = 0
        self.loss: Tensor | None = None
        self.sums: Products = Products()
        self.outputs = 1
        self.scores: ClassScores | ValueScores | None = None

    def make(
        self,
        features: int,
        outputs: int,
        *,
        bias: bool,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the map like `nn.Linear` after `torch.manual_seed(seed)`."""
        linear = nn.utils.skip_init(
            nn.Linear, features, outputs, bias=bias, dtype=dtype, device="cpu"
        )
        generator = torch.Generator().manual_seed(seed)
        # Those of nn.Linear, seen in torch 2.13 to 2.15; tests/test_analysis_probes.py compares.
        nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
        if bias:
            bound = 1 / math.sqrt(features)
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
        self.linear = linear.to(device)
        self.outputs = outputs

    def set(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the map, and create it if necessary."""
        outputs, features = weight.shape
        with torch.inference_mode(False), torch.no_grad():
            linear = nn.utils.skip_init(
                nn.Linear, features, outputs, bias=bias is not None, dtype=weight.dtype,
                device=weight.device,
            )  # fmt: skip
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        self.linear, self.outputs = linear, outputs

    def check(self, features: int, outputs: int) -> None:
        """Raise an `InputError` if the number of features or targets has changed."""
        width = self.sums.width
        known = None if width is None else width - self.outputs
        if self.linear is not None:
            known = self.linear.in_features
        check_width(known, features)
        if known is not None and outputs != self.outputs:
            raise InputError(f"targets have {outputs} values, but {self.outputs} before")

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return the pending batches as one batch, and forget them."""
        waiting, self.waiting = self.waiting, []
        if len(waiting) == 1:
            features, targets = waiting[0]
        else:
            features = torch.cat([item for item, _ in waiting])
            targets = torch.cat([item for _, item in waiting])
        if self.linear is not None:
            weight = self.linear.weight
            features, targets = features.to(weight), targets.to(weight.device)
        return features, targets

    def merge(self, other: Self) -> None:
        """Add another one: its sums before they are solved, or its scores if the maps are equal."""
        if (self.linear is None) != (other.linear is None):
            raise InputError("one probe has a map, but the other has none yet")
        if self.linear is None:
            self.check_sums(other)
            self.sums.merge(other.sums)
            self.outputs = other.outputs if other.sums.width is not None else self.outputs
        elif not _equal(self.linear, other.linear):
            raise InputError(
                "the probes have different maps: scores can be merged if the same probe was "
                "loaded everywhere, and sums before they are solved"
            )
        elif not _equal_sums(self.sums, other.sums):
            raise InputError(
                "they were solved from different sums: merge the sums first, and then solve"
            )
        self.waiting += other.waiting
        if other.scores is not None:
            if self.scores is None:
                self.scores = copy.deepcopy(other.scores)
            else:
                self.scores.merge(other.scores)  # type: ignore[arg-type]

    def check_sums(self, other: Self) -> None:
        """Raise an `InputError` if the other sums have different features or targets."""
        if self.sums.width is not None and other.sums.width is not None:
            check_width(self.sums.width - self.outputs, other.sums.width - other.outputs)
            if self.outputs != other.outputs:
                raise InputError(
                    f"targets have {other.outputs} values there, but {self.outputs} here"
                )

    def result(self) -> dict[str, Any]:
        """Return the scores by name."""
        return {} if self.scores is None else self.scores.result()

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the pending batches, as containers of tensors and numbers."""
        linear = None
        if self.linear is not None:
            linear = {
                name: value.detach().clone() for name, value in self.linear.named_parameters()
            }
        state = self.optimizer_state
        if self.optimizer is not None:
            state = copy.deepcopy(self.optimizer.state_dict())
        return {
            "linear": linear,
            "optimizer": state,
            "steps": self.steps,
            "loss": None if self.loss is None else self.loss.clone(),
            "sums": encoded(self.sums),
            "outputs": self.outputs,
            "scores": None if self.scores is None else encoded(self.scores),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another probe."""
        Probe.__init__(self)
        if state["linear"] is not None:
            self.set(state["linear"]["weight"], state["linear"].get("bias"))
        self.optimizer_state = copy.deepcopy(state["optimizer"])
        self.steps, self.outputs = state["steps"], state["outputs"]
        self.loss = None if state["loss"] is None else state["loss"].clone()
        self.sums = decoded(state["sums"])
        self.scores = None if state["scores"] is None else decoded(state["scores"])


def _equal(one: nn.Linear, other: nn.Linear | None) -> bool:
    if other is None:
        return False
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape
        and torch.equal(mine[name], theirs[name].to(mine[name]))
        for name in mine
    )


def _equal_sums(one: Products, other: Products) -> bool:
    if one.count != other.count or one.width != other.width:
        return False
    return torch.equal(one.uncentred, other.uncentred.to(one.uncentred))
