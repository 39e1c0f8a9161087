"""Facets: found in models whose layout is known here, and patched as hooks of torch do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.workflows import Facet, Facets

# Each case takes seconds: the README's command leaves them out.
pytestmark = pytest.mark.more

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 16,
    "vocab_size": 50,
}  # fmt: skip
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [7, 7, 0, 1, 2]])


def made(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{name}Model")(config).eval()


def traced(model: nn.Module, *inputs: torch.Tensor) -> tuple[Any, Facets]:
    bended = bt.BendedModule(model)
    with torch.no_grad():
        return bended, bt.workflows.facets(bended.trace(*inputs))


def flat(facet: Facet) -> list[int]:
    assert facet.index is not None
    return [position for group in facet.index for position in group]


def hooked(module: nn.Module, change: Callable[[Any], Any], run: Callable[[], Any]) -> Any:
    """Run with the output of a module changed by a hook of torch."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: change(output))
    try:
        with torch.no_grad():
            return run()
    finally:
        handle.remove()


def zeroed(start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., start:stop] = 0
        return output

    return change


def assert_patched(
    bended: Any, facet: Facet, module: nn.Module, start: int, stop: int, tokens: torch.Tensor
) -> None:
    """Assert that zeroing a facet is, bit by bit, what zeroing the output of a module there is."""
    model = bended.model
    with torch.no_grad():
        plain = model(tokens)[0]
        with bended.patch({facet.path: bt.patches.ZeroPatch(slice=facet.slice)}):
            patched = bended(tokens)[0]
        change = bended.interject(facet.path, lambda value: facet.edited(value, 0.0))
        with change:
            assert torch.equal(bended(tokens)[0], patched)
    assert torch.equal(patched, hooked(module, zeroed(start, stop), lambda: model(tokens)[0]))
    assert not torch.equal(patched, plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_queries_keys_and_values_of_a_fused_projection(attention: str) -> None:
    model = made("GPT2", n_layer=2, n_head=4, n_embd=32, attn_implementation=attention)
    bended, found = traced(model, TOKENS)
    assert [facet.name for facet in found] == ["q", "k", "v", "z"] * 2
    assert [flat(facet) for facet in found.named("q")] == [list(range(32))] * 2
    assert [flat(facet) for facet in found.named("k")] == [list(range(32, 64))] * 2
    assert [flat(facet) for facet in found.named("v")] == [list(range(64, 96))] * 2
    (key,) = found.named("k", "h.1")
    assert key.scope == "h.1.attn"
    assert key.parts == 4
    other = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])  # another batch size and length
    for tokens in (TOKENS, other):
        assert_patched(bended, key.part(1), model.h[1].attn.c_attn, 40, 48, tokens)


@pytest.mark.more
def test_grouped_heads_before_their_rotation() -> None:
    model = made("Llama", num_key_value_heads=2)
    bended, found = traced(model, TOKENS)
    assert [(facet.name, facet.parts) for facet in found[:4]] == [
        ("q", 4), ("k", 2), ("v", 2), ("z", 4),
    ]  # fmt: skip
    attention = model.layers[0].self_attn
    for number, part in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
        assert_patched(bended, found[number].part(-1, 0).part(1), part, 0, 8, TOKENS)
    activations = bended.get_activations(found[0].path, args=(TOKENS,))
    whole = activations[found[0].path]
    assert torch.equal(found[0].value(activations), whole.view(2, 5, 4, 8))
    assert torch.equal(found[0].part(2).value(whole), whole[..., 16:24])


def test_z_is_what_each_head_returned() -> None:
    model = made("Llama", num_key_value_heads=2)
    bended, found = traced(model, TOKENS)
    z = found[3]

    def without(args: tuple[torch.Tensor, ...]) -> Any:
        return (zeroed(16, 24)(args[0]), *args[1:])

    handle = model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _module, args: without(args)
    )
    with torch.no_grad():
        expected = model(TOKENS)[0]
    handle.remove()
    with torch.no_grad(), bended.patch({z.path: bt.patches.ZeroPatch(slice=z.part(2).slice)}):
        assert torch.equal(bended(TOKENS)[0], expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_queries_keys_and_values_of_an_encoder(attention: str) -> None:
    model = made("Bert", attn_implementation=attention)
    bended, found = traced(model, TOKENS)
    assert [facet.name for facet in found] == ["q", "k", "v", "z"] * 2
    inner = model.encoder.layer[0].attention.self
    for facet, module in zip(found[:3], (inner.query, inner.key, inner.value), strict=True):
        assert_patched(bended, facet.part(3), module, 24, 32, TOKENS)


def test_heads_that_are_interleaved_in_one_projection() -> None:
    _, found = traced(made("GPTNeoX"), TOKENS)
    q, k, v, z = found[:4]
    assert [group[0] for group in q.index or ()] == [0, 24, 48, 72]
    assert [group[0] for group in k.index or ()] == [8, 32, 56, 80]
    assert v.slice[1] == [p for start in (16, 40, 64, 88) for p in range(start, start + 8)]
    assert flat(z) == list(range(32))
    value = torch.arange(96.0).expand(2, 96)
    assert torch.equal(v.value(value)[0, 1], torch.arange(40.0, 48.0))
    changed = v.edited(value, torch.zeros(2, 4, 8))
    assert torch.equal(v.value(changed), torch.zeros(2, 4, 8))
    assert torch.equal(k.value(changed), k.value(value))


def test_heads_of_torchs_own_attention() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True).eval()
    _, found = traced_with_gradients(layer, torch.randn(1, 3, 8))
    assert [(facet.name, facet.parts) for facet in found] == [
        ("q", 2), ("k", 2), ("v", 2), ("z", 2),
    ]  # fmt: skip


def traced_with_gradients(model: nn.Module, *inputs: torch.Tensor) -> tuple[Any, Facets]:
    bended = bt.BendedModule(model)
    return bended, bt.workflows.facets(bended.trace(*inputs))


def test_gradients_of_a_facet_are_those_of_its_positions() -> None:
    model = made("GPT2", n_layer=1, n_head=4, n_embd=32)
    trace = bt.trace(model, TOKENS, save="all", save_gradients=True)
    seen: list[torch.Tensor] = []
    trace.output[0].square().sum().backward()
    key = bt.workflows.facets(trace).named("k")[0]
    handle = model.h[0].attn.c_attn.register_forward_hook(
        lambda _module, _inputs, output: output.register_hook(seen.append) and None
    )
    model(TOKENS)[0].square().sum().backward()
    handle.remove()
    assert torch.equal(key.gradient(trace), seen[0][..., 32:64].view(2, 5, 4, 8))
    assert torch.equal(key.part(0).value(trace), key.value(trace)[..., 0, :])


class LSTM(nn.Module):
    """A cell whose gates are in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(3, 16), nn.Linear(4, 16)

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        o, g, i, f = (self.x(x) + self.h(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def test_gates_and_states_of_a_cell_that_is_written_in_python() -> None:
    torch.manual_seed(0)
    model, inputs = LSTM(), (torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 4))
    bended, found = traced_with_gradients(model, *inputs)
    assert {facet.name: flat(facet)[0] for facet in found.named("gate")} == {
        "gate.o": 0, "gate.g": 4, "gate.i": 8, "gate.f": 12,
    }  # fmt: skip
    (forget,) = found.named("gate.f")
    with bended.patch({forget.path: bt.patches.ReplacePatch(value=-1e9, slice=forget.slice)}):
        h, c = bended(*inputs)
    o, g, i, _ = (model.x(inputs[0]) + model.h(inputs[1])).chunk(4, -1)
    expected = torch.sigmoid(i) * torch.tanh(g)
    assert torch.equal(c, expected + 0 * inputs[2])
    assert torch.equal(h, torch.sigmoid(o) * torch.tanh(c))
    states = {facet.name: facet.path for facet in found.named("state")}
    kept = bended.get_activations(*states.values(), args=inputs)
    h, c = model(*inputs)
    assert torch.equal(kept[states["state.h"]], h)
    assert torch.equal(kept[states["state.c"]], c)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_gates_of_torchs_own_cells_are_rows_of_their_weights(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(3, 4), torch.randn(2, 3)
    bended, found = traced_with_gradients(model, x)
    names = "ifgo" if "LSTM" in kind.__name__ else "rzn"
    assert [facet.name for facet in found.named("gate")] == [f"gate.{n}" for n in names] * 4
    facet = found.named(f"gate.{names[1]}")[0]
    with bended.patch({facet.path: bt.patches.ZeroPatch(slice=facet.slice)}):
        patched = bended(x)
    weight = next(model.parameters())
    with torch.no_grad():
        weight[4:8] = 0
    for one, other in zip(outputs(patched), outputs(model(x)), strict=True):
        assert torch.equal(one, other)
    kept = bended.get_activations(found.named("state.h")[0].path, args=(x,))
    assert torch.equal(next(iter(kept.values())).flatten(), outputs(model(x))[0].flatten())


def outputs(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in outputs(part)]


@pytest.mark.more
def test_experts_and_their_router() -> None:
    model = made("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    bended, found = traced(model, TOKENS)
    (router,) = found.named("router", "layers.1")
    assert router.parts == 4
    # Nobody is sent to the second expert, so what its matrices hold makes no difference.
    never = bt.patches.ReplacePatch(value=-1e4, slice=router.part(1).slice)
    up, down = found.named("experts", "layers.1")
    assert {facet.parts for facet in (up, down)} == {4}
    with torch.no_grad(), bended.patch({router.path: never}):
        expected = bended(TOKENS)[0]
        with bended.patch({down.path: bt.patches.ZeroPatch(slice=down.part(1).slice)}):
            assert torch.equal(bended(TOKENS)[0], expected)
        with bended.patch({down.path: bt.patches.ZeroPatch(slice=down.part(0, 2, 3).slice)}):
            assert not torch.equal(bended(TOKENS)[0], expected)
    with torch.no_grad():
        assert not torch.equal(expected, model(TOKENS)[0])
        with bended.patch({down.path: bt.patches.ZeroPatch(slice=down.part(1).slice)}):
            patched = bended(TOKENS)[0]
        model.layers[1].mlp.experts.down_proj[1] = 0
        assert torch.equal(patched, model(TOKENS)[0])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == number)
            result[rows] += weights[rows, rank, None] * expert(x[rows])
        return result


def test_experts_in_a_list_are_the_outputs_of_its_modules() -> None:
    torch.manual_seed(0)
    _, found = traced_with_gradients(Mixture(), torch.randn(9, 4))
    assert [facet.name for facet in found] == ["router", "expert.0", "expert.1", "expert.2"]
    assert found[2].path == "experts_1.linear"


def test_values_that_resemble_facets_are_none() -> None:
    def split(x: torch.Tensor) -> torch.Tensor:
        one, two, three = x.chunk(3, -1)
        return one.relu() + two * three + x.topk(2).values.sum() + x.softmax(-1).sum()

    assert bt.workflows.facets(bt.trace(split, torch.randn(2, 6))) == ()


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="facets are found in a run"):
        bt.workflows.facets(nn.ReLU())  # type: ignore[arg-type]
    facet = Facet("q", "qkv", "", -1, ((0, 1), (2, 3)))
    with pytest.raises(InputError, match="has 2 parts"):
        facet.part(2)
    with pytest.raises(InputError, match="reaches position 3"):
        facet.value(torch.ones(2, 3))
    with pytest.raises(InputError, match="there is no 'qkv'"):
        facet.value({"other": torch.ones(2, 4)})
    trace = bt.trace(nn.ReLU(), torch.ones(2))
    with pytest.raises(InputError, match="'qkv'"):
        facet.value(trace)


def test_queries_of_two_projections_are_not_those_of_one() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, v = (part.view(1, 3, 2, 2).transpose(1, 2) for part in (one(x) + other(x), other(x)))
        return nn.functional.scaled_dot_product_attention(q, v, v)

    found = bt.workflows.facets(bt.trace(attention, torch.randn(1, 3, 4)))
    assert [facet.name for facet in found] == ["k", "v"]
