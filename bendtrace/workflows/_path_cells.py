"""Which edges a cell of path patching is about, and the values that are sent along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError, SiteError
from bendtrace.interject.resolver import describe_where
from bendtrace.workflows._grids import put
from bendtrace.workflows._parts import NoPart, Part
from bendtrace.workflows._path_edges import Edges, Flow, Spot
from bendtrace.workflows._site_values import differing
from bendtrace.workflows._sites import Row, Seen, listed_sites

__all__ = ["Cells", "Plan"]


# The passes in which nodes came up, by what said where they are and their paths.
Places = dict[tuple[int, str], list[int]]
# Gives the metric for some edges, and for the values that begin along them.
Run = Callable[[Edges, dict[int, Tensor]], float]


class Plan:
    """What was said of senders, receivers and the ways between them.

    Attributes:
        senders: as they were given, each a row.
        receivers: as they were given, each a column.
        names: of the receivers.
        paths: "direct", "all" or paths.
        noted: all that is a place in the model.
    """

    def __init__(self, senders: Any, receivers: Any, paths: Any, frozen: Any) -> None:
        self.senders = listed_sites(senders, "senders")
        self.receivers = listed_sites(receivers, "receivers")
        self.names = [_name(item) for item in self.receivers]
        self.paths: Any = paths
        self.noted: list[Any] = list(self.receivers)
        self._frozen = range(0)
        self._nodes: list[range] = []
        if isinstance(paths, str):
            if paths not in ("direct", "all"):
                raise InputError(f'paths= is "direct", "all" or a list of paths, not {paths!r}')
        else:
            self._read(paths)
        if frozen is not None:
            if paths != "all":
                raise InputError('frozen= is for paths="all": it says where no path leads through')
            self._frozen = self._add(listed_sites(frozen, "frozen"))

    def _read(self, paths: Any) -> None:
        for path in listed_sites(paths, "paths"):
            if not isinstance(path, (list, tuple)) or len(path) < 2:
                raise InputError(
                    f"a path is a sequence of nodes, from a sender to a receiver, not {path!r}"
                )
            self._nodes.append(self._add(list(path)))

    def _add(self, items: list[Any]) -> range:
        first = len(self.senders) + len(self.noted)
        self.noted += items
        return range(first, first + len(items))

    def spots(self, flow: Flow, places: Places, number: int) -> list[Spot]:
        """Return the nodes of something that was noted, pass by pass."""
        return [
            flow.spot(path, one)
            for (known, path), numbers in places.items()
            if known == number
            for one in numbers
        ]

    def frozen(self, flow: Flow, places: Places) -> list[Spot]:
        """Return the nodes that no path leads through."""
        return [spot for number in self._frozen for spot in self.spots(flow, places, number)]

    def ways(self, flow: Flow, places: Places) -> list[list[list[Spot]]]:
        """Return the nodes of the paths, each with its passes."""
        return [[self.spots(flow, places, number) for number in path] for path in self._nodes]


def _name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple, set, frozenset)):
        return " + ".join(map(_name, item))
    return describe_where(item)


class Cells:
    """The edges of each sender and receiver, and the values that are sent along them.

    Args:
        flow: the run that is patched.
        plan: what was said.
        rows: the senders.
        places: where all else is that was said.
        source: what the senders gave in the run that values are taken from.
        target: what they gave in the run that is patched.
        names: what these runs are called.
        within: whether it is what senders are given that is changed.

    Attributes:
        made: the edges, by sender and receiver.
        needed: the ops that are carried out aside for them.
        reasons: why cells are missing, by sender.

    Raises:
        SiteError: there are no such edges, or they cannot be followed.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        rows: Sequence[Row],
        places: Places,
        source: Seen,
        target: Seen,
        names: tuple[str, str],
        within: bool,
    ) -> None:
        self.flow = flow
        self.reasons: dict[str, str] = {}
        self._plan = plan
        self._rows = rows
        self._source = source
        self._target = target
        self._names = names
        self._within = within
        self.made: dict[tuple[int, int], Edges] = {}
        self.needed: dict[tuple[int, int], list[int]] = {}
        self._flaws: dict[int, str] = {}
        self._used: set[int] = set()
        ends = [
            plan.spots(flow, places, len(plan.senders) + number)
            for number in range(len(plan.receivers))
        ]
        for said, spots in zip(plan.names, ends, strict=True):
            if not spots:
                raise SiteError(f"the run that is patched did not come by {said!r}", said)
            if len(spots) > 1 and any(spot.is_output for spot in spots):
                raise InputError("the model's output is a receiver by itself, not with others")
        frozen, ways = plan.frozen(flow, places), plan.ways(flow, places)
        for spot in frozen:
            flow.require_own(spot)
        for i, row in enumerate(rows):
            why = self._differing(row)
            if why:
                self._flaws[i] = why
                continue
            senders = [flow.spot(key[1], n) for key in row.keys for n in target[key]]
            for j in range(len(plan.receivers)):
                self._connect(i, j, senders, ends[j], frozen, ways)
        self._require_all_used(ways)

    def _differing(self, row: Row) -> str:
        for key in row.keys:
            if why := differing(self._source.get(key), self._target.get(key)):
                return f"{key[1]}: {why.format(source=self._names[0], target=self._names[1])}"
        return ""

    def _connect(
        self,
        i: int,
        j: int,
        senders: list[Spot],
        ends: list[Spot],
        frozen: list[Spot],
        ways: list[list[list[Spot]]],
    ) -> None:
        flow = self.flow
        for spot in senders:
            flow.require_own(spot)
        made, carried = flow.begin(senders, self._within)
        if self._plan.paths == "direct":
            flow.direct(made, carried, ends)
        elif self._plan.paths == "all":
            flow.every(made, carried, ends, frozen)
        else:
            for number, way in enumerate(ways):
                if set(way[0]) <= set(senders) and set(way[-1]) <= set(ends):
                    begun, values = flow.begin(way[0], self._within)
                    for index, sources in begun.into.items():
                        made.into.setdefault(index, set()).update(sources)
                    flow.along(made, values, way)
                    self._used.add(number)
        self.made[i, j] = made
        self.needed[i, j] = flow.needed(made)

    def _require_all_used(self, ways: list[list[list[Spot]]]) -> None:
        """Refuse what was said in vain."""
        if self._plan.paths == "all" or self._flaws:
            return
        for number, way in enumerate(ways):
            if number not in self._used:
                told = " to ".join(repr(spots[0].path) if spots else "nothing" for spots in way)
                raise SiteError(
                    f"the path {told} does not begin with one of the senders, or not end with one "
                    "of the receivers",
                    self._rows[0].name,
                )
        if not any(made.ends for made in self.made.values()):
            pairs = f"{[row.name for row in self._rows]} to {self._plan.names}"
            raise SiteError(
                f"no edge of the mirror leads from {pairs}; paths='all' takes the ways through "
                "other nodes",
                self._rows[0].name,
            )

    def edges(self) -> Tensor:
        """Return how many edges were chosen, by sender and receiver."""
        return torch.tensor([
            [self._count(i, j) for j in range(len(self._plan.receivers))]
            for i in range(len(self._rows))
        ])  # fmt: skip

    def _count(self, i: int, j: int) -> int:
        made = self.made.get((i, j))
        if made is None:
            return 0
        inner = sum(len(made.into[index]) for index in self.needed[i, j])
        return inner + sum(len(end.sources) for end in made.ends)

    def value(self, run: Run, i: int, j: int, part: Part, base: float, missing: str) -> float:
        """Return the metric with one sender's change let through to one receiver.

        Args:
            run: gives the metric for some edges, and for the values that begin along them.
            i: the sender.
            j: the receiver.
            part: which part of the sender's value is changed.
            base: the metric where no path leads from the one to the other.
            missing: "raise", or "nan" where the runs differ.

        Raises:
            SiteError: they do.
        """
        row = self._rows[i]
        why = self._flaws.get(i, "")
        if not why:
            try:
                known = self._changed(i, part)
            except NoPart as error:
                why = str(error)
            else:
                return run(self.made[i, j], known) if self.made[i, j].ends else base
        if missing == "raise":
            raise SiteError(f"cannot send {row.name!r}: {why}", row.name)
        self.reasons.setdefault(row.name, why)
        return math.nan

    def _changed(self, i: int, part: Part) -> dict[int, Tensor]:
        """Return the changed values that a cell begins with, by the op that gave them."""
        found: dict[int, Tensor] = {}
        for key in self._rows[i].keys:
            for number, value in self._target[key].items():
                spot = self.flow.spot(key[1], number)
                made = put(value, self._source[key][number], part)
                known = self.flow.given(spot) if self._within else self.flow.tensor_of(spot)
                found[known] = made
        return found
