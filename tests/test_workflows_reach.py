"""What values depend on, and what depends on them, by the mirror."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError, NodePathError
from bendtrace.log.nodes import NodePath
from bendtrace.workflows import ancestry, influence
from tests.lens_models import Patient, Transformer, made, tokens


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
