"""Comparison of two values, bit for bit."""

from __future__ import annotations

import random
import struct
import types
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two values are the same, bit for bit.

    Tensors have to agree in type, dtype, shape, layout, device, `requires_grad` and every bit: a
    nan equals a nan with the same payload, and 0.0 does not equal -0.0. Floats are compared bit by
    bit, too. Containers and objects are compared recursively and by type, dicts also by the order
    of their keys. Everything else is compared with `==`.

    Example:
        >>> import torch
        >>> same_bits([torch.tensor(float("nan"))], [torch.tensor(float("nan"))])
        True
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    return _same_values(a, b, {})


# Pairs under comparison, by identity: values that hold themselves are the same until shown not to
# be. The pair is kept with them, so that no id is given out again.
_Seen = dict[tuple[int, int], tuple[Any, Any]]


def _same_values(a: Any, b: Any, seen: _Seen) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _NUMBERS:
        return _NUMBERS[kind](a, b)
    if isinstance(a, (type, Enum, *_CODE)):
        return bool(a == b)
    if (id(a), id(b)) in seen:
        return True
    seen[id(a), id(b)] = a, b
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, random.Random):
        return bool(a.getstate() == b.getstate())
    if isinstance(a, Tensor):
        # A nested tensor of layout jagged keeps itself, and symbols of its own, in attributes.
        return _same_tensors(a, b) and (a.is_nested or _same_states(a, b, seen))
    if isinstance(a, (list, tuple)):
        return (
            len(a) == len(b)
            and all(map(_same_values, a, b, repeat(seen)))
            and _same_states(a, b, seen)
        )
    if isinstance(a, Mapping):
        items = list(a.items()), list(b.items())
        return _same_values(*items, seen) and _same_states(a, b, seen)
    if hasattr(a, "tobytes") and hasattr(a, "dtype"):  # numpy, of which torch can do without
        same = a.dtype == b.dtype and getattr(a, "shape", ()) == getattr(b, "shape", ())
        return same and (_same_values(a.tolist(), b.tolist(), seen) if a.dtype.hasobject
                         else a.tobytes() == b.tobytes())  # fmt: skip
    if hasattr(a, "__dict__") or _slots(a):
        return _same_states(a, b, seen)
    return bool(a == b)


def _same_states(a: Any, b: Any, seen: _Seen) -> bool:
    mine, theirs = _own_attributes(a), _own_attributes(b)
    return mine.keys() == theirs.keys() and all(
        _same_values(mine[k], theirs[k], seen) for k in mine
    )


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has."""
    state = dict(getattr(value, "__dict__", {}))
    for name in _slots(value):
        if hasattr(value, name):
            state[name] = getattr(value, name)
    return state


def _slots(value: Any) -> list[str]:
    found: list[str] = []
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if any(getattr(a, name) != getattr(b, name) for name in _METADATA):
        return False
    if a.is_nested:  # has no shape to ask for
        parts = a.unbind(), b.unbind()
        return len(parts[0]) == len(parts[1]) and all(map(_same_tensors, *parts))
    if a.shape != b.shape:
        return False
    return a.is_meta or all(map(torch.equal, map(_bytes, _dense(a)), map(_bytes, _dense(b))))


_METADATA = ("dtype", "layout", "device", "requires_grad", "is_nested")


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _bytes(tensor: Tensor) -> Tensor:
    # One dimension first: a scalar cannot be viewed in a smaller dtype. A copy, not contiguous(),
    # which leaves a single element at whatever stride it has, and then it cannot be either.
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    if tensor.is_quantized:  # other views of one have no quantizer, and comparing them crashes
        tensor = tensor.int_repr()
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _same_floats(a: float, b: float) -> bool:
    return struct.pack("d", a) == struct.pack("d", b)


def _same_complex(a: complex, b: complex) -> bool:
    return _same_floats(a.real, b.real) and _same_floats(a.imag, b.imag)


_NUMBERS: dict[type, Callable[[Any, Any], bool]] = {float: _same_floats, complex: _same_complex}

# What has a `__dict__` that does not tell one from another.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
