"""A folded trace tree as text: it reads as the program that it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import Any

from bendtrace.outline.structure import Branch, End, Flow, ProgramOutline

__all__ = ["count", "end_text", "programs_as_text", "summary", "title", "value_text"]

_INDENT = "    "
_WIDEST = 64
_VALUES = 6

# Code, how often, and where.
Line = tuple[str, str, str]


def title(program: ProgramOutline) -> str:
    """Say which program it is, and what it was first called with."""
    return f"program {program.number}: {program.inputs}"


def programs_as_text(programs: Sequence[ProgramOutline]) -> Iterator[str]:
    """Yield each program as text; those that read as one before do in one line."""
    known: dict[tuple[str, ...], int] = {}
    for program in programs:
        rows = list(_flow(program.flow, 1))
        read = tuple(code for code, _, _ in rows)
        facts = list(_facts(program))
        counts = f"{count(program.traces, 'trace')}, {count(program.runs, 'run')}"
        if read in known:
            where = f", where {' and '.join(facts)}" if facts else ""
            yield f"{title(program)}{where}; {counts}; goes as program {known[read]}"
            continue
        known[read] = program.number
        lines = [title(program)]
        lines += [f"  {'and' if i else 'where'} {fact}" for i, fact in enumerate(facts)]
        yield "\n".join([*lines, f"  {counts}", *_aligned(rows)])


def _aligned(rows: list[Line]) -> Iterator[str]:
    width = min(max((len(code) for code, _, _ in rows), default=0), _WIDEST)
    middle = max((len(often) for _, often, _ in rows), default=0)
    for code, often, where in rows:
        if len(code) > width:
            indent = len(code) - len(code.lstrip())
            code = code[:indent] + shorten(code, max(width - indent, 20), placeholder=" ...")
        yield f"{code:<{width}}  {often:<{middle}}  {where}".rstrip()


_FACTS = 8


def _facts(program: ProgramOutline) -> Iterator[str]:
    yield from program.selected_by[:_FACTS]
    if len(program.selected_by) > _FACTS:
        yield f"{len(program.selected_by) - _FACTS} more"


def _flow(flow: Flow, depth: int) -> Iterator[Line]:
    for item in flow:
        if isinstance(item, End):
            code, where = end_text(item), item.where
            if item.kind == "live":
                code, where = "live only", item.text
            yield _INDENT * depth + code, count(item.hits, "run"), where
        elif item.is_loop:
            yield from _loop(item, depth)
        elif item.is_condition:
            yield from _condition(item, depth, "")
        else:
            yield from _values(item, depth)


def end_text(end: End) -> str:
    """Say how runs end."""
    if end.kind == "return":
        return end.text
    return f"raise {end.text}" if end.kind == "raise" else f"live: {end.text}"


def _condition(branch: Branch, depth: int, prefix: str) -> Iterator[Line]:
    indent = _INDENT * depth
    yield indent + prefix + branch.text + _colon(branch), summary(branch), _where(branch)
    yield from _flow(branch.flow(True), depth + 1)
    other = branch.flow(False)
    if not other:
        return
    items = list(other)
    only = items[0] if len(items) == 1 else None
    if isinstance(only, Branch) and only.is_elif:
        yield from _condition(only, depth, "el")
        return
    yield f"{indent}else{':' if _colon(branch) else ' ...'}", _share(branch, False), ""
    yield from _flow(other, depth + 1)


def _colon(branch: Branch) -> str:
    return ":" if branch.kind in ("if", "while", "for") else ""


def _loop(branch: Branch, depth: int) -> Iterator[Line]:
    yield _INDENT * depth + branch.text + _colon(branch), summary(branch), _where(branch)
    for taken in branch.sides():
        yield from _flow(taken.flow, depth + 1)


def _values(branch: Branch, depth: int) -> Iterator[Line]:
    yield _INDENT * depth + branch.text, summary(branch), _where(branch)
    for taken in branch.sides():
        if taken.flow:
            yield f"{_INDENT * (depth + 1)}{value_text(taken.value)}:", f"{taken.hits}x", ""
            yield from _flow(taken.flow, depth + 2)


def _where(branch: Branch) -> str:
    modules = [path for path in branch.modules if path]
    if not modules:
        return branch.where
    if len(modules) > 2:
        modules[1:] = [f"{len(modules) - 1} more"]
    inside = " and ".join(modules)
    return f"{branch.where} in {inside}"


def summary(branch: Branch) -> str:
    """Say how a branch came out, and how often."""
    if branch.is_loop:
        return _rounds(branch)
    if branch.is_condition:
        if branch.kind == "while" and branch.entered:
            return _rounds(branch)
        return _share(branch, True)
    sides = branch.sides()
    if len(sides) == 1:
        return f"always {value_text(sides[0].value)}{_often(branch)}"
    shown = [f"{value_text(taken.value)} ({taken.hits}x)" for taken in sides[:_VALUES]]
    if len(sides) > _VALUES:
        shown.append(f"and {len(sides) - _VALUES} more")
    return ", ".join(shown)


def value_text(value: Any) -> str:
    """Return an outcome, cut short."""
    text = value if isinstance(value, str) and " " in value else repr(value)
    return shorten(str(text), 24, placeholder="...") or "..."


def _rounds(branch: Branch) -> str:
    least, most = branch.least, branch.most
    loops = count(branch.entered, "time")
    if branch.is_joined:
        return f"{count(branch.rounds, 'iteration')} in all, entered {loops}"
    each = f"{most}" if least == most else f"{least} to {most}"
    return f"{each} iteration{'s' * (most != 1)}, entered {loops}"


def _share(branch: Branch, value: bool) -> str:
    hits, total = branch.hits(value), branch.total
    if not hits:
        return f"never{_often(branch)}"
    if hits == total:
        return f"always{_often(branch)}"
    return f"{hits} of {total}"


def _often(branch: Branch) -> str:
    return ", for these inputs" if branch.is_settled else f" ({branch.total}x)"


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"
