"""Small models for the tests of causal workflows, and what is done to them by native hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 8, 2, 11, 5


class Attention(nn.Module):
    """Causal self-attention with its heads side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and perceptron."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """A decoder with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits in shape (batch, length, words)."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Halving(nn.Module):
    """Takes steps until its state is small, and then one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.step = nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return values in shape (batch, 3)."""
        h = self.start(x)
        steps = 0
        while h.norm() > 1 and steps < 4:
            h = torch.tanh(self.step(h)) * 0.9
            steps += 1
        if h.sum() > 0:
            return self.up(torch.relu(h))
        return self.down(torch.sigmoid(h))


Put = Callable[[str, int, Tensor], Tensor]


def halving_by_hand(model: Halving, x: Tensor, put: Put) -> Tensor:
    """Do what `Halving` does, with each value handed to a function: its name, pass, itself."""
    h = put("start", 0, model.start(x))
    number = 0
    while h.norm() > 1 and number < 4:
        stepped = put("step", number, model.step(h))
        h = put("mul", number, put("tanh", number, torch.tanh(stepped)) * 0.9)
        number += 1
    if h.sum() > 0:
        return put("up", 0, model.up(put("relu", 0, torch.relu(h))))
    return put("down", 0, model.down(put("sigmoid", 0, torch.sigmoid(h))))


def transformer() -> Transformer:
    """Return the same small transformer each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Transformer().eval()


def halving() -> Halving:
    """Return the same model that depends on its data each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Halving().eval()


def gpt2(**config: Any) -> nn.Module:
    """Return a small GPT-2 at random initialisation."""
    import transformers

    made = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=16, bos_token_id=1,
        eos_token_id=2, **config,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return transformers.GPT2LMHeadModel(made).eval()


def inputs_of_halving(model: Halving) -> dict[tuple[str, int], Tensor]:
    """Return an input for each branch and number of steps that comes up."""
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[str, int], Tensor] = {}
    for scale in (0.3, 1.0, 3.0, 6.0) * 40:
        x = torch.randn(1, 4, generator=generator) * scale
        names: list[str] = []
        halving_by_hand(model, x, lambda name, _, v, names=names: names.append(name) or v)
        found.setdefault((names[-1], names.count("step")), x)
    return found


CLEAN = torch.tensor([[1, 4, 2, 7, 3]])
CORRUPTED = torch.tensor([[1, 9, 2, 7, 3]])


def logit_difference(output: Any) -> Tensor:
    """Return the difference of two logits at the last position."""
    logits = output if isinstance(output, Tensor) else output.logits
    return logits[0, -1, 3] - logits[0, -1, 5]


@contextmanager
def hooked(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Exchange what a module gives, the first of it if it is a tuple, by a native hook."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        made = change(output[0])
        return None if made is None else (made, *output[1:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def pre_hooked(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Exchange the first argument of a module by a native hook."""

    def hook(_: nn.Module, given: tuple[Any, ...]) -> Any:
        made = change(given[0])
        return None if made is None else (made, *given[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def kept(model: Callable[..., Any], module: nn.Module, *args: Any, inputs: bool = False) -> Tensor:
    """Return what a module gives, or is given, in a call of a model, by a native hook."""
    found: list[Tensor] = []
    with (pre_hooked if inputs else hooked)(module, lambda value: found.append(value.detach())):
        model(*args)
    return found[0].clone()


def with_part(value: Tensor, index: Any, given: Tensor) -> Tensor:
    """Return a copy of a tensor with a part of another one in it."""
    made = value.clone()
    made[index] = given[index]
    return made
