"""Compares the items that both runs have: layers, modules, flow steps and guards, pair by pair."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace._compare import same_bits
from bendtrace.flow import FlowStep, IndexFlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry
from bendtrace.torch_rules.functions import UNINITIALIZED
from bendtrace.view.diff.changes import (
    FlowChange,
    LayerChange,
    ModuleChange,
    ValueDifference,
    compare_numbers,
    compare_tensors,
)
from bendtrace.view.diff.matching import Matching, RunIndex

__all__ = ["Compared", "Comparison", "GuardChange", "guard_changes"]


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
    """Compares two runs.

    Args:
        matching: the matching of the runs.
        rtol: relative tolerance for values, as in `torch.isclose`.
        atol: absolute tolerance for values, as in `torch.isclose`.
    """

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
        known = set(names.values())
        for name, calls_b in self.b.modules.items():
            if name not in known:
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
        known = set(pairs.values())
        for number, step in enumerate(steps_b):
            if number not in known:
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
        known = None not in (a.grad_fn, b.grad_fn) or None not in (a.time, b.time)
        if a.grad_fn != b.grad_fn and known:
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
        """Whether an entry is computed from others, not counting what came or went in between.

        Another pass of the same place is ignored as well: it follows from a loop that ran more
        often.
        """
        pairs = self.matching.entries
        direct_a = {self.a.position[label] for label in a.parents if label in self.a.position}
        direct_b = {self.b.position[label] for label in b.parents if label in self.b.position}
        if {pairs.get(i) for i in direct_a} == direct_b:
            return False
        reached_a = _through(self.a, direct_a, pairs.keys())
        reached_b = _through(self.b, direct_b, self.matching.back)
        names_b = self._names_b
        mine = {names_b[pairs[i]] for i in direct_a if i in pairs}
        theirs = {names_b[j] for j in direct_b if j in self.matching.back}
        all_mine = {names_b[pairs[i]] for i in reached_a}
        all_theirs = {names_b[j] for j in reached_b}
        return not (mine <= all_theirs and theirs <= all_mine)


def _through(run: RunIndex, positions: set[int], known: Any) -> set[int]:
    """Return the nearest ancestors that both runs have."""
    reached, seen, left = set(), set(positions), list(positions)
    while left:
        position = left.pop()
        if position in known:
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
    if _blanked(a.arguments, run_a) == _blanked(b.arguments, run_b):
        return None
    mine, theirs = _arguments(a.arguments), _arguments(b.arguments)
    if len(mine) != len(theirs):
        return a.arguments, b.arguments
    pairs = [(x, y) for x, y in zip(mine, theirs, strict=True)
             if _blanked(x, run_a) != _blanked(y, run_b)]  # fmt: skip
    return ", ".join(x for x, _ in pairs), ", ".join(y for _, y in pairs)


def _arguments(text: str) -> list[str]:
    """Split the arguments of a call, as far as their text allows."""
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _blanked(text: str, run: RunIndex) -> str:
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
class GuardChange:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {"kind": self.kind, "a": self.a, "b": self.b}

    def __str__(self) -> str:
        row = self.a or self.b or {}
        what = f"{row['test']} of `{row['source'] or row['node']}`"
        if self.a is not None and self.b is not None:
            return f"{what}: {self.a['expected']} in a, {self.b['expected']} in b"
        return f"{what}: only in {'a' if self.b is None else 'b'}, {row['expected']}"


def guard_changes(matching: Matching) -> list[GuardChange]:
    """Compare the guards of two runs.

    Args:
        matching: the matching of the runs.
    """
    rows_a, rows_b = (_keyed(run, matching) for run in (matching.a, matching.b))
    changes = []
    for key, a in rows_a.items():
        b = rows_b.get(key)
        if b is None:
            changes.append(GuardChange("removed", a, None))
        elif a["expected"] != b["expected"]:
            changes.append(GuardChange("expected", a, b))
    changes += [GuardChange("added", None, b) for key, b in rows_b.items() if key not in rows_a]
    return changes


def _keyed(run: RunIndex, matching: Matching) -> dict[Hashable, dict[str, Any]]:
    """Return guards by key: the value, the test and the expression."""
    is_a = run is matching.a
    about: dict[str, Hashable] = {}
    for position, entry in enumerate(run.entries):
        known = matching.entries.get(position) if is_a else position
        about[entry.node] = known if known is not None else ("only in a", entry.node)
    often: Counter[Hashable] = Counter()
    found: dict[Hashable, dict[str, Any]] = {}
    for row in run.history.guard_rows():
        key = (about.get(row["node"]), row["test"], row["source"])
        found[key, often[key]] = row
        often[key] += 1
    return found
