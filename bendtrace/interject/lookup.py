"""Resolves the names of insertions in the first run that can show them, while it is recorded.

No model runs for the sake of names alone: user code would act twice. The inserter reports each
node that the run reaches, and a name that may lead to it is looked up in a tree of the nodes so
far:

    a call begins    its node, its arguments, and the parameters and buffers of the module
    an op begins     its node
    either ends      the parts of its output

After the run, its complete tree decides. If a name means something else there, or nothing, the call
raises, and neither the meaning of a name nor a path is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError, NodePathError
from bendtrace.history.entries import layer_type_of
from bendtrace.history.names import Names, is_layer_name
from bendtrace.interject.insertion import Insertion, blaming
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.passes import Passes
from bendtrace.interject.plan import Entry, Location
from bendtrace.interject.resolver import name_of
from bendtrace.interject.where import AtPath, Target, targets_named, targets_of
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.naming import identifier
from bendtrace.paths.nodes import Kind, NodePath, Pass, Role, TreeNode
from bendtrace.paths.view import Tree
from bendtrace.recording.recorder import Recording
from bendtrace.tape.scalars import TRACED

__all__ = ["Lookup", "OneRun"]

Check = Callable[[Insertion, Target], None]
_PASS = re.compile(r"(.+):(\d+)", re.DOTALL)


class OneRun:
    """One run, as names are looked up in it.

    Args:
        known: the model.
        tree: the nodes of the run.
        names: the names in it.
    """

    def __init__(self, known: Knowledge, tree: Tree, names: Names) -> None:
        self.model: Callable[..., Any] = known.model
        self.hint: Callable[[str], str] = known.hint
        self._tree = tree
        self._names = names

    def trees(self) -> Iterable[Tree]:
        """Return the tree of the run."""
        return [self._tree]

    def names(self) -> Iterable[Names]:
        """Return the names in the run."""
        return [self._names]

    def mirror_path(self, name: str) -> str:
        """Return "": a node of a mirror belongs to another run."""
        return ""


@dataclass(eq=False)
class _Name:
    """A name that no run has shown so far.

    Attributes:
        insertion: the insertion at it.
        target: what the user gave.
        text: the name.
        stem: the name without a pass.
        chosen: the pass, counted from 0; None for all.
        words: the words of the stem, in order.
        layer: the type and the number of the layer that it may name; None for none.
        found: what it means, as far as the run has shown.
    """

    insertion: Insertion
    target: Target
    text: str
    stem: str
    chosen: tuple[int, ...] | None
    words: tuple[str, ...]
    layer: tuple[str, int] | None
    found: tuple[Target, ...] = ()


class Lookup:
    """The names that a run has to resolve.

    Args:
        known: the model.
        insertions: all insertions of the run, in order.
        check: raises for an interjection that is not possible at its location.
        is_met: raises if a pattern matches none of some nodes, and returns whether it does.

    Raises:
        InputError: a name can only be resolved after a run.
    """

    def __init__(
        self,
        known: Knowledge,
        insertions: Sequence[Insertion],
        check: Check,
        is_met: Callable[[Insertion, Sequence[Candidate]], bool],
    ) -> None:
        self._known = known
        self._check = check
        self._is_met = is_met
        self._order = {id(insertion): number for number, insertion in enumerate(insertions)}
        self._unchecked = [insertion for insertion in insertions if not insertion.is_checked]
        self._names = [
            _name_of(insertion, target, known)
            for insertion in insertions
            for target in insertion.targets
            if target.is_open
        ]
        self._of_type: Counter[str] = Counter()  # the layers so far
        self._ops: list[Candidate] = []  # of which the complete run shows what ran instead
        self._root = TreeNode("", "graph", "Graph", "call", path=NodePath())
        self._graphs: dict[str, TreeNode] = {"": self._root}

    def order(self, entry: Entry) -> int:
        """Return the position of an entry among the insertions."""
        return self._order[id(entry.insertion)]

    def may_be_below(self, path: str, names: frozenset[str]) -> bool:
        """Return whether a name may lead below a call, through one of some names."""
        words = _words(path)
        inner = [_words(name) for name in names]
        return any(
            _begins(name.words, words) and any(_begins(name.words[len(words) :], w) for w in inner)
            for name in self._names
        )

    # What the run reaches

    def call(
        self, path: str, relative: str, module: str, arguments: Mapping[str, Any],
        states: Iterable[str] = (),
    ) -> list[Entry]:  # fmt: skip
        """Look names up where a call begins; return what is inserted there.

        Args:
            path: its path.
            relative: the name of the module in the code around it.
            module: the qualified name of the module.
            arguments: its arguments, by the names of the inputs in the tree.
            states: the names of the parameters and buffers that it holds itself.
        """
        if not self._may_lead_to(path, relative):
            return []
        node = self._graph(path, relative, module)
        for name, value in arguments.items():
            self._value(node, name, name, value, "input")
        for name in states:
            self._add(node, identifier(name), name, "tensor", "state").key = name
        return self._resolve(path, relative)

    def op(self, node: Candidate) -> list[Entry]:
        """Look names up where an op begins; return what is inserted there."""
        self._ops.append(node)
        path, base = node.path, node.base
        kind = layer_type_of(node.function)
        self._of_type[kind] += 1
        layer = kind, self._of_type[kind]
        place = Location("node", AtPath(NodePath(path)), shown=path)
        made = [
            entry
            for name in self._names
            if name.layer == layer and not name.found
            for entry in self._found(name, (Target(name.text, place),))
        ]
        if not self._may_lead_to(path, base):
            return made
        outer, _, name = path.rpartition(".")
        parent = self._graph(outer)
        if name not in parent.children:
            self._add(parent, name, base, "tensor", "op")
        return made + self._resolve(path, base)

    def output(self, path: str, base: str, value: Any, *, is_call: bool) -> list[Entry]:
        """Look names up where a node ends; return what is inserted there.

        Args:
            path: its path.
            base: its name without a number.
            value: its output.
            is_call: whether it is a call of a module, or of the model.
        """
        if not self._may_lead_to(path, base):
            return []
        if is_call:
            self._value(self._graph(path), "output", "output", value, "output")
        else:
            outer, _, name = path.rpartition(".")
            self._value(self._graph(outer), name, base, value, "op")
        return self._resolve(path, base)

    def _may_lead_to(self, path: str, base: str) -> bool:
        return any(self._lead_to(path, base))

    def _lead_to(self, path: str, base: str) -> Iterable[_Name]:
        """Yield the names that are not resolved so far, and may be that of a node or in it."""
        outer = path.rpartition(".")[0]
        words, others = _words(path), _words(f"{outer}.{base}")
        for name in self._names:
            if not name.found and (_begins(name.words, words) or _begins(name.words, others)):
                yield name

    def _resolve(self, path: str, base: str) -> list[Entry]:
        made: list[Entry] = []
        tree = Tree(self._root)
        known = OneRun(self._known, tree, Names(tree, None))
        for name in self._lead_to(path, base):
            try:
                targets = targets_named(name.stem, known)
            except NodePathError:
                continue  # which the complete tree shows as well
            made += self._found(name, targets)
        return made

    def _found(self, name: _Name, targets: Sequence[Target]) -> list[Entry]:
        """Take what a name has turned out to mean; return what is inserted there."""
        for target in targets:
            self._check(name.insertion, target)
        if name.chosen is not None and targets:
            name.insertion.passes = Passes(name.chosen)
        name.found = tuple(Target(name.target.said, t.place, name.chosen) for t in targets)
        places = [target.place for target in targets if target.place is not None]
        return [Entry(name.insertion, name.insertion.what, place) for place in places]

    # The tree so far

    def _graph(self, path: str, relative: str = "", module: str = "") -> TreeNode:
        known = self._graphs.get(path)
        if known is None:
            outer, _, name = path.rpartition(".")
            known = self._add(self._graph(outer), name, relative or name, "graph", "call")
            self._graphs[path] = known
        if module:
            known.module, known.key = module, relative
        return known

    def _add(
        self, parent: TreeNode, name: str, label: str, kind: Kind, role: Role
    ) -> TreeNode:  # fmt: skip
        node = TreeNode(name, kind, "", role, path=parent.child_path(name), passes=[Pass(0)])
        node.label = label if label != name else ""
        parent.children[name] = node
        parent.spellings = None
        return node

    def _value(self, parent: TreeNode, name: str, label: str, value: Any, role: Role) -> None:
        items = _items_of(value)
        kind: Kind = "other" if items is None else "container"
        if isinstance(value, Tensor):
            kind, items = "tensor", None
        elif type(value) in TRACED or type(value) in (bool, int, float):
            kind = "number"
        node = self._add(parent, name, label, kind, role)
        for key, part, inner in items or ():
            self._value(node, identifier(part), part, inner, role)
            node.children[identifier(part)].key = key

    # After the run

    def settle(self, recording: Recording) -> None:
        """Have the complete run decide what the names mean.

        Raises:
            NodePathError: a name means nothing, several things, or something else than what was
                found while the run was recorded.
        """
        run = self._known.run(recording)
        known = OneRun(self._known, run.tree, run.naming)
        settled: dict[int, tuple[Insertion, list[Target]]] = {}
        for name in self._names:
            insertion, target = name.insertion, name.target
            with blaming(insertion, self._order[id(insertion)]):
                try:
                    targets = targets_of(target.said, known)
                except NodePathError:
                    if insertion.allow_none and not name.found:
                        continue
                    if not name.found or targets_named(name.text, known):
                        raise
                    targets = name.found  # another function ran instead of this one
            if _places(targets, name.chosen) != _places(name.found):
                listed = " and ".join(repr(t.place.shown) for t in targets if t.place is not None)
                raise NodePathError(
                    f"only a complete run shows that {name.text!r} means {listed}: nothing was "
                    "inserted there in this call. Write that, or call the model once before",
                    name.text,
                )
            _, chosen = settled.setdefault(id(insertion), (insertion, list(insertion.targets)))
            for number in [i for i, other in enumerate(chosen) if other is target]:
                chosen[number : number + 1] = targets  # unless another thread has been faster
        for insertion in self._unchecked:
            with blaming(insertion, self._order[id(insertion)]):
                self._is_met(insertion, [*run.nodes.candidates.values(), *self._ops])
        for insertion, chosen in settled.values():
            insertion.targets = tuple(chosen)
        for insertion in self._unchecked:
            insertion.is_checked = True

    def require_found(self) -> None:
        """Raise if a run of a method has not shown a name.

        Raises:
            NodePathError: it has not.
        """
        for name in self._names:
            if not name.found and not name.insertion.allow_none:
                raise NodePathError(f"this run has no node {name.text!r}", name.text)


def _name_of(insertion: Insertion, target: Target, known: Knowledge) -> _Name:
    text = name_of(target.said, known)
    assert text is not None
    named = _PASS.fullmatch(text)
    stem, chosen = text, None
    if named is not None:
        # A dot in front: of several calls of a module, a pass is one of a node.
        stem, chosen = f".{named[1].lstrip('.')}", (int(named[2]) - 1,)
    if ":" in stem:
        raise InputError(
            f"{text!r} names a pass of a call around the node, which only a complete run shows: "
            "call the model once before"
        )
    is_layer = is_layer_name(text) and not isinstance(text, NodePath)
    kind, *numbers = re.split("[_:]", text) if is_layer else ("",)
    layer = (kind, int(numbers[0])) if is_layer else None
    return _Name(insertion, target, text, stem, chosen, _words(stem), layer)


def _places(
    targets: Iterable[Target], chosen: tuple[int, ...] | None = None
) -> set[tuple[Any, Any]]:  # fmt: skip
    # A layer with one pass is the same as its first pass.
    return {(target.place, target.passes or chosen) for target in targets}


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a name or path, which are the same however it is spelled."""
    return tuple(word for word in re.findall(r"[^\W_]+", text) if word != "sub")


def _begins(words: tuple[str, ...], start: tuple[str, ...]) -> bool:
    return words[: len(start)] == start


def _items_of(value: Any) -> list[tuple[str | int, str, Any]] | None:
    """Return the key, the preferred name and the value of each item of a container, or None."""
    if isinstance(value, dict):
        return [(key if isinstance(key, (str, int)) else repr(key), str(key), value[key])
                for key in value]  # fmt: skip
    if not isinstance(value, (tuple, list)):
        return None
    fields = getattr(value, "_fields", None)
    if fields is None and hasattr(value, "n_sequence_fields"):
        fields = getattr(value, "__match_args__", ())
    names = list(fields or ())
    return [(i, names[i] if i < len(names) else f"sub_{i}", item) for i, item in enumerate(value)]
