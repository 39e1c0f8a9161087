"""The trace trees of one model: one for each set of insertion locations."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from bendtrace._lazy import LazyModule
from bendtrace.floor import Floor
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.plan import Plan
from bendtrace.interject.splicer import Splicer
from bendtrace.recording.recorder import Recording
from bendtrace.replay.stretches import Exit
from bendtrace.replay.tree import TraceTree

if TYPE_CHECKING:
    from bendtrace.view import program as outlines
else:
    outlines = LazyModule("bendtrace.view.program")

_MOST = 64  # sets of places that paths are kept for


class Trees:
    """The paths without insertions, and those with insertions at some locations.

    The inserted objects are not part of a path: another patch at the same node uses the same paths.
    If there are too many sets of locations, the paths of the least recently used sets are
    forgotten.

    Args:
        limit: how many paths each tree keeps; None for all.

    Attributes:
        limit: as given.
        plain: the paths without insertions.
        latest: the tree that was requested last.
    """

    latest: TraceTree

    plain: TraceTree

    def __init__(self, limit: int | None) -> None:
        self.limit: int | None = limit
        self.plain = self.latest = self._new()
        self._inserted: OrderedDict[Hashable, TraceTree] = OrderedDict()
        self._splicers: OrderedDict[Hashable, Splicer] = OrderedDict()
        self._floors: OrderedDict[Hashable, Floor] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, plan: Plan | None) -> TraceTree:
        """Return the tree for some insertions."""
        if plan is None:
            return self.plain
        with self._lock:
            tree = self._inserted.get(plan.key)
            if tree is None:
                tree = self._inserted[plan.key] = self._new(plan.joins)
            self._inserted.move_to_end(plan.key)
            while len(self._inserted) > _MOST:
                self._inserted.popitem(last=False)
            self.latest = tree
        return tree

    def has_paths(self, plan: Plan) -> bool:
        """Whether paths with some insertions are known."""
        tree = self._inserted.get(plan.key)
        return tree is not None and next(iter(tree.programs()), None) is not None

    def splicer(self, plan: Plan, known: Knowledge) -> Splicer:
        """Return what splices some insertions into the paths without any."""
        self.latest = self.plain
        splicer: Splicer | None = plan.splicer
        if splicer is None:
            with self._lock:
                splicer = self._splicers.get(plan.key)
                if splicer is None:
                    splicer = self._splicers[plan.key] = Splicer(plan, known, self._exits)
                self._splicers.move_to_end(plan.key)
                while len(self._splicers) > _MOST:
                    self._splicers.popitem(last=False)
                plan.splicer = splicer
        return splicer.serves(plan)

    def _exits(self) -> Iterator[Exit]:
        """Yield the exits of all paths without insertions."""
        for program in self.plain.programs():
            if program.graph is not None:
                yield from program.graph.exits()

    def floor(self, plan: Plan) -> Floor:
        """Return which calls with some insertions run the model itself."""
        if plan.floor is None:
            with self._lock:
                plan.floor = self._floors.setdefault(plan.key, Floor())
                self._floors.move_to_end(plan.key)
                while len(self._floors) > _MOST:
                    self._floors.popitem(last=False)
        return plan.floor

    def floors(self) -> list[Floor]:
        """Return which calls run the model itself, for each set of locations."""
        return list(self._floors.values())

    def plain_runs(self) -> list[Recording]:
        """Return the runs without insertions, the latest first."""
        return _runs(self.plain)

    def inserted_runs(self) -> list[Recording]:
        """Return the runs with insertions."""
        return [run for tree in list(self._inserted.values()) for run in _runs(tree)]

    def _new(self, joins: bool = True) -> TraceTree:
        return TraceTree(self.limit, _reason, joins)


def _reason(tree: TraceTree) -> str | None:
    return outlines.most_divergent(tree)


def _runs(tree: TraceTree) -> list[Recording]:
    return [run for program in tree.programs() for run in program.recordings()]
