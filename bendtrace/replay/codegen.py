"""Writing a run: the ops in their recorded order, with the data guards in between."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from bendtrace.recording.contexts import Context
from bendtrace.recording.functions import FLEETING, VALUES, name_of
from bendtrace.recording.handlers import is_handled
from bendtrace.recording.parts import Access, AttributeKey, Change, PartKind
from bendtrace.recording.recorder import Recording
from bendtrace.recording.structure import Existing, Instance, Made
from bendtrace.recording.tape import (
    Guard,
    Op,
    OpKind,
    Tape,
    Test,
    refs_in,
)
from bendtrace.replay.analysis import Analysis, GuardKind, is_read
from bendtrace.replay.cheapest import ENTRIES, Call, cheapest, plain_values
from bendtrace.replay.source import Source, define, fails, gives_nothing, outcome, test_of

__all__ = ["HARMLESS", "RunWriter", "existing_in", "may_be_caught", "write_run"]

# Arithmetic that cannot raise on the numbers it was recorded for, so that it can be left out.
HARMLESS = frozenset(
    {
        operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.pos,
        abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        str, repr, format,
    }
)  # fmt: skip

_dispatch_modes = torch._C._len_torch_dispatch_stack  # seen in 2.13 to 2.15; test_cheapest notices


def write_run(
    recording: Recording,
    analysis: Analysis,
    entry: Context,
    start: int = 0,
    before: Tape | None = None,
    available: frozenset[int] = frozenset(),
    direct: bool = False,
) -> Source:
    """Write `run(A, E)`: the ops from `start` on, with the data guards in between.

    Args:
        recording: the run to repeat.
        analysis: its guards, sorted.
        entry: grad mode and so on when the run begins.
        start: the first op to carry out; those before were, by another run, whose values
            come in `E`.
        before: the tape of that other run, which tested the guards that it has.
        available: ops before `start` whose values are in `E`.
        direct: whether torch functions may be called by what they come down to, so that no
            function mode sees them.
    """
    writer = RunWriter(recording, analysis, entry, start, before, available)
    if direct:
        writer.call_directly()
    return writer.write()


class RunWriter:
    """Writes the code of a run; see `write_run` for what it is given."""

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        entry: Context,
        start: int,
        before: Tape | None,
        available: frozenset[int],
    ) -> None:
        self.recording = recording
        self.tape = recording.tape
        self.analysis = analysis
        self.entry = entry
        self.start = start
        self.available = available
        self.source = Source()
        # On the first path only what has to be tested in the run; further along a path that
        # branched off, the check before the run knew nothing of the guards.
        self.guards: dict[int, list[tuple[int, Guard]]] = {}
        tested: set[tuple[Any, ...]] = set()
        passed = before.guards if before is not None else ()
        known = {test_of(guard) for guard in passed if guard.position < start}
        for number, guard in enumerate(self.tape.guards):
            if guard.position < start and test_of(guard) in known:
                continue  # the other run tested it on its way
            in_run = start > 0 or analysis.kinds[number] is GuardKind.DATA
            if in_run and test_of(guard) not in tested:
                tested.add(test_of(guard))
                # An op before `start` is tested first thing; a later one where it happened.
                position = max(guard.position, start)
                self.guards.setdefault(position, []).append((number, guard))
        self.changes = recording.changes
        self.outputs: Any = (recording.root.output, [change.value for change in self.changes])
        self._takes_over = bool(available)  # whether `E` holds values
        self._current = entry  # what is in force where the code has come to
        self._direct: dict[int, Call] = {}

    def call_directly(self) -> None:
        """Call torch functions by what they come down to, wherever that makes no difference."""
        ops = [op for op in self.tape.ops[self.start :] if op.target in ENTRIES]
        plain = plain_values(self.tape) if ops else set()
        for op in ops:
            call = cheapest(op, plain)
            if call is not None and not may_be_caught(op, self.recording):
                self._direct[op.index] = call

    def write(self) -> Source:
        """Write it."""
        source, ops = self.source, self.tape.ops
        source.names["__tape__"] = self.tape
        source.line("def run(A, E):")
        source.indent = 1
        needed = self._needed()
        last_use, last_guard = self._last_uses(needed), self._last_divergence()
        self._define_parts(needed)
        late = self._define_available(needed)
        if self._takes_over and last_guard < self.start:
            source.line("E.clear()")
        switches = any(
            op.context != self.entry and op.kind is OpKind.CALL and op.index in needed
            for op in (*late, *ops[self.start :])
        )
        if switches:
            source.line("switch = Switch()")
            source.line("try:")
            source.indent = 2
        if any(call.gives_back is not None for call in self._direct.values()):
            self._ask_for_watchers()
        for op in late:
            self._switch_for(op)
            define(source, op)
            source.emitted.add(op.index)
        kept = [i for i in sorted(needed & self.available) if self._is_freed(ops[i])]
        for position in range(self.start, len(ops) + 1):
            self._write_position(position)
            if position == last_guard:
                if self._takes_over:
                    source.line("E.clear()")
                dead = [i for i in kept if last_use.get(i, -1) < position]
                if dead:
                    source.line("del " + ", ".join(f"v{i}" for i in dead))
                kept = [i for i in kept if last_use.get(i, -1) >= position]
            if position == len(ops):
                break
            op = ops[position]
            if position in self.tape.forgets:
                source.line("forget_casts()")
            if position not in needed or op.kind in (OpKind.INPUT, OpKind.STATE):
                continue
            self._switch_for(op)
            self._carry_out(op)
            source.emitted.add(position)
            if position >= last_guard:
                self._free(op, position, last_use, kept)
            elif self._is_freed(op):
                kept.append(position)
        self._finish()
        if switches:
            source.indent = 1
            source.line("finally:")
            source.line("    switch.restore()")
        return source

    def _ask_for_watchers(self) -> None:
        self.source.names["asked"] = _dispatch_modes
        self.source.line("watched = asked()")

    def _needed(self) -> set[int]:
        """Ops to carry out, and the inputs and state among them."""
        roots: set[int] = {ref.index for ref in refs_in(self.outputs)}
        for listed in self.guards.values():
            for _, guard in listed:
                roots.add(guard.index)
                if guard.test in (Test.SAME, Test.OTHER):
                    roots.add(guard.expected)
        for op in self.tape.ops[self.start :]:
            if not self._droppable(op):
                roots.add(op.index)
        needed: set[int] = set()
        waiting = list(roots)
        while waiting:
            index = waiting.pop()
            if index in needed:
                continue
            needed.add(index)
            if index not in self.available:
                op = self.tape.ops[index]
                waiting += [ref.index for ref in refs_in((op.args, op.kwargs))]
        return needed

    def _last_divergence(self) -> int:
        """The last position at which the run can depart; until there, all values are kept."""
        caught = (
            op.index + 1
            for op in self.tape.ops[self.start :]
            if may_be_caught(op, self.recording) and op.kind in (OpKind.CALL, OpKind.SCALAR)
        )
        return max(max(self.guards, default=-1), max(caught, default=-1))

    def _droppable(self, op: Op) -> bool:
        """Whether an op that nothing needs can be left out without anybody noticing."""
        if op.kind in (OpKind.INPUT, OpKind.STATE):
            return True
        if op.raised is not None or not self.analysis.fixed_metadata:
            return False
        if op.kind is OpKind.CALL and name_of(op.target) in FLEETING:
            return False
        if op.kind is OpKind.SCALAR:
            return op.target in HARMLESS
        return is_read(op) or _only_writes(op)

    def _last_uses(self, needed: set[int]) -> dict[int, int]:
        last: dict[int, int] = {}
        for index in sorted(needed):
            op = self.tape.ops[index]
            for ref in refs_in((op.args, op.kwargs)):
                last[ref.index] = max(index, last.get(ref.index, -1))
        for position, listed in self.guards.items():
            for _, guard in listed:
                used = [guard.index]
                if guard.test in (Test.SAME, Test.OTHER):
                    used.append(guard.expected)
                for index in used:
                    last[index] = max(position, last.get(index, -1))
        for ref in refs_in(self.outputs):
            last[ref.index] = len(self.tape.ops) + 1
        return last

    def _free(self, op: Op, position: int, last_use: dict[int, int], kept: list[int]) -> None:
        """Forget what nothing uses any more, as the model's own variables would."""
        used = {ref.index for ref in refs_in((op.args, op.kwargs))} | {op.index}
        dead = [
            index
            for index in sorted(used)
            if last_use.get(index, -1) <= position
            and (index >= self.start or index in kept)
            and self._is_freed(self.tape.ops[index])
        ]
        if dead:
            self.source.line("del " + ", ".join(f"v{index}" for index in dead))

    @staticmethod
    def _is_freed(op: Op) -> bool:
        """Whether the value of an op takes memory that nothing but the run holds."""
        return (
            op.kind in (OpKind.CALL, OpKind.SCALAR)
            and not _is_scalar(op)
            and op.raised is None
            and not gives_nothing(op)
        )

    def _define_parts(self, needed: set[int]) -> None:
        """Take the arguments and state that are used out of their containers."""
        wanted: set[int] = set()
        waiting = [self.tape.ops[i].target for i in needed if self._is_part(i)]
        waiting += [e.part for e in existing_in(self.outputs)]
        for index in needed - self.available:
            op = self.tape.ops[index]
            waiting += [e.part for e in existing_in((op.args, op.kwargs))]
        waiting += [change.part for change in self.changes]
        while waiting:
            part = waiting.pop()
            part = part.value if part.kind is PartKind.ALIAS else part
            if part.index not in wanted:
                wanted.add(part.index)
                if part.parent is not None:
                    waiting.append(part.parent)
        for part in self.recording.surroundings.parts:
            if part.index in wanted:
                name = self.source.part(part)
                if part.access is not Access.FIXED:
                    self.source.line(f"{name} = {self.source.reach(part)}")
        for index in sorted(needed):
            if self._is_part(index):
                self.source.line(f"v{index} = {self.source.part(self.tape.ops[index].target)}")
                self.source.emitted.add(index)

    def _is_part(self, index: int) -> bool:
        op = self.tape.ops[index]
        return index not in self.available and op.kind in (OpKind.INPUT, OpKind.STATE)

    def _define_available(self, needed: set[int]) -> list[Op]:
        """Take over values; return what the other run had left out and is needed now."""
        late = []
        for index in sorted(needed):
            op = self.tape.ops[index]
            if index in self.available:
                if not gives_nothing(op):
                    self.source.line(f"v{index} = E['v{index}']")
            elif index < self.start and op.kind not in (OpKind.INPUT, OpKind.STATE):
                late.append(op)
        return late

    def _write_position(self, position: int) -> None:
        """Write what comes before an op."""
        for number, guard in self.guards.get(position, ()):
            self._depart_unless(number, guard)

    def _switch_for(self, op: Op) -> None:
        """Write the switch to the grad mode and so on that an op runs under."""
        if op.kind is OpKind.CALL and op.context != self._current:
            self.source.line(f"switch.to({self.source.constant(op.context)})")
            self._current = op.context

    def _carry_out(self, op: Op) -> None:
        source, direct = self.source, self._direct.get(op.index)
        call = source.call(op) if direct is None else source.direct(direct)
        statement = call if gives_nothing(op) else f"v{op.index} = {call}"
        if op.raised is None:
            source.line(statement, op.index)
            return
        # The model caught this. If it does not happen again, the path is another.
        number = -1 - op.index
        source.line(f"try: {statement}", op.index)
        source.line(f"except {source.constant(op.raised.type)} as error:")
        if op.raised.text is not None:
            source.line(f"    if str(error) != {op.raised.text!r}: raise")
        # Without its traceback, which would keep all values alive in a cycle.
        source.line(f"    v{op.index} = error.with_traceback(None)")
        source.line(f"else: return Departure({number}, None, locals())")

    def _fails(self, guard: Guard) -> str:
        return fails(self.source, guard)

    def _depart_unless(self, number: int, guard: Guard) -> None:
        source = self.source
        now = outcome(guard)
        source.line(
            f"if {self._fails(guard)}: return Departure({number}, {now}, locals())",
            guard.index,
        )

    def _finish(self) -> None:
        source = self.source
        source.shared = _shared_in(self.outputs)
        values = [source.value(change.value) for change in self.changes]
        for change, value in zip(self.changes, values, strict=True):
            source.line(_store(source, change, value))
        output = source.value(self.recording.root.output)
        source.line(f"return {output}")


def _shared_in(value: Any) -> frozenset[int]:
    """Find the containers that are in a value more than once."""
    counts: Counter[int] = Counter()

    def count(item: Any) -> None:
        if isinstance(item, (tuple, list, dict)):
            counts[id(item)] += 1
        if isinstance(item, Instance):
            count(item.items)
            count(item.attributes)
        elif isinstance(item, Made):
            count(item.args)
        elif isinstance(item, dict):
            for inner in item.values():
                count(inner)
        elif isinstance(item, (tuple, list)):
            for inner in item:
                count(inner)

    count(value)
    return frozenset(key for key, times in counts.items() if times > 1)


def _store(source: Source, change: Change, value: str) -> str:
    holder = source.part(change.part)
    if isinstance(change.key, AttributeKey):
        name = change.key.name
        place = f"{holder}.__dict__[{name!r}]"
        if change.key.access is Access.ATTRIBUTE:
            if change.deleted:
                return f"delattr({holder}, {name!r})"
            return f"object.__setattr__({holder}, {name!r}, {value})"
    elif change.key is None:
        place = f"{holder}[:]"
    else:
        place = f"{holder}[{source.constant(change.key)}]"
    return f"del {place}" if change.deleted else f"{place} = {value}"


def existing_in(value: Any) -> Iterable[Existing]:
    """Yield what was there before the run in recorded arguments, or in what it gave."""
    if isinstance(value, Existing):
        yield value
    elif isinstance(value, Instance):
        yield from existing_in((value.items, value.attributes))
    elif isinstance(value, Made):
        yield from existing_in(value.args)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from existing_in(item)
    elif isinstance(value, dict):
        yield from existing_in(tuple(value.values()))


def may_be_caught(op: Op, recording: Recording) -> bool:
    """Whether the model goes on, or leaves traces, when an op raises.

    That is so under a handler, and where it changes things outside: a replay changes them at
    its end, the model's own Python before the error.
    """
    if op.kind is OpKind.SCALAR:
        if op.target in HARMLESS:
            return False
    elif op.kind is not OpKind.CALL:
        return False
    return op.raised is not None or bool(recording.changes) or is_handled(op)


def _only_writes(op: Op) -> bool:
    """Whether an op does no more than make the text of a tensor, which it can of any."""
    return VALUES.get(op.target) == "format" and not any(op.args[1:])


def _is_scalar(op: Op) -> bool:
    return type(op.meta) in (int, float, bool, torch.dtype, torch.device) or is_read(op)
