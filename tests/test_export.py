"""The mirror as node-link JSON, GraphML and DOT: nothing lost, and read by others."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import networkx as nx
import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.errors import ConversionError
from bendtrace.log.mirror import from_node_link, to_dot, to_graphml, to_node_link
from tests.corpus import CASES, Case
from tests.shares import some

# What breaks formats: quotes, escapes, entities, controls, halves of surrogate pairs.
ODD = [
    'say "yes"', "back\\slash", "ends in \\", '\\"', "a&b <c> &amp;", "two\nlines", "cr\rlf\r\n",
    "nul\0bell\a", "\x1b[0m", "\ud800", "\udfff half", "\ufffe\uffff", "é 漢 😀", "{a|b}",
    "\\N \\G", "]]>", "", " ", "$tuple", "#1", "node", "strict", "--",
]  # fmt: skip


def mirrors(case: Case) -> Iterator[bt.graph.Graph]:
    for make in case.paths.values():
        args, kwargs = make()
        try:
            yield bt.trace(case.make(), *args, **kwargs).graph
        except Exception:  # the model's own: some corpus models raise on some paths
            continue


def odd_graph() -> bt.graph.Graph:
    graph = bt.graph.Graph()
    for number, text in enumerate(ODD):
        ref = (bt.graph.NodeRef(ODD[number - 1]),) if number else ()
        graph.add_op(text, op="call_function", target=text, args=(*ref, text), kwargs={text: 1},
                     module_path=f"m.{text}" if "." not in text else "", text=text)  # fmt: skip
    return graph


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1:
            x = self.inner(x) / 2
        return x


@pytest.fixture
def halving() -> bt.graph.Graph:
    model = Halving()
    with torch.no_grad():
        model.inner[0].weight.copy_(torch.eye(2))
        model.inner[0].bias.zero_()
    return bt.trace(model, torch.full((1, 2), 2.0)).graph


@pytest.mark.parametrize("case", some(CASES, 8, start=2), ids=lambda case: case.name)
def test_every_format_holds_every_corpus_graph(case: Case) -> None:
    for graph in itertools.islice(mirrors(case), 2):
        data = to_node_link(graph)
        back = from_node_link(json.loads(json.dumps(data, allow_nan=False)))
        assert str(back) == str(graph)
        assert str(back.flow_steps) == str(graph.flow_steps)
        assert back.flow_steps.to_list() == graph.flow_steps.to_list()
        assert list(back.edges(keys=True, data=True)) == list(graph.edges(keys=True, data=True))
        assert repr(back.to_list()) == repr(graph.to_list())  # nan is not nan
        assert to_node_link(back) == data
        assert nx.utils.graphs_equal(
            nx.MultiDiGraph(nx.node_link_graph(data, edges="edges").edges),
            nx.MultiDiGraph(graph.edges),
        )

        text = to_graphml(graph)
        assert ElementTree.fromstring(text).tag.endswith("graphml")
        read = nx.parse_graphml(text)
        assert list(read) == list(graph)
        assert sorted(read.edges()) == sorted(graph.edges())
        assert to_graphml(back) == text

        drawn = Dot(to_dot(graph))
        assert sorted(drawn.nodes) == sorted(graph)
        assert sorted(drawn.edges) == sorted((source, target) for source, target in graph.edges())
        assert to_dot(back) == to_dot(graph)


def test_a_graph_read_back_holds_names_instead_of_functions(halving: bt.graph.Graph) -> None:
    back = from_node_link(to_node_link(halving))
    assert all(type(target) is str for _, target in back.nodes(data="target"))
    assert back.nodes["linear"] | {"target": 0} == halving.nodes["linear"] | {"target": 0}
    with pytest.raises(ConversionError, match="neither the mirror of a trace"):
        bt.graph.to_fx(back)


def test_node_link_data_reads_as_documented() -> None:
    graph = bt.trace(lambda x: x * 2 if x.shape[0] > 1 else x, torch.ones(2, 3)).graph
    data = to_node_link(graph)
    node = next(row for row in data["nodes"] if row["id"] == "mul")
    assert {key: node[key] for key in ("op", "target", "args", "shape", "dtype", "device")} == {
        "op": "call_method",
        "target": "mul",
        "args": [{"$node": "x"}, 2],
        "shape": [2, 3],
        "dtype": "float32",
        "device": "cpu",
    }
    assert {"source": "x", "target": "mul", "key": 0, "kind": "data", "argument": "args[0]"} in (
        data["edges"]
    )
    assert {"source": "gt", "target": "mul", "key": 0, "kind": "control", "step": 1} in data[
        "edges"
    ]
    step = data["graph"]["flow_steps"][1]
    assert (step["step"], step["kind"], step["text"], step["value"]) == (
        "LogicalFlowStep", "conditional expression", "x.shape[0] > 1", True,
    )  # fmt: skip


def test_odd_texts_survive_node_link_json() -> None:
    graph = odd_graph()
    back = from_node_link(json.loads(json.dumps(to_node_link(graph))))
    assert list(back.nodes(data=True)) == list(graph.nodes(data=True))
    assert list(back.edges(data=True)) == list(graph.edges(data=True))


def test_graphml_holds_odd_texts_that_xml_can_hold_and_escapes_the_others() -> None:
    text = to_graphml(odd_graph())
    text.encode()
    read = nx.parse_graphml(text)
    targets = [data["target"] for _, data in read.nodes(data=True)]
    escaped = {
        "cr\rlf\r\n": "cr\\rlf\\r\n",
        "nul\0bell\a": "nul\\x00bell\\x07",
        "\x1b[0m": "\\x1b[0m",
        "\ud800": "\\ud800",
        "\udfff half": "\\udfff half",
        "\ufffe\uffff": "\\ufffe\\uffff",
    }
    assert targets == [escaped.get(text, text) for text in ODD]
    assert read.number_of_edges() == len(ODD) - 1


def test_nodes_whose_names_xml_cannot_tell_apart_stay_apart() -> None:
    graph = bt.graph.Graph()
    for name in ("\x1b", "\\x1b"):
        graph.add_op(name, op="placeholder", target=name, args=(), kwargs={})
    graph.add_edge("\x1b", "\\x1b", kind="data", argument="args[0]")
    assert list(nx.parse_graphml(to_graphml(graph)).edges()) == [("\\x1b", "\\x1b#2")]


def test_graphml_says_under_which_condition_a_node_ran(halving: bt.graph.Graph) -> None:
    read = nx.parse_graphml(to_graphml(halving))
    conditions = {
        (data["condition"], data["outcome"]) for *_, data in read.edges(data=True) if "step" in data
    }
    assert conditions == {("while x.norm() > 1", "True")}
    assert type(read.nodes["linear"]["index"]) is int
    assert read.nodes["linear"]["shape"] == "(1, 2)"


def test_graphml_writes_values_of_all_kinds_as_text() -> None:
    graph = bt.graph.Graph()
    for number, value in enumerate((None, True, 1 << 70, float("nan"), 1j, "text")):
        graph.add_op(f"n{number}", op="call_function", target="t", args=(), kwargs={}, value=value)
    read = nx.parse_graphml(to_graphml(graph))
    assert [read.nodes[node]["value"] for node in read] == [
        "None", "True", "1180591620717411303424", "nan", "1j", "text",
    ]  # fmt: skip


def test_dot_nests_modules_and_dashes_conditions(halving: bt.graph.Graph) -> None:
    text = to_dot(halving)
    assert (
        'subgraph "cluster_inner" {\n    label="inner";\n    subgraph "cluster_inner.0" {' in text
    )
    assert '"div" [label="div\\nfloat32[1, 2]", tooltip="div: self.inner(x) / 2"];' in text
    assert '"bool" [label="bool\\nTrue", style=rounded, ' in text
    assert '"inner_0_bias" [label="inner_0_bias\\nfloat32[2]", shape=note, ' in text
    assert text.count(', label="while x.norm() > 1: True"') == 2
    assert "cluster" not in to_dot(halving, modules=False)
    assert "dashed" not in to_dot(halving, control=False)
    assert Dot(to_dot(halving, modules=False)).nodes == list(halving)


def test_dot_quotes_odd_texts() -> None:
    drawn = Dot(to_dot(odd_graph()))
    assert len(drawn.nodes) == len(set(drawn.nodes)) == len(ODD)
    assert len(drawn.edges) == len(ODD) - 1
    shown = {
        'say "yes"': 'say \\"yes\\"', "back\\slash": "back\\\\slash", "a&b <c> &amp;":
        "a&amp;b <c> &amp;amp;", "two\nlines": "two\\nlines", "\x1b[0m": "\\\\x1b[0m",
        "\\N \\G": "\\\\N \\\\G", "\ud800": "\\\\ud800", "é 漢 😀": "é 漢 😀",
    }  # fmt: skip
    assert {text: drawn.labels[number] for number, text in enumerate(ODD) if text in shown} == shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.clear(), "it lacks 'graph'"),
        (lambda data: data["nodes"][0].pop("id"), "it lacks 'id'"),
        (lambda data: data["nodes"].pop(0), "an edge between 'x' and"),
        (lambda data: data["nodes"][0].update(shape=7), "invalid tuple"),
        (lambda data: data["nodes"][0].update(args={"$jump": 7}), r"value, '\$jump'"),
        (lambda data: data["nodes"].append(3), "this is not node-link data of a mirror"),
        (lambda data: data["graph"]["flow_steps"][0].pop("line"), "it lacks 'line'"),
    ],
)
def test_data_that_is_no_mirror_is_refused(halving: bt.graph.Graph, change, message: str) -> None:
    data = to_node_link(halving)
    change(data)
    with pytest.raises(ConversionError, match=message):
        from_node_link(data)


class Dot:
    """Reads the DOT language (without HTML labels and ports) as its grammar has it."""

    TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\d+|->|[{}\[\];,=])', re.S)

    def __init__(self, text: str) -> None:
        self.nodes: list[str] = []
        self.labels: list[str] = []
        self.edges: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = self.TOKEN.match(text, position)
            assert match is not None, text[position : position + 80]
            self.tokens.append(match[1])
            position = match.end()
        assert self.tokens.pop(0) == "digraph"
        self.block()
        assert not self.tokens

    def block(self) -> None:
        assert self.tokens.pop(0) == "{"
        while self.tokens[0] != "}":
            self.statement()
        self.tokens.pop(0)

    def statement(self) -> None:
        first = self.tokens.pop(0)
        if first == "subgraph":
            assert self.name(self.tokens.pop(0)).startswith("cluster_")
            self.block()
            return
        if self.tokens[0] == "=":
            del self.tokens[:2]
        elif self.tokens[0] == "->":
            self.edges.append((self.name(first), self.name(self.tokens[1])))
            del self.tokens[:2]
            self.attributes()
        else:
            attributes = self.attributes()
            if first not in ("node", "edge"):
                self.nodes.append(self.name(first))
                self.labels.append(attributes["label"][1:-1])
        assert self.tokens.pop(0) == ";"

    def attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.tokens[0] != "[":
            return found
        while self.tokens.pop(0) != "]":
            key, equals, value = self.tokens[:3]
            assert equals == "="
            assert key not in found
            found[key] = value
            del self.tokens[:3]
        return found

    @staticmethod
    def name(token: str) -> str:
        assert token.startswith('"')
        return token[1:-1].replace('\\"', '"').replace("\\\\", "\\")
