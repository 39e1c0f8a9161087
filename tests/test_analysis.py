"""Analysers at the nodes of models, against what native hooks and numpy give."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.analysis import (
    Analyser,
    AnalyserList,
    Count,
    DeadReLU,
    FeatureStatistics,
    GradientAccumulation,
    PerClassAnalyser,
    PerClassVersusAnalyser,
    RunningCovariance,
    RunningHistogram,
    RunningMean,
    RunningMinMax,
    RunningQuantile,
    RunningTopK,
    RunningVariance,
)
from bendtrace.errors import InputError
from tests.promise import bits
from tests.test_analysis_streaming import assert_same, held, leaves

ANALYSERS: dict[str, Callable[[], Analyser]] = {
    "statistics": lambda: FeatureStatistics(higher=True),
    "dead": DeadReLU,
    "mean": RunningMean,
    "variance": RunningVariance,
    "covariance": RunningCovariance,
    "min and max": RunningMinMax,
    "quantile": RunningQuantile,
    "histogram": lambda: RunningHistogram(8, -2.0, 2.0),
    "top": lambda: RunningTopK(3),
    "per class": lambda: PerClassAnalyser(FeatureStatistics()),
    "per class, top": lambda: PerClassAnalyser(RunningTopK(2)),
    "versus": lambda: PerClassVersusAnalyser(RunningVariance()),
    "list": lambda: AnalyserList([RunningMean(), DeadReLU(), PerClassAnalyser(RunningMean())]),
    "per class, list": lambda: PerClassAnalyser(AnalyserList([RunningMean(), RunningTopK(1)])),
}


class Net(nn.Module):
    """Convolution, dead channels, a branch and a loop on values, a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if x.amax() > 4.6:
            x = torch.tanh(x)
        rounds = 0
        while x.norm() > 12 and rounds < 3:
            x = x * 0.7
            rounds += 1
        values, _ = torch.max(x.flatten(2), dim=-1)
        return self.fc(self.drop(values))


def net() -> Net:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        model.norm.bias[1] = -50.0  # a dead channel
        model.norm.weight.copy_(torch.tensor([1.0, 1.0, 0.5, 2.0]))
    return model


def data(count: int = 9, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [5, 1, 4, 8, 2, 5, 7, 3, 6]
    return [
        (
            torch.randn(size, 1, 6, 6, generator=generator) * (1 + number % 3),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for number, size in enumerate(sizes[:count])
    ]


def by_hand(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, list[Any]]:
    """Return what ops gave, by patching the functions that the model's code calls."""
    found: dict[str, list[Any]] = {"relu": [], "tanh": [], "conv": []}
    relu, tanh = F.relu, torch.tanh

    def noted(name: str, function: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            out = function(x)
            found[name].append(out.detach().clone())
            return out

        return call

    hook = model.conv.register_forward_hook(
        lambda module, args, out: found["conv"].append(out.detach().clone())
    )
    F.relu, torch.tanh = noted("relu", relu), noted("tanh", tanh)
    try:
        for x, _ in batches:
            model(x)
    finally:
        F.relu, torch.tanh = relu, tanh
        hook.remove()
    return found


def flat(values: list[Tensor]) -> np.ndarray[Any, Any]:
    """Return all values of each channel, (n, channels), float64."""
    return np.concatenate([v.double().numpy().transpose(0, 2, 3, 1).reshape(-1, 4) for v in values])


@pytest.mark.parametrize("train", [True, False])
def test_statistics_at_nodes_are_those_of_all_values_at_once(train: bool) -> None:
    model = net().train(train)
    expected = by_hand(copy.deepcopy(model), data())
    bended = bt.BendedModule(model)
    statistics = FeatureStatistics(higher=True)
    with bended.interject(re.compile("relu|tanh|conv$"), statistics):
        for x, _ in data():
            bended(x)
    assert 0 < len(expected["tanh"]) < 9  # some batches do not come by
    for path in ("relu", "tanh", "conv"):
        found, values = statistics.results[path], flat(expected[path])
        assert found["count"] == len(values)
        assert statistics.calls[path] == len(expected[path])
        np.testing.assert_allclose(found["mean"], values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found["var"], values.var(0, ddof=1), rtol=1e-12)
        np.testing.assert_allclose(found["std"], values.std(0, ddof=1), rtol=1e-12)
        np.testing.assert_array_equal(found["min"], values.min(0))
        np.testing.assert_array_equal(found["max"], values.max(0))
        np.testing.assert_array_equal(found["sparsity"], (values == 0).mean(0))
        assert found["nonfinite"].tolist() == [0] * 4
        away = values - values.mean(0)
        spread = np.where(values.std(0) > 0, values.std(0), np.nan)
        np.testing.assert_allclose(found["skew"], (away**3).mean(0) / spread**3, rtol=1e-9)
        np.testing.assert_allclose(found["kurtosis"], (away**4).mean(0) / spread**4 - 3, rtol=1e-9)
    assert bended.stats.replays > 0


@pytest.mark.parametrize("name", ANALYSERS)
def test_the_model_is_untouched_and_nothing_stays_inserted(name: str) -> None:
    watched, plain = net(), net()
    bended, analyser = bt.BendedModule(watched), ANALYSERS[name]()
    torch.manual_seed(7)
    outputs = []
    with bended.interject(re.compile("relu|tanh|fc$"), analyser):
        for x, y in data():
            with analyser.batch(y):
                outputs.append(bended(x))
                outputs[-1].sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for (x, _), output in zip(data(), outputs, strict=True):
        expected = plain(x)
        expected.sum().backward()
        assert torch.equal(expected, output)
    assert torch.equal(state, torch.get_rng_state())
    assert bits(watched.state_dict()) == bits(plain.state_dict())
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert bended.insertions == ()
    assert analyser.targets is None


@pytest.mark.parametrize("name", ANALYSERS)
def test_a_disabled_analyser_sees_keeps_and_changes_nothing(name: str) -> None:
    bended, analyser = bt.BendedModule(net()), ANALYSERS[name]()
    batches = data()
    with bended.interject("relu", analyser):
        analyser.enabled = False
        for x, y in batches[:3]:
            analyser.targets = y
            bended(x)
        assert analyser.results == {}
        assert analyser.calls == {}
        analyser.enabled = True
        for x, y in batches[3:6]:
            analyser.targets = y
            bended(x)
        before = bits(analyser.state_dict())
        analyser.enabled = False
        for x, y in batches[6:]:
            analyser.targets = y
            bended(x)
        assert bits(analyser.state_dict()) == before
        analyser.update("relu", "not even a tensor")
        assert bits(analyser.state_dict()) == before
    assert analyser.calls == {"relu": 3}


@pytest.mark.parametrize("name", ANALYSERS)
def test_reset_forgets_everything_but_the_settings(name: str) -> None:
    analyser, fresh = ANALYSERS[name](), ANALYSERS[name]()
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    analyser.update("a", x + 100, y)
    analyser.reset()
    assert (analyser.results, analyser.calls, analyser.nbytes) == ({}, {}, 0)
    analyser.update("a", x, y)
    fresh.update("a", x, y)
    assert_same(analyser.results, fresh.results)


@pytest.mark.parametrize("name", ANALYSERS)
def test_workers_are_merged_into_what_one_would_have_seen(name: str) -> None:
    whole, parts = ANALYSERS[name](), [ANALYSERS[name]() for _ in range(3)]
    seen = 0
    for number, (x, y) in enumerate(data()):
        value, samples = x.flatten(1)[:, :4], torch.arange(seen, seen + len(x))
        seen += len(x)
        for analyser in (whole, pickle.loads(pickle.dumps(parts[number % 3]))):
            key = "a" if number < 6 else "b"
            analyser.update(key, value, y, samples)
            if analyser is not whole:
                parts[number % 3] = analyser
    for order in (parts, parts[::-1]):
        made = ANALYSERS[name]()
        others = bits([part.state_dict() for part in order])
        for part in order:
            made.merge(part)
        assert made.calls == whole.calls
        assert made.results.keys() == whole.results.keys()
        for path, found in whole.results.items():
            for a, b in zip(leaves(found), leaves(made.results[path]), strict=True):
                if a.is_floating_point():
                    torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, equal_nan=True)
                else:
                    assert torch.equal(a, b)
        lone = ANALYSERS[name]()
        lone.merge(order[0])
        for key in ("a", "b"):  # of which the others must not hear
            made.update(key, value, y, samples)
            lone.update(key, value, y, samples)
        assert bits([part.state_dict() for part in order]) == others


@pytest.mark.parametrize("name", ANALYSERS)
def test_saved_states_are_read_again_with_weights_only(name: str) -> None:
    analyser, loaded = ANALYSERS[name](), ANALYSERS[name]()
    for x, y in data(4):
        analyser.update("a", x.flatten(1)[:, :4], y)
    file = io.BytesIO()
    torch.save(analyser.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(analyser)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 2])
    for each in (analyser, loaded, copied):
        each.update("a", x, y)
        each.update("b", x, y)
    assert_same(loaded.results, analyser.results)
    assert_same(copied.results, analyser.results)
    assert loaded.calls == analyser.calls


@pytest.mark.parametrize("name", ANALYSERS)
def test_memory_does_not_grow_with_the_number_of_batches(name: str) -> None:
    analyser, sizes = ANALYSERS[name](), []
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    for _ in range(60):
        analyser.update("a", torch.randn(6, 4), y)
        sizes.append(sum(leaf.numel() for leaf in held(analyser.state_dict())))
    if name != "quantile":  # which is exact so far; its bound has a test of its own
        assert len(set(sizes[2:])) == 1


@pytest.mark.parametrize("name", ANALYSERS)
def test_tables_have_a_row_for_each_node_and_class(name: str) -> None:
    analyser = ANALYSERS[name]()
    for key in ("a", "b"):
        analyser.update(key, torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    if name == "list":
        with pytest.raises(InputError, match="different levels"):
            analyser.to_pandas()
        return
    table = analyser.to_pandas()
    assert tuple(table.index.names) == analyser.levels
    per_node = {1: 1, 2: 3, 3: 6}[len(analyser.levels)]
    assert len(table) == 2 * per_node
    assert not any(isinstance(cell, Tensor) for cell in table.to_numpy().flatten())
    assert repr(analyser.to_dict())  # plain: no tensor is left in it
    assert "tensor" not in repr(analyser.to_dict())


def test_a_table_per_unit_has_numbers_alone() -> None:
    statistics = FeatureStatistics()
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    statistics.update("fc", values)
    table = statistics.to_pandas(per_unit=True)
    assert list(table.index) == [("fc", 0), ("fc", 1)]
    assert table.loc[("fc", 0), "mean"] == 2.0
    assert table["count"].tolist() == [2, 2]
    covariance = RunningCovariance()
    covariance.update("fc", values)
    with pytest.raises(InputError, match="different shapes"):
        covariance.to_pandas(per_unit=True)
    assert RunningMean().to_pandas().empty


# Kinds of values


@pytest.mark.parametrize(
    ("keep", "shape"), [(1, (3,)), (-1, (5,)), ((1, 3), (3, 5)), ("units", (3, 4, 5)), ((), ())]
)
def test_which_dimensions_have_results_of_their_own(keep: Any, shape: tuple[int, ...]) -> None:
    value = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    mean = RunningMean(keep=keep)
    mean.update("a", value)
    axes = {1: (0, 2, 3), -1: (0, 1, 2), (1, 3): (0, 2), "units": (0,), (): (0, 1, 2, 3)}[keep]
    assert mean.results["a"]["mean"].shape == shape
    np.testing.assert_allclose(mean.results["a"]["mean"], value.numpy().mean(axes), rtol=1e-12)


@pytest.mark.parametrize("keep", [0, (0, 1), (1, 1), "all", 1.0, None, True])
def test_dimensions_that_cannot_be_kept_are_refused_at_once(keep: Any) -> None:
    with pytest.raises(InputError, match="keep="):
        FeatureStatistics(keep=keep)


def test_a_dimension_that_a_value_lacks_is_an_error_with_the_node() -> None:
    with pytest.raises(
        bt.errors.InputError, match=r"RunningMean at 'fc': keep=3 does not fit .*\(2, 3\)"
    ):
        RunningMean(keep=3).update("fc", torch.ones(2, 3))
    with pytest.raises(InputError, match="does not fit"):
        RunningMean(keep=-2).update("fc", torch.ones(2, 3))


def test_values_of_one_and_no_dimension_have_one_result() -> None:
    mean = RunningMean()
    mean.update("loss", torch.tensor(2.0))
    mean.update("loss", torch.tensor(4.0))
    mean.update("flat", torch.tensor([1.0, 2.0, 6.0]))
    mean.update("number", 3)
    mean.update("truth", True)
    assert mean.to_dict() == {
        "loss": {"count": 2, "mean": 3.0},
        "flat": {"count": 3, "mean": 3.0},
        "number": {"count": 1, "mean": 3.0},
        "truth": {"count": 1, "mean": 1.0},
    }


def test_units_that_change_in_number_are_an_error_with_the_node() -> None:
    bended, mean = bt.BendedModule(lambda x: torch.relu(x)), RunningMean()
    with bended.interject("relu", mean, allow_none=True):
        bended(torch.ones(2, 3))
        before = mean.to_dict()
        with pytest.raises(InputError, match=r"at 'relu': .*\(3,\) so far, but .*\(4,\)"):
            bended(torch.ones(2, 4))
    assert mean.to_dict() == before


@pytest.mark.parametrize("name", ANALYSERS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint16, torch.bool],
)
def test_any_real_dtype_is_taken(name: str, dtype: torch.dtype) -> None:
    value, y = (torch.randn(6, 4) * 2).abs().to(dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    analyser, exact = ANALYSERS[name](), ANALYSERS[name]()
    analyser.update("a", value, y)
    exact.update("a", value.double(), y)
    for a, b in zip(leaves(analyser.results), leaves(exact.results), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("name", ANALYSERS)
def test_empty_batches_and_batches_of_one_are_taken(name: str) -> None:
    analyser = ANALYSERS[name]()
    empty, none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    analyser.update("a", empty, none)
    analyser.to_dict()
    value, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
    for row, label in zip(value.split(1), y.split(1), strict=True):
        analyser.update("a", row, label)
        analyser.update("a", empty, none)
    whole = ANALYSERS[name]()
    whole.update("a", value, y)
    for a, b in zip(leaves(analyser.results), leaves(whole.results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13, equal_nan=True)
    assert analyser.calls == {"a": 7}


def test_broken_values_are_counted_and_stay_in_their_unit() -> None:
    statistics = FeatureStatistics()
    value = torch.tensor([[1.0, math.nan, math.inf], [2.0, 1.0, 1.0], [3.0, 2.0, -math.inf]])
    for row in value.split(1):
        statistics.update("a", row)
    found = statistics.to_dict()["a"]
    assert found["nonfinite"] == [0, 1, 2]
    assert found["mean"][0] == 2.0
    assert math.isnan(found["mean"][1])
    assert math.isnan(found["mean"][2])
    assert found["max"][2] == math.inf


def test_tuples_and_dicts_are_taken_apart_under_paths_that_can_be_inserted_at() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 3, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            out, _ = self.lstm(x)
            values, indices = torch.max(out, dim=-1)
            return {"values": values, "more": (indices, None, "text")}

    bended, mean = bt.BendedModule(Parts()), RunningMean(keep=-1)
    x = torch.randn(4, 5, 2)
    _, (_, cell) = bended.lstm(x)
    with bended.interject(["lstm", "max", ""], mean, allow_none=True):
        bended(x)
    assert set(mean.results) == {
        "lstm.output|sub_0", "lstm.output|sub_1.sub_0", "lstm.output|sub_1.sub_1",
        "max|values", "max|indices", "output|values", "output|more.sub_0",
    }  # fmt: skip
    torch.testing.assert_close(
        mean.results["lstm.output|sub_1.sub_1"]["mean"], cell.double().mean((0, 1)).detach()
    )
    for path in mean.results:
        found = RunningMean(keep=-1)
        with bended.interject(path, found):
            bended(x)
        assert_same(found.results, {path: mean.results[path]})


@pytest.mark.parametrize("keys", [("my key", "my_key"), (1, "1"), ("_a", "a")])
def test_parts_with_the_same_path_are_refused_instead_of_taken_together(keys: Any) -> None:
    mean = RunningMean()
    with pytest.raises(InputError, match=r"two parts of the dict that 'block' returned"):
        mean.update("block", {keys[0]: torch.zeros(2, 3), keys[1]: torch.ones(2, 3)})
    assert mean.results == {}


def test_what_no_analyser_can_look_at_is_refused_with_the_node() -> None:
    mean = RunningMean()
    with pytest.raises(InputError, match="'name' returned a str"):
        mean.update("name", "text")
    with pytest.raises(InputError, match="'pair' returned a tuple"):
        mean.update("pair", ("a", object()))
    with pytest.raises(InputError, match="'fft' returned complex numbers"):
        mean.update("fft", torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match="'adj' returned a tensor of layout"):
        mean.update("adj", torch.eye(2).to_sparse())
    with pytest.raises(InputError, match="'large' returned uint64"):
        mean.update("large", torch.ones(2, 2, dtype=torch.uint64))
    mean.update("nothing", None)
    mean.update("nothing", ())
    assert mean.results == {}


def test_a_distributed_tensor_is_seen_as_a_whole() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        value = torch.randn(4, 3)
        mesh = init_device_mesh("cpu", (1,))
        analyser, plain = FeatureStatistics(), FeatureStatistics()
        analyser.update("a", distribute_tensor(value, mesh, [Shard(0)]))
        plain.update("a", value)
    finally:
        torch.distributed.destroy_process_group()
    assert_same(analyser.results, plain.results)
    assert {type(leaf) for leaf in leaves(analyser.results)} == {Tensor}


# Modes of running


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "autocast"])
@pytest.mark.parametrize("name", ["statistics", "covariance", "top", "quantile", "histogram"])
def test_results_are_the_same_in_every_mode(name: str, mode: str) -> None:
    contexts: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    analyser, expected = ANALYSERS[name](), ANALYSERS[name]()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    bended = bt.BendedModule(model)
    xs = [torch.randn(5, 3) for _ in range(4)]
    with contexts[mode](), bended.interject("1", analyser):
        values = [bended(x) for x in xs]
    for value in values:
        expected.update("sub_1", value.detach().clone())
    analyser.update("sub_1", torch.ones(1, 4))  # outside, where inference tensors cannot be changed
    expected.update("sub_1", torch.ones(1, 4))
    assert_same(analyser.results, expected.results)
    assert not any(leaf.requires_grad or leaf.is_inference() for leaf in leaves(analyser.results))


class Trains(RunningMean):
    """Takes gradients with the values, as probes do."""

    def update_state(self, state: Any, value: Tensor, batch: bt.analysis.Batch) -> None:
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        with torch.enable_grad():
            weight = torch.ones(value.shape[-1], requires_grad=True)
            (value * weight).sum().backward()
        assert weight.grad is not None
        super().update_state(state, value * weight.grad, batch)


def test_an_analyser_can_train_something_also_in_inference_mode() -> None:
    bended, trains = bt.BendedModule(nn.ReLU()), Trains()
    with torch.inference_mode(), bended.interject("relu", trains, allow_none=True):
        bended(torch.tensor([[1.0], [2.0]]))
    assert trains.to_dict() == {"relu": {"count": 2, "mean": [4.5]}}


def test_passes_are_taken_together_or_kept_apart() -> None:
    def halved(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = torch.div(x, 2)
        return x

    bended = bt.BendedModule(halved)
    together, apart = RunningMean(), RunningMean(per_pass=True)
    with bended.interject("div", AnalyserList([together, apart]), allow_none=True):
        for value in (4.0, 0.5, 2.0):
            bended(torch.tensor([value]))
    assert together.to_dict() == {"div": {"count": 3, "mean": pytest.approx(4 / 3)}}
    assert apart.to_dict() == {
        "div:1": {"count": 2, "mean": 1.5},
        "div:2": {"count": 1, "mean": 1.0},
    }


def test_what_is_inserted_before_is_seen_and_the_graph_is_not_held() -> None:
    bended, mean = bt.BendedModule(lambda x: torch.relu(x)), RunningMean()
    bended(torch.ones(1))
    with bended.interject("relu", lambda value: value + 10), bended.interject("relu", mean):
        bended(torch.ones(2, 1, requires_grad=True))
    assert mean.to_dict() == {"relu": {"count": 2, "mean": [11.0]}}
    assert not any(leaf.requires_grad for leaf in held(mean.state_dict()))


def test_an_error_in_an_analyser_comes_out_and_leaves_the_model_as_it_was() -> None:
    bended = bt.BendedModule(net().eval())
    x, _ = data(1)[0]
    expected = bended(x)
    with (
        pytest.raises(InputError, match="targets are needed"),
        bended.interject("relu", PerClassAnalyser(RunningMean())),
    ):
        bended(x)
    assert bended.insertions == ()
    assert torch.equal(bended(x), expected)


# Dead units


def test_counts_of_dead_units_are_whole_numbers_that_never_go_negative() -> None:
    model = net().eval()
    expected = np.concatenate([v.numpy() for v in by_hand(model, data())["relu"]])
    bended, dead = bt.BendedModule(model), DeadReLU()
    each = DeadReLU(keep="units")
    counts = []
    with bended.interject("relu", AnalyserList([dead, each])):
        for x, _ in data():
            bended(x)
            counts.append(dead.results["relu"]["dead_count"])
            assert (dead.results["relu"]["active"] >= 0).all()
    assert counts == sorted(counts, reverse=True)  # it can only come to life
    assert min(counts) >= 1
    active = (expected > 0).sum((0, 2, 3))
    found = dead.results["relu"]
    assert found["active"].tolist() == active.tolist()
    assert found["active"].dtype == torch.int64
    assert found["dead"].tolist() == (active == 0).tolist()
    assert found["dead"][1]
    assert found["dead_share"] == found["dead_count"] / 4
    assert found["count"] == expected.size // 4
    assert each.results["relu"]["dead"].tolist() == ((expected > 0).sum(0) == 0).tolist()


def test_dead_has_a_threshold_and_takes_nan_for_broken_not_for_dead() -> None:
    value = torch.tensor([[0.05, 0.2, math.nan, -math.inf]])
    dead = DeadReLU(threshold=0.1)
    dead.update("gelu", value)
    assert dead.to_dict()["gelu"]["dead"] == [True, False, False, True]
    dead.update("never", torch.zeros(0, 2))
    assert dead.to_dict()["never"]["dead_count"] == 0
    with pytest.raises(InputError, match="threshold="):
        DeadReLU(threshold=math.nan)


# Gradients


def test_gradients_are_those_of_autograd_summed_in_float64() -> None:
    model, plain = net(), net()
    bended, gradients = bt.BendedModule(model), GradientAccumulation(keep="units")
    inputs = GradientAccumulation(of="input")
    torch.manual_seed(3)
    with bended.interject("conv", AnalyserList([gradients, inputs])):
        for x, y in data():
            F.cross_entropy(bended(x.requires_grad_()), y).backward()
    torch.manual_seed(3)
    caught: list[Tensor] = []

    def catch(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(caught.append)

    plain.conv.register_forward_hook(catch)
    given = []
    for x, y in data():
        F.cross_entropy(plain(x.requires_grad_()), y).backward()
        given.append(x.grad)
    grads = torch.cat(caught).double()
    found = gradients.results["conv"]
    norms = grads.flatten(1).norm(dim=1).numpy()
    assert found["count"] == len(grads)
    np.testing.assert_allclose(found["sum"], grads.sum(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found["mean_abs"], grads.abs().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["norm_mean"], norms.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["norm_std"], norms.std(ddof=1), rtol=1e-12)
    assert (found["norm_min"].item(), found["norm_max"].item()) == (norms.min(), norms.max())
    expected = torch.cat(given).double().sum((0, 2, 3))  # type: ignore[arg-type]
    torch.testing.assert_close(inputs.results["conv.input"]["sum"], expected, rtol=1e-6, atol=1e-9)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_gradients_per_class_are_those_of_the_samples_of_the_class() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return (torch.exp(x) * w).sum()

    bended = bt.BendedModule(run)
    for make in (PerClassAnalyser, PerClassVersusAnalyser):
        gradients = make(GradientAccumulation())
        w, y = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.tensor([1, 0, 1, 2])
        with bended.interject("exp", gradients, allow_none=True), gradients.batch(y):
            bended(torch.zeros(4, 1, requires_grad=True), w).backward()
        found = gradients.to_dict()["exp"]
        if make is PerClassAnalyser:
            assert {label: item["sum"] for label, item in found.items()} == {
                0: [2.0], 1: [5.0], 2: [8.0],
            }  # fmt: skip
        else:
            assert found[1]["class"]["sum"] == [5.0]
            assert found[1]["rest"]["sum"] == [10.0]
        for other in (pickle.loads(pickle.dumps(gradients)), copy.deepcopy(gradients)):
            assert repr(other.to_dict()) == repr(gradients.to_dict())


@pytest.mark.parametrize("listed", [False, True])
def test_gradients_need_the_targets_of_their_own_call(listed: bool) -> None:
    bended, gradients = bt.BendedModule(nn.Sequential(nn.Linear(3, 2))), GradientAccumulation()
    each = PerClassAnalyser(gradients)
    x = torch.randn(2, 3)
    what = AnalyserList([each, GradientAccumulation()]) if listed else each
    with bended.interject("0", what):
        for _ in range(2):  # recorded, and replayed
            each.targets = torch.tensor([0, 0])
            first = bended(x).sum()
            each.targets = torch.tensor([1, 1])
            second = bended(x).sum()
            with pytest.raises(InputError, match="not those that were set when the model was"):
                (first + second).backward()
        each.reset()
        each.targets = torch.tensor([0, 0])
        first = bended(x).sum()
        each.targets = torch.tensor([0, 0])
        first.backward()
        each.targets.fill_(0)
    assert each.to_dict()["sub_0"][0]["sum"] == [2.0, 2.0]


def test_a_run_without_gradients_gives_none() -> None:
    bended, gradients = bt.BendedModule(nn.Linear(2, 2)), GradientAccumulation()
    with bended.interject("", gradients, allow_none=True), torch.no_grad():
        bended(torch.ones(1, 2))
    assert gradients.results == {}
    gradients.enabled = False
    with bended.interject("", gradients, allow_none=True):
        bended(torch.ones(1, 2)).sum().backward()
    assert gradients.results == {}


# The largest


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("once", [True, False])
def test_the_top_samples_are_those_of_a_sort_over_everything(once: bool, largest: bool) -> None:
    model = net().eval()
    values = np.concatenate([v.numpy() for v in by_hand(model, data())["conv"]])
    values = np.round(values, 1)  # so that there are ties
    top = RunningTopK(5, once=once, largest=largest)
    start = 0
    for x, _ in data():
        top.update("conv", torch.from_numpy(values[start : start + len(x)]))
        start += len(x)
    found = top.results["conv"]
    sign = -1 if largest else 1
    for channel in range(4):
        cells = values[:, channel].reshape(len(values), -1)
        rows = [(v, s, p) for s, row in enumerate(cells) for p, v in enumerate(row)]
        rows.sort(key=lambda row: (sign * row[0], row[1], row[2]))
        if once:
            rows = list({s: (v, s, p) for v, s, p in reversed(rows)}.values())
            rows.sort(key=lambda row: (sign * row[0], row[1], row[2]))
        got = [found[name][:, channel].tolist() for name in ("values", "samples", "positions")]
        assert list(zip(*got, strict=True)) == [(float(v), s, p) for v, s, p in rows[:5]]
    assert found["count"] == len(values)


def test_top_samples_of_a_node_that_is_skipped_have_the_numbers_that_were_set() -> None:
    bended, top = bt.BendedModule(lambda x: torch.relu(x) if x.sum() > 0 else x), RunningTopK(2)
    bended(torch.ones(2, 1))
    with bended.interject("relu", top):
        for start, value in ((0, -1.0), (2, 5.0), (4, 7.0)):
            with top.batch(samples=[start, start + 1]):
                bended(torch.full((2, 1), value))
    assert top.to_dict()["relu"]["samples"] == [[4], [5]]
    assert top.calls == {"relu": 2}
    with pytest.raises(InputError, match="3 sample numbers"):
        top.update("relu", torch.ones(2, 1), samples=[1, 2, 3])


def test_top_samples_of_a_class_are_counted_over_all_classes() -> None:
    top = PerClassAnalyser(RunningTopK(1))
    top.update("fc", torch.tensor([[1.0], [2.0]]), [0, 1])
    top.update("fc", torch.tensor([[9.0], [8.0], [7.0]]), [1, 1, 0])
    found = top.to_dict()["fc"]
    assert (found[0]["samples"], found[1]["samples"]) == ([[4]], [[2]])


def test_samples_go_on_being_counted_after_a_merge() -> None:
    one, other = PerClassAnalyser(RunningTopK(1)), PerClassAnalyser(RunningTopK(1))
    for analyser in (one, other):
        analyser.update("fc", torch.tensor([[1.0], [2.0]]), [0, 1])
    one.merge(other)
    one.update("fc", torch.tensor([[9.0]]), [0])
    assert one.to_dict()["fc"][0]["samples"] == [[4]]


def test_a_sample_that_is_nan_throughout_is_left_out_of_the_top() -> None:
    top = RunningTopK(2)
    nan = math.nan
    top.update("a", torch.tensor([[[nan, nan]], [[nan, -math.inf]], [[1.0, nan]]]))
    found = top.to_dict()["a"]
    assert found["values"] == [[1.0], [-math.inf]]
    assert found["samples"] == [[2], [1]]
    assert found["positions"] == [[0], [1]]


# Classes


def test_each_class_has_what_the_analyser_says_of_its_samples_alone() -> None:
    model = net().eval()
    values = torch.cat(by_hand(model, data())["relu"])
    labels = torch.cat([y for _, y in data()])
    bended = bt.BendedModule(model)
    analyser = PerClassVersusAnalyser(FeatureStatistics())
    plain = PerClassAnalyser(FeatureStatistics())
    with bended.interject("relu", AnalyserList({"v": analyser, "p": plain})) as handle:
        for x, y in data():
            handle.what.targets = y
            bended(x)
    assert list(plain.results["relu"]) == [0, 1, 2]
    for label in range(3):
        for side, chosen in (("class", labels == label), ("rest", labels != label)):
            rows = flat([values[chosen]])
            found = analyser.results["relu"][label][side]
            assert found["count"] == len(rows)
            np.testing.assert_allclose(found["mean"], rows.mean(0), rtol=1e-12)
            np.testing.assert_allclose(found["var"], rows.var(0, ddof=1), rtol=1e-11)
            np.testing.assert_array_equal(found["max"], rows.max(0))
        assert_same(plain.results["relu"][label], analyser.results["relu"][label]["class"])
    assert plain.to_pandas().loc[("relu", 2), "count"] == plain.results["relu"][2]["count"]


def test_missing_and_wrong_targets_say_what_to_set() -> None:
    analyser = PerClassAnalyser(RunningMean())
    value = torch.ones(3, 2)
    with pytest.raises(
        bt.errors.InputError, match=r"at 'fc': targets are needed: set `analyser.targets`"
    ):
        analyser.update("fc", value)
    with pytest.raises(bt.errors.InputError, match=r"2 targets, but the value has shape \(3, 2\)"):
        analyser.update("fc", value, [0, 1])
    with pytest.raises(InputError, match="have to be integer targets"):
        analyser.update("fc", value, [0.5, 1.0, 2.0])
    with pytest.raises(InputError, match="have to be integer targets"):
        analyser.update("fc", value, [[0], [1], [2]])
    with pytest.raises(InputError, match="targets="):
        analyser.targets = object()
    with pytest.raises(InputError, match="one number"):
        analyser.targets = 3
    with pytest.raises(InputError, match="samples="):
        analyser.samples = [0.5]
    assert analyser.results == {}
    analyser.update("fc", value, torch.tensor([True, False, True]))
    assert list(analyser.results["fc"]) == [0, 1]


def test_a_value_that_does_not_fit_changes_no_class() -> None:
    analyser = PerClassAnalyser(RunningMean())
    analyser.update("fc", torch.ones(2, 2), [1, 2])
    before = analyser.to_dict()
    with pytest.raises(InputError, match="so far"):
        analyser.update("fc", torch.ones(2, 3), [0, 1])
    assert analyser.to_dict() == before


def test_classes_of_classes_and_lists_of_lists() -> None:
    twice = PerClassAnalyser(PerClassAnalyser(RunningMean()))
    twice.update("a", torch.tensor([[1.0], [2.0]]), [0, 1])
    assert twice.to_dict()["a"][1][1]["mean"] == [2.0]
    assert list(twice.to_pandas().index) == [("a", 0, 0), ("a", 1, 1)]
    inner = AnalyserList([RunningMean(), RunningMean(keep=())])
    outer = AnalyserList({"inner": inner, "other": RunningMinMax()})
    outer.update("a", torch.tensor([[1.0, 3.0]]))
    assert outer.to_dict()["a"]["inner"]["RunningMean_1"] == {"count": 2, "mean": 2.0}
    other = pickle.loads(pickle.dumps(outer))
    other.merge(outer)
    assert other.to_dict()["a"]["inner"]["RunningMean_1"] == {"count": 4, "mean": 2.0}
    outer.load_state_dict(other.state_dict())
    assert outer.to_dict() == other.to_dict()


class Rows(Analyser):
    """Counts rows."""

    def start(self, key: str) -> Any:
        return Count()

    def update_state(self, state: Any, value: Tensor, batch: bt.analysis.Batch) -> None:
        state.update(value)

    def result(self, state: Any) -> dict[Any, Any]:
        return {"rows": state.result()}


class Peeks(Rows):
    """Looks at something else than the node's output."""

    wants_inputs = True

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        self.update(at.path, inputs[0])


def test_an_analyser_of_one_s_own_works_in_all_wrappers() -> None:
    assert not Rows.self_contained  # which cannot be promised for what others write
    analyser = PerClassVersusAnalyser(AnalyserList([Rows(), RunningMean()]))
    assert not analyser.self_contained
    assert PerClassAnalyser(RunningMean()).self_contained
    analyser.update("a", torch.ones(3, 2), [0, 0, 1])
    assert analyser.to_dict()["a"][1]["rest"]["Rows"] == {"rows": 2}
    bended, peeks = bt.BendedModule(lambda x: torch.relu(x)), AnalyserList([Peeks()])
    with bended.interject("relu", peeks, allow_none=True):
        bended(torch.ones(3, 2))
    assert peeks.to_dict() == {"relu": {"Peeks": {"rows": 3}}}
    with pytest.raises(InputError, match="overrides `after` or `backward`"):
        PerClassAnalyser(Peeks())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerClassAnalyser(RunningMean), "is needed"),
        (
            lambda: PerClassAnalyser(AnalyserList([RunningMean(), GradientAccumulation()])),
            "different",
        ),
        (
            lambda: PerClassAnalyser(AnalyserList([RunningMean(per_pass=True), DeadReLU()])),
            "different",
        ),
        (lambda: AnalyserList([RunningMean(), 3]), "which is not an analyser"),
        (lambda: AnalyserList([RunningMean()] * 2), "twice"),
        (lambda: AnalyserList([RunningMean()])["DeadReLU"], "no analyser 'DeadReLU'"),
        (lambda: GradientAccumulation(of="weight"), "of='weight'"),
        (lambda: RunningVariance(correction=-1), "correction="),
        (lambda: RunningHistogram(3), "low= and high="),
        (lambda: RunningHistogram([0.0, 1.0], 0.0), "bins: do not pass"),
        (lambda: RunningQuantile([2.0]), "ranks have to be"),
        (lambda: RunningTopK(0), "k= has"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make()


# Merging what does not belong together


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (RunningMean(), RunningVariance(), "a RunningVariance cannot be merged into a RunningMean"),
        (RunningMean(), RunningMean(keep=-1), "keep=1, the other has -1"),
        (RunningMean(), RunningMean(per_pass=True), "per_pass=False, the other has True"),
        (RunningHistogram([0.0, 1.0]), RunningHistogram([0.0, 2.0]), "edges="),
        (PerClassAnalyser(RunningMean()), PerClassAnalyser(RunningMean(keep=2)), "analyser="),
        (PerClassAnalyser(RunningMean()), PerClassVersusAnalyser(RunningMean()), "cannot be"),
        (AnalyserList([RunningMean()]), AnalyserList([DeadReLU()]), "analysers="),
        (DeadReLU(), DeadReLU(threshold=0.5), "threshold=0.0, the other has 0.5"),
    ],
)
def test_others_are_not_merged_nor_loaded(one: Analyser, other: Analyser, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        one.merge(other)
    with pytest.raises(InputError):
        one.load_state_dict(other.state_dict())


def test_a_merge_that_fails_at_one_node_changes_none() -> None:
    one, other = RunningMean(), RunningMean()
    one.update("a", torch.ones(1, 2))
    one.update("b", torch.ones(1, 2))
    other.update("a", torch.zeros(1, 2))
    other.update("b", torch.zeros(1, 3))
    before = bits(one.state_dict())
    with pytest.raises(InputError, match="RunningMean at 'b': the shape of the units"):
        one.merge(other)
    assert bits(one.state_dict()) == before
    dead = DeadReLU()
    dead.update("a", torch.ones(1, 2))
    both, others = AnalyserList([dead, one]), AnalyserList([copy.deepcopy(dead), other])
    with pytest.raises(InputError):
        both.merge(others)
    assert bits(one.state_dict()) == before
    assert dead.results["a"]["count"] == 1


def test_reprs_say_what_was_seen() -> None:
    mean = RunningMean(keep=-1)
    assert repr(mean) == "<RunningMean(keep=-1): nothing seen>"
    assert repr(RunningMean(per_pass=True)) == "<RunningMean(per_pass=True): nothing seen>"
    mean.update("fc", torch.ones(1, 2))
    mean.update("fc", torch.ones(1, 2))
    mean.enabled = False
    assert repr(mean) == "<RunningMean(keep=-1): disabled; seen 'fc' 2x>"
    assert "PerClassAnalyser" in repr(PerClassAnalyser(GradientAccumulation()))
    assert repr(AnalyserList([mean])).count("RunningMean") == 2


def test_an_analyser_in_a_model_is_copied_and_pickled_with_it() -> None:
    bended = bt.BendedModule(nn.ReLU())
    bended.interject("relu", RunningMean(), allow_none=True)
    bended(torch.ones(2, 3))
    other = copy.deepcopy(bended)
    other(torch.zeros(2, 3))
    assert bended.insertions[0].what.calls == {"relu": 1}
    assert other.insertions[0].what.calls == {"relu": 2}
    assert other.insertions[0].what.to_dict()["relu"]["mean"] == [0.5] * 3


ROOT = Path(__file__).parent.parent


@pytest.mark.all
def test_nothing_optional_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, bendtrace.analysis\n"
        "names = {'pandas', 'lightning', 'transformers', 'datasketches', 'scipy', 'sklearn'}\n"
        "print(sorted(names & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == "[]"
