"""Analysers in the course of training: it goes on bit by bit as it would without."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bendtrace as bt
from bendtrace.analysis import (
    AnalyserEvaluation,
    AnalyserList,
    DeadReLU,
    FeatureStatistics,
    GradientAccumulation,
    PerClassAnalyser,
    RunningMean,
    RunningTopK,
)
from bendtrace.errors import InputError
from tests.promise import bits
from tests.shares import some


class Net(nn.Module):
    """Batch norm, dropout, a branch on values, a frozen part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.4)
        self.frozen = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.a(x)))
        if x.norm() > 5:
            x = torch.tanh(x)
        return self.b(self.frozen(self.drop(x)))


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.frozen.eval()
    return model


def dataset(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 3, generator=generator) * 2
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader(shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=5, shuffle=shuffle, **options)


def train(
    model: Callable[..., Any],
    batches: Any,
    evaluation: AnalyserEvaluation | None = None,
    epochs: int = 2,
) -> list[Any]:
    """Train; return all that could differ."""
    root = model.model if isinstance(model, bt.BendedModule) else model
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    assert isinstance(root, nn.Module)
    optimizer = torch.optim.Adam(root.parameters(), lr=0.05)
    losses = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    @contextmanager
    def around() -> Iterator[None]:
        if evaluation is None:
            yield
        else:
            with evaluation.attached(model):
                yield

    with around():
        for _ in range(epochs):
            for x, y in batches:
                if evaluation is None:
                    step(x, y)
                else:
                    with evaluation.step((x, y)):
                        step(x, y)
            if evaluation is not None:
                evaluation.end_epoch()
    generators = [
        made.get_state()
        for made in (getattr(batches, "generator", None),)
        if isinstance(made, torch.Generator)
    ]
    return [
        losses, root.state_dict(), optimizer.state_dict(), torch.get_rng_state(),
        random.getstate(), np.random.get_state()[1].tolist(), generators,
        [module.training for module in root.modules()],
        [parameter.grad for parameter in root.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in root.modules()],
    ]  # fmt: skip


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from all generators, as augmentation does."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3) + random.random() + np.random.rand()
        return noise, torch.tensor(index % 2)


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("kind", ["over a loader", "over the loader itself", "alongside"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_loop_of_one_s_own_goes_on_bit_by_bit(kind: str, unit: Any, wrapped: bool) -> None:
    def batches() -> DataLoader[Any]:
        return loader(generator=torch.Generator().manual_seed(2))

    def model() -> Any:
        return bt.BendedModule(net()) if wrapped else net()

    expected = train(net(), batches())
    analyser = AnalyserList([DeadReLU(), PerClassAnalyser(FeatureStatistics())])
    own = batches()
    held = {
        "over a loader": DataLoader(Noisy(), batch_size=4, shuffle=True),
        "over the loader itself": own,
        "alongside": None,
    }[kind]
    where = re.compile("^(act|b|tanh)$")
    evaluation = AnalyserEvaluation(where, analyser, loader=held, every=2, unit=unit)
    found = train(model(), own, evaluation)
    assert bits(found) == bits(expected)
    assert len(evaluation.history) == (5 if unit == "step" else 1)
    assert analyser.enabled
    assert analyser.targets is None
    assert {"act", "b"} <= evaluation.history[0].results.keys()


def test_what_is_found_over_a_loader_is_what_the_model_gives_then() -> None:
    model, batches = net(), loader(shuffle=False)
    evaluation = AnalyserEvaluation("act", RunningMean(), loader=batches)
    expected = []

    def now() -> Tensor:
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            return twin.act(twin.norm(twin.a(dataset().tensors[0]))).double().mean(0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evaluation.attached(model):
        for _ in range(3):
            for x, y in batches:
                with evaluation.step((x, y)):
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            expected.append(now())
            evaluation.end_epoch()
    assert [(found.step, found.epoch) for found in evaluation.history] == [(5, 1), (10, 2), (15, 3)]
    for found, mean in zip(evaluation.history, expected, strict=True):
        assert found.results["act"]["count"] == 24
        torch.testing.assert_close(found.results["act"]["mean"], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrapped", [True, False])
def test_alongside_training_its_batches_alone_are_seen(wrapped: bool) -> None:
    model: Any = bt.BendedModule(net()) if wrapped else net()
    seen: list[Tensor] = []
    twin = copy.deepcopy(model.model if wrapped else model)
    evaluation = AnalyserEvaluation("a", RunningMean(), every=2, unit="step")
    batches = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(4)]
    with evaluation.attached(model):
        model(batches[0][0] - 100)  # a look before training, say
        for x, y in batches:
            with evaluation.step((x, y)):
                model(x)
                seen.append(twin.a(x).detach().double())
            model(x + 100)  # a validation, say
    for found, pair in zip(evaluation.history, (seen[:2], seen[2:]), strict=True):
        assert found.results["a"]["count"] == 8
        torch.testing.assert_close(found.results["a"]["mean"], torch.cat(pair).mean(0))
    model(x)
    assert evaluation.analyser.results == {}


@pytest.mark.parametrize("over", [True, False])
def test_an_analyser_that_is_disabled_is_enabled_for_the_evaluation_alone(over: bool) -> None:
    analyser, model = RunningMean(), net()
    analyser.enabled = False
    analyser.targets = [1, 2]
    evaluation = AnalyserEvaluation("a", analyser, loader=loader() if over else None, unit="step")
    with evaluation.attached(model), evaluation.step((torch.randn(4, 3), torch.ones(4))):
        model(torch.randn(4, 3))
    assert evaluation.history[0].results["a"]["count"] == (24 if over else 4)
    assert not analyser.enabled
    assert analyser.targets is not None
    assert analyser.targets.tolist() == [1, 2]


def test_classes_and_samples_come_from_the_loader() -> None:
    model = net()
    top, classes = RunningTopK(2), PerClassAnalyser(RunningMean())
    evaluation = AnalyserEvaluation("a", AnalyserList([top, classes]), loader=loader(shuffle=False))
    found = evaluation.evaluate(model).results["a"]
    y = dataset().tensors[1]
    # Of the same batches: all rows at once may have other bits.
    values = torch.cat([model.a(x).detach() for x, _ in loader(shuffle=False)])
    assert found["RunningTopK"]["samples"][0].tolist() == values.argmax(0).tolist()
    for label in (0, 1):
        torch.testing.assert_close(
            found["PerClassAnalyser"][label]["mean"], values[y == label].double().mean(0)
        )
    table = AnalyserEvaluation("a", PerClassAnalyser(RunningMean()), loader=loader())
    table.evaluate(model)
    table.evaluate(model)  # at the same step
    assert table.to_pandas().index.names == ["number", "epoch", "step", "node", "class"]
    assert len(table.to_pandas()) == 4


def test_gradients_over_a_loader_need_a_loss_and_leave_those_of_the_training() -> None:
    model, batches = net(), loader(shuffle=False)
    model.zero_grad()
    before = bits([parameter.grad for parameter in model.parameters()])

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="sum")

    evaluation = AnalyserEvaluation("b", GradientAccumulation(), loader=batches, loss=loss)
    with torch.no_grad():
        found = evaluation.evaluate(model).results["b"]
    assert bits([parameter.grad for parameter in model.parameters()]) == before
    twin = copy.deepcopy(model).eval()
    x, y = dataset().tensors
    out = twin(x[:0])  # of the right shape
    total = torch.zeros(2, dtype=torch.float64)
    for start in range(0, 24, 5):
        out = twin(x[start : start + 5]).detach().requires_grad_()
        F.cross_entropy(out, y[start : start + 5], reduction="sum").backward()
        total += out.grad.double().sum(0)  # type: ignore[union-attr]
    torch.testing.assert_close(found["sum"], total, rtol=1e-6, atol=1e-6)


def test_an_error_puts_everything_back() -> None:
    model = net()
    modes = [module.training for module in model.modules()]
    bad = [(torch.randn(5, 3), torch.zeros(5)), (torch.randn(5, 4), torch.zeros(5))]
    state, before = torch.get_rng_state(), bits(model.state_dict())
    evaluation = AnalyserEvaluation("act", RunningMean(), loader=bad)
    evaluation.analyser.enabled = False
    with pytest.raises(RuntimeError):
        evaluation.evaluate(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert bits(model.state_dict()) == before
    assert not evaluation.analyser.enabled
    assert evaluation.history == []
    alongside = AnalyserEvaluation("act", RunningMean())
    with pytest.raises(ZeroDivisionError), alongside.attached(model), alongside.step():
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())
    assert alongside.analyser.enabled


class Counts(nn.Module):
    """Writes into a buffer, and exchanges another, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([0.0, float("nan")]))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        self.last = self.last + x.detach().mean()
        return torch.relu(x) * self.last


def test_buffers_that_a_forward_changes_are_put_back() -> None:
    model = Counts()
    model(torch.ones(1, 2))
    before = {name: (buffer, bits(buffer)) for name, buffer in model.named_buffers()}
    evaluation = AnalyserEvaluation("relu", RunningMean(), loader=[torch.randn(4, 2)] * 3)
    for _ in range(3):
        evaluation.evaluate(model)
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert bits(buffer) == before[name][1]
    first, *others = (bits(found.results) for found in evaluation.history)
    assert others == [first, first]


class Training(RunningMean):
    """Has modes, as one with probes that are trained has."""

    def __init__(self) -> None:
        super().__init__()
        self._modes: list[bool] = []
        self._training = True

    @property
    def training(self) -> bool:
        return self._training

    def train(self, mode: bool = True) -> None:
        self._training = mode

    def eval(self) -> None:
        self._training = False

    def update_state(self, state: Any, value: Tensor, batch: Any) -> None:
        self._modes.append(self._training)
        super().update_state(state, value, batch)


def test_analysers_with_modes_are_evaluated_in_eval_mode_and_put_back() -> None:
    analyser = Training()
    evaluation = AnalyserEvaluation("act", AnalyserList([analyser]), loader=loader())
    evaluation.evaluate(net())
    assert analyser._modes == [False] * 5
    assert analyser.training


def test_batches_can_be_anything_if_it_is_said_what_is_in_them() -> None:
    model = net()
    x, y = dataset().tensors
    expected = AnalyserEvaluation("act", RunningMean(), loader=[(x, y)]).evaluate(model)
    mapped = [{"x": x, "labels": y}]
    triple = [(y, x, "more")]
    for batches, options in (
        ([x], {}),
        ([[x]], {}),
        (mapped, {"inputs": lambda batch: {"x": batch["x"]}}),
        (triple, {"inputs": lambda batch: batch[1], "targets": lambda batch: batch[0]}),
    ):
        found = AnalyserEvaluation("act", RunningMean(), loader=batches, **options).evaluate(model)
        assert bits(found.results) == bits(expected.results)
    one = AnalyserEvaluation("act", RunningMean(), loader=[x, x + 1], max_batches=1)
    assert bits(one.evaluate(model).results) == bits(expected.results)
    with pytest.raises(
        InputError, match="tuple of 3: pass a function from the batch to the inputs"
    ):
        AnalyserEvaluation("act", RunningMean(), loader=triple).evaluate(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AnalyserEvaluation("a", print), "an analyser is needed"),  # type: ignore[arg-type]
        (lambda: AnalyserEvaluation("a", RunningMean(), every=0), "every=0"),
        (lambda: AnalyserEvaluation("a", RunningMean(), unit="day"), "unit='day'"),  # type: ignore[arg-type]
        (lambda: AnalyserEvaluation("a", RunningMean(), loader=iter([])), "used only once: pass"),
        (lambda: AnalyserEvaluation("a", RunningMean(), max_batches=3), "are only for use with"),
        (lambda: AnalyserEvaluation("a", RunningMean()).evaluate(net()), "no loader="),
        (lambda: AnalyserEvaluation("a", RunningMean(), loader=[]).evaluate(), "no model"),
        (lambda: AnalyserEvaluation("a", RunningMean()).begin_step(), "attached"),
        (lambda: AnalyserEvaluation("tanh", RunningMean()).begin(net()), "no module 'tanh'"),
        (lambda: AnalyserEvaluation("a", GradientAccumulation()).begin(net()), "uses gradients"),
        (lambda: AnalyserEvaluation("a", RunningMean()).begin(torch.relu), "is not a module"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def test_steps_in_which_nothing_was_seen_give_a_warning() -> None:
    model, other = net(), net()
    evaluation = AnalyserEvaluation("act", RunningMean(), unit="step")
    with evaluation.attached(model):
        with pytest.warns(bt.errors.NeverFiredWarning, match="RunningMean at 'act' was not called"):
            with evaluation.step():
                other(torch.randn(4, 3))
        with evaluation.step():
            model(torch.randn(4, 3))
    assert [list(found.results) for found in evaluation.history] == [[], ["act"]]


def test_it_is_attached_to_one_model_at_a_time() -> None:
    evaluation = AnalyserEvaluation("a", RunningMean())
    with evaluation.attached(net()):
        with pytest.raises(InputError, match="attached already"):
            evaluation.begin(net())
    evaluation.end()
    with evaluation.attached(net()):
        pass


def test_modules_are_named_by_name_class_pattern_or_themselves() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = torch.randn(2, 3)
    for where, names in (
        ("1.0", {"1.0"}),
        (nn.Linear, {"0", "1.0"}),
        (re.compile(r"^1\."), {"1.0", "1.1"}),
        ([model[0], "1_1"], {"0", "1.1"}),
    ):
        evaluation = AnalyserEvaluation(where, RunningMean())
        with evaluation.attached(model), evaluation.step():
            model(x)
            assert set(evaluation.analyser.results) == names
    apart = AnalyserEvaluation("1.1", RunningMean(per_pass=True))
    with apart.attached(model):
        for _ in range(2):
            with apart.step():
                model(x)
                model[1](x)
                assert set(apart.analyser.results) == {"1.1:1", "1.1:2"}


# Lightning


def lit(model: nn.Module) -> Any:
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    return Lit()


def fit(evaluation: AnalyserEvaluation | None, folder: Path, wrapped: bool = False) -> list[Any]:
    from lightning.pytorch import Trainer

    inner = net()
    module = lit(bt.BendedModule(inner) if wrapped else inner)
    torch.manual_seed(3)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[] if evaluation is None else [evaluation.lightning()],
    )  # fmt: skip
    trainer.fit(module, loader(), DataLoader(dataset(8), batch_size=4))
    return [
        inner.state_dict(), [p.grad for p in inner.parameters()], torch.get_rng_state(),
        trainer.optimizers[0].state_dict(), [m.training for m in inner.modules()],
        [len(m._forward_hooks) for m in inner.modules()],
    ]  # fmt: skip


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["over a loader", "alongside", "alongside, wrapped", "a part"])
def test_training_in_lightning_goes_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    expected = fit(None, tmp_path)
    options: dict[str, Any] = {
        "over a loader": {"loader": loader(), "where": "net.act"},
        "alongside": {"unit": "step", "every": 5, "where": "net.act"},
        "alongside, wrapped": {
            "unit": "step", "every": 5, "where": "act", "of": lambda module: module.net,
        },
        "a part": {"loader": loader(), "where": "act", "of": lambda module: module.net},
    }[kind]  # fmt: skip
    analyser = PerClassAnalyser(FeatureStatistics())
    evaluation = AnalyserEvaluation(options.pop("where"), analyser, **options)
    found = fit(evaluation, tmp_path, wrapped="wrapped" in kind)
    assert bits(found) == bits(expected)
    assert [(item.step, item.epoch) for item in evaluation.history] == (
        [(5, 1), (10, 2)] if "loader" in options else [(5, 0), (10, 1)]
    )
    for item in evaluation.history:  # those of training alone, not of validation
        assert sum(each["count"] for each in next(iter(item.results.values())).values()) == 24


# Hugging Face


class Classifier(nn.Module):
    """What a Trainer takes: it gives a loss and logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(**others: Any) -> list[dict[str, Any]]:
    x, y = dataset().tensors
    return [{"x": x[i], "labels": y[i], **others} for i in range(len(x))]


def run_trainer(
    evaluation: AnalyserEvaluation | None, folder: Path, accumulate: int = 1, wrapped: bool = False
) -> list[Any]:
    from transformers import Trainer, TrainingArguments

    inner = net()
    model: nn.Module = Classifier(inner)
    if wrapped:
        model = bt.BendedModule(model)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True, seed=4,
        gradient_accumulation_steps=accumulate, logging_strategy="no",
    )  # fmt: skip
    callbacks = [] if evaluation is None else [evaluation.hugging_face()]
    trainer = Trainer(
        model, arguments, train_dataset=rows(unused="text"), eval_dataset=rows()[:8],
        callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    assert trainer.optimizer is not None
    return [
        inner.state_dict(), torch.get_rng_state(), random.getstate(),
        np.random.get_state()[1].tolist(), trainer.optimizer.state_dict(),
        [m.training for m in inner.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_evaluates_a_bended_module_like_its_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = Classifier(net())
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    found = []
    for subject in (model, bt.BendedModule(model)):
        trainer = transformers.Trainer(
            subject, arguments, eval_dataset=rows()[:8],
            compute_metrics=lambda p: {"mean": float(p.predictions.mean())},
        )  # fmt: skip
        measured = trainer.evaluate()
        found.append({key: measured.get(key) for key in ("eval_loss", "eval_mean")})
        assert trainer.label_names == ["labels"]
    assert found[0] == found[1]
    assert None not in found[0].values()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_raised_can_be_begun_anew(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    evaluation = AnalyserEvaluation("inner.act", RunningMean())
    callback, model = evaluation.hugging_face(), Classifier(net())
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model)
        callback.on_step_begin(None, None, None)
        assert len(model.inner.act._forward_hooks) == 1
        assert evaluation.analyser.enabled
        with pytest.raises(TypeError):
            model("no tensor")
    evaluation.end()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_a_wrapped_model_on_the_columns_that_it_takes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    expected, found = (run_trainer(None, tmp_path, wrapped=wrapped) for wrapped in (False, True))
    assert bits(found[:5]) == bits(expected[:5])


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", some([1, 2], 2, start=1))
@pytest.mark.parametrize("kind", some(["over a loader", "alongside"], 2))
def test_training_in_a_trainer_goes_on_bit_by_bit(
    kind: str, accumulate: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    expected = run_trainer(None, tmp_path, accumulate)
    options: dict[str, Any] = (
        {"loader": DataLoader(rows(), batch_size=6)}  # type: ignore[arg-type]
        if kind == "over a loader"
        else {"unit": "epoch"}
    )
    analyser = PerClassAnalyser(FeatureStatistics())
    evaluation = AnalyserEvaluation("inner.act", analyser, **options)
    found = run_trainer(evaluation, tmp_path, accumulate)
    assert bits(found) == bits(expected)
    steps = 6 // accumulate
    assert [(item.step, item.epoch) for item in evaluation.history] == [
        (steps, 1), (2 * steps, 2),
    ]  # fmt: skip
    for item in evaluation.history:
        assert sum(each["count"] for each in item.results["inner.act"].values()) == 24
