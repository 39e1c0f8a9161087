"""Where two runs first diverge."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from textwrap import shorten

from bendtrace._places import place_text
from bendtrace.flow import EscapeFlowStep, FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry
from bendtrace.view.diff.changes import FlowChange, LayerChange, Parting
from bendtrace.view.diff.matching import Matching, RunIndex, increasing

__all__ = ["Timeline", "headers", "without_tests"]

_WIDEST = 60

# Position in the first run, then what of the second comes behind it.
Time = tuple[float, int]


class Timeline:
    """A common order for the two runs: that of their common entries in the first run.

    Args:
        matching: the matching of the runs.
        flow: the differences of their flow.
    """

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
            told = loop if loop is not None and loop.kind == "iterations" else change
            yield self._time_of_step(number), self._of_flow(told)

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
        only_a = next(_only(self.a, self.matching.entries), None)
        only_b = next(_only(self.b, self.matching.back), None)
        if only_a is None and only_b is None:
            return
        times = []
        if only_a is not None:
            times.append(self.of_a(only_a))
        if only_b is not None:
            times.append(self.of_b(only_b))
        time = min(times)
        anchor = max((i for i in self._anchors[0] if i < time[0]), default=-1)
        following = min((i for i in self._anchors[0] if i > time[0]), default=len(self.a.entries))
        # Both go on with something of their own: one line says so.
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
            texts = [f"{entry.label}{_at(entry)} only in {run}"
                     for entry, run in ((a, "a"), (b, "b")) if entry is not None]  # fmt: skip
            text = (f"after {after}: " if after else "at the start: ") + "; ".join(texts)
            parting = Parting("layers", a, b, after, text + self._read_before(time))
        yield time, parting

    def _read_before(self, time: Time) -> str:
        """Return which number read by Python first differed before some time."""
        in_both = {id(change.a): change for change in self.flow if change.kind == "value"}
        for number, step in reversed(list(enumerate(self.a.steps))):
            change = in_both.get(id(step))
            if (
                change is not None
                and isinstance(step, EscapeFlowStep)
                and self._time_of_step(number) < time
            ):
                return f"; before, {change}"
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
        known = self.matching.entries if run is self.a else self.matching.back
        position = run.position[entry.label]
        for number, label in enumerate(run.history.step_labels):
            consumed = run.position.get(label, -1)
            if consumed >= position:
                alone = all(place not in known for place in range(position, consumed + 1))
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
        text = f"{change.a.label}{_at(change.a)}: {change}"
        return Parting("change", change.a, change.b, after, text)


def without_tests(steps: Sequence[FlowStep], flow: Sequence[FlowChange]) -> list[FlowChange]:
    """Leave out the tests of a `while` whose number of iterations is reported.

    Args:
        steps: the steps of the first run.
        flow: the differences of the flow.
    """
    told = {id(change.a) for change in flow if change.kind == "iterations"}
    tests = {id(step) for step, loop in zip(steps, headers(steps), strict=True)
             if loop is not None and id(loop) in told}  # fmt: skip
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


def _only(run: RunIndex, both: Collection[int]) -> Iterator[int]:
    """Yield the positions of entries that only one run has.

    Reads of state are reported anyway. Another number of results of one op, or of numbers from one
    tensor, is not another path yet: their use may be.
    """
    known = {_origin(run.entries[position]) for position in both}
    for position, entry in enumerate(run.entries):
        if position in both or entry.kind == "state":
            continue
        origin = _origin(entry)
        if origin is None or origin not in known:
            yield position


def _origin(entry: LayerEntry) -> object:
    if entry.kind == "op" and entry.element:
        return entry.index
    if entry.kind == "number" and entry.parents:
        return entry.name, tuple(entry.parents)
    return None


def _at(entry: LayerEntry) -> str:
    if entry.source is None:
        return ""
    text = shorten(entry.source.text, _WIDEST, placeholder=" ...")
    told = f" `{text}`" if text else ""
    return f"{told} ({place_text(entry.source.file, entry.source.line)})"
