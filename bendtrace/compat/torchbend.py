"""torchbend: `BendedModule` with its `trace` and `graph()`, and all bending callbacks by name.

>>> import torch, bendtrace as bt
>>> tb = bt.compat.torchbend
>>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> graph, out = bended.trace(torch.tensor([-1.0, 0.0]), _return_out=True)
>>> print(out[0], list(bended.graph()))
tensor([0., 0.]) ['input', 'relu', 'tanh', 'output']
>>> _ = bended.bend(tb.Bias(1.0), "1$")
>>> bended(torch.zeros(2))
tensor([1., 1.])
"""

from typing import Any

from bendtrace import bends, module
from bendtrace._trace import Trace
from bendtrace.bends import *  # noqa: F403
from bendtrace.errors import BendShapeError, InputError
from bendtrace.flow import LogicalFlowStep
from bendtrace.graph.mirror import Graph

__all__ = ["BendShapeError", "BendedModule"]
__all__ += bends.__all__
__all__.sort()


class BendedModule(module.BendedModule):
    """A `bendtrace.BendedModule` with torchbend's form of traces.

    Everything else is as in `bendtrace.BendedModule`: calls with other inputs are right, while
    torchbend's graph is that of one example.

    Args:
        model: a module; a plain function works too.
        max_traces: how many paths to keep; None for all.
        backend: a compiler for paths that are taken often; None for bitwise replays.
        backend_options: for the backend.
        cache_dir: a directory that keeps what inductor compiles; None for none.
        audit: what share of the replays the model itself does again.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.compat.torchbend.BendedModule(lambda x: x * x.shape[0])
        >>> graph, out = bended.trace(x=torch.ones(4), _return_out=True)
        >>> out
        (tensor([4., 4., 4., 4.]),)
        >>> bended(torch.ones(2))
        tensor([2., 2.])
    """

    def trace(
        self, *args: Any, _return_out: bool = False, fn: str | None = None, **kwargs: Any
    ) -> Any:
        """Run the model, or another method of it, under the tracer.

        Args:
            *args: positional arguments of the method; before them its name, if it is not
                `forward`, and if the model does not take text.
            _return_out: whether to return the outputs as well.
            fn: the name of the method.
            **kwargs: keyword arguments of the method.

        Returns:
            The graph of the run, whose `flow_steps` are a list of the taken branches. With
            `_return_out`, a pair of that and a tuple of the outputs, with one item if the model
            returns one value.
        """
        if fn is None and args and isinstance(args[0], str) and hasattr(self.model, args[0]):
            fn, args = args[0], args[1:]
        trace = super().trace(*args, fn=None if fn == "forward" else fn, **kwargs)
        self.__dict__.setdefault("_latest", {})[fn or "forward"] = trace
        if not _return_out:
            return _graph(trace)
        return _graph(trace), trace.output if type(trace.output) is tuple else (trace.output,)

    def graph(self, fn: str = "forward") -> Graph:  # type: ignore[override]
        """Return the graph of a method's latest trace, which prints as a graph of torch.fx does.

        Args:
            fn: the name of the method.

        Raises:
            InputError: the method was not traced.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.compat.torchbend.BendedModule(lambda x: x if x.sum() > 0 else -x)
            >>> _ = bended.trace(torch.ones(2))
            >>> [(step.name, step.value) for step in bended.graph().flow_steps]
            [('bool', True)]
        """
        latest = self.__dict__.get("_latest", {})
        trace = self.latest_trace if fn == "forward" else latest.get(fn)
        if trace is None:
            raise InputError(f"{fn!r} was not traced: call bended.trace({fn!r}, ...) first")
        return _graph(trace)


def _graph(trace: Trace) -> Graph:
    made: Graph = trace.graph.copy()
    made.graph["flow_steps"] = list(trace.flow_steps.of(LogicalFlowStep))
    return made
