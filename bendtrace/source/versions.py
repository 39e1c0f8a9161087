"""Versions of dicts and of code: whether they have changed since they were read."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, contains, getitem, is_
from typing import Any

from bendtrace.source.internals import internal

# Versions of dicts: whether one has been written to since it was looked at.


def _never_the_same(table: dict[Any, Any]) -> object:
    """Take a dict to have been written to each time, where its version cannot be asked for."""
    return object()


class _Thing:
    """A class whose instances have a `__dict__`."""


def tells_changes(version: Callable[[dict[Any, Any]], Any]) -> bool:
    """Return whether versions differ after each way of writing to a dict, and not otherwise."""
    thing = _Thing()
    thing.entry = None  # type: ignore[attr-defined]
    table, other = vars(thing), {"entry": None}
    seen = [version(table)]
    thing.entry = True  # type: ignore[attr-defined]
    seen.append(version(table))
    for write in (
        lambda: table.__setitem__("entry", 1),  # what is equal is another thing all the same
        lambda: object.__setattr__(thing, "entry", 1.0),
        lambda: table.update(other),
        lambda: table.setdefault("another", None),
        lambda: table.pop("another"),
        lambda: table.__setitem__("another", table.pop("entry")),
        table.clear,
    ):
        write()
        seen.append(version(table))
    return version(table) == seen[-1] and len({*seen, version(other)}) == len(seen) + 1


def _find_versions() -> Callable[[dict[Any, Any]], Any]:
    # CPython counts what it writes to dicts (up to 3.11), or tells those who watch them (since
    # 3.12); torch.compile's guards ask for it in either case. Seen in torch 2.13 to 2.15;
    # test_versions.py notices what does not hold any more, and so does this, at once.
    version = internal("torch._C._dynamo.guards.dict_version", None)
    try:
        if version is not None and tells_changes(version):
            return version  # type: ignore[no-any-return]
    except Exception:  # it takes something else, or gives something that has no order
        pass
    return _never_the_same


# Returns what differs whenever an exact dict has been written to in between: no two states of all
# dicts ever have the same version. Equal versions say that each key has the very same object.
version_of: Callable[[dict[Any, Any]], Any] = _find_versions()
# Whether versions can be asked for; else they always differ.
TELLS_CHANGES = version_of is not _never_the_same


# What a search through code depended on, and whether it would still come to the same.
#
# A search looks up what names stand for and follows functions, classes and modules. So these have
# to be the same; of other values it matters only that they are none of them.


Named = tuple[Mapping[str, Any], str]  # a namespace, and a name in it

_FOLLOWED = (
    types.FunctionType, type, types.ModuleType, property, classmethod, staticmethod,
    functools.cached_property, functools._lru_cache_wrapper,
)  # fmt: skip
_code = attrgetter("__code__")
_bases = attrgetter("__mro__")
_EMPTY = object()


def all_same(a: list[Any], b: list[Any]) -> bool:
    """Return whether two lists contain the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


@dataclass(slots=True, eq=False)
class Depends:
    """The objects that a scan depends on, by identity.

    Attributes:
        looked: names that were found.
        absent: names that were not found.
        sized: namespaces in which many names were looked up, which must not get new ones.
        functions: the functions that were followed.
        cells: their closure cells.
        classes: the classes whose members were read.
    """

    looked: dict[tuple[int, str], Named] = field(default_factory=dict)
    absent: dict[tuple[int, str], Named] = field(default_factory=dict)
    sized: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    cells: dict[int, types.CellType] = field(default_factory=dict)
    classes: dict[int, type] = field(default_factory=dict)

    def add(self, other: Depends) -> None:
        """Depend also on everything that another scan depends on."""
        self.looked |= other.looked
        self.absent |= other.absent
        self.sized |= other.sized
        self.functions |= other.functions
        self.cells |= other.cells
        self.classes |= other.classes


class CodeVersion:
    """The state of these dependencies at the end of a scan."""

    __slots__ = (
        "_absent", "_bases", "_cells", "_classes", "_codes", "_followed", "_functions", "_held",
        "_names", "_others", "_sized", "_sizes", "_spaces", "_types", "_values",
    )  # fmt: skip

    def __init__(self, depends: Depends) -> None:
        looked = [(space, name) for space, name in depends.looked.values() if name in space]
        followed = [(s, n) for s, n in looked if isinstance(s[n], _FOLLOWED)]
        others = [(s, n) for s, n in looked if not isinstance(s[n], _FOLLOWED)]
        self._followed = _transpose(followed)
        self._values = [*map(getitem, *self._followed)]
        self._others = _transpose(others)
        self._types = [*map(type, map(getitem, *self._others))]
        self._absent = _transpose(depends.absent.values())
        self._sized = [*depends.sized.values()]
        self._sizes = [*map(tuple, self._sized)]
        self._functions = [*depends.functions.values()]
        self._codes = [*map(_code, self._functions)]
        self._cells = [*depends.cells.values()]
        self._held = [*map(_cell_key, self._cells)]
        self._classes = [*depends.classes.values()]
        self._bases = [*map(_bases, self._classes)]

    def holds(self) -> bool:
        """Return whether another scan would have the same result."""
        try:
            return (
                all_same([*map(getitem, *self._followed)], self._values)
                and [*map(type, map(getitem, *self._others))] == self._types
                and not any(map(contains, *self._absent))
                and [*map(tuple, self._sized)] == self._sizes
                and all_same([*map(_code, self._functions)], self._codes)
                and all_same([*map(_cell_key, self._cells)], self._held)
                and all_same([*map(_bases, self._classes)], self._bases)
            )
        except KeyError:  # a name is gone
            return False


def _transpose(named: Iterable[Named]) -> tuple[list[Mapping[str, Any]], list[str]]:
    pairs = list(named)
    return [space for space, _ in pairs], [name for _, name in pairs]


def _cell_key(cell: types.CellType) -> Any:
    """Return the content of a cell, or its class if only that matters."""
    try:
        value = cell.cell_contents
    except ValueError:
        return _EMPTY
    return value if isinstance(value, _FOLLOWED) else type(value)
