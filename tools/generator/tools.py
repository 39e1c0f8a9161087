"""What random programs import; of the two copies of a program both have the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Doubled", "Pair", "Stop", "in_float64"]


class Pair(NamedTuple):
    first: Any
    second: Any


class Stop(Exception):
    """Raised by programs."""


class Doubled(torch.autograd.Function):
    """Its backward says that it was this one's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def in_float64(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Call a function while another dtype is the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return function(x)
    finally:
        torch.set_default_dtype(before)
