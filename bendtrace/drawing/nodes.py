"""Nodes and edges: what a picture of a run shows, before anything has a place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bendtrace.history.entries import LayerEntry

__all__ = ["Edge", "Node", "Scene"]


@dataclass(eq=False)
class Node:
    """A node of a picture, or a box with nodes in it.

    Attributes:
        key: its name in the picture.
        kind: "input", "op", "number", "output", "decision", "module", "repeat", "part" or "root";
            in a chart of programs also "live" and "raise" for how runs end.
        title: its first line.
        lines: what is written below it.
        tooltip: what is said where there is room: paths and places in the source.
        labels: labels of the entries that it stands for by itself.
        entries: those entries.
        modules: labels of the module calls that it stands for.
        times: how often it was repeated, as text: "3", "3-5"; "" if it was not.
        has_parameters: whether it computes with parameters or buffers.
        is_folded: whether it is a box that is drawn closed.
        children: what is in a box that is drawn open; None otherwise.
        value: what an overlay says about it.
    """

    key: str
    kind: str
    title: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    entries: list[LayerEntry] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    times: str = ""
    has_parameters: bool = False
    is_folded: bool = False
    children: list[Node] | None = None
    value: float | None = None

    @property
    def labels(self) -> list[str]:
        """Labels of the entries that it stands for by itself."""
        return [entry.label for entry in self.entries]

    def walk(self) -> Iterator[Node]:
        """Yield it and all nodes in it."""
        yield self
        for child in self.children or ():
            yield from child.walk()


@dataclass(eq=False)
class Edge:
    """A value, or several alike, that goes from one node to another.

    Attributes:
        source: the node it comes from.
        target: the node it goes to.
        labels: labels of the entries that go there.
        text: what is written beside it: the shape, or the side of a decision.
        instead: for edges from one repetition to the next, labels of what came there at first.
        port: which of its values the source gives: edges with the same start together.
        kind: "data"; "number" if numbers that are not shown are between; "control" from a
            decision to what ran under it; "repeat" from one repetition to the next.
    """

    source: Node
    target: Node
    labels: list[str]
    text: str = ""
    kind: str = "data"
    instead: list[str] = field(default_factory=list)
    port: str = ""


@dataclass(eq=False)
class Scene:
    """What a picture shows.

    Attributes:
        root: the box around everything.
        edges: what connects the nodes.
        title: the first line of the picture.
        note: lines that say how to see more, if not everything is shown; "" otherwise.
        node_of: the node that stands for each entry, by label.
    """

    root: Node
    edges: list[Edge]
    title: str
    note: str
    node_of: dict[str, Node]

    def nodes(self) -> list[Node]:
        """Return all nodes that are no open boxes."""
        return [node for node in self.root.walk() if node.children is None]

    def boxes(self) -> list[Node]:
        """Return all open boxes, outer ones first, without the one around everything."""
        return [n for n in self.root.walk() if n.children is not None and n is not self.root]
