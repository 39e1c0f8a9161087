"""Path patching: the contribution of one node to another along some edges only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace.calls import Call, bended_of, own_copy
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.resolver import describe_where
from bendtrace.preserved_state import PreservedState
from bendtrace.workflows._grids import (
    Columns,
    Missing,
    NoPart,
    Part,
    Table,
    effect_of,
    required_metric,
)
from bendtrace.workflows._path_edges import Edges, Flow, Spot
from bendtrace.workflows._path_runs import Runs
from bendtrace.workflows._sites import At, Row, Seen, Sites, differing, listed_sites
from bendtrace.workflows.patching import Direction, in_order

Places = dict[tuple[int, str], list[int]]  # the passes of nodes, by item and path


@dataclass(frozen=True, repr=False, eq=False)
class PathPatching(Table):
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

    @property
    def effect(self) -> Tensor:
        """How far each cell moves the metric from the patched run (0) to the other one (1)."""
        return effect_of(self.values, self.clean, self.corrupted, self.direction)

    _between = ", "

    def _axes(self) -> dict[str, Sequence[Any]]:
        axes: dict[str, Sequence[Any]] = {"sender": self.senders, "receiver": self.receivers}
        return axes if self.heads is None else axes | {"head": self.heads}

    def _title(self) -> str:
        return (
            f"PathPatching ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; effect (0 none, 1 all)"
        )


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
    first, patched, names = in_order(direction)
    columns = Columns.of(None, 1, heads, head, head_axis)
    measured, missed = required_metric(metric), Missing(missing, "send")
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    plan = _Plan(senders, receivers, paths, frozen)
    with Sites(
        bended, plan.senders, (calls[first], calls[patched]), at=at, noted=plan.noted,
        label="path_patching", columns=columns,
    ) as there:  # fmt: skip
        base, source = there.measured(calls[first], measured)
        start, target = there.measured(calls[patched], measured)
        rows = there.rows(source, target)
        places = there.places
    with PreservedState(bended.model) as still:
        trace = bended.trace(*(copy := own_copy(calls[patched])).args, **copy.kwargs)
        trace.output = None
        still.rewind()
        flow = Flow(trace)
        cells = _Cells(flow, plan, rows, places, (source, target), names, at == "input")
        parts = columns.parts((None,))
        with Runs(bended, flow, cells.needed, cells.made, still, calls[patched], measured) as runs:
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
        columns.chosen_heads, both[first], both[patched], direction, missed.reasons,
    )  # fmt: skip


class _Plan:
    """The senders, the receivers, and the paths between them, as they were given.

    Attributes:
        noted: all places in the model besides the senders.
    """

    def __init__(self, senders: Any, receivers: Any, paths: Any, frozen: Any) -> None:
        self.senders = listed_sites(senders, "senders")
        self.receivers = listed_sites(receivers, "receivers")
        self.names = [_name(item) for item in self.receivers]
        self.paths: Any = paths
        self.noted: list[Any] = list(self.receivers)
        self._frozen = range(0)
        self._nodes: list[range] = []
        if isinstance(paths, str):
            if paths not in ("direct", "all"):
                raise InputError(
                    f'paths= has to be "direct", "all" or a list of paths, not {paths!r}'
                )
        else:
            for path in listed_sites(paths, "paths"):
                if not isinstance(path, (list, tuple)) or len(path) < 2:
                    raise InputError(
                        "a path has to be a sequence of nodes, from a sender to a receiver, "
                        f"not {path!r}"
                    )
                self._nodes.append(self._add(list(path)))
        if frozen is not None:
            if paths != "all":
                raise InputError('frozen= is only for paths="all": it names nodes that paths avoid')
            self._frozen = self._add(listed_sites(frozen, "frozen"))

    def _add(self, items: list[Any]) -> range:
        first = len(self.senders) + len(self.noted)
        self.noted += items
        return range(first, first + len(items))

    def spots(self, flow: Flow, places: Places, number: int) -> list[Spot]:
        """Return the nodes of a noted item, pass by pass."""
        return [
            flow.spot(path, one)
            for (known, path), numbers in places.items()
            if known == number
            for one in numbers
        ]

    def frozen(self, flow: Flow, places: Places) -> list[Spot]:
        """Return the nodes that no path leads through."""
        return [spot for number in self._frozen for spot in self.spots(flow, places, number)]

    def ways(self, flow: Flow, places: Places) -> list[list[list[Spot]]]:
        """Return the nodes of the paths, each with its passes."""
        return [[self.spots(flow, places, number) for number in path] for path in self._nodes]


def _name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple, set, frozenset)):
        return " + ".join(map(_name, item))
    return describe_where(item)


class _Cells:
    """The edges of each sender and receiver, and the values that are sent along them.

    Args:
        flow: the patched run.
        plan: the senders, receivers and paths, as they were given.
        rows: the senders.
        places: the passes of all noted nodes.
        seen: the senders' values in the run that values are taken from, and in the patched run.
        names: what these runs are called.
        within: whether the inputs of the senders are changed, and not their outputs.

    Attributes:
        made: the edges, by sender and receiver.
        needed: the ops that run on the side for them.
    """

    def __init__(
        self,
        flow: Flow,
        plan: _Plan,
        rows: Sequence[Row],
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
        self.made: dict[tuple[int, int], Edges] = {}
        self.needed: dict[tuple[int, int], list[int]] = {}
        self._flaws: dict[int, str] = {}
        self._used: set[int] = set()
        ends = [
            plan.spots(flow, places, len(plan.senders) + number)
            for number in range(len(plan.receivers))
        ]
        for said, spots in zip(plan.names, ends, strict=True):
            if not spots:
                raise SiteError(f"the patched run did not reach {said!r}", said)
            if len(spots) > 1 and any(spot.is_output for spot in spots):
                raise InputError("the model's output cannot be combined with other receivers")
        frozen, ways = plan.frozen(flow, places), plan.ways(flow, places)
        for spot in frozen:
            flow.require_own(spot)
        for i, row in enumerate(rows):
            for key in row.keys:
                if why := differing(self._source.get(key), self._target.get(key), names):
                    self._flaws.setdefault(i, f"{key[1]}: {why}")
            if i not in self._flaws:
                senders = [flow.spot(key[1], n) for key in row.keys for n in self._target[key]]
                for j in range(len(plan.receivers)):
                    self._connect(i, j, senders, ends[j], frozen, ways)
        self._require_all_used(ways)

    def _connect(
        self,
        i: int,
        j: int,
        senders: list[Spot],
        ends: list[Spot],
        frozen: list[Spot],
        ways: list[list[list[Spot]]],
    ) -> None:
        flow = self.flow
        for spot in senders:
            flow.require_own(spot)
        made, carried = flow.begin(senders, self._within)
        if self._plan.paths == "direct":
            flow.direct(made, carried, ends)
        elif self._plan.paths == "all":
            flow.every(made, carried, ends, frozen)
        else:
            for number, way in enumerate(ways):
                if set(way[0]) <= set(senders) and set(way[-1]) <= set(ends):
                    begun, values = flow.begin(way[0], self._within)
                    for index, sources in begun.into.items():
                        made.into.setdefault(index, set()).update(sources)
                    flow.along(made, values, way)
                    self._used.add(number)
        self.made[i, j] = made
        self.needed[i, j] = flow.needed(made)

    def _require_all_used(self, ways: list[list[list[Spot]]]) -> None:
        """Refuse paths and edges that lead nowhere."""
        if self._plan.paths == "all" or self._flaws:
            return
        for number, way in enumerate(ways):
            if number not in self._used:
                told = " to ".join(repr(spots[0].path) if spots else "nothing" for spots in way)
                raise SiteError(
                    f"the path {told} does not begin with one of the senders, or does not end "
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
        return torch.tensor([
            [self._count(i, j) for j in range(len(self._plan.receivers))]
            for i in range(len(self._rows))
        ])  # fmt: skip

    def _count(self, i: int, j: int) -> int:
        made = self.made.get((i, j))
        if made is None:
            return 0
        inner = sum(len(made.into[index]) for index in self.needed[i, j])
        return inner + sum(len(end.sources) for end in made.ends)

    def value(self, runs: Runs, i: int, j: int, part: Part, base: float, missing: Missing) -> float:
        """Return the metric with a part of one sender's change sent to one receiver.

        Args:
            runs: returns the metric for some edges, and for the values that begin along them.
            i: the sender.
            j: the receiver.
            part: the part of the sender's value that is changed.
            base: the metric where no path leads from the one to the other.
            missing: what happens where the runs differ.
        """
        why = self._flaws.get(i, "")
        if not why:
            try:
                known = self._changed(i, part)
            except NoPart as error:
                why = str(error)
            else:
                return runs.value(self.made[i, j], known) if self.made[i, j].ends else base
        return missing.note(self._rows[i].name, why)

    def _changed(self, i: int, part: Part) -> dict[int, Tensor]:
        """Return the changed values that a cell begins with, by their ops."""
        found: dict[int, Tensor] = {}
        for key in self._rows[i].keys:
            for number, value in self._target[key].items():
                spot = self.flow.spot(key[1], number)
                made = part.put(value, self._source[key][number])
                found[self.flow.given(spot) if self._within else self.flow.tensor_of(spot)] = made
        return found
