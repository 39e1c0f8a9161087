"""Small models for the tests of workflows: a transformer, and one whose depth depends on values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.promise import bits, footprint, state

VOCAB = 11
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        scores = self.query(h) @ self.key(h).mT / WIDTH**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + scores.masked_fill(~mask, -torch.inf).softmax(-1) @ self.value(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens to logits; two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Patient(nn.Module):
    """One block, as many times as the values want; a second one under a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(4):
            x = self.block(x)
            if x.norm() > 14:
                break
        if x[0, -1].sum() > x[0, 0].sum():
            x = torch.relu(self.rare(x))
        return self.lm_head(self.ln_f(x))


def made(kind: type[nn.Module], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().eval()


def tokens(batch: int = 2, length: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


@contextlib.contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """The models, the RNG and torch are afterwards as they were."""
    before = [state(model) for model in models]
    rng, prints = torch.get_rng_state(), footprint()
    hooks = [[dict(m._forward_hooks) for m in model.modules()] for model in models]
    yield
    assert [state(model) for model in models] == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert footprint() == prints
    assert [[dict(m._forward_hooks) for m in model.modules()] for model in models] == hooks


def same(one: Any, other: Any) -> None:
    assert bits(one) == bits(other)


@contextlib.contextmanager
def hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
