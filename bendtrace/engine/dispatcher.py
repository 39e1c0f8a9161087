"""Decides how to serve a call: along a known path, resumed, recorded from its start, or live."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.engine.source import Unfit
from bendtrace.engine.stretches import Divergence, Exit, FinishedReplay
from bendtrace.engine.tree import TraceTree
from bendtrace.python.internals import MissingInternal, pytree
from bendtrace.python.lazy import LazyModule, errors
from bendtrace.python.sites import full_place_text
from bendtrace.record.module_proxy import call_itself
from bendtrace.record.recorded_call import Signature, has_lazy_modules, record
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import PLAIN_TYPES, is_uneven
from bendtrace.tape.contexts import function_modes
from bendtrace.watch.mode_queries import seeing_modes
from bendtrace.watch.rank_sync import has_other_ranks

if TYPE_CHECKING:
    from bendtrace import _trace
    from bendtrace._trace import Trace
    from bendtrace.debug.auditing import Auditor
    from bendtrace.engine import explain
    from bendtrace.engine.explain import Mismatch
    from bendtrace.engine.speculation import Speculation, SpeculationResult
    from bendtrace.insert import compiling, gates, live_runner, state_access
    from bendtrace.insert import splicer as splicing
    from bendtrace.insert.live_runner import LiveRunner
    from bendtrace.insert.plan import InsertionPlan
    from bendtrace.insert.resolver import Knowledge
    from bendtrace.insert.splicer import Splicer
    from bendtrace.log import nodes
    from bendtrace.log.nodes import Registry
    from bendtrace.record.script import Script
    from bendtrace.record.varying import Lifting
    from bendtrace.show import model_tree as outlines
else:
    _trace = LazyModule("bendtrace._trace")
    live_runner = LazyModule("bendtrace.insert.live_runner")
    compiling = LazyModule("bendtrace.insert.compiling")
    explain = LazyModule("bendtrace.engine.explain")
    gates = LazyModule("bendtrace.insert.gates")
    nodes = LazyModule("bendtrace.log.nodes")
    state_access = LazyModule("bendtrace.insert.state_access")
    splicing = LazyModule("bendtrace.insert.splicer")
    outlines = LazyModule("bendtrace.show.model_tree")

T = TypeVar("T")


class Calls(threading.local):
    """The number of calls of the model that the thread is in; a context that counts one more."""

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Examples:
    """Copies of inputs, from which a model can be exported. Large ones are not kept.

    They are bytes: tensors would stay in the memory of a device.
    """

    def __init__(self) -> None:
        self.missed: int = 0  # the number of calls whose inputs were too large, or no plain values
        self._calls: list[Any] = []
        self._left = _ALL_BYTES

    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the positional and keyword arguments of each call."""
        found = []
        for call in self._calls:
            leaves, spec = pytree.tree_flatten(call)
            made: dict[int, Tensor] = {}  # the same tensor stays one
            for leaf in leaves:
                if type(leaf) is _TensorContent and id(leaf) not in made:
                    made[id(leaf)] = leaf.tensor()
            found.append(pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec))
        return found

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep copies of inputs; the same tensor stays one."""
        if isinstance(pytree, MissingInternal):  # without which nothing is exported
            self.missed += 1
            return
        # Modes around the call see what the model does, and nothing of this.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._add(args, kwargs)

    def _add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        tensors = {id(leaf): leaf for leaf in leaves if type(leaf) is Tensor}
        is_plain = all(id(one) in tensors or type(one) in PLAIN_TYPES for one in leaves)
        if not is_plain or any(
            is_uneven(one) or one.is_conj() or one.is_neg() or one.is_meta
            for one in tensors.values()
        ):
            self.missed += 1
            return
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > min(self._left, _BYTES):
            self.missed += 1
            return
        self._left -= size
        try:
            saved = {key: _TensorContent(tensor) for key, tensor in tensors.items()}
        except RuntimeError:  # its content cannot be read: inside of a transform, for example
            self.missed += 1
            return
        self._calls.append(
            pytree.tree_map_only(Tensor, lambda one: saved[id(one)], (args, dict(kwargs)))
        )


class _TensorContent:
    """The content of a tensor as bytes, and how it lies in memory."""

    def __init__(self, tensor: Tensor) -> None:
        plain = tensor.detach().clone()
        self._form = plain.dtype, plain.device, plain.shape, plain.stride()
        self._data: bytes = _as_bytes(plain).cpu().numpy().tobytes()

    def tensor(self) -> Tensor:
        """Return the tensor."""
        dtype, device, shape, stride = self._form
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if self._data:
            _as_bytes(made).copy_(torch.frombuffer(bytearray(self._data), dtype=torch.uint8))
        return made


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_BYTES, _ALL_BYTES = 1 << 20, 1 << 24


class Dispatcher:
    """Serves the calls of one model, and keeps the paths that they take."""

    def __init__(
        self,
        model: Callable[..., Any],
        knowledge: Callable[[], Knowledge],
        signature: Signature,
        trees: Trees,
        speculation: Speculation | None,
        auditor: Auditor | None = None,
    ) -> None:
        self.speculation = speculation  # the compiled paths; None if there is no backend
        self.stats: Stats = Stats()  # how the calls so far were served
        self._mismatch: Mismatch | Callable[[], Mismatch] | None = None
        # A trace, or what it is made of when it is first asked for.
        self._latest: Trace | tuple[Recording, GlobalState, Program | None] | None = None
        self.latest_run: Recording | None = None  # what the latest call has repeated, or made
        self._model = model
        self._registry: Registry | None = None  # made when it is first used
        self._lock = threading.Lock()
        self._knowledge = knowledge
        self._signature = signature
        self._trees = trees
        self.calls: Calls = Calls()  # the calls of the model that each thread is in
        self._passing = 0  # runs that filled a cache
        self.passing: dict[str, None] = {}  # why some runs could not be repeated; later ones may
        self._auditor = auditor
        # Which calls with nothing inserted run the model itself; asked before `call`.
        self.floor: Floor = Floor()
        self.examples: Examples = Examples()  # the inputs of calls that took new paths
        self._has_blocks = False
        # The latest insertions, what calls them without the tracer, and how many traces there were.
        self._latest_runner: tuple[InsertionPlan, LiveRunner | None, int] | None = None

    def call_with(self, plan: InsertionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call with insertions."""
        guess: SpeculationResult | None = None
        # Compiled paths have no gates, which `applying` takes some time to prepare.
        if self.speculation is not None and not (
            seeing_modes() or self._trees.floor(plan).calls_to_wait
        ):
            names, arguments = self.named_arguments(args, kwargs, plan)
            inserted = compiling.insertions_of_plan(plan)
            guess = self.speculation.guess(names, arguments, inserted)
            if guess.recording is not None:
                self._trees.uses(plan)
                return self._guessed(guess)
        with gates.applying(plan):
            return self.call(args, kwargs, plan, guess=guess)

    def _guessed(self, guess: SpeculationResult) -> Any:
        self.stats.replays += 1
        self.latest_run = guess.recording
        return guess.output

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: InsertionPlan | None,
        auditor: Auditor | None = None, guess: SpeculationResult | None = None,
    ) -> Any:  # fmt: skip
        """Serve a call.

        The questions stand in this order: whether a mode around the call sees the model, since then
        nothing known may serve it; whether the model is to run itself, since that has to cost
        nothing more; whether what is inserted can be written into plain code; whether a compiled
        path serves it; which program does. Without a program, modules that are lazy have to be
        called first, and a call that would be live does not have to be recorded. With one, the
        reasons to run live come before the replay, which cannot be taken back. The guess is the
        result of trying it on a compiled path, if that was done.
        """
        if function_modes() and (modes := seeing_modes()):
            self.passing[_reason_of_mode(modes[-1])] = None
            return self._under_modes(args, kwargs, plan)
        floor = self.floor
        if plan is not None:
            floor = plan.floor or self._trees.floor(plan)
            if floor.calls_to_wait and floor.take_call():
                self.stats.live += 1
                if (runner := self._runner_of(plan)) is not None:
                    return runner.call(args, kwargs, self.latest_run)
                names, arguments = self.named_arguments(args, kwargs, plan)
                tree = self._trees.of(plan)
                # Names that no run has shown yet are looked up in this one.
                return self._traced(
                    _DispatchedCall(args, kwargs, names, arguments, plan, tree)
                ).result
        is_seen = plan is not None and plan.sees_inputs
        names, arguments = self._signature.named_arguments(args, kwargs, is_seen)
        if plan is not None and (found := self._splicer(plan, names, arguments)) is not None:
            splicer, plain_program = found
            if plain_program is None and self._signature.notice_changes():
                return self.call(args, kwargs, plan, auditor)
            try:
                return self._spliced(args, kwargs, names, arguments, plan, splicer, plain_program)
            except Unfit:
                splicer.is_apart = True
            tree = self._trees.of(plan)
            with gates.again():
                return self._record_new(_DispatchedCall(args, kwargs, names, arguments, plan, tree))
        tree = self._trees.plain if plan is None else self._trees.of(plan)
        if self.speculation is not None and guess is None and auditor is None:
            inserted = None if plan is None else compiling.insertions_of_plan(plan)
            guess = self.speculation.guess(names, arguments, inserted)
            if guess.recording is not None:
                if plan is None:
                    self.floor.replays += 1
                return self._guessed(guess)
        program = tree.find(names, arguments)
        if program is not None and program.ignored:
            if tree.settles(names, program, arguments, floor.has_waited):
                program = None
        if program is None:
            if self._signature.notice_changes():
                return self.call(args, kwargs, plan, auditor)
            return self._call_unknown(
                _DispatchedCall(args, kwargs, names, arguments, plan, tree), floor
            )
        if program.live_only:
            if tree.looks_again(program):
                floor.count_path()
                call = _DispatchedCall(args, kwargs, names, arguments, plan, tree)
                return self._look_again(call, program)
            tree.ran_live(program)
            floor.count_live()
            return self._run_live(
                _DispatchedCall(args, kwargs, names, arguments, plan, tree), program
            )
        if plan is not None and plan.looks_at_changes(
            program.recordings(), state_access.read_and_changed
        ):
            floor.count_live()
            return self._run_live(
                _DispatchedCall(args, kwargs, names, arguments, plan, tree), program
            )
        if program.wants_lifting and tree.lifts:
            return self._record_lifted(
                _DispatchedCall(args, kwargs, names, arguments, plan, tree), program
            )
        auditor = auditor or self._auditor
        audit = None
        if auditor is not None and plan is None:
            audit = auditor.begin(program.recording, args, kwargs)
        result = tree.replay(names, program, arguments, guess is not None and guess.may_compile)
        if isinstance(result, FinishedReplay):
            self.stats.replays += 1
            self.latest_run = recording = result.stretch.recording
            if audit is not None:
                audit.compare(recording, result.output)
            if plan is not None:
                plan.ran(recording)
            floor.replays += 1
            if guess is not None and self.speculation is not None:
                self.speculation.replayed(guess, names, program, result, arguments)
            return result.output
        return self._resume(
            _DispatchedCall(args, kwargs, names, arguments, plan, tree), program, result
        )

    def _call_unknown(self, call: _DispatchedCall, floor: Floor) -> Any:
        """Serve a call that no known program fits."""
        args, kwargs, names, arguments, plan, *_ = call
        if has_lazy_modules(self._model):
            if plan is not None:
                raise errors.InputError(
                    "the model has lazy modules, whose parameters the first call makes: call it "
                    "once before anything is inserted"
                )
            return self._initialize(args, kwargs)
        if plan is not None:
            plain = self._trees.plain.find(names, arguments)  # on which insertions go live, too
            if plain is not None and plain.live_only and not self._trees.plain.looks_again(plain):
                if (runner := self._runner_of(plan)) is not None:
                    self._trees.plain.ran_live(plain)
                    floor.count_live()
                    self.stats.live += 1
                    return runner.call(args, kwargs, plain.recording)
        floor.count_path()
        try:
            return self._record_new(call)
        except errors.Uninitialized as error:  # of modules that are not registered in the model
            if plan is not None or error.function is not self._model:
                raise
        return self._initialize(args, kwargs)

    def _splicer(
        self, plan: InsertionPlan, names: tuple[str, ...], arguments: tuple[Any, ...]
    ) -> tuple[Splicer, Program | None] | None:
        """Return the splicer of insertions, and the paths that it uses; None if there is none."""
        if self.speculation is not None or not plan.can_be_spliced or has_other_ranks():
            return None
        if plan.lookup is not None:
            return None
        splicer = self._trees.splicer(plan, self._knowledge)
        if splicer.is_apart:
            return None
        program = self._trees.plain.find(names, arguments)
        if program is None:
            # Among all nodes that a selector finds, one that cannot be spliced is likely.
            waits = not plan.names_places or self._trees.has_paths(plan)
            return None if waits or has_lazy_modules(self._model) else (splicer, None)
        if program.live_only or program.ignored:
            return None
        graph = program.graph
        if graph is None or graph.is_broken or program.recording.environment.watches_caches:
            return None
        if plan.looks_at_changes(program.recordings(), state_access.read_and_changed):
            return None
        splicer.goes_along(graph)
        return splicer, program

    def tree_for(
        self, plan: InsertionPlan | None, names: tuple[str, ...], arguments: tuple[Any, ...]
    ) -> TraceTree:
        """Return the paths along which a call would be served."""
        if plan is not None and self._splicer(plan, names, arguments) is not None:
            return self._trees.plain
        return self._trees.of(plan)

    def _spliced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...],
        arguments: tuple[Any, ...], plan: InsertionPlan, splicer: Splicer, program: Program | None,
    ) -> Any:  # fmt: skip
        """Serve a call with insertions along the paths without them."""
        tree, divergence = self._trees.plain, None
        gates.attempt().receives(args, kwargs)
        if program is not None and not (program.wants_lifting and tree.lifts):
            result = tree.replay(names, program, arguments, splicer=splicer)
            if isinstance(result, FinishedReplay):
                splicer.calls += 1
                self.stats.replays += 1
                self.latest_run = recording = result.stretch.recording
                plan.ran(recording)
                self._floor_of(plan).replays += 1
                return result.output
            divergence = result
        call = _DispatchedCall(args, kwargs, names, arguments, plan, tree, splicer)
        if program is None:
            self._floor_of(plan).count_path()
            return self._record_new(call)
        if divergence is None:
            return self._record_lifted(call, program)
        with nullcontext() if divergence.computed is not None else gates.again():
            return self._resume(call, program, divergence)

    def _floor_of(self, plan: InsertionPlan | None) -> Floor:
        return self.floor if plan is None else plan.floor or self._trees.floor(plan)

    def _initialize(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model itself, which makes the parameters of lazy modules."""
        self.stats.live += 1
        with self.calls:
            return call_itself(self._model, args, kwargs)

    # By the model's own Python, without the tracer where that is possible

    def _run_live(self, call: _DispatchedCall, program: Program) -> Any:
        self.stats.live += 1
        if call.plan is None:
            with self.calls:
                return call_itself(self._model, call.args, call.kwargs)
        runner = self._runner_of(call.plan)
        if runner is None:
            return self._recorded(call).result
        return runner.call(call.args, call.kwargs, program.recording)

    def _under_modes(self, args: Any, kwargs: dict[str, Any], plan: InsertionPlan | None) -> Any:
        """Serve a call under function modes, which see exactly the model's calls."""
        self.stats.live += 1
        if plan is None:
            with self.calls:
                return call_itself(self._model, args, kwargs)
        runner = self._runner_of(plan)
        if runner is not None:
            return runner.call(args, kwargs, self.latest_run)
        names, arguments = self.named_arguments(args, kwargs, plan)
        recording = self._recorded(
            _DispatchedCall(args, kwargs, names, arguments, plan, self._trees.of(plan))
        )
        output, recording.result = recording.result, None
        return output

    def _runner_of(self, plan: InsertionPlan) -> LiveRunner | None:
        """Return an object that calls insertions without the tracer; None if that is impossible."""
        if self._has_blocks and torch.is_grad_enabled():
            return None  # what is inserted in a checkpointed block has to be done again with it
        cached, traces = self._latest_runner, self.stats.traces
        if cached is None or cached[0] is not plan or (cached[1] is None and cached[2] < traces):
            cached = self._latest_runner = (
                plan,
                live_runner.runner_of(self._knowledge(), plan),
                traces,
            )
        return cached[1]

    def named_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: InsertionPlan | None
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return the names of the arguments of a call, and the arguments."""
        return self._signature.named_arguments(args, kwargs, plan is not None and plan.sees_inputs)

    def forget_insertions(self) -> None:
        """Keep nothing of the insertions of earlier calls."""
        self._latest_runner = None

    def trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: InsertionPlan | None
    ) -> Any:
        """Run the model under the tracer, keep the path, and return the output."""
        self._signature.notice_changes()
        names, arguments = self.named_arguments(args, kwargs, plan)
        call = _DispatchedCall(args, kwargs, names, arguments, plan, self._trees.of(plan))
        with nullcontext() if plan is None else gates.applying(plan):
            return self._record_new(call)

    def explanation_of(
        self, tree: TraceTree, names: tuple[str, ...], arguments: tuple[Any, ...]
    ) -> explain.Explanation:
        """Say which programs of a tree could serve some arguments."""
        matching, nearest = self._matching_traces(tree, names, arguments, None)
        return explain.Explanation(tuple(matching), None if nearest is None else nearest())

    def _matching_traces(
        self, tree: TraceTree, names: tuple[str, ...], arguments: tuple[Any, ...],
        most: int | None,
    ) -> tuple[list[Trace], Callable[[], Mismatch] | None]:  # fmt: skip
        """Return the traces that could serve, or what says what fails in the nearest one."""
        matching: list[Trace] = []
        nearest: tuple[int, Callable[[], Mismatch]] | None = None
        for program in itertools.islice(tree.programs(names), most):
            failed = program.failing(arguments)
            if failed is None:
                matching += [self.trace_of(r, program) for r in program.recordings()]
                continue
            depth = program.checks.index(failed) if failed in program.checks else -1
            if nearest is None or depth > nearest[0]:
                nearest = depth, explain.explain_check(failed, program, arguments)
        return matching, None if matching or nearest is None else nearest[1]

    def trace_of(self, recording: Recording, program: Program) -> Trace:
        """Return a run as people see it."""
        return self._build_trace(*_parts_of_trace(recording, program))

    @property
    def registry(self) -> Registry:
        """The names of the model's nodes."""
        with self._lock:
            if self._registry is None:
                self._registry = nodes.Registry()
            return self._registry

    @property
    def latest(self) -> Trace | None:
        """The latest recorded run."""
        if isinstance(self._latest, tuple):
            self._latest = self._build_trace(*self._latest)
        return self._latest

    def _build_trace(
        self, recording: Recording, global_state: GlobalState, program: Program | None
    ) -> Trace:
        return _trace.Trace(
            recording, global_state, self._signature, self._model, program, registry=self.registry
        )

    # By the model's own Python, under the tracer

    def _record_new(self, call: _DispatchedCall) -> Any:
        global_state = GlobalState.current()
        call.tree.compare_numbers(call.names, call.arguments)
        evolving = call.tree.outdated(call.names, call.arguments)
        _, mismatch = self._matching_traces(call.tree, call.names, call.arguments, _NEAR)
        recording = self._traced(call, lifting=call.tree.lifting())
        is_mixed = False
        if (splicer := call.splicer) is not None and call.plan is not None:
            looks = call.plan.looks_at_changes([recording], state_access.read_and_changed)
            if looks or splicing.has_gates(recording):
                call = call._replace(tree=self._trees.of(call.plan), splicer=None)
            is_mixed = splicer.is_apart and bool(recording.tape.blockers) and not looks
        elif call.plan is not None and call.plan.has_grown:
            names, _ = self.named_arguments(call.args, call.kwargs, call.plan)
            call = call._replace(names=names, tree=self._trees.of(call.plan))
        if is_mixed or self._passes(call, recording):
            self.stats.live += 1
            output, recording.result = recording.result, None
            self._latest = recording, global_state, None
            return output
        program = call.tree.add(call.names, recording, global_state, evolving)
        self.stats.retraces += self.stats.traces > 0
        self.stats.traces += 1
        self._mismatch = mismatch
        if program.live_only:
            self.stats.live += 1
            self._floor_of(call.plan).count_vain()
        return self._remember(recording, program)

    def _passes(self, call: _DispatchedCall, recording: Recording) -> bool:
        """Return whether a run could not be repeated, although later ones may; note why."""
        is_misused = bool(
            recording.environment.misused_containers()
        )  # the next run guards the content
        if not is_misused and (not recording.is_transient or self._passing >= _PASSING):
            return False
        self._passing += not is_misused
        call.tree.note_caches(recording.environment)
        reasons = recording.tape.blockers or ["the run leaves something that later runs find"]
        self.passing.update(dict.fromkeys(reasons))
        return True

    def _look_again(self, call: _DispatchedCall, live: Program) -> Any:
        """Record a call whose like could only be run live: it may go another way."""
        global_state = GlobalState.current()
        recording = self._traced(call, lifting=call.tree.lifting())
        if recording.tape.blockers or recording.is_transient:
            self.stats.live += 1
            call.tree.ran_live(live)
            return recording.result
        program, leaves = call.tree.replace(call.names, live, recording, global_state)
        self.stats.retraces += 1
        self.stats.traces += 1
        self._mismatch = None
        if leaves is not None:
            before, now = live.recording, recording.tape.guards[leaves[0]].answer
            self._mismatch = functools.partial(explain.explain_guard, before, leaves[0], now)
        return self._remember(recording, program)

    def _record_lifted(self, call: _DispatchedCall, program: Program) -> Any:
        """Record a call whose path may be known, with the counters of its loops lifted."""
        lifting = program.lifting(counters=True, lists=call.tree.is_plain)
        assert lifting is not None
        recording = self._traced(call, lifting=lifting)
        if call.splicer is not None and call.splicer.is_apart:
            self.stats.live += 1
            return recording.result
        self.stats.retraces += 1
        self.stats.traces += 1
        self.stats.live += bool(recording.tape.blockers)
        call.tree.lift(program, recording, lifting)
        return self._remember(recording, program)

    def _traced(
        self,
        call: _DispatchedCall,
        divergence: Divergence | None = None,
        script: Script | None = None,
        lifting: Lifting | None = None,
    ) -> Recording:
        """Record a call, from its start or after a divergence, and note it if the model raises."""
        reads_states = divergence is not None or (lifting is not None and lifting.counts)
        try:
            recording = self._recorded(call, script, reads_states, lifting)
        except Exception as error:
            call.tree.failed(error, divergence)
            raise
        if call.plan is not None and call.plan.lookup is not None:
            call.plan.lookup.settle(recording)
        self.examples.add(call.args, call.kwargs)
        return recording

    def _recorded(
        self,
        call: _DispatchedCall,
        script: Script | None = None,
        reads_states: bool = False,
        lifting: Lifting | None = None,
    ) -> Recording:
        """Run the model under the tracer, with its insertions."""
        with self.calls:
            if call.plan is None:
                recording = record(
                    self._model, call.args, dict(call.kwargs), self._signature, script,
                    reads_states=reads_states, lifting=lifting,
                )  # fmt: skip
            else:
                recording = splicing.record_with_insertions(
                    self._knowledge(), self._signature, call.args, dict(call.kwargs), call.plan,
                    script, reads_states, lifting, call.splicer,
                )  # fmt: skip
        self._has_blocks = self._has_blocks or bool(recording.tape.blocks)
        call.tree.exclude(recording.environment.misused_containers())
        return recording

    @property
    def last_mismatch(self) -> Mismatch | None:
        """Why the latest call that was not a replay was not one."""
        if callable(self._mismatch):
            self._mismatch = self._mismatch()
        return self._mismatch

    def _remember(self, recording: Recording, program: Program) -> Any:
        """Remember a run as the latest, but not its output, which is only the caller's."""
        output, recording.result = recording.result, None
        self.latest_run = recording
        self._latest = _parts_of_trace(recording, program)
        return output

    def _resume(self, call: _DispatchedCall, program: Program, divergence: Divergence) -> Any:
        was_live = divergence.continues_live
        stays_live = was_live and not call.tree.looks_again_after(divergence)
        if stays_live and call.plan is None and not divergence.has_acted:
            self.stats.live += 1
            self.floor.count_live()
            call.tree.ran_live(program, divergence)
            divergence.drop()
            with self.calls:
                return call_itself(self._model, call.args, dict(call.kwargs))
        self._floor_of(call.plan).count_path()
        # Not the divergence itself, which holds the values of the replay.
        stopped = divergence.recording, divergence.number, divergence.outcome
        script, lifting = divergence.script(), program.lifting()
        if script is not None:
            script.cached = [one for _, one in program.recording.environment.read_caches]
        try:
            recording = self._traced(call, divergence, script, lifting)
        finally:
            divergence.release(script)
        self.stats.retraces += 1
        self.stats.resumes += 1
        self._mismatch = lambda: explain.explain_divergence(*stopped)
        is_mixed = call.splicer is not None and call.splicer.is_apart
        is_mixed = is_mixed or (call.plan is not None and call.plan.has_grown)
        is_live = stays_live or (was_live and bool(recording.tape.blockers))
        if self._passes(call, recording) or is_live or is_mixed:
            self.stats.live += 1
            call.tree.ran_live(program, divergence)
            return recording.result
        self.stats.traces += 1
        if recording.tape.blockers:
            self.stats.live += 1
            self._floor_of(call.plan).count_vain()
        call.tree.grow(program, recording, divergence)
        return self._remember(recording, program)


def _reason_of_mode(mode: Any) -> str:
    code = getattr(type(mode).__torch_function__, "__code__", None)
    place = f" at {full_place_text(code.co_filename, code.co_firstlineno)}" if code else ""
    return f"{type(mode).__qualname__}{place}, a function mode around the call, sees the model"


class _DispatchedCall(NamedTuple):
    """One call: its inputs, the insertions, and the known paths with these.

    With a splicer, these are the paths without what is inserted.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    plan: InsertionPlan | None
    tree: TraceTree
    splicer: Splicer | None = None


# Of so many programs, the latest, the one that came nearest is said when a new path is recorded.
_NEAR = 16
# After this many runs that filled a cache, a cache is taken to be filled by every call.
_PASSING = 4


# How calls were served, and how others would be.


@dataclass
class Stats:
    """Counts of how the calls of a `BendedModule` were served.

    Attributes:
        traces: paths recorded.
        replays: calls served from recorded paths alone.
        retraces: calls that led down a path not recorded before, after the first trace.
        resumes: those of them that took over what a replay had computed already.
        live: calls for which the model's own Python ran because no guard could watch it.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
        >>> for value in (1.0, 2.0, -1.0, -2.0):
        ...     _ = bended(torch.tensor([value]))
        >>> bended.stats
        Stats(traces=2, replays=2, retraces=1, resumes=1, live=0)
    """

    traces: int = 0
    replays: int = 0
    retraces: int = 0
    resumes: int = 0
    live: int = 0


def _parts_of_trace(
    recording: Recording, program: Program
) -> tuple[Recording, GlobalState, Program | None]:
    own = program if recording is program.recording else None
    return recording, program.global_state, own


# The trace trees of one model: one for each set of insertion locations.


_MOST = 64  # sets of places that paths are kept for


class Trees:
    """The paths without insertions, and those with insertions at some locations.

    The inserted objects are not part of a path: another patch at the same node uses the same paths.
    If there are too many sets of locations, the paths of the least recently used sets are
    forgotten.
    """

    plain: TraceTree  # the paths without insertions

    def __init__(self, limit: int | None) -> None:
        self.limit: int | None = limit
        self.plain = self._new(is_plain=True)
        self._latest: Hashable = None  # the key of the insertions of the latest call
        self._inserted: OrderedDict[Hashable, TraceTree] = OrderedDict()
        self._splicers: OrderedDict[Hashable, Splicer] = OrderedDict()
        self._floors: OrderedDict[Hashable, Floor] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, plan: InsertionPlan | None) -> TraceTree:
        """Return the tree for some insertions."""
        if plan is None:
            return self.plain
        tree = self._used(self._inserted, plan.key, lambda: self._new(plan.joins))
        self._latest = plan.key
        return tree

    def uses(self, plan: InsertionPlan) -> None:
        """Note that a call with some insertions was served without its tree."""
        self._latest = plan.key

    @property
    def latest(self) -> TraceTree:
        """The tree for the insertions of the latest call."""
        return self._inserted.get(self._latest, self.plain)

    def has_paths(self, plan: InsertionPlan) -> bool:
        """Return whether paths with some insertions are known."""
        tree = self._inserted.get(plan.key)
        return tree is not None and next(iter(tree.programs()), None) is not None

    def splicer(self, plan: InsertionPlan, knowledge: Callable[[], Knowledge]) -> Splicer:
        """Return the splicer of some insertions into the paths without any."""
        self._latest = None
        if plan.splicer is None:
            plan.splicer = self._used(
                self._splicers, plan.key, lambda: splicing.Splicer(plan, knowledge(), self._exits)
            )
        splicer: Splicer = plan.splicer
        return splicer.serves(plan)

    def _used(self, table: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
        """Return what a table has for some insertions, made if necessary, as the latest used."""
        with self._lock:
            if key not in table:
                table[key] = make()
            table.move_to_end(key)
            while len(table) > _MOST:
                table.popitem(last=False)
            return table[key]

    def _exits(self) -> Iterator[Exit]:
        """Yield the exits of all paths without insertions."""
        for program in self.plain.programs():
            if program.graph is not None:
                yield from program.graph.exits()

    def floor(self, plan: InsertionPlan) -> Floor:
        """Return which calls with some insertions run the model itself."""
        if plan.floor is None:
            plan.floor = self._used(self._floors, plan.key, Floor)
        return plan.floor

    def floors(self) -> list[Floor]:
        """Return which calls run the model itself, for each set of locations."""
        return list(self._floors.values())

    def plain_runs(self) -> list[Recording]:
        """Return the runs without insertions, the latest first."""
        return _recorded_runs(self.plain)

    def inserted_runs(self) -> list[Recording]:
        """Return the runs with insertions."""
        return [run for tree in list(self._inserted.values()) for run in _recorded_runs(tree)]

    def _new(self, joins: bool = True, is_plain: bool = False) -> TraceTree:
        culprit = lambda tree: outlines.most_divergent(tree)  # noqa: E731 - it is loaded late
        return TraceTree(self.limit, culprit, joins, is_plain)


def _recorded_runs(tree: TraceTree) -> list[Recording]:
    return [run for program in tree.programs() for run in program.recordings()]


# Choosing the calls that run the model itself, because following paths would cost more


class Floor:
    """Decides which calls run the model itself, without looking at what is known of it.

    Three kinds of calls cost more than the model. One along a path that is not known is recorded,
    or resumed, and costs some fifty times what the model costs; where such calls go on for ever,
    nothing is gained by them. One that is recorded in vain, since its like has to run live, costs
    as much. One that has to run live costs the model and the check that finds that out. Each kind
    has an account (`_Account`) from which its calls are paid, and to which calls along known paths
    add what they save. While one of them is empty, calls run the model itself, and are tried again
    from time to time.

    A hundred calls along unknown paths are free, and from then on one in two hundred calls; twenty
    may be recorded in vain, and one in twenty later. These waits are long, and double. Sixteen
    calls in a row may be live; the waits are short, and have a greatest length, since the reason
    may be gone any time.
    """

    def __init__(self) -> None:
        self.unknown: int = 0  # calls along unknown paths so far
        # Calls along known paths so far.
        self.replays: int = 0  # a number, since it costs each call something to count it
        self.calls_to_wait: int = 0  # calls until paths are tried again; 0 while they are followed
        self._paid = 0  # for so many of the replays, both accounts were paid
        self._waited: int | None = None  # how many there were at the end of a wait, until a call
        self._paths = _Account(100.0, 0.005, tuple(1 << n for n in range(9, 17)), 2.0, 1)
        self._vain = _Account(20.0, 0.05, tuple(1 << n for n in range(6, 17)), 2.0, 1)
        self._lives = _Account(16.0, 0.25, (2, 4, 8, 16, 30, 31, 32, 29), 1.0, 4)
        self._empty: _Account | None = None

    def take_call(self) -> bool:
        """Take a call from those to wait for; return whether it is for the model itself."""
        if not self.calls_to_wait:
            return False
        self.calls_to_wait -= 1
        if not self.calls_to_wait:
            assert self._empty is not None
            self._earn()
            self._empty.begin_trial()
            self._waited = self.replays
        return True

    @property
    def has_waited(self) -> bool:
        """True during the first call after a wait."""
        return self._waited == self.replays

    def count_path(self) -> None:
        """Count a call that led down an unknown path."""
        self.unknown += 1
        self._pay(self._paths)

    def count_vain(self) -> None:
        """Count a recorded call whose like has to run live."""
        self._pay(self._vain)

    def count_live(self) -> None:
        """Count a call that had to run live."""
        self._pay(self._lives)

    def _pay(self, account: _Account) -> None:
        self._waited = None
        self._earn()
        wait = account.pay()
        if wait > self.calls_to_wait:
            self.calls_to_wait, self._empty = wait, account

    def _earn(self) -> None:
        replays, self._paid = self.replays - self._paid, self.replays
        self._paths.earn(replays)
        self._vain.earn(replays)
        self._lives.earn(replays)

    @property
    def reason(self) -> str | None:
        """Why calls are for the model itself at present, if that is since paths do not repeat."""
        if not self.calls_to_wait or self._empty is not self._paths:
            return None
        return (
            f"the paths of the model do not repeat: {self.unknown} calls led down unknown ones; "
            f"known ones are tried again after {self.calls_to_wait} more calls"
        )


class _Account:
    """Pays for calls that cost more than the model.

    It holds `free` at first and at most; a call along a known path adds `earned`. When it is empty,
    none is made for some calls, each time for the next number of `waits`, of which the `last` ones
    are repeated. After a wait it holds `trial`.
    """

    def __init__(
        self, free: float, earned: float, waits: tuple[int, ...], trial: float, last: int
    ) -> None:
        self._free = self._left = free
        self._earned = earned
        self._waits = waits
        self._trial = trial
        self._last = last
        self._next = 0

    def begin_trial(self) -> None:
        """Begin to pay again after a wait."""
        self._left = self._trial

    def earn(self, calls: int) -> None:
        """Add what calls along known paths save."""
        self._left = min(self._left + calls * self._earned, self._free)
        if self._left > self._trial + 1:  # the waits before count no more
            self._next = 0

    def pay(self) -> int:
        """Pay for a call; return for how many calls none is made now, 0 while something is left."""
        self._left -= 1
        if self._left > 0:
            return 0
        wait = self._waits[self._next]
        self._next += 1
        if self._next == len(self._waits):
            self._next -= self._last
        return wait
