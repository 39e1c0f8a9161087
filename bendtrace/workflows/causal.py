"""Causal tracing: noise on the embeddings, and clean values restored elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace._checks import required_int, required_number
from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.where import Where
from bendtrace.workflows._grids import (
    Columns,
    Grid,
    Missing,
    NoPart,
    Part,
    position_of,
    required_metric,
)
from bendtrace.workflows._sites import Act, At, Exchange, Key, Row, Seen, Sites, listed_sites
from bendtrace.workflows.patching import HINT


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

        How far restoring moves the metric from that of the corrupted runs (0) to that of the clean
        one (1), as the mean over the samples.
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
            number: that of the embeddings of a whole data set, or 1.0 for `noise` in absolute
            units.
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
    items = listed_sites(sites)
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
