"""What an insertion has returned: whether it fits, and what it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bendtrace.errors import InterjectionError
from bendtrace.interject.interjection import Inputs, NodePass
from bendtrace.interject.plan import Entry
from bendtrace.interject.structure import (
    Mismatch,
    Shape,
    collect,
    differ,
    holds_same,
    take_apart,
    version_of,
)


class Containers:
    """What the insertions of a gate have done to lists, dicts and objects.

    Attributes:
        are_kept: whether an insertion has returned those that it was given.
        are_changed: whether one of these has changed them.
        others: the structures of which others were returned.
    """

    are_changed: bool

    are_kept: bool

    def __init__(self) -> None:
        self.are_kept = self.are_changed = False
        self.others: list[Any] = []

    def settle(
        self, shapes: tuple[Any, ...], given: tuple[Any, ...], results: tuple[Any, ...],
        found: list[Any], at: NodePass, entry: Entry,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Note whether lists and dicts that an insertion was given have to be updated in place.

        Args:
            shapes: the structures of the values that it was given.
            given: these values.
            results: what it returned in their place.
            found: the tensors and numbers of these values, as they were before it was called.
            at: the pass.
            entry: the insertion.

        Returns:
            The results, and what was given for those that are None.

        Raises:
            InterjectionError: it has changed some in place, and returned others.
        """
        results = tuple(
            value if result is None and type(shape) is Shape else result
            for shape, value, result in zip(shapes, given, results, strict=False)
        )
        are_kept = all(map(holds_same, shapes, given, results))
        now = list(found)
        try:
            for shape, value in zip(shapes, given, strict=True):
                collect(shape, value, now)
            is_changed = any(new is not old for new, old in zip(now, found, strict=True))
        except Mismatch:
            is_changed = True
        if not are_kept:
            self.others.append(shapes)
        elif self.others and all(other != shapes for other in self.others):
            are_kept = False
        self.are_kept = self.are_kept or are_kept
        if is_changed and are_kept and not self.others:
            self.are_changed = True
        if (is_changed or self.are_changed) and not are_kept:
            raise InterjectionError(
                f"{entry.what.label} at {at.path or '<root>'} changed a list, dict or object that "
                "it was given in place, and returned another one: return the one that it changed, "
                "or change none",
                at.path,
            )
        return results


class Observed:
    """A node that an insertion may or may not call, and the outcome.

    Args:
        call: the node.
        given: its original arguments.
    """

    def __init__(self, call: Callable[..., Any], given: Inputs) -> None:
        self.given = given
        self._call = call
        self._versions = _versions((given, given.kwargs))
        self._calls = 0
        self._gave: tuple[Any, list[int]] | None = None  # in a call with just what was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the node."""
        self._calls += 1
        mine, theirs = self.given.kwargs, (*args, *kwargs.values())
        is_as_given = (
            len(args) == len(self.given)
            and list(kwargs) == list(mine)
            and all(
                new is old for new, old in zip(theirs, (*self.given, *mine.values()), strict=True)
            )
            and _versions((self.given, mine)) == self._versions
        )
        result = self._call(*args, **kwargs)
        self._gave = (result, _versions(result)) if is_as_given else None
        return result

    def gave(self, value: Any) -> bool:
        """Whether a value is what the node gave, called once with just what was given."""
        if self._gave is None or self._calls > 1:
            return False
        return value is self._gave[0] and _versions(value) == self._gave[1]


def collect_returned(shape: Any, result: Any, found: list[Any], at: NodePass, entry: Entry) -> None:
    """Put the tensors and numbers that an insertion returned in the place of those it was given.

    Raises:
        InterjectionError: the value does not fit.
    """
    try:
        collect(shape, result, found)
    except Mismatch as error:
        part, hint = f"{at.path}{'' if at.module is None else '.output'}|sub_0".lstrip("."), ""
        if isinstance(shape, Shape) and shape.kind in (tuple, list):
            hint = f"; to change one part of it, name the part: {part!r}"
        said = f"{entry.what.label} at {at.path or '<root>'} returned a value that cannot replace"
        raise InterjectionError(f"{said} the node's value: {error}{hint}", at.path) from None


def changed(
    entry: Entry, at: NodePass, before: list[Any], found: list[Any], versions: list[int]
) -> bool:
    """Return whether an insertion has returned another value, or changed one in place."""
    written = any(version_of(old) != version for old, version in zip(before, versions, strict=True))
    other = [(old, new) for old, new in zip(before, found, strict=True) if new is not old]
    if entry.what.observes and (written or other):
        raise InterjectionError(
            f"{entry.what.label} at {at.path or '<root>'} declares observes=True, but changed "
            "a value",
            at.path,
        )
    if written or entry.insertion.is_known_to_change(at.path):
        return written or bool(other)
    return any(differ(old, new) for old, new in other)


def _versions(value: Any) -> list[int]:
    return [version_of(tensor) for tensor in take_apart(value, objects=False)[1]]
