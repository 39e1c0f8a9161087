"""Random numbers: generators wherever they come from, seeds, and states read and written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python.results import can_exchange_operands
from tests.borders.border import Border, Case, Stateful
from tests.promise import Inputs, bits

border = Border()


def with_generator(seed: int, rows: int = 3) -> Any:
    def inputs() -> Inputs:
        return (torch.ones(rows, 4), torch.Generator().manual_seed(seed)), {}

    return inputs


GENERATORS = [with_generator(*pair) for pair in [(1, 3), (2, 3), (1, 5), (2, 3), (1, 5), (1, 3)]]


@border.replays
def from_the_default_generator(x: Tensor) -> Tensor:
    return x + torch.randn(4) + torch.rand_like(x) * torch.randperm(4)


@border.live("enerator", at="default_generator")
def from_the_default_generator_named(x: Tensor) -> Tensor:
    return x + torch.randn(4, generator=torch.default_generator)


@border.replays
def in_place(x: Tensor) -> Tensor:
    return (
        torch.empty(4).uniform_()
        + x.detach().clone().normal_()
        + torch.empty(3, 1).exponential_()[0]
    )


@border.replays(inputs=GENERATORS)
def from_an_argument(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.randn(x.shape, generator=generator) + torch.randn(4, generator=generator)


@border.replays
class FromAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=self.generator)


@border.live("seed")
class FromAnAttributeSeededInside(FromAnAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(7)
        return x + torch.randn(4, generator=self.generator)


@border.live("seed")
class FromAnAttributeSeededBySize(FromAnAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(x.shape[0])
        return x + torch.randn(4, generator=self.generator)


@border.live("enerator", at="generator=generator")
def made_inside(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return x + torch.randn(4, generator=generator) + torch.randn(4, generator=generator)


@border.live("enerator", at="generator=generator")
def made_inside_and_seeded_from_the_default_one(x: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(100, ())))
    return x + torch.randn(4, generator=generator)


@border.live("generator", at="clone_state")
class Cloned(FromAnAttribute):
    def forward(self, x: Tensor) -> Tensor:
        twin = self.generator.clone_state()
        return x + torch.randn(4, generator=twin) + torch.randn(4, generator=self.generator)


@border.live("generator|state")
class StateOfAGenerator(FromAnAttribute):
    def forward(self, x: Tensor) -> Tensor:
        before = self.generator.get_state()
        y = torch.randn(4, generator=self.generator)
        self.generator.set_state(before)
        return x + y + torch.randn(4, generator=self.generator)


@border.replays
def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(4)


@border.replays
def seeded_twice_with_a_size(x: Tensor) -> Tensor:
    torch.manual_seed(x.shape[0])
    y = torch.rand(4)
    torch.random.manual_seed(x.shape[1] + 1)
    return x + y - torch.rand(4)


@border.replays
def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        y = torch.rand(4)
    return x + y + torch.rand(4)


@border.replays
def state_put_back(x: Tensor) -> Tensor:
    before = torch.get_rng_state()
    y = torch.rand(4)
    torch.set_rng_state(before)
    return x + y - torch.rand(4)


@border.replays
def state_put_back_through_random(x: Tensor) -> Tensor:
    before = torch.random.get_rng_state()
    y = torch.rand(4)
    torch.random.set_rng_state(before)
    return x + y * torch.rand(4)


@border.live("default_generator|seed|state")
def state_of_the_default_generator(x: Tensor) -> Tensor:
    before = torch.default_generator.get_state()
    y = torch.rand(4)
    torch.default_generator.set_state(before)
    return x + y * torch.rand(4)


@border.live("seed")
def default_generator_seeded(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(9)
    return x + torch.rand(4)


@border.live("seed")
def seed_asked_for(x: Tensor) -> Tensor:
    return x * (torch.initial_seed() % 7)


@border.live("seed")
def seed_of_the_default_generator_asked_for(x: Tensor) -> Tensor:
    return x * (torch.default_generator.initial_seed() % 7)


@border.replays(cannot={"stepped": "did not do the same again"})
def seeded_at_random(x: Tensor) -> Tensor:
    torch.seed()
    torch.manual_seed(1)
    return x + torch.rand(4)


@border.replays
class Dropped(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.alpha = nn.Dropout(0.3), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.alpha(self.drop(self.fc(x)))
        return torch.nn.functional.gumbel_softmax(y) + torch.nn.functional.rrelu(y, training=True)


@border.replays
def distributions(x: Tensor) -> Any:
    normal = torch.distributions.Normal(x, x.detach().abs() + 0.1)
    choice = torch.distributions.Categorical(logits=x)
    drawn = choice.sample()
    return normal.rsample(), normal.log_prob(x), drawn, choice.log_prob(drawn), choice.entropy()


@border.replays
def multinomial_and_bernoulli(x: Tensor) -> Any:
    p = x.detach().softmax(-1)
    return torch.multinomial(p, 2), torch.bernoulli(p), x * torch.poisson(p)


class HoldsOnToRandom(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.draw = source

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw.random()


@border.replays(gradients=False)
def a_generator_of_python_in_an_attribute() -> nn.Module:
    return HoldsOnToRandom(random.Random(1))


@border.replays(gradients=False)
def a_generator_of_numpy_in_an_attribute() -> nn.Module:
    return HoldsOnToRandom(np.random.default_rng(1))


@border.live("gauss_next")
class ForgetsTheNumberThatAGeneratorKeeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        self.draw.gauss_next = None  # type: ignore[attr-defined]
        return x * self.draw.gauss(0, 1)


@border.replays
def a_generator_of_python_in_a_closure() -> Any:
    source = random.Random(1)

    def model(x: Tensor) -> Tensor:
        return x * source.random()

    return model


@border.replays
def a_generator_of_numpy_in_a_closure() -> Any:
    source = np.random.default_rng(1)

    def model(x: Tensor) -> Tensor:
        return x * source.random()

    return model


@border.replays
def a_seeded_generator_of_numpy_made_inside(x: Tensor) -> Tensor:
    return x * float(np.random.default_rng(3).random())


def seeds_python(x: Tensor) -> Tensor:
    random.seed(3)
    return x * random.random()


def draws_from_python(x: Tensor) -> Tensor:
    return x * random.choice([1.0, 2.0, 3.0])


def seeds_numpy(x: Tensor) -> Tensor:
    np.random.seed(3)
    return x * float(np.random.rand())


def draws_from_numpy(x: Tensor) -> Tensor:
    return x + torch.tensor(np.random.normal(size=4))


def draws_a_text(x: Tensor) -> Tensor:
    return x * len(np.random.choice(["a", "bc"]))


@pytest.mark.parametrize(
    ("model", "live"),
    [
        (seeds_python, None), (draws_from_python, None), (seeds_numpy, None),
        (draws_from_numpy, None if can_exchange_operands() else "ndarray"), (draws_a_text, "str_"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)  # fmt: skip
def test_generators_of_python_and_numpy(model: Any, live: str | None) -> None:
    bended = bt.BendedModule(model)
    x = torch.ones(4)
    for seed in (0, 1, None, 0, None, 1):
        results = []
        for call in (model, bended):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            results.append((bits(call(x)), random.getstate(), np.random.get_state()[2]))
        assert results[0][0] == results[1][0] or seed is None
        assert results[0][1:] == results[1][1:] or seed is None
    Case(lambda: model, model, live=live).check_served(bended)


# Code that tells numbers from traced ones gets plain ones, but for what it only compares.


def exact(x: Tensor) -> int:
    n = x.shape[0]
    assert type(n) is int
    return n


@border.replays
def compared_beside_code_that_asks_for_types(x: Tensor) -> Tensor:
    y = x * exact(x)
    if random.random() >= 0.0 and np.random.rand() < 2.0 and -1.0 < random.random() <= 1.0:
        return y * 2
    return y


@border.live("draws a number that code needs by value", at="kept = random")
def kept_beside_code_that_asks_for_types(x: Tensor) -> Tensor:
    y = x * exact(x)
    kept = random.random()
    return y * 2 if kept < 2.0 else y
