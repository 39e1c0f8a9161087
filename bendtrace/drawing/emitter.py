"""From items in boxes to the nodes and edges of a scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from bendtrace.drawing.nesting import Box, Item, Leaf, origins
from bendtrace.drawing.nodes import Edge, Node, Scene
from bendtrace.drawing.repeats import Units, step_name
from bendtrace.drawing.wording import (
    box_lines,
    box_title,
    decision_lines,
    leaf_lines,
    leaf_title,
    shape_text,
    tooltip,
)
from bendtrace.flow import FlowStep, IndexFlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

__all__ = ["Emitter"]

_Ends: TypeAlias = tuple[Node, Node, str, str]


class Emitter:
    """Turns items into nodes, and finds their edges."""

    def __init__(
        self,
        history: RunLog,
        entries: Sequence[LayerEntry],
        units: Units,
        shown: set[str],
    ) -> None:
        self.history = history
        self.entries = entries
        self.units = units
        self.shown = shown
        self.node_of: dict[str, Node] = {}
        self.step_nodes: dict[int, Node] = {}
        self.count = 0

    def emit(self, root: Box, all_nodes: int, capped: bool, within: str | None) -> Scene:
        """Return the scene.

        Args:
            root: the items.
            all_nodes: how many nodes there would be with all boxes open.
            capped: whether boxes were closed because there would be too many.
            within: the module that is drawn; None for all.
        """
        node = Node("root", "root", "")
        node.children = [self.node(item, within or "") for item in root.items]
        outside = self._outside(node) if within is not None else {}
        edges = self.edges(outside)
        title = within if within is not None else self.history.name
        drawn = sum(1 for n in node.walk() if n.children is None)
        note = ""
        if capped:
            note = (
                f"{drawn} of {all_nodes} nodes are drawn: boxes were closed.\n"
                f"draw(max_nodes={all_nodes}) opens all, draw(within=...) one of them"
            )
        return Scene(node, edges, title or "", note, self.node_of)

    def _key(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def node(self, item: Item, parent: str, around: int = 1, named: bool = False) -> Node:
        """Return the node for an item, with those in it.

        Args:
            item: the item.
            parent: name of the module around it.
            around: how often the boxes around it are repeated, which says so for it too.
            named: whether the name of one of them tells of several modules.
        """
        steps = self.history.flow_steps
        if isinstance(item, Leaf):
            if item.kind == "decision":
                its = [steps[number] for number in item.steps]
                node = Node(self._key(), "decision", its[0].text or its[0].kind)
                node.lines = decision_lines(its[:1] if around > 1 and _agree(its) else its)
                node.tooltip = tooltip([], [], its)
                self.step_nodes.update((number, node) for number in item.steps)
                return node
            node = Node(self._key(), item.kind, leaf_title(item))
            node.lines = leaf_lines(item, parent, named)
            node.entries = item.entries
            node.times = str(item.times) if item.times > around else ""
            node.has_parameters = any(entry.state for entry in item.entries)
            calls = item.box.calls if item.box else []
            node.modules = [call.label for call in calls]
            node.tooltip = tooltip(item.entries, calls, [])
            self.node_of.update((entry.label, node) for entry in item.entries)
            return node
        node = Node(self._key(), item.kind, box_title(item, parent, named))
        node.modules = [call.label for call in item.calls]
        if max(item.times) > 1:
            node.times = "\N{EN DASH}".join(map(str, sorted({min(item.times), max(item.times)})))
        node.lines = box_lines(item)
        if not item.is_folded:
            node.tooltip = tooltip([], item.calls, [])
            around *= max(item.times)
            named = named or len(item.names) > 1
            name = item.name or parent
            node.children = [self.node(inner, name, around, named) for inner in item.items]
            return node
        node.is_folded = True
        for leaf in item.leaves():
            node.entries += leaf.entries
            self.node_of.update((entry.label, node) for entry in leaf.entries)
            self.step_nodes.update((number, node) for number in leaf.steps)
        node.has_parameters = any(entry.state for entry in node.entries)
        node.tooltip = tooltip([], item.calls, [])
        return node

    def _outside(self, root: Node) -> dict[str, Node]:
        """Add nodes for what comes in from outside, and what goes out."""
        inside = {entry.label for entry in self.entries}
        by_label = {entry.label: entry for entry in self.history.entries}
        outside: dict[str, Node] = {}
        first: list[Node] = []
        for entry in self.entries:
            for label in entry.parents:
                origin = by_label.get(label)
                if label in inside or label in outside or origin is None:
                    continue
                if origin.kind not in ("input", "op"):
                    continue
                node = outside[label] = Node(self._key(), "input", origin.label)
                node.entries = []
                node.tooltip = tooltip([origin], [], [])
                first.append(node)
        last: list[Node] = []
        for entry in self.entries:
            if entry.label in self.shown and any(c not in inside for c in entry.children):
                node = Node(self._key(), "output", "to " + ", ".join(entry.children[:2]))
                last.append(node)
                outside[">" + entry.label] = node
        root.children = [*first, *(root.children or []), *last]
        return outside

    def edges(self, outside: Mapping[str, Node]) -> list[Edge]:
        """Find what connects the nodes."""
        found: dict[_Ends, Edge] = {}
        by_label = {entry.label: entry for entry in self.history.entries}
        known: dict[str, Node] = {**outside, **self.node_of}
        for entry in self.entries:
            target = self.node_of.get(entry.label)
            if target is None:
                continue
            for place, parent in enumerate(entry.parents):
                for label in origins(parent, by_label, known, sizes=False):
                    kind = "data" if label == parent else "number"
                    self._join(found, known[label], target, by_label[label], kind, entry, place)
            if ">" + entry.label in outside:
                self._join(found, target, outside[">" + entry.label], entry, "data")
        for number, label in enumerate(self.history.step_labels):
            node = self.step_nodes.get(number)
            if node is None or not label:
                continue
            for origin in origins(label, by_label, known, sizes=True):
                self._join(found, known[origin], node, by_label[origin], "data", step=number)
        self._control(found)
        direct = {(edge.source, edge.target) for edge in found.values() if edge.kind == "data"}
        return [
            edge
            for edge in found.values()
            if edge.kind != "number" or (edge.source, edge.target) not in direct
        ]

    def _control(self, found: dict[_Ends, Edge]) -> None:
        done: set[int] = set()
        for entry in self.entries:
            target = self.node_of.get(entry.label)
            for number in entry.flow:
                source = self.step_nodes.get(number)
                if number in done or source is None or target is None:
                    continue
                done.add(number)
                if source is target:
                    continue
                step = self.history.flow_steps[number]
                text = "" if isinstance(step, (LoopFlowStep, IndexFlowStep)) else str(step.value)
                edge = found.setdefault(
                    (source, target, "control", ""), Edge(source, target, [], text, "control")
                )
                if edge.text != text:
                    edge.text = ""

    def _join(
        self,
        found: dict[_Ends, Edge],
        source: Node,
        target: Node,
        entry: LayerEntry,
        kind: str,
        user: LayerEntry | None = None,
        place: int = 0,
        step: int | None = None,
    ) -> None:
        """Add a value that goes from one node to another.

        Args:
            found: the edges so far.
            source: the node it comes from.
            target: the node it goes to.
            entry: the value.
            kind: of the edge, unless it goes from one repetition to the next.
            user: the value computed from it.
            place: which of the user's parents it is.
            step: number of the flow step that consumed it.
        """
        name = user.label if user is not None else step_name(step) if step is not None else ""
        if name and (source is target or self._repeats(entry.label, name)):
            kind = "repeat"
        if source is target and (source.is_folded or len(source.entries) == 1):
            return
        # Passes and repetitions of an op give the same value, as far as the picture goes.
        element = "" if source.is_folded else str(entry.element)
        port = entry.label if source.is_folded else element
        edge = found.setdefault(
            (source, target, kind, element), Edge(source, target, [], "", kind, port=port)
        )
        if entry.label not in edge.labels:
            edge.labels.append(entry.label)
        if kind == "repeat" and user is not None and not edge.instead:
            first = next(e for e in target.entries if e.element == user.element)
            if len(first.parents) == len(user.parents) and first is not user:
                edge.instead.append(first.parents[place])
        if kind == "repeat" and step is not None and not edge.instead:
            first_step = next(n for n, node in self.step_nodes.items() if node is target)
            edge.instead.append(self.history.step_labels[first_step])
        text = shape_text(entry)
        if not edge.text and len(edge.labels) == 1:
            edge.text = text
        elif edge.text != text:
            edge.text = ""

    def _repeats(self, source: str, target: str) -> bool:
        """Whether a value goes from one repetition to another."""
        before, after = self.units.get(source, ()), self.units.get(target, ())
        for (frame, number), (other, its) in zip(before, after, strict=False):
            if frame is not other:
                return False
            if number != its:
                return True
        return False


def _agree(steps: Sequence[FlowStep]) -> bool:
    return len({str(step.value) for step in steps}) == 1
