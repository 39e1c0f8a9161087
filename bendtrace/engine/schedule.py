"""The schedule of a recorded run: the order of its work, and the end of each value.

Everything that writes code for a run, or carries it out op by op, goes by a schedule: which ops
are needed, which guards are tested between them, and what is used for the last time where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.engine.guard_kinds import Analysis, GuardKind, is_metadata_read
from bendtrace.engine.source import ValueSplice, dependencies_of, gives_nothing
from bendtrace.python.lazy import LazyModule
from bendtrace.record.effects import HARMLESS
from bendtrace.record.numbers import error_of
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import EnvironmentChange
from bendtrace.tape.contexts import Context
from bendtrace.tape.guards import ErrorGuard
from bendtrace.tape.tape import Checkpoint, Guard, Op, OpKind, Tape, Use, is_handled, refs_in
from bendtrace.watch.functions import FLEETING, VALUES, table_name

if TYPE_CHECKING:
    from bendtrace.engine.cache_growth import Growth
    from bendtrace.record import checkpoints
else:
    checkpoints = LazyModule("bendtrace.record.checkpoints")


class Unlinked(Exception):
    """A segment needs a value that its state does not hold."""


class Schedule:
    """The work between two places of a recorded run, in order.

    A position on the tape has two moments: guards are tested at `2 * position`, and the op there
    is carried out at `2 * position + 1`.

    Args:
        recording: the run.
        analysis: its guards, sorted.
        entry: grad mode and so on when the run begins.
        guards: the guards to test, by their numbers.
        start: the first op to carry out.
        stop: the guard to end with, whatever its answer; None for the end of the run.
        available: ops before `start` whose values are handed over.
        holes_at: for a guard, the ops whose values are handed on where it does not hold.
        needed: the ops to carry out, and the inputs and state among what they use; None for all
            that the guards and the output need, and all that cannot be left out.
        growths: which tensors of the environment may be replaced before the end, by op.
        same: ops before `start` that gave back an argument or state, with the op that names it.
        splices: what values are passed through, in order.
        blocks: the checkpointed blocks that it is in.
        entered: the one that it begins in the middle of.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        entry: Context,
        guards: Mapping[int, Guard],
        *,
        start: int = 0,
        stop: int | None = None,
        available: Collection[int] = (),
        holes_at: Mapping[int, tuple[int, ...]] | None = None,
        needed: set[int] | None = None,
        growths: Mapping[int, Growth] | None = None,
        same: Mapping[int, int] | None = None,
        splices: Iterable[ValueSplice] = (),
        blocks: Iterable[Checkpoint] = (),
        entered: Checkpoint | None = None,
    ) -> None:
        self.recording = recording
        self.tape: Tape = recording.tape
        self.analysis = analysis
        self.entry = entry
        self.start = start
        self.stop = stop
        self.available: frozenset[int] = frozenset(available)
        self.handed: tuple[int, ...] = tuple(available)  # as `available` was given, in that order
        self.holes_at: Mapping[int, tuple[int, ...]] | dict[int, tuple[int, ...]] = holes_at or {}
        self.blocks: list[Checkpoint] = list(blocks)
        self.entered: Checkpoint | None = entered
        self.growths: Mapping[int, Growth] | dict[int, Growth] = growths or {}
        self.same: Mapping[int, int] | dict[int, int] = same or {}
        self.splices: dict[int, list[ValueSplice]] = {}
        for splice in splices:
            self.splices.setdefault(splice.position, []).append(splice)
        # The position after the last op.
        self.end: int = len(self.tape.ops) if stop is None else self.tape.guards[stop].position
        # What the run has changed by then.
        self.changes: list[EnvironmentChange] = recording.changes if stop is None else []
        values = [change.value for change in self.changes]
        # What is built at the end.
        self.outputs: tuple[Any, list[Any]] | tuple[()] = (
            (recording.root.output, values) if stop is None else ()
        )
        self.guards: dict[int, list[tuple[int, Guard]]] = {}  # tested at each position, in order
        for number, guard in guards.items():
            # What was put before `start` is tested first thing.
            self.guards.setdefault(max(guard.position, start), []).append((number, guard))
        if needed is not None:
            self.needed = needed

    @classmethod
    def of_segment(
        cls,
        recording: Recording,
        analysis: Analysis,
        entry: Context,
        after: int,
        stop: int | None,
        growths: Mapping[int, Growth],
        splices: Iterable[ValueSplice] = (),
    ) -> Schedule:
        """Return the schedule of a segment: from a state to another, or to the end of the run.

        The recorded answer of guard `after` leads into the segment, -1 to the beginning of the run,
        when input guards have been tested. It ends with guard `stop`, or for None at the end of the
        run.
        """
        tape = recording.tape
        is_first = after < 0
        tested = set() if is_first else {tape.guards[after].key}
        last = len(tape.guards) - 1 if stop is None else stop
        guards: dict[int, Guard] = {}
        for number in range(after + 1, last + 1):
            guard = tape.guards[number]
            is_checked = is_first and analysis.kinds[number] is not GuardKind.DATA
            if number == stop or not (is_checked or guard.key in tested):
                tested.add(guard.key)
                guards[number] = guard
        return cls(
            recording,
            analysis,
            entry,
            guards,
            start=0 if is_first else tape.guards[after].position,
            stop=stop,
            available=() if is_first else tape.states[after].holes,
            holes_at={n: tape.states[n].holes for n in guards if n in tape.states},
            growths=growths,
            same=returned_inputs(tape, after),
            splices=(splice for splice in splices if splice.lies_in(after, stop)),
            blocks=[
                block
                for block in tape.blocks
                if block.begin[1] > after or block.holds(after)
                if stop is None or block.begin[1] <= stop
            ],
            entered=next((block for block in tape.blocks if block.holds(after)), None),
        )

    def steps(self) -> Iterator[tuple[int, list[tuple[int, Guard]], Op | None]]:
        """Yield each position with the guards there, and the op that is carried out, if one is."""
        for position in range(self.start, self.end + 1):
            yield position, self.guards.get(position, []), self.op_at(position)

    def op_at(self, position: int) -> Op | None:
        """Return the op that is carried out at a position; None if none is."""
        if position >= self.end or position not in self.needed:
            return None
        op = self.tape.ops[position]
        return None if op.is_given else op

    @cached_property
    def needed(self) -> set[int]:
        """The ops to carry out, and the inputs and state among what they use."""
        ops = self.tape.ops
        roots = {ref.index for ref in refs_in(self.outputs)}
        for listed in self.guards.values():
            for number, guard in listed:
                roots.update(guard.operands)
                for hole in self.holes_at.get(number, ()):
                    roots.update(self._parts_of(hole) if self.is_late(ops[hole]) else (hole,))
        roots.update(splice.index for splice in chain(*self.splices.values()))
        for block in self.blocks:
            if block is not self.entered:
                roots.update(block.tensors)
        remaining = ops[self.start : self.end]
        roots.update(op.index for op in remaining if not is_droppable(op, self.analysis))
        return dependencies_of(ops, roots, self.available, self.same)

    def portion(
        self,
        block: Checkpoint,
        write: Callable[[checkpoints.Portion], Callable[..., None]] | None = None,
    ) -> checkpoints.Portion:
        """Return its work in a block."""
        start = self.start if block is self.entered else block.begin[0]
        ops = map(self.op_at, range(start, min(block.end[0], self.end)))
        passages = [
            checkpoints.Passage(
                position, splice.guards, splice.index, splice.function, splice.context
            )
            for position, spliced in self.splices.items()
            for splice in spliced
            if block.begin < (position, splice.guards) <= block.end
        ]
        return checkpoints.Portion(
            [op for op in ops if op is not None], passages, self.catchable, write
        )

    @cached_property
    def catchable(self) -> frozenset[int]:
        """The ops whose errors the model might go on after."""
        guards = (guard for listed in self.guards.values() for _, guard in listed)
        return frozenset(guard.index for guard in guards if isinstance(guard, ErrorGuard))

    @cached_property
    def late(self) -> list[Op]:
        """The ops before `start` that were left out there, and are needed now."""
        ops = map(self.tape.ops.__getitem__, sorted(self.needed - self.available))
        return [op for op in ops if op.index < self.start and not op.is_given]

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The moment at which the value of each op is used last."""
        last: dict[int, int] = {}

        def use(indices: Iterable[int], moment: int) -> None:
            for index in indices:
                last[index] = max(moment, last.get(index, -1))

        for index in sorted(self.needed):
            moment = 2 * index + 1 if index >= self.start else 2 * self.start - 1
            use(self.tape.ops[index].operands, moment)
        for position, listed in self.guards.items():
            for number, guard in listed:
                holes = self.holes_at.get(number, ())
                use((*guard.operands, *holes), 2 * position)
                for hole in holes:  # which may have to be computed there
                    if self.is_late(self.tape.ops[hole]):
                        use(self._parts_of(hole), 2 * position)
        for position, spliced in self.splices.items():
            use((splice.index for splice in spliced), 2 * position)
        for block in self.blocks:
            if block is not self.entered:
                use((*block.tensors, *self.portion(block).outside), 2 * block.begin[0])
        use((ref.index for ref in refs_in(self.outputs)), 2 * len(self.tape.ops) + 2)
        return last

    def deaths(self, kept_until: int = -1) -> dict[int, list[int]]:
        """Return, for each moment, the values not used any more; none until `kept_until`."""
        dying: dict[int, list[int]] = {}
        for index, moment in self.last_use.items():
            dying.setdefault(max(moment, kept_until, 2 * self.start - 1), []).append(index)
        return dying

    @cached_property
    def last_departure(self) -> int:
        """The last position where the run can be left with all that it has computed; else -1."""
        caught = (
            op.index + 1
            for op in self.tape.ops[self.start :]
            if op.is_work and may_be_caught(op, self.recording)
        )
        return max(max(self.guards, default=-1), max(caught, default=-1))

    @cached_property
    def switches(self) -> bool:
        """Return whether ops run under another grad mode, or the like, than the run begins with."""
        ops = self.tape.ops[self.start : self.end]
        if any(splice.context != self.entry for splice in chain(*self.splices.values())):
            return True
        return any(
            op.kind is OpKind.CALL and op.context != self.entry and op.index in self.needed
            for op in (*self.late, *ops)
        )

    def is_late(self, op: Op) -> bool:
        """Return whether a value can be computed at any time, from arguments and state alone."""
        return op.index in self.analysis.computable or (
            is_metadata_read(op) and all(self.tape.ops[index].is_given for index in op.operands)
        )

    def missing(self, number: int, computed: Collection[int]) -> list[Op]:
        """Return what has to be computed where a guard does not hold, for what is handed on.

        Raise `Unlinked` if that needs a value which is not there.
        """
        ops, found = self.tape.ops, set()
        waiting = [hole for hole in self.holes_at.get(number, ()) if hole not in computed]
        while waiting:
            op = ops[waiting.pop()]
            if op.index in found or op.is_given:
                continue
            if not self.is_late(op):
                raise Unlinked(f"{op} is held, and not to be reached")
            found.add(op.index)
            waiting += [index for index in op.operands if index not in computed]
        return [ops[index] for index in sorted(found)]

    def _parts_of(self, index: int) -> Iterator[int]:
        """Yield the sources of a value, once each: arguments, state, and handed over values."""
        seen, waiting = {index}, [index]
        while waiting:
            op = self.tape.ops[waiting.pop()]
            if op.is_given or op.index in self.available:
                yield op.index
                continue
            waiting += [operand for operand in op.operands if operand not in seen]
            seen.update(op.operands)


def returned_inputs(tape: Tape, last: int) -> dict[int, int]:
    """Return the ops that gave back an argument or state before a given guard, with that.

    A state knows such a tensor as what it was before the run, and by no op.
    """
    end = tape.guards[last].position if last >= 0 else 0
    return {
        index: root
        for index, root in tape.aliases.items()
        if index < end and tape.ops[root].is_given
    }


def is_droppable(op: Op, analysis: Analysis) -> bool:
    """Return whether an op that nothing needs can be left out without anybody noticing."""
    if op.is_given:
        return True
    if op.raised is not None or not analysis.fixed_metadata:
        return False
    if op.kind is OpKind.CALL and table_name(op.target) in FLEETING:
        return False
    if op.kind is OpKind.SCALAR:
        return op.target in HARMLESS
    # Any tensor can be formatted without an error.
    only_writes = VALUES.get(op.target) is Use.FORMAT and not any(op.args[1:])
    return is_metadata_read(op) or only_writes


def is_freed(op: Op) -> bool:
    """Return whether the value of an op takes memory that nothing but the run holds."""
    is_scalar = type(op.meta) in (int, float, bool, torch.dtype, torch.device) or is_metadata_read(
        op
    )
    return op.is_work and not is_scalar and op.raised is None and not gives_nothing(op)


def may_be_caught(op: Op, recording: Recording) -> bool:
    """Return whether the model goes on, or leaves traces, when an op raises.

    That is so under a handler, and where it changes things outside: a replay changes them at
    its end, the model's own Python before the error.
    """
    if not op.is_work or (op.kind is OpKind.SCALAR and op.target in HARMLESS):
        return False
    if op.target is error_of:
        return False
    return op.raised is not None or bool(recording.changes) or is_handled(op.scope, op.site)
