"""The start of a run, to which it can be led back: what it can read, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace._compare import same_bits
from bendtrace.errors import InputError
from bendtrace.history.copies import copied, tensors_in
from bendtrace.preserved_state import ModelState, PreservedState, no_model
from bendtrace.torch_rules.draws import restorer_of
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

    def __init__(self, own: list[Any]) -> None:
        self._common = PreservedState(no_model)
        self._own = [*map(restorer_of, own)]

    def restore(self) -> None:
        """Have the same random numbers drawn again."""
        self._common.rewind()
        for restore in self._own:
            restore()


class Start(ModelState):
    """What a run can read, as it is before the run.

    Args:
        function: the model.
        bound: its arguments by name.

    Raises:
        InputError: it holds something that cannot be restored.
    """

    def __init__(self, function: Callable[..., Any], bound: dict[str, Any]) -> None:
        super().__init__(function, bound, lambda reasons: cannot("; ".join(reasons)))
        self.require_restorable()
        self._random = Random(self.generators)

    def random_now(self) -> Random:
        """Return the states of the generators now."""
        return Random(self.generators)

    def begin(self) -> None:
        """Have a run begin here.

        Raises:
            InputError: the model or the inputs are not what they were.
        """
        environment = self._environments[0]
        reasons = environment.blockers
        known = len(reasons)
        changed = next((change.label for change in environment.changes()), None)
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
