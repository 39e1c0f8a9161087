"""Values of a model that is spread over ranks, put together."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["whole"]


def whole(value: Any) -> Any:
    """Return a value with each DTensor in it replaced by the tensor that it is a part of.

    All ranks of the tensors' meshes have to call it, since they send each other their parts. In
    an interjection that is one of the collectives that ranks agree upon.

    Args:
        value: a tensor of any shape, or tuples, lists and dicts (and what torch knows as a
            container besides) with tensors in them. What is no DTensor stays as it is.

    Returns:
        The same structure. Gradients flow back to the parts.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.distributed.whole([torch.ones(2), "as it is"])
        [tensor([1., 1.]), 'as it is']
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # nobody has made a DTensor
        return value

    def put_together(item: Any) -> Any:
        return item.full_tensor() if isinstance(item, module.DTensor) else item

    if isinstance(value, torch.Tensor):
        return put_together(value)
    return _pytree.tree_map(put_together, value)
