"""The passes of a layer taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bendtrace._later import networkx as nx
from bendtrace._later import tabulate
from bendtrace.history.entries import LayerEntry

__all__ = ["rolled_graph", "rolled_table"]


def rolled_graph(entries: Sequence[LayerEntry]) -> nx.DiGraph[str]:
    """Return a graph with a node for each layer, whatever the number of its passes.

    Nodes carry `kind`, `layer_type`, `module`, `passes`, `shapes` (each once, in order) and
    `labels`. Edges carry `count`, of how many pairs of passes they stand for, and `back`, whether
    a value goes from one pass to a later one of a layer before it: what makes a loop a loop.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    by_label = {entry.label: entry for entry in entries}
    order: dict[str, int] = {}
    for entry in entries:
        order.setdefault(entry.name, len(order))
        if entry.name not in graph:
            graph.add_node(
                entry.name, kind=entry.kind, layer_type=entry.layer_type, module=entry.module,
                passes=entry.passes, shapes=[], labels=[],
            )  # fmt: skip
        node: dict[str, Any] = graph.nodes[entry.name]
        node["labels"].append(entry.label)
        if entry.shape is not None and entry.shape not in node["shapes"]:
            node["shapes"].append(entry.shape)
    for entry in entries:
        for parent in entry.parents:
            giver = by_label[parent]
            source = giver.name
            if graph.has_edge(source, entry.name):
                graph.edges[source, entry.name]["count"] += 1
                continue
            in_step = giver.passes == entry.passes
            back = order[source] >= order[entry.name] or (
                in_step and giver.pass_number < entry.pass_number
            )
            graph.add_edge(source, entry.name, count=1, back=back)
    return graph


def rolled_table(entries: Sequence[LayerEntry], most: int | None) -> str:
    """Return a table with a line for each layer, whatever the number of its passes."""
    graph = rolled_graph(entries)
    rows = []
    for name, node in graph.nodes(data=True):
        shapes = " ".join(map(str, node["shapes"][:3])) + " ..." * (len(node["shapes"]) > 3)
        sources = [
            source + " (of the pass before)" * graph.edges[source, name]["back"]
            for source in graph.predecessors(name)
        ]
        rows.append((name, node["passes"], shapes, node["module"], ", ".join(sources)))
    shown = rows if most is None else rows[:most]
    text = tabulate.tabulate(
        shown, ("layer", "passes", "shapes", "module", "from"), disable_numparse=True
    )
    rest = len(rows) - len(shown)
    return text + (f"\n... {rest} more (all of them: most=None)" if rest else "")
