"""Key functions that only compute: `max(range(n), key=lambda i: scores[i])`.

C calls a key function for each item, and asks which of two keys is greater. A replay has the items,
and the numbers that the function reads (`parts_of_key`). So it can put them in order itself, if the
function does nothing but compute its key (`KeyOrder`).
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

from bendtrace.python.bytecode import single_steps
from bendtrace.python.computations import COMPUTING


@dataclass(frozen=True)
class BuiltinKey:
    """A function of C that makes a key of an item and of nothing else; None for the item itself."""

    function: Any

    def make(self) -> Callable[[Any], Any]:
        """Return the function."""
        return _item if self.function is None else self.function


@dataclass(frozen=True)
class FieldKey:
    """An `operator.itemgetter`."""

    keys: tuple[Any, ...]  # the keys of the items that it takes

    def make(self) -> Callable[[Any], Any]:
        """Return the function."""
        return operator.itemgetter(*self.keys)


@dataclass(frozen=True)
class LookUpKey:
    """A method that looks an item up in a container: `scores.__getitem__`, `counts.get`."""

    name: str

    def make(self, container: Any) -> Callable[[Any], Any]:
        """Return the method of a container."""
        return getattr(container, self.name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CodeKey:
    """A function of Python."""

    code: CodeType
    # The globals that it uses: constants, and what computes.
    names: Mapping[str, Any] = field(compare=False)
    text: str  # shows these, and tells those that are equal apart: 1, 1.0 and True

    def make(self, cells: Sequence[Any], defaults: Sequence[Any]) -> Callable[[Any], Any]:
        """Return the function with the values of its closure, and of its arguments."""
        closure = tuple(map(types.CellType, cells))
        space = {"__builtins__": {}, **self.names}
        return types.FunctionType(self.code, space, self.code.co_name, tuple(defaults), closure)


KeyKind: TypeAlias = BuiltinKey | FieldKey | LookUpKey | CodeKey


class KeyParts(NamedTuple):
    """A key function, taken apart."""

    key: KeyKind  # makes it
    operands: tuple[Any, ...]  # the values that it reads besides an item
    code: CodeType | None  # its code, if it is written in Python


@dataclass(frozen=True)
class KeyOrder:
    """Puts items in order by a key function, and returns their positions."""

    function: Any  # `sorted`; or `max` or `min`, for the position of one item
    key: KeyKind  # makes the key function
    reverse: bool  # whether the greatest come first

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)

    def __call__(self, items: Sequence[Any], *operands: Any) -> Any:
        """Return the positions of items in order, or the position of one."""
        key, positions = self.key.make(*operands), range(len(items))
        if self.function is sorted:
            return sorted(positions, key=lambda at: key(items[at]), reverse=self.reverse)
        return self.function(positions, key=lambda at: key(items[at]))


def parts_of_key(function: Any) -> KeyParts | None:
    """Take a key function apart; return None if it may do more than compute a key."""
    kind = type(function)
    if kind is operator.itemgetter:
        keys = function.__reduce__()[1]
        return KeyParts(FieldKey(keys), (), None) if all(type(k) is int for k in keys) else None
    if kind is types.FunctionType:
        return _parts_of_function(function)
    if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
        owner = function.__self__
        if type(owner) in (list, tuple, dict) and function.__name__ in _LOOK_UPS:
            return KeyParts(LookUpKey(function.__name__), (owner,), None)
    is_known = function is None or _computes(function)
    return KeyParts(BuiltinKey(function), (), None) if is_known else None


def _parts_of_function(function: types.FunctionType) -> KeyParts | None:
    code = function.__code__
    if function.__kwdefaults__ or not _is_straight(code):
        return None
    names: dict[str, Any] = {}
    builtins: Any = getattr(function, "__builtins__")  # noqa: B009
    for step in single_steps(code):
        if step.name == "LOAD_GLOBAL":
            space = function.__globals__
            value = space.get(step.value, builtins.get(step.value))
            if not (value is math or type(value) in _CONSTANTS or _computes(value)):
                return None
            names[step.value] = value
    try:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a name that is assigned only later
        return None
    key = CodeKey(code, names, str(sorted(names.items())))
    return KeyParts(key, (cells, function.__defaults__ or ()), code)


def _computes(value: Any) -> bool:
    return any(value is one for one in _BUILTINS)


@functools.lru_cache(maxsize=1024)
def _is_straight(code: CodeType) -> bool:
    """Return whether code does nothing but compute with numbers, and takes no branch."""
    if code.co_flags & _OTHER_KINDS or code.co_cellvars:
        return False
    for step in single_steps(code):
        if step.name not in _STRAIGHT:
            return False
        if step.name == "BINARY_OP" and step.shown.endswith("="):
            return False  # in place
        if step.name in ("LOAD_ATTR", "LOAD_METHOD") and step.value not in _ATTRIBUTES:
            return False
    return True


def _item(item: Any) -> Any:
    return item


_CONSTANTS = (bool, int, float, str, type(None))
_BUILTINS: tuple[Any, ...] = (
    abs, bool, divmod, len, max, min, round, sum, tuple, operator.neg, operator.pos, *COMPUTING,
)  # fmt: skip
_LOOK_UPS = frozenset({"__getitem__", "get"})
_ATTRIBUTES = frozenset(
    {"get", "index", "count", *(name for name in vars(math) if name[0] != "_")}
)  # fmt: skip
_OTHER_KINDS = 0x04 | 0x08 | 0x20 | 0x80 | 0x200  # *args, **kwargs, and what can be suspended
_STRAIGHT = frozenset(
    {
        "BINARY_OP", "BINARY_SUBSCR", "BUILD_TUPLE", "CALL", "COMPARE_OP", "COPY",
        "COPY_FREE_VARS", "LOAD_ATTR", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL",
        "LOAD_METHOD", "LOAD_SMALL_INT", "POP_TOP", "PUSH_NULL",
        "RETURN_CONST", "RETURN_VALUE", "STORE_FAST", "SWAP", "UNARY_INVERT", "UNARY_NEGATIVE",
        "UNARY_NOT", "UNARY_POSITIVE", "UNPACK_SEQUENCE",
    }
)  # fmt: skip
