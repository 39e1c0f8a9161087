"""Who is shown the values of a run while they are there: what keeps activations, for one."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from bendtrace.recording.tape import ModuleCall, Op

__all__ = ["Observer", "StopRun"]


class StopRun(BaseException):
    """Ends a run early; raised by an observer, and by nothing else.

    Not an `Exception`, so that the model's own handlers let it pass.
    """


class Observer(Protocol):
    """Is shown the values of a run. What it does with torch is not recorded."""

    ended: str  # where the run was ended early; "" if it was not
    times: dict[int, int]  # nanoseconds that each op took; filled in by who carries them out

    def given(self, op: Op, tensor: Tensor) -> None:
        """Called for each tensor among the arguments of the run."""

    def state(self, op: Op, tensor: Tensor) -> None:
        """Called for each tensor that was there before the run, when it is first used."""

    def reads(self, position: int, index: int, tensor: Tensor) -> None:
        """Called with a tensor that was written to since op `index` gave it, before it is read.

        By the op at a position of the tape, or by the caller of the run, at its end.
        """

    def heeds(self, function: Any) -> bool:
        """Whether it has to be told each time before a function is called without an `out`."""

    def begins(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Called before an op is carried out, with what the function is given."""

    def gave(self, op: Op, out: Any) -> None:
        """Called with what an op gave."""

    def wrote(self, op: Op, tensor: Tensor) -> None:
        """Called with the tensor that an op has written to, if it gave none."""

    def left(self, call: ModuleCall, output: Any) -> None:
        """Called when a module's call has ended."""

    def escaped(self, value: Any) -> None:
        """Called with what is handed to code that may keep a pointer to its memory."""
