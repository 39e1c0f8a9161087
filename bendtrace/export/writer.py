"""Writing a machine as one function of tensors: questions as `cond`, loops as `while_loop`.

Each side of a question, up to where the sides meet again, becomes a function, and so does one
iteration of a loop. Its arguments are all values that it uses, and it returns the values that are
still needed at its end. Tensors that it writes to are copied first, since neither `cond` nor
`while_loop` may change its arguments.

A side that no run has taken is not written: the program continues along the known side, and sets a
*flag*. After the outermost question or loop, the program asserts that the flag is not set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bendtrace.engine.compiled_path import Expressions
from bendtrace.engine.guard_kinds import GuardKind
from bendtrace.engine.schedule import Schedule
from bendtrace.errors import ExportError
from bendtrace.export.conditions import Fact
from bendtrace.export.machine import (
    DTYPES,
    END,
    AnalysedRun,
    Constant,
    Machine,
    Numeral,
    Outdated,
    Question,
    QuestionLoop,
    Several,
    Static,
    Tensors,
    Value,
    View,
    Way,
    cite,
    gives_rows,
    is_fixed,
    parameters_in,
    shape_of,
)
from bendtrace.export.ops import Scope, SegmentOps
from bendtrace.record.effects import makes_anew
from bendtrace.tape.captured import Access, Captured, CaptureKind, TensorFacts, identical
from bendtrace.tape.contexts import current_context
from bendtrace.tape.guards import LengthGuard, TruthGuard
from bendtrace.tape.structure import Existing, FixedObject, Instance
from bendtrace.tape.tape import Guard, Op, Ref, TensorMeta, argument_leaves, map_leaves

# The functions for `cond` and `while_loop`: their arguments, outputs and flags.
#
# Everything that a function uses becomes an argument, and everything that it returns is new: the
# operators accept neither two arguments that share memory, nor a function that returns an argument.

# What operators are given; what has another letter is closed over.
_VARIABLE = re.compile(r"\b_[vnspaqfr]\d+\b")
BODY = "__written__"  # the function that `forward` calls
# Names that torch.export gives to what it adds to a program (2.13).
_GENERATED = re.compile(
    r"(__written__|_guards_fn|((_?lifted)?_tensor(_constant)?|"
    r"(true|false|while_loop_(cond|body))_graph)_?\d+)$"
)


@dataclass(frozen=True)
class Unseen:
    """A side of a question that no input took.

    Attributes:
        number: the value of its flag, counted from 1.
        place: the question, with its place in the source.
        seen: the known answers.

    Example:
        >>> import torch, bendtrace as bt
        >>> exported = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x).export(torch.ones(2))
        >>> print(exported.unseen[0])  # doctest: +ELLIPSIS
        `x.sum() > 0` at ...:1 was always True for the inputs that this was exported from
    """

    number: int
    place: str
    seen: tuple[Any, ...]

    @property
    def message(self) -> str:
        """The message of the program when a call reaches it."""
        if not self.seen:
            return self.place
        options = " or ".join(map(str, self.seen))
        return f"{self.place} was always {options} for the inputs that this was exported from"

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Written:
    """A machine as source."""

    text: str  # the source of a module-level function `forward(self, ...)`
    names: dict[str, Any]  # the values of the names in it
    records: dict[int, Any]  # for each line, the op or guard that it comes from
    tensors: dict[str, Tensor]  # state, by the name of the attribute path in the module
    unseen: tuple[Unseen, ...]  # the sides that no input took
    notes: tuple[str, ...]  # notes for the user
    facts: frozenset[Fact]  # the properties of tensors that the model asks for


class ProgramWriter:
    """Writes a machine as source.

    The positions are those of the arguments of a call, in the order in which they are bound.
    `state` has the names of the model's tensors by identity, `given` the variables of those that
    are inputs. If it is flagged, the program returns its flag in place of assertions.
    """

    def __init__(
        self, machine: Machine, positions: list[int], state: dict[int, str],
        given: dict[int, str], flagged: bool,
    ) -> None:  # fmt: skip
        self._machine = machine
        self._parameters = [f"_i{position}" for position in positions]
        self._state, self._given, self._flagged = state, given, flagged
        self.names: dict[str, Any] = Expressions().names  # the values of names in the source
        self.memory_of: dict[str, frozenset[int]] = {}  # the memory of variables that hold tensors
        self.picked: set[int] = set()  # the memory of copies that stand for views
        self.facts: set[Fact] = set()  # the properties of tensors that the model asks for
        self._variables, self._memories = itertools.count(1), itertools.count(1)
        self._bound: dict[int, str] = {}
        self._parts: dict[Any, Value] = {}
        self._prelude: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._unseen: dict[Any, Unseen] = {}
        self._notes: list[str] = []
        self._rounds: dict[QuestionLoop, Any] = {}  # what each loop began its round with

    def write(
        self, head: list[str], conditions: Mapping[str, str] = MappingProxyType({})
    ) -> Written:
        """Write the program; conditions are expressions of tensors, with their texts."""
        machine = self._machine
        view = machine.view
        scope = Scope(0)
        if self._flagged:
            scope.flag = self._start_flag(scope)
        for holds, text in conditions.items():
            required = f"the program requires {text}, as in the inputs that it was exported from"
            self.demand(scope, f"({holds})", required)
        env = self._follow(scope, machine.begin, (), view)
        env = self._go(scope, machine.begin.target, env, END, view)
        output = self._output_text(env[0])
        if self._flagged:
            output = f"{output}, {scope.flag}"
        scope.add(f"return {output}")
        # The names of the arguments are the user's, and must not hide those that the body uses.
        own = "self"
        while own in head:
            own += "_"
        inner = [f"_i{position}" for position in range(len(head))]
        lines: list[tuple[str, Any]] = [
            (f"def {BODY}({', '.join(['self', *inner])}):", None),
            (f"    fix(({_listed(inner)}))", None),
            *((f"    {line}", None) for line in self._prelude),
            *((f"    {line}", record) for line, record in scope.lines),
            (f"def forward({', '.join([own, *head])}):", None),
            (f"    return {own}.{BODY}({', '.join(head)})", None),
        ]
        text = "\n".join(line for line, _ in lines) + "\n"
        records = {n: record for n, (_, record) in enumerate(lines, 1) if record is not None}
        return Written(
            text, self.names, records, self._tensors, tuple(self._unseen.values()),
            tuple(self._notes), frozenset(self.facts),
        )  # fmt: skip

    # Names

    def new(self, prefix: str) -> str:
        """Return an unused name."""
        return f"_{prefix}{next(self._variables)}"

    def define(self, scope: Scope, prefix: str, text: str, record: Any = None) -> str:
        """Write the definition of a variable, and return its name."""
        name = self.new(prefix)
        scope.own.add(name)
        scope.add(f"{name} = {text}", record)
        return name

    def bound(self, value: Any) -> str:
        """Return a name that is bound to a value itself."""
        name = self._bound.get(id(value))
        if name is None:
            name = self._bound[id(value)] = f"c{len(self._bound)}"
            self.names[name] = value
        return name

    def memory(self) -> frozenset[int]:
        """Return the number of memory that nothing shares so far."""
        return frozenset({next(self._memories)})

    def _tensor(self, name: str, is_torn: bool = False) -> Tensors:
        """Return a tensor with its own memory."""
        memory = self.memory_of[name] = self.memory()
        return Tensors(name, memory, is_torn)

    def _apart(self, scope: Scope, names: list[str]) -> list[str]:
        """Return the operands, copied where two of them may share memory."""
        taken: set[int] = set()
        found = []
        for name in names:
            memory = self.memory_of.get(name, frozenset())
            if not taken.isdisjoint(memory):
                name = self.define(scope, "v", f"{name}.clone()")
            taken |= memory
            found.append(name)
        return found

    def part(self, part: Any, op: Op | None) -> Value:
        """Return the value of an argument, or of state."""
        if isinstance(part, Tensor):
            return self._state_of(part)
        if not isinstance(part, Captured):
            raise ExportError("a tensor came from nowhere", "" if op is None else cite(op))
        if part.kind is CaptureKind.ALIAS:
            part = part.value
        if part.is_argument:
            key: Any = part.label
            if part.kind is not CaptureKind.TENSOR and part.type not in DTYPES:
                raise ExportError(
                    f"the model hands on {part.label}, which is not a tensor or number: make a new "
                    f"{part.type.__name__} of what is in it",
                    "" if op is None else cite(op),
                )
            if key not in self._parts:
                name = self.new("a" if part.kind is CaptureKind.TENSOR else "k")
                if part.kind is CaptureKind.NUMBER and part.type is int:
                    name = self.new("s")
                self._prelude.append(f"{name} = {self._reached(part)}")
                is_tensor = part.kind is CaptureKind.TENSOR
                self._parts[key] = self._tensor(name) if is_tensor else Static(name, part.type)
                if isinstance(part.size, TensorFacts):
                    check = "torch.ops.aten._assert_tensor_metadata.default"
                    self._prelude.append(f"{check}({name}, dtype={part.size.dtype})")
            return self._parts[key]
        tensor = part.read(())
        if not isinstance(tensor, Tensor):
            raise ExportError(f"{part.label} is not a tensor", "" if op is None else cite(op))
        return self._state_of(tensor)

    def _state_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor that the program holds."""
        key: Any = id(tensor)
        if key not in self._parts:
            name = self.new("p")
            text = self._given.get(key)
            if text is None:
                path = self._path(key)
                self._tensors[path] = tensor
                text = f"read({path!r})(self)"
            self._prelude.append(f"{name} = {text}")
            self._parts[key] = self._tensor(name)
        return self._parts[key]

    def _path(self, key: int) -> str:
        """Return the attribute path of a tensor of the model, or of another one."""
        path = self._state.get(key)
        if path is None:
            names = (f"constant_{number}" for number in itertools.count())
            taken = {*self._tensors, *self._state.values()}
            return next(name for name in names if name not in taken)
        if _GENERATED.match(path):
            self._notes.append(f"{path} is called own_{path} in the program")
            return f"own_{path}"
        return path

    def _reached(self, part: Captured) -> str:
        if part.access is Access.ROOT:
            return str(self._parameters[part.key])
        assert part.parent is not None
        owner = self._reached(part.parent)
        if part.access is Access.ITEM:
            return f"{owner}[{part.key!r}]"
        return f"{owner}.{part.key.name}"

    # Flags

    def _start_flag(self, scope: Scope) -> str:
        name = self.new("f")
        scope.add(f"{name} = torch.zeros((), dtype=torch.int64)")
        return name

    def demand(
        self, scope: Scope, holds: str, place: str, question: Question | None = None
    ) -> None:
        """Write an assertion."""
        seen = () if question is None else tuple(way.answer for way in question.ways)
        key = place if question is None else question
        unseen = self._unseen.get(key)
        if unseen is None:
            unseen = self._unseen[key] = Unseen(len(self._unseen) + 1, place, seen)
        record = None if question is None else question.guard
        if scope.depth == 0 and not self._flagged:
            message = self._message(unseen)
            scope.add(f"torch.ops.aten._assert_async.msg({holds}, {message})", record)
            return
        if scope.flag is None:
            scope.flag = self._start_flag(scope)
        flag, name = scope.flag, self.new("f")
        scope.add(f"{name} = torch.where(({flag} != 0) | {holds}, {flag}, {unseen.number})", record)
        scope.flag = name
        if unseen.number not in scope.asked:
            scope.asked.append(unseen.number)

    def _message(self, unseen: Unseen) -> str:
        name = f"message_{unseen.number}"
        self.names[name] = unseen.message
        return name

    def _take_flag(self, scope: Scope, flag: str, asked: list[int]) -> None:
        """Combine the flag with one of a side or loop; in `forward`, assert that none is set."""
        if scope.depth == 0 and not self._flagged:
            by_number = {unseen.number: unseen for unseen in self._unseen.values()}
            for number in asked:
                message = self._message(by_number[number])
                scope.add(f"torch.ops.aten._assert_async.msg({flag} != {number}, {message})")
            return
        if scope.flag is None:
            scope.flag = flag
        else:
            name = self.new("f")
            scope.add(f"{name} = torch.where({scope.flag} != 0, {scope.flag}, {flag})")
            scope.flag = name
        scope.asked += [number for number in asked if number not in scope.asked]

    # Functions

    def _cond(
        self, scope: Scope, question: Question, asked: str,
        sides: list[tuple[Scope, tuple[Value, ...]]],
    ) -> tuple[Value, ...]:  # fmt: skip
        """Write a question as `cond`, and return the values needed after it."""
        one, other = (Several(env) for _, env in sides)
        kept, outputs = self._merged([side for side, _ in sides], [one, other], question)
        flagged = any(side.flag is not None for side, _ in sides)
        if not outputs and not flagged:  # a `cond` without outputs cannot be saved (torch 2.13)
            return self._after(scope, "", kept, outputs)
        names, texts = [], []
        for number, (side, _) in enumerate(sides):
            values = [pair[number] for pair, _ in outputs]
            kinds = [kind for _, kind in outputs]
            given = self._separate_outputs(side, values, kinds)
            if flagged:
                given.append(side.flag if side.flag is not None else self._start_flag(side))
            side.add(f"return ({_listed(given)})")
            names.append(f"side{self.new('g')}")
            texts.append(side)
        free = sorted({name for side in texts for name in self._free(side)}, key=_variable_order)
        for name, side in zip(names, texts, strict=True):
            self._put(scope, name, side, free, question.guard)
        result = self.new("r")
        operands = _listed(self._apart(scope, free))
        scope.add(f"{result} = cond({asked}, {names[0]}, {names[1]}, ({operands}))", question.guard)
        env = self._after(scope, result, kept, outputs)
        if flagged:
            flag = self.new("f")
            scope.add(f"{flag} = {result}[{len(outputs)}]")
            numbers = [number for side, _ in sides for number in side.asked]
            self._take_flag(scope, flag, list(dict.fromkeys(numbers)))
        return env

    def _merged(
        self, sides: list[Scope], values: list[Several], question: Question
    ) -> tuple[Any, list[Any]]:
        """Merge the values of two sides, and list the outputs of each.

        Return the structure, with a value where the sides agree, and the number of an output where
        they differ; and the outputs: the value of each side, and the type of number.
        """
        outputs: list[tuple[list[Value], type | None]] = []

        def merge(one: Value, other: Value) -> Any:
            if isinstance(one, Several) and isinstance(other, Several):
                same = one.kind is other.kind and identical(one.keys, other.keys)
                if same and len(one.items) == len(other.items):
                    items = [merge(a, b) for a, b in zip(one.items, other.items, strict=True)]
                    return one, items
                found = [f"{_value_word(each)} of {len(each.items)}" for each in (one, other)]
                raise ExportError(
                    f"the sides go on with {' and '.join(found)}: give both the same structure, "
                    "in the same order, padded where need be",
                    question.place,
                )
            if _is_same(one, other) and not self._is_own(sides, one):
                return one, None
            if isinstance(one, Tensors) and isinstance(other, Tensors):
                outputs.append(([one, other], None))
            elif (kind := _number_of(one, other)) is not None:
                outputs.append(([one, other], kind))
            else:
                raise ExportError(
                    f"one side continues with {_value_word(one)}, the other with "
                    f"{_value_word(other)}: use the same kind on both sides",
                    question.place,
                )
            return len(outputs) - 1, None

        return merge(values[0], values[1]), outputs

    @staticmethod
    def _is_own(sides: list[Scope], value: Value) -> bool:
        name = getattr(value, "name", getattr(value, "text", ""))
        return any(name in side.own for side in sides)

    def _separate_outputs(
        self, side: Scope, values: Sequence[Value], kinds: Sequence[type | None]
    ) -> list[str]:
        """Return expressions for the outputs of a side, none of which share memory.

        Not even the parts of one result do, such as those of `torch.where(mask)`: these are views
        of one tensor once torch has decomposed it.
        """
        found: list[str] = []
        taken: set[int] = set()
        for value, kind in zip(values, kinds, strict=True):
            text = self._result_text(side, value, kind)
            if isinstance(value, Tensors) and not text.endswith(".clone()"):
                if not taken.isdisjoint(value.memory):
                    text = f"{text}.clone()"
                taken |= value.memory
            found.append(text)
        return found

    def _result_text(self, side: Scope, value: Value, kind: type | None) -> str:
        """Return an expression for a value as the tensor that a side returns."""
        if isinstance(value, Tensors):
            is_new = value.name in side.own and len(value.memory) == 1
            return value.name if is_new else f"{value.name}.clone()"
        if isinstance(value, Numeral):
            return f"{value.name}.clone()"
        assert kind is not None
        return self.define(side, "n", _tensor_expression(value, kind))

    def _after(self, scope: Scope, result: str, kept: Any, outputs: list[Any]) -> tuple[Value, ...]:
        made = self._results(scope, result, outputs)

        def build(structure: Any) -> Value:
            own, inner = structure
            if inner is not None:
                return Several(tuple(map(build, inner)), own.keys, own.kind)
            return made[own] if type(own) is int else own

        found = build(kept)
        assert isinstance(found, Several)
        return found.items

    def _results(
        self, scope: Scope, result: str, outputs: Sequence[tuple[list[Value], type | None]]
    ) -> list[Value]:
        """Write variables for the outputs of an operator, and return their values."""
        made: list[Value] = []
        shared = _shared_outputs([values for values, _ in outputs])
        for place, (_, kind) in enumerate(outputs):
            name = self.define(scope, "v" if kind is None else "n", f"{result}[{place}]")
            made.append(
                self._tensor(name, place in shared) if kind is None else Numeral(name, kind)
            )
        return made

    def _free(self, scope: Scope) -> list[str]:
        """Return the variables that a function uses but does not define, in order."""
        used: dict[str, None] = {}
        made: set[str] = set(scope.loops)
        for line, _ in scope.lines:
            if line.lstrip().startswith("def "):
                continue
            left, sep, right = line.strip().partition(" = ")
            if sep and _VARIABLE.fullmatch(left):
                used.update(dict.fromkeys(_VARIABLE.findall(right)))
                made.add(left)
            else:
                used.update(dict.fromkeys(_VARIABLE.findall(line)))
        return [name for name in used if name not in made]

    def _put(self, scope: Scope, name: str, side: Scope, given: list[str], record: Any) -> None:
        scope.add(f"def {name}({', '.join(given)}):", record)
        for line, own in side.lines:
            scope.add(f"    {line}", own)
        scope.loops |= side.loops

    # Walking

    def _go(
        self, scope: Scope, node: Any, env: tuple[Value, ...], until: Any, view: View
    ) -> tuple[Value, ...]:
        """Write the ways from one state to another, and return the values needed there."""
        while node is not until and node is not view.sink:
            loop = view.loops.get(node)
            if loop is not None:
                env = self._loop(scope, loop, env, view)
                view = view.without(loop)
                if node not in view.edges:
                    raise ExportError("a loop was never left", node.place)
            join = view.join(node)
            ways = view.ways(node)
            env = self._branch(scope, node, ways, env, view, join, not node.is_complete)
            node = join
        return env

    def _branch(
        self, scope: Scope, question: Question, ways: list[Way], env: tuple[Value, ...],
        view: View, join: Any, is_demanded: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        """Write the sides of a question, up to where they meet again."""
        if len(ways) == 1:
            if is_demanded:
                holds = self._test(scope, question, ways[0].answer, env)
                self.demand(scope, holds, question.place, question)
                env = self._fitted(scope, question, ways[0], env, holds)
            env = self._follow(scope, ways[0], env, view)
            return self._go(scope, view.edges[question][ways[0]], env, join, view)
        if is_demanded and scope.depth == 0 and not self._flagged:
            # Before the sides, which may not be able to compute with what they have never seen.
            tests = [self._test(scope, question, way.answer, env) for way in ways]
            self.demand(scope, f"({' | '.join(tests)})", question.place, question)
            is_demanded = False
        asked = self._test(scope, question, ways[0].answer, env)
        sides: list[tuple[Scope, tuple[Value, ...]]] = []
        for listed, demanded in ((ways[:1], False), (ways[1:], is_demanded)):
            side = Scope(scope.depth + 1)
            made = self._branch(side, question, listed, env, view, join, demanded)
            sides.append((side, made))
        return self._cond(scope, question, asked, sides)

    def _fitted(
        self, scope: Scope, question: Question, way: Way, env: tuple[Value, ...], holds: str
    ) -> tuple[Value, ...]:
        """Write sizes that values decide as the side takes them whose answer is asserted."""
        if not question.is_on_size:
            return env
        tape = way.run.recording.tape
        metas = [tape.ops[hole].meta for hole in tape.states[way.after].holes]
        taken: dict[str, tuple[int, ...]] = {}
        for value, meta in zip(env, metas, strict=True):
            if isinstance(value, Tensors) and meta != ():
                taken.setdefault(value.name, shape_of(meta))
            elif isinstance(value, Static) and value.varies:
                taken.setdefault(value.text, shape_of(meta))
        result = self.new("r")
        sizes = [*taken.values()]
        scope.add(f"{result} = fit(({_listed(taken)}), {holds}, {sizes})", question.guard)
        names = {
            text: self.define(scope, text[1], f"{result}[{number}]")
            for number, text in enumerate(taken)
        }
        found = list(env)
        for place, value in enumerate(env):
            if isinstance(value, Tensors) and value.name in names:
                others = (one for one in env if isinstance(one, Tensors) and one.name != value.name)
                is_torn = value.is_torn or any(one.memory & value.memory for one in others)
                found[place] = replace(value, name=names[value.name], is_torn=is_torn)
            elif isinstance(value, Static) and value.text in names:
                found[place] = replace(value, text=names[value.text])
        return tuple(found)

    def _test(self, scope: Scope, question: Question, answer: Any, env: tuple[Value, ...]) -> str:
        """Return an expression for whether a question has a certain answer."""
        run, guard = question.run, question.guard
        holes = run.recording.tape.states[question.number].holes
        ops = SegmentOps(self, scope, run, None, dict(zip(holes, env, strict=True)))
        op = run.recording.tape.ops[guard.index]
        if isinstance(guard, LengthGuard):
            if gives_rows(op):
                size = f"{ops.name(op.index)}.size(0)"
            elif op.target is Tensor.tolist or op.target is Tensor.__len__:
                size = f"{ops.name(op.args[0].index)}.size(0)"
            else:
                raise ExportError(
                    "it depends on values how many things there are: test a mask, and keep all "
                    "of them",
                    question.place,
                )
            text = f"(torch.scalar_tensor({size}, dtype=torch.int64) == {answer})"
        else:
            value = ops.value_of(guard.index)
            text = self._compared(ops, value, answer, guard, question, op)
        return self.define(scope, "n", text, guard)

    def _compared(
        self, ops: SegmentOps, value: Value, answer: Any, guard: Guard, question: Question, op: Op
    ) -> str:
        if isinstance(value, Several) and type(answer) is list:
            flat, wanted = [*argument_leaves(value)], _flat_leaves(answer)
            if len(flat) != len(wanted):
                raise ExportError("lists of different lengths are compared", question.place)
            parts = [
                self._equal(ops.lifted(one, op), other, question)
                for one, other in zip(flat, wanted, strict=True)
            ]
            return f"torch.stack([{', '.join(parts)}]).all()"
        if isinstance(value, Tensors):
            raise ExportError("something is asked of a tensor as a whole", question.place)
        text = ops.lifted(value, op)
        kind = value.type if isinstance(value, (Numeral, Static)) else object
        if isinstance(guard, TruthGuard):
            if kind is bool:
                return text if answer else f"{text}.logical_not()"
            return f"({text} {'!=' if answer else '=='} 0)"
        return self._equal(text, answer, question)

    def _equal(self, text: str, answer: Any, question: Question) -> str:
        if type(answer) is bool:
            return text if answer else f"{text}.logical_not()"
        if type(answer) is int and abs(answer) < 1 << 53:
            return f"({text} == {answer})"
        raise ExportError(
            f"Python reads {answer!r} from a tensor, and an exported program has no Python to read "
            "other numbers: compute with the tensor",
            question.place,
        )

    # Segments

    def _follow(
        self, scope: Scope, way: Way, env: tuple[Value, ...], view: View
    ) -> tuple[Value, ...]:
        """Write the way to the next question, and return the values needed there."""
        loop = view.loop
        if loop is not None and way in loop.leaving:
            return Constant(False), *self._rounds[loop]
        made = self._segment(scope, way, env)
        if loop is not None and way in loop.again and self._rounds.get(loop) is not None:
            return Constant(True), *made
        return made

    def _segment(self, scope: Scope, way: Way, env: tuple[Value, ...]) -> tuple[Value, ...]:
        run, tape = way.run, way.run.recording.tape
        schedule = Schedule.of_segment(
            run.recording, run.analysis, current_context(), way.after, way.stop, {}
        )
        holes = tape.states[way.after].holes if way.after >= 0 else ()
        values = dict(zip(holes, env, strict=True))
        ops = SegmentOps(self, scope, run, schedule, values)
        self._copy_written(scope, schedule, ops)
        for position in range(schedule.start, schedule.end + 1):
            for number, guard in schedule.guards.get(position, ()):
                if number != way.stop and number > way.after and not run.is_question(number):
                    self._require_ranks(scope, ops, run, number)
                    self._require(scope, ops, guard)
            if way.after < 0:
                self._require_inputs(scope, ops, run, position)
            op = schedule.op_at(position)
            if op is not None and position < schedule.end and op.index not in ops.values:
                ops.emit(op)
        if way.stop is None:
            return (self._output_of(run.recording.root.output, ops),)
        return tuple(ops.handed(hole) for hole in tape.states[way.stop].holes)

    def _require_ranks(self, scope: Scope, ops: SegmentOps, run: AnalysedRun, number: int) -> None:
        """Write on which sizes it depends how many dimensions a guard finds."""
        tape = run.recording.tape
        guard = tape.guards[number]
        if run.analysis.kinds[number] is not GuardKind.DATA:
            return
        for op in run.rank_sources(guard):
            given = op.args[0]
            assert isinstance(given, Ref)
            meta = tape.ops[given.index].meta
            assert isinstance(meta, TensorMeta)
            dims: Any = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
            if dims is None:
                dims = range(len(meta.shape))
            for dim in [dims] if isinstance(dims, int) else dims:
                sign = "==" if meta.shape[dim] == 1 else "!="
                scope.add(f"require({ops.name(given.index)}.size({dim}) {sign} 1)", guard)

    def _require_inputs(
        self, scope: Scope, ops: SegmentOps, run: AnalysedRun, position: int
    ) -> None:
        """Write the guards on input sizes, from which torch.export learns the open sizes."""
        tape = run.recording.tape
        for number, guard in enumerate(tape.guards):
            if guard.position == position and run.analysis.kinds[number] is GuardKind.INPUT:
                self._require(scope, ops, guard)

    def _require(self, scope: Scope, ops: SegmentOps, guard: Guard) -> None:
        """Write a test that runs while the code is traced."""
        if is_fixed(guard) or isinstance(guard, LengthGuard):
            return  # it follows from the op, and from how its result is taken apart
        expected = guard.answer
        value = ops.value_of(guard.index)
        if isinstance(value, Several) and isinstance(expected, tuple):
            for item, size in zip(value.items, expected, strict=True):
                if isinstance(item, Static):
                    scope.add(f"require({item.text} == {size!r})", guard)
            return
        if not isinstance(value, Static) or type(expected) not in (int, float, bool):
            return
        if isinstance(guard, TruthGuard):
            text = value.text if expected else f"not {value.text}"
        else:
            text = f"{value.text} == {ops.constant(expected)}"
            if expected != expected:
                text = f"{value.text} != {value.text}"
        scope.add(f"require({text})", guard)

    def _copy_written(self, scope: Scope, schedule: Schedule, ops: SegmentOps) -> None:
        """Copy the tensors that a segment writes to, if they were made outside of the function."""
        roots: dict[int, set[int]] = {}
        written: dict[int, Op] = {}
        for index in range(schedule.start, schedule.end):
            op = schedule.op_at(index)
            if op is None:
                continue
            own: set[int] = set()
            if not makes_anew(op.target) or op.writes:
                for operand in op.operands:
                    own |= roots.get(operand, {operand})
            roots[index] = own or {index}
            for target in op.writes:
                for root in roots.get(target, {target}):
                    written.setdefault(root, op)
        for root, op in written.items():
            if root >= schedule.start and root not in ops.values:
                continue
            value = ops.value_of(root)
            for leaf in argument_leaves(value):
                if isinstance(leaf, Tensors):
                    self._copy(scope, ops, leaf, op)

    def _copy(self, scope: Scope, ops: SegmentOps, tensor: Tensors, op: Op) -> None:
        if tensor.name in scope.own and not tensor.is_torn:
            return
        if tensor.name[1] in "ap":
            if op.writes and ops.op(op.writes[0]).is_given:
                raise ExportError("the model writes to what was there before", cite(op))
            return
        others = {
            leaf.name
            for value in ops.values.values()
            for leaf in argument_leaves(value)
            if isinstance(leaf, Tensors) and leaf.memory & tensor.memory
        }
        if others - {tensor.name}:
            if scope.depth == 0 and not tensor.is_torn:
                return
            raise ExportError(
                "a tensor that shares memory with another one is written to in place behind a "
                "question: write to a copy, or by torch.where",
                cite(op),
            )
        if scope.depth == 0:
            return
        copied = self._tensor(self.define(scope, "v", f"{tensor.name}.clone()", op))
        for index, value in ops.values.items():
            ops.values[index] = map_leaves(value, lambda leaf: copied if leaf == tensor else leaf)

    # Loops

    def _loop(
        self, scope: Scope, loop: QuestionLoop, env: tuple[Value, ...], view: View
    ) -> tuple[Value, ...]:
        """Write a loop, and return the values needed at its header after its last iteration."""
        header = loop.header
        is_simple = all(way in header.ways for way in loop.leaving) and bool(loop.leaving)
        staying = [way for way in view.ways(header) if way not in loop.leaving]
        entered: list[Value] = []
        shrinking: dict[str, tuple[int, ...] | None] = {}

        def enter(leaf: Value, hole: int) -> Value:
            if isinstance(leaf, Static) and leaf.varies and header.differs(hole):
                name = self.define(scope, "n", _tensor_expression(leaf, leaf.type))
                leaf = Numeral(name, leaf.type)
            entered.append(leaf)
            if isinstance(leaf, Tensors):
                return self._tensor(self.new("q"), leaf.is_torn)
            if isinstance(leaf, Numeral):
                return Numeral(self.new("q"), leaf.type)
            return leaf

        start = Several(env)
        items = [map_leaves(item, partial(enter, hole=hole)) for hole, item in enumerate(env)]
        carried = Several(tuple(items))
        for hole, item in enumerate(items):
            if isinstance(item, Tensors):
                shrinking[item.name] = header.shrinks(hole)
        body = Scope(scope.depth + 1)
        old = dict(self._rounds)
        self._rounds = {**old, loop: carried.items if not is_simple else None}
        inner = view.one_round(loop, lambda way: not (is_simple and way in loop.leaving))
        join = inner.join(header)
        # Where it is simple, that one of these answers was given is what the loop goes by.
        missing = not is_simple and not header.is_complete
        ways = staying if is_simple else inner.ways(header)
        made = self._branch(body, header, ways, carried.items, inner, join, missing)
        made = self._go(body, join, made, inner.sink, inner)
        go: Value | None = None
        if not is_simple:
            go, *rest = made
            made = tuple(rest)
        self._rounds = old
        before, after = list(argument_leaves(carried)), list(argument_leaves(Several(made)))
        if len(before) != len(after):
            raise ExportError(
                "what the loop holds has another structure after each round: keep it in tensors "
                "of a fixed size",
                header.place,
            )
        returned: list[tuple[Value, Value, Value]] = []  # before the loop, in a round, behind it
        for first, one, other in zip(entered, before, after, strict=True):
            if one == other:
                continue
            if isinstance(one, Static) and isinstance(other, Static):
                body.add(f"require({one.text} == {other.text}, {_ANOTHER!r})", header.guard)
                continue
            is_number = isinstance(one, Numeral) and _number_of(one, other) is not None
            if not is_number and not (isinstance(one, Tensors) and isinstance(other, Tensors)):
                raise ExportError(
                    f"a loop goes on with {_value_word(one)} at first and "
                    f"{_value_word(other)} later",
                    header.place,
                )
            returned.append((first, one, other))
        params = [one.name for _, one, _ in returned]  # type: ignore[union-attr]
        inits = [first.name for first, _, _ in returned]  # type: ignore[union-attr]
        outputs = [([other], getattr(one, "type", None)) for _, one, other in returned]
        given = self._separate_outputs(
            body, [row[-1] for row in returned], [kind for _, kind in outputs]
        )
        test = Scope(scope.depth + 1)
        if is_simple:
            tests = [self._test(test, header, way.answer, carried.items) for way in staying]
            condition = " | ".join(tests)
        else:
            flag = self.new("q")
            params.append(flag)
            inits.append(self.define(scope, "n", "torch.ones((), dtype=torch.bool)"))
            assert go is not None
            given.append(self._result_text(body, go, bool))
            condition = flag
        if body.flag is not None:
            flag = self.new("q")
            params.append(flag)
            inits.append(self._start_flag(scope))
            given.append(body.flag)
            condition = f"({condition}) & ({flag} == 0)"
        if not params:
            raise ExportError("a loop changes nothing that is a tensor", header.place)
        test.add(f"return ({condition}).clone()")
        body.add(f"return ({_listed(given)})")
        fixed = {
            one.name: first.name
            for first, one in zip(entered, before, strict=True)
            if isinstance(one, (Tensors, Numeral)) and isinstance(first, (Tensors, Numeral))
        }
        free = [n for side in (test, body) for n in self._free(side) if n not in params]
        free = sorted(dict.fromkeys(free), key=_variable_order)
        names = [f"test{self.new('g')}", f"round{self.new('g')}"]
        for name, side in zip(names, (test, body), strict=True):
            self._put(scope, name, side, [*params, *free], header.guard)
        scope.loops.update(params, fixed)
        result = self.new("r")
        arguments = self._apart(scope, inits + [fixed.get(name, name) for name in free])
        begin, others, sizes = map(
            _listed, (arguments[: len(inits)], arguments[len(inits) :], map(shrinking.get, params))
        )
        scope.add(
            f"{result} = while_loop({names[0]}, {names[1]}, ({begin}), ({others}), ({sizes}))",
            header.guard,
        )
        results = self._results(scope, result, outputs)
        ends = {one: end for (_, one, _), end in zip(returned, results, strict=True)}
        if body.flag is not None:
            flag = self.new("f")
            scope.add(f"{flag} = {result}[{len(params) - 1}]")
            self._take_flag(scope, flag, body.asked)
        behind = iter(zip(entered, before, strict=True))

        def leave(_: Value) -> Value:
            first, one = next(behind)
            return ends.get(one, first)

        found = map_leaves(start, leave)
        assert isinstance(found, Several)
        return found.items

    # What the program returns: tensors, and numbers as tensors, in tuples, lists and dicts.

    def _output_of(self, value: Any, ops: SegmentOps) -> Value:
        """Return what a run gives, with its structure."""
        kind = type(value)
        if kind is Ref:
            return ops.value_of(value.index)
        if kind is Existing:
            return self.part(value.part, None)
        if kind is FixedObject:
            return Constant(value.value)
        if value is None or kind in (bool, int, float, str):
            return Constant(value)
        cls = kind
        if kind in (tuple, list, dict):
            given = value if kind is dict else dict(enumerate(value))
        elif kind is Instance and issubclass(value.cls, tuple):
            cls, given = tuple, dict(enumerate(value.items))
        elif kind is Instance and issubclass(value.cls, dict):
            cls, given = dict, value.items
        else:
            cls = value.cls if kind is Instance else getattr(value, "cls", kind)
            given = parameters_in(cls, value.attributes) if kind is Instance else {}
            if not given:
                raise ExportError(
                    f"the model returns a {cls.__name__}: return tensors, numbers, tuples, lists "
                    "and dicts",
                    "its return",
                )
        if kind is Instance:
            note = f"in place of a {value.cls.__name__} it returns a "
            self._note(note + ("tuple" if cls is tuple else "dict"))
        inner = tuple(self._output_of(item, ops) for item in given.values())
        return Several(inner, () if cls in (tuple, list) else tuple(given), cls)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _output_text(self, value: Value) -> str:
        """Return an expression for what the program returns."""
        if isinstance(value, Tensors):
            return value.name
        kind = type(value.value) if isinstance(value, Constant) else getattr(value, "type", None)
        if kind in DTYPES:
            self._note("numbers that it returns are tensors without dimensions")
            return value.name if isinstance(value, Numeral) else _tensor_expression(value, kind)
        if isinstance(value, Constant):
            return self.bound(value.value)
        assert isinstance(value, Several), "what is outdated is refused before it is returned"
        inner = [self._output_text(item) for item in value.items]
        if value.kind not in (tuple, list):  # what stands for a distribution is a dict as well
            pairs = zip(value.keys, inner, strict=True)
            return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        return f"[{', '.join(inner)}]" if value.kind is list else f"({_listed(inner)})"


def _listed(texts: Iterable[Any]) -> str:
    """Return texts as the inside of a tuple."""
    return "".join(f"{text}, " for text in texts)


def _tensor_expression(value: Value, kind: type) -> str:
    """Return an expression for a number as a tensor without dimensions."""
    if isinstance(value, Static):
        return f"torch.scalar_tensor({value.text}, dtype={DTYPES[kind]})"
    assert isinstance(value, Constant)
    return f"torch.full((), {value.value!r}, dtype={DTYPES[kind]})"


def _is_same(one: Value, other: Value) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return identical(one.value, other.value)  # 1, True and 1.0 are equal
    return one == other


def _number_of(one: Value, other: Value) -> type | None:
    """Return the common type of two numbers, if they have one."""
    kinds = {
        type(value.value) if isinstance(value, Constant) else getattr(value, "type", None)
        for value in (one, other)
    }
    kind = kinds.pop()
    return kind if not kinds and kind in DTYPES else None


def _value_word(value: Value) -> str:
    """Name a kind of value for a message."""
    if isinstance(value, Tensors):
        return "a tensor"
    if isinstance(value, Constant):
        return repr(value.value)
    if isinstance(value, Outdated):
        return "a part of a tensor that was written to"
    if isinstance(value, Several):
        return f"a {value.kind.__name__}"
    return f"a number ({value.type.__name__})"


def _shared_outputs(outputs: list[list[Value]]) -> set[int]:
    """Return the outputs that shared memory with each other, or with tensors outside."""

    def memory(values: Iterable[Value]) -> list[frozenset[int]]:
        return [v.memory if isinstance(v, Tensors) else frozenset() for v in values]

    memories = [*map(memory, outputs)]
    return {
        place
        for place, mine in enumerate(memories)
        for other, theirs in enumerate(memories)
        # In both sides, the same memory means the same output.
        if other != place and any(a & b for a, b in zip(mine, theirs, strict=True))
    }


def _variable_order(name: str) -> tuple[str, int]:
    """Sort variables by letter and number."""
    return name[1], int(name[2:])


_ANOTHER = (
    "Python computes another number in each round, and a program has tensors only: begin with a "
    "tensor, such as torch.tensor(step)"
)


def _flat_leaves(value: Any) -> list[Any]:
    if type(value) is list:
        return [leaf for item in value for leaf in _flat_leaves(item)]
    return [value]
