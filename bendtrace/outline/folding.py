"""Folding the paths of a trace tree into the source that they went through."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bendtrace.outline.events import (
    Event,
    Key,
    PathEvents,
    key_of_guard,
    key_of_raise,
    outcome_of,
    raised_as,
)
from bendtrace.outline.selection import differing, selection, signature_of
from bendtrace.outline.source import last_return, return_around, return_under
from bendtrace.outline.structure import Branch, End, Flow, ProgramOutline, Step
from bendtrace.outline.text import value_text
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.recording.recorder import Recording
from bendtrace.recording.sites import Place
from bendtrace.replay.graph import Piece
from bendtrace.replay.program import Path, Program, Side, Stretch
from bendtrace.replay.tree import TraceTree

__all__ = ["Walk", "fold", "most_divergent", "walks_of"]


class Walk:
    """One way through a program, or a part of one, and how many calls took it.

    Attributes:
        path: the events of the recorded run that it follows.
        events: those of them that it came to.
        end: where it ended; None if other walks tell how it went on.
        end_under: the event under one of whose sides the end stands.
        hits: how many calls took it.
        begin: the first event whose outcome it tells of.
        first: the first event that it leads to; other walks have led to those before.
        stop: the event, after the others, that it came to and whose outcome other walks tell of.
        is_part: whether it is a part of a way.
        positions: the ops before which it begins and ends.
    """

    def __init__(
        self,
        path: PathEvents,
        events: list[Event],
        end: End | None,
        end_under: int | None,
        hits: int,
        begin: int = 0,
        first: int = 0,
        stop: int | None = None,
        is_part: bool = False,
        positions: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.events = events
        self.end = end
        self.end_under = end_under
        self.hits = hits
        self.begin = begin
        self.first = first
        self.stop = len(events) if stop is None else stop
        self.is_part = is_part
        self.positions = positions or (0, len(path.recording.tape.ops))

    @property
    def passed(self) -> list[Event]:
        """The events whose outcome it tells of."""
        return self.events[self.begin : self.stop]


def fold(tree: TraceTree) -> list[ProgramOutline]:
    """Fold each program of a tree, in the order in which they were traced."""
    programs = sorted(tree.programs(), key=lambda program: program.serial)
    selected = selection(programs)
    outlines = []
    for number, (program, facts) in enumerate(zip(programs, selected, strict=True), 1):
        flow, steps, runs = Flow(), Counter[Step](), 0
        for walk in walks_of(program):
            _add(flow, walk, steps)
            runs += walk.hits if walk.end is not None and walk.end.kind != "raise" else 0
        inputs, traces = signature_of(program), len(program.paths())
        outlines.append(ProgramOutline(number, inputs, facts, traces, runs, flow, steps))
    return outlines


def _add(flow: Flow, walk: Walk, steps: Counter[Step]) -> None:
    flows: list[Flow] = []
    before: Branch | None = None
    by = ""
    for number, event in enumerate(walk.events):
        inside = flow if event.under is None else flows[event.under]
        branch = _branch(inside, event)
        branch.modules[event.module_path] = None
        branch.when.add(event.when)
        taken = branch.side(event.outcome)
        if walk.begin <= number < walk.stop:
            taken.hits += walk.hits
        if walk.first <= number <= walk.stop:
            steps[before, by, branch] += walk.hits
        if event.iterations is not None or walk.is_part:
            _count_rounds(branch, walk, number)
        flows.append(taken.flow)
        before, by = branch, "" if event.is_loop else value_text(taken)
    if walk.end is None:
        return
    inside = flow if walk.end_under is None else flows[walk.end_under]
    end = walk.end
    key = (end.kind, end.text, end.file, end.line)
    reached = inside.ends.setdefault(key, End(*key))
    reached.hits += walk.hits
    steps[before, by, reached] += walk.hits


def _count_rounds(branch: Branch, walk: Walk, number: int) -> None:
    """Count how often a loop was entered, and its body begun."""
    event, hits = walk.events[number], walk.hits
    # Calls that come to one state are in the same round of a `for`: the last part of the way tells.
    tells = walk.begin <= walk.path.last_under(number) < walk.stop
    if event.iterations is not None and (not walk.is_part or (event.is_loop and tells)):
        branch.entered += hits
        branch.rounds += hits * event.iterations
        branch.most = max(branch.most, event.iterations)
        branch.least = min(branch.least, event.iterations)
    elif walk.is_part and event.kind == "while":
        branch.is_joined = True
        if event.iterations is not None and walk.first <= number <= walk.stop:
            branch.entered += hits
        if event.outcome and walk.begin <= number < walk.stop:
            branch.rounds += hits


def _branch(flow: Flow, event: Event) -> Branch:
    """Return the branch of an event; in code that calls itself, that of the outermost call."""
    owner = flow.owner
    while owner is not None:
        if owner.key == event.key:
            return owner
        owner = owner.inside.owner if owner.inside is not None else None
    branch = flow.branches.get(event.key)
    if branch is None:
        branch = flow.branches[event.key] = Branch(
            event.key, flow, event.order, event.kind, event.header.text, event.place,
            is_condition=event.is_condition, is_loop=event.is_loop,
        )  # fmt: skip
    return branch


def walks_of(program: Program) -> Iterator[Walk]:
    """Yield all ways through a program that calls have gone."""
    if program.live is not None:
        yield _live(PathEvents(program.recording), program.live, None)
        return
    stretches = [stretch for stretch, _ in program.stretches()]
    asked = frozenset(key for stretch in stretches for key in _asked(stretch))
    for stretch in stretches:
        path = PathEvents(stretch.recording, asked)
        if program.graph is None:
            yield _whole(path, stretch)
            for (index, name), times in list(stretch.failures.items()):
                yield _raised(path, index, name, times)
        for number, sides in list(stretch.sides.items()):
            for side in sides:
                if side.live is not None:
                    live = PathEvents(side.live.recording, asked)
                    yield _live(live, side.live, number)
                yield from _failed(path, number, side)
    if program.graph is not None:
        for piece in (*program.graph.retired, *program.graph.pieces()):
            yield from _trips(piece, PathEvents(piece.recording, asked))


def _trips(piece: Piece, path: PathEvents) -> Iterator[Walk]:
    """Yield the parts of ways that calls have gone along a piece of the graph."""
    tape, whole = piece.recording.tape, _whole(path, piece.owner)
    for (entered, left), hits in list(piece.trips.items()):
        since = tape.guards[entered].position if entered >= 0 else 0
        begin = first = path.at(since, entered) if entered >= 0 else 0
        if entered >= 0 and begin < len(path.events) and path.events[begin].number == entered:
            first += 1
        if left is None:
            until, stop = len(tape.ops), len(path.events)
        elif left >= 0:
            until = tape.guards[left].position
            stop = path.at(until, left)
        else:  # what it raised is told of by itself
            until, stop = -left, path.at(-left, -1)
        ends = left is None
        yield Walk(
            path, path.events if left is None or left >= 0 else path.events[:stop],
            whole.end if ends else None, whole.end_under if ends else None, hits, begin, first,
            stop, is_part=entered >= 0 or not ends, positions=(since, until),
        )  # fmt: skip
    for (index, name), times in list(piece.owner.failures.items()):
        raised = _raised(path, index, name, times)
        raised.begin = raised.first = len(raised.events)
        raised.positions = index, index
        yield raised


def _asked(stretch: Stretch) -> Iterator[Key]:
    tape = stretch.recording.tape
    for number in list(stretch.sides):
        key = key_of_guard(tape.guards[number]) if number >= 0 else key_of_raise(tape.ops[~number])
        if key is not None:
            yield key


def _whole(path: PathEvents, taken: Path) -> Walk:
    under, found, file = _return_of(path)
    end = End("return", "return")
    if found is not None:
        end = End("return", " ".join(ast.unparse(found).split()), file, found.lineno)
    return Walk(path, path.events, end, under, taken.hits)


def _live(path: PathEvents, taken: Path, number: int | None) -> Walk:
    """A run that can only be run live, from a guard on or (None) from the start."""
    end = End("live", path.recording.tape.blockers[0])
    numbers = [event.number for event in path.events]
    under = numbers.index(number) if number is not None and number in numbers else None
    return Walk(path, path.events, end, under, taken.hits)


def _return_of(path: PathEvents) -> tuple[int | None, ast.Return | None, str]:
    """Find the `return` that a run ended with, as far as the branches tell."""
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
    place = _last_root_place(path.recording)
    if place is None:
        return None, None, ""
    return None, return_around(place) or last_return(place), place.file


def _last_root_place(recording: Recording) -> Place | None:
    """Return the last place in the code of the model itself."""
    for op in reversed(recording.tape.ops):
        if op.site is not None:
            places = [place for place, _ in running_code(op.scope, op.site)]
            if places:
                return places[-1]
    return None


def _raised(path: PathEvents, index: int, name: str, times: int) -> Walk:
    """A replay in which an op raised what the model has no handler for."""
    op = path.recording.tape.ops[index]
    before = sum(event.position <= index for event in path.events)
    place = None if op.site is None else user_code(op.scope, op.site)[0]
    end = End("raise", name) if place is None else End("raise", name, place.file, place.line)
    return Walk(path, path.events[:before], end, path.around(op, before), times)


def _failed(path: PathEvents, number: int, side: Side) -> Iterator[Walk]:
    """Runs that took another side than a path and then raised."""
    tape = path.recording.tape
    found = next((i for i, event in enumerate(path.events) if event.number == number), None)
    if found is None:
        position = tape.guards[number].position if number >= 0 else ~number
        events = [event for event in path.events if event.position <= position]
    else:
        event = path.events[found]
        outcome: Any = None
        if number < 0:
            outcome = raised_as(side.outcome)
        elif event.is_condition and not event.is_loop:
            outcome = outcome_of(tape.guards[number], side.outcome, event.header)
        events = [*path.events[:found], replace(event, outcome=outcome)]
    for (name, file, line), times in list(side.failures.items()):
        end = End("raise", name, file, line)
        yield Walk(path, events, end, found, times)


def most_divergent(tree: TraceTree) -> str | None:
    """Say what most of a tree's paths branch off at."""
    counts: dict[str, int] = {}
    paths = 0
    programs = list(tree.programs())
    for program in programs:
        paths += len(program.paths())
        for stretch, _ in program.stretches():
            if not stretch.sides:
                continue
            path = PathEvents(stretch.recording, frozenset(_asked(stretch)))
            events = {event.number: event for event in path.events}
            for number, sides in stretch.sides.items():
                where = _described(stretch.recording, number, events.get(number))
                known = sum(side.target is not None or side.live is not None for side in sides)
                counts[where] = counts.get(where, 0) + known
    label, values = differing(programs)
    if values > 1:
        counts[label] = values - 1
    if not counts:
        return None
    worst = max(counts, key=lambda where: counts[where])
    return f"{worst} ({counts[worst]} of {paths} paths)"


def _described(recording: Recording, number: int, event: Event | None) -> str:
    if event is not None:
        return f"`{event.header.text}` at {event.place}"
    tape = recording.tape
    site = tape.guards[number].site if number >= 0 else tape.ops[~number].site
    what = "a value" if number >= 0 else "an operation that can raise"
    return what if site is None else f"{what}, `{site.place.text}` at {site.place}"
