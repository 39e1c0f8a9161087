"""What a model is called with, in the ways people hold it in their hands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.module import BendedModule

__all__ = ["Call", "are_several", "bended_of", "calls_of", "required_bended"]


@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments of one call of a model.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Example:
        >>> import bendtrace as bt
        >>> bt.workflows.Call.of({"x": 1})
        Call(args=(), kwargs={'x': 1})
        >>> bt.workflows.Call((1,), {"y": 2}).to(lambda x, y: x + y)
        3
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any) -> Call:
        """Return the call that is meant by something.

        Args:
            inputs: a `Call`; a mapping of keyword arguments, such as a batch of a Hugging Face
                tokenizer; a tuple or list of positional arguments; anything else, such as a
                tensor, is the only argument. A model that takes one list or mapping is called by
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
                    f"a mapping as inputs holds keyword arguments, but {wrong[0]!r} is no name; "
                    "for a model that takes one mapping, give `Call((mapping,))`"
                )
            return cls((), dict(inputs))
        # Named tuples and the like are one value; so are subclasses of tuple with a meaning.
        if type(inputs) in (tuple, list):
            return cls(tuple(inputs))
        return cls((inputs,))

    def to(self, model: Callable[..., Any]) -> Any:
        """Call a model with it."""
        return model(*self.args, **self.kwargs)


def are_several(batches: Any) -> bool:
    """Whether something is several inputs, such as a data loader, and not those of one call.

    A list is one, a tuple is not: that is the arguments of one call, as of all functions.

    Example:
        >>> are_several([1, 2]), are_several((1, 2)), are_several({"x": 1})
        (True, False, False)
    """
    one = (Tensor, Mapping, Call, tuple, str, bytes)
    return isinstance(batches, Iterable) and not isinstance(batches, one)


def calls_of(batches: Any) -> Iterator[Call]:
    """Yield the calls that inputs, or an iterable of inputs, mean.

    Raises:
        InputError: see `Call.of`.
    """
    if are_several(batches):
        yield from map(Call.of, batches)
    else:
        yield Call.of(batches)


def bended_of(model: Callable[..., Any]) -> BendedModule:
    """Return a model as a `BendedModule`: itself, where it is one.

    Raises:
        InputError: it cannot be called.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.relu)
        >>> bended_of(bended) is bended
        True
    """
    return model if isinstance(model, BendedModule) else BendedModule(model)


def required_bended(model: Any, what: str) -> BendedModule:
    """Return a model that something stays in after the call.

    Args:
        model: the model.
        what: what stays in it, for the error.

    Raises:
        InputError: it is no `BendedModule`, so that nothing could stay in it.
    """
    if not isinstance(model, BendedModule):
        raise InputError(
            f"{what} stays in the model until it is removed, so that has to be a BendedModule: "
            "make `bended = bendtrace.BendedModule(model)`, and call that"
        )
    return model
