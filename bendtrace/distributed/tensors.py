"""Values of a model that is distributed over ranks, assembled."""

from __future__ import annotations

import sys
from typing import Any

import torch

from bendtrace.source.internals import pytree

__all__ = ["whole"]


def whole(value: Any) -> Any:
    """Return a value with each DTensor in it replaced by its full tensor.

    All ranks of the tensors' meshes have to call it, since they send each other their parts. In an
    interjection this is one of the collectives that ranks agree on.

    Args:
        value: a tensor of any shape, or tuples, lists and dicts (and other containers that torch
            knows) that contain tensors. Values that are not DTensors stay as they are.

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
    return pytree.tree_map(put_together, value)
