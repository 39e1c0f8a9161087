"""The insertion registry: all insertions of one model."""

from __future__ import annotations

import copy
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch import nn

from bendtrace.errors import InputError, InterjectionError, NodePathError
from bendtrace.interject import gates
from bendtrace.interject.aliases import alias_of
from bendtrace.interject.insertion import Insertion, What, as_interjection, blaming
from bendtrace.interject.interjection import Interjection
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.lookup import Lookup
from bendtrace.interject.passes import Passes, PassNumbers
from bendtrace.interject.plan import Entry, Location, Plan, State, forms_of
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.restricted import InCalls
from bendtrace.interject.where import (
    AtPath,
    AtPaths,
    LocationText,
    OfModule,
    Target,
    Where,
    near_misses,
    targets_of,
)
from bendtrace.paths.candidates import Candidate
from bendtrace.run import Run

__all__ = ["InsertionRegistry", "Kept"]

_DEEPEST = 40  # calls inside of each other, before an insertion is asked whether it makes them
_OF_NODE = gates.InsteadGate._node.__code__
_MOST_NOTES = 16  # on why something was not called; more would not be read

# Where, what, and in which passes.
Kept = tuple[str, tuple[Target, ...], Interjection, Passes, bool]


class _Calls(threading.local):
    """How many calls of the model the thread is in; a context that counts one more."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class InsertionRegistry:
    """The insertions of one model, in the order in which they were made.

    Args:
        model: the model.
        changed: called when insertions change, with whether there are any.
    """

    def __init__(self, model: Knowledge, changed: Callable[[bool], None]) -> None:
        self._model = model
        self._changed = changed
        self._calls = _Calls()
        self._lock = threading.RLock()
        self._insertions: tuple[Insertion, ...] = ()
        self._plan: tuple[tuple[Insertion, ...], Plan] | None = None

    def __bool__(self) -> bool:
        return bool(self._insertions)

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The active insertions."""
        return self._insertions

    def insert(
        self,
        where: Where | State,
        what: What,
        *,
        passes: PassNumbers | Passes = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Insert something; see `BendedModule.interject`."""
        insertion = self.make(
            where, what, passes=passes, every=every, calls=calls, allow_none=allow_none
        )
        self.add(insertion)
        return insertion

    def make(
        self,
        where: Where | State,
        what: What,
        *,
        passes: PassNumbers | Passes = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Create and check an insertion, without activating it."""
        interjection = as_interjection(what)
        if calls is not None:
            interjection = InCalls(interjection, calls)
        if (alias := alias_of(where, self._model.model)) is not None:
            where, interjection = alias.where, alias.around(interjection)
        chosen = passes if isinstance(passes, Passes) else Passes(passes, every)
        targets = targets_of(where, self._model, lenient=allow_none)
        named = [target.passes for target in targets if target.passes is not None]
        if named:
            if passes is not None or every is not None or len(targets) > 1:
                raise InputError(
                    f"{describe_where(where)} names passes: give them either there or with "
                    "passes=, and one node at a time"
                )
            chosen = Passes(named[0])
        for target in targets:
            if target.place is not None:
                _require_possible(target.place, interjection)
        insertion = Insertion(self, where, targets, interjection, chosen, allow_none)
        exact = all(
            target.place is None
            or target.place.role != "node"
            or isinstance(target.place.matcher, (AtPath, OfModule))
            for target in targets
        )
        insertion.is_checked = (
            allow_none or exact or self._is_met(insertion, self._model.candidates())
        )
        return insertion

    def add(self, *insertions: Insertion) -> None:
        """Activate insertions, all at once.

        Raises:
            InputError: this thread is in a call of the model.
        """
        if insertions and self._calls.depth:
            raise InputError(
                "insertions cannot be added while the model is running, since they would take "
                "effect in the next call only: add them before or after the call"
            )
        with self._lock:
            self._insertions = (*self._insertions, *insertions)
            self._plan = None
            self._changed(bool(self._insertions))

    def remove(self, *insertions: Insertion) -> None:
        """Remove insertions."""
        with self._lock:
            kept = tuple(i for i in self._insertions if all(i is not gone for gone in insertions))
            if len(kept) < len(self._insertions):
                self._insertions, self._plan = kept, None
                self._changed(bool(kept))

    def called(self) -> AbstractContextManager[None]:
        """Mark the model as running on this thread."""
        return self._calls

    def clear(self) -> None:
        """Remove all insertions."""
        self.remove(*self._insertions)

    def holds(self, insertion: Insertion) -> bool:
        """Return whether an insertion is active."""
        return any(other is insertion for other in self._insertions)

    # Copies

    def kept(self, memo: dict[int, Any] | None) -> list[Kept]:
        """Return the insertions for a copy of the model.

        Args:
            memo: the objects copied so far, for a deep copy; None when everything is pickled.
        """
        found: list[Kept] = []
        for insertion in self._insertions:
            targets = tuple(target.said_in_words() for target in insertion.targets)
            said = LocationText(describe_where(insertion.where))
            row: Kept = said, targets, insertion.what, insertion.passes, insertion.allow_none
            found.append(row if memo is None else copy.deepcopy(row, memo))
        return found

    def restore(self, *insertions: Kept) -> None:
        """Restore the result of `kept`."""
        self.add(*(Insertion(self, *kept) for kept in insertions))

    # What runs need

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """Return the insertions of a call; None if there are none.

        Raises:
            NodePathError: a name matches no node in the first run that could show it.
            InterjectionError: one of them calls the model, which would call it without end.
        """
        insertions = self._insertions
        if not insertions:
            return None
        if self._calls.depth > _DEEPEST:
            self._refuse_call_of_insertion()
        known = self._plan
        if known is not None and known[0] is insertions:
            return known[1]
        self._look_up(insertions)
        is_open = any(
            not insertion.is_checked or any(target.is_open for target in insertion.targets)
            for insertion in insertions
        )
        looks_ahead = [
            insertion
            for insertion in insertions
            if insertion.passes.needs_total or any(target.is_ahead for target in insertion.targets)
        ]
        run = None
        if looks_ahead and (run := self._model.foreseen(args, kwargs)) is None:
            raise InputError(_AHEAD.format(looks_ahead[0]))
        plan = self._made(insertions, run, is_open)
        if not looks_ahead and not is_open:
            self._plan = insertions, plan
        return plan

    def _refuse_call_of_insertion(self) -> None:
        """Raise if the innermost gate around this call has called one of the insertions."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not _OF_NODE:  # which calls the model's code
            entry = frame.f_locals.get("entry") if frame.f_globals is vars(gates) else None
            if entry is not None and entry.insertion._owner is self:
                raise InterjectionError(
                    f"{entry.what.label} at {describe_where(entry.insertion.where)} calls the "
                    "BendedModule that it is inserted in, which calls it again, without end: "
                    "call `bended.model`, in which nothing is inserted",
                    entry.place.shown,
                )
            frame = frame.f_back

    def _look_up(self, insertions: tuple[Insertion, ...]) -> None:
        """Look names and patterns up that no run had shown so far, if there are runs by now.

        Raises:
            NodePathError: the runs have no such node.
        """
        for number, insertion in enumerate(insertions):
            with blaming(insertion, number):
                if any(target.is_open for target in insertion.targets):
                    targets = [
                        found
                        for target in insertion.targets
                        for found in self._found(insertion, target)
                    ]
                    insertion.targets = tuple(targets)
                insertion.is_checked = insertion.is_checked or self._is_met(
                    insertion, self._model.candidates()
                )

    def plan_of_parts(self) -> tuple[Plan, bool]:
        """Return the insertions with known locations, and whether there are others."""
        entries = []
        unknown = False
        modules = {node.module_path: node.module for node in self._model.modules()}
        for insertion in self._insertions:
            unknown = unknown or insertion.passes.needs_total
            for target in insertion.targets:
                place = target.place
                if place is None and target.is_open and target.said in modules:
                    module = modules[target.said]
                    assert module is not None
                    place = Location("node", OfModule(module))
                if place is None:
                    unknown = True
                else:
                    entries.append(Entry(insertion, insertion.what, place))
        return Plan(entries), unknown

    def notes_on(self, insertion: Insertion) -> tuple[str, ...]:
        """Return notes on why an insertion was not called."""
        if not insertion.runs:
            return ("no call was made",)
        paths = dict.fromkeys(
            path for target in insertion.targets for path in self._paths_of(target)
        )
        notes = (self._note_on(insertion, path) for path in itertools.islice(paths, _MOST_NOTES))
        found = tuple(dict.fromkeys(filter(None, notes)))
        return found or self._hints(insertion) or ("no run reached a selected node",)

    def _hints(self, insertion: Insertion) -> tuple[str, ...]:
        """Return hints on where modules may be called that no known run has reached."""
        meant = {id(self._module_of(target)) for target in insertion.targets}
        names = [node.module_path for node in self._model.modules() if id(node.module) in meant]
        return tuple(dict.fromkeys(filter(None, map(self._model.hint, names))))

    def _module_of(self, target: Target) -> nn.Module | None:
        """Return the module whose calls are selected, or that has the selected parameter."""
        matcher = None if target.place is None else target.place.matcher
        if isinstance(matcher, State):
            holder = matcher.name.rpartition(".")[0]
            return next((n.module for n in self._model.modules() if n.module_path == holder), None)
        return matcher.module if isinstance(matcher, OfModule) else None

    def _paths_of(self, target: Target) -> Iterable[str]:
        """Return the known paths of the selected nodes."""
        matcher = None if target.place is None else target.place.matcher
        if isinstance(matcher, AtPath):
            return (matcher.path,)
        if isinstance(matcher, AtPaths):
            return sorted(matcher.paths)
        if (module := self._module_of(target)) is not None:
            return self._model.paths_of(module)
        if matcher is None or isinstance(matcher, State):
            return ()
        return [node.path for node in self._model.candidates() or () if matcher.matches(node)]

    def _note_on(self, insertion: Insertion, path: str) -> str:
        """Return why an insertion was not called at a node."""

        def counts(passes: int) -> bool:
            if insertion.passes.is_asked:  # a user function, which may count its calls
                return passes > 0
            return any(insertion.passes.admits(number, passes) for number in range(passes))

        passes = max(self._model.count_passes(path, run) for run in insertion.runs)
        if not counts(passes):
            why = self._model.why_not(path, insertion.runs, counts)
            if not passes:
                return why
            times = "one pass" if passes == 1 else f"{passes} passes"
            said = f"{path!r} had {times}, none of which is selected ({insertion.passes}, from 0)"
            return f"{said}: {why}" if why else said
        if not forms_of(insertion.what) & {"before", "instead", "after"}:
            return f"no backward pass reached {path!r}"
        return ""

    def _made(
        self, insertions: tuple[Insertion, ...], run: Run | None, is_open: bool
    ) -> Plan:  # fmt: skip
        entries = []
        for insertion in insertions:
            for target in insertion.targets:
                place = target.place
                if target.is_ahead:
                    assert run is not None
                    place = target.ahead(run.candidates)
                    if not place.matcher.paths and not insertion.allow_none:
                        raise NodePathError(
                            f"{describe_where(target.said)} selects no node of this run; "
                            + near_misses("", list(run.candidates.nodes)),
                            repr(target.said),
                        )
                if place is not None:
                    entries.append(Entry(insertion, insertion.what, place))
        lookup = None
        if is_open:
            lookup = Lookup(self._model, insertions, _check, self._is_met)
        totals = None
        if run is not None:
            totals = {node.path: len(node.passes) for node in run.tree.data.walk()}
        return Plan(entries, totals, lookup)

    def _found(self, insertion: Insertion, target: Target) -> tuple[Target, ...]:
        """Look a name up in the known runs; return it as it is if there are none."""
        if not target.is_open:
            return (target,)
        targets = targets_of(target.said, self._model, lenient=insertion.allow_none)
        for found in targets:
            _check(insertion, found)
            if found.passes is not None:
                insertion.passes = Passes(found.passes)
        return targets

    def _is_met(self, insertion: Insertion, nodes: Iterable[Candidate] | None) -> bool:
        """Return whether everything requested matches a node.

        Args:
            insertion: the insertion.
            nodes: the known nodes of the model; None if it was not run yet.

        Raises:
            NodePathError: the model was run, and has no such node.
        """
        known = [*self._model.modules(), *(nodes or ())]
        for target in insertion.targets:
            if target.place is None or target.place.role != "node":
                continue
            matcher = target.place.matcher
            if isinstance(matcher, (AtPath, OfModule)) or any(map(matcher.matches, known)):
                continue
            if nodes is None:
                return False
            is_pattern = isinstance(target.said, re.Pattern)
            text = target.said.pattern if is_pattern else getattr(target.said, "__name__", "")
            raise NodePathError(
                f"{describe_where(target.said)} selects no known node; "
                + near_misses(text, [node.path for node in nodes if node.path])
                + " (allow_none=True waits for a later run)",
                describe_where(target.said),
            )
        return True


_AHEAD = (
    "the nodes of {!r} depend on the whole run, which is known before a call only if the model has "
    "run with such inputs, under this grad mode, and neither a change of state nor a random number "
    "decides its way: call the model once before you insert it, or use node paths, modules or "
    "selectors that do not look ahead"
)


def _check(insertion: Insertion, target: Target) -> None:
    """Raise for an interjection that is not possible at its location."""
    if target.place is not None:
        _require_possible(target.place, insertion.what)


_AROUND = frozenset({"before", "instead", "backward"})


def _require_possible(place: Location, what: Interjection) -> None:
    """Raise for an interjection that is not possible at a location."""
    forms = forms_of(what)
    if place.role != "node" and forms & _AROUND:
        kind = "an input" if place.role == "input" else "a parameter or buffer"
        raise InputError(
            f"{what.label} works around a node, but {place.shown!r} is {kind}, which only has "
            "a value"
        )
    if place.role == "input" and place.matcher.path and what._only_outputs:
        raise InputError(
            f"{place.shown!r} is the input of a module: give the value of the node that computes it"
        )
    if place.dig and forms & _AROUND:
        raise InputError(
            f"{what.label} works around a node, but {place.shown!r} is a part of a node's output"
        )
    if place.role == "node" and place.matcher.needs_output and forms & _AROUND:
        raise InputError(
            f"{what.label} is called before the node, but {describe_where(place.matcher)} "
            "depends on the node's output"
        )
