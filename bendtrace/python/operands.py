"""Looking at the operands of an instruction before it is carried out, and exchanging them.

While a watch is on (`results.py`), frames report each of their instructions. The operands are on
the frame's value stack then, and another object may take the place of one: the instruction then
works on that object, whose methods are called with the frame that the instruction belongs to.

CPython 3.11 to 3.14 differ in their instructions. Here they have the names of 3.11, and one name
for what all of them do. Of an instruction that is in no list, everything on the stack counts as an
operand.
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
        text: its argument, as `dis` shows it; of a comparison whose truth is asked, `bool(<)`.
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
        begins.append(step.offset)
        if step.opname == "EXTENDED_ARG":
            continue
        # CPython 3.11 reports an instruction at what extends its argument, later ones at both.
        offsets, begins = begins if _AT_EXTENSION else [step.offset], []
        name = _common_name(step)
        if step.offset not in depths or name in _TAKES_NOTHING:
            continue
        depth = depths[step.offset]
        count = min(_operand_count(name, step.arg or 0, depth), depth)
        instruction = Instruction(name, step.argval, step.argrepr, variables + depth - count, count)
        found.update(dict.fromkeys(offsets, instruction))
    return found


def _common_name(step: dis.Instruction) -> str:
    """Return the name of what an instruction does."""
    name, argument = step.opname, step.arg or 0
    if name == "CALL" and _HAS_PRECALL:
        return "SECOND_CALL"
    if name == "LOAD_ATTR" and _HAS_PAIRS and argument & 1:
        return "LOAD_METHOD"
    if name == "CALL_INTRINSIC_1":
        return step.argrepr.removeprefix("INTRINSIC_")
    if name == "BINARY_OP" and step.argrepr == "[]":
        return "BINARY_SUBSCR"
    if name.startswith("POP_JUMP_"):
        return name.replace("_FORWARD", "").replace("_BACKWARD", "")
    return _NAMES.get(name, name)


def _operand_count(name: str, argument: int, depth: int) -> int:
    # A call has two words below its arguments: a function and NULL, or a method and its object.
    if name == "CALL":
        return argument + 2
    if name == "CALL_KW":
        return argument + 3
    if name == "CALL_FUNCTION_EX":
        return 4 if _HAS_NAMED else 3 + (argument & 1)
    if name in _TAKES_AS_MANY:
        return argument
    if name == "BUILD_MAP":
        return 2 * argument
    return _COUNTS.get(name, 1 if name in _TAKES_ONE else depth)


def callee_place(words: Sequence[Any]) -> int:
    """Return which operand of a call is called.

    Args:
        words: the operands of a call, in which 0 or None stands for an empty word.
    """
    # The truth of an object is not asked: that may run code of the model.
    first = words[0]
    is_empty = first is None or (type(first) is int and first == 0)
    return 0 if _CALLEE_FIRST or not is_empty else 1


def arguments(instruction: Instruction, values: Sequence[Any]) -> list[Any] | None:
    """Return what a call passes on; None if that cannot be seen."""
    if instruction.name == "CALL_FUNCTION_EX":
        given, named = values[2], (values[3] if len(values) > 3 else None) or {}
        if type(given) not in (tuple, list) or type(named) is not dict:
            return None
        return [*given, *named.values()]
    given = values[:-1] if instruction.name == "CALL_KW" else values
    place = callee_place(given)
    if place == 0 and given[1] is None:
        return [*given[2:]]
    return [*given[place + 1 :]]


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
    # A method has its object above it; another function has NULL below it, or from 3.13 on above
    # it, which reads as None.
    first, second = (stacks.object_at(stacks.word_at(address + _WORD * k)) for k in range(2))
    return second if first is None else first


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
            stacks.put_on_stack(address, new)
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
_AT_EXTENSION = _HAS_PRECALL = sys.version_info < (3, 12)
_HAS_PAIRS = not _HAS_PRECALL  # LOAD_ATTR loads methods as well
_CALLEE_FIRST = sys.version_info >= (3, 13)
_HAS_NAMED = sys.version_info >= (3, 14)  # CALL_FUNCTION_EX takes NULL for named arguments
# CPython 3.11 carries a call out as PRECALL and CALL, with the same operands for both, of which the
# first is enough.
_NAMES = {
    "PRECALL": "CALL", "FORMAT_SIMPLE": "FORMAT_VALUE", "CONVERT_VALUE": "FORMAT_VALUE",
    "FORMAT_WITH_SPEC": "FORMAT_WITH",
}  # fmt: skip
_COUNTS = {
    "BINARY_OP": 2, "BINARY_SUBSCR": 2, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "COMPARE_OP": 2,
    "CONTAINS_OP": 2, "STORE_ATTR": 2, "FORMAT_WITH": 2, "MAP_ADD": 2, "MATCH_KEYS": 2,
    "MATCH_CLASS": 3, "IMPORT_NAME": 2, "WITH_EXCEPT_START": 3, "BINARY_SLICE": 3,
    "STORE_SLICE": 4, "CALL_INTRINSIC_2": 2, "CHECK_EG_MATCH": 2, "PREP_RERAISE_STAR": 2,
    "END_ASYNC_FOR": 2, "LOAD_SUPER_ATTR": 3, "BUILD_TEMPLATE": 2, "CLEANUP_THROW": 3,
    "FORMAT_VALUE": 1 if _CALLEE_FIRST else 2, "BUILD_INTERPOLATION": 3,
}  # fmt: skip
_TAKES_AS_MANY = frozenset({"BUILD_SET", "BUILD_STRING", "RAISE_VARARGS"})
_TAKES_ONE = frozenset(
    {
        "ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "BEFORE_WITH", "DELETE_ATTR", "DICT_MERGE",
        "DICT_UPDATE", "GET_AITER", "GET_ANEXT", "GET_AWAITABLE", "GET_ITER", "GET_LEN",
        "GET_YIELD_FROM_ITER", "IMPORT_FROM", "IMPORT_STAR", "JUMP_IF_FALSE_OR_POP",
        "JUMP_IF_TRUE_OR_POP", "LIST_EXTEND", "LOAD_ATTR", "LOAD_FROM_DICT_OR_DEREF",
        "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_METHOD", "LOAD_SPECIAL", "MATCH_MAPPING",
        "MATCH_SEQUENCE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "PRINT", "PRINT_EXPR",
        "RETURN_VALUE", "SEND", "SET_ADD", "SET_UPDATE", "STOPITERATION_ERROR", "STORE_GLOBAL",
        "STORE_NAME", "SUBSCRIPT_GENERIC", "TO_BOOL", "TYPEALIAS", "TYPEVAR", "TYPEVARTUPLE",
        "PARAMSPEC", "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_POSITIVE", "UNPACK_EX",
        "UNPACK_SEQUENCE", "YIELD_VALUE",
    }
)  # fmt: skip
# What moves values around, or keeps them where they can be read.
_TAKES_NOTHING = frozenset(
    {
        "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SLICE", "BUILD_TUPLE", "CACHE",
        "CHECK_EXC_MATCH", "COPY", "COPY_FREE_VARS", "DELETE_DEREF", "DELETE_FAST",
        "DELETE_GLOBAL", "DELETE_NAME", "END_FOR", "END_SEND", "EXIT_INIT_CHECK", "FOR_ITER",
        "INTERPRETER_EXIT", "IS_OP", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD",
        "KW_NAMES", "LIST_APPEND", "LIST_TO_TUPLE", "LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS",
        "LOAD_CLASSDEREF", "LOAD_CLOSURE", "LOAD_COMMON_CONSTANT", "LOAD_CONST", "LOAD_DEREF",
        "LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_GLOBAL", "LOAD_LOCALS", "LOAD_NAME",
        "LOAD_SMALL_INT", "MAKE_CELL", "MAKE_FUNCTION", "NOP", "NOT_TAKEN", "POP_EXCEPT",
        "POP_ITER", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_TOP", "PUSH_EXC_INFO",
        "PUSH_NULL", "RERAISE", "RESERVED", "RESUME", "RETURN_CONST", "RETURN_GENERATOR",
        "SECOND_CALL", "SETUP_ANNOTATIONS", "SET_FUNCTION_ATTRIBUTE", "STORE_DEREF", "STORE_FAST",
        "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "SWAP",
    }
)  # fmt: skip


def can_exchange_operands() -> bool:
    """Return whether this is a Python whose instructions and stack this file knows."""
    return (3, 11) <= sys.version_info < (3, 15) and stacks.frame_layout() is not None
