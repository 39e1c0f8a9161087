"""Lists that a loop appends tensors or numbers to, whose length differs from call to call."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, stack

from tests.registry.lists import STREAM, followed


def best_in_3_11(most: int) -> Any:
    """Since Python 3.12 a comprehension has no frame, and fewer states of sums are read."""
    return followed(most if sys.version_info < (3, 12) else len(STREAM))


def halves(x: Tensor) -> Tensor:
    """A function that code could take for one of torch's."""
    return x / 2


@followed(10)
def steps_of_a_recurrence(x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(4), []
    for i in range(len(x)):
        h = torch.tanh(h * 0.5 + x[i])
        outputs.append(h)
    return torch.stack(outputs)


@followed(14)
def steps_with_a_branch(x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(4), []
    for i in range(len(x)):
        if x[i].sum() > 0:
            h = torch.tanh(h * 0.5 + x[i])
        outputs.append(h)
    return torch.cat(outputs, dim=-1).view(len(x), 4)


@followed(16)
def two_lists(x: Tensor) -> Tensor:
    small, large = [], []
    for i in range(len(x)):
        if x[i].sum() > 0:
            large += [x[i] * 2]
        else:
            small += [x[i] - 1]
    small.append(x[0])
    large.append(x[-1])
    return torch.stack(small).sum(0) - stack(large, dim=0).prod(0)


@followed(16)
def as_long_as_values_say(x: Tensor) -> Tensor:
    h, outputs, rounds = x[0], [x[0]], 0
    while h.norm() > 0.5 and rounds < 20:
        h = h * 0.8
        rounds += 1
        outputs.append(h)
    return torch.vstack(outputs).cumsum(0)


@followed(10)
def items_that_are_written_to(x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(4), []
    for i in range(len(x)):
        h = h + x[i]
        outputs.append(h)
        h.mul_(0.5)
    h.add_(1)
    return torch.stack(outputs, 1)


@followed(14)
def a_list_in_each_round(x: Tensor) -> Tensor:
    outer = []
    for i in range(len(x)):
        inner = []
        for j in range(len(x)):
            inner.append(x[i] * x[j])
        outer.append(torch.stack(inner).sum(0))
        inner.clear()
    return torch.stack(outer)


@followed(10)
def read_within_the_loop(x: Tensor) -> Tensor:
    h, outputs = x[0], [x[0]]
    for i in range(len(x)):
        h = torch.stack(outputs).mean(0) + x[i]
        outputs.append(h)
    return h


@followed(40)
def looked_into(x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(4), []
    for i in range(len(x)):
        h = torch.tanh(h * 0.5 + x[i])
        outputs.append(h)
    return outputs[len(outputs) // 2] + outputs[0] + len(outputs)


@followed(40)
def given_away(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h, outputs = x.new_zeros(4), []
    for i in range(len(x)):
        h = h * 0.5 + x[i]
        outputs.append(h)
    return torch.stack([halves(y) for y in outputs]), outputs


@followed(10)
def numbers_of_a_loop(x: Tensor) -> Tensor:
    weights = []
    for i in range(len(x)):
        weights.append(i * 0.5)
    return x * torch.tensor(weights).view(-1, 1)


@followed(20)
def numbers_of_tensors(x: Tensor) -> Tensor:
    h, kept, least = x.new_zeros(4), [], []
    for i in range(len(x)):
        h = torch.tanh(h + x[i])
        if h.sum() > 0:
            kept.append(int(h.argmax()))
        else:
            kept.append(0)
        least.append(min(i, 3))
    return h + torch.as_tensor(kept, dtype=torch.float64).sum() - torch.tensor(least).sum()


@followed(20)
def numbers_and_tensors(x: Tensor) -> Tensor:
    both = []
    for i in range(len(x)):
        both.append(x[i].mean())
        if x[i].sum() > 0:
            both += [x[i, 0].item()]
    both.append(True)
    return torch.tensor(both)


@best_in_3_11(12)
def of_a_comprehension(x: Tensor) -> Tensor:
    outputs = [row * 2 if row.sum() > 0 else row - 1 for row in x]
    if x.sum() > 0:
        outputs.append(x[0])
    return torch.stack(outputs, dim=1)


@best_in_3_11(16)
def of_chosen_rows(x: Tensor) -> Tensor:
    chosen = [x[i] * i for i in range(len(x)) if x[i].sum() > -9]
    return x.sum(0) + torch.cat(chosen).sum()


@best_in_3_11(16)
def of_comprehensions_in_each_other(x: Tensor) -> Tensor:
    rows = [torch.stack([x[i] * x[j] for j in range(i + 1)]).sum(0) for i in range(len(x))]
    causal = torch.tensor([[1.0 if j <= i else 0.0 for j in range(len(x))] for i in range(len(x))])
    return torch.stack(rows) + causal @ x


@best_in_3_11(10)
def numbers_of_a_comprehension(x: Tensor) -> Tensor:
    return x[torch.tensor([int(row.argmax()) % len(x) for row in x])]


@followed(14)
def one_number_again_and_again(x: Tensor) -> tuple[Tensor, Tensor]:
    counts = [0] * len(x)
    if x.sum() > 0:
        counts.append(1)
    return x.sum() + torch.tensor(counts).float().sum(), torch.as_tensor([1.5] * x.size(0))


@best_in_3_11(16)
def padded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, k = len(x), int(x.abs().sum()) % 4
    mask = torch.tensor([1.0] * k + [0.0] * (n - k) + [2.0])
    return x.sum(), mask, torch.tensor([0] * n + [True] * (k - 1))


@best_in_3_11(24)
def padded_rows(x: Tensor) -> Tensor:
    lengths = (x[:2].abs().sum(1) * 2).long().tolist()
    most = max(lengths)
    return torch.tensor([[1] * n + [0] * (most - n) for n in lengths])


@followed(20)
def begun_again_with_the_same_item(x: Tensor) -> Tensor:
    chunk, total = [], x.new_zeros(4)
    for i in range(len(x)):
        h = x[i] * 2
        chunk.append(h)
        if h.sum() > 0:
            total = total + torch.stack(chunk).sum(0)
            chunk.clear()
            chunk.append(h)
    return total * 2 if total.sum() > 1 else total - torch.stack(chunk).sum(0)


@followed(24)
def lists_whose_length_is_asked(x: Tensor) -> Tensor:
    kept, chunk, total = [], [], x.new_zeros(4)
    for row in x:
        if row.sum() > 0:
            kept.append(row)
        chunk.append(row * 2)
        if len(chunk) == 3:
            total = total + torch.stack(chunk).prod(0)
            chunk.clear()
    if chunk:
        total = total - torch.stack(chunk).sum(0)
    if not kept:
        return total
    return total + torch.stack(kept).sum(0) / len(kept)


@best_in_3_11(34)
def lengths_of_expressions(x: Tensor) -> Tensor:
    kept = [i for i in range(len(x)) if x[i].sum() > 0]
    if len(kept) < 2:
        kept.append(0)
    ones = [1] * len(x) + [0] * len(kept)
    below = len([row for row in x if row[0] < 0])
    return x[torch.tensor(kept)].sum(0) * len(kept) + torch.tensor(ones).sum() / len(ones) + below


@followed(40)
def comprehensions_that_others_see(x: Tensor) -> Any:
    rows = [row * 2 for row in x]
    counts = [0] * len(x)
    counts[-1] = 1
    return torch.stack(rows), rows, counts, max([i for i in range(len(x))]), sum([1.5] * len(x))
