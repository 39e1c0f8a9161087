"""Errors that ops of generated code raise."""

from __future__ import annotations

from types import FrameType
from typing import Any

from bendtrace.recording.recorder import Recording
from bendtrace.replay.source import Code, Departure
from bendtrace.tape.tape import AfterOp, describe_raised


def departure_by(error: Exception, recording: Recording, code: Code) -> Departure | None:
    """Turn what an op raised into a departure; None if it was not an op that raised it."""
    place = place_of(error, code)
    if place is None:
        return None
    index, frame = place
    values = {**frame.f_locals, f"v{index}": error.with_traceback(None)}
    return Departure(AfterOp(index), describe_raised(recording.tape.ops[index], error), values)


def values_in(names: dict[str, Any]) -> dict[int, Any]:
    """Return the values of ops among the variables of generated code."""
    return {
        int(name[1:]): value
        for name, value in names.items()
        if name[0] == "v" and name[1:].isdecimal()
    }


def place_of(error: Exception, code: Code) -> tuple[int, FrameType] | None:
    """Return which op of some code raised an error, and the frame that it was in."""
    frame, line = frame_of(error, code)
    index = code.op_of_line.get(line)
    return None if frame is None or index is None else (index, frame)


def frame_of(error: Exception, code: Code) -> tuple[FrameType | None, int]:
    """Return the frame of some code that an error came from, and the line there."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code.function.__code__:
        traceback = traceback.tb_next
    return (None, 0) if traceback is None else (traceback.tb_frame, traceback.tb_lineno)
