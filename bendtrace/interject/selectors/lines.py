"""Places in the source that a person names: by text, by line, by file and line."""

from __future__ import annotations

import ast
import functools
import os
import re
from dataclasses import dataclass
from typing import Any

from bendtrace.errors import InputError

__all__ = ["Mark", "mark"]


@dataclass(frozen=True)
class Mark:
    """What a person says of a test or a loop.

    Attributes:
        text: its source, a regular expression that is searched for in it, or None for any.
        line: a line that it is on, or None for any.
        file: the source file, or the end of its path; None for any.
    """

    text: str | re.Pattern[str] | None = None
    line: int | None = None
    file: str | None = None

    def means(self, text: str, lines: range, file: str) -> bool:
        """Whether something in the source is meant.

        Args:
            text: its source.
            lines: the lines that it is on.
            file: the file that it is in.
        """
        if self.line is not None and self.line not in lines:
            return False
        if self.file is not None and not _is_file(file, self.file):
            return False
        if isinstance(self.text, re.Pattern):
            return self.text.search(text) is not None
        return self.text is None or _plain(self.text) == _plain(text)

    def __str__(self) -> str:
        given = self.text if self.line is None else self.line
        file = "" if self.file is None else f"file={self.file!r}"
        return ", ".join(filter(None, ["" if given is None else repr(given), file]))


def mark(where: Any, file: str | None, asked: str) -> Mark:
    """Return what a person says of a place, checked.

    Args:
        where: text, a regular expression, a line, `"model.py:41"`, or None.
        file: the source file, if given by itself.
        asked: the function that was called.

    Raises:
        InputError: it is nothing of the kind.
    """
    if file is not None and not isinstance(file, str):
        raise InputError(f"{asked}() takes the path of a source file, or its end, not {file!r}")
    if isinstance(where, str):
        at = re.fullmatch(r"(.+\.\w+):(\d+)", where)
        if at is not None:
            return Mark(None, int(at[2]), at[1])
        return Mark(where, None, file)
    if type(where) is int and where > 0:
        return Mark(None, where, file)
    if where is None or (isinstance(where, re.Pattern) and isinstance(where.pattern, str)):
        return Mark(where, None, file)
    raise InputError(
        f"{asked}() takes text of the source, a regular expression, a line counted from 1, or "
        f"'file.py:41'; not {where!r}"
    )


def _is_file(file: str, asked: str) -> bool:
    file, asked = os.path.normpath(file), os.path.normpath(asked)
    return file == asked or file.endswith(os.sep + asked)


@functools.cache
def _plain(text: str) -> str:
    """Return an expression as it is spelled without regard to blanks, quotes and brackets."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError):
        return " ".join(text.split())
