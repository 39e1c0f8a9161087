"""Finding the programs that may serve some arguments, without asking each of many."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from bendtrace.recording.functions import name_of
from bendtrace.recording.parts import Access, Part
from bendtrace.recording.tape import Op, OpKind, Ref, Test
from bendtrace.replay.analysis import GuardKind
from bendtrace.replay.program import Program

__all__ = ["ProgramIndex"]


class Fixed(NamedTuple):
    """A number that a program insists on.

    Attributes:
        argument: which of the arguments, in order, it is about.
        dim: of which dimension it is the size; None where the argument is the number itself.
    """

    argument: int
    dim: int | None

    def read(self, arguments: tuple[Any, ...]) -> Any:
        """Return the number among other arguments; None if there is no such number."""
        argument = arguments[self.argument]
        if self.dim is None:
            return argument if type(argument) is int else None
        if not isinstance(argument, Tensor) or argument.is_nested:
            return None
        return argument.size(self.dim) if -argument.dim() <= self.dim < argument.dim() else None


class ProgramIndex:
    """Programs by the numbers that they insist on.

    Programs that insist on the same sizes, and on the same numbers among the arguments, are in one
    table, by the values of these; to find what may serve some arguments takes a look into each
    table. What is left out insists on something else. The rest has to be asked whether its guards
    hold.

    Threads may read while one adds or removes: what they read is exchanged, never changed.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[Fixed, ...], dict[tuple[Any, ...], tuple[Program, ...]]] = {}

    def add(self, program: Program) -> None:
        """Take a program in."""
        fixed = _fixed_by(program)
        table = self._tables.get(tuple(fixed), {})
        values = tuple(fixed.values())
        table[values] = (program, *table.get(values, ()))
        self._tables = {**self._tables, tuple(fixed): table}

    def remove(self, program: Program) -> None:
        """Leave a program out."""
        for table in self._tables.values():
            for values, programs in list(table.items()):
                if program in programs:
                    table[values] = tuple(other for other in programs if other is not program)

    def candidates(self, arguments: tuple[Any, ...]) -> Iterator[Program]:
        """Yield the programs that may serve some arguments, the latest first in each table."""
        for fixed, table in self._tables.items():
            yield from table.get(tuple(one.read(arguments) for one in fixed), ())


def _fixed_by(program: Program) -> dict[Fixed, int]:
    """Return the numbers that a program insists on, in an order that only depends on which."""
    tape = program.recording.tape
    found: dict[Fixed, int] = {}
    if program.ignored:  # parts of it are not looked at
        return found
    for guard, kind in zip(tape.guards, program.analysis.kinds, strict=True):
        if kind is GuardKind.INPUT and guard.test is Test.VALUE and type(guard.expected) is int:
            fixed = _number(tape.ops, tape.ops[guard.index])
            if fixed is not None:
                found[fixed] = guard.expected
    return dict(sorted(found.items(), key=lambda item: (item[0].argument, str(item[0].dim))))


def _number(ops: list[Op], op: Op) -> Fixed | None:
    """Say which number of the arguments an op gives, if it is one."""
    if op.kind is OpKind.INPUT:
        position = _position(op)
        return None if position is None else Fixed(position, None)
    dim: Any = None
    if op.target is operator.getitem and type(op.args[0]) is Ref:
        op, dim = ops[op.args[0].index], op.args[1]
    asked = name_of(op.target) if op.kind is OpKind.CALL else ""
    if op.kwargs or asked not in ("shape", "size") or type(op.args[0]) is not Ref:
        return None
    if asked == "size" and len(op.args) == 2:
        dim = op.args[1]
    elif len(op.args) != 1:
        return None
    position = _position(ops[op.args[0].index])
    return None if position is None or type(dim) is not int else Fixed(position, dim)


def _position(op: Op) -> int | None:
    """Return which argument an op gives, if it is one of them and not a part of one."""
    part = op.target
    if op.kind is OpKind.INPUT and isinstance(part, Part) and part.access is Access.ROOT:
        return int(part.key)
    return None
