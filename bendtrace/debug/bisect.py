"""Finding the first op that makes two runs differ."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Literal, Protocol

import torch
import torch.overrides
from torch import Tensor, fx, nn

from bendtrace._trace import Trace, run_trace
from bendtrace.debug.calls import Call, own_copy
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import ConversionError, InputError
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import assemble, take_apart
from bendtrace.log.capture import SaveOptions, ValueCapture, aligned_copy
from bendtrace.log.entries import LayerEntry, counted, tensors_of
from bendtrace.log.run_log import RunLog
from bendtrace.log.validate import MISSING, Validator, plainly
from bendtrace.module import BendedModule
from bendtrace.python.checks import required_number
from bendtrace.python.compare import same_bits
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import place_text
from bendtrace.show.difference import Difference, expression_of
from bendtrace.show.matching import (
    FlowChange,
    Parting,
    ValueDifference,
    compare_numbers,
    compare_tensors,
)
from bendtrace.tape.tape import Op, OpKind, refs_in
from bendtrace.watch.draws import RandomStates
from bendtrace.watch.owners import required_model

# What rounding in a dtype may do, as in `torch.testing.assert_close`.
_ROUNDING = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
}
_ALIKE = 0.6  # of the ops, if runs are aligned op by op
_PARTED = "the other run has its inputs, but nowhere its result"


def bisect(
    a: Callable[..., Any] | RunLog,
    b: Callable[..., Any] | RunLog,
    inputs: Any = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Bisection:
    """Find the op that is the cause of another result, among those that only pass it on.

    Both are run on the same inputs, with the same random numbers, and every value is compared.
    Each op whose results differ is run again on the values that the other run gave it: if it
    then returns the value of the other run, it only passes a difference on.

    Args:
        a: a model or function, or a log of one.
        b: the other side: another version of the model, or the model in another dtype or
            on another device; a `BendedModule` without insertions, whose replay is looked at;
            what `torch.compile` made of a module; or a log, such as one that another version of
            torch saved (`save="all"`).
        inputs: the inputs of both: a tensor, a tuple of arguments, a mapping of keyword arguments,
            or a `Call`. Tensors are moved to where each model's parameters are, and, if the models
            differ in dtype, floating point ones are cast. None if both are logs.
        rtol: relative tolerance, as in `torch.isclose`. None for bit by bit, or, where a and b
            compute in different dtypes, for the tolerances of `torch.testing.assert_close`.
        atol: absolute tolerance, likewise.

    Returns:
        The `Bisection`, which is true if the runs differ. It prints as a report.

    Raises:
        InputError: inputs are missing or one too many, a tolerance is negative, a log holds no
            values, or a call that should be replayed or compiled cannot be.
        Exception: an error of a model, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> def old(x):
        ...     return torch.softmax(x * 2, -1).log()
        >>> def new(x):
        ...     return torch.softmax(x * 2.001, -1).log()
        >>> found = bt.bisect(old, new, torch.tensor([1.0, 2.0]))
        >>> found.first.b.source.text, found.first.why
        ('x * 2.001', 'it is called otherwise: 2 in a, 2.001 in b')
        >>> found.passing
        ['softmax_1_2', 'log_1_3']
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        required_number(name, tolerance, or_none=True)
    models = [side for side in (a, b) if not isinstance(side, RunLog)]
    for model in models:
        required_model(model)
    if models and inputs is None:
        raise InputError("a model needs inputs: bisect(a, b, inputs)")
    if not models and inputs is not None:
        raise InputError("two logs are compared as they are: leave the inputs out")
    call = None if inputs is None else Call.of(inputs)
    one, two = (
        side_of(
            model, placed(model, other, call) if call and not isinstance(model, RunLog) else None
        )
        for model, other in ((a, b), (b, a))
    )
    return Bisection(one, two, rtol, atol)


@dataclass(frozen=True)
class Culprit:
    """An op or a part of the state that alone causes a difference.

    Attributes:
        kind: "op" (on the same values it gives something else), "state" (a parameter or buffer
            differs), "input" (an argument differs), or "path" (only one of the runs has this op).
        a: the entry in the first run; None if it is not there.
        b: the entry in the second run.
        why: the known facts about it, as text.
        value: how far the results differ; None if they cannot be compared.
    """

    kind: Literal["op", "state", "input", "path"]
    a: LayerEntry | None
    b: LayerEntry | None
    why: str
    value: ValueDifference | None = None

    @property
    def entry(self) -> LayerEntry:
        """The entry in the first run, or in the second if only that has it."""
        entry = self.a or self.b
        assert entry is not None
        return entry

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        source = self.entry.source
        return {
            "kind": self.kind,
            "a": None if self.a is None else self.a.label,
            "b": None if self.b is None else self.b.label,
            "function": self.entry.target,
            "module": self.entry.module,
            "source": None if source is None else [source.file, source.line, source.text],
            "why": self.why,
            "value": None if self.value is None else self.value.to_dict(),
        }

    @property
    def _label(self) -> str:
        names = [e.label for e in (self.a, self.b) if e is not None]
        only = "" if len(names) == 2 else f" (only in {'a' if self.b is None else 'b'})"
        return " / ".join(dict.fromkeys(names)) + only

    def __str__(self) -> str:
        far = "" if self.value is None else f"; {self.value}"
        return f"{self._label}{expression_of(self.entry)}: {self.why}{far}"


class Bisection:
    """Where two runs differ, and which ops are the cause. It is true if they do.

    Attributes:
        a: the log of the first run, with all values.
        b: the log of the second run.
        difference: all differences, op by op or not (see `diff`).
        rtol: relative tolerance that values were compared with.
        atol: absolute tolerance.
        culprits: the causes, in the order of the first run.
        passing: labels (of the first run) of what only passes a difference on.
        unknown: why others could not be run again, by label: they may be either.
        path: the first condition or loop that went otherwise; None if the runs took one path.
        by_content: whether the runs have so few ops in common, as a model and a port of it, that
            they are compared by the values which both have. `first` is then where they part:
            the first op of each whose value the other run has nowhere, though it has all that this
            op reads. `passing` is empty.
        unseen: whether the results differ, but not while the values in between were looked at.

    Example:
        >>> import torch, bendtrace as bt
        >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = b.load_state_dict(a.state_dict())
        >>> bool(bt.bisect(a, b, torch.ones(1, 2)))
        False
        >>> _ = b.bias.data.add_(1)
        >>> found = bt.bisect(a, b, torch.ones(1, 2))
        >>> found.first.kind, found.first.a.label, found.passing
        ('state', 'bias', ['linear_1_1'])
    """

    b: RunLog
    a: RunLog

    def __init__(self, a: Twin, b: Twin, rtol: float | None, atol: float | None) -> None:
        self.a, self.b = a.log, b.log
        self._sides = a, b
        exact = Difference(a.log, b.log, 0.0, 0.0)
        usual = _tolerances(exact)
        self.rtol: float = usual[0] if rtol is None else rtol
        self.atol: float = usual[1] if atol is None else atol
        loose = self.rtol or self.atol
        self.difference: Difference = (
            Difference(a.log, b.log, self.rtol, self.atol) if loose else exact
        )
        self._entries_b = {entry.label: entry for entry in b.log.entries}
        self._entries_a = {entry.label: entry for entry in a.log.entries}
        self._pairs = dict(self.difference.matched)
        self._pairs |= self._alike()
        self.path: FlowChange | None = next(iter(self.difference.flow), None)
        self.culprits: list[Culprit] = []
        self.passing: list[str] = []
        self.unknown: dict[str, str] = {}
        self._changes = {change.a.label: change for change in self.difference.changed}
        outputs = [
            [_entry_value(entry) for entry in side.log.entries if entry.kind == "output"]
            for side in (a, b)
        ]
        has_values = all(
            values and all(value is not None for value in values) for values in outputs
        )
        ops = [sum(entry.kind == "op" for entry in side.log.entries) for side in (a, b)]
        aligned = sum(e.kind == "op" and e.label in self._pairs for e in a.log.entries)
        self.by_content: bool = has_values and aligned / max(*ops, 1) < _ALIKE
        self._parts: bool = self.by_content and self._far(*outputs) is not None
        if self.by_content:
            self.path = None
            if self._parts:
                self._part(a, b)
        else:
            for entry in a.log.entries:
                self._look_at(entry)
            self._add_rest()
        looked_at = self.difference.first_value is not None or bool(self.culprits)
        self.unseen: bool = (
            not looked_at
            and any(side.kind in _INDIRECT for side in self._sides)
            and not self._agree(a.output, b.output)
        )

    @property
    def first(self) -> Culprit | None:
        """The first cause; None if the runs agree, or none was found."""
        return self.culprits[0] if self.culprits else None

    def __bool__(self) -> bool:
        if self.by_content:
            return self._parts or self.unseen
        values = any(change.value is not None or "shape" in change.aspects
                     for change in self.difference.changed)  # fmt: skip
        return bool(self.culprits or self.unknown or values or self.unseen or self.path)

    def _part(self, a: Twin, b: Twin) -> None:
        """Look for where two runs part that have few ops in common."""
        one, two = partings(a, b, lambda x, y: self._far(x, y) is None)
        if one is not None or two is not None:
            is_state = one is not None and one.kind == "state"
            self.culprits.append(Culprit("state" if is_state else "op", one, two, _PARTED))

    def _alike(self) -> Iterator[tuple[str, str]]:
        """Yield ops of one run and of the other that are written otherwise and give the same.

        They come in one order, between ops of both: `weight[ids]` and `F.embedding(ids, weight)`.
        """
        taken = set(self._pairs.values())
        others: list[list[LayerEntry]] = [[]]  # of the second run, up to each op of both
        where: dict[str, int] = {"": 0}
        for entry in self.b.entries:
            if entry.label in taken:
                where[entry.label] = len(others)
                others.append([])
            elif entry.kind == "op":
                others[-1].append(entry)
        waiting = others[0]
        for entry in self.a.entries:
            if entry.label in self._pairs:
                waiting = others[where[self._pairs[entry.label]]]
            elif entry.kind == "op":
                value = _entry_value(entry)
                for number, other in enumerate(waiting):
                    if value is not None and _entry_value(other) is not None:
                        if self._far(value, _entry_value(other)) is None:
                            yield entry.label, other.label
                            del waiting[: number + 1]
                            break

    # Telling causes from what follows from them

    def _look_at(self, a: LayerEntry) -> None:
        label = self._pairs.get(a.label)
        if label is None:
            return
        b = self._entries_b[label]
        if a.kind == "state":
            states = [side.again.state(e) for side, e in zip(self._sides, (a, b), strict=True)]
            far = None if None in states else self._far(*states)
            if far is not None:
                self.culprits.append(Culprit("state", a, b, "it differs", _unless_empty(far)))
            return
        if a.kind not in ("op", "number", "input"):
            return
        far = self._far(_entry_value(a), _entry_value(b))
        if far is None:
            return
        if a.kind == "input" or (a.kind == "number" and not a.parents and not a.state):
            self.culprits.append(Culprit("input", a, b, "it differs", _unless_empty(far)))
            return
        try:
            why = self._why(a, b)
        except Unable as reason:
            self.unknown[a.label] = str(reason)
            return
        if why:
            self.culprits.append(Culprit("op", a, b, why, _unless_empty(far)))
        else:
            self.passing.append(a.label)

    def _why(self, a: LayerEntry, b: LayerEntry) -> str:
        """Say why an op is a cause; "" if it only passes on a difference in its inputs."""
        mine, theirs = self._sides
        aspects = self._changes[a.label].aspects if a.label in self._changes else {}
        for name in ("function", "arguments"):
            if name in aspects and not self._is_after_path(a):
                before, after = aspects[name]
                what = "it is another function" if name == "function" else "it is called otherwise"
                return f"{what}: {before} in a, {after} in b"
        foreign = self._foreign(a, b)
        if foreign:
            for culprit in foreign:
                self._add(culprit)
            return ""
        other = self._rewired(a, b)
        if other and not self._is_after_path(a):
            return f"it reads {other[0]} in a, {other[1]} in b"
        try:
            read_a, read_b = mine.again.inputs(a), theirs.again.inputs(b)
        except Unable as reason:
            if self._reads_the_same(a, b):
                weights = ", or its weights differ" if a.state else ""
                return f"on the same values it gives others{weights}"
            raise Unable(str(reason)) from None
        if same_bits(read_a, read_b):
            return "on the same values it gives others"
        one = mine.again.run(a, [_cast_like(y, x) for x, y in zip(read_a, read_b, strict=False)])
        if self._far(one, _entry_value(b)) is not None:
            return "on the values of b it gives others in a"
        two = theirs.again.run(b, [_cast_like(x, y) for x, y in zip(read_a, read_b, strict=False)])
        if self._far(_entry_value(a), two) is not None:
            return "on the values of a it gives others in b"
        return ""

    def _reads_the_same(self, a: LayerEntry, b: LayerEntry) -> bool:
        """Return whether an op reads the same values in both runs, as far as the logs show."""
        pairs = zip(a.parents, b.parents, strict=False)
        return len(a.parents) == len(b.parents) and all(
            _entry_value(self._entries_a[x]) is not None
            and same_bits(_entry_value(self._entries_a[x]), _entry_value(self._entries_b[y]))
            for x, y in pairs
        )

    def _foreign(self, a: LayerEntry, b: LayerEntry) -> list[Culprit]:
        """Return the ops of one run only that an op of both reads, unless a branch put them there.

        Of several in a row the first.
        """
        pairs = list(zip(self._sides[0].again.producers(a), self._sides[1].again.producers(b),
                         strict=False))  # fmt: skip
        found: list[Culprit] = []
        for x, y in pairs:
            if not x or not y or self._pairs.get(x) == y:
                continue
            for label, entries, partners in (
                (x, self._entries_a, self._pairs.keys()),
                (y, self._entries_b, set(self._pairs.values())),
            ):
                first = _first_unmatched(label, entries, partners)
                if first is None or self._is_after_path(first):
                    continue
                in_a = entries is self._entries_a
                found.append(Culprit("path", first if in_a else None, None if in_a else first,
                                     "only one of the runs has it"))  # fmt: skip
        return found

    def _rewired(self, a: LayerEntry, b: LayerEntry) -> tuple[str, str] | None:
        """Return the first values that an op reads in place of each other, of those both have."""
        partners = set(self._pairs.values())
        producers = (side.again.producers(e) for side, e in zip(self._sides, (a, b), strict=True))
        for x, y in zip(*producers, strict=False):
            if x in self._pairs and y in partners and self._pairs[x] != y:
                return x, y
        return None

    def _is_after_path(self, entry: LayerEntry) -> bool:
        """Return whether a condition went otherwise before an op."""
        if self.path is None:
            return False
        timeline = self.difference.timeline
        if self._entries_a.get(entry.label) is entry:
            time = timeline.of_a(timeline.a.position[entry.label])
        else:
            time = timeline.of_b(timeline.b.position[entry.label])
        return time > timeline.of_flow(self.path)

    def _add(self, culprit: Culprit) -> None:
        if all(other.entry is not culprit.entry for other in self.culprits):
            self.culprits.append(culprit)

    def _add_rest(self) -> None:
        """Add the entries of one run alone, if nothing else explains that the runs part."""
        first: Parting | None = self.difference.first
        if self.culprits or self.unknown or first is None or first.kind != "layers":
            return
        outputs = [c for c in self.difference.changed if c.a.kind == "output"]
        if any(c.value is not None or "shape" in c.aspects for c in outputs):
            one, two = (e if isinstance(e, LayerEntry) else None for e in (first.a, first.b))
            if one is not None or two is not None:
                self.culprits.append(Culprit("path", one, two, "only one of the runs has it"))

    # Comparing

    def _far(self, x: Any, y: Any) -> ValueDifference | None:
        if x is None or y is None:
            return None
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.shape != y.shape:
                return ValueDifference(0, 0)
            return compare_tensors(x, y, rtol=self.rtol, atol=self.atol)
        if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            if len(x) != len(y):
                return ValueDifference(0, 0)
            found = (self._far(m, n) for m, n in zip(x, y, strict=True))
            return next((far for far in found if far is not None), None)
        if type(x) in (int, float, complex) and type(y) is type(x) and (self.rtol or self.atol):
            return self._far(torch.tensor(x), torch.tensor(y))
        return compare_numbers(x, y)

    def _agree(self, x: Any, y: Any) -> bool:
        if x is None or y is None:
            return True
        if self.rtol or self.atol:
            try:
                torch.testing.assert_close(x, y, rtol=self.rtol, atol=self.atol, check_dtype=False)
            except AssertionError:
                return False
            return True
        return same_bits(plainly(x), plainly(y))

    # Telling

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "same": not self,
            "rtol": self.rtol,
            "atol": self.atol,
            "culprits": [culprit.to_dict() for culprit in self.culprits],
            "passing": list(self.passing),
            "unknown": dict(self.unknown),
            "path": None if self.path is None else self.path.to_dict(),
            "unseen": self.unseen,
        }

    def to_json(self, **options: Any) -> str:
        """Return it as JSON.

        Args:
            **options: passed on to `json.dumps`.
        """
        return json.dumps(self.to_dict(), **options)

    def text(self, limit: int | None = 12) -> str:
        """Return the report.

        Args:
            limit: how many causes are listed at most; None for all of them.
        """
        return "\n".join(self._lines(limit))

    def _lines(self, limit: int | None) -> Iterator[str]:
        name = self.a.name if self.a.name == self.b.name else f"a: {self.a.name}, b: {self.b.name}"
        within = f" within rtol {self.rtol:g}, atol {self.atol:g}" if self.rtol or self.atol else ""
        if not self:
            by = "; they are written otherwise" if self.by_content else ""
            yield f"{name}: the two runs are the same{within or ', bit for bit'}{by}"
            return
        if self.first is None:
            yield f"{name}: the two runs differ, and no op is the cause by itself"
        else:
            yield f"{name}: the two runs differ, first because of"
            yield from self._first(self.first)
        if self.unseen:
            yield "The results differ only while nobody looks at the values in between."
        counts = [counted(len(self.culprits), "cause") + within]
        if self.passing:
            pass_ = "passes" if len(self.passing) == 1 else "pass"
            counts.append(f"{counted(len(self.passing), 'op')} only {pass_} a difference on")
        if self.unknown:
            counts.append(f"{counted(len(self.unknown), 'op')} could not be run again")
        yield "; ".join(counts)
        if self.path is not None:
            yield f"Another path was taken: {self.path}"
        if len(self.culprits) > 1:
            rows = [_culprit_row(culprit) for culprit in self.culprits[:limit]]
            yield ""
            yield from tabulate.tabulate(
                rows, ["cause", "at", "what"], disable_numparse=True
            ).splitlines()
            if limit is not None and len(self.culprits) > limit:
                yield f"and {len(self.culprits) - limit} more"
        for label, why in list(self.unknown.items())[:limit]:
            yield f"not run again: {label} ({why})"

    def _first(self, culprit: Culprit) -> Iterator[str]:
        entry = culprit.entry
        target = f"  {entry.target}" if entry.target else ""
        yield f"    {culprit._label}{target}"
        for side in (culprit.a, culprit.b) if self.by_content else (entry,):
            if side is not None and side.source is not None:
                where = place_text(side.source.file, side.source.line)
                within = f", module {side.module}" if side.module else ""
                yield f"    {where}{within}: {side.source.statement or side.source.text}"
        far = "" if culprit.value is None else f" ({culprit.value})"
        yield f"    {culprit.why}{far}"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        if not self:
            return "<Bisection: the same>"
        first = "no cause found" if self.first is None else f"first {self.first.entry.label}"
        return f"<Bisection: {first}, {len(self.passing)} pass it on>"


# Runs whose values in between were had by other means than the results.
_INDIRECT = ("replayed", "compiled")


def _tolerances(difference: Difference) -> tuple[float, float]:
    """Return 0 and 0, or the tolerances of the coarser dtype if the runs differ in dtype."""
    found = (0.0, 0.0)
    for change in difference.changed:
        for dtype in change.aspects.get("dtype", ()):
            found = max(found, _ROUNDING.get(dtype, (0.0, 0.0)))
    return found


def _entry_value(entry: LayerEntry) -> Any:
    return entry.value if entry.kind == "number" else entry.tensor_contents


def _cast_like(value: Any, other: Any) -> Any:
    """Return a value in the dtype, and on the device, of the one that stands there over there."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.to(other.device, other.dtype)
    return value


def _unless_empty(far: ValueDifference) -> ValueDifference | None:
    return far if far.elements else None


def _first_unmatched(
    label: str, entries: dict[str, LayerEntry], partners: Any
) -> LayerEntry | None:
    """Return the first in a row of ops of one run only that leads to a value; None if none does."""
    found: LayerEntry | None = None
    seen: set[str] = set()
    waiting = [label]
    while waiting:
        current = waiting.pop()
        if current in partners or current in seen or current not in entries:
            continue
        seen.add(current)
        entry = entries[current]
        if entry.kind != "state" and (found is None or (entry.index or 0) < (found.index or 0)):
            found = entry
        waiting += entry.parents
    return found


def _culprit_row(culprit: Culprit) -> tuple[str, str, str]:
    source = culprit.entry.source
    at = "" if source is None else place_text(source.file, source.line)
    names = [e.label for e in (culprit.a, culprit.b) if e is not None]
    far = "" if culprit.value is None else f"; {culprit.value}"
    return " / ".join(dict.fromkeys(names)), at, culprit.why + far


# Compares two runs that were written otherwise, by the values that both have.
#
# Ops are usually aligned by what they are and where they stand. A port of a model computes the
# same by other ops: one product for three, a table that is laid out otherwise. What it has in
# common with the original are values. An op is *sound* if another op of the other run gives the
# same value, or if such an op depends on it. The first that is not sound, though all that it
# reads is, is where the runs part.


def partings(
    a: Twin, b: Twin, is_same: Callable[[Tensor, Tensor], bool]
) -> tuple[LayerEntry | None, LayerEntry | None]:
    """Return the first entry of each run that is not sound, though all that it reads is."""
    ones, others = _values_by_shape(a), _values_by_shape(b)
    found_a: set[str] = set()
    found_b: set[str] = set()
    for shape in ones.keys() & others.keys():
        for (one, x), (other, y) in itertools.product(ones[shape], others[shape]):
            are_paired = one.label in found_a and other.label in found_b
            if not are_paired and is_same(x, y):
                found_a.add(one.label)
                found_b.add(other.label)
    (first_a, states_a), (first_b, states_b) = (
        _first_unsound(a, found_a),
        _first_unsound(b, found_b),
    )
    for one, other in itertools.product(states_a, states_b):
        if one.shape == other.shape:
            return one, other
    return first_a, first_b


def _values_by_shape(side: Twin) -> dict[Any, list[tuple[LayerEntry, Tensor]]]:
    """Return the entries with their values, by shape, without dimensions of one element."""
    found: dict[Any, list[tuple[LayerEntry, Tensor]]] = {}
    for entry in side.log.entries:
        value = _tensor_of(side, entry)
        if value is not None:
            value = value.detach().squeeze()
            found.setdefault((value.shape, value.is_floating_point()), []).append((entry, value))
    return found


def _tensor_of(side: Twin, entry: LayerEntry) -> Tensor | None:
    """Return a value that can be told from others; None if there is none."""
    if entry.kind not in ("op", "state", "input"):
        return None
    value: Any = entry.tensor_contents
    if entry.kind == "state":
        value = side.again.state(entry)
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return value if is_plain and value.numel() > 1 else None


def _first_unsound(side: Twin, found: set[str]) -> tuple[LayerEntry | None, list[LayerEntry]]:
    """Return the first op that is not sound, and what it reads of the state that is not."""
    entries = side.log.entries
    # What an op gives may be several entries, and other ops read one of them.
    op_of = {entry.label: entry.label if entry.index is None else entry.index for entry in entries}
    reads = {
        entry.label: {op_of[x] for x in _read_by(side, entry) if x in op_of} for entry in entries
    }
    sound = {op_of[label] for label in found}
    used = {op_of[entry.label] for entry in entries if entry.kind == "output"}  # by the result
    for entry in reversed(entries):
        for reached in (sound, used):
            if op_of[entry.label] in reached:
                reached |= reads[entry.label]
    other = used - sound
    states = {op_of[entry.label]: entry for entry in entries if entry.kind == "state"}
    for entry in entries:
        is_unsound = op_of[entry.label] in other and _tensor_of(side, entry) is not None
        if (
            entry.kind == "op"
            and is_unsound
            and other.isdisjoint(reads[entry.label] - states.keys())
        ):
            return entry, [states[x] for x in reads[entry.label] & states.keys() & other]
    return None, []


def _read_by(side: Twin, entry: LayerEntry) -> list[str]:
    """Return the labels of an entry's inputs, state included."""
    if entry.kind != "op":
        return entry.parents
    try:
        return [*entry.parents, *side.again.producers(entry)]
    except Unable:
        return entry.parents


# The two runs that are compared: traced, replayed, compiled, or loaded.


@dataclass
class Twin:
    """One of the two runs."""

    log: RunLog  # its log, with all values
    again: OpRunner  # runs its ops again
    kind: str  # "traced", "replayed", "compiled" or "loaded"
    output: Any = None  # the output of an unrecorded call of the model; None for a log


def placed(model: object, other: object, call: Call) -> Call:
    """Return inputs as a model wants them: where its parameters are, and in their dtype.

    The dtype of floating point tensors is changed only where the two models differ in theirs.
    """
    mine, theirs = _parameter_of(model), _parameter_of(other)
    call = own_copy(call)
    if mine is None:
        return call
    dtype = None if theirs is None or theirs.dtype == mine.dtype else mine.dtype
    shape, parts = take_apart(tuple(call))
    for number, part in enumerate(parts):
        if isinstance(part, Tensor):
            floats = part.is_floating_point()
            parts[number] = part.to(mine.device, dtype if floats and dtype else part.dtype)
    return Call(*assemble(shape, parts))


def _parameter_of(model: object) -> Tensor | None:
    owner = _native_model(model)
    if not isinstance(owner, nn.Module):
        return None
    return next((p for p in owner.parameters() if p.is_floating_point()), None)


def _native_model(model: Any) -> Any:
    """Return the model itself, without wrappers that compile, replay or fill in arguments."""
    while True:
        if isinstance(model, functools.partial):
            model = model.func
        elif isinstance(model, BendedModule):
            model = model.model
        elif _is_compiled(model):
            model = model._orig_mod
        else:
            return getattr(model, "__self__", model)


def _is_compiled(model: object) -> bool:
    return isinstance(model, nn.Module) and "_orig_mod" in model._modules


def side_of(model: Any, call: Call | None) -> Twin:
    """Run one side."""
    if isinstance(model, RunLog):
        if all(entry.tensor_contents is None for entry in model.layers):
            raise InputError(
                f"the log of {model.name} holds no values to compare: trace with save='all'"
            )
        return Twin(model, op_runner_of(model), "traced" if isinstance(model, Trace) else "loaded")
    if call is None:
        raise InputError("a model needs inputs: bisect(a, b, inputs)")
    if hasattr(model, "_torchdynamo_orig_callable") and not _is_compiled(model):
        raise InputError(
            "torch.compile of a function hides how it was compiled: compile a module instead"
        )
    with PreservedState(_native_model(model), modes=True):
        if isinstance(model, BendedModule) and not model.insertions:
            return _replay_side(model, call)
        if _is_compiled(model):
            return _compile_side(model, call)
        log = _traced(model, call)
        return Twin(log, op_runner_of(log), "traced", log.output)


def _traced(model: Callable[..., Any], call: Call) -> Trace:
    args, kwargs = own_copy(call)
    return run_trace(model, args, kwargs, SaveOptions("all"))


# Replayed


class _OutputRecorder(Interjection):
    """Keeps the output of each node."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], Any] = {}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        self.values[at.path, at.number] = (
            aligned_copy(output.detach()) if isinstance(output, Tensor) else output
        )


def _replay_side(model: BendedModule, call: Call) -> Twin:
    """Replay a model while its nodes are looked at."""
    native = _native_model(model)
    log = _preserving(native, _traced, native, call)
    for _ in range(2):
        output = _preserving(native, _own_call, model, call)
    seen = _OutputRecorder()
    with model.interject(lambda candidate: True, seen):
        for _ in range(2):
            seen.values.clear()
            before = model.stats.replays
            _preserving(native, _own_call, model, call)
    if model.stats.replays == before:
        why = "; ".join(model.why_live) or "it was recorded again"
        raise InputError(f"the call is not replayed, so there is nothing to compare: {why}")
    kept = _of_same_run(log)
    for entry in log.entries:
        value = seen.values.get((entry.node_path, entry.pass_number - 1))
        if entry.index is not None and isinstance(value, Tensor) and not entry.element:
            kept.saved[entry.index, ()] = value
    return Twin(_with_values(log, kept), op_runner_of(log, kept), "replayed", output)


def _own_call(model: Callable[..., Any], call: Call) -> Any:
    return own_copy(call).to(model)


def _preserving(native: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and leave a model as it was."""
    with PreservedState(native, modes=True):
        return run(*args)


# Compiled


def _compile_side(model: Any, call: Call) -> Twin:
    """Compile the traced ops as the model is compiled, and have the graph return every value."""
    native = model._orig_mod
    log = _preserving(native, _traced, native, call)
    output = _preserving(native, _own_call, model, call)
    try:
        graph = log.to_fx(guards=False)
    except ConversionError as error:
        raise InputError(f"the run cannot be compiled op by op: {error}") from error
    keys = _return_all(log, graph)
    saved = log._capture.saved
    inputs = [saved.get((op.index, ()), op.meta) for op in log.ops if op.kind is OpKind.INPUT]
    copies = (aligned_copy(v) if isinstance(v, Tensor) else v for v in inputs)
    values = _preserving(native, model.dynamo_ctx(graph), *copies)
    kept = _of_same_run(log)
    for key, value in zip(keys, values, strict=True):
        kept.saved[key] = value.detach()
    return Twin(_with_values(log, kept), op_runner_of(log, kept), "compiled", output)


def _return_all(log: Trace, module: fx.GraphModule) -> list[tuple[int, tuple[Any, ...]]]:
    """Have a graph return copies of all tensors of a log; return which these are."""
    nodes = {node.name: node for node in module.graph.nodes}
    keys, copies = [], []
    for op, name in zip(log.ops, log.names, strict=True):
        node = nodes.get(name)
        if op.kind not in (OpKind.CALL, OpKind.SCALAR) or node is None:
            continue
        for path, _ in tensors_of(op.meta):
            with module.graph.inserting_after(node):
                taken = node
                for key in path:
                    taken = module.graph.call_function(operator.getitem, (taken, key))
            with module.graph.inserting_after(taken):
                copies.append(module.graph.call_function(torch.clone, (taken,)))
            keys.append((op.index, path))
    last = next(node for node in module.graph.nodes if node.op == "output")
    last.args = (tuple(copies),)
    for op, name in zip(reversed(log.ops), reversed(log.names), strict=True):
        node = nodes.get(name)  # what was asked for a branch would only break the graph
        if node is not None and op.is_work and not node.users and not op.writes:
            module.graph.erase_node(node)
    module.recompile()
    return keys


# Both


def _of_same_run(log: Trace) -> ValueCapture:
    """Return what is known of the values of a run that did the same ops as a traced one."""
    kept = copy.copy(log._capture)
    assert kept is not None
    kept.saved = {key: value for key, value in kept.saved.items() if log.ops[key[0]].is_given}
    kept.reread = {}  # known for the traced run only
    return kept


def _with_values(log: Trace, kept: ValueCapture) -> RunLog:
    """Return a log of the same ops with other values."""
    parts = log._parts()
    names = {entry.label: entry for entry in log.entries}

    def value(entry: LayerEntry) -> Any:
        if entry.index is None:  # an output is what another entry gave
            parents = [names[label] for label in entry.parents if label in names]
            return value(parents[0]) if len(parents) == 1 else None
        return kept.saved.get((entry.index, entry.element))

    entries = [dataclasses.replace(entry, saved=value(entry)) for entry in parts[0].entries]
    return RunLog(dataclasses.replace(parts[0], entries=entries), *parts[1:])


# Running one op of a log again, on values of another run.


class Unable(Exception):
    """An op cannot be run again: why."""


class OpRunner(Protocol):
    """Runs ops of one log again."""

    def inputs(self, entry: LayerEntry) -> list[Any]:
        """Return the values that the op of an entry read, in their order."""

    def producers(self, entry: LayerEntry) -> list[str]:
        """Return, for each of these values, the label of its entry; "" for none."""

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        """Run the op of an entry on other values, and return the value of the entry then."""

    def state(self, entry: LayerEntry) -> Tensor | None:
        """Return the tensor of a state entry; None if it is not known."""


def op_runner_of(log: RunLog, kept: ValueCapture | None = None) -> OpRunner:
    """Return an object that runs the ops of a log again."""
    if isinstance(log, Trace):
        capture = kept if kept is not None else log._capture
        if capture is not None:
            return _Recorded(log, capture)
    return _Written(log)


class _Recorded:
    """The ops of a run that was recorded in this process."""

    def __init__(self, trace: Trace, kept: ValueCapture) -> None:
        self._ops = trace.ops
        places = {(e.index, e.element): e.label for e in trace.entries if e.index is not None}
        self._labels = {index: label for (index, _), label in reversed(places.items())}
        self._validator = Validator(trace.ops, kept, places, 0)
        self._kept = kept

    def inputs(self, entry: LayerEntry) -> list[Any]:
        op = self._op(entry)
        found = []
        for ref in refs_in((op.args, op.kwargs)):
            value = self._validator.value(op, ref)
            if value is MISSING:
                raise Unable(f"it reads %{ref.index}, whose value was not saved")
            found.append(value)
        return found

    def producers(self, entry: LayerEntry) -> list[str]:
        op = self._op(entry)
        return [self._labels.get(ref.index, "") for ref in refs_in((op.args, op.kwargs))]

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        op = self._op(entry)
        reason = self._validator.unable(op)
        if reason is not None:
            raise Unable(reason)
        refs = [ref.index for ref in refs_in((op.args, op.kwargs))]
        if len(refs) != len(values):
            raise Unable("it reads another number of values")
        random = RandomStates()
        try:
            made = self._validator.carry_out(op, dict(zip(refs, values, strict=True)))
        except Exception as error:
            raise Unable(f"it raises {type(error).__name__}") from error
        finally:
            random.restore()
        return _element(made, entry)

    def state(self, entry: LayerEntry) -> Tensor | None:
        kept = None if entry.index is None else self._kept.states.get(entry.index)
        return None if kept is None else kept.read()

    def _op(self, entry: LayerEntry) -> Op:
        if entry.index is None:
            raise Unable("it is not an op")
        return self._ops[entry.index]


def _element(made: Any, entry: LayerEntry) -> Any:
    try:
        for key in entry.element:
            made = made[key]
    except (TypeError, LookupError, AttributeError) as error:
        raise Unable("it gives something else") from error
    return made.detach() if isinstance(made, Tensor) else made


# Labels of values, as they stand in the arguments of an entry.
_LABEL = re.compile(r"\w[\w.]*(?::\d+)?")
# Where functions of torch's are; the arguments name dtypes and the like.
_MODULES = {"torch": torch}


class _Written:
    """The ops of a log that was loaded: functions and arguments are read from the text."""

    def __init__(self, log: RunLog) -> None:
        self._entries = {entry.label: entry for entry in log.entries}

    def inputs(self, entry: LayerEntry) -> list[Any]:
        return [self._value(label) for label in self.producers(entry)]

    def producers(self, entry: LayerEntry) -> list[str]:
        return [m[0] for m in _LABEL.finditer(entry.arguments) if m[0] in self._entries]

    def _value(self, label: str) -> Any:
        entry = self._entries[label]
        if entry.kind == "number":
            return entry.value
        value = entry.tensor_contents
        if entry.kind == "state" and value is None:
            raise Unable("a log does not hold the weights that it reads")
        if not isinstance(value, Tensor):
            raise Unable(f"{label} was not saved")
        return value

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        if entry.inplace:
            raise Unable("it writes to what it is given, which a log does not tell apart")
        function = _function(entry.target)
        names: dict[str, Any] = {}

        def placed(found: re.Match[str]) -> str:
            if found[0] not in self._entries:
                return found[0]
            name = f"value_{len(names)}"
            names[name] = values[len(names)]
            return name

        try:
            text = _LABEL.sub(placed, entry.arguments)
            call = ast.parse(f"call({text[1:-1]})", mode="eval").body
            assert isinstance(call, ast.Call)
            args = [_read_argument(node, names) for node in call.args]
            kwargs = {str(word.arg): _read_argument(word.value, names) for word in call.keywords}
            with torch.no_grad():
                made = function(*args, **kwargs)
        except Unable:
            raise
        except Exception as error:
            raise Unable(f"its text cannot be run: {type(error).__name__}") from error
        return _element(made, entry)

    def state(self, entry: LayerEntry) -> Tensor | None:
        value = entry.tensor_contents
        return value if isinstance(value, Tensor) else None


def _function(target: str) -> Callable[..., Any]:
    first, *rest = target.split(".")
    found: Any = _MODULES.get(first) if rest else getattr(torch.Tensor, first, None)
    for name in rest:
        found = getattr(found, name, None)
    if not callable(found) or found not in _overridable():  # a log is not trusted
        raise Unable(f"{target}is not an op of torch here")
    function: Callable[..., Any] = found
    return function


@cache
def _overridable() -> frozenset[Any]:
    """Return the functions of torch's that compute something with tensors, and no others."""
    found = torch.overrides.get_overridable_functions().values()
    return frozenset(chain.from_iterable(found))


def _read_argument(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an argument that was written as text; nothing is called."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = getattr(_MODULES.get(node.value.id), node.attr, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [_read_argument(item, names) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)
