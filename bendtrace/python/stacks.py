"""The content of running frames: variables, cells and value stack, read from CPython's memory.

`frame.f_locals` does not show the iterators of the surrounding `for` loops, waiting operands, or
the exits of `with`, and before 3.13 it keeps its values alive. So slots are read from memory. Their
position is not derived from a version number: `frame_layout` searches for it in frames with known
content, and if it finds nothing, nothing is read.

In CPython 3.11 to 3.14, a frame object points to an inner frame, which has a pointer to the
previous one and ends with its slots: local variables, cells, then the stack. Since 3.14 the lowest
two bits of a slot are tags.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import inspect
import sys
import traceback
import weakref
from collections.abc import Iterator
from types import CellType, CodeType, FrameType
from typing import Any, NamedTuple

EMPTY = object()  # a slot without a value

_WORD = ctypes.sizeof(ctypes.c_void_p)
_MARKS = 3  # bits of a pointer that say how it is counted
_NOT_AN_OBJECT = 3  # with both of them set, it is a number


class FrameLayout(NamedTuple):
    """The positions of fields, in bytes."""

    inner: int  # the pointer to the inner frame, in a frame object
    slots: int  # the first slot, in an inner frame
    previous: int  # the pointer to the previous frame
    entry: int  # a byte that is set if C has called a function; -1 if `previous` shows this
    # True if a comparison that asks for the truth of its result has released its operands by then,
    # and left the pointers there.
    leaves: bool = False


class InterpreterNumber(NamedTuple):
    """A slot that holds a number of the interpreter itself: the progress of a loop (3.15)."""

    value: int


class _Instruction(NamedTuple):
    """An instruction, and how deep the stack is around it."""

    name: str  # of the instruction
    base: int  # how much is on the stack below what the instruction takes
    depth: int  # how much is on it when the instruction begins
    asks: bool = False  # whether it is a comparison that asks for the truth of its result
    # True if it is a call that may make a tuple of its arguments first, and release what they were
    # given as.
    converts: bool = False


class Stack(NamedTuple):
    """The content of a frame."""

    code: CodeType
    offset: int  # its position in the code
    slots: list[Any]  # local variables and cells, `EMPTY` for unset ones
    below: list[Any]  # the values on the stack below the operands of the current instruction
    # These operands, if C is executing the instruction; None if its callee has taken them.
    operands: list[Any] | None
    name: str  # name of the instruction


def read_frame(
    frame: FrameType,
    callee: FrameType | None,
    places: FrameLayout,
    compared: frozenset[int] = frozenset(),
) -> Stack | None:
    """Read the content of a running frame of this thread; None if it cannot be determined.

    `callee` is the frame that it has called; None for the running one itself. If it asks for the
    truth of a comparison, `compared` are the identities of what was compared.
    """
    code, offset = frame.f_code, frame.f_lasti
    instruction = _instructions(code).get(offset)
    if instruction is None or not code.co_flags & _OPTIMIZED:
        return None
    inner = word_at(id(frame) + places.inner)
    is_asked_by_c = callee is None or _is_entered_from_c(callee, inner, places)
    if callee is not None and is_asked_by_c:
        if _interrupts(callee, places):
            return None
        if callee.f_code.co_flags & _SUSPENDS:
            # The frame of a generator lies within the generator, which is on top of the stack while
            # `for` or `await` resumes it.
            iterated = word_at(
                inner + places.slots + _WORD * (variables(code) + instruction.base - 1)
            )
            own = word_at(id(callee) + places.inner)
            if instruction.name not in _RESUMES or not 0 < own - (iterated & ~_MARKS) < _LONGEST:
                return None  # it may be closed because it is freed
    first = inner + places.slots
    count = variables(code)
    slots = [_object_at(first + _WORD * k) for k in range(count)]
    first += _WORD * count
    below = [_object_at(first + _WORD * k) for k in range(instruction.base)]
    operands: list[Any] | None = None
    if is_asked_by_c and instruction.asks and places.leaves:
        if _pointers(first, instruction) != compared:
            return None  # they may be gone
        operands = []
    elif is_asked_by_c and instruction.converts and not _lasts(first, instruction, code, slots):
        return None
    elif is_asked_by_c:
        operands = [
            _object_at(first + _WORD * k) for k in range(instruction.base, instruction.depth)
        ]
    return Stack(code, offset, slots, below, operands, instruction.name)


def suspended_stack(frame: FrameType, places: FrameLayout) -> Stack | None:
    """Read the frame of a generator that is suspended at a `yield`."""
    code = frame.f_code
    instruction = _instructions(code).get(frame.f_lasti)
    if instruction is None or instruction.name not in _WAITS or not instruction.depth:
        return None
    first = word_at(id(frame) + places.inner) + places.slots
    count = variables(code)
    slots = [_object_at(first + _WORD * k) for k in range(count + instruction.depth - 1)]
    below = slots[count:]
    return Stack(code, frame.f_lasti, slots[:count], below, None, instruction.name)


def address_of_result(frame: FrameType, places: FrameLayout) -> int | None:
    """Return where the result of a frame's current call or operator will be, in memory."""
    instruction = _instructions(frame.f_code).get(frame.f_lasti)
    if instruction is None or not frame.f_code.co_flags & _OPTIMIZED:
        return None
    if instruction.name not in _CALLS and instruction.name not in ("BINARY_OP", "BINARY_SUBSCR"):
        return None
    first = word_at(id(frame) + places.inner) + places.slots
    return first + _WORD * (variables(frame.f_code) + instruction.base)


def lowest_on_stack(frame: FrameType) -> Any:
    """Return what lies lowest on the stack of a running frame; None if it cannot be read."""
    address = _lowest(frame)
    return None if address is None else object_at(word_at(address))


def put_lowest_on_stack(frame: FrameType, value: Any) -> None:
    """Let an object take the place of what lies lowest on the stack of a running frame."""
    address = _lowest(frame)
    if address is not None:
        put_on_stack(address, value)


def _lowest(frame: FrameType) -> int | None:
    places = frame_layout()
    if places is None or not frame.f_code.co_flags & _OPTIMIZED:
        return None
    first = word_at(id(frame) + places.inner) + places.slots
    return first + _WORD * variables(frame.f_code)


def is_called_by_c(frame: FrameType, caller: FrameType, places: FrameLayout) -> bool:
    """Return whether C has called the code of a frame, not an instruction of the caller's."""
    return _is_entered_from_c(frame, word_at(id(caller) + places.inner), places)


def word_at(address: int) -> int:
    """Return the word of memory at an address."""
    return ctypes.c_size_t.from_address(address).value


def pointer_at(address: int) -> int:
    """Return the address of the object in a slot; 0 if there is none."""
    return word_at(address) & ~_MARKS


def object_at(word: int) -> Any:
    """Return the object that a word of the stack points to; None if there is none."""
    word &= ~_MARKS
    return ctypes.cast(word, ctypes.py_object).value if word else None


def put_on_stack(address: int, value: Any) -> None:
    """Let an object take the place of another one on the stack."""
    before = word_at(address)
    # The old object is released last: that may run a `__del__`, which has to find a whole stack.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    ctypes.c_size_t.from_address(address).value = id(value)
    if before and not before & _MARKS:  # tags (of 3.14) say that it is not counted
        ctypes.pythonapi.Py_DecRef(ctypes.cast(before, ctypes.py_object))


def instruction_name(code: CodeType, offset: int) -> str:
    """Return the name of an instruction, which is `BINARY_SUBSCR` for `x[y]` in each Python."""
    instruction = _instructions(code).get(offset)
    return "" if instruction is None else instruction.name


def end_of_instruction(code: CodeType, offset: int) -> int:
    """Return where the instruction behind another one begins."""
    raw = code.co_code
    offset += 2
    while offset < len(raw) and raw[offset] == _CACHE:
        offset += 2
    return offset


def _pointers(first: int, instruction: _Instruction) -> frozenset[int]:
    """Return the addresses of what an instruction takes, which need not be there any more."""
    taken = range(instruction.base, instruction.depth)
    return frozenset(word_at(first + _WORD * k) & ~_MARKS for k in taken)


def _lasts(first: int, instruction: _Instruction, code: CodeType, slots: list[Any]) -> bool:
    """Return whether a variable holds the arguments of `f(*x)`, for as long as the call lasts."""
    lasting = {*map(id, code.co_consts), *map(id, slots)}
    lasting.update(
        id(item) for cell in slots if type(cell) is CellType for item in gc.get_referents(cell)
    )
    return word_at(first + _WORD * (instruction.base + _ARGUMENTS)) & ~_MARKS in lasting


def _object_at(address: int) -> Any:
    word = word_at(address)
    if word & _MARKS == _NOT_AN_OBJECT:
        return InterpreterNumber(word >> 2)
    word &= ~_MARKS
    return ctypes.cast(word, ctypes.py_object).value if word else EMPTY


def variables(code: CodeType) -> int:
    """Return how many variables and cells a frame of code has below its stack."""
    cells = sum(name not in code.co_varnames for name in code.co_cellvars)
    return len(code.co_varnames) + cells + len(code.co_freevars)


def _is_entered_from_c(frame: FrameType, caller: int, places: FrameLayout) -> bool:
    """Return whether C has called a frame, not an instruction of the frame before."""
    inner = word_at(id(frame) + places.inner)
    # A frame of 3.11 has a byte for this. Since 3.12 the interpreter puts a frame of its own in
    # between when C calls it.
    if places.entry >= 0:
        return bool(ctypes.c_ubyte.from_address(inner + places.entry).value)
    return word_at(inner + places.previous) != caller


def _interrupts(frame: FrameType, places: FrameLayout) -> bool:
    """Return whether a frame runs because something was freed, or because of a signal.

    The instruction below it may then have freed its operands already. A weak reference that calls
    back gives itself, which is dead by then; handlers of signals are given a frame.
    """
    code = frame.f_code
    if code.co_name == "__del__":
        return True
    first = word_at(id(frame) + places.inner) + places.slots
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _VARARGS)
    for k in range(count):
        value = _object_at(first + _WORD * k)
        if type(value) is CellType:  # which `cell_contents` raises for if it is empty
            value = next(iter(gc.get_referents(value)), None)
        for item in (value, *value) if type(value) is tuple else (value,):
            if type(item) is FrameType:
                return True
            if issubclass(type(item), weakref.ref) and weakref.ref.__call__(item) is None:
                return True
    return False


def is_raised_by_signal(error: BaseException) -> bool:
    """Return whether the handler of a signal, such as an alarm, has raised an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = inspect.getargvalues(frame)
        given = [values.locals.get(name) for name in values.args]
        given += values.locals.get(values.varargs, ()) if values.varargs else ()
        # A handler receives the number of the signal, and the frame that it interrupts.
        if any(map(_is_signal, given, given[1:])):
            return True
    return False


def _is_signal(number: Any, frame: Any) -> bool:
    return isinstance(number, int) and type(frame) is FrameType


# How deep the stack is

_OPTIMIZED = 1  # CO_OPTIMIZED: variables are in slots, and not in a dict
_VARARGS, _SUSPENDS = 4, 0x20 | 0x80 | 0x200
_RESUMES = frozenset({"FOR_ITER", "SEND"})
_WAITS = frozenset({"YIELD_VALUE", "RESUME"})  # in 3.13 it is at the instruction after
_ENDS = frozenset(
    {
        "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD",
        "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_GENERATOR_END", "INTERPRETER_EXIT",
    }
)  # fmt: skip
_PUSHES_NONE = frozenset(
    {"STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "DELETE_ATTR", "STORE_SLICE"}
)
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
_CACHE = dis.opmap["CACHE"]
_ITEM = "BINARY_OP", "[]"
_ARGUMENTS = 2  # of `f(*x)`, above the function and an empty slot


def stack_depths(code: CodeType) -> dict[int, int]:
    """Return how deep the stack is before each instruction of code that can be reached."""
    steps = list(dis.get_instructions(code))
    return _depths(code, steps, {step.offset: number for number, step in enumerate(steps)})


def _depths(
    code: CodeType, steps: list[dis.Instruction], position: dict[int, int]
) -> dict[int, int]:
    depths: dict[int, int] = {}
    waiting = [(0, 0)]
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        waiting.append((entry.target, entry.depth + 1 + bool(entry.lasti)))
    while waiting:
        offset, depth = waiting.pop()
        while offset not in depths:
            depths[offset] = depth
            step = steps[position[offset]]
            if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                waiting.append((step.argval, depth + _stack_effect(step, True)))
            if step.opname in _ENDS or position[offset] + 1 == len(steps):
                break
            depth += _stack_effect(step, False)
            offset = steps[position[offset] + 1].offset
    return depths


@functools.lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> dict[int, _Instruction]:
    """Return each instruction of code by its offset, and by those of its caches."""
    steps = list(dis.get_instructions(code))
    position = {step.offset: number for number, step in enumerate(steps)}
    depths = _depths(code, steps, position)
    found: dict[int, _Instruction] = {}
    ends = [step.offset for step in steps[1:]] + [len(code.co_code)]
    for step, end in zip(steps, ends, strict=True):
        if step.offset not in depths:
            continue
        depth = depths[step.offset]
        base = depth + _stack_effect(step, False) - _pushes(step)
        if step.opname in _CALLS and step.opname != "CALL_FUNCTION_EX":
            depth = base + (step.arg or 0) + 2 + (step.opname == "CALL_KW")
        asks = step.opname == "COMPARE_OP" and step.argrepr.startswith("bool(")
        converts = step.opname == "CALL_FUNCTION_EX" and not _has_made_tuple(
            steps[: position[step.offset] + 1], depths, base + _ARGUMENTS + 1
        )
        # Since 3.14, an item is looked up by what was for operators of two numbers.
        name = "BINARY_SUBSCR" if (step.opname, step.argrepr) == _ITEM else step.opname
        instruction = _Instruction(name, base, depth, asks, converts)
        for offset in range(step.offset, end, 2):
            found[offset] = instruction
    return found


def _has_made_tuple(steps: list[dis.Instruction], depths: dict[int, int], depth: int) -> bool:
    """Return whether code itself made a tuple of the arguments, before the last of some steps."""
    for after in range(len(steps) - 1, 0, -1):  # back through what makes the dict of the others
        step, before = steps[after], steps[after - 1]
        here = depths.get(step.offset, depth + 1)  # code that is never reached
        if here < depth:
            return False
        is_made = before.opname in ("LIST_TO_TUPLE", "BUILD_TUPLE")
        is_made = is_made or before.argrepr == "INTRINSIC_LIST_TO_TUPLE"
        # A jump puts nothing on the stack: it is one inside of what makes the dict.
        if here == depth and "JUMP" not in before.opname:
            return is_made and not step.is_jump_target
    return False


def _stack_effect(step: dis.Instruction, jump: bool) -> int:
    if step.opname == "RETURN_GENERATOR":
        return 1  # what a generator is first sent, which `dis` counts from 3.13 on only
    argument = step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
    return dis.stack_effect(step.opcode, argument, jump=jump)


def _pushes(step: dis.Instruction) -> int:
    name, argument = step.opname, step.arg or 0
    if name in _PUSHES_NONE or name.startswith("POP_JUMP"):
        return 0
    if name in ("UNPACK_SEQUENCE",):
        return argument
    if name == "BEFORE_WITH":
        return 2
    if name == "LOAD_METHOD" or (
        name in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and argument & 1 and _PAIRS
    ):
        return 2
    return 1


_PAIRS = sys.version_info >= (3, 12)  # whether LOAD_ATTR loads methods as well


# Finding out where things are

_INNER = 24  # of the pointer in a frame object, in all of 3.11 to 3.14
_LOWEST = 1 << 16  # no address is below that
_LONGEST = 128


@functools.lru_cache(maxsize=1)
def frame_layout() -> FrameLayout | None:
    """Return the positions of fields in frames; None if they cannot be found."""
    if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
        return None
    places = _find_layout()
    if places is None:
        return None
    places = places._replace(leaves=_leaves_operands(places))
    return places if _layout_fits(places) else None


class _Look:
    """Looks at the frame that called it and at its own, byte by byte."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bytes]] = []

    def __call__(self, one: object, two: object) -> bool:
        frames = sys._getframe(), sys._getframe(1)
        own, caller = word_at(id(frames[0]) + _INNER), word_at(id(frames[1]) + _INNER)
        # Python puts the frames of a thread into large blocks of memory: addresses that are far
        # apart are taken to be none of frames.
        if min(own, caller) < _LOWEST or own % _WORD or abs(own - caller) > 1 << 20:
            return False
        self.seen.append((own, caller, ctypes.string_at(own, _LONGEST)))
        return True


def _find_layout() -> FrameLayout | None:
    """Search some frames for objects that are known to be in them."""
    # Code calls the function twice, and then C (`map`) does: what the two have in common is the
    # position of the slots; where they differ shows how a call by C is marked.
    look, one, two = _Look(), object(), object()
    step = look.__call__
    if not all((step(one, two), step(one, two), *map(step, (one, one), (two, two)))):
        return None
    words = [
        [int.from_bytes(raw[k : k + _WORD], sys.byteorder) for k in range(0, _LONGEST, _WORD)]
        for _, _, raw in look.seen
    ]
    addresses = [id(look), id(one), id(two)]
    slots = _common_offset([[word & ~_MARKS for word in some] for some in words], addresses)
    if slots is None:
        return None
    called, by_c = look.seen[:2], look.seen[2:]
    for k in range(slots // _WORD):
        if any(some[k] != caller for some, (_, caller, _) in zip(words[:2], called, strict=True)):
            continue
        if all(some[k] != caller for some, (_, caller, _) in zip(words[2:], by_c, strict=True)):
            return FrameLayout(_INNER, slots, k * _WORD, -1)
        for byte in range((k + 1) * _WORD, slots):
            marks = [raw[byte] for _, _, raw in look.seen]
            if marks == [0, 0, 1, 1]:
                return FrameLayout(_INNER, slots, k * _WORD, byte)
    return None


def _common_offset(rows: list[list[int]], addresses: list[int]) -> int | None:
    """Return where in all rows some words follow each other, in bytes."""
    for k in range(_LONGEST // _WORD - len(addresses)):
        if all(row[k : k + len(addresses)] == addresses for row in rows):
            return k * _WORD
    return None


class _FrameProbe:
    """Looks at the frame that led to it."""

    def __init__(self, places: FrameLayout) -> None:
        self.places = places
        self.seen: list[Stack | None] = []

    def __bool__(self) -> bool:
        self.seen.append(read_frame(sys._getframe(1), sys._getframe(), self.places))
        return True

    def step(self) -> bool:
        self.seen.append(read_frame(sys._getframe(1), sys._getframe(), self.places))
        return True


class _ComparisonProbe:
    """Looks at the rest of a comparison when the truth of its result is asked for."""

    def __init__(self, places: FrameLayout) -> None:
        self.places = places
        self.is_left = False

    def __gt__(self, other: object) -> _ComparisonProbe:
        return self

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        instruction = _instructions(frame.f_code)[frame.f_lasti]
        if instruction.asks:
            first = word_at(id(frame) + self.places.inner) + self.places.slots
            first += _WORD * variables(frame.f_code)
            self.is_left = _pointers(first, instruction) != {0}
        return True


def _leaves_operands(places: FrameLayout) -> bool:
    compared = _ComparisonProbe(places)
    return bool(compared.is_left if compared > places else False)


def _looping(asked: _FrameProbe, one: object) -> Iterator[bool]:
    for _ in (one,):
        yield asked.step()


def _layout_fits(places: FrameLayout) -> bool:
    """Return whether a layout finds the known objects in some frames."""
    asked, first, second = _FrameProbe(places), object(), object()
    made = []
    for one in (first,):
        for two, _ in zip((second,), (first,), strict=True):
            made = [one, two, 1 if asked else 0, asked.step()]
    made.append([*map(_FrameProbe.step, (asked,))])
    generator: Any = _looping(asked, first)
    next(generator)
    in_condition, in_call, in_map, in_generator = asked.seen
    for seen in in_generator, suspended_stack(generator.gi_frame, places):
        if seen is None or [*map(type, seen.below)] not in (
            [type(iter(()))],
            [tuple, InterpreterNumber],
        ):
            return False
    for seen, pushed in (in_condition, [first, second]), (in_call, [first, second, 1]):
        if seen is None or seen.code is not _layout_fits.__code__ or seen.slots[1] is not asked:
            return False
        below = [value for value in seen.below if value is not EMPTY]
        if below[-len(pushed) :] != pushed or seen.slots[2] is not first:
            return False
        # What the loops go through; as from 3.15 on a tuple has a number for its iterator.
        loops = [type(value) for value in below[: -len(pushed)]]
        if loops not in ([type(iter(())), zip], [tuple, InterpreterNumber, zip]):
            return False
    if in_condition is None or in_condition.operands != [asked]:
        return False
    if in_call is None or in_call.operands is not None:
        return False
    return in_map is not None and in_map.operands is not None


def monitoring_tool() -> int | None:
    """Reserve an id for a tool of `sys.monitoring`; return None if there is none left."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    # From the last one down: 0 to 2 are for debuggers, coverage and profilers by convention.
    free = (number for number in range(5, -1, -1) if monitoring.get_tool(number) is None)
    tool = next(free, None)
    if tool is not None:
        monitoring.use_tool_id(tool, "bendtrace")
    return tool
