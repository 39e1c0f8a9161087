"""The name that a module goes by while its hooks run."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["named"]

_lock = threading.Lock()
# By id of the module: it, and the names that it is called by now, in any thread; the last shows.
_shown: dict[int, tuple[nn.Module, list[str]]] = {}


@contextmanager
def named(module: nn.Module, name: str) -> Iterator[None]:
    """Let `module.name` be a name for a while, unless the module has a `name` of its own.

    An attribute, parameter, buffer, submodule or property `name` stays what it is, also for the
    time being: what the module computes with it, in this thread or another, is not disturbed.

    Example:
        >>> linear = nn.Linear(1, 1)
        >>> with named(linear, "first"):
        ...     linear.name
        'first'
        >>> hasattr(linear, "name")
        False
    """
    # No lock is held while the hook runs: it may start a backward pass in another thread that
    # comes by hooks of the same module. So threads share what is shown.
    with _lock:
        found = _shown.get(id(module))
        if found is None and _has_own_name(module):
            names = None
        else:
            names = _shown.setdefault(id(module), (module, []))[1]
            names.append(name)
            vars(module)["name"] = name
    try:
        yield
    finally:
        if names is not None:
            with _lock:
                _leave(module, names, name)


def _leave(module: nn.Module, names: list[str], name: str) -> None:
    attributes = vars(module)
    is_shown = any(attributes.get("name") is one for one in names)  # else a hook has set another
    names.reverse()
    names.remove(name)  # the latest of that name
    names.reverse()
    if not names:
        del _shown[id(module)]
    if is_shown and names:
        attributes["name"] = names[-1]
    elif is_shown:
        del attributes["name"]


def _has_own_name(module: nn.Module) -> bool:
    if "name" in vars(module) or inspect.getattr_static(type(module), "name", None) is not None:
        return True
    try:
        _: Any = module.name  # parameters, and what a wrapper passes on from what it wraps
    except AttributeError:
        return False
    return True
