"""captum's methods at the values of nodes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, NodePathError, SiteError
from bendtrace.workflows import NodeFunction, attribute

captum = pytest.importorskip("captum.attr", reason="needs the extra captum")
numpy = pytest.importorskip("numpy")


class Net(nn.Module):
    """May branch on its batch, and write to values."""

    def __init__(self, branches: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.branches = nn.Linear(4, 6), nn.Linear(6, 3), branches

    def rest(self, h: Tensor) -> Tensor:
        if not self.branches:
            return self.b(torch.relu(h)).softmax(-1)
        if h.norm() > 1.2:
            h = h * 2
        return self.b(torch.relu_(h)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.a(x)))


def net(branches: bool = True) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(branches)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def by_hand(model: Net, h: Tensor) -> Any:
    """The rest of the model, for batches of all examples: the n-th rows of each are the n-th."""

    def function(value: Tensor, index: Tensor) -> Tensor:
        batches: list[dict[int, int]] = []
        for row, example in enumerate(index.tolist()):
            batch = next((b for b in batches if example not in b), None)
            if batch is None:
                batches.append(batch := {})
            batch[example] = row
        found: dict[int, Tensor] = {}
        for batch in batches:
            rows = [value[batch[e]] if e in batch else h[e] for e in range(len(h))]
            out = model.rest(torch.stack(rows))
            found |= {row: out[e] for e, row in batch.items()}
        return torch.stack([found[row] for row in range(len(value))])

    return function


def seeded() -> None:
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)


METHODS: dict[str, dict[str, Any]] = {
    "IntegratedGradients": {"n_steps": 7}, "Saliency": {}, "InputXGradient": {},
    "FeatureAblation": {"perturbations_per_eval": 4}, "FeaturePermutation": {},
    "Occlusion": {"sliding_window_shapes": (2,)}, "ShapleyValueSampling": {"n_samples": 3},
    "GradientShap": {"baselines": torch.zeros(2, 6)},
}  # fmt: skip


@pytest.mark.filterwarnings("default")  # captum's own
@pytest.mark.parametrize("method", METHODS)
def test_the_attributions_are_those_of_the_rest_of_the_model(method: str) -> None:
    model, options = net(), {"target": 1, **METHODS[method]}
    bended = bt.BendedModule(model)
    with torch.no_grad():
        h = torch.tanh(model.a(X))
    seeded()
    given = attribute(bended, "tanh", X, method, **options)
    drawn = torch.rand(1)
    seeded()
    wanted = getattr(captum, method)(by_hand(model, h)).attribute(
        h.clone().requires_grad_(), additional_forward_args=(torch.arange(3),), **options
    )
    assert torch.equal(drawn, torch.rand(1))
    torch.testing.assert_close(given, wanted)
    assert given.abs().sum() > 0
    assert bended.insertions == ()


@pytest.mark.filterwarnings("default")
def test_points_that_captum_repeats_or_batches_keep_their_examples() -> None:
    model = net()
    plain = attribute(model, "tanh", X, target=1, n_steps=10)
    batched = attribute(model, "tanh", X, target=1, n_steps=10, internal_batch_size=7)
    torch.testing.assert_close(batched, plain, check_dtype=False)

    def smooth(function: Any) -> Any:
        return captum.NoiseTunnel(captum.Saliency(function))

    # Without noise, the mean over samples, which repeats rows one by one, is the plain one.
    target = torch.tensor([0, 1, 2])
    given = attribute(model, "tanh", X, smooth, target=target, nt_samples=3, stdevs=0.0)
    torch.testing.assert_close(given, attribute(model, "tanh", X, captum.Saliency, target=target))
    apart, delta = attribute(model, "tanh", X, target=1, return_convergence_delta=True)
    assert apart.shape == (3, 6)
    assert delta.abs().max() < 0.1


def test_it_is_what_captum_gives_at_a_layer() -> None:
    model = net(branches=False)
    layer = captum.LayerIntegratedGradients(model, model.a)
    wanted = layer.attribute(X, baselines=torch.zeros(3, 4), target=2)
    baselines = model.a(torch.zeros(3, 4)).detach()
    given = attribute(model, "a", X, baselines=baselines, target=2)
    torch.testing.assert_close(given, wanted.float(), atol=1e-5, rtol=1e-4)
    wanted = captum.LayerGradientXActivation(model, model.b).attribute(
        X, target=2, attribute_to_layer_input=True
    )
    given = attribute(model, "b", X, "InputXGradient", at="input", target=2)
    torch.testing.assert_close(given, wanted)


def test_captum_s_methods_of_layers_take_a_bended_model() -> None:
    model = net(branches=False)
    bended = bt.BendedModule(model)
    for kind in (captum.LayerGradientXActivation, captum.LayerIntegratedGradients):
        wanted = kind(model, model.a).attribute(X, target=2)
        for _ in range(2):
            given = kind(bended, bended.a).attribute(X, target=2)
            torch.testing.assert_close(given, wanted)


def test_the_function_is_the_model_with_another_value() -> None:
    model = net()
    bended = bt.BendedModule(model)
    function = NodeFunction(bended, "tanh", X)
    with torch.no_grad():
        assert torch.equal(function.value, torch.tanh(model.a(X)))
        assert torch.equal(function(function.value), model(X))
        other = torch.randn(3, 6)
        assert torch.equal(function(other), model.rest(other.clone()))
        # The second row is the third example; the others have their own values.
        full = torch.stack([function.value[0], function.value[1], other[1]])
        index = torch.tensor([2])
        assert torch.equal(function(other[1:2], index)[0], model.rest(full)[2])
        index = torch.tensor([2, 0, 2])
        both = function(other, index)
        alone = [function(other[n : n + 1], index[n : n + 1]) for n in (1, 2)]
        full = torch.stack([other[1], function.value[1], other[0]])
        assert torch.equal(both[:2], model.rest(full)[[2, 0]])
        assert torch.equal(both[2:], alone[1])
    assert bended.insertions == ()
    assert repr(function) == "<NodeFunction of tanh: a tensor of shape (3, 6)>"


def test_nodes_are_named_as_everywhere_and_outputs_may_be_any() -> None:
    def model(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            x = x.sin()
        return {"score": (x * scale).sum()}

    inputs = {"x": X, "scale": torch.ones(4)}
    given = attribute(
        model, "sin:2", inputs, "Saliency", output=lambda out: out["score"], abs=False
    )
    assert torch.equal(given, torch.ones(3, 4))
    for where in ("mul", lambda node: node.path == "mul", bt.node_selector.matches_name("mul")):
        found = NodeFunction(model, where, inputs, output=lambda out: out["score"])
        assert torch.equal(found(torch.ones(3, 4)), torch.tensor([12.0]))
    with pytest.raises(SiteError, match=r"stands for several values: sin \(2 times\)"):
        NodeFunction(model, "sin", inputs)


def test_dropout_draws_the_same_numbers_in_every_run() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(x.exp(), 0.5, True).sum(-1)

    with NodeFunction(Drops(), "exp", X) as function:
        first = function(function.value)
        torch.rand(3)
        assert torch.equal(function(function.value), first)


def test_what_cannot_be_attributed_to_is_named() -> None:
    model = net()
    with pytest.raises(NodePathError, match="did you mean"):
        attribute(model, "tan", X)
    with pytest.raises(InputError, match="has to be the name of a class in captum"):
        attribute(model, "tanh", X, "No")
    for method in ("DeepLift", "GuidedGradCam", "LayerActivation"):
        with pytest.raises(InputError, match=f"{method} needs the modules of a model"):
            attribute(model, "tanh", X, method)
    with pytest.raises(InputError, match="additional_forward_args are the inputs"):
        attribute(model, "tanh", X, additional_forward_args=(1,))
    with pytest.raises(InputError, match="but rows of floating point numbers are needed"):
        NodeFunction(lambda x: x.argmax(-1) + 1, "argmax", X)
    with pytest.raises(InputError, match=r"a row for each of the 3 examples is needed.*output="):
        attribute(lambda x: x.exp().sum(0), "exp", X)
    with pytest.raises(InputError, match=r"the value has shape \(3, 5\) and 3 examples"):
        NodeFunction(model, "tanh", X)(torch.zeros(3, 5))
    with pytest.raises(InputError, match=r"the value has shape \(4, 6\) and 3 examples"):
        NodeFunction(model, "tanh", X)(torch.zeros(4, 6))


def test_without_captum_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(ImportError, match=r"needs captum: pip install captum$"):
        attribute(net(), "tanh", X)
