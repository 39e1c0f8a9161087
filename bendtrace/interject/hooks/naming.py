"""The name that a module goes by while its hooks run."""

from __future__ import annotations

import threading

from torch import nn

__all__ = ["named"]

_lock = threading.Lock()
# By id of the module: it, and the names that it is called by now, in any thread; the last shows.
_shown: dict[int, tuple[nn.Module, list[str]]] = {}


class named:
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

    __slots__ = ("_module", "_name", "_names")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._names: list[str] | None = None

    def __enter__(self) -> None:
        # No lock is held while the hook runs: it may start a backward pass in another thread that
        # comes by hooks of the same module. So threads share what is shown.
        with _lock:
            found = _shown.get(id(self._module))
            if found is None and _has_own_name(self._module):
                return
            self._names = _shown.setdefault(id(self._module), (self._module, []))[1]
            self._names.append(self._name)
            vars(self._module)["name"] = self._name

    def __exit__(self, *error: object) -> None:
        if self._names is not None:
            with _lock:
                _leave(self._module, self._names, self._name)


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
    if "name" in vars(module) or hasattr(type(module), "name"):
        return True
    if type(module).__getattr__ is nn.Module.__getattr__:
        tables = module._parameters, module._buffers, module._modules
        return any("name" in table for table in tables)
    return hasattr(module, "name")  # a wrapper may pass it on from what it wraps
