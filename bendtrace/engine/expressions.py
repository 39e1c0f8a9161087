"""Ops as the source that torch.compile is given: methods and operators, called by their names."""

from __future__ import annotations

import math
import operator
import types
from typing import Any

import torch
from torch import Tensor

from bendtrace.engine.source import INFIX, GeneratedSource
from bendtrace.tape.structure import Instance
from bendtrace.tape.tape import Op, OpKind
from bendtrace.watch.functions import name_of


class Expressions(GeneratedSource):
    """Writes ops so that torch.compile knows them: as methods, operators and literals."""

    def __init__(self) -> None:
        super().__init__()
        self.names.update(torch=torch, math=math, operator=operator)

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
        if _is_tensor_method(target) and given:
            if name in _REFLECTED:
                return f"({given[1]} {_REFLECTED[name]} {given[0]})"
            return f"{given[0]}.{name}({', '.join(given[1:] + named)})"
        return f"{self.constant(target)}({', '.join(given + named)})"

    def constant(self, value: Any) -> str:
        """Return an expression for a value that does not change."""
        kind = type(value)
        if kind is bytes:
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if kind is complex:
            return f"complex({self.constant(value.real)}, {self.constant(value.imag)})"
        if kind is slice:
            parts = value.start, value.stop, value.step
            return f"slice({', '.join(map(self.constant, parts))})"
        if kind in (torch.dtype, torch.memory_format, torch.layout):
            return str(value)
        if kind is torch.device:
            return f"torch.device({str(value)!r})"
        return super().constant(value)

    def _instance(self, instance: Instance) -> str:
        # Of a tuple of some kind: see `obstacle_to_compiling`.
        return self.value(tuple(instance.items))


def _is_tensor_method(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    return getattr(Tensor, name, None) is target


# Operators with the tensor on their right.
_REFLECTED = {
    "__radd__": "+", "__rsub__": "-", "__rmul__": "*", "__rdiv__": "/", "__rtruediv__": "/",
    "__rfloordiv__": "//", "__rmod__": "%", "__rpow__": "**", "__rmatmul__": "@",
    "__rand__": "&", "__ror__": "|", "__rxor__": "^", "__rlshift__": "<<", "__rrshift__": ">>",
}  # fmt: skip


def wide_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to compute in for values of a dtype to stay exact; None if unknown."""
    if dtype is torch.bool:
        return dtype
    if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return torch.float64
    exact = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    return torch.int64 if dtype in exact else None
