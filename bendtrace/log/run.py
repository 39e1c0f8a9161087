"""Run: one recorded run of a model, with the views derived from its recording.

One of these is the meaning of strings: a module, parameter, node of the tree, or layer of the log.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from bendtrace.errors import NodePathError
from bendtrace.flow import FlowSteps, steps_of
from bendtrace.log.entries import LayerEntry, layer_type, number_type
from bendtrace.log.nodes import Chosen, Events, Pass, Registry, TreeNode, children_of, dotted
from bendtrace.log.path_tree import Builder, ModuleVisit, StepSource
from bendtrace.log.path_views import (
    CandidateGraph,
    Node,
    NodePath,
    RunNodes,
    Tree,
    candidates_of,
    find_node,
    is_path_only,
    plain_path,
)
from bendtrace.python.checks import similar
from bendtrace.python.lazy import LazyModule
from bendtrace.record.recorder import Recording

if TYPE_CHECKING:
    from bendtrace.log import building, mirror
    from bendtrace.log.building import RunData
    from bendtrace.log.mirror import Graph
else:
    building = LazyModule("bendtrace.log.building")
    mirror = LazyModule("bendtrace.log.mirror")


class Run:
    """The views of one recorded run: each is derived when it is first asked for, and kept.

    Runs that share a registry give the nodes that they have in common the same names.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> run = bt.trace(model, torch.ones(1, 2))._run
        >>> run.names
        ['input', '_0_weight', '_0_bias', 'linear', 'relu']
        >>> [node.path for node in run.candidates]
        ['', 'sub_0', 'sub_0.linear', 'sub_1', 'sub_1.relu']
        >>> [node.path for node in run.candidates.followers(run.candidates.nodes["sub_0"])]
        ['sub_1', 'sub_1.relu']
    """

    def __init__(
        self, recording: Recording, function: Callable[..., Any], registry: Registry | None = None
    ) -> None:
        self.recording = recording
        self.function = function
        self.registry: Registry = Registry() if registry is None else registry
        self.torchlens: bool = False  # how the log names layers; see `Namer`

    @property
    def names(self) -> list[str]:
        """The name of each op's node in the mirror."""
        return self.recording.names

    @property
    def steps(self) -> FlowSteps:
        """Where the model's Python depended on the inputs."""
        return steps_of(self.recording)

    @cached_property
    def graph(self) -> Graph:
        """The networkx mirror, at op level."""
        return mirror.mirror(self.recording, self.function)

    @cached_property
    def _builder(self) -> Builder:
        builder = Builder(Events(self.recording, self.function), self.registry)
        with self.registry.lock:
            ModuleVisit(builder, builder.events.root, builder.root).run()
        builder.finish()
        return builder

    @cached_property
    def tree(self) -> Tree:
        """The tree of node paths."""
        builder = self._builder
        return Tree(builder.root, builder.events.origins, StepSource(builder))

    @cached_property
    def candidates(self) -> CandidateGraph:
        """The nodes that something can be inserted at, and how values flow between them."""
        return candidates_of(self.nodes)

    @cached_property
    def nodes(self) -> RunNodes:
        """The nodes, with their passes."""
        return RunNodes(self._builder)

    @cached_property
    def log(self) -> RunData:
        """The log, without what only a capture knows."""
        return building.build_log(
            self.recording, name_of_function(self.function), self.tree, self.torchlens
        )

    @cached_property
    def naming(self) -> RunNames:
        """The meanings of strings; the log is built for those that look like names of layers."""
        ops = self.recording.tape.ops

        @functools.cache
        def layer_types() -> frozenset[str]:
            found = {layer_type(op) for op in ops} | {number_type(op, ops) for op in ops}
            return frozenset({"input", "output", *filter(None, found)})

        return RunNames(self.tree, lambda: self.log, layer_types)

    @cached_property
    def naming_without_log(self) -> RunNames:
        """The meanings of strings besides layers: those of runs with insertions differ."""
        return RunNames(self.tree, None)


def name_of_function(function: Callable[..., Any]) -> str:
    """Return the name of a model: its class, or the name of a function."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(function, functools.partial):
        return f"partial({name_of_function(function.func)})"
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]


Value = tuple[int, tuple[object, ...]]
Place = tuple[TreeNode, Chosen]
_LAYER = re.compile(r"([^\W_]+)_\d+(?:_\d+)?")
_PASS = re.compile(r"(.+):(\d+)", re.DOTALL)


@dataclass(frozen=True)
class Meaning:
    """One possible meaning of a string in a run."""

    kind: Literal["state", "module", "node", "layer"]  # the kind of object
    text: str  # the string
    places: tuple[Place, ...]  # the nodes, and their passes
    values: frozenset[Value]  # the values of the run that the nodes represent
    label: str = ""  # for layers, the full name

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the nodes."""
        return tuple(node.path for node, _ in self.places)

    @property
    def is_owned(self) -> bool:
        """True if it is a module, parameter or buffer by its own name."""
        return self.kind in ("state", "module")

    @property
    def is_exact(self) -> bool:
        """True if the string is exactly the path of the node."""
        return self.kind == "node" and self.paths == (plain_path(self.text),)

    @property
    def is_alias(self) -> bool:
        """True if the string is an alias of the node: `fc` for `fc_1`."""
        return self.kind == "node" and not self.is_exact

    def covers(self, other: Meaning) -> bool:
        """Return whether another meaning is one of these nodes, or the same value inside of it."""
        own, others = self.paths, other.paths
        if self.is_owned and others and set(others) <= set(own):
            return True
        if not self.values or self.values != other.values:
            return False
        return all(
            any(path == around or path.startswith(f"{around}.") for around in own)
            for path in others
        )


class RunNames:
    """The names of one run.

    Everything that accepts names as strings uses this class: the log, insertions, patches,
    activations. So a string has the same meaning everywhere, or is rejected everywhere.
    """

    def __init__(
        self,
        tree: Tree,
        log: Callable[[], RunData] | None,
        layer_types: Callable[[], Container[str]] | None = None,
    ) -> None:
        self.tree = tree
        self._log = log
        self._layer_types = layer_types

    def meanings(self, text: str) -> list[Meaning]:
        """Return the different meanings of a string; more than one if it is ambiguous."""
        if is_path_only(text):
            return list(self._node(text))
        stem, number = text, None
        named = _PASS.fullmatch(text)
        if named is not None:
            stem, number = named[1], int(named[2])
            several = self.meanings(stem)
            if len(several) > 1:
                return several
        found: list[Meaning] = []
        for meaning in self._all(text, stem, number):
            hidden = meaning.kind == "node" and any(other.is_owned for other in found)
            if not hidden and not any(other.covers(meaning) for other in found):
                found.append(meaning)
        return found

    def clear(self, meaning: Meaning, others: Iterable[RunNames] = ()) -> str:
        """Return a string with only this meaning, in other runs as well."""
        options = [meaning.label] if len(meaning.places) != 1 else []
        for node, chosen in meaning.places:
            path = str(Node(self.tree, node, chosen)._path)
            options += [path, f".{path}"]
        for text in options:
            found = self.meanings(text) if text not in ("", meaning.text) else []
            if len(found) != 1 or found[0].values != meaning.values:
                continue
            elsewhere = (other for names in others for other in names.meanings(text))
            if all(other.paths == found[0].paths or other.is_alias for other in elsewhere):
                return text
        return meaning.label or meaning.text

    def listed(self) -> Iterator[str]:
        """Yield all names: modules, layers of the log, and nodes."""
        yield from self._calls
        if self._log is not None:
            yield from self._by_layer
        yield from (node.path for node in self.tree.data.walk() if node.path)

    def _all(self, text: str, stem: str, number: int | None) -> Iterator[Meaning]:
        if number is None:
            yield from self._meaning("state", text, self._states.get(text, []))
        calls = self._calls.get(stem) or self._calls.get(self._underscored.get(stem, ""), [])
        if number is None:
            yield from self._meaning("module", text, [(node, None) for node in _nodes(calls)])
        elif 1 <= number <= len(calls):
            node, position = calls[number - 1]
            yield from self._meaning("module", text, [(node, [position])])
        yield from self._node(text)
        layers = self._layers(stem)
        if number is not None:
            layers = [entry for entry in layers if entry.pass_number == number]
        if layers:
            yield self._layer(text, layers)

    def _meaning(
        self, kind: Literal["state", "module"], text: str, places: list[Place]
    ) -> Iterator[Meaning]:
        if places:
            yield Meaning(kind, text, tuple(places), self._values(places))

    def _node(self, text: str) -> Iterator[Meaning]:
        if text and not text.strip(" ."):
            return
        try:
            place = find_node(self.tree.data, text)
        except NodePathError:
            return
        yield Meaning("node", text, (place,), self._values([place]))

    def _layer(self, text: str, entries: list[LayerEntry]) -> Meaning:
        passes: dict[str, tuple[TreeNode, set[int]]] = {}
        for entry in entries:
            try:
                node, chosen = find_node(self.tree.data, NodePath(entry.node_path))
            except NodePathError:
                continue
            every = range(len(node.passes))
            passes.setdefault(node.path, (node, set()))[1].update(
                every if chosen is None else chosen
            )
        places: list[Place] = [
            (node, None if len(chosen) == len(node.passes) else sorted(chosen))
            for node, chosen in passes.values()
            if node.path
        ]
        values = frozenset(
            self.tree.origin(entry.index, entry.element)
            for entry in entries
            if entry.index is not None
        )
        label = entries[0].label if len(entries) == 1 else entries[0].name
        return Meaning("layer", text, tuple(places), values or self._values(places), label)

    def _layers(self, name: str) -> list[LayerEntry]:
        named = _LAYER.fullmatch(name)
        if named is None or self._log is None:
            return []
        if self._layer_types is not None and named[1] not in self._layer_types():
            return []
        return self._by_layer.get(name, [])

    def _values(self, places: list[Place]) -> frozenset[Value]:
        return frozenset(
            self.tree.origin(*value) for node, chosen in places for value in values_of(node, chosen)
        )

    @cached_property
    def _by_layer(self) -> dict[str, list[LayerEntry]]:
        assert self._log is not None
        return layers_by_name(self._log().entries)

    @cached_property
    def _calls(self) -> dict[str, list[tuple[TreeNode, int]]]:
        """The calls of each module by its qualified name, in the order in which they began."""
        found: dict[str, list[tuple[int, TreeNode, int]]] = {}
        for node in self.tree.data.walk():
            if node.role != "call" or not node.module or not node.path:
                continue
            for number, made in enumerate(node.passes):
                began = -1 if made.index is None else made.index
                found.setdefault(node.module, []).append((began, node, number))
        return {
            name: [(node, number) for _, node, number in sorted(calls, key=lambda call: call[0])]
            for name, calls in found.items()
        }

    @cached_property
    def _underscored(self) -> dict[str, str]:
        """The modules that a name with underscores for dots belongs to, as torch.fx writes it."""
        found: dict[str, list[str]] = {}
        for name in self._calls:
            found.setdefault(name.replace(".", "_"), []).append(name)
        return {short: names[0] for short, names in found.items() if len(names) == 1}

    @cached_property
    def _states(self) -> dict[str, list[Place]]:
        """The nodes of each parameter and buffer by its name in the state dict."""
        found: dict[str, list[Place]] = {}
        waiting = [self.tree.data]
        while waiting:
            holder = waiting.pop()
            for child in holder.children.values():
                if child.role == "state":
                    key = f"{holder.module}.{child.key}" if holder.module else str(child.key)
                    found.setdefault(dotted(key), []).append((child, None))
                elif child.kind == "graph":
                    waiting.append(child)
        return found


def is_layer_name(text: str) -> bool:
    """Return whether a string looks like the name of a layer: `conv2d_3`, `conv2d_3_7:2`."""
    return _LAYER.fullmatch(re.sub(r":\d+$", "", text)) is not None


def near_names(text: str, names: Iterable[str], most: int = 6) -> list[str]:
    """Return the names most similar to one that does not exist.

    First the names that end with it (`transformer.h.1` for `h.1`), then those with almost the same
    spelling, then those whose last part has almost the same spelling.
    """
    original, text = text, re.sub(r":\d+$", "", text)
    listed = list(dict.fromkeys(name for name in names if name and name != original))
    ends = [name for name in listed if text and name.endswith((f".{text}", f"_{text}"))]
    close = similar(text, listed, most)
    by_last: dict[str, str] = {}
    for name in listed:
        by_last.setdefault(name.rpartition(".")[2], name)
    last = similar(text.rpartition(".")[2], by_last, 3, 0.75)
    return list(dict.fromkeys([*ends, *close, *(by_last[name] for name in last)]))[:most]


def _nodes(calls: list[tuple[TreeNode, int]]) -> list[TreeNode]:
    return list({id(node): node for node, _ in calls}.values())


def layers_by_name(entries: list[LayerEntry]) -> dict[str, list[LayerEntry]]:
    """Return the entries of each layer by its names, with and without the position."""
    found: dict[str, list[LayerEntry]] = {}
    for entry in entries:
        for name in dict.fromkeys((entry.name, entry.short_name)):
            if entry.kind != "state":
                found.setdefault(name, []).append(entry)
    return found


def ambiguity(text: str, meanings: list[tuple[RunNames, Meaning]]) -> tuple[str, tuple[str, ...]]:
    """Return a description of an ambiguous string, and names that are not ambiguous."""
    runs = list({id(names): names for names, _ in meanings}.values())
    found = [(meaning, names.clear(meaning, runs)) for names, meaning in meanings]
    clear = tuple(dict.fromkeys(name for _, name in found if name != text))
    listing = " and ".join(
        _KINDS[meaning.kind].format(meaning.label or meaning.text)
        + (f" ({name!r})" if name != text else "")
        for meaning, name in found
    )
    choice = " or ".join(map(repr, clear))
    return f"{text!r} is ambiguous: it matches {listing}. Write {choice}", clear


_KINDS = {
    "state": "the parameter or buffer {}",
    "module": "the module {}",
    "node": "the node {} of the tree",
    "layer": "the layer {} of the log",
}


def values_of(data: TreeNode, chosen: Chosen) -> Iterator[Value]:
    """Yield the values that a node represents; for a graph, its outputs."""
    for _, made in passes_of(data, chosen):
        assert made.index is not None
        yield made.index, made.element


def passes_of(data: TreeNode, chosen: Chosen) -> Iterator[tuple[TreeNode, Pass]]:
    """Yield the nodes of the values that a node represents, each with one of its passes."""
    if data.kind == "graph":
        for child, below in children_of(data, chosen):
            if child.role == "output":
                yield from passes_of(child, below)
        return
    below_it = list(children_of(data, chosen))
    for child, below in below_it:
        yield from passes_of(child, below)
    if not below_it:
        passes = data.passes if chosen is None else [data.passes[number] for number in chosen]
        for made in passes:
            if made.index is not None:
                yield data, made


def holders_of(root: TreeNode) -> dict[int, TreeNode]:
    """Return the node around each node of a tree, by identity."""
    return {id(child): node for node in root.walk() for child in node.children.values()}


def call_around(holders: dict[int, TreeNode], data: TreeNode, made: Pass) -> int | None:
    """Return the number of the module call that a pass of a value was in; None if unknown."""
    while data.kind != "graph":
        data = holders[id(data)]
        made = data.passes[made.parent]
    return made.index
