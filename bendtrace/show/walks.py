"""The walks of calls through a program: the branches and loops of each, in order."""

from __future__ import annotations

import ast
import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bendtrace.engine.guard_kinds import Analysis, GuardKind
from bendtrace.engine.program import Program
from bendtrace.engine.program_graph import ProgramGraph
from bendtrace.engine.stretches import GuardSide, RecordedPath, RunPiece, Stretch
from bendtrace.flow import FlowStep, LogicalFlowStep, LoopFlowStep, ShapeFlowStep, steps_of
from bendtrace.python.sites import InstructionPlace, Site, Span, place_text
from bendtrace.python.statements import (
    FUNCTIONS,
    SourceFile,
    closes_block,
    conclude_truth,
    dependent_source,
    follow_truth,
    is_chained_test,
    needs_all,
    role_of,
    source_file,
    span_of,
    spans_after,
    spans_of,
    spans_of_item,
)
from bendtrace.record.iterations import running_code, user_code
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.guards import ErrorGuard, TruthGuard
from bendtrace.tape.tape import AfterOp, Guard, ModuleCall, Op, Stop

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class PathEvent:
    """A branch, loop or value that a path reached."""

    key: Key  # the same wherever the same piece of source ran in the same way
    order: tuple[Any, ...]  # sorts events as the source has them
    kind: str  # the kind of its flow step, or "value" or "raised" for guards without one
    header: Heading  # the text of its line
    outcome: Any  # its outcome; None for a loop, which has no sides
    place: InstructionPlace  # its place in the source
    module_path: str  # path of the module whose forward was running
    when: GuardKind | None  # when its guard is tested; None if it has none
    # The guard on the tape; None for a whole `while`, whose test parts are separate events.
    number: int | None
    position: int  # the op after it
    under: int | None  # the event, by its index in the path, under one of whose sides it ran
    iterations: int | None = None  # for a loop, the number of iterations
    # For each loop around it, its iteration. Empty under a `while`, whose calls may reach one state
    # in different iterations.
    iteration: tuple[int, ...] = ()
    # True if it is in the code of the model itself, not in a function called there.
    outermost: bool = False
    is_condition: bool = True  # whether its outcome is True or False
    # True if it is a loop over an iterable, which is entered and has no sides.
    is_loop: bool = False


class PathEvents:
    """The events of a recorded run, in order."""

    def __init__(self, recording: Recording, asked: Collection[Key] = frozenset()) -> None:
        self.recording = recording
        self.events: list[PathEvent] = []
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
            elif step.guard is not None:
                guard = tape.guards[step.guard]
                if entered is not None and step.kind != "while":  # its test has several parts
                    self._add(entered, guard.scope, guard.site, guard.position, None)
                    entered = None
                iterations = None if entered is None else entered.iterations
                self._add(step, guard.scope, guard.site, guard.position, iterations)
                entered = None

    def _steps(self) -> Iterator[FlowStep]:
        tape = self.recording.tape
        steps = [s for s in steps_of(self.recording) if not isinstance(s, ShapeFlowStep)]
        stepped = {step.guard for step in steps}
        found: list[tuple[int, FlowStep]] = []
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
                    value = guard.word(guard.answer)
                    text = guard.asked.format(place.text)
                    kind = "raised" if isinstance(guard, ErrorGuard) else "value"
                    found.append((guard.position, FlowStep(
                        self.recording.names[guard.index], value, kind, place, text, scope.path,
                        number,
                    )))  # fmt: skip
        return (step for _, step in sorted(found, key=lambda item: item[0]))

    def _is_shown(self, step: FlowStep) -> bool:
        if step.guard is None or isinstance(step, (LogicalFlowStep, LoopFlowStep)):
            return True
        if self._kinds[step.guard] is GuardKind.DATA:
            return True
        return key_of_guard(self.recording.tape.guards[step.guard]) in self._asked

    def _add(
        self, step: FlowStep, scope: ModuleCall, site: Site | None, position: int,
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
        if step.guard is None:
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
            PathEvent(
                key=(step.kind, type(step).__name__, *chain),
                order=tuple(span for _, span in reversed(chain)),
                kind=step.kind,
                header=header,
                outcome=outcome,
                place=step.place,
                module_path=step.module_path,
                when=None if number is None else self._kinds[number],
                number=number,
                position=position,
                under=self._innermost(
                    [(step.place, running[0][1]), *running[1:]], len(self.events)
                ),
                iterations=step.iterations if isinstance(step, LoopFlowStep) else iterations,
                iteration=now[3]
                if all(loop.kind != "while" for loop in role_of(step.place).loops)
                else (),
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
        """Return the position of a guard in the events, or where it would be."""
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

    def _innermost(
        self, running: Iterable[tuple[InstructionPlace, object]], before: int
    ) -> int | None:
        for place, activation in running:
            for number, file, spans in reversed(self._deciding.get(activation, ())):
                if number < before and file == place.file:
                    if any(span.holds(place.span) for span in spans):
                        return number
        return None


def key_of_guard(guard: Guard) -> Key | None:
    """Return a key that is equal for guards of several runs that ask the same question."""
    if guard.site is None:
        return None
    return type(guard), guard.use, guard.site.chain[0]


@dataclass(eq=False)
class PathEnd:
    """An end of runs."""

    kind: str  # "return", "live" (the rest can only run live) or "raise"
    text: str  # the statement, the reason, or the name of the exception
    file: str = ""  # its file, or "" if unknown
    line: int = 0  # its line there
    hits: int = 0  # the number of runs that ended here

    @property
    def where(self) -> str:
        """File, without its folder, and line; "" if unknown."""
        return place_text(self.file, self.line) if self.file else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the end as plain values, ready for JSON."""
        return {
            "end": self.kind, "text": self.text, "file": self.file, "line": self.line,
            "hits": self.hits,
        }  # fmt: skip


@dataclass(eq=False)
class Walk:
    """One walk through a program, or through a part of it, and how many calls took it."""

    path: PathEvents  # the events of the recorded run that it follows
    events: list[PathEvent]  # the events that it reached
    end: PathEnd | None  # how the run ended, if the walk leads there
    end_under: int | None  # the event that has the end under one of its sides
    hits: int  # how many calls took it
    begin: int = 0  # the first event whose outcome it includes
    first: int = 0  # the first event that it leads to; other walks lead to those before
    # The event after the others, which it reached and whose outcome other walks include: the number
    # of events if it reached the end.
    stop: int = -1
    ends: bool = True  # whether its calls ended with it; if not, other walks continue them
    is_part: bool = False  # whether it is a part of a longer walk
    positions: tuple[int, int] = (0, -1)  # the ops before which it begins and ends

    def __post_init__(self) -> None:
        if self.stop < 0:
            self.stop = len(self.events)
        if self.positions[1] < 0:
            self.positions = self.positions[0], len(self.path.recording.tape.ops)

    @property
    def outcome_events(self) -> list[PathEvent]:
        """The events whose outcome it includes."""
        return self.events[self.begin : self.stop]

    @property
    def has_raised(self) -> bool:
        """True if its calls ended with an error."""
        return self.end is not None and self.end.kind == "raise"

    @property
    def leads_to_end(self) -> bool:
        """True if there is no event between it and the end of the run."""
        return self.end is not None and self.first <= self.stop == len(self.events)


def walks_of(program: Program) -> Iterator[Walk]:
    """Yield all walks of calls through a program."""
    if program.live is not None:
        yield _live(PathEvents(program.recording), program.live, None)
        return
    graph = program.graph
    stretches = [stretch for stretch, _ in program.stretches()]
    asked = frozenset(key for stretch in stretches for key in branch_keys(stretch))
    for stretch in stretches:
        path = PathEvents(stretch.recording, asked)
        if graph is None:
            yield _whole(path, stretch)
            for (index, name), times in list(stretch.failures.items()):
                yield _raising_walk(path, index, name, times)
        for number, sides in list(stretch.sides.items()):
            for side in sides:
                yield from _elsewhere(program, stretch, number, side, asked)
    if graph is not None:
        for piece in (*graph.retired, *graph.pieces()):
            yield from _trips(piece, PathEvents(piece.recording, asked))


def _elsewhere(
    program: Program, stretch: Stretch, number: Stop, side: GuardSide, asked: frozenset[Key]
) -> Iterator[Walk]:
    """Yield the ends of calls that left the replay at a guard: they ran live, or raised."""
    graph, walks = program.graph, []
    if side.live is not None:
        live = PathEvents(side.live.recording, asked)
        walks.append(_live(live, side.live, _twin(stretch, number, side)))
    if side.failures:
        runs = [stretch.recording]
        if graph is not None:  # a run that was replaced may have got further
            runs += [old.recording for old in graph.retired[::-1] if old.owner is stretch]
        if not isinstance(number, AfterOp):
            runs = [run for run in runs if number < len(run.tape.guards)]
        walks += _failing_walks(PathEvents(runs[0], asked), number, side) if runs else ()
    if graph is not None and not _is_only_way(graph, stretch, number):
        for walk in walks:  # how they reached the guard is unknown
            under = len(walk.events) if walk.end_under is None else walk.end_under
            walk.begin, walk.first, walk.is_part = under, min(under + 1, walk.stop), True
    yield from walks


def _twin(stretch: Stretch, number: Stop, side: GuardSide) -> Stop:
    """Return the guard at which a re-recorded run left the replay, by its own numbers."""
    states = stretch.recording.tape.states
    state = None if isinstance(number, AfterOp) else states.get(number)
    if state is not None and side.live is not None:
        tape = side.live.recording.tape
        for own, other in tape.states.items():
            if other.key == state.key and identical(tape.guards[own].answer, side.outcome):
                return own
    return number


def _is_only_way(graph: ProgramGraph, stretch: Stretch, number: Stop) -> bool:
    """Return whether there is only one path from the start to a guard of some code."""
    number = -1 if isinstance(number, AfterOp) else number
    pieces = graph.pieces()
    met = Counter(id(node) for piece in pieces for node in piece.nodes.values())
    piece = next((piece for piece in pieces if piece.owner is stretch), None)
    while piece is not None:
        if any(met[id(node)] > 1 for own, node in piece.nodes.items() if own <= number):
            return False
        if piece is graph.first:
            return True
        led = (
            node
            for node in graph.nodes()
            if any(exit.piece is piece for exit in node.exits if exit.number == piece.after)
        )
        node = next(led, None)
        piece, number = (None, -1) if node is None else (node.piece, node.number)
    return False


def _trips(piece: RunPiece, path: PathEvents) -> Iterator[Walk]:
    """Yield the parts of calls' walks along a part of the graph."""
    tape, whole = piece.recording.tape, _whole(path, piece.owner)
    for (entered, left), hits in list(piece.trips.items()):
        since = tape.guards[entered].position if entered >= 0 else 0
        begin = path.at(since, entered) if entered >= 0 else 0
        first = begin + 1 if entered >= 0 else 0  # another trip has led to where it begins
        is_part = entered >= 0 or left is not None
        if isinstance(left, AfterOp):
            names = sorted(name for index, name in piece.owner.failures if index == left.index)
            walk = _raising_walk(path, left.index, " or ".join(names), hits)
            walk.begin, walk.first = begin, min(first, len(walk.events))
            walk.is_part, walk.positions = is_part, (since, left.index + 1)
            yield walk
            continue
        until = len(tape.ops) if left is None else tape.guards[left].position
        stop = len(path.events) if left is None else path.at(until, left)
        yield Walk(
            path, path.events, whole.end, whole.end_under, hits, begin, first, stop,
            ends=left is None, is_part=is_part, positions=(since, until),
        )  # fmt: skip


def branch_keys(stretch: Stretch) -> Iterator[Key]:
    """Yield the keys of guards, and of ops that raised, for which a segment has other sides."""
    tape = stretch.recording.tape
    for number in list(stretch.sides):
        # A greater number is of a run in whose place this one is.
        if isinstance(number, AfterOp) or number >= len(tape.guards):
            continue
        key = key_of_guard(tape.guards[number])
        if key is not None:
            yield key


def _whole(path: PathEvents, taken: RecordedPath) -> Walk:
    under, found, file = _return_of(path)
    end = PathEnd("return", "return")
    if found is not None:
        end = PathEnd("return", " ".join(ast.unparse(found).split()), file, found.lineno)
    return Walk(path, path.events, end, under, taken.hits)


def _live(path: PathEvents, taken: RecordedPath, number: Stop | None) -> Walk:
    """Runs that can only run live, from a guard on or (None) from the start."""
    end = PathEnd("live", path.recording.tape.blockers[0])
    numbers = [event.number for event in path.events]
    under = numbers.index(number) if number is not None and number in numbers else None
    return Walk(path, path.events, end, under, taken.hits)


def _return_of(path: PathEvents) -> tuple[int | None, ast.Return | None, str]:
    """Find the `return` that a run ended with, as far as the branches show."""
    events = path.events
    outermost = [number for number, event in enumerate(events) if event.outermost]
    number = outermost[-1] if outermost else None
    while number is not None:
        event = events[number]
        side = bool(event.iterations) if event.is_loop else bool(event.outcome)
        found = return_under(event.place, side is not event.header.inverted)
        if found is not None and event.is_condition:
            return number, found, event.place.file
        number = event.under
    for op in reversed(path.recording.tape.ops):
        places = () if op.site is None else [place for place, _ in running_code(op.scope, op.site)]
        if places:  # the last of the model itself
            return None, return_at(places[-1]), places[-1].file
    return None, None, ""


def _raising_walk(path: PathEvents, index: int, name: str, times: int) -> Walk:
    """A replay in which an op raised an error that the model does not handle."""
    op = path.recording.tape.ops[index]
    before = sum(event.position <= index for event in path.events)
    place = None if op.site is None else user_code(op.scope, op.site)[0]
    end = (
        PathEnd("raise", name) if place is None else PathEnd("raise", name, place.file, place.line)
    )
    return Walk(
        path, path.events[:before], end, path.around(op, before), times, positions=(0, index + 1)
    )


def _failing_walks(path: PathEvents, number: Stop, side: GuardSide) -> Iterator[Walk]:
    """Runs that took another side than a path and then raised."""
    tape = path.recording.tape
    found = next((i for i, event in enumerate(path.events) if event.number == number), None)
    position = number.index if isinstance(number, AfterOp) else tape.guards[number].position
    if found is None:
        events = [event for event in path.events if event.position <= position]
    else:
        event = path.events[found]
        outcome: Any = None
        if event.kind == "raised" or (event.is_condition and not event.is_loop):
            assert not isinstance(number, AfterOp)
            guard = tape.guards[number]
            outcome = guard.word(side.outcome)
            if isinstance(guard, TruthGuard):
                outcome = bool(outcome) is not event.header.inverted
        events = [*path.events[:found], replace(event, outcome=outcome)]
    for (name, file, line), times in list(side.failures.items()):
        end = PathEnd("raise", name, file, line)
        yield Walk(path, events, end, found, times, positions=(0, position))


# The source around a branch: the code under each side, and the text of its first line.


@dataclass(frozen=True)
class Heading:
    """The text of a branch, loop or value."""

    text: str  # the line, without the colon of a statement
    inverted: bool = False  # whether the line is the negation of the expression that was tested
    # For a loop, the span of its iterable, however many parts of it were tested.
    span: Span | None = None


@functools.cache
def header_of(place: InstructionPlace, kind: str, text: str) -> Heading:
    """Return the line for a flow step."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return Heading(_SUITE_WORDS.get(kind, "{}").format(text or "(source not found)"))
    if kind in ("for", "comprehension"):
        for _, parent in file.ancestors(node):
            if isinstance(parent, (ast.For, ast.AsyncFor, ast.comprehension)):
                line = f"for {file.text(parent.target)} in {file.text(parent.iter)}"
                line = line if kind == "for" else f"[... {line}]"
                return Heading(line, False, span_of(parent.iter))
    if kind not in _SUITE_WORDS:
        return Heading(text)
    test = follow_truth(file, node)
    text = f"not {text}" if test.inverted and kind != "not" else text
    return Heading(_SUITE_WORDS[kind].format(_before(file, node, test.child) + text), test.inverted)


_SUITE_WORDS = {
    "if": "if {}", "while": "while {}", "assert": "assert {}", "and": "{} and ...",
    "or": "{} or ...", "not": "not {}", "conditional expression": "... if {} else ...",
    "comprehension filter": "[... if {}]",
}  # fmt: skip


def _before(file: SourceFile, node: ast.AST, last: ast.AST) -> str:
    """Say which operands were asked before the last one of an `and` or `or`."""
    for child, parent in file.ancestors(node):
        if child is last:
            return ""
        if isinstance(parent, ast.BoolOp):
            return "... and " if isinstance(parent.op, ast.And) else "... or "
    return ""


@functools.cache
def under(place: InstructionPlace, outcome: bool) -> tuple[Span, ...]:
    """Return the source under the side that a branch took.

    Unlike `dependent_source`, it leaves out the code after the statement that runs only because
    the other side leaves the function or the loop.
    """
    statement = _statement_around(source_file(place.file), place)
    if statement is None:
        return ()
    around = span_of(statement)
    return tuple(span for span in dependent_source(place, outcome) if around.holds(span))


@functools.cache
def while_around(place: InstructionPlace) -> tuple[Heading, tuple[Span, ...]] | None:
    """Return the `while` whose test contains a place, and the source that it repeats."""
    file = source_file(place.file)
    node = _statement_around(file, place)
    if not isinstance(node, ast.While):
        return None
    test = span_of(node.test)
    header = Heading(f"while {file.text(node.test)}", False, test)
    return header, (test, *spans_of(node.body))


def return_under(place: InstructionPlace, outcome: bool) -> ast.Return | None:
    """Return the `return` directly under the side that a branch took."""
    statements = source_file(place.file).statements
    for span in under(place, outcome):
        found = statements.get(span)
        if isinstance(found, ast.Return):
            return found
    return None


@functools.cache
def return_at(place: InstructionPlace) -> ast.Return | None:
    """Return the `return` whose value contains a place, or with which its function ends."""
    file = source_file(place.file)
    around = _statement_around(file, place)
    if isinstance(around, ast.Return):
        return around
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = file.parents.get(node)
    last = None if node is None else node.body[-1]
    return last if isinstance(last, ast.Return) else None


def _statement_around(file: SourceFile, place: InstructionPlace) -> ast.stmt | None:
    node: ast.AST | None = file.expressions.get(place.span)
    while node is not None and not isinstance(node, ast.stmt):
        node = file.parents.get(node)
    return node


@functools.cache
def is_elif(place: InstructionPlace) -> bool:
    """Return whether the `if` around a place is written as `elif`."""
    file = source_file(place.file)
    node = _statement_around(file, place)
    parent = None if node is None else file.parents.get(node)
    if not (isinstance(node, ast.If) and isinstance(parent, ast.If) and parent.orelse == [node]):
        return False
    return node.col_offset == parent.col_offset


@dataclass(frozen=True)
class Choice:
    """A branch in the source."""

    # "if", "while", "for-else", "assert", "conditional expression", "and", "or", "comprehension
    # filter" or "case".
    kind: str
    text: str  # source of the condition
    file: str  # the file it is in
    span: Span  # the span of the condition, or of the loop with the `else`
    function: str  # name of the function it is in
    # The source that runs only if it is true.
    if_true: tuple[Span, ...] = field(compare=False, repr=False)
    # The source that runs only if it is false.
    if_false: tuple[Span, ...] = field(compare=False, repr=False)
    # True if the condition tests several values in turn, each of which may decide it in only one
    # direction.
    is_partly_watched: bool = field(default=False, compare=False)

    @property
    def line(self) -> int:
        """Its line, counted from 1."""
        return self.span.line


@functools.cache
def loops_around(choice: Choice) -> int:
    """Return how many loops of its function are around a branch, not counting any within it."""
    file = source_file(choice.file)
    node = file.expressions.get(choice.span)
    return 0 if node is None else len(file.loops_around(node))


_KINDS: dict[type[ast.AST], str] = {
    ast.If: "if", ast.While: "while", ast.IfExp: "conditional expression", ast.Assert: "assert",
}  # fmt: skip


def function_of(place: InstructionPlace) -> ast.AST | None:
    """Return the function, or the lambda, that a place is in; None for a module's own code."""
    file = source_file(place.file)
    node: ast.AST | None = file.expressions.get(place.span) or file.statements.get(place.span)
    if node is None:
        node = file.statement_at(place.span)
    return _enclosing_function(file, node)


def _enclosing_function(file: SourceFile, node: ast.AST | None) -> ast.AST | None:
    while node is not None and not isinstance(node, FUNCTIONS):
        node = file.parents.get(node)
    return node


@functools.cache
def choices_in(path: str, function: ast.AST) -> tuple[Choice, ...]:
    """Return the branches of a function, without those of nested functions."""
    file = source_file(path)
    found: list[Choice] = []
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        found += _choices_at(file, node)
        waiting += ast.iter_child_nodes(node)
    return tuple(sorted(found, key=lambda choice: choice.span))


@functools.cache
def choices_of(place: InstructionPlace, outcome: bool) -> tuple[tuple[Choice, bool], ...]:
    """Return the branches that an expression decided by its truth, with the side taken.

    These are the `and` or `or` that it is an operand of, and everything that depends on their
    truth, as far as it is decided at that point.
    """
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    decided: list[tuple[ast.AST, bool]] = []
    if node is None:  # an assert that a tool has rewritten
        statement = file.statements.get(place.span)
        decided += [(statement.test, outcome)] if isinstance(statement, ast.Assert) else []
    elif not (is_chained_test(node) and outcome is needs_all(node)):
        plain = follow_truth(file, node)
        if isinstance(plain.parent, ast.BoolOp):
            decided.append((plain.child, outcome is not plain.inverted))
        test, value = conclude_truth(file, node, outcome)
        if test.parent is not None and not isinstance(test.parent, ast.BoolOp):
            decided.append((test.child, value))
    values = {
        choice.span: choice
        for child, _ in decided
        for choice in _choices_at(file, file.parents[child])
    }
    pairs = [(values.get(span_of(child)), value) for child, value in decided]
    return tuple((choice, value) for choice, value in pairs if choice is not None)


def _only_if(
    file: SourceFile, branch: ast.If | ast.IfExp | ast.While, value: bool
) -> tuple[Span, ...]:
    """Return the source that runs only after a branch took one side.

    If the other side leaves, this is also the rest of its block, but not of the blocks around it,
    which can be reached past the branch.
    """
    if isinstance(branch, ast.IfExp):
        return (span_of(branch.body if value else branch.orelse),)
    taken, other = (branch.body, branch.orelse) if value else (branch.orelse, branch.body)
    spans = spans_of(taken)
    if isinstance(branch, ast.If) and closes_block(other):
        spans += spans_after(branch, file.parents[branch])
    return spans


def _choices_at(file: SourceFile, node: ast.AST) -> list[Choice]:
    if isinstance(node, ast.BoolOp):
        kind = "and" if isinstance(node.op, ast.And) else "or"
        sides = [
            (kind, operand, spans_of(node.values[i + 1 :]) if kind == "and" else (),
             spans_of(node.values[i + 1 :]) if kind == "or" else ())
            for i, operand in enumerate(node.values[:-1])
        ]  # fmt: skip
    elif isinstance(node, ast.comprehension):
        sides = [
            ("comprehension filter", test, spans_of_item(file, node, i + 1), ())
            for i, test in enumerate(node.ifs)
        ]
    elif isinstance(node, ast.Assert):
        sides = [("assert", node.test, (), ())]
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        true, false = _only_if(file, node, True), _only_if(file, node, False)
        sides = [(_KINDS[type(node)], node.test, true, false)]
    elif isinstance(node, (ast.For, ast.AsyncFor)) and node.orelse:
        sides = [("for-else", node.iter, spans_of(node.orelse), ())]
    else:
        return []
    name = getattr(_enclosing_function(file, node), "name", "<lambda>")
    return [
        Choice(kind, file.text(test), file.file, span_of(test), name, true, false,
               any(isinstance(inner, ast.expr)
                   and (isinstance(inner, ast.BoolOp) or is_chained_test(inner))
                   for inner in ast.walk(test)))
        for kind, test, true, false in sides
        if not isinstance(test, ast.Constant)
    ]  # fmt: skip
