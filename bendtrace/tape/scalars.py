"""Traced scalars: Python numbers taken from a tensor that know the op they came from.

They subclass torch's symbolic numbers because torch's argument parser passes those to the tracer
unchanged, wherever an int, float or bool is allowed (seen in torch 2.13 to 2.15; the tests in
`test_scalars.py` would notice a change). Their `__class__` is the plain type, so `isinstance(n,
int)` holds. Whenever Python itself needs the value - a branch, an index, a hash, a format - one of
the methods below is called, which reports to the tracer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.tape.tape import FunctionUse, Use, use_by

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder


class _Node:
    """Answers torch's C++ code with the plain value if a call bypasses the tracer.

    Every question about the value consumes it, and so adds a guard.
    """

    __slots__ = ("scalar",)

    def __init__(self, scalar: TracedScalar) -> None:
        self.scalar = scalar

    def _value(self, *_: object) -> Any:
        scalar = self.scalar
        origin = scalar._origin
        return origin.consume(scalar, FunctionUse("torch")) if origin.active else scalar._value

    guard_int = guard_float = guard_bool = int_ = bool_ = expect_true = _value
    guard_size_oblivious = guard_or_false = guard_or_true = maybe_as_int = constant_int = _value

    def is_int(self) -> bool:
        return isinstance(self.scalar, int)

    def is_float(self) -> bool:
        return isinstance(self.scalar, float)

    def is_bool(self) -> bool:
        return isinstance(self.scalar, bool)

    def is_symbolic(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def statically_known_true(self, *_: object) -> bool:
        return bool(self._value())

    # What `torch.sym_sum` asks of the last of its numbers. It returns the constant of a node of
    # torch's, and makes a symbolic number of another.

    def wrap_int(self, number: int) -> int:
        return number

    wrap_bool = wrap_int

    def sym_sum(self, parts: Sequence[Any]) -> object:
        from torch.fx.experimental.sym_node import SymNode  # which has called this

        found: Any = object.__new__(SymNode)
        found.constant = sum(part.scalar if type(part) is _Node else part for part in parts)
        return found


_put = object.__setattr__  # past `TracedScalar.__setattr__`, which is for the model's code


class TracedScalar:
    """The base of the three kinds: a value, the recorder, and the op (see `Recorder.ref`)."""

    # The slots are in the three classes: of two bases only one may have any.
    _value: Any
    _origin: Recorder
    _source: Any

    def __init__(self, value: Any, origin: Recorder, source: Any) -> None:
        _put(self, "_value", value)
        _put(self, "_origin", origin)
        _put(self, "_source", source)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._value, name, value)  # which raises what it raises for a number

    def __delattr__(self, name: str) -> None:
        delattr(self._value, name)

    def _consume(self, use: Use | FunctionUse) -> Any:
        origin = self._origin
        if not origin.active:
            return self._value
        origin.turns += 1
        return origin.consume(self, use)

    @property
    def node(self) -> object:
        """The object that torch's C++ code queries."""
        return _Node(self)

    def __bool__(self) -> bool:
        return bool(self._consume(Use.BOOL))

    def __int__(self) -> int:
        return int(self._consume(Use.INT))

    def __float__(self) -> float:
        return float(self._consume(Use.FLOAT))

    def __hash__(self) -> int:
        return hash(self._consume(Use.HASH))

    def __repr__(self) -> str:
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def __format__(self, spec: str) -> str:
        return self._text(format, spec)

    def _text(self, function: Callable[..., str], *args: str) -> str:
        origin = self._origin
        return origin.text(self, function, *args) if origin.active else function(self._value, *args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self._value), (self._consume(FunctionUse("pickle")),)

    def __copy__(self) -> TracedScalar:
        return self

    def __deepcopy__(self, memo: object) -> TracedScalar:
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy  # only numpy itself calls this

        return numpy.asarray(self._consume(Use.NUMPY), dtype=dtype)

    # What numpy asks of operands: it tells plain numbers from others, whose types count.

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__":
            return self._numpy(function, inputs, options)
        return getattr(function, method)(*plain_for_numpy(inputs), **plain_for_numpy(options))

    def __array_function__(
        self, function: Any, types: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._numpy(function, args, kwargs)

    def _numpy(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        origin = self._origin
        if not origin.active:
            return function(*plain_for_numpy(args), **plain_for_numpy(kwargs))
        origin.turns += 1
        return origin.numpy(function, args, kwargs)

    def __round__(self, digits: Any = None) -> Any:
        return _arithmetic(round, (self,) if digits is None else (self, digits))

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if isinstance(other, _PLAIN) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if isinstance(other, _PLAIN) else NotImplemented

    def __imul__(self, other: Any) -> Any:
        # Python asks a sequence on the right only if what is on the left can be none.
        return self._consume(Use.INDEX) * other if isinstance(other, _SEQUENCES) else NotImplemented

    def __sym_min__(self, other: Any) -> Any:
        return _arithmetic(torch.sym_min, (self, other))

    def __sym_max__(self, other: Any) -> Any:
        return _arithmetic(torch.sym_max, (self, other))

    def __sym_float__(self) -> Any:
        return _arithmetic(torch.sym_float, (self,))

    def __sym_ite__(self, then: Any, otherwise: Any) -> Any:
        return then if self else otherwise

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        return _arithmetic(pow, (self, other) if modulus is None else (self, other, modulus))


def plain_for_numpy(value: Any) -> Any:
    """Return arguments for numpy, with the traced scalars in them made plain and guarded."""
    if isinstance(value, TracedScalar):
        return value._consume(Use.NUMPY)
    if type(value) in (tuple, list):
        return type(value)([plain_for_numpy(item) for item in value])
    if type(value) is dict:
        return {key: plain_for_numpy(item) for key, item in value.items()}
    return value


def put_source(scalar: TracedScalar, source: Any) -> None:
    """Give a scalar another source: the op of what was an element of a result."""
    _put(scalar, "_source", source)


def plain(value: Any) -> Any:
    """Return the plain number in a traced scalar, without a guard; return others unchanged."""
    return value._value if isinstance(value, TracedScalar) else value


_NUMBERS = (int, float, complex)  # isinstance works for bools and for traced scalars too
_PLAIN: Any = _NUMBERS
_SEQUENCES = (list, tuple, str, bytes, bytearray)


def _arithmetic(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    for operand in operands:
        if type(operand) in TRACED and (origin := operand._origin).active:
            origin.turns += 1
            return origin.arithmetic(function, operands)
    return function(*map(plain, operands))  # all of them outlived their run


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: TracedScalar) -> Any:
        return _arithmetic(function, (self,))

    return method


def _binary(
    function: Callable[[Any, Any], Any], reflected: bool, others: tuple[type, ...] = _NUMBERS
) -> Callable[..., Any]:
    def method(self: TracedScalar, other: Any) -> Any:
        if not isinstance(other, others):
            # Tensors, arrays and other number types accept traced values; for one whose run is over
            # they only know the plain value.
            if type(self) in TRACED:
                return NotImplemented
            return function(other, self._value) if reflected else function(self._value, other)
        return _arithmetic(function, (other, self) if reflected else (self, other))

    return method


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "invert": operator.invert,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}
_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_ON_INTS = frozenset({"lshift", "rshift", "and", "or", "xor"})
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _index_number(scalar: TracedScalar) -> int:
    return operator.index(scalar._consume(Use.INDEX))


def _operator_functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"__index__": _index_number}
    for name, function in _UNARY.items():
        found[f"__{name}__"] = _unary(function)
    for name, binary in _BINARY.items():
        others = (int,) if name in _ON_INTS else _NUMBERS
        found[f"__{name}__"] = _binary(binary, False, others)
        found[f"__r{name}__"] = _binary(binary, True, others)
    for name in _COMPARISONS:
        found[f"__{name}__"] = _binary(getattr(operator, name), reflected=False)
    found["__rpow__"] = _binary(operator.pow, reflected=True)
    return found


_OPERATORS = _operator_functions()
# Torch's class of symbolic floats gets all of these as soon as torch imports what defines them.
_BINARY_NAMES = frozenset(f"__{r}{name}__" for r in ("", "r") for name in _BINARY)


def _refuse(self: TracedScalar, other: Any) -> Any:
    return NotImplemented


def _not_inverted(self: TracedScalar) -> Any:
    return ~self._value


def _number_attribute(name: str) -> property:
    return property(lambda self: getattr(self._consume(use_by(name)), name))


class _NotSymbolic:
    """Replaces torch's class, with the same layout, once the run is over."""


def _traced_class(base: type, plain_kind: type) -> Any:
    # Methods such as bit_length() or is_integer(), some of which torch's classes have too.
    public = {
        attribute: _number_attribute(attribute)
        for attribute in dir(plain_kind)
        if attribute[0] != "_"
    }

    def new(cls: type, *args: Any) -> Any:
        if len(args) != 3:
            raise TypeError(
                f"the type of a traced {plain_kind.__name__} cannot create others: call "
                f"{plain_kind.__name__}() on the number before passing it on"
            )
        return object.__new__(cls)

    own = dir(plain_kind)
    operators = {name: function for name, function in _OPERATORS.items() if name in own}
    if plain_kind is float:
        operators.update(dict.fromkeys(_BINARY_NAMES - {*own}, _refuse))
        operators["__invert__"] = _not_inverted
    body = dict(
        {**public, **operators},
        __new__=new,
        __slots__=("_origin", "_source", "_value"),
        __class__=plain_kind,
        __hash__=TracedScalar.__hash__,  # which Python drops from a class that compares
        __doc__=f"A {plain_kind.__name__} that knows the op it came from.",
        __module__=plain_kind.__module__,
    )
    # By the name of the plain type, as in Python's error messages and `type(n).__name__`.
    return type(plain_kind.__name__, (TracedScalar, base), body)


TracedInt: Any = _traced_class(torch.SymInt, int)
TracedFloat: Any = _traced_class(torch.SymFloat, float)
TracedBool: Any = _traced_class(torch.SymBool, bool)
TRACED: frozenset[type] = frozenset({TracedInt, TracedFloat, TracedBool})
_RETIRED = {
    TracedInt: _traced_class(_NotSymbolic, int),
    TracedFloat: _traced_class(_NotSymbolic, float),
    TracedBool: _traced_class(_NotSymbolic, bool),
}
RETIRED: frozenset[type] = frozenset(_RETIRED.values())


class _NoOrigin:
    """The origin of scalars whose run is over: nobody reports to it."""

    active = False


_OVER = _NoOrigin()
_set_class: Any = vars(object)["__class__"].__set__


def retire(scalar: TracedScalar) -> None:
    """Turn a scalar whose run is over into an ordinary object with a number's protocols.

    Most are replaced by plain numbers by then. Those that cannot be reached, for example in the
    variables of a generator, must not look symbolic to torch: it would compute with a placeholder
    instead of their value.
    """
    _set_class(scalar, _RETIRED[type(scalar)])
    _put(scalar, "_origin", _OVER)
    _put(scalar, "_source", None)  # the run need not live as long
