"""The nodes of a run in the form that selectors use, and the flow of values between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from bendtrace._lazy import networkx as nx
from bendtrace.paths.events import Events
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Node
from bendtrace.source.sites import Site
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in
from bendtrace.torch_rules.functions import METADATA, SHAPES, VALUES, is_inserted

if TYPE_CHECKING:
    from bendtrace.paths.build import Builder


@dataclass(eq=False)
class Candidate:
    """A node that a selector judges: a call of a module, a function or a method.

    Attributes:
        path: node path: `layers_0.mlp.relu`; for calls of modules without an op: `layers_0.mlp`.
        base: its name without a number: `relu`, `conv1`.
        module: the module called; None for functions and methods.
        module_path: qualified name of that module: `layers.0.mlp`; "" for the root.
        function: the torch function or method that is called; None for calls of modules.
        scope: the module whose code makes the call; None outside all modules.
        scope_path: qualified name of that module.
        site: its place in the source; None for the root.
        shape: shape of the first tensor in its output; None if not known yet.
        dtype: dtype of that tensor.
        uses_parameter: for functions, whether a parameter is among the arguments.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 100), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(1, 2))
        >>> linear = bt.node_selector.find(torch.nn.Linear, trace)[0]
        >>> linear, linear.path, linear.qualified_name, linear.shape
        (<node sub_0: Linear>, 'sub_0', '0', (1, 100))
        >>> bt.node_selector.find(lambda node: node.shape == (1, 100) and not node.is_module, trace)
        [<node sub_0.linear: linear>, <node sub_1.relu: relu>]
    """

    path: str
    base: str
    module: nn.Module | None
    module_path: str
    function: Callable[..., Any] | None
    scope: nn.Module | None
    scope_path: str
    site: Site | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    uses_parameter: bool = False

    @property
    def is_module(self) -> bool:
        """True if it is a call of a module."""
        return self.module is not None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def qualified_name(self) -> str:
        """Qualified name of the module; for ops, the name of the enclosing module and their own."""
        if self.is_module:
            return self.module_path
        return f"{self.scope_path}.{self.name}" if self.scope_path else self.name

    @property
    def file(self) -> str:
        """The source file; "" if unknown."""
        return "" if self.site is None else self.site.place.file

    @property
    def line(self) -> int:
        """The line in the source file, counted from 1; 0 if unknown."""
        return 0 if self.site is None else self.site.place.line

    @cached_property
    def text(self) -> str:
        """The expression in the source; "" if it cannot be read."""
        return "" if self.site is None else self.site.place.text

    def __repr__(self) -> str:
        what = type(self.module).__name__ if self.module is not None else self.base
        return f"<node {self.path or '<root>'}: {what}>"


class CandidateGraph:
    """The nodes of one run in the order in which they first began, and the flow of values.

    An edge means that a value which one node returned, or wrote, is used by another. A module call
    and the ops inside it are separate nodes.

    Attributes:
        nodes: the nodes by path.

    Example:
        >>> import dataclasses, torch, bendtrace as bt
        >>> @dataclasses.dataclass(frozen=True)
        ... class Used(bt.node_selector.Selector):
        ...     times: int
        ...     looks_ahead = True
        ...     def select(self, graph):
        ...         return {node.path for node in graph if len(graph.followers(node)) == self.times}
        >>> trace = bt.trace(lambda x: (x := x.relu()).exp() + x.tanh(), torch.ones(2))
        >>> bt.node_selector.find(Used(2), trace)
        [<node relu: relu>]
    """

    def __init__(
        self, nodes: dict[str, Candidate], edges: nx.DiGraph[Any] | Iterable[tuple[str, str]] = ()
    ) -> None:
        self.nodes = nodes
        self._edges = edges

    @cached_property
    def edges(self) -> nx.DiGraph[Any]:
        """The data edges between paths, as a networkx graph, which may be part of a larger one."""
        if isinstance(self._edges, nx.DiGraph):
            return self._edges
        graph: nx.DiGraph[Any] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from(self._edges)
        return graph

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.nodes.values())

    def followers(self, node: Candidate) -> list[Candidate]:
        """The nodes that use the output of a node directly."""
        return [self.nodes[path] for path in self.edges.successors(node.path)]

    def preceding(self, node: Candidate) -> list[Candidate]:
        """The nodes whose outputs a node uses."""
        return [self.nodes[path] for path in self.edges.predecessors(node.path)]


class NodeSelector:
    """Selects nodes. Subclasses override `matches`, or `select` if they look ahead.

    Selectors are values: two with the same arguments are equal and have the same hash.

    Attributes:
        looks_ahead: whether the decision needs the whole graph. Such selectors are resolved in a
            known run of the model without insertions that the call will repeat.
        needs_output: whether the decision needs the output of a node.
        is_of_modules: whether it selects calls of modules only, by the module alone.

    Example:
        >>> import torch, bendtrace as bt
        >>> class OfMatrices(bt.node_selector.NodeSelector):
        ...     needs_output = True
        ...     def matches(self, node):
        ...         return node.shape is not None and len(node.shape) == 2
        >>> trace = bt.trace(lambda x: x.relu().sum(0).exp(), torch.ones(2, 3))
        >>> bt.node_selector.find(OfMatrices(), trace)
        [<node relu: relu>]
    """

    looks_ahead: bool = False
    needs_output: bool = False
    is_of_modules: bool = False

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        raise NotImplementedError

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        return {node.path for node in graph if self.matches(node)}


# What converts to a selector. Classes of modules, torch functions and predicates of the `Candidate`
# are callables.
OneSelectable: TypeAlias = (
    NodeSelector | str | Node | re.Pattern[str] | nn.Module | Callable[..., Any]
)
Selectable: TypeAlias = OneSelectable | Sequence[OneSelectable]


def candidates_of(nodes: RunNodes) -> CandidateGraph:
    """Return the nodes of a run, and the flow of values between them.

    Nodes are the calls of modules and functions that accept insertions; the tree of paths also
    shows sizes and arithmetic on numbers.
    """
    return CandidateGraph(nodes.candidates, list(_Flow(nodes).edges()))


class RunNodes:
    """The node of which each op, and each call of a module, is a pass.

    Attributes:
        events: the events of the run.
        candidates: the nodes by path, in the order in which they began.
        of_op: the path of each op that is one.
        of_call: the path of each call, by identity.
        executions: the path of each op and call in the order in which they began.
    """

    def __init__(self, builder: Builder) -> None:
        self.events: Events = builder.events
        self.candidates: dict[str, Candidate] = {}
        self.of_op: dict[int, str] = {}
        self.of_call: dict[int, str] = {}
        self.executions: list[str] = []
        self._builder = builder
        self._add_call(self.events.root)

    def _add_call(self, call: ModuleCall) -> None:
        builder = self._builder
        node, _ = builder.where[id(call)]
        self.of_call[id(call)] = node.path
        self.executions.append(node.path)
        if node.path not in self.candidates:
            is_root = call is self.events.root
            output = self.events.recording.root.output if is_root else call.output
            meta = next(filter(None, map(self._first_of, refs_in(output))), None)
            around = None if is_root else call.parent
            self.candidates[node.path] = Candidate(
                node.path, node.label or node.name, call.module, call.path, None,
                None if around is None else around.module, "" if around is None else around.path,
                None if is_root else call.site,
                None if meta is None else meta.shape, None if meta is None else meta.dtype,
            )  # fmt: skip
        names: dict[int, TreeNode] = {}
        for position, name in builder.marks[id(call)]:
            child = node.children[name]
            if child.role == "op":  # a call that began there has the same position
                names[position] = child
        for event in self.events.of(call):
            if isinstance(event, ModuleCall):
                if id(event) in builder.where:
                    self._add_call(event)
            elif event.index in names and _can_be_cut_into(event):
                self._add_op(event, names[event.index])

    def _add_op(self, op: Op, node: TreeNode) -> None:
        self.of_op[op.index] = node.path
        self.executions.append(node.path)
        if node.path in self.candidates:
            return
        meta = _first_tensor(op.meta)
        self.candidates[node.path] = Candidate(
            node.path, node.label or node.name, None, "", op.target,
            op.scope.module, op.scope.path, op.site,
            None if meta is None else meta.shape, None if meta is None else meta.dtype,
            any(map(self._is_parameter, refs_in((op.args, op.kwargs)))),
        )  # fmt: skip

    def _is_parameter(self, ref: Ref) -> bool:
        op = self.events.ops[ref.index]
        return op.kind is OpKind.STATE and issubclass(op.target.type, nn.Parameter)

    def _first_of(self, ref: Ref) -> TensorMeta | None:
        return _first_tensor(self.events.ops[ref.index].meta)


_GIVEN = (OpKind.INPUT, OpKind.STATE)


class _Flow:
    """Follows values from where they are given to where they are used.

    Values pass through ops without a node: elements of results, arithmetic on numbers, writes such
    as `x[0] = 1`, and gates. Inputs and state are none either, but a module that hands one on gives
    it. A size or a dtype is not the value: nothing leads through reading one.
    """

    def __init__(self, nodes: RunNodes) -> None:
        self._nodes = nodes
        self._ops = nodes.events.ops
        # For each value the inputs, state and nodes that it comes from, by op. State that a call is
        # given can be read after the call began.
        self._carried: list[tuple[int, ...]] = [
            (op.index,) if op.kind in _GIVEN else () for op in self._ops
        ]
        # For tensors that were written to under their own name, the op that did last.
        self._written: dict[int, int] = {}
        # The calls that handed on what they had not computed themselves.
        self._passed: dict[int, list[ModuleCall]] = {}
        self._chains: dict[int, tuple[ModuleCall, ...]] = {}
        self._crossed: dict[tuple[int, int], tuple[list[str], list[str]]] = {}

    def edges(self) -> Iterator[tuple[str, str]]:
        """Yield the edges, as often as values went along them."""
        calls = iter(self._nodes.events.recording.tape.calls)
        coming = next(calls, None)
        running: list[ModuleCall] = []
        for position in range(len(self._ops) + 1):
            while coming is not None and coming.start <= position:
                # Calls that consist of no ops end where they began: before the next that is not
                # theirs.
                while running and running[-1] is not coming.parent:
                    self._leave(running.pop())
                yield from self._enter(coming)
                running.append(coming)
                coming = next(calls, None)
            while running and running[-1].stop <= position:
                self._leave(running.pop())
            if position < len(self._ops):
                yield from self._op(self._ops[position])

    def _op(self, op: Op) -> Iterator[tuple[str, str]]:
        if op.kind in _GIVEN or op.target in SHAPES or op.target in METADATA:
            return
        path = self._nodes.of_op.get(op.index)
        sources = tuple(dict.fromkeys(self._sources(op)))
        self._carried[op.index] = sources if path is None else (op.index,)
        if path is not None:
            for source in sources:
                yield from self._connect(source, path, op.scope)
        self._written.update(dict.fromkeys(op.writes, op.index))

    def _sources(self, op: Op) -> Iterator[int]:
        """Yield where the values come from that an op computes with, those written included."""
        for ref in refs_in((op.args, op.kwargs)):
            writer = op.reads.get(ref.index)
            if writer is not None:  # perhaps under another name, as a view
                yield from self._carried[writer]
            yield from self._latest(ref.index)

    def _latest(self, index: int) -> tuple[int, ...]:
        return self._carried[self._written.get(index, index)]

    def _enter(self, call: ModuleCall) -> Iterator[tuple[str, str]]:
        if call is self._nodes.events.root or id(call) not in self._nodes.of_call:
            return
        for ref in refs_in((call.args, call.kwargs)):
            for source in self._latest(ref.index):
                yield from self._connect(source, None, call)

    def _leave(self, call: ModuleCall) -> None:
        if call is self._nodes.events.root or id(call) not in self._nodes.of_call:
            return
        for ref in refs_in(call.output):
            for source in self._latest(ref.index):
                is_own = call in self._chain(self._ops[source].scope)
                if not is_own or self._ops[source].kind in _GIVEN:
                    passed = self._passed.setdefault(source, [])
                    if call not in passed:
                        passed.append(call)

    def _connect(
        self, source: int, path: str | None, scope: ModuleCall
    ) -> Iterator[tuple[str, str]]:
        """Yield the edges from all that gives a value to what uses it."""
        given = self._nodes.of_op.get(source)
        if given is not None:
            giving, using = self._between(self._ops[source].scope, scope)
            for giver in (given, *giving):
                yield from ((giver, user) for user in (*using, path) if user is not None)
        for call in self._passed.get(source, ()):
            giver = self._path(call)
            _, using = self._between(call, scope)
            yield from ((giver, user) for user in (*using, path) if user is not None)

    def _between(self, inner: ModuleCall, outer: ModuleCall) -> tuple[list[str], list[str]]:
        """Return the calls that a value leaves on its way between two, and those it enters."""
        known = self._crossed.get((id(inner), id(outer)))
        if known is None:
            left, entered = self._chain(inner), self._chain(outer)
            known = self._crossed[id(inner), id(outer)] = (
                [self._path(call) for call in left if call not in entered],
                [self._path(call) for call in entered if call not in left],
            )
        return known

    def _path(self, call: ModuleCall) -> str:
        return self._nodes.of_call[id(call)]

    def _chain(self, call: ModuleCall) -> tuple[ModuleCall, ...]:
        """Return a call and those around it, without the root."""
        known = self._chains.get(id(call))
        if known is None:
            chain = []
            around: ModuleCall | None = call
            while around is not None and around is not self._nodes.events.root:
                if id(around) in self._nodes.of_call:
                    chain.append(around)
                around = around.parent
            known = self._chains[id(call)] = tuple(chain)
        return known


def _first_tensor(meta: Any) -> TensorMeta | None:
    """Return the first description of a tensor in the description of a result."""
    if isinstance(meta, TensorMeta):
        return meta
    if isinstance(meta, (tuple, list)):
        return next(filter(None, map(_first_tensor, meta)), None)
    return None


def _can_be_cut_into(op: Op) -> bool:
    """Return whether something can be inserted at an op that the tree shows.

    Sizes and arithmetic on numbers cannot, nor can values that Python reads right away, such as
    the truth of a tensor, and for what is an insertion itself.
    """
    if op.kind is not OpKind.CALL or op.target in SHAPES or op.target in VALUES:
        return False
    return not is_inserted(op)
