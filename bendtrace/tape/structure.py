"""Values with structure: how they are recorded, and rebuilt."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bendtrace.tape.captured import PLAIN_TYPES, AttributeKey, Captured
from bendtrace.tape.tape import Container, argument_leaves

# Creating objects from their content, bypassing their constructors.


_BASES = frozenset({object, tuple, list, dict, OrderedDict, set, frozenset})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# What only classes with a state of their own in C have as members.
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinMethodType)


def is_heap_type(cls: type) -> bool:
    """Return whether a class was made by a class statement, or by newer C code."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def has_state_of_c(cls: type) -> bool:
    """Return whether a class adds more to its objects than attributes."""
    return not is_heap_type(cls) or any(type(member) in _OF_C for member in vars(cls).values())


def can_build(cls: type) -> bool:
    """Return whether an object of the class is fully described by its content and attributes."""
    if issubclass(cls, tuple):
        return True
    for base in cls.__mro__:
        if base in _BASES:
            return cls is not object
        if has_state_of_c(base):
            return False
    return False


def items_in(container: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict in its order, bypassing its own methods."""
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    found: Iterable[tuple[Any, Any]] = base.items(container)
    return found


def refill_dict(container: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dict exactly these items in this order, bypassing its own methods."""
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    base.clear(container)
    for key, value in items.items():
        base.__setitem__(container, key, value)


def build_instance(cls: type, items: Any, attributes: dict[Any, Any]) -> Any:
    """Build the object that an `Instance` describes, without running its constructor."""
    made: Any
    if issubclass(cls, tuple):
        # torch.Size and torch's named results check their content in their constructor.
        special = hasattr(cls, "n_sequence_fields") or cls is torch.Size
        made = cls(items) if special else tuple.__new__(cls, items)
    elif issubclass(cls, (set, frozenset)):
        made = cls(items)
    else:
        made = next(base for base in cls.__mro__ if base in _BASES).__new__(cls)
        if issubclass(cls, dict):
            refill_dict(made, items)
        elif issubclass(cls, list):
            list.extend(made, items)
    for name, value in attributes.items():
        name.put(made, value)
    return made


def make_function(
    code: types.CodeType,
    namespace: dict[str, Any],
    defaults: tuple[Any, ...] | None,
    keyword_defaults: dict[str, Any] | None,
    contents: tuple[Any, ...],
    attributes: dict[str, Any],
    metadata: dict[str, Any],
) -> types.FunctionType:
    """Create a function from its code, its globals and its closure."""
    cells = tuple(map(types.CellType, contents))
    made = types.FunctionType(code, namespace, code.co_name, defaults, cells)
    made.__kwdefaults__ = keyword_defaults
    vars(made).update(attributes)
    for name, value in metadata.items():
        setattr(made, name, value)
    return made


# What `functools.wraps` takes over. Since Python 3.14 a function makes the annotations when asked.
FUNCTION_METADATA = (
    "__name__", "__qualname__", "__doc__", "__module__",
    "__annotations__" if sys.version_info < (3, 14) else "__annotate__",
)  # fmt: skip


def referents(function: Any) -> Iterator[Any]:
    """Yield the objects that code holds: closure, defaults, bound arguments, and containers."""
    if isinstance(function, types.MethodType):
        yield from (function.__func__, function.__self__)
    elif isinstance(function, type) and issubclass(function, torch.autograd.Function):
        for member in vars(function).values():
            yield member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, types.FunctionType):
        yield from function.__defaults__ or ()
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a name that is assigned only later
                continue
    elif isinstance(function, (staticmethod, classmethod)):
        yield function.__func__
    elif isinstance(function, property):
        yield from (function.fget, function.fset, function.fdel)
    elif isinstance(function, (tuple, list, set, frozenset)):
        yield from function
    elif isinstance(function, dict):
        yield from function.values()


def cached_results(cache: functools._lru_cache_wrapper[Any]) -> Iterator[Any]:
    """Yield the results in a `functools.lru_cache`, and the content of containers among them."""
    waiting = [result for _, result in entries_of(cache)]
    while waiting:
        item = waiting.pop()
        yield item
        if type(item) in (tuple, list):
            waiting += item
        elif type(item) is dict:
            waiting += item.values()


def are_cached(found: Iterable[tuple[functools._lru_cache_wrapper[Any], Any]]) -> bool:
    """Return whether each of some caches still has a result."""
    return all(any(kept is one for kept in cached_results(cache)) for cache, one in found)


def entries_of(cache: functools._lru_cache_wrapper[Any]) -> list[tuple[Any, Any]]:
    """Return the keys and results in a `functools.lru_cache`, but for keys that are lost.

    Tensors are compared by identity. Where nothing but a key holds one, no call can give that key.
    """
    return [(key, result) for key, result, again in _all_entries(cache) if not _is_lost(key, again)]


# Private to torch (seen in 2.13): without it no key counts as lost, which tests/borders notice.
_use_count: Any = getattr(torch.Tensor, "_use_count", lambda tensor: -1)


def key_parts(key: Any) -> Iterator[Any]:
    """Yield the parts of a key, but for plain values."""
    if type(key) in (tuple, frozenset):
        for item in key:
            yield from key_parts(item)
    elif type(key) not in PLAIN_TYPES:
        yield key


def _is_lost(key: Any, is_copied: bool) -> bool:
    """Return whether nothing but a key, and its copy if there is one, holds a tensor in it."""
    if type(key) is not tuple or torch.Tensor not in map(type, key):
        return False
    return any(
        type(item) is torch.Tensor
        and count == _ALONE + is_copied
        and _use_count(item) == 1  # which views and graphs add to
        and not weakref.getweakrefcount(item)
        for item, count in zip(key, _item_references(key), strict=True)
    )


def _item_references(items: tuple[Any, ...]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


_ALONE = _item_references((object(),))[0]


def _all_entries(cache: functools._lru_cache_wrapper[Any]) -> list[tuple[Any, Any, bool]]:
    """Return each key, its result, and whether the cache has a copy of the key as well."""
    # `lru_cache` is written in C, and shows counts only. To the collector it shows its dict, and
    # the links between the entries if it has a `maxsize` (CPython 3.11 to 3.14).
    own = getattr(cache, "__dict__", None)
    waiting = [
        referent
        for referent in gc.get_referents(cache)
        if referent is not own
        and type(referent) is not object
        and not (isinstance(referent, type) and referent.__module__ == "functools")
    ]
    tables = [referent for referent in waiting if type(referent) is dict]
    if cache.cache_parameters()["maxsize"] is None:
        return [(key, result, False) for key, result in tables[0].items()]
    # Each key is followed by its result, among other things (CPython 3.11 to 3.14).
    table = next((t for t in tables if _LINK in map(_kind_name, t.values())), {})
    keys = {id(key): key for key in table}
    found = []
    steps = iter(waiting)
    for referent in steps:
        number = id(referent) if id(referent) in keys else _number_of_copy(referent, keys)
        if number is not None:
            key = keys.pop(number)
            found.append((key, next(steps), key is not referent))
    return found


def _number_of_copy(key: Any, keys: dict[int, Any]) -> int | None:
    """Return the number of a key that is a copy with plain numbers: a run leaves it in the dict."""
    if type(key) is not tuple:
        return None
    try:
        hashed = hash(key)
    except TypeError:  # it is no key, but a result
        return None
    same = (number for number, one in keys.items() if hash(one) == hashed and one == key)
    return next(same, None)


_LINK = "_lru_list_elem"


def _kind_name(value: Any) -> str:
    return type(value).__name__


def make_partial(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> functools.partial[Any]:
    """Create a partial function from its parts."""
    return functools.partial(function, *args, **keywords)


def read_partial(value: functools.partial[Any]) -> tuple[Any, Any, Any, Any]:
    """Return function, arguments, keywords and attributes of a partial; None for no attributes.

    Asking for its `__dict__` would make one, and `partial(value)` goes past `value` only if it has
    none.
    """
    reduced: Any = functools.partial.__reduce__(value)
    parts: tuple[Any, Any, Any, Any] = reduced[2]
    return parts


def with_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """Return a tensor with Python attributes set on it."""
    tensor.__dict__.update(attributes)
    return tensor


# Values with structure, encoded: what a replay has to build again.  In recorded arguments and
# outputs, exact tuples, lists, dicts and slices represent themselves with `Ref`s inside. The
# classes here represent everything else.


class Existing:
    """An object that existed before the run: the object itself, not a copy."""

    __slots__ = ("part",)

    def __init__(self, part: Captured) -> None:
        self.part: Captured = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Existing) and other.part.named == self.part.named

    def __hash__(self) -> int:
        return hash(self.part.label)

    def __repr__(self) -> str:
        return self.part.label


class FixedObject:
    """An object used itself, not a copy, that no scan has found."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__qualname__}>"


class Opaque:
    """An object in a module's arguments that no op received: only its name is kept."""

    __slots__ = ("type",)

    def __init__(self, value: Any) -> None:
        self.type: type[Any] = type(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.type is self.type

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"<{self.type.__qualname__}>"


class Construction(Container):
    """An object created during the run by a call that a replay repeats."""

    __slots__ = ("args", "maker")

    def __init__(self, maker: Callable[..., Any], *args: Any) -> None:
        self.maker: Callable[..., Any] = maker  # the function to call; it has no side effects
        self.args: tuple[Any, ...] = args  # its arguments, encoded

    def inside(self) -> tuple[Any, ...]:
        """Return its arguments."""
        return self.args

    def with_inside(self, *inside: Any) -> Construction:
        """Return the same call with other arguments."""
        return Construction(self.maker, *inside)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Construction) and (other.maker, other.args) == (
            self.maker,
            self.args,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.maker.__name__}({', '.join(map(repr, self.args))})"


class Instance(Container):
    """An object created during the run: its class, its content and its attributes."""

    __slots__ = ("attributes", "cls", "items")

    def __init__(self, cls: type) -> None:
        self.cls: type = cls
        self.items: Any = None  # content of subclasses of tuple, list, dict, torch.Size and sets
        self.attributes: dict[AttributeKey, Any] = {}  # its own attributes, by name

    def inside(self) -> tuple[Any, ...]:
        """Return its content and its attributes."""
        return self.items, self.attributes

    def with_inside(self, *inside: Any) -> Instance:
        """Return an object of the same class with other content and attributes."""
        copy = Instance(self.cls)
        copy.items, copy.attributes = inside
        return copy

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Instance)
            and other.cls is self.cls
            and other.items == self.items
            and other.attributes == self.attributes
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = [] if self.items is None else [repr(self.items)]
        inside += [f"{name}={value!r}" for name, value in self.attributes.items()]
        return f"{self.cls.__name__}({', '.join(inside)})"


def existing_in(value: Any) -> Iterator[Existing]:
    """Yield the objects in recorded arguments, or in an output, that existed before the run."""
    return (leaf for leaf in argument_leaves(value) if type(leaf) is Existing)
