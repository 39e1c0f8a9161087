"""The directory of a save: how it is exchanged as a whole, and what is recognised as ours.

A save consists of `bendtrace.json` and one folder `data-...` that it names. A new save is written
to a folder of its own, and takes effect in one step: when its `bendtrace.json` takes the place of
the old one. At no moment is there neither the old nor the new.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from typing import Any

from bendtrace.errors import LoadError, SaveError
from bendtrace.storage.sealed import (
    LOCK,
    DirectoryLock,
    read_json,
    read_sealed,
    replace_sealed,
    write_json,
    writing,
)
from bendtrace.storage.streams import STREAM, STREAM_FORMAT, is_streamed, is_unfinished
from bendtrace.storage.tensors import sync_directory

__all__ = ["FORMAT", "MANIFEST", "VERSION", "Draft", "draft_in", "open_manifest"]

MANIFEST = "bendtrace.json"
FORMAT = "bendtrace log"
VERSION = 1
_DATA = re.compile(r"data-[0-9a-f]{12}")


class Draft:
    """A save that is being written.

    Attributes:
        folder: where its files go.
        files: for each file what is known of it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def path(self, name: str) -> str:
        """Return where a file of the save goes."""
        return os.path.join(self.folder, name)

    def write_json(self, name: str, value: Any) -> None:
        """Add a file of JSON."""
        size, sha256 = write_json(self.path(name), value)
        self.files[name] = {"size": size, "sha256": sha256}

    def add_tensors(self, name: str, header: str) -> None:
        """Note a file of tensors that was written.

        Args:
            name: its name.
            header: the checksum of its header.
        """
        size = os.path.getsize(self.path(name))
        self.files[name] = {"size": size, "header_sha256": header}


@contextmanager
def draft_in(directory: str, about: dict[str, Any]) -> Iterator[Draft]:
    """Write a save: the body fills it, and at the end it takes the place of the one before.

    If the body fails, what was saved before is as it was.

    Args:
        directory: where to.
        about: what to write in `bendtrace.json`; may be added to by the body.

    Raises:
        SaveError: if the directory holds other things, somebody else saves there, or it cannot
            be written to.
    """
    with writing(directory):
        _require_ours(directory)
        with _made(directory), ExitStack() as stack:
            stack.callback(DirectoryLock(directory).release)
            _require_ours(directory)
            _clean(directory)
            draft = Draft(os.path.join(directory, f"data-{secrets.token_hex(6)}"))
            try:
                os.mkdir(draft.folder)
                yield draft
                _commit(directory, draft, about)
            except BaseException:
                if not _is_current(directory, draft):
                    shutil.rmtree(draft.folder, ignore_errors=True)
                raise
            _clean(directory)


def _commit(directory: str, draft: Draft, about: dict[str, Any]) -> None:
    sync_directory(draft.folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "data": os.path.basename(draft.folder),
        "files": draft.files,
    }
    replace_sealed(os.path.join(directory, MANIFEST), manifest, draft.path(MANIFEST))


@contextmanager
def _made(directory: str) -> Iterator[None]:
    """Make a directory and those above it. If the body fails, remove those that are empty."""
    missing: list[str] = []
    path = directory
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        os.mkdir(path)
        sync_directory(os.path.dirname(path))
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                os.rmdir(path)
        raise


def _require_ours(directory: str) -> None:
    """Refuse what was not made by saving.

    Raises:
        SaveError: if the directory holds something else.
    """
    if not os.path.lexists(directory):
        return
    if not os.path.isdir(directory):
        raise SaveError(directory, "it is a file; a save is a directory")
    names = os.listdir(directory)
    if MANIFEST in names:
        try:
            _manifest(directory)
        except LoadError as error:
            if not error.is_newer:
                raise SaveError(
                    directory, f"its {MANIFEST} is no save, or damaged; delete it first"
                ) from error
    elif others := [n for n in names if not _DATA.fullmatch(n) and not is_streamed(n)]:
        shown = ", ".join(sorted(others)[:3]) + ", ..." * (len(others) > 3)
        raise SaveError(
            directory, f"it is no save and holds other files ({shown}); choose another directory"
        )


def _manifest(directory: str) -> dict[str, Any]:
    manifest = read_sealed(os.path.join(directory, MANIFEST), FORMAT, VERSION)
    if not _DATA.fullmatch(str(manifest.get("data"))) or type(manifest.get("files")) is not dict:
        raise LoadError(os.path.join(directory, MANIFEST), "the file is damaged")
    return manifest


def _is_current(directory: str, draft: Draft) -> bool:
    try:
        return bool(_manifest(directory)["data"] == os.path.basename(draft.folder))
    except LoadError:
        return False


def _clean(directory: str) -> None:
    """Delete what dead saves have left, and the save that was replaced."""
    current = None
    if os.path.lexists(os.path.join(directory, MANIFEST)):
        try:
            current = _manifest(directory)["data"]
        except LoadError:
            return  # a newer version may have folders of its own
    for name in os.listdir(directory):
        if _DATA.fullmatch(name) and name != current:
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


class Opened:
    """A save that is being read.

    Attributes:
        directory: where it is.
        manifest: what `bendtrace.json` says.
    """

    def __init__(self, directory: str, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.folder: str = os.path.join(directory, manifest["data"])

    def read_json(self, name: str) -> Any:
        """Return what a file of JSON holds.

        Raises:
            LoadError: if it is not there, or not what was written.
        """
        row = self.manifest["files"].get(name)
        path = os.path.join(self.folder, name)
        if row is None:
            raise LoadError(path, "the file is missing")
        return read_json(path, row["size"], row["sha256"])

    @property
    def headers(self) -> dict[str, str]:
        """For each file of tensors the checksum of its header."""
        files = self.manifest["files"].items()
        return {name: row["header_sha256"] for name, row in files if "header_sha256" in row}


def open_manifest(directory: str) -> Opened:
    """Find the save in a directory.

    Raises:
        LoadError: if there is none, or it is foreign, newer or damaged.
    """
    if not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise LoadError(directory, "it is a file; a save is a directory")
        raise LoadError(directory, f"there is no such directory{_near(directory)}")
    names = os.listdir(directory)
    if MANIFEST in names:
        return Opened(directory, _manifest(directory))
    if STREAM in names and is_unfinished(directory):
        raise LoadError(
            directory,
            "a run was writing its activations there and did not finish; nothing was saved",
        )
    if STREAM in names:
        raise LoadError(
            directory,
            f"it holds a {STREAM_FORMAT} of activations, but the log was not saved there;"
            " bendtrace.storage.read_stream reads the activations",
        )
    if names and all(name == LOCK or _DATA.fullmatch(name) for name in names):
        raise LoadError(directory, "the first save to it was interrupted: nothing is complete")
    raise LoadError(directory, f"it is no save of bendtrace: there is no {MANIFEST}")


def _near(directory: str) -> str:
    folder, name = os.path.split(directory)
    if not os.path.isdir(folder):
        return f", nor {folder!r}"
    near = get_close_matches(name, sorted(os.listdir(folder)), n=3)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
