"""What a compiled backend is to be, checked at the door."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bendtrace.compiled.artefacts import Artefacts
from bendtrace.errors import InputError

__all__ = ["Settings", "dynamo", "settings_of"]

_DYNAMIC = (None, True, False)


@dataclass(frozen=True)
class Settings:
    """How paths are compiled.

    Attributes:
        backend: a name that torch.compile knows, or a function of a graph and example inputs.
        given: the options as the user gave them.
        mode: torch.compile's mode.
        options: torch.compile's options for the backend.
        dynamic: whether sizes are symbols from the first compilation on; None leaves it to
            torch.compile, which makes those symbols that were seen to change.
        drop_slower: whether a compiled path is measured against the plain replay, and not used
            where it is slower.
        max_paths: how many paths are compiled at most.
        max_segments: how many pieces of segments are compiled at most.
        cuda_graphs: whether kernels are launched as CUDA graphs, and outputs copied out of them.
        cache_dir: where compiled code is kept for other processes; None for nowhere.
    """

    backend: str | Callable[..., Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    drop_slower: bool = True
    max_paths: int = 8
    max_segments: int = 64
    cuda_graphs: bool = False
    cache_dir: str | None = None

    @property
    def name(self) -> str:
        """How the backend is called."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a `BendedModule` is given for them."""
        return {
            "backend": self.backend,
            "backend_options": dict(self.given) or None,
            "cache_dir": self.cache_dir,
        }

    @functools.cached_property
    def artefacts(self) -> Artefacts | None:
        """What keeps compiled code; None if it is not kept."""
        if self.cache_dir is None:
            return None
        return Artefacts(
            self.cache_dir, {"mode": self.mode, "options": self.options, "dynamic": self.dynamic}
        )

    def keeping(self, text: str) -> AbstractContextManager[None]:
        """Return a context in which code is compiled that may be kept.

        Args:
            text: the source of what is compiled.
        """
        return nullcontext() if self.artefacts is None else self.artefacts.used(text)

    def warn(self) -> None:
        """Warn of what was kept and could not be used."""
        if self.artefacts is not None:
            self.artefacts.warn()

    def compilers(self, on_cpu: bool) -> tuple[Callable[..., Any], ...]:
        """Return what compiles a graph, and what does where that cannot.

        Args:
            on_cpu: whether all tensors are on the CPU.
        """
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
) -> Settings | None:
    """Check what a user gave.

    Args:
        backend: None for no compilation, a name, or a function.
        options: `mode`, `options`, `dynamic`, `drop_slower`, `max_paths`, `max_segments`,
            `cuda_graphs`.
        cache_dir: where compiled code is kept.

    Raises:
        InputError: there is no such backend or option, or an option makes no sense.
    """
    if cache_dir is not None:
        if backend != "inductor":
            raise InputError("cache_dir keeps what inductor compiles: give backend='inductor'")
        try:
            cache_dir = os.path.abspath(os.fspath(cache_dir))
        except TypeError:
            raise InputError(f"cache_dir is the path of a directory, not {cache_dir!r}") from None
        if type(cache_dir) is not str:
            raise InputError(f"cache_dir is the path of a directory, not {cache_dir!r}")
        if os.path.lexists(cache_dir) and not os.path.isdir(cache_dir):
            raise InputError(f"cache_dir={cache_dir!r} is no directory")
    if backend is None:
        if options:
            raise InputError("backend_options without a backend: name one, backend='inductor'")
        return None
    given = dict(options or {})
    if isinstance(backend, str):
        known = _backends()
        if backend not in known:
            raise InputError(f"torch.compile has no backend {backend!r}{_near(backend, known)}")
    elif not callable(backend):
        raise InputError(
            "a backend is a name that torch.compile knows, or a function of a graph module and "
            f"example inputs; {backend!r} is neither"
        )
    for name in given:
        if name not in _OPTIONS:
            raise InputError(
                f"backend_options has no {name!r}{_near(str(name), _OPTIONS)}; what the backend "
                "itself is to be told goes in its options={...}"
            )
    return _checked(Settings(backend, given, cache_dir=cache_dir, **given), given)


def _checked(settings: Settings, given: dict[str, Any]) -> Settings:
    if settings.dynamic not in _DYNAMIC:
        raise InputError(f"dynamic has to be True, False or None, not {settings.dynamic!r}")
    for name, least, said in ("max_paths", 1, "positive"), ("max_segments", 0, "non-negative"):
        most = getattr(settings, name)
        if type(most) is not int or most < least:
            raise InputError(f"{name} has to be a {said} int, not {most!r}")
    for name in ("drop_slower", "cuda_graphs"):
        if type(given.get(name, True)) is not bool:
            raise InputError(f"{name} has to be True or False, not {given[name]!r}")
    if settings.mode is not None and settings.options is not None:
        raise InputError("torch.compile takes a mode or options, not both")
    if (settings.mode or settings.options) is not None and settings.backend != "inductor":
        raise InputError("mode and options are inductor's: another backend has none of them")
    if settings.mode is not None and settings.mode not in _MODES:
        raise InputError(
            f"torch.compile has no mode {settings.mode!r}{_near(settings.mode, _MODES)}"
        )
    if settings.cuda_graphs:
        if settings.backend != "inductor" or settings.mode or settings.options:
            raise InputError("cuda_graphs is inductor's mode 'reduce-overhead': give no other")
        return Settings(**{**vars(settings), "mode": "reduce-overhead"})
    return settings


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 3, 0.5)
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
