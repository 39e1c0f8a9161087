"""The base of bending callbacks, and chains of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bendtrace.errors import BendError, InputError
from bendtrace.interject.bends.containers import replaced
from bendtrace.interject.bends.parameter import (
    BendingParameter,
    Expression,
    parameters_in,
    value_of,
)
from bendtrace.interject.effects import Effect, as_given, chained
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["Bend", "CallbackChain", "bent"]


class Bend(Interjection):
    """A callback that changes a tensor: an activation, or a weight.

    Subclasses override `bend`. Where a node gives a container, each tensor of floating or
    complex numbers in it is bent; other tensors, and what is no tensor, stay as they are. To be
    saved in files and shown, a callback keeps each argument of its constructor as an attribute
    of that name. One that looks at nothing of the model but the tensor says so by
    `self_contained = True` (see `Interjection`). Called by itself, it bends a value right away.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Square(bt.bends.Bend):
        ...     def bend(self, tensor, at):
        ...         return tensor * tensor
        >>> Square()(torch.tensor([1.0, 3.0]))
        tensor([1., 9.])
        >>> (Square() >> Square())(torch.tensor([3.0]))
        tensor([81.])
    """

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return what a tensor becomes.

        Args:
            tensor: the tensor. It is not to be written to.
            at: which node it comes from; `at.path` names the tensor, also inside a container.
        """
        raise NotImplementedError

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Bend what a node gave.

        Raises:
            BendError: if there is nothing in it that can be bent.
        """
        met = False

        def change(tensor: Tensor, path: str) -> Tensor:
            nonlocal met
            met = True
            place = at if path == at.path else dataclasses.replace(at, path=path)
            return bent(self, tensor, place)

        made = replaced(output, at, change)
        if not met:
            raise BendError(
                f"{self!r} bends tensors of floating or complex numbers, and {_place(at.path)} "
                f"gave {_described(output)}",
                at.path,
            )
        return made

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        if not (like.dtype.is_floating_point or like.dtype.is_complex):
            return f"it bends no {like.dtype}"
        return self.effect_of_bend(at, like)

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what `bend` does; None if that is not known (see `Interjection.effect`)."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What is known of a class of ours need not hold for what others make of it.
        if not cls.__module__.startswith("bendtrace."):
            if "effect_of_bend" not in vars(cls):
                cls.effect_of_bend = Bend.effect_of_bend  # type: ignore[method-assign]

    def __call__(self, value: Any, path: str = "") -> Any:
        """Return what a value becomes.

        Args:
            value: a tensor, or a container of tensors.
            path: the node to take it for; what is drawn once for each node goes by it.
        """
        return self.after(NodePass(path), Inputs(()), value)

    def reset(self) -> None:
        """Forget what was drawn or kept for the nodes so far."""

    @property
    def label(self) -> str:
        """What reports and graphs call it."""
        return repr(self)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the constructor was given, by name; without what has its default value."""
        found = {}
        for name, argument in inspect.signature(type(self)).parameters.items():
            if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
                continue
            if not hasattr(self, name):
                raise InputError(
                    f"{type(self).__name__} does not keep its argument {name!r} as an attribute "
                    "of that name, so it cannot be shown or saved"
                )
            value = getattr(self, name)
            if not _same(value, argument.default):
                found[name] = value
        return found

    @property
    def parameters(self) -> list[BendingParameter]:
        """The parameters among its arguments."""
        return parameters_in(self.arguments.values())

    def __rshift__(self, other: Any) -> CallbackChain:
        if not isinstance(other, Bend):
            return NotImplemented
        return CallbackChain(self, other)

    def __repr__(self) -> str:
        try:
            arguments = self.arguments
        except InputError:
            return f"{type(self).__name__}(...)"
        shown = ", ".join(f"{name}={_short(value)}" for name, value in arguments.items())
        return f"{type(self).__name__}({shown})"


class CallbackChain(Bend):
    """Callbacks one after the other: `a >> b` bends with `a`, and what that gives with `b`.

    Args:
        *callbacks: the callbacks; chains among them are taken apart.

    Attributes:
        callbacks: the callbacks in the order in which they bend.

    Raises:
        InputError: one of them is no bending callback.

    Example:
        >>> import torch, bendtrace as bt
        >>> chain = bt.bends.Scale(2.0) >> bt.bends.Bias(1.0)
        >>> chain
        Scale(scale=2.0) >> Bias(bias=1.0)
        >>> chain(torch.ones(2)), len(chain.callbacks)
        (tensor([3., 3.]), 2)
    """

    def __init__(self, *callbacks: Bend) -> None:
        for callback in callbacks:
            if not isinstance(callback, Bend):
                raise InputError(f"a chain is made of bending callbacks; {callback!r} is none")
        self.callbacks: tuple[Bend, ...] = tuple(_flat(callbacks))
        self.observes = all(callback.observes for callback in self.callbacks)
        self.self_contained = all(callback.self_contained for callback in self.callbacks)
        self.deferrable = all(callback.deferrable for callback in self.callbacks)

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what they do together, if that is known of each."""
        made = Effect(as_given, (), ())
        for callback in self.callbacks:
            one = callback.effect(at, like)
            if not isinstance(one, Effect):
                return one
            made = chained(made, one)
        return made

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return what a tensor becomes."""
        for callback in self.callbacks:
            tensor = bent(callback, tensor, at)
        return tensor

    def reset(self) -> None:
        """Reset each of the callbacks."""
        for callback in self.callbacks:
            callback.reset()

    @property
    def parameters(self) -> list[BendingParameter]:
        """The parameters of all callbacks, each once."""
        return list(dict.fromkeys(p for callback in self.callbacks for p in callback.parameters))

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.callbacks)) or "CallbackChain()"


def bent(callback: Bend, tensor: Tensor, at: NodePass) -> Tensor:
    """Return what a callback makes of a tensor, which has to be a tensor again."""
    made = value_of(callback.bend(tensor, at))  # `tensor * parameter` is an expression
    if not isinstance(made, Tensor):
        raise BendError(
            f"{callback!r} has to make a tensor of what {_place(at.path)} gave, "
            f"and it made {_described(made)}",
            at.path,
        )
    return made


def _flat(callbacks: tuple[Bend, ...]) -> Iterator[Bend]:
    for callback in callbacks:
        if isinstance(callback, CallbackChain):
            yield from callback.callbacks
        else:
            yield callback


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, (Tensor, Expression)) or isinstance(default, (Tensor, Expression)):
        return value is default
    return type(value) is type(default) and bool(value == default)


def _short(value: Any) -> str:
    if isinstance(value, BendingParameter):
        return value.name
    if isinstance(value, Tensor) and value.dim():
        return f"<tensor of shape {tuple(value.shape)}>"
    return repr(value)


def _place(path: str) -> str:
    return f"node {path!r}" if path else "what it was called with"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{value!r:.60} ({type(value).__name__})"
