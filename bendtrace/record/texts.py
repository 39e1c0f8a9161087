"""Text that only reaches the screen, or a passing assertion, and so is not part of the path.

A formatted value is guarded, since code may do anything with the text. The exception is text that,
according to the syntax, goes to `print`, or is the message of `torch._assert`: there formatting is
an op, and a replay prints the new text. Until it is printed, the text contains a mark in place of
the value.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch

from bendtrace.python.sites import outside_scalars, place_at
from bendtrace.python.statements import FUNCTIONS, SourceFile, source_file
from bendtrace.record.tape_writer import TapeWriter
from bendtrace.record.values import MARK
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.guards import ValueGuard
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.tape import OpKind, Ref, Use

_MARK = f"{MARK}{{}}\ue0b8"  # characters for private use, which nothing else has
_MARKS = re.compile(f"{MARK}([0-9]+)\ue0b8")


class Texts:
    """The texts of values that a run has formatted without a guard.

    `as_one` carries out a recorded op: op, function, arguments, keyword arguments, frame. The
    streams are those before the run, by their name in `sys`.
    """

    def __init__(
        self, writer: TapeWriter, as_one: Callable[..., Any], streams: dict[str, Any]
    ) -> None:
        self._writer = writer
        self._as_one = as_one
        self.given: list[tuple[int, str]] = []  # the op that returned each text, with the text
        self.printing: bool = False  # whether values are being formatted for the screen only
        self._streams = streams

    def mark(self, index: int, text: str) -> str:
        """Return the mark for the text that an op returned."""
        self.given.append((index, text))
        return _MARK.format(len(self.given) - 1)

    def parts(self, text: str) -> Iterator[str | tuple[int, str]]:
        """Split a text into plain parts and ops with their text."""
        for number, part in enumerate(_MARKS.split(text)):
            if number % 2:
                yield self.given[int(part)]
            elif part:
                yield part

    def printed(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> None:  # fmt: skip
        """Print to the screen."""
        stream = self._stream_of(kwargs.get("file"))
        if stream is None:
            arguments = [self.guard_text(arg) if type(arg) is str else arg for arg in args]
            function(*arguments, **kwargs)
            return
        texts = [arg if type(arg) is str else self._printable(arg) for arg in args]
        between, end = kwargs.get("sep"), kwargs.get("end")
        text = (" " if between is None else str(between)).join(texts)
        text += "\n" if end is None else str(end)
        encoded: list[Any] = [stream, bool(kwargs.get("flush"))]
        given = list(encoded)
        for part in self.parts(text):
            encoded.append(part if isinstance(part, str) else Ref(part[0]))
            given.append(part if isinstance(part, str) else part[1])
        with torch._C.DisableTorchFunction():  # what is read here is not the model's reading
            self._writer.begin()
            op = self._writer.emit(OpKind.CALL, shows, tuple(encoded), {}, frame)
        # The run itself may have put another stream there meanwhile.
        self._as_one(op, functools.partial(shows, to=self._streams), tuple(given), {}, frame)

    def _stream_of(self, file: Any) -> str | None:
        """Return the name in `sys` of the stream that `print` writes to; None if it has none.

        A stream that the run itself has put there is not the screen.
        """
        if file is None and sys.stdout is None and self._streams["stdout"] is not None:
            return None
        written = sys.stdout if file is None else file
        return next((name for name, one in self._streams.items() if one is written), None)

    def _printable(self, value: Any) -> str:
        """Return the printed text of a value, with marks for unguarded parts."""
        if not _is_plainly_printed(value):
            return str(value)
        outer, self.printing = self.printing, True
        try:
            if type(value) is torch.Size:  # which is written in C++, and would ask for the sizes
                return f"torch.Size([{', '.join(map(str, value))}])"
            return str(value)
        finally:
            self.printing = outer

    def guard_text(self, text: str) -> str:
        """Guard the values in a text, and return it without marks."""
        parts, frame = [], outside_scalars()
        for part in self.parts(text):
            if not isinstance(part, str):
                self._writer.guard(ValueGuard, part[0], part[1], Use.FORMAT, frame)
            parts.append(part if isinstance(part, str) else part[1])
        return "".join(parts)


def shows(
    stream: str, flush: bool, *parts: str, to: Mapping[str, Any] = MappingProxyType(vars(sys))
) -> None:
    """Print a text in parts to a stream, by its name; each replay prints it again."""
    print(*parts, sep="", end="", file=to[stream], flush=flush)


shows.__name__ = shows.__qualname__ = "print"
shows.gives_nothing = True  # type: ignore[attr-defined]


def _is_plainly_printed(value: Any, depth: int = 0) -> bool:
    """Return whether only torch's and Python's own code formats a value."""
    kind = type(value)
    if kind in PLAIN_TYPES or kind in TRACED or kind in _TENSORS:
        return True
    if kind is torch.Size:
        return depth == 0
    if depth > _DEEPEST or kind not in (tuple, list, dict):
        return False
    items = (*value, *value.values()) if kind is dict else value
    return all(_is_plainly_printed(item, depth + 1) for item in items)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DEEPEST = 4


def goes_to_screen(frame: FrameType) -> bool:
    """Return whether the text being formatted goes only to `print` or `torch._assert`."""
    code, names = frame.f_code, frame.f_globals
    used = _uses(place_at(code, frame.f_lasti))
    if used is None:
        return False
    local = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    if "print" in used and (
        "print" in names or "print" in local or frame.f_builtins is not vars(builtins)
    ):
        return False
    return "_assert" not in used or (names.get("torch") is torch and "torch" not in local)


@functools.cache
def _uses(place: Any) -> frozenset[str] | None:
    """Return the function that receives a text formatted at a place; None if unknown."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if isinstance(node, ast.FormattedValue):  # which has its own place since Python 3.12
        node = file.parents[node]  # type: ignore[assignment]
    if node is None or not _is_text(node):
        return None
    return _receiver(file, node, ())


def _receiver(file: SourceFile, node: ast.AST, seen: tuple[str, ...]) -> frozenset[str] | None:
    """Follow a text outwards, to the function that receives it."""
    for child, parent in file.ancestors(node):
        if isinstance(parent, ast.FormattedValue) and not parent.format_spec:
            if parent.conversion in _AS_IT_IS:
                continue
            return None
        if isinstance(parent, (ast.JoinedStr, ast.BinOp)) and _puts_together(parent):
            continue
        if isinstance(parent, ast.Call) and isinstance(file.parents.get(parent), ast.Expr):
            return _call_receiver(parent, child)
        if isinstance(parent, ast.keyword):
            continue
        if isinstance(parent, ast.Assign) and child is parent.value and len(parent.targets) == 1:
            target = parent.targets[0]
            if isinstance(target, ast.Name) and target.id not in seen:
                return _receiver_by_name(file, parent, target.id, seen)
        return None
    return None


def _call_receiver(call: ast.Call, child: ast.AST) -> frozenset[str] | None:
    called = call.func
    if isinstance(called, ast.Name) and called.id == "print":
        is_plain = all(keyword.arg in ("sep", "end", "file", "flush") for keyword in call.keywords)
        return frozenset({"print"}) if is_plain and child in call.args else None
    if not (
        isinstance(called, ast.Attribute)
        and called.attr == "_assert"
        and isinstance(called.value, ast.Name)
        and called.value.id == "torch"
    ):
        return None
    named = [keyword for keyword in call.keywords if keyword.arg == "message"]
    return frozenset({"_assert"}) if child in (*call.args[1:2], *named) else None


def _receiver_by_name(
    file: SourceFile, assigned: ast.Assign, name: str, seen: tuple[str, ...]
) -> frozenset[str] | None:
    """Return the function that receives a text through a local variable."""
    function = _function_around(file, assigned)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    found: frozenset[str] = frozenset()
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return None
        if isinstance(node, ast.Name) and node.id in _LOOKING:
            return None
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            inner = _function_around(file, node)
            used = _receiver(file, node, (*seen, name)) if inner is function else None
            if used is None:
                return None
            found |= used
        elif isinstance(node, ast.AugAssign) and getattr(node.target, "id", None) == name:
            return None
    return found


_LOOKING = frozenset({"locals", "vars", "eval", "exec"})


def _function_around(file: SourceFile, node: ast.AST) -> ast.AST | None:
    inside = (*FUNCTIONS, ast.ClassDef, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
    return next((parent for _, parent in file.ancestors(node) if isinstance(parent, inside)), None)


def _puts_together(node: ast.AST) -> bool:
    """Return whether an expression concatenates its texts unchanged."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and (_is_text(node.left) or _is_text(node.right))
    )


def _is_text(node: ast.AST) -> bool:
    """Return whether an expression makes a text, and does nothing to the texts of its values."""
    if isinstance(node, ast.Constant):
        return type(node.value) is str
    if isinstance(node, ast.JoinedStr):
        return all(map(_is_plainly_formatted, node.values))
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Add):
            return _is_text(node.left) or _is_text(node.right)
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            text = node.left.value
            return type(text) is str and set(_PERCENTS.findall(text)) <= {"%%", "%s", "%r"}
        return False
    if not isinstance(node, ast.Call) or node.keywords:
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in ("str", "repr", "format") and len(node.args) in (1, 2)
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "format"
        and isinstance(node.func.value, ast.Constant)
        and type(node.func.value.value) is str
        and _has_plain_fields(node.func.value.value)
    )


_AS_IT_IS = (-1, ord("s"))  # conversions that leave a text as it is
_PERCENTS = re.compile("%[^a-zA-Z%]*.")


def _is_plainly_formatted(value: ast.AST) -> bool:
    """Return whether a part of an f-string does nothing with a value's text."""
    if not isinstance(value, ast.FormattedValue):
        return True
    specification = value.format_spec
    if specification is None:
        return True
    if value.conversion != -1 or _is_text(value.value):
        return False
    return isinstance(specification, ast.JoinedStr) and all(
        isinstance(part, ast.Constant) for part in specification.values
    )


def _has_plain_fields(text: str) -> bool:
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError:
        return False
    return all(
        not (conversion and specification) and "{" not in (specification or "")
        for _, _, specification, conversion in fields
    )
