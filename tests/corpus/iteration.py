"""Iterating tensors and what is made of them: comprehensions, generators, itertools."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register


@register(two=lambda: call(randn(2, 3)), four=lambda: call(randn(4, 3)))
class RowsOfTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        best = None
        for row in x:
            s = self.score(row)
            best = s if best is None else torch.maximum(best, s)
        return best


@register(even=lambda: call(floats(1, -1, 1)), odd=lambda: call(floats(-1, 1, 1, 1)))
def enumerate_tensor(x: Tensor) -> Tensor:
    out = []
    for i, v in enumerate(x):
        out.append(v * i if v > 0 else v - i)
    return torch.stack(out)


@register(equal=lambda: call(randn(3), randn(3, seed=1)), longer=lambda: call(randn(4), randn(2)))
def zip_tensors(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    for a, b in zip(x, y, strict=False):
        total = total + (a if a > b else b)
    return total


@register(
    two=lambda: call(randn(2, 2), floats(1, -1)), three=lambda: call(randn(3, 2), floats(1, 2, 3))
)
def zip_strict(rows: Tensor, weights: Tensor) -> Tensor:
    return sum(row * w for row, w in zip(rows, weights, strict=True))


@register(
    falling=lambda: call(floats(3, 2, 1)),
    rising=lambda: call(floats(1, 2, 3)),
    one=lambda: call(floats(5)),
)
def reversed_tensor(x: Tensor) -> Tensor:
    carry = x.new_zeros(())
    for v in reversed(x):
        carry = carry * 0.9 + v
        if carry > 4:
            carry = carry - 1
    return carry


@register(two=lambda: call(ints(2)), five=lambda: call(ints(5)), zero=lambda: call(ints(0)))
def comprehension_over_traced_range(n: Tensor) -> Tensor:
    parts = [torch.full((i + 1,), float(i)) for i in range(int(n))]
    return torch.cat([torch.zeros(1), *parts])


@register(
    both=lambda: call(positive(2, 3)),
    none=lambda: call(negative(2, 3)),
    one=lambda: call(torch.cat([positive(1, 3), negative(1, 3)])),
)
def comprehension_filter(x: Tensor) -> list[Tensor]:
    return [row.sqrt() for row in x if row.sum() > 0]


@register(few=lambda: call(floats(3, -3)), many=lambda: call(floats(3, 2, -1, 4)))
def generator_expression(x: Tensor) -> Tensor:
    return sum((v * 2 if v > 0 else -v) for v in x)


@register(two=lambda: call(ints(4, 9)), three=lambda: call(ints(7, 7, 1)))
def dict_comprehension(x: Tensor) -> dict[int, Tensor]:
    return {int(v): v * 2 for v in x}


def _halvings(x: Tensor) -> Iterator[Tensor]:
    while x.abs().max() > 1:
        yield x
        x = x / 2


@register(
    none=lambda: call(floats(0.5)), two=lambda: call(floats(3)), five=lambda: call(floats(20, 1))
)
def generator_function(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for i, half in enumerate(_halvings(x)):
        total = total + half * (i + 1)
    return total


def _leaves(tree: Tensor | tuple) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for child in tree:
            yield from _leaves(child)


@register(
    leaf=lambda: call(randn(2)),
    pair=lambda: call((randn(2), randn(2, seed=1))),
    deep=lambda: call((randn(2), (randn(2, seed=1), (randn(2, seed=2),)))),
)
def yield_from_nested_tuples(tree: Tensor | tuple) -> Tensor:
    return torch.stack(list(_leaves(tree))).prod(0)


def _accumulator() -> Iterator[Tensor]:
    total = torch.zeros(())
    while True:
        v = yield total
        total = total + v if v > 0 else total - v


@register(rising=lambda: call(floats(1, 2)), mixed=lambda: call(floats(1, -2, 3)))
def generator_send(x: Tensor) -> Tensor:
    acc = _accumulator()
    last = next(acc)
    for v in x:
        last = acc.send(v)
    return last


@register(found=lambda: call(floats(-1, 4, 2)), default=lambda: call(floats(-1, -4, -2)))
def next_with_default(x: Tensor) -> Tensor:
    first = next((v for v in x if v > 0), None)
    return x.neg() if first is None else x / first


@register(
    even=lambda: call(randn(6, 2)),
    remainder=lambda: call(randn(7, 2)),
    one=lambda: call(randn(2, 2)),
)
def loop_over_split(x: Tensor) -> Tensor:
    out = []
    for part in x.split(3):
        out.append(part.mean(0) if len(part) == 3 else part.sum(0))
    return torch.stack(out)


@register(one=lambda: call(randn(3, 1)), three=lambda: call(randn(3, 3)))
def loop_over_unbind(x: Tensor) -> Tensor:
    h = torch.ones(3)
    for column in x.unbind(1):
        h = torch.sigmoid(h + column)
    return h


@register(three=lambda: call(randn(3)), five=lambda: call(randn(5)))
def starred_unpacking(x: Tensor) -> Tensor:
    head, *middle, last = x
    return head - last + sum(middle)


@register(up=lambda: call(floats(1, 2, 3)), down=lambda: call(floats(3, 2, 1, 0)))
def itertools_pairwise(x: Tensor) -> Tensor:
    return torch.stack([b - a if b > a else b + a for a, b in itertools.pairwise(x)])


@register(
    none=lambda: call(floats(9, 1)),
    two=lambda: call(floats(1, 2, 9)),
    all=lambda: call(floats(1, 1, 1)),
)
def itertools_takewhile(x: Tensor) -> Tensor:
    return sum(itertools.takewhile(lambda v: v < 5, x), torch.zeros(()))


@register(two=lambda: call(randn(2, 2, 2)), three=lambda: call(randn(3, 2, 2)))
def functools_reduce(x: Tensor) -> Tensor:
    return functools.reduce(lambda a, b: a @ b if a.sum() > 0 else b @ a, x)


@register(kept=lambda: call(positive(2, 3)), dropped=lambda: call(negative(3, 3)))
def map_and_filter(x: Tensor) -> Tensor:
    kept = list(filter(lambda row: row[0] > 0, x))
    return torch.stack(list(map(torch.exp, kept or [x[0]])))


@register(
    ascending=lambda: call([floats(1, 2), floats(3), floats(9, 9)]),
    descending=lambda: call([floats(9, 2), floats(3), floats(1, 1)]),
)
def sort_tensors_by_traced_key(parts: list[Tensor]) -> Tensor:
    return torch.cat(sorted(parts, key=lambda part: part.sum().item()))
