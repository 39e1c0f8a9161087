"""What is known of the activations and weights of a model, as tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bendtrace._later import tabulate
from bendtrace.interject.bends.names import (
    Level,
    compiled,
    is_bendable_dtype,
    is_inside,
    level_of,
    names_of,
)
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.naming import Registry, identifier
from bendtrace.paths.text import Text
from bendtrace.recording.owners import module_of
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import OpKind, TensorMeta

__all__ = [
    "Activation",
    "Filter",
    "activation_table",
    "inputs_in",
    "kept",
    "modules_of",
    "of_candidate",
    "weight_table",
]

Filter: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None

_KINDS = (FunctionType, MethodDescriptorType, WrapperDescriptorType, BuiltinFunctionType)
_METHODS = frozenset(
    member
    for cls in Tensor.__mro__
    for name, member in vars(cls).items()
    if isinstance(member, _KINDS) and not name.startswith("__")  # not what others put there
)


class Activation(NamedTuple):
    """A value of a run that can be bent, or a place where there may be one.

    Attributes:
        name: its node path; for an input of the model its name.
        op: "placeholder", "call_module", "call_method" or "call_function".
        shape: its shape when it was first seen.
        dtype: its dtype then.
        level: "whole" for what tables list.
        names: everything that patterns can know it by.
    """

    name: str
    op: str
    shape: torch.Size | None
    dtype: torch.dtype | None
    level: Level
    names: tuple[str, ...]


def of_candidate(node: Candidate, leaves: frozenset[str]) -> Activation | None:
    """Return what is known of a node; None if it gives nothing that can be bent."""
    if not node.path or node.shape is None or not is_bendable_dtype(node.dtype):
        return None
    op = "call_function"
    if node.is_module:
        op = "call_module"
    elif node.function in _METHODS:
        op = "call_method"
    shape, level = torch.Size(node.shape), level_of(node, leaves)
    return Activation(node.path, op, shape, node.dtype, level, names_of(node))


def inputs_in(recording: Recording, registry: Registry) -> Iterator[Activation]:
    """Yield the inputs of the model that are tensors and can be bent.

    Args:
        recording: a run.
        registry: gives the names of nodes.
    """
    for op in recording.tape.ops:
        if op.kind is not OpKind.INPUT or not str(op.target).isidentifier():
            continue
        if isinstance(op.meta, TensorMeta) and is_bendable_dtype(op.meta.dtype):
            label, shape = str(op.target), torch.Size(op.meta.shape)
            with registry.lock:
                name = registry.reserve("", ("input", label), identifier(label))
            names = tuple(dict.fromkeys((name, label)))
            yield Activation(name, "placeholder", shape, op.meta.dtype, "whole", names)


def modules_of(model: Callable[..., Any], leaves: frozenset[str]) -> Iterator[Activation]:
    """Yield the modules of a model, for as long as no run has come by them."""
    owner = module_of(model)
    if owner is None:
        return
    for path, _ in owner.named_modules(remove_duplicate=False):
        around = path.rpartition(".")[0]
        if path and not is_inside(around, leaves):
            level: Level = "whole" if path in leaves else "around"
            names = (path, path.replace(".", "_"))
            yield Activation(path, "call_module", None, None, level, names)


def kept(names: Iterable[str], flt: Filter, exclude: Filter) -> bool:
    """Whether something by some names passes a filter.

    Args:
        names: its names.
        flt: patterns that all have to match one of them, from the beginning.
        exclude: patterns of which none may.
    """
    names = list(names)

    def matched(pattern: re.Pattern[str]) -> bool:
        return any(pattern.match(name) for name in names)

    return all(map(matched, _patterns(flt))) and not any(map(matched, _patterns(exclude)))


def _patterns(given: Filter) -> list[re.Pattern[str]]:
    if given is None:
        return []
    listed = [given] if isinstance(given, (str, re.Pattern)) else given
    return [compiled(pattern) for pattern in listed]


def activation_table(activations: Iterable[Activation]) -> Text:
    """Return a table of activations: name, kind of node, shape."""
    return Text(tabulate.tabulate([(found.name, found.op, found.shape) for found in activations]))


def weight_table(weights: Iterable[tuple[str, Tensor]]) -> Text:
    """Return a table of weights: name, shape, dtype, and how large their values are."""
    headers = ["name", "shape", "dtype", "min", "max", "mean", "stddev"]
    rows = [(name, tensor.shape, tensor.dtype, *_statistics(tensor)) for name, tensor in weights]
    return Text(tabulate.tabulate(rows, headers=headers))


def _statistics(tensor: Tensor) -> tuple[float | None, ...]:
    if (
        isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
        or not tensor.numel()
        or tensor.is_complex()
    ):
        return None, None, None, None
    values = tensor.detach().double()
    spread = values.std().item() if values.numel() > 1 else None
    return values.min().item(), values.max().item(), values.mean().item(), spread
