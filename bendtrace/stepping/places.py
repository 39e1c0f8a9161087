"""What the places of a stepped run are called: questions, lines, nodes, modules and layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bendtrace._places import is_file, read_place
from bendtrace._trace import Trace
from bendtrace.errors import InputError, NodePathError
from bendtrace.flow import FlowStep
from bendtrace.history.names import Names, call_around, holders_of, near_names, passes_of
from bendtrace.interject.resolver import describe_where, meant_by, name_of
from bendtrace.paths.nodes import Pass, TreeNode
from bendtrace.source.sites import Place, Site
from bendtrace.stepping.visit import Event
from bendtrace.tape.tape import ModuleCall, Tape

__all__ = ["Line", "Places", "is_of", "place_of", "places_of"]


class Line(NamedTuple):
    """A line of a file, or of any file if `file` is ""."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


def places_of(event: Event, tape: Tape) -> tuple[Place, ...]:
    """Return where an event is, out to the code of the model that called it."""
    records: Sequence[Any] = tape.ops if event.kind == "op" else tape.guards
    site: Site | None = records[event.index].site
    scope: ModuleCall | None = records[event.index].scope
    places: list[Place] = []
    while True:
        places += () if site is None else site.places
        if scope is None:
            return tuple(places)
        site, scope = scope.site, scope.parent


def place_of(event: Event, tape: Tape) -> Place | None:
    """Return where an event is in the code of the model, or else in torch's; None if unknown."""
    places = places_of(event, tape)
    return next((each for each in places if not each.in_torch), places[0] if places else None)


def is_of(step: FlowStep, event: Event, tape: Tape) -> bool:
    """Return whether an event is the question of a flow step."""
    if event.kind != "question" or event.index != step.guard:
        return False
    # Not by the instruction: the test of a `while` is compiled twice, and the step has the first.
    asked = (step.place.file, step.place.function, step.place.line)
    places = places_of(event, tape)
    return not places or any((each.file, each.function, each.line) == asked for each in places)


class Places:
    """Finds the events of a place in a run.

    Args:
        function: the model.
        trace: the run.
        events: its events.
    """

    def __init__(self, function: Callable[..., Any], trace: Trace, events: list[Event]) -> None:
        self._known = _Known(function, trace)
        self._trace = trace
        self._tape = trace._recording.tape
        self._events = events

    def numbers(self, place: Any) -> list[int]:
        """Return the events of a place in order; at least one.

        Raises:
            InputError: there is none.
            NodePathError: the run has no such node.
        """
        if isinstance(place, FlowStep):
            return self._questions(place)
        line = _line(place)
        if line is None:
            calls = self._calls(place)
            return calls or [number for number, _ in self._values(place, is_value=False)]
        found = [
            number
            for number, event in enumerate(self._events)
            if any(
                each.line == line.line and (not line.file or is_file(each.file, line.file))
                for each in places_of(event, self._tape)
            )
        ]
        if not found:
            raise InputError(f"no event of the run is at {place}")
        return found

    def values(self, place: Any, kind: str = "") -> list[tuple[int, tuple[Any, ...]]]:
        """Return the events whose values a place stands for, and where in their results.

        Args:
            place: the place.
            kind: which kind of events to prefer at a line.

        Raises:
            InputError: there is none.
            NodePathError: the run has no such node.
        """
        if not isinstance(place, FlowStep) and _line(place) is None:
            return self._values(place)
        numbers = self.numbers(place)
        if kind:
            numbers = [n for n in numbers if self._events[n].kind == kind] or numbers
        return [(number, ()) for number in numbers]

    def _questions(self, step: FlowStep) -> list[int]:
        for number, event in enumerate(self._events):
            if is_of(step, event, self._tape):
                return [number]
        raise InputError(f"{step!r} is no question of this run that can be answered")

    def _calls(self, place: Any) -> list[int]:
        """Return the first event of each selected call of a module; nothing if it is no module."""
        found = []
        for _, node, chosen in self._meant(place):
            if node.kind != "graph" or not node.module:
                return []
            calls = self._tape.calls
            for number in range(len(node.passes)) if chosen is None else chosen:
                found.append(self._first_in(calls[node.passes[number].index]))
        return sorted(found)

    def _first_in(self, call: ModuleCall) -> int:
        for number, event in enumerate(self._events):
            records: Sequence[Any] = self._tape.ops if event.kind == "op" else self._tape.guards
            scope = records[event.index].scope
            while scope is not None and scope is not call:
                scope = scope.parent
            # A call without events is before the next op: it has asked nothing itself.
            if scope is call or (event.kind == "op" and event.position >= call.stop):
                return number
        return len(self._events)

    def _values(self, place: Any, *, is_value: bool = True) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the events that compute the values of a node, and where in their results.

        Args:
            place: the node.
            is_value: whether the value itself is asked for, and not only when it was computed.
        """
        tree = self._trace._run.tree
        numbers = {e.index: number for number, e in enumerate(self._events) if e.kind == "op"}
        found = set()
        for _, node, chosen in self._meant(place):
            for data, made in passes_of(node, chosen):
                assert made.index is not None
                index, element = tree.origin(made.index, made.element)
                if index not in numbers:
                    raise InputError(
                        f"{describe_where(place)} is no op of the run: what existed before it, "
                        "sizes and numbers cannot be gone to, or set"
                    )
                if node.kind == "graph":
                    self._require_last(place, node.module, index)
                if is_value and data.role in ("input", "output"):
                    self._require_unwritten(place, data, made)
                found.add((numbers[index], tuple(element)))
        return sorted(found)

    def _require_last(self, place: Any, module: str, index: int) -> None:
        """Raise if the output of a module is not its own, or is used in it as well."""
        tape = self._tape
        calls = [call for call in tape.calls if call.path == module]
        for call in calls:
            if call.start <= index < call.stop:
                inside = tape.ops[index + 1 : call.stop]
                if not any(index in op.operands for op in inside):
                    return
        raise InputError(
            f"the output of {describe_where(place)} is also used inside of it, or computed "
            "elsewhere: name the op"
        )

    def _require_unwritten(self, place: Any, data: TreeNode, made: Pass) -> None:
        """Raise if what a call received or returned is no longer what the op had returned."""
        tape, tree, index = self._tape, self._trace._run.tree, made.index
        number = call_around(holders_of(tree.data), data, made)
        assert index is not None
        value = tree.origin(index, made.element)
        names = {op.index for op in tape.ops[index:] if tree.origin(op.index, ()) == value}
        stop = len(tape.ops)
        if number is not None:
            call = tape.calls[number]
            stop = call.start if data.role == "input" else call.stop
        wrote = [op.index for op in tape.ops[index + 1 : stop] if not names.isdisjoint(op.writes)]
        # The first op that read it afterwards knows if something wrote under another name.
        later = (op.reads for op in tape.ops[stop:] if not names.isdisjoint(op.operands))
        reads = next(later, self._trace._recording.output_reads)
        wrote += [reads[name] for name in names & reads.keys() if reads[name] < stop]
        if wrote:
            name = self._trace.names[max(wrote)]
            raise InputError(
                f"{describe_where(place)} was written to in place by {name!r} after its op "
                "returned it: name the op"
            )

    def _meant(self, place: Any) -> Sequence[Any]:
        name = name_of(place, self._known)
        if name is None:
            raise InputError(f"{place!r} is no place in a run")
        meant = meant_by(name, self._known)
        if meant is None or not meant.places:
            near = near_names(name, self._trace._run.naming.listed())
            said = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise NodePathError(f"this run has no {name!r}{said}", name, tuple(near))
        return meant.places


def _line(place: Any) -> Line | None:
    if isinstance(place, Line):
        return place
    found = read_place(place) if isinstance(place, str) else None
    # `layers.relu:2` is a pass of an op.
    return Line(*found) if found and found[0].endswith((".py", ">", "]")) else None


class _Known:
    """What is known of the model, as names are resolved: this run alone."""

    def __init__(self, model: Callable[..., Any], trace: Trace) -> None:
        self.model = model
        self._trace = trace

    def names(self) -> list[Names]:
        """Return the names in the run."""
        return [self._trace._run.naming]

    def mirror_path(self, name: str) -> str:
        """Return the path of a node of the mirror of the run."""
        run = self._trace._run
        return run.tree.path_of(run.names.index(name)) if name in run.names else ""
