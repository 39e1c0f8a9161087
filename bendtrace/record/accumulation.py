"""Lists that a loop appends tensors or numbers to, as values that ops give.

`for ...: outputs.append(y)`, and then `torch.stack(outputs)`: with all of its items in it, the list
would make each round a state that equals no other. Where numbers differ between runs (see
`varying.py`), an op gives the list instead. At each question within the loop, `accumulate` adds the
latest items to what it gave at the question before. The state has the list as one hole, with the
facts about its items, and the loop closes. `torch.stack` receives what the latest op gives.

The list itself stays as it is, and nothing intercepts what code does with it. Nothing else than the
code that `python/accumulators.py` looks for can see the list, so none can see, or change, an item.
For people, `Recording.plain_ops` has the items in place of the list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from bendtrace.python import stacks
from bendtrace.python.accumulators import (
    Accumulator,
    accumulator_slots,
    accumulators_at,
    appends_lists,
    is_comprehension,
    receiver_of_list,
)
from bendtrace.python.bytecode import assign, local_in
from bendtrace.python.computations import accumulate, repeat
from bendtrace.python.results import exchange
from bendtrace.python.sites import TRACER, instruction_at, outside_scalars
from bendtrace.record.encoding import ListOperand
from bendtrace.record.tape_writer import TrackedTensor
from bendtrace.record.values import TRACED_AS, RunValues
from bendtrace.tape.guards import ValueGuard
from bendtrace.tape.scalars import TRACED, TracedInt, plain
from bendtrace.tape.tape import Op, OpKind, Ref, Tape, Use, ref_to
from bendtrace.watch.writes import version_of


@dataclass(frozen=True, slots=True)
class ListValue:
    """The first items of a list, as an op gives them.

    Attributes:
        index: the op.
        items: the ops of the items, where each has its first name (see `Tape.aliases`); plain
            numbers by their type and text.
        of: the list. Another one may begin with the same items in this run, and not in others.
    """

    index: int
    items: tuple[Any, ...]
    of: list[Any]

    @property
    def length(self) -> int:
        """The number of items."""
        return len(self.items)


class LoopList(list[Any]):
    """A list whose length code asks for, or that it clears.

    It is in the place of the list that the code made.

    Args:
        items: its items.
        lists: the lists of the run.
    """

    def __init__(self, items: list[Any], lists: Accumulation) -> None:
        super().__init__(items)
        self._lists = lists

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which it is."""
        return tuple(self)

    def __len__(self) -> int:
        length, frame = super().__len__(), sys._getframe(1)
        is_own = frame.f_code.co_filename.startswith(TRACER)
        return length if is_own else self._lists.length(self, length, frame)

    def __bool__(self) -> bool:
        length, frame = super().__len__(), sys._getframe(1)
        is_own = frame.f_code.co_filename.startswith(TRACER)
        return bool(length if is_own else self._lists.traced_length(self, length))

    def clear(self) -> None:
        """Remove all items. What is added then is in no list that an op has given."""
        super().clear()
        self._lists.forget(self)


class SumParts(NamedTuple):
    """The parts of a list whose length numbers decide.

    Attributes:
        counts: the numbers, which are traced scalars.
        samples: items of all kinds that there may be.
        named: how many items, the first ones, need not be plain numbers.
        is_filled: whether there are items whatever the numbers are.
    """

    counts: tuple[Any, ...]
    samples: tuple[Any, ...]
    named: int
    is_filled: bool


class Summand(list[Any]):
    """The list that `[y] * n` makes, where it is then added to another list.

    Args:
        items: its items.
        value: the op that gives them.
        parts: what it consists of.
        lists: the lists of the run.
    """

    def __init__(
        self, items: list[Any], value: ListValue, parts: SumParts, lists: Accumulation
    ) -> None:
        super().__init__(items)
        self.value: ListValue = value
        self.parts: SumParts = parts
        self._lists = lists

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which it is."""
        samples = ListOperand([*self.parts.samples], ref_to(self.value.index))
        return samples, *self.parts.counts

    def __add__(self, other: Any) -> Any:
        return self._lists.add(self, other)

    def __radd__(self, other: Any) -> Any:
        return self._lists.add(other, self)


def items_given(op: Op, tape: Tape) -> list[Any]:
    """Return the items of a list that an op gives, as recorded."""
    if op.target is repeat:
        return [*op.args[0]] * tape.ops[op.args[1].index].meta
    before, items = (
        items_given(tape.ops[part.index], tape) if type(part) is Ref else part or []
        for part in op.args
    )
    return [
        items_given(tape.ops[item.index], tape) if _is_given_list(item, tape) else item
        for item in (*before, *items)
    ]


def _is_given_list(item: Any, tape: Tape) -> bool:
    return type(item) is Ref and tape.ops[item.index].target in (accumulate, repeat)


# A variable of a running function; "" for the list of a comprehension, which is on the stack, and
# the position of an instruction, in brackets, for the list that this has made.
_Variable: TypeAlias = tuple[int, CodeType, str]


class _MadeList(NamedTuple):
    """A list that an expression has made, and the variable that receives it."""

    items: list[Any]
    receiver: _Variable


class Accumulation:
    """Follows the lists of one run that loops append to.

    Args:
        values: knows the ops of tensors.
        outermost: the code that called the model.

    Attributes:
        has_begun: whether an op gives a list.
    """

    def __init__(self, values: RunValues, outermost: CodeType) -> None:
        self._writer, self._values, self._outermost = values.writer, values, outermost
        self._recorder: Any = values.origin
        self.has_begun: bool = False
        self._lists: dict[_Variable, ListValue] = {}
        self._made: dict[_Variable, _MadeList] = {}
        self._inner: dict[int, tuple[list[Any], int]] = {}  # items that are lists, with their ops

    def follow(self, frame: FrameType) -> None:
        """Let ops give the lists that the loops around a question append to.

        Args:
            frame: the code that asks.
        """
        if self._writer.is_inside or self._recorder.is_in_block:
            return  # a resumed run does not go there
        running: dict[int, FrameType] = {}
        found: FrameType | None = frame
        while found is not None and found.f_code is not self._outermost:
            running[id(found)] = found
            found = found.f_back
        for found in reversed(running.values()):  # outer ones first, which get the others' lists
            if is_comprehension(found.f_code):
                self._follow_comprehension(found)
        for variable, made in [*self._made.items()]:
            holder, code, name = made.receiver
            is_held = (
                name and holder in running and running[holder].f_code is code
                and local_in(running[holder], name) is made.items
            )  # fmt: skip
            if is_held and variable in self._lists:
                self._lists[made.receiver] = self._lists[variable]
            if is_held or variable[0] not in running:
                del self._made[variable]
                self._lists.pop(variable, None)
        for variable in [one for one in self._lists if one[0] not in running]:
            del self._lists[variable]
        for found in running.values():
            for accumulator in accumulators_at(found.f_code, found.f_lasti):
                variable = id(found), found.f_code, accumulator.name
                items = local_in(found, accumulator.name)
                if accumulator.is_computed and variable not in self._lists:
                    continue
                if _is_list(items) and items and accumulator.is_private(found):
                    if accumulator.is_asked and type(items) is list:
                        if sys.getrefcount(items) != _HELD_ONCE:
                            continue  # an instruction holds it
                        items = LoopList(items, self)
                        assign(found, accumulator.name, items)
                    with torch._C.DisableTorchFunction():
                        self._follow(variable, items, found)

    def _follow_comprehension(self, frame: FrameType) -> None:
        """Follow the list of a running comprehension."""
        caller: Any = frame.f_back
        receiver, items = self._receiver(caller), stacks.lowest_on_stack(frame)
        if receiver is not None and _is_list(items) and items:
            if receiver.is_asked and type(items) is list:
                items = LoopList(items, self)
                stacks.put_lowest_on_stack(frame, items)
            variable = id(frame), frame.f_code, ""
            holder = id(caller), caller.f_code, receiver.name
            self._made[variable] = _MadeList(items, holder)
            with torch._C.DisableTorchFunction():
                self._follow(variable, items, frame)

    def _follow(self, variable: _Variable, items: list[Any], frame: FrameType) -> None:
        value = self._lists.get(variable)
        if value is not None and not self._begins_with(items, value):
            del self._lists[variable]
            value = None
        new = items[0 if value is None else value.length :]
        may_be_item = self._may_be_item
        if not variable[2] and appends_lists(frame.f_code):
            may_be_item = self._may_be_list
        if new and all(map(may_be_item, new)):
            refs = [self._recorded(item) for item in new]
            self._lists[variable] = self._give(items, value, refs, frame)

    def repeat(self, operands: tuple[Any, ...], frame: FrameType) -> list[Any] | None:
        """Return the list that `[y] * n` makes of a traced scalar; None if it is not followed.

        Args:
            operands: the list and the number, or the other way round.
            frame: the code that multiplies them.
        """
        items, count = operands if isinstance(operands[0], list) else operands[::-1]
        receiver = self._receiver(frame)
        if receiver is None or type(items) is not list or type(count) is not TracedInt:
            return None
        if not (items and all(map(_is_plain, items))):
            return None
        if not (receiver.is_operand or count > 0):
            return None  # an empty list has items of no type
        times = self._values.scalar_ref(count)
        parts = SumParts((count,), tuple(items), 0, False)
        return self._make(repeat, (items, times), items * plain(count), (), parts, frame)

    def add(self, first: Any, second: Any) -> Any:
        """Return the sum of two lists, of which `[y] * n` has made one.

        Args:
            first: the first one.
            second: the other one.
        """
        lists = first, second
        if not all(isinstance(one, list) for one in lists):
            return NotImplemented
        parts = [
            one.parts if type(one) is Summand else SumParts((), tuple(one), len(one), bool(one))
            for one in lists
        ]
        whole = SumParts(
            parts[0].counts + parts[1].counts, parts[0].samples + parts[1].samples,
            parts[0].named, any(one.is_filled for one in parts),
        )  # fmt: skip
        result, frame = [*first, *second], outside_scalars()
        receiver = self._receiver(frame)
        is_known = type(first) is Summand or all(map(self._may_be_item, first))
        is_known = is_known and (type(second) is Summand or all(map(_is_plain, second)))
        if receiver is None or not is_known:
            for count in whole.counts:  # since code may see the list
                self._guard(count, frame)
            return result
        if not receiver.is_operand:
            self._ask_kinds(whole, frame)
        with torch._C.DisableTorchFunction():
            refs: list[Any] = [
                ref_to(one.value.index) if type(one) is Summand else [*map(self._recorded, one)]
                for one in lists
            ]
            if type(first) is Summand:
                names = first.value.items[: whole.named]
            else:
                names = tuple(map(self._name, refs[0]))
            return self._make(accumulate, tuple(refs), result, names, whole, frame)

    def _ask_kinds(self, parts: SumParts, frame: FrameType) -> None:
        """Ask for what the kind of a tensor depends on that is made of the list.

        What is asked next depends on nothing that the state does not have.
        """
        if len({type(plain(item)) for item in parts.samples}) > 1:
            for count in parts.counts:
                if not count > 0:
                    self._guard(count, frame)
        elif not (parts.is_filled or any(count > 0 for count in parts.counts)):
            for count in parts.counts:
                self._guard(count, frame)

    def _guard(self, count: Any, frame: FrameType) -> None:
        index = self._values.scalar_ref(count).index
        self._writer.guard(ValueGuard, index, plain(count), Use.INDEX, frame)

    def _receiver(self, frame: FrameType) -> Accumulator | None:
        """Return what receives the list that the instruction of a frame makes."""
        if self._writer.is_inside or self._recorder.is_in_block:
            return None
        offset = instruction_at(frame.f_code, frame.f_lasti)
        receiver = receiver_of_list(frame.f_code, offset)
        if receiver is not None and receiver.is_item:
            caller = frame.f_back
            is_followed = caller is not None and self._receiver(caller) is not None
            return receiver if is_followed and appends_lists(frame.f_code) else None
        return receiver if receiver is not None and receiver.is_private(frame) else None

    def _make(
        self, target: Any, args: tuple[Any, ...], items: list[Any], names: tuple[Any, ...],
        parts: SumParts, frame: FrameType,
    ) -> list[Any]:  # fmt: skip
        """Record the op that gives a list whose length numbers decide, and return the list.

        Args:
            target: the function of the op.
            args: what it is given.
            items: the items.
            names: the names of the first ones; the others are plain numbers.
            parts: what it consists of.
            frame: the code that makes the list.
        """
        offset = instruction_at(frame.f_code, frame.f_lasti)
        receiver = receiver_of_list(frame.f_code, offset)
        if receiver is not None and receiver.is_item:
            self._follow_comprehension(frame)  # before what is known of the list before is lost
        op = self._emit(target, args, frame)
        given = self._writer.handed.get(op.index)
        if type(given) is list:
            items = [*items[: len(names)], *given[len(names) :]]
            for at, name in enumerate(names):
                self._exchange(items, at, given[at], name)
        if receiver is not None and receiver.is_asked and not receiver.is_operand:
            items = LoopList(items, self)
        value = ListValue(op.index, (*names, *map(self._name, items[len(names) :])), items)
        if receiver is not None and receiver.is_operand:
            return Summand(items, value, parts, self)
        variable = id(frame), frame.f_code, f"[{offset}]"
        name = "" if receiver is None else receiver.name
        self._made[variable] = _MadeList(items, (id(frame), frame.f_code, name))
        self._lists[variable] = value
        return items

    @staticmethod
    def is_own(items: list[Any]) -> bool:
        """Return whether a list is in the place of one that the code made."""
        return type(items) is LoopList

    @staticmethod
    def is_comprehension(code: CodeType) -> bool:
        """Return whether code makes such a list, which lies lowest on its stack."""
        return is_comprehension(code)

    @staticmethod
    def slots(code: CodeType) -> Collection[int]:
        """Return the variables of code that may hold such lists."""
        return accumulator_slots(code)

    def parts(
        self, items: Any, code: CodeType, slot: int | None
    ) -> tuple[int, list[Any], list[Any]] | None:
        """Return the op that gives the first items of a list, these, and the other items.

        None if no op gives some of them.

        Args:
            items: what a variable holds.
            code: the code that has the variable.
            slot: the variable; None for the list of a comprehension.
        """
        held = "" if slot is None else code.co_varnames[slot]
        for (_, owner, name), value in self._lists.items():
            if owner is code and name == held and _is_list(items):
                if self._begins_with(items, value):
                    return value.index, items[: value.length], items[value.length :]
        return None

    def _begins_with(self, items: list[Any], value: ListValue) -> bool:
        names = zip(value.items, items, strict=False)
        return (
            value.of is items
            and value.length <= len(items)
            and all(self._first_name(item) == index for index, item in names)
        )

    def operand(
        self, items: list[Any], encode: Callable[[Any, type], Any]
    ) -> tuple[Ref, list[Any]] | None:
        """Return the op that gives all items of a list, and the list as torch has to receive it.

        None if no op gives some of them.

        Args:
            items: the list, as a function of torch receives it.
            encode: encodes an item.
        """
        value = self._value_of(items) if self._lists else None
        if value is None:
            return None
        for item in items[: value.length]:  # of which some may have been written to
            tracked = self._writer.tracked[id(item)] if isinstance(item, Tensor) else None
            if tracked is not None and tracked.ref is not None and tracked.version >= 0:
                self._writer.writes.receive(tracked.ref, item, tracked.version)
        new = [encode(item, type(item))[0] for item in items[value.length :]]
        ref = ref_to((self._give(items, value, new, None) if new else value).index)
        return ref, _plain_items(items)

    def _value_of(self, items: list[Any]) -> ListValue | None:
        """Return the op that gives the first items of the list that a variable holds."""
        if (value := self._value_made(items)) is not None:
            return value
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._outermost:
            for variable, value in self._lists.items():
                if variable[:2] == (id(frame), frame.f_code):
                    if local_in(frame, variable[2]) is items and self._begins_with(items, value):
                        return value
            frame = frame.f_back
        return None

    def traced_length(self, items: list[Any], length: int) -> Any:
        """Return the length of a list as a traced scalar; the length itself if none gives it.

        Args:
            items: the list.
            length: how many items it has.
        """
        value = self._value_of(items)
        if value is None or not all(map(self._may_be_item, items[value.length :])):
            return length
        with torch._C.DisableTorchFunction():
            new = [*map(self._recorded, items[value.length :])]
            value = self._give(items, value, new, None) if new else value
            return self._recorder.arithmetic(len, (ListOperand([*items], ref_to(value.index)),))

    def length(self, items: list[Any], length: int, frame: FrameType) -> int:
        """Return what C returns for the length of a list; the code receives a traced scalar.

        Args:
            items: the list.
            length: how many items it has.
            frame: the code that asks.
        """
        scalar = self.traced_length(items, length)
        if type(scalar) is TracedInt and not exchange(frame, scalar, self._end_exchange):
            self._guard(scalar, frame)
        return length

    def forget(self, items: list[Any]) -> None:
        """Know no op that gives the first items of a list.

        Args:
            items: the list.
        """
        for variable in [one for one, value in self._lists.items() if value.of is items]:
            del self._lists[variable]

    def _end_exchange(self, gave: bool) -> None:
        if not gave:
            self._writer.tape.block("code failed where it computed with a number that varies")

    def _value_made(self, items: list[Any]) -> ListValue | None:
        """Return the op that gives the first items of a list that an expression has made."""
        for variable, made in self._made.items():
            if made.items is items and variable in self._lists:
                value = self._lists[variable]
                return value if self._begins_with(items, value) else None
        return None

    def _give(
        self, items: list[Any], before: ListValue | None, new: list[Any], frame: FrameType | None
    ) -> ListValue:
        """Record the op that gives a list.

        Args:
            items: the list.
            before: the op that gives its first items.
            new: the other items, encoded.
            frame: the code that has the list.
        """
        ref = None if before is None else ref_to(before.index)
        op = self._emit(accumulate, (ref, new), frame)
        names = () if before is None else before.items
        names += tuple(map(self._name, new))
        given = self._writer.handed.get(op.index)
        if type(given) is list:  # of the call that the run goes on from
            for at, item in enumerate(given[: len(items)]):
                self._exchange(items, at, item, names[at])
        return ListValue(op.index, names, items)

    def _emit(self, target: Any, args: tuple[Any, ...], frame: FrameType | None) -> Op:
        op = self._writer.emit(OpKind.SCALAR, target, args, {}, frame)
        self._writer.tape.counters.add(op.index)
        self.has_begun = True
        return op

    def _exchange(self, items: list[Any], at: int, item: Any, index: Any) -> None:
        """Put a tensor or number in the place of what stands for it in a resumed run."""
        if type(item) in TRACED_AS:
            if type(index) is int:
                items[at] = self._values.scalar(TRACED_AS[type(item)], item, ref_to(index))
            return
        items[at] = item
        if type(item) is list:
            self._inner[id(item)] = item, index
            return
        tracked = self._writer.tracked.get(id(item))
        if tracked is None or tracked() is not item:
            tracked = self._writer.tracked[id(item)] = TrackedTensor(item)
            tracked.ref, tracked.version = ref_to(index), version_of(item)
            tracked.graphless = False

    def _recorded(self, item: Any) -> Any:
        if type(item) is list:
            return self._recorded_list(item)
        if type(item) in TRACED:
            return self._values.scalar_ref(item)
        return item if type(item) in TRACED_AS else self._values.ref(item)

    def _recorded_list(self, items: list[Any]) -> Ref:
        """Return the op that gives a list, which is an item of the list of a comprehension."""
        value = self._value_made(items)
        new = [*map(self._recorded, items[0 if value is None else value.length :])]
        if new or value is None:
            value = self._give(items, value, new, None)
        self._inner[id(items)] = items, value.index
        return ref_to(value.index)

    def _name(self, recorded: Any) -> Any:
        if type(recorded) is Ref:
            return self._writer.aliases.get(recorded.index, recorded.index)
        return type(recorded), repr(recorded)

    def _first_name(self, item: Any) -> Any:
        if _is_plain(item):
            return self._name(item)
        source: Any
        if type(item) is list:
            _, source = self._inner.get(id(item), (None, None))
        elif type(item) in TRACED:
            source = item._source.index if type(item._source) is Ref else None
        else:
            source = self._values.source_of(item) if isinstance(item, Tensor) else None
        return self._writer.aliases.get(source, source) if isinstance(source, int) else None

    def _may_be_list(self, item: Any) -> bool:
        return type(item) is list and all(map(self._may_be_item, item))

    def _may_be_item(self, item: Any) -> bool:
        """Return whether an item is a number, or a tensor of known origin without attributes."""
        if type(item) in TRACED:
            return item._origin is self._values.origin
        if type(item) in TRACED_AS:
            return True
        if type(item) not in (Tensor, nn.Parameter) or vars(item):
            return False
        known = self._values.source_of(item) is not None
        return known or self._values.environment.find(item) is not None


# The references to a list that a variable holds while it is followed: the variable, that of the
# tracer, and the argument of `sys.getrefcount`.
_HELD_ONCE = 3


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is LoopList


def _plain_items(items: list[Any]) -> list[Any]:
    return [_plain_items(item) if type(item) is list else plain(item) for item in items]


def _is_plain(item: Any) -> bool:
    return item is None or type(item) in TRACED_AS
