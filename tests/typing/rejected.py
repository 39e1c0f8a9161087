"""What type checkers refuse: each error is expected, and an `ignore` without one is an error."""

from __future__ import annotations

import torch
from torch import Tensor

import bendtrace as bt
from tests.typing.test_accepted import Net, doubled

X = torch.ones(1, 2)


def model() -> None:
    bended = bt.BendedModule(Net())
    bended.model.fc.forward(3)  # type: ignore[arg-type]
    bt.BendedModule(3)  # type: ignore[type-var]
    bt.BendedModule(doubled)(X, factor=3)  # type: ignore[call-arg]


def opaque() -> None:
    @bt.opaque
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    scaled(X, "2")  # type: ignore[arg-type]
    bt.opaque(3)  # type: ignore[arg-type]
