"""Path patching: the contribution of one node to another along some edges only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bendtrace._trace import Trace
from bendtrace.debug.calls import Call, own_copy
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import InputError, NodePathError, SiteError
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.registry import InsertionGroup
from bendtrace.insert.resolver import describe_where
from bendtrace.log.capture import tensors_in
from bendtrace.log.nodes import NodePath, TreeNode
from bendtrace.module import BendedModule, bended_of
from bendtrace.research._sites import (
    At,
    Columns,
    Metric,
    MissingCells,
    NoPart,
    Part,
    Seen,
    SiteRow,
    Sites,
    TwoRunTable,
    number_of,
    required_metric,
    site_list,
    unlike,
    why_differing,
)
from bendtrace.research.patching import Direction, runs_in_order
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, refs_in
from bendtrace.watch.draws import RandomStates
from bendtrace.watch.functions import METADATA, SHAPES, VALUES, is_inserted

# The edges of a run that carry a change from some nodes to others.


@dataclass(frozen=True)
class PassSpot:
    """One pass of a node."""

    path: str
    number: int
    values: tuple[int, ...]  # the ops of its output
    call: ModuleCall | None = None  # the call, for a module
    index: int = -1  # the op, or -1 for calls of modules and for the output
    is_output: bool = False  # whether it is the model's output, or a part of it


@dataclass(frozen=True)
class Receiver:
    """A receiver, and the changed values among its inputs."""

    spot: PassSpot
    sources: frozenset[int]


@dataclass
class Edges:
    """Edges that carry a change."""

    # For each op the changed ones among its inputs, by their ops.
    into: dict[int, set[int]] = field(default_factory=dict)
    ends: list[Receiver] = field(default_factory=list)  # the receivers
    sources: set[int] = field(default_factory=set)  # the values at which the change begins


class OpFlow:
    """The ops of a run, and their inputs."""

    def __init__(self, trace: Trace) -> None:
        self.ops: list[Op] = trace.ops
        self._calls = trace.module_calls
        self._tree = trace._tree
        self._root = trace._recording.root
        self._output_reads = trace._recording.output_reads
        self._names = trace.names
        self._refs = [
            frozenset(ref.index for ref in refs_in((op.args, op.kwargs))) for op in self.ops
        ]

    # Nodes

    def spot(self, path: str, number: int) -> PassSpot:
        """Return a pass of a node."""
        if path == "output" or path.startswith("output|"):
            values = tuple(index for _, index in self.outputs(PassSpot(path, number, ())))
            return PassSpot(path, number, values, is_output=True)
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
            return PassSpot(path, number, tuple(_refs(call.output)), call)
        if node.role == "input" and "." in node.path:
            raise SiteError(
                f"{path!r} is the input of a module: name the module, or the node that "
                "computes the input",
                path,
            )
        return self._value(path, number, node)

    def _value(self, path: str, number: int, node: TreeNode) -> PassSpot:
        made = node.passes[number]
        if made.index is None and node.role != "op":
            return PassSpot(path, number, ())
        # Containers have no value of their own on the tape; all in them comes from one op.
        inside = made.index
        if inside is None:
            inside = next(
                p.index for n in node.walk() for p in n.passes[number:] if p.index is not None
            )
        root = self._tree.origin(inside, made.element)
        if node.kind == "container" or not root[1]:
            return PassSpot(path, number, (root[0],), index=root[0])
        values = [op.index for op in self.ops if self._tree.origin(op.index) == root]
        return PassSpot(path, number, tuple(values), index=root[0])

    def outputs(self, spot: PassSpot) -> list[tuple[str, int]]:
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
        """Return the path and pass for insertions at an op."""
        node = self._tree.locate(index)
        if node is None or node._data.role != "op":
            raise self._refusal(index, "is not a node, so nothing can be inserted at it")
        chosen = node._chosen
        return node._data.path, 0 if chosen is None else chosen[0]

    # Edges

    def begin(self, senders: Sequence[PassSpot], within: bool) -> tuple[Edges, set[int]]:
        """Return the changed values at the beginning, and the values that pass them on."""
        made = Edges()
        if not within:
            made.sources = _value_indices(senders)
            return made, set(made.sources)
        carried: set[int] = set()
        for spot in senders:
            first = self.first_input(spot)
            made.sources.add(first)
            carried |= self._through(made, {first}, spot)
        return made, carried

    def direct(self, made: Edges, carried: set[int], ends: Sequence[PassSpot]) -> None:
        """Add the edges that lead to some nodes directly."""
        self._arrive(made, self._spread(made, carried, lambda op: False), ends)

    def every(
        self, made: Edges, carried: set[int], ends: Sequence[PassSpot], frozen: Iterable[PassSpot]
    ) -> None:
        """Add all edges on paths to some nodes that avoid frozen nodes."""
        frozen_ops = _value_indices(frozen)
        came = self._spread(made, carried, lambda op: op.index not in frozen_ops)
        if changed := made.sources - carried & made.into.keys():
            raise SiteError(
                "one of several senders leads to the input of another: patch them one by one",
                self._tree.path_of(min(changed)),
            )
        self._arrive(made, came, ends)
        self._require_no_memory(carried, frozen_ops, ends)

    def along(self, made: Edges, carried: set[int], nodes: Sequence[Sequence[PassSpot]]) -> None:
        """Add the edges of a path, given as its nodes with their passes, both ends included."""
        for before, spots in pairwise(nodes[:-1]):
            came = set[int]().union(*(self._through(made, carried, spot) for spot in spots))
            if not came:
                raise _no_edge(before, spots)
            carried = came
        count = len(made.ends)
        self.direct(made, carried, nodes[-1])
        if len(made.ends) == count:
            raise _no_edge(nodes[-2], nodes[-1])

    def first_input(self, spot: PassSpot) -> int:
        """Return the op of the first tensor among the inputs of a node."""
        given = _refs(self.arguments(spot))
        first = next((i for i in given if isinstance(self.ops[i].meta, TensorMeta)), None)
        if first is None:
            raise SiteError(f"{spot.path!r} receives no tensor", spot.path)
        return first

    def _spread(
        self, made: Edges, starts: Iterable[int], allowed: Callable[[Op], bool]
    ) -> set[int]:
        """Follow a change along the tape; return all values that it reaches."""
        carried = set(starts)
        for op in self.ops:
            sources = self._refs[op.index] & carried
            if not sources or op.index in carried:
                continue
            is_metadata = op.target in SHAPES or op.target in METADATA  # not of the values
            if _is_element(op) or (allowed(op) and not is_metadata):
                made.into.setdefault(op.index, set()).update(sources)
                carried.add(op.index)
        return carried

    def _through(self, made: Edges, carried: set[int], spot: PassSpot) -> set[int]:
        """Carry a change through a node; return the changed values of its output."""
        self.require_own(spot)
        first, last = (
            (spot.index, spot.index + 1) if spot.call is None else (spot.call.start, spot.call.stop)
        )
        with_elements = self._spread(made, carried, lambda op: False)
        if not with_elements & set(_refs(self.arguments(spot))):
            return set()
        return set(spot.values) & self._spread(
            made, carried, lambda op: first <= op.index < last
        )  # fmt: skip

    def tensor_of(self, spot: PassSpot) -> int:
        """Return the op of the one tensor that is a node's output."""
        if len(spot.values) != 1 or not isinstance(self.ops[spot.values[0]].meta, TensorMeta):
            raise SiteError(
                f"the output of {spot.path!r} is not one tensor: name a part of it", spot.path
            )
        return spot.values[0]

    def arguments(self, spot: PassSpot) -> tuple[Any, Any]:
        """Return the recorded arguments of a node."""
        called = self.ops[spot.index] if spot.call is None else spot.call
        return tuple(called.args), called.kwargs

    def require_own(self, spot: PassSpot) -> None:
        """Raise for calls of modules that return their inputs."""
        call = spot.call
        if call is not None and any(not call.start <= i < call.stop for i in spot.values):
            raise SiteError(
                f"{spot.path!r} returns its input: name the node that computes the input", spot.path
            )

    def _arrive(self, made: Edges, carried: set[int], ends: Sequence[PassSpot]) -> None:
        for spot in ends:
            given = set(spot.values if spot.is_output else _refs(self.arguments(spot)))
            if sources := given & carried:
                made.ends.append(Receiver(spot, frozenset(sources)))

    # Ops that cannot run on the side

    def needed(self, made: Edges) -> list[int]:
        """Return the ops that have to run on the side, in order."""
        wanted: set[int] = set()
        waiting = [index for end in made.ends for index in end.sources]
        while waiting:
            index = waiting.pop()
            if index in made.sources or index in wanted:
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
        if is_inserted(op):
            raise self._refusal(index, "is an insertion in the model: remove it first")
        if op.kind is not OpKind.CALL or op.target in VALUES:
            raise self._refusal(index, "is a Python number, which cannot be computed on the side")
        if op.raised is not None:
            raise self._refusal(index, f"raised {op.raised.type.__name__}")
        if any(source in op.reads for source in sources):
            raise self._refusal(index, "reads a tensor that was written to under another name")
        if op.writes and not isinstance(op.meta, TensorMeta):
            raise self._refusal(index, "writes into a part of a tensor")

    def _require_no_memory(
        self, starts: set[int], frozen_ops: set[int], ends: Sequence[PassSpot]
    ) -> None:
        """Refuse changes that would reach the ends by writes in place."""
        changed = set(starts)
        for op in self.ops:
            read = self._refs[op.index] | set(op.reads.values())
            is_metadata = op.target in SHAPES or op.target in METADATA
            if read & changed and op.index not in frozen_ops and not is_metadata:
                changed.add(op.index)
        reads: list[dict[int, int]] = []
        waiting: list[int] = []
        for spot in ends:
            if spot.is_output:
                reads.append(self._output_reads)
                waiting += spot.values
                continue
            waiting += _refs(self.arguments(spot))
            inner = [spot.index] if spot.call is None else range(spot.call.start, spot.call.stop)
            reads += [self.ops[index].reads for index in inner]
        seen = starts | frozen_ops
        waiting += [writer for writers in reads for writer in writers.values()]
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                reads.append(self.ops[index].reads)
                waiting += (*self._refs[index], *self.ops[index].reads.values())
        for writer in sorted({writer for writers in reads for writer in writers.values()}):
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


def _value_indices(spots: Iterable[PassSpot]) -> set[int]:
    return {index for spot in spots for index in spot.values}


def _is_element(op: Op) -> bool:
    """Return whether an op only names a part of another op's output."""
    return op.is_element and isinstance(op.meta, tuple)  # that of a tensor is one as well


def _no_edge(before: Sequence[PassSpot], after: Sequence[PassSpot]) -> SiteError:
    first, then = before[0].path, after[0].path
    return SiteError(f"the mirror has no edge from {first!r} to {then!r}", then)


Places = dict[tuple[int, str], list[int]]  # the passes of nodes, by item and path


@dataclass(frozen=True, repr=False, eq=False)
class PathPatching(TwoRunTable):
    """The result of path patching: the metric for each sender and receiver.

    Attributes:
        values: the metric, with shape (senders, receivers), or (senders, receivers, heads) if the
            senders' heads are separate; float64. If no path leads from a sender to a receiver, the
            metric of the patched run.
        edges: how many edges carry each sender's change, with shape (senders, receivers).
        senders: their names.
        receivers: their names.
        heads: numbers of the heads; None where they are not separate.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise" or "noise".
        missing: why cells are nan.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = torch.relu(x)
        ...     return h.exp() + h * 3
        >>> found = bt.workflows.path_patching(
        ...     model, torch.ones(1), torch.zeros(1), ["relu"], ["exp", "mul"], torch.sum
        ... )
        >>> found
        PathPatching (denoise): clean 5.718, corrupted 1; effect (0 none, 1 all)
                to exp  to mul
          relu   0.364   0.636
        >>> found.edges, next(found.rows())["receiver"]
        (tensor([[1, 1]]), 'exp')
    """

    values: Tensor
    edges: Tensor
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    heads: tuple[int, ...] | None
    clean: float
    corrupted: float
    direction: Direction
    missing: dict[str, str]

    _between = ", "

    def _axes(self) -> dict[str, Sequence[Any]]:
        axes: dict[str, Sequence[Any]] = {"sender": self.senders, "receiver": self.receivers}
        return axes if self.heads is None else axes | {"head": self.heads}


def path_patching(
    model: Callable[..., Any],
    clean: Any,
    corrupted: Any,
    senders: Any,
    receivers: Any,
    metric: Callable[[Any], Any],
    *,
    paths: Literal["direct", "all"] | Sequence[Sequence[Any]] = "direct",
    frozen: Any = None,
    heads: int | None = None,
    head: Any = None,
    head_axis: int = -1,
    direction: Direction = "denoise",
    at: At = "output",
    missing: Literal["raise", "nan"] = "raise",
) -> PathPatching:
    """Patch one node's contribution to another, along edges of the op graph only.

    After Wang et al., "Interpretability in the Wild" (2022), and Goldowsky-Dill et al., "Localizing
    Model Behavior with Path Patching" (2023), for any graph of ops. One run is patched with values
    of the other. For each sender and receiver:

    1. Some of the data edges of the patched run are chosen, as the networkx mirror lists them; see
       `paths`.
    2. That run is repeated. The ops that the chosen edges lead to run a second time on the side:
       chosen edges carry the sender's value of the other run, and side results; all other edges
       carry the run's own values. Branches, sizes and random numbers are those of the run.
    3. The run is repeated again; now the chosen edges into the receiver carry the side results.
       From there the model runs as usual, and the metric of its output is the result.

    Args:
        model: a module, a function, or a `BendedModule` without insertions along the paths.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        senders: nodes, as the sites of `activation_patching`: each is a row; a list is one row.
        receivers: nodes: ops, calls of modules, or `"output"`, the model's output, or a part of it,
            `"output|logits"`. Each is a column; a list is one column of receivers that are patched
            together.
        metric: a function from the model's output to a number.
        paths: which edges are chosen:

            - "direct": those from the sender to the receiver;
            - "all": those on all paths from the sender to the receiver;
            - paths: each a sequence of nodes from a sender to a receiver, with an edge from each
              node to the next. A module represents all paths through it.

            An edge may start at an element (`split|sub_0`) of a node's output. The choice is a set
            of edges: if two paths cross, a path that combines parts of both is included as well.
        frozen: for "all": nodes that keep their values, so that no path leads through them. In Wang
            et al. these are all attention heads (and the MLPs, to keep only the residual paths).
        heads: the number of heads in the senders' values; each is replaced separately.
        head: which of them; None for all.
        head_axis: the axis that consists of consecutive heads.
        direction: "denoise": the corrupted run is patched with values of the clean one; "noise":
            the other way round, as in these papers.
        at: "output": the senders' values are their outputs. "input": their first input tensors, for
            the senders alone; this makes the heads of an attention projection senders.
        missing: what to do if a sender's value cannot be replaced, because the runs differ:
            "raise", or "nan".

    Returns:
        A `PathPatching`: values with shape (senders, receivers) or (senders, receivers, heads).

    Raises:
        SiteError: a value cannot be replaced, a path does not exist, or an op on it cannot run on
            the side: Python numbers, writes into parts of tensors.
        NodePathError: an item matches no node.
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = torch.relu(x)
        ...     return h.exp() + h * 3
        >>> bt.workflows.path_patching(
        ...     model, torch.ones(1), torch.zeros(1), ["relu"], ["exp", "mul", "add"], torch.sum,
        ...     paths="all",
        ... ).values
        tensor([[2.7183, 4.0000, 5.7183]], dtype=torch.float64)
    """
    first, patched, names = runs_in_order(direction)
    columns = Columns.of(None, 1, heads, head, head_axis)
    measured, missed = required_metric(metric), MissingCells(missing, "send")
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    plan = _PathRequest(senders, receivers, paths, frozen)
    columns = columns.named(plan.senders, bended)
    with Sites(
        bended, plan.senders, (calls[first], calls[patched]), at=at, noted=plan.noted,
        label="path_patching", columns=columns,
    ) as sites:  # fmt: skip
        base, source = sites.measured(calls[first], measured)
        start, target = sites.measured(calls[patched], measured)
        rows = sites.rows(source, target)
        places = sites.places
    with PreservedState(bended.model) as still:
        trace = bended.trace(*(copy := own_copy(calls[patched])).args, **copy.kwargs)
        trace.output = None
        still.rewind()
        flow = OpFlow(trace)
        cells = _Cells(flow, plan, rows, places, (source, target), names, at == "input")
        parts = columns.parts((None,))
        with SideRuns(bended, cells, still, calls[patched], measured) as runs:
            found = [
                [[cells.value(runs, i, j, part, start, missed) for part in parts]
                 for j in range(len(plan.receivers))]
                for i in range(len(rows))
            ]  # fmt: skip
    values = torch.tensor(found, dtype=torch.float64)
    if columns.heads is None:
        values = values.squeeze(-1)
    both = base, start
    return PathPatching(
        values, cells.edges(), tuple(row.name for row in rows), tuple(plan.names),
        columns.which, both[first], both[patched], direction, missed.reasons,
    )  # fmt: skip


class _PathRequest:
    """The senders, the receivers, and the paths between them, as they were given."""

    def __init__(self, senders: Any, receivers: Any, paths: Any, frozen: Any) -> None:
        self.senders = site_list(senders, "senders")
        self.receivers = site_list(receivers, "receivers")
        self.names = [_name_of_item(item) for item in self.receivers]
        self.paths: Any = paths
        self.noted: list[Any] = list(self.receivers)
        self.frozen = range(0)
        self.ways: list[range] = []
        if isinstance(paths, str):
            if paths not in ("direct", "all"):
                raise InputError(
                    f'paths= has to be "direct", "all" or a list of paths, not {paths!r}'
                )
        else:
            for path in site_list(paths, "paths"):
                if not isinstance(path, (list, tuple)) or len(path) < 2:
                    raise InputError(
                        "a path has to be a sequence of nodes, from a sender to a receiver, "
                        f"not {path!r}"
                    )
                self.ways.append(self._add(list(path)))
        if frozen is not None:
            if paths != "all":
                raise InputError('frozen= is only for paths="all": it names nodes that paths avoid')
            self.frozen = self._add(site_list(frozen, "frozen"))

    def _add(self, items: list[Any]) -> range:
        first = len(self.senders) + len(self.noted)
        self.noted += items
        return range(first, first + len(items))


def _name_of_item(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple, set, frozenset)):
        return " + ".join(map(_name_of_item, item))
    return describe_where(item)


class _Cells:
    """The edges of each sender and receiver, and the values that are sent along them.

    `places` are the passes of all noted nodes, and `seen` the senders' values in the run that
    values are taken from, and in the patched run. If `within`, the inputs of the senders are
    changed, and not their outputs.
    """

    def __init__(
        self,
        flow: OpFlow,
        plan: _PathRequest,
        rows: Sequence[SiteRow],
        places: Places,
        seen: tuple[Seen, Seen],
        names: tuple[str, str],
        within: bool,
    ) -> None:
        self.flow = flow
        self._plan = plan
        self._rows = rows
        self._source, self._target = seen
        self._within = within
        self.made: dict[tuple[int, int], Edges] = {}  # the edges, by sender and receiver
        self.needed: dict[tuple[int, int], list[int]] = {}  # the ops that run on the side for them
        self._flaws: dict[int, str] = {}
        self._used: set[int] = set()
        spots: dict[int, list[PassSpot]] = {}  # by the number of a noted item, pass by pass
        for (item, path), passes in places.items():
            spots.setdefault(item, []).extend(flow.spot(path, number) for number in passes)
        count = len(plan.senders)
        ends = [spots.get(count + j, []) for j in range(len(plan.receivers))]
        for name, end in zip(plan.names, ends, strict=True):
            if not end:
                raise SiteError(f"the patched run did not reach {name!r}", name)
            if len(end) > 1 and any(spot.is_output for spot in end):
                raise InputError("the model's output cannot be combined with other receivers")
        self._ends = ends
        self._frozen = [spot for item in plan.frozen for spot in spots.get(item, ())]
        self._ways = [[spots.get(item, []) for item in way] for way in plan.ways]
        for spot in self._frozen:
            flow.require_own(spot)
        for i, row in enumerate(rows):
            for key in row.keys:
                if why := why_differing(self._source.get(key), self._target.get(key), names):
                    self._flaws.setdefault(i, f"{key[1]}: {why}")
            if i not in self._flaws:
                senders = [flow.spot(key[1], n) for key in row.keys for n in self._target[key]]
                for j in range(len(plan.receivers)):
                    self._connect(i, j, senders)
        self._require_all_used()

    def _connect(self, i: int, j: int, senders: list[PassSpot]) -> None:
        ends = self._ends[j]
        flow = self.flow
        for spot in senders:
            flow.require_own(spot)
        made, carried = flow.begin(senders, self._within)
        if self._plan.paths == "direct":
            flow.direct(made, carried, ends)
        elif self._plan.paths == "all":
            flow.every(made, carried, ends, self._frozen)
        else:
            for number, way in enumerate(self._ways):
                if set(way[0]) <= set(senders) and set(way[-1]) <= set(ends):
                    begun, values = flow.begin(way[0], self._within)
                    for index, sources in begun.into.items():
                        made.into.setdefault(index, set()).update(sources)
                    flow.along(made, values, way)
                    self._used.add(number)
        self.made[i, j] = made
        self.needed[i, j] = flow.needed(made)

    def _require_all_used(self) -> None:
        """Refuse paths and edges that lead nowhere."""
        if self._plan.paths == "all" or self._flaws:
            return
        for number, way in enumerate(self._ways):
            if number not in self._used:
                text = " to ".join(repr(spots[0].path) if spots else "nothing" for spots in way)
                raise SiteError(
                    f"the path {text} does not begin with one of the senders, or does not end "
                    "with one of the receivers",
                    self._rows[0].name,
                )
        if not any(made.ends for made in self.made.values()):
            pairs = f"{[row.name for row in self._rows]} to {self._plan.names}"
            raise SiteError(
                f"the mirror has no edge from {pairs}; paths='all' includes the paths through "
                "other nodes",
                self._rows[0].name,
            )

    def edges(self) -> Tensor:
        """Return how many edges were chosen, by sender and receiver."""
        counts = torch.zeros(len(self._rows), len(self._plan.receivers), dtype=torch.int64)
        for cell, made in self.made.items():
            inner = sum(len(made.into[index]) for index in self.needed[cell])
            counts[cell] = inner + sum(len(end.sources) for end in made.ends)
        return counts

    def value(
        self, runs: SideRuns, i: int, j: int, part: Part, base: float, missing: MissingCells
    ) -> float:
        """Return the metric with a part of one sender's change sent to one receiver.

        It is `base` where no path leads from the one to the other.
        """
        if i in self._flaws:
            return missing.note(self._rows[i].name, self._flaws[i])
        begin = self.flow.first_input if self._within else self.flow.tensor_of
        try:
            values = {
                begin(self.flow.spot(key[1], number)): part.put(value, self._source[key][number])
                for key in self._rows[i].keys
                for number, value in self._target[key].items()
            }
        except NoPart as error:
            return missing.note(self._rows[i].name, str(error))
        return runs.value(self.made[i, j], values) if self.made[i, j].ends else base


# Ops that run a second time on the side, with changed inputs, while a model runs unchanged.

Pass = tuple[str, int]  # a node and its pass


def _with_changed(recorded: Any, given: Any, changed: Mapping[int, Any]) -> Any:
    """Return arguments with the values of some ops replaced."""
    kind = type(recorded)
    if kind is Ref:
        return changed.get(recorded.index, given)
    if not any(ref.index in changed for ref in refs_in(recorded)):
        return given
    if kind in (tuple, list):
        pairs = zip(recorded, given, strict=True)
        return kind(_with_changed(old, new, changed) for old, new in pairs)
    if kind is dict:
        return {key: _with_changed(old, given[key], changed) for key, old in recorded.items()}
    if kind is slice:
        ends = ("start", "stop", "step")
        return slice(
            *(_with_changed(getattr(recorded, e), getattr(given, e), changed) for e in ends)
        )
    raise SiteError(f"a value inside a {type(given).__name__} cannot be replaced", "")


@dataclass(eq=False, repr=False)
class _Aside(Interjection):
    """Runs ops twice: as they are, and once more on changed inputs."""

    self_contained = True
    label = "path_patching"

    ops: list[Op]
    places: Mapping[Pass, int]

    def __post_init__(self) -> None:
        # For each op that runs on the side those of its inputs that are changed.
        self.into: Mapping[int, set[int]] = {}
        # The changed values, by their ops; at first those that a cell begins with.
        self.values: dict[int, Any] = {}

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        index = self.places.get((at.path, at.number))
        if index is None or index not in self.into or index in self.values:
            return call(*inputs, **inputs.kwargs)
        op = self.ops[index]
        recorded = tuple(op.args), op.kwargs
        changed = {source: self.value(source) for source in self.into[index]}
        args, kwargs = _with_changed(recorded, (tuple(inputs), inputs.kwargs), changed)
        if op.writes:  # into a copy, and before the node itself writes
            copies = {
                ref.index: changed.get(ref.index, value).clone()
                for ref, value in _pairs(recorded, (tuple(inputs), inputs.kwargs))
                if ref.index in op.writes
            }
            args, kwargs = _with_changed(recorded, (args, kwargs), copies)
        before = RandomStates()
        output = call(*inputs, **inputs.kwargs)
        after = RandomStates()
        before.restore()
        aside = call(*args, **kwargs)
        after.restore()
        self._require_alike(at.path, aside, output)
        self.values[index] = aside
        return output

    def value(self, index: int) -> Any:
        """Return the output of an op in the changed run, or an element of an output."""
        if index not in self.values:
            op = self.ops[index]
            if op.target is not operator.getitem or not isinstance(op.args[0], Ref):
                raise SiteError(
                    f"the run did not reach op {index} ({op.target}), as it did before with "
                    "the same inputs: the model depends on something else",
                    "",
                )
            self.values[index] = self.value(op.args[0].index)[op.args[1]]
        return self.values[index]

    def _require_alike(self, path: str, aside: Any, output: Any) -> None:
        changed, plain = list(tensors_in(aside)), list(tensors_in(output))
        if len(changed) != len(plain):
            raise SiteError(
                f"with the change, {path!r} returns a different number of tensors", path
            )
        for one, other in zip(changed, plain, strict=True):
            if why := unlike(one, other):
                raise SiteError(
                    f"with and without the change, the output of {path!r} is {why}: paths "
                    "cannot be patched through it",
                    path,
                )


@dataclass(eq=False, repr=False)
class _InputReplacement(Interjection):
    """Gives nodes changed inputs."""

    self_contained = True
    label = "path_patching"

    recorded: Mapping[Pass, tuple[Any, Any]]

    def __post_init__(self) -> None:
        # For each node and pass the replacements, by op.
        self.changed: Mapping[Pass, Mapping[int, Any]] = {}
        self.reached: set[Pass] = set()  # the nodes and passes that ran

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        changed = self.changed.get((at.path, at.number))
        if changed is None:
            return None
        self.reached.add((at.path, at.number))
        copies = {i: v.clone() if isinstance(v, Tensor) else v for i, v in changed.items()}
        recorded = self.recorded[at.path, at.number]
        args, kwargs = _with_changed(recorded, (tuple(inputs), inputs.kwargs), copies)
        return Inputs(tuple(args), kwargs)


@dataclass(eq=False)
class SideRuns:
    """Runs with ops on the side, and runs whose receivers get the side results.

    It is also a context manager: the insertions that all cells need stay active while it lasts.
    """

    bended: BendedModule
    cells: _Cells
    still: PreservedState
    call: Call
    metric: Metric

    def __post_init__(self) -> None:
        cells, flow = self.cells, self.cells.flow
        aside = {
            flow.place(index): index
            for indices in cells.needed.values()
            for index in indices
            if not _is_element(flow.ops[index])
        }
        self._aside = _Aside(flow.ops, aside)
        ends = [end.spot for edges in cells.made.values() for end in edges.ends]
        inner = [spot for spot in ends if not spot.is_output]
        self._inputs = _InputReplacement(
            {(spot.path, spot.number): flow.arguments(spot) for spot in inner}
        )
        self._put: dict[str, Tensor] = {}
        self._group = InsertionGroup(self.bended)
        for where, what in (
            (sorted({NodePath(path) for path, _ in aside}), self._aside),
            (sorted({NodePath(spot.path) for spot in inner}), self._inputs),
        ):
            if where:
                self._group.make(where, what)
        outputs = {path for spot in ends if spot.is_output for path, _ in flow.outputs(spot)}
        for path in sorted(outputs):
            self._group.make(NodePath(path), partial(self._replacement, path))

    def __enter__(self) -> Self:
        self._group.insert_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._group.remove()

    def _replacement(self, path: str, value: Tensor) -> Tensor | None:
        given = self._put.get(path)
        return None if given is None else given.clone()

    def value(self, made: Edges, computed: dict[int, Tensor]) -> float:
        """Return the metric for some edges, and the values sent along them."""
        aside, given = self._aside, self._inputs
        aside.into, aside.values = made.into, dict(computed)
        self._run()
        changed: dict[Pass, dict[int, Any]] = {}
        for end in made.ends:
            values = {source: aside.value(source) for source in end.sources}
            if end.spot.is_output:
                for path, index in self.cells.flow.outputs(end.spot):
                    if index in values:
                        self._put[path] = values[index]
            else:
                changed[end.spot.path, end.spot.number] = values
        aside.into, aside.values = {}, {}
        given.changed, given.reached = changed, set()
        try:
            output = self._run()
        finally:
            self._put, given.changed = {}, {}
        if gone := changed.keys() - given.reached:
            path = min(gone)[0]
            raise SiteError(f"with other receivers patched, the run did not reach {path!r}", path)
        return number_of(self.metric, output)

    def _run(self) -> Any:
        copy = own_copy(self.call)
        self.still.rewind()
        try:
            return copy.to(self.bended)
        finally:
            self._aside.into = {}


def _pairs(recorded: Any, given: Any) -> list[tuple[Ref, Any]]:
    if type(recorded) is Ref:
        return [(recorded, given)]
    if type(recorded) in (tuple, list):
        return [pair for old, new in zip(recorded, given, strict=True) for pair in _pairs(old, new)]
    if type(recorded) is dict:
        return [pair for key, old in recorded.items() for pair in _pairs(old, given[key])]
    return []
