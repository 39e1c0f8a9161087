"""Models with branches that random inputs hardly ever take (p < 1e-6), and some that none can.

The first are marked `rare`, the others `never`. Random inputs are uniform in the domain.
"""

from __future__ import annotations

import inspect
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
        model: makes the model.
        inputs: where the search begins.
        domain: what may differ.
    """

    model: Callable[[], Callable[..., Any]]
    inputs: tuple[Any, ...]
    domain: dict[str, Any]

    def lines(self, mark: str) -> set[int]:
        """Return the lines that are marked."""
        return set(self._marked(mark))

    def bodies(self, mark: str) -> set[int]:
        """Return the lines that run if what is marked holds; after a loop, that of its `else`."""
        return {number + (4 if is_loop else 1) for number, is_loop in self._marked(mark).items()}

    def _marked(self, mark: str) -> dict[int, bool]:
        source, first = inspect.getsourcelines(self.model)
        return {
            first + i: line.strip().startswith("for ")
            for i, line in enumerate(source)
            if line.rstrip().endswith(f"# {mark}")
        }


class Numbers(nn.Module):
    """Sums, norms, means, elements and counts of 32 elements."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 300:  # rare
            x = x + 1
        if x.norm() < 0.5:  # rare
            x = x + 2
        if x.mean().item() * 2 + 1 < -17:  # rare
            x = x + 3
        if x[1, 3] == 3.25:  # rare
            x = x + 4
        if (x[0, 0] - x[3, 7]).abs() < 1e-6:  # rare
            x = x + 5
        if (x > 0).sum() == 31:  # rare
            x = x + 6
        if (x.abs() < 0.05).all():  # rare
            x = x + 7
        if x.std() > 9.9:  # rare
            x = x + 8
        if x.norm() < -1:  # never
            x = x - 1
        return x


class Nested(nn.Module):
    """Branches behind others, and strings of conditions, on twice 12 elements."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.mean() > 8:  # rare
            if y.max() < -8:  # rare
                if (x[0] - y[1]).abs() < 17:  # rare
                    x = x * 2
        if x[0] > 9.9 and x[1] < -9.9 and x[2] > 9.9 and y[0] < -9.9:  # rare
            x = x + 1
        if not (x[3] < 9.9 or y[3] < 9.9 or x[4] < 9.9 or y[4] < 9.9):  # rare
            x = x + 1
        if (x @ y).item() > 1100 and x.sum().item() < y.sum().item():  # rare
            x = x - 1
        if x.sort().values[0] > 7:  # rare
            x = x - 1
        if x.argmax() == 3 and y.argmin() == 5 and x.max() - y.min() > 19.99:  # rare
            x = x - 1
        if x[5] > 3 and x[5] < 2:  # never
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
        scores = self.second(hidden) * 4
        chances = torch.softmax(scores, -1)
        if chances[:, 7].min() > 0.95:  # rare
            scores = scores + 1
        if (scores.argmax(-1) == 4).all():  # rare
            scores = scores + 2
        if hidden.amax(-1).min() > 5.2:  # rare
            scores = scores + 3
        if -(chances * chances.log()).sum(-1).mean() > 2.29:  # rare
            scores = scores + 4
        if self.conv(x.unsqueeze(1)).mean() > 0.3:  # rare
            scores = scores + 5
        if scores.topk(2).indices[0, 0] == 1 and chances[:, 1].min() > 0.9:  # rare
            scores = scores + 6
        if F.cosine_similarity(x[0], x[1], dim=0) > 0.98:  # rare
            scores = scores + 7
        if F.normalize(x, dim=-1)[:, 0].min() > 0.95:  # rare
            scores = scores + 8
        if chances.sum() > x.shape[0] + 1:  # never
            scores = scores - 1
        return scores


class Tokens(nn.Module):
    """Token ids below 1000, embeddings, and sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(1000, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if ids[0, 0] == 101 and ids[0, -1] == 102 and ids[0, 1] == 103:  # rare
            x = x + 1
        if all(ids[0, i].item() in (707 + i, 808) for i in range(4)):  # rare
            x = x + 2
        if ids.shape[1] == 11 and (ids[0] < 20).all():  # rare
            x = x + 3
        if (ids == ids[0, 0]).all():  # rare
            x = x + 4
        if torch.equal(ids[0, :3], ids[0, 1:4] + 1):  # rare
            x = x + 5
        if self.head(x).mean() > 1.6:  # rare
            x = x + 6
        if ids.sum() == 31:  # rare
            x = x + 7
        if (ids % 97 == 13).all():  # rare
            x = x + 8
        if ids.max() > 1000:  # never
            x = x - 1
        return x


class Loops(nn.Module):
    """Iterations, numbers of Python's own, and arithmetic on them; 8 elements."""

    def forward(self, x: Tensor, limit: int) -> Tensor:
        steps, y = 0, x
        while y.norm() > 1 and steps < 40:
            y = y * 0.9
            steps += 1
        if steps > 31:  # rare
            x = x + 1
        if limit * 3 - 7 == 2981:  # rare
            x = x + 2
        value = float(x.sum()) * 2
        if value > 150:  # rare
            x = x + 3
        if math.sqrt(abs(x[0].item())) > 3.162277:  # rare
            x = x + 4
        if int(x[1] * 1000) == 7777 and int(x[2] * 1000) == -333:  # rare
            x = x + 5
        if round(x[3].item(), 2) == 1.23 and round(x[4].item(), 2) == 4.56:  # rare
            x = x + 6
        for element in x:  # rare
            if element < 9:
                break
        else:
            x = x + 7
        if any(e > 9.9 for e in x[:4]) and all(e < -9.9 for e in x[4:]):  # rare
            x = x + 8
        if limit % 2 == 2:  # never
            x = x - 1
        return F.relu(x)


MODELS = {
    "numbers": Planted(Numbers, (torch.full((4, 8), 1.5),), {"x": (-10.0, 10.0)}),
    "nested": Planted(
        Nested, (torch.zeros(12), torch.zeros(12)), {"x": (-10.0, 10.0), "y": (-10.0, 10.0)}
    ),
    "network": Planted(Network, (torch.full((8, 16), 0.1),), {"x": (-4.0, 4.0)}),
    "tokens": Planted(
        Tokens, (torch.arange(5, 9).unsqueeze(0),), {"ids": bt.Domain(0, 999, sizes={1: (4, 12)})}
    ),
    "loops": Planted(Loops, (torch.full((8,), 0.5), 5), {"x": (-10.0, 10.0), "limit": (0, 10**7)}),
}
