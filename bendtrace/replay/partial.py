"""Carrying out the rest of a recorded run, from values that are given for some of its ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bendtrace.recording.contexts import AutocastHold, Context
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Guard, OpKind
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.codegen import _RunWriter as RunWriter
from bendtrace.replay.program import Divergence, Finished, Program, Stretch
from bendtrace.replay.rest import Cut, Rest
from bendtrace.replay.source import Code, Source, define, gives_nothing

__all__ = ["carry_out", "write_rest"]


def write_rest(rest: Rest, analysis: Analysis, entry: Context) -> Stretch:
    """Write the code of the rest of a run.

    It takes the given values, and for a run that goes on those computed so far, from `E`:
    `s<slot>` and `v<op>`.

    Args:
        rest: what is needed.
        analysis: the guards of the run, sorted.
        entry: grad mode and so on when it begins.
    """
    whole = rest.recording
    kept = Recording(whole.tape, whole.surroundings, whole.root)
    kept.changes, kept.output_reads = rest.changes, whole.output_reads
    source = _RestWriter(kept, analysis, entry, rest).write()
    code = Code(source, "run")
    return Stretch(kept, 0, code=code, available=rest.available, start=rest.start)


def carry_out(
    program: Program,
    stretch: Stretch,
    arguments: tuple[Any, ...],
    values: Mapping[str, Any],
    hold: AutocastHold,
) -> Finished | Divergence:
    """Run the code of the rest of a run.

    Args:
        program: what the run belongs to.
        stretch: the code.
        arguments: the bound arguments; whatever stands for those that are not there.
        values: the given values, and those computed so far.
        hold: on autocast's cache.

    Raises:
        Exception: what an op raises where the model has no handler for it.
    """
    return program._run(stretch, arguments, dict(values), hold)


class _RestWriter(RunWriter):
    """Writes `run(A, E)` with the given values in the place of what led to them."""

    def __init__(
        self, recording: Recording, analysis: Analysis, entry: Context, rest: Rest
    ) -> None:
        super().__init__(recording, analysis, entry, rest.start, None, rest.available)
        self._rest = rest
        self.guards = {}
        for number, guard in rest.guards.items():
            position = max(guard.position, rest.start)
            self.guards.setdefault(position, []).append((number, guard))
        self._cuts: dict[int, list[Cut]] = {}
        for cut in sorted(rest.used, key=lambda cut: cut.start):
            self._cuts.setdefault(max(cut.start, rest.start), []).append(cut)

    def write(self) -> Source:
        """Write it."""
        source, tape = self.source, self.tape
        source.line("def run(A, E):")
        source.indent = 1
        needed = self._rest.needed | self._known(self._rest.available)
        last_use, last_guard = self._last_uses(needed), self._last_divergence()
        self._define_parts(needed)
        for index in sorted(self._known(self._rest.available)):
            source.line(f"v{index} = E['v{index}']")
        for slot in sorted({cut.slot for cut in self._rest.used}):
            source.line(f"s{slot} = E['s{slot}']")
        if last_guard < self.start:
            source.line("E.clear()")
        late = [tape.ops[i] for i in sorted(needed - self.available) if i < self.start]
        work = [op for op in (*late, *tape.ops[self.start :]) if op.index in needed]
        switches = any(op.context != self.entry for op in work if op.kind is OpKind.CALL)
        if switches:
            source.line("switch = Switch()")
            source.line("try:")
            source.indent = 2
        self._current = self.entry
        for op in late:
            if op.kind in (OpKind.CALL, OpKind.SCALAR):
                self._switch_for(op)
                define(source, op)
                source.emitted.add(op.index)
        kept = [i for i in sorted(self._known(needed)) if self._is_freed(tape.ops[i])]
        for position in range(self.start, len(tape.ops) + 1):
            self._write_position(position)
            if position == last_guard:
                if self.start:
                    source.line("E.clear()")
                dead = [i for i in kept if last_use.get(i, -1) < position]
                if dead:
                    source.line("del " + ", ".join(f"v{i}" for i in dead))
                kept = [i for i in kept if last_use.get(i, -1) >= position]
            if position == len(tape.ops):
                break
            op = tape.ops[position]
            if position in tape.forgets:
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

    def _write_position(self, position: int) -> None:
        """Write what comes before an op: guards, and from there on given values."""
        cuts = self._cuts.get(position, [])
        guards = self.guards.get(position, [])
        ahead = [item for item in guards if self._is_ahead(item[1], cuts)]
        for number, guard in ahead:
            self._depart_unless(number, guard)
        for cut in cuts:
            self.source.line(f"v{cut.index} = s{cut.slot}")
        for number, guard in guards:
            if (number, guard) not in ahead:
                self._depart_unless(number, guard)

    def _is_ahead(self, guard: Guard, cuts: list[Cut]) -> bool:
        """Whether a guard is about the values that calls have had before some cuts."""
        return any(
            cut.index in (guard.index, guard.expected)
            and self._rest.cut_at(cut.index, guard.position, guard.scope) is not cut
            for cut in cuts
        )

    def _switch_for(self, op: Any) -> None:
        if op.kind is OpKind.CALL and op.context != self._current:
            self.source.line(f"switch.to({self.source.constant(op.context)})")
            self._current = op.context

    def _known(self, indices: Any) -> set[int]:
        """Of some ops those that were carried out before and have a value."""
        ops = self.tape.ops
        return {i for i in indices if i in self._rest.available and not gives_nothing(ops[i])}
