"""One bend, as requested by the user."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend

__all__ = ["BendSpec", "compiled"]


@dataclass(frozen=True)
class BendSpec:
    """A callback, and what it bends.

    Attributes:
        callback: the callback.
        where: patterns, and other locations of insertions.
        weights: whether the patterns apply to weights: None for weights with a matching full name.
        activations: whether the patterns apply to activations.
    """

    callback: Bend
    where: tuple[Any, ...]
    weights: bool | None = None
    activations: bool = True

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """The patterns."""
        return [compiled(item) for item in self.where if isinstance(item, (str, re.Pattern))]

    @property
    def others(self) -> list[Any]:
        """The locations that are not patterns."""
        return [item for item in self.where if not isinstance(item, (str, re.Pattern))]


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that can be matched.

    Raises:
        InputError: it is not a regular expression, or is empty.
    """
    try:
        made = re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    if not made.pattern:
        raise InputError("the empty pattern matches every name: write '.*' for all of them")
    return made
