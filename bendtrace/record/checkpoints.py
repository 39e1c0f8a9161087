"""Blocks under `torch.utils.checkpoint` without reentry, which the backward pass runs again.

Torch keeps nothing of such a block but its arguments. When the backward pass wants a value of it,
torch calls a function that does the block again, and takes the values in the order in which
autograd saves them. In a replay, that function carries out the recorded ops of the block, and not
the model's Python. A call may go through a block in several parts: along known code, and from a new
answer on in the model's Python.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bendtrace.errors import NondeterminismError
from bendtrace.python.internals import internal
from bendtrace.python.sites import user_place
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.tape.captured import Array, EnvironmentChange
from bendtrace.tape.contexts import Context, ContextSwitch
from bendtrace.tape.structure import (
    Construction,
    FixedObject,
    Instance,
    build_instance,
    existing_in,
)
from bendtrace.tape.tape import Checkpoint, CheckpointSettings, Op, Ref, Tape
from bendtrace.tape.watchers import call_silently


class Checkpoints:
    """The checkpointed blocks of a run.

    `changes` lists what the run has changed so far, None if that cannot be followed; `exchanges`
    says whether something inserted exchanges parameters.
    """

    def __init__(
        self,
        writer: TapeWriter,
        changes: Callable[[], list[EnvironmentChange] | None],
        exchanges: Callable[[], bool],
    ) -> None:
        self.writer: TapeWriter = writer
        self.changes: Callable[[], list[EnvironmentChange] | None] = changes
        self.exchanges: Callable[[], bool] = exchanges
        self.current: CheckpointedBlock | None = None  # the block that the run is in

    def block(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Any:
        """Return an iterator that is advanced where a block begins, and where it ends.

        It is None for a block that cannot be followed. The settings are followed by the arguments
        of the function.
        """
        preserves, context, check, debug, early_stop, *args = settings
        if self.current is not None or context is not _no_contexts:
            return None
        call = functools.partial(function, *args, **kwargs)
        given = [value for value in args if isinstance(value, Tensor)]
        return CheckpointedBlock(
            self, call, CheckpointSettings(preserves, check, debug, early_stop), given
        )

    def passes(self, index: int, value: Tensor) -> None:
        """Note that something inserted is about to replace a value."""
        if self.current is not None:
            tape = self.writer.tape
            self.current.passing = len(tape.ops), len(tape.guards), index, value

    def note_replacement(self, gate: Callable[[Any], Any]) -> None:
        """Note what has replaced the latest value that something inserted came to."""
        if self.current is not None:
            self.current.note(gate)

    def note_gate(self) -> None:
        """Note that an op calls something inserted."""
        if self.current is not None:
            self.current.has_gates = True


class CheckpointedBlock:
    """A block that a run goes through; the tensors are those among the arguments of its call."""

    def __init__(
        self,
        run: Checkpoints,
        call: Callable[[], Any],
        settings: CheckpointSettings,
        given: Sequence[Tensor],
    ) -> None:
        self._run = run
        self._writer = run.writer
        self._call = call
        self.settings: CheckpointSettings = settings
        self._given = given
        self._begin: tuple[int, int] | None = None
        self._block: Block | None = None
        self._before: list[EnvironmentChange] | None = None
        self._tensors: tuple[int, ...] = ()
        self._passages: list[Passage] = []
        self._originals: dict[int, Tensor] = {}
        self.has_gates: bool = False  # whether something inserted was called inside
        # How many ops and guards come before the value that something inserted came to latest, the
        # op that gives it, and the value.
        self.passing: tuple[int, int, int, Tensor] | None = None

    def state_parts(self) -> CheckpointSettings:
        """Return the values that a state consists of in which this is."""
        return self.settings

    def __next__(self) -> None:
        with torch._C.DisableTorchFunction():
            if self._begin is None:
                return self._begins()
            self._ends()
        raise StopIteration

    def throw(self, error: BaseException) -> None:
        """Leave the block by an error."""
        self._run.current = None
        self._writer.tape.block(
            f"an error leaves a checkpointed block at {user_place(sys._getframe(1))}"
        )
        if (block := self._open_block()) is not None:
            call_silently(block.give_up, (), {})
        raise error

    def note(self, gate: Callable[[Any], Any]) -> None:
        """Note what has replaced the value that something inserted came to latest."""
        assert self.passing is not None
        position, guards, index, value = self.passing
        self.has_gates, self.passing = True, None
        self._passages.append(Passage(position, guards, index, gate, None))
        self._originals.setdefault(index, value)

    def _here(self) -> tuple[int, int]:
        return len(self._writer.tape.ops), len(self._writer.tape.guards)

    def _begins(self) -> None:
        writer, script = self._writer, self._writer.script
        if writer.context().settings:
            place = user_place(sys._getframe(1))
            writer.tape.block(f"a checkpointed block at {place} begins under changed settings")
        self._run.current, self._begin = self, self._here()
        self._before = self._run.changes()
        tracked = (writer.tracked.get(id(tensor)) for tensor in self._given)
        refs = (one.ref for one in tracked if one is not None)
        self._tensors = tuple(ref.index for ref in refs if ref is not None)
        if script is None or not script.is_active:
            self._block = call_silently(Block, (self.settings, self._given), {})

    def _ends(self) -> None:
        tape, begin = self._writer.tape, self._begin
        assert begin is not None
        self._run.current = None
        place = user_place(sys._getframe(1))
        has_changed = self._has_changed(self._run.changes())
        if has_changed:
            tape.block(f"a checkpointed block at {place} changes state outside of it")
        gives_objects = any(
            next(existing_in((op.args, op.kwargs)), None) for op in tape.ops[begin[0] :]
        )
        if gives_objects:
            tape.block(f"a checkpointed block at {place} gives an object to code that is one op")
        tape.blocks.append(Checkpoint(begin, self._here(), self.settings, self._tensors))
        if (block := self._open_block()) is None:
            return
        if self._block is not None and not (self.has_gates or self._run.exchanges()):
            block.function = self._call
        else:
            if has_changed or gives_objects:  # only the model's own function could do it again
                call_silently(block.give_up, (), {})
                what = "changes state outside of it" if has_changed else "gives an object to code"
                raise NondeterminismError(
                    f"a checkpointed block at {place} {what}, in a call that cannot have the "
                    "backward pass do so again: take that out of the block"
                )
            start = begin[0] if self._block is not None else self._writer.resumed_at
            ops = [] if start is None else _work_from(tape, start)
            tried = frozenset(op.index for op in ops if op.raised is not None)
            portion = Portion(ops, self._passages, tried)
            block.goes_on(portion, tuple(map(self._value, portion.outside)))
        call_silently(block.end, (), {})

    def _open_block(self) -> Block | None:
        """Return the block that was begun in Python, or by the replay that Python goes on from."""
        script = self._writer.script
        if self._block is not None or script is None or script.is_active:
            return self._block
        opened: Block | None = script.hold.block
        script.hold.block = None
        return opened

    def _has_changed(self, now: list[EnvironmentChange] | None) -> bool:
        before = self._before
        if before is None or now is None or len(before) != len(now):
            return True  # or nobody can tell
        return any(
            (was.part, was.key, was.deleted) != (one.part, one.key, one.deleted)
            or was.value is not one.value
            for was, one in zip(before, now, strict=True)
        )

    def _value(self, index: int) -> Any:
        """Return the value of an op that was carried out before the portion."""
        if index in self._originals:
            return self._originals[index]
        writer = self._writer
        if writer.script is not None and index in writer.script.of_block:
            return writer.script.of_block[index]
        op = writer.tape.ops[index]
        if type(op.meta) in (int, float, bool):
            return op.meta
        first = writer.aliases.get(index, index)
        for tracked in writer.tracked.values():
            tensor = tracked()
            if tensor is not None and tracked.ref is not None:
                if first == writer.aliases.get(tracked.ref.index, tracked.ref.index):
                    return tensor
        if op.is_given and isinstance(op.target.value, Tensor):
            return op.target.value
        raise NondeterminismError(
            f"the backward pass would need {op}, which a checkpointed block has used and let go"
        )


def _work_from(tape: Tape, start: int) -> list[Op]:
    """Return the operations from a position on.

    An element of an earlier result, such as a row of `x.unbind(0)`, is named where it is first
    used. It is a value from before: the result as a whole may have been let go.
    """
    found: list[Op] = []
    earlier: set[int] = set()
    for op in tape.ops[start:]:
        if op.is_element and (op.operands[0] < start or op.operands[0] in earlier):
            earlier.add(op.index)
        elif op.is_work:
            found.append(op)
    return found


# A block in a call, recorded or replayed

# Runs a block: it is advanced where the block begins and where it ends, so that the saved tensors
# are torch's concern. Seen in 2.13 to 2.15; torch's own compiler uses it in the same way.
checkpointed: Any = internal("torch.utils.checkpoint._checkpoint_without_reentrant_generator", None)
_Stopped: Any = internal("torch.utils.checkpoint._StopRecomputationError", Exception)
_no_contexts: Any = internal("torch.utils.checkpoint.noop_context_fn", None)


class Passage(NamedTuple):
    """A function that replaces a value in the middle of a block."""

    position: int  # how many ops come before
    guards: int  # how many guards come before
    op: int  # the op that gives the value
    function: Callable[[Any], Any]
    context: Context | None  # grad mode and so on that it runs under; None for the block's


class Portion:
    """Ops of a block that were carried out one after the other.

    Passages replace their values; after errors of those in `tried`, the block goes on. `write`
    gives code that carries all of them out, which is called with the values of `outside` and what
    switches contexts; None to go through them one by one.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        passages: Iterable[Passage] = (),
        tried: frozenset[int] = frozenset(),
        write: Callable[[Portion], Callable[..., None]] | None = None,
    ) -> None:
        self.ops: list[Op] = list(ops)
        self.passages: list[Passage] = sorted(passages, key=lambda one: one[:2])  # in their order
        own = {op.index for op in self.ops}
        self._tried = tried & own
        self._write = None if self._tried else write
        self._code: Callable[..., None] | None = None
        used = [index for op in self.ops for index in op.operands]
        used += [passage.op for passage in self.passages]
        # The ops outside of the portion whose values it uses.
        self.outside: tuple[int, ...] = tuple(dict.fromkeys(i for i in used if i not in own))
        last = {index: op.index for op in self.ops for index in (op.index, *op.operands)}
        for passage in self.passages:
            last[passage.op] = max(passage.position, last.get(passage.op, 0))
        self.dying: dict[int, list[int]] = {}  # values by the op that uses them last
        for index, moment in last.items():
            self.dying.setdefault(moment, []).append(index)

    def run(self, values: Iterable[Any], stop: tuple[int, int] | None) -> None:
        """Carry it out again, with the values of `outside`.

        Until `stop`, so many ops and guards come before the place where the call left the portion.
        """
        switch = ContextSwitch()
        try:
            if stop is None and self._write is not None:
                self._code = self._code or self._write(self)
                self._code(values, switch)
            else:
                self._go_through(dict(zip(self.outside, values, strict=True)), stop, switch)
        finally:
            switch.restore()

    def _go_through(
        self, values: dict[int, Any], stop: tuple[int, int] | None, switch: ContextSwitch
    ) -> None:
        passages = list(self.passages)
        for op in self.ops:
            if stop is not None and op.index >= stop[0]:
                break
            while passages and passages[0].position <= op.index:
                _pass_through(passages.pop(0), values, switch)
            switch.to(op.context)
            try:
                values[op.index] = op.target(
                    *_replayed_arguments(op.args, values), **_replayed_arguments(op.kwargs, values)
                )
            except _Stopped:
                raise
            except Exception as error:
                if op.index not in self._tried:
                    raise
                values[op.index] = error.with_traceback(None)
            for index in self.dying.get(op.index, ()):
                values.pop(index, None)
        for passage in passages:
            if stop is None or passage[:2] <= stop:
                _pass_through(passage, values, switch)


def _pass_through(passage: Passage, values: dict[int, Any], switch: ContextSwitch) -> None:
    if passage.context is not None:
        switch.to(passage.context)
    values[passage.op] = passage.function(values[passage.op])


def _replayed_arguments(value: Any, values: dict[int, Any]) -> Any:
    """Return the arguments that recorded ones stand for."""
    kind = type(value)
    if kind is Ref:
        return values[value.index]
    if kind is tuple or kind is list:
        return kind([_replayed_arguments(item, values) for item in value])
    if kind is dict:
        return {key: _replayed_arguments(item, values) for key, item in value.items()}
    if kind is slice:
        return slice(*_replayed_arguments((value.start, value.stop, value.step), values))
    if kind is FixedObject:
        return value.value
    if kind is Construction:
        return value.maker(*_replayed_arguments(value.args, values))
    if kind is Instance:
        return build_instance(
            value.cls,
            _replayed_arguments(value.items, values),
            _replayed_arguments(value.attributes, values),
        )
    if kind is Array:
        array = value.value.copy("K")
        array.flags.writeable = value.is_writeable
        return array
    return value


# Each gives a function that makes contexts in which something that holds now holds again.
KEEPERS: list[Callable[[], Callable[[], AbstractContextManager[None]]]] = []


class Block:
    """A block that a call is in: torch saves nothing of it from now on."""

    def __init__(self, settings: CheckpointSettings, tensors: Iterable[Tensor]) -> None:
        # The model's own function, if that is to be called again instead of the portions.
        self.function: Callable[[], Any] | None = None
        self._portions: list[tuple[Portion, tuple[Any, ...], tuple[int, int] | None]] = []
        self._around = [keeper() for keeper in KEEPERS]
        preserves, check, debug, early_stop = settings
        self._run: Any = checkpointed(
            self._run_again, preserves, _no_contexts, check, debug, early_stop, *tensors
        )
        next(self._run)

    def goes_on(self, portion: Portion, values: tuple[Any, ...]) -> None:
        """Note the portion that the call does next, with the values for its `outside`."""
        self._portions.append((portion, values, None))

    def stops(self, position: int, guards: int) -> None:
        """Note that the call left the latest portion behind so many ops and guards."""
        if self._portions:
            portion, values, _ = self._portions[-1]
            self._portions[-1] = portion, values, (position, guards)

    def end(self) -> None:
        """End the block."""
        run, self._run = self._run, None
        next(run, None)

    def give_up(self) -> None:
        """Leave the block without having come to its end."""
        run, self._run = self._run, None
        run.close()

    def _run_again(self, *_: Any) -> None:
        if self.function is not None:
            self.function()
            return
        with ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around())
            for portion, values, stop in self._portions:
                portion.run(values, stop)
