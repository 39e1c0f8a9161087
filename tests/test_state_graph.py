"""`BendedModule.graph`: states and segments as a networkx graph."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.graph import NodeRef, StateGraph
from bendtrace.python import stacks
from bendtrace.show.outline import OutlineBranch
from bendtrace.show.paint import figure
from tests.pictures import apart

reads_stacks = pytest.mark.skipif(
    stacks.frame_layout() is None,
    reason="the frames of this Python cannot be read: paths do not join",
)


class Gated(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = h.relu() + x if h.mean() > 0 else x - h
        return x


def halved(x: Tensor) -> Tensor:
    while x.norm() > 1:
        if x.min() < -1:
            x = x.clamp(min=-1)
        x = x * 0.5
    return x


def flagged(x: Tensor) -> Tensor:
    is_large = False
    if x.sum() > 1:
        is_large = True
    x = x * 2 if x[0] > 0 else x * 3
    return x + 1 if is_large else x


def refusing(x: Tensor) -> Tensor:
    if x.sum() < 0:
        raise ValueError("negative")
    return x.sqrt() if x.max() > 1 else x


class Counting(nn.Module):
    """It writes to what was there before, and must not do so twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(2):
            x = x + 1 if x.sum() > 0 else x - 1
        return x


MODELS: dict[str, Callable[[], Callable[..., Any]]] = {
    "gated": Gated, "halved": lambda: halved, "flagged": lambda: flagged,
    "refusing": lambda: refusing, "counting": Counting,
}  # fmt: skip


def called(name: str, calls: int = 60) -> bt.BendedModule:
    torch.manual_seed(0)
    bended = bt.BendedModule(MODELS[name]())
    bended(torch.ones(4))  # before any call that raises, of which no program would tell
    for _ in range(calls - 1):
        try:
            bended(torch.randn(4) * 2)
        except ValueError:
            assert name == "refusing"
    assert bended.stats.live == 0
    return bended


@pytest.mark.parametrize("name", MODELS)
def test_every_call_that_comes_to_a_state_leaves_it(name: str) -> None:
    graph = called(name).graph
    assert isinstance(graph, nx.MultiDiGraph)
    ended = 0
    for node, data in graph.nodes(data=True):
        came = sum(hits for *_, hits in graph.in_edges(node, data="hits"))
        went = sum(hits for *_, hits in graph.out_edges(node, data="hits"))
        if data["kind"] == "start":
            assert (came, went) == (0, data["hits"])
        elif graph.out_degree(node):
            assert came == went == data["hits"]
        else:
            assert data["kind"] in ("return", "raise")
            assert came == data["hits"]
            ended += came
    assert ended == 60
    assert nx.number_weakly_connected_components(graph) == 1


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_tree(name: str) -> None:
    bended = called(name)
    found: dict[tuple[str, str], int] = {}
    graph = bended.graph
    for source, _, data in graph.edges(data=True):
        text = graph.nodes[source]["at"]
        if type(data.get("answer")) is bool:
            key = text, data["outcome"]
            found[key] = found.get(key, 0) + data["hits"]
    wanted: dict[tuple[str, str], int] = {}
    for branch in bended.tree[0].flow.walk():
        if isinstance(branch, OutlineBranch) and branch.is_condition:
            for taken in branch.sides():
                key = branch.where, str(taken.value)
                wanted[key] = wanted.get(key, 0) + taken.hits
    assert found == wanted


@reads_stacks
def test_branches_join_and_loops_close() -> None:
    gated = called("gated").graph
    questions = [node for node, data in gated.nodes(data=True) if data["kind"] not in _AROUND]
    assert len(questions) == 4
    assert gated.number_of_edges() == 9
    assert nx.is_directed_acyclic_graph(gated)
    loops = list(nx.simple_cycles(called("halved").graph))
    assert loops
    counting = called("counting").graph
    asked = [node for node, data in counting.nodes(data=True) if data["kind"] not in _AROUND]
    assert len(asked) == 2


_AROUND = ("start", "return", "raise")


@reads_stacks
def test_a_flag_keeps_states_apart() -> None:
    graph = called("flagged").graph
    asked = [data["text"] for _, data in graph.nodes(data=True) if data["kind"] not in _AROUND]
    assert len(asked) == 3
    assert len({text for text in asked}) == 2


@pytest.mark.parametrize("name", MODELS)
def test_paths_that_do_not_join_are_told_apart(name: str) -> None:
    joins = [data["joins"] for _, data in called(name).graph.nodes(data=True) if "joins" in data]
    assert joins == [stacks.frame_layout() is not None]


def test_operations_are_nodes_that_can_be_inserted_at() -> None:
    bended = called("gated")
    graph = bended.graph
    edge = next(
        (*edge, key)
        for *edge, key, answer in graph.edges(keys=True, data="answer")
        if answer is True
    )
    nodes = graph.operations(edge)
    assert all(isinstance(node, NodeRef) for node in nodes)
    trace = graph.traces[graph.edges[edge]["trace"]]
    assert set(map(str, nodes)) <= {f"%{name}" for name in trace.names}
    relu = next(node for node in nodes if node.name.startswith("relu"))
    x = torch.ones(4)
    seen = []
    with bended.interject(relu, lambda value: seen.append(value) or value):
        for _ in range(20):
            bended(torch.randn(4) * 2)
    assert seen
    assert torch.equal(bended(x), bended.model(x))
    with pytest.raises(InputError, match="there is no edge"):
        graph.operations(("1.1", "1.2", "Perhaps"))


@pytest.mark.parametrize("name", MODELS)
def test_is_made_of_plain_values(name: str, tmp_path: Path) -> None:
    graph = called(name).graph
    written = json.loads(json.dumps(nx.node_link_data(graph, edges="edges")))
    again = nx.node_link_graph(written, edges="edges")
    assert nx.utils.graphs_equal(nx.MultiDiGraph(graph), nx.MultiDiGraph(again))
    loaded = pickle.loads(pickle.dumps(graph))
    assert nx.utils.graphs_equal(graph, loaded)
    edge = next(iter(graph.edges(keys=True)))
    with pytest.raises(InputError, match="a copy of the graph has no traces"):
        loaded.operations(edge)
    nx.write_graphml(graph, tmp_path / "graph.graphml")
    assert (tmp_path / "graph.graphml").read_text().count("<node ") == len(graph)


def test_is_empty_before_the_first_call_and_shows_its_moment() -> None:
    bended = bt.BendedModule(halved)
    assert isinstance(bended.graph, StateGraph)
    assert len(bended.graph) == 0
    bended(torch.zeros(2))
    before = bended.graph
    text = str(before)
    bended(torch.ones(2) * 9)
    assert str(before) == text
    assert str(bended.graph) != text


def test_each_set_of_inputs_is_a_program_of_its_own() -> None:
    bended = bt.BendedModule(halved)
    for x in (torch.zeros(2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)):
        bended(x)
    graph = bended.graph
    starts = [data for _, data in graph.nodes(data=True) if data["kind"] == "start"]
    assert [data["program"] for data in starts] == [1, 2, 3]
    assert "float64" in starts[2]["selected_by"]
    assert nx.number_weakly_connected_components(graph) == 3


@pytest.mark.parametrize("name", MODELS)
def test_is_drawn_with_no_text_over_another(name: str) -> None:
    graph = called(name).graph
    picture = graph.draw()
    apart(picture.canvas)
    assert len(picture.scene.nodes()) == len(graph)
    assert len(picture.scene.edges) == graph.number_of_edges()
    assert all(escape(data["text"]) in picture.svg for _, data in graph.nodes(data=True))


def test_what_stands_beside_the_lines_of_many_answers_is_not_cut_off() -> None:
    bended = bt.BendedModule(lambda x: x * int(x.sum()))
    for value in range(9):
        bended(torch.tensor([10_000.0 + value]))
        canvas = bended.graph.draw().canvas
        texts = apart(canvas)
        if value < 3:  # from the fourth on, numbers stay traced
            assert {f"{10_000 + i} 1x" for i in range(value + 1)} <= set(texts)
        assert canvas.width < 800
    assert apart(bended.tree.draw().canvas)


def test_a_chain_of_questions_is_a_column() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        for limit in range(12):
            if x.sum() < limit:
                return x
            x = x / 2 if x.max() > 3 else x + 1
        return x

    bended = bt.BendedModule(halves)
    for value in range(40):
        bended(torch.tensor([value / 2, value / 9]))
    drawn = figure(bended.graph.draw().scene)
    shapes = [shape for node, shape in drawn.shapes.items() if node.kind == "decision"]
    assert len(shapes) > 12
    middles = [shape.x + shape.width / 2 for shape in shapes]
    assert max(middles) - min(middles) < 60


def test_the_picture_of_a_loop_leads_back() -> None:
    graph = called("halved").graph
    back = [(a, b) for a, b in graph.edges() if list(graph).index(b) <= list(graph).index(a)]
    assert back
    wires = [wire for wire in figure(graph.draw().scene).wires if wire.is_back]
    assert wires
    assert all(wire.points[-1][1] < wire.points[0][1] for wire in wires)


def test_is_saved_as_what_is_asked_for(tmp_path: Path) -> None:
    picture = called("halved").graph.draw(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == picture.svg
    with pytest.raises(InputError):
        called("halved").graph.draw(tmp_path / "graph.xyz")
