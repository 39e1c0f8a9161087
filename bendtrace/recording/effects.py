"""What a function of torch's may do besides giving a value, as far as its schema tells."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["is_pure", "is_simple"]

_BASE = torch._C.TensorBase
_NAMESPACES = frozenset({"torch", "torch._C._nn", "torch._C._VariableFunctions"})

# Operators whose descriptors have other names than the function that they come down to.
_OPERATORS = frozenset({_BASE.__getitem__})

# Those that write to an argument without their schemas saying so, or choose what to do by many
# settings of torch's.
_EXCEPTED = ("batch_norm", "instance_norm", "rrelu", "attention")


def is_pure(function: Any) -> bool:
    """Whether a function writes to nothing that it is given, nor calls any Python.

    Told from the schemas of the operator of that name: of all its overloads, but for those with
    an `out`, none may say that it writes. Of random functions it says nothing.
    """
    kind = type(function)
    if kind is types.MethodDescriptorType or kind is types.WrapperDescriptorType:
        if function.__objclass__ is not _BASE:
            return False
    elif kind is types.BuiltinFunctionType:
        owner = getattr(function, "__self__", None)
        if getattr(function, "__module__", None) not in _NAMESPACES and not (
            isinstance(owner, type) and owner.__module__.startswith("torch")
        ):
            return False
    else:
        return False
    if function in _OPERATORS:
        return True
    if any(name in function.__name__ for name in _EXCEPTED):
        return False
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
    return bool(schemas) and not any(map(_writes, schemas))


def _writes(schema: Any) -> bool:
    arguments = [a for a in schema.arguments if not a.is_out]
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


def is_simple(function: Any) -> bool:
    """Whether a function works element by element, or on sizes alone."""
    return function.__name__ in _SIMPLE


_SIMPLE = frozenset(
    {
        "abs", "add", "clamp", "contiguous", "cos", "div", "eq", "exp", "expand", "flatten", "ge",
        "gt", "le", "log", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum",
        "mul", "ne", "neg", "permute", "pow", "reciprocal", "relu", "reshape", "rsqrt", "rsub",
        "sigmoid", "sin", "sqrt", "square", "squeeze", "sub", "t", "tanh", "transpose",
        "true_divide", "unsqueeze", "view", "view_as", "where",
    }
)  # fmt: skip
