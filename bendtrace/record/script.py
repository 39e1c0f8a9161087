"""A script: what a call has done so far, for the model's own Python that takes over from there.

A replay that comes to an answer nobody has seen before is at a state: it has the values that Python
can still reach, the holes, and nothing else. So the model's Python runs from its start under the
recorder, and each of its ops is looked up in a script instead of being carried out:

    replay   op  op  question  op  op  question?         the answer is unknown here
                                 |                       the holes of this state have values
    script   op  op  question  op  op  question?         an op gives its hole, or a stand-in
    Python   ----------------------------------> op op   from here on it is recorded

A stand-in is an object of the right class for a value that nobody can reach any more. If Python, or
an op after the script, asks for what is in it, the state was read wrongly: that is an error.

Values are known by *names*: the number of a step, a part of the arguments or the state of the
model, or an element of something that has a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from bendtrace.python.lazy import LazyModule, errors
from bendtrace.tape.captured import attributes_of, identical
from bendtrace.tape.contexts import Hold
from bendtrace.tape.guards import (
    ErrorGuard,
    IdentityGuard,
    OtherGuard,
    SameGuard,
    TruthGuard,
    ValueGuard,
)
from bendtrace.tape.structure import build_instance
from bendtrace.tape.tape import (
    AfterOp,
    Guard,
    NumberMeta,
    Op,
    OpKind,
    Raised,
    Ref,
    RunState,
    Stop,
    Tape,
    TensorMeta,
    Use,
    counts,
    map_refs,
)
from bendtrace.watch.functions import display_name

if TYPE_CHECKING:
    from bendtrace.record import array_functions
else:
    array_functions = LazyModule("bendtrace.record.array_functions")

Name: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a recorded run that a call went along."""

    tape: Tape
    entered: int  # the question whose answer leads into it; -1 for the beginning of the run
    left: Stop  # the question, or the op, at which the call left it
    asked: int = 0  # in the latter case, how many questions came before; 0 before the op


@dataclass(slots=True, eq=False)
class _Step:
    """An op of the script."""

    op: Op  # the op, as it was recorded
    names: _SectionNames  # names the values of the recorded run that it is of
    tape: Tape  # a run that has recorded its value, which the one before may not have
    index: int  # the op there
    value: Any = None  # its value, if that is known
    has_value: bool = False  # whether it is known
    # What is known of its elements, if the value is not known.
    elements: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """The number or fact that it gives."""
        return self.value if self.has_value else self.elements.get((), self.op.meta)


@dataclass(frozen=True)
class _Same:
    """The value of another name."""

    name: Name


@dataclass(slots=True, eq=False)
class _Question:
    """A question of the script."""

    at: int  # how many steps come before it
    name: Name  # the name of the value that is tested
    answer: Any
    other: Name  # for a question on identity, the name of the tensor that it is compared with
    state: RunState | None  # the state in which it was asked, if that was read
    holes: tuple[Name, ...]  # the names of the holes of that state
    guard: Guard  # the guard with which it was recorded


class _SectionNames:
    """Names the values of a recorded run, as far as a section can use them."""

    def __init__(self, section: Section, handed: Sequence[Name], script: Script) -> None:
        self.tape: Tape = section.tape
        self._script = script
        self._names: dict[int, Name] = {}
        left = section.left
        # Results that a guard identified as tensors from before only after the section's end.
        self._identified_later = frozenset(
            guard.index
            for guard in ([] if isinstance(left, AfterOp) else section.tape.guards[left + 1 :])
            if isinstance(guard, SameGuard)
        )
        if section.entered >= 0:
            holes = section.tape.states[section.entered].holes
            for hole, name in zip(holes, handed, strict=True):
                script.hand_over(name, self.tape, hole)
                self._names[hole] = name
                self._names.setdefault(self.tape.aliases.get(hole, hole), name)

    def add(self, index: int, number: int) -> None:
        """Name the value of a step by its number."""
        self._names[index] = number
        self.of(index)

    def find(self, index: int) -> Name:
        """Return the name of the value of an op; None if nothing has named it yet."""
        return self._names.get(index)

    def of(self, index: int) -> Name:
        """Return the name of the value of an op."""
        name, first = self._names.get(index), self.tape.aliases.get(index, index)
        if name is None:
            op = self.tape.ops[index]
            if op.is_given:
                name = "given", op.target.named
            elif op.is_element:
                name = "element", self.of(op.args[0].index), op.args[1]
            elif first != index and index not in self._identified_later:
                name = self.of(first)
            else:
                name = self._script.late(op, self)
            self._names[index] = name
        is_identified = index not in self._identified_later and name not in self._script.apart
        if first != index and is_identified and name not in self._script.firsts:
            found = self._script.first(self.of(first))
            if found != name:
                self._script.firsts[name] = found
        return name

    def arguments(self, op: Op) -> Any:
        """Return the arguments of an op with names in place of values."""
        return map_refs((op.args, op.kwargs), lambda ref: Ref(self.of(ref.index)))


class Follower(Protocol):
    """Knows states that a run comes to (see `Following` in `engine/comparison.py`)."""

    def state(self, tape: Tape) -> RunState | None:
        """Return the state of the latest question; None if it has to be read."""
        ...

    def passes(self, tape: Tape, state: RunState) -> None:
        """Take the state of the latest question."""
        ...


class Script:
    """The things that a call has done so far.

    The last of the sections, in order, has computed the values that the call has at its end. There,
    the last question has its answer, or the last op has raised the error. `hold` keeps autocast's
    cache until the script is over; the follower knows states that the run comes to after it. With
    `is_exact`, ops whose results are not held are carried out again, so that there are no
    stand-ins, and questions are asked as they come. Raises `NondeterminismError` if a value that is
    needed is not among those of the state.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        answer: Any,
        computed: Mapping[int, Any],
        error: Exception | None,
        hold: Hold,
        follower: Follower | None = None,
        is_exact: bool = False,
    ) -> None:
        self.values: dict[int, Any] = {}  # results of ops of the run that follows
        self.errors: dict[int, Exception] = {}  # the errors that ops raise, likewise
        self.hold: Hold = hold
        # The values that the run goes on with, by op, if it is in a checkpointed block.
        self.of_block: dict[int, Any] = {}
        self.follower: Follower | None = follower
        self.is_active: bool = True  # whether the run has not come to the end yet
        self.is_merged: bool = False  # whether two tensors that the script has are one in this call
        # Once it has, the ops whose values are stand-ins, with what is known of the values.
        self.dead: dict[int, Any] = {}
        self.firsts: dict[Name, Name] = {}  # for tensors named before, the first name
        self.apart: set[Name] = set()  # of tensors that had one when recorded, and have none now
        self.cached: Sequence[Tensor] = ()  # tensors in caches that the program reads
        self._steps: list[_Step] = []
        self._questions: list[_Question] = []
        self._objects: dict[Name, Any] = {}
        self._raised: dict[int, Raised | None] = {}  # by steps whose errors the model catches
        self._is_exact = is_exact
        self._error = error
        self._taken = self._asked = 0
        # Of the run that follows the script: names by ops, and ops by names.
        self._names: dict[int, Name] = {}
        self._indices: dict[Name, int] = {}
        self._aliases: Mapping[int, int] = {}
        self._given: Mapping[Any, Tensor] = {}
        self._tensors: Mapping[int, Tensor] = {}
        handed: Sequence[Name] = ()
        for section, following in zip(sections, (*sections[1:], None), strict=True):
            last = answer
            if following is not None:
                last = following.tape.guards[following.entered].answer
            names = _SectionNames(section, handed, self)
            handed = self._read(section, names, last)
        for index, value in computed.items():
            if not is_exact:
                self._learn(names.of(index), value)
            elif type(number := names.of(index)) is int:
                self._steps[number].value, self._steps[number].has_value = value, True
        if not is_exact:
            self._learn_from_answers()
        if not self._steps and not self._questions:
            self._end()

    # Reading what was recorded

    def _read(self, section: Section, names: _SectionNames, answer: Any) -> Sequence[Name]:
        tape, entered, left = section.tape, section.entered, section.left
        position = tape.guards[entered].position if entered >= 0 else 0
        number, holes = entered + 1, ()
        end = tape.position_of(left)
        asked = section.asked if isinstance(left, AfterOp) else left + 1
        while position < end or number < asked:
            guard = tape.guards[number] if number < len(tape.guards) else None
            if guard is not None and guard.position == position:
                holes = self._add_question(
                    tape, number, names, answer if number == left else _RECORDED
                )
                number += 1
                continue
            op = tape.ops[position]
            if counts(op):
                number_of_step = len(self._steps)
                self._steps.append(_Step(op, names, tape, op.index))
                names.add(op.index, number_of_step)
            position += 1
        return holes

    def first(self, name: Name) -> Name:
        """Return the first name of what has a name."""
        if type(name) is tuple and name[0] == "element" and name not in self.firsts:
            name = "element", self.first(name[1]), name[2]
        return self._canonical(self.firsts.get(name, name))

    def _add_question(
        self, tape: Tape, number: int, names: _SectionNames, answer: Any
    ) -> tuple[Name, ...]:
        guard, state = tape.guards[number], tape.states.get(number)
        holes = () if state is None else tuple(map(names.of, state.holes))
        if answer is _RECORDED:
            answer = guard.answer
        if isinstance(guard, ErrorGuard):
            self._raised[len(self._steps) - 1] = answer
        if isinstance(guard, IdentityGuard) and answer is True:
            self._learn_same(guard, names)
        elif isinstance(guard, SameGuard):
            self.apart.add(names.of(guard.index))
            self.firsts.pop(names.of(guard.index), None)
        other = None if guard.other is None else names.of(guard.other)
        name = names.of(guard.index)
        self._questions.append(
            _Question(len(self._steps), name, answer, other, state, holes, guard)
        )
        return holes

    def hand_over(self, name: Name, tape: Tape, index: int) -> None:
        """Note that another run has recorded the value of a name as well, as its answers say."""
        if type(name) is int:
            self._steps[name].tape, self._steps[name].index = tape, index

    def late(self, op: Op, names: _SectionNames) -> Name:
        """Return the name of a value that its state does not hold, since it is read from the rest.

        Raise `NondeterminismError` if there is no such value.
        """
        if not all(names.tape.ops[index].is_given for index in op.operands):
            raise errors.NondeterminismError(f"{op} is needed, and not known")
        wanted = names.arguments(op)
        for number, step in enumerate(self._steps):
            if (
                step.op.target == op.target
                and step.op.kind is op.kind
                and all(step.names.tape.ops[index].is_given for index in step.op.operands)
                and identical(step.names.arguments(step.op), wanted)
            ):
                return number
        raise errors.NondeterminismError(f"{op} is needed, and was not reached")

    def _learn(self, name: Name, value: Any) -> None:
        """Note the value of a name."""
        path, step = self._root_step(self.first(name))
        if step is not None and path:
            step.elements[path] = value
        elif step is not None and not step.has_value:
            step.value, step.has_value = value, True

    def _learn_same(self, guard: IdentityGuard, names: _SectionNames) -> None:
        """Note that a result, or an element of one, is a tensor that was there before."""
        path: tuple[Any, ...] = ()
        op, before = names.tape.ops[guard.index], self.first(names.of(guard.other))
        if isinstance(guard, OtherGuard):  # it was another one when it was recorded
            self.firsts[names.of(guard.index)] = before
        while op.is_element:
            path, op = (op.args[1], *path), names.tape.ops[op.args[0].index]
        number = names.of(op.index)
        if path and type(number) is int:
            self._steps[number].elements[path] = _Same(before)

    def _learn_from_answers(self) -> None:
        """Note what the answers say of values that nobody holds any more."""
        truths: list[tuple[_Step, bool]] = []
        for question in self._questions:
            if isinstance(question.guard, ValueGuard):
                self._learn(question.name, question.answer)
            elif isinstance(question.guard, TruthGuard) and type(question.name) is int:
                truths.append((self._steps[question.name], question.answer))
        for step, truth in truths:
            if not step.has_value:
                if type(step.op.meta) is bool:
                    step.value, step.has_value = truth, True
                elif bool(step.op.meta) != truth:
                    step.elements[()] = type(step.op.meta)(truth)

    def release(self) -> None:
        """Let go of all values and errors."""
        self.values.clear()
        self.of_block.clear()
        self.errors.clear()
        self._given = self._tensors = {}
        self._error = None

    # Following it

    def begin(self, aliases: Mapping[int, int], given: Mapping[Any, Tensor]) -> None:
        """Begin to be followed, with the aliases of the run (see `Tape.aliases`).

        The tensors among the arguments and the state are given by what they are named.
        """
        self._aliases, self._given = aliases, given
        self._tensors = {id(tensor): tensor for tensor in given.values()}

    def _canonical(self, name: Name) -> Name:
        """Return a name that is one for all names of an argument or state."""
        if type(name) is not tuple:
            return name
        if name[0] == "element":
            return "element", self._canonical(name[1]), name[2]
        tensor = self._given.get(name[1])
        return name if tensor is None else ("given", id(tensor))

    def _name_of(self, index: int) -> Name:
        """Return the first name of the value of an op of the run."""
        return self.first(self._names[self._aliases.get(index, index)])

    def name_input(self, op: Op) -> None:
        """Note that the run names an argument, or a state."""
        self._name(op.index, ("given", op.target.named))

    def name_element(self, op: Op) -> None:
        """Note that the run takes an element out of a result."""
        self._name(op.index, ("element", self._names[op.args[0].index], op.args[1]))

    def _name(self, index: int, name: Name) -> None:
        self._names[index] = name
        self._indices[self._canonical(name)] = index

    def take(self, op: Op) -> None:
        """Look an op of the run up, and note its result.

        Raise `NondeterminismError` if the run does something else than the script.
        """
        step = self._steps[self._taken] if self._taken < len(self._steps) else None
        asked = self._questions[self._asked] if self._asked < len(self._questions) else None
        if step is None or (asked is not None and asked.at == self._taken):
            raise errors.NondeterminismError(
                f"the resumed run did {op} where it asked for a value before, with all guards equal"
            )
        if not self._agree(op, step):
            raise errors.NondeterminismError(
                f"the resumed run did {op} where it did {step.op} before, with all guards equal"
                + (f" (at {op.site.place})" if op.site is not None else "")
            )
        number, self._taken = self._taken, self._taken + 1
        op.writes = tuple(map(self._index_of, map(step.names.of, step.op.writes)))
        op.reads = {
            self._index_of(step.names.of(index)): writer
            for index, wrote in step.op.reads.items()
            if (writer := self._indices.get(step.names.find(wrote))) is not None
        }
        self._name(op.index, number)
        raised = None if self._is_exact else self._raised.get(number)
        if step.has_value and isinstance(step.value, Exception):
            self.errors[op.index] = step.value
        elif raised is not None:
            self.errors[op.index] = _error_like(*raised)
        elif self._error is not None and self._taken == len(self._steps):
            self.errors[op.index] = self._error
        elif step.has_value or not self._is_exact:
            self._objects[number] = self.values[op.index] = self._value_of(step, number)
        if self._taken == len(self._steps) and self._asked == len(self._questions):
            latest = {key: self.values[key] for key in (op.index,) if key in self.values}
            self._end()
            self.values.update(latest)  # which is asked for next

    def _index_of(self, name: Name) -> int:
        """Return the op of the run that gives the value of a name."""
        return self._indices[self._canonical(name)]

    def _agree(self, op: Op, step: _Step) -> bool:
        before = step.op
        if op.kind is not before.kind or op.context.modes != before.context.modes:
            return False
        if op.target != before.target and _comparable_text(op.target) != _comparable_text(
            before.target
        ):
            return False
        mine = map_refs((op.args, op.kwargs), lambda ref: Ref(self._name_of(ref.index)))
        its = map_refs(step.names.arguments(before), lambda ref: Ref(self.first(ref.index)))
        if identical(mine, its) or _comparable_text(mine) == _comparable_text(its):
            return True
        if self._is_exact or not self.is_merged:
            return False
        mine, its = (
            map_refs(some, lambda ref: id(self._object(ref.index))) for some in (mine, its)
        )
        return identical(mine, its)

    def _asks_for(self, question: _Question, guard: Guard) -> bool:
        if not question.guard.asks_like(guard):
            return False
        if isinstance(guard, IdentityGuard):  # which decides the first names of tensors
            return bool(self._canonical(question.name) == self._canonical(self._names[guard.index]))
        return bool(self.first(question.name) == self._name_of(guard.index))

    def merges(self, guard: Guard) -> bool:
        """Return whether an op gave back a tensor that it did not give back when recorded."""
        if not isinstance(guard, SameGuard):
            return False
        question = self._questions[self._asked] if self._asked < len(self._questions) else None
        is_asked = (
            question is not None
            and question.at == self._taken
            and isinstance(question.guard, IdentityGuard)
            and question.answer is True
        )
        self.is_merged = self.is_merged or not is_asked
        return not is_asked

    def implied_question(self) -> tuple[Guard, int, Any, int | None] | None:
        """Return what the run does not ask itself, if that comes next.

        Code inside of an op does not run where the op is not carried out. And of most functions, it
        is no question whether they gave back what they were given, where they did not. Return the
        guard with which it was recorded, the op that gives the value, the answer, and for identity
        the op that gives the other tensor.
        """
        question = self._questions[self._asked] if self._asked < len(self._questions) else None
        if question is None or question.at != self._taken:
            return None
        guard, other = question.guard, None
        if not guard.is_inside and (guard.other is None or question.answer is True):
            return None
        index = self._indices.get(self._canonical(question.name))
        if guard.other is not None:
            other = self._indices.get(self._canonical(question.other))
        if index is None or question.answer is None or (other is None) != (guard.other is None):
            return None
        return guard, index, question.answer, other

    def _value_of(self, step: _Step, number: int) -> Any:
        """Return the value of a step, or its stand-in."""
        if step.has_value:
            return step.value
        if (first := self.first(number)) != number:
            return self._object(first)
        tape, index = step.tape, step.index
        outline = tape.outlines.get(index, tape.ops[index].meta)
        elements = {
            path: self._object(value.name) if type(value) is _Same else value
            for path, value in step.elements.items()
        }
        return _stand_in(outline, elements, (), tape.classes.get(index, Tensor))

    def _object(self, name: Name) -> Any:
        """Return the value of a name."""
        name = self._canonical(name)
        if type(name) is int:
            return self._objects[name]
        if name[0] == "given":
            return self._tensors[name[1]]
        return self._object(name[1])[name[2]]

    def _root_step(self, name: Name) -> tuple[tuple[Any, ...], _Step | None]:
        """Return the step that a name is of, and which element of its value it is."""
        path: tuple[Any, ...] = ()
        while type(name) is tuple and name[0] == "element":
            path, name = (name[2], *path), name[1]
        return path, self._steps[name] if type(name) is int else None

    def _is_of_call(self, name: Name) -> bool:
        """Return whether the value of a name belongs to this call."""
        if self._is_exact:
            return True
        path, step = self._root_step(self.first(name))
        return step is None or step.has_value or (path != () and path in step.elements)

    def result_of(self, function: Any, operands: Sequence[int]) -> tuple[Any] | None:
        """Return, in a tuple, the result of arithmetic whose operands are not values of this call.

        None if the arithmetic can be done. The operands are given by the ops that they are values
        of.
        """
        if all(self._is_of_call(self._name_of(index)) for index in operands):
            return None
        step = self._next_by(function)
        return None if step is None else (step.result,)

    def next_by(self, function: Any) -> tuple[Any, list[int]] | None:
        """Return the result of the next op, and the ops of its arguments.

        None if the next op is not by a function.
        """
        step = self._next_by(function)
        if step is None:
            return None
        return step.result, [self._index_of(step.names.of(index)) for index in step.op.operands]

    def _next_by(self, function: Any) -> _Step | None:
        """Return the next step, if it is a number or fact by a function."""
        step = self._steps[self._taken] if self._taken < len(self._steps) else None
        is_one = step is not None and step.op.kind is OpKind.SCALAR and step.op.target == function
        return step if is_one else None

    def expects(self, guard: Guard) -> bool:
        """Return whether a question of the run is the next one of the script."""
        question = self._questions[self._asked] if self._asked < len(self._questions) else None
        return (
            question is not None
            and question.at == self._taken
            and self._asks_for(question, guard)
            and identical(question.answer, guard.answer)
        )

    def asks_next(self, use: Use, index_of: Callable[[], int]) -> bool:
        """Return whether the next question of the script asks for a number, for some use.

        The op that gives the number in the run is asked for where that may be so.
        """
        question = self._questions[self._asked] if self._asked < len(self._questions) else None
        return (
            question is not None
            and question.at == self._taken
            and isinstance(question.guard, ValueGuard)
            and question.guard.use is use
            and bool(self.first(question.name) == self._name_of(index_of()))
        )

    def asks(self, guard: Guard) -> RunState | None:
        """Look a question of the run up; return the state in which it is asked, if that was read.

        Raise `NondeterminismError` if the run asks something else than the script, or what only a
        value says that it has not.
        """
        question = self._questions[self._asked] if self._asked < len(self._questions) else None
        if question is None or not self.expects(guard):
            was = "" if question is None else f" where it asked for {question.answer!r} before"
            raise errors.NondeterminismError(
                f"the resumed run asked whether a value is {guard.answer!r}{was}, with all guards "
                "equal"
            )
        self._asked += 1
        state = question.state
        if state is not None:
            state = RunState(state.key, tuple(map(self._index_of, question.holes)), state.kept)
        if self._asked == len(self._questions) and self._taken == len(self._steps):
            self._end()
        return state

    def _end(self) -> None:
        self.is_active = False
        for index, name in self._names.items():
            if not self._is_of_call(name):
                path, step = self._root_step(self.first(name))
                assert step is not None
                meta = step.tape.ops[step.index].meta
                for key in path if isinstance(meta, tuple) else ():
                    meta = meta[key] if type(key) is int else None
                self.dead[index] = meta
            elif self.hold.block is not None:
                self.of_block[index] = self._object(name)
        self._objects.clear()
        self.values.clear()
        self._steps.clear()


_RECORDED = object()


def _stand_in(outline: Any, elements: Mapping[Any, Any], path: tuple[Any, ...], cls: type) -> Any:
    """Return an object of the class of a value, in which there is nothing."""
    if path in elements:
        return elements[path]
    kind = type(outline)
    if kind is TensorMeta:
        shape = [max(size, 0) for size in outline.shape]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = torch.empty(shape, dtype=outline.dtype, device="meta")
            return made if cls is Tensor else torch.Tensor._make_subclass(cls, made)
    if kind is NumberMeta:
        made = _stand_in(outline.tensor, {}, (), Tensor)
        array_functions.make_stand_for_number(made)
        return made
    if isinstance(outline, (tuple, list)):
        items = [_stand_in(item, elements, (*path, i), Tensor) for i, item in enumerate(outline)]
        if kind is tuple or kind is list:
            return kind(items)
        return build_instance(kind, items, attributes_of(outline))
    if kind is dict:
        return {
            key: _stand_in(item, elements, (*path, key), Tensor) for key, item in outline.items()
        }
    return outline


def _error_like(cls: type[BaseException], text: str | None) -> Exception:
    """Return an error that the handlers of the model take for the one that it caught."""
    error = cls.__new__(cls)
    error.args = () if text is None else (text,)
    assert isinstance(error, Exception)
    return error


def _comparable_text(value: Any) -> str:
    """Return a value as text in which objects that each run makes again are alike."""
    if callable(value):
        value = display_name(value), value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
