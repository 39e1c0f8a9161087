"""Attribution patching, against autograd by hand and true activation patching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import SiteError
from bendtrace.research.patching import activation_patching, attribution_patching
from tests.causal_models import (
    CLEAN,
    CORRUPTED,
    HEADS,
    LENGTH,
    gpt2,
    halving,
    halving_by_hand,
    inputs_of_halving,
    kept,
    logit_difference,
    pre_hooked,
    transformer,
)


def _by_hand(
    model: nn.Module, modules: list[nn.Module], source: Tensor, target: Tensor
) -> list[Tensor]:
    """Return (source - target) * gradient for each module, by native hooks and autograd."""
    given = [kept(model, module, source) for module in modules]
    outputs: list[Tensor] = []
    handles = [
        module.register_forward_hook(
            lambda _, __, out: outputs.append(out if isinstance(out, Tensor) else out[0])
        )
        for module in modules
    ]
    metric = logit_difference(model(target))
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(metric, outputs)
    return [
        (value - output.detach()) * gradient
        for value, output, gradient in zip(given, outputs, gradients, strict=True)
    ]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_scores_are_differences_times_gradients_bit_by_bit(direction: str) -> None:
    source, target = (CLEAN, CORRUPTED) if direction == "denoise" else (CORRUPTED, CLEAN)
    for model, names in (
        (transformer(), ["embed", "blocks.0.attn", "blocks.0", "blocks.1.mlp", "norm"]),
        (gpt2(), ["transformer.wte", "transformer.h.0.attn", "transformer.h.0", "transformer.h.1"]),
    ):
        modules = [model.get_submodule(name) for name in names]
        expected = _by_hand(model, modules, source, target)
        found = attribution_patching(
            model, CLEAN, CORRUPTED, names, logit_difference, positions="each",
            direction=direction, keep_tensors=True,
        )  # fmt: skip
        assert found.tensors is not None
        for name, score in zip(names, expected, strict=True):
            (own,) = found.tensors[name]
            assert torch.equal(own, score)
        sums = torch.stack([score.sum((0, 2)) for score in expected]).double()
        torch.testing.assert_close(found.values, sums, rtol=1e-5, atol=1e-7)
        totals = torch.stack([score.sum(dtype=torch.float64) for score in expected])
        assert torch.equal(found.total, totals)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_not_taken_in_the_half_precision_of_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    inputs = torch.full((1, 300), 300.0, dtype=dtype), torch.zeros(1, 300, dtype=dtype)
    found = attribution_patching(
        model, *inputs, ["0"], lambda out: out.float().sum(), positions="each"
    )
    assert found.total.item() == found.values.sum().item() == inputs[0].double().sum().item()


def test_it_is_exact_where_the_model_is_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    clean, corrupted = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()
    sites = ["0", "1", "2"]
    options: dict[str, Any] = {"positions": "each", "metric": lambda out: out[..., 0].sum()}
    true = activation_patching(model, clean, corrupted, sites, **options)
    estimated = attribution_patching(model, clean, corrupted, sites, **options)
    torch.testing.assert_close(estimated.values, true.values - true.corrupted)
    assert (estimated.clean, estimated.corrupted) == (true.clean, true.corrupted)


def _net(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x @ weight
    left, right = hidden.chunk(2, dim=-1)
    mixed = left.sin() * right
    with torch.no_grad():
        scale = mixed.abs().mean()
    chosen = mixed.argmax()
    return (mixed * scale).sum() + 0 * chosen


def test_every_op_that_has_a_gradient_is_a_site_as_it_stands() -> None:
    weight = torch.linspace(-1, 1, 12).reshape(3, 4)
    clean, corrupted = torch.ones(2, 3), torch.linspace(0, 1, 6).reshape(2, 3)
    found = attribution_patching(
        _net, (clean, weight), (corrupted, weight), None, lambda out: out, keep_tensors=True
    )
    assert found.sites == (
        "matmul", "chunk|sub_0", "chunk|sub_1", "sin", "mul", "mul_1", "sum", "add"
    )  # fmt: skip

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        hidden = x.clone().requires_grad_() @ weight
        left, right = hidden.chunk(2, dim=-1)
        sine = left.sin()
        mixed = sine * right
        scaled = mixed * mixed.detach().abs().mean()
        return {
            "matmul": hidden, "chunk|sub_0": left, "chunk|sub_1": right, "sin": sine, "mul": mixed,
            "mul_1": scaled, "sum": scaled.sum(),
        }  # fmt: skip

    source, target = by_hand(clean), by_hand(corrupted)
    gradients = torch.autograd.grad(target["sum"], list(target.values()))
    assert found.tensors is not None
    for (name, value), gradient in zip(target.items(), gradients, strict=True):
        assert torch.equal(found.tensors[name][0], ((source[name] - value) * gradient).detach())
    name, largest = found.top(1)[0]
    assert abs(largest) == found.total.abs().max().item()
    assert found.total[found.sites.index(name)].item() == largest


@pytest.mark.more
def test_every_op_of_models_is_reached_by_one_run_for_each_input() -> None:
    for model in (transformer(), gpt2()):
        bended = bt.BendedModule(model)
        found = attribution_patching(bended, CLEAN, CORRUPTED, None, logit_difference)
        assert bended.stats.traces + bended.stats.replays == 2
        assert len(found.sites) > 30
        assert not found.total.isnan().any()
        # What an op gives last in a module is what the module gives.
        module = "blocks_1" if "norm.layer_norm" in found.sites else "transformer.h_1"
        last = "add_1"
        own = found.total[found.sites.index(f"{module}.{last}")]
        name = module.replace("_", ".")
        by_module = attribution_patching(bended, CLEAN, CORRUPTED, name, logit_difference)
        assert own == by_module.total.item()


def test_gradients_are_those_of_the_value_that_the_node_gave_not_of_later_writes() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 3
        h += 1
        torch.relu_(h)
        return (h * h).sum()

    clean, corrupted = torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
    found = attribution_patching(
        model, clean, corrupted, ["mul", "relu_", ".mul_1"], lambda out: out, positions="each",
        axis=0,
    )  # fmt: skip
    h = corrupted * 3 + 1
    gradient = 2 * h.relu()
    assert found.values[0].tolist() == ((clean - corrupted) * 3 * gradient * (h > 0)).tolist()
    assert found.values[1].tolist() == (((clean * 3 + 1).relu() - h.relu()) * gradient).tolist()
    assert found.values[2].tolist() == ((clean * 3 + 1).relu() ** 2 - h.relu() ** 2).tolist()


def test_frozen_parameters_and_the_callers_modes_are_no_hindrance() -> None:
    model = transformer()
    expected = attribution_patching(model, CLEAN, CORRUPTED, "blocks.0", logit_difference).total
    model.requires_grad_(False)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            found = attribution_patching(model, CLEAN, CORRUPTED, "blocks.0", logit_difference)
            assert torch.equal(found.total, expected)
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ZeroDivisionError):
        attribution_patching(model, CLEAN, CORRUPTED, "blocks.0", lambda out: 1 / 0)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_gradients_of_parameters_that_are_there_stay() -> None:
    model = transformer()
    model(CLEAN).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    attribution_patching(model, CLEAN, CORRUPTED, None, logit_difference)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_inputs_of_the_user_are_left_alone() -> None:
    def model(x: Tensor) -> Tensor:
        x += 1
        return x.exp().sum()

    clean, corrupted = torch.zeros(2), torch.ones(2)
    found = attribution_patching(model, clean, corrupted, "exp", lambda out: out)
    assert clean.tolist() == [0, 0]
    assert corrupted.tolist() == [1, 1]
    assert not clean.requires_grad
    assert clean.grad is None
    assert found.total.item() == (torch.ones(2).exp() - torch.full((2,), 2.0).exp()).sum().item()


def test_a_model_that_depends_on_its_data_is_differentiated_along_its_way() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    generator = torch.Generator().manual_seed(1)
    clean = inputs["up", 2]
    corrupted = clean + torch.randn(1, 4, generator=generator) * 0.01

    def run(x: Tensor) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        values: dict[tuple[str, int], Tensor] = {}
        output = halving_by_hand(model, x, lambda name, n, v: values.setdefault((name, n), v))
        return output[0, 0] - output[0, 1], values

    _, source = run(clean)
    metric, target = run(corrupted)
    assert source.keys() == target.keys()
    gradients = dict(zip(target, torch.autograd.grad(metric, list(target.values())), strict=True))
    found = attribution_patching(
        model, clean, corrupted, ["step", "tanh:2", "start", "up"],
        lambda out: out[0, 0] - out[0, 1], keep_tensors=True,
    )  # fmt: skip
    assert found.tensors is not None
    expected = {
        "step": [("step", 0), ("step", 1)], "tanh:2": [("tanh", 1)], "start": [("start", 0)],
        "up": [("up", 0)],
    }  # fmt: skip
    for name, keys in expected.items():
        scores = [((source[key] - target[key]) * gradients[key]).detach() for key in keys]
        assert len(found.tensors[name]) == len(scores)
        assert all(map(torch.equal, found.tensors[name], scores))
        total = sum(score.sum().item() for score in scores)
        assert found.total[found.sites.index(name)].item() == pytest.approx(total, rel=1e-6)


def test_what_one_run_does_not_come_by_raises_or_is_nan() -> None:
    model = halving()
    inputs = inputs_of_halving(model)
    clean, corrupted = inputs["up", 1], inputs["down", 1]
    metric = lambda out: out[0, 0]  # noqa: E731
    with pytest.raises(SiteError, match="'up': the corrupted run did not reach it"):
        attribution_patching(model, clean, corrupted, ["start", "up"], metric)
    found = attribution_patching(model, clean, corrupted, ["start", "up"], metric, missing="nan")
    assert found.total.isnan().tolist() == [False, True]
    every = attribution_patching(model, clean, corrupted, None, metric)
    assert "down.linear" in every.sites
    assert "up.linear" not in every.sites
    assert every.total[every.sites.index("down.linear")].isnan()
    assert not every.total[every.sites.index("step.linear")].isnan()


def test_nodes_without_a_gradient_are_refused_and_those_without_a_way_to_the_metric_are_zero() -> (
    None
):
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sigmoid()
        x.cos()
        return (x * scale).sum() + x.sin().argmax()

    options: dict[str, Any] = {"metric": lambda out: out}
    for name in ("sigmoid", "argmax"):
        with pytest.raises(SiteError, match="has no gradient"):
            attribution_patching(model, torch.ones(2), torch.zeros(2), name, **options)
    found = attribution_patching(model, torch.ones(2), torch.zeros(2), ["cos", "sin"], **options)
    assert found.total.tolist() == [0.0, 0.0]


@pytest.mark.more
def test_integrated_gradients_come_to_the_true_effect() -> None:
    model = transformer().double()
    names = ["blocks.0.attn", "blocks.1", "blocks.0.mlp"]
    true = activation_patching(model, CLEAN, CORRUPTED, names, logit_difference)
    wanted = (true.values - true.corrupted).flatten()
    once = attribution_patching(model, CLEAN, CORRUPTED, names, logit_difference)
    many = attribution_patching(
        model, CLEAN, CORRUPTED, names, logit_difference, steps=40, positions="each"
    )
    assert (many.total - wanted).abs().max() < 1e-4
    assert (many.total - wanted).abs().max() < (once.total - wanted).abs().max() / 50
    torch.testing.assert_close(many.values.sum(1), many.total)


def test_integrated_gradients_are_means_over_midpoints() -> None:
    def model(x: Tensor) -> Tensor:
        return (torch.relu(x) ** 3).sum()

    clean, corrupted = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.5])
    found = attribution_patching(
        model, clean, corrupted, "relu", lambda out: out, steps=2, axis=0, positions="each"
    )
    slope = sum(3 * torch.lerp(corrupted, clean, w) ** 2 for w in (0.25, 0.75)) / 2
    assert found.values[0].tolist() == pytest.approx(((clean - corrupted) * slope).tolist())
    single = attribution_patching(
        model, clean, corrupted, "relu", lambda out: out, axis=0, positions="each"
    )
    assert single.values[0].tolist() == ((clean - corrupted) * 3 * corrupted**2).tolist()


def test_heads_are_attributed_by_themselves() -> None:
    model = transformer()
    found = attribution_patching(
        model, CLEAN, CORRUPTED, "blocks.1.attn.out", logit_difference, at="input", heads=HEADS,
        positions="each",
    )  # fmt: skip
    out = model.blocks[1].attn.out
    given = kept(model, out, CLEAN, inputs=True)
    seen: list[Tensor] = []
    with pre_hooked(out, lambda value: seen.append(value)):
        metric = logit_difference(model(CORRUPTED))
    score = (given - seen[0].detach()) * torch.autograd.grad(metric, seen)[0]
    expected = score.reshape(1, LENGTH, HEADS, -1).sum((0, 3)).double()
    torch.testing.assert_close(found.values[0], expected, rtol=1e-5, atol=1e-8)
    assert found.values.shape == (1, LENGTH, HEADS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": lambda out: out[0, 0, 0].item()}, "has no gradient"),
        ({"metric": lambda out: out.detach().sum()}, "has no gradient"),
        ({"metric": lambda out: out}, "without dimensions"),
        ({"steps": 0}, "steps="),
        ({"steps": True}, "steps="),
        ({"sites": None, "at": "input"}, "sites=None"),
        ({"direction": "up"}, "direction="),
        ({"sites": []}, "sites="),
        ({"missing": "zero"}, "missing="),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    bended = bt.BendedModule(transformer())
    given: dict[str, Any] = {"sites": "blocks.0", "metric": logit_difference} | options
    with pytest.raises(bt.BendtraceError, match=said):
        attribution_patching(bended, CLEAN, CORRUPTED, **given)
    assert bended.insertions == ()


def test_results_are_tables() -> None:
    found = attribution_patching(
        transformer(), CLEAN, CORRUPTED, ["embed", "norm"], logit_difference, positions="each"
    )
    frame = found.to_pandas()
    assert list(frame.columns) == ["site", "position", "attribution"]
    assert frame["attribution"].tolist() == found.values.flatten().tolist()
    assert repr(found).startswith("Attribution (denoise): clean ")


def test_captum_attributes_to_a_node_through_the_rest_of_the_model() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    bended, x = bt.BendedModule(model), torch.randn(2, 4)
    bended(x)
    (value,) = bended.get_activations("sub_1.relu", args=(x,)).values()

    def rest(value: torch.Tensor) -> torch.Tensor:
        return bended.from_activations({"sub_1.relu": value})

    found = captum.IntegratedGradients(rest).attribute(value, target=1)
    assert torch.equal(found, captum.IntegratedGradients(model[2]).attribute(value, target=1))
    assert found.any()
