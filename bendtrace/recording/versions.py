"""Versions of dicts: whether one has been written to since it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import _dynamo

__all__ = ["TELLS_CHANGES", "version_of"]


def _never_the_same(table: dict[Any, Any]) -> object:
    """Take a dict to have been written to each time, where its version cannot be asked for."""
    return object()


class _Thing:
    """What has a `__dict__`."""


def _tells_changes(version: Callable[[dict[Any, Any]], Any]) -> bool:
    """Whether versions differ after each way of writing to a dict, and not otherwise."""
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


def _found() -> Callable[[dict[Any, Any]], Any]:
    # CPython counts what it writes to dicts (up to 3.11), or tells those who watch them (since
    # 3.12); torch.compile's guards ask for it in either case. Seen in torch 2.13 to 2.15;
    # test_versions.py notices what does not hold any more, and so does this, at once.
    version = getattr(_dynamo.guards, "dict_version", None)
    try:
        if version is not None and _tells_changes(version):
            return version  # type: ignore[no-any-return]
    except Exception:  # it takes something else, or gives something that has no order
        pass
    return _never_the_same


# Returns what differs whenever an exact dict has been written to in between: no two states of all
# dicts ever have the same version. Equal versions say that each key has the very same object.
version_of: Callable[[dict[Any, Any]], Any] = _found()
# Whether versions can be asked for; else they always differ.
TELLS_CHANGES = version_of is not _never_the_same
