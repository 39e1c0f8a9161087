"""The tiny models that `self_test.py` records, written as a user would.

They are not imported but compiled under another name, because the tracer does not take code of this
package for a model's.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from bendtrace.python.internals import TorchDispatchMode


def shrinks(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def walks(x: Tensor) -> Tensor:
    for value in x.tolist():
        if value > 1.5:
            x = x + 1
    return x


def grows(x: Tensor) -> Tensor:
    while x.shape[0] < 5 and x.sum() > 0:
        x = torch.cat([x, x])
    return -x if any(row > 9 for row in x) else x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.ReLU = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def sizes(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return x.reshape(rows * 2, -1) if isinstance(rows, int) and x.sum() > rows else x


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand(2)


def maps(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return torch.func.vmap(lambda row: row * rows)(x)  # type: ignore[no-any-return]


def saves(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pass  # no op, of which the recorder would ask who handles its errors
    return x * 2


def dispatches(x: Tensor) -> Tensor:
    with TorchDispatchMode():
        pass
    return x + 0


def is_dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        pass
    return x + 0


def starts_thread(x: Tensor) -> Tensor:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return x + 0


def reads_clock(x: Tensor) -> Tensor:
    return x + time.time()


def reads_environment(x: Tensor) -> Tensor:
    return x + len(os.environ.get("BENDTRACE_PROBE", ""))


def opens(x: Tensor) -> Tensor:
    with open(os.devnull):
        pass
    return x + 0


def draws(x: Tensor) -> Tensor:
    random.seed(0)
    return x * random.random()


def applies(x: Tensor) -> Tensor:
    return Twice.apply(x)  # type: ignore[no-any-return]


class Followed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer: Outer = Outer()

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = (self.outer, sizes, applies, maps, reads_clock, reads_environment, draws)
        return [part(x) for part in parts]


def live(x: Tensor) -> list[Tensor]:
    parts = (saves, dispatches, is_dual, starts_thread, opens)
    return [part(x) for part in parts]
