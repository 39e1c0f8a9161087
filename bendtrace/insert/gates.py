"""Gates: the ops of a tape that call the interjections of a node.

A gate does not store which interjections to call: each run supplies its insertions, so that one
trace also serves another patch at the same node. Nor does a gate know which pass of the node it is
in, because the code of a loop serves all of its passes: a call counts them. An insertion
at some passes only has a gate at each, which asks it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bendtrace.engine.source import Interrupted, Unfit
from bendtrace.errors import InterjectionError
from bendtrace.insert.gradients import CallGradients, ChecksGradients
from bendtrace.insert.interjection import NO_INPUTS, Inputs, NodePass
from bendtrace.insert.leaves import (
    ContainerShape,
    LeafShape,
    StructureMismatch,
    all_tensors_in,
    assemble,
    collect,
    count_of,
    describe,
    differ,
    exchangeable,
    has_mutable,
    holds_same,
    shape_at,
    take_apart,
    write_count,
)
from bendtrace.insert.plan import Called, InsertionPlan, LocatedInsertion, Slot
from bendtrace.python.internals import internal
from bendtrace.python.sites import place_text
from bendtrace.record.checkpoints import KEEPERS
from bendtrace.record.scopes import REFERENCES_OF_LOCAL
from bendtrace.tape.captured import is_inference, is_leaf, is_uneven, requires_grad
from bendtrace.tape.contexts import any_autocast, function_modes
from bendtrace.tape.tape import meta_of
from bendtrace.watch.mode_queries import unseen

if TYPE_CHECKING:
    from bendtrace.insert.splicer import Splicer

# What an insertion has returned: whether it fits, and what it has changed.


class Containers:
    """Changes that the insertions of a gate made to lists, dicts and objects."""

    are_changed: bool  # whether one of these has changed them

    are_kept: bool  # whether an insertion has returned those that it was given

    def __init__(self) -> None:
        self.are_kept = self.are_changed = False
        self.others: list[Any] = []  # the structures of which others were returned

    def settle(
        self, shapes: tuple[Any, ...], given: tuple[Any, ...], results: tuple[Any, ...],
        found: list[Any], at: NodePass, entry: LocatedInsertion,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Note whether lists and dicts that an insertion was given have to be updated in place.

        It received the given values, with their shapes, and returned the results in their place.
        `found` are the tensors and numbers of these values, as they were before it was called.
        Return the results, and what was given for those that are None. Raise `InterjectionError`
        if it has changed some in place, and returned others.
        """
        results = tuple(
            value if result is None and type(shape) is ContainerShape else result
            for shape, value, result in zip(shapes, given, results, strict=False)
        )
        are_kept = all(map(holds_same, shapes, given, results))
        now = list(found)
        try:
            for shape, value in zip(shapes, given, strict=True):
                collect(shape, value, now)
            is_changed = any(new is not old for new, old in zip(now, found, strict=True))
        except StructureMismatch:
            is_changed = True
        if not are_kept:
            self.others.append(shapes)
        elif self.others and all(other != shapes for other in self.others):
            are_kept = False
        self.are_kept = self.are_kept or are_kept
        if is_changed and are_kept and not self.others:
            self.are_changed = True
        if (is_changed or self.are_changed) and not are_kept:
            raise InterjectionError(
                f"{entry.what.label} at {at.path or '<root>'} changed a list, dict or object that "
                "it was given in place, and returned another one: return the one that it changed, "
                "or change none",
                at.path,
            )
        return results


class ObservedNode:
    """A node, with its original arguments, that an insertion may call or not, and the outcome."""

    def __init__(self, call: Callable[..., Any], given: Inputs) -> None:
        self.given = given
        self._call = call
        self._versions = _versions((given, given.kwargs))
        self._calls = 0
        self._gave: tuple[Any, list[int]] | None = None  # in a call with just what was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the node."""
        self._calls += 1
        mine, theirs = self.given.kwargs, (*args, *kwargs.values())
        is_as_given = (
            len(args) == len(self.given)
            and list(kwargs) == list(mine)
            and all(
                new is old for new, old in zip(theirs, (*self.given, *mine.values()), strict=True)
            )
            and _versions((self.given, mine)) == self._versions
        )
        result = self._call(*args, **kwargs)
        self._gave = (result, _versions(result)) if is_as_given else None
        return result

    def gave(self, value: Any) -> bool:
        """Return whether the node, called once with the very inputs, returned a value."""
        if self._gave is None or self._calls > 1:
            return False
        return value is self._gave[0] and _versions(value) == self._gave[1]


def collect_returned(
    shape: Any, result: Any, found: list[Any], at: NodePass, entry: LocatedInsertion
) -> None:
    """Replace old values by the tensors and numbers that an insertion returned.

    Raise `InterjectionError` if the value does not fit.
    """
    try:
        collect(shape, result, found)
    except StructureMismatch as error:
        part, hint = f"{at.path}{'' if at.module is None else '.output'}|sub_0".lstrip("."), ""
        if isinstance(shape, ContainerShape) and shape.kind in (tuple, list):
            hint = f"; to change one part of it, name the part: {part!r}"
        text = f"{entry.what.label} at {at.path or '<root>'} returned a value that cannot replace"
        raise InterjectionError(f"{text} the node's value: {error}{hint}", at.path) from None


def changed(
    entry: LocatedInsertion, at: NodePass, before: list[Any], found: list[Any], versions: list[int]
) -> bool:
    """Return whether an insertion has returned another value, or changed one in place."""
    written = any(
        write_count(old) != version for old, version in zip(before, versions, strict=True)
    )
    other = [(old, new) for old, new in zip(before, found, strict=True) if new is not old]
    if entry.what.observes and (written or other):
        raise InterjectionError(
            f"{entry.what.label} at {at.path or '<root>'} declares observes=True, but changed "
            "a value",
            at.path,
        )
    if written or entry.insertion.is_known_to_change(at.path):
        return written or bool(other)
    return any(differ(old, new) for old, new in other)


def _versions(value: Any) -> list[int]:
    return [write_count(tensor) for tensor in take_apart(value, objects=False)[1]]


# What gates have returned in a call, in case that the call has to begin again.


class Attempt:
    """An attempt to serve a call by known code, with what gates have returned in it.

    The model's own Python may have to take over from the start of the call. Nothing that is
    inserted is called a second time then: the gates return what they have returned before.
    """

    __slots__ = ("_given", "_met", "answers", "returned")

    def __init__(self) -> None:
        # For a call that begins again, what gates return, by node and pass; None for the value that
        # they receive, and an error for one that they raise.
        self.answers: dict[tuple[str, int], Any] = {}
        self.returned: dict[tuple[str, int], _Returned] = {}  # in this attempt, by node and pass
        self._met: list[weakref.ref[Tensor]] = []
        self._given: tuple[Any, ...] = ()

    def receives(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of the call."""
        self._given = args, kwargs

    def has_met(self, tensor: Tensor) -> bool:
        """Return whether the model may have a tensor, as an argument or from another gate."""
        returned = map(_live_tensor, self.returned.values())
        others = (reference() for reference in self._met)
        given = all_tensors_in(self._given)
        return any(one is tensor for one in itertools.chain(returned, others, given))

    def note(self, path: str, number: int, given: Tensor, keeps: bool, may_change: bool) -> None:
        """Note what a gate has returned, in a pass of a node.

        With `keeps`, it is kept alive; with `may_change`, the model may change it in place.
        """
        held = given if keeps else weakref.ref(given)
        self.returned[path, number] = held, write_count(given), may_change

    def note_unchanged(self, path: str, number: int) -> None:
        """Note that a gate has returned the value that it was given, as it was."""
        self.returned[path, number] = _UNCHANGED

    def refuse(self, path: str, number: int) -> None:
        """Note that a gate has done something that it cannot do again."""
        self.returned[path, number] = None, 0, True

    def meets(self, tensor: Tensor) -> None:
        """Note that the model has a tensor from a gate."""
        self._met.append(weakref.ref(tensor))

    def hands_on(self, gates: Sequence[Gate], given: Any) -> None:
        """Have the gates at a place in known code return once more what they have returned.

        The model's Python takes over behind the op before that place, and comes to all of them. The
        last of the gates, in the order in which they were called there, has returned what is given,
        or has raised the given error; None stands for the value that it received.
        """
        for gate in gates:
            take_back(gate)
            at = gate.at.path, gate_passes(gate)
            self.answers[at] = given if gate is gates[-1] else None  # the value has theirs by now

    def can_begin_again(self) -> bool:
        """Return whether gates could return what they have returned."""
        return not any(map(_why_not, self.returned.values()))

    def begin_again(self) -> None:
        """Have gates return what they have returned.

        Raise `InterjectionError` if that is gone, or was changed since.
        """
        returned, self.returned, self._met = self.returned, {}, []
        for (path, number), value in returned.items():
            if why := _why_not(value):
                raise InterjectionError(
                    f"what is inserted at {path!r} has been called, and {why}; but the call has to "
                    "begin again, since something inserted has returned another kind of value than "
                    "in earlier calls: call the model again",
                    path,
                )
            self.answers[path, number] = _live_tensor(value)


# What a gate has returned, or a weak reference to it, or None if it cannot be returned again; its
# version; and whether the model may change it in place.
_Returned = tuple[Any, int, bool]
_UNCHANGED: _Returned = None, -1, False  # the value that it was given


def _live_tensor(returned: _Returned) -> Tensor | None:
    tensor = returned[0]
    return tensor() if isinstance(tensor, weakref.ref) else tensor


def _why_not(returned: _Returned) -> str:
    """Return why a gate cannot return once more what it has returned; "" if it can."""
    if returned is _UNCHANGED:
        return ""
    given, (_, version, may_change) = _live_tensor(returned), returned
    if given is None:
        return "what it returned is gone"
    # torch does not count the changes of tensors of the inference mode.
    was_changed = may_change if is_inference(given) else write_count(given) != version
    return "what it returned was changed" if was_changed else ""


# The classes that manage the gradients of a node: for hooks, and for other interjections.
_Watching = tuple[CallGradients | None, CallGradients | None]


class CallState:
    """The state of one call of the model that gates share. Outside of calls, there is no plan."""

    __slots__ = (
        "attempt", "containers", "error", "is_repeated", "kept", "models_own", "passes", "plan",
        "reshaped", "through",
    )  # fmt: skip

    def __init__(self, plan: InsertionPlan | None, outer: CallState | None = None) -> None:
        self.plan: InsertionPlan | None = plan
        self.through: dict[tuple[str, int], _Watching] = {}  # managers of gradients, by node, pass
        self.error: Exception | None = None  # what an insertion has raised first
        self.models_own: Exception | None = None  # what the node itself has raised, inside a gate
        self.kept: dict[Any, Any] = {}  # the store of interjections (see `of_this_run`)
        self.reshaped: dict[str, None] = {}  # insertions that changed a shape or dtype, with how
        self.passes: dict[tuple[str, str], int] = {}  # of gates so far, by node and role
        self.attempt: Attempt = Attempt()  # what gates have returned so far
        # True if the backward pass does a checkpointed block again.
        self.is_repeated: bool = outer is not None and outer.is_repeated
        # The changes to containers that the insertions of the running gate made.
        self.containers: Containers = Containers() if outer is None else outer.containers


class _CurrentCall(threading.local):
    def __init__(self) -> None:
        self.call: CallState = CallState(None)


_local = _CurrentCall()


def applying(plan: InsertionPlan) -> AbstractContextManager[None]:
    """Make the gates that the calling thread reaches call the insertions of a plan.

    Raises:
        Exception: an error raised by an insertion, if the model has caught it.
    """
    return _RunningPlan(plan)


class _RunningPlan:
    """The context of `applying`; a class, since it is entered in each call of a model."""

    __slots__ = ("_before", "_plan")

    def __init__(self, plan: InsertionPlan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        self._before = before = _local.call
        _local.call = CallState(self._plan, before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call, _local.call = _local.call, self._before
        if error is None and call.error is None:
            return
        noted, reshaped = call.error, call.reshaped
        # Python's operators say of a TypeError inside of them that they do not fit their operands.
        is_hidden = isinstance(noted, TypeError) and type(error) is TypeError and error is not noted
        raised = noted if error is None or is_hidden else error
        if not isinstance(raised, Exception):
            return
        for note in reshaped:
            if note not in getattr(raised, "__notes__", ()):
                raised.add_note(note)
        if error is None or is_hidden:
            raise raised from None


def _insertions_of_block() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes gates do again what they do from now on in the call."""
    state = _local.call
    plan, kept, passes = state.plan, dict(state.kept), dict(state.passes)

    @contextmanager
    def repeated() -> Iterator[None]:
        before = _local.call
        _local.call = now = CallState(plan)
        now.kept, now.passes, now.is_repeated = dict(kept), dict(passes), True
        try:
            yield
        finally:
            _local.call = before

    return repeated


KEEPERS.append(_insertions_of_block)


class _UncountedInsertion:
    """Stands for an insertion in a block that is done again: its calls are not counted twice."""

    changes: frozenset[str] = frozenset()  # those that are known, as its own `CallTally`

    @property
    def _tally(self) -> _UncountedInsertion:
        """The object that counts its calls."""
        return self

    def fired(self, *_: object) -> None:
        """Count nothing."""

    def failed(self) -> None:
        """Count nothing."""

    def is_known_to_change(self, path: str, calls: int = 1) -> bool:
        """Return that nobody needs to know."""
        return True


def _silent_entries(entries: Sequence[LocatedInsertion]) -> tuple[LocatedInsertion, ...]:
    """Return those of some insertions that change values, without their reports."""
    found = [copy.copy(entry) for entry in entries if not entry.what.observes]
    for entry in found:
        entry.insertion = cast("Any", _UncountedInsertion())
    return tuple(found)


@contextmanager
def again() -> Iterator[None]:
    """Run a call of the model again from its start, without calling what was called already.

    Raises:
        InterjectionError: what was returned before is gone, or was changed since.
    """
    current = _local.call.attempt
    current.begin_again()
    _local.call.passes = {}
    try:
        yield
    finally:
        current.answers = {}


def attempt() -> Attempt:
    """Return what the gates of the call have returned so far."""
    return _local.call.attempt


def gate_passes(gate: Gate) -> int:
    """Return how often the call has passed a gate so far."""
    return _local.call.passes.get((gate.at.path, gate.role), 0)


def take_back(gate: Gate) -> None:
    """Have the latest pass of a gate be done again by the model's Python."""
    _local.call.passes[gate._key] -= 1


def _note_reshaped(entry: LocatedInsertion, at: NodePass, old: Any, new: Any) -> None:
    """Record that an insertion changed a shape or dtype, so that errors of the call mention it."""
    if old is not new and isinstance(old, Tensor) and isinstance(new, Tensor):
        with unseen():
            before, after = meta_of(old), meta_of(new)
        if before != after:
            what = getattr(entry.what, "function", None)
            name = getattr(what, "__name__", entry.what.label)
            code = getattr(what, "__code__", None)
            source = "" if code is None else (
                f" ({place_text(code.co_filename, code.co_firstlineno)})"
            )  # fmt: skip
            was, now = (
                f"{'' if old.dtype == new.dtype else f'{t.dtype} '}{t.shape}"
                for t in (before, after)
            )
            where = at.path or "the whole model"
            _local.call.reshaped[f"`{name}`{source} at `{where}` turned {was} into {now}"] = None


def noted(error: Exception) -> Exception:
    """Remember an error, so that the call raises it even if the model catches it."""
    _local.call.error = _local.call.error or error
    return error


def raise_caught() -> None:
    """Raise what something inserted has raised in this call, if the model has caught it."""
    if _local.call.error is not None:
        raise _local.call.error


def is_repeated() -> bool:
    """Return whether the backward pass does a checkpointed block again."""
    return _local.call.is_repeated


def of_this_run() -> dict[Any, Any]:
    """Return the store that interjections use during one call of the model on this thread."""
    return _local.call.kept


def exchange_store(store: dict[Any, Any]) -> dict[Any, Any]:
    """Have interjections use another store; return the one so far."""
    before, _local.call.kept = _local.call.kept, store
    return before


class Gate:
    """A place around a node at which insertions are called.

    The node is given in the pass in which the gate was recorded, with the structure of the values
    passed to them, and the plan of the insertions that were active then.
    """

    is_gate = True
    counts = False  # whether it counts its passes, instead of being in the recorded one
    is_followed = False  # whether its work is recorded like the model's own code, instead of one op
    role = ""

    def __init__(
        self, at: NodePass, slots: tuple[Slot, ...], shape: Any, plan: InsertionPlan
    ) -> None:
        self.at = at
        self.slots = slots
        self.shape = shape
        self._key = at.path, self.role
        self._passes: dict[int, NodePass] = {at.number: at}
        self.tells_in_place: bool = self.role == "after" and has_mutable((shape,))
        if self.role == "before":  # the tuple of arguments and the dict of keywords are new
            args, kwargs = shape.items
            self.tells_in_place = has_mutable((*args.items, *kwargs.items))
        self.is_ahead: bool = self.role in ("before", "entry")  # the node alone gets its result
        # Weak, so that paths do not keep former insertions alive. A trace held by the user does.
        self._plan = weakref.ref(plan)
        with torch._C.DisableTorchFunction():  # a label may look at tensors
            labels = dict.fromkeys(
                re.sub(r"\W.*", "", entry.what.label, flags=re.DOTALL)
                for entry in plan.entries_of(slots)
            )
        kind = "input" if self.is_ahead else "output"
        name = at.path.rpartition(".")[2]
        name = f"{name}_{kind}" if name and self.is_ahead else name or kind
        # No function has this name, so that names of the model's own ops stay unchanged.
        self.__name__: str = "__".join([name, *labels] if labels else [name, "gate"])
        self.__module__ = __name__

    @property
    def described(self) -> str:
        """Its description for messages."""
        where = f"at {self.at.path!r}" if self.at.path else "around the whole model"
        labels = self.__name__.split("__")[1:]
        return f"the insertion {where} ({', '.join(labels)})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Gate)
            and self.role == other.role
            and (self.at.path, self.at.scope) == (other.at.path, other.at.scope)
            and (self.slots, self.shape) == (other.slots, other.shape)
        )

    def __hash__(self) -> int:
        return hash((self.role, self.at.path))

    def __repr__(self) -> str:
        return f"<{self.role} {self.at.path or '<root>'}: {self.__name__}>"

    def __call__(self, *values: Any) -> Any:
        """Call the insertions.

        Return the tensors and numbers to continue with; if there are lists or dicts, followed by a
        flag that says whether to update these in place.
        """
        outer, _local.call.containers = _local.call.containers, Containers()
        answers = _local.call.attempt.answers
        at = self._next_pass()
        if answers and (at.path, at.number) in answers:
            given = answers.pop((at.path, at.number))
            _local.call.containers = outer
            if isinstance(given, Exception):
                raise given
            return values[0] if given is None else given
        entries = self._entries(at.number)
        try:
            given = self._through(values, at, entries)
            in_place = _local.call.containers.are_kept and not _local.call.containers.others
        except Exception as error:
            self.failed(error, entries)
            raise
        finally:
            _local.call.containers = outer
        if not self.tells_in_place:
            return given
        return (*(given if isinstance(given, tuple) else (given,)), in_place)

    @staticmethod
    def failed(error: Exception, entries: Sequence[LocatedInsertion]) -> None:
        """Note an error that an insertion has raised, or the node itself."""
        if error is not _local.call.models_own:
            noted(error)
        for entry in entries:
            entry.insertion.failed()

    def _unseen(self) -> AbstractContextManager[Any]:
        """Return a context for its own operations on values of the model."""
        return nullcontext() if self.is_followed else unseen()

    def _next_pass(self) -> NodePass:
        """Return the pass that begins, and count it."""
        passes, number = _local.call.passes, self.at.number
        if self.counts and _local.call.plan is not None:
            number = passes.get(self._key, 0)
        passes[self._key] = number + 1
        return self._passes.get(number) or self._pass(number)

    def _pass(self, number: int) -> NodePass:
        at = self._passes[number] = replace(self.at, number=number)
        return at

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        raise NotImplementedError

    def _entries(self, number: int) -> tuple[LocatedInsertion, ...]:
        """Return the insertions that are called in a pass, in the order in which they were made."""
        plan = _local.call.plan or self._plan()
        if plan is None:
            raise InterjectionError(
                f"the insertion at {self.at.path or '<root>'} that was recorded is gone",
                self.at.path,
            )
        entries = self.entries_in(plan, number)
        return _silent_entries(entries) if _local.call.is_repeated else entries

    def entries_in(self, plan: InsertionPlan, number: int) -> tuple[LocatedInsertion, ...]:
        """Return the insertions of a plan that are called in a pass, in order."""
        _, entries, selects, _ = plan.called_at.get(id(self)) or self.called_by(plan)
        if not selects:
            return entries
        total = plan.totals.get(self.at.path)
        return tuple(e for e in entries if e.insertion.passes.admits(number, total))

    def called_by(self, plan: InsertionPlan) -> Called:
        """Return what of a plan is called here, and note it."""
        entries = plan.entries_of(self.slots)
        selects = not all(entry.insertion.passes.admits_all for entry in entries)
        called: Called = self, entries, selects, None
        plan.called_at[id(self)] = called
        return called


class AfterGate(Gate):
    """Receives the output of a node, and its inputs if an insertion wants them.

    The structure of its inputs is None if no insertion wants them. If the node `writes`, it worked
    in place, on a copy of the last tensor passed here, which has to receive the value.
    """

    role = "after"

    def __init__(
        self,
        at: NodePass,
        slots: tuple[Slot, ...],
        shape: Any,
        plan: InsertionPlan,
        given: Any = None,
        writes: bool = False,
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self._given = given
        self.writes = writes
        self._count = count_of(shape)
        self.exchanged: tuple[int, ...] = exchangeable(shape)
        self._has_receivers = any("backward" in slot.forms for slot in slots)
        self._is_simple = (
            shape == LeafShape(Tensor, 0) and given is None and not (writes or self._has_receivers)
        )

    def __call__(self, *values: Any) -> Any:
        """Call the insertions (see `Gate`)."""
        call = _local.call
        plan = call.plan if self.counts else None
        called = None
        if plan is not None:
            called = plan.called_at.get(id(self)) or self.called_by(plan)
        if called is None or called[3] is None or call.attempt.answers or call.is_repeated:
            if not self._is_simple or call.attempt.answers:
                return super().__call__(*values)
            return self._exchange_all(values[0])
        # The usual case: one insertion, and no containers.
        value, entry = values[0], called[3]
        is_due = not called[2] or self.is_due(entry, call)
        at = self.begin(call.passes)
        if not is_due:
            return value
        try:
            return self._exchange(entry, value, at)
        except Exception as error:
            self.failed(error, (entry,))
            raise

    def _exchange_all(self, value: Any) -> Any:
        at = self._next_pass()
        entries = self._entries(at.number)
        try:
            for entry in entries:
                value = self._exchange(entry, value, at)
        except Exception as error:
            self.failed(error, entries)
            raise
        return value

    def called_by(self, plan: InsertionPlan) -> Called:
        """Return what of a plan is called here, and note it."""
        called = super().called_by(plan)
        if self._is_simple and len(called[1]) == 1:
            called = plan.called_at[id(self)] = (*called[:3], called[1][0])
        return called

    def is_due(self, entry: LocatedInsertion, call: CallState) -> bool:
        """Return whether an insertion is called in the pass that comes next."""
        total = None if call.plan is None else call.plan.totals.get(self.at.path)
        return entry.insertion.passes.admits(call.passes.get(self._key, 0), total)

    def begin(self, passes: dict[tuple[str, str], int]) -> NodePass:
        """Return the pass that begins, and count it."""
        number = passes.get(self._key, 0)
        passes[self._key] = number + 1
        return self._passes.get(number) or self._pass(number)

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        """Call the insertions; return the tensors and numbers of the new value."""
        found = list(values[: self._count])
        through: _Watching = (None, None)
        if self._has_receivers:
            through = _local.call.through.pop((at.path, at.number), through)
        of_hooks, of_others = through if torch.is_grad_enabled() else (None, None)
        if of_others is not None:
            _exchange_tensors(found, of_others.leave)
        inputs = None
        for entry in entries:
            if not entry.after:
                continue
            if inputs is None:
                inputs = NO_INPUTS
                if self._given is not None:
                    inputs = as_inputs(assemble(self._given, list(values[self._count :])))
            shape = shape_at(self.shape, entry.dig)
            if shape is not None:
                self._call(entry, shape, _pass_of_part(at, entry), inputs, found)
        if of_hooks is not None:  # their gradients are those of what forward hooks returned
            _exchange_tensors(found, of_hooks.leave)
        given = [found[number] for number in self.exchanged]
        if self.writes:
            return self._written(values[-1], given[0])
        return given[0] if len(given) == 1 else tuple(given)

    def _exchange(self, entry: LocatedInsertion, value: Any, at: NodePass) -> Any:
        """Call an insertion at a node that returns one tensor."""
        is_plain = type(value) is Tensor and not (
            function_modes() or value.is_inference() or value.is_nested
        )
        version = value._version if is_plain else write_count(value)
        result = entry.what.after(at, NO_INPUTS, value)
        if is_plain and value._version == version:  # as `exchanged_for`, in fewer instructions
            if result is None or result is value:
                entry.insertion.fired(at, False)
                return value
            if (
                type(result) is Tensor
                and not result.is_nested
                and result.dtype is value.dtype
                and result.shape == value.shape
                and at.path in entry.insertion._tally.changes
                and not entry.what.observes
            ):
                entry.insertion._tally.noted.append((at, True, 1))
                return result
        return self.exchanged_for(entry, value, result, at, version)

    def exchanged_for(
        self, entry: LocatedInsertion, value: Any, result: Any, at: NodePass, version: int
    ) -> Any:
        """Return what takes the place of a value, for what an insertion has returned.

        The version is the one that the value had before. Raise `InterjectionError` if it does not
        fit.
        """
        found = [value]
        if result is not None:
            collect_returned(self.shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, [value], found, [version]))
        _note_reshaped(entry, at, value, found[0])
        return found[0]

    def _call(
        self, entry: LocatedInsertion, shape: Any, at: NodePass, inputs: Inputs, found: list[Any]
    ) -> None:
        before = list(found)
        versions = [write_count(value) for value in found]
        value = assemble(shape, found)
        result = entry.what.after(at, inputs, value)
        if type(shape) is ContainerShape:
            result = _local.call.containers.settle((shape,), (value,), (result,), found, at, entry)[
                0
            ]
        if result is not None:
            collect_returned(shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, before, found, versions))
        for old, new in zip(before, found, strict=True):
            _note_reshaped(entry, at, old, new)

    def _written(self, original: Tensor, value: Tensor) -> Tensor:
        """Pass the value on to all holders of the tensor that the node works on."""
        if value is original:
            return value
        with unseen():
            if meta_of(value).shape != meta_of(original).shape:
                raise InterjectionError(
                    f"{self.at.path} works in place on a tensor of shape "
                    f"{meta_of(original).shape}, which {describe(value)} cannot replace",
                    self.at.path,
                )
            # Nothing can be written into a leaf, other than by code that writes to it itself.
            if torch.is_grad_enabled() and original.is_leaf and original.requires_grad:
                raise InterjectionError(
                    f"the model drops what {self.at.path} returns, so that nothing can replace "
                    "it: insert at the node before, which gives the value",
                    self.at.path,
                )
        with self._unseen():
            return original.copy_(value)


class StateGate(AfterGate):
    """Receives a parameter or buffer, whose shape and dtype must not change."""

    def _exchange(self, entry: LocatedInsertion, value: Any, at: NodePass) -> Any:
        if entry.place.shown not in ("", at.path):
            at = replace(at, path=entry.place.shown)
        if entry.what.self_contained or entry.what.observes:
            return super()._exchange(entry, value, at)
        copied = value.clone()  # what a function does to its argument must not reach the model
        version = write_count(copied)
        result = entry.what.after(at, NO_INPUTS, copied)
        found = [value]
        if result is None or result is copied:
            found = [value if write_count(copied) == version else copied]
        else:
            collect_returned(self.shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, [value], found, [write_count(value)]))
        return found[0]


class BeforeGate(Gate):
    """Receives the inputs of a node before it runs.

    The shape is of its arguments: a tuple of them, and a dict. The places are the inputs that
    insertions apply to: for each slot the keys that lead to it.
    """

    role = "before"

    def __init__(
        self,
        at: NodePass,
        slots: tuple[Slot, ...],
        shape: Any,
        plan: InsertionPlan,
        places: dict[Slot, tuple[Any, ...]],
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self.places = places
        self.exchanged: tuple[int, ...] = exchangeable(shape)

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        """Call the insertions; return the tensors and numbers that the node is given."""
        found = list(values)
        for entry in reversed(entries):
            if entry.slot in self.places:
                shape = shape_at(self.shape, self.places[entry.slot])
                if shape is not None:
                    self._call(entry, shape, found, at)
            elif entry.before:
                self._call(entry, self.shape, found, at)
        given = [found[number] for number in self.exchanged]
        return given[0] if len(given) == 1 else tuple(given)

    def _call(self, entry: LocatedInsertion, shape: Any, found: list[Any], at: NodePass) -> None:
        before, versions = list(found), [write_count(value) for value in found]
        value = assemble(shape, found)
        if entry.slot in self.places:
            at = replace(at, path=entry.place.shown, module=None)
            result = entry.what.after(at, NO_INPUTS, value)
        else:
            result = entry.what.before(at, as_inputs(value))
            if isinstance(result, tuple):
                kwargs = result.kwargs if isinstance(result, Inputs) else value[1]
                result = (tuple(result), kwargs)
            elif result is not None:
                raise InterjectionError(
                    f"{entry.what.label} at {at.path or '<root>'}: before() has to return the "
                    f"inputs as a tuple, or None; it returned {describe(result)}",
                    at.path,
                )
        if entry.slot in self.places:
            if type(shape) is ContainerShape:
                results = _local.call.containers.settle(
                    (shape,), (value,), (result,), found, at, entry
                )
                result = results[0]
        elif result is None:
            result, _local.call.containers.are_kept = value, True
        else:  # the tuple of arguments and the dict of keywords are new in each call
            _local.call.containers.settle(
                (*shape.items[0].items, *shape.items[1].items), (*value[0], *value[1].values()),
                (*result[0], *result[1].values()), found, at, entry,
            )  # fmt: skip
        if result is not None:
            collect_returned(shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, before, found, versions))
        for old, new in zip(before, found, strict=True):
            _note_reshaped(entry, at, old, new)


class EntryGate(Gate):
    """Exchanges tensors that a node is given: the node works on aliases, or on a copy.

    The insertions of the slots receive the gradients of the node's inputs. The shape is of its
    arguments: a tuple of them, and a dict. `written` is the number of the tensor that the node
    works on in place; None if it does not.
    """

    role = "entry"

    def __init__(
        self,
        at: NodePass,
        slots: tuple[Slot, ...],
        shape: Any,
        plan: InsertionPlan,
        written: int | None = None,
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self.written = written
        self.exchanged: tuple[int, ...] = exchangeable(shape, (Tensor,))

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        """Return the tensors that the node is given."""
        found = list(values)
        receivers = [entry for entry in entries if entry.backward]
        if receivers and torch.is_grad_enabled():
            _exchange_tensors(found, lambda tensors: self._watched(receivers, tensors, at))
        if self.written is not None:
            # The original gets the value at the end: what autograd keeps for the op, and the
            # aliases, must not be written to.
            with self._unseen():
                found[self.written] = found[self.written].clone()
        given = [found[number] for number in self.exchanged]
        return given[0] if len(given) == 1 else tuple(given)

    def _watched(
        self, receivers: list[LocatedInsertion], tensors: list[Tensor], at: NodePass
    ) -> list[Tensor]:
        """Watch the gradients for insertions; return the inputs of the node."""
        watching: list[CallGradients | None] = []
        # Ops under autocast share one cast of each weight, which an alias would not have.
        keeps_casts = self.at.function is not None and any_autocast()
        for of_hooks in (True, False):  # if they only watch, one tensor stays one for the node
            calls = [
                (entry.what, at, entry.insertion.fired_backward)
                for entry in receivers
                if isinstance(entry.what, ChecksGradients) is of_hooks
            ]
            gradients = None
            if calls:
                gradients = CallGradients(
                    calls, tensors, writes=False, apart=not of_hooks, keeps_casts=keeps_casts
                )
                tensors = gradients.enter()
            watching.append(gradients)
        _local.call.through[at.path, at.number] = (watching[0], watching[1])
        return tensors


class InputsGate(Gate):
    """Copies the inputs of a node that may write to them, for those who see them after it."""

    role = "inputs"

    def __init__(
        self, at: NodePass, slots: tuple[Slot, ...], shape: Any, plan: InsertionPlan
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self.exchanged: tuple[int, ...] = exchangeable(shape)

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        """Return the copies; numbers stay."""
        # No lazy copies: the write would move memory whose address the caller may know.
        with self._unseen():
            copies = {id(v): v.clone() for v in values if isinstance(v, Tensor)}
        given = [copies.get(id(values[number]), values[number]) for number in self.exchanged]
        return given[0] if len(given) == 1 else tuple(given)


class CountGate(Gate):
    """Reports that a node was reached, and receives no values."""

    role = "before"

    def __init__(self, at: NodePass, slots: tuple[Slot, ...], plan: InsertionPlan) -> None:
        super().__init__(at, slots, take_apart(((), {}))[0], plan)

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> None:
        for entry in reversed(entries):
            entry.what.before(at, NO_INPUTS)
            entry.insertion.fired(at, False)


class InsteadGate(Gate):
    """Is called instead of a function or a module.

    The shape is of the arguments: a tuple of them, and a dict.
    """

    role = "instead"
    calls_node = True
    # The arguments themselves, in a run that is not replayed; None for what is assembled from their
    # values.
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def stands_for(self) -> Callable[..., Any] | None:
        """The function that it replaces, whose node it is."""
        return self.at.function

    def _through(
        self, values: tuple[Any, ...], at: NodePass, entries: tuple[LocatedInsertion, ...]
    ) -> Any:
        """Return the result of the outermost insertion."""
        args, kwargs = self.given or assemble(self.shape, list(values))
        call: Callable[..., Any] = self._node
        for entry in entries:
            if entry.instead:
                call = self._around(entry, call, at)
        return call(*args, **kwargs)

    def _node(self, *args: Any, **kwargs: Any) -> Any:
        # A module without parts, such as an empty `nn.Sequential`, is false.
        called: Any = self.at.function if self.at.module is None else self.at.module
        try:
            return called(*args, **kwargs)
        except Exception as error:
            _local.call.models_own = error  # for which the model may have a handler
            raise

    def _around(
        self, entry: LocatedInsertion, call: Callable[..., Any], at: NodePass
    ) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            node = ObservedNode(call, Inputs(args, kwargs))
            result = entry.what.instead(at, node, node.given)
            entry.insertion.fired(at, not node.gave(result))
            return result

        return instead


def _exchange_tensors(found: list[Any], change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Replace all tensors among some values."""
    numbers = [number for number, value in enumerate(found) if isinstance(value, Tensor)]
    for number, tensor in zip(numbers, change([found[n] for n in numbers]), strict=True):
        found[number] = tensor


def as_inputs(value: Any) -> Inputs:
    """Convert the arguments of a node to the form that interjections receive."""
    args, kwargs = value
    return Inputs(tuple(args), kwargs)


def _pass_of_part(at: NodePass, entry: LocatedInsertion) -> NodePass:
    return replace(at, path=entry.place.shown) if entry.dig else at


# Gates in generated code, for as long as their results are of the same kind as their values.


class SplicedGate:
    """Passes a value through a gate, behind so many ops and guards of a run, put by a splicer.

    `is_part` says whether a tensor is a part of the model, or was one of its arguments.
    """

    def __init__(
        self,
        gate: AfterGate,
        splicer: Splicer,
        is_part: Callable[[Tensor], bool],
        place: tuple[int, int],
    ) -> None:
        self.gates: tuple[AfterGate, ...] = (gate,)  # those here up to this one, in order
        self._gate = gate
        self._path = gate.at.path
        self._splicer = splicer
        self._is_part = is_part
        self._place = place
        self._tests: dict[Any, KindTest] = {}  # by the shape
        self._latest: KindTest | None = None

    def __call__(self, value: Any) -> Any:
        """Pass a value through.

        Raise `Interrupted` if the gate has raised an error, or returned another kind of value.
        """
        call, gate = _local.call, self._gate
        plan, current = call.plan, call.attempt
        assert plan is not None
        _, _, selects, entry = plan.called_at.get(id(gate)) or gate.called_by(plan)
        if entry is None or current.answers or call.is_repeated:
            return self._slowly(value, tensor_kind(value))
        if selects and not gate.is_due(entry, call):
            gate.begin(call.passes)
            return value
        test = self._latest
        if test is None or not test.is_alike(value):
            test = self._latest = self._test_of(value)
            if test is None:
                return self._slowly(value, tensor_kind(value))
        kind = test.kind
        # The usual case: what `AfterGate` does, in a third of the instructions.
        passes, key = call.passes, gate._key
        number = passes.get(key, 0)
        passes[key] = number + 1
        at, version = gate._passes.get(number) or gate._pass(number), value._version
        try:
            given = entry.what.after(at, NO_INPUTS, value)
            if value._version == version:
                if given is None or given is value:
                    if test.is_alike(value):
                        entry.insertion.fired(at, False)
                        current.note_unchanged(self._path, number)
                        return value
                elif (
                    sys.getrefcount(given) <= REFERENCES_OF_LOCAL
                    and test.is_alike(given)
                    and not entry.what.observes
                    and self._path in (tally := entry.insertion._tally).changes
                ):
                    keeps, writes = self._splicer.keeps, self._splicer.writes
                    if not writes or not (keeps or _is_even_shared(given)):
                        tally.noted.append((at, True, 1))
                        held = given if keeps else weakref.ref(given)
                        current.returned[self._path, number] = held, given._version, writes
                        return given
            given = gate.exchanged_for(entry, value, given, at, version)
        except Exception as error:
            gate.failed(error, (entry,))
            self._hand_on(error)
            raise Interrupted(*self._place) from None
        is_referenced = sys.getrefcount(given) > REFERENCES_OF_LOCAL
        return self._weighed(value, given, is_referenced, number, kind, version)

    def _test_of(self, value: Any) -> KindTest | None:
        """Return a test for what is like a value; None if too little is known of that."""
        if type(value) is not Tensor or value.is_nested:
            return None
        test = self._tests.get(value.shape)
        if test is None or not test.is_alike(value):
            kind = tensor_kind(value)
            if kind is None or kind[0]:  # a tensor of inference mode has no version to compare
                return None
            if len(self._tests) >= _MOST_SHAPES:
                self._tests.clear()
            test = self._tests[value.shape] = KindTest(value, kind)
        return test

    def _slowly(self, value: Any, kind: tuple[Any, ...] | None) -> Any:
        if is_repeated():
            return self._gate(value)
        number, version = gate_passes(self._gate), write_count(value)
        try:
            given = self._gate(value)
        except Exception as error:
            self._hand_on(error)
            raise Interrupted(*self._place) from None
        is_referenced = sys.getrefcount(given) > REFERENCES_OF_LOCAL
        return self._weighed(value, given, is_referenced, number, kind, version)

    def _weighed(
        self,
        value: Any,
        given: Any,
        is_referenced: bool,
        number: int,
        kind: tuple[Any, ...] | None,
        version: int,
    ) -> Any:
        """Return what a gate has returned for a value in a pass, if known code can go on with it.

        Somebody else may have a reference to that, too. The kind and version are those of the value
        before.
        """
        path, current, splicer = self._path, attempt(), self._splicer
        if given is not value:
            is_met = is_referenced and (current.has_met(given) or self._is_part(given))
            may_change = splicer.writes
            if not is_met and fits(kind, given, may_change):
                if not may_change or is_referenced or not splicer.keeps:
                    current.note(path, number, given, splicer.keeps, may_change)
                else:
                    current.meets(given)
                    current.note(path, number, given.clone(), True, False)
                return given
            current.note(path, number, given, True, False)
        else:
            is_fit = kind is not None and tensor_kind(value) == kind
            is_untouched = write_count(value) == version and not value.is_inference()
            # Another kind tells whether the data were exchanged.
            if is_untouched and (is_fit or kind is None):
                current.note_unchanged(path, number)
            elif is_shared(value):
                current.refuse(path, number)
            elif is_fit:
                current.note(path, number, value, splicer.keeps, splicer.writes)
            else:
                current.note(path, number, value, True, False)
            if is_fit:
                return value
        splicer.is_apart = True
        unfit = None
        if current.can_begin_again():
            unfit = Unfit(f"what is inserted at {path!r} gives another kind of tensor")
        hand_on = functools.partial(self._hand_on, None if given is value else given)
        raise Interrupted(*self._place, unfit, hand_on)

    def _hand_on(self, given: Any) -> None:
        """Have the model's Python go on from what the gate has returned, or raised."""
        attempt().hands_on(self.gates, given)


def fits(kind: tuple[Any, ...] | None, given: Any, writes: bool) -> bool:
    """Return whether a tensor can take the place of another, of some kind, in a known run.

    That may write to tensors in place.
    """
    if kind is None or type(given) is not Tensor or tensor_kind(given) != kind:
        return False
    return not (writes and is_shared(given))


def tensor_kind(tensor: Any) -> tuple[Any, ...] | None:
    """Return what code may rely on about a tensor, whatever is in it; None if that is not known."""
    if type(tensor) is not Tensor or is_uneven(tensor) or tensor.__dict__:
        return None
    if tensor._base is None:
        history = _history(tensor)
    else:
        history = requires_grad(tensor), is_leaf(tensor)
    return (
        tensor.is_inference(),
        _form(tensor),
        tensor.stride(),
        tensor.storage_offset(),
        history,
        tensor.is_conj(),
        tensor.is_neg(),
    )


_form = operator.attrgetter("dtype", "device", "shape")
_history = operator.attrgetter("requires_grad", "is_leaf")


class KindTest:
    """Tests whether other tensors are of the kind of one."""

    __slots__ = ("_guards", "_has_history", "kind")

    def __init__(self, tensor: Tensor, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self._has_history: bool = requires_grad(tensor)
        self._guards: Callable[[Any], bool] | None = None
        # A guard of torch.compile compares in one step what takes ten to ask for: all of the kind
        # but the offset, own attributes, and what is said of views and of leaves.
        is_usual = tensor._base is None and not tensor.storage_offset()
        if _guards is not None and is_usual and not (self._has_history and tensor.is_leaf):
            made = _guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._guards = made.check

    def is_alike(self, value: Any) -> bool:
        """Return whether a value is a tensor of the kind."""
        if self._guards is None:
            return tensor_kind(value) == self.kind
        return (
            type(value) is Tensor
            and not value.is_nested  # which the guard would end the process for
            and self._guards(value)
            and value._base is None
            and not (value.storage_offset() or value.__dict__)
            and not (self._has_history and value.is_leaf)
        )


# Seen in torch 2.13 to 2.15; it takes the mode of the thread into account that it was made in.
_guards: Any = internal("torch._C._dynamo.guards.TensorGuards", None)
_MOST_SHAPES = 64  # for which tests are kept


def is_shared(tensor: Tensor) -> bool:
    """Return whether other tensors may have the same memory."""
    return is_uneven(tensor) or _is_even_shared(tensor)


def _is_even_shared(tensor: Tensor) -> bool:
    return tensor._is_view() or _uses(tensor.untyped_storage()._cdata) > _uses_of_one()


# `sys.getrefcount` counts Python's references only, and a view has a storage object of its own over
# the same memory. Without the count of torch (2.13), all memory is taken to be shared.
_uses: Callable[[int], int] = internal("torch._C._storage_Use_Count", None) or (lambda _: 1 << 30)


@functools.cache
def _uses_of_one() -> int:
    """Return what it says of memory that one tensor has.

    Asking makes a storage object, which counts as well (2 in torch 2.13), so the number is
    measured: not when this is imported, which may be in the middle of a recording.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        probe = torch.empty(1, device="cpu")
        return _uses(probe.untyped_storage()._cdata)
