"""Models for test_tree.py. In a test file, pytest would rewrite their assert statements."""

from __future__ import annotations

import torch
from torch import nn


class Refine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        nn.init.zeros_(self.step.weight), nn.init.zeros_(self.step.bias)

    def forward(self, x: torch.Tensor, tolerance: float = 1.0) -> torch.Tensor:
        if x.shape[0] > 3:
            x = x[:3]
        while x.norm() > tolerance:
            x = x * self.step(x).sigmoid()
            if x.isnan().any():
                break
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(x)
        x = x.relu() if x.mean() > 0 else x.tanh()
        return x, self.head(x)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(12))

    def forward(self, x: torch.Tensor, threshold: float = 0.5) -> torch.Tensor:
        for layer in self.layers:
            x, logits = layer(x)
            if logits.softmax(-1).max() > threshold:
                return logits
        return logits * 2


def halve(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    steps = 0
    while x.sum() > 1:
        x = x / 2
        steps += 1
    return x, steps


def sorts(x: torch.Tensor, n: int = 1) -> torch.Tensor:
    if not x.any():
        return x
    if n > 3 and x.sum() > 0:
        y = x * n
    elif x.min() < -5:
        y = -x
    else:
        y = x
    assert y.sum() != 7, "seven"
    return y * int(y.max())


def covers(
    x: torch.Tensor, flag: bool = False, known: tuple[int, ...] = (), n: int = 0
) -> torch.Tensor:
    if flag:
        x = x + 1
    if x.sum() > 100:
        if x.max() > 1000:
            return x * 0
        x = x - 1
    while x.sum() > 10 and n < 5:
        x, n = x / 2, n + 1
    y = x * 2 if x.min() > 0 else -x
    kept = [v for v in y if v > 1]
    for item in known:
        if item == 3:
            y = y + 1
            break
    else:
        y = y - 1
    assert y.sum() != 7
    if flag or y.sum() > 50:
        y = y.sin()
    return y + len(kept)
