"""What a walk has found that a run can read."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from bendtrace.recording.contents import Places
from bendtrace.recording.parts import Part
from bendtrace.recording.reach import place_naming
from bendtrace.recording.stamps import Depends
from bendtrace.recording.world import World

__all__ = ["Found"]


class Found:
    """The parts that a run can read, and what else was learnt on the way to them.

    Args:
        function: the module or function to be run.
        plain_numbers: whether numbers among the arguments must not be traced.

    Attributes:
        function: as given.
        plain_numbers: as given.
        parts: everything found; parents before children.
        arguments: the parts that are, or are held by, arguments.
        own: the parts that no other run has.
        by_id: parts by the identity of what they are.
        held: what containers held, by index of their part.
        places: where to look whether they still hold it, all at once.
        contents: what was there.
        bare: tensors without attributes of their own.
        alone: what else has content that is looked at one by one.
        blockers: what was found that no guard can watch, one line each.
        module_paths: qualified name of each module, by identity.
        hook_dicts: the modules' own tables of hooks.
        hook_tables: of each the module's label, the table's name and what it held.
        names: all names that the code of the model uses, as far as it is known.
        stores: names of the attributes that it assigns, likewise.
        functions: the code of the model, likewise.
        tells_numbers: whether some of that code asks for the exact type of a number.
        computes: whether some of that code looks attributes up by names that it computes.
        asks_tags: whether some of the user's asks for attributes that may not be there.
        missing: globals that some of it names and that are not there.
        namespaces: those of the classes of the model, with the names in them.
        helpers: classes of other objects, with the members that are used.
        caches: each `functools.lru_cache`, with its label and how often it had no answer.
        generators: the parts that are random generators.
        depends: what the code that was looked at depends on.
        world: what else is watched, by its content.
    """

    def __init__(self, function: Callable[..., Any], plain_numbers: bool) -> None:
        self.function = function
        self.plain_numbers = plain_numbers
        self.parts: list[Part] = []
        self.arguments: list[Part] = []
        self.own = self.parts
        self.by_id: dict[int, Part] = {}
        self.held: dict[int, dict[Any, Any]] = {}
        self.places = Places((), {})
        self.contents = self.places.read()
        self.bare: list[Part] = []
        self.alone: list[Part] = []
        self.blockers: list[str] = []
        self.module_paths: dict[int, str] = {}
        self.hook_dicts: list[dict[Any, Any]] = []
        self.hook_tables: list[tuple[str, str, tuple[tuple[Any, Any], ...]]] = []
        self.names: frozenset[str] = frozenset()
        self.stores: frozenset[str] = frozenset()
        self.functions: list[types.FunctionType] = []
        self.tells_numbers = False
        self.computes = False
        self.asks_tags = False
        self.missing: list[tuple[Mapping[str, Any], str]] = []
        self.namespaces: dict[int, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self.helpers: dict[type, frozenset[str]] = {}
        self.caches: list[tuple[str, functools._lru_cache_wrapper[Any], int]] = []
        self.generators: list[Part] = []
        self.depends = Depends()
        self.world: World

    @property
    def hooks(self) -> list[tuple[Any, ...]]:
        """What the modules' tables of hooks held before the run, in the order of `hook_dicts`."""
        return [items for _, _, items in self.hook_tables]

    def find(self, thing: Any) -> Part | None:
        """Return the part that `thing` is, or None if the run did not begin with it."""
        part = self.by_id.get(id(thing))
        return part if part is not None and part.value is thing else None

    def place_of(self, label: str) -> str:
        """Say where the model's code stores to what has a label, or mentions it; "" if nowhere."""
        name = label.rpartition(".")[2].partition("[")[0]
        return place_naming(name, self.functions)

    def block(self, reason: str, label: str) -> None:
        """Note what no guard can watch, with where the code mentions what has that label."""
        place = self.place_of(label)
        self.blockers.append(f"{reason} (see {place})" if place else reason)
