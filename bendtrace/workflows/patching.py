"""Activation patching: values of one run put into another, site by site and part by part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bendtrace._checks import required_choice, required_int, required_number
from bendtrace._trace import Trace, trace
from bendtrace.calls import Call
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.interject.where import Where
from bendtrace.module import bended_of
from bendtrace.workflows._sites import (
    Act,
    At,
    Columns,
    Exchange,
    Grid,
    Key,
    Missing,
    NoPart,
    Part,
    Row,
    Seen,
    Sites,
    TwoRuns,
    position_of,
    required_metric,
    site_list,
)

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
    items = site_list(sites)
    columns = columns.named(items, bended)
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


# The shapes of a run, without running it.


def scan(model: Any, inputs: Any) -> Trace:
    """Record a run that computes shapes and dtypes alone, on torch's device "meta".

    It needs no memory for weights or activations, and takes as long as the model's Python. nnsight
    has a function of this name. The model is not changed, and what is inserted is not called.

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
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

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
    measured, missed = required_metric(metric), Missing(missing, "replace", HINT)
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
    ) as there:
        clean, clean_seen = there.measured(call, measured)
        key, embedding = _embedding_of(clean_seen, len(items), where)
        scale = noise * (_std(embedding) if std is None else std)
        corrupted, grids = [], []
        rows: list[Row] = []

        def cell_of(exchange: Exchange, corrupting: Act) -> Callable[[int, Part], float]:
            def run(restoring: Act) -> Any:
                def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                    noisy = corrupting(key, number, value)
                    return restoring(key, number, value) if noisy is None else noisy

                return there.run(call, act)

            def cell(number: int, part: Part) -> float:
                together = rows[max(0, number - window // 2) : number + (window + 1) // 2]
                keys = list(dict.fromkeys(key for row in together for key in row.keys))
                return exchange.cell(rows[number], keys, part, run, measured)

            return cell

        for drawn in _noises(embedding, subject, where, scale, samples, seed):
            corrupting = _adding(key, drawn, subject)
            number, seen = there.measured(call, measured, corrupting)
            corrupted.append(number)
            if not rows:
                there.settle(clean_seen, seen)
                rows = there.rows(clean_seen, seen)
            exchange = Exchange(clean_seen, seen, ("clean", "corrupted"), missed)
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
    said = describe_where(where)
    passes = [
        (key, value) for key, found in seen.items() if key[0] == number for value in found.values()
    ]
    if len(passes) != 1:
        reached = "nothing" if not passes else f"{len(passes)} passes of nodes"
        raise SiteError(
            f"where={said} has to match the one node that outputs the embedding, in its only "
            f"pass, but the clean run reached {reached}",
            said,
        )
    key, value = passes[0]
    if not value.is_floating_point():
        raise SiteError(f"noise cannot be added to {key[1]!r}, which has {value.dtype}", said)
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
