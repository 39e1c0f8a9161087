"""What a model returns, or stores, that holds tensors where few people put them."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt

_FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a_key": (lambda x: {x: 1}, lambda out: next(iter(out))),
    "a_computed_key": (lambda x: {x * 2: 1}, lambda out: next(iter(out))),
    "a_key_in_a_tuple": (lambda x: {(x, 1): 1}, lambda out: next(iter(out))[0]),
    "a_key_in_a_nested_dict": (lambda x: [{"a": {x: 1}}], lambda out: next(iter(out[0]["a"]))),
    "a_counter": (lambda x: collections.Counter({x: 2}), lambda out: next(iter(out))),
    "a_method": (lambda x: x.add, lambda out: out(1)),
    "a_method_of_a_result": (lambda x: (x * 2).mul, lambda out: out(3)),
    "a_class": (lambda x: type("Made", (), {"value": x * 2}), operator.attrgetter("value")),
    "a_set": (lambda x: {x + 1}, lambda out: next(iter(out))),
}


def _branched(make: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: make(x) if x.sum() > 0 else make(x - 1)


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("branched", [False, True], ids=["straight", "branched"])
def test_an_output_holds_the_tensors_of_its_own_call(form: str, branched: bool) -> None:
    make, read = _FORMS[form]
    function = _branched(make) if branched else make
    bended = bt.BendedModule(function)
    for seed in (0, 1, 2, 3, 0, 4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(read(bended(x.clone())), read(function(x.clone())))
    assert bended.stats.replays or bended.why_live


@pytest.mark.parametrize("form", _FORMS)
def test_an_attribute_holds_the_tensors_of_the_latest_call(form: str) -> None:
    make, read = _FORMS[form]

    class Keeps(nn.Module):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = make(x)
            return x * 2

    eager, model = Keeps(), Keeps()
    bended = bt.BendedModule(model)
    for seed in range(5):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(bended(x.clone()), eager(x.clone()))
        assert torch.equal(read(model.kept), read(eager.kept))


def test_a_dict_of_the_model_with_tensors_as_keys() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[Tensor, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.kept.clear()
            self.kept[x] = x * 2
            return x + len(self.kept)

    model = Keeps()
    bended = bt.BendedModule(model)
    for seed in range(4):
        x = torch.full((3,), float(seed))
        assert torch.equal(bended(x), x + 1)
        ((key, value),) = model.kept.items()
        assert key is x
        assert torch.equal(value, x * 2)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_dict_in_which_a_key_is_put_back(kind: type[dict[str, Any]]) -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kind(a=1, b=2)

        def forward(self, x: Tensor) -> Tensor:
            self.kept["c"] = x
            self.kept["a"] = self.kept.pop("a")
            return x * 2

    eager, model = Moves(), Moves()
    bended = bt.BendedModule(model)
    for _ in range(4):
        for one in (eager, model):
            one.kept = kind(a=1, b=2)
        assert torch.equal(bended(torch.ones(2)), eager(torch.ones(2)))
        assert list(model.kept) == list(eager.kept) == ["b", "c", "a"]


def test_an_op_that_is_given_a_dict_with_tensors_as_keys() -> None:
    total = bt.opaque(lambda given: sum(key * value for key, value in given.items()))
    bended = bt.BendedModule(lambda x: total({x: 2}))
    for seed in range(4):
        x = torch.full((3,), float(seed))
        assert torch.equal(bended(x), x * 2)
