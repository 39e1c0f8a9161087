"""The sites of a workflow: one insertion at each, which every run uses differently."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from bendtrace.debug.calls import Call, differentiable, own_copy
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import InputError, NodePathError, SiteError
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import ContainerShape, LeafShape, assemble, describe, take_apart
from bendtrace.insert.registry import InsertionGroup
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.where import Alias, alias_of
from bendtrace.log.building import RunData
from bendtrace.log.capture import aligned_copy
from bendtrace.log.entries import LayerEntry
from bendtrace.log.nodes import NodePath
from bendtrace.log.path_views import Candidate
from bendtrace.module import BendedModule
from bendtrace.python.checks import required_choice, required_int, several
from bendtrace.python.lazy import required_pandas
from bendtrace.show.paint import heat_map, plot_numbers, text_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


# Numbers over sites, positions and heads, and the metric that computes them.

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


def position_of(value: Any, name: str = "positions") -> Position:
    """Parse one position, or several that belong together: a number, a slice, or numbers."""
    if isinstance(value, slice):
        return value
    if isinstance(value, Tensor) and value.dim() and not value.dtype.is_floating_point:
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Tensor)):
        several = tuple(_checked_number(item, name) for item in value)
        if not several:
            raise InputError(f"{name}= has an empty group of positions")
        return several
    return _checked_number(value, name)


def _checked_number(value: Any, name: str) -> int:
    if not isinstance(value, (bool, float, str)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InputError(f"{name}= takes ints, slices and groups of ints, not {value!r}")


def _positions_of(value: Any) -> tuple[Position, ...] | str | None:
    """Read several positions: None for all together, "each" for as many as there are."""
    if value is None or (isinstance(value, str) and value == "each"):
        return value
    if isinstance(value, (int, slice)) and not isinstance(value, bool):
        return (position_of(value),)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(
            'positions= takes None for the whole, "each", or an iterable of ints, slices and '
            f"groups of ints, not {value!r}"
        )
    listed = tuple(map(position_of, value))
    if not listed:
        raise InputError("positions= is empty")
    return listed


def _heads_of(value: Any, count: int) -> tuple[int, ...]:
    """Read which of some heads are chosen; None for all of them."""
    listed = slice(None) if value is None else position_of(value, "head")
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
    """A part of an activation: a position along an axis, and a head as a slice of another."""

    position: Position | None = None
    axis: int = 1
    head: int | None = None
    heads: int = 1
    head_axis: int = -1
    is_one_of_all: bool = False  # whether it is one of all positions that occur in any value

    def index(self, value: Tensor) -> tuple[Any, ...]:
        """Return the index of the part in a tensor."""
        size = value.shape[self.axis] if -value.dim() <= self.axis < value.dim() else None
        if self.is_one_of_all and isinstance(self.position, int) and size is not None:
            if self.position >= size:
                raise Beyond(f"it has only {size} positions")
        if self.position is None and self.head is None:
            return (...,)
        found: dict[int, Any] = {}
        if self.position is not None:
            axis = _axis(self.axis, value)
            found[axis] = _index_part(self.position, value.shape[axis], axis)
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
        if self.position is None and self.head is None:
            return given.clone()  # which keeps its strides
        made = value.clone()
        made[index] = given[index].to(made.dtype)
        return made


def aliases_of(where: Any, model: BendedModule) -> list[Alias | None]:
    """Return the alias that each of some locations is, or names; None for others."""
    if isinstance(where, (list, tuple, set, frozenset)):
        return [alias for one in where for alias in aliases_of(one, model)]
    return [alias_of(where, model.model)]


def _axis(axis: int, value: Tensor) -> int:
    if not -value.dim() <= axis < value.dim():
        raise NoPart(f"shape {tuple(value.shape)} has no axis {axis}")
    return axis % value.dim()


def _index_part(position: Position, size: int, axis: int) -> Any:
    if isinstance(position, slice):
        if size and not len(range(*position.indices(size))):
            raise NoPart(
                f"axis {axis} has size {size}, and no positions {_position_text(position)}"
            )
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
    which: tuple[int, ...] | None  # the indices of the heads; None if they are not separate
    head_axis: int

    @classmethod
    def of(
        cls, positions: Any, axis: Any, heads: Any = None, head: Any = None, head_axis: Any = -1
    ) -> Columns:
        """Parse the arguments of a workflow; invalid ones raise an `InputError`."""
        required_int("axis", axis)
        required_int("head_axis", head_axis)
        which = None
        if heads is not None:
            if type(heads) is not int or heads < 1:
                raise InputError(f"heads= has to be the number of heads, not {heads!r}")
            which = _heads_of(head, heads)
        elif head is not None:
            raise InputError("head= selects heads: also pass their number as heads=")
        return cls(_positions_of(positions), axis, heads, which, head_axis)

    def named(self, wheres: Any, model: BendedModule) -> Columns:
        """Return the columns of the values that aliases name: these know where the heads are."""
        if self.heads is None:
            return self
        aliases = aliases_of(wheres, model)
        axes = {None if alias is None else alias.heads for alias in aliases}
        if len(axes) > 1:
            raise InputError(
                "heads=: some of these values have an axis of heads, and others have none or "
                "another one: pass those of one kind"
            )
        axis = next(iter(axes), None)
        if axis is not None and self.head_axis not in (-1, axis):
            raise InputError(f"these values have their heads along axis {axis}: omit head_axis=")
        return self if axis is None else replace(self, head_axis=axis)

    def bound_positions(self, values: Iterable[Tensor] = ()) -> tuple[Position | None, ...]:
        """Return the columns with the positions that the values at the sites have."""
        if self.positions is None or not isinstance(self.positions, str):
            return self.positions or (None,)
        with_axis = (v for v in values if -v.dim() <= self.axis < v.dim())
        return tuple(range(max((v.shape[self.axis] for v in with_axis), default=0)))

    def parts(self, positions: Sequence[Position | None]) -> list[Part]:
        """Return the parts in order: the heads of the first position, those of the next."""
        heads: Sequence[int | None] = (None,) if self.which is None else self.which
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
        positions = self.bound_positions(
            value for passes in seen.values() for value in passes.values()
        )
        parts = self.parts(positions)
        found = [[cell(number, part) for part in parts] for number in range(len(names))]
        heads = self.which
        shape = (len(names), len(positions), *(() if heads is None else (len(heads),)))
        values = torch.tensor(found, dtype=torch.float64).reshape(shape)
        return {"values": values, "sites": tuple(names), "positions": positions, "heads": heads}


# Results


class ResultTable:
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
        return plot_numbers(*self._cells())

    def _cells(self) -> tuple[str, list[str], list[str], list[list[float]]]:
        (_, names), *axes = self._axes().items()
        labels = [[f"{_PREFIXES[axis]}{label}" for label in found] for axis, found in axes]
        columns = [self._between.join(parts) for parts in product(*labels)]
        return self._title(), columns, list(names), self.effect.reshape(len(names), -1).tolist()

    def __repr__(self) -> str:
        return text_table(*self._cells())

    def _repr_html_(self) -> str:
        return heat_map(*self._cells())


_PREFIXES = {"position": "", "head": "head ", "receiver": "to "}


@dataclass(frozen=True, repr=False, eq=False)
class Grid(ResultTable):
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
            axes["position"] = [_position_text(position) for position in self.positions]
        return axes if self.heads is None else axes | {"head": self.heads}


class TwoRunTable(ResultTable):
    """Results over two runs, with values of one run put into the other."""

    clean: float
    corrupted: float
    direction: str
    _unit = "effect (0 none, 1 all)"

    @property
    def effect(self) -> Tensor:
        """The share by which each cell moves the metric from the patched run (0) to the other (1).

        nan or inf if both runs have the same metric.
        """
        start, end = self.corrupted, self.clean
        if self.direction == "noise":
            start, end = end, start
        return (self.values - start) / (end - start)

    def _title(self) -> str:
        return (
            f"{type(self).__name__} ({self.direction}): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g}; {self._unit}"
        )


@dataclass(frozen=True, repr=False, eq=False)
class TwoRuns(TwoRunTable, Grid):
    """A grid over two runs, with values of one run put into the other.

    Attributes:
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
        direction: "denoise": values of the clean run are put into the corrupted one; or "noise".
    """

    clean: float
    corrupted: float
    direction: str


def _position_text(position: Any) -> str:
    if isinstance(position, slice):
        parts = [position.start, position.stop, *([] if position.step is None else [position.step])]
        return ":".join("" if part is None else str(part) for part in parts)
    return ", ".join(map(str, position)) if isinstance(position, tuple) else str(position)


class MissingCells:
    """The cells without a number: raises for the first one, or records nan with the reason."""

    def __init__(self, option: Any, verb: str, hint: str = "") -> None:
        self._raises = required_choice("missing", option, "raise", "nan") == "raise"
        self._verb = verb
        self._hint = hint
        self.reasons: dict[str, str] = {}  # why cells are nan, by name of the site

    def note(self, site: str, why: str) -> float:
        """Return nan and record the reason; or raise a `SiteError` if that is the option."""
        if self._raises:
            raise SiteError(f"cannot {self._verb} {site!r}: {why}{self._hint}", site)
        self.reasons.setdefault(site, why)
        return math.nan


At = Literal["output", "input"]
Key = tuple[int, str]  # the number of a site as it was given, and the path of the node
Act = Callable[[Key, int, Tensor], Tensor | None]  # for the value of a pass; None keeps it
Seen = dict[Key, dict[int, Tensor]]  # the values of all nodes in one run, pass by pass


@dataclass(frozen=True)
class SiteRow:
    """A site of a grid: its name, and the nodes, which are replaced together."""

    name: str
    keys: tuple[Key, ...]


def site_list(sites: Any, name: str = "sites") -> list[Any]:
    """Return sites as a list; a single site becomes a list of one."""
    listed = several(sites)
    if not listed:
        raise InputError(f"{name}= is empty: pass at least one node")
    return listed


# Values


def swap_tensor(
    value: Any, path: str, label: str, change: Callable[[Tensor], Tensor | None]
) -> Any:
    """Replace the only tensor in the value of a node; return None to keep it."""
    if isinstance(value, Tensor):
        return change(value)
    shape, found = take_apart(value)
    tensors = [i for i, item in enumerate(found) if isinstance(item, Tensor)]
    if len(tensors) != 1:
        which = f"{len(tensors)} tensors in it" if tensors else "no tensor in it"
        raise SiteError(
            f"{label} returns {describe(value)} with {which}: name a part, as in "
            f"'{path}.output|sub_0' for the call of a module, '{path}|sub_0' for an op",
            label,
        )
    return _swap_item(shape, found, tensors[0], change)


def first_replaced(
    inputs: Inputs, path: str, change: Callable[[Tensor], Tensor | None]
) -> Inputs | None:
    """Replace the first tensor among the inputs of a node; return None to keep it."""
    shape, found = take_apart((tuple(inputs), inputs.kwargs))
    first = next((i for i, value in enumerate(found) if isinstance(value, Tensor)), None)
    if first is None:
        raise SiteError(f"{path or 'the model'} receives no tensor", path)
    made = _swap_item(shape, found, first, change)
    return None if made is None else Inputs(*made)


def _swap_item(
    shape: Any, found: list[Any], index: int, change: Callable[[Tensor], Tensor | None]
) -> Any:
    made = change(found[index])
    return None if made is None else assemble(shape, [*found[:index], made, *found[index + 1 :]])


def _each_replaced(value: Any, path: str, change: Callable[[str, Tensor], Tensor | None]) -> Any:
    """Replace tensors in the value of a node, each of which has its own path."""
    shape, found = take_apart(value)
    changed = False
    for i, name in enumerate(_leaf_names(shape, ())):
        if isinstance(found[i], Tensor):
            made = change(f"{path}|{name}", found[i])
            if made is not None:
                found[i], changed = made, True
    return assemble(shape, found) if changed else None


def _leaf_names(shape: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the leaves of a container, as node paths have them."""
    if isinstance(shape, LeafShape):
        yield ".".join(path)
    elif isinstance(shape, ContainerShape):
        kind = shape.kind
        # Those of named tuples, and of torch's own results, such as those of `max`.
        of_tuple = getattr(kind, "_fields", getattr(kind, "__match_args__", ()))
        fields = of_tuple if issubclass(kind, tuple) else ()
        for key, item in zip(shape.keys, shape.items, strict=True):
            name = f"sub_{key}" if isinstance(key, int) else str(key)
            yield from _leaf_names(item, (*path, fields[key] if fields else name))
        for name, item in zip(shape.names, shape.attributes, strict=True):
            yield from _leaf_names(item, (*path, str(name)))


def why_differing(
    source: Mapping[int, Tensor] | None, target: Mapping[int, Tensor] | None, names: tuple[str, str]
) -> str:
    """Return why a node's values in one run cannot replace those in another; "" if they can."""
    if not source or not target:
        return f"the {names[1] if source else names[0]} run did not reach it"
    if source.keys() != target.keys():
        return (
            f"it ran {len(source)} times in the {names[0]} run and {len(target)} times in the "
            f"{names[1]} run; name a pass, as in 'relu:1'"
        )
    for number, value in source.items():
        if why := unlike(value, target[number]):
            return f"in the {names[0]} run it is {why} in the {names[1]} run"
    return ""


def unlike(source: Tensor, target: Tensor) -> str:
    """Return how the kinds of two tensors differ; "" if they are alike."""
    if source.shape != target.shape:
        return f"of shape {tuple(source.shape)}, and {tuple(target.shape)}"
    if source.dtype != target.dtype:
        return f"of {source.dtype}, and of {target.dtype}"
    if source.device != target.device:
        return f"on {source.device}, and on {target.device}"
    return ""


# Insertions


@dataclass(eq=False, repr=False)
class _Station(Interjection):
    """Hands the value of a site to the present run."""

    late = True
    self_contained = True

    number: int
    sites: Sites

    @property
    def label(self) -> str:
        return self.sites.label

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        return self.sites.reached(self.number, at, output)


class _SiteObserver(_Station):
    observes = True


class _Noter(_SiteObserver):
    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        self.sites.note(self.number, at)


class _InputStation(_Station):
    after = Interjection.after

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        reached = self.sites.reached
        return first_replaced(inputs, at.path, lambda tensor: reached(self.number, at, tensor))


class Sites:
    """Sites in a model, active while the context lasts.

    All are inserted together, and for all runs, so that the runs share their traces; each run
    decides on the replacements.
    """

    def __init__(
        self,
        bended: BendedModule,
        items: Sequence[Any],
        calls: Sequence[Call],
        *,
        at: Any = "output",
        columns: Columns | None = None,
        also: Sequence[Any] = (),
        noted: Sequence[Any] = (),
        label: str = "workflow",
        observes: bool = False,
        every_part: bool = False,
        allow_none: bool = False,
    ) -> None:
        self.label = label
        self.places: dict[Key, list[int]] = {}  # the passes of the noted nodes in the last run
        kind: type[_Station] = _SiteObserver if observes else _Station
        of_inputs = required_choice("at", at, "output", "input") == "input"
        self._kinds: list[type[_Station]] = [_InputStation if of_inputs else kind] * len(items)
        self._kinds += [kind] * len(also) + [_Noter] * len(noted)
        self._items = [*items, *also, *noted]
        self._at, self._columns = at, columns
        self._count = len(items)
        self._bended = bended
        self._calls = [own_copy(call) for call in calls]
        self._every_part = every_part
        self._allow_none = allow_none
        self._group = InsertionGroup(bended)
        self._act: Act | None = None
        self._thread = threading.get_ident()
        self._still = PreservedState(bended.model)

    def run(self, call: Call, act: Act | None = None, *, with_gradients: bool = False) -> Any:
        """Call the model with copies of some inputs, and the same random numbers and buffers."""
        given = own_copy(call)
        if with_gradients:
            given = differentiable(given)
        self._still.rewind()
        self.places = {}
        self._act = act
        try:
            return given.to(self._bended)
        finally:
            self._act = None

    def seen(
        self, call: Call, act: Act | None = None, *, with_gradients: bool = False
    ) -> tuple[Any, Seen]:
        """Call the model like `run`; return its output, and copies of the values at the sites.

        If `act` replaces a value, the replacement is returned.
        """
        seen: Seen = {}

        def keep(key: Key, number: int, value: Tensor) -> Tensor | None:
            made = None if act is None else act(key, number, value)
            with torch.inference_mode(False), torch.no_grad():
                kept = value if made is None else made
                seen.setdefault(key, {})[number] = aligned_copy(kept.detach())
            return made

        return self.run(call, keep, with_gradients=with_gradients), seen

    def measured(self, call: Call, metric: Metric, act: Act | None = None) -> tuple[float, Seen]:
        """Return the metric of a call, and the values at the sites."""
        output, seen = self.seen(call, act)
        return number_of(metric, output), seen

    def rows(self, *runs: Iterable[Key]) -> list[SiteRow]:
        """Return the sites, in the order given.

        An item that matches several nodes becomes a row for each, in the order in which they ran; a
        list of items becomes one row.
        """
        found = []
        for number, item in enumerate(self._items[: self._count]):
            keys = _keys_of_pass(number, runs)
            if not keys and not self._allow_none:
                notes = "; ".join(self._group.insertions[number].report().notes)
                label = describe_where(item)
                raise SiteError(f"no run reached {label}" + (f": {notes}" if notes else ""), label)
            if isinstance(item, (list, tuple, set, frozenset)):
                if keys:
                    found.append(SiteRow(" + ".join(path for _, path in keys), tuple(keys)))
            elif len(keys) == 1 and isinstance(item, str):
                found.append(SiteRow(item, (keys[0],)))
            else:
                found += [SiteRow(key[1], (key,)) for key in keys]
        if self._columns is not None:
            made = zip(self._group.insertions, self._items[: self._count], strict=False)
            require_heads(self._bended, self._columns, self._at, made)
        return found

    def settle(self, *runs: Iterable[Key]) -> None:
        """Insert, by path, the items that each run would have to resolve again."""
        for number, insertion in enumerate(self._group.insertions):
            if (
                any(target.is_ahead for target in insertion.targets)
                and not insertion.passes.needs_total
            ):
                if keys := _keys_of_pass(number, runs):
                    self._group.replace(number, [NodePath(path) for _, path in keys])

    def note(self, number: int, at: NodePass) -> None:
        """Record a pass of a noted node."""
        if threading.get_ident() == self._thread:
            self.places.setdefault((number, at.path or "output"), []).append(at.number)

    def reached(self, number: int, at: NodePass, value: Any) -> Any:
        """Let the current run replace a value; return the replacement, or None."""
        act = self._act
        if act is None or threading.get_ident() != self._thread:
            return None
        path = at.path or "output"
        if isinstance(value, Tensor):
            return act((number, path), at.number, value)
        if self._every_part:
            return _each_replaced(
                value, path, lambda part, item: act((number, part), at.number, item)
            )
        label = describe_where(self._items[number])
        return swap_tensor(value, path, label, lambda item: act((number, path), at.number, item))

    def __enter__(self) -> Self:
        try:
            self._insert()
            is_complete = all(
                insertion.is_checked
                and not insertion.passes.needs_total
                and not any(target.is_open or target.is_ahead for target in insertion.targets)
                for insertion in self._group.insertions
            )
        except NodePathError:
            is_complete = False
        if not is_complete:
            self._group.remove()
            # Call the model as it is, so that its nodes have names.
            try:
                for call in self._calls:
                    self._still.rewind()
                    own_copy(call).to(self._bended)
            finally:
                self._still.rewind()
            self._insert()
        return self

    def __exit__(self, *error: object) -> None:
        self._group.remove()
        self._still.rewind()

    def _insert(self) -> None:
        self._group = InsertionGroup(self._bended)
        made = [
            self._group.make(
                list(item) if isinstance(item, (tuple, set, frozenset)) else item,
                self._kinds[number](number, self),
                allow_none=self._allow_none,
            )
            for number, item in enumerate(self._items)
        ]
        self._group.insert_all(*made[self._count :], *made[: self._count])


def _keys_of_pass(number: int, runs: Iterable[Iterable[Key]]) -> list[Key]:
    return list(dict.fromkeys(key for run in runs for key in run if key[0] == number))


@dataclass(eq=False)
class ValueExchange:
    """Puts values of one run into another, cell by cell."""

    source: Seen
    target: Seen
    names: tuple[str, str]
    missing: MissingCells

    def __post_init__(self) -> None:
        self._flaw = ""
        self._flaws: dict[Key, str] = {}

    def cell(
        self,
        row: SiteRow,
        keys: Sequence[Key],
        part: Part,
        run: Callable[[Act], Any],
        metric: Metric,
    ) -> float:
        """Return the metric of a run with an `Act` that replaces a cell; nan if it cannot."""
        try:
            flaw = self._flaw_between(keys, part)
        except Beyond:
            return math.nan
        if not flaw:
            self._flaw = ""
            reached: set[Key] = set()

            def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                if key not in keys:
                    return None
                reached.add(key)
                return self._replacement(key, number, value, part)

            output = run(act)
            flaw = self._flaw
            if not flaw and len(reached) < len(keys):
                gone = next(key[1] for key in keys if key not in reached)
                flaw = f"with other values replaced, the run no longer reached {gone!r}"
            if not flaw:
                return number_of(metric, output)
        return self.missing.note(row.name, flaw)

    def _flaw_between(self, keys: Sequence[Key], part: Part) -> str:
        for key in keys:
            if key not in self._flaws:
                self._flaws[key] = why_differing(
                    self.source.get(key), self.target.get(key), self.names
                )
            if why := self._flaws[key]:
                return f"{key[1]}: {why}"
            try:
                for value in self.source[key].values():
                    part.index(value)
            except Beyond:
                raise
            except NoPart as error:
                return f"{key[1]}: {error}"
        return ""

    def _replacement(self, key: Key, number: int, value: Tensor, part: Part) -> Tensor | None:
        given = self.source[key].get(number)
        source, target = self.names
        if given is None:
            self._flaw = (
                f"{key[1]}: with it replaced, the {target} run reached it again, in pass "
                f"{number + 1}, which the {source} run does not have"
            )
        elif why := unlike(given, value):
            self._flaw = (
                f"{key[1]}: with passes before it replaced, it is {why} in pass {number + 1} of "
                f"the {source} and the {target} run"
            )
        else:
            return part.put(value, given)
        return None


# Whether a value consists of heads: a run splits it into them, or has joined it from them.

# Each number of their results depends on all numbers of a row, and so on every head.
_MIXING = frozenset(
    {
        "__matmul__", "__rmatmul__", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d",
        "einsum", "embedding", "layer_norm", "linear", "matmul", "mm",
    }
)  # fmt: skip

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack", "stack"})


def require_heads(
    model: BendedModule, columns: Columns, at: str, locations: Iterable[tuple[Insertion, Any]]
) -> None:
    """Raise if the values at some locations do not consist of the heads a workflow separates.

    The model was called before. With `at="input"`, the values are the first inputs of the nodes.
    """
    if columns.heads is None:
        return
    places = [
        (place, "input" if place.role == "input" else at, aliases_of(where, model)[0])
        for insertion, where in locations
        for place in (target.place for target in insertion.targets)
        if place is not None and place.role != "state"
    ]
    recordings = model._knowledge.recordings()
    if not recordings:
        projects = [
            kind == "input"
            and node.module is not None
            and any(p.dim() > 1 for p in node.module.parameters(recurse=False))
            for place, kind, _ in places
            for node in model._knowledge.modules()
            if place.matcher.matches(node)
        ]
        if projects and all(projects):
            return
        raise InputError("heads= is compared with a run of the model: call the model once before")
    for recording in recordings:
        nodes = model._knowledge.nodes_of(recording).candidates.values()
        found = [
            (node, place, kind, alias)
            for place, kind, alias in places
            for node in nodes
            if place.matcher.matches(node)
        ]
        log = model._knowledge.run(recording).log if found else None
        for node, place, kind, alias in found:
            assert log is not None
            for entry in _values_at(log, node, kind, place.dig):
                _require_heads_in(entry, log, columns, kind, alias, node.path)
        if found:
            return


def _require_heads_in(
    entry: LayerEntry, log: RunData, columns: Columns, at: str, alias: Alias | None, path: str
) -> None:
    heads, subject = columns.heads, f"heads={columns.heads}: the {at} of {path!r}"
    if alias is not None and alias.heads is not None:
        value = torch.empty(entry.shape or (), device="meta")
        named = value if alias.pick is None else alias.pick(value)
        if named.shape[alias.heads] != heads:
            raise SiteError(f"{subject} has {named.shape[alias.heads]} heads", path)
    elif not _Heads(log, columns).are_in(entry, is_given=at == "input"):
        raise SiteError(
            f"{subject} is neither split into {heads} heads nor joined from them, so its slices "
            "mean nothing. The heads' results are the input of their output projection: choose "
            'that, with at="input"',
            path,
        )


def _values_at(
    log: RunData, node: Candidate, at: str, dig: tuple[Any, ...]
) -> Iterator[LayerEntry]:
    """Yield the first value that a node is given, or that it returns, or a part of that."""
    by_label = {entry.label: entry for entry in log.entries}
    if node.module is not None:
        calls = (call for call in log.modules if call.name == node.module_path)
        labels = next(((c.inputs if at == "input" else c.outputs) for c in calls), [])
    else:
        its = next((entry for entry in log.entries if entry.node_path == node.path), None)
        labels = [] if its is None else its.parents if at == "input" else [its.label]
    first = dig[0] if len(dig) == 1 and isinstance(dig[0], int) else 0
    yield from (by_label[label] for label in labels[first : first + 1] if by_label[label].shape)


class _Heads:
    def __init__(self, log: RunData, columns: Columns) -> None:
        assert columns.heads is not None
        self._by_label = {entry.label: entry for entry in log.entries}
        self._count: int = columns.heads
        self._axis = columns.head_axis

    def are_in(self, entry: LayerEntry, *, is_given: bool) -> bool:
        shape = entry.shape or ()
        if not -len(shape) <= self._axis < len(shape) or shape[self._axis] % self._count:
            return True  # for which there is another error
        width = shape[self._axis] // self._count
        users = [self._by_label[label] for label in entry.children]
        return (
            width == 1
            or (is_given and any(user.function in _MIXING - {"layer_norm"} for user in users))
            or self._meets(entry, width, is_before=False)
            or self._meets(entry, width, is_before=True)
        )

    def _meets(self, entry: LayerEntry, width: int, is_before: bool) -> bool:
        """Return whether an op before or after, up to those that mix heads, separates them."""
        least = (entry.shape or ()).count(width)
        waiting, seen = [entry], {entry.label}
        while waiting:
            one = waiting.pop()
            if is_before and one.function in _MIXING:
                continue
            labels = one.parents if is_before else one.children
            others = [self._by_label[label] for label in labels]
            whole = one.function in _JOINING if is_before else len({o.index for o in others}) == 1
            if whole and len(others) == self._count:  # each is a head
                return True
            for other in others:
                shape = other.shape or ()
                mixes = not is_before and other.function in _MIXING
                if other.label in seen or mixes or not shape:
                    continue
                # Behind the axis of samples. Of queries, keys and values, each third has its heads.
                if shape.count(width) > least and any(
                    after == width and size > 1 and not self._count % size
                    for size, after in pairwise(shape[len(entry.shape or ()) > 1 :])
                ):
                    return True
                seen.add(other.label)
                waiting.append(other)
        return False
