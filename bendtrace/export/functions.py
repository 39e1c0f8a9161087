"""The functions for `cond` and `while_loop`: their arguments, outputs and flags.

Everything that a function uses becomes an argument, and everything that it returns is new: the
operators accept neither two arguments that share memory, nor a function that returns an argument.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bendtrace.errors import ExportError
from bendtrace.export.machine import Question, told
from bendtrace.export.ops import Scope
from bendtrace.export.values import (
    DTYPES,
    Constant,
    Number,
    Outdated,
    Several,
    Static,
    Tensors,
    Value,
)
from bendtrace.tape.captured import Access, Captured, CaptureKind, TensorFacts, identical
from bendtrace.tape.tape import Op

# What operators are given; what has another letter is closed over.
_VARIABLE = re.compile(r"\b_[vnspaqfr]\d+\b")
# Names that torch.export gives to what it adds to a program (2.13).
_GENERATED = re.compile(
    r"(__written__|_guards_fn|((_?lifted)?_tensor(_constant)?|"
    r"(true|false|while_loop_(cond|body))_graph)_?\d+)$"
)
# Among the names, what is known of them.
OWN = ("__memories__", "__bound__", "__memory_of__", "__picked__", "__facts__")


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
        known = " or ".join(map(str, self.seen))
        return f"{self.place} was always {known} for the inputs that this was exported from"

    def __str__(self) -> str:
        return self.message


class Functions:
    """The state of writing a function of tensors, with the functions in it.

    Args:
        parameters: the names of the arguments, in the order in which they are bound.
        state: the names of the model's tensors, by identity.
        given: the variables of those that are inputs.
        flagged: whether the program returns its flag, in place of assertions.
    """

    def __init__(
        self, parameters: list[str], state: dict[int, str], given: dict[int, str], flagged: bool
    ) -> None:
        self._parameters, self._given = parameters, given
        self._state = state
        self._flagged = flagged
        self._names: dict[str, Any] = {
            "__memories__": [None], "__memory_of__": {}, "__picked__": set(), "__facts__": set(),
        }  # fmt: skip
        self._counter = 0
        self._parts: dict[Any, Value] = {}
        self._prelude: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._unseen: dict[Any, Unseen] = {}
        self._told: list[str] = []

    # Names

    def _new(self, prefix: str) -> str:
        self._counter += 1
        return f"_{prefix}{self._counter}"

    def _memory(self) -> frozenset[int]:
        memories = self._names["__memories__"]
        memories.append(None)
        return frozenset({len(memories) - 1})

    def _tensor(self, name: str, is_torn: bool = False) -> Tensors:
        """Return a tensor with its own memory."""
        memory = self._memory()
        self._names["__memory_of__"][name] = memory
        return Tensors(name, memory, is_torn)

    def _apart(self, scope: Scope, names: list[str]) -> list[str]:
        """Return the operands, copied where two of them may share memory."""
        taken: set[int] = set()
        found = []
        for name in names:
            memory = self._names["__memory_of__"].get(name, frozenset())
            if not taken.isdisjoint(memory):
                copy = self._new("v")
                scope.own.add(copy)
                scope.add(f"{copy} = {name}.clone()")
                name = copy
            taken |= memory
            found.append(name)
        return found

    def _part(self, part: Any, op: Op | None) -> Value:
        """Return the value of an argument, or of state."""
        if isinstance(part, Tensor):
            return self._state_of(part)
        if not isinstance(part, Captured):
            raise ExportError("a tensor came from nowhere", "" if op is None else told(op))
        if part.kind is CaptureKind.ALIAS:
            part = part.value
        if part.is_argument:
            key: Any = part.label
            if part.kind is not CaptureKind.TENSOR and part.type not in DTYPES:
                raise ExportError(
                    f"the model hands on {part.label}, which is not a tensor or number: make a new "
                    f"{part.type.__name__} of what is in it",
                    "" if op is None else told(op),
                )
            if key not in self._parts:
                name = self._new("a" if part.kind is CaptureKind.TENSOR else "k")
                if part.kind is CaptureKind.NUMBER and part.type is int:
                    name = self._new("s")
                self._prelude.append(f"{name} = {self._reached(part)}")
                is_tensor = part.kind is CaptureKind.TENSOR
                self._parts[key] = self._tensor(name) if is_tensor else Static(name, part.type)
                if isinstance(part.size, TensorFacts):
                    self._prelude.append(f"has_dtype({name}, {part.size.dtype})")
            return self._parts[key]
        tensor = part.read(())
        if not isinstance(tensor, Tensor):
            raise ExportError(f"{part.label} is not a tensor", "" if op is None else told(op))
        return self._state_of(tensor)

    def _state_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor that the program holds."""
        key: Any = id(tensor)
        if key not in self._parts:
            name = self._new("p")
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
            self._told.append(f"{path} is called own_{path} in the program")
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
        name = self._new("f")
        scope.add(f"{name} = torch.zeros((), dtype=torch.int64)")
        return name

    def _demand(
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
        flag, name = scope.flag, self._new("f")
        scope.add(f"{name} = torch.where(({flag} != 0) | {holds}, {flag}, {unseen.number})", record)
        scope.flag = name
        if unseen.number not in scope.asked:
            scope.asked.append(unseen.number)

    def _message(self, unseen: Unseen) -> str:
        name = f"message_{unseen.number}"
        self._names[name] = unseen.message
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
            name = self._new("f")
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
        kept, outputs = self._merged(scope, [side for side, _ in sides], [one, other], question)
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
            side.add(f"return ({''.join(text + ', ' for text in given)})")
            names.append(f"side{self._new('g')}")
            texts.append(side)
        free = sorted({name for side in texts for name in self._free(side)}, key=order)
        for name, side in zip(names, texts, strict=True):
            self._put(scope, name, side, free, question.guard)
        result = self._new("r")
        operands = "".join(f"{name}, " for name in self._apart(scope, free))
        scope.add(f"{result} = cond({asked}, {names[0]}, {names[1]}, ({operands}))", question.guard)
        env = self._after(scope, result, kept, outputs)
        if flagged:
            flag = self._new("f")
            scope.add(f"{flag} = {result}[{len(outputs)}]")
            numbers = [number for side, _ in sides for number in side.asked]
            self._take_flag(scope, flag, list(dict.fromkeys(numbers)))
        return env

    def _merged(
        self, scope: Scope, sides: list[Scope], values: list[Several], question: Question
    ) -> tuple[Any, list[Any]]:
        """Merge the values of two sides, and list the outputs of each.

        Returns:
            The structure, with a value where the sides agree, and the number of an output where
            they differ; and the outputs: the value of each side, and the type of number.
        """
        outputs: list[tuple[list[Value], type | None]] = []

        def merge(one: Value, other: Value) -> Any:
            if isinstance(one, Several) and isinstance(other, Several):
                same = one.kind is other.kind and identical(one.keys, other.keys)
                if same and len(one.items) == len(other.items):
                    items = [merge(a, b) for a, b in zip(one.items, other.items, strict=True)]
                    return one, items
                found = [f"{value_word(each)} of {len(each.items)}" for each in (one, other)]
                raise ExportError(
                    f"the sides go on with {' and '.join(found)}: give both the same structure, "
                    "in the same order, padded where need be",
                    question.place,
                )
            if _is_same(one, other) and not self._is_own(sides, one):
                return one, None
            if isinstance(one, Tensors) and isinstance(other, Tensors):
                outputs.append(([one, other], None))
            elif (kind := number_of(one, other)) is not None:
                outputs.append(([one, other], kind))
            else:
                raise ExportError(
                    f"one side continues with {value_word(one)}, the other with "
                    f"{value_word(other)}: use the same kind on both sides",
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
            text = self._made(side, value, kind)
            if isinstance(value, Tensors) and not text.endswith(".clone()"):
                if not taken.isdisjoint(value.memory):
                    text = f"{text}.clone()"
                taken |= value.memory
            found.append(text)
        return found

    def _made(self, side: Scope, value: Value, kind: type | None) -> str:
        """Return an expression for a value as the tensor that a side returns."""
        if isinstance(value, Tensors):
            is_new = value.name in side.own and len(value.memory) == 1
            return value.name if is_new else f"{value.name}.clone()"
        if isinstance(value, Number):
            return f"{value.name}.clone()"
        name = self._new("n")
        assert kind is not None
        text = value.text if isinstance(value, Static) else repr(value.value)  # type: ignore[union-attr]
        if isinstance(value, Static):
            side.add(f"{name} = torch.scalar_tensor({text}, dtype={DTYPES[kind]})")
        else:
            side.add(f"{name} = torch.full((), {text}, dtype={DTYPES[kind]})")
        side.own.add(name)
        return name

    def _after(self, scope: Scope, result: str, kept: Any, outputs: list[Any]) -> tuple[Value, ...]:
        made: list[Value] = []
        shared = shared_outputs([pair for pair, _ in outputs])
        for place, (_, kind) in enumerate(outputs):
            name = self._new("v" if kind is None else "n")
            scope.own.add(name)
            scope.add(f"{name} = {result}[{place}]")
            made.append(self._tensor(name, place in shared) if kind is None else Number(name, kind))

        def build(structure: Any) -> Value:
            own, inner = structure
            if inner is not None:
                return Several(tuple(map(build, inner)), own.keys, own.kind)
            return made[own] if type(own) is int else own

        found = build(kept)
        assert isinstance(found, Several)
        return found.items

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


def _is_same(one: Value, other: Value) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return identical(one.value, other.value)  # 1, True and 1.0 are equal
    return one == other


def number_of(one: Value, other: Value) -> type | None:
    """Return the common type of two numbers, if they have one."""
    kinds = {
        type(value.value) if isinstance(value, Constant) else getattr(value, "type", None)
        for value in (one, other)
    }
    kind = kinds.pop()
    return kind if not kinds and kind in DTYPES else None


def value_word(value: Value) -> str:
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


def shared_outputs(outputs: list[list[Value]]) -> set[int]:
    """Return the outputs that shared memory with each other, or with tensors outside."""
    found: set[int] = set()
    for place, values in enumerate(outputs):
        mine = {m for value in values if isinstance(value, Tensors) for m in value.memory}
        for other, others in enumerate(outputs):
            if other != place and any(
                isinstance(value, Tensors) and not mine.isdisjoint(value.memory) for value in others
            ):
                # In both sides, the same memory means the same output.
                if not _is_same_only(values, others):
                    found.add(place)
    return found


def _is_same_only(one: list[Value], other: list[Value]) -> bool:
    return not any(
        isinstance(a, Tensors) and isinstance(b, Tensors) and a.memory & b.memory
        for a, b in zip(one, other, strict=True)
    )


def order(name: str) -> tuple[str, int]:
    """Sort variables by letter and number."""
    return name[1], int(name[2:])
