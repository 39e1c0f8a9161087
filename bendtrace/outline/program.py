"""Outline: the trace tree of a model as people meet it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from bendtrace._later import networkx as nx
from bendtrace.drawing.picture import Format, Picture
from bendtrace.outline.folding import fold
from bendtrace.outline.picture import Chart, joined
from bendtrace.outline.structure import Branch, End, ProgramOutline
from bendtrace.outline.text import count, end_text, programs_as_text, summary, title
from bendtrace.replay.tree import TraceTree

__all__ = ["Outline"]


class Outline:
    """The paths of a model, folded into its source: prints as a program.

    It shows the moment at which it was made. Each program stands for the calls whose input
    guards agree; in it, branches have the source's text, nesting and order however many
    iterations, modules or paths they were come by in.

    Attributes:
        name: what the model is called.
        programs: what was folded, in the order in which it was first traced.
        stats: how the calls were served, by name.
        forgotten: how many paths were given up because of `max_traces`.
        failures: exceptions that calls ended with that no program stands for: (type, file, line).
    """

    def __init__(self, tree: TraceTree, name: str, stats: Mapping[str, int]) -> None:
        self.name = name
        self.stats = dict(stats)
        self.forgotten = tree.forgotten
        self.failures = Counter(tree.failures)
        self.programs: list[ProgramOutline] = fold(tree)

    def __len__(self) -> int:
        return len(self.programs)

    def __getitem__(self, index: int) -> ProgramOutline:
        return self.programs[index]

    @cached_property
    def headline(self) -> str:
        """What there is, and how calls were served, in one line."""
        traces = sum(program.traces for program in self.programs)
        parts = [count(len(self.programs), "program"), count(traces, "trace")]
        if self.forgotten:
            parts[-1] += f" ({self.forgotten} more forgotten)"
        calls = {name: number for name, number in self.stats.items() if name != "traces"}
        served = ", ".join(f"{name} {number}" for name, number in calls.items() if number)
        return f"{self.name}: {', '.join(parts)}" + (f"; {served}" if served else "")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, ready for JSON."""
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
        """Return all of it as JSON.

        Args:
            **options: passed on to `json.dumps`.
        """
        return json.dumps(self.to_dict(), **options)

    def to_networkx(self) -> nx.DiGraph[str]:
        """Return the branches as a graph: an edge leads to where some run went next.

        Nodes are called `program 1`, `1.1`, `1.2`, ... in the order in which they print. They
        carry `kind` ("program", "return", "live", "raise", or that of the branch), `text`, `at`
        ("file:line") and `hits`; branches also `modules` and `never`, the sides that no run took.
        Edges carry `hits` and `outcomes`, the sides by which they were gone. What was rolled up
        is in a cycle.
        """
        graph: nx.DiGraph[str] = nx.DiGraph()
        for program in self.programs:
            start = f"program {program.number}"
            chosen = "; ".join(program.selected_by)
            graph.add_node(start, kind="program", text=title(program), at="", hits=program.runs,
                           selected_by=chosen)  # fmt: skip
            names: dict[Branch | End | None, str] = {None: start}
            for number, item in enumerate(program.flow.walk(), 1):
                name = names[item] = f"{program.number}.{number}"
                graph.add_node(name, kind=item.kind, text=item.text, at=item.where)
                if isinstance(item, End):
                    graph.nodes[name]["hits"] = item.hits
                else:
                    never, modules = ", ".join(map(str, item.never)), ", ".join(item.modules)
                    graph.nodes[name].update(hits=item.total, never=never, modules=modules)
            for (before, by, after), hits in program.steps.items():
                edge = graph.get_edge_data(names[before], names[after], {"hits": 0, "outcomes": ""})
                known = [text for text in (edge["outcomes"], by) if text]
                graph.add_edge(names[before], names[after], hits=edge["hits"] + hits,
                               outcomes=", ".join(known))  # fmt: skip
        return graph

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, format: Format | None = None
    ) -> Picture:
        """Draw all known paths in one picture, with how often each side was taken.

        Args:
            path: where to save it; the ending says as what: .svg, .png, .pdf or .html.
            format: as what to save it, if the ending does not say.

        Raises:
            InputError: for unknown endings; nothing is written then.
        """
        head, _, note = self.headline.partition("; ")
        chart = Chart(head, note)
        for program in self.programs:
            runs = f"{count(program.traces, 'trace')}, {count(program.runs, 'run')}"
            chart.begin(program, title(program), runs, program.selected_by)
            for item in program.flow.walk():
                if isinstance(item, End):
                    line = joined(count(item.hits, "run"), item.where)
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
        return {"text/plain": str(self), "image/svg+xml": self.to_svg()}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        sections = [self.headline, *programs_as_text(self.programs)]
        if self.failures:
            lines = ["raised before anything was recorded"]
            for (name, file, line), hits in self.failures.items():
                where = f" at {os.path.basename(file)}:{line}" if file else ""
                lines.append(f"    {name}{where}: {count(hits, 'run')}")
            sections.append("\n".join(lines))
        return "\n\n".join(sections)
