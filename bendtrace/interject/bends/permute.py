"""Callbacks that move elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.bends.affine import checked
from bendtrace.interject.bends.drawing import DrawingBend, shuffled, sizes_of
from bendtrace.interject.bends.mask import fraction
from bendtrace.interject.bends.parameter import Expression, Value
from bendtrace.interject.bends.scores import chosen_by_score
from bendtrace.interject.effects import Effect
from bendtrace.interject.interjection import NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["Permute", "ThresholdPermute"]


class Permute(DrawingBend):
    """Permutes the channels, in an order drawn once per node, on its first use.

    Args:
        dim: the dimension of the channels; all other sizes may change.
        seed: makes the order reproducible, and equal for all nodes.

    Raises:
        InputError: `dim` is not an int.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Permute(-1, seed=1)(torch.arange(4.0))
        tensor([2., 3., 0., 1.])
    """

    dim: int

    def __init__(self, dim: int, seed: int | None = None) -> None:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InputError(f"dim of Permute has to be an int, not {dim!r}")
        super().__init__(seed, dim)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with its channels in the other order."""
        order = self.kept(tensor, at, shuffled)
        return tensor.index_select(self.dim, order.reshape(-1))

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor, with the order that it has drawn."""
        drawn = self.drawn(at, like)
        if isinstance(drawn, str):
            return drawn
        dim, sizes = self.dim, tuple(drawn.shape)

        def permuted(tensor: Tensor, order: Tensor) -> Tensor:
            if sizes_of(tensor, dim, self, at) != sizes:
                raise ValueError("drawn for other sizes")
            return tensor.index_select(dim, order.reshape(-1))

        return Effect(permuted, (drawn,), (Permute, dim, sizes))


class ThresholdPermute(DrawingBend):
    """Permutes the channels with the greatest mean among each other.

    Each example is treated separately, as in `ThresholdActivation`; the other channels stay in
    place. The permutation is drawn once per node.

    Args:
        threshold: share of the channels that move.
        dim: the dimension of the channels; all other sizes may change. None compares all elements
            of the tensor, whose shape then must not change.
        invert: whether to move the channels with the smallest mean instead.
        seed: makes the permutation reproducible, and equal for all nodes.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.ThresholdPermute(0.5, dim=-1, seed=1)(torch.tensor([1.0, 8.0, 2.0, 9.0]))
        tensor([1., 9., 2., 8.])
    """

    dim: int | None

    def __init__(
        self,
        threshold: Value | Expression = 0.5,
        dim: int | None = None,
        invert: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed, dim)
        if isinstance(self.dim, tuple):
            raise InputError(f"dim of ThresholdPermute has to be an int or None, not {dim!r}")
        self.threshold: Any = checked("threshold", threshold)
        fraction("threshold", threshold, self)
        self.invert = invert

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with some of its channels permuted."""
        share = fraction("threshold", self.threshold, self, at)
        rank = self.kept(tensor, at, shuffled).reshape(-1)
        chosen = chosen_by_score(tensor, share, self.dim, self.invert, self, at)
        places = chosen.indices.sort(dim=-1).values
        sources = places.gather(-1, rank[places].argsort(dim=-1))
        index = torch.arange(rank.numel(), device=tensor.device)
        index = index.expand(chosen.shape).scatter(-1, places, sources)
        if self.dim is None:
            return tensor.reshape(-1).gather(0, index).reshape(tensor.shape)
        index = index.reshape(chosen.wide).expand(tensor.shape)
        return tensor.gather(self.dim, index)
