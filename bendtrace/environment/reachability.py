"""Reachability: what the code of a model can read besides its arguments."""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import os
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

from bendtrace.source.bytecode import catches_all, computes_names, named_in, passed_on
from bendtrace.source.features import names_off
from bendtrace.source.sites import TORCH
from bendtrace.source.usage import needs_plain_numbers
from bendtrace.source.versions import TELLS_CHANGES, CodeVersion, Depends, Named, version_of
from bendtrace.tape.captured import module_of

__all__ = [
    "ASKING",
    "DESCRIBED",
    "Reachable",
    "codes_in",
    "is_constant_namespace",
    "is_finished",
    "is_finished_code",
    "is_installed",
    "is_installed_file",
    "is_installed_space",
    "is_torchs",
    "is_torchs_function",
    "is_users_class",
    "is_users_module",
    "members_of",
    "names_in",
    "namespace_of",
    "other_names_in",
    "place_naming",
    "reachable_from",
    "undetectable_in",
]


# What the code of a module's forward, or of a function, can read besides its arguments.
#
# A static estimate, judging by the names that code uses, so that the globals, class attributes and
# functions that a run could have read can be guarded without watching every read.


# Members of a class that stand for a function, or make objects, and are told by their identity.
DESCRIBED = (property, type, classmethod, staticmethod)
_CALLED = frozenset({"forward", "__call__"})  # of a module
_MADE = frozenset(
    {"__init__", "__post_init__", "__call__"}
)  # of a class that code makes objects of


class Reachable(NamedTuple):
    """What code can reach.

    Attributes:
        functions: methods, properties and plain functions, its own and others.
        opaque: what `bt.opaque` has made of functions: each is an op.
        globals: (namespace, name) of the globals that these name, also in other modules.
        owners: the namespaces of the classes that it looks for members in.
        members: (class namespace, name) of the class attributes and methods that they name.
        lacking: namespaces of Python modules, with the names that it uses and that are not in
            them; None for all, where it looks names up that it computes.
        modules: modules that it hands on, so that other code may name what is in them.
        names: all names of globals and attributes in it.
        stores: names of attributes that it assigns.
        tells_numbers: whether some of it asks for the exact type of a number.
        computes: whether it looks attributes up by names that it computes.
        depends: what all of this depends on.
    """

    functions: tuple[types.FunctionType, ...]
    opaque: tuple[types.FunctionType, ...]
    globals: tuple[Named, ...]
    owners: tuple[Mapping[str, Any], ...]
    members: tuple[Named, ...]
    lacking: tuple[tuple[Mapping[str, Any], frozenset[str] | None], ...]
    modules: tuple[types.ModuleType, ...]
    names: frozenset[str]
    stores: frozenset[str]
    tells_numbers: bool
    computes: bool
    depends: Depends


_KEPT = 1024
_kept: dict[Any, tuple[Reachable, CodeVersion]] = {}


def reachable_from(
    subject: type | types.FunctionType, entries: frozenset[str] = _CALLED
) -> Reachable:
    """Find what a class, through some of its methods, or a function can reach.

    Args:
        subject: the class or function.
        entries: names of the methods that are called; those of a module unless they are given.
    """
    if "<" in subject.__qualname__:  # made by a function, and not to be kept alive by a cache
        return _search(subject, entries)
    known = _kept.get((subject, entries))
    if known is not None and known[1].holds():
        return known[0]
    reach = _search(subject, entries)
    if len(_kept) >= _KEPT:
        _kept.clear()
    _kept[subject, entries] = reach, CodeVersion(reach.depends)
    return reach


def _search(subject: type | types.FunctionType, entries: frozenset[str]) -> Reachable:
    search = _Search()
    if isinstance(subject, type):
        search.add_class(subject, entries)
    else:
        search.waiting.append(subject)
    search.run()
    codes = [function.__code__ for function in search.functions.values()]
    return Reachable(
        tuple(search.functions.values()),
        tuple(search.opaque.values()),
        tuple(search.globals.values()),
        tuple(search.owners.values()),
        tuple(search.members.values()),
        tuple(search.lacking),
        tuple(search.modules.values()),
        frozenset(search.names),
        frozenset(name for code in codes for name in _facts_of(code).stores),
        any(_facts_of(code).tells_numbers for code in codes)
        or any(
            needs_plain_numbers(function.__code__)
            for function in search.functions.values()
            if not is_finished(function)
        ),
        any(
            _facts_of(function.__code__).computes
            for function in search.functions.values()
            if not is_finished(function)
        ),
        search.depends,
    )


_BUILTINS = vars(builtins)
_STREAMS = frozenset({"stdout", "stderr"})
_OF_STREAMS = frozenset(dir(sys.__stdout__)) - frozenset(dir(object))


class _Search:
    """Follows names from functions to the functions and classes that they stand for."""

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
        self.depends = Depends(functions=self.functions)

    def run(self) -> None:
        while self.waiting:
            function = self.waiting.popleft()
            if function.__code__.co_filename.startswith(_FINISHED[2]):
                self.opaque[id(function)] = function
            elif id(function) not in self.functions and not is_torchs_function(function):
                self.functions[id(function)] = function
                self._follow(function)

    def _follow(self, function: types.FunctionType) -> None:
        modules: list[types.ModuleType] = []
        self.depends.cells |= {id(cell): cell for cell in function.__closure__ or ()}
        for cell in _cells(function):
            if isinstance(cell, types.FunctionType):
                self.waiting.append(cell)
            elif isinstance(cell, types.ModuleType):
                modules.append(cell)
            elif isinstance(cell, type) and is_users_class(cell):
                self.add_class(cell, _MADE)
        names = {*names_in(function.__code__), *other_names_in(function)}
        spaces: list[Mapping[str, Any]] = [function.__globals__]
        for name in _facts_of(function.__code__).globals:
            value = self._look(function.__globals__, name)
            if isinstance(value, types.ModuleType):
                modules.append(value)
            if name in _BUILTINS and not is_finished(function):
                put = self._look(_BUILTINS, name)
                if isinstance(put, types.FunctionType) and not is_finished(put):
                    self.waiting.append(put)
        for name in _facts_of(function.__code__).imports:
            for full in _full_names(name, function.__globals__.get("__package__")):
                module = self._look(sys.modules, full)
                if isinstance(module, types.ModuleType):
                    modules.append(module)
                    if is_users_module(module) and not is_installed_space(vars(module)):
                        self.globals[id(sys.modules), full] = (sys.modules, full)
        others = {id(module): vars(module) for module in modules if is_users_module(module)}
        waiting = [space for space in others.values() if not is_installed_space(space)]
        while waiting:  # what is in a package is named by way of it
            held = waiting.pop()
            for name in names & held.keys():
                inner = self._look(held, name)
                if (
                    isinstance(inner, types.ModuleType)
                    and id(inner) not in others
                    and is_users_module(inner)
                    and not is_installed_space(vars(inner))
                ):
                    others[id(inner)] = vars(inner)
                    waiting.append(vars(inner))
        self.depends.sized |= {id(space): space for space in others.values()}
        spaces += others.values()
        if others and not is_finished(function):
            for path in passed_on(function.__code__):
                found: Any = None
                inside: Mapping[str, Any] = function.__globals__
                for name in path.split("."):
                    found = inside.get(name)
                    inside = vars(found) if isinstance(found, types.ModuleType) else {}
                if isinstance(found, types.ModuleType) and id(found) in others:
                    self.modules[id(found)] = found
        computes = not is_finished(function) and _facts_of(function.__code__).computes
        finished = [] if is_finished(function) else _finished_spaces(modules, names)
        if not is_finished(function):
            for held in others.values():
                if not is_installed_space(held):
                    lacking = None if computes else frozenset(names - held.keys())
                    self.lacking.append((held, lacking))
        for owner in tuple(self.owners.values()):
            self._take(owner, (names - self.names) & owner.keys())
        self.names |= names
        for space in spaces:
            # An attribute is not a global of its own file, whatever its name.
            own = space is function.__globals__
            asked = _facts_of(function.__code__).globals if own else names
            for name in space.keys() if computes and not own else asked & space.keys():
                value = self._look(space, name)
                if isinstance(value, type):
                    self.globals[id(space), name] = (space, name)
                    if is_users_class(value):
                        self.add_class(value, _MADE)
                elif not isinstance(value, types.ModuleType):
                    self.globals[id(space), name] = (space, name)
                    self.waiting += _function(value)

        for space in finished:  # these are taken to stay as they are, unless they are exchanged
            found = names & space.keys()
            if space is vars(sys) and names.isdisjoint(_OF_STREAMS):
                found -= _STREAMS  # `print` is done anew by each replay
            for name in found:
                if isinstance(space[name], types.ModuleType):
                    continue
                if is_constant_namespace(space) and _stays(space[name]):
                    continue  # `monkeypatches.py` looks at functions
                self._look(space, name)
                self.globals[id(space), name] = (space, name)
                self.waiting += _function(space[name]) if is_constant_namespace(space) else ()

    def _look(self, space: Mapping[str, Any], name: str) -> Any:
        """Look a name up, and note that the search depends on what it stands for."""
        if name not in space:
            self.depends.absent[id(space), name] = space, name
            return None
        self.depends.looked[id(space), name] = space, name
        return space[name]

    def add_class(self, cls: type, entries: frozenset[str]) -> None:
        """Follow a class: some of its methods, and what names used so far stand for in it."""
        self.depends.classes[id(cls)] = cls
        if is_users_class(type(cls)):
            self.add_class(type(cls), _MADE)
        for base in cls.__mro__:
            owner = namespace_of(base)
            if (
                base is not object
                and (not is_torchs(module_of(base)) or is_users_class(base))
                and id(owner) not in self.owners
            ):
                self.owners[id(owner)] = self.depends.sized[id(owner)] = owner
                named = entries | self.names
                if entries is _MADE and is_users_class(base):  # what operators call
                    named |= {name for name in owner if name[:2] == "__"}
                self._take(owner, named & owner.keys())

    def _take(self, owner: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            member = self._look(owner, name)
            # Classes of installed packages are taken to stay as they are.
            if not (isinstance(member, DESCRIBED) and is_installed(owner.get("__module__"))):
                self.members[id(owner), name] = (owner, name)
            self.waiting += _function(member)
            if isinstance(member, type) and is_users_class(member):
                self.add_class(member, _MADE)


def members_of(cls: type) -> frozenset[str]:
    """Return the names of what a class and its bases have, as far as they are the user's."""
    return frozenset(name for base in cls.__mro__ if is_users_class(base) for name in vars(base))


def is_users_class(cls: type) -> bool:
    """Whether a class that code names, or has an object of, is worth following."""
    return not is_installed(module_of(cls)) or _has_users_code(cls)


_with_users_code: weakref.WeakKeyDictionary[type, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def _has_users_code(cls: type) -> bool:
    """Whether a class that says it is of an installed package has functions of the user's."""
    if TELLS_CHANGES:
        stamp = version_of(gc.get_referents(vars(cls))[0])
    else:
        stamp = [*map(id, vars(cls).values())]
    known = _with_users_code.get(cls)
    if known is None or known[0] != stamp:
        known = _with_users_code[cls] = stamp, _looks_for_users_code(cls)
    return known[1]


def _looks_for_users_code(cls: type) -> bool:
    own = (function for member in vars(cls).values() for function in _function(member))
    return not all(map(_is_of_package, own))


def _is_of_package(function: types.FunctionType) -> bool:
    """Whether a function is finished, or was made from text for a class of a package."""
    return is_finished(function) or (
        function.__code__.co_filename == "<string>" and is_installed(function.__module__)
    )


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a Python module is the standard library's, or of an installed package.

    Such code is taken to be finished: only its functions are followed, and of the globals that
    they name only what may be data.
    """
    name = module or ""
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if package in ("torch", "numpy", "bendtrace"):
        return True
    if package in sys.stdlib_module_names:
        return name != "__main__" and (not file or _is_finished_file(file))
    return is_installed_file(file)


def is_installed_file(file: str) -> bool:
    """Whether a file is of an installed package."""
    return "site-packages" in file or "dist-packages" in file


_FINISHED = (
    sysconfig.get_path("stdlib") + os.sep,
    TORCH,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)


@functools.lru_cache(maxsize=8192)
def _is_finished_file(file: str) -> bool:
    """Whether a file is the standard library's, of an installed package, or of this one."""
    return is_installed_file(file) or file.startswith(("<frozen ", *_FINISHED))


def is_installed_space(space: Mapping[str, Any]) -> bool:
    """Whether the globals of a Python module are the standard library's or of a package."""
    file = space.get("__file__")
    if isinstance(file, str):
        return _is_finished_file(file)
    return is_installed(space.get("__name__"))


def is_finished_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Whether code is the standard library's, of an installed package, or of this one.

    Args:
        code: the code.
        space: its globals.
    """
    if code.co_filename[:1] != "<":
        return _is_finished_file(code.co_filename)
    name = str(space.get("__name__", ""))  # what was made from text is of who made it
    return (
        code.co_filename.startswith("<frozen ")
        or name.startswith("namedtuple_")
        or (is_installed_space(space) if name else False)
    )


def is_finished(function: types.FunctionType) -> bool:
    """Whether a function is the standard library's, of an installed package, or of this one."""
    return is_finished_code(function.__code__, function.__globals__)


def is_torchs_function(function: types.FunctionType) -> bool:
    """Whether a function is torch's, and none that torch has wrapped around one of the user's."""
    return is_torchs(function.__module__) and function.__code__.co_filename.startswith(TORCH)


class _Facts(NamedTuple):
    """What the instructions of one function tell, those of nested functions included."""

    names: frozenset[str]  # of globals, attributes and variables of the functions around it
    globals: frozenset[str]
    stores: frozenset[str]
    imports: frozenset[str]  # of modules, by its own statements
    tells_numbers: bool
    computes: bool


# Names in code that may ask for attributes which are not there.
ASKING = frozenset(
    {
        "getattr", "hasattr", "vars", "dir", "__dict__", "AttributeError", "Exception",
        "BaseException", "suppress",
    }
)  # fmt: skip


def _full_names(name: str, package: Any) -> Iterator[str]:
    """Yield what a module may be called that an import names, relative to a package or not."""
    if name:
        yield name
    parts = package.split(".") if isinstance(package, str) and package else []
    for count in range(len(parts), 0, -1):
        yield ".".join((*parts[:count], name)) if name else ".".join(parts[:count])


_WHAT = {
    "IMPORT_NAME": "IMPORT",
    "STORE_ATTR": "ATTR",
    **{
        f"{how}_{where}": "GLOBAL"
        for how in ("LOAD", "STORE", "DELETE")
        for where in ("GLOBAL", "NAME")
    },
}


@functools.lru_cache(maxsize=8192)
def _facts_of(code: types.CodeType) -> _Facts:
    names: set[str] = set()
    found: dict[str, set[str]] = {"GLOBAL": set(), "ATTR": set(), "IMPORT": set()}
    computes = False
    for inner in codes_in(code):
        names.update(inner.co_names, inner.co_freevars)
        if catches_all(inner):
            names.add("BaseException")
        if _MATCH_CLASS in inner.co_code[::2]:
            names.add("__match_args__")
        if not _LOOKING_UP.isdisjoint(inner.co_names):
            texts = (constant for constant in inner.co_consts if isinstance(constant, str))
            names.update(name for text in texts for name in text.split("."))
            computes = computes or computes_names(inner)
        for how, name in named_in(inner):
            found[_WHAT[how]].add(name)
    # Others, such as `@pytest_ar`, are put there by tools that rewrite code.
    return _Facts(
        frozenset(filter(str.isidentifier, names)),
        frozenset(filter(str.isidentifier, found["GLOBAL"])),
        frozenset(found["ATTR"]),
        frozenset(found["IMPORT"]),
        _tells_numbers(code),
        computes,
    )


_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_LOOKING_UP = frozenset(
    {
        "getattr", "hasattr", "setattr", "delattr", "vars", "dir", "__dict__", "__getattribute__",
        "attrgetter", "methodcaller", "getattr_static", "getmembers", "globals",
    }
)  # fmt: skip


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the outer names and attributes that code uses, nested functions included."""
    return _facts_of(code).names


def other_names_in(function: types.FunctionType) -> Iterator[str]:
    """Yield the names that functions have themselves which code knows by others.

    `from torch import initial_seed as seed` is an example.
    """
    space, code = function.__globals__, function.__code__
    held = chain((space[name] for name in _facts_of(code).globals & space.keys()), _cells(function))
    for value in held:
        if isinstance(value, _FUNCTIONS) and value.__name__ not in code.co_names:
            yield value.__name__


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def place_naming(name: str, functions: Iterable[types.FunctionType]) -> str:
    """Say where functions store to a name or, failing that, mention it; "" if they do not."""
    mention = ""
    functions = tuple(functions)
    for function in functions:
        for code in codes_in(function.__code__):
            stores, line = _lines_naming(code, code.co_filename).get(name, (False, None))
            if line is not None:
                place = f"{code.co_filename}:{line}"
                if stores:
                    return place
                mention = mention or place
    if not mention:
        for function in functions:
            if name in other_names_in(function):
                code = function.__code__
                return f"{code.co_filename}:{code.co_firstlineno}"
    return mention


@functools.lru_cache(maxsize=1024)  # a run that cannot be followed asks at each of its questions
def _lines_naming(code: types.CodeType, _file: str) -> dict[str, tuple[bool, int]]:
    """Return for each name in code whether it is stored to, and the first line that does so.

    Code compares equal to the same code in another file, hence the name of the file.
    """
    lines: dict[str, tuple[bool, int]] = {}
    line = 0
    for step in dis.get_instructions(code):
        line = (step.positions and step.positions.lineno) or line
        stores = step.opname.startswith(("STORE", "DELETE"))
        # Since Python 3.13, two local variables can be named by one instruction.
        two = isinstance(step.argval, tuple) and "FAST" in step.opname
        for name in step.argval if two else (step.argval,):
            if isinstance(name, str) and (stores and not lines.get(name, (False,))[0]):
                lines[name] = True, line
            elif isinstance(name, str):
                lines.setdefault(name, (False, line))
    return lines


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_torchs(module: str | None) -> bool:
    """Whether a module, by its name, belongs to torch."""
    return (module or "").split(".")[0] == "torch"


@functools.lru_cache(maxsize=256)  # bounded: a namespace can keep its class alive
def namespace_of(cls: type) -> Mapping[str, Any]:
    """Return the namespace of a class, each time the same object."""
    return vars(cls)  # every access makes another view; this one stands for the class


def is_users_module(module: types.ModuleType) -> bool:
    """Whether the names of a Python module may be data of the user's."""
    package = module.__name__.split(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names


def _is_standard(module: types.ModuleType) -> bool:
    """Whether a module is the standard library's, and none whose functions a run exchanges."""
    name = module.__name__.partition(".")[0]
    return name in sys.stdlib_module_names and name not in ("time", "io", "__main__")


def _finished_spaces(
    modules: Iterable[types.ModuleType], names: set[str]
) -> list[Mapping[str, Any]]:
    """Return what modules of Python's, torch's and numpy's hold, and named ones in them."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(vars(module)) not in found and (
            _is_standard(module) or module.__name__.partition(".")[0] in _CONSTANT
        ):
            space = found[id(vars(module))] = vars(module)
            inner = (space[name] for name in names & space.keys())
            waiting += (value for value in inner if isinstance(value, types.ModuleType))
    return [*found.values(), namespace_of(torch.Tensor)]


def is_constant_namespace(space: Mapping[str, Any]) -> bool:
    """Whether only what is no code of a module or class is looked at: it is torch's or numpy's."""
    name = space.get("__name__") or space.get("__module__")
    return isinstance(name, str) and name.partition(".")[0] in _CONSTANT


def _stays(value: Any) -> bool:
    if isinstance(value, types.FunctionType) and not is_finished(value):
        return False  # the user's, which was put there
    return callable(value) or isinstance(value, _STAYING) or hasattr(type(value), "__get__")


_CONSTANT = ("torch", "numpy")
_STAYING = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def _function(member: Any) -> list[types.FunctionType]:
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return [part for part in parts if isinstance(part, types.FunctionType)]
    if isinstance(member, functools.singledispatchmethod):
        known = [member.func, *member.dispatcher.registry.values()]
        return [function for part in known for function in _function(part)]
    if isinstance(member, functools.partialmethod):
        member = member.func
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    elif isinstance(member, functools.cached_property):
        member = member.func
    if isinstance(member, functools._lru_cache_wrapper):
        member = member.__wrapped__
    return [member] if isinstance(member, types.FunctionType) else []


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty: the name is assigned later
            continue


_NUMBERS = frozenset({"int", "float", "bool"})
_COMPARES = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP"})


def _tells_numbers(code: types.CodeType) -> bool:
    """Whether code compares `type(x)` with the type of a number."""
    if "type" in code.co_names and not _NUMBERS.isdisjoint(code.co_names):
        steps = list(dis.get_instructions(code))
        for position, step in enumerate(steps):
            if step.opname == "LOAD_GLOBAL" and step.argval == "type":
                # type(x) is int, type(x) in (int, float), int == type(x)
                near = steps[max(position - 3, 0) : position + 12]
                if any(s.opname in _COMPARES for s in near) and any(
                    s.opname == "LOAD_GLOBAL" and s.argval in _NUMBERS for s in near
                ):
                    return True
    return any(
        isinstance(constant, types.CodeType) and _tells_numbers(constant)
        for constant in code.co_consts
    )


# What code does that neither the function mode nor a boundary sees, told by the names it uses.


_GENERATORS = "reads or sets the state of a random generator past the tracer"
_NAMES = {
    "set_flush_denormal": "changes a setting of torch's that cannot be asked for",
    "geterr": "reads a setting of numpy's",
    **dict.fromkeys(("initial_seed", "default_generator"), _GENERATORS),
    **dict.fromkeys(
        ("DisableTorchFunction", "DisableTorchFunctionSubclass"), "switches function modes off"
    ),
}  # fmt: skip
_STATES = frozenset(
    {"get_state", "set_state", "clone_state", "graphsafe_set_state", "seed", "manual_seed"}
)


def undetectable_in(
    names: frozenset[str],
    stores: frozenset[str],
    functions: Iterable[types.FunctionType],
    has_generator: bool,
) -> Iterator[str]:
    """Yield a reason for each thing that a replay would not do as the code does.

    Args:
        names: the names that the code uses.
        stores: names of the attributes that it assigns.
        functions: the code.
        has_generator: whether it holds, or is given, a random generator.
    """
    functions = tuple(functions)
    off = names_off()
    if "" in off:
        yield off[""]
    for name in sorted(names & off.keys()):
        yield f"{name} (see {place_naming(name, functions)}): {off[name]}"
    for name in sorted(names & _NAMES.keys()):
        yield f"{name} (see {place_naming(name, functions)}) {_NAMES[name]}"
    if (has_generator or "Generator" in names) and "default_generator" not in names:
        for name in sorted(names & _STATES):
            yield f"{name} (see {place_naming(name, functions)}) {_GENERATORS}"
    for name in sorted(stores & {"real", "imag"}):
        yield f"an assignment to .{name} (see {place_naming(name, functions)}) is not seen"
