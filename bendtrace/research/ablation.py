"""Ablation: removing the contribution of a module, an op, a head or a channel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace.debug.calls import Call, are_several, calls_of
from bendtrace.errors import InputError, SiteError
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import (
    Effect,
    Inputs,
    Interjection,
    NodePass,
    PassNumbers,
    can_cast,
    effect_of_value,
)
from bendtrace.insert.purity import effect_of_function
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.state_access import is_contained
from bendtrace.insert.where import Where
from bendtrace.module import BendedModule, bended_of, required_bended
from bendtrace.python.checks import required_choice, required_int
from bendtrace.research._sites import (
    At,
    Beyond,
    Columns,
    Grid,
    Key,
    MissingCells,
    NoPart,
    Part,
    Sites,
    first_replaced,
    number_of,
    position_of,
    require_heads,
    required_metric,
    site_list,
    swap_tensor,
)
from bendtrace.tape.tape import TensorMeta

How = Literal["zero", "mean", "resample"] | float | Tensor | Callable[[Tensor], Tensor]
# Returns the replacement of a value, or what can be broadcast to it: of a node, its pass, a value.
Source = Callable[[str, int, Tensor], Tensor]


def ablate(
    model: BendedModule,
    where: Where,
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
    passes: PassNumbers = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Replace the outputs of nodes, or a part of them, from now on.

    Heads of attention are slices of the input of the output projection: `ablate(bended,
    "transformer.h.0.attn.c_proj", heads=12, head=3, at="input")`.

    Args:
        model: a `BendedModule`.
        where: the nodes, as `BendedModule.interject` takes them.
        how: the replacement:

            - "zero";
            - "mean": the mean over the axes `over` of the node's output for `reference`, or without
              a reference of its output in the current call, for each node and pass;
            - "resample": the node's output for another sample (axis 0): of the current call, in one
              cycle through all samples, so that no sample keeps its own; or of `reference` (Chan et
              al., "Causal Scrubbing", 2022);
            - a number or a tensor, which is broadcast to the part;
            - a function of the whole value that returns a value of the same shape.
        heads: the number of heads of the value, along `head_axis`.
        head: the heads to ablate: an int or ints; None for all.
        head_axis: the axis that consists of consecutive heads.
        channels: the positions along `axis` to ablate: an int, a slice or ints; None for all.
        axis: the axis of the channels.
        at: "output": the outputs of the nodes; "input": their first input tensors.
        reference: for "mean": inputs, or a list or another iterable of inputs, such as a data
            loader. It is run through once, immediately, in bounded memory, with sums in float64. A
            tuple is the arguments of one call. For "resample": inputs of one call.
        over: the axes to take the mean over. 0 keeps a mean for each position; if samples differ in
            length, use (0, 1).
        seed: for "resample": seed of the cycle, or of the choice of reference samples. Each call
            draws again with `torch.Generator().manual_seed(seed)`, so that all nodes, passes and
            calls with the same number of samples use the same choice.
        passes: the passes of each node to ablate; see `BendedModule.interject`.
        every: only in every n-th pass.
        allow_none: whether `where` may match no node.

    Returns:
        The insertion, which is also a context manager: `remove()`, `report()`.

    Raises:
        SiteError: the output of a node does not have this part.
        NodePathError: `where` matches no node.
        InputError: an argument is invalid.

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
    position = None if channels is None else [position_of(channels, "channels")]
    columns = Columns.of(position, axis, heads, head, head_axis).named(where, model)
    kind = _InputAblation if required_choice("at", at, "output", "input") == "input" else _Ablation
    substitute = _substitute_of(how, model, [where], at, reference, over, seed)
    what = kind(substitute, columns.parts(columns.bound_positions()), describe_where(where))
    handle = model.interject(where, what, passes=passes, every=every, allow_none=allow_none)
    try:
        require_heads(model, columns, at, [(handle, where)])
    except InputError:
        handle.remove()
        raise
    return handle


class _Ablation(Interjection):
    def __init__(self, substitute: _Substitute, parts: list[Part], label: str) -> None:
        self._substitute = substitute
        self._parts = parts
        self._label = label
        self.self_contained = substitute.is_contained

    @property
    def label(self) -> str:
        return f"ablation ({self._substitute.name})"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        return swap_tensor(output, at.path, self._label, lambda value: self._without(at, value))

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return its effect on a tensor."""
        source = self._substitute.effect(at.path or "output", at.number, like)
        if isinstance(source, str):
            return source
        if any(isinstance(part.position, Tensor) for part in self._parts):
            return "its channels are given by a tensor"
        replace_parts, parts = self._substitute.replace_parts, self._parts
        compute, path = source.function, at.path

        def ablated(value: Tensor, *tensors: Tensor) -> Tensor:
            return replace_parts(path, value, compute(value, *tensors), parts)

        return source._replace(function=ablated, key=(_Ablation, repr(parts), source.key))

    def _without(self, at: NodePass, value: Tensor) -> Tensor:
        try:
            return self._substitute.put(at.path or "output", at.number, value, self._parts)
        except NoPart as error:
            raise SiteError(
                f"cannot ablate {at.path or 'the output'!r}: {error}", at.path
            ) from None


class _InputAblation(_Ablation):
    after = Interjection.after

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        return first_replaced(inputs, at.path, lambda value: self._without(at, value))


@dataclass(frozen=True, repr=False, eq=False)
class AblationStudy(Grid):
    """The result of an ablation study: the metric with each cell ablated.

    Attributes:
        values: the metric with each cell ablated, with shape (sites, channels), or (sites,
            channels, heads) if heads are separate; float64, nan for missing cells.
        sites: names of the sites.
        positions: the channels: ints, slices, groups of ints; (None,) if they are not separate.
        heads: the indices of the heads; None if they are not separate.
        base: the metric of the unchanged model.
        how: the name of the replacement.
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
        """The change of the metric: with the ablation minus without it."""
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
    """Ablate one part after another, and measure a metric.

    The model is called once unchanged, and once for each site, channel and head. Each call gets
    copies of the inputs and starts with the same random numbers and buffers, which are restored at
    the end.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        sites: as for `activation_patching`.
        metric: a function from the model's output to a number.
        how: as for `ablate`.
        heads: as for `ablate`; here each head is a separate cell.
        head: which heads.
        head_axis: the axis that consists of heads.
        channels: None for all together, "each", or channels: ints, slices, or groups of ints, each
            of which is a separate cell.
        axis: the axis of the channels.
        at: "output" or "input".
        reference: as for `ablate`.
        over: as for `ablate`.
        seed: as for `ablate`.
        missing: what to do with channels and heads that do not exist: "raise", or "nan".

    Returns:
        An `AblationStudy`: values in shape (sites, channels) or (sites, channels, heads).

    Raises:
        SiteError: no run reached a site, or it lacks the requested part.
        NodePathError: a site matches no node.
        InputError: an argument is invalid.

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
    measured, missed = required_metric(metric), MissingCells(missing, "ablate")
    required_choice("at", at, "output", "input")
    bended, call = bended_of(model), Call.of(inputs)
    items = site_list(sites)
    columns = columns.named(items, bended)
    substitute = _substitute_of(how, bended, items, at, reference, over, seed)
    with Sites(
        bended, items, [call], at=at, columns=columns, label="ablation_study"
    ) as model_sites:
        base, seen = model_sites.measured(call, measured)
        model_sites.settle(seen)
        rows = model_sites.rows(seen)

        def cell(number: int, part: Part) -> float:
            row = rows[number]

            def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                return substitute.put(key[1], number, value, [part]) if key in row.keys else None

            try:
                return number_of(measured, model_sites.run(call, act))
            except Beyond:
                return math.nan
            except NoPart as error:
                return missed.note(row.name, str(error))

        grid = columns.grid([row.name for row in rows], seen, cell)
    return AblationStudy(**grid, base=base, how=substitute.name, missing=missed.reasons)


# Replacements


@dataclass(frozen=True)
class _Substitute:
    """The replacement of ablated values."""

    name: str
    source: Source
    is_contained: bool = True
    compiled: Callable[[str, int, TensorMeta], Effect | str] | None = None

    def effect(self, path: str, number: int, like: TensorMeta) -> Effect | str:
        """Return the replacement of a value as an effect on it, or why it has none."""
        if self.compiled is None:
            return f"a replacement by {self.name} draws samples"
        return self.compiled(path, number, like)

    def put(self, path: str, number: int, value: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return a value with parts of it replaced."""
        return self.replace_parts(path, value, self.source(path, number, value), parts)

    def replace_parts(
        self, path: str, value: Tensor, other: Tensor, parts: Sequence[Part]
    ) -> Tensor:
        """Return a value with parts of it replaced by those of another one."""
        indices = [part.index(value) for part in parts]
        if not can_cast(other.dtype, value.dtype):
            raise SiteError(
                f"cannot put {other.dtype} into the value of {path!r}, which has {value.dtype}",
                path,
            )
        made = value.clone()
        for index in indices:
            given = other[index] if other.shape == value.shape else other
            try:
                made[index] = given.to(made.device, made.dtype)
            except RuntimeError:
                raise SiteError(
                    f"cannot put shape {tuple(given.shape)} into {tuple(made[index].shape)} of "
                    f"{path!r}",
                    path,
                ) from None
        return made


def _substitute_of(
    how: Any,
    bended: BendedModule,
    items: Sequence[Any],
    at: At,
    reference: Any,
    over: Any,
    seed: Any,
) -> _Substitute:
    """Read how values are replaced, and run the reference, if there is one."""
    required_int("seed", seed)
    listed = over if isinstance(over, (tuple, list)) else (over,)
    try:
        axes = tuple(operator.index(axis) for axis in listed)
    except TypeError:
        raise InputError(f"over= takes an axis or axes, not {over!r}") from None
    if not axes:
        raise InputError("over= is empty: pass the axes to take the mean over")
    named = how if isinstance(how, str) and how in ("zero", "mean", "resample") else None
    if named is None and (isinstance(how, str) or not (callable(how) or _is_constant_value(how))):
        raise InputError(
            f'how= is "zero", "mean", "resample", a number, a tensor or a function, not {how!r}'
        )
    if reference is not None and named not in ("mean", "resample"):
        raise InputError('reference= is for how="mean" and how="resample"')
    if named == "zero":
        return _Substitute(
            "zero",
            lambda path, number, value: value.new_zeros(()),
            compiled=lambda *_: Effect(lambda value: value.new_zeros(()), (), "zero"),
        )
    if named is not None:
        if reference is not None:
            if named == "mean":
                source, mean = _mean_over(bended, items, at, reference, axes)
                return _Substitute(named, source, compiled=mean)
            return _Substitute(named, _samples_of(bended, items, at, reference, seed))
        if named == "mean":
            own = _own_mean(axes)
            return _Substitute(
                named, own,
                compiled=lambda path, number, like: Effect(
                    lambda value: own(path, number, value), (), ("mean", axes)
                ),
            )  # fmt: skip
        return _Substitute(named, _shuffle(seed))
    if _is_constant_value(how):
        return _Substitute(
            "value", _constant(how),
            compiled=lambda path, number, like: effect_of_value(
                lambda value, constant: _constant(constant)(path, number, value), how, like, "value"
            ),
        )  # fmt: skip
    name = str(getattr(how, "__name__", type(how).__name__))
    result = _result_of(how)
    return _Substitute(name, result, is_contained(how), lambda *_: effect_of_function(how))


def _is_constant_value(how: Any) -> bool:
    return isinstance(how, (Tensor, int, float, complex))


def _constant(constant: Any) -> Source:
    def source(path: str, number: int, value: Tensor) -> Tensor:
        if isinstance(constant, Tensor):
            return constant
        if value.is_floating_point() and not isinstance(constant, complex):
            return value.new_tensor(constant)
        return torch.tensor(constant)

    return source


def _result_of(function: Callable[[Tensor], Any]) -> Source:
    def source(path: str, number: int, value: Tensor) -> Tensor:
        made = function(value.clone())
        if not isinstance(made, Tensor) or made.shape != value.shape:
            what = tuple(made.shape) if isinstance(made, Tensor) else made
            raise SiteError(
                f"how= has to return a tensor of shape {tuple(value.shape)} for {path!r}, not "
                f"{what!r}",
                path,
            )
        return made

    return source


def _own_mean(over: tuple[int, ...]) -> Source:
    def source(path: str, number: int, value: Tensor) -> Tensor:
        _check_axes(path, value, over)
        return value.mean(over, keepdim=True).to(value.dtype).expand_as(value)

    return source


def _shuffle(seed: int) -> Source:
    """Take the samples of the batch in another order, none in its own place."""
    drawn: dict[int, Tensor] = {}  # no cache: of a dict, an exported program takes the tensors

    def chosen(count: int) -> Tensor:
        if count not in drawn:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            others = torch.empty_like(order)
            others[order] = order.roll(-1)
            drawn[count] = others
        return drawn[count]

    def source(path: str, number: int, value: Tensor) -> Tensor:
        count = value.shape[0] if value.dim() else 0
        if count < 2:
            raise SiteError(
                f"{path!r} returns {count} sample{'s' * (count != 1)} (axis 0), so there is no "
                "other sample to use: pass a reference",
                path,
            )
        return value[chosen(count).to(value.device)]

    return source


def _mean_over(
    bended: BendedModule, items: Sequence[Any], at: At, reference: Any, over: Any
) -> tuple[Source, Callable[[str, int, TensorMeta], Effect | str]]:
    """Run a reference, and take the means over all of its batches, of sums in float64."""
    sums: dict[tuple[str, int], tuple[Tensor, int]] = {}
    batches = calls_of(reference)
    first = next(batches, None)
    if first is None:
        raise InputError("reference= has no batches")
    with Sites(bended, items, [first], at=at, label="reference") as sites:
        reached: dict[Key, None] = {}
        for batch in chain([first], batches):
            _, seen = sites.seen(batch)
            reached |= dict.fromkeys(seen)
            for (_, path), passes in seen.items():
                for number, value in passes.items():
                    before = sums.get((path, number))
                    sums[path, number] = _add_sum(path, value, over, before)
        sites.rows(reached)  # raises where no run reached a site
    means = {key: total / count for key, (total, count) in sums.items()}

    def source(path: str, number: int, value: Tensor) -> Tensor:
        _require_reached(means, path, number)
        mean = means[path, number].to(value.device, value.dtype)
        try:
            return mean.expand_as(value)
        except RuntimeError:
            raise SiteError(
                f"the mean at {path!r} has shape {tuple(mean.shape)}, and the value "
                f"{tuple(value.shape)}: take the mean over more axes, as in over=(0, 1)",
                path,
            ) from None

    def compiled(path: str, number: int, like: TensorMeta) -> Effect | str:
        if (path, number) not in means:
            return "no run on the reference reached it"
        return Effect(
            lambda value, mean: mean.to(value.device, value.dtype).expand_as(value),
            (means[path, number],),
            "mean of the reference",
        )

    return source, compiled


def _add_sum(
    path: str, value: Tensor, over: tuple[int, ...], before: tuple[Tensor, int] | None
) -> tuple[Tensor, int]:
    """Return the sum of a value over axes and how many numbers it is of, with those before."""
    _check_axes(path, value, over)
    exact = torch.complex128 if value.is_complex() else torch.float64
    part = value.to(exact).sum(over, keepdim=True)
    count = value.numel() // max(part.numel(), 1)
    if before is None:
        return part, count
    total, so_far = before
    if total.shape != part.shape:
        raise SiteError(
            f"{path!r} has different shapes for different batches of the reference, "
            f"{tuple(part.shape)} and {tuple(total.shape)} (means over axes {over}): take the "
            "mean over those axes as well, as in over=(0, 1)",
            path,
        )
    return total + part, so_far + count


def _samples_of(
    bended: BendedModule, items: Sequence[Any], at: At, reference: Any, seed: int
) -> Source:
    """Run a reference, and take samples of its values."""
    if are_several(reference):
        raise InputError('reference= has to be one batch of inputs for how="resample", not several')
    call = Call.of(reference)
    with Sites(bended, items, [call], at=at, label="reference") as sites:
        _, seen = sites.seen(call)
        sites.rows(seen)

    drawn: dict[tuple[int, int], Tensor] = {}  # as above

    def chosen(samples: int, count: int) -> Tensor:
        if (samples, count) not in drawn:
            generator = torch.Generator().manual_seed(seed)
            drawn[samples, count] = torch.randint(samples, (count,), generator=generator)
        return drawn[samples, count]

    kept = {(path, n): value for (_, path), passes in seen.items() for n, value in passes.items()}

    def source(path: str, number: int, value: Tensor) -> Tensor:
        _require_reached(kept, path, number)
        samples = kept[path, number]
        if not samples.dim() or samples.shape[1:] != value.shape[1:] or not samples.shape[0]:
            raise SiteError(
                f"{path!r} had shape {tuple(samples.shape)} for the reference, whose samples do "
                f"not fit {tuple(value.shape)}",
                path,
            )
        return samples[chosen(samples.shape[0], value.shape[0]).to(samples.device)]

    return source


def _require_reached(sums: dict[tuple[str, int], Tensor], path: str, number: int) -> None:
    if (path, number) not in sums:
        raise SiteError(f"no run on the reference reached pass {number + 1} of {path!r}", path)


def _check_axes(path: str, value: Tensor, over: tuple[int, ...]) -> None:
    if not (value.is_floating_point() or value.is_complex()):
        raise SiteError(f"{path!r} has {value.dtype}, which has no mean", path)
    for axis in over:
        if not -value.dim() <= axis < value.dim():
            raise SiteError(
                f"{path!r} has shape {tuple(value.shape)}, which has no axis {axis} (over=)", path
            )
