"""Encoding values as references to ops, and making traced scalars plain after the run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.python.bytecode import stores_outside
from bendtrace.python.lazy import LazyModule
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    Array,
    AttributeKey,
    CaptureKind,
    attributes_of,
    is_array,
    slot_names,
)
from bendtrace.tape.scalars import RETIRED, TRACED, TracedScalar, plain
from bendtrace.tape.structure import (
    FUNCTION_METADATA,
    Construction,
    Existing,
    FixedObject,
    Instance,
    Opaque,
    build_instance,
    can_build,
    items_in,
    make_function,
    make_partial,
    read_partial,
    refill_dict,
    with_attributes,
)
from bendtrace.tape.tape import Ref
from bendtrace.watch.functions import OPERATORS, tells_sizes_from_tuples
from bendtrace.watch.rank_sync import is_wiring

if TYPE_CHECKING:
    from bendtrace.python import results
    from bendtrace.record import array_functions
    from bendtrace.record.values import RunValues
else:
    results = LazyModule("bendtrace.python.results")
    array_functions = LazyModule("bendtrace.record.array_functions")


class ListOperand:
    """A list of numbers that an op gives, as an operand of other ops."""

    __slots__ = ("numbers", "ref")

    def __init__(self, numbers: list[Any], ref: Ref) -> None:
        self.numbers: list[Any] = numbers
        self.ref: Ref = ref


class Memo(collections.UserDict[Any, Any]):
    """The memo of `copy.deepcopy`, which names objects by their addresses.

    No container to others: neither what is inserted nor a replay needs what is in it.
    """


class Encoder:
    """Encodes arguments and outputs."""

    def __init__(self, values: RunValues) -> None:
        self._values = values
        self.called: Any = None  # the function that the arguments are for, but for the most usual

    def _tells_sizes(self) -> bool:
        return self.called is not None and tells_sizes_from_tuples(self.called)

    def arguments(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """Return arguments as recorded, and as the function has to receive them."""
        encoded: list[Any] = []
        usable: list[Any] | None = None
        for position, value in enumerate(args):
            kind = type(value)
            if kind is Tensor or kind is nn.Parameter:
                encoded.append(self._values.ref(value))
            elif kind in PLAIN_TYPES:
                encoded.append(value)
            else:
                recorded, use = self.argument(value, kind)
                encoded.append(recorded)
                if use is not value:
                    if usable is None:
                        usable = list(args)
                    usable[position] = use
        return tuple(encoded), args if usable is None else tuple(usable)

    def memo(self, tensor: Tensor, memo: dict[Any, Any]) -> Memo:
        """Return the memo that a tensor is copied with, as `Tensor.__deepcopy__` receives it."""
        if memo and (
            type(tensor) is not Tensor
            or tensor.__dict__
            or "torch" in memo  # which holds memory that may be the tensor's as well
            or id(tensor) in memo
            or id(tensor.grad) in memo
        ):
            self._values.tape.block(
                "an argument contains a copy that another may share memory with, which a replay "
                f"could not rebuild ({self._values.here()})"
            )
        shown = Memo()
        shown.data = memo
        return shown

    def argument(self, value: Any, kind: type) -> tuple[Any, Any]:
        """Return one argument, of some type, as recorded and as the function has to receive it."""
        if kind is Tensor or kind is nn.Parameter:
            return self._values.ref(value), value
        if kind in RETIRED:
            return value._value, value._value
        if kind in TRACED:
            if value._origin is not self._values.origin:  # of a run around this one
                return value._value, value._value
            return self._values.scalar_ref(value), value._value
        if kind is ListOperand:
            return value.ref, value.numbers
        if issubclass(kind, list) and (lists := self._values.accumulation) is not None:
            if (found := lists.operand(value, self.argument)) is not None:
                return found
            if lists.is_own(value):
                value, kind = [*value], list
        if kind is tuple or kind is list or kind is torch.Size:
            recorded, use = self.arguments(value)
            if use is not value:
                use = kind(use)
            if kind is torch.Size and self._tells_sizes():
                size = Instance(torch.Size)
                size.items = list(recorded)
                return size, use
            return (list(recorded) if kind is list else recorded), use
        if kind is dict:
            recorded, use = self.arguments(tuple(value.values()))
            keys = [self.key(key, "an argument") for key in value]
            if any(map(operator.is_not, use, value.values())):
                return dict(zip(keys, recorded, strict=True)), dict(zip(value, use, strict=True))
            return dict(zip(keys, recorded, strict=True)), value
        if kind is slice:
            given = (value.start, value.stop, value.step)
            parts = given if PLAIN_TYPES.issuperset(map(type, given)) else _indices(given)
            recorded, use = self.arguments(parts)
            return slice(*recorded), (value if use is given else slice(*use))
        if isinstance(value, Tensor):
            return self._values.ref(value), value
        return self.output(value, "an argument", {}), value

    def output(self, value: Any, what: str, memo: dict[int, Any]) -> Any:
        """Encode a value so that a replay can build it again."""
        kind = type(value)
        if kind in PLAIN_TYPES or isinstance(value, Enum):
            return value
        if kind in RETIRED:
            return value._value
        if kind in TRACED:
            return (
                self._values.scalar_ref(value)
                if value._origin is self._values.origin
                else value._value
            )
        if isinstance(value, Tensor):
            if kind in _TENSORS and value.__dict__ and self._values.environment.find(value) is None:
                return self._encode_once(
                    value, memo, lambda: self._encode_attributes(value, what, memo)
                )
            return self._values.ref(value)
        if (stands := self._values.tensor_of_array(value)) is not None:
            tensor = self._values.ref(stands)
            return self._encode_once(
                value, memo, lambda: Construction(array_functions.array_of, tensor)
            )
        if (part := self._values.environment.find(value)) is not None:
            return Existing(part)
        return self._encode_once(value, memo, lambda: self._new(value, kind, what, memo))

    def _encode_once(self, value: Any, memo: dict[int, Any], encode: Callable[[], Any]) -> Any:
        """Encode an object once, however often it occurs."""
        if id(value) in memo:
            number = memo[id(value)]
            if number is None:
                self._values.tape.block(f"a value contains itself ({self._values.here()})")
            return number
        memo[id(value)] = None
        encoded = memo[id(value)] = encode()
        memo.setdefault(0, []).append(value)  # so that no other object gets its id
        return encoded

    def _encode_attributes(self, tensor: Tensor, what: str, memo: dict[int, Any]) -> Construction:
        attributes = self.output(dict(tensor.__dict__), what, memo)
        return Construction(with_attributes, self._values.ref(tensor), attributes)

    def _function(self, function: types.FunctionType, what: str, memo: dict[int, Any]) -> Any:
        cells = function.__closure__ or ()
        try:
            contents = tuple(cell.cell_contents for cell in cells)
        except ValueError:  # a name that is assigned only later
            contents = None
        # `functools.wraps`, and so each transform of torch.func, leaves what it is around.
        marked = set(vars(function)) - {"__wrapped__"}
        if contents is None or stores_outside(function.__code__) or marked:
            self._values.tape.block(
                f"{what} contains the function {function.__name__}, which a replay could not "
                f"rebuild ({self._values.here()})"
            )
            return Opaque(function)
        metadata = {name: getattr(function, name) for name in FUNCTION_METADATA}
        parts = (function.__defaults__, function.__kwdefaults__, contents, vars(function), metadata)
        return Construction(
            make_function, function.__code__, FixedObject(function.__globals__),
            *(self.output(part, what, memo) for part in parts),
        )  # fmt: skip

    def _new(self, value: Any, kind: type, what: str, memo: dict[int, Any]) -> Any:
        def inside(item: Any) -> Any:
            return self.output(item, what, memo)

        if kind is tuple or kind is list:
            return kind(inside(item) for item in value)
        if kind is dict:
            return {self.key(key, what): inside(item) for key, item in value.items()}
        if kind is slice:
            return slice(inside(value.start), inside(value.stop), inside(value.step))
        if kind is collections.deque:
            return Construction(collections.deque, [*map(inside, value)], value.maxlen)
        if kind is types.BuiltinFunctionType and isinstance(value.__self__, Tensor):
            return Construction(getattr, inside(value.__self__), value.__name__)
        if _is_constant(value):
            return value
        if kind is types.FunctionType:
            return self._function(value, what, memo)
        if kind is Memo:
            return Construction(dict)
        if kind is types.MethodType:
            return Construction(types.MethodType, inside(value.__func__), inside(value.__self__))
        if kind is functools.partial and not read_partial(value)[3]:
            return Construction(make_partial, *map(inside, read_partial(value)[:3]))
        if is_array(value) and not value.dtype.hasobject and not hasattr(value, "__dict__"):
            # The run's numpy computations on guarded values are as constant as the values; content
            # of tensors and random numbers do not get here (see `ESCAPES` and `Finish`).
            owner = value
            while is_array(owner.base):
                owner = owner.base
            shared = memo.setdefault(-id(owner), value) is not value
            if shared or (owner is not value and self._values.environment.find(owner) is not None):
                self._values.tape.block(
                    f"{what} contains an array that shares memory with another "
                    f"({self._values.here()})"
                )
            return Array(value)
        if isinstance(value, nn.Module) or not can_build(kind) or self._holds_values(kind):
            self._values.tape.block(
                f"{what} contains a {kind.__qualname__}, which a replay could not rebuild "
                f"({self._values.here()})"
            )
            return Opaque(value)
        instance = Instance(kind)
        if isinstance(value, dict):
            instance.items = {self.key(key, what): inside(v) for key, v in items_in(value)}
        elif isinstance(value, (tuple, list)):
            instance.items = [inside(item) for item in value]
        elif isinstance(value, (set, frozenset)):
            order = self._order_of(value)
            if order is None:
                self._values.tape.block(
                    f"{what} contains a {kind.__qualname__}, which a replay could not rebuild "
                    f"({self._values.here()})"
                )
            instance.items = [inside(item) for item in order or value]
        instance.attributes = {name: inside(item) for name, item in attributes_of(value).items()}
        return instance

    def _holds_values(self, kind: type) -> bool:
        """Return whether a class that the run has made holds values of the run."""
        seen: set[int] = set()
        return any(
            self._values.holds_values(member, seen)
            for cls in kind.__mro__
            if is_local_class(cls)
            for member in vars(cls).values()
        )

    def key(self, key: Any, what: str) -> Any:
        """Return a key of a dict as each run gives it.

        A traced key was guarded when it was hashed.
        """
        kind = type(key)
        if kind in PLAIN_TYPES:
            return key
        key = without_traced(key)
        if not self._is_steady(key):
            self._values.tape.block(
                f"{what} contains a {kind.__qualname__} as a key, which a replay could not "
                f"rebuild ({self._values.here()})"
            )
        return key

    def _is_steady(self, key: Any) -> bool:
        """Return whether a key is the same in every run."""
        if type(key) in PLAIN_TYPES or isinstance(key, (Enum, AttributeKey)):
            return True
        if isinstance(key, Tensor):
            return False
        part = self._values.environment.find(key)
        if part is not None:
            return part.kind in (CaptureKind.IDENTITY, CaptureKind.MODULE, CaptureKind.PLAIN)
        if isinstance(key, (tuple, frozenset)):
            return all(map(self._is_steady, key))
        return _is_constant(key)

    def _order_of(self, members: AbstractSet[Any]) -> list[Any] | None:
        """Return members of a set in an order in which it can be filled; None if none was found.

        What is in the same place of its table comes in the order in which it was put in.
        """
        plain = [without_traced(member) for member in members]
        if not all(map(self._hashes_alike, plain)):
            return list(members)  # which have no order that each run of the model repeats
        found = zip(members, plain, strict=True)
        orders = itertools.permutations(found) if len(plain) < _FEW else iter([tuple(found)])
        for order in orders:
            if [*map(id, {one for _, one in order})] == [*map(id, plain)]:
                return [member for member, _ in order]
        return None

    def _hashes_alike(self, value: Any) -> bool:
        """Return whether a value has the same hash in every run, and none that users compute."""
        if type(value) in (tuple, frozenset):
            return all(map(self._hashes_alike, value))
        if isinstance(type(value).__hash__, types.FunctionType) and not isinstance(value, Enum):
            return False
        return self._is_steady(value) or self._values.environment.find(value) is not None

    def leniently(self, value: Any, depth: int = 0) -> Any:
        """Encode the arguments of a module, as far as ops have seen them."""
        kind = type(value)
        if isinstance(value, Tensor) or kind in TRACED or kind in PLAIN_TYPES:
            return self.output(value, "a module's argument", {})
        if kind is tuple or kind is list:
            return kind(self.leniently(item, depth) for item in value)
        if isinstance(value, dict):
            return {key: self.leniently(item, depth) for key, item in value.items()}
        part = self._values.environment.find(value)
        if part is not None:
            return Existing(part)
        is_record = isinstance(value, tuple) or (
            dataclasses.is_dataclass(value) and not isinstance(value, type)
        )
        if not is_record or depth > _DEEPEST:
            return Opaque(value)
        instance = Instance(kind)
        if isinstance(value, tuple):
            instance.items = [self.leniently(item, depth + 1) for item in value]
        for name, item in attributes_of(value).items():
            instance.attributes[name] = self.leniently(item, depth + 1)
        return instance


_FEW = 6


def without_traced(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a value with every traced scalar in it made plain, in place where mutable."""
    kind = type(value)
    if kind in TRACED:
        return value._value
    if kind in PLAIN_TYPES or isinstance(value, (nn.Module, type)):
        return value
    if isinstance(value, Tensor):
        if value.__dict__:
            for name, item in value.__dict__.items():
                value.__dict__[name] = without_traced(item, memo)
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = value
    if isinstance(value, (tuple, set, frozenset)):
        items = [without_traced(item, memo) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            if isinstance(value, tuple) or not results.exchange_members(value, items):
                memo[id(value)] = value = build_instance(kind, items, attributes_of(value))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            value[position] = without_traced(item, memo)
    elif isinstance(value, dict):
        before = [part for pair in items_in(value) for part in pair]
        after = [without_traced(part, memo) for part in before]
        if any(new is not old for new, old in zip(after, before, strict=True)):
            refill_dict(value, dict(zip(after[::2], after[1::2], strict=True)))
    if can_build(kind):
        for name, item in attributes_of(value).items():
            new = without_traced(item, memo)
            if new is not item:
                name.put(value, new)
    return value


def plain_copy(value: Any) -> Any:
    """Return a copy of a value, with plain numbers in place of traced ones and `ListOperand`s."""
    kind = type(value)
    if kind is ListOperand:
        return value.numbers
    if kind is list or kind is tuple or kind is torch.Size:
        return kind(map(plain_copy, value))
    return (
        {plain_copy(k): plain_copy(v) for k, v in value.items()} if kind is dict else plain(value)
    )


def scalars_in(value: Any, depth: int = 5, seen: set[int] | None = None) -> Iterator[TracedScalar]:
    """Yield the traced scalars in a value: in containers, and in attributes of objects."""
    kind = type(value)
    if kind in TRACED:
        yield value
    if kind in PLAIN_TYPES or kind in TRACED or isinstance(value, _NOT_LOOKED_INTO) or not depth:
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, (tuple, list, set, frozenset)):
        inside += value
    elif isinstance(value, dict):
        inside += (part for pair in items_in(value) for part in pair)
    if can_build(kind):
        inside += attributes_of(value).values()
    for item in inside:
        yield from scalars_in(item, depth - 1, seen)


_NOT_LOOKED_INTO = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.CodeType)


def with_items_of(container: Any, other: Any) -> Any:
    """Return a list or dict with what is in another now, which stood in for it with plain numbers.

    Code has written to the other. What is in it is returned where it is no list or dict.
    """
    kind = type(container)
    if container is other or kind is not type(other):
        return other
    if kind is list:
        pairs = itertools.zip_longest(container[: len(other)], other)
        container[:] = [with_items_of(*pair) for pair in pairs]
    elif kind is dict:
        refill_dict(container, {k: with_items_of(container.get(k), v) for k, v in other.items()})
    else:
        return other
    return container


def make_keys_plain(container: dict[Any, Any]) -> None:
    """Replace the traced scalars among the keys of a dict, in place."""
    if any(without_traced(key) is not key for key in container):
        refill_dict(container, {without_traced(key): v for key, v in items_in(container)})


def index_with_numbers(key: Any, number_of: Callable[[Any], Any]) -> Any:
    """Return an index with the numbers that objects of Python stand for in its slices."""
    kind = type(key)
    if kind is tuple:
        parts = tuple(index_with_numbers(part, number_of) for part in key)
        return parts if any(map(operator.is_not, parts, key)) else key
    if kind is not slice:
        return key
    given = (key.start, key.stop, key.step)
    if PLAIN_TYPES.issuperset(map(type, given)):
        return key
    return slice(*(number_of(part) if _stands_for_number(part) else part for part in given))


def _stands_for_number(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN_TYPES or kind in TRACED or kind in RETIRED:
        return False
    return isinstance(getattr(kind, "__index__", None), types.FunctionType)


def _indices(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts of a slice, with the numbers that objects stand for in it."""
    return tuple(
        operator.index(part)
        if hasattr(part, "__index__")
        and not isinstance(part, Tensor)
        and type(part) not in TRACED
        and type(part) not in RETIRED
        else part
        for part in parts
    )


def _is_constant(value: Any) -> bool:
    """Return whether an object without tensors is the same in every run."""
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        return owner is None or isinstance(owner, (types.ModuleType, type))
    if isinstance(value, type):
        return not is_local_class(value)
    if isinstance(value, (types.MethodDescriptorType, types.GenericAlias, types.UnionType)):
        return True
    if type(value).__module__ == "typing":  # in annotations
        return True
    if isinstance(value, types.FunctionType):
        # A nested function, and a lambda, can be created again by each run.
        return value.__closure__ is None and "<" not in value.__code__.co_qualname
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.dtype, numpy.ufunc)):
        return True
    if is_wiring(value):
        return True
    return isinstance(value, OPERATORS)


def is_local_class(cls: type) -> bool:
    """Return whether a class may be defined by a run: it is not found by its name."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not cls


_TENSORS = frozenset({Tensor, nn.Parameter})
_DEEPEST = 4  # records in each other; they can hold themselves


# Traced scalars that a run has left outside its known changes.  In attributes of classes, items of
# counters, variables of closures: later readers must find the numbers that eager would have left.


def holds(scalars: list[TracedScalar]) -> list[int]:
    """Return the number of holders of each scalar, and of one held by lists only."""
    every = [*scalars, object()]
    counts = [sys.getrefcount(scalar) for scalar in every]
    return [*counts[:-1], counts[-1] + 1]


def make_plain(scalars: list[TracedScalar], before: list[int]) -> None:
    """Replace all scalars of a run that code has kept, wherever they are held, also in tuples.

    Those in the variables of running code stay. `before` is the result of `holds` for those of the
    arguments, before the run.
    """
    now = holds(scalars)
    before = [*before[:-1], *[now[-1]] * (len(now) - len(before))]
    left: list[Any] = [
        scalar
        for scalar, count, earlier in zip(scalars, now, before, strict=False)
        if count > earlier
    ]
    plain = {id(scalar): scalar._value for scalar in left}
    # The collector finds the lists of this function among the holders, too.
    own: list[Any] = [scalars, plain]
    while left:
        asked = tuple(left)  # which the collector finds as well, in Python 3.13 and newer
        own += [left, asked]
        # A generator here would make a cell of `holder` since Python 3.12, which is found as a
        # holder itself.
        skipped = {id(one) for one in (own, *own)}
        holders = [holder for holder in gc.get_referrers(*asked) if id(holder) not in skipped]
        for holder in holders:
            _exchange_numbers(holder, plain)
        # What cannot be changed is made again, and exchanged in what holds it, in the next round.
        left = [holder for holder in holders if isinstance(holder, (tuple, frozenset))]
        del holders  # which would be a holder of them
        for one in left:
            items = [plain.get(id(item), item) for item in one]
            plain[id(one)] = build_instance(type(one), items, attributes_of(one))


def _exchange_numbers(holder: Any, numbers: dict[int, Any]) -> None:
    if isinstance(holder, dict):
        for key, value in _numbers_of(holder.items(), numbers):
            _put_item(holder, key, value)
        if any(id(key) in numbers for key in holder):
            make_keys_plain(holder)
    elif isinstance(holder, (list, collections.deque)):
        for position, value in _numbers_of(enumerate(holder), numbers):
            holder[position] = value
    elif isinstance(holder, set):
        for member in [member for member in holder if id(member) in numbers]:
            holder.discard(member)
            holder.add(numbers[id(member)])
    elif isinstance(holder, types.CellType):
        holder.cell_contents = numbers[id(holder.cell_contents)]
    elif not isinstance(holder, types.FrameType):
        own = getattr(holder, "__dict__", None)
        if type(own) is dict:
            _exchange_numbers(own, numbers)
        named = ((name, getattr(holder, name, None)) for name in slot_names(type(holder)))
        for name, value in _numbers_of(named, numbers):
            object.__setattr__(holder, name, value)


def _numbers_of(pairs: Iterable[tuple[Any, Any]], numbers: dict[int, Any]) -> list[tuple[Any, Any]]:
    return [(key, numbers[id(value)]) for key, value in pairs if id(value) in numbers]


def _put_item(holder: dict[Any, Any], key: Any, value: Any) -> None:
    if "__module__" in holder:  # as the attributes of a class have it, which have caches
        for owner in gc.get_referrers(holder):
            if isinstance(owner, type) and vars(owner).get(key) is holder[key]:
                type.__setattr__(owner, key, value)
                return
    dict.__setitem__(holder, key, value)
