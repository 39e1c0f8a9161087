"""Trace PyTorch models on real inputs, with dynamic control flow; replay, inspect, cut in.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: x * 2 if x.sum() > 0 else -x, torch.ones(3))
>>> [step.text for step in trace.flow_steps]
['x.sum() > 0']
"""

import importlib
from typing import TYPE_CHECKING, Any

from bendtrace._public import PLACES

if TYPE_CHECKING:
    from bendtrace import analysis, distributed, node_selector, workflows
    from bendtrace._forward_pass import log_forward_pass
    from bendtrace._history import ModelHistory, load
    from bendtrace._interject import (
        interject_by_match,
        interject_by_module,
        interject_by_module_class,
        interject_by_module_class_native,
        interject_by_name,
    )
    from bendtrace._rewriting import replace_module, replace_module_native
    from bendtrace._trace import Trace, trace
    from bendtrace.differences.difference import Difference, diff
    from bendtrace.errors import (
        BendtraceError,
        CompileWarning,
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
    from bendtrace.graph.mirror import Graph
    from bendtrace.graph.names import NodeRef
    from bendtrace.harvesting.harvest import harvest
    from bendtrace.history.entries import LayerEntry
    from bendtrace.interject.activations import Activations
    from bendtrace.interject.bends.affine import Affine, Bias, Scale
    from bendtrace.interject.bends.bend import Bend, CallbackChain
    from bendtrace.interject.bends.bending import Bending
    from bendtrace.interject.bends.capture import Capture, InterpolationFromCapture
    from bendtrace.interject.bends.config import BendingConfig
    from bendtrace.interject.bends.errors import BendError, BendShapeError
    from bendtrace.interject.bends.functional import Lambda
    from bendtrace.interject.bends.interpolation import InterpolateActivation
    from bendtrace.interject.bends.mask import Mask, OrderedMask, ThresholdActivation
    from bendtrace.interject.bends.noise import Normal
    from bendtrace.interject.bends.parameter import BendingParameter
    from bendtrace.interject.bends.permute import Permute, ThresholdPermute
    from bendtrace.interject.candidate import Candidate
    from bendtrace.interject.errors import InterjectionError, NeverFiredWarning
    from bendtrace.interject.hooks.function import HookFunction
    from bendtrace.interject.hooks.handle import HookHandle
    from bendtrace.interject.hooks.manager import HookManager
    from bendtrace.interject.hooks.tables import HookNameError
    from bendtrace.interject.insertion import Insertion
    from bendtrace.interject.interjection import Inputs, Interjection, NodePass
    from bendtrace.interject.interjections import (
        ForwardInterjection,
        WrappedForwardBackwardInterjection,
        WrappedForwardInterjection,
    )
    from bendtrace.interject.patches.base import Patch
    from bendtrace.interject.patches.custom import CustomPatch
    from bendtrace.interject.patches.errors import PatchError
    from bendtrace.interject.patches.probes import ProbePatch, RecordPatch
    from bendtrace.interject.patches.values import AddPatch, ReplacePatch, ZeroPatch
    from bendtrace.interject.report import Report
    from bendtrace.interject.rewriting import between, remove, replace, splice
    from bendtrace.interject.selector import NodeSelector
    from bendtrace.module import BendedModule
    from bendtrace.patchable import PatchableGraph
    from bendtrace.paths.strings import NodePathError
    from bendtrace.recording.boundaries import opaque
    from bendtrace.replaying import Explanation, Stats
    from bendtrace.storage.errors import LoadError, SaveError

__all__ = [
    "Activations",
    "AddPatch",
    "Affine",
    "AssertFlowStep",
    "Bend",
    "BendError",
    "BendShapeError",
    "BendedModule",
    "Bending",
    "BendingConfig",
    "BendingParameter",
    "BendtraceError",
    "Bias",
    "CallbackChain",
    "Candidate",
    "Capture",
    "CompileWarning",
    "ConversionError",
    "CustomPatch",
    "Difference",
    "DivergenceError",
    "EscapeFlowStep",
    "Explanation",
    "FlowStep",
    "FlowSteps",
    "ForwardInterjection",
    "Graph",
    "HookFunction",
    "HookHandle",
    "HookManager",
    "HookNameError",
    "IndexFlowStep",
    "InputError",
    "Inputs",
    "Insertion",
    "Interjection",
    "InterjectionError",
    "InterpolateActivation",
    "InterpolationFromCapture",
    "Lambda",
    "LayerEntry",
    "LayerKeyError",
    "LoadError",
    "LogicalFlowStep",
    "LoopFlowStep",
    "Mask",
    "ModelHistory",
    "NeverFiredWarning",
    "NodePass",
    "NodePathError",
    "NodeRef",
    "NodeSelector",
    "NondeterminismError",
    "Normal",
    "NotReplayableError",
    "OrderedMask",
    "Patch",
    "PatchError",
    "PatchableGraph",
    "Permute",
    "ProbePatch",
    "RecordPatch",
    "ReplacePatch",
    "Report",
    "SaveError",
    "Scale",
    "ShapeFlowStep",
    "Stats",
    "ThresholdActivation",
    "ThresholdPermute",
    "Trace",
    "TraceLimitWarning",
    "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection",
    "ZeroPatch",
    "analysis",
    "between",
    "diff",
    "distributed",
    "from_fx",
    "harvest",
    "interject_by_match",
    "interject_by_module",
    "interject_by_module_class",
    "interject_by_module_class_native",
    "interject_by_name",
    "load",
    "log_forward_pass",
    "node_selector",
    "opaque",
    "remove",
    "replace",
    "replace_module",
    "replace_module_native",
    "splice",
    "to_dot",
    "to_fx",
    "to_graphml",
    "to_node_link",
    "trace",
    "workflows",
]

__version__ = "0.1.0"


if not TYPE_CHECKING:  # where type checkers look, names that are not there are mistakes

    def __getattr__(name: str) -> Any:
        """Import what is asked for: a public name, or a module of this package."""
        if name in PLACES:
            value = getattr(importlib.import_module(PLACES[name]), name)
        elif not name.startswith("_"):
            try:
                value = importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise  # the module is there, and lacks another
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
