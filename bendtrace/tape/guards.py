"""The kinds of guards.

To add one, write its class here, and call `TapeWriter.guard` where it is asked. A layer
refuses a kind that it does not know: compiled paths and exported programs name the kinds that they
can write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from bendtrace.python.bytecode import tests_directly
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import TORCH
from bendtrace.python.stacks import instruction_name
from bendtrace.tape.tape import Guard, Literals, Raised, Use

if TYPE_CHECKING:
    from bendtrace.python import accumulators
else:
    accumulators = LazyModule("bendtrace.python.accumulators")


def type_name_of(value: Any) -> str:
    """Return the name of a value's type."""
    kind = type(value)
    name = _usual_kinds.get(kind) or _kinds.get(kind)
    if name is None:
        package = "" if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}."
        name = _kinds[kind] = package + kind.__qualname__
    return name


_kinds: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# Of those that are never gone, which take less time to find.
_usual_kinds: dict[type, str] = {}
_USUAL: tuple[Any, ...] = (None, True, 0, 0.0, "", (), [], {})
_usual_kinds.update((type(one), type_name_of(one)) for one in _USUAL)


class ContentGuard(Guard):
    """A guard on a value that Python has asked for."""

    __slots__ = ()


class TruthGuard(ContentGuard):
    """The value is true, or it is false."""

    __slots__ = ()
    name: ClassVar[str] = "truth"
    code: ClassVar[str] = "True if v{index} else False"
    is_two_way: ClassVar[bool] = True
    found: ClassVar[Callable[[Any], bool]] = staticmethod(bool)
    answer: bool

    def failure(self, literals: Literals) -> str:
        """Return the code of the opposite."""
        return f"{'not ' if self.answer else ''}v{self.index}"


class ValueGuard(ContentGuard):
    """The value is identical."""

    __slots__ = ()
    name: ClassVar[str] = "value"

    def failure(self, literals: Literals) -> str:
        """Return the fastest test that tells values of the answer's type apart."""
        name, answer, kind = f"v{self.index}", literals.constant(self.answer), type(self.answer)
        if kind in (bool, type(None), torch.dtype, torch.layout):
            return f"{name} is not {answer}"
        if kind is torch.device:  # nothing else is equal to one
            return f"{name} != {answer}"
        if kind in (int, str):
            return f"{name} != {answer} or type({name}) is not {kind.__name__}"
        return f"not identical({name}, {answer})"


class LengthGuard(Guard):
    """The op returned so many values."""

    __slots__ = ()
    name: ClassVar[str] = "length"
    code: ClassVar[str] = "len(v{index})"
    subject: ClassVar[str] = "the number of items"
    about: ClassVar[str] = "number of results of"
    asked: ClassVar[str] = "len({})"
    found: ClassVar[Callable[[Any], int]] = staticmethod(len)
    answer: int


class ClassGuard(Guard):
    """The op returned a value of a class; the answer is the name of the class."""

    __slots__ = ()
    name: ClassVar[str] = "kind"
    code: ClassVar[str] = "kind_of(v{index})"
    subject: ClassVar[str] = "the type"
    about: ClassVar[str] = "type of"
    asked: ClassVar[str] = "type({})"
    is_of_result: ClassVar[bool] = True
    found: ClassVar[Callable[[Any], str]] = staticmethod(type_name_of)
    answer: str


class ErrorGuard(Guard):
    """The op raised such an error, or none."""

    __slots__ = ()
    name: ClassVar[str] = "raised"
    code: ClassVar[str] = "r{index}"
    asked: ClassVar[str] = "try {}"
    is_of_result: ClassVar[bool] = True
    answer: Raised | None

    def failure(self, literals: Literals) -> str:
        """Return the code of a test for another error, or for none."""
        if self.answer is None:
            return f"{self.finding} is not None"
        return f"{self.finding} != {literals.bound(self.answer)}"

    def word(self, answer: Raised | None) -> str:
        """Return the name of an error's class."""
        return "no error" if answer is None else answer.type.__name__


class IdentityGuard(Guard):
    """The op returned the tensor that another op returned, or it did not."""

    __slots__ = ()
    code: ClassVar[str] = "v{index} is v{other}"
    subject: ClassVar[str] = "the tensor"
    asked: ClassVar[str] = "the output of {}"
    is_two_way: ClassVar[bool] = True
    is_of_result: ClassVar[bool] = True
    answer: bool
    other: int

    def asks_like(self, other: Guard) -> bool:
        """Return whether the other guard is on identity, too."""
        return isinstance(other, IdentityGuard)

    @classmethod
    def meets(cls, value: Any, wanted: Any) -> bool:
        """Return whether a value is the same object, or is not, as recorded."""
        return (value is wanted) is (cls is SameGuard)

    def failure(self, literals: Literals) -> str:
        """Return the code of the opposite."""
        return f"v{self.index} {'is not' if self.answer else 'is'} v{self.other}"

    @classmethod
    def difference(cls, value: Any, wanted: Any) -> str:
        """Say that it is about a copy."""
        return ": whether a tensor is a copy differs from the trace"

    def word(self, answer: bool) -> str:
        """Return which tensor an answer means."""
        return "the tensor it was given" if answer else "another tensor"


class SameGuard(IdentityGuard):
    """It did: the answer is true."""

    __slots__ = ()
    name: ClassVar[str] = "same"


class OtherGuard(IdentityGuard):
    """It did not: the answer is false."""

    __slots__ = ()
    name: ClassVar[str] = "other"


KINDS: dict[str, type[Guard]] = {
    kind.name: kind
    for kind in (
        TruthGuard, ValueGuard, LengthGuard, ClassGuard, ErrorGuard, SameGuard, OtherGuard,
    )
}  # fmt: skip


# Where guards ask for numbers, which differ from run to run

Place: TypeAlias = tuple[CodeType, int]

# How Python asks where its result can be traced (see `Use`), and by which instructions.
VARYING_USES = frozenset({Use.INT, Use.INDEX, Use.FLOAT, Use.LEN, Use.HASH, Use.NUMPY})
ASKING = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "BINARY_SUBSCR", "STORE_SUBSCR"})
COMPARING = frozenset({"CALL", "CALL_KW", "CONTAINS_OP"})  # items of lists, one after the other


def number_place(guard: Guard) -> Place | None:
    """Return where a guard asks for a number (of rows, say) that could stay traced; else None.

    A truth that C code asks for may be the result of a comparison, or an item: `any(flags)`.
    """
    if guard.site is None or guard.use is Use.ROWS:
        return None if guard.site is None else guard.site.chain[guard.site.level]
    if isinstance(guard, TruthGuard) and guard.use is Use.BOOL:
        code, offset = guard.site.chain[0]
        if code.co_filename.startswith(TORCH) or tests_directly(code, offset):
            return None
        return (code, offset) if instruction_name(code, offset) in COMPARING else None
    is_number = isinstance(guard, ValueGuard) and type(guard.answer) in (int, float)
    if not is_number or guard.use not in VARYING_USES:
        return None
    code, offset = guard.site.chain[guard.site.level if guard.use is Use.LEN else 0]
    if code.co_filename.startswith(TORCH):
        return None
    name = instruction_name(code, offset)
    is_asked = name in ASKING or (
        name == "BINARY_OP" and accumulators.receiver_of_list(code, offset)
    )
    return (code, offset) if is_asked else None
