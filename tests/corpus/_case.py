"""What a corpus case is, and the helpers its files share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
Paths = dict[str, Callable[[], Call]]
T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Case:
    """One small model and inputs that send it down different paths."""

    name: str
    make: Callable[[], Callable[..., Any]]
    paths: Paths


REGISTRY: dict[str, Case] = {}


def register(**paths: Callable[[], Call]) -> Callable[[T], T]:
    """Register a module class or a plain function, under its name in snake case."""

    def add(model: T) -> T:
        _add(model.__name__, model if inspect.isclass(model) else lambda: model, paths)
        return model

    return add


def register_factory(**paths: Callable[[], Call]) -> Callable[[T], T]:
    """Register what the decorated function builds, under that function's name."""

    def add(make: T) -> T:
        _add(make.__name__, make, paths)
        return make

    return add


def _add(title: str, make: Callable[[], Callable[..., Any]], paths: Paths) -> None:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    if name in REGISTRY:
        raise ValueError(f"two corpus cases are named {name!r}")
    if not 2 <= len(paths) <= 4:
        raise ValueError(f"corpus case {name!r} has {len(paths)} paths, not 2 to 4")
    REGISTRY[name] = Case(name, make, paths)


def call(*args: Any, **kwargs: Any) -> Call:
    """The arguments of one call, as they would be written."""
    return args, kwargs


def randn(*shape: int, seed: int = 0) -> Tensor:
    """A normal tensor that depends on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int = 0) -> Tensor:
    """A tensor of values in [0.1, 1.1) that depends on the seed alone."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def negative(*shape: int, seed: int = 0) -> Tensor:
    """A tensor of values in (-1.1, -0.1] that depends on the seed alone."""
    return -positive(*shape, seed=seed)


def floats(*values: float) -> Tensor:
    """A vector of float32."""
    return torch.tensor(values, dtype=torch.float32)


def ints(*values: int) -> Tensor:
    """A vector of int64."""
    return torch.tensor(values, dtype=torch.int64)
