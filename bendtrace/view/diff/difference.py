"""How two runs differ, and where they first diverge."""

from __future__ import annotations

import json
import os
from functools import cached_property
from html import escape
from typing import Any, Protocol, overload

from bendtrace.errors import InputError
from bendtrace.history.entries import LayerEntry
from bendtrace.history.run_log import RunLog
from bendtrace.view.diff.changes import FlowChange, LayerChange, ModuleChange, Parting
from bendtrace.view.diff.comparison import Compared, Comparison, GuardChange, guard_changes
from bendtrace.view.diff.first import Timeline, without_tests
from bendtrace.view.diff.matching import Matching, RunIndex
from bendtrace.view.diff.picture import difference_picture
from bendtrace.view.diff.several import Differences
from bendtrace.view.diff.text import difference_text
from bendtrace.view.drawing.picture import Format, Picture

__all__ = ["Difference", "diff"]


class _Logged(Protocol):
    """What has a log, as a backward pass does."""

    @property
    def log(self) -> RunLog: ...


_Run = RunLog | _Logged


@overload
def diff(a: _Run, b: _Run, *, rtol: float = 0.0, atol: float = 0.0) -> Difference: ...


@overload
def diff(
    a: _Run, b: _Run, c: _Run, /, *more: _Run, rtol: float = 0.0, atol: float = 0.0
) -> Differences: ...


def diff(
    a: _Run, b: _Run, *more: _Run, rtol: float = 0.0, atol: float = 0.0
) -> Difference | Differences:
    """Compare two runs, or more: of several inputs, or of versions of a model.

    Items at the same place match: in the same module, at the same expression of the same function,
    in the same iteration. Code that moved, and modules that were renamed or wrapped, are matched by
    their neighbours.

    Args:
        a: one run, as returned by `bendtrace.trace`, or a `BackwardPass`. Values are compared if
            both saved them (`save="all"`).
        b: the other.
        *more: more runs to compare with the first.
        rtol: relative tolerance for values, as in `torch.isclose`. With both tolerances at 0,
            values are equal only if all their bits are.
        atol: absolute tolerance.

    Returns:
        The `Difference`, which is true if the runs differ. For more than two runs, `Differences`:
        one for each run after the first, and a table of all.

    Raises:
        InputError: one of them is not a trace, or a tolerance is negative.

    Example:
        >>> import torch, bendtrace as bt
        >>> def shrink(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> difference = bt.diff(bt.trace(shrink, torch.ones(4)), bt.trace(shrink, torch.ones(9)))
        >>> difference.first.a.iterations, difference.first.b.iterations
        (1, 2)
        >>> [entry.pass_number for entry in difference.added if entry.layer_type == "div"]
        [2]
    """
    logs = [_log_of(run) for run in (a, b, *more)]
    names = "first", "second", "third"
    for number, history in enumerate(logs):
        if not isinstance(history, RunLog):
            name = names[number] if number < 3 else f"{number + 1}th"
            raise InputError(
                f"the {name} argument is a {type(history).__name__}, not a trace: "
                "diff(trace(model, x), trace(model, y)) compares two runs"
            )
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not tolerance >= 0:
            raise InputError(f"{name} must be at least 0, not {tolerance!r}")
    found = [Difference(logs[0], other, rtol, atol) for other in logs[1:]]
    return Differences(found) if more else found[0]


def _log_of(given: Any) -> Any:
    """Return the log of a backward pass; everything else as it is."""
    log = getattr(given, "log", None)
    return log if isinstance(log, RunLog) else given


class Difference:
    """The differences between two runs. It is true if there are any, and prints as a report.

    Attributes:
        a: the first run.
        b: the second run.
        rtol: relative tolerance of the comparison of values.
        atol: absolute tolerance of the comparison of values.
        matched: pairs of labels of the entries that both runs have, in the order of the first.
        added: entries that only the second run has, in its order, including extra passes.
        removed: entries that only the first run has, in its order.
        changed: entries that both have and that are not the same in both.
        flow: flow steps that went otherwise, or that one run has only.
        modules: modules that were added, removed, renamed, or are not the same in both.
        first: where the runs first part: the flow step that went otherwise or the layer that one
            run has only, whichever comes first; if both took the same path, the first entry that
            is not the same. None if the runs are the same.
        timeline: both runs on one time.

    Example:
        >>> import torch, bendtrace as bt
        >>> def shrink(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> difference = bt.diff(bt.trace(shrink, torch.ones(4)), bt.trace(shrink, torch.ones(9)))
        >>> bool(difference), difference
        (True, <Difference of shrink: 4 added, 0 removed, 4 changed, 2 in flow, 0 in modules>)
        >>> [entry.label for entry in difference.added]
        ['div_1_3:2', 'norm_1_1:3', 'gt_1_2:3', 'bool_1:3']
    """

    def __init__(self, a: RunLog, b: RunLog, rtol: float, atol: float) -> None:
        self.a = a
        self.b = b
        self.rtol = rtol
        self.atol = atol
        run_a, run_b = RunIndex(a), RunIndex(b)
        matching = Matching(run_a, run_b)
        comparison = Comparison(matching, rtol, atol)
        pairs = matching.entries
        self.matched: list[tuple[str, str]] = [
            (run_a.entries[i].label, run_b.entries[j].label) for i, j in sorted(pairs.items())
        ]
        self.removed: list[LayerEntry] = [e for i, e in enumerate(run_a.entries) if i not in pairs]
        self.added: list[LayerEntry] = [
            e for j, e in enumerate(run_b.entries) if j not in matching.back
        ]
        self.changed: list[LayerChange] = list(comparison.layers())
        self.modules: list[ModuleChange] = list(comparison.modules())
        self._flow = list(comparison.flow())
        self.flow: list[FlowChange] = without_tests(run_a.steps, self._flow)
        self.timeline: Timeline = Timeline(matching, self._flow)
        self.first: Parting | None = self.timeline.first(self.changed)
        self.coverage: Compared = comparison.coverage
        self._matching = matching

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.flow or self.modules)

    @cached_property
    def first_value(self) -> LayerChange | None:
        """The first entry whose value, or number, differs, apart from inputs and state."""
        return next((change for change in self.changed if change.value is not None
                     and change.a.kind not in ("input", "state")), None)  # fmt: skip

    @cached_property
    def guards(self) -> list[GuardChange]:
        """Guards that only one run has, or that had another outcome."""
        return guard_changes(self._matching)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values, ready for JSON."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "same": not self,
            "first": None if self.first is None else self.first.to_dict(),
            "added": [entry.label for entry in self.added],
            "removed": [entry.label for entry in self.removed],
            "changed": [change.to_dict() for change in self.changed],
            "flow": [change.to_dict() for change in self.flow],
            "modules": [change.to_dict() for change in self.modules],
            "matched": [list(pair) for pair in self.matched],
            "values": vars(self.coverage),
        }

    def to_json(self, **options: Any) -> str:
        """Return the difference as JSON.

        Args:
            **options: passed on to `json.dumps`.
        """
        return json.dumps(self.to_dict(), **options)

    def text(self, limit: int | None = 12) -> str:
        """Return the report.

        Args:
            limit: the maximum number of rows of a table; None for all.
        """
        return difference_text(self, limit)

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        format: Format | None = None,
        rolled: bool = False,
        collapse: bool = True,
        depth: int | None = None,
        max_nodes: int = 50,
        within: str | None = None,
    ) -> Picture:
        """Draw both runs in one picture.

        Entries of only one run are green or red and labelled, entries that differ are yellow, and a
        thick blue line marks where the runs first diverge.

        Args:
            path: where to save the picture; the ending selects the format: .svg, .png, .pdf, .html
                or .dot (which has no colours).
            format: the file format, if the file name's ending does not say.
            rolled: whether to merge the passes of an op into one node.
            collapse: whether to draw only one of several blocks that are alike and differ in the
                same way.
            depth: the number of nested boxes to draw; None for all.
            max_nodes: the maximum number of nodes to draw; boxes are closed to achieve it.
            within: a module or one of its calls, to draw only that.

        Raises:
            InputError: the ending or the module is unknown. Nothing is written then.
        """
        options = {"rolled": rolled, "collapsed": collapse, "depth": depth}
        picture = difference_picture(self, max_nodes=max_nodes, within=within, **options)
        return picture.saved_to(path, format)

    def _repr_html_(self) -> str:
        picture = self.draw().svg if self else ""
        return f"<pre>{escape(str(self))}</pre>{picture}"

    def __repr__(self) -> str:
        if not self:
            return f"<Difference of {self._names()}: none>"
        counts = {"added": len(self.added), "removed": len(self.removed)}
        counts["changed"] = len(self.changed)
        told = ", ".join(f"{number} {name}" for name, number in counts.items())
        more = f"{len(self.flow)} in flow, {len(self.modules)} in modules"
        return f"<Difference of {self._names()}: {told}, {more}>"

    def _names(self) -> str:
        return self.a.name if self.a.name == self.b.name else f"{self.a.name} and {self.b.name}"

    def __str__(self) -> str:
        return self.text()
