"""The mirror for other programs: node-link JSON, GraphML, and text for Graphviz."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import networkx as nx
import torch

from bendtrace._checks import free_name, required_kind
from bendtrace._plain import DEVICE, DTYPE, TUPLE, Codec, Form, text_of
from bendtrace.errors import ConversionError
from bendtrace.flow import (
    AssertFlowStep,
    EscapeFlowStep,
    FlowStep,
    FlowSteps,
    IndexFlowStep,
    LogicalFlowStep,
    LoopFlowStep,
    ShapeFlowStep,
)
from bendtrace.graph.mirror import Graph
from bendtrace.recording.names import NodeRef, target_name
from bendtrace.source.sites import Place, Span
from bendtrace.tape.contexts import Autocast, Context
from bendtrace.tape.tape import TensorMeta

GRAPH_CODEC = Codec(
    (Autocast, Context, TensorMeta),
    {"node": (NodeRef, lambda ref: ref.name, lambda name: NodeRef(name))},
)
_FORMS: dict[str, Form] = {"shape": TUPLE, "dtype": DTYPE, "device": DEVICE, "args": TUPLE}
_PRIVATE = frozenset({"recording", "root", "flow_steps"})


_MIRROR = "a mirror is a graph such as bt.trace(model, x).graph"


def to_node_link(graph: Graph) -> dict[str, Any]:
    """Return a mirror as node-link data: plain values, ready for JSON.

    `networkx.node_link_graph(data, edges="edges")` reads it, as do D3 and others. Functions are
    stored by name; a value that JSON cannot hold is an object with one key that begins with a
    dollar sign, such as `{"$node": "relu"}` for the value of another node in `args`.

    Args:
        graph: the mirror of a trace.

    Example:
        >>> import json, networkx as nx, torch, bendtrace as bt
        >>> graph = bt.trace(lambda x: x + 1, torch.ones(2)).graph
        >>> data = json.loads(json.dumps(bt.graph.to_node_link(graph)))
        >>> nx.node_link_graph(data, edges="edges").nodes["add"]["args"]
        [{'$node': 'x'}, 1]
    """
    required_kind(_MIRROR, graph, Graph)
    codec = GRAPH_CODEC
    about = {key: codec.encode(graph.graph[key]) for key in graph.graph if key not in _PRIVATE}
    about["flow_steps"] = flow_rows(graph.flow_steps, codec)
    nodes = [{"id": codec.encode(name), **_row_of(data)} for name, data in graph.nodes(data=True)]
    edges = [
        {"source": codec.encode(source), "target": codec.encode(target), "key": codec.encode(key)}
        | {name: codec.encode(value) for name, value in data.items()}
        for source, target, key, data in graph.edges(keys=True, data=True)
    ]
    return {"directed": True, "multigraph": True, "graph": about, "nodes": nodes, "edges": edges}


def from_node_link(data: Mapping[str, Any]) -> Graph:
    """Return the graph that `to_node_link` wrote.

    It looks and prints like the original mirror and has the same flow steps, but contains names
    instead of functions, so it can be neither run nor converted to torch.fx.

    Args:
        data: node-link data.

    Raises:
        ConversionError: the data is not node-link data of a mirror.
    """
    codec = GRAPH_CODEC
    graph = Graph()
    try:
        about = data["graph"]
        graph.graph.update({key: codec.decode(about[key]) for key in about if key not in _PRIVATE})
        graph.graph["flow_steps"] = flow_steps_of(about["flow_steps"], codec)
        for row in data["nodes"]:
            graph.add_node(
                codec.decode(row["id"]),
                **{k: codec.read(_FORMS.get(k), row[k]) for k in row if k != "id"},
            )
        for row in data["edges"]:
            ends = codec.decode(row["source"]), codec.decode(row["target"])
            if not all(end in graph for end in ends):
                raise ValueError(
                    f"there is an edge between {ends[0]!r} and {ends[1]!r}, which are not nodes"
                )
            about = {k: codec.decode(row[k]) for k in row if k not in ("source", "target", "key")}
            graph.add_edge(*ends, key=codec.decode(row["key"]), **about)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConversionError(f"this is not node-link data of a mirror: {reason}") from None
    return graph


def _row_of(data: Mapping[str, Any]) -> dict[str, Any]:
    row = {}
    for key, value in data.items():
        if key == "target":
            value = target_name(value)
        row[key] = GRAPH_CODEC.write(_FORMS.get(key), value)
    return row


def to_graphml(graph: Graph) -> str:
    r"""Return a mirror as GraphML, for Gephi, yEd and others.

    Attributes are numbers, bools or text: shapes, arguments and values are text as Python prints
    it. Characters that XML cannot hold are escaped as in Python, `\x1b`.

    Args:
        graph: the mirror of a trace.

    Example:
        >>> import networkx as nx, torch, bendtrace as bt
        >>> graph = bt.trace(lambda x: x.relu() + 1, torch.ones(2)).graph
        >>> nx.parse_graphml(bt.graph.to_graphml(graph)).nodes["relu"]["shape"]
        '(2,)'
    """
    required_kind(_MIRROR, graph, Graph)
    flat: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    names: dict[Any, str] = {}
    for node, data in graph.nodes(data=True):
        names[node] = free_name(_xml(str(node)), flat, "#", 2)
        flat.add_node(names[node], label=_xml(str(node)), **_flat(data))
    for source, target, data in graph.edges(data=True):
        edge = _flat(data)
        if data.get("kind") == "control":
            step = _step(graph.flow_steps, data.get("step"))
            if step is not None:
                edge["condition"] = _xml(f"{step.kind} {step.text}")
                edge["outcome"] = _xml(str(step.value))
        flat.add_edge(names[source], names[target], **edge)
    return "\n".join(nx.generate_graphml(flat)) + "\n"


def _step(steps: FlowSteps, number: Any) -> FlowStep | None:
    return steps[number] if type(number) is int and 0 <= number < len(steps) else None


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as GraphML has them: numbers, truth values and text."""
    row: dict[str, Any] = {}
    for key, value in data.items():
        if key == "target":
            value = target_name(value)
        if key == "value" or value is None:
            pass  # of one type for the whole file, whatever the model computed
        elif type(value) in (bool, float) or (type(value) is int and abs(value) < 1 << 63):
            row[key] = value
            continue
        if value is not None or key == "value":
            row[_xml(str(key))] = _xml(_text(value))
    return row


def _text(value: Any) -> str:
    plain = isinstance(value, (str, torch.dtype, torch.device))
    return str(value) if plain else text_of(value)


def _xml(text: str) -> str:
    """Return text that XML can hold; a carriage return would be read as a line feed."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def to_dot(graph: Graph, *, modules: bool = True, control: bool = True) -> str:
    r"""Return a mirror as text for Graphviz and other programs that read DOT.

    Tensors flow along solid lines. A dashed line leads from a condition to nodes that ran because
    of it; the first line of each condition has the condition and its outcome as a label.

    Args:
        graph: the mirror of a trace.
        modules: whether to draw modules as boxes around their nodes.
        control: whether to draw conditions.

    Example:
        >>> import torch, bendtrace as bt
        >>> graph = bt.trace(lambda x: x.relu(), torch.ones(2)).graph
        >>> print(bt.graph.to_dot(graph), end="")
        digraph {
          node [shape=box, fontname="Helvetica", fontsize=10];
          edge [fontname="Helvetica", fontsize=9];
          "x" [label="x\nfloat32[2]", shape=ellipse, tooltip="x"];
          "relu" [label="relu\nfloat32[2]", tooltip="relu: x.relu()"];
          "output" [label="output", shape=ellipse, tooltip="output"];
          "x" -> "relu";
          "relu" -> "output";
        }
    """
    required_kind(_MIRROR, graph, Graph)
    root = _Box("", [])
    for node, data in graph.nodes(data=True):
        path = str(data.get("module_path") or "") if modules else ""
        root.at(path).nodes.append(_dot_node(str(node), data))
    lines = [
        "digraph {",
        '  node [shape=box, fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=9];',
        *root.lines("  "),
    ]
    said: set[Any] = set()
    for source, target, data in graph.edges(data=True):
        ends = f"{_id(str(source))} -> {_id(str(target))}"
        if data.get("kind") != "control":
            lines.append(f"  {ends};")
        elif control:
            number = data.get("step")
            step = _step(graph.flow_steps, number)
            look = {"style": "dashed", "color": "gray40"}
            if step is not None:
                words = f"{step.kind} {step.text}: {step.value}"
                if number not in said:
                    look["label"] = _label(words)
                look["tooltip"] = _label(words)
            said.add(number)
            lines.append(f"  {ends} {_attributes(look)};")
    return "\n".join([*lines, "}"]) + "\n"


class _Box:
    """A module with its nodes, and those inside it."""

    def __init__(self, path: str, nodes: list[str]) -> None:
        self.path = path
        self.nodes = nodes
        self.inside: dict[str, _Box] = {}

    def at(self, path: str) -> _Box:
        """Return the box of a module, made if there is none."""
        box = self
        for part in path.split(".") if path else ():
            inner = f"{box.path}.{part}" if box.path else part
            box = box.inside.setdefault(part, _Box(inner, []))
        return box

    def lines(self, indent: str) -> Iterator[str]:
        for part, box in self.inside.items():
            yield f"{indent}subgraph {_id(f'cluster_{box.path}')} {{"
            yield f"{indent}  label={_label(part)};"
            yield from box.lines(f"{indent}  ")
            yield f"{indent}}}"
        for node in self.nodes:
            yield f"{indent}{node};"


_SHAPES = {"placeholder": "ellipse", "output": "ellipse", "get_attr": "note"}


def _dot_node(name: str, data: Mapping[str, Any]) -> str:
    label = name
    if data.get("shape") is not None:
        dtype = str(data.get("dtype")).removeprefix("torch.")
        label += f"\n{dtype}{list(data['shape'])}"
    elif "value" in data:
        label += f"\n{text_of(data['value'])}"
    look = {"label": _label(label)}
    if "value" in data:
        look["style"] = "rounded"
    if data.get("op") in _SHAPES:
        look["shape"] = _SHAPES[data["op"]]
    tooltip = target_name(data.get("target"))
    if data.get("text"):
        tooltip = f"{tooltip}: {data['text']}"
    look["tooltip"] = _label(tooltip)
    return f"{_id(name)} {_attributes(look)}"


def _attributes(look: Mapping[str, str]) -> str:
    return "[" + ", ".join(f"{key}={value}" for key, value in look.items()) + "]"


def _id(text: str) -> str:
    """Return a quoted name. A backslash stands for itself, but must not come last."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", _escape, text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _label(text: str) -> str:
    """Return quoted text to be shown: no escape or entity of Graphviz's takes effect in it."""
    lines = [_id(line)[1:-1].replace("&", "&amp;") for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


_CLASSES = {
    cls.__name__: cls
    for cls in (
        FlowStep,
        AssertFlowStep,
        EscapeFlowStep,
        IndexFlowStep,
        LogicalFlowStep,
        LoopFlowStep,
        ShapeFlowStep,
    )
}


def flow_rows(steps: Iterable[FlowStep], codec: Codec) -> list[dict[str, Any]]:
    """Return flow steps as plain JSON: a lossless `FlowStep.to_dict`."""
    rows = []
    for step in steps:
        row = step.to_dict() | {"value": step.value, "offset": step.place.offset}
        rows.append({key: codec.encode(value) for key, value in row.items()})
    return rows


def flow_steps_of(rows: Iterable[Mapping[str, Any]], codec: Codec) -> FlowSteps:
    """Return the flow steps that rows describe."""
    return FlowSteps([_step_of_row({key: codec.decode(row[key]) for key in row}) for row in rows])


def _step_of_row(row: dict[str, Any]) -> FlowStep:
    span = Span(row["line"], row["column"], row["end_line"], row["end_column"])
    cls = _CLASSES[row["step"]]
    more = {}
    if cls is LoopFlowStep:
        more = {"bound": row["bound"], "iterations": row["iterations"]}
    return cls(
        name=row["name"],
        value=row["value"],
        kind=row["kind"],
        place=Place(row["file"], row["function"], span, row["offset"]),
        text=row["text"],
        module_path=row["module_path"],
        guard=row["guard"],
        iteration=tuple(row["iteration"]),
        **more,
    )
