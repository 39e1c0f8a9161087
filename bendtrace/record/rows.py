"""Loops over the rows of tensors, of which there are others in each call.

`for row in x`, `for part in x.split(8)`: with all rows in it, the iterator of the loop would make
each round a state that equals no other, and the number of rows would be guarded. Where it differs
between runs (see `varying.py`), the loop goes through `LoopRows` instead, which ask in each round
whether there is another row. The op that gives the rows is carried out as it is; in each round,
`row_at` takes one of them, by a counter that is a traced scalar. So the loop closes.

`python/row_loops.py` finds the loops for which nothing else can see the rows: those over a call, or
a tensor, directly, or through `enumerate`, `zip` and `reversed`. The latter's results are exchanged
for objects that do the same, and whose progress a state can have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bendtrace.python.bytecode import code_compares_identity
from bendtrace.python.computations import row_at
from bendtrace.python.results import call_after, is_awaited
from bendtrace.python.row_loops import row_loop_at, walking_frame
from bendtrace.python.sites import TORCH, instruction_at
from bendtrace.python.stacks import address_of_result, frame_layout, put_on_stack
from bendtrace.record.encoding import ListOperand
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.record.values import RunValues
from bendtrace.tape.guards import Place
from bendtrace.tape.plain_numbers import needs_plain_numbers
from bendtrace.tape.scalars import TracedInt, plain
from bendtrace.tape.tape import Op, OpKind, Ref, meta_of
from bendtrace.watch.writes import storage_of


class RowLoops:
    """Makes what the loops of one run go through.

    Args:
        places: where the number of rows differs between runs, by the identity of the code.
        writer: records ops.
        values: knows the ops of tensors.
        lift: returns a number as one that each round counts on from.
        call_of: returns the function that a frame is calling, and its arguments.
        inserter: puts its own ops into the run, if something does.

    Attributes:
        asked: the loops, with the guards that tested whether there is another row.
        numbers: where the loop has the number of each row, with the op that gives the first one.
    """

    def __init__(
        self,
        places: dict[tuple[int, int], Place],
        values: RunValues,
        lift: Callable[[Any, FrameType], Any],
        call_of: Callable[[FrameType, FrameType], Any],
        inserter: Any,
    ) -> None:
        self._places = places
        self.writer: TapeWriter = values.writer
        self._values = values
        self._recorder: Any = values.origin
        self.lift: Callable[[Any, FrameType], Any] = lift
        self._call_of, self._inserter = call_of, inserter
        self.asked: list[tuple[Place, list[int]]] = []
        self.numbers: list[tuple[Place, int]] = []
        self._zipped: RowZip | None = None  # what the current call of `zip` is exchanged for

    def follow(self, op: Op, parts: Any, frame: FrameType) -> LoopRows | None:
        """Return what a loop goes through in place of the parts of a tensor.

        None if they are not to be followed.

        Args:
            op: the op that gives them.
            parts: the parts.
            frame: the code that receives them.
        """
        caller, iterates = walking_frame(op.target, frame)
        if caller is None or self.writer.is_inside or self._recorder.is_in_block:
            return None
        code = caller.f_code
        place = self._places.get((id(code), instruction_at(code, caller.f_lasti)))
        loop = None if place is None else row_loop_at(*place)
        if place is None or loop is None or loop.iterates is not iterates:
            return None
        script, count = self.writer.script, len(parts)
        if script is not None and script.is_active:  # which may have stand-ins for the parts
            if script.next_by(len) is None:
                return None
            known = script.result_of(len, [op.index])
            count = count if known is None else known[0]
        elif not (loop.is_known(caller) and self._may_follow(op, caller)):
            return None
        elif not self._are_new_views(op, parts):
            return None
        counted = self.writer.emit(OpKind.SCALAR, len, (Ref(op.index),), {}, frame)
        counted.meta = count
        self.writer.tape.counters.add(counted.index)
        traced = self._values.scalar(TracedInt, count, Ref(counted.index))
        op.meta = tuple(map(meta_of, parts))
        rows = LoopRows(self, op, parts, traced, self.lift(0, frame), place)
        self.asked.append((place, rows.asked))
        return rows

    def _may_follow(self, op: Op, frame: FrameType) -> bool:
        code = frame.f_code
        return not (
            self._values.environment.tells_numbers
            or needs_plain_numbers(code, frame.f_globals)
            or code_compares_identity(code)
            or (self._inserter is not None and not self._inserter.leaves(op))
        )

    def _are_new_views(self, op: Op, parts: Any) -> bool:
        """Return whether a result consists of views of one tensor that nobody has yet."""
        tracked = self.writer.tracked
        with torch._C.DisableTorchFunction():
            base = op.args[0] if op.args else None
            kinds = {*map(type, parts)}
            if type(base) is not Ref or not kinds <= {Tensor}:
                return False
            memory = {*map(storage_of, parts)}
            known = (tracked.get(id(part), lambda: None)() is part for part in parts)
            return (
                len(memory) <= 1
                and 0 not in memory
                and not (any(known) or any(part.is_nested or vars(part) for part in parts))
            )

    def index_of(self, number: Any) -> int:
        """Return the op that gives a number."""
        return self._values.scalar_ref(number).index

    def take(self, rows: LoopRows, at: Any) -> Tensor:
        """Return a row, as the value of an op.

        Args:
            rows: the rows.
            at: its number, which was guarded if it is not traced.
        """
        row: Tensor
        if not self._recorder.active:  # a generator that the run has left goes on
            row = rows.parts[plain(at)]
            return row
        writer = self.writer
        given = writer.tape.ops[rows.ref.index]
        number = self._values.scalar_ref(at) if type(at) is TracedInt else at
        op = writer.emit(OpKind.SCALAR, row_at, (rows.ref, number), {}, None)
        op.scope, op.site = given.scope, given.site
        handed = op.index in writer.handed
        row = writer.handed.pop(op.index) if handed else rows.parts[plain(at)]
        with torch._C.DisableTorchFunction():
            self._values.bind_tensor(row, op)
            if not self._recorder.follows_script:
                self._note_reads(op, rows.ref, row)
        return row

    def _note_reads(self, op: Op, ref: Ref, row: Tensor) -> None:
        """Note the op that has written to a row since there are rows, if one has."""
        writes = self.writer.writes
        writes.begin()
        if writes.stale_names([(ref, row)]):
            writes.stale.append((ref, row))
            writes.note_reads(op)
            writes.begin()

    def meets(self, walk: RowIterator) -> None:
        """Have a loop go through what does the same as the builtin that asks for an iterator.

        Args:
            walk: the iterator.
        """
        callee = sys._getframe(1)
        frame = callee.f_back
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            callee, frame = frame, frame.f_back
        if frame is None:
            return
        loop = row_loop_at(frame.f_code, instruction_at(frame.f_code, frame.f_lasti))
        if loop is None or not (loop.way and loop.iterates):
            return
        if is_awaited(frame) and self._zipped is not None:
            self._zipped.walks.append(walk)  # of the arguments that come after the first
            return
        called = self._call_of(frame, callee)
        if called is None:
            return
        function, given, named = called
        if function is enumerate:
            start = named.get("start", *given[1:]) if named or given[1:] else 0
            if type(start) is int or type(start) is TracedInt:
                self._exchange(frame, RowEnumerator(self, walk, self.lift(start, frame)), 1)
        elif function is zip and type(strict := named.get("strict", False)) is bool:
            self._zipped = RowZip(self, [walk], strict)
            self._exchange(frame, self._zipped, len(given))

    def _exchange(self, frame: FrameType, made: RowEnumerator | RowZip, count: int) -> None:
        """Have a frame receive an iterator in place of a builtin's, if that goes through walks.

        Args:
            frame: the frame that calls the builtin.
            made: the iterator.
            count: how many arguments the builtin goes through.
        """
        places = frame_layout()
        address = None if places is None else address_of_result(frame, places)

        def ended(gave: bool) -> None:
            self._zipped = None
            if gave and address is not None and len(made.walks) == count:
                if isinstance(made, RowEnumerator):
                    self.numbers += [(place, made.first) for place in made.places]
                put_on_stack(address, made)

        if not call_after(frame, ended):
            self._zipped = None


class RowIterator:
    """An iterator over rows, or over what builtins make of them.

    Args:
        loops: has made it.
        walks: the iterators that it goes through.
    """

    def __init__(self, loops: RowLoops, walks: list[RowIterator]) -> None:
        self._loops = loops
        self.walks: list[RowIterator] = walks

    @property
    def places(self) -> Iterator[Place]:
        """Where the numbers of rows differ between runs."""
        for walk in self.walks:
            yield from walk.places

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which it is."""
        return (*self.walks,)

    def __iter__(self) -> RowIterator:
        self._loops.meets(self)
        return self

    def __next__(self) -> Any:
        raise NotImplementedError


class LoopRows(RowIterator):
    """The rows of a tensor that a loop has yet to go through.

    Args:
        loops: makes the ops.
        op: the op that gives them.
        parts: the rows.
        count: their number, traced.
        at: the number of the next one, traced.
        place: where the number of rows differs between runs.

    Attributes:
        ref: the op.
        parts: as given; empty once there is no other one.
        asked: the guards that tested whether there is another row.
    """

    def __init__(
        self, loops: RowLoops, op: Op, parts: Any, count: Any, at: Any, place: Place
    ) -> None:
        super().__init__(loops, [])
        self.ref: Ref = Ref(op.index)
        self.parts: Sequence[Tensor] = parts
        self._at, self._count, self._step = at, count, 1
        self._place = place
        self.asked: list[int] = []

    @property
    def places(self) -> Iterator[Place]:
        """Where their number differs between runs."""
        yield self._place

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which these are."""
        at = max(plain(self._at), 0)
        left = self.parts[at:] if self._step > 0 else self.parts[: at + 1]
        given = ListOperand([*(left or self.parts[-1:])], self.ref)
        return self._at, self._count, self._step, given

    def __reversed__(self) -> LoopRows:
        self._at, self._step = self._count - 1, -1
        return self

    def __next__(self) -> Tensor:
        self.asked.append(len(self._loops.writer.tape.guards))
        at = self._at
        if at < self._count if self._step > 0 else at >= 0:
            self._at = at + self._step
            return self._loops.take(self, at)
        self.parts = ()
        raise StopIteration


class RowEnumerator(RowIterator):
    """Does what `enumerate` does.

    Args:
        loops: has made it.
        walk: gives the items.
        number: the number of the next one, traced.

    Attributes:
        first: the op that gives the first number.
    """

    def __init__(self, loops: RowLoops, walk: RowIterator, number: Any) -> None:
        super().__init__(loops, [walk])
        self._number = number
        self.first: int = loops.index_of(number)

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which it is."""
        return self._number, *self.walks

    def __next__(self) -> tuple[Any, Any]:
        item = next(self.walks[0], _END)
        if item is _END:
            raise StopIteration
        number = self._number
        self._number = number + 1
        return number, item


class RowZip(RowIterator):
    """Does what `zip` does.

    Args:
        loops: has made it.
        walks: give the items.
        strict: whether all have to give as many.
    """

    def __init__(self, loops: RowLoops, walks: list[RowIterator], strict: bool) -> None:
        super().__init__(loops, walks)
        self._strict = strict
        self._items: list[Any] = []  # of this round, as far as they are there

    def state_parts(self) -> tuple[Any, ...]:
        """Return the values that a state consists of in which it is."""
        return self._strict, *self.walks, tuple(self._items)

    def __next__(self) -> tuple[Any, ...]:
        for number, walk in enumerate(self.walks):
            item = next(walk, _END)
            if item is _END:
                self._items.clear()
                if self._strict:
                    self._require_end(number)
                raise StopIteration
            self._items.append(item)
        items = tuple(self._items)
        self._items.clear()
        return items

    def _require_end(self, shortest: int) -> None:
        """Raise what `zip` raises unless all have come to their end.

        Args:
            shortest: the first that has.

        Raises:
            ValueError: one has not.
        """
        if shortest:
            raise ValueError(_unequal(shortest, "shorter"))
        for number, walk in enumerate(self.walks[1:], 1):
            if next(walk, _END) is not _END:
                raise ValueError(_unequal(number, "longer"))


def _unequal(number: int, how: str) -> str:
    others = f" {number}" if number == 1 else f"s 1-{number}"
    return f"zip() argument {number + 1} is {how} than argument{others}"


_END: Any = object()
