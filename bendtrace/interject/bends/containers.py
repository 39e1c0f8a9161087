"""Tensors inside tuples, dicts and other containers: each changed, the containers rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from bendtrace.interject.interjection import NodePass
from bendtrace.paths.naming import identifier

__all__ = ["bendable", "replaced"]

Change = Callable[[Tensor, str], Any]


def bendable(value: Any) -> bool:
    """Whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def replaced(value: Any, at: NodePass, change: Change) -> Any:
    """Return a value with every bendable tensor in it changed.

    Containers in which nothing has changed stay the same objects.

    Args:
        value: a tensor, a tuple, list, dict or data class, nested in any way.
        at: the node that returned it.
        change: called with each tensor and its path, such as `lstm.output|sub_1.sub_0`.
    """
    if isinstance(value, Tensor):
        return change(value, at.path) if bendable(value) else value
    path = at.path
    if at.module is not None:
        path = f"{path}.output" if path else "output"
    return _replaced(value, path, change)


def _replaced(value: Any, path: str, change: Change) -> Any:
    if isinstance(value, Tensor):
        return change(value, path) if bendable(value) else value
    new = {}
    for key, item in _items(value):
        joint = "." if "|" in path else "|"
        made = _replaced(item, f"{path}{joint}{identifier(str(key))}", change)
        if made is not item:
            new[key] = made
    return _with(value, new) if new else value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _with(value: Any, new: dict[Any, Any]) -> Any:
    """Return a copy of a container in which some items are others."""
    if isinstance(value, tuple):
        items = [new.get(number, item) for number, item in enumerate(value)]
        if hasattr(value, "_make"):  # a named tuple
            return value._make(items)
        return tuple(items) if type(value) is tuple else type(value)(items)
    made = copy.copy(value)
    for key, item in new.items():
        if isinstance(made, (list, dict)):
            made[key] = item
        else:
            object.__setattr__(made, key, item)
    return made
