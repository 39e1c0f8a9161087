"""Objects that a run can read and no captured value describes, watched by their content.

A replay can take captured values from their places and write back to them. Other objects, such as
counters, registries, and classes of other packages, are only compared: as long as each of them
holds the same objects, a run would read the same. An object whose content cannot be read, such as
an iterator, is reported to the `Finder`, which makes the run live.
"""

from __future__ import annotations

import abc
import builtins
import calendar
import copyreg
import csv
import ctypes
import decimal
import functools
import logging
import operator
import random
import reprlib
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Protocol

import torch

from bendtrace.environment.provenance import is_users_class
from bendtrace.environment.readers import (
    SWITCHES,
    content_reader,
    is_opaque,
    position_reader,
    read_added_to_tensors,
    read_items,
    read_keys,
    read_logger,
    read_members,
    read_names,
    read_slots,
    read_switched,
    table_of,
)
from bendtrace.source.memory_words import Words
from bendtrace.source.versions import version_of
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    identical,
    is_array,
    module_of,
    slots_of,
)
from bendtrace.tape.structure import entries_of, read_partial


class Finder(Protocol):
    """Receives what watched objects hold that is not watched by content."""

    def met(self, value: Any, label: str) -> bool:
        """Take a tensor, module, function or class; return False for any other thing."""

    def met_object(self, kind: type) -> None:
        """Note that there is an object of a class."""

    def met_opaque(self, value: Any, label: str) -> None:
        """Note something whose content cannot be read."""

    def met_too_many(self) -> None:
        """Note that there is more than can be watched."""


MOST = 10_000  # objects that are watched, and names that are scanned


class WatchedContent:
    """Objects that are watched by content.

    Args:
        finder: lists tensors, functions and classes among what the objects hold.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder: Finder | None = finder
        self._seen: dict[int, Any] = {}
        self._tables: list[_Content] = []
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[Any] = []
        self._owners: list[Any] = []
        self._own: list[Any] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._whole: list[_Content] = []
        self._others: list[_Content] = []
        self._readers: list[Callable[[Any], Any]] = []
        self._values: list[Any] = []
        self._items: list[Any] = []
        self._classes: list[type] = []
        self._bases: list[Any] = []

    def __bool__(self) -> bool:
        return bool(
            self._dicts or self._objects or self._others or self._whole or self._classes
            or self._owners
        )  # fmt: skip

    def add(self, value: Any, label: str) -> None:
        """Watch a thing, and all that it holds, unless that is more than can be watched."""
        waiting = [(value, label)]
        while waiting:
            value, label = waiting.pop()
            if id(value) not in self._seen:
                if len(self._seen) >= MOST:
                    assert self._finder is not None
                    self._finder.met_too_many()
                    return
                waiting += self._meet(value, label)

    def add_class(self, cls: type) -> None:
        """Watch what a class of installed code has, without what that holds."""
        if id(cls) not in self._seen:
            self._seen[id(cls)] = cls
            self._watch(table_of(cls), read_members, cls.__qualname__)

    def add_settings(self, names: set[str]) -> None:
        """Watch settings that decide what code does that uses some names, or some packages."""
        for asking, value, read, label in SETTINGS:
            if not asking.isdisjoint(names):
                self._add_content(value, read, label)
        if not _ASKING.isdisjoint(names):
            self._watch(
                table_of(torch.Tensor), read_added_to_tensors, "the attributes of torch.Tensor"
            )

    def add_builtins(self, names: Collection[str]) -> None:
        """Watch what the names of Python's builtins stand for."""
        asked = (*sorted({*names} - {"print", "open"}),)  # which a run replaces itself
        self._watch(vars(builtins), functools.partial(read_keys, asked), "builtins")

    def add_registered(self) -> None:
        """Watch what counts as a subclass of an abstract class."""
        self._add_content(abc, lambda module: [module.get_cache_token()], "abc")

    def add_bases(self, classes: Iterable[type]) -> None:
        """Watch what classes inherit from."""
        self._classes += classes
        self._bases += map(_mro, self._classes)

    def add_names(self, things: Iterable[Any]) -> None:
        """Watch the names and texts that Python keeps of functions and classes."""
        for thing in things:
            self._add_content(thing, read_names, getattr(thing, "__qualname__", ""))

    def add_attribute(self, thing: Any, name: str) -> None:
        """Watch one attribute of a function or class, and all that it holds."""
        label = f"{thing.__qualname__}.{name}"
        content = self._add_content(thing, functools.partial(read_slots, (name,)), label)
        for held in content.held():
            self.add(held, label)

    def add_slots(self, thing: Any, label: str) -> None:
        """Watch what a thing keeps in slots, and all that this holds."""
        if names := tuple(slots_of(type(thing))):
            content = self._add_content(thing, functools.partial(read_slots, names), label)
            for name, held in zip(names, content.held(), strict=True):
                self.add(held, f"{label}.{name}")

    def add_partial(self, partial: functools.partial[Any], label: str) -> None:
        """Watch the parts of a partial function, without what these hold."""
        self._add_content(partial, read_partial, label)

    def add_position(self, value: Any, label: str) -> None:
        """Watch how far an iterator of Python's own has come; do nothing for anything else."""
        reader = position_reader(value)
        if reader is not None:
            self._add_content(value, reader, label)

    def add_kind(self, thing: Any) -> None:
        """Watch of which class a thing is."""
        self._note(thing)

    def add_owner(self, thing: Any) -> None:
        """Watch that a thing keeps its attributes in the same dict, whatever its content."""
        self._owners.append(thing)
        self._own.append(vars(thing))

    def add_cache(self, cache: functools._lru_cache_wrapper[Any], label: str) -> None:
        """Watch that a cache still gives what it gave."""
        self._whole.append(_Kept(cache, entries_of, label))

    def same(self) -> bool:
        """Whether everything holds what it held."""
        now = [*map(version_of, self._dicts)]
        if now != self._versions:
            if not all(table.same() for table in self._tables):
                return False
            self._versions = now
        # Usually only a few classes are watched: empty lists cost no call.
        return (
            (not self._objects or [*map(type, self._objects)] == self._kinds)
            and (not self._classes or self._same_bases())
            and (not self._owners or all(map(is_, map(_attributes, self._owners), self._own)))
            and self.holds_same()
        )

    def holds_same(self) -> bool:
        """Whether everything without memory words is unchanged."""
        return (not self._others or self._same_items()) and (
            not self._whole or all(content.same() for content in self._whole)
        )

    @property
    def holds_more(self) -> bool:
        """Whether there is more than words tell: what `holds_same` looks at."""
        return bool(self._others or self._whole)

    def add_to(self, words: Words) -> None:
        """Add the words that tell that all is the same, but for what `holds_same` looks at.

        Raises:
            Unreadable: something has no such words.
        """
        for table in self._dicts:
            words.add_version(table)
        for thing, kind in zip(self._objects, self._kinds, strict=True):
            words.add_class(thing, kind)
        for owner, own in zip(self._owners, self._own, strict=True):
            words.add_attributes(owner, own)
        for cls, bases in zip(self._classes, self._bases, strict=True):
            words.add_bases(cls, bases)

    def _same_bases(self) -> bool:
        """Whether classes inherit from what they did, also where that was put back."""
        now = [*map(_mro, self._classes)]
        if all(map(is_, now, self._bases)):
            return True
        same = [*map(len, now)] == [*map(len, self._bases)] and all(
            map(is_, chain.from_iterable(now), chain.from_iterable(self._bases))
        )
        if same:
            self._bases = now
        return same

    def _same_items(self) -> bool:
        """Whether what is compared item by item is the same, which is mostly found out in C."""
        now = [*chain.from_iterable(map(operator.call, self._readers, self._values))]
        if len(now) == len(self._items) and all(map(is_, now, self._items)):
            return True
        return all(content.same() for content in self._others)

    def changed(self) -> Iterator[str]:
        """Yield the labels of what does not hold what it held."""
        for content in (*self._tables, *self._others, *self._whole):
            if not content.same():
                yield content.label
        for thing, kind in zip(self._objects, self._kinds, strict=True):
            if type(thing) is not kind:
                yield f"the class of a {kind.__qualname__}"
        for owner, own in zip(self._owners, self._own, strict=True):
            if _attributes(owner) is not own:
                yield f"the attributes of a {type(owner).__qualname__}"

    def things(self) -> Iterator[Any]:
        """Yield what is watched and may change: objects, their slots and their attributes."""
        yield from self._objects
        yield from self._values
        yield from self._own

    def close(self) -> None:
        """End the search: nothing is added from now on."""
        self._finder = None
        self._seen = {}

    def _meet(self, value: Any, label: str) -> list[tuple[Any, str]]:
        kind = type(value)
        if kind in PLAIN_TYPES or (
            kind in (tuple, frozenset) and PLAIN_TYPES.issuperset(map(type, value))
        ):
            return []
        assert self._finder is not None
        self._seen[id(value)] = value
        if kind in weakref.ProxyTypes:  # which passes for what it stands for
            self._finder.met_opaque(value, label)
            return []
        if is_array(value) and isinstance(value.base, ctypes.Array):  # memory that may be gone
            self._finder.met_opaque(value, label)
            return []
        if self._finder.met(value, label):
            return []
        if module_of(kind).startswith(_OF_TORCH) and callable(value) and not is_users_class(kind):
            return []  # an operator, or a function that was compiled
        if module_of(kind) in SWITCHES and not is_users_class(kind):
            self._add_content(value, read_switched, label)
            return []
        if kind is tuple or kind is frozenset:  # which hold the same for ever
            return [(item, f"{label}[...]") for item in value]
        self._finder.met_object(kind)
        if isinstance(value, logging.Logger):  # it keeps answers, which come and go
            self._add_content(value, read_logger, label)
            return []
        found: list[tuple[Any, str]] = []
        reader = content_reader(value)
        if reader is not None:
            self._note(value)
            if reader is read_items and kind is dict:
                found += self._add_table(value, label)
            else:
                content = self._add_content(value, reader, label)
                found += [(item, f"{label}[...]") for item in content.held()]
        elif is_opaque(value):
            self._finder.met_opaque(value, label)
        # What code of the user's does not name, it does not look at; other code may.
        form = "{}.{}" if is_users_class(kind) else "{}[{}]"
        has_own = kind.__dictoffset__ and not isinstance(value, functools.partial)
        own = value.__dict__ if has_own else None
        if type(own) is dict:
            self._note(value)
            self._owners.append(value)
            self._own.append(own)
            self._add_table(own, label)
            found += [(item, form.format(label, name)) for name, item in own.items()]
        if names := tuple(slots_of(kind)):
            self._note(value)
            content = self._add_content(value, functools.partial(read_slots, names), label)
            named = zip(names, content.held(), strict=True)
            found += [(item, form.format(label, name)) for name, item in named]
        return found

    def _add_content(self, value: Any, read: Callable[[Any], Any], label: str) -> _Content:
        content = _Content(value, read, label)
        if content.is_whole:
            self._whole.append(content)
        else:
            self._others.append(content)
            self._readers.append(read)
            self._values.append(value)
            self._items += content.held()
        return content

    def _watch(self, table: dict[Any, Any], read: Callable[[Any], Any], label: str) -> None:
        """Watch what a reader finds in a dict; it is called when the dict was written to."""
        self._tables.append(_Content(table, read, label))
        self._dicts.append(table)
        self._versions.append(version_of(table))

    def _note(self, value: Any) -> None:
        if not self._objects or self._objects[-1] is not value:
            self._objects.append(value)
            self._kinds.append(type(value))

    def _add_table(self, table: dict[Any, Any], label: str) -> list[tuple[Any, str]]:
        self._watch(table, read_items, label)
        keys = [(key, f"a key of {label}") for key in table if type(key) not in PLAIN_TYPES]
        return keys + [(item, f"{label}[{key!r:.40}]") for key, item in table.items()]


class _Content:
    """What one thing held, as one of the readers below reads it."""

    __slots__ = ("_read", "_was", "label", "value")

    def __init__(self, value: Any, read: Callable[[Any], Any], label: str) -> None:
        self.value = value
        self.label = label
        self._read = read
        self._was = read(value)

    def same(self) -> bool:
        now = self._read(self.value)
        if type(now) is not tuple:
            return bool(now == self._was)
        return len(now) == len(self._was) and all(map(_alike, now, self._was))

    @property
    def is_whole(self) -> bool:
        """Whether it is not compared item by item."""
        return type(self._was) is not tuple

    def held(self) -> tuple[Any, ...]:
        return self._was if type(self._was) is tuple else ()


class _Kept(_Content):
    """The entries of a cache, to which others may come."""

    __slots__ = ()

    def same(self) -> bool:
        now = {id(key): result for key, result in self._read(self.value)}
        return all(now.get(id(key), now) is result for key, result in self._was)


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) in PLAIN_TYPES and identical(a, b))


# Objects of torch's that can be called, and have nothing that a forward would ask for.
_OF_TORCH = ("torch._", "torch.jit", "torch.fx", "torch.export", "torch.ops")
# Where code names these, it may ask for attributes that tensors do not have. A run puts some there
# itself: torch's own, and things of this package.
_ASKING = frozenset({"hasattr", "getattr", "AttributeError", "dir"})
_attributes = attrgetter("__dict__")
_mro = attrgetter("__mro__")


# Settings of Python, of packages and of torch that influence code that names them.
#
# What a setting is set to is no global of the code that asks for it. It is watched where the code
# of the user names what reads it, or a package that has it.


def _filters(module: Any) -> Any:
    return (*module.filters,)


def _precision(module: Any) -> Any:
    now = module.getcontext()
    return [now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, now.traps.copy()]


def _of_numpy(loaded: Any) -> Any:
    numpy = loaded.modules.get("numpy")
    if numpy is None:
        return []
    printing = numpy.get_printoptions().values()
    return [*numpy.geterr().values(), numpy.geterrcall(), numpy.getbufsize(), *printing]


def _of_pandas(loaded: Any) -> Any:
    config = loaded.modules.get("pandas._config.config")
    found: list[Any] = []
    waiting = [] if config is None else [config._global_config]
    while waiting:
        for value in waiting.pop().values():
            (waiting if isinstance(value, dict) else found).append(value)
    return found


def _numpys_random_state(loaded: Any) -> Any:
    numpy = loaded.modules.get("numpy")
    if numpy is None:
        return []
    kind, words, *others = numpy.random.get_state()
    return [kind, words.tobytes(), *others]


def _of_cuda(module: Any) -> Any:
    products = module.matmul
    return [
        module.cudnn_sdp_enabled(), module.fp16_bf16_reduction_math_sdp_allowed(),
        module.preferred_blas_library(), module.preferred_linalg_library(),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_accumulation,
    ]  # fmt: skip


def _cuda_use(module: Any) -> Any:
    if not module.is_initialized():
        return [None]
    return [module.current_device(), module.is_current_stream_capturing()]


# What code names, what has the setting, what reads it, and what it is called in messages.
SETTINGS: tuple[tuple[frozenset[str], Any, Callable[[Any], Any], str], ...] = (
    (frozenset({"warn", "warn_explicit"}), warnings, _filters, "warnings.filters"),
    (frozenset({"Decimal", "decimal"}), decimal, _precision, "decimal.getcontext()"),
    (frozenset({"numpy"}), sys, _of_numpy, "a setting of numpy's"),
    (frozenset({"getstate"}), random, lambda module: [module.getstate()], "random.getstate()"),
    (frozenset({"get_state"}), sys, _numpys_random_state, "numpy.random.get_state()"),
    (frozenset({"reprlib"}), reprlib, lambda module: [*vars(module.aRepr).values()],
     "reprlib.aRepr"),
    (frozenset({"calendar"}), calendar, lambda module: [module.firstweekday()],
     "calendar.firstweekday()"),
    (frozenset({"csv", "_csv"}), csv, lambda module: [module.field_size_limit()],
     "csv.field_size_limit()"),
    (frozenset({"time", "datetime"}), time, attrgetter("tzname", "timezone", "altzone", "daylight"),
     "the time zone"),
    (frozenset({"get_verbosity"}), logging,
     lambda module: [module.getLogger("transformers").getEffectiveLevel()], "get_verbosity()"),
    (frozenset({"pandas"}), sys, _of_pandas, "a setting of pandas"),
    (frozenset({"copy", "deepcopy", "pickle"}), copyreg,
     lambda module: [*chain.from_iterable(module.dispatch_table.items())], "copyreg"),
    (frozenset({"opt_einsum"}), torch.backends.opt_einsum,
     lambda module: [module.enabled, module.strategy], "torch.backends.opt_einsum"),
    (frozenset({"get_overwrite_module_params_on_conversion",
                "get_swap_module_params_on_conversion"}), torch.__future__,
     lambda module: [*vars(module).values()], "torch.__future__"),
    (frozenset({"fill_uninitialized_memory"}), torch.utils.deterministic,
     lambda module: [module.fill_uninitialized_memory], "fill_uninitialized_memory"),
    (frozenset({"hub"}), torch.hub, lambda module: [module._hub_dir], "torch.hub.get_dir()"),
    (frozenset({"autocast", "get_autocast_dtype", "get_autocast_cpu_dtype",
                "get_autocast_gpu_dtype"}), torch,
     lambda module: [*map(module.get_autocast_dtype, ("cpu", "cuda"))], "get_autocast_dtype()"),
    (frozenset({"is_warn_always_enabled", "is_anomaly_check_nan_enabled"}), torch,
     lambda module: [module.is_warn_always_enabled(), module.is_anomaly_check_nan_enabled()],
     "is_warn_always_enabled()"),
    (frozenset({"is_multithreading_enabled", "is_view_replay_enabled"}), torch.autograd,
     lambda module: [module.is_multithreading_enabled(), module.is_view_replay_enabled()],
     "a setting of torch.autograd"),
    (frozenset({"engine"}), torch.backends.quantized, lambda module: [module.engine],
     "torch.backends.quantized.engine"),
    (frozenset({
        "cudnn_sdp_enabled", "fp16_bf16_reduction_math_sdp_allowed", "preferred_blas_library",
        "preferred_linalg_library", "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    }), torch.backends.cuda, _of_cuda, "a setting of torch.backends.cuda"),
    (frozenset({"current_device", "is_current_stream_capturing", "is_initialized"}), torch.cuda,
     _cuda_use, "the current device of torch.cuda"),
    (frozenset({"get_sharing_strategy"}), torch.multiprocessing,
     lambda module: [module.get_sharing_strategy()], "get_sharing_strategy()"),
)  # fmt: skip
