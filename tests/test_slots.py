"""A slot of a module that becomes another kind of thing, in every order, is noticed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits

ABSENT = object()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([7.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.slot = nn.Parameter(torch.ones(1)), nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return through(self.slot, x * self.weight)


class Asking(Part):
    def forward(self, x: Tensor) -> Tensor:
        slot, x = getattr(self, "slot", ABSENT), x * self.weight
        return x - 1 if slot is ABSENT else through(slot, x)


def through(slot: Any, x: Tensor) -> Tensor:
    if slot is None:
        return x * 10
    if isinstance(slot, (nn.Module, float)):
        return slot(x) if isinstance(slot, nn.Module) else x + slot
    return F.linear(x, torch.ones(1, 1), slot)


class Parts(nn.Module):
    def __init__(self, cls: type[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([cls(), cls(), cls()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x * 2 if x.sum() > 0 else x * 3


def emptied(part: nn.Module) -> nn.Module:
    for table in (part._parameters, part._buffers, part._modules, vars(part)):
        table.pop("slot", None)
    part._non_persistent_buffers_set.discard("slot")
    return part


def assigned(part: nn.Module, value: Any) -> None:
    """Assign to the slot, by the way that is open for what is in it."""
    try:
        part.slot = value
    except TypeError:
        emptied(part).slot = value


KINDS: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda part: assigned(part, nn.Parameter(torch.full((1,), 3.0))),
    "frozen": lambda part: assigned(part, nn.Parameter(torch.full((1,), 4.0), requires_grad=False)),
    "buffer": lambda part: emptied(part).register_buffer("slot", torch.full((1,), 5.0)),
    "None": lambda part: assigned(part, None),
    "no parameter": lambda part: emptied(part).register_parameter("slot", None),
    "no buffer": lambda part: emptied(part).register_buffer("slot", None),
    "no module": lambda part: emptied(part).register_module("slot", None),
    "plain": lambda part: assigned(part, 6.0),
    "tensor": lambda part: vars(emptied(part)).update(slot=torch.full((1,), 7.0)),
    "tensor for a parameter": lambda part: part._parameters.update(slot=torch.full((1,), 8.0)),
    "absent": emptied,
    "module": lambda part: setattr(emptied(part), "slot", Scale()),
}  # fmt: skip


def outcome(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    try:
        return bits(function(x))
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cls", [Part, Asking])
def test_any_slots_in_any_order(seed: int, cls: type[Part]) -> None:
    steps = random.Random(seed)
    model = Parts(cls)
    bended = bt.BendedModule(model)
    for number in range(16):
        for sign in (1.0, -1.0) if number % 2 else (1.0,):
            x = torch.tensor([sign])
            assert outcome(bended, x) == outcome(model, x), number
        KINDS[steps.choice([*KINDS])](steps.choice([*model.parts]))
    assert bended.stats.live == 0


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("kind", ["None", "tensor for a parameter"])
def test_one_after_the_other(kind: str, order: tuple[int, ...]) -> None:
    model, x = Parts(Part), torch.ones(1)
    bended = bt.BendedModule(model)
    for _ in range(2):
        assert outcome(bended, x) == outcome(model, x)
    for number in order:
        KINDS[kind](model.parts[number])
        assert outcome(bended, x) == outcome(model, x)
    for number in order:
        KINDS["parameter"](model.parts[number])
        assert outcome(bended, x) == outcome(model, x)
