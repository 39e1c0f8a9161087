"""`bt.opaque`: a function that is recorded as one op, whatever it does inside."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Stateful, given
from tests.promise import assert_promise, bits, randn_inputs

border = Border()


@bt.opaque
def smooth(x: Tensor, width: int = 2) -> Tensor:
    """Smooth with numpy."""
    kernel = np.ones(width, np.float32) / width
    return torch.from_numpy(np.convolve(x.detach().numpy().ravel(), kernel, "same"))


@bt.opaque
def fill(x: Tensor, value: float) -> None:
    x.detach().numpy().fill(value)


@bt.opaque
def bump(x: Tensor) -> Tensor:
    x.detach().numpy()[...] += 1
    return x


@bt.opaque
def largest(x: Tensor) -> float:
    return float(x.detach().numpy().max())


@bt.opaque
def describe(x: Tensor) -> str:
    return "positive" if x.detach().numpy().sum() > 0 else "negative"


@bt.opaque
def pieces(x: Tensor, parts: list[Tensor], *, names: dict[str, Any]) -> Any:
    return (x * 2, [part + 1 for part in parts], len(names), None)


@bt.opaque
def cubed(x: Tensor) -> Tensor:
    return x**3


@bt.opaque
def split(x: Tensor) -> list[Tensor]:
    return [torch.tensor(row) for row in x.detach().numpy() if row.sum() > 0]


@bt.opaque
def refuses(x: Tensor) -> Tensor:
    if x.detach().numpy().sum() > 0:
        raise ValueError("too large")
    return x * 2


@bt.opaque
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(4) * torch.randperm(4)


@bt.opaque
def outer(x: Tensor) -> Tensor:
    return smooth(x, 3) + largest(x)


plain_doubling = bt.opaque(lambda x: torch.from_numpy(x.detach().numpy() * 2))


@border.replays
def pure(x: Tensor) -> Tensor:
    return smooth(x) * 2


@border.replays
def with_a_size(x: Tensor) -> Tensor:
    return smooth(x, width=x.shape[0]) + 1


@border.replays
def by_a_call(x: Tensor) -> Tensor:
    return plain_doubling(x) + x


@border.replays
def that_mutates_and_returns_nothing(x: Tensor) -> Tensor:
    y = x.detach() * 1
    fill(y[0], 3.0)
    return x * y


@border.replays
def that_mutates_its_argument(x: Tensor) -> Tensor:
    with torch.no_grad():
        fill(x.detach()[0], x.shape[0] / 2)
    return x * 2


@border.replays
def that_mutates_and_returns_it(x: Tensor) -> Any:
    y = x.detach() * 1
    z = bump(y)
    return z is y, z + y


@border.replays
def that_gives_a_number(x: Tensor) -> Tensor:
    return x * largest(x)


@border.replays
def whose_number_decides(x: Tensor) -> Tensor:
    return x * 2 if largest(x) > 1.5 else x - 1


@border.replays
def whose_text_decides(x: Tensor) -> Any:
    how = describe(x)
    return (x * 2 if how == "positive" else x - 1), how


@border.replays
def with_containers(x: Tensor) -> Any:
    double, parts, count, nothing = pieces(x, [x, x[0]], names={"a": 1})
    return double + parts[1], parts, count, nothing


@border.replays
def differentiable(x: Tensor) -> Tensor:
    return cubed(x) + x


@border.replays(
    inputs=[given(torch.eye(3)), given(-torch.eye(3)), given(torch.tensor([[1.0], [-1.0]]))] * 3
)
def that_gives_as_many_as_it_finds(x: Tensor) -> Any:
    found = split(x)
    return len(found), [row * 2 for row in found]


@border.replays
def that_raises(x: Tensor) -> Tensor:
    try:
        return refuses(x)
    except ValueError as error:
        return x * len(str(error))


@border.replays
def that_raises_unhandled(x: Tensor) -> Tensor:
    return refuses(x.detach()) + x


@border.replays
def with_random_numbers(x: Tensor) -> Tensor:
    return noisy(x) + torch.rand(4)


@border.replays
def inside_another(x: Tensor) -> Tensor:
    return outer(x) * 2


@border.replays
def under_modes(x: Tensor) -> Any:
    with torch.no_grad():
        y = cubed(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = matmul(x)
    return x * y, z


@bt.opaque
def matmul(x: Tensor) -> Tensor:
    return x @ x.t()


@border.replays
class OnAMethod(Stateful):
    @bt.opaque
    def part(self, x: Tensor, scale: float) -> Tensor:
        return self.fc(x).relu() * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, 2.0) + self.fc(x)


@border.replays(cannot={"audited": "writes to a tensor that the replay left"})
class OnAModule(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.quick = bt.opaque(self.part)

    def part(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.quick(x) * 2


@border.replays
class OnAnAutogradFunction(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubling(x)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 100


doubling = bt.opaque(Doubling.apply)


@border.replays
def legacy_constructors_named_opaque(x: Tensor) -> Tensor:
    return x + legacy([1.0, 2.0, 3.0, 4.0])


legacy = bt.opaque(torch.FloatTensor)


@border.live("", at="")
def made_inside(x: Tensor) -> Tensor:
    total = x.detach().sum()
    local = bt.opaque(lambda y: y * total)
    return local(x)


@border.live("gives a|Output|follow", at="dataclass_of")
def that_gives_an_object(x: Tensor) -> Tensor:
    return dataclass_of(x).first * 2


@dataclasses.dataclass
class Output:
    first: Tensor


@bt.opaque
def dataclass_of(x: Tensor) -> Output:
    return Output(x * 3)


@border.either("")
def that_appends_to_a_list(x: Tensor) -> Any:
    kept = [x]
    appends(kept, x * 2)
    return kept[-1] + 1, len(kept)


@bt.opaque
def appends(kept: list[Tensor], x: Tensor) -> None:
    kept.append(torch.from_numpy(x.detach().numpy() + 1))


def test_it_is_one_op_and_nothing_inside_is_recorded() -> None:
    trace = bt.trace(lambda x: outer(x) * 2, torch.ones(3, 4))
    assert [op.kind.value for op in trace.ops] == ["input", "call", "call"]
    assert trace.ops[1].target.__name__ == "outer"
    assert trace.module_calls == []
    assert trace.why_live == ()


def test_it_is_the_function_itself_otherwise() -> None:
    x = torch.ones(4)
    assert bits(smooth(x)) == bits(smooth.__wrapped__(x))
    assert smooth.__name__ == "smooth"
    assert smooth.__doc__ == "Smooth with numpy."
    assert list(inspect.signature(smooth).parameters) == ["x", "width"]
    assert copy.deepcopy(smooth) is smooth


def test_it_is_called_once_in_each_call_also_when_a_run_resumes() -> None:
    calls: list[int] = []

    @bt.opaque
    def counted(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x + 1

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = HOLDER[0](x)
            return y * 2 if y.sum() > 0 else y * 3

    HOLDER[0] = counted
    bended = bt.BendedModule(Model())
    for step, value in enumerate([1.0, 1.0, -5.0, 1.0, -5.0]):
        bended(torch.full((2,), value))
        assert len(calls) == step + 1
    assert bended.stats.resumes == 1


HOLDER: list[Any] = [None]


def test_a_bended_module_called_inside_one_is_on_its_own() -> None:
    inner = bt.BendedModule(nn.Linear(4, 4))
    called = bt.opaque(lambda x: inner(x))

    def model(x: Tensor) -> Tensor:
        return called(x) * 2

    bended = assert_promise(lambda: model, DEFAULT)
    assert bended.stats.replays >= 4
    assert inner.stats.replays >= 8


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(bt.BendtraceError, match="not 3"):
        bt.opaque(3)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_trace_with_one_replays_by_itself(rows: int) -> None:
    trace = bt.trace(pure, *randn_inputs(3, 4)()[0])
    x = torch.randn(rows, 4)
    assert bits(trace.replay(x)) == bits(pure(x))
