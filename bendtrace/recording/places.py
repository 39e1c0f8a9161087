"""Where in the model a run is, judging by the frames on the stack."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = [
    "BEHIND",
    "PACKAGE",
    "TORCH",
    "TRACER",
    "definition",
    "is_users_file",
    "outside_scalars",
    "user_place",
    "users_code",
    "users_frame",
    "users_level",
]

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# The folders whose code runs while a model is recorded.
TRACER = tuple(
    os.path.join(PACKAGE, name, "")
    for name in ("environment", "recording", "source", "tape", "torch_rules")
)
TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Seen from inside, what lies behind this code is not the model: the run itself.
BEHIND: set[types.CodeType] = set()


def outside_scalars() -> FrameType:
    """The frame that did something with a traced scalar, also where the tracer did it for it."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(TRACER) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def users_level() -> int:
    """The `stacklevel` by which a warning of our caller names the line of the user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, TORCH)):
        frame, level = frame.f_back, level + 1
    return level


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is not torch's own."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(TORCH):
        found = found.f_back
    return found or frame


def users_code(frame: FrameType) -> types.CodeType:
    """The innermost code that is not torch's own."""
    return users_frame(frame).f_code


def user_place(frame: FrameType | None) -> str:
    """Where the nearest code is that is the model's; "" once the model has returned."""
    while frame is not None and frame.f_code not in BEHIND:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, TORCH)) and not _is_stdlibs(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Whether code in a file may be the model's: it is not torch's, Python's or ours."""
    return not file.startswith((PACKAGE, TORCH, "<")) and not _is_stdlibs(file)


def _is_stdlibs(file: str) -> bool:
    return file.startswith(("<frozen", _STDLIB)) and "site-packages" not in file


def definition(function: Callable[..., Any]) -> str:
    """Where a module's forward, or a function, is defined."""
    called = function.forward if isinstance(function, nn.Module) else function
    while isinstance(called, functools.partial):
        called = called.func
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
