"""Parts of an activation: positions along an axis, heads, channels."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError

__all__ = [
    "Beyond",
    "Columns",
    "NoPart",
    "Part",
    "Position",
    "position_of",
    "positions_of",
    "which_of",
]

Position = int | slice | tuple[int, ...]


class NoPart(Exception):
    """A value has no such part: why."""


class Beyond(NoPart):
    """It has no such part, since other values have more of them than it has."""


def position_of(said: Any, name: str = "positions") -> Position:
    """Read one position, or several that go together.

    Args:
        said: a number, a slice, or numbers.
        name: of the argument, for errors.

    Raises:
        InputError: it is something else.
    """
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


def positions_of(said: Any, name: str = "positions") -> tuple[Position, ...] | str | None:
    """Read several positions: None for all at once, "each" for as many as there are.

    Raises:
        InputError: it is something else.
    """
    if said is None or said == "each":
        return None if said is None else "each"
    if isinstance(said, (str, bytes)) or not isinstance(said, Iterable):
        if isinstance(said, (int, slice)) and not isinstance(said, bool):
            return (position_of(said, name),)
        raise InputError(
            f'{name}= takes None for the whole, "each", or an iterable of ints, slices and groups '
            f"of ints, not {said!r}"
        )
    listed = tuple(position_of(item, name) for item in said)
    if not listed:
        raise InputError(f"{name}= is empty")
    return listed


def which_of(said: Any, count: int, name: str) -> tuple[int, ...]:
    """Read which of some number of things are meant; None for all of them.

    Raises:
        InputError: there are not so many, or it is something else.
    """
    if said is None:
        return tuple(range(count))
    listed = position_of(said, name)
    if isinstance(listed, slice):
        return tuple(range(count))[listed]
    listed = listed if isinstance(listed, tuple) else (listed,)
    for number in listed:
        if not -count <= number < count:
            raise InputError(f"{name}={number} is none of {count}")
    return tuple(number % count for number in listed)


@dataclass(frozen=True)
class Part:
    """A part of an activation.

    Attributes:
        position: which position along `axis`; None for all.
        axis: the axis of the positions.
        head: which head; None for all.
        heads: how many heads there are.
        head_axis: the axis that is made of them, one after the other.
        is_one_of_all: whether it is one of all positions that there are in any value.
    """

    position: Position | None = None
    axis: int = 1
    head: int | None = None
    heads: int = 1
    head_axis: int = -1
    is_one_of_all: bool = False

    def index(self, value: Tensor) -> tuple[Any, ...] | None:
        """Return what to write in brackets behind a tensor; None for all of it.

        Raises:
            NoPart: the tensor has no such part.
        """
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
                raise NoPart(f"axis {axis} is both that of the positions and that of the heads")
            size = value.shape[axis]
            if size % self.heads:
                raise NoPart(f"axis {axis} has size {size}, which is no multiple of {self.heads}")
            width = size // self.heads
            found[axis] = slice(self.head * width, (self.head + 1) * width)
        return tuple(found.get(number, slice(None)) for number in range(value.dim()))


def _axis(axis: int, value: Tensor) -> int:
    if not -value.dim() <= axis < value.dim():
        raise NoPart(f"shape {tuple(value.shape)} has no axis {axis}")
    return axis % value.dim()


def _entry(position: Position, size: int, axis: int) -> Any:
    if isinstance(position, slice):
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
    """The parts that a grid has at each site.

    Attributes:
        positions: as `positions_of` returns them.
        axis: their axis.
        heads: how many heads; None where they are not told apart.
        which: which of them.
        head_axis: their axis.
    """

    positions: tuple[Position, ...] | str | None = None
    axis: int = 1
    heads: int | None = None
    which: tuple[int, ...] = ()
    head_axis: int = -1

    @classmethod
    def of(
        cls, positions: Any, axis: Any, heads: Any = None, head: Any = None, head_axis: Any = -1
    ) -> Columns:
        """Read what was said.

        Raises:
            InputError: it makes no sense.
        """
        for name, number in (("axis", axis), ("head_axis", head_axis)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputError(f"{name}= has to be an int, not {number!r}")
        which: tuple[int, ...] = ()
        if heads is not None:
            if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
                raise InputError(f"heads= is how many heads there are, not {heads!r}")
            which = which_of(head, heads, "head")
        elif head is not None:
            raise InputError("head= says which heads: say with heads= how many there are")
        return cls(positions_of(positions), axis, heads, which, head_axis)

    @property
    def shape_of_heads(self) -> tuple[int, ...]:
        """What the heads add to the shape of a grid."""
        return () if self.heads is None else (len(self.which),)

    def settled(self, values: Iterable[Tensor]) -> tuple[Position | None, ...]:
        """Return the positions, for the values that there are at the sites."""
        if self.positions is None:
            return (None,)
        if not isinstance(self.positions, str):
            return self.positions
        sizes = [
            value.shape[self.axis]
            for value in values
            if -value.dim() <= self.axis < value.dim()
        ]  # fmt: skip
        return tuple(range(max(sizes, default=0)))

    def parts(self, positions: Sequence[Position | None]) -> list[Part]:
        """Return the parts in order: the heads of the first position, those of the next."""
        heads: Sequence[int | None] = (None,) if self.heads is None else self.which
        return [
            Part(
                position, self.axis, head, self.heads or 1, self.head_axis, self.positions == "each"
            )
            for position in positions
            for head in heads
        ]
