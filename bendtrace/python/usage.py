"""Judges by the instructions of code how it uses values.

Traced scalars and real tensors work like the expected objects nearly everywhere. Code that could
tell the difference receives plain values, or more is guarded.
"""

from __future__ import annotations

import bisect
import builtins
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bendtrace.python.bytecode import (
    CONSTANTS,
    InstructionStep,
    constant_of,
    has,
    instructions_of,
    single_steps,
)
from bendtrace.python.internals import is_off

_IDENTITY = frozenset({"id", "is_", "is_not"})
_FILLING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_ids: dict[int, tuple[CodeType, int | None]] = {}
_identity: dict[int, tuple[CodeType, bool]] = {}


def code_compares_identity(code: CodeType) -> bool:
    """Return whether code, or nested code, tests `x is y` with neither being a constant.

    Asking for the `id` of objects counts as well, and so does `operator.is_`.
    """
    known = _identity.get(id(code))
    if is_off("identity"):
        return True
    if known is None:
        asks = not _IDENTITY.isdisjoint(code.co_names) or (
            has(code, "IS_OP")
            and any(
                current == "IS_OP" and before not in CONSTANTS
                for (before, _), (current, _) in itertools.pairwise(instructions_of(code))
            )
        )
        asks = asks or any(map(code_compares_identity, _nested_codes(code)))
        known = _identity[id(code)] = (code, asks)
    return known[1]


def asks_for_ids(code: CodeType) -> int | None:
    """Return a line where code asks for the `id` of something.

    None if it does so in comparisons `id(x) == id(y)` only, or not at all.
    """
    if "id" not in code.co_names:
        return None
    known = _ids.get(id(code))
    if known is None:
        known = _ids[id(code)] = (code, _line_of_ids(code))
    return known[1]


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


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    return (inner for inner in code.co_consts if isinstance(inner, CodeType))


def stores_outside(code: CodeType) -> bool:
    """Return whether code assigns to a variable of the enclosing function."""
    if code.co_freevars and any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    ):
        return True
    return any(map(stores_outside, _nested_codes(code)))


class _Truths(NamedTuple):
    """The use that code makes of a bool, or of a list of bools.

    Attributes:
        answer: True if it is only tested, or dropped; False if it may go anywhere; None if code
            returns or yields it, and otherwise only tests it.
        depth: the depth of the list that is returned, or yielded.
        names: the builtins that it is given to.
    """

    answer: bool | None
    depth: int
    names: frozenset[str]


_tests: dict[tuple[int, int, int, bool], tuple[CodeType, _Truths]] = {}


def only_tests(frame: FrameType, depth: int = 0) -> bool:
    """Return whether code only tests or discards the result of its current instruction.

    The test is for its truth, or for being None. It may also put bools in a list, and count them
    or test all of them by a builtin: `any(flags)`, `sum(flags)`.

    A traced bool must not be used otherwise: for `keepdim` and the like, torch's C++ functions
    accept only a real bool, and refuse others before they ask the tracer.

    Args:
        frame: the frame, at the instruction.
        depth: for bools in a list, 1; in a list of lists, 2; and so on.
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
    """A comparison that converts its result to a truth value itself, for an `if` (Python 3.13).

    Attributes:
        symbol: the comparison operator, such as "==".
        operands: the compared local variables, as far as known: right, left.
    """

    symbol: str
    operands: tuple[str, ...]


_asking: dict[int, tuple[CodeType, dict[int, Asking]]] = {}


def asking_comparisons(code: CodeType) -> Mapping[int, Asking]:
    """Return the comparisons of code that ask for the truth of their result, by offset."""
    known = _asking.get(id(code))
    if known is None:
        known = _asking[id(code)] = (code, dict(_find_asking(code)))
    return known[1]


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


# False where an `if` has an instruction of its own for asking.
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
        if _is_call(step) and step.value == "count":
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
            if step.name not in _SIMPLE:
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
_SIMPLE = frozenset(
    {
        "BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_LIST", "BUILD_SLICE", "BUILD_TUPLE",
        "CALL", "COMPARE_OP", "GET_ITER", "LOAD_ATTR", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF",
        "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_SMALL_INT", "MAKE_FUNCTION",
        "UNARY_NEGATIVE",
    }
)  # fmt: skip


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True


# What code does with containers: whether it only adds to them, judging by its instructions.

# Methods that add to a list or deque, and say nothing of what is in it.
ADDS = frozenset({"append", "extend"})

_found: dict[int, tuple[CodeType, frozenset[str]]] = {}


def names_used(code: CodeType) -> frozenset[str]:
    """Return the names under which code uses something in another way than to add to it.

    These are names of attributes, globals and variables of functions around it. In
    `self.seen["x"].append(y)`, nothing but an item of what `seen` stands for is added to. Texts
    in the code count as names: code may look them up.

    Args:
        code: the code, without the functions in it.
    """
    known = _found.get(id(code))
    if known is None:
        steps = single_steps(code)
        names = {step.value for at, step in enumerate(steps) if _is_read(steps, at)}
        names.update(_texts_in(code.co_consts))
        known = _found[id(code)] = (code, frozenset(names))
    return known[1]


def hands_over(code: CodeType, name: str, level: int) -> bool:
    """Return whether code does more with a container than to operate on it.

    Its methods and operators may be called, and `len`. It may not be passed to anything else, kept
    or returned: code that asks for its type, or reads its memory, might receive it.

    Args:
        code: the code, without the functions in it.
        name: the attribute, global or variable of a function around it that leads to the container.
        level: how many items of items lie between.
    """
    if name in _texts_in(code.co_consts):
        return True
    if name not in code.co_names and name not in code.co_freevars + code.co_cellvars:
        return False
    return _Operating(code).hands_over(name, level)


def only_adds(code: CodeType, name: str, keys: Sequence[Any]) -> bool:
    """Return whether code does nothing with a list or deque but add to it.

    Code may look up what the list is in, and other things there: `m = self.metrics["train"]`,
    then `m["losses"].append(x)` and `m["calls"] += 1`.

    Args:
        code: the code, without the functions in it.
        name: the attribute, global or variable of a function around it that leads to the list.
        keys: the keys of the items that lie between, the outermost first; None for one that code
            may write in another way.
    """
    if name in _texts_in(code.co_consts):
        return False
    return not _Adding(code, name, keys).hands_over(name, len(keys))


class _Operating:
    """Follows a container on the stack, from where code loads it."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._steps = single_steps(code)
        self._variables: set[tuple[str, int]] = set()

    def hands_over(self, name: str, level: int) -> bool:
        for at, step in enumerate(self._steps):
            if step.value != name or step.name.endswith("_FAST") or step.name in _IDLE:
                continue
            if step.name.startswith("STORE_"):
                continue  # another container, which the next run finds
            if step.name not in _LOADS or self._is_lost(at, level):
                return True
        return False

    def _is_lost(self, at: int, level: int) -> bool:
        """Return whether the container that an instruction loads gets where it is not followed."""
        # What is on the stack: the levels of containers, None for others, and `len`.
        stack: list[Any] = ["len"] * self._is_length(at) + [level]
        for step in self._steps[at + 1 :]:
            if not any(map(_leads_on, stack)):
                return False
            name = "BINARY_SUBSCR" if _is_subscript(step) else step.name
            count = step.argument or 0
            if name == "KW_NAMES":
                continue
            if name == "STORE_FAST":
                kept = stack.pop()
                if type(kept) is _StackMethod and kept.level:
                    return True
                if type(kept) is int and self._is_variable_lost(step.value, kept):
                    return True
            elif name in CONSTANTS:
                stack.append(_StackConstant(constant_of(self._code, step.name, count)))
            elif name in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF"):
                stack.append("len" if step.value == "len" else None)
            elif name == "COPY" and count <= len(stack):
                stack.append(stack[-count])
            elif name == "STORE_ATTR" and stack[-2:-1] == [0] and self._stays(step):
                del stack[-2:]
            elif name == "SWAP":
                stack[:0] = [None] * (count - len(stack))
                stack[-1], stack[-count] = stack[-count], stack[-1]
            elif name in _TAKING or name in _BUILDING:
                takes = _TAKING.get(name, count + (name == "CALL"))
                taken = [*[None] * (takes - len(stack)), *stack[max(len(stack) - takes, 0) :]]
                del stack[max(len(stack) - takes, 0) :]
                # What is operated on is the last, or the last but one in front of a key.
                place = -1 if takes == 1 or name == "CONTAINS_OP" else -2
                own = taken.pop(place) if takes and name in _TAKING else None
                if name == "CALL" and taken[0] == "len" and takes == 2 and self._may_ask(taken[1]):
                    taken.pop()
                if name == "CALL" and type(taken[0]) is _StackMethod:
                    own = taken.pop(0)
                if any(map(_leads_on, taken)):
                    return True
                if type(own) in (int, _StackMethod) and not self._may(step, name, own):
                    return True
                if name not in _GIVING_NOTHING:
                    stack.append(self._result(step, name, own, taken))
            elif _is_test_instruction(name):
                if not (self._may_ask(stack.pop()) or name == "POP_TOP"):
                    return True
                if any(type(one) is int for one in stack):
                    return True
            else:
                return True
        return True

    def _may_ask(self, one: Any) -> bool:
        """Return whether code may ask for the length, or the truth, of what is on the stack."""
        return True

    def _stays(self, step: InstructionStep) -> bool:
        """Return whether code assigns a container to where it has it from."""
        return False

    def _may(self, step: InstructionStep, name: str, own: Any) -> bool:
        """Return whether code may do an instruction to a container of some level."""
        return True

    def _result(self, step: InstructionStep, name: str, own: Any, taken: Sequence[Any]) -> Any:
        """Return what an instruction leaves on the stack: a level, or None."""
        return own - 1 if name == "BINARY_SUBSCR" and type(own) is int and own else None

    def _is_length(self, at: int) -> bool:
        """Return whether `len` is called with what an instruction loads, or with an item of it."""
        first = at
        while first > 0 and self._steps[first].name in ("LOAD_ATTR", "LOAD_METHOD"):
            first -= 1
        before = self._steps[first - 1] if first else None
        return before is not None and (before.name, before.value) == ("LOAD_GLOBAL", "len")

    def _is_variable_lost(self, variable: str, level: int) -> bool:
        if (variable, level) in self._variables:
            return False
        self._variables.add((variable, level))
        return any(
            self._is_lost(at, level)
            for at, step in enumerate(self._steps)
            if step.name == "LOAD_FAST" and step.value == variable
        )


class _StackConstant(NamedTuple):
    """A constant on the stack."""

    value: Any


class _StackMethod(NamedTuple):
    """A method on the stack, of a container at some level."""

    name: str
    level: int


class _Adding(_Operating):
    """Follows a list that is to be added to, and what it is in.

    Args:
        code: the code.
        name: what leads to the list.
        keys: the keys of the items that lie between.
    """

    def __init__(self, code: CodeType, name: str, keys: Sequence[Any]) -> None:
        super().__init__(code)
        self._name, self._keys = name, keys

    def _may(self, step: InstructionStep, name: str, own: Any) -> bool:
        if type(own) is _StackMethod:
            return True
        if own:  # what the list is in: to have its items, or its keys
            return name in _OF_HOLDERS or (_is_call(step) and step.value in _LOOKING_UP)
        return _extends(step) or (_is_call(step) and step.value in ADDS)

    def _may_ask(self, one: Any) -> bool:
        return one is None or one != 0

    def _stays(self, step: InstructionStep) -> bool:
        return not self._keys and bool(step.value == self._name)

    def _result(self, step: InstructionStep, name: str, own: Any, taken: Sequence[Any]) -> Any:
        if type(own) is int and _is_call(step):
            return _StackMethod(step.value, own)
        if own == 0 and _extends(step):
            return own
        level = own.level if type(own) is _StackMethod else own
        if not level or not (name == "BINARY_SUBSCR" or type(own) is _StackMethod):
            return None
        key = taken[0] if taken else None
        own_key = self._keys[len(self._keys) - level]
        # Texts alone: an item of a list has two numbers, `parts[1]` and `parts[-1]`.
        if type(key) is _StackConstant and type(key.value) is type(own_key) is str:
            return level - 1 if key.value == own_key else None
        return level - 1


def _leads_on(one: Any) -> bool:
    """Return whether what is on the stack is a container, or gives one."""
    return type(one) is int or (type(one) is _StackMethod and one.level > 0)


def _extends(step: InstructionStep) -> bool:
    return step.name == "BINARY_OP" and step.shown == "+="


_OF_HOLDERS = frozenset({"BINARY_SUBSCR", "CONTAINS_OP", "STORE_SUBSCR"})
_LOOKING_UP = frozenset({"get", "setdefault"})


def _is_test_instruction(name: str) -> bool:
    return name.startswith("POP_JUMP") or name == "POP_TOP"


# Instructions that operate on what they take from the stack, and how much that is.
_TAKING = {
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "GET_ITER": 1, "TO_BOOL": 1, "UNARY_NOT": 1,
    "UNARY_NEGATIVE": 1,
    "BINARY_SUBSCR": 2, "CONTAINS_OP": 2, "COMPARE_OP": 2, "BINARY_OP": 2, "DELETE_SUBSCR": 2,
    "STORE_SUBSCR": 3,
}  # fmt: skip
_BUILDING = frozenset({"CALL", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SLICE"})
_GIVING_NOTHING = frozenset({"DELETE_SUBSCR", "STORE_SUBSCR"})


def _is_read(steps: Sequence[InstructionStep], at: int) -> bool:
    """Return whether an instruction uses a name, and what it stands for is not only added to."""
    name = steps[at].name
    if name.endswith("_FAST") or not isinstance(steps[at].value, str):
        return False
    if name.startswith(("STORE_", "DELETE_")) or name not in _LOADS:
        return name.startswith(("STORE_", "DELETE_", "LOAD_", "IMPORT_")) and name not in _IDLE
    at += 1
    while at + 1 < len(steps) and steps[at].name in _KEYS and _is_subscript(steps[at + 1]):
        at += 2
    return not (_is_call(steps[at]) and steps[at].value in ADDS)


def _is_call(step: InstructionStep) -> bool:
    """Return whether an instruction loads a method to call it, so that nothing can keep it."""
    if step.name == "LOAD_ATTR":  # since Python 3.12
        return sys.version_info >= (3, 12) and bool((step.argument or 0) & 1)
    return step.name == "LOAD_METHOD"


def _is_subscript(step: InstructionStep) -> bool:
    return step.name == "BINARY_SUBSCR" or (step.name == "BINARY_OP" and step.shown == "[]")


def _texts_in(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (tuple, frozenset)):
            yield from _texts_in(tuple(value))


_LOADS = frozenset(
    {
        "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_SUPER_ATTR",
    }
)  # fmt: skip
_KEYS = CONSTANTS | {"LOAD_FAST"}
_IDLE = CONSTANTS | {"LOAD_CLOSURE"}  # (a function in the code has its own look at the variable)
