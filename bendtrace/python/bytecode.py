"""Bytecode: the instructions of code, and how these use values and variables."""

from __future__ import annotations

import bisect
import builtins
import ctypes
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from bendtrace.python.internals import is_off

T = TypeVar("T")

# The instructions of code, read from its bytes: `dis` takes some twenty times as long.
#
# Code is looked at when a model is first traced, and `dis` also finds out about lines, jumps and
# exceptions, which nobody asks for here.


def cache_by_code(function: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """Return a function that keeps what another one gives for code.

    By the identity of the code, since hashing it is slow. It is kept, so that no other code gets
    its identity.
    """
    known: dict[int, tuple[CodeType, T]] = {}

    @functools.wraps(function)
    def keeping(code: CodeType) -> T:
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = code, function(code)
        return found[1]

    return keeping


# The instructions that push a constant. Which of them a constant takes differs between Pythons.
CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"})

# How arguments stand for names was seen in CPython 3.11 to 3.14; tests/test_bytecode.py
# compares with what `dis` says. Later ones are asked by way of it.
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
    return frozenset(found).union(*map(names_used_whole, nested_codes(code)))


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
    return frozenset(found).union(*map(put_on_globals, nested_codes(code)))


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
    """An instruction in a form common to all Python versions."""

    # The position of the instruction, in bytes. The two steps of one instruction share it.
    offset: int
    name: str  # its name, without the part that says how a variable is loaded
    argument: int | None
    value: Any  # the meaning of the argument
    shown: str  # the same in the words of `dis`
    positions: dis.Positions | None  # in the source; None if two steps share them


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
    """Return which variables may still be read from an instruction on: a bit for each slot."""
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


def argument_names(code: CodeType) -> tuple[str, ...]:
    """Return the variables that have the arguments of code; those that gather others are last."""
    gathering = code.co_flags & inspect.CO_VARARGS, code.co_flags & inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + sum(map(bool, gathering))
    return code.co_varnames[:count]


def local_in(frame: FrameType, name: str) -> Any:
    """Return the value of a local variable of a running frame; None if it has none."""
    variables = frame.f_locals
    value = variables.get(name)
    if _COPIES:
        variables.clear()
    return value


def assign(frame: FrameType, name: str, value: Any) -> None:
    """Give a local variable of a running frame, neither free nor a cell, another value."""
    variables = frame.f_locals
    variables[name] = value
    # Before 3.13, writing to the copy changes nothing until this function of CPython's C API puts
    # the copy back; debuggers do the same. 3.13 removed the copy, and the function does nothing.
    if _COPIES:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()


# Before Python 3.13, `f_locals` is a copy, which would keep the values alive.
_COPIES = sys.version_info < (3, 13)


# How code uses values, judged by its instructions.
#
# Traced scalars and real tensors work like the expected objects nearly everywhere. Code that could
# tell the difference receives plain values, or more is guarded.

_IDENTITY = frozenset({"id", "is_", "is_not"})
_FILLING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})


def code_compares_identity(code: CodeType) -> bool:
    """Return whether code, or nested code, tests `x is y` with neither being a constant.

    Asking for the `id` of objects counts as well, and so does `operator.is_`.
    """
    return is_off("identity") or _compares_identity(code)


@cache_by_code
def _compares_identity(code: CodeType) -> bool:
    asks = not _IDENTITY.isdisjoint(code.co_names) or (
        has(code, "IS_OP")
        and any(
            current == "IS_OP" and before not in CONSTANTS
            for (before, _), (current, _) in itertools.pairwise(instructions_of(code))
        )
    )
    return asks or any(map(_compares_identity, nested_codes(code)))


def asks_for_ids(code: CodeType) -> int | None:
    """Return a line where code asks for the `id` of something.

    None if it does so in comparisons `id(x) == id(y)` only, or not at all.
    """
    return _line_of_ids(code) if "id" in code.co_names else None


@cache_by_code
def _line_of_ids(code: CodeType) -> int | None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _FILLING]
    calls = [place for place, step in enumerate(steps) if step.opname.startswith("CALL")]
    asks = [
        place
        for place, step in enumerate(steps)
        if step.argval == "id" and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    while asks:
        first, *rest = asks
        later = [place for place in calls if rest and place > rest[0]]
        is_compared = (
            later
            and [place for place in calls if first < place < rest[0]] == [rest[0] - 1]
            and steps[min(later[0] + 1, len(steps) - 1)].opname == "COMPARE_OP"
        )
        if not is_compared:
            where = steps[first].positions
            return where.lineno if where and where.lineno else code.co_firstlineno
        asks = rest[1:]
    return None


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Return the code of the functions that stand in code itself, not in these."""
    return (inner for inner in code.co_consts if isinstance(inner, CodeType))


def stores_outside(code: CodeType) -> bool:
    """Return whether code assigns to a variable of the enclosing function."""
    if code.co_freevars and any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    ):
        return True
    return any(map(stores_outside, nested_codes(code)))


class _Truths(NamedTuple):
    """The use that code makes of a bool, or of a list of bools."""

    # True if it is only tested, or dropped; False if it may go anywhere; None if code returns or
    # yields it, and otherwise only tests it.
    answer: bool | None
    depth: int  # the depth of the list that is returned, or yielded
    names: frozenset[str]  # the builtins that it is given to


_tests: dict[tuple[int, int, int, bool], tuple[CodeType, _Truths]] = {}


def only_tests(frame: FrameType, depth: int = 0) -> bool:
    """Return whether code only tests or discards the result of its current instruction.

    The test is for its truth, or for being None. It may also put bools in a list, and count them
    or test all of them by a builtin: `any(flags)`, `sum(flags)`.

    A traced bool must not be used otherwise: for `keepdim` and the like, torch's C++ functions
    accept only a real bool, and refuse others before they ask the tracer. For bools in a list, the
    depth is 1; in a list of lists, 2; and so on.
    """
    found: FrameType | None = None if is_off("truth") else frame
    is_yielded = False
    while found is not None:
        code, offset = found.f_code, found.f_lasti
        known = _tests.get((id(code), offset, depth, is_yielded))
        if known is None:
            flow = _StackValueFlow(code)
            known = _tests[id(code), offset, depth, is_yielded] = (
                code,
                flow.from_generator(offset, depth) if is_yielded else flow.after(offset, depth),
            )
        use = known[1]
        if not all(map(functools.partial(_stands_for_builtin, found.f_globals), use.names)):
            return False
        if use.answer is not None:
            return use.answer
        depth, is_yielded = use.depth, bool(code.co_flags & inspect.CO_GENERATOR)
        found = found.f_back  # it is returned: look what the caller does with it
    return False


def _stands_for_builtin(space: Mapping[str, Any], name: str) -> bool:
    return name not in space and vars(builtins).get(name) is _TESTING[name]


# Builtins that only test bools, count or add them up.
_TESTING: dict[str, Any] = {one.__name__: one for one in (all, any, len, sum)}


@functools.lru_cache(maxsize=1024)
def tests_directly(code: CodeType, offset: int) -> bool:
    """Return whether code calls `bool`, and only tests the result: `if bool(x)`."""
    flow = _StackValueFlow(code)
    after = flow.next_after(offset)
    is_test = after.startswith(("POP_JUMP", "JUMP_IF")) or after in ("TO_BOOL", "UNARY_NOT")
    return is_test and flow.called(flow.position(offset)) == "bool"


def drops(frame: FrameType) -> bool:
    """Return whether code drops the result of its current instruction, as in `x.add_(1)`."""
    flow = _StackValueFlow(frame.f_code)
    return flow.next_after(frame.f_lasti) == "POP_TOP"


class Asking(NamedTuple):
    """A comparison that converts its result to a truth value itself, for an `if` (Python 3.13)."""

    symbol: str  # the comparison operator, such as "=="
    operands: tuple[str, ...]  # the compared local variables, as far as known: right, left


@cache_by_code
def asking_comparisons(code: CodeType) -> Mapping[int, Asking]:
    """Return the comparisons of code that ask for the truth of their result, by offset."""
    return dict(_find_asking(code))


def _find_asking(code: CodeType) -> Iterator[tuple[int, Asking]]:
    steps = single_steps(code)
    for position, step in enumerate(steps):
        if step.name == "COMPARE_OP" and step.shown.startswith("bool("):
            before = reversed(steps[max(position - 2, 0) : position])
            before = itertools.takewhile(lambda one: one.name == "LOAD_FAST", before)
            yield step.offset, Asking(step.shown[5:-1], tuple(one.value for one in before))


_CONTAINERS = (tuple, list, dict, set, frozenset)


def compares_items(frame: FrameType) -> bool:
    """Return whether code that asks for a truth does so for two items of containers.

    `a == b` of two lists asks for the truth of one item comparison after another. If the comparison
    itself converts its result to a truth value, only this distinguishes it from `x == y`.
    """
    code = frame.f_code
    asked = asking_comparisons(code).get(frame.f_lasti) if _HAS_ASKING else None
    if asked is None or asked.symbol not in ("==", "!="):
        return False
    return any(isinstance(frame.f_locals.get(name), _CONTAINERS) for name in asked.operands)


# False where an `if` has a separate instruction for asking.
_HAS_ASKING = bool(dict(_find_asking(compile("1 if x == y else 2", "<bendtrace>", "eval"))))


class _StackValueFlow:
    """Follows the value on top of the stack through one code object.

    A value is a bool, or a list of bools of some depth (see `_Truths`).
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._steps = single_steps(code)
        self._offsets = [step.offset for step in self._steps]
        self._seen: set[str] = set()
        self._depths: set[int] = set()  # of what is returned
        self._names: set[str] = set()

    def after(self, offset: int, depth: int) -> _Truths:
        """Return the use of the result of an instruction."""
        # Of a frame that called another, f_lasti can point behind the call, into its cache.
        return self._found(self._use(self.position(offset) + 1, depth))

    def from_generator(self, offset: int, depth: int) -> _Truths:
        """Return the use of what a generator yields to an instruction."""
        position = self.position(offset)
        if self._name(position) == "FOR_ITER":
            return self.after(offset, depth)
        return self._found(depth == 0 and self._is_tested_by_call(position))

    def _found(self, answer: bool | None) -> _Truths:
        if answer is None and len(self._depths) > 1:
            answer = False
        return _Truths(answer, max(self._depths, default=0), frozenset(self._names))

    def position(self, offset: int) -> int:
        """Return the position of an instruction."""
        return bisect.bisect_right(self._offsets, offset) - 1

    def next_after(self, offset: int) -> str:
        """Return the name of the instruction behind another one."""
        return self._name(self.position(offset) + 1)

    def _use(self, position: int, depth: int) -> bool | None:
        while position < len(self._steps):
            step = self._steps[position]
            name = step.name
            if name == "JUMP_FORWARD":
                position = self._at(step.value)
            elif name == "SWAP" and step.argument == 2 and self._name(position + 1) == "POP_TOP":
                position += 2  # the end of a < b < c, which drops the middle
            elif name == "POP_TOP":
                return True
            elif constant_of(self._code, name, step.argument or 0) is None:
                return self._name(position + 1) == "IS_OP"
            elif name == "RETURN_VALUE" or name == "YIELD_VALUE":
                self._depths.add(depth)
                return None
            elif name == "LIST_APPEND":
                # Since Python 3.12, a comprehension is no function.
                self._depths.add(depth + 1)
                return None if self._code.co_name == "<listcomp>" else False
            elif name == "STORE_FAST":
                return self._uses_of(step.value, depth)
            elif depth:
                return self._items(position, depth)
            elif name == "TO_BOOL":
                position += 1
            elif name == "UNARY_NOT" or name.startswith("POP_JUMP"):
                return True
            elif name == "COPY" and step.argument == 1:
                position += 1  # a and b, since Python 3.12: test a copy, then drop or keep it
                while self._name(position) == "TO_BOOL":
                    position += 1
                if not self._name(position).startswith("POP_JUMP"):
                    return False
                return self._use(self._at(self._steps[position].value), 0)
            elif name in ("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"):
                position = self._at(step.value)
            else:
                return False
        return False

    def _items(self, position: int, depth: int) -> bool | None:
        """Return the use of the items of the list on top of the stack."""
        step = self._steps[position]
        if step.name == "GET_ITER" and self._name(position + 1) == "FOR_ITER":
            return self._use(position + 2, depth - 1)
        if step.name == "UNPACK_SEQUENCE":
            count = step.argument or 0
            targets = self._steps[position + 1 : position + 1 + count]
            if any(target.name != "STORE_FAST" for target in targets):
                return False
            return _all([self._uses_of(target.value, depth - 1) for target in targets])
        after = self._name(position + 1)
        if step.name in CONSTANTS and after == "BINARY_SUBSCR":
            is_index = type(constant_of(self._code, step.name, step.argument or 0)) is int
            return is_index and self._use(position + 2, depth - 1)
        if depth > 1:
            return False
        if loads_method(step) and step.value == "count":
            return after in CONSTANTS and self._name(position + 2) == "CALL"
        return step.name == "CONTAINS_OP" or self._is_tested_by_call(position)

    def _is_tested_by_call(self, position: int) -> bool:
        """Return whether an instruction calls a builtin that tests bools with nothing else."""
        name = self.called(position)
        if name not in _TESTING:
            return False
        self._names.add(name)
        return True

    def called(self, position: int) -> str:
        """Return the global that an instruction calls with one argument; "" if there is none."""
        call = self._steps[position]
        if call.name != "CALL" or call.argument != 1:
            return ""
        pushed = 0
        for step in reversed(self._steps[:position]):
            if step.name not in _OF_ARGUMENTS:
                break
            if step.name == "CALL":  # (in 3.11, a part of it is an instruction of its own)
                pushed -= (step.argument or 0) + 1
            else:
                pushed += dis.stack_effect(dis.opmap[step.name], step.argument)
            if pushed == 3:  # the argument, the function, and a place that stays empty
                return step.value if step.name == "LOAD_GLOBAL" else ""
        return ""

    def _uses_of(self, variable: str, depth: int) -> bool | None:
        """Return the use of a local variable, wherever it is loaded."""
        if variable in self._seen:
            return True
        self._seen.add(variable)
        answers: list[bool | None] = []
        for position, step in enumerate(self._steps):
            if step.value == variable and "FAST" in step.name:
                if step.name == "LOAD_FAST":
                    answers.append(self._use(position + 1, depth))
                elif step.name not in ("STORE_FAST", "DELETE_FAST"):
                    answers.append(False)
        return _all(answers)

    def _at(self, offset: int) -> int:
        return bisect.bisect_left(self._offsets, offset)

    def _name(self, position: int) -> str:
        return self._steps[position].name if position < len(self._steps) else ""


# Instructions of the arguments of a call, where none of them jumps.
_OF_ARGUMENTS = frozenset(
    {
        "BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_LIST", "BUILD_SLICE", "BUILD_TUPLE",
        "CALL", "COMPARE_OP", "GET_ITER", "LOAD_ATTR", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF",
        "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_SMALL_INT", "MAKE_FUNCTION",
        "UNARY_NEGATIVE",
    }
)  # fmt: skip


def loads_method(step: InstructionStep) -> bool:
    """Return whether an instruction loads a method to call it, so that nothing can keep it."""
    if step.name == "LOAD_ATTR":  # since Python 3.12
        return sys.version_info >= (3, 12) and bool((step.argument or 0) & 1)
    return step.name == "LOAD_METHOD"


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True


# Where code looks attributes up by names that are no constants.

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
    """Return whether the first argument of a call is `self`, by what follows its function."""
    depth = 0  # how many arguments there are so far, and parts of them
    # Since Python 3.13, a null comes after what is called. Before, it would belong to the argument.
    if steps and steps[0].opname == "PUSH_NULL" and sys.version_info >= (3, 13):
        steps = steps[1:]
    for step in steps:
        if depth == 0:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if not step.opname.startswith(_OF_VARIABLES) or names[0] != "self":
                return False
        elif depth == 1 and not step.opname.startswith(_OPERANDS):
            return False  # something is done to it: self[0], self.parts()
        if "JUMP" in step.opname:
            return False
        before, depth = depth, depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 2 <= before:
            return depth < 1  # the lookup is called, or else `self + 1` is
    return False


_OF_VARIABLES = ("LOAD_FAST", "LOAD_DEREF")
_OPERANDS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_SMALL_INT", "PUSH_NULL")
