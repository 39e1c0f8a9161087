"""Calls of a `functools.lru_cache` of tensors are ops once the cache is filled again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.tape.structure import entries_of
from tests.modes.test_inserted import Seeing
from tests.past_joins import past_joins, resumed_anywhere
from tests.promise import bits

SCALES = {"scale": 1.0}
NAMES = ("table", "weighted", "shifts")
Kept = Callable[..., Any]


class Encodes(nn.Module):
    """Calls caches of its own, each model others."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], size: int | None) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.count, self.last = 0, None
        self.run = forward
        for name, cache in zip(NAMES, _caches(size), strict=True):
            if name in forward.__code__.co_names:
                setattr(self, name, cache)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def _caches(size: int | None) -> tuple[Kept, Kept, Kept]:
    @functools.lru_cache(maxsize=size)
    def table(n: int, scale: float = 1.0, *, device: Any = None) -> Tensor:
        return torch.arange(n, device=device).float().mul(scale).cos() * SCALES["scale"]

    @functools.lru_cache(maxsize=size)
    def weighted(model: Any, n: int) -> Tensor:
        return model.fc(torch.ones(n, 3)).relu()

    @functools.lru_cache(maxsize=size)
    def shifts(shape: tuple[int, ...], kind: str) -> tuple[Tensor, Tensor]:
        steps = table(shape[0])
        return (steps.outer(torch.ones(shape[1])), steps + 1) if kind == "outer" else (steps, steps)

    return table, weighted, shifts


def levels(self: Any, x: Tensor) -> Any:
    for n in (3, 5, 7):
        x = x + self.table(n, device=x.device).sum()
    return x


def lengths(self: Any, x: Tensor) -> Any:
    y = x * self.table(x.shape[0])[:, None]
    return y + self.table(len(x) + 1, 0.5)[1:, None] if y.sum() > 0 else y


def computed_keys(self: Any, x: Tensor) -> Any:
    k = int(x[0, 0].abs() * 100) % 5 + 2
    return x * self.table(k).sum() + self.table(k, float(k)).sum()


def several_tensors(self: Any, x: Tensor) -> Any:
    outer, steps = self.shifts(tuple(x.shape), "outer")
    return x * outer + steps[:, None], self.shifts((len(x), 2), "steps")[1]


def with_weights(self: Any, x: Tensor) -> Any:
    return self.weighted(self, len(x)) * x


def counted(self: Any, x: Tensor) -> Any:
    self.count += 1
    return x * self.table(self.count % 5 + 2).sum()


def written_to(self: Any, x: Tensor) -> Any:
    table = self.table(len(x))
    table += 1
    return x * table[:, None]


def kept_elsewhere(self: Any, x: Tensor) -> Any:
    if self.last is not None:
        x = x + self.last.sum()
    self.last = self.table(len(x) % 3 + 1)
    return x


def failing(self: Any, x: Tensor) -> Any:
    return x * self.table(len(x) - 4).sum()


def asking(self: Any, x: Tensor) -> Any:
    return x * self.table(len(x)).sum() + self.table.cache_info().misses


def clearing(self: Any, x: Tensor) -> Any:
    if x[0, 0] > 1:
        self.table.cache_clear()
    return x * self.table(len(x)).sum()


def past_the_cache(self: Any, x: Tensor) -> Any:
    return x * self.table(len(x)).sum() + self.table.__wrapped__(len(x)).sum()


def through_map(self: Any, x: Tensor) -> Any:
    return x + sum(one.sum() for one in map(self.table, (2, len(x))))


def given_a_tensor(self: Any, x: Tensor) -> Any:
    return x * self.table(3, x.shape[0] > 4).sum() + (self.weighted(self, 2) * x[:2]).sum()


REPLAYED = [levels, lengths, computed_keys, several_tensors, with_weights, counted, written_to]
OTHERS = [
    kept_elsewhere, failing, asking, clearing, past_the_cache, through_map, given_a_tensor,
]  # fmt: skip


def change(model: Any, number: int) -> None:
    """Others change what the function reads, and the cache."""
    table = getattr(model, "table", None)
    if table is not None and number % 17 == 16:
        table.cache_clear()
    if table is not None and number % 13 == 7:
        table(number % 4 + 2)
    if number == 40:
        with torch.no_grad():
            model.fc.weight.mul_(2)


def outcome(call: Callable[..., Any], x: Tensor) -> Any:
    try:
        found = call(x)
        if any(one.requires_grad for one in _tensors(found)):
            sum(one.sum() for one in _tensors(found)).backward()
        return bits(found)
    except RuntimeError as error:
        return type(error), str(error)


def _tensors(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


def held(model: Any, other: Any) -> Any:
    """What a model holds, and what its caches hold that those of another one hold, too."""
    entries = [
        bits([mine[key] for key in sorted(mine.keys() & its.keys())])
        for mine, its in zip(_entries(model), _entries(other), strict=True)
    ]
    return bits([model.count, model.last, model.fc.weight.grad]), entries


def _entries(model: Any) -> Any:
    caches = (getattr(model, name, None) for name in NAMES)
    return [{_plain(key): one for key, one in entries_of(one)} if one else {} for one in caches]


def _plain(key: Any) -> str:
    parts = key if isinstance(key, (list, tuple)) else (key,)
    return str([one for one in parts if type(one) in (bool, int, float, str, tuple)])


def stream(
    forward: Callable[[Any, Tensor], Any],
    size: int | None = 4,
    calls: int = 60,
    change: Callable[[Any, int], None] | None = None,
    observed: bool = False,
    grad: bool = False,
    **options: Any,
) -> bt.BendedModule:
    """Compare calls with the model's own, and what is in the caches."""
    torch.manual_seed(0)
    eager = Encodes(forward, size)
    torch.manual_seed(0)
    bended = bt.BendedModule(Encodes(forward, size), **options)
    if observed:
        bended.interject(lambda node: True, Seeing(), allow_none=True)
    generator = torch.Generator().manual_seed(0)
    with nullcontext() if grad else torch.no_grad():
        for number in range(calls):
            rows = int(torch.randint(2, 9, (), generator=generator))
            x = torch.randn(rows, 3, generator=generator)
            for model in (eager, bended.model):
                if change is not None:
                    SCALES["scale"] = 1.0 + number // 25
                    change(model, number)
            assert outcome(bended, x.clone()) == outcome(eager, x.clone()), number
            assert held(bended.model, eager) == held(eager, bended.model), number
    SCALES["scale"] = 1.0
    return bended


@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("forward", REPLAYED, ids=lambda one: one.__name__)
def test_calls_are_replayed(forward: Callable[[Any, Tensor], Any], size: int | None) -> None:
    bended = stream(forward, size)
    assert bended.stats.live <= 3, bended.why_live
    assert bended.stats.traces <= 14


@pytest.mark.parametrize("forward", OTHERS, ids=lambda one: one.__name__)
def test_other_uses_are_right(forward: Callable[[Any, Tensor], Any]) -> None:
    for size in (1, 4, None):
        stream(forward, size)


@pytest.mark.more
@pytest.mark.parametrize("mode", ["changed", "observed", "grad", "resumed", "joined", "compiled"])
@pytest.mark.parametrize("forward", [*REPLAYED, *OTHERS], ids=lambda one: one.__name__)
def test_results_and_caches_are_those_of_eager(forward: Any, mode: str) -> None:
    options: dict[str, Any] = {
        "changed": {"change": change}, "observed": {"observed": True}, "grad": {"grad": True},
        "compiled": {"backend": "aot_eager"},
    }.get(mode, {})  # fmt: skip
    modes = {"resumed": lambda: resumed_anywhere(3, most=4), "joined": past_joins}
    with modes.get(mode, nullcontext)():
        for size in (1, 4):
            stream(forward, size, **options)
