"""Which recorded runs of a model are those that a call could be gone on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bendtrace.errors import DivergenceError, InputError, NotReplayableError
from bendtrace.flow import steps_of
from bendtrace.interject.rests import KnownRun, kept
from bendtrace.recording.parts import Access
from bendtrace.recording.recorder import Recording
from bendtrace.replay.check import CheckWriter
from bendtrace.replay.cutting import argument_of
from bendtrace.replay.explain import explain_check
from bendtrace.replay.program import Program
from bendtrace.replay.source import Code
from bendtrace.replay.tree import TraceTree

__all__ = ["KnownRuns"]


class KnownRuns:
    """The recorded runs that fit the arguments of a call, the latest first.

    Args:
        model: the `BendedModule`.
        tree: its paths, with what is inserted now.
        bound: the arguments by name, as far as they were given.

    Attributes:
        is_whole: whether the model can be called with the arguments: no others are known of.

    Raises:
        InputError: nothing is known of the model, and no arguments are there.
    """

    def __init__(self, model: Any, tree: TraceTree, bound: Mapping[str, Any]) -> None:
        self._model = model
        self._bound = bound
        names = tuple(bound)
        programs = sorted(tree.programs(), key=lambda program: program.serial, reverse=True)
        self._same = list(tree.programs(names))
        self._wider = [p for p in programs if set(names) < set(_names_of(p))]
        self.is_whole = bool(self._same) or (bool(names) and not self._wider)
        if not (self.is_whole or self._wider):
            raise InputError(
                "nothing has been traced yet"
                + (" with what is inserted now" if model._board else "")
                + ": call the module, or its trace(), first"
            )

    def __iter__(self) -> Iterator[KnownRun]:
        """Yield them.

        Raises:
            DivergenceError: arguments are missing, and there are none.
        """
        return iter(self._admitting() if self.is_whole else self._fitting())

    def _admitting(self) -> list[KnownRun]:
        arguments = tuple(self._bound.values())
        return [
            KnownRun(program, recording, arguments)
            for program in self._same
            if not program.live_only and program.admits(arguments)
            for recording in self._latest_first(program)
        ]

    def _fitting(self) -> list[KnownRun]:
        """Return the runs that fit as far as can be told from the arguments that are there."""
        found: list[KnownRun] = []
        reasons: list[str] = []
        for program in self._wider:
            names = _names_of(program)
            missing = frozenset(i for i, name in enumerate(names) if name not in self._bound)
            arguments = tuple(self._bound.get(name) for name in names)
            reason = self._misfit(program, arguments, missing)
            if reason is None:
                found += [
                    KnownRun(program, recording, arguments, missing)
                    for recording in self._latest_first(program)
                ]
            else:  # those that differ in what is asked last are nearest
                is_near = program.ambience.difference() is None
                reasons.insert(0 if is_near else len(reasons), reason)
        if not found:
            raise DivergenceError(
                f"no recorded run can be gone on with: {reasons[0]}; call the module as it is now, "
                "or give all its arguments"
            )
        return sorted(found, key=lambda run: run.recording is not self._latest)

    def _latest_first(self, program: Program) -> list[Recording]:
        found = [r for r in reversed(program.recordings()) if not r.tape.blockers]
        return sorted(found, key=lambda recording: recording is not self._latest)

    @property
    def _latest(self) -> Recording | None:
        """The run of the latest call, as far as that is known."""
        dispatcher = self._model._dispatcher
        latest: Recording | None = dispatcher.latest_run
        trace = dispatcher.latest
        return latest if latest is not None or trace is None else trace.recording

    def _misfit(
        self, program: Program, arguments: tuple[Any, ...], missing: frozenset[int]
    ) -> str | None:
        """Say why a recorded run would not be repeated now, whatever is missing; None if it may."""
        if program.live_only:
            return str(NotReplayableError(program.recording.tape.blockers))
        different = program.ambience.difference()
        if different is not None:
            return different

        def written() -> tuple[Program, Code, list[Any]]:
            parts = program.recording.surroundings.parts
            ignored = frozenset(part for part in parts if argument_of(part) in missing)
            writer = CheckWriter(program.recording, program.analysis, ignored)
            return program, Code(writer.write(), "check"), writer.checks

        _, code, checks = kept(self._model, ("check", id(program), missing), written)
        try:
            number = code.function(arguments)
        except NameError:  # a fault of the check itself
            raise
        except Exception as error:  # as in `Program.failing`
            return f"{type(error).__name__}: {error}"
        if number is None:
            return None
        steps = steps_of(program.recording)
        return explain_check(checks[number], program, arguments, steps).reason


def _names_of(program: Program) -> tuple[str, ...]:
    """Return the names of the arguments that a program was recorded with."""
    parts = program.recording.surroundings.parts
    return tuple(p.label for p in parts if p.is_argument and p.access is Access.ROOT)
