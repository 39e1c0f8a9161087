"""Models that go on from call to call: each has another kind of state."""

from __future__ import annotations

import array
import collections
import colorsys
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["KINDS", "UNRESTORABLE", "Base", "outputs"]

library: Any = colorsys
KINDS: dict[str, Callable[[], nn.Module]] = {}
# What no run can restore, and the words by which it is refused.
UNRESTORABLE = {
    "iterator": "range_iterator", "count": "count", "python_generator": "generator",
    "iterator_in_closure": "list_iterator", "stream": "StringIO",
}  # fmt: skip

X = torch.ones(1, 2)


def outputs(model: Callable[..., Any], calls: int = 3) -> list[Tensor]:
    """Return what some calls give, with the same random numbers each time that it is called."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    with torch.no_grad():
        return [model(X) for _ in range(calls)]


def kind(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    KINDS[make.__name__] = make
    return make


class Base(nn.Module):
    """Adds what its kind of state gives to the result of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(2, 2)
        self.begin()

    def begin(self) -> None:
        """Make the state."""

    def advance(self) -> Any:
        """Return what the state gives, and change it."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) + self.advance()).add(0)


def made(begin: Callable[[Any], Any] | None, advance: Callable[[Any], Any]) -> nn.Module:
    """Return a model whose state is `self.state`, as `begin` makes it."""

    class Model(Base):
        def begin(self) -> None:
            if begin is not None:
                self.state = begin(self)

        def advance(self) -> Any:
            return advance(self)

    return Model()


@kind
def attribute() -> nn.Module:
    def advance(self: Any) -> int:
        self.state += 1
        return int(self.state)

    return made(lambda self: 0, advance)


@kind
def class_attribute() -> nn.Module:
    class Model(Base):
        calls = 0

        def advance(self) -> int:
            type(self).calls += 1
            return type(self).calls

    return Model()


@kind
def list_in_closure() -> nn.Module:
    calls = [0]

    def advance(self: Any) -> int:
        calls[0] += 1
        return calls[0]

    return made(None, advance)


@kind
def variable_of_closure() -> nn.Module:
    calls = 0

    def advance(self: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return made(None, advance)


@kind
def iterator() -> nn.Module:
    return made(lambda self: iter(range(1, 99)), lambda self: next(self.state))


@kind
def count() -> nn.Module:
    return made(lambda self: itertools.count(1), lambda self: next(self.state))


@kind
def python_generator() -> nn.Module:
    def numbers() -> Iterator[int]:
        yield from range(1, 99)

    return made(lambda self: numbers(), lambda self: next(self.state))


@kind
def iterator_in_closure() -> nn.Module:
    numbers = iter([1, 2, 3, 4, 5, 6, 7, 8, 9])
    return made(None, lambda self: next(numbers))


@kind
def deque() -> nn.Module:
    def advance(self: Any) -> int:
        self.state.append(self.state[-1] + 1)
        return int(self.state[0])

    return made(lambda self: collections.deque([1], maxlen=3), advance)


@kind
def slots() -> nn.Module:
    class Slotted:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

    def advance(self: Any) -> int:
        self.state.calls += 1
        return int(self.state.calls)

    return made(lambda self: Slotted(), advance)


@kind
def numpy_generator() -> nn.Module:
    return made(lambda self: np.random.default_rng(0), lambda self: float(self.state.random()))


@kind
def numpy_global() -> nn.Module:
    return made(None, lambda self: float(np.random.rand()))


@kind
def python_random() -> nn.Module:
    return made(lambda self: random.Random(0), lambda self: self.state.random())


@kind
def torch_generator() -> nn.Module:
    return made(
        lambda self: torch.Generator().manual_seed(0),
        lambda self: torch.rand(1, generator=self.state),
    )


@kind
def torch_global() -> nn.Module:
    return made(None, lambda self: torch.rand(1))


@kind
def attribute_of_a_library() -> nn.Module:
    vars(library).pop("calls", None)

    def advance(self: Any) -> int:
        library.calls = getattr(library, "calls", 0) + 1
        return int(library.calls)

    return made(None, advance)


@kind
def stream() -> nn.Module:
    text = "\n".join(map(str, range(1, 99)))
    return made(lambda self: io.StringIO(text), lambda self: float(self.state.readline()))


@kind
def growing_dict() -> nn.Module:
    def advance(self: Any) -> int:
        self.state[len(self.state)] = 1
        return len(self.state)

    return made(lambda self: {}, advance)


@kind
def growing_set() -> nn.Module:
    def advance(self: Any) -> int:
        self.state.add(len(self.state))
        return len(self.state)

    return made(lambda self: set(), advance)


@kind
def numbers_in_an_array() -> nn.Module:
    def advance(self: Any) -> int:
        self.state[0] += 1
        return int(self.state[0])

    return made(lambda self: array.array("i", [0]), advance)


@kind
def numpy_array() -> nn.Module:
    def advance(self: Any) -> float:
        self.state[0] += 1
        return float(self.state[0])

    return made(lambda self: np.zeros(1), advance)


@kind
def buffer() -> nn.Module:
    def advance(self: Any) -> Tensor:
        self.calls += 1
        return self.calls.clone()

    return made(lambda self: self.register_buffer("calls", torch.zeros(1)), advance)


@kind
def data_of_a_parameter() -> nn.Module:
    def advance(self: Any) -> int:
        self.lin.bias.data += 1
        return 0

    return made(None, advance)


@kind
def growing_modules() -> nn.Module:
    def advance(self: Any) -> int:
        self.state.append(nn.Identity())
        return len(self.state)

    return made(lambda self: nn.ModuleList(), advance)


@kind
def hook_of_the_user() -> nn.Module:
    model, calls = Base(), [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * calls[0]

    model.lin.register_forward_hook(hook)
    return model


@kind
def optimizer() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Linear(2, 2)
    made_of_it = torch.optim.Adam(net.parameters(), 0.1)

    def advance(self: Any) -> Tensor:
        with torch.enable_grad():
            made_of_it.zero_grad()
            net(X).pow(2).sum().backward()
            made_of_it.step()
        return net(X).detach()

    return made(None, advance)


@kind
def default_of_a_parameter() -> nn.Module:
    class Model(Base):
        def advance(self, calls: list[int] = [0]) -> int:  # noqa: B006
            calls[0] += 1
            return calls[0]

    return Model()


@kind
def environment_variable() -> nn.Module:
    os.environ["BENDTRACE_TESTS_CALLS"] = "0"

    def advance(self: Any) -> int:
        os.environ["BENDTRACE_TESTS_CALLS"] = str(int(os.environ["BENDTRACE_TESTS_CALLS"]) + 1)
        return int(os.environ["BENDTRACE_TESTS_CALLS"])

    return made(None, advance)
