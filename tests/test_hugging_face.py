"""Tiny randomly initialised Hugging Face models: traced, replayed, at other sizes, padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.promise import assert_promise

pytest.importorskip("transformers", reason="needs the test extra")

from tests.hf_models import MODELS, TinyModel


def _call(model: TinyModel, **sizes: int) -> Any:
    return lambda: ((), model.inputs(**sizes))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_traced_and_replayed_bitwise(model: TinyModel) -> None:
    same = _call(model)
    others = [_call(model, **sizes) for sizes in model.other_sizes]
    calls = [same, same, *others, same, *others]
    if model.padded is not None:
        calls += [lambda: ((), model.padded())] * 2
    bended = assert_promise(model.make, calls, mode=torch.no_grad)
    assert bended.why_live == ()
    assert bended.stats.live == 0
    # Known sizes and known masks are replayed, whatever was retraced for them at first: once
    # where that happens, a run is recorded anew with the states that the first one left out.
    assert bended.stats.replays >= 1 + len(others) + (model.padded is not None)


@pytest.mark.parametrize(
    "model", [m for m in MODELS if m.sizes_replay], ids=lambda model: model.name
)
def test_other_batch_sizes_and_lengths_replay_without_a_retrace(model: TinyModel) -> None:
    calls = [_call(model), *(_call(model, **sizes) for sizes in model.other_sizes)]
    bended = assert_promise(model.make, calls, mode=torch.no_grad)
    assert bended.stats.traces == 1
    assert bended.stats.replays == len(model.other_sizes)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_gradients_of_a_replay_are_those_of_eager(name: str) -> None:
    (model,) = (m for m in MODELS if m.name == name)
    torch.manual_seed(0)
    eager, wrapped = model.make(), model.make()
    import bendtrace as bt

    bended = bt.BendedModule(wrapped)
    for _ in range(3):
        for called in (eager, bended):
            output = called(**model.inputs())
            output[0].square().mean().backward()
    assert bended.stats.replays == 2
    gradients = {n: p.grad for n, p in wrapped.named_parameters()}
    for parameter_name, parameter in eager.named_parameters():
        given = gradients[parameter_name]
        assert (parameter.grad is None) == (given is None), parameter_name
        if given is not None:
            assert torch.equal(parameter.grad, given), parameter_name


def test_outputs_and_caches_come_back_as_the_same_types() -> None:
    (model,) = (m for m in MODELS if m.name == "llama")
    wrapped = model.make()
    import bendtrace as bt

    bended = bt.BendedModule(wrapped)
    with torch.no_grad():
        wanted = wrapped(**model.inputs())
        for _ in range(2):
            given = bended(**model.inputs())
            assert type(given) is type(wanted)
            assert list(given) == list(wanted)
            cache = given.past_key_values
            assert type(cache) is type(wanted.past_key_values)
            assert cache.get_seq_length() == wanted.past_key_values.get_seq_length()
    assert bended.stats.replays == 1
    # What is handed out is a new object each time, as from the model itself.
    assert bended(**model.inputs()).past_key_values is not cache
