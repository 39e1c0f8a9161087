"""Which insertions a run is made with, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from bendtrace.interject.interjection import Interjection, NodePass
from bendtrace.interject.passes import Passes
from bendtrace.paths.candidates import Candidate
from bendtrace.recording.recorder import Recording

__all__ = ["Entry", "Matcher", "Place", "Placed", "Plan", "Slot", "State"]


class Matcher(Protocol):
    """Says which nodes a place is at. A value: two that mean the same are equal."""

    needs_output: bool
    is_broad: bool

    def matches(self, node: Candidate) -> bool:
        """Whether it is at a node."""


class Placed(Protocol):
    """An insertion, as far as the gates know it."""

    allow_none: bool

    @property
    def passes(self) -> Passes:
        """In which passes of a node it is called."""

    def fired(self, at: NodePass, changed: bool) -> None:
        """Note that it was called."""

    def fired_backward(self, at: NodePass) -> None:
        """Note that it was told of gradients."""

    def failed(self) -> None:
        """Note that something has raised where it is called."""

    def is_known_to_change(self, path: str) -> bool:
        """Whether it has changed a value at a node."""

    def ran(self, recording: Recording) -> None:
        """Note that a call took a path."""


@dataclass(frozen=True)
class State:
    """A parameter or buffer.

    Attributes:
        name: its qualified name.
        holder: path of the call of a module in whose code it is used; None for everywhere.
    """

    name: str
    holder: str | None = None


@dataclass(frozen=True)
class Place:
    """Where an insertion is.

    Attributes:
        role: at what nodes give, at an input of a module, or at a parameter or buffer.
        matcher: at which nodes; for parameters and buffers a `State`.
        argument: name of the input.
        dig: keys that lead into the value.
        shown: the path as people write it; only where it is one.
    """

    role: Literal["node", "input", "state"]
    matcher: Any
    argument: str = ""
    dig: tuple[Hashable, ...] = ()
    shown: str = field(default="", compare=False)

    def is_below(self, prefix: str, names: frozenset[str]) -> bool:
        """Whether it is at nodes known by paths, of which one leads through some names.

        Args:
            prefix: what the path begins with.
            names: the names that come next.
        """
        paths = getattr(self.matcher, "paths", (getattr(self.matcher, "path", None),))
        return any(
            path is not None
            and path.startswith(prefix)
            and path.removeprefix(prefix).partition(".")[0] in names
            for path in paths
        )


class Slot(NamedTuple):
    """What insertions have in common that one trace can serve by turns.

    Attributes:
        place: where they are.
        forms: what they do there: which methods of `Interjection` they override.
    """

    place: Place
    forms: frozenset[str]


class Entry:
    """An insertion at one of its places.

    Attributes:
        insertion: the insertion.
        what: what it does.
        place: the place.
        slot: what it has in common with others.
    """

    __slots__ = (
        "after", "backward", "before", "dig", "insertion", "instead", "place", "slot",
        "wants_inputs", "what",
    )  # fmt: skip

    def __init__(self, insertion: Placed, what: Interjection, place: Place) -> None:
        self.insertion = insertion
        self.what = what
        self.place = place
        self.dig = place.dig
        forms = forms_of(what)
        if insertion.allow_none:  # it may be at nodes that nothing can be inserted at
            forms |= {"permits"}
        self.slot = Slot(place, forms)
        self.before = "before" in forms
        self.instead = "instead" in forms
        self.after = "after" in forms
        self.backward = "backward" in forms
        self.wants_inputs = "inputs" in forms


def forms_of(what: Interjection) -> frozenset[str]:
    """Say what an interjection does at a node."""
    forms = set(what._forms())
    if what.wants_inputs:
        forms.add("inputs")
    if what.observes:
        forms.add("observes")
    if what.blind:
        forms.add("blind")
    return frozenset(forms)


class Plan:
    """The insertions of a run: never changed once it is made.

    Args:
        entries: the insertions at their places, in the order in which they were made; those
            that come late are put last.
        totals: how many passes each node has without insertions, if that matters.

    Attributes:
        entries: as given.
        totals: as given.
        slots: their slots, without repetitions.
        key: what makes the traces of two plans interchangeable.
        called_at: which entries the gates of traces call, as far as they were asked.
        compiled: what compiled paths know of it (see `compiling.py`).
    """

    def __init__(self, entries: Sequence[Entry], totals: dict[str, int] | None = None) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry.what.late))
        self.totals = totals or {}
        self.slots = tuple(dict.fromkeys(entry.slot for entry in self.entries))
        self.key = frozenset(self.slots)
        # By the identity of gates, with the gate itself so that no identity is used twice.
        self.called_at: dict[int, tuple[Any, tuple[Entry, ...]]] = {}
        self.compiled: object = None
        self._looked: dict[int, tuple[Recording, bool]] = {}
        self._entries_of: dict[tuple[Slot, ...], tuple[Entry, ...]] = {}

    def looks_at_changes(
        self, recordings: list[Recording], looks: Callable[[Plan, Recording], object]
    ) -> bool:
        """Whether something of the plan might look at what one of some runs changes.

        Args:
            recordings: the runs.
            looks: says so for one run.
        """
        for recording in recordings:
            if recording.changes:
                known = self._looked.get(id(recording))
                if known is None:
                    known = self._looked[id(recording)] = recording, bool(looks(self, recording))
                if known[1]:
                    return True
        return False

    def ran(self, recording: Recording) -> None:
        """Note on all insertions that a call took a path."""
        for entry in self.entries:
            entry.insertion.ran(recording)

    def entries_of(self, slots: tuple[Slot, ...]) -> tuple[Entry, ...]:
        """Return the insertions that belong in some slots."""
        known = self._entries_of.get(slots)
        if known is None:
            wanted = frozenset(slots)
            # An insertion can be meant in two ways at one node; it is called once.
            once = {
                (id(entry.insertion), entry.place.role, entry.place.argument, entry.dig): entry
                for entry in reversed(self.entries)
                if entry.slot in wanted
            }
            known = self._entries_of[slots] = tuple(reversed(once.values()))
        return known

    def slots_at(self, role: str, node: Candidate) -> tuple[Slot, ...]:
        """Return the slots at a node, but for those that need to know what it gives."""
        return tuple(
            slot
            for slot in self.slots
            if slot.place.role == role
            and not slot.place.matcher.needs_output
            and slot.place.matcher.matches(node)
        )

    def slots_after(self, node: Candidate) -> tuple[Slot, ...]:
        """Return the slots at a node that need to know what it gives."""
        return tuple(
            slot
            for slot in self.slots
            if slot.place.role == "node"
            and slot.place.matcher.needs_output
            and slot.place.matcher.matches(node)
        )

    def states(self) -> dict[str, tuple[Slot, ...]]:
        """Return the slots at parameters and buffers, by their qualified names."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            if slot.place.role == "state":
                found.setdefault(slot.place.matcher.name, []).append(slot)
        return {name: tuple(slots) for name, slots in found.items()}
