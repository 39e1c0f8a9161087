"""A model that is called along its recorded paths."""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch import nn

from bendtrace._checks import required_model
from bendtrace._lazy import LazyModule
from bendtrace._trace import OPTIONS, Trace, run_trace
from bendtrace.dispatcher import Dispatcher, Explanation, Stats
from bendtrace.errors import InputError
from bendtrace.interject.gates import running
from bendtrace.interject.inserter import LiveInserter, Within, is_meant_within, refuse_reading
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.registry import InsertionRegistry
from bendtrace.interject.trees import Trees
from bendtrace.module_proxy import ModelT, ModuleProxy, SignedMethod
from bendtrace.paths.nodes import Registry
from bendtrace.recording.effects import Effects
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature, record
from bendtrace.recording.serving import call_itself, serving
from bendtrace.replay.explain import Mismatch
from bendtrace.replay.stretches import Finished
from bendtrace.replay.tree import TraceTree
from bendtrace.run import name_of_function
from bendtrace.source.internals import disable_dynamo
from bendtrace.tape.watchers import current_watcher
from bendtrace.torch_rules.intercepts import opaque
from bendtrace.torch_rules.owners import named_modules

if TYPE_CHECKING:
    from bendtrace import auditing
    from bendtrace.compiled import settings as compiled_settings
    from bendtrace.compiled import speculation as compiled_speculation
    from bendtrace.compiled.speculation import CompiledReport, Speculation
    from bendtrace.exploring import search as exploring_search
    from bendtrace.exploring.search import Exploration
    from bendtrace.view import outline as outline_coverage
    from bendtrace.view import program as outline_program
    from bendtrace.view import state_graph as outline_graph
    from bendtrace.view.outline import Coverage
    from bendtrace.view.picture import Format, Picture
    from bendtrace.view.program import Outline
    from bendtrace.view.state_graph import StateGraph
else:
    auditing = LazyModule("bendtrace.auditing")
    compiled_settings = LazyModule("bendtrace.compiled.settings")
    compiled_speculation = LazyModule("bendtrace.compiled.speculation")
    exploring_search = LazyModule("bendtrace.exploring.search")
    outline_coverage = LazyModule("bendtrace.view.outline")
    outline_graph = LazyModule("bendtrace.view.state_graph")
    outline_program = LazyModule("bendtrace.view.program")

P = ParamSpec("P")
R = TypeVar("R")


class _Method:
    """A method of a model, to trace with what is inserted in the model."""

    def __init__(self, owner: BaseModule, name: str) -> None:
        method = getattr(owner.model, name, None) if isinstance(name, str) else None
        if not callable(method):
            kind = type(owner.model).__name__
            raise InputError(f"fn= is the name of a method of the model; {kind} has no {name!r}")
        self._bendtrace_model = method
        self._inserting = functools.partial(owner._inserting, function=method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bendtrace_model(*args, **kwargs)


class BaseModule(ModuleProxy[ModelT]):
    """A model that is traced when called, and replayed when it would do the same again.

    What people use is the `BendedModule`, which can be cut into as well.

    Args:
        model: a module or a function.
        max_traces: how many paths to keep; None for all.
        backend: what compiles paths that are taken often; None for none.
        backend_options: options for that.
        cache_dir: where compiled code is kept.
        audit: what share of the replays the model itself does again, to be compared.
    """

    def __init__(
        self,
        model: ModelT,
        *,
        max_traces: int | None = 512,
        backend: str | Callable[..., Any] | None = None,
        backend_options: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        audit: float = 0.0,
    ) -> None:
        required_model(model)
        if max_traces is not None and (type(max_traces) is not int or max_traces < 1):
            raise InputError(f"max_traces has to be a positive int or None, not {max_traces!r}")
        if type(audit) not in (int, float) or not 0 <= audit <= 1:
            raise InputError(f"audit is a share, from 0 to 1, not {audit!r}")
        if audit and backend is not None:
            raise InputError("compiled paths are not equal bit by bit: give audit or backend")
        super().__init__()
        speculation: Speculation | None = None
        if backend is not None or backend_options is not None or cache_dir is not None:
            settings = compiled_settings.settings_of(backend, backend_options, cache_dir)
            if settings is not None:
                speculation = compiled_speculation.Speculation(settings)
        self._signature = Signature(model)
        self._trees = Trees(max_traces)
        self._known = Knowledge(
            model, Registry(), self._trees.plain_runs, self._trees.inserted_runs, self.coverage,
            self._settled,
        )  # fmt: skip
        self._inserted = False
        self._board = InsertionRegistry(self._known, self._note_inserted)
        auditor = auditing.Auditor(model, audit) if audit else None
        self._dispatcher = Dispatcher(
            self._known, self._signature, self._trees, speculation, self._board.called, auditor
        )
        self._as_one_op = opaque(self._called_inside)
        self._stand_in_for(model, self._shared)

    _untraced = ModuleProxy._untraced.union(
        {
            "stats", "last_mismatch", "_signature", "_trees", "_known", "_dispatcher", "_board",
            "_as_one_op",
        }
    )  # fmt: skip

    # Methods that models often have of their own, which are theirs then.
    _shared: tuple[str, ...] = ()

    @property
    def _tree(self) -> TraceTree:
        """The paths with what is inserted at the moment."""
        return self._trees.latest if self._board else self._trees.plain

    @property
    def model(self) -> ModelT:
        """The wrapped model."""
        return self._model

    @property
    def stats(self) -> Stats:
        """How the calls so far were served.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * 2)
            >>> _ = bended(torch.ones(2)), bended(torch.zeros(2))
            >>> bended.stats.traces, bended.stats.replays
            (1, 1)
        """
        return self._dispatcher.stats

    @property
    def last_mismatch(self) -> Mismatch | None:
        """Why the latest call that was not a replay was not one; None for the first.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.mean(0) if x.shape[0] > 2 else x.sum(0))
            >>> _ = bended(torch.ones(4, 2)), bended(torch.ones(2, 2))
            >>> print(bended.last_mismatch.step.text, bended.last_mismatch.new)
            x.shape[0] > 2 False
        """
        return self._dispatcher.last_mismatch

    @property
    def _bendtrace_model(self) -> Callable[..., Any]:
        """What is traced where this is asked to be: the model, under its own names."""
        return self._model

    if TYPE_CHECKING:  # a function keeps its signature; what a module returns is not known

        def __call__(self: BaseModule[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the model, along recorded paths as far as they go."""

    @SignedMethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, along recorded paths as far as they go."""
        if torch.compiler.is_dynamo_compiling():
            if self._inserted:  # which torch.compile could not see: it goes on after the call
                return _past_compiler(self._called_inside, args, kwargs)
            return call_itself(self._model, args, kwargs)
        if current_watcher() is not None:  # inside another trace, which wants to see it all
            if self._inserted:  # a plain attribute, so that the trace around depends on it
                return self._as_one_op(*args, **kwargs)
            return call_itself(self._model, args, kwargs)
        dispatcher = self._dispatcher
        if self._inserted:
            if (plan := self._board.plan(args, kwargs)) is not None:
                with running(plan), self._board.called():
                    return dispatcher.call(args, kwargs, plan)
        elif (floor := dispatcher.floor).waiting and floor.takes():
            # Decided first: a call that runs the model itself costs little more than the model.
            dispatcher.stats.live += 1
            return call_itself(self._model, args, kwargs)
        if torch._C._get_tracing_state() is not None:
            return call_itself(self._model, args, kwargs)
        return dispatcher.call(args, kwargs, None)

    def _note_inserted(self, any_there: bool) -> None:
        object.__setattr__(self, "_inserted", any_there)
        self._dispatcher.forget_insertions()

    def _called_inside(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @overload
    def trace(
        self, *args: Any, _return_out: Literal[False] = False, fn: str | None = None, **kwargs: Any
    ) -> Trace: ...
    @overload
    def trace(
        self: BaseModule[Callable[..., R]], *args: Any, _return_out: Literal[True],
        fn: None = None, **kwargs: Any,
    ) -> tuple[Trace, R]: ...  # fmt: skip
    @overload
    def trace(
        self, *args: Any, _return_out: bool, fn: str | None = None, **kwargs: Any
    ) -> Trace | tuple[Trace, Any]: ...
    def trace(
        self, *args: Any, _return_out: bool = False, fn: str | None = None, **kwargs: Any
    ) -> Any:
        """Run the model under the tracer, and remember the path it takes.

        Args:
            *args: positional arguments of the model.
            _return_out: whether to return the model's output as well.
            fn: another method of the model to trace instead, by its name: `fn="encode"`. What is
                inserted takes part, but calls of the method are not replayed along the trace. A
                model with a parameter of that name gets it as an argument.
            **kwargs: keyword arguments of the model.

        Returns:
            The `Trace`, or with `_return_out` the trace and the output.

        Raises:
            InputError: an option of `bendtrace.trace` was given, or the model has no such method.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * x.shape[0])
            >>> trace, out = bended.trace(torch.ones(4), _return_out=True)
            >>> out
            tensor([4., 4., 4., 4.])
        """
        if fn is not None and "fn" in self._signature.parameters:
            kwargs["fn"], fn = fn, None
        foreign = kwargs.keys() & OPTIONS - self._signature.parameters
        if foreign:
            raise InputError(
                f"a BendedModule remembers paths, and keeps no activations ({min(foreign)}=): "
                "use bendtrace.trace(model, ...) for that"
            )
        if fn is not None:
            trace = run_trace(_Method(self, fn), args, kwargs, None)
            return (trace, trace.output) if _return_out else trace
        plan = self._board.plan(args, kwargs)
        output = self._dispatcher.trace(args, kwargs, plan)
        assert self._dispatcher.latest is not None
        trace = copy.copy(self._dispatcher.latest)
        trace.output, trace._keeps = output, plan
        return (trace, output) if _return_out else trace

    @property
    def graph(self) -> StateGraph:
        """What is known of the model as a networkx graph: its states, and what lies between them.

        It is made anew each time it is asked for. `Trace.graph` is the graph of one run, with its
        operations as nodes.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> _ = bended(torch.ones(2)), bended(-torch.ones(2)), bended(torch.ones(3))
            >>> print(bended.graph)  # doctest: +ELLIPSIS
            program 1: x: float32[2], 3x
                3x -> 1.1 (3 ops)
            1.1  ... if x.sum() > 0 else ... at ...:1, 3x
                True 2x -> 1.2 (1 op)
                False 1x -> 1.2 (1 op)
            1.2  return, 3x
        """
        return outline_graph.state_graph(self._tree, self._dispatcher.trace_of)

    @property
    def latest_trace(self) -> Trace:
        """The latest trace: the replays since have not made one.

        Raises:
            InputError: if nothing has been traced yet.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> _ = bended(torch.ones(2)), bended(-torch.ones(2)), bended(torch.ones(2))
            >>> bended.latest_trace.graph
            <Graph: 6 nodes, 5 data edges, 1 control edge>
        """
        if self._dispatcher.latest is None:
            raise InputError("nothing has been traced yet: call the module or its trace() first")
        return self._dispatcher.latest

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, format: Format | None = None
    ) -> Picture:
        """Draw all known paths as a flow chart; the same as `tree.draw`.

        Args:
            path: where to save it; the ending says as what: .svg, .png, .pdf or .html.
            format: as what to save it, if the ending does not say.

        Raises:
            InputError: for unknown endings; nothing is written then.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> _ = bended(torch.ones(2)), bended(-torch.ones(2))
            >>> bended.draw().svg.startswith("<svg")
            True
        """
        return self.tree.draw(path, format=format)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """All recorded paths.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else -x)
            >>> _ = bended(torch.ones(2)), bended(-torch.ones(2))
            >>> [(trace.flow_steps[0].value, trace.names[-1]) for trace in bended.traces]
            [(True, 'add'), (False, 'neg')]
        """
        return tuple(
            self._dispatcher.trace_of(recording, program)
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
        name = name_of_function(self._model)
        return outline_program.Outline(self._tree, name, vars(self._dispatcher.stats))

    def coverage(self, *, only: Literal["all", "mine"] = "all") -> Coverage:
        """List the branches of the model's source of which only one side was seen, or none.

        Args:
            only: "mine" leaves out the code of installed packages.

        Example:
            >>> import torch, bendtrace as bt
            >>> def clipped(x):
            ...     return x if x.abs().max() < 1 else x.clamp(-1, 1)
            >>> bended = bt.BendedModule(clipped)
            >>> _ = bended(torch.tensor([0.5]))
            >>> [branch.text for branch in bended.coverage()]
            ['x.abs().max() < 1']
        """
        return outline_coverage.coverage(self._tree, only)

    def explore(
        self, inputs: Any, domain: Mapping[str, Any], *, seconds: float | None = 10.0,
        tries: int | None = None, seed: int = 0,
    ) -> Exploration:  # fmt: skip
        """Search for inputs that take the sides of branches that no call has taken.

        From inputs that come to a question, the search goes on to others: along gradients of the
        tested value where it has some, and else by changing elements, tokens, numbers and sizes.
        A find is an input with which the model itself has taken the side. The state of the model is
        restored after each run. What is not found may exist all the same.

        Args:
            inputs: where the search begins: a tuple of positional arguments, a dict of keyword
                arguments, a pair (args, kwargs), or a list of several such inputs.
            domain: which inputs may differ, by the name of the argument or of a part of one
                (`"batch['ids']"`): each has a `Domain`, or a pair of the least and the greatest
                number. All else stays as it is given.
            seconds: how long to search at most; None for no limit.
            tries: how often to run the model at most; None for no limit. With the same seed and
                tries, and no limit in seconds, the same is found again.
            seed: of the random choices.

        Returns:
            An `Exploration`: a list of finds that prints as a table. Its `inputs` can be given to
            the model.

        Raises:
            InputError: the domain, or something else that is given, makes no sense; something is
                inserted; the model holds what cannot be restored, or raises with all of the inputs.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * 2 if x.sum() > 25 else x)
            >>> found = bended.explore(torch.zeros(3), {"x": (0.0, 10.0)})
            >>> [(find.text, find.side) for find in found]
            [('x.sum() > 25', True)]
            >>> for args, kwargs in found.inputs:
            ...     print(bool(args[0].sum() > 25))
            True
        """
        if self._board:
            raise InputError("a search runs the model itself: take away what is inserted first")
        return exploring_search.explore(
            self._model, self._trees.plain, inputs, domain, seconds, tries, seed
        )

    @property
    def compiled(self) -> CompiledReport:
        """What became of the paths that are compiled, or why they are not; prints as a table.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1)
            >>> bended.compiled
            no backend: calls are replayed, bit for bit as the model itself
        """
        if self._dispatcher.speculation is None:
            return compiled_speculation.CompiledReport(None, ())
        return self._dispatcher.speculation.report()

    @property
    def why_live(self) -> tuple[str, ...]:
        """Why some calls run, or ran, the model's own Python; empty if none has to.

        First come the reasons that hold with what is inserted now, then those of other calls.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * float(x.numpy().mean()))
            >>> _ = bended(torch.ones(2))
            >>> bended.why_live  # doctest: +ELLIPSIS
            ('numpy at ...:1 passes the content of a tensor to code that cannot be watched',)
            >>> bended.stats.live
            1
        """
        reasons = [reason for trace in self.traces for reason in trace.why_live]
        # Also of what was inserted for a while: these calls count, too.
        for recording in (*self._trees.plain_runs(), *self._trees.inserted_runs()):
            reasons += recording.tape.blockers
        reasons += self._dispatcher.passing
        floors = self._dispatcher.floor, *self._trees.floors()
        reasons += [floor.reason for floor in floors if floor.reason is not None]
        return tuple(dict.fromkeys(reasons))

    def audit(self: BaseModule[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the model; if that is a replay, let the model itself do it again, and compare.

        The model runs on copies of the inputs and of what it holds, with the same random numbers.
        Output, inputs, state and random numbers are compared bit for bit, gradients are not. What
        the model prints, or sends somewhere, is printed and sent twice.

        Args:
            *args: positional arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            The output.

        Raises:
            AuditError: the model does something else than the replay did.
            InputError: something is inserted, cannot be copied, or is outside of the model and
                changed by it.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Dropout())
            >>> _ = bended(torch.ones(2)), bended.audit(torch.ones(2))
            >>> bended.stats.replays
            1
        """
        if self._board:
            raise InputError("the model itself has nothing inserted: take that away first")
        auditor = auditing.Auditor(self._model, 1.0)
        output: R = self._dispatcher.call(args, kwargs, None, auditor)
        return output

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
        names, arguments = self._signature.told_apart(args, kwargs)
        tree = self._dispatcher.serving(self._board.plan(args, kwargs), names, arguments)
        return self._dispatcher.explained(tree, names, arguments)

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | None:
        """Return the run without insertions that inputs are bound to repeat, if it is known.

        Where values decide, a replay shows the path, provided that it changes and draws nothing,
        and runs no code of the user's.
        """
        names, arguments = self._signature.told_apart(args, kwargs)
        tree = self._trees.plain
        program = tree.find(names, arguments)
        if program is None or program.live_only:
            return None
        if not program.analysis.needs_values:
            return program.recording
        for run in program.recordings():
            if run.changes or run.tape.blockers or Effects(run.tape).have_begun():
                return None
        result = tree.replay(names, program, arguments)
        if isinstance(result, Finished):
            return result.recording
        result.drop()
        return None

    @contextmanager
    def _serving_parts(self, method: types.MethodType) -> Iterator[None]:
        """Within it, what is inserted is called also where a method calls a part of the model."""
        model = self._model
        plan, unknown = self._board.plan_of_parts()
        refuse_reading(plan, method)
        with ExitStack() as stack:
            if self._board and isinstance(model, nn.Module):
                for name, module in named_modules(model):
                    within = Within(model, name, self._known.path_of(name))
                    if name and (unknown or is_meant_within(plan, module, within)):
                        part = functools.partial(self._call_part, module, within)
                        stack.enter_context(serving(module, part))
            yield

    def _call_part(self, module: nn.Module, within: Within, *args: Any, **kwargs: Any) -> Any:
        """Run a part of the model that is called by itself, live."""
        plan, unknown = self._board.plan_of_parts()
        if not self._board or current_watcher() is not None:
            return call_itself(module, args, kwargs)
        if unknown:
            raise InputError(
                f"{within.name} is called by itself, by a method of the model, and where something "
                "is inserted has to be found out in a call of the whole model: call that once "
                "first, or give places that do not look ahead, nor passes from the end"
            )
        inserter = LiveInserter(plan, self._known.registry, module, within)
        with running(plan):
            recording = record(module, args, kwargs, Signature(module), inserter=inserter)
            plan.ran(recording)
        self._dispatcher.stats.live += 1
        return recording.result

    @contextmanager
    def _inserting(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
    ) -> Iterator[LiveInserter | None]:
        """Within it, the gates call what is inserted; given is what puts them into a run."""
        plan = self._board.plan(args, kwargs)
        if plan is None:
            yield None
            return
        with running(plan):
            registry, known = self._known.registry, self._known
            if function is None:
                yield LiveInserter(plan, registry, self._model)
            else:
                yield LiveInserter(plan, registry, function, path_of=known.path_of)


@disable_dynamo
def _past_compiler(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)
