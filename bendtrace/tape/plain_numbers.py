"""Finds the code that must receive plain numbers, because C code might tell traced ones apart.

A traced scalar answers Python's operators and statements, torch, and whatever asks it through its
methods. Other C code tests for an exact int or float, or reads one from memory: `Decimal`,
`json.dumps`, `math.ldexp`. A list of such code would never be complete. So `ASKING` lists the C
code that is known to ask, and a function that names any other C code receives plain numbers.
`tests/test_plain_numbers.py` compares the result of each entry with its result for plain numbers.

Code written in Python only passes numbers on. That of the user, of torch and of packages that use
torch is read here. Any other (`yaml.dump`) receives plain arguments where it is entered
(`record/recorder.py`).
"""

from __future__ import annotations

import _bisect
import _heapq
import _warnings
import builtins
import cmath
import collections
import contextvars
import functools
import itertools
import math
import operator
import os
import random
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from bendtrace.python.bytecode import constant_of, has, instructions_of, nested_codes, single_steps
from bendtrace.python.internals import is_off
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import PACKAGE, TORCH
from bendtrace.tape.scalars import TracedBool, TracedFloat, TracedInt

if TYPE_CHECKING:
    from bendtrace.python import results
else:
    results = LazyModule("bendtrace.python.results")

# Functions and types written in C that give for a traced number what they give for a plain one.
_BUILTINS = (
    abs, all, any, ascii, bin, bool, bytearray, bytes, callable, chr, classmethod, complex, delattr,
    dict, divmod, enumerate, filter, float, format, frozenset, getattr, hasattr, hash, hex, id, int,
    isinstance, issubclass, iter, len, list, map, max, min, next, object, oct, open, ord, print,
    property, range, repr, reversed, round, set, setattr, slice, sorted, staticmethod, str, sum,
    super, tuple, zip,
)  # fmt: skip
_TYPES = (
    collections.OrderedDict, collections.defaultdict, contextvars.ContextVar, functools.cmp_to_key,
    functools.partial, functools.reduce, functools._lru_cache_wrapper, operator.attrgetter,
    operator.itemgetter, operator.methodcaller, re.Match, re.Pattern, threading.local,
    type(threading.Lock()), type(threading.RLock()),
    *(kind for kind in vars(types).values() if isinstance(kind, type) and kind is not type),
    *(type(iter(kind())) for kind in (list, tuple, dict, set, str, bytes)),
    *(type(getattr({}, name)()) for name in ("keys", "values", "items")),
)  # fmt: skip
# Modules of which every function and type asks, but for some.
_MODULES = (_bisect, _heapq, cmath, itertools, math, operator)
_NOT_ASKING = frozenset(
    {
        "count", "delitem", "fma", "is_", "is_not", "ldexp", "nextafter", "permutations", "sumprod",
    }
)  # fmt: skip
# Types of objects whose methods ask, though the type itself does not.
_OBJECTS: frozenset[Any] = frozenset(
    {collections.deque, itertools.count, weakref.ref, *weakref.ProxyTypes, *random.Random.__mro__}
)
_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "thread_time"})
ASKING: frozenset[Any] = frozenset(
    {
        *_BUILTINS, *_TYPES, _warnings.warn, _warnings.warn_explicit, sys.intern, sys.exc_info,
        vars(collections)["_count_elements"],
        *(clock for name, clock in vars(time).items() if name.partition("_ns")[0] in _CLOCKS),
        *(
            value
            for module in _MODULES
            for name, value in vars(module).items()
            if callable(value) and name[:1] != "_" and name not in _NOT_ASKING
        ),
    }
)  # fmt: skip
_DRAWING = frozenset({random.random, random.getrandbits})  # recorded as ops
_NUMBERS = frozenset({int, float, bool, complex})
# Types whose methods ask; those of `int` and `float` insist on such a number.
_CONTAINERS = frozenset(
    {object, str, bytes, bytearray, list, tuple, dict, set, frozenset, collections.OrderedDict}
)
_FROM_TEXT = frozenset({"from_bytes", "fromhex"})
_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip
# Types of values that are no C code, and of code that is read where it runs.
_NO_CODE = _NUMBERS | _CONTAINERS | {types.NoneType, types.FunctionType, types.ModuleType}
_HEAP_TYPE = 1 << 9


def asks(value: Any) -> bool:
    """Return whether C code that a name stands for asks a traced number that it receives.

    Anything that is no C code counts as well.
    """
    kind = type(value)
    if value is UNKNOWN or value is sys.modules or (kind is str and is_exact_format(value)):
        return False
    if kind in _NO_CODE:
        return True
    if isinstance(value, type):
        is_seeded = any(base.__name__ in _SEEDED for base in value.__mro__)
        return _is_asking_type(value) and not is_seeded
    if kind is functools.partial:
        return asks(value.func) and all(map(asks, (*value.args, *value.keywords.values())))
    if kind.__name__ == "cython_function_or_method":  # no class that all of them share
        is_draw = value.__qualname__.startswith(("Generator.", "RandomState.", "seed"))
        return is_draw or uses_torch(str(value.__module__))
    if kind not in _OF_C:
        return _is_asking_type(kind, _OBJECTS)
    try:
        if value in ASKING or value in _DRAWING:
            return True
    except TypeError:  # a method of something that has no hash
        pass
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        module = str(getattr(value, "__module__", None) or getattr(owner, "__name__", ""))
        return uses_torch(module) or (module == "numpy" and _is_numpys(value.__name__))
    if owner in _NUMBERS if isinstance(owner, type) else type(owner) in _NUMBERS:
        return value.__name__ in _FROM_TEXT
    owner = owner if isinstance(owner, type) else type(owner)
    return owner in _CONTAINERS or _is_asking_type(owner, _OBJECTS)


def looks_up(code: CodeType) -> bool:
    """Return whether code looks up attributes by name."""
    return not _LOOKING_UP.isdisjoint(code.co_names)


def is_exact_format(text: str) -> bool:
    """Return whether a text formats numbers by C code that insists on them: `"%*d" % (n, 5)`."""
    return "%" in text and _FORMAT.search(text) is not None


_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|c)")
_OF_TIME = re.compile(r"[<>=]?([mM]8|datetime64|timedelta64)")  # types of numpy's that insist too


def _is_asking_type(cls: type, others: frozenset[Any] = frozenset()) -> bool:
    """Return whether objects of a class are made, and their methods written, by code that asks.

    Args:
        cls: the class.
        others: C types that count as well.
    """
    return all(
        base in ASKING
        or base in others
        or base in _NO_CODE
        or not is_of_c(base)
        or issubclass(base, BaseException)
        or uses_torch(base.__module__)
        or (base.__module__.startswith("numpy") and base.__name__ not in _NOT_OF_NUMPY)
        for base in cls.__mro__
    )


def is_of_c(cls: type) -> bool:
    """Return whether a class is written in C."""
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    return isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)


# Functions of numpy that are written in C.
_OF_NUMPY = frozenset({"arange", "empty", "zeros"})
# These take a traced number for an array, to which other rules apply: `array([n], dtype="U")`.
# `record/varying.py` has them called with plain ones.
MAKES_ARRAYS = frozenset({"array", "asarray"})


def _is_numpys(name: str) -> bool:
    return name in _OF_NUMPY or (name in MAKES_ARRAYS and results.can_exchange())


_NOT_OF_NUMPY = frozenset({"timedelta64", "datetime64", "void", "object_"})
_SEEDED = frozenset({"BitGenerator", "SeedSequence"})  # of numpy, by numbers of Python only


# Packages

# Modules of Python's own that only pass on what they receive.
_PASSING_ON = frozenset(
    {
        "_collections_abc", "_weakrefset", "abc", "codecs", "collections", "contextlib", "copy",
        "copyreg", "dataclasses", "functools", "genericpath", "importlib", "inspect", "keyword",
        "linecache", "logging", "ntpath", "operator", "os", "posixpath", "random", "re",
        "threading", "traceback", "types", "warnings", "weakref",
    }
)  # fmt: skip
# Packages for tensors, where their imports do not show it.
_FOR_TENSORS = frozenset({"torch", "bendtrace", "einops", "opt_einsum", "jaxtyping", "omegaconf"})
_package_uses: dict[str, tuple[int, bool]] = {}


def uses_torch(module: str) -> bool:
    """Return whether a module belongs to torch, or to a package that uses torch."""
    package = module.partition(".")[0]
    if package in _FOR_TENSORS:
        return True
    if not package or package in sys.stdlib_module_names or package == "numpy":
        return False
    count, is_used = _package_uses.get(package, (0, False))
    if not is_used and count != len(sys.modules):
        inside = f"{package}."
        is_used = any(
            getattr(part, "__dict__", {}).get("torch") is torch
            for name, part in list(sys.modules.items())
            if name == package or name.startswith(inside)
        )
        _package_uses[package] = len(sys.modules), is_used
    return is_used


def may_receive_traced(code: CodeType, module: str) -> bool:
    """Return whether installed code written in Python may receive traced numbers."""
    package = module.partition(".")[0]
    if module.startswith("namedtuple_"):  # their constructors, which Python writes
        return True
    if package == "numpy" and (
        code.co_name.endswith("_dispatcher") or module.endswith("core.multiarray")
    ):
        return True  # it only says which arguments to ask for `__array_function__`
    if package in _PASSING_ON or code.co_filename.startswith("<frozen "):
        return True
    if package in ("typing", "enum"):
        return not code.co_name.startswith("__") or code.co_name in _OF_CLASSES
    return uses_torch(module)


# Methods in `typing` and `enum` that receive no numbers.
_OF_CLASSES = frozenset(
    {
        "__class_getitem__", "__eq__", "__get__", "__getattr__", "__getitem__", "__hash__",
        "__init_subclass__", "__iter__", "__len__", "__set_name__", "__subclasscheck__",
    }
)  # fmt: skip


# What code names

UNKNOWN: Any = object()  # what a name stands for, where only the run will show it


def function_names(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names in a function and their values, with its defaults (see `objects_by_name`)."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    yield from objects_by_name(function.__code__, function.__globals__, cells)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default of {function.__name__}", value


def objects_by_name(
    code: CodeType, space: Mapping[str, Any], cells: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the names in code, with their attributes (`math.ldexp`), and their values.

    Args:
        code: the code, with functions nested in it.
        space: its globals.
        cells: the values of its free variables.
    """
    values: dict[str, Any] = dict(cells or {})  # and modules that it imports itself
    name, value, package = "", UNKNOWN, None
    for step in single_steps(code):
        path, member = "", UNKNOWN
        if step.name in _ATTRIBUTES and value is not UNKNOWN:
            member = _member_of(value, step.value)
            path = f"{name}.{step.value}"
        elif step.name == "IMPORT_FROM":
            path, member = step.value, _member_of(package, step.value)
        elif step.name == "IMPORT_NAME":
            package = _module_in(step.value, space)
            path = step.value.partition(".")[0]
            member = _module_in(path, space)
            if member is None:
                member = UNKNOWN
                if path in sys.stdlib_module_names:
                    yield path, UNKNOWN
        elif step.name in ("LOAD_GLOBAL", "LOAD_NAME"):
            path, member = step.value, _global(step.value, space)
        elif step.name in _VARIABLES and step.value in values:
            path, member = step.value, values[step.value]
        elif step.name.startswith("STORE_") and isinstance(value, types.ModuleType):
            values[step.value] = value
            value = UNKNOWN
        if value is not UNKNOWN and (member is UNKNOWN or step.name not in _ATTRIBUTES):
            yield name, value
        name, value = path, member
    for inner in nested_codes(code):
        yield from objects_by_name(inner, space, values)


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


def _global(name: str, space: Mapping[str, Any]) -> Any:
    return space[name] if name in space else vars(builtins).get(name, UNKNOWN)


def _module_in(name: str, space: Mapping[str, Any]) -> types.ModuleType | None:
    package = str(space.get("__package__") or "")
    for prefix in ("", f"{package}.", f"{package.rpartition('.')[0]}."):
        found = sys.modules.get(f"{prefix}{name}")
        if found is not None:
            return found
    return None


def _member_of(value: Any, name: str) -> Any:
    """Return an attribute of a module or class, without running code."""
    if isinstance(value, types.ModuleType):
        return vars(value).get(name, UNKNOWN)
    if not isinstance(value, type):
        return UNKNOWN
    for cls in value.__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    return UNKNOWN


# Code that receives plain numbers

# C code of torch that insists on numbers, and code that runs out of the tracer's sight, where torch
# takes traced sizes for symbols.
_OF_TORCH = frozenset(
    {
        "DisableTorchFunction", "DisableTorchFunctionSubclass", "SymBool", "SymFloat", "SymInt",
        "Thread", "ThreadPoolExecutor", "manual_seed",
    }
)  # fmt: skip
# Functions that have torch compile their arguments, which then run out of sight. Many models have
# something else by the name `cond`. Code of packages often names one that it never calls.
_HIGHER_ORDER = frozenset({"associative_scan", "cond", "map", "scan", "while_loop"})
_HIGHER_ORDER_MODULE = "torch._higher_order_ops"
_HIGHER_ORDER_FILES = tuple(
    os.path.join(TORCH, "_higher_order_ops", f"{name}.py") for name in _HIGHER_ORDER
)
# In torch's own code, which is not read further.
_IN_TORCH = _OF_TORCH | {"type", "dumps", "deque", "Decimal", "timedelta", "Fraction"}
# What finds code by a name that is computed.
_FINDING = frozenset({"__import__", "eval", "exec", "globals", "import_module"})
# What a traced number has and a plain one has not, or the other way round.
_OWN = frozenset(
    name
    for traced, plain in ((TracedInt, int), (TracedFloat, float), (TracedBool, bool))
    for name in {*dir(traced)} ^ {*dir(plain)}
)
# Methods that operators call, which insist on numbers: (5).__add__.
_OPERATORS = frozenset(
    name for name in (*dir(int), *dir(float)) if name[:2] == "__" and name not in dir(object)
) | {"__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"}  # fmt: skip
_plain: dict[tuple[int, int], tuple[CodeType, Mapping[str, Any], bool]] = {}


def needs_plain_numbers(code: CodeType, space: Mapping[str, Any] | None = None) -> bool:
    """Return whether code contains something that differs between traced scalars and numbers.

    That is `type(x)`, `x is True`, and whatever may pass the number to C code that is not known to
    ask it. Nested code, such as a comprehension, is included.
    """
    if is_off("identity"):
        return True
    space = vars(builtins) if space is None else space
    cached = _plain.get((id(code), id(space)))
    if cached is None:
        needs = _tells_apart(code) or (
            not code.co_filename.startswith((TORCH, PACKAGE))
            and not _all_ask(code, objects_by_name(code, space))
        )
        cached = _plain[id(code), id(space)] = code, space, needs
    return cached[2]


def function_needs_plain(function: types.FunctionType) -> bool:
    """Return the same of a function, with its defaults and free variables.

    A function that names `torch.cond` or its like needs plain numbers from its beginning.
    """
    code = function.__code__
    return (
        needs_plain_numbers(code, function.__globals__)
        or (
            (bool(code.co_freevars) or bool(function.__defaults__) or bool(function.__kwdefaults__))
            and not _all_ask(code, function_names(function))
        )
        or (
            not _HIGHER_ORDER.isdisjoint(_names_in(code))
            and any(
                type(value) is types.FunctionType
                and str(value.__module__).startswith(_HIGHER_ORDER_MODULE)
                for _, value in function_names(function)
            )
        )
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in nested_codes(code):
        yield from _names_in(inner)


def _all_ask(code: CodeType, named: Iterator[tuple[str, Any]]) -> bool:
    return all(
        _module_asks(value, code)
        if type(value) is types.ModuleType
        else asks(value) or (name == "type" and value is type and names_types_only(code))
        for name, value in named
    )


def _module_asks(module: types.ModuleType, code: CodeType) -> bool:
    """Return whether code may look up something that asks, by name in a standard module."""
    if not looks_up(code) or module.__name__ not in sys.stdlib_module_names:
        return True
    members = vars(module)
    found = [members[text] for text in code.co_consts if type(text) is str and text in members]
    return all(map(asks, found or members.values()))


def _tells_apart(code: CodeType) -> bool:
    if is_higher_order(code):
        return True
    names = _IN_TORCH if code.co_filename.startswith(TORCH) else _OF_TORCH
    telling = names.intersection(code.co_names)
    if telling - {"type"} or _keeps_tensor_class(code):
        return True
    if telling and not names_types_only(code):
        return True
    if not code.co_filename.startswith(TORCH):
        if code.co_name in _EXACT and not _returns_a_call(code):
            return True
        if not _FINDING.isdisjoint(code.co_names):
            return True
        if any(type(text) is str and _is_telling(text, code) for text in code.co_consts):
            return True
        if not _OPERATORS.isdisjoint(code.co_names) and any(
            step.name in _ATTRIBUTES and step.value in _OPERATORS for step in single_steps(code)
        ):
            return True
    tests = has(code, "IS_OP") and any(
        current == "IS_OP" and isinstance(constant_of(code, before, argument), bool)
        for (before, argument), (current, _) in itertools.pairwise(instructions_of(code))
    )
    return tests or any(map(_tells_apart, nested_codes(code)))


def names_types_only(code: CodeType) -> bool:
    """Return whether all that code does with types is to write their names into texts.

    A traced number has a type with the name of the plain one: `f"{type(n)}"`, `type(n).__name__`.
    """
    steps = single_steps(code)
    for position, step in enumerate(steps):
        if step.value != "type" or not step.name.startswith("LOAD_") or step.name in _ATTRIBUTES:
            continue  # `x.device.type` is a text
        given = itertools.takewhile(lambda one: one.name in _SIMPLE, steps[position + 1 :])
        call, *after = steps[position + 1 + sum(1 for _ in given) :][:3]
        is_named = bool(after) and (
            after[0].name.startswith(("FORMAT_", "CONVERT_VALUE"))
            or (after[0].name == "LOAD_ATTR" and after[0].value in _NAMES)
        )
        if not is_named or call.name != "CALL" or call.value != 1:
            return False
    return all(map(names_types_only, nested_codes(code)))


_NAMES = frozenset({"__name__", "__qualname__"})
_SIMPLE = frozenset(
    {"BINARY_SUBSCR", "LOAD_ATTR", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL"}
)


def is_higher_order(code: CodeType) -> bool:
    """Return whether `torch.cond` and its like have some code."""
    return code.co_filename in _HIGHER_ORDER_FILES


def _is_telling(text: str, code: CodeType) -> bool:
    """Return whether a text formats exact numbers, or names something that tells them apart."""
    if text in _OWN or text in _OPERATORS:
        return looks_up(code)
    return is_exact_format(text) or _OF_TIME.match(text) is not None


# Methods whose results Python takes for exact numbers.
_EXACT = frozenset(
    {"__complex__", "__float__", "__hash__", "__index__", "__int__", "__length_hint__"}
)


def _returns_a_call(code: CodeType) -> bool:
    """Return whether code returns a result of `hash` or `id`, as most `__hash__` methods do."""
    return not {"hash", "id"}.isdisjoint(code.co_names) and all(
        before.name.startswith("CALL")
        for before, step in itertools.pairwise(single_steps(code))
        if step.name == "RETURN_VALUE"
    )


_LOOKING_UP = frozenset(
    {"attrgetter", "delattr", "getattr", "getattr_static", "hasattr", "methodcaller", "setattr"}
)

# The classes of tensors that C code makes, and what code does with one that it keeps.
_TENSOR_CLASSES = frozenset(
    f"{kind}Tensor"
    for kind in (
        "Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool",
    )
)  # fmt: skip
_KEEPING = ("STORE_", "RETURN_", "JUMP_FORWARD", "BUILD_")


def _keeps_tensor_class(code: CodeType) -> bool:
    """Return whether code keeps one, to call it later: `kind = torch.FloatTensor`."""
    return not _TENSOR_CLASSES.isdisjoint(code.co_names) and any(
        step.value in _TENSOR_CLASSES and after.name.startswith(_KEEPING)
        for step, after in itertools.pairwise(single_steps(code))
        if step.name.startswith("LOAD_")
    )
