"""The insertions of a run, and their locations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from bendtrace.engine.dispatcher import Floor
from bendtrace.insert.interjection import Interjection
from bendtrace.log.path_views import Candidate
from bendtrace.record.recorder import Recording

if TYPE_CHECKING:
    from bendtrace.insert.insertion import Insertion
    from bendtrace.insert.registry import NameLookup


@dataclass(frozen=True)
class StateTensor:
    """A parameter or buffer."""

    name: str  # its qualified name
    holder: str | None = None  # path of the module call whose code uses it; None for everywhere


@dataclass(frozen=True)
class Location:
    """The location of an insertion."""

    # Outputs of nodes, an input of a module, or a parameter or buffer.
    role: Literal["node", "input", "state"]
    matcher: Any  # selects the nodes; for parameters and buffers a `StateTensor`
    argument: str = ""  # name of the input
    dig: tuple[Hashable, ...] = ()  # keys of the part inside the value
    shown: str = field(default="", compare=False)  # the path as the user writes it, if single

    def is_below(self, prefix: str, names: frozenset[str]) -> bool:
        """Return whether it is at nodes with known paths, one of which has a prefix and names."""
        paths = getattr(self.matcher, "paths", (getattr(self.matcher, "path", None),))
        return any(
            path is not None
            and path.startswith(prefix)
            and path.removeprefix(prefix).partition(".")[0] in names
            for path in paths
        )


class Slot(NamedTuple):
    """The properties shared by insertions that one trace can serve in turn."""

    place: Location  # their location
    forms: frozenset[str]  # the methods of `Interjection` that they override


class LocatedInsertion:
    """An insertion at one of its locations."""

    __slots__ = (
        "after", "backward", "before", "dig", "insertion", "instead", "place", "slot",
        "wants_inputs", "what",
    )  # fmt: skip

    def __init__(self, insertion: Insertion, what: Interjection, place: Location) -> None:
        self.insertion: Insertion = insertion
        self.what: Interjection = what
        self.place: Location = place
        self.dig: tuple[Hashable, ...] = place.dig
        forms = forms_of(what)
        if insertion.allow_none:  # it may be at nodes without support for insertions
            forms |= {"permits"}
        self.slot: Slot = Slot(place, forms)  # the properties that it shares with other insertions
        self.before: bool = "before" in forms
        self.instead: bool = "instead" in forms
        self.after: bool = "after" in forms
        self.backward: bool = "backward" in forms
        self.wants_inputs: bool = "inputs" in forms


# What a gate calls: the gate, the entries, whether only in some passes, and the entry if it is the
# only one, at a node that returns one tensor.
Called: TypeAlias = tuple[Any, tuple[LocatedInsertion, ...], bool, LocatedInsertion | None]


def forms_of(what: Interjection) -> frozenset[str]:
    """Return the methods that an interjection uses at a node."""
    forms = set(what._forms())
    if what.wants_inputs:
        forms.add("inputs")
        if not what._sees_writes:
            forms.add("copies")
    if what.observes:
        forms.add("observes")
    if what.blind:
        forms.add("blind")
    return frozenset(forms)


class InsertionPlan:
    """The insertions of a run. A plan only changes while a run is recorded that resolves names.

    The entries are in the order in which they were made; late ones are moved to the end. Totals are
    the numbers of passes of nodes without insertions, if they matter. There is no lookup if there
    are no names to resolve.
    """

    def __init__(
        self,
        entries: Sequence[LocatedInsertion],
        totals: dict[str, int] | None = None,
        lookup: NameLookup | None = None,
    ) -> None:
        self.totals: dict[str, int] = totals or {}
        self.lookup: NameLookup | None = lookup
        self.has_grown: bool = False  # whether names were resolved
        self._set(entries)

    def add(self, entries: Sequence[LocatedInsertion]) -> None:
        """Add insertions whose names the run has just resolved."""
        assert self.lookup is not None
        self.has_grown = True
        self._set(sorted([*self.entries, *entries], key=self.lookup.order))

    def _set(self, entries: Sequence[LocatedInsertion]) -> None:
        self.entries: tuple[LocatedInsertion, ...] = tuple(
            sorted(entries, key=lambda entry: entry.what.late)
        )
        self._insertions = tuple(dict.fromkeys(entry.insertion for entry in self.entries))
        self.slots: tuple[Slot, ...] = tuple(dict.fromkeys(entry.slot for entry in self.entries))
        # True if paths may join.
        self.joins: bool = not any(entry.what.needs_paths for entry in self.entries)
        # What makes the traces of two plans interchangeable.
        self.key: tuple[bool, frozenset[Slot]] = self.joins, frozenset(self.slots)
        # True if they only receive outputs of nodes (see `splicer.py`).
        self.can_be_spliced: bool = self.joins and all(map(_can_be_spliced, self.slots))
        self.sees_inputs: bool = any(not slot.forms.isdisjoint(_INPUTS) for slot in self.slots)
        # True if each is at nodes that were named, not at all that a selector finds.
        self.names_places: bool = not any(
            hasattr(slot.place.matcher, "selector") for slot in self.slots
        )
        # What gates of traces call, as far as they were asked: by the id of each, with the gate
        # itself so that its id is not reused.
        self.called_at: dict[int, Called] = {}
        self.compiled: object = None  # what compiled paths know of it (see `compiling.py`)
        self.reaches: object = None  # what their code reaches (see `state_access.py`)
        # Which calls with such insertions run the model itself, and what puts them into known code;
        # None if nobody has asked.
        self.floor: Floor | None = None
        self.splicer: Any = None
        self._looked: dict[int, tuple[Recording, bool]] = {}
        self._looked_at: list[Recording] | None = None  # those of which none matters
        self._entries_of: dict[tuple[Slot, ...], tuple[LocatedInsertion, ...]] = {}

    def looks_at_changes(
        self, recordings: list[Recording], looks: Callable[[InsertionPlan, Recording], object]
    ) -> bool:
        """Return whether an insertion might read what some run changes, or the reverse.

        `looks` decides this for one run.
        """
        if recordings is self._looked_at:
            return False
        for recording in recordings:
            cached = self._looked.get(id(recording))
            if cached is None:
                cached = self._looked[id(recording)] = recording, bool(looks(self, recording))
            if cached[1]:
                return True
        self._looked_at = recordings
        return False

    def ran(self, recording: Recording) -> None:
        """Record on all insertions that a call took a path."""
        for insertion in self._insertions:
            insertion.ran(recording)

    def entries_of(self, slots: tuple[Slot, ...]) -> tuple[LocatedInsertion, ...]:
        """Return the insertions that have some slots."""
        cached = self._entries_of.get(slots)
        if cached is None:
            wanted = frozenset(slots)
            # An insertion can select one node in two ways; it is called once.
            once = {
                (id(entry.insertion), entry.place.role, entry.place.argument, entry.dig): entry
                for entry in reversed(self.entries)
                if entry.slot in wanted
            }
            cached = self._entries_of[slots] = tuple(reversed(once.values()))
        return cached

    def slots_at(self, role: str, node: Candidate) -> tuple[Slot, ...]:
        """Return the slots at a node, except those that depend on its output."""
        here = (slot for slot in self.slots if slot.place.role == role)
        return slots_at_node((s for s in here if not s.place.matcher.needs_output), role, node)

    def slots_after(self, node: Candidate) -> tuple[Slot, ...]:
        """Return the slots at a node that depend on its output."""
        here = (slot for slot in self.slots if slot.place.role == "node")
        return slots_at_node((s for s in here if s.place.matcher.needs_output), "node", node)

    def states(self) -> dict[str, tuple[Slot, ...]]:
        """Return the slots at parameters and buffers, by their qualified names."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            if slot.place.role == "state":
                found.setdefault(slot.place.matcher.name, []).append(slot)
        return {name: tuple(slots) for name, slots in found.items()}


# Forms of insertions that receive the arguments of a node as they are passed.
_INPUTS = frozenset({"before", "instead", "inputs", "backward"})


def slots_at_node(slots: Iterable[Slot], role: str, node: Candidate) -> tuple[Slot, ...]:
    """Return the slots that are at a node."""
    return tuple(s for s in slots if s.place.role == role and s.place.matcher.matches(node))


def _can_be_spliced(slot: Slot) -> bool:
    """Return whether an insertion only receives, and perhaps replaces, whole outputs of nodes."""
    is_after = "after" in slot.forms and slot.forms <= {"after", "observes", "permits"}
    place = slot.place
    # One that is chosen by its output may be another with other arguments.
    return is_after and place.role == "node" and not (place.dig or place.matcher.needs_output)
