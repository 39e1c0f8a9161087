"""Callbacks that mix the examples of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import BendError, InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.parameter import Expression, value_of
from bendtrace.interject.effects import Effect, as_given, effect_of_value
from bendtrace.interject.interjection import NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["InterpolateActivation", "checked_weights", "mixed"]


class InterpolateActivation(Bend):
    """Returns weighted sums of the examples in the batch.

    Args:
        interp_weights: a tensor, or a parameter that holds one, with one weight per example, for
            one mixture; or a row of weights for each of several mixtures. None leaves the batch as
            it is. The attribute can be set between calls.
        softmax: whether to take the softmax of each row of weights.

    Raises:
        InputError: the weights are neither a tensor nor a parameter.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.InterpolateActivation(torch.tensor([0.25, 0.75]))(torch.tensor([[4.0], [8.0]]))
        tensor([[7.]])
    """

    self_contained = True

    def __init__(
        self, interp_weights: Tensor | Expression | None = None, softmax: bool = False
    ) -> None:
        self.interp_weights: Any = checked_weights(interp_weights)
        self.softmax = softmax

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the mixtures, one example for each row of weights."""
        if self.interp_weights is None:
            return tensor
        return mixed(tensor, value_of(self.interp_weights), self.softmax, self, at)

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        weights = value_of(self.interp_weights)
        if weights is None:
            return Effect(as_given, (), InterpolateActivation)
        if not isinstance(weights, Tensor):
            return "its weights are no tensor"
        softmax = self.softmax
        return effect_of_value(
            lambda tensor, weights: mixed(tensor, weights, softmax, self, at), weights, like,
            InterpolateActivation, softmax,
        )  # fmt: skip


def checked_weights(weights: Any) -> Any:
    """Return weights that have to be a tensor, an expression or None."""
    if weights is not None and not isinstance(weights, (Tensor, Expression)):
        raise InputError(
            "weights have to be a tensor, a BendingParameter that holds one, or None, not "
            f"{weights!r}"
        )
    return weights


def mixed(examples: Tensor, weights: Any, softmax: bool, callback: Bend, at: NodePass) -> Tensor:
    """Return weighted sums of the rows of a tensor.

    Args:
        examples: shape `(n, ...)`.
        weights: shape `(n,)` or `(rows, n)`.
        softmax: whether to take the softmax of each row of weights.
        callback: the callback, for messages.
        at: the node.
    """
    fits = isinstance(weights, Tensor) and weights.dim() in (1, 2) and examples.dim() > 0
    if not fits or weights.shape[-1] != examples.shape[0]:
        shown = tuple(weights.shape) if isinstance(weights, Tensor) else repr(weights)
        count = examples.shape[0] if examples.dim() else 0
        raise BendError(
            f"{type(callback).__name__} at {at.path!r} mixes {count} examples and needs "
            f"weights of shape ({count},) or (rows, {count}), not {shown}",
            at.path,
        )
    rows = weights.to(examples).reshape(-1, examples.shape[0])
    rows = rows.softmax(-1) if softmax else rows
    made: Tensor = torch.tensordot(rows, examples, dims=1)
    return made
