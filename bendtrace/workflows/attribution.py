"""Attribution patching: what activation patching would do, to first order, at all ops at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError, SiteError
from bendtrace.paths.candidates import Candidate
from bendtrace.workflows._grids import Grid, grid_of, required_missing
from bendtrace.workflows._metrics import Metric, required_metric, scalar_of
from bendtrace.workflows._parts import Beyond, Columns, NoPart, Part
from bendtrace.workflows._site_values import differing, unlike
from bendtrace.workflows._sites import At, Key, Row, Seen, Sites, listed_sites
from bendtrace.workflows.patching import Direction, required_direction

__all__ = ["Attribution", "attribution_patching"]

# For each node the gradient in each pass.
Gradients = dict[Key, dict[int, Tensor]]


@dataclass(frozen=True, repr=False, eq=False)
class Attribution(Grid):
    """What attribution patching has shown.

    Attributes:
        values: the estimated change of the metric, in shape (sites, positions), or (sites,
            positions, heads) where heads were told apart; float64, nan where a site has no such
            position, or something is missing.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) where the whole was meant.
        heads: the numbers of the heads; None where they were not told apart.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise" or "noise".
        total: for each site the sum over all that it gives, in shape (sites,).
        tensors: for each site, by name, what there is of each element of its value, with a tensor
            for each pass of each of its nodes; None unless it was asked for.
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

    clean: float
    corrupted: float
    direction: Direction
    total: Tensor
    tensors: dict[str, tuple[Tensor, ...]] | None

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the sites with the largest totals, whatever their sign, and these."""
        order = self.total.nan_to_num(0.0).abs().argsort(descending=True)[:count].tolist()
        return [(self.sites[i], self.total[i].item()) for i in order]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each cell."""
        for row in super().rows():
            value = row.pop("effect")
            del row["value"]
            yield row | {"attribution": value}

    def _title(self) -> str:
        return (
            f"Attribution ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; estimated change of the metric"
        )


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
    `((clean - corrupted) * gradient).sum()`, the gradient being that of the metric at the node in
    the corrupted run (Nanda, "Attribution Patching", 2023). It is exact where the metric is a
    linear function of the node. It takes a run for each of the inputs, and one backward pass. Two
    equal infinities, such as those of a mask, differ by 0.

    With `steps` the gradient is the mean of those along the straight line from the one value to the
    other (integrated gradients, Sundararajan et al. 2017, at each node by itself, midpoint rule),
    and the total converges to the true change. It takes a run and a backward pass for each site and
    step.

    Gradients are recorded whatever the caller's mode is; frozen parameters require gradients
    meanwhile, and so do copies of the inputs. Nobody's `.grad` is written to.

    Args:
        model: a module, a function, or a `BendedModule`, with what is inserted in it.
        clean: inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        corrupted: other inputs.
        sites: as for `activation_patching`; None for every op that gives a floating point tensor
            which the metric has a gradient for. Ops that nothing can be inserted at are left out.
            An op that gives several tensors is a site for each of them.
        metric: a function of the model's output that gives a tensor without dimensions, through
            which gradients flow.
        positions: as for `activation_patching`.
        axis: as for `activation_patching`.
        heads: as for `activation_patching`.
        head: as for `activation_patching`.
        head_axis: as for `activation_patching`.
        direction: "denoise": gradients in the corrupted run, clean values less corrupted ones;
            "noise": the other way round.
        at: "output" or "input", for the sites.
        steps: None for one gradient; or how many points of the line gradients are taken at.
        keep_tensors: whether to keep what there is of each element, in the shapes of the values.
        missing: what is done with sites that the two runs did not come by alike, and with positions
            that are not there: "raise" or "nan". As it stands "nan" for `sites=None`, else "raise".

    Returns:
        An `Attribution`: sums over all but positions and heads, in shape (sites, positions).

    Raises:
        SiteError: something is missing; it names the site.
        NodePathError: a site means no node.
        InputError: something given makes no sense, or no gradient reaches the metric.

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
    required_direction(direction)
    columns = Columns.of(positions, axis, heads, head, head_axis)
    measured = required_metric(metric)
    lenient = required_missing(
        ("nan" if sites is None else "raise") if missing is None else missing
    )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise InputError(f"steps= has to be a positive int, not {steps!r}")
    if sites is None and at != "output":
        raise InputError('sites=None means what all ops give: give sites for at="input"')
    bended, calls = bended_of(model), (Call.of(clean), Call.of(corrupted))
    items = [_every_op] if sites is None else listed_sites(sites)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _all_trainable(bended.model),
        Sites(
            bended, items, calls, at=at, label="attribution_patching", allow_none=sites is None,
            observes=steps is None, every_part=sites is None,
        ) as there,
    ):  # fmt: skip
        scores = _Scores(there, measured, lenient, calls, direction)
        scores.run(steps, sites is None)
    rows = scores.rows
    values, where, which = grid_of(rows, columns, scores.source, scores.cell)
    kept = {row.name: tuple(scores.of(row)) for row in rows} if keep_tensors else None
    return Attribution(
        values, tuple(row.name for row in rows), where, which, *scores.base, direction,
        torch.tensor([scores.total(row) for row in rows], dtype=torch.float64), kept,
        missing=scores.reasons,
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


class _Scores:
    """Differences of two runs times gradients.

    Args:
        there: the sites.
        metric: of the output.
        missing: "raise" or "nan".
        calls: the clean and the corrupted inputs.
        direction: which run is differentiated.

    Attributes:
        rows: the sites.
        base: the metric of the two runs.
        source: what was seen in the run that values would be taken from.
        reasons: why cells are missing.
    """

    def __init__(
        self,
        there: Sites,
        metric: Metric,
        missing: str,
        calls: tuple[Call, Call],
        direction: Direction,
    ) -> None:
        self.rows: list[Row] = []
        self.base = (math.nan, math.nan)
        self.source = Seen()
        self.reasons: dict[str, str] = {}
        self._there = there
        self._metric = metric
        self._missing = missing
        self._denoises = direction == "denoise"
        self._names = ("clean", "corrupted") if self._denoises else ("corrupted", "clean")
        self._calls = calls if self._denoises else (calls[1], calls[0])
        self._target = Seen()
        self._found: dict[str, list[Tensor]] = {}

    def run(self, steps: int | None, every_op: bool) -> None:
        """Make the runs."""
        there, (source_call, target_call) = self._there, self._calls
        output, self.source = there.seen(source_call, with_gradients=True)
        start = scalar_of(self._metric, output)
        edges: dict[tuple[Key, int], GradientEdge] = {}

        def note(key: Key, number: int, value: Tensor) -> None:
            # The edge of now: what is written into the tensor later is another op.
            if value.requires_grad and value.is_floating_point():
                edges[key, number] = get_gradient_edge(value)

        output, self._target = there.seen(target_call, note, with_gradients=True)
        end = scalar_of(self._metric, output)
        del output
        base = _plain(start), _plain(end)
        self.base = base if self._denoises else (base[1], base[0])
        there.settle(self.source, self._target)
        self.rows = there.rows(self.source, self._target)
        gradients = self._gradients(end, edges) if steps is None or every_op else {}
        if every_op:
            self.rows = [row for row in self.rows if all(key in gradients for key in row.keys)]
        for row in self.rows:
            why = self._differing(row)
            if not why and steps is not None:
                gradients, why = self._integrated(row, target_call, steps)
            elif not why:
                why = next((_WITHOUT for k in row.keys if not _reaches(k, edges)), "")
            if why:
                self._miss(row, why)
                continue
            self._found[row.name] = [
                _difference(value, self._target[key][number]) * gradients[key][number]
                if number in gradients.get(key, {})
                else torch.zeros_like(value)  # nothing leads from there to the metric
                for key in row.keys
                for number, value in self.source[key].items()
            ]

    def of(self, row: Row) -> Sequence[Tensor]:
        """Return what there is of each element of a site."""
        return self._found.get(row.name, ())

    def total(self, row: Row) -> float:
        """Return the sum of all of them."""
        if row.name not in self._found:
            return math.nan
        return math.fsum(map(_sum, self._found[row.name]))

    def cell(self, number: int, part: Part) -> float:
        """Return the sum of a part of them."""
        row = self.rows[number]
        if row.name not in self._found:
            return math.nan
        try:
            return math.fsum(
                _sum(score if (index := part.index(score)) is None else score[index])
                for score in self._found[row.name]
            )
        except Beyond:
            return math.nan
        except NoPart as error:
            return self._miss(row, str(error))

    def _miss(self, row: Row, why: str) -> float:
        if self._missing == "raise":
            raise SiteError(f"cannot attribute to {row.name!r}: {why}", row.name)
        self.reasons.setdefault(row.name, why)
        return math.nan

    def _differing(self, row: Row) -> str:
        source, target = self._names
        for key in row.keys:
            if why := differing(self.source.get(key), self._target.get(key)):
                return why.format(source=source, target=target)
        return ""

    def _gradients(
        self, end: Tensor | float, edges: dict[tuple[Key, int], GradientEdge]
    ) -> Gradients:
        if not isinstance(end, Tensor) or not end.requires_grad:
            raise InputError(
                "metric= gave something that has no gradient: it has to compute a tensor from the "
                "output, without item(), detach() or argmax()"
            )
        made = torch.autograd.grad(end, list(edges.values()), allow_unused=True) if edges else ()
        found: Gradients = {}
        for (key, number), gradient in zip(edges, made, strict=True):
            if gradient is not None:
                found.setdefault(key, {})[number] = gradient
        return found

    def _integrated(self, row: Row, call: Call, steps: int) -> tuple[Gradients, str]:
        """Return the mean gradients along the line, or why there are none."""
        sums: Gradients = {}
        for step in range(steps):
            leaves: dict[tuple[Key, int], Tensor] = {}
            flaw: list[str] = []
            weight = (step + 0.5) / steps

            def act(
                key: Key, number: int, value: Tensor,
                leaves: dict[tuple[Key, int], Tensor] = leaves, flaw: list[str] = flaw,
                weight: float = weight,
            ) -> Tensor | None:  # fmt: skip
                if key not in row.keys:
                    return None
                given = self.source[key].get(number)
                before = self._target[key].get(number)
                if given is None or before is None or unlike(given, value):
                    flaw.append("halfway between the two values the model takes another path")
                    return None
                if not given.is_floating_point():
                    flaw.append(_WITHOUT)
                    return None
                leaf = torch.lerp(before, given, weight).requires_grad_()
                leaves[key, number] = leaf
                return leaf.clone()

            end = scalar_of(self._metric, self._there.run(call, act, with_gradients=True))
            expected = sum(len(self.source[key]) for key in row.keys)
            if flaw or len(leaves) != expected:
                return {}, (
                    flaw or ["halfway between the two values the model takes another path"]
                )[0]
            if not isinstance(end, Tensor) or not end.requires_grad:
                continue
            made = torch.autograd.grad(end, list(leaves.values()), allow_unused=True)
            for (key, number), gradient in zip(leaves, made, strict=True):
                if gradient is not None:
                    held = sums.setdefault(key, {})
                    held[number] = held.get(number, torch.zeros_like(gradient)) + gradient
        return {
            key: {number: gradient / steps for number, gradient in found.items()}
            for key, found in sums.items()
        }, ""


def _difference(source: Tensor, target: Tensor) -> Tensor:
    """Return the difference, which is 0 also for two infinities, such as those of a mask."""
    equal = source == target
    if source.dtype.itemsize < 4:  # most of it would be lost in the precision of the model
        source, target = source.float(), target.float()
    return (source - target).masked_fill(equal, 0.0)


def _sum(score: Tensor) -> float:
    return score.detach().cpu().sum(dtype=torch.float64).item()


def _plain(value: Tensor | float) -> float:
    return value.detach().to(torch.float64).item() if isinstance(value, Tensor) else value


_WITHOUT = "what it gives has no gradient (no floating point tensor, detached, or under no_grad)"


def _reaches(key: Key, edges: dict[tuple[Key, int], GradientEdge]) -> bool:
    return any(known == key for known, _ in edges)
