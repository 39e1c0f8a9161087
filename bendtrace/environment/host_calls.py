"""What Python's own library reads of the world outside: files, clocks, memory, the command line.

Functions and types of the standard library are *steady* if they give the same each time, for the
same arguments and for what is watched anyway. All others make the call live that uses them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from bendtrace.source.bytecode import CONSTANTS, single_steps
from bendtrace.tape.plain_numbers import is_of_c, looks_up, objects_by_name
from bendtrace.torch_rules.host_io import MEASURES

# Functions of torch's that are recorded where they are asked for as attributes of torch, which is
# not so where forward has them under a name of its own; and those that tell how busy a GPU is.
OF_GENERATORS = frozenset(
    {
        "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all",
        "set_rng_state", "set_rng_state_all",
    }
)  # fmt: skip
OF_TORCH = {
    "torch.random": OF_GENERATORS, "torch.cuda.random": OF_GENERATORS | MEASURES,
    "torch.cuda": MEASURES, "torch.cuda.memory": MEASURES,
}  # fmt: skip

# Modules of Python's own that work on what they are given, or on what is watched.
_STEADY = frozenset(
    {
        "abc", "array", "ast", "base64", "binascii", "bisect", "builtins", "calendar", "cmath",
        "codecs", "collections", "collections_abc", "colorsys", "concurrent", "contextlib",
        "contextvars", "copy", "copyreg", "csv", "dataclasses", "datetime", "decimal", "difflib",
        "dis", "encodings", "enum", "fractions", "functools", "future", "graphlib", "hashlib",
        "heapq", "hmac", "html", "inspect", "itertools", "json", "keyword", "logging", "math",
        "ntpath", "numbers", "opcode", "operator", "pathlib", "pickle", "posixpath", "pprint",
        "queue", "random", "re", "reprlib", "secrets", "sre", "stat", "statistics", "string",
        "struct", "textwrap", "thread", "threading", "token", "traceback", "types", "typing",
        "unicodedata", "unittest", "uuid", "warnings", "weakref", "weakrefset", "zlib",
    }
)  # fmt: skip
# Of these modules only some functions, as they are guarded by the value that they give.
_BY_NAME: dict[str, frozenset[str]] = {
    "os": frozenset({
        "getenv", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "encode",
        "decode", "fspath", "_fspath", "__contains__", "get", "setdefault", "copy",
    }),
    "sys": frozenset({"intern", "exc_info", "exception", "getsizeof"}),
    "posix": frozenset({"fspath"}),
    # What a relative import in a function asks.
    "importlib._bootstrap": frozenset({"parent", "_handle_fromlist"}),
}  # fmt: skip
_OF_STREAMS = frozenset({"write", "writelines", "flush", "isatty", "fileno", "writable", "close"})
_FILES = frozenset(
    {
        "exists", "lexists", "is_file", "is_dir", "is_symlink", "is_mount", "stat", "lstat",
        "iterdir", "glob", "rglob", "cwd", "home", "resolve", "absolute", "read_text", "read_bytes",
        "write_text", "write_bytes", "open", "mkdir", "rmdir", "unlink", "rename", "replace",
        "touch", "chmod", "samefile", "owner", "group", "scan", "readlink",
        "symlink_to", "hardlink_to", "abspath", "realpath", "ismount", "islink", "relpath", "walk",
        "is_junction", "is_socket", "is_fifo", "is_block_device", "is_char_device",
    }
)  # fmt: skip
_CODECS = frozenset(
    {
        "EncodedFile", "decode", "encode", "getdecoder", "getencoder", "getincrementaldecoder",
        "getincrementalencoder", "getreader", "getwriter", "iterdecode", "iterencode", "lookup",
        "lookup_error", "open", "register", "register_error", "unregister",
    }
)  # fmt: skip
_LOCKS = frozenset(
    {
        "_is_owned", "_recursion_count", "acquire", "get_ident", "get_native_id", "is_alive",
        "is_set", "locked", "n_waiting", "stack_size", "wait", "_count",
    }
)  # fmt: skip
_READS_WORLD: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"__import__", "globals", "eval", "exec", "input", "open", "breakpoint"}
    ),
    "type": frozenset({"now", "today", "utcnow", "__subclasses__"}),
    "logging": frozenset(
        {
            "addLevelName", "getHandlerByName", "getHandlerNames", "getLevelName",
            "getLevelNamesMapping", "getLogRecordFactory", "getLogger", "getLoggerClass",
            "makeLogRecord", "makeRecord",
        }
    ),
    "decimal": frozenset({"getcontext", "localcontext"}),
    "inspect": frozenset(
        {
            "currentframe", "findsource", "getcomments", "getmembers", "getouterframes",
            "getsource", "getsourcelines", "stack", "trace",
        }
    ),
    "pathlib": _FILES,
    "posixpath": _FILES,
    "ntpath": _FILES,
    "codecs": _CODECS,
    "_codecs": _CODECS,
    "_contextvars": frozenset({"copy_context"}),
    "uuid": frozenset({"uuid1", "uuid6", "uuid7", "getnode"}),
    "threading": _LOCKS | {"active_count", "enumerate", "current_thread", "main_thread"},
    "_thread": _LOCKS,
    "traceback": frozenset({"extract_stack", "format_stack", "print_stack", "walk_stack"}),
}  # fmt: skip
_IN_MEMORY = frozenset({"_io.StringIO", "_io.BytesIO"})


def is_steady(module: str, name: str) -> bool:
    """Return whether a function gives the same each time.

    Args:
        module: its module, with the type where it is a method of an object of C.
        name: its name.
    """
    if module in OF_TORCH:
        return name not in OF_TORCH[module]
    first = module.partition(".")[0]
    for key in (module, first):
        if name in _READS_WORLD.get(key, ()):
            return False
    if module in _BY_NAME:
        return name in _BY_NAME[module]
    package = first.removeprefix("_")
    if package == "io":
        return module in _IN_MEMORY or name in _OF_STREAMS
    if package == "argparse":  # what it parses is the command line
        return name.startswith(("Namespace.", "_AttributeHolder."))
    is_standard = package in sys.stdlib_module_names or f"_{package}" in sys.stdlib_module_names
    return package in _STEADY or not is_standard


def owner_of(function: Any) -> str:
    """Return the module of a function of C, or the type whose method it is."""
    owner = function.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return str(function.__module__ or "")
    if isinstance(owner, type) and function.__name__ in _READS_WORLD["type"]:
        return "type"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_steady_type(cls: type) -> bool:
    """Return whether a type is no C code of Python's own that reads the world outside."""
    base = next(filter(is_of_c, cls.__mro__))
    is_error = issubclass(cls, BaseException)
    return is_error or is_steady(f"{base.__module__}.{base.__qualname__}", "")


def types_of_outside(code: types.CodeType, space: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in code that stand for types which are not steady.

    Calls of functions are seen when they happen, those of types are not.
    """
    for name, value in objects_by_name(code, space):
        if isinstance(value, type) and not is_steady_type(value):
            yield name
        elif type(value) is types.ModuleType and looks_up(code):
            held = vars(value)
            found = (held.get(text) for text in code.co_consts if type(text) is str)
            if any(isinstance(one, type) and not is_steady_type(one) for one in found):
                yield name


# Text

_ENCODINGS = frozenset({"utf-8", "utf8", "ascii", "latin-1", "latin1", "utf-16", "utf-32"})
_ON_ERRORS = frozenset(
    {
        "backslashreplace", "ignore", "namereplace", "replace", "strict", "surrogateescape",
        "surrogatepass", "xmlcharrefreplace",
    }
)  # fmt: skip


def uses_standard_codec(frame: types.FrameType) -> bool:
    """Return whether a call of `encode` or `decode` names only what nobody can register."""
    steps = single_steps(frame.f_code)
    for number, step in enumerate(steps):
        if step.offset == frame.f_lasti:
            before = [one for one in steps[:number] if one.name != "KW_NAMES"]
            count = step.argument or 0
            given = before[len(before) - count :]
            return step.name.startswith("CALL") and all(
                one.name in CONSTANTS and str(one.value).lower() in _ENCODINGS | _ON_ERRORS
                for one in given
            )
    return False
