"""Activation patching: values of one run put into another, site by site and part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bendtrace._checks import required_choice
from bendtrace.calls import Call, bended_of
from bendtrace.workflows._grids import (
    Columns,
    Missing,
    Part,
    TwoRuns,
    required_metric,
)
from bendtrace.workflows._sites import At, Exchange, Sites, listed_sites

Direction = Literal["denoise", "noise"]
HINT = " (missing='nan' uses nan for values that cannot be replaced)"


@dataclass(frozen=True, repr=False, eq=False)
class Patching(TwoRuns):
    """The result of activation patching: the metric with each cell patched.

    Attributes:
        values: the metric with each cell patched, with shape (sites, positions), or (sites,
            positions, heads) if heads are separate; float64, nan for missing cells.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) for the whole value.
        heads: the numbers of the heads; None where they are not separate.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise", values of the clean run in the corrupted one, or "noise".
        missing: why cells are nan, by name of the site.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return torch.relu(x) * torch.tensor([1.0, 3.0])
        >>> found = bt.workflows.activation_patching(
        ...     model, torch.ones(1, 2), torch.zeros(1, 2), ["relu"], torch.sum, positions="each"
        ... )
        >>> found
        Patching (denoise): clean 4, corrupted 0; effect (0 none, 1 all)
                    0      1
          relu  0.250  0.750
        >>> found.values
        tensor([[1., 3.]], dtype=torch.float64)
        >>> list(found.rows())[1]
        {'site': 'relu', 'position': '1', 'value': 3.0, 'effect': 0.75}
    """


def activation_patching(
    model: Callable[..., Any],
    clean: Any,
    corrupted: Any,
    sites: Any,
    metric: Callable[[Any], Any],
    *,
    positions: Any = None,
    axis: int = 1,
    heads: int | None = None,
    head: Any = None,
    head_axis: int = -1,
    direction: Direction = "denoise",
    at: At = "output",
    missing: Literal["raise", "nan"] = "raise",
) -> Patching:
    """Put values of one input's run into the run of another, one cell of a grid at a time.

    After Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis"
    (2020); the names of the directions are those of Heimersheim and Nanda, "How to use and
    interpret activation patching" (2024).

    The model is called once with each input, and once for each cell; all calls share their traces.
    Each call gets copies of the inputs, and starts with the same random numbers and buffers, which
    are restored at the end. Gradients are recorded if the caller has them enabled.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        sites: a list of nodes, each in any form that `BendedModule.interject` accepts. An item that
            matches several nodes becomes a row for each of them; a list of items becomes one row of
            nodes that are replaced together. A node with several passes is replaced in all of them,
            each by the same pass of the other run, unless the site names one (`"relu:2"`).
        metric: a function from the model's output to a number or a tensor without dimensions.
        positions: None for the whole activation, "each" for every position along `axis` at any of
            the sites (nan at sites with fewer positions), or positions: ints, slices, or groups of
            ints that are replaced together.
        axis: the axis of the positions.
        heads: the number of heads of the activation: consecutive slices of equal size along
            `head_axis`. Each is a separate cell.
        head: which of the heads; None for all.
        head_axis: the axis that consists of heads.
        direction: "denoise": put values of the clean run into the corrupted one (which values
            suffice to restore it?); "noise": the other way round (which values are necessary?).
        at: "output": the outputs of the nodes; "input": their first input tensors, such as the
            concatenated heads before the output projection of attention.
        missing: what to do if a value cannot be replaced, because one of the runs did not reach the
            node, or not as often, or the shapes differ, or the position does not exist: "raise", or
            "nan" in that cell, with the reason in `missing` of the result.

    Returns:
        A `Patching`: values with shape (sites, positions) or (sites, positions, heads).

    Raises:
        SiteError: a value cannot be replaced; it names the site.
        NodePathError: a site matches no node.
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return torch.relu(x) * torch.tensor([1.0, 10.0, 100.0])
        >>> bt.workflows.activation_patching(
        ...     model, torch.ones(1, 3), torch.zeros(1, 3), ["relu"],
        ...     metric=torch.sum, positions="each",
        ... )
        Patching (denoise): clean 111, corrupted 0; effect (0 none, 1 all)
                  0      1      2
          relu  0.009  0.090  0.901
    """
    first, patched, names = in_order(direction)
    columns = Columns.of(positions, axis, heads, head, head_axis)
    measured, missed = required_metric(metric), Missing(missing, "replace", HINT)
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    items = listed_sites(sites)
    with Sites(bended, items, calls, at=at, columns=columns, label="activation_patching") as there:
        runs = [there.measured(call, measured) for call in calls]
        seen = [values for _, values in runs]
        there.settle(*seen)
        rows = there.rows(*seen)
        source, target = seen[first], seen[patched]
        exchange = Exchange(source, target, names, missed)

        def cell(number: int, part: Part) -> float:
            row = rows[number]
            return exchange.cell(
                row, row.keys, part, lambda act: there.run(calls[patched], act), measured
            )

        grid = columns.grid([row.name for row in rows], target, cell)
    return Patching(
        **grid, clean=runs[0][0], corrupted=runs[1][0], direction=direction, missing=missed.reasons
    )


def in_order(direction: Any) -> tuple[int, int, tuple[str, str]]:
    """Return the numbers of the source and of the patched run, and their names in this order."""
    if required_choice("direction", direction, "denoise", "noise") == "denoise":
        return 0, 1, ("clean", "corrupted")
    return 1, 0, ("corrupted", "clean")
