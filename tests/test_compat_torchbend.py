"""torchbend's conventions beyond traces: methods, plain objects, configurations, versions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from tests.shares import some

tb = bt.compat.torchbend


class Coder(nn.Module):
    """Has three methods that share weights, and a parameter that one of them reads itself."""

    __bended_methods__ = ("forward", "scaled")

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def scaled(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * self.gain if x.shape[0] > 1 else self.pre(x) * self.gain

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.pre(x) + 1) + 1


class Pair:
    """Holds modules, and is no module; neither can it be called."""

    def __init__(self) -> None:
        self.first, self.second, self.times = Coder(), nn.Linear(4, 2), 1

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x) * self.times

    def decode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(x), self.second(-x)


class Whole(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


# Methods and plain objects


def test_an_object_that_cannot_be_called_is_traced_and_replayed_by_its_methods(x: Tensor) -> None:
    model = Pair()
    bended = tb.BendedWrapper(model)
    assert bended.module is model
    graph, (out,) = bended.trace("encode", x=x, _return_out=True)
    assert torch.equal(out, model.encode(x))
    assert next(iter(graph.nodes)).name == "x"
    for size in (1, 2, 3):
        assert torch.equal(bended.encode(x[:size]), model.encode(x[:size]))
    assert bended._parts["encode"].stats.replays
    assert all(map(torch.equal, bended.decode(x), model.decode(x)))
    with pytest.raises(InputError, match=r"Pair has no forward: call a method of it"):
        bended(x)
    with pytest.raises(InputError, match="no 'other'"):
        bended.trace(fn="other")
    with pytest.raises(InputError, match="has to be callable"):
        tb.BendedModule("no model")


def test_an_object_with_a_forward_is_called_by_it(x: Tensor) -> None:
    model = Whole()
    bended = tb.BendedModule(model)
    assert torch.equal(bended(x), model.forward(x))
    assert torch.equal(bended.forward(x), model.forward(x))
    bended.bend(tb.Scale(0.0), "second.weight")
    assert torch.equal(bended(x), model.second.bias.expand(3, 2))
    assert all(torch.equal(one, model.second.bias.expand(3, 2)) for one in bended.decode(x))
    assert list(bended.state_dict()) == [
        *(f"first.{key}" for key in model.first.state_dict()), "second.weight", "second.bias"
    ]  # fmt: skip


def test_attributes_are_those_of_the_object(x: Tensor) -> None:
    model = Pair()
    bended = tb.BendedModule(model)
    bended.trace("encode", x)
    before = bended.encode(x)
    bended.times = 3
    assert model.times == 3
    assert torch.equal(bended.encode(x), before * 3)


@pytest.mark.parametrize("traced", [False, True])
def test_bends_of_weights_reach_the_methods_that_read_them(x: Tensor, traced: bool) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    if traced:
        bended.trace("scaled", x)
        bended.trace("encode", x)
    with bended.bend(tb.Scale(0.0), "gain"):
        assert not bended.scaled(x).any()
        assert not bended.scaled(x[:1]).any()
    assert torch.equal(bended.scaled(x), model.scaled(x))
    with bended.bend(tb.Scale(0.0), "pre.weight", fn="scaled"):
        assert torch.equal(bended.encode(x), torch.relu(model.pre.bias + 1).expand(3, 4) + 1)
        assert torch.equal(bended(x), bended(-x))
    assert torch.equal(bended.encode(x), model.encode(x))


def test_a_method_that_may_read_a_bent_weight_unseen_is_refused(x: Tensor) -> None:
    class Other(Coder):
        __bended_methods__ = ()

    bended = tb.BendedModule(Other())
    plain = bended.scaled(x)
    bended.bend(tb.Scale(0.0), "pre$", "gain")
    with pytest.raises(InputError, match="'gain' is bent, and 'scaled' may read it itself"):
        bended.scaled(x)
    bended.trace("scaled", x)
    assert not bended.scaled(x).any()
    bended.reset()
    assert torch.equal(bended.scaled(x), plain)
    for wrapped in ((), ["scaled"]):
        bended = tb.BendedModule(Other(), wrapped)
        bended.bend(tb.Scale(0.0), "gain")
        assert not bended.scaled(x).any()


def test_activations_are_bent_in_the_methods_that_are_given(x: Tensor) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    for fn in ("forward", "scaled", "encode"):
        bended.trace(x, fn=fn)
    with bended.bend(tb.Scale(0.0), "pre$", fn="encode"):
        assert torch.equal(bended.encode(x), torch.full((3, 4), 2.0))
        assert torch.equal(bended(x), model(x))
        assert bended.bended_keys("encode") == ["pre"]
        assert not bended.bended_keys()
    with bended.bend(tb.Scale(0.0), "encode:pre", "scaled:layers_0"):
        assert bended.bending_config().bends[0].where == ("scaled:layers_0",)
        assert not bended.scaled(x).any()
        assert torch.equal(bended.scaled(x[:1]), model.scaled(x[:1]))
        assert torch.equal(bended(x), model(x))
    with bended.bend(tb.Scale(0.0), "pre$"):
        assert torch.equal(bended.encode(x), torch.full((3, 4), 2.0))
        assert torch.equal(bended(x), bended(-x))
    assert torch.equal(bended.encode(x), model.encode(x))


def test_a_pattern_bends_what_it_matches_from_the_start(
    x: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    bended = tb.BendedModule(Coder())
    bended.trace(x)
    bended.bend(tb.Scale(1.0), "pre", verbose=True)
    assert bended.bended_keys() == ["pre.weight", "pre.bias", "pre"]
    assert capsys.readouterr().out.split() == [
        word for key in ("pre.weight", "pre.bias", "forward:pre") for word in ("bending", key)
    ]  # fmt: skip
    bended.reset()
    bended.bend(tb.Scale(1.0), "pre", bend_param=False)
    assert not bended.bended_params
    assert list(bended.bended_activations()) == ["pre"]
    bended.reset()
    bended.bend(tb.Scale(1.0), "pre", bend_graph=False)
    assert list(bended.bended_params) == ["pre.weight", "pre.bias"]
    assert bended.bendable_keys("layers") == [
        "layers.0.weight", "layers.0.bias", "layers_0", "layers_1"
    ]  # fmt: skip


def test_what_nothing_is_called_is_refused_and_changes_nothing(x: Tensor) -> None:
    bended = tb.BendedModule(Coder())
    bended.trace(x)
    with pytest.raises(InputError, match=r"matches 'prea'; did you mean 'pre'"):
        bended.bend(tb.Scale(0.0), "pre", "prea")
    gain = tb.BendingParameter("gain", 1.0)
    bended.bend(tb.Scale(gain), "pre$")
    with pytest.raises(InputError, match="another parameter already has the name 'gain'"):
        bended.bend(tb.Scale(tb.BendingParameter("gain", 1.0)), "layers", fn="scaled")
    with pytest.raises(InputError, match="matches nothing that is bent"):
        bended.reset("layers")
    assert bended.bended_keys() == ["pre"]
    assert bended.bended_keys("scaled") == []
    bended.bend(tb.Scale(1.0), "layers_0")
    assert bended.bended_keys("scaled") == []  # which is not known of, as before
    assert bended.controllables == {"gain": gain}
    bended.update("gain", 0.0)
    assert torch.equal(bended(x), bended(-x))
    with pytest.raises(InputError, match="'gian'"):
        bended.update("gian", 0.0)


def test_functions_in_modules_have_the_names_of_fx_as_well(x: Tensor) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 3

    bended = tb.BendedModule(Outer())
    bended.trace(x)
    assert bended.activation_names() == ["x", "inner_relu", "inner_mul", "mul"]
    out = bended.get_activations("relu", "mul_1", x=x)
    assert torch.equal(out["relu"], x.relu())
    assert torch.equal(out["mul_1"], x.relu() * 6)
    with bended.bend(tb.Scale(0.0), "relu"):
        assert not bended(x).any()
        assert bended.bended_keys() == ["inner_relu"]


def test_other_insertions_take_part_in_methods_as_long_as_nothing_is_bent(x: Tensor) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    with bended.interject("pre", torch.zeros_like):
        assert torch.equal(bended.encode(x), torch.full((3, 4), 2.0))
        _, (out,) = bended.trace("encode", x, _return_out=True)
        assert torch.equal(out, torch.full((3, 4), 2.0))
        assert bended.graph("encode") is not None
    bended.trace("scaled", x)
    bended.bend(tb.Scale(1.0), "gain")
    with (
        bended.interject("pre", torch.zeros_like, allow_none=True),
        pytest.raises(InputError, match="not of 'scaled': remove it"),
    ):
        bended.scaled(x)


def test_a_traced_method_becomes_a_program_and_a_file(x: Tensor, tmp_path: Path) -> None:
    bended = tb.BendedModule(Coder())
    with pytest.raises(InputError, match="was not traced"):
        bended.script(fn="forward")
    with pytest.raises(InputError, match="was not traced"):
        bended.script()(x)
    with pytest.raises(InputError, match=r"nn~ loads TorchScript only"):
        bended.script(export_for_nn=True)
    bended.trace(x=x)
    scripted = bended.script()
    assert torch.equal(scripted(x=-x), bended.module(-x))
    assert str(scripted).startswith("exported: equal to the model")
    scripted.save(tmp_path / "coder.pt2")
    assert torch.equal(torch.export.load(tmp_path / "coder.pt2").module()(x=x), bended(x))
    bended.trace("encode", x)
    assert torch.equal(bended.script(fn="encode")(x), bended.module.encode(x))


def test_programs_of_several_methods_take_parameters(x: Tensor) -> None:
    bended, gain = tb.BendedModule(Coder()), tb.BendingParameter("gain", 2.0)
    bended.trace(x=x)
    bended.trace("encode", x)
    bended.bend(tb.Scale(gain), "pre$")
    scripted = bended.script(script=False)
    before = bended.encode(x)
    assert tb.compare_outs(scripted.encode(x), before)
    scripted.set_gain(0.0)
    assert (scripted.get_gain(), gain.value) == (0.0, 2.0)
    bended.reset()
    gain.value = 0.0
    with bended.bend(tb.Scale(gain), "pre$"):
        assert tb.compare_outs(scripted.encode(x), bended.encode(x))
        assert tb.compare_outs(scripted.forward(x), bended(x))
    assert not tb.compare_outs(scripted.encode(x), before)
    with pytest.raises(AttributeError, match="methods are forward, encode"):
        scripted.decode(x)


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.pre(x)
        kind = torch.distributions.Normal if x.sum() > 0 else torch.distributions.Laplace
        return {"made": [kind(y, torch.ones_like(y))], "y": (y,)}


def test_a_program_returns_the_distributions_of_the_method(x: Tensor) -> None:
    bended, x = tb.BendedModule(Sampler()), x.abs()
    bended.trace(x=x)
    bended.bend(tb.Scale(2.0), "pre$")
    scripted = bended.script()
    assert tb.compare_outs(scripted(x=x * 2), bended(x * 2))
    assert type(scripted(x=x)["made"][0]) is torch.distributions.Normal
    with pytest.raises(InputError, match="returned a Normal when it was traced, and no program"):
        bended.script(((), {"x": -x}))(x=-x)


def test_outputs_are_compared_by_kind_and_value() -> None:
    normal = torch.distributions.Normal
    one, near = torch.ones(2), torch.ones(2) + 2e-5
    same = [
        (1, 1), ([one], [one]), ({"a": one}, {"a": one}), ("a", "a"), (None, None),
        (normal(one, one), normal(one, one)),
    ]  # fmt: skip
    assert all(tb.compare_outs(*pair) for pair in same)
    other = [
        (2, 2.1), (one[0], 1.0), ([one], [one, one]), ({"a": one}, {"b": one}), (one, one[:1]),
        (normal(one, one), normal(near * 2, one)), (one, near),
    ]  # fmt: skip
    assert not any(tb.compare_outs(*pair) for pair in other)
    assert tb.compare_outs(1.0, 1.0 + 5e-6, allow_almost_equal=True)
    assert not tb.compare_outs(True, 1)
    assert tb.compare_outs(True, 1, allow_subclasses=True)


def test_what_takes_a_bended_module_takes_this_one(x: Tensor) -> None:
    bended = tb.BendedModule(Coder())
    gain = tb.BendingParameter("gain", 1.0)
    with bt.workflows.bending_session(bended, {"pre$": tb.Scale(gain)}) as session:
        session.set(gain=0.0)
        assert torch.equal(session(x), session(-x))
    assert torch.equal(bended(x), bended.module(x))
    out = bended.get_activations(bended.pre, args=(x,))
    assert torch.equal(out["pre"], bended.module.pre(x))
    handle = bended.bend(tb.Scale(0.0), "pre", weights=False)
    assert repr(handle) == "<bend Scale(scale=0.0) at 'pre', active>"
    assert bended.bended_keys() == ["pre"]
    bended(x)
    assert handle.report().fired == 1
    handle.remove()
    with pytest.warns(bt.errors.NeverFiredWarning, match="was never called"):
        with bended.bend(tb.Scale(0.0), "pre$"):
            pass


# Activations


def test_activations_are_those_before_the_bends_of_the_node(x: Tensor) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Tanh()).train()
    bended = tb.BendedModule(model)
    bended.trace(x)
    bended.bend(tb.Bias(1.0), "0")
    for _ in range(2):
        out = bended.get_activations("0", "1", input=x)
        assert list(out) == ["0", "1", "0_bended"]
        assert torch.equal(out["0_bended"], out["0"] + 1)  # of one run
        assert torch.equal(out["1"], out["0_bended"].tanh())
    assert list(bended.get_activations("0_bended", input=x)) == ["0_bended"]
    assert list(bended.get_activations("0", input=x, _filter_bended=True)) == ["0"]
    assert bended.activation_shape("0_bended") == x.shape
    with pytest.raises(InputError, match="has no activation 'tan'"):
        bended.get_activations("tan", input=x)
    with pytest.raises(InputError, match="'forward' was not traced"):
        tb.BendedModule(model).get_activations("0", input=x)


def test_parts_of_outputs_and_passes_have_names_of_their_own(x: Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.act = nn.LSTM(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.act(self.lstm(x)[0])
            return x

    bended = tb.BendedModule(Twice())
    bended.trace(x)
    bended.bend(tb.Bias(1.0), "lstm", "act", bend_param=False)
    out = bended.get_activations("act", "lstm", x=x)
    assert torch.equal(out["act_1_bended"], bended(x))
    assert torch.equal(out["act_bended"], out["act"] + 1)
    assert torch.equal(out["lstm_bended"][0], out["lstm"][0] + 1)


class Rounds(nn.Module):
    """A loop, and a function that is called after it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(4, 4)

    def forward(self, x: Tensor, edit: Any = lambda name, value: value) -> Tensor:
        for number in range(3):
            x = edit(f"conv_{number}", self.conv(x))
            x = edit(f"relu_{number}", torch.relu(x)) + 1
        return edit("relu_3", torch.relu(x)).tanh()


@pytest.mark.more
@pytest.mark.parametrize(
    ("pattern", "bent"),
    some(
        [
            ("relu$", ["relu_0"]), ("relu_1", ["relu_1"]), ("relu_3$", ["relu_3"]),
            ("conv_2$", ["conv_2"]), ("conv$", ["conv_0"]), ("relu_(1|3)", ["relu_1", "relu_3"]),
            ("relu", [f"relu_{number}" for number in range(4)]),
            ("conv_[12]", ["conv_1", "conv_2"]),
        ],
        8,
        start=5,
    ),
)  # fmt: skip
def test_a_round_of_a_loop_has_the_name_that_torchbend_gives_it(
    x: Tensor, pattern: str, bent: list[str]
) -> None:
    model, values = Rounds(), dict[str, Tensor]()
    wanted = model(x, lambda name, value: value + (name in bent))
    bended = tb.BendedModule(model)
    bended.trace(x=x)
    names = [f"{kind}{number}" for kind in ("conv", "relu") for number in ("", "_1", "_2")]
    assert bended.activation_names()[1:7] == names
    assert str(bended.print_activations()).count("relu_") == 3
    model(x, lambda name, value: values.setdefault(name, value))
    for name in [*names, "relu_3"]:
        value = bended.get_activations(f"{name}$", x=x)[name]
        assert torch.equal(value, values[name if name[-1].isdigit() else f"{name}_0"])
        assert torch.equal(bended.from_activations(name, **{name: value}, x=x), model(x))
    bended.bend(tb.Bias(1.0), pattern, bend_param=False)
    assert sorted(bended.bended_keys()) == [name.removesuffix("_0") for name in bent]
    bended.save_config_as("one")
    bended.reset_bending()
    assert torch.equal(bended(x), model(x))
    bended.config = "one"
    assert vars(model).keys() == vars(Rounds()).keys()  # nothing of it is in the model
    for _ in range(2):
        assert torch.equal(bended(x), wanted)
    if pattern == "relu":
        with pytest.raises(InputError, match="relu, relu_1, relu_2 are bent together"):
            bended.reset("relu_1")
        bended.reset("relu(_[12])?")
        assert bended.bended_keys() == ["relu_3"]
    else:
        bended.reset(bended.bended_keys()[0])
        assert len(bended.bended_keys()) == len(bent) - 1


def test_activations_can_be_asked_for_under_a_name_of_their_own(x: Tensor) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    bended.trace("encode", x)
    out, graph = bended.get_activations(
        "pre", x=x, fn="encode", _return_graph=True, _save_as_method="getter"
    )
    assert str(graph) == str(bended.graph("encode"))
    assert torch.equal(out["pre"], model.pre(x))
    assert torch.equal(bended.getter(x=-x)["pre"], model.pre(-x))
    bended.from_activations("pre", pre=x, fn="encode", _save_as_method="rest")
    assert torch.equal(bended.rest(pre=-x), torch.relu(-x + 1) + 1)
    with pytest.raises(InputError, match="taken"):
        bended.get_activations("pre", x=x, fn="encode", _save_as_method="encode")


def test_callbacks_are_given_arguments_with_the_activations(x: Tensor) -> None:
    class Shifted(tb.BendingCallback):
        def forward(self, x: Tensor, name: Any = None, by: float = 0.0, text: str = "") -> Tensor:
            return x + by

    class Times(tb.BendingCallback):
        def forward(self, x: Tensor, name: Any = None, by: float = 1.0) -> Tensor:
            return x * by

    bended = tb.BendedModule(nn.Sequential(nn.ReLU(), nn.Tanh()))
    bended.trace(x)
    bended.bend(Shifted(), "0", "1")
    assert torch.equal(bended(x), x.relu().tanh())
    known = {"0": x}
    assert torch.equal(bended.from_activations("0", input=x, **known, by=2.0), (x + 2).tanh())
    one = bended.from_activations("0", "1", input=x, **known, **{"1": x, "1_by": 3.0, "0_by": 9.0})
    assert torch.equal(one, x + 3)
    bended.bend(Times(), "1")
    out = bended.from_activations("1", input=x, **{"1": x}, by=[2.0, 3.0], text="a")
    assert torch.equal(out, (x + 2) * 3)
    assert torch.equal(bended(x), x.relu().tanh())
    with pytest.raises(InputError, match="takes 'bye'"):
        bended.from_activations("1", input=x, **{"1": x}, bye=2.0)
    assert torch.equal(bended.from_activations({"sub_1": x}, x), x)  # as it is
    with pytest.raises(InputError, match="is given no value for '1'"):
        bended.from_activations("1", input=x)


def test_examples_of_a_batch_are_mixed_by_given_weights(x: Tensor) -> None:
    bended = tb.BendedModule(nn.Sequential(nn.ReLU(), nn.Tanh()))
    bended.trace(x)
    bended.bend(tb.InterpolateActivation(), "0")
    assert torch.equal(bended(x), x.relu().tanh())
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    out = bended.from_activations("0", input=x, **{"0": x}, interp_weights=weights)
    assert torch.equal(out, torch.stack([x[1], (x[0] + x[2]) / 2]).tanh())


# Callbacks


def test_captures_are_named_by_method_and_activation(x: Tensor) -> None:
    model = Coder()
    bended, seen = tb.BendedModule(model), tb.Capture()
    bended.trace(x)
    bended.trace("encode", x)
    bended.bend(seen, "pre", "layers_1")
    assert not bended.bended_params
    with bended.capture(seen):
        for _ in range(2):
            bended(x)
            bended.encode(-x)
    bended(x)
    twice = torch.cat([model.pre(-x)] * 2)
    assert list(seen.captures) == ["forward:pre", "forward:layers_1", "encode:pre"]
    assert torch.equal(seen.captures["encode:pre"], twice)
    with pytest.raises(KeyError, match="nothing"):
        seen.captures["nothing"]
    assert list(copy.deepcopy(seen).captures)[1] == "forward:layers_1"
    with pytest.raises(InputError, match="does not capture"), bended.capture(tb.Capture()):
        pass


def test_mixtures_of_captures_belong_to_a_method(x: Tensor) -> None:
    bended, mix = tb.BendedModule(Coder()), tb.InterpolationFromCapture()
    bended.trace(x)
    bended.trace("encode", x)
    bended.bend(mix, "pre")
    with bended.capture():
        bended(x)
        bended.encode(2 * x)
    weights = torch.tensor([[100.0, 0.0, 0.0]])
    out = bended.from_activations("pre", x=x, pre=weights, fn="encode")
    assert torch.equal(out, torch.relu(Coder.encode(bended.module, 2 * x)[:1] - 1) + 1)


def test_masks_differ_from_method_to_method_and_not_for_weights(x: Tensor) -> None:
    model = Coder()
    bended, mask = tb.BendedModule(model), tb.Mask(0.5, seed=None)
    ones = torch.ones(40, 4)
    for fn in ("forward", "encode"):
        bended.trace(ones, fn=fn)
    bended.bend(mask, "pre$")
    kept = [bended.get_activations("pre_bended", x=ones, fn=fn) for fn in ("forward", "encode")]
    first, second = (one["pre_bended"] == 0 for one in kept)
    assert 0 < first.sum() < 160
    assert not torch.equal(first, second)
    bended.reset()
    bended.bend(tb.Mask(0.5), "pre.weight")
    weight = bended.bended_state_dict()["pre.weight"]
    assert torch.equal(
        bended.encode(x), torch.relu(nn.functional.linear(x, weight, model.pre.bias) + 1) + 1
    )
    bended.reset()
    bended.bend(tb.OrderedMask(0.0, dim=-2), "gain", "pre.weight")
    assert not bended.scaled(x).any()


def test_a_callback_says_what_can_control_it_and_what_it_has_no_use_for() -> None:
    assert tb.Affine.controllable_params == {"bias": None, "scale": None}
    assert tb.Mask.controllable_params == {"prob": None}
    param = tb.BendingParameter("a", 1.0)
    assert tb.Bias(param).controllables == {"bias": param}
    assert tb.Bias(param).get("bias") == 1.0
    chain = tb.Scale(2.0) >> tb.Bias(1.0)
    assert isinstance(chain, tb.CallbackChain)
    assert isinstance(tb.Scale(), bt.bends.Scale)
    assert isinstance(chain, tb.BendingCallback)
    assert not chain.jit_compatible
    assert torch.equal(chain(torch.ones(2)), torch.full((2,), 3.0))
    with pytest.raises(InputError, match=r"Drawn.apply would never be called"):
        type("Drawn", (tb.BendingCallback,), {"apply": lambda self: None})
    with pytest.raises(InputError, match="neither bend_input"):
        tb.BendingCallback()(torch.ones(2))


class UpClamp(tb.BendingCallback):
    """The callback of torchbend's notebook: a mask for each weight, that follows a parameter."""

    controllable_params = ("threshold",)

    def __init__(self, threshold: Any) -> None:
        super().__init__()
        self.threshold, self.masks, self.shapes = threshold, [], {}

    def register_weight(self, parameter: Any, name: str = "", cache: bool = True) -> str:
        name = super().register_weight(parameter, name=name, cache=cache)
        self.masks.append((parameter.data > self.get("threshold")).float())
        return name

    def register_activation(self, name: str, shape: torch.Size) -> str:
        self.shapes[name] = shape
        return super().register_activation(name, shape)

    def update(self) -> None:
        for index, mask in enumerate(self.masks):
            mask.set_((self.get_cache(index) > self.get("threshold")).float())

    def apply_to_param(self, idx: int, param: Tensor, cache: Tensor | None) -> None:
        assert cache is not None
        param.set_(cache * self.masks[idx])

    def bend_input(self, x: Tensor, name: str | None = None) -> Tensor:
        return x * (x < self.get("threshold")).float()


def test_callbacks_have_state_for_what_they_bend(x: Tensor) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    bended.trace(x=x)
    threshold = tb.BendingParameter("threshold", 0.1)
    bended.bend(callback := UpClamp(threshold), "layers_1$", "layers.0.weight", "pre.weight")
    for value in (0.1, -0.1, 0.1):
        bended.update("threshold", value)
        weights = [one.weight * (one.weight > value) for one in (model.pre, model.layers[0])]
        inner = nn.functional.linear(x, weights[0], model.pre.bias)
        outer = nn.functional.linear(inner, weights[1], model.layers[0].bias).tanh()
        assert torch.equal(bended(x), outer * (outer < value))
    assert callback.shapes == {"layers_1": (3, 4)}
    assert len(callback.masks) == 2


def test_parameters_keep_their_type() -> None:
    whole, real, truth = (tb.BendingParameter("a", value) for value in (1, 1.0, True))
    whole.set_value(2.0)
    real.set_value(3)
    assert type(whole.get_python_value()) is int
    assert type(real.get_python_value()) is float
    assert type(tb.BendingParameter("a", torch.ones(())).get_python_value()) is float
    for parameter, value in ((whole, 2.5), (truth, 1), (real, 1j)):
        with pytest.raises(tb.BendingParameterException, match="make it with a"):
            parameter.set_value(value)
    with pytest.raises(tb.BendingParameterException, match="outside the range"):
        tb.BendingParameter("a", 1, range=[0, None]).set_value(-1)
    assert whole.value == 2
    assert truth.value is True


# Configurations, versions, copies


def test_configurations_by_name(x: Tensor, tmp_path: Path) -> None:
    model = Coder()
    bended = tb.BendedModule(model)
    for fn in ("forward", "encode"):
        bended.trace(x, fn=fn)
    plain = bended.encode(x)
    bended.bend(tb.Scale(0.0), "encode:pre", "layers.0.weight")
    quiet = bended(x), bended.encode(x)
    bended.save_config_as("quiet")
    with pytest.raises(InputError, match="force=True"):
        bended.save_config_as("quiet")
    bended.reset_bending()
    bended.bend(tb.Bias(1.0), "pre$")
    other = bended.encode(x)
    with bended.set_config("quiet"):
        assert bended.config == "quiet"
        assert all(map(torch.equal, (bended(x), bended.encode(x)), quiet))
    assert bended.config == "_default"
    assert torch.equal(bended.encode(x), other)
    bended.config = "quiet"
    assert torch.equal(bended.encode(x), quiet[1])
    bended.bending_config().save(tmp_path / "quiet.json")
    with pytest.raises(InputError, match="no configuration 'loud'"):
        bended.config = "loud"
    bended.config = None
    assert torch.equal(bended.encode(x), other)
    bended.reset()
    assert torch.equal(bended.encode(x), plain)
    loaded = tb.BendingConfig.load(tmp_path / "quiet.json", module=bended)
    assert "encode:pre" in loaded
    assert "forward:pre" not in loaded
    assert "gain" not in loaded
    bended.bend(loaded)
    assert all(map(torch.equal, (bended(x), bended.encode(x)), quiet))


def test_bound_configurations_are_equal_if_they_bend_the_same() -> None:
    bended = tb.BendedModule(Coder())
    one, two = tb.Mask(0.3), tb.Mask(0.2)
    given = tb.BendingConfig((one, ".*weight"), (two, "pre.weight"))
    same = tb.BendingConfig((one, "pre.weight", "layers.0.weight"), (two, "pre.weight"))
    assert given != same
    given.bind(bended)
    same.bind(bended)
    assert given == same
    assert given.op_from_key("pre.weight") == [one, two]
    assert one in given
    assert tb.BendingConfig(given).bends == given.bends
    with pytest.raises(InputError, match="bind"):
        tb.BendingConfig((one, "pre")).op_from_key("pre")


def test_versions_have_their_weights_and_bends(x: Tensor) -> None:
    model, other = Coder(), Coder()
    before = copy.deepcopy(model.state_dict())
    bended = tb.BendedModule(model)
    plain, foreign = bended.encode(x), other.encode(x)
    bended.bend(tb.Scale(2.0), "pre.weight")
    with pytest.raises(InputError, match="never written to"):
        bended.write()
    bended.write("double")
    assert bended.version == "double"
    assert not bended.bending_callbacks
    double = bended.encode(x)
    doubled = bended.state_dict()["pre.weight"]
    assert torch.equal(doubled, before["pre.weight"] * 2)
    assert torch.equal(bended.state_dict("_default")["pre.weight"], before["pre.weight"])
    bended.bend(tb.Scale(0.0), "pre.weight")
    zero = bended.encode(x)
    bended.version = None
    assert torch.equal(bended.encode(x), plain)
    assert not bended.bended_params
    bended.create_version("other", other)
    with bended.set_version("other"):
        assert torch.equal(bended.encode(x), foreign)
        assert torch.equal(bended(x), other(x))
    with bended.set_version("double"):
        assert torch.equal(bended.encode(x), zero)
        bended.reset()
        assert torch.equal(bended.encode(x), double)
    with bended.interpolate(1.0, other=3.0):
        mixed = bended.bended_state_dict()["pre.weight"]
    share = before["pre.weight"] * 0.25 + other.state_dict()["pre.weight"] * 0.75
    assert torch.equal(mixed, share)
    bended.bend(tb.Scale(0.0), "pre.weight")
    with pytest.raises(InputError, match="weights are bent"):
        bended.interpolate(1.0, other=3.0)
    bended.reset()
    with (
        bended.interpolate(1.0, other=3.0),
        pytest.raises(InputError, match="a mixture of versions is in use"),
    ):
        bended.bend(tb.Scale(0.0), "pre.weight")
    with pytest.raises(InputError, match="there is no version 'none'"):
        bended.version = "none"
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    with pytest.raises(InputError, match=r"differs in \['weight', 'bias'"):
        bended.create_version("wrong", nn.Linear(2, 2))
    assert bended.create_version("wrong", nn.Linear(2, 2), strict=False) == ["weight", "bias"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", [Coder, Pair, Whole])
def test_copies_have_the_bends_of_all_methods(x: Tensor, way: str, kind: Any) -> None:
    bended = tb.BendedModule(kind())
    bended.trace("encode", x)
    bended.bend(tb.Bias(tb.BendingParameter("bias", 3.0)), ".*pre$", fn="encode")
    bended.bend(tb.Scale(0.5), ".*weight")
    bended.save_config_as("one")
    out = bended.encode(x)
    made = copy.deepcopy(bended) if way == "deepcopy" else pickle.loads(pickle.dumps(bended))
    assert torch.equal(made.encode(x), out)
    made.update("bias", 0.0)
    assert not torch.equal(made.encode(x), out)
    assert torch.equal(bended.encode(x), out)
    made.reset_bending()
    assert torch.equal(made.encode(x), made.module.encode(x))
    assert made.module is not bended.module
    with made.set_config("one"):
        assert made.bended_keys("encode") == bended.bended_keys("encode")


def test_the_graph_is_one_of_torch_fx_also_with_its_bends(x: Tensor) -> None:
    pytest.importorskip("tabulate")
    bended = tb.BendedModule(Rounds())
    bended.trace(x=x)
    graph = bended.graph()
    assert isinstance(graph, torch.fx.Graph)
    graph.print_tabular()
    calls = [node for node in graph.nodes if node.op == "call_module"]
    assert [node.name for node in calls] == ["conv", "conv_1", "conv_2"]
    assert all(node.target == "conv" for node in calls)
    assert calls[1].args[0].name == "add"
    assert graph.flow_steps == []
    bended.bend(tb.Bias(1.0), "conv_1$", "relu_3", bend_param=False)
    bent = bended.bend_graph()
    nodes = {node.name: node for node in bent.nodes}
    assert nodes["conv_1_bended"].args == (nodes["conv_1"],)
    assert nodes["relu_1"].args == (nodes["conv_1_bended"],)
    assert nodes["tanh"].args == (nodes["relu_3_bended"],)
    assert len(nodes) == len(graph.nodes) + 2


def test_added_configurations_are_bound(x: Tensor) -> None:
    bended, other = tb.BendedModule(Coder()), tb.BendedModule(Coder())
    bended.trace(x)
    mask = tb.Mask(0.5)
    with bended.bend(mask, "pre.weight"):
        assert bended.bending_config().op_from_key("pre.weight") == [mask]
    one, two = tb.BendingConfig((mask, "pre.weight")), tb.BendingConfig((mask, "layers_1"))
    assert (one + two) == tb.BendingConfig((mask, "pre.weight"), (mask, "layers_1"))
    (added := one + two).bind(bended)
    assert added.op_from_key("pre.weight") == added.op_from_key("forward:layers_1") == [mask]
    one.bind(bended)
    assert (one + two).module is bended
    two.bind(other)
    with pytest.raises(tb.BendingError, match="bound to different models"):
        one + two
