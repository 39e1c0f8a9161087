"""Features for linear probes, and probes in closed form, against numpy and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bendtrace as bt
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError
from bendtrace.workflows import fit_ridge, probe_data
from tests.lens_models import WIDTH, Transformer, hooked, made, tokens, untouched


def labelled(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    batches = [tokens(4, 5, seed) for seed in range(count)]
    return [(batch, (batch[:, 0] > 4).long()) for batch in batches]


@pytest.mark.parametrize("reduce", ["mean", "last", "flatten", "function"])
def test_features_are_what_hooks_see_reduced(reduce: str) -> None:
    model = made(Transformer)
    kept: list[Tensor] = []
    with torch.no_grad(), hooked(model.blocks[0], lambda m, a, out: kept.append(out.clone())):
        for batch, _ in labelled():
            model(batch)
    values = torch.cat(kept)
    wanted = {
        "mean": values.mean(1), "last": values[:, -1], "flatten": values.flatten(1),
        "function": values[:, 1],
    }[reduce]  # fmt: skip
    given: Any = reduce if reduce != "function" else (lambda value, call: value[:, 1])
    with untouched(model):
        found = probe_data(model, labelled(), ["blocks.0", "lm_head"], reduce=given)
    assert torch.equal(found["blocks_0"], wanted)
    assert found.labels.tolist() == [int(b[0] > 4) for batch, _ in labelled() for b in batch]
    assert "20 samples" in repr(found)


def test_loaders_and_batches_of_other_forms() -> None:
    model = made(Transformer)
    data = TensorDataset(tokens(10), torch.arange(10) % 3)
    one = probe_data(model, DataLoader(data, batch_size=4), "blocks.1")
    assert one["blocks_1"].shape == (10, WIDTH)
    rows = [{"tokens": tokens(3), "label": torch.zeros(3)}]
    other = probe_data(
        model, rows, "blocks.1",
        split=lambda row: ({"tokens": row["tokens"]}, row["label"]),
        reduce=lambda value, call: value[:, 0] * float(isinstance(call, Call)),
    )  # fmt: skip
    assert other["blocks_1"].shape == (3, WIDTH)


def test_a_loader_may_use_its_memory_again() -> None:
    x, labels = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)

    def loader() -> Any:
        for number in range(3):
            yield x.fill_(number), labels.fill_(number)

    data = probe_data(nn.Sequential(nn.Identity(), nn.ReLU()), loader(), ["0", "1"])
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2]
    for path in ("sub_0", "sub_1"):
        assert torch.equal(data[path][:, 0], data.labels.float())


def test_what_does_not_fit_is_refused() -> None:
    model = made(Transformer)

    def gated(x: Tensor) -> Tensor:
        return torch.tanh(x) if x.sum() > 0 else x.exp()

    bended = bt.BendedModule(gated)
    bended(torch.ones(1, 2))
    bended(-torch.ones(1, 2))
    label = torch.zeros(1)
    cases: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (model, [tokens()], "blocks.0", {}, "pair of inputs"),
        (model, [], "blocks.0", {}, "no batches"),
        (model, [(tokens(), torch.zeros(3))], "blocks.0", {}, "2 rows for the 3 labels"),
        (model, [(tokens(), torch.zeros(2))], "tokens", {}, "floating point"),
        (model, labelled(), "blocks.0", {"reduce": "max"}, "reduce="),
        (model, labelled(), "blocks.0", {"reduce": lambda v, c: v}, "examples, size"),
        (bended, [(torch.ones(1, 2), label), (-torch.ones(1, 2), label)], ["tanh", "exp"], {},
         "by path"),
    ]  # fmt: skip
    for what, loader, where, options, message in cases:
        with pytest.raises(InputError, match=message):
            probe_data(what, loader, where, **options)
    assert bended.insertions == ()


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 3.0])
def test_a_regression_is_that_of_the_normal_equations(ridge: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=generator)
    y = torch.randn(50, 2, generator=generator)
    probe = fit_ridge(x, y, ridge=ridge)
    rows = x.double().numpy()
    center = rows - rows.mean(0)
    targets = y.double().numpy() - y.double().numpy().mean(0)
    weight = np.linalg.solve(center.T @ center + ridge * np.eye(6), center.T @ targets).T
    np.testing.assert_allclose(probe.weight.numpy(), weight, rtol=1e-9, atol=1e-12)
    bias = y.double().numpy().mean(0) - weight @ rows.mean(0)
    np.testing.assert_allclose(probe.bias.numpy(), bias, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(probe.predict(x).numpy(), rows @ weight.T + bias, atol=1e-9)
    with pytest.raises(InputError, match="no accuracy"):
        probe.accuracy(x, y)


def test_classes_are_those_of_a_ridge_classifier() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator)
    labels = torch.tensor([3, 7, 9])[(x @ torch.randn(5, 3, generator=generator)).argmax(1)]
    probe = fit_ridge(x, labels, ridge=2.0)
    theirs = linear.RidgeClassifier(alpha=2.0).fit(x.double().numpy(), labels.numpy())
    np.testing.assert_array_equal(probe.predict(x).numpy(), theirs.predict(x.double().numpy()))
    assert probe.accuracy(x, labels) == pytest.approx(
        theirs.score(x.double().numpy(), labels.numpy())
    )
    assert probe.classes.tolist() == [3, 7, 9]


def test_more_features_than_samples_and_linear_dependence_are_no_matter() -> None:
    x = torch.randn(4, 30)
    labels = torch.tensor([0, 1, 0, 1])
    for ridge in (0.0, 1e-3):
        assert fit_ridge(x, labels, ridge=ridge).accuracy(x, labels) == 1.0
    twice = torch.cat([x[:, :2], x[:, :2]], 1)
    assert fit_ridge(twice, labels, ridge=0.0).weight.isfinite().all()


def test_bools_are_classes() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    labels = x[:, 0] > 1.5
    assert torch.equal(fit_ridge(x, labels).predict(x), labels)


@pytest.mark.parametrize(
    ("features", "labels", "options", "message"),
    [
        (torch.ones(3), torch.ones(3), {}, "features have to be"),
        (torch.ones(3, 2), torch.ones(4), {}, "features have to be"),
        (torch.ones(0, 2), torch.ones(0), {}, "features have to be"),
        (torch.ones(3, 2), torch.ones(3, dtype=torch.long), {}, "all labels are 1"),
        (torch.ones(3, 2), torch.ones(3, 2, dtype=torch.long), {}, "classes have to be"),
        (torch.ones(3, 2), torch.ones(3), {"ridge": -1}, "a number of at least 0"),
        (torch.full((3, 2), torch.nan), torch.ones(3), {}, "not finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    features: Tensor, labels: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit_ridge(features, labels, **options)


def test_five_lines_from_a_loader_to_an_accuracy() -> None:
    model = made(Transformer)
    train = probe_data(model, labelled(20), ["embed", "blocks.1"], reduce="flatten")
    test = probe_data(model, [(tokens(8, 5, 99), (tokens(8, 5, 99)[:, 0] > 4).long())],
                      ["embed", "blocks.1"], reduce="flatten")  # fmt: skip
    for path in train.features:
        probe = fit_ridge(train[path], train.labels)
        assert probe.accuracy(train[path], train.labels) > 0.9
        assert probe.accuracy(test[path], test.labels) > 0.6


@pytest.mark.more
def test_a_language_model_of_hugging_face() -> None:
    pytest.importorskip("transformers", reason="needs the test extra")
    from tests.hf_models import MODELS

    (found,) = (m for m in MODELS if m.name == "gpt2")
    model = found.make()
    batches = [(found.inputs(seed=seed), torch.tensor([0, 1])) for seed in range(3)]
    data = probe_data(model, batches, "transformer.h.0", reduce="last")
    with torch.no_grad():
        states = [model(**b, output_hidden_states=True).hidden_states[1][:, -1] for b, _ in batches]
    assert torch.equal(data["transformer.h_0"], torch.cat(states))
    assert isinstance(model, nn.Module)
