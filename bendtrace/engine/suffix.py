"""The suffix of a recorded run: which of its ops are needed once the values of some are given."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from bendtrace.engine.codegen import RunWriter
from bendtrace.engine.guard_kinds import Analysis, GuardKind
from bendtrace.engine.schedule import Schedule, is_droppable
from bendtrace.engine.source import Code
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind, EnvironmentChange
from bendtrace.tape.contexts import Context
from bendtrace.tape.guards import ErrorGuard, SameGuard
from bendtrace.tape.structure import existing_in
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind, argument_leaves, is_handled, refs_in
from bendtrace.watch.functions import is_gate, table_name
from bendtrace.watch.writes import works_in_place


class Suffix:
    """The rest of a recorded run that remains to be done if some values are given.

    Needed is what the output depends on, and what changes of the model's state do that belong to
    the rest; where a given value counts, nothing before it. Then ops that nothing needs, but
    whose being left out could be noticed (they write, draw random numbers, may raise), belong to
    the rest

    - if they are in a call of a module that takes part in it: with ops that are needed, and no
      cut inside;
    - in one with a cut inside, or outside of all modules: if they come after the first cut;

    and not if they are in a call that did nothing but compute what is given now. And the
    conditions that Python asked for matter, but for those in calls that are over before the rest
    begins and take no part in it.

    Args:
        recording: the run.
        analysis: its guards, sorted.
        cuts: where which values are given.
        missing: which arguments are not there, by their position.
        is_checked: whether the conditions on arguments and state have been tested already.
        start: the first op that is not carried out yet.
        available: ops before it whose values are there.
        tests_before: tests (see `Guard.key`) that were made before `start`.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        cuts: Collection[Cut],
        missing: frozenset[int] = frozenset(),
        *,
        is_checked: bool = False,
        start: int = 0,
        available: frozenset[int] = frozenset(),
        tests_before: frozenset[Any] = frozenset(),
    ) -> None:
        self.recording = recording
        self.cuts: Cuts = Cuts(cuts)
        self.memory: TensorMemory = TensorMemory(recording)  # what the ops write to
        self.start = start
        self.available = available
        self.needed: set[int] = set()  # ops to carry out, and the inputs and state that they use
        self.guards: dict[int, Guard] = {}  # the guards to test, with their numbers
        self._changes: set[int] = set()  # their numbers
        self.used: set[Cut] = set()  # those that matter
        self.lacks: list[MissingArgument] = []  # what is missing; empty if the rest can be run
        self.unclear: str = ""  # why it cannot be told from the run what is meant; "" if it can
        self._ops = recording.tape.ops
        self._analysis = analysis
        self._missing = missing
        self._is_checked = is_checked
        self._tests_before = tests_before
        self._root = recording.root
        self._why: dict[int, int] = {}  # for what is needed, what needs it
        self._slots, self._lacking = self._follow()
        self._dropped = self._before_cuts()
        self._settle()
        # The changes of the environment that belong to the rest.
        self.changes: list[EnvironmentChange] = [
            recording.changes[number] for number in sorted(self._changes)
        ]
        # Slots of given values that the model may write to.
        self.written: frozenset[int] = frozenset(self._written())
        # True if nothing can lead it along another path.
        self.is_straight: bool = not self.guards and not any(
            op.raised is not None or is_handled(op.scope, op.site)
            for op in map(self._ops.__getitem__, self.needed)
        )
        self.unclear = self.unclear or next(filter(None, map(self.memory.unclear, self.used)), "")

    # What values come from

    def _follow(self) -> tuple[list[int], list[bool]]:
        """For each op, the slots that its own value comes from, as bits; and if inputs lack."""
        slots: list[int] = []
        lacking: list[bool] = []
        for op in self._ops:
            mask, lacks = 0, False
            if op.kind is OpKind.INPUT:
                lacks = argument_of(op.target) in self._missing
            for index in _used_ops(op):
                cut = self.cuts.at(index, op.index)
                mask |= slots[index] if cut is None else 1 << cut.slot
                lacks = lacks or (cut is None and lacking[index])
            if self._missing and not lacks:
                lacks = any(map(self._is_missing, existing_in((op.args, op.kwargs))))
            slots.append(mask)
            lacking.append(lacks)
        return slots, lacking

    def _is_missing(self, existing: Any) -> bool:
        return argument_of(existing.part) in self._missing

    def _mask(self, index: int, position: int, scope: ModuleCall | None = None) -> int:
        cut = self.cuts.at(index, position, scope)
        return self._slots[index] if cut is None else 1 << cut.slot

    def _lacks(self, index: int, position: int, scope: ModuleCall | None = None) -> bool:
        return self.cuts.at(index, position, scope) is None and self._lacking[index]

    def _before_cuts(self) -> list[int]:
        """Return the ops whose values may have led to given values only, in order."""
        found: set[int] = set()
        waiting = list(self.cuts.indices)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += _used_ops(self._ops[index])
        return sorted(index for index in found if self._ops[index].is_work)

    # What is needed

    def _settle(self) -> None:
        end = len(self._ops)
        output = self._root.output
        for existing in existing_in(output):
            self._use(existing.part, -1)
        for ref in refs_in(output):
            self._need(ref.index, end, None, -1, self.recording.output_reads.get(ref.index))
        done = -1
        while done != (done := self._size()):
            self._sorted = sorted(i for i in self.needed if self._ops[i].is_work)
            self._add_changes()
            self._add_effects()
            self._add_guards()

    def _size(self) -> int:
        return len(self.needed) + len(self.guards) + len(self._changes) + len(self.used)

    def _need(
        self,
        index: int,
        position: int,
        scope: ModuleCall | None,
        by: int,
        writer: int | None = None,
    ) -> None:
        """Note that a value is needed at a position, with all its sources.

        The scope is, for a guard, the call that it was put in. The op `by` needs the value, -1
        stands for the output and for guards; `writer` is the op that wrote to it last, if one did.
        """
        waiting = [(index, position, scope, by, writer)]
        while waiting:
            index, position, scope, by, writer = waiting.pop()
            cut = self.cuts.at(index, position, scope)
            if cut is not None:
                self.used.add(cut)
            if writer is not None and (cut is None or writer >= cut.start):
                if self.cuts.replaces(self._ops[writer]):
                    self.unclear = "it writes to a tensor that is also known by another name"
                waiting.append((writer, 0, None, by, None))
            if cut is not None or index in self.needed or index in self.available:
                continue
            self.needed.add(index)
            self._why[index] = by
            op = self._ops[index]
            if op.kind is OpKind.INPUT:
                self._use(op.target, index)
            for existing in existing_in((op.args, op.kwargs)):
                self._use(existing.part, index)
            waiting += [(i, index, None, index, op.reads.get(i)) for i in op.operands]

    def _use(self, part: Captured, by: int) -> None:
        if argument_of(part) in self._missing:
            chain = []
            while by >= 0:
                chain.append(by)
                by = self._why.get(by, -1)
            self.lacks.append(MissingArgument(part, tuple(chain)))

    # Changes of the environment

    def _add_changes(self) -> None:
        end = len(self._ops)
        for number, change in enumerate(self.recording.changes):
            if number in self._changes or not self._belongs(change):
                continue
            self._changes.add(number)
            self._use(change.part, -1)
            for existing in existing_in(change.value):
                self._use(existing.part, -1)
            for ref in refs_in(change.value):
                self._need(ref.index, end, None, -1)
                cut = self.cuts.at(ref.index, end)
                for op in self._ops[self.start if cut is None else max(cut.start, self.start) :]:
                    if ref.index in op.writes:
                        self._need(op.index, 0, None, -1)

    def _belongs(self, change: EnvironmentChange) -> bool:
        """Return whether a change is made by the rest."""
        holder = _module_of(change)
        refs = [ref.index for ref in refs_in(change.value)]
        end = len(self._ops)
        cuts = [self.cuts.at(index, end) for index in refs]
        if refs and all(
            cut is not None
            and cut.call is not None
            and (cut.call is self._root or _is_below(holder, cut.call.path))
            for cut in cuts
        ):
            return False  # what the module whose value is given keeps of its own
        if any(self._mask(index, end) for index in refs):
            return True
        if any(self._lacks(index, end) for index in refs):
            return False
        computed = [index for index in refs if self._ops[index].is_work]
        if computed:
            return any(self._takes_place(self._ops[i]) or i in self.needed for i in computed)
        calls = [c for c in self.recording.tape.calls if holder and c.path == holder]
        return not calls or any(self._takes_part(call) for call in calls)

    # Effects

    def _add_effects(self) -> None:
        indices = self.needed | self.available | set(self._dropped)
        for op in self._ops:
            if op.index in indices or self.cuts.replaces(op) or is_droppable(op, self._analysis):
                continue
            if self._takes_place(op):
                self._need(op.index, 0, None, -1)

    def _takes_place(self, op: Op) -> bool:
        """Return whether an op that nothing needs belongs to the rest."""
        for call in self._around(op.scope):
            inside = [
                cut for cut in self._counting if call.start <= cut.index and cut.start < call.stop
            ]
            if inside:
                return op.index >= min(cut.start for cut in inside)
            if _any_in(self._sorted, call):
                return True
            if _any_in(self._dropped, call):
                return False
        return op.index >= self._begin

    def _takes_part(self, call: ModuleCall) -> bool:
        """Return whether a call of a module belongs to the rest, in whole or in part."""
        return _any_in(self._sorted, call) or any(
            call.start <= cut.index and cut.start < call.stop for cut in self._counting
        )

    def _around(self, scope: ModuleCall | None) -> Iterator[ModuleCall]:
        """Yield the calls around a place but for the outermost, the innermost first."""
        while scope is not None and scope is not self._root and scope.parent is not None:
            yield scope
            scope = scope.parent

    @property
    def _counting(self) -> Collection[Cut]:
        """The cuts that matter; all of them as long as that is not known."""
        return self.used or list(self.cuts)

    @property
    def _begin(self) -> int:
        return min((cut.start for cut in self._counting), default=len(self._ops))

    # Guards

    def _add_guards(self) -> None:
        for number, guard in enumerate(self.recording.tape.guards):
            if isinstance(guard, ErrorGuard) and guard.index in self.available:
                continue  # it is tested where the op is carried out
            if guard.position < self.start and guard.key in self._tests_before:
                continue
            if number in self.guards or not self._matters(guard):
                continue
            self.guards[number] = guard
            reader = self._ops[guard.index]
            self._need(guard.index, guard.position, guard.scope, -1)
            if guard.other is not None:
                self._need(guard.other, guard.position, guard.scope, reader.index)
        for op in self._ops[self.start :]:  # whether an error was caught is a condition as well
            if (
                (op.raised is not None or is_handled(op.scope, op.site))
                and op.kind is OpKind.CALL
                and op.index not in self.needed
                and not self._is_decided(op.scope)
                and (not self._lacking[op.index] or op.index >= self._begin)
            ):
                self._need(op.index, 0, None, -1)

    def _matters(self, guard: Guard) -> bool:
        position, scope = guard.position, guard.scope
        kind = self._kinds[id(guard)]
        if guard.other is not None:  # no two names are mixed up of what is not computed
            return (
                guard.index in self.needed
                and self.cuts.at(guard.index, position, scope) is None
                and not self._lacks(guard.other, position, scope)
            )
        mask = self._mask(guard.index, position, scope)
        if kind is GuardKind.IMPLIED and not mask:
            return False  # it follows from what was checked before
        if kind is GuardKind.INPUT and not mask and self._is_checked:
            return False
        if guard.index in self.needed or guard.index in self.available:
            return True
        if self._is_decided(scope):
            return False
        # What cannot be asked any more is taken to have come out as it did, before the rest.
        return not self._lacks(guard.index, position, scope) or position >= self._begin

    @cached_property
    def _kinds(self) -> dict[int, GuardKind]:
        guards = self.recording.tape.guards
        return {id(g): kind for g, kind in zip(guards, self._analysis.kinds, strict=True)}

    def _is_decided(self, scope: ModuleCall) -> bool:
        """Return whether the decisions there are over, and can only have led to known values."""
        for call in self._around(scope):
            if (
                not self._takes_part(call)
                and (call.stop <= self._begin or _any_in(self._dropped, call))
                and not _decides(call.output)
                and not any(
                    _is_below(_module_of(change), call.path) and not any(refs_in(change.value))
                    for change in self.recording.changes
                )
            ):
                return True
        return False

    # What has to be done with care

    def is_after_cuts(self, index: int) -> bool:
        """Return whether the value of an op comes from a given one."""
        return self._slots[index] > 0

    def is_too_late(self) -> bool:
        """Return whether ops before `start` are needed that cannot be carried out any more.

        It is where an op carried out meanwhile has written to something, or would see a
        given value where it had its own.
        """
        written = self.memory.written_by(self.available)
        return any(
            op.writes
            or op.raised is not None
            or self.memory.sees(op, written)
            or any(
                self.cuts.has_begun(index, self.start) and self.cuts.at(index, op.index) is None
                for index in op.operands
            )
            for op in map(self._ops.__getitem__, self.needed)
            if op.index < self.start and op.is_work
        )

    def disturbs(self, done: Collection[int], until: int) -> bool:
        """Return whether ops left out up to a position would now see what others wrote."""
        written = self.memory.written_by(done)
        return any(
            self.memory.sees(op, written)
            for op in self._ops[:until]
            if op.index not in done and op.kind is OpKind.CALL
        )

    def _written(self) -> Iterator[int]:
        """Yield the slots of given values that are written to, or may be, now or in later calls."""
        masks = []
        for index in self.needed:
            op = self._ops[index]
            # Some change a tensor's shape, which does not count as writing.
            named = [ref.index for ref in refs_in(op.args[:1])] if works_in_place(op) else []
            masks += [self._mask(name, index) for name in (*op.writes, *named)]
        for change in self.changes:  # the model keeps it
            masks += [self._mask(ref.index, len(self._ops)) for ref in refs_in(change.value)]
        for mask in masks:
            yield from (slot for slot in range(mask.bit_length()) if mask >> slot & 1)


def _used_ops(op: Op) -> list[int]:
    """Return the ops that an op uses: those that gave its arguments, and that wrote to them."""
    return op.operands + list(op.reads.values())


def _any_in(ordered: Sequence[int], call: ModuleCall) -> bool:
    """Return whether any of some numbers, in order, is of an op in a call."""
    found = bisect_left(ordered, call.start)
    return found < len(ordered) and ordered[found] < call.stop


def _module_of(change: EnvironmentChange) -> str:
    """Return the qualified name of the module that a change is in, as far as its label tells."""
    label = change.part.label
    return label.removeprefix("self.") if label.startswith("self.") else ""


def _is_below(path: str, module: str) -> bool:
    return bool(path) and (path == module or path.startswith(f"{module}."))


def _decides(output: Any) -> bool:
    """Return whether the output of a call holds numbers or the like that Python may go by."""
    return any(isinstance(leaf, (bool, int, float, str)) for leaf in argument_leaves(output))


class SuffixCode(NamedTuple):
    """The rest of a run as code."""

    recording: Recording  # the run, without the changes that do not belong to the rest
    code: Code  # takes the values that it goes on from by their names
    casts: bool  # whether some of it runs under autocast


def write_rest(rest: Suffix, analysis: Analysis, entry: Context) -> SuffixCode:
    """Write the code of the rest of a run.

    It takes the given values, and for a run that goes on those computed so far, from `E`:
    `s<slot>` and `v<op>`.
    """
    whole = rest.recording
    kept = Recording(whole.tape, whole.environment, whole.root)
    kept.changes, kept.output_reads = rest.changes, whole.output_reads
    schedule = Schedule(
        kept, analysis, entry, rest.guards, start=rest.start, available=rest.available,
        needed=rest.needed | rest.available,
    )  # fmt: skip
    code = _RestWriter(schedule, rest).write()
    return SuffixCode(kept, code, any(op.context.autocast for op in whole.tape.ops))


class _RestWriter(RunWriter):
    """Writes `run(A, E)` with the given values in place of the ops that led to them."""

    _takes_over = True

    def __init__(self, schedule: Schedule, rest: Suffix) -> None:
        super().__init__(schedule)
        self._rest = rest
        self._cuts: dict[int, list[Cut]] = {}
        for cut in sorted(rest.used, key=lambda cut: cut.start):
            self._cuts.setdefault(max(cut.start, rest.start), []).append(cut)

    def _enter(self) -> None:
        for slot in sorted({cut.slot for cut in self._rest.used}):
            self.source.line(f"s{slot} = E['s{slot}']")
        super()._enter()

    def _write_guards(self, position: int) -> None:
        """Write the guards at a position, and from when on which given values count."""
        cuts = self._cuts.get(position, [])
        guards = self.schedule.guards.get(position, [])
        ahead = [item for item in guards if self._is_ahead(item[1], cuts)]
        for number, guard in ahead:
            self._depart_unless(number, guard)
        for cut in cuts:
            self.source.line(f"v{cut.index} = s{cut.slot}")
        for number, guard in guards:
            if (number, guard) not in ahead:
                self._depart_unless(number, guard)

    def _is_ahead(self, guard: Guard, cuts: list[Cut]) -> bool:
        """Return whether a guard is about the values that calls have had before some cuts."""
        return any(
            cut.index in guard.operands
            and self._rest.cuts.at(cut.index, guard.position, guard.scope) is not cut
            for cut in cuts
        )


# What the values given for some ops of a run replace: where they count, and what they touch.
#
# `Cuts` says where on a tape given values count, in place of those that ops give; `TensorMemory`
# which ops write to memory that others see, going by their names.


@dataclass(frozen=True)
class Cut:
    """From where on a given value counts, in place of the one that an op gives."""

    index: int
    start: int  # the first position on the tape at which it counts
    slot: int  # number of the given value
    # The call of a module that gives it; None if it is the op itself.
    call: ModuleCall | None = field(default=None, compare=False)


@dataclass(frozen=True)
class MissingArgument:
    """An argument that is needed, and that is not there."""

    part: Captured  # the part of it that is needed
    chain: tuple[int, ...]  # the ops from there to what needs it in the end


class Cuts:
    """All the cuts of a tape."""

    def __init__(self, cuts: Collection[Cut]) -> None:
        self._of: dict[int, list[Cut]] = {}
        for cut in sorted(cuts, key=_when):
            self._of.setdefault(cut.index, []).append(cut)

    def __iter__(self) -> Iterator[Cut]:
        return (cut for cuts in self._of.values() for cut in cuts)

    @property
    def indices(self) -> Collection[int]:
        """The ops in place of whose values others are given."""
        return self._of.keys()

    def at(self, index: int, position: int, scope: ModuleCall | None = None) -> Cut | None:
        """Return the cut that counts for the value of an op used at a position, if one does.

        The scope is, for a guard, the call that it was put in.
        """
        found = None
        for cut in self._of.get(index, ()):
            if cut.start > position:
                break
            # What a call asks at its very end is still about its own value.
            if cut.start < position or cut.call is None or not _is_within_call(scope, cut.call):
                found = cut
        return found

    def replaces(self, op: Op) -> bool:
        """Return whether nobody sees the value that an op itself gives."""
        return any(cut.start == op.index + 1 for cut in self._of.get(op.index, ()))

    def has_begun(self, index: int, position: int) -> bool:
        """Return whether a given value counts for an op at a position."""
        return any(cut.start <= position for cut in self._of.get(index, ()))


def _when(cut: Cut) -> tuple[int, bool, int]:
    """Say which cuts count later: of calls that end together the outer one's value does."""
    depth, call = 0, cut.call
    while call is not None:
        depth, call = depth + 1, call.parent
    return cut.start, cut.call is not None, -depth


def argument_of(part: Captured) -> int | None:
    """Return the position of the argument that a part is in; None if it is in none."""
    inner = part
    while inner.kind is CaptureKind.ALIAS:
        inner = inner.value
    while inner.parent is not None:
        inner = inner.parent
    return int(inner.key) if inner.access is Access.ROOT else None


def _is_within_call(scope: ModuleCall | None, call: ModuleCall) -> bool:
    while scope is not None and scope is not call:
        scope = scope.parent
    return scope is call


# What gives a view of what it is given, or can: where it is written to, so is what it came from.
_VIEWS = frozenset(
    {
        "T", "H", "mT", "mH", "as_strided", "chunk", "contiguous", "data", "detach", "diagonal",
        "expand", "expand_as", "flatten", "getitem", "__getitem__", "imag", "movedim", "moveaxis",
        "narrow", "permute", "ravel", "real", "reshape", "reshape_as", "select", "split", "squeeze",
        "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind",
        "unflatten", "unfold", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip


class TensorMemory:
    """The tensors of a run, and the known facts about their memory."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ops = recording.tape.ops

    def owner(self, index: int) -> int:
        """Return the op that gave the memory which a value is in, as far as names tell."""
        op = self._ops[index]
        while op.is_work and (works_in_place(op) or table_name(op.target) in _VIEWS):
            given = next(iter(refs_in(op.args)), None)
            if given is None:
                break
            op = self._ops[given.index]
        return op.index

    def written_by(self, done: Collection[int]) -> dict[int, int]:
        """Return the owners of the memory that some ops write to, each with the last to do so."""
        written: dict[int, int] = {}
        for index in done:
            for name in self._ops[index].writes:
                owner = self.owner(name)
                written[owner] = max(index, written.get(owner, -1))
        return written

    def sees(self, op: Op, written: dict[int, int]) -> bool:
        """Return whether an op, carried out late, would see what others have written meanwhile."""
        return any(written.get(self.owner(index), -1) > op.index for index in op.operands)

    def has_effects(self, done: Collection[int]) -> bool:
        """Return whether some ops change something besides their results, or may do so."""
        outside = any(self._ops[owner].is_given for owner in self.written_by(done))
        return outside or any(is_gate(self._ops[index]) for index in done)

    def unclear(self, cut: Cut) -> str:
        """Return why it is not known where the value of a node goes; "" if it is."""
        op, call = self._ops[cut.index], cut.call
        if is_gate(op):
            if op.index not in self._again:
                return ""  # what is inserted made a tensor that nobody else has
            op = self._ops[self._again[op.index]]
        if works_in_place(op) and self._ops[self.owner(op.index)].is_given:
            return "it writes to what was there before the run"
        first = self._first_name(op.index)
        if call is None:
            hands_on = op.index in self._again
        else:
            hands_on = not call.start <= first < call.stop or op.is_given
            if sum(self._first_name(ref.index) == first for ref in refs_in(call.output)) > 1:
                return "the tensor is more than once in its output"
        if hands_on and self._uses(cut, first) > 1:
            return (
                "it hands on a tensor that it was given, and the run does not tell whether those "
                "that use it afterwards mean the one or the other"
            )
        return ""

    @cached_property
    def _again(self) -> dict[int, int]:
        """For ops that gave a tensor which had another name already: that name."""
        return {
            guard.index: guard.other
            for guard in self._recording.tape.guards
            if isinstance(guard, SameGuard)
        }

    def _first_name(self, index: int) -> int:
        """Return the first op that gave a tensor, as far as the tape tells."""
        while True:
            op = self._ops[index]
            if index in self._again:
                index = self._again[index]
            elif works_in_place(op) and (given := next(iter(refs_in(op.args)), None)) is not None:
                index = given.index
            else:
                return index

    def _uses(self, cut: Cut, first: int) -> int:
        """Count what uses the tensor of a cut from there on, by any name."""
        names = {
            op.index
            for op in self._ops[cut.index :]
            if (op.index in self._again or works_in_place(op) or op.index == cut.index)
            and self._first_name(op.index) == first
        }
        uses = sum(
            index in names
            for op in self._ops[cut.start :]
            if op.index not in names
            for index in op.operands
        )
        recording = self._recording
        given = [recording.root.output, *(change.value for change in recording.changes)]
        return uses + sum(ref.index in names for ref in refs_in(given))
