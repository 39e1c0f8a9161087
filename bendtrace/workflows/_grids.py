"""Results over sites and the parts of what they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.errors import InputError, SiteError
from bendtrace.workflows._metrics import Metric, number_of
from bendtrace.workflows._parts import Beyond, Columns, NoPart, Part, Position
from bendtrace.workflows._site_values import differing, unlike
from bendtrace.workflows._sites import Act, Key, Row, Seen

if TYPE_CHECKING:
    import pandas

__all__ = ["Exchange", "Grid", "Missing", "frame", "grid_of", "put", "required_missing", "table"]


@dataclass(frozen=True, repr=False, eq=False)
class Grid:
    """A number for each site, position and head.

    Attributes:
        values: the metric, in shape (sites, positions), or (sites, positions, heads) where heads
            were told apart; float64, nan where something was missing.
        sites: names of the sites.
        positions: along the axis: ints, slices, groups of ints; (None,) where the whole was meant.
        heads: the numbers of the heads; None where they were not told apart.
        missing: why cells are nan, by name of the site; for "each" position not where other sites
            merely have more of them.
    """

    values: Tensor
    sites: tuple[str, ...]
    positions: tuple[Position | None, ...]
    heads: tuple[int, ...] | None
    missing: dict[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def effect(self) -> Tensor:
        """What is of interest in the values, in the same shape."""
        return self.values

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each cell."""
        effects, values = self.effect.flatten().tolist(), self.values.flatten().tolist()
        heads = (None,) if self.heads is None else self.heads
        cells = product(self.sites, self.positions, heads)
        for (site, position, head), value, effect in zip(cells, values, effects, strict=True):
            row: dict[str, Any] = {"site": site}
            if self.positions != (None,):
                row["position"] = _shown(position)
            if self.heads is not None:
                row["head"] = head
            yield row | {"value": value, "effect": effect}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each cell: site, position, head (where there are such), value, effect.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame(list(self.rows()))

    def _title(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        heads = (None,) if self.heads is None else self.heads
        columns = [
            " ".join(
                ([_shown(position)] if position is not None else [])
                + ([f"head {head}"] if head is not None else [])
            )
            for position, head in product(self.positions, heads)
        ]
        return table(self._title(), columns, self.sites, self.effect.flatten(1))


def _shown(position: Any) -> Any:
    if isinstance(position, slice):
        parts = [position.start, position.stop, *([] if position.step is None else [position.step])]
        return ":".join("" if part is None else str(part) for part in parts)
    return ", ".join(map(str, position)) if isinstance(position, tuple) else str(position)


_MOST_ROWS, _MOST_COLUMNS = 40, 12


def table(title: str, columns: Sequence[str], names: Sequence[str], values: Tensor) -> str:
    """Return numbers as text: a title, a line with names of columns, a line for each name."""
    lines = [title]
    shown = values[:_MOST_ROWS, :_MOST_COLUMNS].tolist()
    heads = list(columns[:_MOST_COLUMNS])
    more = len(columns) > _MOST_COLUMNS
    cells = [[_number(value) for value in row] for row in shown]
    widths = [max(map(len, column), default=0) for column in zip(heads, *cells, strict=True)]
    names = [str(name) for name in names[:_MOST_ROWS]]
    first = max(map(len, names), default=0)
    if any(heads):
        told = "  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))
        lines.append(f"  {'':{first}}  {told}" + (" ..." if more else ""))
    for name, row in zip(names, cells, strict=True):
        told = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {name:{first}}  {told}" + (" ..." if more else ""))
    if len(values) > _MOST_ROWS:
        lines.append(f"  ... and {len(values) - _MOST_ROWS} more")
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:.3f}"
    return text if text != "-0.000" else "0.000"


def frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return rows as a data frame.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'bendtrace[pandas]'") from error
    return pandas.DataFrame(rows)


Missing = str


def required_missing(missing: Any) -> Missing:
    """Return what is to be done about what is missing, if it can be done.

    Raises:
        InputError: it cannot.
    """
    if missing not in ("raise", "nan"):
        raise InputError(f'missing= is "raise" or "nan", not {missing!r}')
    return str(missing)


class Exchange:
    """Puts values of one run into others, cell by cell.

    Args:
        source: what was seen in the run that values are taken from.
        target: what was seen in the run that they are put in.
        names: what these runs are called, in errors.
        missing: "raise", or "nan".

    Attributes:
        reasons: why cells are missing, by site.
    """

    def __init__(
        self, source: Seen, target: Seen, names: tuple[str, str], missing: Missing
    ) -> None:
        self.reasons: dict[str, str] = {}
        self._source = source
        self._target = target
        self._names = names
        self._missing = missing
        self._flaw = ""
        self._known: dict[Key, str] = {}

    def cell(
        self, row: Row, keys: Sequence[Key], part: Part, run: Callable[[Act], Any], metric: Metric
    ) -> float:
        """Return the metric with one cell exchanged; nan if it is missing.

        Args:
            row: the site, for errors.
            keys: the nodes whose values are exchanged.
            part: the part of them.
            run: calls the model, doing something at all nodes.
            metric: of what it gives.

        Raises:
            SiteError: something is missing, and that is to be told.
        """
        try:
            flaw = self._found_before(keys, part)
        except Beyond:
            return math.nan
        if not flaw:
            self._flaw = ""
            came: set[Key] = set()

            def act(key: Key, number: int, value: Tensor) -> Tensor | None:
                if key not in keys:
                    return None
                came.add(key)
                return self._exchanged(key, number, value, part)

            output = run(act)
            flaw = self._flaw
            if not flaw and len(came) < len(keys):
                gone = next(path for key, path in keys if (key, path) not in came)
                flaw = f"with others exchanged, the run did not come by {gone!r} any more"
            if not flaw:
                return number_of(metric, output)
        if self._missing == "raise":
            raise SiteError(
                f"cannot exchange {row.name!r}: {flaw} (missing='nan' gives nan for what cannot "
                "be exchanged)",
                row.name,
            )
        self.reasons.setdefault(row.name, flaw)
        return math.nan

    def _found_before(self, keys: Sequence[Key], part: Part) -> str:
        for key in keys:
            if key not in self._known:
                source, target = self._names
                why = differing(self._source.get(key), self._target.get(key))
                self._known[key] = why.format(source=source, target=target)
            if why := self._known[key]:
                return f"{key[1]}: {why}"
            try:
                for value in self._source[key].values():
                    part.index(value)
            except Beyond:
                raise
            except NoPart as error:
                return f"{key[1]}: {error}"
        return ""

    def _exchanged(self, key: Key, number: int, value: Tensor, part: Part) -> Tensor | None:
        given = self._source[key].get(number)
        if given is None:
            self._flaw = (
                f"{key[1]}: with it exchanged, the {self._names[1]} run came by it once more, in "
                f"pass {number + 1}, which the {self._names[0]} run does not have"
            )
            return None
        if why := unlike(given, value):
            self._flaw = (
                f"{key[1]}: with passes before it exchanged, it is {why} in pass {number + 1} of "
                f"the {self._names[0]} and the {self._names[1]} run"
            )
            return None
        return put(value, given, part)


def put(value: Tensor, given: Tensor, part: Part) -> Tensor:
    """Return a tensor with a part of another one in it."""
    index = part.index(value)
    if index is None:
        return given.clone()
    made = value.clone()
    made[index] = given[index].to(made.dtype)
    return made


def grid_of(
    rows: Sequence[Row],
    columns: Columns,
    seen: Seen,
    cell: Callable[[int, Part], float],
) -> tuple[Tensor, tuple[Position | None, ...], tuple[int, ...] | None]:
    """Work out all cells of a grid.

    Args:
        rows: the sites.
        columns: what is told apart at each.
        seen: what they gave, which says how many positions there are.
        cell: gives the number of a cell: the site's number, the part.

    Returns:
        The values, the positions, and the heads.
    """
    values = [value for passes in seen.values() for value in passes.values()]
    positions = columns.settled(values)
    parts = columns.parts(positions)
    found = [[cell(number, part) for part in parts] for number in range(len(rows))]
    shape = (len(rows), len(positions), *columns.shape_of_heads)
    heads = None if columns.heads is None else columns.which
    return torch.tensor(found, dtype=torch.float64).reshape(shape), positions, heads
