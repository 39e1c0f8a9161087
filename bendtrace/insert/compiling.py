"""The insertions of a call, in the form that compiled paths need.

The insertions at the gates of a path are of two kinds. Those that compute a new tensor have an
*effect* (`interjection.py`), which is compiled with the path. Those that only observe and keep
copies are called after the run. If there is an insertion of neither kind, the call is replayed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bendtrace.engine.compile_probing import GateSplice, SpliceStep
from bendtrace.insert.gates import (
    AfterGate,
    BeforeGate,
    CountGate,
    EntryGate,
    Gate,
    StateGate,
    as_inputs,
    exchange_store,
)
from bendtrace.insert.insertion import CallTally, Insertion
from bendtrace.insert.interjection import NO_INPUTS, Effect, Interjection, NodePass, hand_over
from bendtrace.insert.leaves import ContainerShape, LeafShape, assemble, leaves_of_shape, shape_at
from bendtrace.insert.plan import InsertionPlan, LocatedInsertion
from bendtrace.insert.purity import IdentityFacts, effect_of_pure, facts_on
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.tape import Ref, TensorMeta


class _Turn(NamedTuple):
    """One insertion at a gate, as far as it is the same in all calls."""

    entry: LocatedInsertion
    at: NodePass
    slot: int = -1  # the position of the value that it changes; -1 for an observer
    like: TensorMeta | None = None
    shape: Any = None  # the structure of the observed value
    slots: tuple[int, ...] = ()  # the positions of the tensors in it
    values: tuple[Any, ...] = ()  # arguments of the gate; observed tensors replace those at `slots`
    look: Callable[[Any], Any] | None = None  # called with the observed value
    is_alone: bool = False  # whether the observed value is one tensor


# A gate with the number of its op, and its insertions.
_GateTurns = tuple[int, Gate, list[_Turn]]


class _Refused(Exception):
    """The reason why an insertion cannot be compiled."""


def insertions_of_plan(plan: InsertionPlan) -> PlannedInsertions:
    """Return the insertions of a plan, in the form that compiled paths need."""
    cached = plan.compiled
    if cached is None:
        cached = plan.compiled = PlannedInsertions(plan)
    assert isinstance(cached, PlannedInsertions)
    return cached


class PlannedInsertions:
    """The insertions of a plan."""

    def __init__(self, plan: InsertionPlan) -> None:
        self.places: Hashable = plan.key  # the key of their locations
        self._plan = plan
        self._paths: dict[int, _Path] = {}

    def along(self, recording: Recording) -> SplicedTurns | str:
        """Return the splices of a path, or why one of its gates cannot be compiled."""
        path = self._paths.get(id(recording))
        if path is None:
            path = self._paths[id(recording)] = _Path(recording, self._plan)
        steady = path.steady  # read once: another thread may exchange it
        if steady is not None and steady[1].hold():
            path.asked = 1
            return steady[0]
        return path.splice()


class _Path:
    """The insertions along one path."""

    def __init__(self, recording: Recording, plan: InsertionPlan) -> None:
        # The latest splices, or why there are none, and the facts that this depends on; None if
        # these are not known.
        self.steady: tuple[SplicedTurns | str, IdentityFacts] | None = None
        self.asked = 0  # how often in a row the insertions were asked
        # True if an insertion wants to know of each call, and not only of the first.
        self.wants_runs: bool = any(
            type(entry.insertion).ran is not Insertion.ran for entry in plan.entries
        )
        self._recording = recording  # kept alive, so that no other one has its identity
        self._plan = plan
        self._has_run = False
        self._gates: list[_GateTurns] = []
        self._refusal = ""
        try:
            for op in recording.tape.ops:
                if isinstance(op.target, Gate):
                    turns = _turns(op.target, op.args, recording, plan)
                    self._gates.append((op.index, op.target, turns))
        except _Refused as refused:
            self._refusal = str(refused)
        self._all = [turn for _, _, turns in self._gates for turn in turns]

    def splice(self) -> SplicedTurns | str:
        """Ask all insertions what they do now."""
        self.asked += 1
        # Facts take time themselves, and are of no use if attributes change in each call.
        looks = self.asked > 1 and not self.asked & (self.asked - 1)
        facts = self._facts() if looks else None  # first: what changes meanwhile is another fact
        with torch.inference_mode(False):  # numbers become tensors, which other modes use, too
            spliced = self._refusal or self._spliced()
        self.steady = None if facts is None else (spliced, facts)
        return spliced

    def ran(self) -> None:
        """Have the insertions note that a call took the path."""
        if self.wants_runs or not self._has_run:
            self._has_run = True
            self._plan.ran(self._recording)

    def _facts(self) -> IdentityFacts | None:
        facts = facts_on(turn.entry.what for turn in self._all if turn.look is None)
        for turn in self._all:
            if facts is not None and turn.look is not None:
                facts.attribute(turn.entry.what, "deferrable")
        return facts

    def _spliced(self) -> SplicedTurns | str:
        effects: list[list[Effect | None]] = []
        for _, _, turns in self._gates:
            row: list[Effect | None] = []
            effects.append(row)
            for turn in turns:
                what = turn.entry.what
                if turn.look is None:
                    found = _turn_effect(turn)
                    if isinstance(found, str):
                        return found
                    row.append(found)
                elif what.deferrable:
                    row.append(None)
                else:  # any more: an attribute may say so
                    return _undeferrable(what.label)
        return SplicedTurns(self, self._gates, effects)


class SplicedTurns:
    """The splices of one path in one call.

    The effects of the insertions at each gate are None for observers.
    """

    def __init__(
        self, path: _Path, gates: list[_GateTurns], effects: list[list[Effect | None]]
    ) -> None:
        self._path = path
        self._gates = gates
        self._effects = effects
        found = [effect for row in effects for effect in row if effect is not None]
        # The tensors that the effects need, in order.
        self.tensors: tuple[Tensor, ...] = tuple(
            tensor for effect in found for tensor in effect.tensors
        )
        keys = tuple(
            tuple(None if effect is None else (effect.key, len(effect.tensors)) for effect in row)
            for row in effects
        )
        # A graph knows which of its inputs are one and the same tensor.
        firsts: dict[int, int] = {}
        same = tuple(firsts.setdefault(id(t), slot) for slot, t in enumerate(self.tensors))
        self.key: Hashable = keys, same  # equal for calls that the same graph can serve
        self.identities: frozenset[int] = frozenset(firsts)  # their identities
        self._splices: dict[int, GateSplice] | None = None
        self._all = [
            pair
            for (_, _, turns), row in zip(gates, effects, strict=True)
            for pair in zip(turns, row, strict=True)
        ]
        # What to show to whom: an observer of one tensor is called with that.
        self._shown = [
            (number, turn.look if turn.is_alone else None, turn, effect)
            for number, (turn, effect) in enumerate(self._all)
            if effect is None or effect.keep is not None
        ]
        # Whether each changes its value, once that is known, and the latest reset before that.
        self._latest_changes: tuple[bool, ...] | None = None
        self._reset: object = None
        self._changing: frozenset[int] | None = None
        self._lock = threading.Lock()
        self._calls = 0  # that the insertions have not recorded yet

    @property
    def splices(self) -> dict[int, GateSplice]:
        """The splices, by the numbers of the gates' ops."""
        if self._splices is None:
            self._splices = {
                index: _splice(gate, turns, row)
                for (index, gate, turns), row in zip(self._gates, self._effects, strict=True)
            }
        return self._splices

    def changing(self, calls: int = 1) -> frozenset[int]:
        """Return the numbers of functions that are known to change their value."""
        is_reusable = (
            calls == 1
            and self._reset is CallTally.latest_reset
            and self._latest_changes is not None
        )
        if is_reusable and self._changing is not None:
            return self._changing
        turns = (turn for turn, effect in self._all if effect is not None)
        found = frozenset(
            number
            for number, turn in enumerate(turns)
            if turn.entry.insertion.is_known_to_change(turn.at.path, calls)
        )
        self._changing = found if is_reusable else None
        return found

    def served(
        self,
        kept: Sequence[Any],
        changed: Tensor | None,
        unchanged: frozenset[int],
        silent: frozenset[int],
        alone: Sequence[Tensor],
    ) -> None:
        """Let the insertions record what a graph did in their place."""
        changes = self._changes(changed, unchanged, silent)
        if self._shown or self._path.wants_runs:
            store = exchange_store({})
            try:
                self._path.ran()
                hand_over(alone)
                self._show_all(kept, changes)
            finally:
                hand_over(())
                exchange_store(store)
        else:
            self._path.ran()
        self._count(changes)

    def _show_all(self, kept: Sequence[Any], changes: tuple[bool, ...]) -> None:
        values, done = iter(kept), 0
        try:
            for done, look, turn, effect in self._shown:  # noqa: B007
                if look is not None:
                    look(next(values))
                else:
                    self._show(turn, effect, values)
        except Exception:
            failed = self._all[done][0]
            for (turn, _), has_changed in zip(self._all[:done], changes, strict=False):
                turn.entry.insertion.fired(turn.at, has_changed)
            for _, _, turns in self._gates:
                if any(turn is failed for turn in turns):
                    for other in turns:
                        other.entry.insertion.failed()
            raise

    @staticmethod
    def _show(turn: _Turn, effect: Effect | None, left: Iterator[Any]) -> None:
        """Show an insertion the values that it looks at or keeps."""
        if effect is None:
            assert turn.look is not None
            values = list(turn.values)
            for slot in turn.slots:
                values[slot] = next(left)
            turn.look(assemble(turn.shape, values))
        elif effect.keep is not None:
            effect.keep(tuple(islice(left, effect.kept)))

    def _changes(
        self, changed: Tensor | None, unchanged: frozenset[int], silent: frozenset[int]
    ) -> tuple[bool, ...]:
        """Return whether each insertion has changed its value, for all that is known."""
        if self._latest_changes is not None and self._reset is CallTally.latest_reset:
            return self._latest_changes
        reset, flags, number, is_reusable = CallTally.latest_reset, None, -1, True
        numbers = (number for number in range(len(self._all)) if number not in silent)
        found: list[bool] = []
        for turn, effect in self._all:
            number += effect is not None
            has_changed = effect is not None and number not in unchanged
            if has_changed and not turn.entry.insertion.is_known_to_change(turn.at.path):
                if flags is None:
                    assert changed is not None
                    flags = dict(zip(numbers, changed.tolist(), strict=False))
                has_changed, is_reusable = flags[number], False
            found.append(has_changed)
        changes = tuple(found)
        if is_reusable:
            self._latest_changes, self._reset = changes, reset
        return changes

    def _count(self, changes: tuple[bool, ...]) -> None:
        """Record a call on all insertions: immediately, or before somebody looks."""
        if changes is not self._latest_changes:
            for (turn, _), has_changed in zip(self._all, changes, strict=True):
                turn.entry.insertion.fired(turn.at, has_changed)
            return
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                for turn, _ in self._all:
                    turn.entry.insertion.fires_later(self._settle)

    def _settle(self) -> None:
        """Record on all insertions what was not recorded so far."""
        with self._lock:
            times, self._calls, changes = self._calls, 0, self._latest_changes
            if times and changes is not None:
                for (turn, _), has_changed in zip(self._all, changes, strict=True):
                    turn.entry.insertion.fired(turn.at, has_changed, times)


def _splice(gate: Gate, turns: list[_Turn], effects: list[Effect | None]) -> GateSplice:
    steps: list[SpliceStep] = []
    for turn, effect in zip(turns, effects, strict=True):
        if effect is None:
            steps.append(SpliceStep(turn.slots))
        else:
            steps.append(
                SpliceStep((turn.slot,), effect.function, effect.tensors, effect.kept, effect.check)
            )
    in_place = None
    if gate.tells_in_place:  # for all that an observer can say
        in_place = any(type(turn.shape) is ContainerShape for turn in turns)
    exchanged = gate.exchanged if isinstance(gate, (AfterGate, BeforeGate)) else ()
    return GateSplice(tuple(steps), exchanged, in_place)


def _turns(gate: Gate, args: Any, recording: Recording, plan: InsertionPlan) -> list[_Turn]:
    """Return the insertions at a gate, in order.

    Raise `_Refused` if one of them cannot be compiled.
    """
    entries = gate.entries_in(plan, gate.at.number)
    if isinstance(gate, CountGate):
        return [_counting_turn(gate, entry) for entry in reversed(entries)]
    if isinstance(gate, EntryGate) and entries:
        where = gate.at.path or "the whole model"
        raise _Refused(f"{entries[0].what.label} at {where} receives gradients")
    if isinstance(gate, EntryGate) or (isinstance(gate, AfterGate) and gate.writes):
        raise _Refused(f"{gate.described} is called at a node that works in place")
    if isinstance(gate, BeforeGate):
        entries = tuple(reversed(entries))
    elif not isinstance(gate, AfterGate):
        raise _Refused(f"{gate.described} is called in the place of what stands there")
    found: list[_Turn] = []
    for entry in entries:
        turn = _turn(gate, entry, args, recording)
        if turn is not None:
            found.append(turn)
    return found


def _turn(
    gate: AfterGate | BeforeGate, entry: LocatedInsertion, args: Any, recording: Recording
) -> Any:
    what = entry.what
    subject = f"{what.label} at {gate.at.path or 'the whole model'}"
    if entry.insertion.passes.is_asked:
        raise _Refused(f"of {subject} a function says which passes count")
    at = gate.at
    if isinstance(gate, AfterGate):
        if not entry.after:
            return None
        if entry.wants_inputs:
            raise _Refused(f"{subject} is given the inputs of the node as well")
        shape = shape_at(gate.shape, entry.dig)
        if entry.dig or isinstance(gate, StateGate):
            at = replace(at, path=entry.place.shown or at.path)
    elif entry.slot in gate.places:
        shape = shape_at(gate.shape, gate.places[entry.slot])
        at = replace(at, path=entry.place.shown, module=None)
    else:
        if not entry.before:
            return None
        turn = _Turn(entry, at, shape=gate.shape, look=_of_inputs(what, at))
        return _looking(turn, args, subject, recording)
    if shape is None:
        return None
    if what.observes:
        look = functools.partial(what.after, at, NO_INPUTS)
        return _looking(_Turn(entry, at, shape=shape, look=look), args, subject, recording)
    if type(shape) is not LeafShape or shape.kind is not Tensor:
        raise _Refused(f"{subject} changes a value that is no single tensor")
    like = recording.tape.ops[args[shape.number].index].meta
    return _Turn(entry, at, shape.number, like, shape)


def _looking(turn: _Turn, args: Any, subject: str, recording: Recording) -> _Turn:
    """Return the turn of an observer, with the tensors that it observes."""
    if not (turn.entry.what.observes and turn.entry.what.deferrable):
        raise _Refused(_undeferrable(subject))
    slots: list[int] = []
    for leaf in leaves_of_shape(turn.shape):
        if leaf.number < 0:
            continue
        given = args[leaf.number]
        if isinstance(given, Ref):
            if not isinstance(recording.tape.ops[given.index].meta, TensorMeta):
                raise _Refused(f"{subject} looks at numbers that depend on values or sizes")
            slots.append(leaf.number)
        elif type(given) not in PLAIN_TYPES:
            raise _Refused(f"{subject} looks at objects that are no tensors")
    is_alone = type(turn.shape) is LeafShape and slots == [turn.shape.number]
    return turn._replace(slots=tuple(slots), values=tuple(args), is_alone=is_alone)


def _undeferrable(subject: str) -> str:
    return f"{subject} is not known to do without being called while the model runs"


def _counting_turn(gate: CountGate, entry: LocatedInsertion) -> _Turn:
    if not (entry.what.observes and entry.what.deferrable):
        raise _Refused(_undeferrable(entry.what.label))
    look = functools.partial(_call_before, entry.what, gate.at)
    return _Turn(entry, gate.at, shape=LeafShape(Tensor, -1), look=look)


def _call_before(what: Interjection, at: NodePass, _: Any) -> None:
    what.before(at, NO_INPUTS)


def _of_inputs(what: Interjection, at: NodePass) -> Callable[[Any], Any]:
    return lambda value: what.before(at, as_inputs(value))


def _turn_effect(turn: _Turn) -> Effect | str:
    assert turn.like is not None
    what = turn.entry.what
    try:
        found = what.effect(turn.at, turn.like)
        if found is None:
            found = effect_of_pure(what, turn.at)
    except Exception as error:  # which a replay raises where it belongs
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, str):
        where = f" at {turn.at.path}" if turn.at.path else ""
        return f"{what.label}{where} cannot be compiled: {found}"
    return found
