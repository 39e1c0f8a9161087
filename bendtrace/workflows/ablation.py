"""Ablation: taking out what a module, an op, a head or a channel contributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from bendtrace.calls import Call, bended_of, required_bended
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.resolver import describe_where
from bendtrace.module import BendedModule
from bendtrace.workflows._ablation_values import How, Substitute, substitute_of
from bendtrace.workflows._grids import Grid, grid_of, required_missing
from bendtrace.workflows._metrics import number_of, required_metric
from bendtrace.workflows._parts import Beyond, Columns, NoPart, Part, position_of
from bendtrace.workflows._site_values import exchanged, first_exchanged
from bendtrace.workflows._sites import At, Key, Sites, listed_sites

__all__ = ["AblationStudy", "ablate", "ablation_study"]


def ablate(
    model: BendedModule,
    where: Any,
    how: How = "zero",
    *,
    heads: int | None = None,
    head: Any = None,
    head_axis: int = -1,
    channels: Any = None,
    axis: int = 1,
    at: At = "output",
    reference: Any = None,
    over: int | tuple[int, ...] = 0,
    seed: int = 0,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Take out what nodes give, or a part of it, from now on.

    Heads of attention are slices of what the output projection is given: `ablate(bended,
    "transformer.h.0.attn.c_proj", heads=12, head=3, at="input")`.

    Args:
        model: a `BendedModule`.
        where: at which nodes; what `BendedModule.interject` takes.
        how: what takes the place:

            - "zero";
            - "mean": the mean over the axes `over`, of what the node gives for `reference`, or if
              there is none in the present call, by itself for each node and pass;
            - "resample": what the node gives for another sample (axis 0): of the present call, in
              a cycle of all of them, so that none gets its own; or of `reference` (Chan et al.,
              "Causal Scrubbing", 2022);
            - a number or a tensor, which is broadcast to the part;
            - a function of the whole value, which gives another one of the same shape.
        heads: how many heads the value consists of, along `head_axis`.
        head: which are ablated: an int or ints; None for all.
        head_axis: the axis that is made of heads, one after the other.
        channels: which positions along `axis` are ablated: an int, a slice or ints; None for all.
        axis: their axis.
        at: "output": what the nodes give; "input": the first tensor that they are given.
        reference: for "mean", inputs, or a list or another iterable of inputs, such as a data
            loader, which is run through once, now, in bounded memory; sums are made in float64. A
            tuple is the arguments of one call. For "resample" inputs of one call.
        over: axes that the mean is taken over. 0 keeps a mean for each position; where samples
            differ in length, (0, 1).
        seed: for "resample": of the cycle, or the samples of the reference, which are drawn with
            `torch.Generator().manual_seed(seed)` anew in each call, so that all nodes, passes and
            calls with as many samples have the same.
        passes: in which passes of each node; see `BendedModule.interject`.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The insertion, which is also a context manager: `remove()`, `report()`.

    Raises:
        SiteError: what the nodes give has no such part.
        NodePathError: no node is meant.
        InputError: something given makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> with bt.workflows.ablate(bended, "relu", channels=1):
        ...     bended(x)
        tensor([[2., 1.],
                [4., 1.]])
        >>> with bt.workflows.ablate(bended, "relu", "mean"):
        ...     bended(x)
        tensor([[3., 5.],
                [3., 5.]])
        >>> with bt.workflows.ablate(bended, "relu", "resample", channels=0):
        ...     bended(x)
        tensor([[4., 3.],
                [2., 7.]])
    """
    model = required_bended(model, "an ablation")
    parts = _parts(channels, axis, heads, head, head_axis)
    _require_at(at)
    substitute = substitute_of(how, model, [where], at, reference, over, seed)
    kind = _InputAblation if at == "input" else _Ablation
    what = kind(substitute, parts, describe_where(where))
    return model.interject(where, what, passes=passes, every=every, allow_none=allow_none)


def _require_at(at: Any) -> None:
    if at not in ("output", "input"):
        raise InputError(f'at= is "output" or "input", not {at!r}')


def _parts(channels: Any, axis: Any, heads: Any, head: Any, head_axis: Any) -> list[Part]:
    position = None if channels is None else [position_of(channels, "channels")]
    columns = Columns.of(position, axis, heads, head, head_axis)
    return columns.parts(columns.settled(()))


class _Ablation(Interjection):
    """Puts a substitute in the place of parts of a value."""

    def __init__(self, substitute: Substitute, parts: list[Part], said: str) -> None:
        self._substitute = substitute
        self._parts = parts
        self._said = said
        self.self_contained = substitute.is_contained

    @property
    def label(self) -> str:
        """What reports call it."""
        return f"ablation ({self._substitute.name})"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Exchange the parts."""
        return exchanged(output, at.path, self._said, lambda value: self._without(at, value))

    def _without(self, at: NodePass, value: Tensor) -> Tensor:
        try:
            return self._substitute.put(at.path or "output", at.number, value, self._parts)
        except NoPart as error:
            raise SiteError(
                f"cannot ablate {at.path or 'the output'!r}: {error}", at.path
            ) from None


class _InputAblation(_Ablation):
    """The same for the first tensor that a node is given."""

    after = Interjection.after

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Exchange the parts."""
        return first_exchanged(inputs, at.path, lambda value: self._without(at, value))


@dataclass(frozen=True, repr=False, eq=False)
class AblationStudy(Grid):
    """What ablating one thing after the other has shown.

    Attributes:
        values: the metric with each cell ablated, in shape (sites, channels), or (sites, channels,
            heads) where heads were told apart; float64, nan where something is missing.
        sites: names of the sites.
        positions: the channels: ints, slices, groups of ints; (None,) where they were not told
            apart.
        heads: the numbers of the heads; None where they were not told apart.
        base: the metric of the model as it is.
        how: what took the place of values.
        missing: why cells are nan, by name of the site.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return torch.relu(x) * torch.tensor([1.0, 10.0])
        >>> study = bt.workflows.ablation_study(
        ...     model, torch.ones(1, 2), ["relu"], torch.sum, channels="each"
        ... )
        >>> study
        AblationStudy (zero): base 11; change of the metric
                     0        1
          relu  -1.000  -10.000
        >>> study.base, study.effect
        (11.0, tensor([[ -1., -10.]], dtype=torch.float64))
    """

    base: float
    how: str

    @property
    def effect(self) -> Tensor:
        """How much ablating changes the metric: that with it less that without."""
        return self.values - self.base

    def _title(self) -> str:
        return f"AblationStudy ({self.how}): base {self.base:.4g}; change of the metric"


def ablation_study(
    model: Callable[..., Any],
    inputs: Any,
    sites: Any,
    metric: Callable[[Any], Any],
    how: How = "zero",
    *,
    heads: int | None = None,
    head: Any = None,
    head_axis: int = -1,
    channels: Any = None,
    axis: int = 1,
    at: At = "output",
    reference: Any = None,
    over: int | tuple[int, ...] = 0,
    seed: int = 0,
    missing: Literal["raise", "nan"] = "raise",
) -> AblationStudy:
    """Ablate one thing after the other, and see what that does to a metric.

    The model is called once as it is, and once for each site, channel and head; each call is given
    copies of the inputs, and begins with the same random numbers and buffers, which are put back
    in the end.

    Args:
        model: a module, a function, or a `BendedModule`, with what is inserted in it.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        sites: as for `activation_patching`.
        metric: a function of the model's output that gives a number.
        how: as for `ablate`.
        heads: as for `ablate`; here each head is a cell of its own.
        head: which of them.
        head_axis: the axis that is made of heads.
        channels: None for all together, "each", or channels: ints, slices, or groups of ints, each
            of which is a cell of its own.
        axis: their axis.
        at: "output" or "input".
        reference: as for `ablate`.
        over: as for `ablate`.
        seed: as for `ablate`.
        missing: what is done with channels and heads that are not there: "raise", or "nan".

    Returns:
        An `AblationStudy`: values in shape (sites, channels) or (sites, channels, heads).

    Raises:
        SiteError: no run came by a site, or it has no such part.
        NodePathError: a site means no node.
        InputError: something given makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return torch.relu(x) * 10 + torch.tanh(x)
        >>> bt.workflows.ablation_study(model, torch.ones(1, 2), ["relu", "mul", "tanh"], torch.sum)
        AblationStudy (zero): base 21.52; change of the metric
          relu  -20.000
          mul   -20.000
          tanh   -1.523
    """
    columns = Columns.of(channels, axis, heads, head, head_axis)
    measured, lenient = required_metric(metric), required_missing(missing)
    _require_at(at)
    bended, call = bended_of(model), Call.of(inputs)
    items = listed_sites(sites)
    substitute = substitute_of(how, bended, items, at, reference, over, seed)
    reasons: dict[str, str] = {}
    with Sites(bended, items, [call], at=at, label="ablation_study") as there:
        output, seen = there.seen(call)
        base = number_of(measured, output)
        del output
        there.settle(seen)
        rows = there.rows(seen)

        def cell(number: int, part: Part) -> float:
            row = rows[number]

            def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                if key not in row.keys:
                    return None
                return substitute.put(key[1], number, value, [part])

            try:
                return number_of(measured, there.run(call, act))
            except Beyond:
                return math.nan
            except NoPart as error:
                if lenient == "raise":
                    raise SiteError(f"cannot ablate {row.name!r}: {error}", row.name) from None
                reasons.setdefault(row.name, str(error))
                return math.nan

        values, where, which = grid_of(rows, columns, seen, cell)
    named = tuple(row.name for row in rows)
    return AblationStudy(values, named, where, which, base, substitute.name, missing=reasons)
