"""Values with structure, written down: what a replay has to build again.

In recorded arguments and outputs, exact tuples, lists, dicts and slices stand for themselves
with `Ref`s inside. The classes here stand for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bendtrace.recording.parts import AttributeKey, Part
from bendtrace.recording.tape import Container, leaves_in

__all__ = ["Existing", "Fixed", "Instance", "Made", "Opaque", "existing_in"]


class Existing:
    """An object that was there before the run, and is meant itself, not a copy."""

    __slots__ = ("part",)

    def __init__(self, part: Part) -> None:
        self.part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Existing) and other.part.label == self.part.label

    def __hash__(self) -> int:
        return hash(self.part.label)

    def __repr__(self) -> str:
        return self.part.label


class Fixed:
    """A thing that is meant itself, not a copy, and that no walk has found."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__qualname__}>"


class Opaque:
    """Something in a module's arguments that no op received: kept by name only."""

    __slots__ = ("type",)

    def __init__(self, value: Any) -> None:
        self.type = type(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.type is self.type

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"<{self.type.__qualname__}>"


class Made(Container):
    """Something made during the run by a call that a replay makes again.

    Attributes:
        maker: what to call; it has no effect besides what it returns.
        args: its arguments, encoded.
    """

    __slots__ = ("args", "maker")

    def __init__(self, maker: Callable[..., Any], *args: Any) -> None:
        self.maker = maker
        self.args = args

    def inside(self) -> tuple[Any, ...]:
        """Return its arguments."""
        return self.args

    def with_inside(self, *inside: Any) -> Made:
        """Return the same call with other arguments."""
        return Made(self.maker, *inside)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and (other.maker, other.args) == (self.maker, self.args)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.maker.__name__}({', '.join(map(repr, self.args))})"


class Instance(Container):
    """An object made during the run: its class, what it contains and its attributes.

    Attributes:
        cls: the class.
        items: for subclasses of tuple, list and dict (and torch.Size, sets): the content.
        attributes: what the object itself holds, by name.
    """

    __slots__ = ("attributes", "cls", "items")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.items: Any = None
        self.attributes: dict[AttributeKey, Any] = {}

    def inside(self) -> tuple[Any, ...]:
        """Return its content and its attributes."""
        return self.items, self.attributes

    def with_inside(self, *inside: Any) -> Instance:
        """Return an object of the same class with other content and attributes."""
        copy = Instance(self.cls)
        copy.items, copy.attributes = inside
        return copy

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Instance)
            and other.cls is self.cls
            and other.items == self.items
            and other.attributes == self.attributes
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = [] if self.items is None else [repr(self.items)]
        inside += [f"{name}={value!r}" for name, value in self.attributes.items()]
        return f"{self.cls.__name__}({', '.join(inside)})"


def existing_in(value: Any) -> Iterator[Existing]:
    """Yield what was there before the run in recorded arguments, or in an output."""
    return (leaf for leaf in leaves_in(value) if type(leaf) is Existing)
