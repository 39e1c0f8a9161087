"""Models whose parameters and values are DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import bendtrace as bt
from tests.distributed.common import (
    MLP,
    Attention,
    Branching,
    assert_close,
    assert_replays,
    assert_same,
    batches,
    full,
    seeded,
    train,
)


def _mesh() -> Any:
    return init_device_mesh("cpu", (2,))


def _pair() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def mlp() -> nn.Module:
    return parallelize_module(seeded(MLP), _mesh(), _pair())


def branching() -> nn.Module:
    model = seeded(Branching)
    for layer in model.layers:
        parallelize_module(layer, _mesh(), _pair())
    return model


def attention() -> nn.Module:
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    return parallelize_module(seeded(Attention), _mesh(), plan)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def along_the_sequence() -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(seeded(Normed), _mesh(), plan)
    scattered = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    return parallelize_module(model, _mesh(), scattered)


class Asking(nn.Module):
    """Its condition is about a value that is spread over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.sum() > 0:
            h = h * 2
        return self.down(h)


def asking() -> nn.Module:
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(seeded(Asking), _mesh(), plan)


def _compare(
    make: Callable[[], nn.Module], alone: type[nn.Module], shape: tuple[int, ...] = (4, 8)
) -> bt.BendedModule:
    eager, inputs = make(), batches(5, shape)
    expected = train(eager, list(eager.parameters()), inputs)
    bended = bt.BendedModule(make())
    assert_same(train(bended, list(bended.parameters()), inputs), expected)
    assert_replays(bended, calls=5)
    # Alone the sums are taken in another order.
    whole = seeded(alone)
    assert_close(expected, train(whole, list(whole.parameters()), inputs))
    return bended


def check_training_gives_what_eager_gives_in_parallel_and_alone() -> None:
    _compare(mlp, MLP)
    _compare(attention, Attention, (2, 4, 8))
    _compare(along_the_sequence, Normed, (2, 4, 8))


def check_branches_are_replayed_and_resumed() -> None:
    assert len(_compare(branching, Branching).traces) == 2


def check_a_condition_on_a_dtensor_leads_all_ranks_the_same_way() -> None:
    bended = _compare(asking, Asking)
    assert len(bended.traces) == 2
    assert bended.stats.resumes == 1


def check_parallel_layers_can_be_sharded_as_well() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        model = seeded(Branching)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], _pair())
            fully_shard(layer, mesh=mesh["dp"])
        return model

    eager, bended = make(), bt.BendedModule(make())
    inputs = batches(4)
    expected = train(eager, list(eager.parameters()), inputs)
    assert_same(train(bended, list(bended.parameters()), inputs), expected)
    assert_replays(bended, calls=4)


def check_the_layout_of_an_argument_is_guarded() -> None:
    mesh = _mesh()

    def model(x: DTensor) -> Any:
        if x.placements[0].is_replicate():
            return (x * 2).redistribute(placements=[Shard(0)])
        return (x * 2).full_tensor() + 1

    bended = bt.BendedModule(model)
    values = torch.arange(8.0).view(2, 4)
    for placement in (Replicate(), Replicate(), Shard(0), Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(values, mesh, [placement])
        found, expected = bended(x), model(x)
        assert type(found) is type(expected)
        assert torch.equal(full(found), full(expected))
        if isinstance(expected, DTensor):
            assert found.placements == expected.placements
    assert bended.stats.traces == 3
    assert bended.stats.replays == 3
    assert bended.why_live == ()


def check_what_is_inserted_is_given_the_values_as_the_model_has_them() -> None:
    alone, bended = bt.BendedModule(seeded(Branching)), bt.BendedModule(branching())
    inputs = batches(4)
    alone(inputs[0]), bended(inputs[0])
    kinds: list[Any] = []

    def shifted(value: Tensor) -> Tensor:
        kinds.append((type(value), tuple(value.shape)))
        return value + 1

    for where in ("layers_1", "layers_0.down", "extra"):
        with alone.interject(where, shifted) as one, bended.interject(where, shifted) as other:
            for x in inputs:
                assert torch.allclose(bended(x), alone(x), atol=1e-5), where
        assert str(one.report()) == str(other.report())
    kinds.clear()
    # A local part inside, a DTensor as parameter.
    with bended.interject("layers_0.relu", shifted), alone.interject("layers_0.relu", shifted):
        assert torch.allclose(bended(inputs[0]), alone(inputs[0]), atol=1e-5)
    assert kinds == [(Tensor, (4, 8)), (Tensor, (4, 16))]
    kinds.clear()

    def doubled(value: Tensor) -> Tensor:
        kinds.append(type(value))
        assert bt.distributed.whole(value).shape == (16, 8)
        return value * 2

    with bended.interject("layers_0.up.weight", doubled):
        found = bended(inputs[0])
    with alone.interject("layers_0.up.weight", lambda value: value * 2):
        assert torch.allclose(found, alone(inputs[0]), atol=1e-5)
    assert kinds == [DTensor]
    assert not bended.insertions


def check_looking_ahead_runs_no_collective() -> None:
    bended = bt.BendedModule(branching())
    x = batches(1)[0]
    last = bt.node_selector.last(bt.node_selector.is_module)
    with bended.interject(last, lambda value: value * 2) as handle:
        with pytest.raises(bt.errors.InputError, match="call the model once before you insert it"):
            bended(x)
        assert handle.report().fired == 0
    alone = seeded(Branching)
    assert torch.allclose(bended(x), alone(x), atol=1e-5)
