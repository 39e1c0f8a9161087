"""Modules that are not what they seem: parametrised, pruned, lazy, swapped, made anew."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import bendtrace as bt
from tests.borders.border import Border, Stateful
from tests.promise import bits, randn_inputs

border = Border()


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class Calls(nn.Module):
    """A parametrization that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.count += 1
        return w * self.count


class Layer(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu() + self.fc.weight.sum()


def layer(change: Any) -> Layer:
    made = Layer()
    change(made.fc)
    return made


@border.replays
def parametrised() -> nn.Module:
    return layer(lambda fc: parametrize.register_parametrization(fc, "weight", Symmetric()))


@border.replays
def parametrised_by_one_that_counts() -> nn.Module:
    return layer(lambda fc: parametrize.register_parametrization(fc, "weight", Calls()))


@border.replays
def parametrised_twice() -> nn.Module:
    def change(fc: nn.Module) -> None:
        parametrize.register_parametrization(fc, "weight", Symmetric())
        parametrize.register_parametrization(fc, "weight", Calls())

    return layer(change)


@border.live("a torch setting")
class Cached(Stateful):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.fc, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.fc(x) + self.fc.weight.sum()


@border.replays
def with_weight_norm() -> nn.Module:
    return layer(parametrizations.weight_norm)


@border.replays
def with_the_older_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer(nn.utils.weight_norm)


@border.replays
def with_spectral_norm() -> nn.Module:
    return layer(parametrizations.spectral_norm)


@border.replays
def with_the_older_spectral_norm() -> nn.Module:
    return layer(nn.utils.spectral_norm)


@border.replays
def orthogonal() -> nn.Module:
    return layer(parametrizations.orthogonal)


@border.replays
def pruned() -> nn.Module:
    return layer(lambda fc: prune.l1_unstructured(fc, "weight", 0.5))


@border.replays
def pruned_for_good() -> nn.Module:
    def change(fc: nn.Module) -> None:
        prune.l1_unstructured(fc, "weight", 0.5)
        prune.remove(fc, "weight")

    return layer(change)


@border.replays
class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.layer, self.other = self.other, self.layer
        return y


@border.live("self.fc", inputs=[randn_inputs(3, 4)] * 8)
class Replacing(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.fc = nn.Identity()
        return y


@border.replays
class Growing(nn.Module):
    """Stops growing after three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        if len(self.layers) < 3:
            self.layers.append(self.layers[0])
        for one in self.layers:
            x = one(x).tanh()
        return x


@border.replays
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.ones(4), torch.ones(4) * 2])
        self.dict = nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(4) * 3})

    def forward(self, x: Tensor) -> Tensor:
        for w in self.list:
            x = x * w
        for key, w in self.dict.items():
            x = x + w * len(key)
        return x * self.list[-1] + self.dict["a"] + len(self.list)


@border.replays
class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dict = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Tanh()})
        self.both = nn.Sequential(self.dict["first"], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for name, one in self.dict.items():
            x = one(x) * len(name)
        return self.both[:1](x) + self.both(x)


@border.replays
class Named(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        fc = self.get_submodule("fc")
        total = sum(p.sum() for _, p in self.named_parameters())
        return fc(x) * getattr(self, "f" + "c").weight.sum() + total + len(list(self.children()))


@border.replays
class Batched(nn.Module):
    """Running statistics, updated once in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm.running_mean


@border.replays
class ForwardReplaced(nn.Module):
    """A forward put on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        inner = self.fc.forward
        self.fc.forward = lambda x: inner(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@border.replays
class CalledDirectly(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc.forward(x) + nn.Linear.forward(self.fc, x)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(3)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_that_each_call_makes_runs_live() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.LazyLinear(2)(x)

    bended, x = bt.BendedModule(model), torch.ones(3)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = model(x)
        torch.manual_seed(seed)
        assert torch.equal(bended(x), wanted)
    assert bended.stats.live == 3


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_get_their_shape_in_the_first_call() -> None:
    torch.manual_seed(0)
    eager = Lazy()
    model = Lazy()
    bended = bt.BendedModule(model)
    for seed in (0, 1, 0, 1):
        outputs = []
        for one in (eager, bended):
            torch.manual_seed(seed)
            outputs.append(bits(one(torch.randn(3, 5))))
        assert outputs[0] == outputs[1]
    assert bended.stats.replays >= 2
    assert bits(dict(model.state_dict())) == bits(dict(eager.state_dict()))


def _twins(make: Any) -> tuple[Any, Any]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], made[1]


class Doubling(nn.Linear):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__(4, 4)
        self.weight, self.bias = other.weight, other.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


CHANGES: dict[str, Any] = {
    "parametrised": lambda m: parametrize.register_parametrization(m.fc, "weight", Symmetric()),
    "weight norm": lambda m: parametrizations.weight_norm(m.fc),
    "pruned": lambda m: prune.l1_unstructured(m.fc, "weight", 0.5),
    "a subclass of the layer": lambda m: setattr(m, "fc", Doubling(m.fc)),
    "another parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.ones(4, 4))),
    "tied": lambda m: setattr(m.fc, "bias", nn.Parameter(m.fc.weight[0].detach())),
    "no bias": lambda m: setattr(m.fc, "bias", None),
    "a buffer for a parameter": lambda m: (
        delattr(m.fc, "bias"),
        m.fc.register_buffer("bias", torch.ones(4)),
    ),
    "double": lambda m: m.double().float(),
    "data": lambda m: setattr(m.fc.weight, "data", torch.ones(4, 4)),
    "frozen": lambda m: m.requires_grad_(False),
    "forward": lambda m: setattr(m.fc, "forward", lambda x: x * 7),
    "class": lambda m: setattr(m, "__class__", type("Other", (Layer,), {"forward": _other})),
}


def _other(self: Layer, x: Tensor) -> Tensor:
    return self.fc(x) * 11


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_their_user_changes_between_calls(change: str) -> None:
    eager, model = _twins(Layer)
    bended = bt.BendedModule(model)
    for step in range(6):
        if step == 3:
            for one in (eager, model):
                CHANGES[change](one)
        (x,), _ = randn_inputs(3, 4, seed=step)()
        wanted, given = eager(x), bended(x)
        assert bits(given) == bits(wanted), step
        if wanted.requires_grad:
            for out in (wanted, given):
                out.sum().backward()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert bits(mine.grad) == bits(other.grad), step
    assert bended.stats.replays >= 2
    assert bended.stats.replays >= 4 or bended.why_live
