"""In-place writes to tensors, views and Python containers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register


@register(positive=lambda: call(positive(3, 3)), negative=lambda: call(negative(3, 3)))
def inplace_on_view(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[1] if x[0, 0] > 0 else y[:, 2]
    row.mul_(10)
    return y


@register(some=lambda: call(randn(6)), none=lambda: call(positive(6)))
def masked_assignment(x: Tensor) -> Tensor:
    y = x.clone()
    mask = y < 0
    if mask.any():
        y[mask] = 0
    return y + 1


@register(two=lambda: call(randn(2, 3)), four=lambda: call(randn(4, 3)))
class RowAssignmentInLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 2)
        for i in range(len(x)):
            out[i] = self.proj(x[i])
        return out


@register(mutated=lambda: call(positive(3)), untouched=lambda: call(negative(3)))
def input_mutated_in_branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x.mul_(2)
    return x + 1


@register(once=lambda: call(floats(4, 4)), often=lambda: call(floats(40, 40)))
def input_mutated_in_loop(x: Tensor) -> None:
    while x.max() > 3:
        x /= 2


@register(alias=lambda: call(positive(2)), copy=lambda: call(negative(2)))
def augmented_assignment_through_alias(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x if x[0] > 0 else x.clone()
    y += 1
    return x, y


@register(reread=lambda: call(randn(4), 0.5), unread=lambda: call(randn(4), -0.5))
def branch_reads_what_was_written(x: Tensor, bias: float) -> Tensor:
    y = x.clone()
    view = y[:2]
    view.fill_(bias)
    if y[0] > 0:
        y[2:] = view
    return y


@register(
    sorted=lambda: call(floats(1, 2, 3)),
    reversed=lambda: call(floats(3, 2, 1)),
    nearly=lambda: call(floats(1, 3, 2)),
)
def bubble_sort(x: Tensor) -> Tensor:
    x = x.clone()
    swapped = True
    while swapped:
        swapped = False
        for i in range(len(x) - 1):
            if x[i] > x[i + 1]:
                x[i], x[i + 1] = x[i + 1].clone(), x[i].clone()
                swapped = True
    return x


@register(pair=lambda: call(randn(4, 2), ints(0, 2)), same=lambda: call(randn(4, 2), ints(1, 1)))
def rows_swapped(x: Tensor, pair: Tensor) -> Tensor:
    a, b = pair.tolist()
    if a != b:
        x[[a, b]] = x[[b, a]]
    return x


@register(short=lambda: call(randn(4), ints(1, 3)), long=lambda: call(randn(8), ints(0, 7)))
def traced_slice_assignment(x: Tensor, bounds: Tensor) -> Tensor:
    start, stop = bounds.tolist()
    out = torch.zeros_like(x)
    out[start:stop] = x[start:stop] if stop < 5 else 1.0
    return out


@register(
    add=lambda: call(positive(3), positive(3)), multiply=lambda: call(negative(3), positive(3))
)
def out_argument(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.empty(3)
    if x[0] > 0:
        torch.add(x, y, out=buffer)
    else:
        torch.mul(x, y, out=buffer)
    return buffer.sqrt()


@register(empty=lambda: call(negative(3), []), grown=lambda: call(positive(3), []))
def argument_list_grows(x: Tensor, log: list[Tensor]) -> Tensor:
    for v in x:
        if v > 0:
            log.append(v * 2)
    return x.sum()


@register(miss=lambda: call(randn(2), {}), hit=lambda: call(randn(2), {"scale": floats(3)}))
def argument_dict_is_filled(x: Tensor, cache: dict[str, Any]) -> Tensor:
    if "scale" not in cache:
        cache["scale"] = x.abs().max()
    return x / cache["scale"]


@register(scatter=lambda: call(floats(1, 2, 3)), accumulate=lambda: call(floats(-1, 2, 3)))
def index_put(x: Tensor) -> Tensor:
    out = torch.zeros(4)
    where = (ints(0, 3, 3),)
    return out.index_put_(where, x, accumulate=bool(x[0] < 0))


@register(full=lambda: call(ints(1, 1, 1)), sparse=lambda: call(ints(0, 1, 0)))
def scatter_loop(flags: Tensor) -> Tensor:
    board = torch.zeros(3, 3)
    for i, flag in enumerate(flags):
        if flag:
            board.scatter_(1, torch.tensor([[i], [i], [i]]), float(i + 1))
    return board


@register(kept=lambda: call(positive(3)), zeroed=lambda: call(negative(3)))
def zeroed_then_copied(x: Tensor) -> Tensor:
    y = torch.ones(3)
    if x[0] < 0:
        y.zero_()
    y[1:].copy_(x[:2])
    return y


@register(stable=lambda: call(torch.ones(2, 2)), dying=lambda: call(torch.eye(2)))
def cellular_automaton(x: Tensor) -> Tensor:
    board = x.clone()
    for _ in range(4):
        neighbours = board.sum() - board
        changed = ((neighbours > 2).float() != board).any()
        if not changed:
            break
        board.copy_((neighbours > 2).float())
    return board


@register(wide=lambda: call(randn(2, 4)), tall=lambda: call(randn(4, 2)))
def transpose_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    if y.shape[0] < y.shape[1]:
        y.t_()
    y.relu_()[0].add_(1)
    return y


@register(chained=lambda: call(positive(4)), direct=lambda: call(negative(4)))
def returned_view_of_input(x: Tensor) -> Tensor:
    y = x.view(2, 2)
    if x[0] > 0:
        y = y[0]
        y.add_(1)
    return y
