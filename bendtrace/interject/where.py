"""Where an insertion is: everything that can be said, and the places that it comes to."""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import nn

from bendtrace._lazy import LazyModule
from bendtrace.environment.owners import module_of, modules_in
from bendtrace.errors import InputError, NodePathError
from bendtrace.history.names import Names, near_names
from bendtrace.interject.plan import Place, State
from bendtrace.interject.resolver import meant_by, name_of
from bendtrace.paths.candidates import Candidate, CandidateGraph, NodeSelector
from bendtrace.paths.naming import dotted
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Node, Tree, dug, find
from bendtrace.torch_rules.functions import SHAPES, VALUES

if TYPE_CHECKING:
    from bendtrace.interject.selectors import naming
else:
    naming = LazyModule("bendtrace.interject.selectors.naming")

__all__ = ["AtPath", "AtPaths", "Known", "OfModule", "Said", "Want", "near_misses", "wants_of"]


@dataclass(frozen=True)
class AtPath:
    """The node of a path."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    path: str

    def matches(self, node: Candidate) -> bool:
        """Whether it is the node."""
        return node.path == self.path


@dataclass(frozen=True)
class AtPaths:
    """The nodes of some paths."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    paths: frozenset[str]

    def matches(self, node: Candidate) -> bool:
        """Whether it is one of the nodes."""
        return node.path in self.paths


@dataclass(frozen=True, eq=False)
class OfModule:
    """The calls of one module."""

    is_broad: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    module: nn.Module

    def matches(self, node: Candidate) -> bool:
        """Whether it is a call of the module."""
        return node.module is self.module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfModule) and other.module is self.module

    def __hash__(self) -> int:
        return id(self.module)


@dataclass(frozen=True)
class Selected:
    """What a selector means.

    Attributes:
        selector: the selector.
        is_broad: whether it can mean anything: a selector, or a function of a node.
    """

    selector: NodeSelector
    is_broad: bool

    @property
    def needs_output(self) -> bool:
        """Whether the output has to be known to tell."""
        return self.selector.needs_output

    def matches(self, node: Candidate) -> bool:
        """Whether the selector means the node."""
        return self.selector.matches(node)

    def __repr__(self) -> str:
        return repr(self.selector)


class Known(Protocol):
    """What is known of a model."""

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""

    def trees(self) -> Iterable[Tree]:
        """The trees of the runs without insertions, the one looked at most first."""

    def names(self) -> Iterable[Names]:
        """The names of the same runs."""

    def mirror_path(self, name: str) -> str:
        """Return the path of the node of the latest mirror that has a name; "" if none has."""

    def hint(self, name: str) -> str:
        """Say under which branch that was not taken something of a name may be."""


class Said(str):
    """What a copy of a model has instead of what was said of where an insertion is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Want:
    """One thing that was said of where an insertion is.

    Attributes:
        said: as it was said.
        place: where that is, if it can be told without a run.
        passes: which passes it names, counted from 0; None for all.
    """

    said: Any
    place: Place | None = None
    passes: tuple[int, ...] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a run without insertions has to tell, each time."""
        return isinstance(self.said, NodeSelector) and self.said.looks_ahead

    @property
    def is_open(self) -> bool:
        """Whether it has to be looked for in the first run."""
        return self.place is None and not self.is_ahead

    def said_in_words(self) -> Want:
        """Return the same, without nodes of trees, which belong to one model."""
        return replace(self, said=self.said._path) if isinstance(self.said, Node) else self

    def ahead(self, graph: CandidateGraph) -> Place:
        """Return where a selector is in a run."""
        return Place("node", AtPaths(frozenset(self.said.select(graph))))


def wants_of(where: Any, known: Known, *, lenient: bool = False) -> tuple[Want, ...]:
    """Read what was said.

    Args:
        where: as it was said.
        known: what is known of the model.
        lenient: whether a name that there is nothing by may come up later.

    Raises:
        InputError: it is nothing that can say where something is.
        NodePathError: there is nothing by a name.
    """
    if isinstance(where, (list, tuple, set, frozenset)):
        if not where:
            raise InputError("where= is empty: say at which nodes")
        return tuple(want for item in where for want in wants_of(item, known, lenient=lenient))
    try:
        return _wants(where, known)
    except NodePathError:
        if not lenient:
            raise
        return (Want(where),)


def _wants(where: Any, known: Known) -> tuple[Want, ...]:
    if isinstance(where, Node):
        _require_own(where, known)
    name = name_of(where, known)
    if name is not None:
        return _named(name, known, where)
    if isinstance(where, State):
        return (Want(where, Place("state", where, shown=where.name)),)
    if isinstance(where, nn.Module):
        owner = module_of(known.model)
        if owner is not None and all(where is not module for module in owner.modules()):
            raise InputError(
                f"the module {type(where).__name__} is not one of the model's: give one of its "
                "own submodules, a path or a class"
            )
        return (Want(where, Place("node", OfModule(where))),)
    if isinstance(where, NodeSelector) and where.looks_ahead:
        return (Want(where),)
    if isinstance(where, type) and not issubclass(where, nn.Module):
        raise InputError(f"of classes only those of modules can be given, not {where!r}")
    if not (isinstance(where, re.Pattern) or callable(where) or isinstance(where, NodeSelector)):
        raise InputError(
            "where= takes a node path, a node, a regular expression, a module, a class of modules, "
            "a selector, a torch function, a function of a node, a node of a mirror or an entry of "
            f"a log, or several of these; not {where!r}"
        )
    is_broad = not isinstance(where, (re.Pattern, type))
    return (Want(where, Place("node", Selected(naming.as_selector(where), is_broad))),)


def _require_own(node: Node, known: Known) -> None:
    """Refuse a node of a tree if what has its path in this model is something else.

    Raises:
        InputError: it is.
    """
    data, model = node._data, module_of(known.model)
    if data.kind == "graph" and data.module and model is not None:
        module = modules_in(model).get(data.module)
        if module is not None and type(module).__name__ != data.class_name:
            raise InputError(
                f"{data.path!r} is a {data.class_name} in the run that this node is of, and a "
                f"{type(module).__name__} in this model: give a path, or a node of its own trees"
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
            f"{data.path!r} is at {_said(data)} in the run that this node is of, and at "
            f"{_said(others[0])} in this model: give a path, or a node of its own trees"
        )


def _where(node: TreeNode) -> tuple[Any, ...]:
    place = node.places[0]
    return place.file, place.function, place.line, place.text


def _said(node: TreeNode) -> str:
    place = node.places[0]
    return f"{os.path.basename(place.file)}:{place.line} `{place.text}`"


def _named(text: str, known: Known, said: Any) -> tuple[Want, ...]:
    """Find what a string names.

    The qualified name of a module means all its calls, that of a parameter all its uses; other
    names mean what happens at one place in the source, or at those that a layer has.
    """
    meant = meant_by(text, known)
    if meant is not None and meant.is_whole_state:
        return (Want(said, Place("state", State(meant.name), shown=meant.name)),)
    if meant is not None and meant.module is not None:
        return (Want(said, Place("node", OfModule(meant.module))),)
    if meant is not None and not meant.places:
        raise NodePathError(
            f"{text!r} is a layer that no node of the tree gives: nothing can be inserted there; "
            "take a node that uses it",
            text,
        )
    if meant is not None:
        return tuple(
            Want(
                said, _place(root, node),
                None if chosen is None or node.role == "state" else tuple(chosen),
            )
            for root, node, chosen in meant.places
        )  # fmt: skip
    errors: list[NodePathError] = []
    for tree in known.trees():
        try:
            find(tree.data, text)
        except NodePathError as error:
            errors.append(error)
    if not errors:  # the first run is looked at before it does anything
        return (Want(said),)
    path = known.mirror_path(text)
    near = near_names(text, (name for names in known.names() for name in names.listed()))
    at_root = all("." not in path for error in errors for path in error.completions)
    if near and at_root and not path and not any("did you mean" in str(error) for error in errors):
        said = ", ".join(map(repr, near))
        raise NodePathError(
            f"no node {text!r}: the root has no {text!r}; near to it: {said}", text, tuple(near)
        )
    hint = f"the mirror has a node {text!r}: give {path!r}, or NodeRef({text!r})" if path else ""
    raise _astray(errors, hint or known.hint(text))


def _astray(errors: Sequence[NodePathError], hint: str) -> NodePathError:
    """Make one error of those of all runs: where the path got furthest, and what else is there."""
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
    """Say how far a path got, and how much what is there looks like what was wanted."""
    said = re.split(r"[.|:]", error.path)
    names = [path.split(".") for path in error.completions]
    alike = [
        SequenceMatcher(None, name[-1], said[len(name) - 1]).ratio()
        for name in names
        if len(name) <= len(said)
    ]
    return max(map(len, names), default=0), max(alike, default=0.0)


def _place(root: TreeNode, node: TreeNode) -> Place:
    """Return the place that a node of a tree is."""
    shown = dug(root, node)
    if node.role == "call":
        return Place("node", AtPath(node.path), shown=shown)
    chain = [root]
    for name in node.path.split("."):
        chain.append(chain[-1].children[name])
    graph = max(i for i, item in enumerate(chain) if item.kind == "graph")
    holder, whole = chain[graph], chain[graph + 1]
    dig = tuple(item.key if item.key is not None else item.name for item in chain[graph + 2 :])
    if whole.role == "output":
        return Place("node", AtPath(holder.path), dig=dig, shown=shown)
    if whole.role == "input":
        return Place("input", AtPath(holder.path), whole.name, dig, shown)
    if whole.role == "state":
        key = str(whole.key)
        name = f"{holder.module}.{key}" if holder.module else key
        return Place("state", State(dotted(name), holder.path), shown=shown)
    if whole.kind == "number" and _is_taken(whole):
        raise NodePathError(
            f"{shown!r} is a number that Python computes with: nobody can exchange it; take the "
            "tensor that it comes from",
            shown,
        )
    return Place("node", AtPath(whole.path), dig=dig, shown=shown)


_TAKEN = frozenset(
    {"tolist", *VALUES.values(), *SHAPES.values(), *dir(operator), *dir(builtins), *dir(math)}
)


def _is_taken(node: TreeNode) -> bool:
    """Whether Python takes a number as soon as it is there."""
    base = re.sub(r"(_\d+)+$", "", node.label or node.name)
    return base in _TAKEN


def near_misses(text: str, paths: Sequence[str]) -> str:
    """Say what there is that looks like a name."""
    near = near_names(text, paths, 3)
    listed = near or list(paths[:8])
    word = "did you mean" if near else "there are"
    return f"{word} {', '.join(map(repr, listed))}" if listed else "there are no nodes at all"
