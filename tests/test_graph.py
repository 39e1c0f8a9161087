"""The networkx mirror: nodes, data edges, control edges, and what networkx makes of them."""

# ruff: noqa: E501

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.graph import NodeRef
from bendtrace.log import mirror
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import Inputs, assert_graph_agrees, bits
from tests.shares import some

ONES = torch.ones(3, 2)


def graph_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bt.graph.Graph:
    return bt.trace(function, *args, **kwargs).graph


def controls(function: Callable[..., Any], *args: Any) -> dict[str, str]:
    """For each node that ran under a step, the source of the step."""
    trace = bt.trace(function, *args)
    edges = list(trace.graph.control_edges())
    for condition, _, number in edges:
        assert trace.flow_steps[number].name == condition
    return {node: trace.flow_steps[number].text for _, node, number in edges}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.fc(x) * x.shape[0]
        return -x


# A real graph


def test_it_is_a_networkx_multigraph() -> None:
    graph = graph_of(Halves(), ONES)
    assert isinstance(graph, nx.MultiDiGraph)
    assert nx.is_directed_acyclic_graph(graph)
    assert list(graph) == [
        "x", "sum", "gt", "bool", "fc_weight", "fc_bias", "linear", "shape", "getitem", "mul",
        "output",
    ]  # fmt: skip


def test_the_nodes_are_in_an_order_in_which_they_can_run() -> None:
    graph = graph_of(Halves(), ONES)
    order = {name: position for position, name in enumerate(graph)}
    assert all(order[source] < order[target] for source, target in graph.edges())
    assert set(nx.topological_sort(graph)) == set(graph)


def test_ancestors_follow_data_and_control() -> None:
    graph = graph_of(Halves(), ONES)
    assert nx.ancestors(graph, "linear") == {"x", "sum", "gt", "bool", "fc_weight", "fc_bias"}
    edges = graph.edges(keys=True, data="kind")
    data = graph.edge_subgraph((a, b, key) for a, b, key, kind in edges if kind == "data")
    assert nx.ancestors(data, "linear") == {"x", "fc_weight", "fc_bias"}
    assert nx.descendants(data, "sum") == {"gt", "bool"}


def test_copies_and_subgraphs_are_graphs_of_the_same_kind() -> None:
    graph = graph_of(Halves(), ONES)
    copy = graph.copy()
    assert type(copy) is bt.graph.Graph
    assert str(copy) == str(graph)
    copy.remove_node("output")
    assert "output" in graph
    part = graph.subgraph(["x", "sum", "gt"])
    assert isinstance(part, bt.graph.Graph)
    assert set(part.data_edges()) == {("x", "sum", "args[0]"), ("sum", "gt", "args[0]")}
    assert part.flow_steps is graph.flow_steps


def test_a_graph_of_ones_own_can_be_made() -> None:
    graph = bt.graph.Graph()
    graph.add_op("x", op="placeholder", target="x", args=(), kwargs={})
    graph.add_op("y", op="call_function", target=torch.relu, args=(NodeRef("x"),), kwargs={})
    assert list(graph.data_edges()) == [("x", "y", "args[0]")]
    assert len(graph.flow_steps) == 0
    assert str(graph) == (
        "graph():\n"
        "    %x [num_users=1] = placeholder[target=x]\n"
        "    %y [num_users=0] = call_function[target=torch.relu](args = (%x,), kwargs = {})"
    )


def test_networkx_writes_it_as_json_once_the_values_are_text() -> None:
    graph = graph_of(Halves(), ONES)
    plain: Any = nx.MultiDiGraph()
    for name, data in graph.nodes(data=True):
        plain.add_node(name, **{key: str(value) for key, value in data.items()})
    plain.add_edges_from(graph.edges(data=True))
    document = json.loads(json.dumps(nx.node_link_data(plain, edges="edges")))
    again = nx.node_link_graph(document, edges="edges")
    assert list(again) == list(graph)
    assert sorted(again.edges()) == sorted(graph.edges())


# Nodes


def test_nodes_say_what_was_called_and_what_came_out() -> None:
    model = Halves()
    trace = bt.trace(model, ONES)
    nodes = trace.graph.nodes
    first = Halves.forward.__code__.co_firstlineno
    linear = dict(nodes["linear"])
    linear.pop("context")
    assert linear == {
        "op": "call_function",
        "target": torch._C._nn.linear,
        "args": (NodeRef("x"), NodeRef("fc_weight"), NodeRef("fc_bias")),
        "kwargs": {},
        "shape": (3, 2),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "module_path": "fc",
        "pass_": 1,
        "site": f"{__file__}:{first + 2}",
        "text": "self.fc(x)",
        "index": 6,
    }
    assert (nodes["x"]["op"], nodes["x"]["target"]) == ("placeholder", "x")
    assert (nodes["x"]["site"], nodes["x"]["text"], nodes["x"]["args"]) == (None, "", ())
    assert (nodes["fc_weight"]["op"], nodes["fc_weight"]["target"]) == ("get_attr", "fc.weight")
    assert nodes["fc_weight"]["shape"] == (2, 2)
    assert (nodes["sum"]["op"], nodes["sum"]["target"]) == ("call_method", "sum")
    assert (nodes["gt"]["target"], nodes["gt"]["args"]) == ("gt", (NodeRef("sum"), 0))
    assert nodes["gt"]["text"] == "x.sum() > 0"
    assert (nodes["bool"]["target"], nodes["bool"]["value"]) == ("__bool__", True)
    assert nodes["shape"]["target"] is getattr
    assert nodes["shape"]["args"] == (NodeRef("x"), "shape")
    assert nodes["shape"]["value"] == (3, 2)
    assert nodes["getitem"]["target"] is operator.getitem
    assert nodes["getitem"]["value"] == 3
    assert nodes["mul"]["args"] == (NodeRef("linear"), NodeRef("getitem"))
    assert (nodes["output"]["op"], nodes["output"]["args"]) == ("output", (NodeRef("mul"),))


def test_each_op_has_a_node_with_its_position_on_the_tape() -> None:
    trace = bt.trace(Halves(), ONES)
    by_index = {data["index"]: name for name, data in trace.graph.nodes(data=True)}
    assert [by_index[op.index] for op in trace.ops] == trace.names


def test_names_are_those_of_fx_and_unique() -> None:
    def model(x: Tensor) -> Tensor:
        x = F.relu(x) + torch.relu(x)
        x = x.relu() * 2 + 1
        x += 1
        x[0] = 0
        return x.T @ x - x[0]

    graph = graph_of(model, ONES)
    assert list(graph) == [
        "x", "relu", "relu_1", "add", "relu_2", "mul", "add_1", "add_", "setitem", "T", "matmul",
        "getitem", "sub", "output",
    ]  # fmt: skip


def test_names_of_nodes_do_not_collide_with_numbered_ones() -> None:
    def model(relu_1: Tensor, output: Tensor) -> Tensor:
        return relu_1.relu() + output.relu() + output.relu()

    graph = graph_of(model, ONES, ONES + 1)
    assert list(graph) == [
        "relu_1", "output", "relu", "relu_2", "add", "relu_3", "add_1", "output_",
    ]  # fmt: skip


def test_items_of_arguments_are_taken_out_one_by_one() -> None:
    def model(x: Tensor, past: list[Any], options: dict[str, Any], *rest: Tensor) -> Tensor:
        return x + past[1][0] + options["bias"] + rest[1]

    tensors = [torch.ones(2) * i for i in range(6)]
    graph = graph_of(model, tensors[0], [None, (tensors[1],)], {"bias": tensors[2]}, *tensors[3:])
    names = [name for name in graph if "add" not in name]
    assert names == [
        "x", "past", "past_1", "past_1_0", "options", "options_bias", "rest_0", "rest_1", "rest_2",
        "output",
    ]  # fmt: skip
    nodes = graph.nodes
    assert (nodes["past_1_0"]["target"], nodes["past_1_0"]["args"]) == (
        operator.getitem,
        (NodeRef("past_1"), 0),
    )
    assert nodes["options_bias"]["args"] == (NodeRef("options"), "bias")
    assert [nodes[n]["op"] for n in ("past", "options", "rest_0")] == ["placeholder"] * 3
    assert nodes["rest_1"]["target"] == "rest[1]"


def test_arguments_that_nothing_uses_are_placeholders_still() -> None:
    graph = graph_of(lambda x, flag, mask=None: x + 1, ONES, True, mask=None)
    assert [n for n, data in graph.nodes(data=True) if data["op"] == "placeholder"] == [
        "x",
        "flag",
        "mask",
    ]


def test_state_is_named_by_where_the_model_has_it() -> None:
    bias = torch.ones(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * self.scale + bias

    graph = graph_of(Model(), ONES)
    found = {n: d["target"] for n, d in graph.nodes(data=True) if d["op"] == "get_attr"}
    assert found == {"layers_0_weight": "layers.0.weight", "scale": "scale", "bias": "bias"}


def test_a_shared_module_is_called_in_passes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.stack = nn.Sequential(self.fc, nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.stack(x)
            return self.fc(x)

    trace = bt.trace(Model(), ONES)
    nodes = trace.graph.nodes
    passes = {n: (d["module_path"], d["pass_"]) for n, d in nodes(data=True) if "linear" in n}
    assert passes == {"linear": ("fc", 1), "linear_1": ("fc", 2), "linear_2": ("fc", 3)}
    assert nodes["relu_1"]["module_path"] == "stack.1"
    assert nodes["relu_1"]["pass_"] == 2
    assert [(c.path, c.number) for c in trace.module_calls] == [
        ("", 0),
        ("stack", 0), ("fc", 0), ("stack.1", 0),
        ("stack", 1), ("fc", 1), ("stack.1", 1),
        ("fc", 2),
    ]  # fmt: skip
    weights = [n for n, d in nodes(data=True) if d["target"] == "fc.weight"]
    assert weights == ["fc_weight"]


def test_an_op_that_raised_says_so() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return -x

    nodes = graph_of(model, ONES).nodes
    assert nodes["matmul"]["raised"] == "RuntimeError"
    assert "raised" not in nodes["neg"]


def test_to_list_has_plain_values_only() -> None:
    graph = graph_of(Halves(), ONES)
    rows = json.loads(json.dumps(graph.to_list()))
    assert rows == graph.to_list()
    assert [row["name"] for row in rows] == list(graph)
    mul = rows[9]
    assert (mul["op"], mul["target"], mul["args"]) == ("call_method", "mul", "(%linear, %getitem)")
    assert (mul["shape"], mul["dtype"], mul["users"]) == ("(3, 2)", "torch.float32", 1)


# Data edges


def test_data_edges_say_which_argument() -> None:
    def model(x: Tensor, y: Tensor) -> Any:
        n = x.shape[1]
        z = torch.cat([x, torch.stack((x, y), dim=0)[0]], dim=0)
        z = z[:n, 0:2]
        w = torch.where(condition=z > 0, input=z, other=y[:2])
        return {"out": (w, [x]), "size": n}

    graph = graph_of(model, ONES, ONES + 1)
    found = {(a, b): where for a, b, where in graph.data_edges()}
    assert found["x", "stack"] == "args[0][0]"
    assert found["y", "stack"] == "args[0][1]"
    assert found["x", "cat"] == "args[0][0]"
    assert found["getitem_1", "getitem_2"] == "args[1][0].stop"
    assert found["gt", "where"] == "kwargs['condition']"
    assert found["getitem_3", "where"] == "kwargs['other']"
    assert found["where", "output"] == "args[0]['out'][0]"
    assert found["x", "output"] == "args[0]['out'][1][0]"
    assert found["getitem_1", "output"] == "args[0]['size']"


def test_a_value_used_twice_by_one_op_has_two_edges() -> None:
    graph = graph_of(lambda x: x * x, ONES)
    assert list(graph.data_edges()) == [
        ("x", "mul", "args[0]"),
        ("x", "mul", "args[1]"),
        ("mul", "output", "args[0]"),
    ]


def test_edges_reach_into_objects_that_the_model_returns() -> None:
    class Pair:
        def __init__(self, first: Tensor, rest: list[Tensor]) -> None:
            self.first = first
            self.rest = rest

    graph = graph_of(lambda x: Pair(x + 1, [x * 2]), ONES)
    found = {source: where for source, target, where in graph.data_edges() if target == "output"}
    assert found == {"add": "args[0]['first']", "mul": "args[0]['rest'][0]"}


# Control edges


def test_each_side_of_an_if_runs_under_its_condition() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.abs()
        if x.sum() > 0:
            y = y + 1
            y = y * 2
        else:
            y = y - 1
        return y.relu()

    assert controls(model, ONES) == {"add": "x.sum() > 0", "mul": "x.sum() > 0"}
    assert controls(model, -ONES) == {"sub": "x.sum() > 0"}


def test_an_early_return_governs_the_rest() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.abs()
        if x.sum() > 100:
            return y.relu()
        y = y + 1
        return y * 2

    assert controls(model, ONES) == {"add": "x.sum() > 100", "mul": "x.sum() > 100"}
    assert controls(model, ONES * 100) == {"relu": "x.sum() > 100"}


def test_nested_conditions_lead_outwards_one_by_one() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            y = x + 1
            if x.max() > 0:
                y = y * 2
            y = y - 1
            return y
        return x

    outer, inner = "x.sum() > 0", "x.max() > 0"
    assert controls(model, ONES) == {
        "add": outer, "max": outer, "gt_1": outer, "bool_1": outer, "mul": inner, "sub": outer,
    }  # fmt: skip


def test_an_elif_runs_under_the_if_before_it() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 100:
            x = x + 1
        elif x.max() > 100:
            x = x + 2
        else:
            x = x * 2
        return x

    found = controls(model, ONES)
    assert found == {
        "max": "x.sum() > 100", "gt_1": "x.sum() > 100", "bool_1": "x.sum() > 100",
        "mul": "x.max() > 100",
    }  # fmt: skip


def test_the_second_operand_runs_under_the_first() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0 and x.max() > 0:
            x = x + 1
        return x

    found = controls(model, ONES)
    first, second = "x.sum() > 0", "x.max() > 0"
    assert found == {"max": first, "gt_1": first, "bool_1": first, "add": second}


def test_a_conditional_expression_governs_the_value_taken() -> None:
    assert controls(lambda x: x.abs() if x.sum() > 0 else -x, ONES) == {"abs": "x.sum() > 0"}
    assert controls(lambda x: x.abs() if x.sum() > 0 else -x, -ONES) == {"neg": "x.sum() > 0"}


def test_the_body_of_a_loop_runs_under_its_header() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x.relu()

    trace = bt.trace(model, torch.ones(2))
    assert list(trace.graph.control_edges()) == [("getitem", "add", 1), ("getitem", "add_1", 1)]


def test_each_round_of_a_while_runs_under_its_own_test() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() < 10:
            x = x * 2
        return x.relu()

    trace = bt.trace(model, torch.ones(2) * 2)
    assert list(trace.graph.control_edges()) == [("bool", "mul", 1), ("bool_1", "mul_1", 2)]


def test_a_continue_governs_the_rest_of_the_body() -> None:
    def model(x: Tensor) -> Tensor:
        total = torch.zeros(2)
        for row in x:
            if row.sum() > 1:
                continue
            total = total + row
        return total

    trace = bt.trace(model, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    found = {node: condition for condition, node, _ in trace.graph.control_edges()}
    assert found["add"] == "bool_1"
    assert found["sum"] == found["sum_1"] == "unbind"


def test_comprehensions_govern_their_elements() -> None:
    def model(x: Tensor) -> Tensor:
        return sum([row * 2 for row in x if row.sum() > 0])

    trace = bt.trace(model, torch.tensor([[1.0], [-1.0]]))
    found = {node: condition for condition, node, _ in trace.graph.control_edges()}
    assert found["mul"] == "bool"
    assert found["sum"] == found["sum_1"] == "unbind"
    assert "add" not in found


def test_the_body_of_a_case_runs_under_its_pattern() -> None:
    def model(x: Tensor) -> Tensor:
        match x.shape[0]:
            case 1:
                return x + 1
            case n if n > 5:
                return x * 2
        return -x

    assert controls(model, torch.ones(1)) == {"add": "case 1"}
    assert controls(model, torch.ones(7)) == {"gt": "case 1", "mul": "n > 5"}
    assert controls(model, torch.ones(2)) == {"gt": "case 1", "neg": "n > 5"}


def test_what_a_called_function_or_module_does_runs_under_the_condition_of_the_call() -> None:
    def helper(x: Tensor) -> Tensor:
        return x.tanh() + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(nn.ReLU(), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x = self.stack(x)
                x = helper(x)
            return x.neg()

    condition = "x.sum() > 0"
    assert controls(Model(), ONES) == dict.fromkeys(("relu", "sigmoid", "tanh", "add"), condition)


def test_a_condition_inside_a_called_module_comes_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Halves()

        def forward(self, x: Tensor) -> Tensor:
            if x.max() > 0:
                x = self.inner(x)
            return x

    found = controls(Outer(), ONES)
    assert found["sum"] == "x.max() > 0"
    assert found["linear"] == found["mul"] == "x.sum() > 0"


def test_calls_of_one_function_do_not_govern_each_other() -> None:
    def shrink(x: Tensor, depth: int) -> Tensor:
        if x.sum() > 0:
            if depth > 0:
                shrink(x, depth - 1)
            return x + 1
        return x

    depths = [0, 1]

    def model(x: Tensor) -> Tensor:
        return shrink(x, depths[1])

    trace = bt.trace(model, ONES)
    found = {node: condition for condition, node, _ in trace.graph.control_edges()}
    assert found["sum_1"] == "bool"  # the inner call runs under the outer condition
    assert found["add"] == "bool_1"  # its own addition under its own
    assert found["add_1"] == "bool"  # and that of the outer call, later, under the outer one


def test_ops_that_ran_regardless_have_no_control_edges() -> None:
    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        assert n == 3
        y = x * n
        if y.sum() > 0:
            pass
        return y.relu()

    assert controls(model, ONES) == {}


@pytest.mark.parametrize("case", some(CASES, 3, start=0), ids=lambda case: case.name)
def test_the_graphs_of_the_corpus_can_run_in_order(case: Case) -> None:
    for inputs in case.paths.values():
        args, kwargs = inputs()
        try:
            trace = bt.trace(case.make(), *args, **kwargs)
        except Exception:  # the model's own
            continue
        order = {name: position for position, name in enumerate(trace.graph)}
        assert all(order[source] < order[target] for source, target in trace.graph.edges())
        for step in trace.flow_steps:
            assert trace.graph.nodes[step.name]["value"] is not None
            if isinstance(step, bt.flow.LoopFlowStep) and step.bound is not None:
                assert step.iterations <= step.bound
        for _, node, number in trace.graph.control_edges():
            step = trace.flow_steps[number]
            assert order[step.name] < order[node]
        json.loads(trace.to_json())


# Printing


def test_a_graph_prints_as_fx_does_with_shapes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor, scale: float) -> Any:
            n = x.shape[0]
            y = self.fc(x[:n]) * scale
            return {"y": y, "n": (n,)}

    assert (
        str(graph_of(Model(), ONES, 2.0))
        == """\
graph():
    %x : Tensor(3, 2) [num_users=2] = placeholder[target=x]
    %scale : float [num_users=1] = placeholder[target=scale]
    %shape : tuple [num_users=1] = call_function[target=builtins.getattr](args = (%x, 'shape'), kwargs = {})
    %getitem : int [num_users=2] = call_function[target=operator.getitem](args = (%shape, 0), kwargs = {})
    %getitem_1 : Tensor(3, 2) [num_users=1] = call_function[target=operator.getitem](args = (%x, slice(None, %getitem, None)), kwargs = {})
    %fc_weight : Tensor(1, 2) [num_users=1] = get_attr[target=fc.weight]
    %linear : Tensor(3, 1) [num_users=1] = call_function[target=torch._C._nn.linear](args = (%getitem_1, %fc_weight, None), kwargs = {})
    %mul : Tensor(3, 1) [num_users=1] = call_method[target=mul](args = (%linear, %scale), kwargs = {})
    return {y: %mul, n: (%getitem,)}"""
    )


def test_a_graph_is_shown_by_its_size() -> None:
    assert repr(graph_of(Halves(), ONES)) == "<Graph: 11 nodes, 11 data edges, 4 control edges>"


@pytest.mark.parametrize("name", ["a.b", "0", "import os", "x[0]", "größe", "__class__"])
def test_odd_names_become_names_of_nodes(name: str) -> None:
    graph = graph_of(lambda **options: options[name] + 1, **{name: ONES})
    (first, second, last) = graph
    assert first.isidentifier()
    assert (second, last) == ("add", "output")
    assert graph.nodes[first]["target"] == name


def test_sources_outside_of_files_leave_no_text(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec("def model(x):\n    return x + 1\n", namespace)
    node = graph_of(namespace["model"], ONES).nodes["add"]
    assert (node["site"], node["text"]) == ("<string>:2", "")


def test_methods_that_libraries_add_to_object_are_not_looked_at() -> None:
    # nnsight gives `object` a method that cannot be hashed.
    assert not {id(member) for member in vars(object).values()} & set(map(id, mirror._METHODS))


@pytest.mark.parametrize("fold", [False, True], ids=["ops", "leaf_modules"])
@pytest.mark.parametrize("case", some(CASES, 4, start=1), ids=lambda case: case.name)
def test_graph_of_each_path_agrees_with_eager(case: Case, fold: bool) -> None:
    for inputs in case.paths.values():
        torch.manual_seed(1)
        eager = case.make()
        torch.manual_seed(1)
        model = case.make()
        try:
            trace = bt.trace(model, *inputs()[0], **inputs()[1])
        except Exception as error:
            with pytest.raises(type(error)):
                _call(eager, inputs())
            continue
        _call(eager, inputs())  # the trace was a call too: both models are in the same state
        torch.manual_seed(7)
        wanted = bits(_call(eager, inputs()))
        assert_graph_agrees(trace, wanted, inputs(), fold=fold, seed=7)


def _call(model: Any, inputs: Inputs) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)
