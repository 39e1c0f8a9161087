"""The base of node selectors."""

from __future__ import annotations

from bendtrace.paths.candidates import Candidate, CandidateGraph

__all__ = ["NodeSelector"]


class NodeSelector:
    """Says which nodes are meant. Subclasses override `matches`, or `select` if they look ahead.

    Selectors are values: two that are made alike are equal and hash alike.

    Attributes:
        looks_ahead: whether the whole graph has to be known to tell. Such selectors are decided
            by a run of the model without insertions on the same inputs.
        needs_output: whether the output has to be known to tell.

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

    def matches(self, node: Candidate) -> bool:
        """Whether a node is meant, going by the node alone."""
        raise NotImplementedError

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the nodes of a graph that are meant."""
        return {node.path for node in graph if self.matches(node)}
