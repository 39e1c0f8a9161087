"""Where code looks attributes up by names that are no constants, judging by its instructions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from types import CodeType

_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
_OF_ALL = frozenset({"vars", "dir", "__dict__", "__getattribute__", "getattr_static", "getmembers"})
_SIMPLE = ("LOAD_", "PUSH_NULL", "CACHE", "COPY_FREE", "NOP")


def computed_lookups(code: CodeType) -> Iterator[bool]:
    """Yield, for each lookup by a name that seems to be computed, whether it is one in `self`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for number, step in enumerate(steps):
        if step.argval in _OF_ALL and step.opname.startswith("LOAD"):
            yield False
        elif step.argval in _BY_NAME and step.opname.startswith("LOAD"):
            after = steps[number + 1 :]
            if step.opname == "LOAD_GLOBAL" and "NULL" not in step.argrepr:
                yield False  # it is handed on: map(getattr, ...)
            elif _is_computed(step, after):
                yield _is_of_self(after)


def _is_computed(lookup: dis.Instruction, steps: Sequence[dis.Instruction]) -> bool:
    given: list[dis.Instruction] = []
    for step in steps:
        if step.opname in ("PRECALL", "KW_NAMES"):
            continue
        if step.opname.startswith("CALL"):
            break
        if step.opname == "PUSH_NULL" and not given:
            continue
        calls = step.opname in ("LOAD_METHOD", "PUSH_NULL") or "NULL" in step.argrepr
        if calls or not step.opname.startswith(_SIMPLE):
            return True  # there is another call inside, or a condition
        if step.opname == "LOAD_ATTR":
            given[-1:] = [step]
        else:
            given.append(step)
    first = 0 if lookup.argval in ("attrgetter", "methodcaller") else 1
    names = given[first:] if lookup.argval == "attrgetter" else given[first : first + 1]
    return not names or not all(
        one.opname == "LOAD_CONST" and isinstance(one.argval, str) for one in names
    )


def _is_of_self(steps: Sequence[dis.Instruction]) -> bool:
    """Return whether the first argument of a call is `self`.

    Args:
        steps: the instructions after the one that loads the function.
    """
    depth = 0  # how many arguments there are so far, and parts of them
    # Since Python 3.13, a null comes after what is called. Before, it would belong to the argument.
    if steps and steps[0].opname == "PUSH_NULL" and sys.version_info >= (3, 13):
        steps = steps[1:]
    for step in steps:
        if depth == 0:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if not step.opname.startswith(_LOADS_VARIABLE) or names[0] != "self":
                return False
        elif depth == 1 and not step.opname.startswith(_LOADS):
            return False  # something is done to it: self[0], self.parts()
        if "JUMP" in step.opname:
            return False
        before, depth = depth, depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 2 <= before:
            return depth < 1  # the lookup is called, or else `self + 1` is
    return False


_LOADS_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_SMALL_INT", "PUSH_NULL")
