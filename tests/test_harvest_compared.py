"""What a harvest is compared with when it is gone on with or read again; what is read from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, NodePathError
from bendtrace.harvesting import Harvest

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
W = 1.0


class Model(nn.Module):
    def __init__(self, factor: float = 2.0, slope: float = 0.1) -> None:
        super().__init__()
        self.factor = factor
        self.a, self.leaky = nn.Linear(4, 4), nn.LeakyReLU(slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaky(torch.relu(self.a(x) * self.factor))


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


def go(out: Path, harvested: Any = None, data: Any = None, **options: Any) -> Harvest:
    loader = X.split(8) if data is None else data
    harvested = model() if harvested is None else harvested
    return bt.harvest(harvested, loader, where="relu", out=out, progress=False, **options)


def scaled(value: Tensor, *, k: int = 2) -> Tensor:
    return value * k


def with_default(k: int) -> Callable[[Tensor], Tensor]:
    def reduce(value: Tensor, *, k: int = k) -> Tensor:
        return value * k

    return reduce


def closed_over(held: Any) -> Callable[[Tensor], Tensor]:
    def reduce(value: Tensor) -> Tensor:
        return value * (held[0] if isinstance(held, list) else held)

    return reduce


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(scaled, k=2), functools.partial(scaled, k=3)),
        (with_default(2), with_default(3)),
        (linear(0), linear(1)),
        (closed_over(torch.ones(4)), closed_over(torch.ones(4) * 2)),
        (closed_over([1]), closed_over([2])),
        (lambda value: value + 1, lambda value: value + 2),
    ],
)
def test_a_reduction_that_does_something_else_is_another_harvest(
    tmp_path: Path, one: Any, other: Any
) -> None:
    first = go(tmp_path, reduce=one)
    with pytest.raises(InputError, match="another harvest: reduce= was"):
        go(tmp_path, reduce=other)
    again = go(tmp_path, reduce=one)
    assert torch.equal(again["relu"].tensor(), first["relu"].tensor())


def test_a_global_that_a_reduction_reads_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(value: Tensor) -> Tensor:
        return value * W

    go(tmp_path, reduce=reduce)
    monkeypatch.setitem(globals(), "W", 2.0)
    with pytest.raises(InputError, match="another harvest: reduce= was"):
        go(tmp_path, reduce=reduce)


def test_what_is_inserted_counts_unless_it_observes(tmp_path: Path) -> None:
    bended = bt.BendedModule(model())
    plain = go(tmp_path, bended)["relu"].tensor()
    with (
        bended.interject("a", lambda value: value * 0),
        pytest.raises(InputError, match="another harvest: inserted= was"),
    ):
        go(tmp_path, bended)
    with bended.interject("a", bt.analysis.FeatureStatistics(keep=-1)):
        assert torch.equal(go(tmp_path, bended)["relu"].tensor(), plain)


@pytest.mark.parametrize("other", [{"factor": 5.0}, {"slope": 0.5}])
def test_plain_attributes_of_modules_count(tmp_path: Path, other: dict[str, float]) -> None:
    go(tmp_path, model())
    with pytest.raises(InputError, match="the model's modules"):
        go(tmp_path, model(**other))


@pytest.mark.parametrize(
    "data", [(X + 1).split(8), X[:8].split(8), torch.cat([X, X]).split(8), X.split(4)]
)
def test_a_complete_harvest_is_compared_with_the_loader(tmp_path: Path, data: Any) -> None:
    harvested = model()
    go(tmp_path, harvested)
    state = torch.get_rng_state()
    assert len(go(tmp_path, harvested)) == 40
    with pytest.raises(InputError, match="data set"):
        go(tmp_path, harvested, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_that_uses_its_memory_again_can_be_gone_on_with(tmp_path: Path) -> None:
    def batches(fails: bool) -> Iterator[Tensor]:
        memory = torch.empty(8, 4)
        for number, batch in enumerate(X.split(8)):
            if fails and number == 3:
                raise RuntimeError("no such luck")
            memory.copy_(batch)
            yield memory

    with pytest.raises(RuntimeError, match="no such luck"):
        go(tmp_path / "a", data=batches(True))
    found = go(tmp_path / "a", data=batches(False))
    assert torch.equal(found["relu"].tensor(), go(tmp_path / "b")["relu"].tensor())


def test_a_model_that_draws_for_some_batches_only_is_not_gone_on_with(tmp_path: Path) -> None:
    def noisy(x: Tensor) -> Tensor:
        h = torch.relu(x)
        if x.sum() > 5:
            h = h + torch.rand_like(h)
        if x.sum() > 50:
            raise RuntimeError("no such luck")
        return h

    data = [torch.full((2, 4), value) for value in (0.1, 1.0, 0.1, 9.0)]
    with pytest.raises(bt.BendtraceError, match="no such luck"):
        go(tmp_path, noisy, data)
    with pytest.raises(InputError, match="draws random numbers"):
        go(tmp_path, noisy, data)


def test_a_model_that_draws_on_a_gpu_alone_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [0]

    generators = (  # of two devices
        SimpleNamespace(get_state=lambda: torch.zeros(1), initial_seed=lambda: 0),
        SimpleNamespace(
            get_state=lambda: torch.full((1,), float(drawn[0])), initial_seed=lambda: 0
        ),
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)

    def call(bended: Any, batch: Tensor) -> None:
        bended(batch)
        drawn[0] += 1
        if drawn[0] > 2:
            raise RuntimeError("no such luck")

    data = [torch.ones(2, 4) for _ in range(4)]
    for said in ("no such luck", "draws random numbers"):
        with pytest.raises(bt.BendtraceError, match=said):
            go(tmp_path, torch.relu, data, call=call)


def test_floats_that_cannot_be_checked_are_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype="):
        go(tmp_path / "a", dtype=torch.float8_e4m3fn)
    assert not (tmp_path / "a").exists()


def test_rows_are_chosen_as_in_tensors(tmp_path: Path) -> None:
    column = go(tmp_path)["relu"]
    whole = column.tensor()
    mask = whole.sum(1) > 2
    for chosen in (mask, mask.tolist(), mask.numpy()):
        assert torch.equal(column[chosen], whole[mask])
    for chosen in ([3, -1], torch.tensor([3, -1]), torch.tensor([3, -1]).numpy()):
        assert torch.equal(column[chosen], whole[[3, -1]])
    assert torch.equal(column[torch.tensor(5)], whole[5])
    assert column[[]].shape == (0, 4)
    for wrong in (mask[:5], mask.tolist()[:5], mask[:, None].expand(40, 3)):
        with pytest.raises(IndexError, match="an entry for each of its 40 rows"):
            column[wrong]
    for wrong in ("a", (1, 2), [0.5], [[1]]):
        with pytest.raises(InputError, match="relu"):
            column[wrong]


def test_what_is_read_is_the_reader_s_own(tmp_path: Path) -> None:
    found = go(tmp_path)
    column = found["relu"]
    whole = column.tensor().clone()
    for read in (
        column.tensor(), column[3:5], column[3], column[[1]], next(iter(column)),
        next(column.batches())[1], found.dataset("relu")[2],
    ):  # fmt: skip
        for tensor in read if isinstance(read, tuple) else (read,):
            tensor -= 100
    assert torch.equal(column.tensor(), whole)
    assert torch.equal(Harvest.open(tmp_path)["relu"].tensor(), whole)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            y: Tensor = self.r(x)
        else:
            y = self.r(-x) + 1
        return torch.relu(y) if x.sum() > 0 else torch.relu(y * 2)


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
@pytest.mark.parametrize("where", ["r", ["r", "relu"]])
def test_nodes_that_another_process_names_otherwise_are_not_mixed(
    tmp_path: Path, where: Any
) -> None:
    data = [torch.full((1, 2), value) for value in (-1.0, -1.0, -1.0, 1.0, 1.0)]
    broken = [True]

    def call(model: Any, batch: Tensor) -> Any:
        if broken and batch is data[3]:
            raise RuntimeError("no such luck")
        return model(batch)

    options: dict[str, Any] = {"out": tmp_path, "progress": False, "call": call}
    with pytest.raises(bt.BendtraceError, match="no such luck"):
        bt.harvest(bt.BendedModule(Either()), data, where=where, **options)
    broken.clear()
    with pytest.raises(InputError, match="the one that a process runs first"):
        bt.harvest(bt.BendedModule(Either()), data, where=where, **options)


def test_names_stay_where_a_model_knows_its_paths(tmp_path: Path) -> None:
    data = [torch.full((1, 2), -1.0)] * 3 + [torch.full((1, 2), 1.0)] * 5
    bended = bt.BendedModule(Either())
    found = bt.harvest(bended, data, where="r", out=tmp_path / "module", progress=False)
    again = bt.harvest(bended, data, where="r", out=tmp_path / "module", progress=False)
    assert again.nodes == found.nodes
    # There are two of the function, and only the first path to be known tells which is meant.
    with pytest.raises(NodePathError, match="'relu' depends on which path came first"):
        bt.harvest(bended, data, where="relu", out=tmp_path / "op", progress=False)
    tree = bended.trace(data[0]).tree
    assert bt.harvest(bended, data, where=tree["relu"], out=tmp_path / "op", progress=False)


@pytest.mark.parametrize("features", [3, 4, 7])
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [("mean", lambda v: v.mean(0)), ("max", lambda v: v.amax(0)), ("last", lambda v: v[-1])],
)
def test_reductions_know_where_the_samples_are(
    tmp_path: Path, features: int, name: str, by_hand: Any
) -> None:
    value = torch.randn(5, 4, features)  # (time, samples, features)

    def doubled(x: Tensor) -> Tensor:
        return torch.relu(x)

    found = go(tmp_path / "a", doubled, [value], reduce=name, batch_axis=1)
    assert torch.equal(found["relu"].tensor(), by_hand(torch.relu(value)))
    first = go(tmp_path / "b", doubled, [value.transpose(0, 1)], reduce=name)
    assert torch.equal(first["relu"].tensor(), by_hand(torch.relu(value)))
    channels = go(tmp_path / "c", doubled, [value.permute(1, 2, 0)], reduce=name, feature_axis=1)
    assert torch.equal(channels["relu"].tensor(), by_hand(torch.relu(value)))
    whole = go(tmp_path / "d", doubled, [value], reduce=name, batch_axis=None)
    assert torch.equal(whole["relu"][0], by_hand(by_hand(torch.relu(value)))) or name == "mean"


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.ones(4, 3, 7), {"reduce": "mean", "feature_axis": 4}, "feature_axis=4"),
        (torch.ones(4, 3, 7).long(), {"reduce": "mean"}, "the mean of torch.int64"),
        (torch.ones(4, 0, 7), {"reduce": "mean"}, "an axis is empty"),
        (torch.ones(4, 0, 7), {"reduce": "last"}, "an axis is empty"),
    ],
)
def test_what_cannot_be_reduced_is_refused(
    tmp_path: Path, value: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        go(tmp_path, torch.relu, [value], **options)


def test_an_outcome_of_another_kind_is_refused(tmp_path: Path) -> None:
    data = [torch.full((1, 2), value) for value in (-1.0, 1.0, 1.0)]
    found = bt.harvest(Either(), data, where=(), out=tmp_path, progress=False)
    assert len(found.took("x.sum() > 0", True)) == 2
    for wrong in (0, "yes"):
        with pytest.raises(InputError, match="none has the type"):
            found.took("x.sum() > 0", wrong)  # type: ignore[arg-type]
