"""The settings of a harvest: checked at the door, and compared when it is gone on with."""

from __future__ import annotations

import hashlib
import itertools
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bendtrace.errors import InputError
from bendtrace.interject.passes import Passes
from bendtrace.interject.where import describe_where
from bendtrace.storage.files import crc32

__all__ = ["STACK", "Settings", "fingerprint", "flat", "state_of", "sum_of", "told_function"]

STACK = "stack"
_REDUCTIONS = ("mean", "max", "last")
_LARGEST = 1 << 24  # bytes of a parameter that a fingerprint looks at in full


@dataclass(frozen=True)
class Settings:
    """What decides what is harvested, and how it is stored.

    Attributes:
        where: which nodes, as given, one by one.
        reduce: what is made of the values: None, a name, a function, or one for each node.
        feature_axis: which axis named reductions keep, besides that of the samples.
        passes: which passes of a node that is executed several times.
        batch_axis: which axis of a value counts the samples; None for a value of the batch as a
            whole; or one for each node.
        dtype: what floating point numbers are stored as; None for what they are.
        ids: where ids are from: None for running numbers.
        keep: parts of the batch to store, by name.
        allow_none: whether it is right that nothing is meant.
        seed: seed of the random numbers of each batch; None to leave them alone.
        shard_samples: how many samples close a shard.
        shard_bytes: how many bytes close a shard.
        form: the format of the files.
        is_dealt: whether the loader gives each process its own part.
    """

    where: tuple[Any, ...]
    reduce: Any
    feature_axis: int
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
                raise InputError(f"{option}= is about {wrong!r}, which is not among where=")
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
                    "batch_axis= takes the number of an axis, None for what has no samples, or a "
                    f"dict of these for each node; not {axis!r}"
                )
        if type(self.feature_axis) is not int:
            raise InputError(f"feature_axis= takes the number of an axis, not {self.feature_axis}")
        if not (isinstance(self.passes, str) and self.passes == STACK):
            if isinstance(self.passes, str):
                raise InputError(f"passes= knows one word, {STACK!r}, and not {self.passes!r}")
            Passes(self.passes)
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise InputError(
                f"dtype= is what floating point numbers are stored as, not {self.dtype!r}"
            )
        for option in ("shard_samples", "shard_bytes"):
            value = getattr(self, option)
            if type(value) is not int or value < 1:
                raise InputError(f"{option}= has to be a positive int, not {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise InputError(f"seed= has to be an int from 0 below 2^63, not {self.seed!r}")
        for name in self.keep:
            if not isinstance(name, str) or not name or "#" in name or not name.isprintable():
                raise InputError(f"keep= gives names, and {name!r} is none that can be stored")

    def told(self) -> dict[str, Any]:
        """Return them as plain values, to be compared with those of another time."""
        return {
            "where": [describe_where(item) for item in self.where],
            "reduce": _told(self.reduce),
            "feature_axis": self.feature_axis,
            "passes": _told(self.passes),
            "batch_axis": _told(self.batch_axis),
            "dtype": None if self.dtype is None else str(self.dtype),
            "ids": _told(self.ids),
            "keep": _told(self.keep),
            "seed": self.seed,
            "shard_samples": self.shard_samples,
            "shard_bytes": self.shard_bytes,
            "format": self.form,
            "sharded": self.is_dealt,
        }


def flat(where: Any) -> Iterator[Any]:
    """Yield what was said one by one."""
    if isinstance(where, (list, tuple, set, frozenset)):
        for item in where:
            yield from flat(item)
    else:
        yield where


def _told(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_told(item) for item in value]
    if callable(value):
        return told_function(value)
    return repr(value)


def told_function(function: Callable[..., Any]) -> str:
    """Name a function, with a checksum of what it does as far as that is known."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, types.CodeType):
        return f"{getattr(function, '__module__', '')}.{name}"
    given = repr(getattr(function, "__defaults__", None))
    free = [_told_cell(cell) for cell in getattr(function, "__closure__", None) or ()]
    digest = hashlib.sha256("\n".join([*_parts(code), given, *free]).encode()).hexdigest()[:12]
    return f"{name} {digest}"


def _told_cell(cell: Any) -> str:
    try:
        value = cell.cell_contents
    except ValueError:  # not set yet
        return ""
    return repr(value) if type(value) in (bool, int, float, str, tuple, type(None)) else ""


def _parts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        else:
            yield repr(constant)


def state_of(model: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name."""
    if isinstance(model, nn.Module):
        yield from itertools.chain(model.named_parameters(), model.named_buffers())


def fingerprint(model: Callable[..., Any]) -> dict[str, str]:
    """Return what a model is known again by: its structure, and the values of its weights.

    Of parameters above 16 MiB every how-manieth element is looked at, about 4 million of them.
    """
    structure = hashlib.sha256()
    weights = 0
    kind = type(model).__qualname__ if isinstance(model, nn.Module) else told_function(model)
    structure.update(kind.encode())
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            structure.update(f"{name} {type(module).__qualname__} {module.training}\n".encode())
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
