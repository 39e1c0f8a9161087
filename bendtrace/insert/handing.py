"""Values that an observer may keep without copying them.

Observers that are called after a compiled run receive tensors that the graph returned for them. If
nobody else has such a tensor, nor its memory, the first observer that wants a copy takes it as it
is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class _FreeValues(threading.local):
    identities: set[int] = frozenset()  # type: ignore[assignment]


_handed = _FreeValues()


def hand_over(values: Iterable[Tensor]) -> None:
    """Let observers that this thread calls take some tensors, and no other ones.

    The caller keeps them alive as long, and takes them back with `hand_over(())`.
    """
    _handed.identities = {*map(id, values)}


def takes(value: Any) -> bool:
    """Return whether the caller may keep a value without a copy; from now on, nobody else may."""
    found = _handed.identities
    if id(value) not in found:
        return False
    found.discard(id(value))
    return True
