"""Tensors in the inputs and outputs of a module: extracted as a list, put back, and compared.

Tuples (including named tuples and torch's own), lists, dicts and dataclasses are searched, in their
order of iteration; everything else is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace._compare import same_bits
from bendtrace.torch_rules.mode_queries import unseen

__all__ = ["Exchange", "differ", "is_uneven", "tensors_of", "version_of", "with_tensors"]


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in order, with repetitions.

    Example:
        >>> import torch
        >>> tensors_of({"a": torch.tensor(1), "b": [None, (torch.tensor(2), "text")]})
        [tensor(1), tensor(2)]
    """
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, keep, copy.copy)
    return found


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a value with other tensors instead of its own, in the order of `tensors_of`.

    Containers with changes are copied; the others stay the same objects.

    Example:
        >>> import torch
        >>> with_tensors({"a": torch.tensor(1), "b": [None]}, [torch.tensor(2)])
        {'a': tensor(2), 'b': [None]}
    """
    given = iter(tensors)
    return _mapped(value, lambda tensor: next(given), copy.copy)


class Exchange:
    """Tensors that temporarily replace others.

    Lists, dicts and dataclasses are changed in place, not copied: the receiver may append to them,
    and the caller expects to see that. `undo` puts the tensors back.

    Args:
        exchanged: the replacement of each tensor, by the tensor's id.
    """

    def __init__(self, exchanged: dict[int, Tensor]) -> None:
        self._exchanged = exchanged
        self._touched: list[Any] = []
        # By the id of the replacement: it (so that the id is not reused), and the original.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def into(self, value: Any) -> Any:
        """Return a value with its tensors replaced: a new object only if it is a tuple."""
        return _mapped(value, self._other, self._touch, self._note)

    def _other(self, tensor: Tensor) -> Tensor:
        new = self._exchanged.get(id(tensor), tensor)
        if new is not tensor:
            self._note(tensor, new)
        return new

    def _touch(self, container: Any) -> Any:
        self._touched.append(container)
        return container

    def _note(self, original: Any, new: Any) -> None:
        self._originals[id(new)] = new, original

    def undo(self) -> None:
        """Restore the replaced tensors that are still in place."""
        for container in self._touched:
            for key, item in list(_items(container)):
                found = self._originals.get(id(item))
                if found is not None:
                    _set(container, key, found[1])
        self._touched.clear()


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _mapped(
    value: Any,
    new: Callable[[Tensor], Tensor],
    changeable: Callable[[Any], Any],
    note: Callable[[Any, Any], None] | None = None,
    around: tuple[int, ...] = (),
) -> Any:
    """Return a value with other tensors.

    Args:
        value: the value.
        new: returns the replacement of a tensor.
        changeable: returns the list, dict or dataclass to change instead of one.
        note: called with each replaced tuple, and its replacement.
        around: the ids of the containers that the value is in.
    """
    if isinstance(value, Tensor):
        return new(value)
    if type(value) in _PLAIN or id(value) in around:  # else a container inside itself
        return value
    inside = (*around, id(value))
    changed = [
        (key, other)
        for key, item in _items(value)
        if (other := _mapped(item, new, changeable, note, inside)) is not item
    ]
    if not changed:
        return value
    if isinstance(value, tuple):
        made = _tuple_with(value, dict(changed))
        if note is not None:
            note(value, made)
        return made
    made = changeable(value)
    for key, other in changed:
        _set(made, key, other)
    return made


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        names = [field.name for field in fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return ()


def _tuple_with(value: tuple[Any, ...], changed: dict[int, Any]) -> Any:
    items = [changed.get(index, item) for index, item in enumerate(value)]
    kind: Any = type(value)
    if hasattr(kind, "_make"):  # named tuples, also those with a constructor of their own
        return kind._make(items)
    return kind(items)  # what torch.max and the like return takes a sequence as well


def _set(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, (list, dict)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also of a frozen dataclass


def version_of(value: Any) -> int:
    """Return a number that changes with each write to a tensor; 0 if it has no such number."""
    if not isinstance(value, Tensor):
        return 0
    with unseen():
        return 0 if value.is_inference() else value._version


def differ(old: Any, new: Any) -> bool:
    """Return whether two tensors or numbers differ; in tensors, nan equals nan."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return bool(old != new) if type(old) is type(new) else True
    with unseen():
        return _differ(old, new)


def _differ(old: Tensor, new: Tensor) -> bool:
    if is_uneven(old) or is_uneven(new):  # torch compares them in parts only
        with torch.no_grad():
            return not same_bits(old.detach(), new.detach())
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        return True
    try:
        if torch.equal(old, new):
            return False
        with torch.no_grad():
            return not bool(((old == new) | ((old != old) & (new != new))).all())
    except (RuntimeError, NotImplementedError):  # of a dtype that torch cannot compare
        return True


def is_uneven(tensor: Tensor) -> bool:
    """Whether a tensor is nested or sparse: it may have no sizes or strides to ask for."""
    return tensor.is_nested or tensor.layout is not torch.strided
