"""The inputs of a model, in the forms in which people have them, and copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.insert.leaves import assemble, describe, take_apart
from bendtrace.python.checks import required_arguments

if TYPE_CHECKING:
    from bendtrace.insert.where import Where
    from bendtrace.module import BendedModule


@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments of one call of a model.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Raises:
        InputError: `args` is not a tuple or list, or `kwargs` is not a mapping with text as keys.

    Example:
        >>> import bendtrace as bt
        >>> bt.workflows.Call.of({"x": 1}), bt.workflows.Call.of(((1,), {"y": 2}))
        (Call(args=(), kwargs={'x': 1}), Call(args=(1,), kwargs={'y': 2}))
        >>> bt.workflows.Call((1,), {"y": 2}).to(lambda x, y: x + y)
        3
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = "the first part of a Call", "the second part of a Call"
        args, kwargs = required_arguments(self.args, self.kwargs, names)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)

    @classmethod
    def of(cls, inputs: Any) -> Call:
        """Return inputs as a call.

        Args:
            inputs: a `Call`; a mapping of keyword arguments, such as a batch of a Hugging Face
                tokenizer; a tuple or list of positional arguments; a pair of a tuple of positional
                and a dict of keyword arguments; anything else, such as a tensor, is the only
                argument. A model that takes one list, mapping or such a pair is called by
                `Call((that,))`.

        Raises:
            InputError: a key of a mapping is not the name of an argument.
        """
        if isinstance(inputs, cls):
            return inputs
        if isinstance(inputs, Mapping):
            wrong = [key for key in inputs if not isinstance(key, str)]
            if wrong:
                raise InputError(
                    f"a mapping as inputs holds keyword arguments, but {wrong[0]!r} is not a name; "
                    "for a model that takes one mapping, give `Call((mapping,))`"
                )
            return cls((), dict(inputs))
        # Named tuples and the like are one value; so are subclasses of tuple with a meaning.
        if type(inputs) in (tuple, list):
            return cls(*inputs) if _is_pair(inputs) else cls(tuple(inputs))
        return cls((inputs,))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.args, dict(self.kwargs)))

    def to(self, model: Callable[..., Any]) -> Any:
        """Call a model with these arguments."""
        return model(*self.args, **self.kwargs)


def _is_pair(inputs: Any) -> bool:
    return (
        len(inputs) == 2
        and type(inputs) is type(inputs[0]) is tuple
        and type(inputs[1]) is dict
        and all(isinstance(key, str) for key in inputs[1])
    )


def are_several(batches: Any) -> bool:
    """Return whether something is several inputs, such as a data loader, and not those of one call.

    A list is several, a tuple is not: it holds the arguments of one call, as everywhere.

    Example:
        >>> are_several([1, 2]), are_several((1, 2)), are_several({"x": 1})
        (True, False, False)
    """
    one = (Tensor, Mapping, Call, tuple, str, bytes)
    return isinstance(batches, Iterable) and not isinstance(batches, one)


def calls_of(batches: Any) -> Iterator[Call]:
    """Yield the call of inputs, or the calls of an iterable of inputs."""
    if are_several(batches):
        yield from map(Call.of, batches)
    else:
        yield Call.of(batches)


def own_copy(call: Call, *, keeps_graph: bool = False) -> Call:
    """Return a call with copies of its arguments, which the model may write to."""
    memo: dict[int, Any] = {}
    for tensor in take_apart(tuple(call))[1]:
        if isinstance(tensor, Tensor) and tensor.requires_grad and keeps_graph:
            memo[id(tensor)] = tensor
        elif isinstance(tensor, Tensor) and not tensor.is_leaf:  # which copy.deepcopy refuses
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        return Call(*copy.deepcopy(tuple(call), memo))
    except Exception as error:
        raise InputError(
            "the model is called many times, each time with a copy of the inputs, and they cannot "
            f"be copied ({type(error).__name__}: {error})"
        ) from error


def differentiable(call: Call) -> Call:
    """Have the floating point tensors in a call require gradients; they may be written to."""
    shape, found = take_apart(tuple(call))
    made: dict[int, Tensor] = {}
    for i, value in enumerate(found):
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
            if id(value) not in made:
                made[id(value)] = value.requires_grad_().clone()
            found[i] = made[id(value)]
    return Call(*assemble(shape, found))


def values_in_call(model: BendedModule, call: Call, where: Where, **options: Any) -> Any:
    """Return the values of nodes in a call, as `BendedModule.get_activations` does."""
    return model.get_activations(
        where, args=call.args, kwargs=dict(call.kwargs), allow_none=True, **options
    )


def as_rows(value: Any, path: str, name: str, made: Any = None) -> Tensor:
    """Return a value of shape (examples, ..., size), or the (examples, size) made of it."""
    if made is not None:
        if not isinstance(made, Tensor) or made.dim() != 2:
            raise InputError(f"{name}= has to return (examples, size), not {describe(made)}")
        return made
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
        raise InputError(
            f"{path} gives {describe(value)}, and a tensor of floating point numbers with an axis "
            "of examples is wanted; of a container, name a part: 'path|sub_0'"
        )
    return value
