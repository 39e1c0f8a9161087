"""Types of models of `transformers` at random initialisation, each in a small size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bendtrace as bt
from bendtrace.errors import InterjectionError
from tests.promise import state
from tests.shares import some

pytest.importorskip("transformers", reason="needs the test extra")

from tools.benchmarks.memory import peak_of
from tools.hub.building import CHOSEN, build, quiet, types
from tools.hub.checking import copied
from tools.hub.heads import HEADS, labelled, trained, types_with
from tools.hub.inputs import guessed
from tools.hub.sweeping import row, sweep

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of each version others

SHARES = 16


# A few that are small; `--all` has the others.
QUICK = {"albert", "bloom", "decision_transformer", "dinov2", "granitemoe", "qwen3"}


@pytest.mark.more
@pytest.mark.parametrize("model_type", some(CHOSEN, chosen=QUICK))
def test_a_model_is_itself(model_type: str) -> None:
    """Called, replayed, logged, printed, looked at and set to zero in the middle."""
    found = row(model_type)
    assert found.outcome == "itself", found
    assert found.checked is not None
    assert found.checked.patched is not None
    assert found.checked.ops > 20


@pytest.mark.more
@pytest.mark.parametrize("model_type", some(CHOSEN, chosen=QUICK | {"switch_transformers"}))
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_replay_holds_what_the_model_holds(model_type: str, is_padded: bool) -> None:
    """Counted op by op, without gradients; of eager's peak at most 1.1."""
    with quiet(), torch.no_grad():
        model = build(model_type)
        _, inputs = guessed(model)
        if is_padded:
            if "attention_mask" not in inputs or inputs["attention_mask"].dim() != 2:
                pytest.skip("the model is given no mask")
            inputs["attention_mask"][0, -2:] = 0
        bended = bt.BendedModule(model)
        for called in (model, bended, bended):
            called(**copied(inputs))
        eager, kept = peak_of(lambda: model(**copied(inputs)))
        replay, left = peak_of(lambda: bended(**copied(inputs)))
    assert bended.stats.replays or bended.stats.live
    assert left <= kept
    assert replay <= 1.1 * eager, (replay, eager)


# Decoders that are given a cache, with what goes into their configurations.
EIGHT = {"num_hidden_layers": 8}
CACHED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 8, "n_positions": 128}, "llama": EIGHT, "mixtral": EIGHT,
    "qwen3": {**EIGHT, "layer_types": ["full_attention"] * 8}, "bloom": {"n_layer": 8},
    "falcon": EIGHT, "gemma3_text": {**EIGHT, "layer_types": ["full_attention"] * 8},
    "gpt_neox": EIGHT, "deepseek_v3": EIGHT, "qwen3_moe": EIGHT, "granitemoe": EIGHT,
    "opt": {**EIGHT, "max_position_embeddings": 128}, "phi": EIGHT,
}  # fmt: skip


def given_a_cache(model: Any, kind: str) -> dict[str, Any]:
    """What a step of decoding is given, behind 96 tokens."""
    from transformers import DynamicCache

    torch.manual_seed(0)
    ids = torch.randint(4, 24, (2, 97))
    cache = DynamicCache(config=model.config) if kind == "config" else DynamicCache()
    model(input_ids=ids[:, :96], past_key_values=cache)
    inputs = {"input_ids": ids[:, 96:], "past_key_values": cache}
    if kind == "mask":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :5] = 0
    return inputs


@pytest.mark.parametrize("kind", ["config", "mask"])
@pytest.mark.parametrize("model_type", some(CACHED, chosen={"gpt2", "llama", "mixtral", "qwen3"}))
@pytest.mark.more
def test_a_replay_holds_a_cache_once(model_type: str, kind: str) -> None:
    """A cache is given, and made longer; counted from the beginning of the call."""
    with quiet(), torch.no_grad():
        model = build(model_type, auto="AutoModelForCausalLM", **CACHED[model_type])
        bended = bt.BendedModule(model)
        for called in (model, bended, bended):
            called(**given_a_cache(model, kind))
        one, other = given_a_cache(model, kind), given_a_cache(model, kind)
        cache = sum(
            layer.keys.nbytes + layer.values.nbytes for layer in one["past_key_values"].layers
        )
        eager, kept = peak_of(lambda: model(**one))
        replay, left = peak_of(lambda: bended(**other))
    assert bended.stats.replays == 2
    assert eager > cache / 2
    assert left <= kept
    assert replay <= 1.1 * eager, (replay / eager, eager)
    ours, theirs = (given["past_key_values"].layers for given in (one, other))
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine.keys, its.keys)
        assert torch.equal(mine.values, its.values)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_no_model_is_another(share: int) -> None:
    """All types, in shares that can run side by side; `python -m tools.hub` prints the table."""
    rows = list(sweep(types()[share::SHARES]))
    assert [str(found) for found in rows if found.outcome == "wrong"] == []
    assert sum(found.outcome == "itself" for found in rows) > 0.7 * len(rows)


def test_a_model_that_computes_its_own_gradients() -> None:
    """The layers of a Reformer run inside of an `autograd.Function`, one op where it counts."""
    model = build("reformer")
    bended = bt.BendedModule(model)
    with quiet():
        _, inputs = guessed(build("reformer"))
    inside = "encoder.layers.0.feed_forward.output"
    with torch.no_grad():
        bended(**inputs)
        for where in (inside, "embeddings"):
            with bended.interject(where, lambda value: value * 0):
                given = [bended(**inputs)[0] for _ in range(2)]
            layer = model.get_submodule(where)
            hook = layer.register_forward_hook(lambda module, args, out: out * 0)
            wanted = model(**inputs)[0]
            hook.remove()
            assert all(torch.equal(one, wanted) for one in given)
    with (
        pytest.raises(InterjectionError, match="recorded as one op"),
        bended.interject(inside, lambda value: value * 0),
    ):
        bended(**inputs)


# Heads, with labels, in training mode with dropout

TRAINED = [
    ("AutoModelForCausalLM", "gpt_neox"), ("AutoModelForCausalLM", "qwen2_moe"),
    ("AutoModelForCausalLM", "mamba2"), ("AutoModelForMaskedLM", "roberta"),
    ("AutoModelForMaskedLM", "deberta"), ("AutoModelForSequenceClassification", "electra"),
    ("AutoModelForSequenceClassification", "llama"), ("AutoModelForTokenClassification", "bert"),
    ("AutoModelForQuestionAnswering", "distilbert"), ("AutoModelForMultipleChoice", "xlnet"),
    ("AutoModelForSeq2SeqLM", "bart"), ("AutoModelForSeq2SeqLM", "t5"),
    ("AutoModelForSpeechSeq2Seq", "whisper"), ("AutoModelForImageClassification", "convnextv2"),
    ("AutoModelForImageClassification", "swin"), ("AutoModelForObjectDetection", "detr"),
    ("AutoModelForSemanticSegmentation", "segformer"), ("AutoModelForAudioClassification", "wavlm"),
    ("AutoModelForCTC", "wav2vec2"),
]  # fmt: skip


def assert_trains(auto: str, model_type: str) -> bt.BendedModule:
    """Losses, outputs, gradients, state and random numbers of steps are those of eager."""
    options: dict[str, Any] = {"vocab_size": 32} if auto == "AutoModelForCTC" else {}
    eager, model, other = (build(model_type, auto=auto, **options) for _ in range(3))
    with quiet():
        first, second = (labelled(auto, other, seed)[1] for seed in range(2))
    bended = bt.BendedModule(model.train())
    eager.train()
    for seed, inputs in enumerate((first, first, second, first)):
        with quiet():
            wanted = trained(eager, eager, inputs, seed)
            assert trained(bended, model, inputs, seed) == wanted, f"step {seed}"
    assert state(model) == state(eager)
    return bended


@pytest.mark.more
@pytest.mark.parametrize(("auto", "model_type"), some(TRAINED, 8))
def test_training_with_labels(auto: str, model_type: str) -> None:
    stats = assert_trains(auto, model_type).stats
    assert stats.traces + stats.live >= 1
    if auto not in ("AutoModelForObjectDetection", "AutoModelForAudioClassification",
                    "AutoModelForCTC"):  # fmt: skip
        assert stats.replays >= 2  # the others compute with numpy in training


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_training_every_model_with_labels(share: int) -> None:
    every = [(auto, name) for auto in HEADS for name in types_with(auto)][share::SHARES]
    done = 0
    for auto, model_type in every:
        try:
            with quiet():
                model = build(model_type, auto=auto)
                trained(model.train(), model, labelled(auto, model)[1], 0)
        except Exception:  # what is wrong with it before bendtrace comes in
            continue
        assert_trains(auto, model_type)
        done += 1
    assert done > 0.6 * len(every)
