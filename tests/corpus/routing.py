"""Routing tokens and samples to experts, branches and depths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, floats, ints, randn, register


def _experts(n: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n))


@register(
    one=lambda: call(randn(1, 4)),
    many=lambda: call(randn(12, 4)),
)
class TopOneExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = _experts(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == i)
            if rows.numel() == 0:
                continue
            out[rows] = weight[rows, None] * expert(x[rows])
        return out


@register(one=lambda: call(randn(1, 4)), many=lambda: call(randn(9, 4)))
class TopTwoExpertsWithIndexAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = _experts(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).topk(2, dim=-1)
        weight = weight.softmax(-1)
        out = x.new_zeros(x.shape)
        hit = F.one_hot(choice, len(self.experts)).sum((0, 1)).nonzero().flatten()
        for i in hit.tolist():
            rows, slot = torch.where(choice == i)
            out.index_add_(0, rows, self.experts[i](x[rows]) * weight[rows, slot, None])
        return out


@register(
    fits=lambda: call(randn(6, 3), ints(0, 1, 0, 1, 0, 1)),
    overflows=lambda: call(randn(6, 3), ints(0, 0, 0, 0, 0, 1)),
    one_sided=lambda: call(randn(4, 3), ints(1, 1, 1, 1)),
)
class ExpertCapacity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = _experts(2, 3)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        capacity, out = 3, x.clone()
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows) > capacity:
                rows = rows[:capacity]
            if len(rows):
                out[rows] = expert(x[rows])
        return out


@register(first=lambda: call(ints(0), randn(2, 3)), last=lambda: call(ints(2), randn(2, 3)))
class ExpertByTracedIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Identity()])

    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        return self.layers[int(idx)](x)


@register(
    alternating=lambda: call(randn(3, 3), ints(0, 1, 0)),
    repeated=lambda: call(randn(2, 3), ints(1, 1)),
)
class ExpertPerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"task0": nn.Linear(3, 2), "task1": nn.Bilinear(3, 3, 2)})

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        out = []
        for row, task in zip(x, tasks.tolist(), strict=True):
            head = self.heads[f"task{task}"]
            out.append(head(row, row) if isinstance(head, nn.Bilinear) else head(row))
        return torch.stack(out)


@register(three=lambda: call(randn(1, 1, 6, 6) * 0.01), five=lambda: call(randn(1, 1, 6, 6) * 3))
class KernelSizeByContrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.randn(2, 1, k, k) for k in (3, 5))

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernels[1 if x.std() > 0.5 else 0]
        return F.conv2d(x, kernel, padding=kernel.shape[-1] // 2)


@register(
    every=lambda: call(randn(4, 3), floats(1, 1, 1)),
    middle=lambda: call(randn(4, 3), floats(0, 1, 0)),
    none=lambda: call(randn(4, 3), floats(0, 0, 0)),
)
class SkippedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        for gate, block in zip(gates, self.blocks, strict=True):
            if gate > 0.5:
                x = x + block(x).relu()
        return x


@register(
    none=lambda: call(randn(4, 3), 0.0),
    half=lambda: call(randn(4, 3), 0.5),
    all=lambda: call(randn(4, 3), 1.0),
)
class MixtureOfDepths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, fraction: float) -> Tensor:
        for block in self.blocks:
            k = int(fraction * len(x))
            if k == 0:
                continue
            if k == len(x):
                x = x + block(x)
                continue
            weight, rows = self.score(x).squeeze(-1).topk(k)
            x = x.index_add(0, rows, block(x[rows]) * weight.sigmoid()[:, None])
        return x


@register(
    root=lambda: call(floats(-5, -5)),
    left=lambda: call(floats(5, -5)),
    right=lambda: call(floats(5, 5)),
)
def decision_tree(x: Tensor) -> Tensor:
    node, tree = 0, {0: (0, 0.5, 1, 2), 2: (1, 0.0, 3, 4)}
    while node in tree:
        feature, threshold, below, above = tree[node]
        node = below if x[feature] < threshold else above
    return x * node


@register(two=lambda: call(randn(2, 2), [1, 0]), three=lambda: call(randn(2, 2), [2, 2, 1]))
class ProgramOfModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2)])

    def forward(self, x: Tensor, program: list[int]) -> Tensor:
        for op in program:
            x = self.steps[op](x)
        return x


@register(
    local=lambda: call(randn(5, 2), ints(0, 0, 0, 0, 0)),
    split=lambda: call(randn(5, 2), ints(0, 0, 1, 1, 1)),
)
def attention_within_segments(x: Tensor, segments: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for s in segments.unique():
        part = x[segments == s]
        out[segments == s] = (part @ part.T).softmax(-1) @ part
    return out
