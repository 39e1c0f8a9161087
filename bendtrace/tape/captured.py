"""Captured values: everything a run can read before it begins, as a flat list."""

from __future__ import annotations

import collections
import contextvars
import functools
import inspect
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch

PLAIN_TYPES: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented),
        torch.dtype, torch.device, torch.layout, torch.memory_format,
    }
)  # fmt: skip


UNSET = object()  # a context variable or a slot without a value


class Access(Enum):
    """The way from a parent to a captured value."""

    ROOT = "root"  # an argument, by its position among the bound ones
    FIXED = "fixed"  # the object itself, known since the trace
    ITEM = "item"  # parent[key]
    DICT = "dict"  # parent.__dict__[key]
    ATTRIBUTE = "attribute"  # getattr(parent, key), for __slots__
    CELL = "cell"  # parent.cell_contents
    CONTEXT = "context"  # parent.get(UNSET)


class CaptureKind(Enum):
    """The kind of a captured value, which determines its guard."""

    TENSOR = "tensor"
    NUMBER = "number"  # an int or float that is an input: traced, guarded only where consumed
    PLAIN = "plain"  # guarded by value
    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    OBJECT = "object"  # guarded by type; its attributes are captured, too
    SET = "set"  # guarded by equality
    LARGE = "large"  # a big container of plain values: guarded by equality
    ARRAY = "array"  # a numpy array: guarded by its bytes
    OPEN_ARRAY = "open array"  # one whose content is an input: guarded by its layout
    MODULE = "module"  # guarded by identity
    IDENTITY = "identity"  # functions, classes, foreign objects: guarded by identity
    GROWING = "growing"  # a list or deque that the run only adds to: guarded by type
    ALIAS = "alias"  # the very object that is captured elsewhere, too


class Array:
    """The content of a numpy array at one point in time."""

    __slots__ = ("layout", "value")

    def __init__(self, array: Any) -> None:
        self.value: Any = array.copy("K")
        self.layout: tuple[Any, ...] = _layout(array)

    @property
    def is_writeable(self) -> bool:
        """Return whether the array may be written to."""
        return bool(self.layout[1])

    def __eq__(self, other: object) -> bool:
        """Return whether an array, or another such content, is equal bit by bit."""
        array: Any = other.value if isinstance(other, Array) else other
        return bool(
            is_array(array)
            and (other.layout if isinstance(other, Array) else _layout(array)) == self.layout
            and array.dtype == self.value.dtype
            and array.shape == self.value.shape
            and array.tobytes() == self.value.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<array{self.value.shape}>"


def _facts_of_array(array: Any) -> tuple[Any, ...]:
    return type(array), array.dtype, array.shape, array.flags.aligned, _layout(array)[:2]


def _layout(array: Any) -> tuple[Any, ...]:
    return array.strides, array.flags.writeable, array.base is None


def is_scalar(kind: type) -> bool:
    """Return whether a type is of numpy's numbers and texts, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def is_whole(kind: type) -> bool:
    """Return whether a type is of numpy's whole numbers, of which calls may have few."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, (numpy.integer, numpy.bool_))


def is_number(kind: type) -> bool:
    """Return whether a type is of numpy's numbers that are no truths, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.number)


# Classes of tensors that have no functions of their own.
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def requires_grad(tensor: torch.Tensor) -> bool:
    """Return whether a tensor requires grad; False if torch refuses to say.

    torch refuses for a view that was made under no_grad and whose base was changed since. A model
    may have such a view, as long as it does not use it.
    """
    try:
        if type(tensor) in PLAIN_TENSORS:
            return tensor.requires_grad
        return bool(read_of(tensor, "requires_grad"))
    except RuntimeError:
        return False


def read_of(tensor: torch.Tensor, name: str) -> Any:
    """Return an attribute of a tensor, of whose reading its class does not learn.

    The `__torch_function__` of a subclass belongs to the model: it may count the questions.
    """
    with torch._C.DisableTorchFunction():
        return getattr(tensor, name)


def is_inference(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in inference mode, as `read_of` does."""
    with torch._C.DisableTorchFunction():
        return tensor.is_inference()


def gradient_function(tensor: torch.Tensor) -> Any:
    """Return a tensor's gradient function; None if it has none, or torch refuses to say."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.grad_fn if tensor.requires_grad else None
    except RuntimeError:  # see `requires_grad`
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf.

    Asking a view of a tensor that requires grad makes torch record its origin, and a later change
    of the view by the model would then behave differently.
    """
    base = tensor._base
    return (base is None or not requires_grad(base)) and tensor.is_leaf


def is_uneven(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nested or sparse: it may have no sizes or strides to ask for."""
    return tensor.is_nested or tensor.layout is not torch.strided


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_ndarray(value: Any) -> bool:
    """Return whether a value is an array of numpy's own class, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


class TensorFacts(NamedTuple):
    """The guarded properties of a tensor among the arguments."""

    dtype: torch.dtype
    device: torch.device
    rank: int
    requires_grad: bool
    layout: torch.layout
    attributes: int  # the number of its own attributes, set by Python


class Length(NamedTuple):
    """The number of items of a container.

    Attributes:
        number: how many there are.
        most: how many a deque can hold; None if that is not limited.
    """

    number: int
    most: int | None = None

    def __bool__(self) -> bool:
        return self.number > 0


class Keys(NamedTuple):
    """The keys of a container and the names of its attributes, in their order."""

    keys: tuple[Any, ...]

    @property
    def items(self) -> tuple[Any, ...]:
        """The keys of items."""
        return tuple(key for key in self.keys if not isinstance(key, AttributeKey))

    @property
    def number(self) -> int:
        """The number of items."""
        return len(self.items)

    @property
    def attributes(self) -> tuple[AttributeKey, ...]:
        """The keys of attributes."""
        return tuple(key for key in self.keys if isinstance(key, AttributeKey))

    @property
    def own(self) -> tuple[str, ...]:
        """The names of the attributes in `__dict__`."""
        return tuple(key.name for key in self.attributes if key.access is Access.DICT)

    def __bool__(self) -> bool:
        return bool(self.keys)


class Copy(NamedTuple):
    """A copy of a value that is compared as a whole, in a form that is equal for equal bits."""

    content: Any

    def __bool__(self) -> bool:
        return bool(self.content)


Size: TypeAlias = Length | Keys | Copy | TensorFacts


@dataclass(slots=True, eq=False)
class Captured:
    """One value that the run could read.

    Attributes:
        index: position in the list; parents come before children.
        parent: the value it is reached from.
        access: how it is reached.
        key: key or attribute name for that.
        kind: see `CaptureKind`.
        value: the value itself. Tensors are released after the run (None), alias values hold the
            value they equal, LARGE and SET values a copy.
        type: its exact type.
        label: its name in user code: `x`, `past[0]`, `self.fc.weight`.
        is_argument: whether it is an argument, or inside one.
        size: the guarded property of a container: its `Length` (lists, tuples, modules' dicts), its
            `Keys` (dicts, objects, lists and tuples with attributes), a `Copy` of it (sets, arrays
            and large containers; of an open array, its layout); for a tensor its `TensorFacts`.
        hidden: keys of a module's attributes that are not captured.
    """

    index: int
    parent: Captured | None
    access: Access
    key: Any
    kind: CaptureKind
    value: Any
    type: type
    label: str
    is_argument: bool
    size: Size | None = None
    hidden: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.label

    @property
    def named(self) -> tuple[Any, ...]:
        """The identity of this part, which is the same in all runs of a program.

        Labels do not tell apart what classes, modules or closures have under the same name, nor
        what is in a dict under keys that look alike.
        """
        part: Captured = self.value if self.kind is CaptureKind.ALIAS else self
        return part.placed

    @property
    def placed(self) -> tuple[Any, ...]:
        """The same, whatever else has turned out to be the same object in this run."""
        root, places = self, []
        # What has no other place is known by its identity: runs reach it on different ways.
        label = "" if root.access is Access.FIXED else root.label
        while root.access is not Access.FIXED and root.parent is not None:
            key, keys, root = root.key, root.parent.size, root.parent
            if type(key) not in _SPELLED and isinstance(keys, Keys):
                places += [place for place, one in enumerate(keys.keys) if one is key]
        return "part", label, id(root.value) if root.access is Access.FIXED else 0, *places

    def read(self, arguments: tuple[Any, ...]) -> Any:
        """Read its current value.

        Raises:
            LookupError: it no longer exists; also AttributeError or TypeError.
        """
        if self.kind is CaptureKind.ALIAS:
            return self.value.read(arguments)
        if self.access is Access.ROOT:
            return arguments[self.key]
        if self.parent is None:
            return self.value
        return self.read_from(self.parent.read(arguments))

    def read_from(self, parent: Any) -> Any:
        """Read its current value from its parent."""
        if self.access is Access.CELL:
            return parent.cell_contents
        if self.access is Access.CONTEXT:
            return parent.get(UNSET)
        if isinstance(self.key, AttributeKey):
            return getattr(parent, self.key.name)
        return stored_item(parent, self.key) if isinstance(parent, dict) else parent[self.key]


def stored_item(container: dict[Any, Any], key: Any) -> Any:
    """Return an item of a dict, which makes none if there is none: a `defaultdict` would."""
    if not dict.__contains__(container, key):
        raise KeyError(key)
    return dict.__getitem__(container, key)


@dataclass(slots=True)
class EnvironmentChange:
    """A change that a run made to its environment.

    Attributes:
        part: the container that was changed.
        key: the changed key; for a list whose length changed, None for the whole content; for one
            that was added to, `Added.ITEMS`.
        value: the new value; what was added.
        deleted: whether the key was deleted.
    """

    part: Captured
    key: Any
    value: Any
    deleted: bool = False

    def store(self, value: Any) -> None:
        """Store `value` at the changed location."""
        store_item(self.part.value, self.key, value)

    def covers(self, part: Captured) -> bool:
        """Return whether the change affects a captured value, or the keys or items of it."""
        if part is self.part:
            return True
        inner: Captured | None = part
        while inner is not None:
            if inner.parent is self.part and (
                # As a dict compares keys, which may be tensors.
                self.key is None or inner.access is Access.CELL or inner.key in {self.key}
            ):
                return True
            inner = inner.parent
        return False

    @property
    def label(self) -> str:
        """The name of the changed location in user code."""
        return self.part.label if self.key is None else child_label(self.part, self.key)


class Added(Enum):
    """The key of a change that adds to a list or deque."""

    ITEMS = "items"


class AttributeKey(str):
    """A key that is an attribute name, as opposed to a dict's key.

    Attributes:
        name: name of the attribute; the text differs from it if a dict has an item with that name.
        access: how to reach it.
    """

    __slots__ = ("access", "name")
    access: Access
    name: str

    def __new__(cls, name: str, access: Access, text: str | None = None) -> AttributeKey:  # noqa: D102
        key = super().__new__(cls, name if text is None else text)
        key.access, key.name = access, name
        return key

    def beside(self, items: Mapping[Any, Any]) -> AttributeKey:
        """Return a key that differs from the keys of some items."""
        key = self
        while key in items:
            key = AttributeKey(self.name, self.access, f".{key}")
        return key

    def put(self, owner: Any, value: Any) -> None:
        """Set the attribute of `owner`, bypassing properties and frozen classes."""
        if self.access is Access.DICT:
            owner.__dict__[self.name] = value
        else:
            object.__setattr__(owner, self.name, value)


def store_item(container: Any, key: Any, value: Any) -> None:
    """Store a value in a container, by the key of a change; items are added by now."""
    if isinstance(container, types.CellType):
        container.cell_contents = value
    elif key is Added.ITEMS:
        for position, item in enumerate(value, len(container) - len(value)):
            container[position] = item
    elif key is None:
        refill_sequence(container, value)
    elif isinstance(key, AttributeKey):
        key.put(container, value)
    else:
        container[key] = value


def refill_sequence(container: Any, items: list[Any]) -> None:
    """Exchange all items of a list or deque."""
    if type(container) is collections.deque:
        container.clear()
        container.extend(items)
    else:
        container[:] = items


def is_cache(part: Captured) -> bool:
    """Return whether a part is a `functools.lru_cache`."""
    return part.type is functools._lru_cache_wrapper


def holds_number(part: Captured) -> bool:
    """Return whether a part is a number in a place of the model that can hold another one.

    A number in a tuple is one if another tuple can be put there.
    """
    is_number = part.kind is CaptureKind.PLAIN and part.type in (int, float)
    while is_number and part.parent is not None and part.parent.type is tuple:
        part = part.parent
    return is_number and is_exchangeable(part)


def is_exchangeable(part: Captured) -> bool:
    """Return whether a part is in a place of the model that can hold another value."""
    holder = part.parent
    if holder is None or part.is_argument:
        return False
    if part.access is Access.ATTRIBUTE:
        # Code of the user's may be in the place of a slot.
        member = inspect.getattr_static(holder.type, part.key.name, None)
        return isinstance(member, types.MemberDescriptorType)
    if part.access is Access.DICT:
        return holder.kind is not CaptureKind.TENSOR
    if part.access is Access.CELL:
        return True
    return part.access is Access.ITEM and holder.type in _HOLDERS


def layout_over_ranks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the ranks and placements of a DTensor; nothing for other tensors."""
    if type(tensor) in PLAIN_TENSORS or "torch.distributed.tensor" not in sys.modules:
        return {}
    if not isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor):
        return {}
    spec = tensor._spec  # the properties, which read this, would be recorded where the model runs
    return {"device_mesh": spec.mesh, "placements": spec.placements}


def attributes_of(value: Any) -> dict[AttributeKey, Any]:
    """Return the attributes of the object itself, bypassing properties and `__getattr__`."""
    if isinstance(value, torch.Tensor) and (layout := layout_over_ranks(value)):
        own = vars(value)
        found = {AttributeKey(name, Access.ATTRIBUTE): item for name, item in layout.items()}
        return found | {AttributeKey(name, Access.DICT): item for name, item in own.items()}
    # Whether there are any is not asked of the object, whose `__getattr__` may answer anything.
    own = value.__dict__ if type(value).__dictoffset__ else {}
    found = {AttributeKey(name, Access.DICT): item for name, item in own.items()}
    for name in slot_names(type(value)):
        if (item := slot_of(value, name)) is not UNSET:
            found[AttributeKey(name, Access.ATTRIBUTE)] = item
    return found


def slot_of(value: Any, name: str) -> Any:
    """Return the content of a slot of an object, bypassing `__getattr__`; UNSET for nothing."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return UNSET


def has_attributes(kind: type) -> bool:
    """Return whether instances of a container class also have attributes."""
    return kind not in _BARE and bool(kind.__dictoffset__)


def compares_by_identity(kind: type) -> bool:
    """Return whether instances of a class are compared, or found in dicts, by their identity."""
    own: Any = kind
    return own.__eq__ is object.__eq__ or own.__hash__ is object.__hash__


def module_name_of(kind: type) -> str:
    """Return the name of the module of a class; "" if unknown."""
    name: Any = kind.__module__  # of some that are written in Cython, a descriptor
    return name if isinstance(name, str) else ""


def slot_names(kind: type) -> Iterator[str]:
    """Yield the attributes that a class and its bases keep in slots, set or not."""
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                yield name


def child_label(part: Captured, key: Any) -> str:
    """Return the name of an item of a container in user code."""
    if key is Added.ITEMS:
        return part.label
    if isinstance(key, AttributeKey):
        return f"{part.label}.{key.name}"
    if part.access is Access.FIXED:
        return f"{part.label}.{key}"
    return f"{part.label}[{key!r}]"


# What a container holds: its keys, their types, the types of its values, and these.
Exact = tuple[tuple[Any, ...], tuple[type, ...], tuple[type, ...], tuple[Any, ...]]
# Plain types of which two values are the same if they are equal.
_COMPARED_BY_VALUE = frozenset({type(None), bool, int, str, bytes})


# Of a float: nan has a sign that `==` and `hex` do not show.
bits_of: Callable[[float], bytes] = struct.Struct("d").pack


def _bitwise(value: Any) -> Any:
    """Return a plain value in a form that is equal for the same bits only."""
    kind = type(value)
    if kind is float:
        return bits_of(value)
    if kind is complex:
        return bits_of(value.real), bits_of(value.imag)
    if kind is range or kind is slice:  # range(0, 3, 2) == range(0, 4, 2)
        return tuple(map(_exact_value, (value.start, value.stop, value.step)))
    if kind is tuple:
        return tuple(map(_exact_value, value))
    if kind is frozenset:
        return frozenset(map(_exact_value, value))
    if is_scalar(kind):
        return str(value.dtype), value.tobytes()
    return value


def _exact_value(value: Any) -> tuple[type, Any]:
    """A value with its type, since 1 == 1.0 == True, and floats by their bits."""
    return type(value), _bitwise(value)


def _set_members(values: Any) -> tuple[Any, ...]:
    """Return a set's members, in iteration order."""
    return tuple(map(_exact_value, values))


def _plain_content(container: Any) -> Exact:
    """Return the content of a container of plain values: items and attributes, in order."""
    kind = type(container)
    keys: tuple[Any, ...] = ()
    if isinstance(container, dict):
        base: Any = collections.OrderedDict if _is_ordered(container) else dict
        keys, values = tuple(base.keys(container)), tuple(base.values(container))
    else:
        values = tuple((tuple if isinstance(container, tuple) else list).__iter__(container))
    if kind not in _BARE:
        own = attributes_of(container)
        if isinstance(container, collections.defaultdict):
            own[_FACTORY] = container.default_factory
        keys, values = (*keys, *own), (*values, *own.values())
    types, kinds = tuple(map(type, values)), tuple(map(type, keys))
    if not _COMPARED_BY_VALUE.issuperset(types):
        values = tuple(map(_bitwise, values))
    if not _COMPARED_BY_VALUE.issuperset(kinds):
        keys = tuple(map(_bitwise, keys))
    return keys, kinds, types, values


# How what is compared as one is copied: equal copies mean that nothing in it has changed.
COPIED: dict[CaptureKind, Callable[[Any], Any]] = {
    CaptureKind.SET: _set_members,
    CaptureKind.LARGE: _plain_content,
    CaptureKind.ARRAY: Array,
    CaptureKind.OPEN_ARRAY: _facts_of_array,
}


def is_as_copied(part: Captured, value: Any) -> bool:
    """Return whether a value holds what one that is compared as one held when it was copied."""
    now = value if part.kind is CaptureKind.ARRAY else COPIED[part.kind](value)
    return isinstance(part.size, Copy) and bool(part.size.content == now)


def _is_ordered(value: dict[Any, Any]) -> bool:
    return isinstance(value, collections.OrderedDict)


def identical(a: Any, b: Any) -> bool:
    """Return whether two plain values are the same in every respect: type, sign of zero, nan."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return bits_of(a) == bits_of(b)
    if type(a) is complex:
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if type(a) in (range, slice, frozenset) or is_scalar(type(a)):
        return bool(_bitwise(a) == _bitwise(b))
    return bool(a == b)


def same_keys(now: Iterable[Any], before: tuple[Any, ...]) -> bool:
    """Return whether the keys of a dict, or the attributes of an object, are those that they were.

    In the same order, and each the same: 1 == 1.0 == True, and objects may be equal that differ.
    """
    keys = tuple(now)
    return len(keys) == len(before) and all(map(_is_same_key, keys, before))


def _is_same_key(a: Any, b: Any) -> bool:
    if a is b:
        return True
    kind = type(a)
    if kind is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_is_same_key, a, b))
    is_plain = kind in PLAIN_TYPES or kind in (frozenset, AttributeKey) or is_scalar(kind)
    return is_plain and kind is type(b) and identical(a, b)


def container_content(part: Captured, names: Iterable[str] = ()) -> dict[Any, Any]:
    """Return the current content of a container, by key; attributes have `AttributeKey`s.

    Args:
        part: the container.
        names: the names to include, for a module's globals, a class or a cell.
    """
    value = part.value
    if part.kind is CaptureKind.IDENTITY:
        if isinstance(value, types.CellType):
            return dict.fromkeys(names, value.cell_contents)
        if isinstance(value, contextvars.ContextVar):
            return dict.fromkeys(names, value.get(UNSET))
        return {name: value[name] for name in names if name in value}
    content: dict[Any, Any] = {}
    if isinstance(value, (list, tuple, collections.deque)):
        content.update(enumerate(value))
    elif isinstance(value, dict):
        # Bypassing its own methods, but in iteration order.
        base: Any = collections.OrderedDict if _is_ordered(value) else dict
        content.update(base.items(value))
        for key in part.hidden:
            content.pop(key, None)
        if isinstance(value, collections.defaultdict) and part.access is not Access.FIXED:
            content[_FACTORY.beside(content)] = value.default_factory
    if type(value) not in _BARE and (
        part.access is not Access.FIXED or part.kind in (CaptureKind.OBJECT, CaptureKind.TENSOR)
    ):
        own = attributes_of(value)
        if isinstance(value, random.Random):  # it belongs to the state, which draws change
            own.pop(_GAUSS, None)
        content.update({key.beside(content): item for key, item in own.items()} if content else own)
    return content


_HOLDERS = (
    dict, list, collections.OrderedDict, collections.defaultdict, collections.Counter,
    collections.deque,
)  # fmt: skip
_SPELLED = PLAIN_TYPES | {AttributeKey}  # keys that labels tell apart
_BARE = (dict, list, tuple)  # these have no attributes
_GAUSS = AttributeKey("gauss_next", Access.DICT)
_FACTORY = AttributeKey("default_factory", Access.ATTRIBUTE)
