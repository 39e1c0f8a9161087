"""Branches whose other side would have left a loop or a function before something ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from bendtrace.flow import LogicalFlowStep
from bendtrace.recording.iterations import running_code, user_code
from bendtrace.recording.sites import Place, Span
from bendtrace.recording.syntax import conclude_truth, source_file, spans_of

__all__ = ["kept_by"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def kept_by(trace: Any) -> dict[int, set[int]]:
    """Return for flow steps the ops that ran only because it did not leave what they are in.

    The control edges of the mirror know what stands behind such a branch in its block, and not
    what comes before it in the next iteration of a loop.
    """
    tape = trace.recording.tape
    coming = []
    for number, step in enumerate(trace.flow_steps):
        if step.guard is None or not isinstance(step, LogicalFlowStep):
            continue
        guard = tape.guards[step.guard]
        spans = tuple(_left(step.place, bool(step.value)))
        if spans and guard.site is not None:
            _, activation, _ = user_code(guard.scope, guard.site)
            coming.append((number, guard.position, activation, step.place.file, spans))
    kept: dict[int, set[int]] = {}
    for op in trace.ops if coming else ():
        places = [] if op.site is None else list(running_code(op.scope, op.site))
        for number, position, activation, file, spans in coming:
            if op.index >= position and any(
                running == activation
                and place.file == file
                and any(span.holds(place.span) for span in spans)
                for place, running in places
            ):
                kept.setdefault(number, set()).add(op.index)
    return kept


def _left(place: Place, outcome: bool) -> Iterator[Span]:
    """Yield the source that is not run any more if a branch goes the other way, and leaves it."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return
    test, value = conclude_truth(file, node, outcome)
    branch = test.parent
    if not isinstance(branch, ast.If) or test.child is not branch.test:
        return
    other = branch.orelse if value else branch.body
    last = other[-1] if other else None
    if not isinstance(last, (ast.Break, ast.Return, ast.Raise)):
        return
    for _, around in file.ancestors(branch):
        if isinstance(around, _FUNCTIONS):
            if not isinstance(last, ast.Break) and not isinstance(around, ast.Lambda):
                yield from spans_of(around.body)
            return
        if isinstance(around, _LOOPS) and isinstance(last, ast.Break):
            yield from spans_of(around.body)
            return
