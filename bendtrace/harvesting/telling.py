"""Functions, objects and models, put into words that are the same in another process."""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bendtrace.interject.insertion import Insertion
from bendtrace.interject.where import describe_where
from bendtrace.recording.places import is_users_file
from bendtrace.storage.tensors import crc32

__all__ = ["fingerprint", "state_of", "sum_of", "told", "told_insertion"]

_LARGEST = 1 << 24  # bytes of a parameter that a fingerprint looks at in full
_DEEPEST = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def told(value: Any, *, whole: bool = True) -> Any:
    """Put something into plain values: equal ones where it would do the same.

    Functions are told by their code, defaults and what they close over; partial functions and bound
    methods by what they hold; tensors and modules by checksums of their values. What lies in
    installed packages is told by its name.

    Args:
        value: what to tell.
        whole: whether lists, dicts, objects and globals that functions reach count as well. They
            do not where somebody may count calls in them.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): told(item, whole=whole) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [told(item, whole=whole) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((told(item, whole=whole) for item in value), key=repr)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, functools.partial):
        name = f"partial of {getattr(value.func, '__qualname__', type(value.func).__qualname__)}"
    return f"{name} {_Words(whole).digest(value)}"


def told_insertion(insertion: Insertion) -> str:
    """Put what is inserted in a model into words."""
    digest = _Words(True).digest((insertion.what, insertion.passes))
    return f"{insertion.what.label} at {describe_where(insertion.where)} {digest}"


class _Words:
    """Writes down all that a thing is made of.

    Args:
        whole: see `told`.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is used twice

    def digest(self, value: Any) -> str:
        """Return a checksum of what is written down."""
        text = "\n".join(self._of(value, 0))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _of(self, value: Any, depth: int) -> Iterator[str]:
        kind = type(value)
        if kind in _PLAIN or kind in _NAMED:
            yield repr(value)
            return
        if id(value) in self._seen:
            yield f"again {self._seen[id(value)]}"
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if depth > _DEEPEST:
            return
        if isinstance(value, enum.Enum):
            yield value.name
        elif isinstance(value, Tensor):
            yield f"{tuple(value.shape)} {value.dtype} {sum_of(value):08x}"
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                yield f"{name} {type(module).__qualname__} {module.training}"
            for name, tensor in state_of(value):
                yield f"{name} {sum_of(tensor):08x}"
        elif isinstance(value, (types.ModuleType, type)):
            yield getattr(value, "__qualname__", value.__name__)
        elif isinstance(value, types.CodeType):
            yield from self._code(value, depth)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, types.MethodType):
            yield from self._of(value.__func__, depth + 1)
            yield from self._of(value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            yield from self._of((value.func, value.args, value.keywords), depth + 1)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield str(value.__qualname__)
        elif not (self._whole or kind in (tuple, frozenset)):
            return
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from self._of(key, depth + 1)
                yield from self._of(item, depth + 1)
        elif isinstance(value, (set, frozenset)):
            yield from sorted("\n".join(_Words(self._whole)._of(item, depth + 1)) for item in value)
        elif isinstance(value, Sequence):
            for item in value:
                yield from self._of(item, depth + 1)
        else:
            yield from self._object(value, depth)

    def _code(self, code: types.CodeType, depth: int) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr(code.co_names)
        for constant in code.co_consts:
            yield from self._of(constant, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Iterator[str]:
        code = function.__code__
        yield function.__qualname__
        if not is_users_file(code.co_filename):
            return
        yield from self._code(code, depth)
        yield from self._of(function.__defaults__, depth + 1)
        yield from self._of(function.__kwdefaults__, depth + 1)
        for cell in function.__closure__ or ():
            try:
                yield from self._of(cell.cell_contents, depth + 1)
            except ValueError:  # not set yet
                yield "unset"
        if not self._whole:
            return
        names = sorted({name for inner in _codes(code) for name in inner.co_names})
        for name in names:
            if name in function.__globals__:
                yield name
                yield from self._of(function.__globals__[name], depth + 1)

    def _object(self, value: Any, depth: int) -> Iterator[str]:
        for cls in type(value).__mro__:
            for name, member in sorted(vars(cls).items()):
                if isinstance(member, types.FunctionType):
                    yield name
                    yield from self._of(member, depth + 1)
        for name, item in sorted(getattr(value, "__dict__", {}).items()):
            yield name
            yield from self._of(item, depth + 1)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def state_of(model: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name."""
    if isinstance(model, nn.Module):
        yield from itertools.chain(model.named_parameters(), model.named_buffers())


def fingerprint(model: Callable[..., Any]) -> dict[str, str]:
    """Return what a model is known again by: its structure, and the values of its weights.

    The structure are its modules with their plain attributes, and the code of their classes as far
    as that is not in installed packages. Of parameters above 16 MiB every how-manieth element is
    looked at, about 4 million of them.
    """
    structure = hashlib.sha256()
    weights = 0
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            structure.update(f"{name} {type(module).__qualname__} {module.training}\n".encode())
            structure.update(_Words(False).digest(tuple(_attributes_of(module))).encode())
    else:
        structure.update(str(told(model, whole=False)).encode())
    for name, tensor in state_of(model):
        if is_lazy(tensor):
            structure.update(f"{name} lazy\n".encode())
            continue
        structure.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights = sum_of(tensor, weights)
    return {
        "class": type(model).__qualname__,
        "structure": structure.hexdigest()[:16],
        "weights": f"{weights:08x}",
    }


def _attributes_of(module: nn.Module) -> Iterator[Any]:
    """Yield the code of a module's class, and its attributes that are plain or functions."""
    for cls in type(module).__mro__:
        for name, member in sorted(vars(cls).items()):
            if isinstance(member, types.FunctionType) and is_users_file(
                member.__code__.co_filename
            ):
                yield name, member
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training":
            continue
        if _is_plain(value):
            yield name, repr(told(value))
        elif isinstance(value, (types.FunctionType, functools.partial)):
            yield name, value


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in _PLAIN or type(value) in _NAMED or isinstance(value, enum.Enum):
        return True
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain(v, depth + 1) for pair in value.items() for v in pair)
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain(item, depth + 1) for item in value)
    return False


def sum_of(tensor: Tensor, before: int = 0) -> int:
    """Return a checksum of a tensor, added to another one."""
    if is_lazy(tensor):
        return before
    plain = tensor.detach()
    plain = plain.to_local() if hasattr(plain, "to_local") else plain
    if plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
        return before
    if plain.numel() * plain.element_size() > _LARGEST:
        step = -(-plain.numel() * plain.element_size() // _LARGEST)
        plain = plain.reshape(-1)[::step]
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return zlib.crc32(b"%d" % crc32(plain.view(torch.uint8)), before)
