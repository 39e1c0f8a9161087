"""Parts of torch that are not public, looked up so that their absence switches off what needs them.

Private names of torch change between versions without notice. No module of this package reads one
while it is imported, except by `internal`: `tests/test_internals.py` lists these look-ups, and runs
models without each of them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from bendtrace.errors import BendtraceError
from bendtrace.python import features


class MissingInternal:
    """Replaces a part of torch that is missing, and raises an error where it is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise BendtraceError(
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
    """Look up a part of torch that is not public.

    Args:
        path: the module and the attributes, such as "torch._C._get_mkldnn_enabled".
        instead: the value to use where torch has no such part; otherwise one that raises an error
            as soon as it is used.
        part: what the recorder does not see without it; "" where `instead` does the same.
        names: code that uses one of these runs live without it; "" is all code.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        if part:
            features.miss(part, path, frozenset(names))
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
