"""Models that FSDP2 shards: `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import bendtrace as bt
from tests.distributed.common import (
    MLP,
    Branching,
    assert_replays,
    assert_same,
    batches,
    full,
    seeded,
    train,
)
from tests.distributed.tensor_parallel import branching


class Tied(nn.Module):
    """One weight in two modules, a module that is called twice, numbers among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.mlp = MLP()
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long().clamp(max=9)
        return self.head(self.mlp(self.mlp(self.embedding(tokens).sum(-2))))


class Keeping(nn.Module):
    """With state that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP()])
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.norm(self.layers[0](x))
        return self.dropout(self.latest)


def sharded(make: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = seeded(make)
        for layer in getattr(model, "layers", ()):
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return made


def _compare(make: Callable[[], nn.Module], steps: int = 5, own: bool = False) -> bt.BendedModule:
    eager = seeded(make)
    expected = train(eager, list(eager.parameters()), batches(steps, own=own))
    bended = bt.BendedModule(seeded(make))
    assert_same(train(bended, list(bended.parameters()), batches(steps, own=own)), expected)
    assert_replays(bended, calls=steps)
    return bended


def check_training_gives_what_eager_gives_sharded_and_alone() -> None:
    bended = _compare(sharded(Branching))
    assert len(bended.traces) == 2
    alone = seeded(Branching)
    inputs = batches(5)
    expected = train(alone, list(alone.parameters()), inputs)
    model = bt.BendedModule(sharded(Branching)())
    assert_same(train(model, list(model.parameters()), inputs), expected)


def check_ranks_with_their_own_batches_train_as_in_eager() -> None:
    _compare(sharded(MLP), own=True)
    _compare(sharded(Keeping), own=True)


def check_tied_weights_and_modules_called_twice_are_as_in_eager() -> None:
    def make() -> nn.Module:
        model = Tied()
        fully_shard(model.mlp)
        return fully_shard(model)

    _compare(make)


def check_policies_are_kept() -> None:
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _compare(sharded(Branching, mp_policy=lower))
    _compare(sharded(Branching, reshard_after_forward=False))


def check_groups_of_modules_and_parts_of_models_are_as_in_eager() -> None:
    def grouped() -> nn.Module:
        model = Branching()
        fully_shard([model.layers[0], model.layers[1]])
        return fully_shard(model)

    def in_part() -> nn.Module:
        model = Branching()
        fully_shard(model.layers[0])
        return model

    _compare(grouped)
    eager, bended = seeded(in_part), bt.BendedModule(seeded(in_part))
    for x in batches(4):
        assert torch.equal(bended(x), eager(x))
    assert_replays(bended, calls=4)


def check_a_bended_model_can_be_sharded_later() -> None:
    expected = train(*_with_parameters(sharded(Branching)()), batches(4))
    model = seeded(Branching)
    bended = bt.BendedModule(model)
    bended(batches(1)[0])  # a path that holds no longer
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert_same(train(bended, list(model.parameters()), batches(4)), expected)
    around = bt.BendedModule(seeded(Branching))
    for layer in around.model.layers:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(around)
    assert_same(train(around, list(around.parameters()), batches(4)), expected)


def _with_parameters(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    return model, list(model.parameters())


def check_calls_with_and_without_gradients_alternate() -> None:
    alone, bended = seeded(Branching), bt.BendedModule(sharded(Branching)())
    for number, x in enumerate(batches(8)):
        if number % 3 == 2:
            with torch.no_grad():
                assert torch.equal(bended(x), alone(x))
        else:
            out, expected = bended(x), alone(x)
            assert torch.equal(out, expected)
            out.sum().backward()
            expected.sum().backward()
    for found, parameter in zip(bended.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(found.grad), parameter.grad)
    assert bended.stats.live == 0


def check_nothing_is_left_in_the_model() -> None:
    model = sharded(Branching)()
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    shards = dict(model.named_parameters())
    bended = bt.BendedModule(model)
    for x in batches(4):
        bended(x).sum().backward()
    assert hooks == [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    assert all(value is shards[name] for name, value in model.named_parameters())


def check_what_is_inserted_acts_as_in_the_model_alone() -> None:
    alone, bended = bt.BendedModule(seeded(Branching)), bt.BendedModule(sharded(Branching)())
    inputs = batches(4)
    alone(inputs[0]), bended(inputs[0])
    for where in ("layers_1", "layers_0.relu", "layers_1.up.linear", "extra.weight"):
        for what in (lambda value: None, lambda value: value * 2 + 1):
            with alone.interject(where, what) as one, bended.interject(where, what) as other:
                for x in inputs:
                    found, expected = bended(x), alone(x)
                    assert torch.equal(found, expected), where
                    found.sum().backward()
                    expected.sum().backward()
                assert str(one.report()) == str(other.report())
        for p, expected in zip(bended.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(full(p.grad), expected.grad, atol=1e-4), where
    assert not bended.insertions
    assert torch.equal(bended(inputs[0]), alone(inputs[0]))
    activations = bended.get_activations("layers_0.relu", args=(inputs[0],))
    expected_ones = alone.get_activations("layers_0.relu", args=(inputs[0],))
    assert torch.equal(activations["layers_0.relu"], expected_ones["layers_0.relu"])


def check_an_inserted_change_that_leads_to_the_other_branch_is_followed() -> None:
    alone, bended = bt.BendedModule(seeded(Branching)), bt.BendedModule(sharded(Branching)())
    x = batches(2)[0]
    assert torch.equal(bended(x), alone(x))
    for add in (100.0, -100.0):
        with (
            alone.interject("layers_1", lambda value, add=add: value + add),
            bended.interject("layers_1", lambda value, add=add: value + add),
        ):
            for _ in range(2):
                assert torch.equal(bended(x), alone(x))


def check_one_mesh_of_shards_and_copies_is_as_in_eager() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
    _compare(sharded(Branching, mesh=mesh))


def check_fsdp_of_the_first_kind_runs_live_and_is_as_in_eager() -> None:
    found = []
    for bend in (False, True):
        model = FullyShardedDataParallel(seeded(Branching), device_id=torch.device("cpu"))
        called: Any = bt.BendedModule(model) if bend else model
        found.append(train(called, list(model.parameters()), batches(4)))
    assert_same(*found)
    assert called.stats.live == 4
    assert called.why_live


def check_a_sharded_model_and_a_parallel_one_may_be_parts_of_another() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = sharded(Branching)(), branching()

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.first(x)
            for _ in range(2):
                y = y + self.second(x)
            return {"y": y, "again": (self.first(x),)}

    eager, bended = seeded(Both), bt.BendedModule(seeded(Both))
    for x in batches(4):
        found, expected = bended(x), eager(x)
        assert torch.equal(found["y"], expected["y"])
        assert torch.equal(found["again"][0], expected["again"][0])
        found["y"].sum().backward()
        expected["y"].sum().backward()
    for mine, other in zip(bended.parameters(), eager.parameters(), strict=True):
        assert torch.equal(full(mine.grad), full(other.grad))
    assert_replays(bended, calls=4)


def check_modes_around_the_call_are_kept() -> None:
    alone, bended = seeded(Branching), bt.BendedModule(sharded(Branching)())
    for x in batches(3):
        with torch.inference_mode():
            assert torch.equal(bended(x), alone(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(bended(x), alone(x))
    assert bended.stats.live == 0
