"""The insertions of the bends of a model, in the order in which the bends were made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from bendtrace.interject.bends.catalogue import Catalogue
from bendtrace.interject.bends.handle import Source
from bendtrace.interject.bends.spec import BendSpec
from bendtrace.interject.bends.versions import Versions
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.plan import State
from bendtrace.interject.resolver import describe_where

__all__ = ["Owner", "Sources"]


class Owner(Protocol):
    """A model that accepts insertions."""

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """All active insertions."""

    def interject(self, where: Any, what: Any, *, allow_none: bool = False) -> Insertion:
        """Insert something."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""


class Sources:
    """The bends of one model, and their insertions.

    A version of the weights comes first, so that bends apply to the weights of any version.

    Args:
        owner: where they are inserted.
        catalogue: the values that can be bent.
        versions: the versions of the weights.
    """

    def __init__(self, owner: Owner, catalogue: Catalogue, versions: Versions) -> None:
        self._owner = owner
        self._catalogue = catalogue
        self._versions = versions
        self._version: Insertion | None = None
        self._held: tuple[str, ...] = ()
        self._sources: tuple[Source, ...] = ()

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def kept(self) -> Any:
        """Return the part of their state that a copy of the model needs."""
        numbers = {id(made): number for number, made in enumerate(self._owner.insertions)}
        version = None if self._version is None else numbers[id(self._version)]
        rows = [
            (
                source.spec, source.allow_none, source.without,
                [numbers[id(made)] for made in source.insertions],
            )
            for source in self._sources
        ]  # fmt: skip
        return version, self._held, rows

    def restore(self, kept: Any) -> None:
        """Restore the result of `kept`, if the same insertions exist."""
        version, self._held, rows = kept
        every = self._owner.insertions
        self._version = None if version is None else every[version]
        sources = []
        for spec, allow_none, without, numbers in rows:
            source = Source(spec, allow_none)
            source.without = without
            source.insertions = tuple(every[number] for number in numbers)
            sources.append(source)
        self._sources = tuple(sources)

    def add(self, sources: list[Source]) -> None:
        """Add bends: all of them, or none if one fails."""
        try:
            for source in sources:
                self._place(source)
        except Exception:
            for source in sources:
                source.lift()
            raise
        self._sources = (*self._sources, *sources)

    def remove(self, source: Source) -> None:
        """Remove one bend."""
        source.lift()
        self._sources = tuple(other for other in self._sources if other is not source)

    def set(self, sources: tuple[Source, ...]) -> None:
        """Use these bends, and no others."""
        for source in self._sources:
            source.lift()
        self._sources = sources
        self.renew()

    def renew(self) -> None:
        """Insert everything anew."""
        for source in self._sources:
            source.lift()
        if self._version is not None:
            self._version.remove()
        needed, self._version = self._versions.needed, None
        if needed:
            self._version = self._owner.interject(list(map(State, needed)), self._versions)
        self._held = needed
        for source in self._sources:
            self._place(source)

    def change_version(self) -> None:
        """Insert the version of the weights in use."""
        if self._versions.needed != self._held:
            self.renew()

    def where(self, spec: BendSpec, without: frozenset[str] = frozenset()) -> list[Any]:
        """Return where the patterns of a bend apply."""
        selector = self._catalogue.selector(spec, without)
        found: list[Any] = [] if selector is None else [selector]
        found += self._catalogue.inputs(spec, without)
        return found + [State(name) for name in self._catalogue.weights(spec, without)]

    def _place(self, source: Source) -> None:
        spec, owner = source.spec, self._owner
        insertions = []
        named = self.where(spec, source.without)
        others = [item for item in spec.others if describe_where(item) not in source.without]
        if others:
            made = owner.interject(others, spec.callback, allow_none=source.allow_none)
            insertions.append(made)
        if named:  # it is known that they match something, or may
            insertions.append(owner.interject(named, spec.callback, allow_none=True))
        source.insertions = tuple(insertions)
