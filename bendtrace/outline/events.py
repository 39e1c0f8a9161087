"""What one path did, as events: the branches and loops of the source that it came by."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bendtrace.flow import (
    FlowStep,
    LogicalFlowStep,
    LoopFlowStep,
    ShapeFlowStep,
    steps_of,
)
from bendtrace.outline.source import Header, header_of, under, while_around
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.recording.recorder import Recording
from bendtrace.recording.sites import Place, Site, Span
from bendtrace.recording.tape import Guard, ModuleCall, Op, Raised, Test
from bendtrace.replay.analysis import Analysis, GuardKind

__all__ = [
    "Event",
    "Key",
    "PathEvents",
    "key_of_guard",
    "key_of_raise",
    "outcome_of",
    "raised_as",
]

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Event:
    """A branch, loop or value that a path came by.

    Attributes:
        key: the same wherever the same piece of source was run in the same way.
        order: sorts events as the source has them.
        kind: the kind of its flow step, or "value" or "raised" for guards without one.
        header: how its line reads.
        outcome: how it came out; None for a loop, which has no sides.
        place: where in the source.
        module_path: whose forward was running.
        when: when its guard is tested; None if it has none.
        number: the guard on the tape; -1 - i for op i that raised; None for a `while` as a
            whole, of which each part of the test is an event of its own.
        position: the op that comes after it.
        under: the event, by its place in the path, under one of whose sides it ran.
        iterations: for a loop, how often its body was begun.
        outermost: whether it is in the code of the model itself, not in what that calls.
        is_condition: whether its outcome is True or False.
        is_loop: whether it is a loop over things, which is entered and has no sides.
    """

    key: Key
    order: tuple[Any, ...]
    kind: str
    header: Header
    outcome: Any
    place: Place
    module_path: str
    when: GuardKind | None
    number: int | None
    position: int
    under: int | None
    iterations: int | None = None
    outermost: bool = False
    is_condition: bool = True
    is_loop: bool = False


class PathEvents:
    """The events of a recorded run, in order.

    Args:
        recording: the run.
        asked: keys of guards that no flow step stands for, and whose outcomes differ somewhere.
    """

    def __init__(self, recording: Recording, asked: Collection[Key] = frozenset()) -> None:
        self.recording = recording
        self.events: list[Event] = []
        tape = recording.tape
        self._kinds = Analysis(tape).kinds
        self._asked = asked
        self._deciding: dict[object, list[tuple[int, str, tuple[Span, ...]]]] = {}
        self._before: tuple[Any, ...] = ()
        # The number of iterations of a while is known where it is entered, its test comes next.
        entered: LoopFlowStep | None = None
        for step in self._steps():
            if isinstance(step, LoopFlowStep) and step.guard is None:
                entered = step
            elif isinstance(step, _Raised):
                self._add(step, step.op.scope, step.op.site, step.op.index, None)
            elif step.guard is not None:
                guard = tape.guards[step.guard]
                if entered is not None and step.kind != "while":  # its test has several parts
                    self._add(entered, guard.scope, guard.site, guard.position, None)
                    entered = None
                iterations = None if entered is None else entered.iterations
                self._add(step, guard.scope, guard.site, guard.position, iterations)
                entered = None

    def _steps(self) -> Iterator[FlowStep | _Raised]:
        tape = self.recording.tape
        steps = [s for s in steps_of(self.recording) if not isinstance(s, ShapeFlowStep)]
        stepped = {step.guard for step in steps}
        found: list[tuple[int, FlowStep | _Raised]] = []
        position = 0
        for step in steps:
            if step.guard is not None:
                position = tape.guards[step.guard].position
            else:  # a while as a whole: before its first test
                position = max(position, 0)
            if self._is_shown(step):
                found.append((position, step))
        if self._asked:
            for number, guard in enumerate(tape.guards):
                if number not in stepped and key_of_guard(guard) in self._asked:
                    assert guard.site is not None
                    place, _, scope = user_code(guard.scope, guard.site)
                    value = _WORDS.get(guard.test, guard.expected)
                    text = _ASKED.get(guard.test, "{}").format(place.text)
                    found.append((guard.position, FlowStep(
                        self.recording.names[guard.index], value, "value", place, text,
                        scope.path, number,
                    )))  # fmt: skip
            for op in tape.ops:
                if op.site is not None and key_of_raise(op) in self._asked:
                    found.append((op.index, _Raised(op)))
        return (step for _, step in sorted(found, key=lambda item: item[0]))

    def _is_shown(self, step: FlowStep) -> bool:
        if step.guard is None or isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            return True
        if self._kinds[step.guard] is GuardKind.DATA:
            return True
        return key_of_guard(self.recording.tape.guards[step.guard]) in self._asked

    def _add(
        self, step: FlowStep | _Raised, scope: ModuleCall, site: Site | None, position: int,
        iterations: int | None,
    ) -> None:  # fmt: skip
        assert site is not None
        running = list(running_code(scope, site)) or [(step.place, None)]
        places = (step.place, *(place for place, _ in running[1:]))
        chain = tuple(dict.fromkeys((place.file, place.span) for place in places))
        is_loop = isinstance(step, LoopFlowStep)
        outcome = None if is_loop else step.value
        header, spans = header_of(step.place, step.kind, step.text), None
        number: int | None
        if isinstance(step, _Raised):
            number = ~step.op.index
        elif step.guard is None:
            number = None
            whole = while_around(step.place)
            if whole is None:
                return
            header, spans = whole
        else:
            number = step.guard
        if header.span is not None:
            chain = ((step.place.file, header.span), *chain[1:])
        now = (step.kind, chain, running[0][1], getattr(step, "iteration", ()))
        if is_loop and now == self._before:  # one more part of the same header
            return
        self._before = now
        if isinstance(step, LogicalFlowStep):
            outcome = bool(outcome) is not header.inverted
        self.events.append(
            Event(
                key=(step.kind, type(step).__name__, *chain),
                order=tuple(span for _, span in reversed(chain)),
                kind=step.kind,
                header=header,
                outcome=outcome,
                place=step.place,
                module_path=step.module_path,
                when=None if number is None or number < 0 else self._kinds[number],
                number=number,
                position=position,
                under=self._innermost(
                    [(step.place, running[0][1]), *running[1:]], len(self.events)
                ),
                iterations=step.iterations if isinstance(step, LoopFlowStep) else iterations,
                outermost=len(chain) == 1,
                is_condition=isinstance(step, LogicalFlowStep),
                is_loop=is_loop,
            )
        )
        if isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            if spans is None:
                spans = under(step.place, is_loop or bool(step.value))
            if spans:
                entry = len(self.events) - 1, step.place.file, spans
                self._deciding.setdefault(running[0][1], []).append(entry)

    def at(self, position: int, number: int) -> int:
        """Return where in the events a guard is, or would be."""
        keys = [
            (event.position, -1 if event.number is None else event.number) for event in self.events
        ]
        return bisect_left(keys, (position, number))

    def last_under(self, number: int) -> int:
        """Return the last event that ran under an event, or that event itself."""
        found = {number}
        for other, event in enumerate(self.events):
            if event.under in found:
                found.add(other)
        return max(found)

    def around(self, op: Op, before: int) -> int | None:
        """Return the event, among the first `before`, under one of whose sides an op ran."""
        return None if op.site is None else self._innermost(running_code(op.scope, op.site), before)

    def _innermost(self, running: Iterable[tuple[Place, object]], before: int) -> int | None:
        for place, activation in running:
            for number, file, spans in reversed(self._deciding.get(activation, ())):
                if number < before and file == place.file:
                    if any(span.holds(place.span) for span in spans):
                        return number
        return None


class _Raised:
    """An op that raised in some runs and not in others."""

    kind = "raised"

    def __init__(self, op: Op) -> None:
        assert op.site is not None
        self.op = op
        self.place, _, scope = user_code(op.scope, op.site)
        self.module_path = scope.path
        self.text = f"try {self.place.text}"
        self.value = raised_as(op.raised)


def raised_as(raised: Raised | None) -> str:
    """Say what an op raised, in a word."""
    return "no error" if raised is None else str(raised.type.__name__)


def key_of_guard(guard: Guard) -> Key | None:
    """What makes guards of several runs the same question."""
    if guard.site is None:
        return None
    return guard.test, guard.how, guard.site.chain[0]


def key_of_raise(op: Op) -> Key | None:
    """What makes ops of several runs the same one that can raise."""
    return None if op.site is None else ("raised", op.site.chain[0])


def outcome_of(guard: Guard, outcome: Any, header: Header) -> Any:
    """Return another outcome of a guard, as an event has it."""
    if guard.test in _OTHER:
        return _OTHER[guard.test]
    if guard.test is Test.TRUTH:
        return bool(outcome) is not header.inverted
    return outcome


_SAME, _ANOTHER = "the tensor it was given", "another tensor"
_WORDS = {Test.SAME: _SAME, Test.OTHER: _ANOTHER}
_OTHER = {Test.SAME: _ANOTHER, Test.OTHER: _SAME}
_ASKED = {
    Test.SAME: "what {} gives",
    Test.OTHER: "what {} gives",
    Test.LENGTH: "len({})",
    Test.KIND: "type({})",
}
