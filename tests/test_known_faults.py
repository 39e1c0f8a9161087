"""What the models for this library are known to get wrong: none of it is wrong here.

TorchWatcher puts interjections into a symbolic trace, graphpatch and torchbend change compiled
copies, TackleBox keeps global state. Each fault is followed to where it would show: in outputs,
gradients, buffers, in what is called, and how often.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace import Inputs, Interjection, NodePass, node_selector
from bendtrace.compat.torchwatcher import (
    ForwardInterjection,
    WrappedForwardBackwardInterjection,
    WrappedForwardInterjection,
    interject_by_match,
    interject_by_module_class,
)
from tests.cut import Block, Cut, Experts, assert_as_by_hand, batches, run
from tests.promise import bits, state


class Scaled(ForwardInterjection):
    def process(self, name: str, module: nn.Module | None, inputs: Any) -> Any:
        return inputs * 2


# A function that is called in the root's forward cannot be matched


class Root(nn.Module):
    """Everything happens in the forward of the root itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) + torch.relu(x - 1) + (x + 1).relu()


@pytest.mark.parametrize("make", [Root, lambda: Root().forward, lambda: Root().__call__])
def test_functions_called_in_the_root_can_be_matched(make: Any) -> None:
    x = torch.linspace(-2, 2, 5)
    bended = interject_by_match(make(), node_selector.Activations.is_relu, Scaled())
    for _ in range(2):
        assert torch.equal(bended(x), 2 * x.relu() + 2 * (x - 1).relu() + 2 * (x + 1).relu())
    assert len(bended.insertions[0].report().paths) == 3


# A node with two inputs cannot be wrapped


class Both(WrappedForwardBackwardInterjection):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        first, second = inputs
        self.seen.append((first, second, outputs))
        return outputs + first - second

    def process_backward(self, name: Any, module: Any, grad_input: Any, grad_output: Any) -> Any:
        first, second = grad_input
        return first * 2, second * 3


class Grads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a * 2, b * 3


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mul", torch.mul), ("matmul", torch.matmul), ("linear", F.linear), ("div", Tensor.div),
        ("maximum", torch.maximum), ("sub", lambda a, b: a - b),
    ],
)  # fmt: skip
def test_nodes_of_two_inputs_can_be_wrapped(name: str, function: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return function(x.sin(), x.cos() + 2).exp()

    def by_hand(x: Tensor) -> Tensor:
        a, b = Grads.apply(x.sin(), x.cos() + 2)
        return (function(a, b) + a - b).exp()

    both, x = Both(), torch.linspace(0, 1, 9).view(3, 3)
    bended = bt.BendedModule(model)
    bended.interject(name, both)
    for _ in range(2):
        assert run(bended, model, x, 0) == run(by_hand, model, x, 0)
        a, b, out = both.seen.pop()
        assert torch.equal(a, x.sin())
        assert torch.equal(b, x.cos() + 2)
        assert torch.equal(out, function(a, b))


# Broad selectors match what was inserted


class Computes(Interjection):
    """Runs many torch functions and modules of its own, as an analyser would."""

    def __init__(self) -> None:
        self.probe = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.paths: list[str] = []

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        self.paths.append(at.path)
        return output + F.relu(torch.sin(output)).sum() * 0 + self.probe(output).sum() * 0


def test_broad_selectors_do_not_match_what_was_inserted() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(torch.sin(x)) + 1

    computes = Computes()
    bended = bt.BendedModule(model)
    bended(torch.ones(2, 4))  # one of the selectors looks ahead
    own = ["sin", "relu", "add"]
    broad: list[Any] = [
        lambda node: node.path != "", re.compile("."), ~node_selector.matches_name("nothing"),
        node_selector.first(re_all()) | node_selector.match_slice(re_all(), 1),
    ]  # fmt: skip
    handles = [bended.interject(where, computes) for where in broad]
    for calls in range(1, 4):
        computes.paths.clear()
        bended(torch.ones(2, 4))
        assert computes.paths == [path for path in own for _ in broad], calls
    for handle in handles:
        assert list(handle.report().paths) == own
        assert handle.report().fired == 3 * len(own)


def re_all() -> Any:
    return node_selector.matches_path(re.compile("."))


def test_what_an_insertion_inserted_is_no_node_for_later_ones() -> None:
    bended = bt.BendedModule(Root())
    bended.interject("relu", nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    x = torch.ones(5)
    bended(x)
    handle = bended.interject(lambda node: True, lambda value: None)
    bended(x)
    assert set(handle.report().paths) == {
        "", "relu", "relu_1", "relu_2", "sub", "add", "add_1", "add_2",
    }  # fmt: skip


# Parameters are copied


def test_parameters_are_the_models_own() -> None:
    model = Block()
    mine = {name: id(parameter) for name, parameter in model.named_parameters()}
    before = state(model)
    bended = interject_by_match(model, lambda node: True, Scaled())
    bended.interject("up", lambda value: value + 1)
    bended(torch.ones(3, 4)).sum().backward()
    assert {name: id(parameter) for name, parameter in bended.named_parameters()} == mine
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    model.norm.reset_running_stats()
    assert state(model) == before


@pytest.mark.all
def test_nothing_as_large_as_the_parameters_is_allocated() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1000, 1000, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x))

    def large() -> int:
        gc.collect()
        things = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
        return len({t.data_ptr() for t in things if t.numel() >= 1000 * 1000})

    model = Wide()
    before = large()
    bended = interject_by_module_class(model, nn.Linear, Scaled())
    bended.interject("relu", Scaled())
    for _ in range(3):
        with torch.no_grad():
            bended(torch.ones(1, 1000))
    assert large() == before


# Statistics of batch norms are not updated


@pytest.mark.parametrize("where", ["norm", "softplus", "drop", lambda node: True])
def test_statistics_of_batch_norms_are_updated_once_a_call(where: Any) -> None:
    assert_as_by_hand(
        Block, lambda bended: bended.interject(where, lambda value: None), {},
        batches(5, 4), changes=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model)
    bended.interject(where, lambda value: None)
    for number, batch in enumerate(batches(5, 4, seeds=range(6)), 1):
        bended(batch), plain(batch)
        assert int(model.norm.num_batches_tracked) == number  # type: ignore[arg-type]
        assert bits(model.norm.running_mean) == bits(plain.norm.running_mean)
        assert bits(model.norm.running_var) == bits(plain.norm.running_var)


# Parts that are not looked into run in training mode


class Mode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.norm = Mode(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.part(x))


@pytest.mark.parametrize("opaque", [False, True])
def test_each_part_runs_in_its_own_mode(opaque: bool) -> None:
    torch.manual_seed(0)
    model = Whole()
    if opaque:
        model.part.forward = bt.opaque(model.part.forward)  # type: ignore[method-assign]
    bended = interject_by_match(
        model, node_selector.matches_module_class(Mode, nn.BatchNorm1d), Scaled(),
        tracer_kwargs={"leaf_modules": [Mode]},
    )  # fmt: skip
    x = torch.randn(8, 4)
    for whole, part, norm in ((1, 1, 1), (0, 0, 0), (1, 0, 1), (1, 1, 0), (0, 1, 0)):
        model.train(bool(whole))
        model.part.train(bool(part))
        model.norm.train(bool(norm))
        for _ in range(2):
            plain = copy.deepcopy(model.norm)
            torch.manual_seed(1)
            wanted = plain(F.dropout(x, 0.5, bool(part)) * 2) * 2
            torch.manual_seed(1)
            assert bits(bended(x)) == bits(wanted)
            assert bits(model.norm.running_mean) == bits(plain.running_mean)
    assert (model.training, model.part.training, model.norm.training) == (False, True, False)


# Branches on shapes and values are silently frozen


class Doug(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_module = nn.Conv1d(1, 4, 3)
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return torch.cat([self.forward(x[:, [i]]) for i in range(x.shape[1])], -1)
        outs = []
        for i in range(x.shape[0]):
            outs.append(self.batch_norm(self.conv_module(x[[i]])))
        return sum(outs)  # type: ignore[return-value]


def test_branches_on_shapes_are_taken_anew_with_insertions_in_place() -> None:
    torch.manual_seed(0)
    model, plain = Doug(), Doug()
    plain.load_state_dict(model.state_dict())
    plain.conv_module.register_forward_hook(lambda module, inputs, output: output * 2)
    bended = interject_by_module_class(model, nn.Conv1d, Scaled())
    for shape in ((1, 1, 8), (1, 2, 8), (3, 1, 8), (2, 3, 6), (1, 1, 8), (1, 2, 8), (2, 3, 6)):
        x = torch.randn(shape)
        assert bits(bended(x)) == bits(plain(x))
        assert state(model) == state(plain)
    assert bended.stats.replays == 3


def test_branches_on_values_are_taken_anew_with_insertions_in_place() -> None:
    def model(x: Tensor) -> Tensor:
        h = torch.relu(x)
        return h.sin() if h.sum() > 3 else h.cos()

    bended = interject_by_match(model, node_selector.Activations.is_relu, Scaled())
    for value in (0.1, 2.0, 1.0, 0.2, 3.0, 1.0):
        h = torch.full((2,), value) * 2
        wanted = h.sin() if h.sum() > 3 else h.cos()
        assert torch.equal(bended(torch.full((2,), value)), wanted)
    assert (bended.stats.traces, bended.stats.replays) == (2, 4)


# One patch at two digs


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"a": (x * 2, x * 3), "b": x * 4}


def test_one_patch_can_be_at_two_digs() -> None:
    x = torch.ones(3)
    pg = bt.PatchableGraph(Parts(), x)
    patch = bt.patches.AddPatch(value=10, slice=0)
    with pg.patch({"output|a.sub_0": patch, "output|b": patch}):
        for _ in range(2):
            out = pg(x)
            assert out["a"][0].tolist() == [12, 2, 2]
            assert out["a"][1].tolist() == [3, 3, 3]
            assert out["b"].tolist() == [14, 4, 4]
    assert bits(pg(x)) == bits(Parts()(x))


def test_a_patch_that_cannot_be_hashed_can_be_at_two_digs() -> None:
    @dataclasses.dataclass
    class Plus(bt.patches.Patch[Tensor]):
        by: Tensor

        def op(self, original_output: Tensor) -> Tensor:
            return original_output + self.by

    x = torch.ones(3)
    pg = bt.PatchableGraph(Parts(), x)
    plus = Plus(torch.arange(3.0))
    with pg.patch({"output|a.sub_0": [plus, plus], "output|a.sub_1": plus}):
        for _ in range(2):
            out = pg(x)
            assert out["a"][0].tolist() == [2, 4, 6]
            assert out["a"][1].tolist() == [3, 4, 5]


# A disabled context of hooks deactivates others


def test_a_disabled_hook_context_leaves_other_hooks_alone() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []  # type: ignore[var-annotated]

    def first(module: Any, inputs: Any, outputs: Any) -> None:
        seen.append(("first", module.name))

    def second(module: Any, inputs: Any, outputs: Any) -> None:
        seen.append(("second", module.name))

    manager = bt.HookManager()
    manager.register_forward_hook(first, linear=model[0], relu=model[1])
    manager.register_forward_hook(second, linear=model[0], activate=False)
    own = model[0].register_forward_hook(lambda *_: seen.append(("own", "")))
    bended = bt.BendedModule(model)
    bended(torch.ones(1, 2))
    handle = bended.interject("sub_1", lambda value: seen.append(("interjection", "")))

    def called() -> list[Any]:
        seen.clear()
        model(torch.ones(1, 2))
        return list(seen)

    usual = [("first", "linear"), ("own", ""), ("first", "relu")]
    assert sorted(called()) == sorted(usual)
    with manager.hook_all_context(hook_types=[second]):
        assert sorted(called()) == sorted([*usual, ("second", "linear")])
        with manager.hook_module_context(model[1]):
            assert sorted(called()) == sorted([*usual, ("second", "linear")])
        assert sorted(called()) == sorted([*usual, ("second", "linear")])
    assert sorted(called()) == sorted(usual)
    seen.clear()
    bended(torch.ones(1, 2))
    assert sorted(seen) == sorted([*usual, ("interjection", "")])
    manager.remove_all_hooks()
    seen.clear()
    bended(torch.ones(1, 2))
    assert sorted(seen) == [("interjection", ""), ("own", "")]
    own.remove(), handle.remove()
    assert called() == []


# A pattern for activations bends weights as well


class Greg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_module = nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_module(x)


def test_a_pattern_for_a_module_bends_no_weights_unless_asked() -> None:
    torch.manual_seed(0)
    model, x = Greg(), torch.randn(2, 1, 16)
    before = state(model)
    plain = model(x)
    for pattern in ("conv_module", "conv_module$"):
        bended = bt.BendedModule(model)
        bended.bend(bt.bends.Bias(1.0), pattern)
        for _ in range(2):
            assert torch.equal(bended(x), plain + 1)
        assert bended.bended_keys() == ["conv_module"]
        bended.reset()
        assert bits(bended(x)) == bits(plain)
    bended.bend(bt.bends.Bias(1.0), "conv_module.weight")
    wanted = F.conv1d(x, model.conv_module.weight + 1, model.conv_module.bias)
    for _ in range(2):
        assert torch.equal(bended(x), wanted)
    bended.reset()
    assert state(model) == before


# And all of it together


def test_they_are_right_in_a_model_that_the_others_cannot_trace() -> None:
    class Wrapped(WrappedForwardInterjection):
        def process(self, name: str, module: Any, inputs: Any, outputs: Any) -> Any:
            return outputs + inputs

    def insert(bended: bt.BendedModule) -> Any:
        interject_by_match(bended, node_selector.Activations.is_gelu, Wrapped())
        return bended.insertions[-1]

    assert_as_by_hand(
        Experts, insert, {"gelu": lambda function, x: function(x) + x},
        batches(6, 4, seeds=(0, 1, 2, 3)),
    )  # fmt: skip
    assert issubclass(Experts, Cut)
