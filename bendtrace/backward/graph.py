"""The autograd graph below some tensors, with the forward op that each node belongs to."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bendtrace.errors import LayerKeyError
from bendtrace.history.capture import Capture, GraphMarks
from bendtrace.history.entries import LayerEntry, Source
from bendtrace.history.names import near_names
from bendtrace.tape.tape import TensorMeta

if TYPE_CHECKING:
    from bendtrace._trace import Trace

__all__ = ["AutogradGraph", "BackwardNode", "Earlier", "shapes_text"]


_NEAR = 6
_LEAF = "AccumulateGrad"


class Earlier(Protocol):
    """An earlier backward pass with `create_graph=True`, which has marked nodes."""

    all_nodes: list[BackwardNode]
    _mark: object


class AutogradGraph:
    """The nodes below some tensors.

    Args:
        trace: the run that the tensors were computed from.
        capture: what was noted during the run.
        tensors: the tensors that a backward pass starts from.
        earlier: passes whose own graph the tensors may be part of, the latest first.

    Attributes:
        nodes: torch's nodes, in the order in which one thread of the engine runs them.
        entries: the record of each.
        position: the position of each in both lists.
        roots: for each tensor, its node, and which result of that node it is.
    """

    position: dict[Any, int]
    nodes: list[Any]

    def __init__(
        self, trace: Trace, capture: Capture, tensors: Sequence[Tensor], earlier: Sequence[Earlier]
    ) -> None:
        self._trace = trace
        self._marks: GraphMarks = capture.marks
        self._earlier = earlier
        self._counts: dict[str, int] = {}
        self._of_op: dict[int, LayerEntry] = {}
        for entry in trace.entries:
            if entry.index is not None:
                self._of_op.setdefault(entry.index, entry)
        self._leaves = self._leaf_names(capture)
        edges = [get_gradient_edge(tensor) for tensor in tensors]
        self.roots: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
        self.nodes = _in_order([node for node, _ in self.roots])
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self._numbered: dict[tuple[str, int], int] = {}
        self.entries: list[BackwardNode] = self._described()
        for node, described in zip(self.nodes, self.entries, strict=True):
            described.next = tuple(
                None if below is None else (self.entries[self.position[below]].label, number)
                for below, number in node.next_functions
            )

    def _leaf_names(self, capture: Capture) -> dict[int, tuple[str, str]]:
        """Return the name of each leaf, and its label in the log of the run, by identity."""
        names: dict[int, tuple[str, str]] = {}
        held = {index: state.tensor for index, state in capture.states.items()}
        for index, weak in {**held, **self._marks.leaves}.items():
            tensor, entry = weak(), self._of_op.get(index)
            if tensor is not None and entry is not None:
                names[id(tensor)] = entry.label, entry.label
        if isinstance(self._trace.function, nn.Module):
            for name, parameter in self._trace.function.named_parameters():
                names[id(parameter)] = name, names.get(id(parameter), ("", ""))[1]
        return names

    def _described(self) -> list[BackwardNode]:
        inside: set[int] = set()  # of the graph of the run
        below: set[int] = set()  # under its arguments
        entries: list[BackwardNode] = []
        for number, node in enumerate(self.nodes):
            mark = self._marks.mark_of(node)
            if mark == "before":
                inside.discard(number)
                below.add(number)
            elif mark == "run":
                inside.add(number)
                below.discard(number)
            entry = self._known(node)
            if entry is None:
                entry = self._new(node, number in inside, number in below)
            elif entry.where == "run" and not entry.made_in:
                inside.add(number)
            if entry.where != "leaf" and (mark or number in inside):
                self._numbered[mark or "run", node._sequence_nr()] = number
            entries.append(entry)
            for other, _ in node.next_functions:
                if other is not None:
                    to = inside if number in inside else below if number in below else None
                    if to is not None:
                        to.add(self.position[other])
        return entries

    def _known(self, node: Any) -> BackwardNode | None:
        """Return the record of a node that an earlier pass has visited or made."""
        for earlier in self._earlier:
            found = node.metadata.get(earlier._mark)
            if found is not None:
                what, number = found
                entry = earlier.all_nodes[number]
                plain: BackwardNode = replace(
                    entry, order=None, given=(), made=(), next=(), is_edited=False,
                    gradients_in=None, gradients_out=None,
                )  # fmt: skip
                if what == "made":
                    plain.made_in, plain.type, plain.parameter = entry.label, _short(node), ""
                    plain.where = "run" if entry.where == "leaf" else entry.where
                    suffix = "" if entry.passes == 1 else f":{entry.pass_number}"
                    plain.name = self._unique(f"{entry.name}.{_short(node)}", suffix)
                return plain
        return None

    def _new(self, node: Any, inside: bool, below: bool) -> BackwardNode:
        kind = _short(node)
        if kind == _LEAF:
            name, label = self._leaves.get(id(node.variable), ("", ""))
            return BackwardNode(
                f"{name}.grad" if name else self._unique("leaf.grad"), kind, label,
                where="leaf", parameter=name, module=name.rpartition(".")[0],
            )  # fmt: skip
        op = self._marks.op_of(node._sequence_nr()) if inside else None
        forward = None if op is None else self._of_op.get(op)
        if forward is None:
            where: Any = "run" if inside else "before" if below else "after"
            return BackwardNode(self._unique(kind), kind, op=op, where=where)
        suffix = "" if forward.passes == 1 else f":{forward.pass_number}"
        return BackwardNode(
            self._unique(f"{forward.name}.{kind}", suffix), kind, forward.label, op,
            forward.element, "run", "", forward.node_path, forward.module, forward.scopes,
            forward.source, forward.pass_number, forward.passes,
        )  # fmt: skip

    def _unique(self, name: str, suffix: str = "") -> str:
        """Return a name with a number, if there was one before."""
        count = self._counts[name + suffix] = self._counts.get(name + suffix, 0) + 1
        return name if count == 1 else f"{name}_{count}"

    def release(self) -> None:
        """Let go of torch's nodes, which keep the values saved for the backward pass alive."""
        self.nodes, self.position, self.roots = [], {}, []

    # Looking things up

    def find(self, key: Any) -> list[int]:
        """Return the positions of the nodes for a key.

        Raises:
            LayerKeyError: there are none.
        """
        if isinstance(key, BackwardNode):
            key = key.label
        if isinstance(key, str):
            found = [
                n for n, e in enumerate(self.entries)
                if key in (e.label, e.name, e.type) or (key == e.parameter != "")
            ]  # fmt: skip
            if found:
                return found
        found = []
        for value in self.values(key):
            if value.kind != "state":
                found += [n for n, e in enumerate(self.entries) if e.op == value.index]
            place = self.place(value)
            found += [] if place is None else [place[0]]
        if not found:
            raise LayerKeyError(
                f"{key!r} has no node below the given tensors: they do not depend on it, or it "
                "needs no gradient",
                key,
            )
        return sorted(set(found))

    def values(self, key: Any) -> list[LayerEntry]:
        """Return the values of the run for a key; for an output, the value that it was.

        Raises:
            LayerKeyError: there are none.
        """
        try:
            found = self._trace[key]
        except LayerKeyError as error:
            names = [entry.label for entry in self.entries]
            near = near_names(key, names, _NEAR) if isinstance(key, str) else []
            hint = f"; similar names of backward nodes: {', '.join(near)}" if near else ""
            raise LayerKeyError(f"{error}{hint}", key, tuple(near)) from None
        values = [found] if isinstance(found, LayerEntry) else list(found)
        sources = [
            self._trace[label] if value.kind == "output" else value
            for value in values
            for label in (value.parents if value.kind == "output" else [""])
        ]
        return [source for source in sources if isinstance(source, LayerEntry)]

    def place(self, value: LayerEntry) -> tuple[int, int] | None:
        """Return the node that a value's gradient arrives at, and as which of its gradients."""
        if value.index is not None:
            node, place = self._marks.places.get((value.index, value.element), (("", 0), 0))
            if node in self._numbered:
                return self._numbered[node], place
        for position, entry in enumerate(self.entries):
            if entry.where == "leaf" and entry.forward == value.label:
                return position, 0
        return None


def _short(node: Any) -> str:
    """Return the name of a node's type, without torch's namespace."""
    return str(node.name()).rpartition("::")[2]


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """Return all nodes below some, each after all that it receives gradients from.

    Among those that are ready, the engine takes the one that was made last.
    """
    waiting: dict[Any, int] = dict.fromkeys(roots, 0)
    stack = list(waiting)
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None:
                if below not in waiting:
                    waiting[below] = 0
                    stack.append(below)
                waiting[below] += 1
    first = [node for node, count in waiting.items() if not count]
    ready = [(-node._sequence_nr(), at, node) for at, node in enumerate(first)]
    heapq.heapify(ready)
    order, count = [], len(first)
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for below, _ in node.next_functions:
            if below is not None:
                waiting[below] -= 1
                if not waiting[below]:
                    count += 1
                    heapq.heappush(ready, (-below._sequence_nr(), count, below))
    return order


# BackwardNode: one node of torch's autograd graph, and what a backward pass did in it.

Gradients = tuple[Tensor | None, ...]
Metas = tuple[TensorMeta | None, ...]


@dataclass(eq=False, repr=False)
class BackwardNode:
    """One node of the autograd graph: a function that turns gradients of results into others.

    Attributes:
        name: its unique name, without the pass: `linear_1_1.AddmmBackward0` for a node that an op
            made, `0.weight.grad` for the node that adds a gradient to `.grad` of a leaf.
        type: name of the autograd node, as torch has it: `AddmmBackward0`, `AccumulateGrad`.
        forward: label of the forward value whose op made it (`linear_1_1:2`), "" if no op of the
            run did. For a leaf the label of the parameter or argument.
        op: position of that op on the tape; None for leaves, and for nodes from outside the run.
        element: which result of that op `forward` is.
        where: "run" for a node that an op of the run made, "leaf" for one that accumulates a
            gradient, "before" for the graph of the arguments and of tensors that the run cannot
            know the origin of, "after" for that of the loss.
        made_in: label of the node of an earlier backward pass in which it was made, with
            `create_graph=True`; "" for a node that the forward run has made.
        node_path: path of the forward op in the tree of the run.
        module: name of the innermost module that the op ran in; "" for the root.
        scopes: the calls of modules around it, outermost first.
        source: the place of the op in the source.
        pass_number: the pass of the forward layer, counted from 1.
        passes: the number of passes of the forward layer.
        parameter: for a leaf, its name, such as `0.weight` or `input_1_0`; otherwise "".
        order: when it ran in the pass, counted from 0; None if it did not.
        given: shape, dtype and device of the gradients that arrived: one for each result of the
            forward op, None for those without.
        made: the same for the gradients that it returned: one for each of `next`.
        next: where each gradient that it returns goes: the label of a node, and for which of that
            node's results it is. None where no gradient is needed.
        is_edited: whether an edit changed the gradients that arrived.
        time: duration in seconds, with hooks of others; None if it did not run.
        gradients_in: the gradients that arrived, after edits and hooks; None if they were not kept.
        gradients_out: the gradients that it returned; None if they were not kept.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(4, 2), save="none")
        >>> node = trace.backward(trace.output.sum())["AddmmBackward0"]
        >>> node
        <BackwardNode linear_1_1.AddmmBackward0: (4, 3) -> (3,), none, (2, 3)>
        >>> node.forward, node.module, node.next[0]
        ('linear_1_1', '0', ('0.bias.grad', 0))
    """

    name: str
    type: str
    forward: str = ""
    op: int | None = None
    element: tuple[object, ...] = ()
    where: Literal["run", "leaf", "before", "after"] = "after"
    made_in: str = ""
    node_path: str = ""
    module: str = ""
    scopes: tuple[str, ...] = ()
    source: Source | None = None
    pass_number: int = 1
    passes: int = 1
    parameter: str = ""
    order: int | None = None
    given: Metas = ()
    made: Metas = ()
    next: tuple[tuple[str, int] | None, ...] = field(default=())
    is_edited: bool = False
    time: float | None = None
    gradients_in: Gradients | None = None
    gradients_out: Gradients | None = None

    @property
    def label(self) -> str:
        """Its name, with the pass of the forward layer if that has several."""
        return self.name if self.passes == 1 else f"{self.name}:{self.pass_number}"

    def __repr__(self) -> str:
        arrived = shapes_text(self.given)
        made = f" -> {shapes_text(self.made)}" if self.made else ""
        return f"<BackwardNode {self.label}: {arrived}{made}>"


def shapes_text(metas: Metas) -> str:
    """Return the shapes of gradients as text."""
    return ", ".join("none" if meta is None else str(tuple(meta.shape)) for meta in metas)
