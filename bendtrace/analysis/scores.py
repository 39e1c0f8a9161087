"""How well predictions fit targets, over a stream of batches."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.streaming.moments import Moments
from bendtrace.analysis.streaming.statistic import Statistic

__all__ = ["ClassScores", "ValueScores"]


class ClassScores(Statistic):
    """Loss, accuracy, accuracy among the best k, and accuracy for each class.

    Args:
        classes: how many classes there are.
        top_k: for which numbers k to count targets that are among the k largest predictions.

    Example:
        >>> scores = ClassScores(2)
        >>> predicted, targets = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> scores.add(predicted, targets, loss=1.4)
        >>> scores.result()["accuracy"], scores.result()["class_accuracy"]
        (0.5, tensor([1., 0.], dtype=torch.float64))
    """

    def __init__(self, classes: int, top_k: tuple[int, ...] = ()) -> None:
        self.top_k = tuple(top_k)
        self.count = 0
        self.loss = 0.0
        self.among = [0] * len(self.top_k)
        self.seen = torch.zeros(classes, dtype=torch.int64)
        self.correct = torch.zeros(classes, dtype=torch.int64)

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Take in predictions.

        Args:
            predictions: (n, classes), of which the largest is what is predicted.
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
        """Add what others have taken in."""
        self.count += other.count
        self.loss += other.loss
        self.among = [mine + theirs for mine, theirs in zip(self.among, other.among, strict=True)]
        self.seen += other.seen
        self.correct += other.correct

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN for those of no samples."""
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

    R2 is 1 minus the sum of squared errors over that of deviations of the targets from their mean,
    and the mean of it over the outputs, as in scikit-learn's `r2_score`: of constant targets it is
    1 where there are no errors, else 0, and NaN for less than two samples.

    Example:
        >>> scores = ValueScores(1)
        >>> scores.add(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]), loss=2.0)
        >>> scores.result()["mse"], scores.result()["r2"]
        (1.0, 0.75)
    """

    def __init__(self, outputs: int) -> None:
        self.loss = 0.0
        self.squares = torch.zeros(outputs, dtype=torch.float64)
        self.targets = Moments()

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Take in predictions.

        Args:
            predictions: (n, outputs).
            targets: (n, outputs).
            loss: summed over the samples.
        """
        truth = targets.to("cpu", torch.float64)
        self.squares += (predictions.to("cpu", torch.float64) - truth).square().sum(0)
        self.targets.update(truth)
        self.loss += loss

    def merge(self, other: Self) -> None:
        """Add what others have taken in."""
        self.targets.merge(other.targets)
        self.squares += other.squares
        self.loss += other.loss

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN for those of no samples."""
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
