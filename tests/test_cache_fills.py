"""Runs that fill a `functools.lru_cache` are recorded like the next run, which finds it filled."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.tape.structure import entries_of
from tests.promise import bits

Table = Callable[..., Any]
Program = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """Has a cache of its own, each model another one."""

    def __init__(self, make: Callable[[Model], Table], run: Program, size: int | None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(8))
        self.count, self.log, self.kept = 0, [0], None
        self.run = run
        self.table = functools.lru_cache(maxsize=size)(make(self))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Method(nn.Module):
    """Has a cache that decorates a method."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @functools.cache  # noqa: B019 - as models do
    def bias(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(rows, dtype=dtype)[:, None] * self.fc.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.bias(x.shape[0], x.dtype)


def computed(model: Model) -> Table:
    return lambda n, k=1.0: torch.arange(n).float().mul(k).cos()


def written_inside(model: Model) -> Table:
    def table(n: int) -> Tensor:
        found = torch.zeros(n, 4)
        found[:, 0::2] = torch.arange(n)[:, None].float().sin()
        found[:, 1:].add_(2)
        return found[:, 0]

    return table


def asking(model: Model) -> Table:
    def table(n: int) -> Tensor:
        found = torch.arange(n).float()
        return found * 2 if found.sum() > 3 else found

    return table


def several(model: Model) -> Table:
    inner = functools.cache(lambda n: torch.arange(n).float())
    return lambda n: (inner(n) * 1, (inner(n + 1)[1:] * 2, n))


def view(model: Model) -> Table:
    return lambda n: model.buffer[:n]


def drawing(model: Model) -> Table:
    return lambda n: torch.rand(n)


def counting(model: Model) -> Table:
    def table(n: int) -> Tensor:
        model.count += 1
        return torch.full((n,), float(model.count))

    return table


def assigning(model: Model) -> Table:
    def table(n: int) -> Tensor:
        model.count = n
        return torch.arange(n).float()

    return table


def logging(model: Model) -> Table:
    def table(n: int) -> Tensor:
        model.log.append(n)
        return torch.arange(n).float()

    return table


def writing(model: Model) -> Table:
    def table(n: int) -> Tensor:
        model.buffer.add_(1)
        return torch.arange(n).float()

    return table


def failing(model: Model) -> Table:
    def table(n: int) -> Tensor:
        found = torch.arange(n).float()
        if n == 3:
            raise ValueError("three")
        return found

    return table


def listing(model: Model) -> Table:
    return lambda n: [torch.arange(n).float()]


def generating(model: Model) -> Table:
    def table(n: int) -> Any:
        yield torch.arange(n).float()

    return table


def state(model: Model) -> Table:
    return lambda n: model.buffer


def of_the_run(model: Model) -> Table:
    return lambda n: model.kept[:2].sum(1) * n


def of_objects(model: Model) -> Table:
    return lambda key: torch.arange(key.n).float()


def of_tensors(model: Model) -> Table:
    return lambda mask: mask.cumsum(0)


def by_rows(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) * self.table(x.shape[0])[:, None]


def first_row(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) * self.table(x.shape[0])[0]


def in_branches(self: Model, x: Tensor) -> Tensor:
    x = self.fc(x) * self.table(4)
    for number in range(2):
        x = x - self.table(4, float(number)) if x.sum() > 0 else x + self.table(4, 0.5) * 2
    return x


def of_tuples(self: Model, x: Tensor) -> Tensor:
    first, (second, n) = self.table(x.shape[0])
    return self.fc(x) * first[:, None] + second[:, None] * n


def around_writes(self: Model, x: Tensor) -> Tensor:
    self.buffer.mul_(1.5)
    y = self.fc(x)
    y += self.table(x.shape[0])[:, None]
    self.buffer[:1] = y.sum()
    return y * self.buffer[0]


def returned(self: Model, x: Tensor) -> Any:
    return self.table(x.shape[0]), self.fc(x)


def changed(self: Model, x: Tensor) -> Tensor:
    table = self.table(x.shape[0])
    table.add_(1)
    return self.fc(x) * table[:, None]


def compared(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) * (1.0 if self.table(len(x)) is self.table(len(x)) else 2.0)


def kept(self: Model, x: Tensor) -> Tensor:
    y = by_rows(self, x)
    self.kept = self.table(x.shape[0])
    return y


def counted(self: Model, x: Tensor) -> Tensor:
    return by_rows(self, x) + self.count + self.log[-1]


def caught(self: Model, x: Tensor) -> Tensor:
    try:
        return by_rows(self, x)
    except ValueError:
        return self.fc(x) - 1


def listed(self: Model, x: Tensor) -> Tensor:
    found = self.table(x.shape[0])
    found.append(x.sum())
    return self.fc(x) * found[0][:, None] + len(found)


def generated(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) + sum(one.sum() for one in self.table(x.shape[0]))


def displaced(self: Model, x: Tensor) -> Tensor:
    return by_rows(self, x) + self.table(7).sum() + self.table(8).sum()


def cleared(self: Model, x: Tensor) -> Tensor:
    if x.sum() > 1:
        self.table.cache_clear()
        return self.fc(x)
    return by_rows(self, x)


class Rows:
    def __init__(self, n: int) -> None:
        self.n = n


def by_objects(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) * self.table(Rows(x.shape[0]))[:, None]


def reading_the_run(self: Model, x: Tensor) -> Any:
    first, self.kept = self.fc(x).chunk(2, 1)
    return first * self.table(x.shape[0]).sum() + self.kept


def by_tensors(self: Model, x: Tensor) -> Tensor:
    return self.fc(x) * self.table(x > 0)


RECORDED: list[tuple[Any, Program]] = [
    (computed, by_rows), (computed, in_branches), (written_inside, by_rows), (asking, by_rows),
    (several, of_tuples), (view, around_writes), (computed, around_writes), (computed, returned),
    (computed, changed), (computed, compared),
]  # fmt: skip
OTHERS: list[tuple[Any, Program]] = [
    (drawing, by_rows), (counting, counted), (logging, counted), (writing, around_writes),
    (failing, caught), (failing, by_rows), (listing, listed), (generating, generated),
    (state, first_row), (computed, kept), (computed, displaced), (computed, cleared),
    (of_objects, by_objects), (of_tensors, by_tensors), (computed, by_rows),
    (of_the_run, reading_the_run),
]  # fmt: skip

DO_MORE = (drawing, counting, logging, writing, listing, state)


def outcome(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return bits(call(x))
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)


def held(model: Model) -> Any:
    entries = entries_of(model.table) if model.run not in (generated, by_tensors) else ()
    log = model.log, model.count, model.kept, model.buffer
    return bits((log, torch.get_rng_state())), sorted(str(bits(one)) for _, one in entries)


def stream(make: Any, run: Any, size: int | None, calls: int = 40) -> bt.BendedModule:
    """Compare calls of a model with those of another one, with its state and its cache."""
    torch.manual_seed(0)
    eager = Model(make, run, size)
    torch.manual_seed(0)
    bended = bt.BendedModule(Model(make, run, size))
    choice, states = random.Random(0), {}
    start, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for number in range(calls):
            rows = choice.choice((2, 3, 4, 5)) if run is not in_branches else 4
            x, found = torch.randn(rows, 4, generator=generator), []
            for call in (eager, bended):
                torch.set_rng_state(states.get(call, start))
                found.append((outcome(call, x.clone()), held(getattr(call, "model", call))))
                states[call] = torch.get_rng_state()
            assert found[0] == found[1], number
    return bended


@pytest.mark.parametrize(("make", "run"), RECORDED, ids=lambda one: one.__name__)
@pytest.mark.parametrize("size", [None, 128])
def test_runs_that_fill_a_cache_are_kept(make: Any, run: Any, size: int | None) -> None:
    bended = stream(make, run, size)
    assert bended.stats.live <= (make is several), bended.why_live  # an inner cache is an op
    assert bended.stats.replays >= 30


@pytest.mark.parametrize(("make", "run"), OTHERS, ids=lambda one: one.__name__)
def test_runs_that_do_more_are_right(make: Any, run: Any) -> None:
    for size in (None, 128, 2, 1, 0):
        bended = stream(make, run, size)
        assert bended.stats.live or size == 0 or make not in DO_MORE


def test_caches_of_methods_are_read() -> None:
    torch.manual_seed(0)
    model = Method()
    bended = bt.BendedModule(model)
    for rows in (2, 3, 2, 5, 3, 7, 8, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(bended(x), model(x))
    assert (bended.stats.live, bended.stats.traces) == (0, 5)


def test_nothing_of_the_function_is_recorded() -> None:
    model = Model(written_inside, by_rows, None)
    x = torch.randn(3, 4)
    first, second = bt.trace(model, x), bt.trace(model, x)
    assert str(first) == str(second)
    assert torch.equal(first.replay(x), model(x))


def test_models_share_a_cache() -> None:
    shared = functools.lru_cache(lambda n: torch.arange(n).float())
    first = bt.BendedModule(lambda x: x * shared(x.shape[0]))
    second = bt.BendedModule(lambda x: x + shared(x.shape[0]).add_(1))
    for rows in (2, 3, 2, 3, 2, 4):
        x = torch.randn(rows)
        before = shared(rows).clone()
        assert torch.equal(first(x), x * before)
        assert torch.equal(second(x), x + before + 1)
        assert torch.equal(shared(rows), before + 1)
    assert first.stats.live == second.stats.live == 0


def test_paths_that_read_a_cache_join() -> None:
    table = functools.lru_cache(lambda n: torch.arange(n).float())

    def steps(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x - table(3) if x.sum() > 0 else x + table(3) * 2
        return x

    bended = bt.BendedModule(steps)
    for _ in range(60):
        x = torch.randn(3) * 3
        assert torch.equal(bended(x), steps(x))
    assert bended.stats.traces <= 8


def test_a_function_is_called_past_its_cache() -> None:
    def steps(n: int) -> Tensor:
        return torch.arange(n).float()

    table = functools.cache(steps)
    bended = bt.BendedModule(lambda x: x * table(3) + steps(3))
    for _ in range(3):
        assert torch.equal(bended(torch.ones(3)), 2 * steps(3))
    assert (bended.stats.traces, bended.stats.live) == (1, 0)


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.inference_mode(False)])
@pytest.mark.parametrize("change", [None, lambda value: value * 2])
def test_a_cache_around_a_decorator_of_a_package_has_plain_keys(decorate: Any, change: Any) -> None:
    def steps(n: int) -> Tensor:
        return torch.arange(n).float()

    tables = [functools.cache(decorate(steps)) for _ in range(2)]
    models = [lambda x, table=table: torch.relu(x) * table(x.size(0)) for table in tables]
    bended = bt.BendedModule(models[0])
    if change is not None:
        bended.interject("relu", change)
    for size in (3, 4, 3, 5, 6, 7, 3, 8, 9, 4):
        x = torch.rand(size)
        expected = models[1](x)
        assert torch.equal(bended(x), expected if change is None else 2 * expected)
        assert tables[0].cache_info().misses == tables[1].cache_info().misses
    kept = [[key for key, _ in entries_of(table)] for table in tables]
    assert kept[0] == kept[1] == [3, 4, 5, 6, 7, 8, 9]


def test_an_empty_cache_is_cleared() -> None:
    table = functools.cache(lambda n: torch.arange(n).float())

    def clears(x: Tensor) -> Tensor:
        if x.sum() > 0:
            table.cache_clear()
            return x
        return x * table(3)

    bended = bt.BendedModule(clears)
    for sign in (1, -1, 1, -1, 1):
        bended(torch.ones(3) * sign)
        assert table.cache_info().currsize == (sign < 0)


def test_a_small_cache_is_an_op_from_the_second_call_on() -> None:
    bended = stream(computed, displaced, 1)
    assert (bended.stats.traces, bended.stats.live) == (1, 1)


def test_what_the_function_assigns_is_not_assigned_again() -> None:
    model = Model(assigning, by_rows, None)
    bended, x = bt.BendedModule(model), torch.ones(3, 4)
    for number in range(4):
        model.count = 0
        bended(x)
        assert model.count == (3 if number == 0 else 0)
