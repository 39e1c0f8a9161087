"""Lookup tables by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from bendtrace.errors import HookNameError

__all__ = ["NameTable", "free_name"]

_T = TypeVar("_T")


class NameTable(Mapping[str, _T]):
    """Things by their names; to be looked into, not changed.

    Example:
        >>> table = NameTable("module")
        >>> table._things["layer1"] = 1
        >>> table["layer2"]
        Traceback (most recent call last):
        bendtrace.errors.HookNameError: no module is registered as 'layer2'; \
there is 'layer1'
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._things: dict[str, _T] = {}

    def __getitem__(self, name: str) -> _T:
        try:
            return self._things[name]
        except (KeyError, TypeError):
            pass
        near = tuple(difflib.get_close_matches(str(name), self._things, 3))
        known = near or tuple(self._things)[:5]
        there = f"there is {', '.join(map(repr, known))}" if known else "there is none"
        raise HookNameError(f"no {self._what} is registered as {name!r}; {there}", name, near)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def __repr__(self) -> str:
        return repr(self._things)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._things)


def free_name(wish: str, taken: Iterable[str]) -> str:
    """Return a name, with a number after it if it is taken.

    Example:
        >>> free_name("relu", ["relu", "relu_1"])
        'relu_2'
    """
    taken, name, number = set(taken), wish, 0
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name
