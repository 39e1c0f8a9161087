"""Resolves the names of things in a model, in the same way for every entry point, or raises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from bendtrace._places import place_text
from bendtrace.errors import InputError, NodePathError
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.names import Meaning, Names, ambiguity
from bendtrace.interject.cut_points import is_named, path_in
from bendtrace.paths.candidates import NodeSelector
from bendtrace.paths.events import parameters_of
from bendtrace.paths.naming import identifier
from bendtrace.paths.nodes import Chosen, TreeNode
from bendtrace.paths.view import Node, NodePath, Tree, is_path_only
from bendtrace.recording.names import NodeRef
from bendtrace.torch_rules.owners import modules_in, states_of

__all__ = [
    "Runs",
    "by_path",
    "describe_where",
    "flat",
    "meant_by",
    "name_of",
    "node_meant",
    "text_of",
]


class Runs(Protocol):
    """The runs of a model that names are looked up in."""

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""

    def names(self) -> Iterable[Names]:
        """The names in the runs, those without insertions first."""

    def mirror_path(self, name: str) -> str:
        """Return the path of the node of the latest mirror that has a name; "" if there is none."""


def name_of(where: Any, known: Runs) -> str | None:
    """Return the name for a node or an entry of a run; None if `where` is neither.

    Args:
        where: a name, a node of a tree of paths or of a mirror, or an entry of a log.
        known: the recorded runs of the model.

    Raises:
        NodePathError: no mirror contains the node.
        InputError: the entry has no node.
    """
    if isinstance(where, Node):
        return where._path
    if isinstance(where, str):
        return where
    if isinstance(where, NodeRef):
        path = known.mirror_path(where.name)
        if not path:
            raise NodePathError(f"no mirror of the model has a node {where.name!r}", where.name)
        return NodePath(path)
    if isinstance(where, (LayerEntry, ModuleEntry)):
        name = where.name if isinstance(where, ModuleEntry) else NodePath(where.node_path)
        if not name:
            raise InputError(f"{where!r} has no path, so nothing can be inserted at it")
        return name
    return None


@dataclass(frozen=True)
class Meant:
    """The result of resolving a string.

    Attributes:
        kind: the kind of object.
        name: for modules and states, the qualified name.
        module: for modules, the module.
        places: nodes of runs: the root of the tree, the node, and its passes; None for all.
        is_owned: whether it is one of the model's own modules, parameters or buffers.
    """

    kind: Literal["state", "module", "node", "layer"]
    name: str = ""
    module: nn.Module | None = None
    places: tuple[tuple[TreeNode, TreeNode, Chosen], ...] = ()
    is_owned: bool = False

    @property
    def is_whole_state(self) -> bool:
        """Whether it is a parameter or buffer, in all its uses."""
        return self.is_owned and self.kind == "state"

    def paths(self) -> list[str]:
        """Return the paths of the nodes, each with its pass if it is one of several."""
        found = []
        for _, node, chosen in self.places:
            one = chosen is not None and len(chosen) == 1
            found.append(f"{node.path}:{chosen[0] + 1}" if one and chosen else node.path)
        return list(dict.fromkeys(found))


def meant_by(text: str, known: Runs) -> Meant | None:
    """Resolve a string in a model; return None if nothing known has this name.

    Raises:
        NodePathError: the string matches several things.
    """
    found: list[tuple[Names, Meaning]] = []
    for names in known.names():
        meanings = names.meanings(text)
        if len(meanings) > 1:
            raise _refusal(text, [(names, meaning) for meaning in meanings])
        found += [(names, meaning) for meaning in meanings]
    owned = None if is_path_only(text) else _owned(text, known)
    if owned is not None:
        if any(meaning.is_owned for _, meaning in found):
            found = [row for row in found if row[1].kind == "layer" or _is_of(owned, *row)]
        others = [row for row in found if not _is_of(owned, *row)]
        if others:
            mine = Meaning(owned.kind, text, (), frozenset(), owned.name)
            raise _refusal(text, [(others[0][0], mine), others[0]], owned)
        return replace(owned, places=tuple(_places(found)))
    if any(meaning.is_exact for _, meaning in found):
        # Another run may have a node for which the path is an alias, as `fc` for `fc_1`.
        found = [row for row in found if not row[1].is_alias]
    by_paths: dict[Any, tuple[Names, Meaning]] = {}
    for names, meaning in found:
        by_paths.setdefault("alias" if meaning.is_alias else meaning.paths, (names, meaning))
    chosen = list(by_paths.values())
    if len(chosen) > 1:
        raise _refusal(text, chosen)
    if not isinstance(text, NodePath):
        for _, meaning in chosen:
            if meaning.kind == "node":
                _require_same(text, meaning.places[0][0], [names.tree for names in known.names()])
    return Meant(chosen[0][1].kind, text, None, tuple(_places(chosen))) if chosen else None


def _require_same(text: str, node: TreeNode, trees: Sequence[Tree]) -> None:
    """Raise for a name that depends on which of several paths came first.

    Nodes of one name are numbered in the order in which the runs reach them. With only one of the
    runs known, the name might be that of another node.

    Raises:
        NodePathError: another known run would give the name to another node.
    """
    outer, _, name = node.path.rpartition(".")
    for tree in trees:
        parent: TreeNode | None = tree.data
        for part in outer.split(".") if outer else ():
            parent = None if parent is None else parent.children.get(part)
        counts: Counter[str] = Counter()
        for child in () if parent is None else parent.children.values():
            base = identifier(child.label or child.name)
            own = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
            if own == name and child.name != name:
                raise NodePathError(
                    f"{text!r} depends on which path came first: it is {_placed(node)}, but would "
                    f"be {_placed(child)} if another known run had come before. Pass the node of a "
                    "tree (`bended.trace(...).tree`), or node_selector.at_line(...)",
                    text,
                    (node.path, child.path),
                )


def _placed(node: TreeNode) -> str:
    if not node.places:
        return f"{node.path!r}"
    place = node.places[0]
    return f"`{place.text}` at {place_text(place.file, place.line)}"


def _owned(text: str, known: Runs) -> Meant | None:
    """Return the parameter, buffer or module with a name, which can have underscores for dots."""
    if not text:
        return None
    if text in dict(states_of(known.model)):
        return Meant("state", text, is_owned=True)
    modules = modules_in(known.model)
    named = [text] if text in modules else [n for n in modules if n.replace(".", "_") == text]
    return Meant("module", named[0], modules[named[0]], is_owned=True) if len(named) == 1 else None


def _is_of(owned: Meant, names: Names, meaning: Meaning) -> bool:
    """Return whether the meaning of a string in a run is the module or state that it names."""
    if meaning.kind == owned.kind:
        return True
    if owned.kind == "state":
        return all(node.role == "state" for node, _ in meaning.places)
    calls = (mine for mine in names.meanings(owned.name) if mine.kind == owned.kind)
    return any(mine.covers(meaning) for mine in calls)


def _places(found: Iterable[tuple[Names, Meaning]]) -> Iterator[tuple[TreeNode, TreeNode, Chosen]]:
    seen = set()
    for names, meaning in found:
        for node, chosen in meaning.places:
            if node.path not in seen:
                seen.add(node.path)
                yield names.tree.data, node, chosen


def _refusal(
    text: str, meanings: list[tuple[Names, Meaning]], owned: Meant | None = None
) -> NodePathError:
    message, clear = ambiguity(text, meanings)
    if owned is not None and owned.module is not None:  # which no run has called
        message += ", or give the module itself"
    return NodePathError(message, text, clear)


def text_of(where: Any) -> str:
    """Return the path for a key: a path or a node.

    Raises:
        InputError: it is neither a path nor a node.
    """
    if isinstance(where, Node):
        return where._path
    if not isinstance(where, str):
        raise InputError(f"activations have to be given by node path, not by {where!r}")
    return where


def by_path(model: Any, activations: Mapping[Any, Any]) -> dict[str, Any]:
    """Return given activations by the paths of their nodes.

    Args:
        model: the `BendedModule`.
        activations: the values, by path or node.

    Raises:
        InputError: a key is not a path, selects something whose value cannot be given, or is
            ambiguous, or two keys select the same value.
    """
    found: dict[str, Any] = {}
    values: list[tuple[str, _Value]] = []
    for where, value in activations.items():
        said, path = describe_where(where), _path_of(model, where)
        if path in found:
            raise InputError(f"{said} is given twice, as a path and as a node or by another name")
        found[path] = value
        node = node_meant(model, path)
        if node is None:
            stem, _, part = path.rpartition(".")
            module = modules_in(model._known.model).get(stem) if stem else None
            if module is not None and part in ("input", *dict(parameters_of(module))):
                raise InputError(_INPUT.format(said))
            continue
        meant = _Value.of(node)
        if meant.role == "state":
            raise InputError(_STATE.format(said))
        if meant.role == "input" and meant.scope:
            raise InputError(_INPUT.format(said))
        for other, before in values:
            if meant.overlaps(before):
                raise InputError(
                    f"{other} and {said} select the same value, or overlapping parts of it"
                )
        values.append((said, meant))
    return found


def _path_of(model: Any, where: Any) -> str:
    """Return the path of the one selected node; a name is returned as it is if no run has it yet.

    Raises:
        InputError: it is not the value of one node.
    """
    known, said = model._known, describe_where(where)
    try:
        text = name_of(where, known)
        if isinstance(text, NodePath):
            return text
        if text is None:
            if not (isinstance(where, (NodeSelector, re.Pattern)) or callable(where)):
                raise InputError(f"activations have to be given by node path, not by {where!r}")
            paths = known.select(where)
            if not paths:
                raise InputError(f"{said} selects no known node")
        elif (meant := meant_by(text, known)) is None:
            return text
        elif meant.is_whole_state:
            raise InputError(_STATE.format(said))
        else:
            paths = meant.paths()
            if text in paths:  # of the calls of a module, the one with this name in the tree
                return NodePath(text)
    except NodePathError as error:
        raise InputError(str(error)) from None
    if len(paths) > 1:
        listed = " and ".join(map(repr, paths))
        raise InputError(f"{said} is ambiguous: it matches {listed}. Write one of these")
    return NodePath(paths[0]) if paths else str(text)


def node_meant(model: Any, text: str) -> Node | None:
    """Return the node with a path in a run that has reached it, if any.

    In some run, another node may answer to the path: the call `fc_1` of a module to `fc`. That node
    is returned if no run has a node with exactly this path.
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
    """The value of a node: a result, or a part of one.

    Attributes:
        path: the node of the function, or of the module call.
        keys: the keys that lead to the part.
        passes: the selected passes; None for all.
        scope: path of the enclosing call, "" for that of the model.
        role: the role of the whole value there.
    """

    path: str
    keys: tuple[str, ...]
    passes: frozenset[int] | None
    scope: str
    role: str

    @classmethod
    def of(cls, node: Node) -> _Value:
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
        """Return whether one contains the other."""
        common = min(len(self.keys), len(other.keys))
        return (
            self.path == other.path
            and self.keys[:common] == other.keys[:common]
            and (self.passes is None or other.passes is None or bool(self.passes & other.passes))
        )


# The classes that hold torch's functions, and the methods of tensors.
_OF_TORCH = re.compile(r"^(?:(_VariableFunctionsClass)|_?TensorBase)\.")

_INPUT = "{} is the input of a module: give the value of the node that computes it"
_STATE = "{} is a parameter or buffer, not an activation: bend or patch it"


def describe_where(where: Any) -> str:
    """Return a short description of a location."""
    if isinstance(where, (list, tuple, set, frozenset)):
        return ", ".join(map(describe_where, where))
    if isinstance(where, Node):
        return repr(where._path)
    if isinstance(where, re.Pattern):
        return f"/{where.pattern}/"
    if isinstance(where, nn.Module):
        return f"the module {type(where).__name__}"
    if isinstance(where, type):
        return where.__name__
    if isinstance(where, (LayerEntry, ModuleEntry)):
        return repr(where.label)
    if callable(where) and not isinstance(where, NodeSelector):
        name = getattr(where, "__qualname__", repr(where))
        return _OF_TORCH.sub(lambda owner: "torch." if owner[1] else "Tensor.", name)
    return repr(where)


def flat(where: Any) -> Iterator[Any]:
    """Yield the items of nested containers one by one."""
    if isinstance(where, (list, tuple, set, frozenset)):
        for item in where:
            yield from flat(item)
    else:
        yield where
