"""Loops with a counter, which sizes end after another number of rounds in each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.registry.calls import case
from tests.registry.lists import followed, some

LONG = [some(seed, most=17) for seed in range(36)]


def rounds_closed(most: int) -> Any:
    return followed(most, LONG)


@rounds_closed(7)
class Reader(nn.Module):
    """Reads a sequence, and keeps how much it has read."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.read = 0

    def forward(self, x: Tensor) -> Any:
        h, i = x.new_zeros(4), 0
        while i < x.size(0):
            h = self.cell(x[i], h)
            i += 1
        self.total += h.detach()
        self.read = i
        return h, i


@rounds_closed(12)
def pairs_of_rows(x: Tensor) -> Any:
    i, n = 0, len(x)
    while i + 1 < n:
        x = x + torch.tanh(x[i] * x[i + 1]) * i
        i += 1
    return x, f"{n > 3}"


@rounds_closed(7)
def from_the_end(x: Tensor) -> Any:
    i = last = x.size(0) - 1
    h = torch.zeros(4)
    while i >= 0:
        h = torch.tanh(h + x[i] * (last - i))
        i -= 1
    return h, i, last


@rounds_closed(8)
def until_a_break(x: Tensor) -> Any:
    i, kept = 0, []
    while True:
        if i >= x.size(0):
            break
        if i % 3 == 1:
            i += 2
            continue
        kept.append(torch.sin(x[i] + i))
        i += 1
    return torch.stack(kept), i


@rounds_closed(8)
def rows_and_columns(x: Tensor) -> Any:
    i, rounds, h = 0, 0, x.new_zeros(())
    while i < x.shape[0]:
        j = x.shape[1]
        while j > i % 2:
            j -= 1
            h = torch.tanh(h + x[i, j])
            rounds += 1
        i += 1
    return h, rounds


@rounds_closed(12)
def steps_that_values_decide(x: Tensor) -> Any:
    i, other, h = 0, 0, torch.zeros(4)
    while i < x.size(0):
        h = torch.tanh(h + x[i] - other)
        if h.sum() > 0:
            other += 1
        if h[0] > 0:
            i += 1
        i += 1
    return h * i, other


LAYERS = [nn.Linear(4, 4) for _ in range(18)]


@case(*LONG)
def a_layer_for_each_round(x: Tensor) -> Any:
    """Python needs the number."""
    i, h = 0, torch.zeros(4)
    while i < x.size(0):
        h = torch.tanh(LAYERS[i](h) + x[i])
        i += 1
    return h


@case(*LONG)
def a_text_of_rounds(x: Tensor) -> Any:
    i, text, seen = 0, "", {}
    while i < x.size(0):
        text += f"{i},"
        seen[i] = x[i] * len(text)
        i += 1
    return seen, text


@case(*LONG)
def numbers_that_are_left(x: Tensor) -> Any:
    """A number of one round is used in the next, and after the loop."""
    i, before, first, h = 0, -1, None, torch.zeros(4)
    while i < x.size(0):
        h = torch.tanh(h + x[i]) * (i - before)
        before = i
        if first is None and h[1] > 0.2:
            first = i
        i += 1
    return h / i, before, first


@rounds_closed(8)
def numbers_that_shrink(x: Tensor) -> Any:
    """Numbers that a loop over a range carries on, of which none counts its rounds."""
    total, weight, mean = torch.zeros(4), 1.0, 0.0
    for i in range(x.size(0)):
        total = total + weight * x[i]
        weight *= 0.9
        mean = 0.5 * mean + 0.5 * x[i, 0].item()
    return total, weight, mean


@rounds_closed(14)
def rounds_that_are_counted(x: Tensor) -> Any:
    count, h = 0, torch.zeros(4)
    for i in range(x.size(0)):
        if x[i].sum() > 0:
            count += 1
        h = torch.tanh(h + x[i] * count)
    return h / max(count, 1), count


@rounds_closed(8)
def sums_of_two_numbers(x: Tensor) -> Any:
    """Each is computed from two of the round before: more ways than values."""
    before, now, h = 0.0, 1.0, torch.zeros(4)
    for i in range(x.size(0)):
        h = h * 0.5 + x[i] * now
        before, now = now, before + now
    return h, before


@case(*LONG)
def a_layer_for_each_count(x: Tensor) -> Any:
    count, h = 0, torch.zeros(4)
    for i in range(x.size(0)):
        if x[i].sum() > 0:
            count += 1
        h = torch.tanh(LAYERS[count](h) + x[i])
    return h, count
