"""Writing a tape: ops and guards in order, in step with a run to be resumed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import itemgetter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.python.bytecode import compares_items
from bendtrace.python.lazy import errors
from bendtrace.python.sites import Site, SiteTable, user_place
from bendtrace.tape.captured import CaptureKind
from bendtrace.tape.contexts import (
    Context,
    changeable_settings,
    current_context,
    current_settings,
    lasting_settings,
)
from bendtrace.tape.guards import ContentGuard, ErrorGuard, OtherGuard
from bendtrace.tape.tape import (
    FunctionUse,
    Guard,
    ModuleCall,
    Op,
    OpKind,
    Ref,
    RunState,
    Tape,
    Use,
    counts,
    is_handled,
)
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import display_name, may_lack_dimension, reads_metadata
from bendtrace.watch.writes import Writes

if TYPE_CHECKING:
    from bendtrace.record.script import Script


class TrackedTensor(weakref.ref[Tensor]):
    """A tensor on the tape, and its value number; weak, so that tracing keeps nothing alive."""

    __slots__ = ("graphless", "key", "parent", "ref", "version")
    ref: Ref | None  # None while it is an element of a result that nobody used yet
    parent: Ref
    key: tuple[Any, ...]
    version: int  # how often it had been written to when it was named
    graphless: bool  # computed while grad mode was off, so that it cannot require grad


def _readable_tensors(environment: Environment) -> dict[Any, Tensor]:
    """Return the tensors that a run can read, by all their names."""
    found: dict[Any, Tensor] = {}
    for part in environment.parts:
        first = part.value if part.kind is CaptureKind.ALIAS else part
        if first.kind is CaptureKind.TENSOR:
            found[part.placed] = first.value
    return found


class TapeWriter:
    """Adds ops and guards to a tape. The chain of calls to an op ends at code in `boundaries`."""

    def __init__(
        self, environment: Environment, script: Script | None, boundaries: frozenset[CodeType]
    ) -> None:
        self.tape: Tape = Tape(blockers=list(environment.blockers))
        self.root: ModuleCall = ModuleCall("", None, 0, None, 0)  # the outermost scope
        self.scope: ModuleCall = self.root  # the module call that the run is in
        self.tracked: dict[int, TrackedTensor] = {}  # the tensors on the tape, by identity
        self.aliases: dict[int, int] = self.tape.aliases  # those of the tape
        # The metadata of tensors that were asked for since the latest question, by op and function.
        # Which were asked for before does not matter from a question on, where runs that came to it
        # on different ways are in the same state.
        self.facts: dict[tuple[int, Any], Any] = {}
        # The error of a resumed run that behaved differently than before.
        self.gone_astray: errors.NondeterminismError | None = None
        self.writes: Writes = Writes()  # tracks writes to tensors
        self.given: list[Any] = []  # the containers that code called as one op has received
        self._environment = environment
        self.script: Script | None = script  # what the run follows, if it follows one
        self.handed: dict[int, Any] = {}  # results of ops that need not be carried out, by op
        self.errors: dict[int, Exception] = {}  # of ops that are not carried out, by op
        if script is not None:
            script.begin(self.aliases, _readable_tensors(environment))
            self.handed, self.errors = script.values, script.errors
        # True if the run is repeating what the resumed run did.
        self.is_behind: bool = script is not None and script.is_active
        # Reads the state at a guard (see `states.py`); None to read no states.
        self.read_state: Callable[[Guard], RunState | None] | None = None
        # Receives the states that the script has read, with the answers.
        self.goes_on_from: Callable[[RunState, Any], None] | None = None
        # Is called before a guard is added, with the code that asks.
        self.before_question: Callable[[FrameType], None] | None = None
        self.is_inside: bool = False  # whether code inside of an op runs
        self.resumed_at: int | None = None  # ops that the resumed run has repeated, in the end
        self._caught: dict[tuple[int, int], bool] = {}
        self._sites = SiteTable(boundaries)
        self.boundaries: set[int] = self._sites.boundaries  # identities of the code given as such
        self._settings = torch.get_default_dtype(), current_settings()
        self._before = changeable_settings(), lasting_settings()

    def close(self) -> None:
        """Release the objects of the caller, and the values computed before."""
        if self.script is not None:
            self.script.hold.release()
        self.handed, self.errors, self.given = {}, {}, []
        self.tracked.clear()  # torch refuses to swap tensors that have weak references
        self.writes.begin()

    def require_end(self) -> None:
        """Raise an error if a resumed run went astray, even if the model caught the error."""
        if self.gone_astray is not None:
            raise self.gone_astray
        self.ask_implied()
        if self.script is not None and self.script.is_active:
            raise errors.NondeterminismError(
                "the resumed run ended before the point where it diverged"
            )

    def name_as(self, index: int, first: int) -> None:
        """Record that an op returned the very tensor that another one returned before."""
        self.aliases[index] = self.aliases.get(first, first)

    def forgot_casts(self) -> None:
        """Record that autocast clears its cache of cast weights."""
        self.tape.forgets.append(len(self.tape.ops))

    def site(self, frame: FrameType) -> Site | None:
        """Return the site of `frame`; None if no code of the model called it."""
        site = self._sites.find(frame)
        return site if site.chain else None

    def emit(
        self, kind: OpKind, target: Any, args: Any, kwargs: dict[str, Any], frame: FrameType | None
    ) -> Op:
        """Add an op.

        Raise `NondeterminismError` if a resumed run did something else at this point.
        """
        ops = self.tape.ops
        site = None if frame is None else self.site(frame)
        script = self.script
        if script is not None and not script.is_active and script.hold.release_casts():
            self.forgot_casts()
        context = self.context() if kind is OpKind.CALL else current_context()
        op = Op(len(ops), kind, target, args, kwargs, self.scope, site, context)
        if script is not None:
            self._follow(op)
        counters = self.tape.counters
        if counters and kind is OpKind.SCALAR and op.operands:
            if counters.issuperset(op.operands):
                counters.add(op.index)
        ops.append(op)
        return op

    def context(self) -> Context:
        """Return the state for an op called now, with the settings that the run has changed."""
        context = current_context()
        if (torch.get_default_dtype(), current_settings()) == self._settings:
            return context
        before, lasting = self._before
        if lasting_settings() != lasting:
            place = user_place(sys._getframe(1))
            self.tape.block(f"at {place} the run has changed a torch setting")
        changed = changeable_settings().items() - before.items()
        return context._replace(settings=tuple(sorted(changed, key=itemgetter(0))))

    def begin(self) -> None:
        """Prepare for an op, before its arguments are encoded."""
        self.writes.begin()
        if self.is_behind:
            if self.script is not None and self.script.is_active:
                return
            self.is_behind, self.resumed_at = False, len(self.tape.ops)
            self._renew_versions()

    def guard(
        self, kind: type[Guard], index: int, answer: Any, use: Use | FunctionUse, frame: FrameType,
        other: int | None = None,
    ) -> None:  # fmt: skip
        """Add a guard on the value of op `index`."""
        if use is not Use.METADATA and issubclass(kind, ContentGuard):
            self.facts.clear()
        if self.before_question is not None:
            self.before_question(frame)
        site = self.site(frame)
        if use is Use.BOOL and compares_items(frame):
            use = Use.ITEM
        position, inside = len(self.tape.ops), self.is_inside
        self._add(kind(position, index, answer, use, self.scope, site, inside, other))

    def _add(self, guard: Guard) -> None:
        number, index = len(self.tape.guards), guard.index
        script = self.script if self.script is not None and self.script.is_active else None
        if script is not None and script.merges(guard):
            op = self.tape.ops[index]
            where = f" at {op.site.place}" if op.site is not None else ""
            self.tape.block(
                f"{display_name(op.target)}{where} gives back what it is given in some calls only"
            )
            return
        if script is not None and not script.expects(guard):
            self.ask_implied()
            script = script if script.is_active else None
            number = len(self.tape.guards)
        self.tape.guards.append(guard)
        state = None
        if script is not None:
            try:
                state = script.asks(guard)
            except errors.NondeterminismError as error:
                self.gone_astray = error
                raise
            if state is not None and self.goes_on_from is not None:
                self.goes_on_from(state, guard.answer)
        elif self.read_state is not None and not guard.is_inside:
            state = self.read_state(guard)
        if state is not None:
            self.tape.states[number] = state

    def ask_implied(self, inside: bool = False) -> None:
        """Ask what the script has asked next, and the run does not ask itself.

        With `inside`, it asks no more than code inside of the latest op has asked.
        """
        script = self.script
        while script is not None and script.is_active and (found := script.implied_question()):
            (asked, index, answer, other), position = found, len(self.tape.ops)
            if asked.is_inside:
                guard = replace(
                    asked, position=position, index=index, answer=answer, scope=self.scope,
                    other=other,
                )  # fmt: skip
            elif inside:
                return
            else:
                op = self.tape.ops[index]
                guard = OtherGuard(
                    position, index, False, Use.RESULT, op.scope, op.site, other=other
                )
            self._add(guard)

    def _follow(self, op: Op) -> None:
        """Look up in the script what the run does, and what it names.

        Raise `NondeterminismError` if it does something else, or needs a value that is not there.
        """
        script = self.script
        assert script is not None
        if script.is_active and not op.is_given and counts(op):
            self.ask_implied()
        if not script.is_active:
            if script.dead and not script.dead.keys().isdisjoint(op.operands):
                self.require_alive(op.operands)
            return
        try:
            if op.is_given:
                script.name_input(op)
            elif counts(op):
                script.take(op)
                self.writes.repeat(op)
            else:
                script.name_element(op)
        except errors.NondeterminismError as error:
            self.gone_astray = error
            raise

    def require_alive(self, indices: Iterable[int]) -> None:
        """Raise an error if one of some ops gave a value that a state did not hold."""
        if self.script is None or self.script.is_active:
            return
        for index in indices:
            if index in self.script.dead:
                self.gone_astray = errors.NondeterminismError(
                    f"the resumed run needs the value of {self.tape.ops[index]}, which no code of "
                    "the model could reach any more (please report this)"
                )
                raise self.gone_astray

    def is_caught(self, scope: ModuleCall, site: Site | None) -> bool:
        """Return whether the model might go on after an error at a place, so it is a question."""
        key = id(scope), id(site)
        cached = self._caught.get(key)
        if cached is None:
            cached = self._caught[key] = is_handled(scope, site)
        return cached

    def ask_error(self, op: Op) -> None:
        """Add a guard on the error of an op, if the model might go on after it.

        A look at metadata raises only where a tensor has no such dimension. Code in C goes on after
        errors as well: torch tries one overload after the other.
        """
        site, scope = op.site, op.scope
        if op.raised is None and (
            (reads_metadata(op.target) and not may_lack_dimension(op))
            or not self.is_caught(scope, site)
        ):
            return
        self._add(ErrorGuard(len(self.tape.ops), op.index, op.raised, Use.RESULT, scope, site))

    def _renew_versions(self) -> None:
        """Separate names that the script has made stale from those that are still valid."""
        if self.script is not None:
            for index, meta in self.script.dead.items():
                self.tape.ops[index].meta = meta
            for tracked in self.tracked.values():  # nothing may take the short way with these
                if tracked.ref is not None and tracked.ref.index in self.script.dead:
                    tracked.version = -1
        named = [
            (tracked.ref, tensor)
            for tracked in self.tracked.values()
            if (tensor := tracked()) is not None and tracked.ref is not None
        ]
        for tensor in self.writes.stale_names(named):
            self.tracked[id(tensor)].version = -1
