"""Splices: what is called at a gate, as steps of a compiled path.

A gate calls Python that a compiler cannot see into. A *splice* says the same in other words: which
functions of tensors are applied to which of the gate's values, and which values somebody wants to
look at. A path is compiled with the splices of its gates in it. The tensors that the functions
need besides the values are inputs of the graph, and the values to be looked at are outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bendtrace.recording.recorder import Recording

__all__ = ["Inserted", "Splice", "Spliced", "Step", "applied", "differs"]


@dataclass(frozen=True, eq=False)
class Step:
    """One insertion at a gate.

    Attributes:
        slots: which of the gate's values it is about.
        function: given the value and `tensors`, returns the new one, or None to keep it, followed
            by `kept` tensors in a tuple if there are any; None for a step that only looks.
        tensors: what the function needs besides the value.
        kept: how many tensors the function returns besides the new value.
        check: given the same, says why the function cannot be compiled; None if it can be. It is
            asked once, with the values of a call.
    """

    slots: tuple[int, ...]
    function: Callable[..., Any] | None = None
    tensors: tuple[Tensor, ...] = ()
    kept: int = 0
    check: Callable[..., str | None] | None = None


@dataclass(frozen=True, eq=False)
class Splice:
    """What is called at one gate.

    Attributes:
        steps: the insertions, in the order in which they are called.
        exchanged: which of the values the gate gives.
        in_place: what it gives besides, if anything.
    """

    steps: tuple[Step, ...]
    exchanged: tuple[int, ...]
    in_place: bool | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the functions of all steps need."""
        return tuple(tensor for step in self.steps for tensor in step.tensors)

    def given(self, values: Sequence[Any]) -> Any:
        """Return what the gate gives when its values are these in the end."""
        given = [values[slot] for slot in self.exchanged]
        if self.in_place is not None:
            return (*given, self.in_place)
        return given[0] if len(given) == 1 else tuple(given)


class Spliced(Protocol):
    """The splices of one path for the insertions of one call."""

    @property
    def key(self) -> Hashable:
        """What two calls have in common that the same graph serves."""

    @property
    def splices(self) -> dict[int, Splice]:
        """The splices, by the numbers of the gates' ops."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What their functions need, in order."""

    def served(
        self, kept: Sequence[Any], changed: Tensor | None, unchanged: frozenset[int]
    ) -> None:
        """Have the insertions take note of what a graph did in their place.

        Args:
            kept: the values that steps wanted to look at, in order.
            changed: for each function, whether it has changed its value.
            unchanged: the numbers of the functions that give the very tensor that they are given.
        """


class Inserted(Protocol):
    """What is inserted in a call."""

    @property
    def places(self) -> Hashable:
        """Where: what two calls have in common that can take the same paths."""

    def along(self, recording: Recording) -> Spliced | str:
        """Return the splices of a path, or why there is a gate that cannot be compiled."""

    def ran(self, recording: Recording) -> None:
        """Note that a call took a path."""


def applied(step: Step, value: Any, tensors: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what a step makes of a value, and what it keeps."""
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
