"""The state of a program while it is being written: variables in scope, text, and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

__all__ = [
    "WIDTH", "Dict", "Function", "List", "Maybe", "Tensor", "Var", "Writer", "gives",
]  # fmt: skip

WIDTH = 4  # features, the one size that the parameters of a program insist on
Item = TypeVar("Item")


class Tensor(NamedTuple):
    """What is known of a tensor: its dtype (float, double, int, bool) and its sizes.

    A size is a number, or a name for what only a call decides.
    """

    dtype: str
    dims: tuple[int | str, ...]


class List(NamedTuple):
    of: Tensor


class Dict(NamedTuple):
    of: Tensor


class Maybe(NamedTuple):
    of: Tensor


class Function(NamedTuple):
    parameters: tuple[Tensor, ...]
    result: Tensor


class Var(NamedTuple):
    """A variable: `kind` is one of the classes above, or int, float, bool.

    `writable`: whether writing to it in place is not an error in general.
    """

    name: str
    kind: Any
    writable: bool = True


class Writer:
    """Writes one function after the other.

    Args:
        draw: hypothesis's own; the simplest choice is always the first.
    """

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw
        self.scope: list[Var] = []
        self.lines: list[str] = []
        self.attributes: dict[str, str] = {}
        self.globals: dict[str, str] = {}
        self.things: list[Any] = []  # of the world around it (see `world.py`)
        self.tensor_things: list[Any] = []
        self.result: Tensor | None = None
        self.indent = 0
        self.budget = 0
        self.depth = 0
        self.loops = 0
        self.in_method = False
        self._names = 0
        self._level = 0
        self._limit = 1

    # Choices

    def below(self, number: int) -> int:
        return self._draw(_below(number)) if number > 1 else 0

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def fresh(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    # Text

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """A suite of its own: what it defines is forgotten after it."""
        self.line(header)
        scope = list(self.scope)
        self.indent += 1
        start = len(self.lines)
        try:
            yield
        finally:
            if len(self.lines) == start:
                self.line("pass")
            self.indent -= 1
            self.scope = scope

    @contextmanager
    def local(self, *variables: Var) -> Iterator[None]:
        """Variables of a comprehension."""
        self.scope.extend(variables)
        try:
            yield
        finally:
            del self.scope[-len(variables) :]

    # Variables

    def define(self, kind: Any, prefix: str = "v", writable: bool = True) -> str:
        var = Var(self.fresh(prefix), kind, writable)
        self.scope.append(var)
        return var.name

    def of_kind(self, kind: Any) -> list[str]:
        return [var.name for var in self.scope if var.kind == kind]

    def of_class(self, cls: type) -> list[Var]:
        return [var for var in self.scope if isinstance(var.kind, cls)]

    def tensors(self, dtypes: str = "fdib", rank: int = 0) -> list[Var]:
        return [
            var
            for var in self.scope
            if isinstance(var.kind, Tensor)
            and var.kind.dtype in dtypes
            and len(var.kind.dims) >= rank
        ]

    def attribute(self, name: str, made: str) -> str:
        """The text for an attribute of self, which `__init__` is made to set."""
        self.attributes.setdefault(name, made)
        return f"self.{name}"

    # Sizes

    def sizes(self) -> list[int | str]:
        """The sizes a new tensor can have."""
        known = [d for var in self.tensors() for d in var.kind.dims if isinstance(d, str)]
        return [WIDTH, *dict.fromkeys(known), 1, 2, 3]

    def size(self, dim: int | str) -> str:
        """The text of an expression for a size."""
        if isinstance(dim, int):
            return str(dim)
        found = [
            (var.name, axis)
            for var in self.tensors()
            for axis, other in enumerate(var.kind.dims)
            if other == dim
        ]
        name, axis = self.pick(found)
        forms = [f"{name}.shape[{axis}]", f"{name}.size({axis})"]
        return self.pick([*forms, f"len({name})"] if axis == 0 else forms)

    def shape(self, dims: tuple[int | str, ...]) -> str:
        """The text of sizes as several arguments; for no dimensions, of an empty tuple."""
        return ", ".join(map(self.size, dims)) or "()"

    def type(self, dtypes: str = "ffffdib", rank: int = 3) -> Tensor:
        """Some type: often that of a variable."""
        known = [
            var.kind
            for var in self.tensors()
            if var.kind.dtype in dtypes and len(var.kind.dims) <= rank
        ]
        if known and not self.chance(4):
            return self.pick(known)
        dims = tuple(self.pick(self.sizes()) for _ in range(self.below(rank + 1)))
        return Tensor(self.pick(dtypes), dims)

    # Expressions

    @contextmanager
    def nesting(self, limit: int) -> Iterator[None]:
        """Expressions in here are nested so many deep at most."""
        before = self._limit
        self._limit = limit
        try:
            yield
        finally:
            self._limit = before

    def write(self, wanted: Any) -> str:
        """The text of an expression of a kind: a `Tensor`, int, float or bool."""
        self._level += 1
        try:
            simple = self._level > self._limit
            involved = self._level == 1 < self._limit and self.below(4) > 0
            kind = Tensor if isinstance(wanted, Tensor) else wanted
            options = [
                rule.write
                for rule in _RULES[kind]
                if not (simple if rule.nested else involved) and rule.when(self, wanted)
                for _ in range(rule.weight)
            ]
            return self.pick(options)(self, wanted)
        finally:
            self._level -= 1

    def statement_expression(self, wanted: Any) -> str:
        with self.nesting(1 + self.below(3)):
            text = self.write(wanted)
        return _bare(text)


class _Rule(NamedTuple):
    write: Callable[[Writer, Any], str]
    when: Callable[[Writer, Any], Any]
    nested: bool
    weight: int


_RULES: dict[Any, list[_Rule]] = {Tensor: [], int: [], float: [], bool: []}
Write = Callable[[Writer, Any], str]


def gives(
    kind: Any,
    when: Callable[[Writer, Any], Any] = lambda w, wanted: True,
    nested: bool = True,
    weight: int = 1,
) -> Callable[[Write], Write]:
    """Make a function a way to write an expression of a kind.

    Args:
        kind: `Tensor`, int, float or bool.
        when: whether it can write what is wanted.
        nested: whether it writes other expressions inside.
        weight: how often it is chosen, relative to others.
    """

    def register(write: Write) -> Write:
        _RULES[kind].append(_Rule(write, when, nested, weight))
        return write

    return register


@cache
def _below(number: int) -> st.SearchStrategy[int]:
    return st.integers(0, number - 1)


def _bare(text: str) -> str:
    """Without parentheses around it all."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            inner = text[1:-1]
            whole = position == len(text) - 1 and "," not in inner and " for " not in inner
            return inner if whole else text
    return text
