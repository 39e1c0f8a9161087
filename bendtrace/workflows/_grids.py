"""Numbers over sites, positions and heads, and the metric that computes them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace._checks import required_choice, required_int
from bendtrace._lazy import required_pandas
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.structure import describe
from bendtrace.view.overlay import heat_map, plotted, text_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Position = int | slice | tuple[int, ...]
Metric = Callable[[Any], Any]


# Arguments


def required_metric(metric: Any) -> Metric:
    """Return a metric that can be called; raise an `InputError` for anything else."""
    if not callable(metric):
        raise InputError(
            f"metric= has to be a function from the model's output to a number, not {metric!r}"
        )
    return metric  # type: ignore[no-any-return]


def scalar_of(metric: Metric, output: Any) -> Tensor | float:
    """Return the metric of an output: a tensor without dimensions, or a number."""
    try:
        value = metric(output)
    except Exception as error:
        error.add_note(f"metric= was called with the output of the model, {describe(output)}")
        raise
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
        return value
    hint = ""
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        hint = "; take its mean or sum, or one item"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):
            what = repr(value)
    raise InputError(
        f"metric= has to return a number or a tensor without dimensions, not {what}{hint}"
    ) from None


def number_of(metric: Metric, output: Any) -> float:
    """Return the metric of an output as a number."""
    return as_number(scalar_of(metric, output))


def as_number(value: Tensor | float) -> float:
    """Return a tensor without dimensions as a number, in double precision."""
    return value.detach().to(torch.float64).item() if isinstance(value, Tensor) else value


def position_of(said: Any, name: str = "positions") -> Position:
    """Parse one position, or several that belong together: a number, a slice, or numbers."""
    if isinstance(said, slice):
        return said
    if isinstance(said, Tensor) and said.dim() and not said.dtype.is_floating_point:
        said = said.tolist()
    if isinstance(said, Iterable) and not isinstance(said, (str, bytes, Tensor)):
        several = tuple(_number(item, name) for item in said)
        if not several:
            raise InputError(f"{name}= has an empty group of positions")
        return several
    return _number(said, name)


def _number(said: Any, name: str) -> int:
    if not isinstance(said, (bool, float, str)):
        try:
            return operator.index(said)
        except TypeError:
            pass
    raise InputError(f"{name}= takes ints, slices and groups of ints, not {said!r}")


def _positions_of(said: Any) -> tuple[Position, ...] | str | None:
    """Read several positions: None for all at once, "each" for as many as there are."""
    if said is None or (isinstance(said, str) and said == "each"):
        return said
    if isinstance(said, (int, slice)) and not isinstance(said, bool):
        return (position_of(said),)
    if isinstance(said, (str, bytes)) or not isinstance(said, Iterable):
        raise InputError(
            'positions= takes None for the whole, "each", or an iterable of ints, slices and '
            f"groups of ints, not {said!r}"
        )
    listed = tuple(map(position_of, said))
    if not listed:
        raise InputError("positions= is empty")
    return listed


def _heads_of(said: Any, count: int) -> tuple[int, ...]:
    """Read which of some heads are chosen; None for all of them."""
    listed = slice(None) if said is None else position_of(said, "head")
    if isinstance(listed, slice):
        return tuple(range(count))[listed]
    listed = listed if isinstance(listed, tuple) else (listed,)
    for number in listed:
        if not -count <= number < count:
            raise InputError(f"there is no head={number}; there are {count} heads")
    return tuple(number % count for number in listed)


# Parts of an activation


class NoPart(Exception):
    """A value lacks the requested part; the message says why."""


class Beyond(NoPart):
    """A value lacks a position that values of other sites have."""


@dataclass(frozen=True)
class Part:
    """A part of an activation: a position along an axis, and a head, which is a slice of another.

    Attributes:
        is_one_of_all: whether it is one of all positions that occur in any value.
    """

    position: Position | None = None
    axis: int = 1
    head: int | None = None
    heads: int = 1
    head_axis: int = -1
    is_one_of_all: bool = False

    def index(self, value: Tensor) -> tuple[Any, ...] | None:
        """Return the index of the part in a tensor; None for all of it."""
        size = value.shape[self.axis] if -value.dim() <= self.axis < value.dim() else None
        if self.is_one_of_all and isinstance(self.position, int) and size is not None:
            if self.position >= size:
                raise Beyond(f"it has only {size} positions")
        if self.position is None and self.head is None:
            return None
        found: dict[int, Any] = {}
        if self.position is not None:
            axis = _axis(self.axis, value)
            found[axis] = _entry(self.position, value.shape[axis], axis)
        if self.head is not None:
            axis = _axis(self.head_axis, value)
            if axis in found:
                raise NoPart(f"axis {axis} is used for both the positions and the heads")
            width, rest = divmod(value.shape[axis], self.heads)
            if rest:
                raise NoPart(
                    f"axis {axis} has size {value.shape[axis]}, which is not a multiple of "
                    f"{self.heads}"
                )
            found[axis] = slice(self.head * width, (self.head + 1) * width)
        return tuple(found.get(number, slice(None)) for number in range(value.dim()))

    def put(self, value: Tensor, given: Tensor) -> Tensor:
        """Return a copy of a tensor with this part taken from another tensor."""
        index = self.index(value)
        if index is None:
            return given.clone()
        made = value.clone()
        made[index] = given[index].to(made.dtype)
        return made


def _axis(axis: int, value: Tensor) -> int:
    if not -value.dim() <= axis < value.dim():
        raise NoPart(f"shape {tuple(value.shape)} has no axis {axis}")
    return axis % value.dim()


def _entry(position: Position, size: int, axis: int) -> Any:
    if isinstance(position, slice):
        if size and not len(range(*position.indices(size))):
            raise NoPart(f"axis {axis} has size {size}, and no positions {_shown(position)}")
        return position
    listed = position if isinstance(position, tuple) else (position,)
    for number in listed:
        if not -size <= number < size:
            raise NoPart(f"axis {axis} has size {size}, and no position {number}")
    if isinstance(position, tuple):
        return torch.tensor([number % size for number in position])
    return slice(position % size, position % size + 1)


@dataclass(frozen=True)
class Columns:
    """The parts of a grid at each site: positions, and heads if they are separate."""

    positions: tuple[Position, ...] | str | None
    axis: int
    heads: int | None
    which: tuple[int, ...]
    head_axis: int

    @classmethod
    def of(
        cls, positions: Any, axis: Any, heads: Any = None, head: Any = None, head_axis: Any = -1
    ) -> Columns:
        """Parse the arguments of a workflow; invalid ones raise an `InputError`."""
        required_int("axis", axis)
        required_int("head_axis", head_axis)
        which: tuple[int, ...] = ()
        if heads is not None:
            if type(heads) is not int or heads < 1:
                raise InputError(f"heads= has to be the number of heads, not {heads!r}")
            which = _heads_of(head, heads)
        elif head is not None:
            raise InputError("head= selects heads: also pass their number as heads=")
        return cls(_positions_of(positions), axis, heads, which, head_axis)

    @property
    def chosen_heads(self) -> tuple[int, ...] | None:
        """The indices of the heads; None if they are not separate."""
        return None if self.heads is None else self.which

    def settled(self, values: Iterable[Tensor] = ()) -> tuple[Position | None, ...]:
        """Return the columns with the positions that the values at the sites have."""
        if self.positions is None or not isinstance(self.positions, str):
            return self.positions or (None,)
        with_axis = (v for v in values if -v.dim() <= self.axis < v.dim())
        return tuple(range(max((v.shape[self.axis] for v in with_axis), default=0)))

    def parts(self, positions: Sequence[Position | None]) -> list[Part]:
        """Return the parts in order: the heads of the first position, those of the next."""
        heads: Sequence[int | None] = self.which if self.heads else (None,)
        is_each = self.positions == "each"
        return [
            Part(position, self.axis, head, self.heads or 1, self.head_axis, is_each)
            for position, head in product(positions, heads)
        ]

    def grid(
        self,
        names: Sequence[str],
        seen: Mapping[Any, Mapping[int, Tensor]],
        cell: Callable[[int, Part], float],
    ) -> dict[str, Any]:
        """Compute all cells of a grid."""
        positions = self.settled(value for passes in seen.values() for value in passes.values())
        parts = self.parts(positions)
        found = [[cell(number, part) for part in parts] for number in range(len(names))]
        heads = self.chosen_heads
        shape = (len(names), len(positions), *(() if heads is None else (len(heads),)))
        values = torch.tensor(found, dtype=torch.float64).reshape(shape)
        return {"values": values, "sites": tuple(names), "positions": positions, "heads": heads}


# Results


class Table:
    """Results with rows, text, HTML and a data frame."""

    values: Tensor
    _between = " "  # the parts of a column's name

    @property
    def effect(self) -> Tensor:
        """The quantity of interest, in the shape of `values`."""
        return self.values

    def _title(self) -> str:
        raise NotImplementedError

    def _axes(self) -> dict[str, Sequence[Any]]:
        """Return the names of the axes of `values`, and the labels along each."""
        raise NotImplementedError

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each cell."""
        axes = self._axes()
        numbers = zip(self.values.flatten().tolist(), self.effect.flatten().tolist(), strict=True)
        for cell, (value, effect) in zip(product(*axes.values()), numbers, strict=True):
            yield dict(zip(axes, cell, strict=True)) | {"value": value, "effect": effect}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each cell: its coordinates, its value, and the effect.

        Raises:
            ImportError: pandas is not installed.
        """
        return required_pandas().DataFrame(list(self.rows()))  # type: ignore[no-any-return]

    def plot(self) -> Figure:
        """Return the effect as a figure of matplotlib, with a row for each site.

        Raises:
            InputError: matplotlib is not installed.
        """
        return plotted(*self._shown())

    def _shown(self) -> tuple[str, list[str], list[str], list[list[float]]]:
        (_, names), *axes = self._axes().items()
        labels = [[f"{_PREFIXES[axis]}{label}" for label in found] for axis, found in axes]
        columns = [self._between.join(parts) for parts in product(*labels)]
        return self._title(), columns, list(names), self.effect.reshape(len(names), -1).tolist()

    def __repr__(self) -> str:
        return text_table(*self._shown())

    def _repr_html_(self) -> str:
        return heat_map(*self._shown())


_PREFIXES = {"position": "", "head": "head ", "receiver": "to "}


@dataclass(frozen=True, repr=False, eq=False)
class Grid(Table):
    """A number for each site, position and head.

    Attributes:
        values: the metric, with shape (sites, positions), or (sites, positions, heads) if heads are
            separate; float64, nan for missing cells.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) for the whole value.
        heads: the numbers of the heads; None where they are not separate.
        missing: why cells are nan, by name of the site; for "each" position, cells that only other
            sites have are not listed.
    """

    values: Tensor
    sites: tuple[str, ...]
    positions: tuple[Position | None, ...]
    heads: tuple[int, ...] | None
    missing: dict[str, str] = field(default_factory=dict, kw_only=True)

    def _axes(self) -> dict[str, Sequence[Any]]:
        axes: dict[str, Sequence[Any]] = {"site": self.sites}
        if self.positions != (None,):
            axes["position"] = [_shown(position) for position in self.positions]
        return axes if self.heads is None else axes | {"head": self.heads}


def effect_of(values: Tensor, clean: float, corrupted: float, direction: str) -> Tensor:
    """Return how far values move a metric from the patched run (0) to the other one (1)."""
    start, end = (clean, corrupted) if direction == "noise" else (corrupted, clean)
    return (values - start) / (end - start)


@dataclass(frozen=True, repr=False, eq=False)
class TwoRuns(Grid):
    """A grid over two runs, with values of one run put into the other.

    Attributes:
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise": values of the clean run are put into the corrupted one; or "noise".
    """

    clean: float
    corrupted: float
    direction: str

    @property
    def effect(self) -> Tensor:
        """How far each cell moves the metric from the patched run (0) to the other run (1).

        nan or inf if both runs have the same metric.
        """
        return effect_of(self.values, self.clean, self.corrupted, self.direction)

    _unit = "effect (0 none, 1 all)"

    def _title(self) -> str:
        return (
            f"{type(self).__name__} ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; {self._unit}"
        )


def _shown(position: Any) -> str:
    if isinstance(position, slice):
        parts = [position.start, position.stop, *([] if position.step is None else [position.step])]
        return ":".join("" if part is None else str(part) for part in parts)
    return ", ".join(map(str, position)) if isinstance(position, tuple) else str(position)


class Missing:
    """The cells without a number: raises for the first one, or records nan with the reason.

    Args:
        option: "raise" or "nan".
        verb: what the workflow does to a site, for the error.
        hint: the end of the error message.

    Attributes:
        reasons: why cells are nan, by name of the site.
    """

    def __init__(self, option: Any, verb: str, hint: str = "") -> None:
        self._raises = required_choice("missing", option, "raise", "nan") == "raise"
        self._verb = verb
        self._hint = hint
        self.reasons: dict[str, str] = {}

    def note(self, site: str, why: str) -> float:
        """Return nan and record the reason; or raise a `SiteError` if that is the option."""
        if self._raises:
            raise SiteError(f"cannot {self._verb} {site!r}: {why}{self._hint}", site)
        self.reasons.setdefault(site, why)
        return math.nan
