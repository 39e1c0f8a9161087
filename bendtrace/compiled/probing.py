"""One run of a path, op by op, that finds out what compiling it would have to know."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bendtrace.recording.contexts import ContextSwitch
from bendtrace.recording.parts import identical
from bendtrace.recording.recorder import Recording
from bendtrace.recording.structure import Instance
from bendtrace.recording.tape import Guard, Op, OpKind, Ref, Test, kind_of
from bendtrace.recording.writes import storage_of

__all__ = ["Findings", "Refusal", "probe"]


class Refusal(Exception):
    """Why a path is not compiled, in a sentence."""


@dataclass(frozen=True)
class Findings:
    """What is known of a path after a probe.

    Attributes:
        dynamic: ops whose result has a size, or is a number, that depends on values, or may.
        roots: those of them where that begins, and what they gave: sizes, or the number.
        first: for each op that gave a tensor, the first op that gave the very same one.
        writes: whether it writes into tensors that it made itself.
    """

    dynamic: frozenset[int]
    roots: dict[int, Any]
    first: dict[int, int]
    writes: bool


def probe(recording: Recording, arguments: tuple[Any, ...]) -> Findings | None:
    """Carry out a path and look at what its ops do. Nothing outside of it is changed.

    Args:
        recording: the path; none of its ops is Python's own or a user's (see `eligible`).
        arguments: the bound arguments of a call, for which the input guards hold.

    Returns:
        What was found; None if the arguments lead another way.

    Raises:
        Refusal: an op writes to what was there before, or draws random numbers.
    """
    states = _random_states()
    try:
        return _Probe(recording, arguments).run()
    finally:
        if any(not torch.equal(*pair) for pair in zip(states, _random_states(), strict=True)):
            torch.set_rng_state(states[0])
            for device, state in enumerate(states[1:]):
                torch.cuda.set_rng_state(state, device)
            raise Refusal("it draws random numbers")


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


class _Probe:
    def __init__(self, recording: Recording, arguments: tuple[Any, ...]) -> None:
        self._tape = recording.tape
        self._arguments = arguments
        self._values: dict[int, Any] = {}
        self._dynamic: set[int] = set()
        self._roots: dict[int, Any] = {}
        self._protected: set[int] = set()
        self._names: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._first: dict[int, int] = {}
        self._dying: dict[int, list[int]] = {}  # by position, whom nothing needs any more
        last: dict[int, int] = {}
        for op in recording.tape.ops:
            last.update(dict.fromkeys(op.operands, op.index))
        for guard in recording.tape.guards:
            for index in _looked_at(guard):
                last[index] = max(guard.position, last.get(index, 0))
        for index, position in last.items():
            self._dying.setdefault(position, []).append(index)

    def run(self) -> Findings | None:
        for op in self._tape.ops:
            if op.is_given:
                self._take(op)
        guards: dict[int, list[Guard]] = {}
        for guard in self._tape.guards:
            guards.setdefault(guard.position, []).append(guard)
        switch = ContextSwitch()
        mode = _Watch(self._protected)
        try:
            for position in range(len(self._tape.ops) + 1):
                if not all(map(self._holds, guards.get(position, ()))):
                    return None
                if position < len(self._tape.ops):
                    op = self._tape.ops[position]
                    if op.is_work:
                        self._carry_out(op, switch, mode)
                for index in self._dying.get(position, ()):
                    del self._values[index]
        except Refusal:
            raise
        except Exception:  # the arguments are such that the model raises
            return None
        finally:
            switch.restore()
        return Findings(frozenset(self._dynamic), self._roots, self._first, mode.wrote)

    def _take(self, op: Op) -> None:
        value = op.target.read(self._arguments)
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or value.layout is not torch.strided:
                raise Refusal(f"{op.target.label} is no plain dense tensor")
            self._protected.add(storage_of(value))
            self._note(op.index, value)
        self._values[op.index] = value

    def _carry_out(self, op: Op, switch: ContextSwitch, mode: _Watch) -> None:
        if op.kind is OpKind.CALL:
            switch.to(op.context)
        args, kwargs = self._given(op.args), self._given(op.kwargs)
        mode.dynamic = False
        with mode:
            value = op.target(*args, **kwargs)
        self._values[op.index] = value
        if mode.dynamic:
            self._roots[op.index] = _extent(value)
        if mode.dynamic or not self._dynamic.isdisjoint(op.operands):
            self._dynamic.add(op.index)
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or value.layout is not torch.strided:
                raise Refusal("it computes with tensors that are not plain dense ones")
            self._note(op.index, value)

    def _given(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._values[value.index]
        if isinstance(value, Instance):  # a tuple of some kind: see `eligible`
            return tuple(map(self._given, value.items))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._given, value))
        if isinstance(value, dict):
            return {key: self._given(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._given, (value.start, value.stop, value.step)))
        return value

    def _note(self, index: int, value: Tensor) -> None:
        known = self._names.get(id(value))
        if known is None or known[1]() is not value:  # one that is gone had the same id
            known = self._names[id(value)] = index, weakref.ref(value)
        self._first[index] = known[0]

    def _holds(self, guard: Guard) -> bool:
        value = self._values[guard.index]
        if guard.test is Test.TRUTH:
            return bool(value) is guard.expected
        if guard.test is Test.LENGTH:
            return bool(len(value) == guard.expected)
        if guard.test is Test.KIND:
            return bool(kind_of(value) == guard.expected)
        if guard.test is Test.RANK:
            return bool(value.dim() == guard.expected)
        if guard.is_on_identity:
            return (value is self._values[guard.expected]) is (guard.test is Test.SAME)
        return identical(value, guard.expected)


class _Watch(TorchDispatchMode):
    """Sees what each op comes down to, by the schemas of torch's own operators.

    Attributes:
        dynamic: whether the sizes of a result depended on values.
        wrote: whether anything was written to.
    """

    def __init__(self, protected: set[int]) -> None:
        super().__init__()
        self._protected = protected
        self.dynamic = False
        self.wrote = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise Refusal(f"it draws random numbers ({func})")
        for name, tensor in _written(func, args, kwargs):
            self.wrote = True
            if storage_of(tensor) in self._protected:
                raise Refusal(f"it writes to what was there before the run ({func}, {name})")
        # An index of tensors has that tag for the sake of masks.
        if torch.Tag.dynamic_output_shape in func.tags and (
            func.overloadpacket is not torch.ops.aten.index or _has_mask(args[1])
        ):
            self.dynamic = True
        if torch.Tag.data_dependent_output in func.tags:
            self.dynamic = True
        return func(*args, **kwargs)


def _extent(value: Any) -> Any:
    """The sizes of what an op gave, or the numbers themselves."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_extent, value))
    return value


def _looked_at(guard: Guard) -> tuple[int, ...]:
    if guard.is_on_identity:
        return guard.index, guard.expected
    return (guard.index,)


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, Tensor):
                yield argument.name, value


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that can draw random numbers does: attention without dropout does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, 0.0)
            return bool(given)
    return True


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, Tensor) and index.dtype in masks for index in indices)


_PLAIN = frozenset({Tensor, nn.Parameter})
