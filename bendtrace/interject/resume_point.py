"""Runs the rest of a model from given activations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from bendtrace.errors import DivergenceError, InputError, NodePathError, NondeterminismError
from bendtrace.interject.cut_points import path_in
from bendtrace.interject.gates import running
from bendtrace.interject.group import Bended
from bendtrace.interject.plan import Plan
from bendtrace.interject.reading import read_and_changed
from bendtrace.interject.recorded import recorded
from bendtrace.interject.replacing import call_with
from bendtrace.interject.resolver import by_path, text_of
from bendtrace.interject.suffixes import (
    KnownRun,
    KnownRuns,
    Prepared,
    Suffixes,
)
from bendtrace.paths.view import Node, find
from bendtrace.recording.recorder import Prefix, Recording
from bendtrace.recording.script import Script
from bendtrace.replay.explain import Mismatch, explain_divergence
from bendtrace.replay.program import Program
from bendtrace.replay.source import test_of
from bendtrace.replay.stretches import (
    Divergence,
    Finished,
    RandomStates,
    Stretch,
    have_drawn,
    random_states,
)
from bendtrace.replay.tree import TraceTree
from bendtrace.tape.captured import identical
from bendtrace.tape.contexts import AutocastHold
from bendtrace.tape.tape import (
    Guard,
    OpKind,
    TensorMeta,
    Test,
    refs_in,
)
from bendtrace.torch_rules.functions import is_gate

__all__ = ["from_activations", "told"]


@dataclass
class Left:
    """A rest that has left all known paths.

    Attributes:
        run: the recorded run that it followed.
        prepared: the rest.
        divergence: where it left the path, as the code of replays records it.
        position: the first op that was not reached.
        done: the ops that were run.
        slots: the given values.
        random: the states of the random generators at its start.
    """

    run: KnownRun
    prepared: Prepared
    divergence: Divergence
    position: int
    done: frozenset[int]
    slots: dict[str, Any]
    random: RandomStates

    @property
    def has_effects(self) -> bool:
        """Whether anything besides the values of the run has been changed, or may have been."""
        return have_drawn(self.random) or self.prepared.rest.memory.has_effects(self.done)

    @property
    def can_be_resumed(self) -> bool:
        """Whether the model's Python can take over, and find the given values in its way."""
        ops = self.prepared.recording.tape.ops
        if self.divergence.position != self.position:
            return False
        for spots in self.prepared.spots.values():
            for spot in spots:
                op = ops[spot.index]
                between = ops[spot.index + 1 : spot.start]
                if (
                    spot.start > self.position
                    or op.kind is not OpKind.CALL
                    or not isinstance(op.meta, TensorMeta)
                    or any(
                        ref.index == spot.index and not is_gate(other)
                        for other in between
                        for ref in refs_in((other.args, other.kwargs))
                    )
                ):
                    return False
        return not self.prepared.rest.disturbs(self.done, self.position)

    def prefix(self) -> Prefix | Script | None:
        """Return the ops that the model's Python need not run again."""
        for cut in self.prepared.cuts:
            self.divergence.values[f"v{cut.index}"] = self.slots[f"s{cut.slot}"]
        return self.divergence.prefix()

    def agrees_with(self, recording: Recording) -> bool:
        """Return whether all decisions so far agree, so that a run belongs to the program."""
        before = {
            (guard.position, test_of(guard)): guard.expected
            for guard in self.prepared.recording.tape.guards
            if guard.position < self.position
        }
        return all(
            identical(guard.expected, before.get((guard.position, test_of(guard)), guard.expected))
            for guard in recording.tape.guards
            if guard.position < self.position
        )


def owner_of(program: Program, recording: Recording, number: int) -> tuple[Stretch, int]:
    """Return the code that tests a guard of a run, and the guard's number in it."""
    stretch = next(own for own, _ in program.stretches() if own.recording is recording)
    while (parent := stretch.parent) is not None:
        if number < 0:
            if -1 - number >= stretch.start:
                break
        else:
            guard = stretch.recording.tape.guards[number]
            branch = next(
                n for n, sides in parent.sides.items() for side in sides if side.target is stretch
            )
            twin = next(
                (
                    n
                    for n, other in enumerate(parent.recording.tape.guards)
                    if (other.position, test_of(other)) == (guard.position, test_of(guard))
                    and (other.position < stretch.start or n == branch)
                ),
                None,
            )
            if twin is None:
                break
            number = twin
        stretch = parent
    return stretch, number


def other_side(owner: Stretch, number: int, outcome: Any, recording: Recording) -> Recording | None:
    """Return the run in which a guard had another outcome; None if none is known."""
    tape = owner.recording.tape
    own = tape.guards[number].expected if number >= 0 else tape.ops[-1 - number].raised
    is_identity = number >= 0 and tape.guards[number].test in (Test.SAME, Test.OTHER)
    if owner.recording is not recording and not is_identity and identical(own, outcome):
        return owner.recording
    side = owner.side(number, outcome)
    return None if side is None or side.target is None else side.target.recording


def is_before(number: int, guard: Guard, divergence: Divergence) -> bool:
    """Return whether a guard was tested before a run was left, or is the guard that failed."""
    start = divergence.stretch.start
    when = max(guard.position, start)
    left = divergence.guard
    if left is None:
        return when <= -1 - divergence.number
    return (when, number) <= (max(left.position, start), divergence.number)


def from_activations(
    model: Bended,
    activations: Mapping[Any, Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    bended: bool = True,
) -> Any:
    """Run the rest of a `BendedModule` from given activations, and return its output.

    Operations that only lead to the given values are not run: batch norms among them do not update
    their buffers, and dropouts draw no random numbers.

    Args:
        model: the `BendedModule`.
        activations: the values of nodes by path, as `get_activations` returns them; for nodes with
            several passes, one value per pass (`relu:2`).
        args: the model's positional arguments, as far as the rest needs them.
        kwargs: its keyword arguments, as far as the rest needs them.
        bended: whether the model continues with the values as they are, or first applies the
            insertions at these nodes.

    Raises:
        NodePathError: there is no such node.
        InputError: an argument that the rest needs is missing, or one is invalid.
        DivergenceError: the rest takes a path that no recorded run took, and arguments needed to
            run the model's own Python are missing.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sigmoid()))
        >>> _ = bended(torch.ones(1, 2))
        >>> from_activations(bended, {"sub_0": torch.zeros(3, 2)})
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    if not isinstance(activations, Mapping):
        raise InputError(f"activations have to be a dict by node path, not {activations!r}")
    given = by_path(model, activations)
    if not given:
        raise InputError("no activations are given")
    return _Run(model, given, tuple(args), dict(kwargs or {}), bended).output()


def told(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Mapping[Any, Any], tuple[Any, ...], dict[str, Any]]:
    """Parse `from_activations({path: value}, *args, **kwargs)`, or torchbend's form of it.

    In that form the names come first, and the values are among the model's keyword arguments.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Returns:
        The activations, and the model's positional and keyword arguments.

    Raises:
        InputError: the arguments have neither form.

    Example:
        >>> told(({"relu": 1}, 2), {"mask": 3})
        ({'relu': 1}, (2,), {'mask': 3})
        >>> told(("relu",), {"relu": 1, "mask": 3})
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
    names = list(map(text_of, args))
    absent = [name for name in names if name not in kwargs]
    if absent:
        raise InputError(f"no value is given for {', '.join(map(repr, absent))}")
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return {name: kwargs[name] for name in names}, (), rest


class _Run:
    def __init__(
        self,
        model: Bended,
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
        self._form = model._signature.form(args, kwargs)
        self._rests = Suffixes(model, given, bended)
        self._is_whole = False  # whether the model can be called with these arguments

    def output(self) -> Any:
        """Run the rest, and return the output of the model."""
        plan = self._plan()
        tree: TraceTree = self._model._trees.of(plan)
        with nullcontext() if plan is None else running(plan):
            chosen = self._chosen(tree)
            if chosen is not None:
                run, prepared = chosen
                self._require_possible(prepared)
                if self._looks_at_changes(run, plan):
                    if not self._is_whole:
                        raise InputError(
                            "an insertion may read what the rest changes, and a recorded run "
                            "changes that at its end: pass the model's arguments as well"
                        )
                elif prepared.stretch is not None:
                    hold = AutocastHold()
                    try:
                        return self._gone_through(run, prepared, hold, tree, plan)
                    finally:
                        hold.release()
        return self._live()

    def _plan(self) -> Plan | None:
        board = self._model._board
        if not self._bound:
            for insertion in board.insertions:
                if insertion.passes.needs_total or not insertion.is_checked or any(
                    target.is_ahead or target.is_open for target in insertion.targets
                ):  # fmt: skip
                    raise InputError(
                        f"the location of {insertion!r} depends on the inputs of the model: "
                        "pass the model's arguments as well"
                    )
        plan: Plan | None = board.plan(self._args, self._kwargs)
        return plan

    def _chosen(self, tree: TraceTree) -> tuple[KnownRun, Prepared] | None:
        """Return the run with the required rest; None if the model's own Python has to decide."""
        plain = self._model._trees.plain
        if tree is not plain and not any(tree.programs()):
            self._require_whole(plain)
        runs = KnownRuns(self._model, tree, self._bound, self._form)
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

    def _require_whole(self, plain: TraceTree) -> None:
        """Raise for arguments that are too few to call the model, where it has to be called."""
        if not KnownRuns(self._model, plain, self._bound, self._form).is_whole:
            raise InputError(
                "nothing has been traced yet with the current insertions, which calls of the "
                "module splice into the paths that are known without them: call its trace() "
                "first, or pass all arguments of the model"
            )

    def _require_possible(self, prepared: Prepared) -> None:
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

    @staticmethod
    def _looks_at_changes(run: KnownRun, plan: Plan | None) -> bool:
        return plan is not None and plan.looks_at_changes(
            run.program.recordings(), read_and_changed
        )

    # Carrying it out

    def _gone_through(
        self,
        run: KnownRun,
        prepared: Prepared,
        hold: AutocastHold,
        tree: TraceTree,
        plan: Plan | None,
    ) -> Any:
        """Follow known paths as far as possible, and continue from there."""
        slots = self._rests.values_for(prepared)
        values = dict(slots)
        random = () if prepared.rest.is_straight else random_states()
        passed: frozenset[Any] = frozenset()
        seen: set[tuple[int, int]] = set()
        while True:
            stretch, rest = prepared.stretch, prepared.rest
            assert stretch is not None
            result = run.program.carry_out(stretch, run.arguments, dict(values), hold)
            if isinstance(result, Finished):
                if plan is not None:
                    plan.ran(prepared.recording)
                return result.output
            position = result.position
            done = rest.available | {i for i in stretch.code.emitted if i < position}
            passed |= {
                test_of(guard) for n, guard in rest.guards.items() if is_before(n, guard, result)
            }
            owner, number = owner_of(run.program, prepared.recording, result.number)
            known = other_side(owner, number, result.outcome, prepared.recording)
            following = None
            if known is not None and (id(known), position) not in seen:
                seen.add((id(known), position))
                other = KnownRun(run.program, known, run.arguments, run.missing)
                following = self._following(other, position, done, passed)
            if following is None:
                divergence = Divergence(
                    owner, owner.recording, number, result.outcome, result.values, hold
                )
                why = explain_divergence(result)()
                del result
                left = Left(run, prepared, divergence, position, done, slots, random)
                return self._gone_on(left, why, tree, plan)
            slots = {**self._rests.values_for(following), **slots}
            run, prepared, values = other, following, {**slots, **result.values}

    def _following(
        self, run: KnownRun, start: int, done: frozenset[int], passed: frozenset[Any]
    ) -> Prepared | None:
        """Return the rest of another known run, from where both diverge; None if it is too late."""
        try:
            prepared = self._rests.of(run, start, done, passed)
            self._rests.values_for(prepared)
        except (NodePathError, InputError):
            return None  # it does not reach the nodes
        if prepared.rest.lacks:
            raise InputError(self._rests.explained(prepared, prepared.rest.lacks[0]))
        return prepared if prepared.stretch is not None else None

    # Where no recorded run goes

    def _gone_on(self, left: Left, why: Mismatch, tree: TraceTree, plan: Plan | None) -> Any:
        """Continue where no recorded run went, or none that can be continued."""
        if left.run.missing:
            raise DivergenceError(
                f"the rest of the model takes a path that no recorded run took: {why.reason}; "
                "pass the model's arguments as well, or call it with such values first",
                why.step,
            )
        has_effects = left.has_effects
        if left.can_be_resumed:
            try:
                return self._resumed(left, tree, plan)
            except NondeterminismError as error:
                if has_effects:
                    raise DivergenceError(
                        f"{why.reason}, and the code before the given activations takes "
                        "another path for these arguments, too. Operations of the rest have "
                        "already been run. Call the module with these arguments first",
                        why.step,
                    ) from error
        left.divergence.hold.release()
        if has_effects:
            raise DivergenceError(
                f"{why.reason}, and the rest cannot continue from here: the operations run so "
                "far have changed something that the skipped code before would see. Give "
                "fewer activations, or call the module itself",
                why.step,
            )
        return self._live()

    def _resumed(self, left: Left, tree: TraceTree, plan: Plan | None) -> Any:
        """Continue with the model's own Python, and keep the path that it takes."""
        model, divergence = self._model, left.divergence
        prefix = left.prefix()
        try:
            recording = recorded(
                model._known, model._signature, self._args, self._kwargs, plan, prefix
            )
        finally:
            divergence.release(prefix)
        model.stats.retraces += 1
        model.stats.resumes += 1
        output, recording.result = recording.result, None
        if left.agrees_with(recording) and not recording.is_transient:
            model.stats.traces += 1
            model.stats.live += bool(recording.tape.blockers)
            tree.grow(left.run.program, divergence, recording)
        else:
            model.stats.live += 1
        self._require_one_pass(recording)
        return output

    def _require_one_pass(self, recording: Recording) -> None:
        """Raise for a path without a number if the rest has reached its node again."""
        tree = self._rests.tree_of(recording)
        for text in self._given:
            node, chosen = find(tree.data, path_in(tree, text))
            if chosen is None and len(node.passes) > 1:
                raise InputError(
                    f"{text!r} has {len(node.passes)} passes for these arguments: name one, as in "
                    f"'{node.path}:1'"
                )

    def _live(self) -> Any:
        """Call the model with the given values instead of its own."""
        return call_with(self._model, self._given, self._args, self._kwargs, bended=self._bended)
