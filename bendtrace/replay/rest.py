"""The rest of a recorded run: which of its ops are needed once the values of some are given."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bendtrace.recording.functions import FLEETING, is_gate, name_of
from bendtrace.recording.handlers import is_handled
from bendtrace.recording.parts import Access, Change, Part, PartKind
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Guard, ModuleCall, Op, OpKind, Ref, Test, refs_in
from bendtrace.recording.writes import works_in_place
from bendtrace.replay.analysis import Analysis, GuardKind, is_read
from bendtrace.replay.codegen import _HARMLESS as HARMLESS
from bendtrace.replay.codegen import _existing_in as existing_in
from bendtrace.replay.source import test_of

__all__ = ["Cut", "Lack", "Rest", "argument_of"]

_IDENTITY = (Test.SAME, Test.OTHER)
_OUTSIDE = (OpKind.INPUT, OpKind.STATE)
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


@dataclass(frozen=True)
class Cut:
    """From where on a given value counts, in place of the one that an op gives.

    Attributes:
        index: the op.
        start: the first position on the tape at which it counts.
        slot: number of the given value.
        call: the call of a module that gives it; None if it is the op itself.
    """

    index: int
    start: int
    slot: int
    call: ModuleCall | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Lack:
    """An argument that the rest needs, and that is not there.

    Attributes:
        part: the part of it that is needed.
        chain: what needs it: the ops from there to the rest, the last one needed first.
    """

    part: Part
    chain: tuple[int, ...]


class Rest:
    """What is left of a recorded run once some values are given.

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
        passed: tests (see `test_of`) that were made before `start`.

    Attributes:
        needed: the ops to carry out, and the inputs and state among what they use.
        guards: the guards to test, with their numbers.
        changes: the changes of the surroundings that belong to the rest.
        used: the cuts that matter.
        written: slots of given values that the rest writes to, or may.
        is_straight: whether nothing can lead it along another path.
        lacks: what is missing; empty if the rest can be run.
        unclear: why it cannot be told from the run what is meant; "" if it can.
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
        passed: frozenset[Any] = frozenset(),
    ) -> None:
        self.recording = recording
        self.start = start
        self.available = available
        self.needed: set[int] = set()
        self.guards: dict[int, Guard] = {}
        self.changes: list[Change] = []
        self.used: set[Cut] = set()
        self.lacks: list[Lack] = []
        self.unclear = ""
        self._ops = recording.tape.ops
        self._analysis = analysis
        self._missing = missing
        self._is_checked = is_checked
        self._passed = passed
        self._cuts: dict[int, list[Cut]] = {}
        for cut in sorted(cuts, key=lambda cut: cut.start):
            self._cuts.setdefault(cut.index, []).append(cut)
        self._root = recording.root
        self._why: dict[int, int] = {}  # for what is needed, what needs it
        self._slots, self._lacking = self._follow()
        self._dropped = self._before_cuts()
        self._settle()
        self.written = frozenset(self._written())
        self.is_straight = not self.guards and not any(
            op.raised is not None or is_handled(op)
            for op in map(self._ops.__getitem__, self.needed)
        )
        self.unclear = self.unclear or next(filter(None, map(self._unclear, self.used)), "")

    # What a reference means

    def cut_at(self, index: int, position: int, scope: ModuleCall | None = None) -> Cut | None:
        """Return the cut that counts for the value of an op at a position, if one does.

        Args:
            index: the op.
            position: where the value is used.
            scope: for a guard, the call that it was put in.
        """
        found = None
        for cut in self._cuts.get(index, ()):
            if cut.start > position:
                break
            # What a call asks at its very end is still about its own value.
            if cut.start < position or cut.call is None or not _is_in(scope, cut.call):
                found = cut
        return found

    def _follow(self) -> tuple[list[int], list[bool]]:
        """For each op, the slots that its own value comes from, as bits; and if inputs lack."""
        slots: list[int] = []
        lacking: list[bool] = []
        for op in self._ops:
            mask, lacks = 0, False
            if op.kind is OpKind.INPUT:
                lacks = argument_of(op.target) in self._missing
            for index in _used_by(op):
                cut = self.cut_at(index, op.index)
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
        cut = self.cut_at(index, position, scope)
        return self._slots[index] if cut is None else 1 << cut.slot

    def _lacks(self, index: int, position: int, scope: ModuleCall | None = None) -> bool:
        return self.cut_at(index, position, scope) is None and self._lacking[index]

    def _before_cuts(self) -> list[int]:
        """Return the ops whose values only led to what is given now, or may have, in order."""
        found: set[int] = set()
        waiting = list(self._cuts)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += _used_by(self._ops[index])
        return sorted(index for index in found if _is_work(self._ops[index]))

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
            self._sorted = sorted(i for i in self.needed if _is_work(self._ops[i]))
            self._add_changes()
            self._add_effects()
            self._add_guards()

    def _size(self) -> int:
        return len(self.needed) + len(self.guards) + len(self.changes) + len(self.used)

    def _need(
        self,
        index: int,
        position: int,
        scope: ModuleCall | None,
        by: int,
        writer: int | None = None,
    ) -> None:
        """Note that a value is needed at a position, with all that it is made from.

        Args:
            index: the op that gives it.
            position: where.
            scope: for a guard, the call that it was put in.
            by: the op that needs it; -1 for the output and for guards.
            writer: the op that wrote to it last, if one did.
        """
        waiting = [(index, position, scope, by, writer)]
        while waiting:
            index, position, scope, by, writer = waiting.pop()
            cut = self.cut_at(index, position, scope)
            if cut is not None:
                self.used.add(cut)
            if writer is not None and (cut is None or writer >= cut.start):
                if self._is_cut(self._ops[writer]):
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
            for ref in refs_in((op.args, op.kwargs)):
                waiting.append((ref.index, index, None, index, op.reads.get(ref.index)))

    def _use(self, part: Part, by: int) -> None:
        if argument_of(part) in self._missing:
            chain = []
            while by >= 0:
                chain.append(by)
                by = self._why.get(by, -1)
            self.lacks.append(Lack(part, tuple(chain)))

    # Changes of the surroundings

    def _add_changes(self) -> None:
        end = len(self._ops)
        for change in self.recording.changes:
            if not self._belongs(change) or change in self.changes:
                continue
            self.changes.append(change)
            self._use(change.part, -1)
            for existing in existing_in(change.value):
                self._use(existing.part, -1)
            for ref in refs_in(change.value):
                self._need(ref.index, end, None, -1)
                for op in self._ops:
                    if op.writes and ref.index in op.writes and self._is_open(op):
                        self._need(op.index, 0, None, -1)
        # In the order in which they were found.
        self.changes.sort(key=self.recording.changes.index)

    def _is_open(self, op: Op) -> bool:
        return op.index >= self.start and op.index not in self.needed

    def _belongs(self, change: Change) -> bool:
        """Whether a change is made by the rest."""
        holder = _module_of(change)
        refs = [ref.index for ref in refs_in(change.value)]
        end = len(self._ops)
        cuts = [self.cut_at(index, end) for index in refs]
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
        computed = [index for index in refs if _is_work(self._ops[index])]
        if computed:
            return any(self._takes_place(self._ops[i]) or i in self.needed for i in computed)
        calls = [c for c in self.recording.tape.calls if holder and c.path == holder]
        return not calls or any(self._takes_part(call) for call in calls)

    # Effects

    def _add_effects(self) -> None:
        known = self.needed | self.available | set(self._dropped)
        for op in self._ops:
            if op.index in known or self._is_cut(op) or self._is_droppable(op):
                continue
            if self._takes_place(op):
                self._need(op.index, 0, None, -1)

    def _is_cut(self, op: Op) -> bool:
        return any(cut.start == op.index + 1 for cut in self._cuts.get(op.index, ()))

    def _is_droppable(self, op: Op) -> bool:
        """Whether an op that nothing needs can be left out without anybody noticing."""
        if op.kind in _OUTSIDE:
            return True
        if op.raised is not None or not self._analysis.fixed_metadata:
            return False
        if op.kind is OpKind.CALL and name_of(op.target) in FLEETING:
            return False
        return is_read(op) or (op.kind is OpKind.SCALAR and op.target in HARMLESS)

    def _takes_place(self, op: Op) -> bool:
        """Whether an op that nothing needs belongs to the rest."""
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
        """Whether a call of a module belongs to the rest, in whole or in part."""
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
        return self.used or [cut for cuts in self._cuts.values() for cut in cuts]

    @property
    def _begin(self) -> int:
        return min((cut.start for cut in self._counting), default=len(self._ops))

    # Guards

    def _add_guards(self) -> None:
        for number, guard in enumerate(self.recording.tape.guards):
            if guard.position < self.start and test_of(guard) in self._passed:
                continue
            if number in self.guards or not self._matters(guard):
                continue
            self.guards[number] = guard
            reader = self._ops[guard.index]
            self._need(guard.index, guard.position, guard.scope, -1)
            if guard.test in _IDENTITY:
                self._need(guard.expected, guard.position, guard.scope, reader.index)
        for op in self._ops[self.start :]:  # whether an error was caught is a condition as well
            if (
                (op.raised is not None or is_handled(op))
                and op.kind is OpKind.CALL
                and op.index not in self.needed
                and not self._is_settled(op.scope)
                and (not self._lacking[op.index] or op.index >= self._begin)
            ):
                self._need(op.index, 0, None, -1)

    def _matters(self, guard: Guard) -> bool:
        position, scope = guard.position, guard.scope
        kind = self._kinds[id(guard)]
        if guard.test in _IDENTITY:  # no two names are mixed up of what is not computed
            return (
                guard.index in self.needed
                and self.cut_at(guard.index, position, scope) is None
                and not self._lacks(guard.expected, position, scope)
            )
        mask = self._mask(guard.index, position, scope)
        if kind is GuardKind.IMPLIED and not mask:
            return False  # it follows from what was checked before
        if kind is GuardKind.INPUT and not mask and self._is_checked:
            return False
        if guard.index in self.needed or guard.index in self.available:
            return True
        if self._is_settled(scope):
            return False
        # What cannot be asked any more is taken to have come out as it did, before the rest.
        return not self._lacks(guard.index, position, scope) or position >= self._begin

    @cached_property
    def _kinds(self) -> dict[int, GuardKind]:
        guards = self.recording.tape.guards
        return {id(g): kind for g, kind in zip(guards, self._analysis.kinds, strict=True)}

    def _is_settled(self, scope: ModuleCall) -> bool:
        """Whether what was decided there is over, and can only have led to what is given."""
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
        """Whether the value of an op comes from a given one."""
        return self._slots[index] > 0

    def late(self) -> list[Op] | None:
        """Return the ops before `start` to carry out now; None if it is too late for some.

        It is where an op carried out meanwhile has written to something, or would see a
        given value where it had its own.
        """
        found = [self._ops[i] for i in sorted(self.needed) if i < self.start]
        work = [op for op in found if _is_work(op)]
        written: dict[int, int] = {}  # by whom last
        for index in self.available:
            for name in self._written_names(self._ops[index]):
                written[name] = max(index, written.get(name, -1))
        for op in work:
            if op.writes or op.raised is not None:
                return None
            for ref in refs_in((op.args, op.kwargs)):
                if written.get(self._owner(ref.index), -1) > op.index:
                    return None
                begun = any(cut.start <= self.start for cut in self._cuts.get(ref.index, ()))
                if begun and self.cut_at(ref.index, op.index) is None:
                    return None
        return work

    def disturbs(self, done: Collection[int], until: int) -> bool:
        """Whether ops that were left out up to a position would now see what others wrote.

        Args:
            done: the ops that were carried out.
            until: the position.
        """
        written: dict[int, int] = {}
        for index in done:
            for name in self._written_names(self._ops[index]):
                written[name] = max(index, written.get(name, -1))
        return any(
            written.get(self._owner(ref.index), -1) > op.index
            for op in self._ops[:until]
            if op.index not in done and op.kind is OpKind.CALL
            for ref in refs_in((op.args, op.kwargs))
        )

    def has_effects(self, done: Collection[int]) -> bool:
        """Whether some ops have changed something besides what they gave, or may have."""
        return any(
            is_gate(op) or any(self._ops[name].kind in _OUTSIDE for name in self._written_names(op))
            for op in map(self._ops.__getitem__, done)
        )

    def _written_names(self, op: Op) -> set[int]:
        return {self._owner(index) for index in op.writes}

    def _owner(self, index: int) -> int:
        """Return the op that gave the memory which a value is in, as far as its name tells."""
        op = self._ops[index]
        while op.kind in (OpKind.CALL, OpKind.SCALAR) and (
            works_in_place(op) or name_of(op.target) in _VIEWS
        ):
            given = next(iter(refs_in(op.args)), None)
            if given is None:
                break
            op = self._ops[given.index]
        return op.index

    def _written(self) -> Iterator[int]:
        """Yield the slots of given values that ops of the rest write to, or may."""
        for index in self.needed:
            op = self._ops[index]
            # Some change a tensor's shape, which does not count as writing.
            named = [ref.index for ref in refs_in(op.args[:1])] if works_in_place(op) else []
            for name in (*op.writes, *named):
                mask = self._mask(name, index)
                yield from (slot for slot in range(mask.bit_length()) if mask >> slot & 1)

    def _unclear(self, cut: Cut) -> str:
        """Say why it is unclear what is meant by the value of a cut; "" if it is not."""
        op, call = self._ops[cut.index], cut.call
        if is_gate(op):
            if op.index not in self._again:
                return ""  # what is inserted made a tensor that nobody else has
            op = self._ops[self._again[op.index]]
        if works_in_place(op) and self._ops[self._owner(op.index)].kind in _OUTSIDE:
            return "it writes to what was there before the run"
        first = self._first_name(op.index)
        if call is None:
            hands_on = op.index in self._again
        else:
            hands_on = not call.start <= first < call.stop or op.kind in _OUTSIDE
            if sum(self._first_name(ref.index) == first for ref in refs_in(call.output)) > 1:
                return "the tensor is more than once in what it gives"
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
            guard.index: guard.expected
            for guard in self.recording.tape.guards
            if guard.test is Test.SAME
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
            ref.index in names
            for op in self._ops[cut.start :]
            if op.index not in names
            for ref in refs_in((op.args, op.kwargs))
        )
        given = [self._root.output, *(change.value for change in self.recording.changes)]
        return uses + sum(ref.index in names for ref in refs_in(given))


def _used_by(op: Op) -> list[int]:
    """Return the ops that an op uses: those that gave its arguments, and that wrote to them."""
    return [ref.index for ref in refs_in((op.args, op.kwargs))] + list(op.reads.values())


def _is_work(op: Op) -> bool:
    return op.kind in (OpKind.CALL, OpKind.SCALAR)


def _any_in(ordered: Sequence[int], call: ModuleCall) -> bool:
    """Whether any of some numbers, in order, is of an op in a call."""
    found = bisect_left(ordered, call.start)
    return found < len(ordered) and ordered[found] < call.stop


def _is_in(scope: ModuleCall | None, call: ModuleCall) -> bool:
    while scope is not None and scope is not call:
        scope = scope.parent
    return scope is call


def argument_of(part: Part) -> int | None:
    """Return the position of the argument that a part is in; None if it is in none."""
    inner: Part | None = part
    while inner is not None and inner.kind is PartKind.ALIAS:
        inner = inner.value
    while inner is not None and inner.parent is not None:
        inner = inner.parent
    if inner is None or inner.access is not Access.ROOT:
        return None
    return int(inner.key)


def _module_of(change: Change) -> str:
    """Return the qualified name of the module that a change is in, as far as its label tells."""
    label = change.part.label
    return label.removeprefix("self.") if label.startswith("self.") else ""


def _is_below(path: str, module: str) -> bool:
    return bool(path) and (path == module or path.startswith(f"{module}."))


def _decides(output: Any) -> bool:
    """Whether what a call gave holds numbers or the like that Python may go by."""
    if isinstance(output, (tuple, list)):
        return any(map(_decides, output))
    if isinstance(output, dict):
        return any(map(_decides, output.values()))
    return isinstance(output, (bool, int, float, str)) and not isinstance(output, Ref)
