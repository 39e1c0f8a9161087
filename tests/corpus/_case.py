"""What a corpus case is, and the helpers its files share."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import bendtrace as bt
from tests.registry.program import Program, add, calling

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

# Programs whose second visit of a path is not a replay, each with the reason.
NOT_REPLAYED = {
    "own_generator": "makes a generator in forward, which has no value to record: runs live",
    "rejection_sampling": "the number of draws is random: each call is a path of its own",
    "call_counter": "counts its calls in an attribute: each call is checked for another value",
    "alternating_layers": "takes turns by a counter in an attribute",
    "mask_cached_by_length": "caches what it computed: the next call finds another state",
    "hidden_state_attribute": "the first call finds no hidden state yet: a path of its own",
    "history_list": "the list it appends to is longer at each call",
    "ring_buffer": "a buffer that moves on at each call decides the path",
    "step_buffer_schedule": "a buffer counts the calls and decides the path",
}
# What modes refuse, with a pattern of the message.
CANNOT = {
    "argument_dict_is_filled": {"audited": "such calls cannot be audited"},
    "dataclass_argument_and_output": {"stepped": "memory that existed before the run"},
    "own_generator": {"stepped": "random generator"},
}
# The states of the first runs of these are not read, because they ask so much or make modules: the
# first path is recorded once more when another one is known. Where eager fills a cache between two
# runs, the second does not join the first.
LONG = {
    "transformer_repeated_until_stable", "connected_components", "modules_of_forward",
    "cached_python_helper",
}  # fmt: skip


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
    first, second, *rest = paths.values()
    order = [first, first, second, first, second, *rest, *rest]
    prepared = [lambda model, path=path: path() for path in order]
    served = functools.partial(_check_served, name, len(rest))
    add(
        Program(
            f"corpus.{name}",
            calling(make, prepared),
            frozenset({"corpus"}),
            CANNOT.get(name, {}),
            served=served,
        )
    )


def _check_served(name: str, rest: int, bended: bt.BendedModule) -> None:
    if name in NOT_REPLAYED:
        assert bended.stats.replays < 3 + rest, "is replayed after all: take it off the list"
        return
    # The calls 1, 3 and 4 visit a path for the second time, and the last of the rest.
    again = int(name in LONG)
    tree = bended._dispatcher._trees.plain
    if tree.varying or tree._steady:  # numbers at one place differ: it is tried to keep them
        again += 2
    assert bended.stats.replays >= 3 + rest - again
    assert bended.stats.traces <= 2 + rest + again
    assert bended.stats.live == 0


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
