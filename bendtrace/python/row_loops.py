"""Loops that go through what an instruction gives, and let nothing else have it."""

from __future__ import annotations

import builtins
import functools
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

from bendtrace.python.bytecode import (
    CONSTANTS,
    InstructionStep,
    jump_targets,
    loads_method,
    single_steps,
    stack_uses,
)


class RowLoop(NamedTuple):
    """A loop over what an instruction gives: `for row in x.unbind(0)`.

    Attributes:
        way: the builtins that pass the items on to the loop, innermost first: `enumerate`.
        iterates: whether the instruction asks its operands for their iterators, as `for row in x`
            and `zip(x, y)` do. Otherwise it calls what gives the items.
    """

    way: tuple[str, ...]
    iterates: bool

    def is_known(self, frame: FrameType) -> bool:
        """Return whether the names on the way are those of the builtins.

        Args:
            frame: the code that has the loop.
        """
        return all(
            frame.f_globals.get(name, getattr(builtins, name)) is getattr(builtins, name)
            for name in self.way
        )


class _Call(NamedTuple):
    """A call within an expression: where it is, its function, and its arguments."""

    offset: int
    function: str  # "" for what is no global
    given: tuple[Any, ...]
    names: tuple[str, ...]  # of the last arguments


# What may lie on the stack: a call, the name of a global, or None for anything else.
_Symbol: TypeAlias = _Call | str | None
# The builtins that a loop may go through, and the names of their arguments.
_WAYS: dict[str, tuple[str, ...]] = {
    "enumerate": ("start",), "zip": ("strict",), "reversed": ()
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def row_loop_at(code: CodeType, offset: int) -> RowLoop | None:
    """Return the loop that alone receives what an instruction gives; None if there is none."""
    return _row_loops(code).get(offset)


@functools.lru_cache(maxsize=1024)
def _row_loops(code: CodeType) -> dict[int, RowLoop]:
    found: dict[int, RowLoop] = {}
    stack: list[_Symbol] = []
    names: tuple[str, ...] = ()
    steps, targets = single_steps(code), jump_targets(code)
    for step, after in zip(steps, (*steps[1:], None), strict=True):
        if step.offset in targets:
            stack.clear()
        if step.name == "GET_ITER" and after is not None and after.name == "FOR_ITER":
            found[step.offset] = RowLoop((), True)
            _note(stack[-1] if stack else None, (), found)
        if step.name == "KW_NAMES":
            names = code.co_consts[step.argument or 0]
            continue
        if step.name == "CALL_KW":
            taken = stack.pop() if stack else None
            names = taken if isinstance(taken, tuple) and not isinstance(taken, _Call) else ("?",)
        _follow(stack, step, code, names)
        if step.name.startswith("CALL"):
            names = ()
    return found


def _note(symbol: _Symbol, way: tuple[str, ...], found: dict[int, RowLoop]) -> None:
    """Note the loop of a call that gives what the loop goes through."""
    if not isinstance(symbol, _Call):
        return
    if symbol.function not in _WAYS:
        found[symbol.offset] = RowLoop(way, False)
        return
    positional = symbol.given[: len(symbol.given) - len(symbol.names)]
    if not positional or not {*symbol.names} <= {*_WAYS[symbol.function]}:
        return
    way = (symbol.function, *way)
    if symbol.function == "reversed":  # which makes another tensor of a tensor
        inner = positional[0]
        if isinstance(inner, _Call) and inner.function not in _WAYS:
            _note(inner, way, found)
        return
    found[symbol.offset] = RowLoop(way, True)
    for argument in positional if symbol.function == "zip" else positional[:1]:
        _note(argument, way, found)


def _follow(
    stack: list[Any], step: InstructionStep, code: CodeType, names: tuple[str, ...]
) -> None:
    """Let an instruction take symbols from a stack, and put others there."""
    taken, given = stack_uses(step)
    if taken is None:
        stack.clear()
        return
    if step.name == "CALL_KW":
        taken -= 1  # the names
    operands = [stack.pop() if stack else None for _ in range(taken)][::-1]
    if step.name == "LOAD_GLOBAL":
        stack += [None] * (given - 1) + [step.value]
    elif step.name in ("CALL", "CALL_KW"):
        function = next((one for one in operands[:2] if isinstance(one, str)), "")
        stack.append(_Call(step.offset, function, tuple(operands[2:]), names))
    elif step.name in CONSTANTS and type(step.value) is tuple:
        stack.append(step.value)
    else:
        stack += [None] * given
