"""Effects: the change of a tensor by an insertion, as a function of tensors to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.tape import TensorMeta


class Effect(NamedTuple):
    """The change of a tensor by an insertion in one call.

    Attributes:
        function: given the tensor and `tensors`, returns the new tensor, or None to keep it. With
            `keep` it returns a tuple of that and of the tensors to keep.
        tensors: the other tensors that it needs. They are inputs of compiled graphs, so that one
            graph serves calls with different tensors.
        key: everything else that the function depends on: effects with equal keys do the same.
        keep: called after the run with the tensors to keep.
        kept: their number.
        check: see `compiled.splices.Step`.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    key: Hashable
    keep: Callable[[tuple[Tensor, ...]], None] | None = None
    kept: int = 0
    check: Callable[..., str | None] | None = None


def depends_on(*names: str) -> Callable[[_Method], _Method]:
    """Mark a method `effect` whose result depends on these attributes only.

    As long as they are the same objects, and cannot change, it is not called again.
    """
    getters = [attrgetter(name) for name in names]

    def mark(method: _Method) -> _Method:
        method.reads = getters  # type: ignore[attr-defined]
        return method

    return mark


class Steady:
    """Tells whether the attributes that some effects depend on are still the same objects.

    Args:
        whats: the interjections.

    Attributes:
        is_possible: whether that says that the effects are the same.
    """

    def __init__(self, whats: Iterable[Any]) -> None:
        found: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.is_possible: bool = True
        for what in whats:
            getters = getattr(type(what).effect, "reads", None)
            self.is_possible &= getters is not None
            found += [(read, what, read(what)) for read in getters or ()]
        self.is_possible = self.is_possible and all(_is_constant(value) for *_, value in found)
        self._read = found

    def holds(self) -> bool:
        """Return whether they are."""
        for read, what, value in self._read:
            if read(what) is not value:
                return False
        return True


def _is_constant(value: Any) -> bool:
    """Whether an object cannot change, except for the content of a tensor."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    if type(value) is slice:
        return all(map(_is_constant, (value.start, value.stop, value.step)))
    return type(value) in _CONSTANT


_CONSTANT = PLAIN_TYPES | {Tensor, nn.Parameter}
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _number_or_tensor(value: Any, like: TensorMeta) -> Tensor | str | None:
    """Return an operand as a tensor that gives the same results.

    Args:
        value: the operand: a number or tensor.
        like: the metadata of the other operand.

    Returns:
        The tensor; None for a constant of the graph; or why it can be neither.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return "it computes with a tensor that is no plain dense one"
        return value
    if type(value) is float and like.dtype.is_floating_point and like.shape:
        # torch does the same to a number next to a tensor that has dimensions.
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (bool, int, float, complex):
        return None
    return f"it computes with {value!r}"


def effect_of_value(
    compute: Callable[[Any, Any], Any], value: Any, like: TensorMeta, *key: Hashable
) -> Effect | str:
    """Return the effect of a function of a tensor and one value.

    Args:
        compute: given both, returns the new tensor.
        value: the value: a number or tensor.
        like: the metadata of the tensor.
        key: everything that `compute` depends on.
    """
    given = _number_or_tensor(value, like)
    if isinstance(given, str):
        return given
    if given is None:
        return Effect(lambda tensor: compute(tensor, value), (), (*key, type(value), repr(value)))
    return Effect(compute, (given,), (*key, "number" if type(value) is float else "tensor"))


def as_number(number: Any, tensor: Tensor) -> Any:
    """Return an operand of a tensor, which was a number before it became an input.

    Next to a tensor without dimensions it would influence the dtype of the result, unlike a number.
    """
    if tensor.dim() or not isinstance(number, Tensor):
        return number
    if tensor.dtype not in (torch.float32, torch.float64):  # torch computes in a wider one
        raise ValueError(f"a number is computed with one element of {tensor.dtype}")
    return number.to(tensor.dtype)


def chain_effects(first: Effect, second: Effect) -> Effect:
    """Return the effect of one effect after another."""
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
