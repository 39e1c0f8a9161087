"""Reachability: the values that the code of a model can read besides its arguments."""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from bendtrace.python.bytecode import names_used_whole, put_on_globals
from bendtrace.python.sites import PACKAGE
from bendtrace.python.versions import CodeVersion, Depends, Named
from bendtrace.tape.captured import module_name_of
from bendtrace.tape.plain_numbers import function_needs_plain
from bendtrace.watch.code_facts import cells_of, facts_in, functions_of, names_in, other_names_in
from bendtrace.watch.provenance import (
    CONSTANT,
    is_constant_namespace,
    is_finished,
    is_in_standard_library,
    is_installed_module,
    is_installed_space,
    is_torchs,
    is_unwrapped_torch_function,
    is_users_class,
    is_users_module,
)

# What the code of a module's forward, or of a function, can read besides its arguments.
#
# This is a static estimate, which judges by the names that code uses. So the globals, class
# attributes and functions that a run could have read are guarded without watching every read.


# Members of a class that stand for functions, or make objects. They are guarded by identity.
DESCRIBED = (property, type, classmethod, staticmethod)
_CALLED = frozenset({"forward", "__call__"})  # of a module
_MADE = frozenset(
    {"__init__", "__post_init__", "__call__"}
)  # of a class that code makes objects of


# Calls of these are ops, which a replay calls again with all that they read.
_AS_ONE_OP = frozenset(torch.autograd.Function.__mro__)


class Reachable(NamedTuple):
    """The functions, globals and members that code can reach."""

    # Methods, the functions of properties, and plain functions, its own and others.
    functions: tuple[types.FunctionType, ...]
    opaque: tuple[types.FunctionType, ...]  # those that `bt.opaque` returned: each is one op
    globals: tuple[Named, ...]  # (namespace, name), also in other modules
    owners: tuple[Mapping[str, Any], ...]  # namespaces of classes that it looks for members in
    members: tuple[Named, ...]  # (class namespace, name) of attributes and methods
    # Namespaces of Python modules, with the names that it uses and that are not in them; None for
    # all, where it looks names up that it computes.
    lacking: tuple[tuple[Mapping[str, Any], frozenset[str] | None], ...]
    # Modules that it passes to other code, which may name what is in them.
    modules: tuple[types.ModuleType, ...]
    names: frozenset[str]  # all names of globals and attributes in it
    stores: frozenset[str]  # names of attributes that it assigns
    tells_numbers: bool  # whether some of it asks for the exact type of a number
    computes: bool  # whether it looks attributes up by names that it computes
    computes_outside: bool  # whether it does so in other objects than `self`
    depends: Depends  # what all of this depends on


_KEPT = 1024
_kept: dict[Any, tuple[Reachable, CodeVersion]] = {}


def reachable_from(
    subject: type | types.FunctionType, entries: frozenset[str] = _CALLED
) -> Reachable:
    """Find everything that a function, or a class through some of its methods, can reach.

    The entries are the names of the methods that are called; by default, those of a module.
    """
    if "<" in subject.__qualname__:  # made by a function, and not to be kept alive by a cache
        return _search(subject, entries)
    cached = _kept.get((subject, entries))
    if cached is not None and cached[1].holds():
        return cached[0]
    reach = _search(subject, entries)
    if len(_kept) >= _KEPT:
        _kept.clear()
    _kept[subject, entries] = reach, CodeVersion(reach.depends)
    return reach


def _search(subject: type | types.FunctionType, entries: frozenset[str]) -> Reachable:
    search = _ReachabilitySearch()
    if isinstance(subject, type):
        search.add_class(subject, entries)
    else:
        search.waiting.append(subject)
    search.run()
    codes = [function.__code__ for function in search.functions.values()]
    own = [facts_in(f.__code__) for f in search.functions.values() if not is_finished(f)]
    return Reachable(
        tuple(search.functions.values()),
        tuple(search.opaque.values()),
        tuple(search.globals.values()),
        tuple(search.owners.values()),
        tuple(search.members.values()),
        tuple(search.lacking),
        tuple(search.modules.values()),
        frozenset(search.names),
        frozenset(name for code in codes for name in facts_in(code).stores),
        any(facts_in(code).tells_numbers for code in codes)
        or any(
            function_needs_plain(function)
            for function in search.functions.values()
            if not is_finished(function)
        ),
        any(one.computes for one in own),
        any(one.computes_outside for one in own),
        search.depends,
    )


_BUILTINS = vars(builtins)
_STREAMS = frozenset({"stdout", "stderr"})
_OF_STREAMS = frozenset(dir(sys.__stdout__)) - frozenset(dir(object))


class _ReachabilitySearch:
    """Follows names from functions to the functions and classes that they refer to."""

    def __init__(self) -> None:
        # First in, first out: what a class has itself comes before what it inherits.
        self.waiting: deque[types.FunctionType] = deque()
        self.functions: dict[int, types.FunctionType] = {}
        self.opaque: dict[int, types.FunctionType] = {}
        self.globals: dict[tuple[int, str], Named] = {}
        self.members: dict[tuple[int, str], Named] = {}
        self.modules: dict[int, types.ModuleType] = {}
        self.lacking: list[tuple[Mapping[str, Any], frozenset[str] | None]] = []
        self.names: set[str] = set()
        self.owners: dict[int, Mapping[str, Any]] = {}
        self._of_torch: dict[type, None] = {}  # bases of the user's classes, in order
        self._torchs: set[types.FunctionType] = set()  # their methods that were looked into
        self._asked: set[str] = set()  # the names in these
        self.depends = Depends(functions=self.functions)

    def run(self) -> None:
        while self.waiting:
            function = self.waiting.popleft()
            if function.__code__.co_filename.startswith(PACKAGE):
                self.opaque[id(function)] = function
            elif id(function) not in self.functions and not is_unwrapped_torch_function(function):
                self.functions[id(function)] = function
                self._follow(function)

    def _follow(self, function: types.FunctionType) -> None:
        modules: list[types.ModuleType] = []
        self.depends.cells |= {id(cell): cell for cell in function.__closure__ or ()}
        for cell in cells_of(function):
            if isinstance(cell, types.FunctionType):
                self.waiting.append(cell)
            elif isinstance(cell, types.ModuleType):
                modules.append(cell)
            elif isinstance(cell, type) and is_users_class(cell):
                self.add_class(cell, _MADE)
        names = {*names_in(function.__code__), *other_names_in(function)}
        for name in facts_in(function.__code__).globals:
            value = self._look(function.__globals__, name)
            if isinstance(value, types.ModuleType):
                modules.append(value)
            if name in _BUILTINS and not is_finished(function):
                put = self._look(_BUILTINS, name)
                if isinstance(put, types.FunctionType) and not is_finished(put):
                    self.waiting.append(put)
        for name in facts_in(function.__code__).imports:
            for full in _full_names(name, function.__globals__.get("__package__")):
                module = self._look(sys.modules, full)
                if isinstance(module, types.ModuleType):
                    modules.append(module)
                    if is_users_module(module) and not is_installed_space(vars(module)):
                        self.globals[id(sys.modules), full] = (sys.modules, full)
        others = {id(module): vars(module) for module in modules if is_users_module(module)}
        is_own = not is_finished(function)
        waiting = [one for one in others.values() if is_own or not is_installed_space(one)]
        while waiting:  # code names what is in a package through the package
            namespace = waiting.pop()
            for name in names & namespace.keys():
                inner = self._look(namespace, name)
                if (
                    isinstance(inner, types.ModuleType)
                    and id(inner) not in others
                    and is_users_module(inner)
                    and (is_own or not is_installed_space(vars(inner)))
                ):
                    others[id(inner)] = vars(inner)
                    waiting.append(vars(inner))
        self.depends.sized |= {id(space): space for space in others.values()}
        if others and not is_finished(function):
            for path in names_used_whole(function.__code__):
                found: Any = None
                inside: Mapping[str, Any] = function.__globals__
                for name in path.split("."):
                    found = inside.get(name)
                    inside = vars(found) if isinstance(found, types.ModuleType) else {}
                if isinstance(found, types.ModuleType) and id(found) in others:
                    self.modules[id(found)] = found
        computes = not is_finished(function) and facts_in(function.__code__).computes_outside
        finished = [] if is_finished(function) else _foreign_namespaces(modules, names)
        if not is_finished(function):
            for namespace in others.values():
                if not is_installed_space(namespace):
                    lacking = None if computes else frozenset(names - namespace.keys())
                    self.lacking.append((namespace, lacking))
        self._follow_puts(function, modules, names)
        self._name(names)
        # An attribute is not a global of its own file, unless the file names itself as a module.
        spaces: list[tuple[Mapping[str, Any], Set[str]]]
        spaces = [(function.__globals__, facts_in(function.__code__).globals)]
        spaces += ((space, space.keys() if computes else names) for space in others.values())
        for space, asked in spaces:
            for name in asked & space.keys():
                value = self._look(space, name)
                if isinstance(value, type):
                    self.globals[id(space), name] = (space, name)
                    if is_users_class(value):
                        self.add_class(value, _MADE)
                elif not isinstance(value, types.ModuleType):
                    self.globals[id(space), name] = (space, name)
                    self.waiting += functions_of(value)

        for space in finished:  # their content is taken to stay as it is, unless it is replaced
            found = names & space.keys()
            if space is vars(sys) and names.isdisjoint(_OF_STREAMS):
                found -= _STREAMS  # each replay calls `print` again
            for name in found:
                if isinstance(space[name], types.ModuleType):
                    continue
                if is_constant_namespace(space) and _stays(space[name]):
                    continue  # `monkeypatches.py` looks at functions
                self._look(space, name)
                self.globals[id(space), name] = (space, name)
                self.waiting += functions_of(space[name]) if is_constant_namespace(space) else ()

    def _follow_puts(
        self, function: types.FunctionType, modules: list[types.ModuleType], names: set[str]
    ) -> None:  # fmt: skip
        """Follow what code puts into modules of libraries, or looks for there by a text."""
        facts = facts_in(function.__code__)
        puts = put_on_globals(function.__code__)
        puts |= facts.stores if facts.imports else set()
        puts |= set() if is_finished(function) else facts.texts
        for space in _namespaces_by_name(modules, names) if puts else ():
            for name in puts:
                value = self._look(space, name)
                if name in space and not callable(value):
                    self.globals[id(space), name] = (space, name)

    def _look(self, space: Mapping[str, Any], name: str) -> Any:
        """Look a name up, and note that the search depends on the value."""
        if name not in space:
            self.depends.absent[id(space), name] = space, name
            return None
        self.depends.looked[id(space), name] = space, name
        return space[name]

    def add_class(self, cls: type, entries: frozenset[str]) -> None:
        """Follow a class: some of its methods, and its members among the names used so far."""
        self.depends.classes[id(cls)] = cls
        if is_users_class(type(cls)):
            self.add_class(type(cls), _MADE)
        count = len(self.owners) + len(self._of_torch)
        for base in cls.__mro__:
            owner = namespace_of(base)
            if base in _AS_ONE_OP or id(owner) in self.owners:
                continue
            if is_torchs(module_name_of(base)) and not is_users_class(base):
                self._of_torch[base] = None
                continue
            self.owners[id(owner)] = self.depends.sized[id(owner)] = owner
            named = entries | self.names
            if entries is _MADE and is_users_class(base):  # what operators call
                named |= {name for name in owner if name[:2] == "__"}
            self._take(owner, named & owner.keys())
        if len(self.owners) + len(self._of_torch) != count:
            self._name(self._named_by_torch(entries | self.names | _CALLED))

    def _name(self, names: Iterable[str]) -> None:
        """Take the members that code names, and those that code of torch's asks for then."""
        new = {*names} - self.names
        new |= self._named_by_torch(new) - self.names
        self.names |= new
        for owner in tuple(self.owners.values()) if new else ():
            self._take(owner, new & owner.keys())

    def _named_by_torch(self, names: Iterable[str]) -> set[str]:
        """Return the user's members that methods of torch's classes ask for.

        These methods are not followed: `forward` of a batch norm asks for `_check_input_dim`. Names
        of earlier calls are remembered.
        """
        waiting = [*names] if self._of_torch else []
        while waiting:
            name = waiting.pop()
            for base in self._of_torch:
                for function in functions_of(vars(base).get(name)):
                    if function not in self._torchs:
                        self._torchs.add(function)
                        asked = {one for one in names_in(function.__code__) if one[:2] != "__"}
                        self._asked |= asked
                        waiting += asked
        return {name for owner in self.owners.values() for name in self._asked & owner.keys()}

    def _take(self, owner: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            member = self._look(owner, name)
            # Classes of installed packages are taken to stay as they are.
            if not (isinstance(member, DESCRIBED) and is_installed_module(owner.get("__module__"))):
                self.members[id(owner), name] = (owner, name)
            self.waiting += functions_of(member)
            if isinstance(member, type) and is_users_class(member):
                self.add_class(member, _MADE)


def _full_names(name: str, package: Any) -> Iterator[str]:
    """Yield the full names that an import may mean, relative to a package or not."""
    if name:
        yield name
    parts = package.split(".") if isinstance(package, str) and package else []
    for count in range(len(parts), 0, -1):
        yield ".".join((*parts[:count], name)) if name else ".".join(parts[:count])


def _foreign_namespaces(
    modules: Iterable[types.ModuleType], names: set[str]
) -> list[Mapping[str, Any]]:
    """Return the namespaces of modules of Python, torch and numpy, and of named ones in them."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(vars(module)) not in found and (
            is_in_standard_library(module) or module.__name__.partition(".")[0] in CONSTANT
        ):
            space = found[id(vars(module))] = vars(module)
            inner = (space[name] for name in names & space.keys())
            waiting += (value for value in inner if isinstance(value, types.ModuleType))
    return [*found.values(), namespace_of(torch.Tensor)]


def _namespaces_by_name(
    modules: Iterable[types.ModuleType], names: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the namespaces of installed modules, and of the modules in them that code names."""
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        space = vars(waiting.pop())
        if id(space) not in seen and is_installed_space(space):
            seen.add(id(space))
            yield space
            inner = (space[name] for name in names & space.keys())
            waiting += (value for value in inner if isinstance(value, types.ModuleType))


def _stays(value: Any) -> bool:
    if isinstance(value, types.FunctionType) and not is_finished(value):
        return False  # the user has put it there
    return callable(value) or isinstance(value, _STAYING) or hasattr(type(value), "__get__")


_STAYING = (torch.dtype, torch.layout, torch.memory_format, torch.device)


@functools.lru_cache(maxsize=256)  # bounded: a namespace can keep its class alive
def namespace_of(cls: type) -> Mapping[str, Any]:
    """Return the namespace of a class, each time the same object."""
    return vars(cls)  # each access creates a new view; this one represents the class


def members_of(cls: type) -> frozenset[str]:
    """Return the names of the members of a class and its bases, of those that are the user's."""
    return frozenset(name for base in cls.__mro__ if is_users_class(base) for name in vars(base))
