"""Everything a run can read before it begins: arguments, modules, closures and globals.

They are walked once and listed as flat parts, each reachable from its parent. From the list
follow which tensors are inputs or state, what has to be guarded, and - comparing it with
what is there after the run - what the run changed.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bendtrace.recording.contents import WHOLE, Places
from bendtrace.recording.joint import gathered_names, hidden_of, is_joint_hook
from bendtrace.recording.kinds import (
    asks_for_plain,
    changes_unwatched,
    code_of,
    container_kind,
    definitions,
    is_constant,
    is_plain_object,
    is_settings,
    is_watched,
    judge_of,
    tells_numbers_apart,
)
from bendtrace.recording.objects import can_build, kept_in
from bendtrace.recording.parts import (
    PLAIN_TYPES,
    UNSET,
    Access,
    Array,
    AttributeKey,
    Change,
    Part,
    PartKind,
    attributes_of,
    child_label,
    content_of,
    exact_items,
    exact_members,
    is_array,
)
from bendtrace.recording.reach import (
    DESCRIBED,
    Reach,
    is_installed,
    is_installed_file,
    is_torchs,
    is_users_class,
    is_users_module,
    members_of,
    names_in,
    namespace_of,
    place_naming,
    reach_of,
)
from bendtrace.recording.stamps import Depends
from bendtrace.recording.unseen import unseen_in
from bendtrace.recording.walked import Notes, Walked, facts_of, latest_walk, remember
from bendtrace.recording.watcher import current_watcher

__all__ = ["Surroundings"]

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
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
_LARGE = 512  # a container with more plain entries than this is compared as one


class Surroundings:
    """The parts that a run can read, found by walking from its arguments and its callable.

    Args:
        function: the module or function to be run.
        arguments: the bound arguments by name.

    Attributes:
        function: as given.
        parts: everything found; parents before children.
        blockers: what was found that no guard can watch, one line each.
        module_paths: qualified name of each module, by identity.
        hook_dicts: the modules' own tables of hooks.
        names: all names that the code of the model uses, as far as it is known.
        stores: names of the attributes that it assigns, likewise.
        read_caches: what tensors the run took from which `functools.lru_cache`.
        namespaces: those of the classes of the model, with the names in them.
        functions: the code of the model, likewise.
        missing: globals that some of it names and that are not there.
        tells_numbers: whether some of that code asks for the exact type of a number.
        arguments: the parts that are, or are held by, arguments.
        generators: those that are random generators.
        is_repeated: whether all but the arguments was taken over from an earlier walk.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.function = function
        self.is_repeated = False
        # A run around this one must not record what is asked of tensors here: it is not always
        # the same that is asked.
        with nullcontext() if current_watcher() is None else torch._C.DisableTorchFunction():
            self._find(arguments)

    def _find(self, arguments: dict[str, Any]) -> None:
        """List the parts, taken over from an earlier walk if there is one that is as good."""
        earlier = latest_walk(self.function)
        if earlier is not None:
            self._walk_arguments(arguments, earlier.plain_numbers)
            if self._is_untouched() and earlier.repeat(self):
                self.is_repeated = True
                self._keep(earlier)
                return
        plain_numbers = asks_for_plain(self.function) or tells_numbers_apart(self.function)
        self._walk_arguments(arguments, plain_numbers)
        is_repeatable = self._is_untouched()
        first, helpers = len(self.parts), tuple(self.helpers)
        self._walk_model()
        if is_repeatable and self._notes.is_steady:
            walked = Walked(self, self._notes, first, helpers)
            if walked.is_usable:
                self._keep(walked)
                remember(self.function, walked)

    def _keep(self, walked: Walked) -> None:
        """Keep a walk, which lives as long as somebody has it."""
        # In a function: it is nothing to be copied, or looked through, with a run.
        self._kept = lambda: walked

    def _walk_arguments(self, arguments: dict[str, Any], plain_numbers: bool) -> None:
        """Begin with the arguments.

        Args:
            arguments: by name.
            plain_numbers: whether numbers among them must not be traced.
        """
        self.parts: list[Part] = []
        self.blockers: list[str] = []
        self.module_paths: dict[int, str] = {}
        self.hook_dicts: list[dict[Any, Any]] = []
        self.by_id: dict[int, Part] = {}
        self.held: dict[int, dict[Any, Any]] = {}  # by index, what containers held before the run
        self.names: frozenset[str] = frozenset()
        self.stores: frozenset[str] = frozenset()
        self.tells_numbers = False
        self.functions: list[types.FunctionType] = []
        self.missing: list[tuple[Mapping[str, Any], str]] = []
        self.namespaces: dict[int, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self.read_caches: list[tuple[functools._lru_cache_wrapper[Any], torch.Tensor]] = []
        self.generators: list[Part] = []
        self.helpers: dict[type, frozenset[str]] = {}
        self._walked: set[Any] = set()
        self._gathered: dict[int, set[str]] = {}
        self._names_walked: set[tuple[int, str]] = set()
        self._unwatched: list[Part] = []
        self._unguarded: list[Part] = []
        self._tagged: list[tuple[Part, _Reach]] = []
        self._modules: list[types.ModuleType] = []
        self._hooks: list[tuple[str, str, tuple[tuple[Any, Any], ...]]] = []
        self._kinds: set[type] = set()
        self.caches: list[tuple[str, functools._lru_cache_wrapper[Any], int]] = []
        self.plain_numbers = plain_numbers
        self._notes = Notes()
        self.depends = Depends()
        self.bare: list[Part] = []  # tensors without attributes of their own
        self.alone: list[Part] = []  # what else has content that is looked at one by one
        for position, (name, value) in enumerate(arguments.items()):
            self._walk(value, _Reach(None, Access.ROOT, position, name, True))
        self.arguments = [part for part in self.parts if part.is_argument]
        self.own = self.parts
        self.places = Places((), {})
        self.contents = self.places.read()
        self._sort_out(self.parts)

    def _is_untouched(self) -> bool:
        """Whether the arguments are no more than parts, and classes of helper objects."""
        return self._notes.is_steady and not (
            self.names or self.functions or self._tagged or self._unwatched or self._unguarded
            or self._modules or self.caches or self.hook_dicts or self._notes.guessed
        )  # fmt: skip

    def _walk_model(self) -> None:
        """Walk from the callable, and list what keeps a run from being repeated."""
        self._walk_callable(self.function)
        self._walk_helpers()
        self._walk_modules()
        for part, reach in self._tagged:
            for key, item in self.held[part.index].items():
                if key in self.names:  # others, such as marks of an optimizer, are not read
                    self._walk(item, reach.into(part, key))
        self.generators = [part for part in self.parts if part.type is torch.Generator]
        if self.generators or self._modules or any(self.hook_dicts):
            self._notes.is_steady = False
        self.blockers += unseen_in(self.names, self.stores, self.functions, bool(self.generators))
        for part in self._unguarded:
            what = f"argument {part.label} is a {part.type.__qualname__}"
            self._block(f"{what}, whose content cannot be guarded", part.label)
        for part in self._unwatched:
            if str(part.label).rsplit(".", 1)[-1] in self.names:
                self._block(
                    f"{part.label} is a {part.type.__qualname__}, whose content cannot be guarded",
                    part.label,
                )
        self.places = Places(self.parts, self.held)
        self.contents = self.places.read()
        self.bare, self.alone = [], []
        self._sort_out(self.parts)

    def find_cached(self, tensor: torch.Tensor) -> Part | None:
        """Return a new part for a tensor that comes from a `functools.lru_cache`, if it does."""
        for label, cache, _ in self.caches:
            if any(kept is tensor for kept in kept_in(cache)):
                fixed = _Reach(None, Access.FIXED, None, f"{label}(...)", False)
                known = len(self.parts)
                self._walk(tensor, fixed)
                self._sort_out(self.parts[known:])
                self.read_caches.append((cache, tensor))
                return self.by_id[id(tensor)]
        return None

    def place_of(self, label: str) -> str:
        """Say where the model's code stores to what has a label, or mentions it; "" if nowhere."""
        name = label.rpartition(".")[2].partition("[")[0]
        return place_naming(name, self.functions)

    def _block(self, reason: str, label: str) -> None:
        place = self.place_of(label)
        self.blockers.append(f"{reason} (see {place})" if place else reason)

    def find(self, thing: Any) -> Part | None:
        """Return the part that `thing` is, or None if the run did not begin with it."""
        part = self.by_id.get(id(thing))
        return part if part is not None and part.value is thing else None

    def things(self) -> dict[int, Any]:
        """Return what the run could read, by identity."""
        return {key: part.value for key, part in self.by_id.items()}

    def sets(self) -> Iterator[set[Any]]:
        """Yield the sets that the run could read."""
        for part in self.alone:
            if part.kind is PartKind.SET and isinstance(part.value, set):
                yield part.value

    def filled_caches(self) -> Iterator[tuple[str, functools._lru_cache_wrapper[Any]]]:
        """Yield each `functools.lru_cache` that the run put something into."""
        for label, cache, misses in self.caches:
            if cache.cache_info().misses != misses:
                yield f"the run fills the cache of {label} (see {self.place_of(label)})", cache

    def _sort_out(self, parts: list[Part]) -> None:
        """Tell what may change by itself from tensors that have no attributes of their own."""
        held, taken = self.held, self.places.taken
        for part in parts:
            if part.index in held and part.index not in taken:
                is_bare = part.type in _TENSORS and not held[part.index]
                (self.bare if is_bare else self.alone).append(part)
            elif part.kind in _COPIED:
                self.alone.append(part)

    def changes(self) -> Iterator[Change]:
        """Yield what is different now from when the parts were listed."""
        for hooks, (holder, table, items) in zip(self.hook_dicts, self._hooks, strict=True):
            if (hooks or items) and tuple(hooks.items()) != items:
                name = table[1:]
                kind = name.replace("_", " ")
                self._block(
                    f"the run puts {kind} on {holder}, or removes some", f"register_{name[:-1]}"
                )
        before = self.held
        now = self.places.read()
        if now is not None and self.contents is not None and now.same_as(self.contents):
            parts = self.alone
            if any(map(_own_attributes, (part.value for part in self.bare))):
                parts = sorted((*parts, *self.bare), key=lambda part: part.index)
        else:
            parts = self.parts
            if self.contents is not None:
                before = before | self.places.before(self.contents)
        for part in parts:
            yield from self._changes_of(part, before.get(part.index))

    def _changes_of(self, part: Part, before: dict[Any, Any] | None) -> Iterator[Change]:
        if part.kind is PartKind.SET and exact_members(part.value) != part.size:
            self._block(f"the run changes the set {part.label}", part.label)
        if part.kind is PartKind.LARGE and exact_items(part.value) != part.size:
            self._block(f"the run changes {part.label}, which is too large to watch", part.label)
        if part.kind is PartKind.ARRAY and part.size != part.value:
            self._block(f"the run changes the array {part.label}", part.label)
        if before is None:
            return
        now = content_of(part, before)
        if part.kind is PartKind.IDENTITY and not isinstance(part.value, dict):
            for key, value in before.items():
                if now.get(key) is not value:
                    self._block(f"the run changes {key} of {part.label}", key)
            return
        if part.kind is not PartKind.IDENTITY and list(before) != list(now):
            if set(before) == set(now):
                self._block(f"the run changes the order of {part.label}", part.label)
        if part.kind is PartKind.LIST and len(before) != len(now):
            yield Change(part, None, list(part.value))
            return
        for key, value in now.items():
            if key not in before or before[key] is not value:
                yield Change(part, key, value)
        for key in before:
            if key not in now:
                yield Change(part, key, None, deleted=True)

    def release(self) -> None:
        """Let go of tensors and contents once the run is over."""
        self.held, self.contents, self.places = {}, None, Places((), {})
        self._notes, self.depends = Notes(), Depends()
        for part in self.own:
            if part.kind in _LET_GO and part.access is not Access.FIXED:
                part.value = None
        self.by_id.clear()

    # The walk. Every `_walk...` adds parts; `_Reach` says how the thing was come by.

    def _walk_callable(self, function: Callable[..., Any]) -> None:
        fixed = _Reach(None, Access.FIXED, None, "self", False)
        if isinstance(function, types.MethodType):
            self._walk(function.__self__, fixed)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            self._walk_code(function, everything=True)
        elif isinstance(function, functools.partial):
            self._walk_callable(function.func)
            self._walk(function.args, fixed)
            self._walk(function.keywords, fixed)
        elif not isinstance(function, types.BuiltinFunctionType):
            self._walk(function, fixed)

    def _add(self, value: Any, reach: _Reach, kind: PartKind) -> Part:
        part = Part(
            len(self.parts), reach.parent, reach.access, reach.key, kind, value, type(value),
            reach.label, reach.is_argument,
        )  # fmt: skip
        self.parts.append(part)
        if kind not in _NOT_FOUND:
            self.by_id[id(value)] = part
        return part

    def _walk(self, value: Any, reach: _Reach) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES:
            traced = reach.traceable(kind) and not self.plain_numbers
            self._add(value, reach, PartKind.NUMBER if traced else PartKind.PLAIN)
        elif (known := self.by_id.get(id(value))) is not None:
            self._add(known, reach, PartKind.ALIAS)
        elif kind not in _USUAL and (issubclass(kind, Enum) or is_constant(value, kind)):
            self._add(value, reach, PartKind.PLAIN)
        elif is_lazy(value):  # of a module whose hooks, for now, make it run live
            self._notes.is_steady = False
            self._add(value, reach, PartKind.IDENTITY)
        elif issubclass(kind, torch.Tensor):
            part = self._add(value, reach, PartKind.TENSOR)
            is_bare = kind in _TENSORS and not value.__dict__
            attributes = self.held[part.index] = {} if is_bare else {**attributes_of(value)}
            part.size = facts_of(value, attributes)
            if reach.is_argument:
                for key, item in attributes.items():
                    self._walk(item, reach.into(part, key))
            elif attributes:
                self._tagged.append((part, reach))
        elif issubclass(kind, nn.Module):
            self._add(value, reach, PartKind.MODULE)
            self._walk_module(value, reach.label)
        elif issubclass(kind, (set, frozenset)):
            self._add(value, reach, PartKind.SET).size = exact_members(value)
        elif is_array(value) and value.dtype.hasobject:
            self._unwatched.append(self._add(value, reach, PartKind.IDENTITY))
        elif is_array(value):
            self._add(value, reach, PartKind.ARRAY).size = Array(value)
        elif isinstance(value, contextvars.ContextVar):
            self._add(value, reach, PartKind.IDENTITY)
            part = self._add(
                value, _Reach(None, Access.FIXED, None, reach.label, False), PartKind.IDENTITY
            )
            held = self.held[part.index] = {value.name: value.get(UNSET)}
            inside = _Reach(part, Access.CONTEXT, value.name, value.name, False)
            self._walk(held[value.name], inside)
        elif not reach.is_argument and is_plain_object(kind, reach.depth) and is_settings(value):
            self._meet_helper(kind)
            # A configuration: it is not made anew by each call, so it is taken to be the same
            # object, and its attributes are those of a fixed mapping, like a module's.
            self._add(value, reach, PartKind.IDENTITY)
            self._notes.owned.append((value, vars(value)))
            self._walk_mapping(vars(value), reach.label)
        elif issubclass(kind, (list, tuple, dict)) or is_plain_object(kind, reach.depth):
            self._meet_helper(kind)
            self._walk_container(value, reach)
        elif kind is torch.Generator and reach.is_argument:
            part = self._add(value, reach, PartKind.OBJECT)  # any will do
            self.held[part.index], part.size = {}, ()
        else:
            part = self._add(value, reach, PartKind.IDENTITY)
            if isinstance(value, (functools.partial, torch.Generator)):
                self._notes.is_steady = False
            if isinstance(value, types.FunctionType):
                self._walk_code(value)
            elif isinstance(value, type) and not reach.is_argument and is_users_class(value):
                self._meet_helper(value)
            elif isinstance(value, functools._lru_cache_wrapper):
                if isinstance(value.__wrapped__, types.FunctionType):
                    self._walk_code(value.__wrapped__)
                self.caches.append((reach.label, value, value.cache_info().misses))
            elif isinstance(value, (types.MethodType, functools.partial)):
                self._walk_callable(value)
            elif isinstance(value, types.ModuleType):
                if is_users_module(value):
                    self._modules.append(value)
            elif type(value) is inspect.Signature:  # nothing changes in it but what defaults hold
                defaults = (parameter.default for parameter in value.parameters.values())
                self._walk_defaults(defaults, reach.label)
            elif self._changes_unwatched(value) and not reach.is_argument:
                self._unwatched.append(part)
            elif reach.is_argument and not callable(value) and kind is not torch.Generator:
                self._unguarded.append(part)
            else:
                self._meet_helper(kind)

    def _changes_unwatched(self, value: Any) -> bool:
        does = changes_unwatched(value)
        if can_build(type(value)):  # then it depends on whether it has attributes
            self._notes.guessed.append((value, does))
        return does

    def _walk_container(self, value: Any, reach: _Reach) -> None:
        part = self._add(value, reach, container_kind(type(value)))
        content = content_of(part)
        if len(content) > _LARGE and all(type(item) in PLAIN_TYPES for item in content.values()):
            part.kind, part.size = PartKind.LARGE, exact_items(value)
            return
        by_key = part.kind is PartKind.OBJECT or (
            part.kind is PartKind.DICT and part.access is not Access.FIXED
        )
        part.size = tuple(content) if by_key else len(content)
        if part.kind is not PartKind.TUPLE:
            self.held[part.index] = content
        for key, item in content.items():
            self._walk(item, reach.into(part, key))

    def _walk_module(self, module: nn.Module, label: str) -> None:
        self.module_paths[id(module)] = label.removeprefix("self").removeprefix(".")
        if isinstance(module, torch.jit.ScriptModule):
            return  # a call of it is one op, which reads what it holds anew
        kind = type(module)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._walk_code(kind)
            for cls in kind.__mro__:
                if "forward" in vars(cls):  # also of torch's own modules, which are not followed
                    self._walk_name(namespace_of(cls), "forward")
                    break
        attributes = vars(module)
        for name in _HOOKS:
            hooks = attributes.get(name)
            if hooks is not None:
                self.hook_dicts.append(hooks)
                self._hooks.append((label, name, tuple(hooks.items()) if hooks else ()))
                if hooks and not self._walk_hooks(name, hooks):
                    what = f"{label} has {name[1:].replace('_', ' ')}"
                    self.blockers.append(what + definitions(hooks.values()))
        others = hidden_of(module)
        if "_untraced" in attributes:
            others |= attributes["_untraced"]
        hidden = _MODULE_INTERNALS | others if others else _MODULE_INTERNALS
        if others or type(attributes) is not dict:
            self._notes.is_steady = False
        self._notes.owned.append((module, attributes))
        self._walk_mapping(attributes, label, hidden, kind)
        # What FSDP gathers in the run is no part of what is there before; a module that does so
        # is walked before those whose parameters it gathers.
        for places in gathered_names(module):
            self._notes.is_steady = False
            for holder, name in places:
                self._gathered.setdefault(id(holder), set()).add(name)
        gathered = self._gathered.get(id(module), ())
        self._walk_mapping(attributes["_parameters"], label, frozenset(gathered))
        self._walk_mapping(attributes["_buffers"], label)
        self._walk_mapping(attributes["_modules"], label)

    def _walk_hooks(self, name: str, hooks: Mapping[Any, Any]) -> bool:
        """Walk forward hooks that are part of the model; return False for those that are not.

        What libraries put on their own modules, to gather hidden states or to normalise weights,
        works on tensors and attributes like a forward. What a user puts there may print or count.
        """
        if name not in ("_forward_hooks", "_forward_pre_hooks"):
            return False
        # Those that call a user's functions as ops of their own are called so in replays as well.
        own = [hook for hook in hooks.values() if not is_joint_hook(hook)]
        others = [hook for hook in own if not hasattr(hook, "is_replayable")]
        if not all(hook.is_replayable for hook in own if hook not in others):
            return False
        codes = list(map(code_of, others))
        if any(code is None or not is_installed_file(code.co_filename) for code in codes):
            return False
        for hook in others:
            self._walk_callable(hook)
        return True

    @property
    def hooks(self) -> list[tuple[Any, ...]]:
        """What the modules' tables of hooks held before the run, in the order of `hook_dicts`."""
        return [items for _, _, items in self._hooks]

    def _walk_mapping(
        self,
        mapping: dict[str, Any],
        label: str,
        hidden: frozenset[str] = frozenset(),
        owner: type | None = None,
    ) -> None:
        """Walk one of the dicts that a module consists of: they live as long as it does.

        Args:
            mapping: the dict.
            label: how a person would write what it belongs to.
            hidden: keys that are left out.
            owner: the module's class, which functions among the attributes can ask for members.
        """
        part = self._add(mapping, _Reach(None, Access.FIXED, None, label, False), PartKind.DICT)
        part.hidden = hidden
        part.size = len(mapping)
        if type(mapping) in WHOLE:  # these are compared as a whole, with all others
            held = dict(mapping.items())
        else:
            held = self.held[part.index] = content_of(part)
        parts = self.parts
        for key, item in held.items():
            if key in hidden:
                continue
            kind = type(item)
            if kind in PLAIN_TYPES:  # as `_walk` would add it, in a fraction of the time
                parts.append(
                    Part(len(parts), part, Access.ITEM, key, PartKind.PLAIN, item, kind,
                         f"{label}.{key}", False)
                )  # fmt: skip
                continue
            self._walk(item, _Reach(part, Access.ITEM, key, f"{label}.{key}", False))
            if owner is not None and isinstance(item, types.FunctionType):
                named = frozenset(names_in(item.__code__)) & members_of(owner)
                self._take(reach_of(owner, named), None)

    def _meet_helper(self, cls: type) -> None:
        if cls not in self.helpers and is_users_class(cls):
            self.helpers[cls] = frozenset()

    def _walk_modules(self) -> None:
        """Walk the names that are used of Python modules held as values."""
        for module in self._modules:
            for name in self.names & vars(module).keys():
                if not isinstance(vars(module)[name], types.ModuleType):
                    self._walk_name(vars(module), name, is_watched(vars(module)[name]))

    def _walk_helpers(self) -> None:
        """Walk the members of classes, those whose names code of other classes uses."""
        progress = True
        while progress:
            progress = False
            for cls, known in tuple(self.helpers.items()):
                members = members_of(cls)
                named = members & self.names | {m for m in members if m[:2] == "__"} - _MAKING
                if named > known:
                    self.helpers[cls] = named
                    self._take(reach_of(cls, named), None)
                    progress = True

    def _walk_code(self, subject: type | types.FunctionType, everything: bool = False) -> None:
        """Walk what code can read besides its arguments.

        Args:
            subject: a module's class, or a function.
            everything: whether to walk all globals that it names itself, not only plain data
                and modules.
        """
        if subject in self._walked or is_torchs(subject.__module__):
            return
        self._walked.add(subject)
        own = None
        if everything and isinstance(subject, types.FunctionType):
            own = subject.__globals__
        self._take(reach_of(subject), own)

    def _take(self, reach: Reach, own: Mapping[str, Any] | None) -> None:
        """Walk what code reaches; in one namespace, all that it names."""
        self.depends.add(reach.depends)
        self.names |= reach.names
        self.stores |= reach.stores
        self.functions += reach.functions
        self.tells_numbers = self.tells_numbers or reach.tells_numbers
        for owner in reach.owners:
            self.namespaces[id(owner)] = (owner, tuple(owner))
        notes = self._notes
        for namespace, name in reach.globals:
            if name in namespace:
                value = namespace[name]
                watched = namespace is own or is_watched(value)
                if watched or not is_installed(namespace.get("__name__")):
                    self._walk_name(namespace, name, watched)
                    if isinstance(value, (types.FunctionType, type)):
                        continue
                judge = None if namespace is own else judge_of(value)
                notes.judged[id(namespace), name] = namespace, name, value, judge, watched
            else:
                notes.absent.append((namespace, name))
        for namespace, name in reach.depends.absent.values():
            if namespace is not sys.modules and not hasattr(builtins, name):
                self.missing.append((namespace, name))
        for namespace, name in reach.members:
            if name in namespace:
                self._walk_name(namespace, name)
            else:
                notes.absent.append((namespace, name))
        for function in reach.functions:
            self._walk_closure(function)
            if set(vars(function)) - {"__wrapped__"}:
                self._walk_mapping(vars(function), function.__name__, frozenset({"__wrapped__"}))
            defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
            self._walk_defaults(chain(*defaults), function.__name__)

    def _walk_defaults(self, values: Iterable[Any], owner: str) -> None:
        for value in values:
            if type(value) not in PLAIN_TYPES and not self.find(value):
                label = f"a default of {owner}"
                self._walk(value, _Reach(None, Access.FIXED, None, label, False))

    def _walk_closure(self, function: types.FunctionType) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell: the name is assigned later
                self._notes.empty.append(cell)
                continue
            if name != "__class__" and id(cell) not in self.by_id:
                fixed = _Reach(None, Access.FIXED, None, name, False)
                holder = self._add(cell, fixed, PartKind.IDENTITY)
                self.held[holder.index] = {name: value}
                self._walk(value, _Reach(holder, Access.CELL, None, name, False))

    def _walk_name(self, namespace: Mapping[str, Any], name: str, watched: bool = True) -> None:
        """Walk one name of a module's globals, or of a class.

        What is not watched is guarded by identity alone.
        """
        if (id(namespace), name) in self._names_walked:
            return
        is_pythons = name.startswith("__") and name.endswith("__")
        if is_pythons and not isinstance(namespace[name], types.FunctionType):
            return
        self._names_walked.add((id(namespace), name))
        value = namespace[name]
        holder = self.by_id.get(id(namespace))
        if holder is None:
            fixed = _Reach(None, Access.FIXED, None, "globals", False)
            holder = self._add(namespace, fixed, PartKind.IDENTITY)
            self.held[holder.index] = {}
        if holder.index in self.held:
            self.held[holder.index][name] = value
        reach = _Reach(holder, Access.ITEM, name, name, False)
        by_identity = isinstance(value, (types.FunctionType, *DESCRIBED))
        if by_identity or not watched or type(value) is types.MethodDescriptorType:
            self._add(value, reach, PartKind.IDENTITY)
        else:
            self._walk(value, reach)


class _Reach(NamedTuple):
    """How the walk came by a thing."""

    parent: Part | None
    access: Access
    key: Any
    label: str
    is_argument: bool
    depth: int = 0

    def into(self, part: Part, key: Any) -> _Reach:
        access = key.access if isinstance(key, AttributeKey) else Access.ITEM
        label = child_label(part, key)
        return _Reach(part, access, key, label, self.is_argument, self.depth + 1)

    def traceable(self, kind: type) -> bool:
        """Whether a number here is handed to the model as a traced one.

        Numbers given directly, or in tuples, are; elsewhere they could not be exchanged
        for traced ones without changing the user's containers.
        """
        if not self.is_argument or kind not in (int, float):
            return False
        parent = self.parent
        while parent is not None and parent.type is tuple:
            parent = parent.parent
        return parent is None


# Methods that nobody calls of an object that is there already, unless by name.
_MAKING = frozenset(
    {
        "__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__", "__del__",
        "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    }
)  # fmt: skip
# Tuples, not sets: hashing an Enum member takes longer than comparing a few.
_NOT_FOUND = (PartKind.PLAIN, PartKind.NUMBER, PartKind.ALIAS)
# What is most common, and never a constant.
_USUAL = frozenset({nn.Parameter, torch.Tensor, nn.Linear, nn.LayerNorm, nn.Dropout, dict, list})
_COPIED = (PartKind.SET, PartKind.LARGE, PartKind.ARRAY)  # compared with a copy
_TENSORS = (torch.Tensor, nn.Parameter)
_own_attributes = attrgetter("__dict__")
_LET_GO = (PartKind.TENSOR, PartKind.LIST, PartKind.TUPLE, PartKind.DICT, PartKind.OBJECT)
