"""Parts of torch that are not public, and the features that are off where one is missing.

The tracer reads Python's instructions, and intercepts parts of torch that are not public
interfaces. Both change between versions without notice. When a module is imported, `internal`
looks up the parts of torch that it reads; at the first trace, `record/self_test.py` checks that
they behave as the tracer expects. Features that lack something are switched off here, one at a
time. No module of this package reads a private name of torch while it is imported, except by
`internal`: `tests/test_internals.py` lists these look-ups, and runs models without each of them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from bendtrace.python.lazy import errors

# Features that are unreliable with this Python and this torch.

_off: dict[str, str] = {}
_names: dict[str, str] = {}
_unreported: list[str] = []


def switch_off(feature: str, reason: str, names: frozenset[str] = frozenset()) -> None:
    """Switch a feature off; the reason is a sentence that says what happens instead.

    It is "identity", "truth", "handlers", "places", "iterations", or a part of torch. Code that
    uses one of the names runs live from now on.
    """
    _off[feature] = reason
    _names.update(dict.fromkeys(names, reason))


def switch_on(feature: str) -> None:
    """Switch a feature on again."""
    reason = _off.pop(feature, None)
    for name in [name for name, why in _names.items() if why == reason]:
        del _names[name]


def miss(feature: str, path: str, names: frozenset[str]) -> None:
    """Switch a feature off that needs a part of torch which is not there (see `switch_off`)."""
    reason = f"{feature}: torch has no {path}"
    if names:
        reason += ", all calls run live" if "" in names else ", code that uses it runs live"
    if feature not in _off:
        _unreported.append(reason)
    switch_off(feature, reason, names)


def missing_features() -> list[str]:
    """Return the reasons of the features that were missed since the last call."""
    found = _unreported.copy()
    _unreported.clear()
    return found


def is_off(feature: str) -> bool:
    """Return whether a feature is switched off."""
    return feature in _off


def names_off() -> dict[str, str]:
    """Return the names whose use cannot be observed, and why; "" covers all code."""
    return _names


def reasons() -> Iterator[str]:
    """Yield the reasons of the features that are switched off, a sentence each."""
    yield from _off.values()


# Parts of torch, looked up.


class MissingInternal:
    """Replaces a part of torch that is missing, and raises an error where it is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise errors.BendtraceError(
            f"this needs {self._path}, which torch {torch.__version__} does not have: use another "
            "version of torch, or of bendtrace"
        )

    __call__ = _fail

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # not asked for by those who use it
            raise AttributeError(name)
        return self._fail()

    def __repr__(self) -> str:
        return f"<missing: {self._path}>"


class Never:
    """Stands in for a class that is missing: it has no instances."""


_RAISES = object()


def internal(path: str, instead: Any = _RAISES, part: str = "", *names: str) -> Any:
    """Look up a part of torch that is not public, by its module and attributes.

    Where torch has no such part, `instead` is used; by default a value that raises an error as soon
    as it is used. `part` is what the recorder does not see without it; "" where `instead` does the
    same. Code that uses one of the names runs live without it; "" is all code.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        if part:
            miss(part, path, frozenset(names))
        return MissingInternal(path) if instead is _RAISES else instead


# What several modules use. Seen in torch 2.13 to 2.15.
pytree: Any = internal("torch.utils._pytree")
keeps_version: Any = internal("torch.autograd.grad_mode._unsafe_preserve_version_counter")
_disable_dynamo = internal("torch._disable_dynamo", torch.compiler.disable)


_F = TypeVar("_F", bound=Callable[..., Any])


def disable_dynamo(function: _F) -> _F:
    """Return a function that compiled code calls as it is."""
    return cast("_F", _disable_dynamo(function))


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:

    class _NoMode:
        """Raises an error where a mode that sees each op would be entered."""

        def __enter__(self):
            MissingInternal("torch.utils._python_dispatch.TorchDispatchMode")()

        def __exit__(self, *_):
            pass

    TorchDispatchMode = internal(
        "torch.utils._python_dispatch.TorchDispatchMode",
        _NoMode,
        "dispatch modes",
        "TorchDispatchMode",
    )
