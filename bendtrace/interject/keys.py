"""The keys of given activations: which node each of them means, if it is one that can be given."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from bendtrace.errors import InputError, NodePathError
from bendtrace.interject.cuts import is_named, path_in
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Node
from bendtrace.recording.owners import module_of

__all__ = ["by_path", "node_meant", "text_of"]


def text_of(where: Any) -> str:
    """Return the path that a key is, or stands for.

    Raises:
        InputError: it is neither a path nor a node.
    """
    if isinstance(where, Node):
        return where._path
    if not isinstance(where, str):
        raise InputError(f"activations are given by node paths, not by {where!r}")
    return where


def by_path(model: Any, activations: Mapping[Any, Any]) -> dict[str, Any]:
    """Return given activations by the paths of their nodes.

    Args:
        model: the `BendedModule`.
        activations: the values, by path or node.

    Raises:
        InputError: a key is no path, or means something that cannot be given, or does not say
            which of two things it means, or two are the same.
    """
    found: dict[str, Any] = {}
    values: list[tuple[str, _Value]] = []
    for where, value in activations.items():
        text = text_of(where)
        if text in found:
            raise InputError(f"{text!r} is given twice, as a path and as a node")
        found[text] = value
        node = node_meant(model, text)
        kind = "" if isinstance(where, Node) else _kind(model._model, _PASS.sub("", text))
        if kind == "parameter or buffer" and node is None:
            raise InputError(_STATE.format(text))
        if node is None:
            continue
        _require_clear(model, text, kind, node)
        meant = _Value.of(node)
        for other, before in values:
            if meant.overlaps(before):
                raise InputError(f"{other!r} and {text!r} mean the same value, or parts of it")
        values.append((text, meant))
    return found


def node_meant(model: Any, text: str) -> Node | None:
    """Return the node of a path in a run that has come by it, if one has.

    A run may have another node that answers to the path: the call `fc_1` of a module to `fc`. That
    is meant if no run has a node with that very path.
    """
    other = None
    for tree in model._known.trees():
        try:
            node: Node = tree.resolve(path_in(tree, text), leaf=False)
        except NodePathError:
            continue
        if is_named(node._data, text):
            return node
        other = other or node
    return other


class _Value(NamedTuple):
    """What a node stands for: what something gave, or a part of that.

    Attributes:
        path: the node of the function, or of the call of a module.
        keys: what leads to the part.
        passes: which passes are meant; None for all.
        scope: path of the call that it is in, "" for that of the model.
        role: what the whole is there.
    """

    path: str
    keys: tuple[str, ...]
    passes: frozenset[int] | None
    scope: str
    role: str

    @classmethod
    def of(cls, node: Node) -> _Value:
        """Return what a node stands for."""
        data, inner = node._data, node._tree.data
        passes = None if node._chosen is None else frozenset(node._chosen)
        if data.kind == "graph":
            return cls(data.path, (), passes, data.path, "call")
        graph, keys = inner, []
        for name in data.path.split("."):
            inner = inner.children[name]
            keys.append(name)
            if inner.kind == "graph":
                graph, keys = inner, []
        whole = graph.children[keys[0]]
        path = graph.path if whole.role == "output" else whole.path
        return cls(path, tuple(keys[1:]), passes, graph.path, whole.role)

    def overlaps(self, other: _Value) -> bool:
        """Whether the one is the other, or a part of it."""
        common = min(len(self.keys), len(other.keys))
        return (
            self.path == other.path
            and self.keys[:common] == other.keys[:common]
            and (self.passes is None or other.passes is None or bool(self.passes & other.passes))
        )


def _require_clear(model: Any, text: str, kind: str, node: Node) -> None:
    """Refuse what cannot be given, and names that two things have."""
    value = _Value.of(node)
    if value.role == "state":
        raise InputError(_STATE.format(text))
    if value.role == "input" and value.scope:
        raise InputError(
            f"{text!r} is what a module is given: give the value of the node that it comes from"
        )
    if kind and not (kind == "module" and _is_of_module(module_of(model._model), node, text)):
        raise InputError(
            f"{text!r} is the name of a {kind} of the model, and the path of another node "
            f"({_place(node._data)}): give that as the node of a tree, if it is meant"
        )


_PASS = re.compile(r":\d+$")
_STATE = "{!r} is a parameter or buffer, not an activation: bend it, or patch it"


def _kind(model: Any, name: str) -> str:
    """Say what a model has under a qualified name; "" if nothing that could be meant by it."""
    whole = module_of(model)
    if whole is None or not name:
        return ""
    owner, _, last = name.rpartition(".")
    try:
        around = whole.get_submodule(owner)
    except AttributeError:
        return ""
    if last in around._modules:
        return "module"
    return "parameter or buffer" if last in {**around._parameters, **around._buffers} else ""


def _is_of_module(model: nn.Module | None, node: Node, text: str) -> bool:
    """Whether a node is a call of the module that a text is the qualified name of."""
    if model is None or node._data.kind != "graph":
        return False
    meant = model.get_submodule(_PASS.sub("", text))
    return meant is dict(model.named_modules()).get(node._data.module)


def _place(node: TreeNode) -> str:
    if not node.places:
        return node.path
    place = node.places[0]
    return f"{os.path.basename(place.file)}:{place.line} `{place.text}`"
