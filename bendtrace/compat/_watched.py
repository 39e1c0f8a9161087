"""TorchWatcher's probes and its running cross covariance."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace.errors import InputError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass

__all__ = ["CrossCovariance", "LinearProbe"]


class LinearProbe(Interjection, nn.Module):
    """TorchWatcher's linear probes: one layer for each node, trained with any criterion.

    In contrast to `bendtrace.analysis.LinearProbe`, targets and losses are not checked: whatever
    the criterion takes for the outputs of the probes is accepted, such as targets of
    `nn.BCEWithLogitsLoss`. In training mode the outputs of the last call are kept for
    `train_step`; in evaluation mode scores are accumulated.

    Args:
        num_classes: outputs of each probe.
        partial_optim: a function from the parameters of a probe to its optimizer.
        criterion: the loss, a function of the outputs and the targets; None for none.

    Attributes:
        probes: the probes, by the name of the node with "_probe" after it. An item of a
            `nn.Sequential` is named by its number: "1_probe".
        optimisers: their optimizers, by the name of the node.
        targets: the targets of the next call.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> probe = tw.LinearProbe(1, torch.optim.Adam, torch.nn.BCEWithLogitsLoss())
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> watched = tw.interject_by_match(model, bt.node_selector.Activations.is_relu, probe)
        >>> probe.targets = torch.ones(4, 1)
        >>> _ = watched(torch.ones(4, 2))
        >>> probe.train_step()
        >>> list(probe.probes), probe.to_dict()["1"].shape
        (['1_probe'], torch.Size([4, 1]))
        >>> _ = probe.eval()
        >>> _ = watched(torch.ones(4, 2))
        >>> sorted(probe.to_dict()["1"])
        ['acc', 'loss']
    """

    observes = True

    def __init__(
        self,
        num_classes: int,
        partial_optim: Callable[[Any], Optimizer] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_classes = num_classes
        self.partial_optim = partial_optim or torch.optim.Adam
        self.criterion = criterion
        self.probes = nn.ModuleDict()
        self.optimisers: dict[str, Optimizer] = {}
        self.targets: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}
        self._scores: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return "LinearProbe"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep the outputs of the probe of a node, or score them."""
        if not isinstance(output, Tensor) or output.dim() == 0:
            raise InputError(f"a linear probe at {at.path!r} needs a batch, not {type(output)}")
        name = re.sub(r"(^|\.)sub_(\d+)(?=\.|$)", r"\1\2", at.path)
        features = output.detach().flatten(1)
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            key = f"{name.replace('.', '_')}_probe"
            if key not in self.probes:
                made = nn.Linear(features.shape[1], self.num_classes)
                self.probes[key] = made.to(features.device, features.dtype)
                self.optimisers[name] = self.partial_optim(self.probes[key].parameters())
            predicted = self.probes[key](features.clone())
            if self.training:
                self._outputs[name] = predicted
            else:
                self._score(name, predicted.detach())

    def _score(self, name: str, predicted: Tensor) -> None:
        targets = self._given()
        loss = float("nan") if self.criterion is None else float(self.criterion(predicted, targets))
        if targets.is_floating_point():
            right = (predicted > 0) == (targets > 0.5)
        else:
            right = predicted.argmax(1) == targets
        sums = self._scores.setdefault(name, [0.0, 0.0, 0.0])
        count = len(predicted)
        for place, amount in enumerate((right.float().mean().item() * count, loss * count, count)):
            sums[place] += amount

    def _given(self) -> Tensor:
        if self.targets is None:
            raise InputError("set the targets first: probe.targets = labels")
        return self.targets

    def train_step(self) -> None:
        """Make a step with each probe that the last call of the model reached.

        Raises:
            InputError: there is no criterion, or there are no targets.
        """
        if self.criterion is None:
            raise InputError("train_step needs a criterion")
        targets = self._given()
        with torch.inference_mode(False), torch.enable_grad():
            for name, predicted in self._outputs.items():
                optimiser = self.optimisers[name]
                optimiser.zero_grad()
                self.criterion(predicted, targets).backward(retain_graph=True)
                optimiser.step()
        self._outputs = {name: predicted.detach() for name, predicted in self._outputs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs of the last call (in training) or the scores, by node."""
        if self.training:
            return {name: predicted.detach() for name, predicted in self._outputs.items()}
        return {
            name: {"acc": right / count, "loss": loss / count}
            for name, (right, loss, count) in self._scores.items()
        }

    def reset(self) -> None:
        """Forget the outputs and the scores, but not the probes."""
        self._outputs.clear()
        self._scores.clear()


class CrossCovariance:
    """The covariance between two series of vectors, accumulated in float64.

    Example:
        >>> import torch, bendtrace as bt
        >>> cross = bt.compat.torchwatcher.CrossCovariance()
        >>> cross.add(torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]]))
        >>> cross.covariance()
        tensor([[1., 0.]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.count = 0
        self._means: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._products = torch.zeros(0)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add pairs of vectors.

        Args:
            a: (n, units), or (n, units, ...), where each position is a sample.
            b: the same with other units.

        Raises:
            InputError: they do not have the same number of samples.
        """
        one, other = _rows(a), _rows(b)
        if len(one) != len(other):
            raise InputError(f"{len(one)} samples of one and {len(other)} of the other")
        if not len(one):
            return
        means = [one.mean(0), other.mean(0)]
        centred = [one - means[0], other - means[1]]
        squares = [rows.square().sum(0) for rows in centred]
        products = centred[0].T @ centred[1]
        if not self.count:
            self.count, self._means = len(one), means
            self._squares, self._products = squares, products
            return
        total = self.count + len(one)
        apart = [new - old for new, old in zip(means, self._means, strict=True)]
        weight = self.count * len(one) / total
        self._products = self._products + products + weight * torch.outer(*apart)
        self._squares = [
            old + new + weight * far.square()
            for old, new, far in zip(self._squares, squares, apart, strict=True)
        ]
        self._means = [
            old + far * (len(one) / total) for old, far in zip(self._means, apart, strict=True)
        ]
        self.count = total

    def mean(self) -> list[Tensor]:
        """Return the means of both."""
        return list(self._means)

    def variance(self, unbiased: bool = True) -> list[Tensor]:
        """Return the variances of both."""
        return [squares / (self.count - unbiased) for squares in self._squares]

    def stdev(self, unbiased: bool = True) -> list[Tensor]:
        """Return the standard deviations of both."""
        return [variance.sqrt() for variance in self.variance(unbiased)]

    def covariance(self, unbiased: bool = True) -> Tensor:
        """Return the covariances: (units of a, units of b)."""
        return self._products / (self.count - unbiased)

    def correlation(self) -> Tensor:
        """Return the correlations: (units of a, units of b)."""
        one, other = self.stdev()
        return self.covariance() / one[:, None] / other


def _rows(values: Tensor) -> Tensor:
    rows = values.detach().double()
    if rows.dim() == 1:
        rows = rows[None]
    return rows.movedim(1, -1).reshape(-1, rows.shape[1])
