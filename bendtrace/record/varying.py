"""Numbers that differ between calls at one place stay traced where Python makes others of them.

`int(n)`, `math.sqrt(n)`, `rates[n]`, `range(n)`: C code asks a traced scalar for its number, so
that the number is guarded, and each number has its own path. `max(m, n)` and `sorted(numbers)`
ask which of two numbers is greater, so that each order is a path. After a few numbers at one place
(`TraceTree`), the frame receives a traced scalar in place of the plain result, and a loop over
`range(n)` asks in each round whether there is another one (`Rounds`). So the replay computes the
number.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections import Counter as Votes
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from types import BuiltinFunctionType, CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bendtrace.python import stacks
from bendtrace.python.bytecode import (
    LOOKS_AT_VARIABLES,
    assign,
    cache_by_code,
    code_compares_identity,
    constant_of,
    local_in,
    only_tests,
    single_steps,
)
from bendtrace.python.computations import (
    COMPUTING,
    GIVING_LISTS,
    contains_not,
    in_order,
    is_computation,
    item_among,
    item_of,
    items_at,
    list_of,
    set_item,
    with_changes,
    with_item,
    without_item,
)
from bendtrace.python.lazy import LazyModule
from bendtrace.python.results import call_after, can_exchange, exchange, is_awaited
from bendtrace.python.row_loops import row_loop_at
from bendtrace.python.sites import PACKAGE, TORCH, TRACER, instruction_at
from bendtrace.record.encoding import ListOperand, plain_copy, without_traced
from bendtrace.record.values import LARGEST_FLOAT, TRACED_AS, RunValues
from bendtrace.tape.captured import identical
from bendtrace.tape.guards import (
    ASKING,
    COMPARING,
    VARYING_USES,
    Place,
    TruthGuard,
    ValueGuard,
    number_place,
)
from bendtrace.tape.plain_numbers import MAKES_ARRAYS, needs_plain_numbers
from bendtrace.tape.scalars import TRACED, TracedInt, TracedScalar, plain, plain_for_numpy
from bendtrace.tape.tape import FunctionUse, Guard, Op, OpKind, Ref, Tape, Use
from bendtrace.watch.functions import works_on_containers
from bendtrace.watch.provenance import is_finished_function

if TYPE_CHECKING:
    from bendtrace.python import key_functions
    from bendtrace.record import accumulation, rows
    from bendtrace.record.numbers import NumberRecorder
    from bendtrace.record.rows import LoopRows, RowLoops
else:
    key_functions = LazyModule("bendtrace.python.key_functions")
    accumulation = LazyModule("bendtrace.record.accumulation")
    rows = LazyModule("bendtrace.record.rows")

_OF_TENSORS = frozenset({bool, int, float, len, operator.index})


class Varying:
    """Keeps the numbers of one run traced that differ between runs.

    Args:
        places: where they do.
        values: makes traced scalars.
        numbers: records what is computed with traced scalars.
        inserter: puts its own ops into the run, if something does.

    Attributes:
        places: as given.
        exchanges: whether code can receive other results than those of C.
        searches: whether the call whose result is awaited fails if no comparison is true.
        keyed: the labels of lists and dicts in the state whose items are assigned by such numbers.
    """

    def __init__(
        self,
        places: frozenset[Place],
        values: RunValues,
        numbers: NumberRecorder,
        inserter: Any,
    ) -> None:
        self.places: frozenset[Place] = places
        self.searches: bool = False
        self.keyed: set[str] = set()
        # By identity, because hashing a code object is slow; the places keep it alive.
        self._places = {(id(code), offset): (code, offset) for code, offset in places}
        self._writer, self._values = values.writer, values
        self._arithmetic, self._list_op = numbers.arithmetic, numbers.list_op
        self._recorder: Any = values.origin
        self.exchanges: bool = can_exchange()
        self._is_busy = not self.exchanges
        self._rounds: list[tuple[Place, list[int]]] = []  # the questions of each loop
        self._cached: list[tuple[Any, Any, list[int], Any]] = []
        self._results: list[tuple[Place, int, int]] = []  # the ops that give each
        self._of_numpy: set[Place] = set()  # where numpy computes a number
        self._stored = 0  # how many items of lists were made traced scalars
        self._key_code: CodeType | None = None  # of the key function of the call that is awaited
        self._row_loops: RowLoops | None = None
        if any(row_loop_at(*place) for place in places):
            self._row_loops = rows.RowLoops(self._places, values, self._lift, _call_of, inserter)

    def number_for_c(self, use: Use | FunctionUse, scalar: TracedScalar) -> Any:
        """Return the number that C receives for a result which is exchanged.

        While a run follows a script, a number need not be among those that it is found in.
        """
        return True if self.searches or _exceeds_floats(scalar, use) else scalar._value

    def answers(self, use: Use | FunctionUse, scalar: TracedScalar) -> bool:
        """Return whether the number of a traced scalar is asked for something that stays traced.

        Args:
            use: how it is asked.
            scalar: the traced scalar.
        """
        frame, callee = _asking_frames()
        if self.is_answered(frame):
            return True  # the same call asks for another number, or again
        place = self._place(frame, use)
        if place is None and (use is not Use.NUMPY or self._is_busy):
            return False
        called = _call_of(frame, callee)
        if called is None:
            return False
        function, given, named = called
        first = len(self._writer.tape.ops)
        self._is_busy = True
        try:
            if place is None:
                return _makes_array(function) and self._make_array(function, given, named, frame)
            is_order = use is not Use.NUMPY and _puts_in_order(function)
            if named and use is not Use.NUMPY and not is_order:
                return False
            if place not in self.places and type(function) is not functools._lru_cache_wrapper:
                return False
            result: Any
            change = next((made for one, made in _CHANGES if one is function), None)
            if change is not None:
                with self._recorder.unwatched():
                    result = self._change(change, given, frame)
            elif function is range:
                result = self._loop(given, frame, place)
            elif function is operator.mul:
                lists = self._values.accumulation
                result = None if lists is None else lists.repeat(given, frame)
            elif type(function) is functools._lru_cache_wrapper:
                result = self._compute_uncached(function, given)
            elif is_order:
                with self._recorder.unwatched():
                    result = self._in_order(function, given, named)
            elif use is Use.BOOL:
                with self._recorder.unwatched():
                    result = self._of_list(function, given)
            elif use is Use.NUMPY:
                result = self._by_numpy(function, given, named, frame, place)
                if result is None:
                    return False
            elif function is len and type(scalar) is TracedInt:
                result = scalar  # that of a container of the state
            elif function is item_of and _has_item(*given):
                with self._recorder.unwatched():
                    result = self._item(*given)
            elif function in COMPUTING and all(type(one) in _NUMBERS for one in given):
                result = self._arithmetic(function, given)
            else:
                return False
        finally:
            self._is_busy = False
        self._results.append((place, first, len(self._writer.tape.ops)))
        self.searches = any(function is one for one in _SEARCHING)
        if change is not None:
            return bool(result)
        return result is not None and exchange(frame, result, self._end_exchange)

    def has_logarithm(self, scalar: TracedScalar, use: Use | FunctionUse) -> bool:
        """Return whether C asks for a number that no float is as large as to take its logarithm.

        It takes a whole number as it is. The code receives its logarithm.

        Args:
            scalar: the number, which is guarded.
            use: how it is asked.
        """
        called = _call_of(*_asking_frames()) if _exceeds_floats(scalar, use) else None
        if called is None or not any(called[0] is one for one in _LOGARITHMS):
            return False
        return exchange(_asking_frames()[0], called[0](*map(plain, called[1])), self._end_exchange)

    def is_answered(self, frame: FrameType) -> bool:
        """Return whether what code asks is for a result that is traced already."""
        if is_awaited(frame):
            return True
        is_key = self._key_code is not None and frame.f_code is self._key_code
        return is_key and frame.f_back is not None and is_awaited(frame.f_back)

    def answers_of(self, op: Op, value: Any, use: Use | FunctionUse, frame: FrameType) -> bool:
        """Return whether the number of a tensor is asked for something that stays traced.

        Args:
            op: the op that gives the number.
            value: the number, or the truth.
            use: how it is asked.
            frame: the code that asks.
        """
        while frame.f_code.co_filename.startswith(TORCH) and frame.f_back is not None:
            frame = frame.f_back  # `len` calls a method that is written in Python
        place = self._place(frame, use)
        if type(value) not in (int, float, bool) or place is None:
            return False
        if type(value) is bool and not only_tests(frame):
            return False
        callee = sys._getframe(1)
        while callee.f_back is not None and callee.f_back is not frame:
            callee = callee.f_back
        called = _call_of(frame, callee)
        if (
            called is None
            or called[2]
            or len(called[1]) != 1
            or not isinstance(called[1][0], Tensor)
        ):
            return False
        try:
            if called[0] not in _OF_TENSORS:
                return False
        except TypeError:
            return False
        scalar = self._values.scalar(TRACED_AS[type(value)], value, Ref(op.index))
        self._results.append((place, op.index, op.index + 1))
        return exchange(frame, scalar, self._end_exchange)

    def _by_numpy(
        self, function: Any, given: tuple[Any, ...], named: dict[str, Any], frame: FrameType,
        place: Place,
    ) -> Any:  # fmt: skip
        """Return what a function of numpy makes of numbers; None if that cannot be followed."""
        arrays: Any = self._recorder.contents
        if not arrays.takes(function, given, named, frame):
            return None
        self._of_numpy.add(place)
        return arrays.call(function, given, named, frame)

    def _make_array(
        self, function: Any, given: tuple[Any, ...], named: dict[str, Any], frame: FrameType
    ) -> bool:
        """Have a function of numpy make its array of plain numbers."""
        args, kwargs = plain_for_numpy((given, named))
        return exchange(frame, function(*args, **kwargs), self._end_exchange)

    def computes(self, frame: FrameType, function: Callable[[], Any]) -> tuple[Any] | None:
        """Compute a number of numpy's where numbers differ between runs.

        Args:
            frame: the code that asks numpy for it.
            function: records the call of numpy's function.

        Returns:
            A tuple with the result; None where numbers do not differ.
        """
        place = self._place(frame, Use.NUMPY)
        if place is None:
            return None
        self._of_numpy.add(place)
        first = len(self._writer.tape.ops)
        result = function()
        self._results.append((place, first, len(self._writer.tape.ops)))
        return (result,)

    def _place(self, frame: FrameType, use: Use | FunctionUse) -> Place | None:
        """Return where a number is asked for, if numbers differ there."""
        if self._is_busy or not (use in VARYING_USES or (use is Use.BOOL and self._places)):
            return None
        code = frame.f_code
        offset = instruction_at(code, frame.f_lasti)
        place = self._places.get((id(code), offset))
        if use is Use.HASH and place is None:
            place = code, offset  # a cache is best left aside from the first number on
        if place is None or self._values.environment.tells_numbers:
            return None
        tells = needs_plain_numbers(code, frame.f_globals) or code_compares_identity(code)
        return None if tells else place

    def _in_order(self, function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the greatest or least of some items, or all of them in order."""
        if not _puts_in_order(function) or not named.keys() <= {"key", "reverse", "default"}:
            return None
        reverse, key, are_pairs = named.get("reverse", False), named.get("key"), False
        if type(reverse) is not bool:
            return None
        if function is sorted or len(given) == 1:
            if len(given) != 1 or type(given[0]) not in _REPEATABLE:
                return None
            are_pairs = type(given[0]) is type({}.items())  # which it makes as they are asked for
            given = tuple(given[0])
        if not 0 < len(given) <= _MOST_ITEMS:
            return None
        if key is None and _is_of_one_kind(given):
            items = self._list([*given])
            if function is sorted:
                return self._scalars(self._list_op(in_order, (items, reverse)))
            return self._arithmetic(function, (items,))
        columns = [*zip(*given, strict=True)] if are_pairs else [given]
        parts = key_functions.parts_of_key(key) if all(map(_is_of_one_kind, columns)) else None
        if parts is None or not all(map(self._can_be_read, parts.operands)):
            return None
        order = key_functions.KeyOrder(function, parts.key, reverse)
        operands = (self._operand([*given]), *map(self._operand, parts.operands))
        self._key_code = parts.code
        if function is sorted:
            positions = self._list_op(order, operands)
            found = [
                self._scalars(self._list_op(items_at, (self._list([*column]), positions)))
                for column in columns
            ]
            return [*zip(*found, strict=True)] if are_pairs else found[0]
        position = self._arithmetic(order, operands)
        picked = [self._arithmetic(item_of, (self._list([*one]), position)) for one in columns]
        return tuple(picked) if are_pairs else picked[0]

    def _of_list(self, function: Any, given: tuple[Any, ...]) -> Any:
        """Return what a function that compares, or tests, the items of a list makes of it."""
        count = next((count for one, count in _ASKING_ITEMS if one is function), 0)
        if len(given) != count or type(given[0]) not in (list, tuple):
            return None
        items, *others = given
        if not 0 < len(items) <= _MOST_ITEMS:
            return None
        # NaN is found in a list by its identity.
        kinds = _COMPARED if others else _PLAIN_NUMBERS
        if not kinds.issuperset(map(type, map(plain, (*items, *others)))):
            return None
        result = self._arithmetic(function, (self._list([*items]), *others))
        # After `in`, some Pythons take what is no exact bool for true.
        return bool(result) if function in (operator.contains, contains_not) else result

    def _can_be_read(self, value: Any, depth: int = 4) -> bool:
        """Return whether a value holds numbers, and nothing that is not known as it is."""
        kind = type(value)
        if kind in TRACED:
            return value._origin is self._recorder
        if kind is list or kind is tuple:
            inside = value
        elif kind is dict and self._values.environment.find(value) is None:
            inside = value.values()
            if not all(type(key) in _PLAIN for key in value):
                return False
        else:
            return kind in _PLAIN
        is_short = depth > 0 and len(inside) <= _MOST_ITEMS
        return is_short and all(self._can_be_read(item, depth - 1) for item in inside)

    def _operand(self, value: Any) -> Any:
        """Return a value as an operand, with what ops give in place of lists."""
        kind = type(value)
        if kind is list and _is_of_one_kind(value):
            return self._list(value)
        if kind is list or kind is tuple:
            return kind(map(self._operand, value))
        return {k: self._operand(v) for k, v in value.items()} if kind is dict else value

    def _change(self, function: Any, given: tuple[Any, ...], frame: FrameType) -> bool:
        """Let each item of a list of numbers depend on the number by which the list is changed.

        Args:
            function: returns the list behind the change.
            given: the list, a key or an item, and what is assigned.
            frame: the code that changes it.
        """
        container, key, *value = given
        is_number = type(key) is TracedInt or (type(key) is int and function is without_item)
        part = self._values.environment.find(container)
        if part is not None and not part.is_argument and function is with_item:
            self.keyed.add(part.label)
        if type(container) is not list or not is_number:
            return False
        most = _MOST_ITEMS if part is None else _MOST_OF_STATE
        if len(container) > most or not (part is None or part.label in self.keyed):
            return False
        self._stored += len(container)
        if self._stored > _MOST_STORED or not _is_of_one_kind((*value, *container)):
            return False
        found = self._list_op(function, (self._list(container), key, *value))

        def ended(gave: bool) -> None:
            if gave:
                container[:] = self._scalars(found)
            self._end_exchange(gave)

        return call_after(frame, ended)

    def _item(self, container: Any, key: Any) -> Any:
        """Return an item of a container of numbers, by a number that varies."""
        if type(container) is list:
            return self._arithmetic(item_of, (self._list(container), key))
        if type(container) is dict or TRACED.isdisjoint(map(type, container)):
            return self._arithmetic(item_of, (container, key))
        return self._arithmetic(item_among, (key, *container))

    def _list(self, items: list[Any]) -> list[Any] | ListOperand:
        """Return a list of numbers as an operand: what an op gives, unless all are plain.

        Of a list that an op gave, few items may have changed since.
        """
        if TRACED.isdisjoint(map(type, items)):
            return items
        sources = [*map(self._element_of, items)]
        votes = Votes(
            index for at, (index, key) in enumerate(sources) if index is not None and key == at
        )
        base, count = max(votes.items(), key=lambda pair: pair[1], default=(None, 0))
        if base is None or 2 * count < len(items):
            return self._list_op(list_of, tuple(items))
        numbers = [*self._writer.tape.outlines[base]]
        changed = [at for at, source in enumerate(sources) if source != (base, at)]
        whole = ListOperand(numbers, Ref(base))
        if not changed and len(numbers) == len(items):
            return whole
        others = [items[at] for at in changed]
        return self._list_op(with_changes, (whole, len(items), (*changed,), others))

    def _element_of(self, number: Any) -> tuple[int | None, Any]:
        """Return the op that gives a list with a number in it, and its position there."""
        if type(number) not in TRACED or number._origin is not self._recorder:
            return None, None
        source, tape = number._source, self._writer.tape
        if type(source) is Ref:
            op = tape.ops[source.index]
            if op.target is not operator.getitem or type(op.args[0]) is not Ref:
                return None, None
            source = op.args[0], (op.args[1],)
        ref, path = source
        is_list = len(path) == 1 and tape.ops[ref.index].target in GIVING_LISTS
        return (ref.index, path[0]) if is_list else (None, None)

    def _scalars(self, found: ListOperand) -> list[Any]:
        """Return the numbers of a list that an op gives, traced."""
        kind = TRACED_AS[type(found.numbers[0])] if found.numbers else None
        return [
            self._values.scalar(kind, number, (found.ref, (at,)))
            for at, number in enumerate(found.numbers)
        ]

    def _end_exchange(self, gave: bool) -> None:
        if not gave:
            self._writer.tape.block("code failed where it computed with a number that varies")

    # Loops

    def rows(self, op: Op, parts: Any, frame: FrameType) -> LoopRows | None:
        """Return what a loop goes through in place of rows (see `RowLoops.follow`)."""
        return None if self._row_loops is None else self._row_loops.follow(op, parts, frame)

    def _loop(self, given: tuple[Any, ...], frame: FrameType, place: Place) -> Rounds | None:
        """Return the rounds of a loop over a `range`, if the current call is for one."""
        loop = row_loop_at(*place)
        if loop is None or loop.way not in ((), ("reversed",)) or not loop.is_known(frame):
            return None
        if not all(type(one) is int or type(one) is TracedInt for one in given):
            return None
        begin, end, step = {1: (0, *given, 1), 2: (*given, 1)}.get(len(given), given)
        if type(step) is not int or step == 0 or (loop.way and abs(step) != 1):
            return None
        if loop.way:
            begin, end, step = end - step, begin - step, -step
        rounds = Rounds(self._lift(begin, frame), end, step, self._writer.tape.guards)
        self._rounds.append((place, rounds.asked))
        return rounds

    def _lift(self, number: Any, frame: FrameType) -> Any:
        """Return a number from which a loop counts on, so that each round asks for what it makes.

        Args:
            number: the number.
            frame: the code that has the loop.
        """
        tape, script, value = self._writer.tape, self._writer.script, plain(number)
        given = number
        if type(number) is TracedInt:
            given = self._values.scalar_ref(number)
            if given.index in tape.counters:
                return number
            if script is not None and script.is_active:
                known = script.result_of(operator.pos, [given.index])
                value = value if known is None else known[0]
        op = self._writer.emit(OpKind.SCALAR, operator.pos, (given,), {}, frame)
        op.meta = value
        tape.counters.add(op.index)
        if type(number) is TracedInt:
            tape.rounds.add(op.index)
        return self._values.scalar(TracedInt, value, Ref(op.index))

    def useless(self, lifting: Lifting | None) -> Iterator[Place]:
        """Yield the places of loops that do not close, and of numbers that are guarded later.

        Also those whose numbers come to code that cannot be followed.

        Args:
            lifting: lifts the counters of loops, if something does.
        """
        tape = self._writer.tape
        if lifting is not None:
            yield from lifting.open_loops(tape)
        if self._recorder.has_lost_arrays:
            yield from self._of_numpy
        walked = [] if self._row_loops is None else self._row_loops.asked
        for place, asked in (*self._rounds, *walked):
            states = [tape.states[number].key for number in asked if number in tape.states]
            if len(states) > _FEW_ROUNDS and len({*states}) == len(states):
                yield place
        origins: dict[int, set[Place]] = {}
        numbers = [] if self._row_loops is None else self._row_loops.numbers
        for place, first, end in (*self._results, *((one, at, at + 1) for one, at in numbers)):
            if place not in self.places:
                continue
            for index in range(first, end):
                # Floats rarely come twice, and the whole numbers that they are rounded to do.
                if not _rounds(tape, index):
                    origins.setdefault(index, set()).add(place)
        for op in tape.ops if origins else ():
            if op.kind is OpKind.SCALAR:
                for operand in op.operands:
                    if operand in origins:
                        origins.setdefault(op.index, set()).update(origins[operand])
        for guard in tape.guards:
            if (
                isinstance(guard, ValueGuard)
                and guard.use is not Use.RESULT
                and guard.index in origins
            ):
                guard_place = number_place(guard)
                if guard_place is None or guard_place in self.places:
                    yield from origins[guard.index]

    def guarded_places(self) -> Iterator[Place]:
        """Yield the places where numbers are guarded nevertheless."""
        made = {(place, index) for place, *ends in self._results for index in range(*ends)}
        for guard in self._writer.tape.guards:
            place = number_place(guard)
            if place is not None and place in self.places and (place, guard.index) not in made:
                yield place

    # Caches

    def _compute_uncached(self, function: Any, given: tuple[Any, ...]) -> Any:
        """Compute what a cache would return, with traced scalars.

        The cache receives what it receives in eager. What it returns is only compared, now and at
        the end of the run: code may change it.
        """
        inner = function.__wrapped__
        if not is_computation(inner) or not all(map(_is_plain_cache_argument, given)):
            return None
        environment, misses = self._values.environment, function.cache_info().misses
        original = function(*without_traced(given))
        misses = function.cache_info().misses - misses
        if _reference_counts(original) and not is_finished_function(inner):
            return None  # the model may change what is kept for its next call
        environment.note_computed(function, misses)
        before = _copy_of_arguments(given)
        result = inner(*given)
        copied = plain_copy(result)
        if not identical(copied, original) or not identical(_copy_of_arguments(given), before):
            return None
        self._cached.append((result, copied, _reference_counts(result), original))
        return result

    def finish(self) -> None:
        """Look whether code has changed, or keeps, what a cache holds for later calls."""
        for result, copied, holders, original in self._cached:
            _change_alike(original, result)
            if not identical(plain_copy(result), copied) or _reference_counts(result) != holders:
                self._writer.tape.block("code changes, or keeps, what a cache has returned")


class Rounds:
    """The rounds of a loop over `range(begin, end, step)`, of which some number is traced.

    Attributes:
        at: the next number.
        end: the end of the range.
        step: the step of the range.
        asked: the guards that tested whether there is another round.
    """

    def __init__(self, begin: Any, end: Any, step: int, guards: list[Guard]) -> None:
        self.at: Any = begin
        self.end: Any = end
        self.step: int = step
        self._guards = guards
        self.asked: list[int] = []

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which these are."""
        return self.at, self.end, self.step

    def __iter__(self) -> Rounds:
        return self

    def __reversed__(self) -> Rounds:
        return self  # it was made so

    def __next__(self) -> Any:
        self.asked.append(len(self._guards))
        if self.at < self.end if self.step > 0 else self.at > self.end:
            at = self.at
            self.at = at + self.step
            return at
        raise StopIteration


def _exceeds_floats(scalar: TracedScalar, use: Use | FunctionUse) -> bool:
    return use is Use.FLOAT and abs(scalar._value) >= LARGEST_FLOAT


def _rounds(tape: Tape, index: int) -> bool:
    """Return whether an op makes whole numbers of floats."""
    op = tape.ops[index]
    return op.target in _ROUNDING and type(tape.ops[op.operands[0]].meta) is float


_ROUNDING = frozenset({int, round, math.floor, math.ceil, math.trunc})
_NUMBERS = TRACED | {int, float}
_FEW_ROUNDS = 4
_LOGARITHMS = (math.log, math.log2, math.log10)
_PLAIN_NUMBERS = frozenset({bool, int, float})
_COMPARED = frozenset({bool, int})
_CHANGES: tuple[tuple[Any, Any], ...] = ((set_item, with_item), (list.remove, without_item))
_SEARCHING: tuple[Any, ...] = (list.index, list.remove)
# Functions that ask items of a list for their truth, or for that of a comparison with another
# number, and how much they receive.
_ASKING_ITEMS: tuple[tuple[Any, int], ...] = (
    (any, 1), (all, 1), (operator.contains, 2), (contains_not, 2), (list.count, 2), (list.index, 2),
)  # fmt: skip
_OF_NUMBERS = {int}, {float}
_MOST_ITEMS = 4096  # which code lists again
_MOST_OF_STATE = 256  # which each replay reads, and writes again
_MOST_STORED = 1 << 17  # a recording takes some 30 us for each
_LARGEST = 1 << 63  # from where on torch has no such whole numbers
_PLAIN = frozenset({bool, int, float, str, type(None)})
# What gives the same items however often it is gone through.
_REPEATABLE = frozenset(
    {list, tuple, range, dict, *(type(getattr({}, name)()) for name in ("keys", "values", "items"))}
)


def _asking_frames() -> tuple[FrameType, FrameType]:
    """Return the frame in which a traced scalar is asked, and the tracer's frame that it called."""
    # The frames of the tracer lie between: 0 is this one, 1 the method that called it, and 2 the
    # first that Python, or another part of the tracer, may have called.
    callee = sys._getframe(2)
    while callee.f_back is not None and callee.f_back.f_code.co_filename.startswith(TRACER):
        callee = callee.f_back
    return callee.f_back or callee, callee


def _call_of(
    frame: FrameType, callee: FrameType
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the function that a frame is calling, and its arguments; None if that is unknown."""
    places = stacks.frame_layout()
    stack = None if places is None else stacks.read_frame(frame, callee, places)
    if stack is None or stack.operands is None:
        return None
    if stack.name == "BINARY_OP":
        return operator.mul, tuple(stack.operands), {}  # of a list: see `number_place`
    if stack.name not in ASKING | COMPARING:
        return None
    if stack.name == "BINARY_SUBSCR":
        return item_of, tuple(stack.operands), {}
    if stack.name == "STORE_SUBSCR":
        value, container, key = stack.operands
        return set_item, (container, key, value), {}
    if stack.name == "CONTAINS_OP":
        item, container = stack.operands
        is_negated = frame.f_code.co_code[frame.f_lasti + 1]
        return contains_not if is_negated else operator.contains, (container, item), {}
    function, *given = (one for one in stack.operands if one is not stacks.EMPTY)
    named: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    if stack.name == "CALL_FUNCTION_EX":
        given, named = list(given[0]), dict(*given[1:])
    elif stack.name == "CALL_KW":
        names = given.pop()
    else:
        names = _keywords(frame.f_code, instruction_at(frame.f_code, frame.f_lasti))
    if names:
        named = dict(zip(names, given[-len(names) :], strict=True))
        given = given[: -len(names)]
    while type(function) is functools.partial:
        given, named = [*function.args, *given], {**function.keywords, **named}
        function = function.func
    if type(function) is BuiltinFunctionType and type(function.__self__) in (list, tuple):
        given = [function.__self__, *given]
        function = getattr(type(function.__self__), function.__name__)
    return function, tuple(given), named


def _puts_in_order(function: Any) -> bool:
    return any(function is one for one in (max, min, sorted))


def _is_of_one_kind(values: Sequence[Any]) -> bool:
    """Return whether values are numbers of one type, which can be traced."""
    numbers = [*map(plain, values)]
    kinds = {*map(type, numbers)}
    if kinds == {int}:
        return bool(-_LARGEST <= min(numbers) and max(numbers) < _LARGEST)
    return kinds == {float}


def _makes_array(function: Any) -> bool:
    """Return whether a function of numpy's takes a traced number for an array."""
    return (
        type(function) is BuiltinFunctionType
        and function.__name__ in MAKES_ARRAYS
        and getattr(sys.modules.get("numpy"), function.__name__, None) is function
    )


def _has_item(container: Any, key: Any) -> bool:
    """Return whether a container holds numbers of one type, and a key may lead to one."""
    if type(container) not in (dict, list, tuple) or len(container) > _MOST_ITEMS:
        return False
    is_dict = type(container) is dict
    kinds = {*map(type, container.values() if is_dict else map(plain, container))}
    is_by_number = not is_dict or {*map(type, container)} == {int}
    return kinds in _OF_NUMBERS and is_by_number and type(key) is TracedInt


@functools.lru_cache(maxsize=1024)
def _keywords(code: CodeType, offset: int) -> tuple[str, ...]:
    """Return the names of the arguments that an instruction passes by name, before 3.13."""
    before = [step for step in single_steps(code) if step.offset < offset]
    is_named = before and before[-1].name == "KW_NAMES"
    return code.co_consts[before[-1].argument or 0] if is_named else ()


def _is_plain_cache_argument(value: Any) -> bool:
    """Return whether an argument of a cache is nothing that a run makes, but for numbers."""
    if type(value) is tuple:
        return all(map(_is_plain_cache_argument, value))
    return not isinstance(value, Tensor)


def _copy_of_arguments(value: Any, depth: int = 4) -> Any:
    """Return a copy of arguments, to see whether a function changes them."""
    if type(value) in TRACED or not depth:
        return None
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_copy_of_arguments(item, depth) for item in value]
    if isinstance(value, dict):
        return [[_copy_of_arguments(part, depth) for part in pair] for pair in value.items()]
    own = getattr(value, "__dict__", None)
    return id(value) if type(own) is not dict else _copy_of_arguments(own, depth - 1)


def _reference_counts(value: Any) -> list[int]:
    """Return how many references there are to each container in a result."""
    kind = type(value)
    if kind is tuple or kind is list:
        inside = value
    elif kind is dict:
        inside = value.values()
    else:
        return []
    counts = [] if kind is tuple else [sys.getrefcount(value)]
    for item in inside:
        counts += _reference_counts(item)
    return counts


def _change_alike(kept: Any, result: Any) -> None:
    """Give the containers that a cache keeps the content of those that code has received."""
    if type(kept) is not type(result) or type(kept) not in (tuple, list, dict):
        return
    if len(kept) == len(result):
        is_dict = type(kept) is dict
        inside = (kept.values(), result.values()) if is_dict else (kept, result)
        for one, other in zip(*inside, strict=True):
            _change_alike(one, other)
    if type(kept) is list and not identical(kept, plain_copy(result)):
        kept[:] = plain_copy(result)
    elif type(kept) is dict and not identical(kept, plain_copy(result)):
        kept.clear()
        kept.update(plain_copy(result))


# Python numbers as traced scalars: counters of `while` loops, and numbers in the model's state.
#
# A Python int that counts rounds makes each round another state. Before a question inside of the
# loop is asked, the variable gets a traced scalar with the same number instead, as if the model had
# taken it out of a tensor. The state no longer has the number in it then (see `states.py`).
#
# A number in an attribute or a container that differs from call to call would make each call a path
# of its own. While the run goes on, the attribute holds a traced scalar, so that the number is an
# input of the run, and what the model assigns in its place is computed from it.


Counter: TypeAlias = tuple[CodeType, str]


class Lifting:
    """Lifts counters and numbers of one run.

    Args:
        excluded: the variables that stay as they are; None for all.
        as_tensors: whether a number is taken out of a tensor, for programs that have no numbers.
        inputs: the labels of numbers in the state that are inputs of the run, and of containers.
        places: where numbers differ from run to run, so that they stay traced, and the loops whose
            counters are lifted in any case (see `loop_at`).
        lists: whether lists that loops append to are followed.

    Attributes:
        counts: whether counters of loops are lifted.
        inputs: as given.
        lifted: the variables that were lifted, by the op that gives the number of each.
        places: as given.
    """

    def __init__(
        self,
        excluded: frozenset[Counter] | None = frozenset(),
        as_tensors: bool = False,
        inputs: frozenset[str] = frozenset(),
        places: frozenset[Place] = frozenset(),
        lists: bool = False,
    ) -> None:
        self._excluded = excluded
        self._as_tensors = as_tensors
        self._lists = lists
        self.inputs: frozenset[str] = inputs
        # By identity, because hashing a code object is slow; the places keep it alive.
        self._loops = {(id(code), begin) for code, begin in places if is_loop((code, begin))}
        self._iterating = {
            (id(place[0]), begin)
            for place in places
            if (begin := loop_beginning(*place)) is not None
        }
        self.counts: bool = excluded is not None or bool(self._loops or self._iterating)
        self.lifted: dict[int, Counter] = {}
        self.places: frozenset[Place] = places
        self._derived: set[int] = set()  # from counters that inputs give
        self._followed = 0  # so many ops

    def begin(self, values: RunValues, call: Callable[..., Any], outermost: CodeType) -> None:
        """Take part in a run.

        Args:
            values: makes traced scalars.
            call: records a call of a torch function: function, arguments, options, frame.
            outermost: the code that called the model.
        """
        self._writer = writer = values.writer
        self._values = values
        self._call, self._outermost = call, outermost
        if self.counts or self.places:
            writer.before_question = self._lift
            if self._lists:
                values.accumulation = accumulation.Accumulation(values, outermost)

    @property
    def has_lifted(self) -> bool:
        """Return whether there were counters of loops, or lists that loops append to."""
        lists = self._values.accumulation
        return bool(self.lifted) or (lists is not None and lists.has_begun)

    def place(self) -> None:
        """Replace the numbers in the state by traced scalars."""
        environment, scalars = self._values.environment, []
        for part in environment.lift(self.inputs):
            op = self._writer.emit(OpKind.STATE, part, (), {}, None)
            op.meta = part.value
            self._writer.tape.counters.add(op.index)
            kind = TRACED_AS[part.type]
            scalars.append((part, self._values.scalar(kind, part.value, Ref(op.index))))
        environment.place(scalars)

    def _lift(self, frame: FrameType) -> None:
        """Lift what differs between the rounds of the loops around a question."""
        if self._values.environment.tells_numbers:
            return
        if self._values.accumulation is not None:
            self._values.accumulation.follow(frame)
        found: FrameType | None = frame if self.counts else None
        while found is not None and found.f_code is not self._outermost:
            code = found.f_code
            loops = None if self._excluded is not None else self._loops
            is_own = code.co_filename.startswith(PACKAGE)
            counted, carried = frozenset[str](), frozenset[str]()
            if not is_own:
                counted = counters_at(code, found.f_lasti, loops)
                carried = carried_at(code, found.f_lasti, self._iterating)
            if (counted or carried) and not (
                needs_plain_numbers(code, found.f_globals) or code_compares_identity(code)
            ):
                for name in sorted(counted | carried):
                    self._lift_one(found, name, int)
                for name in sorted(carried):
                    self._lift_one(found, name, float)
            found = found.f_back

    def _lift_one(self, frame: FrameType, name: str, kind: type) -> None:
        value: Any = local_in(frame, name)
        counter = frame.f_code, name
        if counter in (self._excluded or ()):
            return
        if type(value) is TracedInt and self._loops and type(value._source) is Ref:
            self._count_by(value._source.index, counter)
        held = type(value)
        if held is not kind or (kind is int and abs(value) >= _LARGE):
            return
        if self._as_tensors:
            tensor = self._call(torch.full, ((), value), {"dtype": torch.int64}, frame)
            scalar = self._call(Tensor.item, (tensor,), {}, frame)
        else:
            op = self._writer.emit(OpKind.SCALAR, operator.pos, (value,), {}, frame)
            op.meta = value
            self._writer.tape.counters.add(op.index)
            scalar = self._values.scalar(TRACED_AS[kind], value, Ref(op.index))
        if type(scalar) in TRACED:
            self.lifted[scalar._source.index] = counter
            assign(frame, name, scalar)

    def _count_by(self, index: int, counter: Counter) -> None:
        """Let what is computed with a number be asked in each round, though inputs give it.

        Args:
            index: the op that gives the number.
            counter: the variable that has it.
        """
        tape = self._writer.tape
        for op in tape.ops[self._followed :]:
            if op.kind is OpKind.SCALAR and not self._derived.isdisjoint(op.operands):
                self._derived.add(op.index)
        self._followed = len(tape.ops)
        is_new = index not in tape.counters and index not in self._derived
        if is_new and tape.ops[index].kind is OpKind.SCALAR:
            tape.rounds.add(index)
            self._derived.add(index)
            self.lifted[index] = counter

    def needed_counters(self, tape: Tape) -> frozenset[Counter]:
        """Return the counters that Python needed the number of, for an index, say."""
        sources = self._sources(tape)
        needing = (guard for guard in tape.guards if not isinstance(guard, TruthGuard))
        found = (sources.get(guard.index, ()) for guard in needing)
        return frozenset(self.lifted[index] for indices in found for index in indices)

    def _sources(self, tape: Tape) -> dict[int, frozenset[int]]:
        """Return the ops by which counters were lifted, for each op computed with these."""
        sources = {index: frozenset({index}) for index in self.lifted}
        for op in tape.ops if sources else ():
            if op.kind is OpKind.SCALAR and op.index not in sources:
                found = frozenset[int]().union(
                    *(sources[index] for index in op.operands if index in sources)
                )
                if found:
                    sources[op.index] = found
        return sources

    def open_loops(self, tape: Tape) -> Iterator[Place]:
        """Yield the loops that do not close though their counters are to be lifted.

        Args:
            tape: the run.
        """
        sources = self._sources(tape) if self._loops else {}
        needed: set[Counter] = set()
        # The questions at each place, by the op that lifted the counter when the loop was begun.
        asked: dict[tuple[Place, int], list[bytes]] = {}
        for number, guard in enumerate(tape.guards if self._loops else ()):
            lifted = sources.get(guard.index, frozenset())
            if not isinstance(guard, TruthGuard):
                place = number_place(guard)
                # What is asked for where numbers can stay traced does so in later runs.
                if place is None or place in self.places:
                    needed.update(self.lifted[index] for index in lifted)
            elif guard.site is not None and number in tape.states:
                question = guard.site.chain[0], max(lifted, default=-1)
                asked.setdefault(question, []).append(tape.states[number].key)
        closes: dict[Place | None, bool] = {}
        for (place, _), states in asked.items():
            if len(states) > _FEW_ROUNDS:
                loop = loop_at(*place)
                closes[loop] = closes.get(loop, False) or len({*states}) < len(states)
        for place in filter(is_loop, self.places):
            names = {(place[0], name) for name in counters_at(*place)}
            if not (closes.get(place, True) and needed.isdisjoint(names)):
                yield place


def required_numbers(tape: Tape, guards: Iterable[Guard]) -> frozenset[str]:
    """Return the labels of numbers in the state of which Python needed the very number.

    It needed the number of `step` for `table[step + 1]`, and not for `table[step % 3]`.

    Args:
        tape: a run.
        guards: those of its guards that count.
    """
    found = set()
    for guard in guards:
        op: Op | None = tape.ops[guard.index] if isinstance(guard, ValueGuard) else None
        while op is not None and op.index in tape.counters:
            if op.kind is OpKind.STATE:
                found.add(op.target.label)
            one_to_one = op.target in _ONE_TO_ONE and len(op.operands) == 1
            op = tape.ops[op.operands[0]] if one_to_one else None
    return frozenset(found)


def required_containers(tape: Tape) -> frozenset[str]:
    """Return the labels of containers in the state with floats that Python needed by value.

    Args:
        tape: a run.
    """
    found = set()
    for guard in tape.guards:
        if isinstance(guard, ValueGuard) and type(guard.answer) is float:
            op = tape.ops[guard.index]
            while op.target is operator.getitem and op.operands:
                op = tape.ops[op.operands[0]]
            if works_on_containers(op.target):
                found.add(op.args[0].part.label)
    return frozenset(found)


_ONE_TO_ONE = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos,
)  # fmt: skip
_LARGE = 1 << 31


class CodeLoop(NamedTuple):
    """A loop, and the local variables in which it counts, or carries numbers from round to round.

    Attributes:
        begin: its first instruction.
        end: its last instruction.
        is_walk: whether it goes through an iterator.
        counters: the variables that each round adds a constant to, unless it is a walk.
        carried: those that a walk computes: `weight *= 0.9`.
    """

    begin: int
    end: int
    is_walk: bool
    counters: frozenset[str]
    carried: frozenset[str]


def counters_at(
    code: CodeType, offset: int, loops: Set[tuple[int, int]] | None = None
) -> frozenset[str]:
    """Return the local variables that count the rounds of `while` loops around an instruction.

    Args:
        code: the code.
        offset: the instruction.
        loops: the loops that count, as identities of code and beginnings; None for all.
    """
    return frozenset().union(
        *(
            loop.counters
            for loop in _loops_at(code, offset)
            if not loop.is_walk and (loops is None or (id(code), loop.begin) in loops)
        )
    )


def loop_beginning(code: CodeType, offset: int) -> int | None:
    """Return the beginning of the loop that alone receives what an instruction gives, if any.

    A list comprehension carries nothing from round to round.
    """
    loop = row_loop_at(code, offset)
    if loop is None or loop.is_list:
        return None
    after = (step for step in single_steps(code) if step.offset > offset)
    return next((step.offset for step in after if step.name == "FOR_ITER"), None)


def carried_at(code: CodeType, offset: int, loops: Set[tuple[int, int]]) -> frozenset[str]:
    """Return the local variables in which loops over ranges and rows carry numbers on.

    Args:
        code: the code.
        offset: an instruction in these loops.
        loops: the loops that are looked at, as identities of code and beginnings.
    """
    return frozenset().union(
        *(
            loop.carried
            for loop in (_loops_at(code, offset) if loops else ())
            if loop.is_walk and (id(code), loop.begin) in loops
        )
    )


def loop_at(code: CodeType, offset: int) -> Place | None:
    """Return the innermost `while` loop with counters around an instruction, as its beginning."""
    around = (loop for loop in _loops_at(code, offset) if loop.counters and not loop.is_walk)
    innermost = min(around, key=lambda loop: loop.end - loop.begin, default=None)
    return None if innermost is None else (code, innermost.begin)


def rounds_of_loops(guards: Iterable[Guard]) -> dict[Place, list[Any]]:
    """Return how often each `while` loop with counters has asked, of those that ask again."""
    found: Votes[Place] = Votes()
    for site, count in Votes(guard.site for guard in guards).items():
        loop = None if site is None or count == 1 else loop_at(*site.chain[0])
        if loop is not None:
            found[loop] += count
    return {loop: [count] for loop, count in found.items()}


def is_loop(place: Place) -> bool:
    """Return whether a place is a loop (see `loop_at`), and not one that asks for a number."""
    return loop_at(*place) == place


def _loops_at(code: CodeType, offset: int) -> Iterator[CodeLoop]:
    return (loop for loop in _code_loops(code) if loop.begin <= offset <= loop.end)


@cache_by_code
def _code_loops(code: CodeType) -> list[CodeLoop]:
    loops: list[CodeLoop] = []
    if not LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return loops  # it could see that `assign` was there
    steps, counted = single_steps(code), dict(_counted(code))
    names = {step.offset: step.name for step in steps}
    ends = {step.value: step.offset for step in steps if "JUMP_BACKWARD" in step.name}
    for begin, end in ends.items():
        inside = [step for step in steps if begin <= step.offset <= end]
        if names.get(begin) != "FOR_ITER":
            counters = frozenset(counted[one.offset] for one in inside if one.offset in counted)
            loops.append(CodeLoop(begin, end, False, counters, frozenset()))
            continue
        computed = {
            after.value
            for before, after in itertools.pairwise(inside)
            if after.name == "STORE_FAST" and before.name in ("BINARY_OP", "UNARY_NEGATIVE")
        }
        computed &= {one.value for one in inside if one.name == "LOAD_FAST"}
        loops.append(CodeLoop(begin, end, True, frozenset(), frozenset(computed)))
    return loops


def _counted(code: CodeType) -> Iterator[tuple[int, str]]:
    """Yield each instruction that stores a variable to which a whole constant was added."""
    steps = single_steps(code)
    for first, second, third, last in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        constant = constant_of(code, second.name, second.argument or 0)
        if (
            (first.name, third.name, last.name) == ("LOAD_FAST", "BINARY_OP", "STORE_FAST")
            and third.shown in ("+", "-", "+=", "-=")
            and type(constant) is int
            and first.value == last.value
        ):
            yield last.offset, first.value
