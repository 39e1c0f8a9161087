"""Modules and functions that change the lists, dicts and objects that they are given."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.registry.calls import BOTH, Call, args, case

LISTS: list[Call] = [
    args(lambda k=k: ([torch.full((2,), float(k), requires_grad=True) * 2], torch.ones(2)))
    for k in (1, 2, -1, 3, -2)
]


class Appends(nn.Module):
    """Adds to a list, and looks at it."""

    def forward(self, x: Tensor, seen: Any) -> Tensor:
        seen.append(x * 3)
        return x * 2 if seen[0].sum() > 0 else x * 4


class Weighted(nn.Module):
    """A weight, so that gradients are needed, and a part that is given more than tensors."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.5]))
        self.part = Appends() if part is None else part


@case(*BOTH)
class AListThatAPartAddsTo(Weighted):
    def forward(self, x: Tensor) -> Any:
        seen = [x * self.weight]
        y = self.part(seen[0], seen)
        return y + seen[-1] * len(seen), seen[0] is seen[1]


@case(*LISTS)
class AnArgumentThatAPartAddsTo(Weighted):
    def forward(self, held: Any, x: Tensor) -> Any:
        return self.part(x * self.weight, held) + held[0] + held[-1]


@case(*LISTS)
def an_argument_that_a_function_adds_to(held: Any, x: Tensor) -> Any:
    held.append(held[0] * x)
    return held[-1] * 2 if held[0].sum() > 0 else held[-1] * 3


@case(*LISTS)
def an_argument_that_a_function_adds_to_before_it_raises(held: Any, x: Tensor) -> Any:
    held.insert(0, held[0] * x)
    if held[1].sum() < 0:
        raise ValueError("negative")
    return held[0] * 2


@case(*BOTH)
class AListThatIsGivenTwice(Weighted):
    class Part(nn.Module):
        def forward(self, one: Any, other: Any, both: Any) -> Tensor:
            one.append(other[0] * 2)
            both["one"].append(len(other))
            return one[0] + other[1]

    def __init__(self) -> None:
        super().__init__(self.Part())

    def forward(self, x: Tensor) -> Any:
        seen = [x * self.weight]
        y = self.part(seen, seen, {"one": seen, "two": (seen, x)})
        return (y + seen[1]) * seen[2]


@case(*BOTH)
class ADictThatAPartFills(Weighted):
    class Part(nn.Module):
        def forward(self, held: Any) -> Tensor:
            held["y"] = held["x"] * 3
            held["x"] = held.pop("z", held["x"]) + 1
            return held["y"] * 2

    def __init__(self) -> None:
        super().__init__(self.Part())

    def forward(self, x: Tensor) -> Any:
        held: dict[str, Any] = collections.OrderedDict(x=x * self.weight)
        y = self.part(held)
        return y + held["y"] * len(held) + held["x"]


@dataclass
class Held:
    x: Tensor
    y: Any = None


@case(*BOTH)
class AnObjectThatAPartFills(Weighted):
    class Part(nn.Module):
        def forward(self, held: Held) -> Tensor:
            held.y = [held.x * 3]
            return held.x * 2

    def __init__(self) -> None:
        super().__init__(self.Part())

    def forward(self, x: Tensor) -> Any:
        held = Held(x * self.weight)
        y = self.part(held)
        return y + held.y[0] + held.x


@case(*BOTH)
class AListThatAPartReturns(Weighted):
    class Part(nn.Module):
        def forward(self, held: Any) -> Any:
            return held

    def __init__(self) -> None:
        super().__init__(self.Part())

    def forward(self, x: Tensor) -> Any:
        held = [x * self.weight]
        given = self.part(held)
        held.append(x)
        return given[0] * len(given), given is held, given[0] is held[0]


@bt.opaque
def add_to(x: Tensor, held: Any) -> Tensor:
    held.append(held[0] * 3)
    return x * 2


@case(*BOTH)
class AListThatOneOpAddsTo(Weighted):
    def forward(self, x: Tensor) -> Any:
        held = [x * self.weight]
        y = add_to(held[0], held)
        return y + held[-1] * len(held)
