"""The scan of what a run can read, value by value: arguments, modules, containers and objects.

It begins with the arguments and the callable, and follows attributes, items and hooks. What code
names is found by its base class (`code_scan.py`). Each value is listed once.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from itertools import filterfalse
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bendtrace.environment.code_facts import ASKING, names_in, undetectable_in
from bendtrace.environment.code_scan import CodeScan, TooManyError
from bendtrace.environment.content import MOST, WatchedContent
from bendtrace.environment.executed import learned_of
from bendtrace.environment.findings import WHOLE, Found, Route
from bendtrace.environment.host_calls import is_steady_type
from bendtrace.environment.kinds import (
    code_of,
    container_kind,
    definitions,
    hides_attributes,
    is_constant,
    is_plain_object,
    is_settings,
    is_value,
)
from bendtrace.environment.provenance import is_finished, is_users_class
from bendtrace.environment.reachability import members_of, reachable_from
from bendtrace.environment.readers import content_reader, is_opaque
from bendtrace.environment.scan_cache import facts_of
from bendtrace.source.results import is_computation
from bendtrace.tape.captured import (
    COPIED,
    PLAIN_TYPES,
    UNSET,
    Access,
    Array,
    AttributeKey,
    Captured,
    CaptureKind,
    attributes_of,
    content_of,
    has_attributes,
    is_array,
)
from bendtrace.tape.plain_numbers import asks, is_exact_format
from bendtrace.tape.structure import entries_of, flat, kept_in, read_partial
from bendtrace.torch_rules.collectives import gathered_names, hidden_of, is_joint_hook
from bendtrace.torch_rules.constructors import LEGACY
from bendtrace.torch_rules.draws import is_host_generator
from bendtrace.torch_rules.functions import ScriptModule
from bendtrace.torch_rules.monkeypatches import monkeypatches
from bendtrace.torch_rules.owners import named_modules

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


class Scan(CodeScan):
    """Lists what a run can read.

    Args:
        found: receives the parts.
    """

    def __init__(self, found: Found) -> None:
        super().__init__(found)
        self._gathered: dict[int, set[str]] = {}
        # Hooks that keep a run from a replay: one with gradients, and one that computes gradients.
        self._of_gradients: list[str] = []
        self._of_own_gradients: list[str] = []
        self._unwatched: list[tuple[str, type]] = []
        self._unguarded: list[Captured] = []
        self._tagged: list[tuple[Captured, Route]] = []
        self._names: dict[int, str] = {}

    @property
    def is_untouched(self) -> bool:
        """Whether the scan has found nothing yet but parts, and classes of helper objects."""
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
        for patch in monkeypatches():
            if isinstance(patch.value, types.FunctionType):
                self._scan_code(patch.value)
            elif is_users_class(type(patch.value)):
                self._scan(patch.value, Route(None, Access.FIXED, None, patch.name, False))
        for function in learned_of(found.function):
            found.names |= {function.__name__}
            self._scan_code(function)
        known: tuple[int, ...] = ()
        while known != (
            known := (len(found.parts), len(found.names), len(found.helpers), found.computes)
        ):
            self._scan_helpers()
            self._scan_modules()
        if found.stores or not found.names.isdisjoint(ASKING):
            # Code may set attributes of functions, or ask for one that does not exist yet.
            for function in filterfalse(is_finished, found.functions):
                self._scan_attributes(function)
        self._scan_settings()
        for part, route in self._tagged:
            for key, item in found.held[part.index].items():
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
        for label, kind in self._unwatched:
            # No code reads what no code names.
            name = label.partition("[")[0].rpartition(".")[2]
            if name in found.names or found.computes or not name.isidentifier():
                what = f"{label} is a {kind.__qualname__}"
                found.block(f"{what}, whose content cannot be guarded", name)

    def scan_late(self, value: Any, label: str) -> None:
        """List a value that the run reached only while it ran."""
        self._scan(value, Route(None, Access.FIXED, None, label, False))

    # What `WatchedContent` finds (see `content.Finder`); `met_object` is inherited.

    def met(self, value: Any, label: str) -> bool:
        """Scan a tensor, module, function or class; return False for any other value."""
        known = self.found.by_id.get(id(value))
        if known is not None and known.kind is not CaptureKind.IDENTITY:
            return True
        if isinstance(value, types.FunctionType) and is_finished(value):
            return True
        if isinstance(value, _MORE) or is_host_generator(value):
            if known is None:
                self._scan(value, Route(None, Access.FIXED, None, label, False))
            return True
        return False

    def met_opaque(self, value: Any, label: str) -> None:
        """Note a value that cannot be watched. Of installed code's own, only iterators move on."""
        if self._is_finished:
            self.found.watched_objects.add_position(value, label)
        else:
            self._unwatched.append((label, type(value)))

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
            self.found.computes = True

    def _scan(self, value: Any, route: Route) -> None:
        found = self.found
        kind = type(value)
        if kind in PLAIN_TYPES:
            if kind is str and "%" in value and is_exact_format(value):
                found.tells_numbers = True
            traced = route.traceable(kind) and not found.plain_numbers
            self._add(value, route, CaptureKind.NUMBER if traced else CaptureKind.PLAIN)
        elif (known := found.by_id.get(id(value))) is not None:
            self._add(known, route, CaptureKind.ALIAS)
            if known.is_argument and known.kind is CaptureKind.TUPLE:
                self._guard_numbers(known)
        elif id(value) in found.growing:
            self._add(value, route, CaptureKind.GROWING)
        elif kind not in _USUAL and (issubclass(kind, Enum) or is_constant(value, kind)):
            self._add(value, route, CaptureKind.PLAIN)
            if issubclass(kind, Enum) and is_users_class(kind):  # it may have attributes
                found.watched_objects.add(value, route.label)
        elif kind in weakref.ProxyTypes:  # it pretends to be the object that it refers to
            self._add(value, route, CaptureKind.IDENTITY)
            self._unwatched.append((route.label, kind))
        elif is_lazy(value):  # the first call makes it
            self.notes.is_steady = False
            found.is_lazy = True
            self._add(value, route, CaptureKind.IDENTITY)
        elif issubclass(kind, torch.Tensor):
            part = self._add(value, route, CaptureKind.TENSOR)
            is_bare = kind in _TENSORS and not value.__dict__
            attributes = found.held[part.index] = {} if is_bare else {**attributes_of(value)}
            part.size = facts_of(value, attributes)
            if route.is_argument:
                for key, item in attributes.items():
                    self._scan(item, route.into(part, key))
            elif attributes:
                self._tagged.append((part, route))
        elif issubclass(kind, nn.Module):
            self._add(value, route, CaptureKind.MODULE)
            self._scan_module(value, route.label)
        elif issubclass(kind, (set, frozenset)) and self._is_of_values(value, kind):
            self._add(value, route, CaptureKind.SET).size = COPIED[CaptureKind.SET](value)
            self._scan_enumerated(value, route.label)
        elif is_array(value) and not value.dtype.hasobject and not hasattr(value, "__dict__"):
            self._add(value, route, CaptureKind.ARRAY).size = Array(value)
        elif isinstance(value, contextvars.ContextVar):
            self._add(value, route, CaptureKind.IDENTITY)
            part = self._add(
                value, Route(None, Access.FIXED, None, route.label, False), CaptureKind.IDENTITY
            )
            for default in gc.get_referents(value):
                found.watched_objects.add(default, f"the default of {value.name}")
            held = found.held[part.index] = {value.name: value.get(UNSET)}
            inside = Route(part, Access.CONTEXT, value.name, value.name, False)
            self._scan(held[value.name], inside)
        elif hides_attributes(value, kind):
            self._add(value, route, CaptureKind.IDENTITY)
            found.block(f"{kind.__qualname__}.__getattribute__ hides what {route.label} holds", "")
        elif not route.is_argument and is_plain_object(kind, route.depth) and is_settings(value):
            self.met_object(kind)
            # A configuration: no call creates it, so its identity is guarded, and its attributes
            # are scanned as a fixed mapping, like those of a module.
            self._add(value, route, CaptureKind.IDENTITY)
            self.notes.owned.append((value, vars(value)))
            if not isinstance(value, types.SimpleNamespace):  # whose dict cannot be replaced
                found.watched_objects.add_owner(value)
            self._scan_mapping(vars(value), route.label)
        elif issubclass(kind, (list, tuple, dict)) or is_plain_object(kind, route.depth):
            if route.is_argument:
                self._meet_helper(kind)
            else:
                self.met_object(kind)
            self._scan_container(value, route)
        elif route.is_argument and (kind is torch.Generator or is_host_generator(value)):
            part = self._add(value, route, CaptureKind.OBJECT)  # any will do
            found.held[part.index], part.size = {}, tuple(attributes_of(value))
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
        if not (found.tells_numbers or self._is_finished or asks(value)):
            found.tells_numbers = True
        if isinstance(value, (functools.partial, torch.Generator)):
            self.notes.is_steady = False
        if isinstance(value, types.FunctionType):
            self._scan_code(value)
        elif isinstance(value, type) and is_users_class(value):
            self._meet_helper(value)
        elif type(value) is LEGACY:  # its constructor takes numbers, and no traced ones
            found.tells_numbers = True
        elif isinstance(value, type):
            self._meet_installed(value)
            if not is_steady_type(value):
                self._unwatched.append((route.label, type(value)))
        elif isinstance(value, types.BuiltinFunctionType) and value in _LOOKING_UP:
            found.computes = True
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
            if not isinstance(inner, types.FunctionType) or not is_finished(inner):
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
            for kept in kept_in(value):
                if not isinstance(kept, torch.Tensor):
                    found.watched_objects.add(kept, f"{route.label}(...)")
        elif isinstance(value, (types.MethodType, functools.partial)):
            self._scan_callable(value)
            if isinstance(value, functools.partial):
                if (own := read_partial(value)[3]) is None:
                    found.watched_objects.add_partial(value, route.label)
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
                found.members += flat(tuple(value))

    def _holds(self, value: Any) -> bool:
        """Whether an object that can be called has content."""
        return content_reader(value) is not None or is_opaque(value)

    def _scan_container(self, value: Any, route: Route) -> None:
        part = self._add(value, route, container_kind(type(value)))
        content = content_of(part)
        if len(content) > _LARGE and _is_of_plain_values(part, content):
            part.kind, part.size = CaptureKind.LARGE, COPIED[CaptureKind.LARGE](value)
            return
        by_key = part.kind is CaptureKind.OBJECT or (
            part.access is not Access.FIXED
            and (part.kind is CaptureKind.DICT or has_attributes(part.type))
        )
        part.size = tuple(content) if by_key else len(content)
        if part.kind is not CaptureKind.TUPLE or has_attributes(part.type):
            self.found.held[part.index] = content
        if part.kind is CaptureKind.DICT:
            self._scan_enumerated(value, route.label)
            for key in filterfalse(is_value, value):
                if not route.is_argument:
                    self.found.members += flat(key)
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

    @staticmethod
    def _is_of_values(members: Any, kind: type) -> bool:
        """Whether a set contains only values that cannot change."""
        return kind in (set, frozenset) and all(map(is_value, members))

    def _scan_module(self, module: nn.Module, label: str) -> None:
        found = self.found
        if label == "self" and not self._names:  # the model, or the module of a bound method
            self._names = {id(inner): name for name, inner in named_modules(module) if name}
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
        for places in gathered_names(module):
            self.notes.is_steady = False
            for holder, name in places:
                self._gathered.setdefault(id(holder), set()).add(name)
        gathered = self._gathered.get(id(module), ())
        self._scan_mapping(attributes["_parameters"], label, frozenset(gathered))
        self._scan_mapping(attributes["_buffers"], label)
        self._scan_mapping(attributes["_modules"], label)

    def _may_differentiate(self) -> bool:
        """Whether a module of the run may have an output with gradients: only then hooks fire."""
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
        codes = list(map(code_of, own))
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
        part.size = len(mapping)
        if type(mapping) in WHOLE:  # these are compared as a whole
            held = dict(mapping.items())
        else:
            held = self.found.held[part.index] = content_of(part)
        parts = self.found.parts
        for key, item in held.items():
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


def _is_of_plain_values(part: Captured, content: dict[Any, Any]) -> bool:
    """Whether a container holds only plain values, so that it can be compared as a whole."""
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
