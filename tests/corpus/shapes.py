"""Control flow and arithmetic on shapes, sizes, ranks and layouts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, ints, randn, register


@register(
    vector=lambda: call(randn(4)),
    matrix=lambda: call(randn(2, 4)),
    batch=lambda: call(randn(3, 2, 4)),
)
class RankByDim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.proj(x[None])[0]
        if x.dim() == 2:
            return self.proj(x)
        return self.proj(x.flatten(0, -2)).sum(0)


@register(
    scalar=lambda: call(randn()), vector=lambda: call(randn(3)), matrix=lambda: call(randn(3, 2))
)
def rank_by_ndim(x: Tensor) -> Tensor:
    while x.ndim < 2:
        x = x.unsqueeze(0)
    return x.T


@register(
    none=lambda: call(randn(0, 3)), few=lambda: call(randn(1, 3)), many=lambda: call(randn(5, 3))
)
def numel_branch(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_ones(1, 3)
    return x / x.numel() if x.numel() > 4 else x


@register(
    one=lambda: call(randn(1, 3)), few=lambda: call(randn(4, 3)), many=lambda: call(randn(9, 3)),
    none=lambda: call(randn(0, 3)),
)  # fmt: skip
def numbers_by_value(x: Tensor) -> tuple[Tensor, int, float]:
    """C code makes numbers of sizes and of values, and a loop counts to one."""
    positive = int((x > 0).sum())
    h = x.new_zeros(3)
    for i in range(len(x)):
        h = torch.tanh(h + x[i] / math.sqrt(x.shape[0]))
    return x.new_ones(positive, 2) * h[0], positive, float(h.abs().sum())


@register(single=lambda: call(randn(1, 2)), several=lambda: call(randn(3, 2)))
def len_branch(x: Tensor) -> Tensor:
    return x.std(0) if len(x) > 1 else x[0] * len(x)


@register(flat=lambda: call(randn(2, 6)), image=lambda: call(randn(3, 2, 3)))
class ViewToBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        if x.dim() > 2:
            x = x.view(b, -1)
        return self.head(x)


@register(
    same=lambda: call(randn(2, 3), randn(2, 3)), broadcast=lambda: call(randn(2, 3), randn(1, 3))
)
def expand_to_shape(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        y = y.expand(x.shape[0], -1)
    return x * y


@register(
    even=lambda: call(randn(1, 2, 4, 6), 2),
    three=lambda: call(randn(2, 1, 6, 3), 3),
    odd=lambda: call(randn(1, 1, 5, 5), 2),
)
def space_to_depth(x: Tensor, p: int) -> Tensor:
    b, c, h, w = x.shape
    if h % p or w % p:
        x = x[:, :, : h // p * p, : w // p * p]
        h, w = x.shape[2:]
    x = x.reshape(b, c, h // p, p, w // p, p)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(b, c * p * p, h // p, w // p)


@register(two=lambda: call(randn(2, 3), 2), scalar=lambda: call(randn(3), 0))
def size_concatenation(x: Tensor, n: int) -> Tensor:
    tail = (n,) if n else ()
    return torch.ones(x.shape[:-1] + tail) * x.sum()


@register(match=lambda: call(randn(2, 2), randn(2, 2)), differ=lambda: call(randn(2, 2), randn(3)))
def size_equality(x: Tensor, y: Tensor) -> Tensor:
    if x.shape == y.shape:
        return x + y
    return torch.cat([x.flatten(), y.flatten()])


@register(small=lambda: call(randn(2, 3)), large=lambda: call(randn(2, 3, 4)))
def math_prod_of_shape(x: Tensor) -> Tensor:
    if math.prod(x.shape) > 10:
        return x.flatten()[: math.prod(x.shape[1:])]
    return x * math.sqrt(math.prod(x.shape))


@register(two=lambda: call(randn(4, 2)), three=lambda: call(randn(5, 2, 3)))
def starred_shape(x: Tensor) -> Tensor:
    n, *rest = x.shape
    pad = x.new_zeros(n + 1, *rest)
    pad[:n] = x
    return pad if len(rest) > 1 else pad.T


@register(zero=lambda: call(ints(0)), three=lambda: call(ints(3)), six=lambda: call(ints(6)))
def full_of_traced_length(n: Tensor) -> Tensor:
    k = int(n)
    if k == 0:
        return torch.full((1,), -1.0)
    return torch.full((k,), 0.5).cumsum(0)


@register(short=lambda: call(ints(2, 1)), long=lambda: call(ints(2, 5)))
def arange_of_traced_length(counts: Tensor) -> Tensor:
    n = counts.sum().item()
    positions = torch.arange(n)
    return positions * 2 if n < 5 else positions.flip(0)


@register(needed=lambda: call(randn(1, 3)), full=lambda: call(randn(4, 3)))
def zeros_like_padding(x: Tensor) -> Tensor:
    while len(x) < 4:
        x = torch.cat([x, torch.zeros_like(x)])
    return x


@register(exact=lambda: call(randn(2, 8)), ragged=lambda: call(randn(2, 5)))
def pad_to_multiple(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 4
    if missing:
        x = F.pad(x, (0, missing))
    return x.view(x.shape[0], -1, 4).mean(-1)


@register(
    up=lambda: call(randn(1, 2, 3, 3), randn(1, 2, 6, 5)),
    down=lambda: call(randn(1, 2, 6, 6), randn(1, 2, 3, 3)),
    same=lambda: call(randn(1, 2, 4, 4), randn(1, 2, 4, 4)),
)
class InterpolateToSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if x.shape[2:] != skip.shape[2:]:
            mode = "nearest" if x.shape[2] > skip.shape[2] else "bilinear"
            x = F.interpolate(x, size=(skip.shape[2], skip.shape[3]), mode=mode)
        return self.conv(x) + skip


@register(dense=lambda: call(randn(3, 4)), transposed=lambda: call(randn(4, 3).T))
def contiguity_branch(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous() * 2
    return x.view(-1)


@register(broadcast=lambda: call(randn(1, 4).expand(3, 4)), dense=lambda: call(randn(3, 4)))
def stride_branch(x: Tensor) -> Tensor:
    return x[:1] * x.shape[0] if x.stride(0) == 0 else x.sum(0, keepdim=True)


@register(none=lambda: call(randn(2, 3)), two=lambda: call(randn(1, 2, 1, 3)))
def squeeze_while_unit(x: Tensor) -> Tensor:
    while 1 in x.shape:
        x = x.squeeze(x.shape.index(1))
    return x.exp()


@register(
    wide=lambda: call(randn(2, 5)), tall=lambda: call(randn(5, 2)), square=lambda: call(randn(3, 3))
)
def gram_of_shorter_side(x: Tensor) -> Tensor:
    rows, columns = x.size()
    if rows == columns:
        return x
    return x @ x.T if rows < columns else x.T @ x


@register(first=lambda: call(randn(6), randn(2)), second=lambda: call(randn(2), randn(7)))
def shape_minimum_crop(x: Tensor, y: Tensor) -> Tensor:
    n = min(x.shape[0], y.size(0))
    longer = x if x.shape[0] > n else y
    return x[:n] * y[:n] + longer.mean()
