"""A language model of Hugging Face's, sharded and in tensor parallel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import bendtrace as bt
from tests.distributed.common import everywhere, full, seeded

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip


def _tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, 64, (2, 5 + number % 2), generator=generator)


def _alone() -> Any:
    return seeded(lambda: LlamaForCausalLM(CONFIG)).eval()


def _compare(bended: bt.BendedModule, close: Callable[[Tensor, Tensor], bool]) -> None:
    alone = bt.BendedModule(_alone())
    for number in range(4):
        tokens = _tokens(number)
        found, expected = (m(input_ids=tokens, labels=tokens) for m in (bended, alone))
        assert close(full(found.logits), expected.logits)
        found.loss.backward()
        expected.loss.backward()
    gradients = zip(bended.named_parameters(), alone.parameters(), strict=True)
    for (name, mine), other in gradients:
        assert torch.allclose(full(mine.grad), other.grad, atol=1e-5), name
    assert bended.why_live == ()
    assert bended.stats.replays >= 2
    where = "model.layers_1.mlp"
    with (
        bended.interject(where, lambda value: value * -2) as handle,
        alone.interject(where, lambda value: value * -2),
        torch.no_grad(),
    ):
        for number in range(2):
            found, expected = (m(input_ids=_tokens(number)).logits for m in (bended, alone))
            assert close(full(found), expected)
        assert handle.report().fired == 2


def check_a_sharded_language_model_gives_what_it_gives_alone() -> None:
    model = _alone()
    for layer in model.model.layers:
        fully_shard(layer)
    _compare(bt.BendedModule(fully_shard(model)), torch.equal)


def check_a_tensor_parallel_language_model_gives_what_it_gives_alone() -> None:
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(everywhere(mine)[0])
        if dist.get_rank() == 0:
            _alone().save_pretrained(folder)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        dist.barrier()
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    bended = bt.BendedModule(model)

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, atol=1e-5)

    _compare(bended, close)
    alone = _alone()
    tokens = _tokens(0)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    before = bended.stats.replays
    assert torch.equal(bended.generate(tokens, **options), alone.generate(tokens, **options))
    assert bended.stats.replays > before
