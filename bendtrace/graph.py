"""A trace as a graph: names, the networkx mirror, conversion to torch.fx and other forms.

>>> import torch, bendtrace as bt
>>> graph = bt.trace(torch.relu, torch.ones(2)).graph
>>> isinstance(graph, bt.graph.Graph), [node.op for node in bt.graph.to_fx(graph).graph.nodes]
(True, ['placeholder', 'call_function', 'output'])
"""

from typing import TYPE_CHECKING

from bendtrace import _public

if TYPE_CHECKING:
    from bendtrace.log.fx import from_fx, to_fx
    from bendtrace.log.mirror import Graph, to_dot, to_graphml, to_node_link
    from bendtrace.record.op_names import NodeRef
    from bendtrace.show.state_graph import StateGraph

__all__ = [
    "Graph",
    "NodeRef",
    "StateGraph",
    "from_fx",
    "to_dot",
    "to_fx",
    "to_graphml",
    "to_node_link",
]
__dir__ = __all__.copy

if not TYPE_CHECKING:  # what only tracing needs of this package comes without networkx
    __getattr__ = _public.importer(
        globals(),
        {
            "Graph": "bendtrace.log.mirror",
            "NodeRef": "bendtrace.record.op_names",
            "StateGraph": "bendtrace.show.state_graph",
            "from_fx": "bendtrace.log.fx",
            "to_dot": "bendtrace.log.mirror",
            "to_fx": "bendtrace.log.fx",
            "to_graphml": "bendtrace.log.mirror",
            "to_node_link": "bendtrace.log.mirror",
        },
    )
