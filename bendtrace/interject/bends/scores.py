"""Choosing channels by their mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bendtrace.errors import BendError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.parameter import Value
from bendtrace.interject.interjection import NodePass

__all__ = ["Chosen", "chosen_by_score"]


class Chosen(NamedTuple):
    """Some channels of each example.

    Attributes:
        indices: their indices along the last dimension, the highest rank first.
        shape: as many elements as there are channels: the dimensions up to that of the channels.
        wide: the same with dimensions of size one after it, which broadcasts to the tensor.
    """

    indices: Tensor
    shape: tuple[int, ...]
    wide: tuple[int, ...]


def chosen_by_score(
    tensor: Tensor, share: Value, dim: int | None, invert: bool, callback: Bend, at: NodePass
) -> Chosen:
    """Choose the share of the channels of a tensor with the greatest mean.

    Args:
        tensor: the tensor.
        share: the share, from 0 to 1, rounded to whole channels.
        dim: the dimension of the channels; None for all elements as one row.
        invert: whether to choose the channels with the smallest mean instead.
        callback: the callback, for messages.
        at: the node.
    """
    values = tensor.detach()
    values = values.abs() if values.is_complex() else values
    if dim is None:
        scores = values.reshape(-1)
        wide = tuple(tensor.shape)
    else:
        if not -tensor.dim() <= dim < tensor.dim():
            raise BendError(
                f"{callback!r} has dim={dim}, but the tensor at {at.path!r} has shape "
                f"{tuple(tensor.shape)}",
                at.path,
            )
        place = dim % tensor.dim()
        after = tuple(range(place + 1, tensor.dim()))
        scores = values.mean(after) if after else values
        wide = tuple(scores.shape) + (1,) * len(after)
    order = torch.argsort(scores, dim=-1, descending=not invert, stable=True)
    count = round(float(share) * scores.shape[-1])  # type: ignore[arg-type]
    return Chosen(order[..., :count], tuple(scores.shape), wide)
