"""The differences between two runs, and the place where they first diverge."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections import Counter, namedtuple
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from textwrap import shorten
from typing import Any, Literal, NamedTuple, Protocol, cast, overload

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.flow import EscapeFlowStep, FlowStep, IndexFlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.log.entries import LayerEntry, Table, counted
from bendtrace.log.run_log import RunLog
from bendtrace.python.checks import required_number
from bendtrace.python.compare import same_bits
from bendtrace.python.sites import place_text
from bendtrace.show.matching import (
    FlowChange,
    LayerChange,
    Matching,
    ModuleChange,
    Parting,
    RunChange,
    RunIndex,
    ValueDifference,
    compare_numbers,
    compare_tensors,
    increasing,
)
from bendtrace.show.picture import Format, Picture
from bendtrace.show.report import alike, difference_picture, difference_text, numbers_text
from bendtrace.watch.functions import UNINITIALIZED


class _Logged(Protocol):
    """An object with a log, such as a backward pass."""

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
        required_number(name, tolerance)
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
        text = ", ".join(f"{number} {name}" for name, number in counts.items())
        more = f"{len(self.flow)} in flow, {len(self.modules)} in modules"
        return f"<Difference of {self._names()}: {text}, {more}>"

    def _names(self) -> str:
        return self.a.name if self.a.name == self.b.name else f"{self.a.name} and {self.b.name}"

    def __str__(self) -> str:
        return self.text()


# Compares the items that both runs have: layers, modules, flow steps and guards, pair by pair.

_LABEL = re.compile(r"\w[\w.]*(?::\d+)?")


@dataclass
class Compared:
    """The number of values that could be compared.

    Attributes:
        compared: the number of pairs of tensors whose values were compared.
        unsaved_a: the number of pairs not compared because the value was not saved in the first
            run.
        unsaved_b: the number of pairs not compared because the value was not saved in the second
            run.
        unsaved: the number of pairs not compared because the value was not saved in one of the
            runs.
        reshaped: the number of pairs not compared because their shapes differ.
    """

    compared: int = 0
    unsaved_a: int = 0
    unsaved_b: int = 0
    unsaved: int = 0
    reshaped: int = 0


class Comparison:
    """Compares two runs."""

    def __init__(self, matching: Matching, rtol: float, atol: float) -> None:
        self.matching = matching
        self.a: RunIndex = matching.a
        self.b: RunIndex = matching.b
        self.coverage: Compared = Compared()
        self._tolerances = {"rtol": rtol, "atol": atol}

    def modules(self) -> Iterator[ModuleChange]:
        """Yield differences of modules: in the order of the first run, then those only in b."""
        names = self.matching.modules
        for name, class_a in self.a.classes.items():
            calls_a = self.a.modules.get(name, [])
            entry_a = calls_a[0] if calls_a else None
            if name not in names:
                if entry_a is not None:
                    yield ModuleChange("removed", entry_a, None)
                continue
            other = names[name]
            calls_b = self.b.modules.get(other, [])
            entry_b = calls_b[0] if calls_b else None
            if name != other:
                yield ModuleChange("renamed", entry_a, entry_b, name, other)
            if class_a != self.b.classes[other]:
                yield ModuleChange("class", entry_a, entry_b, class_a, self.b.classes[other])
            if entry_a is None or entry_b is None:
                continue
            facts: tuple[tuple[Literal["calls", "training", "parameters"], Any, Any], ...] = (
                ("calls", len(calls_a), len(calls_b)),
                ("training", entry_a.training, entry_b.training),
                ("parameters", entry_a.parameters, entry_b.parameters),
            )
            for kind, before, after in facts:
                if before != after:
                    yield ModuleChange(kind, entry_a, entry_b, before, after)
        partners = set(names.values())
        for name, calls_b in self.b.modules.items():
            if name not in partners:
                yield ModuleChange("added", None, calls_b[0])

    def flow(self) -> Iterator[FlowChange]:
        """Yield differences of the flow: steps of the first run in order, then those only in b."""
        steps_a, steps_b, pairs = self.a.steps, self.b.steps, self.matching.steps
        for number, step in enumerate(steps_a):
            if number not in pairs:
                yield FlowChange("removed", step, None)
                continue
            kind = _flow_difference(step, steps_b[pairs[number]])
            if kind:
                yield FlowChange(kind, step, steps_b[pairs[number]])  # type: ignore[arg-type]
        partners = set(pairs.values())
        for number, step in enumerate(steps_b):
            if number not in partners:
                yield FlowChange("added", None, step)

    def layers(self) -> Iterator[LayerChange]:
        """Yield differences of entries that both runs have, in the order of the first run."""
        for i, j in sorted(self.matching.entries.items()):
            a, b = self.a.entries[i], self.b.entries[j]
            aspects = dict(self._aspects(a, b))
            value = self._value(a, b)
            gradient = self._gradient(a, b)
            if aspects or value is not None or gradient is not None:
                yield LayerChange(a, b, aspects, value, gradient)

    def _aspects(self, a: LayerEntry, b: LayerEntry) -> Iterator[tuple[str, tuple[Any, Any]]]:
        if a.target != b.target and a.kind in ("op", "number"):
            short = a.function != b.function
            yield "function", (a.function, b.function) if short else (a.target, b.target)
        arguments = _other_arguments(a, self.a, b, self.b)
        if arguments is not None:
            yield "arguments", arguments
        if self._is_rewired(a, b):
            yield "parents", (tuple(a.parents), tuple(b.parents))
        uses_a, uses_b = self._parameters(a, self.a), self._parameters(b, self.b)
        if uses_a != uses_b:
            yield "parameters", (_uses_text(a), _uses_text(b))
        for name in ("shape", "dtype", "device"):
            if getattr(a, name) != getattr(b, name):
                yield name, (getattr(a, name), getattr(b, name))
        # If nothing was captured, a missing gradient function means nothing.
        is_measured = None not in (a.grad_fn, b.grad_fn) or None not in (a.time, b.time)
        if a.grad_fn != b.grad_fn and is_measured:
            yield "grad_fn", (a.grad_fn, b.grad_fn)

    def _value(self, a: LayerEntry, b: LayerEntry) -> ValueDifference | None:
        if a.kind == "number" or b.kind == "number":
            difference = compare_numbers(a.value, b.value)
            close = difference is not None and _are_close(a.value, b.value, self._tolerances)
            return None if close else difference
        if a.shape is None or b.shape is None:
            return None
        if a.shape != b.shape:
            self.coverage.reshaped += 1
            return None
        mine, theirs = a.tensor_contents, b.tensor_contents
        if mine is None or theirs is None:
            if a.kind == "state":  # a log holds no weights
                return None
            self.coverage.unsaved_a += mine is None
            self.coverage.unsaved_b += theirs is None
            self.coverage.unsaved += 1
            return None
        if a.function in UNINITIALIZED:  # uninitialised memory: no two runs agree on it
            return None
        self.coverage.compared += 1
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            return None if same_bits(mine, theirs) else ValueDifference(0, 0)
        if mine.shape != theirs.shape:  # the result of a function passed as save=
            return ValueDifference(0, 0)
        return compare_tensors(mine, theirs, **self._tolerances)

    def _gradient(self, a: LayerEntry, b: LayerEntry) -> ValueDifference | None:
        mine, theirs = a.grad_contents, b.grad_contents
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return None
        return compare_tensors(mine, theirs, **self._tolerances)

    def _parameters(self, entry: LayerEntry, run: RunIndex) -> list[tuple[Any, ...]]:
        rows = []
        for use in entry.state:
            owner, _, leaf = use.name.rpartition(".")
            if run is self.a:
                owner = self.matching.modules.get(owner, owner)
            rows.append((owner, leaf, use.shape, use.is_parameter, use.trainable))
        return rows

    @cached_property
    def _names_b(self) -> list[str]:
        return [entry.name for entry in self.b.entries]

    def _is_rewired(self, a: LayerEntry, b: LayerEntry) -> bool:
        """Return whether an entry is computed from others, apart from added and removed ones.

        Another pass of the same place is ignored as well: it follows from a loop that ran more
        often.
        """
        pairs = self.matching.entries
        direct_a = {self.a.position[label] for label in a.parents if label in self.a.position}
        direct_b = {self.b.position[label] for label in b.parents if label in self.b.position}
        if {pairs.get(i) for i in direct_a} == direct_b:
            return False
        reached_a = _nearest_common(self.a, direct_a, pairs.keys())
        reached_b = _nearest_common(self.b, direct_b, self.matching.back)
        names_b = self._names_b
        mine = {names_b[pairs[i]] for i in direct_a if i in pairs}
        theirs = {names_b[j] for j in direct_b if j in self.matching.back}
        all_mine = {names_b[pairs[i]] for i in reached_a}
        all_theirs = {names_b[j] for j in reached_b}
        return not (mine <= all_theirs and theirs <= all_mine)


def _nearest_common(run: RunIndex, positions: set[int], positions_of: Any) -> set[int]:
    """Return the nearest ancestors that both runs have."""
    reached, seen, left = set(), set(positions), list(positions)
    while left:
        position = left.pop()
        if position in positions_of:
            reached.add(position)
            continue
        parents = {run.position[label] for label in run.entries[position].parents
                   if label in run.position}  # fmt: skip
        left += parents - seen
        seen |= parents
    return reached


def _flow_difference(a: FlowStep, b: FlowStep) -> str:
    if isinstance(a, LoopFlowStep) and isinstance(b, LoopFlowStep):
        if a.iterations != b.iterations:
            return "iterations"
        same = a.kind == "while" or (a.bound == b.bound and same_bits(a.value, b.value))
        return "" if same else "value"
    if same_bits(a.value, b.value):
        return ""
    if isinstance(a, LogicalFlowStep):
        return "side"
    return "index" if isinstance(a, IndexFlowStep) else "value"


def _other_arguments(
    a: LayerEntry, run_a: RunIndex, b: LayerEntry, run_b: RunIndex
) -> tuple[str, str] | None:
    """Return the arguments that differ, ignoring the names of values."""
    if _blank(a.arguments, run_a) == _blank(b.arguments, run_b):
        return None
    mine, theirs = _split_arguments(a.arguments), _split_arguments(b.arguments)
    if len(mine) != len(theirs):
        return a.arguments, b.arguments
    pairs = [(x, y) for x, y in zip(mine, theirs, strict=True)
             if _blank(x, run_a) != _blank(y, run_b)]  # fmt: skip
    return ", ".join(x for x, _ in pairs), ", ".join(y for _, y in pairs)


def _split_arguments(text: str) -> list[str]:
    """Split the arguments of a call, as far as their text allows."""
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _blank(text: str, run: RunIndex) -> str:
    """Return the call of an op as text, without the names of its inputs."""
    return _LABEL.sub(lambda m: "_" if m[0] in run.position else m[0], text)


def _uses_text(entry: LayerEntry) -> str:
    return ", ".join(f"{use.name} {use.shape}{'' if use.trainable else ' frozen'}"
                     for use in entry.state) or "none"  # fmt: skip


def _are_close(a: Any, b: Any, tolerances: dict[str, float]) -> bool:
    if not any(tolerances.values()):
        return False
    try:
        return bool(torch.isclose(torch.tensor(a, dtype=torch.float64),
                                  torch.tensor(b, dtype=torch.float64),
                                  equal_nan=True, **tolerances))  # fmt: skip
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


@dataclass(frozen=True, eq=False)
class GuardChange(RunChange):
    """A guard that only one run has, or that had another outcome in the other.

    Attributes:
        kind: "removed", "added", or "expected" for another outcome.
        a: the guard in the first run, as a row of `RunLog.guard_rows()`; None if it does not exist
            there.
        b: the guard in the second run.
    """

    kind: Literal["removed", "added", "expected"]
    a: dict[str, Any] | None
    b: dict[str, Any] | None

    def __str__(self) -> str:
        row = self.a or self.b or {}
        what = f"{row['test']} of `{row['source'] or row['node']}`"
        if self.a is not None and self.b is not None:
            return f"{what}: {self.a['expected']} in a, {self.b['expected']} in b"
        return f"{what}: only in {'a' if self.b is None else 'b'}, {row['expected']}"


def guard_changes(matching: Matching) -> list[GuardChange]:
    """Compare the guards of two runs."""
    rows_a, rows_b = (_guards_by_key(run, matching) for run in (matching.a, matching.b))
    changes = []
    for key, a in rows_a.items():
        b = rows_b.get(key)
        if b is None:
            changes.append(GuardChange("removed", a, None))
        elif a["expected"] != b["expected"]:
            changes.append(GuardChange("expected", a, b))
    changes += [GuardChange("added", None, b) for key, b in rows_b.items() if key not in rows_a]
    return changes


def _guards_by_key(run: RunIndex, matching: Matching) -> dict[Hashable, dict[str, Any]]:
    """Return guards by key: the value, the test and the expression."""
    is_a = run is matching.a
    about: dict[str, Hashable] = {}
    for position, entry in enumerate(run.entries):
        partner = matching.entries.get(position) if is_a else position
        about[entry.node] = partner if partner is not None else ("only in a", entry.node)
    often: Counter[Hashable] = Counter()
    found: dict[Hashable, dict[str, Any]] = {}
    for row in run.history.guard_rows():
        key = (about.get(row["node"]), row["test"], row["source"])
        found[key, often[key]] = row
        often[key] += 1
    return found


# Where two runs first diverge.

_WIDEST = 60

# Position in the first run, then what of the second comes behind it.
Time = tuple[float, int]


class Timeline:
    """A common order for the two runs: common entries have their order in the first run."""

    def __init__(self, matching: Matching, flow: Sequence[FlowChange]) -> None:
        self.matching = matching
        self.a: RunIndex = matching.a
        self.b: RunIndex = matching.b
        self.flow = flow

    def first(self, changed: Sequence[LayerChange]) -> Parting | None:
        """Return where the runs first diverge: in their path, or else in computed values."""
        events = [*self._flow_events(), *self._layer_events()]
        if events:
            return min(events, key=lambda event: event[0])[1]
        # An unused parameter, or an additional input, is not another path.
        for change in changed:
            if change.a.kind != "state":
                return self._of_change(change)
        return self._of_change(changed[0]) if changed else None

    @cached_property
    def _anchors(self) -> tuple[list[int], list[int]]:
        pairs = increasing(sorted(self.matching.entries.items()))
        return [i for i, _ in pairs], [j for _, j in pairs]

    def of_a(self, position: int) -> Time:
        """Return the position of an entry of the first run."""
        return float(position), 0

    def of_b(self, position: int) -> Time:
        """Return the position of an entry of the second run."""
        mine, theirs = self._anchors
        before = bisect_right(theirs, position) - 1
        if before >= 0 and theirs[before] == position:
            return self.of_a(mine[before])
        return (mine[before] + 0.5 if before >= 0 else -0.5), position

    def of_flow(self, change: FlowChange) -> Time:
        """Return the time of a flow step, after the value that it consumed."""
        if change.a is not None:
            number = next(n for n, step in enumerate(self.a.steps) if step is change.a)
            return self._time_of_step(number)
        number = next(n for n, step in enumerate(self.b.steps) if step is change.b)
        return self.of_b(self.b.position.get(self.b.history.step_labels[number], 0))

    def _flow_events(self) -> Iterator[tuple[Time, Parting]]:
        loops = headers(self.a.steps)
        in_both = {id(change.a): change for change in self.flow if change.a and change.b}
        for number, step in enumerate(self.a.steps):
            change = in_both.get(id(step))
            if change is None or change.kind == "value":
                continue
            if change.kind == "iterations" and not _is_cause(change):
                continue
            loop = in_both.get(id(loops[number]))
            cause = loop if loop is not None and loop.kind == "iterations" else change
            yield self._time_of_step(number), self._of_flow(cause)

    def _time_of_step(self, number: int) -> Time:
        """Return the time of a step of the first run: after its value existed.

        A value that only this run has, such as the first row of a loop, exists because of the step.
        """
        return self._step_positions[number], 0

    @cached_property
    def _step_positions(self) -> list[float]:
        positions: list[float] = []
        for label in self.a.history.step_labels:
            consumed = self.a.position.get(label, -1)
            only = consumed >= 0 and consumed not in self.matching.entries
            latest = positions[-1] if positions else -1.0
            positions.append(max(consumed + (-0.25 if only else 0.25), latest))
        return positions

    def _layer_events(self) -> Iterator[tuple[Time, Parting]]:
        """Yield the earliest place where one run has a layer that the other does not have."""
        only_a = next(_entries_of_one(self.a, self.matching.entries), None)
        only_b = next(_entries_of_one(self.b, self.matching.back), None)
        firsts = ((self.of_a, only_a), (self.of_b, only_b))
        times = [time_of(position) for time_of, position in firsts if position is not None]
        if not times:
            return
        time = min(times)
        anchor = max((i for i in self._anchors[0] if i < time[0]), default=-1)
        following = min((i for i in self._anchors[0] if i > time[0]), default=len(self.a.entries))
        # Each goes on with something else: one line says so.
        a = b = None
        if only_a is not None and anchor < only_a < following:
            a = self.a.entries[only_a]
        if only_b is not None and anchor < self.of_b(only_b)[0] < following:
            b = self.b.entries[only_b]
        governed = self._governing(a, self.a) or self._governing(b, self.b)
        after = self.a.entries[anchor].label if anchor >= 0 else ""
        if governed is not None:
            parting = self._of_flow(governed, after)
        else:
            texts = [f"{entry.label}{expression_of(entry)} only in {run}"
                     for entry, run in ((a, "a"), (b, "b")) if entry is not None]  # fmt: skip
            text = (f"after {after}: " if after else "at the start: ") + "; ".join(texts)
            parting = Parting("layers", a, b, after, text + self._read_before(time))
        yield time, parting

    def _read_before(self, time: Time) -> str:
        """Return which number read by Python first differed before some time."""
        in_both = {id(change.a): change for change in self.flow if change.kind == "value"}
        for number, step in reversed(list(enumerate(self.a.steps))):
            if id(step) in in_both and isinstance(step, EscapeFlowStep):
                if self._time_of_step(number) < time:
                    return f"; before, {in_both[id(step)]}"
        return ""

    def _governing(self, entry: LayerEntry | None, run: RunIndex) -> FlowChange | None:
        """Return the innermost flow step around an entry that went otherwise over there."""
        if entry is None:
            return None
        steps = {id(change.a if run is self.a else change.b): change for change in self.flow
                 if change.kind in ("side", "iterations", "index")}  # fmt: skip
        loops = headers(run.steps)
        for number in reversed(entry.flow):
            found = steps.get(id(run.steps[number])) or steps.get(id(loops[number]))
            if found is not None:
                return found
        # Computations for a test of a `while` come before that test.
        test = self._next_test(entry, run)
        return None if test is None else steps.get(id(loops[test]))

    def _next_test(self, entry: LayerEntry, run: RunIndex) -> int | None:
        """Return the flow step that an entry leads to through others that only one run has."""
        partners = self.matching.entries if run is self.a else self.matching.back
        position = run.position[entry.label]
        for number, label in enumerate(run.history.step_labels):
            consumed = run.position.get(label, -1)
            if consumed >= position:
                alone = all(place not in partners for place in range(position, consumed + 1))
                return number if alone else None
        return None

    def _of_flow(self, change: FlowChange, after: str | None = None) -> Parting:
        if after is None:
            number = next(n for n, step in enumerate(self.a.steps) if step is change.a)
            labels = self.a.history.step_labels
            after = labels[number] if labels else ""
        module = change.step.module_path
        text = str(change) + (f" (module {module})" if module else "")
        return Parting("flow", change.a, change.b, after, text)

    def _of_change(self, change: LayerChange) -> Parting:
        position = self.a.position[change.a.label]
        after = self.a.entries[position - 1].label if position else ""
        text = f"{change.a.label}{expression_of(change.a)}: {change}"
        return Parting("change", change.a, change.b, after, text)


def without_tests(steps: Sequence[FlowStep], flow: Sequence[FlowChange]) -> list[FlowChange]:
    """Leave out the tests of a `while` whose number of iterations is reported."""
    loops = {id(change.a) for change in flow if change.kind == "iterations"}
    tests = {id(step) for step, loop in zip(steps, headers(steps), strict=True)
             if loop is not None and id(loop) in loops}  # fmt: skip
    return [change for change in flow if change.kind != "side" or id(change.a) not in tests]


def headers(steps: Sequence[FlowStep]) -> list[FlowStep | None]:
    """Return, for each step that is a test of a `while`, the step of the loop as a whole."""
    latest: dict[tuple[object, ...], FlowStep] = {}
    found: list[FlowStep | None] = []
    for step in steps:
        header = None
        key = (step.module_path, step.place.file, step.place.function)
        if step.kind == "while" and isinstance(step, LoopFlowStep):
            latest[*key, step.iteration] = step
        elif step.kind == "while" and step.iteration:
            header = latest.get((*key, step.iteration[:-1]))
        found.append(header)
    return found


def _is_cause(change: FlowChange) -> bool:
    """Return whether a loop ran more often because of its header, not because of an early exit."""
    a, b = change.a, change.b
    assert isinstance(a, LoopFlowStep)
    assert isinstance(b, LoopFlowStep)
    return a.bound is not None and b.bound is not None and a.bound != b.bound


def _entries_of_one(run: RunIndex, both: Collection[int]) -> Iterator[int]:
    """Yield the positions of entries that only one run has.

    Reads of state are reported anyway. Another number of results of one op, or of numbers from one
    tensor, is not another path yet: their use may be.
    """
    origins = {_origin(run.entries[position]) for position in both}
    for position, entry in enumerate(run.entries):
        if position in both or entry.kind == "state":
            continue
        origin = _origin(entry)
        if origin is None or origin not in origins:
            yield position


def _origin(entry: LayerEntry) -> object:
    if entry.kind == "op" and entry.element:
        return entry.index
    if entry.kind == "number" and entry.parents:
        return entry.name, tuple(entry.parents)
    return None


def expression_of(entry: LayerEntry) -> str:
    """Return where an entry was computed, for a message: its expression and its place."""
    if entry.source is None:
        return ""
    text = shorten(entry.source.text, _WIDEST, placeholder=" ...")
    code = f" `{text}`" if text else ""
    return f"{code} ({place_text(entry.source.file, entry.source.line)})"


# How several runs differ from the first of them.


class ComparedLayer(NamedTuple):
    """A place of the first run, and the entries of the other runs there.

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
        found = [_RunDifferences(one) for one in self._all]
        rows = [
            ComparedLayer(
                same[0].name if same[0].element is None else same[0].label.partition(":")[0],
                len(same), same[0].module, tuple(one.describe(same) for one in found),
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
            summary = alike(difference)
            if first is not None:
                summary = (
                    f"first {first.text}" if first.kind == "layers" else f"first at {first.text}"
                )
                before, a, after = summary.rpartition(" in a, ")
                if a and after.endswith(" in b"):
                    summary = f"{before} in run 1, {after.removesuffix('b')}run {number}"
            elif difference:
                summary = "the same, in modules of other names"
            if difference.added:
                summary += f"; {counted(len(difference.added), 'entry')} only there"
            lines.append(f"    run {number}: {summary}")
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


class _RunDifferences:
    """The differences of one run at the places of the first."""

    def __init__(self, difference: Difference) -> None:
        self._changed = {change.a.label: change for change in difference.changed}
        self._removed = {entry.label for entry in difference.removed}

    def describe(self, passes: list[LayerEntry]) -> str:
        """Return how it differs at one place, in all passes that the first run made."""
        missing = [entry.pass_number for entry in passes if entry.label in self._removed]
        if len(missing) == len(passes):
            return "missing"
        changes = [self._changed[e.label] for e in passes if e.label in self._changed]
        parts = [f"{name}{_distance_text(name, changes)}" for name in _aspects(changes)]
        if missing:
            parts.append(f"without pass{'es' * (len(missing) > 1)} {numbers_text(missing)}")
        return ", ".join(parts)


def _aspects(changes: list[LayerChange]) -> dict[str, None]:
    return dict.fromkeys(name for change in changes for name in change.what)


def _distance_text(name: str, changes: list[LayerChange]) -> str:
    if name not in ("value", "gradient"):
        return ""
    found = [getattr(change, name) for change in changes]
    distances = [
        one.max_abs
        for one in found
        if one is not None and one.max_abs is not None and type(one.a) is not bool
    ]
    return f" (max abs {max(distances):.3g})" if distances else ""
