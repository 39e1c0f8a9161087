"""The location of an insertion: every accepted form, and its resolution."""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from torch import nn

from bendtrace._lazy import LazyModule
from bendtrace._places import place_text
from bendtrace.errors import InputError, NodePathError
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.names import near_names
from bendtrace.interject.aliases import Alias
from bendtrace.interject.plan import Location, State
from bendtrace.interject.resolver import Meant, Runs, meant_by, name_of
from bendtrace.paths.candidates import (
    Candidate,
    CandidateGraph,
    NodeSelector,
    OneSelectable,
)
from bendtrace.paths.naming import dotted
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Node, Tree, dug, find
from bendtrace.recording.names import NodeRef
from bendtrace.torch_rules.functions import SHAPES, VALUES
from bendtrace.torch_rules.owners import module_of, modules_in, parts_of

if TYPE_CHECKING:
    from bendtrace.interject.selectors import naming
else:
    naming = LazyModule("bendtrace.interject.selectors.naming")

__all__ = [
    "AtPath",
    "AtPaths",
    "Known",
    "LocationText",
    "OfModule",
    "Target",
    "Where",
    "near_misses",
    "targets_named",
    "targets_of",
]

_Nodes: TypeAlias = OneSelectable | NodeRef | LayerEntry | ModuleEntry | Alias
# All that `BendedModule.interject` takes as a location.
Where: TypeAlias = _Nodes | Sequence[_Nodes] | AbstractSet[_Nodes]


@dataclass(frozen=True)
class AtPath:
    """The node with a path."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    path: str

    def matches(self, node: Candidate) -> bool:
        """Return whether a node has the path."""
        return node.path == self.path


@dataclass(frozen=True)
class AtPaths:
    """The nodes of some paths."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    paths: frozenset[str]

    def matches(self, node: Candidate) -> bool:
        """Return whether a node has one of the paths."""
        return node.path in self.paths


@dataclass(frozen=True, eq=False)
class OfModule:
    """The calls of one module."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    is_of_modules: ClassVar[bool] = True
    module: nn.Module

    def matches(self, node: Candidate) -> bool:
        """Return whether a node is a call of the module."""
        return node.module is self.module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfModule) and other.module is self.module

    def __hash__(self) -> int:
        return id(self.module)


@dataclass(frozen=True)
class Selected:
    """The nodes that a selector selects.

    Attributes:
        selector: the selector.
        is_broad: whether it can select any node: a selector, or a function of a node.
    """

    selector: NodeSelector
    is_broad: bool

    @property
    def needs_output(self) -> bool:
        """Whether it depends on the output of the node."""
        return self.selector.needs_output

    @property
    def is_of_modules(self) -> bool:
        """Whether it selects calls of modules only, by the module alone."""
        return self.selector.is_of_modules

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node."""
        return self.selector.matches(node)

    def __repr__(self) -> str:
        return repr(self.selector)


class Known(Runs, Protocol):
    """The runs of a model that insertions are placed in."""

    def trees(self) -> Iterable[Tree]:
        """The trees of the runs without insertions, the preferred one first."""

    def hint(self, name: str) -> str:
        """Return the untaken branch in which something with a name may be."""


class LocationText(str):
    """A copy's replacement for a location that refers to the original model."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Target:
    """One location, as the user gave it.

    Attributes:
        said: as given.
        place: the resolved location, if it can be resolved without a run.
        passes: the passes that it names, counted from 0; None for all.
    """

    said: Any
    place: Location | None = None
    passes: tuple[int, ...] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a run without insertions has to resolve it, each time."""
        return isinstance(self.said, NodeSelector) and self.said.looks_ahead

    @property
    def is_open(self) -> bool:
        """Whether it has to be looked up in the first run."""
        return self.place is None and not self.is_ahead

    def said_in_words(self) -> Target:
        """Return the same without tree nodes, which belong to one model."""
        return replace(self, said=self.said._path) if isinstance(self.said, Node) else self

    def ahead(self, graph: CandidateGraph) -> Location:
        """Return the location of a selector in a run."""
        return Location("node", AtPaths(frozenset(self.said.select(graph))))


def targets_of(where: Where | State, known: Known, *, lenient: bool = False) -> tuple[Target, ...]:
    """Parse a location.

    Args:
        where: as given.
        known: the recorded runs of the model.
        lenient: whether a name without a match may match later.

    Raises:
        InputError: it is not a valid location.
        NodePathError: a name matches nothing.
    """
    if isinstance(where, (list, tuple, set, frozenset)):
        if not where:
            raise InputError("where= is empty: pass at least one node")
        return tuple(
            target for item in where for target in targets_of(item, known, lenient=lenient)
        )
    try:
        return _targets(where, known)
    except NodePathError:
        if not lenient:
            raise
        return (Target(where),)


def _targets(where: Any, known: Known) -> tuple[Target, ...]:
    if isinstance(where, Node):
        _require_own(where, known)
    name = name_of(where, known)
    if name is not None:
        return _named(name, known, where)
    if isinstance(where, State):
        return (Target(where, Location("state", where, shown=where.name)),)
    if isinstance(where, nn.Module):
        owner = module_of(known.model)
        if owner is not None and all(where is not module for module in parts_of(owner)):
            raise InputError(
                f"the module {type(where).__name__} is not a submodule of the model: pass one "
                "of its own submodules, a path or a class"
            )
        return (Target(where, Location("node", OfModule(where))),)
    if isinstance(where, NodeSelector) and where.looks_ahead:
        return (Target(where),)
    if isinstance(where, type) and not issubclass(where, nn.Module):
        raise InputError(f"a class has to be a class of modules, not {where!r}")
    if not (isinstance(where, re.Pattern) or callable(where) or isinstance(where, NodeSelector)):
        raise InputError(
            "where= takes a node path, a node, a regular expression, a module, a class of modules, "
            "a selector, a torch function, a function of a node, a node of a mirror or an entry of "
            f"a log, or several of these; not {where!r}"
        )
    is_broad = not isinstance(where, (re.Pattern, type))
    return (Target(where, Location("node", Selected(naming.as_selector(where), is_broad))),)


def _require_own(node: Node, known: Known) -> None:
    """Raise for a node of a tree if its path in this model belongs to something else.

    Raises:
        InputError: it does.
    """
    data, model = node._data, module_of(known.model)
    if data.kind == "graph" and data.module and model is not None:
        module = modules_in(model).get(data.module)
        if module is not None and type(module).__name__ != data.class_name:
            raise InputError(
                f"{data.path!r} is a {data.class_name} in the run of this node, and a "
                f"{type(module).__name__} in this model: pass a path, or a node of the model's "
                "own trees"
            )
    if data.role != "op" or not data.places:
        return
    others = []
    for tree in known.trees():
        try:
            other = find(tree.data, data.path)[0]
        except NodePathError:
            continue
        if not other.places or _where(other) == _where(data):
            return
        others.append(other)
    if others:
        raise InputError(
            f"{data.path!r} is at {_said(data)} in the run of this node, and at "
            f"{_said(others[0])} in this model: pass a path, or a node of the model's own "
            "trees"
        )


def _where(node: TreeNode) -> tuple[Any, ...]:
    place = node.places[0]
    return place.file, place.function, place.line, place.text


def _said(node: TreeNode) -> str:
    place = node.places[0]
    return f"{place_text(place.file, place.line)} `{place.text}`"


def _named(text: str, known: Known, said: Any) -> tuple[Target, ...]:
    """Resolve a string.

    The qualified name of a module selects all its calls, that of a parameter all its uses; other
    names select one place in the source, or the places of a layer.
    """
    meant = meant_by(text, known)
    if meant is not None:
        return _targets_meant(meant, text, said)
    errors: list[NodePathError] = []
    for tree in known.trees():
        try:
            find(tree.data, text)
        except NodePathError as error:
            errors.append(error)
    if not errors:  # the first run shows it (see `lookup.py`)
        return (Target(said),)
    path = known.mirror_path(text)
    near = near_names(text, (name for names in known.names() for name in names.listed()))
    at_root = all("." not in path for error in errors for path in error.completions)
    if near and at_root and not path and not any("did you mean" in str(error) for error in errors):
        said = ", ".join(map(repr, near))
        raise NodePathError(
            f"no node {text!r} in the model; similar names: {said}", text, tuple(near)
        )
    hint = f"the mirror has a node {text!r}: pass {path!r}, or NodeRef({text!r})" if path else ""
    raise _astray(errors, hint or _foreign(text) or known.hint(text))


def targets_named(text: str, known: Known) -> tuple[Target, ...]:
    """Resolve a string in what a run has shown so far; return nothing if it has no such name.

    Raises:
        NodePathError: the string is ambiguous, or names something without a value.
    """
    meant = meant_by(text, known)
    return () if meant is None else _targets_meant(meant, text, text)


def _targets_meant(meant: Meant, text: str, said: Any) -> tuple[Target, ...]:
    if meant.is_whole_state:
        return (Target(said, Location("state", State(meant.name), shown=meant.name)),)
    if meant.module is not None:
        return (Target(said, Location("node", OfModule(meant.module))),)
    if not meant.places:
        raise NodePathError(
            f"{text!r} is a layer without a node in the tree: nothing can be inserted there; "
            "choose a node that uses it",
            text,
        )
    return tuple(
        Target(
            said, _place(root, node),
            None if chosen is None or node.role == "state" else tuple(chosen),
        )
        for root, node, chosen in meant.places
    )  # fmt: skip


def _foreign(text: str) -> str:
    """Return what to pass for a string that looks like something else than a name; or ""."""
    if re.search(r"(^|\.)hook_\w+$", text):
        return (
            "the names of TransformerLens's hooks work in run_with_cache; "
            "bendtrace.workflows.transformer_lens_aliases(model) lists the model's own names"
        )
    if re.search(r"[\\^$*+?]", text):
        return f"for a regular expression, pass re.compile({text!r})"
    return ""


def _astray(errors: Sequence[NodePathError], hint: str) -> NodePathError:
    """Merge the errors of all runs into one: where the path got furthest, and what exists."""
    furthest = max(errors, key=_nearness)
    level = {path.rpartition(".")[0] for path in furthest.completions}
    more = dict.fromkeys(
        path
        for error in errors
        for path in error.completions
        if path not in furthest.completions and path.rpartition(".")[0] in level
    )
    said = [str(furthest)]
    if more:
        names = ", ".join(repr(path.rpartition(".")[2]) for path in itertools.islice(more, 8))
        said.append(f"in other runs there {'is' if len(more) == 1 else 'are'} {names}")
    message = "; ".join([*said, hint] if hint else said)
    return NodePathError(message, furthest.path, (*furthest.completions, *more))


def _nearness(error: NodePathError) -> tuple[int, float]:
    """Return how far a path got, and how similar the existing names are."""
    said = re.split(r"[.|:]", error.path)
    names = [path.split(".") for path in error.completions]
    alike = [
        SequenceMatcher(None, name[-1], said[len(name) - 1]).ratio()
        for name in names
        if len(name) <= len(said)
    ]
    return max(map(len, names), default=0), max(alike, default=0.0)


def _place(root: TreeNode, node: TreeNode) -> Location:
    shown = dug(root, node)
    if node.role == "call":
        return Location("node", AtPath(node.path), shown=shown)
    chain = [root]
    for name in node.path.split("."):
        chain.append(chain[-1].children[name])
    graph = max(i for i, item in enumerate(chain) if item.kind == "graph")
    holder, whole = chain[graph], chain[graph + 1]
    dig = tuple(item.key if item.key is not None else item.name for item in chain[graph + 2 :])
    if whole.role == "output":
        return Location("node", AtPath(holder.path), dig=dig, shown=shown)
    if whole.role == "input":
        return Location("input", AtPath(holder.path), whole.name, dig, shown)
    if whole.role == "state":
        key = str(whole.key)
        name = f"{holder.module}.{key}" if holder.module else key
        return Location("state", State(dotted(name), holder.path), shown=shown)
    if whole.kind == "number" and _is_taken(whole):
        raise NodePathError(
            f"{shown!r} is a Python number, which cannot be replaced; choose the tensor that "
            "it comes from",
            shown,
        )
    return Location("node", AtPath(whole.path), dig=dig, shown=shown)


_TAKEN = frozenset(
    {"tolist", *VALUES.values(), *SHAPES.values(), *dir(operator), *dir(builtins), *dir(math)}
)


def _is_taken(node: TreeNode) -> bool:
    """Return whether Python takes a number as soon as it exists."""
    base = re.sub(r"(_\d+)+$", "", node.label or node.name)
    return base in _TAKEN


def near_misses(text: str, paths: Sequence[str]) -> str:
    """Return a text that suggests names similar to one."""
    near = near_names(text, paths, 3)
    listed = near or list(paths[:8])
    word = "did you mean" if near else "there are"
    return f"{word} {', '.join(map(repr, listed))}" if listed else "there are no nodes at all"
