"""Writing what is asked about things being one and the same.

A run tells by identity which tensors and containers are one, and what follows from it: what is
written to one of them shows in all. So those that were several have to be as many again.
"""

from __future__ import annotations

import operator

from bendtrace.recording.parts import Access, Part, PartKind
from bendtrace.recording.reach import is_installed_file
from bendtrace.recording.recorder import Recording
from bendtrace.recording.usage import compares_identity
from bendtrace.replay.questions import Questions
from bendtrace.replay.source import Source

__all__ = ["Sameness"]


class Sameness:
    """Writes what is asked about the tensors, containers and objects of arguments and model.

    Args:
        recording: the run that the guards come from.
        questions: writes what is asked of parts.
        ignored: parts that are not checked.
    """

    def __init__(
        self, recording: Recording, questions: Questions, ignored: frozenset[Part]
    ) -> None:
        self._recording = recording
        self._questions = questions
        several = [
            part
            for part in recording.surroundings.parts
            if part.kind in _DISTINCT and part not in ignored
        ]
        self._given = [part for part in several if part.is_argument]
        self._held = [
            part for part in several if not part.is_argument and part.access is not Access.FIXED
        ]

    def write_held(self, source: Source) -> None:
        """Write `distinct(A)`: whether the things that the model holds are still as many.

        Tied ones are known as such. That others have become one and the same is asked when a dict
        that the model consists of was written to, and each time where they are in others.
        """
        source.begin("distinct(A)")
        source.take(self._held)
        if len(self._held) > 1:
            tied = self._questions.note(
                "two things that the model holds are now one and the same object"
            )
            names = ", ".join(f"id({source.part(part)})" for part in self._held)
            source.line(f"if len({{{names}}}) != {len(self._held)}: return {tied}")
        source.line("return None")

    def ask(self, source: Source) -> None:
        """Ask what has to be asked each time."""
        given, held = self._given, set(self._held)
        if len(given) > 1:
            names = [source.part(part) for part in given]
            same = f"{' is '.join(names)}"
            if len(given) > 2:
                same = f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}"
            number = self._questions.note("two arguments are now one and the same object")
            source.line(f"if {same}: return {number}")
        if any(part.parent is not None and part.parent in held for part in held):
            source.line("number = distinct(A)")
            source.line("if number is not None: return number")
        self._ask_for_strangers(source)

    def _ask_for_strangers(self, source: Source) -> None:
        """Ask whether an argument is something that the model holds now, if it might be asked."""
        given, held = self._given, self._held
        functions = self._recording.surroundings.functions
        own_code = [f for f in functions if not is_installed_file(_file_of(f))]
        if not any(compares_identity(function.__code__) for function in own_code):
            # What is written to a container shows in whatever else is the same one.
            changes = bool(self._recording.changes)
            held = [part for part in held if changes and part.kind is not PartKind.TENSOR]
            given = [part for part in given if part.kind is not PartKind.TENSOR]
        if not given or not held:
            return
        source.take(held)
        names = ", ".join(f"id({source.part(part)})" for part in given)
        own = ", ".join(f"id({source.part(part)})" for part in held)
        number = self._questions.note("an argument is now what the model holds itself")
        source.line(f"if not {{{names}}}.isdisjoint(({own},)): return {number}")


_DISTINCT = (PartKind.TENSOR, PartKind.LIST, PartKind.DICT, PartKind.OBJECT)
_file_of = operator.attrgetter("__code__.co_filename")
