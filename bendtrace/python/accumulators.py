"""Local variables that hold a list which a loop appends to, and which only such code can see."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from bendtrace.python.bytecode import (
    LOOKS_AT_VARIABLES,
    loads_method,
    single_steps,
)
from bendtrace.python.row_loops import jump_targets, stack_uses


class Accumulator(NamedTuple):
    """A variable that holds a list which a loop appends to.

    Nothing else can refer to the list, and nothing but `consumers` reads it: the code stores only
    lists that it has just made in the variable, and loads it only for one of these uses:

    - `outputs.append(y)`, `outputs.extend(ys)`, `outputs.clear()`;
    - `outputs += [y]`, and `outputs = outputs + [y]`;
    - as the first argument of a function of torch: `torch.stack(outputs, dim=1)`.

    Attributes:
        name: the variable.
        consumers: the names under which the code finds these functions: ("torch", "stack").
    """

    name: str
    consumers: tuple[tuple[str, ...], ...]

    def is_private(self, frame: FrameType) -> bool:
        """Return whether the names are those of functions that make one new tensor of a list."""
        return all(_function_of(frame, names) in _CONSUMERS for names in self.consumers)


# They make a new tensor of a list, whose dtype and number of dimensions follow from those (or from
# the types of numbers) that occur among the items.
_CONSUMERS = frozenset(
    {
        torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack,
        torch.dstack, torch.row_stack, torch.column_stack, torch.tensor, torch.as_tensor,
    }
)  # fmt: skip
_GENERATORS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_METHODS = frozenset({"append", "extend", "clear"})
# By the identity of the code: the code, its loops, and the variables that are accumulators in any.
_known: dict[int, tuple[CodeType, list[tuple[int, int, list[Accumulator]]], frozenset[int]]] = {}


def accumulator_slots(code: CodeType) -> frozenset[int]:
    """Return the slots of the variables of code that are accumulators in one of its loops."""
    return _accumulators_of(code)[2]


def accumulators_at(code: CodeType, offset: int) -> Iterator[Accumulator]:
    """Yield the accumulators that loops around an instruction append to."""
    for begin, end, found in _accumulators_of(code)[1]:
        if begin <= offset <= end:
            yield from found


def _accumulators_of(
    code: CodeType,
) -> tuple[CodeType, list[tuple[int, int, list[Accumulator]]], frozenset[int]]:
    facts = _known.get(id(code))
    if facts is None:
        loops = _loops_of(code)
        names = {accumulator.name for _, _, found in loops for accumulator in found}
        slots = frozenset(map(code.co_varnames.index, names))
        facts = _known[id(code)] = code, loops, slots
    return facts


def _function_of(frame: FrameType, names: tuple[str, ...]) -> Any:
    found: Any = frame.f_globals.get(names[0], getattr(builtins, names[0], None))
    for name in names[1:]:
        found = vars(found).get(name) if isinstance(found, ModuleType) else None
    return found if callable(found) and not isinstance(found, type) else None


def _loops_of(code: CodeType) -> list[tuple[int, int, list[Accumulator]]]:
    """Return the loops of code, with their first and last instruction and their accumulators."""
    ends = [step for step in single_steps(code) if "JUMP_BACKWARD" in step.name]
    is_generator = code.co_flags & _GENERATORS
    if not ends or is_generator or not LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return []
    arguments = code.co_argcount + code.co_kwonlyargcount
    arguments += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    names = {*code.co_varnames[arguments:]} - {*code.co_cellvars}
    uses = [_VariableUses(code, name) for name in sorted(names)]
    loops = []
    for end in ends:
        found = [
            Accumulator(one.name, tuple(one.consumers))
            for one in uses
            if one.is_private and any(end.value <= at <= end.offset for at in one.growth)
        ]
        if found:
            loops.append((end.value, end.offset, found))
    return loops


class _VariableUses:
    """Looks at each use of a local variable.

    Attributes:
        name: the variable.
        is_private: whether nothing but `consumers` can see what it holds (see `Accumulator`).
        consumers: the functions that receive it.
        growth: the instructions that make its list longer.
    """

    def __init__(self, code: CodeType, name: str) -> None:
        self.name = name
        self._steps = single_steps(code)
        self._labels = jump_targets(code)
        self.consumers: list[tuple[str, ...]] = []
        self.growth: list[int] = []
        self._stores: set[int] = set()  # those of `outputs = outputs + [y]`
        uses = [
            (position, step)
            for position, step in enumerate(self._steps)
            if step.value == name and "FAST" in step.name
        ]
        loads = [position for position, step in uses if step.name == "LOAD_FAST"]
        self.is_private: bool = (
            bool(loads)
            and {step.name for _, step in uses} <= {"LOAD_FAST", "STORE_FAST", "DELETE_FAST"}
            and all(map(self._may_load, loads))
            and all(self._may_store(at) for at, step in uses if step.name == "STORE_FAST")
        )

    def _may_store(self, position: int) -> bool:
        """Return whether the variable is given a list that nothing else refers to."""
        if position in self._stores:
            return True
        stores = 0
        while self._is_before_no_label(position) and self._steps[position].name == "STORE_FAST":
            position, stores = position - 1, stores + 1
        if stores > 1 and self._steps[position].name == "SWAP":  # outputs, states = [], []
            position -= 1
        made = self._steps[max(position - stores + 1, 0) : position + 1]
        return (
            len(made) == stores > 0
            and all(step.name == "BUILD_LIST" for step in made)
            and (stores == 1 or not any(step.argument for step in made))
            and self._labels.isdisjoint(step.offset for step in made[1:])
        )

    def _is_before_no_label(self, position: int) -> bool:
        return position > 0 and self._steps[position].offset not in self._labels

    def _may_load(self, position: int) -> bool:
        """Follow the list from where it is loaded to the instruction that uses it."""
        following = self._steps[position + 1]
        if loads_method(following) and following.value in _METHODS:
            self.growth.append(following.offset)
            return True
        above, start = 0, self._steps[position].offset  # how much lies above it on the stack
        for at in range(position + 1, len(self._steps)):
            step = self._steps[at]
            taken, given = stack_uses(step)
            if taken is None or (step.offset in self._labels and step.offset != start):
                return False
            if taken <= above:
                above += given - taken
                continue
            if step.name == "BINARY_OP":
                return above == 1 and self._is_extended(at)
            is_first = step.argument == above + (step.name == "CALL")
            return step.name in ("CALL", "CALL_KW") and is_first and self._note_consumer(position)
        return False

    def _is_extended(self, at: int) -> bool:
        """Return whether an instruction adds a list to it, and the variable gets the result."""
        before, step, after = self._steps[at - 1 : at + 2]
        is_extended = (
            before.name == "BUILD_LIST"
            and step.shown in ("+", "+=")
            and (after.name, after.value) == ("STORE_FAST", self.name)
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
