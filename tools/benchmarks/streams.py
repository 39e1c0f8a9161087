"""The models that are fed streams of random inputs: each input may take another path.

Each is written as one would write it, in plain Python. `feeding.py` measures them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

__all__ = ["STREAMS", "Stream", "normal", "scaled", "stream_of"]

WIDTH = 16


def _linears(number: int, given: int = WIDTH, made: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(given, made) for _ in range(number))


class Gated(nn.Module):
    """Layers that each choose by a mean what they do next."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gates, self.others = _linears(layers), _linears(layers)

    def forward(self, x: Tensor) -> Tensor:
        for gate, other in zip(self.gates, self.others, strict=True):
            h = gate(x)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(other(h)) + x
        return x


class Mixture(nn.Module):
    """Four layers of eight experts. A Python loop calls those that tokens are routed to."""

    def __init__(self, layers: int = 4, experts: int = 8) -> None:
        super().__init__()
        self.routers = _linears(layers, WIDTH, experts)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
                for _ in range(experts)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.layers, strict=True):
            weights, chosen = router(x).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows, ranks = torch.where(chosen == number)
                if rows.numel() == 0:
                    continue
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, ranks, None])
            x = x + out
        return x


class Shrinking(nn.Module):
    """Makes its input smaller until it is small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tolerance: float) -> Tensor:
        while x.norm() > tolerance:
            x = x * (0.5 + 0.4 * torch.tanh(self.step(x)))
        return x


class Counting(Shrinking):
    """The same, and counts the steps."""

    def forward(self, x: Tensor, tolerance: float) -> tuple[Tensor, int]:  # type: ignore[override]
        steps = 0
        while x.norm() > tolerance:
            x = x * (0.5 + 0.4 * torch.tanh(self.step(x)))
            steps += 1
        return x, steps


class EarlyExit(nn.Module):
    """Twelve layers, after each of which the model may be sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = _linears(12), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * 3)
            chances = self.head(x).softmax(-1)
            if chances.max() > 0.6:
                break
        return chances


class Suppression(nn.Module):
    """Non-maximum suppression: drops the boxes that overlap with better ones."""

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        left, top, right, bottom = boxes.unbind(1)
        areas = (right - left) * (bottom - top)
        order, kept = scores.argsort(descending=True), []
        while order.numel() > 0:
            best = order[0]
            kept.append(best)
            if order.numel() == 1:
                break
            rest = order[1:]
            width = torch.minimum(right[best], right[rest]) - torch.maximum(left[best], left[rest])
            height = torch.minimum(bottom[best], bottom[rest]) - torch.maximum(top[best], top[rest])
            shared = width.clamp(min=0) * height.clamp(min=0)
            order = rest[shared / (areas[best] + areas[rest] - shared) <= 0.5]
        return torch.stack(kept)


class Decoding(nn.Module):
    """Greedy decoding with a GRU. The tokens are Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(20, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 20)

    def forward(self, h: Tensor) -> list[float]:
        token = torch.zeros(1, dtype=torch.long)
        tokens: list[float] = []
        while len(tokens) < 40:
            h = self.cell(self.embedding(token), h)
            token = (self.out(h) * 7.5).argmax(-1)
            if token.item() == 3:
                break
            tokens.append(token.item())
        return tokens


def _combined(h: Tensor, x: Tensor) -> Tensor:
    if h.max() > -h.min():
        return torch.relu(h) + x
    return x - h


class Block(nn.Module):
    """A layer whose branch is in a helper function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _combined(self.layer(x), x)


class Routed(nn.Module):
    """Layers of four experts, of which a Python int chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = _linears(4, WIDTH, 4)
        self.layers = nn.ModuleList(_linears(4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.layers, strict=True):
            x = torch.relu(experts[int(router(x).argmax())](x)) + x
        return x


class Solver(nn.Module):
    """A `while` inside a `for`."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for stage in range(3):
            while x.norm() > 1:
                x = x * 0.7 + 0.01 * torch.tanh(self.step(x))
            x = x * (2 + stage)
        return x


class Flags(nn.Module):
    """Branches that set a flag and a count, which are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(6)

    def forward(self, x: Tensor) -> Tensor:
        was_positive, positive = False, 0
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.sum() > 0:
                was_positive = True
                positive += 1
        return x + positive if was_positive else x


class Cached(nn.Module):
    """Decoding with a cache in a list, which grows from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, h: Tensor) -> tuple[Tensor, int]:
        cache: list[Tensor] = []
        token = h.argmax(-1)
        for _ in range(8):
            cache.append(self.embedding(token))
            h = torch.stack(cache).mean(0)
            token = self.out(h).argmax(-1)
            if token.item() % 5 == 0:
                break
        return h, len(cache)


class Leaving(nn.Module):
    """Rows leave the batch as soon as they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out, left = torch.zeros_like(x), torch.arange(x.shape[0])
        for _ in range(6):
            x = torch.tanh(self.layer(x))
            done = x.mean(-1) > 0.05
            if done.any():
                out[left[done]] = x[done]
                x, left = x[~done], left[~done]
            if left.numel() == 0:
                break
        else:
            out[left] = x
        return out


class Dropping(nn.Module):
    """Rows leave a batch of any size one by one; `len` gives its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = _linears(12), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, rows = torch.zeros(len(x), 3), torch.arange(len(x))
        for layer in self.layers:
            x = torch.tanh(layer(x) * 3)
            chances = self.head(x).softmax(-1)
            stays = chances.amax(-1) < 0.6
            out[rows[~stays]] = chances[~stays]
            x, rows = x[stays], rows[stays]
            if len(rows) == 0:
                break
        return out


class Scanning(nn.Module):
    """A recurrence over as many steps as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(WIDTH)
        for i in range(len(x)):
            h = torch.tanh(self.step(h) + x[i])
        return h / int(x.shape[0])


@functools.lru_cache(1024)
def _split(shape: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compute two shapes, as einops does for a pattern."""
    batch, length, width = shape
    if length % parts != 0:
        raise ValueError(f"{length} cannot be divided by {parts}")
    split = []
    for size in (batch, length // parts, parts, width):
        split.append(size)
    return tuple(split), (batch * (length // parts), parts * width)


class Patches(nn.Module):
    """Joins tokens to patches, by shapes from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split, joined = _split(tuple(x.shape), 2)
        h = torch.tanh(self.embed(x.reshape(joined)))
        return self.out(h).reshape(split[0], split[1], -1).mean(1)


class Mixtral(nn.Module):
    """A Mixtral of transformers, which gives its logits."""

    def __init__(self) -> None:
        super().__init__()
        from tests.hf_models import MODELS

        self.model = next(model for model in MODELS if model.name == "mixtral").make()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


class BeamSearch(nn.Module):
    """Two beams of four tokens. Tokens, and the scores that are sorted, are Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, h: Tensor) -> tuple[tuple[float, ...], Tensor]:
        beams: list[tuple[tuple[float, ...], Tensor, Tensor]] = [((), torch.zeros(()), h)]
        for _ in range(4):
            found = []
            for tokens, score, state in beams:
                values, chosen = self.out(state).log_softmax(-1).topk(2)
                for value, token in zip(values, chosen, strict=True):
                    after = torch.tanh(state + self.embedding(token))
                    found.append(((*tokens, token.item()), score + value, after))
            found.sort(key=lambda beam: -beam[1].item())
            beams = found[:2]
        return beams[0][0], beams[0][1]


class Pole:
    """A pole on a cart: the environment of `Episode`."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def step(self, action: Tensor) -> Tensor:
        """Push the cart to one side, and return whether the episode has ended."""
        _, speed, angle, turn = self.state.unbind()
        force = action * 20.0 - 10.0
        push = (force + 0.05 * turn * turn * angle.sin()) / 1.1
        twist = (9.8 * angle.sin() - angle.cos() * push) / (0.67 - 0.05 * angle.cos() ** 2)
        rate = push - 0.05 * twist * angle.cos()
        change = torch.stack((speed, rate, turn, twist))
        self.state = self.state + 0.02 * change
        return (self.state[0].abs() > 2.4) | (self.state[2].abs() > 0.2)


class Episode(nn.Module):
    """A policy acts in an environment, with sampled actions, until the episode ends."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, int]:
        pole, chances, steps = Pole(state), torch.zeros(()), 0
        for _ in range(40):
            policy = self.policy(pole.state).log_softmax(-1)
            action = torch.multinomial(policy.exp(), 1).squeeze(0)
            chances = chances + policy[action]
            steps += 1
            if pole.step(action):
                break
        return pole.state, chances, steps


class NestedExits(nn.Module):
    """Stages that end when they change little, in a model that ends when it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_linears(6) for _ in range(4))
        self.heads = _linears(4, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage, head in zip(self.stages, self.heads, strict=True):
            for layer in stage:
                change = torch.tanh(layer(x))
                x = x + change
                if change.abs().mean() < 0.35:
                    break
            chances: Tensor = head(x).softmax(-1)
            if chances.max() > 0.8:
                return chances
        return chances


@dataclass(frozen=True)
class Stream:
    """A model, and random inputs for it.

    Attributes:
        name: what stands in the table.
        make: makes the model.
        draw: draws the arguments of a call.
        quick: whether it is one of those for a look.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[Generator], tuple[Any, ...]]
    quick: bool = False

    def model(self) -> nn.Module:
        """Return the model in eval mode, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()

    def inputs(self, number: int) -> tuple[Any, ...]:
        """Return the arguments of a call, by its number."""
        return self.draw(Generator().manual_seed(number))


def normal(*shape: int, scale: float = 1.0) -> Callable[[Generator], tuple[Tensor]]:
    """Return what draws a tensor of a shape."""
    return lambda generator: (torch.randn(shape, generator=generator) * scale,)


def scaled(generator: Generator) -> tuple[Tensor, float]:
    """Draw a tensor of any size, and a tolerance."""
    scale = 10 ** (4 * torch.rand((), generator=generator))
    return torch.randn(1, WIDTH, generator=generator) * scale, 0.01


def _rows(width: int, batched: bool = False) -> Callable[[Generator], tuple[Tensor]]:
    """Return what draws a tensor of some number of rows."""

    def draw(generator: Generator) -> tuple[Tensor]:
        batch, count = torch.randint(1, 24, (2,), generator=generator).tolist()
        shape = (batch, 2 * count, width) if batched else (count, width)
        return (torch.randn(shape, generator=generator),)

    return draw


def _tokens(generator: Generator) -> tuple[Tensor]:
    length = int(torch.randint(4, 60, (), generator=generator))
    return (torch.randint(3, 99, (1, length), generator=generator),)


def _boxes(generator: Generator) -> tuple[Tensor, Tensor]:
    corners = torch.rand(20, 2, generator=generator) * 10
    sizes = torch.rand(20, 2, generator=generator) * 5 + 1
    return torch.cat((corners, corners + sizes), 1), torch.rand(20, generator=generator)


STREAMS = (
    Stream("20 gated layers", lambda: Gated(20), normal(1, WIDTH)),
    Stream("8 gated layers", lambda: Gated(8), normal(1, WIDTH), quick=True),
    Stream("MoE, 1 token", Mixture, normal(1, WIDTH)),
    Stream("MoE, 8 tokens", Mixture, normal(8, WIDTH)),
    Stream("while x.norm() > tol", Shrinking, scaled),
    Stream("while, counting", Counting, scaled),
    Stream("early exit", EarlyExit, normal(1, WIDTH), quick=True),
    Stream("nested early exits", NestedExits, normal(1, WIDTH)),
    Stream("NMS", Suppression, _boxes),
    Stream("decoding, tokens as ints", Decoding, normal(1, WIDTH, scale=2.0)),
    Stream("decoding, caches in lists", Cached, normal(WIDTH)),
    Stream("beam search", BeamSearch, normal(WIDTH)),
    Stream("branches in submodules", lambda: nn.Sequential(*(Block() for _ in range(10))),
           normal(WIDTH)),
    Stream("top-1 routing", Routed, normal(WIDTH)),
    Stream("solver, nested loops", Solver, normal(WIDTH)),
    Stream("flags between branches", Flags, normal(WIDTH)),
    Stream("rows that leave", Leaving, normal(6, WIDTH)),
    Stream("rows that leave one by one, any number", Dropping, _rows(WIDTH)),
    Stream("recurrence, any number of steps", Scanning, _rows(WIDTH)),
    Stream("shapes from a cache, any length", Patches, _rows(WIDTH, batched=True)),
    Stream("Mixtral of transformers, any length", Mixtral, _tokens),
    Stream("RL episode", Episode, normal(4, scale=0.05), quick=True),
)  # fmt: skip


def stream_of(name: str) -> Stream:
    """Return a stream by its name.

    Raises:
        KeyError: if there is none.
    """
    return {stream.name: stream for stream in STREAMS}[name]
