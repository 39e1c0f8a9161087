"""The keys of given activations: which node each of them means, if it is one that can be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bendtrace.errors import InputError, NodePathError
from bendtrace.interject.cuts import is_named, path_in
from bendtrace.interject.meant import meant_by
from bendtrace.paths.view import Node, NodePath

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
        said = text_of(where)
        path = _path_of(model, NodePath(said) if isinstance(where, Node) else said)
        if path in found:
            raise InputError(f"{said!r} is given twice, as a path and as a node or by another name")
        found[path] = value
        node = node_meant(model, path)
        if node is None:
            continue
        meant = _Value.of(node)
        if meant.role == "state":
            raise InputError(_STATE.format(said))
        if meant.role == "input" and meant.scope:
            raise InputError(
                f"{said!r} is what a module is given: give the value of the node that it comes from"
            )
        for other, before in values:
            if meant.overlaps(before):
                raise InputError(f"{other!r} and {said!r} mean the same value, or parts of it")
        values.append((said, meant))
    return found


def _path_of(model: Any, text: str) -> str:
    """Return the path of the node that a string names; the string if no run has come by it yet.

    Raises:
        InputError: it names no value of one node.
    """
    if isinstance(text, NodePath):
        return text
    try:
        meant = meant_by(text, model._known)
    except NodePathError as error:
        raise InputError(str(error)) from None
    if meant is None:
        return text
    if meant.is_whole_state:
        raise InputError(_STATE.format(text))
    paths = meant.paths()
    if text in paths:  # of the calls of a module, the one that the tree calls so
        return NodePath(text)
    if len(paths) > 1:
        listed = " and ".join(map(repr, paths))
        raise InputError(f"{text!r} is ambiguous: it names {listed}. Write one of these")
    return NodePath(paths[0]) if paths else text


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


_STATE = "{!r} is a parameter or buffer, not an activation: bend it, or patch it"
