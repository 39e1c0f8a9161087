"""The model that is searched: a copy that runs on candidates, and what its runs show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from bendtrace.errors import InputError
from bendtrace.exploring.distance import Course, Margin
from bendtrace.exploring.domain import Candidate, Space
from bendtrace.exploring.plain import Formula, Recorded, formula_of, recorded_in
from bendtrace.preserved_state import PreservedState
from bendtrace.recording.finish import Recording
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.recording.rank_sync import alone
from bendtrace.recording.run import Signature, record
from bendtrace.source.sites import PACKAGE, TORCH, Place, Site, place_at
from bendtrace.tape.tape import Guard, ModuleCall, Test, leaves_in
from bendtrace.view.outline.coverage import Taken, is_standard
from bendtrace.view.outline.source import Choice, choices_in, decided_by, function_of, loops_around
from bendtrace.view.outline.walks import PathEvents

__all__ = ["CandidateRun", "Key", "Question", "Subject"]

_OCCURRENCES = 64  # of one question in one module and run; a loop asks it again and again

# What makes questions of several runs the same one.
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Question:
    """A truth that a run asked for.

    Attributes:
        key: the same in all runs that asked it at the same place, as often before.
        guard: what was recorded of it.
        around: the places that led to it, with the keys of the running functions.
        path: the module whose forward asked.
        iteration: which iteration of each loop around it that was, as far as that is counted.
        decides: whether the answer decides a branch. Comparing containers asks as well.
    """

    key: Key
    guard: Guard
    around: tuple[tuple[Place, object], ...]
    path: str
    iteration: tuple[int, ...]
    decides: bool

    @property
    def roots(self) -> tuple[int, ...]:
        """The op that is asked."""
        return (self.guard.index,)

    def truth(self, course: Course) -> Margin:
        """Return the distance, given a course that has come to it."""
        return course.truth(course.value(self.guard.index))

    def sides(self, answer: bool) -> list[Taken]:
        """Return what an answer decides."""
        decided = decided_by(self.around[0][0], answer) if self.decides else ()
        return [
            (choice, self.path, self.iteration[: loops_around(choice)], side)
            for choice, side in decided
        ]

    def leads_to(self, other: Question | Formula) -> bool:
        """Whether a later question is only asked because of the answer to this one."""
        mine, running = self.around[0]
        if mine == other.around[0][0] and running == other.around[0][1]:
            return True  # a loop has come to it again
        spans = [
            span
            for choice, side in decided_by(mine, self.guard.expected)
            for span in (choice.if_true if side else choice.if_false)
        ]
        return any(
            place.file == mine.file and key == running and any(s.holds(place.span) for s in spans)
            for place, key in other.around
        )


@dataclass(eq=False)
class CandidateRun:
    """What running the model on a candidate has shown.

    Attributes:
        candidate: the input.
        recording: the run; None if it raised.
        raised: the name of the error.
        questions: the truths that it asked for, in order.
        taken: the sides that questions decided.
        under: the sides under which something happened, as the source has it; their iterations are
            not known.
        formulas: conditions that were read from the source.
    """

    candidate: Candidate
    recording: Recording | None = None
    raised: str = ""
    questions: dict[Key, Question] = field(default_factory=dict)
    taken: set[Taken] = field(default_factory=set)
    under: set[tuple[Choice, str, bool]] = field(default_factory=set)
    formulas: dict[Key, Formula | None] = field(default_factory=dict)
    _recorded: Recorded | None = None

    def asked(self, key: Key) -> Question | Formula | None:
        """Return a question; None if the run did not come to it.

        Args:
            key: of a question, or a branch that no question decides and the function it is in.
        """
        if self.recording is None or type(key[0]) is not Choice:
            return self.questions.get(key)
        if key not in self.formulas:
            self._recorded = self._recorded or recorded_in(self.recording)
            self.formulas[key] = formula_of(key[0], key[1], self.recording, self._recorded)
        return self.formulas[key]


class Subject:
    """A model, which each run finds as it was at the beginning. A context manager.

    Args:
        model: the model.
        space: the inputs, of which the constants of the model's code are told.

    Raises:
        InputError: the model holds something that cannot be restored.
    """

    def __init__(self, model: Callable[..., Any], space: Space) -> None:
        self._model = model
        self._space = space
        self._signature = Signature(model)
        self._sites: dict[tuple[int, str], tuple[Site, set[tuple[Choice, str, bool]]]] = {}
        self._codes: set[CodeType] = set()
        self.functions: dict[tuple[str, Any], None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Subject:
        self._stack.enter_context(alone("a search for inputs"))
        self._before = self._stack.enter_context(PreservedState(self._model))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, candidate: Candidate) -> CandidateRun:
        """Run the model itself on a candidate, and see which sides it takes."""
        self._before.rewind()
        args, kwargs = candidate.copied()
        run = CandidateRun(candidate)
        try:
            recording = record(self._model, args, kwargs, self._signature)
            recording.result = None
            self._read(run, recording)
        except InputError:
            raise
        except Exception as error:
            run.raised = type(error).__name__
            run.under |= self._under_at(error)
        return run

    def _read(self, run: CandidateRun, recording: Recording) -> None:
        run.recording, tape = recording, recording.tape
        asked: dict[Key, int] = {}
        events = {event.number: event for event in PathEvents(recording).events}
        for number, guard in enumerate(tape.guards):
            self._see(run, guard.scope, guard.site)
            if guard.test is not Test.TRUTH or guard.site is None:
                continue
            if guard.how in ("", "metadata", "type"):
                continue
            key = (guard.site.identity, guard.scope.path)
            asked[key] = asked.get(key, 0) + 1
            around = tuple(running_code(guard.scope, guard.site))
            if not around or asked[key] > _OCCURRENCES:
                continue
            place, running, scope = user_code(guard.scope, guard.site)
            event = events.get(number)
            decides = event is not None and event.is_condition
            question = Question(
                (*key, asked[key]), guard, ((place, running), *around[1:]), scope.path,
                event.iteration if event is not None else (), decides,
            )  # fmt: skip
            run.questions[question.key] = question
            run.taken.update(question.sides(bool(guard.expected)))
        for op in tape.ops:
            self._see(run, op.scope, op.site)
            for value in leaves_in((op.args, op.kwargs)) if op.is_work else ():
                if type(value) in (int, float) and len(self._space.numbers) < 256:
                    self._space.numbers[value] = None
        for call in tape.calls:
            if call.parent is not None:
                self._see(run, call.parent, call.site)

    def _see(self, run: CandidateRun, scope: ModuleCall, site: Site | None) -> None:
        """Note the sides under which something at a site happened."""
        if site is None:
            return
        known = self._sites.get((id(site), scope.path))
        if known is None:
            taken: set[tuple[Choice, str, bool]] = set()
            for (code, _), place in zip(site.chain, site.places, strict=True):
                if not place.in_torch:
                    taken |= self._under(place, scope.path)
                    self._read_constants(code)
            known = self._sites[id(site), scope.path] = site, taken
        run.under |= known[1]

    def _under(self, place: Place, path: str) -> set[tuple[Choice, str, bool]]:
        function = None if is_standard(place.file) else function_of(place)
        if function is None:
            return set()
        self.functions[place.file, function] = None
        return {
            (choice, path, side)
            for choice in choices_in(place.file, function)
            for side in (True, False)
            if any(s.holds(place.span) for s in (choice.if_true if side else choice.if_false))
        }

    def _under_at(self, error: Exception) -> set[tuple[Choice, str, bool]]:
        """Return the sides under which an error was raised."""
        taken: set[tuple[Choice, str, bool]] = set()
        trace, path = error.__traceback__, ""
        modules = {}
        if isinstance(self._model, nn.Module):
            modules = {id(module): name for name, module in self._model.named_modules()}
        while trace is not None:
            code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
            path = modules.get(id(owner), path)
            place = place_at(code, trace.tb_lasti)
            if not place.file.startswith((TORCH, PACKAGE)):
                taken |= self._under(place, path)
                function = function_of(place)
                if trace.tb_next is None and function and isinstance(error, AssertionError):
                    taken |= {
                        (choice, path, False)
                        for choice in choices_in(place.file, function)
                        if choice.kind == "assert" and place.line == choice.line
                    }
            trace = trace.tb_next
        return taken

    def _read_constants(self, code: CodeType) -> None:
        if code not in self._codes:
            self._codes.add(code)
            numbers: Iterator[Any] = (n for n in code.co_consts if type(n) in (int, float))
            self._space.numbers.update(dict.fromkeys(numbers))
