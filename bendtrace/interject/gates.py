"""Gates: the ops of a tape that call the interjections of a node.

A gate does not store which interjections to call: each run supplies its insertions, so that one
trace also serves another patch at the same node. Nor does a gate know which pass of the node it is
in, because the code of a loop serves all of its passes: a call counts them. What is inserted at
some passes only has a gate at each, and is asked there.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bendtrace._places import place_text
from bendtrace.errors import InterjectionError
from bendtrace.interject.attempt import Attempt
from bendtrace.interject.gradients import CallGradients, ChecksGradients
from bendtrace.interject.interjection import NO_INPUTS, Inputs, NodePass
from bendtrace.interject.plan import Entry, Plan, Slot
from bendtrace.interject.results import Containers, Observed, changed, collect_returned
from bendtrace.interject.structure import (
    Leaf,
    Shape,
    assemble,
    count_of,
    describe,
    differ,
    exchangeable,
    has_mutable,
    part_of,
    take_apart,
    version_of,
)
from bendtrace.tape.tape import meta_of
from bendtrace.torch_rules.mode_queries import unseen

# The classes that manage the gradients of a node: for hooks, and for other interjections.
_Watching = tuple[CallGradients | None, CallGradients | None]


class _Local(threading.local):
    plan: Plan | None = None

    def __init__(self) -> None:
        self.through: dict[tuple[str, int], _Watching] = {}
        self.error: Exception | None = None
        self.models_own: Exception | None = None  # raised by the node itself, inside of a gate
        self.kept: dict[Any, Any] = {}
        self.reshaped: dict[str, None] = {}  # the insertions, by slot, in this call of the model
        self.passes: dict[tuple[str, str], int] = {}  # by node and role, in this call
        self.attempt: Attempt = Attempt()
        self.containers = Containers()  # those of the running gate


_local = _Local()


def running(plan: Plan) -> AbstractContextManager[None]:
    """Make the gates that the calling thread reaches call the insertions of a plan.

    Raises:
        Exception: an error raised by an insertion, if the model has caught it.
    """
    return _Running(plan)


class _Running:
    """The context of `running`; a class, since it is entered in each call of a model."""

    __slots__ = ("_before", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        now = vars(_local)
        self._before = now.copy()
        now.update(
            plan=self._plan, through={}, error=None, kept={}, reshaped={}, passes={},
            attempt=Attempt(),
        )  # fmt: skip

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now = vars(_local)
        noted, reshaped = now["error"], now["reshaped"]
        # Python's operators say of a TypeError inside of them that they do not fit their operands.
        is_hidden = isinstance(noted, TypeError) and type(error) is TypeError and error is not noted
        raised = noted if error is None or is_hidden else error
        now.update(self._before)
        now["plan"], now["models_own"] = self._before.get("plan"), None
        if not isinstance(raised, Exception):
            return
        for note in reshaped:
            if note not in getattr(raised, "__notes__", ()):
                raised.add_note(note)
        if error is None or is_hidden:
            raise raised from None


@contextmanager
def again() -> Iterator[None]:
    """Run a call of the model again from its start, without calling what was called already.

    Raises:
        InterjectionError: what was returned before is gone, or was changed since.
    """
    current = _local.attempt
    current.begin_again()
    _local.passes = {}
    try:
        yield
    finally:
        current.answers = {}


def attempt() -> Attempt:
    """Return what the gates of the call have returned so far."""
    return _local.attempt


def passes_of(gate: Gate) -> int:
    """Return how often the call has passed a gate so far."""
    return _local.passes.get((gate.at.path, gate.role), 0)


def take_back(gate: Gate) -> None:
    """Have the latest pass of a gate be done again by the model's Python."""
    _local.passes[gate._key] -= 1


def _note_reshaped(entry: Entry, at: NodePass, old: Any, new: Any) -> None:
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
            _local.reshaped[f"`{name}`{source} at `{where}` turned {was} into {now}"] = None


def noted(error: Exception) -> Exception:
    """Remember an error, so that the call raises it even if the model catches it."""
    _local.error = _local.error or error
    return error


def raise_caught() -> None:
    """Raise what something inserted has raised in this call, if the model has caught it."""
    if _local.error is not None:
        raise _local.error


def of_this_run() -> dict[Any, Any]:
    """Return the store that interjections use during one call of the model on this thread."""
    return _local.kept


class Gate:
    """A place around a node at which insertions are called.

    Args:
        at: the node, in the pass in which the gate was recorded.
        slots: the slots of the insertions that are called here.
        shape: the structure of the values passed to them.
        plan: the insertions that were active when the gate was recorded.

    Attributes:
        counts: whether it counts its passes, instead of being in the one that it was recorded in.
    """

    is_gate = True
    counts = False
    role = ""

    def __init__(self, at: NodePass, slots: tuple[Slot, ...], shape: Any, plan: Plan) -> None:
        self.at = at
        self.slots = slots
        self.shape = shape
        self._key = at.path, self.role
        self._passes: dict[int, NodePass] = {at.number: at}
        self.tells_in_place: bool = self.role == "after" and has_mutable((shape,))
        if self.role == "before":  # the tuple of arguments and the dict of keywords are new
            args, kwargs = shape.items
            self.tells_in_place = has_mutable((*args.items, *kwargs.items))
        # Weak, so that paths do not keep former insertions alive. A trace held by the user does.
        self._plan = weakref.ref(plan)
        with torch._C.DisableTorchFunction():  # a label may look at tensors
            labels = dict.fromkeys(
                re.sub(r"\W.*", "", entry.what.label, flags=re.DOTALL)
                for entry in plan.entries_of(slots)
            )
        kind = "input" if self.role == "before" else "output"
        name = at.path.rpartition(".")[2]
        name = f"{name}_{kind}" if name and self.role == "before" else name or kind
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

        Returns:
            The tensors and numbers to continue with; if there are lists or dicts, followed by a
            flag that says whether to update these in place.
        """
        outer, _local.containers = _local.containers, Containers()
        answers = _local.attempt.answers
        at = self._next_pass()
        if answers and (at.path, at.number) in answers:
            given = answers.pop((at.path, at.number))
            _local.containers = outer
            if isinstance(given, Exception):
                raise given
            return values[0] if given is None else given
        entries = self._entries(at.number)
        try:
            given = self._through(values, at, entries)
            in_place = _local.containers.are_kept and not _local.containers.others
        except Exception as error:
            if error is not _local.models_own:
                noted(error)
            for entry in entries:
                entry.insertion.failed()
            raise
        finally:
            _local.containers = outer
        if not self.tells_in_place:
            return given
        return (*(given if isinstance(given, tuple) else (given,)), in_place)

    def _next_pass(self) -> NodePass:
        """Return the pass that begins, and count it."""
        passes, at = _local.passes, self.at
        if self.counts and _local.plan is not None:
            number = passes.get(self._key, 0)
            known = self._passes.get(number)
            at = self._passes[number] = replace(at, number=number) if known is None else known
        passes[self._key] = at.number + 1
        return at

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> Any:
        raise NotImplementedError

    def _entries(self, number: int) -> tuple[Entry, ...]:
        """Return the insertions that are called in a pass, in the order in which they were made."""
        plan = _local.plan or self._plan()
        if plan is None:
            raise InterjectionError(
                f"the insertion at {self.at.path or '<root>'} that was recorded is gone",
                self.at.path,
            )
        return self.entries_in(plan, number)

    def entries_in(self, plan: Plan, number: int) -> tuple[Entry, ...]:
        """Return the insertions of a plan that are called in a pass, in order."""
        known = plan.called_at.get(id(self))
        if known is None:
            entries = plan.entries_of(self.slots)
            selects = not all(entry.insertion.passes.admits_all for entry in entries)
            known = plan.called_at[id(self)] = self, entries, selects
        _, entries, selects = known
        if not selects:
            return entries
        total = plan.totals.get(self.at.path)
        return tuple(e for e in entries if e.insertion.passes.admits(number, total))


class AfterGate(Gate):
    """Receives the output of a node, and its inputs if an insertion wants them.

    Args:
        at: the pass.
        slots: the slots of the insertions that are called here.
        shape: the structure of the node's output.
        plan: the insertions that were active when the gate was recorded.
        given: the structure of the node's inputs; None if no insertion wants them.
        writes: whether the node worked in place, on a copy of the last tensor passed here, which
            has to receive the value.
    """

    role = "after"

    def __init__(
        self,
        at: NodePass,
        slots: tuple[Slot, ...],
        shape: Any,
        plan: Plan,
        given: Any = None,
        writes: bool = False,
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self._given = given
        self.writes = writes
        self._count = count_of(shape)
        self.exchanged: tuple[int, ...] = exchangeable(shape)
        self._is_simple = shape == Leaf(Tensor, 0) and given is None and not writes
        self._is_told = any("backward" in slot.forms for slot in slots)

    def __call__(self, *values: Any) -> Any:
        """Call the insertions (see `Gate`)."""
        if not self._is_simple or self._is_told or _local.attempt.answers:
            return super().__call__(*values)
        # The usual case, in which no containers are involved.
        at, value = self._next_pass(), values[0]
        entries = self._entries(at.number)
        try:
            for entry in entries:
                value = self._exchange(entry, value, at)
        except Exception as error:
            if error is not _local.models_own:
                noted(error)
            for entry in entries:
                entry.insertion.failed()
            raise
        return value

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> Any:
        """Call the insertions; return the tensors and numbers of the new value."""
        found = list(values[: self._count])
        through: _Watching = (None, None)
        if self._is_told:
            through = _local.through.pop((at.path, at.number), through)
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
            shape = part_of(self.shape, entry.dig)
            if shape is not None:
                self._call(entry, shape, _dug(at, entry), inputs, found)
        if of_hooks is not None:  # their gradients are those of what forward hooks returned
            _exchange_tensors(found, of_hooks.leave)
        given = [found[number] for number in self.exchanged]
        if self.writes:
            return self._written(values[-1], given[0])
        return given[0] if len(given) == 1 else tuple(given)

    def _exchange(self, entry: Entry, value: Any, at: NodePass) -> Any:
        """Call an insertion at a node that returns one tensor."""
        version, what, insertion = version_of(value), entry.what, entry.insertion
        result = what.after(at, NO_INPUTS, value)
        if version_of(value) == version:  # what follows would find out the same, in more time
            if result is None or result is value:
                insertion.fired(at, False)
                return value
            if type(result) is Tensor and not what.observes:
                known = insertion.is_known_to_change(at.path)
                insertion.fired(at, known or differ(value, result))
                _note_reshaped(entry, at, value, result)
                return result
        found = [value]
        if result is not None:
            collect_returned(self.shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, [value], found, [version]))
        _note_reshaped(entry, at, value, found[0])
        return found[0]

    def _call(
        self, entry: Entry, shape: Any, at: NodePass, inputs: Inputs, found: list[Any]
    ) -> None:
        before = list(found)
        versions = [version_of(value) for value in found]
        value = assemble(shape, found)
        result = entry.what.after(at, inputs, value)
        if type(shape) is Shape:
            result = _local.containers.settle((shape,), (value,), (result,), found, at, entry)[0]
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
            if original.is_leaf and original.requires_grad:  # into which nothing can be written
                raise InterjectionError(
                    f"the model drops what {self.at.path} returns, so that nothing can replace "
                    "it: insert at the node before, which gives the value",
                    self.at.path,
                )
            return original.copy_(value)


class StateGate(AfterGate):
    """Receives a parameter or buffer, whose shape and dtype must not change."""

    def _exchange(self, entry: Entry, value: Any, at: NodePass) -> Any:
        if entry.place.shown not in ("", at.path):
            at = replace(at, path=entry.place.shown)
        if entry.what.self_contained or entry.what.observes:
            return super()._exchange(entry, value, at)
        copied = value.clone()  # what a function does to its argument must not reach the model
        version = version_of(copied)
        result = entry.what.after(at, NO_INPUTS, copied)
        found = [value]
        if result is None or result is copied:
            found = [value if version_of(copied) == version else copied]
        else:
            collect_returned(self.shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, [value], found, [version_of(value)]))
        return found[0]


class BeforeGate(Gate):
    """Receives the inputs of a node before it runs.

    Args:
        at: the pass.
        slots: the slots of the insertions that are called here.
        shape: the structure of the arguments: a tuple of them, and a dict.
        plan: the insertions that were active when the gate was recorded.
        places: the inputs that insertions apply to: for each slot the keys that lead to it.
        written: number of the tensor that the node works on in place; None if it does not.
    """

    role = "before"

    def __init__(
        self,
        at: NodePass,
        slots: tuple[Slot, ...],
        shape: Any,
        plan: Plan,
        places: dict[Slot, tuple[Any, ...]],
        written: int | None = None,
    ) -> None:
        super().__init__(at, slots, shape, plan)
        self.places = places
        self.written = written
        self.exchanged: tuple[int, ...] = exchangeable(shape)

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> Any:
        """Call the insertions; return the tensors and numbers that the node is given."""
        found = list(values)
        for entry in reversed(entries):
            if entry.slot in self.places:
                shape = part_of(self.shape, self.places[entry.slot])
                if shape is not None:
                    self._call(entry, shape, found, at)
            elif entry.before:
                self._call(entry, self.shape, found, at)
        backward = [entry for entry in entries if entry.backward]
        if backward and torch.is_grad_enabled():
            _exchange_tensors(found, lambda tensors: self._watched(backward, tensors, at))
        if self.written is not None:
            # The original gets the value at the end: what autograd keeps for the op, and the
            # aliases, must not be written to.
            with unseen():
                found[self.written] = found[self.written].clone()
        given = [found[number] for number in self.exchanged]
        return given[0] if len(given) == 1 else tuple(given)

    def _watched(self, backward: list[Entry], tensors: list[Tensor], at: NodePass) -> list[Tensor]:
        """Watch the gradients for insertions; return the inputs of the node."""
        watching: list[CallGradients | None] = []
        for of_hooks in (True, False):  # if they only watch, one tensor stays one for the node
            told = [
                (entry.what, at, entry.insertion.fired_backward)
                for entry in backward
                if isinstance(entry.what, ChecksGradients) is of_hooks
            ]
            gradients = None
            if told:
                gradients = CallGradients(told, tensors, writes=False, apart=not of_hooks)
                tensors = gradients.enter()
            watching.append(gradients)
        _local.through[at.path, at.number] = (watching[0], watching[1])
        return tensors

    def _call(self, entry: Entry, shape: Any, found: list[Any], at: NodePass) -> None:
        before, versions = list(found), [version_of(value) for value in found]
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
            if type(shape) is Shape:
                settled = _local.containers.settle((shape,), (value,), (result,), found, at, entry)
                result = settled[0]
        elif result is None:
            result, _local.containers.are_kept = value, True
        else:  # the tuple of arguments and the dict of keywords are new in each call
            _local.containers.settle(
                (*shape.items[0].items, *shape.items[1].items), (*value[0], *value[1].values()),
                (*result[0], *result[1].values()), found, at, entry,
            )  # fmt: skip
        if result is not None:
            collect_returned(shape, result, found, at, entry)
        entry.insertion.fired(at, changed(entry, at, before, found, versions))
        for old, new in zip(before, found, strict=True):
            _note_reshaped(entry, at, old, new)


class InputsGate(Gate):
    """Copies the inputs of a node that may write to them, for those who see them after it."""

    role = "inputs"

    def __init__(self, at: NodePass, slots: tuple[Slot, ...], shape: Any, plan: Plan) -> None:
        super().__init__(at, slots, shape, plan)
        self.exchanged: tuple[int, ...] = exchangeable(shape)

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> Any:
        """Return the copies; numbers stay."""
        # No lazy copies: the write would move memory whose address the caller may know.
        with unseen():
            copies = {id(v): v.clone() for v in values if isinstance(v, Tensor)}
        given = [copies.get(id(values[number]), values[number]) for number in self.exchanged]
        return given[0] if len(given) == 1 else tuple(given)


class CountGate(Gate):
    """Reports that a node was reached, and receives no values.

    Args:
        at: the pass.
        slots: the slots of the insertions to notify.
        plan: the insertions that were active when the gate was recorded.
    """

    role = "before"

    def __init__(self, at: NodePass, slots: tuple[Slot, ...], plan: Plan) -> None:
        super().__init__(at, slots, take_apart(((), {}))[0], plan)

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> None:
        for entry in reversed(entries):
            entry.what.before(at, NO_INPUTS)
            entry.insertion.fired(at, False)


class InsteadGate(Gate):
    """Is called instead of a function or a module.

    Args:
        at: the pass.
        slots: the slots of the insertions that are called here.
        shape: the structure of the arguments: a tuple of them, and a dict.
        plan: the insertions that were active when the gate was recorded.
    """

    role = "instead"

    @property
    def stands_for(self) -> Callable[..., Any] | None:
        """The function that it replaces, whose node it is."""
        return self.at.function

    def _through(self, values: tuple[Any, ...], at: NodePass, entries: tuple[Entry, ...]) -> Any:
        """Return the result of the outermost insertion."""
        args, kwargs = assemble(self.shape, list(values))
        call: Callable[..., Any] = self._node
        for entry in entries:
            if entry.instead:
                call = self._around(entry, call, at)
        return call(*args, **kwargs)

    def _node(self, *args: Any, **kwargs: Any) -> Any:
        called: Any = self.at.module or self.at.function
        try:
            return called(*args, **kwargs)
        except Exception as error:
            _local.models_own = error  # for which the model may have a handler
            raise

    def _around(self, entry: Entry, call: Callable[..., Any], at: NodePass) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            node = Observed(call, Inputs(args, kwargs))
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


def _dug(at: NodePass, entry: Entry) -> NodePass:
    return replace(at, path=entry.place.shown) if entry.dig else at
