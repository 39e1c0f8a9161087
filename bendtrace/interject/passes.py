"""The passes of a node in which an insertion is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from bendtrace.errors import InputError

__all__ = ["PassNumbers", "Passes"]

# Numbers counted from 0, or from the end if negative; a predicate of the number; None for all.
PassNumbers: TypeAlias = int | Iterable[int] | Callable[[int], bool] | None


class Passes:
    """Selects passes of a node.

    Args:
        numbers: the numbers of passes, counted from 0, or from the end if negative; a predicate of
            the number; None for all.
        every: select only every n-th pass, beginning with the first.
        option: the name of the argument that has the numbers, for errors.

    Attributes:
        is_asked: whether a user function decides, which may decide differently the next time.
        admits_all: whether every pass is selected.
        needs_total: whether the total number of passes has to be known.

    Raises:
        InputError: an argument is invalid.
    """

    def __init__(
        self,
        numbers: PassNumbers = None,
        every: int | None = None,
        option: str = "passes",
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise InputError(f"every= has to be a positive int, not {every!r}")
        self._every = every or 1
        self._predicate: Callable[[int], bool] | None = None
        self._numbers: frozenset[int] | range | None = None
        if callable(numbers):
            self._predicate = numbers
        elif isinstance(numbers, range):
            self._numbers = numbers
        elif numbers is not None:
            self._numbers = frozenset(_ints(numbers, option))
        self.is_asked: bool = callable(numbers)
        self.admits_all: bool = numbers is None and every in (None, 1)
        self.needs_total: bool = self._numbers is not None and any(
            number < 0 for number in self._numbers
        )

    def admits(self, number: int, total: int | None) -> bool:
        """Return whether a pass is selected.

        Args:
            number: the pass.
            total: the total number of passes; None if unknown.
        """
        if number % self._every:
            return False
        if self._predicate is not None:
            return bool(self._predicate(number))
        if self._numbers is None or number in self._numbers:
            return True
        return self.needs_total and total is not None and number - total in self._numbers

    def __repr__(self) -> str:
        every = f", every {self._every}" if self._every > 1 else ""
        if self._predicate is not None:
            return f"passes by {self._predicate!r}{every}"
        if self._numbers is None:
            return f"all passes{every}"
        return f"passes {sorted(self._numbers)}{every}"


def _ints(numbers: Any, option: str) -> list[int]:
    listed = [numbers] if isinstance(numbers, int) else numbers
    try:
        listed = list(listed)
    except TypeError:
        listed = [listed]
    for number in listed:
        if type(number) is not int:
            raise InputError(
                f"{option}= takes numbers of {option}, or a function from the number to a bool, "
                f"not {number!r}"
            )
    return listed
