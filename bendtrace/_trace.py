"""Trace: one recorded run of a model, which can be inspected and replayed."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import fx, nn

from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import Divergence
from bendtrace.errors import DivergenceError, InputError, LayerKeyError, NotReplayableError
from bendtrace.flow import FlowSteps
from bendtrace.log.building import RunData, writes_in_place
from bendtrace.log.capture import SaveOptions, Selection, Spec, ValueCapture
from bendtrace.log.entries import counted
from bendtrace.log.nodes import Registry
from bendtrace.log.path_views import LazyRoot, Tree
from bendtrace.log.run import Run, name_of_function
from bendtrace.log.run_log import Facts, Lookup, RunLog
from bendtrace.python.checks import similar
from bendtrace.python.lazy import LazyMethod, LazyModule
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import ModuleCall, Op
from bendtrace.watch.owners import required_model

if TYPE_CHECKING:
    from bendtrace import storage
    from bendtrace.debug.backward import backward
    from bendtrace.engine import explain
    from bendtrace.engine.explain import GuardTable
    from bendtrace.insert import selector_naming as naming
    from bendtrace.log import fx as conversion
    from bendtrace.log import validate
    from bendtrace.log.mirror import Graph
    from bendtrace.log.validate import Validation
    from bendtrace.show.picture import Picture, draw
    from bendtrace.show.treescope_forms import log as folded
    from bendtrace.show.viewer import viewer_html
    from bendtrace.storage import save
else:
    backward = LazyMethod("bendtrace.debug.backward", "backward")
    conversion = LazyModule("bendtrace.log.fx")
    explain = LazyModule("bendtrace.engine.explain")
    naming = LazyModule("bendtrace.insert.selector_naming")
    storage = LazyModule("bendtrace.storage")
    validate = LazyModule("bendtrace.log.validate")
    draw = LazyMethod("bendtrace.show.picture", "draw")
    folded = LazyMethod("bendtrace.show.treescope_forms", "log")
    save = LazyMethod("bendtrace.storage", "save")
    viewer_html = LazyMethod("bendtrace.show.viewer", "viewer_html")


# ModelHistory: the log of a run, and the operations on it.


class ModelHistory(RunLog):
    """The log of one run: print, look up, draw, view, compare and save it.

    A `Trace` is a log that still has its run; `bendtrace.load` reads a log without the model.

    Attributes:
        picture: the picture that `log_forward_pass(vis_opt=...)` drew.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2))
        >>> history.draw().svg[:4]
        '<svg'
    """

    picture: Picture | None = None

    draw = draw
    save = save
    to_html = viewer_html
    __treescope_repr__ = folded

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        parts = [f"<pre>{escape(str(self))}</pre>"]
        if self.layers:
            parts.append(self.draw().svg if self.picture is None else self.picture.svg)
        return {"text/plain": str(self), "text/html": "\n".join(parts)}


class LoadedHistory(ModelHistory):
    """A log that was read from a file. An attribute of the run raises an error that says so."""

    # Not in `ModelHistory`: IPython completes nothing of an object that may compute its attributes.
    if not TYPE_CHECKING:  # a checker would accept any name

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_TRACES:
                message += ": a loaded log has no model to run. Trace the model again"
            raise AttributeError(message, name=name, obj=self)


_OF_TRACES = frozenset(
    {"function", "graph", "guards", "output", "replay", "to_fx", "to_json", "validate", "why_live"}
)


def load(
    directory: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> ModelHistory:
    """Read the log that `ModelHistory.save` wrote, without the model and without running its code.

    Activations and gradients stay on disk: each access to `entry.tensor_contents` reads the value
    again. It is None for values that could not be stored, and `entry.unsaved` says why.

    Args:
        directory: the directory that was saved to.
        device: the device to read tensors to; None for the CPU, wherever they were.

    Returns:
        The log, a `ModelHistory`.

    Raises:
        LoadError: the save is missing, damaged, unfinished, from another program, or in a
            newer version of the format. A damaged activation is noticed only when it is read.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.save(directory)
        ...     loaded = bt.load(directory)
        >>> str(loaded) == str(history)
        True
    """
    log = storage.load(directory, device=device)
    return LoadedHistory(*log._parts())


def trace(
    function: Callable[..., Any],
    /,
    *args: Any,
    save: Spec | None = None,
    save_gradients: bool = False,
    save_device: torch.device | str | None = None,
    save_dtype: torch.dtype | None = None,
    save_to: str | os.PathLike[str] | None = None,
    keep_graph: bool = False,
    stop_after: Spec | None = None,
    **kwargs: Any,
) -> Trace:
    """Run a module, bound method or function on real inputs and record what it does.

    Args:
        function: the callable. It is not changed, and runs as it would without the tracer.
        *args: its positional arguments.
        save: which activations to keep: "all", "none" (only times and names of gradient functions),
            or one or several of the following. They are kept as they are when computed: nothing is
            copied until an in-place op is about to change them.

            - names of layers and modules, also as patterns: `"relu_1"`, `"features.*"`;
            - positions, also from the end;
            - modules and classes of modules, for their outputs;
            - entries of another log;
            - node paths, tree nodes, selectors and torch functions. Only the finished run can
              resolve these, so all values are held until it ends;
            - functions of the entry that return what to keep: `True` for the value itself, None for
              nothing, or something computed from `entry.tensor_contents`.

            None keeps nothing and measures nothing.
        save_gradients: whether to keep their gradients in the backward pass, too.
        save_device: device to keep them on; None leaves them where they are.
        save_dtype: floating point dtype to keep them in; None for their own.
        save_to: a directory to write them to during the run, instead of keeping them in memory.
        keep_graph: whether they stay part of the autograd graph instead of being detached. One can
            call backward from them, but they are not the tensors that later ops have used.
        stop_after: end the run here. Takes what `save` takes, if it can be resolved during the run.
            Such a trace has no output.
        **kwargs: keyword arguments of the function. Bind an argument that shares its name with an
            option beforehand, with `functools.partial`.

    Returns:
        The record of the run. `Trace.output` is what `function` returned.

    Raises:
        InputError: an option makes no sense, or is also the name of an argument.
        LayerKeyError: there is nothing by a name in `save` or `stop_after`. The run has taken
            place by then.
        Exception: whatever `function` raises, as it is. Its attribute `bendtrace` is the trace up
            to there.

    Example:
        >>> import torch, bendtrace as bt
        >>> def scaled(x):
        ...     return x / x.norm() if x.norm() > 1 else x
        >>> trace = bt.trace(scaled, torch.full((4,), 2.0), save="all")
        >>> trace.flow_steps[0].value
        True
        >>> trace["div_1"].tensor_contents
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        >>> trace.replay(torch.full((9,), 3.0)).shape
        torch.Size([9])
    """
    given = (save_gradients, save_device, save_dtype, save_to, keep_graph, stop_after)
    options = None
    if save is not None or any(value not in (None, False) for value in given):
        options = SaveOptions(
            save, save_gradients, stop_after, save_device, save_dtype, keep_graph, save_to
        )
        _refuse_taken_names(function)
    return run_trace(function, args, kwargs, options)


def run_trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SaveOptions | None,
) -> Trace:
    """Trace a function; see `trace`."""
    try:
        return _run_trace(function, args, kwargs, options)
    except TypeError as error:
        # Say on an error about an unknown argument which option it may have been meant for.
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused and refused[1] in kwargs:
            near = similar(refused[1], OPTIONS)
            if near:
                error.add_note(f"{refused[1]}= was passed to the model; did you mean {near[0]}=, "
                               "an option of bendtrace.trace?")  # fmt: skip
        raise


def _run_trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SaveOptions | None,
) -> Trace:
    required_model(function)
    owner, function = function, getattr(function, "_bendtrace_model", function)
    global_state = GlobalState.current()
    signature = Signature(function)
    registry = getattr(owner, "_registry", None)
    with ExitStack() as stack:
        inserter = None
        if owner is not function:  # a BendedModule: its model, with what is inserted in it
            inserter = stack.enter_context(owner._inserting(args, kwargs))  # type: ignore[attr-defined]
        if options is None:
            recording = record(
                function, args, kwargs, signature, inserter=inserter, keeps_errors=True
            )
            made = Trace(recording, global_state, signature, function, registry=registry)
            made._keeps = None if inserter is None else inserter.plan
            if recording.error is not None:
                _raise_with_trace(recording, made)
            if inserter is not None:
                inserter.settle(recording)
            return made
        store = None
        if options.directory is not None:
            store = stack.enter_context(storage.ShardWriter(options.directory))
        capture = options.capture(store, function)
        began = time.perf_counter()
        recording = record(
            function, args, kwargs, signature, observer=capture, inserter=inserter,
            keeps_errors=True,
        )  # fmt: skip
        capture.seconds = time.perf_counter() - began
        if capture.error is not None:
            raise capture.error
        made = Trace(
            recording, global_state, signature, function, capture=capture, registry=registry
        )
        made._keeps = None if inserter is None else inserter.plan
        capture.finish(recording.result, made._output_values, made._rewritten(), len(made.ops))
        if recording.error is not None:
            with contextlib.suppress(LayerKeyError):  # of what the run did not reach
                made._settle(capture)
            _raise_with_trace(recording, made)
        if inserter is not None:
            inserter.settle(recording)
        made._settle(capture)
    made._require_met(capture)
    return made


def _raise_with_trace(recording: Recording, made: Trace) -> NoReturn:
    """Raise the function's error, with the trace up to there as an attribute."""
    error, recording.error = recording.error, None
    assert error is not None
    with contextlib.suppress(AttributeError):  # a class of errors with slots
        error.bendtrace = made  # type: ignore[attr-defined]
        has_begun = any(op.is_work for op in recording.tape.ops)
        if has_begun and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
    raise error


_NOTE = "the attribute `bendtrace` of this error is the trace of the run up to here"


OPTIONS = frozenset({
    "save", "save_gradients", "save_device", "save_dtype", "save_to", "keep_graph", "stop_after",
})  # fmt: skip


def _refuse_taken_names(function: Callable[..., Any]) -> None:
    taken = OPTIONS & Signature(function).parameters
    if taken:
        raise InputError(
            f"{name_of_function(function)} has an argument called {min(taken)}, which is also "
            "the name of an option: bind it with functools.partial, or use "
            "bendtrace.log_forward_pass"
        )


class Trace(ModelHistory):
    """The record of one run: its log, ops, guards and module calls.

    Created by `bendtrace.trace` and `BendedModule.trace`.

    Attributes:
        function: the function that was run.
        output: its return value; None for a trace that a `BendedModule` made during a call.

    Example:
        >>> import torch, bendtrace as bt
        >>> def clipped(x):
        ...     return x if x.abs().max() < 1 else x.clamp(-1, 1)
        >>> trace = bt.trace(clipped, torch.tensor([0.5, 2.0]))
        >>> trace
        <Trace of clipped: 6 ops, 1 flow step>
        >>> trace.graph
        <Graph: 7 nodes, 6 data edges, 1 control edge>
        >>> [(step.text, step.value) for step in trace.flow_steps], trace.output
        ([('x.abs().max() < 1', False)], tensor([0.5000, 1.0000]))
        >>> trace.replay(torch.tensor([7.0, 8.0, -9.0]))
        tensor([ 1.,  1., -1.])
    """

    def __init__(
        self,
        recording: Recording,
        global_state: GlobalState,
        signature: Signature,
        function: Callable[..., Any],
        program: Program | None = None,
        capture: ValueCapture | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._recording = recording
        self.function = function
        self.output: Any = recording.result
        self._global_state = global_state
        self._signature = signature
        self._capture = capture
        run = self._run = Run(recording, function, registry)
        run.torchlens = capture is not None and capture.torchlens
        self.tree: LazyRoot = LazyRoot(lambda: run.tree)
        self._has_counted = False
        self._keeps: object = None  # what was inserted, for as long as the trace can be replayed
        if program is not None:
            self.__dict__["_program"] = program

    backward = backward

    @property
    def ops(self) -> list[Op]:
        """The recorded ops, in order."""
        return self._recording.tape.ops

    @property
    def module_calls(self) -> list[ModuleCall]:
        """The calls of modules, in the order in which they began."""
        return self._recording.tape.calls

    @property
    def names(self) -> list[str]:
        """The node name of each op."""
        return self._run.names

    @property
    def flow_steps(self) -> FlowSteps:
        """The places where the model's Python depended on the inputs."""
        return self._run.steps

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        """The networkx mirror at op level."""
        return self._run.graph

    @cached_property
    def _program(self) -> Program:
        """The generated code that replays the run."""
        return Program(self._recording, self._global_state)

    @property
    def guards(self) -> GuardTable:
        """The conditions under which a replay is right, besides those on input structure.

        Example:
            >>> import torch, bendtrace as bt
            >>> def doubled(x):
            ...     return x * 2 if x.shape[0] > 3 and x.sum() > 0 else x
            >>> trace = bt.trace(doubled, torch.ones(4))
            >>> [(row["when"], row["source"], row["expected"]) for row in trace.guards.to_list()]
            [('input', 'x.shape', '1'), ('input', 'x.shape[0] > 3', 'True'), ('data', 'x.sum() > 0',
             'True')]
        """
        return explain.GuardTable(
            self._recording.tape.guards, self._program.analysis.kinds, self.names
        )

    @property
    def _tree(self) -> Tree:  # type: ignore[override]
        return self._run.tree

    @cached_property
    def _log(self) -> RunData:  # type: ignore[override]
        log = self._run.log
        if self._capture is not None:
            self._capture.attach(log, len(self.ops))
        self._claim(log)
        return log

    @property
    def _lookup(self) -> Lookup:
        _ = self._log  # which has what was kept
        return self._finder

    @cached_property
    def _finder(self) -> Lookup:
        run = self._run  # the lookup does not refer to the trace, which would outlive its last user

        def select(what: Any) -> list[str]:
            return [node.path for node in naming.find_nodes(what, run.candidates)]

        return Lookup(run.log, run.tree, select)

    @property
    def _facts(self) -> Facts:  # type: ignore[override]
        capture, live = self._capture, self._recording.tape.blockers
        if capture is None:
            return Facts(None, None, live)
        return Facts(capture.seed, capture.seconds, live)

    def guard_rows(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        return self.guards.to_list()

    def _count_flops(self) -> None:
        """Count the floating point operations of all entries, once."""
        if self._has_counted:
            return
        self._has_counted = True
        counts = validate.flops_of(self.ops)
        for entry in self.entries:
            if entry.kind == "op" and entry.index is not None and not any(entry.element[:1]):
                entry.flop_count = counts.get(entry.index, 0)
            else:
                entry.flop_count = 0

    def validate(self, *, seed: int = 0) -> Validation:
        """Recompute each op from the saved values, and compare the results bit by bit.

        Then replace each input of an op by another value, to see that the op really depends on it.
        The trace needs all its activations: `save="all"`.

        Args:
            seed: seed of the replacement values.

        Returns:
            A report; `bool(report)` says whether all checks passed.

        Raises:
            InputError: not all activations were saved in memory.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x.relu() + 1, torch.randn(3), save="all")
            >>> print(trace.validate())
            2 ops recomputed: bitwise equal
            2 edges tried
        """
        return validate.validate(self, self._capture, seed)

    def _output_values(self) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the values of the tape that are outputs: ops, and elements of their results."""
        found = self._tree.outputs
        return [(index, element) for _, index, element in found if index is not None]

    def _rewritten(self) -> dict[int, int | None]:
        """Return the outputs that were written to after their op returned them; see `finish`."""
        return {
            index: writer if index in self.ops[writer].writes and writes_in_place(self.ops[writer])
            else None
            for index, writer in self._recording.output_reads.items()
        }  # fmt: skip

    def _settle(self, capture: ValueCapture) -> None:
        """Resolve the requests that only the finished run can resolve."""
        wants = capture.deferred
        keys: list[tuple[int, tuple[Any, ...]]] = []
        for want in wants:
            try:
                entries = self._finder.all(want.key)
            except LayerKeyError as error:
                if capture.ended:  # it may have been still to come
                    continue
                raise LayerKeyError(f"save: {error}", want.key, error.near) from None
            if all(entry.kind in ("state", "number") for entry in entries):
                raise LayerKeyError(
                    f"save: {want.key!r} is {', '.join(map(repr, entries))}; only tensors that "
                    "the run computes can be saved",
                    want.key,
                )
            want.met = True
            for entry in entries:
                # An output is the value that it was.
                sources = [entry] if entry.index is not None else self._finder.all(entry.parents)
                keys += [(one.index, one.element) for one in sources if one.index is not None]
        if wants:
            capture.choose(keys)

    def _require_met(self, capture: ValueCapture) -> None:
        """Raise if a requested name does not exist."""
        for what, selection in (("save", capture.chosen), ("stop_after", capture.stop)):
            if not isinstance(selection, Selection) or capture.ended:
                continue  # what did not come up may have been still to come
            for key in selection.unmet():
                if isinstance(key, str) and key in self:
                    hint = (
                        f"; it is another name of {self[key]!r}, but this name is known only "
                        "after the run"
                    )
                    raise LayerKeyError(f"{what}: no layer or module is called {key!r}{hint}", key)
                if isinstance(key, re.Pattern) and key in self:
                    raise LayerKeyError(
                        f"{what}: no layer or module is called {key.pattern!r}; it matches node "
                        "paths, which are known only after the run: pass "
                        "node_selector.matches_path(...) instead",
                        key,
                    )
                near = self._lookup.near(key) if isinstance(key, str) else []
                hint = f"; similar names: {', '.join(near)}" if near else ""
                raise LayerKeyError(
                    f"{what}: the run reached no layer or module {key!r}{hint}", key, tuple(near)
                )

    @property
    def code(self) -> str:
        """The generated Python code of the replay.

        Raises:
            NotReplayableError: the trace cannot be replayed; `why_live` says why.

        Example:
            >>> import torch, bendtrace as bt
            >>> print(bt.trace(lambda x: x.relu() + 1, torch.ones(2)).code)
            def run(A, E):
                p0 = A[0]
                v0 = p0
                v1 = c0(v0)
                v2 = c1(v1, 1)
                del v1
                return v2
        """
        self._require_replayable()
        graph = self._program.graph
        assert graph is not None
        return graph.beginning.code.text

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the run on other inputs.

        Args:
            *args: positional arguments of the function.
            **kwargs: keyword arguments.

        Returns:
            The value that the function would return for these inputs.

        Raises:
            DivergenceError: the inputs lead to another path, if only to one more iteration of a
                loop. If a guard on the inputs fails, nothing was run; if a guard on a computed
                value fails, the ops before it were run. `BendedModule` continues from there
                instead.
            NotReplayableError: the run depends on something that no guard can watch.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
            >>> trace.replay(torch.tensor([3.0, 4.0]))
            tensor([4., 5.])
        """
        self._require_replayable()
        bound = self._signature.bind(args, kwargs)
        expected = tuple(part.label for part in self._arguments())
        if tuple(bound) != expected:
            raise DivergenceError(
                f"called with arguments {tuple(bound)}, but traced with {expected}"
            )
        traced = self._recording.form
        if traced and traced != (form := self._signature.form(args, kwargs, True)):
            raise DivergenceError(
                f"called with {', '.join(form)}, but traced with {', '.join(traced)}, which the "
                "function, or something inserted, may tell apart"
            )
        values = tuple(bound.values())
        failed = self._program.failing(values)
        if failed is not None:
            mismatch = explain.explain_check(failed, self._program, values)()
            raise DivergenceError(mismatch.reason, mismatch.step)
        result = self._program.run(values, first=True)
        if isinstance(result, Divergence):
            result.hold.release()
            reason: Exception | None = result.error if result.is_raised else None
            if reason is None:
                mismatch = explain.explain_divergence(
                    result.recording, result.number, result.outcome
                )
                reason = DivergenceError(mismatch.reason, mismatch.step)
            del result  # which the traceback would keep: other ranks wait until it is gone
            raise reason
        return result.output

    def to_fx(
        self, *, fold: bool | Callable[[nn.Module], bool] = False, guards: bool = True
    ) -> fx.GraphModule:
        """Convert to a runnable `torch.fx.GraphModule` (see `bendtrace.graph.to_fx`).

        Example:
            >>> import torch, bendtrace as bt
            >>> module = bt.trace(lambda x: x.relu() + 1, torch.ones(2)).to_fx()
            >>> module(torch.tensor([-5.0, 5.0]))
            tensor([1., 6.])
            >>> [node.name for node in module.graph.nodes]
            ['x', 'relu', 'add', 'output']
        """
        return conversion.to_fx(self.graph, fold=fold, guards=guards)

    def to_json(self, **options: Any) -> str:
        """Return ops, flow steps and guards as JSON.

        Args:
            **options: passed on to `json.dumps`.

        Example:
            >>> import json, torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
            >>> told = json.loads(trace.to_json())
            >>> sorted(told), told["flow_steps"][0]["text"]
            (['flow_steps', 'function', 'guards', 'nodes', 'why_live'], 'x.sum() > 0')
        """
        return json.dumps(self.to_dict(), **options)

    def to_dict(self) -> dict[str, Any]:
        """Return ops, flow steps and guards as plain values."""
        return {
            "function": name_of_function(self.function),
            "nodes": self.graph.to_list(),
            "flow_steps": self.flow_steps.to_list(),
            "guards": self.guards.to_list(),
            "why_live": list(self.why_live),
        }

    def _arguments(self) -> list[Any]:
        parts = self._recording.environment.parts
        return [part for part in parts if part.is_argument and part.parent is None]

    def _require_replayable(self) -> None:
        if self.why_live:
            raise NotReplayableError(self.why_live)

    def __repr__(self) -> str:
        counts = f"{counted(len(self.ops), 'op')}, {counted(len(self.flow_steps), 'flow step')}"
        live = "" if not self.why_live else ", live only"
        return f"<Trace of {name_of_function(self.function)}: {counts}{live}>"


def log_forward_pass(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    layers_to_save: Any = "all",
    vis_opt: Literal["none", "rolled", "unrolled"] = "none",
    *,
    vis_outpath: str | os.PathLike[str] | None = None,
    save_gradients: bool = False,
    save_device: torch.device | str | None = None,
    save_dtype: torch.dtype | None = None,
    save_to: str | os.PathLike[str] | None = None,
    keep_graph: bool = False,
    stop_after: Any = None,
    random_seed: int | None = None,
) -> Trace:
    """Run a model and log everything that it computes.

    The same as `bendtrace.trace(model, *input_args, save=..., **input_kwargs)` with other names,
    whose options cannot be confused with arguments of the model.

    Args:
        model: the callable. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        layers_to_save: "all", "none", or names of layers or modules, positions, modules or
            functions; see `bendtrace.trace`.
        vis_opt: whether to draw the run, with the passes of a layer merged ("rolled") or separate
            ("unrolled"). The picture is `ModelHistory.picture`, which notebooks show.
        vis_outpath: a file to draw into (.svg, .png, .pdf, .html, .dot); None for no file.
        save_gradients: whether to keep gradients in the backward pass, too.
        save_device: device to keep activations on; None leaves them where they are.
        save_dtype: floating point dtype to keep them in; None for their own.
        save_to: a directory to stream them to; None to keep them in memory.
        keep_graph: whether they stay part of the autograd graph.
        stop_after: a layer, module or position after which the run ends.
        random_seed: seed of the run; torch's generators are restored afterwards. None runs like an
            untraced call.

    Returns:
        The log, a `ModelHistory`.

    Raises:
        InputError: an option is invalid; nothing was run.
        LayerKeyError: a requested name does not exist. The run has taken place by then.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2), layers_to_save=["relu_1"])
        >>> [entry.label for entry in history if entry.has_contents]
        ['relu_1_2', 'output_1_3']
    """
    if vis_opt not in ("none", "rolled", "unrolled"):
        raise InputError(f"vis_opt has to be 'none', 'rolled' or 'unrolled', not {vis_opt!r}")
    if vis_outpath is not None and vis_opt == "none":
        raise InputError("vis_outpath needs vis_opt='rolled' or 'unrolled'")
    options = SaveOptions(
        layers_to_save, save_gradients, stop_after, save_device, save_dtype, keep_graph, save_to
    )
    trace = run_logged(model, input_args, input_kwargs, options, random_seed)
    if vis_opt != "none":
        trace.picture = trace.draw(vis_outpath, rolled=vis_opt == "rolled")
    return trace


def show_model_graph(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    vis_opt: Literal["rolled", "unrolled"] = "unrolled",
    *,
    vis_outpath: str | os.PathLike[str] | None = None,
    random_seed: int | None = None,
) -> Picture:
    """Run a model once and draw the run, without keeping activations.

    Args:
        model: the callable. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        vis_opt: whether the passes of a layer are merged ("rolled") or separate ("unrolled").
        vis_outpath: a file to draw into (.svg, .png, .pdf, .html, .dot); None for no file.
        random_seed: seed of the run; see `log_forward_pass`.

    Returns:
        The picture, which notebooks show.

    Raises:
        InputError: an option is invalid; nothing was run.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> picture = bt.show_model_graph(torch.nn.Linear(2, 3), torch.ones(4, 2))
        >>> picture.svg.startswith("<svg")
        True
    """
    if vis_opt not in ("rolled", "unrolled"):
        raise InputError(f"vis_opt has to be 'rolled' or 'unrolled', not {vis_opt!r}")
    trace = log_forward_pass(model, input_args, input_kwargs, "none", random_seed=random_seed)
    return trace.draw(vis_outpath, rolled=vis_opt == "rolled")


def run_logged(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None,
    options: SaveOptions,
    seed: int | None,
) -> Trace:
    """Trace a model whose arguments are a value or a list, from a seed if there is one."""
    args, kwargs = positional(model, input_args), named(input_kwargs)
    if seed is None:
        return run_trace(model, args, kwargs, options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return run_trace(model, args, kwargs, options)


def named(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments."""
    if given is not None and not isinstance(given, Mapping):
        raise InputError(
            "input_kwargs has to be a dict of the model's keyword arguments, not a "
            f"{type(given).__name__}: layers_to_save comes after it"
        )
    return dict(given or {})


def positional(model: Callable[..., Any], given: Any) -> tuple[Any, ...]:
    """Return the positional arguments; a tuple is one argument for a model that takes just one."""
    if isinstance(given, tuple) and len(given) > 1:
        function = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            return (given,)
        except ValueError:  # functions of C without a signature
            pass
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)
