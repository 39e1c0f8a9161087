"""Trace PyTorch models on real inputs, with dynamic control flow; replay, inspect, cut in.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: x * 2 if x.sum() > 0 else -x, torch.ones(3))
>>> [step.text for step in trace.flow_steps]
['x.sum() > 0']
"""

from bendtrace._forward_pass import log_forward_pass
from bendtrace._history import ModelHistory, load
from bendtrace._trace import Trace, trace
from bendtrace.differences.difference import Difference, diff
from bendtrace.errors import (
    BendtraceError,
    ConversionError,
    DivergenceError,
    InputError,
    LayerKeyError,
    NondeterminismError,
    NotReplayableError,
    TraceLimitWarning,
)
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
from bendtrace.graph.export import to_dot, to_graphml, to_node_link
from bendtrace.graph.fx import from_fx, to_fx
from bendtrace.graph.mirror import Graph, NodeRef
from bendtrace.history.entries import LayerEntry
from bendtrace.module import BendedModule, Explanation, Stats
from bendtrace.patchable import PatchableGraph
from bendtrace.paths.strings import NodePathError
from bendtrace.recording.boundaries import opaque
from bendtrace.storage.errors import LoadError, SaveError

__all__ = [
    "AssertFlowStep",
    "BendedModule",
    "BendtraceError",
    "ConversionError",
    "Difference",
    "DivergenceError",
    "EscapeFlowStep",
    "Explanation",
    "FlowStep",
    "FlowSteps",
    "Graph",
    "IndexFlowStep",
    "InputError",
    "LayerEntry",
    "LayerKeyError",
    "LoadError",
    "LogicalFlowStep",
    "LoopFlowStep",
    "ModelHistory",
    "NodePathError",
    "NodeRef",
    "NondeterminismError",
    "NotReplayableError",
    "PatchableGraph",
    "SaveError",
    "ShapeFlowStep",
    "Stats",
    "Trace",
    "TraceLimitWarning",
    "diff",
    "from_fx",
    "load",
    "log_forward_pass",
    "opaque",
    "to_dot",
    "to_fx",
    "to_graphml",
    "to_node_link",
    "trace",
]

__version__ = "0.1.0"
