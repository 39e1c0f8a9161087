"""Callbacks that scale and shift."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.parameter import Expression, Value, fitted
from bendtrace.interject.interjection import NodePass

__all__ = ["Affine", "Bias", "Scale", "checked"]


class Bias(Bend):
    """Adds a number.

    Args:
        bias: a number, a parameter, or a tensor that goes with what is bent.

    Raises:
        InputError: something given is no number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Bias(1.0)(torch.zeros(2))
        tensor([1., 1.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0) -> None:
        self.bias = checked("bias", bias)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor plus the number."""
        made: Tensor = tensor + fitted(self.bias, tensor)
        return made


class Scale(Bend):
    """Multiplies with a number.

    Args:
        scale: a number, a parameter, or a tensor that goes with what is bent.

    Raises:
        InputError: something given is no number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Scale(-2.0)(torch.ones(2))
        tensor([-2., -2.])
    """

    self_contained = True

    def __init__(self, scale: Value | Expression = 1.0) -> None:
        self.scale = checked("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times the number."""
        made: Tensor = tensor * fitted(self.scale, tensor)
        return made


class Affine(Bend):
    """Multiplies with one number and adds another.

    Args:
        bias: what to add.
        scale: what to multiply with, before that.

    Raises:
        InputError: something given is no number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Affine(bias=1.0, scale=3.0)(torch.ones(2))
        tensor([4., 4.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0, scale: Value | Expression = 1.0) -> None:
        self.bias = checked("bias", bias)
        self.scale = checked("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times `scale`, plus `bias`."""
        made: Tensor = tensor * fitted(self.scale, tensor) + fitted(self.bias, tensor)
        return made


def checked(name: str, value: Any) -> Any:
    """Return an argument that has to be a number, a tensor or an expression."""
    if not isinstance(value, (numbers.Number, Tensor, Expression)):
        raise InputError(
            f"{name} is a number, a tensor or a BendingParameter, not {value!r} "
            f"({type(value).__name__})"
        )
    return value
