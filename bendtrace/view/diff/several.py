"""How several runs differ from the first of them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from bendtrace.history.entries import LayerEntry
from bendtrace.history.sizes import counted
from bendtrace.history.tables import Table
from bendtrace.view.diff.changes import LayerChange
from bendtrace.view.diff.text import numbers_text

if TYPE_CHECKING:
    from bendtrace.view.diff.difference import Difference

__all__ = ["ComparedLayer", "Differences"]


class ComparedLayer(NamedTuple):
    """A place of the first run, and what the other runs have there.

    Attributes:
        layer: its name.
        passes: how often the first run came there.
        module: the module that it is in.
        runs: for each other run, how it differs: "" if it does not.
    """

    layer: str
    passes: int
    module: str
    runs: tuple[str, ...]


class Differences(Sequence["Difference"]):
    """The difference between a first run and each of several others.

    It is true if any run differs from the first, and prints as a report.

    Args:
        differences: the differences, all from one run.

    Example:
        >>> import torch, bendtrace as bt
        >>> def shrink(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> runs = [bt.trace(shrink, torch.ones(n), save="all") for n in (4, 4, 9)]
        >>> differences = bt.diff(*runs)
        >>> bool(differences[0]), bool(differences[1])
        (False, True)
        >>> [row.runs for row in differences.layers() if row.layer == "norm_1_1"]
        [('', 'value (max abs 1)')]
        >>> print(differences.table())
        layer       passes    module    run_2    run_3
        ----------  --------  --------  -------  -----------------
        input_1_0   1                            shape
        norm_1_1    2                            value (max abs 1)
        gt_1_2      2                            value
        bool_1      2                            value
        div_1_3     1                            shape
        output_1_4  1                            shape
    """

    def __init__(self, differences: Sequence[Difference]) -> None:
        self._all = tuple(differences)

    @overload
    def __getitem__(self, index: int) -> Difference: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Difference, ...]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        return any(self._all)

    def layers(self, every: bool = False) -> list[ComparedLayer]:
        """Return the places of the first run, in its order.

        Args:
            every: whether to include those at which no run differs.
        """
        places: dict[tuple[str, Any], list[LayerEntry]] = {}
        for entry in self._all[0].a.entries:
            places.setdefault((entry.name, entry.element), []).append(entry)
        found = [_Found(one) for one in self._all]
        rows = [
            ComparedLayer(
                same[0].name if same[0].element is None else same[0].label.partition(":")[0],
                len(same), same[0].module, tuple(one.said_of(same) for one in found),
            )
            for same in places.values()
        ]  # fmt: skip
        return [row for row in rows if every or any(row.runs)]

    def table(self, every: bool = False) -> Table:
        """Return the same as a table with a column for each other run.

        Args:
            every: whether to include the places at which no run differs.
        """
        columns = [f"run_{number}" for number in range(2, len(self) + 2)]
        row_of = cast("Any", namedtuple("Row", ["layer", "passes", "module", *columns]))
        rows = self.layers(every)
        return Table([row_of(*row[:3], *row.runs) for row in rows])

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as plain values, ready for JSON."""
        return {
            "same": not self,
            "differences": [difference.to_dict() for difference in self._all],
            "layers": [row._asdict() for row in self.layers()],
        }

    def text(self, limit: int | None = 30) -> str:
        """Return the report.

        Args:
            limit: the maximum number of layers; None for all.
        """
        lines = [f"{self._all[0].a.name}: run 1, and how {counted(len(self), 'other')} differ"]
        for number, difference in enumerate(self._all, 2):
            first = difference.first
            said = "the same"
            if first is not None:
                said = f"first {first.text}" if first.kind == "layers" else f"first at {first.text}"
                before, a, after = said.rpartition(" in a, ")
                if a and after.endswith(" in b"):
                    said = f"{before} in run 1, {after.removesuffix('b')}run {number}"
            elif difference:
                said = "the same, in modules of other names"
            if difference.added:
                said += f"; {counted(len(difference.added), 'entry')} only there"
            lines.append(f"    run {number}: {said}")
        table = self.table()
        if table:
            rows = str(table).split("\n")
            rows[0] = rows[0].replace("run_", "run ")
            shown = rows if limit is None else rows[: limit + 2]
            lines += ["", *(row.rstrip() for row in shown)]
            if len(shown) < len(rows):
                left = counted(len(rows) - len(shown), "more layer")
                lines.append(f"... {left}: text(limit=None) shows all")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        differing = sum(map(bool, self._all))
        return f"<Differences of {self._all[0].a.name}: {differing} of {len(self)} runs differ>"


class _Found:
    """What one run has at the places of the first."""

    def __init__(self, difference: Difference) -> None:
        self._changed = {change.a.label: change for change in difference.changed}
        self._removed = {entry.label for entry in difference.removed}

    def said_of(self, passes: list[LayerEntry]) -> str:
        """Return how it differs at one place, in all passes that the first run made."""
        missing = [entry.pass_number for entry in passes if entry.label in self._removed]
        if len(missing) == len(passes):
            return "missing"
        changes = [self._changed[e.label] for e in passes if e.label in self._changed]
        parts = [f"{name}{_distance(name, changes)}" for name in _aspects(changes)]
        if missing:
            parts.append(f"without pass{'es' * (len(missing) > 1)} {numbers_text(missing)}")
        return ", ".join(parts)


def _aspects(changes: list[LayerChange]) -> dict[str, None]:
    return dict.fromkeys(name for change in changes for name in change.what)


def _distance(name: str, changes: list[LayerChange]) -> str:
    if name not in ("value", "gradient"):
        return ""
    found = [getattr(change, name) for change in changes]
    distances = [
        one.max_abs
        for one in found
        if one is not None and one.max_abs is not None and type(one.a) is not bool
    ]
    return f" (max abs {max(distances):.3g})" if distances else ""
