"""What containers of values hold, and what to call it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from bendtrace.paths.events import Events
from bendtrace.recording.functions import name_of
from bendtrace.recording.parts import Access, AttributeKey, Part, PartKind
from bendtrace.recording.structure import Existing, Instance, Opaque
from bendtrace.recording.tape import Op, refs_in

__all__ = ["Item", "items_of", "result_type", "type_name"]


class Item(NamedTuple):
    """Something in a container.

    Attributes:
        key: its index, key or attribute name.
        label: what to call it.
        value: it, as recorded.
        access: what to write after the container to reach it.
    """

    key: str | int
    label: str
    value: Any
    access: str


def items_of(value: Any, events: Events) -> list[Item] | None:
    """Return what a recorded container holds; None for what is none."""
    if isinstance(value, (tuple, list)):
        return [_indexed(i, item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [_keyed(key, item) for key, item in value.items()]
    if isinstance(value, Instance):
        return _items_of_instance(value)
    if isinstance(value, Existing):
        held = events.held.get(value.part.index)
        if held is None or value.part.kind is PartKind.TENSOR:
            return None
        return [
            _item_of_part(value.part, part)
            for part in held
            # What is an item as well is shown as that.
            if not (isinstance(part.key, AttributeKey) and part.key != part.key.name)
        ]
    return None


def _item_of_part(whole: Part, part: Part) -> Item:
    """Return an item of an argument."""
    value = Existing(part)
    if isinstance(part.key, AttributeKey):
        return _attribute(part.key.name, value)
    if part.access is not Access.ITEM:
        return _attribute(str(part.key), value)
    if type(part.key) is not int or issubclass(whole.type, dict):
        return _keyed(part.key, value)
    names = _fields(whole.type)
    if part.key < len(names):
        return _attribute(names[part.key], value, part.key)
    return _indexed(part.key, value)


def type_name(value: Any) -> str:
    """Return what to call the type of something recorded."""
    if isinstance(value, Instance):
        return value.cls.__name__
    if isinstance(value, Existing):
        return value.part.type.__name__
    if isinstance(value, Opaque):
        return value.type.__name__
    return "None" if value is None else type(value).__name__


def _items_of_instance(value: Instance) -> list[Item]:
    found: list[Item] = []
    names: tuple[str, ...] = ()
    if isinstance(value.items, dict):
        found = [_keyed(key, item) for key, item in value.items.items()]
        names = tuple(map(str, value.items))
    elif value.items is not None:
        names = _fields(value.cls)
        items: Iterable[Any] = value.items
        found = [
            _attribute(names[i], item, i) if i < len(names) else _indexed(i, item)
            for i, item in enumerate(items)
        ]
    for name, item in value.attributes.items():
        if str(name) not in names and any(refs_in(item)):
            found.append(_attribute(str(name), item))
    return found


def _fields(cls: type) -> tuple[str, ...]:
    """The names of the items of a named tuple."""
    fields = getattr(cls, "_fields", None)
    if fields is None and hasattr(cls, "n_sequence_fields"):
        fields = getattr(cls, "__match_args__", ())
    return tuple(fields or ()) if issubclass(cls, tuple) else ()


def _indexed(key: int, value: Any) -> Item:
    return Item(key, f"sub_{key}", value, f"[{key}]")


def _keyed(key: Any, value: Any) -> Item:
    name = key if isinstance(key, (str, int)) else repr(key)
    return Item(name, str(name), value, f"[{key!r}]")


def _attribute(name: str, value: Any, key: int | None = None) -> Item:
    return Item(name if key is None else key, name, value, f".{name}")


def result_type(op: Op, keys: tuple[Any, ...] | None) -> tuple[str, list[tuple[Any, str]]]:
    """Return the type of a result with several tensors, and the keys and names of its parts."""
    if keys is not None:
        return "dict", [(key, str(key)) for key in keys]
    fields = _fields_of_result(op)
    if fields and len(fields) == len(op.meta):
        return name_of(op.target), list(enumerate(fields))
    return "tuple", [(i, f"sub_{i}") for i in range(len(op.meta))]


def _fields_of_result(op: Op) -> tuple[str, ...]:
    named = getattr(torch.return_types, name_of(op.target), None)
    return tuple(getattr(named, "__match_args__", ()))
