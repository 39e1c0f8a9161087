"""Models in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import bendtrace as bt
from tests.distributed.common import (
    MLP,
    Branching,
    assert_replays,
    assert_same,
    batches,
    everywhere,
    rank,
    seeded,
    train,
)


class Normed(nn.Module):
    """With buffers, which DDP sends from rank 0 before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.mlp(x)))


def _three_ways(make: type[nn.Module], own: bool, **options: Any) -> bt.BendedModule:
    found = []
    for around in ("nothing", "outside", "inside"):
        inner = seeded(make)
        parameters = list(inner.parameters())
        bended = None
        if around == "nothing":
            model: Any = DistributedDataParallel(inner, **options)
        elif around == "outside":
            model = bended = bt.BendedModule(DistributedDataParallel(inner, **options))
        else:
            bended = bt.BendedModule(inner)
            model = DistributedDataParallel(bended, **options)
        found.append(train(model, parameters, batches(6, own=own)))
        if bended is not None:
            assert_replays(bended, calls=6)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    # And ranks have the same parameters after it.
    sums = everywhere([float(p.double().sum()) for p in found[1].parameters])
    assert sums[0] == sums[1]


def check_a_plain_model_trains_as_it_does_in_eager() -> None:
    _three_ways(MLP, own=True)


def check_buffers_and_dropout_are_as_in_eager() -> None:
    _three_ways(Normed, own=True)


def check_ranks_go_their_own_ways_where_they_do_not_communicate() -> None:
    before = bt.distributed.traffic()
    _three_ways(Branching, own=True, find_unused_parameters=True)
    x = torch.full((2, 8), 1.0 if rank() else -1.0)
    bended = bt.BendedModule(
        DistributedDataParallel(seeded(Branching), find_unused_parameters=True)
    )
    eager = DistributedDataParallel(seeded(Branching), find_unused_parameters=True)
    for _ in range(3):
        assert torch.equal(bended(x), eager(x))
    taken = everywhere([step.value for step in bended.traces[-1].flow_steps])
    assert taken[0] != taken[1]
    assert bt.distributed.traffic() == before  # which takes no message


def check_gradients_are_summed_up_without_communication_in_no_sync() -> None:
    grads = []
    for bend in (False, True):
        ddp: Any = DistributedDataParallel(seeded(MLP))
        model = bt.BendedModule(ddp) if bend else ddp
        first, second, third = batches(3, own=True)
        with ddp.no_sync():
            model(first).sum().backward()
            model(second).sum().backward()
        local = [p.grad.clone() for p in ddp.parameters()]
        assert everywhere(float(local[0].sum()))[0] != everywhere(float(local[0].sum()))[1]
        model(third).sum().backward()
        grads.append(local + [p.grad.clone() for p in ddp.parameters()])
    assert all(map(torch.equal, *grads))


def check_a_static_graph_and_gradient_buckets_are_as_in_eager() -> None:
    _three_ways(MLP, own=True, static_graph=True)
    _three_ways(MLP, own=True, gradient_as_bucket_view=True)


def check_what_is_inserted_acts_as_in_the_model_alone() -> None:
    alone = bt.BendedModule(seeded(Branching))
    ddp = bt.BendedModule(DistributedDataParallel(seeded(Branching)))
    inputs = batches(4)
    alone(inputs[0]), ddp(inputs[0])
    with (
        alone.interject("layers_1.relu", lambda value: value + rank()) as one,
        ddp.interject("module.layers_1.relu", lambda value: value + rank()) as other,
    ):
        for x in inputs:
            assert torch.equal(alone(x), ddp(x))
        assert one.report().fired == other.report().fired == len(inputs)
    assert not ddp.insertions
    assert torch.equal(alone(inputs[0]), ddp(inputs[0]))
    assert dist.get_world_size() == 2


def check_ranks_may_have_more_batches_than_others() -> None:
    found = []
    for around in ("nothing", "outside", "inside"):
        inner = seeded(MLP)
        parameters = list(inner.parameters())
        ddp = DistributedDataParallel(bt.BendedModule(inner) if around == "inside" else inner)
        model: Any = bt.BendedModule(ddp) if around == "outside" else ddp
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        with ddp.join():
            for x in batches(3 + 2 * rank(), own=True):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        found.append([p.detach().clone() for p in parameters])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def check_ddp_by_hooks_is_as_in_eager_and_live_only_once() -> None:
    found = []
    for bend in (False, True):
        model = replicate(seeded(MLP))
        called: Any = bt.BendedModule(model) if bend else model
        found.append(train(called, list(model.parameters()), batches(4, own=True)))
    assert_same(*found)
    # The first call makes what the hooks keep.
    assert called.stats == bt.Stats(traces=1, replays=2, live=1)
