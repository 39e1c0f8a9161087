"""Making a program that fails small: fewer calls, statements and expressions, the same failure."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from .program import Call, Program

__all__ = ["reduced"]


def reduced(program: Program, fails: Callable[[Program], bool], seconds: float = 60) -> Program:
    """Return a smaller program of which `fails` still holds.

    Args:
        program: one of which it holds.
        fails: whether a program fails in the way that matters.
        seconds: when to be content with what was reached.
    """
    until = time.monotonic() + seconds
    tried, smaller = 0, True
    while smaller:
        smaller = False
        for position, candidate in enumerate(_candidates(program)):
            if position < tried:
                continue  # where the last one was found, things are as they were up to here
            if time.monotonic() > until:
                return program
            if fails(candidate):
                program, smaller, tried = candidate, True, position
                break
        else:
            smaller, tried = tried > 0, 0
    return program


def _candidates(program: Program) -> Iterator[Program]:
    if program.inserted is not None:
        yield replace(program, inserted=None)
    for position in range(len(program.calls)):
        yield replace(program, calls=_without(program.calls, position))
    for position, call in enumerate(program.calls):
        if call != Call(call.arguments):
            plain = (
                *program.calls[:position],
                Call(call.arguments),
                *program.calls[position + 1 :],
            )
            yield replace(program, calls=plain)
    for source in _edits(program.world, _statements):
        if len(source) < len(program.world):
            yield replace(program, world=source)
    for source in chain(_edits(program.source, _statements), _edits(program.source, _expressions)):
        if len(source) < len(program.source):
            yield replace(program, source=source)


def _without(items: tuple[Call, ...], position: int) -> tuple[Call, ...]:
    return items[:position] + items[position + 1 :]


_LIBRARIES = frozenset(
    {"torch", "nn", "F", "math", "functools", "contextlib", "copy", "operator", "world"}
)
_Edit = Callable[[], None]


def _edits(source: str, edits: Callable[[ast.Module], Iterator[_Edit]]) -> Iterator[str]:
    """The texts that each of the edits leads to, biggest things first."""
    number = sum(1 for _ in edits(ast.parse(source)))
    for position in range(number):
        tree = ast.parse(source)
        for at, edit in enumerate(edits(tree)):
            if at == position:
                edit()
                break
        try:
            yield ast.unparse(tree) + "\n"
        except ValueError:  # not a program any more
            continue


def _statements(tree: ast.Module) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            suite = getattr(node, field, None)
            if not isinstance(suite, list):
                continue
            for position, statement in enumerate(suite):
                if isinstance(statement, ast.Pass):
                    continue
                needed = [] if field != "body" or len(suite) > 1 else [ast.Pass()]
                yield lambda s=suite, p=position, n=needed: s.__setitem__(slice(p, p + 1), n)
                inner = getattr(statement, "body", None)
                if isinstance(inner, list) and not isinstance(
                    statement, (ast.FunctionDef, ast.ClassDef)
                ):
                    yield lambda s=suite, p=position, n=inner: s.__setitem__(slice(p, p + 1), n)


def _expressions(tree: ast.Module) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            items = value if isinstance(value, list) else [value]
            for position, item in enumerate(items):
                if not isinstance(item, ast.expr) or isinstance(item, (ast.Name, ast.Constant)):
                    continue
                if isinstance(getattr(item, "ctx", None), (ast.Store, ast.Del)):
                    continue
                parts = [e for e in ast.walk(item) if isinstance(e, ast.expr) and e is not item]
                names = [e for e in parts if isinstance(e, ast.Name)][:2]
                children = [e for e in ast.iter_child_nodes(item) if isinstance(e, ast.expr)]
                for part in (*names, *children):
                    if isinstance(part, ast.Name) and part.id in _LIBRARIES:
                        continue
                    if isinstance(value, list):
                        yield lambda v=value, p=position, e=part: v.__setitem__(p, e)
                    else:
                        yield lambda n=node, f=field, e=part: setattr(n, f, e)
