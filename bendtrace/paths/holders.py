"""What the code of a module knows its submodules, parameters and buffers as."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from bendtrace.recording.tape import ModuleCall

__all__ = ["Holders", "dotted"]


class Holders:
    """Finds names relative to the module whose code is running.

    Args:
        root: the outermost module of the run, if there is one.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._modules: dict[int, dict[int, str]] = {}
        self._tensors: dict[int, dict[int, str]] = {}
        self._nameless: dict[tuple[int, str], list[nn.Module]] = {}
        self._by_path = dict(_tensors_of(root)) if root is not None else {}

    def module(self, call: ModuleCall) -> str:
        """Return what the code around a call knows the called module as: `layers.8`."""
        outer = call.parent.module if call.parent is not None else None
        if outer is not None and call.module is not None:
            known = self._modules.get(id(outer))
            if known is None:
                known = self._modules[id(outer)] = {
                    id(module): name for name, module in outer.named_modules()
                }
            if id(call.module) in known:
                return known[id(call.module)]
        if call.path.startswith("<"):
            return self._unknown(call)
        return _relative(call.path, call.parent.path if call.parent is not None else "")

    def state(self, label: str, call: ModuleCall) -> str:
        """Return what the code of a call knows a tensor as: `weight`.

        Args:
            label: what the surroundings of the run call the tensor.
            call: the call.
        """
        label = label.removeprefix("self.")
        tensor = self._by_path.get(label)
        if tensor is not None and call.module is not None:
            known = self._tensors.get(id(call.module))
            if known is None:
                known = self._tensors[id(call.module)] = {
                    id(held): name for name, held in reversed(list(_tensors_of(call.module)))
                }
            if id(tensor) in known:
                return known[id(tensor)]
        return _relative(label, call.path)

    def _unknown(self, call: ModuleCall) -> str:
        """A name for a module that the model does not hold as one of its own.

        Such modules without state are all alike; others are told apart.
        """
        module, name = call.module, type(call.module).__name__
        if module is None or not _tensors_of(module):
            return name
        seen = self._nameless.setdefault((id(call.parent), name), [])
        for position, other in enumerate(seen):
            if other is module:
                return f"{name}.{position}"
        seen.append(module)
        return f"{name}.{len(seen) - 1}"


def _tensors_of(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def dotted(label: str) -> str:
    """Return a label with dots before all parts of it: `layers[0].weight` is `layers.0.weight`."""
    return ".".join(_split(label))


def _relative(path: str, base: str) -> str:
    """Return a path as seen from another, as far as the two have a beginning in common."""
    parts = _split(path)
    for part in _split(base):
        if len(parts) < 2 or parts[0] != part:
            break
        parts.pop(0)
    return ".".join(parts)


def _split(path: str) -> list[str]:
    return [part.strip("'\"") for part in re.split(r"\.|\[|\]", path) if part]
