"""Insertions at nested and sparse values, of which torch has no sizes, strides or comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]
PARTS = [torch.randn(2, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]
DENSE = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, -4.0]])
linear = nn.Linear(3, 3)
nn.init.ones_(linear.weight)

VALUES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Any]]]
VALUES = {
    "strided": (
        lambda: torch.nested.nested_tensor([PARTS[0], PARTS[1][:1]]),
        lambda x: linear(x).relu(), lambda out: list(out.unbind()),
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([PARTS[0], PARTS[1][:1]], layout=torch.jagged),
        lambda x: linear(x).relu(), lambda out: list(out.unbind()),
    ),
    "coo": (lambda: DENSE.to_sparse(), lambda x: x.relu(), lambda out: [out.to_dense()]),
    "csr": (lambda: DENSE.to_sparse_csr(), lambda x: x.relu(), lambda out: [out.to_dense()]),
    "made": (
        lambda: DENSE, lambda x: torch.nested.as_nested_tensor([x, x[:1]]).relu(),
        lambda out: list(out.unbind()),
    ),
}  # fmt: skip


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_looked_at_and_replaced(name: str) -> None:
    make, model, parts = VALUES[name]
    wanted = parts(model(make()))
    for change, factor in (
        (lambda value: None, 1), (lambda value: value, 1), (lambda value: value * 2, 2),
        (lambda value: value.clone(), 1), (lambda value: value.detach() * 1, 1),
    ):  # fmt: skip
        bended = bt.BendedModule(model)
        bended(make())
        with bended.interject("relu", change) as inserted:
            for _ in range(3):
                assert same(parts(bended(make())), [part * factor for part in wanted])
            assert inserted.report().changed is (factor == 2)
        assert same(parts(bended(make())), wanted)


@pytest.mark.parametrize("name", VALUES)
def test_saved_shown_and_given_out(name: str) -> None:
    make, model, parts = VALUES[name]
    wanted = parts(model(make()))
    trace = bt.trace(model, make(), save="all")
    assert same(parts(trace.output), wanted)
    assert str(trace)
    bended = bt.BendedModule(model)
    bended(make())
    found = bended.get_activations("relu", args=(make(),))
    assert same(parts(found["relu"]), wanted)
    assert repr(found)
    assert found._repr_html_()


@pytest.mark.parametrize("name", VALUES)
def test_replaced_by_another_structure(name: str) -> None:
    make, model, _ = VALUES[name]
    bended = bt.BendedModule(model)
    bended(make())
    with bended.interject("relu", lambda value: (value, 1)):
        with pytest.raises(bt.errors.InterjectionError, match="expected a tensor"):
            bended(make())
    with bended.interject(bt.node_selector.with_dtype(torch.float32), lambda value: None):
        bended(make())


class Watch(bt.Interjection):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def backward(self, at: Any, grad_input: Any, grad_output: Any) -> None:
        self.seen.append(grad_output)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("is_known", [False, True])
def test_gradients_of_nested_values_are_seen(layout: torch.layout, is_known: bool) -> None:
    model = nn.Sequential(linear, nn.ReLU())
    x = torch.nested.nested_tensor(PARTS[:2], layout=layout)
    bended, watch = bt.BendedModule(model), Watch()
    if is_known:
        bended(x)
    with bended.interject(linear, watch):
        for _ in range(2):
            out = torch.cat(list(bended(x).unbind()))
            (grad,) = torch.autograd.grad(out.sum(), linear.weight)
            wanted = torch.cat([model(part) for part in PARTS[:2]]).sum()
            assert torch.allclose(grad, torch.autograd.grad(wanted, linear.weight)[0])
    assert len(watch.seen) == 2


def test_the_first_jagged_tensor_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor([a, b], layout=torch.jagged)
        return (nested * 2).to_padded_tensor(0.0)

    args = torch.ones(2, 3), torch.ones(4, 3)
    bended = bt.BendedModule(model)
    for _ in range(3):
        # torch makes one tensor once, and computes with sizes for it.
        monkeypatch.setattr("torch.nested._internal.nested_tensor._dummy_instance", None)
        assert bits(bended(*args)) == bits(model(*args))
