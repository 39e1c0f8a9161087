"""Networks that decide on their own depth: adaptive halting, early exit, fixed points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, positive, randn, register, register_factory


@register(
    eager=lambda: call(randn(1, 3), 3.0),
    patient=lambda: call(randn(1, 3), -1.0),
    capped=lambda: call(randn(1, 3), -9.0),
)
class AdaptiveComputationTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.halt = nn.Linear(3, 1)

    def forward(self, x: Tensor, bias: float) -> tuple[Tensor, Tensor, int]:
        h, out = torch.zeros_like(x), torch.zeros_like(x)
        spent, steps = x.new_zeros(()), 0
        while spent < 0.99 and steps < 8:
            h = self.cell(x, h)
            p = (self.halt(h) + bias).sigmoid().squeeze()
            if spent + p > 0.99:
                p = 1 - spent
            out = out + p * h
            spent = spent + p
            steps += 1
        return out, spent, steps


@register(
    first=lambda: call(randn(2, 4), 0.0),
    later=lambda: call(randn(2, 4), 1.1),
    never=lambda: call(randn(2, 4), 2.0),
)
class EarlyExitClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor, threshold: float) -> tuple[Tensor, int]:
        for depth, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            x = block(x).relu()
            p = head(x).softmax(-1)
            if p.max(-1).values.min() > threshold - 0.4 * depth:
                return p, depth
        return p, len(self.blocks)


@register(
    none_left=lambda: call(floats(9, 9)),
    some_left=lambda: call(floats(9, 0, 4)),
    all_left=lambda: call(floats(1, 2)),
)
def rows_leave_the_batch(x: Tensor) -> Tensor:
    out, active = x.clone(), torch.arange(len(x))
    while len(active):
        out[active] = out[active] * 1.5 + 1
        active = active[out[active] < 12]
    return out


@register(
    loose=lambda: call(randn(2, 3), 0.3),
    tight=lambda: call(randn(2, 3), 1e-3),
    exhausted=lambda: call(randn(2, 3), 0.0),
)
class DeepEquilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x: Tensor, tol: float) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(25):
            z_next = torch.tanh(0.5 * self.w(z) + x)
            if (z_next - z).norm() < tol:
                return z_next
            z = z_next
        return z


@register(confident=lambda: call(floats(9, 0, 0)), unsure=lambda: call(floats(1, 1, 1)))
class CascadeToLargerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Identity()
        self.large = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        p = self.small(x).softmax(-1)
        entropy = -(p * p.log()).sum()
        return p if entropy.item() < 0.5 else self.large(x).softmax(-1)


class _RepeatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, limit: float) -> Tensor:
        change, rounds = float("inf"), 0
        while change > limit and rounds < 5:
            y = self.block(x)
            change = (y - x).abs().mean().item()
            x, rounds = y, rounds + 1
        return x


@register_factory(
    once=lambda: call(randn(1, 3, 4), 100.0), capped=lambda: call(randn(1, 3, 4), 0.0)
)
def transformer_repeated_until_stable() -> nn.Module:
    return _RepeatedBlock().eval()


@register(small=lambda: call(positive(2) * 0.1), large=lambda: call(positive(2) * 30))
class PonderPerElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(()) * 0.1 + 0.4)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for v in x:
            n = 0
            while v > 0.5:
                v = v * self.decay
                n += 1
            rows.append(torch.stack([v, v.new_tensor(float(n))]))
        return torch.stack(rows)
