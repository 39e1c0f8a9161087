"""Resolves the names of things in a model, in the same way for every entry point, or raises."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from bendtrace.errors import InputError, NameOrderWarning, NodePathError
from bendtrace.insert.leaves import LeafShape, describe, shape_at, take_apart
from bendtrace.insert.plan import StateTensor
from bendtrace.log.entries import LayerEntry, ModuleEntry
from bendtrace.log.nodes import Chosen, Registry, TreeNode, children_of, identifier, parameters_of
from bendtrace.log.nodes import describe_node as describe_node
from bendtrace.log.path_views import (
    Candidate,
    Node,
    NodePath,
    NodeSelector,
    RunNodes,
    Tree,
    find_node,
    is_path_only,
    plain_path,
)
from bendtrace.log.run import Meaning, Run, RunNames, ambiguity
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import place_text, users_level
from bendtrace.record.op_names import NodeRef
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import ModuleCall, Op
from bendtrace.watch.functions import is_gate
from bendtrace.watch.owners import module_of, modules_in, states_of

if TYPE_CHECKING:
    from bendtrace.insert import selector_naming as naming
    from bendtrace.insert import selector_source as source
    from bendtrace.show.outline import Coverage
else:
    source = LazyModule("bendtrace.insert.selector_source")
    naming = LazyModule("bendtrace.insert.selector_naming")


class NamedRuns(Protocol):
    """The runs of a model that names are looked up in."""

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""

    def names(self) -> Iterable[RunNames]:
        """The names in the runs, those without insertions first."""

    def mirror_path(self, name: str) -> str:
        """Return the path of the node of the latest mirror that has a name; "" if there is none."""


def node_name_of(where: Any, knowledge: NamedRuns) -> str | None:
    """Return the name for a node of a tree or mirror, or an entry of a log; None if it is neither.

    Raises:
        NodePathError: no mirror contains the node.
        InputError: the entry has no node.
    """
    if isinstance(where, Node):
        return where._path
    if isinstance(where, str):
        return where
    if isinstance(where, NodeRef):
        path = knowledge.mirror_path(where.name)
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
class Resolution:
    """The result of resolving a string."""

    kind: Literal["state", "module", "node", "layer"]  # the kind of object
    name: str = ""  # for modules and states, the qualified name
    module: nn.Module | None = None  # for modules, the module
    # Nodes of runs: the root of the tree, the node, and its passes; None for all.
    places: tuple[tuple[TreeNode, TreeNode, Chosen], ...] = ()
    is_owned: bool = False  # whether it is one of the model's own modules, parameters or buffers

    @property
    def is_whole_state(self) -> bool:
        """Return whether it is a parameter or buffer, in all its uses."""
        return self.is_owned and self.kind == "state"

    def paths(self) -> list[str]:
        """Return the paths of the nodes, each with its pass if it is one of several."""
        found = []
        for _, node, chosen in self.places:
            one = chosen is not None and len(chosen) == 1
            found.append(f"{node.path}:{chosen[0] + 1}" if one and chosen else node.path)
        return list(dict.fromkeys(found))


def resolve_meaning(text: str, knowledge: NamedRuns) -> Resolution | None:
    """Resolve a string in a model; return None if nothing known has this name.

    Raise `NodePathError` if the string matches several things.
    """
    found: list[tuple[RunNames, Meaning]] = []
    for names in knowledge.names():
        meanings = names.meanings(text)
        if len(meanings) > 1:
            raise _path_error(text, [(names, meaning) for meaning in meanings])
        found += [(names, meaning) for meaning in meanings]
    owned = None if is_path_only(text) else _own_part(text, knowledge)
    if owned is not None:
        if any(meaning.is_owned for _, meaning in found):
            found = [row for row in found if row[1].kind == "layer" or _is_of(owned, *row)]
        others = [row for row in found if not _is_of(owned, *row)]
        if others:
            mine = Meaning(owned.kind, text, (), frozenset(), owned.name)
            raise _path_error(text, [(others[0][0], mine), others[0]], owned)
        return replace(owned, places=tuple(_meaning_places(found)))
    if any(meaning.is_exact for _, meaning in found):
        # Another run may have a node for which the path is an alias, as `fc` for `fc_1`.
        found = [row for row in found if not row[1].is_alias]
    by_paths: dict[Any, tuple[RunNames, Meaning]] = {}
    for names, meaning in found:
        by_paths.setdefault("alias" if meaning.is_alias else meaning.paths, (names, meaning))
    chosen = list(by_paths.values())
    if len(chosen) > 1:
        raise _path_error(text, chosen)
    if not isinstance(text, NodePath):
        for _, meaning in chosen:
            if meaning.kind == "node":
                _require_same_node(
                    text, meaning.places[0][0], [names.tree for names in knowledge.names()]
                )
    return (
        Resolution(chosen[0][1].kind, text, None, tuple(_meaning_places(chosen)))
        if chosen
        else None
    )


def _require_same_node(text: str, node: TreeNode, trees: Sequence[Tree]) -> None:
    """Raise for a name that another known run would give to another node, and warn of others.

    Nodes of one name are numbered in the order in which runs reach them. A name may therefore
    depend on which of several paths came first. Raise `NodePathError` if another known run would
    give the name to another node.
    """
    name, otherwise = node.path.rpartition(".")[2], ""
    parents = list(_parents(node, trees))
    for parent in parents:
        counts: Counter[str] = Counter()
        for child in parent.children.values():
            base = identifier(child.label or child.name)
            own = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
            if own == name and child.name != name:
                raise NodePathError(
                    f"{text!r} depends on which path came first: it is "
                    f"{_node_place_text(node)}, but would "
                    f"be {_node_place_text(child)} if another known run had come before. {_STABLE}",
                    text,
                    (node.path, child.path),
                )
            if child.name == name != own and text.endswith(name):
                otherwise = f"would be called {own!r} if another known run had come before"
    for tree in trees:
        tree.place_steps()
    if not otherwise and (step := source.branch_before(node, parents)) is not None:
        otherwise = (
            "another node might have this name if a run had taken the other side of "
            f"`{step.text}` at {place_text(step.file, step.line)} before"
        )
    if otherwise:
        place = _node_place_text(node)
        text = f"{text!r} depends on which path came first: it is {place}, but {otherwise}."
        warnings.warn(NameOrderWarning(f"{text} {_STABLE}"), stacklevel=users_level())


_STABLE = "Pass the node of a tree (`bended.trace(...).tree`), or node_selector.at_line(...)"


def _parents(node: TreeNode, trees: Iterable[Tree]) -> Iterator[TreeNode]:
    """Yield the graph around a node in each run that has reached this graph."""
    outer = node.path.rpartition(".")[0]
    for tree in trees:
        parent: TreeNode | None = tree.data
        for part in outer.split(".") if outer else ():
            parent = None if parent is None else parent.children.get(part)
        if parent is not None:
            yield parent


def _node_place_text(node: TreeNode) -> str:
    if not node.places:
        return f"{node.path!r}"
    place = node.places[0]
    return f"`{place.text}` at {place_text(place.file, place.line)}"


def _own_part(text: str, knowledge: NamedRuns) -> Resolution | None:
    """Return the parameter, buffer or module with a name, which can have underscores for dots."""
    if not text:
        return None
    if text in dict(states_of(knowledge.model)):
        return Resolution("state", text, is_owned=True)
    modules = modules_in(knowledge.model)
    named = [text] if text in modules else [n for n in modules if n.replace(".", "_") == text]
    if len(named) != 1:
        return None
    return Resolution("module", named[0], modules[named[0]], is_owned=True)


def _is_of(owned: Resolution, names: RunNames, meaning: Meaning) -> bool:
    """Return whether the meaning of a string in a run is the module or state that it names."""
    if meaning.kind == owned.kind:
        return True
    if owned.kind == "state":
        return all(node.role == "state" for node, _ in meaning.places)
    calls = (mine for mine in names.meanings(owned.name) if mine.kind == owned.kind)
    return any(mine.covers(meaning) for mine in calls)


def _meaning_places(
    found: Iterable[tuple[RunNames, Meaning]],
) -> Iterator[tuple[TreeNode, TreeNode, Chosen]]:
    seen = set()
    for names, meaning in found:
        for node, chosen in meaning.places:
            if node.path not in seen:
                seen.add(node.path)
                yield names.tree.data, node, chosen


def _path_error(
    text: str, meanings: list[tuple[RunNames, Meaning]], owned: Resolution | None = None
) -> NodePathError:
    message, clear = ambiguity(text, meanings)
    if owned is not None and owned.module is not None:  # which no run has called
        message += ", or give the module itself"
    return NodePathError(message, text, clear)


def text_of_place(where: Any) -> str:
    """Return the path for a key: a path or a node.

    Raise `InputError` if it is neither a path nor a node.
    """
    if isinstance(where, Node):
        return where._path
    if not isinstance(where, str):
        raise InputError(f"activations have to be given by node path, not by {where!r}")
    return where


def by_path(model: Any, activations: Mapping[Any, Any]) -> dict[str, Any]:
    """Return given activations, by path or node, by the paths of their nodes.

    Raise `InputError` if a key is not a path, selects something whose value cannot be given, or is
    ambiguous, or two keys select the same value.
    """
    found: dict[str, Any] = {}
    values: list[tuple[str, _Value]] = []
    for where, value in activations.items():
        label, path = describe_where(where), _selected_path(model, where)
        if path in found:
            raise InputError(f"{label} is given twice, as a path and as a node or by another name")
        found[path] = value
        node = node_of_name(model, path)
        if node is None:
            stem, _, part = path.rpartition(".")
            module = modules_in(model._knowledge.model).get(stem) if stem else None
            if module is not None and part in ("input", *dict(parameters_of(module))):
                raise InputError(_INPUT.format(label))
            continue
        node_value = _Value.of(node)
        if node_value.role == "state":
            raise InputError(_STATE.format(label))
        if node_value.role == "input" and node_value.scope:
            raise InputError(_INPUT.format(label))
        for other, before in values:
            if node_value.overlaps(before):
                raise InputError(
                    f"{other} and {label} select the same value, or overlapping parts of it"
                )
        values.append((label, node_value))
    return found


def _selected_path(model: Any, where: Any) -> str:
    """Return the path of the one selected node; a name is returned as it is if no run has it yet.

    Raise `InputError` if it is not the value of one node.
    """
    knowledge, label = model._knowledge, describe_where(where)
    try:
        text = node_name_of(where, knowledge)
        if isinstance(text, NodePath):
            return text
        if text is None:
            if not (isinstance(where, (NodeSelector, re.Pattern)) or callable(where)):
                raise InputError(f"activations have to be given by node path, not by {where!r}")
            paths = knowledge.select(where)
            if not paths:
                raise InputError(f"{label} selects no known node")
        elif (resolution := resolve_meaning(text, knowledge)) is None:
            return text
        elif resolution.is_whole_state:
            raise InputError(_STATE.format(label))
        else:
            paths = resolution.paths()
            if text in paths:  # of the calls of a module, the one with this name in the tree
                return NodePath(text)
    except NodePathError as error:
        raise InputError(str(error)) from None
    if len(paths) > 1:
        listed = " and ".join(map(repr, paths))
        raise InputError(f"{label} is ambiguous: it matches {listed}. Write one of these")
    return NodePath(paths[0]) if paths else str(text)


def node_of_name(model: Any, text: str) -> Node | None:
    """Return the node with a path in a run that has reached it, if any.

    In some run, another node may answer to the path: the call `fc_1` of a module to `fc`. That node
    is returned if no run has a node with exactly this path.
    """
    other = None
    for tree in model._knowledge.trees():
        try:
            node: Node = tree.resolve(path_in(tree, text), leaf=False)
        except NodePathError:
            continue
        if is_named(node._data, text):
            return node
        other = other or node
    return other


class _Value(NamedTuple):
    """The value of a node: a result, or a part of one."""

    path: str  # the node of the function, or of the module call
    keys: tuple[str, ...]  # the keys that lead to the part
    passes: frozenset[int] | None  # the selected passes; None for all
    scope: str  # path of the enclosing call, "" for the call of the model
    role: str  # the role of the whole value there

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
    if isinstance(where, StateTensor):
        return repr(where.name)
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


# Cut points: from a node path to the positions on a tape that define its value.


@dataclass(frozen=True)
class ReplacementPoint:
    """A position on a tape from which a given value, or a part of it, replaces a recorded one."""

    index: int  # the op whose value it replaces
    start: int  # the first position at which it applies
    call: ModuleCall | None  # the module call that outputs it; None if it is the op
    keys: tuple[Any, ...]  # its position inside the value of the node
    node: TreeNode  # the part of the node


def path_in(tree: Tree, text: str) -> str:
    """Return the path that a tree uses for a node that has a given path in another run.

    Raise `NodePathError` if the tree has no such node.
    """
    try:
        find_node(tree.data, text)
    except NodePathError:
        around, _, last = text.rpartition(".")
        if last == "output":  # which has another name if it has another type
            return path_in(tree, around) if around else ""
        raise
    return text


def is_named(node: TreeNode, text: str) -> bool:
    """Return whether a text is the path of a node itself, not one of its other names."""
    return plain_path(node.path) in (plain_path(text), plain_path(text).removesuffix(".output"))


def spots_of(
    recording: Recording, tree: Tree, text: str, *, bended: bool
) -> tuple[ReplacementPoint, ...]:
    """Return where on the tape of a run the value of a node is defined, by its path.

    With `bended`, it is the value after the insertions at the node.

    Raises:
        NodePathError: the run has no such node.
        InputError: the value of the node cannot be given.
    """
    node, chosen = find_node(tree.data, path_in(tree, text))
    passes = list(range(len(node.passes))) if chosen is None else list(chosen)
    if len(passes) != 1:
        raise InputError(
            f"{text!r} has {len(passes)} passes in this run: name one, as in '{node.path}:1'"
        )
    if not _has_values(node, passes[0]):
        raise InputError(f"{text!r} has no value in this run")
    return tuple(_Spots(recording, tree, bended).of(node, passes[0], text))


def _has_values(node: TreeNode, number: int) -> bool:
    """Return whether a pass of a node has a value of the run."""
    if node.kind == "graph":
        return any(
            _has_values(child, inner)
            for child, passes in children_of(node, [number])
            for inner in passes or ()
            if child.role == "output"
        )
    if node.kind == "container":
        return any(
            _has_values(child, inner)
            for child, passes in children_of(node, [number])
            for inner in passes or ()
        )
    return node.passes[number].index is not None


class _Spots:
    def __init__(self, recording: Recording, tree: Tree, bended: bool) -> None:
        self._recording = recording
        self._tree = tree
        self._tape = recording.tape
        self._bended = bended

    def of(self, node: TreeNode, number: int, text: str) -> Iterator[ReplacementPoint]:
        if node.role == "state":
            raise InputError(
                f"{text!r} is a parameter or buffer, not an activation: bend or patch it"
            )
        if node.role == "call":
            output = next(c for c, _ in children_of(node, [number]) if c.role == "output")
            within = next(i for i, made in enumerate(output.passes) if made.parent == number)
            yield from self._of_call(node, number, output, within, ())
            return
        chain, keys = self._outwards(node, number)
        holder, number_of_holder = chain[-1]
        if node.role == "output":
            yield from self._of_call(holder, number_of_holder, node, number, keys)
        elif node.role == "input":
            if holder is not self._tree.data:
                raise InputError(
                    f"{text!r} is the input of a module: give the value of the node that "
                    "computes it"
                )
            for index, _, inner, below in self._leaves(node, number):
                yield ReplacementPoint(index, index + 1, None, below, inner)
        else:
            whole, number_of_whole = chain[-2]
            yield from self._of_op(node, number, keys, self._gate(whole.path, number_of_whole))

    def _of_op(
        self, node: TreeNode, number: int, keys: tuple[Any, ...], gate: Op | None
    ) -> Iterator[ReplacementPoint]:
        """Yield the spots of a function's result, or of a part of it."""
        made = node.passes[number]
        assert made.index is not None
        index = self._op_of(made.index, made.element)
        if index is None:  # a part of a result that nothing has used
            return
        yield from self._at(index, index + 1, None, (), keys, node, gate)

    def _of_call(
        self, holder: TreeNode, number: int, node: TreeNode, within: int, keys: tuple[Any, ...]
    ) -> Iterator[ReplacementPoint]:
        """Yield the spots of a call's output, or of a part of it."""
        made = holder.passes[number].index
        call = self._recording.root if made is None else self._tape.calls[made]
        stop = len(self._tape.ops) if made is None or holder is self._tree.data else call.stop
        gate = self._gate(holder.path, number)
        for index, _, inner, below in self._leaves(node, within):
            yield from self._at(
                index, max(stop, index + 1), call, below, (*keys, *below), inner, gate
            )

    def _at(
        self,
        index: int,
        start: int,
        call: ModuleCall | None,
        below: tuple[Any, ...],
        keys: tuple[Any, ...],
        node: TreeNode,
        gate: Op | None,
    ) -> Iterator[ReplacementPoint]:
        if gate is None:
            yield ReplacementPoint(index, start, call, below, node)
            return
        # Users of the value after the insertions there read it from the gate; unless the insertions
        # changed nothing, as for parts of containers, which then keep their own name.
        after = gate.index + 1
        yield ReplacementPoint(index, max(after, index + 1), call, below, node)
        found = shape_at(gate.target.shape, keys)
        leaf = found if type(found) is LeafShape else None
        if leaf is None or leaf.number not in gate.target.exchanged:
            return
        element = (gate.target.exchanged.index(leaf.number),)
        given = self._op_of(gate.index, element if len(gate.target.exchanged) > 1 else ())
        if given is not None:
            yield ReplacementPoint(given, given + 1, call, below, node)

    def _leaves(
        self, node: TreeNode, number: int, keys: tuple[Any, ...] = ()
    ) -> Iterator[tuple[int, int, TreeNode, tuple[Any, ...]]]:
        """Yield op, pass, node and keys of each value in a pass of a node."""
        if node.kind == "container":
            for child, passes in children_of(node, [number]):
                for inner in passes or ():
                    yield from self._leaves(child, inner, (*keys, child.key))
            return
        made = node.passes[number]
        if made.index is not None:
            index = self._op_of(made.index, made.element)
            if index is not None:
                yield index, number, node, keys

    def _op_of(self, index: int, element: tuple[Any, ...]) -> int | None:
        """Return the op under whose name a part of a result is used; None if there is none."""
        if not element:
            return index
        return next(
            (other for other, at in self._tree._elements.items() if at == (index, element)), None
        )

    def _outwards(
        self, node: TreeNode, number: int
    ) -> tuple[list[tuple[TreeNode, int]], tuple[Any, ...]]:
        """Return a value, the containers around it and the graph, each with its pass; and keys.

        The keys lead from the outermost container to the value.
        """
        line = [self._tree.data]
        for name in node.path.split("."):
            line.append(line[-1].children[name])
        chain, keys = [(node, number)], []
        for outer in reversed(line[:-1]):
            inner, number = chain[-1]
            chain.append((outer, inner.passes[number].parent))
            if outer.kind == "graph":
                break
            keys.append(inner.key)
        return chain, tuple(reversed(keys))

    def _gate(self, path: str, number: int) -> Op | None:
        """Return the op of the gate after a pass of a node, if it counts."""
        if not self._bended:
            return None
        for op in self._tape.ops:
            if (
                is_gate(op)
                and op.target.role == "after"
                and (op.target.at.path, op.target.at.number) == (path, number)
            ):
                return op
        return None


def values_for(text: str, value: Any, spots: tuple[ReplacementPoint, ...]) -> list[Any]:
    """Return what a given value defines at each of the spots of a node.

    Raise `InputError` if its structure differs from the structure of the node's value.
    """
    found = [_part_of_value(text, value, spot) for spot in spots]
    tensors = [item for item in take_apart(value)[1] if isinstance(item, Tensor)]
    wanted = {spot.keys for spot in spots}
    if wanted and len(tensors) > len(wanted) and () not in wanted:
        raise InputError(
            f"{text!r} returned {len(wanted)} values in this run, and {describe(value)} "
            f"contains {len(tensors)} tensors"
        )
    return found


def _part_of_value(text: str, value: Any, spot: ReplacementPoint) -> Any:
    whole = value
    for key in spot.keys:
        value = _item_at_key(value, key)
    kind = spot.node.kind
    is_right = isinstance(value, Tensor)
    if kind == "number":
        is_right = type(value) in (bool, int, float) and type(value).__name__ == spot.node.type
    elif kind == "container":
        is_right = isinstance(value, (tuple, list, dict)) and len(value) == len(spot.node.children)
    if not is_right:
        where = "".join(f"[{key!r}]" for key in spot.keys)
        raise InputError(
            f"the value given for {text!r} needs the structure of the node's own value: "
            f"{'there ' if where else ''}{where + ' ' if where else ''}is a "
            f"{describe_node(spot.node)}, but {describe(whole)} was given"
        )
    return value


_MISSING = object()


def _item_at_key(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        found = {k if isinstance(k, (str, int)) else repr(k): item for k, item in value.items()}
        return found.get(key, _MISSING)
    if isinstance(value, (tuple, list)) and isinstance(key, int):
        return value[key] if key < len(value) else _MISSING
    return getattr(value, str(key), _MISSING)


# The recorded runs of a model, as a base for looking up insertions.


class Knowledge:
    """The runs of one model, as insertions query them.

    `runs` returns those without insertions, the latest first, `inserted` those with them.
    `coverage` lists the branches with a side that was not seen. `predict` returns the run without
    insertions that the inputs will repeat, if that is certain.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        registry: Registry,
        runs: Callable[[], list[Recording]],
        inserted: Callable[[], list[Recording]],
        coverage: Callable[[], Coverage],
        predict: Callable[[tuple[Any, ...], dict[str, Any]], Recording | None],
    ) -> None:
        self.model = model
        self.registry = registry
        self.examples: list[Tree] = []
        self._runs = runs
        self._inserted = inserted
        self._coverage = coverage
        self._predict = predict
        self._of_examples: dict[int, RunNames] = {}  # which are kept, as the examples are
        self._views: dict[int, Run] = {}  # by the identity of their recordings

    def trees(self) -> Iterator[Tree]:
        """Yield the trees of the runs, those without insertions first."""
        self.name_nodes()
        yield from self.examples
        for recording in self.recordings():
            yield self._run(recording).tree

    def names(self) -> Iterator[RunNames]:
        """Yield the names in the runs, those without insertions first.

        Layers are counted in runs without insertions, if there are any.
        """
        self.name_nodes()
        for example in self.examples:
            yield self._of_examples.setdefault(id(example), RunNames(example, None))
        plain = self._runs()
        for recording in self.recordings():
            run = self._run(recording)
            is_plain = not plain or any(recording is other for other in plain)
            yield run.naming if is_plain else run.naming_without_log

    def name_nodes(self) -> None:
        """Name the nodes of all runs in the order in which these were recorded."""
        for recording in reversed(self._runs()):
            _ = self._run(recording).tree

    def recordings(self) -> list[Recording]:
        """Return all known runs."""
        return [*self._runs(), *self._inserted()]

    def candidates(self) -> list[Candidate] | None:
        """Return the nodes of all runs without insertions; None if there were none."""
        runs = self._runs()
        if not runs:
            return None
        self.name_nodes()
        found: dict[str, Candidate] = {}
        for recording in runs:
            for node in self._run(recording).candidates:
                found.setdefault(node.path, node)
        return list(found.values())

    def select(self, what: Any) -> list[str]:
        """Return the paths of the nodes that a selector, or a value that converts to one, selects.

        Raise `InputError` if nothing has been traced yet.
        """
        runs = self._runs()
        if not runs:
            raise InputError(
                f"nothing has been traced yet, so the nodes of {what!r} are unknown: call the "
                "module, or its trace(), first"
            )
        found: dict[str, None] = {}
        for recording in runs:
            nodes = naming.find_nodes(what, self.run(recording).candidates)
            found.update(dict.fromkeys(node.path for node in nodes))
        return list(found)

    def modules(self) -> list[Candidate]:
        """Return the modules as nodes, including those that no run has reached."""
        owner = module_of(self.model)
        if owner is None:
            return []
        modules = modules_in(owner)
        if owner is not self.model:
            del modules[""]  # no call of it is a node
        found = []
        for name, module in modules.items():
            scope, _, base = name.rpartition(".")
            path = ".".join(map(identifier, name.split("."))) if name else ""
            found.append(
                Candidate(
                    path, identifier(base) if base else "", module, name, None,
                    modules.get(scope) if name else None, scope,
                )
            )  # fmt: skip
        return found

    def paths_of(self, module: nn.Module) -> list[str]:
        """Return the known paths of the calls of a module."""
        names = {node.module_path for node in self.modules() if node.module is module}
        found = [
            node.path
            for tree in self.trees()
            for node in tree.data.walk()
            if node.role == "call" and node.module in names and node.path
        ]
        return list(dict.fromkeys(found))

    def path_of(self, name: str) -> str:
        """Return the node path of the first call of a module, by its qualified name."""
        for tree in self.trees():
            for node in tree.data.walk():
                if node.role == "call" and node.module == name:
                    return node.path
        return ".".join(map(identifier, name.split(".")))

    def mirror_path(self, name: str) -> str:
        """Return the path of the mirror node with a name; "" if there is none."""
        for recording in self._runs():
            if name in recording.names:
                return self.run(recording).tree.path_of(recording.names.index(name))
        return ""

    def hint(self, name: str) -> str:
        """Return the untaken branch in which something with a name may be."""
        base = re.sub(r"_\d+$", "", name.rpartition(".")[2])
        found = [
            branch
            for branch in self._coverage()
            if any(
                re.search(rf"\b{re.escape(base)}\b", text) for text in source.unseen_sides(branch)
            )
        ]
        if not base or not found:
            return ""
        listed = ", ".join(
            f"{place_text(branch.file, branch.line)} `{branch.text}`" for branch in found[:3]
        )
        return f"it may be in a branch that no run has taken: {listed}"

    def why_not(
        self, path: str, runs: Iterable[Recording], often_enough: Callable[[int], bool]
    ) -> str:
        """Return why some runs reached a node less often than others; "" if that is unknown.

        `often_enough` says whether a run that reached it so many times counts as one of the others.
        """
        others = [run for run in self.recordings() if often_enough(self.count_passes(path, run))]
        nodes = {node.path: node for node in self.candidates() or ()}
        if not others:
            return ""
        return source.why_past(path, nodes, others, runs)

    def count_passes(self, path: str, run: Recording) -> int:
        """Return how often a run reached a node."""
        try:
            return len(find_node(self.run(run).tree.data, path)[0].passes)
        except NodePathError:
            return 0

    def foreseen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        """Return a run without insertions that a call will repeat; None if that is not certain."""
        recording = self._predict(args, kwargs)
        return None if recording is None else self.run(recording)

    def run(self, recording: Recording) -> Run:
        """Return the views of a run, with node names that continue those of earlier runs."""
        self.name_nodes()
        return self._run(recording)

    def nodes_of(self, recording: Recording) -> RunNodes:
        """Return the nodes of a known run."""
        self.name_nodes()
        return self._run(recording).nodes

    def _run(self, recording: Recording) -> Run:
        cached = self._views.get(id(recording))
        if cached is None:
            living = {id(other) for other in self.recordings()}
            for key in [key for key in self._views if key not in living]:
                del self._views[key]
            run = Run(recording, self.model, self.registry)
            cached = self._views[id(recording)] = run
        return cached
