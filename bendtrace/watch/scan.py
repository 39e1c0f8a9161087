"""The scan of all values that a run can read: arguments, modules, containers and objects.

It begins with the arguments and the callable, and follows attributes, items and hooks, and what
code names. Each value is listed once.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import functools
import gc
import inspect
import operator
import random
import sys
import types
import weakref
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bendtrace.python.computations import is_computation
from bendtrace.python.lazy import LazyModule
from bendtrace.tape.captured import (
    COPIED,
    PLAIN_TYPES,
    UNSET,
    Access,
    Array,
    AttributeKey,
    Captured,
    CaptureKind,
    Copy,
    Keys,
    Length,
    attributes_of,
    container_content,
    has_attributes,
    is_array,
    is_number,
    module_name_of,
)
from bendtrace.tape.plain_numbers import asks, is_exact_format
from bendtrace.tape.structure import (
    cached_results,
    entries_of,
    is_heap_type,
    key_parts,
    read_partial,
)
from bendtrace.watch.code_facts import ASKING, facts_in, names_in, other_names_in, undetectable_in
from bendtrace.watch.draws import is_host_generator
from bendtrace.watch.executed import functions_of_runs, is_steady_type
from bendtrace.watch.findings import MOST, PYTHONS, WHOLE, Route, ScanResult, WatchedContent
from bendtrace.watch.functions import LEGACY, ScriptModule
from bendtrace.watch.kinds import (
    container_kind,
    definitions,
    hides_attributes,
    is_constant,
    is_plain_object,
    is_settings,
    is_value,
    is_watched,
    judge_of,
    package_of,
    packages_of,
    underlying_code,
)
from bendtrace.watch.monkeypatches import monkeypatches
from bendtrace.watch.owners import named_modules
from bendtrace.watch.provenance import (
    is_constant_namespace,
    is_finished,
    is_finished_function,
    is_installed_file,
    is_installed_space,
    is_torchs,
    is_unwrapped_torch_function,
    is_users_class,
    is_users_module,
)
from bendtrace.watch.rank_sync import gather_locations, hidden_of, is_joint_hook
from bendtrace.watch.reachability import (
    DESCRIBED,
    Reachable,
    members_of,
    namespace_of,
    reachable_from,
)
from bendtrace.watch.scan_cache import Notes, tensor_facts

if TYPE_CHECKING:
    from bendtrace.watch import containers, readers
else:
    containers = LazyModule("bendtrace.watch.containers")
    readers = LazyModule("bendtrace.watch.readers")

# Attributes of functions that no code of a model asks for (the second one is torch.compile's).
_OF_TOOLS = frozenset({"__wrapped__", "__dynamo_disable"})
_INTERCEPTED = frozenset(torch.autograd.Function.__mro__)  # a recorder replaces their `apply`
_OURS = __name__.partition(".")[0]
_MADE = frozenset({"__init__", "__new__", "__post_init__"})
# Methods that are called while an object is created, copied or deleted, or by name.
_MAKING = frozenset(
    {
        "__init_subclass__", "__class_getitem__", "__del__",
        "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    }
)  # fmt: skip
_BUILTINS = frozenset(vars(builtins))
# Names in code that reads the globals of a function, or of a module in `sys.modules`.
_SPACES = frozenset({"__globals__", "f_globals"})
_LOADED = frozenset({"sys", "modules"})
# Tables that Python keeps of functions and classes, and names in code that reads them.
_TABLES = {
    "__annotations__": frozenset({"__annotations__", "get_type_hints", "get_annotations"}),
    **{name: frozenset({name}) for name in ("__code__", "__defaults__", "__kwdefaults__")},
    "__dataclass_fields__": frozenset({"__dataclass_fields__", "fields"}),
    "__match_args__": frozenset({"__match_args__"}),
    "__signature__": frozenset({"signature", "getfullargspec"}),
}
# Attributes of modules that `state_dict` reads.
_OF_STATE = ("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")
# Names that Python sets in the globals of a file.
_OF_FILES = frozenset(
    {
        *PYTHONS, "__annotations__", "__annotate__", "__annotate_func__", "__builtins__",
        "__cached__", "__conditional_annotations__", "__file__", "__loader__", "__package__",
        "__path__", "__spec__", "__warningregistry__",
    }
)  # fmt: skip
# Names that Python and libraries set in classes.
_OF_CLASSES = frozenset(
    {
        *PYTHONS, "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__",
        "__annotations_cache__", "__attrs_attrs__", "__base__", "__bases__", "__class__",
        "__dataclass_fields__", "__dataclass_params__", "__dict__", "__firstlineno__", "__hash__",
        "__match_args__", "__orig_bases__", "__parameters__", "__slots__", "__static_attributes__",
        "__subclasshook__", "__type_params__", "__weakref__",
    }
)  # fmt: skip
# Types of members, besides functions, that can implement an operator.
_OPERATORS = (
    functools.partial, functools.partialmethod, staticmethod, classmethod, property,
    types.BuiltinFunctionType,
)  # fmt: skip
# Tuples, not sets: hashing an Enum member takes longer than comparing a few.
_NOT_FOUND = (CaptureKind.PLAIN, CaptureKind.NUMBER, CaptureKind.ALIAS)


class TooManyError(Exception):
    """Code can reach more than can be watched."""


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# Names in code that computes gradients itself.
_COMPUTING_GRADIENTS = frozenset(
    {
        "backward", "grad", "func", "autograd", "vjp", "jvp", "jacrev", "jacfwd", "hessian",
        "linearize", "functional_call",
    }
)  # fmt: skip
# Names in code that may compute gradients although the caller switched them off.
_DIFFERENTIATING = _COMPUTING_GRADIENTS | {
    "enable_grad", "set_grad_enabled", "inference_mode", "requires_grad", "requires_grad_",
}  # fmt: skip
# Bookkeeping of nn.Module that forward does not read (hooks are watched separately).
_MODULE_INTERNALS = frozenset(
    {
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
        "_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_compiled_call_impl",
        *_HOOKS,
    }
)  # fmt: skip
_LARGE = 512  # a container with more plain entries than this is compared as a whole
_FACTORIES = frozenset({bool, int, float, complex, str, list, dict, set, tuple})  # of defaultdicts


def reason_of_hooks(label: str, table: str) -> str:
    """Return the reason why calls of a module with hooks run live, without their places."""
    return f"{label} has {table[1:].replace('_', ' ')}"


class Scan:
    """Lists the values that a run can read.

    Args:
        found: receives the parts.

    Attributes:
        found: as given.
        notes: what the decisions of the scan depended on.
    """

    def __init__(self, found: ScanResult) -> None:
        self.found = found
        self.notes: Notes = Notes()
        self._scanned: set[Any] = set()
        self._names_scanned: set[tuple[int, str]] = set()
        self._modules: list[types.ModuleType] = []
        self._named: list[type] = []
        self._kinds: set[type] = set()
        self._is_too_much = self._may_stop = False
        self._met: set[type] = set()
        self._registers: set[type] = set()
        self._is_finished = False  # whether the values being scanned belong to installed code
        self._gathered: dict[int, set[str]] = {}
        # Hooks that keep a run from a replay: one with gradients, and one that computes gradients.
        self._of_gradients: list[str] = []
        self._of_own_gradients: list[str] = []
        self._unwatched: list[tuple[str, Any]] = []
        self._unguarded: list[Captured] = []
        self._tagged: list[tuple[Captured, Route]] = []
        self._names: dict[int, str] = {}

    @property
    def is_untouched(self) -> bool:
        """Return whether the scan has found only parts so far, and classes of helper objects."""
        found = self.found
        return self.notes.is_steady and not (
            found.names or found.functions or self._tagged or self._unwatched or self._unguarded
            or self._modules or found.caches or found.hook_dicts or found.watched_objects
        )  # fmt: skip

    def scan_arguments(self, arguments: Mapping[str, Any]) -> None:
        """List bound arguments, by name."""
        self.found.watched_objects = WatchedContent(self)
        for position, (name, value) in enumerate(arguments.items()):
            self._scan(value, Route(None, Access.ROOT, position, name, True))

    def scan_model(self) -> None:
        """Scan from the callable, and list what keeps a run from being repeated."""
        self._may_stop = True
        with suppress(TooManyError):  # the model runs live, whatever else there is
            self._scan_model()
        if self._is_too_much:
            reason = f"the code can reach more than {MOST} objects or names, too many to watch"
            self.found.block(reason, "")
        self.found.watched_objects.close()

    def _scan_model(self) -> None:
        found = self.found
        self._scan_callable(found.function)
        for name, what in found.inserted.items():
            kind = type(what)
            self._scan(what, Route(None, Access.FIXED, None, name, False))
            if is_users_class(kind):  # our code calls its methods
                found.helpers[kind] = members_of(kind)
                self._scan_reachable(reachable_from(kind, found.helpers[kind]), None)
        for patch in monkeypatches():
            if isinstance(patch.value, types.FunctionType):
                self._scan_code(patch.value)
            elif is_users_class(type(patch.value)):
                self._scan(patch.value, Route(None, Access.FIXED, None, patch.name, False))
        for function in functions_of_runs(found.function):
            found.names |= {function.__name__}
            self._scan_code(function)
        sizes: tuple[int, ...] = ()
        while sizes != (
            sizes := (
                len(found.parts), len(found.names), len(found.helpers), found.computes,
                found.computes_outside,
            )
        ):  # fmt: skip
            self._scan_helpers()
            self._scan_modules()
        if found.stores or not found.names.isdisjoint(ASKING):
            # Code may set attributes of functions, or ask for one that does not exist yet.
            for function in filterfalse(is_finished, found.functions):
                self._scan_attributes(function)
        self._scan_settings()
        for part, route in self._tagged:
            for key, item in found.content_of[part.index].items():
                if key in found.names:  # others, such as marks of an optimizer, are not read
                    self._scan(item, route.into(part, key))
        found.generators = [part for part in found.parts if part.type is torch.Generator]
        found.host_generators = [
            part for part in found.parts
            if part.kind is not CaptureKind.ALIAS and is_host_generator(part.value)
        ]  # fmt: skip
        drawn_from = (*found.generators, *found.host_generators)
        if drawn_from or self._modules or any(found.hook_dicts):
            self.notes.is_steady = False
        if self._of_gradients and self._may_differentiate():
            found.blockers += self._of_gradients
        if not found.names.isdisjoint(_COMPUTING_GRADIENTS):
            found.blockers += self._of_own_gradients
        found.blockers += undetectable_in(
            found.names, found.stores, found.functions, bool(drawn_from)
        )
        for part in self._unguarded:
            what = f"argument {part.label} is a {part.type.__qualname__}"
            found.block(f"{what}, whose content cannot be guarded", part.label)
        for label, value in self._unwatched:
            # No code reads what no code names.
            name = label.partition("[")[0].rpartition(".")[2]
            if name in found.names or found.computes or not name.isidentifier():
                if type(value) is weakref.ref:
                    reader = readers.reference_reader(value, found)
                    if reader is not None:
                        found.watched_objects.add_read(value, reader, label)
                        continue
                what = f"{label} is a {type(value).__qualname__}"
                found.block(f"{what}, whose content cannot be guarded", name)

    def scan_late(self, value: Any, label: str) -> None:
        """List a value that the run reached only while it ran."""
        self._scan(value, Route(None, Access.FIXED, None, label, False))

    # What `WatchedContent` finds (see `findings.py`).

    def take_thing(self, value: Any, label: str) -> bool:
        """Scan a tensor, module, function or class; return False for any other value."""
        part = self.found.by_id.get(id(value))
        if part is not None and part.kind is not CaptureKind.IDENTITY:
            return True
        if isinstance(value, types.FunctionType) and is_finished(value):
            return True
        if isinstance(value, _MORE) or is_host_generator(value):
            if part is None:
                self._scan(value, Route(None, Access.FIXED, None, label, False))
            return True
        return False

    def note_opaque(self, value: Any, label: str) -> None:
        """Note a value that cannot be watched. Of installed code's own, only iterators move on."""
        if self._is_finished:
            self.found.watched_objects.add_position(value, label)
        else:
            self._unwatched.append((label, value))

    # Each `_scan...` adds parts; `Route` says how the scan reached the value.

    def _scan_callable(self, function: Callable[..., Any]) -> None:
        fixed = Route(None, Access.FIXED, None, "self", False)
        if isinstance(function, types.MethodType):
            self._scan(function.__self__, fixed)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            self._scan_code(function, everything=True)
        elif isinstance(function, functools.partial):
            self._scan_callable(function.func)
            self._scan(function.args, fixed)
            self._scan(function.keywords, fixed)
        elif not isinstance(function, types.BuiltinFunctionType):
            self._scan(function, fixed)
        elif function in _LOOKING_UP:
            self.found.computes = self.found.computes_outside = True

    def _scan(self, value: Any, route: Route) -> None:
        # Order matters: each branch takes away what a later one would get wrong.
        #   plain values        before aliases: equal numbers and texts can be one object by chance
        #   aliases             before all else: an object is one part, and a cycle ends here
        #   growing, watched    before containers: they are not looked into
        #   enums, constants    before containers: an enum can be a tuple or a number as well
        #   proxies             before all that asks for attributes, which the referent would answer
        #   lazy ones           before tensors: an uninitialized parameter is a tensor without shape
        #   arrays, sets, ...   in any order: no object is of two of these kinds
        #   hidden attributes   before the branches that read the dict of an object
        #   settings            before objects: they are guarded by identity, with their attributes
        found = self.found
        kind = type(value)
        if kind in PLAIN_TYPES:
            if kind is str and "%" in value and is_exact_format(value):
                found.tells_numbers = True
            traced = route.traceable(kind) and not found.plain_numbers
            self._add(value, route, CaptureKind.NUMBER if traced else CaptureKind.PLAIN)
        elif (earlier := found.by_id.get(id(value))) is not None:
            self._add(earlier, route, CaptureKind.ALIAS)
            if earlier.is_argument and earlier.kind is CaptureKind.TUPLE:
                self._guard_numbers(earlier)
        elif id(value) in found.growing:
            self._add(value, route, CaptureKind.GROWING)
        elif id(value) in found.watched_containers and (is_array(value) or is_number(kind)):
            copied = Copy(COPIED[CaptureKind.OPEN_ARRAY](value))
            self._add(value, route, CaptureKind.OPEN_ARRAY).size = copied
        elif id(value) in found.watched_containers:
            self._add(value, route, CaptureKind.IDENTITY)
        elif kind not in _USUAL and (issubclass(kind, Enum) or is_constant(value, kind)):
            self._add(value, route, CaptureKind.PLAIN)
            if issubclass(kind, Enum) and is_users_class(kind):  # it may have attributes
                found.watched_objects.add(value, route.label)
        elif kind in weakref.ProxyTypes:  # it pretends to be the object that it refers to
            self._add(value, route, CaptureKind.IDENTITY)
            self._unwatched.append((route.label, value))
        elif is_lazy(value):  # the first call makes it
            self.notes.is_steady = False
            found.is_lazy = True
            self._add(value, route, CaptureKind.IDENTITY)
        elif issubclass(kind, torch.Tensor):
            part = self._add(value, route, CaptureKind.TENSOR)
            is_bare = kind in _TENSORS and not value.__dict__
            attributes = found.content_of[part.index] = {} if is_bare else {**attributes_of(value)}
            part.size = tensor_facts(value, attributes)
            if route.is_argument:
                for key, item in attributes.items():
                    self._scan(item, route.into(part, key))
            elif attributes:
                self._tagged.append((part, route))
        elif issubclass(kind, nn.Module):
            self._add(value, route, CaptureKind.MODULE)
            self._scan_module(value, route.label)
        elif kind in (set, frozenset) and all(map(is_value, value)):
            self._add(value, route, CaptureKind.SET).size = Copy(COPIED[CaptureKind.SET](value))
            self._scan_enumerated(value, route.label)
        elif is_array(value) and not value.dtype.hasobject and not hasattr(value, "__dict__"):
            self._add(value, route, CaptureKind.ARRAY).size = Copy(Array(value))
        elif isinstance(value, contextvars.ContextVar):
            self._add(value, route, CaptureKind.IDENTITY)
            part = self._add(
                value, Route(None, Access.FIXED, None, route.label, False), CaptureKind.IDENTITY
            )
            # A `ContextVar` shows its default to nobody but the collector (Python 3.11 to 3.14).
            for default in gc.get_referents(value):
                found.watched_objects.add(default, f"the default of {value.name}")
            content = found.content_of[part.index] = {value.name: value.get(UNSET)}
            inside = Route(part, Access.CONTEXT, value.name, value.name, False)
            self._scan(content[value.name], inside)
        elif hides_attributes(value, kind):
            self._add(value, route, CaptureKind.IDENTITY)
            found.block(f"{kind.__qualname__}.__getattribute__ hides what {route.label} holds", "")
        elif not route.is_argument and is_plain_object(kind, route.depth) and is_settings(value):
            self.note_object(kind)
            # A configuration: no call creates it, so its identity is guarded, and its attributes
            # are scanned as a fixed mapping, like those of a module.
            self._add(value, route, CaptureKind.IDENTITY)
            self.notes.owned.append((value, vars(value)))
            if not isinstance(value, types.SimpleNamespace):  # whose dict cannot be replaced
                found.watched_objects.add_owner(value)
            self._scan_mapping(vars(value), route.label)
        elif (
            issubclass(kind, (list, tuple, dict))
            or kind is collections.deque
            or is_plain_object(kind, route.depth)
        ):
            if route.is_argument:
                self._meet_helper(kind)
            else:
                self.note_object(kind)
            self._scan_container(value, route)
        elif route.is_argument and (kind is torch.Generator or is_host_generator(value)):
            part = self._add(value, route, CaptureKind.OBJECT)  # any will do
            found.content_of[part.index], part.size = {}, Keys(tuple(attributes_of(value)))
        else:
            self._scan_by_identity(value, route)

    def _guard_numbers(self, part: Captured) -> None:
        """Guard the numbers in a tuple by value: the model can also read the tuple elsewhere."""
        inside = {part.index}
        for later in self.found.parts[part.index + 1 :]:
            if later.parent is not None and later.parent.index in inside:
                inside.add(later.index)
                if later.kind is CaptureKind.NUMBER:
                    later.kind = CaptureKind.PLAIN

    def _scan_by_identity(self, value: Any, route: Route) -> None:
        """Scan a value that is guarded by identity alone, and what code can read through it."""
        part = self._add(value, route, CaptureKind.IDENTITY)
        found = self.found
        is_factory = route.parent is not None and route.parent.type is defaultdict
        if is_factory and not isinstance(value, types.FunctionType):
            if containers.makes_container(value):
                return  # to which nothing is given
        if not (found.tells_numbers or self._is_finished or asks(value)):
            found.tells_numbers = True
        if isinstance(value, (functools.partial, torch.Generator)):
            self.notes.is_steady = False
        if isinstance(value, types.FunctionType):
            self._scan_code(value)
            if found.inserted and is_finished(value):  # it may be of what we insert
                self._scan_closure(value, _DATA)
        elif isinstance(value, type) and is_users_class(value):
            self._meet_helper(value)
        elif type(value) is LEGACY:  # its constructor takes numbers, and no traced ones
            found.tells_numbers = True
        elif isinstance(value, type):
            self._meet_installed(value)
            if not is_steady_type(value):
                self._unwatched.append((route.label, value))
        elif isinstance(value, types.BuiltinFunctionType) and value in _LOOKING_UP:
            found.computes = found.computes_outside = True
            if value in (vars, dir, locals):
                reason = f"{route.label} is {value.__name__}, which looks at variables"
                found.block(reason, route.label)
        elif isinstance(value, types.BuiltinFunctionType) and value in _TELLING:
            found.tells_identity = True
            if value in (id, hash):
                reason = f"{route.label} is {value.__name__}, which tells objects apart"
                found.block(reason, route.label)
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            texts = [text for text in value.__reduce__()[1] if isinstance(text, str)]
            found.names |= {name for text in texts for name in text.split(".")}
        elif isinstance(value, functools._lru_cache_wrapper):
            inner = value.__wrapped__
            if isinstance(inner, types.FunctionType):
                self._scan_code(inner)
            found.caches.append((route.label, value, value.cache_info(), not entries_of(value)))
            if not is_finished_function(inner):
                # For the cache, a traced scalar is not the same key as the number.
                found.tells_numbers = found.tells_numbers or not is_computation(inner)
                found.watched_objects.add_cache(value, route.label)
                found.cached[value] = entries_of(value)
            else:
                found.cached[value] = [
                    entry
                    for entry in entries_of(value)
                    if not (is_value(entry[1]) or isinstance(entry[1], torch.Tensor))
                ]
            for kept in cached_results(value):
                if not isinstance(kept, torch.Tensor):
                    found.watched_objects.add(kept, f"{route.label}(...)")
        elif isinstance(value, (types.MethodType, functools.partial)):
            self._scan_callable(value)
            if isinstance(value, functools.partial):
                if (own := read_partial(value)[3]) is None:
                    found.watched_objects.add_read(value, read_partial, route.label)
                elif id(own) not in found.by_id:
                    self._scan_mapping(own, route.label)
        elif isinstance(value, types.ModuleType):
            self._meet_module(value)
        elif type(value) is inspect.Signature:  # only the content of its defaults can change
            defaults = (parameter.default for parameter in value.parameters.values())
            self._scan_defaults(defaults, route.label)
        elif route.is_argument and not isinstance(value, Enum):
            if type(value) is not torch.Generator and (not callable(value) or self._holds(value)):
                self._unguarded.append(part)
            elif callable(value):
                found.watched_objects.add(value, route.label)
        elif not (
            isinstance(value, (torch.Tensor, torch.Generator, type)) or is_host_generator(value)
        ):
            label, holder = route.label, route.parent
            while holder is not None:
                if holder.kind is CaptureKind.OBJECT and not is_users_class(holder.type):
                    label = f"{holder.label}[...]"  # code can read what is in it without naming it
                holder = holder.parent
            found.watched_objects.add(value, label)
            if isinstance(value, (set, frozenset, collections.deque)):
                found.members += key_parts(tuple(value))

    def _holds(self, value: Any) -> bool:
        """Return whether an object that can be called has content."""
        return readers.content_reader(value) is not None or readers.is_opaque(value)

    def _scan_container(self, value: Any, route: Route) -> None:
        part = self._add(value, route, container_kind(type(value)))
        content = container_content(part)
        if len(content) > _LARGE and _is_of_plain_values(part, content):
            part.kind, part.size = CaptureKind.LARGE, Copy(COPIED[CaptureKind.LARGE](value))
            return
        by_key = part.kind is CaptureKind.OBJECT or (
            part.access is not Access.FIXED
            and (part.kind is CaptureKind.DICT or has_attributes(part.type))
        )
        most = value.maxlen if part.type is collections.deque else None
        part.size = Keys(tuple(content)) if by_key else Length(len(content), most)
        if part.kind is not CaptureKind.TUPLE or has_attributes(part.type):
            self.found.content_of[part.index] = content
        if part.kind is CaptureKind.DICT:
            self._scan_enumerated(value, route.label)
            for key in filterfalse(is_value, value):
                if not route.is_argument:
                    self.found.members += key_parts(key)
                    self.found.watched_objects.add(key, f"a key of {route.label}")
                elif not isinstance(key, (torch.Tensor, nn.Module, type)):
                    self._unguarded.append(part)
        for key, item in content.items():
            self._scan(item, route.into(part, key))

    def _scan_enumerated(self, members: Iterable[Any], label: str) -> None:
        """Watch members of enumerations whose values can change."""
        for member in members:
            if isinstance(member, Enum) and not is_value(member.value):
                self.found.watched_objects.add(member, label)

    def _scan_module(self, module: nn.Module, label: str) -> None:
        found = self.found
        if label == "self" and not self._names:  # the model, or the module of a bound method
            inside = dict(named_modules(module))
            self._names = {id(inner): name for name, inner in inside.items() if name}
            parts = (part for one in inside.values() for part in one._modules.values())
            counts = collections.Counter(map(id, parts))
            found.shared_modules = frozenset(one for one, count in counts.items() if count > 1)
        if id(module) in self._names:  # the scan may have reached it through another object
            label = f"self.{self._names[id(module)]}"
        found.module_paths[id(module)] = label.removeprefix("self").removeprefix(".")
        if isinstance(module, ScriptModule):
            return  # a call of it is one op, which reads its content again
        kind = type(module)
        if kind not in self._kinds:
            self._scan_module_class(kind)
        attributes = vars(module)
        for name in _HOOKS:
            hooks = attributes.get(name)
            if hooks is not None:
                found.hook_dicts.append(hooks)
                found.hook_tables.append((label, name, tuple(hooks.items()) if hooks else ()))
                if hooks and not ("backward" not in name and self._scan_hooks(hooks)):
                    what = reason_of_hooks(label, name) + definitions(hooks.values())
                    is_old = attributes.get("_is_full_backward_hook") is False
                    if "backward" not in name:
                        found.blockers.append(what)
                    else:  # the others act in a backward pass, like hooks that forward puts on
                        (self._of_gradients if is_old else self._of_own_gradients).append(what)
        others = hidden_of(module)
        of_class: frozenset[str] = getattr(kind, "_untraced", frozenset())
        others |= attributes.get("_untraced", of_class)
        hidden = _MODULE_INTERNALS | others if others else _MODULE_INTERNALS
        if others or type(attributes) is not dict:
            self.notes.is_steady = False
        self.notes.owned.append((module, attributes))
        found.watched_objects.add_slots(module, label)
        self._scan_mapping(attributes, label, hidden, kind)
        # What FSDP gathers during the run does not exist before it. A module that gathers is
        # scanned before the modules whose parameters it gathers.
        for places in gather_locations(module):
            self.notes.is_steady = False
            for holder, name in places:
                self._gathered.setdefault(id(holder), set()).add(name)
        gathered = self._gathered.get(id(module), ())
        self._scan_mapping(attributes["_parameters"], label, frozenset(gathered))
        self._scan_mapping(attributes["_buffers"], label)
        self._scan_mapping(attributes["_modules"], label)

    def _may_differentiate(self) -> bool:
        """Return whether an output of a module may have gradients: only then hooks fire."""
        return (
            torch.is_grad_enabled()
            or bool(self.found.caches)
            or not self.found.names.isdisjoint(_DIFFERENTIATING)
            or any(
                part.value.requires_grad and not isinstance(part.value, nn.Parameter)
                for part in self.found.parts
                if part.kind is CaptureKind.TENSOR
            )
        )

    def _scan_hooks(self, hooks: Mapping[Any, Any]) -> bool:
        """Scan forward hooks, which are code of the model; return False for those that are not.

        Those of a `HookManager` count calls of modules, which a replay does not make.
        """
        own = [hook for hook in hooks.values() if not is_joint_hook(hook)]
        if any(getattr(hook, "runs_user_code", False) for hook in own):  # in a file of ours
            return False
        codes = list(map(underlying_code, own))
        if any(code is None for code in codes):
            return False
        for hook in own:
            self._scan_callable(hook)
        return True

    def _scan_mapping(
        self,
        mapping: dict[str, Any],
        label: str,
        hidden: frozenset[str] = frozenset(),
        owner: type | None = None,
    ) -> None:
        """Scan one of the dicts that a module consists of, which live as long as the module.

        Args:
            mapping: the dict.
            label: how a person would write its owner.
            hidden: keys that are left out.
            owner: the module's class, whose members functions among the attributes can read.
        """
        part = self._add(mapping, Route(None, Access.FIXED, None, label, False), CaptureKind.DICT)
        part.hidden = hidden
        part.size = Length(len(mapping))
        if type(mapping) in WHOLE:  # these are compared as a whole
            content = dict(mapping.items())
        else:
            content = self.found.content_of[part.index] = container_content(part)
        parts = self.found.parts
        for key, item in content.items():
            if key in hidden:
                continue
            kind = type(item)
            if kind in PLAIN_TYPES:  # as `_scan` would add it, in a fraction of the time
                if kind is str and "%" in item and is_exact_format(item):
                    self.found.tells_numbers = True
                parts.append(
                    Captured(len(parts), part, Access.ITEM, key, CaptureKind.PLAIN, item, kind,
                         f"{label}.{key}", False)
                )  # fmt: skip
                continue
            self._scan(item, Route(part, Access.ITEM, key, f"{label}.{key}", False))
            if owner is not None and isinstance(item, types.FunctionType):
                named = frozenset(names_in(item.__code__)) & members_of(owner)
                self._scan_reachable(reachable_from(owner, named), None)

    # What code can read: globals, closures, defaults, and members of classes.
    #
    # `reachability.py` says which names functions and classes use. Here they are looked up, and
    # what they refer to is listed.

    def note_too_many(self) -> None:
        """Note that there is more than can be watched; all arguments are listed nevertheless."""
        self._is_too_much = True
        if self._may_stop:
            raise TooManyError

    def _add(self, value: Any, route: Route, kind: CaptureKind) -> Captured:
        """List a value as a part."""
        found = self.found
        part = Captured(
            len(found.parts), route.parent, route.access, route.key, kind, value, type(value),
            route.label, route.is_argument,
        )  # fmt: skip
        found.parts.append(part)
        if kind not in _NOT_FOUND:
            found.by_id[id(value)] = part
        return part

    # Functions, and what they name.

    def _scan_code(self, subject: type | types.FunctionType, everything: bool = False) -> None:
        """Scan the values that code can read besides its arguments.

        Args:
            subject: a module's class, or a function.
            everything: whether to scan all globals that it names itself, not only plain data
                and modules.
        """
        if subject in self._scanned or _is_torchs(subject):
            return
        self._scanned.add(subject)
        own = None
        if everything and isinstance(subject, types.FunctionType):
            own = subject.__globals__
        self._scan_reachable(reachable_from(subject), own)

    def _scan_reachable(self, reach: Reachable, own: Mapping[str, Any] | None) -> None:
        """Scan what code reaches; in the namespace `own`, all that it names."""
        found = self.found
        found.depends.add(reach.depends)
        found.names |= reach.names
        found.stores |= reach.stores
        found.functions += reach.functions
        found.tells_numbers = found.tells_numbers or reach.tells_numbers
        found.computes = found.computes or reach.computes
        found.computes_outside = found.computes_outside or reach.computes_outside
        for owner in reach.owners:
            found.namespaces[id(owner)] = (owner, tuple(owner))
        notes = self.notes
        for module in reach.modules:
            self._meet_module(module)
        for namespace, name in reach.globals:
            if name in namespace:
                value = namespace[name]
                installed = is_installed_space(namespace)
                watched = namespace is own or not installed or is_watched(value)
                if installed and isinstance(value, types.FunctionType) and not is_finished(value):
                    self._scan_code(value)  # it replaces a function of the package
                if installed and not watched:
                    self._scan_installed(namespace, name)
                elif watched:
                    self._scan_name(namespace, name, watched)
                    if isinstance(value, type) and not is_users_class(value):
                        self._scan_installed(namespace, name)
                    if isinstance(value, (types.FunctionType, type)):
                        continue
                judge = None if namespace is own else judge_of(value)
                notes.judged[id(namespace), name] = namespace, name, value, judge, watched
            else:
                notes.absent.append((namespace, name))
        for namespace, name in reach.depends.absent.values():
            if name in vars(builtins) and name not in _BUILTINS:
                self._scan_name(vars(builtins), name)  # somebody has added it
            if namespace is not sys.modules and not (
                hasattr(builtins, name) and is_installed_space(namespace)
            ):
                self._note_missing(namespace, (name,))
        for namespace, names in reach.lacking:
            self._note_missing(namespace, names or (), names is None)
        for namespace, name in reach.members:
            if name in namespace:
                if isinstance(namespace[name], type):
                    self._meet_helper(namespace[name])
                self._scan_name(namespace, name)
            else:
                notes.absent.append((namespace, name))
        for function in reach.opaque:
            self._scan_one_op(function)
        for function in reach.functions:
            outer, self._is_finished = self._is_finished, is_finished(function)
            self._scan_closure(function)
            if vars(function).keys() - _OF_TOOLS:
                self._scan_attributes(function)
            defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
            self._scan_defaults(chain(*defaults), function.__name__)
            self._is_finished = outer

    def _scan_one_op(self, function: Any) -> None:
        """Scan the plain values that a function reads whose call is recorded as one op."""
        inner = getattr(function, "__wrapped__", None)
        inner = getattr(inner, "__func__", inner)
        if not isinstance(inner, types.FunctionType) or inner in self._scanned:
            return
        self._scanned.add(inner)
        reach = reachable_from(inner)
        self.found.depends.add(reach.depends)
        for namespace, name in reach.globals:
            if type(namespace.get(name)) in PLAIN_TYPES:
                self._scan_name(namespace, name)
        for one in reach.functions:
            self._scan_closure(one, PLAIN_TYPES)

    def _scan_closure(
        self, function: types.FunctionType, only: Collection[type] | None = None
    ) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell: the name is assigned later
                self.notes.empty.append(cell)
                self.found.watched_objects.add(cell, name)
                continue
            if only is not None and type(value) not in only:
                continue
            if name != "__class__" and id(cell) not in self.found.by_id:
                fixed = Route(None, Access.FIXED, None, name, False)
                holder = self._add(cell, fixed, CaptureKind.IDENTITY)
                self.found.content_of[holder.index] = {name: value}
                self._scan(value, Route(holder, Access.CELL, None, name, False))

    def _scan_attributes(self, function: types.FunctionType) -> None:
        if id(vars(function)) not in self.found.by_id:
            self.found.watched_objects.add_owner(function)
            self._scan_mapping(vars(function), function.__name__, _OF_TOOLS)

    def _scan_defaults(self, values: Iterable[Any], owner: str) -> None:
        for value in values:
            if type(value) not in PLAIN_TYPES and not self.found.find(value):
                route = Route(None, Access.FIXED, None, f"a default of {owner}", False)
                if isinstance(value, defaultdict) or (
                    isinstance(value, (list, tuple, dict)) and has_attributes(type(value))
                ):
                    self._scan_by_identity(value, route)
                else:
                    self._scan(value, route)

    def _scan_name(self, namespace: Mapping[str, Any], name: str, watched: bool = True) -> None:
        """Scan one name of a module's globals, or of a class.

        Args:
            namespace: the globals, or the namespace of the class.
            name: the name.
            watched: whether to scan the value; otherwise it is guarded by identity alone.
        """
        found = self.found
        if (id(namespace), name) in self._names_scanned:
            return
        # In files these names are Python's; in classes, libraries set names of this form too.
        if type(namespace) is dict:
            is_pythons = name in _OF_FILES
        else:
            is_pythons = name[:2] == "__" == name[-2:] and (
                name in _OF_CLASSES or name not in found.names
            )
            is_pythons = is_pythons and not isinstance(namespace[name], _OPERATORS)
        if is_pythons and not isinstance(namespace[name], types.FunctionType):
            return
        if len(self._names_scanned) >= MOST:
            self.note_too_many()
            return
        self._names_scanned.add((id(namespace), name))
        value = namespace[name]
        holder = found.by_id.get(id(namespace))
        if holder is None:
            fixed = Route(None, Access.FIXED, None, "globals", False)
            holder = self._add(namespace, fixed, CaptureKind.IDENTITY)
            found.content_of[holder.index] = {}
        if holder.index in found.content_of:
            found.content_of[holder.index][name] = value
        route = Route(holder, Access.ITEM, name, name, False)
        by_identity = isinstance(value, (types.FunctionType, *DESCRIBED))
        for inner in _called_functions(value) if by_identity else ():
            if inner is not None and not isinstance(inner, types.FunctionType):
                self._scan(inner, Route(None, Access.FIXED, None, name, False))
        if by_identity or not watched or type(value) is types.MethodDescriptorType:
            self._add(value, route, CaptureKind.IDENTITY)
        else:
            self._scan(value, route)

    # Classes.

    def note_object(self, kind: type) -> None:
        """Scan the class of an object, and the registries of classes of installed packages."""
        self._meet_helper(kind)
        if kind in self._registers or not is_installed_file(_file_of(kind)):
            return
        self._registers.add(kind)
        for base in kind.__mro__:
            if is_installed_file(_file_of(base)) and not is_torchs(module_name_of(base)):
                for name, value in [*vars(base).items()]:
                    if isinstance(value, (list, dict, set)) and name[:2] != "__":
                        self.found.watched_objects.add(value, f"{base.__name__}.{name}")

    def _meet_helper(self, cls: type) -> None:
        self._met.add(cls)
        if cls not in self.found.helpers and is_users_class(cls):
            self.found.helpers[cls] = frozenset()
            self._meet_helper(type(cls))

    def _scan_helpers(self) -> None:
        """Scan the members of classes whose names any code uses."""
        found = self.found
        progress = True
        while progress:
            progress = False
            for cls in [*found.depends.classes.values()]:  # also classes that code only names
                self._meet_helper(cls)
            for cls, count in tuple(found.helpers.items()):
                members = members_of(cls)
                named = members & found.names | {m for m in members if m[:2] == "__"} - _MAKING
                if issubclass(cls, nn.Module):  # which code may make, and call
                    named = named - _MADE | members & {"forward"}
                if found.computes and is_users_class(cls):
                    named = members
                if named > count:
                    found.helpers[cls] = named
                    self._scan_reachable(reachable_from(cls, named), None)
                    progress = True

    def _scan_module_class(self, kind: type) -> None:
        """Scan the class of a module, the first time that it is met."""
        self._kinds.add(kind)
        self._meet_helper(kind)
        self._scan_code(kind)
        for cls in kind.__mro__:
            if "forward" in vars(cls):  # also of torch's own modules, which are not followed
                self._scan_name(namespace_of(cls), "forward")
                forward = vars(cls)["forward"]
                if isinstance(forward, types.FunctionType) and not is_finished(forward):
                    self._scan_code(forward)
                break

    # Python modules and installed packages.

    def _meet_module(self, module: types.ModuleType) -> None:
        if is_users_module(module) and all(module is not other for other in self._modules):
            self._modules.append(module)

    def _scan_modules(self) -> None:
        """Scan the used names of Python modules that are values, and of installed classes."""
        self._is_finished = True
        for base in chain.from_iterable(cls.__mro__ for cls in self._named):
            for name in self.found.names & vars(base).keys():
                if _is_content(vars(base)[name]):
                    self.found.watched_objects.add(vars(base)[name], name)
        self._is_finished = False
        for module in self._modules:
            space = vars(module)
            installed = is_installed_space(space)
            if not installed:
                self._note_missing(space, self.found.names, self.found.computes_outside)
            everything = self.found.computes_outside
            for name in [*space] if everything else self.found.names & space.keys():
                value = space[name]
                if isinstance(value, types.ModuleType):
                    self._meet_module(value)
                    continue
                self._scan_name(space, name, not installed or is_watched(value))
                if isinstance(value, type):
                    self._meet_helper(value)
                elif isinstance(value, types.FunctionType) and not installed:
                    self._scan_code(value)

    def _note_missing(
        self, space: Mapping[str, Any], names: Iterable[str], everything: bool = False
    ) -> None:
        """Note names that a Python module lacks, or that it has no names but those it has now."""
        _, missing = self.found.missing.setdefault(id(space), (space, set()))
        missing.update(name for name in names if name not in space)
        if everything:
            self.found.sized[id(space)] = space, frozenset(space)

    def _meet_installed(self, cls: type) -> None:
        """Watch a class of an installed package, whose attributes code may read."""
        if not is_torchs(module_name_of(cls)) and package_of(cls) not in sys.stdlib_module_names:
            self.note_object(cls)
            self._named.append(cls)

    def _scan_installed(self, namespace: Mapping[str, Any], name: str) -> None:
        """Scan a global of installed code: its value, and the objects registered in it."""
        value, owner = namespace[name], str(namespace.get("__name__"))
        if owner.partition(".")[0] == _OURS:
            return
        if is_constant_namespace(namespace) or owner in sys.stdlib_module_names:
            self._scan_name(namespace, name, isinstance(value, (list, dict)) and name != "modules")
        elif isinstance(value, type):
            self._meet_installed(value)
        elif _is_content(value):
            self._scan_name(namespace, name, False)
            self._is_finished = True
            self.found.watched_objects.add(value, name)
            self._is_finished = False

    def _scan_settings(self) -> None:
        """Watch the settings of Python that decide what names in the user's code do."""
        found = self.found
        named: set[str] = set()
        names_abstract = False
        packages = {package_of(kind) for kind in {part.type for part in found.parts}}
        for function in found.functions:
            if not is_finished(function):
                names = names_in(function.__code__).union(other_names_in(function))
                named |= names
                space = function.__globals__
                packages |= packages_of(space, names)
                is_asking = not names.isdisjoint(("isinstance", "issubclass"))
                names_abstract |= is_asking and (
                    "numbers" in packages or any(type(space.get(n)) is ABCMeta for n in names)
                )
                if _SPACES & names or _LOADED <= names:
                    found.block(f"{function.__qualname__} reads globals past their names", "")
        found.watched_objects.add_settings(named | packages)
        found.watched_objects.add_builtins(named & vars(builtins).keys())
        if found.caches and any("cache_info" in f.__code__.co_names for f in found.functions):
            found.block("the model asks a cache how often it was asked", "cache_info")
        found.asks_tags = not named.isdisjoint(ASKING)
        classes = [cls for cls in found.depends.classes.values() if is_users_class(cls)]
        if names_abstract or any(type(cls) is ABCMeta for cls in classes):
            found.watched_objects.add_registered()
        if not named.isdisjoint(PYTHONS):
            own = [function for function in found.functions if not is_finished(function)]
            found.watched_objects.add_names({id(one): one for one in (*own, *classes)}.values())
        for name, asked in _TABLES.items():
            if not named.isdisjoint(asked):
                for one in (*filterfalse(is_finished, found.functions), *classes):
                    found.watched_objects.add_attribute(one, name)
        if "state_dict" in named:
            for part in [part for part in found.parts if part.kind is CaptureKind.MODULE]:
                for name in _OF_STATE:
                    found.watched_objects.add(vars(part.value).get(name), f"{part.label}.{name}")
        if any("__class__" in facts_in(function.__code__).stores for function in found.functions):
            for value in [part.value for part in found.parts]:
                if is_heap_type(type(value)) and not isinstance(value, torch.Tensor):
                    found.watched_objects.add_kind(value)
        found.watched_objects.add_bases(found.depends.classes.values())
        for cls in {base for kind in self._kinds | self._met for base in kind.__mro__}:
            if is_installed_file(_file_of(cls)) and cls not in _INTERCEPTED:
                found.watched_objects.add_class(cls)


def _is_content(value: Any) -> bool:
    """Return whether a value of installed code holds other values, or changes when it is used."""
    return not is_torchs(module_name_of(type(value))) and (
        isinstance(value, (Mapping, list, tuple, set, frozenset))
        or is_plain_object(type(value), 0)
        or readers.position_reader(value) is not None
        or isinstance(value, random.Random)
        or module_name_of(type(value)).startswith("numpy.random")
    )


def _called_functions(member: Any) -> tuple[Any, ...]:
    """Return the functions that a member of a class calls."""
    if isinstance(member, (staticmethod, classmethod)):
        return (member.__func__,)
    return (member.fget, member.fset, member.fdel) if isinstance(member, property) else ()


def _is_torchs(subject: type | types.FunctionType) -> bool:
    if isinstance(subject, types.FunctionType):
        return is_unwrapped_torch_function(subject)
    return all(
        is_torchs(module_name_of(base)) and not is_users_class(base) for base in subject.__mro__
    )


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(module_name_of(kind)), "__file__", None) or ""


def _is_of_plain_values(part: Captured, content: dict[Any, Any]) -> bool:
    """Return whether a container holds only plain values, so that it can be compared as a whole."""
    if part.kind is CaptureKind.OBJECT or part.hidden:
        return False
    return all(type(key) is AttributeKey or is_value(key) for key in content) and all(
        type(item) in PLAIN_TYPES or (type(item) is type and item in _FACTORIES)
        for item in content.values()
    )


# What `WatchedContent` leaves to the scan.
_MORE = (
    torch.Tensor, nn.Module, torch.Generator, types.FunctionType, type, types.ModuleType,
    functools._lru_cache_wrapper, contextvars.ContextVar,
)  # fmt: skip
# Functions that look names up; code may call them under other names.
_LOOKING_UP = (getattr, hasattr, setattr, delattr, vars, dir, locals)
_TELLING = (id, hash, operator.is_, operator.is_not)  # objects apart by their identity, likewise
# The most common types, which are never constants.
_USUAL = frozenset({nn.Parameter, torch.Tensor, nn.Linear, nn.LayerNorm, nn.Dropout, dict, list})
_TENSORS = (torch.Tensor, nn.Parameter)
_DATA = (*_TENSORS, dict, list, tuple, types.FunctionType)  # that our functions hold
