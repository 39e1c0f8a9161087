"""Loops that go through what an instruction gives, and let nothing else have it."""

from __future__ import annotations

import builtins
import dis
import functools
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from bendtrace.python import stacks
from bendtrace.python.bytecode import (
    CONSTANTS,
    InstructionStep,
    cache_by_code,
    loads_method,
    single_steps,
)
from bendtrace.python.internals import internal
from bendtrace.python.sites import TORCH, instruction_at


class RowLoop(NamedTuple):
    """A loop over what an instruction gives: `for row in x.unbind(0)`.

    Attributes:
        way: the builtins that pass the items on to the loop, innermost first: `enumerate`.
        iterates: whether the instruction asks its operands for their iterators, as `for row in x`
            and `zip(x, y)` do. Otherwise it calls what gives the items.
        is_list: whether a list comprehension goes through them, in a frame for itself.
    """

    way: tuple[str, ...]
    iterates: bool
    is_list: bool = False

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
        if step.name == "GET_ITER" and after is not None:
            is_list = after.offset in comprehensions(code)
            if is_list or after.name == "FOR_ITER":
                found[step.offset] = RowLoop((), True, is_list)
                _note_source(stack[-1] if stack else None, RowLoop((), False, is_list), found)
        if step.name == "KW_NAMES":
            names = code.co_consts[step.argument or 0]
            continue
        if step.name == "CALL_KW":
            taken = stack.pop() if stack else None
            names = taken if isinstance(taken, tuple) and not isinstance(taken, _Call) else ("?",)
        _carry_out_step(stack, step, code, names)
        if step.name.startswith("CALL"):
            names = ()
    return found


def _note_source(symbol: _Symbol, loop: RowLoop, found: dict[int, RowLoop]) -> None:
    """Note the loop of a call that gives what the loop goes through."""
    if not isinstance(symbol, _Call):
        return
    if symbol.function not in _WAYS:
        found[symbol.offset] = loop
        return
    positional = symbol.given[: len(symbol.given) - len(symbol.names)]
    if not positional or not {*symbol.names} <= {*_WAYS[symbol.function]}:
        return
    loop = loop._replace(way=(symbol.function, *loop.way))
    if symbol.function == "reversed":  # which makes another tensor of a tensor
        inner = positional[0]
        if isinstance(inner, _Call) and inner.function not in _WAYS:
            _note_source(inner, loop, found)
        return
    found[symbol.offset] = loop._replace(iterates=True)
    for argument in positional if symbol.function == "zip" else positional[:1]:
        _note_source(argument, loop, found)


def _carry_out_step(
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


def stack_uses(step: InstructionStep) -> tuple[int | None, int]:
    """Return how many values an instruction takes from the stack, and how many it puts there."""
    name, argument = step.name, step.argument or 0
    if name in CONSTANTS or name in ("LOAD_FAST", "LOAD_DEREF"):
        return 0, 1
    if name in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"):
        taken = int(name != "LOAD_GLOBAL")
        is_call = loads_method(step) or step.shown.startswith("NULL") or "+ NULL" in step.shown
        return taken, 1 + is_call
    if name == "PUSH_NULL":
        return 0, 1
    if name == "KW_NAMES":
        return 0, 0
    if name in ("BUILD_LIST", "BUILD_TUPLE", "BUILD_SLICE"):
        return argument, 1
    if name in ("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP"):
        return 2, 1
    if name == "BINARY_SLICE":
        return 3, 1
    if name.startswith("UNARY"):
        return 1, 1
    if name in ("CALL", "CALL_KW"):
        return argument + 2 + (name == "CALL_KW"), 1
    return None, 0


@cache_by_code
def comprehensions(code: CodeType) -> dict[int, int]:
    """Return the calls of list comprehensions in code, with where each expression begins.

    Since Python 3.12 they are no calls.
    """
    steps = single_steps(code)
    if not any(
        type(step.value) is CodeType and step.value.co_name == LIST_COMPREHENSION for step in steps
    ):
        return {}
    depths, found = stacks.stack_depths(code), {}
    for position, step in enumerate(steps):
        if step.name != "CALL" or step.argument or steps[position - 1].name != "GET_ITER":
            continue
        base = depths.get(step.offset, 0) - 2  # below the function and its iterator
        first = position
        while first and depths.get(steps[first].offset, base + 1) > base:
            first -= 1
        inner = next((one.value for one in steps[first:] if one.name == "LOAD_CONST"), None)
        if type(inner) is CodeType and inner.co_name == LIST_COMPREHENSION:
            found[step.offset] = steps[first].offset
    return found


LIST_COMPREHENSION = "<listcomp>"


@functools.lru_cache(maxsize=1024)
def jump_targets(code: CodeType) -> frozenset[int]:
    """Return the instructions that code may jump to."""
    return frozenset(step.offset for step in dis.get_instructions(code) if step.is_jump_target)


# Calls that give what a loop goes through


def walking_frame(function: Any, frame: FrameType) -> tuple[FrameType | None, bool]:
    """Return the user's code that receives rows, and whether it asks a tensor for its iterator.

    None for the result of a function that gives no rows, and where torch takes it for itself.

    Args:
        function: the function that gives the result.
        frame: the code that calls it.
    """
    iterates = frame.f_code is _ITER_CODE
    if function not in _SLICING:
        return None, iterates
    found: FrameType | None = frame.f_back if iterates else frame
    if found is not None and found.f_code is _DISPATCH_CODE:  # on behalf of the function
        found = found.f_back
        own = getattr(function, "__code__", None)
        found = found.f_back if found is not None and found.f_code is own else None
    if found is None or found.f_code.co_filename.startswith(TORCH):
        return None, iterates
    return found, iterates


def goes_through(function: Any, frame: FrameType) -> bool:
    """Return whether a loop goes through a result, which nothing else receives."""
    caller, iterates = walking_frame(function, frame)
    if caller is None:
        return False
    loop = row_loop_at(caller.f_code, instruction_at(caller.f_code, caller.f_lasti))
    return loop is not None and loop.iterates is iterates


# Functions that give views of a tensor side by side.
_SLICING: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner in (torch.Tensor, torch)
    for name in ("chunk", "split", "tensor_split", "unbind")
)
_ITER_CODE: Any = internal("torch.Tensor.__iter__.__code__", None)
_DISPATCH_CODE: Any = internal("torch.overrides.handle_torch_function.__code__", None)
