"""Path patching: what one node contributes to another along some edges, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bendtrace.calls import Call, bended_of
from bendtrace.still import Still
from bendtrace.workflows._copies import own_copy
from bendtrace.workflows._grids import frame, required_missing, table
from bendtrace.workflows._metrics import number_of, required_metric
from bendtrace.workflows._parts import Columns
from bendtrace.workflows._path_cells import Cells, Plan
from bendtrace.workflows._path_edges import Flow
from bendtrace.workflows._path_runs import Runs
from bendtrace.workflows._sites import At, Sites
from bendtrace.workflows.patching import Direction, required_direction

if TYPE_CHECKING:
    import pandas

__all__ = ["PathPatching", "path_patching"]


@dataclass(frozen=True, repr=False, eq=False)
class PathPatching:
    """What path patching has shown.

    Attributes:
        values: the metric, in shape (senders, receivers), or (senders, receivers, heads) where the
            senders' heads were told apart; float64. Where no path leads from the one to the other,
            that of the run that is patched.
        edges: how many edges each sender's change was let along, in shape (senders, receivers).
        senders: their names.
        receivers: their names.
        heads: numbers of the heads; None where they were not told apart.
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
        """How far each cell takes the metric from the run that is patched (0) to the other (1)."""
        start, end = self.corrupted, self.clean
        if self.direction == "noise":
            start, end = end, start
        return (self.values - start) / (end - start)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each cell."""
        heads = (None,) if self.heads is None else self.heads
        numbers = zip(self.values.flatten().tolist(), self.effect.flatten().tolist(), strict=True)
        for (sender, receiver, head), (value, effect) in zip(
            product(self.senders, self.receivers, heads), numbers, strict=True
        ):
            row: dict[str, Any] = {"sender": sender, "receiver": receiver}
            if self.heads is not None:
                row["head"] = head
            yield row | {"value": value, "effect": effect}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each cell: sender, receiver, head (where there are such), value, effect.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame(list(self.rows()))

    def __repr__(self) -> str:
        heads = (None,) if self.heads is None else self.heads
        columns = [
            f"to {receiver}" + ("" if head is None else f", head {head}")
            for receiver, head in product(self.receivers, heads)
        ]
        title = (
            f"PathPatching ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; effect (0 none, 1 all)"
        )
        return table(title, columns, self.senders, self.effect.flatten(1))


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
    """Patch one node's contribution to another, along edges of the op graph, and nothing else.

    After Wang et al., "Interpretability in the Wild" (2022), and Goldowsky-Dill et al., "Localizing
    Model Behavior with Path Patching" (2023), for any graph of ops. One run is patched, with values
    of the other. For each sender and receiver:

    1. Among the data edges of the run that is patched, as the networkx mirror has them, some are
       chosen; see `paths`.
    2. That run is repeated, and the ops that the chosen edges lead to are carried out once more
       aside: with the sender's value of the other run, and with what was found aside, on the chosen
       edges, and with the run's own values on all others. Branches, sizes and random numbers are
       those of the run.
    3. It is repeated again. The receiver is given what was found aside on the chosen edges that
       lead to it. From there on the model goes its own way, and the metric is taken of the output.

    Args:
        model: a module, a function, or a `BendedModule`. Along the paths nothing may be inserted.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        senders: nodes, as the sites of `activation_patching`: each is a row; a list is one row.
        receivers: nodes: ops, calls of modules, or `"output"`, what the model gives, or a part of
            that, `"output|logits"`. Each is a column; a list is one column, of receivers that are
            patched together.
        metric: a function of the model's output that gives a number.
        paths: which edges are chosen:

            - "direct": those from the sender to the receiver;
            - "all": those on all paths from the sender to the receiver;
            - paths: each a sequence of nodes, the first a sender and the last a receiver, such that
              from each an edge leads to the next. A module stands for all ways through it.

            An edge may be that of an element (`split|sub_0`) of what a node gives. What is chosen
            is a set of edges: of two paths that cross, parts of both together are a path as well.
        frozen: for "all", nodes that keep their values: no path leads through them. In Wang et al.
            all heads of attention (and the MLPs, if only what goes by the residual is wanted).
        heads: of how many heads the senders' values consist; each is exchanged by itself.
        head: which of them; None for all.
        head_axis: the axis that is made of heads, one after the other.
        direction: "denoise": the corrupted run is patched, with values of the clean one; "noise":
            the other way round, as in these papers.
        at: "output": the senders' values are what they give. "input": the first tensor that they
            are given, and for them alone; with that a projection of attention has its heads as
            senders.
        missing: what is done where a sender's value cannot be exchanged, since the runs differ:
            "raise", or "nan".

    Returns:
        A `PathPatching`: values in shape (senders, receivers) or (senders, receivers, heads).

    Raises:
        SiteError: something cannot be exchanged, there is no such path, or an op on the way cannot
            be carried out aside: numbers that Python computes with, writes into parts of tensors.
        NodePathError: something means no node.
        InputError: something given makes no sense.

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
    required_direction(direction)
    columns = Columns.of(None, 1, heads, head, head_axis)
    measured, lenient = required_metric(metric), required_missing(missing)
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    if direction == "noise":
        calls = calls[1], calls[0]
    names = ("clean", "corrupted") if direction == "denoise" else ("corrupted", "clean")
    plan = Plan(senders, receivers, paths, frozen)
    with Sites(
        bended, plan.senders, calls, at=at, noted=plan.noted, label="path_patching"
    ) as there:
        source_output, source = there.seen(calls[0])
        target_output, target = there.seen(calls[1])
        base = number_of(measured, source_output), number_of(measured, target_output)
        del source_output, target_output
        rows = there.rows(source, target)
        places = there.places
    with Still(bended.model) as still:
        trace = bended.trace(*(copy := own_copy(calls[1])).args, **copy.kwargs)
        trace.output = None
        still.rewind()
        flow = Flow(trace)
        cells = Cells(flow, plan, rows, places, source, target, names, at == "input")
        parts = columns.parts((None,))
        with Runs(bended, flow, cells, still, calls[1], measured) as runs:
            found = [
                [[cells.value(runs.value, i, j, part, base[1], lenient) for part in parts]
                 for j in range(len(plan.receivers))]
                for i in range(len(rows))
            ]  # fmt: skip
    values = torch.tensor(found, dtype=torch.float64)
    if columns.heads is None:
        values = values.squeeze(-1)
    base = base if direction == "denoise" else (base[1], base[0])
    return PathPatching(
        values, cells.edges(), tuple(row.name for row in rows), tuple(plan.names),
        None if columns.heads is None else columns.which, *base, direction, cells.reasons,
    )  # fmt: skip
