"""Flow steps as rows of plain JSON, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bendtrace._plain import Codec
from bendtrace.flow import (
    AssertFlowStep,
    EscapeFlowStep,
    FlowStep,
    FlowSteps,
    IndexFlowStep,
    LogicalFlowStep,
    LoopFlowStep,
    ShapeFlowStep,
)
from bendtrace.recording.sites import Place, Span

__all__ = ["flow_rows", "flow_steps_of"]

_CLASSES = {
    cls.__name__: cls
    for cls in (
        FlowStep,
        AssertFlowStep,
        EscapeFlowStep,
        IndexFlowStep,
        LogicalFlowStep,
        LoopFlowStep,
        ShapeFlowStep,
    )
}


def flow_rows(steps: Iterable[FlowStep], codec: Codec) -> list[dict[str, Any]]:
    """Return flow steps as plain JSON: `FlowStep.to_dict` with nothing lost."""
    rows = []
    for step in steps:
        row = step.to_dict() | {"value": step.value, "offset": step.place.offset}
        rows.append({key: codec.encode(value) for key, value in row.items()})
    return rows


def flow_steps_of(rows: Iterable[Mapping[str, Any]], codec: Codec) -> FlowSteps:
    """Return the flow steps that rows describe.

    Raises:
        ValueError: if a value makes no sense.
        LookupError: if something is missing.
    """
    return FlowSteps([_step({key: codec.decode(row[key]) for key in row}) for row in rows])


def _step(row: dict[str, Any]) -> FlowStep:
    span = Span(row["line"], row["column"], row["end_line"], row["end_column"])
    cls = _CLASSES[row["step"]]
    more = {}
    if cls is LoopFlowStep:
        more = {"bound": row["bound"], "iterations": row["iterations"]}
    return cls(
        name=row["name"],
        value=row["value"],
        kind=row["kind"],
        place=Place(row["file"], row["function"], span, row["offset"]),
        text=row["text"],
        module_path=row["module_path"],
        guard=row["guard"],
        iteration=tuple(row["iteration"]),
        **more,
    )
