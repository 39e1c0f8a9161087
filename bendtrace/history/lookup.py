"""Looking up entries: by name, module, position or node path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, overload

from torch import nn

from bendtrace._lazy import tabulate
from bendtrace.errors import InputError, LayerKeyError
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.names import (
    Names,
    ambiguity,
    call_around,
    holders_of,
    layers_by_name,
    near_names,
    passes_of,
)
from bendtrace.history.sizes import counted, listed, size_text
from bendtrace.paths.candidates import OneSelectable
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Node, NodePath, Tree, is_path_only
from bendtrace.recording.names import NodeRef

__all__ = ["Entries", "Key", "Lookup"]

# What finds one entry or several.
Key: TypeAlias = int | OneSelectable | NodeRef | LayerEntry | ModuleEntry

_NEAR = 6


class Entries(Sequence[LayerEntry]):
    """Several entries: a slice of a log, the passes of a layer, or all outputs of a module."""

    def __init__(self, entries: Sequence[LayerEntry], name: str = "") -> None:
        self._entries = list(entries)
        self._name = name

    @overload
    def __getitem__(self, index: int) -> LayerEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Entries: ...
    def __getitem__(self, index: int | slice) -> LayerEntry | Entries:
        if isinstance(index, slice):
            return Entries(self._entries[index], self._name)
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in LayerEntry.__dataclass_fields__ | _PROPERTIES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        labels = [repr(entry.label) for entry in self._entries]
        raise AttributeError(
            f"{self._name or 'this'} is {counted(len(self), 'entry')}, not one: use {name} of "
            f"one of them ({listed(labels)})"
        )

    def __repr__(self) -> str:
        rows = [
            (
                "" if entry.ordinal is None else entry.ordinal,
                entry.label,
                *_told(entry),
                entry.module,
            )
            for entry in self._entries
        ]
        if not rows:
            return "no entries"
        headers = ("#", "layer", "shape", "dtype or value", "size", "module")
        return tabulate.tabulate(rows, headers, disable_numparse=True, missingval="")


_PROPERTIES = {
    name: None for name, member in vars(LayerEntry).items() if isinstance(member, property)
}


def _told(entry: LayerEntry) -> tuple[object, str, str]:
    """Return shape, dtype and size of a tensor, or a number."""
    if entry.shape is None:
        return "", repr(entry.value), ""
    return tuple(entry.shape), str(entry.dtype).removeprefix("torch."), size_text(entry.nbytes)


class Lookup:
    """All keys of a log.

    Strings are resolved by `Names`, as everywhere else, and ambiguous ones raise. Only the full
    label of an entry always finds that entry, unless it is also the label of a module.

    Args:
        log: the log.
        tree: the node paths.
        select: returns the paths of the nodes that a selector, or any value that converts to one,
            selects; None for a log without its model, where only regular expressions work.
    """

    def __init__(
        self, log: Log, tree: Tree, select: Callable[[Any], Iterable[str]] | None = None
    ) -> None:
        self._log = log
        self._tree = tree
        self._select = select
        self._names = Names(tree, lambda: log)
        self.layers: list[LayerEntry] = [entry for entry in log.entries if entry.is_layer]
        self._places: dict[tuple[int, tuple[Any, ...]], LayerEntry] = {}
        for entry in log.entries:
            if entry.index is not None:
                self._places[entry.index, entry.element] = entry
                self._places.setdefault(tree.origin(entry.index, entry.element), entry)
        self._outputs = {entry.node_path: entry for entry in self.layers if entry.kind == "output"}
        self._found: dict[str, list[LayerEntry]] = {}
        self._labels: dict[str, list[LayerEntry]] = {}
        for entry in log.entries:
            self._labels.setdefault(entry.name, []).append(entry)
            self._labels[f"{entry.name}:{entry.pass_number}"] = [entry]
            if entry.kind == "state":
                self._found[entry.name] = [entry]
        for name, entries in layers_by_name(log.entries).items():
            self._found[name] = entries
            for entry in entries:
                self._found[f"{name}:{entry.pass_number}"] = [entry]
        modules: dict[str, list[LayerEntry]] = {}
        for call in log.modules:
            given = [
                log.passed.get((call.label, "output", label)) or self._found[label][0]
                for label in call.outputs
                if label in self._found
            ]
            if given and call.name:
                modules[call.label] = given
                modules.setdefault(call.name, []).extend(given)
        self.module_names: list[str] = list(
            dict.fromkeys(call.name for call in log.modules if call.name)
        )
        for name, several in modules.items():
            self._labels.pop(name, None)
            self._found.setdefault(name, list(dict.fromkeys(several)))

    def find(self, key: Any) -> LayerEntry | Entries:
        """Return the entry, or the entries, for a key.

        Raises:
            LayerKeyError: there is no such entry.
        """
        if isinstance(key, slice):
            return Entries(self.layers[self._bounds(key)])
        if isinstance(key, list):
            return Entries(list(dict.fromkeys(entry for one in key for entry in self.all(one))))
        if isinstance(key, LayerEntry):
            key = key.label
        if isinstance(key, ModuleEntry):
            key = key.label if key.passes > 1 else key.name
        if isinstance(key, NodeRef):
            found = [entry for entry in self._log.entries if entry.node == key.name]
            if not found:
                raise LayerKeyError(f"the mirror has no node {key.name!r} with a value", key)
            return found[0] if len(found) == 1 else Entries(found, key.name)
        if isinstance(key, Node):
            return self._at(key, str(key._path))
        if isinstance(key, int) and not isinstance(key, bool):
            try:
                return self.layers[key]
            except IndexError:
                raise LayerKeyError(
                    f"there is no layer {key}: the {len(self.layers)} layers have positions 0 "
                    f"to {len(self.layers) - 1}, or -{len(self.layers)} to -1",
                    key,
                ) from None
        if not isinstance(key, str):
            return self._meant(key)
        entries = None if is_path_only(key) else self._labels.get(key)
        if entries is not None:
            return entries[0] if len(entries) == 1 else Entries(entries, key)
        meanings = self._names.meanings(key)
        if len(meanings) > 1:
            message, clear = ambiguity(key, [(self._names, meaning) for meaning in meanings])
            raise LayerKeyError(message, key, clear)
        entries = None if is_path_only(key) else self._found.get(key)
        if entries is not None:
            return entries[0] if len(entries) == 1 else Entries(entries, key)
        if not meanings or not key:
            raise self._unknown(key)
        return self._at(Node(self._tree, *meanings[0].places[0]), key)

    def all(self, key: Any) -> list[LayerEntry]:
        """Return the entries for a key, as a list."""
        return list(self.find(key))

    def _meant(self, key: Any) -> LayerEntry | Entries:
        """Return the entries of the nodes that a selector selects."""
        found: dict[LayerEntry, None] = {}
        try:
            if isinstance(key, tuple):
                raise InputError("pass several keys as a list")
            paths = list((self._select or self._matched)(key))
        except InputError as error:
            raise LayerKeyError(
                f"layers are looked up by name, module, position or node path, not by {key!r}", key
            ) from error
        for path in paths:
            node = NodePath(path) if path else self._tree.root
            found.update(dict.fromkeys(self.all(node)))
        if not found:
            said = f"the module {type(key).__name__}" if isinstance(key, nn.Module) else repr(key)
            raise LayerKeyError(f"{said} selects no node of this run", key)
        entries = list(found)
        return entries[0] if len(entries) == 1 else Entries(entries)

    def _matched(self, key: Any) -> Iterator[str]:
        if not isinstance(key, re.Pattern):
            raise InputError(
                "a log without its model supports only regular expressions as selectors"
            )
        waiting = [(self._tree.data, "")]
        while waiting:
            node, scope = waiting.pop()
            qualified = f"{scope}.{node.name}" if scope else node.name
            names = (node.path, node.module if node.role == "call" else qualified)
            if node.role in ("op", "call") and any(map(key.search, names)):
                yield node.path
            inner = node.module if node.role == "call" else scope
            waiting += [(child, inner) for child in reversed(node.children.values())]

    def _bounds(self, key: slice) -> slice:
        """Turn names at the ends of a slice into positions; the last one is excluded, as usual."""
        ends: list[Any] = []
        for end in (key.start, key.stop):
            if isinstance(end, str):
                found = self.find(end)
                first = found if isinstance(found, LayerEntry) else found[0]
                if first.ordinal is None:
                    raise LayerKeyError(f"{end} is not a layer, and so has no position", end)
                end = first.ordinal
            ends.append(end)
        return slice(ends[0], ends[1], key.step)

    def _at(self, node: Node, key: str) -> LayerEntry | Entries:
        found = []
        if node._path in self._outputs:
            return self._outputs[node._path]
        for data, made in passes_of(node._data, node._chosen):
            assert made.index is not None
            entry = self._places.get((made.index, made.element))
            if entry is not None and self._log.passed and data.role in ("input", "output"):
                call = call_around(self._holders, data, made)
                way = "" if call is None else self._call_labels.get(call, ""), data.role
                entry = self._log.passed.get((*way, entry.label), entry)
                entry = self._log.passed.get((*way, entry.label), entry)
            if entry is not None and entry not in found:
                found.append(entry)
        if not found:
            raise LayerKeyError(f"the node {key} has no value in the log", key)
        return found[0] if len(found) == 1 else Entries(found, key)

    @cached_property
    def _holders(self) -> dict[int, TreeNode]:
        return holders_of(self._tree.data)

    @cached_property
    def _call_labels(self) -> dict[int, str]:
        """The labels of the module calls, by the numbers of their passes in the tree."""
        graphs = [node for node in self._tree.data.walk() if node.kind == "graph" and node.module]
        numbers = {made.index for node in graphs for made in node.passes}
        ordered = sorted(number for number in numbers if number is not None)
        labels = [call.label for call in self._log.modules]
        return dict(zip(ordered, labels, strict=True)) if len(ordered) == len(labels) else {}

    def _unknown(self, key: str) -> LayerKeyError:
        near = self.near(key)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        return LayerKeyError(
            f"there is no layer, module or node path {key!r}{hint}. Keys are names of layers "
            "(conv2d_3_7, conv2d_3, conv2d_3:2), of modules (features.6, features.6:1), "
            "positions (7, -1) and node paths (features_6.conv2d)",
            key,
            tuple(near),
        )

    def near(self, key: str) -> list[str]:
        """Return the most similar keys."""
        return near_names(key, (name for name in self.keys() if not name.endswith(":1")), _NEAR)

    def keys(self) -> Iterator[str]:
        """Yield every valid name, for completion: layers, modules, node paths."""
        for name in self._found:
            if name in self._labels or len(self._names.meanings(name)) == 1:
                yield name
        for entry in self._log.entries:
            path = entry.node_path
            if path and path not in self._found:
                yield path if len(self._names.meanings(path)) == 1 else f".{path}"

    def keys_of(self, entry: LayerEntry) -> list[str]:
        """Return the keys that find exactly this entry."""
        names = [entry.name] if entry.passes == 1 else []
        names.append(f"{entry.name}:{entry.pass_number}")
        for label in entry.output_of:
            for name in (label.rpartition(":")[0], label):
                if self._found.get(name) == [entry] and len(self._names.meanings(name)) == 1:
                    names.append(name)
        names = sorted(dict.fromkeys(names))
        if entry.ordinal is None:
            return names
        return [str(entry.ordinal - len(self.layers)), str(entry.ordinal), *names]
