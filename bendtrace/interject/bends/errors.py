"""What can go wrong while bending."""

from __future__ import annotations

from bendtrace.errors import InputError

__all__ = ["BendError", "BendShapeError"]


class BendError(InputError):
    """A callback cannot bend what it is given.

    Attributes:
        path: node path of what was to be bent; "" if it has none.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BendShapeError(BendError):
    """A callback that has drawn its numbers for one shape met another.

    Attributes:
        old: the shape, or the sizes along the callback's `dim`, that it has numbers for.
        new: what it met.
        candidates: values of `dim` under which its numbers would fit both.
    """

    def __init__(
        self,
        message: str,
        path: str,
        old: tuple[int, ...],
        new: tuple[int, ...],
        candidates: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, path)
        self.old = old
        self.new = new
        self.candidates = candidates
