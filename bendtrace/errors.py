"""What can go wrong, as exceptions that carry what was known when it did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bendtrace.flow import FlowStep

__all__ = [
    "BendtraceError",
    "CompileWarning",
    "ConversionError",
    "DivergenceError",
    "InputError",
    "LayerKeyError",
    "NondeterminismError",
    "NotReplayableError",
    "TraceLimitWarning",
]


class BendtraceError(Exception):
    """Base of every error that bendtrace raises on purpose."""


class InputError(BendtraceError, ValueError):
    """Something handed to bendtrace is not what it can work with."""


class LayerKeyError(BendtraceError, KeyError):
    """A log has nothing under a key.

    Attributes:
        key: what was asked for.
        near: keys that look like it.
    """

    def __init__(self, message: str, key: object, near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.near = near

    def __str__(self) -> str:  # KeyError would show it quoted
        return str(self.args[0])


class ConversionError(BendtraceError, ValueError):
    """A graph holds something that the other form of graph cannot express."""


class DivergenceError(BendtraceError, RuntimeError):
    """Inputs do not satisfy a guard of the one trace that was asked to serve them.

    Attributes:
        reason: what failed, in one line, with the recorded and the new value.
        step: the flow step whose guard failed, or None for guards on inputs and state.
    """

    def __init__(self, reason: str, step: FlowStep | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.step = step


class NotReplayableError(BendtraceError, RuntimeError):
    """A trace depends on something that no guard can watch, so only the real Python is right.

    Attributes:
        reasons: one line for each such thing, naming where it is in the source.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("this trace cannot be replayed: " + "; ".join(self.reasons))


class NondeterminismError(BendtraceError, RuntimeError):
    """Resuming a run, the model did other things than it did before with all guards equal.

    It depends on something bendtrace could not see (a clock, a file, a global that changes).
    Operations of the run may already have been carried out, so it cannot simply start anew.
    """


class CompileWarning(UserWarning):
    """The backend of a `BendedModule` does not work here.

    Nothing is wrong, but calls are replayed as they would be without a backend.
    """


class TraceLimitWarning(UserWarning):
    """A model has taken more paths than its `BendedModule` keeps.

    Nothing is wrong, but calls that are traced again and again are slower than the model itself.
    The message names what makes it diverge so often.
    """
