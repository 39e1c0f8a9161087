"""Effects: what an insertion does to a tensor, as a function of tensors that can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.tape.tape import TensorMeta

__all__ = ["Effect", "as_given", "as_number", "can_cast", "chained", "effect_of_value"]


class Effect(NamedTuple):
    """What an insertion does to a tensor now.

    Attributes:
        function: given the tensor and `tensors`, returns the new one; None keeps the one there is.
            With `keep` it returns a tuple of that and of what is to be kept.
        tensors: what it needs besides: inputs of compiled graphs, so that other ones are served by
            the same graph.
        key: all that the function depends on besides, so that two with equal keys do the same.
        keep: called after the run with what is to be kept.
        kept: how many tensors that is.
        check: see `compiled.splices.Step`.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    key: Hashable
    keep: Callable[[tuple[Tensor, ...]], None] | None = None
    kept: int = 0
    check: Callable[..., str | None] | None = None


def _number_or_tensor(value: Any, like: TensorMeta) -> Tensor | str | None:
    """Return a value as a tensor that computes the same; None for one that is a constant.

    Args:
        value: a number or tensor that something is computed of together with a tensor.
        like: what that tensor is like.

    Returns:
        The tensor, None, or why it is neither.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return "it computes with a tensor that is no plain dense one"
        return value
    if type(value) is float and like.dtype.is_floating_point and like.shape:
        # What torch makes of a number next to a tensor that has dimensions.
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (bool, int, float, complex):
        return None
    return f"it computes with {value!r}"


def effect_of_value(
    compute: Callable[[Any, Any], Any], value: Any, like: TensorMeta, *key: Hashable
) -> Effect | str:
    """Return the effect of computing something of a tensor and one value.

    Args:
        compute: given both, returns the new tensor.
        value: the value: a number or tensor.
        like: what the tensor is like.
        key: what `compute` depends on.
    """
    given = _number_or_tensor(value, like)
    if isinstance(given, str):
        return given
    if given is None:
        return Effect(lambda tensor: compute(tensor, value), (), (*key, type(value), repr(value)))
    return Effect(compute, (given,), (*key, "number" if type(value) is float else "tensor"))


def as_number(number: Any, tensor: Tensor) -> Any:
    """Return a number that became an input, to compute something of it and a tensor.

    Next to a tensor without dimensions it would have a say in the dtype, which a number has not.
    """
    if tensor.dim() or not isinstance(number, Tensor):
        return number
    if tensor.dtype not in (torch.float32, torch.float64):  # torch computes in a wider one
        raise ValueError(f"a number is computed with one element of {tensor.dtype}")
    return number.to(tensor.dtype)


def chained(first: Effect, second: Effect) -> Effect:
    """Return the effect of two, one after the other."""
    count, one, two = len(first.tensors), first.function, second.function

    def both(tensor: Tensor, *tensors: Tensor) -> Any:
        made = one(tensor, *tensors[:count])
        tensor = tensor if made is None else made
        made = two(tensor, *tensors[count:])
        return tensor if made is None else made

    return Effect(both, first.tensors + second.tensors, (first.key, second.key))


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch casts one dtype to another: `torch.can_cast`, which compilers do not follow."""
    if source.is_complex and not target.is_complex:
        return False
    if source.is_floating_point and not (target.is_floating_point or target.is_complex):
        return False
    return source is torch.bool or target is not torch.bool


def as_given(tensor: Tensor) -> None:
    """Keep a tensor as it is."""
