"""Which of many cases the default run has: `--all` runs the others, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["some"]


def some(
    values: Iterable[Any],
    each: int = 0,
    *,
    start: int = 0,
    chosen: Callable[[Any], bool] | Iterable[Any] = (),
) -> list[Any]:
    """Mark all but some of the values to parametrize with as for `--all`.

    Args:
        values: the cases; a tuple is one case with several arguments.
        each: every so manieth stays in the default run; none if it is 0.
        start: where to begin to count, so that sweeps of the same models take different ones.
        chosen: what also stays, or what says so of a value.
    """
    stays = chosen if callable(chosen) else list(chosen).__contains__
    found = []
    for number, value in enumerate(values):
        arguments = value if type(value) is tuple else (value,)
        if (each and number % each == start) or stays(value):
            found.append(pytest.param(*arguments))
        else:
            found.append(pytest.param(*arguments, marks=pytest.mark.all))
    return found
