"""Blocks under `torch.utils.checkpoint` without reentry, which the backward pass runs again.

Torch keeps nothing of such a block but its arguments. When the backward pass wants a value of it,
torch calls a function that does the block again, and takes the values in the order in which
autograd saves them. In a replay, that function carries out the recorded ops of the block, and not
the model's Python. A call may go through a block in several parts: along known code, and from a new
answer on in the model's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from torch import Tensor

from bendtrace.python.internals import internal
from bendtrace.tape.captured import Array
from bendtrace.tape.contexts import Context, ContextSwitch
from bendtrace.tape.structure import Construction, FixedObject, Instance, build_instance
from bendtrace.tape.tape import CheckpointSettings, Op, Ref

# Runs a block: it is advanced where the block begins and where it ends, so that the saved tensors
# are torch's concern. Seen in 2.13 to 2.15; torch's own compiler uses it in the same way.
checkpointed: Any = internal("torch.utils.checkpoint._checkpoint_without_reentrant_generator", None)
_Stopped: Any = internal("torch.utils.checkpoint._StopRecomputationError", Exception)
_no_contexts: Any = internal("torch.utils.checkpoint.noop_context_fn", None)


def is_plain_context(context: Any) -> bool:
    """Return whether a `context_fn` gives contexts that do nothing."""
    return context is _no_contexts


class Passage(NamedTuple):
    """A function that replaces a value in the middle of a block.

    Attributes:
        position: how many ops come before.
        guards: how many guards come before.
        op: the op that gives the value.
        function: the function.
        context: the grad mode and so on that it runs under; None for the context of the block.
    """

    position: int
    guards: int
    op: int
    function: Callable[[Any], Any]
    context: Context | None


class Portion:
    """Ops of a block that were carried out one after the other.

    Args:
        ops: the ops.
        passages: what replaces their values.
        tried: ops after whose errors the block goes on.
        write: gives code that carries all of them out, which is called with the values of `outside`
            and what switches contexts; None to go through them one by one.

    Attributes:
        outside: the ops outside of the portion whose values it uses.
        ops: as given.
        passages: in their order.
        dying: the values that are used for the last time by an op, by that.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        passages: Iterable[Passage] = (),
        tried: frozenset[int] = frozenset(),
        write: Callable[[Portion], Callable[..., None]] | None = None,
    ) -> None:
        self.ops: list[Op] = list(ops)
        self.passages: list[Passage] = sorted(passages, key=lambda one: one[:2])
        own = {op.index for op in self.ops}
        self._tried = tried & own
        self._write = None if self._tried else write
        self._code: Callable[..., None] | None = None
        used = [index for op in self.ops for index in op.operands]
        used += [passage.op for passage in self.passages]
        self.outside: tuple[int, ...] = tuple(dict.fromkeys(i for i in used if i not in own))
        last = {index: op.index for op in self.ops for index in (op.index, *op.operands)}
        for passage in self.passages:
            last[passage.op] = max(passage.position, last.get(passage.op, 0))
        self.dying: dict[int, list[int]] = {}
        for index, moment in last.items():
            self.dying.setdefault(moment, []).append(index)

    def run(self, values: Iterable[Any], stop: tuple[int, int] | None) -> None:
        """Carry it out again.

        Args:
            values: the values of `outside`.
            stop: how many ops and guards come before the place where the call left the portion;
                None if it came to the end.
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
    """A block that a call is in: torch saves nothing of it from now on.

    Args:
        settings: those of the checkpoint.
        tensors: its arguments.

    Attributes:
        function: the model's own function, if that is to be called again instead of the portions.
    """

    def __init__(self, settings: CheckpointSettings, tensors: Iterable[Tensor]) -> None:
        self.function: Callable[[], Any] | None = None
        self._portions: list[tuple[Portion, tuple[Any, ...], tuple[int, int] | None]] = []
        self._around = [keeper() for keeper in KEEPERS]
        preserves, check, debug, early_stop = settings
        self._run: Any = checkpointed(
            self._run_again, preserves, _no_contexts, check, debug, early_stop, *tensors
        )
        next(self._run)

    def goes_on(self, portion: Portion, values: tuple[Any, ...]) -> None:
        """Note what the call does next in the block.

        Args:
            portion: that.
            values: those of `Portion.outside`.
        """
        self._portions.append((portion, values, None))

    def stops(self, position: int, guards: int) -> None:
        """Note that the call left the latest portion, before it came to the end.

        Args:
            position: how many ops come before the place.
            guards: how many guards come before.
        """
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
