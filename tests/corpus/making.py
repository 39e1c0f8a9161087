"""Tensors that old constructors, numpy and modules of the run make, on paths that data chooses."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ._case import call, negative, positive, randn, register

TABLE = np.linspace(0, 1, 6, dtype=np.float32)


@register(positive=lambda: call(positive(3)), negative=lambda: call(negative(3)))
def variable_of_noise(x: Tensor) -> Tensor:
    noise = Variable(torch.randn(x.size(0)))
    return Variable(x.data) + noise if x.sum() > 0 else x * Variable(noise, requires_grad=True)


@register(
    two=lambda: call(randn(2, 3)), three=lambda: call(randn(3, 3)), none=lambda: call(randn(0, 3))
)
class LegacyState(nn.Module):
    """A recurrent layer of the old kind, which makes its own first state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Variable(torch.zeros(1, 2))
        for row in x:
            hidden = torch.tanh(self.cell(torch.cat([row[None], hidden], 1)))
        return hidden[:, torch.LongTensor([1, 0])] * torch.Tensor([2, 3])


@register(
    three=lambda: call(randn(3, 3)),
    five=lambda: call(randn(5, 3)),
    shifted=lambda: call(negative(3, 3)),
)
def numpy_mask(x: Tensor) -> Tensor:
    mask = np.triu(np.ones((len(x), len(x))), k=1).astype("uint8")
    allowed = torch.from_numpy(mask) == 0
    table = torch.from_numpy(TABLE)[: len(x)]
    return allowed.float() @ x if x.max() > 0 else x * table[:, None]


@register(positive=lambda: call(positive(3)), negative=lambda: call(negative(3)))
class ModulesOfForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = copy.deepcopy(self.fc)(x)
        if x.sum() > 0:
            y = nn.Dropout(0.3)(y) * nn.Parameter(torch.ones(3))
        return y * 2 if y.grad_fn is not None else y


class _Spread(torch.autograd.Function):
    """Goes by whether it is given a `torch.Size`."""

    @staticmethod
    def forward(ctx, x: Tensor, size: object) -> Tensor:  # type: ignore[no-untyped-def]
        return x / size.numel() if isinstance(size, torch.Size) else x * 0

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return grad, None


@register(
    two=lambda: call(positive(2, 2)), three=lambda: call(positive(3, 3)),
    negative=lambda: call(negative(2, 2)), none=lambda: call(randn(0, 2)),
)  # fmt: skip
def tensors_by_size(x: Tensor) -> Tensor:
    noise = torch.FloatTensor(x.size()).normal_() + torch.Tensor(x.shape[1:]).fill_(2)
    if x.sum() > 0:
        return noise * x.new(x.size()).fill_(0.5) + torch.FloatTensor(x.sum().size()).fill_(1)
    return _Spread.apply(noise + x, torch.Size([2]) + x.size())
