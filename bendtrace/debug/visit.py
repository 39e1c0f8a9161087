"""One visit to a run: the model's Python runs to some point, and known values are handed over."""

from __future__ import annotations

import heapq
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.debug.preserved_state import ModelState
from bendtrace.errors import InputError
from bendtrace.log.capture import aligned_copy, lazily_copied, materialize, tensors_in
from bendtrace.python.compare import same_bits
from bendtrace.python.sites import BEHIND, PACKAGE, TORCH
from bendtrace.record.texts import shows
from bendtrace.tape.captured import requires_grad
from bendtrace.tape.scalars import TRACED, TracedScalar, plain
from bendtrace.tape.tape import Guard, ModuleCall, Op, OpKind, Use
from bendtrace.tape.watchers import StopRun, call_silently
from bendtrace.watch.draws import RandomStates, generator_state, torchs_generators
from bendtrace.watch.functions import (
    ADDRESS,
    CONTEXT,
    ESCAPES,
    METADATA,
    RESHAPES_IN_PLACE,
    SETTERS,
    SHAPES,
    SHARING,
    VALUES,
    ScriptMethod,
    ScriptModule,
    is_named_in_place,
    is_torchs_function,
    table_name,
)
from bendtrace.watch.writes import storage_of, version_of

# Requests that compute nothing that anybody would stop at.
_SILENT = frozenset({*CONTEXT, *METADATA, *SHAPES, *VALUES, *ESCAPES, ADDRESS, Tensor.tolist})
_QUESTIONS = frozenset(VALUES.values()) - {Use.FORMAT}
# What may write to its arguments without torch counting it.
_UNCOUNTED = ("batch_norm", "instance_norm")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A step of a run, before which the run can stop."""

    kind: str  # "op" or "question"
    index: int  # the op, or the number of the guard
    position: int  # how many ops there were before


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
    """A value in the place of (an element of) what an op returned, or of an answer."""

    __name__ = "given"  # so that it is an op of that name

    def __init__(self, value: Any, element: tuple[Any, ...] = ()) -> None:
        self.value = value
        self.element = element

    def __call__(self, old: Tensor) -> Tensor:
        """Return the value as a copy, which the model may write to."""
        made: Tensor = self.value.clone()
        return made


class EventVisit:
    """An `Inserter` that counts what a run does, and stops before some event.

    It begins at `start` with the values that are known already, and compares what happens with the
    events, ops and guards that earlier visits have seen. Edits and looks go by event.
    """

    refusal: str  # why the run cannot be stepped through
    sees_inputs = False
    code: Mapping[str, Any] = {}

    def __init__(
        self,
        start: Start,
        kept: ValueCache,
        expected: tuple[Sequence[RunEvent], Sequence[Op], Sequence[Guard]],
        edits: Mapping[int, Edit],
        stop: int | None,
        wanted: Container[int],
        looks: Looks | None = None,
    ) -> None:
        self._start = start
        self._kept = kept
        self._expected = expected
        self._edits = edits
        self._stop = stop
        self._wanted = wanted
        self._looks = looks
        self._ended = False
        self.pending: list[Sequence[Any]] = []
        self.events: list[RunEvent] = []  # the steps of the run
        # The answers that the values gave to questions that are answered by hand.
        self.own_answers: dict[int, Any] = {}
        # The frames that it had when it stopped, innermost first; None if it did not.
        self.frames: tuple[Frame, ...] | None = None
        self.found: dict[int, Any] = {}  # the values asked for
        self.refusal = ""
        self.went_astray: str = ""  # the first step that differs from an earlier visit

    # What a recorder asks an inserter

    def begins(self, stage: Any) -> None:
        """Hand over the known values (see `Inserter`)."""
        self._stage = stage
        self._ops: list[Op] = stage.tape.ops
        stage.answer_with(self._question)
        stage.hand_over(HandedValues(self._kept))

    def starts(self, args: Any, kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Leave the arguments as they are (see `Inserter`)."""
        return args, kwargs

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Leave the output as it is (see `Inserter`)."""
        return output

    def ended(self) -> None:
        """Do nothing after the run (see `Inserter`)."""

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
            self.refusal = self._start.before(function, args, kwargs)
            if self.refusal:
                self._ended = True
                raise StopRun
            if "out" in kwargs or table_name(function).startswith(("resize", "set_")):
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
        self.events.append(RunEvent("op", op.index, position))
        self._compare(number, op)
        with torch._C.DisableTorchFunction():
            if op.index in self._wanted:
                self.found[op.index] = self._copies(out, {})
            if self._looks is not None:
                call_silently(self._looks.gave, (number, out), {})
            if op.index not in self._kept and _is_storable(op, args, kwargs, out, memory):
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

    def _question(self, guard: Guard, answer: Any) -> Any:
        """Return the answer to a question of the model, which may be another than its own."""
        if guard.use not in _QUESTIONS or guard.site is None:
            return answer
        self._arrive(sys._getframe(1))  # from here outwards: the frame that asks is among them
        number, tape = len(self.events), self._stage.tape
        self.events.append(RunEvent("question", len(tape.guards) - 1, len(tape.ops)))
        edit = self._edits.get(number)
        if edit is not None:
            self.own_answers[number] = plain(answer) if type(answer) in TRACED else answer
            guard.answer = answer = edit.value
        self._compare(number, guard)
        return answer

    def _arrive(self, frame: FrameType | None) -> None:
        """Look, and stop if this is the place."""
        if self._ended:  # the model's own code runs on its way out
            raise StopRun
        if len(self.events) == self._stop:
            self._ended = True
            with torch._C.DisableTorchFunction():
                # The frames of the model with copies of their variables.
                memo: dict[int, Any] = {}
                self.frames = tuple(
                    Frame(
                        each.f_code.co_qualname, each.f_code.co_filename, each.f_lineno,
                        {name: self._copies(value, memo) for name, value in each.f_locals.items()},
                    )
                    for each in _frames_of_model(frame)
                )  # fmt: skip
            raise StopRun
        if self._looks is not None:
            with torch._C.DisableTorchFunction():
                call_silently(self._looks.take, (len(self.events), _frames_of_model(frame)), {})

    def _compare(self, number: int, now: Op | Guard) -> None:
        """End a run that takes another step than before."""
        events, ops, guards = self._expected
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

    def _exchanged(self, edit: Edit, out: Any, element: tuple[Any, ...], frame: FrameType) -> Any:
        """Return the result of an op with the given value in it."""
        if not element:
            return self._stage.gate(edit, (out,), frame)
        items = list(out)
        items[element[0]] = self._exchanged(edit, items[element[0]], element[1:], frame)
        return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)

    # Looking

    def _copies(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return the visible form of a value: with copies of tensors, and plain numbers."""
        if type(value) in TRACED:
            return plain(value)
        if id(value) in memo:
            return memo[id(value)][1]
        made: Any = value
        if type(value) in (Tensor, nn.Parameter):
            made = (aligned_copy if self._start.holds(value) else lazily_copied)(value.detach())
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
        """Remember the printed texts, so that they are not printed again."""
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


def _is_storable(op: Op, args: Any, kwargs: dict[str, Any], out: Any, memory: set[int]) -> bool:
    """Return whether handing over the result of an op is all that the op does."""
    function, name = op.target, table_name(op.target)
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
    """Return whether a function is torch's, does nothing unseen, and does not read an attribute."""
    if isinstance(function, types.FunctionType):
        return function.__module__ in _IN_PYTHON
    return isinstance(function, _IN_C) and is_torchs_function(function)


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)
_IN_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})


def _random() -> list[bytes]:
    """Return the states of torch's own generators."""
    return [call_silently(generator_state, (generator,), {}) for generator in torchs_generators()]


def require_tensor(value: Any) -> Tensor:
    """Return a tensor to be used as a value."""
    if type(value) not in (Tensor, nn.Parameter):
        raise InputError(f"a value has to be a plain tensor, not {value!r}")
    return value if value.requires_grad else aligned_copy(value.detach())


# Values of a run that later visits need not compute again, within a budget of memory.


class ValueCache:
    """Values by op. Where there are too many, those go that are the quickest to compute again."""

    nbytes: int  # how many bytes they take

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._values: dict[int, Any] = {}
        self._views: set[int] = set()  # those that torch takes for views, as a linear layer's
        self._ranks: list[tuple[float, int]] = []  # a heap: the time that a byte saves, and the op

    def __contains__(self, index: object) -> bool:
        return index in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, index: int) -> Any:
        """Return a copy of a value that nobody else writes to."""
        value = self._values[index]
        if not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunction():
            copy = lazily_copied(value)
            return copy.view_as(copy) if index in self._views else copy

    def add(self, index: int, value: Any, nanoseconds: int) -> None:
        """Keep a value as it is now, if it is worth its memory."""
        size = _byte_size(value)
        if index in self._values or size > self.budget:
            return
        with torch._C.DisableTorchFunction():
            if isinstance(value, Tensor):
                if value._base is not None:
                    self._views.add(index)
                value = lazily_copied(value)
        self._values[index] = value
        self.nbytes += size
        heapq.heappush(self._ranks, (nanoseconds / max(size, 1), index))
        while self.nbytes > self.budget:
            _, last = heapq.heappop(self._ranks)
            self.nbytes -= _byte_size(self._values.pop(last))
            self._views.discard(last)

    def forget(self, index: int) -> None:
        """Forget the values of an op and all later ones."""
        for later in [each for each in self._values if each >= index]:
            self.nbytes -= _byte_size(self._values.pop(later))
        self._views.intersection_update(self._values)
        self._ranks = [rank for rank in self._ranks if rank[1] in self._values]
        heapq.heapify(self._ranks)


class HandedValues(dict[int, Any]):
    """The kept values as a recorder takes them: each is copied when it is asked for."""

    def __init__(self, kept: ValueCache) -> None:
        super().__init__()
        self._kept = kept

    def __contains__(self, index: object) -> bool:
        return index in self._kept

    def __getitem__(self, index: int) -> Any:
        return self._kept.get(index)


def _byte_size(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


# The start of a run, to which it can be led back: what it can read, and random numbers.

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward})


def cannot(why: str) -> InputError:
    """Return the error for a run that cannot be stepped through."""
    return InputError(f"this run cannot be stepped through: {why}")


class Start(ModelState):
    """Everything that a run can read, as it is before the run."""

    def __init__(self, function: Callable[..., Any], bound: dict[str, Any]) -> None:
        super().__init__(function, bound, lambda reasons: cannot("; ".join(reasons)))
        self.require_restorable()
        self._random = RandomStates(self.generators)

    def begin(self) -> None:
        """Have a run begin here."""
        self._random.restore()  # first: a generator of Python has an attribute that draws change
        environment = self._environments[0]
        reasons = environment.blockers
        count = len(reasons)
        changed = next((change.label for change in environment.changes()), None)
        if len(reasons) > count:
            changed, reasons[count:] = "the model", []
        for earlier, version in zip(self._earlier.values(), self._versions, strict=True):
            if changed is None and (
                version_of(earlier.tensor) != version
                or (
                    earlier.copy is not None
                    and not same_bits(earlier.copy, earlier.tensor.detach())
                )
            ):
                changed = earlier.label
        if changed is not None:
            raise InputError(
                f"{changed} has changed since the run was begun, so its values are no longer "
                "those of the model: begin a new run"
            )

    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Prepare for a call that may write to tensors from before the run."""
        name = table_name(function)
        if function in _BACKWARD:
            return f"{name} adds to gradients outside of the run"
        if isinstance(function, (ScriptModule, ScriptMethod)):
            script = function._c if isinstance(function, ScriptModule) else function.owner
            if script not in self.scripts or "prim::SetAttr" in str(function.inlined_graph):
                return f"{name} may change what a script holds"
            return ""
        # What is written to `data` is not counted.
        writes = is_named_in_place(name) or name in ("__setitem__", "data") or "out" in kwargs
        changes = function in SETTERS or (name in RESHAPES_IN_PLACE and name != "data")
        if not (writes or changes):
            return ""
        for tensor in tensors_in((args[:1], kwargs.get("out"))):
            if storage_of(tensor) not in self._storages:
                continue
            if changes and id(tensor) in self._earlier:
                return f"{name} changes more of {self._earlier[id(tensor)].label} than its values"
            for key, earlier in self._earlier.items():
                if earlier.copy is None and storage_of(earlier.tensor) == storage_of(tensor):
                    self._earlier[key] = earlier._replace(
                        copy=aligned_copy(earlier.tensor.detach())
                    )
        return ""

    def knows(self, label: str) -> bool:
        """Return whether a tensor that existed before the run was found when it began."""
        return any(earlier.label == label for earlier in self._earlier.values())


# What is seen at the positions of a run, as text, within a budget.

_LONGEST = 400  # letters of a text
_MOST = 8  # items of a list, and first values of a large tensor
_WHOLE = 24  # elements of a tensor that is shown whole
_DEEPEST = 4

_PLAIN = frozenset({type(None), bool, int, float, complex, bytes, range, type(...)})
_TORCH = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})


class FrameText(NamedTuple):
    """A running function of the model, with its variables as text."""

    function: str
    file: str
    line: int
    variables: tuple[tuple[str, str], ...]


class Looks:
    """Keeps the frames of positions as text. Where there are too many, the farthest go."""

    size: int  # how many characters they take

    def __init__(self, budget: int, centre: int) -> None:
        # The frames of each position that was kept, innermost first.
        self.frames: dict[int, tuple[FrameText, ...]] = {}
        self.results: dict[int, str] = {}  # the results of ops, by the number of the event
        self.size = 0
        self._budget, self._centre = budget, centre
        self._next = 0
        self._is_full = False
        self._order: deque[int] = deque()
        self._counts: Counter[Any] = Counter()  # how often each frame and each text is used

    def take(self, number: int, frames: Iterable[FrameType]) -> None:
        """Keep the visible state at a position; positions come in order."""
        if self._is_full or number < self._next:
            return
        for skipped in range(self._next, number):  # inside of an op, where no visit can stop
            self._keep(skipped, ())
        self._next = number + 1
        self._keep(number, tuple(map(_frame_text, frames)))

    def _keep(self, number: int, found: tuple[FrameText, ...]) -> None:
        self.frames[number] = found
        self._order.append(number)
        for frame in found:
            self._count(frame, 1)
        self._make_room()

    def end(self, count: int) -> None:
        """Note how many events the run had."""
        if not self._is_full:
            for skipped in range(self._next, count):
                self._keep(skipped, ())

    def gave(self, number: int, result: Any) -> None:
        """Keep the result of an op, if its position was kept."""
        if number in self.frames:
            self.results[number] = text = safe_text_of(result)
            self._count(text, 1)
            self._make_room()

    def _make_room(self) -> None:
        while self.size > self._budget:
            first, last = self._order[0], self._order[-1]
            if self._centre - first > last - self._centre:
                self._order.popleft()
                self._drop(first)
            else:
                self._order.pop()
                self._drop(last)
                self._is_full |= last >= self._centre

    def _drop(self, number: int) -> None:
        for frame in self.frames.pop(number):
            self._count(frame, -1)
        if number in self.results:
            self._count(self.results.pop(number), -1)

    def _count(self, what: FrameText | str, by: int) -> None:
        is_used = self._counts[what] > 0
        self._counts[what] += by
        if is_used == (self._counts[what] > 0):
            return
        if isinstance(what, str):
            self.size += by * len(what)
            return
        self.size += by * (len(what.function) + sum(len(name) for name, _ in what.variables))
        for _, text in what.variables:
            self._count(text, by)


def _frame_text(frame: FrameType) -> FrameText:
    code, variables = frame.f_code, dict(frame.f_locals)
    # In the order of the code: that of the dict depends on when it was read before.
    ordered = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars, *variables))
    return FrameText(
        code.co_qualname,
        code.co_filename,
        frame.f_lineno,
        tuple((name, safe_text_of(variables[name])) for name in ordered if name in variables),
    )


def safe_text_of(value: Any) -> str:
    """Return a value as text, without running code of the model or of the value's own class.

    Tensors have their shape, dtype and first values, and large ones their range; objects of other
    classes have the name of their class.

    Example:
        >>> import torch
        >>> safe_text_of([torch.tensor([1.0, 2.5]), "a", {"n": 3}])
        "[tensor (2,) float32: [1, 2.5], 'a', {'n': 3}]"
        >>> safe_text_of(torch.arange(100.0).view(10, 10))
        'tensor (10, 10) float32: 0, 1, 2, 3, 4, 5, 6, 7, ... from 0 to 99'
        >>> safe_text_of(torch.nn.ReLU())
        'ReLU(...)'
    """
    text = _safe_text(value, 0)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _safe_text(value: Any, depth: int) -> str:
    kind = type(value)  # not __class__, which the run would notice
    if issubclass(kind, TracedScalar):
        value = plain(value)
        kind = type(value)
    if kind is str:
        return repr(value[:_LONGEST])
    if kind is int and value.bit_length() > _LONGEST:
        return f"an int of {value.bit_length()} bits"
    if kind in _PLAIN:
        return repr(value[:_LONGEST] if kind is bytes else value)
    if kind in _TORCH:
        return str(value)
    if kind is Tensor or kind is nn.Parameter:
        return _tensor(value)
    if kind is torch.Size:
        return f"torch.Size({_container_text(list(value), list, depth)})"
    if kind in (list, tuple, set, frozenset, dict) or (
        issubclass(kind, tuple) and hasattr(kind, "_fields")
    ):
        return _container_text(value, kind, depth)
    if kind.__module__ == "torch.return_types":  # what topk returns, say; copies are tuples
        return _container_text(tuple(value), tuple, depth)
    if kind is slice:
        parts = (_safe_text(part, depth + 1) for part in (value.start, value.stop, value.step))
        return f"slice({', '.join(parts)})"
    return _object_text(value, kind)


def _container_text(value: Any, kind: type, depth: int) -> str:
    if depth == _DEEPEST:
        return f"{kind.__name__} of {len(value)}"

    def inner(items: Iterable[Any], show: Callable[[Any], str]) -> str:
        shown = [show(item) for item in islice(items, _MOST)]
        more = [f"... {len(value) - _MOST} more"] if len(value) > _MOST else []
        return ", ".join(shown + more)

    def one(item: Any) -> str:
        return _safe_text(item, depth + 1)

    if kind is dict:
        return f"{{{inner(value.items(), lambda pair: f'{one(pair[0])}: {one(pair[1])}')}}}"
    if kind is list:
        return f"[{inner(value, one)}]"
    if kind is set or kind is frozenset:
        return f"{kind.__name__}({{{inner(value, one)}}})" if value else f"{kind.__name__}()"
    if kind is tuple:
        return f"({inner(value, one)}{',' if len(value) == 1 else ''})"
    named = zip(kind._fields, tuple.__iter__(value), strict=False)  # type: ignore[attr-defined]
    return f"{kind.__name__}({inner(named, lambda pair: f'{pair[0]}={one(pair[1])}')})"


def _object_text(value: Any, kind: type) -> str:
    if issubclass(kind, type):
        return f"class {type.__getattribute__(value, '__qualname__')}"
    if issubclass(kind, nn.Module):
        return f"{kind.__qualname__}(...)"
    if issubclass(kind, Enum):
        return f"{kind.__qualname__}.{value._name_}"
    if kind is types.FunctionType or kind is types.BuiltinFunctionType:
        return f"function {value.__qualname__}"
    if kind is types.MethodType:
        return f"method {getattr(value.__func__, '__name__', '?')}"
    if kind is types.ModuleType:
        return f"module {types.ModuleType.__repr__(value).split(chr(39))[1]}"
    return f"{kind.__qualname__} object"


def _tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"tensor {tuple(tensor.shape)} {dtype}"
    if tensor.device.type != "cpu":
        text += f" {tensor.device}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{text} {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_meta or not tensor.numel():
        return text
    try:
        return f"{text}: {_values_text(tensor.detach())}"
    except RuntimeError:  # inside a transform, such as torch.vmap, and of dtypes without numbers
        return f"{text}: its values cannot be read here"


def _values_text(tensor: Tensor) -> str:
    if tensor.numel() <= _WHOLE:
        return _list_text(tensor.tolist())
    first = tensor
    while first.dim() > 1 and first[0].numel() >= _MOST:
        first = first[0]
    shown = ", ".join(map(_figure_text, first.reshape(-1)[:_MOST].tolist()))
    if tensor.is_complex():
        return f"{shown}, ..."
    low, high = (each.item() for each in (tensor.aminmax() if tensor.dim() else (tensor, tensor)))
    return f"{shown}, ... from {_figure_text(low)} to {_figure_text(high)}"


def _list_text(value: Any) -> str:
    return f"[{', '.join(map(_list_text, value))}]" if type(value) is list else _figure_text(value)


def _figure_text(value: Any) -> str:
    return f"{value:.5g}" if type(value) in (float, complex) else str(value)
