"""The guards of a trace as a table, and in words why they keep it from serving some inputs."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.engine.check import Check
from bendtrace.engine.guard_kinds import GuardKind
from bendtrace.engine.program import Program
from bendtrace.python.lazy import LazyModule, tabulate
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind, Copy
from bendtrace.tape.guards import ErrorGuard
from bendtrace.tape.tape import AfterOp, Guard, Op, Raised, Stop, meta_of

if TYPE_CHECKING:
    from bendtrace import flow
    from bendtrace._trace import Trace
    from bendtrace.record import iterations
else:
    flow = LazyModule("bendtrace.flow")
    iterations = LazyModule("bendtrace.record.iterations")


@dataclass(frozen=True)
class Mismatch:
    """The reason for which a trace cannot serve some inputs.

    Attributes:
        reason: one line, with the recorded and the new value.
        recorded: the recorded value.
        new: the value now.
        step: the flow step that put the guard, if one did.
        guard: number of the guard on `Trace.guards`, if there is one.
    """

    reason: str
    recorded: Any = None
    new: Any = None
    step: flow.FlowStep | None = None
    guard: int | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Explanation:
    """The traces that could serve some inputs, judging by the input guards alone.

    Attributes:
        serving: traces whose input guards all hold.
        nearest: if there are none: what fails in the trace that comes nearest.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.mean(0) if x.shape[0] > 2 else x.sum(0))
        >>> _ = bended(torch.ones(4, 2))
        >>> bended.explain(torch.ones(3, 2)).serving
        (<Trace of <lambda>: 5 ops, 2 flow steps>,)
        >>> print(bended.explain(torch.ones(2, 2)))  # doctest: +ELLIPSIS
        would be traced again: conditional expression `x.shape[0] > 2` at ...:1 was True when traced
        and is False now
    """

    serving: tuple[Trace, ...]
    nearest: Mismatch | None

    def __str__(self) -> str:
        if self.serving:
            return "could be served by " + ", ".join(map(repr, self.serving))
        if self.nearest is None:
            return "nothing has been traced for these arguments yet"
        return f"would be traced again: {self.nearest}"


def explain_check(
    check: Check, program: Program, arguments: tuple[Any, ...]
) -> Callable[[], Mismatch]:
    """Look at the value of an input guard; return a function that explains why it fails."""
    with torch._C.DisableTorchFunction():  # what a class does when it is asked is the model's
        if check.guard is None:
            mismatch = _explain_part(check, arguments)
            return lambda: mismatch
        guard = program.recording.tape.guards[check.guard]
        try:
            new = program.value_now(guard, arguments)
        except Exception as error:  # what the condition is about cannot even be computed now
            new = error
        return functools.partial(explain_guard, program.recording, check.guard, new)


def _explain_part(check: Check, arguments: tuple[Any, ...]) -> Mismatch:
    part = check.part
    if part is None or (part.kind is CaptureKind.DICT and part.access is Access.FIXED):
        return Mismatch(check.text)
    new = _part_now(part, arguments)
    recorded = part.size if part.kind is CaptureKind.TENSOR else part.value
    reason = f"{check.text}: it is {_short_repr(new)} now"
    # A mismatch is kept; the caller's tensor need not live as long, and an array changes.
    if part.kind is CaptureKind.ARRAY and isinstance(part.size, Copy):
        recorded, new = part.size.content.value, copy.copy(new)
    return Mismatch(reason, recorded, _short_repr(new) if isinstance(new, Tensor) else new)


def explain_divergence(recording: Recording, number: Stop, outcome: Any) -> Mismatch:
    """Say why a replay stopped: at a guard that did not hold, or an op that raised, or did not."""
    if not isinstance(number, AfterOp):
        return explain_guard(recording, number, outcome)
    op = recording.tape.ops[number.index]
    return Mismatch(_of_error(op, op.raised, outcome))


def _of_error(op: Op, before: Raised | None, now: Raised | None) -> str:
    site = f" at {op.site.place}: `{op.site.place.text}`" if op.site is not None else ""
    return (
        f"an operation{site} raised {before or 'nothing'} when traced and raises "
        f"{now or 'nothing'} now"
    )


def explain_guard(recording: Recording, number: int, new: Any) -> Mismatch:
    """Describe the recorded and the present value of a guard."""
    guard = recording.tape.guards[number]
    if isinstance(guard, ErrorGuard):
        reason = _of_error(recording.tape.ops[guard.index], guard.answer, new)
        return Mismatch(reason, guard.answer, new, None, number)
    step = next((step for step in flow.steps_of(recording) if step.guard == number), None)
    recorded, new = guard.word(guard.answer), guard.word(new)
    if step is not None:
        what = f"{step.kind} `{step.text}`" if step.text else step.kind
        where = str(step.place)
    else:
        what, where = _without_step(guard)
    reason = (
        f"{what} at {where} was {_short_repr(recorded)} when traced and is {_short_repr(new)} now"
    )
    return Mismatch(reason, recorded, new, step, number)


def _without_step(guard: Guard) -> tuple[str, str]:
    if guard.site is None:
        return "a value", "an unknown place"
    place, _, _ = iterations.user_code(guard.scope, guard.site)
    return f"{guard.about} `{place.text}`" if place.text else guard.about, str(place)


def _part_now(part: Captured, arguments: tuple[Any, ...]) -> Any:
    try:
        return part.read(arguments)
    except (LookupError, AttributeError, TypeError):
        return "gone"


def _short_repr(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = ", requires grad" if value.requires_grad else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(meta_of(value).shape)} on {value.device}{grad}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class GuardTable:
    """The guards of a trace as a table."""

    def __init__(
        self, guards: Sequence[Guard], kinds: Sequence[GuardKind], names: Sequence[str]
    ) -> None:
        self._rows = list(zip(guards, kinds, strict=True))
        self._names = names

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Guard:
        return self._rows[number][0]

    def kind(self, number: int) -> GuardKind:
        """Return when a guard is tested."""
        return self._rows[number][1]

    def to_list(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        rows = []
        for number, (guard, kind) in enumerate(self._rows):
            place = ""
            text = ""
            if guard.site is not None:
                found, _, _ = iterations.user_code(guard.scope, guard.site)
                place, text = str(found), found.text
            rows.append(
                {
                    "number": number,
                    "when": kind.value,
                    "node": self._names[guard.index],
                    "test": guard.name,
                    "expected": repr(guard.answer if guard.other is None else guard.other),
                    "source": text,
                    "at": place,
                }
            )
        return rows

    def __repr__(self) -> str:
        rows = [[*{**row, "at": os.path.basename(row["at"])}.values()] for row in self.to_list()]
        headers = ["#", "when", "node", "test", "expected", "source", "at"]
        return tabulate.tabulate(rows, headers, disable_numparse=True)
