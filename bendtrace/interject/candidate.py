"""A node as selectors see it, and the graph that nodes stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bendtrace._later import networkx as nx
from bendtrace.recording.sites import Site

__all__ = ["Candidate", "CandidateGraph"]


@dataclass(eq=False)
class Candidate:
    """A node that a selector is asked about: a call of a module, a function or a method.

    Attributes:
        path: node path: `layers_0.mlp.relu`; for calls of modules without an op: `layers_0.mlp`.
        base: what it is called by itself: `relu`, `conv1`.
        module: the module called; None for functions and methods.
        module_path: qualified name of that module: `layers.0.mlp`; "" for the root.
        function: the torch function or method that is called; None for calls of modules.
        scope: the module in whose code it happens; None outside all modules.
        scope_path: qualified name of that module.
        site: where it happens in the source; None for the root.
        shape: shape of the first tensor that it gave; None where that is not known yet.
        dtype: dtype of that tensor.
        uses_parameter: for functions, whether a parameter is among what they are given.

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
        """Whether it is a call of a module."""
        return self.module is not None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def qualified_name(self) -> str:
        """Qualified name of the module; for ops that of the module around, and their own name."""
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
    """The nodes of one run in the order in which they first began, and how values flow.

    An edge says that a value which one node gave, or wrote, is used by another. A module's call
    takes part under its own name, and the ops inside it under theirs.

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
        """Data edges between paths, as a networkx graph of its own or part of a larger one."""
        if isinstance(self._edges, nx.DiGraph):
            return self._edges
        graph: nx.DiGraph[Any] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from(self._edges)
        return graph

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.nodes.values())

    def followers(self, node: Candidate) -> list[Candidate]:
        """The nodes that use what a node gives, as it is."""
        return [self.nodes[path] for path in self.edges.successors(node.path)]

    def preceding(self, node: Candidate) -> list[Candidate]:
        """The nodes that gave what a node uses."""
        return [self.nodes[path] for path in self.edges.predecessors(node.path)]
