"""Which local variables of some code can still be read from an instruction on.

A variable that is written before it is next read holds nothing that matters: what an index of the
round before was, for example.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType

__all__ = ["is_read_later"]

# Code by these names may read variables that no instruction of it names.
_LOOKS_AT_VARIABLES = frozenset(
    {
        "breakpoint", "currentframe", "dir", "eval", "exec", "f_locals", "getouterframes",
        "locals", "set_trace", "vars", "_getframe",
    }
)  # fmt: skip
_READS, _WRITES = "read", "write"
# What instructions do, by the parts of their names, to one variable each.
_DOES = {"LOAD": _READS, "DELETE": _READS, "STORE": _WRITES}


def is_read_later(code: CodeType, offset: int, slot: int) -> bool:
    """Whether what a local variable holds at an instruction may still be read.

    Args:
        code: the code.
        offset: of the instruction that is being carried out, in bytes.
        slot: the variable, by its position among the slots of the frame.
    """
    alive = _alive(code).get(offset)
    return alive is None or slot >= len(code.co_varnames) or bool(alive >> slot & 1)


@functools.lru_cache(maxsize=4096)
def _alive(code: CodeType) -> dict[int, int]:
    """Return the variables that are alive at each instruction, one bit for each.

    It is empty where that cannot be said.
    """
    if not _LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return {}
    steps = list(dis.get_instructions(code))
    position = {step.offset: number for number, step in enumerate(steps)}
    shared = _bits(code, code.co_cellvars)  # functions inside may read these
    effects, following = [], []
    for number, step in enumerate(steps):
        found = _effects(code, step)
        if found is None:
            return {}
        effects.append(found)
        then = [] if step.opname in _LAST or number + 1 == len(steps) else [number + 1]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            then.append(position[step.argval])
        following.append(then)
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end:
                following[number].append(position[entry.target])
    alive = [shared] * len(steps)
    has_changed = True
    while has_changed:
        has_changed = False
        for number in reversed(range(len(steps))):
            now = shared
            for other in following[number]:
                now |= alive[other]
            for does, bits in reversed(effects[number]):
                now = now | bits if does is _READS else now & ~bits | shared
            if now != alive[number]:
                alive[number], has_changed = now, True
    ends = [step.offset for step in steps[1:]] + [len(code.co_code)]
    return {
        offset: alive[number]
        for number, (step, end) in enumerate(zip(steps, ends, strict=True))
        for offset in range(step.offset, end, 2)
    }


_LAST = frozenset(
    {
        "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD",
        "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT",
    }
)  # fmt: skip


def _effects(code: CodeType, step: dis.Instruction) -> list[tuple[str, int]] | None:
    """Return what an instruction does to variables, in order; None if that is not known."""
    if "FAST" not in step.opname:
        return []
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if not {*code.co_varnames, *code.co_cellvars, *code.co_freevars}.issuperset(named):
        return None
    does = [_DOES[part] for part in step.opname.split("_") if part in _DOES]
    if "CLEAR" in step.opname or len(does) != len(named):
        return [(_READS, _bits(code, named))]  # whatever else it does
    return [(how, _bits(code, (name,))) for how, name in zip(does, named, strict=True)]


def _bits(code: CodeType, names: tuple[str, ...]) -> int:
    return sum(1 << k for k, name in enumerate(code.co_varnames) if name in names)
