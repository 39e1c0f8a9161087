"""BendedModule: a model that replays its recorded paths and accepts insertions."""

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

from bendtrace.engine.dispatcher import Dispatcher, Stats, Trees
from bendtrace.engine.stretches import FinishedReplay
from bendtrace.engine.tree import TraceTree
from bendtrace.python.internals import disable_dynamo
from bendtrace.python.lazy import LazyMethod, LazyModule, errors
from bendtrace.record.effects import Effects
from bendtrace.record.module_proxy import ModelT, ModuleProxy, SignedMethod, call_itself
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recording
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch.intercepts import opaque
from bendtrace.watch.owners import named_modules, required_model

if TYPE_CHECKING:
    from bendtrace import _trace
    from bendtrace import hooks as hooks_module
    from bendtrace._trace import Trace
    from bendtrace.debug import auditing
    from bendtrace.debug.auditing import audit
    from bendtrace.debug.search import explore
    from bendtrace.debug.stepping import step
    from bendtrace.engine import compile_settings as compiled_settings
    from bendtrace.engine import speculation as compiled_speculation
    from bendtrace.engine.explain import Explanation, Mismatch
    from bendtrace.engine.speculation import CompiledReport, Speculation
    from bendtrace.export.exporting import export
    from bendtrace.hooks import HookManager
    from bendtrace.insert import activations, gates, inserter, registry, resume_point  # fmt: skip
    from bendtrace.insert import bending as model_bends
    from bendtrace.insert import resolver as knowledge
    from bendtrace.insert.activations import Activations
    from bendtrace.insert.bend import Value
    from bendtrace.insert.bending import (
        Bending,
        activation_names,
        bend,
        print_activations,
        print_weights,
    )  # fmt: skip
    from bendtrace.insert.inserter import LiveInserter, PartPosition
    from bendtrace.insert.insertion import Insertion, What
    from bendtrace.insert.interjection import PassNumbers
    from bendtrace.insert.patch_kinds import patch
    from bendtrace.insert.registry import InsertionRegistry
    from bendtrace.insert.resolver import Knowledge
    from bendtrace.insert.where import Where
    from bendtrace.log import run as run_views
    from bendtrace.python import checks
    from bendtrace.record import redirection
    from bendtrace.show import model_tree as outline_program
    from bendtrace.show import outline as outline_coverage
    from bendtrace.show import state_graph as outline_graph
    from bendtrace.show.model_tree import Outline
    from bendtrace.show.outline import Coverage
    from bendtrace.show.picture import Format, Picture
    from bendtrace.show.state_graph import StateGraph
    from bendtrace.show.treescope_forms import bended_model as folded
else:
    _trace = LazyModule("bendtrace._trace")
    activations = LazyModule("bendtrace.insert.activations")
    auditing = LazyModule("bendtrace.debug.auditing")
    compiled_settings = LazyModule("bendtrace.engine.compile_settings")
    compiled_speculation = LazyModule("bendtrace.engine.speculation")
    outline_coverage = LazyModule("bendtrace.show.outline")
    outline_graph = LazyModule("bendtrace.show.state_graph")
    outline_program = LazyModule("bendtrace.show.model_tree")
    folded = LazyMethod("bendtrace.show.treescope_forms", "bended_model")
    hooks_module = LazyModule("bendtrace.hooks")
    gates = LazyModule("bendtrace.insert.gates")
    inserter = LazyModule("bendtrace.insert.inserter")
    knowledge = LazyModule("bendtrace.insert.resolver")
    registry = LazyModule("bendtrace.insert.registry")
    resume_point = LazyModule("bendtrace.insert.resume_point")
    redirection = LazyModule("bendtrace.record.redirection")
    run_views = LazyModule("bendtrace.log.run")
    model_bends = LazyModule("bendtrace.insert.bending")
    audit = LazyMethod("bendtrace.debug.auditing", "audit")
    bend = LazyMethod("bendtrace.insert.bending", "bend")
    explore = LazyMethod("bendtrace.debug.search", "explore")
    export = LazyMethod("bendtrace.export.exporting", "export")
    patch = LazyMethod("bendtrace.insert.patch_kinds", "patch")
    activation_names = LazyMethod("bendtrace.insert.bending", "activation_names")
    print_activations = LazyMethod("bendtrace.insert.bending", "print_activations")
    print_weights = LazyMethod("bendtrace.insert.bending", "print_weights")
    step = LazyMethod("bendtrace.debug.stepping", "step")
    checks = LazyModule("bendtrace.python.checks")

__all__ = ["BendedModule"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class _Method:
    """A method of a model, which is traced together with the model's insertions."""

    def __init__(self, owner: BendedModule, name: str) -> None:
        method = getattr(owner.model, name, None) if isinstance(name, str) else None
        if not callable(method):
            kind = type(owner.model).__name__
            raise errors.InputError(
                f"fn= is the name of a method of the model; {kind} has no {name!r}"
            )
        self._bendtrace_model = method
        self._inserting = functools.partial(owner._inserting, function=method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bendtrace_model(*args, **kwargs)


class BendedModule(ModuleProxy[ModelT]):
    """A model that is traced when called, and replayed when it would do the same again.

    It behaves like the model for every input. The first call, and each call that takes an unknown
    path, runs the model's own Python under the tracer. Calls along known paths run generated
    straight-line code with the same operations. Parameters, buffers and submodules are the model's
    own, not copies.

    Args:
        model: a module; a plain function works too.
        max_traces: how many paths to keep; None for all. Beyond that, the paths that
            calls took least are dropped, and traced again when a call takes them. The first time,
            a `TraceLimitWarning` says what makes the model diverge so often.
        backend: None for replays that return the same bits as the model. Otherwise the compiler
            of paths that calls take often: a name that torch.compile knows ("inductor"), or a
            function like its backends. Results are then equal within the compiler's tolerance.
        backend_options: options for the backend: `mode`, `options` and `dynamic` as in
            torch.compile, `cuda_graphs`, `drop_slower`, `max_paths` (see docs/compiled.md).
        cache_dir: a directory in which inductor keeps compiled code for other processes; None for
            no directory. Processes run the libraries in it: share it only with people whom you
            trust.
        audit: the share of the replays that the model itself repeats, so that both can be compared
            bit by bit (see `audit`): 0.01 for one in a hundred.

    Raises:
        InputError: `model` cannot be called, `max_traces` is not a positive number, there is no
            such backend or option, `cache_dir` is not a directory, or `audit` is not a share
            between 0 and 1, or is combined with a backend.

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

    _untraced = ModuleProxy._untraced.union(
        {
            "stats", "last_mismatch", "_signature", "_trees", "_dispatcher",
            "_as_one_op", "_on_demand", "hooks",
        }
    )  # fmt: skip
    # Methods that models often have as well; then the model's are called.
    _shared: tuple[str, ...] = (
        "audit",
        "explore",
        "export",
        "remove_all",
        "reset",
        "step",
        "update",
    )

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
            raise errors.InputError(
                f"max_traces has to be a positive int or None, not {max_traces!r}"
            )
        if type(audit) not in (int, float) or not 0 <= audit <= 1:
            raise errors.InputError(f"audit is a share, from 0 to 1, not {audit!r}")
        if audit and backend is not None:
            raise errors.InputError(
                "compiled paths are not equal bit by bit: give audit or backend"
            )
        super().__init__()
        speculation: Speculation | None = None
        if backend is not None or backend_options is not None or cache_dir is not None:
            settings = compiled_settings.settings_of(backend, backend_options, cache_dir)
            if settings is not None:
                speculation = compiled_speculation.Speculation(settings)
        self._signature = Signature(model)
        self._trees = Trees(max_traces)
        self._inserted = False
        self._on_demand: dict[str, Any] = {}  # an attribute more would be noticed by traces around
        auditor = auditing.Auditor(model, audit) if audit else None
        self._dispatcher = Dispatcher(
            model, lambda: self._knowledge, self._signature, self._trees, speculation, auditor
        )
        self._as_one_op = opaque(self._called_inside)
        self._stand_in_for(model, self._shared)

    def _part_on_demand(self, name: str, make: Callable[[], T]) -> T:
        """Return a part, which its first use makes, and which all threads share.

        Most models never have an insertion.
        """
        found: T | None = self._on_demand.get(name)
        return self._on_demand.setdefault(name, make()) if found is None else found

    @property
    def _knowledge(self) -> Knowledge:
        def make() -> Knowledge:
            return knowledge.Knowledge(
                self._model, self._dispatcher.registry, self._trees.plain_runs,
                self._trees.inserted_runs, self.coverage, self._predict,
            )  # fmt: skip

        return self._part_on_demand("_knowledge", make)

    @property
    def _insertion_registry(self) -> InsertionRegistry:
        def make() -> InsertionRegistry:
            calls = self._dispatcher.calls
            return registry.InsertionRegistry(self._knowledge, self._note_inserted, calls)

        return self._part_on_demand("_insertion_registry", make)

    @property
    def _bending(self) -> Bending:
        return self._part_on_demand("_bending", lambda: model_bends.Bending(self, self._knowledge))

    @property
    def _tree(self) -> TraceTree:
        """The paths with the present insertions."""
        return self._trees.latest if self._inserted else self._trees.plain

    @property
    def model(self) -> ModelT:
        """The wrapped model."""
        return self._model

    @property
    def stats(self) -> Stats:
        """Counts of how the calls so far were served.

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
        """Why the latest recorded call could not be replayed; None for the first call.

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
        """The model, under its own names, which is traced in place of this module."""
        return self._model

    if TYPE_CHECKING:  # a function keeps its signature; what a module returns is not known

        def __call__(self: BendedModule[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
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
            insertions = self._on_demand["_insertion_registry"]
            if (plan := insertions.plan(args, kwargs)) is not None:
                with dispatcher.calls:
                    return dispatcher.call_with(plan, args, kwargs)
        elif (floor := dispatcher.floor).calls_to_wait and floor.take_call():
            # Decided first: a call that runs the model itself costs little more than the model.
            dispatcher.stats.live += 1
            return call_itself(self._model, args, kwargs)
        if torch._C._get_tracing_state() is not None:
            return call_itself(self._model, args, kwargs)
        return dispatcher.call(args, kwargs, None)

    def _note_inserted(self, has_any: bool) -> None:
        object.__setattr__(self, "_inserted", has_any)
        self._dispatcher.forget_insertions()

    def _called_inside(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @overload
    def trace(
        self, *args: Any, _return_out: Literal[False] = False, fn: str | None = None, **kwargs: Any
    ) -> Trace: ...
    @overload
    def trace(
        self: BendedModule[Callable[..., R]], *args: Any, _return_out: Literal[True],
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
            fn: the name of another method of the model to trace instead: `fn="encode"`. Insertions
                take part, but calls of the method are not replayed along the trace. A model with
                a parameter of that name gets it as an argument.
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
        foreign = kwargs.keys() & _trace.OPTIONS - self._signature.parameters
        if foreign:
            raise errors.InputError(
                f"a BendedModule remembers paths, and keeps no activations ({min(foreign)}=): "
                "use bendtrace.trace(model, ...) for that"
            )
        if fn is not None:
            trace = _trace.run_trace(_Method(self, fn), args, kwargs, None)
            return (trace, trace.output) if _return_out else trace
        plan = self._insertion_registry.plan(args, kwargs) if self._inserted else None
        output = self._dispatcher.trace(args, kwargs, plan)
        assert self._dispatcher.latest is not None
        trace = copy.copy(self._dispatcher.latest)
        trace.output, trace._keeps = output, plan
        return (trace, output) if _return_out else trace

    @property
    def graph(self) -> StateGraph:
        """The known paths of the model as a networkx graph of states and the segments between them.

        Each access makes a new graph. `Trace.graph` is the graph of one run, with its
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
        """The latest trace; replays do not make one.

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
            raise errors.InputError(
                "nothing has been traced yet: call the module or its trace() first"
            )
        return self._dispatcher.latest

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, format: Format | None = None
    ) -> Picture:
        """Draw all known paths as a flow chart; the same as `tree.draw`.

        Args:
            path: the file to save it to; its ending selects the format: .svg, .png, .pdf or .html.
            format: the format, if the path has no such ending.

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
        """The known paths of the model as a program, which prints and draws as one.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> for value in (1.0, 2.0, -1.0):
            ...     _ = bended(torch.tensor([value]))
            >>> [(branch.text, branch.hits(True), branch.hits(False))
            ...  for branch in bended.tree[0].flow.branches.values()]
            [('... if x.sum() > 0 else ...', 2, 1)]
        """
        name = run_views.name_of_function(self._model)
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

    @property
    def compiled(self) -> CompiledReport:
        """A report on compiled paths, or why there are none; prints as a table.

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
        """The reasons why some calls run, or ran, the model's own Python; empty if none had to.

        The reasons that hold with the present insertions come first, then those of other calls.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x * float(str(x.numpy().mean())))
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

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Say which traces could serve some inputs, without running anything.

        It looks at the metadata of the inputs only; a run shows whether the data guards hold.

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
        plan = self._insertion_registry.plan(args, kwargs) if self._inserted else None
        names, arguments = self._dispatcher.named_arguments(args, kwargs, plan)
        tree = self._dispatcher.tree_for(plan, names, arguments)
        return self._dispatcher.explanation_of(tree, names, arguments)

    def _predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | None:
        """Return the known run without insertions that inputs must repeat, if there is one.

        Where values decide, a replay shows the path, provided that it changes and draws nothing,
        and runs no code of the user's.
        """
        names, arguments = self._signature.named_arguments(args, kwargs)
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
        if isinstance(result, FinishedReplay):
            return result.recording
        result.drop()
        return None

    @contextmanager
    def _redirect_parts(self, method: types.MethodType) -> Iterator[None]:
        """Return a context in which insertions are also called if a method calls a submodule."""
        model = self._model
        if not self._inserted:
            yield
            return
        plan, unknown = self._insertion_registry.plan_of_parts()
        inserter.refuse_reading(plan, method)
        with ExitStack() as stack:
            if isinstance(model, nn.Module):
                for name, module in named_modules(model):
                    position = inserter.PartPosition(model, name, self._knowledge.path_of(name))
                    if name and (unknown or inserter.may_apply_in(plan, module, position)):
                        part = functools.partial(self._call_part, module, position)
                        stack.enter_context(redirection.redirect_calls(module, part))
            yield

    def _call_part(
        self, module: nn.Module, position: PartPosition, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a submodule that is called by itself, live."""
        plan, unknown = self._insertion_registry.plan_of_parts()
        if not self._insertion_registry or current_watcher() is not None:
            return call_itself(module, args, kwargs)
        if unknown:
            raise errors.InputError(
                f"{position.name} is called by itself, by a method of the model, and where "
                "something is inserted has to be found out in a call of the whole model: call that "
                "once first, or give places that do not look ahead, nor passes from the end"
            )
        live = inserter.LiveInserter(plan, self._dispatcher.registry, module, position)
        with gates.applying(plan):
            recording = record(module, args, kwargs, Signature(module), inserter=live)
            plan.ran(recording)
        self._dispatcher.stats.live += 1
        return recording.result

    @contextmanager
    def _inserting(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
    ) -> Iterator[LiveInserter | None]:
        """Return a context in which gates call the insertions; it yields the inserter of a run."""
        plan = self._insertion_registry.plan(args, kwargs) if self._inserted else None
        if plan is None:
            yield None
            return
        with gates.applying(plan):
            if function is None:
                yield inserter.LiveInserter(plan, self._dispatcher.registry, self._model)
            else:
                path_of = self._knowledge.path_of
                yield inserter.LiveInserter(
                    plan, self._dispatcher.registry, function, path_of=path_of
                )

    # Methods that are written where their subject is

    audit = audit
    bend = bend
    explore = explore
    export = export
    patch = patch
    activation_names = activation_names
    print_activations = print_activations
    print_weights = print_weights
    step = step

    # Inserting

    def interject(
        self,
        where: Where,
        what: What,
        *,
        passes: PassNumbers = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Insert something in the model: every run that reaches the nodes calls it from now on.

        Args:
            where: the nodes: a node path (also into a container, `output|sub_0`, of an input of a
                module, `fc.input`, or of a parameter, `fc.weight`), a tree node, a regular
                expression for paths, a module, a class of modules, a selector, a torch function, a
                predicate of the `Candidate`, the name of a layer or an entry of the log, a
                `NodeRef` of the networkx mirror, or several of these; or an `Alias`.
            what: an `Interjection`, or a function or module that is called with the node's value.
                Its return value replaces the value; None keeps it. A function with two arguments
                also receives the `NodePass`.
            passes: the passes of each node to apply to: numbers counted from 0, or from the end if
                negative; or a function of the number.
            every: apply only in every n-th pass, beginning with the first.
            calls: the calls of the model to apply to, of those that reach a node: numbers counted
                from 0 at the insertion, or a function of the number. `generate` calls the model
                once in each step, so that `calls=range(2)` are the first two steps.
            allow_none: whether to accept that no node is selected.

        Returns:
            A handle, which is also a context manager: `remove()`, `report()`.

        Raises:
            InputError: an argument is invalid.
            NodePathError: `where` selects nothing.

        Example:
            >>> import torch, bendtrace as bt
            >>> def doubled(x):
            ...     return torch.relu(x) * 2
            >>> bended = bt.BendedModule(doubled)
            >>> x = torch.tensor([-1.0, 2.0])
            >>> bended(x)
            tensor([0., 4.])
            >>> with bended.interject("relu", lambda value: value + 10) as handle:
            ...     bended(x)
            tensor([20., 24.])
            >>> handle.report()
            function at 'relu': called once at 1 node
              relu: once, changed the value once
            >>> bended(x)
            tensor([0., 4.])
        """
        return self._insertion_registry.insert(
            where, what, passes=passes, every=every, calls=calls, allow_none=allow_none
        )

    # What is inserted

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The active insertions of the model, in the order in which they were made.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.relu().exp())
            >>> handle = bended.interject("relu", torch.zeros_like)
            >>> bended.insertions
            (<insertion of zeros_like at 'relu', active>,)
            >>> handle.remove()
            >>> bended.insertions
            ()
        """
        return self._insertion_registry.insertions

    @functools.cached_property
    def hooks(self) -> HookManager:
        """Hooks on the model's modules, by name; active hooks are listed in `insertions`.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 1)))
            >>> def show(module, inputs, outputs):
            ...     print(module.name, tuple(outputs[0].shape))
            >>> _ = bended.hooks.register_forward_hook(show, bended[0])
            >>> _ = bended(torch.ones(3, 2))
            0 (3, 1)
        """
        return hooks_module.HookManager(self)

    @property
    def bending(self) -> Bending:
        """The bends of the model: configurations, versions of weights, captures."""
        return self._bending

    def reset(self, *what: Any) -> None:
        """Stop bending (see `Bending.reset`). Other insertions stay (see `remove_all`).

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity()))
            >>> _ = bended.bend(bt.bends.Scale(2.0), "0$"), bended.bend(bt.bends.Bias(1.0), "1$")
            >>> bended(torch.ones(1))
            tensor([3.])
            >>> bended.reset("1$")
            >>> bended(torch.ones(1))
            tensor([2.])
        """
        self._bending.reset(*what)

    def remove_all(self) -> None:
        """Remove all insertions: interjections, patches, bends, and those of workflows.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.relu() * 2)
            >>> handles = bended.interject("relu", torch.zeros_like), bended.interject("mul", abs)
            >>> bended.remove_all()
            >>> bended.insertions, bended(torch.ones(1))
            ((), tensor([2.]))
        """
        self._bending.reset()
        self._insertion_registry.clear()

    def update(self, name: str | None = None, value: Value | None = None) -> None:
        """Set a parameter of the callbacks, or match the patterns again.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
            >>> _ = bended.bend(bt.bends.Scale(bt.bends.BendingParameter("gain", 1.0)), "0$")
            >>> bended.update("gain", 3.0)
            >>> bended(torch.ones(2))
            tensor([3., 3.])
        """
        self._bending.update(name, value)

    def bended_keys(self) -> list[str]:
        """Return the names of everything that is bent: node paths, and names of the state dict.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
            >>> _ = bended(torch.ones(1, 2)), bended.bend(bt.bends.Scale(2.0), "0.*", "0.weight")
            >>> bended.bended_keys()
            ['sub_0', '0.weight']
        """
        return self._bending.bended_keys()

    def bending_config(self, name: str | None = None) -> model_bends.BendingConfig:
        """Return the active bends, or those saved under a name, as a configuration.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
            >>> handle = bended.bend(bt.bends.Scale(2.0), "0$")
            >>> config = bended.bending_config()
            >>> config
            BendingConfig(
              (Scale(scale=2.0), '0$'),
            )
            >>> handle.remove()
            >>> with bended.bend(config):
            ...     bended(torch.ones(2))
            tensor([2., 2.])
        """
        return self._bending.bending_config(name)

    @property
    def weight_names(self) -> list[str]:
        """The names of the parameters."""
        return self._bending.weight_names

    @overload
    def get_activations(
        self, *where: Where, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None, detach: bool = True, bended: bool = True,
        return_output: Literal[False] = False, allow_none: bool = False, **inputs: Any,
    ) -> Activations: ...  # fmt: skip
    @overload
    def get_activations(
        self: BendedModule[Callable[..., R]], *where: Where, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None, passes: PassNumbers = None, detach: bool = True,
        bended: bool = True, return_output: Literal[True], allow_none: bool = False, **inputs: Any,
    ) -> tuple[Activations, R]: ...  # fmt: skip
    @overload
    def get_activations(
        self, *where: Where, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None, detach: bool = True, bended: bool = True, return_output: bool,
        allow_none: bool = False, **inputs: Any,
    ) -> Activations | tuple[Activations, Any]: ...  # fmt: skip
    def get_activations(
        self,
        *where: Where,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None,
        detach: bool = True,
        bended: bool = True,
        return_output: bool = False,
        allow_none: bool = False,
        **inputs: Any,
    ) -> Any:
        """Call the model, and return the outputs of some nodes in that call, by path.

        Args:
            *where: the nodes: paths, regular expressions, modules, and everything else that
                `interject` accepts.
            args: the model's positional arguments.
            kwargs: keyword arguments of the model whose names are taken by options.
            passes: the passes of each node.
            detach: whether to return snapshots, or the tensors themselves.
            bended: whether to return the values after the insertions at a node, or before.
            return_output: whether to return the output of the model as well.
            allow_none: whether to accept that the call reaches no selected node.
            **inputs: keyword arguments of the model.

        Returns:
            An `Activations`, which is a dict; with `return_output` that and the output.

        Raises:
            NodePathError: no node is selected.
            InputError: an argument is invalid.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
            >>> found = bended.get_activations("relu", args=(torch.tensor([-1.0, 2.0]),))
            >>> found["relu"]
            tensor([0., 2.])
        """
        found: Any = activations.get_activations(
            self, list(where), args, activations.inputs_of(self, kwargs, inputs), passes=passes,
            detach=detach, bended=bended, return_output=return_output, allow_none=allow_none,
        )  # fmt: skip
        return found

    def from_activations(
        self: BendedModule[Callable[..., R]], *args: Any, _bended: bool = True, **kwargs: Any
    ) -> R:
        """Run the rest of the model from given activations, and return its output.

        Args:
            *args: first a dict of values by node path; then the model's positional arguments, as
                far as the rest needs them. Or, as in torchbend, only the names of nodes, with their
                values as keyword arguments.
            _bended: whether the run continues with the values as they are, or first applies the
                insertions at these nodes.
            **kwargs: the model's keyword arguments, as far as the rest needs them.

        Raises:
            NodePathError: there is no such node.
            InputError: an argument that the rest needs is missing.
            DivergenceError: the rest takes a path that no recorded run took, and the arguments
                needed to run the model's own Python are missing.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
            >>> _ = bended(torch.ones(2))
            >>> bended.from_activations({"relu": torch.tensor([3.0])})
            tensor([6.])
        """
        replacements = resume_point.parse_replacements(args, kwargs)
        output: R = resume_point.from_activations(self, *replacements, bended=_bended)
        return output

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> BendedModule:
        # Paths are not copied: their code holds on to the tensors and modules of this model.
        made = memo[id(self)] = type(self).__new__(type(self))  # the model may hold this one
        model = copy.deepcopy(self._model, memo)
        self._fill_tables(model, memo)
        carried = self._carried(memo)
        BendedModule.__init__(
            made, model, max_traces=self._trees.limit, **carried["backend"],
        )  # fmt: skip
        made._take_over(carried)
        return made

    def __reduce__(self) -> Any:
        return _wrap_model, (type(self), self._model, self._trees.limit, self._carried(None))

    def _carried(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        """Return everything that a copy has besides the model.

        These are names, insertions, the backend, and the hooks on this module itself.
        """
        speculation = self._dispatcher.speculation
        return {
            "hooks": self._own_hooks() if memo is None else copy.deepcopy(self._own_hooks(), memo),
            "backend": {} if speculation is None else speculation.settings.arguments,
            "registry": self._dispatcher.registry.__getstate__(),
            "bends": self._bending._copyable_state(memo),
            "insertions": self._insertion_registry.copyable_rows(memo),
        }

    def _take_over(self, carried: dict[str, Any]) -> None:
        self._dispatcher.registry.__setstate__(carried["registry"])
        self._insertion_registry.restore(*carried["insertions"])
        self._bending._restore(carried["bends"])
        vars(self).update(carried["hooks"])

    __treescope_repr__ = folded

    def __dir__(self) -> list[str]:
        # `torch.jit.trace` asks for all that is listed.
        nothing = {"latest_trace"} if self._dispatcher.latest is None else set()
        return [name for name in super().__dir__() if name not in nothing]

    def __repr__(self) -> str:
        counts = repr(self.stats).removeprefix("Stats(").removesuffix(")")
        inserted = checks.listed([repr(each) for each in self.insertions], 3) or "nothing"
        return f"BendedModule({self._model!r})\n  calls: {counts}\n  inserted: {inserted}"


def _wrap_model(
    cls: type[BendedModule], model: Callable[..., Any], limit: int | None, carried: dict[str, Any]
) -> BendedModule:
    made = cls.__new__(cls)
    BendedModule.__init__(made, model, max_traces=limit, **carried["backend"])
    made._take_over(carried)
    return made


@disable_dynamo
def _past_compiler(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def bended_of(model: Callable[..., Any]) -> BendedModule:
    """Return a model as a `BendedModule`, or the model itself if it is one.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.relu)
        >>> bended_of(bended) is bended
        True
    """
    return model if isinstance(model, BendedModule) else BendedModule(model)


def required_bended(model: Any, what: str) -> BendedModule:
    """Return a model in which something stays inserted after the call."""
    if not isinstance(model, BendedModule):
        raise errors.InputError(
            f"{what} stays in the model until it is removed, so the model has to be a "
            "BendedModule: make `bended = bendtrace.BendedModule(model)`, and pass that"
        )
    return model
