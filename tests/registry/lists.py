"""Lists of numbers that code reads and assigns by numbers that were computed."""

from __future__ import annotations

import functools
import sys
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python.results import can_exchange
from tests.registry.calls import Call, args, case


def some(seed: int, most: int = 6) -> Call:
    """Random rows, of which there are 2 to 6, or up to another number."""

    def make() -> tuple[Any, ...]:
        own = torch.Generator().manual_seed(seed)
        return (torch.randn(Random(seed).randint(2, most), 4, generator=own),)

    return args(make)


STREAM = [some(seed) for seed in range(40)]


def follows(most: int, bended: bt.BendedModule) -> None:
    assert bended.stats.live == 0, bended.why_live
    if can_exchange():
        assert bended.stats.traces <= most, bended.stats


def followed(most: int, stream: list[Call] = STREAM) -> Any:
    return case(*stream, served=functools.partial(follows, most))


def best(x: Tensor) -> list[int]:
    return x.argmax(1).tolist()


@followed(8)
def counts(x: Tensor) -> Any:
    found = [0] * 4
    for column in best(x):
        found[column] += 1
    return x.sum(0) * torch.tensor(found, dtype=torch.float), found


@followed(11)
def sums(x: Tensor) -> Any:
    found = [0.0] * 4
    for column, row in zip(best(x), x, strict=True):
        found[column] += row.sum().item()
    return x * max(found) + sum(found)


@followed(8)
def places_from_the_end(x: Tensor) -> Any:
    found = [0] * 4
    for column in best(x):
        found[-column - 1] += column
    return x * torch.tensor(found)


@followed(8)
def an_order_turned_around(x: Tensor) -> Any:
    found = [0] * len(x)
    for place, row in enumerate(x[:, 0].argsort().tolist()):
        found[row] = place
    return x[found]


@followed(9)
def a_side_by_the_counts(x: Tensor) -> Any:
    found = [0] * 4
    for column in best(x):
        found[column] += 1
    return x * 2 if found[0] > found[1] else x - found[2]


@followed(8)
def copies_on_the_way(x: Tensor) -> Any:
    found, seen = [0] * 4, []
    for column in best(x):
        found[column] = found[(column + 1) % 4] + column
        seen.append([*found])
    return x, seen


@followed(8)
def a_function_that_assigns(x: Tensor) -> Any:
    found = [0] * 4

    def add(column: int) -> int:
        found[column] += 1
        return found[column]

    return x * sum(map(add, best(x))) + torch.tensor(found)


@followed(18)
def items_that_are_swapped(x: Tensor) -> Any:
    order, (one, other) = [0, 1, 2, 3], best(x)[:2]
    order[one], order[other] = order[other], order[one]
    return x[:, order]


@case(*STREAM)
def an_index_that_is_not_there(x: Tensor) -> Any:
    found = [0] * 3
    try:
        for column in best(x):
            found[column] += 1
    except IndexError as error:
        return x * len(str(error)) + sum(found)
    return x + sum(found)


@case(*STREAM)
def groups_that_are_joined(x: Tensor) -> Any:
    parents = [0, 1, 2, 3]

    def root(one: int) -> int:
        while parents[one] != one:
            one = parents[one]
        return one

    for one, other in zip(best(x), best(-x), strict=True):
        parents[root(one)] = root(other)
    return x * torch.tensor(parents)


@case(*STREAM)
def a_list_that_is_too_long_to_follow(x: Tensor) -> Any:
    """Its index is guarded, in runs that are resumed as well."""
    found = [0] * 40
    for column in best(x):
        found[column * 3] += 1
    return x * sum(found[:7])


@case(*STREAM)
def other_items(x: Tensor) -> Any:
    rows, truths, names = [torch.zeros(4)] * 4, [False] * 4, [""] * 4
    for column, row in zip(best(x), x, strict=True):
        rows[column] = rows[column] + row
        truths[column] = True
        names[column] += "a"
    return torch.stack(rows), truths, names


HELD = [0] * 4


@case(*STREAM)
def a_list_that_stays(x: Tensor) -> Any:
    HELD[:] = [0] * 4
    for column in best(x):
        HELD[column] += 1
    return x * torch.tensor(HELD)


# From Python 3.12 on, the bools that a comprehension makes are guarded.
@followed(16 if sys.version_info < (3, 12) else 24)
def flags(x: Tensor) -> Any:
    found = [bool(row.sum() > 0) for row in x[:2]]
    above = [number > 0.5 for number in x[0].tolist()]
    x = x + 1 if any(found) else x * sum(above)
    return x * above.count(True), all(found)


@followed(24)
def found(x: Tensor) -> Any:
    columns = best(x)
    place = columns.index(max(columns))
    columns.remove(columns[-1])
    return x * place, columns.count(1), 2 in columns


@case(*STREAM)
class Histogram(nn.Module):
    """Counts in a list and in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bins, self.rows = [0] * 4, dict.fromkeys(range(7), 0)

    def forward(self, x: Tensor) -> Any:
        for column in best(x[:1]):
            self.bins[column] += 1
        self.rows[len(x)] += 1
        return x * self.bins[best(x)[0]] + self.rows[len(x)]


@case(*STREAM)
class Levels(nn.Module):
    """Has a cache that is too small for what a call asks it for."""

    def __init__(self) -> None:
        super().__init__()

        @functools.lru_cache(maxsize=2)
        def positions(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.arange(rows * columns).view(rows, columns) * scale

        self.positions = positions

    def forward(self, x: Tensor) -> Any:
        x = x + self.positions(*x.shape) / self.positions(len(x), 1, scale=0.5).sum()
        return x if x.sum() > 0 else x * self.positions(1, 4)
