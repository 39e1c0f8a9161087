"""The code that runs have executed, and what it shows of a model that its source does not."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from bendtrace.python.bytecode import CONSTANTS, asks_for_ids, single_steps
from bendtrace.python.sites import full_place_text
from bendtrace.python.stacks import monitoring_tool
from bendtrace.tape.plain_numbers import (
    is_higher_order,
    is_of_c,
    looks_up,
    may_receive_traced,
    objects_by_name,
)
from bendtrace.watch.code_facts import UNDETECTABLE, codes_in, line_naming
from bendtrace.watch.host_io import MEASURES
from bendtrace.watch.mode_queries import QUESTIONS, hide_recorder, is_answered_without, put_back
from bendtrace.watch.provenance import is_finished_code

# Functions of torch's that are recorded where they are asked for as attributes of torch, which is
# not so where forward has them under another name; and those that tell how busy a GPU is.
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
            members = vars(value)
            found = (members.get(text) for text in code.co_consts if type(text) is str)
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


# The code that runs have executed, and what it shows of a model that its source does not.


# Which code a run reaches, noted while it runs.
#
# What a run can read is estimated from the names in its code. Whether the estimate was right is
# seen here: each function of the user's that runs, and each that this code calls of Python's own.
# Up to Python 3.11 that is a profile function, which is taken off while the tracer itself works, or
# what is inserted; since 3.12 it is `sys.monitoring`, which is not listened to meanwhile.


Called = tuple[str, str]  # the module that something is of, or its type, and its name
Place = tuple[types.CodeType, int]


class CodeMonitor:
    """The code that ran between `begin` and `end`, but not between `leave` and `enter`.

    It also answers questions about function modes, as if the run were not recorded.

    Args:
        wants_inside: whether something is inserted inside the running module.

    Attributes:
        codes: the user's, with the globals that it ran with.
        called: what it called of Python's own, and where.
        entropy: where randomness was asked for that nothing can seed.
        cleared: the caches of `functools` that it has cleared.
        enters_foreign: is called where installed code begins that is not known to ask traced
            numbers.
        enters_model: is called where code of the user's, or of `torch.cond` and its like, begins
            for the first time.
        fills: follows what fills caches (see `record/cache_fills.py`).
    """

    def __init__(self, wants_inside: Callable[[], bool]) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        self.called: dict[Called, Place] = {}
        self.entropy: dict[str, Place] = {}
        self.cleared: list[Any] = []
        self._outer: Any = None
        self._away = 1  # how often it was left, and not entered again
        self._asking: list[int] = []  # where `_away` is one of these, questions are answered
        self._wants_inside = wants_inside
        self._hidden: list[Any] | None = None
        self._kinds: dict[types.CodeType, int] = {}
        self.enters_foreign: Callable[[types.FrameType], None] | None = None
        self.enters_model: Callable[[types.FrameType], None] | None = None
        self.fills: Any = None
        self._ending: types.FrameType | None = None  # code whose end `fills` wants to see

    def _is_finished(self, code: types.CodeType, space: dict[str, Any]) -> int:
        """Return whether code is finished: 2 if it is not known to ask traced numbers."""
        cached = self._kinds.get(code)
        if cached is None:
            cached = int(is_finished_code(code, space))
            if not cached:
                self.codes[code] = space
            elif not may_receive_traced(code, str(space.get("__name__"))):
                cached = _FOREIGN
            self._kinds[code] = cached
        return cached

    def _handle_start(self, frame: types.FrameType) -> None:
        code = frame.f_code
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._is_finished(code, frame.f_globals)
            if not kind or is_higher_order(code):
                self._begins(frame)
        if self.fills is not None and id(code) in self.fills.codes and self.fills.begins(frame):
            self._wait_for_end(frame)
        if not kind:
            return
        if kind == _FOREIGN and self.enters_foreign is not None:
            outer = frame.f_back
            if outer is None or not self.is_foreign(outer):
                self.enters_foreign(frame)
        module, caller = str(frame.f_globals.get("__name__")), frame.f_back
        while module in OF_TORCH and caller is not None and _is_wrapper_frame(caller):
            caller = caller.f_back
        if caller is None or self._is_finished(caller.f_code, caller.f_globals):
            return
        if module.partition(".")[0] in sys.stdlib_module_names or module in OF_TORCH:
            key = module, code.co_qualname if module == "argparse" else code.co_name
            if key not in self.called:
                self.called[key] = caller.f_code, caller.f_lineno

    def _wait_for_end(self, frame: types.FrameType) -> None:
        self._ending = frame

    def _asks(self, frame: types.FrameType, question: Any) -> None:
        """Hide the recorder until a question has been answered."""
        if self._hidden is None and is_answered_without(frame, question, self._wants_inside):
            self._hidden = hide_recorder()

    def _restore_recorder(self) -> None:
        if self._hidden is not None:
            put_back(self._hidden)
            self._hidden = None

    def _begins(self, frame: types.FrameType) -> None:
        """Code of the user's, or of `torch.cond` and its like, begins for the first time."""
        if any(issubclass(type(one), UnicodeError) for one in frame.f_locals.values()):
            # It may be a handler of errors in text, which its name stands for.
            self.called.setdefault(("codecs", "lookup_error"), (frame.f_code, frame.f_lineno))
        if self.enters_model is not None:
            self.enters_model(frame)

    def is_foreign(self, frame: types.FrameType) -> bool:
        """Return whether code is installed, and not known to ask traced numbers."""
        return self._is_finished(frame.f_code, frame.f_globals) == _FOREIGN

    def _calls(self, frame: types.FrameType, function: Any) -> None:
        if function in QUESTIONS:
            self._asks(frame, function)
        name = function.__name__
        if name == "cache_clear":
            self.cleared.append(function.__self__)
        is_seeded = name == "seed" and frame.f_locals.get("a") is not None  # by a number
        if (
            name in _ENTROPY
            and not is_seeded
            and isinstance(function.__self__, (types.ModuleType, random.Random))
        ):
            place = _users_place(frame, self._is_finished)
            if place is not None:
                self.entropy.setdefault(name, place)
        if self._is_finished(frame.f_code, frame.f_globals):
            return
        key = owner_of(function), name
        if name in ("encode", "decode") and not uses_standard_codec(frame):
            key = "codecs", name
        if key not in self.called:
            self.called[key] = frame.f_code, frame.f_lineno

    def begin(self) -> None:
        """Note the code that the calling thread runs from now on."""
        # A profiler learns of calls of C functions, which `sys.settrace` does not report, and
        # which cannot be wrapped one by one. It replaces the user's own, so that Python 3.12 and
        # later use `sys.monitoring` (`EventCodeMonitor`), which has room for several tools.
        self._outer = sys.getprofile()
        self._away = 0
        sys.setprofile(self._profile)

    def leave(self, answers: bool = False) -> None:
        """Note nothing until `enter`, as the running code is not the model's.

        Args:
            answers: whether the code may ask for function modes nevertheless.
        """
        self._away += 1
        if answers:
            self._asking.append(self._away)
        sys.setprofile(self._profile_questions if answers else None)

    def enter(self) -> None:
        """Go on noting, once for each time that it was left."""
        if self._only_answers:
            self._asking.pop()
        self._away -= 1
        if not self._away:
            sys.setprofile(self._profile)
        else:
            sys.setprofile(self._profile_questions if self._only_answers else None)

    @property
    def _only_answers(self) -> bool:
        return bool(self._asking) and self._asking[-1] == self._away

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause within the context."""
        self.leave()
        try:
            yield
        finally:
            self.enter()

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Note what runs meanwhile, however often it was left."""
        away, self._away = self._away, 1
        self.enter()
        try:
            yield
        finally:
            self.leave()
            self._away = away

    def end(self) -> None:
        """Note nothing any more, and give whoever profiled before its place back."""
        outer, self._outer = self._outer, None
        self._away, self._wants_inside, self.fills, self._ending = 1, never, None, None
        sys.setprofile(None)
        if hasattr(outer, "enable"):  # of cProfile
            outer.enable()
        elif outer is not None:
            sys.setprofile(outer)

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._handle_start(frame)
        elif event == "c_call":
            self._calls(frame, function)
        else:
            if self._hidden is not None:  # a call of C has returned or raised
                self._restore_recorder()
            if frame is self._ending and event == "return":
                self._ending = None
                self.fills.ends(frame, function)

    def _profile_questions(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            if function in QUESTIONS:
                self._asks(frame, function)
        elif self._hidden is not None:
            self._restore_recorder()


def never() -> bool:
    """Return that no module is wanted from inside, once a run is over."""
    return False


_FOREIGN = 2
NOWHERE: Place = ((lambda: None).__code__, 0)


def _is_wrapper_frame(frame: types.FrameType) -> bool:
    """Return whether code is of a wrapper of torch's, which calls what it wraps."""
    return str(frame.f_globals.get("__name__")) in ("torch._compile", "torch._dynamo.eval_frame")


# Where the modules of Python's own take randomness from.
_ENTROPY = frozenset({"urandom", "getrandom", "seed", "uuid_generate_time_safe"})


def _users_place(
    frame: types.FrameType, finished: Callable[[types.CodeType, dict[str, Any]], int]
) -> Place | None:
    """Return where the user's code is that called what runs; None if that is an import's doing."""
    found: types.FrameType | None = frame
    while found is not None:
        if found.f_code.co_filename.startswith("<frozen importlib"):
            return None
        if not finished(found.f_code, found.f_globals):
            return found.f_code, found.f_lineno
        found = found.f_back
    return None


UNWATCHED = "which cannot be watched"
# What is said of an `id` and of a hash.
OWN_NUMBER = "which no other object has, and none of another call"


# The same by `sys.monitoring`, from Python 3.12 on.


class EventCodeMonitor(CodeMonitor):
    """The same by `sys.monitoring`, which has room for several tools."""

    def begin(self) -> None:
        """Note the code that the calling thread runs from now on."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._thread = threading.get_ident()
        self._with_ends: set[types.CodeType] = set()
        self._away = 0
        self._tool = monitoring_tool()
        if self._tool is None:
            self.called["sys", "monitoring"] = NOWHERE
            return
        events = monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._py_start)
        monitoring.register_callback(self._tool, events.CALL, self._call)
        monitoring.set_events(self._tool, events.PY_START | events.CALL)
        monitoring.restart_events()

    def leave(self, answers: bool = False) -> None:
        """Note nothing until `enter` (see `CodeMonitor.leave`)."""
        self._away += 1
        if answers:
            self._asking.append(self._away)

    def enter(self) -> None:
        """Go on noting, once for each time that it was left."""
        if self._only_answers:
            self._asking.pop()
        self._away -= 1

    def _asks(self, frame: types.FrameType, question: Any) -> None:
        super()._asks(frame, question)
        if self._hidden is not None:
            self._listen_to_returns(self._handle_return)

    def _handle_return(
        self, code: types.CodeType, offset: int, function: Any, first: object
    ) -> Any:
        if threading.get_ident() == self._thread:
            self._listen_to_returns(None)
            self._restore_recorder()
        return None

    def _listen_to_returns(self, callback: Any) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        # These two come along with CALL, which is on; they cannot be set for themselves. So they
        # have a callback only while a question is being answered.
        for event in (monitoring.events.C_RETURN, monitoring.events.C_RAISE):
            monitoring.register_callback(self._tool, event, callback)

    def _wait_for_end(self, frame: types.FrameType) -> None:
        super()._wait_for_end(frame)
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.register_callback(self._tool, monitoring.events.PY_RETURN, self._py_return)
        monitoring.set_local_events(self._tool, frame.f_code, monitoring.events.PY_RETURN)
        self._with_ends.add(frame.f_code)

    def _py_return(self, code: types.CodeType, offset: int, result: Any) -> Any:
        frame = sys._getframe(1)
        if frame is self._ending and not self._away and threading.get_ident() == self._thread:
            self._away += 1
            try:
                self._ending = None
                self.fills.ends(frame, result)
            finally:
                self._away -= 1
        return None

    def end(self) -> None:
        """Note nothing any more."""
        self._away, self._wants_inside, self.fills, self._ending = 1, never, None, None
        if self._tool is not None:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
            monitoring.set_events(self._tool, 0)
            for code in self._with_ends:
                monitoring.set_local_events(self._tool, code, 0)
            monitoring.free_tool_id(self._tool)

    def _py_start(self, code: types.CodeType, offset: int) -> Any:
        # `sys.monitoring` reports what all threads do; `sys.setprofile` is for one.
        if not self._away and threading.get_ident() == self._thread:
            self._away += 1  # what is done here is not the model's
            try:
                self._handle_start(sys._getframe(1))
            finally:
                self._away -= 1
        return None

    def _call(self, code: types.CodeType, offset: int, function: Any, first: object) -> Any:
        if threading.get_ident() != self._thread:
            return None
        if type(function) is types.MethodDescriptorType and not self._away:
            try:
                # As a profile function receives it. Without the type, CPython 3.12 crashes for
                # methods that ask for the class that defines them.
                function = function.__get__(first, type(first))
            except TypeError:  # the call fails, too
                return None
        if type(function) is types.BuiltinFunctionType:
            if not self._away:
                self._calls(sys._getframe(1), function)
            elif self._only_answers and function in QUESTIONS:
                self._asks(sys._getframe(1), function)
        return None


def new_code_monitor(wants_inside: Callable[[], bool]) -> CodeMonitor:
    """Return an object that notes the code of a run."""
    return (EventCodeMonitor if sys.version_info >= (3, 12) else CodeMonitor)(wants_inside)


# What runs have shown of a model's code that no estimate would find.
#
# A function that is looked up by a computed name, or called by an operator of an object that the
# run made, is known once it has run. From then on it belongs to what the model can reach.


_learned: MutableMapping[Any, dict[types.CodeType, tuple[types.FunctionType, ...]]]
_learned = WeakIdKeyDictionary()


def functions_of_runs(function: Callable[..., Any]) -> tuple[types.FunctionType, ...]:
    """Return the functions that runs of a model have shown, besides those its code names."""
    try:
        learned = _learned.get(key_of(function), {})
    except TypeError:
        return ()
    return tuple(one for several in learned.values() for one in several)


def learn(
    function: Callable[..., Any], code_monitor: CodeMonitor, functions: Iterable[types.FunctionType]
) -> Iterator[types.CodeType]:
    """Yield the code of a run that was not known before it, and know it from now on.

    Args:
        function: the model.
        code_monitor: what ran.
        functions: those that were known.
    """
    codes = {one.__code__ for one in functions}
    new = [code for code in code_monitor.codes if code not in codes]
    if new:
        nested = {inner for code in codes for inner in codes_in(code)}
        new = [code for code in new if code not in nested]
    if not new:
        return
    found = _functions_of(new, code_monitor.codes)
    try:
        _learned.setdefault(key_of(function), {}).update(found)
    except TypeError:  # not hashable, or there can be no weak references to it
        pass
    yield from new


def key_of(function: Any) -> Any:
    """Return what is known of a model by: the object of a bound method."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__self__", function)


def _functions_of(
    codes: list[types.CodeType], spaces: Mapping[types.CodeType, dict[str, Any]]
) -> dict[types.CodeType, tuple[types.FunctionType, ...]]:
    """Return the functions that have some code; one made of it where there is none any more."""
    found: dict[types.CodeType, list[types.FunctionType]] = {code: [] for code in codes}
    # A frame knows its code, but not its function (Python 3.11 to 3.14), and code does not know who
    # has it. The collector goes through all objects once, however many codes are asked for.
    for holder in gc.get_referrers(*codes):
        if isinstance(holder, types.FunctionType) and holder.__code__ in found:
            found[holder.__code__].append(holder)
    for code, functions in found.items():
        if not functions:
            cells = tuple(types.CellType() for _ in code.co_freevars)
            functions.append(types.FunctionType(code, spaces[code], None, None, cells))
    return {code: tuple(functions) for code, functions in found.items()}


def _line_text(code: types.CodeType, line: int) -> str:
    return full_place_text(code.co_filename, line)


def forbidden_in(code_monitor: CodeMonitor) -> Iterator[str]:
    """Yield a reason for each thing that a run has asked of the world outside."""
    for code, space in code_monitor.codes.items():
        if space.get("id", id) is id and (line := asks_for_ids(code)) is not None:
            yield f"the code at {_line_text(code, line)} asks for an id, {OWN_NUMBER}"
        for name in types_of_outside(code, space):
            place = _line_text(code, line_naming(name.rpartition(".")[2], code))
            yield f"{name} at {place} may give something else each time, {UNWATCHED}"
    for name, (code, line) in code_monitor.entropy.items():
        yield f"{name} at {_line_text(code, line)} gives what nothing can give again"
    for (module, name), (code, line) in code_monitor.called.items():
        if name in OF_GENERATORS and module in OF_TORCH:
            yield (
                f"{module}.{name} at {_line_text(code, line)} is not recorded where forward has "
                "another name for it"
            )
        elif name in UNDETECTABLE and module.partition(".")[0] == "torch":
            yield f"{name} at {_line_text(code, line)} {UNDETECTABLE[name]}"
        elif not is_steady(module, name):
            yield (
                f"{module}.{name} at {_line_text(code, line)} may give something else each time, "
                f"{UNWATCHED}"
            )
