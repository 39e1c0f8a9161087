"""What becomes of calls in which ranks do not do the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.errors import DivergenceError, InputError, RankDivergenceError
from tests.distributed.common import MLP, Branching, everywhere, rank, seeded

UP, DOWN = (1.0, 1.0), (-1.0, -1.0)
APART, CROSSED = (1.0, -1.0), (-1.0, 1.0)


class Sometimes(nn.Module):
    """One side of its branch communicates."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if x.sum() > 0:
            dist.all_reduce(y)
        return y + 1


class Twofold(nn.Module):
    """Both sides do, and nobody could tell from the tensors that they are not one."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if x.sum() > 0:
            dist.all_reduce(y)
        else:
            y = y + 100
            dist.all_reduce(y)
        return y + 1


def _call(model: Callable[[Tensor], Any], pair: tuple[float, float]) -> Any:
    """Call a model with each rank's own number; return what it gives, or the divergence."""
    try:
        return model(torch.full((2,), pair[rank()]))
    except RankDivergenceError as error:
        return error


def _agrees(model: Callable[[Tensor], Any], pair: tuple[float, float], value: float) -> None:
    found = _call(model, pair)
    assert isinstance(found, Tensor), found
    assert torch.equal(found, torch.full((2,), value))


def _differs(model: Callable[[Tensor], Any], pair: tuple[float, float]) -> RankDivergenceError:
    found = _call(model, pair)
    assert isinstance(found, RankDivergenceError), found
    assert set(found.ranks) == {0, 1}
    told = everywhere(found.ranks)
    assert told[0] == told[1]
    return found


def check_all_ranks_raise_where_one_of_them_communicates() -> None:
    model = bt.BendedModule(Sometimes())
    error = _differs(model, APART)  # the first call of all: both trace
    assert "all_reduce(2 float32) in group" in error.ranks[0]
    assert "agreement.py:" in error.ranks[0]
    assert "`x.sum() > 0` was True" in error.ranks[0]
    assert "the end of the call, after 0 collectives" in error.ranks[1]
    assert "`x.sum() > 0` was False" in error.ranks[1]
    assert str(error).count("\n") == 2
    _agrees(model, UP, 5.0)
    _differs(model, APART)  # one replays, one resumes
    _agrees(model, DOWN, -1.0)
    _differs(model, CROSSED)  # one replays, one resumes
    _differs(model, APART)  # both replay
    _agrees(model, UP, 5.0)
    _agrees(model, DOWN, -1.0)
    assert model.stats.live == 0


def check_collectives_of_different_branches_are_not_paired() -> None:
    model = bt.BendedModule(Twofold())
    for _ in range(2):
        _agrees(model, UP, 5.0)
        error = _differs(model, APART)
        lines = [error.ranks[r].split(" (by ")[0].rpartition(":")[2] for r in range(2)]
        assert int(lines[0]) + 3 == int(lines[1])
        _agrees(model, DOWN, 197.0)
        _differs(model, CROSSED)


def check_it_makes_no_difference_how_ranks_are_served() -> None:
    live = Twofold()
    if rank():
        live.register_forward_hook(lambda *_: open(os.devnull).close())  # which nobody can watch
    model = bt.BendedModule(live)
    for _ in range(3):
        _agrees(model, UP, 5.0)
        _agrees(model, DOWN, 197.0)
        _differs(model, APART)
    assert bool(model.why_live) is bool(rank())
    fresh = bt.BendedModule(Twofold())
    for number in range(4):
        if rank() and number % 2:
            fresh = bt.BendedModule(Twofold())  # knows no path
        _agrees(fresh, UP, 5.0)
        _agrees(fresh, DOWN, 197.0)


def check_a_model_that_catches_errors_raises_all_the_same() -> None:
    class Catching(Sometimes):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x

    model = bt.BendedModule(Catching())
    for pair in (UP, APART, DOWN, APART, CROSSED):
        if pair in (UP, DOWN):
            assert isinstance(_call(model, pair), Tensor)
        else:
            _differs(model, pair)


def check_a_rank_that_raises_does_not_keep_others_waiting() -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                raise KeyError("a fault of the model")
            dist.all_reduce(x)
            return x

    model = bt.BendedModule(Raising())
    for pair in (DOWN, APART, DOWN, CROSSED, UP, DOWN):
        if pair[rank()] > 0:
            with pytest.raises(KeyError, match="a fault of the model"):
                model(torch.ones(2))
        elif pair == DOWN:
            _agrees(model, pair, -2.0)
        else:
            error = _call(model, pair)
            assert isinstance(error, RankDivergenceError)
            assert "raised KeyError: 'a fault of the model'" in error.ranks[1 - rank()]


def check_an_error_of_what_is_inserted_is_told_to_others() -> None:
    model = bt.BendedModule(Twofold())
    _agrees(model, UP, 5.0)

    def faulty(value: Tensor) -> None:
        if rank() == 1:
            raise ValueError("a fault of mine")

    for _ in range(2):
        with model.interject("mul", faulty):
            if rank() == 1:
                with pytest.raises(ValueError, match="a fault of mine"):
                    model(torch.ones(2))
            else:
                error = _call(model, UP)
                assert isinstance(error, RankDivergenceError)
                assert "a fault of mine" in error.ranks[1]
        _agrees(model, UP, 5.0)


def check_a_change_on_one_rank_that_leads_it_elsewhere_is_noticed() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            if y.sum() > 0:
                dist.all_reduce(y)
            return y + 1

    model = bt.BendedModule(Asking())
    _agrees(model, UP, 5.0)
    with model.interject("mul", lambda value: -value if rank() else None) as handle:
        _differs(model, UP)
        _differs(model, UP)
        assert handle.report().fired == 2
    with model.interject("mul", lambda value: value + rank()):
        _agrees(model, UP, 6.0)
    _agrees(model, UP, 5.0)


def check_what_is_inserted_may_communicate() -> None:
    model = bt.BendedModule(lambda x: torch.relu(x) * 2)
    model(torch.ones(2))

    def mean(value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value / 2

    with model.interject("relu", mean):
        for _ in range(3):
            _agrees(model, (1.0, 3.0), 4.0)
    with model.interject("relu", lambda value: mean(value) if rank() else value):
        _differs(model, (1.0, 3.0))
    _agrees(model, UP, 2.0)


def check_sharded_models_agree_upon_what_they_gather() -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MLP() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.layers[0](x)
            return self.layers[1](x) if x.sum() > 0 else x

    def sharded(make: type[nn.Module]) -> bt.BendedModule:
        model = seeded(make)
        for layer in model.layers:
            fully_shard(layer)
        return bt.BendedModule(fully_shard(model))

    x, apart = torch.ones(2, 8), torch.full((2, 8), 1.0 - 2 * rank())
    model = sharded(Deeper)
    for given in (x, -x, x):
        model(given).sum().backward()
    with pytest.raises(RankDivergenceError, match="all_gather_into_tensor"):
        model(apart)
    # Without a collective in the forward: what the backward pass would scatter is not the same.
    model = sharded(Branching)
    for given in (x, -x, x):
        model(given).sum().backward()
    with pytest.raises(RankDivergenceError, match="gradients of"):
        model(apart)

    # Where it is the same, ranks take the branch that their data say.
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MLP()])

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            return y * 2 if x.sum() > 0 else y * 3

    model, alone = sharded(Scaling), seeded(Scaling)
    for _ in range(3):
        out = model(apart)
        assert torch.equal(out, alone(apart))
        out.sum().backward()
    steps = everywhere([step.value for step in model.traces[-1].flow_steps])
    assert steps == [[True], [False]]


def check_buffers_of_ddp_are_its_own_concern() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x))

    model = bt.BendedModule(DistributedDataParallel(seeded(Normed)))
    before = bt.distributed.traffic()
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert bt.distributed.traffic() == before


def check_ranks_that_wait_for_each_other_in_two_groups_are_told() -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])

    def model(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, group=one if x.sum() > 0 else other)
        return y

    bended = bt.BendedModule(model)
    for _ in range(2):
        _agrees(bended, UP, 4.0)
        _agrees(bended, DOWN, -4.0)
        error = _call(bended, APART)
        assert isinstance(error, RankDivergenceError)
        assert any("waits for rank" in text or "raised" in text for text in error.ranks.values())
    _agrees(bended, UP, 4.0)
    dist.destroy_process_group(one)
    dist.destroy_process_group(other)


def check_a_rank_that_ends_its_call_is_not_waited_for() -> None:
    group = dist.new_group([0, 1])  # so that nothing tells in which group the model communicates

    def model(x: Tensor) -> Tensor:
        y = x * 2
        if x.sum() > 0:
            dist.all_reduce(y, group=group)
        return y

    bended = bt.BendedModule(model)
    found = _call(bended, APART)
    if rank() == 0:
        assert isinstance(found, RankDivergenceError)
        assert "ended its call without a collective" in found.ranks[1]
    else:
        assert torch.equal(found, torch.full((2,), -2.0))
    dist.barrier()
    if rank() == 1:  # told as soon as it comes to a collective itself
        with pytest.raises(RankDivergenceError):
            bended(torch.ones(2))
    _agrees(bended, UP, 4.0)
    _agrees(bended, DOWN, -2.0)
    _differs(bended, APART)  # from now on both know
    dist.destroy_process_group(group)


def check_a_rank_that_is_late_is_waited_for() -> None:
    group = dist.new_group([0, 1])

    class Seldom(nn.Module):
        """Communicates in every third call, by a count of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = x * 2
            if self.calls % 3 == 0:
                dist.all_reduce(y, group=group)
            return y

    bended = bt.BendedModule(Seldom())
    late = threading.Event()
    for number in range(1, 7):
        if rank() == 1 and number in (3, 6):
            late.wait(2.5)  # longer than anybody waits before they look where this one is
        _agrees(bended, UP, 4.0 if number % 3 == 0 else 2.0)
    dist.destroy_process_group(group)


def check_a_rank_that_never_comes_is_given_up_in_the_end() -> None:
    bended = bt.BendedModule(Twofold())
    _agrees(bended, UP, 5.0)
    with bt.distributed.agreement(timeout=1.0):
        if rank() == 0:
            with pytest.raises(RankDivergenceError, match="rank 1: did not come within 1 s"):
                bended(torch.ones(2))
    dist.barrier()
    if rank() == 1:  # too late
        with pytest.raises(RankDivergenceError, match="rank 1: did not come within 1 s"):
            bended(torch.ones(2))
    _agrees(bended, UP, 5.0)


def check_a_replay_that_is_given_up_is_told_to_others() -> None:
    model = bt.BendedModule(Sometimes())
    trace = model.trace(torch.ones(2))
    if rank() == 1:
        with pytest.raises(DivergenceError):
            trace.replay(-torch.ones(2))
    else:
        with pytest.raises(RankDivergenceError):
            trace.replay(torch.ones(2))
    _agrees(model, UP, 5.0)


def check_models_of_which_nothing_tells_can_be_asked_to_agree() -> None:
    hidden: dict[str, Any] = {"sum": dist.all_reduce}

    def model(x: Tensor) -> Tensor:
        y = x * 2
        if x.sum() > 0:
            hidden["sum"](y)
        return y + 1

    bended = bt.BendedModule(model)
    with bt.distributed.agree(bended) as handle:
        _differs(bended, APART)
        _agrees(bended, UP, 5.0)
        _agrees(bended, DOWN, -1.0)
        assert "agree at the end of each call" in repr(handle)
    plain = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
    for group in (None, dist.group.WORLD):
        before = bt.distributed.traffic().meetings
        with bt.distributed.agree(plain, group):
            _agrees(plain, APART, 2.0 - 4 * rank())  # no collective, so no error
            _agrees(plain, APART, 2.0 - 4 * rank())
        assert bt.distributed.traffic().meetings == before + 2
    _agrees(plain, APART, 2.0 - 4 * rank())
    assert bt.distributed.traffic().meetings == before + 2
    with pytest.raises(InputError, match="has to be a process group"):
        bt.distributed.agree(plain, "everybody")  # type: ignore[arg-type]
    only = dist.new_group([0])
    if rank() == 1:
        with pytest.raises(InputError, match="not a member"):
            bt.distributed.agree(plain, only)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def check_agreeing_takes_messages_and_no_collective() -> None:
    bended = bt.BendedModule(Twofold())
    _agrees(bended, UP, 5.0)
    before = bt.distributed.traffic()
    with _Counting() as mode:
        for _ in range(10):
            _agrees(bended, UP, 5.0)
    after = bt.distributed.traffic()
    assert mode.found == ["c10d.allreduce_.default"] * 10
    assert after.meetings - before.meetings == 20
    with bt.distributed.agreement(enabled=False) as setting:
        _agrees(bended, UP, 5.0)
        assert bt.distributed.traffic() == after
        assert "do not agree" in repr(setting)
    _agrees(bended, UP, 5.0)
    assert bt.distributed.traffic().meetings == after.meetings + 2


def check_other_threads_are_not_in_the_way() -> None:
    bended = bt.BendedModule(Twofold())
    _agrees(bended, UP, 5.0)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(bended(torch.ones(2))))
    thread.start()
    thread.join()
    assert torch.equal(results[0], torch.full((2,), 5.0))
    _agrees(bended, UP, 5.0)
