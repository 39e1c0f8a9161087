"""Where paths do not repeat, the model itself is called, and paths are tried again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine.dispatcher import Floor


class Gated(nn.Module):
    """Goes another way for nearly each input: there are 2 ** 12 of them.

    It remembers the way that it went, so that no two ways lead to the same state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.register_buffer("sides", torch.randn(12, 4, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        given, way = x, []
        for layer, side in zip(self.layers, self.sides, strict=True):
            h = layer(x)
            way.append("up" if (given * side).sum() > 0 else "down")
            x = x + h.relu() if way[-1] == "up" else x - h.tanh()
        return self.drop(self.norm(x)) * len("".join(way))


def pair() -> tuple[Gated, Gated]:
    torch.manual_seed(0)
    model = Gated()
    same = Gated()
    same.load_state_dict(model.state_dict())
    return model, same


def compare(bended: bt.BendedModule, same: Gated, x: Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    given = bended(x)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(given, same(x))
    assert torch.equal(after, torch.get_rng_state())
    for name, value in same.state_dict().items():
        assert torch.equal(value, bended.state_dict()[name])


def bring_to_the_floor(bended: bt.BendedModule) -> None:
    for _ in range(300):
        bended(torch.randn(4, 8))
    assert bended.why_live[-1].startswith("the paths of the model do not repeat")


@pytest.mark.more
def test_a_stream_without_repetition_is_not_traced_for_ever() -> None:
    model, same = pair()
    bended = bt.BendedModule(model, max_traces=None)
    for seed in range(400):
        compare(bended, same, torch.randn(4, 8), seed)
    stats = bended.stats
    assert 100 <= stats.traces <= 110
    assert stats.live >= 200
    assert stats.live + stats.traces + stats.replays == 400
    reason = bended.why_live[-1]
    assert reason.startswith("the paths of the model do not repeat: ")
    assert "known ones are tried again after" in reason


@pytest.mark.more
def test_paths_are_followed_again_once_they_repeat() -> None:
    model, same = pair()
    bended = bt.BendedModule(model, max_traces=None)
    for seed in range(120):
        compare(bended, same, torch.randn(4, 8), seed)
    assert bended.stats.live
    x = torch.randn(4, 8)
    for seed in range(600):
        compare(bended, same, x, seed)
    replays = bended.stats.replays
    for seed in range(10):
        compare(bended, same, x, seed)
    assert bended.stats.replays == replays + 10
    assert not bended.why_live


class Tallies(nn.Module):
    """Changes a `bytearray`, which no replay could, and reads it: each call finds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.tally = bytearray(3)

    def forward(self, x: Tensor) -> Tensor:
        self.tally[x.shape[0] % 3] = (self.tally[x.shape[0] % 3] + 1) % 256
        return self.fc(x) * float(max(self.tally))


@pytest.mark.parametrize("where", ["", "fc", "fc.linear"])
def test_few_runs_are_recorded_in_vain(where: str) -> None:
    torch.manual_seed(0)
    model, same = Tallies(), Tallies()
    same.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model)
    if where:
        bended.interject(where, lambda value: value * 1.5)
        same.fc.register_forward_hook(lambda module, inputs, output: output * 1.5)
    for number in range(300):
        x = torch.randn(number % 5 + 1, 4)
        assert torch.equal(bended(x), same(x))
        assert model.tally == same.tally
    assert bended.stats.live == 300
    assert bended.stats.traces < 30


@pytest.mark.all
def test_what_is_inserted_is_called_all_the_same() -> None:
    model, _ = pair()
    model.drop.p = 0.0
    bended = bt.BendedModule(model, max_traces=None)
    bring_to_the_floor(bended)
    x = torch.randn(4, 8)
    with bended.interject("norm", lambda value: value * 0) as insertion:
        assert not bended(x).any()
    assert insertion.report().fired == 1
    assert torch.equal(bended(x), model(x))


@pytest.mark.all
def test_a_trace_that_is_asked_for_is_made() -> None:
    model, _ = pair()
    model.drop.p = 0.0
    bended = bt.BendedModule(model, max_traces=None)
    bring_to_the_floor(bended)
    x = torch.randn(4, 8)
    assert torch.equal(bended.trace(x).output, model(x))


def served(floor: Floor, calls: list[bool]) -> list[str]:
    """Return how calls are served: along a known path, an unknown one, or by the model."""
    told = []
    for is_known in calls:
        if floor.take_call():
            told.append("model")
            continue
        if is_known:
            floor.replays += 1
        else:
            floor.count_path()
        told.append("known" if is_known else "unknown")
    return told


def test_unknown_paths_become_ever_rarer() -> None:
    told = served(Floor(), [False] * 40_000)
    assert told[:100] == ["unknown"] * 100
    assert told[100:612] == ["model"] * 512
    assert told[612:614] == ["unknown"] * 2
    assert told[614:1638] == ["model"] * 1024
    assert told[20_000:].count("unknown") <= 4


def test_one_unknown_path_in_two_hundred_calls_goes_on() -> None:
    calls = [number % 220 == 0 for number in range(40_000)]
    assert "model" not in served(Floor(), [not is_unknown for is_unknown in calls])


def test_one_unknown_path_in_ten_calls_is_too_many() -> None:
    told = served(Floor(), [number % 10 != 0 for number in range(40_000)])
    assert told[:1000].count("model") == 0
    assert told[20_000:].count("unknown") <= 6


def test_waits_are_short_again_once_most_paths_are_known() -> None:
    floor = Floor()
    served(floor, [False] * 300)
    assert "model" in served(floor, [True] * 700)
    assert served(floor, [True] * 1000) == ["known"] * 1000
    assert floor.reason is None
    told = served(floor, [False] * 1000)
    begun = told.index("model")
    assert begun > 1
    assert told[begun : begun + 513] == ["model"] * 512 + ["unknown"]
