"""What has been bent, and the handle on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from bendtrace.errors import NeverFiredWarning
from bendtrace.interject.bends.spec import BendSpec
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.report import Report

__all__ = ["BendHandle", "Restoring", "Source"]


class Source:
    """One callback, and what stands for it in the model at the moment.

    Attributes:
        spec: the callback, and what it is to bend.
        allow_none: whether that may be nothing.
        without: names of what it bends no longer.
        insertions: what is inserted for it now.
        former: what was inserted for it before, for the reports.
    """

    def __init__(self, spec: BendSpec, allow_none: bool) -> None:
        self.spec = spec
        self.allow_none = allow_none
        self.without: frozenset[str] = frozenset()
        self.insertions: tuple[Insertion, ...] = ()
        self.former: list[Insertion] = []

    def lift(self) -> None:
        """Take out what is inserted for it."""
        for insertion in self.insertions:
            insertion.remove()
        self.former += [i for i in self.insertions if i.report().rows]
        self.insertions = ()

    def report(self) -> Report:
        """Say what it has bent so far."""
        every = [insertion.report() for insertion in (*self.former, *self.insertions)]
        rows = tuple(row for report in every for row in report.rows)
        notes = () if rows else tuple(dict.fromkeys(n for r in every for n in r.notes))
        where = ", ".join(map(repr, self.spec.where))
        return Report(self.spec.callback.label, where, rows, notes)


class BendHandle:
    """A bend, until it is removed: of one callback, or of all those of a configuration.

    Also a context manager, at whose end it is removed; a `NeverFiredWarning` says so if no run
    came by anything that it bends.
    """

    def __init__(self, sources: Sequence[Source], remove: Callable[[Source], None]) -> None:
        self._sources = tuple(sources)
        self._remove = remove

    @property
    def active(self) -> bool:
        """Whether any of it is in the model."""
        return any(source.insertions for source in self._sources)

    def remove(self) -> None:
        """Bend no more. Doing so twice is no error."""
        for source in self._sources:
            self._remove(source)

    def reports(self) -> tuple[Report, ...]:
        """Say for each callback at which nodes it was called, and whether it changed anything."""
        return tuple(source.report() for source in self._sources)

    def report(self) -> Report:
        """Say at which nodes the callback was called, or the callbacks were."""
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
        return f"<bend {shown}{'' if self.active else ', removed'}>"


class Restoring:
    """What was set stays set; as a context manager, what was before comes back at the end."""

    def __init__(self, restore: Callable[[], Any]) -> None:
        self._restore = restore

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
