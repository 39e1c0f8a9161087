"""Linear probes, against plain training loops, scikit-learn and numpy."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.research.evaluation import AnalyserEvaluation
from bendtrace.research.probes import LinearProbe
from tests.promise import state
from tests.shares import some

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Plain(nn.Module):
    """Two layers with a dropout and an op in place between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.relu_()
        return self.second(self.drop(self.norm(x)))


class Deciding(nn.Module):
    """A branch and a loop on the values, both over the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.rare = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        while x.norm() > 4:
            x = self.again(x) * 0.5
        if x.mean() > 0:
            x = self.rare(x)
        return x


MODELS: list[type[nn.Module]] = [Plain, Deciding]


def made(cls: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return cls()


def batches(number: int = 8, size: int = 12, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(number):
        x = torch.randn(size, 5, generator=generator) * (1 + i % 4) + (i % 3 - 1)
        found.append((x, torch.randint(classes, (size,), generator=generator)))
    return found


class ByHand:
    """Probes as one writes them: hooks, a layer and an optimizer each, a loop."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        outputs: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        seed: int = 0,
    ) -> None:
        self.seen: dict[str, list[Tensor]] = {name: [] for name in names}
        self.layers: dict[str, nn.Linear] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.outputs, self.optimizer, self.loss, self.seed = outputs, optimizer, loss, seed
        self.handles = [
            model.get_submodule(name).register_forward_hook(self._hook(name)) for name in names
        ]

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen[name].append(output.detach().clone())

        return hook

    def step(self, targets: Tensor) -> dict[str, float]:
        losses = {}
        for name, seen in self.seen.items():
            if not seen:
                continue
            features = torch.cat([value.flatten(1) for value in seen]).float()
            if name not in self.layers:
                kept = torch.get_rng_state()
                torch.manual_seed(self.seed)
                self.layers[name] = nn.Linear(features.shape[1], self.outputs)
                torch.set_rng_state(kept)
                self.optimizers[name] = self.optimizer(self.layers[name].parameters())
            labels = torch.cat([targets] * len(seen))
            losses[name] = self._one(self.layers[name], self.optimizers[name], features, labels)
            seen.clear()
        return losses

    def _one(
        self, layer: nn.Linear, optimizer: torch.optim.Optimizer, features: Tensor, labels: Tensor
    ) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(layer(features), labels)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            return optimizer.step(closure).item()
        loss = closure()
        optimizer.step()
        return loss.item()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def names_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def features_of(model: nn.Module, name: str, inputs: list[Tensor]) -> list[list[Tensor]]:
    """Return what a module gives, call of the model by call."""
    found: list[list[Tensor]] = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: found[-1].append(output.detach().clone())
    )
    for x in inputs:
        found.append([])
        model(x)
    handle.remove()
    return found


# Training


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("optimizer", [SGD, ADAM, torch.optim.LBFGS, torch.optim.Adagrad])
@pytest.mark.parametrize(
    "without", some([torch.enable_grad, torch.no_grad, torch.inference_mode], 3)
)
def test_probes_are_bit_by_bit_those_of_a_plain_loop(
    cls: type[nn.Module], optimizer: Any, without: Any
) -> None:
    model, twin = made(cls), made(cls)
    by_hand = ByHand(twin, names_of(twin), 3, optimizer, seed=7)
    torch.manual_seed(2)
    with without():
        expected_outputs = []
        expected_losses = []
        for x, y in batches():
            expected_outputs.append(twin(x))
            with torch.inference_mode(False), torch.enable_grad():
                copies = {n: [v.clone() for v in seen] for n, seen in by_hand.seen.items()}
                by_hand.seen = copies
                expected_losses.append(by_hand.step(y))
    by_hand.close()
    numbers, expected_state = torch.get_rng_state(), state(twin)

    bended, probe = bt.BendedModule(model), LinearProbe(3, optimizer, seed=7)
    torch.manual_seed(2)
    outputs, losses = [], []
    with bended.interject(nn.Linear, probe), without():
        for x, y in batches():
            probe.targets = y
            outputs.append(bended(x))
            losses.append({path: loss.item() for path, loss in probe.train_step().items()})
    assert all(
        torch.equal(one, other) for one, other in zip(outputs, expected_outputs, strict=True)
    )
    assert losses == expected_losses
    assert torch.equal(torch.get_rng_state(), numbers)
    assert state(model) == expected_state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(probe.probes) == list(by_hand.layers)
    for path, layer in by_hand.layers.items():
        assert torch.equal(probe.probes[path].weight, layer.weight)
        assert torch.equal(probe.probes[path].bias, layer.bias)
        assert probe.probes[path].weight.grad is None
    steps = {path: row["steps"] for path, row in probe.to_dict().items()}
    assert steps == {path: sum(path in step for step in losses) for path in steps}
    assert bended.insertions == ()


def test_a_loader_may_use_its_memory_again_before_the_step() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Linear(3, 4)))
    losses = []
    for again in (False, True):
        probe, x, y = LinearProbe(3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
        with bended.interject("0", probe), torch.no_grad():
            for number in range(3):
                x, y = (x, y) if again else (x.clone(), y.clone())
                probe.targets = y.fill_(number)
                bended(x.fill_(number))
        losses.append(probe.train_step()["sub_0"])
    assert torch.equal(losses[0], losses[1])


def test_the_model_is_trained_as_without_probes() -> None:
    model, twin = made(Plain), made(Plain)
    bended, probe = bt.BendedModule(model), LinearProbe(3, ADAM)
    handle = bended.interject(nn.Linear, probe)
    for one in (twin, bended):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
        for x, y in batches():
            probe.targets = y
            optimizer.zero_grad()
            F.cross_entropy(one(x), y).backward()
            if one is bended:
                probe.train_step()
            optimizer.step()
    handle.remove()
    assert state(model) == state(twin)
    assert sum(row["steps"] for row in probe.to_dict().values()) == 2 * len(batches())


def test_several_calls_before_a_step_are_one_batch() -> None:
    model = made(Plain).eval()
    bended, probe = bt.BendedModule(model), LinearProbe(3, SGD)
    two = batches()[:2]
    with bended.interject("second", probe):
        for x, y in two:
            probe.targets = y
            bended(x)
        (loss,) = probe.train_step().values()
        assert probe.train_step() == {}
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    optimizer = SGD(layer.parameters())
    features = torch.cat([model(x).detach() for x, _ in two])
    by_hand = F.cross_entropy(layer(features), torch.cat([y for _, y in two]))
    by_hand.backward()
    optimizer.step()
    assert torch.equal(loss, by_hand.detach())
    assert torch.equal(probe.probes["second"].weight, layer.weight)


def test_features_are_those_of_the_moment_not_what_is_written_over_them() -> None:
    """`relu_` writes over what `first` gave, after the probe has seen it."""
    model, twin = made(Plain), made(Plain)
    bended, probe = bt.BendedModule(model), LinearProbe(3, SGD)
    x, y = batches()[0]
    probe.targets = y
    with bended.interject("first", probe):
        for _ in range(2):
            bended(x)
            probe.train_step()
    by_hand = ByHand(twin, ["first"], 3, SGD)
    for _ in range(2):
        twin(x)
        by_hand.step(y)
    assert torch.equal(probe.probes["first"].weight, by_hand.layers["first"].weight)


def test_what_waits_can_be_discarded_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = LinearProbe(3, SGD)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    probe.update("x", x, y)
    weight = probe.probes["x"].weight.clone()
    probe.discard()
    assert probe.train_step() == {}
    assert torch.equal(probe.probes["x"].weight, weight)
    monkeypatch.setattr("bendtrace.research.probes._MOST_WAITING", 3)
    for _ in range(3):
        probe.update("x", x, y)
    with pytest.raises(InputError, match=r"3 batches are pending: call train_step\(\)"):
        probe.update("x", x, y)
    assert list(probe.train_step()) == ["x"]


def test_a_disabled_probe_sees_nothing() -> None:
    model = made(Plain)
    bended, probe = bt.BendedModule(model), LinearProbe(3, SGD)
    probe.enabled = False
    with bended.interject(nn.Linear, probe):
        bended(batches()[0][0])  # there are no targets, and none are missed
        assert probe.train_step() == {}
    assert probe.probes == {}
    assert probe.to_dict() == {}


@pytest.mark.parametrize("bias", [True, False])
def test_probes_begin_as_layers_of_torch_do(bias: bool) -> None:
    probe = LinearProbe(4, SGD, bias=bias, seed=3)
    numbers = torch.get_rng_state()
    with torch.device("meta"):
        pass
    probe.update("x", torch.zeros(2, 7), torch.tensor([0, 1]))
    assert torch.equal(torch.get_rng_state(), numbers)
    torch.manual_seed(3)
    layer = nn.Linear(7, 4, bias=bias)
    torch.set_rng_state(numbers)
    assert torch.equal(probe.probes["x"].weight, layer.weight)
    assert (probe.probes["x"].bias is None) == (layer.bias is None)
    assert not bias or torch.equal(probe.probes["x"].bias, layer.bias)


def test_each_probe_has_an_optimizer_of_its_own() -> None:
    made_for: list[list[nn.Parameter]] = []

    def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        made_for.append(list(parameters))
        return torch.optim.SGD(made_for[-1], lr=0.5)

    probe = LinearProbe(3, optimizer)
    y = torch.tensor([0, 1, 2, 0])
    for path in ("a", "b"):
        probe.update(path, torch.randn(4, 2), y)
    assert [len(group) for group in made_for] == [2, 2]
    assert set(probe.optimizers) == {"a", "b"}
    probe.optimizers["a"].param_groups[0]["lr"] = 0.0
    schedule = torch.optim.lr_scheduler.StepLR(probe.optimizers["b"], 1, gamma=0.1)
    before = {path: layer.weight.clone() for path, layer in probe.probes.items()}
    probe.train_step()
    assert torch.equal(probe.probes["a"].weight, before["a"])
    assert not torch.equal(probe.probes["b"].weight, before["b"])
    schedule.step()
    assert probe.optimizers["b"].param_groups[0]["lr"] == pytest.approx(0.05)


def test_autocast_around_does_not_reach_the_probe() -> None:
    model, x, y = made(Plain).eval(), *batches()[0]
    bended, probe = bt.BendedModule(model), LinearProbe(3, SGD)
    with bended.interject("second", probe), torch.autocast("cpu", torch.bfloat16):
        probe.targets = y
        features = bended(x).detach()
        assert features.dtype == torch.bfloat16
        probe.train_step()
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    optimizer = SGD(layer.parameters())
    F.cross_entropy(layer(features.float()), y).backward()
    optimizer.step()
    assert probe.probes["second"].weight.dtype == torch.float32
    assert torch.equal(probe.probes["second"].weight, layer.weight)


# Positions


@pytest.mark.parametrize("keep", [-1, 1])
def test_positions_have_targets_of_their_own(keep: int) -> None:
    torch.manual_seed(0)
    value = torch.randn(4, 6, 5)
    features = value if keep == -1 else value.transpose(1, 2)
    targets = torch.randint(3, features.shape[:2])
    targets[0, 2:] = -100
    probe = LinearProbe(3, SGD, keep=keep)
    torch.manual_seed(0)
    layer = nn.Linear(features.shape[-1], 3)
    optimizer = SGD(layer.parameters())
    for _ in range(3):
        probe.update("x", value, targets)
        probe.train_step()
        optimizer.zero_grad()
        F.cross_entropy(layer(features.flatten(0, 1)), targets.flatten()).backward()
        optimizer.step()
    assert torch.equal(probe.probes["x"].weight, layer.weight)
    probe.eval()
    probe.update("x", value, targets)
    found = probe.to_dict()["x"]
    counted = targets.flatten() != -100
    predicted = layer(features.flatten(0, 1)).argmax(1)[counted]
    assert found["samples"] == int(counted.sum())
    assert found["accuracy"] == (predicted == targets.flatten()[counted]).double().mean().item()
    loss = F.cross_entropy(layer(features.flatten(0, 1)), targets.flatten()).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    with pytest.raises(InputError, match="one for each position, or pool=True"):
        probe.update("x", value, targets[:, 0])


def test_the_mean_over_positions_is_one_sample() -> None:
    value, y = torch.randn(4, 3, 5, 6), torch.tensor([0, 1, 2, 0])
    for keep, features in ((1, value.mean((2, 3))), (-1, value.mean((1, 2)))):
        probe = LinearProbe(3, closed_form=True, keep=keep, pool=True)
        probe.update("x", value, y)
        probe.solve(alpha=0.5)
        ridge = sklearn.linear_model.Ridge(0.5)
        ridge.fit(features.double().numpy(), 2.0 * F.one_hot(y, 3).numpy() - 1)
        np.testing.assert_allclose(probe.probes["x"].weight.detach(), ridge.coef_, atol=1e-6)
    flat = LinearProbe(3, closed_form=True, keep=-1, pool=True)
    flat.update("x", value[:, :, 0, 0], y)
    assert flat._states["x"].sums.width == 6
    with pytest.raises(InputError, match="pool"):
        LinearProbe(3, pool=True)


def test_batches_without_anything_to_learn_make_no_step() -> None:
    probe = LinearProbe(3, SGD)
    probe.update("x", torch.randn(2, 4), torch.tensor([0, 1]))
    probe.train_step()
    before = probe.probes["x"].weight.clone()
    probe.update("x", torch.randn(2, 4), torch.tensor([-100, -100]))
    probe.update("x", torch.randn(0, 4), torch.zeros(0, dtype=torch.int64))
    assert probe.train_step() == {}
    assert torch.equal(probe.probes["x"].weight, before)
    assert probe.to_dict()["x"]["steps"] == 1
    values = LinearProbe(None, SGD)
    values.update("x", torch.randn(2, 4), torch.tensor([-100.0, -100.0]))
    assert list(values.train_step()) == ["x"]


# Scores


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.more
def test_scores_of_classes_are_those_of_scikit_learn(cls: type[nn.Module]) -> None:
    classes = 4
    data = batches(9, 10, classes)
    model = made(cls).eval()
    bended, probe = bt.BendedModule(model), LinearProbe(classes, ADAM, top_k=(1, 2, 4))
    with bended.interject(nn.Linear, probe), torch.no_grad():
        for x, y in data[:5]:
            probe.targets = y
            bended(x)
            probe.train_step()
        assert probe.eval() is probe
        assert not probe.training
        weights = {path: layer.weight.clone() for path, layer in probe.probes.items()}
        for x, y in data:
            probe.targets = y
            bended(x)
        assert probe.train_step() == {}
    found = probe.to_dict()
    for name in names_of(model):
        calls = features_of(model, name, [x for x, _ in data])
        if not any(calls):
            assert name not in found
            continue
        features = torch.cat([value for call in calls for value in call])
        y = torch.cat([t for call, (_, t) in zip(calls, data, strict=True) for _ in call]).numpy()
        assert torch.equal(probe.probes[name].weight, weights[name])
        with torch.no_grad():
            scores = probe.probes[name](features)
        predicted, row = scores.argmax(1).numpy(), found[name]
        labels = list(range(classes))
        assert row["samples"] == len(y)
        assert row["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y, predicted))
        chances = scores.double().softmax(1).numpy()
        assert row["loss"] == pytest.approx(sklearn.metrics.log_loss(y, chances, labels=labels))
        exact = F.cross_entropy(scores.double(), torch.from_numpy(y)).item()
        assert row["loss"] == pytest.approx(exact, rel=1e-7)
        for k in (1, 2):
            expected = sklearn.metrics.top_k_accuracy_score(y, scores.numpy(), k=k, labels=labels)
            assert row[f"top_{k}_accuracy"] == pytest.approx(expected)
        assert row["top_4_accuracy"] == 1
        recall = sklearn.metrics.recall_score(y, predicted, average=None, labels=labels)
        assert row["class_accuracy"] == pytest.approx(list(recall))
        assert row["class_samples"] == np.bincount(y, minlength=classes).tolist()
    assert set(found) <= set(names_of(model))
    table = probe.to_pandas()
    assert list(table.index) == list(found)
    assert list(table["accuracy"]) == [row["accuracy"] for row in found.values()]


@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_scores_of_values_are_those_of_scikit_learn(outputs: int | None) -> None:
    torch.manual_seed(0)
    probe = LinearProbe(optimizer=SGD)
    x = [torch.randn(7, 4) for _ in range(5)]
    shape = () if outputs is None else (outputs,)
    y = [torch.randn(7, *shape) + 100 for _ in range(5)]
    for features, targets in zip(x, y, strict=True):
        probe.update("x", features, targets)
        probe.train_step()
    probe.eval()
    for features, targets in zip(x, y, strict=True):
        probe.update("x", features, targets)
    found = probe.to_dict()["x"]
    with torch.no_grad():
        predicted = probe.probes["x"](torch.cat(x)).double()
    truth = torch.cat(y).double().reshape(35, -1)
    mse = sklearn.metrics.mean_squared_error(truth, predicted)
    r2 = sklearn.metrics.r2_score(truth, predicted, multioutput="raw_values")
    assert found["mse"] == pytest.approx(mse)
    assert found["loss"] == pytest.approx(mse, rel=1e-5)
    assert found["r2"] == pytest.approx(sklearn.metrics.r2_score(truth, predicted))
    assert found["output_r2"] == pytest.approx(list(r2))
    assert found["samples"] == 35


def test_constant_targets_are_scored_as_scikit_learn_scores_them() -> None:
    probe = LinearProbe(optimizer=SGD)
    probe.update("x", torch.zeros(2, 3), torch.tensor([1.0, 2.0]))
    with torch.no_grad():
        probe.probes["x"].weight.zero_()
        probe.probes["x"].bias.fill_(3.0)
    probe.eval()
    probe.update("x", torch.randn(1, 3), torch.tensor([3.0]))
    assert math.isnan(probe.to_dict()["x"]["r2"])
    probe.update("x", torch.randn(3, 3), torch.full((3,), 3.0))
    assert probe.to_dict()["x"]["r2"] == sklearn.metrics.r2_score([3, 3, 3, 3], [3, 3, 3, 3]) == 1
    probe.reset()
    probe.update("x", torch.randn(3, 3), torch.full((3,), 2.0))
    assert probe.to_dict()["x"]["r2"] == sklearn.metrics.r2_score([2, 2, 2], [3, 3, 3]) == 0


def test_scores_are_always_those_of_the_probe_as_it_is() -> None:
    probe = LinearProbe(2, SGD)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    probe.eval()
    probe.update("x", x, y)
    assert probe.to_dict()["x"]["samples"] == 6
    probe.train()
    probe.update("x", x, y)
    assert probe.to_dict()["x"]["samples"] == 6
    probe.train_step()
    assert probe.to_dict()["x"]["samples"] == 0
    assert math.isnan(probe.to_dict()["x"]["accuracy"])
    probe.eval()
    probe.update("x", x, y)
    weight = probe.probes["x"].weight.clone()
    probe.reset()
    assert probe.to_dict()["x"]["samples"] == 0
    assert torch.equal(probe.probes["x"].weight, weight)
    probe.restart()
    assert probe.probes == {}


def test_a_criterion_of_ones_own_is_trained_and_scored_with() -> None:
    torch.manual_seed(0)
    x = [torch.randn(6, 3), torch.randn(4, 3)]
    y = [torch.rand(6, 2).round(), torch.rand(4, 2).round()]
    criterion = nn.BCEWithLogitsLoss()
    probe = LinearProbe(optimizer=SGD, criterion=criterion)
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = SGD(layer.parameters())
    for features, targets in zip(x, y, strict=True):
        probe.update("x", features, targets)
        probe.train_step()
        optimizer.zero_grad()
        criterion(layer(features), targets).backward()
        optimizer.step()
    assert torch.equal(probe.probes["x"].weight, layer.weight)
    probe.eval()
    for features, targets in zip(x, y, strict=True):
        probe.update("x", features, targets)
    expected = criterion(layer(torch.cat(x)), torch.cat(y)).item()
    assert probe.to_dict()["x"]["loss"] == pytest.approx(expected)

    hinge = LinearProbe(3, SGD, criterion=F.multi_margin_loss)
    hinge.update("x", x[0], torch.tensor([0, 1, 2, -100, 1, 0]))
    kept = torch.tensor([0, 1, 2, 4, 5])
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    expected_loss = F.multi_margin_loss(layer(x[0])[kept], torch.tensor([0, 1, 2, 1, 0]))
    assert torch.equal(hinge.train_step()["x"], expected_loss.detach())


# Closed form


@pytest.mark.parametrize("alpha", [0.0, 1.0, 30])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [None, 2])
def test_solved_probes_are_those_of_scikit_learn_and_numpy(
    alpha: float, bias: bool, outputs: int | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 5) * torch.tensor([1, 10, 0.1, 1, 1]) + 20
    shape = (60,) if outputs is None else (60, outputs)
    y = torch.randn(shape) - 5
    probe = LinearProbe(closed_form=True, bias=bias)
    for features, targets in zip(x.split(13), y.split(13), strict=True):
        probe.update("x", features, targets)
    probe.solve(alpha)
    if alpha:
        reference = sklearn.linear_model.Ridge(alpha, fit_intercept=bias, solver="svd")
    else:
        reference = sklearn.linear_model.LinearRegression(fit_intercept=bias)
    reference.fit(x.double().numpy(), y.double().numpy())
    layer = probe.probes["x"]
    weight = np.atleast_2d(reference.coef_)
    np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=1e-7, atol=1e-9)
    if bias:
        shift = np.atleast_1d(reference.intercept_)
        np.testing.assert_allclose(layer.bias.detach().numpy(), shift, rtol=1e-7)
    else:
        assert layer.bias is None
    if not alpha:
        dense = x.double().numpy()
        dense = np.concatenate([dense, np.ones((60, 1))], 1) if bias else dense
        solution = np.linalg.lstsq(dense, y.double().numpy().reshape(60, -1), rcond=None)[0]
        np.testing.assert_allclose(layer.weight.detach().numpy(), solution[:5].T, rtol=1e-6)
    probe.eval()
    probe.update("x", x, y)
    predicted = reference.predict(x.double().numpy())
    expected = sklearn.metrics.r2_score(y.double(), predicted)
    assert probe.to_dict()["x"]["r2"] == pytest.approx(expected, abs=1e-9)
    assert "steps" not in probe.to_dict()["x"]


def test_without_a_penalty_features_that_depend_on_others_get_the_smallest_weights() -> None:
    torch.manual_seed(0)
    base = torch.randn(40, 3, dtype=torch.float64)
    x = torch.cat([base, base[:, :1] - 2 * base[:, 1:2], torch.zeros(40, 1)], 1)
    y = torch.randn(40, dtype=torch.float64)
    probe = LinearProbe(closed_form=True)
    probe.update("x", x, y)
    probe.solve(0)
    reference = sklearn.linear_model.LinearRegression().fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(
        probe.probes["x"].weight.detach().numpy()[0], reference.coef_, atol=1e-8
    )
    few = LinearProbe(closed_form=True, bias=False)
    few.update("x", x[:2], y[:2])
    few.solve(0)
    solution = np.linalg.lstsq(x[:2].numpy(), y[:2].numpy(), rcond=None)[0]
    np.testing.assert_allclose(few.probes["x"].weight.detach().numpy()[0], solution, atol=1e-8)


def test_a_penalty_too_small_to_tell_is_none() -> None:
    torch.manual_seed(0)
    base = torch.randn(40, 3, dtype=torch.float64)
    x, y = torch.cat([base, base], 1), torch.randn(40, dtype=torch.float64)
    probe = LinearProbe(closed_form=True)
    probe.update("x", x, y)
    weights = []
    for alpha in (0.0, 1e-300, 1e-12):
        probe.solve(alpha)
        weights.append(probe.probes["x"].weight.detach().numpy()[0])
    reference = sklearn.linear_model.LinearRegression().fit(x.numpy(), y.numpy())
    for weight in weights:
        np.testing.assert_allclose(weight, reference.coef_, atol=1e-9)


@pytest.mark.parametrize("cls", MODELS)
def test_classes_are_solved_as_scikit_learn_s_ridge_classifier_does(cls: type[nn.Module]) -> None:
    model = made(cls).eval()
    bended, probe = bt.BendedModule(model), LinearProbe(3, closed_form=True)
    data = batches(9)
    with bended.interject(nn.Linear, probe):
        for x, y in data:
            probe.targets = torch.where(torch.arange(len(y)) == 3, -100, y)
            bended(x)
        probe.eval()
        with pytest.raises(InputError, match="not solved yet"):
            bended(data[0][0])
        probe.train()
        probe.solve(alpha=2.0)
        probe.eval()
        for x, y in data:
            probe.targets = y
            bended(x)
    for name, layer in probe.probes.items():
        calls = features_of(model, name, [x for x, _ in data])
        features = torch.cat([value for call in calls for value in call]).double().numpy()
        targets = [t for call, (_, t) in zip(calls, data, strict=True) for _ in call]
        kept = np.concatenate([np.arange(len(t)) != 3 for t in targets])
        truth = torch.cat(targets).numpy()
        reference = sklearn.linear_model.RidgeClassifier(alpha=2.0)
        reference.fit(features[kept], truth[kept])
        np.testing.assert_allclose(layer.weight.detach(), reference.coef_, rtol=1e-6, atol=1e-9)
        accuracy = sklearn.metrics.accuracy_score(truth, reference.predict(features))
        assert probe.to_dict()[name]["accuracy"] == pytest.approx(accuracy)


@given(st.integers(0, 2**16), st.lists(st.integers(0, 20), max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_sums_can_be_cut_and_merged_anyhow(seed: int, cuts: list[int], is_class: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 3, generator=generator)
    y = torch.randint(3, (20,), generator=generator)
    targets = y if is_class else y * 1.5
    classes = 3 if is_class else None
    whole = LinearProbe(classes, closed_form=True)
    whole.update("x", x, targets)
    whole.solve(0.1)
    merged = LinearProbe(classes, closed_form=True)
    ends = sorted({0, 20, *cuts})
    for first, last in itertools.pairwise(ends):
        part = LinearProbe(classes, closed_form=True)
        part.update("x", x[first:last], targets[first:last])
        merged.merge(part)
    merged.solve(0.1)
    for name in ("weight", "bias"):
        one, other = getattr(whole.probes["x"], name), getattr(merged.probes["x"], name)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    merged.eval()
    shards = []
    for first, last in itertools.pairwise(ends):
        shards.append(copy.deepcopy(merged))
        shards[-1].update("x", x[first:last], targets[first:last])
    for shard in shards[1:]:
        shards[0].merge(shard)
    whole.eval()
    whole.update("x", x, targets)
    found, expected = shards[0].to_dict()["x"], whole.to_dict()["x"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, nan_ok=True), name
    assert shards[0]._states["x"].sums.count == 20


def test_probes_that_are_not_the_same_are_not_merged() -> None:
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    one, other = LinearProbe(2, SGD), LinearProbe(2, SGD)
    for probe in (one, other):
        probe.update("x", x, y)
        probe.train_step()
        probe.eval()
        probe.update("x", x, y)
    one.merge(other)
    assert one.to_dict()["x"]["samples"] == 16
    other.train()
    other.update("x", x, y)
    other.train_step()
    before = one.to_dict()
    with pytest.raises(InputError, match="at 'x': the probes have different maps"):
        one.merge(other)
    assert one.to_dict() == before
    with pytest.raises(InputError, match="seed"):
        one.merge(LinearProbe(2, SGD, seed=1))
    with pytest.raises(InputError, match="optimizer"):
        one.merge(LinearProbe(2, functools.partial(torch.optim.SGD, lr=0.2)))

    sums = [LinearProbe(2, closed_form=True) for _ in range(2)]
    for probe in sums:
        probe.update("x", x, y)
    sums[0].solve()
    with pytest.raises(InputError, match="the other has none"):
        sums[0].merge(sums[1])
    sums[1].update("x", x, y)
    with torch.no_grad():
        sums[1]._states["x"].linear = copy.deepcopy(sums[0].probes["x"])
    with pytest.raises(InputError, match="different sums"):
        sums[0].merge(sums[1])


def test_what_waits_elsewhere_waits_here_once_merged() -> None:
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    one, other, whole = (LinearProbe(2, SGD) for _ in range(3))
    one.update("x", x[:5], y[:5])
    other.update("x", x[5:], y[5:])
    other.update("y", x, y)
    for part in (slice(5), slice(5, 8)):
        whole.update("x", x[part], y[part])
    one.merge(other)
    losses = one.train_step()
    assert torch.equal(losses["x"], whole.train_step()["x"])
    assert torch.equal(one.probes["x"].weight, whole.probes["x"].weight)
    assert list(losses) == list(other.probes) == ["x", "y"]


# Saving


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_a_probe_goes_on_where_it_was_saved(optimizer: Any) -> None:
    data = batches()
    model = made(Deciding)

    def trained(probe: LinearProbe, part: list[tuple[Tensor, Tensor]]) -> None:
        bended = bt.BendedModule(model)
        with bended.interject(nn.Linear, probe):
            for x, y in part:
                probe.targets = y
                bended(x)
                probe.train_step()

    whole, first = LinearProbe(3, optimizer), LinearProbe(3, optimizer)
    trained(whole, data)
    trained(first, data[:4])
    first.eval()
    first.update("first", torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    first.train()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = LinearProbe(3, optimizer)
    loaded.load_state_dict(torch.load(file))
    assert repr(loaded.to_dict()) == repr(first.to_dict())
    copied, pickled = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    for probe in (loaded, copied, pickled, first):
        trained(probe, data[4:])
        assert list(probe.probes) == list(whole.probes)
        for path, layer in whole.probes.items():
            assert torch.equal(probe.probes[path].weight, layer.weight)
            assert torch.equal(probe.probes[path].bias, layer.bias)
    with pytest.raises(InputError, match="num_classes"):
        LinearProbe(4, optimizer).load_state_dict(first.state_dict())
    solved = LinearProbe(3, closed_form=True)
    solved.update("x", *(torch.randn(9, 2), torch.arange(9) % 3))
    solved.solve()
    loaded = LinearProbe(3, closed_form=True)
    loaded.load_state_dict(solved.state_dict())
    assert torch.equal(loaded.probes["x"].weight, solved.probes["x"].weight)
    solved.solve(3.0)
    loaded.solve(3.0)
    assert torch.equal(loaded.probes["x"].weight, solved.probes["x"].weight)


# With the rest


def test_an_evaluation_scores_probes_and_puts_them_back() -> None:
    model, data = made(Plain), batches()
    bended, probe = bt.BendedModule(model), LinearProbe(3, SGD)
    evaluation = AnalyserEvaluation(nn.Linear, probe, loader=data[4:])
    with bended.interject(nn.Linear, probe):
        for x, y in data[:4]:
            probe.targets = y
            bended(x)
            probe.train_step()
    weights = {path: layer.weight.clone() for path, layer in probe.probes.items()}
    found = evaluation.evaluate(bended).results
    assert probe.training
    assert set(found) == {"first", "second"}
    twin = copy.deepcopy(model).eval()
    for path, row in found.items():
        calls = features_of(twin, path, [x for x, _ in data[4:]])
        features = torch.cat([value for call in calls for value in call])
        right = probe.probes[path](features).argmax(1) == torch.cat([y for _, y in data[4:]])
        assert row["accuracy"] == right.double().mean().item()
        assert torch.equal(probe.probes[path].weight, weights[path])


@pytest.mark.more
def test_each_token_of_a_language_model_can_be_probed() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(11, (3, 6))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    bended, probe = bt.BendedModule(model), LinearProbe(11, SGD, keep=-1)
    where = ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    with bended.interject(where, probe), torch.no_grad():
        for _ in range(3):
            probe.targets = targets
            bended(input_ids=ids)
            losses = probe.train_step()
    assert list(losses) == ["transformer.h_0.mlp", "transformer.h_1.mlp"]
    for name, path in zip(where, losses, strict=True):
        with torch.no_grad():
            handle_seen: list[Tensor] = []
            handle = model.get_submodule(name).register_forward_hook(
                lambda m, a, out, seen=handle_seen: seen.append(out)
            )
            model(input_ids=ids)
            handle.remove()
        torch.manual_seed(0)
        layer = nn.Linear(8, 11)
        optimizer = SGD(layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(layer(handle_seen[0].flatten(0, 1)), targets.flatten()).backward()
            optimizer.step()
        assert torch.equal(probe.probes[path].weight, layer.weight)


# What is refused


def test_targets_that_do_not_fit_are_refused_and_change_nothing() -> None:
    x = torch.randn(4, 3)
    for probe, targets, message in (
        (LinearProbe(3), None, "targets are needed"),
        (LinearProbe(3), torch.tensor([0, 1]), "there are 2 targets"),
        (LinearProbe(3), torch.tensor([0, 1, 2, 3]), "there is a target 3"),
        (LinearProbe(3), torch.tensor([0, -1, 2, 2]), "there is a target -1"),
        (LinearProbe(3), torch.rand(4), "do not pass num_classes"),
        (LinearProbe(3), torch.zeros(4, 1, dtype=torch.int64), "targets have shape"),
        (LinearProbe(), torch.rand(4, 2, 2), "targets have shape"),
        (LinearProbe(), torch.tensor([0, 1, math.nan, 2]), "not finite"),
    ):
        with pytest.raises(InputError, match=message):
            probe.update("x", x, targets)
        assert probe.probes == {}
        assert probe.calls == {}
        assert probe.train_step() == {}


def test_features_and_targets_of_other_sizes_than_before_are_refused() -> None:
    for closed_form in (False, True):
        probe = LinearProbe(closed_form=closed_form)
        probe.update("x", torch.randn(4, 3), torch.rand(4, 2))
        with pytest.raises(InputError, match="5 features, but 3 before"):
            probe.update("x", torch.randn(4, 5), torch.rand(4, 2))
        with pytest.raises(InputError, match="targets have 1 values, but 2 before"):
            probe.update("x", torch.randn(4, 3), torch.rand(4))
    big = LinearProbe(3, closed_form=True, max_features=10)
    with pytest.raises(InputError, match="11 features need"):
        big.update("x", torch.randn(1, 8), torch.tensor([0]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0}, {"num_classes": 2.0}, {"optimizer": 0.1}, {"criterion": "mse"},
        {"seed": None}, {"top_k": 3}, {"num_classes": 2, "top_k": (3,)}, {"keep": 0},
        {"max_features": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=list(wrong)[-1]):
        LinearProbe(**wrong)


def test_steps_and_solutions_are_not_mixed() -> None:
    with pytest.raises(InputError, match="closed_form=True"):
        LinearProbe(2).solve()
    with pytest.raises(InputError, match=r"call solve\(\)"):
        LinearProbe(2, closed_form=True).train_step()
    with pytest.raises(InputError, match="neither an optimizer"):
        LinearProbe(2, SGD, closed_form=True)
    probe = LinearProbe(2, closed_form=True)
    with pytest.raises(InputError, match="there is no data: run batches"):
        probe.solve()
    probe.update("x", torch.tensor([[math.nan, 1.0]]), torch.tensor([1]))
    with pytest.raises(InputError, match="at 'x': features or targets were not finite"):
        probe.solve()
    with pytest.raises(InputError, match="alpha"):
        probe.solve(-1)


def test_an_error_in_the_model_leaves_nothing_inserted_and_the_probe_usable() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.isnan().any():
                raise ZeroDivisionError
            return x

    torch.manual_seed(0)
    bended, probe = bt.BendedModule(Failing()), LinearProbe(3, SGD)
    x, y = batches()[0]
    probe.targets = y
    with pytest.raises(ZeroDivisionError), bended.interject("first", probe):
        bended(x * math.nan)
    assert bended.insertions == ()
    probe.discard()
    with bended.interject("first", probe):
        bended(x)
        (loss,) = probe.train_step().values()
    assert bool(loss.isfinite())
