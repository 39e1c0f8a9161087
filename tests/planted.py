"""Models with branches that random inputs hardly ever take, and some that none can."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt


@dataclass(frozen=True)
class Planted:
    """A model, where to begin, and what may differ.

    Attributes:
        make: makes the model.
        inputs: where the search begins.
        domain: what may differ.
    """

    make: Callable[[], Callable[..., Any]]
    inputs: tuple[Any, ...]
    domain: dict[str, Any]


class Numbers(nn.Module):
    """Sums, norms, means, elements and counts of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 300:  # 01
            x = x + 1
        if x.norm() < 0.5:  # 02
            x = x + 2
        if x.mean().item() * 2 + 1 < -17:  # 03
            x = x + 3
        if x[1, 3] == 3.25:  # 04
            x = x + 4
        if (x[0, 0] - x[3, 7]).abs() < 1e-6:  # 05
            x = x + 5
        if (x > 0).sum() == 31:  # 06
            x = x + 6
        if (x.abs() < 0.05).all():  # 07
            x = x + 7
        if x.std() > 9.9:  # 08
            x = x + 8
        if (x > 2).all():  # unreachable with the branches above, which only add: reachable
            x = x + 9
        if x.norm() < -1:  # unreachable
            x = x - 1
        return x


class Nested(nn.Module):
    """Branches behind others, and strings of conditions."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.mean() > 8:  # 10
            if y.max() < -8:  # 11
                if (x[0] - y[1]).abs() < 17:  # 12
                    x = x * 2
                else:
                    x = x * 3
        if x[0] > 9.9 and x[1] < -9.9 and x[2] > 9.9 and y[0] < -9.9:  # 13-16
            x = x + 1
        if not (x[3] < 9.9 or y[3] < 9.9 or x[4] < 9.9 or y[4] < 9.9):  # 17-20
            x = x + 1
        if (x @ y).item() > 590 and x.sum().item() < y.sum().item():  # 21
            x = x - 1
        if x[5] > 3 and x[5] < 2 and y[5] > 0:  # unreachable
            x = x - 1
        return x + y


class Network(nn.Module):
    """Values behind layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 10)
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.first(x)))
        scores = self.second(hidden)
        chances = torch.softmax(scores * 4, -1)
        if chances[0, 7] > 0.9999:  # 22
            scores = scores + 1
        if (scores.argmax(-1) == 4).all():  # 23
            scores = scores + 2
        if hidden.max() > 5.4:  # 24
            scores = scores + 3
        entropy = -(chances * chances.log()).sum(-1).mean()
        if entropy > 2.29:  # 25
            scores = scores + 4
        if self.conv(x.unsqueeze(1)).amax() > 10.5:  # 26
            scores = scores + 5
        if scores.topk(2).indices[0, 0] == 1 and chances[0, 1] > 0.999:  # 27
            scores = scores + 6
        if chances.sum() > x.shape[0] + 1:  # unreachable
            scores = scores - 1
        return scores


class Tokens(nn.Module):
    """Token ids, embeddings, and sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(1000, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if ids[0, 0] == 101 and ids[0, -1] == 102:  # 28, 29
            x = x + 1
        if ids[0, 1].item() in (707, 808):  # 30
            x = x + 2
        if ids.shape[1] > 7:  # 31
            x = x + 3
        if (ids == ids[0, 0]).all():  # 32
            x = x + 4
        if torch.equal(ids[0, :3], ids[0, 1:4] + 1):  # 33
            x = x + 5
        if self.head(x).mean() > 1.1:  # 34
            x = x + 6
        if ids.sum() == 31:  # 35
            x = x + 7
        if ids.max() > 1000:  # unreachable
            x = x - 1
        return x


class Loops(nn.Module):
    """Iterations, numbers of Python's own, and arithmetic on them."""

    def forward(self, x: Tensor, limit: int) -> Tensor:
        steps = 0
        while x.norm() > 1 and steps < 9:
            x = x / 4
            steps += 1
        if steps > 6:  # 36
            x = x + 1
        if limit * 3 - 7 == 2981:  # 37
            x = x + 2
        value = float(x.sum()) * 2
        if value > 3.4:  # 38
            x = x + 3
        if math.sqrt(abs(x[0].item())) > 0.97:  # 39
            x = x + 4
        if int(x[1] * 1000) == 777:  # 40
            x = x + 5
        if limit % 2 == 2:  # unreachable
            x = x - 1
        return F.relu(x)


def numbers_of(low: float, high: float) -> Any:
    """Return the domain of a tensor."""
    return bt.Domain(low, high)


MODELS = {
    "numbers": Planted(Numbers, (torch.zeros(4, 8) + 1.5,), {"x": (-10.0, 10.0)}),
    "nested": Planted(
        Nested, (torch.zeros(6), torch.zeros(6)), {"x": (-10.0, 10.0), "y": (-10.0, 10.0)}
    ),
    "network": Planted(Network, (torch.zeros(2, 16) + 0.1,), {"x": (-4.0, 4.0)}),
    "tokens": Planted(
        Tokens, (torch.arange(5, 9).unsqueeze(0),), {"ids": bt.Domain(0, 999, sizes={1: (4, 12)})}
    ),
    "loops": Planted(
        Loops, (torch.tensor([0.5, 0.1, 0.0]), 5), {"x": (-1e4, 1e4), "limit": (0, 10**6)}
    ),
}
