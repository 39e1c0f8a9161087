"""Facts about objects that are compared in each call, by a few loops of C.

What an insertion does is found by reading its attributes, closures and tables, which takes longer
than a small compiled model. Each of these reads is also a *fact*: this attribute is this object,
this table has this entry. As long as all of them hold, what was found holds as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import contains, getitem, is_
from typing import Any


class IdentityFacts:
    """Facts about attributes and entries, by the identity of the values.

    All objects in it are kept alive. Values are compared by identity only: whoever adds a fact
    about a value that can change itself adds facts about its content, too.
    """

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._attributes: list[Any] = []
        self._tables: list[Any] = []
        self._keys: list[Any] = []
        self._entries: list[Any] = []
        self._counted: list[Collection[Any]] = []
        self._counts: list[int] = []
        self._ordered: list[dict[Any, Any]] = []
        self._orders: list[list[Any]] = []
        self._spaces: list[Mapping[str, Any]] = []
        self._absent: list[str] = []
        self._alive: list[type] = []
        self._seen: set[tuple[int, Any]] = set()

    def attribute(self, owner: Any, name: str) -> Any:
        """Add which object an attribute is; return it."""
        value = getattr(owner, name)
        if self._is_new(owner, name):
            self._owners.append(owner)
            self._names.append(name)
            self._attributes.append(value)
        return value

    def entry(self, table: Any, key: Any) -> Any:
        """Add which object a table, a list or a namespace has at a key; return it."""
        value = table[key]
        if self._is_new(table, (key,)):
            self._tables.append(table)
            self._keys.append(key)
            self._entries.append(value)
        return value

    def absence(self, space: Mapping[str, Any], name: str) -> None:
        """Add that a namespace does not have a name."""
        if self._is_new(space, (name,)):
            self._spaces.append(space)
            self._absent.append(name)

    def size(self, items: Collection[Any]) -> None:
        """Add how many items something has."""
        if self._is_new(items, len):
            self._counted.append(items)
            self._counts.append(len(items))

    def content(self, items: Any) -> None:
        """Add all entries of a table or list, their order, and that there are no more."""
        if isinstance(items, dict) and self._is_new(items, list):
            self._ordered.append(items)
            self._orders.append([*items])
        self.size(items)
        for key in items if isinstance(items, Mapping) else range(len(items)):
            self.entry(items, key)

    def namespace(self, cls: type) -> None:
        """Add everything that a class itself has."""
        if self._is_new(cls, vars):
            self._alive.append(cls)
            self.content(vars(cls))

    def hold(self) -> bool:
        """Return whether all of them hold now."""
        try:
            return (
                all(map(is_, map(getattr, self._owners, self._names), self._attributes))
                and all(map(is_, map(getitem, self._tables, self._keys), self._entries))
                and [*map(len, self._counted)] == self._counts
                and [*map(list, self._ordered)] == self._orders
                and not any(map(contains, self._spaces, self._absent))
            )
        except Exception:  # something is gone
            return False

    def _is_new(self, owner: Any, key: Any) -> bool:
        before = len(self._seen)
        self._seen.add((id(owner), key))
        return len(self._seen) > before
