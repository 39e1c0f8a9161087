"""The flat list of calls that replays are measured against."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bendtrace.record.recorded_call import Signature, record
from tests.promise import bits
from tools.benchmarks.core import Gated, LoopRNN
from tools.benchmarks.flat import flat_of


def _flat(model: Any, *args: Any, **kwargs: Any) -> Any:
    return flat_of(record(model, args, kwargs, Signature(model)))


@pytest.mark.parametrize(
    ("model", "shape"), [(LoopRNN(), (5, 2, 64)), (Gated(), (3, 64)), (nn.Sequential(), (2,))]
)
def test_it_gives_what_the_model_gives(model, shape):
    x = torch.randn(*shape)
    with torch.no_grad():
        flat = _flat(model, x)
        assert bits(flat(x)) == bits(model(x))


def test_it_takes_arguments_by_name_and_in_containers():
    def model(pair: tuple[Tensor, Tensor], scale: float, named: dict[str, Tensor]) -> Any:
        return {"sum": pair[0] + pair[1] * scale, "own": [named["a"].relu(), scale]}

    pair, named = (torch.randn(2), torch.randn(2)), {"a": torch.randn(2)}
    flat = _flat(model, pair, scale=2.0, named=named)
    assert bits(flat(scale=2.0, named=named, pair=pair)) == bits(model(pair, 2.0, named))


def test_sizes_are_computed_as_the_model_does():
    def model(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * x.shape[1], -1)[: x.size(0)]

    flat = _flat(model, torch.randn(2, 3, 4))
    x = torch.randn(3, 2, 5)
    assert bits(flat(x)) == bits(model(x))


def test_it_makes_the_calls_of_the_model_and_asks_nothing():
    def model(x: Tensor) -> Tensor:
        y = x - 1 if x.mean() > 0 else x
        y[0] = 2
        return y @ y.t()

    flat = _flat(model, torch.ones(2, 2))
    body = [line.strip().partition(" = ")[2] or line.strip() for line in flat.source.splitlines()]
    assert "if" not in flat.source
    assert [text.split("(")[0] for text in body[1:4]] == ["x.mean", "r1 > 0", "r1.__bool__"]
    assert bits(flat(torch.ones(2, 2))) == bits(model(torch.ones(2, 2)))


def test_it_refuses_what_no_list_of_calls_does():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    with pytest.raises(ValueError, match="changed something"):
        _flat(Counts(), torch.ones(2))

    def modes(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        return y + x

    with pytest.raises(ValueError, match="from one mode to another"):
        _flat(modes, torch.ones(2))
