"""Folding the paths of a trace tree into the source that they went through."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from bendtrace.recording.parts import identical
from bendtrace.recording.recorder import Recording
from bendtrace.recording.sites import Place
from bendtrace.replay.graph import Graph, Piece
from bendtrace.replay.program import Program
from bendtrace.replay.stretches import Path, Side, Stretch
from bendtrace.replay.tree import TraceTree

__all__ = ["Walk", "fold", "most_divergent", "walks_of"]


@dataclass(eq=False)
class Walk:
    """One way through a program, or a part of one, and how many calls took it.

    Attributes:
        path: the events of the recorded run that it follows.
        events: those of them that it came to.
        end: how the run ended, as far as the walk leads there.
        end_under: the event under one of whose sides the end stands.
        hits: how many calls took it.
        begin: the first event whose outcome it tells of.
        first: the first event that it leads to; other walks have led to those before.
        stop: the event, after the others, that it came to and whose outcome other walks tell of:
            the number of events if it came to the end.
        ends: whether its calls ended with it; if not, other walks tell how they went on.
        is_part: whether it is a part of a way.
        positions: the ops before which it begins and ends.
    """

    path: PathEvents
    events: list[Event]
    end: End | None
    end_under: int | None
    hits: int
    begin: int = 0
    first: int = 0
    stop: int = -1
    ends: bool = True
    is_part: bool = False
    positions: tuple[int, int] = (0, -1)

    def __post_init__(self) -> None:
        if self.stop < 0:
            self.stop = len(self.events)
        if self.positions[1] < 0:
            self.positions = self.positions[0], len(self.path.recording.tape.ops)

    @property
    def passed(self) -> list[Event]:
        """The events whose outcome it tells of."""
        return self.events[self.begin : self.stop]

    @property
    def has_raised(self) -> bool:
        """Whether its calls ended with an error."""
        return self.end is not None and self.end.kind == "raise"

    @property
    def leads_to_end(self) -> bool:
        """Whether nothing that anybody is told of lies between it and the end of the run."""
        return self.end is not None and self.first <= self.stop == len(self.events)


def fold(tree: TraceTree) -> list[ProgramOutline]:
    """Fold each program of a tree, in the order in which they were traced."""
    programs = sorted(tree.programs(), key=lambda program: program.serial)
    selected = selection(programs)
    outlines = []
    for number, (program, facts) in enumerate(zip(programs, selected, strict=True), 1):
        flow, steps, runs = Flow(), Counter[Step](), 0
        for walk in walks_of(program):
            _add(flow, walk, steps)
            runs += walk.hits if walk.ends and not walk.has_raised else 0
        inputs, traces = signature_of(program), len(program.recordings())
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
        before, by = branch, "" if event.is_loop else value_text(taken.value)
    if walk.end is None or not (walk.ends or walk.leads_to_end):
        return
    inside = flow if walk.end_under is None else flows[walk.end_under]
    end = walk.end
    key = (end.kind, end.text, end.file, end.line)
    reached = inside.ends.setdefault(key, End(*key))
    reached.hits += walk.hits if walk.ends else 0
    if walk.leads_to_end:
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
    graph = program.graph
    stretches = [stretch for stretch, _ in program.stretches()]
    asked = frozenset(key for stretch in stretches for key in _asked(stretch))
    for stretch in stretches:
        path = PathEvents(stretch.recording, asked)
        if graph is None:
            yield _whole(path, stretch)
            for (index, name), times in list(stretch.failures.items()):
                yield _raised(path, index, name, times)
        for number, sides in list(stretch.sides.items()):
            for side in sides:
                yield from _elsewhere(program, stretch, number, side, asked)
    if graph is not None:
        for piece in (*graph.retired, *graph.pieces()):
            yield from _trips(piece, PathEvents(piece.recording, asked))


def _elsewhere(
    program: Program, stretch: Stretch, number: int, side: Side, asked: frozenset[Key]
) -> Iterator[Walk]:
    """Yield what calls did after a guard that left the replay: those that ran live, or raised."""
    graph, walks = program.graph, []
    if side.live is not None:
        live = PathEvents(side.live.recording, asked)
        walks.append(_live(live, side.live, _twin(stretch, number, side)))
    if side.failures:
        runs = [stretch.recording]
        if graph is not None:  # the run in whose place another one is now may have got further
            runs += [old.recording for old in graph.retired[::-1] if old.owner is stretch]
        runs = [run for run in runs if number < len(run.tape.guards)]
        walks += _failed(PathEvents(runs[0], asked), number, side) if runs else ()
    if graph is not None and not _is_only_way(graph, stretch, number):
        for walk in walks:  # how they came to the guard is not known
            under = len(walk.events) if walk.end_under is None else walk.end_under
            walk.begin, walk.first, walk.is_part = under, min(under + 1, walk.stop), True
    yield from walks


def _twin(stretch: Stretch, number: int, side: Side) -> int:
    """Return the guard at which a run that was made anew left the replay, by its own numbers."""
    state = stretch.recording.tape.states.get(number)
    if state is not None and side.live is not None:
        tape = side.live.recording.tape
        for own, other in tape.states.items():
            if other.key == state.key and identical(tape.guards[own].answer, side.outcome):
                return own
    return number


def _is_only_way(graph: Graph, stretch: Stretch, number: int) -> bool:
    """Whether there is but one way from the start to a guard of some code."""
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


def _trips(piece: Piece, path: PathEvents) -> Iterator[Walk]:
    """Yield the parts of ways that calls have gone along a piece of the graph."""
    tape, whole = piece.recording.tape, _whole(path, piece.owner)
    for (entered, left), hits in list(piece.trips.items()):
        since = tape.guards[entered].position if entered >= 0 else 0
        begin = path.at(since, entered) if entered >= 0 else 0
        first = begin + 1 if entered >= 0 else 0  # another trip has led to where it begins
        is_part = entered >= 0 or left is not None
        if left is not None and left < 0:
            names = sorted(name for index, name in piece.owner.failures if index == ~left)
            walk = _raised(path, ~left, " or ".join(names), hits)
            walk.begin, walk.first = begin, min(first, len(walk.events))
            walk.is_part, walk.positions = is_part, (since, -left)
            yield walk
            continue
        until = len(tape.ops) if left is None else tape.guards[left].position
        stop = len(path.events) if left is None else path.at(until, left)
        yield Walk(
            path, path.events, whole.end, whole.end_under, hits, begin, first, stop,
            ends=left is None, is_part=is_part, positions=(since, until),
        )  # fmt: skip


def _asked(stretch: Stretch) -> Iterator[Key]:
    tape = stretch.recording.tape
    for number in list(stretch.sides):
        if number >= len(tape.guards):  # of a run in whose place this one is
            continue
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
    return Walk(
        path, path.events[:before], end, path.around(op, before), times, positions=(0, index + 1)
    )


def _failed(path: PathEvents, number: int, side: Side) -> Iterator[Walk]:
    """Runs that took another side than a path and then raised."""
    tape = path.recording.tape
    found = next((i for i, event in enumerate(path.events) if event.number == number), None)
    position = tape.guards[number].position if number >= 0 else ~number
    if found is None:
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
        yield Walk(path, events, end, found, times, positions=(0, position))


def most_divergent(tree: TraceTree) -> str | None:
    """Say what most of a tree's paths branch off at."""
    counts: dict[str, int] = {}
    paths = 0
    programs = list(tree.programs())
    for program in programs:
        paths += len(program.recordings())
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
