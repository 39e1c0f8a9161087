"""Runs the rest of a model from given activations."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.engine.check import CheckWriter
from bendtrace.engine.explain import explain_check, explain_divergence
from bendtrace.engine.guard_kinds import Analysis
from bendtrace.engine.program import Program, departure_by, values_in
from bendtrace.engine.schedule import may_be_caught
from bendtrace.engine.source import Code, Departure, gives_nothing
from bendtrace.engine.suffix import (
    Cut,
    MissingArgument,
    Suffix,
    SuffixCode,
    argument_of,
    write_rest,
)
from bendtrace.engine.tree import TraceTree
from bendtrace.errors import (
    BendtraceError,
    DivergenceError,
    InputError,
    NodePathError,
    NondeterminismError,
    NotReplayableError,
)
from bendtrace.insert.gates import applying
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import assemble, take_apart
from bendtrace.insert.plan import InsertionPlan
from bendtrace.insert.resolver import (
    ReplacementPoint,
    by_path,
    is_named,
    node_of_name,
    path_in,
    spots_of,
    text_of_place,
    values_for,
)
from bendtrace.insert.splicer import record_with_insertions
from bendtrace.insert.state_access import read_and_changed
from bendtrace.log.capture import aligned_copy
from bendtrace.log.path_views import Node, Tree, find_node
from bendtrace.python.checks import required_arguments
from bendtrace.python.sites import place_text
from bendtrace.record.recorder import Recording
from bendtrace.record.script import Script, Section
from bendtrace.tape.captured import Access, Captured, identical
from bendtrace.tape.contexts import Hold
from bendtrace.tape.tape import AfterOp, Guard, OpKind, Stop, TensorMeta, refs_in
from bendtrace.watch.draws import RandomStates
from bendtrace.watch.functions import is_gate
from bendtrace.watch.rank_sync import ENDS, joint_call, needs_agreement

if TYPE_CHECKING:
    from bendtrace.module import BendedModule


@dataclass(eq=False)
class Deviation:
    """A rest that has left the path of the run that it followed."""

    run: RecordedRun  # the recorded run
    prepared: PreparedSuffix  # the rest
    number: Stop  # the guard of the run that did not hold, or the op that raised, or did not
    outcome: Any  # what was found instead
    values: dict[str, Any]  # the variables of the code so far
    slots: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """The first op that was not carried out."""
        tape, start = self.prepared.recording.tape, self.prepared.rest.start
        if not isinstance(self.number, AfterOp):
            return max(tape.guards[self.number].position, start)
        op = tape.ops[self.number.index]
        # Arithmetic that raises leaves no op, a torch function that raises does.
        return op.index + (op.kind is OpKind.CALL)

    @property
    def finished_ops(self) -> frozenset[int]:
        """The ops that were carried out."""
        rest, code, position = self.prepared.rest, self.prepared.code, self.position
        assert code is not None
        return rest.available | {i for i in code.code.emitted if i < position}

    @property
    def tests(self) -> set[Any]:
        """The tests that the rest has made."""
        rest = self.prepared.rest
        return {guard.key for n, guard in rest.guards.items() if self._is_before(n, guard)}

    def _is_before(self, number: int, guard: Guard) -> bool:
        """Return whether the run tested a guard before it was left, or failed at it."""
        guards, start = self.prepared.recording.tape.guards, self.prepared.rest.start
        when = max(guard.position, start)
        if isinstance(self.number, AfterOp):
            return when <= self.number.index
        return (when, number) <= (max(guards[self.number].position, start), self.number)

    def other_run(self) -> Recording | None:
        """Return a run that did the same so far, and then went the other way, if one is known."""
        number, recording = self.number, self.prepared.recording
        guards = recording.tape.guards
        if isinstance(number, AfterOp):
            return None
        for other in self.run.program.recordings():
            its = other.tape.guards
            if len(its) <= number or not identical(its[number].answer, self.outcome):
                continue
            pairs = enumerate(zip(its[: number + 1], guards, strict=False))
            if all(
                one.asks_like(mine)
                and (one.position, one.index) == (mine.position, mine.index)
                and (n == number or identical(one.answer, mine.answer))
                for n, (one, mine) in pairs
            ):
                return other
        return None

    def has_effects(self, random: RandomStates | None) -> bool:
        """Return whether anything besides the values of the run has been changed, or may have been.

        If it may draw, the states of the random generators at its start are given.
        """
        has_drawn = random is None or random.differ()
        return has_drawn or self.prepared.rest.memory.has_effects(self.finished_ops)

    @property
    def can_be_resumed(self) -> bool:
        """Return whether the model's Python can take over, and find the given values in its way."""
        tape, position = self.prepared.recording.tape, self.position
        ops = tape.ops
        if tape.position_of(self.number) < position and not isinstance(self.number, AfterOp):
            return False
        for spots in self.prepared.spots.values():
            for spot in spots:
                op = ops[spot.index]
                between = ops[spot.index + 1 : spot.start]
                if (
                    spot.start > position
                    or op.kind is not OpKind.CALL
                    or not isinstance(op.meta, TensorMeta)
                    or any(
                        ref.index == spot.index and not is_gate(other)
                        for other in between
                        for ref in refs_in((other.args, other.kwargs))
                    )
                ):
                    return False
        return not self.prepared.rest.disturbs(self.finished_ops, position)

    def script(self, hold: Hold) -> Script:
        """Return the ops that the model's Python need not run again."""
        tape, done = self.prepared.recording.tape, self.finished_ops
        computed = {i: value for i, value in values_in(self.values).items() if i in done}
        computed.update((i, None) for i in done if gives_nothing(tape.ops[i]))
        computed.update((cut.index, self.slots[f"s{cut.slot}"]) for cut in self.prepared.cuts)
        section = Section(tape, -1, self.number)
        return Script([section], self.outcome, computed, None, hold, is_exact=True)

    def agrees_with(self, recording: Recording) -> bool:
        """Return whether all decisions so far agree, so that a run belongs to the program."""
        before = {
            (guard.position, guard.key): guard.answer
            for guard in self.prepared.recording.tape.guards
            if guard.position < self.position
        }
        return all(
            identical(guard.answer, before.get((guard.position, guard.key), guard.answer))
            for guard in recording.tape.guards
            if guard.position < self.position
        )


def from_activations(
    model: BendedModule,
    activations: Mapping[Any, Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    bended: bool = True,
) -> Any:
    """Run the rest of a model from given activations (see `BendedModule.from_activations`).

    Operations that only lead to the given values are not run: batch norms among them do not update
    their buffers, and dropouts draw no random numbers.
    """
    if not isinstance(activations, Mapping):
        raise InputError(f"activations have to be a dict by node path, not {activations!r}")
    args, kwargs = required_arguments(args, kwargs)
    given = by_path(model, activations)
    if not given:
        raise InputError("no activations are given")
    try:
        return _SuffixRun(model, given, args, kwargs, bended).output()
    except (RuntimeError, TypeError, ValueError) as error:
        if not isinstance(error, BendtraceError):
            shapes = ", ".join(
                f"{path!r} of shape {tuple(value.shape)}"
                for path, value in given.items()
                if isinstance(value, Tensor)
            )
            error.add_note(f"the activations that were passed: {shapes}")
        raise


def parse_replacements(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Mapping[Any, Any], tuple[Any, ...], dict[str, Any]]:
    """Parse `from_activations({path: value}, *args, **kwargs)`, or torchbend's form of it.

    In that form the names come first, and the values are among the model's keyword arguments.
    Return the activations, and the model's positional and keyword arguments.

    Raises:
        InputError: the arguments have neither form.

    Example:
        >>> parse_replacements(({"relu": 1}, 2), {"mask": 3})
        ({'relu': 1}, (2,), {'mask': 3})
        >>> parse_replacements(("relu",), {"relu": 1, "mask": 3})
        ({'relu': 1}, (), {'mask': 3})
    """
    if args and isinstance(args[0], Mapping):
        return args[0], args[1:], dict(kwargs)
    if not args or not all(isinstance(name, (str, Node)) for name in args):
        raise InputError(
            "from_activations takes a dict of activations by path, followed by the model's "
            "arguments; or only the names of activations, with all values as keyword "
            "arguments"
        )
    names = list(map(text_of_place, args))
    absent = [name for name in names if name not in kwargs]
    if absent:
        raise InputError(f"no value is given for {', '.join(map(repr, absent))}")
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return {name: kwargs[name] for name in names}, (), rest


class _SuffixRun:
    def __init__(
        self,
        model: BendedModule,
        given: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bended: bool,
    ) -> None:
        self._model = model
        self._given = given
        self._args = args
        self._kwargs = kwargs
        self._bended = bended
        self._bound = model._signature.bind(args, kwargs)
        self._rests = Suffixes(model, given, bended)
        self._is_whole = False  # whether the model can be called with these arguments

    def output(self) -> Any:
        """Run the rest, and return the output of the model."""
        plan = self._plan()
        tree: TraceTree = self._model._trees.of(plan)
        with nullcontext() if plan is None else applying(plan):
            chosen = self._chosen(tree, plan)
            if chosen is not None:
                run, prepared = chosen
                self._require_possible(prepared)
                if plan is not None and plan.looks_at_changes(
                    run.program.recordings(), read_and_changed
                ):
                    if not self._is_whole:
                        raise InputError(
                            "an insertion may read what the rest changes, and a recorded run "
                            "changes that at its end: pass the model's arguments as well"
                        )
                elif prepared.code is not None:
                    hold = Hold()
                    try:
                        return self._follow_paths(run, prepared, hold, tree, plan)
                    finally:
                        hold.release()
        return self._live()

    def _plan(self) -> InsertionPlan | None:
        registry = self._model._insertion_registry
        if not self._bound:
            for insertion in registry.insertions:
                if insertion.passes.needs_total or not insertion.is_checked or any(
                    target.is_ahead or target.is_open for target in insertion.targets
                ):  # fmt: skip
                    raise InputError(
                        f"the location of {insertion!r} depends on the inputs of the model: "
                        "pass the model's arguments as well"
                    )
        plan: InsertionPlan | None = registry.plan(self._args, self._kwargs)
        return plan

    def _chosen(
        self, tree: TraceTree, plan: InsertionPlan | None
    ) -> tuple[RecordedRun, PreparedSuffix] | None:
        """Return the run with the required rest; None if the model's own Python has to decide."""
        plain = self._model._trees.plain
        if tree is not plain and not any(tree.programs()):
            self._require_whole(plain)
        runs = RecordedRuns(self._model, tree, self._bound, self._form(plan))
        self._is_whole = runs.is_whole
        error: Exception | None = None
        for run in runs:
            try:
                prepared = self._rests.of(run)
                self._rests.values_for(prepared)
            except (NodePathError, InputError) as raised:
                error = error or raised
            else:
                return run, prepared
        if not self._is_whole:
            assert error is not None
            raise error
        return None  # there may be another path

    def _form(self, plan: InsertionPlan | None) -> tuple[str, ...]:
        is_seen = plan is not None and plan.sees_inputs
        form: tuple[str, ...] = self._model._signature.form(self._args, self._kwargs, is_seen)
        return form

    def _require_whole(self, plain: TraceTree) -> None:
        """Raise for arguments that are too few to call the model, where it has to be called."""
        if not RecordedRuns(self._model, plain, self._bound, self._form(None)).is_whole:
            raise InputError(
                "nothing has been traced yet with the current insertions, which calls of the "
                "module splice into the paths that are known without them: call its trace() "
                "first, or pass all arguments of the model"
            )

    def _require_possible(self, prepared: PreparedSuffix) -> None:
        rest = prepared.rest
        if rest.unclear and not self._is_whole:
            raise InputError(
                f"{', '.join(map(repr, self._given))}: {rest.unclear}; give the node that "
                "computes the tensor, or the model's arguments as well"
            )
        if rest.lacks:
            raise InputError(self._rests.explained(prepared, rest.lacks[0]))
        if not (rest.used or rest.unclear or self._is_whole):
            raise InputError(
                "no output or change of the model depends on " + ", ".join(map(repr, self._given))
            )

    # Carrying it out

    def _follow_paths(
        self,
        run: RecordedRun,
        prepared: PreparedSuffix,
        hold: Hold,
        tree: TraceTree,
        plan: InsertionPlan | None,
    ) -> Any:
        """Follow known paths as far as possible, and continue from there."""
        slots = self._rests.values_for(prepared)
        values = dict(slots)
        random = None if prepared.rest.is_straight else RandomStates()
        tests_before: set[Any] = set()
        seen: set[tuple[int, int]] = set()
        while True:
            left = self._carry_out(run, prepared, dict(values), hold)
            if not isinstance(left, Deviation):
                if plan is not None:
                    plan.ran(prepared.recording)
                return left
            tests_before |= left.tests
            other_run, following = left.other_run(), None
            if other_run is not None and (id(other_run), left.position) not in seen:
                seen.add((id(other_run), left.position))
                other = RecordedRun(run.program, other_run, run.arguments, run.missing)
                following = self._following(
                    other, left.position, left.finished_ops, frozenset(tests_before)
                )
            if following is None:
                left.slots = slots
                return self._explore(left, random, hold, tree, plan)
            slots = {**self._rests.values_for(following), **slots}
            run, prepared, values = other, following, {**slots, **left.values}

    def _carry_out(
        self, run: RecordedRun, prepared: PreparedSuffix, values: dict[str, Any], hold: Hold
    ) -> Any:
        """Run a rest; return its result, or a `Deviation` if it follows another path."""
        model, tape = run.program.recording.environment.function, prepared.recording.tape
        if not needs_agreement(model, run.program.recording.tape):
            return self._result(run, prepared, values, hold)
        with joint_call(model, goes_on=True) as joint:
            if joint is not None:
                joint.follows(tape)
            result = self._result(run, prepared, values, hold)
            if joint is not None and isinstance(result, Deviation):
                joint.leaves(result)
            elif joint is not None:
                joint.ends(result)
            return result

    @staticmethod
    def _result(
        run: RecordedRun, prepared: PreparedSuffix, values: dict[str, Any], hold: Hold
    ) -> Any:
        rest = prepared.code
        assert rest is not None
        if rest.casts:
            hold.take()
        try:
            result = rest.code.function(run.arguments, values)
        except Exception as error:
            result = departure_by(error, prepared.recording, rest.code)
            ops = prepared.recording.tape.ops
            if result is None:
                raise
            assert isinstance(result.stop, AfterOp)
            if not may_be_caught(ops[result.stop.index], prepared.recording):
                raise
        if type(result) is not Departure:
            return result
        outcome = copy.deepcopy(result.outcome) if type(result.outcome) is list else result.outcome
        return Deviation(run, prepared, result.stop, outcome, {**values, **result.values})

    def _following(
        self, run: RecordedRun, start: int, done: frozenset[int], tests_before: frozenset[Any]
    ) -> PreparedSuffix | None:
        """Return the rest of another known run, from where both diverge; None if it is too late."""
        try:
            prepared = self._rests.of(run, start, done, tests_before)
            self._rests.values_for(prepared)
        except (NodePathError, InputError):
            return None  # it does not reach the nodes
        if prepared.rest.lacks:
            raise InputError(self._rests.explained(prepared, prepared.rest.lacks[0]))
        return prepared if prepared.code is not None else None

    # Where no recorded run goes

    def _explore(
        self,
        left: Deviation,
        random: RandomStates | None,
        hold: Hold,
        tree: TraceTree,
        plan: InsertionPlan | None,
    ) -> Any:
        """Continue where no recorded run went, or none that can be continued."""
        why = explain_divergence(left.prepared.recording, left.number, left.outcome)
        if left.run.missing:
            raise DivergenceError(
                f"the rest of the model takes a path that no recorded run took: {why.reason}; "
                "pass the model's arguments as well, or call it with such values first",
                why.step,
            )
        has_effects = left.has_effects(random)
        if left.can_be_resumed:
            try:
                return self._resumed(left, hold, tree, plan)
            except NondeterminismError as error:
                if has_effects:
                    raise DivergenceError(
                        f"{why.reason}, and the code before the given activations takes "
                        "another path for these arguments, too. Operations of the rest have "
                        "already been run. Call the module with these arguments first",
                        why.step,
                    ) from error
        hold.release()
        if has_effects:
            raise DivergenceError(
                f"{why.reason}, and the rest cannot continue from here: the operations run so "
                "far have changed something that the skipped code before would see. Give "
                "fewer activations, or call the module itself",
                why.step,
            )
        return self._live()

    def _resumed(
        self, left: Deviation, hold: Hold, tree: TraceTree, plan: InsertionPlan | None
    ) -> Any:
        """Continue with the model's own Python, and keep the path that it takes."""
        model, script = self._model, left.script(hold)
        try:
            recording = record_with_insertions(
                model._knowledge, model._signature, self._args, self._kwargs, plan, script,
                reads_states=True,
            )  # fmt: skip
        finally:
            script.release()
            left.values.clear()
        if plan is not None and plan.lookup is not None:
            plan.lookup.settle(recording)
        model.stats.retraces += 1
        model.stats.resumes += 1
        output, recording.result = recording.result, None
        has_grown = plan is not None and plan.has_grown
        if left.agrees_with(recording) and not (recording.is_transient or has_grown):
            model.stats.traces += 1
            model.stats.live += bool(recording.tape.blockers)
            tree.grow(left.run.program, recording)
        else:
            model.stats.live += 1
        self._require_one_pass(recording)
        return output

    def _require_one_pass(self, recording: Recording) -> None:
        """Raise for a path without a number if the rest has reached its node again."""
        tree = self._rests.tree_of(recording)
        for text in self._given:
            node, chosen = find_node(tree.data, path_in(tree, text))
            if chosen is None and len(node.passes) > 1:
                raise InputError(
                    f"{text!r} has {len(node.passes)} passes for these arguments: name one, as in "
                    f"'{node.path}:1'"
                )

    def _live(self) -> Any:
        """Call the model with the given values instead of its own."""
        return call_with(self._model, self._given, self._args, self._kwargs, bended=self._bended)


ENDS.add(_SuffixRun._carry_out.__code__)


# Calls a model with given values instead of the outputs of some nodes.


def call_with(
    model: Any,
    given: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    bended: bool,
) -> Any:
    """Call a model with given values, by node path, instead of its own.

    With `bended`, they replace those after the insertions at the nodes. Raise `InputError` if the
    model did not reach a node, or reached it several times, or the value of a node cannot be given.
    """
    registry = model._insertion_registry
    others = () if bended else registry.insertions
    made = []
    for text, value in given.items():
        node = node_of_name(model, text)
        where = text if node is None else node
        insertion = registry.make(where, _Replacement(text, value, bended))
        if node is not None:
            _refuse_alias(text, node, insertion)
        made.append(insertion)
    registry.remove(*others)
    registry.add(*made, *others)
    try:
        output = model(*args, **kwargs)
    finally:
        registry.remove(*made)
    for text, insertion in zip(given, made, strict=True):
        report = insertion.report()
        if not report.rows:
            raise InputError(
                f"the model did not reach {text!r}, so the value given for it was not used: "
                + "; ".join(report.notes)
            )
    return output


def _refuse_alias(text: str, node: Node, insertion: Insertion) -> None:
    """Raise for a path that is an alias of another node in another run."""
    for target in insertion.targets:
        place = target.place
        if place is not None and place.shown and not is_named(node._data, place.shown):
            raise InputError(
                f"the value of {text!r} cannot be set: in a known run this is a name of "
                f"{place.shown!r}. Give a value inside of it, or call the model with these "
                "arguments first"
            )


class _Replacement(Interjection):
    """Replaces the output of a node by a value; if `late`, after all other insertions there."""

    _only_outputs = True

    def __init__(self, text: str, value: Any, late: bool) -> None:
        self._text = text
        self._value = value
        self._path: str | None = None
        self.late = late

    @property
    def label(self) -> str:
        return "from_activations"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        if self._path not in (None, at.path):
            raise InputError(
                f"{self._text!r} matches both {self._path!r} and {at.path!r}: name one"
            )
        self._path = at.path
        if at.number and ":" not in self._text:
            raise InputError(
                f"{self._text!r} has several passes in this run: name one, as in '{at.path}:1'"
            )
        return own(self._value)


# Suffixes of recorded runs that start from given activations: computed once, and cached.

_MOST = 64  # things that are kept for each model


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run that may have the required rest."""

    program: Program  # the program that it belongs to
    recording: Recording
    arguments: tuple[Any, ...]  # the arguments of the call, by position; None for missing ones
    missing: frozenset[int] = frozenset()  # positions of the missing ones


@dataclass
class PreparedSuffix:
    """The rest of a recorded run, ready to run."""

    recording: Recording
    spots: dict[str, tuple[ReplacementPoint, ...]]  # where its tape has the value of each node
    cuts: list[Cut]  # the same, by op
    rest: Suffix  # the required ops
    code: SuffixCode | None = None  # the same as code; None if it cannot be run


class Suffixes:
    """The rests of a model's runs after the values of some nodes, which are given by path.

    With `bended`, the values replace those after the insertions at the nodes.
    """

    def __init__(self, model: Any, given: Mapping[str, Any], bended: bool) -> None:
        self._model = model
        self._given = given
        self._bended = bended

    def tree_of(self, recording: Recording) -> Tree:
        """Return the tree of a run."""
        tree: Tree = self._model._knowledge.run(recording).tree
        return tree

    def of(
        self,
        run: RecordedRun,
        start: int = 0,
        available: frozenset[int] = frozenset(),
        tests_before: frozenset[Any] = frozenset(),
    ) -> PreparedSuffix:
        """Return the rest of a run.

        It starts with the first op that has not been run yet; those before it in `available` were
        run. The tests before were made already.

        Raises:
            NodePathError: the run has not reached a node.
            InputError: the value of a node cannot be given.
        """
        key = (
            "rest", id(run.recording), run.missing, tuple(self._given), self._bended, start,
            available, tests_before,
        )  # fmt: skip
        prepared: PreparedSuffix = cached_for_model(
            self._model, key, lambda: self._prepared(run, start, available, tests_before)
        )
        return prepared

    def _prepared(
        self, run: RecordedRun, start: int, available: frozenset[int], tests_before: frozenset[Any]
    ) -> PreparedSuffix:
        program, recording = run.program, run.recording
        tree = self.tree_of(recording)
        for text in self._given:
            self._require_same(tree, text)
        spots = {text: spots_of(recording, tree, text, bended=self._bended) for text in self._given}
        cuts = [
            Cut(spot.index, spot.start, self._slot(text, spot), spot.call)
            for text, listed in spots.items()
            for spot in listed
        ]
        is_first = recording is program.recording
        analysis = program.analysis if is_first else Analysis(recording.tape)
        rest = Suffix(
            recording, analysis, cuts, run.missing, is_checked=is_first and not run.missing,
            start=start, available=available, tests_before=tests_before,
        )  # fmt: skip
        prepared = PreparedSuffix(recording, spots, cuts, rest)
        if not (rest.unclear or rest.lacks or rest.is_too_late()):
            prepared.code = write_rest(rest, analysis, program.global_state.context)
        return prepared

    def _require_same(self, tree: Tree, text: str) -> None:
        """Raise for a path that is an alias here but the path of another node elsewhere."""
        found, _ = find_node(tree.data, path_in(tree, text))
        if is_named(found, text):
            return
        other = node_of_name(self._model, text)
        if other is not None and is_named(other._data, text):
            raise NodePathError(
                f"no node {text!r} in this run: {found.path!r} is a different node",
                text,
                (found.path,),
            )

    def _slot(self, text: str, spot: ReplacementPoint) -> int:
        """Return the number of a given value: the same for all runs of the model."""
        numbers: dict[Any, int] = cached_for_model(self._model, "slots", dict)
        return numbers.setdefault((text, spot.keys), len(numbers))

    def values_for(self, prepared: PreparedSuffix) -> dict[str, Any]:
        """Return the given values in the form that the code of a rest takes.

        Raise `InputError` if one differs in structure from its node's value.
        """
        values: dict[str, Any] = {}
        rest = prepared.rest
        for text, spots in prepared.spots.items():
            dug = values_for(text, self._given[text], spots)
            for spot, value in zip(spots, dug, strict=True):
                slot = self._slot(text, spot)
                # The other path may treat it in any way.
                is_written = slot in rest.written or not rest.is_straight
                values.setdefault(f"s{slot}", own(value) if is_written else value)
        return values

    def explained(self, prepared: PreparedSuffix, lack: MissingArgument) -> str:
        """Return what is missing, and what needs it."""
        recording = prepared.recording
        ops, tree = recording.tape.ops, self.tree_of(recording)
        name = _argument(lack.part).label
        shown = name if lack.part.label == name else f"{name} ({lack.part.label})"
        user, source = None, None
        for index in lack.chain:
            if ops[index].kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if prepared.rest.is_after_cuts(index):
                user = index
                break
            source = index
        texts = [
            _path_and_place(tree, recording, index) for index in (user, source) if index is not None
        ]
        if not texts:
            need = "the output of the model, or a condition, depends on it"
        elif user is None:
            need = f"the rest uses {texts[0]}, which is computed from it"
        elif source is None:
            need = f"{texts[0]} uses it"
        else:
            need = f"{texts[0]} uses {texts[1]}, which is computed from it"
        return f"the argument {shown} is needed as well: {need}. Pass it, or an activation between"


def own(value: Any) -> Any:
    """Return a copy of a value that the model may write to."""
    shape, found = take_apart(value)
    return assemble(shape, [aligned_copy(v) if isinstance(v, Tensor) else v for v in found])


def _argument(part: Captured) -> Captured:
    while part.parent is not None:
        part = part.parent
    return part


def _path_and_place(tree: Tree, recording: Recording, index: int) -> str:
    """Return the path and the place of an op."""
    path, site = tree.path_of(index), recording.tape.ops[index].site
    where = ""
    if site is not None:
        place = site.place
        where = f"{place_text(place.file, place.line)} `{place.text}`"
    if path:
        return f"{path!r} ({where})" if where else repr(path)
    return where or "an operation"


_KEPT: MutableMapping[Any, OrderedDict[Any, Any]] = WeakIdKeyDictionary()


def cached_for_model(model: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Return a cached result for a key, or compute it and cache it for the life of the model.

    A cached result has to keep alive the objects that its key identifies by id.
    """
    found = _KEPT.setdefault(model, OrderedDict())
    if key not in found:
        found[key] = make()
        while len(found) > _MOST:
            found.popitem(last=False)
    found.move_to_end(key)
    return found[key]


class RecordedRuns:
    """The recorded runs that fit the arguments of a call, the latest first.

    The tree has the model's paths, with the current insertions. The form is how arguments were
    passed, where the model may see that. Raises `InputError` if no runs are known, and no arguments
    are given.
    """

    def __init__(
        self, model: Any, tree: TraceTree, bound: Mapping[str, Any], form: tuple[str, ...]
    ) -> None:
        self._model = model
        self._bound = bound
        names = tuple(bound)
        programs = sorted(tree.programs(), key=lambda program: program.serial, reverse=True)
        self._same = list(tree.programs((*names, *form)))
        self._wider = [p for p in programs if set(names) < set(_argument_names(p))]
        # True if the model can be called with these arguments.
        self.is_whole: bool = bool(self._same) or (bool(names) and not self._wider)
        if not (self.is_whole or self._wider):
            raise InputError(
                "nothing has been traced yet"
                + (" with the current insertions" if model._insertion_registry else "")
                + ": call the module, or its trace(), first"
            )

    def __iter__(self) -> Iterator[RecordedRun]:
        """Yield the runs. Raise `DivergenceError` if arguments are missing, and no run fits."""
        return iter(self._admitting() if self.is_whole else self._fitting())

    def _admitting(self) -> list[RecordedRun]:
        arguments = tuple(self._bound.values())
        return [
            RecordedRun(program, recording, arguments)
            for program in self._same
            if not program.live_only and program.admits(arguments)
            for recording in self._latest_first(program)
        ]

    def _fitting(self) -> list[RecordedRun]:
        """Return the runs that fit, judging by the available arguments."""
        found: list[RecordedRun] = []
        reasons: list[str] = []
        for program in self._wider:
            names = _argument_names(program)
            missing = frozenset(i for i, name in enumerate(names) if name not in self._bound)
            arguments = tuple(self._bound.get(name) for name in names)
            reason = self._misfit(program, arguments, missing)
            if reason is None:
                found += [
                    RecordedRun(program, recording, arguments, missing)
                    for recording in self._latest_first(program)
                ]
            else:  # those that differ in the last question are nearest
                is_near = program.global_state.difference() is None
                reasons.insert(0 if is_near else len(reasons), reason)
        if not found:
            raise DivergenceError(
                f"no recorded run fits: {reasons[0]}; call the module as it is now, or pass "
                "all its arguments"
            )
        return sorted(found, key=lambda run: run.recording is not self._latest)

    def _latest_first(self, program: Program) -> list[Recording]:
        found = [r for r in reversed(program.recordings()) if not r.tape.blockers]
        return sorted(found, key=lambda recording: recording is not self._latest)

    @property
    def _latest(self) -> Recording | None:
        """The run of the latest call, if known."""
        dispatcher = self._model._dispatcher
        latest: Recording | None = dispatcher.latest_run
        trace = dispatcher.latest
        return latest if latest is not None or trace is None else trace._recording

    def _misfit(
        self, program: Program, arguments: tuple[Any, ...], missing: frozenset[int]
    ) -> str | None:
        """Return why a recorded run would not be repeated now; None if it may."""
        if program.live_only:
            return str(NotReplayableError(program.recording.tape.blockers))
        different = program.global_state.difference()
        if different is not None:
            return different

        def written() -> tuple[Program, Code, list[Any]]:
            parts = program.recording.environment.parts
            ignored = frozenset(part for part in parts if argument_of(part) in missing)
            writer = CheckWriter(program.recording, program.analysis, ignored)
            return program, Code(writer.write(), "check"), writer.checks

        _, code, checks = cached_for_model(self._model, ("check", id(program), missing), written)
        try:
            number = code.function(arguments)
        except NameError:  # an error of the check itself
            raise
        except Exception as error:  # as in `Program.failing`
            return f"{type(error).__name__}: {error}"
        if number is None:
            return None
        return explain_check(checks[number], program, arguments)().reason


def _argument_names(program: Program) -> tuple[str, ...]:
    """Return the names of the arguments that a program was recorded with."""
    parts = program.recording.environment.parts
    return tuple(p.label for p in parts if p.is_argument and p.access is Access.ROOT)
