"""Constructors of tensors that bypass the function mode: legacy ones, parameters, numpy's memory.

`Variable(x)`, `torch.Tensor([1])`, `torch.LongTensor([1])`, `nn.Parameter(x)` and
`torch.from_numpy(array)` bypass the mode. Each is recorded as an op of the class, or function,
itself.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from bendtrace.source.internals import Never, internal
from bendtrace.tape.watchers import current_watcher

# What an attribute is exchanged for that is not there while a run is recorded.
GONE: Any = object()

_variable: Any = internal("torch.autograd.Variable", Never)
_base_new: Any = torch.Tensor.__new__
_parameter_new: Any = nn.Parameter.__new__
_from_numpy = torch.from_numpy


def entries_of_constructors() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if _variable is not Never:
        yield type(_variable), "__call__", _makes_variable
    yield torch.Tensor, "__new__", _New()
    yield nn.Parameter, "__new__", staticmethod(_makes_parameter)
    yield torch, "from_numpy", _takes_array
    # The classes of old are C's, and cannot be changed. They are taken out of their modules, which
    # are asked for what they do not have by way of `__getattr__`.
    for owner in (torch, torch.cuda):
        classes = {
            name: value
            for name, value in vars(owner).items()
            if type(value) is LEGACY and name.endswith("Tensor")
        }
        for name in classes:
            yield owner, name, GONE
        yield owner, "__getattr__", _attribute_of(owner, classes)


# Of the classes of old, such as `torch.FloatTensor`.
LEGACY: Any = type(internal("torch.FloatTensor", None))


def _makes_variable(cls: type, *args: Any, **kwargs: Any) -> Any:
    watcher = current_watcher() if cls is _variable else None
    if watcher is None:
        return type.__call__(cls, *args, **kwargs)
    return watcher.opaque_call(cls, args, kwargs, sys._getframe(1))


class _New:
    """Stands in for `torch.Tensor.__new__` where the class is called.

    Taken as an attribute, it is itself: torch._dynamo does so when it is imported, which
    may be during a run.
    """

    def __get__(self, tensor: Any, owner: Any) -> Any:
        if current_watcher() is None or _is_at(sys._getframe(1), _ATTRIBUTES):
            return _base_new
        return _makes_tensor


def _makes_tensor(cls: type, *args: Any, **kwargs: Any) -> Any:
    watcher = current_watcher() if cls is torch.Tensor else None
    if watcher is None:
        return _base_new(cls, *args, **kwargs)
    return watcher.opaque_call(cls, args, kwargs, sys._getframe(1))


def _makes_parameter(cls: type, *args: Any, **kwargs: Any) -> Any:
    watcher = current_watcher() if cls is nn.Parameter else None
    if watcher is None:
        return _parameter_new(cls, *args, **kwargs)
    return watcher.opaque_call(cls, args, kwargs, sys._getframe(1))


def _takes_array(array: Any) -> Any:
    watcher = current_watcher()
    if watcher is None:
        return _from_numpy(array)
    return watcher.opaque_call(_from_numpy, (array,), {}, sys._getframe(1))


def _attribute_of(owner: ModuleType, classes: dict[str, Any]) -> Callable[[str], Any]:
    """Return what gives a module's classes of old: where they are called, as one op."""
    before = vars(owner).get("__getattr__")

    def attribute(name: str) -> Any:
        cls = classes.get(name)
        if cls is not None:
            is_recorded = current_watcher() is not None and _is_called(sys._getframe(1))
            return _Calls(cls) if is_recorded else cls
        if before is not None:
            return before(name)
        raise AttributeError(f"module {owner.__name__!r} has no attribute {name!r}")

    return attribute


class _Calls:
    """A class of old, in the instruction that calls it."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return self._cls(*args, **kwargs)
        return watcher.opaque_call(self._cls, args, kwargs, sys._getframe(1))


_METHOD, _ATTRIBUTE = dis.opmap.get("LOAD_METHOD"), dis.opmap["LOAD_ATTR"]
_ATTRIBUTES = (_METHOD, _ATTRIBUTE)


def _is_at(frame: FrameType, instructions: tuple[int | None, ...]) -> bool:
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in instructions


def _is_called(frame: FrameType) -> bool:
    """Return whether code takes an attribute for nothing but calling it."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if at < 0 or code[at] not in _ATTRIBUTES:
        return False
    # For methods there is an instruction until Python 3.11, and then a bit in that of attributes.
    if code[at] == _METHOD or (sys.version_info >= (3, 12) and code[at + 1] & 1):
        return True
    # Of a name that the module imports, attributes are taken as of any value. What is going to be
    # called has a null after it since Python 3.13, and until then one before it.
    after, before = _next(code, at + 2, 2), _next(code, at - 2, -2)
    if sys.version_info >= (3, 13):
        return _name(code, after) == "PUSH_NULL"
    following = _name(code, after)
    if _name(code, before) != "LOAD_GLOBAL" or not code[before + 1] & 1:
        return False
    if following.startswith("BUILD_"):
        return not code[after + 1]
    return following in _FIRST or (
        following.startswith("LOAD_") and following not in ("LOAD_ATTR", "LOAD_METHOD")
    )


# What the arguments of a call, or the call of something without any, can begin with.
_FIRST = ("CALL", "KW_NAMES", "PRECALL", "PUSH_NULL")


def _next(code: bytes, at: int, step: int) -> int:
    while 0 <= at < len(code) and code[at] == _CACHE:
        at += step
    return at


def _name(code: bytes, at: int) -> str:
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


_CACHE = dis.opmap.get("CACHE")
