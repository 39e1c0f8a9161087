"""The checked settings of a harvest, and descriptions to compare settings and models."""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bendtrace._checks import required_int
from bendtrace.errors import InputError
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.passes import Passes
from bendtrace.interject.resolver import describe_where
from bendtrace.source.sites import is_users_file
from bendtrace.storage.tensors import crc32

__all__ = [
    "STACK",
    "Settings",
    "fingerprint",
    "state_of",
    "sum_of",
    "told",
    "told_insertion",
]

STACK = "stack"
_REDUCTIONS = ("mean", "max", "last")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Settings:
    """The checked options of `harvest` that determine the content of the files."""

    where: tuple[Any, ...]
    reduce: Any
    feature_axis: int | None
    passes: Any
    batch_axis: Any
    dtype: torch.dtype | None
    ids: Any
    keep: Mapping[str, Any]
    allow_none: bool
    seed: int | None
    shard_samples: int
    shard_bytes: int
    form: str
    is_dealt: bool

    def __post_init__(self) -> None:
        named = {item for item in self.where if isinstance(item, str)}
        only_named = len(named) == len(self.where)
        for option, said in (("reduce", self.reduce), ("batch_axis", self.batch_axis)):
            if isinstance(said, Mapping) and only_named and not named >= said.keys():
                wrong = next(key for key in said if key not in named)
                raise InputError(f"{option}= has an entry for {wrong!r}, which is not in where=")
        for rule in self.reduce.values() if isinstance(self.reduce, Mapping) else (self.reduce,):
            if rule is not None and rule not in _REDUCTIONS and not callable(rule):
                raise InputError(
                    f"reduce= takes {', '.join(map(repr, _REDUCTIONS))}, a function of the value, "
                    f"a dict of these for each node, or None; not {rule!r}"
                )
        axes = self.batch_axis
        for axis in axes.values() if isinstance(axes, Mapping) else (axes,):
            if axis is not None and type(axis) is not int:
                raise InputError(
                    "batch_axis= takes the number of an axis, None for values without "
                    f"samples, or a dict of these for each node, not {axis!r}"
                )
        required_int("feature_axis", self.feature_axis, or_none=True)
        if not (isinstance(self.passes, str) and self.passes == STACK):
            if isinstance(self.passes, str):
                raise InputError(
                    f"the only string that passes= accepts is {STACK!r}, not {self.passes!r}"
                )
            Passes(self.passes)
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise InputError(
                f"dtype= has to be torch.float64, float32, float16 or bfloat16, not {self.dtype!r}"
            )
        for option in ("shard_samples", "shard_bytes"):
            required_int(option, getattr(self, option), 1)
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise InputError(
                f"seed= has to be an int of at least 0 and below 2^63, not {self.seed!r}"
            )
        for name in self.keep:
            if not isinstance(name, str) or not name or "#" in name or not name.isprintable():
                raise InputError(f"keep= contains the name {name!r}, which cannot be stored")

    def told(self) -> dict[str, Any]:
        """Return them as plain values, for comparison with those of a later call."""
        apart = ("allow_none", "dtype", "where")
        plain = {name: told(value) for name, value in vars(self).items() if name not in apart}
        plain["where"] = [describe_where(item) for item in self.where]
        plain["dtype"] = None if self.dtype is None else str(self.dtype)
        plain["format"] = plain.pop("form")
        plain["sharded"] = plain.pop("is_dealt")
        return plain


_LARGEST = 1 << 24  # bytes of a parameter that a fingerprint looks at in full
_DEEPEST = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def told(value: Any, *, whole: bool = True) -> Any:
    """Return a description in plain values, which is equal for objects that do the same.

    Functions are described by their code, defaults and closures; partial functions and bound
    methods by their parts; tensors and modules by checksums of their values; everything in
    installed packages by its name.

    Args:
        value: the object.
        whole: whether to include the lists, dicts, objects and globals that functions use. They are
            left out if they may count calls.
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
    """Describe an insertion."""
    digest = _Words(True).digest((insertion.what, insertion.passes))
    return f"{insertion.what.label} at {describe_where(insertion.where)} {digest}"


class _Words:
    """Writes down all parts of a thing; `whole` is that of `described`."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is used twice

    def digest(self, value: Any) -> str:
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
    """Return a fingerprint of a model: of its structure, and of the values of its weights.

    The structure consists of its modules with their plain attributes, and the code of their classes
    outside installed packages. Of parameters above 16 MiB only about 4 million evenly spaced
    elements count.
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
