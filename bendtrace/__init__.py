"""Trace PyTorch models on real inputs, with dynamic control flow; replay, inspect, cut in.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: x * 2 if x.sum() > 0 else -x, torch.ones(3))
>>> [step.text for step in trace.flow_steps]
['x.sum() > 0']
"""

from bendtrace._trace import Trace, trace
from bendtrace.errors import (
    BendtraceError,
    ConversionError,
    DivergenceError,
    InputError,
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
from bendtrace.graph.fx import from_fx, to_fx
from bendtrace.graph.mirror import Graph, NodeRef
from bendtrace.module import BendedModule, Explanation, Stats
from bendtrace.recording.boundaries import opaque

__all__ = [
    "AssertFlowStep",
    "BendedModule",
    "BendtraceError",
    "ConversionError",
    "DivergenceError",
    "EscapeFlowStep",
    "Explanation",
    "FlowStep",
    "FlowSteps",
    "Graph",
    "IndexFlowStep",
    "InputError",
    "LogicalFlowStep",
    "LoopFlowStep",
    "NodeRef",
    "NondeterminismError",
    "NotReplayableError",
    "ShapeFlowStep",
    "Stats",
    "Trace",
    "TraceLimitWarning",
    "from_fx",
    "opaque",
    "to_fx",
    "trace",
]

__version__ = "0.1.0"
