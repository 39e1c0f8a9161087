"""Sets, dicts and counters in the state of a model that forward fills, and goes through."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

from tests.registry.calls import Call, after, args, case


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
_rows = [torch.randn(3, 4, generator=_own) for _ in range(16)]
ROWS = [args(lambda rows=rows: (rows.clone(),)) for rows in _rows]


@case(*ROWS, look=state)
class PutsPairsInOrder(Fills):
    """Where a question follows, the state holds pairs in an order that nothing else needs."""

    def forward(self, x: torch.Tensor) -> Any:
        pairs = self.counts.most_common()
        y = x + len(pairs)
        self.counts.update(y.argmax(1).tolist())
        return y


# Lists, deques, and containers in containers


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.latest: Any = collections.deque(maxlen=4)
        self.by: Any = collections.defaultdict(list)
        self.parts: list[Any] = [[], [Meter()]]

    def all(self) -> Any:
        found = [[*map(vars, part)] if part[:1] and type(part[0]) is Meter else part[:]
                 for part in self.parts]  # fmt: skip
        return self.losses[:], [*self.latest], [(k, [*v]) for k, v in self.by.items()], found


class Meter:
    """A class of the user's with a method of that name."""

    def __init__(self) -> None:
        self.total = 0

    def append(self, number: int) -> None:
        self.total += number


def collected(model: Any, out: Any) -> Any:
    """Return what a call gives, and what was collected."""
    return out, model.all()


@case(*STREAM, look=collected)
class ReadsAListThatGetsLonger(Collects):
    def forward(self, x: torch.Tensor) -> Any:
        self.losses.append(x.mean().item())
        if len(self.losses) > 4:
            x = x * (sum(self.losses[-4:]) / 4)
        if self.losses[-1] >= max(self.losses):
            x = x + min(self.losses)
        return x * (sum(self.losses) / len(self.losses))


@case(*STREAM, look=collected)
class ShortensLists(Collects):
    def forward(self, x: torch.Tensor) -> Any:
        self.losses += [x.max().item(), int(x.argmax())]
        if len(self.losses) > 8:
            del self.losses[:2]
        first = self.losses.pop(0) if x[0] > 0 else self.losses[0]
        self.latest.appendleft(first)
        if len(self.latest) == self.latest.maxlen:
            x = x + self.latest.pop()
        return x * len(self.losses) + sum(self.latest), any(self.losses), all(self.losses)


@case(*STREAM, look=collected)
class CollectsByNumber(Collects):
    def forward(self, x: torch.Tensor) -> Any:
        best = int(x.argmax())
        self.by[best].append(x.mean().item())
        values = self.by[best]
        if x[1] > 0 and len(values) > 1:
            x = x * (values[-1] - values[0])
        for number in (1, 2):
            self.by.setdefault(number, []).append(number)
        return x * (sum(values) / len(values)) + len(self.by)


@case(*STREAM, look=collected)
class PutsListsInADict(Collects):
    """Where a variable has a list of the dict, nothing else may be put in its place."""

    def forward(self, x: torch.Tensor) -> Any:
        best = int(x.argmax())
        if best not in self.by:
            self.by[best] = []
        self.by[best].append(1)
        self.by[best] = self.by[best][-2:]
        values = self.by[best]
        if x[0] > 0:
            self.by[best] = [7]
        values.append(2)
        own = self.by[3] = []
        own.append(best)
        return x * len(self.by[best])


@case(*STREAM, look=collected)
class AddsToItemsOfLists(Collects):
    """What holds a list is not added to, and what has such a method need be no list."""

    def forward(self, x: torch.Tensor) -> Any:
        self.parts[0].append(len(x))
        self.parts[-1][0].append(1)
        return x * 2


@case(
    *STREAM[:6],
    after(lambda model: model.by.clear()),
    *STREAM[6:9],
    after(lambda model: model.by.pop("sum", None)),
    after(lambda model: model.by.update(sum=model.losses)),
    *STREAM[9:],
    look=collected,
)
class FindsOthersInADict(Collects):
    """Nothing is made in a dict where a key is gone, nor is a list taken for one of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        self.by["sum"].append(x.sum().item())
        self.by["best"].append(int(x.argmax()))
        return x * len(self.losses)
