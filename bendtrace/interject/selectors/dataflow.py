"""Selectors that go by where values come from, and where they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bendtrace.errors import InputError
from bendtrace.interject.selector import NodeSelector
from bendtrace.interject.selectors.algebra import Selector, as_selector, cannot_tell, selected
from bendtrace.paths.candidates import Candidate, CandidateGraph

__all__ = ["between", "has_following", "has_preceding"]


def has_following(selector: Any, *, within: int | None = 1) -> Selector:
    """Mean nodes whose values lead to a certain node.

    Args:
        selector: means that node: a selector, or what stands for one.
        within: how many steps the way may have at most. 1: the node itself uses the value. Each
            op on the way is a step; None for any number.

    Raises:
        InputError: `within` is no positive whole number.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_following("sum"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_following("sum", within=None), trace)
        [<node relu: relu>, <node exp: exp>]
    """
    return Near(as_selector(selector), _steps(within), forward=True)


def has_preceding(selector: Any, *, within: int | None = 1) -> Selector:
    """Mean nodes that are led to by the values of a certain node.

    Args:
        selector: means that node: a selector, or what stands for one.
        within: how many steps the way may have at most. 1: the value is used as it is. Each op on
            the way is a step; None for any number.

    Raises:
        InputError: `within` is no positive whole number.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu", within=None), trace)
        [<node exp: exp>, <node sum: sum>]
    """
    return Near(as_selector(selector), _steps(within), forward=False)


def between(start: Any, end: Any) -> Selector:
    """Mean nodes that values pass on their way from certain nodes to others.

    These are not meant themselves, and what happens inside them is not either.

    Args:
        start: means where they come from: a selector, or what stands for one.
        end: means where they go to.

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


class _Ahead(Selector):
    looks_ahead = True

    def matches(self, node: Candidate) -> bool:
        """Refuse, since the other nodes have to be known.

        Raises:
            InputError: always.
        """
        raise cannot_tell(self)


@dataclass(frozen=True, repr=False)
class Near(_Ahead):
    """Nodes from which, or to which, there is a way."""

    selector: NodeSelector
    within: int | None
    forward: bool
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the nodes of a graph that are meant."""
        ends = selected(self.selector, graph, set(graph.nodes))
        edges = graph.edges.predecessors if self.forward else graph.edges.successors
        return _reached(graph, ends, edges, self.within)

    def __repr__(self) -> str:
        made = "has_following" if self.forward else "has_preceding"
        within = "" if self.within == 1 else f", within={self.within}"
        return f"{made}({self.selector!r}{within})"


@dataclass(frozen=True, repr=False)
class Between(_Ahead):
    """Nodes on ways from some nodes to others."""

    start: NodeSelector
    end: NodeSelector
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        needs_output = self.start.needs_output or self.end.needs_output
        object.__setattr__(self, "needs_output", needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the nodes of a graph that are meant."""
        everything = set(graph.nodes)
        starts, ends = (selected(one, graph, everything) for one in (self.start, self.end))
        after = _reached(graph, starts, graph.edges.successors)
        before = _reached(graph, ends, graph.edges.predecessors)
        return {path for path in after & before if not _belongs(path, starts | ends)}

    def __repr__(self) -> str:
        return f"between({self.start!r}, {self.end!r})"


def _belongs(path: str, nodes: set[str]) -> bool:
    """Whether a node is one of some nodes, or in a call that is."""
    while path:
        if path in nodes:
            return True
        path = path.rpartition(".")[0]
    return False


def _reached(
    graph: CandidateGraph,
    ends: set[str],
    edges: Callable[[str], Iterable[str]],
    within: int | None = None,
) -> set[str]:
    """Return the nodes that a way leads to.

    Ways lead from op to op. Where a call of a module is passed, it is the ops in it: its node would
    join all that goes in with all that comes out.
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
        raise InputError(f"within= takes a number of steps from 1, or None for any, not {within!r}")
    return within
