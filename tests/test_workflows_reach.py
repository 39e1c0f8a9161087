"""What values depend on, and what depends on them: nodes by the mirror, elements by following."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError, NodePathError
from bendtrace.paths.nodes import NodePath
from bendtrace.workflows import ancestry, influence, receptive_field
from tests.lens_models import Patient, Transformer, made, tokens
from tests.promise import bits, state
from tests.shares import some

# Elements


def jacobian(model: Any, x: Tensor, index: Any) -> Tensor:
    """What gradients say; right for smooth models with weights none of which is zero."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x)[index].sum(), x)
    return grad != 0


def closed(layers: list[dict[str, int]], place: int) -> tuple[int, int]:
    """First and last position that a position of the output of convolutions depends on."""
    low = high = place
    for layer in reversed(layers):
        low = low * layer["stride"] - layer["padding"]
        high = high * layer["stride"] - layer["padding"]
        high += (layer["kernel_size"] - 1) * layer["dilation"]
    return low, high


@pytest.mark.parametrize("seed", range(6))
def test_fields_of_convolutions_follow_the_closed_formula(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers = [
        {"kernel_size": rng.choice([2, 3, 4]), "stride": rng.choice([1, 1, 2]),
         "padding": rng.choice([0, 1, 2]), "dilation": rng.choice([1, 1, 2])}
        for _ in range(3)
    ]  # fmt: skip
    parts: list[nn.Module] = []
    channels = 1
    for layer in layers:
        parts += [nn.Conv1d(channels, 2, **layer), nn.ReLU()]
        channels = 2
    model = nn.Sequential(*parts)
    length = 60
    x = torch.zeros(1, 1, length)  # at which most of what gradients would say is hidden
    place = model(x).shape[-1] // 2
    field = receptive_field(model, x, (0, 1, place))
    low, high = closed(layers, place)
    (_, _, along) = field.bounds() or ()
    assert (along.start, along.stop - 1) == (max(low, 0), min(high, length - 1))
    assert field.coarse == {}
    smooth = nn.Sequential(*(nn.Tanh() if isinstance(p, nn.ReLU) else p for p in parts)).double()
    wanted = jacobian(smooth, torch.randn(1, 1, length, dtype=torch.float64), (0, 1, place))
    assert torch.equal(field.mask, wanted)


@pytest.mark.more
def test_maxima_norms_and_strides_in_two_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(),
    ).eval()  # fmt: skip
    field = receptive_field(model, torch.randn(1, 1, 16, 16), (0, 0, 3, 4))
    assert field.size() == (1, 1, 8, 8)
    assert field.bounds() == (slice(0, 1), slice(0, 1), slice(3, 11), slice(5, 13))
    assert int(field.mask.sum()) == 64
    model.train()  # now the norm looks at all of the batch
    everywhere = receptive_field(model, torch.randn(2, 1, 8, 8), (0, 0, 1, 1))
    assert bool(everywhere.mask.all())


def test_what_a_relu_or_a_maximum_hides_is_found_and_a_weight_of_zero_is_not() -> None:
    x = torch.tensor([-1.0, -2.0, 5.0])
    assert receptive_field(lambda x: x.relu(), x, 1).mask.tolist() == [False, True, False]
    assert not jacobian(lambda x: x.relu(), x, 1).any()
    assert receptive_field(lambda x: x.max(), x, ()).mask.all()
    assert receptive_field(lambda x: x.argmax(), x, ()).mask.all()
    assert receptive_field(lambda x: x.sort().values, x, 0).mask.all()
    assert receptive_field(lambda x: x[0] * x[1:].relu().sum(), x, ()).mask.all()
    assert receptive_field(lambda x: (x > 0)[2] * 1, x, ()).mask.tolist() == [False, False, True]
    assert receptive_field(lambda x: x.round()[0], x, ()).mask.tolist() == [True, False, False]
    weight = torch.tensor([1.0, 0.0, 2.0])
    assert receptive_field(lambda x: x @ weight, x, ()).mask.tolist() == [True, False, True]
    assert not receptive_field(lambda x: torch.zeros_like(x), x, 0).mask.any()
    assert not receptive_field(lambda x: x * 0 + x.shape[0], x, 0).mask.any()


def test_a_causal_transformer_looks_back_only() -> None:
    model = made(Transformer)
    x = tokens(2, 6)
    before = state(model), torch.get_rng_state()
    for place in (0, 2, 5):
        field = receptive_field(model, x, (1, place, 3))
        wanted = torch.zeros(2, 6, dtype=torch.bool)
        wanted[1, : place + 1] = True
        assert torch.equal(field.mask, wanted)
    assert bits([state(model), torch.get_rng_state()]) == bits(list(before))
    inner = receptive_field(model, x, (0, 3), node="blocks.0.value")
    assert inner.mask.nonzero().tolist() == [[0, 3]]


@pytest.mark.all
@pytest.mark.parametrize("attention", some(["eager", "sdpa"], 2, start=1))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models_of_hugging_face_look_back_only(name: str, attention: str) -> None:
    pytest.importorskip("transformers", reason="needs the test extra")
    from tests.hf_models import MODELS

    (found,) = (m for m in MODELS if m.name == name)
    model = found.make()
    model.set_attn_implementation(attention)
    batch = {"input_ids": found.inputs(length=5)["input_ids"], "use_cache": False}
    field = receptive_field(model, batch, (0, 2), node="output.logits")
    assert field.masks["input_ids"].tolist() == [[True] * 3 + [False] * 2, [False] * 5]


@pytest.mark.parametrize("seed", some(range(3), 3))
def test_smooth_models_agree_with_their_jacobian(seed: int) -> None:
    torch.manual_seed(seed)
    mix = torch.randn(5, 5, dtype=torch.float64) * (torch.rand(5, 5) > 0.6)

    def model(x: Tensor) -> Tensor:
        h = torch.tanh(x @ mix)
        parts = h.unbind(1)
        h = torch.stack([parts[0] * parts[2], parts[1].exp(), parts[3] + parts[4].sin()], 1)
        return h.flip(0).cumsum(0).view(-1)[::2]

    x = torch.randn(4, 5, dtype=torch.float64)
    for index in range(len(model(x))):
        field = receptive_field(model, x, index, seed=seed)
        assert torch.equal(field.mask, jacobian(model, x, index))


def test_a_recurrent_layer_looks_at_the_steps_so_far() -> None:
    lstm = nn.LSTM(2, 3)
    field = receptive_field(lstm, torch.randn(5, 2, 2), (2, 1, 0), node="output.sub_0")
    wanted = torch.zeros(5, 2, 2, dtype=torch.bool)
    wanted[:3, 1] = True
    assert torch.equal(field.mask, wanted)


class Loops(nn.Module):
    """A convolution, as many times as the values want, and only on one side of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        nn.init.constant_(self.conv.weight, 0.5)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if gate.sum() > 0:
            while x.abs().max() > 1:
                x = torch.relu(self.conv(x)) / 2
        return x + 1


def test_a_loop_widens_the_field_and_what_decides_is_listed_apart() -> None:
    gate = torch.ones(2)
    for size in (0.5, 1.2, 2.0, 3.0):
        value, passes = torch.full((1, 1, 15), size), 0
        while value.abs().max() > 1:
            value, passes = torch.relu(Loops().conv(value)) / 2, passes + 1
        field = receptive_field(Loops(), (torch.full((1, 1, 15), size), gate), (0, 0, 7))
        assert field.size("x") == (1, 1, min(1 + 2 * passes, 15))
        assert not field.masks["gate"].any()
        texts = [step.text for step in field.decisions]
        assert texts == ["gate.sum() > 0"] + ["x.abs().max() > 1"] * (passes + 1)
    shut = receptive_field(Loops(), (torch.full((1, 1, 15), 9.0), -gate), (0, 0, 7), of="x")
    assert shut.size() == (1, 1, 1)
    assert [step.text for step in shut.decisions] == []  # of x alone
    assert "block (1, 1, 1)" in repr(shut)


def test_writing_in_place_is_followed_and_through_other_views_said_to_be_coarse() -> None:
    def writes(x: Tensor) -> Tensor:
        h = x * 2
        h[0] = 7
        h[1] = h[2] + h[3]
        h.add_(1)
        return h

    x = torch.randn(5)
    for index, wanted in ((0, []), (1, [2, 3]), (4, [4])):
        field = receptive_field(writes, x, index)
        assert field.mask.nonzero().flatten().tolist() == wanted
        assert not field.coarse

    def through_a_view(x: Tensor) -> Tensor:
        h = x * 2
        h.view(-1)[0] = h[1]
        return h

    field = receptive_field(through_a_view, x, 0)
    assert field.mask[1]
    assert any("another view" in why for why in field.coarse.values())


def test_sizes_that_depend_on_values_are_said_to_be_coarse() -> None:
    field = receptive_field(lambda x: x[x > 0].sum(), torch.tensor([1.0, -1.0, 2.0]), ())
    assert field.mask.all()
    assert field.coarse
    assert "coarse" in repr(field)


def test_indices_are_followed_where_they_read_and_coarse_where_they_write() -> None:
    table = torch.randn(6, 2)
    ids = torch.tensor([1, 4, 1])
    assert receptive_field(lambda i: table[i], ids, (1, 0)).mask.tolist() == [False, True, False]
    assert receptive_field(lambda i: i == 3, ids, 2).mask.tolist() == [False, False, True]
    assert receptive_field(lambda x: x == 0.5, torch.zeros(2), 1).mask.tolist() == [False, True]

    def writes(x: Tensor, to: Tensor) -> Tensor:
        return torch.zeros(4).index_add(0, to, x)

    given = (torch.randn(3), torch.tensor([0, 1, 1]))
    # Another place could be 2 as well, though none is.
    field = receptive_field(writes, given, 2)
    assert field.masks["to"].all()
    assert any("integers" in why for why in field.coarse.values())
    alone = receptive_field(writes, given, 1, of="x")
    assert alone.mask.tolist() == [False, True, True]
    assert not alone.coarse


def test_an_audio_transform_has_the_field_of_its_window() -> None:
    window = torch.hann_window(8)

    def model(x: Tensor) -> Tensor:
        return torch.stft(x, 8, 4, window=window, center=False, return_complex=True).abs()

    field = receptive_field(model, torch.randn(32), (1, 2))
    assert field.mask.nonzero().flatten().tolist() == list(range(9, 16))  # the window begins with 0


def test_dropout_in_training_is_as_it_was_drawn() -> None:
    model = nn.Dropout(0.5).train()
    x = torch.ones(40)
    torch.manual_seed(3)
    wanted = model(x) != 0
    for index in (0, 1, 2, 3):
        torch.manual_seed(3)
        field = receptive_field(model, x, index)
        assert bool(field.mask.any()) == bool(wanted[index])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"index": (9, 9)}, bt.errors.InputError, "not an index into"),
        ({"index": slice(3, 3)}, bt.errors.InputError, "selects no element"),
        ({"of": "y"}, bt.errors.InputError, "no input is called 'y'; the inputs are input"),
        ({"node": "nothing"}, bt.errors.NodePathError, "no node 'nothing'"),
        ({"node": 3}, bt.errors.InputError, "given by name"),
    ],
)
def test_what_is_no_field_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        receptive_field(
            nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), **{"index": (0, 0), **options}
        )


def test_a_value_of_several_tensors_has_to_be_named() -> None:
    def model(x: Tensor) -> Any:
        return {"a": x + 1, "b": (x[0] * 2, x)}

    x = torch.ones(3)
    with pytest.raises(InputError, match="not one tensor"):
        receptive_field(model, x, 0)
    assert receptive_field(model, x, 1, node="output.a").mask.tolist() == [False, True, False]
    assert receptive_field(model, x, (), node="output.b.sub_0").mask.tolist()[0]


# Nodes


def diamond(x: Tensor, y: Tensor) -> Any:
    left = x.relu()
    right = y.tanh()
    both = left + right
    if y.sum() > 0:
        both = both * 2
    size = x.shape[0]
    return both, left.sin(), right.expand(size, -1)


def test_ancestors_are_those_of_the_dag_and_conditions_are_apart() -> None:
    trace = bt.trace(diamond, torch.ones(2), torch.ones(1, 2))
    found = ancestry(trace, "mul")
    assert set(found.nodes) == {"x", "y", "relu", "tanh", "add"}
    assert found.inputs == ("x", "y")
    assert [step.text for step in found.decisions] == ["y.sum() > 0"]
    assert set(found.deciding) == {"sum", "gt", "bool"}
    assert "relu" in found
    assert len(found) == 5
    left = ancestry(trace, "sin")
    assert set(left.nodes) == {"x", "relu"}
    assert left.decisions == ()
    assert left.deciding == ()
    expanded = ancestry(diamond, "expand", (torch.ones(2), torch.ones(1, 2)))
    assert expanded.inputs == ("y",)  # x gives a size only, which is no value


def test_descendants_reach_outputs_and_branches() -> None:
    trace = bt.trace(diamond, torch.ones(2), torch.ones(1, 2))
    left = influence(trace, "relu")
    assert set(left.nodes) == {"add", "mul", "sin"}
    assert left.outputs == ("output.sub_0", "output.sub_1")
    assert left.decisions == ()
    right = influence(trace, "y")
    assert right.outputs == ("output.sub_0", "output.sub_2")
    assert [step.text for step in right.decisions] == ["y.sum() > 0"]
    total = influence(trace, "sum")
    assert total.outputs == ()
    assert total.under == ("mul",)


def test_a_loop_s_condition_decides_its_passes() -> None:
    trace = bt.trace(Loops(), torch.full((1, 1, 9), 3.0), torch.ones(1))
    out = ancestry(trace, "output")
    texts = {step.text for step in out.decisions}
    assert texts == {"gate.sum() > 0", "x.abs().max() > 1"}
    assert "gate" in out.deciding
    assert out.states == ("conv_weight", "conv_bias") or set(out.states) == {
        name for name in trace.names if "weight" in name or "bias" in name
    }
    weights = influence(trace, "conv.weight")
    assert weights.outputs == ("output",)
    tests = [
        step
        for step in trace.flow_steps
        if step.text == "x.abs().max() > 1" and step.guard is not None
    ]
    assert list(weights.decisions) == tests[1:]  # the first test came before
    passes = influence(trace, "conv")
    assert len(passes.of) == len(tests) - 1
    assert set(influence(trace, "conv:2").nodes) < {*passes.nodes, *passes.of}


def test_what_did_not_leave_a_loop_or_a_function_decides_as_well() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if y.sum() > 5:
                    break
                if y.prod() > 50:
                    return x
            return x + 1

    trace = bt.trace(Steps(), torch.ones(1, 2), torch.ones(2))
    texts = [
        [step.text for step in ancestry(trace, node).decisions]
        for node in ("layers_0", "layers_1", "layers_2", "add")
    ]
    one = ["y.sum() > 5", "y.prod() > 50"]
    assert texts == [[], one, one * 2, one * 2 + one]
    assert ancestry(trace, "layers_1").deciding[0] == "y"
    below = influence(trace, "y")
    assert set(below.under) == {"linear_1", "linear_2", "add"}


def test_written_memory_is_an_edge() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        h = x * 1
        h.view(-1)[0] = y[0]
        return h

    trace = bt.trace(model, torch.ones(2), torch.ones(2))
    assert influence(trace, "y").outputs == ("output",)
    assert set(ancestry(trace, "output").inputs) >= {"x"}
    later = bt.trace(lambda x, y: model(x, y) + 1, torch.ones(2), torch.ones(2))
    assert influence(later, "y").nodes[-1] == "add"
    assert set(ancestry(later, "add").inputs) == {"x", "y"}


def test_nodes_are_told_by_names_paths_and_modules() -> None:
    trace = bt.trace(made(Transformer), tokens())
    for node in ("blocks.0", "blocks_0", trace.tree.blocks_0):
        found = influence(trace, node)
        assert found.outputs == ("output",)
        assert all(name in trace.names for name in found.nodes)
    both = influence(trace, ["blocks_1.query", "blocks_1.value"])
    assert set(both.of) == {
        *influence(trace, "blocks_1.query").of,
        *influence(trace, "blocks_1.value").of,
    }
    masks = ancestry(trace, "blocks_0.masked_fill")
    assert "tokens" in masks.inputs
    softmax = [name for name in trace.names if name.startswith("softmax")]
    assert influence(trace, softmax[0]).of == (softmax[0],)
    with pytest.raises(NodePathError, match="did you mean"):
        influence(trace, "blocks_0.softmix")


def test_along_random_paths_ancestry_and_influence_are_each_other_s_opposite() -> None:
    model = made(Patient)
    for seed in range(3):
        trace = bt.trace(model, tokens(seed=seed))
        names = trace.names[:: max(1, len(trace.names) // 25)]
        above = {name: set(ancestry(trace, name).nodes) for name in names}
        below = {name: set(influence(trace, name).nodes) for name in names}
        for one in names:
            for other in names:
                assert (one in above[other]) == (other in below[one])


def test_what_is_missing_or_too_much_is_refused() -> None:
    trace = bt.trace(torch.relu, torch.ones(2))
    with pytest.raises(InputError, match="inputs already: do not pass inputs="):
        ancestry(trace, "relu", torch.ones(2))
    with pytest.raises(InputError, match="inputs="):
        influence(torch.relu, "relu")
    with pytest.raises(InputError, match="no node was given"):
        influence(trace, [])
    assert F.relu is not None


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda x: x[:, 1:] * torch.relu(x[:, :1]), [0, 2]),
        (lambda x: x[:, 1:] * (x[:, :1] > 0), [0, 2]),
        (lambda x: x[:, 1:] * ~(x[:, :1] < 0), [0, 2]),
        (lambda x: x[:, 1:].masked_fill(x[:, :1] < 0, 0.0), [0, 2]),
        (lambda x: torch.where(x[:, :1] > 0, x[:, 1:3], x[:, 3:5]), [0, 2, 4]),
        (lambda x: torch.where((x[:, :1] > 0) & (x[:, 1:2] > 0), x[:, 1:3], 0.0), [0, 1, 2]),
    ],
)
def test_what_a_mask_hides_for_these_inputs_is_in_the_field(model: Any, wanted: list[int]) -> None:
    x = torch.tensor([[-1.0, 0.3, 0.7, 0.2, -0.5]])
    found = receptive_field(model, x, (0, 1))
    assert found.mask[0].nonzero().flatten().tolist() == wanted
    assert not found.coarse


def test_a_node_of_the_tree_is_not_another_one_of_its_name_in_the_mirror() -> None:
    def model(x: Tensor, y: Tensor) -> Any:
        for _ in range(2):
            x = torch.relu(x - 1)
        return x, torch.relu(y)

    trace = bt.trace(model, torch.ones(2), torch.ones(2))
    assert ancestry(trace, "relu_1").inputs == ancestry(trace, "relu:2").inputs == ("x",)
    assert ancestry(trace, trace.tree.relu_1).inputs == ("y",)
    assert ancestry(trace, NodePath("relu_1")).inputs == ("y",)
    assert influence(trace, trace.tree.relu_1).outputs == ("output.sub_1",)
    assert influence(trace, trace.tree.relu).outputs == ("output.sub_0",)
    assert ancestry(trace, "relu_2").inputs == ("y",)


def test_a_part_of_the_output_comes_from_what_was_written_into_it() -> None:
    def model(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = torch.zeros(3), torch.zeros(3)
        a[0] = torch.relu(x)[0, 0]
        b[1] = y.sum()
        a[2] = 1.0
        return {"a": a, "b": b}

    trace = bt.trace(model, torch.ones(2, 3), torch.ones(2))
    assert ancestry(trace, "output|a").inputs == ("x",)
    assert ancestry(trace, "output.b").inputs == ("y",)
    assert ancestry(trace, "output").inputs == ("x", "y")
    assert ancestry(trace, ["output|a", "output|b"]).inputs == ("x", "y")
    assert influence(trace, "x").outputs == ("output.a",)
