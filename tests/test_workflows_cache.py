"""run_with_cache: activations by node paths, nnsight's paths and TransformerLens's names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.workflows import (
    ActivationCache,
    Alias,
    Aliases,
    run_with_cache,
    transformer_lens_aliases,
)
from tests.lens_models import Patient, Transformer, hooked, made, same, tokens, untouched
from tests.shares import some


def hooks_on(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
    """Call with forward hooks on all modules, and keep what they were given and gave."""
    found: dict[str, list[Any]] = {}
    handles = []
    for name, module in model.named_modules():

        def hook(m: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
            given = [*args, *kwargs.values()]
            if given:
                found.setdefault(f"{name}.input", []).append(_copied(given[0]))
            found.setdefault(f"{name}.output", []).append(_copied(out))

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            return call(), found
    finally:
        for handle in handles:
            handle.remove()


def _copied(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def test_all_that_modules_gave_and_were_given_is_that_of_hooks() -> None:
    model = made(Transformer)
    x = tokens()
    wanted_out, wanted = hooks_on(model, lambda: model(x))
    with untouched(model):
        out, cache = run_with_cache(model, x)
    same(out.detach(), wanted_out)
    for name, values in wanted.items():
        stem, _, part = name.rpartition(".")
        key = name if stem else part
        assert torch.equal(cache[key], values[0]), name
        assert not cache[key].requires_grad
    assert "blocks_0.softmax" in cache
    assert "blocks_0.norm1.layer_norm" in cache
    weights = cache["blocks_1.softmax"]
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))


NAMED: list[tuple[Any, list[str]]] = [
    ("blocks.0", ["blocks_0"]),
    ("blocks.0.output", ["blocks_0"]),
    ("blocks_0", ["blocks_0"]),
    ("blocks.0.input", ["blocks_0.input"]),
    ("blocks_0.input", ["blocks_0.input"]),
    ("blocks_0.softmax", ["blocks_0.softmax"]),
    (["ln_f", "blocks.1.up.input"], ["blocks_1.up.input", "ln_f"]),
    (re.compile(r"blocks\.\d\.up\.(in|out)put"),
     ["blocks_0.up", "blocks_0.up.input", "blocks_1.up", "blocks_1.up.input"]),
    (lambda name: name.endswith("norm1.output"), ["blocks_0.norm1", "blocks_1.norm1"]),
    (lambda name: "softmax" in name, ["blocks_0.softmax", "blocks_1.softmax"]),
    (nn.Embedding, ["embed"]),
    (bt.node_selector.Activations.GELU, ["blocks_0.gelu", "blocks_1.gelu"]),
    ("output", ["output"]),
    ("input", ["output.input"]),
]  # fmt: skip


@pytest.mark.parametrize(("names_filter", "keys"), NAMED)
@pytest.mark.parametrize("warm", some([False, True], 2, start=1))
def test_a_filter_takes_names_patterns_and_functions(
    names_filter: Any, keys: list[str], warm: bool
) -> None:
    bended = bt.BendedModule(made(Transformer))
    if warm:
        bended(tokens())
    _, everything = run_with_cache(made(Transformer), tokens())
    out, cache = run_with_cache(bended, tokens(), names_filter)
    assert sorted(cache) == keys
    for key in keys:
        assert torch.equal(cache[key], everything[key])
    same(out, bended.model(tokens()))
    assert bended.insertions == ()


def test_a_filter_takes_entries_of_a_log() -> None:
    bended = bt.BendedModule(made(Transformer))
    log = bended.trace(tokens())
    _, cache = run_with_cache(bended, tokens(), log["softmax_1"])
    assert list(cache) == ["blocks_0.softmax"]
    _, cache = run_with_cache(bended, tokens(), [log["softmax_1"], "ln_f"])
    assert sorted(cache) == ["blocks_0.softmax", "ln_f"]


def test_traces_are_shared_with_other_calls() -> None:
    bended = bt.BendedModule(made(Transformer))
    for _ in range(3):
        run_with_cache(bended, tokens(), "blocks.0")
    assert bended.stats.traces == 1
    assert bended.stats.replays == 2


@pytest.mark.more
def test_passes_of_a_loop_have_keys_of_their_own() -> None:
    model = made(Patient)
    for seed in range(6):
        x = tokens(seed=seed)
        _, wanted = hooks_on(model, lambda x=x: model(x))
        _, cache = run_with_cache(model, x)
        values = wanted["block.output"]
        assert [f"block:{number + 1}" for number in range(len(values))] == [
            key for key in cache if re.fullmatch(r"block:\d", key)
        ]
        for mine, theirs in zip(cache.passes("block"), values, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(cache["block:2"], values[1])
        assert torch.equal(cache["block:2.input"], wanted["block.input"][1])
        with pytest.raises(NodePathError, match="several times: name one of 'block:1'"):
            cache["block.output"]
        assert ("rare" in cache) == ("rare.output" in wanted)


def test_what_is_kept_is_as_it_was_also_if_the_model_writes_into_it() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        g = h.view(-1)
        h.relu_()
        g.add_(10)
        h[0] = 7
        return h

    x = torch.tensor([-1.0, 2.0])
    out, cache = run_with_cache(model, x)
    assert cache["mul"].tolist() == [-2.0, 4.0]
    assert cache["view"].tolist() == [-2.0, 4.0]
    assert cache["relu_"].tolist() == [0.0, 4.0]
    assert cache["add_"].tolist() == [10.0, 14.0]
    assert out.tolist() == [7.0, 14.0]
    cache["mul"].zero_()
    out.zero_()
    assert cache["add_"].tolist() == [10.0, 14.0]
    assert x.tolist() == [-1.0, 2.0]
    kept, again = run_with_cache(model, x)
    x.zero_()
    kept.zero_()
    assert again["mul"].tolist() == [-2.0, 4.0]


def test_memory_that_numpy_writes_to_does_not_reach_what_is_kept() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        array = h.numpy()
        g = h.view(2)
        array[0] = 100.0
        return g + 1

    out, cache = run_with_cache(model, torch.ones(2))
    assert out.tolist() == [101.0, 3.0]
    assert cache["mul"].tolist() == [2.0, 2.0]
    assert cache["view"].tolist() == [2.0, 2.0]


def test_a_new_way_that_hands_memory_out_is_noticed() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        if x.sum() > 5:
            array = h.numpy()
            g = h.view(2)
            array[0] = 100.0
            return g + 1
        return h

    bended = bt.BendedModule(model)
    for _ in range(3):
        assert run_with_cache(bended, torch.ones(2))[1]["mul"].tolist() == [2.0, 2.0]
    with pytest.raises(InputError, match="The next call makes copies"):
        run_with_cache(bended, torch.ones(2) * 9)
    _, cache = run_with_cache(bended, torch.ones(2) * 9)
    assert cache["view"].tolist() == [18.0, 18.0]
    assert bended.insertions == ()


def test_nothing_is_copied_before_somebody_writes() -> None:
    bended = bt.BendedModule(made(Transformer))
    run_with_cache(bended, tokens(), "blocks.0")
    _, cache = run_with_cache(bended, tokens(), ["blocks.0", "blocks.1.input"])
    one, other = cache["blocks.0.output"], cache["blocks.1.input"]
    address = torch._C._data_address
    assert address(one) == address(other)
    one.zero_()
    assert address(one) != address(other)
    assert other.abs().sum() > 0


def test_weights_that_are_handed_on_are_copied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.view(2) * x.view(2)

    model, x = Tied(), torch.ones(2)
    with untouched(model):
        _, cache = run_with_cache(model, x)
    view = [key for key in cache if key.startswith("view")]
    with torch.no_grad():
        model.weight.fill_(5)
        x.fill_(5)
    for key in [*view, "output.input"]:
        assert cache[key].tolist() == [1.0, 1.0]


def test_undetached_ones_have_gradients() -> None:
    model = made(Transformer)
    out, cache = run_with_cache(model, tokens(), "blocks.0", detach=False)
    (grad,) = torch.autograd.grad(out.sum(), cache["blocks.0.output"])
    kept: list[Tensor] = []
    with hooked(model.blocks[0], lambda m, a, o: kept.append(o)):
        again = model(tokens())
    same(grad, torch.autograd.grad(again.sum(), kept[0])[0])


def test_what_is_inserted_is_seen() -> None:
    model = made(Transformer)
    bended = bt.BendedModule(model)
    with bended.interject("blocks.0", lambda v: v * 2):
        out, cache = run_with_cache(bended, tokens(), ["blocks.0", "blocks.1.input"])
        assert len(bended.insertions) == 1
    with hooked(model.blocks[0], lambda m, a, o: o * 2):
        wanted, hooks = hooks_on(model, lambda: model(tokens()))
    same(out.detach(), wanted)
    assert torch.equal(cache["blocks.0.output"], hooks["blocks.1.input"][0])
    assert torch.equal(cache["blocks.1.input"], hooks["blocks.1.input"][0])


def test_inputs_are_those_that_interjections_in_front_made() -> None:
    class Before(bt.Interjection):
        def before(self, at: bt.NodePass, inputs: bt.Inputs) -> bt.Inputs:
            return bt.Inputs((inputs[0] + 1,), inputs.kwargs)

    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2)))
    with bended.interject("0", Before()):
        _, cache = run_with_cache(bended, torch.zeros(1, 2), "0.input")
    assert cache["0.input"].tolist() == [[1.0, 1.0]]


def test_errors_leave_nothing_behind() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.relu()
        if y.sum() > 1:
            raise ZeroDivisionError
        return y

    bended = bt.BendedModule(model)
    bended(torch.zeros(2))
    with pytest.raises(ZeroDivisionError):
        run_with_cache(bended, torch.ones(2))
    assert bended.insertions == ()


@pytest.mark.parametrize(
    ("names_filter", "error", "message"),
    [
        ("blocks.9", bt.errors.NodePathError, "no node 'blocks.9'"),
        (["blocks.0", "nothing"], bt.errors.NodePathError, "no node 'nothing'"),
        ([], bt.errors.InputError, "is empty"),
        (3, bt.errors.InputError, "names_filter= takes"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_filters_that_mean_nothing_are_errors(
    names_filter: Any, error: Any, message: str, warm: bool
) -> None:
    bended = bt.BendedModule(made(Transformer))
    if warm:
        bended(tokens())
    with pytest.raises(error, match=message):
        run_with_cache(bended, tokens(), names_filter)
    assert bended.insertions == ()


def test_a_module_called_output_is_not_taken_for_what_its_parent_gives() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(x) * 2

    model, x = nn.Sequential(Layer()), torch.ones(1, 2)
    with pytest.raises(NodePathError, match="is a module, and also the output of '0'"):
        run_with_cache(model, x, "0.output")
    _, cache = run_with_cache(model, x, ["0", "0.output.output"])
    out = model(x).detach()
    assert torch.equal(cache["0"], out)
    assert torch.equal(cache["0.output.output"] * 2, out)
    with pytest.raises(NodePathError, match="several times"):
        cache["0.output"]


def test_a_function_that_says_no_to_all_gets_a_warning() -> None:
    with pytest.warns(NeverFiredWarning, match="reached no node of names_filter"):
        _, cache = run_with_cache(made(Transformer), tokens(), lambda name: name == "no name")
    assert not cache


def test_a_cache_prints_and_names_what_is_near() -> None:
    _, cache = run_with_cache(made(Transformer), tokens())
    assert repr(cache).splitlines()[1].startswith("  output.input: (2, 5) int64")
    assert "... and" in repr(cache)
    with pytest.raises(NodePathError, match=r"did you mean 'blocks_1\.gelu'"):
        cache["blocks_1.gelo"]
    with pytest.raises(KeyError):
        cache["nothing at all"]
    assert isinstance(cache, ActivationCache)


# Aliases of one's own


def test_a_model_s_own_aliases() -> None:
    model = made(Transformer)
    mine = Aliases(
        {f"resid.{i}": f"blocks.{i}.output" for i in range(2)}
        | {"heads": Alias("blocks.0.query.output", lambda value: value.unflatten(-1, (2, 4)))},
        {r"resid\.\d+": "there are two layers"},
    )
    _, cache = run_with_cache(model, tokens(), ["resid.1", "heads"], aliases=mine)
    assert list(cache) == ["resid.1", "heads"]
    _, everything = run_with_cache(model, tokens(), aliases=mine)
    assert torch.equal(cache["resid.1"], everything["blocks_1"])
    assert torch.equal(everything["resid.0"], everything["blocks_0"])
    assert cache["heads"].shape == (2, 5, 2, 4)
    with pytest.raises(NodePathError, match="there are two layers"):
        run_with_cache(model, tokens(), "resid.7", aliases=mine)
    with pytest.raises(NodePathError, match="there are two layers"):
        everything["resid.7"]
    _, by = run_with_cache(model, tokens(), lambda n: n.startswith("resid"), aliases=mine)
    assert sorted(by) == ["resid.0", "resid.1"]
    plain = {"last": "blocks.1.output"}
    assert list(run_with_cache(model, tokens(), "last", aliases=plain)[1]) == ["last"]
    with pytest.raises(NodePathError, match=r"'gone' stands for 'blocks.9.output'"):
        run_with_cache(model, tokens(), "gone", aliases={"gone": "blocks.9.output"})


def test_aliases_are_checked_and_joined() -> None:
    one = Aliases({"a": "x"}, {"b": "no b"})
    both = one | Aliases({"b": "y"}) | {"c": Alias("z", why="c")}
    assert dict(both) == {"a": Alias("x"), "b": Alias("y"), "c": Alias("z", why="c")}
    assert both.why_not("b") == "" != one.why_not("b")
    assert str(one) == "a  x"
    assert len(transformer_lens_aliases(made(Transformer))) == 0
    with pytest.raises(InputError, match="an alias maps"):
        Aliases({"a": 3})  # type: ignore[dict-item]


# TransformerLens's names


pytest.importorskip("transformers", reason="needs the test extra")


def language_model(name: str, attention: str = "eager") -> Any:
    from tests.hf_models import MODELS

    (found,) = (m for m in MODELS if m.name == name)
    model = found.make()
    model.set_attn_implementation(attention)
    return model, found.inputs()


def by_definition(name: str, model: Any, batch: Any) -> dict[str, Tensor]:
    """What TransformerLens's hooks mean, worked out from what the modules of a model were given."""
    _, seen = hooks_on(model, lambda: model(**batch))
    found = {}
    gpt2 = name == "gpt2"
    prefix = "transformer" if gpt2 else "model"
    block, attn = ("h", "attn") if gpt2 else ("layers", "self_attn")
    found["hook_embed"] = (model.transformer.wte if gpt2 else model.model.embed_tokens)(
        batch["input_ids"]
    )
    for i in range(2):
        at, to = f"{prefix}.{block}.{i}", f"blocks.{i}"
        pre = seen[f"{at}.input"][0]
        post = seen[f"{at}.output"][0]
        attn_out = seen[f"{at}.{attn}.output"][0][0]
        mlp_out = seen[f"{at}.mlp.output"][0]
        found |= {
            f"{to}.hook_resid_pre": pre, f"{to}.hook_attn_out": attn_out,
            f"{to}.hook_resid_mid": pre + attn_out, f"{to}.hook_mlp_out": mlp_out,
            f"{to}.hook_resid_post": pre + attn_out + mlp_out,
            f"{to}.attn.hook_pattern": seen[f"{at}.{attn}.output"][0][1],
        }  # fmt: skip
        torch.testing.assert_close(found[f"{to}.hook_resid_post"], post)
        layer = model.get_submodule(at)
        if gpt2:
            normed = layer.ln_1(pre)
            mixed = (normed @ layer.attn.c_attn.weight + layer.attn.c_attn.bias).view(
                2, -1, 3, 4, 8
            )
            q, k, v = mixed.unbind(2)
            inner = layer.ln_2(pre + attn_out)
            up = inner @ layer.mlp.c_fc.weight + layer.mlp.c_fc.bias
            found |= {
                f"{to}.ln1.hook_normalized": normed, f"{to}.ln2.hook_normalized": inner,
                f"{to}.mlp.hook_pre": up, f"{to}.mlp.hook_post": layer.mlp.act(up),
            }  # fmt: skip
        else:
            normed = layer.input_layernorm(pre)
            heads = [getattr(layer.self_attn, f"{n}_proj")(normed) for n in "qkv"]
            q, k, v = (h.view(2, -1, h.shape[-1] // 8, 8) for h in heads)
            inner = layer.post_attention_layernorm(pre + attn_out)
            gate, linear = layer.mlp.gate_proj(inner), layer.mlp.up_proj(inner)
            found |= {f"{to}.mlp.hook_pre": gate, f"{to}.mlp.hook_pre_linear": linear,
                      f"{to}.mlp.hook_post": nn.functional.silu(gate) * linear}  # fmt: skip
            cos, sin = (
                each[:, :, None]
                for each in model.model.rotary_emb(pre, torch.arange(pre.shape[1])[None])
            )
            turned = [h * cos + torch.cat([-h[..., 4:], h[..., :4]], -1) * sin for h in (q, k)]
            found |= {f"{to}.attn.hook_rot_q": turned[0], f"{to}.attn.hook_rot_k": turned[1]}
        pattern = found[f"{to}.attn.hook_pattern"]
        asks, keys = (q, k) if gpt2 else turned
        keys = keys.repeat_interleave(4 // k.shape[2], 2)
        scores = asks.transpose(1, 2) @ keys.permute(0, 2, 3, 1)
        mixed = torch.einsum("bhij,bjhd->bihd", pattern, v.repeat_interleave(4 // v.shape[2], 2))
        out = layer.attn.c_proj.weight if gpt2 else layer.self_attn.o_proj.weight.T
        found |= {
            f"{to}.attn.hook_q": q, f"{to}.attn.hook_k": k, f"{to}.attn.hook_v": v,
            f"{to}.attn.hook_z": mixed,
            f"{to}.attn.hook_attn_scores": (scores / 8**0.5).masked_fill(pattern == 0, -torch.inf),
            f"{to}.attn.hook_result": torch.stack(
                [mixed[:, :, h] @ out[8 * h : 8 * h + 8] for h in range(4)], 2
            ),
        }  # fmt: skip
    if gpt2:
        found["ln_final.hook_normalized"] = model.transformer.ln_f(post)
    return {key: value.detach() for key, value in found.items()}


@pytest.mark.all
@pytest.mark.parametrize("name", some(["gpt2", "llama"], 2))
def test_names_of_transformer_lens_are_what_they_mean(name: str) -> None:
    model, batch = language_model(name)
    batch = {**batch, "output_attentions": True}
    wanted = by_definition(name, model, batch)
    _, cache = run_with_cache(model, batch)
    assert set(cache.aliases) == set(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(cache[key], value, rtol=1e-4, atol=1e-5)
        _, one = run_with_cache(model, batch, key)
        assert list(one) == [key]
        assert torch.equal(one[key], cache[key])
    _, several = run_with_cache(model, batch, lambda hook: hook.endswith("hook_resid_post"))
    assert list(several) == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]


@pytest.mark.more
@pytest.mark.parametrize("name", some(["gpt2", "llama"], 2))
def test_values_are_changed_by_the_names_of_transformer_lens(name: str) -> None:
    model, batch = language_model(name)
    bended = bt.BendedModule(model)
    with torch.no_grad():
        plain = bended(**batch).logits
        for hook in transformer_lens_aliases(model):
            _, cache = run_with_cache(bended, batch, hook)
            if hook.endswith("hook_result"):
                with pytest.raises(InputError, match="can only be read"):
                    bended.interject(hook, torch.clone)
                continue
            with bended.interject(hook, torch.clone):
                assert torch.equal(bended(**batch).logits, plain), hook
            with bended.interject(hook, lambda value: value * 0.5) as handle:
                assert not torch.equal(bended(**batch).logits, plain), hook
                _, halved = run_with_cache(bended, batch, hook)
            assert torch.equal(halved[hook], cache[hook] * 0.5)
            assert handle.report().changed
    assert bended.insertions == ()


@pytest.mark.more
def test_one_head_is_changed_as_by_a_native_hook() -> None:
    model, batch = language_model("gpt2")
    bended, hook = bt.BendedModule(model), "blocks.1.attn.hook_k"
    attention = model.transformer.h[1].attn

    def native(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        q, k, v = output.chunk(3, -1)
        k = k.unflatten(-1, (4, 8)).clone()
        k[:, :, 2] = 0
        return torch.cat([q, k.flatten(-2), v], -1)

    with torch.no_grad():
        handle = attention.c_attn.register_forward_hook(native)
        wanted = model(**batch).logits
        handle.remove()
        patch = bt.patches.ZeroPatch(slice=(slice(None), slice(None), 2))
        with bended.patch({hook: patch}):
            assert torch.equal(bended(**batch).logits, wanted)
        with bt.workflows.ablate(bended, hook, channels=2, axis=2):
            assert torch.equal(bended(**batch).logits, wanted)
        vector = torch.zeros(4, 8)
        with bt.workflows.steer(bended, vector, hook):
            assert torch.equal(bended(**batch).logits, model(**batch).logits)
        other = {**batch, "input_ids": batch["input_ids"].flip(1)}
        metric = lambda out: out.logits[0, -1, 0]  # noqa: E731
        found = bt.workflows.activation_patching(
            bended, batch, other, [hook], metric, positions=[2], axis=2
        )
        assert found.sites == (hook,)
        by_heads = bt.workflows.activation_patching(bended, batch, other, [hook], metric, heads=4)
        assert torch.equal(by_heads.values[0, 0, 2], found.values[0, 0])
        with bt.workflows.ablate(bended, hook, heads=4, head=2):
            assert torch.equal(bended(**batch).logits, wanted)
        layers = [f"blocks.{number}.attn.hook_z" for number in range(2)]
        with bended.interject(layers, torch.zeros_like):
            zero = bended(**batch).logits
        projections = [block.attn.c_proj for block in model.transformer.h[:2]]
        with bt.workflows.ablate(bended, projections, at="input"):
            assert torch.equal(bended(**batch).logits, zero)
    args = (bended, batch, other)
    named = bt.workflows.attribution_patching(*args, layers, metric, heads=4)
    assert named.effect.all()
    wanted = bt.workflows.attribution_patching(*args, projections, metric, heads=4, at="input")
    assert torch.equal(named.effect, wanted.effect)
    for heads in (2, 8):  # slices within and across heads, which mean nothing
        for site in (hook, layers[0], "blocks.0.attn.hook_pattern"):
            with pytest.raises(bt.errors.SiteError, match=f"heads={heads}: the .* has 4 heads"):
                bt.workflows.ablate(bended, site, heads=heads)
            with pytest.raises(bt.errors.SiteError, match=f"heads={heads}: the .* has 4 heads"):
                bt.workflows.activation_patching(*args, [site], metric, heads=heads)
        for site in (
            "transformer.h.0.attn.c_proj.input", "transformer.h.0.attn.output|sub_0",
            "blocks.0.hook_attn_out", "blocks.0.hook_resid_mid",
        ):  # fmt: skip
            with pytest.raises(bt.errors.SiteError, match="neither split into"):
                bt.workflows.ablate(bended, site, heads=heads)
    assert bended.insertions == ()
    for wrong, message in (
        (bt.workflows.Alias("transformer.h.0.output", lambda value: value), "can only be read"),
        ("blocks.0.attn.hook_rot_q", "has no equal value in this model: GPT-2 rotates nothing"),
        (["blocks.0.attn.hook_z", "blocks.0.hook_mlp_out"], "name values of several kinds"),
    ):
        with pytest.raises((InputError, NodePathError), match=message):
            bended.interject(wrong, torch.zeros_like)

    class Before(bt.Interjection):
        def before(self, at: Any, inputs: Any) -> None:
            pass

    with pytest.raises(InputError, match="works around a node, but an alias"):
        bended.interject(hook, Before())


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_without_an_equal_say_why(name: str) -> None:
    model, batch = language_model(name)
    bended = bt.BendedModule(model)
    for hook, why in {
        "blocks.1.hook_q_input": "one tensor", "blocks.0.ln1.hook_scale": "scale",
        "hook_pos_embed": "wpe|rotations", "hook_tokens": "input of the model",
    }.items():  # fmt: skip
        with pytest.raises(NodePathError, match=f"no equal value in this model: .*({why})"):
            run_with_cache(bended, batch, hook)
    if name == "llama":
        with pytest.raises(NodePathError, match="before the product with its weights"):
            run_with_cache(bended, batch, "blocks.0.ln1.hook_normalized")
    with pytest.raises(NodePathError, match=r"no node 'blocks.9.hook_resid_pre'"):
        run_with_cache(bended, batch, "blocks.9.hook_resid_pre")
    assert bended.insertions == ()


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_residual_stream_is_taken_apart(name: str) -> None:
    model, batch = language_model(name)
    gpt2 = name == "gpt2"
    inner = model.transformer if gpt2 else model.model
    norm, second = (inner.ln_f, inner.h[1].ln_2) if gpt2 else (
        inner.norm, inner.layers[1].post_attention_layernorm
    )  # fmt: skip
    with torch.no_grad():
        _, cache = run_with_cache(model, batch)
        values = by_definition(name, model, {**batch, "output_attentions": True})
        final, logits = values["blocks.1.hook_resid_post"], model(**batch).logits
        parts, labels = cache.decompose_resid(return_labels=True)
        layers = ["0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]
        assert labels == ["embed", *["pos_embed"] * gpt2, *layers]
        torch.testing.assert_close(parts.sum(0), final)
        for label, part in zip(labels[-4:], parts[-4:], strict=True):
            torch.testing.assert_close(part, values[f"blocks.{label[0]}.hook_{label[2:]}"])
        assert torch.equal(cache.decompose_resid(mode="mlp", incl_embeds=False), parts[[-3, -1]])
        assert torch.equal(cache.decompose_resid(pos_slice=-1), parts[:, :, -1])
        assert torch.equal(cache.decompose_resid(1), parts[:-2])

        sums, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
        assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
        for label, part in zip(labels[:-1], sums[:-1], strict=True):
            torch.testing.assert_close(part, values[f"blocks.{label[0]}.hook_resid_{label[2:]}"])
        torch.testing.assert_close(sums[-1], final)
        until = cache.accumulated_resid(1, mlp_input=True, return_labels=True)[1]
        assert until == ["0_pre", "1_pre", "1_mid"]

        heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
        assert labels == [f"L{i}H{h}" for i in range(2) for h in range(4)] + ["remainder"]
        torch.testing.assert_close(heads.sum(0), final)
        torch.testing.assert_close(heads[5], values["blocks.1.attn.hook_result"][:, :, 1])

        bias = norm.bias if gpt2 else 0.0
        torch.testing.assert_close(cache.apply_ln_to_stack(parts).sum(0) + bias, norm(final))
        mids = cache.decompose_resid(1, mlp_input=True, apply_ln=True)
        wanted = second(values["blocks.1.hook_resid_mid"]) - (second.bias if gpt2 else 0.0)
        torch.testing.assert_close(mids.sum(0), wanted)

        unembed, right, wrong = model.lm_head.weight, batch["input_ids"][:, 0], 5
        extra = (bias * (unembed[right] - unembed[wrong])).sum(-1)
        found = cache.logit_attrs(heads, right, incorrect_tokens=wrong)
        difference = logits.gather(-1, right[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
        difference = difference - logits[..., wrong]
        torch.testing.assert_close(found.sum(0) + extra[:, None], difference)
        torch.testing.assert_close(
            cache.logit_attrs(parts[:, :, -1], right, wrong, pos_slice=-1).sum(0) + extra,
            difference[:, -1],
        )
        assert cache.to("meta").decompose_resid(mode="attn").device.type == "meta"
    for call, message in (
        (lambda: cache.decompose_resid(9), "layer=9, but the model has 2 layers"),
        (lambda: cache.decompose_resid(mode="heads"), "mode"),
        (lambda: cache.stack_head_results(0), "no heads before layer=0"),
        (lambda: cache.logit_attrs(parts, "Paris"), "use the tokenizer"),
        (lambda: cache.logit_attrs(parts, 1_000), "numbers of tokens from 0 to"),
        (lambda: run_with_cache(nn.ReLU(), torch.ones(2))[1].decompose_resid(), "GPT-2 and Llama"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    if gpt2:
        model.train()
        _, dropped = run_with_cache(model, batch)
        with pytest.raises(InputError, match=r"call eval\(\)"):
            dropped.decompose_resid()


@pytest.mark.more
def test_attention_that_is_one_operation_has_no_pattern_to_show() -> None:
    model, batch = language_model("gpt2", "sdpa")
    for warm in (False, True):
        bended = bt.BendedModule(model)
        if warm:
            bended(**batch)
        with pytest.raises(NodePathError, match="attn_implementation='eager'"):
            run_with_cache(bended, batch, "blocks.0.attn.hook_pattern")
    _, cache = run_with_cache(model, batch, lambda name: "hook" in name)
    assert "blocks.0.attn.hook_z" in cache
    assert "blocks.0.attn.hook_pattern" not in cache
    with pytest.raises(NodePathError, match=r"cache does not have .*attn_implementation='eager'"):
        cache["blocks.0.attn.hook_pattern"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_paths_as_in_nnsight(name: str) -> None:
    model, batch = language_model(name)
    layer = "transformer.h.1" if name == "gpt2" else "model.layers.1"
    out, cache = run_with_cache(
        model, batch, [f"{layer}.output", f"{layer}.input", "lm_head.output"]
    )
    _, seen = hooks_on(model, lambda: model(**batch))
    for part in ("input", "output"):
        assert torch.equal(cache[f"{layer}.{part}"], seen[f"{layer}.{part}"][0])
    assert torch.equal(cache["lm_head.output"], out.logits)
    assert len(cache) == 3


@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "GPTBigCode"])
def test_models_with_modules_of_the_same_names_have_none_of_transformer_lens(kind: str) -> None:
    sizes = {"vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"hidden_size": 8, "intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert not transformer_lens_aliases(model)


@pytest.mark.more
def test_short_names_of_transformer_lens_find_the_same_values() -> None:
    model, batch = language_model("gpt2", "eager")
    _, cache = run_with_cache(model, batch)
    last = len(model.transformer.h) - 1
    for short, full in (
        (("resid_post", 0), "blocks.0.hook_resid_post"),
        (("pattern", 1), "blocks.1.attn.hook_pattern"),
        (("normalized", -1, "ln2"), f"blocks.{last}.ln2.hook_normalized"),
        ("embed", "hook_embed"),
    ):
        assert torch.equal(cache[short], cache[full])
    for wrong in (("normalized", 0), ("resid_post", 9), ("resid_post", 0, "attn"), ("z",)):
        with pytest.raises(NodePathError, match="is not in this cache"):
            cache[wrong]
    with pytest.raises(NodePathError, match=r"did you mean .*'blocks.0.hook_resid_post'"):
        cache["blocks.0.hook_resid_pst"]
