"""Active bends, and the handles that remove them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bendtrace.errors import InputError, NeverFiredWarning
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.insertion import Insertion, Report

__all__ = ["BendHandle", "BendSpec", "Restoring", "Source", "compiled"]


class Source:
    """One callback, and its current insertions in the model.

    Attributes:
        spec: the callback, and what it bends.
        allow_none: whether that may be nothing.
        without: names that it bends no longer.
        insertions: its current insertions.
        former: its earlier insertions, for the reports.
    """

    def __init__(self, spec: BendSpec, allow_none: bool) -> None:
        self.spec = spec
        self.allow_none = allow_none
        self.without: frozenset[str] = frozenset()
        self.insertions: tuple[Insertion, ...] = ()
        self.former: list[Insertion] = []

    def lift(self) -> None:
        """Remove its insertions."""
        for insertion in self.insertions:
            insertion.remove()
        self.former += [i for i in self.insertions if i.report().rows]
        self.insertions = ()

    def report(self) -> Report:
        """Return a report of what it has bent so far."""
        every = [insertion.report() for insertion in (*self.former, *self.insertions)]
        rows = tuple(row for report in every for row in report.rows)
        notes = () if rows else tuple(dict.fromkeys(n for r in every for n in r.notes))
        where = ", ".join(map(repr, self.spec.where))
        return Report(self.spec.callback.label, where, rows, notes)


class BendHandle:
    """A bend that is active until removed: one callback, or all of a configuration.

    It is also a context manager that removes the bend at its end. A `NeverFiredWarning` is issued
    if no run reached anything that it bends.
    """

    def __init__(self, sources: Sequence[Source], remove: Callable[[Source], None]) -> None:
        self._sources = tuple(sources)
        self._remove = remove

    @property
    def active(self) -> bool:
        """Whether any part of it is active."""
        return any(source.insertions for source in self._sources)

    def remove(self) -> None:
        """Stop bending. Further calls have no effect."""
        for source in self._sources:
            self._remove(source)

    def reports(self) -> tuple[Report, ...]:
        """Return for each callback where it was called, and whether it changed anything."""
        return tuple(source.report() for source in self._sources)

    def report(self) -> Report:
        """Return the nodes where the callbacks were called, and whether they changed anything."""
        every = self.reports()
        if len(every) == 1:
            return every[0]
        return Report(
            ", ".join(report.label for report in every),
            "; ".join(report.where for report in every),
            tuple(row for report in every for row in report.rows),
            tuple(dict.fromkeys(note for report in every for note in report.notes)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reports = self.reports()
        self.remove()
        if kind is not None:
            return
        for source, report in zip(self._sources, reports, strict=True):
            if not report.rows and not source.allow_none:
                why = "; ".join(report.notes)
                warnings.warn(
                    NeverFiredWarning(
                        f"{report.label} at {report.where} was never called"
                        f"{f': {why}' if why else ''}"
                    ),
                    stacklevel=2,
                )

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{source.spec.callback!r} at {', '.join(map(repr, source.spec.where))}"
            for source in self._sources
        )
        return f"<bend {shown}, {'active' if self.active else 'removed'}>"


class Restoring:
    """A setting that stays; as a context manager, it restores the earlier setting at the end."""

    def __init__(self, restore: Callable[[], Any]) -> None:
        self._restore = restore

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()


# One bend, as requested by the user.


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
