"""Lists that a loop appends to, and that only such code can see."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from bendtrace.python.bytecode import (
    LOOKS_AT_VARIABLES,
    InstructionStep,
    cache_by_code,
    loads_method,
    single_steps,
)
from bendtrace.python.row_loops import (
    LIST_COMPREHENSION,
    comprehensions,
    jump_targets,
    stack_uses,
)
from bendtrace.python.stacks import stack_depths


class Accumulator(NamedTuple):
    """A variable that holds a list which a loop appends to.

    Nothing else can refer to the list, and nothing but `consumers` reads it: the code stores only
    lists that it has just made in the variable, and loads it only for one of these uses:

    - `outputs.append(y)`, `outputs.extend(ys)`, `outputs.clear()`;
    - `outputs += [y]`;
    - as the first argument of a function of torch: `torch.stack(outputs, dim=1)`;
    - for its length: `len(outputs)`, `if outputs`.

    The lists that comprehensions, `[y] * n` and `[y] * n + [z]` make may be given to such a
    function with no variable in between.

    Attributes:
        name: the variable; "" if there is none.
        consumers: the names under which the code finds these functions: ("torch", "stack").
        is_operand: whether the list is first added to another one.
        is_item: whether it becomes an item of the list of a comprehension.
        is_asked: whether code asks for its length, or clears it.
        is_computed: whether operators give the variable its value, which may also be another one.
    """

    name: str
    consumers: tuple[tuple[str, ...], ...]
    is_operand: bool = False
    is_item: bool = False
    is_asked: bool = False
    is_computed: bool = False

    def is_private(self, frame: FrameType) -> bool:
        """Return whether the names are those of functions that make one new tensor of a list."""
        return all(_function_of(frame, names) in _CONSUMERS for names in self.consumers)


# They make a new tensor of a list, whose dtype and number of dimensions follow from those (or from
# the types of numbers) that occur among the items. `len` asks the list itself.
_CONSUMERS = frozenset(
    {
        torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack,
        torch.dstack, torch.row_stack, torch.column_stack, torch.tensor, torch.as_tensor, len,
    }
)  # fmt: skip
_GENERATORS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_MOST_AT_ONCE = 3  # more values than that are assigned by way of a tuple
_METHODS = frozenset({"append", "extend", "clear"})
_TESTS = frozenset(
    {"UNARY_NOT", "TO_BOOL"}
    | {name for name in dis.opmap if name.startswith("POP_JUMP") and "NONE" not in name}
)


@dataclass(frozen=True, slots=True)
class _CodeLists:
    """The lists of some code that only such code can see."""

    loops: list[tuple[int, int, list[Accumulator]]]  # with their first and last instruction
    made: dict[int, Accumulator]  # what receives a list, by the instruction that makes it
    slots: frozenset[int]  # the variables


def accumulator_slots(code: CodeType) -> frozenset[int]:
    """Return the slots of the variables of code that are accumulators in one of its loops."""
    return _lists_of(code).slots


def accumulators_at(code: CodeType, offset: int) -> Iterator[Accumulator]:
    """Yield the accumulators that loops around an instruction append to."""
    for begin, end, found in _lists_of(code).loops:
        if begin <= offset <= end:
            yield from found


def receiver_of_list(code: CodeType, offset: int) -> Accumulator | None:
    """Return what receives the list that an instruction makes, if nothing else can see it.

    Args:
        code: the code.
        offset: the instruction: the call of a comprehension, `[y] * n`, or the `+` of such lists.
    """
    return _lists_of(code).made.get(offset)


def is_comprehension(code: CodeType) -> bool:
    """Return whether code is a list comprehension, and nothing within it sees its list."""
    return code.co_name == LIST_COMPREHENSION and _is_readable(code)


@cache_by_code
def appends_lists(code: CodeType) -> bool:
    """Return whether each item of a comprehension's list is a list that nothing else sees."""
    steps, labels = single_steps(code), jump_targets(code)
    ends = [at for at, step in enumerate(steps) if step.name == "LIST_APPEND"]
    makers = {**comprehensions(code), **_computed_lists(code)}
    return all(
        steps[at].offset not in labels
        and (steps[at - 1].name == "BUILD_LIST" or steps[at - 1].offset in makers)
        for at in ends
    )


def _function_of(frame: FrameType, names: tuple[str, ...]) -> Any:
    found: Any = frame.f_globals.get(names[0], getattr(builtins, names[0], None))
    for name in names[1:]:
        found = vars(found).get(name) if isinstance(found, ModuleType) else None
    return found if callable(found) and not isinstance(found, type) else None


def _is_readable(code: CodeType) -> bool:
    return not code.co_flags & _GENERATORS and LOOKS_AT_VARIABLES.isdisjoint(code.co_names)


@cache_by_code
def _lists_of(code: CodeType) -> _CodeLists:
    ends = [step for step in single_steps(code) if "JUMP_BACKWARD" in step.name]
    makers = {**comprehensions(code), **_computed_lists(code)}
    if not (ends or makers) or not _is_readable(code):
        return _CodeLists([], {}, frozenset())
    arguments = code.co_argcount + code.co_kwonlyargcount
    arguments += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    names = {*code.co_varnames[arguments:]} - {*code.co_cellvars}
    private = {}
    for name in sorted(names):
        uses = _ListUses(code, makers)
        if uses.is_private(name):
            private[name] = uses.accumulator(name), uses.growth
    loops = []
    for end in ends:
        growing = [
            accumulator
            for accumulator, growth in private.values()
            if any(end.value <= at <= end.offset for at in growth)
        ]
        if growing:
            loops.append((end.value, end.offset, growing))
    made = {}
    for offset in makers:
        receiver = _ListUses(code, makers).receiver(offset)
        if receiver is not None and receiver.name:
            known, _ = private.get(receiver.name, (None, ()))
            receiver = known and known._replace(is_operand=receiver.is_operand)
        if receiver is not None:
            made[offset] = receiver
    held = {one.name for _, _, found in loops for one in found}
    held.update(one.name for one in made.values() if one.name)
    return _CodeLists(loops, made, frozenset(map(code.co_varnames.index, held)))


@cache_by_code
def _computed_lists(code: CodeType) -> dict[int, int]:
    """Return each `[y] * n` and each `+` with such a list, with where the expression begins."""
    depths: dict[int, int] | None = None
    found: dict[int, int] = {}
    steps = single_steps(code)
    for position, step in enumerate(steps):
        if step.name != "BINARY_OP" or step.shown not in ("*", "+"):
            continue
        depths = stack_depths(code) if depths is None else depths
        right = _beginning(steps, depths, position, 1)
        left = _beginning(steps, depths, position, 2)
        ends = steps[right - 1], steps[position - 1]
        if step.shown == "*":
            is_list = any(end.name == "BUILD_LIST" for end in ends)
        else:
            is_list = any(end.offset in found for end in ends)
        if is_list:
            found[step.offset] = steps[left].offset
    return found


def _beginning(
    steps: Sequence[InstructionStep], depths: dict[int, int], position: int, operands: int
) -> int:
    """Return where the expression of the last operands of an instruction begins."""
    base = depths.get(steps[position].offset, 0) - operands
    while position and depths.get(steps[position].offset, base + 1) > base:
        position -= 1
    return position


class _ListUses:
    """Looks at each use of a list.

    Attributes:
        consumers: the functions that receive it.
        growth: the instructions that make it longer.
    """

    def __init__(self, code: CodeType, makers: dict[int, int]) -> None:
        self._makers, self._is_comprehension = makers, is_comprehension(code)
        self._comprehensions = comprehensions(code)
        self._depths = stack_depths(code)
        self._is_computed = self._is_tested = False
        self._steps = single_steps(code)
        self._positions = {step.offset: number for number, step in enumerate(self._steps)}
        self._labels = jump_targets(code)
        self._name = ""
        self.consumers: list[tuple[str, ...]] = []
        self.growth: list[int] = []
        self._stores: set[int] = set()  # those of `outputs += [y]`

    def is_private(self, name: str) -> bool:
        """Return whether nothing but `consumers` can see what a variable holds."""
        self._name = name
        uses = [
            (position, step)
            for position, step in enumerate(self._steps)
            if step.value == name and "FAST" in step.name
        ]
        loads = [position for position, step in uses if step.name == "LOAD_FAST"]
        return (
            bool(loads)
            and {step.name for _, step in uses} <= {"LOAD_FAST", "STORE_FAST", "DELETE_FAST"}
            and all(map(self._may_load, loads))
            and all(self._may_store(at) for at, step in uses if step.name == "STORE_FAST")
        )

    def accumulator(self, name: str) -> Accumulator:
        """Return a variable whose uses have been looked at, or the receiver of an expression."""
        return Accumulator(
            name,
            tuple(self.consumers),
            is_asked=self._is_tested or ("len",) in self.consumers,
            is_computed=self._is_computed,
        )

    def receiver(self, offset: int) -> Accumulator | None:
        """Return what receives the list that an instruction makes.

        The uses of a variable are not looked at.
        """
        position = self._positions[offset]
        after = self._steps[position + 1]
        if after.offset in self._labels:
            return None
        if after.name == "STORE_FAST":
            return Accumulator(after.value, ())
        if after.name == "LIST_APPEND" and self._is_comprehension:
            return Accumulator("", (), is_item=True)
        taker, above = self._taker(position)
        if taker is None:
            return None
        if taker.offset in self._makers and offset not in self._comprehensions:
            found = self.receiver(taker.offset) if taker.shown == "+" else None
            return None if found is None else found._replace(is_operand=True)
        if not self._is_passed(taker, above, self._positions[self._makers[offset]]):
            return None
        return self.accumulator("")

    def _may_store(self, position: int) -> bool:
        """Return whether the variable is given a list that nothing else refers to."""
        if position in self._stores:
            return True
        # `states, outputs = f(x), []`: the values are there before the first of them is stored.
        first = position
        while self._is_before_no_label(first) and self._steps[first - 1].name == "STORE_FAST":
            first -= 1
        above, before = position - first, self._steps[first - 1]
        if before.name == "SWAP" and self._is_before_no_label(first):
            first, above = first - 1, (before.argument or 0) - 1 - above
        if not 0 <= above <= _MOST_AT_ONCE:
            return False
        begin = _beginning(self._steps, self._depths, first, above) if above else first
        end = self._steps[begin - 1]
        if not self._is_before_no_label(begin) or self._steps[begin].name == "COPY":
            return False  # `others = outputs = []`
        if end.offset in self._makers:
            self._is_computed |= end.offset not in self._comprehensions
            return True
        return end.name == "BUILD_LIST"

    def _is_before_no_label(self, position: int) -> bool:
        return position > 0 and self._steps[position].offset not in self._labels

    def _may_load(self, position: int) -> bool:
        """Follow the list from where it is loaded to the instruction that uses it."""
        following = self._steps[position + 1]
        if loads_method(following) and following.value in _METHODS:
            self.growth.append(following.offset)
            self._is_tested |= following.value == "clear"
            return True
        if following.name in _TESTS and following.offset not in self._labels:
            self._is_tested = True
            return True
        taker, above = self._taker(position)
        if taker is None:
            return False
        if taker.name == "BINARY_OP":
            return above == 1 and self._is_extended(self._positions[taker.offset])
        return self._is_passed(taker, above, position)

    def _taker(self, position: int) -> tuple[InstructionStep | None, int]:
        """Follow the list from the end of the expression that gives it to what takes it.

        Returns:
            The instruction, and how much lies above the list on the stack.
        """
        above, start = 0, self._steps[position].offset
        for step in self._steps[position + 1 :]:
            taken, given = stack_uses(step)
            if taken is None or (step.offset in self._labels and step.offset != start):
                break
            if taken > above:
                return step, above
            above += given - taken
        return None, 0

    def _is_passed(self, taker: InstructionStep, above: int, first: int) -> bool:
        """Return whether one of `consumers` receives the list as its first argument.

        Args:
            taker: the instruction that takes it.
            above: how much lies above it on the stack.
            first: where the expression that gives it begins.
        """
        is_first = taker.argument == above + (taker.name == "CALL")
        return taker.name in ("CALL", "CALL_KW") and is_first and self._note_consumer(first)

    def _is_extended(self, at: int) -> bool:
        """Return whether an instruction adds a list to it, and the variable gets the result."""
        before, step, after = self._steps[at - 1 : at + 2]
        is_extended = (
            before.name == "BUILD_LIST"
            and step.shown == "+="
            and (after.name, after.value) == ("STORE_FAST", self._name)
            and after.offset not in self._labels
        )
        if is_extended:
            self._stores.add(at + 1)
            self.growth.append(step.offset)
        return is_extended

    def _note_consumer(self, position: int) -> bool:
        """Note the function that is loaded right before the list."""
        names: list[str] = []
        while self._is_before_no_label(position):
            position -= 1
            step = self._steps[position]
            if step.name == "LOAD_GLOBAL":
                self.consumers.append((step.value, *reversed(names)))
                return True
            if step.name in ("LOAD_ATTR", "LOAD_METHOD"):
                names.append(step.value)
            elif step.name != "PUSH_NULL":
                return False
        return False
