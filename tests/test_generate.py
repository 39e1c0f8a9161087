"""Generating text through a BendedModule: eager's tokens, along recorded paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from tests.promise import bits, footprint, state
from tests.shares import some

pytest.importorskip("transformers", reason="needs the test extra")

import transformers

from tests.hf_models import MODELS, VOCAB

NAMES = ("gpt2", "llama")
LONG = 9  # new tokens; the first steps record, the others replay


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    (model,) = (m for m in MODELS if m.name == request.param)
    return model.make


def prompt(batch: int = 1, length: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def padded(length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Three prompts of different lengths, padded on the left."""
    ids, mask = prompt(3, length, seed), torch.ones(3, length, dtype=torch.long)
    for row, missing in enumerate((0, 1, 3)):
        ids[row, :missing], mask[row, :missing] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "without cache": {"use_cache": False},
    "stopping early": {"eos_token_id": list(range(3, 40))},
    "scores returned": {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    },
}  # fmt: skip


def generated(model: Any, seed: int, **options: Any) -> Any:
    """Return the bits of what is generated under a seed, and of the RNG state afterwards."""
    torch.manual_seed(seed)
    defaults = {"max_new_tokens": LONG, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    out = model.generate(**{**defaults, **options})
    if not isinstance(out, Tensor):
        out = {key: value for key, value in out.items() if key != CACHE}
    return bits([out, torch.get_rng_state()])


def same(eager: Any, bended: bt.BendedModule, seed: int = 0, **options: Any) -> int:
    """Generate with both and compare; return how many of the calls were replays."""
    replays, before = bended.stats.replays, footprint()
    assert generated(bended, seed, **options) == generated(eager, seed, **options)
    assert footprint() == before
    assert state(bended.model) == state(eager)
    return bended.stats.replays - replays


@pytest.mark.parametrize("way", some(WAYS, 2))
def test_tokens_are_those_of_eager_and_known_steps_are_replayed(
    make: Callable[[], Any], way: str
) -> None:
    eager, bended = make(), bt.BendedModule(make())
    same(eager, bended, 0, input_ids=prompt(), **WAYS[way])
    stats = bended.stats
    assert stats.traces >= 1
    assert stats.live == 0, bended.why_live
    steps = stats.traces + stats.replays
    if way != "stopping early":
        assert steps == LONG
        assert stats.replays >= LONG - 4, (stats, bended.last_mismatch)
    # A second text of the same length needs no new path.
    assert same(eager, bended, 1, input_ids=prompt(seed=1), **WAYS[way]) >= 1
    if way != "stopping early":
        assert bended.stats.replays == 2 * LONG - bended.stats.traces


@pytest.mark.more
def test_hidden_states_and_attentions_of_each_step(make: Callable[[], Any]) -> None:
    """The library gathers them with forward hooks, which its first call puts on the modules."""
    eager, bended = make(), bt.BendedModule(make())
    options = {"output_hidden_states": True, "output_attentions": True}
    eager.set_attn_implementation("eager")
    bended.set_attn_implementation("eager")
    for seed in range(2):
        ids = prompt(seed=seed)
        same(eager, bended, seed, input_ids=ids, return_dict_in_generate=True, **options)
    assert bended.stats.live == 1
    assert any("the run puts forward hooks on" in reason for reason in bended.why_live)
    assert bended.stats.replays >= LONG


@pytest.mark.more
def test_prompts_of_other_lengths_and_batches(make: Callable[[], Any]) -> None:
    eager, bended = make(), bt.BendedModule(make())
    same(eager, bended, input_ids=prompt())
    traces = bended.stats.traces
    for batch, length in ((1, 7), (2, 5), (3, 2), (1, 11), (2, 7)):
        assert same(eager, bended, input_ids=prompt(batch, length)) >= LONG - 3, (
            batch, length, bended.last_mismatch,
        )  # fmt: skip
    assert bended.stats.traces <= traces + 4, bended.last_mismatch
    assert bended.stats.live == 0


@pytest.mark.more
@pytest.mark.parametrize("way", some(["greedy", "sampling", "beams"], 3))
def test_a_padded_batch(make: Callable[[], Any], way: str) -> None:
    eager, bended = make(), bt.BendedModule(make())
    for seed, length in ((0, 6), (1, 6), (2, 9)):
        replays = same(eager, bended, seed, **padded(length, seed), **WAYS[way])
    assert replays >= LONG - 3, bended.last_mismatch
    assert bended.stats.live == 0


@pytest.mark.more
def test_a_padded_batch_after_one_without_padding(make: Callable[[], Any]) -> None:
    eager, bended = make(), bt.BendedModule(make())
    for _ in range(2):
        same(eager, bended, input_ids=prompt(3, 6))
        replays = same(eager, bended, **padded())
    assert replays == LONG


def test_the_static_cache_of_the_library(make: Callable[[], Any]) -> None:
    eager, bended = make(), bt.BendedModule(make())
    options = {"cache_implementation": "static", "disable_compile": True}
    for seed in range(3):
        same(eager, bended, seed, input_ids=prompt(seed=seed), **options)
    assert bended.stats.replays + bended.stats.live >= LONG


@pytest.mark.more
@pytest.mark.parametrize("name", ["t5", "mamba", "mixtral"])
@pytest.mark.parametrize("way", ["greedy", "sampling"])
def test_other_architectures(name: str, way: str) -> None:
    (model,) = (m for m in MODELS if m.name == name)
    eager, bended = model.make(), bt.BendedModule(model.make())
    for seed in range(2):
        replays = same(eager, bended, seed, input_ids=prompt(2, seed=seed), **WAYS[way])
    assert replays == LONG
    assert bended.stats.live == 0


@pytest.mark.more
@pytest.mark.parametrize("way", ["a draft model", "drafts from the prompt", "guidance"])
def test_several_calls_for_each_token_or_several_tokens_a_call(way: str) -> None:
    (model,) = (m for m in MODELS if m.name == "llama")
    eager, bended, draft = model.make(), bt.BendedModule(model.make()), model.make()
    options = {
        "a draft model": {"assistant_model": draft},
        "drafts from the prompt": {"prompt_lookup_num_tokens": 2},
        "guidance": {"guidance_scale": 1.5},
    }[way]
    for seed in range(2):
        same(eager, bended, seed, input_ids=prompt(seed=seed), **options)
    assert bended.stats.replays >= LONG // 2
    assert bended.stats.live == 0


@pytest.mark.more
def test_two_bended_models_generate_in_turn() -> None:
    pairs = [(m.make(), bt.BendedModule(m.make())) for m in MODELS if m.name in NAMES]
    for seed in range(3):
        for eager, bended in pairs:
            same(eager, bended, seed, input_ids=prompt(seed=seed), **WAYS["sampling"])
    assert all(bended.stats.replays >= 2 * LONG for _, bended in pairs)


def test_generating_after_calls_of_the_module_itself(make: Callable[[], Any]) -> None:
    eager, bended = make(), bt.BendedModule(make())
    for _ in range(2):
        for call in (eager, bended):
            call(input_ids=prompt(), labels=prompt()).loss.backward()
        same(eager, bended, input_ids=prompt())
    assert bended.stats.replays >= LONG
    gradients = zip(eager.parameters(), bended.parameters(), strict=True)
    assert all(bits(here.grad) == bits(there.grad) for here, there in gradients)


# Loops written by hand


# How forward names its cache: `cache` since transformers 5.24, `past_key_values` before.
CACHE = next(
    name
    for name in inspect.signature(transformers.GPT2LMHeadModel.forward).parameters
    if name in ("cache", "past_key_values")
)


def _greedy(model: Any, ids: Tensor, cache: Any) -> Iterator[Any]:
    """Decode with one cache that grows."""
    for _ in range(LONG):
        out = model(ids, use_cache=True, **{CACHE: cache})
        ids = out.logits[:, -1:].argmax(-1)
        yield bits([ids, out.logits, out[CACHE]])
        assert out[CACHE] is cache


def _cache_of_the_output(model: Any, ids: Tensor, cache: Any) -> Iterator[Any]:
    """Decode with the cache that each call gives back."""
    cache = None
    for _ in range(LONG):
        out = model(input_ids=ids, use_cache=True, **{CACHE: cache})
        ids, cache = out.logits[:, -1:].argmax(-1), out[CACHE]
        yield bits([ids, out.logits, cache])


def _whole_text_each_time(model: Any, ids: Tensor, cache: Any) -> Iterator[Any]:
    for _ in range(LONG):
        out = model(ids, use_cache=False)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        yield bits([ids, out.logits])


def _with_a_mask(model: Any, ids: Tensor, cache: Any) -> Iterator[Any]:
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    for _ in range(LONG):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        ids = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        yield bits([ids, out.logits, cache])


def _cropped_and_reordered(model: Any, ids: Tensor, cache: Any) -> Iterator[Any]:
    """Assisted decoding and beam search cut and reorder the cache between the calls."""
    for step in range(LONG):
        out = model(ids, use_cache=True, **{CACHE: cache})
        ids = out.logits[:, -1:].argmax(-1)
        if step % 3 == 2:
            cache.crop(-2)
        cache.reorder_cache(torch.arange(ids.shape[0]).flip(0))
        yield bits([ids, cache])


LOOPS = [_greedy, _cache_of_the_output, _whole_text_each_time, _with_a_mask, _cropped_and_reordered]


@pytest.mark.parametrize("grad", some([True, False], 2, start=1), ids=["grad", "no_grad"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.strip("_"))
def test_a_loop_written_by_hand(make: Callable[[], Any], loop: Any, grad: bool) -> None:
    eager, bended = make(), bt.BendedModule(make())
    with torch.set_grad_enabled(grad):
        for seed in range(2):
            replays = bended.stats.replays
            logs = []
            for model in (eager, bended):
                torch.manual_seed(seed)
                logs.append(list(loop(model, prompt(2, seed=seed), transformers.DynamicCache())))
            assert logs[0] == logs[1]
    assert bended.stats.replays - replays >= LONG - 2, (bended.stats, bended.last_mismatch)
    assert bended.stats.live == 0, bended.why_live


# Methods of other models that call their forward


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, 4), nn.GRUCell(4, 4), nn.Linear(4, 9)

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embed(token), h)
        return self.out(h), h

    def decode(self, token: Tensor, steps: int) -> list[int]:
        h, tokens = torch.zeros(1, 4), []
        for _ in range(steps):
            logits, h = self(token, h)
            token = logits.argmax(-1)
            tokens.append(int(token))
        return tokens

    def twice(self, token: Tensor, steps: int) -> list[int]:
        return self.decode(token, steps) + self.decode(token + 1, steps)


@pytest.mark.parametrize("method", ["decode", "twice"])
def test_a_method_of_the_model_that_calls_it_replays_its_forward(method: str) -> None:
    torch.manual_seed(0)
    eager = Decoder()
    bended = bt.BendedModule(Decoder())
    bended.load_state_dict(eager.state_dict())
    for start in range(3):
        token = torch.tensor([start])
        with torch.no_grad():
            assert getattr(bended, method)(token, 6) == getattr(eager, method)(token, 6)
    assert bended.stats.traces == 1
    assert bended.stats.replays == 3 * 6 * (1 + (method == "twice")) - 1


def test_an_insertion_applies_in_some_steps() -> None:
    torch.manual_seed(0)
    model = Decoder()
    bended, token, numbers = bt.BendedModule(model), torch.tensor([1]), iter(range(99))

    def by_hand(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output + 2 if next(numbers) in (1, 2) else None

    with torch.no_grad():
        plain = model.decode(token, 6)
        with model.embed.register_forward_hook(by_hand):
            wanted = model.decode(token, 6)
        assert wanted != plain
        for calls in ((1, 2), range(1, 3), lambda number: 0 < number < 3):
            with bended.interject("embed", lambda value: value + 2, calls=calls) as handle:
                assert bended.decode(token, 6) == wanted
                assert bended.decode(token, 6) == plain  # the count goes on
            assert handle.report().fired == 12
        assert bended.decode(token, 6) == plain
    assert bended.stats.live == 0


def test_gradients_and_inputs_are_changed_in_some_calls() -> None:
    class Doubled(bt.Interjection):
        def before(self, at: Any, inputs: Any) -> Any:
            return bt.Inputs((inputs[0] * 2,))

        def backward(self, at: Any, grad_input: Any, grad_output: Any) -> Any:
            return tuple(None if grad is None else grad * 10 for grad in grad_input)

    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    found = []
    with bended.interject("0", Doubled(), calls=1):
        outs = [(x := torch.ones(2, requires_grad=True), bended(x)) for _ in range(3)]
        for x, out in outs:
            out.sum().backward()
            found.append((out.tolist()[0], x.grad.tolist()[0]))
    assert found == [(1.0, 1.0), (2.0, 20.0), (1.0, 1.0)]
    for wrong in (-1, "x"):
        with pytest.raises(InputError, match="calls="):
            bended.interject("0", Doubled(), calls=wrong)  # type: ignore[arg-type]
