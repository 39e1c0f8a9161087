"""Explains why a run did not reach a node: which decision of the run led past it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from bendtrace._places import place_text
from bendtrace.flow import FlowStep, FlowSteps, steps_of
from bendtrace.interject.selectors.source import Branch, branches_around
from bendtrace.paths.candidates import Candidate
from bendtrace.recording.recorder import Recording
from bendtrace.source.statements import (
    BRANCHES,
    SourceFile,
    closes_block,
    rest_of_block,
    source_file,
)
from bendtrace.tape.captured import identical
from bendtrace.tape.tape import Guard

if TYPE_CHECKING:
    from bendtrace.view.outline.coverage import BranchCoverage

__all__ = ["unseen", "why_past"]


def why_past(
    path: str,
    nodes: Mapping[str, Candidate],
    others: Iterable[Recording],
    runs: Iterable[Recording],
) -> str:
    """Return a text that names the decision that led runs past a node; "" if it is unknown.

    It is the innermost condition around the node in the source whose outcome was different in a
    run. If there is none, it is the first decision of a run that differs in the most similar run
    that reached the node.

    Args:
        path: the node.
        nodes: the known nodes by path.
        others: runs that reached it.
        runs: runs that did not reach it.
    """
    others = list(others)
    furthest, found = -1, ""
    for run in runs:
        steps = steps_of(run)
        denied = _denied(path, nodes, steps)
        if denied is not None:
            return _told(denied)
        for other in others:
            depth, guard = _parting(other, run)
            step = next((s for s in steps if s.guard is not None and s.guard == guard), None)
            if step is not None and depth > furthest:
                furthest, found = depth, _told(step)
    return found


def _denied(path: str, nodes: Mapping[str, Candidate], steps: FlowSteps) -> FlowStep | None:
    """Return the step at which the innermost condition around a node was not met."""
    while path:
        node = nodes.get(path)
        for place in () if node is None or node.site is None else node.site.places:
            for branch in () if place.in_torch else branches_around(place):
                asked = [step for step in steps if _asks(step, branch, place.file)]
                if asked and all(bool(step.value) is not branch.side for step in asked):
                    return asked[-1]
        path = path.rpartition(".")[0]  # the call that it is in
    return None


def _asks(step: FlowStep, branch: Branch, file: str) -> bool:
    return (
        (step.file, step.text) == (file, branch.text)
        and step.line in branch.lines
        and isinstance(step.value, (bool, int, float))
    )


def _parting(one: Recording, other: Recording) -> tuple[int, int | None]:
    """Return the number of decisions that two runs have in common, and the second's next guard."""
    depth = 0
    for (_, mine), (number, theirs) in zip(_decisions(one), _decisions(other), strict=False):
        here = None if mine.site is None else mine.site.identity
        there = None if theirs.site is None else theirs.site.identity
        if here != there:
            break
        if not identical(mine.expected, theirs.expected):
            return depth, number
        depth += 1
    return depth, None


def _decisions(recording: Recording) -> list[tuple[int, Guard]]:
    return [
        (number, guard)
        for number, guard in enumerate(recording.tape.guards)
        if guard.how not in ("", "metadata")
    ]


def _told(step: FlowStep) -> str:
    where = f"{place_text(step.file, step.line)} `{step.text}`"
    if isinstance(step.value, bool):
        return f"branch at {where} {'was' if step.value else 'was not'} taken for this input"
    return f"{step.kind} at {where} was {step.value!r} for this input"


def unseen(branch: BranchCoverage) -> Iterator[str]:
    """Yield the source of the branch sides that were not seen."""
    file = source_file(branch.file)
    for node in file.parents:
        if isinstance(node, BRANCHES) and node.test.lineno == branch.line:
            for side in branch.missing:
                yield from _ran_on(file, node, side)


def _ran_on(file: SourceFile, node: ast.If | ast.IfExp | ast.While, side: bool) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield file.text(node.body if side else node.orelse)
        return
    here, other = (node.body, node.orelse) if side else (node.orelse, node.body)
    yield from map(file.text, here)
    if isinstance(node, ast.If) and closes_block(other):
        for span in rest_of_block(file, node):
            yield file.text(file.statements[span])
