"""Blocks under `torch.utils.checkpoint` without reentry, while a run is recorded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import NondeterminismError
from bendtrace.python.sites import user_place
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.tape.blocks import Block, Passage, Portion, is_plain_context
from bendtrace.tape.captured import EnvironmentChange
from bendtrace.tape.structure import existing_in
from bendtrace.tape.tape import Checkpoint, CheckpointSettings
from bendtrace.tape.watchers import call_silently


class Checkpoints:
    """The checkpointed blocks of a run.

    Args:
        writer: writes the tape.
        changes: lists what the run has changed so far; None if that cannot be followed.
        exchanges: whether something inserted exchanges parameters.

    Attributes:
        current: the block that the run is in.
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
        self.current: CheckpointedBlock | None = None

    def block(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Any:
        """Return an iterator that is advanced where a block begins, and where it ends.

        It is None for a block that cannot be followed.

        Args:
            function: the code of the block.
            settings: those of the checkpoint, followed by the arguments of the function.
            kwargs: further arguments of the function.
        """
        preserves, context, check, debug, early_stop, *args = settings
        if self.current is not None or not is_plain_context(context):
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
    """A block that a run goes through.

    Args:
        run: the blocks of the run.
        call: the code of the block, with its arguments.
        settings: those of the checkpoint.
        given: the tensors among the arguments.

    Attributes:
        settings: as given.
        has_gates: whether something inserted was called inside.
        passing: how many ops and guards come before the value that something inserted came to
            latest, the op that gives it, and the value.
    """

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
        self.has_gates: bool = False
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
            ops = [] if start is None else [op for op in tape.ops[start:] if op.is_work]
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
