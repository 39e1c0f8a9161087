"""SteppedRun: a run of a model that can be gone through forward and back, and changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bendtrace._trace import Trace
from bendtrace.debug.visit import (
    Edit,
    EventVisit,
    Frame,
    Looks,
    RunEvent,
    Start,
    ValueCache,
    cannot,
    require_tensor,
    safe_text_of,
)
from bendtrace.engine.global_state import GlobalState
from bendtrace.errors import BendtraceError, InputError, NodePathError, NondeterminismError
from bendtrace.flow import FlowStep
from bendtrace.insert.resolver import describe_where, node_name_of, resolve_meaning
from bendtrace.log.capture import aligned_copy, materialize, tensors_in
from bendtrace.log.entries import Source
from bendtrace.log.nodes import Pass, Registry, TreeNode
from bendtrace.log.run import RunNames, call_around, holders_of, near_names, passes_of
from bendtrace.python.checks import required_int
from bendtrace.python.sites import InstructionPlace, Site, is_file, place_text, read_place
from bendtrace.record.recorded_call import Signature, has_lazy_modules, record
from bendtrace.record.recorder import Recording
from bendtrace.show.viewer import step_html, viewer_frame
from bendtrace.tape.captured import requires_grad
from bendtrace.tape.contexts import ContextSwitch
from bendtrace.tape.tape import ModuleCall, OpKind, Tape
from bendtrace.watch.draws import RandomStates

if TYPE_CHECKING:
    from bendtrace.module import BendedModule

_AROUND = 3  # events that are printed before and after the position


class SteppedRun:
    """A run of a model as a place to experiment, made by `BendedModule.step`.

    The run is a sequence of *events*: ops, and questions that the model's Python asks about
    values (`if x.sum() > 0`). Its *position* is the event that comes next. The run can be moved to
    any position; there, the variables of the model's Python can be looked at. `set` replaces the
    value of an op and `answer` the answer of a question, and the rest of the run is repeated;
    earlier values are not computed again, as far as they are kept.

    The model, its inputs and the random generators are left as they are, until `finish`.

    Args:
        function: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        signature: names the arguments.
        registry: gives nodes their names.
        budget: how many bytes of values to keep.

    Attributes:
        position: the number of the event that comes next.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = x * 2
        ...     if h.sum() > 4:
        ...         h = h - 10
        ...     return h.relu()
        >>> run = bt.BendedModule(model).step(torch.tensor([1.0, 3.0]))
        >>> run.output
        tensor([0., 0.])
        >>> run.goto("sub").variables["h"]
        tensor([2., 6.])
        >>> run.answer(run.trace.flow_steps[0], False).output
        tensor([2., 6.])
        >>> run.set("mul", torch.tensor([-1.0, 1.0])).output
        tensor([0., 1.])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        registry: Registry,
        budget: int,
    ) -> None:
        required_int("budget", budget, 0)
        if has_lazy_modules(function):
            raise cannot("the model has lazy modules: call it once first")
        self._function = function
        self._args, self._kwargs = args, kwargs
        self._signature = signature
        self._registry = registry
        self._global_state = GlobalState.current()
        self._start = Start(function, signature.bind(args, kwargs))
        self._kept = ValueCache(budget)
        self._edits: dict[int, Edit] = {}
        # The changes with which a question had another answer, by its number and that answer.
        self._others: dict[int, dict[str, dict[int, Edit]]] = {}
        self._events: list[RunEvent] = []
        self._recording: Recording | None = None
        self._is_complete = False
        self._output: Any = None
        self._is_finished = False
        self._trace: Trace | None = None
        self._looked: tuple[int, tuple[Frame, ...]] | None = None
        self._shown: dict[str, Any] | None = None  # what the latest page had
        self.position: int = 0
        error = self._complete().error
        if error is not None and not self._events:  # as for arguments that the model does not take
            raise error

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "position":
            raise InputError(
                f"run.{name} = ... would change nothing: run.set(op, value) sets the value of an "
                "op, and run.answer(question, value) the answer to a question"
            )
        super().__setattr__(name, value)

    # Moving

    def goto(self, place: Any = None, *, line: int | None = None) -> SteppedRun:
        """Move to before an event, and return the run itself.

        Args:
            place: a position (from the end of the run if negative), a question as a step of
                `trace.flow_steps`, a line as `"model.py:12"` or `"In[3]:7"`, or an op or module in
                any form that `interject` accepts for one node (`"relu"`, `"layers_0.relu:2"`, a
                layer of the log, ...). A place that the run passes several times means the first
                time.
            line: a line of a file of the model, whichever that is.

        Raises:
            InputError: the run has no such event.
            NodePathError: it has no such node.
        """
        if (place is None) == (line is None):
            raise InputError("goto takes a place, or line=")
        self.position = self._numbers(place if line is None else SourceLine("", line))[0]
        return self

    def forward(self, n: Any = 1) -> SteppedRun:
        """Move forward, and return the run itself.

        Args:
            n: by how many events, at most to the end; or a place (see `goto`), to the next time
                that it comes.

        Raises:
            InputError: the place does not come again.
        """
        if type(n) is int:
            return self._move(n)
        return self._move_to(n, [each for each in self._numbers(n) if each > self.position][:1])

    def back(self, n: Any = 1) -> SteppedRun:
        """Move back, and return the run itself.

        Args:
            n: by how many events, at most to the start; or a place (see `goto`), to the last time
                that it came.

        Raises:
            InputError: the place does not come before.
        """
        if type(n) is int:
            return self._move(-n)
        return self._move_to(n, [each for each in self._numbers(n) if each < self.position][-1:])

    def _move_to(self, place: Any, found: list[int]) -> SteppedRun:
        if not found:
            raise InputError(f"{describe_where(place)} does not come in that part of the run")
        self.position = found[0]
        return self

    def _move(self, n: int) -> SteppedRun:
        aim = max(self.position + n, 0)
        if aim > len(self._events) and not self._is_complete:
            self._visit(aim)
        self.position = min(aim, len(self._events))
        return self

    # Looking

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The running functions of the model, innermost first; none at the end of the run."""
        if self._is_complete and self.position == len(self._events):
            return ()
        if self._looked is None or self._looked[0] != self.position:
            self._visit(self.position)
        looked = self._looked  # none, if this was the end
        return looked[1] if looked is not None and looked[0] == self.position else ()

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the innermost function, as they are at the position.

        Tensors are copies, detached. Other objects that can change, apart from lists, tuples and
        dicts, are the model's own, and are in the state of the start of the run.
        """
        frames = self.frames
        return dict(frames[0].variables) if frames else {}

    def value(self, place: Any) -> Any:
        """Return a copy of the value that an op returned, or the answer to a question.

        Args:
            place: as for `goto`; a place with several passes needs the number of the pass.
        """
        number, element = self._one(place)
        edit = self._edits.get(number)
        event = self._events[number]
        if event.kind == "question":
            return self._answer(number)
        if edit is not None and edit.element == element:
            return aligned_copy(edit.value.detach())
        index, stop = event.index, min(number + 1, len(self._events))
        is_kept = index in self._kept
        found = self._kept.get(index) if is_kept else self._visit(stop, {index}).found[index]
        for key in element:
            found = found[key]
        for tensor in tensors_in(found):
            materialize(tensor)
        return found

    def _answer(self, number: int) -> Any:
        return _answer_in(self._require_recording().tape, self._events, self._edits, number)

    @property
    def output(self) -> Any:
        """The output of the run with the present changes; its error is raised here.

        Where it is in memory that existed before the run, it is a copy.
        """
        error = self._complete().error
        if error is not None:
            raise error
        return self._output

    @property
    def trace(self) -> Trace:
        """The record of the run with the present changes, which are ops called `given`."""
        if self._trace is None:
            recording = self._complete()
            if self._edits:
                recording.tape.block("values or answers of the run were changed by hand")
            self._trace = Trace(
                recording, self._global_state, self._signature, self._function,
                registry=self._registry,
            )  # fmt: skip
            self._trace.output = self._output
        return self._trace

    @property
    def nbytes(self) -> int:
        """The number of bytes that the kept values take."""
        return self._kept.nbytes

    def __len__(self) -> int:
        """Return how many events the run has."""
        self._complete()
        return len(self._events)

    # Changing

    def set(self, place: Any, value: Tensor) -> SteppedRun:
        """Replace the value that an op returned, for all code that comes after it.

        Changes that were made after this op are forgotten: they were made in another run. The
        position stays, unless it is after the op: then it is right after it.

        Args:
            place: the op, as for `goto`, or a module whose output one of its last ops computes.
                A place with several passes needs the number of the pass.
            value: a tensor; the model receives a copy.

        Raises:
            InputError: the place is not an op of the run, or its value is not a tensor.
            NodePathError: there is no such node.
        """
        value = require_tensor(value)
        number, element = self._one(place)
        event = self._events[number]
        meta: Any = self._require_recording().tape.ops[event.index].meta
        if event.kind == "question":
            raise InputError(f"{describe_where(place)} is a question: use `answer`")
        for key in element:
            meta = meta[key]
        if not hasattr(meta, "shape"):
            raise InputError(f"the value of {describe_where(place)} is no tensor: {meta!r}")
        return self._edit(number, Edit(value, element), event.index + 1)

    def answer(self, question: Any, value: Any) -> SteppedRun:
        """Give a question of the model another answer than the values give.

        Changes that were made after the question are forgotten. The position stays, unless it is
        after the question: then it is right after it.

        Args:
            question: a step of `trace.flow_steps`, its position, or its line.
            value: the answer, of the type of the present one.

        Raises:
            InputError: the place is not a question of the run, or the answer is of another type.
        """
        number, _ = self._one(question, "question")
        event = self._events[number]
        if event.kind != "question":
            raise InputError(f"{describe_where(question)} is an op, not a question: use `set`")
        now = self._answer(number)
        if type(value) is not type(now):
            raise InputError(
                f"the answer to {describe_where(question)} is {now!r}, so another one has to be a "
                f"{type(now).__name__}, not {value!r}"
            )
        before = dict(self._edits) if self._is_complete else None
        self._edit(number, Edit(value), event.position)
        others = self._others.setdefault(number, {})
        if before is not None:
            others[repr(now)] = before
        others.pop(repr(value), None)
        return self

    def _edit(self, number: int, edit: Edit, first: int) -> SteppedRun:
        if self._is_finished:
            raise InputError("this run is finished: begin a new one")
        self._edits = {n: each for n, each in self._edits.items() if n < number}
        self._edits[number] = edit
        self._others = {n: each for n, each in self._others.items() if n <= number}
        self._kept.forget(first)
        del self._events[number + 1 :]
        self._is_complete = False
        self._output = self._trace = self._looked = self._shown = None
        self.position = min(self.position, number + 1)
        return self

    def finish(self) -> Any:
        """Run to the end, leave the model and the random generators as that leaves them.

        The model is then as after a call with these inputs, in which the changes were made. The run
        can be looked at no more, apart from `output`, `trace` and what is kept.

        Returns:
            The output.
        """
        self._visit(None, leaves=True)
        self._is_finished = True
        self.position = len(self._events)
        assert self._recording is not None
        if self._recording.error is not None:
            raise self._recording.error
        return self._output

    # Showing

    @property
    def name(self) -> str:
        """The name of the model."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    def to_html(self, *, budget: int = 2_000_000, flops: bool = True) -> str:
        """Return the run as one HTML file for a browser, to be gone through there.

        It is the page of `trace.to_html()`, in which each event can be gone to, forward and back.
        It shows the variables of the model's Python there, the answers to questions, the changes,
        and the other side of each question for which both sides have been run. The page has no
        Python: for changes, it has the lines to be run here.

        Args:
            budget: how many characters the variables and results may take. If they take more, the
                positions farthest from the present one have none, and the page says so.
            flops: whether to count floating point operations first.

        Returns:
            The text of the file, to be written as UTF-8.

        Raises:
            InputError: the run is finished, or its model has changed.

        Example:
            >>> import torch, bendtrace as bt
            >>> run = bt.BendedModule(lambda x: torch.relu(x) * 2).step(torch.ones(2))
            >>> "tensor (2,) float32: [1, 1]" in run.to_html()
            True
        """
        required_int("budget", budget, 0)
        shown = self._shown
        if shown is None or shown["budget"] != budget or not shown["has_all"]:
            shown = self._shown = self._to_show(budget)
        return step_html(self.trace, {**shown, "position": self.position}, flops=flops)

    def _to_show(self, budget: int) -> dict[str, Any]:
        trace = self.trace
        now = self._record_looks(copy.copy(self), budget, self.position)
        left = budget - now.looks.size
        sides: dict[int, list[Version]] = {}
        for number, found in self._others.items():
            sides[number] = []
            for edits in found.values():
                other = copy.copy(self)
                other._edits, other._kept, other._events = edits, ValueCache(0), []
                other._recording = None
                sides[number].append(self._record_looks(other, left, number))
                left -= sides[number][-1].looks.size
        rows = _Rows(trace.flow_steps)
        every = [now, *(side for found in sides.values() for side in found)]
        return {
            "budget": budget,
            "events": rows.of(now, 0, {}),
            "end": now.end,
            "sides": [
                {
                    "at": number,
                    "answer": safe_text_of(side.answer(number)),
                    "events": rows.of(side, number + 1, _lines_to_side(side, number)),
                    "end": side.end,
                }
                for number, found in sides.items()
                for side in found
            ],
            "frames": rows.frames,
            "texts": rows.texts,
            "has_all": all(len(each.looks.frames) == len(each.events) for each in every),
        }

    @staticmethod
    def _record_looks(run: SteppedRun, budget: int, centre: int) -> Version:
        """Look at each position of a copy of the run, which goes through it on its own."""
        looks = Looks(budget, centre)
        visit = run._visit(None, looks=looks)
        looks.end(len(run._events))
        return Version(
            run._require_recording(), run._events, run._edits, visit.own_answers, looks, run._output
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        try:
            frame = viewer_frame(self)
            why = "its page would be too large for a notebook: write run.to_html() to a file"
        except BendtraceError as error:
            frame, why = None, str(error)
        shown = f"<pre>{escape(f'{self}')}</pre><p>{escape(why)}</p>" if frame is None else frame
        return {"text/plain": str(self), "text/html": shown}

    # Visits

    def _complete(self) -> Recording:
        if not self._is_complete:
            self._visit(None)
        return self._require_recording()

    def _require_recording(self) -> Recording:
        assert self._recording is not None
        return self._recording

    def _visit(
        self, stop: int | None, wanted: Iterable[int] = (), leaves: bool = False,
        looks: Looks | None = None,
    ) -> EventVisit:  # fmt: skip
        """Run the model's Python up to some event, with known values handed over."""
        if self._is_finished:
            raise InputError("this run is finished: begin a new one to look at it again")
        before = self._recording
        tape = None if before is None else before.tape
        expected: Any = (self._events, tape.ops, tape.guards) if tape is not None else ((), (), ())
        visit = EventVisit(
            self._start, self._kept, expected, self._edits, stop, frozenset(wanted), looks
        )
        around, context = RandomStates(self._start.generators), ContextSwitch()
        self._start.begin()
        try:
            context.to(self._global_state.context)
            if not self._global_state.is_current():
                raise InputError(
                    "settings of torch (the default dtype, modes, ...) are not those under which "
                    "the run was begun"
                )
            recording = record(
                self._function, self._args, dict(self._kwargs), self._signature,
                inserter=visit, keeps_errors=True,
            )  # fmt: skip
            output, recording.result = recording.result, None
            for tensor in tensors_in(output):
                materialize(tensor)
            ended = visit.frames is not None or visit.refusal or visit.went_astray
            if not (ended or leaves):
                output = self._own(output, {})
        except BaseException:
            self._undo(around)
            raise
        finally:
            context.restore()
        if ended or not leaves:
            self._undo(around)
        self._judge(visit, recording)
        visit.keep_prints()
        if visit.frames is not None:
            self._looked = len(visit.events), visit.frames
        if visit.frames is None:
            self._is_complete, self._output = True, output
        if len(visit.events) >= len(self._events):
            self._recording, self._events = recording, visit.events
        return visit

    def _undo(self, around: Any) -> None:
        try:
            self._start.undo()
        finally:
            around.restore()

    def _judge(self, visit: EventVisit, recording: Recording) -> None:
        if visit.refusal:
            raise cannot(visit.refusal)
        if visit.went_astray:
            raise NondeterminismError(
                "the model did not do the same again that it did before from the same start: "
                + visit.went_astray
            )
        if visit.frames is None:
            tape = recording.tape
            reasons = list(tape.blockers)
            written = {tape.ops[index] for op in tape.ops for index in op.writes}
            reasons += [
                f"it writes to {op.target}, which it finds on the way"
                for op in written
                if op.kind is OpKind.STATE and not self._start.knows(op.target.label)
            ]
            if recording.error is not None:
                prefix = f"the run raised {type(recording.error).__name__}"
                reasons = [reason for reason in reasons if not reason.startswith(prefix)]
            if reasons:
                raise cannot("; ".join(reasons))

    def _own(self, value: Any, memo: dict[int, Any]) -> Any:
        """Copy those tensors of an output that are in memory which is about to be restored."""
        if isinstance(value, Tensor):
            if not self._start.holds(value):
                return value
            return value.clone() if requires_grad(value) else aligned_copy(value)
        if type(value) in (list, tuple):
            return type(value)(self._own(item, memo) for item in value)
        if type(value) is dict:
            return {key: self._own(item, memo) for key, item in value.items()}
        if any(self._start.holds(tensor) for tensor in tensors_in(value)):
            raise cannot(
                f"its output, a {type(value).__name__}, holds memory that existed before the run"
            )
        return value

    # Places

    def _one(self, place: Any, kind: str = "") -> tuple[int, tuple[Any, ...]]:
        """Return the one event of a place, and where in its result the value is."""
        if isinstance(place, int):
            found = [(self._position(place), ())]
        else:
            found = self._places.values(place, kind)
        if found[0][0] >= len(self._events):
            raise InputError(f"{describe_where(place)} is not an event of the run")
        if len(found) > 1:
            listed = ", ".join(str(number) for number, _ in found[:8])
            raise InputError(
                f"{describe_where(place)} happens several times in the run, at the positions "
                f"{listed}: give one of these"
            )
        return found[0]

    def _numbers(self, place: Any) -> list[int]:
        """Return the events of a place in order; at least one."""
        return [self._position(place)] if isinstance(place, int) else self._places.numbers(place)

    def _position(self, place: int) -> int:
        if place >= len(self._events) or place < 0:
            self._complete()
        count = len(self._events)
        number = place + count if place < 0 else place
        if type(place) is bool or not 0 <= number <= count:
            raise InputError(f"the run has positions from 0 to {count}, and no {place!r}")
        return number

    @property
    def _places(self) -> PlaceEvents:
        self._complete()
        return PlaceEvents(self._function, self.trace, self._events)

    # Printing

    def _text(self, number: int) -> str:
        event = self._events[number]
        place = place_of(event, self._require_recording().tape)
        where = "" if place is None else f"  {place_text(place.file, place.line)}"
        if event.kind == "op":
            return f"{self._require_recording().names[event.index]}{where}"
        text = "" if place is None else place.text
        return f"{text}? {self._answer(number)}{where}"

    def __repr__(self) -> str:
        count = f"{len(self._events)}{'' if self._is_complete else ' or more'}"
        return f"<SteppedRun of {self.name}: at {self.position} of {count} events>"

    def __str__(self) -> str:
        lines = [repr(self)]
        first = max(self.position - _AROUND, 0)
        for number in range(first, min(self.position + _AROUND + 1, len(self._events))):
            arrow = ">" if number == self.position else " "
            changed = "  (changed)" if number in self._edits else ""
            lines.append(f"{arrow} {number:4}  {self._text(number)}{changed}")
        if self.position == len(self._events) and self._is_complete:
            lines.append("> the end")
        return "\n".join(lines)


# What the page of a stepped run has: events, what is seen at each, changes, and other sides.


class Version(NamedTuple):
    """A run that was gone through once more, to look at each position."""

    recording: Recording
    events: Sequence[RunEvent]
    edits: Mapping[int, Edit]  # its changes, by the number of the event
    own_answers: Mapping[int, Any]  # those of the values to what is answered by hand
    looks: Looks  # the visible state at each event
    output: Any

    def answer(self, number: int) -> Any:
        """Return the answer to a question."""
        return _answer_in(self.recording.tape, self.events, self.edits, number)

    @property
    def end(self) -> dict[str, str]:
        """The text of its output, or of its error."""
        error = self.recording.error
        if error is not None:
            return {"error": f"{type(error).__name__}: {error}"[:1000]}
        return {"output": safe_text_of(self.output)}


def _answer_in(
    tape: Tape, events: Sequence[RunEvent], edits: Mapping[int, Edit], number: int
) -> Any:
    """Return the answer to a question in a run, which may be given by hand."""
    return edits[number].value if number in edits else tape.guards[events[number].index].answer


class _Rows:
    """Events as plain values; frames and texts are tables that they share."""

    def __init__(self, steps: Sequence[FlowStep]) -> None:
        self._steps: dict[int | None, list[tuple[int, FlowStep]]] = {}
        for number, step in enumerate(steps):
            self._steps.setdefault(step.guard, []).append((number, step))
        self._places: dict[Any, int] = {}
        self.frames: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def of(
        self, version: Version, first: int, lines: Mapping[int, str | None]
    ) -> list[dict[str, Any]]:
        """Return the events of a run from some event on."""
        found = []
        for number in range(first, len(version.events)):
            row = self._row(version, number)
            before = [line for n, line in lines.items() if n < number]
            if None in before:
                del row["go"]
                row.pop("change", None)
            elif before:
                labels = "; ".join(map(str, before))
                row |= {key: f"{labels}; {row[key]}" for key in ("go", "change") if key in row}
            found.append(row)
        return found

    def _row(self, version: Version, number: int) -> dict[str, Any]:
        event, looks, tape = version.events[number], version.looks, version.recording.tape
        place = place_of(event, tape)
        row: dict[str, Any] = {"kind": event.kind, "go": f"run.goto({number})"}
        if place is not None:
            row["source"] = Source(place.file, place.line, place.function, place.text, "")
        if event.kind == "op":
            row |= {"name": version.recording.names[event.index], "op": event.index}
            if hasattr(tape.ops[event.index].meta, "shape"):
                row["change"] = f"run.set({number}, torch.zeros_like(run.value({number})))"
        else:
            answer, steps = version.answer(number), self._steps.get(event.index, ())
            # A number has many others, so the present one is there to be edited.
            other = not answer if type(answer) is bool else answer
            row |= {
                "name": "" if place is None else place.text,
                "answer": safe_text_of(answer),
                "change": f"run.answer({number}, {_answer_text(other)})",
                "step": next((n for n, step in steps if is_of(step, event, tape)), None),
            }
        if number in version.edits:
            row["given"] = safe_text_of(version.edits[number].value)
        if number in version.own_answers:
            row["own"] = safe_text_of(version.own_answers[number])
        if number in looks.frames:
            row["frames"] = tuple(map(self._frame, looks.frames[number]))
        if number in looks.results:
            row["result"] = self._number(looks.results[number])
        return row

    def _frame(self, frame: Any) -> int:
        if frame not in self._places:
            self._places[frame] = len(self.frames)
            variables = tuple((name, self._number(text)) for name, text in frame.variables)
            source = Source(frame.file, frame.line, frame.function, "", "")
            self.frames.append({"source": source, "variables": variables})
        return self._places[frame]

    def _number(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _lines_to_side(side: Version, number: int) -> dict[int, str | None]:
    """Return the lines that lead from the run that is shown to the other side of a question."""
    later = [n for n in sorted(side.edits) if n > number]
    return {
        n: f"run.answer({n}, {_answer_text(side.answer(n))})"
        if side.events[n].kind == "question"
        else None
        for n in (number, *later)
    }


def _answer_text(answer: Any) -> str:
    """Return the answer to a question as Python."""
    if type(answer) is float and not math.isfinite(answer):
        return f"float({str(answer)!r})"
    return repr(answer)


# What the places of a stepped run are called: questions, lines, nodes, modules and layers.


class SourceLine(NamedTuple):
    """A line of a file, or of any file if `file` is ""."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


def places_of(event: RunEvent, tape: Tape) -> tuple[InstructionPlace, ...]:
    """Return where an event is, out to the code of the model that called it."""
    records: Sequence[Any] = tape.ops if event.kind == "op" else tape.guards
    site: Site | None = records[event.index].site
    scope: ModuleCall | None = records[event.index].scope
    places: list[InstructionPlace] = []
    while True:
        places += () if site is None else site.places
        if scope is None:
            return tuple(places)
        site, scope = scope.site, scope.parent


def place_of(event: RunEvent, tape: Tape) -> InstructionPlace | None:
    """Return where an event is in the code of the model, or else in torch's; None if unknown."""
    places = places_of(event, tape)
    return next((each for each in places if not each.in_torch), places[0] if places else None)


def is_of(step: FlowStep, event: RunEvent, tape: Tape) -> bool:
    """Return whether an event is the question of a flow step."""
    if event.kind != "question" or event.index != step.guard:
        return False
    # Not by the instruction: the test of a `while` is compiled twice, and the step has the first.
    asked = (step.place.file, step.place.function, step.place.line)
    places = places_of(event, tape)
    return not places or any((each.file, each.function, each.line) == asked for each in places)


class PlaceEvents:
    """Finds the events of a place in a run."""

    def __init__(self, function: Callable[..., Any], trace: Trace, events: list[RunEvent]) -> None:
        self._knowledge = _SoleRun(function, trace)
        self._trace = trace
        self._tape = trace._recording.tape
        self._events = events

    def numbers(self, place: Any) -> list[int]:
        """Return the events of a place in order; at least one."""
        if isinstance(place, FlowStep):
            return self._questions(place)
        line = _line(place)
        if line is None:
            calls = self._calls(place)
            return calls or [number for number, _ in self._values(place, is_value=False)]
        found = [
            number
            for number, event in enumerate(self._events)
            if any(
                each.line == line.line and (not line.file or is_file(each.file, line.file))
                for each in places_of(event, self._tape)
            )
        ]
        if not found:
            raise InputError(f"no event of the run is at {place}")
        return found

    def values(self, place: Any, kind: str = "") -> list[tuple[int, tuple[Any, ...]]]:
        """Return the events whose values a place stands for, and where in their results."""
        if not isinstance(place, FlowStep) and _line(place) is None:
            return self._values(place)
        numbers = self.numbers(place)
        if kind:
            numbers = [n for n in numbers if self._events[n].kind == kind] or numbers
        return [(number, ()) for number in numbers]

    def _questions(self, step: FlowStep) -> list[int]:
        for number, event in enumerate(self._events):
            if is_of(step, event, self._tape):
                return [number]
        raise InputError(f"{step!r} is not a question of this run that can be answered")

    def _calls(self, place: Any) -> list[int]:
        """Return the first event of each selected call of a module; nothing for other things."""
        found = []
        for _, node, chosen in self._places_of(place):
            if node.kind != "graph" or not node.module:
                return []
            calls = self._tape.calls
            for number in range(len(node.passes)) if chosen is None else chosen:
                found.append(self._first_in(calls[node.passes[number].index]))
        return sorted(found)

    def _first_in(self, call: ModuleCall) -> int:
        for number, event in enumerate(self._events):
            records: Sequence[Any] = self._tape.ops if event.kind == "op" else self._tape.guards
            scope = records[event.index].scope
            while scope is not None and scope is not call:
                scope = scope.parent
            # A call without events is before the next op: it has asked nothing itself.
            if scope is call or (event.kind == "op" and event.position >= call.stop):
                return number
        return len(self._events)

    def _values(self, place: Any, *, is_value: bool = True) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the events that compute the values of a node, and where in their results."""
        tree = self._trace._run.tree
        numbers = {e.index: number for number, e in enumerate(self._events) if e.kind == "op"}
        found = set()
        for _, node, chosen in self._places_of(place):
            for data, made in passes_of(node, chosen):
                assert made.index is not None
                index, element = tree.origin(made.index, made.element)
                if index not in numbers:
                    raise InputError(
                        f"{describe_where(place)} is not an op of the run: one cannot go to, or "
                        "set, sizes, numbers and values from before the run"
                    )
                if node.kind == "graph":
                    self._require_last(place, node.module, index)
                if is_value and data.role in ("input", "output"):
                    self._require_unwritten(place, data, made)
                found.add((numbers[index], tuple(element)))
        return sorted(found)

    def _require_last(self, place: Any, module: str, index: int) -> None:
        """Raise if the output of a module is not its own, or is used in it as well."""
        tape = self._tape
        calls = [call for call in tape.calls if call.path == module]
        for call in calls:
            if call.start <= index < call.stop:
                inside = tape.ops[index + 1 : call.stop]
                if not any(index in op.operands for op in inside):
                    return
        raise InputError(
            f"the output of {describe_where(place)} is also used inside of it, or computed "
            "elsewhere: name the op"
        )

    def _require_unwritten(self, place: Any, data: TreeNode, made: Pass) -> None:
        """Raise if an input or output of a call has been written to since its op returned."""
        tape, tree, index = self._tape, self._trace._run.tree, made.index
        number = call_around(holders_of(tree.data), data, made)
        assert index is not None
        value = tree.origin(index, made.element)
        names = {op.index for op in tape.ops[index:] if tree.origin(op.index, ()) == value}
        stop = len(tape.ops)
        if number is not None:
            call = tape.calls[number]
            stop = call.start if data.role == "input" else call.stop
        wrote = [op.index for op in tape.ops[index + 1 : stop] if not names.isdisjoint(op.writes)]
        # The first op that read it afterwards knows if something wrote under another name.
        later = (op.reads for op in tape.ops[stop:] if not names.isdisjoint(op.operands))
        reads = next(later, self._trace._recording.output_reads)
        wrote += [reads[name] for name in names & reads.keys() if reads[name] < stop]
        if wrote:
            name = self._trace.names[max(wrote)]
            raise InputError(
                f"{describe_where(place)} was written to in place by {name!r} after its op "
                "returned it: name the op"
            )

    def _places_of(self, place: Any) -> Sequence[Any]:
        name = node_name_of(place, self._knowledge)
        if name is None:
            raise InputError(f"{place!r} is not a place in a run")
        resolution = resolve_meaning(name, self._knowledge)
        if resolution is None or not resolution.places:
            near = near_names(name, self._trace._run.naming.listed())
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise NodePathError(f"this run has no {name!r}{hint}", name, tuple(near))
        return resolution.places


def _line(place: Any) -> SourceLine | None:
    if isinstance(place, SourceLine):
        return place
    found = read_place(place) if isinstance(place, str) else None
    # `layers.relu:2` is a pass of an op.
    return SourceLine(*found) if found and found[0].endswith((".py", ">", "]")) else None


class _SoleRun:
    """The known runs of the model, for resolving names: this run alone."""

    def __init__(self, model: Callable[..., Any], trace: Trace) -> None:
        self.model = model
        self._trace = trace

    def names(self) -> list[RunNames]:
        """Return the names in the run."""
        return [self._trace._run.naming]

    def mirror_path(self, name: str) -> str:
        """Return the path of a node of the mirror of the run."""
        run = self._trace._run
        return run.tree.path_of(run.names.index(name)) if name in run.names else ""


def step(
    bended: BendedModule[Any], /, *args: Any, budget: int = 2**30, **kwargs: Any
) -> SteppedRun:
    """Run the model, and return the run as a place to experiment.

    You can go to any op, question or line of the run, forward and back, look at the variables
    of the model's Python, replace values and answers, and continue from there. Under
    `torch.no_grad`, the run computes no value again, as far as the budget reaches; where
    autograd records, it computes the values in autograd's graph again. The model, the inputs
    and the random generators stay as they are (see `SteppedRun.finish`). `SteppedRun.to_html`
    shows the run as a page, and so does a notebook. This method hides a submodule called
    `step`, which is still `bended.model.step`.

    Args:
        bended: the model.
        *args: positional arguments of the model.
        budget: the number of bytes of values to keep.
        **kwargs: keyword arguments of the model.

    Raises:
        InputError: something is inserted, or the run cannot be stepped through: it depends on
            something that no guard can watch, or changes something that cannot be restored.
        Exception: an error of the model before its first op, such as for missing arguments.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
        >>> run = bended.step(torch.tensor([-1.0, 2.0]))
        >>> run.set("relu", torch.tensor([5.0, 5.0])).output
        tensor([10., 10.])
    """
    if bended._inserted:
        raise InputError("a run to be stepped through has nothing inserted: remove it first")
    return SteppedRun(
        bended.model, args, kwargs, bended._signature, bended._dispatcher.registry, budget
    )
