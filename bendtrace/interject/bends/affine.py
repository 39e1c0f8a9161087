"""Callbacks that scale and shift."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.parameter import Expression, Value, fitted, value_of
from bendtrace.interject.effects import Effect, as_number, chained, effect_of_value
from bendtrace.interject.interjection import NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["Affine", "Bias", "Scale", "checked"]


class Bias(Bend):
    """Adds a number.

    Args:
        bias: a number, a parameter, or a tensor that broadcasts with the value.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Bias(1.0)(torch.zeros(2))
        tensor([1., 1.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0) -> None:
        self.bias: Any = checked("bias", bias)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor plus the number."""
        made: Tensor = tensor + fitted(self.bias, tensor)
        return made

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _effect(operator.add, self.bias, like)


class Scale(Bend):
    """Multiplies by a number.

    Args:
        scale: a number, a parameter, or a tensor that broadcasts with the value.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Scale(-2.0)(torch.ones(2))
        tensor([-2., -2.])
    """

    self_contained = True

    def __init__(self, scale: Value | Expression = 1.0) -> None:
        self.scale: Any = checked("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times the number."""
        made: Tensor = tensor * fitted(self.scale, tensor)
        return made

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _effect(operator.mul, self.scale, like)


class Affine(Bend):
    """Multiplies by one number and adds another.

    Args:
        bias: the summand.
        scale: the factor, applied first.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Affine(bias=1.0, scale=3.0)(torch.ones(2))
        tensor([4., 4.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0, scale: Value | Expression = 1.0) -> None:
        self.bias: Any = checked("bias", bias)
        self.scale: Any = checked("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times `scale`, plus `bias`."""
        made: Tensor = tensor * fitted(self.scale, tensor) + fitted(self.bias, tensor)
        return made

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        scaled = _effect(operator.mul, self.scale, like)
        moved = _effect(operator.add, self.bias, like)
        if isinstance(scaled, str) or isinstance(moved, str):
            return scaled if isinstance(scaled, str) else moved
        if isinstance(value_of(self.scale), Tensor):
            return "a scale that is a tensor may change the dtype before the bias is fitted to it"
        return chained(scaled, moved)


def _effect(compute: Callable[[Any, Any], Any], value: Any, like: TensorMeta) -> Effect | str:
    held = value_of(value)
    if not isinstance(held, Tensor):
        return effect_of_value(
            lambda tensor, held: compute(tensor, as_number(held, tensor)), held, like, compute
        )
    return effect_of_value(
        lambda tensor, held: compute(tensor, fitted(held, tensor)), held, like, compute
    )


def checked(name: str, value: Any) -> Any:
    """Return an argument that has to be a number, a tensor or an expression."""
    if not isinstance(value, (numbers.Number, Tensor, Expression)):
        raise InputError(
            f"{name} has to be a number, a tensor or a BendingParameter, not {value!r} "
            f"({type(value).__name__})"
        )
    return value
