"""Statements in general: which there are, bodies of them, functions, and what is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .writer import Function, Maybe, Tensor, Var, Writer

__all__ = ["body", "function", "returned", "statement"]


class _Rule(NamedTuple):
    write: Callable[[Writer], None]
    when: Callable[[Writer], Any]
    weight: int
    effect: bool


_RULES: list[_Rule] = []


def statement(
    when: Callable[[Writer], Any] = lambda w: True, weight: int = 1, effect: bool = False
) -> Callable[[Callable[[Writer], None]], Callable[[Writer], None]]:
    """Make a function a way to write a statement.

    Args:
        when: whether it can be written.
        weight: how often it is chosen, relative to others.
        effect: whether it changes what is defined outside the body that it stands in.
    """

    def register(write: Callable[[Writer], None]) -> Callable[[Writer], None]:
        _RULES.append(_Rule(write, when, weight, effect))
        return write

    return register


def body(w: Writer, effect: bool = False) -> None:
    """Write some statements; the first one, if so wanted, with an effect outside of them."""
    inside = w.depth > 0
    w.depth += 1
    while effect or (w.budget > 0 and w.below(4 if inside else 20)):
        w.budget -= 1
        rules = [rule for rule in _RULES if rule.when(w) and (rule.effect or not effect)]
        effect = False
        weights = [rule.weight * (3 if inside and rule.effect else 1) for rule in rules]
        if rules:
            choices = [rule for rule, n in zip(rules, weights, strict=True) for _ in range(n)]
            w.pick(choices).write(w)
    w.depth -= 1


def function(w: Writer, header: str, parameters: list[Var], result: Tensor) -> None:
    """Write a function that returns a tensor of a type."""
    before = w.scope, w.loops, w.result, w.depth
    w.scope, w.loops, w.result, w.depth = [*w.scope, *parameters], 0, result, 0
    w.line(header)
    w.indent += 1
    body(w)
    w.line(f"return {w.statement_expression(result)}")
    w.indent -= 1
    w.scope, w.loops, w.result, w.depth = before


def returned(w: Writer) -> str:
    """What the program returns: most of what there is."""
    parts = []
    for var in w.scope:
        if isinstance(var.kind, Function) or (isinstance(var.kind, Maybe) and w.below(2)):
            continue
        if w.below(8):
            parts.append(var.name)
    if not parts or w.chance(3):
        parts.append(w.statement_expression(w.type("f")))
    if w.chance(4):
        return "{" + ", ".join(f'"{i}": {part}' for i, part in enumerate(parts)) + "}"
    if len(parts) == 1:
        return parts[0]
    return f"[{', '.join(parts)}]" if w.chance(4) else ", ".join(parts)
