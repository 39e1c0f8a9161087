"""One linear probe: its map, its optimizer, what waits for it, and its scores."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace.analysis.matrices import Products, check_width
from bendtrace.analysis.scores import ClassScores, ValueScores
from bendtrace.analysis.streaming.statistic import Statistic, decoded, encoded
from bendtrace.errors import InputError

__all__ = ["Probe"]


class Probe(Statistic):
    """What there is at one node.

    Attributes:
        linear: the map; None before features were seen, or before it is solved.
        optimizer: None until it is asked for.
        optimizer_state: what the optimizer is to begin with; None if with nothing.
        waiting: features and targets of the next step.
        steps: how many were made.
        loss: that of the last one.
        sums: of products of features and targets, for a closed form.
        outputs: how many there are; 1 while that is not known.
        scores: None since it last changed.
    """

    def __init__(self) -> None:
        self.linear: nn.Linear | None = None
        self.optimizer: Optimizer | None = None
        self.optimizer_state: dict[str, Any] | None = None
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.steps = 0
        self.loss: Tensor | None = None
        self.sums = Products()
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
        """Make the map as `nn.Linear` is made after `torch.manual_seed(seed)`."""
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
        """Set the map, and make one if there is none."""
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
        """Raise an `InputError` if features or targets are of another number than before."""
        width = self.sums.width
        known = None if width is None else width - self.outputs
        if self.linear is not None:
            known = self.linear.in_features
        check_width(known, features)
        if known is not None and outputs != self.outputs:
            raise InputError(f"targets of {outputs} values, but of {self.outputs} before")

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return what waits as one batch, which waits no more."""
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

    def changed(self) -> None:
        """Forget the scores, which were those of another map."""
        self.scores = None

    def merge(self, other: Self) -> None:
        """Add what another one has taken in: sums before they are solved, scores of equal maps.

        Raises:
            InputError: the maps are not the same, or only one is solved.
        """
        if (self.linear is None) != (other.linear is None):
            raise InputError("one probe has a map, the other has none yet")
        if self.linear is None:
            self.check_sums(other)
            self.sums.merge(other.sums)
            self.outputs = other.outputs if other.sums.width is not None else self.outputs
        elif not _equal(self.linear, other.linear):
            raise InputError(
                "the probes are not the same map: scores are added up of one that was loaded "
                "everywhere, and sums before they are solved"
            )
        elif not _equal_sums(self.sums, other.sums):
            raise InputError("they were solved from different sums: merge these, and then solve")
        self.waiting += other.waiting
        if other.scores is not None:
            if self.scores is None:
                self.scores = copy.deepcopy(other.scores)
            else:
                self.scores.merge(other.scores)  # type: ignore[arg-type]

    def check_sums(self, other: Self) -> None:
        """Raise an `InputError` if sums are of other features, or other targets."""
        if self.sums.width is not None and other.sums.width is not None:
            check_width(self.sums.width - self.outputs, other.sums.width - other.outputs)
            if self.outputs != other.outputs:
                raise InputError(f"targets of {other.outputs} values there, of {self.outputs} here")

    def result(self) -> dict[str, Any]:
        """Return the scores by name."""
        return {} if self.scores is None else self.scores.result()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it but what waits, as containers of tensors and numbers."""
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
        """Hold what another held."""
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
