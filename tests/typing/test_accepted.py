"""What type checkers accept, with the types that they find; it also runs."""

from __future__ import annotations

import re
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.log.entries import ModuleEntry, Source
from bendtrace.log.nodes import NodePath


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


def doubled(x: Tensor, times: int = 2) -> Tensor:
    return x.relu() * times


X = torch.ones(1, 2)


def test_a_bended_module_is_generic_in_its_model() -> None:
    bended = bt.BendedModule(Net())
    assert_type(bended, bt.BendedModule[Net])
    assert_type(bended.model, Net)
    assert_type(bended.model.fc, nn.Linear)
    assert_type(bended(X), Any)
    out: Tensor = bended(X)
    assert out.shape == bended.fc(X).shape


def test_a_function_keeps_its_signature() -> None:
    bended = bt.BendedModule(doubled)
    assert_type(bended(X), Tensor)
    assert_type(bended(X, times=3), Tensor)
    assert_type(bended.audit(X, 3), Tensor)
    assert_type(bended.from_activations({"relu": X}, times=2), Tensor)
    assert_type(bt.BendedModule(lambda x: x * 2)(X), Any)


def test_a_class_that_is_not_said_is_any() -> None:
    def model_of(bended: bt.BendedModule) -> Any:
        return bended.model.fc

    assert model_of(bt.BendedModule(Net()))


def test_a_parameterized_class_can_be_called() -> None:
    model = Net()
    bended = bt.BendedModule[Net](model)
    assert torch.equal(bended(X), model(X))
    assert not hasattr(model, "__orig_class__")
    around = bt.BendedModule(nn.Sequential(bended))
    assert torch.equal(around(X), around(X))
    assert around.stats.replays == 1


def test_opaque_keeps_the_signature() -> None:
    @bt.opaque
    def scaled(x: Tensor, by: float = 2.0) -> tuple[Tensor, float]:
        return x * by, by

    assert_type(scaled(X), tuple[Tensor, float])
    assert_type(scaled(X, by=1.5)[0], Tensor)


def test_traces_have_types() -> None:
    bended = bt.BendedModule(doubled)
    assert_type(bt.trace(doubled, X), bt.Trace)
    assert_type(bended.trace(X), bt.Trace)
    assert_type(bended.trace(X, _return_out=True), tuple[bt.Trace, Tensor])
    assert_type(bended.latest_trace, bt.Trace)


def test_activations_have_types() -> None:
    bended = bt.BendedModule(doubled)
    assert_type(bended.get_activations("relu", args=(X,)), bt.Activations)
    found = bended.get_activations("relu", args=(X,), return_output=True)
    assert_type(found, tuple[bt.Activations, Tensor])


class Clipped(bt.Interjection):
    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        return output.clamp(max=1)


def test_whatever_interject_accepts_has_a_type() -> None:
    bended = bt.BendedModule(Net())
    trace = bended.trace(X)
    for handle in (
        bended.interject("fc", torch.zeros_like),
        bended.interject("fc.weight", lambda value: value * 2, passes=0),
        bended.interject(NodePath("fc"), lambda value, at: value, passes=[0, -1]),
        bended.interject(trace.tree.fc, Clipped(), passes=lambda number: number > 0),
        bended.interject(bt.graph.NodeRef("linear"), nn.Identity()),
        bended.interject(trace[0], abs),
        bended.interject(trace.modules[0], abs),
        bended.interject(re.compile("fc"), abs),
        bended.interject(bended.model.fc, abs),
        bended.interject(nn.Linear, abs),
        bended.interject(bt.node_selector.matches_name("fc") & "fc", abs),
        bended.interject(torch.relu, abs),
        bended.interject(lambda node: node.shape == (1, 2), abs),
        bended.interject(["fc", torch.relu], abs),
        bended.interject({"fc", "relu"}, abs),
    ):
        assert_type(handle, bt.Insertion)
    bended.remove_all()
    paths = list(bended.get_activations("fc", nn.Linear, args=(X,)))
    assert_type(bended.get_activations(*paths, args=(X,)), bt.Activations)
    assert_type(bended.get_activations(paths, args=(X,)), bt.Activations)
    with bended.patch({"fc": bt.patches.ZeroPatch()}), bended.bend(bt.bends.Scale(2.0), "fc$"):
        bended(X)
    with bended.bend(torch.neg, re.compile("fc")):
        bended(X)


def test_a_log_can_be_looped_over_whatever_the_key() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x.softmax(-1)
            return x + 1

    log = bt.trace(Twice(), X, save="all")
    assert_type(log[0], bt.LayerEntry)
    assert [entry.label for entry in log["softmax_1"]] == ["softmax_1_1:1", "softmax_1_1:2"]
    assert [entry.label for entry in log["add_1"]] == ["add_1_2"]
    for entry in log["softmax_1"]:
        assert_type(entry, bt.LayerEntry)
    for entry in log[1:3]:
        assert_type(entry, bt.LayerEntry)
    assert [entry.shape for entry in log[["add_1", 0]]] == [(1, 2), (1, 2)]
    for key in (log[0], log.tree.add, re.compile("add"), Tensor.softmax, lambda node: True):
        assert len(list(log[key])) > 0
    assert_type([entry.source for entry in log], list[Source | None])
    assert_type(log.modules[0:1], list[ModuleEntry])
