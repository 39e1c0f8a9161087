"""Values taken apart into tensors and numbers, and reassembled."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.python.compare import same_bits
from bendtrace.tape.captured import PLAIN_TENSORS, PLAIN_TYPES, attributes_of, identical, is_uneven
from bendtrace.tape.contexts import function_modes
from bendtrace.tape.scalars import TRACED, plain
from bendtrace.tape.structure import build_instance, can_build
from bendtrace.tape.tape import meta_of
from bendtrace.watch.mode_queries import unseen


@dataclasses.dataclass(frozen=True)
class LeafShape:
    """A placeholder in a structure: for a tensor, a number, or an object that stays the same."""

    kind: type
    number: int  # its position among the values that are passed on; -1 for none


@dataclasses.dataclass(frozen=True)
class ContainerShape:
    """A container: its type and its items."""

    kind: type
    keys: tuple[Any, ...]  # keys of a dict, else indices
    items: tuple[Any, ...]  # the items under the keys
    names: tuple[Any, ...] = ()  # names of attributes
    attributes: tuple[Any, ...] = ()  # their values
    mirrored: tuple[Any, ...] = ()  # attributes that are also items of the same name
    order: tuple[Any, ...] = ()  # the names of all attributes


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and identical(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class StructureMismatch(Exception):
    """A value does not have the expected structure: where, and how."""


def take_apart(value: Any, objects: bool = True) -> tuple[Any, list[Any]]:
    """Return the structure of a value, and the tensors, traced numbers and objects in it.

    Without `objects`, others are left out.
    """
    found: list[Any] = []
    return _shape_of(value, found, objects), found


def _shape_of(value: Any, found: list[Any], objects: bool) -> Any:
    kind = type(value)
    if kind in TRACED:
        found.append(value)
        return LeafShape(type(plain(value)), len(found) - 1)
    if isinstance(value, Tensor):
        found.append(value)
        return LeafShape(Tensor, len(found) - 1)
    if kind in PLAIN_TYPES:
        return _Constant(value)
    if _is_container(value):
        items = tuple(_container_items(value))
        inner = tuple(_shape_of(item, found, objects) for _, item in items)
        keys = tuple(key for key, _ in items)
        if kind in (tuple, list, dict):
            return ContainerShape(kind, keys, inner)
        contents = dict(items)
        attributes = attributes_of(value)
        mirrored = tuple(n for n in attributes if n in contents and contents[n] is attributes[n])
        own = {name: item for name, item in attributes.items() if name not in mirrored}
        below = tuple(_shape_of(item, found, objects) for item in own.values())
        return ContainerShape(kind, keys, inner, tuple(own), below, mirrored, tuple(attributes))
    if not objects:
        return LeafShape(kind, -1)
    found.append(value)
    return LeafShape(kind, len(found) - 1)


def _is_container(value: Any) -> bool:
    kind = type(value)
    if kind in (tuple, list, dict):
        return True
    if isinstance(value, (nn.Module, type)) or not can_build(kind):
        return False
    return isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value)


def _container_items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from dict.items(value)
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)


def assemble(shape: Any, values: list[Any]) -> Any:
    """Build a value from its structure and contents."""
    if type(shape) is LeafShape:
        return values[shape.number] if shape.number >= 0 else OmittedObject(shape.kind)
    if type(shape) is _Constant:
        return shape.value
    items = [assemble(item, values) for item in shape.items]
    if shape.kind is tuple:
        return tuple(items)
    if shape.kind is list:
        return items
    contents = dict(zip(shape.keys, items, strict=True))
    if shape.kind is dict:
        return contents
    attributes = {
        name: assemble(item, values)
        for name, item in zip(shape.names, shape.attributes, strict=True)
    }
    attributes.update((name, contents[name]) for name in shape.mirrored)
    return _build(shape, contents, items, attributes)


def with_values(value: Any, shape: Any, values: list[Any]) -> Any:
    """Build a value of a structure again, with other tensors and numbers but the same objects."""
    if type(shape) is LeafShape:
        return values[shape.number] if shape.number >= 0 else value
    if type(shape) is not ContainerShape:
        return value
    contents = dict(_container_items(value))
    items = [
        with_values(contents[key], item, values)
        for key, item in zip(shape.keys, shape.items, strict=True)
    ]
    same = all(new is contents[key] for key, new in zip(shape.keys, items, strict=True))
    if shape.kind in (tuple, list):
        return value if same else shape.kind(items)
    named = dict(zip(shape.keys, items, strict=True))
    if shape.kind is dict:
        return value if same else named
    own = attributes_of(value)
    attributes = {
        name: with_values(own[name], item, values)
        for name, item in zip(shape.names, shape.attributes, strict=True)
    }
    if same and all(attributes[name] is own[name] for name in shape.names):
        return value  # somebody else may hold it
    attributes.update((name, named[name]) for name in shape.mirrored)
    return _build(shape, named, items, attributes)


def refill_value(
    value: Any, shape: Any, values: list[Any], undo: list[Callable[[], None]] | None = None
) -> Any:
    """Put other tensors and numbers into the lists, dicts and objects of a value, in place.

    `undo` receives functions that put the former contents back where the new ones still are.
    """
    if type(shape) is not ContainerShape:
        return with_values(value, shape, values)
    contents = dict(_container_items(value))
    items = [
        refill_value(contents[key], item, values, undo)
        for key, item in zip(shape.keys, shape.items, strict=True)
    ]
    if isinstance(value, tuple):
        if all(map(operator.is_, items, contents.values())):
            return value
        return tuple(items) if shape.kind is tuple else with_values(value, shape, values)
    for key, item in zip(shape.keys, items, strict=True):
        if item is not contents[key]:
            (dict if isinstance(value, dict) else list).__setitem__(value, key, item)
            if undo is not None:
                undo.append(functools.partial(_exchange_item, value, item, contents[key]))
    own = attributes_of(value) if shape.kind not in (list, dict) else {}
    for name, item in zip(shape.names, shape.attributes, strict=True):
        _put_attribute(value, name, own[name], refill_value(own[name], item, values, undo), undo)
    for name in shape.mirrored:
        _put_attribute(value, name, own[name], items[shape.keys.index(name)], undo)
    return value


def _put_attribute(
    value: Any, name: Any, old: Any, new: Any, undo: list[Callable[[], None]] | None
) -> None:
    if new is not old:
        name.put(value, new)
        if undo is not None:
            undo.append(functools.partial(_restore_attribute, value, name, old, new))


def _restore_attribute(value: Any, name: Any, old: Any, new: Any) -> None:
    if attributes_of(value).get(name) is new:
        name.put(value, old)


def _exchange_item(container: Any, old: Any, new: Any) -> None:
    """Put something else into a list or dict, wherever something is in it by now."""
    for key, item in [*_container_items(container)]:
        if item is old:
            (dict if isinstance(container, dict) else list).__setitem__(container, key, new)


def leaves_of_shape(shape: Any) -> Iterator[LeafShape]:
    """Yield what is in a shape."""
    if type(shape) is LeafShape:
        yield shape
    elif type(shape) is ContainerShape:
        for item in (*shape.items, *shape.attributes):
            yield from leaves_of_shape(item)


def count_of(shape: Any) -> int:
    """Return the number of values that are handed over for a shape."""
    return sum(leaf.number >= 0 for leaf in leaves_of_shape(shape))


def has_mutable(shapes: Any) -> bool:
    """Return whether a structure contains mutable containers."""
    return any(
        type(shape) is ContainerShape
        and (not issubclass(shape.kind, tuple) or has_mutable((*shape.items, *shape.attributes)))
        for shape in shapes
    )


def holds_same(shape: Any, value: Any, other: Any) -> bool:
    """Return whether all lists, dicts and objects in one value are those of another value."""
    if value is other or type(shape) is not ContainerShape:
        return True
    if not issubclass(shape.kind, tuple) or type(other) is not shape.kind:
        return False
    return all(map(holds_same, shape.items, value, other))


def exchangeable(
    shape: Any, kinds: tuple[type, ...] = (Tensor, int, float, bool)
) -> tuple[int, ...]:
    """Return which values of a structure can be replaced: tensors and numbers."""
    return tuple(
        leaf.number for leaf in leaves_of_shape(shape) if leaf.number >= 0 and leaf.kind in kinds
    )


def shape_at(shape: Any, dig: tuple[Any, ...]) -> Any:
    """Return the shape of what some keys lead to; None if there is no such thing."""
    for key in dig:
        if type(shape) is not ContainerShape:
            return None
        if key in shape.keys:
            shape = shape.items[shape.keys.index(key)]
        elif key in shape.names:
            shape = shape.attributes[shape.names.index(key)]
        elif (position := _field(shape.kind, key)) is not None:
            shape = shape.items[position]
        else:
            return None
    return shape


def _field(kind: type, key: Any) -> int | None:
    """Return the position of a field of a named tuple."""
    fields: tuple[str, ...] = getattr(kind, "_fields", ()) or getattr(kind, "__match_args__", ())
    return fields.index(key) if key in fields else None


def _build(
    shape: ContainerShape, contents: dict[Any, Any], items: list[Any], attributes: dict[Any, Any]
) -> Any:
    ordered = {name: attributes[name] for name in shape.order}
    return build_instance(shape.kind, contents if issubclass(shape.kind, dict) else items, ordered)


class OmittedObject:
    """A placeholder for an object that is not passed on."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<a {self._kind.__qualname__}, not passed on>"


def collect(shape: Any, value: Any, found: list[Any], where: str = "") -> None:
    """Collect the tensors and numbers of a value of a given structure, one for each leaf.

    Raise `Mismatch` if the value has another structure.
    """
    if type(shape) is LeafShape:
        _collect_leaf(shape, value, found, where)
    elif type(shape) is _Constant:
        if not identical(value, shape.value):
            raise StructureMismatch(
                f"{_place_prefix(where)}{shape.value!r} became {describe(value)}"
            )
    else:
        _collect_items(shape, value, found, where)


def _collect_leaf(leaf: LeafShape, value: Any, found: list[Any], where: str) -> None:
    if leaf.kind is Tensor:
        if not isinstance(value, Tensor):
            raise StructureMismatch(
                f"{_place_prefix(where)}expected a tensor, got {describe(value)}"
            )
    elif leaf.kind in (int, float, bool):
        if type(value) is not leaf.kind:
            raise StructureMismatch(
                f"{_place_prefix(where)}expected a {leaf.kind.__name__}, got {describe(value)}"
            )
    elif leaf.number < 0:
        if not isinstance(value, OmittedObject):
            raise StructureMismatch(
                f"{_place_prefix(where)}a {leaf.kind.__qualname__} cannot be replaced"
            )
        return
    elif value is not found[leaf.number]:
        raise StructureMismatch(
            f"{_place_prefix(where)}a {leaf.kind.__qualname__} cannot be replaced"
        )
    found[leaf.number] = value


def _collect_items(shape: ContainerShape, value: Any, found: list[Any], where: str) -> None:
    if type(value) is not shape.kind:
        raise StructureMismatch(
            f"{_place_prefix(where)}expected a {_shape_text(shape)}, got {describe(value)}"
        )
    items = dict(_container_items(value))
    if len(items) == len(shape.keys) and tuple(items) != shape.keys:
        if all(key in items for key in shape.keys):  # what the model does next may depend on it
            raise StructureMismatch(
                f"{_place_prefix(where)}expected the keys in the order {_key_text(shape)}"
            )
    if len(items) != len(shape.keys) or any(key not in items for key in shape.keys):
        raise StructureMismatch(
            f"{_place_prefix(where)}expected a {_shape_text(shape)}, got {describe(value)}"
        )
    for key, item in zip(shape.keys, shape.items, strict=True):
        collect(item, items[key], found, f"{where}[{key!r}]")
    attributes = attributes_of(value) if shape.names else {}
    for name, item in zip(shape.names, shape.attributes, strict=True):
        if name not in attributes:
            raise StructureMismatch(f"{_place_prefix(where)}the attribute {name} is missing")
        collect(item, attributes[name], found, f"{where}.{name}")


def _place_prefix(where: str) -> str:
    return f"at {where}: " if where else ""


def _key_text(shape: ContainerShape) -> str:
    return ", ".join(map(repr, shape.keys))


def _shape_text(shape: ContainerShape) -> str:
    if issubclass(shape.kind, dict):
        return f"{shape.kind.__name__} with the keys {_key_text(shape)}"
    if shape.names:
        return shape.kind.__name__
    return f"{shape.kind.__name__} of {len(shape.items)}"


def describe(value: Any) -> str:
    """Return a short description of a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {meta_of(value).shape}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) in PLAIN_TYPES:
        return repr(value)
    return f"a {type(value).__qualname__}"


# Tensors in the inputs and outputs of a module: extracted as a list, put back, and compared.
#
# Tuples (including named tuples and torch's own), lists, dicts and dataclasses are searched, in
# their order of iteration; everything else is left as it is.


def all_tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in order, with repetitions.

    Example:
        >>> import torch
        >>> all_tensors_in({"a": torch.tensor(1), "b": [None, (torch.tensor(2), "text")]})
        [tensor(1), tensor(2)]
    """
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(value, keep, copy.copy)
    return found


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a value with other tensors instead of its own, in the order of `all_tensors_in`.

    Containers with changes are copied; the others stay the same objects.

    Example:
        >>> import torch
        >>> with_tensors({"a": torch.tensor(1), "b": [None]}, [torch.tensor(2)])
        {'a': tensor(2), 'b': [None]}
    """
    given = iter(tensors)
    return _map_tensors(value, lambda tensor: next(given), copy.copy)


class TensorExchange:
    """Tensors that temporarily replace others, by the ids of these.

    Lists, dicts and dataclasses are changed in place, not copied: the receiver may append to them,
    and the caller expects to see that. `undo` puts the tensors back.
    """

    def __init__(self, exchanged: dict[int, Tensor]) -> None:
        self._exchanged = exchanged
        self._touched: list[Any] = []
        # By the id of the replacement: it (so that the id is not reused), and the original.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def into(self, value: Any) -> Any:
        """Return a value with its tensors replaced: a new object only if it is a tuple."""
        return _map_tensors(value, self._other, self._touch, self._note)

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
            for key, item in list(contents(container)):
                found = self._originals.get(id(item))
                if found is not None:
                    _set_item(container, key, found[1])
        self._touched.clear()


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _map_tensors(
    value: Any,
    new: Callable[[Tensor], Tensor],
    changeable: Callable[[Any], Any],
    note: Callable[[Any, Any], None] | None = None,
    around: tuple[int, ...] = (),
) -> Any:
    """Return a value with other tensors.

    `changeable` returns the list, dict or dataclass to change instead of one. `note` is called with
    each replaced tuple, and its replacement. `around` has the ids of the containers around the
    value.
    """
    if isinstance(value, Tensor):
        return new(value)
    if type(value) in _PLAIN or id(value) in around:  # else a container inside itself
        return value
    inside = (*around, id(value))
    changed = [
        (key, other)
        for key, item in contents(value)
        if (other := _map_tensors(item, new, changeable, note, inside)) is not item
    ]
    if not changed:
        return value
    made = with_items(value, changed, changeable)
    if note is not None and isinstance(value, tuple):
        note(value, made)
    return made


def with_items(
    value: Any, changed: Iterable[tuple[Any, Any]], changeable: Callable[[Any], Any] = copy.copy
) -> Any:
    """Return a tuple, list, dict or dataclass with other items under some keys, indices or fields.

    `changeable` returns the list, dict or dataclass to change.
    """
    if isinstance(value, tuple):
        return _tuple_with(value, dict(changed))
    made = changeable(value)
    for key, other in changed:
        _set_item(made, key, other)
    return made


def contents(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a tuple, list, dict or dataclass with their keys; () for others."""
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


def _set_item(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, (list, dict)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also of a frozen dataclass


def write_count(value: Any) -> int:
    """Return a number that changes with each write to a tensor; 0 if it has no such number."""
    if not isinstance(value, Tensor):
        return 0
    # Tensors of inference mode raise where they are asked for a version (seen in torch 2.13).
    if type(value) in PLAIN_TENSORS and not function_modes():
        return 0 if value.is_inference() else value._version
    with torch._C.DisableTorchFunction():
        return 0 if value.is_inference() else value._version


def differ(old: Any, new: Any) -> bool:
    """Return whether two tensors or numbers differ; in tensors, nan equals nan."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return bool(old != new) if type(old) is type(new) else True
    with unseen():
        return _tensors_differ(old, new)


def _tensors_differ(old: Tensor, new: Tensor) -> bool:
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
