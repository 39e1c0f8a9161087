"""Faults that a review of the second version found, each as its smallest case."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as kernel

import bendtrace as bt
from tests.promise import Inputs, assert_promise


def given(*makes: Callable[[], Any]) -> list[Callable[[], Inputs]]:
    """The calls with what each of `makes` returns as the only argument."""
    return [lambda make=make: ((make(),), {}) for make in makes]


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
    assert bended.stats.live == 3
    (reason,) = bended.why_live
    assert re.search(rf"at {re.escape(__file__)}:\d+ the run has changed a torch setting", reason)
