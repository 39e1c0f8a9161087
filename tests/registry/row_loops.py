"""Loops over the rows of tensors, of which there are others in each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.registry.calls import case
from tests.registry.rounds import LAYERS, LONG, rounds_closed


@rounds_closed(7)
class ReadsRows(nn.Module):
    """Reads a sequence, and keeps the last row."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(4)
        for row in x:
            h = self.cell(row, h)
        self.total += h.detach()
        self.kept = row
        return h, row


@rounds_closed(7)
def parts_of_several_kinds(x: Tensor) -> Tensor:
    h = x.new_zeros(4)
    for row in x.unbind(0):
        h = torch.tanh(h + row)
    for row in torch.unbind(x.t(), 1):
        h = torch.tanh(h - row)
    for part in x.split(2):
        h = h + part.sum(0)
    for part in torch.split(x, 3, dim=0):
        h = h * 0.5 + part.mean(0)
    for part in x.chunk(max(len(x) // 2, 1)):
        h = torch.sin(h + part[0])
    return h


@rounds_closed(9)
def with_a_branch(x: Tensor) -> Any:
    h, outputs = x.new_zeros(4), []
    for row in x:
        h = torch.tanh(h * 0.5 + row)
        if h.sum() > 0:
            outputs.append(h * 2)
        outputs.append(row)
    return torch.stack(outputs)


@rounds_closed(10)
def with_their_numbers(x: Tensor) -> Any:
    h = x.new_zeros(4)
    for i, row in enumerate(x):
        h = torch.tanh(h + row) * i
    for number, row in enumerate(x.unbind(0), start=1):
        if row[0] > 0:
            h = h + row / number
    return h, i, number


@rounds_closed(12)
def side_by_side(x: Tensor) -> Any:
    h, y = x.new_zeros(4), x.cumsum(0)
    for one, other in zip(x, y, strict=True):
        h = torch.tanh(h + one - other)
        if h[0] > 0.5:
            h = h * 0.5
    for i, (one, other) in enumerate(zip(x.unbind(0), y[1:], strict=False)):
        h = h + one * other * i
    return h


@rounds_closed(12)
def from_the_last_row(x: Tensor) -> Any:
    h = torch.zeros(4)
    for i in range(len(x) - 1, -1, -1):
        h = torch.tanh(h * 0.5 + x[i])
    for i in reversed(range(x.size(0))):
        h = h + x[i] * i
    for row in reversed(x.unbind(0)):
        h = torch.sin(h + row)
    for row in reversed(x):
        if h[1] > 0:
            h = h - row
    return h, i


@rounds_closed(10)
def left_in_the_middle(x: Tensor) -> Any:
    h, last = torch.zeros(4), x[0]
    for row in x:
        if row.sum() < -2:
            continue
        h = torch.tanh(h + row)
        if h[0] > 0.9:
            break
        last = row
    else:
        h = h + 1
    return h, last, row


@rounds_closed(20)
def rows_of_rows(x: Tensor) -> Any:
    h = torch.zeros(())
    for row in x:
        for number in row:
            h = torch.tanh(h + number)
        for other in x:
            h = h * 0.9 + (row * other).sum()
    return h


@rounds_closed(12)
def rows_that_are_written_to(x: Tensor) -> Any:
    x = x.clone()
    for row in x:
        row.mul_(0.5)
        x.add_(0.125)
        if row[0] > 0:
            x[0] = row
    return x


@rounds_closed(9)
def rows_of_a_generator(x: Tensor) -> Any:
    def doubled() -> Any:
        for row in x:
            yield row * 2

    h = torch.zeros(4)
    for row in doubled():
        h = torch.tanh(h + row)
        if h[0] > 0.5:
            h = h - 1
    return h


@case(*LONG)
def rows_of_different_numbers(x: Tensor) -> Any:
    """The shorter one ends the loop, or raises an error."""
    h = torch.zeros(4)
    for row, other in zip(x, x[x[:, 0] > 0], strict=False):
        h = torch.tanh(h + row * other)
    try:
        for row, other in zip(x, x[x[:, 0] > -1], strict=True):
            h = torch.tanh(h - row * other)
    except ValueError as error:
        return h, str(error)
    return h, row


@case(*LONG)
def a_layer_for_each_row(x: Tensor) -> Any:
    """Python needs the number."""
    h = torch.zeros(4)
    for i, row in enumerate(x):
        h = torch.tanh(LAYERS[i](h) + row)
    return h


@case(*LONG)
def rows_that_more_code_sees(x: Tensor) -> Any:
    """Others than a loop have the rows."""
    h, rows = torch.zeros(4), x.unbind(0)
    for row in rows:
        h = torch.tanh(h + row)
    for row in list(x):
        h = torch.tanh(h - row)
    for row in rows[1:]:
        h = h + row
    for i, row in zip(range(len(x)), x, strict=True):
        h = h * 0.5 + row * i
    return h, len(rows), [*map(torch.sin, x)]
