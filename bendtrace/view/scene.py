"""Nodes and edges: the content of a picture of a run, before anything has a position."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import torch

from bendtrace._checks import did_you_mean
from bendtrace._places import place_text
from bendtrace.errors import InputError
from bendtrace.flow import FlowStep, IndexFlowStep, LoopFlowStep
from bendtrace.history.entries import (
    LayerEntry,
    ModuleEntry,
    ParameterUse,
    counted,
    listed,
    number_text,
)
from bendtrace.view.canvas import cut, printable
from bendtrace.view.items import (
    Box,
    Item,
    Leaf,
    Numbers,
    Units,
    absorb,
    collapse,
    fold,
    nest,
    origins,
    roll,
    step_name,
    visible,
)

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

_NAMED = 30  # nodes of a description


@dataclass(eq=False)
class Node:
    """A node of a picture, or a box that contains nodes.

    Attributes:
        key: its name in the picture.
        kind: "input", "op", "number", "output", "decision", "module", "repeat", "part" or "root";
            in a chart of programs also "live" and "raise" for the ends of runs.
        title: its first line.
        lines: the lines below it.
        tooltip: further text: paths and places in the source.
        labels: labels of the entries that it represents itself.
        entries: those entries.
        modules: labels of the module calls that it represents.
        times: how often it was repeated, as text: "3", "3-5"; "" if it was not.
        has_parameters: whether it computes with parameters or buffers.
        is_folded: whether it is a closed box.
        children: the content of an open box; None otherwise.
        value: its number in an overlay.
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
        """Labels of the entries that it represents itself."""
        return [entry.label for entry in self.entries]

    def walk(self) -> Iterator[Node]:
        """Yield it and all nodes in it."""
        yield self
        for child in self.children or ():
            yield from child.walk()


@dataclass(eq=False)
class Edge:
    """A value, or several similar ones, that goes from one node to another.

    Attributes:
        source: the node at which it starts.
        target: the node at which it ends.
        labels: labels of the entries that it carries.
        text: the text beside it: the shape, or the side of a decision.
        instead: for edges from one repetition to the next, labels of the entries of the first
            repetition.
        port: which of the source's values it carries: edges with the same port start together.
        kind: "data"; "number" if there are hidden numbers in between; "control" from a decision to
            nodes that ran under it; "repeat" from one repetition to the next.
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
    """The content of a picture.

    Attributes:
        root: the box around everything.
        edges: the edges between nodes.
        title: the first line of the picture.
        note: lines that say how to see more, if not everything is shown; "" otherwise.
        node_of: the node that represents each entry, by label.
        step_nodes: the node that represents each flow step, by number.
    """

    root: Node
    edges: list[Edge]
    title: str
    note: str
    node_of: dict[str, Node]
    step_nodes: dict[int, Node] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """Return all nodes that are not open boxes."""
        return [node for node in self.root.walk() if node.children is None]

    @property
    def description(self) -> str:
        """A description for people who do not see the picture."""
        nodes = self.nodes()
        counts = f"{counted(len(nodes), 'node')} and {counted(len(self.edges), 'edge')}"
        return f"{counts}: {listed([node.title for node in nodes], _NAMED)}"

    def boxes(self) -> list[Node]:
        """Return all open boxes, outer ones first, except the one around everything."""
        return [n for n in self.root.walk() if n.children is not None and n is not self.root]


_Ends: TypeAlias = tuple[Node, Node, str, str]


class Emitter:
    """Turns items into nodes, and finds their edges."""

    count: int

    def __init__(
        self, history: RunLog, entries: Sequence[LayerEntry], units: Units, shown: set[str]
    ) -> None:
        self.history = history
        self.entries = entries
        self.units = units
        self.shown = shown
        self.node_of: dict[str, Node] = {}
        self.step_nodes: dict[int, Node] = {}
        self.count = 0

    def emit(self, root: Box, all_nodes: int, capped: bool, within: str | None) -> Scene:
        """Return the scene."""
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
        return Scene(node, edges, title or "", note, self.node_of, self.step_nodes)

    def _key(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def node(self, item: Item, parent: str, around: int = 1, named: bool = False) -> Node:
        """Return the node for an item, including the nodes in it."""
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
        """Find the edges between the nodes."""
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
        """Add a value that goes from one node to another."""
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
        """Return whether a value goes from one repetition to another."""
        before, after = self.units.get(source, ()), self.units.get(target, ())
        for (frame, number), (other, its) in zip(before, after, strict=False):
            if frame is not other:
                return False
            if number != its:
                return True
        return False


def _agree(steps: Sequence[FlowStep]) -> bool:
    return len({str(step.value) for step in steps}) == 1


def scene(
    history: RunLog,
    *,
    rolled: bool = False,
    collapsed: bool = True,
    depth: int | None = None,
    max_nodes: int = 50,
    within: str | None = None,
    flow: bool = True,
    numbers: Numbers = "deciding",
) -> Scene:
    """Decide what a picture of a run shows.

    Args:
        history: the log of the run.
        rolled: whether to merge the passes of an op into one node. Otherwise each pass is a node.
        collapsed: whether one of several repeated blocks and passes of loops represents all.
        depth: the number of nested boxes to show; None for all.
        max_nodes: the maximum number of nodes to show; boxes are closed to achieve it.
        within: a module, or one of its calls (`h.3`, `h.3:1`), to show only its content.
        flow: whether to show flow steps, as decisions.
        numbers: which numbers taken from tensors to show: those that "deciding" flow steps use,
            "all" or "none".

    Raises:
        InputError: the module was not called, or a number is invalid.
    """
    if max_nodes < 1 or (depth is not None and depth < 0):
        raise InputError(
            "a picture needs max_nodes of at least 1 and depth of at least 0, not "
            f"max_nodes={max_nodes} and depth={depth}"
        )
    if numbers not in ("deciding", "all", "none"):
        raise InputError(f'numbers= has to be "deciding", "all" or "none", not {numbers!r}')
    entries, inside = _part(history, within)
    steps = history.flow_steps

    def roll_all(root: Box) -> None:
        roll(root, {i: _step_key(step, True) for i, step in enumerate(steps)})

    def collapse_all(root: Box) -> Units:
        return collapse(root, lambda i, by_name: _step_key(steps[i], by_name))

    def emitted(*merges: Callable[[Box], Units | None]) -> tuple[int, Scene]:
        root = nest(history, entries, flow=flow, numbers=numbers, inside=inside)
        emitter = Emitter(
            history, entries, {}, {entry.label for leaf in root.leaves() for entry in leaf.entries}
        )
        for merge in merges:
            emitter.units |= merge(root) or {}
        absorb(root)
        all_nodes = visible(root)
        capped = fold(root, depth, max_nodes)
        return visible(root), emitter.emit(root, all_nodes, capped, within)

    ways = [[roll_all] * rolled + [collapse_all] * collapsed]
    if rolled and collapsed:
        # Blocks that share code, but no layers, are no longer alike once that code is rolled.
        ways.append([collapse_all, roll_all])
    return min((emitted(*way) for way in ways), key=itemgetter(0))[1]


def _step_key(step: FlowStep, by_name: bool) -> object:
    """Return what decisions have in common that are repetitions of each other.

    The last test of a loop has another outcome than those before it.
    """
    if by_name:
        return (step.place.file, step.place.span, step.text)
    return (step.text, step.kind, "" if isinstance(step, LoopFlowStep) else str(step.value))


def _part(history: RunLog, within: str | None) -> tuple[list[LayerEntry], tuple[str, ...]]:
    """Return the entries to show, and the labels of the calls around them."""
    entries = [entry for entry in history.entries if entry.kind != "state"]
    if within is None:
        return entries, ()
    calls = {call.label: call for call in history.modules}
    found = calls.get(within) or next((c for c in history.modules if c.name == within), None)
    if found is None:
        names = list(dict.fromkeys([c.name for c in history.modules] + list(calls)))
        called = listed(list(dict.fromkeys(call.name for call in history.modules)))
        hint = did_you_mean(within, names, otherwise=f"; it called {called}", quotes=False)
        raise InputError(f"no module {within!r} was called in this run{hint}")
    chain = [found.label]
    while calls[chain[0]].parent:
        chain.insert(0, calls[chain[0]].parent)
    inside = tuple(chain)
    return [entry for entry in entries if entry.scopes[: len(inside)] == inside], inside


# The texts in a picture, and in its tooltips.

_ITEM = re.compile(r"\[\d+\](?=:|$)")
_TIMES = "\N{MULTIPLICATION SIGN}"
_DOT = " \N{MIDDLE DOT} "
_MOST = 44  # letters of a line
_STATE = 2  # so many parameters have their shapes written


def shape_text(entry: LayerEntry) -> str:
    """Return the shape of a value, and its dtype if that is not the usual one.

    Example:
        >>> import torch
        >>> from bendtrace.history.entries import LayerEntry
        >>> shape_text(LayerEntry("op", "add", "add_1_1", "add_1", shape=(2, 3))).split(_TIMES)
        ['2', '3']
    """
    if entry.shape is None:
        return ""
    text = shape(entry.shape)
    if entry.dtype is not None and entry.dtype is not torch.float32:
        text += " " + str(entry.dtype).removeprefix("torch.")
    return text


def shape(sizes: Sequence[int]) -> str:
    """Return sizes as text."""
    return _TIMES.join(map(str, sizes)) if sizes else "scalar"


def count(number: float) -> str:
    """Return a large number in short form: 85.1M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def plural(number: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def leaf_title(leaf: Leaf) -> str:
    """Return the first line of a node: the name that finds it in the log."""
    entry = leaf.entries[0]
    if entry.kind == "number":
        return cut(f"{entry.label} = {number_text(entry.value)}", _MOST)
    if leaf.times > 1:
        return cut(entry.layer_type, _MOST)
    # (The gradients that one node of a backward pass returns differ only by their numbers.)
    labels = list(dict.fromkeys(_ITEM.sub("", one.label) for one in leaf.entries))
    if len(labels) > 2:  # several values of one op
        return cut(f"{labels[0]} \N{HORIZONTAL ELLIPSIS} {labels[-1]}", _MOST)
    return cut(", ".join(labels), _MOST)


def leaf_lines(leaf: Leaf, parent: str, first: bool) -> list[str]:
    """Return the lines below: the module, and its parameters.

    Args:
        leaf: the node.
        parent: name of the module around it.
        first: whether to name only the first of several modules, since the surrounding box names
            the others.
    """
    lines = []
    if leaf.box is not None:
        name = _names(leaf.box.names[:1] if first else leaf.box.names, parent)
        lines.append(cut(f"{name}{_DOT}{_classes(leaf.box)}", _MOST))
    entry = leaf.entries[0]
    if entry.state:
        lines.append(cut(_state(entry.state), _MOST))
    return lines


def _state(uses: Sequence[ParameterUse]) -> str:
    uses = sorted(uses, key=lambda use: (not use.is_parameter, "weight" not in use.name))
    shown = [f"{use.name.rpartition('.')[2]} {shape(use.shape)}" for use in uses[:_STATE]]
    more = len(uses) - _STATE
    return ", ".join(shown) + (f", {more} more" if more > 0 else "")


def box_title(box: Box, parent: str, first: bool) -> str:
    """Return the name of a box."""
    if box.kind == "module":
        return cut(_names(box.names[:1] if first else box.names, parent), _MOST)
    leaves = list(box.leaves())
    if box.kind == "part":
        named = [leaf.entries[0].name for leaf in leaves if leaf.entries]
        return cut(f"{named[0]} \N{HORIZONTAL ELLIPSIS} {named[-1]}", _MOST) if named else "part"
    return "repeated"


def box_lines(box: Box) -> list[str]:
    """Return the other lines of a box: classes, and the content if it is closed."""
    lines = [_classes(box)] if box.kind == "module" else []
    if not box.is_folded:
        return [cut(line, _MOST) for line in lines]
    leaves = list(box.leaves())
    ops = sum(leaf.kind == "op" for leaf in leaves)
    facts = [plural(ops, "op")]
    own = {
        use.name: use.numel
        for leaf in leaves
        for entry in leaf.entries
        for use in entry.state
        if use.is_parameter
    }
    if own:
        facts.append(f"{count(sum(own.values()))} parameters")
    decisions = sum(leaf.kind == "decision" for leaf in leaves)
    if decisions:
        facts.append(plural(decisions, "decision"))
    lines.append(_DOT.join(facts))
    return [cut(line, _MOST) for line in lines]


def _classes(box: Box) -> str:
    return ", ".join(dict.fromkeys(call.class_name for call in box.calls))


def _names(names: Sequence[str], parent: str) -> str:
    """Return names of modules as one text, without what the box around them says already."""
    short = [
        name.removeprefix(parent + ".") if parent and name.startswith(parent + ".") else name
        for name in names
    ]
    if len(short) == 1:
        return short[0]
    return f"{short[0]} \N{HORIZONTAL ELLIPSIS} {short[-1]}"


def decision_lines(steps: Sequence[FlowStep]) -> list[str]:
    """Return the condition of a decision, and its outcome."""
    first = steps[0]
    if isinstance(first, LoopFlowStep):
        its = sorted({step.iterations or 0 for step in steps if isinstance(step, LoopFlowStep)})
        if first.iterations is None:
            return [f"{first.kind}: {first.how_often}"]
        often = "\N{EN DASH}".join(map(str, sorted({its[0], its[-1]})))
        noun = "iteration" if its == [1] else "iterations"
        return [f"{first.kind}: {often} {noun}"]
    sides = Counter(str(step.value) for step in steps)
    if len(steps) == 1:
        taken = next(iter(sides))
    else:
        taken = ", ".join(f"{side} {_TIMES}{number}" for side, number in sides.items())
    return [cut(f"{first.kind} \N{RIGHTWARDS ARROW} {taken}", _MOST)]


def tooltip(
    entries: Sequence[LayerEntry], calls: Sequence[ModuleEntry], steps: Sequence[FlowStep]
) -> str:
    """Return the tooltip of a node."""
    lines: list[str] = []
    for entry in entries[:1]:
        lines.append(entry.label)
        if entry.node_path:
            lines.append(f"path: {entry.node_path}")
        if entry.function:
            lines.append(f"function: {entry.target or entry.function}")
        if entry.shape is not None:
            dtype = str(entry.dtype).removeprefix("torch.") if entry.dtype else ""
            lines.append(f"value: {shape(entry.shape)} {dtype} {entry.device or ''}".rstrip())
        lines += [f"{use.name}: {shape(use.shape)}" for use in entry.state[:8]]
        if entry.source is not None:
            lines.append(f"at {place_text(entry.source.file, entry.source.line)}")
            lines.append(entry.source.statement or entry.source.text)
    if len(entries) > 1:
        lines.append(f"and {len(entries) - 1:,} more: \N{HORIZONTAL ELLIPSIS} {entries[-1].label}")
    for call in calls[:1]:
        lines.append(f"module: {call.name} ({call.class_name})")
        if call.source is not None and not entries:
            lines.append(f"at {place_text(call.source.file, call.source.line)}")
            lines.append(call.source.statement or call.source.text)
    if len(calls) > 1:
        lines.append(f"and {plural(len(calls) - 1, 'more call')}: to {calls[-1].label}")
    for step in steps[:1]:
        lines += [step.text, f"{step.kind} at {place_text(step.file, step.line)}"]
    return "\n".join(cut(printable(line), 160) for line in lines if line)
