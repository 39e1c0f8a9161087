"""Activation patching: values of one run put into another, site by site and part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError
from bendtrace.workflows._grids import Exchange, Grid, grid_of, required_missing
from bendtrace.workflows._metrics import number_of, required_metric
from bendtrace.workflows._parts import Columns, Part
from bendtrace.workflows._sites import At, Sites, listed_sites

__all__ = ["Direction", "Patching", "activation_patching"]

Direction = Literal["denoise", "noise"]


@dataclass(frozen=True, repr=False, eq=False)
class Patching(Grid):
    """What activation patching has shown.

    Attributes:
        values: the metric with each cell patched, in shape (sites, positions), or (sites,
            positions, heads) where heads were told apart; float64, nan where something is missing.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) where the whole was meant.
        heads: the numbers of the heads; None where they were not told apart.
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

    clean: float
    corrupted: float
    direction: Direction

    @property
    def effect(self) -> Tensor:
        """How far each cell takes the metric from the one run to the other.

        0: it stays what it is in the run that is patched; 1: it becomes what it is in the run that
        the values come from. nan or inf where both runs have the same metric.
        """
        start, end = self.corrupted, self.clean
        if self.direction == "noise":
            start, end = end, start
        return (self.values - start) / (end - start)

    def _title(self) -> str:
        return (
            f"Patching ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; effect (0 none, 1 all)"
        )


def required_direction(direction: Any) -> None:
    """Refuse what is no direction.

    Raises:
        InputError: it is none.
    """
    if direction not in ("denoise", "noise"):
        raise InputError(f'direction= is "denoise" or "noise", not {direction!r}')


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
    """Put what nodes gave for one input into the run of another, one cell of a grid at a time.

    After Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis"
    (2020); the directions are called as in Heimersheim and Nanda, "How to use and interpret
    activation patching" (2024).

    The model is called twice to begin with, and once for each cell; all calls go along the same
    traces. Each call is given copies of the inputs, and begins with the same random numbers and
    buffers, which are put back in the end. Gradients are recorded if the caller has them on.

    Args:
        model: a module, a function, or a `BendedModule`, with what is inserted in it.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        sites: where: several of what `BendedModule.interject` takes. Something that means several
            nodes is a row for each of them; a list of sites is one row, of nodes that are exchanged
            together. A node that has several passes is exchanged in all of them, each for the same
            pass of the other run, unless the site names one (`"relu:2"`).
        metric: a function of the model's output that gives a number or a tensor without dimensions.
        positions: None for the whole activation, "each" for every position there is along `axis` at
            any of the sites (nan at sites that have fewer), or positions: ints, slices, or groups
            of ints that are exchanged together.
        axis: the axis of the positions.
        heads: how many heads the activation consists of: that many slices of the same size, one
            after the other, along `head_axis`. Each is a cell of its own.
        head: which of the heads; None for all.
        head_axis: the axis that is made of heads.
        direction: "denoise": values of the clean run are put in the corrupted one (which suffice to
            restore it?); "noise": the other way round (which are needed?).
        at: "output": what the nodes give; "input": the first tensor that they are given, such as
            the heads' results, side by side, that the output projection of attention is given.
        missing: what is done where a value cannot be exchanged, since one of the runs did not come
            by the node, or as often, or the shapes differ, or there is no such position: "raise",
            or "nan" in that cell, and the reason in `missing` of the result.

    Returns:
        A `Patching`: values in shape (sites, positions) or (sites, positions, heads).

    Raises:
        SiteError: something cannot be exchanged; it names the site.
        NodePathError: a site means no node.
        InputError: something given makes no sense.

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
    required_direction(direction)
    columns = Columns.of(positions, axis, heads, head, head_axis)
    measured, lenient = required_metric(metric), required_missing(missing)
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    items = listed_sites(sites)
    with Sites(bended, items, calls, at=at, label="activation_patching") as there:
        (clean_output, clean_seen), (corrupted_output, corrupted_seen) = map(there.seen, calls)
        base = number_of(measured, clean_output), number_of(measured, corrupted_output)
        del clean_output, corrupted_output
        there.settle(clean_seen, corrupted_seen)
        rows = there.rows(clean_seen, corrupted_seen)
        source, target, names = clean_seen, corrupted_seen, ("clean", "corrupted")
        patched = calls[1]
        if direction == "noise":
            source, target, names = corrupted_seen, clean_seen, ("corrupted", "clean")
            patched = calls[0]
        exchange = Exchange(source, target, names, lenient)

        def cell(number: int, part: Part) -> float:
            row = rows[number]
            run = lambda act: there.run(patched, act)  # noqa: E731
            return exchange.cell(row, row.keys, part, run, measured)

        values, where, which = grid_of(rows, columns, target, cell)
    named = tuple(row.name for row in rows)
    return Patching(values, named, where, which, *base, direction, missing=exchange.reasons)
