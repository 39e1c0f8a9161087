"""The settings of a compiled backend, checked when they are given."""

from __future__ import annotations

import difflib
import functools
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bendtrace.errors import CompileWarning, InputError, LoadError
from bendtrace.log.saved_tensors import read_sealed, replace_sealed
from bendtrace.python.checks import required_path
from bendtrace.python.sites import users_level

_DYNAMIC = (None, True, False)


@dataclass(frozen=True)
class CompileSettings:
    """The settings with which paths are compiled."""

    # A name that torch.compile knows, or a function of a graph and example inputs.
    backend: str | Callable[..., Any]
    given: Mapping[str, Any] = field(default_factory=dict)  # the options as the user gave them
    mode: str | None = None  # torch.compile's mode
    options: Mapping[str, Any] | None = None  # torch.compile's options for the backend
    # True if sizes are symbols from the first compilation on; None leaves it to torch.compile,
    # which makes those symbols that were seen to change.
    dynamic: bool | None = None
    # True if a compiled path is measured against the plain replay, and not used where it is slower.
    drop_slower: bool = True
    max_paths: int = 8  # how many paths are compiled at most
    max_segments: int = 64  # how many pieces of segments are compiled at most
    cuda_graphs: bool = False  # whether kernels are CUDA graphs, and outputs copied out of them
    cache_dir: str | None = None  # where compiled code is kept for other processes, if at all

    @property
    def name(self) -> str:
        """The name of the backend."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that give a `BendedModule` these settings."""
        return {
            "backend": self.backend,
            "backend_options": dict(self.given) or None,
            "cache_dir": self.cache_dir,
        }

    @functools.cached_property
    def artefacts(self) -> Artefacts | None:
        """The object that keeps compiled code; None if it is not kept."""
        if self.cache_dir is None:
            return None
        return Artefacts(
            self.cache_dir, {"mode": self.mode, "options": self.options, "dynamic": self.dynamic}
        )

    def keeping(self, text: str) -> AbstractContextManager[None]:
        """Return a context in which code is compiled that may be kept."""
        return nullcontext() if self.artefacts is None else self.artefacts.used(text)

    def warn(self) -> None:
        """Warn of what was kept and could not be used."""
        if self.artefacts is not None:
            self.artefacts.warn()

    def compilers(self, on_cpu: bool) -> tuple[Callable[..., Any], ...]:
        """Return what compiles a graph, and what does where that cannot."""
        if self.backend != "inductor":
            if isinstance(self.backend, str):
                return (dynamo().lookup_backend(self.backend),)
            return (self.backend,)
        if self.options is None and self.mode is None and on_cpu:
            return self._inductor(_FOR_CPU), self._inductor(None)
        return (self._inductor(self.options),)

    def _inductor(self, options: Mapping[str, Any] | None) -> Callable[..., Any]:
        # What torch.compile makes of these, seen in torch 2.13 to 2.15; test_compiled_inductor.py
        # would notice a change.
        made: Callable[..., Any] = torch._TorchCompileInductorWrapper(
            self.mode or "default", None if options is None else dict(options), self.dynamic
        )
        return made


def settings_of(
    backend: Any, options: Mapping[str, Any] | None, cache_dir: Any = None
) -> CompileSettings | None:
    """Check what a user gave; without a backend, nothing is compiled.

    Raise `InputError` if there is no such backend or option, or an option makes no sense.
    """
    if cache_dir is not None:
        if backend != "inductor":
            raise InputError("cache_dir keeps what inductor compiles: give backend='inductor'")
        cache_dir = os.path.abspath(required_path("cache_dir", cache_dir))
        if os.path.lexists(cache_dir) and not os.path.isdir(cache_dir):
            raise InputError(f"cache_dir={cache_dir!r} is no directory")
    if backend is None:
        if options:
            raise InputError("backend_options without a backend: name one, backend='inductor'")
        return None
    given = dict(options or {})
    if isinstance(backend, str):
        names = _backends()
        if backend not in names:
            raise InputError(
                f"torch.compile has no backend {backend!r}{_suggestion(backend, names)}"
            )
    elif not callable(backend):
        raise InputError(
            "a backend is a name that torch.compile knows, or a function of a graph module and "
            f"example inputs; {backend!r} is neither"
        )
    for name in given:
        if name not in _OPTIONS:
            raise InputError(
                f"backend_options has no {name!r}{_suggestion(str(name), _OPTIONS)}; options of "
                "the backend itself belong into options={...}"
            )
    return _validate_settings(CompileSettings(backend, given, cache_dir=cache_dir, **given), given)


def _validate_settings(settings: CompileSettings, given: dict[str, Any]) -> CompileSettings:
    if settings.dynamic not in _DYNAMIC:
        raise InputError(f"dynamic has to be True, False or None, not {settings.dynamic!r}")
    for name, least, requirement in (
        ("max_paths", 1, "positive"),
        ("max_segments", 0, "non-negative"),
    ):
        most = getattr(settings, name)
        if type(most) is not int or most < least:
            raise InputError(f"{name} has to be a {requirement} int, not {most!r}")
    for name in ("drop_slower", "cuda_graphs"):
        if type(given.get(name, True)) is not bool:
            raise InputError(f"{name} has to be True or False, not {given[name]!r}")
    if settings.mode is not None and settings.options is not None:
        raise InputError("torch.compile takes a mode or options, not both")
    if (settings.mode or settings.options) is not None and settings.backend != "inductor":
        raise InputError("mode and options are inductor's: another backend has none of them")
    if settings.mode is not None and settings.mode not in _MODES:
        raise InputError(
            f"torch.compile has no mode {settings.mode!r}{_suggestion(settings.mode, _MODES)}"
        )
    if settings.cuda_graphs:
        if settings.backend != "inductor" or settings.mode or settings.options:
            raise InputError("cuda_graphs is inductor's mode 'reduce-overhead': give no other")
        return CompileSettings(**{**vars(settings), "mode": "reduce-overhead"})
    return settings


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


@functools.cache
def _backends() -> tuple[str, ...]:
    return tuple(dynamo().list_backends(exclude_tags=()))


def dynamo() -> Any:
    """Return the module that torch.compile is in."""
    import torch._dynamo  # late: it takes a second

    return torch._dynamo


# Calling the kernels from C++ as well takes a third off small models, and 10 seconds to compile
# once per machine. The sizes that inductor would assert have been compared by then.
_FOR_CPU = {"cpp_wrapper": True, "size_asserts": False}
_OPTIONS = (
    "mode", "options", "dynamic", "drop_slower", "max_paths", "max_segments", "cuda_graphs",
)  # fmt: skip
_MODES = (
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
    "lite",
)  # fmt: skip


# What inductor has compiled, kept in a directory for the processes that come later.
#
# For each path there is an entry: the sources that inductor has written, the libraries that a C++
# compiler has made of them, and a manifest with the checksum of each. A process works on a copy
# of its own, and adds an entry in one step, so that several can share the directory. What
# inductor pickles is neither kept nor read: it finds a library by the text that it was made of.

_FORMAT, _VERSION = "bendtrace artefacts", 1
_MANIFEST = "bendtrace.json"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # names inductor's directory, torch 2.13 to 2.15
_NOT_KEPT = frozenset({"aotautograd", "fxgraph", "locks"})  # pickles, and what is of no use later
# Pickles; and headers, which are compiled beforehand, and looked at by the C++ compiler each time.
_OFF = ("fx_graph_cache", "cpp_cache_precompile_headers")
_one_at_a_time = threading.RLock()  # the directory is that of the process


class Artefacts:
    """Compiled code in a directory, which is made when something is first kept."""

    def __init__(self, directory: str, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self.notes: list[str] = []  # the result for each path, one line each
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
        """Within it, inductor finds what was compiled for a text, and adds what was not."""
        code = hashlib.sha256(text.encode()).hexdigest()
        name = f"path-{hashlib.sha256(f'{code}{self._facts}'.encode()).hexdigest()[:16]}"
        with _one_at_a_time, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
            entry = self._copy_entry(name, code, own)
            with _inductor_in(own, is_new=entry is None):
                yield
            found = _files_in(own)
            if found and found.keys() != entry:
                self._keep(name, code, own, found)

    def warn(self) -> None:
        """Warn of entries that could not be used: after compiling, whose warnings are hidden."""
        while self._unusable:
            warnings.warn(CompileWarning(self._unusable.pop(0)), stacklevel=users_level())

    def _copy_entry(self, name: str, code: str, own: str) -> set[str] | None:
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
                if not _names_file_inside(file):
                    raise LoadError(entry, f"{file!r} is no name of a file in it")
                content = _read_bytes(os.path.join(entry, file))
                if hashlib.sha256(content).hexdigest() != digest:
                    raise LoadError(entry, f"{file} is damaged: its checksum is another")
                target = os.path.join(own, file)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as made:
                    made.write(content)
        except (LoadError, OSError, KeyError, AttributeError) as error:
            for item in os.listdir(own):
                shutil.rmtree(os.path.join(own, item), ignore_errors=True)
            cause = str(error).strip("'\"")
            self.notes.append(
                f"{name}: compiled again, since what was kept cannot be used: {cause}"
            )
            self._unusable.append(f"what was kept in {entry} is not used, and made anew: {cause}")
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
                stored = read_sealed(
                    os.path.join(self.directory, name, _MANIFEST), _FORMAT, _VERSION
                )
            except LoadError:
                continue
            facts = stored.get("facts")
            if stored.get("code") == code and isinstance(facts, dict):
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
        with inductor_config.patch(off), functorch_config.patch(enable_autograd_cache=False):
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
            if _names_file_inside(file) and not os.path.islink(path):
                found[file] = hashlib.sha256(_read_bytes(path)).hexdigest()
    return found


def _names_file_inside(file: Any) -> bool:
    """Return whether a name belongs to a source or library in an entry, and leads nowhere else."""
    if type(file) is not str or not file.endswith((".cpp", ".h", ".py", ".so")):
        return False
    parts = file.split("/")
    return (
        len(parts) > 1
        and all(part and not part.startswith(".") for part in parts)
        and ("\\" not in file and ":" not in file)
    )


def _read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
