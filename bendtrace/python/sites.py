"""Places in the source: folders, frames, chains of instructions; places as people write them."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from bendtrace.python.bytecode import cache_by_code
from bendtrace.python.internals import is_off

# Where in the model a run is, judging by the frames on the stack.


PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# The folders whose code runs while a model is recorded.
TRACER = tuple(os.path.join(PACKAGE, name, "") for name in ("python", "record", "tape", "watch"))
# What runs around the model's own code, and holds no values but those that it says.
MACHINERY = (
    *TRACER,
    os.path.join(PACKAGE, "insert", ""),
    os.path.join(PACKAGE, "engine", "dispatcher.py"),
    *(os.path.join(PACKAGE, f"{name}.py") for name in ("hooks", "module", "_trace")),
)
TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_NOT_THE_MODEL = (TORCH, *MACHINERY)
# Seen from inside, what lies behind this code is not the model: the run itself.
BEHIND: set[types.CodeType] = set()


def outside_scalars() -> FrameType:
    """Return the frame that used a traced scalar, even if the tracer did so on its behalf."""
    # `inspect.stack` and `traceback` read source files for each frame, which takes milliseconds.
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(TRACER) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def users_level() -> int:
    """Return the `stacklevel` with which a warning of our caller shows the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, TORCH)):
        frame, level = frame.f_back, level + 1
    return level


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither torch's own nor the tracer's."""
    found: FrameType | None = frame
    while (
        found is not None
        and found.f_code.co_filename.startswith(_NOT_THE_MODEL)
        and found.f_code not in BEHIND
    ):
        found = found.f_back
    return found or frame


def users_code(frame: FrameType) -> types.CodeType:
    """The innermost code that is not torch's own."""
    return users_frame(frame).f_code


def user_place(frame: FrameType | None) -> str:
    """Return the place of the nearest code of the model; "" once the model has returned."""
    while frame is not None and frame.f_code not in BEHIND:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, TORCH)) and not _is_stdlibs(file):
            return full_place_text(file, frame.f_lineno)
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Return whether code in a file may be the model's, not torch's, Python's or bendtrace's."""
    return not file.startswith((PACKAGE, TORCH, "<")) and not _is_stdlibs(file)


def _is_stdlibs(file: str) -> bool:
    return file.startswith(("<frozen", _STDLIB)) and "site-packages" not in file


def definition(function: Callable[..., Any]) -> str:
    """Return the place where a module's forward, or a function, is defined."""
    called = function.forward if isinstance(function, nn.Module) else function
    while isinstance(called, functools.partial):
        called = called.func
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return "" if code is None else full_place_text(code.co_filename, code.co_firstlineno)


# Where in the source something happened: the chain of instructions that led to it.


_OVERRIDES = torch.overrides.__file__
# Functions of torch's in Python hand their calls to the tracer as their first act.
_HANDING = (
    *TRACER,
    _OVERRIDES,
    *(
        os.path.join(TORCH, *names)
        for names in (
            ("nn", "functional.py"), ("functional.py",), ("_tensor.py",), ("_jit_internal.py",),
        )
    ),
)  # fmt: skip


class Span(NamedTuple):
    """A span of source text: lines count from 1, columns from 0 in UTF-8 bytes."""

    line: int
    column: int
    end_line: int
    end_column: int

    def holds(self, other: Span) -> bool:
        """Return whether it contains `other`."""
        return self[:2] <= other[:2] and other[2:] <= self[2:]

    def text(self, file: str) -> str:
        """The source text, with collapsed white space; "" if the file cannot be read."""
        lines = [line.encode() for line in linecache.getlines(file)[self.line - 1 : self.end_line]]
        if not lines:
            return ""
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        return " ".join(b" ".join(lines).decode(errors="replace").split())


class InstructionPlace(NamedTuple):
    """One instruction of one function."""

    file: str
    function: str
    span: Span
    offset: int

    @property
    def line(self) -> int:
        """First line of the instruction's expression."""
        return self.span.line

    @property
    def in_torch(self) -> bool:
        """Return whether torch has the code, or the tracer at its entry points into torch."""
        return self.file.startswith((TORCH, *TRACER))

    @property
    def text(self) -> str:
        """The source text of the instruction's expression."""
        return self.span.text(self.file)

    def __str__(self) -> str:
        return full_place_text(self.file, self.line)


@dataclass(frozen=True, eq=False)
class Site:
    """The chain of instructions from a module's forward down to one op.

    Two ops with the same site in the same module are passes of one node.
    """

    # (code object, instruction offset) pairs, innermost first.
    chain: tuple[tuple[CodeType, int], ...]

    @cached_property
    def places(self) -> tuple[InstructionPlace, ...]:
        """The call chain as places in the source, innermost first."""
        return tuple(_place_of_code(code, offset) for code, offset in self.chain)

    @cached_property
    def identity(self) -> tuple[int, ...]:
        """Numbers that are equal for sites at the same expression of the source.

        The compiler writes the test of a `while` twice: before the loop and at its end. The numbers
        are valid as long as the code objects in `chain` are alive.
        """
        return tuple(
            number
            for code, offset in self.chain
            for number in (id(code), first_offset(code, offset))
        )

    @cached_property
    def level(self) -> int:
        """Index in `chain` of the innermost code outside torch.

        If there is none, the index of the innermost code other than that which passes a call to the
        tracer.
        """
        outside = next((i for i, place in enumerate(self.places) if not place.in_torch), None)
        if outside is not None:
            return outside
        return next((i for i, p in enumerate(self.places) if not p.file.startswith(_HANDING)), 0)

    @cached_property
    def guarded(self) -> tuple[InstructionPlace, ...]:
        """The places of the model's code that are covered by the exception table of their code."""
        return tuple(
            place
            for (code, offset), place in zip(self.chain, self.places, strict=True)
            if not place.file.startswith((TORCH, PACKAGE)) and is_covered(code, offset)
        )

    @property
    def place(self) -> InstructionPlace:
        """The innermost place outside torch, or else the innermost."""
        return self.places[self.level]


class SiteTable:
    """Finds the `Site` of running code: one object for each distinct site.

    A chain ends at the boundaries (the call of a module, the run).
    """

    def __init__(self, boundaries: frozenset[CodeType]) -> None:
        # Code objects are compared by identity because hashing one is slow; the sites keep
        # them alive, so that an identity is never used twice.
        self.boundaries: set[int] = {id(code) for code in boundaries}  # their identities
        self._sites: dict[tuple[int, ...], Site] = {}

    def find(self, frame: FrameType) -> Site:
        """Return the site of the current instruction of `frame`."""
        key: list[int] = []
        walked: FrameType | None = frame
        while walked is not None:
            code = id(walked.f_code)
            if code in self.boundaries:
                break
            key.append(code)
            key.append(walked.f_lasti)
            walked = walked.f_back
        whole = tuple(key)
        site = self._sites.get(whole)
        if site is None:
            site = _alive.get(whole)
            if site is None:
                site = _site(frame, walked)
                _alive[whole] = site
            self._sites[whole] = site
        return site


# Sites of earlier runs, as long as somebody has them: with a site its code objects are alive, so
# that the numbers in its key mean the same. (That key also says where a chain ends: code at which
# one ends is never in the middle of another.)
_alive: weakref.WeakValueDictionary[tuple[int, ...], Site] = weakref.WeakValueDictionary()


def _site(frame: FrameType, end: FrameType | None) -> Site:
    """Return the site of the instruction that `frame` is at, within the call that `end` made."""
    chain = []
    inner: FrameType | None = frame
    while inner is not None and inner is not end:
        chain.append((inner.f_code, instruction_at(inner.f_code, inner.f_lasti)))
        inner = inner.f_back
    same = tuple(number for code, offset in chain for number in (id(code), offset))
    site = _alive.get(same)
    if site is None:
        site = _alive[same] = Site(tuple(chain))
    return site


@cache_by_code
def _positions_in(code: CodeType) -> list[tuple[int | None, ...]]:
    """Return where each instruction of code is in the source."""
    return list(code.co_positions())


def place_at(code: CodeType, offset: int) -> InstructionPlace:
    """Return the place of a frame's current instruction."""
    return _place_of_code(code, instruction_at(code, offset))


def _place_of_code(code: CodeType, offset: int) -> InstructionPlace:
    positions = _positions_in(code)[offset // 2]
    line = positions[0] or code.co_firstlineno
    if is_off("places"):
        return InstructionPlace(code.co_filename, code.co_name, Span(line, 0, line, 0), offset)
    span = Span(line, positions[2] or 0, positions[1] or line, positions[3] or 0)
    return InstructionPlace(code.co_filename, code.co_name, span, offset)


def instruction_at(code: CodeType, offset: int) -> int:
    """Return where an instruction is, whichever of its parts a frame says it is at.

    A call of a Python function is left at the end of the instruction's inline cache once it has
    been specialised. Python 3.11 has two instructions for a call, of which the first then does it
    all.
    """
    raw = code.co_code
    while raw[offset] == _CACHE and offset:
        offset -= 2
    if _PRECALL is not None and raw[offset] == _PRECALL:
        offset += 2
        while raw[offset] == _CACHE:
            offset += 2
    return offset


_PRECALL, _CACHE = dis.opmap.get("PRECALL"), dis.opmap.get("CACHE")
# `+=` to `^=` among the arguments of this instruction in Python 3.11 to 3.14; `iadd` in the labels
# of logs shows a change.
_BINARY_OP, _FIRST_ASSIGNMENT, _LAST_ASSIGNMENT = dis.opmap["BINARY_OP"], 13, 25


def assigns(code: CodeType, offset: int) -> bool:
    """Return whether an instruction is an assignment with an operator, such as `x += y`."""
    raw = code.co_code
    return raw[offset] == _BINARY_OP and _FIRST_ASSIGNMENT <= raw[offset + 1] <= _LAST_ASSIGNMENT


def operates(code: CodeType, offset: int) -> bool:
    """Return whether an instruction is an operator with two sides, such as `x / y`."""
    return code.co_code[offset] == _BINARY_OP


def first_offset(code: CodeType, offset: int) -> int:
    """Return the offset of an instruction; for copies of a `while` test, of the first copy."""
    return _repeated_tests(code).get(offset, offset)


@cache_by_code
def _repeated_tests(code: CodeType) -> dict[int, int]:
    """Return, for instructions that repeat the test of a `while`, those that they repeat."""
    return dict(_repetitions(code))


def _repetitions(code: CodeType) -> Iterator[tuple[int, int]]:
    instructions = list(dis.get_instructions(code))
    index = {instruction.offset: i for i, instruction in enumerate(instructions)}
    for position, jump in enumerate(instructions):
        if "JUMP_BACKWARD" not in jump.opname or jump.argval not in index:
            continue
        # The body begins after the first copy of the test; the second one ends in this jump.
        before = instructions[: index[jump.argval]]
        positions = {instruction.positions for instruction in before}
        repeated = []
        while position >= 0 and instructions[position].positions in positions:
            repeated.append(instructions[position])
            position -= 1
        here = {instruction.positions for instruction in repeated}
        first = [
            one
            for one in reversed(before)
            if one.positions in here and _is_computing_instruction(one)
        ]
        second = [one for one in repeated if _is_computing_instruction(one)]
        # Where they jump to differs, and so what they leave behind.
        if all(map(_same_instruction, first, second)) and len(first) >= len(second):
            for one, other in zip(first, second, strict=False):
                yield other.offset, one.offset


def _is_computing_instruction(one: dis.Instruction) -> bool:
    return not one.opname.startswith(("POP_TOP", "NOP", "NOT_TAKEN", "JUMP_FORWARD", "JUMP_BACK"))


def _same_instruction(one: dis.Instruction, other: dis.Instruction) -> bool:
    same = one.opname == other.opname or ("JUMP" in one.opname and "JUMP" in other.opname)
    return same and one.positions == other.positions


def is_covered(code: CodeType, offset: int) -> bool:
    """Return whether an error at an instruction may be handled, judging by the exception table."""
    if is_off("handlers"):
        return True
    if not code.co_exceptiontable:
        return False
    # Private to dis, but the only reader of the table (Python 3.11 to 3.14).
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return any(entry.start <= offset < entry.end for entry in entries)


# Places as people read and write them

# The cells of runs that were loaded: the notebook that they ran in may be gone.
_loaded: dict[str, str] = {}
_WRITTEN = re.compile(r"(.+\.\w+|(?:Cell )?In\[\d+\]|<.+>):(\d+)", re.DOTALL)


def _notebook_cell(file: str) -> str:
    """Return the cell of a notebook that IPython compiled under a file name; "" if none."""
    # IPython is not imported for this: whoever runs in it has imported it. `format_code_name` is
    # public since IPython 8.0; `test_places.py` would notice a change.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    asked = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = None if asked is None else asked(file)
    return " ".join(found) if found else _loaded.get(file, "")


def path_text(file: str) -> str:
    """Return the path of a file, or the cell of a notebook: `Cell In[3]`."""
    return _notebook_cell(file) or file


def file_text(file: str) -> str:
    """Return the name of a file without its folder, or the cell of a notebook: `Cell In[3]`."""
    return _notebook_cell(file) or os.path.basename(file)


def place_text(file: str, line: int | None) -> str:
    """Return the file name and the line: `model.py:12`, `Cell In[3]:7`."""
    return f"{file_text(file)}:{line}"


def full_place_text(file: str, line: int | None) -> str:
    """Return the path and the line: `/home/me/model.py:12`, `Cell In[3]:7`."""
    return f"{path_text(file)}:{line}"


def read_place(text: str) -> tuple[str, int] | None:
    """Return the file and the line of a place as text; None if the text is not a place.

    Example:
        >>> read_place("model.py:41"), read_place("In[3]:7"), read_place("relu_1:2")
        (('model.py', 41), ('Cell In[3]', 7), None)
    """
    found = _WRITTEN.fullmatch(text)
    if found is None:
        return None
    file = found[1]
    return f"Cell {file}" if file.startswith("In[") else file, int(found[2])


def is_file(file: str, asked: str) -> bool:
    """Return whether a file is meant by its path, the end of its path, or its cell."""
    if asked == _notebook_cell(file):
        return True
    file, asked = os.path.normpath(file), os.path.normpath(asked)
    return file == asked or file.endswith(os.sep + asked)


# Of any machine: a run that was loaded has the paths of the one that it ran on.
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, or to Python, and not to the user."""
    return file.startswith(_STANDARD) or _INSTALLED.search(file) is not None


def cells_among(files: Iterable[str]) -> dict[str, str]:
    """Return the files among some that are cells of a notebook, with their names."""
    found = {file: _notebook_cell(file) for file in files}
    return {file: cell for file, cell in found.items() if cell}


def add_cells(cells: Mapping[str, str]) -> None:
    """Add the cells of a run that was loaded."""
    _loaded.update(cells)
