"""One visit to a run: the model's Python runs to some point, and known values are handed over."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, NondeterminismError
from bendtrace.history.copies import copied, lazily_copied, materialize, tensors_in
from bendtrace.recording.texts import shows
from bendtrace.source.sites import BEHIND, PACKAGE, TORCH
from bendtrace.stepping.kept import Handed, Kept
from bendtrace.stepping.looks import Looks
from bendtrace.stepping.start import Start
from bendtrace.tape.captured import requires_grad
from bendtrace.tape.scalars import TRACED, plain
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind
from bendtrace.tape.watchers import StopRun, unwatched
from bendtrace.torch_rules.draws import state_of, torchs_generators
from bendtrace.torch_rules.functions import (
    CONTEXT,
    ESCAPES,
    METADATA,
    SHAPES,
    SHARING,
    VALUES,
    is_named_in_place,
    is_torchs_function,
    known_as,
)
from bendtrace.torch_rules.writes import storage_of

__all__ = ["Edit", "Event", "Frame", "Visit"]

# Requests that compute nothing that anybody would stop at.
_SILENT = frozenset({*CONTEXT, *METADATA, *SHAPES, *VALUES, *ESCAPES, Tensor.tolist})
_QUESTIONS = frozenset({"bool", "int", "float", "complex", "index", "len", "in"})
# What may write to its arguments without torch counting it.
_UNCOUNTED = ("batch_norm", "instance_norm")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a run does, and can be stopped before.

    Attributes:
        kind: "op" or "question".
        index: the op, or the number of the guard.
        position: how many ops there were before.
    """

    kind: str
    index: int
    position: int


@dataclass(frozen=True)
class Frame:
    """A function of the model that was running.

    Attributes:
        function: its name.
        file: its file.
        line: the line that it had come to.
        variables: its variables by name. Tensors are copies; other objects are the model's own.
    """

    function: str
    file: str
    line: int
    variables: dict[str, Any] = field(repr=False)


class Edit:
    """A value that takes the place of the one that an op returned, or the answer to a question.

    Args:
        value: the value.
        element: where it is in the result of the op.
    """

    __name__ = "given"  # so that it is an op of that name

    def __init__(self, value: Any, element: tuple[Any, ...] = ()) -> None:
        self.value = value
        self.element = element

    def __call__(self, old: Tensor) -> Tensor:
        """Return the value; what the model writes to it reaches a copy."""
        made: Tensor = self.value.clone()
        return made


class Visit:
    """An `Inserter` that counts what a run does, and stops before some event.

    Args:
        start: the start of the run.
        kept: the values that are known already.
        known: what earlier visits have seen: the events and the recording's ops and guards.
        edits: what is changed, by the number of the event.
        stop: the event to stop before; None to run to the end.
        wanted: the ops whose values are asked for.
        looks: receives what is seen at each event; None if nobody looks.

    Attributes:
        events: what the run did.
        own_answers: the answers that the values gave to questions that are answered by hand.
        frames: the frames that it had when it stopped, innermost first; None if it did not.
        found: the values asked for.
        refusal: why the run cannot be stepped through.
        went_astray: what it did differently from an earlier visit.
    """

    refusal: str
    code: Mapping[str, Any] = {}

    def __init__(
        self,
        start: Start,
        kept: Kept,
        known: tuple[Sequence[Event], Sequence[Op], Sequence[Guard]],
        edits: Mapping[int, Edit],
        stop: int | None,
        wanted: Container[int],
        looks: Looks | None = None,
    ) -> None:
        self._start = start
        self._kept = kept
        self._known = known
        self._edits = edits
        self._stop = stop
        self._wanted = wanted
        self._looks = looks
        self._ended = False
        self.pending: list[Sequence[Any]] = []
        self.events: list[Event] = []
        self.own_answers: dict[int, Any] = {}
        self.frames: tuple[Frame, ...] | None = None
        self.found: dict[int, Any] = {}
        self.refusal = ""
        self.went_astray: str = ""

    # What a recorder asks an inserter

    def begins(self, stage: Any) -> None:
        """Hand over what is known (see `Inserter`)."""
        self._stage = stage
        self._ops: list[Op] = stage.tape.ops
        stage.answer_with(self._asked)
        stage.hand_over(Handed(self._kept))

    def starts(self, args: Any, kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Leave the arguments as they are (see `Inserter`)."""
        return args, kwargs

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Leave the output as it is (see `Inserter`)."""
        return output

    def module(
        self, scope: ModuleCall, args: Any, kwargs: dict[str, Any], frame: FrameType,
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run the call of a module (see `Inserter`)."""
        return run(scope, args, kwargs)

    def op(
        self, function: Any, args: Any, kwargs: dict[str, Any], frame: FrameType,
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run the call of a function, unless the run ends here (see `Inserter`)."""
        if function in _SILENT:
            return run(function, args, kwargs, frame)
        self._arrive(frame)
        with torch._C.DisableTorchFunction():
            self._refuse(self._start.before(function, args, kwargs))
            if "out" in kwargs or known_as(function).startswith(("resize", "set_")):
                for tensor in tensors_in((args, kwargs)):
                    materialize(tensor)
            memory = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
            random = _random()
        position, began = len(self._ops), perf_counter_ns()
        out = run(function, args, kwargs, frame)
        taken = perf_counter_ns() - began
        new = self._ops[position:]
        op = next((each for each in reversed(new) if each.kind is OpKind.CALL), None)
        if op is None:
            return out
        number = len(self.events)
        self.events.append(Event("op", op.index, position))
        self._compare(number, op)
        with torch._C.DisableTorchFunction():
            if op.index in self._wanted:
                self.found[op.index] = self._copies(out, {})
            if self._looks is not None:
                unwatched(self._looks.gave, (number, out), {})
            if op.index not in self._kept and _can_be_kept(op, args, kwargs, out, memory):
                if random == _random():
                    self._kept.add(op.index, out, taken)
        edit = self._edits.get(number)
        return out if edit is None else self._exchanged(edit, out, edit.element, frame)

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Do nothing about arithmetic (see `Inserter`)."""

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Return that fused ops stay fused (see `Inserter`)."""
        return False

    def inside(self, module: nn.Module, path: str) -> None:
        """Do nothing inside of an op (see `Inserter`)."""

    exchanges_state = False

    def recomputed(self, entering: bool) -> None:
        """Do nothing about checkpointed blocks (see `Inserter`)."""

    # Events

    def _asked(self, guard: Guard, answer: Any) -> Any:
        """Return the answer to a question of the model, which may be another than its own."""
        if guard.how not in _QUESTIONS or guard.site is None:
            return answer
        self._arrive(sys._getframe(1))
        number, tape = len(self.events), self._stage.tape
        self.events.append(Event("question", len(tape.guards) - 1, len(tape.ops)))
        edit = self._edits.get(number)
        if edit is not None:
            self.own_answers[number] = plain(answer) if type(answer) in TRACED else answer
            guard.expected = answer = edit.value
        self._compare(number, guard)
        return answer

    def _arrive(self, frame: FrameType | None) -> None:
        """Look, and stop if this is the place."""
        if self._ended:  # the model's own code runs on its way out
            raise StopRun
        if len(self.events) == self._stop:
            self._ended = True
            with torch._C.DisableTorchFunction():
                self.frames = self._frames(frame)
            raise StopRun
        if self._looks is not None:
            with torch._C.DisableTorchFunction():
                unwatched(self._looks.take, (len(self.events), _frames_of_model(frame)), {})

    def _refuse(self, why: str) -> None:
        if why:
            self._ended, self.refusal = True, why
            raise StopRun

    def _compare(self, number: int, now: Op | Guard) -> None:
        """End a run that does something else than before."""
        events, ops, guards = self._known
        if number >= len(events):
            return
        event, before = self.events[number], events[number]
        same = event == before
        if same and isinstance(now, Op):
            same = ops[event.index].does_the_same_as(now)
        elif same and isinstance(now, Guard) and number not in self._edits:
            same = guards[event.index].answer == now.answer
        if not same:
            self._ended = True
            self.went_astray = f"event {number} is {now!r} and was {before!r}"
            raise StopRun

    def require_same(self) -> None:
        """Raise if the run did something else than before.

        Raises:
            NondeterminismError: it did.
        """
        if self.went_astray:
            raise NondeterminismError(
                "the model did not do the same again that it did before from the same start: "
                + self.went_astray
            )

    def _exchanged(self, edit: Edit, out: Any, element: tuple[Any, ...], frame: FrameType) -> Any:
        """Return the result of an op with the given value in it."""
        if not element:
            return self._stage.gate(edit, (out,), frame)
        items = list(out)
        items[element[0]] = self._exchanged(edit, items[element[0]], element[1:], frame)
        kind = type(out)
        if issubclass(kind, tuple) and hasattr(out, "_fields"):
            return kind(*items)
        return kind(items)

    # Looking

    def _frames(self, frame: FrameType | None) -> tuple[Frame, ...]:
        """Return the frames of the model with copies of their variables."""
        memo: dict[int, Any] = {}
        return tuple(
            Frame(
                each.f_code.co_qualname, each.f_code.co_filename, each.f_lineno,
                {name: self._copies(value, memo) for name, value in each.f_locals.items()},
            )
            for each in _frames_of_model(frame)
        )  # fmt: skip

    def _copies(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return what is seen of a value: tensors as they are now, and numbers that are plain."""
        if type(value) in TRACED:
            return plain(value)
        if id(value) in memo:
            return memo[id(value)][1]
        made: Any = value
        if type(value) in (Tensor, nn.Parameter):
            made = (copied if self._start.holds(value) else lazily_copied)(value.detach())
        elif type(value) is list:
            made = []
            memo[id(value)] = value, made
            made += [self._copies(item, memo) for item in value]
        elif type(value) is dict:
            made = {}
            memo[id(value)] = value, made
            made.update({key: self._copies(item, memo) for key, item in value.items()})
        elif isinstance(value, tuple):
            items = [self._copies(item, memo) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                named = hasattr(value, "_make")
                made = type(value)._make(items) if named else tuple(items)  # type: ignore[attr-defined]
        memo[id(value)] = value, made
        return made

    def keep_prints(self) -> None:
        """Remember what was printed, so that it is not printed again."""
        for op in self._ops:
            if op.target is shows:
                self._kept.add(op.index, None, sys.maxsize)


def _frames_of_model(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the model, innermost first; torch's own only if there are none."""
    own, torchs = [], []
    while frame is not None and frame.f_code not in BEHIND:
        code = frame.f_code
        if code.co_filename.startswith(TORCH):
            if code.co_name == "forward":
                torchs.append(frame)
        elif not code.co_filename.startswith(PACKAGE):
            own.append(frame)
        frame = frame.f_back
    return own or torchs


def _can_be_kept(op: Op, args: Any, kwargs: dict[str, Any], out: Any, memory: set[int]) -> bool:
    """Return whether handing over the result of an op is all that the op does."""
    function, name = op.target, known_as(op.target)
    return (
        type(out) is Tensor
        and out.layout is torch.strided
        and not requires_grad(out)
        and storage_of(out) not in {0, *memory}
        and not op.writes
        and _is_watched_function(function)
        and function not in SHARING
        and not is_named_in_place(name)
        and not any(part in name for part in _UNCOUNTED)
        and "out" not in kwargs
        and not any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
    )


def _is_watched_function(function: Any) -> bool:
    """Return whether a function is torch's own, does nothing unseen, and is no attribute's."""
    if isinstance(function, types.FunctionType):
        return function.__module__ in _IN_PYTHON
    return isinstance(function, _IN_C) and is_torchs_function(function)


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)
_IN_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})


def _random() -> list[bytes]:
    """Return the states of torch's own generators."""
    return [unwatched(state_of, (generator,), {}) for generator in torchs_generators()]


def require_tensor(value: Any) -> Tensor:
    """Return a tensor to be used as a value.

    Raises:
        InputError: it is none.
    """
    if type(value) not in (Tensor, nn.Parameter):
        raise InputError(f"a value has to be a plain tensor, not {value!r}")
    return value if value.requires_grad else copied(value.detach())
