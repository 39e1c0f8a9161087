"""Outline: the trace tree of a model, folded into its source."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from bendtrace.engine.guard_kinds import GuardKind
from bendtrace.engine.program import Program
from bendtrace.engine.stretches import Failure
from bendtrace.engine.tree import TraceTree
from bendtrace.flow import steps_of
from bendtrace.log.entries import counted
from bendtrace.python.checks import required_choice
from bendtrace.python.lazy import networkx as nx
from bendtrace.python.sites import place_text
from bendtrace.record.iterations import user_code
from bendtrace.record.recorder import Recording
from bendtrace.show.canvas import cut
from bendtrace.show.outline import (
    OutlineBranch,
    ProgramOutline,
    SideCode,
    Step,
    end_text,
    outcome_text,
    programs_as_text,
    summary,
    title,
)
from bendtrace.show.paint import figure, paint
from bendtrace.show.picture import Format, Picture
from bendtrace.show.scene import Arrow, Scene, SceneNode
from bendtrace.show.walks import PathEnd, PathEvent, PathEvents, Walk, branch_keys, walks_of
from bendtrace.tape.captured import Access, Captured, CaptureKind, Keys, Length, TensorFacts
from bendtrace.tape.tape import AfterOp, OpKind, Stop, TensorMeta


def fold_programs(tree: TraceTree) -> list[ProgramOutline]:
    """Fold each program of a tree, in the order in which they were traced."""
    programs = sorted(tree.programs(), key=lambda program: program.serial)
    selected = selection(programs)
    outlines = []
    for number, (program, facts) in enumerate(zip(programs, selected, strict=True), 1):
        flow, steps, runs = SideCode(), Counter[Step](), 0
        for walk in walks_of(program):
            _add_walk(flow, walk, steps)
            runs += walk.hits if walk.ends and not walk.has_raised else 0
        inputs, traces = signature_of(program), len(program.recordings())
        outlines.append(ProgramOutline(number, inputs, facts, traces, runs, flow, steps))
    return outlines


def _add_walk(flow: SideCode, walk: Walk, steps: Counter[Step]) -> None:
    flows: list[SideCode] = []
    before: OutlineBranch | None = None
    by = ""
    for number, event in enumerate(walk.events):
        inside = flow if event.under is None else flows[event.under]
        branch = _branch(inside, event)
        branch.modules[event.module_path] = None
        branch.when.add(event.when)
        taken = branch.side(event.outcome)
        if walk.begin <= number < walk.stop:
            taken.hits += walk.hits
            if event.is_condition:
                branch.turns[event.module_path, event.iteration][event.outcome] += walk.hits
        if walk.first <= number <= walk.stop:
            steps[before, by, branch] += walk.hits
        if event.iterations is not None or walk.is_part:
            _count_rounds(branch, walk, number)
        flows.append(taken.flow)
        before, by = branch, "" if event.is_loop else outcome_text(taken.value)
    if walk.end is None or not (walk.ends or walk.leads_to_end):
        return
    inside = flow if walk.end_under is None else flows[walk.end_under]
    end = walk.end
    key = (end.kind, end.text, end.file, end.line)
    reached = inside.ends.setdefault(key, PathEnd(*key))
    reached.hits += walk.hits if walk.ends else 0
    if walk.leads_to_end:
        steps[before, by, reached] += walk.hits


def _count_rounds(branch: OutlineBranch, walk: Walk, number: int) -> None:
    """Count how often a loop was entered, and how often its body began."""
    event, hits = walk.events[number], walk.hits
    # Calls that reach one state are in the same iteration of a `for`, as the last segment shows.
    tells = walk.begin <= walk.path.last_under(number) < walk.stop
    if walk.is_part and event.is_loop and event.kind == "while":  # its test has several parts
        branch.is_joined, branch.is_counted = True, False
        branch.entered += hits if walk.first <= number <= walk.stop else 0
    elif event.iterations is not None and (not walk.is_part or (event.is_loop and tells)):
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


def _branch(flow: SideCode, event: PathEvent) -> OutlineBranch:
    """Return the branch of an event; in recursive code, the branch of the outermost call."""
    owner = flow.owner
    while owner is not None:
        if owner.key == event.key:
            return owner
        owner = owner.inside.owner if owner.inside is not None else None
    branch = flow.branches.get(event.key)
    if branch is None:
        branch = flow.branches[event.key] = OutlineBranch(
            event.key, flow, event.order, event.kind, event.header.text, event.place,
            is_condition=event.is_condition, is_loop=event.is_loop,
        )  # fmt: skip
    return branch


def most_divergent(tree: TraceTree) -> str | None:
    """Return the place where most of a tree's paths branch off."""
    counts: dict[str, int] = {}
    paths = 0
    programs = list(tree.programs())
    for program in programs:
        paths += len(program.recordings())
        for stretch, _ in program.stretches():
            if not stretch.sides:
                continue
            path = PathEvents(stretch.recording, frozenset(branch_keys(stretch)))
            events: dict[Any, PathEvent] = {event.number: event for event in path.events}
            for number, sides in stretch.sides.items():
                where = _describe_event(stretch.recording, number, events.get(number))
                count = sum(side.target is not None or side.live is not None for side in sides)
                counts[where] = counts.get(where, 0) + count
    label, values = distinguishing_fact(programs)
    if values > 1:
        counts[label] = values - 1
    if not counts:
        return None
    worst = max(counts, key=lambda where: counts[where])
    return f"{worst} ({counts[worst]} of {paths} paths)"


def _describe_event(recording: Recording, number: Stop, event: PathEvent | None) -> str:
    if event is not None:
        return f"`{event.header.text}` at {event.place}"
    tape = recording.tape
    if isinstance(number, AfterOp):
        what, site = "an operation that can raise", tape.ops[number.index].site
    else:
        what, site = "a value", tape.guards[number].site
    return what if site is None else f"{what}, `{site.place.text}` at {site.place}"


_WIDEST = 64  # letters of a line
_FACTS = 4
_OUTCOMES = 6  # of a branch that start side by side
_KINDS = {"start": "input", "return": "output", "live": "live", "raise": "raise"}


class Chart:
    """Flow charts of programs, one below the other."""

    def __init__(self, title: str, note: str = "") -> None:
        self._scene = Scene(SceneNode("root", "root", "", children=[]), [], title, note, {})
        self._nodes: dict[Hashable, SceneNode] = {}
        self._hits: Counter[tuple[SceneNode, SceneNode, str]] = Counter()

    def begin(self, key: Hashable, title: str, counts: str, facts: Iterable[str]) -> None:
        """Begin the chart of another program."""
        name, _, inputs = title.partition(": ")
        box = SceneNode(f"b{len(self._nodes)}", "module", name, [cut(inputs, 2 * _WIDEST)], title)
        box.children = []
        assert self._scene.root.children is not None
        self._scene.root.children.append(box)
        lines = [f"where {fact}" for fact in facts][:_FACTS]
        self.add(key, "start", counts, lines)

    def add(self, key: Hashable, kind: str, text: str, lines: Iterable[str]) -> None:
        """Add a node to the latest program."""
        programs = self._scene.root.children
        assert programs
        lines = [cut(line, _WIDEST) for line in lines if line]
        tooltip = "\n".join([text, *lines])
        node = SceneNode(f"n{len(self._nodes)}", _KINDS.get(kind, "decision"), text, lines, tooltip)
        self._nodes[key] = node
        assert programs[-1].children is not None
        programs[-1].children.append(node)

    def link(self, source: Hashable, target: Hashable, outcome: str, hits: int) -> None:
        """Add an edge from one node to another, with an outcome and how often calls took it."""
        self._hits[self._nodes[source], self._nodes[target], outcome] += hits

    def picture(self) -> Picture:
        """Return the picture."""
        outcomes: dict[SceneNode, Counter[str]] = defaultdict(Counter)
        for (source, _, outcome), hits in self._hits.items():
            outcomes[source][outcome] += hits
        texts: dict[tuple[SceneNode, SceneNode, str], list[str]] = defaultdict(list)
        for (source, target, outcome), hits in self._hits.items():
            port = outcome
            if len(outcomes[source]) <= _OUTCOMES:  # what starts together stands under one text
                hits = outcomes[source][outcome]
            else:  # too many to start side by side: those that lead to one node share a line
                port = f"to {target.key}"
            texts[source, target, port].append(f"{outcome} {hits}x".strip())
        self._scene.edges = [
            Arrow(source, target, [], ", ".join(found), port=port)
            for (source, target, port), found in texts.items()
        ]
        return Picture(paint(figure(self._scene)), self._scene)


def joined(*texts: str) -> str:
    """Return facts on one line."""
    return " \N{MIDDLE DOT} ".join(text for text in texts if text)


class Outline:
    """The paths of a model, folded into its source; it prints as a program.

    It is a snapshot. Each program covers the calls whose input guards agree. Its branches have the
    text, nesting and order of the source, however many iterations, modules or paths reached them.

    Attributes:
        name: the name of the model.
        programs: the folded programs, in the order in which they were first traced.
        stats: how the calls were served, by name.
        forgotten: the number of paths that were dropped because of `max_traces`.
        failures: exceptions that ended calls and belong to no program: (type, file, line).
    """

    def __init__(self, tree: TraceTree, name: str, stats: Mapping[str, int]) -> None:
        self.name = name
        self.stats: dict[str, int] = dict(stats)
        self.forgotten: int = tree.forgotten
        self.failures: Counter[Failure] = Counter(tree.failures)
        self.programs: list[ProgramOutline] = fold_programs(tree)

    def __len__(self) -> int:
        return len(self.programs)

    def __getitem__(self, index: int) -> ProgramOutline:
        return self.programs[index]

    @cached_property
    def headline(self) -> str:
        """A summary of the paths, and of how calls were served, in one line."""
        traces = sum(program.traces for program in self.programs)
        parts = [counted(len(self.programs), "program"), counted(traces, "trace")]
        if self.forgotten:
            parts[-1] += f" ({self.forgotten} more forgotten)"
        calls = {name: number for name, number in self.stats.items() if name != "traces"}
        served = ", ".join(f"{name} {number}" for name, number in calls.items() if number)
        return f"{self.name}: {', '.join(parts)}" + (f"; {served}" if served else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the outline as plain values, ready for JSON."""
        return {
            "model": self.name,
            "stats": dict(self.stats),
            "forgotten": self.forgotten,
            "failures": [
                {"error": name, "file": file, "line": line, "hits": hits}
                for (name, file, line), hits in self.failures.items()
            ],
            "programs": [program.to_dict() for program in self.programs],
        }

    def to_json(self, **options: Any) -> str:
        """Return the outline as JSON.

        Args:
            **options: passed on to `json.dumps`.
        """
        return json.dumps(self.to_dict(), **options)

    def to_networkx(self) -> nx.DiGraph[str]:
        """Return the branches as a graph: an edge leads to where some run went next.

        Nodes are called `program 1`, `1.1`, `1.2`, ... in the order in which they print. They have
        `kind` ("program", "return", "live", "raise", or the branch's), `text`, `at`
        ("file:line") and `hits`; branches also have `modules` and `never`, the sides that no run
        took. Edges have `hits` and `outcomes`, the sides that lead along them. Rolled-up loops are
        cycles.
        """
        graph: nx.DiGraph[str] = nx.DiGraph()
        for program in self.programs:
            start = f"program {program.number}"
            chosen = "; ".join(program.selected_by)
            graph.add_node(start, kind="program", text=title(program), at="", hits=program.runs,
                           selected_by=chosen)  # fmt: skip
            names: dict[OutlineBranch | PathEnd | None, str] = {None: start}
            for number, item in enumerate(program.flow.walk(), 1):
                name = names[item] = f"{program.number}.{number}"
                graph.add_node(name, kind=item.kind, text=item.text, at=item.where)
                if isinstance(item, PathEnd):
                    graph.nodes[name]["hits"] = item.hits
                else:
                    never, modules = ", ".join(map(str, item.never)), ", ".join(item.modules)
                    graph.nodes[name].update(hits=item.total, never=never, modules=modules)
            for (before, by, after), hits in program.steps.items():
                edge = graph.get_edge_data(names[before], names[after], {"hits": 0, "outcomes": ""})
                texts = [text for text in (edge["outcomes"], by) if text]
                graph.add_edge(names[before], names[after], hits=edge["hits"] + hits,
                               outcomes=", ".join(texts))  # fmt: skip
        return graph

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, format: Format | None = None
    ) -> Picture:
        """Draw all known paths in one picture, with how often each side was taken.

        Args:
            path: where to save it; the ending selects the format: .svg, .png, .pdf or .html.
            format: the file format, if the file name's ending does not say.

        Raises:
            InputError: the ending is unknown; nothing is written then.
        """
        head, _, note = self.headline.partition("; ")
        chart = Chart(head, note)
        for program in self.programs:
            runs = f"{counted(program.traces, 'trace')}, {counted(program.runs, 'run')}"
            chart.begin(program, title(program), runs, program.selected_by)
            for item in program.flow.walk():
                if isinstance(item, PathEnd):
                    line = joined(counted(item.hits, "run"), item.where)
                    chart.add(item, item.kind, end_text(item), [line])
                else:
                    chart.add(item, item.kind, item.text, [joined(summary(item), item.where)])
            for (before, outcome, after), hits in program.steps.items():
                chart.link(before or program, after, outcome, hits)
        return chart.picture().saved_to(path, format)

    def to_svg(self) -> str:
        """Return a picture of the programs, as flow charts, in SVG."""
        return self.draw().svg

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.draw()._repr_mimebundle_() | {"text/plain": str(self)}

    def __repr__(self) -> str:
        return str(self)

    def to_text(self, *, only: Literal["all", "mine"] = "all") -> str:
        """Return the outline as text, as it prints.

        Args:
            only: "mine" leaves out the branches of installed packages.

        Raises:
            InputError: `only` is neither "all" nor "mine".
        """
        mine = required_choice("only", only, "all", "mine") == "mine"
        sections = [self.headline, *programs_as_text(self.programs, mine)]
        if self.failures:
            lines = ["raised before anything was recorded"]
            for (name, file, line), hits in self.failures.items():
                where = f" at {place_text(file, line)}" if file else ""
                lines.append(f"    {name}{where}: {counted(hits, 'run')}")
            sections.append("\n".join(lines))
        return "\n\n".join(sections)

    def __str__(self) -> str:
        return self.to_text()


# The selection of a program: how its arguments, flags and state differ from those of others.

Facts = dict[str, str]


def signature_of(program: Program) -> str:
    """Return the inputs of the program's first call: `x: float32[5, 4], n: 3`."""
    metas = {op.target: op.meta for op in program.recording.tape.ops if op.kind is OpKind.INPUT}
    parts = [part for part in program.recording.environment.parts if part.is_argument]
    shown = []
    for part in parts:
        if part.kind is CaptureKind.TENSOR:
            meta = metas.get(part)
            if isinstance(meta, TensorMeta):
                text = f"{_plain_dtype(meta.dtype)}{list(meta.shape)}"
            elif isinstance(part.size, TensorFacts):
                text = f"{_plain_dtype(part.size.dtype)}, {part.size.rank} dimensions"
            shown.append(f"{part.label}: {text}")
        elif part.parent is None and part.kind in (CaptureKind.PLAIN, CaptureKind.NUMBER):
            value = metas.get(part) if part.kind is CaptureKind.NUMBER else part.value
            shown.append(f"{part.label}: {_fact_text(value)}")
    if len(shown) > _SHOWN:
        shown[_SHOWN:] = [f"and {len(shown) - _SHOWN} more"]
    return ", ".join(shown) or "no arguments"


_SHOWN = 8


def selection(programs: Sequence[Program]) -> list[list[str]]:
    """Return for each program the properties that not all of them share, the most telling first."""
    facts = [_facts_of(program) for program in programs]
    different = _distinct(facts)
    found = []
    for own in facts:
        # Equal facts about many modules' attributes: `self.training = True (and 12 more)`.
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for label, text in own.items():
            if label in different:
                name = "." + label.rpartition(".")[2] if label.startswith("self.") else label
                alike[name, text].append(f"{label.partition('#')[0]} {text}")
        found.append([
            first + (f" (and {len(others)} more like it)" if others else "")
            for first, *others in alike.values()
        ])  # fmt: skip
    return found


def distinguishing_fact(programs: Sequence[Program]) -> tuple[str, int]:
    """Return the property with the most values among the programs, and their number."""
    distinct = _distinct([_facts_of(program) for program in programs])
    label, values = max(distinct.items(), key=lambda item: item[1], default=("", 0))
    label, _, aspect = label.partition("#")
    return (f"{_ASPECTS[aspect]} of `{label}`" if aspect else f"`{label}`", values or 1)


_ASPECTS = {
    "rank": "the number of dimensions", "dtype": "the dtype", "device": "the device",
    "layout": "the layout", "grad": "requires_grad",
}  # fmt: skip


def _distinct(facts: Sequence[Facts]) -> dict[str, int]:
    """Return the labels that differ somewhere, with the number of their values."""
    labels = dict.fromkeys(label for own in facts for label in own)
    # A program that does not ask for something differs for other reasons.
    values = {label: {own[label] for own in facts if label in own} for label in labels}
    return {label: len(found) for label, found in values.items() if len(found) > 1}


def _facts_of(program: Program) -> Facts:
    facts: Facts = {}
    parts = program.recording.environment.parts
    names = [part.label for part in parts if part.access is Access.ROOT]
    facts["the arguments given"] = f"are {', '.join(names) or 'none'}"
    state: Facts = {}
    for part in parts:
        target = facts if part.is_argument else state
        size = part.size
        if part.kind is not CaptureKind.TENSOR:
            text = _fact(part)
            target |= {} if text is None else {part.label: text}
        elif isinstance(size, TensorFacts) and (
            part.is_argument or part in program.analysis.typed_state
        ):
            grad = "requires grad" if size.requires_grad else "does not require grad"
            target |= {
                f"{part.label}#rank": f"has {counted(size.rank, 'dimension')}",
                f"{part.label}#dtype": f"is {_plain_dtype(size.dtype)}",
                f"{part.label}#device": f"is on {size.device}",
                f"{part.label}#layout": f"is {_plain_dtype(size.layout)}",
                f"{part.label}#grad": grad,
            }
    facts.update(_conditions(program))
    context = program.global_state.context
    used = [
        f"{cast.device_type} {_plain_dtype(cast.dtype)}"
        for cast in context.autocast
        if cast.enabled
    ]
    facts["grad mode"] = f"is {'on' if context.grad else 'off'}"
    facts["inference mode"] = f"is {'on' if context.inference else 'off'}"
    facts["autocast"] = f"is {', '.join(used) or 'off'}"
    for name, value in program.global_state._asdict().items():
        if name != "context":
            facts[_AMBIENCE.get(name, name)] = f"is {_fact_text(value)}"
    return facts | state


_AMBIENCE = {
    "dtype": "the default dtype",
    "modes": "the stack of function modes",
    "hooked": "whether there are global module hooks",
    "fast_attention": "torch.backends.mha's fast path",
    "flags": "(determinism, precision, mkldnn, anomaly detection, threads)",
}


def _fact(part: Captured) -> str | None:
    kind = part.kind
    if kind in (CaptureKind.LIST, CaptureKind.TUPLE):
        count = part.size.number if isinstance(part.size, (Length, Keys)) else 0
        return f"is a {part.type.__name__} of {count}"
    if isinstance(part.size, Keys) and kind is CaptureKind.DICT:
        return f"has the keys {_fact_text(tuple(map(str, part.size.keys)))}"
    if kind in (CaptureKind.PLAIN, CaptureKind.SET, CaptureKind.LARGE, CaptureKind.ARRAY):
        return f"is {_fact_text(part.value)}"
    if kind is CaptureKind.ALIAS:
        return f"is {part.value.label}"
    if kind in (CaptureKind.NUMBER, CaptureKind.OBJECT):
        return f"is a {part.type.__name__}"
    if kind in (CaptureKind.MODULE, CaptureKind.IDENTITY) and part.access is not Access.FIXED:
        return f"is the {part.type.__name__} at {id(part.value):#x}"
    return None


def _conditions(program: Program) -> Facts:
    """The input guards from the model's source, by their text."""
    tape = program.recording.tape
    texts = {
        step.guard: step.text for step in steps_of(program.recording)
        if step.guard is not None
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for number, guard in enumerate(tape.guards):
        if program.analysis.kinds[number] is GuardKind.INPUT and guard.site is not None:
            place = user_code(guard.scope, guard.site)[0]
            text = texts.get(number) or place.text or f"a condition at {place}"
            found.setdefault(text, []).append(_fact_text(guard.answer))
    return {text: f"is {' and '.join(dict.fromkeys(values))}" for text, values in found.items()}


def _plain_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _fact_text(value: object) -> str:
    text = repr(value).removeprefix("torch.")
    return text if len(text) <= 60 else text[:57] + "..."
