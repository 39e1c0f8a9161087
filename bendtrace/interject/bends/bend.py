"""The base of bending callbacks, and chains of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from bendtrace.errors import BendError, InputError
from bendtrace.interject.bends.parameter import (
    BendingParameter,
    Expression,
    parameters_in,
    value_of,
)
from bendtrace.interject.effects import Effect, as_given, chained
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.paths.naming import identifier
from bendtrace.tape.tape import TensorMeta

__all__ = ["Bend", "CallbackChain", "bent"]


class Bend(Interjection):
    """A callback that changes a tensor: an activation, or a weight.

    Subclasses override `bend`. If the output of a node is a container, each floating-point or
    complex tensor in it is bent; other values stay as they are. To be saved and printed, a callback
    keeps each argument of its constructor as an attribute of the same name. A callback that uses
    nothing of the model but the tensor says so with `self_contained = True` (see `Interjection`).
    Calling a callback bends a value immediately.

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
        """Return the new value of a tensor.

        Args:
            tensor: the tensor, which must not be changed in place.
            at: the node; `at.path` names the tensor, also inside a container.
        """
        raise NotImplementedError

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Bend the output of a node.

        Raises:
            BendError: it contains no tensor that can be bent.
        """
        met = False

        def change(tensor: Tensor, path: str) -> Tensor:
            nonlocal met
            met = True
            place = at if path == at.path else dataclasses.replace(at, path=path)
            return bent(self, tensor, place)

        made = _replaced_in(output, at, change)
        if not met:
            raise BendError(
                f"{self!r} bends floating-point and complex tensors, and {_place(at.path)} "
                f"returned {_described(output)}",
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
        """Return the bent value.

        Args:
            value: a tensor, or a container of tensors.
            path: the node path to use; random numbers that are drawn once per node depend on it.
        """
        return self.after(NodePass(path), Inputs(()), value)

    def reset(self) -> None:
        """Forget the numbers drawn and values kept so far."""

    @property
    def label(self) -> str:
        """The name in reports and graphs."""
        return repr(self)

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments by name, without those that have their default value."""
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
        """The parameters among the arguments."""
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
    """Callbacks in sequence: `a >> b` bends with `a`, then bends the result with `b`.

    Args:
        *callbacks: the callbacks; nested chains are flattened.

    Attributes:
        callbacks: the callbacks in the order in which they bend.

    Raises:
        InputError: one of them is not a bending callback.

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
                raise InputError(f"a chain takes bending callbacks, not {callback!r}")
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
        """Return the new value of a tensor."""
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
    """Return the result of a callback for a tensor, which has to be a tensor again."""
    made = value_of(callback.bend(tensor, at))  # `tensor * parameter` is an expression
    if not isinstance(made, Tensor):
        raise BendError(
            f"{callback!r} has to return a tensor for the value of {_place(at.path)}, but it "
            f"returned {_described(made)}",
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
    return f"node {path!r}" if path else "the argument"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{value!r:.60} ({type(value).__name__})"


_Change = Callable[[Tensor, str], Any]


def _is_bendable(value: Any) -> bool:
    """Whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _replaced_in(value: Any, at: NodePass, change: _Change) -> Any:
    """Return a value with every bendable tensor in it changed.

    Containers in which nothing has changed stay the same objects.

    Args:
        value: a tensor, a tuple, list, dict or data class, nested in any way.
        at: the node that returned it.
        change: called with each tensor and its path, such as `lstm.output|sub_1.sub_0`.
    """
    if isinstance(value, Tensor):
        return change(value, at.path) if _is_bendable(value) else value
    path = at.path
    if at.module is not None:
        path = f"{path}.output" if path else "output"
    return _replaced(value, path, change)


def _replaced(value: Any, path: str, change: _Change) -> Any:
    if isinstance(value, Tensor):
        return change(value, path) if _is_bendable(value) else value
    new = {}
    for key, item in _items(value):
        joint = "." if "|" in path else "|"
        made = _replaced(item, f"{path}{joint}{identifier(str(key))}", change)
        if made is not item:
            new[key] = made
    return _with(value, new) if new else value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _with(value: Any, new: dict[Any, Any]) -> Any:
    """Return a copy of a container in which some items are others."""
    if isinstance(value, tuple):
        items = [new.get(number, item) for number, item in enumerate(value)]
        if hasattr(value, "_make"):  # a named tuple
            return value._make(items)
        return tuple(items) if type(value) is tuple else type(value)(items)
    made = copy.copy(value)
    for key, item in new.items():
        if isinstance(made, (list, dict)):
            made[key] = item
        else:
            object.__setattr__(made, key, item)
    return made
