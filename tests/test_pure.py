"""Functions of autograd that only compute, after which a run may be done again from its start."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.benchmarks.memory import peak_of

SEEN: list[Any] = []
COUNTS = {"calls": 0}
BUFFER = torch.zeros(3)


def half(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(math.pi * x))


def noted(x: Tensor) -> Tensor:
    SEEN.append(x.shape)
    return x


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = x.shape[0]
        return half(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        SEEN.append("backward")
        return grad * ctx.saved_tensors[0]


class Inherits(Gelu):
    pass


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return torch.sigmoid(x) * factor if x.dim() > 0 else x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SEEN.append(x.shape)
        return x * 2


class ByAHelper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return noted(x) * 2


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return x * 2


class OnItself(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        OnItself.calls += 1
        return x * 2


class Prints(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        print("forward")
        return x * 2


class Numpys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy().sort()
        return x * 2


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x
        y += 1
        return y * 2


class SetsOnATensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.note = 1  # type: ignore[attr-defined]
        return x * 2


class SetupNotes(Separate):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        SEEN.append(ctx)


class InPlaceOnState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        BUFFER.add_(1)
        return x * 2


PURE = [(Gelu,), (Inherits,), (Separate, 2.0), (Draws,)]
IMPURE = [
    (Appends,), (ByAHelper,), (Counts,), (OnItself,), (Prints,), (Numpys,), (Adds,),
    (SetsOnATensor,), (SetupNotes, 2.0), (InPlaceOnState,),
]  # fmt: skip


class Gated(nn.Module):
    def __init__(self, function: Any, *given: Any) -> None:
        super().__init__()
        self.function, self.given = function, given

    def forward(self, x: Tensor) -> Tensor:
        for gate in range(3):
            y = self.function.apply(x + 1, *self.given)
            x = x + y if x[gate] > 0 else x - y
        return x


def is_a_graph(bended: bt.BendedModule) -> bool:
    return next(bended._tree.programs()).graph is not None


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


SIGNS = [torch.tensor(signs) for signs in itertools.product((4.0, -4.0), repeat=3)]


@pytest.mark.parametrize("which", PURE, ids=lambda which: which[0].__name__)
def test_a_function_that_only_computes_may_be_called_again(which: Any) -> None:
    model = Gated(*which)
    bended = bt.BendedModule(model)
    for x in SIGNS * 2:
        torch.manual_seed(0)
        wanted = model(x), torch.rand(1)
        torch.manual_seed(0)
        assert all(map(torch.equal, (bended(x), torch.rand(1)), wanted))
    assert is_a_graph(bended)
    assert bended.stats.replays >= 8


@pytest.mark.parametrize("which", IMPURE, ids=lambda which: which[0].__name__)
def test_one_that_does_more_is_called_once(which: Any) -> None:
    """As often as by eager, whatever the calls are."""

    def effects() -> Any:
        return len(SEEN), COUNTS["calls"], OnItself.calls, BUFFER.clone().tolist()

    def change(model: Any, x: Tensor) -> Any:
        before = effects()
        given = model(x.clone())
        after = effects()
        moved = [b - a for a, b in zip(before[:3], after[:3], strict=True)]
        return given, moved, after[3][0] - before[3][0]

    model = Gated(*which)
    bended = bt.BendedModule(model)
    for x in SIGNS * 2:
        wanted, given = change(model, x), change(bended, x)
        assert torch.equal(given[0], wanted[0])
        assert given[1:] == wanted[1:]
    program = next(bended._tree.programs())
    assert program.live_only or program.graph is None


def test_a_replay_with_one_holds_what_the_model_holds() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8):
                x = Gelu.apply(x * 2) + 1
            return x if x.isfinite().all() else x.nan_to_num()

    bended = bt.BendedModule(Deep())
    x = torch.ones(64, 64)
    with torch.no_grad():
        bended(x)
        eager, _ = peak_of(lambda: Deep()(x))
        replay, left = peak_of(lambda: bended(x))
    assert bended.stats.replays == 1
    assert replay <= eager
    assert left == 0


class Converts(nn.Module):
    """Converts a layer, which changes nothing, and asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer.to(x.dtype)
        for gate in range(3):
            y = layer(x)
            x = x + y if x[gate] > 0 else x - y
        return x


def test_weights_that_are_converted_to_what_they_are() -> None:
    model = Converts()
    bended = bt.BendedModule(model)
    for x in SIGNS * 2:
        assert torch.equal(bended(x), model(x))
    assert is_a_graph(bended)
    assert bended.stats.replays > 8


def test_weights_that_are_converted_to_something_else() -> None:
    model, other = Converts(), Converts()
    other.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model)
    for x in SIGNS:
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(bended(x.to(dtype)), other(x.to(dtype)))
            assert model.layer.weight.dtype is other.layer.weight.dtype is dtype
