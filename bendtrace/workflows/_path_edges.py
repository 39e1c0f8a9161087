"""The edges of a run that carry a change from some nodes to others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bendtrace._trace import Trace
from bendtrace.errors import NodePathError, SiteError
from bendtrace.paths.nodes import TreeNode
from bendtrace.tape.tape import (
    ModuleCall,
    Op,
    OpKind,
    TensorMeta,
    refs_in,
)
from bendtrace.torch_rules.functions import METADATA, SHAPES, VALUES


@dataclass(frozen=True)
class Spot:
    """One pass of a node.

    Attributes:
        values: the ops of its output.
        call: the call, for a module.
        index: the op, or -1 for calls of modules and for the output.
        is_output: whether it is the model's output, or a part of it.
    """

    path: str
    number: int
    values: tuple[int, ...]
    call: ModuleCall | None = None
    index: int = -1
    is_output: bool = False


@dataclass(frozen=True)
class End:
    """A receiver, and the changed values among its inputs."""

    spot: Spot
    sources: frozenset[int]


@dataclass
class Edges:
    """Edges that carry a change.

    Attributes:
        into: for each op the changed ones among its inputs, by their ops.
        ends: the receivers.
        known: the values at which the change begins.
    """

    into: dict[int, set[int]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    known: set[int] = field(default_factory=set)


class Flow:
    """The ops of a run, and their inputs.

    Args:
        trace: the run, recorded without insertions.
    """

    def __init__(self, trace: Trace) -> None:
        self.ops = trace.ops
        self._calls = trace.module_calls
        self._tree = trace._tree
        self._root = trace._recording.root
        self._output_reads = trace._recording.output_reads
        self._names = trace.names
        self._refs = [
            frozenset(ref.index for ref in refs_in((op.args, op.kwargs))) for op in self.ops
        ]

    # Nodes

    def spot(self, path: str, number: int) -> Spot:
        """Return a pass of a node.

        Raises:
            SiteError: this run has no such pass.
        """
        if path == "output" or path.startswith("output|"):
            values = tuple(index for _, index in self.outputs(Spot(path, number, ())))
            return Spot(path, number, values, is_output=True)
        try:
            node = self._tree.resolve(path, leaf=False)._data
        except NodePathError as error:
            raise SiteError(f"the patched run did not reach {path!r}: {error}", path) from None
        if number >= len(node.passes):
            raise SiteError(
                f"{path!r} ran {len(node.passes)} times in the patched run: it has no pass "
                f"{number + 1}",
                path,
            )
        if node.kind == "graph":
            made = node.passes[number].index
            call = self._root if made is None else self._calls[made]
            return Spot(path, number, tuple(_refs(call.output)), call)
        if node.role == "input" and "." in node.path:
            raise SiteError(
                f"{path!r} is the input of a module: name the module, or the node that "
                "computes the input",
                path,
            )
        return self._value(path, number, node)

    def _value(self, path: str, number: int, node: TreeNode) -> Spot:
        made = node.passes[number]
        if made.index is None and node.role != "op":
            return Spot(path, number, ())
        # Containers have no value of their own on the tape; all in them comes from one op.
        inside = made.index
        if inside is None:
            inside = next(
                p.index for n in node.walk() for p in n.passes[number:] if p.index is not None
            )
        root = self._tree.origin(inside, made.element)
        if node.kind == "container" or not root[1]:
            return Spot(path, number, (root[0],), index=root[0])
        values = [op.index for op in self.ops if self._tree.origin(op.index) == root]
        return Spot(path, number, tuple(values), index=root[0])

    def outputs(self, spot: Spot) -> list[tuple[str, int]]:
        """Return the paths of the parts of the model's output, and their values."""
        wanted = spot.path.replace("|", ".")
        return [
            ("output" + ("|" + name.removeprefix("output.") if name != "output" else ""),
             index if not element else self._element(index, element))
            for name, index, element in self._tree.outputs
            if index is not None and (name == wanted or name.startswith(f"{wanted}."))
        ]  # fmt: skip

    def _element(self, index: int, element: tuple[Any, ...]) -> int:
        found = (op.index for op in self.ops if self._tree.origin(op.index) == (index, element))
        return next(found, index)

    def place(self, index: int) -> tuple[str, int]:
        """Return the path and pass for insertions at an op.

        Raises:
            SiteError: insertions at the op are not possible.
        """
        node = self._tree.locate(index)
        if node is None or node._data.role != "op":
            raise self._refusal(index, "is not a node, so nothing can be inserted at it")
        chosen = node._chosen
        return node._data.path, 0 if chosen is None else chosen[0]

    # Edges

    def begin(self, senders: Sequence[Spot], within: bool) -> tuple[Edges, set[int]]:
        """Return the changed values at the beginning, and the values that pass them on.

        Args:
            senders: the nodes.
            within: whether to change their inputs, for them alone, instead of their outputs.
        """
        made = Edges()
        if not within:
            made.known = _values(senders)
            return made, set(made.known)
        carried: set[int] = set()
        for spot in senders:
            first = self.given(spot)
            made.known.add(first)
            carried |= self._through(made, {first}, spot)
        return made, carried

    def direct(self, made: Edges, carried: set[int], ends: Sequence[Spot]) -> None:
        """Add the edges that lead to some nodes directly."""
        self._arrive(made, self._spread(made, carried, lambda op: False), ends)

    def every(
        self, made: Edges, carried: set[int], ends: Sequence[Spot], frozen: Iterable[Spot]
    ) -> None:
        """Add all edges on paths to some nodes that avoid frozen nodes."""
        held = _values(frozen)
        came = self._spread(made, carried, lambda op: op.index not in held)
        if changed := made.known - carried & made.into.keys():
            raise SiteError(
                "one of several senders leads to the input of another: patch them one by one",
                self._tree.path_of(min(changed)),
            )
        self._arrive(made, came, ends)
        self._require_no_memory(carried, held, ends)

    def along(self, made: Edges, carried: set[int], nodes: Sequence[Sequence[Spot]]) -> None:
        """Add the edges of a path, given as its nodes with their passes, both ends included.

        Raises:
            SiteError: two consecutive nodes have no edge between them.
        """
        for before, spots in pairwise(nodes[:-1]):
            came = set[int]().union(*(self._through(made, carried, spot) for spot in spots))
            if not came:
                raise _no_edge(before, spots)
            carried = came
        count = len(made.ends)
        self.direct(made, carried, nodes[-1])
        if len(made.ends) == count:
            raise _no_edge(nodes[-2], nodes[-1])

    def given(self, spot: Spot) -> int:
        """Return the op of the first tensor among the inputs of a node."""
        given = self._given(spot)
        first = next((i for i in given if isinstance(self.ops[i].meta, TensorMeta)), None)
        if first is None:
            raise SiteError(f"{spot.path!r} receives no tensor", spot.path)
        return first

    def _given(self, spot: Spot) -> list[int]:
        called = self.ops[spot.index] if spot.call is None else spot.call
        return _refs((called.args, called.kwargs))

    def _spread(
        self, made: Edges, starts: Iterable[int], allowed: Callable[[Op], bool]
    ) -> set[int]:
        """Follow a change along the tape; return all values that it reaches."""
        carried = set(starts)
        for op in self.ops:
            sources = self._refs[op.index] & carried
            if not sources or op.index in carried:
                continue
            told_only = op.target in SHAPES or op.target in METADATA  # not of the values
            if _is_element(op) or (allowed(op) and not told_only):
                made.into.setdefault(op.index, set()).update(sources)
                carried.add(op.index)
        return carried

    def _through(self, made: Edges, carried: set[int], spot: Spot) -> set[int]:
        """Carry a change through a node; return the changed values of its output."""
        self.require_own(spot)
        first, last = (
            (spot.index, spot.index + 1) if spot.call is None else (spot.call.start, spot.call.stop)
        )
        with_elements = self._spread(made, carried, lambda op: False)
        if not with_elements & set(self._given(spot)):
            return set()
        return set(spot.values) & self._spread(
            made, carried, lambda op: first <= op.index < last
        )  # fmt: skip

    def tensor_of(self, spot: Spot) -> int:
        """Return the op of the one tensor that is a node's output."""
        if len(spot.values) != 1 or not isinstance(self.ops[spot.values[0]].meta, TensorMeta):
            raise SiteError(
                f"the output of {spot.path!r} is not one tensor: name a part of it", spot.path
            )
        return spot.values[0]

    def arguments(self, spot: Spot) -> tuple[Any, Any]:
        """Return the recorded arguments of a node."""
        called = self.ops[spot.index] if spot.call is None else spot.call
        return tuple(called.args), called.kwargs

    def is_element(self, index: int) -> bool:
        """Return whether an op only names a part of another op's output."""
        return _is_element(self.ops[index])

    def require_own(self, spot: Spot) -> None:
        """Raise for calls of modules that return their inputs."""
        call = spot.call
        if call is not None and any(not call.start <= i < call.stop for i in spot.values):
            raise SiteError(
                f"{spot.path!r} returns its input: name the node that computes the input",
                spot.path,
            )

    def _arrive(self, made: Edges, carried: set[int], ends: Sequence[Spot]) -> None:
        for spot in ends:
            given = set(spot.values) if spot.is_output else set(self._given(spot))
            if sources := given & carried:
                made.ends.append(End(spot, frozenset(sources)))

    # Ops that cannot run on the side

    def needed(self, made: Edges) -> list[int]:
        """Return the ops that have to run on the side, in order.

        Raises:
            SiteError: one of them cannot run on the side.
        """
        wanted: set[int] = set()
        waiting = [index for end in made.ends for index in end.sources]
        while waiting:
            index = waiting.pop()
            if index in made.known or index in wanted:
                continue
            wanted.add(index)
            waiting.extend(made.into[index])
        for index in wanted:
            self._require_possible(index, made.into[index])
        for end in made.ends:
            reads = self._output_reads if end.spot.is_output else {}
            if end.spot.index >= 0 and not end.spot.is_output:
                reads = self.ops[end.spot.index].reads
            for source in end.sources:
                if source in reads:
                    raise self._refusal(source, "was written to before the receiver reads it")
        return sorted(wanted)

    def _require_possible(self, index: int, sources: set[int]) -> None:
        op = self.ops[index]
        if _is_element(op):
            return
        if getattr(op.target, "is_gate", False) is True:
            raise self._refusal(index, "is an insertion in the model: remove it first")
        if op.kind is not OpKind.CALL or op.target in VALUES:
            raise self._refusal(index, "is a Python number, which cannot be computed on the side")
        if op.raised is not None:
            raise self._refusal(index, f"raised {op.raised.type.__name__}")
        if any(source in op.reads for source in sources):
            raise self._refusal(index, "reads a tensor that was written to under another name")
        if op.writes and not isinstance(op.meta, TensorMeta):
            raise self._refusal(index, "writes into a part of a tensor")

    def _require_no_memory(self, starts: set[int], held: set[int], ends: Sequence[Spot]) -> None:
        """Refuse changes that would reach the ends by writes in place."""
        changed = set(starts)
        for op in self.ops:
            read = self._refs[op.index] | set(op.reads.values())
            told_only = op.target in SHAPES or op.target in METADATA
            if read & changed and op.index not in held and not told_only:
                changed.add(op.index)
        reads: list[dict[int, int]] = []
        waiting: list[int] = []
        for spot in ends:
            if spot.is_output:
                reads.append(self._output_reads)
                waiting += spot.values
                continue
            waiting += self._given(spot)
            inner = [spot.index] if spot.call is None else range(spot.call.start, spot.call.stop)
            reads += [self.ops[index].reads for index in inner]
        seen = starts | held
        waiting += [writer for known in reads for writer in known.values()]
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                reads.append(self.ops[index].reads)
                waiting += (*self._refs[index], *self.ops[index].reads.values())
        for writer in sorted({writer for known in reads for writer in known.values()}):
            if writer in changed and writer not in starts:
                why = "writes into a tensor that is read under another name (a memory edge)"
                raise self._refusal(writer, why)

    def _refusal(self, index: int, why: str) -> SiteError:
        op = self.ops[index]
        place = f" ({op.site.place})" if op.site is not None else ""
        name = self._tree.path_of(index) or self._names[index]
        return SiteError(
            f"no path can be patched through {name!r}{place}: it {why}; choose other paths, or "
            "put a node before it in frozen=",
            name,
        )


def _refs(value: Any) -> list[int]:
    return list(dict.fromkeys(ref.index for ref in refs_in(value)))


def _values(spots: Iterable[Spot]) -> set[int]:
    return {index for spot in spots for index in spot.values}


def _is_element(op: Op) -> bool:
    """Whether an op only names a part of another op's output."""
    is_taken = op.kind is OpKind.SCALAR and op.target is operator.getitem
    return is_taken and isinstance(op.meta, tuple)  # that of a tensor is one as well


def _no_edge(before: Sequence[Spot], after: Sequence[Spot]) -> SiteError:
    first, then = before[0].path, after[0].path
    return SiteError(f"the mirror has no edge from {first!r} to {then!r}", then)
