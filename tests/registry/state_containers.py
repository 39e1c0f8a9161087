"""Sets, dicts and counters in the state of a model that forward fills, and goes through."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

from tests.registry.calls import Call, args, case


def some(seed: int) -> Call:
    """Random numbers that depend on nothing but the seed."""

    def make() -> tuple[Any, ...]:
        own = torch.Generator().manual_seed(seed)
        return (torch.randn(5, generator=own),)

    return args(make)


STREAM = [some(seed) for seed in range(14)]


def state(model: Any, out: Any) -> Any:
    """Return what a call gives, and what the containers hold."""
    return out, [*model.seen], [*model.counts.items()], [*model.means.items()]


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.counts: Any = collections.Counter()
        self.means: dict[int, float] = {}


@case(*STREAM, look=state)
class GoesThroughMembers(Fills):
    def forward(self, x: torch.Tensor) -> Any:
        self.seen.add(int(x.argmax()))
        total = sum(sorted(self.seen))
        if x[0] > 0:
            self.seen.discard(int(x.argmin()))
            total += len(list(self.seen))
        return x * total + (max(self.seen) if self.seen else 0)


@case(*STREAM, look=state)
class GoesThroughValues(Fills):
    def forward(self, x: torch.Tensor) -> Any:
        self.counts[int(x.argmax())] += 1
        self.means[int(x.argmin())] = x.mean().item()
        number, times = self.counts.most_common(1)[0]
        if x[1] > 0:
            x = x * sum(self.means.values())
        return x * number + times / sum(self.counts.values()) + len(list(self.means.items()))


_own = torch.Generator().manual_seed(4)
ROWS = [args(lambda x=torch.randn(3, 4, generator=_own): (x.clone(),)) for _ in range(16)]


@case(*ROWS, look=state)
class PutsPairsInOrder(Fills):
    """Where a question follows, the state holds pairs in an order that nothing else needs."""

    def forward(self, x: torch.Tensor) -> Any:
        pairs = self.counts.most_common()
        y = x + len(pairs)
        self.counts.update(y.argmax(1).tolist())
        return y
