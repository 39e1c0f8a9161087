"""Ops as the source that torch.compile is given: methods and operators, called by their names."""

from __future__ import annotations

import builtins
import math
import operator
import types
from typing import Any

import torch
from torch import Tensor

from bendtrace.recording.functions import name_of
from bendtrace.recording.structure import Instance
from bendtrace.recording.tape import Op, OpKind, Ref

__all__ = ["INFIX", "Expressions"]


class Expressions:
    """Writes ops as expressions.

    Attributes:
        names: what the names in them stand for.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "__builtins__": builtins, "torch": torch, "math": math, "operator": operator,
        }  # fmt: skip
        self._constants: dict[int, str] = {}

    def name(self, index: int) -> str:
        """Return the name of the value that an op gives."""
        return f"v{index}"

    def call(self, op: Op) -> str:
        """Return an expression, or a statement for an item assignment, that does an op."""
        args, target = op.args, op.target
        if op.target is Tensor.__setitem__:
            return f"{self.value(args[0])}[{self.value(args[1])}] = {self.value(args[2])}"
        if target in (operator.getitem, Tensor.__getitem__):
            return f"{self.value(args[0])}[{self.value(args[1])}]"
        if op.kind is OpKind.SCALAR and target in INFIX:
            return f"({self.value(args[0])} {INFIX[target]} {self.value(args[1])})"
        name = name_of(target)
        if isinstance(target, types.MethodWrapperType):
            return f"{self.value(args[0])}.{name}"
        given = [self.value(value) for value in args]
        named = [f"{key}={self.value(value)}" for key, value in op.kwargs.items()]
        if _is_method(target) and given:
            if name in _REFLECTED:
                return f"({given[1]} {_REFLECTED[name]} {given[0]})"
            return f"{given[0]}.{name}({', '.join(given[1:] + named)})"
        return f"{self.constant(target)}({', '.join(given + named)})"

    def value(self, value: Any) -> str:
        """Return an expression for recorded arguments."""
        kind = type(value)
        if kind is Ref:
            return self.name(value.index)
        if kind is tuple or isinstance(value, Instance):
            items = value if kind is tuple else value.items
            return "(" + "".join(self.value(item) + ", " for item in items) + ")"
        if kind is list:
            return "[" + ", ".join(map(self.value, value)) + "]"
        if kind is dict:
            items = (f"{self.constant(k)}: {self.value(v)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
        if kind is slice:
            return f"slice({', '.join(map(self.value, (value.start, value.stop, value.step)))})"
        return self.constant(value)

    def constant(self, value: Any) -> str:
        """Return an expression for a value that does not change."""
        kind = type(value)
        if kind in (bool, int, str, type(None), type(...), bytes):
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if kind is complex:
            return f"complex({self.constant(value.real)}, {self.constant(value.imag)})"
        if kind in (torch.dtype, torch.memory_format, torch.layout):
            return str(value)
        if kind is torch.device:
            return f"torch.device({str(value)!r})"
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
            self.names[name] = value
        return name


def _is_method(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    return getattr(Tensor, name, None) is target


INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=",
    operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
# Operators with the tensor on their right.
_REFLECTED = {
    "__radd__": "+", "__rsub__": "-", "__rmul__": "*", "__rdiv__": "/", "__rtruediv__": "/",
    "__rfloordiv__": "//", "__rmod__": "%", "__rpow__": "**", "__rmatmul__": "@",
    "__rand__": "&", "__ror__": "|", "__rxor__": "^", "__rlshift__": "<<", "__rrshift__": ">>",
}  # fmt: skip
