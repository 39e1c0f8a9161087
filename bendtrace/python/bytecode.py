"""Bytecode: the instructions of code, and the variables that can still be read after one."""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

# The instructions of code, read from its bytes: `dis` takes some twenty times as long.
#
# Code is looked at when a model is first traced, and `dis` also finds out about lines, jumps and
# exceptions, which nobody asks for here.


# The instructions that push a constant. Which of them a constant takes differs between Pythons.
CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"})

# How arguments stand for names was seen in CPython 3.11 to 3.14; tests/test_bytecode.py
# compares with what `dis` says. LazyModule ones are asked by way of it.
_KNOWN = sys.version_info < (3, 15)
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_CACHE = dis.opmap["CACHE"]
_NAMED = frozenset(
    {
        "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME",
        "STORE_ATTR", "IMPORT_NAME",
    }
)  # fmt: skip
_NUMBERS = frozenset(dis.opmap[name] for name in _NAMED)
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]  # its lowest bit says whether it also pushes a null


def instructions_of(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the name of each instruction, and its argument."""
    extended = 0
    raw = code.co_code
    for number, argument in zip(raw[::2], raw[1::2], strict=True):
        if number == _CACHE:
            continue
        if number == _EXTENDED:
            extended = (extended | argument) << 8
            continue
        yield dis.opname[number], extended | argument
        extended = 0


def global_uses(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield how code uses globals, imports and attribute assignments: (how, name)."""
    if not _KNOWN:
        for step in dis.get_instructions(code):
            if step.opname in _NAMED and isinstance(step.argval, str):
                yield step.opname, step.argval
        return
    extended = 0
    raw, names = code.co_code, code.co_names
    for number, argument in zip(raw[::2], raw[1::2], strict=True):
        if number in _NUMBERS:
            argument |= extended
            index = argument >> 1 if number == _LOAD_GLOBAL else argument
            yield dis.opname[number], names[index]
        extended = (extended | argument) << 8 if number == _EXTENDED else 0


@functools.lru_cache(maxsize=8192)
def names_used_whole(code: CodeType) -> frozenset[str]:
    """Return the globals, and attributes of these, that code uses not only for their attributes.

    Attributes are named after what they are of, with dots in between.
    """
    found: set[str] = set()
    name = ""
    for step in single_steps(code):
        if name and step.name in ("LOAD_ATTR", "LOAD_METHOD"):
            name = f"{name}.{step.value}"
            continue
        if name:
            found.add(name)
        name = step.value if step.name == "LOAD_GLOBAL" else ""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_used_whole(constant)
    return frozenset(found)


@functools.lru_cache(maxsize=8192)
def put_on_globals(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes that code assigns of globals, or of what these hold."""
    found: set[str] = set()
    if any(how == "STORE_ATTR" for how, _ in global_uses(code)):
        is_outside, is_copied = False, False
        updated: set[str] = set()  # in `module.name += 1`, the value stands in between
        for step in single_steps(code):
            is_attribute = step.name in ("LOAD_ATTR", "LOAD_METHOD")
            if step.name == "STORE_ATTR" and (is_outside or step.value in updated):
                found.add(step.value)
            elif is_attribute and is_copied:
                updated.add(step.value)
            is_copied = is_outside and step.name == "COPY"
            is_outside = step.name in _FROM_OUTSIDE or (is_outside and is_attribute)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= put_on_globals(constant)
    return frozenset(found)


_FROM_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


def constant_of(code: CodeType, name: str, argument: int) -> Any:
    """Return the constant that an instruction pushes; the code itself if it pushes none."""
    if name == "LOAD_CONST":
        return code.co_consts[argument]
    if name == "LOAD_SMALL_INT":
        return argument
    if name == "LOAD_COMMON_CONSTANT":
        return dis._common_constants[argument]  # type: ignore[attr-defined]
    return code


def has(code: CodeType, name: str) -> bool:
    """Return whether code contains one of some instructions, nested functions excluded."""
    return dis.opmap[name] in code.co_code[::2]


def computes_names(code: CodeType) -> bool:
    """Return whether code seems to look attributes up by names that are not constants."""
    steps = [
        step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "KW_NAMES")
    ]
    for number, step in enumerate(steps):
        if step.argval in _OF_ALL and step.opname.startswith("LOAD"):
            return True
        if step.argval not in _BY_NAME or not step.opname.startswith("LOAD"):
            continue
        if step.opname == "LOAD_GLOBAL" and "NULL" not in step.argrepr:
            return True  # it is handed on: map(getattr, ...)
        given: list[dis.Instruction] = []
        for after in steps[number + 1 :]:
            if after.opname.startswith("CALL"):
                break
            if after.opname == "PUSH_NULL" and not given:
                continue
            calls = after.opname in ("LOAD_METHOD", "PUSH_NULL") or "NULL" in after.argrepr
            if calls or not after.opname.startswith(_SIMPLE):
                return True  # there is another call inside, or a condition
            if after.opname == "LOAD_ATTR":
                given[-1:] = [after]
            else:
                given.append(after)
        first = 0 if step.argval in ("attrgetter", "methodcaller") else 1
        names = given[first:] if step.argval == "attrgetter" else given[first : first + 1]
        if not names or not all(
            one.opname == "LOAD_CONST" and isinstance(one.argval, str) for one in names
        ):
            return True
    return False


_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
_OF_ALL = frozenset({"vars", "dir", "__dict__", "__getattribute__", "getattr_static", "getmembers"})
_SIMPLE = ("LOAD_", "PUSH_NULL", "CACHE", "COPY_FREE", "NOP")


def catches_all(code: CodeType) -> bool:
    """Return whether code has a handler that names no class of errors; not code inside it."""
    return any(
        current == "POP_TOP" and before == "PUSH_EXC_INFO"
        for (before, _), (current, _) in itertools.pairwise(instructions_of(code))
    )


def branches(code: CodeType) -> bool:
    """Return whether code has branches."""
    return bool(code.co_exceptiontable) or any(
        "JUMP" in name or name == "FOR_ITER" for name, _ in instructions_of(code)
    )


class InstructionStep(NamedTuple):
    """An instruction in a form common to all Python versions.

    Attributes:
        offset: the position of the instruction, in bytes. The two steps of one instruction share
            it.
        name: its name, without the part that says how a variable is loaded.
        argument: its argument.
        value: the meaning of the argument.
        shown: the same in the words of `dis`.
        positions: in the source; None if two steps share them.
    """

    offset: int
    name: str
    argument: int | None
    value: Any
    shown: str
    positions: dis.Positions | None


_IDLE = frozenset({"NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN"})
_LOADS = frozenset({"LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})


def single_steps(code: CodeType) -> tuple[InstructionStep, ...]:
    """Return the effective instructions, with combined ones as two steps.

    Since Python 3.13, `STORE_FAST_LOAD_FAST` and similar ones name two local variables; since 3.14,
    `LOAD_FAST_BORROW` is another way of loading one.
    """
    # Two files can have equal code, so the name of the file is a part of the key.
    return _single_steps(code, code.co_filename)


@functools.lru_cache(maxsize=1024)  # `dis` is slow, and the same code is read for several reasons
def _single_steps(code: CodeType, file: str) -> tuple[InstructionStep, ...]:
    return tuple(_decoded(code))


def _decoded(code: CodeType) -> Iterator[InstructionStep]:
    for step in dis.get_instructions(code):
        name = step.opname
        if name in _IDLE:
            continue
        if "FAST" in name and isinstance(step.argval, tuple):
            first = "STORE_FAST" if name.startswith("STORE") else "LOAD_FAST"
            other = "STORE_FAST" if name.count("STORE") == 2 else "LOAD_FAST"
            for part, value in zip((first, other), step.argval, strict=True):
                yield InstructionStep(step.offset, part, None, value, value, None)
            continue
        name = "LOAD_FAST" if name in _LOADS else name
        yield InstructionStep(
            step.offset, name, step.arg, step.argval, step.argrepr, step.positions
        )


# Which local variables of some code can still be read from an instruction on.
#
# A variable that is written before it is next read holds nothing that matters: what an index of the
# round before was, for example.


# Code by these names may read variables that no instruction of it names.
LOOKS_AT_VARIABLES = frozenset(
    {
        "breakpoint", "currentframe", "dir", "eval", "exec", "f_locals", "getouterframes",
        "locals", "set_trace", "vars", "_getframe",
    }
)  # fmt: skip
_READS, _WRITES = "read", "write"
# What instructions do, by the parts of their names, to one variable each.
_DOES = {"LOAD": _READS, "DELETE": _READS, "STORE": _WRITES}


def read_later(code: CodeType, offset: int) -> int:
    """Return which variables of a frame may still be read from an instruction on.

    Args:
        code: the code.
        offset: the current instruction, in bytes.

    Returns:
        One bit for each slot of the frame.
    """
    alive = _live_variables(code).get(offset)
    return -1 if alive is None else alive | -1 << len(code.co_varnames)


@functools.lru_cache(maxsize=4096)
def _live_variables(code: CodeType) -> dict[int, int]:
    """Return the variables that are alive at each instruction, one bit for each.

    It is empty where that cannot be said.
    """
    if not LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return {}
    steps = list(dis.get_instructions(code))
    position = {step.offset: number for number, step in enumerate(steps)}
    shared = _variable_bits(code, code.co_cellvars)  # functions inside may read these
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
    """Return the effects of an instruction on variables, in order; None if unknown."""
    if "FAST" not in step.opname:
        return []
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if not {*code.co_varnames, *code.co_cellvars, *code.co_freevars}.issuperset(named):
        return None
    does = [_DOES[part] for part in step.opname.split("_") if part in _DOES]
    if "CLEAR" in step.opname or len(does) != len(named):
        return [(_READS, _variable_bits(code, named))]  # whatever else it does
    return [(how, _variable_bits(code, (name,))) for how, name in zip(does, named, strict=True)]


def _variable_bits(code: CodeType, names: tuple[str, ...]) -> int:
    return sum(1 << k for k, name in enumerate(code.co_varnames) if name in names)


# Counters of `while` loops: variables that each round adds a constant to.

_found: dict[int, tuple[CodeType, list[tuple[int, int, frozenset[str]]]]] = {}


def counters_at(code: CodeType, offset: int) -> frozenset[str]:
    """Return the local variables that count the rounds of a `while` loop around an instruction."""
    cached = _found.get(id(code))
    if cached is None:
        cached = _found[id(code)] = (code, _loops(code))
    return frozenset().union(*(names for begin, end, names in cached[1] if begin <= offset <= end))


def _loops(code: CodeType) -> list[tuple[int, int, frozenset[str]]]:
    """Return the loops of code, with their first and last instruction and their counters."""
    if not LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return []  # it could see that `assign` was there
    steps = single_steps(code)
    names = {step.offset: step.name for step in steps}
    counted: list[tuple[int, str]] = []
    for first, second, third, last in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        constant = constant_of(code, second.name, second.argument or 0)
        if (
            (first.name, third.name, last.name) == ("LOAD_FAST", "BINARY_OP", "STORE_FAST")
            and third.shown in ("+", "-", "+=", "-=")
            and type(constant) is int
            and first.value == last.value
        ):
            counted.append((last.offset, first.value))
    loops = []
    for step in steps:
        if "JUMP_BACKWARD" in step.name and names.get(step.value) != "FOR_ITER":
            inside = frozenset(
                name for offset, name in counted if step.value <= offset <= step.offset
            )
            loops.append((step.value, step.offset, inside))
    return loops


def local_in(frame: FrameType, name: str) -> Any:
    """Return the value of a local variable of a running frame; None if it has none."""
    variables = frame.f_locals
    value = variables.get(name)
    if _COPIES:
        variables.clear()
    return value


def assign(frame: FrameType, name: str, value: Any) -> None:
    """Give a local variable of a running frame another value.

    Args:
        frame: the frame, of a function.
        name: the variable, which is neither free nor a cell.
        value: what it is to hold.
    """
    variables = frame.f_locals
    variables[name] = value
    # Before 3.13, writing to the copy changes nothing until this function of CPython's C API puts
    # the copy back; debuggers do the same. 3.13 removed the copy, and the function does nothing.
    if _COPIES:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()


# Before Python 3.13, `f_locals` is a copy, which would keep the values alive.
_COPIES = sys.version_info < (3, 13)
