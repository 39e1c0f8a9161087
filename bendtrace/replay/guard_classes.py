"""Sorting the parts of an environment by how they are checked before a run.

A model consists of dicts that live as long as it does. What they hold is another thing only if
they were written to, which their versions tell, and much of it cannot change in itself.
"""

from __future__ import annotations

import types
from itertools import chain

from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.tape.structure import is_heap_type


def may_change_class(part: Captured) -> bool:
    """Whether a thing that is known by identity is an object of a class in Python."""
    if part.kind is not CaptureKind.IDENTITY or part.access is Access.ROOT:
        return False
    steady = (type, types.ModuleType, types.FunctionType, types.MethodType)
    return is_heap_type(part.type) and not isinstance(part.value, steady)


class GuardClasses:
    """The parts of a run's environment, sorted by how they are checked.

    Args:
        recording: the run.
        analysis: its guards, sorted.
        marked: state tensors on which the run sets attributes that were not there.
        ignored: parts that are not checked.

    Attributes:
        children: parts by the index of what holds them.
        counted: dicts of which the number of entries is asked each time.
        of_model: dicts of the model of which the version is, those of modules' attributes first,
            with what they hold that cannot change without another version.
        of_spaces: the same for namespaces of Python modules, to which all code may write.
        hollow: empty containers in such dicts.
        tables: tables of parameters or buffers, of which only classes and ranks are asked.
        simple: what else is usually the very object that it was, which the interpreter finds out
            without bytecode.
        in_classes: the same in namespaces of classes.
        in_cells: the same in the cells of functions.
        module_of: modules by the identity of the dict that has their attributes.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        marked: set[Captured],
        ignored: frozenset[Captured],
    ) -> None:
        parts = recording.environment.parts
        self._analysis, self._marked, self._ignored = analysis, marked, ignored
        self.children: dict[int, list[Captured]] = {}
        for part in parts:
            if part.parent is not None:
                self.children.setdefault(part.parent.index, []).append(part)
        self.module_of: dict[int, Captured] = {
            id(vars(p.value)): p for p in parts if p.kind is CaptureKind.MODULE
        }
        self.counted: list[Captured] = []
        self.hollow: list[Captured] = []
        self._following: set[int] = set()  # parts that follow from the version of a dict
        versioned = self._versioned(parts)
        self.of_model: list[tuple[Captured, list[Captured]]] = [
            pair for pair in versioned if pair[0].kind is CaptureKind.DICT
        ]
        self.of_spaces: list[tuple[Captured, list[Captured]]] = [
            pair for pair in versioned if pair[0].kind is not CaptureKind.DICT
        ]
        self.tables: list[Captured] = [table for table, _ in versioned if self._is_table(table)]
        simple = [part for part in parts if self._is_simple(part)]
        self.simple: list[Captured] = [
            part for part in simple if not _is_in(types.MappingProxyType, part)
        ]
        self.in_classes: list[Captured] = [
            part for part in simple if _is_in(types.MappingProxyType, part)
        ]
        self.in_cells: list[Captured] = [part for part in parts if self._is_in_cell(part)]

    def covered(self) -> set[int]:
        """Return the identities of the parts that are not asked one by one each time."""
        inside = (part for table in self.tables for part in self.children[table.index])
        several = (self.simple, self.in_classes, self.in_cells, self.counted, inside)
        return self._following | {id(part) for part in chain.from_iterable(several)}

    def _versioned(self, parts: list[Captured]) -> list[tuple[Captured, list[Captured]]]:
        held: dict[int, tuple[Captured, list[Captured]]] = {}
        for part in parts:
            if part.access is Access.FIXED:
                # Each module has many empty tables: that they are is found out in one go.
                if part.kind is CaptureKind.DICT and (
                    not part.size or type(part.value) is not dict
                ):
                    if part not in self._ignored:
                        self.counted.append(part)
                elif type(part.value) is dict and part.kind in (
                    CaptureKind.DICT,
                    CaptureKind.IDENTITY,
                ):
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
            or (part.kind is CaptureKind.DICT and part not in self._ignored)
            or part.index in hosts
        ]
        self._following |= {id(part) for part, _ in versioned}
        versioned.sort(key=lambda item: id(item[0].value) not in self.module_of)
        return versioned

    def _is_table(self, table: Captured) -> bool:
        held = self.children.get(table.index, ())
        if len(held) != table.size:
            return False
        asked = self._analysis.typed_state | self._marked
        tensors = {part for part in held if part.kind is CaptureKind.TENSOR}
        nothing = all(part.value is None for part in held if part not in tensors)
        free = tensors.isdisjoint(asked) and self._ignored.isdisjoint(held)
        return bool(tensors) and nothing and free

    def _root_of(self, part: Captured) -> Captured | None:
        """Return the fixed dict that holds a part which changes with an entry of it alone."""
        if part.access is not Access.ITEM or part.parent is None:
            return None
        if not self._is_steady(part):
            return None
        holder = part.parent
        if holder.access is Access.FIXED:
            return holder
        # What a tuple holds is the same for as long as it is the same tuple.
        return self._root_of(holder) if holder.kind is CaptureKind.TUPLE else None

    def _is_hollow(self, part: Captured) -> bool:
        """Whether a part is an empty container in a fixed dict.

        What holds plain values now may hold tensors the next time, so that it is not kept, but
        taken from where it is each time.
        """
        return (
            part.access is Access.ITEM
            and part.parent is not None
            and part.parent.access is Access.FIXED
            and part.type in (dict, list, set)
            and part.kind in (CaptureKind.DICT, CaptureKind.LIST, CaptureKind.SET)
            and not part.size
            and part not in self._ignored
        )

    def _is_steady(self, part: Captured) -> bool:
        """Whether a part cannot change itself, other than by another thing in its place."""
        if part.kind is CaptureKind.ALIAS:
            return part.value.kind in (CaptureKind.MODULE, CaptureKind.IDENTITY)
        if part.kind in (CaptureKind.TUPLE, CaptureKind.SET):
            return part.type in (tuple, frozenset)
        return part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)

    def _is_simple(self, part: Captured) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (CaptureKind.DICT, CaptureKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)
            and id(part) not in self._following
            and part not in self._ignored
        )

    def _is_in_cell(self, part: Captured) -> bool:
        return (
            part.access is Access.CELL
            and part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)
            and _is_in(types.CellType, part)
            and part not in self._ignored
        )


def _is_in(kind: type, part: Captured) -> bool:
    """Whether a part is held by a fixed object of some type."""
    holder = part.parent
    return holder is not None and holder.access is Access.FIXED and type(holder.value) is kind
