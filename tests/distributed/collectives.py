"""Models that communicate by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import all_gather as gather_by_name
from torch.distributed import broadcast as send_by_name

import bendtrace as bt
from tests.distributed.common import Trained, assert_same, batches, rank, seeded, train


def _compare(model: Callable[[Tensor], Any], live: str = "") -> bt.BendedModule:
    bended = bt.BendedModule(model)
    for x in batches(6, own=True):
        mine, theirs = x.clone(), x.clone()
        found, expected = bended(mine), model(theirs)
        assert torch.equal(found, expected)
        assert torch.equal(mine, theirs)
    if live:
        assert any(live in reason for reason in bended.why_live), bended.why_live
    else:
        assert bended.why_live == ()
        assert bended.stats.replays == 5
    return bended


def check_collectives_in_place_are_replayed() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x + rank())
        joined = torch.empty(2 * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(joined, y)
        dist.broadcast(y, 1)
        dist.barrier()
        scattered = torch.empty_like(x)
        dist.scatter(scattered, parts if rank() == 0 else None, src=0)
        return y + parts[1] - parts[0] + joined.sum() + scattered

    _compare(model)


def check_functions_that_were_imported_by_name_are_replayed() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        send_by_name(y, 0)
        parts = [torch.empty_like(x) for _ in range(2)]
        gather_by_name(parts, y + rank())
        return y + parts[1]

    _compare(model)


def check_what_a_collective_writes_is_known_to_the_log() -> None:
    def by_name(x: Tensor) -> Tensor:
        y = x * 2
        send_by_name(y, 0)
        return y + 1

    def by_module(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(tensor=y)
        return y + 1

    x = torch.full((3,), float(1 + rank()))
    for model, received in ((by_name, 2.0), (by_module, 6.0)):
        log = bt.log_forward_pass(model, x)
        assert torch.equal(log["mul_1"].tensor_contents, x * 2)  # as it was before
        assert torch.equal(log["add_1"].tensor_contents, torch.full((3,), received + 1))
        ops = bt.trace(model, x).ops
        times, plus = ops[1], ops[-1]
        assert plus.reads == {times.index: times.index + 1}


def check_functional_collectives_are_replayed() -> None:
    def model(x: Tensor) -> Tensor:
        group = dist.group.WORLD
        y = functional.all_reduce(x * 2, "sum", group)
        y = functional.wait_tensor(y) + 1
        z = functional.all_gather_tensor(y, 0, group)
        return functional.reduce_scatter_tensor(z + rank(), "sum", 0, group) * 1

    _compare(model)


class Summing(nn.Module):
    """Sums over the ranks, and sends gradients back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = differentiable.all_reduce(self.layer(x))
        return h * 2 if h.sum() > 0 else h - 1


def check_gradients_through_collectives_are_as_in_eager() -> None:
    found: list[Trained] = []
    for bend in (False, True):
        model = seeded(Summing)
        parameters = list(model.parameters())
        called: Any = bt.BendedModule(model) if bend else model
        found.append(train(called, parameters, batches(6, own=True)))
    assert_same(*found)
    assert called.why_live == ()
    assert called.stats.replays >= 4


def check_batch_norm_over_all_ranks_is_as_in_eager() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), ByHand())

    found = []
    for bend in (False, True):
        model = make()
        called: Any = bt.BendedModule(model) if bend else model
        found.append(train(called, list(model.parameters()), batches(5, own=True)))
    assert_same(*found)


class ByHand(nn.Module):
    """Statistics over the batches of all ranks, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            dist.all_reduce(mean)
            self.mean.lerp_(mean / dist.get_world_size(), 0.5)
        return x - self.mean


def check_what_cannot_be_watched_runs_live_and_says_why() -> None:
    def waiting(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        return y

    def behind(x: Tensor) -> Tensor:
        y = x * 2
        dist.group.WORLD.allreduce([y]).wait()
        return y

    def objects(x: Tensor) -> Tensor:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, rank())
        return x + found[1]

    _compare(waiting, live="Work")
    _compare(behind, live="called without the tracer")
    _compare(objects, live="cannot be")


def check_a_resumed_run_communicates_no_second_time() -> None:
    calls = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            dist.all_reduce(y)
            return y * 2 if y.sum() > 0 else y * 3

    bended = bt.BendedModule(Counting())
    with bt.distributed.agreement(timeout=30):
        for value in (1.0, -1.0, 2.0, -2.0):
            before = bt.distributed.traffic().meetings
            out = bended(torch.full((2,), value))
            calls.append(bt.distributed.traffic().meetings - before)
            assert torch.equal(out, torch.full((2,), value * 2 * (2 if value > 0 else 3)))
    assert bended.stats.resumes == 1
    assert calls == [2, 2, 2, 2]  # before the collective, and at the end
