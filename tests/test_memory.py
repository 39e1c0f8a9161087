"""Memory: a replay lets values go when the model would; only data guards make it keep some.

Bytes are counted op by op (`tools.benchmarks.memory`), so that the numbers are exact.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import TraceLimitWarning
from tools.benchmarks.memory import Chain, Exits, peak_of

Mode = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    # Each measurement collects garbage. That looks through all that other tests have left alive.
    gc.collect()
    gc.freeze()


MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
SIZE = 64 * 64 * 4  # bytes of one activation


class Sorts(nn.Module):
    """Takes results apart: their elements have to be let go one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            values, indices = layer(x).sort(-1)
            least, _ = (values * indices).min(-1, keepdim=True)
            x = values - least
        return x


class Cell(nn.Module):
    """Loops, in-place ops, views and a dict as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.over = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = x.new_zeros(64, 64)
        collected = x.new_zeros(8, 64, 64)
        for step in range(8):
            hidden = (self.into(x) + self.over(hidden)).tanh_()
            collected[step] = hidden * 2
        return {"last": hidden, "all": collected.transpose(0, 1)}


class Sides(nn.Module):
    """A guard on what was computed before, and long ways behind it on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.plus, self.minus = Chain(layers=3), Chain(layers=6), Chain(layers=6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        if x.sum() > 0:
            return self.plus(y)
        z = y * 2
        return self.minus(z).repeat(8, 1)


def inputs(sign: float = 1.0) -> Tensor:
    return torch.full((64, 64), sign)


@pytest.fixture(autouse=True)
def _only_counting_references() -> Iterator[None]:
    """What only the garbage collector would find has to show."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_memory_is_counted_by_who_has_it_and_not_by_its_address() -> None:
    """A cache of eight tensors, of which each is exchanged for a longer one."""

    def caches() -> list[Tensor]:
        return [torch.ones(64, 64) for _ in range(8)]

    def extend(cache: list[Tensor], others: list[Tensor]) -> None:
        for index in range(len(cache)):
            cache[index] = torch.cat([cache[index], torch.ones(1, 64)])
        others.clear()

    row = SIZE // 64
    cache = caches()
    # The eight, and for a moment the last one twice.
    assert peak_of(lambda: extend(cache, [])) == (9 * SIZE + 9 * row, 8 * row)
    assert sum(tensor.nbytes for tensor in cache) == 8 * SIZE + 8 * row
    cache = caches()
    # Somebody has the old ones until the end of the call.
    assert peak_of(lambda others=[*cache]: extend(cache, others)) == (
        16 * SIZE + 9 * row, 8 * row,
    )  # fmt: skip
    cache = caches()
    kept = [*cache]
    # And here for longer: they are none of the call's.
    assert peak_of(lambda: extend(cache, [])) == (8 * SIZE + 9 * row, 8 * SIZE + 8 * row)
    del kept


@MODES
@pytest.mark.parametrize(
    "make", [Chain, lambda: Chain(first=True), Sorts, Cell, lambda: nn.LSTM(64, 64)]
)
def test_a_replay_needs_no_more_than_eager(make: Callable[[], nn.Module], mode: Mode) -> None:
    model = make()
    bended = bt.BendedModule(model)
    with mode():
        bended(inputs())
        eager, _ = peak_of(lambda: model(inputs()))
        replay, left = peak_of(lambda: bended(inputs()))
    assert bended.stats.replays == 1
    assert replay <= eager
    assert left == 0


def test_a_replay_with_exits_holds_no_more_than_eager() -> None:
    model = Exits(layers=5)
    bended = bt.BendedModule(model)
    with torch.no_grad():
        bended(inputs())
        eager, _ = peak_of(lambda: model(inputs()))
        replay, left = peak_of(lambda: bended(inputs()))
    assert bended.stats.replays == 1
    # Eager has the values of one layer at a time, what came into it, what came into the stage, and
    # the input.
    assert eager == 5 * SIZE
    assert replay <= eager
    assert left == 0


@MODES
@pytest.mark.parametrize("layers", [4, 16])
def test_a_guard_keeps_nothing_wherever_it_is(layers: int, mode: Mode) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = Chain(layers=layers)

        def forward(self, x: Tensor) -> Tensor:
            x = self.chain(x)
            return x if x.isfinite().all() else x.nan_to_num()

    for model in (Late(), Chain(first=True, layers=layers)):
        bended = bt.BendedModule(model)
        with mode():
            bended(inputs())
            eager, _ = peak_of(functools.partial(model, inputs()))
            replay, left = peak_of(functools.partial(bended, inputs()))
        assert bended.stats.replays == 1
        assert replay <= eager
        assert left == 0


@MODES
def test_a_known_other_side_lets_go_of_what_the_first_had_kept(mode: Mode) -> None:
    model = Sides()
    bended = bt.BendedModule(model)
    with mode():
        bended(inputs()), bended(inputs(-1.0))
        for sign in (1.0, -1.0):
            eager, _ = peak_of(lambda sign=sign: model(inputs(sign)))
            replay, left = peak_of(lambda sign=sign: bended(inputs(sign)))
            assert replay <= eager
            assert left == 0
    assert bended.stats == bt.Stats(traces=2, replays=2, retraces=1, resumes=1)


class Gated(nn.Module):
    """A question in each layer, and as many ways through as there are answers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) + x
        return x


class Leaves(Gated):
    """Leaves after the layer whose output says so."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x[0, 0] > 0.4:
                return x * 2
        return x


@pytest.mark.parametrize("model", [Gated(20), Leaves(20)], ids=["gated", "leaves"])
def test_in_a_stream_of_inputs_a_replay_holds_what_eager_holds(model: nn.Module) -> None:
    """Also where segments are put together as no run has put them together."""
    bended = bt.BendedModule(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for x in torch.randn(60, 64, 64):
            bended(x)
        counted = 0
        for x in torch.randn(8, 64, 64):
            before = bended.stats.replays
            eager, _ = peak_of(lambda x=x: model(x * 1))
            replay, left = peak_of(lambda x=x: bended(x * 1))
            assert left == 0
            if bended.stats.replays > before:
                counted += 1
                assert replay <= 1.1 * eager
    assert counted > 5


def test_where_an_error_is_caught_the_known_way_on_lets_go_too() -> None:
    chain = Chain(layers=4)

    def model(x: Tensor, y: Tensor) -> Tensor:
        before = chain(x)
        try:
            after = before @ y
        except RuntimeError:
            after = before + 1
        return after.repeat(8, 1) * 2

    bended = bt.BendedModule(model)
    small = torch.ones(3, 3)
    with torch.no_grad():
        bended(inputs(), inputs()), bended(inputs(), small)
        eager, _ = peak_of(lambda: model(inputs(), small))
        replay, left = peak_of(lambda: bended(inputs(), small))
    assert bended.stats == bt.Stats(traces=2, replays=1, retraces=1, resumes=1)
    assert replay <= eager
    assert left == 0


@MODES
def test_neither_the_first_call_nor_a_resumed_one_leaves_anything_alive(mode: Mode) -> None:
    model = Sides()
    with mode():
        # Memory is counted by Python code that runs in the middle of the model.
        _, left = peak_of(lambda: bt.BendedModule(model)(inputs()))
        assert left == 0
        bended = bt.BendedModule(model)
        _, left = peak_of(lambda: bended(inputs()))
        assert left == 0
        peak, left = peak_of(lambda: bended(inputs(-1.0)))
    assert bended.stats.resumes == 1
    assert left == 0
    assert peak <= 30 * SIZE


def test_an_error_in_a_replay_leaves_nothing_alive() -> None:
    bended = bt.BendedModule(lambda x, y: (x * 2).relu() @ y)
    bended(inputs(), inputs())

    def call() -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            bended(inputs(), torch.ones(3, 3))

    assert peak_of(call)[1] == 0
    assert bended.stats.traces == 1


def splits(x: Tensor, y: Tensor) -> Tensor:
    z = (x * 2).relu() + 1
    if z.sum() > 0:
        return z @ y
    w = (z - 1) @ y
    return w if w.sum() > 0 else -w


def test_an_error_behind_a_divergence_leaves_nothing_alive() -> None:
    bended = bt.BendedModule(splits)
    bended(inputs(), inputs()), bended(inputs(float("nan")), inputs())

    def call() -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            bended(inputs(float("nan")), torch.ones(3, 3))

    assert peak_of(call)[1] == 0
    assert bended.stats == bt.Stats(traces=2, retraces=1, resumes=1)


def test_an_error_of_a_resumed_run_keeps_alive_what_eager_s_does() -> None:
    def kept_by(call: Callable[..., Any]) -> int:
        errors = []

        def fail() -> None:
            try:
                call(inputs(float("nan")), torch.ones(3, 3))
            except RuntimeError as error:
                errors.append(error)

        with torch.no_grad():
            _, left = peak_of(fail)
        assert len(errors) == 1
        return left

    bended = bt.BendedModule(splits)
    with torch.no_grad():
        bended(inputs(), torch.ones(64, 1))
    assert kept_by(bended) == kept_by(splits)


def test_paths_that_are_forgotten_are_freed() -> None:
    bended = bt.BendedModule(lambda x: x * int(x.max()), max_traces=2)
    bended(torch.tensor([1.0]))
    bended(torch.tensor([2.0]))
    second = weakref.ref(next(p for p in next(bended._tree.programs()).paths()[1:]))
    with pytest.warns(TraceLimitWarning):
        bended(torch.tensor([3.0]))
    gc.collect()
    assert second() is None
