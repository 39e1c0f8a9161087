"""The code of the rest of a recorded run, from values that are given for some of its ops."""

from __future__ import annotations

from bendtrace.recording.contexts import Context
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Guard
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.codegen import RunWriter
from bendtrace.replay.cutting import Cut
from bendtrace.replay.program import Stretch
from bendtrace.replay.rest import Rest
from bendtrace.replay.schedule import Schedule

__all__ = ["write_rest"]


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
    schedule = Schedule(
        kept, analysis, entry, rest.guards, start=rest.start, available=rest.available,
        needed=rest.needed | rest.available,
    )  # fmt: skip
    code = _RestWriter(schedule, rest).write()
    return Stretch(kept, 0, code=code, available=rest.available, start=rest.start)


class _RestWriter(RunWriter):
    """Writes `run(A, E)` with the given values in the place of what led to them."""

    _takes_over = True

    def __init__(self, schedule: Schedule, rest: Rest) -> None:
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
        """Whether a guard is about the values that calls have had before some cuts."""
        return any(
            cut.index in guard.operands
            and self._rest.cuts.at(cut.index, guard.position, guard.scope) is not cut
            for cut in cuts
        )
