"""What goes wrong with patches."""

from __future__ import annotations

from bendtrace.errors import InputError

__all__ = ["PatchError"]


class PatchError(InputError):
    """A patch does not fit the value at its node, or does with it what it must not.

    Attributes:
        path: path of the node; "" where a patch was called by itself.
        expected: what would have fitted: `Tensor(2, 3)`.
        got: what was there.
    """

    def __init__(self, message: str, *, path: str = "", expected: str = "", got: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got
