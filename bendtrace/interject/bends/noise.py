"""Callbacks that add noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.bends.affine import checked
from bendtrace.interject.bends.drawing import DrawingBend
from bendtrace.interject.bends.parameter import Expression, Value, fitted
from bendtrace.interject.interjection import NodePass

__all__ = ["Normal"]


class Normal(DrawingBend):
    """Adds normal noise, or multiplies with it.

    The noise is new each time a node is bent. With a seed, the first noise of a node is the same
    after each `reset`, and so are the second and the third.

    Args:
        std: standard deviation of the noise.
        seed: makes the noise the same for all nodes, and from each `reset` on.
        dim: dimensions along which the noise differs; None for each element.
        op: "add" adds the noise, "mul" multiplies with it.
        fresh: whether noise is drawn each time. If not, it is drawn once for each node; other
            sizes than those along `dim` may change then, and without `dim` none.

    Raises:
        InputError: something given makes no sense.

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
            raise InputError(f"op of Normal is 'add' or 'mul', not {op!r}")
        self.std = checked("std", std)
        self.op = op
        self.fresh = fresh
        self._times: dict[str, int] = {}

    def reset(self) -> None:
        """Begin anew. With a seed, the same noise comes again."""
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
