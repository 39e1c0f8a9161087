"""The values that a scan found, and the contents of containers as flat lists."""

from __future__ import annotations

import abc
import builtins
import calendar
import contextvars
import copyreg
import csv
import ctypes
import decimal
import functools
import gc
import logging
import operator
import random
import reprlib
import sys
import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, getitem, is_, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.hooks import RemovableHandle

from bendtrace.python.lazy import LazyModule
from bendtrace.python.versions import Depends, Words, all_same, version_of
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    Access,
    AttributeKey,
    Captured,
    CaptureKind,
    child_label,
    identical,
    is_array,
    module_name_of,
    slot_names,
    slot_of,
)
from bendtrace.tape.structure import entries_of
from bendtrace.watch.code_facts import place_naming
from bendtrace.watch.provenance import is_users_class

if TYPE_CHECKING:
    from bendtrace.watch import readers
    from bendtrace.watch.scan import Scan
else:
    readers = LazyModule("bendtrace.watch.readers")

# Objects that a run can read and no captured value describes, watched by their content.
#
# A replay can take captured values from their places and write back to them. Other objects, such as
# counters, registries, and classes of other packages, are only compared: as long as each of them
# holds the same objects, a run would read the same. An object whose content cannot be read, such as
# an iterator, is reported to the `Scan`, which makes the run live.


def read_items(value: Any) -> tuple[Any, ...]:
    """Return the keys and values of a dict."""
    return (*dict.keys(value), *dict.values(value))


def read_members(table: dict[str, Any]) -> tuple[Any, ...]:
    """Return the members of a torch class that neither torch.compile nor this package exchanges."""
    return tuple(
        part
        for name, member in table.items()
        if (name[:2] != "__" or name in _ASKED) and name != "_compiled_call_impl"
        # Each hook that is put anywhere counts the class attribute of its handle up.
        if name != "next_id" or table.get("__module__") != RemovableHandle.__module__
        for part in (name, member)
    )


_ASKED = frozenset({"__call__", "__getattr__", "__setattr__", "__getitem__", "__iter__", "__len__"})


def read_slots(names: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    """Return the values in slots."""
    return tuple(slot_of(value, name) for name in names)


# Modes that are switched by objects, which keep what to switch back to.
SWITCHES = ("torch.amp.autocast_mode", "torch.autograd.grad_mode")


def read_switched(value: Any) -> Any:
    """Return the setting of a switch of a mode."""
    return [(n, item) for n, item in vars(value).items() if not n.startswith(("prev", "_infer"))]


def read_keys(names: tuple[str, ...], table: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of some keys."""
    return tuple(map(table.get, names))


_OF_TENSORS = frozenset(dir(torch.Tensor))


def read_added_to_tensors(table: dict[str, Any]) -> list[str]:
    """Return the names of attributes that somebody gave to `torch.Tensor`."""
    return [
        name
        for name, value in table.items()
        if name not in _OF_TENSORS and not module_name_of(type(value)).startswith("bendtrace.")
    ]


def read_logger(value: Any) -> Any:
    """Return the settings that decide which records a logger passes on, and where to."""
    found: list[Any] = [value.manager.disable]
    while value is not None:
        found += (value.level, value.disabled, value.propagate, list(value.handlers))
        value = value.parent
    return found


def read_definition(value: Any) -> Any:
    """Return the names and the docstring of a function or class."""
    return [getattr(value, name, None) for name in PYTHONS]


# What Python itself keeps of functions and classes.
PYTHONS = ("__name__", "__qualname__", "__doc__", "__module__")


def class_dict(cls: type) -> dict[Any, Any]:
    """Return the dict that a class keeps its attributes in, past the proxy that it shows."""
    # `vars` gives a proxy, whose only referent is the dict (Python 3.11 to 3.14).
    table = gc.get_referents(vars(cls))[0]
    assert type(table) is dict
    return table


# Objects that a run can read and no captured value describes, watched by their content.


MOST = 10_000  # objects that are watched, and names that are scanned


class WatchedContent:
    """Objects that are watched by content.

    Args:
        finder: lists tensors, functions and classes among what the objects hold.
    """

    def __init__(self, finder: Scan) -> None:
        self._finder: Scan | None = finder
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
        """Watch an object and its content, unless that is more than can be watched."""
        waiting = [(value, label)]
        while waiting:
            value, label = waiting.pop()
            if id(value) not in self._seen:
                if len(self._seen) >= MOST:
                    assert self._finder is not None
                    self._finder.note_too_many()
                    return
                waiting += self._meet(value, label)

    def add_class(self, cls: type) -> None:
        """Watch what a class of installed code has, without what that holds."""
        if id(cls) not in self._seen:
            self._seen[id(cls)] = cls
            self._watch(class_dict(cls), read_members, cls.__qualname__)

    def add_settings(self, names: set[str]) -> None:
        """Watch settings that decide what code does that uses some names, or some packages."""
        for asking, value, read, label in SETTINGS:
            if not asking.isdisjoint(names):
                self._add_content(value, read, label)
        if not _ASKING.isdisjoint(names):
            self._watch(
                class_dict(torch.Tensor), read_added_to_tensors, "the attributes of torch.Tensor"
            )

    def add_builtins(self, names: Collection[str]) -> None:
        """Watch the values of Python's builtin names."""
        asked = (*sorted({*names} - {"print", "open"}),)  # which a run replaces itself
        self._watch(vars(builtins), functools.partial(read_keys, asked), "builtins")

    def add_registered(self) -> None:
        """Watch the registered subclasses of an abstract class."""
        self._add_content(abc, lambda module: [module.get_cache_token()], "abc")

    def add_bases(self, classes: Iterable[type]) -> None:
        """Watch the bases of classes."""
        self._classes += classes
        self._bases += map(_mro, self._classes)

    def add_names(self, things: Iterable[Any]) -> None:
        """Watch the names and texts that Python keeps of functions and classes."""
        for thing in things:
            self._add_content(thing, read_definition, getattr(thing, "__qualname__", ""))

    def add_attribute(self, thing: Any, name: str) -> None:
        """Watch one attribute of a function or class, and its content."""
        label = f"{thing.__qualname__}.{name}"
        content = self._add_content(thing, functools.partial(read_slots, (name,)), label)
        for item in content.items():
            self.add(item, label)

    def add_slots(self, thing: Any, label: str) -> None:
        """Watch the slots of an object, and their content."""
        if names := tuple(slot_names(type(thing))):
            content = self._add_content(thing, functools.partial(read_slots, names), label)
            for name, item in zip(names, content.items(), strict=True):
                self.add(item, f"{label}.{name}")

    def add_position(self, value: Any, label: str) -> None:
        """Watch how far an iterator of Python's own has come; do nothing for anything else."""
        reader = readers.position_reader(value)
        if reader is not None:
            self._add_content(value, reader, label)

    def add_read(self, value: Any, read: Callable[[Any], Any], label: str) -> None:
        """Watch what a reader says of an object, without what that holds."""
        self._add_content(value, read, label)

    def add_kind(self, thing: Any) -> None:
        """Watch of which class a thing is."""
        self._note(thing)

    def add_owner(self, thing: Any) -> None:
        """Watch that a thing keeps its attributes in the same dict, whatever its content."""
        self._owners.append(thing)
        self._own.append(vars(thing))

    def add_cache(self, cache: functools._lru_cache_wrapper[Any], label: str) -> None:
        """Watch that a cache still gives what it gave."""
        self._whole.append(_CacheEntries(cache, entries_of, label))

    def same(self) -> bool:
        """Return whether all content is unchanged."""
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
        """Return whether everything without memory words is unchanged."""
        if self._others and not self._same_items():
            return False
        for content in self._whole:  # not in a generator: mostly it is one
            if not content.same():
                return False
        return True

    @property
    def holds_more(self) -> bool:
        """Return whether there is more than words tell: what `holds_same` looks at."""
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
        """Return whether classes inherit from what they did, also where that was put back."""
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
        """Return whether everything that is compared item by item is the same; mostly in C."""
        now = [*chain.from_iterable(map(operator.call, self._readers, self._values))]
        if len(now) == len(self._items) and all(map(is_, now, self._items)):
            return True
        return all(content.same() for content in self._others)

    def changed_labels(self) -> Iterator[str]:
        """Yield the labels of objects whose content has changed."""
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
            self._finder.note_opaque(value, label)
            return []
        if is_array(value) and isinstance(value.base, ctypes.Array):  # memory that may be gone
            self._finder.note_opaque(value, label)
            return []
        if self._finder.take_thing(value, label):
            return []
        if (
            module_name_of(kind).startswith(_OF_TORCH)
            and callable(value)
            and not is_users_class(kind)
        ):
            return []  # an operator, or a function that was compiled
        if module_name_of(kind) in SWITCHES and not is_users_class(kind):
            self._add_content(value, read_switched, label)
            return []
        if kind is tuple or kind is frozenset:  # which hold the same for ever
            return [(item, f"{label}[...]") for item in value]
        self._finder.note_object(kind)
        if isinstance(value, logging.Logger):  # it keeps answers, which come and go
            self._add_content(value, read_logger, label)
            return []
        found: list[tuple[Any, str]] = []
        reader = readers.content_reader(value)
        if reader is not None:
            self._note(value)
            if reader is read_items and kind is dict:
                found += self._add_table(value, label)
            else:
                content = self._add_content(value, reader, label)
                found += [(item, f"{label}[...]") for item in content.items()]
        elif readers.is_opaque(value):
            self._finder.note_opaque(value, label)
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
        if names := tuple(slot_names(kind)):
            self._note(value)
            content = self._add_content(value, functools.partial(read_slots, names), label)
            named = zip(names, content.items(), strict=True)
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
            self._items += content.items()
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
    """The content of an object at one time, as one of the readers below read it."""

    __slots__ = ("_read", "_was", "label", "value")

    def __init__(self, value: Any, read: Callable[[Any], Any], label: str) -> None:
        self.value = value
        self.label = label
        self._read = read
        self._was = read(value)

    def same(self) -> bool:
        now = self._read(self.value)
        if type(now) is not tuple:
            return now is self._was or bool(now == self._was)
        return len(now) == len(self._was) and all(map(_same_value, now, self._was))

    @property
    def is_whole(self) -> bool:
        """Return whether it is not compared item by item."""
        return type(self._was) is not tuple

    def items(self) -> tuple[Any, ...]:
        return self._was if type(self._was) is tuple else ()


class _CacheEntries(_Content):
    """The entries of a cache, to which others may come."""

    __slots__ = ()

    def same(self) -> bool:
        now = {id(key): result for key, result in self._read(self.value)}
        return all(now.get(id(key), now) is result for key, result in self._was)


def _same_value(a: Any, b: Any) -> bool:
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
    # `catch_warnings` makes the same filters again for each call: their items are compared.
    return [*chain.from_iterable(module.filters)]


def _precision(module: Any) -> Any:
    now = module.getcontext()
    return [now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, now.traps.copy()]


def _of_numpy(loaded: Any) -> Any:
    numpy = loaded.modules.get("numpy")
    if numpy is None:
        return []
    variables = _numpys_variables()
    marks = [variable.get() for variable in variables]
    found = _numpys_latest[0]
    if not marks or len(marks) != len(found[0]) or not all(map(is_, marks, found[0])):
        printing = numpy.get_printoptions().values()
        read = [*numpy.geterr().values(), numpy.geterrcall(), numpy.getbufsize(), *printing]
        found = _numpys_latest[0] = marks, read
    return found[1]


@functools.cache
def _numpys_variables() -> tuple[contextvars.ContextVar[Any], ...]:
    """Return where numpy 2.1 and later have their settings: none is changed, but exchanged."""
    places = ("printoptions", "format_options"), ("umath", "_extobj_contextvar")
    modules = (sys.modules.get(f"numpy._core.{module}") for module, _ in places)
    found = [getattr(one, name, None) for one, (_, name) in zip(modules, places, strict=True)]
    has_both = all(isinstance(one, contextvars.ContextVar) for one in found)
    return tuple(cast("list[contextvars.ContextVar[Any]]", found)) if has_both else ()


# What the variables held when the settings were read last, and what was read. To ask numpy for them
# takes some microseconds, in which it makes several dicts.
_numpys_latest: list[tuple[list[Any], list[Any]]] = [([], [])]


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


# What containers hold, read into flat lists that are compared in one go.
#
# A model consists of some hundred dicts, and code names some hundred globals. Looking at each by
# itself takes longer than a small model does; read one after the other into a few lists, they are
# compared by the loops of C.


WHOLE = (dict, OrderedDict)  # the types of dicts whose own methods can be relied on

_values = methodcaller("values")
_cell_contents = attrgetter("cell_contents")


class LookupPlaces:
    """Where to look: dicts that modules consist of, names in namespaces, and cells.

    Args:
        parts: what a scan found.
        named: the names that it looked at in namespaces and cells, by index of their part.

    Attributes:
        dicts: those that are scanned as a whole.
        taken: the indices of all parts whose content is looked up here.
    """

    __slots__ = ("_cells", "_holders", "_names", "_parts", "_spaces", "dicts", "taken")

    def __init__(self, parts: Iterable[Captured], named: Mapping[int, dict[Any, Any]]) -> None:
        self._parts: list[Captured] = []
        self._holders: list[tuple[Captured, int, int]] = []  # with where its names begin and end
        self._cells: list[Captured] = []
        self._spaces: list[Any] = []
        self._names: list[str] = []
        for part in parts:
            value = part.value
            if part.access is not Access.FIXED:
                continue
            if part.kind is CaptureKind.DICT and type(value) in WHOLE:
                self._parts.append(part)
            elif part.kind is CaptureKind.IDENTITY and part.index in named:
                if isinstance(value, types.CellType):
                    self._cells.append(part)
                elif type(value) in (dict, types.MappingProxyType):
                    names = named[part.index]
                    begin = len(self._names)
                    self._names += names
                    self._spaces += [value] * len(names)
                    self._holders.append((part, begin, len(self._names)))
        self.dicts: list[Any] = [part.value for part in self._parts]
        self.taken: frozenset[int] = frozenset(
            part.index
            for part in chain(self._parts, self._cells, (part for part, _, _ in self._holders))
        )

    def read(self) -> Contents | None:
        """Read what is there now; None if a name is gone, or a cell empty."""
        try:
            named = [*map(getitem, self._spaces, self._names)]
            cell_values = [*map(_cell_contents, (part.value for part in self._cells))]
        except (KeyError, ValueError):
            return None
        return Contents(self.dicts, named, cell_values)

    def before(self, contents: Contents) -> dict[int, dict[Any, Any]]:
        """Return the content of each part when it was read, by index."""
        found: dict[int, dict[Any, Any]] = {}
        begin = 0
        for part, size in zip(self._parts, contents.sizes, strict=True):
            end = begin + size
            pairs = zip(contents.keys[begin:end], contents.values[begin:end], strict=True)
            found[part.index] = {key: value for key, value in pairs if key not in part.hidden}
            begin = end
        for part, begin, end in self._holders:
            pairs = zip(self._names[begin:end], contents.named[begin:end], strict=True)
            found[part.index] = dict(pairs)
        for part, value in zip(self._cells, contents.cell_values, strict=True):
            found[part.index] = {part.label: value}
        return found


class Contents:
    """The contents of some places when they were read.

    Attributes:
        sizes: how many entries each dict had.
        keys: their keys, one dict after the other.
        values: their values.
        named: what the names stood for.
        cell_values: what the cells hold.
    """

    __slots__ = ("cell_values", "keys", "named", "sizes", "values")

    def __init__(
        self, dicts: list[dict[Any, Any]], named: list[Any], cell_values: list[Any]
    ) -> None:
        self.sizes: list[int] = [*map(len, dicts)]
        self.keys: list[Any] = [*chain.from_iterable(dicts)]
        self.values: list[Any] = [*chain.from_iterable(map(_values, dicts))]
        self.named: list[Any] = named
        self.cell_values: list[Any] = cell_values

    def same_as(self, other: Contents) -> bool:
        """Return whether the same objects were at the same places, in the same order."""
        return (
            self.sizes == other.sizes
            and all_same(self.values, other.values)
            and all_same(self.keys, other.keys)
            and all_same(self.named, other.named)
            and all_same(self.cell_values, other.cell_values)
        )


# What a scan has found that a run can read.


class Route(NamedTuple):
    """The way on which a scan reached a value.

    Attributes:
        parent: the part that holds the value; None if no part does.
        access: how the value is read from the parent.
        key: the key, attribute or position in the parent.
        label: how a person would write the value.
        is_argument: whether the value is an argument, or was reached from one.
        depth: how many parts lie between the value and the first one.
    """

    parent: Captured | None
    access: Access
    key: Any
    label: str
    is_argument: bool
    depth: int = 0

    def into(self, part: Captured, key: Any) -> Route:
        """Return the route to an item or attribute of a part that this route leads to."""
        access = key.access if isinstance(key, AttributeKey) else Access.ITEM
        label = child_label(part, key)
        return Route(part, access, key, label, self.is_argument, self.depth + 1)

    def traceable(self, kind: type) -> bool:
        """Return whether the model receives a number as a traced one.

        It does for arguments, directly or in tuples. Elsewhere a number cannot be replaced
        without a change to the user's containers.
        """
        if not self.is_argument or kind not in (int, float):
            return False
        parent = self.parent
        while parent is not None and parent.type is tuple:
            parent = parent.parent
        return parent is None


class ScanResult:
    """The parts that a run can read, and what else was learnt on the way to them.

    Args:
        function: the module or function to be run.
        plain_numbers: whether numbers among the arguments must not be traced.

    Attributes:
        function: the model or function.
        plain_numbers: whether the run receives plain numbers.
        inserted: other callables that the run calls, by name.
        is_lazy: whether there are parameters that the first call makes.
        parts: everything found; parents before children.
        arguments: the parts that are, or are held by, arguments.
        own: the parts that no other run has.
        by_id: parts by the identity of what they are.
        content_of: what containers held, by index of their part.
        places: the places of their content, which are all read together.
        contents: their content when the scan read it.
        bare: tensors without attributes, which they can have like any object.
        alone: other values with content, which are compared one by one.
        blockers: what was found that no guard can watch, one line each.
        module_paths: qualified name of each module, by identity.
        shared_modules: those that the model holds under several names, by identity.
        hook_dicts: the modules' own tables of hooks.
        hook_tables: of each the module's label, the table's name and what it held.
        names: all names that the code of the model uses, as far as it is known.
        stores: names of the attributes that it assigns, likewise.
        functions: the code of the model, likewise.
        tells_numbers: whether some of that code asks for the exact type of a number.
        tells_identity: whether it has `id` or `operator.is_` under another name.
        computes: whether some of that code looks attributes up by names that it computes.
        computes_outside: whether some does so in other objects than `self`, such as modules.
        asks_tags: whether some of the user's asks for attributes that may not be there.
        missing: globals that some of it names and that are not there, by their namespace.
        sized: Python modules that code looks up computed names in, with the names in them.
        namespaces: those of the classes of the model, with the names in them.
        helpers: classes of other objects, with the members that are used.
        caches: each `functools.lru_cache`, with its label, what it had been asked, and whether it
            had no entries.
        members: the objects, no plain values, that are keys of dicts, or in sets and queues.
        cached: what they held when the run began, as far as it is not known to stay: results of the
            user's functions, and objects.
        generators: the parts that are random generators of torch.
        host_generators: those of Python and numpy.
        growing: lists and deques, by identity, that are not looked into: code only adds to them.
        watched_containers: dicts and sets, by identity, that are not looked into: their operations
            are ops. So are those of arrays, whose content is an input.
        depends: what the code that was looked at depends on.
        watched_objects: what else is watched, by its content.
    """

    inserted: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, function: Callable[..., Any], plain_numbers: bool) -> None:
        self.function = function
        self.plain_numbers = plain_numbers
        self.is_lazy: bool = False
        self.parts: list[Captured] = []
        self.arguments: list[Captured] = []
        self.own: list[Captured] = self.parts
        self.by_id: dict[int, Captured] = {}
        self.content_of: dict[int, dict[Any, Any]] = {}
        self.places: LookupPlaces = LookupPlaces((), {})
        self.contents: Contents | None = self.places.read()
        self.bare: list[Captured] = []
        self.alone: list[Captured] = []
        self.blockers: list[str] = []
        self.module_paths: dict[int, str] = {}
        self.shared_modules: frozenset[int] = frozenset()
        self.hook_dicts: list[dict[Any, Any]] = []
        self.hook_tables: list[tuple[str, str, tuple[tuple[Any, Any], ...]]] = []
        self.names: frozenset[str] = frozenset()
        self.stores: frozenset[str] = frozenset()
        self.functions: list[types.FunctionType] = []
        self.tells_numbers = False
        self.tells_identity = False
        self.computes = False
        self.computes_outside = False
        self.asks_tags = False
        self.missing: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self.sized: dict[int, tuple[Mapping[str, Any], frozenset[str]]] = {}
        self.namespaces: dict[int, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self.helpers: dict[type, frozenset[str]] = {}
        self.caches: list[tuple[str, functools._lru_cache_wrapper[Any], Any, bool]] = []
        self.members: list[Any] = []
        self.cached: dict[functools._lru_cache_wrapper[Any], list[tuple[Any, Any]]] = {}
        self.generators: list[Captured] = []
        self.host_generators: list[Captured] = []
        self.growing: dict[int, Any] = {}
        self.watched_containers: dict[int, Any] = {}
        self.depends: Depends = Depends()
        self.watched_objects: WatchedContent

    @property
    def hooks(self) -> list[tuple[Any, ...]]:
        """The content of the modules' hook tables before the run, in the order of `hook_dicts`."""
        return [items for _, _, items in self.hook_tables]

    def find(self, thing: Any) -> Captured | None:
        """Return the part that `thing` is, or None if the run did not begin with it."""
        part = self.by_id.get(id(thing))
        return part if part is not None and part.value is thing else None

    def place_of(self, label: str) -> str:
        """Say where the model's code stores to what has a label, or mentions it; "" if nowhere."""
        name = label.rpartition(".")[2].partition("[")[0]
        return place_naming(name, self.functions)

    def block(self, reason: str, label: str) -> None:
        """Note what no guard can watch, with where the code mentions what has that label."""
        place = self.place_of(label)
        self.blockers.append(f"{reason} (see {place})" if place else reason)
