"""Models with data-dependent branches and loops, which are exported and taken out of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

D = 8


class Gated(nn.Module):
    """Layers that are each skipped where a test says so."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            h = h - h.mean() * 0.97
            if h[0, 0] > 0:
                x = x + h.relu()
            else:
                x = x - h.tanh() * 0.5
        return x


class Solver(nn.Module):
    """A fixed point, looked for until a residual is small."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)
        with torch.no_grad():
            self.f.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.f(x) - x
        while residual.norm() > 1e-3:
            x = x + 0.5 * residual
            residual = self.f(x) - x
        return x


class EarlyExit(nn.Module):
    """Layers that are left as soon as the answer is sure."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu() * 0.5 + x
            p = self.head(x).softmax(-1)
            if p.max(-1).values.min() > 0.5:
                return p, number
        return p, len(self.layers)


class TopOne(nn.Module):
    """A mixture of experts of which one is asked, picked by an index in Python."""

    def __init__(self, layers: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(D, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(D, D) for _ in range(experts)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            scores = router(x.mean(0)).softmax(-1)
            index = int(scores.argmax())
            x = x + experts[index](x) * scores[index]
        return x


class TopTwo(nn.Module):
    """A mixture of experts with two for each token: each expert is given its tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D, experts)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                share = (weights * mask).sum(-1, keepdim=True)
                out = out + expert(x) * share
        return out


class TopTwoGathered(TopTwo):
    """The same, with the tokens of an expert gathered."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Matcher(nn.Module):
    """Matches two sets of points in rounds, stops early, and masks points out."""

    def __init__(self, rounds: int = 4) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(D, D) for _ in range(rounds))
        self.sure = nn.Linear(D, 1)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        keep_a = torch.ones(a.shape[0], dtype=torch.bool)
        keep_b = torch.ones(b.shape[0], dtype=torch.bool)
        for mix in self.mix:
            scores = (mix(a) @ mix(b).T).masked_fill(~keep_b, -1e4)
            a = a + scores.softmax(-1) @ b * 0.5
            sure_a = self.sure(a).squeeze(-1).sigmoid()
            if (sure_a > 0.45).float().mean() > 0.9:
                break
            if bool((sure_a < 0.2).any()):
                keep_a = keep_a & (sure_a >= 0.2)
        similarity = (a @ b.T).masked_fill(~keep_a[:, None], -1e4)
        return {"match": similarity.argmax(-1), "kept": keep_a, "score": similarity.max(-1).values}


class Greedy(nn.Module):
    """Decodes token by token until an end token, with a cache of a fixed length."""

    def __init__(self, vocabulary: int = 11, longest: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, D)
        self.out = nn.Linear(D, vocabulary)
        self.longest = longest

    def forward(self, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.zeros((), dtype=torch.int64)
        slots = torch.arange(self.longest)
        cache = torch.zeros(self.longest, D)
        tokens = torch.zeros(self.longest, dtype=torch.int64)
        token = token.reshape(())
        while length < self.longest:
            query = self.embed(token) + memory
            cache = torch.where((slots == length)[:, None], query, cache)
            weights = (cache @ query).masked_fill(slots > length, -1e4).softmax(-1)
            token = self.out(weights @ cache * 3).argmax()
            tokens = torch.where(slots == length, token, tokens)
            length = length + 1
            if token == 0:
                break
        return tokens, length


class Ponder(nn.Module):
    """Adaptive computation time: it thinks until it has halted for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.GRUCell(D, D)
        self.halt = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(x)
        halted = torch.zeros(x.shape[0])
        out = torch.zeros_like(x)
        steps = torch.zeros(x.shape[0])
        while bool((halted < 0.99).any()):
            state = self.step(x, state)
            p = self.halt(state).squeeze(-1).sigmoid() * 0.6
            running = (halted < 0.99).float()
            p = torch.minimum(p, 1.0 - halted) * running + (steps > 6).float() * running
            halted = halted + p
            steps = steps + running
            out = out + p[:, None] * state
        return out, steps


class Suppress(nn.Module):
    """Non-maximum suppression in Python, on masks."""

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        alive = torch.ones_like(scores, dtype=torch.bool)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        while alive.any():
            best = scores.masked_fill(~alive, -1.0).argmax()
            kept = kept.index_fill(0, best, True)
            box = boxes[best]
            low = torch.maximum(boxes[:, :2], box[:2])
            high = torch.minimum(boxes[:, 2:], box[2:])
            shared = (high - low).clamp(min=0).prod(-1)
            overlap = shared / (area + area[best] - shared)
            alive = alive & (overlap < 0.5)
        return kept


@dataclass(frozen=True)
class Example:
    """A model, and how its inputs are made.

    Attributes:
        make: makes the model.
        inputs: makes random inputs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def stream(self, seed: int) -> Iterator[tuple[Any, ...]]:
        """Yield random inputs, which draw from torch's generator."""
        torch.manual_seed(seed)
        while True:
            yield self.inputs()


def _rows(scale: float = 3.0) -> tuple[Any, ...]:
    return (torch.randn(int(torch.randint(2, 6, ())), D) * scale * torch.rand(()),)


def _boxes() -> tuple[Any, ...]:
    low = torch.rand(9, 2) * 4
    return torch.cat([low, low + 0.5 + torch.rand(9, 2) * 2], 1), torch.rand(9)


MODELS = {
    "gated": Example(Gated, _rows),
    "solver": Example(Solver, _rows),
    "early exit": Example(EarlyExit, _rows),
    "top-1 experts": Example(TopOne, _rows),
    "top-2 experts": Example(TopTwo, _rows),
    "top-2 experts, gathered": Example(TopTwoGathered, _rows),
    "matcher": Example(Matcher, lambda: (*_rows(), *_rows())),
    "greedy decoding": Example(Greedy, lambda: (torch.randint(11, (1,)), torch.randn(D))),
    "adaptive time": Example(Ponder, _rows),
    "suppression": Example(Suppress, _boxes),
}
