"""The networkx mirror of a trace: a multigraph of ops, with flow as control edges."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import networkx as nx
from torch import Tensor

from bendtrace._checks import free_name
from bendtrace.flow import FlowSteps, control_of, steps_of
from bendtrace.recording.iterations import user_code
from bendtrace.recording.names import NodeRef, target_name
from bendtrace.recording.recorder import Recording
from bendtrace.tape.captured import Access, Captured
from bendtrace.tape.structure import Existing
from bendtrace.tape.tape import Op, OpKind, TensorMeta, map_refs
from bendtrace.torch_rules.functions import name_of

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
        told = (f"{n} {what}" if n == 1 else f"{n} {what}s" for what, n in counts.items())
        return f"<Graph: {', '.join(told)}>"

    def __str__(self) -> str:
        lines = ["graph():"]
        used_by: dict[str, set[str]] = {}
        for source, user, _ in self.data_edges():
            used_by.setdefault(source, set()).add(user)
        for name, data in self.nodes(data=True):
            users = len(used_by.get(name, ()))
            kind = _type_name(data)
            head = f"    %{name}{kind} [num_users={users}] = {data['op']}"
            target = _on_one_line(target_name(data["target"]))
            if data["op"] in ("placeholder", "get_attr"):
                lines.append(f"{head}[target={target}]")
            elif data["op"] == "output":
                lines.append(f"    return {_show(data['args'][0])}")
            else:
                args = f"(args = {_show(data['args'])}, kwargs = {_show(data['kwargs'])})"
                lines.append(f"{head}[target={target}]{args}")
        return "\n".join(lines)


def _on_one_line(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _type_name(data: dict[str, Any]) -> str:
    if data.get("shape") is not None:
        return f" : Tensor{tuple(data['shape'])}"
    if "value" in data:
        return f" : {type(data['value']).__name__}"
    return ""


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_show, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, dict):
        items = (f"{_on_one_line(str(key))}: {_show(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        return f"slice({_show(value.start)}, {_show(value.stop)}, {_show(value.step)})"
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
            graph.add_op(names[op.index], **_node(op, names, nodes, function))
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
    taken: set[str],
) -> None:  # fmt: skip
    """Add a placeholder, or the node that takes an item out of one."""
    op = next((op for op in recording.tape.ops if op.target is part), None)
    used = op is not None
    if part.access is not Access.ROOT and not used:
        return
    name = names[op.index] if op is not None else _free(str(part.label), taken)
    nodes[part.index] = name
    data: dict[str, Any] = {"kwargs": {}, "module_path": "", "pass_": 1, "site": None, "text": ""}
    data.update(_meta(op.meta if op is not None else None), index=op.index if op else None)
    if part.access is Access.ROOT:
        graph.add_op(name, op="placeholder", target=part.label, args=(), **data)
        return
    holder = part.parent
    assert holder is not None
    for missing in _missing_holders(holder, nodes):
        nodes[missing.index] = _free(missing.label, taken)
        plain = {
            "kwargs": {},
            "module_path": "",
            "pass_": 1,
            "site": None,
            "text": "",
            "index": None,
        }
        graph.add_op(nodes[missing.index], **_element_node(missing, nodes), **plain)
    graph.add_op(name, **_element_node(part, nodes), **data)


def _missing_holders(part: Captured | None, nodes: dict[int, str]) -> list[Captured]:
    missing: list[Captured] = []
    while part is not None and part.index not in nodes:
        missing.insert(0, part)
        part = part.parent
    return missing


def _element_node(part: Captured, nodes: dict[int, str]) -> dict[str, Any]:
    assert part.parent is not None
    attribute = part.access in (Access.DICT, Access.ATTRIBUTE)
    return {
        "op": "call_function",
        "target": getattr if attribute else operator.getitem,
        "args": (NodeRef(nodes[part.parent.index]), part.key.name if attribute else part.key),
    }


def _free(label: str, taken: set[str]) -> str:
    name = re.sub(r"\W+", "_", label).strip("_") or "arg"
    name = free_name(f"_{name}" if name[0].isdigit() else name, taken)
    taken.add(name)
    return name


def _node(
    op: Op, names: list[str], nodes: dict[int, str], function: Callable[..., Any]
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "module_path": op.scope.path,
        "pass_": op.scope.number + 1,
        "index": op.index,
        "context": op.context,
        **_meta(op.meta),
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


def _meta(meta: Any) -> dict[str, Any]:
    if isinstance(meta, TensorMeta):
        return {"shape": meta.shape, "dtype": meta.dtype, "device": meta.device}
    if meta is None:
        return {}
    return {"value": meta}


def _with_nodes(value: Any, names: list[str], nodes: dict[int, str]) -> Any:
    """Replace references to ops, and to arguments, by references to nodes."""
    named = map_refs(value, lambda ref: NodeRef(names[ref.index]))
    return _with_existing(named, nodes)


def _with_existing(value: Any, nodes: dict[int, str]) -> Any:
    if isinstance(value, Existing) and value.part.index in nodes:
        return NodeRef(nodes[value.part.index])
    if type(value) in (tuple, list):
        return type(value)(_with_existing(item, nodes) for item in value)
    if type(value) is dict:
        return {key: _with_existing(item, nodes) for key, item in value.items()}
    return value


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
