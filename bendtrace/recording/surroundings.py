"""Everything a run can read before it begins: arguments, modules, closures and globals.

They are walked once and listed as flat parts, each reachable from its parent. From the list
follow which tensors are inputs or state, what has to be guarded, and - comparing it with
what is there after the run - what the run changed.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

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
    tells_numbers_apart,
)
from bendtrace.recording.objects import kept_in
from bendtrace.recording.parts import (
    PLAIN_TYPES,
    UNSET,
    Access,
    Array,
    AttributeKey,
    Change,
    Part,
    PartKind,
    TensorFacts,
    attributes_of,
    child_label,
    content_of,
    exact_items,
    exact_members,
    is_array,
    requires_grad,
)
from bendtrace.recording.reach import (
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
from bendtrace.recording.unseen import unseen_in

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
        namespaces: those of the classes of the model, with how many names they have.
        functions: the code of the model, likewise.
        tells_numbers: whether some of that code asks for the exact type of a number.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.function = function
        self.parts: list[Part] = []
        self.blockers: list[str] = []
        self.module_paths: dict[int, str] = {}
        self.hook_dicts: list[dict[Any, Any]] = []
        self._by_id: dict[int, Part] = {}
        self.names: frozenset[str] = frozenset()
        self.stores: frozenset[str] = frozenset()
        self.tells_numbers = False
        self._helpers: dict[type, frozenset[str]] = {}
        self.functions: list[types.FunctionType] = []
        self._walked: set[Any] = set()
        self._gathered: dict[int, set[str]] = {}
        self._names_walked: set[tuple[int, str]] = set()
        self._unwatched: list[Part] = []
        self._unguarded: list[Part] = []
        self._tagged: list[tuple[Part, _Reach]] = []
        self.namespaces: dict[int, tuple[Mapping[str, Any], int]] = {}
        self.read_caches: list[tuple[functools._lru_cache_wrapper[Any], torch.Tensor]] = []
        self._modules: list[types.ModuleType] = []
        self._hooks: list[tuple[str, tuple[tuple[Any, Any], ...]]] = []
        self._caches: list[tuple[str, functools._lru_cache_wrapper[Any], int]] = []
        self._plain_numbers = asks_for_plain(function) or tells_numbers_apart(function)
        for position, (name, value) in enumerate(arguments.items()):
            self._walk(value, _Reach(None, Access.ROOT, position, name, True))
        self._walk_callable(function)
        self._walk_helpers()
        self._walk_modules()
        for part, reach in self._tagged:
            for key, item in (part.content or {}).items():
                if key in self.names:  # others, such as marks of an optimizer, are not read
                    self._walk(item, reach.into(part, key))
        has_generator = any(part.type is torch.Generator for part in self.parts)
        self.blockers += unseen_in(self.names, self.stores, self.functions, has_generator)
        for part in self._unguarded:
            what = f"argument {part.label} is a {part.type.__qualname__}"
            self._block(f"{what}, whose content cannot be guarded", part.label)
        for part in self._unwatched:
            if str(part.label).rsplit(".", 1)[-1] in self.names:
                self._block(
                    f"{part.label} is a {part.type.__qualname__}, whose content cannot be guarded",
                    part.label,
                )

    def find_cached(self, tensor: torch.Tensor) -> Part | None:
        """Return a new part for a tensor that comes from a `functools.lru_cache`, if it does."""
        for label, cache, _ in self._caches:
            if any(kept is tensor for kept in kept_in(cache)):
                fixed = _Reach(None, Access.FIXED, None, f"{label}(...)", False)
                self._walk(tensor, fixed)
                self.read_caches.append((cache, tensor))
                return self._by_id[id(tensor)]
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
        part = self._by_id.get(id(thing))
        return part if part is not None and part.value is thing else None

    def filled_caches(self) -> Iterator[tuple[str, functools._lru_cache_wrapper[Any]]]:
        """Yield each `functools.lru_cache` that the run put something into."""
        for label, cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                yield f"the run fills the cache of {label} (see {self.place_of(label)})", cache

    def changes(self) -> Iterator[Change]:
        """Yield what is different now from when the parts were listed."""
        for hooks, (label, items) in zip(self.hook_dicts, self._hooks, strict=True):
            if tuple(hooks.items()) != items:
                holder, _, name = label.rpartition("._")
                kind = name.replace("_", " ")
                self._block(
                    f"the run puts {kind} on {holder}, or removes some", f"register_{name[:-1]}"
                )
        for part in self.parts:
            before = part.content
            if part.kind is PartKind.SET and exact_members(part.value) != part.size:
                self._block(f"the run changes the set {part.label}", part.label)
            if part.kind is PartKind.LARGE and exact_items(part.value) != part.size:
                self._block(
                    f"the run changes {part.label}, which is too large to watch", part.label
                )
            if part.kind is PartKind.ARRAY and part.size != part.value:
                self._block(f"the run changes the array {part.label}", part.label)
            if before is None:
                continue
            now = content_of(part)
            if part.kind is PartKind.IDENTITY and not isinstance(part.value, dict):
                for key, value in before.items():
                    if now.get(key) is not value:
                        self._block(f"the run changes {key} of {part.label}", key)
                continue
            if part.kind is not PartKind.IDENTITY and list(before) != list(now):
                if set(before) == set(now):
                    self._block(f"the run changes the order of {part.label}", part.label)
            if part.kind is PartKind.LIST and len(before) != len(now):
                yield Change(part, None, list(part.value))
                continue
            for key, value in now.items():
                if key not in before or before[key] is not value:
                    yield Change(part, key, value)
            for key in before:
                if key not in now:
                    yield Change(part, key, None, deleted=True)

    def release(self) -> None:
        """Let go of tensors and contents once the run is over."""
        for part in self.parts:
            part.content = None
            if part.kind in _LET_GO and part.access is not Access.FIXED:
                part.value = None
        self._by_id.clear()

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
            self._by_id[id(value)] = part
        return part

    def _walk(self, value: Any, reach: _Reach) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES or issubclass(kind, Enum) or is_constant(value, kind):
            traced = reach.traceable(kind) and not self._plain_numbers
            self._add(value, reach, PartKind.NUMBER if traced else PartKind.PLAIN)
        elif (known := self._by_id.get(id(value))) is not None:
            self._add(known, reach, PartKind.ALIAS)
        elif is_lazy(value):  # of a module whose hooks, for now, make it run live
            self._add(value, reach, PartKind.IDENTITY)
        elif issubclass(kind, torch.Tensor):
            part = self._add(value, reach, PartKind.TENSOR)
            part.content = attributes_of(value)
            part.size = TensorFacts(
                value.dtype, value.device, value.dim(), requires_grad(value), value.layout,
                sum(key.access is Access.DICT for key in part.content),
            )  # fmt: skip
            if reach.is_argument:
                for key, item in part.content.items():
                    self._walk(item, reach.into(part, key))
            elif part.content:
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
            part.content = {value.name: value.get(UNSET)}
            inside = _Reach(part, Access.CONTEXT, value.name, value.name, False)
            self._walk(part.content[value.name], inside)
        elif not reach.is_argument and is_plain_object(kind, reach.depth) and is_settings(value):
            self._meet_helper(kind)
            # A configuration: it is not made anew by each call, so it is taken to be the same
            # object, and its attributes are those of a fixed mapping, like a module's.
            self._add(value, reach, PartKind.IDENTITY)
            self._walk_mapping(vars(value), reach.label)
        elif issubclass(kind, (list, tuple, dict)) or is_plain_object(kind, reach.depth):
            self._meet_helper(kind)
            self._walk_container(value, reach)
        elif kind is torch.Generator and reach.is_argument:
            part = self._add(value, reach, PartKind.OBJECT)  # any will do
            part.content, part.size = {}, ()
        else:
            part = self._add(value, reach, PartKind.IDENTITY)
            if isinstance(value, types.FunctionType):
                self._walk_code(value)
            elif isinstance(value, functools._lru_cache_wrapper):
                if isinstance(value.__wrapped__, types.FunctionType):
                    self._walk_code(value.__wrapped__)
                self._caches.append((reach.label, value, value.cache_info().misses))
            elif isinstance(value, (types.MethodType, functools.partial)):
                self._walk_callable(value)
            elif isinstance(value, types.ModuleType):
                if is_users_module(value):
                    self._modules.append(value)
            elif type(value) is inspect.Signature:  # nothing changes in it but what defaults hold
                defaults = (parameter.default for parameter in value.parameters.values())
                self._walk_defaults(defaults, reach.label)
            elif changes_unwatched(value) and not reach.is_argument:
                self._unwatched.append(part)
            elif reach.is_argument and not callable(value) and kind is not torch.Generator:
                self._unguarded.append(part)
            else:
                self._meet_helper(kind)

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
            part.content = content
        for key, item in content.items():
            self._walk(item, reach.into(part, key))

    def _walk_module(self, module: nn.Module, label: str) -> None:
        self.module_paths[id(module)] = label.removeprefix("self").removeprefix(".")
        if isinstance(module, torch.jit.ScriptModule):
            return  # a call of it is one op, which reads what it holds anew
        self._walk_code(type(module))
        for cls in type(module).__mro__:
            if "forward" in vars(cls):  # also of torch's own modules, which are not followed
                self._walk_name(namespace_of(cls), "forward")
                break
        attributes = vars(module)
        for name in _HOOKS:
            hooks = attributes.get(name)
            if hooks is not None:
                self.hook_dicts.append(hooks)
                self._hooks.append((f"{label}.{name}", tuple(hooks.items())))
                if hooks and not self._walk_hooks(name, hooks):
                    what = f"{label} has {name[1:].replace('_', ' ')}"
                    self.blockers.append(what + definitions(hooks.values()))
        hidden = _MODULE_INTERNALS | attributes.get("_untraced", frozenset()) | hidden_of(module)
        self._walk_mapping(attributes, label, hidden, type(module))
        # What FSDP gathers in the run is no part of what is there before; a module that does so
        # is walked before those whose parameters it gathers.
        for places in gathered_names(module):
            for holder, name in places:
                self._gathered.setdefault(id(holder), set()).add(name)
        gathered = frozenset(self._gathered.get(id(module), ()))
        self._walk_mapping(attributes["_parameters"], label, gathered)
        for name in ("_buffers", "_modules"):
            self._walk_mapping(attributes[name], label)

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
        return [items for _, items in self._hooks]

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
        part.content = content_of(part)
        part.size = len(mapping)
        for key, item in part.content.items():
            self._walk(item, _Reach(part, Access.ITEM, key, f"{label}.{key}", False))
            if owner is not None and isinstance(item, types.FunctionType):
                named = frozenset(names_in(item.__code__)) & members_of(owner)
                self._take(reach_of(owner, named), None)

    def _meet_helper(self, cls: type) -> None:
        if cls not in self._helpers and is_users_class(cls):
            self._helpers[cls] = frozenset()

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
            for cls, known in tuple(self._helpers.items()):
                members = members_of(cls)
                named = members & self.names | {m for m in members if m[:2] == "__"} - _MAKING
                if named > known:
                    self._helpers[cls] = named
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
        self.names |= reach.names
        self.stores |= reach.stores
        self.functions += reach.functions
        self.tells_numbers = self.tells_numbers or reach.tells_numbers
        for owner in reach.owners:
            self.namespaces[id(owner)] = (owner, len(owner))
        for namespace, name in reach.globals:
            if name in namespace:
                watched = namespace is own or is_watched(namespace[name])
                if watched or not is_installed(namespace.get("__name__")):
                    self._walk_name(namespace, name, watched)
        for namespace, name in reach.members:
            if name in namespace:
                self._walk_name(namespace, name)
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
                continue
            if name != "__class__" and id(cell) not in self._by_id:
                fixed = _Reach(None, Access.FIXED, None, name, False)
                holder = self._add(cell, fixed, PartKind.IDENTITY)
                holder.content = {name: value}
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
        holder = self._by_id.get(id(namespace))
        if holder is None:
            fixed = _Reach(None, Access.FIXED, None, "globals", False)
            holder = self._add(namespace, fixed, PartKind.IDENTITY)
            holder.content = {}
        if holder.content is not None:
            holder.content[name] = value
        reach = _Reach(holder, Access.ITEM, name, name, False)
        by_identity = isinstance(value, (types.FunctionType, type))
        if by_identity or not watched or type(value) is types.MethodDescriptorType:
            self._add(value, reach, PartKind.IDENTITY)
        else:
            self._walk(value, reach)


@dataclass(frozen=True, slots=True)
class _Reach:
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
_LET_GO = (PartKind.TENSOR, PartKind.LIST, PartKind.TUPLE, PartKind.DICT, PartKind.OBJECT)
