"""TorchLens's selectors of layers, and its helpers for changing values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.log.entries import OPERATORS, LayerEntry, layer_type_of, torchlens_name
from bendtrace.log.path_views import Candidate

__all__ = [
    "clamp", "contains", "func", "in_module", "label", "mean_ablate", "module", "noise",
    "project_off", "project_onto", "regex", "replace_with", "scale", "steer", "when", "where",
    "zero_ablate",
]  # fmt: skip

Helper = Callable[[Tensor], Tensor]
Result = TypeVar("Result")
Given = ParamSpec("Given")


class Listed(Generic[Given, Result]):
    """A small function that the docstring of `bendtrace.compat.torchlens` lists with others."""

    def __init__(self, function: Callable[Given, Result], doc: str = "") -> None:
        self._function = function
        functools.update_wrapper(self, function)
        self.__doc__ = doc or self.__doc__

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Selector:
    """Selects layers of a log; selectors are combined with `&`, `|` and `~`.

    Attributes:
        text: how it is written.
        selects: whether it selects an entry.
        node: whether it selects a node of a run that has not ended; None if only a log tells.
    """

    text: str
    selects: Callable[[Any], bool]
    node: Callable[[Candidate], bool] | None = None

    def __call__(self, entry: LayerEntry) -> bool:
        return self.selects(entry)

    def __and__(self, other: Selector) -> Selector:
        return self._with(other, "&", lambda one, two: lambda it: one(it) and two(it))

    def __or__(self, other: Selector) -> Selector:
        return self._with(other, "|", lambda one, two: lambda it: one(it) or two(it))

    def __invert__(self) -> Selector:
        return Selector(f"~{self.text}", lambda entry: not self(entry))

    def _with(self, other: Selector, sign: str, join: Callable[..., Any]) -> Selector:
        one, two = self.node, other.node
        node = None if one is None or two is None else join(one, two)
        return Selector(f"({self} {sign} {other})", join(self.selects, other.selects), node)

    def __str__(self) -> str:
        return self.text


@Listed
def func(name: str) -> Selector:
    """Select the results of a function."""
    if not isinstance(name, str):
        raise TypeError(f"func() takes a string function name, not {name!r}")
    word = "".join(char for char in name.lower() if char.isalnum())

    def is_of(node: Candidate) -> bool:
        return node.function is not None and torchlens_name(layer_type_of(node.function)) == word

    return Selector(
        f"func({name!r})",
        lambda entry: entry.layer_type == word,
        None if word in OPERATORS else is_of,  # the expression tells operators from functions
    )


@Listed
def in_module(address: str) -> Selector:
    """Select the values computed in a module, also in modules inside of it."""

    def is_inside(path: str) -> bool:
        return path == address or path.startswith(f"{address}.")

    return Selector(
        f"in_module({address!r})",
        lambda entry: entry.kind == "op" and is_inside(entry.module),
        lambda node: node.function is not None and is_inside(node.scope_path),
    )


def _selecting(name: str, selects: Callable[[Any, Any], bool], doc: str) -> Listed[Any, Selector]:
    return Listed(lambda what: Selector(f"{name}({what!r})", lambda one: selects(one, what)), doc)


module = _selecting(
    "module",
    lambda entry, name: any(name in (one, one.rpartition(":")[0]) for one in entry.output_of),
    "Select the outputs of a module, `features.3`, or of one of its calls, `features.3:1`.",
)
label = _selecting(
    "label",
    lambda entry, name: name in (
        entry.label, entry.name, entry.short_name, f"{entry.name}:{entry.pass_number}",
        f"{entry.short_name}:{entry.pass_number}",
    ),
    "Select a layer by its label: `relu_1_2`, `relu_1`, `relu_1:2`.",
)  # fmt: skip
contains = _selecting(
    "contains", lambda entry, text: text in entry.label, "Select by a text in the label."
)
regex = _selecting(
    "regex",
    lambda entry, pattern: re.search(pattern, entry.label) is not None,
    "Select by a regular expression that is found in the label.",
)
where = _selecting(
    "where",
    lambda entry, predicate: bool(predicate(entry)),
    "Select the layers for which a function of the entry is true.",
)


class Change(NamedTuple):
    """A helper, and the layers whose values it replaces.

    Attributes:
        where: selects the layers.
        what: a function of the value.
    """

    where: Any
    what: Callable[..., Any]


when = Listed(Change, "Return a change for `trace(intervene=...)`: where, and by which helper.")
zero_ablate = Listed(lambda: torch.zeros_like, "Replace a value by zeros.")
replace_with = Listed(lambda value: lambda _: value, "Replace a value by another one.")
scale = Listed(lambda factor: lambda value: value * factor, "Multiply a value.")
clamp = Listed(lambda *, min=None, max=None: lambda v: v.clamp(min, max), "Limit a value.")


@Listed
def mean_ablate(source: Any = None) -> Helper:
    """Fill a value with its mean, or with the mean of another tensor."""

    def filled(value: Tensor) -> Tensor:
        mean = (value if source is None else getattr(source, "out", source)).mean()
        return torch.zeros_like(value) + mean.to(value.dtype)

    return filled


@Listed
def noise(std: float, *, seed: int | None = None) -> Helper:
    """Add Gaussian noise to a value; with a seed, the same one, which draws nothing else."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def noisy(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return value + drawn.to(value.device) * std

    return noisy


@Listed
def steer(direction: Tensor, magnitude: float = 1.0, *, feature_axis: int | None = None) -> Helper:
    """Add a direction to a value; a vector lies along `feature_axis`."""
    return lambda value: value + _align(direction, value, feature_axis) * magnitude


@Listed
def project_onto(direction: Tensor, *, feature_axis: int | None = None) -> Helper:
    """Keep only the part of a value along a direction."""

    def projected(value: Tensor) -> Tensor:
        along = _align(direction, value, feature_axis)
        dims = tuple(range(value.dim())) if feature_axis is None else feature_axis
        share = (value * along).sum(dims, keepdim=True) / (along * along).sum(dims, keepdim=True)
        return along * share

    return projected


@Listed
def project_off(direction: Tensor, *, feature_axis: int | None = None) -> Helper:
    """Remove the part of a value along a direction."""
    onto = project_onto(direction, feature_axis=feature_axis)
    return lambda value: value - onto(value)


def _align(direction: Tensor, value: Tensor, axis: int | None) -> Tensor:
    direction = direction.to(value.device, value.dtype)
    if axis is not None and direction.dim() == 1 and value.dim() > 1:
        shape = [1] * value.dim()
        shape[axis] = len(direction)
        return direction.view(shape)
    if axis is None and direction.dim() != value.dim():
        raise InputError(
            f"a direction of shape {tuple(direction.shape)} needs feature_axis= to be used on a "
            f"value of shape {tuple(value.shape)}"
        )
    return direction
