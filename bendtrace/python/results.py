"""Exchanging the results of instructions, and the operands that they are about to take.

While C asks an object for its number, as `int(n)` does, the instruction that called it has no
result yet. So the frame reports its next instruction: then the result is on top of the frame's
stack, and another object takes its place.

CPython 3.11 reports instructions to the interpreter's trace function. One of ctypes, unlike one of
`sys.settrace`, leaves `f_locals` alone. From 3.12 on, `sys.monitoring` reports those of single code
objects. That all of this works as expected is tried once (`can_exchange`).

While a watch is on, frames report each of their instructions before it is carried out. The operands
are on the frame's value stack then, and another object may take the place of one: the instruction
then works on that object, whose methods are called with the frame that the instruction belongs to.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bendtrace.python import stacks
from bendtrace.python.stacks import (
    address_of_result,
    end_of_instruction,
    frame_layout,
    monitoring_tool,
    object_at,
    put_on_stack,
)


class _PendingExchange(NamedTuple):
    """A result that is going to be exchanged."""

    frame: FrameType  # the frame that receives it
    offset: int  # the instruction that gives it
    after: int  # the instruction behind that
    address: int  # where it will be; 0 if nothing takes its place
    value: Any  # what takes its place
    ended: Callable[[bool], object]  # is called then, with whether the instruction gave a result


class _FrameWatch(NamedTuple):
    """The functions that are called for the frames of a thread (see `watch`)."""

    starts: Callable[[FrameType], object]
    steps: Callable[[FrameType], object]
    fails: Callable[[], object]


def exchange(frame: FrameType, value: Any, ended: Callable[[bool], object]) -> bool:
    """Have a frame receive another result of the instruction that has called the running code.

    `ended` is called when the instruction has ended, with whether it gave a result. Return whether
    the frame will receive it: not if the thread awaits another result, or something else traces it.
    """
    places = frame_layout()
    address = None if places is None else address_of_result(frame, places)
    return address is not None and _await(frame, address, value, ended)


def call_after(frame: FrameType, ended: Callable[[bool], object]) -> bool:
    """Have a function called when the instruction of a frame has ended, as `exchange` does."""
    return _await(frame, 0, None, ended)


def _await(frame: FrameType, address: int, value: Any, ended: Callable[[bool], object]) -> bool:
    end_exchange()
    if _own.pending is not None or not _own.reporter.begin():
        return False
    after = end_of_instruction(frame.f_code, frame.f_lasti)
    _own.pending = _PendingExchange(frame, frame.f_lasti, after, address, value, ended)
    _own.reporter.report(frame)
    return True


def watch(
    starts: Callable[[FrameType], object],
    steps: Callable[[FrameType], object],
    fails: Callable[[], object],
) -> bool:
    """Have functions called for the frames of this thread, until `watch_no_more`.

    `starts` receives each frame that begins; `steps` a frame before each of its instructions, if
    `report_steps` was called for it. `fails` is called if one of the two has raised an error, as
    where a signal interrupts it: the error is raised in the code that is reported. Return whether
    they are called: not if something else traces the thread.
    """
    end_exchange()
    if _own.watch is not None or _own.pending is not None or not _own.reporter.begin():
        return False
    _own.watch = _FrameWatch(starts, steps, fails)
    _own.reporter.watch()
    return True


def report_steps(frame: FrameType) -> None:
    """Report the instructions of a frame to the watch."""
    _own.reporter.report(frame)


def pause_watch() -> None:
    """Report nothing until `resume_watch`."""
    if _own.pending is None:
        _own.reporter.pause()


def resume_watch() -> None:
    """Go on reporting."""
    if _own.watch is not None:
        _own.reporter.resume()


def watch_no_more() -> None:
    """End what `watch` has begun."""
    _own.watch = None
    _own.reporter.end()
    if _own.pending is not None and _own.reporter.begin():
        _own.reporter.report(_own.pending.frame)


def is_awaited(frame: FrameType) -> bool:
    """Return whether the result of the instruction that a frame is at will be exchanged."""
    one = _own.pending
    return one is not None and one.frame is frame and one.offset == frame.f_lasti


def end_exchange() -> None:
    """Give up the result that is awaited, if its instruction has raised an error."""
    one = _own.pending
    if one is None:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not one.frame:
        frame = frame.f_back
    if frame is None or not is_awaited(frame):
        _finish(one, False)


def _finish(one: _PendingExchange, gave: bool) -> None:
    _own.pending = None
    if _own.watch is None:
        _own.reporter.end(one.frame)
    if gave and one.address:
        put_on_stack(one.address, one.value)
    one.ended(gave)


def _come_to_instruction(frame: FrameType, gave: bool) -> None:
    """Exchange the last result of a frame, if it gave one, and have the watch look at the next."""
    one = _own.pending
    if one is not None and frame is one.frame:
        _finish(one, gave)
    if _own.watch is not None:  # it sees what the next instruction really receives
        _own.watch.steps(frame)


def _give_up() -> None:
    """End what is watched and awaited, because of an error."""
    pending, watch = _own.pending, _own.watch
    watch_no_more()
    if pending is not None:
        _finish(pending, False)
    if watch is not None:
        watch.fails()


class _TraceFunction:
    """Reports what a thread executes, by the interpreter's trace function (CPython 3.11)."""

    _STARTS, _RAISES, _STEPS = 0, 1, 7  # PyTrace_CALL, PyTrace_EXCEPTION, PyTrace_OPCODE

    def __init__(self) -> None:
        api: Any = ctypes.pythonapi
        # `PYFUNCTYPE` keeps the GIL during the call, which these need; `CFUNCTYPE` drops it.
        self._set: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            ("PyEval_SetTrace", api)
        )
        self._set_error: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
            ("PyThreadState_SetAsyncExc", api)
        )
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        )
        self._kept = kind(self._handle)  # as long as C may call it
        self._callback = ctypes.cast(self._kept, ctypes.c_void_p)

    def begin(self) -> bool:
        return _own.watch is not None or sys.gettrace() is None

    def report(self, frame: FrameType) -> None:
        frame.f_trace_opcodes = True
        if _own.pending is not None:
            self.resume()

    def watch(self) -> None:
        self.resume()

    def pause(self) -> None:
        self._set(None, None)

    def resume(self) -> None:
        self._set(self._callback, None)

    def end(self, frame: FrameType | None = None) -> None:
        """Report no frame any more; or none but those of a watch, of which this is none."""
        self.pause()
        if frame is not None:
            frame.f_trace_opcodes = False
            return
        frame = sys._getframe(1)
        while frame is not None:
            frame.f_trace_opcodes = False
            frame = frame.f_back

    def _handle(self, _: object, address: int, what: int, __: object) -> int:
        try:
            if what == self._STEPS:
                frame = object_at(address)
                if frame.f_trace_opcodes:
                    _come_to_instruction(frame, True)
            elif what == self._STARTS:
                if _own.watch is not None:
                    _own.watch.starts(object_at(address))
            elif what == self._RAISES:
                if _own.pending is not None and address == id(_own.pending.frame):
                    _finish(_own.pending, False)
        except BaseException as error:
            _give_up()
            # Of Ctrl-C, or of the handler of an alarm. ctypes would print it and go on, so it is
            # set as an asynchronous one of the thread; such a one is a class, and is raised at the
            # thread's next call or jump. That must not be here: so what sets it is no call, but the
            # look-up of an item that is missing.
            raised = error
            members = {"__new__": lambda kind, *given: raised}
            kind = type(type(error).__name__, (type(error),), members)
            setting: defaultdict[int, int] = defaultdict(
                functools.partial(self._set_error, threading.get_ident(), kind)
            )
            setting[0]
        return 0


class _Monitor:
    """Reports what a thread executes, by `sys.monitoring` (CPython 3.12 and newer)."""

    def __init__(self) -> None:
        self._tool: int | None = None
        self._thread = threading.get_ident()
        self._codes: dict[int, CodeType] = {}  # by identity: equal code is reported apart
        self._is_paused = False

    def begin(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        if self._tool is None:
            self._tool = monitoring_tool()
            if self._tool is not None:
                events = monitoring.events
                monitoring.register_callback(self._tool, events.INSTRUCTION, self._step)
                for event in (events.PY_START, events.PY_RESUME):
                    monitoring.register_callback(self._tool, event, self._start)
        return self._tool is not None

    def report(self, frame: FrameType) -> None:
        code = frame.f_code
        if id(code) not in self._codes:
            self._codes[id(code)] = code
            self._set_local(code, sys.monitoring.events.INSTRUCTION)  # type: ignore[attr-defined]

    def _set_local(self, code: CodeType, events: int) -> None:
        sys.monitoring.set_local_events(self._tool, code, events)  # type: ignore[attr-defined]

    def watch(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._is_paused = False
        events = monitoring.events
        monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def end(self, frame: FrameType | None = None) -> None:
        if self._tool is None:
            return
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        for code in self._codes.values():
            self._set_local(code, 0)
        self._codes.clear()
        if frame is None:
            monitoring.set_events(self._tool, 0)
        monitoring.free_tool_id(self._tool)
        self._tool = None

    def _start(self, code: CodeType, offset: int) -> None:
        if _own.watch is not None and self._reports():
            try:
                _own.watch.starts(sys._getframe(1))
            except BaseException:
                _give_up()
                raise

    def _step(self, code: CodeType, offset: int) -> None:
        if self._reports():
            one = _own.pending
            gave = one is not None and offset == one.after
            try:
                _come_to_instruction(sys._getframe(1), gave)
            except BaseException:
                _give_up()
                raise

    def _reports(self) -> bool:
        # `sys.monitoring` reports what all threads do.
        return threading.get_ident() == self._thread and (
            not self._is_paused or _own.pending is not None
        )


class _Thread(threading.local):
    """The watch of a thread, and the result that it is going to exchange."""

    def __init__(self) -> None:
        self.watch: _FrameWatch | None = None
        self.pending: _PendingExchange | None = None
        self.reporter = _Monitor() if sys.version_info >= (3, 12) else _TraceFunction()


_own = _Thread()


class _ProbeNumber:
    """Has its number exchanged."""

    def __init__(self, other: object) -> None:
        self.other = other
        self.ended: list[bool] = []

    def __int__(self) -> int:
        exchange(sys._getframe(1), self.other, self.ended.append)
        return 12345

    def __float__(self) -> float:
        exchange(sys._getframe(1), self.other, self.ended.append)
        raise ValueError

    __index__ = __int__


@functools.lru_cache(maxsize=1)
def can_exchange() -> bool:
    """Return whether results can be exchanged in this Python."""
    if frame_layout() is None or not _own.reporter.begin():
        return False
    try:
        return _exchanges()
    finally:
        if _own.watch is None:
            _own.reporter.end()


def _exchanges() -> bool:
    other = object()
    number: Any = _ProbeNumber(other)
    count = sys.getrefcount(other)
    found = [int(number), *[int(number)], 1]
    try:
        int(number) + 1  # fails if the object is there before the addition
    except TypeError:
        found.append(len(number.ended))
    try:
        float(number)
    except ValueError:
        found.append(len(number.ended))
    fits = found[0] is other and found[1] is other and found[2:] == [1, 3, 4]
    found.clear()
    ended = [True] * 3 + [False]
    return fits and sys.getrefcount(other) == count and number.ended == ended


# Operands
#
# CPython 3.11 to 3.14 differ in their instructions. Here they have the names of 3.11, and one name
# for what all of them do. Of an instruction that is in no list, everything on the stack counts as
# an operand.


class Instruction(NamedTuple):
    """An instruction that takes values from the stack."""

    name: str
    value: Any  # its argument
    text: str  # its argument, as `dis` shows it; of a comparison whose truth is asked, `bool(<)`
    first: int  # where its operands begin, in words from the first variable of the frame
    size: int  # how many there are


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
    """Return which operand of a call is called; 0 or None stands for an empty word."""
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
    """Replace the members of a set by equal objects, so that it keeps its order.

    A set that is filled again may have another order: what falls into one place of its table comes
    in the order in which it was put in. The others, in the set's order, are equal and have equal
    hashes. Return whether it could be done, with this Python.
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
    return (3, 11) <= sys.version_info < (3, 15) and can_exchange()
