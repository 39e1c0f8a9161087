"""The scan of what code can read: globals, closures, defaults, and members of classes.

`reachability.py` says which names functions and classes use. Here they are looked up, and what they
refer to is listed. The subclass `scan.Scan` scans the values themselves.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import types
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, filterfalse
from typing import Any

import torch
from torch import nn

from bendtrace.environment.code_facts import ASKING, facts_in, names_in, other_names_in
from bendtrace.environment.content import MOST
from bendtrace.environment.findings import Found, Route
from bendtrace.environment.kinds import (
    is_plain_object,
    is_watched,
    judge_of,
    package_of,
    packages_of,
)
from bendtrace.environment.provenance import (
    is_constant_namespace,
    is_finished,
    is_installed_file,
    is_installed_space,
    is_torchs,
    is_torchs_function,
    is_users_class,
    is_users_module,
)
from bendtrace.environment.reachability import (
    DESCRIBED,
    Reachable,
    members_of,
    namespace_of,
    reachable_from,
)
from bendtrace.environment.readers import PYTHONS, position_reader
from bendtrace.environment.scan_cache import Notes
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    Access,
    Captured,
    CaptureKind,
    has_attributes,
    module_of,
)
from bendtrace.tape.structure import is_heap_type

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


class CodeScan:
    """Lists what code can read; a subclass says how values are scanned.

    Args:
        found: receives the parts.

    Attributes:
        found: as given.
        notes: what the decisions of the scan depended on.
    """

    def __init__(self, found: Found) -> None:
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

    def met_too_many(self) -> None:
        """Note that there is more than can be watched; all arguments are listed nevertheless."""
        self._is_too_much = True
        if self._may_stop:
            raise TooManyError

    def _scan(self, value: Any, route: Route) -> None:
        """Scan a value, and all that can be reached from it."""
        raise NotImplementedError

    def _scan_by_identity(self, value: Any, route: Route) -> None:
        """Scan a value that is guarded by identity alone, and what code can read through it."""
        raise NotImplementedError

    def _scan_mapping(
        self, mapping: dict[str, Any], label: str, hidden: frozenset[str] = frozenset()
    ) -> None:
        """Scan a dict of attributes.

        Args:
            mapping: the dict.
            label: how a person would write its owner.
            hidden: keys that are left out.
        """
        raise NotImplementedError

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
        """Scan what code can read besides its arguments.

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
                self.found.held[holder.index] = {name: value}
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
            self.met_too_many()
            return
        self._names_scanned.add((id(namespace), name))
        value = namespace[name]
        holder = found.by_id.get(id(namespace))
        if holder is None:
            fixed = Route(None, Access.FIXED, None, "globals", False)
            holder = self._add(namespace, fixed, CaptureKind.IDENTITY)
            found.held[holder.index] = {}
        if holder.index in found.held:
            found.held[holder.index][name] = value
        route = Route(holder, Access.ITEM, name, name, False)
        by_identity = isinstance(value, (types.FunctionType, *DESCRIBED))
        for inner in _inside(value) if by_identity else ():
            if inner is not None and not isinstance(inner, types.FunctionType):
                self._scan(inner, Route(None, Access.FIXED, None, name, False))
        if by_identity or not watched or type(value) is types.MethodDescriptorType:
            self._add(value, route, CaptureKind.IDENTITY)
        else:
            self._scan(value, route)

    # Classes.

    def met_object(self, kind: type) -> None:
        """Scan the class of an object, and the registries of classes of installed packages."""
        self._meet_helper(kind)
        if kind in self._registers or not is_installed_file(_file_of(kind)):
            return
        self._registers.add(kind)
        for base in kind.__mro__:
            if is_installed_file(_file_of(base)) and not is_torchs(module_of(base)):
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
            for cls, known in tuple(found.helpers.items()):
                members = members_of(cls)
                named = members & found.names | {m for m in members if m[:2] == "__"} - _MAKING
                if issubclass(cls, nn.Module):
                    named -= _MADE
                if found.computes and is_users_class(cls):
                    named = members
                if named > known:
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
        if is_users_module(module) and all(module is not known for known in self._modules):
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
                self._note_missing(space, self.found.names, self.found.computes)
            for name in [*space] if self.found.computes else self.found.names & space.keys():
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
        _, known = self.found.missing.setdefault(id(space), (space, set()))
        known.update(name for name in names if name not in space)
        if everything:
            self.found.sized[id(space)] = space, frozenset(space)

    def _meet_installed(self, cls: type) -> None:
        """Watch a class of an installed package, whose attributes code may read."""
        if not is_torchs(module_of(cls)) and package_of(cls) not in sys.stdlib_module_names:
            self.met_object(cls)
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
    """Whether a value of installed code serves to hold other values, or changes by its use."""
    return not is_torchs(module_of(type(value))) and (
        isinstance(value, (Mapping, list, tuple, set, frozenset))
        or is_plain_object(type(value), 0)
        or position_reader(value) is not None
        or isinstance(value, random.Random)
        or module_of(type(value)).startswith("numpy.random")
    )


def _inside(member: Any) -> tuple[Any, ...]:
    """Return the functions that a member of a class calls."""
    if isinstance(member, (staticmethod, classmethod)):
        return (member.__func__,)
    return (member.fget, member.fset, member.fdel) if isinstance(member, property) else ()


def _is_torchs(subject: type | types.FunctionType) -> bool:
    if isinstance(subject, types.FunctionType):
        return is_torchs_function(subject)
    return all(is_torchs(module_of(base)) and not is_users_class(base) for base in subject.__mro__)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(module_of(kind)), "__file__", None) or ""
