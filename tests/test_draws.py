"""Random numbers of Python and numpy are drawn again by each replay, from the same generator."""

from __future__ import annotations

import random
import re
import types
from collections.abc import Callable
from random import random as chance
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.watch.draws import generator_state
from tests.promise import bits

CALLS = 30
SHARED = np.random.default_rng(5)


class Layers(nn.Module):
    """Layers that are left out by chance, and generators of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.same, self.inside = self.numpy, {"rng": np.random.default_rng(4)}
        self.draw = self.numpy.uniform

    @property
    def generators(self) -> list[Any]:
        return [self.python, self.numpy, self.legacy, self.inside["rng"], SHARED]

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


def layers(forward: Callable[[Any, Tensor], Any]) -> Callable[[], Layers]:
    return type(forward.__name__, (Layers,), {"forward": forward})


# With the greatest number of recordings.
PROGRAMS: dict[str, tuple[int, Callable[[], Any]]] = {}


def program(paths: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        is_method = forward.__code__.co_varnames[0] == "self"
        PROGRAMS[forward.__name__] = paths, layers(forward) if is_method else lambda: forward
        return forward

    return add


@program(8)
def layers_are_dropped(self: Layers, x: Tensor) -> Tensor:
    for layer in self.layers:
        if random.random() < 0.5:
            continue
        x = x + layer(x)
    return x


@program(8)
def layers_are_dropped_by_numpy(self: Layers, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x if np.random.rand() < 0.5 else x + layer(x) / (1 - np.random.random_sample())
    return x


@program(8)
def an_own_generator(self: Layers, x: Tensor) -> Tensor:
    for layer in self.layers:
        if self.numpy.random() < 0.5:
            x = x + layer(x) * self.same.normal(1.0, 0.1)
    return x * self.inside["rng"].uniform(0.5, 1.5)


@program(2)
def an_own_generator_of_python(self: Layers, x: Tensor) -> Tensor:
    y = x * self.python.gauss(0, 1) + self.python.betavariate(2, 2)
    return y if self.python.random() < 0.7 else -y


@program(1)
def a_legacy_generator(self: Layers, x: Tensor) -> Tensor:
    return x * self.legacy.normal() + self.legacy.randint(3)


@program(1)
def a_method_that_is_held(self: Layers, x: Tensor) -> Tensor:
    return x * self.draw(1, 2)


@program(3)
def a_layer_is_chosen(self: Layers, x: Tensor) -> Any:
    return random.choice(self.layers)(x)


@program(3)
def whole_numbers_of_numpy(self: Layers, x: Tensor) -> Tensor:
    return x * int(self.numpy.integers(3))


@program(3)
def a_generator_of_the_module(x: Tensor) -> Tensor:
    return x * SHARED.choice(3)


@program(3)
def a_number_is_chosen(x: Tensor) -> Tensor:
    return x * random.choice([1.0, 2.0, 3.0])


@program(3)
def by_weights(x: Tensor) -> Tensor:
    return x * random.choices([1.0, 2.0, 3.0], weights=[1, 2, 3])[0]


@program(6)
def shuffled(x: Tensor) -> Tensor:
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order]


@program(12)
def sampled(x: Tensor) -> Tensor:
    return x[:, random.sample(range(4), 2)]


@program(1)
def cropped(x: Tensor) -> Tensor:
    top = random.randint(0, 1)
    return x[top : top + 2].clone()


@program(1)
def mixed_up(x: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return x * share + (1 - share) * x.flip(0)


@program(1)
def functions_that_are_held(x: Tensor) -> Tensor:
    return x * chance() + uniform(1, len(x)) * rand()


@program(1)
def several_kinds(x: Tensor) -> Tensor:
    y = x * random.uniform(1, 2) + random.randrange(0, 10, 3) + random.getrandbits(2)
    return y + torch.rand(4) + random.triangular() + np.random.exponential(2.0)


@program(1)
def seeded(x: Tensor) -> Tensor:
    random.seed(len(x))
    np.random.seed(4)
    return x * random.random() + np.random.rand()


@program(2)
def a_generator_of_the_call(x: Tensor) -> Tensor:
    rng = random.Random(4)
    return x * rng.random() + np.random.default_rng(4).random()


@program(1)
def drawn_and_dropped(x: Tensor) -> Tensor:
    random.random()
    np.random.normal()
    return x * 2


@program(1)
def arrays_in_one_op(x: Tensor) -> Tensor:
    return x + noise(x)


@bt.opaque
def noise(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    SHARED.bit_generator.state = np.random.default_rng(number).bit_generator.state


def states(model: Any) -> Any:
    own = model.generators if isinstance(model, Layers) else [SHARED]
    return [random.getstate(), generator_state(np.random.mtrand._rand), *map(generator_state, own)]


def outcomes(model: Any, call: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """Return what calls give, with the states that they leave."""
    seed(1)
    found = []
    for x in inputs:
        try:
            given = bits(call(*x) if isinstance(x, tuple) else call(x))
        except ValueError as error:
            given = str(error)
        found.append((given, states(model), torch.get_rng_state().tolist()))
    return found


def compared(make: Callable[[], Any], prepare: Any = None, inputs: Any = None) -> bt.BendedModule:
    inputs = inputs or [torch.randn(3, 4) for _ in range(CALLS)]
    model, other = make(), make()
    bended = bt.BendedModule(other)
    if prepare is not None:
        prepare(bended)
    expected = outcomes(model, model, inputs)
    for number, (found, wanted) in enumerate(
        zip(outcomes(other, bended, inputs), expected, strict=True)
    ):
        assert found == wanted, number
    return bended


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_call_draws_what_the_model_draws(name: str) -> None:
    paths, make = PROGRAMS[name]
    bended = compared(make)
    assert bended.stats.live == 0, bended.why_live
    # Numbers that Python asks for are recorded by value until they are seen to differ.
    assert bended.stats.traces <= paths + 2, bended.stats


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_with_something_inserted(name: str) -> None:
    paths, make = PROGRAMS[name]

    def prepare(bended: bt.BendedModule) -> None:
        bended.interject(
            lambda node: node.path in ("mul", "add", "getitem", "layers_0"),
            lambda value: value * 1,
            allow_none=True,
        )

    bended = compared(make, prepare)
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.traces <= paths + 4, bended.stats


def test_what_is_inserted_may_draw() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    def by_hand(x: Tensor) -> Tensor:
        return torch.relu(x) * random.random() * 2

    bended = bt.BendedModule(model)
    bended.interject("relu", lambda value: value * random.random())
    inputs = [torch.randn(3, 4) for _ in range(5)]
    assert outcomes(model, bended, inputs) == outcomes(model, by_hand, inputs)
    assert bended.stats.live == 0, bended.why_live


def test_generators_as_arguments() -> None:
    def model(x: Tensor, rng: Any) -> Tensor:
        return x * rng.random() if rng.uniform(0, 1) < 0.5 else x

    for make in (random.Random, np.random.default_rng, np.random.RandomState):
        rngs = make(3), make(3)
        bended = bt.BendedModule(model)
        for _ in range(10):
            x = torch.randn(3, 4)
            assert bits(bended(x, rngs[1])) == bits(model(x, rngs[0]))
            assert generator_state(rngs[0]) == generator_state(rngs[1])
        assert bended.stats.live == 0, bended.why_live
        assert bended.stats.traces <= 2


def test_another_generator_is_drawn_from_in_its_place() -> None:
    make = PROGRAMS["an_own_generator"][1]
    model, other = make(), make()
    bended = bt.BendedModule(other)
    for number in range(20):
        if number % 5 == 4:
            for one in (model, other):
                one.numpy = np.random.default_rng(number)
        x = torch.randn(3, 4)
        assert bits(bended(x)) == bits(model(x))
    assert type(other.numpy) is np.random.Generator
    assert other.same is not other.numpy
    assert type(other.inside["rng"]) is np.random.Generator


def test_a_function_that_is_replaced_is_the_one_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = PROGRAMS["layers_are_dropped"][1]
    bended = compared(make)
    numbers = iter([0.1, 0.9, 0.2] * 2)
    monkeypatch.setattr(random, "random", lambda: next(numbers))
    x = torch.randn(3, 4)
    assert bits(bended(x)) == bits(make()(x))
    numbers = iter([0.3, 0.3, 0.7] * 2)
    assert bits(bt.BendedModule(make())(x)) == bits(make()(x))


def test_functions_that_are_held_are_not_those_that_stand_in_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "random", lambda: 100.0)
    monkeypatch.setattr(np.random, "rand", lambda: 100.0)
    bended = compared(PROGRAMS["functions_that_are_held"][1])
    assert bended.stats.live == 0, bended.why_live


def test_a_function_of_the_user_s_that_is_bound_to_a_generator() -> None:
    def normal(self: Any) -> float:
        return 5.0

    bound = types.MethodType(normal, np.random.default_rng(3))
    compared(lambda: lambda x: x * bound())


def test_an_error_leaves_the_generators_as_in_eager() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * random.random()
        if random.random() < 0.3:
            raise ValueError(str(np.random.randint(10)))
        return y * np.random.rand()

    compared(lambda: model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reads_the_state", "bit_generator .*reads or sets the state"),
        ("copied", "__reduce__ at|reads or sets"),
        ("drawn_in_c", "moves self.numpy past the tracer"),
    ],
)
def test_what_runs_live(name: str, reason: str) -> None:
    class Own(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, name)(x)  # type: ignore[no-any-return]

        def reads_the_state(self, x: Tensor) -> Tensor:
            y = x * self.numpy.random()
            return y * (self.numpy.bit_generator.state["state"]["state"] % 7)

        def copied(self, x: Tensor) -> Tensor:
            import copy

            return x * copy.deepcopy(self.numpy).random() + self.numpy.random()

        def drawn_in_c(self, x: Tensor) -> Tensor:
            np.random.Generator.shuffle(self.numpy, [1, 2, 3])
            return x * 2

    bended = compared(Own, inputs=[torch.randn(3, 4) for _ in range(6)])
    assert bended.stats.replays == 0
    assert any(re.search(reason, one) for one in bended.why_live), bended.why_live
