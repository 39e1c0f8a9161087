"""StateGraph: the known paths of a model as a networkx graph, with its loops and joins."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

import networkx as nx

from bendtrace.engine.program import Program
from bendtrace.engine.tree import TraceTree
from bendtrace.errors import InputError
from bendtrace.flow import _plain_json
from bendtrace.log.entries import counted
from bendtrace.python.sites import place_text
from bendtrace.record.op_names import NodeRef
from bendtrace.record.recorder import Recording
from bendtrace.show.model_tree import Chart, joined, selection, signature_of
from bendtrace.show.outline import outcome_text
from bendtrace.show.walks import PathEnd, PathEvent, Walk, key_of_guard, walks_of
from bendtrace.tape.tape import OpKind, Tape

if TYPE_CHECKING:
    from bendtrace._trace import Trace
    from bendtrace.show.picture import Format, Picture

    MultiDiGraph = nx.MultiDiGraph[Any]
else:  # where it is not generic
    MultiDiGraph = nx.MultiDiGraph

EdgeName = tuple[str, str, str]


class StateGraph(MultiDiGraph):
    """The known paths of a model, as a networkx multigraph of states and the segments between them.

    A node is a state: a question that the model's Python asked about a value, together with
    everything that it held at that moment. An edge is a segment: the operations that follow an
    answer, up to the next question. Paths that reach the same state join in it, and a `while` is a
    cycle. The graph is a snapshot; names and attributes are plain values, so it can be pickled, and
    written as JSON or GraphML.

    Nodes are called `program 1`, `1.1`, `1.2`, ... and have the attributes

    - `kind`: "start" for a program, the kind of flow step for a question ("if", "while", "for",
      "value", ...), and "return", "raise" or "live" for an end;
    - `text`, the source text; `at`, its place ("file:line"); `hits`, how often calls reached it;
      and `program`, the number of the program, as in `BendedModule.tree`;
    - a start also `selected_by`, the properties of its inputs that differ from those of other
      programs, and `joins`, whether paths join in it. If they do not, each question has the nodes
      of a tree, one for each path to it;
    - a question also `module_path`; `answers`, the number of its known answers; `never`, the sides
      of a condition that no call took; `when`: "data" if the value is asked for during the run,
      "input" or "implied" if the inputs decide beforehand; and `known_by`: "state", or "path" if
      the state could not be read, so that the node is a position on a path.

    Edges have the answer as their key, and the attributes

    - `answer`, a plain value, and `outcome`, its text; the edge out of a start has none;
    - `hits`, how many calls took it;
    - `ops`, the number of operations in it; `trace`, the recorded run that contains it, as a
      position in `traces`; and `first` and `stop`, its range in `Trace.ops`.

    Counts include only calls that came to an end. For a call that raised after a new answer, the
    segment before the question counts only if it is the only one that leads there.

    Attributes:
        traces: the recorded runs. A copy has none.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     for scale in (1.0, 2.0):
        ...         x = x.relu() if x.sum() > 0 else x - scale
        ...     return x
        >>> bended = bt.BendedModule(model)
        >>> for value in (1.0, -1.0, 1.5, 2.0):
        ...     _ = bended(torch.tensor([value]))
        >>> graph = bended.graph
        >>> graph
        <StateGraph: 1 program, 2 states, 5 segments>
        >>> graph.nodes["1.1"]["text"], graph.nodes["1.1"]["hits"], graph.nodes["1.1"]["answers"]
        ('... if x.sum() > 0 else ...', 4, 2)
        >>> list(graph.edges("1.1", keys=True, data="hits"))
        [('1.1', '1.2', 'True', 3), ('1.1', '1.2', 'False', 1)]
        >>> graph.operations(("1.1", "1.2", "False"))
        [%sub, %sum_1, %gt_1, %bool_1]
    """

    traces: tuple[Trace, ...] = ()

    def operations(self, edge: EdgeName) -> list[NodeRef]:
        """Return the operations of an edge, by the names of the nodes in its trace.

        Args:
            edge: its start, its end, and its key.

        Returns:
            Nodes of the mirror, `graph.traces[...].graph`, of the run that contains the edge.

        Raises:
            InputError: the edge does not exist, or this is a copy, which has no traces.
        """
        if not self.has_edge(*edge):
            raise InputError(f"there is no edge {edge!r}: edges(keys=True) lists them")
        data = self.edges[edge]
        if not self.traces:
            raise InputError("a copy of the graph has no traces: use BendedModule.graph itself")
        trace = self.traces[data["trace"]]
        done = _operations(trace._recording.tape, data["first"], data["stop"])
        return [NodeRef(trace.names[index]) for index in done]

    def draw(
        self, path: str | os.PathLike[str] | None = None, format: Format | None = None
    ) -> Picture:
        """Draw it as a flow chart, one program below the other.

        Args:
            path: where to save the picture; the ending selects the format: .svg, .png, .pdf, .html
                or .dot.
            format: the file format, if the file name's ending does not say.

        Raises:
            InputError: as for `Picture.save`. Nothing is written then.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
            >>> _ = bended(torch.ones(2))
            >>> bended.graph.draw().svg[:4]
            '<svg'
        """
        chart = Chart(repr(self)[1:-1])
        for name, data in self.nodes(data=True):
            if data["kind"] == "start":
                facts = data["selected_by"].split("; ") if data["selected_by"] else ()
                chart.begin(name, data["text"], counted(data["hits"], "run"), facts)
            else:
                chart.add(
                    name, data["kind"], data["text"], [joined(f"{data['hits']}x", data["at"])]
                )
        for source, target, data in self.edges(data=True):
            chart.link(source, target, data["outcome"], data["hits"])
        return chart.picture().saved_to(path, format)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "traces"}

    def __repr__(self) -> str:
        kinds = [str(data["kind"]) for _, data in self.nodes(data=True)]
        starts, ends = kinds.count("start"), sum(kind in _ENDS for kind in kinds)
        counts = (
            counted(starts, "program"),
            counted(len(kinds) - starts - ends, "state"),
            counted(self.number_of_edges(), "segment"),
        )
        return f"<StateGraph: {', '.join(counts)}>"

    def __str__(self) -> str:
        lines = []
        for name, data in self.nodes(data=True):
            at = f" at {data['at']}" if data["at"] else ""
            inside = f" in {data['module_path']}" if data.get("module_path") else ""
            head = "" if data["kind"] == "start" else f"{name}  "
            lines.append(f"{head}{data['text']}{at}{inside}, {data['hits']}x")
            for _, target, edge in self.out_edges(name, data=True):
                by = f"{edge['outcome']} " if edge["outcome"] else ""
                lines.append(f"    {by}{edge['hits']}x -> {target} ({counted(edge['ops'], 'op')})")
        return "\n".join(lines)


_ENDS = ("return", "raise", "live")


def state_graph(tree: TraceTree, trace_of: Callable[[Recording, Program], Trace]) -> StateGraph:
    """Return the known paths of a model as a graph."""
    graph = StateGraph()
    programs = sorted(tree.programs(), key=lambda program: program.serial)
    traces: dict[Recording, tuple[int, Trace]] = {}
    for number, (program, facts) in enumerate(zip(programs, selection(programs), strict=True), 1):
        states = _ProgramStates(program)
        for recording in states.recordings():
            traces.setdefault(recording, (len(traces), trace_of(recording, program)))
        states.add_to(graph, number, facts, {run: place for run, (place, _) in traces.items()})
    graph.traces = tuple(trace for _, trace in traces.values())
    return graph


@dataclass(eq=False)
class _Segment:
    """An edge: an answer, and the known operations after it."""

    answer: Any
    outcome: str
    target: _Spot
    recording: Recording
    first: int
    stop: int
    hits: int = 0


@dataclass(eq=False)
class _Spot:
    """A node: the start, a state, a position on a path, or an end."""

    event: PathEvent | None = None
    end: PathEnd | None = None
    key: bytes | None = None
    out: dict[Hashable, _Segment] = field(default_factory=dict)

    def sorted(self) -> list[_Segment]:
        """Return its outgoing edges: for a condition True first, else by frequency."""
        if self.event is not None and self.event.is_condition:
            return sorted(self.out.values(), key=lambda segment: not segment.answer)
        return sorted(self.out.values(), key=lambda segment: -segment.hits)


class _ProgramStates:
    """The states of one program, and the segments between them.

    A state is identified by its key. If a run has not read it, it is identified by the previous
    state and the answer that led on; otherwise it is only a position on a path.
    """

    def __init__(self, program: Program) -> None:
        self.start = _Spot()
        self._program = program
        self._states = {}
        if program.graph is not None:
            for node in program.graph.nodes():
                key = node.piece.recording.tape.states[node.number].key
                self._states[key] = node
        self._places: dict[Hashable, _Spot] = {}
        self._current = {id(path.recording) for path in program.paths()}
        for walk in walks_of(program):
            self._follow(walk)

    def recordings(self) -> Iterator[Recording]:
        """Yield the runs that contain the segments."""
        for place in self._places_in_order():
            for segment in place.sorted():
                yield segment.recording

    def _places_in_order(self) -> list[_Spot]:
        """Return the places such that each comes after all its predecessors, loops aside."""
        flow: nx.DiGraph[_Spot] = nx.DiGraph()
        flow.add_nodes_from((self.start, *self._places.values()))
        for place in list(flow):
            flow.add_edges_from((place, lead.target) for lead in reversed(place.sorted()))
        done = list(nx.dfs_postorder_nodes(flow, self.start))
        others = dict.fromkeys(self._places.values())  # of which some call is known no more
        return list(dict.fromkeys([*done[::-1], *others]))

    def _follow(self, walk: Walk) -> None:
        """Add the content of a walk."""
        recording, events, ends = walk.path.recording, walk.events, walk.leads_to_end
        if walk.end is not None and walk.end.kind == "live":
            # There is one run for the rest, and others may have done something else.
            events = [] if walk.end_under is None else events[: walk.end_under + 1]
        first, stop = walk.first, min(walk.stop, len(events))
        if 0 < first <= len(events):
            first = _question(events, first - 1) + 1
        stop = _question(events, stop)
        place, before, answer, position = self.start, None, None, 0
        for number, event in enumerate(events[: stop + 1]):
            if event.number is None:  # a whole `while`, which asks nothing itself
                continue
            after = self._place_of(recording, event, place, before, answer)
            here = event.position
            if first <= number:
                self._add(walk, place, before, answer, after, position, here)
            place, before, position = after, event, here
            answer = _answer_of(recording.tape, event)
        if ends and walk.end is not None:
            end = (walk.end.kind, walk.end.text, walk.end.file, walk.end.line)
            after = self._places.setdefault(end, _Spot(end=PathEnd(*end)))
            self._add(walk, place, before, answer, after, position, walk.positions[1])

    def _add(
        self, walk: Walk, place: _Spot, before: PathEvent | None, answer: Any, after: _Spot,
        first: int, stop: int,
    ) -> None:  # fmt: skip
        recording, by = walk.path.recording, f"{type(answer).__name__} {answer!r}"
        segment = place.out.get((by, after))
        if segment is None or id(segment.recording) not in self._current:
            hits = 0 if segment is None else segment.hits
            outcome = "" if before is None else outcome_text(answer)
            segment = _Segment(answer, outcome, after, recording, first, max(first, stop), hits)
            place.out[by, after] = segment
        segment.hits += walk.hits

    def _place_of(
        self,
        recording: Recording,
        event: PathEvent,
        place: _Spot,
        before: PathEvent | None,
        answer: Any,
    ) -> _Spot:
        """Return the place of a run when it asked a question."""
        key = self._key_of(recording, event, place, before)
        place_key: Hashable = key
        if key is None:
            place_key = place, f"{type(answer).__name__} {answer!r}", event.key
        found = self._places.get(place_key)
        if found is None:
            found = self._places[place_key] = _Spot(event, key=key)
        return found

    def _key_of(
        self, recording: Recording, event: PathEvent, place: _Spot, before: PathEvent | None
    ) -> bytes | None:
        """Return the key of the state of a run, even if the run has not read it."""
        tape, number, graph = recording.tape, event.number, self._program.graph
        if graph is None or number is None:
            return None
        if number in tape.states:
            return recording.tape.states[number].key
        if before is None:
            piece, ahead = graph.first, number
        else:
            node = None if place.key is None else self._states.get(place.key)
            if node is None or before.number is None:
                return None
            exit = node.after(tape.guards[before.number].answer)
            if exit is None:
                return None
            piece, ahead = exit.piece, exit.number + number - before.number
        other = piece.recording.tape
        if ahead not in other.states:
            return None
        is_same = key_of_guard(other.guards[ahead]) == key_of_guard(tape.guards[number])
        return piece.recording.tape.states[ahead].key if is_same else None

    def add_to(
        self, graph: StateGraph, number: int, facts: list[str], traces: dict[Recording, int]
    ) -> None:
        places = self._places_in_order()
        names = {place: f"{number}.{i}" for i, place in enumerate(places)}
        names[self.start] = f"program {number}"
        into: dict[_Spot, int] = {}
        for place in places:
            for segment in place.out.values():
                into[segment.target] = into.get(segment.target, 0) + segment.hits
        for place in places:
            hits = sum(segment.hits for segment in place.out.values()) or into.get(place, 0)
            graph.add_node(names[place], **self._data(place, number, facts), hits=hits)
        for place in places:
            for segment in place.sorted():
                self._add_edge(graph, names, place, segment, traces)

    def _data(self, place: _Spot, number: int, facts: list[str]) -> dict[str, Any]:
        event, end = place.event, place.end
        data: dict[str, Any] = {"kind": "start", "text": "", "at": "", "program": number}
        if end is not None:
            return {**data, "kind": end.kind, "text": end.text, "at": end.where}
        if event is None:
            text = f"program {number}: {signature_of(self._program)}"
            joins = self._program.graph is not None
            return {**data, "text": text, "selected_by": "; ".join(facts), "joins": joins}
        answers = {segment.answer for segment in place.out.values()}
        never = [side for side in (True, False) if event.is_condition and side not in answers]
        return {
            **data,
            "kind": event.kind,
            "text": event.header.text,
            "at": place_text(event.place.file, event.place.line),
            "module_path": event.module_path,
            "answers": len(answers),
            "never": ", ".join(map(str, never)),
            "when": "" if event.when is None else event.when.value,
            "known_by": "path" if place.key is None else "state",
        }

    @staticmethod
    def _add_edge(
        graph: StateGraph, names: dict[_Spot, str], place: _Spot, segment: _Segment,
        traces: dict[Recording, int],
    ) -> None:  # fmt: skip
        source, target = names[place], names[segment.target]
        key, more = segment.outcome, 1
        while graph.has_edge(source, target, key):  # texts of values are cut short
            more += 1
            key = f"{segment.outcome} ({more})"
        tape = segment.recording.tape
        data: dict[str, Any] = (
            {} if place.event is None else {"answer": _plain_json(segment.answer)}
        )
        data |= {"outcome": segment.outcome, "hits": segment.hits}
        data["ops"] = len(_operations(tape, segment.first, segment.stop))
        data |= {"trace": traces[segment.recording], "first": segment.first, "stop": segment.stop}
        graph.add_edge(source, target, key, **data)


def _question(events: list[PathEvent], number: int) -> int:
    """Return the first event, from one on, that asks a question."""
    while number < len(events) and events[number].number is None:
        number += 1
    return number


def _answer_of(tape: Tape, event: PathEvent) -> Any:
    """Return the answer of an event; for a loop over an iterable, the number of iterations."""
    if event.is_loop and event.number is not None:
        return tape.guards[event.number].answer
    return event.outcome


def _operations(tape: Tape, first: int, stop: int) -> list[int]:
    """Return the operations in a range: not arguments, state, or elements of results."""
    return [
        op.index
        for op in tape.ops[first:stop]
        if op.kind is OpKind.CALL or (op.kind is OpKind.SCALAR and op.target is not getitem)
    ]
