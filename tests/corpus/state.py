"""Attributes and buffers that forward writes, so that one call changes the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, negative, positive, randn, register


@register(positive=lambda: call(positive(3)), negative=lambda: call(negative(3)))
class CallCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls if x.sum() > 0 else x - self.calls


@register(odd=lambda: call(randn(2, 3)), reset=lambda: call(randn(2, 3), reset=True))
class AlternatingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor, reset: bool = False) -> Tensor:
        if reset:
            self.turn = 0
            return x
        y = self.layers[self.turn % 2](x)
        self.turn += 1
        return y


@register(
    three=lambda: call(randn(3, 2)), one=lambda: call(randn(1, 2)), reset=lambda: call(randn(0, 2))
)
class HiddenStateAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)
        self.h: Tensor | None = None

    def forward(self, xs: Tensor) -> Tensor:
        if self.h is None or len(xs) == 0:
            self.h = torch.zeros(1, 3)
        h = self.h
        for x in xs:
            h = self.cell(x[None], h)
        self.h = h.detach()
        return h


@register(normal=lambda: call(randn(5)), outlier=lambda: call(randn(5) + 90))
class RunningMeanBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        gap = x.mean() - self.mean
        if gap.abs() > 10:
            return x.clamp(-10, 10)
        self.mean += 0.1 * gap
        return x - self.mean


@register(two=lambda: call(randn(2, 3)), four=lambda: call(randn(4, 3)))
class MaskCachedByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if n not in self.masks:
            self.masks[n] = torch.ones(n, n).tril()
        return self.masks[n] @ x


@register(kept=lambda: call(positive(2)), flushed=lambda: call(negative(2)))
class HistoryList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:
            self.history.clear()
        self.history.append(x)
        return torch.stack(self.history[-3:]).mean(0)


@register(
    one=lambda: call(randn(1, 2)),
    several=lambda: call(randn(3, 2)),
    wraps=lambda: call(randn(5, 2)),
)
class RingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 2))
        self.register_buffer("cursor", torch.tensor(0))

    def forward(self, xs: Tensor) -> Tensor:
        for x in xs:
            self.memory[self.cursor] = x
            self.cursor.copy_((self.cursor + 1) % 4)
        return self.memory[: int(self.cursor) or 4].sum(0)


@register(update=lambda: call(randn(2, 2), True), frozen=lambda: call(randn(2, 2), False))
class MomentumTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor, update: bool) -> Tensor:
        if update:
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
                for t, s in pairs:
                    t.lerp_(s, 0.1)
        return self.student(x) - self.teacher(x)


@register(cold=lambda: call(floats(1, 2)), scaled=lambda: call(floats(10, 20)))
class InitialisedOnFirstCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data.copy_(x.std())
            self.ready = True
        return x / self.scale if self.scale > 2 else x


@register(warm=lambda: call(randn(3), 1), long=lambda: call(randn(3), 5))
class StepBufferSchedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, n: int) -> Tensor:
        for _ in range(n):
            self.step += 1
            x = x * 0.5 if self.step <= 3 else x + 1
        return x


@register(same=lambda: call(torch.ones(3)), changed=lambda: call(torch.zeros(3)))
class LastInputRemembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones(3)
        self.result = torch.full((3,), 5.0)

    def forward(self, x: Tensor) -> Tensor:
        if torch.equal(x, self.last):
            return self.result
        self.last, self.result = x.clone(), (x + 1).exp()
        return self.result
