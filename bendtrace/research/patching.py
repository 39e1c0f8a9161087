"""Activation patching: values of one run put into another, site by site and part by part."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bendtrace._trace import Trace, trace
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, SiteError
from bendtrace.insert.leaves import assemble, describe, take_apart
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.where import Where
from bendtrace.log.path_views import Candidate
from bendtrace.module import bended_of
from bendtrace.python.checks import required_choice, required_int, required_number
from bendtrace.python.lazy import required
from bendtrace.research._sites import (
    Act,
    At,
    Beyond,
    Columns,
    Grid,
    Key,
    Metric,
    MissingCells,
    NoPart,
    Part,
    Seen,
    SiteRow,
    Sites,
    TwoRuns,
    ValueExchange,
    aliases_of,
    as_number,
    position_of,
    required_metric,
    scalar_of,
    site_list,
    unlike,
    why_differing,
)
from bendtrace.watch.draws import RandomStates

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
    first, patched, names = runs_in_order(direction)
    columns = Columns.of(positions, axis, heads, head, head_axis)
    measured, missed = required_metric(metric), MissingCells(missing, "replace", HINT)
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    items = site_list(sites)
    columns = columns.named(items, bended)
    with Sites(
        bended, items, calls, at=at, columns=columns, label="activation_patching"
    ) as model_sites:
        runs = [model_sites.measured(call, measured) for call in calls]
        seen = [values for _, values in runs]
        model_sites.settle(*seen)
        rows = model_sites.rows(*seen)
        source, target = seen[first], seen[patched]
        exchange = ValueExchange(source, target, names, missed)

        def cell(number: int, part: Part) -> float:
            row = rows[number]
            return exchange.cell(
                row, row.keys, part, lambda act: model_sites.run(calls[patched], act), measured
            )

        grid = columns.grid([row.name for row in rows], target, cell)
    return Patching(
        **grid, clean=runs[0][0], corrupted=runs[1][0], direction=direction, missing=missed.reasons
    )


def runs_in_order(direction: Any) -> tuple[int, int, tuple[str, str]]:
    """Return the numbers of the source and of the patched run, and their names in this order."""
    if required_choice("direction", direction, "denoise", "noise") == "denoise":
        return 0, 1, ("clean", "corrupted")
    return 1, 0, ("corrupted", "clean")


# The shapes of a run, without running it.


def scan(model: Any, inputs: Any) -> Trace:
    """Record a run that computes shapes and dtypes alone, on torch's device "meta".

    It needs no memory for weights or activations, and takes as long as the model's Python. nnsight
    has a function of this name. The model is not changed, and insertions are not called.

    Args:
        model: a module, or a `BendedModule` with one.
        inputs: its inputs; see `Call.of`.

    Returns:
        The trace, whose entries have shapes and no values.

    Raises:
        InputError: the model is not a module, or it reads a value, as `if x.sum() > 0` does. The
            attribute `bendtrace` of the error is the trace up to there.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU())
        >>> bt.workflows.scan(model, torch.ones(2, 4))["0"].shape
        (2, 9)
    """
    call, module = Call.of(inputs), getattr(model, "_bendtrace_model", model)
    if not isinstance(module, nn.Module):
        raise InputError(f"scan needs a module, whose weights it knows, not {module!r}")
    memo: dict[int, Any] = {}
    for part in module.modules():
        for each in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(each, Tensor):
                shape = torch.empty_like(each, device="meta")
                is_parameter = isinstance(each, nn.Parameter)
                memo[id(each)] = nn.Parameter(shape, each.requires_grad) if is_parameter else shape
    shadow = copy.deepcopy(module, memo)
    structure, parts = take_apart(tuple(call))
    moved = [part.to("meta") if isinstance(part, Tensor) else part for part in parts]
    args, kwargs = assemble(structure, moved)
    try:
        with torch.device("meta"):
            return trace(shadow, *args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        begun = getattr(error, "bendtrace", None)
        if "meta" not in str(error) or begun is None:
            raise
        refusal = InputError(
            f"the model reads a value, and a scan has none ({begun.why_live[-1]}): trace a run"
        )
        refusal.bendtrace = begun  # type: ignore[attr-defined]
        raise refusal from error


# Causal tracing: noise on the embeddings, and clean values restored elsewhere.


@dataclass(frozen=True, repr=False, eq=False)
class CausalTrace(Grid):
    """The result of causal tracing: the metric with each cell restored.

    Attributes:
        values: the mean metric over the samples of noise with each cell restored, with shape
            (sites, positions), or (sites, positions, heads) if heads are separate; float64, nan for
            missing cells.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) for the whole value.
        heads: the numbers of the heads; None where they are not separate.
        clean: the metric of the clean run.
        corrupted: the mean metric of the corrupted runs.
        corrupted_samples: the metric of each of them, with shape (samples,).
        samples: the metric of each cell with each noise, with shape (samples, sites, positions[,
            heads]).
        noise: standard deviation of the noise.
        window: the number of sites that were restored together.
        missing: why cells are nan, by name of the site.

    Example:
        >>> import torch, bendtrace as bt
        >>> embedding = torch.nn.Embedding.from_pretrained(torch.eye(4))
        >>> model = torch.nn.Sequential(embedding, torch.nn.Tanh())
        >>> tokens = torch.tensor([[0, 1, 2]])
        >>> found = bt.workflows.causal_tracing(
        ...     model, tokens, 1, ["1"], lambda out: out[0, 1, 1], where="0", samples=2
        ... )
        >>> found.effect
        tensor([[0., 1., 0.]], dtype=torch.float64)
        >>> found.sites, found.positions, found.samples.shape
        (('1',), (0, 1, 2), torch.Size([2, 1, 3]))
    """

    clean: float
    corrupted: float
    corrupted_samples: Tensor
    samples: Tensor
    noise: float
    window: int

    @property
    def effect(self) -> Tensor:
        """The indirect effect as a fraction of the total effect.

        The share of the way from the metric of the corrupted runs (0) to the metric of the clean
        one (1) that restoring covers, as the mean over the samples.
        """
        return self.indirect_effect / self.total_effect

    @property
    def indirect_effect(self) -> Tensor:
        """The change of the corrupted runs' metric through restoring, in the metric's units."""
        return self.values - self.corrupted

    @property
    def total_effect(self) -> float:
        """The loss of the metric through the noise."""
        return self.clean - self.corrupted

    def _title(self) -> str:
        window = "" if self.window == 1 else f", windows of {self.window} sites"
        return (
            f"CausalTrace ({len(self.samples)} samples of noise {self.noise:.4g}{window}): clean "
            f"{self.clean:.4g}, corrupted {self.corrupted:.4g}; effect (0 none, 1 all)"
        )


def causal_tracing(
    model: Callable[..., Any],
    inputs: Any,
    subject_positions: Any,
    sites: Any,
    metric: Callable[[Any], Any],
    *,
    where: Where,
    noise: float = 3.0,
    std: float | None = None,
    samples: int = 10,
    seed: int = 0,
    window: int = 1,
    positions: Any = "each",
    axis: int = 1,
    heads: int | None = None,
    head: Any = None,
    head_axis: int = -1,
    at: At = "output",
    missing: Literal["raise", "nan"] = "raise",
) -> CausalTrace:
    """Find out where a model keeps its knowledge of a subject.

    After Meng et al., "Locating and Editing Factual Associations in GPT" (2022): noise is added to
    the embedding of a subject; then the value of the clean run is restored, site by site and
    position by position. If that restores the output, the information passes through that cell.

    The model is called once without noise, and for each sample once with noise and once for each
    cell. These are separate calls, not rows of one batch, so that any inputs are possible, and the
    numbers equal those of a loop bit for bit. Each call starts with the same random numbers and
    buffers, which are restored at the end. The noise comes from its own generator.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        subject_positions: an int, a slice, or ints: the positions along `axis` that get noise.
        sites: the values to restore, as for `activation_patching`, in layer order.
        metric: a function from the model's output to a number, such as the probability of the
            right answer.
        where: the node whose output is the embedding that gets noise, as `interject` takes it. It
            has to run once.
        noise: standard deviation of the noise, in units of `std`.
        std: None: the (unbiased) standard deviation of the node's output in the clean run. Or a
            number: the deviation of the embeddings of a whole data set, or 1.0 for `noise` in
            absolute units.
        samples: the number of draws of noise.
        seed: seed of the noise. For each sample in turn, `torch.randn(shape, generator=generator)`
            is drawn on the CPU from `torch.Generator().manual_seed(seed)`, for the part of the
            embedding at the subject's positions, in its dtype (in float32 if that dtype is
            shorter).
        window: how many neighbours in the order of the sites are restored together: those with
            indices from `i - window // 2` up to, but not including, `i + (window + 1) // 2`.
        positions: as for `activation_patching`.
        axis: the axis of the positions, including those of the subject.
        heads: as for `activation_patching`.
        head: as for `activation_patching`.
        head_axis: as for `activation_patching`.
        at: "output" or "input", for the sites.
        missing: what to do if a value cannot be restored: "raise", or "nan" for a cell that any of
            the samples cannot restore.

    Returns:
        A `CausalTrace`: means in shape (sites, positions).

    Raises:
        SiteError: a value cannot be restored; it names the site.
        NodePathError: a site matches no node.
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> embedding = torch.nn.Embedding.from_pretrained(torch.eye(4))
        >>> model = torch.nn.Sequential(embedding, torch.nn.ReLU())
        >>> found = bt.workflows.causal_tracing(
        ...     model, torch.tensor([[0, 1, 2]]), 1, ["1"], lambda out: out[0, 1, 1],
        ...     where="0", samples=2,
        ... )
        >>> found.effect
        tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    columns = Columns.of(positions, axis, heads, head, head_axis)
    measured, missed = required_metric(metric), MissingCells(missing, "replace", HINT)
    subject = Part(position_of(subject_positions, "subject_positions"), axis)
    required_number("noise", noise)
    required_number("std", std, or_none=True)
    required_int("samples", samples, 1)
    required_int("window", window, 1)
    bended, call = bended_of(model), Call.of(inputs)
    items = site_list(sites)
    columns = columns.named(items, bended)
    with Sites(
        bended, items, [call], at=at, columns=columns, also=[where], label="causal_tracing"
    ) as model_sites:
        clean, clean_seen = model_sites.measured(call, measured)
        key, embedding = _embedding_of(clean_seen, len(items), where)
        scale = noise * (_std(embedding) if std is None else std)
        corrupted, grids = [], []
        rows: list[SiteRow] = []

        def cell_of(exchange: ValueExchange, corrupting: Act) -> Callable[[int, Part], float]:
            def run(restoring: Act) -> Any:
                def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                    noisy = corrupting(key, number, value)
                    return restoring(key, number, value) if noisy is None else noisy

                return model_sites.run(call, act)

            def cell(number: int, part: Part) -> float:
                together = rows[max(0, number - window // 2) : number + (window + 1) // 2]
                keys = list(dict.fromkeys(key for row in together for key in row.keys))
                return exchange.cell(rows[number], keys, part, run, measured)

            return cell

        for drawn in _noises(embedding, subject, where, scale, samples, seed):
            corrupting = _adding(key, drawn, subject)
            number, seen = model_sites.measured(call, measured, corrupting)
            corrupted.append(number)
            if not rows:
                model_sites.settle(clean_seen, seen)
                rows = model_sites.rows(clean_seen, seen)
            exchange = ValueExchange(clean_seen, seen, ("clean", "corrupted"), missed)
            names = [row.name for row in rows]
            grids.append(columns.grid(names, clean_seen, cell_of(exchange, corrupting)))
    every = torch.stack([grid["values"] for grid in grids])
    values = torch.tensor(corrupted, dtype=torch.float64)
    return CausalTrace(
        **grids[0] | {"values": every.mean(0)}, clean=clean, corrupted=values.mean().item(),
        corrupted_samples=values, samples=every, noise=scale, window=window,
        missing=missed.reasons,
    )  # fmt: skip


def _embedding_of(seen: Seen, number: int, where: Any) -> tuple[Key, Tensor]:
    label = describe_where(where)
    passes = [
        (key, value) for key, found in seen.items() if key[0] == number for value in found.values()
    ]
    if len(passes) != 1:
        reached = "nothing" if not passes else f"{len(passes)} passes of nodes"
        raise SiteError(
            f"where={label} has to match the one node that outputs the embedding, in its only "
            f"pass, but the clean run reached {reached}",
            label,
        )
    key, value = passes[0]
    if not value.is_floating_point():
        raise SiteError(f"noise cannot be added to {key[1]!r}, which has {value.dtype}", label)
    return key, value


def _std(value: Tensor) -> float:
    return (value.float() if value.dtype.itemsize < 4 else value).std().item()


def _noises(
    value: Tensor, subject: Part, where: Any, scale: float, samples: int, seed: int
) -> list[Tensor]:
    try:
        region = value[subject.index(value)]
    except NoPart as error:
        raise InputError(f"subject_positions: {error} at {where!r}") from None
    dtype = torch.float32 if value.dtype.itemsize < 4 else value.dtype
    generator = torch.Generator().manual_seed(seed)
    # One after the other, so that more samples begin with the same ones.
    draws = (
        torch.randn(region.shape, generator=generator, dtype=dtype) * scale for _ in range(samples)
    )
    return [drawn.to(value.device, value.dtype) for drawn in draws]


def _adding(key: Key, drawn: Tensor, subject: Part) -> Act:
    def act(at: Key, number: int, value: Tensor) -> Tensor | None:
        if at != key:
            return None
        made = value.clone()
        index = subject.index(value)
        made[index] = made[index] + drawn
        return made

    return act


# Attribution patching: a first-order estimate of activation patching, at all ops in one pass.

Passes = tuple[Key, int]
Gradients = dict[Passes, Tensor]
_ELSEWHERE = "halfway between the two values the model takes another path"
_WITHOUT = "its output has no gradient (no floating point tensor, detached, or under no_grad)"


@dataclass(frozen=True, repr=False, eq=False)
class Attribution(TwoRuns):
    """The result of attribution patching: an estimate for each cell.

    Attributes:
        values: the estimated change of the metric, with shape (sites, positions), or (sites,
            positions, heads) if heads are separate; float64, nan for positions that a site does not
            have, and for missing cells.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) for the whole value.
        heads: the numbers of the heads; None where they are not separate.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise" or "noise".
        total: for each site the sum over its whole value, with shape (sites,).
        tensors: for each site, by name, the estimate for each element of its value, with one tensor
            for each pass of each of its nodes; None without `keep_tensors`.
        missing: why cells are nan, by name of the site.

    Example:
        >>> import torch, bendtrace as bt
        >>> found = bt.workflows.attribution_patching(
        ...     lambda x: (x * 2).sin() * 3, torch.full((2,), 0.1), torch.zeros(2), None, torch.sum
        ... )
        >>> [(site, round(total, 3)) for site, total in found.top(2)]
        [('mul', 1.2), ('sin', 1.192)]
        >>> round(found.clean - found.corrupted, 3)
        1.192
    """

    total: Tensor
    tensors: dict[str, tuple[Tensor, ...]] | None

    _unit = "estimated change of the metric"

    @property
    def effect(self) -> Tensor:
        """The estimated change of the metric: `values`."""
        return self.values

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the sites with the largest absolute totals, and these totals."""
        order = self.total.nan_to_num(0.0).abs().argsort(descending=True)[:count].tolist()
        return [(self.sites[i], self.total[i].item()) for i in order]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each cell."""
        for row in super().rows():
            value = row.pop("effect")
            del row["value"]
            yield row | {"attribution": value}


def attribution_patching(
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
    steps: int | None = None,
    keep_tensors: bool = False,
    missing: Literal["raise", "nan"] | None = None,
) -> Attribution:
    """Estimate activation patching at many nodes from one backward pass.

    To first order, putting the clean value at a node into the corrupted run changes the metric by
    `((clean - corrupted) * gradient).sum()`, with the gradient of the metric at the node
    in the corrupted run (Nanda, "Attribution Patching", 2023). It is exact if the metric is a
    linear function of the node. It takes one run for each of the two inputs, and one backward pass.
    Two equal infinities, such as those of a mask, differ by 0.

    With `steps` the gradient is the mean of the gradients along the straight line from one value to
    the other (integrated gradients, Sundararajan et al. 2017, for each node separately, midpoint
    rule), and the total converges to the true change. It takes a run and a backward pass for each
    site and step.

    Gradients are recorded in every mode of the caller. Meanwhile frozen parameters and copies of
    the inputs require gradients. No `.grad` is written to.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        sites: as for `activation_patching`; None for every op whose output is a floating point
            tensor that the metric has a gradient for. Ops without support for insertions are left
            out. Each output tensor of an op with several is a separate site.
        metric: a differentiable function from the model's output to a tensor without dimensions.
        positions: as for `activation_patching`.
        axis: as for `activation_patching`.
        heads: as for `activation_patching`.
        head: as for `activation_patching`.
        head_axis: as for `activation_patching`.
        direction: "denoise": gradients in the corrupted run, clean values minus corrupted ones;
            "noise": the other way round.
        at: "output" or "input", for the sites.
        steps: None for one gradient; or the number of points on the line at which to take
            gradients.
        keep_tensors: whether to keep the estimate for each element, with the shapes of the values.
        missing: what to do with sites that the two runs reach differently, and with positions that
            do not exist: "raise" or "nan". The default is "nan" for `sites=None`, else "raise".

    Returns:
        An `Attribution`: sums over everything except positions and heads, with shape (sites,
        positions).

    Raises:
        SiteError: a value is missing; it names the site.
        NodePathError: a site matches no node.
        InputError: an argument is invalid, or no gradient reaches the metric.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return (x * 2).sin() * 3
        >>> bt.workflows.attribution_patching(
        ...     model, torch.full((1, 2), 0.1), torch.zeros(1, 2), None, metric=torch.sum,
        ...     positions="each",
        ... )
        Attribution (denoise): clean 1.192, corrupted 0; estimated change of the metric
                     0      1
          mul    0.600  0.600
          sin    0.596  0.596
          mul_1  0.596  0.596
    """
    order = runs_in_order(direction)
    columns = Columns.of(positions, axis, heads, head, head_axis)
    default = "nan" if sites is None else "raise"
    measured = required_metric(metric)
    missed = MissingCells(default if missing is None else missing, "attribute to")
    if steps is not None:
        required_int("steps", steps, 1)
    if sites is None and at != "output":
        raise InputError('sites=None selects the outputs of all ops: pass sites for at="input"')
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    items = [_every_op] if sites is None else site_list(sites)
    columns = columns.named(items, bended)
    # The metric depends on a part that an alias picks only if that is put back.
    puts = any(alias is not None and alias.pick for alias in aliases_of(items, bended))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _all_trainable(bended.model),
        Sites(
            bended, items, calls, at=at, label="attribution_patching", allow_none=sites is None,
            observes=steps is None and not puts, every_part=sites is None,
            columns=None if sites is None else columns,
        ) as model_sites,
    ):  # fmt: skip
        scores = _Scores(model_sites, measured, missed, calls, *order)
        scores.run(steps, sites is None, puts)
    names = [row.name for row in scores.rows]
    grid = columns.grid(names, scores.source, scores.cell)
    total = torch.tensor([scores.total(name) for name in names], dtype=torch.float64)
    kept = {name: tuple(scores.found.get(name, ())) for name in names} if keep_tensors else None
    return Attribution(
        **grid, clean=scores.base[0], corrupted=scores.base[1], direction=direction, total=total,
        tensors=kept, missing=missed.reasons,
    )  # fmt: skip


def _every_op(node: Candidate) -> bool:
    return bool(node.path) and not node.is_module


@contextmanager
def _all_trainable(model: Callable[..., Any]) -> Iterator[None]:
    """Have frozen parameters require gradients for a while, so that there are some everywhere."""
    frozen = [
        parameter
        for parameter in (model.parameters() if isinstance(model, nn.Module) else ())
        if not parameter.requires_grad
        and not parameter.is_inference()
        and parameter.is_floating_point()
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@dataclass(eq=False)
class _Scores:
    """Differences of two runs times gradients."""

    sites: Sites
    metric: Metric
    missing: MissingCells
    calls: tuple[Call, Call]
    first: int  # the number of the run that values would be taken from, and of the patched one
    patched: int
    names: tuple[str, str]
    rows: list[SiteRow] = field(default_factory=list)  # the sites
    # The metric of the clean and the corrupted run.
    base: tuple[float, float] = (math.nan, math.nan)
    # The values of the run that values would be taken from.
    source: Seen = field(default_factory=dict)
    target: Seen = field(default_factory=dict)
    # The estimates for each element, by name of the site.
    found: dict[str, list[Tensor]] = field(default_factory=dict)

    def run(self, steps: int | None, every_op: bool, puts: bool) -> None:
        sites, patched = self.sites, self.calls[self.patched]
        output, self.source = sites.seen(self.calls[self.first], with_gradients=True)
        start = as_number(scalar_of(self.metric, output))
        edges: dict[Passes, GradientEdge] = {}

        def note(key: Key, number: int, value: Tensor) -> Tensor | None:
            # The edge of now: what is written into the tensor later is another op.
            if value.requires_grad and value.is_floating_point():
                edges[key, number] = get_gradient_edge(value)
            return value.view_as(value) if puts else None

        output, self.target = sites.seen(patched, note, with_gradients=True)
        end = scalar_of(self.metric, output)
        del output
        base = start, as_number(end)
        self.base = base[self.first], base[self.patched]
        sites.settle(self.source, self.target)
        self.rows = sites.rows(self.source, self.target)
        gradients: Gradients = {}
        if steps is None or every_op:
            if not isinstance(end, Tensor) or not end.requires_grad:
                raise InputError(
                    "metric= returned a value that has no gradient: compute a tensor from the "
                    "output, without item(), detach() or argmax()"
                )
            gradients = _gradients(end, edges)
        if every_op:
            reached = {key for key, _ in gradients}
            self.rows = [row for row in self.rows if reached.issuperset(row.keys)]
        for row in self.rows:
            pairs = ((self.source.get(key), self.target.get(key)) for key in row.keys)
            why = next(filter(None, (why_differing(*pair, self.names) for pair in pairs)), "")
            if not why and steps is not None:
                gradients, why = self._integrated(row, patched, steps)
            elif not why and not {key for key, _ in edges}.issuperset(row.keys):
                why = _WITHOUT
            if why:
                self.missing.note(row.name, why)
                continue
            self.found[row.name] = [
                _difference(value, self.target[key][number]) * gradients[key, number]
                if (key, number) in gradients
                else torch.zeros_like(value)  # nothing leads from there to the metric
                for key in row.keys
                for number, value in self.source[key].items()
            ]

    def total(self, name: str) -> float:
        return math.fsum(map(_sum, self.found[name])) if name in self.found else math.nan

    def cell(self, number: int, part: Part) -> float:
        name = self.rows[number].name
        if name not in self.found:
            return math.nan
        try:
            return math.fsum(_sum(score[part.index(score)]) for score in self.found[name])
        except Beyond:
            return math.nan
        except NoPart as error:
            return self.missing.note(name, str(error))

    def _integrated(self, row: SiteRow, call: Call, steps: int) -> tuple[Gradients, str]:
        """Return the mean gradients along the line, or why there are none."""
        sums: Gradients = {}
        for step in range(steps):
            leaves: Gradients = {}
            flaws: list[str] = []
            weight = (step + 0.5) / steps

            def act(
                key: Key, number: int, value: Tensor,
                leaves: Gradients = leaves, flaws: list[str] = flaws, weight: float = weight,
            ) -> Tensor | None:  # fmt: skip
                if key not in row.keys:
                    return None
                given = self.source[key].get(number)
                before = self.target[key].get(number)
                if given is None or before is None or unlike(given, value):
                    flaws.append(_ELSEWHERE)
                elif not given.is_floating_point():
                    flaws.append(_WITHOUT)
                else:
                    leaf = torch.lerp(before, given, weight).requires_grad_()
                    leaves[key, number] = leaf
                    return leaf.clone()
                return None

            end = scalar_of(self.metric, self.sites.run(call, act, with_gradients=True))
            expected = sum(len(self.source[key]) for key in row.keys)
            if flaws or len(leaves) != expected:
                return {}, (flaws or [_ELSEWHERE])[0]
            if isinstance(end, Tensor) and end.requires_grad:
                for at, gradient in _gradients(end, leaves).items():
                    sums[at] = sums.get(at, torch.zeros_like(gradient)) + gradient
        return {at: gradient / steps for at, gradient in sums.items()}, ""


def _gradients(end: Tensor, of: dict[Passes, Any]) -> Gradients:
    made = torch.autograd.grad(end, list(of.values()), allow_unused=True) if of else ()
    return {at: gradient for at, gradient in zip(of, made, strict=True) if gradient is not None}


def _difference(source: Tensor, target: Tensor) -> Tensor:
    """Return the difference, which is 0 also for two infinities, such as those of a mask."""
    equal = source == target
    if source.dtype.itemsize < 4:  # most of it would be lost in the precision of the model
        source, target = source.float(), target.float()
    return (source - target).masked_fill(equal, 0.0)


def _sum(score: Tensor) -> float:
    return score.detach().cpu().sum(dtype=torch.float64).item()


# Attribution to the values of nodes, with the methods of captum (an extra).


class NodeFunction:
    """The output of a model as a function of the value of a node, as captum's methods take it.

    Each call runs the model with the inputs that it was made with, and replaces the value of the
    node. The value may have more rows than the inputs have examples, as when captum puts many
    points into one batch: then the model runs several times, each time with as many examples as the
    inputs have. So branches on a batch stay branches on this batch.

    As a context manager, it keeps the insertion in the model from call to call, which is faster.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        where: one node; see `BendedModule.interject`. Its first axis counts the examples.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        output: a function from the output of the model to a tensor with a row for each example, or
            one number; None for the output itself.
        at: whether the value is the output of the node, or its first input.

    Attributes:
        value: the value of the node for the inputs: (examples, ...), without gradients.
        index: the example of each row of `value`: (examples,). Pass it to captum as
            `additional_forward_args`, so that each row keeps its example if captum repeats rows.

    Raises:
        NodePathError: `where` matches no node.
        SiteError: it matches several, or a node that runs several times.
        InputError: the value has no rows of floating point numbers.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x, factor):
        ...     return x.exp() * factor
        >>> function = bt.workflows.NodeFunction(model, "exp", (torch.zeros(2, 1), 3.0))
        >>> function.value.flatten(), function(torch.tensor([[5.0], [7.0]])).flatten()
        (tensor([1., 1.]), tensor([15., 21.]))
    """

    value: Tensor
    index: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        where: Where,
        inputs: Any,
        *,
        output: Callable[[Any], Tensor] | None = None,
        at: At = "output",
    ) -> None:
        self._bended = bended_of(model)
        self._where = where
        self._call = Call.of(inputs)
        self._output = output
        self._at = at
        self._open: Sites | None = None
        self._stack = ExitStack()
        label = describe_where(where)
        with torch.no_grad(), self._sites() as sites:
            _, seen = sites.seen(self._call)
            keys = [key for row in sites.rows(seen) for key in row.keys]
        if len(keys) != 1 or len(seen[keys[0]]) != 1:
            found = ", ".join(f"{path} ({len(seen[n, path])} times)" for n, path in keys)
            raise SiteError(f"{label} stands for several values: {found}; name one of them", label)
        self._key = keys[0]
        (self.value,) = seen[self._key].values()
        if self.value.dim() == 0 or not self.value.is_floating_point():
            raise InputError(
                f"{label} is {describe(self.value)}, but rows of floating point numbers are needed"
            )
        self.index = torch.arange(len(self.value), device=self.value.device)

    def __call__(self, value: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the output of the model with another value at the node.

        Args:
            value: rows like those of `self.value`.
            index: the example that each row belongs to; None if there is a row for each example.

        Returns:
            A row of the output for each row; or, if the output is one number, a number for each
            run: (runs,).

        Raises:
            InputError: the rows have another shape, or the output is not a row for each example.
        """
        if index is None:
            index = self.index
        if value.shape[1:] != self.value.shape[1:] or len(value) != len(index):
            raise InputError(
                f"the value has shape {tuple(value.shape)} and {len(index)} examples, but "
                f"{describe_where(self._where)} is {describe(self.value)}"
            )
        if self._open is None:
            with self:
                return self(value, index)
        # The n-th row of an example goes into the n-th run.
        turns = torch.zeros_like(index)
        for example in range(len(self.index)):
            rows = index == example
            turns[rows] = torch.arange(int(rows.sum()), device=index.device)
        made: list[Tensor] = []
        order: list[Tensor] = []
        for turn in range(int(turns.max()) + 1 if len(turns) else 0):
            rows = (turns == turn).nonzero().flatten()
            # A new tensor, which the model may write to.
            given = self.value.index_copy(0, index[rows], value[rows].to(self.value.dtype))
            found = self._run(self._open, given)
            if found.dim():
                found, order = found[index[rows]], [*order, rows]
            made.append(found)
        if not order:
            return torch.stack(made)  # captum looks for the first of the outputs
        return torch.cat(made)[torch.cat(order).argsort()]

    def _run(self, sites: Sites, given: Tensor) -> Tensor:
        reached: list[int] = []

        def act(key: Key, number: int, value: Tensor) -> Tensor:
            why = unlike(given, value) if key == self._key and not reached else "another node"
            if why:
                raise SiteError(f"{key[1]}: where the value is replaced, it is {why}", key[1])
            reached.append(number)
            return given

        with RandomStates():  # the generators, which captum draws from between the runs
            found = sites.run(self._call, act)
        if not reached:
            raise SiteError(f"the run no longer reached {self._key[1]}", self._key[1])
        if self._output is not None:
            found = self._output(found)
        if not isinstance(found, Tensor) or (found.dim() and len(found) != len(self.index)):
            raise InputError(
                f"a row for each of the {len(self.index)} examples is needed, or one number, but "
                f"the output is {describe(found)}; pass output=, a function of it"
            )
        return found

    def _sites(self) -> Sites:
        return Sites(self._bended, [self._where], [self._call], at=self._at, label="NodeFunction")

    def __enter__(self) -> Self:
        self._open = self._stack.enter_context(self._sites())
        return self

    def __exit__(self, *error: object) -> None:
        self._open = None
        with RandomStates():
            self._stack.close()

    def __repr__(self) -> str:
        return f"<NodeFunction of {self._key[1]}: {describe(self.value)}>"


def attribute(
    model: Callable[..., Any],
    where: Where,
    inputs: Any,
    method: str | Callable[[Any], Any] = "IntegratedGradients",
    *,
    output: Callable[[Any], Tensor] | None = None,
    at: At = "output",
    **options: Any,
) -> Any:
    """Attribute an output of a model to the value of a node, with a method of captum.

    Args:
        model: as for `NodeFunction`.
        where: as for `NodeFunction`.
        inputs: as for `NodeFunction`.
        method: the name of a class in `captum.attr` that takes a function; or what makes the object
            from the function, such as a class, or `lambda f: NoiseTunnel(Saliency(f))`.
        output: as for `NodeFunction`.
        at: as for `NodeFunction`.
        **options: of the method's `attribute`, such as `target=` and `baselines=`.

    Returns:
        What captum returns: a tensor with the shape of the value.

    Raises:
        InputError: captum has no such method, or it needs the modules of a model.
        ImportError: captum is not installed.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.workflows.attribute(  # doctest: +SKIP
        ...     lambda x: x.exp().sum(-1), "exp", torch.zeros(1, 3), "InputXGradient"
        ... )
        tensor([[1., 1., 1.]])
    """
    methods = required("captum.attr", "attribute")
    make = getattr(methods, method, None) if isinstance(method, str) else method
    if not callable(make):
        raise InputError(f"method= has to be the name of a class in captum.attr, not {method!r}")
    needed = list(inspect.signature(make).parameters) if inspect.isclass(make) else []
    if {"model", "layer"} & set(needed):
        raise InputError(
            f"{make.__name__} needs the modules of a model, and not a function of the value of a "
            f"node: pass it bended.model, as in captum.attr.{make.__name__}({', '.join(needed)})"
        )
    if "additional_forward_args" in options:
        raise InputError("additional_forward_args are the inputs of the model: pass these")
    with NodeFunction(model, where, inputs, output=output, at=at) as function:
        value = function.value.clone().requires_grad_()
        return make(function).attribute(value, additional_forward_args=(function.index,), **options)
