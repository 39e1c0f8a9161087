"""Changing a model while it generates, against native hooks: caches, beams, drafts, two stacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from tests.promise import bits, footprint, state

pytest.importorskip("transformers", reason="needs the test extra")

from tools.hub.building import build, quiet

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]  # the library's own

LONG = 5
CAUSAL = "AutoModelForCausalLM"


def prompt(batch: int = 2, length: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 24, (batch, length), generator=generator)


def generated(model: Any, seed: int, **options: Any) -> Any:
    """Return the bits of tokens, logits of each step, and the random state afterwards."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "max_new_tokens": LONG, "pad_token_id": 0, "eos_token_id": None, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    if not options.keys() & {"input_features", "input_ids"}:
        options["input_ids"] = prompt()
    with quiet():
        out = model.generate(**{**defaults, **options})
    return bits([out.sequences, out.logits, torch.get_rng_state()])


def changed(value: Any) -> Any:
    """Return something quite different, of a tensor or the first of a tuple."""
    return value * -3 if isinstance(value, Tensor) else (value[0] * -3, *value[1:])


@contextlib.contextmanager
def hooked(model: Any, name: str) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: changed(out))
    try:
        yield
    finally:
        handle.remove()


def assert_generates(model_type: str, auto: str, place: str, **options: Any) -> bt.BendedModule:
    """Without anything inserted the tokens are eager's; with it, those under a native hook."""
    eager, model = build(model_type, auto=auto), build(model_type, auto=auto)
    bended = bt.BendedModule(model)
    plain = [generated(eager, seed, **options) for seed in range(2)]
    assert [generated(bended, seed, **options) for seed in range(2)] == plain
    with hooked(eager, place):
        wanted = [generated(eager, seed, **options) for seed in range(2)]
    assert wanted != plain
    before = footprint()
    with bended.interject(place, changed) as handle:
        assert [generated(bended, seed, **options) for seed in range(2)] == wanted
    assert footprint() == before
    assert handle.report().changed
    assert generated(bended, 0, **options) == plain[0]
    assert state(model) == state(eager)
    return bended


WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "drawn beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
    "a prompt in chunks": {"prefill_chunk_size": 2},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 2, "input_ids": prompt(1)},
    "guidance": {"guidance_scale": 1.5},
    "a mark in the text": {},  # filled in below: the class of it is the library's
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(way: str) -> None:
    options = dict(WAYS[way])
    if way == "a mark in the text":
        from transformers import WatermarkingConfig

        options = {"watermarking_config": WatermarkingConfig(), "do_sample": True}
    bended = assert_generates("llama", CAUSAL, "model.layers.1.mlp", **options)
    assert bended.stats.live == 0
    assert bended.stats.replays > bended.stats.traces


def test_a_draft_model_is_changed_or_the_model_itself() -> None:
    eager, model, drafts = (build("llama", auto=CAUSAL, seed=seed) for seed in (0, 0, 1))
    bended, bended_drafts = (
        bt.BendedModule(model),
        bt.BendedModule(build("llama", auto=CAUSAL, seed=1)),
    )
    one = {"input_ids": prompt(1)}
    plain = generated(eager, 0, assistant_model=drafts, **one)
    assert generated(bended, 0, assistant_model=drafts, **one) == plain
    place = "model.layers.1.mlp"
    with hooked(eager, place):
        wanted = generated(eager, 0, assistant_model=drafts, **one)
    assert wanted != plain
    with bended.interject(place, changed):
        assert generated(bended, 0, assistant_model=drafts, **one) == wanted
    # A change of the drafts costs time, and gives the same tokens.
    with bended_drafts.interject(place, changed) as handle:
        tokens = generated(bended, 0, assistant_model=bended_drafts, **one)
    assert handle.report().fired
    assert tokens[1][0] == plain[1][0]


@pytest.mark.parametrize(
    ("model_type", "place"),
    [
        ("gemma3_text", "model.layers.1.mlp"),  # layers whose cache is a window
        ("mamba2", "backbone.layers.0.mixer"),  # a state instead of a cache
        ("jamba", "model.layers.1.feed_forward"),  # of both, and of experts
        ("gpt_oss", "model.layers.0.self_attn"),
    ],
)
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_caches_that_are_not_of_plain_attention(model_type: str, place: str, way: str) -> None:
    options = {"num_beams": 2} if way == "beams" else {}
    bended = assert_generates(model_type, CAUSAL, place, **options)
    assert bended.stats.live == 0, bended.why_live


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}])
@pytest.mark.parametrize(
    ("model_type", "place"),
    [
        ("bart", "model.decoder.layers.1.fc1"), ("bart", "model.encoder.layers.0.self_attn"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.o"),
    ],
)  # fmt: skip
def test_two_stacks(model_type: str, place: str, options: dict[str, Any]) -> None:
    assert_generates(model_type, "AutoModelForSeq2SeqLM", place, **options)


def test_speech() -> None:
    model = build("whisper", auto="AutoModelForSpeechSeq2Seq")
    config = model.config
    frames = 2 * config.max_source_positions
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, config.num_mel_bins, frames, generator=generator)
    options: dict[str, Any] = {"input_features": features, "decoder_input_ids": torch.tensor([[1]])}

    def tokens(model: Any) -> Any:
        torch.manual_seed(0)
        with quiet():
            return bits([model.generate(**options, max_new_tokens=LONG), torch.get_rng_state()])

    bended = bt.BendedModule(build("whisper", auto="AutoModelForSpeechSeq2Seq"))
    plain = tokens(model)
    assert tokens(bended) == plain
    for place in ("model.encoder.layers.1.fc2", "proj_out"):
        with hooked(model, place):
            wanted = tokens(model)
        with bended.interject(place, changed) as handle:
            assert tokens(bended) == wanted
        assert handle.report().changed
    assert wanted != plain
    assert tokens(bended) == plain


def test_only_some_steps_and_positions() -> None:
    """Steering from the third new token on, at the last position."""
    eager, bended = build("llama", auto=CAUSAL), bt.BendedModule(build("llama", auto=CAUSAL))
    vector = torch.linspace(-2, 2, 32)
    steps = [0]

    def steered(value: Tensor) -> Tensor | None:
        steps[0] += 1
        if steps[0] < 3:
            return None
        return torch.cat([value[:, :-1], value[:, -1:] + vector], 1)

    handle = eager.model.layers[0].register_forward_hook(lambda m, args, out: steered(out))
    wanted = generated(eager, 0)
    handle.remove()
    assert wanted != generated(eager, 0)
    with bended.interject("model.layers.0", steered):
        for _ in range(2):
            steps[0] = 0
            assert generated(bended, 0) == wanted
