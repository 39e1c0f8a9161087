"""Patches that record values and leave them unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bendtrace.interject.patches.base import Patch
from bendtrace.interject.patches.copies import copied_in

__all__ = ["ProbePatch", "RecordPatch"]


@dataclass(kw_only=True, eq=False, repr=False)
class ProbePatch(Patch[Any]):
    """Keeps the latest value of a node.

    Args:
        detach: whether to detach it from the autograd graph. If not, a loss on the activation
            supports backward, and the run's memory is kept as long as the activation.

    Attributes:
        activation: a copy of the latest value; None before the first.

    Example:
        >>> import torch, bendtrace as bt
        >>> probe = bt.patches.ProbePatch()
        >>> _ = probe.op(torch.ones(2))
        >>> probe.activation
        tensor([1., 1.])
    """

    activation: Any = field(default=None, init=False)
    detach: bool = True

    requires_clone = False
    observes = True
    self_contained = True

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Whether it can look after the run: unless gradients can be asked for of what it keeps."""
        return self.detach

    def op(self, original_output: Any) -> Any:
        """Keep a copy of the value."""
        self.activation = _snapshot(original_output, self.detach)
        return original_output


@dataclass(kw_only=True, eq=False, repr=False)
class RecordPatch(Patch[Any]):
    """Keeps all values of a node, over its passes and over calls of the model.

    Args:
        activations: an existing list to append to.
        detach: whether to detach them from the autograd graph.

    Attributes:
        activations: copies of the values, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> record = bt.patches.RecordPatch()
        >>> for value in (1.0, 2.0):
        ...     _ = record.op(torch.tensor(value))
        >>> record
        RecordPatch(activations=[tensor(1.), tensor(2.)])
    """

    activations: list[Any] = field(default_factory=list)
    detach: bool = True

    requires_clone = False
    observes = True
    self_contained = True

    @property
    def deferrable(self) -> bool:  # type: ignore[override]
        """Whether it can look after the run: unless gradients can be asked for of what it keeps."""
        return self.detach

    def op(self, original_output: Any) -> Any:
        """Keep a copy of the value."""
        self.activations.append(_snapshot(original_output, self.detach))
        return original_output


def _snapshot(value: Any, detach: bool) -> Any:
    return copied_in(value, _detached_copy if detach else Tensor.clone)


def _detached_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
