"""What containers hold, read into flat lists that are compared in one go.

A model consists of some hundred dicts, and code names some hundred globals. Looking at each by
itself takes longer than a small model does; read one after the other into a few lists, they are
compared by the loops of C.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, getitem, methodcaller
from typing import Any

from bendtrace.recording.parts import Access, Part, PartKind
from bendtrace.recording.stamps import all_same

__all__ = ["WHOLE", "Contents", "Places"]

WHOLE = (dict, OrderedDict)  # the types of dicts whose own methods can be relied on

_values = methodcaller("values")
_cell_contents = attrgetter("cell_contents")


class Places:
    """Where to look: dicts that modules consist of, names in namespaces, and cells.

    Args:
        parts: what a walk found.
        named: the names that it looked at in namespaces and cells, by index of their part.

    Attributes:
        dicts: those that are walked as a whole.
        taken: the indices of all parts whose content is looked up here.
    """

    __slots__ = ("_cells", "_holders", "_names", "_parts", "_spaces", "dicts", "taken")

    def __init__(self, parts: Iterable[Part], named: Mapping[int, dict[Any, Any]]) -> None:
        self._parts: list[Part] = []
        self._holders: list[tuple[Part, int, int]] = []  # with where its names begin and end
        self._cells: list[Part] = []
        self._spaces: list[Any] = []
        self._names: list[str] = []
        for part in parts:
            value = part.value
            if part.access is not Access.FIXED:
                continue
            if part.kind is PartKind.DICT and type(value) in WHOLE:
                self._parts.append(part)
            elif part.kind is PartKind.IDENTITY and part.index in named:
                if isinstance(value, types.CellType):
                    self._cells.append(part)
                elif type(value) in (dict, types.MappingProxyType):
                    names = named[part.index]
                    begin = len(self._names)
                    self._names += names
                    self._spaces += [value] * len(names)
                    self._holders.append((part, begin, len(self._names)))
        self.dicts = [part.value for part in self._parts]
        self.taken = frozenset(
            part.index
            for part in chain(self._parts, self._cells, (part for part, _, _ in self._holders))
        )

    def read(self) -> Contents | None:
        """Read what is there now; None if a name is gone, or a cell empty."""
        try:
            named = [*map(getitem, self._spaces, self._names)]
            held = [*map(_cell_contents, (part.value for part in self._cells))]
        except (KeyError, ValueError):
            return None
        return Contents(self.dicts, named, held)

    def before(self, contents: Contents) -> dict[int, dict[Any, Any]]:
        """Return what each part held when its content was read, by index."""
        found: dict[int, dict[Any, Any]] = {}
        begin = 0
        for part, size in zip(self._parts, contents.sizes, strict=True):
            end = begin + size
            pairs = zip(contents.keys[begin:end], contents.values[begin:end], strict=True)
            found[part.index] = {key: value for key, value in pairs if key not in part.hidden}
            begin = end
        for part, begin, end in self._holders:
            pairs = zip(self._names[begin:end], contents.named[begin:end], strict=True)
            found[part.index] = dict(pairs)
        for part, value in zip(self._cells, contents.held, strict=True):
            found[part.index] = {part.label: value}
        return found


class Contents:
    """What was at some places when they were read.

    Attributes:
        sizes: how many entries each dict had.
        keys: their keys, one dict after the other.
        values: their values.
        named: what the names stood for.
        held: what the cells held.
    """

    __slots__ = ("held", "keys", "named", "sizes", "values")

    def __init__(self, dicts: list[dict[Any, Any]], named: list[Any], held: list[Any]) -> None:
        self.sizes = [*map(len, dicts)]
        self.keys = [*chain.from_iterable(dicts)]
        self.values = [*chain.from_iterable(map(_values, dicts))]
        self.named = named
        self.held = held

    def same_as(self, other: Contents) -> bool:
        """Whether the same objects were at the same places, in the same order."""
        return (
            self.sizes == other.sizes
            and all_same(self.values, other.values)
            and all_same(self.keys, other.keys)
            and all_same(self.named, other.named)
            and all_same(self.held, other.held)
        )
