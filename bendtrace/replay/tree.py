"""The trace tree: all recorded paths of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from bendtrace.recording.parts import Part, identical
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import Guard
from bendtrace.replay.ambience import Ambience
from bendtrace.replay.program import Divergence, Finished, Program

__all__ = ["TraceTree"]

# After this many runs that each changed what the next one was checked for, a value is taken to
# change on every call (a counter), and the model to be run live.
_EVOLVING = 4


class TraceTree:
    """Programs by the names of the arguments they were given, the latest first."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, ...], list[Program]] = {}
        self._outdated: Counter[tuple[tuple[str, ...], str]] = Counter()

    def programs(self, names: tuple[str, ...] | None = None) -> Iterator[Program]:
        """Yield the programs, or those for some argument names."""
        for key, listed in self._programs.items():
            if names is None or key == names:
                yield from listed

    def find(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> Program | None:
        """Return a program whose input guards hold."""
        for program in self._programs.get(names, ()):
            if program.admits(arguments):
                return program
        return None

    def add(
        self,
        names: tuple[str, ...],
        recording: Recording,
        ambience: Ambience,
        evolving: frozenset[str],
    ) -> Program:
        """Keep a new run.

        Args:
            names: names of its arguments.
            recording: the run.
            ambience: the global state it ran under.
            evolving: labels of what changes on every call (see `outdated`).
        """
        ignored: frozenset[Part] = frozenset()
        written = {change.label for change in recording.changes} & evolving
        if written:
            ignored = frozenset(p for p in recording.surroundings.parts if p.label in written)
            for label in sorted(written):
                recording.tape.block(f"{label} changes on every call")
        program = Program(recording, ambience, ignored)
        self._programs.setdefault(names, []).insert(0, program)
        return program

    def outdated(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> frozenset[str]:
        """Say which values change on every call, from the programs that do not fit any more.

        A run that changes what it was itself checked for (a counter) fits once only.
        """
        for program in self._programs.get(names, ()):
            failed = program.failing(arguments)
            part = None if failed is None else failed.part
            if part is not None and any(
                change.label == part.label for change in program.recording.changes
            ):
                self._outdated[names, part.label] += 1
                break
        return frozenset(
            label
            for (key, label), count in self._outdated.items()
            if key == names and count >= _EVOLVING
        )

    def replay(
        self, names: tuple[str, ...], program: Program, arguments: tuple[Any, ...]
    ) -> Finished | Divergence:
        """Run a program, going over to paths that are known from other programs."""
        result = program.run(arguments)
        while isinstance(result, Divergence) and not result.known_live:
            known = self._known_elsewhere(names, program, result, arguments)
            if known is None:
                break
            program.grow(result, known)
            result = program.go_on(result, arguments)
        return result

    def _known_elsewhere(
        self, names: tuple[str, ...], program: Program, divergence: Divergence,
        arguments: tuple[Any, ...],
    ) -> Recording | None:  # fmt: skip
        """Find a recorded run that is the same up to a divergence and then took its side."""
        guard = divergence.guard
        if guard is None:
            return None
        for other in self._programs.get(names, ()):
            if other is program or other.live_only or not other.admits(arguments):
                continue
            for recording in other.recordings():
                if _goes_the_other_way(recording, divergence, guard):
                    return recording
        return None


def _goes_the_other_way(recording: Recording, divergence: Divergence, guard: Guard) -> bool:
    guards = recording.tape.guards
    if recording.tape.blockers or len(guards) <= divergence.number:
        return False
    twin = guards[divergence.number]
    if (twin.position, twin.index, twin.test) != (guard.position, guard.index, guard.test):
        return False
    if not identical(twin.expected, divergence.outcome):
        return False
    here, there = divergence.recording, recording
    if [part.label for part in here.surroundings.parts] != [
        part.label for part in there.surroundings.parts
    ]:
        return False
    if len(there.tape.ops) < guard.position:
        return False
    prefixes = zip(here.tape.ops[: guard.position], there.tape.ops, strict=False)
    return all(mine.does_the_same_as(other) for mine, other in prefixes)
