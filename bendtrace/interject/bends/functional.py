"""Callbacks made from functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bendtrace._checks import refuse_without_arguments
from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.effects import Effect
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.purity import effect_of_function
from bendtrace.tape.tape import TensorMeta

__all__ = ["Lambda"]


class Lambda(Bend):
    """Bends with a function.

    Args:
        fn: a function that takes the tensor and returns the new value. It can use parameters like
            numbers.

    Raises:
        InputError: `fn` cannot be called.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Lambda(lambda x: x.clamp(0, 1))(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        if not callable(fn):
            raise InputError(f"Lambda takes a function of a tensor, not {fn!r}")
        refuse_without_arguments(fn)
        self.fn = fn

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the result of the function."""
        made: Tensor = self.fn(tensor)
        return made

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what the function does, if a check finds that it does nothing else."""
        return effect_of_function(self.fn)

    def __repr__(self) -> str:
        return f"Lambda({getattr(self.fn, '__name__', repr(self.fn))})"
