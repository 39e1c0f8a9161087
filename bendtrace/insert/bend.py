"""The base of bending callbacks, and chains of them."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from bendtrace.errors import BendError, InputError
from bendtrace.insert.interjection import (
    Effect,
    Inputs,
    Interjection,
    NodePass,
    chain_effects,
    depends_on,
    keep_unchanged,
)
from bendtrace.insert.leaves import contents, with_items
from bendtrace.log.nodes import identifier
from bendtrace.python.internals import pytree
from bendtrace.tape.tape import TensorMeta


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

        made = _replace_in(output, at, change)
        if not met:
            raise BendError(
                f"{self!r} bends floating-point and complex tensors, and {_receiver_text(at.path)} "
                f"returned {_describe_value(output)}",
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
            if not _equals_default(value, argument.default):
                found[name] = value
        return found

    @property
    def parameters(self) -> list[BendingParameter]:
        """The parameters among the arguments."""
        return bend_parameters_in(self.arguments.values())

    def __rshift__(self, other: Any) -> CallbackChain:
        if not isinstance(other, Bend):
            return NotImplemented
        return CallbackChain(self, other)

    def __repr__(self) -> str:
        try:
            arguments = self.arguments
        except InputError:
            return f"{type(self).__name__}(...)"
        shown = ", ".join(f"{name}={_default_repr(value)}" for name, value in arguments.items())
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
        self.callbacks: tuple[Bend, ...] = tuple(_callbacks_within(callbacks))
        self.observes: bool = all(callback.observes for callback in self.callbacks)
        self.self_contained: bool = all(callback.self_contained for callback in self.callbacks)
        self.deferrable: bool = all(callback.deferrable for callback in self.callbacks)

    @depends_on("callbacks")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what they do together, if that is known of each."""
        made = Effect(keep_unchanged, (), ())
        for callback in self.callbacks:
            one = callback.effect(at, like)
            if not isinstance(one, Effect):
                return one
            made = chain_effects(made, one)
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
            f"{callback!r} has to return a tensor for the value of {_receiver_text(at.path)}, but "
            f"it returned {_describe_value(made)}",
            at.path,
        )
    return made


def _callbacks_within(callbacks: tuple[Bend, ...]) -> Iterator[Bend]:
    for callback in callbacks:
        if isinstance(callback, CallbackChain):
            yield from callback.callbacks
        else:
            yield callback


def _equals_default(value: Any, default: Any) -> bool:
    if isinstance(value, (Tensor, Expression)) or isinstance(default, (Tensor, Expression)):
        return value is default
    return type(value) is type(default) and bool(value == default)


def _default_repr(value: Any) -> str:
    if isinstance(value, BendingParameter):
        return value.name
    if isinstance(value, Tensor) and value.dim():
        return f"<tensor of shape {tuple(value.shape)}>"
    return repr(value)


def _receiver_text(path: str) -> str:
    return f"node {path!r}" if path else "the argument"


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{value!r:.60} ({type(value).__name__})"


_Change = Callable[[Tensor, str], Any]


def _is_bendable(value: Any) -> bool:
    """Return whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _replace_in(value: Any, at: NodePass, change: _Change) -> Any:
    """Return a value with every bendable tensor in it changed, in containers nested in any way.

    Containers in which nothing has changed stay the same objects. `change` is called with each
    tensor and its path, such as `lstm.output|sub_1.sub_0`.
    """
    if isinstance(value, Tensor):
        return change(value, at.path) if _is_bendable(value) else value
    path = at.path
    if at.module is not None:
        path = f"{path}.output" if path else "output"
    return _replace_values(value, path, change)


def _replace_values(value: Any, path: str, change: _Change) -> Any:
    if isinstance(value, Tensor):
        return change(value, path) if _is_bendable(value) else value
    new = {}
    for key, item in contents(value):
        joint = "." if "|" in path else "|"
        made = _replace_values(item, f"{path}{joint}{identifier(str(key))}", change)
        if made is not item:
            new[key] = made
    return with_items(value, new.items()) if new else value


# Numbers that can be changed while a model runs, and arithmetic on them.

Value: TypeAlias = int | float | complex | Tensor
T = TypeVar("T")

# The names of the operations in the module `operator`, their signs and functions.
OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "truediv": ("/", operator.truediv),
    "pow": ("**", operator.pow),
    "neg": ("-", operator.neg),
}
# The names of tensor methods for an expression on the right.
_OF_TENSORS = {"add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "pow": "pow"}


class Expression:
    """A number that is computed each time it is read.

    `+`, `-`, `*`, `/`, `**` and the unary minus with numbers, tensors and other expressions return
    expressions. Comparisons are not supported: their result would be fixed at the time of the
    comparison.

    Example:
        >>> gain = BendingParameter("gain", 2.0)
        >>> louder = 2 * gain + 1
        >>> louder
        2 * gain + 1
        >>> gain.value = 5.0
        >>> louder.get_value()
        11.0
    """

    __array_ufunc__ = None  # an array on the left must not iterate over its items

    def get_value(self) -> Value:
        """Return the current value."""
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[BendingParameter, ...]:
        """The parameters that it depends on, each once."""
        return tuple(dict.fromkeys(self._parameters()))

    def _parameters(self) -> Iterator[BendingParameter]:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # `tensor * parameter` ends up here: the tensor's operator is called first. Other functions
        # receive the current values, so that functions on tensors accept parameters.
        name = _OF_TENSORS.get(function.__name__)
        if name is not None and len(args) == 2 and not kwargs:
            return Operation(name, args)
        args, kwargs = pytree.tree_map(value_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return _apply_operator("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return _apply_operator("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return _apply_operator("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _apply_operator("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _apply_operator("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _apply_operator("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _apply_operator("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _apply_operator("truediv", other, self)

    def __pow__(self, other: Any) -> Any:
        return _apply_operator("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return _apply_operator("pow", other, self)

    def __neg__(self) -> Expression:
        return Operation("neg", (self,))

    def __float__(self) -> float:
        return float(self.get_value())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.get_value())  # type: ignore[arg-type]

    def __complex__(self) -> complex:
        return complex(self.get_value())

    def __bool__(self) -> bool:
        return bool(self.get_value())


class Operation(Expression):
    """Arithmetic on expressions."""

    def __init__(self, name: str, operands: tuple[Any, ...]) -> None:
        self.name = name  # the operation, by its name in the module `operator`
        self.operands = operands  # numbers, tensors and expressions

    @depends_on("name", "operands")
    def get_value(self) -> Value:
        """Return the current value."""
        result: Value = OPERATORS[self.name][1](*map(value_of, self.operands))
        return result

    def _parameters(self) -> Iterator[BendingParameter]:
        for operand in self.operands:
            if isinstance(operand, Expression):
                yield from operand._parameters()

    def __repr__(self) -> str:
        sign = OPERATORS[self.name][0]
        shown = [self._operand_text(operand, place) for place, operand in enumerate(self.operands)]
        return f" {sign} ".join(shown) if len(shown) == 2 else f"{sign}{shown[0]}"

    def _operand_text(self, operand: Any, place: int) -> str:
        text = repr(operand)
        if isinstance(operand, BendingParameter):
            return operand.name
        own, rank = _RANKS[self.name], 9
        if isinstance(operand, Operation):
            rank = _RANKS[operand.name]
        elif text.startswith("-"):
            rank = _RANKS["neg"]
        # All but the power are left-associative: a - (b - c), but (a ** b) ** c.
        outer = place == (1 if self.name != "pow" else 0)
        return f"({text})" if rank < own or (rank == own and outer) else text


_OPERANDS = (Expression, numbers.Number, Tensor)
_RANKS = {"add": 1, "sub": 1, "mul": 2, "truediv": 2, "neg": 3, "pow": 4}


def _apply_operator(name: str, left: Any, right: Any) -> Any:
    if isinstance(left, _OPERANDS) and isinstance(right, _OPERANDS):
        return Operation(name, (left, right))
    return NotImplemented


class BendingParameter(Expression):
    """A named number, or tensor, that callbacks read each time they run.

    It is accepted wherever a callback takes a number, alone or in an expression. A new value takes
    effect from the next call on, in replays too, without a retrace.

    Args:
        name: its name in `BendedModule.update` and in files.
        value: a number or a tensor. Gradients flow into a tensor that requires them.
        range: the least and the greatest value; None for either leaves it open.
        clamp: whether a value outside the range is moved to the nearest one inside, instead of
            raising.

    Attributes:
        name: its name.
        range: the least and the greatest value.
        clamp: whether values are moved into the range.

    Raises:
        InputError: the value is not a number, or outside the range.

    Example:
        >>> import bendtrace as bt
        >>> amount = bt.bends.BendingParameter("amount", 0.5, range=(0, 1))
        >>> amount.value = 0.75
        >>> amount
        BendingParameter('amount', 0.75, range=(0, 1))
    """

    def __init__(
        self, name: str, value: Value, range: tuple[Any, Any] | None = None, clamp: bool = False
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InputError(f"the name of a parameter has to be a non-empty string, not {name!r}")
        self.name = name
        self.range: tuple[Any, Any] = _range(name, range)
        self.clamp = clamp
        self._value = self._checked(value)

    @property
    def value(self) -> Value:
        """The current value."""
        return self._value

    @value.setter
    def value(self, value: Value) -> None:
        self._value = self._checked(value)

    @depends_on("_value")
    def get_value(self) -> Value:
        """Return the current value."""
        return self._value

    def set_value(self, value: Value) -> None:
        """Set another number or tensor as the value.

        Raises:
            InputError: the value is not a number, or outside the range.
        """
        self._value = self._checked(value)

    def _parameters(self) -> Iterator[BendingParameter]:
        yield self

    def _checked(self, value: Any) -> Value:
        if isinstance(value, Expression) or not isinstance(value, (numbers.Number, Tensor)):
            raise InputError(
                f"the value of parameter {self.name!r} has to be a number or a tensor, not "
                f"{value!r} ({type(value).__name__})"
            )
        if self.range == (None, None):
            return value  # type: ignore[return-value]
        low, high = self.range
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            raise InputError(f"parameter {self.name!r} has a range, so it cannot be complex")
        if isinstance(value, Tensor):
            if self.clamp:
                return value.clamp(low, high)
            fits = (low is None or bool((value >= low).all())) and (
                high is None or bool((value <= high).all())
            )
        else:
            number: Any = value
            if self.clamp and number == number:
                number = number if low is None else max(low, number)
                return number if high is None else min(high, number)  # type: ignore[no-any-return]
            fits = (low is None or number >= low) and (high is None or number <= high)
        if not fits:
            raise InputError(
                f"{value!r} is outside the range {self.range} of parameter {self.name!r}; with "
                "clamp=True it would become the nearest value inside"
            )
        return value  # type: ignore[return-value]

    def __repr__(self) -> str:
        text = f"BendingParameter({self.name!r}, {self._value!r}"
        if self.range != (None, None):
            text += f", range={self.range}"
        return f"{text}, clamp=True)" if self.clamp else f"{text})"


def _range(name: str, given: Any) -> tuple[Any, Any]:
    if given is None:
        return None, None
    try:
        low, high = given
        empty = low is not None and high is not None and not low <= high
    except (TypeError, ValueError):
        empty = True
    if empty:
        raise InputError(
            f"the range of parameter {name!r} has to be a pair of the least and the greatest "
            f"value, with None for no limit, not {given!r}"
        )
    return low, high


def value_of(value: T | Expression) -> T | Value:
    """Return the current value of an expression, and anything else as it is."""
    return value.get_value() if isinstance(value, Expression) else value


def bend_parameters_in(values: Any) -> list[BendingParameter]:
    """Return the parameters that some values depend on, each once."""
    found = [p for value in values if isinstance(value, Expression) for p in value.parameters]
    return list(dict.fromkeys(found))


def fit_to_tensor(value: Any, tensor: Tensor) -> Any:
    """Return a number as it is, and a tensor on the device of `tensor` and with a fitting dtype."""
    value = value_of(value)
    if not isinstance(value, Tensor):
        return value
    dtype = tensor.dtype if value.is_floating_point() and not tensor.is_complex() else None
    return value.to(device=tensor.device, dtype=dtype or value.dtype)
