"""Writing a segment: the ops from one state to another, or to the end of the run.

A segment is entered with the values that its state can still reach, its holes, and leaves with
those of the state where a question has another answer than the one recorded. Whatever no
state needs any more is forgotten at once, as the model's own variables would.
"""

from __future__ import annotations

from bendtrace.recording.tape import Guard, OpKind, Ref, Test
from bendtrace.replay.codegen import RunWriter
from bendtrace.replay.schedule import Schedule, Unlinked
from bendtrace.replay.source import Departure, fails, outcome

__all__ = ["SegmentWriter"]


class SegmentWriter(RunWriter):
    """Writes `run(A, E)`, where `E` lists the values of the holes and is emptied.

    Most calls do not come to the end of a segment: arguments and state are taken out of their
    containers where something needs them, and no earlier.

    Args:
        schedule: what it does.
        direct: see `write_run`.
    """

    _takes_over = False

    def __init__(self, schedule: Schedule, direct: bool = False) -> None:
        super().__init__(schedule, direct)
        self._kept_until = -1

    def _enter(self) -> None:
        schedule, source = self.schedule, self.source
        for position, index in enumerate(schedule.handed):
            if index in schedule.needed:
                source.line(f"v{index} = E[{position}]")
                source.emitted.add(index)
        if schedule.handed:
            source.line("E.clear()")
        for op in schedule.late:
            if op.kind is not OpKind.SCALAR and not schedule.is_late(op):
                raise Unlinked(f"{op} is needed, and not to be reached")

    def _depart_unless(self, number: int, guard: Guard) -> None:
        self._take_out(list(map(Ref, guard.operands)))
        if number != self.schedule.stop:
            self._leave(number, guard, outcome(guard), f"if {fails(self.source, guard)}:")
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
        source, holes = self.source, self.schedule.held.get(number, ())
        missing = self.schedule.missing(number, source.emitted)
        self._take_out([(op.args, op.kwargs) for op in missing])
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
