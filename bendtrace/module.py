"""BendedModule: a model that is called along its recorded paths."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from bendtrace._trace import OPTIONS, Trace, _name
from bendtrace.errors import InputError
from bendtrace.flow import FlowSteps, flow_steps
from bendtrace.graph.mirror import Graph
from bendtrace.graph.names import node_names
from bendtrace.outline.coverage import Coverage, coverage
from bendtrace.outline.folding import most_divergent
from bendtrace.outline.program import Outline
from bendtrace.paths.naming import Registry
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature, record, uninitialized_in
from bendtrace.recording.serving import call_itself, serving
from bendtrace.recording.watcher import current_watcher
from bendtrace.replay.ambience import Ambience
from bendtrace.replay.explain import Mismatch, explain_check, explain_divergence
from bendtrace.replay.program import Divergence, Finished, Program
from bendtrace.replay.tree import TraceTree

__all__ = ["BendedModule", "Explanation", "Stats"]


@dataclass
class Stats:
    """How the calls of a `BendedModule` were served.

    Attributes:
        traces: paths recorded.
        replays: calls served from recorded paths alone.
        retraces: calls that led down a path not recorded before, after the first trace.
        resumes: those of them that took over what a replay had computed already.
        live: calls for which the model's own Python ran because no guard could watch it.
    """

    traces: int = 0
    replays: int = 0
    retraces: int = 0
    resumes: int = 0
    live: int = 0


@dataclass(frozen=True)
class Explanation:
    """Which traces could serve some inputs, judging by the input guards alone.

    Attributes:
        serving: traces whose input guards all hold.
        nearest: if there are none: what fails in the trace that comes nearest.
    """

    serving: tuple[Trace, ...]
    nearest: Mismatch | None

    def __str__(self) -> str:
        if self.serving:
            return "could be served by " + ", ".join(map(repr, self.serving))
        if self.nearest is None:
            return "nothing has been traced for these arguments yet"
        return f"would be traced anew: {self.nearest}"


class BendedModule(nn.Module):
    """A model that is traced when called, and replayed when it would do the same again.

    It behaves like the model for every input. The first call, and each call that leads down
    a path not seen before, runs the model's own Python under the tracer; calls along known
    paths run generated straight-line code with the same operations. Parameters, buffers and
    submodules are the model's own, not copies.

    Args:
        model: a module; a plain function works too.
        max_traces: how many paths to keep; None for all. Where there are more, those are
            forgotten, and traced again if they come up, that were used least of late. The first
            time, a `TraceLimitWarning` says what makes the model diverge so often.

    Attributes:
        stats: how the calls so far were served.
        last_mismatch: why the latest call that was not a replay was not one.

    Raises:
        InputError: if `model` cannot be called, or `max_traces` is not a positive number.

    Example:
        >>> import torch, bendtrace as bt
        >>> def clipped(x):
        ...     return x if x.abs().max() < 1 else x.clamp(-1, 1)
        >>> bended = bt.BendedModule(clipped)
        >>> for value in (0.5, 0.25, 2.0, 0.75):
        ...     _ = bended(torch.tensor([value]))
        >>> bended.stats
        Stats(traces=2, replays=2, retraces=1, resumes=1, live=0)
    """

    def __init__(self, model: Callable[..., Any], *, max_traces: int | None = 64) -> None:
        if not callable(model):
            raise InputError(f"a model has to be callable; {model!r} is not")
        if max_traces is not None and (type(max_traces) is not int or max_traces < 1):
            raise InputError(f"max_traces has to be a positive int or None, not {max_traces!r}")
        super().__init__()
        self.stats = Stats()
        self.last_mismatch = None
        self._signature = Signature(model)
        self._tree = TraceTree(max_traces, most_divergent)
        self._latest: Trace | None = None
        self._registry = Registry()
        self._passing = 0
        object.__setattr__(self, "_model", model)
        if isinstance(model, nn.Module):
            # The very tables of the model: names, state dict keys and tensors are its own.
            for table in _TABLES:
                object.__setattr__(self, table, getattr(model, table))
            object.__setattr__(self, "training", model.training)
            overridden = _overridden(type(model))
            for name in overridden:
                object.__setattr__(self, name, self._method(getattr(model, name)))
            object.__setattr__(self, "_untraced", self._untraced | overridden)

    # Attributes that a trace of a module around this one must not depend on.
    _untraced = frozenset(
        {"stats", "last_mismatch", "_signature", "_tree", "_latest", "_registry", "_passing"}
    )

    stats: Stats
    last_mismatch: Mismatch | None
    _passing: int
    _model: Callable[..., Any]

    @property
    def model(self) -> Callable[..., Any]:
        """The wrapped model."""
        return self._model

    @property
    def _bendtrace_model(self) -> Callable[..., Any]:
        """What is traced where this is asked to be: the model, under its own names."""
        return self._model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, along recorded paths as far as they go."""
        if (
            current_watcher() is not None
            or torch.compiler.is_dynamo_compiling()
            or torch._C._get_tracing_state() is not None
        ):  # inside another trace, which wants to see it all
            return call_itself(self._model, args, kwargs)
        bound = self._signature.bind(args, kwargs)
        names, arguments = tuple(bound), tuple(bound.values())
        program = self._tree.find(names, arguments)
        if program is not None and self._tree.settles(names, program, arguments):
            program = None
        if program is None and uninitialized_in(self._model):
            self.stats.live += 1  # this call makes the parameters of lazy modules
            return call_itself(self._model, args, kwargs)
        if program is None:
            return self._record_new(args, kwargs, names, arguments)
        if program.live_only:
            self.stats.live += 1
            self._tree.ran_live(program)
            return call_itself(self._model, args, kwargs)
        result = self._tree.replay(names, program, arguments)
        if isinstance(result, Finished):
            self.stats.replays += 1
            return result.output
        return self._resume(args, kwargs, program, result)

    def trace(self, *args: Any, _return_out: bool = False, **kwargs: Any) -> Any:
        """Run the model under the tracer, and remember the path it takes.

        Args:
            *args: positional arguments of the model.
            _return_out: whether to return the model's output as well.
            **kwargs: keyword arguments of the model.

        Returns:
            The `Trace`, or with `_return_out` the trace and the output.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * x.shape[0])
            >>> trace, out = bended.trace(torch.ones(4), _return_out=True)
            >>> out
            tensor([4., 4., 4., 4.])
        """
        foreign = kwargs.keys() & OPTIONS - self._signature.parameters
        if foreign:
            raise InputError(
                f"a BendedModule remembers paths, and keeps no activations ({min(foreign)}=): "
                "use bendtrace.trace(model, ...) for that"
            )
        bound = self._signature.bind(args, kwargs)
        output = self._record_new(args, kwargs, tuple(bound), tuple(bound.values()))
        assert self._latest is not None
        trace = copy.copy(self._latest)
        trace.output = output
        return (trace, output) if _return_out else trace

    def graph(self) -> Graph:
        """Return the networkx mirror of the latest trace.

        Raises:
            InputError: if nothing has been traced yet.
        """
        if self._latest is None:
            raise InputError("nothing has been traced yet: call the module or its trace() first")
        return self._latest.graph

    @property
    def traces(self) -> tuple[Trace, ...]:
        """All recorded paths."""
        return tuple(
            self._trace_of(recording, program)
            for program in self._tree.programs()
            for recording in program.recordings()
        )

    @property
    def tree(self) -> Outline:
        """What is known of the model's paths, as a program: prints, and draws, as one.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> for value in (1.0, 2.0, -1.0):
            ...     _ = bended(torch.tensor([value]))
            >>> [(branch.text, branch.hits(True), branch.hits(False))
            ...  for branch in bended.tree[0].flow.branches.values()]
            [('... if x.sum() > 0 else ...', 2, 1)]
        """
        return Outline(self._tree, _name(self._model), vars(self.stats))

    def coverage(self) -> Coverage:
        """List the branches of the model's source of which only one side was seen, or none.

        Example:
            >>> import torch, bendtrace as bt
            >>> def clipped(x):
            ...     return x if x.abs().max() < 1 else x.clamp(-1, 1)
            >>> bended = bt.BendedModule(clipped)
            >>> _ = bended(torch.tensor([0.5]))
            >>> [branch.text for branch in bended.coverage()]
            ['x.abs().max() < 1']
        """
        return coverage(self._tree)

    @property
    def why_live(self) -> tuple[str, ...]:
        """Why some calls run the model's own Python; empty if none has to."""
        reasons = [reason for trace in self.traces for reason in trace.why_live]
        return tuple(dict.fromkeys(reasons))

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Say which traces could serve some inputs, without running anything.

        Only what can be told from the inputs' metadata is looked at; whether a data guard
        will hold shows in the run.

        Args:
            *args: positional arguments of the model.
            **kwargs: keyword arguments of the model.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x if x.shape[0] > 2 else -x)
            >>> _ = bended(torch.ones(3))
            >>> bended.explain(torch.ones(1)).nearest.new
            False
        """
        bound = self._signature.bind(args, kwargs)
        names, arguments = tuple(bound), tuple(bound.values())
        serving: list[Trace] = []
        nearest: tuple[int, Mismatch] | None = None
        for program in self._tree.programs(names):
            failed = program.failing(arguments)
            if failed is None:
                serving += [self._trace_of(r, program) for r in program.recordings()]
                continue
            depth = program.checks.index(failed) if failed in program.checks else -1
            if nearest is None or depth > nearest[0]:
                steps = _steps_of(program.recording)
                nearest = depth, explain_check(failed, program, arguments, steps)
        return Explanation(tuple(serving), None if serving or nearest is None else nearest[1])

    # Recording

    def _record_new(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: tuple[str, ...],
        arguments: tuple[Any, ...],
    ) -> Any:
        ambience = Ambience.current()
        evolving = self._tree.outdated(names, arguments)
        mismatch = self.explain(*args, **kwargs).nearest
        try:
            recording = record(self._model, args, dict(kwargs), self._signature)
        except Exception as error:
            self._tree.failed(error)
            raise
        if recording.is_transient and self._passing < _PASSING:
            self._passing += 1
            self.stats.live += 1
            self._latest = Trace(
                recording, ambience, self._signature, self._model, registry=self._registry
            )
            return recording.result
        program = self._tree.add(names, recording, ambience, evolving)
        self.stats.retraces += self.stats.traces > 0
        self.stats.traces += 1
        self.stats.live += program.live_only
        self.last_mismatch = mismatch
        return self._kept(recording, program)

    def _kept(self, recording: Recording, program: Program) -> Any:
        """Remember a run as the latest, but not its output, which is only the caller's."""
        output, recording.result = recording.result, None
        self._latest = self._trace_of(recording, program)
        return output

    def _resume(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        program: Program,
        divergence: Divergence,
    ) -> Any:
        mismatch = explain_divergence(divergence, _steps_of(divergence.recording))
        known_live = divergence.known_live
        prefix = divergence.prefix()
        try:
            recording = record(self._model, args, dict(kwargs), self._signature, prefix)
        except Exception as error:
            self._tree.failed(error, divergence)
            raise
        finally:
            divergence.release(prefix)
        self.stats.retraces += 1
        self.stats.resumes += 1
        self.last_mismatch = mismatch
        if known_live or (recording.is_transient and self._passing < _PASSING):
            self._passing += recording.is_transient
            self.stats.live += 1
            self._tree.ran_live(program, divergence)
            return recording.result
        self.stats.traces += 1
        self.stats.live += bool(recording.tape.blockers)
        self._tree.grow(program, divergence, recording)
        return self._kept(recording, program)

    def _trace_of(self, recording: Recording, program: Program) -> Trace:
        own = program if recording is program.recording else None
        return Trace(
            recording, program.ambience, self._signature, self._model, own, registry=self._registry
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BendedModule:
        # Paths are not copied: their code holds on to the tensors and modules of this model.
        return _wrap(copy.deepcopy(self._model, memo), self._tree.limit)

    def __reduce__(self) -> Any:
        return _wrap, (self._model, self._tree.limit)

    # Being the model, as far as torch can tell

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        object.__setattr__(self, "training", mode)
        if isinstance(self._model, nn.Module):
            self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, under its own keys."""
        own = self._model.state_dict if isinstance(self._model, nn.Module) else super().state_dict
        return own(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model."""
        model = self._model
        own = model.load_state_dict if isinstance(model, nn.Module) else super().load_state_dict
        return own(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # What .to(), .half() and the like come down to; some modules do more than the default.
        if isinstance(self._model, nn.Module):
            self._model._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None:
                raise
            found = getattr(model, name)
        return self._method(found)

    def _method(self, method: Any) -> Any:
        """Return a method of the model whose calls of the model go along recorded paths."""
        model = self._model
        if not (
            isinstance(method, types.MethodType)
            and method.__self__ is model
            and isinstance(model, nn.Module)
        ):
            return method
        # Around a call of the model's own, it is that call that recorded paths stand for.
        is_served = type(model).__call__ is nn.Module.__call__

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with serving(model, self) if is_served else nullcontext():
                result = method(*args, **kwargs)
            object.__setattr__(self, "training", model.training)
            return self if result is model else result  # what `eval` and the like return

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        # What the model's forward reads has to reach the model.
        model = self.__dict__.get("_model")
        if name in _OWN or not isinstance(model, nn.Module):
            super().__setattr__(name, value)
        if name not in _OWN - {"training"} and isinstance(model, nn.Module):
            setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        model = self.__dict__.get("_model")
        if isinstance(model, nn.Module) and name not in self.__dict__:
            delattr(model, name)
        else:
            super().__delattr__(name)

    def __bool__(self) -> bool:
        return bool(self._model)

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        model: Any = self._model
        return iter(model)

    def __contains__(self, item: Any) -> bool:
        return item in self._model  # type: ignore[operator]

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply a function to the model and all its submodules."""
        if isinstance(self._model, nn.Module):
            self._model.apply(fn)
        return self

    def __repr__(self) -> str:
        return f"BendedModule({self._model!r}, {self.stats})"


_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# After this many runs that filled a cache, a cache is taken to be filled by every call.
_PASSING = 4
_OWN = frozenset(
    {"stats", "_passing", "last_mismatch", "_latest", "training", "_is_full_backward_hook"}
)


def _overridden(cls: type[nn.Module]) -> frozenset[str]:
    """The methods of nn.Module that a model has its own of, besides those dealt with here."""
    return frozenset(
        name
        for name, method in vars(nn.Module).items()
        if not name.startswith("_")
        and isinstance(method, types.FunctionType)
        and name not in vars(BendedModule)
        and (own := inspect.getattr_static(cls, name)) is not method
        and isinstance(own, types.FunctionType)
    )


def _wrap(model: Callable[..., Any], max_traces: int | None) -> BendedModule:
    return BendedModule(model, max_traces=max_traces)


def _steps_of(recording: Recording) -> FlowSteps:
    return flow_steps(recording.tape, node_names(recording.tape.ops))
