"""What a model is called with, in the ways people hold it in their hands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bendtrace.errors import InputError
from bendtrace.module import BendedModule

__all__ = ["Call", "bended_of"]


@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments of one call of a model.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Example:
        >>> Call.of({"x": 1})
        Call(args=(), kwargs={'x': 1})
        >>> Call((1,), {"y": 2}).to(lambda x, y: x + y)
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
