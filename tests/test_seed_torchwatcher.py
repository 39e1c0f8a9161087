"""The examples of TorchWatcher's document run as they stand there; it has no line of imports.

Its headings on how to insert have no examples of their own; those of its package's README are used.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace import node_selector
from bendtrace.compat import torchwatcher
from bendtrace.compat.torchwatcher import (
    ForwardInterjection,
    WrappedForwardBackwardInterjection,
    WrappedForwardInterjection,
    interject_by_match,
    interject_by_module_class,
    interject_by_module_class_native,
    interject_by_name,
)
from bendtrace.errors import NodePathError
from bendtrace.rewriting import replace_module, replace_module_native
from tests import seeds
from tests.promise import bits, state


class MyForwardInterjection(ForwardInterjection):
    def process(self, name: str, module: nn.Module | None, inputs):
        print(name, inputs.shape)


class MyWrappedFwd(WrappedForwardInterjection):
    def process(self, name, module, inputs, outputs):
        print(name)


class MyWrappedFwdBwd(WrappedForwardBackwardInterjection):
    def process(self, name, module, inputs, outputs):
        print(name)

    def process_backward(self, name, module, grad_input, grad_output):
        print(name)


class Chain(nn.Module):
    """The compute graph of the document."""

    def forward(self, x: Tensor) -> Tensor:
        node_1 = torch.sin(x)
        node_2 = torch.relu(node_1)
        node_3 = node_2.exp()
        return node_3


def test_the_document_runs_with_its_names_from_here(tmp_path: Path, capsys: Any) -> None:
    shown = []
    for number, code in enumerate(seeds.indented("torchwatcher")):
        names: dict[str, Any] = {"nn": nn}
        line = "from bendtrace.compat.torchwatcher import *\n"
        seeds.run(line + code, names, tmp_path / f"example{number}.py")
        watched = interject_by_name(Chain(), "relu", names["my_interjection"])
        x = torch.ones(2, 3, requires_grad=True)
        shown.append(printed(capsys, lambda: watched(x).sum().backward()))  # noqa: B023
    assert shown == [["relu torch.Size([2, 3])"], ["relu"], ["relu", "relu"]]
    for name in ("Forward", "WrappedForward", "WrappedForwardBackward"):  # as it spells them out
        assert f"`torchwatcher.interjection.{name}Interjection`" in seeds.text("torchwatcher")
        assert issubclass(getattr(torchwatcher.interjection, f"{name}Interjection"), nn.Module)


def printed(capsys: pytest.CaptureFixture[str], call: Any) -> list[str]:
    capsys.readouterr()
    call()
    return capsys.readouterr().out.splitlines()


def test_a_forward_interjection_is_inserted_after_a_node(capsys: Any) -> None:
    my_interjection = MyForwardInterjection()
    watched = interject_by_name(Chain(), "relu", my_interjection)
    for _ in range(2):
        shown = printed(capsys, lambda: watched(torch.ones(2, 3)))
        assert shown == ["relu torch.Size([2, 3])"]


def test_what_it_returns_is_passed_along() -> None:
    class Halved(ForwardInterjection):
        def process(self, name: str, module: nn.Module | None, inputs):
            return inputs / 2

    x = torch.linspace(0, 1, 3)
    watched = interject_by_name(Chain(), "relu", Halved())
    for _ in range(2):
        assert torch.equal(watched(x), (x.sin().relu() / 2).exp())


def test_a_wrapped_interjection_sees_input_and_output(capsys: Any) -> None:
    my_interjection = MyWrappedFwd()
    watched = interject_by_name(Chain(), "relu", my_interjection)
    for _ in range(2):
        assert printed(capsys, lambda: watched(torch.ones(2))) == ["relu"]

    class Difference(WrappedForwardInterjection):
        def process(self, name, module, inputs, outputs):
            return outputs - inputs

    x = torch.linspace(-1, 1, 3)
    watched = interject_by_name(Chain(), "relu", Difference())
    for _ in range(2):
        assert torch.equal(watched(x), (x.sin().relu() - x.sin()).exp())


class InPlace(nn.Module):
    """A module that works in place, and a loop over functions of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fc(x))
        for _ in range(2):
            x = F.relu(x - 0.1)
        return x


class Scaled(WrappedForwardInterjection):
    """Has a parameter and a mode of its own, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout()
        self.given: dict[str, Any] = {}

    def process(self, name: str, module: Any, inputs: Any, outputs: Any) -> Tensor:
        self.given[name] = inputs, outputs
        return outputs * self.factor


def test_inputs_of_modules_that_work_in_place_are_those_before() -> None:
    model, x = InPlace(), torch.randn(4, 3)
    scaled = Scaled()
    watched = interject_by_name(model, "relu", scaled)
    for _ in range(3):
        assert torch.equal(watched(x), model(x))
        before, after = scaled.given["relu"]
        assert torch.equal(before, model.fc(x))
        assert torch.equal(after, model.fc(x).relu())
        assert before.lt(0).any()


def test_a_round_of_a_loop_has_its_name_in_the_graph_and_labels_of_others_are_no_names() -> None:
    model, x = InPlace(), torch.randn(4, 3)
    value = model.fc(x).relu()
    for name in ("relu_1", "relu_2"):
        value = (value - 0.1).relu()
        scaled = Scaled()
        interject_by_name(model, name, scaled)(x)
        assert list(scaled.given) == [name]
        assert torch.equal(scaled.given[name][1], value)
    for label in ("relu_1_2", "relu_1:1", "linear_1_1", "relu.relu", "fc.linear"):
        with pytest.raises(NodePathError, match="no known node"):
            interject_by_name(model, label, Scaled())(x)


def test_an_interjection_belongs_to_the_watched_model() -> None:
    scaled = Scaled()
    watched = interject_by_name(InPlace(), "relu", scaled)
    assert any(one is scaled.factor for one in watched.parameters())
    assert len(watched.state_dict()) == 3
    watched.eval()
    assert not scaled.drop.training
    watched.train()
    assert scaled.drop.training
    watched.double()
    assert scaled.factor.dtype is torch.float64


def test_gradients_of_a_functional_call_are_captured(capsys: Any) -> None:
    my_interjection = MyWrappedFwdBwd()
    watched = interject_by_name(Chain(), "relu", my_interjection)
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        assert printed(capsys, lambda: watched(x).sum().backward()) == ["relu", "relu"]  # noqa: B023


class ResNet(nn.Module):
    """A network with modules, functions and in-place activations."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width, width, 3, padding=1)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.bn2 = nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            identity = x
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += identity
            return self.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(self.Block(4), self.Block(4))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = self.layer1(x)
        x = torch.relu(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return self.fc(x)


RELUS = [
    "relu",
    "layer1.0.relu",
    "layer1.0.relu_1",
    "layer1.1.relu",
    "layer1.1.relu_1",
    "relu_1",
]


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet()


class Names(WrappedForwardBackwardInterjection):
    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.names: list[str] = []
        self.backward_names: list[str] = []
        self.shapes: dict[str, Any] = {}

    def process(self, name, module, inputs, outputs):
        self.names.append(name)
        self.shapes[name] = inputs.shape, outputs.shape

    def process_backward(self, name, module, grad_input, grad_output):
        self.backward_names.append(name)
        assert (grad_input.shape, grad_output.shape) == self.shapes[name]


def test_inserting_by_matching_a_module_class() -> None:
    model, names = resnet(), Names()
    watched_model = interject_by_module_class(model, nn.Conv2d, names)
    convs = [
        "conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2",
    ]  # fmt: skip
    for _ in range(2):
        names.reset()
        r = watched_model(torch.zeros(1, 3, 8, 8, requires_grad=True))
        loss = F.cross_entropy(r, torch.tensor([0], dtype=torch.long))
        loss.backward()
        assert names.names == convs
        assert names.backward_names == convs[::-1]


def test_inserting_by_name() -> None:
    names = Names()
    watched_model = interject_by_name(resnet(), "layer1.0.conv1", names)
    for _ in range(2):
        watched_model(torch.zeros(1, 3, 8, 8))
    assert names.names == ["layer1.0.conv1"] * 2


def test_inserting_using_the_node_selector_api() -> None:
    names = Names()
    watched_model = interject_by_match(resnet(), node_selector.Activations.is_relu, names)
    for _ in range(2):
        names.reset()
        watched_model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert names.names == RELUS
        assert names.backward_names == RELUS[::-1]


def test_tracing_and_setting_custom_leaf_modules() -> None:
    names = Names()
    watched_model = interject_by_match(
        resnet(),
        node_selector.Activations.is_relu | node_selector.matches_module_class(ResNet.Block),
        names,
        tracer_kwargs={"leaf_modules": [ResNet.Block]},
    )
    watched_model(torch.randn(2, 3, 8, 8))
    assert names.names == ["relu", "layer1.0", "layer1.1", "relu_1"]


def test_an_interjected_model_is_the_model() -> None:
    model, plain = resnet(), resnet()
    before = state(model)
    watched = interject_by_match(model, node_selector.Activations.is_relu, Names())
    assert isinstance(watched, nn.Module)
    assert state(model) == before
    assert list(watched.state_dict()) == list(plain.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (watched, plain)]
    for step in range(6):
        for m in (watched, plain):
            m.train(step % 3 != 0)
        x = torch.randn(4, 3, 8, 8)
        losses = [F.cross_entropy(m(x), torch.tensor([0, 1, 2, 3])) for m in (watched, plain)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert bits(losses[0].detach()) == bits(losses[1].detach())
        assert state(model) == state(plain)
    assert isinstance(watched, bt.BendedModule)
    assert watched.stats.replays == 4


def test_native_interjections() -> None:
    model, names = resnet(), Names()
    watched = interject_by_module_class_native(model, ResNet.Block, names)
    watched(torch.randn(2, 3, 8, 8)).sum().backward()
    assert names.names == ["layer1.0", "layer1.1"]
    assert names.backward_names == ["layer1.1", "layer1.0"]
    assert not any(module._forward_hooks for module in model.modules())


def test_rewriting_the_graph() -> None:
    model = resnet()
    before = repr(model)
    make = functools.partial(nn.LeakyReLU, 0.1)
    for rewritten in (
        replace_module(model, node_selector.is_module & nn.ReLU, lambda relu: make()),
        replace_module_native(model, nn.ReLU, lambda relu: make()),
    ):
        assert sum(isinstance(module, nn.LeakyReLU) for module in rewritten.modules()) == 2
        assert not any(isinstance(module, nn.ReLU) for module in rewritten.modules())
        assert repr(model) == before
        assert rewritten(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class GradientIdentity(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x.requires_grad = True
        return x


def test_recording_input_gradients() -> None:
    """The example of the package that records what the network's input would have to be."""

    class GradTracker(WrappedForwardBackwardInterjection):
        def process_backward(self, name, module, grad_input, grad_output):
            self.name, self.grad = name, grad_output.detach()

    model, gt = resnet().eval(), GradTracker()
    model2 = interject_by_match(
        nn.Sequential(GradientIdentity(), model),
        node_selector.matches_module_class(GradientIdentity),
        gt,
    )
    for seed in range(3):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        model2(x.clone()).max(dim=1)[0].sum().backward()
        x.requires_grad = True
        wanted = torch.autograd.grad(model(x).max(dim=1)[0].sum(), x)[0]
        assert torch.equal(gt.grad, wanted)
        assert gt.name == "0"


def test_probes_have_the_names_and_losses_of_torchwatcher() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        model[0].bias += 2  # so that there are units alive
    probe = torchwatcher.LinearProbe(1, torch.optim.Adam, nn.BCEWithLogitsLoss())
    watched = interject_by_match(model, node_selector.Activations.is_relu, probe)
    x = torch.randn(10, 1)
    probe.targets = (x > 0).float()
    watched(x)
    assert list(probe.probes) == ["1_probe", "3_probe"]
    before = probe.probes["1_probe"].weight.detach().clone()
    for _ in range(3):  # the last calls are replays
        watched(x)
        probe.train_step()
    assert not torch.equal(probe.probes["1_probe"].weight, before)
    probe.eval()
    watched(x)
    watched(x)
    with torch.no_grad():
        predicted = probe.probes["1_probe"](model[:2](x))
    found = probe.to_dict()["1"]
    assert found["loss"] == pytest.approx(float(probe.criterion(predicted, probe.targets)))
    assert found["acc"] == pytest.approx(float(((predicted > 0) == (x > 0)).float().mean()))
    probe.reset()
    assert probe.to_dict() == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_of_a_probe_needs_targets_and_a_loss() -> None:
    probe = torchwatcher.LinearProbe(2)
    with pytest.raises(bt.errors.InputError, match="needs a criterion"):
        probe.train_step()
    probe.criterion = nn.CrossEntropyLoss()
    with pytest.raises(bt.errors.InputError, match="set the targets first"):
        probe.train_step()


def test_cross_covariances_do_not_depend_on_the_batches() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 3).double() + 5, torch.randn(20, 2).double()
    cross = torchwatcher.CrossCovariance()
    for one, other in zip(a.split((1, 12, 7)), b.split((1, 12, 7)), strict=True):
        cross.add(one, other)
    whole = torch.cat([a, b], 1).T
    torch.testing.assert_close(cross.covariance(), whole.cov()[:3, 3:])
    torch.testing.assert_close(cross.correlation(), whole.corrcoef()[:3, 3:])
    torch.testing.assert_close(torch.cat(cross.stdev()), whole.std(1))
    torch.testing.assert_close(torch.cat(cross.mean()), whole.mean(1))
    images = torchwatcher.CrossCovariance()
    images.add(a.view(5, 2, 2, 3).movedim(3, 1), b.view(5, 2, 2, 2).movedim(3, 1))
    torch.testing.assert_close(images.covariance(), cross.covariance())
    with pytest.raises(bt.errors.InputError, match="19 samples of one and 20 of the other"):
        cross.add(a[1:], b)


class TwiceActivated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        for _ in range(2):
            x = torch.relu(x - 1)
        return x


def test_analysers_have_the_names_of_interjections_and_strings_are_names() -> None:
    model, x = TwiceActivated(), torch.randn(3, 4)
    dead = bt.analysis.DeadReLU()
    watched = interject_by_match(model, node_selector.Activations.is_relu, dead)
    gradients = bt.analysis.GradientAccumulation()
    watched = interject_by_match(watched, node_selector.Activations.is_relu, gradients)
    for _ in range(2):
        watched(x).sum().backward()
    assert set(dead.to_dict()) == set(gradients.to_dict()) == {"features.1", "relu", "relu_1"}
    changed = interject_by_match(model, "relu_1", torch.ones_like)
    assert changed(x).eq(1).all()
    changed = interject_by_match(model, "relu", torch.ones_like)
    assert not changed(x).any()


class GradTracker(torchwatcher.Analyser[list[Tensor]]):
    """The own analyser of the package's example, which records gradients."""

    def __init__(self) -> None:
        super().__init__(gradient=True)

    def process_batch_state(self, name: str, state: Any, working_results: Any) -> Any:
        return [*(working_results or ()), state.output_gradients.detach()]

    def finalise_result(self, name: str, result: Any) -> Any:
        return torch.cat(result)


def test_own_analysers_get_the_gradients_of_their_call() -> None:
    tracker, model = GradTracker(), resnet().eval()
    relus = node_selector.Activations.is_relu
    watched = interject_by_match(model, relus, tracker)
    x = torch.randn(3, 3, 8, 8)
    first, second = watched(x).sum(), watched(x[:2] * 2).sum() * 3
    first.backward()
    second.backward()
    assert list(tracker.to_dict()) == RELUS[::-1]
    assert [len(one) for one in tracker.working_results["relu"]] == [3, 2]
    assert tracker.to_dict()["relu_1"].shape == (5, 4)
    tracker.reset()
    tracker.enabled = False
    watched(x).sum().backward()
    assert tracker.to_dict() == {}
    plain = torchwatcher.NameAnalyser()
    interject_by_name(model, "relu", plain)(x)
    assert plain.to_dict() == {"relu": "relu"}


@pytest.mark.parametrize("is_per_class", [False, True])
@pytest.mark.more
def test_what_waits_for_gradients_goes_with_its_graph(is_per_class: bool) -> None:
    tracker: Any = GradTracker()
    if is_per_class:
        tracker = torchwatcher.PerClassAnalyser(tracker)
        tracker.targets = torch.zeros(2)
    watched = interject_by_name(Chain(), "relu", tracker)

    def waiting() -> int:
        gc.collect()
        return sum(isinstance(one, torchwatcher.AnalyserState) for one in gc.get_objects())

    before = waiting()
    for goes_back in (True, False, True):
        out = watched(torch.ones(2, requires_grad=True)).sum()
        if goes_back:
            out.backward()
    assert waiting() > before
    del out
    assert waiting() == before


def test_own_analysers_ask_for_what_there_is() -> None:
    class Asks(torchwatcher.Analyser[Any]):
        def process_batch_state(self, name: str, state: Any, working_results: Any) -> Any:
            return state.targets, state.input_gradients

    watched = interject_by_name(Chain(), "relu", asks := Asks())
    with pytest.raises(torchwatcher.TargetException, match="set the targets first"):
        watched(torch.ones(2))
    asks.targets = torch.ones(2)
    with pytest.raises(torchwatcher.NoGradException, match="gradient=True"):
        watched(torch.ones(2))


def test_analysers_have_the_results_of_torchwatcher() -> None:
    tw = torchwatcher
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    several = tw.AnalyserList(
        tw.DeadReLU(), tw.FeatureStatistics(), tw.RankAnalyser(n=8),
        tw.PerClassAnalyser(tw.DeadReLU()),
        tw.GradientAccumulationAnalyser(), tw.CovarianceSpectrumStatisticsAnalyser(taps=3),
        tw.PerClassVersusAnalyser(GradTracker()),
    )  # fmt: skip
    weights = tw.LayerWeightRankAnalyser()
    watched = interject_by_match(model, node_selector.Activations.is_relu, several)
    watched = interject_by_match(watched, node_selector.is_linear, weights)
    x, several.targets = torch.randn(20, 1, 4, 4), torch.arange(20) % 2
    for part in (slice(0, 12), slice(12, 20)):
        several.targets = torch.arange(20)[part] % 2
        watched(x[part]).sum().backward()
    found, act = several.to_dict(), model[:2](x).detach()
    alive = sum((act[part].sum(0) > 0).float() for part in (slice(0, 12), slice(12, 20)))
    assert found["DeadReLU.1"] == {"dead_count": 16 - alive.sum(), "numel": 16, "sum": alive.sum()}
    assert found["PerClassDeadReLU.0"]["1"]["numel"] == 16
    statistics = found["FeatureStatistics.1"]
    torch.testing.assert_close(statistics["feature_activations_mean"], act.mean(0).double())
    torch.testing.assert_close(statistics["feature_activations_var"], act.var(0).double())
    shares = (act.flatten(1) != 0).double().mean(1)
    torch.testing.assert_close(statistics["channel_sparsity_var"], shares.var(0)[None])
    assert found["RankAnalyser.1"]["features_dim"] == 16
    assert found["RankAnalyser.1"]["normalized_features_rank"] <= 1
    spectrum = torch.linalg.svdvals(act.flatten(1).double().T.cov())
    shown = found["CovarianceSpectrumStatisticsAnalyser.1"]
    assert shown["max"] == pytest.approx(spectrum[0].item())
    assert shown["normalised_spectrum_1"] == pytest.approx(spectrum[16 // 3].item())
    assert set(found["GradientAccumulationAnalyser.1"]) == {"mean", "var"}
    classes = several.analysers[-1].to_dict()
    assert [len(classes[key]["1"]) for key in (0, "~0", 1, "~1")] == [10] * 4
    assert torch.equal(classes[0]["1"], classes["~1"]["1"])
    assert weights.to_dict() == {"3": 2}
    several.reset()
    several.enabled = False
    watched(x)
    assert not any(one.working_results for one in several.analysers)


def test_running_statistics_of_binary_rows() -> None:
    a, b = torch.rand(9, 3) > 0.5, torch.rand(9, 2) > 0.5
    same, cross, history = torchwatcher.IoU(), torchwatcher.CrossIoU(), torchwatcher.History()
    for part in (slice(0, 4), slice(4, 9)):
        same.add(a[part])
        cross.add(a[part], b[part])
        history.add(a[part])
    both, either = (a[:, :, None] & b[:, None]).sum(0), (a[:, :, None] | b[:, None]).sum(0)
    assert torch.equal(cross.intersection(), both.float())
    assert torch.equal(cross.union(), either.float())
    torch.testing.assert_close(cross.iou(), both / either.clamp(min=1))
    assert same.iou().diagonal().ge(0.99).logical_or(a.sum(0) == 0).all()
    assert same.size() == 9
    assert torch.equal(history.history(), a)
    assert torchwatcher.History().history() is None
    with pytest.raises(bt.errors.InputError, match="as many rows of both"):
        cross.add(a, b[1:])
    rows, covariance = torch.randn(30, 4), torchwatcher.Covariance()
    covariance.add(rows[:10])
    covariance.add(rows[10:])
    torch.testing.assert_close(covariance.correlation(), rows.double().T.corrcoef())
    torch.testing.assert_close(covariance.stdev(), rows.double().std(0))
    torch.testing.assert_close(covariance.mean(), rows.double().mean(0))


def test_an_evaluation_leaves_the_training_as_it_was() -> None:
    model, dead = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout()), torchwatcher.DeadReLU()
    watched = interject_by_match(model, node_selector.Activations.is_relu, dead)
    dead.enabled = False
    watched(torch.ones(4, 2)).sum().backward()
    gradients = [one.grad.clone() for one in model.parameters()]
    batches, seen = [(torch.ones(2, 2), 0), (torch.zeros(2, 2), 1)], []

    def backward(outputs: Tensor, batch: Any) -> Tensor:
        seen.append((batch[1], watched.training))
        return outputs.sum()

    evaluation = torchwatcher.AnalyserEvaluation(
        dead, batches, compute_gradients=True, backward=backward
    )
    for event in ("start", "batch", "end"):
        evaluation.record({"model": watched, "epoch": 1, "t": 4}, event=event, global_step=7)
    assert [(one["event"], one["epoch"], one["batch"]) for one in evaluation.records] == [
        ("start", 0, 0), ("batch", 2, 5), ("end", 2, None),
    ]  # fmt: skip
    assert evaluation.records[1]["result"]["1"]["numel"] == 3
    assert seen == [(0, False), (1, False)] * 3
    assert watched.training
    assert not dead.enabled
    assert all(map(torch.equal, gradients, [one.grad for one in model.parameters()]))
    with pytest.raises(bt.errors.InputError, match="compute_gradients"):
        torchwatcher.AnalyserEvaluation(dead, batches, backward=backward)


def test_selectors_select_nodes_of_torch_fx() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)))

    def names(selector: Any) -> list[str]:
        return [node.name for node in graph.graph.nodes if selector.fn((graph, node))]

    assert names(node_selector.nth(node_selector.is_module, -1)) == ["_2"]
    assert names(node_selector.Activations.is_relu | nn.Linear) == ["_0", "_1", "_2"]
    assert names(node_selector.has_following(node_selector.Activations.is_relu)) == ["_0"]
