"""Loops: for and while, their exits, and trip counts that come from data or arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, positive, randn, register


@register(
    first=lambda: call(floats(9, 1, 1)),
    last=lambda: call(floats(1, 1, 9)),
    never=lambda: call(floats(1, 1, 1)),
)
def for_break(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(len(x)):
        total = total + x[i]
        if x[i] > 5:
            break
    return total


@register(
    one=lambda: call(floats(1, -1, 2)),
    two=lambda: call(floats(-1, -1, 2)),
    none=lambda: call(floats(1, 2, 3)),
)
def for_continue(x: Tensor) -> Tensor:
    total = torch.ones(())
    for v in x:
        if v < 0:
            continue
        total = total * v
    return total


@register(broken=lambda: call(floats(1, 7, 1)), completed=lambda: call(floats(1, 1, 1)))
def for_else(x: Tensor) -> Tensor:
    for i, v in enumerate(x):
        if v > 5:
            found = x[: i + 1]
            break
    else:
        found = x.neg()
    return found * 2


@register(
    broken=lambda: call(floats(4, -1)),
    completed=lambda: call(floats(4, 1)),
    skipped=lambda: call(floats(0.5, 0.25)),
)
def while_else(x: Tensor) -> Tensor:
    while x.sum() > 1:
        x = x / 2
        if x.min() < -0.3:
            break
    else:
        x = x + 10
    return x


@register(
    none=lambda: call(floats(0.3, 0.4)),
    few=lambda: call(floats(3, 4)),
    many=lambda: call(floats(30, 40)),
)
def while_norm_exceeds(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


@register(near=lambda: call(floats(1.0)), far=lambda: call(floats(40.0)))
def while_until_converged(x: Tensor) -> Tensor:
    previous = x + 1
    steps = 0
    while (x - previous).abs().max() > 1e-4 and steps < 30:
        previous = x
        x = x.cos()
        steps += 1
    return x * steps


@register(tight=lambda: call(positive(4), 1e-4), loose=lambda: call(positive(4), 0.5))
def while_assignment_expression(x: Tensor, tol: float) -> Tensor:
    target = x.mean()
    while (e := (x - target).abs().max()) > tol:
        x = target + (x - target) * 0.5
    return torch.cat([x, e[None]])


@register(
    zero=lambda: call(ints(0, 0)), three=lambda: call(ints(1, 3)), five=lambda: call(ints(5, 2))
)
class RangeOfTracedMaximum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, counts: Tensor) -> Tensor:
        h = torch.ones(1, 3)
        for _ in range(int(counts.max())):
            h = self.cell(h).tanh()
        return h


@register(
    none=lambda: call(randn(2, 3), 0),
    one=lambda: call(randn(2, 3), 1),
    four=lambda: call(randn(2, 3), 4),
)
class RangeOfArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor, n: int) -> Tensor:
        for _ in range(n):
            x = x + self.cell(x)
        return x


@register(short=lambda: call(randn(2, 3)), long=lambda: call(randn(5, 3)))
def range_of_shape(x: Tensor) -> Tensor:
    state = x.new_zeros(3)
    for i in range(x.shape[0]):
        state = 0.5 * state + x[i]
    return state


@register(
    up=lambda: call(randn(9), ints(1, 8, 3)),
    down=lambda: call(randn(9), ints(7, 0, -2)),
    empty=lambda: call(randn(9), ints(4, 4, 1)),
)
def range_start_stop_step(x: Tensor, bounds: Tensor) -> Tensor:
    start, stop, step = bounds.tolist()
    total = x.new_zeros(())
    for i in range(start, stop, step):
        total = total + x[i] * i
    return total


@register(
    triangle=lambda: call(ints(1, 2, 3)),
    flat=lambda: call(ints(2, 2)),
    holes=lambda: call(ints(0, 3, 0)),
)
def nested_loops_with_traced_counts(counts: Tensor) -> Tensor:
    grid = torch.zeros(3, 4)
    for i in range(len(counts)):
        for j in range(int(counts[i])):
            grid[i, j] = i * 10 + j
    return grid


@register(inner=lambda: call(randn(3, 3).abs()), outer=lambda: call(-randn(3, 3).abs()))
def break_leaves_only_the_inner_loop(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for row in x:
        for v in row:
            if v > 0:
                break
            total = total + v
        total = total * 2 + 1
    return total


@register(
    second=lambda: call(floats(1, 8, 2, 2)),
    fourth=lambda: call(floats(1, 2, 2, 8)),
    absent=lambda: call(floats(1, 2)),
)
def return_from_inside_a_loop(x: Tensor) -> Tensor:
    for i in range(x.numel()):
        if x[i].item() > 4:
            return x[: i + 1].sum()
    return x.prod()


@register(quick=lambda: call(floats(90, 5)), slow=lambda: call(floats(2, 5)))
def while_true(x: Tensor) -> Tensor:
    while True:
        x = x * 2 + 1
        if x.max() > 60:
            break
    return x


@register(narrow=lambda: call(randn(6), 2, 3), wide=lambda: call(randn(6), 0, 5))
def two_pointers(x: Tensor, lo: int, hi: int) -> Tensor:
    y = x.clone()
    while lo < hi:
        y[lo], y[hi] = x[hi], x[lo]
        lo, hi = lo + 1, hi - 1
    return y


@register(odd=lambda: call(ints(7)), even=lambda: call(ints(8)), one=lambda: call(ints(1)))
def collatz(n: Tensor) -> Tensor:
    steps = torch.zeros_like(n)
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@register(once=lambda: call(positive(3) + 4), again=lambda: call(positive(3)))
def loop_body_that_changes_shape(x: Tensor) -> Tensor:
    while x.sum() < 10:
        x = torch.cat([x, x + 1])
    return x
