"""What inductor has compiled, kept in a directory for the processes that come later.

For each path there is an entry: the sources that inductor has written, the libraries that a C++
compiler has made of them, and a manifest with the checksum of each. A process works on a copy of
its own, and adds an entry in one step, so that several can share the directory. What inductor
pickles is neither kept nor read: it finds a library by the text that it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bendtrace.errors import CompileWarning, LoadError
from bendtrace.source.sites import users_level
from bendtrace.storage.sealed import read_sealed, replace_sealed

__all__ = ["Artefacts"]

_FORMAT, _VERSION = "bendtrace artefacts", 1
_MANIFEST = "bendtrace.json"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # names inductor's directory, torch 2.13 to 2.15
_NOT_KEPT = frozenset({"aotautograd", "fxgraph", "locks"})  # pickles, and what is of no use later
# Pickles; and headers, which are compiled beforehand, and looked at by the C++ compiler each time.
_OFF = ("fx_graph_cache", "cpp_cache_precompile_headers")
_one_at_a_time = threading.RLock()  # the directory is that of the process


class Artefacts:
    """Compiled code in a directory.

    Args:
        directory: the directory; it is made when something is first kept.
        settings: how code is compiled, as plain values.

    Attributes:
        directory: as given.
        notes: the result for each path, one line each.
    """

    def __init__(self, directory: str, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self.notes: list[str] = []
        self._unusable: list[str] = []
        self._facts = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{sys.platform} {platform.machine()}",
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "settings": json.dumps(settings, sort_keys=True, default=repr),
        }

    @contextmanager
    def used(self, text: str) -> Iterator[None]:
        """Within it, inductor finds what was compiled for a text, and adds what was not.

        Args:
            text: the source of what is compiled.
        """
        code = hashlib.sha256(text.encode()).hexdigest()
        name = f"path-{hashlib.sha256(f'{code}{self._facts}'.encode()).hexdigest()[:16]}"
        with _one_at_a_time, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
            known = self._taken(name, code, own)
            with _inductor_in(own, is_new=known is None):
                yield
            found = _files_in(own)
            if found and found.keys() != known:
                self._keep(name, code, own, found)

    def warn(self) -> None:
        """Warn of entries that could not be used: after compiling, whose warnings are hidden."""
        while self._unusable:
            warnings.warn(CompileWarning(self._unusable.pop(0)), stacklevel=users_level())

    def _taken(self, name: str, code: str, own: str) -> set[str] | None:
        """Copy an entry; return the names of its files, or None if no entry is complete."""
        entry = os.path.join(self.directory, name)
        if not os.path.lexists(entry):
            self.notes.append(f"{name}: compiled{self._unlike(code)}")
            return None
        try:
            manifest = read_sealed(os.path.join(entry, _MANIFEST), _FORMAT, _VERSION)
            if manifest.get("facts") != self._facts or manifest.get("code") != code:
                raise LoadError(entry, "it is the entry of another path")
            files: dict[str, str] = manifest["files"]
            for file, digest in files.items():
                if not _is_inside(file):
                    raise LoadError(entry, f"{file!r} is no name of a file in it")
                content = _content(os.path.join(entry, file))
                if hashlib.sha256(content).hexdigest() != digest:
                    raise LoadError(entry, f"{file} is damaged: its checksum is another")
                target = os.path.join(own, file)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as made:
                    made.write(content)
        except (LoadError, OSError, KeyError, AttributeError) as error:
            for item in os.listdir(own):
                shutil.rmtree(os.path.join(own, item), ignore_errors=True)
            said = str(error).strip("'\"")
            self.notes.append(f"{name}: compiled again, since what was kept cannot be used: {said}")
            self._unusable.append(f"what was kept in {entry} is not used, and made anew: {said}")
            return None
        self.notes.append(f"{name}: taken from {self.directory}")
        return set(files)

    def _unlike(self, code: str) -> str:
        """Say by what entries for the same source differ."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return ""
        for name in names:
            try:
                known = read_sealed(
                    os.path.join(self.directory, name, _MANIFEST), _FORMAT, _VERSION
                )
            except LoadError:
                continue
            facts = known.get("facts")
            if known.get("code") == code and isinstance(facts, dict):
                other = [
                    f"{key} {facts.get(key)!r} then, {now!r} now"
                    for key, now in self._facts.items()
                    if facts.get(key) != now
                ]
                return f"; what was kept is for others: {', '.join(other)}"
        return ""

    def _keep(self, name: str, code: str, own: str, files: dict[str, str]) -> None:
        entry = os.path.join(self.directory, name)
        draft = os.path.join(self.directory, f"draft-{secrets.token_hex(6)}")
        gone = f"{draft}-old"
        try:
            os.makedirs(draft)
            for file in files:
                target = os.path.join(draft, file)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copyfile(os.path.join(own, file), target)
            manifest = {
                "format": _FORMAT, "version": _VERSION, "facts": self._facts, "code": code,
                "files": files,
            }  # fmt: skip
            replace_sealed(
                os.path.join(draft, _MANIFEST), manifest, os.path.join(draft, "manifest-draft")
            )
            if os.path.lexists(entry):
                os.rename(entry, gone)
            os.rename(draft, entry)
        except OSError as error:  # also where another process was faster
            self.notes.append(f"{name}: not kept: {error.strerror or error}")
        finally:
            for left in (draft, gone):
                if os.path.isdir(left) and not os.path.islink(left):
                    shutil.rmtree(left, ignore_errors=True)
                elif os.path.lexists(left):
                    os.remove(left)


@contextmanager
def _inductor_in(directory: str, is_new: bool) -> Iterator[None]:
    """Have inductor work in a directory, without what it pickles."""
    import torch._functorch.config as functorch_config  # late: they take a second
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import clear_caches

    off: dict[str, Any] = dict.fromkeys(filter(partial(hasattr, inductor_config), _OFF), False)
    before = os.environ.get(_VARIABLE)
    if is_new:  # what the process has loaded already would not be written again
        clear_caches()
    os.environ[_VARIABLE] = directory
    try:
        with (
            inductor_config.patch(off),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def _files_in(directory: str) -> dict[str, str]:
    """Return the checksums of what is worth keeping in a directory of inductor's."""
    found: dict[str, str] = {}
    for folder, inner, names in os.walk(directory):
        if folder == directory:
            inner[:] = [name for name in inner if name not in _NOT_KEPT]
        for name in names:
            path = os.path.join(folder, name)
            file = os.path.relpath(path, directory).replace(os.sep, "/")
            if _is_inside(file) and not os.path.islink(path):
                found[file] = hashlib.sha256(_content(path)).hexdigest()
    return found


def _is_inside(file: Any) -> bool:
    """Whether a name is that of a source or a library in an entry, and leads nowhere else."""
    if type(file) is not str or not file.endswith((".cpp", ".h", ".py", ".so")):
        return False
    parts = file.split("/")
    return (
        len(parts) > 1
        and all(part and not part.startswith(".") for part in parts)
        and ("\\" not in file and ":" not in file)
    )


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
