"""What can go wrong on disk."""

from __future__ import annotations

import os

from bendtrace.errors import BendtraceError

__all__ = ["LoadError", "SaveError"]


class LoadError(BendtraceError, ValueError):
    """A directory or file holds no save, or one that is damaged, unfinished or too new.

    Attributes:
        path: the directory or file.
        is_newer: whether it was written in a version of the format that is not known here.
    """

    def __init__(
        self, path: str | os.PathLike[str], reason: str, *, is_newer: bool = False
    ) -> None:
        self.path = os.fspath(path)
        self.is_newer = is_newer
        super().__init__(f"cannot load {self.path!r}: {reason}")


class SaveError(BendtraceError, OSError):
    """Nothing was saved: the directory is not ours to write to, in use, or could not be written.

    What was saved there before is as it was.

    Attributes:
        path: the directory or file.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        super().__init__(f"cannot save to {self.path!r}: {reason}")
