"""Recursion on shapes, on data, and between methods."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, floats, ints, positive, randn, register


@register(
    column=lambda: call(randn(2, 1, 5, 5)),
    channels=lambda: call(randn(2, 3, 5, 5)),
    batch=lambda: call(randn(4, 1, 5, 5)),
)
class Doug(nn.Module):
    """Splits channels by recursion, then batch rows by a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return torch.cat([self.forward(x[:, [i]]) for i in range(x.shape[1])], -1)
        outs = []
        for i in range(x.shape[0]):
            outs.append(F.relu(self.norm(self.conv(x[[i]]))))
        return sum(outs)


@register(
    leaf=lambda: call(randn(2, 3)), even=lambda: call(randn(4, 3)), odd=lambda: call(randn(7, 3))
)
class BinarySplitOnLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 2:
            return x.mean(0)
        mid = len(x) // 2
        return self.merge(torch.cat([self(x[:mid]), self(x[mid:])])).tanh()


@register(
    small=lambda: call(floats(0.1, 0.2, 0.3, 0.2)),
    left=lambda: call(floats(5, 1, 0, 0)),
    both=lambda: call(floats(5, 1, 4, 2)),
)
def binary_split_until_small(x: Tensor) -> Tensor:
    if x.sum() < 1 or len(x) == 1:
        return x * 10
    mid = len(x) // 2
    return torch.cat([binary_split_until_small(x[:mid]), binary_split_until_small(x[mid:])])


@register(one=lambda: call(floats(1)), two=lambda: call(floats(3)), many=lambda: call(floats(50)))
class MutualRecursion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.b = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.ping(x, x.abs().sum())

    def ping(self, x: Tensor, budget: Tensor) -> Tensor:
        return x if budget < 1 else self.pong(self.a(x), budget / 2)

    def pong(self, x: Tensor, budget: Tensor) -> Tensor:
        return -x if budget < 1 else self.ping(self.b(x), budget / 3)


@register(
    zero=lambda: call(randn(2), 0), one=lambda: call(randn(2), 1), three=lambda: call(randn(2), 3)
)
class RecursionOnArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 2)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return x
        return self(self.left(x), depth - 1) + self(self.right(x).relu(), depth - 1)


@register(
    sorted=lambda: call(floats(1, 2, 3, 4)),
    reversed=lambda: call(floats(4, 3, 2, 1)),
    mixed=lambda: call(floats(3, 1, 4, 2)),
)
def merge_sort(x: Tensor) -> Tensor:
    if len(x) < 2:
        return x
    a, b = merge_sort(x[: len(x) // 2]), merge_sort(x[len(x) // 2 :])
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            out.append(a[i])
            i += 1
        else:
            out.append(b[j])
            j += 1
    return torch.cat([torch.stack(out), a[i:], b[j:]])


@register(
    balanced=lambda: call(floats(2, 1, 3)),
    chain=lambda: call(floats(1, 2, 3)),
    one=lambda: call(floats(7)),
)
def quick_sort_by_masks(x: Tensor) -> Tensor:
    if x.numel() <= 1:
        return x
    pivot, rest = x[:1], x[1:]
    low, high = rest[rest < pivot], rest[rest >= pivot]
    return torch.cat([quick_sort_by_masks(low), pivot, quick_sort_by_masks(high)])


@register(coprime=lambda: call(ints(9), ints(4)), multiple=lambda: call(ints(8), ints(4)))
def euclid(a: Tensor, b: Tensor) -> Tensor:
    return a if b == 0 else euclid(b, a % b)


@register(
    odd=lambda: call(randn(2, 2), 5),
    even=lambda: call(randn(2, 2), 8),
    zero=lambda: call(randn(2, 2), 0),
)
def power_by_squaring(m: Tensor, n: int) -> Tensor:
    if n == 0:
        return torch.eye(m.shape[0])
    half = power_by_squaring(m, n // 2)
    return half @ half @ m if n % 2 else half @ half


@register(
    flat=lambda: call(torch.ones(4, 4)),
    corner=lambda: call(torch.diag(floats(3, 0, 0, 0))),
    busy=lambda: call(randn(4, 4) * 3),
)
def quadtree(x: Tensor) -> Tensor:
    if x.shape[0] == 1 or x.max() - x.min() < 0.5:
        return x.mean().expand(x.shape)
    h = x.shape[0] // 2
    top = torch.cat([quadtree(x[:h, :h]), quadtree(x[:h, h:])], 1)
    bottom = torch.cat([quadtree(x[h:, :h]), quadtree(x[h:, h:])], 1)
    return torch.cat([top, bottom])


@register(shallow=lambda: call(positive(3) * 0.2), deep=lambda: call(positive(3) * 8))
def local_recursive_closure(x: Tensor) -> Tensor:
    scale = x.mean()

    def shrink(y: Tensor, depth: int) -> Tensor:
        if depth > 6 or y.max() < 1:
            return y - scale
        return shrink(y * 0.6, depth + 1)

    return shrink(x, 0)
