"""What code does with the values it comes by, judging by its instructions.

Traced scalars and real tensors pass for what the model expects nearly everywhere. Where code
would tell the difference, it is given plain values, or more is guarded.
"""

from __future__ import annotations

import bisect
import dis
import itertools
from types import CodeType, FrameType

from bendtrace.recording.instructions import has, steps_of

__all__ = ["compares_identity", "needs_plain_numbers", "only_tests", "stores_outside"]

_identity: dict[int, tuple[CodeType, bool]] = {}


def compares_identity(code: CodeType) -> bool:
    """Whether code asks `x is y` of two things neither of which is a constant."""
    known = _identity.get(id(code))
    if known is None:
        asks = has(code, "IS_OP") and any(
            there == "IS_OP" and before != "LOAD_CONST"
            for (before, _), (there, _) in itertools.pairwise(steps_of(code))
        )
        known = _identity[id(code)] = (code, asks)
    return known[1]


def stores_outside(code: CodeType) -> bool:
    """Whether code assigns to a variable of the function around it."""
    if code.co_freevars and any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    ):
        return True
    return any(isinstance(inner, CodeType) and stores_outside(inner) for inner in code.co_consts)


_TELLING_NAMES = frozenset(
    {
        "type", "manual_seed", "dumps", "deque", "Decimal", "timedelta", "statistics", "Fraction",
        # These run code out of the tracer's sight, where torch takes traced sizes for symbols.
        "Thread", "ThreadPoolExecutor", "DisableTorchFunction", "DisableTorchFunctionSubclass",
        "cond", "while_loop", "associative_scan",
    }
)  # fmt: skip
_plain: dict[int, tuple[CodeType, bool]] = {}


def needs_plain_numbers(code: CodeType) -> bool:
    """Whether code does something that a traced scalar would answer otherwise than a number.

    That is asking for `type(x)` or `x is True`, and giving it to C code that insists on an exact
    number without asking the tracer: seeding a generator, `json.dumps` and the like.
    """
    known = _plain.get(id(code))
    if known is None:
        known = _plain[id(code)] = (code, _has_such_code(code))
    return known[1]


def _has_such_code(code: CodeType) -> bool:
    if not _TELLING_NAMES.isdisjoint(code.co_names):
        return True
    if not has(code, "IS_OP") or not any(isinstance(one, bool) for one in code.co_consts):
        return False
    return any(
        there == "IS_OP" and before == "LOAD_CONST" and isinstance(code.co_consts[constant], bool)
        for (before, constant), (there, _) in itertools.pairwise(steps_of(code))
    )


_tests: dict[tuple[int, int], tuple[CodeType, bool | None]] = {}


def only_tests(frame: FrameType) -> bool:
    """Whether code does no more than test what its instruction at hand results in, or drop it.

    It is tested for its truth, or for being None.

    A traced bool must not go further: torch's C++ functions take none but a real one
    for `keepdim` and the like, and refuse it before the tracer is asked.
    """
    found: FrameType | None = frame
    while found is not None:
        code, offset = found.f_code, found.f_lasti
        known = _tests.get((id(code), offset))
        if known is None:
            known = _tests[id(code), offset] = (code, _Flow(code).after(offset))
        if known[1] is not None:
            return known[1]
        found = found.f_back  # it is returned: look what the caller does with it
    return False


class _Flow:
    """Follows the value on top of the stack through one code object.

    The answers are True (it is tested, or dropped), False (it may go anywhere) and None (it is
    returned and otherwise only tested).
    """

    def __init__(self, code: CodeType) -> None:
        self._steps = list(dis.get_instructions(code))
        self._at = {step.offset: position for position, step in enumerate(self._steps)}
        self._seen: set[str] = set()

    def after(self, offset: int) -> bool | None:
        # Of a frame that called another, f_lasti can point behind the call, into its cache.
        offsets = [step.offset for step in self._steps]
        return self._use(bisect.bisect_right(offsets, offset))

    def _use(self, position: int) -> bool | None:
        while position < len(self._steps):
            step = self._steps[position]
            name = step.opname
            if name in ("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "TO_BOOL"):
                position += 1
            elif name == "JUMP_FORWARD":
                position = self._at[step.argval]
            elif name == "SWAP" and step.arg == 2 and self._steps[position + 1].opname == "POP_TOP":
                position += 2  # the end of a < b < c, which drops the middle
            elif name in ("POP_TOP", "UNARY_NOT") or name.startswith("POP_JUMP"):
                return True
            elif name == "LOAD_CONST" and step.argval is None:
                return self._steps[position + 1].opname == "IS_OP"
            elif name == "RETURN_VALUE":
                return None
            elif name == "STORE_FAST":
                return self._uses_of(step.argval)
            elif name == "COPY" and step.arg == 1:
                position += 1  # a and b, since Python 3.12: test a copy, then drop or keep it
                while self._steps[position].opname in ("TO_BOOL", "NOP"):
                    position += 1
                test = self._steps[position]
                if not test.opname.startswith("POP_JUMP"):
                    return False
                return self._use(self._at[test.argval])
            elif name in ("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"):
                position = self._at[step.argval]
            else:
                return False
        return False

    def _uses_of(self, variable: str) -> bool | None:
        """What becomes of a local variable, wherever it is loaded."""
        if variable in self._seen:
            return True
        self._seen.add(variable)
        answers: list[bool | None] = [True]
        for position, step in enumerate(self._steps):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if variable in names and "FAST" in step.opname and step.opname != "STORE_FAST":
                plain = step.opname in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")
                if step.opname != "DELETE_FAST":
                    answers.append(self._use(position + 1) if plain else False)
        return False if False in answers else None if None in answers else True
