"""Arrays of numpy in the state of a model, whose content changes from call to call."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

import bendtrace as bt
from bendtrace.python.results import can_exchange_operands
from tests.registry.calls import Call, after, args, case


def some(seed: int) -> Call:
    """Random numbers that depend on nothing but the seed."""

    def make() -> tuple[Any, ...]:
        own = torch.Generator().manual_seed(seed)
        return (torch.randn(4, generator=own),)

    return args(make)


STREAM = [some(seed) for seed in range(12)]


def live_once(bended: bt.BendedModule) -> None:
    if can_exchange_operands():
        assert bended.stats.live <= 1, (bended.stats, bended.why_live)
        assert bended.stats.replays > 0, bended.stats


def state(model: Any, out: Any) -> Any:
    """Return what a call gives, and the arrays that it leaves behind."""
    return out, [torch.tensor(getattr(model, name).copy()) for name in ("counts", "means", "row")]


followed = functools.partial(case, look=state, served=live_once)


class Holds(nn.Module):
    """Has arrays of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.counts = np.zeros(4, dtype=np.int64)
        self.means = np.zeros(4, dtype=np.float32)
        self.row = np.zeros(3)
        self.step = 0


@followed(*STREAM)
class Histogram(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        self.counts[int(y.argmax())] += 1
        self.row += np.histogram(y.detach().numpy(), bins=3, range=(-1, 1))[0]
        return y * float(self.row[1])


@followed(*STREAM)
class RingBuffer(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        self.row[self.step] = x.mean().item()
        self.step = (self.step + 1) % 3
        return x * float(self.row.mean()) + self.row[-1]


@followed(*STREAM)
class RunningMean(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        self.means = self.means * 0.9 + y.detach().numpy() * np.float32(0.1)
        return y - torch.from_numpy(self.means.copy())


@followed(*STREAM)
class ExpertUse(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        chosen = x.argsort()[:2]
        np.add.at(self.counts, chosen.numpy(), 1)
        if self.counts.max() > 3:
            self.counts[:] = 0
            x = x * 2
        return x + int(self.counts.sum())


@followed(*STREAM)
class WritesToAView(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        part = self.row[1:]
        part += x.detach().double().numpy()[:2]
        if x[0] > 0:
            self.row[0] += part[1]
        return x * float(self.row.sum())


@followed(*STREAM)
class WrittenBeforeAndBehindQuestions(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        self.row[0] += 1
        if x[0] > 0:
            self.row.fill(float(x[1]))
            x = x * 2
        self.row *= 2
        if self.row[1] > 1:
            x = x + float(self.row[0])
        np.minimum(self.row, 9, out=self.row)
        return x


@followed(*STREAM)
class WrittenInLoops(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        for place in range(3):
            if x[place] > 0:
                self.row[place] += float(x[place])
            x = x + float(self.row[place])
        return x


@followed(*STREAM)
class LentToATensor(Holds):
    """A tensor in the memory of the array is made behind all writes, and given away."""

    def forward(self, x: torch.Tensor) -> Any:
        self.means += x.detach().numpy()
        return x + torch.from_numpy(self.means)


@case(*STREAM, look=state)
class WrittenWhileLent(Holds):
    """Live: a tensor in the memory of the array changes with it."""

    def forward(self, x: torch.Tensor) -> Any:
        shared = torch.from_numpy(self.means)
        self.means += x.detach().numpy()
        return x + shared


@case(*STREAM, look=state)
class RaisesBehindAWrite(Holds):
    def forward(self, x: torch.Tensor) -> Any:
        self.counts[0] += 1
        try:
            self.counts[int(x.abs().max() * 3)] += 1
        except IndexError:
            return x * 2
        return x


def _tie(model: Any) -> None:
    model.kept = torch.from_numpy(model.means)


def _view(model: Any) -> None:
    model.kept = model.means[1:]


def _replace(model: Any) -> None:
    model.means = np.ones(4, dtype=np.float32)[::-1].copy()


def _widen(model: Any) -> None:
    model.means = model.means.astype(np.float64)


def _alias(model: Any) -> None:
    model.row = model.means


@case(
    *STREAM[:4], after(_replace, 1, 2, 3, 4), *STREAM[:2], after(_widen, 4, 3, 2, 1), *STREAM[:3],
    after(_tie, 1, 2, 2, 1), *STREAM[:2], after(_view, 1, 2, 2, 1), *STREAM[:2],
    after(_alias, 0, 1, 0, 1), *STREAM[:2],
    look=state,
)  # fmt: skip
class ChangedOutside(Holds):
    """Between calls, other arrays and tensors take the place of the array, or its memory."""

    kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.kept is not None:
            x = x + float(self.kept[0])
        self.means += x.detach().numpy().astype(self.means.dtype)
        if self.kept is not None:
            x = x * float(self.kept[1])
        self.row[0] += 1
        return x * float(self.means[1] + self.row[0])


# Numbers of numpy


def has_numbers(model: Any, out: Any) -> Any:
    """Return what a call gives, and the numbers that it leaves behind."""
    return out, model.mean, model.calls, model.best


def shares_a_number(model: Any) -> None:
    model.best = model.mean


@case(
    *STREAM,
    after(shares_a_number, 1, 2, 3, 4),
    *STREAM[:2],
    after(lambda model: setattr(model, "mean", 0.5), 1, 2, 3, 4),
    *STREAM[:2],
    look=has_numbers,
    served=live_once,
)
class NumbersOfNumpy(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = np.float64(0)
        self.best: Any = np.float32(-9)
        self.calls = np.int64(0)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).detach()
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.numpy().mean()
        if y.numpy().max() > self.best:
            self.best = y.numpy().max()
            y = y * 2
        return y * float(self.mean) + int(self.calls)
