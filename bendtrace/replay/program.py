"""The paths known for one set of input guards: a first run, and where others branch off it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bendtrace.recording.parts import Access, Part, identical
from bendtrace.recording.recorder import Prefix, Recording
from bendtrace.recording.tape import Guard, Ref, Test, refs_in
from bendtrace.replay.ambience import Ambience
from bendtrace.replay.analysis import Analysis, counts
from bendtrace.replay.check import Check, CheckWriter
from bendtrace.replay.codegen import may_be_caught, write_run
from bendtrace.replay.source import Code, Departure, Source, define, gives_nothing, needed_for

__all__ = ["Divergence", "Finished", "Program", "Stretch"]


@dataclass(eq=False)
class Stretch:
    """Straight-line code for the rest of a recorded run, from some op on.

    Attributes:
        recording: the run.
        code: the generated function.
        available: ops before it whose values are handed over when it is entered.
        sides: where runs go on whose guard (by number) had another outcome; None as the
            target means that the other side can only be run live.
    """

    recording: Recording
    code: Code
    available: frozenset[int] = frozenset()
    sides: dict[int, list[tuple[Any, Stretch | None]]] = field(default_factory=dict)


@dataclass(eq=False)
class Finished:
    """A replay that reached its end, with what it returned."""

    output: Any
    recording: Recording


@dataclass(eq=False)
class Divergence:
    """A replay that came to a guard whose other side is not known.

    Attributes:
        stretch: the code that was running.
        number: the guard on the tape of `stretch.recording`; -1 - i where op i raised, or
            did not raise although it had when recorded.
        outcome: what the test gave.
        values: the variables of the run so far: `v<op>`, and others.
    """

    stretch: Stretch
    number: int
    outcome: Any
    values: dict[str, Any]

    @property
    def recording(self) -> Recording:
        """The run that was being replayed."""
        return self.stretch.recording

    @property
    def guard(self) -> Guard | None:
        """The guard that does not hold; None where an op raised or did not."""
        return self.recording.tape.guards[self.number] if self.number >= 0 else None

    @property
    def position(self) -> int:
        """The first op that has not been carried out."""
        return -1 - self.number if self.guard is None else self.guard.position

    @property
    def known_live(self) -> bool:
        """Whether it is known already that what follows can only be run live."""
        return any(
            identical(outcome, self.outcome) and target is None
            for outcome, target in self.stretch.sides.get(self.number, ())
        )

    def prefix(self) -> Prefix:
        """What a resumed run does not have to do again."""
        ops = self.recording.tape.ops[: self.position]
        computed: dict[int, Any] = {}
        for op in ops:
            if gives_nothing(op):
                computed[op.index] = None
            elif (name := f"v{op.index}") in self.values:
                computed[op.index] = self.values[name]
        return Prefix(ops, computed)


class Program:
    """All known paths that share one set of input guards.

    Args:
        recording: the first run.
        ambience: the global state that it ran under.
        ignored: parts that need not be as they were, for a recording that is never replayed.
    """

    def __init__(
        self, recording: Recording, ambience: Ambience, ignored: frozenset[Part] = frozenset()
    ) -> None:
        self.recording = recording
        self.ambience = ambience
        self.analysis = Analysis(recording.tape)
        writer = CheckWriter(recording, self.analysis, ignored)
        self.check_code = Code(writer.write(), "check")
        self.checks = writer.checks
        self._check = self.check_code.function
        self.live_only = bool(ignored or recording.tape.blockers)
        if not self.live_only:
            source = write_run(recording, self.analysis, ambience.context)
            self.root = Stretch(recording, Code(source, "run"))

    def failing(self, arguments: tuple[Any, ...]) -> Check | None:
        """Return the first input guard that does not hold, or None if all do.

        Args:
            arguments: the bound arguments in order.
        """
        if (different := self.ambience.difference()) is not None:
            return Check(different)
        try:
            number = self._check(arguments)
        except Exception as error:
            # A key or attribute that the check reads is gone, or a value is of a kind that
            # cannot be compared: in either case not what was recorded.
            return Check(f"the check could not be carried out: {type(error).__name__}: {error}")
        return None if number is None else self.checks[number]

    def admits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether all input guards hold."""
        if self.ambience != Ambience.current():
            return False
        try:
            return self._check(arguments) is None
        except Exception:  # see `failing`
            return False

    def value_now(self, guard: Guard, arguments: tuple[Any, ...]) -> Any:
        """Compute what an input guard tests, for other arguments."""
        ops = self.recording.tape.ops
        source = Source()
        source.line("def value(A):")
        source.indent = 1
        counted = counts(guard, ops)
        roots = refs_in(ops[guard.index].args) if counted else [Ref(guard.index)]
        needed = sorted(needed_for(ops, (ref.index for ref in roots)))
        parts = [ops[index].target for index in needed if isinstance(ops[index].target, Part)]
        while missing := [p.parent for p in parts if p.parent and p.parent not in parts]:
            parts += missing
        for part in sorted(set(parts), key=lambda part: part.index):
            name = source.part(part)
            if part.access is not Access.FIXED:
                source.line(f"{name} = {source.reach(part)}")
        for index in needed:
            define(source, ops[index])
        last = f"v{guard.index}"
        if counted:
            tensor, dim = (*ops[guard.index].args, 0)[:2]
            last = f"{source.value(tensor)}.size({dim})"
        elif guard.test is Test.LENGTH:
            last = f"len({last})"
        elif guard.test is Test.TRUTH:
            last = f"bool({last})"
        source.line(f"return {last}")
        return Code(source, "value").function(arguments)

    def run(self, arguments: tuple[Any, ...]) -> Finished | Divergence:
        """Replay, along known paths as far as they go.

        Raises:
            Exception: what an op raises where the model has no handler for it: the model
                itself would have raised the same at the same point.
        """
        return self._run(self.root, arguments, {})

    def go_on(self, divergence: Divergence, arguments: tuple[Any, ...]) -> Finished | Divergence:
        """Continue a replay whose other side has become known since it diverged."""
        stretch = self._side(divergence.stretch, divergence.number, divergence.outcome)
        assert stretch is not None
        return self._run(stretch, arguments, divergence.values)

    def _run(
        self, stretch: Stretch, arguments: tuple[Any, ...], values: dict[str, Any]
    ) -> Finished | Divergence:
        while True:
            try:
                result = stretch.code.function(arguments, values)
            except Exception as error:
                result = _raised(error, stretch)
                if result is None:
                    raise
            if type(result) is not Departure:
                return Finished(result, stretch.recording)
            values.update(result.values)
            target = self._side(stretch, result.guard, result.outcome)
            if target is None:
                return Divergence(stretch, result.guard, result.outcome, values)
            stretch = target

    @staticmethod
    def _side(stretch: Stretch, number: int, outcome: Any) -> Stretch | None:
        for known, target in stretch.sides.get(number, ()):
            if identical(known, outcome):
                return target
        return None

    def recordings(self) -> list[Recording]:
        """Return all runs that went into the program, the first one first."""
        found, waiting = [self.recording], [self.root] if not self.live_only else []
        while waiting:
            for sides in waiting.pop().sides.values():
                targets = [target for _, target in sides if target is not None]
                found += [target.recording for target in targets]
                waiting += targets
        return found

    def grow(self, divergence: Divergence, recording: Recording) -> None:
        """Add the path that a resumed run took after `divergence`."""
        position, number = divergence.position, divergence.number
        parent = divergence.stretch
        target = None
        if not recording.tape.blockers:
            available = parent.available | {i for i in parent.code.emitted if i < position}
            source = write_run(
                recording, Analysis(recording.tape), self.ambience.context, position,
                divergence.recording.tape, frozenset(available),
            )  # fmt: skip
            target = Stretch(recording, Code(source, "run"), frozenset(available))
        parent.sides.setdefault(number, []).append((divergence.outcome, target))


def _raised(error: Exception, stretch: Stretch) -> Departure | None:
    """Turn what an op raised into a departure, if the model could go on from there."""
    traceback = error.__traceback__
    code = stretch.code.function.__code__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    index = stretch.code.op_of_line.get(traceback.tb_lineno)
    if index is None:
        return None
    op = stretch.recording.tape.ops[index]
    if not may_be_caught(op, stretch.recording):
        if op.site is not None:
            error.add_note(f"raised in a replay of {op.site.place}: {op.site.place.text}")
        return None
    return Departure(-1 - index, type(error), dict(traceback.tb_frame.f_locals))
