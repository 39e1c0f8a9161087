"""Trace PyTorch models on real inputs, with dynamic control flow; replay, inspect, cut in.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: x * 2 if x.sum() > 0 else -x, torch.ones(3))
>>> [step.text for step in trace.flow_steps]
['x.sum() > 0']
"""

from typing import TYPE_CHECKING

from bendtrace import _public

if TYPE_CHECKING:
    from bendtrace import (
        analysis,
        bends,
        compat,
        distributed,
        errors,
        export,
        flow,
        graph,
        harvesting,
        hooks,
        node_selector,
        patches,
        rewriting,
        testing,
        workflows,
    )
    from bendtrace._trace import (
        ModelHistory,
        Trace,
        load,
        log_forward_pass,
        show_model_graph,
        trace,
    )
    from bendtrace.compat.graphpatch import PatchableGraph
    from bendtrace.debug.bisect import Bisection, bisect
    from bendtrace.debug.search import Domain
    from bendtrace.engine.dispatcher import Stats
    from bendtrace.engine.explain import Explanation
    from bendtrace.errors import BendtraceError
    from bendtrace.hooks import HookManager
    from bendtrace.insert.activations import Activations
    from bendtrace.insert.insertion import Insertion, Report
    from bendtrace.insert.interjection import Inputs, Interjection, NodePass
    from bendtrace.log.entries import LayerEntry
    from bendtrace.module import BendedModule
    from bendtrace.research.harvest import harvest
    from bendtrace.show.difference import Difference, diff
    from bendtrace.watch.intercepts import opaque

__all__ = [
    "Activations",
    "BendedModule",
    "BendtraceError",
    "Bisection",
    "Difference",
    "Domain",
    "Explanation",
    "HookManager",
    "Inputs",
    "Insertion",
    "Interjection",
    "LayerEntry",
    "ModelHistory",
    "NodePass",
    "PatchableGraph",
    "Report",
    "Stats",
    "Trace",
    "analysis",
    "bends",
    "bisect",
    "compat",
    "diff",
    "distributed",
    "errors",
    "export",
    "flow",
    "graph",
    "harvest",
    "harvesting",
    "hooks",
    "load",
    "log_forward_pass",
    "node_selector",
    "opaque",
    "patches",
    "rewriting",
    "show_model_graph",
    "testing",
    "trace",
    "workflows",
]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # where type checkers look, names that are not there are mistakes
    __getattr__ = _public.importer(globals(), _public.PLACES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
