"""Exported models that run in another process, on inputs that they were not exported from.

`python -m tests.export_elsewhere` prints the table of docs/how_to/export.md.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import bendtrace as bt
from bendtrace.errors import ExportError
from bendtrace.export.exporting import Exported, difference, rounding_errors, tensors_and_numbers_in
from bendtrace.export.machine import AnalysedRun, Machine, Question
from bendtrace.record.recorded_call import Signature, record
from tests.export_models import MODELS, Example

__all__ = ["KNOWN", "TARGETS", "Outcome", "outcome"]

KNOWN = 40  # inputs that a model is exported from, at most
TRIED = 3000  # inputs that these are picked from
TARGETS = {"pt2": ".pt2", "aoti": ".aoti.pt2", "onnx": ".onnx"}
TOLERANCE = 1e-5
RUNNER = Path(__file__).with_name("export_runner.py")


@dataclass(frozen=True)
class Outcome:
    """How a program did on inputs that it was not exported from.

    Attributes:
        equal: how many outputs are equal: bit by bit for `pt2`, within 1e-5 for the others,
            or as close as eager is to itself.
        refused: how many inputs go to a side never seen, and raised the error that names it.
        wrong: what went wrong.
        off: the largest difference of a float.
        seconds: how long the export took.
    """

    equal: int
    refused: int
    wrong: tuple[str, ...]
    off: float
    seconds: float

    def __str__(self) -> str:
        refused = f", {self.refused} refused" if self.refused else ""
        return f"{self.equal} equal{refused}, {self.off:.1g} off"


class Known:
    """The sides that a model took with the inputs it was exported from.

    Args:
        model: the model.
        calls: the inputs.
    """

    def __init__(self, model: Any, calls: list[Any]) -> None:
        self.model, self._signature = model, Signature(model)
        machine = Machine([self._recorded(args) for args in calls])
        self._questions: dict[Any, Question] = {
            question.run.recording.tape.states[question.number].key: question
            for question in machine.questions
        }

    def _recorded(self, args: Any) -> Any:
        return record(self.model, args, {}, self._signature, reads_states=True)

    def first_unseen(self, args: Any) -> tuple[str | None, Any]:
        """Return the first question that gets an answer never seen, if any, and the output."""
        recording = self._recorded(args)
        run, tape = AnalysedRun(recording), recording.tape
        for number in run.questions():
            question = self._questions.get(tape.states[number].key)
            if question is None:  # torch's Python asks more of some sizes than of others
                continue
            if tape.guards[number].answer not in [way.answer for way in question.ways]:
                return question.place, recording.result
        return None, recording.result


def telling(model: Any, calls: Iterable[Any]) -> list[Any]:
    """Return the inputs that take a side which none before them took, `KNOWN` at most."""
    bended = bt.BendedModule(model)
    found: list[Any] = []
    with torch.no_grad():
        for args in calls:
            traces = bended.stats.traces
            bended(*args)
            if bended.stats.traces > traces:
                found.append(args)
            if len(found) == KNOWN:
                break
    return found


def outcome(example: Example, target: str, folder: Path, most: int, seed: int = 2) -> Outcome:
    """Export a model to a file, and run that on new inputs where the model's source is not.

    Args:
        example: the model.
        target: a key of `TARGETS`.
        folder: where the files go.
        most: how many new inputs there are.
        seed: which new inputs.
    """
    model = example.model()
    calls = telling(model, itertools.islice(example.stream(1), TRIED))
    path = folder / f"model{TARGETS[target]}"
    begun = time.perf_counter()
    made = bt.BendedModule(model).export(*calls, to=path)
    seconds = time.perf_counter() - begun
    others = list(itertools.islice(example.stream(seed), most))
    torch.save(others, folder / "inputs.pt")
    files = [str(path), str(folder / "inputs.pt"), str(folder / "outputs.pt")]
    # -I: neither the folder of the runner nor PYTHONPATH is searched for modules.
    command = [sys.executable, "-I", str(RUNNER), target, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=500)
    if done.returncode:
        raise RuntimeError(done.stderr)
    with torch.no_grad():
        return _judged(made, Known(model, calls), others, torch.load(files[-1]), target, seconds)


def _judged(
    made: Exported, known: Known, inputs: list[Any], outputs: list[Any], target: str, seconds: float
) -> Outcome:
    tolerance = None if target == "pt2" else TOLERANCE
    equal, refused, off = 0, 0, 0.0
    wrong: list[str] = []
    for number, (args, given) in enumerate(zip(inputs, outputs, strict=True)):
        place, wanted = known.first_unseen(args)
        if isinstance(given, str):
            named = {one.place for one in made.unseen if one.message in given}
            if named != {place}:
                wrong.append(f"input {number} raises {given!r}; unseen is {place}")
            refused += 1
            continue
        if place is not None:
            wrong.append(f"input {number} is not refused: {place}")
            continue
        different = difference(given, wanted, tolerance)
        if different is not None and tolerance is not None:
            errors = rounding_errors(known.model, (args, {}), wanted)
            different = difference(given, wanted, tolerance, errors)
        if different is not None:
            wrong.append(f"input {number}: {different}")
            continue
        equal += 1
        for one, other in zip(given, tensors_and_numbers_in(wanted), strict=True):
            if one.is_floating_point() and one.numel():
                off = max(off, float((one.double() - other.double()).abs().max()))
    return Outcome(equal, refused, tuple(wrong), off, seconds)


def main(names: list[str]) -> None:
    """Print how all models do, for all targets."""
    rows = []
    for name in names or MODELS:
        cells = [name]
        for target in TARGETS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = outcome(MODELS[name], target, Path(folder), 1000)
                except ExportError as error:
                    cells.append(f"refused: {error}")
                else:
                    cells.append(f"{found}" + "".join(f"\n{one}" for one in found.wrong[:3]))
                    print(name, target, found.seconds, file=sys.stderr, flush=True)
            print(cells, file=sys.stderr, flush=True)
        rows.append(cells)
    print(tabulate(rows, ["model", *TARGETS.values()], tablefmt="github"))


if __name__ == "__main__":
    main(sys.argv[1:])
