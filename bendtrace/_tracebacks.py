"""Errors raised by the user's own code, and the user's part of their tracebacks."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

import torch

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class UsersError(Exception):
    """Wraps an error that the user's code raised.

    Args:
        what: what was being done, such as "importing model.py".
        error: the error.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"{what} raised {one_line(error)}")
        self.error = error

    def traceback(self) -> str:
        """Return the traceback from the user's first frame on; "" if no frame is the user's."""
        told = traceback.TracebackException.from_exception(self.error)
        found = _keep_theirs(told)
        return "".join(told.format()) if found or isinstance(self.error, SyntaxError) else ""


@contextmanager
def during(what: str) -> Iterator[None]:
    """Mark errors raised in this context as coming from the user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UsersError(what, error) from None


def one_line(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    name = type(error).__name__
    message = shorten(str(error), 300, placeholder=" ...")
    return f"{name}: {message}" if message else name


_EXAMPLE = os.path.join("cli", "example.py")


def _keep_theirs(told: traceback.TracebackException) -> bool:
    """Drop the frames that led to the user's code; return whether there is any of it."""
    frames = [frame for frame in told.stack if not _is_machinery(frame.filename)]
    while frames and frames[0].filename.startswith(_TORCH):
        del frames[0]
    told.stack = traceback.StackSummary.from_list(frames)
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _keep_theirs(other)
    return bool(frames)


def _is_machinery(filename: str) -> bool:
    if filename.endswith(_EXAMPLE):
        return False
    return filename.startswith((_OWN, _IMPORTLIB, "<frozen importlib", "<frozen runpy"))
