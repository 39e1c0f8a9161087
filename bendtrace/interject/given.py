"""Running the rest of a model from activations that are given."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bendtrace.errors import DivergenceError, InputError, NondeterminismError, NotReplayableError
from bendtrace.flow import flow_steps
from bendtrace.graph.names import node_names
from bendtrace.history.copies import copied
from bendtrace.interject.cuts import Spot, path_in, spots_of, values_for
from bendtrace.interject.gates import running
from bendtrace.interject.inserter import LiveInserter
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.plan import Plan
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.paths.strings import NodePathError
from bendtrace.paths.view import Node, Tree
from bendtrace.recording.contexts import AutocastHold
from bendtrace.recording.parts import Access, Part, identical
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import record
from bendtrace.recording.tape import Guard, OpKind, TensorMeta, Test, refs_in
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.check import CheckWriter
from bendtrace.replay.explain import Mismatch, explain_check, explain_divergence
from bendtrace.replay.partial import carry_out, write_rest
from bendtrace.replay.program import Divergence, Finished, Program, Stretch
from bendtrace.replay.rest import Cut, Lack, Rest, argument_of
from bendtrace.replay.source import Code, test_of
from bendtrace.replay.tree import TraceTree

__all__ = ["from_activations", "told"]

_MOST = 64  # prepared rests that are kept for each model


class Bended(Protocol):
    """A model whose runs are known, and that things can be inserted in."""

    _board: Any
    _known: Any
    _latest: Any
    _model: Callable[..., Any]
    _registry: Any
    _signature: Any
    _trees: Any
    stats: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""


def from_activations(
    model: Bended,
    activations: Mapping[Any, Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    bended: bool = True,
) -> Any:
    """Run the rest of a `BendedModule` from given activations, and return its output.

    Operations that only lead to what is given are not carried out: no batch norm among them
    updates its buffers, no dropout draws random numbers.

    Args:
        model: the `BendedModule`.
        activations: the values of nodes by path, as `get_activations` returns them; of nodes with
            several passes for each pass (`relu:2`).
        args: the model's positional arguments, as far as the rest needs them.
        kwargs: its keyword arguments, likewise.
        bended: whether the model goes on with the values as they are, or with what is inserted
            at these nodes makes of them.

    Raises:
        NodePathError: there is no such node.
        InputError: something that the rest needs is missing, or something makes no sense.
        DivergenceError: the rest leads where no recorded run went, and arguments are missing for
            running the model's own Python.

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
        raise InputError(f"activations are given as a dict by node path, not as {activations!r}")
    given = {_text(where): value for where, value in activations.items()}
    if not given:
        raise InputError("no activations are given")
    return _Run(model, given, tuple(args), dict(kwargs or {}), bended).output()


def told(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Mapping[Any, Any], tuple[Any, ...], dict[str, Any]]:
    """Read `from_activations({path: value}, *args, **kwargs)`, or torchbend's form of it.

    In that form come the names first, and the values by keyword, among the model's arguments.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Returns:
        The activations, and the model's positional and keyword arguments.

    Raises:
        InputError: it is neither.

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
            "from_activations is given a dict of activations by path first, and then the model's "
            "arguments; or names of activations alone, with all values by keyword"
        )
    names = list(map(_text, args))
    absent = [name for name in names if name not in kwargs]
    if absent:
        raise InputError(f"no value is given for {', '.join(map(repr, absent))}")
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return {name: kwargs[name] for name in names}, (), rest


def _text(where: Any) -> str:
    if isinstance(where, Node):
        return where._path
    if not isinstance(where, str):
        raise InputError(f"activations are given by node paths, not by {where!r}")
    return where


@dataclass(frozen=True)
class _Candidate:
    """A recorded run that may be the one whose rest is wanted."""

    program: Program
    recording: Recording
    arguments: tuple[Any, ...]
    missing: frozenset[int]


@dataclass
class _Prepared:
    """The rest of a recorded run, ready to be carried out."""

    recording: Recording
    spots: dict[str, tuple[Spot, ...]]
    cuts: list[Cut]
    rest: Rest
    stretch: Stretch | None = None


class _Run:
    """One call of `from_activations`."""

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
        self._names = tuple(self._bound)
        self._is_whole = False  # whether the model can be called with what was given

    def output(self) -> Any:
        """Run the rest, and return what the model gives."""
        plan = self._plan()
        tree: TraceTree = self._model._trees.of(plan)
        with nullcontext() if plan is None else running(plan):
            chosen = self._chosen(tree)
            if chosen is not None:
                candidate, prepared = chosen
                return self._carried_out(candidate, prepared, tree, plan)
        return self._live()

    def _plan(self) -> Plan | None:
        board = self._model._board
        if not self._names:
            for insertion in board.insertions:
                if insertion.passes.needs_total or not insertion.is_checked or any(
                    want.is_ahead or want.is_open for want in insertion.wants
                ):  # fmt: skip
                    raise InputError(
                        f"where {insertion!r} is depends on what the model is given: give its "
                        "arguments as well"
                    )
        plan: Plan | None = board.plan(self._args, self._kwargs)
        return plan

    # Which recorded run

    def _chosen(self, tree: TraceTree) -> tuple[_Candidate, _Prepared] | None:
        """Return the run whose rest is wanted; None if the model's own Python has to tell."""
        programs = sorted(tree.programs(), key=lambda program: program.serial, reverse=True)
        same = list(tree.programs(self._names))
        if same:
            self._is_whole = True
            return self._first_with_nodes(self._admitting(same))
        if any(set(self._names) < set(_names_of(program)) for program in programs):
            return self._first_with_nodes(self._fitting(programs))
        self._is_whole = bool(self._names)
        if not self._is_whole:
            raise InputError(
                "nothing has been traced yet"
                + (" with what is inserted now" if self._model._board else "")
                + ": call the module, or its trace(), first"
            )
        return None

    def _admitting(self, programs: list[Program]) -> list[_Candidate]:
        arguments = tuple(self._bound.values())
        return [
            _Candidate(program, recording, arguments, frozenset())
            for program in programs
            if not program.live_only and program.admits(arguments)
            for recording in self._latest_first(program)
        ]

    def _fitting(self, programs: list[Program]) -> list[_Candidate]:
        """Return the runs that fit as far as can be told from the arguments that are there."""
        found: list[_Candidate] = []
        reasons: list[str] = []
        for program in programs:
            names = _names_of(program)
            if not set(self._names) <= set(names):
                continue
            missing = frozenset(i for i, name in enumerate(names) if name not in self._bound)
            arguments = tuple(self._bound.get(name) for name in names)
            reason = self._misfit(program, arguments, missing)
            if reason is not None:
                # What is asked last is nearest.
                reasons.insert(0 if program.ambience.difference() is None else len(reasons), reason)
                continue
            found += [
                _Candidate(program, recording, arguments, missing)
                for recording in self._latest_first(program)
            ]
        if not found:
            raise DivergenceError(
                f"no recorded run can be gone on with: {reasons[0]}; call the module as it is now, "
                "or give all its arguments"
            )
        return sorted(found, key=lambda candidate: candidate.recording is not self._latest)

    def _latest_first(self, program: Program) -> list[Recording]:
        found = [r for r in reversed(program.recordings()) if not r.tape.blockers]
        return sorted(found, key=lambda recording: recording is not self._latest)

    @property
    def _latest(self) -> Recording | None:
        """The run of the latest call, as far as that is known."""
        trace = self._model._latest
        latest: Recording | None = getattr(self._model, "_latest_run", None)
        return latest if latest is not None or trace is None else trace.recording

    def _misfit(
        self, program: Program, arguments: tuple[Any, ...], missing: frozenset[int]
    ) -> str | None:
        """Say why a recorded run would not be repeated now, whatever is missing; None if it may."""
        if program.live_only:
            return str(NotReplayableError(program.recording.tape.blockers))
        different = program.ambience.difference()
        if different is not None:
            return different
        ignored = frozenset(
            part for part in program.recording.surroundings.parts if argument_of(part) in missing
        )
        key = "check", id(program), missing

        def written() -> tuple[Any, Code, list[Any]]:
            writer = CheckWriter(program.recording, program.analysis, ignored)
            return program, Code(writer.write(), "check"), writer.checks

        _, code, checks = _kept(self._model, key, written)
        try:
            number = code.function(arguments)
        except NameError:
            raise
        except Exception as error:  # as in `Program.failing`
            return f"{type(error).__name__}: {error}"
        if number is None:
            return None
        steps = flow_steps(program.recording.tape, node_names(program.recording.tape.ops))
        return explain_check(checks[number], program, arguments, steps).reason

    def _first_with_nodes(
        self, candidates: list[_Candidate]
    ) -> tuple[_Candidate, _Prepared] | None:
        """Return the first run that has all the nodes, with its rest."""
        error: Exception | None = None
        for candidate in candidates:
            try:
                prepared = self._prepared(candidate)
                self._slots(prepared)
                return candidate, prepared
            except (NodePathError, InputError) as raised:
                error = error or raised
        if self._is_whole:
            return None  # there may be another path
        assert error is not None
        raise error

    # Its rest

    def _tree_of(self, recording: Recording) -> Tree:
        tree: Tree = self._model._known._tree(recording)
        return tree

    def _prepared(
        self,
        candidate: _Candidate,
        start: int = 0,
        available: frozenset[int] = frozenset(),
        passed: frozenset[Any] = frozenset(),
    ) -> _Prepared:
        """Return the rest of a run from where the values are given on."""
        program, recording, missing = candidate.program, candidate.recording, candidate.missing
        key = (
            "rest", id(recording), missing, tuple(self._given), self._bended, start, available,
            passed,
        )  # fmt: skip

        def made() -> _Prepared:
            tree = self._tree_of(recording)
            spots = {
                text: spots_of(recording, tree, text, bended=self._bended) for text in self._given
            }
            cuts = [
                Cut(spot.index, spot.start, self._slot(text, spot), spot.call)
                for text, listed in spots.items()
                for spot in listed
            ]
            is_root = recording is program.recording
            analysis = program.analysis if is_root else Analysis(recording.tape)
            rest = Rest(
                recording, analysis, cuts, missing, is_checked=is_root and not missing,
                start=start, available=available, passed=passed,
            )  # fmt: skip
            prepared = _Prepared(recording, spots, cuts, rest)
            if not rest.unclear and not rest.lacks and rest.late() is not None:
                prepared.stretch = write_rest(rest, analysis, program.ambience.context)
            return prepared

        prepared: _Prepared = _kept(self._model, key, made)
        return prepared

    def _slot(self, text: str, spot: Spot) -> int:
        """Return the number of a given value: the same for all runs of the model."""
        numbers: dict[Any, int] = _kept(self._model, "slots", dict)
        return numbers.setdefault((text, spot.keys), len(numbers))

    def _slots(self, prepared: _Prepared) -> dict[str, Any]:
        """Return the given values by slot."""
        values: dict[str, Any] = {}
        rest = prepared.rest
        for text, spots in prepared.spots.items():
            dug = values_for(text, self._given[text], spots)
            for spot, value in zip(spots, dug, strict=True):
                slot = self._slot(text, spot)
                # Who knows what is done to it on another path.
                own = slot in rest.written or not rest.is_straight
                values.setdefault(f"s{slot}", _own(value) if own else value)
        return values

    # Carrying it out

    def _carried_out(
        self, candidate: _Candidate, prepared: _Prepared, tree: TraceTree, plan: Plan | None
    ) -> Any:
        self._require_possible(candidate, prepared)
        if prepared.stretch is None:
            return self._live()
        hold = AutocastHold()
        try:
            return self._gone_through(candidate, prepared, hold, tree, plan)
        finally:
            hold.release()

    def _gone_through(
        self,
        candidate: _Candidate,
        prepared: _Prepared,
        hold: AutocastHold,
        tree: TraceTree,
        plan: Plan | None,
    ) -> Any:
        """Go along known paths as far as they go, and on from there."""
        slots = self._slots(prepared)
        values = dict(slots)
        random = [] if prepared.rest.is_straight else _random_states()
        passed: frozenset[Any] = frozenset()
        seen: set[tuple[int, int]] = set()
        while True:
            stretch, rest = prepared.stretch, prepared.rest
            assert stretch is not None
            result = carry_out(candidate.program, stretch, candidate.arguments, values, hold)
            if isinstance(result, Finished):
                if plan is not None:
                    plan.ran(prepared.recording)
                return result.output
            position = result.position
            done = rest.available | {i for i in stretch.code.emitted if i < position}
            passed |= {
                test_of(guard)
                for number, guard in rest.guards.items()
                if _is_before(number, guard, result)
            }
            owner, number = _owner(candidate.program, prepared.recording, result.number)
            known = _other_side(owner, number, result.outcome, prepared.recording)
            following = None
            if known is not None and (id(known), position) not in seen:
                seen.add((id(known), position))
                other = _Candidate(candidate.program, known, candidate.arguments, candidate.missing)
                following = self._following(other, position, done, passed)
            if following is None:
                divergence = Divergence(owner, number, result.outcome, result.values, hold)
                why = self._explained(prepared, result)
                del result
                left = _Left(candidate, prepared, divergence, position, done, slots, random)
                return self._left(left, why, tree, plan)
            slots = {**self._slots(following), **slots}
            candidate, prepared, values = other, following, {**slots, **result.values}

    def _require_possible(self, candidate: _Candidate, prepared: _Prepared) -> None:
        rest = prepared.rest
        if rest.unclear and not self._is_whole:
            raise InputError(
                f"{', '.join(map(repr, self._given))}: {rest.unclear}; give the node that the "
                "tensor comes from, or the model's arguments as well"
            )
        if rest.lacks:
            raise InputError(self._lack(prepared, rest.lacks[0]))
        if not (rest.used or rest.unclear or self._is_whole):
            raise InputError(
                "nothing of what the model gives or changes depends on "
                + ", ".join(map(repr, self._given))
            )

    def _following(
        self, candidate: _Candidate, start: int, done: frozenset[int], passed: frozenset[Any]
    ) -> _Prepared | None:
        """Return the rest of another known run, from where both part; None if it is too late."""
        try:
            prepared = self._prepared(candidate, start, done, passed)
        except (NodePathError, InputError):
            return None  # it does not come by the nodes
        if prepared.rest.lacks:
            raise InputError(self._lack(prepared, prepared.rest.lacks[0]))
        return prepared if prepared.stretch is not None else None

    # Where no recorded run goes

    @staticmethod
    def _explained(prepared: _Prepared, divergence: Divergence) -> Mismatch:
        tape = prepared.recording.tape
        return explain_divergence(divergence, flow_steps(tape, node_names(tape.ops)))

    def _left(self, left: _Left, mismatch: Mismatch, tree: TraceTree, plan: Plan | None) -> Any:
        """Go on where no recorded run went, or none that can be gone over to."""
        divergence = left.divergence
        if left.candidate.missing:
            raise DivergenceError(
                f"the rest of the model leads where no recorded run went: {mismatch.reason}; give "
                "the model's arguments as well, or call it with such values first",
                mismatch.step,
            )
        has_effects = left.has_effects
        if left.can_be_resumed:
            try:
                return self._resumed(left, tree, plan)
            except NondeterminismError as error:
                if has_effects:
                    raise DivergenceError(
                        f"{mismatch.reason}, and what comes before the given activations goes "
                        "another way for these arguments, too. Operations of the rest have been "
                        "carried out already. Call the module with these arguments first",
                        mismatch.step,
                    ) from error
        divergence.hold.release()
        if has_effects:
            raise DivergenceError(
                f"{mismatch.reason}, and the rest cannot be gone on with from here: operations "
                "have been carried out that change something, and what was left out before would "
                "see that. Give less, or call the module itself",
                mismatch.step,
            )
        return self._live()

    def _resumed(self, left: _Left, tree: TraceTree, plan: Plan | None) -> Any:
        """Have the model's own Python go on, and keep the path that it takes."""
        model, divergence = self._model, left.divergence
        prefix = left.prefix()
        try:
            inserter = None
            if plan is not None:
                inserter = LiveInserter(plan, model._registry, model._model)
            recording = record(
                model._model, self._args, self._kwargs, model._signature, prefix,
                inserter=inserter,
            )  # fmt: skip
        finally:
            divergence.release(prefix)
        model.stats.retraces += 1
        model.stats.resumes += 1
        if plan is not None:
            plan.ran(recording)
        output, recording.result = recording.result, None
        if left.agrees_with(recording) and not recording.is_transient:
            model.stats.traces += 1
            model.stats.live += bool(recording.tape.blockers)
            tree.grow(left.candidate.program, divergence, recording)
        else:
            model.stats.live += 1
        return output

    def _live(self) -> Any:
        """Call the model with the values in the place of its own."""
        board = self._model._board
        others = () if self._bended else board.insertions
        made: list[Insertion] = []
        for text, value in self._given.items():
            made.append(board.make(self._named(text), _Replacement(text, value, self._bended)))
        board.remove(*others)
        board.add(*made, *others)
        try:
            output = self._model(*self._args, **self._kwargs)
        finally:
            board.remove(*made)
        for text, insertion in zip(self._given, made, strict=True):
            report = insertion.report()
            if not report.rows:
                raise InputError(
                    f"the model did not come by {text!r}, so what was given for it was not used: "
                    + "; ".join(report.notes)
                )
        return output

    def _named(self, text: str) -> Node | str:
        """Return the node of a path; the path itself where no run has come by it yet."""
        for tree in self._model._known.trees():
            try:
                node: Node = tree.resolve(path_in(tree, text), leaf=False)
            except NodePathError:
                continue
            return node
        return text

    # Messages

    def _lack(self, prepared: _Prepared, lack: Lack) -> str:
        """Say what is missing, and what needs it."""
        recording = prepared.recording
        ops, tree = recording.tape.ops, self._tree_of(recording)
        name = _root_of(lack.part).label
        shown = name if lack.part.label == name else f"{name} ({lack.part.label})"
        user, source = None, None
        for index in lack.chain:
            if ops[index].kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if prepared.rest.is_after_cuts(index):
                user = index
                break
            source = index
        said = [self._op(tree, recording, i) for i in (user, source) if i is not None]
        if not said:
            need = "what the model gives, or a condition, depends on it"
        elif user is None:
            need = f"the rest uses {said[0]}, which is computed from it"
        elif source is None:
            need = f"{said[0]} uses it"
        else:
            need = f"{said[0]} uses {said[1]}, which is computed from it"
        return f"the argument {shown} is needed as well: {need}. Give it, or an activation between"

    @staticmethod
    def _op(tree: Tree, recording: Recording, index: int) -> str:
        path, site = tree.path_of(index), recording.tape.ops[index].site
        where = ""
        if site is not None:
            place = site.place
            where = f"{os.path.basename(place.file)}:{place.line} `{place.text}`"
        if path:
            return f"{path!r} ({where})" if where else repr(path)
        return where or "an operation"


@dataclass
class _Left:
    """A rest that has left all known paths."""

    candidate: _Candidate
    prepared: _Prepared
    divergence: Divergence
    position: int
    done: frozenset[int]
    slots: dict[str, Any]
    random: list[Tensor]

    @property
    def has_effects(self) -> bool:
        """Whether something besides the values of the run has been changed, or may have been."""
        now = _random_states()
        same = len(now) == len(self.random) and all(map(torch.equal, now, self.random))
        return not same or self.prepared.rest.has_effects(self.done)

    @property
    def can_be_resumed(self) -> bool:
        """Whether the model's Python can take over, and find the given values in its way."""
        ops = self.prepared.recording.tape.ops
        position = self.position
        if self.divergence.position != position:
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
                        ref.index == spot.index and not getattr(other.target, "is_gate", False)
                        for other in between
                        for ref in refs_in((other.args, other.kwargs))
                    )
                ):
                    return False
        return not self.prepared.rest.disturbs(self.done, position)

    def prefix(self) -> Any:
        """Return what the model's Python does not have to do again."""
        for cut in self.prepared.cuts:
            self.divergence.values[f"v{cut.index}"] = self.slots[f"s{cut.slot}"]
        return self.divergence.prefix()

    def agrees_with(self, recording: Recording) -> bool:
        """Whether all was decided alike until here, so that a run belongs to the program."""
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


class _Replacement(Interjection):
    """Puts a given value in the place of what a node gives.

    Args:
        text: how the node was named.
        value: the value.
        late: whether it comes after all else that is inserted there.
    """

    def __init__(self, text: str, value: Any, late: bool) -> None:
        self._text = text
        self._value = value
        self._path: str | None = None
        self.late = late

    @property
    def label(self) -> str:
        """What reports call it."""
        return "from_activations"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Return the value."""
        if self._path not in (None, at.path):
            raise InputError(f"{self._text!r} means both {self._path!r} and {at.path!r}: name one")
        self._path = at.path
        if at.number and ":" not in self._text:
            raise InputError(
                f"{self._text!r} has several passes in this run: name one, as in '{at.path}:1'"
            )
        return _own(self._value)


def _own(value: Any) -> Any:
    """Return a value that the model may write to."""
    shape, found = take_apart(value)
    return assemble(shape, [copied(v) if isinstance(v, Tensor) else v for v in found])


def _names_of(program: Program) -> tuple[str, ...]:
    parts = program.recording.surroundings.parts
    return tuple(p.label for p in parts if p.is_argument and p.access is Access.ROOT)


def _root_of(part: Part) -> Part:
    while part.parent is not None:
        part = part.parent
    return part


def _owner(program: Program, recording: Recording, number: int) -> tuple[Stretch, int]:
    """Return the code that tests a guard of a run, and the number that the guard has there."""
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


def _other_side(
    owner: Stretch, number: int, outcome: Any, recording: Recording
) -> Recording | None:
    """Return the run that went on with another outcome of a guard; None if none is known."""
    tape = owner.recording.tape
    own = tape.guards[number].expected if number >= 0 else tape.ops[-1 - number].raised
    is_identity = number >= 0 and tape.guards[number].test in (Test.SAME, Test.OTHER)
    if owner.recording is not recording and not is_identity and identical(own, outcome):
        return owner.recording
    side = owner.side(number, outcome)
    return None if side is None or side.target is None else side.target.recording


def _is_before(number: int, guard: Guard, divergence: Divergence) -> bool:
    """Whether a guard was tested before a run was left."""
    start = divergence.stretch.start
    when = max(guard.position, start)
    left = divergence.guard
    if left is None:
        return when <= -1 - divergence.number
    return (when, number) <= (max(left.position, start), divergence.number)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


_KEPT: WeakKeyDictionary[Any, OrderedDict[Any, Any]] = WeakKeyDictionary()


def _kept(model: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Return what was made for a key before, and keep what is made now."""
    kept = _KEPT.setdefault(model, OrderedDict())
    if key not in kept:
        kept[key] = make()
        while len(kept) > _MOST:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]
