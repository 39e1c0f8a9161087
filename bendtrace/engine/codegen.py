"""Writing the ops of a schedule, with its guards in between: whole runs, and segments.

A segment goes from one state to another, or to the end of the run. It is entered with the values
that its state can still reach, its holes, and leaves with those of the state where a question has
another answer than the one recorded. Values that no state needs any more are dropped, as
the model's own variables would.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bendtrace.engine.schedule import Schedule, Unlinked, is_freed, may_be_caught
from bendtrace.engine.source import (
    Code,
    Departure,
    EquivalentCall,
    GeneratedSource,
    ValueSplice,
    define,
    gives_nothing,
    may_be_direct,
)
from bendtrace.python.computations import GIVING_LISTS, with_item
from bendtrace.python.lazy import LazyModule
from bendtrace.tape.captured import (
    Access,
    Added,
    AttributeKey,
    Captured,
    EnvironmentChange,
    refill_sequence,
)
from bendtrace.tape.contexts import Context, dispatch_modes
from bendtrace.tape.guards import TruthGuard
from bendtrace.tape.structure import Construction, Instance, existing_in
from bendtrace.tape.tape import Checkpoint, Guard, Op, OpKind, Ref, Tape, describe_raised, refs_in
from bendtrace.watch.functions import works_on_arrays

if TYPE_CHECKING:
    from bendtrace.engine import direct_calls
    from bendtrace.record import checkpoints
else:
    checkpoints = LazyModule("bendtrace.record.checkpoints")
    direct_calls = LazyModule("bendtrace.engine.direct_calls")

# Seen in 2.13 to 2.15; test_direct_calls notices.


def write_run(schedule: Schedule, direct: bool = False) -> Code:
    """Return the code of a run that can be resumed where a guard does not hold.

    With `direct`, it may call torch functions by what they come down to, so that no function mode
    sees them.
    """
    return RunWriter(schedule, direct).write()


def write_portion(portion: checkpoints.Portion) -> Callable[..., None]:
    """Return a function that carries out a portion of a checkpointed block again."""
    source, passages, current = GeneratedSource(), list(portion.passages), None
    source.begin("again(E, switch)")

    def switch_to(context: Context | None) -> None:
        nonlocal current
        if context is not None and context != current:
            source.line(f"switch.to({source.constant(context)})")
            current = context

    def pass_through() -> None:
        passage = passages.pop(0)
        switch_to(passage.context)
        name = f"v{passage.op}"
        source.line(f"{name} = {source.bound(passage.function)}({name})")

    if portion.outside:
        source.line(f"{''.join(f'v{index}, ' for index in portion.outside)} = E")
    for op in portion.ops:
        while passages and passages[0].position <= op.index:
            pass_through()
        switch_to(op.context)
        call = source.call(op)
        source.line(call if gives_nothing(op) else f"v{op.index} = {call}", op.index)
        dying = [
            f"v{i}"
            for i in portion.dying.get(op.index, ())
            if not (i == op.index and gives_nothing(op))
        ]
        if dying:
            source.line(f"del {', '.join(dying)}")
    while passages:
        pass_through()
    return Code(source, "again").function


class RunWriter:
    """Writes `run(A, E)`, which takes the available values from `E`, by the names `v<op>`.

    Where a guard does not hold, it returns a `Departure` with all that it has computed: for that,
    values are kept until it cannot be left any more.
    """

    def __init__(self, schedule: Schedule, direct: bool = False) -> None:
        self.schedule = schedule
        self.tape: Tape = schedule.tape
        self.source: GeneratedSource = GeneratedSource()
        self._current = schedule.entry  # what is in force where the code has come to
        self._kept_until = 2 * schedule.last_departure  # the moment until which values are kept
        self._forgotten: set[int] = set()  # ops whose values have no name any more
        self._direct: dict[int, EquivalentCall] = {}
        if direct:
            ops = list(filter(may_be_direct, self.tape.ops[self.schedule.start :]))
            plain = direct_calls.plain_values(self.tape) if ops else set()
            for op in ops:
                call = direct_calls.cheapest(op, plain)
                if call is not None and not may_be_caught(op, self.schedule.recording):
                    self._direct[op.index] = call

    def write(self) -> Code:
        """Write it. Raise `Unlinked` if a segment needs a value that its state does not hold."""
        schedule, source = self.schedule, self.source
        source.names["__tape__"] = self.tape
        source.begin("run(A, E)")
        self._enter()
        if schedule.switches:
            source.line("switch = Switch()")
            source.line("try:")
            source.indent = 2
        if any(call.gives_back is not None for call in self._direct.values()):
            source.names["asked"] = dispatch_modes
            source.line("watched = asked()")
        for op in schedule.late:
            if op.index in schedule.same:
                root = schedule.same[op.index]
                self._take_out([Ref(root)])
                source.line(f"v{op.index} = v{root}")
            else:
                self._take_out((op.args, op.kwargs))
                self._switch_for(op)
                define(source, op)
            source.emitted.add(op.index)
        self._dying = schedule.deaths(self._kept_until)
        if any(works_on_arrays(op.target) for op in self.tape.ops[schedule.start :]):
            self._direct.update(direct_calls.calls_on_arrays(schedule, self._kept_until // 2))
        self._forget(2 * schedule.start - 1)
        if schedule.entered is not None:
            self._go_on_in(schedule.entered)
        position = schedule.start
        while position < schedule.end:
            self._write_position(position)
            position = self._write_ops(position)
        self._write_position(position)
        if schedule.stop is None:
            self._take_out(schedule.outputs, [change.part for change in schedule.changes])
            self._finish()
        if schedule.switches:
            source.indent = 1
            source.line("finally:")
            source.line("    switch.restore()")
        return Code(source, "run")

    @property
    def _takes_over(self) -> bool:
        """Return whether `E` holds values by their names."""
        return bool(self.schedule.available)

    def _enter(self) -> None:
        """Take over the inputs of the run."""
        schedule, source, ops = self.schedule, self.source, self.tape.ops
        carried_out = [ops[i] for i in schedule.needed - schedule.available]
        used = [map(Ref, schedule.needed), ((op.args, op.kwargs) for op in carried_out)]
        self._take_out(
            [*map(list, used), schedule.outputs], [change.part for change in schedule.changes]
        )
        for index in sorted(schedule.needed & schedule.available):
            if not gives_nothing(ops[index]):
                source.line(f"v{index} = E['v{index}']")
                source.emitted.add(index)
        if self._takes_over and schedule.last_departure < schedule.start:
            source.line("E.clear()")

    def _take_out(self, values: Any, parts: Iterable[Captured] = ()) -> None:
        """Take the arguments and state that some values use out of their containers."""
        source, ops = self.source, self.tape.ops
        used = {ref.index for ref in refs_in(values)} - self.schedule.available - source.emitted
        taken = sorted(index for index in used if ops[index].is_given)
        source.take(
            [
                *parts, *(existing.part for existing in existing_in(values)),
                *(ops[index].target for index in taken),
            ]
        )  # fmt: skip
        for index in taken:
            source.line(f"v{index} = {source.part(ops[index].target)}")
            source.emitted.add(index)

    def _write_position(self, position: int) -> None:
        """Write the lines before an op."""
        self._write_guards(position)
        if self._takes_over and position == self.schedule.last_departure:
            self.source.line("E.clear()")
        if position < self.schedule.end or self._kept_until == 2 * position:
            self._forget(2 * position)

    def _write_guards(self, position: int) -> None:
        # In the order of the guards that come before each; a block ends after what is at its end.
        waiting: list[tuple[int, int, Callable[[Any], None], Any]] = [
            (splice.guards, 1, self._pass_through, splice)
            for splice in self.schedule.splices.get(position, ())
        ]
        for block in self.schedule.blocks:
            if block.begin == block.end:
                continue  # nothing is done in it
            if block.end[0] == position and not self._is_left(block):
                waiting.append((block.end[1], 2, self._end, block))
            if block.begin[0] == position and block is not self.schedule.entered:
                waiting.append((block.begin[1], 3, self._begin, block))
        waiting.sort(key=lambda item: item[:2])
        for number, guard in self.schedule.guards.get(position, ()):
            while waiting and waiting[0][0] <= number:
                _, _, write, what = waiting.pop(0)
                write(what)
            self._depart_unless(number, guard)
        for _, _, write, what in waiting:
            write(what)

    def _is_left(self, block: Checkpoint) -> bool:
        """Return whether the schedule ends in the middle of a block."""
        return self.schedule.stop is not None and block.holds(self.schedule.stop)

    def _begin(self, block: Checkpoint) -> None:
        """Write that a checkpointed block begins."""
        source = self.source
        self._take_out(list(map(Ref, block.tensors)))
        tensors = "".join(f"v{index}, " for index in block.tensors)
        source.names["Block"] = checkpoints.Block
        source.line(f"E.hold.block = Block({source.bound(block.settings)}, ({tensors}))")
        self._go_on_in(block)

    def _go_on_in(self, block: Checkpoint) -> None:
        """Write the code that the backward pass will run again."""
        source, portion = self.source, self.schedule.portion(block, write_portion)
        self._take_out(list(map(Ref, portion.outside)))
        values = "".join(f"v{index}, " for index in portion.outside)
        source.line(f"E.hold.block.goes_on({source.bound(portion)}, ({values}))")

    def _end(self, block: Checkpoint) -> None:
        """Write that a checkpointed block ends."""
        self.source.line("E.hold.block.end()")
        self.source.line("E.hold.block = None")

    def _pass_through(self, splice: ValueSplice) -> None:
        """Write that a value is passed through something, which may replace it."""
        source = self.source
        assert splice.context is not None
        self._switch_to(splice.context)
        source.line(f"v{splice.index} = {source.bound(splice.function)}(v{splice.index})")

    def _write_ops(self, position: int) -> int:
        """Write an op, and perhaps some that follow it; return the one to go on with."""
        if position in self.tape.forgets:
            self.source.line("forget_casts()")
        op = self.schedule.op_at(position)
        if op is not None:
            self._take_out((op.args, op.kwargs))
            self._switch_for(op)
            self._carry_out(op)
            self.source.emitted.add(position)
            self._grow(position)
            if position not in self.schedule.last_use:
                moment = max(2 * position + 1, self._kept_until)
                self._dying.setdefault(moment, []).append(position)
            self._forget(2 * position + 1)
        return position + 1

    def _forget(self, moment: int) -> None:
        """Forget unused values, as the model's own variables would."""
        ops, emitted = self.tape.ops, self.source.emitted
        dying = sorted(self._dying.get(moment, ()))
        freed = [i for i in dying if i in emitted and is_freed(ops[i])]
        self._forgotten.update(freed)
        dead = [f"v{i}" for i in freed]
        dead += [name for index in dying for name in self._names_of_grown(index)]
        if dead:
            self.source.line("del " + ", ".join(dead))

    def _grow(self, position: int) -> None:
        """Exchange the tensor that an op makes longer, if that may be done before the end."""

    def _names_of_grown(self, index: int) -> Iterable[str]:
        """Return by what names the code knows a tensor from outside that is let go."""
        return ()

    def _switch_for(self, op: Op) -> None:
        """Write the switch to the grad mode and so on that an op runs under."""
        if op.kind is OpKind.CALL:
            self._switch_to(op.context)

    def _switch_to(self, context: Context) -> None:
        if context != self._current:
            self.source.line(f"switch.to({self.source.constant(context)})")
            self._current = context

    def _carry_out(self, op: Op) -> None:
        source, direct = self.source, self._direct.get(op.index)
        if self._owns_list(op):
            items, key, value = map(source.value, op.args)
            source.line(f"{items}[{key}] = {value}", op.index)
            source.line(f"v{op.index} = {items}")
            return
        call = source.call(op) if direct is None else source.direct(direct)
        statement = call if gives_nothing(op) else f"v{op.index} = {call}"
        if op.index not in self.schedule.catchable:
            source.line(statement, op.index)
            return
        raised = source.bound(functools.partial(describe_raised, op))
        source.line(f"r{op.index} = v{op.index} = None")
        source.line(f"try: {statement}", op.index)
        # Without its traceback, which would keep all values alive in a cycle.
        source.line("except Exception as error:")
        source.line(f"    v{op.index} = error.with_traceback(None)")
        source.line(f"    r{op.index} = {raised}(error)")

    def _owns_list(self, op: Op) -> bool:
        """Return whether an op may change the list that it is given: nothing has it from then on.

        Otherwise it copies the list, however long that is.
        """
        if op.target is not with_item or type(op.args[0]) is not Ref:
            return False
        base, schedule = op.args[0].index, self.schedule
        if schedule.splices or base in schedule.available or op.index in schedule.catchable:
            return False
        is_dying = base in self._dying.get(2 * op.index + 1, ())
        return is_dying and self.tape.ops[base].target in GIVING_LISTS

    def _depart_unless(self, number: int, guard: Guard) -> None:
        failed, now = guard.failure(self.source), guard.outcome
        self.source.line(f"if {failed}: return Departure({number}, {now}, locals())", guard.index)

    def _finish(self) -> None:
        source, schedule = self.source, self.schedule
        source.shared = _repeats_in(schedule.outputs)
        values = [source.value(change.value) for change in schedule.changes]
        for change, value in zip(schedule.changes, values, strict=True):
            source.line(_store(source, change, value))
        output = source.value(schedule.recording.root.output)
        source.line(f"return {output}")


def _repeats_in(value: Any) -> frozenset[int]:
    """Find the containers that are in a value more than once."""
    counts: Counter[int] = Counter()

    def count(item: Any) -> None:
        if isinstance(item, (tuple, list, dict)):
            counts[id(item)] += 1
        if isinstance(item, (Instance, Construction)):
            item = list(item.inside())
        for inner in _elements(item):
            count(inner)

    count(value)
    return frozenset(key for key, times in counts.items() if times > 1)


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, list)) else ()


def _store(source: GeneratedSource, change: EnvironmentChange, value: str) -> str:
    holder = source.part(change.part)
    if change.key is Added.ITEMS:
        return f"{holder}.extend({value})"
    if isinstance(change.key, AttributeKey):
        name = change.key.name
        place = f"{holder}.__dict__[{name!r}]"
        if change.key.access is Access.ATTRIBUTE:
            if change.deleted:
                return f"delattr({holder}, {name!r})"
            return f"object.__setattr__({holder}, {name!r}, {value})"
    elif isinstance(change.part.value, types.CellType):
        place = f"{holder}.cell_contents"
    elif change.key is None:
        source.names["refill"] = refill_sequence
        return f"refill({holder}, {value})"
    else:
        place = f"{holder}[{source.constant(change.key)}]"
    return f"del {place}" if change.deleted else f"{place} = {value}"


class SegmentWriter(RunWriter):
    """Writes `run(A, E)`, where `E` lists the values of the holes and is emptied.

    Most calls do not come to the end of a segment: arguments and state are taken out of their
    containers where something needs them, and no earlier.
    """

    _takes_over = False

    def __init__(self, schedule: Schedule, direct: bool = False) -> None:
        super().__init__(schedule, direct)
        self._kept_until = -1

    def _enter(self) -> None:
        schedule, source = self.schedule, self.source
        for position, index in enumerate(schedule.handed):
            if index in schedule.needed:
                source.line(f"v{index} = E[{position}]")
                source.emitted.add(index)
        if schedule.handed:
            source.line("E.clear()")
        for op in schedule.late:
            is_computed = op.kind is OpKind.SCALAR or op.index in schedule.same
            if not (is_computed or schedule.is_late(op)):
                raise Unlinked(f"{op} is needed, and not to be reached")

    def _depart_unless(self, number: int, guard: Guard) -> None:
        self._take_out(list(map(Ref, guard.operands)))
        if number != self.schedule.stop:
            self._leave(number, guard, guard.outcome, f"if {guard.failure(self.source)}:")
            return
        self._leave(number, guard, guard.finding, "")

    def _grow(self, position: int) -> None:
        growth = self.schedule.growths.get(position)
        if growth is None or growth.old not in self.source.emitted:
            return
        source, change = self.source, growth.change
        source.take([change.part])
        old, new, holder = f"v{growth.old}", f"v{growth.new}", source.part(change.part)
        source.line(f"if E.grows({source.bound(growth)}, {holder}, {old}, {new}):")
        source.line(f"    {_store(source, change, new)}")

    def _names_of_grown(self, index: int) -> Iterable[str]:
        for growth in self.schedule.growths.values():
            if growth.old == index and index in self.source.emitted:
                yield f"v{index}"
                if growth.part in self.source.taken:
                    yield self.source.part(growth.part)

    def _leave(self, number: int, guard: Guard, answer: str, condition: str) -> None:
        """Write how a segment is left, with the values of the holes."""
        source, holes = self.source, self.schedule.holes_at.get(number, ())
        missing = self.schedule.missing(number, source.emitted - self._forgotten)
        self._take_out([(op.args, op.kwargs) for op in missing])
        if condition:
            source.line(condition, guard.index)
            source.indent += 1
        for op in missing:  # not needed by what follows, and so not noted as there
            source.line(f"v{op.index} = {source.call(op)}", op.index)
        if holes:
            source.line(f"E += {', '.join(f'v{hole}' for hole in holes)},", guard.index)
        source.line(f"return {self._departure(number, guard, answer)}", guard.index)
        if condition:
            source.indent -= 1

    def _departure(self, number: int, guard: Guard, answer: str) -> str:
        """Return an expression for how a segment is left; for a condition, created in advance."""

        def constant(value: bool) -> str:
            name = f"leave_{number}_{value}".lower()
            self.source.names[name] = Departure(number, value, {})
            return name

        if answer in ("True", "False"):
            return constant(answer == "True")
        if isinstance(guard, TruthGuard):
            return f"{constant(True)} if v{guard.index} else {constant(False)}"
        return f"Departure({number}, {answer}, {{}})"
