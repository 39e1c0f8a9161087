"""What takes the place of what is ablated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace.calls import Call, are_several, calls_of
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.reading import is_contained
from bendtrace.module import BendedModule
from bendtrace.workflows._parts import Part
from bendtrace.workflows._sites import At, Key, Seen, Sites

__all__ = ["How", "Substitute", "substitute_of"]

How = Literal["zero", "mean", "resample"] | float | Tensor | Callable[[Tensor], Tensor]


class Substitute:
    """What takes the place of a value: zeros.

    Attributes:
        name: what it is called.
        is_contained: whether nothing of the model is looked at for it.
    """

    name = "zero"
    is_contained = True

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return what can be broadcast to a value, or another value of its shape.

        Args:
            path: the node.
            number: which pass of it.
            value: what it gave.
        """
        return value.new_zeros(())

    def put(self, path: str, number: int, value: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return a value with parts of it exchanged.

        Raises:
            NoPart: it has no such part.
            SiteError: what takes its place does not fit.
        """
        indices = [part.index(value) for part in parts]
        other = self.of(path, number, value)
        if not torch.can_cast(other.dtype, value.dtype):
            raise SiteError(
                f"cannot put {other.dtype} into what {path!r} gives, which is {value.dtype}", path
            )
        made = value.clone()
        for index in indices:
            where = (...,) if index is None else index
            given = other[where] if other.shape == value.shape else other
            try:
                made[where] = given.to(made.device, made.dtype)
            except RuntimeError:
                raise SiteError(
                    f"cannot put shape {tuple(given.shape)} into {tuple(made[where].shape)} of "
                    f"{path!r}",
                    path,
                ) from None
        return made


class Constant(Substitute):
    """A number or a tensor."""

    name = "value"

    def __init__(self, value: Any) -> None:
        self._value = value

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return it."""
        if isinstance(self._value, Tensor):
            return self._value
        if value.is_floating_point() and not isinstance(self._value, complex):
            return value.new_tensor(self._value)
        return torch.tensor(self._value)


class Function(Substitute):
    """What a function makes of the value."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self._function = function
        self.is_contained = is_contained(function)
        self.name = str(getattr(function, "__name__", type(function).__name__))

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Call the function."""
        made = self._function(value.clone())
        if not isinstance(made, Tensor) or made.shape != value.shape:
            what = tuple(made.shape) if isinstance(made, Tensor) else made
            raise SiteError(
                f"how= has to give a tensor of shape {tuple(value.shape)} for {path!r}, not "
                f"{what!r}",
                path,
            )
        return made


class BatchMean(Substitute):
    """The mean of the value itself.

    Args:
        over: axes.
    """

    name = "mean"

    def __init__(self, over: tuple[int, ...]) -> None:
        self._over = over

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return the mean, in the shape of the value."""
        wide = _wide(path, value)
        return (
            wide.mean(_axes(path, value, self._over), keepdim=True).to(value.dtype).expand_as(value)
        )


class ReferenceMean(Substitute):
    """The mean over many runs.

    Args:
        over: axes.
    """

    name = "mean"

    def __init__(self, over: tuple[int, ...]) -> None:
        self._over = over
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, seen: Seen) -> None:
        """Take what was seen in a run into account."""
        for (_, path), passes in dict(seen).items():
            for number, value in passes.items():
                axes = _axes(path, value, self._over)
                part = _wide(path, value).double().sum(axes, keepdim=True)
                known = self._sums.get((path, number))
                if known is not None and known.shape != part.shape:
                    raise SiteError(
                        f"{path!r} gives other shapes for other batches of the reference, "
                        f"{tuple(part.shape)} and {tuple(known.shape)} (means over axes "
                        f"{self._over}): take the mean over those axes as well, as in over=(0, 1)",
                        path,
                    )
                self._sums[path, number] = part if known is None else known + part
                count = value.numel() // max(part.numel(), 1)
                self._counts[path, number] = self._counts.get((path, number), 0) + count

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return the mean, in the shape of the value."""
        total = self._sums.get((path, number))
        if total is None:
            raise _not_come_by(path, number)
        mean = (total / self._counts[path, number]).to(value.device, value.dtype)
        try:
            return mean.expand_as(value)
        except RuntimeError:
            raise SiteError(
                f"the mean at {path!r} has shape {tuple(mean.shape)}, and the value "
                f"{tuple(value.shape)}: take the mean over more axes, as in over=(0, 1)",
                path,
            ) from None


class Shuffle(Substitute):
    """The value of other samples of the batch."""

    name = "resample"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return the samples in another order, none in its own place."""
        count = value.shape[0] if value.dim() else 0
        if count < 2:
            raise SiteError(
                f"{path!r} gives {count} sample{'s' * (count != 1)} (axis 0), and there is no "
                "other one to take: give a reference",
                path,
            )
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.randperm(count, generator=generator)
        chosen = torch.empty_like(order)
        chosen[order] = order.roll(-1)
        return value[chosen.to(value.device)]


class Resample(Substitute):
    """The value of samples of a reference."""

    name = "resample"

    def __init__(self, seed: int, seen: Seen) -> None:
        self._seed = seed
        self._kept = {
            (path, number): value
            for (_, path), passes in dict(seen).items()
            for number, value in passes.items()
        }

    def of(self, path: str, number: int, value: Tensor) -> Tensor:
        """Return samples of the reference."""
        kept = self._kept.get((path, number))
        if kept is None:
            raise _not_come_by(path, number)
        if not kept.dim() or kept.shape[1:] != value.shape[1:] or not kept.shape[0]:
            raise SiteError(
                f"{path!r} gave {tuple(kept.shape)} for the reference, which has no samples for "
                f"{tuple(value.shape)}",
                path,
            )
        generator = torch.Generator().manual_seed(self._seed)
        chosen = torch.randint(kept.shape[0], (value.shape[0],), generator=generator)
        return kept[chosen.to(kept.device)]


def _not_come_by(path: str, number: int) -> SiteError:
    return SiteError(f"no run on the reference came by pass {number + 1} of {path!r}", path)


def _wide(path: str, value: Tensor) -> Tensor:
    if not (value.is_floating_point() or value.is_complex()):
        raise SiteError(f"{path!r} gives {value.dtype}, which has no mean", path)
    return value


def _axes(path: str, value: Tensor, over: tuple[int, ...]) -> tuple[int, ...]:
    for axis in over:
        if not -value.dim() <= axis < value.dim():
            raise SiteError(
                f"{path!r} gives shape {tuple(value.shape)}, which has no axis {axis} (over=)", path
            )
    return over


def substitute_of(
    how: Any,
    bended: BendedModule,
    items: Sequence[Any],
    at: At,
    reference: Any,
    over: Any,
    seed: Any,
) -> Substitute:
    """Read what is to take the place of values, and run the reference, if there is one.

    Raises:
        InputError: something makes no sense.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed= has to be an int, not {seed!r}")
    axes = _over(over)
    if isinstance(how, str):
        if how not in ("zero", "mean", "resample"):
            raise InputError(
                f'how= is "zero", "mean", "resample", a number, a tensor or a function, not {how!r}'
            )
    if reference is not None and not (isinstance(how, str) and how in ("mean", "resample")):
        raise InputError('reference= is for how="mean" and how="resample"')
    if isinstance(how, str):
        if how == "zero":
            return Substitute()
        if how == "mean":
            return (
                BatchMean(axes) if reference is None else _mean(bended, items, at, reference, axes)
            )
        return Shuffle(seed) if reference is None else _resample(bended, items, at, reference, seed)
    if isinstance(how, (Tensor, int, float, complex)):
        return Constant(how)
    if callable(how):
        return Function(how)
    raise InputError(
        f'how= is "zero", "mean", "resample", a number, a tensor or a function, not {how!r}'
    )


def _over(over: Any) -> tuple[int, ...]:
    listed = over if isinstance(over, (tuple, list)) else (over,)
    try:
        axes = tuple(operator.index(axis) for axis in listed)
    except TypeError:
        raise InputError(f"over= takes an axis or axes, not {over!r}") from None
    if not axes:
        raise InputError("over= is empty: say over which axes the mean is taken")
    return axes


def _mean(
    bended: BendedModule, items: Sequence[Any], at: At, reference: Any, over: tuple[int, ...]
) -> ReferenceMean:
    found = ReferenceMean(over)
    batches = calls_of(reference)
    first = next(batches, None)
    if first is None:
        raise InputError("reference= has no batches")
    with Sites(bended, items, [first], at=at, label="reference") as there:
        reached: set[Key] = set()
        for batch in chain([first], batches):
            _, seen = there.seen(batch)
            found.add(seen)
            reached.update(seen)
        there.rows(dict.fromkeys(reached))  # raises where no run came by a site
    return found


def _resample(
    bended: BendedModule, items: Sequence[Any], at: At, reference: Any, seed: int
) -> Resample:
    if are_several(reference):
        raise InputError('for how="resample" reference= is one batch of inputs, not several')
    call = Call.of(reference)
    with Sites(bended, items, [call], at=at, label="reference") as there:
        _, seen = there.seen(call)
        there.rows(seen)
    return Resample(seed, seen)
