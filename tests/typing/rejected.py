"""What type checkers refuse: each error is expected, and an `ignore` without one is an error."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

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


def where_and_what() -> None:
    bended = bt.BendedModule(Net())
    bended.interject("fc", 3)  # type: ignore[arg-type]
    bended.interject(3, torch.zeros_like)  # type: ignore[arg-type]
    bended.interject(["fc", 3], torch.zeros_like)  # type: ignore[list-item]
    bended.interject("fc", torch.zeros_like, passes="first")  # type: ignore[arg-type]
    bended.get_activations(X)  # type: ignore[call-overload]
    bended.get_activations("fc", passes=0.5, args=(X,))  # type: ignore[call-overload]
    bended.bend(2.0, "fc")  # type: ignore[arg-type]
    bended.bend(bt.bends.Scale(2.0), 3)  # type: ignore[arg-type]
    bended.patch({"fc": 3})  # type: ignore[dict-item]
    bt.rewriting.replace(bended, None, torch.relu)  # type: ignore[arg-type]
    bt.workflows.ablate(bended, 3)  # type: ignore[arg-type]


def logs() -> None:
    log = bt.trace(Net(), X, save=1.5)  # type: ignore[arg-type]
    log[1.5]  # type: ignore[call-overload]
    log["fc"].parents + 1  # type: ignore[operator]
    print(log[0].shapes)  # type: ignore[attr-defined]
