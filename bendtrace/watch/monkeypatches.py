"""Monkeypatches: functions of torch, numpy and math that have been replaced.

Packages with faster kernels, and tests, replace functions (`torch.sin = mine`). A replay calls the
functions that were called when it was recorded, so replacements have to be detected. torch also
finds the function to report to a mode by looking up its name: if the replacement calls the
original, the reported function is the replacement.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fft
import torch.functional
import torch.linalg
import torch.nn.init
import torch.special
from torch.nn import functional

from bendtrace.python.internals import internal
from bendtrace.python.lazy import errors
from bendtrace.python.sites import TORCH
from bendtrace.python.versions import TELLS_CHANGES, reader_of_versions, version_of
from bendtrace.watch.intercepts import REPLACED

# Whether what a mode is asked about may stand in for a function of torch's: these cannot.
_NATIVE = frozenset(
    {
        types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
        types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    }
)  # fmt: skip
_HANDLING: Any = internal(
    "torch.overrides.handle_torch_function.__code__", None, "replaced functions of torch", ""
)
_DESCRIPTORS = (property, classmethod, staticmethod, types.GetSetDescriptorType)


def _is_torch_defined(function: Any) -> bool:
    if isinstance(function, property):
        function = function.fget
    if type(function) in _NATIVE or isinstance(function, _DESCRIPTORS):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH)


class Monkeypatch(NamedTuple):
    """The replacement of a function."""

    name: str  # of the function
    value: Any  # the replacement; None if the function was deleted
    original: Any  # the original function


Monkeypatches = tuple[Monkeypatch, ...]


class _Space:
    """A module or class, and its functions, also inherited, when this module was imported."""

    def __init__(self, name: str, table: dict[str, Any], functions: dict[str, Any]) -> None:
        self._name = name
        self.table = table
        self.functions = functions
        self._own = [key for key in functions if key in table]
        self._originals = [functions[key] for key in self._own]
        self._inherited = functions.keys() - table.keys()

    def patches(self) -> Monkeypatches:
        get = self.table.get
        if list(map(get, self._own)) == self._originals and self._inherited.isdisjoint(self.table):
            return ()
        return tuple(
            Monkeypatch(f"{self._name}.{key}", get(key), self.functions[key])
            for key in (*self._own, *sorted(self._inherited & self.table.keys()))
            if get(key) is not self.functions[key] and (self._name, key) not in REPLACED
        )


def _spaces() -> Iterator[_Space]:
    modules = [
        torch, functional, torch.autograd, torch.linalg, torch.special, torch.fft,
        torch.functional, torch.nn.init,
        *(native for native in (internal("torch._C._nn", None),) if native is not None),
        *(sys.modules[name] for name in ("math", "numpy") if name in sys.modules),
    ]  # fmt: skip
    for module in modules:
        yield _Space(module.__name__, vars(module), _functions_in(vars(module)))
    inherited: dict[str, Any] = {}
    for cls in reversed(torch.Tensor.__mro__):
        for name, value in _functions_in(vars(cls)).items():
            if name not in inherited or _is_torch_defined(
                value
            ):  # else it stands in for that by now
                inherited[name] = value
    # A class shows its attributes through a proxy only, which refers to the table.
    table = gc.get_referents(vars(torch.Tensor))[0]
    yield _Space("torch.Tensor", table, inherited)


def _functions_in(table: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in table.items()
        if (callable(value) or isinstance(value, _DESCRIPTORS))
        and not isinstance(value, types.ModuleType)
    }


_SPACES = tuple(_spaces())
# The namespaces whose functions may be replaced.
PATCHED: list[dict[str, Any]] = [space.table for space in _SPACES]
_ORIGINALS = frozenset(id(value) for space in _SPACES for value in space.functions.values())


def _content_of(table: dict[str, Any]) -> list[Any]:
    return list(table.values())


# What is written to any of them is found out most quickly so.
_READER = reader_of_versions(PATCHED)
_unchanged: tuple[bytes, Monkeypatches] = b"", ()  # what it read last, and what stood in then

# Where there are no versions, all functions would be gone through at each call.
_stamp_of: Callable[[dict[str, Any]], Any] = version_of if TELLS_CHANGES else _content_of
# For each space the stamp when it was looked at last, and what stood in for its functions then.
_seen: tuple[list[Any], list[Monkeypatches], Monkeypatches] = (
    [None] * len(_SPACES),
    [()] * len(_SPACES),
    (),
)


def monkeypatches() -> Monkeypatches:
    """Return the replaced functions of torch, numpy and math: usually none.

    Called at each call; cheap, because the result is cached until the tables of these modules are
    written to.
    """
    global _unchanged
    if _READER is None:
        return _by_stamps()
    words, (before, every) = _READER.read(), _unchanged
    if words != before:
        every = _by_stamps()
        _unchanged = words, every
    return every


def _by_stamps() -> Monkeypatches:
    global _seen
    now, (before, found, every) = list(map(_stamp_of, PATCHED)), _seen
    if now != before:
        found = [
            earlier if stamp == last else space.patches()
            for stamp, last, earlier, space in zip(now, before, found, _SPACES, strict=True)
        ]
        together = tuple(itertools.chain.from_iterable(found))
        every = every if together == every else together  # the same object is quick to compare
        _seen = now, found, every
    return every


def may_be_patched(function: Any) -> bool:
    """Return whether a function reported to a mode is not torch's own."""
    if type(function) in _NATIVE:
        getter = getattr(function, "__self__", None)  # of what is read, not called
        return type(getter) is property and id(getter) not in _ORIGINALS
    return not _is_torch_defined(function)


def original_of(function: Any, frame: types.FrameType) -> Any:
    """Return the function that called a mode: the original, if the reported one is its replacement.

    Raise `InputError` if the replaced function cannot be determined.
    """
    if type(function) is types.MethodWrapperType:
        getter = _original_of(function.__self__, None)
        return function if getter is None else getter.__get__
    asking = frame.f_back if frame.f_code is _HANDLING else None
    if asking is None:  # written in C++
        original = _original_of(function, None)
        if original is None and type(function) is types.FunctionType:
            if id(function) not in _ORIGINALS:
                raise errors.InputError(
                    f"{function!r} {_AMBIGUOUS}: replace it with a plain function"
                )
        return function if original is None else original
    code = asking.f_code
    if not code.co_filename.startswith(TORCH):
        return function  # it asks for itself, as functions outside of torch may
    original = _original_of(function, code)
    if original is None and asking.f_globals.get(code.co_name) is function:
        # It was there before this module was.
        original = _rebuilt.get(code)
        if original is None and not code.co_freevars:
            original = types.FunctionType(code, asking.f_globals)
            original = _rebuilt.setdefault(code, original)
    return function if original is None else original


_rebuilt: dict[types.CodeType, types.FunctionType] = {}
_AMBIGUOUS = "replaces a torch function, but which one it calls cannot be determined"


def _original_of(value: Any, code: types.CodeType | None) -> Any:
    """Return the function that a replacement stands for; None if there is none."""
    found = {id(patch.original): patch for patch in monkeypatches() if patch.value is value}
    matches = list(found.values())
    if len(matches) > 1 and code is not None:
        matches = [s for s in matches if getattr(s.original, "__code__", None) is code]
    if len(matches) > 1:
        names = ", ".join(sorted(patch.name for patch in matches))
        raise errors.InputError(f"{value!r} replaces {names}: {_ONE_EACH}")
    return matches[0].original if matches else None


_ONE_EACH = "which of them it calls cannot be determined; replace each with a separate function"
