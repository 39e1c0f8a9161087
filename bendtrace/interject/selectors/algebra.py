"""Selectors as values: their combinations, and selectors that follow the flow of values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from bendtrace._checks import is_inside
from bendtrace.errors import InputError
from bendtrace.paths.candidates import Candidate, CandidateGraph, NodeSelector, Selectable


class Selector(NodeSelector):
    """A node selector that can be combined with others.

    `a & b`, `a | b`, `a ^ b` and `~a` select the nodes that are selected by both, by at least one,
    by exactly one, and by none. The other operand of a selector may also be a node path, a regular
    expression that is searched for in node paths, a module, a class of modules, a torch function, a
    predicate of the `Candidate`, or a list of these.

    Your own selectors are subclasses with one method, `matches`. Frozen dataclasses with equal
    fields are equal.

    Example:
        >>> import dataclasses, bendtrace as bt
        >>> @dataclasses.dataclass(frozen=True)
        ... class DeeperThan(bt.node_selector.Selector):
        ...     levels: int
        ...     def matches(self, node):
        ...         return node.path.count(".") >= self.levels
        >>> DeeperThan(2) & "layers_0.mlp.relu"
        DeeperThan(levels=2) & matches_path('layers_0.mlp.relu')
    """

    def __and__(self, other: Selectable) -> Selector:
        return _combine("&", self, other)

    def __rand__(self, other: Selectable) -> Selector:
        return _combine("&", other, self)

    def __or__(self, other: Selectable) -> Selector:
        return _combine("|", self, other)

    def __ror__(self, other: Selectable) -> Selector:
        return _combine("|", other, self)

    def __xor__(self, other: Selectable) -> Selector:
        return _combine("^", self, other)

    def __rxor__(self, other: Selectable) -> Selector:
        return _combine("^", other, self)

    def __invert__(self) -> Selector:
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError(
            f"{self!r} is neither true nor false: selectors are combined with &, | and ~, "
            "not with `and`, `or` and `not`"
        )

    @property
    def fn(self) -> Callable[[tuple[Any, Any]], bool]:
        """The selector as a function of a graph module of torch.fx and a node of its graph."""

        def selects(state: tuple[Any, Any]) -> bool:
            module, nodes = state[0], state[0].graph.nodes
            modules = {n: module.get_submodule(n.target) for n in nodes if n.op == "call_module"}
            found = {
                n.name: Candidate(
                    n.name, n.name, modules.get(n), str(n.target) if n in modules else "",
                    n.target if n.op == "call_function" else None, module, "",
                )
                for n in nodes
            }  # fmt: skip
            edges = [(one.name, n.name) for n in nodes for one in n.all_input_nodes]
            return state[1].name in self.select(CandidateGraph(found, edges))

        return selects

    def nth(self, index: int) -> Selector:
        """Select one of the selected nodes, in the order in which they begin.

        Args:
            index: which one, from 0; negative ones count from the end. An index out of range
                selects no node.
        """
        return Nth(self, index)

    def first(self) -> Selector:
        """Select the first of the selected nodes."""
        return Nth(self, 0)

    def last(self) -> Selector:
        """Select the last of the selected nodes."""
        return Nth(self, -1)

    def slice(
        self, start: int | None = None, stop: int | None = None, step: int | None = None
    ) -> Selector:
        """Select some of the selected nodes, in the order in which they begin.

        Args:
            start: the first of them, from 0; negative ones count from the end.
            stop: the first of them to leave out again.
            step: the distance from one to the next.
        """
        return Slice(self, start, stop, step)


@functools.singledispatch
def as_selector(what: Any) -> NodeSelector:
    """Return the selector for a value.

    Args:
        what: a selector; a node path; a regular expression, for node paths and qualified names; a
            module; a class of modules; a torch function; a predicate of the `Candidate`; a node of
            a tree of paths; or a list of these, for any of them.

    Returns:
        The selector.

    Raises:
        InputError: the value does not convert to a selector.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.node_selector.as_selector(torch.nn.Linear)
        matches_module_class(Linear)
        >>> bt.node_selector.as_selector([torch.relu, "fc.linear"])
        matches_function(relu) | matches_path('fc.linear')
    """
    raise InputError(
        f"{what!r} does not select nodes: pass a selector, a node path, a compiled regular "
        "expression, a module, a class of modules, a torch function, a predicate of the node, "
        "or a list of these"
    )


@as_selector.register
def _(what: NodeSelector) -> NodeSelector:
    return what


@as_selector.register(list)
@as_selector.register(tuple)
def _(what: Any) -> NodeSelector:
    return what[0] if len(what) == 1 else Combined("|", tuple(map(as_selector, what)))


def nodes_meant(what: Any, graph: CandidateGraph) -> list[Candidate]:
    """Return the nodes of a run that a selector, or a value for one, selects, in order."""
    meant = as_selector(what).select(graph)
    return [node for node in graph if node.path in meant]


def select_nodes(selector: NodeSelector, graph: CandidateGraph, among: set[str]) -> set[str]:
    """Return which of some nodes of a graph are selected.

    Args:
        selector: the selector.
        graph: the whole graph.
        among: paths of the nodes to check; a selector that judges nodes alone is not called for
            others.
    """
    if selector.looks_ahead:
        return selector.select(graph) & among
    return {path for path in among if selector.matches(graph.nodes[path])}


Sign = Literal["&", "|", "^"]
_STRENGTH: dict[str, int] = {"|": 0, "^": 1, "&": 2, "~": 3}


def _combine(sign: Sign, left: Selectable, right: Selectable) -> Selector:
    parts: list[NodeSelector] = []
    for operand in (left, right):
        part = as_selector(operand)
        parts += part.parts if isinstance(part, Combined) and part.sign == sign else [part]
    return Combined(sign, tuple(parts))


@dataclass(frozen=True, repr=False)
class Combined(Selector):
    """A combination of several selectors."""

    sign: Sign
    parts: tuple[NodeSelector, ...]
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _inherit(self, *self.parts)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if self.sign == "&":
            return all(part.matches(node) for part in self.parts)
        if self.sign == "|":
            return any(part.matches(node) for part in self.parts)
        return sum(part.matches(node) for part in self.parts) % 2 == 1

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        everything = set(graph.nodes)
        if self.sign == "&":
            found = everything
            for part in self.parts:  # a later one is not asked about what an earlier one rules out
                found = select_nodes(part, graph, found)
            return found
        found = set()
        for part in self.parts:
            if self.sign == "|":
                found |= select_nodes(part, graph, everything - found)
            else:
                found ^= select_nodes(part, graph, everything)
        return found

    def __repr__(self) -> str:
        return f" {self.sign} ".join(_inside(part, self.sign) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Not(Selector):
    """The nodes that a selector does not select. The model as a whole is not among them."""

    selector: NodeSelector
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _inherit(self, self.selector)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return node.path != "" and not self.selector.matches(node)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        others = set(graph.nodes) - {""}
        return others - select_nodes(self.selector, graph, others)

    def __repr__(self) -> str:
        return f"~{_inside(self.selector, '~')}"


class _Ahead(Selector):
    """Selectors that need the graph of a run."""

    looks_ahead = True

    def matches(self, node: Candidate) -> bool:
        """Raise, since the other nodes have to be known.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self!r} cannot be evaluated for one node alone: it needs the graph of a run, "
            "select(graph)"
        )


class _Ordered(_Ahead):
    """Some of the nodes that a selector selects, by their order."""

    selector: NodeSelector

    def _in_order(self, graph: CandidateGraph) -> list[str]:
        found = select_nodes(self.selector, graph, set(graph.nodes))
        return [path for path in graph.nodes if path in found]


@dataclass(frozen=True, repr=False)
class Nth(_Ordered):
    """One of the nodes that a selector selects."""

    selector: NodeSelector
    index: int
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.index) is not int:
            raise InputError(f"nth() takes an int as the index, not {self.index!r}")
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        found = self._in_order(graph)
        return {found[self.index]} if -len(found) <= self.index < len(found) else set()

    def __repr__(self) -> str:
        if self.index in (0, -1):
            return f"{'first' if self.index == 0 else 'last'}({self.selector!r})"
        return f"nth({self.selector!r}, {self.index})"


@dataclass(frozen=True, repr=False)
class Slice(_Ordered):
    """Several of the nodes that a selector selects."""

    selector: NodeSelector
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("start", "stop", "step"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InputError(f"match_slice() takes an int or None as {name}, not {value!r}")
        if self.step == 0:
            raise InputError("match_slice() does not support a step of 0")
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        return set(self._in_order(graph)[self.start : self.stop : self.step])

    def __repr__(self) -> str:
        return f"match_slice({self.selector!r}, {self.start}, {self.stop}, {self.step})"


def _inherit(made: Selector, *parts: NodeSelector) -> None:
    for name in ("looks_ahead", "needs_output"):
        object.__setattr__(made, name, any(getattr(part, name) for part in parts))


def _inside(part: NodeSelector, sign: str) -> str:
    """Return a part as text, in brackets if necessary."""
    weaker = isinstance(part, Combined) and _STRENGTH[part.sign] <= _STRENGTH[sign]
    return f"({part!r})" if weaker else repr(part)


def has_following(selector: Selectable, *, within: int | None = 1) -> Selector:
    """Select nodes whose values lead to a certain node.

    Args:
        selector: selects that node: a selector, or any value that converts to one.
        within: the maximum number of steps to it. 1: the node itself uses the value. Each op on the
            way is a step; None for any number.

    Raises:
        InputError: `within` is not a positive integer.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_following("sum"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_following("sum", within=None), trace)
        [<node relu: relu>, <node exp: exp>]
    """
    return Near(as_selector(selector), _steps(within), forward=True)


def has_preceding(selector: Selectable, *, within: int | None = 1) -> Selector:
    """Select nodes that use the values of a certain node, directly or indirectly.

    Args:
        selector: selects that node: a selector, or any value that converts to one.
        within: the maximum number of steps from it. 1: the value is used directly. Each op on the
            way is a step; None for any number.

    Raises:
        InputError: `within` is not a positive integer.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu", within=None), trace)
        [<node exp: exp>, <node sum: sum>]
    """
    return Near(as_selector(selector), _steps(within), forward=False)


def between(start: Selectable, end: Selectable) -> Selector:
    """Select nodes that values pass on their way from certain nodes to others.

    The ends themselves, and nodes inside them, are not selected.

    Args:
        start: selects where the values come from: a selector, or any value that converts to one.
        end: selects where they go to.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = x.relu()
        ...     return (h.exp() + 1).sum(), h.tanh()
        >>> trace = bt.trace(model, torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.between("relu", "sum"), trace)
        [<node exp: exp>, <node add: add>]
    """
    return Between(as_selector(start), as_selector(end))


@dataclass(frozen=True, repr=False)
class Near(_Ahead):
    """Nodes from which, or to which, there is a path."""

    selector: NodeSelector
    within: int | None
    forward: bool
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        ends = select_nodes(self.selector, graph, set(graph.nodes))
        edges = graph.edges.predecessors if self.forward else graph.edges.successors
        return _reachable(graph, ends, edges, self.within)

    def __repr__(self) -> str:
        made = "has_following" if self.forward else "has_preceding"
        within = "" if self.within == 1 else f", within={self.within}"
        return f"{made}({self.selector!r}{within})"


@dataclass(frozen=True, repr=False)
class Between(_Ahead):
    """Nodes on paths from some nodes to others."""

    start: NodeSelector
    end: NodeSelector
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        needs_output = self.start.needs_output or self.end.needs_output
        object.__setattr__(self, "needs_output", needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        everything = set(graph.nodes)
        starts, ends = (select_nodes(one, graph, everything) for one in (self.start, self.end))
        after = _reachable(graph, starts, graph.edges.successors)
        before = _reachable(graph, ends, graph.edges.predecessors)
        return {path for path in after & before if not is_inside(path, starts | ends)}

    def __repr__(self) -> str:
        return f"between({self.start!r}, {self.end!r})"


def _reachable(
    graph: CandidateGraph,
    ends: set[str],
    edges: Callable[[str], Iterable[str]],
    within: int | None = None,
) -> set[str]:
    """Return the nodes that a path leads to.

    Paths lead from op to op. A path through a module call uses the ops in it: the node of the call
    would connect all its inputs with all its outputs.
    """
    found: set[str] = set()
    edge, steps = ends, 0
    while edge and (within is None or steps < within):
        reached = {path for one in edge for path in edges(one)} - found
        found |= reached
        edge = {path for path in reached if not graph.nodes[path].is_module}
        steps += 1
    return found


def _steps(within: Any) -> int | None:
    if within is not None and (type(within) is not int or within < 1):
        raise InputError(
            f"within= takes a positive number of steps, or None for any number, not {within!r}"
        )
    return within
