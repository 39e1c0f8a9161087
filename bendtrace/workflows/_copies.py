"""The inputs of a model, as copies that it may write to."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from bendtrace.calls import Call
from bendtrace.errors import InputError
from bendtrace.interject.structure import assemble, take_apart

__all__ = ["differentiable", "own_copy"]


def own_copy(call: Call, *, keeps_graph: bool = False) -> Call:
    """Return a call with copies of what it is made of, which the model may write to.

    Args:
        call: the call.
        keeps_graph: whether tensors that require gradients are taken as they are, so that these
            flow into them.

    Raises:
        InputError: something in it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in take_apart((call.args, dict(call.kwargs)))[1]:
        if isinstance(tensor, Tensor) and tensor.requires_grad and keeps_graph:
            memo[id(tensor)] = tensor
        elif isinstance(tensor, Tensor) and not tensor.is_leaf:  # which copy.deepcopy refuses
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        args, kwargs = copy.deepcopy((call.args, dict(call.kwargs)), memo)
    except Exception as error:
        raise InputError(
            "the inputs are given to the model many times, each time as a copy, and they cannot be "
            f"copied ({type(error).__name__}: {error})"
        ) from error
    return Call(args, kwargs)


def differentiable(call: Call) -> Call:
    """Have the floating point tensors in a call require gradients; they may be written to."""
    shape, found = take_apart((call.args, dict(call.kwargs)))
    made: dict[int, Tensor] = {}
    for i, value in enumerate(found):
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
            if id(value) not in made:
                made[id(value)] = value.requires_grad_().clone()
            found[i] = made[id(value)]
    return Call(*assemble(shape, found))
