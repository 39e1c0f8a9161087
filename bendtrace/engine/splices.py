"""Splices: the insertions at a gate, as steps of a compiled path.

A gate calls Python that a compiler cannot see into. A *splice* expresses the same as functions of
tensors that are applied to some of the gate's values, and as values that an observer wants. A path
is compiled together with the splices of its gates. The other tensors that the functions need are
inputs of the graph, and the observed values are outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SpliceStep:
    """One insertion at a gate."""

    slots: tuple[int, ...]  # the positions of its values among those of the gate
    # Given the value and `tensors`, returns the new one, or None to keep it, followed by `kept`
    # tensors in a tuple if there are any; None for a step that only looks.
    function: Callable[..., Any] | None = None
    tensors: tuple[Tensor, ...] = ()  # the other tensors that the function needs
    kept: int = 0  # the number of tensors that the function returns after the new value
    # Given the same, says why the function cannot be compiled; None if it can be. It is asked once,
    # with the values of a call.
    check: Callable[..., str | None] | None = None


@dataclass(frozen=True, eq=False)
class GateSplice:
    """The insertions at one gate."""

    steps: tuple[SpliceStep, ...]  # the insertions, in the order in which they are called
    exchanged: tuple[int, ...]  # the positions of the values that the gate returns
    in_place: bool | None  # the flag that it returns after them; None if it returns none

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The other tensors that the functions of all steps need."""
        return tuple(tensor for step in self.steps for tensor in step.tensors)

    def gate_result(self, values: Sequence[Any]) -> Any:
        """Return the result of the gate for the final values."""
        given = [values[slot] for slot in self.exchanged]
        if self.in_place is not None:
            return (*given, self.in_place)
        return given[0] if len(given) == 1 else tuple(given)


def apply_step(
    step: SpliceStep, value: Any, tensors: Sequence[Tensor]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the new value of a step, and the tensors that it keeps."""
    assert step.function is not None
    made = step.function(value, *tensors)
    kept: tuple[Tensor, ...] = ()
    if step.kept:
        made, *rest = made
        kept = tuple(rest)
    return (value if made is None else made), kept


def differs(old: Tensor, new: Tensor) -> Tensor:
    """Return whether two tensors differ, as a tensor."""
    if new is old:
        return torch.zeros((), dtype=torch.bool, device=old.device)
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        return torch.ones((), dtype=torch.bool, device=old.device)
    old, new = old.detach(), new.detach()
    if not (old.is_floating_point() or old.is_complex()):
        return (old != new).any()
    return ((old != new) & ((old == old) | (new == new))).any()
