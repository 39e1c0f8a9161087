"""Callbacks that add noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.bends.affine import checked
from bendtrace.interject.bends.drawing import DrawingBend
from bendtrace.interject.bends.parameter import Expression, Value, fitted
from bendtrace.interject.interjection import NodePass

__all__ = ["Normal"]


class Normal(DrawingBend):
    """Adds normal noise, or multiplies by it.

    Each use of a node draws new noise. With a seed, the sequence of noise at a node is the same
    after each `reset`.

    Args:
        std: standard deviation of the noise.
        seed: makes the noise reproducible from each `reset` on, and equal for all nodes.
        dim: dimensions along which the noise differs; None for each element.
        op: "add" adds the noise, "mul" multiplies by it.
        fresh: whether to draw new noise on each use. If not, it is drawn once per node; then only
            the sizes outside `dim` may change, and without `dim` none.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> noise = bt.bends.Normal(0.1, seed=4)
        >>> first, second = noise(torch.zeros(2)), noise(torch.zeros(2))
        >>> noise.reset()
        >>> torch.equal(noise(torch.zeros(2)), first), torch.equal(first, second)
        (True, False)
    """

    def __init__(
        self,
        std: Value | Expression = 0.3,
        seed: int | None = None,
        dim: int | Sequence[int] | None = None,
        op: Literal["add", "mul"] = "add",
        fresh: bool = True,
    ) -> None:
        super().__init__(seed, dim)
        if op not in ("add", "mul"):
            raise InputError(f"op of Normal has to be 'add' or 'mul', not {op!r}")
        self.std: Any = checked("std", std)
        self.op = op
        self.fresh = fresh
        self._times: dict[str, int] = {}

    def reset(self) -> None:
        """Start the noise again. With a seed, the same noise follows."""
        super().reset()
        self._times = {}

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with noise."""
        draw = _complex if tensor.is_complex() else _real
        if self.fresh:
            number = self._times[at.path] = self._times.get(at.path, 0) + 1
            noise = self.once(tensor, at, draw, number)
        else:
            noise = self.kept(tensor, at, draw)
        scaled: Tensor = noise.to(tensor.dtype) * fitted(self.std, tensor)
        return tensor + scaled if self.op == "add" else tensor * scaled


def _real(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")


def _complex(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.complex64, device="cpu")
