"""A run that leaves the known paths goes on from there: nothing is done twice, nothing is lost."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.engine import program
from bendtrace.engine.program_graph import ProgramGraph
from bendtrace.engine.stretches import Divergence
from tests.promise import Inputs, bits, state

Make = Callable[[], Callable[..., Any]]


@pytest.fixture(params=["apart", "joining"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let no paths join, so that a resumed run is handed all that was computed; or let them."""
    if request.param == "apart":
        monkeypatch.setattr(program, "ProgramGraph", _Apart)
    return str(request.param)


class _Apart(ProgramGraph):
    """A graph in which no paths join."""

    def __init__(self, *args: Any, joins: bool) -> None:
        super().__init__(*args, joins=False)


class _Ops(TorchDispatchMode):
    """Writes down which operations reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _called(call: Callable[..., Any], inputs: Inputs, seed: int) -> tuple[Any, ...]:
    """Return what a call gives, the gradients it leads to, and the ops that it ran."""
    torch.manual_seed(seed)
    args, kwargs = inputs
    with _Ops() as ops:
        result = error = None
        try:
            result = call(*args, **kwargs)
        except Exception as raised:
            error = type(raised), str(raised)
    if isinstance(result, Tensor) and result.requires_grad:
        result.square().sum().backward()
    leaves = [arg.grad for arg in args if isinstance(arg, Tensor) and arg.is_leaf]
    return (
        error, bits(result), bits([args, kwargs]), bits(leaves), torch.get_rng_state().tolist(),
        ops.names,
    )  # fmt: skip


def follow(
    make: Make,
    *arguments: Callable[[], Any],
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bt.BendedModule:
    """Call a model and its `BendedModule` in turn, backwards too, and compare everything.

    Each call has to carry out the very ops of eager, in eager's order.
    """
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    bended = bt.BendedModule(model)
    for seed, inputs in enumerate(arguments):
        with mode():
            wanted = _called(eager, _inputs(inputs), seed)
            given = _called(bended, _inputs(inputs), seed)
        for what, here, there in zip(_COMPARED, given, wanted, strict=False):
            assert here == there, f"call {seed}: other {what}"
        assert state(model) == state(eager), f"call {seed}: other state"
    return bended


_COMPARED = ("error", "output", "arguments", "gradients of inputs", "RNG state", "ops")


def _inputs(make: Callable[[], Any]) -> Inputs:
    made = make()
    return (made if isinstance(made, tuple) else (made,)), {}


def resumed(bended: bt.BendedModule, times: int) -> None:
    """Every retrace was a resume, and all runs could be recorded."""
    assert bended.stats.resumes == bended.stats.retraces == times, bended.stats
    assert bended.stats.live == 0, bended.why_live


def filled(*values: float, grad: bool = False) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values).repeat(4, 1).requires_grad_(grad)


UP, DOWN = filled(1.0, 2.0, 3.0), filled(-1.0, -2.0, -3.0)
UP_GRAD, DOWN_GRAD = filled(1.0, 2.0, 3.0, grad=True), filled(-1.0, -2.0, -3.0, grad=True)


class Normed(nn.Module):
    """Everything with a side effect stands before the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(()))
        self.last = torch.zeros(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        y = self.drop(self.norm(self.fc(x)))
        self.last = y.detach()
        return y * 2 + torch.randn(3) if x.sum() > 0 else y.sin() - torch.rand(())


def test_batch_norm_is_updated_and_dropout_drawn_once() -> None:
    bended = follow(Normed, UP_GRAD, DOWN_GRAD)
    resumed(bended, 1)
    assert bended.model.norm.num_batches_tracked.item() == 2
    torch.manual_seed(5)
    bended(UP())
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    torch.nn.functional.dropout(torch.ones(4, 3))
    torch.randn(3)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_both_sides_replay_once_they_are_known() -> None:
    bended = follow(Normed, UP_GRAD, DOWN_GRAD, UP_GRAD, DOWN_GRAD, DOWN_GRAD, UP_GRAD)
    resumed(bended, 1)
    assert bended.stats.replays == 4


def _in_place(x: Tensor, memory: Tensor, seen: list[Tensor]) -> Tensor:
    x.add_(1)
    x[:, 0] = 5
    memory.view(-1)[0] += x.sum()
    seen.append(x.clone())
    if memory.sum() > 0:
        x.mul_(2)
        return x.sum()
    memory.zero_()
    return x - 1


def test_arguments_written_in_place_are_written_once() -> None:
    def given(k: float) -> Callable[[], Any]:
        return lambda: (torch.full((2, 3), k), torch.zeros(2, 2), [])

    bended = follow(lambda: _in_place, given(1), given(-9), given(2), given(-9))
    resumed(bended, 1)
    assert bended.stats.replays == 2


def _three_ways(x: Tensor) -> Tensor:
    y = x + torch.rand(3)
    if y[0].sum() > 0:
        y = y * 2
    z = torch.nn.functional.dropout(y, 0.5)
    if x[1].sum() > 0:
        z = z + torch.randn(3)
    w = z.sin()
    if x[2].sum() > 0:
        w = w - torch.rand(())
    return w


def rows(*signs: int) -> Callable[[], Tensor]:
    return lambda: (torch.tensor(signs)[:, None] * torch.full((1, 3), 9.0)).requires_grad_()


@pytest.mark.parametrize("second", [(1, 1, -1), (1, -1, 1), (-1, 1, 1), (-1, -1, -1), (1, -1, -1)])
def test_any_of_several_branches_may_be_the_one_that_differs(second: tuple[int, ...]) -> None:
    bended = follow(lambda: _three_ways, rows(1, 1, 1), rows(*second), rows(1, 1, 1), rows(*second))
    resumed(bended, 1)
    assert bended.stats.replays == 2


def test_a_resumed_path_is_itself_left_at_the_second_and_third_divergence(way: str) -> None:
    sides = [(1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1)]
    sides += [(-1, *rest) for _, *rest in sides]
    bended = follow(lambda: _three_ways, *(rows(*signs) for signs in sides + sides[::-1]))
    # Of the eight paths, three questions have two answers each where paths join.
    resumed(bended, 7 if way == "apart" else 3)
    assert bended.stats.replays == 2 * len(sides) - bended.stats.traces


class _Halting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.GRUCell(3, 3), nn.Dropout(0.25)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, bound: Tensor) -> Tensor:
        h, n = torch.zeros(4, 3), 0
        while n < bound:
            h = self.drop(self.cell(x, h))
            self.steps.add_(1)
            n += 1
        return h * n


def test_resumed_in_the_middle_of_a_loop() -> None:
    def given(n: int) -> Callable[[], Any]:
        return lambda: (UP_GRAD(), torch.tensor(n))

    order = (3, 1, 5, 2, 0, 4, 7)
    bended = follow(_Halting, *map(given, order), *map(given, order))
    assert bended.stats.replays == len(order)
    assert bended.stats.resumes == len(order) - 1
    assert bended.model.steps.item() == 2 * sum(order)


def _each_row(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for i, row in enumerate(x):
        if row.sum() > 0:
            total = total + row.sum() * i
            continue
        if (row < -5).all():
            break
        total = total - torch.rand(())
    else:
        total = total * 10
    return total + x.mean()


def test_resumed_inside_a_for_loop_with_break_continue_and_else() -> None:
    ways = [(1, 1, 1), (1, 1, -1), (-0.1, 1, -0.1), (1, -0.1, -1), (-1, 1, 1)]

    def given(way: tuple[float, ...]) -> Callable[[], Tensor]:
        return lambda: (torch.tensor(way)[:, None] * torch.full((1, 3), 9.0)).requires_grad_()

    bended = follow(lambda: _each_row, *map(given, ways), *map(given, ways))
    assert bended.stats.replays == len(ways)
    resumed(bended, len(ways) - 1)


class _Rejected(ValueError):
    pass


class Trying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("failures", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        try:
            z = y * torch.rand(3)
            if x.sum() < 0:
                raise _Rejected("negative")
            z = z + 1
        except _Rejected:
            self.failures += 1
            z = z - 1
        finally:
            self.norm.num_batches_tracked.add_(1)
        return z


def test_resumed_inside_try_except_and_finally() -> None:
    bended = follow(Trying, UP_GRAD, DOWN_GRAD, UP_GRAD, DOWN_GRAD)
    resumed(bended, 1)
    assert bended.stats.replays == 2


def _contexts(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().max() + torch.rand(())
        if x.sum() < 0:
            scale = scale * (w * 3)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w.expand(3, 3)
        if scale > 2:
            y = y @ w.expand(3, 3)
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ w.expand(3, 3)
    with torch.enable_grad():
        return y * scale


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad], ids=["grad", "no_grad"])
def test_resumed_under_no_grad_and_autocast(mode: Any) -> None:
    def given(*values: float) -> Callable[[], Any]:
        return lambda: (filled(*values, grad=True)(), torch.ones(3, requires_grad=True))

    inputs = [given(k, 2 * k, 3 * k) for k in (1.0, -1.0, 0.1, -0.1)]
    bended = follow(lambda: _contexts, *inputs, *inputs, mode=mode)
    assert bended.stats.replays >= len(inputs)
    assert bended.stats.live == 0


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)  # fmt: skip
def test_resumed_in_the_mode_of_the_caller(mode: Any) -> None:
    bended = follow(Normed, UP, DOWN, UP, DOWN, mode=mode)
    resumed(bended, 1)
    assert bended.stats.replays == 2


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.fc(x))
        return y.relu() if x.mean() > 0 else y.tanh() + torch.rand(3)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(_Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for block, sign in zip(self.blocks, x[:3].sign().unbind(0), strict=True):
            y = block(y + 10 * sign)
        return y.sum() + self.norm(x).sum()


@pytest.mark.parametrize("other", [(1, 1, -1), (1, -1, 1), (-1, 1, 1), (-1, -1, -1)])
def test_resumed_in_a_submodule(other: tuple[int, ...]) -> None:
    bended = follow(Nested, rows(1, 1, 1), rows(*other), rows(1, 1, 1), rows(*other))
    assert bended.stats.resumes == bended.stats.retraces >= 1
    assert bended.stats.replays == 2
    assert bended.model.norm.num_batches_tracked.item() == 8


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls: list[str] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        z = self.norm(x) * torch.rand(3)
        if x.sum() < 0:
            self.latest = z.detach()
            torch.rand(2)
            return z + y  # fails for some `y`
        return z


def test_an_exception_after_the_divergence_leaves_what_eager_leaves() -> None:
    def given(k: float, n: int) -> Callable[[], Any]:
        return lambda: (torch.full((2, 3), k) * torch.arange(1, 4), torch.ones(n))

    good, fails, fits = given(1.0, 3), given(-1.0, 2), given(-1.0, 3)
    bended = follow(Raising, good, fails, good, fails, fits, good, fits, fails)
    assert bended.model.norm.num_batches_tracked.item() == 8
    assert bended.stats.replays >= 2


class _LastOpFails(nn.Module):
    def __init__(self, caught: bool) -> None:
        super().__init__()
        self.caught, self.norm, self.latest = caught, nn.BatchNorm1d(3), torch.zeros(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        torch.rand(2)
        z = self.norm(x) * torch.rand(3)
        if not self.caught:
            self.latest = z.detach()
            return z + y
        try:
            return z + y
        except RuntimeError:
            return z


@pytest.mark.parametrize("caught", [False, True])
def test_when_the_last_op_fails_what_stands_before_it_is_not_done_again(caught: bool) -> None:
    def given(n: int) -> Callable[[], Any]:
        return lambda: (torch.arange(6.0).view(2, 3), torch.ones(n))

    order = [given(n) for n in (3, 3, 2, 3, 2)]
    bended = follow(lambda: _LastOpFails(caught), *order)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2


def test_an_exception_of_the_model_in_the_resumed_part_is_raised_as_it_is() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * torch.rand(3)
        if x.sum() < 0:
            raise _Rejected(f"negative: {float(x.sum())}")
        return y

    bended = follow(lambda: model, UP, DOWN, UP, DOWN, UP)
    assert bended.stats.replays == 2
    with pytest.raises(_Rejected, match=r"negative: -24\.0"):
        bended(DOWN())


def _numbers(x: Tensor, n: int, scale: float) -> Tensor:
    parts = [x * i for i in range(n)]
    largest = x.max().item()
    width = x.shape[1] * n
    noise = torch.rand(width)
    label = f"{n}-{width}"
    grown = torch.stack(parts).sum() * abs(largest) + noise.sum() * scale
    if grown > 0:
        return grown * len(label) + torch.randn(n).sum()
    return grown / (width + scale) - torch.randint(0, n, (n,)).sum() - largest


@pytest.mark.parametrize(("n", "scale"), [(2, 1.5), (3, -1.0)])
def test_numbers_and_random_draws_of_the_prefix_are_taken_over(n: int, scale: float) -> None:
    ways = [lambda: (UP_GRAD(), n, scale), lambda: (DOWN_GRAD(), n, scale)]
    bended = follow(lambda: _numbers, *ways, *ways)
    assert bended.stats.live == 0
    assert bended.stats.resumes >= 1


@pytest.mark.parametrize("seed", range(4))
def test_draws_that_decide_the_path(seed: int) -> None:
    def model(x: Tensor) -> Tensor:
        y, n = x, 0
        while torch.rand(()) < 0.6 and n < 4:
            y = torch.nn.functional.dropout(y, 0.3) + torch.randn(3)
            n += 1
        return y * n

    bended = follow(lambda: model, *[UP_GRAD] * (12 + seed))
    assert bended.stats.replays >= 3
    assert bended.stats.resumes == bended.stats.retraces


def test_views_and_aliases_of_the_prefix_stay_views() -> None:
    def model(x: Tensor) -> list[Tensor]:
        base = x.clone()
        left, right = base[:, :1], base[:, 1:]
        both = [left, right, base]
        if x.sum() < 0:
            left.add_(100)
            both.append(base.t())
        right.mul_(2)
        return both

    bended = follow(lambda: model, UP, DOWN, UP, DOWN)
    resumed(bended, 1)
    base, left = (bended(DOWN())[i] for i in (2, 0))
    assert base.untyped_storage().data_ptr() != left.untyped_storage().data_ptr()
    (left, right, base, turned) = bended(DOWN())
    storages = {t.untyped_storage().data_ptr() for t in (left, right, base, turned)}
    assert len(storages) == 1


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            y = self.fc(y) if x.sum() > 0 else self.fc(y.tanh())
            return self.fc(y).float()


def test_weights_cast_by_autocast_are_cast_once() -> None:
    bended = follow(_Autocast, UP_GRAD, DOWN_GRAD, UP_GRAD, DOWN_GRAD)
    resumed(bended, 1)
    assert bended.stats.replays == 2


# What the prefix changed about its tensors, or about torch


def _reshaped(x: Tensor) -> Any:
    n, shape, strides = x.shape[0], x.shape, x.stride()
    x.t_().unsqueeze_(0)
    return (x * n, shape) if x.sum() > 0 else (x - strides[0], x.shape)


def _resized(x: Tensor) -> Tensor:
    n, total = x.shape[0], x.sum()
    x.resize_(2, 2).fill_(3)
    return x * n if total > 0 else x - n


def _other_data(x: Tensor) -> Tensor:
    n, total = x.numel(), x.sum()
    x.data = torch.ones(7)
    return x * n if total > 0 else x - n


def _version(x: Tensor) -> Tensor:
    n = x._version
    x.add_(1)
    return x * n if x.sum() > 0 else x - n


def _asked_for_grad(x: Tensor) -> Tensor:
    n = int(x.requires_grad) + 2
    x.requires_grad_()
    return x.sin() * n if x.sum() > 0 else x.cos() - n


def _reseeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    y = x + torch.rand(3)
    return y * torch.rand(3) if x.sum() > 0 else y - torch.rand(3)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = x + torch.rand(3)
        y = y * torch.rand(3) if x.sum() > 0 else y - torch.rand(3)
    return y + torch.rand(3)


def _set_back(x: Tensor) -> Tensor:
    before = torch.get_rng_state()
    y = x + torch.rand(3)
    if x.sum() > 0:
        torch.set_rng_state(before)
    return y + torch.rand(3)


def _grad_switched_off(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = x * 2
    y = y * 3 if x.sum() > 0 else y.sin()
    torch.set_grad_enabled(True)
    return y * x


def _in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * 2 + torch.rand(3)
    return y.clone() + 1 if x.sum() > 0 else y.clone() - 1


def _retained(x: Tensor) -> Tensor:
    y = x * 2
    y.retain_grad()
    return y * 3 if x.sum() > 0 else y * 5


def _caught(x: Tensor) -> Tensor:
    try:
        y = x @ torch.ones(2, 2)
    except RuntimeError:
        y = x * torch.rand(3)
    return y + 1 if x.sum() > 0 else y * 2


def _out_twice(x: Tensor) -> Tensor:
    out = torch.empty(4, 3)
    first = torch.add(x.detach(), 1, out=out).clone()
    torch.mul(x.detach(), 2, out=out)
    return out + first if x.sum() > 0 else out - first


def _row_by_row(x: Tensor) -> Tensor:
    rows = torch.zeros(4, 3)
    for i, row in enumerate(x):
        rows[i] = row * i
        rows[i:].add_(torch.rand(()))
    return rows * 2 if x.sum() > 0 else rows.sin()


def _lists_of_numbers(x: Tensor) -> Tensor:
    values, n = x.sum(0).tolist(), int(x[0, 0].abs()) + 2
    y = torch.full((n,), values[0]) + torch.rand(n)
    return y * values[1] if values[2] > 0 else y - values[1]


def _transformed(x: Tensor) -> Tensor:
    y = torch.func.vmap(lambda row: row * 2 + row.sum())(x)
    y = y + torch.func.grad(lambda z: (z**2).sum())(x)
    return y + 1 if x.sum() > 0 else y * 2


def _gradient_in_forward(x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((z**2).sum(), z)
    return gradient * x if x.sum() > 0 else gradient - x


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2 + torch.rand(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def _own_function(x: Tensor) -> Tensor:
    y = _Doubled.apply(x)
    return y + 1 if x.sum() > 0 else y * 2


PREFIXES = [
    _reshaped, _resized, _other_data, _version, _asked_for_grad, _reseeded, _forked, _set_back,
    _grad_switched_off, _in_inference_mode, _retained, _caught, _out_twice, _row_by_row,
    _lists_of_numbers, _transformed, _gradient_in_forward, _own_function,
]  # fmt: skip
WITHOUT_GRAD = {_reshaped, _resized, _other_data, _version, _asked_for_grad, _in_inference_mode}


@pytest.mark.parametrize("model", PREFIXES, ids=lambda model: model.__name__.strip("_"))
def test_what_the_prefix_read_before_it_changed_it(model: Any) -> None:
    up, down = (UP, DOWN) if model in WITHOUT_GRAD else (UP_GRAD, DOWN_GRAD)
    bended = follow(lambda: model, up, down, up, down)
    resumed(bended, 1)
    assert bended.stats.replays == 2


def test_a_gradient_that_the_prefix_found_and_made() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            found = self.w.grad is not None
            (self.w * x).sum().backward()
            y = self.w.grad * (2 if found else 3)
            if x.sum() > 0:
                self.w.grad = None
                return y
            return -y

    bended = follow(Model, UP, DOWN, DOWN, UP, UP, DOWN, DOWN, UP)
    assert bended.stats.replays >= 4


def test_a_backward_pass_in_the_prefix_is_run_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            loss = (self.w * x).square().sum()
            loss.backward()
            if x.sum() < 0:
                return self.w.grad * 2
            return self.w.grad.sum()

    bended = follow(Model, UP, DOWN, UP, DOWN)
    assert bended.stats.resumes <= 1


def test_a_resume_says_which_condition_led_to_it() -> None:
    bended = bt.BendedModule(Normed())
    bended(UP())
    assert bended.last_mismatch is None
    bended(DOWN())
    assert "x.sum() > 0" in str(bended.last_mismatch)
    assert "test_resume.py" in str(bended.last_mismatch)


def test_a_nan_that_python_made_is_the_same_when_a_run_is_resumed() -> None:
    def model(x: Tensor) -> Tensor:
        if x.mean().item() < float("nan") or x.sum() > 0:
            return x * 2
        x.mul_(1)  # so that the run is resumed in the middle
        return x - 1 if x.min() < -3 else x

    bended = bt.BendedModule(model)
    for x in (torch.ones(2), -torch.ones(2), -4 * torch.ones(2), torch.ones(3)):
        assert torch.equal(bended(x.clone()), model(x.clone()))
    assert bended.stats.resumes == 2


class _Holds(nn.Module):
    """Writes to what it is given and to what it holds; both may be one tensor, or one list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.zeros(4))
        self.kept = [torch.ones(4)]

    def forward(self, x: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x.add_(1)
        self.buf.mul_(0.9)
        if (x > 0).sum() % 3:
            return x * items[0], items
        return x, items


def _free(seed: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed)) + seed % 3


# What is given: a tensor of the caller's or the model's, and a list of either.
@pytest.mark.parametrize("order", list(itertools.product(range(4), repeat=3)), ids=str)
def test_a_resumed_run_that_is_given_what_the_model_holds(order: tuple[int, ...]) -> None:
    eager, model = _Holds(), _Holds()
    bended = bt.BendedModule(model)
    for seed, which in enumerate((*order, *order, 0, 3)):
        outputs = []
        for subject, owner in ((eager, eager), (bended, model)):
            x = owner.buf if which & 1 else _free(seed)
            items = owner.kept if which & 2 else [_free(seed + 5)]
            output, given = subject(x, items)
            outputs.append((output.clone(), output is owner.buf, given is owner.kept, x.clone()))
            assert given is items
        wanted, got = outputs
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[3], wanted[3])
        assert got[1:3] == wanted[1:3]
        assert torch.equal(model.buf, eager.buf)
    assert bended.stats.live == 0


@functools.lru_cache
def _table(length: int) -> Tensor:
    return torch.arange(length) * 0.5


def test_a_resumed_run_that_can_only_be_run_live_and_takes_from_a_cache() -> None:
    def model(x: Tensor) -> Tensor:
        return x * _table(3) + random.random() if x.sum() > 0 else x - 1  # the cache needs numbers

    bended = bt.BendedModule(model)
    _table(3)
    for seed, sign in enumerate((-1, 1, 1, -1, 1)):
        x = torch.ones(3) * sign
        random.seed(seed)
        wanted = model(x)
        random.seed(seed)
        assert torch.equal(bended(x), wanted)
    assert (bended.stats.traces, bended.stats.replays, bended.stats.live) == (2, 1, 3)


def _read_after_a_write(x: Tensor) -> Tensor:
    a = x * 1
    row = a[0]
    a.add_(1)
    y = row * 2
    return y * 2 if y.sum() > 0 else y - 1


def test_a_resumed_run_knows_whose_writes_were_read_before() -> None:
    bended = bt.BendedModule(_read_after_a_write)
    for sign in (1, -1):
        bended(torch.full((3, 3), 9.0 * sign))
    (known,) = bended._trees.plain.programs()
    assert [run.tape.ops[4].reads for run in known.recordings()] == [{2: 3}] * 2


# Errors that the model does not catch


class _Counted:
    """A context that notes how it was left."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        self.owner.left = "not yet"

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.owner.left = "well" if kind is None else kind.__name__


class Failing(nn.Module):
    """Looks rows up, of which there may be none, and changes state before, meanwhile and after."""

    def __init__(self, tries: bool) -> None:
        super().__init__()
        self.phase, self.left, self.drop, self.tries = "", "", nn.Dropout(), tries
        self.register_buffer("rows", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, seen: list[Any]) -> Tensor:
        self.phase = "started"
        self.drop.train(False)
        self.calls.add_(1)
        seen.append("started")
        noise, held = torch.rand(2), x * 0.5
        if not self.tries:
            y = self.rows[x.long() + 1] + noise.sum()
        with _Counted(self), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            x.add_(1)
            try:
                y = self.rows[x.long()] + noise.sum()
            finally:
                x.sub_(1)
                self.calls.add_(held.sum())
                seen.append(held.shape)
                print("looked up")
        seen.pop()
        self.drop.train(True)
        self.phase = "done"
        return y * 2 if y.sum() > 5 else self.drop(y)


@pytest.mark.parametrize("tries", [True, False], ids=["where it tries", "elsewhere"])
def test_what_an_error_leaves_behind_is_what_eager_leaves(
    tries: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handed, script_of = [], Divergence.script

    def counted(self: Divergence) -> Any:
        handed.append(self.error and type(self.error))
        return script_of(self)

    monkeypatch.setattr(Divergence, "script", counted)
    values = (1.0, 1.0, 1.0, 7.0, 0.0, 1.0, 9.0, 1.0)
    bended = follow(
        lambda: Failing(tries), *(lambda value=value: (filled(value)(), []) for value in values)
    )
    assert capsys.readouterr().out == "looked up\n" * (16 if tries else 12)
    assert bended.stats.live == 0
    assert handed == [None if tries else IndexError] * 2  # it is a question there


def test_an_error_after_a_known_branch_is_raised_where_the_model_raises_it() -> None:
    def model(x: Tensor) -> Tensor:
        y = torch.relu(x) if x.sum() > 0 else torch.tanh(x)
        return torch.linalg.cholesky(y)

    bended = bt.BendedModule(model)
    good, bad = torch.eye(3), torch.eye(3)
    bad[2, 2] = -0.5
    for x in (good, -good + 0.4, good):
        with contextlib.suppress(RuntimeError):
            assert bits(bended(x)) == bits(model(x))
    with pytest.raises(torch.linalg.LinAlgError) as given:
        bended(bad)
    with pytest.raises(torch.linalg.LinAlgError) as wanted:
        model(bad)
    assert str(given.value) == str(wanted.value)
    assert any(entry.name == "model" for entry in given.traceback)
    assert bits(bended(good)) == bits(model(good))


class Phased(nn.Module):
    """Changes state around modules, one of which is called in a `try`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.phase, self.drop = "", nn.Dropout()

    def forward(self, x: Tensor, seen: list[Any]) -> Tensor:
        self.phase = "started"
        self.drop.train(False)
        y = torch.relu(self.first(x))
        if y.sum() > 3:
            seen.append("large")
            y = y * 0.5
        try:
            y = self.second(y)
        finally:
            seen.append("second")
        self.phase = "done"
        self.drop.train(True)
        return self.drop(y)


def _refuse(value: Tensor) -> Tensor:
    if value.abs().max() > 50:
        raise ValueError("too large")
    return value * 2


@pytest.mark.parametrize("place", ["first", "second"])
@pytest.mark.parametrize("is_known", [True, False], ids=["spliced", "recorded"])
def test_what_an_error_of_an_insertion_leaves_behind(place: str, is_known: bool) -> None:
    def called(call: Callable[..., Any], model: Any, size: float) -> tuple[Any, ...]:
        seen: list[Any] = []
        torch.manual_seed(1)
        with _Ops() as ops:
            try:
                result = bits(call(torch.full((2, 3), size), seen))
            except ValueError as error:
                result = str(error)
        drawn = torch.get_rng_state().tolist()
        products = ops.names.count("aten.addmm.default")
        return result, seen, model.phase, model.drop.training, drawn, products

    torch.manual_seed(0)
    eager = Phased()
    model = copy.deepcopy(eager)
    bended = bt.BendedModule(model)
    if is_known:
        for size in (1.0, -1.0, 1.0, -1.0):
            called(bended, model, size)
            called(eager, eager, size)
    eager.get_submodule(place).register_forward_hook(lambda module, args, out: _refuse(out))
    insertion = bended.interject(place, _refuse)
    for size in (1.0, -1.0, 1.0, 900.0, 1.0, -900.0, 900.0, -1.0):
        assert called(bended, model, size) == called(eager, eager, size), size
    assert bended.stats.live == 0, bended.why_live
    assert insertion.report().fired == 5  # without those that raised


class AddsParts(nn.Module):
    """Adds to a buffer what code with a branch gives, while the buffer waits on the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.relu = nn.ReLU(inplace=True)

    def part(self, x: Tensor, factor: int) -> Tensor:
        h = self.relu(x * factor)
        return (h * 2 if h.mean() > 0.5 else h).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.9)
        if x.sum() > 0:
            x = x * 0.5
        for factor in (1, 2, 3):
            self.total.add_(self.part(x, factor))
            if self.total.sum() > 2:
                self.total.mul_(0.1)
        return x * self.total


class SwapsTotals(AddsParts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for factor in (1, 2, 3):
            again = self.total.add_(self.part(x, factor))
            self.total, self.other = self.other, again.sub_(self.part(x, factor))
            if self.total.mean() > 1:
                self.total.zero_()
        return x * self.total


class AddsToArgument(AddsParts):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.9)
        for factor in (1, 2, 3):
            x.add_(self.part(x.clone(), factor))
            if x.sum() > 2:
                x.mul_(0.1)
        return x


@pytest.mark.parametrize("model", [AddsParts, SwapsTotals, AddsToArgument])
def test_a_tensor_may_wait_for_what_is_written_to_it(model: type[nn.Module]) -> None:
    eager, own = model(), model()
    bended, generator = bt.BendedModule(own), torch.Generator().manual_seed(0)
    for _ in range(100):
        x = torch.randn(3, 4, generator=generator) * 1.2
        wanted, found = (one(x.clone()) for one in (eager, bended))
        assert torch.equal(found, wanted)
        assert bits(eager.state_dict()) == bits(own.state_dict())
    assert bended.stats.replays > 70
