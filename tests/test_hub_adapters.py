"""Models that PEFT, accelerate, transformers and torch have changed before they get here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits, footprint, state

pytest.importorskip("transformers", reason="needs the test extra")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("accelerate", reason="needs accelerate")

from tools.hub.adapters import KINDS, adapted, in_pieces, language_model, several, texts
from tools.hub.building import build, quiet

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]  # those of other libraries

Change = Callable[[Any], Any]


def logits(model: Any, seed: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return model(**texts(seed=seed), **options).logits


def step(call: Any, model: Any, seed: int) -> Any:
    """Return the bits of the loss, the logits and all gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    batch = texts(seed=seed)
    out = call(**batch, labels=batch["input_ids"])
    out.loss.backward()
    return bits([out.loss, out.logits, [p.grad for p in model.parameters()]])


def generated(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    options = {"max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None, "do_sample": True}
    with quiet():
        out = model.generate(**texts(), **options, return_dict_in_generate=True, output_logits=True)
    return bits([out.sequences, out.logits, torch.get_rng_state()])


@contextlib.contextmanager
def hooked(model: Any, name: str, change: Change) -> Any:
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: change(out))
    try:
        yield
    finally:
        handle.remove()


def module_named(model: nn.Module, end: str) -> str:
    return next(name for name, _ in model.named_modules() if name.endswith(end))


# PEFT


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_an_adapter(kind: str) -> None:
    """Training, evaluating, generating, and a layer changed in all of them."""
    eager, model = adapted(kind), adapted(kind)
    bended = bt.BendedModule(model)
    for training in (False, True):
        eager.train(training)
        model.train(training)
        before = bended.stats.replays
        for seed in (0, 1, 1):
            assert step(bended, model, seed) == step(eager, eager, seed)
        assert bended.stats.replays == before + 2
    eager.zero_grad()
    model.zero_grad()
    eager.eval()
    model.eval()
    for seed in range(2):
        assert generated(bended, seed) == generated(eager, seed)
    place = module_named(eager, "layers.1.mlp")
    plain = generated(eager, 3)
    with hooked(eager, place, lambda value: value * -3):
        wanted = generated(eager, 3), step(eager, eager, 3)
    assert wanted[0] != plain
    before = footprint()
    with bended.interject(place, lambda value: value * -3) as handle:
        for _ in range(2):
            assert (generated(bended, 3), step(bended, model, 3)) == wanted
    assert handle.report().changed
    assert footprint() == before
    assert generated(bended, 3) == plain
    eager.zero_grad()
    model.zero_grad()
    assert state(model) == state(eager)
    assert bended.why_live == ()


def test_what_an_adapter_adds_is_a_node() -> None:
    eager, bended = several(), bt.BendedModule(several())
    place = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.a"
    plain = bits(logits(eager))
    assert bits(logits(bended)) == plain
    with hooked(eager, place, lambda value: value * 0):
        wanted = bits(logits(eager))
    with bended.interject(place, lambda value: value * 0) as handle:
        assert [bits(logits(bended)) for _ in range(2)] == [wanted] * 2
    assert handle.report().fired == 2
    assert wanted != plain
    # Without any of what the adapter adds, the model is the one below it.
    with bended.interject([m for n, m in bended.model.named_modules() if "lora_B.a" in n], _zero):
        torch.testing.assert_close(logits(bended), logits(language_model()))


def _zero(value: Tensor) -> Tensor:
    return value * 0


def test_adapters_exchanged_switched_off_merged_and_removed_between_calls() -> None:
    eager, model = several(), several()
    bended = bt.BendedModule(model)
    seen: dict[str, Any] = {}

    def same(name: str) -> None:
        given = [bits(logits(bended, seed)) for seed in (0, 1, 0)]
        assert given == [bits(logits(eager, seed)) for seed in (0, 1, 0)], name
        seen[name] = given

    def both(name: str, change: Change) -> None:
        change(eager)
        change(model)
        same(name)

    same("a")
    both("b", lambda model: model.set_adapter("b"))
    both("c", lambda model: model.set_adapter("c"))
    both("a again", lambda model: model.set_adapter("a"))
    assert seen["a"] == seen["a again"]
    assert len({str(seen[name]) for name in "abc"}) == 3
    with eager.disable_adapter(), model.disable_adapter():
        same("off")
    with eager.disable_adapter():
        assert torch.equal(logits(eager), logits(language_model()))
    same("on")
    assert seen["on"] == seen["a"]
    both("merged", lambda model: model.merge_adapter())
    both("unmerged", lambda model: model.unmerge_adapter())

    def weighted(model: Any) -> None:
        model.add_weighted_adapter(["a", "c"], [0.5, 0.5], "both", combination_type="linear")
        model.set_adapter("both")

    both("weighted", weighted)

    def without(model: Any) -> None:
        model.set_adapter("a")
        model.delete_adapter("both")

    both("removed", without)
    assert state(model) == state(eager)
    assert bended.stats.live == 0
    assert bended.stats.replays > bended.stats.traces


def test_another_adapter_for_each_row_of_a_batch() -> None:
    eager, bended = several(), bt.BendedModule(several())
    for names in (["a", "__base__"], ["c", "a"], ["a", "__base__"], ["b", "b"]):
        assert bits(logits(bended, adapter_names=names)) == bits(logits(eager, adapter_names=names))
    assert bended.stats.replays


def test_an_adapter_added_by_the_library_itself() -> None:
    import peft
    from packaging.version import Version
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"transformers needs peft {MIN_PEFT_VERSION}, this is {peft.__version__}")

    def make() -> Any:
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            model = language_model()
            config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
            model.add_adapter(config, adapter_name="a")
            return model.eval()

    eager, model = make(), make()
    bended = bt.BendedModule(model)
    results = []
    for change in (
        lambda model: None,
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
    ):
        change(eager)
        change(model)
        results.append([bits(logits(eager, seed)) for seed in range(2)])
        assert [bits(logits(bended, seed)) for seed in range(2)] == results[-1]
        assert generated(bended, 0) == generated(eager, 0)
    assert results[0] == results[2] != results[1]
    assert bended.stats.live == 0


def test_what_is_merged_for_good_is_the_model_that_comes_of_it() -> None:
    merged, model = several().merge_and_unload(), several().merge_and_unload()
    bended = bt.BendedModule(model)
    for seed in (0, 1):
        assert bits(logits(bended, seed)) == bits(logits(merged, seed))
        assert generated(bended, seed) == generated(merged, seed)
    assert bended.stats.replays >= 5


# accelerate


@pytest.mark.parametrize("how", ["dispatched", "partly on disk", "offloaded", "offloaded to disk"])
def test_a_model_in_pieces(how: str, tmp_path: Path) -> None:
    """Weights that wait elsewhere are fetched by hooks, in place of `forward`; see the page."""
    eager, model = in_pieces(how, tmp_path / "one"), in_pieces(how, tmp_path / "two")
    bended = bt.BendedModule(model)
    with torch.no_grad():
        plain = bits(logits(language_model(tie_word_embeddings=False)))
        assert bits(logits(eager)) == plain
        for seed in (0, 0, 1, 2):
            assert bits(logits(bended, seed)) == bits(logits(eager, seed))
        if how == "dispatched":
            assert bended.stats.live == 0
            assert bended.stats.replays >= 2
        for seed in range(2):
            assert generated(bended, seed) == generated(eager, seed)
        place = "model.layers.0.mlp"
        with hooked(eager, place, _zero):
            wanted = bits(logits(eager, 5)), generated(eager, 5)
        with bended.interject(place, _zero) as handle:
            for _ in range(2):
                assert (bits(logits(bended, 5)), generated(bended, 5)) == wanted
        assert handle.report().changed
        log = bt.log_forward_pass(eager, (), texts())
        assert bits(log.output.logits) == bits(logits(eager))
    # What waits elsewhere is still there, and nothing was left on the way.
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert one.device == other.device
    assert bits(logits(bended).detach()) == plain


def test_a_hook_of_accelerate_that_changes_what_a_module_gives() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Doubled(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    eager, model = language_model(), language_model()
    bended = bt.BendedModule(model)
    plain = bits(logits(eager))
    assert bits(logits(bended)) == plain
    for one in (eager, model):
        add_hook_to_module(one.model.layers[1].mlp, Doubled())
    for _ in range(2):
        assert bits(logits(bended)) == bits(logits(eager)) != plain
    with hooked(eager, "model.layers.1.mlp", _zero):
        wanted = bits(logits(eager))
    with bended.interject("model.layers.1.mlp", _zero):
        assert bits(logits(bended)) == wanted
    for one in (eager, model):
        remove_hook_from_module(one.model.layers[1].mlp)
    assert bits(logits(bended)) == plain


# transformers and torch


@pytest.mark.parametrize("model_type", ["llama", "bert", "t5", "vit"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attentions_and_hidden_states(model_type: str, attention: str) -> None:
    from tools.hub.inputs import guessed

    eager, model = build(model_type), build(model_type)
    for one in (eager, model):
        one.set_attn_implementation(attention)
    _, inputs = guessed(eager)
    bended = bt.BendedModule(model)
    for options in (
        {}, {"output_hidden_states": True}, {"output_attentions": attention == "eager"},
        {"return_dict": False}, {"output_hidden_states": True, "return_dict": False}, {},
    ):  # fmt: skip
        for _ in range(2):
            with torch.no_grad():
                wanted = eager(**inputs, **options)
                given = bended(**inputs, **options)
            assert type(given) is type(wanted)
            assert bits(given) == bits(wanted), options
    assert bended.stats.replays >= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    eager, model = language_model().to(dtype), language_model().to(dtype)
    bended = bt.BendedModule(model)
    for seed in (0, 1):
        assert step(bended, model, seed) == step(eager, eager, seed)
        assert generated(bended, seed) == generated(eager, seed)
    with hooked(eager, "model.layers.0", _zero):
        wanted = step(eager, eager, 2)
    with bended.interject("model.layers.0", _zero):
        assert [step(bended, model, 2) for _ in range(2)] == [wanted] * 2


def test_autocast() -> None:
    eager, model = language_model(), language_model()
    bended = bt.BendedModule(model)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert step(bended, model, 0) == step(eager, eager, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    eager, model = language_model().train(), language_model().train()
    plain = step(eager, eager, 0)
    for one in (eager, model):
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        one.enable_input_require_grads()
    bended = bt.BendedModule(model)
    for seed in (0, 0, 1):
        assert step(bended, model, seed) == step(eager, eager, seed)
    assert step(bended, model, 0) == plain
    for one in (eager, model):
        one.gradient_checkpointing_disable()
        one.disable_input_require_grads()
    for _ in range(2):
        assert step(bended, model, 0) == plain
    assert bended.stats.replays >= 1


def test_linear_layers_quantised_by_torch() -> None:
    eager, model = language_model(), language_model()
    plain = bits(logits(eager).detach())
    one, other = (
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
        for model in (eager, model)
    )
    bended = bt.BendedModule(other)
    with torch.no_grad():
        for seed in (0, 1, 0):
            assert bits(logits(bended, seed)) == bits(logits(one, seed)) != plain
            assert generated(bended, seed) == generated(one, seed)
        with hooked(one, "model.layers.1.mlp.up_proj", _zero):
            wanted = bits(logits(one)), generated(one, 0)
        with bended.interject("model.layers.1.mlp.up_proj", _zero):
            for _ in range(2):
                assert (bits(logits(bended)), generated(bended, 0)) == wanted
    assert bended.stats.replays


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_says_that_nothing_can_be_inserted_in_it(reentrant: bool) -> None:
    from bendtrace.errors import InterjectionError

    eager, model = language_model().train(), language_model().train()
    for one in (eager, model):
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        one.enable_input_require_grads()
    bended = bt.BendedModule(model)
    step(bended, model, 0)
    with (
        pytest.raises(InterjectionError, match=r"checkpoint|one op"),
        bended.interject("model.layers.1.mlp", _zero),
    ):
        step(bended, model, 0)
    with hooked(eager, "lm_head", lambda value: value * 2):
        wanted = step(eager, eager, 0)
    with bended.interject("lm_head", lambda value: value * 2):
        assert [step(bended, model, 0) for _ in range(2)] == [wanted] * 2


def test_hidden_states_are_those_that_a_later_hook_leaves() -> None:
    """The library keeps them by hooks of its own, which are a part of the modules."""
    eager, bended = language_model(), bt.BendedModule(language_model())
    options = {**texts(), "output_hidden_states": True}
    for _ in range(3):
        assert bits(bended(**options)) == bits(eager(**options))
    with hooked(eager, "model.layers.0", _zero):
        wanted = bits(eager(**options))
    with bended.interject("model.layers.0", _zero):
        assert [bits(bended(**options)) for _ in range(3)] == [wanted] * 3
    assert bits(bended(**options)) == bits(eager(**options)) != wanted
