"""Callbacks that set elements to zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import BendError
from bendtrace.interject.bends.affine import checked
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.drawing import DrawingBend, along, shuffled, sizes_of
from bendtrace.interject.bends.parameter import Expression, Value, value_of
from bendtrace.interject.bends.scores import chosen_by_score
from bendtrace.interject.effects import Effect
from bendtrace.interject.interjection import NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["Mask", "OrderedMask", "ThresholdActivation", "fraction"]


class Mask(DrawingBend):
    """Keeps each element with some probability, and sets the others to zero.

    The elements are chosen once per node, on its first use. A higher probability keeps further
    elements in addition to those kept before.

    Args:
        prob: probability with which an element is kept.
        seed: makes the choice reproducible, and equal for all nodes.
        dim: dimensions along which to choose, so that whole channels are kept or zeroed; the other
            sizes may then change. None chooses single elements, and the shape must not change.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Mask(0.5, seed=3, dim=-2)(torch.ones(4, 2))
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.],
                [1., 1.]])
    """

    def __init__(
        self,
        prob: Value | Expression = 0.3,
        seed: int | None = None,
        dim: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed, dim)
        self.prob: Any = checked("prob", prob)
        fraction("prob", prob, self)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with the other elements set to zero."""
        return tensor.masked_fill(~self.mask(tensor, at), 0)

    def mask(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return which elements are kept, in a shape that broadcasts to the tensor."""
        numbers = self.kept(tensor, at, _uniform)
        kept: Tensor = numbers < fraction("prob", self.prob, self, at)
        return kept

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor, with the numbers that it has drawn."""
        drawn = self.drawn(at, like)
        if isinstance(drawn, str):
            return drawn
        limit = self._limit(drawn, at)
        if type(limit) not in (int, float) or not drawn.dim():
            return "its share is no number"
        dim, sizes = self.dim, tuple(drawn.shape)

        def masked(tensor: Tensor, numbers: Tensor, limit: Tensor) -> Tensor:
            if sizes_of(tensor, dim, self, at) != sizes:
                raise ValueError("drawn for other sizes")
            return tensor.masked_fill(~(along(numbers, tensor, dim) < limit), 0)

        wide = drawn.dtype if drawn.dtype is torch.int64 else torch.float64
        limits = torch.tensor(limit, dtype=wide)
        return Effect(masked, (drawn, limits), (Mask, dim, sizes, drawn.dtype))

    def _limit(self, drawn: Tensor, at: NodePass) -> Any:
        """Return what the numbers of kept elements are less than."""
        return fraction("prob", self.prob, self, at)


class OrderedMask(Mask):
    """Keeps a share of the elements, and sets the others to zero.

    Unlike with `Mask`, the number of kept elements is fixed: the share times their number, rounded.

    Args:
        prob: share of the elements that is kept.
        seed: makes the choice reproducible, and equal for all nodes.
        dim: dimensions along which to choose; None chooses single elements.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.OrderedMask(0.5)(torch.ones(100)).sum()
        tensor(50.)
    """

    def mask(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return which elements are kept, in a shape that broadcasts to the tensor."""
        order = self.kept(tensor, at, shuffled)
        share = float(fraction("prob", self.prob, self, at))
        kept: Tensor = order < round(share * order.numel())
        return kept

    def _limit(self, drawn: Tensor, at: NodePass) -> Any:
        share = float(fraction("prob", self.prob, self, at))
        return round(share * drawn.numel())


class ThresholdActivation(Bend):
    """Keeps the share of channels with the greatest mean, and sets the others to zero.

    Each example is treated separately: the mean is over all dimensions after `dim`. It stores no
    numbers, so every size may change.

    Args:
        threshold: share of the channels that is kept.
        dim: the dimension of the channels. None compares all elements of the tensor.
        invert: whether to keep the channels with the smallest mean instead.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.ThresholdActivation(0.5, dim=-1)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
        tensor([[0., 4., 3., 0.]])
    """

    self_contained = True

    def __init__(
        self,
        threshold: Value | Expression = 0.5,
        dim: int | None = None,
        invert: bool = False,
    ) -> None:
        self.threshold: Any = checked("threshold", threshold)
        fraction("threshold", threshold, self)
        self.dim = dim
        self.invert = invert

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with the other channels set to zero."""
        share = fraction("threshold", self.threshold, self, at)
        chosen = chosen_by_score(tensor, share, self.dim, self.invert, self, at)
        mask = torch.zeros(chosen.shape, dtype=torch.bool, device=tensor.device)
        mask = mask.scatter(-1, chosen.indices, True).reshape(chosen.wide)
        return tensor.masked_fill(~mask, 0)


def fraction(name: str, value: Any, callback: Bend, at: NodePass | None = None) -> Any:
    """Return the value of an argument that has to be from 0 to 1."""
    share: Any = value_of(value)
    if isinstance(share, Tensor):
        fits = not share.is_complex() and bool(((share >= 0) & (share <= 1)).all())
    else:
        fits = not isinstance(share, complex) and 0 <= share <= 1
    if not fits:
        where = f" at {at.path!r}" if at is not None else ""
        raise BendError(
            f"{name} of {type(callback).__name__}{where} has to be a share from 0 to 1, not "
            f"{share!r}",
            "" if at is None else at.path,
        )
    return share


def _uniform(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(sizes, generator=generator, dtype=torch.float32, device="cpu")
