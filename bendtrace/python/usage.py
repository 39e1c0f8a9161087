"""Judges by the instructions of code how it uses values.

Traced scalars and real tensors work like the expected objects nearly everywhere. Code that could
tell the difference receives plain values, or more is guarded.
"""

from __future__ import annotations

import bisect
import dis
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from bendtrace.python.bytecode import (
    CONSTANTS,
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


_tests: dict[tuple[int, int, int], tuple[CodeType, bool | None]] = {}


def only_tests(frame: FrameType, depth: int = 0) -> bool:
    """Return whether code only tests or discards the result of its current instruction.

    The test is for its truth, or for being None.

    A traced bool must not be used otherwise: for `keepdim` and the like, torch's C++ functions
    accept only a real bool, and refuse others before they ask the tracer.

    Args:
        frame: the frame, at the instruction.
        depth: for bools in a list, 1; in a list of lists, 2; and so on.
    """
    found: FrameType | None = None if is_off("truth") else frame
    while found is not None:
        code, offset = found.f_code, found.f_lasti
        known = _tests.get((id(code), offset, depth))
        if known is None:
            known = _tests[id(code), offset, depth] = (
                code,
                _StackValueFlow(code).after(offset, depth),
            )
        if known[1] is not None:
            return known[1]
        found = found.f_back  # it is returned: look what the caller does with it
    return False


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

    The answers are True (it is tested, or dropped), False (it may go anywhere) and None (it is
    returned and otherwise only tested). A value is a bool, or a list of bools of some depth.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._steps = single_steps(code)
        self._offsets = [step.offset for step in self._steps]
        self._seen: set[str] = set()

    def after(self, offset: int, depth: int) -> bool | None:
        # Of a frame that called another, f_lasti can point behind the call, into its cache.
        return self._use(bisect.bisect_right(self._offsets, offset), depth)

    def next_after(self, offset: int) -> str:
        """Return the name of the instruction behind another one."""
        return self._name(bisect.bisect_right(self._offsets, offset))

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
            elif name == "RETURN_VALUE":
                return None
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
        return False

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


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True
