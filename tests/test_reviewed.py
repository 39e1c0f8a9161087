"""Faults that a review of the second version found, each as its smallest case."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as kernel

import bendtrace as bt
from tests.promise import Inputs, assert_promise


def given(*makes: Callable[[], Any]) -> list[Callable[[], Inputs]]:
    """The calls with what each of `makes` returns as the only argument."""
    return [lambda make=make: ((make(),), {}) for make in makes]


def test_submodules_that_change_places() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    model = Chain()
    bended, x = bt.BendedModule(model), torch.ones(3)
    for _ in range(2):
        assert torch.equal(bended(x), model(x))
        model.parts["a"] = model.parts.pop("a")
    assert torch.equal(bended(x), model(x))
    assert bended.stats.traces == 2


def test_the_order_of_a_set_and_the_sign_of_zero() -> None:
    def walks(x: Tensor, numbers: set[Any]) -> Tensor:
        for number in numbers:
            x = torch.copysign(x * 2 + number, torch.tensor(float(number)))
        return x

    sets = [{1, 9}, {9, 1}, {0.0}, {-0.0}]
    calls = [lambda s=s: ((torch.ones(2), set(s)), {}) for s in (*sets, *sets)]
    assert_promise(lambda: walks, calls)


def test_an_attribute_is_no_global_of_the_same_name() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x)

    assert assert_promise(Steps, given(*[lambda: torch.ones(3)] * 3)).stats.replays == 2


def step() -> None:
    """Would make a model that calls it run live."""
    torch.default_generator.get_state()


def test_results_that_are_dicts() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            def loss(parameters: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(self.fc, parameters, (x,)).square().mean()

            found = torch.func.grad(loss)(dict(self.fc.named_parameters()))
            return found["weight"] * 2 + found["bias"]

    bended = assert_promise(Inner, given(*[lambda: torch.ones(2, 3)] * 3))
    assert bended.stats.replays == 2


def test_a_positional_only_parameter_and_a_keyword_of_the_same_name() -> None:
    def both(x: Tensor, /, **others: Tensor) -> Tensor:
        return x * 2 + others["x"]

    def call() -> Inputs:
        return (torch.ones(2),), {"x": torch.full((2,), 5.0)}

    assert assert_promise(lambda: both, [call] * 3).stats.replays == 2


class _Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2

    def runs(self, x: Tensor) -> Tensor:
        return self(x)

    def eval(self) -> _Doubles:
        self.evaluated = True
        return super().eval()


def test_a_model_with_a_call_and_an_eval_of_its_own() -> None:
    model = _Doubles()
    bended = bt.BendedModule(model)
    for _ in range(3):
        assert bended(torch.ones(1)).item() == bended.runs(torch.ones(1)).item() == 4
    assert bended.eval() is bended
    assert model.evaluated
    assert not bended.training


def test_a_wrapped_container_is_one() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert len(bended) == 2
    assert [type(layer) for layer in bended] == [nn.ReLU, nn.Tanh]
    assert isinstance(bended[1], nn.Tanh)
    assert bended[0] in bended
    assert bt.BendedModule(lambda x: x)


def test_settings_that_are_switched_for_one_op() -> None:
    def switches(x: Tensor) -> Tensor:
        with kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    bended = assert_promise(lambda: switches, given(*[lambda: torch.ones(1, 2, 3, 4)] * 3))
    assert bended.stats.live == 0


@pytest.mark.parametrize(
    "make", [lambda x: random.Random(len(x)), lambda x: re.match("a", "a")], ids=["random", "match"]
)
def test_objects_with_a_state_in_c_are_not_rebuilt(make: Callable[[Tensor], Any]) -> None:
    bended = bt.BendedModule(make)
    kinds = {type(bended(torch.ones(2))) for _ in range(3)}
    assert kinds == {type(make(torch.ones(2)))}
    assert bended.stats.live == 3


def test_a_side_is_not_taken_over_from_a_program_with_other_metadata() -> None:
    def squeezes(x: Tensor) -> Tensor:
        rank = x.ndim
        x.squeeze_()
        return x * rank if x.sum() > 0 else x * (rank + 10)

    order = (lambda: torch.ones(1, 3), lambda: -torch.ones(3), lambda: -torch.ones(1, 3))
    assert_promise(lambda: squeezes, given(*order, *order))


def test_a_list_of_complex_numbers() -> None:
    calls = given(*[lambda: torch.tensor([1j, 2])] * 2, lambda: torch.tensor([2j, 2]))
    assert assert_promise(lambda: lambda x: x.tolist(), calls).stats.replays == 1


def test_tensors_of_a_cache_that_is_cleared() -> None:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.full((n,), factor[0])

    factor, x = [1.0], torch.ones(3)
    bended = bt.BendedModule(lambda x: x * table(x.shape[0]))
    for factor[0] in (1.0, 7.0):
        table.cache_clear()
        assert [bended(x)[0].item() for _ in range(4)] == factor * 4
    assert bended.stats.replays >= 4


def test_a_value_that_stops_changing_is_recorded_again() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest = 0

        def forward(self, x: Tensor, steps: Tensor) -> Tensor:
            n = (steps * 1).shape[0]
            if n > self.longest:
                self.longest = n
            return x * self.longest

    def call(n: int) -> Callable[[], Inputs]:
        return lambda: ((torch.ones(2), torch.ones(n)), {})

    bended = assert_promise(Grows, [call(n) for n in (*range(1, 9), *[4] * 30)])
    assert bended.stats.replays >= 8
