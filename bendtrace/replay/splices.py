"""Splices: where a value of known code is passed through something that is inserted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bendtrace.tape.contexts import Context


@dataclass(frozen=True, eq=False)
class Splice:
    """A function that a value is passed through.

    What the function returns takes the place of the value in all that follows.

    Attributes:
        index: the op that gave the value.
        position: how many ops come before.
        guards: how many guards come before.
        context: the grad mode and so on that the function runs under; None if not known.
        function: the function.
        path: the path of the node.
        is_fit: whether code can be changed there.
    """

    index: int
    position: int
    guards: int
    context: Context | None
    function: Callable[[Any], Any]
    path: str
    is_fit: bool

    def lies_in(self, after: int, stop: int | None) -> bool:
        """Whether it belongs to the code between two guards (see `Schedule.of_segment`)."""
        return after < self.guards and (stop is None or self.guards <= stop)


class Unfit(Exception):
    """Something cannot be spliced in: a run with it has to be recorded."""


class Interrupted(Exception):
    """A call cannot go on behind a splice, so that the model's Python takes over there.

    Args:
        position: how many ops of the run come before the place.
        guards: how many guards come before.
        unfit: raised instead by a call that can begin again; None if none is to do so.
        hand_on: is called before Python takes over.
    """

    def __init__(
        self,
        position: int,
        guards: int,
        unfit: Unfit | None = None,
        hand_on: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("the call goes on in Python")
        self.position: int = position
        self.guards: int = guards
        self.unfit: Unfit | None = unfit
        self.hand_on: Callable[[], None] = hand_on
