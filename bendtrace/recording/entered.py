"""Plain numbers for code that a run enters and that is not known to ask traced ones.

Installed code is known if it belongs to torch or to a package that uses torch
(`tape/plain_numbers.py`). The arguments of any other are made plain where it begins, and so are the
numbers that code of the model makes while it is called from there.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import types
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from bendtrace.environment.executed import Ran
from bendtrace.recording.encoding import scalars_in, without_traced
from bendtrace.recording.values import Values
from bendtrace.source.bytecode import assign
from bendtrace.source.sites import PACKAGE
from bendtrace.tape.plain_numbers import needs_plain_numbers


class Entered:
    """Makes numbers plain where code begins.

    Args:
        ran: says which code begins.
        values: makes the numbers of the run.
        own: objects of the recorder, which are no values of the run.
        outermost: the code that called the model.
    """

    def __init__(self, ran: Ran, values: Values, own: tuple[object, ...], outermost: CodeType):
        self._ran, self._values = ran, values
        self._own, self._outermost = own, outermost
        ran.enters_foreign = self._enters_foreign
        ran.enters_model = self._enters_model

    def end(self, frame: FrameType | None) -> None:
        """Leave no traced scalar to a run that goes on unwatched.

        Args:
            frame: the code that runs.
        """
        self._values.gives_plain = True
        while frame is not None and frame.f_code is not self._outermost:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                self._make_plain(frame)
            frame = frame.f_back

    def _enters_model(self, frame: FrameType) -> None:
        """Code of the model begins, which the estimate of what it reaches may not contain."""
        if not self._values.gives_plain and needs_plain_numbers(frame.f_code, frame.f_globals):
            self._pass_plain(frame)
            self.end(frame.f_back)

    def _enters_foreign(self, frame: FrameType) -> None:
        self._values.is_called_by_foreign = self._is_called_by_foreign
        self._pass_plain(frame)

    def _is_called_by_foreign(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not self._outermost:
            if self._ran.is_foreign(frame):
                return True
            frame = frame.f_back
        return False

    def _pass_plain(self, frame: FrameType) -> None:
        """Make the arguments of a function plain that has just begun."""
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        count += bool(code.co_flags & inspect.CO_VARKEYWORDS)
        variables = frame.f_locals
        for name in code.co_varnames[:count]:
            value = variables.get(name)
            plain = self._plain(value)
            if plain is not value:
                variables[name] = plain
        # A profiler's caller writes them back in 3.11; since 3.13, they are the variables.
        if sys.version_info[:2] == (3, 12):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def _make_plain(self, frame: FrameType) -> None:
        for name, value in [*frame.f_locals.items()]:
            plain = self._plain(value)
            if plain is not value:
                assign(frame, name, plain)

    def _plain(self, value: Any) -> Any:
        """Return a value with plain numbers, which are guarded, also behind functions in it."""
        scalars = list(scalars_in(value))
        for scalar in scalars:
            scalar._consume("type")
        for inner in _behind(value):
            if isinstance(inner, types.CellType):
                inner.cell_contents = self._plain(inner.cell_contents)
            elif isinstance(inner, FrameType):
                self._make_plain(inner)
            else:
                self._plain(inner)
        memo = {id(thing): thing for thing in self._own}
        return without_traced(value, memo) if scalars else value


def _behind(value: Any) -> Iterator[Any]:
    """Yield what functions, generators and iterators among arguments hold out of sight."""
    for item in (value, *value) if type(value) in (tuple, list) else (value,):
        function = item.__func__ if type(item) is types.MethodType else item
        if type(function) is types.FunctionType:
            for cell in function.__closure__ or ():
                if next(scalars_in(_content(cell)), None) is not None:
                    yield cell
        elif type(item) is types.GeneratorType:
            if item.gi_frame is not None and not item.gi_running:
                yield item.gi_frame
        elif type(item).__name__.endswith("iterator") or type(item) in _ITERATORS:
            yield from gc.get_referents(item)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


_ITERATORS = (map, zip, filter, enumerate, reversed)
