"""JSON files that notice when they were changed, and directories that only one writer holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from filelock import FileLock, Timeout

from bendtrace.errors import LoadError, SaveError
from bendtrace.storage.tensors import BINARY, sync_directory, write_all

__all__ = [
    "LOCK",
    "DirectoryLock",
    "read_json",
    "read_sealed",
    "replace_sealed",
    "write_file",
    "write_json",
    "writing",
]


LOCK = ".lock"  # in a directory, as long as a writer holds it; a process that is killed leaves it


class DirectoryLock:
    """A lock on a directory. The system takes it back when the process dies.

    Args:
        directory: which one.

    Raises:
        SaveError: if another writer, of this process or another one, holds it.
    """

    def __init__(self, directory: str) -> None:
        # A writer may be closed by another thread than the one that opened it.
        self._lock = FileLock(os.path.join(directory, LOCK), timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise SaveError(directory, "something else is being saved there right now") from None

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._lock.is_locked:
            # filelock notices if it has locked a file that was removed in the meantime. On Windows,
            # only filelock itself can remove it.
            with suppress(OSError):
                os.remove(self._lock.lock_file)
            self._lock.release()


def write_file(path: str, content: bytes) -> None:
    """Write a new file and bring it to the disk."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | BINARY, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> tuple[int, str]:
    """Write a new file of JSON; return its size in bytes and its SHA-256."""
    # The C encoder recurses; what is written here is never nested deeply.
    content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    write_file(path, content)
    return len(content), hashlib.sha256(content).hexdigest()


def read_json(path: str, size: int, sha256: str) -> Any:
    """Read a file of `write_json`.

    Raises:
        LoadError: if it is not there, or not what was written.
    """
    content = _read(path)
    if len(content) < size:
        raise LoadError(path, f"the file is truncated ({len(content)} bytes instead of {size})")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise LoadError(path, "the file is damaged: its checksum is not that of what was saved")
    return json.loads(content)


def replace_sealed(path: str, value: dict[str, Any], draft: str) -> None:
    """Write JSON with its own checksum, in place of what is there: all of it, or nothing.

    Args:
        path: the file.
        value: the content, without a key `sha256`.
        draft: where to write it first, on the same disk.
    """
    text = json.dumps({**value, "sha256": _seal(value)}, indent=1, allow_nan=False)
    write_file(draft, text.encode("ascii") + b"\n")
    os.replace(draft, path)
    sync_directory(os.path.dirname(path))


def read_sealed(path: str, form: str, version: int) -> dict[str, Any]:
    """Read a file of `replace_sealed`.

    Args:
        path: the file.
        form: what it has to call its format.
        version: the newest version of the format that is understood.

    Raises:
        LoadError: if it is not there, foreign, newer or damaged.
    """
    from_here = "it is not one of bendtrace's, or is damaged"
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise LoadError(path, f"{from_here}: it is no complete JSON") from None
    if not isinstance(value, dict) or value.get("format") != form:
        raise LoadError(path, f"{from_here}: it does not say that it is a {form}")
    found = value.get("version")
    if type(found) is int and found > version:
        raise LoadError(
            path,
            f"it was written by bendtrace {value.get('bendtrace', '')} in version {found} of the"
            f" format, and this one reads up to version {version}: upgrade bendtrace",
            is_newer=True,
        )
    seal = value.pop("sha256", None)
    if seal != _seal(value) or type(found) is not int or found < 1:
        raise LoadError(path, "the file is damaged: its checksum is not that of what was saved")
    return value


def _seal(value: dict[str, Any]) -> str:
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode("ascii")).hexdigest()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        reason = "the file is missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise LoadError(path, f"{reason}") from None


@contextmanager
def writing(directory: str) -> Iterator[None]:
    """Tell of files that cannot be written as of a save that fails."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(directory, error.strerror or str(error)) from error
