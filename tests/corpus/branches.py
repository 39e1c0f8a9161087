"""Branches on data: if, elif, conditional expressions, short circuits, truth tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register


@register(positive=lambda: call(positive(3, 4)), negative=lambda: call(negative(3, 4)))
class SignBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            y = self.up(x).relu()
        else:
            y = self.down(x).tanh()
        return y + x


@register(
    empty=lambda: call(torch.zeros(3, 4)),
    small=lambda: call(positive(3, 4)),
    full=lambda: call(positive(3, 4) * 9),
)
class EarlyReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            return x
        y = self.body(x)
        if x.mean() < 1:
            return y
        return y / x.mean()


@register(
    low=lambda: call(negative(5)),
    middle=lambda: call(positive(5)),
    high=lambda: call(positive(5) + 2),
    huge=lambda: call(positive(5) + 20),
)
def elif_ladder(x: Tensor) -> Tensor:
    m = x.mean()
    if m < 0:
        return -x
    elif m < 1.5:
        return x * x
    elif m < 10:
        return x.sqrt()
    else:
        return x.log()


@register(
    outer_only=lambda: call(positive(4), negative(4)),
    both=lambda: call(positive(4), positive(4, seed=1)),
    neither=lambda: call(negative(4), positive(4)),
)
def nested_branches(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    if x.min() > 0:
        z = z * 2
        if y.min() > 0:
            z = z - x
        z = z.exp()
    return z - y


@register(first=lambda: call(floats(3, 1)), second=lambda: call(floats(1, 3)))
def conditional_expression(x: Tensor) -> Tensor:
    return (x * 2 if x[0] > x[1] else x + 5) - (1.0 if x[0] > x[1] else x.sum())


@register(
    stops_at_rank=lambda: call(positive(4)),
    stops_at_sum=lambda: call(negative(2, 4)),
    stops_at_max=lambda: call(positive(2, 4)),
    passes=lambda: call(positive(2, 4) + 3),
)
def and_chain(x: Tensor) -> Tensor:
    if x.dim() == 2 and x.sum() > 0 and x.max() > 2:
        return x @ x.T
    return x - 1


@register(
    first_holds=lambda: call(floats(5, 0, 0)),
    last_holds=lambda: call(floats(0, 0, 5)),
    none_hold=lambda: call(floats(0, 0, 0)),
)
def or_chain(x: Tensor) -> Tensor:
    if x[0] > 1 or x[1] > 1 or x[2] > 1:
        return x.softmax(0)
    return x + 1


@register(
    zero=lambda: call(floats(0, 0)),
    rising=lambda: call(floats(1, 2)),
    falling=lambda: call(floats(2, 1)),
)
def not_chain(x: Tensor) -> Tensor:
    if not x.any() or not (x[0] < x[1] and not x[1] < 0):
        return x.cos()
    return x.sin()


@register(zero=lambda: call(torch.zeros(3)), nonzero=lambda: call(positive(3)))
def or_yields_operand(x: Tensor) -> Tensor:
    scale = x.max().item() or 1.0
    return (x + 1) / scale


@register(
    below=lambda: call(ints(0, 0)), inside=lambda: call(ints(1, 2)), above=lambda: call(ints(4, 3))
)
def chained_comparison(x: Tensor) -> Tensor:
    n = int(x.sum())
    if 0 < n < 5:
        return x * n
    return x - n


@register(true=lambda: call(floats(1), randn(3)), false=lambda: call(floats(0), randn(3)))
def tensor_as_condition(t: Tensor, x: Tensor) -> Tensor:
    if t:
        return x + t
    return x * 3


@register(
    none=lambda: call(negative(2, 3)),
    some=lambda: call(floats(-1, 1, 2).expand(2, 3)),
    all=lambda: call(positive(2, 3)),
)
def any_and_all_methods(x: Tensor) -> Tensor:
    if (x > 0).all():
        return x.log()
    if (x > 0).any():
        return x.clamp(min=0)
    return x.abs()


@register(
    early=lambda: call(floats(9, 0, 0, 0)),
    late=lambda: call(floats(0, 0, 9, 0)),
    never=lambda: call(floats(0, 0, 0, 0)),
)
def any_over_generator(x: Tensor) -> Tensor:
    if any(v > 1 for v in x):
        return x / 2
    return x - 2


@register(
    all=lambda: call([positive(2), positive(3)]),
    first_fails=lambda: call([negative(2), positive(3)]),
    last_fails=lambda: call([positive(2), negative(3)]),
)
def all_over_generator(parts: list[Tensor]) -> Tensor:
    if all(part.min() > 0 for part in parts):
        return torch.cat([part.sqrt() for part in parts])
    return torch.cat(parts)


@register(same=lambda: call(randn(4), randn(4)), other=lambda: call(randn(4), randn(4, seed=1)))
def torch_equal(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if torch.equal(x, y) else x - y


@register(close=lambda: call(randn(4), 1e-9), far=lambda: call(randn(4), 0.5))
def torch_allclose(x: Tensor, eps: float) -> Tensor:
    moved = x + eps
    if torch.allclose(x, moved):
        return x
    return moved.exp()


@register(found=lambda: call(ints(1, 3, 5)), missing=lambda: call(ints(1, 2, 4)))
def value_in_tensor(x: Tensor) -> Tensor:
    if 3 in x:
        return x.flip(0)
    return x.cumsum(0)


@register(true=lambda: call(floats(1, 2)), false=lambda: call(floats(2, 1)))
def bool_tensor_item(x: Tensor) -> Tensor:
    rising = (x[0] < x[1]).item()
    if rising == True:  # noqa: E712
        return x.diff()
    return x * rising + 1


@register(few=lambda: call(ints(0, 1, 0, 1)), many=lambda: call(ints(1, 1, 1, 1)))
def assignment_expression(x: Tensor) -> Tensor:
    if (n := int(x.sum())) > 2:
        return x[:n] * n
    return x.new_full((n,), 7)


@register(clean=lambda: call(randn(5)), dirty=lambda: call(floats(1, float("nan"), float("inf"))))
def non_finite_guard(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = x.nan_to_num(nan=0.0, posinf=1.0)
    return x.softmax(-1)


@register(input=lambda: call(positive(3)), constant=lambda: call(negative(3)))
def branch_without_operations(x: Tensor) -> Tensor | None:
    return x if x[0] > 0 else None


@register(right=lambda: call(floats(1, 0), randn(2)), left=lambda: call(floats(0, 1), randn(2)))
def branch_that_changes_one_constant(gate: Tensor, x: Tensor) -> Tensor:
    rate = 0.1
    if gate[0] > gate[1]:
        rate = 0.2
    return x * rate
