"""What the page of a stepped run has: events, what is seen at each, changes, and other sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bendtrace.flow import FlowStep
from bendtrace.history.entries import Source
from bendtrace.recording.recorder import Recording
from bendtrace.stepping.looks import Looks, text_of
from bendtrace.stepping.places import is_of, place_of
from bendtrace.stepping.visit import Edit, Event

__all__ = ["Version", "stepped_data"]


class Version(NamedTuple):
    """A run that was gone through once more, to look at each position.

    Attributes:
        recording: its record.
        events: its events.
        edits: its changes, by the number of the event.
        own_answers: what the values would answer to the questions that are answered by hand.
        looks: what was seen.
        output: its output.
    """

    recording: Recording
    events: Sequence[Event]
    edits: Mapping[int, Edit]
    own_answers: Mapping[int, Any]
    looks: Looks
    output: Any

    def answer(self, number: int) -> Any:
        """Return the answer to a question."""
        if number in self.edits:
            return self.edits[number].value
        return self.recording.tape.guards[self.events[number].index].answer


def stepped_data(
    version: Version, steps: Sequence[FlowStep], sides: Mapping[int, Sequence[Version]], budget: int
) -> dict[str, Any]:
    """Return what the viewer needs, besides the log, to go through a run.

    Args:
        version: the run.
        steps: its flow steps.
        sides: for questions, by their number, the runs in which they had another answer.
        budget: how many characters the texts of a page may have.
    """
    rows = _Rows(steps)
    events = rows.of(version, 0, {})
    others = [
        {
            "at": number,
            "answer": text_of(side.answer(number)),
            "events": rows.of(side, number + 1, _lines(side, number)),
            "end": _end(side),
        }
        for number, found in sides.items()
        for side in found
    ]
    return {
        "budget": budget,
        "events": events,
        "end": _end(version),
        "sides": others,
        "frames": rows.frames,
        "texts": rows.texts,
    }


def _end(version: Version) -> dict[str, str]:
    error = version.recording.error
    if error is not None:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    return {"output": text_of(version.output)}


class _Rows:
    """Events as plain values; frames and texts are tables that they share.

    Args:
        steps: the flow steps of the run that is shown.
    """

    def __init__(self, steps: Sequence[FlowStep]) -> None:
        self._steps: dict[int | None, list[tuple[int, FlowStep]]] = {}
        for number, step in enumerate(steps):
            self._steps.setdefault(step.guard, []).append((number, step))
        self._places: dict[Any, int] = {}
        self.frames: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def of(
        self, version: Version, first: int, lines: Mapping[int, str | None]
    ) -> list[dict[str, Any]]:
        """Return the events of a run from some event on.

        Args:
            version: the run.
            first: the event.
            lines: Python that makes changes of the run, by their numbers; None for a change that
                the page cannot repeat.
        """
        found = []
        for number in range(first, len(version.events)):
            row = self._row(version, number)
            before = [line for n, line in lines.items() if n < number]
            if None in before:
                del row["go"]
                row.pop("change", None)
            elif before:
                said = "; ".join(map(str, before))
                row |= {key: f"{said}; {row[key]}" for key in ("go", "change") if key in row}
            found.append(row)
        return found

    def _row(self, version: Version, number: int) -> dict[str, Any]:
        event, looks, tape = version.events[number], version.looks, version.recording.tape
        place = place_of(event, tape)
        row: dict[str, Any] = {"kind": event.kind, "go": f"run.goto({number})"}
        if place is not None:
            row["source"] = Source(place.file, place.line, place.function, place.text, "")
        if event.kind == "op":
            row |= {"name": version.recording.names[event.index], "op": event.index}
            if hasattr(tape.ops[event.index].meta, "shape"):
                row["change"] = f"run.set({number}, torch.zeros_like(run.value({number})))"
        else:
            answer = version.answer(number)
            # A number has many others, so the present one is there to be edited.
            other = not answer if type(answer) is bool else answer
            row |= {
                "name": "" if place is None else place.text,
                "answer": text_of(answer),
                "change": f"run.answer({number}, {_written(other)})",
                "step": next(
                    (n for n, step in self._steps.get(event.index, ()) if is_of(step, event, tape)),
                    None,
                ),
            }
        if number in version.edits:
            row["given"] = text_of(version.edits[number].value)
        if number in version.own_answers:
            row["own"] = text_of(version.own_answers[number])
        if number in looks.frames:
            row["frames"] = tuple(map(self._frame, looks.frames[number]))
        if number in looks.results:
            row["result"] = self._number(self.texts, looks.results[number])
        return row

    def _frame(self, frame: Any) -> int:
        if frame not in self._places:
            self._places[frame] = len(self.frames)
            self.frames.append(
                {
                    "source": Source(frame.file, frame.line, frame.function, "", ""),
                    "variables": tuple(
                        (name, self._number(self.texts, text)) for name, text in frame.variables
                    ),
                }
            )
        return self._places[frame]

    def _number(self, rows: list[str], text: str) -> int:
        if text not in self._places:
            self._places[text] = len(rows)
            rows.append(text)
        return self._places[text]


def _lines(side: Version, number: int) -> dict[int, str | None]:
    """Return the lines that lead from the run that is shown to the other side of a question."""
    later = [n for n in sorted(side.edits) if n > number]
    return {
        n: f"run.answer({n}, {_written(side.answer(n))})"
        if side.events[n].kind == "question"
        else None
        for n in (number, *later)
    }


def _written(answer: Any) -> str:
    """Return the answer to a question as Python."""
    if type(answer) is float and not math.isfinite(answer):
        return f"float({str(answer)!r})"
    return repr(answer)
