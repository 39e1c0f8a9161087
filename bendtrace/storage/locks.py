"""Keeping two writers out of one directory."""

from __future__ import annotations

import os
import weakref
from types import ModuleType

from bendtrace.errors import SaveError

try:
    import fcntl as _fcntl

    _locks: ModuleType | None = _fcntl
except ImportError:  # Windows has no such locks: two writers at once are not noticed there
    _locks = None

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """A lock on a directory. The system takes it back when the process dies.

    Args:
        directory: which one.

    Raises:
        SaveError: if another writer, of this process or another one, holds it.
    """

    def __init__(self, directory: str) -> None:
        if _locks is None:
            return
        fd = os.open(directory, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            _locks.flock(fd, _locks.LOCK_EX | _locks.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise SaveError(directory, "something else is being saved there right now") from None
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if _locks is not None:
            self._close()
