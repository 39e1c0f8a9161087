"""Insertions leave torch's fused paths as they are, or do what torch's own hooks do there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[False, False, True, True], [False] * 4])


def encoder(is_nested: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, dropout=0.0, norm_first=not is_nested
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_nested).eval()


def doubled(value: Any) -> Any:
    return (value[0] * 2, *value[1:]) if isinstance(value, tuple) else value * 2


def hooked(model: nn.Module, where: str, change: Callable[[Any], Any]) -> nn.Module:
    native = copy.deepcopy(model)
    native.get_submodule(where).register_forward_hook(lambda module, args, output: change(output))
    return native


def assert_same(given: Any, wanted: Any) -> None:
    assert bits(given) == bits(wanted)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "looks": lambda value: None, "same": lambda value: value, "other": doubled,
}  # fmt: skip


@pytest.mark.parametrize("where", ["layers.0.self_attn", "layers.0.linear1", "layers.1.norm2"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inside_of_a_layer_as_with_a_hook(where: str, change: str, mode: Any) -> None:
    model = encoder().requires_grad_(False)
    with mode():
        wanted = hooked(model, where, CHANGES[change])(X, src_key_padding_mask=PADDED)
        assert not wanted[0, 2:].any()
        for is_known in (False, True):
            bended = bt.BendedModule(model)
            if is_known:
                bended(X, src_key_padding_mask=PADDED)
            with bended.interject(where, CHANGES[change]):
                for _ in range(2):
                    assert_same(bended(X, src_key_padding_mask=PADDED), wanted)


@pytest.mark.parametrize(
    ("where", "is_nested"),
    [("layers.0", True), ("layers.1", False), ("to_padded_tensor", True), ("logical_not", True)],
)
def test_at_and_around_a_layer_as_without(where: str, is_nested: bool) -> None:
    model = encoder(is_nested)
    seen: list[Any] = []
    with torch.no_grad():
        wanted = model(X, src_key_padding_mask=PADDED)
        for is_known in (False, True):
            bended = bt.BendedModule(model)
            if is_known:
                bended(X, src_key_padding_mask=PADDED)
            with bended.interject(where, seen.append):
                for _ in range(2):
                    assert_same(bended(X, src_key_padding_mask=PADDED), wanted)
    assert len(seen) == 4


def test_what_only_looks_at_a_padded_encoder_gives_the_output_of_the_model() -> None:
    model = encoder()
    call = {"src": X, "src_key_padding_mask": PADDED}
    with torch.no_grad():
        wanted = model(**call)
        bended = bt.BendedModule(model)
        run = bt.workflows.run_with_cache
        assert_same(run(bended, call)[0], wanted)
        assert_same(run(bended, call, ["layers.0.output"])[0], wanted)
        found = bended.get_activations("layers.0", kwargs=call, return_output=True)
        assert_same(found[1], wanted)
        assert_same(bt.trace(model, **call, save="all").output, wanted)
        assert_same(run(bended, call, ["layers.0.norm1.output"])[0],
                    hooked(model, "layers.0.norm1", lambda value: None)(**call))  # fmt: skip


def test_a_parameter_that_is_replaced_reaches_the_fused_op() -> None:
    model = encoder()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.layers[0].linear1.weight.mul_(2)  # type: ignore[operator, union-attr]
        wanted = changed(X, src_key_padding_mask=PADDED)
        bended = bt.BendedModule(model)
        with bended.interject("layers.0.linear1.weight", lambda weight: weight * 2):
            for _ in range(2):
                assert_same(bended(X, src_key_padding_mask=PADDED), wanted)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, key_padding_mask=PADDED)[0]
        return self.after(out).relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["attention", "attention.out_proj", "after"])
def test_no_hook_takes_attention_off_its_fused_op(where: str) -> None:
    model = Attends().eval()
    with torch.no_grad():
        wanted = hooked(model, where, doubled)(X)
        bended = bt.BendedModule(model)
        with bended.interject(where, doubled, allow_none=True):
            for _ in range(2):
                assert_same(bended(X), wanted)
        with bended.interject("relu", lambda value: value * 2):
            for _ in range(2):
                assert_same(bended(X), model(X) * 2)


class GoesByHooks(nn.Module):
    """A layer of another library that has a fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        is_hooked = any(part._forward_hooks for part in self.modules())
        if is_hooked or torch.overrides.has_torch_function((x, self.first.weight)):
            return self.second(self.first(x))  # type: ignore[no-any-return]
        return torch.addmm(self.second.bias, x @ self.first.weight.T, self.second.weight.T) + 1


def test_a_layer_of_another_library_that_goes_by_hooks() -> None:
    model, x = GoesByHooks(), X[0]
    bended = bt.BendedModule(model)
    for _ in range(2):
        assert_same(bended(x), model(x))
    for change in CHANGES.values():
        with bended.interject("first", change):
            for _ in range(2):
                assert_same(bended(x), hooked(model, "first", change)(x))
