"""The models that are measured, of random weights, and inputs for them.

Each is written as one would write it, in plain Python: none is made easy for any of the ways.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CASES", "Case", "case_of", "inputs_of"]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        shape = (batch, length, self.heads, size // self.heads)
        q, k, v = self.project(x).split(size, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, size))


class Block(nn.Module):
    """Attention and a perceptron, with residual connections."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.attention, self.before = Attention(size, heads), nn.LayerNorm(size)
        self.first, self.second = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.between = nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        hidden = functional.gelu(self.first(self.between(x)), approximate="tanh")
        return x + self.dropout(self.second(hidden))


class Transformer(nn.Module):
    """A language model as GPT-2 is one, with the embedding as its head."""

    def __init__(self, vocabulary: int, size: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, size), nn.Embedding(longest, size)
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, given: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, size, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(size)
        self.conv2 = nn.Conv2d(size, size, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(size)
        self.past: nn.Module | None = None
        if stride != 1 or given != size:
            self.past = nn.Sequential(
                nn.Conv2d(given, size, 1, stride, bias=False), nn.BatchNorm2d(size)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        if self.past is not None:
            x = self.past(x)
        y += x
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(Residual(a, b, s), Residual(b, b, 1)) for a, b, s in sizes)
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        x = self.stages(functional.max_pool2d(x, 3, 2, 1))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class LoopRNN(nn.Module):
    """A cell written out in Python, once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(xs.shape[1], 64)
        for x in xs:
            h = torch.tanh(self.wx(x) + self.wh(h))
        return h


class Mixture(nn.Module):
    """Layers of experts: each is given the tokens that are routed to it, in a Python loop."""

    def __init__(self, size: int = 64, experts: int = 8, layers: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.routers = nn.ModuleList(nn.Linear(size, experts) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))
                for _ in range(experts)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.layers, strict=True):
            weights, chosen = router(x).softmax(-1).topk(self.chosen, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows, ranks = torch.where(chosen == number)
                if rows.numel() == 0:
                    continue
                given = expert(x[rows]) * weights[rows, ranks, None]
                out.index_add_(0, rows, given)
            x = x + out
        return x


class MaskedMixture(Mixture):
    """The same with masks: an expert that no token is routed to is passed over."""

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.layers, strict=True):
            weights, chosen = router(x).softmax(-1).topk(self.chosen, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                here = chosen == number
                if here.any():
                    out = out + expert(x) * (weights * here).sum(-1, keepdim=True)
            x = x + out
        return x


class Gated(nn.Module):
    """Layers with an `if` on the values of each."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.relu() if x.mean() > 0 else x * 0.5
        return x


class Solver(nn.Module):
    """Goes on until what it looks for changes no more."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(32, 32)
        nn.init.orthogonal_(self.step.weight, 0.7)

    def forward(self, x: Tensor, tolerance: float = 1e-3) -> Tensor:
        found, change = torch.zeros_like(x), torch.tensor(1.0)
        while change > tolerance:
            better = torch.tanh(self.step(found) + x)
            change = (better - found).abs().max()
            found = better
        return found


class Decoder(nn.Module):
    """Greedy decoding: token by token, until each row has come to its end."""

    def __init__(self, steps: int = 16) -> None:
        super().__init__()
        self.model = Transformer(101, 64, 2, 4, 64)
        self.steps, self.end = steps, 2

    def forward(self, ids: Tensor) -> Tensor:
        ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        for _ in range(self.steps):
            token = self.model(ids)[:, -1].argmax(-1)
            ids = torch.cat((ids, token[:, None]), dim=1)
            ended = ended | (token == self.end)
            if ended.all():
                break
        return ids


@dataclass(frozen=True)
class Case:
    """A model to measure.

    Attributes:
        name: what stands in the tables.
        make: makes it.
        shape: of its only input.
        tokens: how many tokens there are where the input is tokens, else 0.
        elsewhere: makes an input that goes another way than the one of seed 0.
        quick: whether it is small enough for a look.
        package: what has to be installed for it.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    elsewhere: Callable[[Tensor], Tensor] | None = None
    quick: bool = False
    package: str | None = None

    def is_installed(self) -> bool:
        """Whether there is what it needs."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def model(self) -> nn.Module:
        """Return the model in eval mode, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()


def inputs_of(case: Case, seed: int = 0) -> tuple[Tensor]:
    """Return the arguments to call a model with."""
    generator = torch.Generator().manual_seed(seed)
    if case.tokens:
        return (torch.randint(3, case.tokens, case.shape, generator=generator),)
    return (torch.randn(case.shape, generator=generator),)


class Encoder(nn.Module):
    """A tiny model of transformers, of which only tokens are asked for.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        from tests.hf_models import MODELS

        self.model = next(model for model in MODELS if model.name == name).make()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids, torch.ones_like(ids))[0]
        return found


CASES = (
    Case("tiny transformer", lambda: Transformer(101, 64, 2, 4, 64), (2, 12), 101, quick=True),
    Case("GPT-2 small", lambda: Transformer(50257, 768, 12, 12, 1024), (1, 16), 50257),
    Case("ResNet-18", ResNet, (1, 3, 64, 64)),
    Case("loop RNN, 100 steps", LoopRNN, (100, 4, 64)),
    Case("MoE", Mixture, (16, 64), elsewhere=lambda x: x.flip(1) * 3),
    Case("MoE, masked", MaskedMixture, (16, 64), elsewhere=lambda x: x.flip(1) * 3),
    Case("20 gated layers", Gated, (4, 64), elsewhere=lambda x: -x, quick=True),
    Case("solver", Solver, (8, 32)),
    Case("greedy decoding", Decoder, (2, 4), 101),
    Case("tiny BERT", lambda: Encoder("bert"), (2, 12), 99, package="transformers"),
    Case("tiny Llama", lambda: Encoder("llama"), (2, 12), 99, package="transformers"),
)


def case_of(name: str) -> Case:
    """Return a case by its name, or by the beginning of it.

    Raises:
        ValueError: if there is none.
    """
    for case in CASES:
        if case.name == name or case.name.startswith(name):
            return case
    raise ValueError(f"no model is called {name!r}: there are {', '.join(c.name for c in CASES)}")
