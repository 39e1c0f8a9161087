"""Writing a segment: the ops from one state to another, or to the end of the run.

A segment is entered with the values that its state can still reach, its holes, and leaves with
those of the state where a question has another answer than the one recorded. Whatever no
state needs any more is forgotten at once, as the model's own variables would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bendtrace.recording.contexts import Context
from bendtrace.recording.parts import Access, Part, PartKind
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Guard, Op, OpKind, Ref, Test, refs_in
from bendtrace.replay.analysis import Analysis, GuardKind, is_read
from bendtrace.replay.codegen import RunWriter, existing_in
from bendtrace.replay.source import Departure, Source, define, outcome, test_of

__all__ = ["SegmentWriter", "Unlinked", "answer_of"]


class Unlinked(Exception):
    """A segment needs a value that its state does not hold."""


def answer_of(guard: Guard) -> object:
    """Return what came out of a question when it was recorded."""
    return True if guard.test in (Test.SAME, Test.OTHER) else guard.expected


class SegmentWriter(RunWriter):
    """Writes `run(A, E)`, where `E` lists the values of the holes and is emptied.

    Args:
        recording: the run to repeat.
        analysis: its guards, sorted.
        entry: grad mode and so on when a run begins.
        after: the guard, by its number, whose recorded answer leads into the segment; -1 for
            the beginning of the run.
        stop: the guard that it ends with, whatever the answer; None for the end of the run.
        is_first: whether input guards have been tested by the time the run begins.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        entry: Context,
        after: int,
        stop: int | None,
        is_first: bool = False,
    ) -> None:
        tape = recording.tape
        self._holes = tape.states[after].holes if after >= 0 else ()
        start = tape.guards[after].position if after >= 0 else 0
        super().__init__(recording, analysis, entry, start, None, frozenset(self._holes))
        self._stop = stop
        self._taken: set[int] = set()
        self._required: set[int] = set()  # the ops that are carried out, or computed late
        self._last_use: dict[int, int] = {}
        self._dying: dict[int, list[int]] = {}
        self._end = len(tape.ops) if stop is None else tape.guards[stop].position
        if stop is not None:
            self.outputs, self.changes = (None, []), []
        tested = {test_of(tape.guards[after])} if after >= 0 else set()
        last = len(tape.guards) - 1 if stop is None else stop
        self.guards = {}
        for number in range(after + 1, last + 1):
            guard = tape.guards[number]
            if is_first and analysis.kinds[number] is not GuardKind.DATA and number != stop:
                continue
            if test_of(guard) in tested and number != stop:
                continue
            tested.add(test_of(guard))
            self.guards.setdefault(guard.position, []).append((number, guard))

    def write(self) -> Source:
        """Write it.

        Raises:
            Unlinked: it needs a value that its state does not hold.
        """
        source, ops = self.source, self.tape.ops
        source.names["__tape__"] = self.tape
        source.line("def run(A, E):")
        source.indent = 1
        needed = self._required = self._needed()
        last_use = self._last_use = self._last_uses(needed)
        for position, index in enumerate(self._holes):
            if index in needed:
                source.line(f"v{index} = E[{position}]")
                source.emitted.add(index)
        if self._holes:
            source.line("E.clear()")
        late = self._late(needed)
        switches = any(
            op.context != self.entry and op.kind is OpKind.CALL and op.index in needed
            for op in (*late, *ops[self.start : self._end])
        )
        if switches:
            source.line("switch = Switch()")
            source.line("try:")
            source.indent = 2
        if any(call.gives_back is not None for call in self._direct.values()):
            self._ask_for_watchers()
        for op in late:
            self._take_out((op,))
            self._switch_for(op)
            define(source, op)
            source.emitted.add(op.index)
        for index, moment in last_use.items():
            self._dying.setdefault(moment, []).append(index)
        self._forget(i for i in sorted(source.emitted) if last_use.get(i, -1) < 2 * self.start)
        position = self.start
        while position < self._end:
            self._write_position(position)
            self._forget(self._dying.get(2 * position, ()))
            position = self._write_ops(position)
        self._write_position(position)
        if self._stop is None:
            self._take_out((), self.outputs, [change.part for change in self.changes])
            self._finish()
        if switches:
            source.indent = 1
            source.line("finally:")
            source.line("    switch.restore()")
        return source

    def _write_ops(self, position: int) -> int:
        """Write an op, and perhaps some that follow it; return the one to go on with."""
        op = self.tape.ops[position]
        if position in self._required and op.kind not in (OpKind.INPUT, OpKind.STATE):
            self._take_out((op,))
            self._switch_for(op)
            self._carry_out(op)
            self.source.emitted.add(position)
            self._forget(self._dying.get(2 * position + 1, ()))
            if position not in self._last_use:
                self._forget((position,))
        return position + 1

    def _take_out(self, ops: Iterable[Op], values: Any = (), parts: Iterable[Part] = ()) -> None:
        """Take the arguments and state out of their containers that something needs now.

        Most calls do not come to the end of a segment, and all that they do not come to is for
        nothing.
        """
        source, tape_ops = self.source, self.tape.ops
        given = [values, *((op.args, op.kwargs) for op in ops)]
        used = {ref.index for ref in refs_in(given)} - self.available - source.emitted
        taken = sorted(i for i in used if tape_ops[i].kind in (OpKind.INPUT, OpKind.STATE))
        waiting = [*parts, *(e.part for e in existing_in(given))]
        waiting += [tape_ops[index].target for index in taken]
        wanted: dict[int, Part] = {}
        while waiting:
            part = waiting.pop()
            part = part.value if part.kind is PartKind.ALIAS else part
            if part.index not in self._taken:
                self._taken.add(part.index)
                wanted[part.index] = part
                if part.parent is not None:
                    waiting.append(part.parent)
        for _, part in sorted(wanted.items()):
            name = source.part(part)
            if part.access is not Access.FIXED:
                source.line(f"{name} = {source.reach(part)}")
        for index in taken:
            source.line(f"v{index} = {source.part(tape_ops[index].target)}")
            source.emitted.add(index)

    def _needed(self) -> set[int]:
        ops, roots = self.tape.ops, {ref.index for ref in refs_in(self.outputs)}
        for listed in self.guards.values():
            for number, guard in listed:
                roots.add(guard.index)
                if guard.test in (Test.SAME, Test.OTHER):
                    roots.add(guard.expected)
                for hole in self._holes_at(number):
                    roots.update(self._parts_of(hole) if self._is_late(ops[hole]) else (hole,))
        roots.update(op.index for op in ops[self.start : self._end] if not self._droppable(op))
        needed: set[int] = set()
        waiting = list(roots)
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                if index not in self.available:
                    waiting += [r.index for r in refs_in((ops[index].args, ops[index].kwargs))]
        return needed

    def _holes_at(self, number: int) -> tuple[int, ...]:
        state = self.tape.states.get(number)
        return () if state is None else state.holes

    def _is_late(self, op: Op) -> bool:
        """Whether a value can be computed at any time, from arguments and state alone."""
        return op.index in self.analysis.computable or (
            is_read(op)
            and all(
                self.tape.ops[ref.index].kind in (OpKind.INPUT, OpKind.STATE)
                for ref in refs_in((op.args, op.kwargs))
            )
        )

    def _parts_of(self, index: int) -> Iterator[int]:
        """Yield the arguments and the state that a value is computed from."""
        op = self.tape.ops[index]
        if op.kind in (OpKind.INPUT, OpKind.STATE):
            yield index
        for ref in refs_in((op.args, op.kwargs)):
            yield from self._parts_of(ref.index)

    def _late(self, needed: set[int]) -> list[Op]:
        """Return what is computed only now, of what came before the segment."""
        late = []
        for index in sorted(needed):
            op = self.tape.ops[index]
            if index >= self.start or index in self.available:
                continue
            if op.kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if op.kind is not OpKind.SCALAR and not self._is_late(op):
                raise Unlinked(f"{op} is needed, and not to be reached")
            late.append(op)
        return late

    def _last_uses(self, needed: set[int]) -> dict[int, int]:
        """Return when each value is used last: twice the position, one more for the op there."""
        last: dict[int, int] = {}

        def use(index: int, moment: int) -> None:
            last[index] = max(moment, last.get(index, -1))

        for index in sorted(needed):
            op = self.tape.ops[index]
            moment = 2 * index + 1 if index >= self.start else 2 * self.start - 1
            for ref in refs_in((op.args, op.kwargs)):
                use(ref.index, moment)
        for position, listed in self.guards.items():
            for number, guard in listed:
                use(guard.index, 2 * position)
                if guard.test in (Test.SAME, Test.OTHER):
                    use(guard.expected, 2 * position)
                for hole in self._holes_at(number):
                    use(hole, 2 * position)
        for ref in refs_in(self.outputs):
            last[ref.index] = 2 * len(self.tape.ops) + 2
        return last

    def _forget(self, indices: Iterable[int]) -> None:
        ops, emitted = self.tape.ops, self.source.emitted
        dead = [i for i in sorted(indices) if i in emitted and self._is_freed(ops[i])]
        if dead:
            self.source.line("del " + ", ".join(f"v{index}" for index in dead))

    def _depart_unless(self, number: int, guard: Guard) -> None:
        asked = [Ref(guard.index)]
        if guard.test in (Test.SAME, Test.OTHER):
            asked.append(Ref(guard.expected))
        self._take_out((), asked)
        if number != self._stop:
            self._leave(number, guard, outcome(guard), f"if {self._fails(guard)}:")
            return
        value = f"v{guard.index}"
        answers = {
            Test.TRUTH: f"True if {value} else False",
            Test.LENGTH: f"len({value})",
            Test.KIND: f"kind_of({value})",
            Test.SAME: f"True if {value} is v{guard.expected} else None",
            Test.OTHER: f"None if {value} is v{guard.expected} else True",
        }
        self._leave(number, guard, answers.get(guard.test, value), "")

    def _leave(self, number: int, guard: Guard, answer: str, condition: str) -> None:
        """Write how a segment is left, with the values of the holes."""
        source = self.source
        holes = self._holes_at(number)
        missing = self._missing(holes)
        self._take_out(missing)
        if condition:
            source.line(condition, guard.index)
            source.indent += 1
        for op in missing:  # not needed by what follows, and so not noted as there
            source.line(f"v{op.index} = {source.call(op)}", op.index)
        if holes:
            source.line(f"E += {', '.join(f'v{hole}' for hole in holes)},", guard.index)
        source.line(f"return {self._departure(number, guard, answer)}", guard.index)
        if condition:
            source.indent -= 1

    def _departure(self, number: int, guard: Guard, answer: str) -> str:
        """Return an expression for how a segment is left; of a condition it is made beforehand."""

        def made(value: bool) -> str:
            name = f"leave_{number}_{value}".lower()
            self.source.names[name] = Departure(number, value, {})
            return name

        if answer in ("True", "False"):
            return made(answer == "True")
        if guard.test is Test.TRUTH:
            return f"{made(True)} if v{guard.index} else {made(False)}"
        return f"Departure({number}, {answer}, {{}})"

    def _missing(self, holes: Iterable[int]) -> list[Op]:
        """Return what has to be computed for a state alone."""
        ops, found = self.tape.ops, set()
        waiting = [hole for hole in holes if hole not in self.source.emitted]
        while waiting:
            op = ops[waiting.pop()]
            if op.index in found or op.kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if not self._is_late(op):
                raise Unlinked(f"{op} is held, and not to be reached")
            found.add(op.index)
            for ref in refs_in((op.args, op.kwargs)):
                kind = ops[ref.index].kind
                if ref.index not in self.source.emitted and kind not in (
                    OpKind.INPUT,
                    OpKind.STATE,
                ):
                    waiting.append(ref.index)
        return [ops[index] for index in sorted(found)]
