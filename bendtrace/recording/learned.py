"""What runs have shown of a model's code that no estimate would find.

A function that is looked up by a computed name, or called by an operator of an object that the
run made, is known once it has run. From then on it belongs to what the model can reach.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bendtrace.recording.ran import Ran
from bendtrace.recording.reach import codes_in

__all__ = ["forbidden_in", "learn", "learned_of"]

_learned: weakref.WeakKeyDictionary[Any, dict[types.CodeType, tuple[types.FunctionType, ...]]]
_learned = weakref.WeakKeyDictionary()


def learned_of(function: Callable[..., Any]) -> tuple[types.FunctionType, ...]:
    """Return the functions that runs of a model have shown, besides those its code names."""
    try:
        known = _learned.get(_key_of(function), {})
    except TypeError:
        return ()
    return tuple(one for several in known.values() for one in several)


def learn(
    function: Callable[..., Any], ran: Ran, functions: Iterable[types.FunctionType]
) -> Iterator[types.CodeType]:
    """Yield the code of a run that was not known before it, and know it from now on.

    Args:
        function: the model.
        ran: what ran.
        functions: those that were known.
    """
    known = {one.__code__ for one in functions}
    new = [code for code in ran.codes if code not in known]
    if new:
        nested = {inner for code in known for inner in codes_in(code)}
        new = [code for code in new if code not in nested]
    if not new:
        return
    found = _functions_of(new, ran.codes)
    try:
        _learned.setdefault(_key_of(function), {}).update(found)
    except TypeError:  # not hashable, or there can be no weak references to it
        pass
    yield from new


def _key_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__self__", function)


def _functions_of(
    codes: list[types.CodeType], spaces: Mapping[types.CodeType, dict[str, Any]]
) -> dict[types.CodeType, tuple[types.FunctionType, ...]]:
    """Return the functions that have some code; one made of it where there is none any more."""
    found: dict[types.CodeType, list[types.FunctionType]] = {code: [] for code in codes}
    for holder in gc.get_referrers(*codes):
        if isinstance(holder, types.FunctionType) and holder.__code__ in found:
            found[holder.__code__].append(holder)
    for code, functions in found.items():
        if not functions:
            cells = tuple(types.CellType() for _ in code.co_freevars)
            functions.append(types.FunctionType(code, spaces[code], None, None, cells))
    return {code: tuple(functions) for code, functions in found.items()}


def forbidden_in(ran: Ran) -> Iterator[str]:
    """Yield a reason for each thing that a run has asked of the world outside."""
    for name, (code, line) in ran.entropy.items():
        yield f"{name} at {code.co_filename}:{line} gives what nothing can give again"
    for (module, name), (code, line) in ran.called.items():
        if not _is_steady(module, name):
            yield (
                f"{module}.{name} at {code.co_filename}:{line} may give something else each time, "
                "which cannot be watched"
            )


def _is_steady(module: str, name: str) -> bool:
    """Whether a function of Python's own gives the same, or only works on what it is given."""
    if name in _READS_WORLD.get(module, ()):
        return False
    package = module.partition(".")[0].removeprefix("_")
    if module in _BY_NAME:
        return name in _BY_NAME[module]
    is_standard = package in sys.stdlib_module_names or f"_{package}" in sys.stdlib_module_names
    return package in _STEADY or not is_standard


# Modules of Python's own that work on what they are given, or on what is watched.
_STEADY = frozenset(
    {
        "abc", "argparse", "array", "ast", "base64", "binascii", "bisect", "builtins", "bz2",
        "calendar", "cmath", "codecs", "collections", "collections_abc", "colorsys", "configparser",
        "contextlib", "contextvars", "copy", "copyreg", "csv", "dataclasses", "datetime", "decimal",
        "difflib", "encodings", "enum", "fractions", "functools", "future", "graphlib", "hashlib",
        "heapq", "hmac", "html", "inspect", "itertools", "json", "keyword", "logging", "lzma",
        "math", "numbers", "operator", "optparse", "pathlib", "pickle", "posixpath", "pprint",
        "queue", "random", "re", "reprlib", "secrets", "sre", "statistics", "string", "struct",
        "textwrap", "thread", "threading", "traceback", "types", "typing", "unicodedata",
        "unittest", "uuid", "warnings", "weakref", "weakrefset", "zlib", "dis", "opcode", "ntpath",
        "stat", "concurrent", "io", "ctypes", "linecache", "tokenize", "token",
    }
)  # fmt: skip
# Of these modules only some functions, as they are guarded by the value that they give.
_BY_NAME: dict[str, frozenset[str]] = {
    "os": frozenset({
        "getenv", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "encode",
        "decode", "fspath", "_fspath", "__contains__", "get", "setdefault", "copy",
    }),
    "sys": frozenset({"intern", "exc_info", "exception", "getsizeof", "getrefcount"}),
    "posix": frozenset({"fspath"}),
    # What a relative import in a function asks.
    "importlib._bootstrap": frozenset({"parent", "_handle_fromlist"}),
}  # fmt: skip
_FILES = frozenset(
    {
        "exists", "lexists", "is_file", "is_dir", "is_symlink", "is_mount", "stat", "lstat",
        "iterdir", "glob", "rglob", "cwd", "home", "resolve", "absolute", "read_text", "read_bytes",
        "write_text", "write_bytes", "open", "mkdir", "rmdir", "unlink", "rename", "replace",
        "touch", "chmod", "samefile", "owner", "group", "walk", "readlink",
        "symlink_to", "hardlink_to", "abspath", "realpath", "ismount", "islink",
    }
)  # fmt: skip
_READS_WORLD: dict[str, frozenset[str]] = {
    "builtins": frozenset({"globals", "eval", "exec", "input", "open", "breakpoint"}),
    "type": frozenset({"now", "today", "utcnow", "__subclasses__"}),
    "logging": frozenset({"getLogger", "getLoggerClass", "getLogRecordFactory"}),
    "decimal": frozenset({"getcontext", "localcontext"}),
    "inspect": frozenset({"stack", "currentframe", "trace", "getmembers", "getouterframes"}),
    "pathlib": _FILES,
    "posixpath": _FILES,
    "uuid": frozenset({"uuid1", "uuid6", "uuid7", "getnode"}),
    "threading": frozenset({"active_count", "enumerate", "current_thread", "main_thread"}),
    "_thread": frozenset({"get_ident", "get_native_id", "_count"}),
    "traceback": frozenset({"extract_stack", "format_stack", "print_stack", "walk_stack"}),
}  # fmt: skip
