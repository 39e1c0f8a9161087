"""Flow charts: what is known of each program, as a scene for the painter of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from bendtrace.drawing.figure import figure
from bendtrace.drawing.measure import cut
from bendtrace.drawing.nodes import Edge, Node, Scene
from bendtrace.drawing.paint import paint
from bendtrace.drawing.picture import Picture

__all__ = ["Chart", "joined"]

_WIDEST = 64  # letters of a line
_FACTS = 4
_KINDS = {"start": "input", "return": "output", "live": "live", "raise": "raise"}


class Chart:
    """Flow charts of programs, one below the other.

    Args:
        title: the first line of the picture.
        note: what is written below it.
    """

    def __init__(self, title: str, note: str = "") -> None:
        self._scene = Scene(Node("root", "root", "", children=[]), [], title, note, {})
        self._nodes: dict[Hashable, Node] = {}
        self._hits: Counter[tuple[Node, str]] = Counter()

    def begin(self, key: Hashable, title: str, counts: str, facts: Iterable[str]) -> None:
        """Begin the chart of another program.

        Args:
            key: what its start is called in `link`.
            title: which program it is, and, after a colon, its inputs.
            counts: how often it ran.
            facts: what selects it.
        """
        name, _, inputs = title.partition(": ")
        box = Node(f"b{len(self._nodes)}", "module", name, [cut(inputs, 2 * _WIDEST)], title)
        box.children = []
        assert self._scene.root.children is not None
        self._scene.root.children.append(box)
        lines = [f"where {fact}" for fact in facts][:_FACTS]
        self.add(key, "start", counts, lines)

    def add(self, key: Hashable, kind: str, text: str, lines: Iterable[str]) -> None:
        """Add a node to the program that was begun last."""
        programs = self._scene.root.children
        assert programs
        lines = [cut(line, _WIDEST) for line in lines if line]
        tooltip = "\n".join([text, *lines])
        node = Node(f"n{len(self._nodes)}", _KINDS.get(kind, "decision"), text, lines, tooltip)
        self._nodes[key] = node
        assert programs[-1].children is not None
        programs[-1].children.append(node)

    def link(self, source: Hashable, target: Hashable, outcome: str, hits: int) -> None:
        """Lead from one node to another, by an outcome that calls left it by so often."""
        edge = Edge(self._nodes[source], self._nodes[target], [], port=outcome)
        self._scene.edges.append(edge)
        self._hits[edge.source, outcome] += hits

    def picture(self) -> Picture:
        """Return the picture."""
        for edge in self._scene.edges:  # lines with one outcome start together, under one text
            edge.text = f"{edge.port} {self._hits[edge.source, edge.port]}x".strip()
        return Picture(paint(figure(self._scene)), self._scene)


def joined(*texts: str) -> str:
    """Return facts on one line."""
    return " \N{MIDDLE DOT} ".join(text for text in texts if text)
