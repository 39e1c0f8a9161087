"""Models with data-dependent flow, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Gated(nn.Module):
    """Layers with an `if` on their values each."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.relu() if x.mean() > 0 else x * 0.5
        return x


class Experts(nn.Module):
    """A mixture of experts with a loop over them; they take the rows that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        top, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, functional.silu(expert(x[rows])) * top[rows, which, None])
        return out


class MaskedExperts(Experts):
    """The same with masks: every expert computes all rows, if any chose it."""

    def forward(self, x: Tensor) -> Tensor:
        top, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                out = out + (top * mask).sum(-1, keepdim=True) * functional.silu(expert(x))
        return out


class Assigned(Experts):
    """The same, each row by one expert, assigned through a mask."""

    def forward(self, x: Tensor) -> Tensor:
        top, chosen = self.gate(x).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                out[mask] = functional.silu(expert(x[mask])) * top[mask][:, None]
        return out


class Layered(nn.Module):
    """Mixtures of experts behind each other, with sizes read from what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Assigned()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.shape[0] > 2:
                x = x.view(x.shape[0] // 2, 2, x.shape[1]).flatten(0, 1)
        return x
