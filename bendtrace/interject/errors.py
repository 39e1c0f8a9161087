"""What can go wrong with insertions."""

from __future__ import annotations

from bendtrace.errors import BendtraceError

__all__ = ["InterjectionError", "NeverFiredWarning"]


class InterjectionError(BendtraceError, TypeError):
    """What an interjection gave cannot take the place of the node's value.

    Attributes:
        path: the node.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class NeverFiredWarning(UserWarning):
    """The context of an insertion has ended, and no run came by a node that it is for."""
