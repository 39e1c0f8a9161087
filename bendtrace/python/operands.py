"""Looking at the operands of an instruction before it is carried out, and exchanging them.

While a watch is on (`results.py`), frames report each of their instructions. The operands are on
the frame's value stack then, and another object may take the place of one: the instruction then
works on that object, whose methods are called with the frame that the instruction belongs to.

For CPython 3.11, where what is called is on the stack below its arguments.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
import sysconfig
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bendtrace.python import stacks


class Instruction(NamedTuple):
    """An instruction that takes values from the stack.

    Attributes:
        name: its name.
        value: its argument.
        text: its argument, as `dis` shows it.
        first: where its operands begin, in words from the first variable of the frame.
        size: how many there are.
    """

    name: str
    value: Any
    text: str
    first: int
    size: int


@functools.lru_cache(maxsize=4096)
def instructions(code: CodeType) -> dict[int, Instruction]:
    """Return the instructions of code that take values from the stack, by their offsets."""
    found: dict[int, Instruction] = {}
    depths = stacks.stack_depths(code)
    variables = stacks.variables(code)
    begins: list[int] = []  # with what extends the argument, after which nothing is reported
    for step in dis.get_instructions(code):
        name, argument = step.opname, step.arg or 0
        begins.append(step.offset)
        if name == "EXTENDED_ARG":
            continue
        offsets, begins = begins, []
        if step.offset not in depths or name in _TAKES_NOTHING:
            continue
        # A call has two words below its arguments: NULL and the function, or a method and its
        # object. CPython 3.11 carries it out as PRECALL and CALL, with the same operands for both,
        # of which the first is enough.
        if name == "PRECALL":
            count = argument + 2
        elif name == "CALL_FUNCTION_EX":
            count = 3 + (argument & 1)
        elif name in _TAKES_AS_MANY:
            count = argument
        elif name == "BUILD_MAP":
            count = 2 * argument
        else:
            count = _COUNTS.get(name, 1)
        depth = depths[step.offset]
        count = min(count, depth)
        instruction = Instruction(name, step.argval, step.argrepr, variables + depth - count, count)
        found.update(dict.fromkeys(offsets, instruction))
    return found


def addresses(frame: FrameType, instruction: Instruction, places: stacks.FrameLayout) -> list[int]:
    """Return where the operands of an instruction are in memory, from the lowest up."""
    first = stacks.word_at(id(frame) + places.inner) + places.slots
    return [first + _WORD * (instruction.first + k) for k in range(instruction.size)]


def c_function_called_by(frame: FrameType) -> Any:
    """Return the function that a frame's current instruction calls, if C carries it out."""
    places = stacks.frame_layout()
    address = None if places is None else stacks.address_of_result(frame, places)
    if address is None:
        return None
    # A method has its object above it; another function has NULL below it, which reads as None.
    first, second = (object_at(stacks.word_at(address + _WORD * k)) for k in range(2))
    return second if first is None else first


def object_at(word: int) -> Any:
    """Return the object that a word of the stack points to; None if there is none."""
    return ctypes.cast(word, ctypes.py_object).value if word else None


def put_on_stack(address: int, value: Any) -> None:
    """Let an object take the place of another one on the stack."""
    before = stacks.word_at(address)
    # The old object is released last: that may run a `__del__`, which has to find a whole stack.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    ctypes.c_size_t.from_address(address).value = id(value)
    if before:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(before, ctypes.py_object))


def exchange_members(members: AbstractSet[Any], others: Sequence[Any]) -> bool:
    """Put equal objects in the place of a set's members, so that it is gone through in its order.

    A set that is filled again may have another order: what falls into one place of its table
    comes in the order in which it was put in.

    Args:
        members: a set or frozenset.
        others: what takes the place of each, in the set's order; equal, with equal hashes.

    Returns:
        Whether it could be done, with this Python.
    """
    if not _has_table():
        return False
    found = {id(old): new for old, new in zip(members, others, strict=True) if old is not new}
    for address in _set_entry_addresses(members):
        if (new := found.get(stacks.word_at(address))) is not None:
            put_on_stack(address, new)
    return True


def _set_entry_addresses(members: AbstractSet[Any]) -> range:
    """Return the addresses of what is in a set: its count, a mask and a table follow its type."""
    # `fill`, `used`, `mask` and `table` of CPython's set; an entry is an object and its hash.
    head = id(members) + object.__basicsize__
    mask, first = stacks.word_at(head + 2 * _WORD), stacks.word_at(head + 3 * _WORD)
    return range(first, first + 2 * _WORD * (mask + 1), 2 * _WORD)


@functools.lru_cache(maxsize=1)
def _has_table() -> bool:
    """Return whether sets lie in memory as in CPython 3.11 to 3.14, with a lock for all threads."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    # A table of up to eight entries is inside of the set, a longer one apart from it.
    objects = [object() for _ in range(20)]
    for some in ({*objects}, frozenset(objects[:3]), {objects[0]}):
        head = id(some) + object.__basicsize__
        counts = stacks.word_at(head), stacks.word_at(head + _WORD)
        mask = stacks.word_at(head + 2 * _WORD)
        if counts != (len(some), len(some)) or not len(some) <= mask < 1 << 12 or mask & mask + 1:
            return False
        words = [
            word for address in _set_entry_addresses(some) if (word := stacks.word_at(address))
        ]
        if words != [*map(id, some)]:
            return False
    return True


_WORD = ctypes.sizeof(ctypes.c_void_p)
_COUNTS = {
    "BINARY_OP": 2, "BINARY_SUBSCR": 2, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "COMPARE_OP": 2,
    "CONTAINS_OP": 2, "STORE_ATTR": 2, "FORMAT_VALUE": 2, "MAP_ADD": 2, "MATCH_KEYS": 2,
    "MATCH_CLASS": 3, "BEFORE_WITH": 1, "IMPORT_NAME": 2, "WITH_EXCEPT_START": 3,
}  # fmt: skip
_TAKES_AS_MANY = frozenset({"BUILD_SET", "BUILD_STRING", "RAISE_VARARGS"})
# What moves values around, or keeps them where they can be read.
_TAKES_NOTHING = frozenset(
    {
        "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SLICE", "BUILD_TUPLE", "CACHE", "CALL",
        "CHECK_EXC_MATCH", "COPY", "COPY_FREE_VARS", "DELETE_DEREF", "DELETE_FAST", "FOR_ITER",
        "IS_OP", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD",
        "KW_NAMES", "LIST_APPEND", "LIST_TO_TUPLE", "LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS",
        "LOAD_CLASSDEREF", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL",
        "LOAD_NAME", "MAKE_CELL", "MAKE_FUNCTION", "NOP", "POP_EXCEPT",
        "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NONE",
        "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_TOP", "PUSH_EXC_INFO", "PUSH_NULL", "RERAISE",
        "RESUME", "RETURN_GENERATOR", "STORE_DEREF", "STORE_FAST", "SWAP",
    }
)  # fmt: skip


def can_exchange_operands() -> bool:
    """Return whether this is a Python whose stack is laid out as this file expects."""
    return sys.version_info[:2] == (3, 11) and stacks.frame_layout() is not None
