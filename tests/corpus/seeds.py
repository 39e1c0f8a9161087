"""Models that draw from torch's random number generator between branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, ints, negative, positive, randn, register


@register(positive=lambda: call(positive(4, 8)), negative=lambda: call(negative(4, 8)))
class DropoutInTrainModeThenBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x)
        return y.relu() + self.drop(x) if y.sum() > 0 else y * 2


@register(one=lambda: call(randn(3, 4), 1), three=lambda: call(randn(3, 4), 3))
def dropout_in_loop(x: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x + F.dropout(x, 0.3)
    return x


@register(noisy=lambda: call(randn(4), 1.0), quiet=lambda: call(randn(4), 0.0))
def noise_added_on_request(x: Tensor, sigma: float) -> Tensor:
    return x + sigma * torch.randn_like(x) if sigma > 0 else x * torch.rand(())


@register(always=lambda: call(randn(2, 3), 0.0), never=lambda: call(randn(2, 3), 1.0))
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, drop: float) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) >= drop:
                x = x + block(x)
        return x


@register(peaked=lambda: call(torch.eye(3) * 50), two=lambda: call(torch.eye(3).roll(1, 0) * 50))
def multinomial_until_stop(logits: Tensor) -> list[int]:
    token, out = 0, []
    for _ in range(5):
        token = torch.multinomial(logits[token].softmax(-1), 1).item()
        out.append(token)
        if token == 2:
            break
    return out


@register(small=lambda: call(randn(3, 2)), large=lambda: call(randn(6, 2)))
def random_permutation(x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return x[order[:4]] if len(x) > 4 else x[order].cumsum(0)


@register(first=lambda: call(randn(3), 0), second=lambda: call(randn(3), 7))
def own_generator(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    y = x + torch.randn(3, generator=generator)
    return y if seed else y * torch.rand(3, generator=generator)


@register(
    accepted=lambda: call(ints(1)), rejected=lambda: call(ints(40)), never=lambda: call(ints(50))
)
def rejection_sampling(low: Tensor) -> Tensor:
    draws = torch.rand(50).mul(50).long()
    for i, draw in enumerate(draws):
        if draw >= low:
            return draws[: i + 1]
    return draws
