"""The start of a run, to which it can be led back: what it can read, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace._compare import same_bits
from bendtrace.environment.environment import Environment
from bendtrace.errors import InputError
from bendtrace.history.copies import copied, tensors_in
from bendtrace.preserved_state import PreservedState
from bendtrace.source.internals import keeps_version
from bendtrace.tape.captured import Added, AttributeKey, CaptureKind, Change
from bendtrace.torch_rules.functions import (
    RESHAPES_IN_PLACE,
    SETTERS,
    is_named_in_place,
    known_as,
)
from bendtrace.torch_rules.writes import storage_of, version_of

__all__ = ["Random", "Start", "cannot"]

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward})


def cannot(why: str) -> InputError:
    """Return the error for a run that cannot be stepped through."""
    return InputError(f"this run cannot be stepped through: {why}")


class Random:
    """The states of all generators of random numbers that a run can draw from.

    Args:
        own: the generators that belong to the model or its arguments.
    """

    def __init__(self, own: list[torch.Generator]) -> None:
        self._common = PreservedState(_nothing)
        self._own = [(generator, generator.get_state()) for generator in own]

    def restore(self) -> None:
        """Have the same random numbers drawn again."""
        self._common.rewind()
        for generator, state in self._own:
            generator.set_state(state)


def _nothing() -> None:
    """Stand for a model that holds nothing."""


class _Held(NamedTuple):
    """A tensor that existed before the run.

    Attributes:
        label: its name.
        tensor: the tensor.
        copy: its content at the start; None for a parameter that no run writes to.
    """

    label: str
    tensor: Tensor
    copy: Tensor | None


class Start:
    """What a run can read, as it is before the run.

    Args:
        function: the model.
        bound: its arguments by name.
    """

    def __init__(self, function: Callable[..., Any], bound: dict[str, Any]) -> None:
        self._environment = Environment(function, bound)
        environment = self._environment
        self._before = dict(environment.held)
        if environment.contents is not None:
            self._before |= environment.places.before(environment.contents)
        generators = [part.value for part in environment.generators if part.value is not None]
        self._generators: list[torch.Generator] = generators
        self._random = Random(generators)
        self._held: dict[int, _Held] = {}
        self._storages: set[int] = set()
        for part in environment.parts:
            if part.kind is CaptureKind.TENSOR and isinstance(part.value, Tensor):
                tensor = part.value
                copy = None if isinstance(tensor, nn.Parameter) else copied(tensor.detach())
                self._held[id(tensor)] = _Held(part.label, tensor, copy)
                self._storages.add(storage_of(tensor))
        self._storages.discard(0)
        self._versions = self._versions_now()

    def random_now(self) -> Random:
        """Return the states of the generators now."""
        return Random(self._generators)

    def begin(self) -> None:
        """Have a run begin here.

        Raises:
            InputError: the model or the inputs are not what they were.
        """
        reasons = self._environment.blockers
        known = len(reasons)
        changed = next((change.label for change in self._environment.changes()), None)
        if len(reasons) > known:
            changed, reasons[known:] = "the model", []
        for held, version in zip(self._held.values(), self._versions, strict=True):
            if changed is None and (
                version_of(held.tensor) != version
                or (held.copy is not None and not same_bits(held.copy, held.tensor.detach()))
            ):
                changed = held.label
        if changed is not None:
            raise InputError(
                f"{changed} has changed since the run was begun, so its values are no longer "
                "those of the model: begin a new run"
            )
        self._random.restore()

    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Prepare for a call that may write to what existed before.

        Returns:
            Why the call could not be undone; "" if it can.
        """
        name = known_as(function)
        if function in _BACKWARD:
            return f"{name} adds to gradients outside of the run"
        # What is written to `data` is not counted.
        writes = is_named_in_place(name) or name in ("__setitem__", "data") or "out" in kwargs
        changes = function in SETTERS or (name in RESHAPES_IN_PLACE and name != "data")
        if not (writes or changes):
            return ""
        for tensor in tensors_in((args[:1], kwargs.get("out"))):
            if storage_of(tensor) not in self._storages:
                continue
            if changes and id(tensor) in self._held:
                return f"{name} changes more of {self._held[id(tensor)].label} than its values"
            for key, held in self._held.items():
                if held.copy is None and storage_of(held.tensor) == storage_of(tensor):
                    self._held[key] = held._replace(copy=copied(held.tensor.detach()))
        return ""

    def knows(self, label: str) -> bool:
        """Return whether a tensor that existed before the run was found when it began."""
        return any(held.label == label for held in self._held.values())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that existed before the run."""
        return storage_of(tensor) in self._storages

    def undo(self) -> None:
        """Restore what a run has changed.

        Raises:
            InputError: something cannot be restored.
        """
        blockers = list(self._environment.blockers)
        for change in list(self._environment.changes()):
            _revert(change, self._before.get(change.part.index, {}))
        left = [change.label for change in self._environment.changes()]
        new = [reason for reason in self._environment.blockers if reason not in blockers]
        self._environment.blockers[:] = blockers
        for held, version in zip(self._held.values(), self._versions, strict=True):
            if held.copy is None:
                if version_of(held.tensor) != version:
                    left.append(held.label)
            elif not same_bits(held.copy, held.tensor.detach()):
                _write(held.tensor, held.copy, version_of(held.tensor) == version)
        self._versions = self._versions_now()
        if left or new:
            raise cannot("; ".join(new or [f"it changes {label}" for label in left]))

    def _versions_now(self) -> list[int]:
        return [version_of(held.tensor) for held in self._held.values()]


def _revert(change: Change, before: dict[Any, Any]) -> None:
    """Restore what was there before a change."""
    if change.key is Added.ITEMS:
        for _ in change.value:
            change.part.value.pop()
    elif change.key is None:
        change.store([before[number] for number in range(len(before))])
    elif change.key in before:
        change.store(before[change.key])
    elif not isinstance(change.key, AttributeKey):
        del change.part.value[change.key]
    else:
        delattr(change.part.value, change.key.name)


def _write(tensor: Tensor, content: Tensor, is_uncounted: bool) -> None:
    """Restore the content of a tensor.

    A graph that has saved the tensor must raise in its backward pass, unless torch has not counted
    the write that is undone, as that of a batch norm to its statistics.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if is_uncounted and not tensor.is_inference():
            with keeps_version(tensor):
                tensor.copy_(content)
        else:
            tensor.copy_(content)
