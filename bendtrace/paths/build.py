"""The nodes of a tree while it is built from a recorded run."""

from __future__ import annotations

import linecache
from collections.abc import Hashable
from typing import Any

from torch import nn

from bendtrace.paths.events import Events
from bendtrace.paths.holders import Holders
from bendtrace.paths.naming import Registry, identifier
from bendtrace.paths.nodes import Kind, Pass, Place, Role, TreeNode, Variant
from bendtrace.paths.structure import items_of, type_name
from bendtrace.recording import recorder
from bendtrace.recording.sites import Site
from bendtrace.recording.structure import Existing, Made
from bendtrace.recording.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in

__all__ = ["Builder"]

# The code of the tracer itself that runs a function.
_TRACERS = frozenset({recorder.__file__})


class Builder:
    """Makes the nodes of the tree of one run, or finds those that are there already.

    Args:
        events: what happened in the run.
        registry: gives the names.

    Attributes:
        root: the root of the tree.
        where: for each call of a module, by identity, its node and the pass that it is.
        marks: for each call, by identity, the position on the tape of each child and its name.
    """

    def __init__(self, events: Events, registry: Registry) -> None:
        self.events = events
        self.where: dict[int, tuple[TreeNode, int]] = {}
        self.marks: dict[int, list[tuple[int, str]]] = {}
        self.paths: dict[int, str] = {}  # of the node that gave each value first
        self._registry = registry
        function = events.function
        root = function if isinstance(function, nn.Module) else events.root.module
        self._holders = Holders(root)
        self._places: dict[int, tuple[Place, ...]] = {}
        self._sites: dict[int, tuple[int, Site]] = {}
        self._codes: dict[int, dict[str, list[int]]] = {}
        self._inserted: dict[int, tuple[TreeNode, list[tuple[str, str]]]] = {}
        call = events.root
        self.root = TreeNode("", "graph", "Graph", "call", module=call.path)
        self.root.class_name = type(call.module or events.function).__name__

    def finish(self) -> None:
        """Put outputs last, and the code that ran into the graphs."""
        for node, inserted in self._inserted.values():
            order = list(node.children)
            for name, after in inserted:
                if name == after:  # a module that calls itself
                    continue
                order.remove(name)
                order.insert(order.index(after), name)
            node.children = {name: node.children[name] for name in order}
        for node in self.root.walk():
            outputs = [child for child in node.children.values() if child.role == "output"]
            if node.kind == "graph":
                for child in outputs:
                    node.children[child.name] = node.children.pop(child.name)
                texts = self._codes.get(id(node), {})
                node.code = [Variant(text, tuple(passes)) for text, passes in texts.items()]

    def site(self, site: Site | None) -> int:
        """Return the number of a site."""
        if site is None:
            return 0
        known = self._sites.get(id(site))
        if known is None:
            known = self._sites[id(site)] = self._registry.site(site), site
        return known[0]

    def places(self, site: Site | None) -> tuple[Place, ...]:
        """Return the lines that led to a site, from the code of the module inwards."""
        if site is None:
            return ()
        known = self._places.get(id(site))
        if known is None:
            known = self._places[id(site)] = tuple(
                Place(
                    place.file, place.line, place.function,
                    linecache.getline(place.file, place.line).strip(),
                )
                for place in reversed(site.places[site.level :])
                if place.file not in _TRACERS
            )  # fmt: skip
        return known

    def node(
        self,
        parent: TreeNode,
        key: Hashable,
        label: str,
        kind: Kind,
        type_: str,
        role: Role,
    ) -> TreeNode:
        """Return the child of a node that a key stands for, made if it is new."""
        if role == "output" and parent.kind == "graph":
            name = self._registry.output(parent.path, key)
        else:
            name = self._registry.name(parent.path, key, identifier(label))
        child = parent.children.get(name)
        if child is None:
            child = TreeNode(name, kind, type_, role, path=parent.child_path(name))
            child.label = label if label != name else ""
            parent.children[name] = child
        return child

    def value(
        self,
        parent: TreeNode,
        number: int,
        key: Hashable,
        label: str,
        value: Any,
        role: Role,
        places: tuple[Place, ...] = (),
    ) -> TreeNode:
        """Add a value, and what it contains, to pass `number` of a node.

        Args:
            parent: the node around it.
            number: in which pass of that.
            key: what makes it this node.
            label: what to call it.
            value: the value, as recorded.
            role: how it belongs to the graph.
            places: where it happened.
        """
        value = self.plain(value)
        items = items_of(value, self.events)
        if items is not None:
            kind: Kind = "container"
            type_, made = type_name(value), Pass(number)
        elif isinstance(value, Ref):
            index, element = self.events.origin(value.index)
            kind, type_, shape = _described(self.events, index, element)
            made = Pass(number, index, element, shape)
        else:
            kind, type_, made = "other", type_name(value), Pass(number)
        group = type_ if kind in ("container", "other") else kind
        child = self.node(parent, (key, group), label, kind, type_, role)
        child.passes.append(made)
        if made.index is not None:
            self.paths.setdefault(made.index, child.path)
        child.places = child.places or places
        if kind == "number" and child.type != type_:
            child.type = "number"
        for item in items or ():
            inner = self.value(
                child, len(child.passes) - 1, ("item", repr(item.key)), item.label, item.value, role
            )
            inner.key = item.key
        return child

    def plain(self, value: Any) -> Any:
        """Return what stands behind other names of a value."""
        if isinstance(value, Existing):
            part = self.events.real(value.part)
            index = self.events.input_of.get(part.index)
            return Existing(part) if index is None else Ref(index)
        if isinstance(value, Made):
            refs = list(refs_in(value))
            return refs[0] if value.maker.__name__ == "tagged" and refs else value
        return value

    def has_values(self, value: Any) -> bool:
        """Whether there is anything of the run in a value."""
        value = self.plain(value)
        if isinstance(value, Ref):
            return True
        items = items_of(value, self.events)
        return items is not None and any(self.has_values(item.value) for item in items)

    def insert(self, node: TreeNode, names: list[str], after: str) -> None:
        """Note that some children stand before another one."""
        _, inserted = self._inserted.setdefault(id(node), (node, []))
        inserted += [(name, after) for name in names]

    def keep_code(self, node: TreeNode, number: int, text: str) -> None:
        """Note what a pass of a graph ran."""
        self._codes.setdefault(id(node), {}).setdefault(text, []).append(number)

    def relative(self, call: ModuleCall) -> str:
        """Return what the code around a call knows the module as: `layers.8`."""
        return self._holders.module(call)

    def state(self, op: Op, call: ModuleCall) -> str:
        """Return what the code of a call knows a parameter or buffer as: `weight`."""
        return self._holders.state(str(op.target), call)


def _described(
    events: Events, index: int, element: tuple[Any, ...]
) -> tuple[Kind, str, tuple[int, ...] | None]:
    if events.ops[index].kind is OpKind.UNKNOWN:
        meta = events.ops[index].meta
    else:
        try:
            meta = events.meta((index, element))
        except (LookupError, TypeError):
            meta = None
    if isinstance(meta, TensorMeta):
        return "tensor", "Tensor", meta.shape
    return "number", type(meta).__name__, None
