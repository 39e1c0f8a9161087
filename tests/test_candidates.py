"""The graph that selectors look at: its nodes are those of the tree, its edges the values' ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.log.nodes import Registry
from bendtrace.log.path_views import CandidateGraph, dug
from bendtrace.log.run import Run
from tests.sweep.modules import MODULES
from tests.tree_models import EarlyExit


def graph_of(function: Callable[..., Any], *args: Any) -> CandidateGraph:
    trace = bt.trace(function, *args)
    return Run(trace._recording, function, Registry()).candidates


def edges_of(graph: CandidateGraph) -> dict[str, list[str]]:
    return {
        node.path: [follower.path for follower in graph.followers(node)]
        for node in graph
        if graph.followers(node)
    }


def test_the_nodes_are_the_ops_and_calls_of_the_tree_in_the_order_of_the_run() -> None:
    model = EarlyExit().requires_grad_(False)
    trace = bt.trace(model, torch.ones(2, 4), 0.35)
    graph = Run(trace._recording, model).candidates
    root = trace._tree.data
    expected = {
        node.path
        for node in root.walk()
        if node.role == "call" or (node.role == "op" and "|" not in dug(root, node))
    }
    expected -= {path for path in expected if path.rpartition(".")[2].startswith("bool")}
    assert set(graph.nodes) == expected
    assert list(graph.nodes)[:5] == [
        "", "layers_0", "layers_0.fc", "layers_0.fc.linear", "layers_0.mean",
    ]  # fmt: skip


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        n, unused = x.shape[0], x.shape[1]
        left, right = x.chunk(2, dim=1)
        left[0] = 1.0
        total = right.sum().item()
        y = torch.cat([left, right], dim=1).view(n, 4) * self.weight
        return y * (total + 1), 1.0 * unused


def test_numbers_that_a_function_gives_are_nodes_but_no_sizes_arithmetic_or_parts() -> None:
    graph = graph_of(Kinds(), torch.ones(2, 4))
    assert list(graph.nodes) == ["", "chunk", "sum", "item", "cat", "view", "mul", "mul_1"]
    assert graph.nodes["chunk"].shape == (2, 2)
    assert (graph.nodes["item"].shape, graph.nodes["item"].dtype) == (None, None)


def test_values_are_followed_through_parts_of_results_writes_and_arithmetic() -> None:
    graph = graph_of(Kinds(), torch.ones(2, 4))
    assert edges_of(graph) == {
        "chunk": ["sum", "cat"],  # `left[0] = 1.0` is no node, and what was written is chunk's
        "sum": ["item"],
        "item": ["mul_1"],
        "cat": ["view"],
        "view": ["mul"],
        "mul": ["mul_1"],
    }


def test_a_node_tells_where_it_is_and_what_it_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph = graph_of(model, torch.ones(2, 4, dtype=torch.float32))
    root, linear = graph.nodes[""], graph.nodes["sub_0.linear"]
    assert (root.module, root.module_path, root.site, root.scope) == (model, "", None, None)
    assert (linear.module, linear.function) == (None, F.linear)
    assert (linear.scope, linear.scope_path, linear.qualified_name) == (
        model[0], "0", "0.linear",
    )  # fmt: skip
    assert (linear.shape, linear.dtype, linear.uses_parameter) == ((2, 4), torch.float32, True)
    assert linear.text == "F.linear(input, self.weight, self.bias)"
    call = graph.nodes["sub_0"]
    assert (call.module, call.scope, call.scope_path) == (model[0], model, "")
    assert (call.module_path, call.qualified_name, call.shape) == ("0", "0", (2, 4))
    assert not graph.nodes["sub_1.relu"].uses_parameter


def test_a_function_that_is_no_module_is_a_root_without_one() -> None:
    graph = graph_of(lambda x: (x + 1).relu(), torch.ones(2))
    assert list(graph.nodes) == ["", "add", "relu"]
    assert graph.nodes[""].module is None
    assert graph.nodes["relu"].scope is None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        return h + self.mlp(self.norm(h))


def test_a_node_of_two_inputs_is_led_to_by_both_and_modules_stand_beside_their_ops() -> None:
    graph = graph_of(Residual(), torch.ones(2, 4))
    assert edges_of(graph) == {
        "mul": ["norm", "norm.layer_norm", "add"],
        "norm": ["mlp", "mlp.sub_0", "mlp.sub_0.linear"],
        "norm.layer_norm": ["mlp", "mlp.sub_0", "mlp.sub_0.linear"],
        "mlp": ["add"],
        "mlp.sub_0": ["mlp.sub_1", "mlp.sub_1.relu"],
        "mlp.sub_0.linear": ["mlp.sub_1", "mlp.sub_1.relu"],
        "mlp.sub_1": ["add"],
        "mlp.sub_1.relu": ["add"],
    }
    assert {node.path for node in graph.preceding(graph.nodes["add"])} == {
        "mul", "mlp", "mlp.sub_1", "mlp.sub_1.relu",
    }  # fmt: skip


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.fc(y.tanh())


def test_a_module_that_is_called_twice_is_two_nodes() -> None:
    graph = graph_of(Twice(), torch.ones(2, 4))
    assert edges_of(graph) == {
        "fc": ["tanh"],
        "fc.linear": ["tanh"],
        "tanh": ["fc_1", "fc_1.linear"],
    }
    assert graph.nodes["fc"].qualified_name == graph.nodes["fc_1"].qualified_name == "fc"


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.fc(x).relu()
        return x.sum()


def test_the_passes_of_a_loop_are_one_node_that_leads_back() -> None:
    graph = graph_of(Loop(), torch.ones(2, 4))
    assert list(graph.nodes) == ["", "fc", "fc.linear", "relu", "sum"]
    assert edges_of(graph) == {
        "fc": ["relu"],
        "fc.linear": ["relu"],
        "relu": ["fc", "fc.linear", "sum"],
    }


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    row.add_(1)
    y.mul_(3)
    torch.relu_(row)
    z = y + 1
    z[1] = row
    return z.sin()


def test_what_is_written_through_a_view_leads_from_the_writer() -> None:
    assert edges_of(graph_of(in_place, torch.ones(2, 4))) == {
        "mul": ["getitem", "mul_"],
        "getitem": ["add_"],
        "add_": ["mul_", "relu_"],
        "mul_": ["relu_", "add"],
        "relu_": ["add", "sin"],
        "add": ["sin"],
    }


def set_items(x: Tensor) -> Tensor:
    y, z = x * 2, x.sin()
    row = y[0]
    y[1] = z[1]  # under its own name, and it gives nothing that could stand for y from then on
    row.add_(1)
    return y.cos()


def test_what_was_written_before_is_not_forgotten_when_a_view_is_written_to() -> None:
    graph = graph_of(set_items, torch.ones(2, 4))
    assert {node.path for node in graph.preceding(graph.nodes["cos"])} == {
        "mul", "getitem_1", "add_",
    }  # fmt: skip


class Ignoring(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + 1


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ignoring = Ignoring()

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[0] = x.sin()[0]
        return self.ignoring(x.cos(), y)


def test_what_a_module_is_given_leads_to_its_call_also_if_it_does_not_use_it() -> None:
    assert edges_of(graph_of(Given(), torch.ones(2, 4))) == {
        "mul": ["ignoring"],
        "sin": ["getitem"],
        "getitem": ["ignoring"],
        "cos": ["ignoring", "ignoring.add"],
    }


class Handing(nn.Module):
    """Modules that compute nothing, and one that gives only a part of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.other = nn.Identity(), nn.Identity()
        self.pick = Pick()

    def forward(self, x: Tensor) -> Tensor:
        h = self.other(self.same(x).relu())
        a, b = self.pick(h, x.tanh())
        return a.sin() + b.cos()


class Pick(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b.abs()


def test_modules_that_hand_a_value_on_stand_beside_its_way() -> None:
    graph = graph_of(Handing(), torch.ones(2))
    assert edges_of(graph) == {
        "same": ["relu", "tanh"],
        "relu": ["other", "pick", "sin"],
        "other": ["pick", "sin"],
        "tanh": ["pick", "pick.abs"],
        "pick": ["sin", "cos"],
        "pick.abs": ["cos"],
        "sin": ["add"],
        "cos": ["add"],
    }


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sin()).cos()


def test_modules_without_any_op_follow_each_other() -> None:
    assert edges_of(graph_of(Chain(), torch.ones(2))) == {
        "sin": ["inner", "inner.sub_0", "inner.sub_1", "cos"],
        "inner.sub_0": ["inner.sub_1", "cos"],
        "inner.sub_1": ["cos"],
        "inner": ["cos"],
    }


class Leaking(nn.Module):
    """Gives a value by an attribute, and takes one from a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keep(), Use()

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        self.second.of = self.first
        return self.second()


class Keep(nn.Module):
    def forward(self, x: Tensor) -> None:
        self.kept = x.sin()


class Use(nn.Module):
    def forward(self) -> Tensor:
        return self.of.kept.cos()


def test_values_that_leave_a_module_by_an_attribute_lead_out_of_it_as_well() -> None:
    assert edges_of(graph_of(Leaking(), torch.ones(2))) == {
        "first": ["second", "second.cos"],
        "first.sin": ["second", "second.cos"],
    }


def test_a_size_or_a_dtype_is_not_the_value() -> None:
    def flat(x: Tensor, y: Tensor) -> Tensor:
        n = x.sin().shape[0]
        return y.cos().view(n * 2, -1).to(x.exp().dtype)

    graph = graph_of(flat, torch.ones(2, 4), torch.ones(2, 4))
    assert edges_of(graph) == {"cos": ["view"], "view": ["to"]}


def test_a_gate_is_no_node_and_values_go_through_it() -> None:
    def model(x: Tensor) -> Tensor:
        return bend(x.sin()).cos()

    graph = graph_of(model, torch.ones(2))
    assert list(graph.nodes) == ["", "sin", "cos"]
    assert edges_of(graph) == {"sin": ["cos"]}


def _double(x: Tensor) -> Tensor:
    return x * 2


_double.is_gate = True  # type: ignore[attr-defined]
bend = bt.opaque(_double)


def test_nodes_have_the_same_names_in_all_runs_that_share_a_registry() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x.relu() + 1
        return x.tanh().relu()

    registry = Registry()
    one, other = (bt.trace(model, torch.full((2,), value)) for value in (1.0, -1.0))
    first = Run(one._recording, model, registry).candidates
    second = Run(other._recording, model, registry).candidates
    assert [path for path in first.nodes if "relu" in path] == ["relu", "relu_1"]
    assert [path for path in second.nodes if "relu" in path] == ["relu_1"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nn.LSTM", "nn.Transformer", "nn.MultiheadAttention"])
def test_every_edge_of_large_layers_is_between_nodes_and_goes_forward(name: str) -> None:
    info = MODULES[name]
    given = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
    )[0]
    made = given.constructor_input
    module = info.module_cls(*made.args, **made.kwargs)
    trace = bt.trace(module, *given.forward_input.args, **given.forward_input.kwargs)
    graph = Run(trace._recording, module).candidates
    order = {path: number for number, path in enumerate(graph.nodes)}
    assert set(graph.edges.nodes) == set(order)
    assert graph.edges.number_of_edges() > 0
    # Nothing leads back, but to what is passed again, such as the comparison of sizes in turn.
    passes = {node.path: len(node.passes) for node in trace._tree.data.walk()}
    back = [user for giver, user in graph.edges.edges if order[giver] >= order[user]]
    assert all(passes[user] > 1 for user in back)
