"""The model that `python -m bendtrace` traces by default."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveBlock(nn.Module):
    """Refines its input until a further step changes it only slightly, as equilibrium models do.

    Args:
        width: number of features; inputs with fewer are padded.
        limit: inputs with a larger value are scaled down first.
        tolerance: the largest change of a feature that counts as slight.
    """

    tolerance: float
    limit: float
    width: int

    def __init__(self, width: int = 8, limit: float = 4.0, tolerance: float = 0.4) -> None:
        super().__init__()
        self.mix: nn.Linear = nn.Linear(width, width)
        self.width, self.limit, self.tolerance = width, limit, tolerance

    def forward(self, x: Tensor) -> Tensor:
        """Take and return a tensor of shape (batch, features)."""
        missing = self.width - x.shape[1]
        if missing > 0:  # a shape decides
            x = F.pad(x, (0, missing))
        if x.max() > self.limit:  # values decide
            x = x / x.max()
        new = torch.tanh(self.mix(x))
        while torch.dist(new, x, inf) > self.tolerance:  # and how often: values again
            x, new = new, torch.tanh(self.mix(new))
        return new
