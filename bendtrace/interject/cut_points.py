"""Cut points: from a node path to the positions on a tape that define its value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bendtrace.errors import InputError, NodePathError
from bendtrace.interject.structure import Leaf, describe, part_of, take_apart
from bendtrace.paths.nodes import TreeNode, children_of
from bendtrace.paths.nodes import describe as describe_node
from bendtrace.paths.view import Tree, find, plain_path
from bendtrace.recording.recorder import Recording
from bendtrace.tape.tape import ModuleCall, Op
from bendtrace.torch_rules.functions import is_gate

__all__ = ["Spot", "is_named", "path_in", "spots_of", "values_for"]


@dataclass(frozen=True)
class Spot:
    """A position on a tape from which a given value, or a part of it, replaces a recorded one.

    Attributes:
        index: the op whose value it replaces.
        start: the first position at which it applies.
        call: the module call that outputs it; None if it is the op.
        keys: its position inside the value of the node.
        node: the part of the node.
    """

    index: int
    start: int
    call: ModuleCall | None
    keys: tuple[Any, ...]
    node: TreeNode


def path_in(tree: Tree, text: str) -> str:
    """Return the path that a tree uses for a node that has a given path in another run.

    Raises:
        NodePathError: the tree has no such node.
    """
    try:
        find(tree.data, text)
    except NodePathError:
        around, _, last = text.rpartition(".")
        if last == "output":  # which has another name if it has another type
            return path_in(tree, around) if around else ""
        raise
    return text


def is_named(node: TreeNode, text: str) -> bool:
    """Return whether a text is the path of a node itself, not one of its other names."""
    return plain_path(node.path) in (plain_path(text), plain_path(text).removesuffix(".output"))


def spots_of(recording: Recording, tree: Tree, text: str, *, bended: bool) -> tuple[Spot, ...]:
    """Return where on the tape of a run the value of a node is defined.

    Args:
        recording: the run.
        tree: its tree.
        text: the path of the node.
        bended: whether it is the value after the insertions at the node.

    Raises:
        NodePathError: the run has no such node.
        InputError: the value of the node cannot be given.
    """
    node, chosen = find(tree.data, path_in(tree, text))
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

    def of(self, node: TreeNode, number: int, text: str) -> Iterator[Spot]:
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
                yield Spot(index, index + 1, None, below, inner)
        else:
            whole, number_of_whole = chain[-2]
            yield from self._of_op(node, number, keys, self._gate(whole.path, number_of_whole))

    def _of_op(
        self, node: TreeNode, number: int, keys: tuple[Any, ...], gate: Op | None
    ) -> Iterator[Spot]:
        """Yield the spots of a function's result, or of a part of it."""
        made = node.passes[number]
        assert made.index is not None
        index = self._op_of(made.index, made.element)
        if index is None:  # a part of a result that nothing has used
            return
        yield from self._at(index, index + 1, None, (), keys, node, gate)

    def _of_call(
        self,
        holder: TreeNode,
        number: int,
        node: TreeNode,
        within: int,
        keys: tuple[Any, ...],
    ) -> Iterator[Spot]:
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
    ) -> Iterator[Spot]:
        if gate is None:
            yield Spot(index, start, call, below, node)
            return
        # Users of the value after the insertions there read it from the gate; unless the insertions
        # changed nothing, as for parts of containers, which then keep their own name.
        after = gate.index + 1
        yield Spot(index, max(after, index + 1), call, below, node)
        leaf = _leaf_at(gate.target.shape, keys)
        if leaf is None or leaf.number not in gate.target.exchanged:
            return
        element = (gate.target.exchanged.index(leaf.number),)
        given = self._op_of(gate.index, element if len(gate.target.exchanged) > 1 else ())
        if given is not None:
            yield Spot(given, given + 1, call, below, node)

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


def _leaf_at(shape: Any, keys: tuple[Any, ...]) -> Leaf | None:
    """Return the leaf of a structure at some keys."""
    found = part_of(shape, keys)
    return found if type(found) is Leaf else None


def values_for(text: str, value: Any, spots: tuple[Spot, ...]) -> list[Any]:
    """Return what a given value defines at each of the spots of a node.

    Raises:
        InputError: its structure differs from that of the node's value.
    """
    found = [_dug(text, value, spot) for spot in spots]
    tensors = [item for item in take_apart(value)[1] if isinstance(item, Tensor)]
    wanted = {spot.keys for spot in spots}
    if wanted and len(tensors) > len(wanted) and () not in wanted:
        raise InputError(
            f"{text!r} returned {len(wanted)} values in this run, and {describe(value)} "
            f"contains {len(tensors)} tensors"
        )
    return found


def _dug(text: str, value: Any, spot: Spot) -> Any:
    whole = value
    for key in spot.keys:
        value = _item(value, key)
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


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        found = {k if isinstance(k, (str, int)) else repr(k): item for k, item in value.items()}
        return found.get(key, _MISSING)
    if isinstance(value, (tuple, list)) and isinstance(key, int):
        return value[key] if key < len(value) else _MISSING
    return getattr(value, str(key), _MISSING)
