"""Numbers that can be changed while a model runs, and arithmetic on them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.source.internals import pytree

__all__ = [
    "OPERATORS",
    "BendingParameter",
    "Expression",
    "Operation",
    "Value",
    "fitted",
    "parameters_in",
    "value_of",
]

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
        return _operation("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return _operation("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return _operation("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _operation("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _operation("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _operation("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _operation("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _operation("truediv", other, self)

    def __pow__(self, other: Any) -> Any:
        return _operation("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return _operation("pow", other, self)

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
    """Arithmetic on expressions.

    Attributes:
        name: the operation, by its name in the module `operator`.
        operands: numbers, tensors and expressions.
    """

    def __init__(self, name: str, operands: tuple[Any, ...]) -> None:
        self.name = name
        self.operands = operands

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
        shown = [self._shown(operand, place) for place, operand in enumerate(self.operands)]
        return f" {sign} ".join(shown) if len(shown) == 2 else f"{sign}{shown[0]}"

    def _shown(self, operand: Any, place: int) -> str:
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


def _operation(name: str, left: Any, right: Any) -> Any:
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
        self,
        name: str,
        value: Value,
        range: tuple[Any, Any] | None = None,
        clamp: bool = False,
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


def parameters_in(values: Any) -> list[BendingParameter]:
    """Return the parameters that some values depend on, each once."""
    found = [p for value in values if isinstance(value, Expression) for p in value.parameters]
    return list(dict.fromkeys(found))


def fitted(value: Any, tensor: Tensor) -> Any:
    """Return a number as it is, and a tensor on the device of `tensor` and with a fitting dtype."""
    value = value_of(value)
    if not isinstance(value, Tensor):
        return value
    dtype = tensor.dtype if value.is_floating_point() and not tensor.is_complex() else None
    return value.to(device=tensor.device, dtype=dtype or value.dtype)
