"""The networkx mirror of a trace: a multigraph of ops, with flow as control edges."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch
from torch import Tensor

from bendtrace import flow
from bendtrace.errors import ConversionError
from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep, control_of, steps_of
from bendtrace.log.plain import DEVICE, DTYPE, TUPLE, Codec, Plainer, text_of
from bendtrace.python.checks import free_name, required_kind
from bendtrace.python.sites import InstructionPlace, Span
from bendtrace.record.iterations import user_code
from bendtrace.record.op_names import NodeRef, target_name
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Access, Captured
from bendtrace.tape.contexts import Autocast, Context
from bendtrace.tape.structure import Existing
from bendtrace.tape.tape import Op, OpKind, TensorMeta, map_leaves, map_refs
from bendtrace.watch.functions import name_of

__all__ = ["Graph", "NodeRef", "mirror"]


if TYPE_CHECKING:
    MultiDiGraph = nx.MultiDiGraph[Any]
else:  # where it is not generic
    MultiDiGraph = nx.MultiDiGraph


class Graph(MultiDiGraph):
    """A trace as a networkx multigraph: every networkx algorithm works on it.

    Nodes are named as in torch.fx (`conv1d`, `gt`, `gt_1`) and have the attributes

    - `op`: "placeholder", "get_attr", "call_function", "call_method", "call_module" or
      "output"; `target`, `args` and `kwargs` as in torch.fx, with `NodeRef` for nodes;
    - `shape`, `dtype` and `device` for tensors, `value` for traced scalars;
    - `module_path` of the module call that they ran in, and the call's number, `pass_`;
    - `site` ("file:line"), `text` (source of the expression), `index` (position on the tape);
    - `context`, the grad, inference and autocast state of the op, and `raised`, the name of the
      exception, for a call that raised one that the model caught.

    Edges have the attribute `kind`: "data" with `argument`, the position of the value in the
    arguments (`args[0]`, `kwargs['dim']`, `args[0][1]`), "control" with `step`, the number of the
    flow step whose condition the target depends on, or "memory" from an op that wrote into a
    tensor, in place or through a view, to ops that read it afterwards under another node's name.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = x.relu()
        ...     return h + 1 if h.sum() > 0 else h
        >>> graph = bt.trace(model, torch.ones(2)).graph
        >>> graph
        <Graph: 7 nodes, 6 data edges, 1 control edge>
        >>> graph.nodes["add"]["args"], graph.nodes["add"]["shape"], graph.nodes["add"]["text"]
        ((%relu, 1), (2,), 'h + 1')
        >>> list(graph.data_edges())[:2], list(graph.control_edges())
        ([('x', 'relu', 'args[0]'), ('relu', 'sum', 'args[0]')], [('bool', 'add', 0)])
    """

    @property
    def flow_steps(self) -> FlowSteps:
        """The flow steps of the trace that the graph mirrors."""
        steps: FlowSteps = self.graph.get("flow_steps", FlowSteps([]))
        return steps

    def add_op(self, name: str, **data: Any) -> None:
        """Add a node, and the data edges for its arguments."""
        self.add_node(name, **data)
        for argument, source in _positions(data.get("args", ()), data.get("kwargs", {})):
            self.add_edge(source, name, kind="data", argument=argument)

    def data_edges(self) -> Iterator[tuple[str, str, str]]:
        """Yield (source, target, argument) of each data edge."""
        for source, target, data in self.edges(data=True):
            if data["kind"] == "data":
                yield source, target, data["argument"]

    def control_edges(self) -> Iterator[tuple[str, str, int]]:
        """Yield (condition, target, number of the flow step) of each control edge."""
        for source, target, data in self.edges(data=True):
            if data["kind"] == "control":
                yield source, target, data["step"]

    def to_list(self) -> list[dict[str, Any]]:
        """Return the nodes as plain values, ready for JSON."""
        rows = []
        for name, data in self.nodes(data=True):
            row: dict[str, Any] = {"name": name}
            for key, value in data.items():
                row[key] = value if isinstance(value, (int, float, str, type(None))) else str(value)
            row["target"] = target_name(data.get("target"))
            row["users"] = self.out_degree(name)
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        data, control = len(list(self.data_edges())), len(list(self.control_edges()))
        counts = {"node": len(self), "data edge": data, "control edge": control}
        parts = (f"{n} {what}" if n == 1 else f"{n} {what}s" for what, n in counts.items())
        return f"<Graph: {', '.join(parts)}>"

    def __str__(self) -> str:
        lines = ["graph():"]
        used_by: dict[str, set[str]] = {}
        for source, user, _ in self.data_edges():
            used_by.setdefault(source, set()).add(user)
        for name, data in self.nodes(data=True):
            users = len(used_by.get(name, ()))
            kind = ""
            if data.get("shape") is not None:
                kind = f" : Tensor{tuple(data['shape'])}"
            elif "value" in data:
                kind = f" : {type(data['value']).__name__}"
            head = f"    %{name}{kind} [num_users={users}] = {data['op']}"
            target = _on_one_line(target_name(data["target"]))
            if data["op"] in ("placeholder", "get_attr"):
                lines.append(f"{head}[target={target}]")
            elif data["op"] == "output":
                lines.append(f"    return {_as_source(data['args'][0])}")
            else:
                args = f"(args = {_as_source(data['args'])}, kwargs = {_as_source(data['kwargs'])})"
                lines.append(f"{head}[target={target}]{args}")
        return "\n".join(lines)


def _on_one_line(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _as_source(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_as_source, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_source, value))}]"
    if isinstance(value, dict):
        items = (f"{_on_one_line(str(key))}: {_as_source(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        return (
            f"slice({_as_source(value.start)}, {_as_source(value.stop)}, {_as_source(value.step)})"
        )
    return repr(value)


def mirror(recording: Recording, function: Callable[..., Any]) -> Graph:
    """Build the mirror of a recorded run."""
    graph, names, steps = Graph(), recording.names, steps_of(recording)
    graph.graph.update(recording=recording, flow_steps=steps, root=function)
    taken = set(names)
    nodes: dict[int, str] = {}
    for part in recording.environment.parts:
        if part.is_argument:
            _add_argument(graph, part, recording, names, nodes, taken)
    for op in recording.plain_ops:
        if op.kind is not OpKind.INPUT and op.index not in recording.tape.counters:
            graph.add_op(names[op.index], **_op_data(op, names, nodes))
    output = _with_nodes(recording.plain(recording.root.output), names, nodes)
    graph.add_op("output" if "output" not in taken else "output_", op="output", target="output",
                 args=(output,), kwargs={}, module_path="", index=len(names))  # fmt: skip
    for op in recording.tape.ops:
        for writer in dict.fromkeys(op.reads.values()):
            graph.add_edge(names[writer], names[op.index], kind="memory")
    last = list(graph)[-1]
    for writer in dict.fromkeys(recording.output_reads.values()):
        graph.add_edge(names[writer], last, kind="memory")
    for name, under in zip(names, control_of(recording).ops, strict=True):
        if (
            under and name in graph
        ):  # the innermost; its own condition, being an op, leads to the next one out
            graph.add_edge(steps[under[-1]].name, name, kind="control", step=under[-1])
    return graph


def _add_argument(
    graph: Graph, part: Captured, recording: Recording, names: list[str], nodes: dict[int, str],
    taken: set[str], is_needed: bool = False,
) -> None:  # fmt: skip
    """Add a placeholder, or the node that takes an item out of one, and those around it."""
    op = next((op for op in recording.tape.ops if op.target is part), None)
    if part.access is not Access.ROOT and op is None and not is_needed:
        return
    if op is None:
        name = re.sub(r"\W+", "_", str(part.label)).strip("_") or "arg"
        name = free_name(f"_{name}" if name[0].isdigit() else name, taken)
        taken.add(name)
    else:
        name = names[op.index]
    nodes[part.index] = name
    data: dict[str, Any] = {"kwargs": {}, "module_path": "", "pass_": 1, "site": None, "text": ""}
    data.update(_meta_data(op and op.meta), index=op and op.index)
    if part.access is Access.ROOT:
        graph.add_op(name, op="placeholder", target=part.label, args=(), **data)
        return
    holder = part.parent
    assert holder is not None
    if holder.index not in nodes:
        _add_argument(graph, holder, recording, names, nodes, taken, is_needed=True)
    attribute = part.access in (Access.DICT, Access.ATTRIBUTE)
    target = getattr if attribute else operator.getitem
    args = NodeRef(nodes[holder.index]), part.key.name if attribute else part.key
    graph.add_op(name, op="call_function", target=target, args=args, **data)


def _op_data(op: Op, names: list[str], nodes: dict[int, str]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "module_path": op.scope.path,
        "pass_": op.scope.number + 1,
        "index": op.index,
        "context": op.context,
        **_meta_data(op.meta),
    }
    data["site"], data["text"] = None, ""
    if op.site is not None:
        place, _, _ = user_code(op.scope, op.site)
        data["site"], data["text"] = str(place), place.text
    if op.raised is not None:
        data["raised"] = op.raised.type.__name__
    if op.kind in (OpKind.STATE, OpKind.UNKNOWN):
        target = str(op.target).removeprefix("self.") if op.target else "unknown"
        return {**data, "op": "get_attr", "target": target, "args": (), "kwargs": {}}
    args = tuple(_with_nodes(value, names, nodes) for value in op.args)
    kwargs = {key: _with_nodes(value, names, nodes) for key, value in op.kwargs.items()}
    kind, target, args = _fx_call(op, args)
    return {**data, "op": kind, "target": target, "args": args, "kwargs": kwargs}


def _fx_call(op: Op, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Say a call in torch.fx's terms."""
    target = op.target
    if target is Tensor.__getitem__:
        return "call_function", operator.getitem, args
    if target is Tensor.__setitem__:
        return "call_function", operator.setitem, args
    name = name_of(target)
    if getattr(target, "__name__", "") == "__get__":
        return "call_function", getattr, (args[0], name)
    method = _METHODS.get(target)
    if method is not None and args and isinstance(args[0], NodeRef):
        return "call_method", method, args
    return "call_function", target, args


# Some methods are known to torch under another name (`__pow__` is a function called pow). Those of
# `object` are not torch's, and libraries may add some that cannot be hashed.
_METHODS = {
    member: name
    for cls in reversed(Tensor.__mro__[:-1])
    for name, member in sorted(vars(cls).items())  # `abs` comes after `__abs__`
    if callable(member) and not isinstance(member, type)
}


def _meta_data(meta: Any) -> dict[str, Any]:
    if isinstance(meta, TensorMeta):
        return {"shape": meta.shape, "dtype": meta.dtype, "device": meta.device}
    if meta is None:
        return {}
    return {"value": meta}


def _with_nodes(value: Any, names: list[str], nodes: dict[int, str]) -> Any:
    """Replace references to ops, and to arguments, by references to nodes."""
    named = map_refs(value, lambda ref: NodeRef(names[ref.index]))

    def node_of(leaf: Any) -> Any:
        is_argument = isinstance(leaf, Existing) and leaf.part.index in nodes
        return NodeRef(nodes[leaf.part.index]) if is_argument else leaf

    return map_leaves(named, node_of)


def _positions(args: Any, kwargs: Any) -> Iterator[tuple[str, str]]:
    """Yield (argument, node) for each reference in a node's arguments."""
    for position, value in enumerate(args):
        yield from _references(value, f"args[{position}]")
    for key, value in kwargs.items():
        yield from _references(value, f"kwargs[{key!r}]")


def _references(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, NodeRef):
        yield where, value.name
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _references(item, f"{where}[{position}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _references(item, f"{where}[{key!r}]")
    elif isinstance(value, slice):
        for part in ("start", "stop", "step"):
            yield from _references(getattr(value, part), f"{where}.{part}")
    elif hasattr(value, "items") and hasattr(value, "attributes"):
        yield from _references(value.items, f"{where}.items")
        yield from _references(value.attributes, where)


# The mirror for other programs: node-link JSON, GraphML, and text for Graphviz.


GRAPH_CODEC = Codec(
    (Autocast, Context, TensorMeta),
    {"node": (NodeRef, lambda ref: ref.name, lambda name: NodeRef(name))},
)
_FORMS: dict[str, Plainer] = {"shape": TUPLE, "dtype": DTYPE, "device": DEVICE, "args": TUPLE}
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
    nodes = [
        {"id": codec.encode(name), **_graphml_row(data)} for name, data in graph.nodes(data=True)
    ]
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


def _graphml_row(data: Mapping[str, Any]) -> dict[str, Any]:
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
        flat.add_node(names[node], label=_xml(str(node)), **_graphml_values(data))
    for source, target, data in graph.edges(data=True):
        edge = _graphml_values(data)
        if data.get("kind") == "control":
            step = _step(graph.flow_steps, data.get("step"))
            if step is not None:
                edge["condition"] = _xml(f"{step.kind} {step.text}")
                edge["outcome"] = _xml(str(step.value))
        flat.add_edge(names[source], names[target], **edge)
    return "\n".join(nx.generate_graphml(flat)) + "\n"


def _step(steps: FlowSteps, number: Any) -> FlowStep | None:
    return steps[number] if type(number) is int and 0 <= number < len(steps) else None


def _graphml_values(data: Mapping[str, Any]) -> dict[str, Any]:
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
            row[_xml(str(key))] = _xml(_graphml_text(value))
    return row


def _graphml_text(value: Any) -> str:
    plain = isinstance(value, (str, torch.dtype, torch.device))
    return str(value) if plain else text_of(value)


def _xml(text: str) -> str:
    """Return text that XML can hold; a carriage return would be read as a line feed."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", _escape_dot, text)


def _escape_dot(match: re.Match[str]) -> str:
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
    listed: set[Any] = set()
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
                if number not in listed:
                    look["label"] = _dot_label(words)
                look["tooltip"] = _dot_label(words)
            listed.add(number)
            lines.append(f"  {ends} {_dot_attributes(look)};")
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
            yield f"{indent}  label={_dot_label(part)};"
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
    look = {"label": _dot_label(label)}
    if "value" in data:
        look["style"] = "rounded"
    if data.get("op") in _SHAPES:
        look["shape"] = _SHAPES[data["op"]]
    tooltip = target_name(data.get("target"))
    if data.get("text"):
        tooltip = f"{tooltip}: {data['text']}"
    look["tooltip"] = _dot_label(tooltip)
    return f"{_id(name)} {_dot_attributes(look)}"


def _dot_attributes(look: Mapping[str, str]) -> str:
    return "[" + ", ".join(f"{key}={value}" for key, value in look.items()) + "]"


def _id(text: str) -> str:
    """Return a quoted name. A backslash stands for itself, but must not come last."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", _escape_dot, text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _dot_label(text: str) -> str:
    """Return quoted text to be shown: no escape or entity of Graphviz's takes effect in it."""
    lines = [_id(line)[1:-1].replace("&", "&amp;") for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


_CLASSES = {
    name: cls for name, cls in vars(flow).items()
    if isinstance(cls, type) and issubclass(cls, FlowStep)
}  # fmt: skip


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
        place=InstructionPlace(row["file"], row["function"], span, row["offset"]),
        text=row["text"],
        module_path=row["module_path"],
        guard=row["guard"],
        iteration=tuple(row["iteration"]),
        **more,
    )
