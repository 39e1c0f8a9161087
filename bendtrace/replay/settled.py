"""Which parts need not be asked one by one whether they are what they were.

A model consists of dicts that live as long as it does. What they hold is another thing only if
they were written to, which their versions tell, and much of it cannot change in itself.
"""

from __future__ import annotations

from bendtrace.recording.parts import Access, Part, PartKind
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis

__all__ = ["Settled"]


class Settled:
    """The parts of a run's surroundings, sorted by how they are checked.

    Args:
        recording: the run.
        analysis: its guards, sorted.
        marked: state tensors on which the run sets attributes that were not there.
        ignored: parts that are not checked.

    Attributes:
        children: parts by the index of what holds them.
        counted: dicts of which the number of entries is asked each time.
        versioned: dicts of which the version is, those of modules' attributes first, with what
            they hold that cannot change without another version.
        hollow: empty containers in such dicts.
        tables: tables of parameters or buffers, which are asked for the types in them alone.
        simple: what else is usually the very object that it was, which the interpreter finds out
            without bytecode.
        module_of: modules by the identity of the dict that has their attributes.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        marked: set[Part],
        ignored: frozenset[Part],
    ) -> None:
        parts = recording.surroundings.parts
        self._analysis, self._marked, self._ignored = analysis, marked, ignored
        self.children: dict[int, list[Part]] = {}
        for part in parts:
            if part.parent is not None:
                self.children.setdefault(part.parent.index, []).append(part)
        self.module_of = {id(vars(p.value)): p for p in parts if p.kind is PartKind.MODULE}
        self.counted: list[Part] = []
        self.hollow: list[Part] = []
        self._following: set[int] = set()  # parts that follow from the version of a dict
        self.versioned = self._versioned(parts)
        self.tables = [table for table, _ in self.versioned if self._is_table(table)]
        self.simple = [part for part in parts if self._is_simple(part)]

    def covered(self) -> set[int]:
        """Return the identities of the parts that are not asked one by one each time."""
        inside = (part for table in self.tables for part in self.children[table.index])
        return self._following | {id(part) for part in (*self.simple, *self.counted, *inside)}

    def _versioned(self, parts: list[Part]) -> list[tuple[Part, list[Part]]]:
        held: dict[int, tuple[Part, list[Part]]] = {}
        for part in parts:
            if part.access is Access.FIXED:
                # Each module has many empty tables: that they are is found out in one go.
                if part.kind is PartKind.DICT and (not part.size or type(part.value) is not dict):
                    if part not in self._ignored:
                        self.counted.append(part)
                elif type(part.value) is dict and part.kind in (PartKind.DICT, PartKind.IDENTITY):
                    held[part.index] = part, []
                continue
            root = self._root_of(part)
            if root is not None and root.index in held and part not in self._ignored:
                held[root.index][1].append(part)
                self._following.add(id(part))
            elif self._is_hollow(part) and part.parent is not None and part.parent.index in held:
                self.hollow.append(part)
                self._following.add(id(part))
        hosts = {part.parent.index for part in self.hollow if part.parent is not None}
        versioned = [
            (part, parts)
            for part, parts in held.values()
            if parts
            or (part.kind is PartKind.DICT and part not in self._ignored)
            or part.index in hosts
        ]
        self._following |= {id(part) for part, _ in versioned}
        versioned.sort(key=lambda item: id(item[0].value) not in self.module_of)
        return versioned

    def _is_table(self, table: Part) -> bool:
        held = self.children.get(table.index, ())
        if len(held) != table.size:
            return False
        asked = self._analysis.typed_state | self._analysis.ranked_state | self._marked
        tensors = {part for part in held if part.kind is PartKind.TENSOR}
        nothing = all(part.value is None for part in held if part not in tensors)
        free = tensors.isdisjoint(asked) and self._ignored.isdisjoint(held)
        return bool(tensors) and nothing and free

    def _root_of(self, part: Part) -> Part | None:
        """Return the fixed dict that holds a part which changes with an entry of it alone."""
        if part.access is not Access.ITEM or part.parent is None:
            return None
        if not self._is_steady(part):
            return None
        holder = part.parent
        if holder.access is Access.FIXED:
            return holder
        # What a tuple holds is the same for as long as it is the same tuple.
        return self._root_of(holder) if holder.kind is PartKind.TUPLE else None

    def _is_hollow(self, part: Part) -> bool:
        """Whether a part is an empty container in a fixed dict.

        What holds plain values now may hold tensors the next time, so that it is not kept, but
        taken from where it is each time.
        """
        return (
            part.access is Access.ITEM
            and part.parent is not None
            and part.parent.access is Access.FIXED
            and part.type in (dict, list, set)
            and part.kind in (PartKind.DICT, PartKind.LIST, PartKind.SET)
            and not part.size
            and part not in self._ignored
        )

    def _is_steady(self, part: Part) -> bool:
        """Whether a part cannot change itself, other than by another thing in its place."""
        if part.kind is PartKind.ALIAS:
            return part.value.kind in (PartKind.MODULE, PartKind.IDENTITY)
        if part.kind in (PartKind.TUPLE, PartKind.SET):
            return part.type in (tuple, frozenset)
        return part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)

    def _is_simple(self, part: Part) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (PartKind.DICT, PartKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)
            and id(part) not in self._following
            and part not in self._ignored
        )
